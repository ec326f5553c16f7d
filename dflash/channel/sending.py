"""Sending a session's batches: two threads for each drafter, so that the wire never waits for either.

The first announces a batch and starts its transfers, also while the batch before it is still on the wire;
the second waits for transfers to end, which makes room for the next capture. A session has at most two
batches that are not sent, so a slow or stuck drafter bounds its own memory and delays nobody.
"""

import functools
import itertools
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import TCPStore, Work  # type: ignore[attr-defined]

from dflash.channel import messages
from dflash.channel.interface import Identity
from dflash.channel.link import TARGET_RANK, Backend, TensorLink, own_stream
from dflash.channel.roster import Job, Roster, Session
from dflash.channel.wire import checksum, cut, gathered_bytes, pack, stretches

UNSENT = 2
"""Batches of a session that are captured and not yet sent: one on the wire, one behind it."""


@dataclass(frozen=True)
class SendSettings:
    """What all sessions of a target have in common. Times are in seconds."""

    identity: Identity
    address: str
    backend: Backend
    device: torch.device
    checksum_every: int
    join_timeout: float
    transfer_timeout: float


@dataclass(frozen=True)
class _Sending:
    """A batch whose transfers are under way, and the tensors that they read."""

    works: Sequence[Work]
    transfers: Sequence[Tensor]


class Sender:
    """Sends one session's jobs in order until a None among them; whatever fails ends the session."""

    def __init__(self, session: Session, store: TCPStore, roster: Roster, settings: SendSettings) -> None:
        self._session = session
        self._store = store
        self._roster = roster
        self._settings = settings
        self._under_way: queue.SimpleQueue[_Sending | None] = queue.SimpleQueue()
        self._buffers = [torch.empty(0, dtype=torch.uint8, device=settings.device) for _ in range(UNSENT)]
        self.threads = [
            threading.Thread(target=body, name=f"channel-{what}-{session.drafter}", daemon=True)
            for what, body in (("send", self._run_starts), ("sent", self._run_ends))
        ]

    def start(self) -> None:
        """Form the process group with the drafter, then send."""
        for thread in self.threads:
            thread.start()

    def _run_starts(self) -> None:
        settings = self._settings
        try:
            self._tensors = TensorLink(
                self._store,
                self._session.name,
                TARGET_RANK,
                address=settings.address,
                backend=settings.backend,
                timeout=settings.join_timeout,
                device=settings.device,
            )
            self._tensors.set_timeout(settings.transfer_timeout)
            self._roster.joined(self._session)
            with own_stream(settings.device) as stream:
                for number in itertools.count():
                    job = self._session.jobs.get()
                    if job is None:
                        return
                    self._start(job, number, stream)
                    del job  # nothing is held here while waiting: the states are freed once they are sent
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this session and no other
            self._fail(error)
        finally:
            self._under_way.put(None)

    def _run_ends(self) -> None:
        try:
            with own_stream(self._settings.device):
                while (sending := self._under_way.get()) is not None:
                    for work in sending.works:
                        self._tensors.finish(work)
                    self._roster.sent(self._session, sum(part.numel() for part in sending.transfers))
                    del sending, work  # nor here
        except Exception as error:  # noqa: BLE001 - see above
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._roster.end(self._session, f"sending failed: {first_line(error)}")

    def _start(self, job: Job, number: int, stream: torch.cuda.Stream | None) -> None:
        """Announce a batch and start its transfers. The one of two before it is sent: its buffer is free."""
        if stream is not None and job.captured is not None:
            stream.wait_event(job.captured)
        transfers = self._transfers(job, number)
        if stream is not None:
            stream.synchronize()  # the states are copied, so they may be freed
        every = self._settings.checksum_every
        crc = None
        if every > 0 and number % every == 0:
            crc = functools.reduce(lambda before, part: checksum(part, before), transfers, 0)
        sizes = [len(part) for part in transfers]
        announcement = messages.Batch(number=number, items=job.items, sizes=sizes, checksum=crc)
        self._roster.tell(self._session, announcement)
        self._under_way.put(_Sending(self.transmit(self._tensors, transfers), transfers))

    def _transfers(self, job: Job, number: int) -> list[Tensor]:
        """One transfer by NCCL; several by Gloo, from where the states lie if they are on a CPU."""
        device = self._settings.device
        batch = stretches(job.states)
        direct = device.type == "cpu"
        size = gathered_bytes(batch, direct)
        turn = number % UNSENT
        if self._buffers[turn].numel() < size:
            self._buffers[turn] = torch.empty(size, dtype=torch.uint8, device=device)
        transfers = pack(batch, number, self._buffers[turn], direct=direct)
        if self._settings.backend == "gloo":
            transfers = cut([part.cpu() for part in transfers])
        return transfers

    @staticmethod
    def transmit(tensors: TensorLink, transfers: Sequence[Tensor]) -> list[Work]:
        """The one place where bytes leave; tests of faulty targets replace it."""
        return [tensors.start_send(part) for part in transfers]


def first_line(error: BaseException) -> str:
    """The beginning of what an exception says."""
    return (str(error) or repr(error)).split("\n", 1)[0][:300]
