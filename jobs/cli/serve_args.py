"""`dflash serve-args`: the launch flags with which SGLang and vLLM serve a Drafter's promoted drafter."""

import json
import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from dflash import layout
from dflash.errors import ConfigurationError
from dflash.evaluation import launch
from dflash.model.checkpoint import shape_of_config
from dflash.model.facts import TargetFacts
from dflash.model.source import model_folder
from dflash.resource.load import load_resource
from dflash.storage.commit import fetch_commit

app = typer.Typer(rich_markup_mode=None)


class Server(StrEnum):
    """A serving engine."""

    sglang = "sglang"
    vllm = "vllm"


@app.callback(invoke_without_command=True)
def serve_args(
    file: Annotated[Path, typer.Argument(help="A Drafter file (YAML or JSON).", show_default=False)],
    engine: Annotated[
        Server | None, typer.Option(help="Print one engine's flags alone, for a script.", show_default=False)
    ] = None,
) -> None:
    """Print the flags that serve the promoted drafter; it is copied next to the storage first."""
    from jobs.cli.connect import connected, home_of

    drafter = load_resource(file)
    with connected(drafter, shared=True) as connection:
        promoted: dict[str, Any] | None = connection.store.find_json(layout.promoted(drafter.metadata.name))
        if promoted is None:
            raise ConfigurationError(
                f"{drafter.metadata.name} has no promoted drafter; run `dflash run {file}`, and see its gate"
            )
        folder = home_of(drafter, file).export
        fetch_commit(connection.store, layout.export(promoted["drafter"]), folder)
    shape = shape_of_config(json.loads((folder / "config.json").read_text()), str(folder / "config.json"))
    target = drafter.spec.target
    hybrid = TargetFacts.from_folder(model_folder(target.model, target.revision, weights=False)).hybrid
    flags = {
        Server.sglang: launch.sglang_drafter_flags(str(folder), shape, hybrid=hybrid),
        Server.vllm: launch.vllm_drafter_flags(str(folder), shape),
    }
    if engine is not None:
        typer.echo(shlex.join(flags[engine]))
        return
    revision = ["--revision", target.revision] if target.revision else []
    sglang = ["python", "-m", "sglang.launch_server", "--model-path", target.model, *revision]
    typer.echo(shlex.join([*sglang, "--dtype", target.dtype, *flags[Server.sglang]]))
    typer.echo(
        shlex.join(["vllm", "serve", target.model, *revision, "--dtype", target.dtype, *flags[Server.vllm]])
    )
