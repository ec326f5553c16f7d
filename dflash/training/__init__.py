"""Training: which sample when, the drafters' group, optimiser, checkpoints, and the loop that drives them."""
