"""The target's side: takes requests from any number of drafters, packs them, captures, has them sent.

The thread that calls `serve` captures: batches by token budget, oldest request first, across drafters. A
drafter with two unsent batches is passed over. Drafters are let in and heard by `control`, states leave by
`sending`, each in threads of its own, so that sending overlaps with the next capture.
"""

import logging
import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from dflash.channel import messages
from dflash.channel.control import Control
from dflash.channel.interface import Identity, ServerStats
from dflash.channel.keys import Authority, KeyPair
from dflash.channel.link import listen, resolve_backend
from dflash.channel.packing import pick
from dflash.channel.roster import Job, Pending, Roster, Session
from dflash.channel.sending import UNSENT, SendSettings
from dflash.channel.wire import describe_mismatch
from dflash.errors import ConfigurationError, DflashError
from dflash.model.states import States

logger = logging.getLogger(__name__)

Capture = Callable[[list[NDArray[np.int32]]], list[States]]

_FAILURES_IN_A_ROW = 8
"""Samples refused one after another, none captured between them: then the fault is the target's own."""


class HiddenStateServer:
    """Serves hidden states until stopped.

    server = HiddenStateServer(capture, identity, run=..., keys=keys, authority=authority)
    server.start()                       # from here on server.port is known: publish the member
    server.serve()                       # captures in this thread until stop()
    """

    def __init__(
        self,
        capture: Capture,
        identity: Identity,
        *,
        run: str,
        keys: KeyPair,
        authority: Authority,
        bind: str = "127.0.0.1",
        port: int = 0,
        advertise: str | None = None,
        token_budget: int = 16_384,
        backend: str = "auto",
        device: torch.device | None = None,
        checksum_every: int = 32,
        join_timeout: float = 30.0,
        transfer_timeout: float = 60.0,
        silence_timeout: float = 30.0,
    ) -> None:
        """`capture` maps ids (int32 [T] each) to their states, in order; it is called in `serve`'s thread.

        The states it returns must not be written to again: on a CPU they are sent from where they lie.
        `run` names what is trained (a drafter of another run is refused). `advertise` is this machine's
        address for the tensors, where `bind` is a wildcard. `token_budget` bounds a batch (one longer
        sample goes alone). Every `checksum_every`-th batch of a link carries a checksum; 0 is never. A
        drafter that says nothing for `silence_timeout` seconds is dropped.
        """
        self._capture = capture
        self._identity = identity
        self._bind = bind
        self._port = port
        self._address = advertise or bind
        self._token_budget = token_budget
        self._device = device or torch.device("cpu")
        self._roster = Roster()
        self._control = Control(
            self._roster,
            SendSettings(
                identity=identity,
                address=self._address,
                backend=resolve_backend(backend, self._device),
                device=self._device,
                checksum_every=checksum_every,
                join_timeout=join_timeout,
                transfer_timeout=transfer_timeout,
            ),
            run=run,
            keys=keys,
            authority=authority,
            token_budget=token_budget,
            silence_timeout=silence_timeout,
        )
        self._seconds = {"capture": 0.0, "idle": 0.0, "blocked": 0.0}

    # The owner's side

    @property
    def port(self) -> int:
        """The control port; known after `start`."""
        return self._port

    def start(self) -> None:
        """Listen. Drafters may connect from now on; their requests wait for `serve`.

        ConfigurationError if `bind` or `advertise` is not an address of this machine.
        """
        try:
            listen(self._address).close()
        except OSError as error:
            raise ConfigurationError(
                f"{self._address} is not an address of this machine ({error.strerror}): advertise one on "
                "which drafters reach it"
            ) from None
        self._port = self._control.start(self._bind, self._port)

    def serve(self) -> None:
        """Capture for whoever asks, until `stop`. Raises what ended the control thread, if it failed."""
        failures = 0
        try:
            while (batch := self._next_batch()) is not None:
                began = time.monotonic()
                failures = self._serve_batch(batch, failures)
                ended = time.monotonic()
                del batch
                with self._roster.changed:
                    self._seconds["capture"] += ended - began
                    self._roster.busy.add(began, ended)
        finally:
            self.stop()
        if self._control.failure is not None:
            raise self._control.failure

    def stop(self) -> None:
        """End `serve` after its current batch, tell the drafters, free everything. May be called twice."""
        with self._roster.changed:
            self._roster.stop()
            self._roster.changed.notify_all()
        self._control.join()

    def request_stop(self) -> None:
        """Like `stop`, without waiting: for signal handlers."""
        self._roster.stop()

    def stats(self) -> ServerStats:
        """Counters and the present state; from any thread."""
        roster = self._roster
        with roster.changed:
            counts = roster.counts
            return ServerStats(
                links=sum(session.joined for session in roster.sessions.values()),
                pending=sum(len(session.pending) for session in roster.sessions.values()),
                samples=counts["samples"],
                tokens=counts["tokens"],
                batches=counts["batches"],
                bytes_sent=counts["bytes"],
                capture_seconds=self._seconds["capture"],
                idle_seconds=self._seconds["idle"],
                blocked_seconds=self._seconds["blocked"],
                idle_share=1.0 - roster.busy.share(time.monotonic()),
                refused=counts["refused"],
                links_refused=counts["links_refused"],
                links_dropped=counts["links_dropped"],
                causes=dict(roster.causes),
            )

    # Capturing

    def _next_batch(self) -> list[tuple[Session, Pending]] | None:
        """Wait for requests and take the oldest, up to the token budget; None at the end."""
        roster = self._roster
        with roster.changed:
            while not roster.stopping:
                joined = [session for session in roster.sessions.values() if session.joined]
                ready = {session: session.pending for session in joined if session.unsent < UNSENT}
                batch = pick(ready, self._token_budget)
                for session in {session for session, _ in batch}:
                    session.unsent += 1
                if batch:
                    return batch
                reason = "blocked" if any(session.pending for session in joined) else "idle"
                began = time.monotonic()
                roster.changed.wait(1.0)
                self._seconds[reason] += time.monotonic() - began
        return None

    def _serve_batch(self, batch: list[tuple[Session, Pending]], failures: int) -> int:
        """Capture a batch and pass it to the senders; the number of failures in a row is carried on."""
        captured: list[tuple[Session, messages.Item, States]] = []
        outcome = self._try_capture([pending for _, pending in batch])
        if isinstance(outcome, str) and len(batch) > 1:
            # One sample may spoil a batch: each alone, so that only the guilty is refused.
            outcomes = [self._try_capture([pending]) for _, pending in batch]
        else:
            outcomes = [outcome] if isinstance(outcome, str) else [[states] for states in outcome]
        for (session, pending), single in zip(batch, outcomes, strict=True):
            if isinstance(single, str):
                failures += 1
                self._refuse(session, pending, single)
            else:
                failures = 0
                captured.append((session, pending.item, single[0]))
        self._dispatch(batch, captured)
        if failures >= _FAILURES_IN_A_ROW:
            raise DflashError(
                f"the target failed on {failures} samples in a row, last with: {single}; it ends so that a "
                "fresh one can take its place; if that fails too, look at the target's log"
            )
        return failures

    def _try_capture(self, samples: list[Pending]) -> list[States] | str:
        """States of all samples, or the text of what went wrong."""
        try:
            states = self._capture([sample.ids for sample in samples])
        except Exception as error:
            logger.warning("capturing %d samples failed: %s", len(samples), error, exc_info=True)
            return f"{type(error).__name__}: {error}"[:2000]
        if len(states) != len(samples):
            return f"the capture returned {len(states)} states for {len(samples)} samples"
        for sample, state in zip(samples, states, strict=True):
            if (problem := describe_mismatch(state, sample.item.length, self._identity)) is not None:
                return f"sample {sample.item.sample_id!r}: {problem}"
        return states

    def _refuse(self, session: Session, pending: Pending, text: str) -> None:
        with self._roster.changed:
            self._roster.counts["refused"] += 1
        self._roster.tell(session, messages.Refused(index=pending.item.index, text=text))

    def _dispatch(
        self, batch: list[tuple[Session, Pending]], captured: list[tuple[Session, messages.Item, States]]
    ) -> None:
        """Give each session its share; one whose samples were all refused has its buffer back."""
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        with self._roster.changed:
            for session in {session for session, _ in batch}:
                own = [(item, states) for owner, item, states in captured if owner is session]
                if session.closed or not own:
                    session.unsent -= 1
                    continue
                session.jobs.put(Job([item for item, _ in own], [states for _, states in own], event))
            self._roster.counts["batches"] += 1
            self._roster.counts["samples"] += len(captured)
            self._roster.counts["tokens"] += sum(item.length for _, item, _ in captured)
