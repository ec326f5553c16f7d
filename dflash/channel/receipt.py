"""Receiving a link's batches: two threads for each target, so that the wire never waits for a check.

The first starts to receive a batch as soon as it is announced, also while others are under way; the second
waits for each transfer in turn and looks at its numbers while the next one arrives. What they find reaches
the drafter's loop as events.
"""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from dflash.channel import messages
from dflash.channel.buffers import BufferPool
from dflash.channel.interface import Identity, Timeouts
from dflash.channel.link import (
    DRAFTER_RANK,
    Backend,
    TensorLink,
    join_store,
    local_address_towards,
    own_stream,
)
from dflash.channel.verify import find_faults, is_finite
from dflash.channel.wire import (
    DTYPES,
    TRAILER_BYTES,
    checksum,
    flat_bytes,
    is_short,
    separate,
    slots,
    unpack,
)
from dflash.model.states import States


@dataclass(frozen=True)
class Joined:
    """Tensors can flow. `link` is the link's name, here and below."""

    link: str


@dataclass(frozen=True)
class Arrived:
    """A batch is here: per sample its states, or what is wrong with them."""

    link: str
    items: Sequence[messages.Item]
    states: Sequence[States | str]
    size: int


@dataclass(frozen=True)
class Failed:
    """The link is of no more use."""

    link: str
    cause: str


Event = Joined | Arrived | Failed


@dataclass(frozen=True)
class ReceiveSettings:
    """What all links of a drafter have in common. `address` as in `HiddenStateClient`."""

    identity: Identity
    backend: Backend
    device: torch.device
    address: str | None
    timeouts: Timeouts


@dataclass(frozen=True)
class _Transfer:
    """A batch on its way into `flat`, by a work for each of its parts."""

    batch: messages.Batch
    flat: Tensor
    parts: Sequence[Tensor]
    works: Sequence[Work]


class Receiver:
    """Joins the target's process group and receives what is announced, until `end`."""

    def __init__(
        self,
        link: str,
        welcome: messages.Welcome,
        settings: ReceiveSettings,
        buffers: BufferPool,
        report: Callable[[Event], None],
    ) -> None:
        """`report` takes events, from both threads."""
        self._link = link
        self._welcome = welcome
        self._settings = settings
        self._buffers = buffers
        self._report = report
        self._announced: queue.SimpleQueue[messages.Batch | None] = queue.SimpleQueue()
        self._under_way: queue.SimpleQueue[_Transfer | None] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=body, name=f"channel-{what}", daemon=True)
            for what, body in (("receive", self._run_starts), ("check", self._run_ends))
        ]

    def start(self) -> None:
        """Form the process group with the target, then receive."""
        for thread in self.threads:
            thread.start()

    def announced(self, batch: messages.Batch) -> None:
        """The target is about to send this."""
        self._announced.put(batch)

    def end(self) -> None:
        """Start nothing more. What is under way is still waited for and reported."""
        self._announced.put(None)

    def _run_starts(self) -> None:
        settings, welcome = self._settings, self._welcome
        try:
            address = settings.address or local_address_towards(welcome.host, welcome.store_port)
            self._tensors = TensorLink(
                join_store(welcome.host, welcome.store_port, settings.timeouts.hello),
                welcome.group,
                DRAFTER_RANK,
                address=address,
                backend=settings.backend,
                timeout=settings.timeouts.hello,
                device=settings.device,
            )
            self._tensors.set_timeout(settings.timeouts.transfer)
            self._report(Joined(self._link))
            with own_stream(settings.device):
                while (batch := self._announced.get()) is not None:
                    self._under_way.put(self._start(batch))
        except Exception as error:  # noqa: BLE001 - whatever it is, it ends this link and no other
            self._fail(error)
        finally:
            self._under_way.put(None)

    def _start(self, batch: messages.Batch) -> _Transfer:
        tokens = sum(item.length for item in batch.items)
        flat = self._buffers.take(flat_bytes(tokens, self._settings.identity))
        parts = slots(flat, batch.sizes)
        return _Transfer(batch, flat, parts, [self._tensors.start_receive(part) for part in parts])

    def _run_ends(self) -> None:
        try:
            with own_stream(self._settings.device) as stream:
                while (transfer := self._under_way.get()) is not None:
                    if stream is not None:  # it was taken in another thread's stream, and is used in these
                        transfer.flat.record_stream(stream)
                        transfer.flat.record_stream(torch.cuda.default_stream(self._settings.device))
                    items, size = transfer.batch.items, len(transfer.flat)
                    self._report(Arrived(self._link, items, self._receive(transfer), size))
                    del transfer  # nothing is held here while waiting: the consumer frees it
        except Exception as error:  # noqa: BLE001 - see above
            self._fail(error)

    def _receive(self, transfer: _Transfer) -> list[States | str]:
        """Each sample's states, or what is wrong with them; RuntimeError if the stream is out of step."""
        batch, identity = transfer.batch, self._settings.identity
        finite, crc = True, 0
        end = len(transfer.flat) - TRAILER_BYTES
        for work, part in zip(transfer.works, transfer.parts, strict=True):
            self._tensors.finish(work)
            if batch.checksum is not None:
                crc = checksum(part, crc)
            numbers = part[: end - part.storage_offset()].view(DTYPES[identity.dtype])
            if not is_finite(numbers):
                finite = False
                if is_short(part):
                    raise RuntimeError("a transfer was shorter than announced")
        lengths = [item.length for item in batch.items]
        states = unpack(transfer.flat, sum(lengths), identity, batch.number)
        if states is None:
            raise RuntimeError("a transfer was shorter than announced, or not the one announced")
        if batch.checksum is not None and crc != batch.checksum:
            return ["the checksum of its transfer is wrong"] * len(lengths)
        faults = find_faults(states, lengths, identity, finite=finite)
        return [fault or one for fault, one in zip(faults, separate(states, lengths), strict=True)]

    def _fail(self, error: Exception) -> None:
        text = (str(error) or repr(error)).splitlines()[0][:300]
        self._report(Failed(self._link, f"tensors: {text}"))
