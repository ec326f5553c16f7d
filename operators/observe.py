"""What the store says: which outputs are committed, how far a stage is, and what the stages' names are.

Used by both executors. Reads only; a look costs a handful of requests.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash import layout
from dflash.progress import Progress
from dflash.resource import Drafter
from dflash.resource.hashes import StageHashes, digest, stage_inputs
from dflash.storage.store import NotFound, Store
from operators.observed import STAGES, Committed, Stage, StageProgress


@dataclass(frozen=True)
class Outputs:
    """The names of a Drafter's outputs, and what each name is the hash of."""

    hashes: StageHashes
    inputs: tuple[dict[str, Any], dict[str, Any], dict[str, Any]]
    """Of dataset, drafter and evaluation, as written to their inputs.json."""


def outputs_of(drafter: Drafter, store: Store | None = None) -> Outputs:
    """Name the outputs: reads the prompt files, and a local model folder's header and samples.

    ConfigurationError when prompts or model cannot be read.
    """
    from dflash.data.prompts import fingerprint_prompts
    from dflash.model.source import fingerprint

    spec = drafter.spec
    here = Path.cwd()  # paths of a loaded resource are absolute
    folder = Path(spec.target.model).expanduser()
    sets = [(s.name, fingerprint_prompts(s.uri, here, store)) for s in spec.evaluation.prompts]
    inputs = stage_inputs(
        spec,
        prompts=fingerprint_prompts(spec.prompts.uri, here, store),
        target=fingerprint(folder) if folder.is_dir() else "",
        evaluation_prompts=digest({"sets": sets}) if sets else "",
    )
    dataset, training, evaluation = (digest(part) for part in inputs)
    return Outputs(StageHashes(dataset, training, evaluation), inputs)


def write_inputs(store: Store, outputs: Outputs, stage: Stage) -> None:
    """Put down, once, what a stage's output is the hash of."""
    from dflash.storage.store import to_json

    hashes = outputs.hashes
    keys = {
        "generation": layout.dataset(hashes.dataset, "inputs.json"),
        "training": layout.drafter(hashes.drafter, "inputs.json"),
        "evaluation": layout.evaluation(hashes.evaluation, "inputs.json"),
    }
    store.create(keys[stage], to_json(outputs.inputs[STAGES.index(stage)]))


def committed(store: Store, name: str, hashes: StageHashes) -> Committed:
    """What is done. Look at the children first, then call this."""
    report = store.find_json(layout.report(hashes.evaluation))
    promoted = store.find_json(layout.promoted(name)) or {}
    gate = (report or {}).get("gate") or {}
    refused = (
        f"{gate.get('reason', '')} {gate.get('advice', '')}".strip() if gate.get("passed") is False else ""
    )
    return Committed(
        dataset=store.exists(layout.dataset_manifest(hashes.dataset)),
        export=store.exists(layout.export(hashes.drafter, layout.COMMIT)),
        evaluation=report is not None,
        attempt=int((store.find_json(layout.latest(hashes.drafter)) or {}).get("attempt", -1)),
        gate=refused,
        promoted=promoted.get("drafter") == hashes.drafter
        and promoted.get("evaluation") == hashes.evaluation,
        acceptance_length=((report or {}).get("acceptance_length") or {}).get("pooled"),
    )


def progress(store: Store, hashes: StageHashes, stage: Stage) -> Progress | None:
    """How far a stage is; generation's is the sum of its workers'. None before the first word of it."""
    if stage == "training":
        return _read(store, layout.heartbeat(hashes.drafter))
    if stage == "evaluation":
        return _read(store, layout.evaluation(hashes.evaluation, "progress.json"))
    found = [_read(store, info.key) for info in store.list(layout.dataset(hashes.dataset, "progress/"))]
    return _sum([p for p in found if p is not None])


def suggested_targets(training: Progress | None) -> int | None:
    """How many targets the run itself asks for, by where it has to wait; None while it has not said."""
    wanted = training.figures.get("wanted_targets") if training else None
    return int(wanted) if isinstance(wanted, int | float) else None


def _read(store: Store, key: str) -> Progress | None:
    try:
        return Progress.model_validate_json(store.get(key))
    except NotFound:
        return None


def _sum(workers: list[Progress]) -> Progress | None:
    if not workers:
        return None
    newest = max(workers, key=lambda p: p.updated_at)
    rates: dict[str, float | str] = dict(newest.figures)
    for name in newest.figures:
        values = [p.figures.get(name) for p in workers]
        numbers = [v for v in values if isinstance(v, int | float)]
        if name.endswith("_per_second") and numbers:
            rates[name] = sum(numbers)
    done, total, rate = (sum(getattr(p, f) for p in workers) for f in ("done", "total", "rate"))
    return newest.model_copy(
        update={
            "done": done,
            "total": total,
            "rate": rate,
            "eta_seconds": (total - done) / rate if rate > 0 else None,
            "figures": rates,
        }
    )


class Movement:
    """Remembers when each stage last got on, which progress objects do not say."""

    def __init__(self) -> None:
        self._last: dict[tuple[Stage, str], StageProgress] = {}

    def note(self, stage: Stage, output: str, seen: Progress | None) -> StageProgress | None:
        """The progress with the time at which it last moved, as far as this process has seen it."""
        key = (stage, output)
        if seen is None:
            return self._last.get(key)
        last = self._last.get(key)
        if last is None or (last.done, last.attempt) != (seen.done, seen.attempt):
            last = StageProgress(seen.attempt, seen.done, seen.updated_at)
            self._last[key] = last
        return last
