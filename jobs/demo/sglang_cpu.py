"""The real SGLang on a machine without a GPU: for `ENGINE=sglang make demo`, and for tests.

Its wheel is made for CUDA. A stub of the driver's library lets its kernels' library load; a few flags and
variables choose the parts that run on a CPU; a plug-in of SGLang's own kind brings what DFLASH lacks there.
Nothing of SGLang is changed. Correct and slow: it says nothing of speed.
"""

import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from dflash.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-serve" / "bin" / "python"
"""Interpreter of the serving environment (`make serve-env`)."""
PLUGIN = Path(__file__).parent / "sglang_plugin"
"""A folder that, on PYTHONPATH, makes SGLang load the plug-in in it."""

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


def speculating_environment(threads: int = 1) -> dict[str, str]:
    """As `environment`, for DFLASH: with the plug-in, and Triton's kernels interpreted."""
    plain = environment(threads)
    return {
        **plain,
        "PYTHONPATH": f"{PLUGIN}:{plain['PYTHONPATH']}",
        "SGLANG_PLUGINS": "dflash_on_cpu",
        "TRITON_INTERPRET": "1",
    }


def write_interpreter(path: Path) -> Path:
    """A script that is the serving environment's Python with all that set, so that nobody else has it.

    ConfigurationError when the environment is not installed, or there is no C compiler.
    """
    if not available():
        raise ConfigurationError(
            f"ENGINE=sglang needs {PYTHON}, from `make serve-env`, and a C compiler called cc: install them"
        )
    variables = speculating_environment(threads=os.cpu_count() or 1)
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    path.write_text(f'#!/bin/sh\n{exports}exec {shlex.quote(str(PYTHON))} "$@"\n')
    path.chmod(0o755)
    return path


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
