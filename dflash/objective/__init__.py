"""What the drafter minimises: batches, anchors, weights, the fused head and loss, the step."""
