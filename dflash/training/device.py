"""Which device a target or a drafter works on, and whether the pod around it is fit for that.

Not for where the channel's buffers live: that is `dflash.channel`.
"""

import os
from pathlib import Path

import torch

from dflash.errors import ConfigurationError

_LEAST_SHARED_MIB = 512
"""NCCL keeps about 10 MiB for each channel and peer in shared memory; container runtimes give 64 MiB."""


def device_of(backend: str) -> torch.device:
    """The GPU that this process was given, unless the CPU's transport was asked for or there is none.

    On a GPU, shared memory too small for NCCL is a ConfigurationError, before anything is loaded: NCCL
    itself fails at the first collective, and with some numbers of peers only.
    """
    if backend == "gloo" or not torch.cuda.is_available():
        return torch.device("cpu")
    require_shared_memory()
    return torch.device("cuda")


def require_shared_memory(folder: Path = Path("/dev/shm")) -> None:
    """Raise ConfigurationError where shared memory is smaller than NCCL needs."""
    if not folder.exists():
        return
    size = os.statvfs(folder)
    mebibytes = size.f_blocks * size.f_frsize >> 20
    if mebibytes < _LEAST_SHARED_MIB:
        raise ConfigurationError(
            f"{folder} has {mebibytes} MiB and NCCL needs {_LEAST_SHARED_MIB} at least; raise the chart's "
            "jobs.shmSize, or give the container a larger one (docker run --shm-size 8g)"
        )
