"""What a report makes of its measurements: medians, sentences, and the training's curve."""

import pytest

from dflash.evaluation.answers import Answer
from dflash.evaluation.report import losses, measure, training_summary
from tests.unit.test_evaluation_acceptance import answer


def timed(repeat: int, seconds: float, contender: str = "dflash") -> Answer:
    return answer("q", [2] * 10, repeat=repeat, decode_seconds=seconds).model_copy(
        update={"contender": contender}
    )


def test_speed_is_the_median_of_the_repeats_and_its_spread_is_told() -> None:
    answers = [timed(0, 1.0), timed(1, 2.0), timed(2, 4.0)]
    found = measure("dflash", 1, answers, [], block_size=3)
    assert found.tokens_per_second == pytest.approx(20 / 2.0)
    assert found.tokens_per_second_spread == pytest.approx((20 / 1.0 - 20 / 4.0) / 10.0)


def test_losing_to_plain_decoding_under_load_is_told_with_where() -> None:
    plain = [timed(0, 2.0, "none")]
    rows = [
        measure("none", 1, plain, [], block_size=1),
        measure("dflash", 1, [timed(0, 1.0)], plain, block_size=3),
        measure("dflash", 32, [timed(0, 2.5)], plain, block_size=3),
        measure("mtp", 1, [timed(0, 1.5, "mtp")], plain, block_size=3),
    ]
    assert len(losses(rows)) == 1
    assert "dflash is slower" in losses(rows)[0]
    assert "0.80 times at 32" in losses(rows)[0]


def test_the_curve_keeps_every_measured_checkpoint_in_the_order_of_steps() -> None:
    rows = [{"global_step": step, "time": 1.0, "train/loss": 5.0 - step / 1000} for step in range(1, 1001)]
    late = [{"global_step": 100 * n, "eval/acceptance_length": 1.0 + n / 10} for n in (1, 2, 3)]
    found = training_summary([*rows, {"global_step": 1000, "event": "done"}, *late])
    assert found is not None
    assert found.steps == 1000
    assert found.final["eval/acceptance_length"] == pytest.approx(1.3)
    assert [r["global_step"] for r in found.curve if "eval/acceptance_length" in r] == [100, 200, 300]
    assert [r["global_step"] for r in found.curve] == sorted(r["global_step"] for r in found.curve)
    assert len(found.curve) <= 203
