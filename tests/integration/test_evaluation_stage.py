"""The evaluation stage, with a real target, a real export, a real store, and its own process."""

import signal
import time
from hashlib import sha256
from pathlib import Path

import orjson
import pytest

from dflash import layout
from dflash.errors import ConfigurationError, Preempted
from dflash.evaluation.live import StageProgress
from dflash.evaluation.report import Report
from dflash.evaluation.stage import run_stage
from dflash.storage.embedded import EmbeddedStore
from dflash.storage.store import Store
from tests.support.evaluation import DATASET, EVALUATION, RUN, prepared
from tests.support.processes import JobProcess


def evaluate(store: Store, resource) -> Report:  # type: ignore[no-untyped-def]
    return run_stage(store, resource, dataset=DATASET, drafter=RUN, evaluation=EVALUATION)


def test_a_report_with_documented_keys_plots_and_promotion(tmp_path: Path, store: Store) -> None:
    _, resource = prepared(tmp_path, store, evaluation={"repeats": 2})
    rows = [{"global_step": s, "time": 1.0, "attempt": 0, "train/loss": 5.0 - s / 10} for s in range(10, 40)]
    metrics = b"".join(orjson.dumps(r) + b"\n" for r in rows)
    store.put(layout.drafter(RUN, "metrics.jsonl"), metrics)
    report = evaluate(store, resource)
    written = store.get_json(layout.report(EVALUATION))
    assert Report.model_validate(written).to_json() == report.to_json()
    assert written["acceptance_length"]["pooled"] >= 1.0
    assert written["acceptance_length"]["per_response_mean"] >= 1.0
    assert written["greedy_equal"] is True
    assert written["differences"]["compared"] == written["differences"]["identical"] == 6
    assert written["speedup"] > 0
    assert set(written["tokens_per_second"]) == {"none", "dflash"}
    assert len(written["by_slot"]) == 3
    assert len(written["histogram"]) == 4
    assert written["training"]["steps"] == 39
    assert written["roofline"]["sentence"]
    assert written["questions"] == 6
    assert written["contenders"][1]["answers"] == 12
    names = {info.key.rpartition("/")[2] for info in store.list(layout.evaluation(EVALUATION))}
    assert {"report.html", "training.png", "acceptance_by_slot.png", "tokens_per_second.png"} <= names
    page = store.get(layout.evaluation(EVALUATION, "report.html")).decode()
    assert page.count("data:image/png;base64,") >= 3
    assert 'src="http' not in page
    assert "href=" not in page
    promoted = store.get_json(layout.promoted("tiny"))
    assert promoted["drafter"] == RUN
    assert promoted["report_sha256"] == sha256(store.get(layout.report(EVALUATION))).hexdigest()
    assert store.get_json(layout.evaluation(EVALUATION, "progress.json"))["done"] == 24

    again = evaluate(store, resource)
    assert again.created_at == report.created_at


def test_a_failed_gate_is_a_result_not_an_error(tmp_path: Path, store: Store) -> None:
    _, resource = prepared(tmp_path, store, evaluation={"gate": {"minAcceptanceLength": 3.0}})
    report = evaluate(store, resource)
    assert not report.gate.passed
    assert "is below 3" in report.gate.reason
    assert report.gate.advice
    assert store.exists(layout.report(EVALUATION))
    assert not store.exists(layout.promoted("tiny"))


def test_sampled_answers_are_measured_but_not_compared(tmp_path: Path, store: Store) -> None:
    _, resource = prepared(tmp_path, store, evaluation={"temperature": 0.8, "dtype": "bfloat16"})
    report = evaluate(store, resource)
    assert report.greedy_equal is None
    assert report.differences is None
    assert report.temperature == 0.8
    assert "the target was trained against in float32 and evaluated in bfloat16" in report.warnings


def test_no_export_and_no_prompts_are_told_in_one_sentence(tmp_path: Path, store: Store) -> None:
    _, resource = prepared(tmp_path, store)
    none = resource.model_copy(
        update={
            "spec": resource.spec.model_copy(
                update={"prompts": resource.spec.prompts.model_copy(update={"hold_out": 0.0})}
            )
        }
    )
    with pytest.raises(ConfigurationError, match="raise prompts"):
        evaluate(store, none)
    with pytest.raises(ConfigurationError, match="train the drafter first"):
        run_stage(store, resource, dataset=DATASET, drafter="f" * 16, evaluation=EVALUATION)


def test_stopped_half_way_and_run_again_it_goes_on_from_its_answers(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, resource = prepared(tmp_path, store)

    def stop_at_five(self: StageProgress, done: int) -> None:
        if done == 5:
            raise Preempted("asked to stop")

    with monkeypatch.context() as patch:
        patch.setattr(StageProgress, "count", stop_at_five)
        with pytest.raises(Preempted):
            evaluate(store, resource)
    assert not store.exists(layout.report(EVALUATION))
    told: list[int] = []
    monkeypatch.setattr(StageProgress, "count", lambda self, done: told.append(done))
    assert evaluate(store, resource).contenders[1].answers == 6
    assert told == list(range(5, 13))  # the five answers kept, then each of the seven that were missing


def test_the_job_ends_with_143_when_asked_to_stop(
    tmp_path: Path, store: Store, s3_server: EmbeddedStore
) -> None:
    path, _ = prepared(tmp_path, store, evaluation={"samples": 20, "maxTokens": 512, "repeats": 10})
    arguments = ["--resource", str(path), "--dataset", DATASET, "--run", RUN, "--evaluation", EVALUATION]
    job = JobProcess("evaluate", arguments, s3_server.environment, tmp_path / "job.log")
    job.wait_for("measuring")
    time.sleep(1.0)
    job.send(signal.SIGTERM)
    assert job.wait(20) == 143
    assert "run again to go on" in job.said()
    assert not store.exists(layout.report(EVALUATION))
