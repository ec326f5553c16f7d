"""What was spent, what failures wasted, and where a run ends: arithmetic, and how executors count."""

import pytest

from dflash.planning.spending import Spending, project
from dflash.planning.warm_up import Expected, WarmUp
from dflash.progress import Progress
from operators.accounts import Accounts, catching_up, machine_gpus
from operators.observed import Failure, Record, RoleRecord

NOW = 1_800_000_000.0
HALF = Progress(stage="training", done=50, total=100, eta_seconds=3600, updated_at=NOW)
SPENT = (
    Spending(gpus=8).adding("generation", 8 * 3600, wasted=False).adding("training", 8 * 3600, wasted=True)
)
MEASURED = WarmUp(
    settings="s",
    device="cpu",
    answers=10,
    dropped_share=0,
    prompt_tokens=10,
    response_tokens=10,
    stages={"evaluation": Expected(seconds=1800, gpus=1)},
)


def test_the_running_stage_is_projected_to_its_end_at_the_gpus_that_it_holds() -> None:
    seen = project(SPENT, "training", HALF, now=NOW, price=3.0)
    assert (seen.spent_gpu_hours, seen.wasted_gpu_hours, seen.gpu_hours) == (16, 8, 24)
    assert (seen.spent, seen.wasted, seen.cost) == (48, 24, 72)
    assert (seen.ends_at, seen.through) == (NOW + 3600, "training")


def test_later_stages_are_counted_where_a_warm_up_has_measured_them() -> None:
    seen = project(SPENT, "training", HALF, now=NOW, price=3.0, warm_up=MEASURED)
    assert (seen.gpu_hours, seen.cost) == (24.5, 73.5)
    assert (seen.ends_at, seen.through) == (NOW + 5400, "evaluation")


def test_time_that_has_passed_since_the_progress_was_written_is_not_left() -> None:
    assert project(SPENT, "training", HALF, now=NOW + 600).ends_at == NOW + 3600


@pytest.mark.parametrize("progress", [None, HALF.model_copy(update={"eta_seconds": None})])
def test_no_end_is_told_before_there_is_a_rate(progress: Progress | None) -> None:
    seen = project(SPENT, "training", progress, now=NOW)
    assert (seen.gpu_hours, seen.ends_at, seen.cost, seen.spent) == (None, None, None, None)


def test_a_stage_that_failed_is_catching_up_until_it_is_further_than_before() -> None:
    failure = Failure("drafter", 0, 0, "Killed", "", 137, "", NOW)
    record = Record("s", {"drafter": RoleRecord("h", failure=failure, done_at_failure=40.0)})
    assert not catching_up(Record(), "training", 0.0)
    for done, behind in ((30.0, True), (40.0, True), (41.0, False)):
        assert catching_up(record, "training", done) is behind
    assert not catching_up(record, "evaluation", 0.0)


class FakeStore:
    """Keeps JSON by key."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def find_json(self, key: str):
        import orjson

        return orjson.loads(self.kept[key]) if key in self.kept else None

    def put(self, key: str, data: bytes) -> None:
        self.kept[key] = data


def test_books_go_on_in_the_next_run_and_count_no_time_between_runs(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert machine_gpus() == 2
    store = FakeStore()
    first = Accounts(store, "d")  # type: ignore[arg-type]
    for second in (0, 5, 10):
        first.look(NOW + second, {"generation"}, Record(), {})
    first.look(NOW + 12, {"generation", "training"}, Record(), {})
    first.save(NOW + 12)
    second_run = Accounts(store, "d")  # type: ignore[arg-type]
    second_run.look(NOW + 5000, {"training"}, Record(), {})
    second_run.look(NOW + 5010, {"training"}, Record(), {})
    second_run.look(NOW + 5020, set(), Record(), {})
    stages = second_run.spending.stages
    assert stages["generation"].gpu_seconds == 2 * (10 + 1)
    assert stages["training"].gpu_seconds == 2 * (1 + 10)
    assert second_run.spending.gpus == 0
