"""The drafters' data-parallel group: a few collectives, and a bounded end when a member is lost.

Ranks meet at rank 0's TCPStore within a deadline. A step needs one all-reduce of one flat tensor, in
which the gradient, the sums for normalising and the metrics, and the flags for agreeing on what
happens next ride together. The group of one does nothing.

When a rank dies, the others' sockets close and their collective raises. When it hangs or its host
vanishes, nothing closes: so every rank counts a heartbeat in the store, and a watch ends a rank
whose peers' hearts stand still. It must end the whole process, since a collective that waits cannot be
interrupted. Either way the group ends with exit code 75, and its supervisor starts the next attempt.

Not for hidden states: those have links of their own (`dflash.channel`).
"""

import logging
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from dflash.errors import TemporaryError

log = logging.getLogger(__name__)

_BEAT_SECONDS = 1.0
LOST_SECONDS = 30.0
"""A peer whose heartbeat stands still this long is lost. Long, since loading may hold a process up."""
_LEFT = b"left"
_STOPPING = b"stopping"


class Group:
    """`world` processes that train one model. All methods but `leave` must be called by all ranks alike."""

    def __init__(
        self,
        rank: int,
        world: int,
        rendezvous: str,
        *,
        backend: str,
        join_seconds: float,
        collective_seconds: float,
        on_lost: Callable[[str], None],
        lost_seconds: float = LOST_SECONDS,
    ) -> None:
        """Meet the others at `rendezvous` (HOST:PORT of rank 0) within `join_seconds`.

        `backend` is nccl or gloo. `on_lost` is called from a thread with one sentence when a peer
        hangs, and must end the process. Errors: TemporaryError when the group does not come together.
        """
        self.rank, self.world = rank, world
        self._stop = threading.Event()
        self._announced = False
        if world == 1:
            return
        host, _, port = rendezvous.rpartition(":")
        try:
            self._store = TCPStore(
                host, int(port), world, is_master=rank == 0, timeout=timedelta(seconds=join_seconds)
            )
            self._process_group = _process_group(
                backend,
                PrefixStore("group", self._store),
                rank,
                world,
                host=host,
                seconds=collective_seconds,
            )
            self._process_group.allreduce([self._probe(backend)]).wait()
        except (RuntimeError, ValueError) as error:  # torch's DistErrors are RuntimeErrors
            raise TemporaryError(
                f"rank {rank} of {world} could not meet the other drafters at {rendezvous} within "
                f"{join_seconds:.0f} s ({_first_line(error)}); they are started again as the next attempt"
            ) from error
        # A client of its own: the main one may be held by a collective that waits.
        self._beats = self._store.clone()
        self._beats.set_timeout(timedelta(seconds=lost_seconds))
        self._beats.set(_beat_key(rank), "0")
        self._lost_seconds = lost_seconds
        self._on_lost = on_lost
        self._others = [other for other in range(world) if other != rank]
        self._heard: dict[int, bytes] = dict.fromkeys(self._others, b"")
        threading.Thread(target=self._exchange, name="group-beat", daemon=True).start()
        threading.Thread(target=self._watch, name="group-watch", daemon=True).start()

    @staticmethod
    def _probe(backend: str) -> Tensor:
        return torch.ones(1, device="cuda" if backend == "nccl" else "cpu")

    def sum(self, tensor: Tensor) -> None:
        """Add up a tensor over all ranks, in place; every rank gets the same bits."""
        if self.world > 1:
            self._collective(partial(self._process_group.allreduce, [tensor]), "all-reduce")

    def broadcast(self, tensors: list[Tensor]) -> None:
        """Give every rank rank 0's values, in place."""
        if self.world > 1:
            for tensor in tensors:
                self._collective(partial(self._process_group.broadcast, [tensor]), "broadcast")

    def share(self, name: str, value: str | None, seconds: float) -> str:
        """Rank 0 gives `value`; every rank returns it. Each name is used once."""
        if self.world == 1:
            assert value is not None
            return value
        if self.rank == 0:
            assert value is not None
            self._store.set(name, value)
            return value
        self._wait(name, seconds)
        return str(self._store.get(name).decode())

    def barrier(self, name: str, seconds: float) -> None:
        """Wait until every rank has come here, for so long at most. Each name is used once."""
        if self.world == 1:
            return
        if self._store.add(f"{name}/count", 1) == self.world:
            self._store.set(f"{name}/all", "1")
        self._wait(f"{name}/all", seconds)

    @property
    def stopping(self) -> bool:
        """Whether a peer has said, a moment ago, that it wants to stop: no reason to wait for data any more.

        Only a hint to come to the next collective, where the group decides.
        """
        return self.world > 1 and any(value.endswith(_STOPPING) for value in self._heard.values())

    def announce_stop(self) -> None:
        """Let the others know, at the next heartbeat, that this rank wants to stop."""
        self._announced = True

    def leave(self, linger_seconds: float = 10.0) -> None:
        """Say that this rank's end is no loss. Rank 0 stays a moment, since it holds the store."""
        self._stop.set()
        if self.world == 1:
            return
        try:
            self._beats.set(_beat_key(self.rank), _LEFT.decode())
            if self.rank == 0:
                deadline = time.monotonic() + linger_seconds
                others = [_beat_key(rank) for rank in range(1, self.world)]
                while time.monotonic() < deadline and set(self._beats.multi_get(others)) != {_LEFT}:
                    time.sleep(0.05)
        except RuntimeError as error:
            log.info("the drafters' store is gone already: %s", _first_line(error))

    def _wait(self, key: str, seconds: float) -> None:
        try:
            self._store.wait([key], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise TemporaryError(
                f"rank {self.rank} waited {seconds:.0f} s for the other drafters at '{key}' "
                f"({_first_line(error)}); they are started again as the next attempt"
            ) from error

    def _collective(self, start: Callable[[], Any], what: str) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise TemporaryError(
                f"rank {self.rank} lost another drafter in an {what} ({_first_line(error)}); "
                "the group starts again from its last checkpoint as the next attempt"
            ) from error

    def _exchange(self) -> None:
        """Count our heartbeat and read the others' once a second. A store that hangs holds up only this."""
        others = [_beat_key(rank) for rank in self._others]
        beat = 0
        while not self._stop.wait(_BEAT_SECONDS):
            beat += 1
            try:
                wish = _STOPPING.decode() if self._announced else ""
                self._beats.set(_beat_key(self.rank), f"{beat} {wish}")
                # Those that have not started their watch are left out: joining has a deadline of its own.
                if self._beats.check(others):
                    self._heard = dict(zip(self._others, self._beats.multi_get(others), strict=True))
            except RuntimeError as error:
                # Rank 0 is gone, and the store with it: `_watch` sees that nothing moves any more.
                log.info("the drafters' store does not answer: %s", _first_line(error))
                return

    def _watch(self) -> None:
        seen = dict.fromkeys(self._others, (b"", time.monotonic()))
        last = time.monotonic()
        while not self._stop.wait(_BEAT_SECONDS):
            now = time.monotonic()
            if now - last > self._lost_seconds / 2:
                # This process itself stood still: what it knows of the others is old.
                seen = {rank: (value, now) for rank, (value, _) in seen.items()}
            last = now
            for rank, value in self._heard.items():
                if value == _LEFT or value != seen[rank][0]:
                    seen[rank] = (value, now)
                elif now - seen[rank][1] > self._lost_seconds:
                    self._on_lost(
                        f"drafter rank {rank} has not moved for {self._lost_seconds:.0f} s; the group "
                        "starts again from its last checkpoint as the next attempt"
                    )
                    return


def _process_group(backend: str, store: Store, rank: int, world: int, *, host: str, seconds: float) -> Any:
    """A process group that is not torch's global default: the channel has groups of its own."""
    timeout = timedelta(seconds=seconds)
    if backend == "nccl":
        from torch.distributed import ProcessGroupNCCL

        nccl = ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return ProcessGroupNCCL(store, rank, world, nccl)
    from torch.distributed import ProcessGroupGloo

    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timeout
    # Where rank 0 is met on the loopback, all ranks are here: the host's own name need not resolve.
    local = host in ("127.0.0.1", "localhost", "::1")
    devices = ProcessGroupGloo.create_device, ProcessGroupGloo.create_default_device
    options._devices = [devices[0](hostname="127.0.0.1") if local else devices[1]()]
    return ProcessGroupGloo(store, rank, world, options)


def _beat_key(rank: int) -> str:
    return f"beat/{rank}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
