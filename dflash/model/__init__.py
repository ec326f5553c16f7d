"""The frozen target, the drafter, its mask and its checkpoint."""
