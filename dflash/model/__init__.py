"""The frozen target, the drafter, its mask and its checkpoint."""

import os

# oneDNN keeps a compiled product for every shape it has seen, 1,024 of them by default. Batches differ in
# shape from step to step, so on a CPU a drafter grew by some 20 MB a step; making one anew costs next
# to nothing. Read when the first product runs.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
