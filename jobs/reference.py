"""Renders the jobs' settings and the command line as Markdown, from their definitions.

`make references` rewrites the part of jobs/README.md between the markers; a test fails while it is
out of date.
"""

from pathlib import Path
from typing import Any

import typer.main
from typer.testing import CliRunner

from dflash.resource.reference import embed, row, summary
from jobs.cli import app
from jobs.settings import DrafterSettings, EvaluateSettings, GenerateSettings, JobSettings, TargetSettings

README = Path(__file__).parent / "README.md"
_JOBS: tuple[type[JobSettings], ...] = (GenerateSettings, TargetSettings, DrafterSettings, EvaluateSettings)


def markdown() -> str:
    """The commands of `dflash` as its own help shows them, then the flags of each job."""
    commands = [line for path in _commands() for line in _help(path)]
    return "\n".join([*commands, "", *(line for job in _JOBS for line in _job(job))])


def _commands() -> list[list[str]]:
    """Every command, a group's commands after one another."""
    paths: list[list[str]] = []
    for name, command in _children(typer.main.get_command(app)).items():
        below = _children(command)
        paths += [[name, child] for child in below] if below else [[name]]
    return paths


def _children(command: Any) -> dict[str, Any]:
    return getattr(command, "commands", {})


def _help(path: list[str]) -> list[str]:
    shown = CliRunner().invoke(
        app, [*path, "--help"], env={"COLUMNS": "100", "TERM": "dumb"}, prog_name="dflash"
    )
    return ["```", *(line.rstrip() for line in shown.output.strip().splitlines()), "```", ""]


def _job(settings: type[JobSettings]) -> list[str]:
    head = ["| flag | type | default | what it is |", "|---|---|---|---|"]
    rows = [row(f"--{name.replace('_', '-')}", field) for name, field in settings.model_fields.items()]
    return [f"#### {summary(settings)}", "", *head, *rows, ""]


if __name__ == "__main__":
    README.write_text(embed(README.read_text(), markdown()))
