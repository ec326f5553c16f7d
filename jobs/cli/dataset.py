"""`dflash dataset`: look into a dataset, check one that someone else made, or take it instead of generating.

Reads and prints; all judging is `dflash.generation`'s.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import orjson
import typer

from dflash.errors import ConfigurationError

if TYPE_CHECKING:
    from dflash.data.render import Renderer
    from dflash.generation.gate import Limits
    from dflash.generation.report import Example, Report
    from dflash.resource import Drafter
    from dflash.storage.store import Store

app = typer.Typer(help="Look into a generated dataset.", no_args_is_help=True, rich_markup_mode=None)

File = Annotated[Path, typer.Argument(help="A Drafter file (YAML or JSON).", show_default=False)]
Data = Annotated[
    str,
    typer.Argument(
        help="JSON lines or Parquet: prompt_ids + output_ids, input_ids + loss_mask, or messages.",
        show_default=False,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object for programs.")]


@app.command()
def report(file: File, as_json: AsJson = False) -> None:
    """What a Drafter's generated dataset holds: lengths, drops with examples, repeated answers, scripts."""
    from dflash.data.dataset import Dataset
    from dflash.generation.report import of_dataset

    resource, limits, renderer = _declared(file)
    with _dataset_of(resource) as (store, name), Dataset.open(store, name) as dataset:
        _show(of_dataset(dataset, dataset.rejects(), limits, renderer), as_json)


@app.command()
def check(
    data: Data,
    model: Annotated[str, typer.Option(help="Model whose tokenizer and chat template made the data.")],
    block_size: Annotated[int, typer.Option(help="Block size of the drafter to be trained.")] = 16,
    thinking: Annotated[bool, typer.Option(help="Render messages with thinking on.")] = True,
    as_json: AsJson = False,
) -> None:
    """Judge a dataset that someone else made, before anything is rented for it. Exit code 78 when refused."""
    from dflash.data.foreign import read_foreign
    from dflash.data.render import Renderer
    from dflash.generation.gate import Judge, Limits
    from dflash.generation.report import new_report, of_file
    from dflash.model.tokenizer import load_tokenizer
    from dflash.resource.generation import Gate

    _quiet()
    tokenizer = load_tokenizer(model)
    renderer = Renderer(tokenizer, thinking=thinking)
    judge = Judge.of(Limits.of(Gate(), block_size), tokenizer)
    told = new_report(judge.limits)
    for _ in of_file(read_foreign(data, Path.cwd(), renderer), judge, renderer, told):
        pass
    _show(told, as_json)
    if (refusal := told.tally.refusal(final=True)) is not None:
        raise ConfigurationError(f"{data} is refused by the quality gate: {refusal}")


@app.command("import")
def import_(file: File, data: Data) -> None:
    """Commit a dataset that someone else made as this Drafter's, so that generation is skipped."""
    from dflash.data.foreign import Foreign, read_foreign
    from dflash.data.parts import find_manifest, write_dataset
    from dflash.data.rows import Row
    from dflash.generation.gate import Judge
    from dflash.generation.report import new_report, of_file

    resource, limits, renderer = _declared(file)
    judge = Judge.of(limits, renderer.tokenizer)

    def judged() -> Iterator[Foreign]:
        told = new_report(limits)
        yield from of_file(read_foreign(data, Path.cwd(), renderer), judge, renderer, told)
        if (refusal := told.tally.refusal(final=True)) is not None:
            raise ConfigurationError(f"{data} is refused by the quality gate: {refusal}")

    def good() -> Iterator[Row]:
        return (sample.row for sample in judged() if sample.reason is None)

    for _ in judged():  # all of it once before anything is written
        pass
    with _dataset_of(resource) as (store, name):
        if find_manifest(store, name) is not None:
            typer.echo(f"dataset {name} is complete already: nothing was imported")
            return
        manifest = write_dataset(store, name, good())
    typer.echo(f"dataset {name}: {manifest.samples} samples, {manifest.output_tokens} supervised tokens")


def _quiet() -> None:
    logging.getLogger("dflash").setLevel(logging.WARNING)


def _declared(file: Path) -> "tuple[Drafter, Limits, Renderer]":
    """The resource with its gate's limits and its renderer."""
    from dflash.data.render import Renderer
    from dflash.generation.gate import Limits
    from dflash.model.tokenizer import load_tokenizer
    from dflash.resource.load import load_resource

    _quiet()
    resource = load_resource(file)
    spec = resource.spec
    tokenizer = load_tokenizer(spec.target.model, spec.target.revision)
    limits = Limits.of(spec.generation.gate, spec.drafter.block_size)
    return resource, limits, Renderer(tokenizer, thinking=spec.generation.thinking)


@contextmanager
def _dataset_of(resource: "Drafter") -> "Iterator[tuple[Store, str]]":
    """The store and the name of the dataset that a resource declares."""
    from jobs.cli.connect import connected
    from operators.observe import outputs_of, write_inputs

    with connected(resource, shared=True) as connection:
        outputs = outputs_of(resource, connection.store)
        write_inputs(connection.store, outputs, "generation")
        yield connection.store, outputs.hashes.dataset


def _show(told: "Report", as_json: bool) -> None:
    from dflash.generation.gate import CAUSES

    figures = told.as_json()
    if as_json:
        typer.echo(orjson.dumps(figures, option=orjson.OPT_INDENT_2).decode())
        return
    seen = max(1, figures["seen"])
    typer.echo(f"{figures['samples']} of {figures['seen']} samples are kept")
    typer.echo(
        f"  tokens         {figures['prompt_tokens']} in prompts, {figures['output_tokens']} supervised"
    )
    typer.echo(f"  with thinking  {figures['thinking']}")
    typer.echo(f"  same answers   {figures['same_answers']} (equal to an earlier one, token for token)")
    scripts = ", ".join(f"{name} {count}" for name, count in figures["scripts"].items())
    typer.echo(f"  scripts        {scripts} (of those looked at)")
    _bars("supervised tokens", figures["histogram"])
    _bars("prompt tokens", figures["prompt_histogram"])
    for reason, count in told.tally.dropped.most_common():
        typer.echo(
            f"\ndropped: {count} ({count / seen:.1%}) {CAUSES.get(reason, (reason, ''))[0]} [{reason}]"
        )
        for example in told.dropped.get(reason, []):
            _example(example)
    typer.echo("\nkept, for example (what is trained on is coloured):")
    for example in told.kept:
        _example(example)
    refusal = figures["refused"]
    typer.echo(f"\n{'refused: ' + refusal if refusal else 'passes the quality gate'}")


def _bars(title: str, histogram: dict[str, int]) -> None:
    typer.echo(f"\nsamples by {title}")
    most = max(histogram.values(), default=1)
    for edge, count in histogram.items():
        typer.echo(f"  {edge:>8}+ {count:>8} {'#' * round(40 * count / most)}")


def _example(example: "Example") -> None:
    typer.echo(f"  {example.sample_id}")
    typer.echo(f"    {_one_line(example.prompt)}", nl=False)
    typer.secho(_one_line(example.answer), fg=typer.colors.GREEN)


def _one_line(text: str) -> str:
    return text.replace("\n", "\\n")
