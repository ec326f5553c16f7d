"""Hardware profiles: what one GPU can do at most, and where each number comes from.

Peaks are dense (no structured sparsity) and per GPU. What a program reaches of them is an
assumption of the plan, not of the profile. Other GPUs come from a JSON file of the same fields.
"""

from pathlib import Path

import orjson
from pydantic import Field, ValidationError

from dflash.errors import ConfigurationError
from dflash.resource.section import Section

GIB = 1024**3


class Gpu(Section):
    """One GPU. Bandwidths in bytes per second, memory in bytes, compute in FLOP per second."""

    name: str = Field(min_length=1, max_length=64, description="Name used on the command line.")
    bf16_flops: float = Field(gt=0, description="Peak dense bf16 matrix FLOP/s.")
    memory_bytes: float = Field(gt=0, description="Device memory.")
    memory_bandwidth: float = Field(gt=0, description="Device memory bandwidth.")
    peer_bandwidth: float = Field(gt=0, description="To another GPU of the node, one direction.")
    source: str = Field(min_length=1, max_length=400, description="Where the numbers come from.")


_GPUS = (
    Gpu(
        name="b200",
        bf16_flops=2.25e15,
        memory_bytes=180e9,
        memory_bandwidth=7.7e12,
        peer_bandwidth=900e9,
        source="NVIDIA DGX/HGX B200 datasheet: 8 GPUs, 72 PFLOPS fp8 sparse, 1,440 GB, 14.4 TB/s NVLink",
    ),
    Gpu(
        name="h200",
        bf16_flops=989e12,
        memory_bytes=141e9,
        memory_bandwidth=4.8e12,
        peer_bandwidth=450e9,
        source="NVIDIA H200 SXM datasheet: 1,979 TFLOPS bf16 sparse, 141 GB, 4.8 TB/s, 900 GB/s NVLink",
    ),
    Gpu(
        name="h100",
        bf16_flops=989e12,
        memory_bytes=80e9,
        memory_bandwidth=3.35e12,
        peer_bandwidth=450e9,
        source="NVIDIA H100 SXM datasheet: 1,979 TFLOPS bf16 sparse, 80 GB, 3.35 TB/s, 900 GB/s NVLink",
    ),
    Gpu(
        name="a100",
        bf16_flops=312e12,
        memory_bytes=80e9,
        memory_bandwidth=2.039e12,
        peer_bandwidth=300e9,
        source="NVIDIA A100 80 GB SXM datasheet: 312 TFLOPS bf16, 2,039 GB/s, 600 GB/s NVLink",
    ),
    Gpu(
        name="rtx-pro-6000",
        bf16_flops=503e12,
        memory_bytes=96e9,
        memory_bandwidth=1.792e12,
        peer_bandwidth=50e9,
        source="NVIDIA RTX PRO 6000 Blackwell datasheet: 4,000 TOPS fp4 sparse, 96 GB, 1,792 GB/s, PCIe 5",
    ),
    Gpu(
        name="a6000",
        bf16_flops=154.8e12,
        memory_bytes=48e9,
        memory_bandwidth=768e9,
        peer_bandwidth=25e9,
        source="NVIDIA RTX A6000 datasheet: 309.7 TFLOPS tensor sparse, 48 GB, 768 GB/s, PCIe 4 x16",
    ),
    Gpu(
        name="l40s",
        bf16_flops=362e12,
        memory_bytes=48e9,
        memory_bandwidth=864e9,
        peer_bandwidth=25e9,
        source="NVIDIA L40S datasheet: 362.05 TFLOPS bf16, 48 GB, 864 GB/s, PCIe 4 x16",
    ),
)

GPUS = {gpu.name: gpu for gpu in _GPUS}
"""The built-in profiles, by name."""


def find_gpu(name: str) -> Gpu:
    """A built-in profile by name, or one from a JSON file. ConfigurationError when it is neither."""
    if name in GPUS:
        return GPUS[name]
    path = Path(name)
    if not path.is_file():
        known = ", ".join(GPUS)
        raise ConfigurationError(f"--gpu {name}: neither a known GPU ({known}) nor a file with a profile")
    try:
        return Gpu.model_validate(orjson.loads(path.read_bytes()))
    except (ValidationError, orjson.JSONDecodeError) as error:
        fields = ", ".join(field.alias or key for key, field in Gpu.model_fields.items())
        raise ConfigurationError(
            f"--gpu {name}: not a profile ({error}); give the fields {fields}"
        ) from error
