"""`make demo`: fill in where the demo's model and prompts are, then do what a user does.

The last line printed is the path of report.json. Everything written lies in `.demo/`, apart from
the unpacked model, which is kept in the user's cache. `ENGINE=sglang make demo` generates and evaluates
through the serving engine instead of in process, slowly, on this machine's CPU.
"""

import json
import os
import string
import sys
from pathlib import Path

from dflash.engines.server import PYTHON
from dflash.errors import ConfigurationError
from jobs.demo import sglang_cpu
from jobs.demo.model import prepare

_HERE = Path(__file__).parent
_ENGINES = ("transformers", "sglang")


def main() -> None:
    """Write `.demo/drafter.yaml` and hand over to `dflash run`."""
    engine = os.environ.get("ENGINE") or "transformers"
    if engine not in _ENGINES:
        sys.exit(f"ENGINE={engine} is not known; use one of {', '.join(_ENGINES)}")
    folder = Path(".demo")
    folder.mkdir(exist_ok=True)
    served = engine == "sglang"
    if served:
        try:
            os.environ[PYTHON] = str(sglang_cpu.write_interpreter(folder.resolve() / "sglang-python"))
        except ConfigurationError as error:
            sys.exit(str(error))
    template = string.Template((_HERE / "drafter.yaml").read_text())
    declared = template.substitute(
        MODEL=prepare(),
        PROMPTS=_HERE / "prompts.jsonl",
        ENGINE=engine,
        SERVER_ARGS=json.dumps(sglang_cpu.SERVER_ARGS if served else []),
        DTYPE="bfloat16" if served else "float32",  # the engine's own drafting runs in bf16 alone
    )
    resource = folder / "drafter.yaml"
    resource.write_text(declared)
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.execv(sys.executable, [sys.executable, "-m", "jobs.cli", "run", str(resource)])


if __name__ == "__main__":
    main()
