"""The operator's process needs what its image has, and no more: no torch, nothing of the jobs."""

import subprocess
import sys

_CHECK = """
import sys
heavy = {"torch", "transformers", "pyarrow", "matplotlib", "wandb", "zmq", "safetensors", "jinja2", "numpy"}
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in heavy:
            raise ImportError(f"the operator must not need {name}")
sys.meta_path.insert(0, Refuse())
import operators.__main__
from dflash.data.prompts import fingerprint_prompts
from dflash.evaluation.gate import promote
from dflash.model.source import fingerprint
assert not heavy & set(sys.modules)
assert not {m for m in sys.modules if m == "jobs" or m.startswith("jobs.")}
"""


def test_the_operator_imports_neither_torch_nor_the_jobs() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CHECK], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
