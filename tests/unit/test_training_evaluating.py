"""Rank 0 and measured acceptance: what is asked for, told, kept, and exported."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from dflash.errors import Preempted
from dflash.resource.training import EarlyStop, TrainingEvaluation
from dflash.training.checkpoints import Place
from dflash.training.evaluating import Evaluating
from dflash.training.measured import Measured
from tests.support.measured import measured


class World:
    """Everything around an evaluating rank 0, recorded."""

    def __init__(self, *history: Measured, earlier: tuple[Mapping[str, Any], ...] = (), **spec: Any) -> None:
        self.history = list(history)
        self.fresh: list[Measured] = []
        self.asked: list[Place] = []
        self.asked_step = max((m.step for m in history), default=0)
        self.seconds_since_asked = 0.0
        self.waiting = False
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.events: list[str] = []
        self.earlier = list(earlier)
        self.committed: Place | None = None
        self.pinned: frozenset[Place] = frozenset()
        wanted = TrainingEvaluation(**{"every_steps": 10, **spec})
        self.subject = Evaluating(wanted, 100, self, self, self)  # type: ignore[arg-type]

    # measurements
    @property
    def open(self) -> list[Place]:
        done = {m.place for m in self.history}
        return [place for place in self.asked if place not in done]

    def ask(self, place: Place) -> None:
        self.asked.append(place)
        self.asked_step = place.step

    def take(self) -> list[Measured]:
        fresh, self.fresh = self.fresh, []
        return fresh

    def wait_for(self, step: int, seconds: float, stopping: Callable[[], bool]) -> bool:
        del seconds, stopping
        return any(m.step == step for m in self.history)

    # the tracker
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append((step, dict(metrics)))

    def event(self, text: str) -> None:
        self.events.append(text)

    # what happens
    def commit(self, step: int) -> None:
        self.committed = Place(step, 0)
        self.subject.after_step()

    def answer(self, found: Measured) -> None:
        self.history.append(found)
        self.fresh.append(found)
        self.subject.after_step()


def test_the_newest_committed_checkpoint_is_asked_for_when_one_is_due() -> None:
    world = World()
    world.subject.after_step()
    world.commit(9)
    assert world.asked == []
    world.commit(12)
    assert world.asked == [Place(12, 0)]
    assert world.pinned == {Place(12, 0)}
    world.waiting = True
    world.commit(30)
    assert world.asked == [Place(12, 0)]
    world.waiting = False
    world.commit(31)
    assert world.asked[-1] == Place(31, 0)


def test_what_comes_is_a_row_at_its_own_step_and_figures_and_keeps_the_best() -> None:
    world = World()
    world.commit(10)
    world.answer(measured(10, 2.0))
    world.commit(20)
    world.answer(measured(20, 1.5))
    assert [step for step, _ in world.rows] == [10, 20]
    assert world.rows[0][1]["eval/acceptance_length"] == 2.0
    assert world.rows[0][1]["eval/accepted_slot_1"] == 0.5
    assert world.subject.figures == {
        "measured_acceptance_length": 1.5,
        "measured_step": 20.0,
        "best_acceptance_length": 2.0,
        "best_step": 10.0,
    }
    assert world.pinned == {Place(10, 0)}


def test_an_attempt_goes_on_from_what_was_measured_and_logs_only_what_was_not() -> None:
    earlier = ({"global_step": 10, "eval/acceptance_length": 2.0},)
    world = World(measured(10, 2.0), measured(20, 1.0), earlier=earlier)
    assert [step for step, _ in world.rows] == [20]
    assert world.pinned == {Place(10, 0)}
    assert world.subject.figures["best_step"] == 10.0


def test_the_run_ends_by_its_rule_with_the_reason_in_all_places_and_asks_no_more() -> None:
    world = World(stop=EarlyStop(min_acceptance_length=1.5, after=0.1))
    world.commit(10)
    assert world.subject.ending == ""
    world.answer(measured(10, 1.0))
    assert "below training.evaluation.stop.minAcceptanceLength" in world.subject.ending
    assert world.events == [world.subject.ending]
    assert world.subject.figures["early_stop"] == world.subject.ending
    world.commit(40)
    assert world.asked == [Place(10, 0)]
    assert World(
        measured(10, 1.0), stop=EarlyStop(patience=0, min_acceptance_length=1.5, after=0.1)
    ).subject.ending


def test_at_the_end_the_better_checkpoint_is_chosen_and_that_is_an_event() -> None:
    world = World(measured(10, 3.0), measured(20, 1.0))
    world.committed = Place(20, 0)
    assert world.subject.choose(lambda: False) == measured(10, 3.0)
    assert "the checkpoint of step 10 is exported" in world.events[0]


def test_an_unmeasured_last_checkpoint_is_exported_with_a_warning() -> None:
    world = World(measured(10, 3.0))
    world.committed = Place(20, 0)
    assert world.subject.choose(lambda: False) is None
    assert world.asked == [Place(20, 0)]
    assert "was not measured within 600 s" in world.events[0]


def test_asked_to_stop_while_it_waits_the_export_is_left_to_the_next_attempt() -> None:
    world = World(measured(10, 3.0))
    world.committed = Place(20, 0)
    with pytest.raises(Preempted):
        world.subject.choose(lambda: True)


def test_where_the_last_is_wanted_nothing_is_waited_for() -> None:
    world = World(measured(10, 3.0), best_checkpoint=False)
    world.committed = Place(20, 0)
    assert world.pinned == frozenset()
    assert world.subject.choose(lambda: False) is None
    assert world.asked == []
