"""What a warm-up is made of, and what follows from what it measured."""

import pytest

from dflash.planning.warm_up import (
    Expected,
    Timed,
    WarmUp,
    least_prompts,
    objections,
    pace,
    settings_of,
    shrunk,
)
from tests.support.planning import spec

SPEC = spec(
    training={"batchSize": 4, "targets": 2, "drafters": 2},
    generation={"maxTokens": 512},
    tracking={"gpuHourPrice": 2.0, "costLimit": 100.0},
)


def measured(**changes: object) -> WarmUp:
    stages = {"training": Expected(seconds=36_000, gpus=4)}
    known = {"answers": 50, "dropped_share": 0.02, "prompt_tokens": 10, "response_tokens": 20}
    return WarmUp(settings="s", device="CPU", **{**known, "stages": stages, **changes})  # type: ignore[arg-type]


def rows(count: int, **changes: float) -> list[dict[str, float]]:
    base = {
        "drafter/tokens_per_second": 800.0,
        "drafter/wait_share": 0.2,
        "target/idle_share": 0.5,
        "target/live": 2.0,
        "progress/skipped_steps": 0.0,
        "channel/bad_replies": 0.0,
    }
    return [{"global_step": 2 * i, "time": 100.0 + i, **base, **changes} for i in range(count)]


def test_a_warm_up_keeps_what_rates_depend_on_and_shrinks_the_rest() -> None:
    small = shrunk(SPEC, 16, "now")
    assert (small.prompts.limit, small.rerun) == (16, "now")
    assert small.generation.max_tokens == 512
    assert (small.training.batch_size, small.training.targets, small.training.drafters) == (4, 2, 2)
    assert small.training.epochs * 16 * (1 - small.prompts.hold_out) / 4 >= 40
    assert small.generation.gate.max_dropped_share == 1.0
    assert small.evaluation.samples <= 8
    assert not small.tracking.wandb.enabled
    assert 0 < small.prompts.hold_out <= 0.5
    assert least_prompts(SPEC) == 16


def test_prompts_and_epochs_change_no_settings_but_the_fleet_does() -> None:
    assert settings_of(SPEC) == settings_of(SPEC.model_copy(update={"prompts": spec().prompts}))
    for section, changes in (("training", {"targets": 3}), ("drafter", {"layers": 3})):
        part = getattr(SPEC, section).model_copy(update=changes)
        assert settings_of(SPEC.model_copy(update={section: part})) != settings_of(SPEC)


def test_each_sides_own_rate_is_what_it_would_do_without_waiting() -> None:
    found = pace(rows(9), world=2)
    assert found is not None
    assert found.steps_per_second == pytest.approx(2.0)
    assert found.drafter == pytest.approx(800 / 2 / 0.8)
    assert found.target == pytest.approx(800 / 2 / 0.5)
    assert pace(rows(3), world=2) is None


def test_a_stage_is_its_startup_and_its_work() -> None:
    timed = Timed(seconds=130.0, work=10.0, units=300.0)
    assert timed.startup == 100.0
    assert timed.expected(6000.0, 8.0) == Expected(seconds=700.0, startup_seconds=100.0, gpus=8.0)


def test_go_unless_something_is_wrong_and_then_why() -> None:
    well = pace(rows(9), world=2)
    assert well is not None
    assert objections(SPEC, measured(), well) == []
    assert (
        "tracking.costLimit is 100.00"
        in objections(SPEC, measured(stages={"training": Expected(seconds=72_000, gpus=4)}), well)[0]
    )
    assert "were dropped" in objections(SPEC, measured(dropped_share=0.3), well)[0]
    assert objections(SPEC, measured(dropped_share=0.3, answers=8), well) == []
    skipping = pace(rows(9, **{"progress/skipped_steps": 3.0}), world=2)
    assert skipping is not None
    assert "not finite" in objections(SPEC, measured(), skipping)[0]
