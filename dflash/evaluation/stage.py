"""The evaluation stage, from a committed export to a committed report.

Data first (answers, plots, report.html), the promotion, then report.json, whose presence means that
the stage is done. Run again after any death, it goes on from the answers in the store.
"""

import json
import logging
import tempfile
import time
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from dflash import layout
from dflash.errors import ConfigurationError
from dflash.evaluation import acceptance, gate, page, plots
from dflash.evaluation.answers import DFLASH
from dflash.evaluation.ledger import Ledger
from dflash.evaluation.live import StageProgress
from dflash.evaluation.measuring import Findings, Work, diagnosis_of, in_process, live_figures, through_sglang
from dflash.evaluation.questions import read_questions
from dflash.evaluation.report import Report, losses, training_summary, warnings
from dflash.model.checkpoint import shape_of_config
from dflash.model.facts import TargetFacts
from dflash.model.shape import DraftShape, check_fits
from dflash.model.source import model_folder
from dflash.model.tokenizer import load_tokenizer
from dflash.resource import Drafter, DrafterSpec
from dflash.storage.commit import fetch_commit
from dflash.storage.store import NotFound, Store
from dflash.tracking.jsonl import read_rows

log = logging.getLogger(__name__)

_WEAK = 1.3
"""Below this acceptance length a drafter is looked into, whatever the gate asks."""


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


def _measure(
    store: Store, resource: Drafter, export: Path, progress: StageProgress, names: dict[str, str]
) -> Report:
    spec = resource.spec
    target = spec.target
    facts = TargetFacts.from_folder(model_folder(target.model, target.revision, weights=False))
    drafters = {DFLASH: export}
    if (rival := spec.evaluation.rival) is not None:
        drafters[rival.name] = model_folder(rival.model, rival.revision, field="evaluation.rival.model")
    shapes = {name: _shape(folder, facts) for name, folder in drafters.items()}
    tokenizer = load_tokenizer(target.model, target.revision)
    ledger = Ledger(store, names["evaluation"])
    progress.figures = lambda: live_figures(ledger)
    progress.count(len(ledger))
    work = Work(
        spec=spec,
        evaluation=names["evaluation"],
        store=store,
        drafters=drafters,
        shapes=shapes,
        facts=facts,
        questions=read_questions(
            spec, Path.cwd(), store, tokenizer, facts.max_positions, samples=spec.evaluation.samples
        ),
        ledger=ledger,
        progress=progress,
    )
    findings = through_sglang(work) if _engine(spec) == "sglang" else in_process(work)
    progress.say("writing the report")
    return _report(resource, work, findings, tokenizer, names)


def _shape(folder: Path, facts: TargetFacts) -> DraftShape:
    path = folder / "config.json"
    if not path.exists():
        raise ConfigurationError(f"evaluation: {path} is missing; {folder} is no drafter's folder")
    shape = shape_of_config(json.loads(path.read_text()), str(path))
    check_fits(shape, facts)
    return shape


def _engine(spec: DrafterSpec) -> str:
    if spec.evaluation.engine != "auto":
        return spec.evaluation.engine
    import torch

    return "sglang" if torch.cuda.is_available() else "transformers"


def _metrics(store: Store, drafter: str) -> list[dict[str, Any]]:
    key = layout.drafter(drafter, "metrics.jsonl")
    return read_rows(store.get(key)) if store.exists(key) else []


def _report(
    resource: Drafter, work: Work, findings: Findings, tokenizer: Any, names: dict[str, str]
) -> Report:
    spec, questions, shape = work.spec, work.questions, work.shapes[DFLASH]
    training = training_summary(_metrics(work.store, names["drafter"]))
    by_id = {q.sample_id: q for q in questions}
    slices = acceptance.slices(findings.answers, by_id, shape.block_size)
    first = next(m for m in findings.measurements if m.contender == DFLASH)
    if first.acceptance_length is None or first.speedup is None or first.speedup_interval is None:
        raise ConfigurationError(
            f"evaluation: none of {len(questions)} answers is longer than one token, so there is nothing to "
            "measure; raise evaluation.maxTokens or use other prompts"
        )
    differences = findings.differences
    evidence = gate.Evidence(
        acceptance_length=first.acceptance_length.pooled,
        speedup=first.speedup,
        divergences=None if differences is None else differences.divergences,
        gap=gate.largest_gap(slices),
        training_accuracy=None if training is None else training.final.get("train/accuracy"),
    )
    diagnosis = None
    if evidence.acceptance_length < _WEAK or not gate.judge(spec.evaluation.gate, evidence).passed:
        diagnosis = diagnosis_of(work, tokenizer)
        evidence = replace(evidence, diagnosis=diagnosis.sentence if diagnosis.fault else "")
    verdict = gate.judge(spec.evaluation.gate, evidence)
    found = warnings(findings.answers, slices, trained_length=spec.training.max_length, questions=by_id)
    if spec.target.dtype != spec.evaluation.dtype:
        found.append(
            f"the target was trained against in {spec.target.dtype} and evaluated in {spec.evaluation.dtype}"
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
            m.contender: m.tokens_per_second
            for m in findings.measurements
            if m.concurrency == first.concurrency
        },
        by_slot=first.by_slot or [],
        histogram=first.histogram or [],
        block_size=shape.block_size,
        slices=slices,
        differences=differences,
        contenders=findings.measurements,
        gate=verdict,
        diagnosis=None if diagnosis is None else diagnosis.model_dump(),
        roofline=None if findings.roofline is None else findings.roofline.model_dump(),
        warnings=findings.warnings + found + losses(findings.measurements),
        temperature=spec.evaluation.temperature,
        max_tokens=spec.evaluation.max_tokens,
        questions=len(questions),
        repeats=spec.evaluation.repeats,
        engine=findings.engine,
        target={
            "model": spec.target.model,
            "revision": spec.target.revision,
            "fingerprint": findings.fingerprint,
        },
        shape=asdict(shape),
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
