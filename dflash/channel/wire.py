"""How several samples' states lie in one batch on the wire, in which transfers it goes, and its checksum.

Per sample, in the order of the announcement: taps [T, K·D], then the final state [T, D] where the
identity has one, row-major, in the states' dtype. Eight bytes follow the last sample: the number of the
batch, so that a short or displaced one is noticed. A batch is one transfer, or several in a row: between
CPUs a large tensor goes from where it lies, which saves a copy of it, and only the small ones are gathered.
Both ends cut by the same rule. Knows nothing of how transfers travel.
"""

import zlib
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dflash.channel.interface import Identity
from dflash.model.states import States

TRAILER_BYTES = 8

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}

_DIRECT_BYTES = 1 << 20
"""A tensor from this size on is a transfer of its own: announcing one costs less than copying it."""


def flat_bytes(tokens: int, identity: Identity) -> int:
    """Bytes of a batch of so many tokens in all, trailer included."""
    return tokens * identity.width * DTYPES[identity.dtype].itemsize + TRAILER_BYTES


def transfer_sizes(lengths: Sequence[int], identity: Identity, direct: bool) -> list[int]:
    """Bytes of each transfer of a batch, in order; the last one has the trailer.

    `direct`: large tensors go on their own. Both ends must say the same.
    """
    sizes, gathered = [], 0
    for size in _tensor_sizes(lengths, identity):
        if direct and size >= _DIRECT_BYTES:
            sizes += [gathered, size] if gathered else [size]
            gathered = 0
        else:
            gathered += size
    return [*sizes, gathered + TRAILER_BYTES]


def gathered_bytes(lengths: Sequence[int], identity: Identity, direct: bool) -> int:
    """Bytes of a batch that do not go from where they lie: the buffer that `pack` needs."""
    sizes = _tensor_sizes(lengths, identity)
    return TRAILER_BYTES + sum(size for size in sizes if not (direct and size >= _DIRECT_BYTES))


def _tensor_sizes(lengths: Sequence[int], identity: Identity) -> Iterator[int]:
    state = identity.hidden_size * DTYPES[identity.dtype].itemsize
    for length in lengths:
        yield length * state * len(identity.taps)
        if identity.final:
            yield length * state


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


def pack(
    states: Sequence[States], identity: Identity, number: int, buffer: Tensor, *, direct: bool
) -> list[Tensor]:
    """The transfers of a batch: uint8, of `transfer_sizes`.

    They are parts of `buffer` (uint8 of `gathered_bytes`, on the states' device), into which small tensors
    are copied, and large tensors themselves, which must stay as they are until they are sent.
    """
    dtype = DTYPES[identity.dtype]
    transfers: list[Tensor] = []
    start = end = 0
    for tensor in (part for sample in states for part in _tensors(sample)):
        size = tensor.numel() * dtype.itemsize
        if direct and size >= _DIRECT_BYTES:
            if end > start:
                transfers.append(buffer[start:end])
                start = end
            transfers.append(tensor.contiguous().view(-1).view(torch.uint8))
        else:
            buffer[end : end + size].view(dtype).view(tensor.shape).copy_(tensor)
            end += size
    buffer[end : end + TRAILER_BYTES].copy_(_trailer(number))
    return [*transfers, buffer[start : end + TRAILER_BYTES]]


def slots(flat: Tensor, lengths: Sequence[int], identity: Identity, direct: bool) -> list[Tensor]:
    """Where in a receive buffer each transfer goes.

    The end of each is made NaN, so that a transfer that brings less than was announced leaves a state that
    is not finite, or no trailer, instead of what an earlier batch left there.
    """
    parts = list(torch.split(flat, transfer_sizes(lengths, identity, direct)))
    for part in parts:
        part[-TRAILER_BYTES:].fill_(0xFF)
    return parts


def unpack(flat: Tensor, lengths: Sequence[int], identity: Identity, number: int) -> list[States] | None:
    """Views of each sample's states in a received buffer; None if the trailer is not this batch's."""
    if not torch.equal(flat[-TRAILER_BYTES:].cpu(), _trailer(number)):
        return None
    numbers = flat[:-TRAILER_BYTES].view(DTYPES[identity.dtype])
    taps_width = identity.hidden_size * len(identity.taps)
    offset = 0
    states = []
    for length in lengths:
        taps = numbers[offset : offset + length * taps_width].view(length, taps_width)
        offset += length * taps_width
        final = None
        if identity.final:
            final = numbers[offset : offset + length * identity.hidden_size].view(length, -1)
            offset += length * identity.hidden_size
        states.append(States(taps, final))
    return states


def checksum(transfers: Sequence[Tensor]) -> int:
    """CRC-32 of a batch's bytes."""
    crc = 0
    for part in transfers:
        crc = zlib.crc32(part.cpu().numpy().data, crc)
    return crc


def _tensors(states: States) -> list[Tensor]:
    return [states.taps] if states.final is None else [states.taps, states.final]


def _trailer(number: int) -> Tensor:
    return torch.frombuffer(bytearray(number.to_bytes(TRAILER_BYTES, "little")), dtype=torch.uint8)
