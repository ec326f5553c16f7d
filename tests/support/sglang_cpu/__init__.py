"""The real SGLang on a machine without a GPU, for tests: environment and flags that make its server start.

Its wheel is made for CUDA. A stub of the driver's library lets its kernels' library load; a few flags and
variables choose the parts that run on a CPU. Nothing of SGLang is changed. Slow: it says nothing of speed.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PYTHON = ROOT / ".venv-serve" / "bin" / "python"
"""Interpreter of the serving environment (`make serve-env`)."""

SERVER_ARGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-cuda-graph",
    "--sleep-on-idle",  # else a server with nothing to do takes a core from the one that has
    *("--mem-fraction-static", "0.3"),
    *("--max-total-tokens", "16384"),
    *("--max-running-requests", "64"),
]

_DRIVER_CALLS = (
    "cuCtxFromGreenCtx",
    "cuCtxPopCurrent_v2",
    "cuCtxPushCurrent_v2",
    "cuDevResourceGenerateDesc",
    "cuDevSmResourceSplitByCount",
    "cuDeviceGetDevResource",
    "cuDriverGetVersion",
    "cuGetErrorString",
    "cuGetProcAddress_v2",
    "cuGreenCtxCreate",
    "cuGreenCtxDestroy",
    "cuGreenCtxGetDevResource",
    "cuPointerGetAttribute",
    "cuStreamCreate",
)
"""What SGLang's kernel library takes from the CUDA driver; each answers 100, CUDA_ERROR_NO_DEVICE."""


def available() -> bool:
    """Whether the serving environment is installed and a C compiler is there for the stub."""
    return PYTHON.exists() and shutil.which("cc") is not None


def environment(threads: int = 1) -> dict[str, str]:
    """Variables to add to a server's own, or to those of a worker that starts one."""
    return {
        "SGLANG_USE_CPU_ENGINE": "1",
        "LD_LIBRARY_PATH": f"{_driver_stub()}:{os.environ.get('LD_LIBRARY_PATH', '')}".rstrip(":"),
        "DFLASH_SGLANG_PYTHON": str(PYTHON),
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }


def _driver_stub() -> Path:
    """Folder with a libcuda.so.1 that has no device; compiled once."""
    folder = Path(tempfile.gettempdir(), f"dflash-libcuda-stub-{os.getuid()}")
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        source = "\n".join(f"int {name}(void) {{ return 100; }}" for name in _DRIVER_CALLS)
        partial = folder / f"partial-{os.getpid()}.so"
        subprocess.run(
            ["cc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-x", "c", "-", "-o", str(partial)],
            input=source.encode(),
            check=True,
        )
        partial.rename(library)
    return folder
