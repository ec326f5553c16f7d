"""How several samples' states lie in one batch on the wire, in which transfers it goes, and its checksum.

First the taps of all samples [T, K·D] in the order of the announcement, then their final states [T, D] where
the identity has them, row-major, in the states' dtype. Eight bytes follow: the number of the batch, so that a
short or displaced one is noticed. Between CPUs a batch is several transfers in a row: states that lie one
behind another in the target's memory, as those of a packed forward do, go from where they are, which saves a
copy, and only the small rest is gathered; and a transfer is no larger than a cache, so that it is checked
while it is there and while the next one is on the wire. The announcement says how it is cut. Knows nothing of
how transfers travel.
"""

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dflash.channel.interface import Identity
from dflash.model.states import States

TRAILER_BYTES = 8

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_DIRECT_BYTES = 1 << 18
"""A stretch of memory from this size on goes on its own: announcing it costs less than copying it."""
_TRANSFER_BYTES = 4 << 20
"""A transfer between CPUs: large enough to cost nothing by itself, small enough for a shared cache (measured:
2 and 4 MiB alike, 8 MiB a tenth slower)."""


def flat_bytes(tokens: int, identity: Identity) -> int:
    """Bytes of a batch of so many tokens in all, trailer included."""
    return tokens * identity.width * DTYPES[identity.dtype].itemsize + TRAILER_BYTES


def is_cut_well(sizes: Sequence[int], tokens: int, identity: Identity) -> bool:
    """Whether transfers of these sizes can be a batch: between whole numbers, the trailer in one piece."""
    size = DTYPES[identity.dtype].itemsize
    return (
        sum(sizes) == flat_bytes(tokens, identity)
        and sizes[-1] >= TRAILER_BYTES
        and all(part % size == 0 for part in sizes)
    )


def describe_mismatch(states: States, length: int, identity: Identity) -> str | None:
    """What is wrong with the shapes and dtype of freshly captured states, or None."""
    expected = [("taps", states.taps, (length, identity.hidden_size * len(identity.taps)))]
    if identity.final:
        if states.final is None:
            return "the final state is missing"
        expected.append(("final", states.final, (length, identity.hidden_size)))
    for name, tensor, shape in expected:
        if tuple(tensor.shape) != shape:
            return f"{name} has shape {tuple(tensor.shape)} where {shape} was expected"
        if tensor.dtype is not DTYPES[identity.dtype]:
            return f"{name} is {tensor.dtype} where {identity.dtype} was expected"
    return None


def stretches(states: Sequence[States]) -> list[Tensor]:
    """The batch without its trailer as uint8, in as few tensors as it lies in: neighbours are one."""
    merged: list[Tensor] = []
    begin = end = 0
    storage = None
    for part in _parts(states):
        part = part.contiguous()  # noqa: PLW2901 - the same numbers
        own, start = part.untyped_storage(), int(part.storage_offset()) * part.itemsize
        size = part.numel() * part.itemsize
        if storage is not None and own.data_ptr() == storage.data_ptr() and start == end:
            merged.pop()
            end += size
        else:
            storage, begin, end = own, start, start + size
        whole = torch.empty(0, dtype=torch.uint8, device=part.device)
        merged.append(whole.set_(own, begin, (end - begin,), (1,)))
    return merged


def gathered_bytes(batch: Sequence[Tensor], direct: bool) -> int:
    """Bytes of `stretches` that do not go from where they lie: the buffer that `pack` needs."""
    return TRAILER_BYTES + sum(len(part) for part in batch if not _goes_alone(part, direct))


def pack(batch: Sequence[Tensor], number: int, buffer: Tensor, *, direct: bool) -> list[Tensor]:
    """The transfers of a batch given as `stretches`, uint8.

    They are parts of `buffer` (uint8 of `gathered_bytes`, on the states' device), into which small stretches
    are copied, and, if `direct`, large ones themselves, which must stay as they are until they are sent.
    """
    transfers: list[Tensor] = []
    start = end = 0
    for part in batch:
        if _goes_alone(part, direct):
            if end > start:
                transfers.append(buffer[start:end])
                start = end
            transfers.append(part)
        else:
            buffer[end : end + len(part)].copy_(part)
            end += len(part)
    buffer[end : end + TRAILER_BYTES].copy_(_trailer(number))
    return [*transfers, buffer[start : end + TRAILER_BYTES]]


def cut(transfers: Sequence[Tensor]) -> list[Tensor]:
    """The same bytes in transfers of at most 4 MiB (and a trailer)."""
    *heads, last = transfers
    pieces = [piece for part in heads for piece in torch.split(part, _TRANSFER_BYTES)]
    rest = max(0, len(last) - TRAILER_BYTES - 1) // _TRANSFER_BYTES * _TRANSFER_BYTES
    return [*pieces, *(torch.split(last[:rest], _TRANSFER_BYTES) if rest else ()), last[rest:]]


def slots(flat: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Where in a receive buffer each transfer goes.

    The end of each is made NaN, so that a transfer that brings less than was announced leaves a state that
    is not finite, or no trailer, instead of what an earlier batch left there (`is_short`).
    """
    parts = list(torch.split(flat, list(sizes)))
    for part in parts:
        part[-TRAILER_BYTES:].fill_(0xFF)
    return parts


def is_short(part: Tensor) -> bool:
    """Whether the end of a transfer is as `slots` left it. Worth asking where something is not finite."""
    return bool((part[-TRAILER_BYTES:] == 0xFF).all())


def unpack(flat: Tensor, tokens: int, identity: Identity, number: int) -> States | None:
    """Views of all samples' states, one behind another; None if the trailer is not this batch's."""
    if not torch.equal(flat[-TRAILER_BYTES:].cpu(), _trailer(number)):
        return None
    numbers = flat[:-TRAILER_BYTES].view(DTYPES[identity.dtype])
    width = identity.hidden_size * len(identity.taps)
    taps = numbers[: tokens * width].view(tokens, width)
    final = numbers[tokens * width :].view(tokens, identity.hidden_size) if identity.final else None
    return States(taps, final)


def separate(batch: States, lengths: Sequence[int]) -> list[States]:
    """Each sample's part of what `unpack` returns."""
    taps = torch.split(batch.taps, list(lengths))
    if batch.final is None:
        return [States(part) for part in taps]
    return [States(*parts) for parts in zip(taps, torch.split(batch.final, list(lengths)), strict=True)]


def checksum(part: Tensor, before: int = 0) -> int:
    """CRC-32 of bytes that follow those whose CRC-32 is `before`."""
    return zlib.crc32(part.cpu().numpy().data, before)


def _goes_alone(part: Tensor, direct: bool) -> bool:
    return direct and len(part) >= _DIRECT_BYTES


def _parts(states: Sequence[States]) -> Iterator[Tensor]:
    yield from (sample.taps for sample in states)
    yield from (sample.final for sample in states if sample.final is not None)


def _trailer(number: int) -> Tensor:
    return torch.frombuffer(bytearray(number.to_bytes(TRAILER_BYTES, "little")), dtype=torch.uint8)
