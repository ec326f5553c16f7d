"""The planner against a world that does whatever it likes: what must hold in any order of events."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dflash.resource import DrafterSpec
from dflash.resource.hashes import StageHashes
from operators.actions import Promote, Start, StopChild, StopGroup
from operators.conditions import summarize
from operators.observed import Child, Committed, Observed, Record, StageProgress, hash_of
from operators.plan import plan

EVENTS = st.sampled_from(
    [
        "plan", "plan", "plan", "crash_before_acting", "run", "die_1", "die_75", "kill", "preempt", "evict",
        "vanish", "delete", "reap", "reap", "succeed", "step", "suspend", "resume", "edit", "edit_back",
        "lose_record", "resize", "time_10", "time_300", "late_success",
    ]
)  # fmt: skip


class World:
    """Children that end slowly, a store, and an executor that may die between deciding and acting."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.children: list[Child] = []
        self.record = Record()
        self.committed: dict[str, bool] = {}
        self.attempts: dict[str, int] = {}
        self.done: dict[str, tuple[int, float, float]] = {}
        self.suspended = False
        self.edits = 0
        self.drafters = 2
        self.born = 0
        self.started: list[tuple[str, int]] = []

    @property
    def hashes(self) -> StageHashes:
        return StageHashes("d0", f"r{self.edits}", f"e{self.edits}")

    def look(self) -> Observed:
        hashes = self.hashes
        progress = {}
        for stage, output in (("generation", hashes.dataset), ("training", hashes.drafter)):
            if output in self.done:
                progress[stage] = StageProgress(*self.done[output])
        return Observed(
            name="x",
            spec=DrafterSpec.model_validate(
                {
                    "target": {"model": "m"},
                    "prompts": {"uri": "p"},
                    "storage": {"uri": "s"},
                    "training": {"targets": 2, "drafters": self.drafters, "maxRestarts": 1000},
                    "suspend": self.suspended,
                }
            ),
            hashes=hashes,
            committed=Committed(
                dataset=hashes.dataset in self.committed,
                export=hashes.drafter in self.committed,
                evaluation=hashes.evaluation in self.committed,
                attempt=self.attempts.get(hashes.drafter, -1),
                promoted=self.committed.get("promoted " + hashes.evaluation, False),
            ),
            children=tuple(self.children),
            record=self.record,
            now=self.now,
            progress=progress,
        )

    def step(self, act: bool = True) -> bool:
        """One look; True when something was done."""
        decided = plan(self.look())
        told = {c.type: c.status for c in summarize(self.look(), decided).conditions}
        if not self.suspended:
            assert [told[t] for t in ("Reconciling", "Stalled", "Ready")].count("True") == 1
        self.record = decided.record
        if not act:
            return True
        busy = False
        for action in decided.actions:
            busy |= self.carry_out(action)
        return busy

    def carry_out(self, action) -> bool:
        if isinstance(action, Start):
            for index in action.indexes:
                self.born += 1
                self.children.append(
                    Child(
                        id=str(self.born),
                        role=action.role,
                        hash=action.hash,
                        index=index,
                        state="pending",
                        attempt=action.attempt,
                        world=action.world,
                        created_at=self.now,
                    )
                )
            if action.role == "drafter":
                self.started.append((action.hash, action.attempt))
                self.attempts[action.hash] = max(action.attempt, self.attempts.get(action.hash, -1))
        elif isinstance(action, StopGroup):
            self.children = [
                replace(c, state="stopping")
                if c.live and (c.role, c.hash, c.attempt) == (action.role, action.hash, action.attempt)
                else c
                for c in self.children
            ]
        elif isinstance(action, StopChild):
            self.end(lambda c: c.id == action.child.id, state="stopping")
        elif isinstance(action, Promote):
            self.committed["promoted " + action.evaluation] = True
        else:
            return False
        self.check()
        return True

    def end(self, which, **how) -> None:
        for i, child in enumerate(self.children):
            if child.live and which(child):
                self.children[i] = replace(child, ended_at=self.now, **how)
                return

    def check(self) -> None:
        alive = {(c.hash, c.attempt) for c in self.children if c.role == "drafter" and c.live}
        assert len(alive) <= 1, f"two live drafter attempts: {alive}"
        assert len(self.started) == len(set(self.started)), f"an attempt was started twice: {self.started}"

    def happen(self, event: str, pick: int) -> None:
        live = [c for c in self.children if c.live]
        chosen = live[pick % len(live)].id if live else ""

        def this(child: Child) -> bool:
            return child.id == chosen

        ends = {
            "die_1": {"state": "failed", "exit_code": 1},
            "die_75": {"state": "failed", "exit_code": 75},
            "kill": {"state": "failed", "exit_code": 137},
            "preempt": {"state": "failed", "exit_code": 143},
            "evict": {"state": "failed", "exit_code": None, "disrupted": True, "reason": "Evicted"},
            "delete": {"state": "stopping"},
            "run": {"state": "running"},
            "late_success": {"state": "succeeded", "exit_code": 0},
        }
        if event in ends:
            self.end(this, **ends[event])
        elif event == "vanish":
            self.children = [c for c in self.children if not this(c)]
        elif event == "reap":  # what was told to stop has stopped
            self.children = [c for c in self.children if c.state != "stopping"]
        elif event == "succeed":
            self.succeed(chosen)
        elif event == "step":
            attempt, done, _ = self.done.get(self.hashes.drafter, (0, 0.0, 0.0))
            attempt = max((c.attempt for c in live if c.role == "drafter"), default=attempt)
            self.done[self.hashes.drafter] = (attempt, done + 1, self.now)
        elif event in ("suspend", "resume"):
            self.suspended = event == "suspend"
        elif event in ("edit", "edit_back"):
            self.edits = int(event == "edit")
        elif event == "resize":
            self.drafters = 3 - self.drafters
        elif event == "lose_record":
            self.record = Record()
        elif event.startswith("time_"):
            self.now += float(event.removeprefix("time_"))
        elif event == "plan":
            self.step()
        elif event == "crash_before_acting":
            self.step(act=False)
        self.check()

    def succeed(self, chosen: str) -> None:
        """A child's work is committed, then it ends; a drafter's peers end with it."""
        for child in list(self.children):
            if child.id != chosen or child.role == "target" or child.state != "running":
                continue
            group = ("drafter", child.hash, child.attempt)
            mates = [c for c in self.children if (c.role, c.hash, c.attempt) == group]
            whole = mates if child.role == "drafter" else [child]
            if all(c.state in ("running", "succeeded") for c in whole):
                self.committed[child.hash] = True
                for mate in whole:
                    self.end(lambda c, mate=mate: c.id == mate.id, state="succeeded", exit_code=0)

    def settle(self) -> None:
        """From now on all goes well: everything runs, works and succeeds."""
        self.suspended = False
        for _ in range(400):
            busy = self.step()
            self.children = [c for c in self.children if c.state != "stopping"]
            for child in [c for c in self.children if c.live]:
                self.end(lambda c, child=child: c.id == child.id, state="running")
            if not busy:
                self.now += 20.0
                for child in [c for c in self.children if c.live]:
                    self.succeed(child.id)
            if plan(self.look()).idle and not any(c.live for c in self.children):
                return
        raise AssertionError(f"does not settle: {plan(self.look())}")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 7)), max_size=60))
def test_any_order_of_events_never_has_two_live_attempts_and_converges(events):
    world = World()
    for event, pick in events:
        world.happen(event, pick)
    world.settle()
    assert plan(world.look()).idle
    hashes = world.hashes
    assert all(hash_of(role, hashes) in world.committed for role in ("drafter", "evaluate"))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(EVENTS, st.integers(0, 7)), max_size=40))
def test_planning_twice_on_one_look_decides_the_same(events):
    world = World()
    for event, pick in events:
        world.happen(event, pick)
    seen = world.look()
    assert plan(seen) == plan(seen)
