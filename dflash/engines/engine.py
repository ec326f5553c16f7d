"""What an engine is to the rest of the suite: token ids in, exactly the ids that were produced out.

An engine knows no prompts, datasets or gates. It is used from one asyncio loop; how much it takes at once
is its own business, which it tells through `in_flight`.
"""

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from dflash.data.rows import Ids, Origin


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to produce."""

    sample_id: str
    prompt_ids: Ids
    max_tokens: int
    seed: int
    """This sample's own, 0 <= seed < 2**31."""


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer: every produced id, the end-of-turn token included where there is one."""

    output_ids: Ids
    finish_reason: str
    """`stop` when the target ended its turn, `length` when `max_tokens` did."""


class RequestRefusedError(Exception):
    """This request gets no answer, however often it is made. `reason` is the gate's word for it."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@dataclass
class EngineCounts:
    """What an engine met so far; shown as figures of progress."""

    requests: int = 0
    retries: int = 0
    restarts: int = 0


class Engine(ABC):
    """Runs the target. `start` once, then `generate` from many tasks at once, then `close`."""

    origin: Origin
    """Written to every row; known after `start`."""
    counts: EngineCounts

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Requests that should be unanswered at once now: the engine is kept busy and its queue short."""

    @abstractmethod
    async def start(self) -> None:
        """Load or launch what is needed. ConfigurationError or TemporaryError when that is impossible."""

    @abstractmethod
    async def generate(self, request: Request) -> Completion:
        """Produce one answer.

        Raises RequestRefusedError when it cannot be answered, TemporaryError when the engine is lost.
        """

    async def rendered(self, messages: list[dict[str, Any]], *, thinking: bool) -> list[int] | None:
        """The ids that the engine itself makes of a conversation; None for an engine that makes none."""
        del messages, thinking
        return None

    @abstractmethod
    async def close(self) -> None:
        """Let go of everything; requests in flight are abandoned."""


def sample_seed(seed: int, sample_id: str) -> int:
    """A sample's own seed: the same whoever generates it, with whatever else, in whatever order."""
    digest = hashlib.sha256(f"{seed}/{sample_id}".encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1
