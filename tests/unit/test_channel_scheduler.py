"""The scheduler under any order of events: nothing lost, nothing twice, always in order."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dflash.channel.scheduler import Scheduler

CAPACITY = 40


class AnyOrderOfEvents(RuleBasedStateMachine):
    """Targets come, answer, refuse, hang and die as they like; one drafter consumes."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(deadline=100.0, max_refusals=10**6)
        self.now = 0.0
        self.names = 0
        self.tokens: list[int] = []
        self.held: dict[str, set[int]] = {}
        self.taken: list[int] = []
        self.refused: set[tuple[str, int]] = set()
        self.delivered: set[int] = set()

    @rule(tokens=st.lists(st.integers(1, 60), min_size=1, max_size=10))
    def submit(self, tokens):
        for count in tokens:
            assert self.scheduler.submit(count) == len(self.tokens)
            self.tokens.append(count)
        self.assign()

    @rule()
    def join(self):
        name = f"target-{self.names}"
        self.names += 1
        self.held[name] = set()
        self.scheduler.join(name, CAPACITY)
        self.assign()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data):
        name = data.draw(st.sampled_from(sorted(self.held)))
        assert self.scheduler.leave(name) == sorted(self.held.pop(name))
        self.assign()

    @precondition(lambda self: any(self.held.values()))
    @rule(data=st.data(), refused=st.booleans(), seconds=st.floats(0, 5))
    def answer(self, data, refused, seconds):
        name, index = data.draw(
            st.sampled_from(sorted((name, index) for name, held in self.held.items() for index in held))
        )
        self.now += seconds
        self.held[name].remove(index)
        if refused:
            assert not self.scheduler.refuse(name, index, self.now)
            self.refused.add((name, index))
        else:
            self.delivered.add(index)
            assert self.scheduler.deliver(name, index, self.now)
            assert not self.scheduler.deliver(name, index, self.now)
        self.assign()

    @rule(index=st.integers(0, 50))
    def answer_of_a_target_that_is_gone(self, index):
        assert not self.scheduler.deliver("target-none", index, self.now)

    @rule()
    def take(self):
        self.taken += self.scheduler.take()
        assert self.taken == list(range(len(self.taken)))

    def assign(self):
        for name, index in self.scheduler.assign(self.now):
            assert all(index not in held for held in self.held.values())
            assert index not in self.taken
            self.held[name].add(index)

    @invariant()
    def nothing_is_lost(self):
        outstanding = sum(len(held) for held in self.held.values())
        total = self.scheduler.waiting + outstanding + self.scheduler.ready + len(self.taken)
        assert total == len(self.tokens)

    @invariant()
    def what_a_target_holds_is_bounded(self):
        for name, held in self.held.items():
            tokens = sum(self.tokens[index] for index in held)
            assert self.scheduler.outstanding(name) == (len(held), tokens)
            assert tokens <= CAPACITY or len(held) == 1

    @invariant()
    def a_target_is_idle_only_if_it_refused_all_that_waits(self):
        outstanding = {index for held in self.held.values() for index in held}
        waiting = set(range(len(self.tokens))) - outstanding - self.delivered
        for name, held in self.held.items():
            assert held or all((name, index) in self.refused for index in waiting)

    def teardown(self):
        """With one healthy target everything is delivered in the end."""
        for name in list(self.held):
            self.scheduler.leave(name)
        self.held = {"last": set()}
        self.scheduler.join("last", CAPACITY)
        self.assign()
        while self.held["last"]:
            for index in list(self.held["last"]):
                self.held["last"].remove(index)
                assert self.scheduler.deliver("last", index, self.now)
            self.assign()
        self.take()
        assert self.taken == list(range(len(self.tokens)))


AnyOrderOfEvents.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestAnyOrderOfEvents = AnyOrderOfEvents.TestCase


def started(capacity=1000, targets=2, deadline=10.0, max_refusals=3):
    scheduler = Scheduler(deadline, max_refusals)
    for index in range(targets):
        scheduler.join(f"target-{index}", capacity)
    return scheduler


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(1, 6))
def test_work_goes_to_the_target_with_the_least_outstanding(tokens, targets):
    scheduler = started(capacity=10**9, targets=targets)
    for count in tokens:
        scheduler.submit(count)
    load = dict.fromkeys(scheduler.targets, 0)
    for name, index in scheduler.assign(0.0):
        assert load[name] == min(load.values())
        load[name] += tokens[index]


def test_lost_samples_go_out_again_before_later_ones():
    scheduler = started(capacity=20, targets=2)
    for _ in range(6):
        scheduler.submit(10)
    scheduler.assign(0.0)
    lost = scheduler.leave("target-0")
    assert len(lost) == 2
    for index in (1, 3):
        if scheduler.holds("target-1", index) is not None:
            scheduler.deliver("target-1", index, 1.0)
    again = [index for _, index in scheduler.assign(1.0)]
    assert again == lost
    assert all(scheduler.issued(index) == 2 for index in again)


def test_a_refused_sample_goes_to_another_target_first():
    scheduler = started(targets=2)
    scheduler.submit(10)
    ((first, _),) = scheduler.assign(0.0)
    assert not scheduler.refuse(first, 0, 1.0)
    ((second, _),) = scheduler.assign(1.0)
    assert second != first
    assert not scheduler.refuse(second, 0, 2.0)
    ((_, index),) = scheduler.assign(2.0)  # by both: any of them is asked again
    assert index == 0
    assert scheduler.refuse(first if scheduler.holds(first, 0) else second, 0, 3.0)
    assert scheduler.refusals(0) == 3


def test_a_sample_that_is_given_up_keeps_its_place_in_the_order():
    scheduler = started(targets=1, max_refusals=1)
    for _ in range(3):
        scheduler.submit(10)
    scheduler.assign(0.0)
    assert scheduler.deliver("target-0", 0, 1.0)
    assert scheduler.deliver("target-0", 2, 1.0)
    assert scheduler.refuse("target-0", 1, 1.0)
    assert scheduler.take() == [0]
    scheduler.give_up(1)
    assert scheduler.take() == [1, 2]


def test_a_sample_refused_by_the_only_idle_target_does_not_block_the_others():
    scheduler = started(capacity=10, targets=2)
    scheduler.submit(10)
    scheduler.submit(10)
    scheduler.assign(0.0)
    scheduler.refuse("target-0", 0, 1.0)  # target-1 is full
    scheduler.submit(10)
    assert scheduler.assign(1.0) == [("target-0", 2)]


def test_a_request_past_its_deadline_names_its_target():
    scheduler = started(targets=2, deadline=10.0)
    scheduler.submit(1)
    ((name, _),) = scheduler.assign(5.0)
    assert scheduler.overdue(14.9) == []
    assert scheduler.overdue(15.0) == [name]


def test_a_faster_target_gets_more():
    scheduler = started(capacity=100, targets=2)
    speed = {"target-0": 1.0, "target-1": 4.0}
    free = dict.fromkeys(speed, 0.0)
    events: list[tuple[float, str, int]] = []
    delivered = dict.fromkeys(speed, 0)
    now = 0.0
    for _ in range(20):
        scheduler.submit(10)
    for _ in range(400):
        for name, index in scheduler.assign(now):
            free[name] = max(now, free[name]) + 10 / speed[name]
            events.append((free[name], name, index))
        events.sort()
        now, name, index = events.pop(0)
        scheduler.deliver(name, index, now)
        delivered[name] += 1
        for _ in scheduler.take():
            scheduler.submit(10)
    assert 2.5 < delivered["target-1"] / delivered["target-0"] < 5.0
