"""What a store can be relied on for: tried on the real bucket, told in sentences.

Exactly-once rests on conditional writes, which not every S3 server has. Not a test of reachability or
rights: that is `Store.check`, to be called first.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dflash.storage.store import Store

_RACERS = 8
_ROUNDS = 3


@dataclass(frozen=True)
class ProbeResult:
    """What was seen to work."""

    create_once: bool
    """A second create is refused and leaves the first content."""
    compare_and_swap: bool
    """A replacement with an old entity tag is refused, with the current one it is done."""
    racing_creates: bool
    """Of several creates at the same time exactly one wins."""
    listing: bool
    """Keys just written are listed, and only those below the prefix."""

    @property
    def ok(self) -> bool:
        """Whether nothing is missing."""
        return not self.missing

    @property
    def missing(self) -> tuple[str, ...]:
        """A sentence for each thing that does not work: what is lost by it and what to do."""
        said = []
        if not self.create_once:
            said.append(
                "the server ignores If-None-Match: two workers that race may both commit, so run one "
                "replica a "
                "stage, or use a server with conditional writes"
            )
        elif not self.racing_creates:
            said.append(
                "of several creates at the same time more than one was accepted, or none: run one replica "
                "a stage, "
                "or use a newer server"
            )
        if not self.compare_and_swap:
            said.append(
                "the server ignores If-Match: an old attempt may move LATEST and promoted back; resuming "
                "still "
                "checks every COMMIT, but do not run two Drafters with one name"
            )
        if not self.listing:
            said.append("keys just written are not listed: finished work may be done again")
        return tuple(said)


def probe(store: Store) -> ProbeResult:
    """Try conditional writes and listing below a folder of its own, and clean up."""
    folder = store.under(f"probe-{random.getrandbits(64):016x}")
    try:
        create_once = folder.create("once", b"first") and not folder.create("once", b"second")
        create_once = create_once and folder.get("once") == b"first"
        return ProbeResult(
            create_once=create_once,
            compare_and_swap=_swaps(folder),
            racing_creates=create_once and all(_one_wins(folder, number) for number in range(_ROUNDS)),
            listing=_lists(folder),
        )
    finally:
        for found in list(folder.list()):
            folder.delete(found.key)


def _swaps(folder: Store) -> bool:
    old = folder.put("swapped", b"1")
    new = folder.swap("swapped", b"2", old)
    stale = folder.swap("swapped", b"3", old)
    return new is not None and stale is None and folder.get("swapped") == b"2"


def _one_wins(folder: Store, number: int) -> bool:
    with ThreadPoolExecutor(_RACERS) as pool:
        won = list(pool.map(lambda racer: folder.create(f"race-{number}", b"%d" % racer), range(_RACERS)))
    return sum(won) == 1 and folder.get(f"race-{number}") == b"%d" % won.index(True)


def _lists(folder: Store) -> bool:
    keys = [f"listed/{name}" for name in ("a", "b", "c=1")]
    for key in keys:
        folder.put(key, b"")
    return [found.key for found in folder.list("listed/")] == keys
