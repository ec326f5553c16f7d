"""What bounds plain decoding on this device, and what a given acceptance length can buy.

A decoding step reads every weight once and the keys and values of its context; reading them at the
device's measured bandwidth is the least time a step can take. Probes measure bandwidth and compute
here and now; byte counts come from the modules themselves.
"""

import time
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, computed_field

Bound = Literal["bandwidth", "compute", "host"]

_CPU_BYTES = 256 << 20
_GPU_BYTES = 4 << 30
_PROBE_REPEATS = 5
_BOUND_SHARE = 0.5


class Roofline(BaseModel):
    """A plain decoding step against the device's limits. Bytes and seconds are of one step."""

    model_config = ConfigDict(frozen=True)

    weight_bytes: float = Field(description="Weights read in a step, the head's included.")
    kv_bytes: float = Field(description="Keys and values read in a step, at the mean context measured.")
    draft_bytes: float = Field(description="Weights that the drafter reads in a round, the head's included.")
    bandwidth: float = Field(description="Measured by a matrix-vector product: bytes a second.")
    flops: float = Field(description="Measured by a large matrix product: operations a second.")
    step_seconds: float = Field(description="Measured time of a plain step.")
    bandwidth_share: float = Field(description="Of that time, what reading needs at least.")
    compute_share: float = Field(description="Of that time, what computing needs at least.")
    bound: Bound = Field(description="What the step waits for.")
    expected_speedup: float = Field(
        description="Acceptance length times (step / (verification + draft)), each by its bytes alone."
    )
    measured_speedup: float = Field(description="As measured.")

    @computed_field(description="The same in words.")  # type: ignore[prop-decorator]
    @property
    def sentence(self) -> str:
        """What bounds decoding, and what acceptance can buy, for a reader."""
        read = f"reading {_size(self.weight_bytes)} of weights at {_size(self.bandwidth)} a second"
        if self.bound == "bandwidth":
            share = min(self.bandwidth_share, 1.0)
            what = f"{share:.0%} of decoding time is {read}; nothing but fewer steps will help"
        elif self.bound == "compute":
            share = min(self.compute_share, 1.0)
            what = f"{share:.0%} of decoding time is arithmetic; drafts verified in vain cost time"
        else:
            what = (
                f"only {self.bandwidth_share:.0%} of decoding time is {read}; the rest is the host's overhead"
            )
        return (
            f"{what}. This acceptance length can give {self.expected_speedup:.2f}x by bytes alone; "
            f"{self.measured_speedup:.2f}x was measured."
        )


def assess(
    *,
    weight_bytes: float,
    kv_bytes: float,
    draft_bytes: float,
    parameters: float,
    concurrency: int,
    step_seconds: float,
    bandwidth: float,
    flops: float,
    acceptance_length: float,
    measured_speedup: float,
) -> Roofline:
    """Put a measured step beside the limits.

    parameters: of target and head, each used by one multiply-add a token. step_seconds: of one step of
    `concurrency` requests together.
    """
    reading = (weight_bytes + concurrency * kv_bytes) / bandwidth
    computing = 2.0 * parameters * concurrency / flops
    bandwidth_share, compute_share = reading / step_seconds, computing / step_seconds
    bound: Bound = "host"
    if max(bandwidth_share, compute_share) >= _BOUND_SHARE:
        bound = "bandwidth" if bandwidth_share >= compute_share else "compute"
    return Roofline(
        weight_bytes=weight_bytes,
        kv_bytes=kv_bytes,
        draft_bytes=draft_bytes,
        bandwidth=bandwidth,
        flops=flops,
        step_seconds=step_seconds,
        bandwidth_share=bandwidth_share,
        compute_share=compute_share,
        bound=bound,
        expected_speedup=acceptance_length * weight_bytes / (weight_bytes + draft_bytes),
        measured_speedup=measured_speedup,
    )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def probe_bandwidth(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes a second that a matrix-vector product reads, the best of a few: decoding's own access."""
    size = _CPU_BYTES if device.type == "cpu" else _GPU_BYTES
    columns = 4096
    rows = size // columns // dtype.itemsize
    matrix = torch.ones(rows, columns, device=device, dtype=dtype)
    vector = torch.ones(columns, device=device, dtype=dtype)
    return matrix.numel() * dtype.itemsize / _best(lambda: torch.mv(matrix, vector), device)


def probe_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a large square matrix product, the best of a few."""
    side = 1024 if device.type == "cpu" else 8192
    a = torch.ones(side, side, device=device, dtype=dtype)
    return 2.0 * side**3 / _best(lambda: a @ a, device)


def _best(operation: Callable[[], object], device: torch.device) -> float:
    operation()
    best = float("inf")
    for _ in range(_PROBE_REPEATS):
        _wait(device)
        started = time.perf_counter()
        operation()
        _wait(device)
        best = min(best, time.perf_counter() - started)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
