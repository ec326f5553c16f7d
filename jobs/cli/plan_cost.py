"""`dflash plan`: what a run needs and costs, from a Drafter file and the target's config.json alone.

Reads no weights and starts nothing. The arithmetic is `dflash.planning`; here are only the flags, what can
be counted in the prompts' file, and the tables.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson
import typer
from pydantic import ValidationError
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from dflash.data.prompts import survey_prompts
from dflash.errors import ConfigurationError
from dflash.model.facts import TargetFacts
from dflash.model.shape import DraftShape, resolve_shape
from dflash.model.source import model_folder
from dflash.planning.assumptions import Assumptions
from dflash.planning.hardware import GPUS, Gpu, find_gpu
from dflash.planning.job import Job, Measured
from dflash.planning.memory import PodMemory
from dflash.planning.rates import rates
from dflash.planning.run_plan import COUNTS, Row, RunPlan, estimate_errors, plan_run
from dflash.planning.warm_up import WarmUp, settings_of
from dflash.resource import Drafter, DrafterSpec
from dflash.resource.load import load_resource
from jobs.cli.connect import home_of

_CHARACTERS_PER_TOKEN = 4.0
_WIDTH = 140
"""Columns that the widest table needs; in a narrower terminal lines are wrapped, never cut."""


@dataclass(frozen=True)
class Flags:
    """What the command line says beside the file."""

    prompts: int | None = None
    prompt_tokens: float | None = None
    response_tokens: float | None = None
    gpu: str | None = None
    price: float | None = None
    network: float | None = None
    config: Path | None = None
    measured: Path | None = None


def plan_file(file: Path, flags: Flags, *, as_json: bool) -> None:
    """Print the plan of a Drafter file. ConfigurationError says which flag is missing or wrong."""
    plan, errors = make_plan(file, flags)
    if as_json:
        document = as_data(plan) | ({"estimateErrors": errors} if errors else {})
        typer.echo(orjson.dumps(document, option=orjson.OPT_INDENT_2).decode())
        return
    show_plan(plan, errors)


def make_plan(file: Path, flags: Flags) -> tuple[RunPlan, dict[str, float]]:
    """The plan, and by how much the estimates were off where rates were measured."""
    drafter = load_resource(file)
    spec = drafter.spec
    # What is cheap to check comes first; the facts may have to come from the hub.
    warm_up = None if flags.measured is not None else _warm_up(drafter, file)
    gpu, asked = _gpu(flags.gpu or _same_gpu(warm_up))
    measured = _measured(flags.measured)
    if warm_up is not None:
        measured = Measured(warm_up.generation, warm_up.target, warm_up.drafter)
    assumed, answers = _amounts(spec, flags, warm_up)
    facts = _facts(spec, flags.config)
    if spec.generation.in_flight is not None:
        assumed = assumed.known("generation.inFlight", concurrency=float(spec.generation.in_flight))
    job = Job(
        facts=facts,
        shape=_shape(spec, facts),
        spec=spec,
        answers=answers,
        gpu=gpu,
        price=spec.tracking.gpu_hour_price if flags.price is None else flags.price,
        network=None if flags.network is None else flags.network * 1e9 / 8,
        measured=measured,
    )
    plan = plan_run(job, assumed, sorted({*COUNTS, *asked}))
    if warm_up is not None:
        plan = replace(plan, notes=(*plan.notes, _source(warm_up, gpu)))
    if job.measured is None:
        return plan, {}
    unmeasured = Job(facts, job.shape, spec, answers, gpu, network=job.network)
    errors = estimate_errors(rates(unmeasured, plan.work, assumed), plan.rates)
    return plan, {name: error for name, error in errors.items() if getattr(job.measured, name) is not None}


def _facts(spec: DrafterSpec, config: Path | None) -> TargetFacts:
    if config is None:
        return TargetFacts.from_folder(model_folder(spec.target.model, spec.target.revision, weights=False))
    if config.is_dir():
        return TargetFacts.from_folder(config)
    try:
        return TargetFacts.from_config(orjson.loads(config.read_bytes()), str(config))
    except (OSError, orjson.JSONDecodeError) as error:
        raise ConfigurationError(
            f"--config {config}: cannot be read ({error}); give a model's config.json, or its folder"
        ) from error


def _shape(spec: DrafterSpec, facts: TargetFacts) -> DraftShape:
    """The drafter's sizes. Which token is the mask costs nothing, so the tokenizer is not asked."""
    mask = next(i for i in range(facts.vocab_size - 1, -1, -1) if i not in facts.special_ids)
    model = spec.drafter if spec.drafter.mask_token_id is not None else None
    return resolve_shape(model or spec.drafter.model_copy(update={"mask_token_id": mask}), facts)


def _gpu(text: str) -> tuple[Gpu, list[int]]:
    """`b200`, `b200:7`, `profile.json:8`: the profile, and the count that is asked for."""
    name, colon, count = text.rpartition(":")
    if not colon:
        return find_gpu(text), []
    if not count.isdigit() or int(count) < 1:
        raise ConfigurationError(f"--gpu {text}: {count!r} is no number of GPUs; give for example {name}:8")
    return find_gpu(name), [int(count)]


def _amounts(spec: DrafterSpec, flags: Flags, warm_up: WarmUp | None) -> tuple[Assumptions, float]:
    """Answers to generate and their lengths: from flags, else a warm-up, else the prompts' file."""
    assumed = Assumptions()
    if warm_up is not None:
        assumed = assumed.known(
            "warm-up",
            prompt_tokens=warm_up.prompt_tokens,
            response_tokens=warm_up.response_tokens,
            dropped_share=warm_up.dropped_share,
        )
    if flags.response_tokens is not None:
        assumed = assumed.known("--tokens-per-response", response_tokens=flags.response_tokens)
    if flags.prompt_tokens is not None:
        assumed = assumed.known("--tokens-per-prompt", prompt_tokens=flags.prompt_tokens)
    if flags.prompts is not None:
        return assumed, flags.prompts * (1.0 - spec.prompts.hold_out)
    if "://" in spec.prompts.uri:
        raise ConfigurationError(
            f"prompts.uri: {spec.prompts.uri} is not read for a plan; give --prompts, their number"
        )
    survey = survey_prompts(
        spec.prompts.uri, Path.cwd(), hold_out=spec.prompts.hold_out, limit=spec.prompts.limit
    )
    if flags.prompt_tokens is None and warm_up is None and survey.turns:
        assumed = assumed.about(
            "prompt_tokens",
            survey.characters / survey.turns / _CHARACTERS_PER_TOKEN,
            1.5,
            f"{survey.characters:,} characters in the prompts, about 4 a token",
        )
    return assumed, float(survey.turns)


def _measured(path: Path | None) -> Measured | None:
    if path is None:
        return None
    wanted = 'give {"generation": tok/s, "target": tok/s, "drafter": tok/s}, each of one GPU'
    try:
        found = orjson.loads(path.read_bytes())
        values = {str(name): float(value) for name, value in found.items()}
        measured = Measured(**values)
    except (OSError, orjson.JSONDecodeError, AttributeError, TypeError, ValueError, ValidationError) as error:
        raise ConfigurationError(f"--measured {path}: cannot be used ({error}); {wanted}") from error
    if any(not value > 0 for value in values.values()):
        raise ConfigurationError(f"--measured {path}: rates must be above 0; {wanted}")
    return measured


def _warm_up(drafter: Drafter, file: Path) -> WarmUp | None:
    """What `dflash run --warm-up` measured here; None where it was not run, or with other settings."""
    path = home_of(drafter, file).warm_up
    if not path.exists():
        return None
    found = WarmUp.model_validate_json(path.read_bytes())
    if found.settings != settings_of(drafter.spec):
        typer.echo(f"note: {path} was measured with other settings; warm up again to use it", err=True)
        return None
    return found


def _same_gpu(warm_up: WarmUp | None) -> str:
    """The built-in profile of the GPU that a warm-up ran on, else the usual one."""
    words = re.sub(r"[^a-z0-9]+", "-", warm_up.device.lower()) if warm_up is not None else ""
    return next((name for name in GPUS if name in words), "h100")


def _source(warm_up: WarmUp, gpu: Gpu) -> str:
    return (
        f"rates and lengths were measured by a warm-up on {warm_up.device}; memory and links are those of "
        f"{gpu.name}, as are the first estimates"
    )


def as_data(plan: RunPlan) -> dict[str, Any]:
    """The plan for programs: bytes, seconds and tokens per second, names in camelCase."""
    work = plan.work
    return {
        "gpu": plan.gpu.model_dump(by_alias=True),
        "answers": work.answered,
        "samples": work.samples,
        "generatedTokens": work.generated_tokens,
        "trainedTokens": work.trained_tokens,
        "meanLength": work.length,
        "rates": {
            "generationTokensPerSecond": plan.rates.generation.tokens_per_second,
            "generationBatch": plan.rates.generation.batch,
            "generationBound": plan.rates.generation.bound,
            "targetSamplesPerSecond": plan.rates.target_samples,
            "drafterSamplesPerSecond": plan.rates.drafter_samples,
            "targetFlopsPerSample": plan.rates.target_flops,
            "drafterFlopsPerSample": plan.rates.drafter_flops,
        },
        "pods": [
            {"pod": pod.pod, "parts": pod.parts, "used": pod.used, "left": pod.left, "fits": pod.fits}
            for pod in plan.pods
        ],
        "rows": [_row_data(row) for row in plan.rows],
        "recommended": plan.recommended.gpus if plan.recommended else None,
        "wireBytes": plan.wire_bytes,
        "storeBytes": plan.store_bytes,
        "offlineBytes": plan.offline_bytes,
        "movedMostBy": {
            name: mover
            and {
                "assumption": mover.assumption,
                "value": mover.value,
                "elasticity": mover.elasticity,
                "low": mover.low,
                "high": mover.high,
            }
            for name, mover in plan.movers.items()
        },
        "notes": list(plan.notes),
        "assumptions": {
            entry.name: {
                "value": entry.value,
                "low": entry.low,
                "high": entry.high,
                "unit": entry.unit,
                "source": entry.source,
            }
            for entry in plan.assumptions.entries.values()
        },
    }


def _row_data(row: Row) -> dict[str, Any]:
    return {
        "gpus": row.gpus,
        "targets": row.targets,
        "drafters": row.drafters,
        "fits": row.fits,
        "limit": row.limit,
        "samplesPerSecond": row.samples_per_second,
        "tokensPerSecond": row.tokens_per_second,
        "targetIdle": row.target_idle,
        "generationSeconds": row.generation_seconds,
        "trainingSeconds": row.training_seconds,
        "evaluationSeconds": row.evaluation_seconds,
        "wallSeconds": row.wall_seconds,
        "gpuHours": row.gpu_hours,
        "cost": row.cost,
        "costPerMillionTokens": row.cost_per_million_tokens,
        "wireBytesPerSecond": row.wire_bytes_per_second,
        "linkShare": row.link_share,
    }


def show_plan(plan: RunPlan, errors: dict[str, float]) -> None:
    """Tables and sentences for a person."""
    console = Console(soft_wrap=True)
    console.width = max(console.width, _WIDTH)
    work, rate = plan.work, plan.rates
    console.print(
        f"{work.answered:,.0f} answers of {work.response_tokens:,.0f} tokens to generate; "
        f"{work.samples:,.0f} samples of {work.length:,.0f} tokens, {work.epochs} times: "
        f"{work.trained_tokens / 1e6:,.0f} M tokens to train on"
    )
    console.print(_fleets(plan))
    best = plan.recommended
    if best is None:
        console.print(f"no row fits {plan.gpu.name}")
    else:
        console.print(
            f"recommended: {best.gpus} x {plan.gpu.name} as {best.targets} targets and {best.drafters} "
            f"drafters, {_hours(best.wall_seconds)}, {best.gpu_hours:,.0f} GPU-hours{_money(best)}: the "
            "fastest within a tenth of the cheapest"
        )
    for note in plan.notes:
        console.print(note)
    for name, error in errors.items():
        console.print(f"measured: the first estimate of the {name} rate was {error:+.0%} off")
    console.print(_memory(plan.pods))
    console.print(
        f"generation: {rate.generation.tokens_per_second:,.0f} tok/s per GPU with "
        f"{rate.generation.batch:.0f} answers in flight, bound by {rate.generation.bound}"
    )
    console.print(
        f"training: a target serves {rate.target_samples:.2f} samples/s "
        f"({rate.target_flops / 1e12:.3g} TFLOP each), a drafter trains {rate.drafter_samples:.2f} "
        f"({rate.drafter_flops / 1e12:.3g} TFLOP each): "
        f"{rate.drafter_samples / rate.target_samples:.2f} targets per drafter balance"
    )
    shown = best or plan.rows[-1]
    console.print(
        f"wire: {_bytes(plan.wire_bytes)} in all, {shown.wire_bytes_per_second * 8 / 1e9:.3g} Gbit/s, "
        f"{shown.link_share:.1%} of what the busiest link carries"
    )
    console.print(
        f"S3: {_bytes(plan.store_bytes)}; stored hidden states would take {_bytes(plan.offline_bytes)}, "
        "so they are streamed"
    )
    console.print(_moved(plan))
    for entry in plan.assumptions.entries.values():
        span = "" if entry.known else f" ({entry.low:g} to {entry.high:g})"
        console.print(
            f"assumed: {entry.name} {entry.value:g} {entry.unit}{span}; {entry.source}", highlight=False
        )


def _fleets(plan: RunPlan) -> Table:
    table = Table(title=f"{plan.gpu.name}, by number of GPUs", title_justify="left", box=SIMPLE)
    money = plan.rows[0].cost is not None
    columns = ["", "GPUs", "targets:drafters", "train tok/s", "limited by", "generate", "train", "evaluate"]
    columns += ["in all", "GPU-hours"] + (["cost", "per M tokens"] if money else [])
    for name in columns:
        table.add_column(name, justify="left" if name in ("", "limited by") else "right", no_wrap=True)
    for row in plan.rows:
        cells = [
            "*" if row == plan.recommended else "" if row.fits else "does not fit",
            str(row.gpus),
            f"{row.targets}:{row.drafters}",
            f"{row.tokens_per_second:,.0f}",
            row.limit,
            _hours(row.generation_seconds),
            _hours(row.training_seconds),
            _hours(row.evaluation_seconds),
            _hours(row.wall_seconds),
            f"{row.gpu_hours:,.0f}",
        ]
        if row.cost is not None:
            cells += [f"{row.cost:,.0f}", f"{row.cost_per_million_tokens:.4f}"]
        table.add_row(*cells)
    return table


def _memory(pods: tuple[PodMemory, ...]) -> Table:
    table = Table(title="memory per pod, GB", title_justify="left", box=SIMPLE)
    for name in ("pod", "parts", "used", "left"):
        table.add_column(name, justify="left" if name in ("pod", "parts") else "right")
    for pod in pods:
        parts = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in pod.parts.items())
        left = f"{pod.left / 1e9:.1f}" if pod.fits else f"{-pod.left / 1e9:.1f} too much"
        table.add_row(pod.pod, parts, f"{pod.used / 1e9:.1f}", left)
    return table


def _moved(plan: RunPlan) -> Table:
    table = Table(title="what moves each estimate most", title_justify="left", box=SIMPLE)
    for name in ("estimate", "assumption", "% per %", "over its range"):
        table.add_column(name, justify="left" if name in ("estimate", "assumption") else "right")
    for name, mover in plan.movers.items():
        if mover is None:
            table.add_row(name, "nothing assumed", "", "")
        else:
            told = f"{mover.assumption} = {mover.value:g}"
            table.add_row(name, told, f"{mover.elasticity:+.2f}", f"{mover.swing:.2f}x")
    return table


def _hours(seconds: float) -> str:
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.0f} min"


def _money(row: Row) -> str:
    if row.cost is None:
        return ""
    return f", cost {row.cost:,.0f} ({row.cost_per_million_tokens:.4f} per million trained tokens)"


def _bytes(size: float) -> str:
    for unit, scale in (("PB", 1e15), ("TB", 1e12), ("GB", 1e9)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size / 1e6:.3g} MB"
