"""What SGLang says is counted as everywhere here, read back, and not believed where it disagrees."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dflash.errors import ConfigurationError, TemporaryError
from dflash.evaluation import launch
from dflash.evaluation.answers import Question
from dflash.evaluation.served import Served, _cross_check, read_counters, to_answer
from dflash.model.facts import TargetFacts
from dflash.model.shape import DraftShape, resolve_shape
from dflash.resource.model import DraftModel
from tests.support import planning
from tests.unit.test_evaluation_acceptance import answer

QUESTION = Question(sample_id="q", prompt_ids=[1, 2])
CONFIG = {
    "hidden_size": 8,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "vocab_size": 50,
    "intermediate_size": 16,
}

FACTS = TargetFacts.from_config(CONFIG)


def shape() -> DraftShape:
    model = DraftModel(layers=1, block_size=16, sliding_window=None, taps=[1, 4], mask_token_id=40)
    return resolve_shape(model, FACTS)


def said(tokens: int, histogram: list[int], **meta: object) -> dict[str, object]:
    return {
        "output_ids": list(range(tokens)),
        "meta_info": {
            "completion_tokens": tokens,
            "finish_reason": {"type": "length"},
            "e2e_latency": 2.0,
            "spec_correct_drafts_histogram": histogram,
            **meta,
        },
    }


def test_a_histogram_becomes_verifications_without_the_prefills_token() -> None:
    # One verification with no draft accepted, one with two, one with five: 1 + 3 + 6 tokens and the first.
    found = to_answer(said(11, [1, 0, 1, 0, 0, 1]), QUESTION, "dflash", 8, 0)
    found.check()
    assert sorted(found.emitted) == [1, 3, 6]
    assert sorted(found.accepted) == [0, 2, 5]
    assert not found.ordered
    assert found.concurrency == 8


def test_what_a_verification_accepted_beyond_the_answers_end_is_not_counted() -> None:
    found = to_answer(said(8, [1, 0, 1, 0, 0, 1]), QUESTION, "dflash", 1, 0)
    found.check()
    assert sum(found.emitted) == 7
    assert found.verifications == 3


def test_times_come_from_the_servers_own_clock_where_it_tells_them() -> None:
    times = {"request_received_ts": 10.0, "prefill_finished_time": 10.5, "request_finished_ts": 12.0}
    found = to_answer(said(3, [2], **times), QUESTION, "dflash", 1, 0)
    assert (found.prefill_seconds, found.decode_seconds) == (0.5, 1.5)
    assert to_answer(said(3, []), QUESTION, "none", 1, 0).decode_seconds == 2.0


def test_an_answer_that_contradicts_itself_is_refused() -> None:
    raw = said(3, [2])
    raw["output_ids"] = [1]
    with pytest.raises(TemporaryError, match="3 were announced"):
        to_answer(raw, QUESTION, "dflash", 1, 0)


def test_counters_are_summed_over_labels_and_checked() -> None:
    text = (
        "# HELP x y\n"
        'sglang:spec_verify_calls_total{model="a"} 10.0\n'
        'sglang:spec_verify_calls_total{model="b"} 5.0\n'
        "sglang:generation_tokens_total 31.0\n"
    )
    after = read_counters(text)
    assert after["sglang:spec_verify_calls_total"] == 15.0
    mine = [answer("a", [2] * 15)]
    assert _cross_check("dflash", mine, {}, after) == []
    doubled = {name: 2 * value for name, value in after.items()}
    assert len(_cross_check("dflash", mine, {}, doubled)) == 2


def test_engines_are_told_the_block_in_their_own_units() -> None:
    flags = launch.sglang_drafter_flags("/draft", shape(), hybrid=False)
    assert flags[flags.index("--speculative-num-draft-tokens") + 1] == "16"
    assert flags[flags.index("--speculative-accept-threshold-single") + 1] == "1.0"
    assert "extra_buffer" in launch.sglang_drafter_flags("/draft", shape(), hybrid=True)
    config = json.loads(launch.vllm_drafter_flags("/draft", shape())[1])
    assert config == {"method": "dflash", "model": "/draft", "num_speculative_tokens": 15}


def test_a_simulated_acceptance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "4.0")
    with pytest.raises(ConfigurationError, match="invented acceptance; unset it"):
        Served(
            None, {"dflash": Path()}, {"dflash": shape()}, facts=FACTS, store=None, name="e",
            questions=[], ledger=None, on_answer=lambda _: None,
        )  # type: ignore[arg-type]  # fmt: skip


def test_prediction_layers_are_measured_where_the_target_has_them() -> None:
    def contenders(facts: TargetFacts, **evaluation: object) -> Served:
        spec = planning.spec(evaluation={"baselines": ["none", "mtp"], **evaluation})
        return Served(
            spec, {"dflash": Path()}, {"dflash": shape()}, facts=facts, store=None, name="e", questions=[],
            ledger=None, on_answer=lambda _: None,
        )  # type: ignore[arg-type]  # fmt: skip

    assert contenders(FACTS).contenders == ["dflash", "none"]
    assert contenders(replace(FACTS, predicts_ahead=True)).contenders == ["dflash", "mtp", "none"]
    given = [{"contender": "mtp", "url": "http://here:1"}]
    assert contenders(FACTS, servers=given).contenders == ["dflash", "mtp", "none"]


def test_a_tap_that_the_server_cannot_read_is_refused_before_it_starts() -> None:
    last = replace(shape(), taps=(1, shape().target_layers - 1))
    with pytest.raises(ConfigurationError, match="which SGLang cannot read; train with taps below"):
        Served(
            None, {"dflash": Path()}, {"dflash": last}, facts=FACTS, store=None, name="e",
            questions=[], ledger=None, on_answer=lambda _: None,
        )  # type: ignore[arg-type]  # fmt: skip
