"""The deployment guide's commands and its computed example, for tests and for renewing the example.

python -m tests.support.guide     # writes the cost example into charts/README.md
"""

import json
import re
import shlex
import tempfile
from pathlib import Path
from unittest import mock

from typer.testing import CliRunner

from jobs.cli import app
from tests.support.planning import QWEN3_8B, QWEN36_27B

ROOT = Path(__file__).parents[2]
README = ROOT / "charts" / "README.md"
BEGIN, END = "<!-- cost: begin (made by python -m tests.support.guide) -->", "<!-- cost: end -->"
_CONFIGS = {"Qwen/Qwen3-8B": QWEN3_8B, "Qwen/Qwen3.6-27B": QWEN36_27B}


def commands(program: str, readme: Path = README) -> list[list[str]]:
    """Commands of the guide's shell blocks that call `program`, in order, as words; the program left out."""
    return [words[1:] for words in _lines(readme) if words[:1] == [program]]


def for_a_cluster(readme: Path = README) -> list[list[str]]:
    """All that call helm or kubectl, in order, as words, with paths that hold in any folder."""
    found = [words for words in _lines(readme) if words[:1] in (["helm"], ["kubectl"])]
    return [[str(ROOT / w) if w.startswith(("charts/", "./charts")) else w for w in words] for words in found]


def _lines(readme: Path) -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", readme.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def programs(readme: Path = README) -> set[str]:
    """Every program that the guide calls."""
    return {words[0] for words in _lines(readme)}


def run_plan(words: list[str]) -> str:
    """What a `dflash plan` of the guide prints, with the hub's config.json from these tests."""
    with tempfile.TemporaryDirectory() as folder:

        def model_folder(model: str, revision: str | None, *, weights: bool) -> Path:
            Path(folder, "config.json").write_text(json.dumps(_CONFIGS[model]))
            return Path(folder)

        with mock.patch("jobs.cli.plan_cost.model_folder", model_folder):
            result = CliRunner().invoke(
                app, [str(ROOT / w) if w.endswith(".yaml") else w for w in words], catch_exceptions=False
            )
    assert result.exit_code == 0, result.output
    return result.stdout


def example() -> str:
    """The part of the example's plan that the guide shows: the table, and what is recommended."""
    words = next(words for words in commands("dflash") if "--price" in words)
    said = run_plan(words)
    head = said[: said.index("memory per pod")].rstrip()
    lines = [line.rstrip() for line in head.splitlines()]
    return "```\n" + "\n".join(line for line in lines if line) + "\n```"


def embed(readme: str) -> str:
    """The README with its example renewed."""
    before, _, rest = readme.partition(BEGIN)
    _, found, after = rest.partition(END)
    assert found, f"README.md lacks the lines {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{example()}\n\n{END}{after}"


if __name__ == "__main__":
    README.write_text(embed(README.read_text()))
