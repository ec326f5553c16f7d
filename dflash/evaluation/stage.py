"""The evaluation stage, from a committed export to a committed report.

Data first (answers, plots, report.html), the promotion, then report.json, whose presence means that
the stage is done. Run again after any death, it goes on from the answers in the store.
"""

import logging
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash import layout
from dflash.errors import ConfigurationError
from dflash.evaluation import acceptance, gate, page, plots
from dflash.evaluation.answers import NONE, Answer, Question
from dflash.evaluation.equality import Equality
from dflash.evaluation.in_process import DFLASH, InProcess
from dflash.evaluation.ledger import Ledger
from dflash.evaluation.questions import read_questions
from dflash.evaluation.report import Measurement, Report, TrainingSummary, measure, training_summary, warnings
from dflash.model.facts import TargetFacts
from dflash.model.source import model_folder
from dflash.model.tokenizer import load_tokenizer
from dflash.progress import Progress
from dflash.resource import Drafter
from dflash.storage.commit import fetch_commit
from dflash.storage.store import NotFound, Store
from dflash.tracking.jsonl import read_rows

if TYPE_CHECKING:
    from dflash.evaluation.roofline import Roofline

log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 2.0
_RATE_WINDOW = 50


def run_stage(store: Store, resource: Drafter, *, dataset: str, drafter: str, evaluation: str) -> Report:
    """Evaluate `drafter` (a run's hash) under the name `evaluation` and give the report.

    ConfigurationError when there is no committed export or no prompt; a failed gate is no error.
    """
    key = layout.report(evaluation)
    if (found := store.find_json(key)) is not None:
        log.info("%s is there: nothing to do", key)
        return Report.model_validate(found)
    progress = StageProgress(store, evaluation)
    progress.say("loading target and drafter")
    with tempfile.TemporaryDirectory(prefix="dflash-evaluate-") as folder:
        export = Path(folder)
        try:
            fetch_commit(store, layout.export(drafter), export)
        except NotFound as error:
            raise ConfigurationError(f"evaluation: {error}; train the drafter first") from error
        names = {"dataset": dataset, "drafter": drafter, "evaluation": evaluation}
        report = _measure(store, resource, export, progress, names)
    return _publish(store, report, progress)


class StageProgress:
    """The stage's progress object, written every two seconds at most."""

    def __init__(self, store: Store, evaluation: str) -> None:
        self._store = store
        self._key = layout.evaluation(evaluation, "progress.json")
        self._written = 0.0
        self._message = ""
        self.done = 0
        self.total = 0
        self.figures: Callable[[], dict[str, float | str]] = dict
        self._times: deque[float] = deque(maxlen=_RATE_WINDOW)

    def say(self, message: str) -> None:
        """What is being done now."""
        self._message = message
        log.info("%s", message)
        self._write()

    def count(self, done: int) -> None:
        """So many answers are there."""
        self.done = done
        self._times.append(time.monotonic())
        if time.monotonic() - self._written >= _PROGRESS_SECONDS:
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        times = self._times
        rate = (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 and times[-1] > times[0] else 0.0
        progress = Progress(
            stage="evaluation",
            message=self._message,
            done=self.done,
            total=self.total,
            unit="answers",
            rate=rate,
            eta_seconds=(self.total - self.done) / rate if rate else None,
            updated_at=time.time(),
            figures=self.figures(),
        )
        self._store.put_json(self._key, progress.model_dump(mode="json", by_alias=True))


def _measure(
    store: Store,
    resource: Drafter,
    export: Path,
    progress: StageProgress,
    names: dict[str, str],
) -> Report:
    spec = resource.spec
    target = spec.target
    facts = TargetFacts.from_folder(model_folder(target.model, target.revision, weights=False))
    tokenizer = load_tokenizer(target.model, target.revision)
    questions = read_questions(spec, Path.cwd(), store, tokenizer, facts.max_positions)
    bench = InProcess(target, spec.evaluation, export)
    ledger = Ledger(store, names["evaluation"])
    progress.total = 2 * len(questions) * spec.evaluation.repeats
    progress.done = len(ledger)
    progress.say("measuring")

    progress.figures = lambda: _live(ledger)
    bench.run(questions, ledger, lambda _: progress.count(len(ledger)))
    if spec.evaluation.concurrency != [1]:
        log.warning("in process one request is answered at a time: concurrency is measured at 1 only")

    differences = None
    if spec.evaluation.temperature == 0.0:
        progress.say("comparing outputs")
        differences = bench.compare(questions, ledger)
    plain, mine = ledger.of(NONE, 1), ledger.of(DFLASH, 1)
    block_size = bench.shape.block_size
    measurements = [
        measure(NONE, 1, plain, [], block_size=block_size),
        measure(DFLASH, 1, mine, plain, block_size=block_size),
    ]
    progress.say("probing the device")
    roofline = _roofline(bench, questions, plain, measurements)
    progress.say("writing the report")
    return _report(
        resource,
        questions,
        mine,
        measurements,
        differences,
        training=training_summary(_metrics(store, names["drafter"])),
        block_size=block_size,
        roofline=roofline,
        names=names,
        engine=bench.description(),
        target={
            "model": target.model,
            "revision": target.revision,
            "fingerprint": bench.target.fingerprint,
        },
        shape=bench.shape_description(),
    )


def _live(ledger: Ledger) -> dict[str, float | str]:
    """What matters while it runs."""
    mine, plain = ledger.of(DFLASH, 1), ledger.of(NONE, 1)
    length = acceptance.acceptance_length([a.emitted for a in mine], [a.accepted for a in mine])
    figures: dict[str, float | str] = {}
    if length.responses:
        figures["acceptance_length"] = round(length.pooled, 3)
    for name, answers in ((NONE, plain), (DFLASH, mine)):
        seconds = sum(a.decode_seconds for a in answers)
        if seconds:
            figures[f"tokens_per_second_{name}"] = round(sum(len(a.tokens) - 1 for a in answers) / seconds, 1)
    return figures


def _roofline(
    bench: InProcess, questions: Sequence[Question], plain: Sequence[Answer], measurements: list[Measurement]
) -> "Roofline | None":
    lengths = {q.sample_id: len(q.prompt_ids) for q in questions}
    steps = sum(a.verifications for a in plain)
    drafted = measurements[1]
    if not steps or drafted.acceptance_length is None or drafted.speedup is None:
        return None
    context = sum((lengths[a.sample_id] + len(a.tokens) / 2) * a.verifications for a in plain) / steps
    return bench.roofline(
        step_seconds=sum(a.decode_seconds for a in plain) / steps,
        context=context,
        length=drafted.acceptance_length.pooled,
        speedup=drafted.speedup,
    )


def _metrics(store: Store, drafter: str) -> list[dict[str, Any]]:
    key = layout.drafter(drafter, "metrics.jsonl")
    return read_rows(store.get(key)) if store.exists(key) else []


def _report(
    resource: Drafter,
    questions: Sequence[Question],
    mine: Sequence[Answer],
    measurements: list[Measurement],
    differences: Equality | None,
    *,
    training: TrainingSummary | None,
    block_size: int,
    roofline: "Roofline | None",
    names: dict[str, str],
    engine: dict[str, Any],
    target: dict[str, Any],
    shape: dict[str, Any],
) -> Report:
    spec = resource.spec
    by_id = {q.sample_id: q for q in questions}
    slices = acceptance.slices(mine, by_id, block_size)
    first = next(m for m in measurements if m.contender == DFLASH)
    if first.acceptance_length is None or not first.acceptance_length.verifications:
        raise ConfigurationError(
            f"evaluation: none of {len(questions)} answers is longer than one token, so there is nothing to "
            "measure; raise evaluation.maxTokens or use other prompts"
        )
    assert first.by_slot is not None
    assert first.histogram is not None
    assert first.speedup is not None
    assert first.speedup_interval is not None
    verdict = gate.judge(
        spec.evaluation.gate,
        gate.Evidence(
            acceptance_length=first.acceptance_length.pooled,
            speedup=first.speedup,
            divergences=None if differences is None else differences.divergences,
            training_accuracy=None if training is None else training.final.get("train/accuracy"),
        ),
    )
    return Report(
        name=resource.metadata.name,
        created_at=time.time(),
        **names,
        acceptance_length=first.acceptance_length,
        greedy_equal=None if differences is None else differences.equal,
        speedup=first.speedup,
        speedup_interval=first.speedup_interval,
        tokens_per_second={
            m.contender: m.tokens_per_second for m in measurements if m.concurrency == first.concurrency
        },
        by_slot=first.by_slot,
        histogram=first.histogram,
        block_size=block_size,
        slices=slices,
        differences=differences,
        contenders=measurements,
        gate=verdict,
        roofline=None if roofline is None else roofline.model_dump(),
        warnings=warnings(mine, slices, trained_length=spec.training.max_length, questions=by_id),
        temperature=spec.evaluation.temperature,
        max_tokens=spec.evaluation.max_tokens,
        questions=len(questions),
        repeats=spec.evaluation.repeats,
        engine=engine,
        target=target,
        shape=shape,
        training=training,
        configuration=spec.model_dump(mode="json", by_alias=True),
    )


def _publish(store: Store, report: Report, progress: StageProgress) -> Report:
    """Plots and page, then the promotion, then the report itself."""
    pictures = plots.draw(report)
    for name, png in pictures.items():
        store.put(layout.evaluation(report.evaluation, name), png)
    html = page.render(report, pictures).encode()
    store.put(layout.evaluation(report.evaluation, "report.html"), html)
    data = report.to_json()
    _promote(store, report, data)
    progress.done = progress.total
    progress.say("done")
    if store.create(layout.report(report.evaluation), data):
        return report
    # Another process finished first: its report stands.
    theirs = store.get(layout.report(report.evaluation))
    standing = Report.model_validate_json(theirs)
    _promote(store, standing, theirs)
    return standing


def _promote(store: Store, report: Report, data: bytes) -> None:
    if not report.gate.passed:
        log.warning("not promoted: %s %s", report.gate.reason, report.gate.advice)
        return
    gate.promote(
        store,
        report.name,
        drafter=report.drafter,
        evaluation=report.evaluation,
        report_sha256=sha256(data).hexdigest(),
        acceptance_length=report.acceptance_length.pooled,
    )
    log.info("promoted: %s", report.gate.reason)
