"""From questions to figures, by either engine: what the report is written from."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dflash.evaluation import acceptance
from dflash.evaluation.answers import DFLASH, MTP, NONE, Answer, Question
from dflash.evaluation.diagnosis import Diagnosis, diagnose
from dflash.evaluation.equality import Equality
from dflash.evaluation.in_process import InProcess, device_name
from dflash.evaluation.ledger import Ledger
from dflash.evaluation.live import StageProgress
from dflash.evaluation.report import Measurement, measure
from dflash.evaluation.roofline import Roofline, assess, probe_bandwidth, probe_flops
from dflash.evaluation.served import Served, ServedRun
from dflash.model.checkpoint import load_export
from dflash.model.facts import TargetFacts
from dflash.model.shape import DraftShape
from dflash.model.source import fingerprint, model_folder
from dflash.model.target import load_tables, load_target
from dflash.planning.memory import value_bytes
from dflash.planning.step_cost import parameter_count
from dflash.planning.target_cost import target_cost
from dflash.resource import DrafterSpec
from dflash.storage.store import Store

_DIAGNOSED = 12
"""Answers that a diagnosis looks at."""


@dataclass(frozen=True)
class Work:
    """What is measured, and where answers and progress go.

    `drafters` are folders by contender, `shapes` what they hold: DFLASH first, then a rival.
    """

    spec: DrafterSpec
    evaluation: str
    store: Store
    drafters: dict[str, Path]
    shapes: dict[str, DraftShape]
    facts: TargetFacts
    questions: list[Question]
    ledger: Ledger
    progress: StageProgress


@dataclass(frozen=True)
class Findings:
    """What an engine's measurements come to; from these the report is written."""

    measurements: list[Measurement]
    answers: list[Answer]
    """The drafter's, at the first concurrency."""
    differences: Equality | None
    roofline: Roofline | None
    warnings: list[str]
    engine: dict[str, Any]
    fingerprint: str


def in_process(work: Work) -> Findings:
    """Measure with target and drafter in this process."""
    spec, questions, ledger, progress = work.spec, work.questions, work.ledger, work.progress
    bench = InProcess(spec.target, spec.evaluation, work.drafters)
    progress.total = len(bench.contenders) * len(questions) * spec.evaluation.repeats
    progress.say("measuring")
    bench.run(questions, ledger, lambda _: progress.count(len(ledger)))
    found = []
    if spec.evaluation.concurrency != [1]:
        found.append("in process one request is answered at a time: concurrency was measured at 1 only")
    if MTP in spec.evaluation.baselines:
        found.append("in process the target's own multi-token prediction cannot be run: mtp was left out")
    differences = None
    if spec.evaluation.temperature == 0.0:
        progress.say("comparing outputs")
        differences = bench.compare(questions, ledger)
    plain, mine = ledger.of(NONE, 1), ledger.of(DFLASH, 1)
    measurements = [measure(NONE, 1, plain, [], block_size=1)]
    for name, shape in bench.shapes.items():
        measurements.append(measure(name, 1, ledger.of(name, 1), plain, block_size=shape.block_size))
    progress.say("probing the device")
    return Findings(
        measurements=measurements,
        answers=mine,
        differences=differences,
        roofline=_roofline(bench, questions, plain, measurements[1]),
        warnings=found,
        engine=bench.description(),
        fingerprint=bench.target.fingerprint,
    )


def through_sglang(work: Work) -> Findings:
    """Measure with a fresh SGLang server for each contender."""
    spec, questions, ledger, progress = work.spec, work.questions, work.ledger, work.progress
    evaluation = spec.evaluation
    served = Served(
        spec,
        work.drafters,
        work.shapes,
        facts=work.facts,
        store=work.store,
        name=work.evaluation,
        questions=questions,
        ledger=ledger,
        on_answer=lambda _: progress.count(len(ledger)),
    )
    settings = len(evaluation.concurrency) * evaluation.repeats
    progress.total = len(served.contenders) * len(questions) * settings
    progress.say("measuring through SGLang")
    run = served.run()
    measurements = [
        measure(
            contender,
            concurrency,
            ledger.of(contender, concurrency),
            ledger.of(NONE, concurrency),
            block_size=served.block_size(contender),
            wall_seconds=run.wall_seconds[contender, concurrency],
        )
        for concurrency in evaluation.concurrency
        for contender in reversed(served.contenders)
    ]
    return Findings(
        measurements=measurements,
        answers=ledger.of(DFLASH, evaluation.concurrency[0]),
        differences=run.differences,
        roofline=served_roofline(work, measurements, ledger.of(NONE, evaluation.concurrency[0]), run),
        warnings=run.warnings,
        engine={
            "name": "sglang",
            "dtype": evaluation.dtype,
            "device": device_name(),
            "versions": {"sglang": run.version},
            "common flags": evaluation.server_args,
            "flags": run.flags,
            "effective": run.effective,
        },
        fingerprint=fingerprint(model_folder(spec.target.model, spec.target.revision)),
    )


def diagnosis_of(work: Work, tokenizer: Any) -> Diagnosis:
    """Look for a fault in a drafter that accepts little, on plain answers already there."""
    spec = work.spec
    work.progress.say("diagnosing the drafter")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(spec.target.model, spec.target.revision, spec.evaluation.dtype, device)
    tables = load_tables(spec.target.model, spec.target.revision, spec.evaluation.dtype, device)
    drafter, _ = load_export(work.drafters[DFLASH])
    plain = work.ledger.of(NONE, spec.evaluation.concurrency[0]) or work.ledger.of(NONE, 1)
    longest = sorted((a for a in plain if a.repeat == 0), key=lambda a: -len(a.tokens))[:_DIAGNOSED]
    prompts = {q.sample_id: q.prompt_ids for q in work.questions}
    beyond = range(len(tokenizer), min(len(tokenizer) + 4, work.facts.vocab_size))
    masks = list(dict.fromkeys([*tokenizer.all_special_ids[:12], *beyond]))
    return diagnose(
        target,
        tables,
        drafter.to(target.device, target.dtype).eval(),
        [(prompts[a.sample_id], a.tokens) for a in longest],
        masks,
    )


def live_figures(ledger: Ledger) -> dict[str, float | str]:
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
    bench: InProcess, questions: Sequence[Question], plain: Sequence[Answer], drafted: Measurement
) -> Roofline | None:
    lengths = {q.sample_id: len(q.prompt_ids) for q in questions}
    steps = sum(a.verifications for a in plain)
    if not steps or drafted.acceptance_length is None or drafted.speedup is None:
        return None
    context = sum((lengths[a.sample_id] + len(a.tokens) / 2) * a.verifications for a in plain) / steps
    return bench.roofline(
        step_seconds=sum(a.decode_seconds for a in plain) / steps,
        context=context,
        length=drafted.acceptance_length.pooled,
        speedup=drafted.speedup,
    )


def served_roofline(
    work: Work, measurements: Sequence[Measurement], plain: Sequence[Answer], run: ServedRun
) -> Roofline | None:
    """Plain decoding through SGLang at the first concurrency, against this machine's limits.

    None where the server without speculation was given: it may be on another machine. Bytes are counted
    from the target's shapes; a pass over several devices (tp_size) has the bandwidth of all.
    """
    evaluation = work.spec.evaluation
    if any(server.contender == NONE for server in evaluation.servers):
        return None
    drafted = next(m for m in measurements if m.contender == DFLASH)
    steps = sum(a.verifications for a in plain)
    if not steps or drafted.acceptance_length is None or drafted.speedup is None:
        return None
    lengths = {q.sample_id: len(q.prompt_ids) for q in work.questions}
    context = sum((lengths[a.sample_id] + len(a.tokens) / 2) * a.verifications for a in plain) / steps
    concurrency = evaluation.concurrency[0]
    cost, shape = target_cost(work.facts), work.shapes[DFLASH]
    scale = value_bytes(evaluation.dtype) / 2  # costs are in bytes of two a value
    head = cost.head_parameters or cost.embedding_parameters
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    devices = int(run.effective.get(NONE, {}).get("tp_size") or 1)
    dtype = getattr(torch, evaluation.dtype)
    return assess(
        weight_bytes=cost.decode_bytes(concurrency, 0.0) * scale,
        kv_bytes=(cost.decode_bytes(1, context) - cost.decode_bytes(1, 0.0)) * scale,
        draft_bytes=(parameter_count(shape) + head) * value_bytes(evaluation.dtype),
        parameters=cost.active_layer_parameters + head,
        concurrency=concurrency,
        step_seconds=sum(a.decode_seconds for a in plain) / steps,
        bandwidth=devices * probe_bandwidth(device, dtype),
        flops=devices * probe_flops(device, dtype),
        acceptance_length=drafted.acceptance_length.pooled,
        measured_speedup=drafted.speedup,
    )
