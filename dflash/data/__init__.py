"""Prompts, samples and datasets: what is asked, what was answered, and how both lie in the store."""

import os

# Arrow reads this when it is loaded. Its usual allocator keeps tens of megabytes of each thread's for later,
# in a process that holds a few megabytes of rows at a time.
os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
