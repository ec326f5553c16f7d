"""Leader election: one holder, taken over only when it has been silent, lost only when it must be."""

import threading
from typing import Any

import pytest

from operators import lease
from operators.kube import Conflict, Unreachable
from operators.lease import LeaderLease

Object = dict[str, Any]


class OneLease:
    """An API server with one Lease, compare-and-swap and all."""

    def __init__(self) -> None:
        self.stored: Object | None = None
        self.version = 0
        self.down = False

    def find(self, *_: Any) -> Object | None:
        if self.down:
            raise Unreachable("down")
        return None if self.stored is None else {**self.stored, "spec": dict(self.stored["spec"])}

    def create(self, _resource: Any, _namespace: str, body: Object) -> Object:
        if self.stored is not None:
            raise Conflict(409, "AlreadyExists", "exists")
        return self._store(body)

    def replace(self, _resource: Any, _namespace: str, body: Object) -> Object:
        if self.stored is None or body["metadata"].get("resourceVersion") != str(self.version):
            raise Conflict(409, "Conflict", "changed")
        return self._store(body)

    def _store(self, body: Object) -> Object:
        self.version += 1
        self.stored = {**body, "metadata": {**body["metadata"], "resourceVersion": str(self.version)}}
        return self.stored


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(lease.time, "monotonic", lambda: now[0])
    return now


def claim(kube: OneLease, name: str) -> LeaderLease:
    return LeaderLease(kube, "ns", "dflash-operator", name)  # type: ignore[arg-type]


def test_the_first_takes_it_and_the_second_waits(clock: list[float]) -> None:
    kube = OneLease()
    first, second = claim(kube, "first"), claim(kube, "second")
    assert first._try() == "first"
    assert second._try() == "first"
    clock[0] += 10
    assert first._try() == "first"
    clock[0] += 10
    assert second._try() == "first", "it was renewed 10 s ago"


def test_a_silent_holder_is_replaced_after_the_lease_and_not_before(clock: list[float]) -> None:
    kube = OneLease()
    claim(kube, "first")._try()
    second = claim(kube, "second")
    assert second._try() == "first"
    clock[0] += lease.LEASE_SECONDS
    assert second._try() == "first"
    clock[0] += 1
    assert second._try() == "second"
    assert kube.stored is not None
    assert kube.stored["spec"]["leaseTransitions"] == 1


def test_of_two_that_race_for_a_free_lease_one_wins(clock: list[float]) -> None:
    kube = OneLease()
    racer = claim(kube, "racer")
    original = kube.create

    def slow(*arguments: Any) -> Object:
        kube.create = original  # type: ignore[method-assign]
        claim(kube, "winner")._try()
        return original(*arguments)

    kube.create = slow  # type: ignore[method-assign]
    assert racer._try() == "another"
    assert racer._try() == "winner"


class Ticks(threading.Event):
    """An event whose waits advance the clock at once."""

    def __init__(self, clock: list[float], limit: int) -> None:
        super().__init__()
        self.clock, self.left = clock, limit

    def wait(self, timeout: float | None = None) -> bool:
        self.clock[0] += timeout or 0.0
        self.left -= 1
        return self.left < 0


def test_it_is_lost_when_another_holds_it(clock: list[float]) -> None:
    kube = OneLease()
    mine = claim(kube, "mine")
    mine._try()
    assert kube.stored is not None
    kube.stored["spec"] = {**kube.stored["spec"], "holderIdentity": "thief", "renewTime": "now"}
    assert not mine.hold(Ticks(clock, 100))


def test_it_is_lost_when_it_cannot_be_renewed_in_time(clock: list[float]) -> None:
    kube = OneLease()
    mine = claim(kube, "mine")
    mine._try()
    kube.down = True
    assert not mine.hold(Ticks(clock, 100))
    assert clock[0] <= lease.LEASE_SECONDS, "it must stop before others may take over"


def test_a_deleted_lease_is_made_again(clock: list[float]) -> None:
    kube = OneLease()
    mine = claim(kube, "mine")
    mine._try()
    kube.stored = None
    assert mine._try() == "mine"


def test_stopping_releases_it_for_the_next(clock: list[float]) -> None:
    kube = OneLease()
    mine = claim(kube, "mine")
    mine._try()
    assert mine.hold(Ticks(clock, 3))
    assert claim(kube, "next")._try() == "next"
