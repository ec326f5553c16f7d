"""Evaluation of servers that run already, and of a second drafter beside the first."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dflash.errors import ConfigurationError
from dflash.evaluation.answers import DFLASH, NONE
from dflash.evaluation.in_process import InProcess
from dflash.evaluation.ledger import Ledger
from dflash.evaluation.measuring import served_roofline
from dflash.evaluation.questions import read_questions
from dflash.evaluation.report import Report, measure
from dflash.evaluation.served import ServedRun
from dflash.evaluation.stage import run_stage
from dflash.model.checkpoint import export_files
from dflash.model.drafter import DFlashDrafter
from dflash.model.facts import TargetFacts
from dflash.model.shape import resolve_shape
from dflash.model.tokenizer import load_tokenizer
from dflash.resource import Drafter
from dflash.resource.load import load_resource
from dflash.storage.store import Store
from tests.support.evaluation import DATASET, EVALUATION, RUN, commit_export, write_resource
from tests.support.fake_speculating import FakeSpeculating


def prepared(folder: Path, store: Store, **evaluation: Any) -> Drafter:
    """A resource, its drafter committed, and another drafter in a folder `rival`."""
    resource = load_resource(write_resource(folder, store, evaluation=evaluation))
    commit_export(store, resource)
    facts = TargetFacts.from_folder(resource.spec.target.model)
    shape = resolve_shape(resource.spec.drafter.model_copy(update={"block_size": 6}), facts)
    (folder / "rival").mkdir()
    for name, data in export_files(DFlashDrafter(shape, seed=5), shape, facts).items():
        (folder / "rival" / name).write_bytes(data)
    return resource


def evaluate(store: Store, resource: Drafter) -> Report:
    return run_stage(store, resource, dataset=DATASET, drafter=RUN, evaluation=EVALUATION)


def test_running_servers_are_measured_and_a_second_drafter_beside_the_first(
    tmp_path: Path, store: Store
) -> None:
    fakes = {
        "none": FakeSpeculating(),
        "dflash": FakeSpeculating(block_size=4, accepts=2),
        "yesterdays": FakeSpeculating(block_size=6, accepts=1),
    }
    with fakes["none"], fakes["dflash"], fakes["yesterdays"]:
        resource = prepared(
            tmp_path,
            store,
            engine="sglang",
            concurrency=[1, 3],
            maxTokens=37,
            rival={"name": "yesterdays", "model": "./rival"},
            servers=[{"contender": name, "url": fake.url} for name, fake in fakes.items()],
        )
        report = evaluate(store, resource)
    found = {(m.contender, m.concurrency): m for m in report.contenders}
    assert found.keys() == {(name, c) for name in fakes for c in (1, 3)}
    for concurrency in (1, 3):
        drafter, rival = found["dflash", concurrency], found["yesterdays", concurrency]
        assert drafter.acceptance_length is not None
        assert rival.acceptance_length is not None
        assert drafter.acceptance_length.pooled == pytest.approx(3.0)
        assert rival.acceptance_length.pooled == pytest.approx(2.0)
        assert len(drafter.by_slot or []) == 3
        assert len(rival.by_slot or []) == 5
    assert report.acceptance_length.pooled == pytest.approx(3.0)
    assert report.greedy_equal is True
    assert report.roofline is None  # the server may be on another machine
    assert any("see that this is the drafter reported on" in text for text in report.warnings)
    assert report.engine["flags"]["none"] == [fakes["none"].url]


def test_a_server_that_fails_once_is_asked_again_and_the_report_says_unstable(
    tmp_path: Path, store: Store
) -> None:
    with FakeSpeculating() as plain, FakeSpeculating(block_size=4, accepts=1, crashes=1) as once:
        resource = prepared(
            tmp_path,
            store,
            engine="sglang",
            concurrency=[2],
            servers=[{"contender": "none", "url": plain.url}, {"contender": "dflash", "url": once.url}],
        )
        report = evaluate(store, resource)
    assert any("unstable: the server for dflash failed once at 2 in flight" in w for w in report.warnings)
    assert report.contenders[1].answers == 6  # every question once: nothing of the failed round is counted


def test_a_running_server_with_another_block_size_is_refused(tmp_path: Path, store: Store) -> None:
    with FakeSpeculating(block_size=16, accepts=2) as wrong:
        resource = prepared(
            tmp_path, store, engine="sglang", servers=[{"contender": "dflash", "url": wrong.url}]
        )
        with pytest.raises(ConfigurationError, match="DFLASH and 16 draft tokens where DFLASH and 4"):
            evaluate(store, resource)


def test_in_process_too_a_second_drafter_answers_the_same_questions(tmp_path: Path, store: Store) -> None:
    resource = prepared(tmp_path, store, rival={"name": "other", "model": "./rival"})
    report = evaluate(store, resource)
    found = {m.contender: m for m in report.contenders}
    assert found.keys() == {"none", "dflash", "other"}
    assert found["other"].answers == 6
    assert len(found["other"].histogram or []) == 6
    assert report.greedy_equal is True


def test_through_the_server_a_step_is_counted_in_the_bytes_that_the_modules_have(
    tmp_path: Path, store: Store
) -> None:
    resource = prepared(tmp_path, store)
    spec = resource.spec
    facts = TargetFacts.from_folder(spec.target.model)
    tokenizer = load_tokenizer(spec.target.model)
    questions = read_questions(spec, tmp_path, store, tokenizer, facts.max_positions, samples=4)
    bench = InProcess(spec.target, spec.evaluation, {DFLASH: tmp_path / "rival"})
    ledger = Ledger(store, "f" * 16)
    bench.run(questions, ledger, lambda _: None)
    plain = ledger.of(NONE, 1)
    drafted = measure(DFLASH, 1, ledger.of(DFLASH, 1), plain, block_size=6)
    assert drafted.acceptance_length is not None
    work = SimpleNamespace(spec=spec, questions=questions, facts=facts, shapes=bench.shapes)
    served = served_roofline(work, [drafted], plain, ServedRun(effective={NONE: {"tp_size": 1}}))  # type: ignore[arg-type]
    assert served is not None
    context = sum(
        (len(q.prompt_ids) + len(a.tokens) / 2) * a.verifications
        for a in plain
        for q in questions
        if q.sample_id == a.sample_id
    ) / sum(a.verifications for a in plain)
    counted = bench.roofline(step_seconds=served.step_seconds, context=context, length=2.0, speedup=1.0)
    assert served.weight_bytes == pytest.approx(counted.weight_bytes, rel=0.02)
    assert served.kv_bytes == pytest.approx(counted.kv_bytes, rel=0.02)
    assert served.draft_bytes == pytest.approx(counted.draft_bytes, rel=0.02)
    assert served.sentence
