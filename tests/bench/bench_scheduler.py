"""Cost of scheduling per sample in a drafter, and how busy 64 targets × 24 drafters keep the slower side.

`overhead_us`: CPU time of a whole drafter process (scheduling, messages, order, hand-over) per sample,
with samples of a few tokens so that tensors cost next to nothing, from a real target in another process.

`busy_share_64x24`: an event simulation in which 24 drafters run the real scheduler and 64 targets the
real packing; only compute and wire are simulated. Lengths vary by a log-normal law, a target's speed by
10 % from the next and from batch to batch; a drafters' step is a barrier for all 24. Measured twice: with
targets a tenth slower than drafters, and with drafters a tenth slower; the figure is the lesser of the
slower side's shares of time at work, after a warm-up.
"""

import heapq
import itertools
import random
import tempfile
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dflash.channel.packing import pick
from dflash.channel.scheduler import Scheduler
from tests.support.channel_load import WIDE, block_capture, connect, requests, target_process
from tests.support.channel_peers import Folder

TARGETS, DRAFTERS = 64, 24
QUEUE_DEPTH = 60
TOKEN_BUDGET = 16_384
CAPACITY = 3 * TOKEN_BUDGET
SAMPLES_PER_STEP = 8  # of one drafter
TOKENS_PER_SECOND = 50_000.0  # of one target
WIRE_LATENCY = 0.002
WIRE_TOKENS_PER_SECOND = 400_000.0  # of one link: 4 GB/s at 10 KB a token


@dataclass(frozen=True)
class Asked:
    """A request in a simulated target's queue."""

    arrival: int
    index: int
    tokens: int


@dataclass
class SimulatedTarget:
    speed: float
    queues: dict[int, deque[Asked]] = field(default_factory=dict)
    unsent: dict[int, int] = field(default_factory=dict)
    computing: bool = False
    busy: float = 0.0


@dataclass
class SimulatedDrafter:
    scheduler: Scheduler
    tokens: dict[int, int] = field(default_factory=dict)
    ready: deque[int] = field(default_factory=deque)
    busy: float = 0.0


class Simulation:
    """Events in time order; every decision is made by the real code."""

    def __init__(self, drafters_slower_by: float, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.events: list = []
        self.order = itertools.count()
        self.targets = {
            f"target-{i}": SimulatedTarget(TOKENS_PER_SECOND * self.random.uniform(0.95, 1.05))
            for i in range(TARGETS)
        }
        # A step lasts as long as its slowest drafter: set so that all targets together would take as long
        # for a mean step's tokens, times the given factor.
        steps = [
            [sum(self.draw() for _ in range(SAMPLES_PER_STEP)) for _ in range(DRAFTERS)] for _ in range(400)
        ]
        uneven = sum(max(step) for step in steps) / sum(sum(step) for step in steps)
        rate = sum(target.speed for target in self.targets.values())
        self.drafter_seconds_per_token = drafters_slower_by / rate / uneven
        self.drafters = [SimulatedDrafter(Scheduler(deadline=1e9, max_refusals=3)) for _ in range(DRAFTERS)]
        for drafter in self.drafters:
            for name in self.targets:
                drafter.scheduler.join(name, CAPACITY)
        self.stepping = False
        self.steps = 0

    def draw(self) -> int:
        """Tokens of a sample: a median of 1,200, few of 64, few of 8,192."""
        return min(8192, max(64, int(self.random.lognormvariate(7.1, 0.8))))

    def at(self, when: float, action, *arguments) -> None:
        heapq.heappush(self.events, (when, next(self.order), action, arguments))

    def fill(self, number: int) -> None:
        drafter = self.drafters[number]
        while drafter.scheduler.unfinished + len(drafter.ready) < QUEUE_DEPTH:
            tokens = self.draw()
            drafter.tokens[drafter.scheduler.submit(tokens)] = tokens
        for name, index in drafter.scheduler.assign(self.now):
            self.at(self.now + WIRE_LATENCY, self.arrive, name, number, index, drafter.tokens[index])

    def arrive(self, name: str, number: int, index: int, tokens: int) -> None:
        target = self.targets[name]
        target.queues.setdefault(number, deque()).append(Asked(next(self.order), index, tokens))
        self.compute(name)

    def compute(self, name: str) -> None:
        target = self.targets[name]
        if target.computing:
            return
        free = {n: queue for n, queue in target.queues.items() if target.unsent.get(n, 0) < 2}
        batch = pick(free, TOKEN_BUDGET)
        if not batch:
            return
        for number in {number for number, _ in batch}:
            target.unsent[number] = target.unsent.get(number, 0) + 1
        seconds = sum(asked.tokens for _, asked in batch) / target.speed * self.random.uniform(0.9, 1.1)
        target.computing = True
        target.busy += seconds
        self.at(self.now + seconds, self.computed, name, batch)

    def computed(self, name: str, batch: list[tuple[int, Asked]]) -> None:
        self.targets[name].computing = False
        for number in {number for number, _ in batch}:
            own = [asked for owner, asked in batch if owner == number]
            seconds = WIRE_LATENCY + sum(asked.tokens for asked in own) / WIRE_TOKENS_PER_SECOND
            self.at(self.now + seconds, self.deliver, name, number, own)
        self.compute(name)

    def deliver(self, name: str, number: int, own: list[Asked]) -> None:
        self.targets[name].unsent[number] -= 1
        drafter = self.drafters[number]
        for asked in own:
            assert drafter.scheduler.deliver(name, asked.index, self.now)
        drafter.ready.extend(drafter.scheduler.take())
        self.fill(number)
        self.compute(name)
        self.step()

    def step(self) -> None:
        """A step of all drafters, once each has its samples: the slowest one sets its length."""
        if self.stepping or any(len(drafter.ready) < SAMPLES_PER_STEP for drafter in self.drafters):
            return
        self.stepping = True
        longest = 0.0
        for number, drafter in enumerate(self.drafters):
            tokens = sum(drafter.tokens.pop(drafter.ready.popleft()) for _ in range(SAMPLES_PER_STEP))
            seconds = tokens * self.drafter_seconds_per_token
            longest = max(longest, seconds)
            self.fill(number)
        for drafter in self.drafters:
            drafter.busy += longest  # waiting for one another in the gradient's reduction is not for targets
        self.steps += 1
        self.at(self.now + longest, self.stepped)

    def stepped(self) -> None:
        self.stepping = False
        self.step()

    def run(self, steps: int) -> tuple[float, float]:
        """Mean busy share of targets and of drafters over the second half of so many steps."""
        for number in range(DRAFTERS):
            self.fill(number)
        mark = None
        while self.steps < steps:
            self.now, _, action, arguments = heapq.heappop(self.events)
            action(*arguments)
            if mark is None and self.steps >= steps // 2:
                mark = (self.now, self.busy())
        began, (targets, drafters) = mark
        after_targets, after_drafters = self.busy()
        seconds = self.now - began
        return (after_targets - targets) / TARGETS / seconds, (after_drafters - drafters) / DRAFTERS / seconds

    def busy(self) -> tuple[float, float]:
        return sum(t.busy for t in self.targets.values()), sum(d.busy for d in self.drafters)


def simulate(quick: bool) -> float:
    """The lesser busy share of the slower side."""
    steps = 120 if quick else 600
    targets_slower = Simulation(drafters_slower_by=1 / 1.1).run(steps)
    drafters_slower = Simulation(drafters_slower_by=1.1).run(steps)
    print(f"targets slower: targets busy {targets_slower[0]:.1%}, drafters {targets_slower[1]:.1%}")
    print(f"drafters slower: targets busy {drafters_slower[0]:.1%}, drafters {drafters_slower[1]:.1%}")
    return min(targets_slower[0], drafters_slower[1])


def overhead(quick: bool) -> float:
    """Microseconds of CPU in the drafter process per sample."""
    count = 4000 if quick else 40_000
    with tempfile.TemporaryDirectory() as path:
        folder = Folder(Path(path))
        with (
            target_process(folder, 0, partial(block_capture, WIDE, 64)),
            target_process(folder, 1, partial(block_capture, WIDE, 64)),
            connect(folder) as client,
        ):
            for _ in client.stream(requests(500, 4)):
                pass
            began = time.process_time()
            for _ in client.stream(requests(count, 4)):
                pass
            return 1e6 * (time.process_time() - began) / count


def run(quick: bool) -> dict[str, float]:
    """The two figures."""
    return {"overhead_us": overhead(quick), "busy_share_64x24": simulate(quick)}
