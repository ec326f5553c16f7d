"""What a run needs and costs, from shapes and hardware: pure functions, no torch, no network."""
