"""`dflash run --warm-up`: the whole chain on about one percent of the prompts, ending in go or no-go.

The small run has the real models, lengths, batch and fleet, a place of its own beside the real outputs, and
is done in one or two rounds: a handful of prompts first, then, if what was measured says that it fits into
the time, one percent. What it measured is kept for `dflash plan`, projections and the schedule. The
arithmetic is `dflash.planning.warm_up`.
"""

import re
import subprocess
import time
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import typer

from dflash import layout
from dflash.channel.verdict import judge
from dflash.data.parts import Manifest
from dflash.data.prompts import PromptSurvey, survey_prompts
from dflash.errors import ConfigurationError
from dflash.planning.warm_up import (
    LEAST_ANSWERS,
    Expected,
    Pace,
    Timed,
    WarmUp,
    least_prompts,
    objections,
    pace,
    settings_of,
    shrunk,
)
from dflash.progress import Progress
from dflash.resource import Drafter, DrafterSpec
from dflash.resource.load import load_resource
from dflash.storage.location import is_local
from dflash.storage.store import Store
from dflash.tracking.jsonl import read_rows
from jobs.cli.connect import connected, home_of
from jobs.cli.run import check
from jobs.cli.validate import look_at_paths, uid_of
from jobs.cli.view import clock, view
from operators.accounts import machine_gpus
from operators.local import Command, Home, Local, Outcome, Snapshot
from operators.observe import outputs_of
from operators.observed import Role, Stage
from operators.owner import claim
from operators.purge import purge

_SHARE = 0.01
_WORTH = 2.0
"""A second round is worth its start-up when it has so many times the prompts of the first."""
_PLACE = "warm-up"


@dataclass(frozen=True)
class _Round:
    """What one round measured."""

    prompts: int
    measured: WarmUp
    pace: Pace
    timed: dict[Stage, Timed]
    seconds: float
    memory: str


def seconds_of(text: str) -> float:
    """`5m`, `300s`, `1h` in seconds. ConfigurationError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|m|h)", text)
    seconds = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2]] if match else 0.0
    if seconds <= 0:
        raise ConfigurationError(f"--warm-up {text}: give a time, as 5m, 300s or 1h")
    return seconds


def warm_up_file(file: Path, seconds: float, *, plain: bool, command: Command | None = None) -> int:
    """Warm up for about so long; 0 is go, anything else no-go. `command` stands in for the jobs in tests."""
    drafter = load_resource(file)
    look_at_paths(drafter)
    home = home_of(drafter, file)
    began = time.monotonic()
    with home.locked():  # the real run and its warm-up would slow each other down
        survey = _survey(drafter)
        first = min(survey.counts.unique, least_prompts(drafter.spec))
        done = _round(drafter, file, survey, first, plain=plain, command=command)
        if isinstance(done, _Round):
            left = seconds - (time.monotonic() - began)
            more = min(int(_SHARE * survey.counts.unique), _affordable(done, left))
            if more >= _WORTH * done.prompts:
                done = _round(drafter, file, survey, more, plain=plain, command=command)
        if isinstance(done, Outcome):
            return _failed(done)
        _keep(drafter, home, done.measured)
    return _conclude(drafter.spec, done)


def _survey(drafter: Drafter) -> PromptSurvey:
    spec = drafter.spec.prompts
    if "://" not in spec.uri:
        return survey_prompts(spec.uri, Path.cwd(), hold_out=spec.hold_out, limit=spec.limit)
    with connected(drafter, shared=True) as connection:
        return survey_prompts(
            spec.uri, Path.cwd(), connection.store, hold_out=spec.hold_out, limit=spec.limit
        )


def _affordable(done: _Round, left: float) -> int:
    """Prompts of a round that takes `left` seconds, at the rates of the round before."""
    startup = sum(stage.startup for stage in done.timed.values())
    work = done.seconds - startup
    return int(done.prompts * (left - startup) / work) if work > 0 and left > startup else 0


def _round(
    drafter: Drafter,
    file: Path,
    survey: PromptSurvey,
    prompts: int,
    *,
    plain: bool,
    command: Command | None,
) -> _Round | Outcome:
    """Run the chain on so many prompts; what was measured, or how it failed."""
    small = _small(drafter, prompts)
    home = home_of(small, file)
    home = replace(home, folder=home.folder / _PLACE) if not is_local(small.spec.storage.uri) else home
    uid = uid_of(file, drafter)
    name = small.metadata.name
    typer.echo(f"warming up with {prompts} of {survey.counts.unique:,} prompts", err=True)
    began = time.monotonic()
    with home.locked(), connected(small) as connection:
        store = connection.store
        claim(store, name, uid, f"warm-up of {file.resolve()}", take_over=True)
        small = connection.resolved(small)
        outputs = outputs_of(small, store)
        if command is None:
            check(small, home, connection)
        meter = _Memory()
        with view(name, plain=plain) as show:

            def watch(snapshot: Snapshot) -> None:
                meter.look()
                show(snapshot)

            outcome = Local(
                small,
                outputs,
                store,
                home,
                environment=connection.environment,
                show=watch,
                embedded=connection.embedded,
                command=command,
            ).run()
        if outcome.exit_code or outcome.snapshot is None or not outcome.snapshot.committed.evaluation:
            return outcome
        seconds = time.monotonic() - began
        found = _measure(drafter.spec, small.spec, outcome.snapshot, store, survey, memory=meter)
        purge(store, name, uid)
    return replace(found, prompts=prompts, seconds=seconds)


def _small(drafter: Drafter, prompts: int) -> Drafter:
    spec = shrunk(drafter.spec, prompts, f"warm-up {time.time_ns()}")
    storage = spec.storage.model_copy(update={"uri": f"{spec.storage.uri.rstrip('/')}/{_PLACE}"})
    return drafter.model_copy(update={"spec": spec.model_copy(update={"storage": storage})})


def _measure(
    whole: DrafterSpec,
    small: DrafterSpec,
    snapshot: Snapshot,
    store: Store,
    survey: PromptSurvey,
    *,
    memory: "_Memory",
) -> _Round:
    """Read what the round wrote, and say what the whole run will take."""
    hashes = snapshot.outputs.hashes
    manifest = Manifest.model_validate_json(store.get(layout.dataset_manifest(hashes.dataset)))
    dropped = sum(manifest.dropped.values())
    answers = manifest.samples + dropped
    dropped_share = dropped / max(1, answers)
    mean = manifest.output_tokens / max(1, manifest.samples)

    workers = [
        Progress.model_validate_json(store.get(info.key))
        for info in store.list(layout.dataset(hashes.dataset, "progress/"))
    ]
    rates = [float(worker.figures.get("tokens_per_second", 0.0)) for worker in workers]
    generation = Timed(_lasted(snapshot, "generate"), sum(rates), float(manifest.output_tokens))

    rows = read_rows(store.get(layout.drafter(hashes.drafter, "metrics.jsonl")))
    found = pace(rows, small.training.drafters)
    if found is None:
        raise ConfigurationError(
            "the warm-up's training was too short to time; give more prompts, or run without --warm-up"
        )
    steps = rows[-1]["global_step"]
    training = Timed(_lasted(snapshot, "drafter"), found.steps_per_second, float(steps))

    asked = Progress.model_validate_json(store.get(layout.evaluation(hashes.evaluation, "progress.json")))
    lasted = _lasted(snapshot, "evaluate")
    evaluation = Timed(lasted, max(asked.rate, asked.total / lasted), asked.total)

    gpus = float(machine_gpus())
    sampled = min(whole.evaluation.samples, max(1, survey.held_out)) / small.evaluation.samples
    timed: dict[Stage, Timed] = {
        "generation": generation,
        "training": training,
        "evaluation": evaluation,
    }
    units: dict[Stage, float] = {
        "generation": survey.turns * (1 - dropped_share) * mean,
        "training": _steps(whole, survey.turns * (1 - dropped_share)),
        "evaluation": asked.total
        * (sampled if not whole.evaluation.prompts else 1.0)
        * whole.evaluation.repeats,
    }
    measured = WarmUp(
        settings=settings_of(whole),
        device=memory.device,
        answers=answers,
        dropped_share=dropped_share,
        prompt_tokens=manifest.prompt_tokens / max(1, manifest.samples),
        response_tokens=mean,
        generation=sum(rates) / max(1, len(rates)) / max(1e-3, 1 - dropped_share) or None,
        target=found.target,
        drafter=found.drafter,
        steps_per_second=found.steps_per_second,
        stages={stage: timed[stage].expected(units[stage], gpus) for stage in timed},
    )
    return _Round(0, measured, found, timed, 0.0, memory.told)


def _steps(whole: DrafterSpec, samples: float) -> float:
    training = whole.training
    return training.epochs * -(-round(samples) // training.batch_size)


def _lasted(snapshot: Snapshot, role: Role) -> float:
    """Seconds from the start of a role's first process to the end of its last one."""
    mine = [child for child in snapshot.children if child.role == role]
    return max(c.ended_at or time.time() for c in mine) - min(c.created_at for c in mine)


def _keep(drafter: Drafter, home: Home, measured: WarmUp) -> None:
    """Beside the real run's outputs, and in a file that `dflash plan` reads without a store."""
    document = measured.model_dump(mode="json", by_alias=True)
    with connected(drafter) as connection:
        connection.store.put_json(layout.warm_up(drafter.metadata.name), document)
    home.warm_up.parent.mkdir(parents=True, exist_ok=True)
    home.warm_up.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))


def _failed(outcome: Outcome) -> int:
    shown = outcome.snapshot
    message = shown.summary.message if shown is not None else "stopped before anything was started"
    if outcome.exit_code in (130, 143):
        typer.echo("stopped", err=True)
        return outcome.exit_code
    typer.echo(f"no-go: {shown.stage if shown else 'start'} failed: {message}")
    if shown is not None:
        typer.echo(f"logs: {shown.logs}", err=True)
    return outcome.exit_code or 1


def _conclude(spec: DrafterSpec, done: _Round) -> int:
    """Print the verdict; its exit code."""
    measured, found = done.measured, done.pace
    typer.echo(f"fits: every stage ran to its end on {measured.device}{done.memory}")
    told = {
        "a generation worker": measured.generation,
        "a target": measured.target,
        "a drafter": measured.drafter,
    }
    rates = ", ".join(f"{who} {rate:,.0f}" for who, rate in told.items() if rate is not None)
    typer.echo(f"rates, tokens per second: {rates}")
    few = ", too few to judge by" if measured.answers < LEAST_ANSWERS else ""
    typer.echo(
        f"answers: {measured.answers:.0f} of {measured.response_tokens:,.0f} tokens on average, "
        f"{measured.dropped_share:.0%} dropped{few}"
    )
    verdict = judge(found.targets, spec.training.drafters, found.target_idle, found.drafter_wait)
    typer.echo(f"bottleneck: {verdict.sentence}")
    seconds = sum(stage.seconds for stage in measured.stages.values())
    hours = measured.gpu_hours
    parts = ", ".join(f"{name} {_span(stage)}" for name, stage in measured.stages.items())
    price = spec.tracking.gpu_hour_price
    money = "" if price is None else f", cost {hours * price:,.2f}"
    end = time.strftime("%Y-%m-%d %H:%M", time.localtime(time.time() + seconds))
    typer.echo(
        f"the whole run: {clock(seconds)} ({parts}), {hours:.3g} GPU-hours{money}; from now until {end}"
    )
    against = objections(spec, measured, found)
    for sentence in against:
        typer.echo(f"no-go: {sentence}")
    if not against:
        typer.echo("go")
    return 1 if against else 0


def _span(stage: Expected) -> str:
    return f"{clock(stage.seconds)} of which {clock(stage.startup_seconds)} starting"


class _Memory:
    """The most device memory that was seen in use, and what the device is called."""

    def __init__(self) -> None:
        names = [line[0] for line in _nvidia("name")]
        self.device = f"{len(names)} x {names[0]}" if names else "CPU"
        self._most = 0.0

    def look(self) -> None:
        """One sample; nothing without a GPU."""
        if self.device != "CPU":
            shares = [float(used) / float(total) for used, total in _nvidia("memory.used,memory.total")]
            self._most = max([self._most, *shares])

    @property
    def told(self) -> str:
        """A few words, to follow the device's name."""
        return f", with {self._most:.0%} of its memory in use at most" if self._most else ""


def _nvidia(query: str) -> list[list[str]]:
    """What nvidia-smi says, a list a GPU; nothing where there is none."""
    try:
        said = subprocess.run(
            ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in said.splitlines() if line.strip()]
