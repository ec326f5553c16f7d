"""The `dflash` command line. Starts in a fraction of a second: nothing heavy is imported before it is needed.

Other parts add commands with a module in this package that has `app`, a `typer.Typer`; they are listed
in `_MOUNTED` and imported only when they are asked for.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from dflash.errors import DflashError, ExitCode

_MOUNTED = {
    "dataset": "Look into a generated dataset.",
    "report": "Read evaluation reports.",
    "serve-args": "Print the flags that serve the promoted drafter.",
}

app = typer.Typer(
    name="dflash",
    help="Train DFlash drafters for speculative decoding, each declared in one file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

File = Annotated[Path, typer.Argument(help="A Drafter file (YAML or JSON).", show_default=False)]


@app.command()
def run(
    file: File,
    plain: Annotated[bool, typer.Option("--plain", help="Lines of text instead of the live view.")] = False,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Take the storage location over from where the Drafter was before."),
    ] = False,
    warm_up: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Instead of the run: the whole chain on one percent of the prompts, in about this time, as "
            "5m; ends in go (exit code 0) or no-go, and keeps measured rates for `dflash plan`.",
        ),
    ] = None,
) -> None:
    """Make a Drafter true on this machine: generate, train, evaluate; what is done already is kept."""
    if warm_up is not None:
        from jobs.cli.warm_up import seconds_of, warm_up_file

        raise typer.Exit(warm_up_file(file, seconds_of(warm_up), plain=plain))
    from jobs.cli.run import run_file

    raise typer.Exit(run_file(file, plain=plain, take_over=take_over))


@app.command()
def status(
    file: File,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for programs.")] = False,
) -> None:
    """Show how far a Drafter is, also while it runs elsewhere."""
    from jobs.cli.status import show_status

    show_status(file, as_json=as_json)


@app.command()
def watch(
    file: File,
    once: Annotated[bool, typer.Option("--once", help="Show it one time, and leave.")] = False,
) -> None:
    """Watch a run: stages, curves, the bottleneck, alerts and cost. Also while it runs elsewhere."""
    from jobs.cli.watch import watch_file

    watch_file(file, once=once)


@app.command()
def validate(
    file: File,
    static: Annotated[
        bool, typer.Option("--static", help="Look at the file alone: no model, prompts or storage.")
    ] = False,
) -> None:
    """Check a Drafter file, and that its model, prompts and storage can be used. Starts nothing."""
    from jobs.cli.validate import validate_file

    validate_file(file, static=static)


@app.command()
def plan(
    file: File,
    *,
    prompts: Annotated[
        int | None, typer.Option(min=1, help="Prompts. Default: counted in the file's own.")
    ] = None,
    tokens_per_prompt: Annotated[float | None, typer.Option(min=1, help="Mean length of a prompt.")] = None,
    tokens_per_response: Annotated[
        float | None, typer.Option(min=1, help="Mean length of an answer, thinking included.")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="A GPU and how many, as b200:7, or a JSON file with a profile. Default: what a warm-up ran "
            "on, else h100."
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option(min=0, help="Of one GPU for one hour. Default: spec.tracking.gpuHourPrice."),
    ] = None,
    network: Annotated[
        float | None,
        typer.Option(min=0.001, help="Gbit/s of a pod. Default: all GPUs are in one node."),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The target's config.json, where target.model is not at hand.")
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with measured rates, which replace estimates. Default: what a warm-up measured."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object for programs.")] = False,
) -> None:
    """Estimate memory, time and cost before anything is paid for. Starts nothing, reads no weights."""
    from jobs.cli.plan_cost import Flags, plan_file

    flags = Flags(
        prompts=prompts,
        prompt_tokens=tokens_per_prompt,
        response_tokens=tokens_per_response,
        gpu=gpu,
        price=price,
        network=network,
        config=config,
        measured=measured,
    )
    plan_file(file, flags, as_json=as_json)


@app.command()
def schema() -> None:
    """Print the JSON schema of a Drafter file."""
    import orjson

    from dflash.resource import Drafter

    document = Drafter.model_json_schema(by_alias=True)
    typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())


def main() -> None:
    """Entry point: runs a command and leaves with its exit code; a failure is told in one sentence."""
    _mount(sys.argv[1:])
    try:
        app()
    except DflashError as error:
        typer.echo(f"dflash: {error}", err=True)
        sys.exit(int(error.exit_code))
    except OSError as error:
        if error.errno != 28:  # ENOSPC
            raise
        typer.echo(f"dflash: disk full: {error}; free some space and run again", err=True)
        sys.exit(int(ExitCode.TEMPORARY))


def _mount(arguments: list[str]) -> None:
    """Add the commands of other parts: for real the one that is called, by name where help is shown."""
    called = next((a for a in arguments if not a.startswith("-")), None)
    for name, text in _MOUNTED.items():
        module = f"jobs.cli.{name.replace('-', '_')}"
        if find_spec(module) is None:
            continue
        if called == name:
            app.add_typer(import_module(module).app, name=name, help=text)
        elif called is None:
            app.add_typer(typer.Typer(), name=name, help=text)
