"""One flat buffer per send: the layout of several samples' states, and its checksum.

Per sample, in the order of the announcement: taps [T, K·D], then the final state [T, D] where the
identity has one, row-major, in the states' dtype. Eight bytes follow the last sample: the number of the
send, so that a short or displaced transfer is noticed. Knows nothing of how the buffer travels.
"""

import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from dflash.channel.interface import Identity
from dflash.model.states import States

TRAILER_BYTES = 8

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def flat_bytes(tokens: int, identity: Identity) -> int:
    """Bytes of a buffer for so many tokens in all, trailer included."""
    return tokens * identity.width * DTYPES[identity.dtype].itemsize + TRAILER_BYTES


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


def pack(states: Sequence[States], identity: Identity, number: int, buffer: Tensor) -> Tensor:
    """Copy states into `buffer` (uint8, on the states' device); the part that is to be sent."""
    dtype = DTYPES[identity.dtype]
    offset = 0
    for sample in states:
        for tensor in (sample.taps, sample.final):
            if tensor is None:
                continue
            size = tensor.numel() * dtype.itemsize
            buffer[offset : offset + size].view(dtype).view(tensor.shape).copy_(tensor)
            offset += size
    buffer[offset : offset + TRAILER_BYTES].copy_(_trailer(number))
    return buffer[: offset + TRAILER_BYTES]


def unpack(flat: Tensor, lengths: Sequence[int], identity: Identity, number: int) -> list[States] | None:
    """Views of each sample's states in a received buffer; None if the trailer is not this send's."""
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


def checksum(flat: Tensor) -> int:
    """CRC-32 of a buffer's bytes."""
    return zlib.crc32(flat.cpu().numpy().data)


def _trailer(number: int) -> Tensor:
    return torch.frombuffer(bytearray(number.to_bytes(TRAILER_BYTES, "little")), dtype=torch.uint8)
