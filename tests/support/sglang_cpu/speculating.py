"""DFLASH on the real SGLang on a CPU: what to add to a server's environment and flags."""

from pathlib import Path

from tests.support.sglang_cpu import environment

PLUGIN = Path(__file__).parent / "plugin"
"""A folder that, on PYTHONPATH, makes SGLang load the plug-in in it."""


def speculating_environment(threads: int = 1) -> dict[str, str]:
    """As `environment`, with the plug-in; Triton's kernels are interpreted."""
    plain = environment(threads)
    return {
        **plain,
        "PYTHONPATH": f"{PLUGIN}:{plain['PYTHONPATH']}",
        "SGLANG_PLUGINS": "dflash_on_cpu",
        "TRITON_INTERPRET": "1",
    }
