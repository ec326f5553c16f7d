"""The control connection's messages: what they hold, how they are written and how they are checked.

A message is one JSON frame, and `Ask` has a second frame with the token ids (int32, little endian, one
sample after another). Tensors never travel here. Whatever does not parse, or is longer than it may be,
raises `MessageError`, and the link it came from ends.
"""

from typing import Annotated, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

VERSION = 3
MAX_HEADER_BYTES = 1 << 20
MAX_FRAME_BYTES = 1 << 28
MAX_SAMPLES = 4096
MAX_TRANSFERS = 1 << 16

Name = Annotated[str, Field(min_length=1, max_length=512)]
Text = Annotated[str, Field(max_length=4096)]
Count = Annotated[int, Field(ge=0, lt=2**63)]


Parsed = TypeVar("Parsed")


class MessageError(Exception):
    """A control message that cannot be what the other side meant."""


class _Message(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Hello(_Message):
    """Drafter → target, first: who I am and what I expect."""

    kind: Literal["hello"] = "hello"
    version: int
    run: Name
    attempt: Count
    index: Count
    instance: Name
    link: Name
    fingerprint: Name
    taps: Annotated[list[Count], Field(max_length=1024)]
    hidden_size: Count
    dtype: Name
    final: bool
    backend: Name


class Item(_Message):
    """A sample in a message: `index` is the drafter's own number for it."""

    index: Count
    sample_id: Name
    length: Annotated[int, Field(ge=1, le=2**31 - 1)]


class Ask(_Message):
    """Drafter → target: capture these. The ids follow in the second frame."""

    kind: Literal["ask"] = "ask"
    items: Annotated[list[Item], Field(min_length=1, max_length=MAX_SAMPLES)]


class Ping(_Message):
    """Drafter → target, twice a second: I am here."""

    kind: Literal["ping"] = "ping"


class Bye(_Message):
    """Drafter → target: I am done."""

    kind: Literal["bye"] = "bye"


class Welcome(_Message):
    """Target → drafter: join the process group at this store."""

    kind: Literal["welcome"] = "welcome"
    host: Name
    store_port: Annotated[int, Field(ge=1, le=65535)]
    group: Name
    token_budget: Annotated[int, Field(ge=1)]


class Denied(_Message):
    """Target → drafter: no link. `superseded` is for an attempt that a later one has replaced."""

    kind: Literal["denied"] = "denied"
    code: Literal["version", "run", "identity", "backend", "superseded"]
    text: Text


class Batch(_Message):
    """Target → drafter: these samples follow on the process group, in transfers of so many bytes each."""

    kind: Literal["batch"] = "batch"
    number: Count
    items: Annotated[list[Item], Field(min_length=1, max_length=MAX_SAMPLES)]
    sizes: Annotated[list[Count], Field(min_length=1, max_length=MAX_TRANSFERS)]
    checksum: Count | None


class Refused(_Message):
    """Target → drafter: capturing this sample failed, and why."""

    kind: Literal["refused"] = "refused"
    index: Count
    text: Text


class Pong(_Message):
    """Target → drafter, to each ping."""

    kind: Literal["pong"] = "pong"
    idle_share: Annotated[float, Field(ge=0.0, le=1.0)]


class Closed(_Message):
    """Target → drafter: this link has ended (or was never known) here."""

    kind: Literal["closed"] = "closed"
    text: Text


FromDrafter = Hello | Ask | Ping | Bye
FromTarget = Welcome | Denied | Batch | Refused | Pong | Closed

_FROM_DRAFTER: TypeAdapter[FromDrafter] = TypeAdapter(Annotated[FromDrafter, Field(discriminator="kind")])
_FROM_TARGET: TypeAdapter[FromTarget] = TypeAdapter(Annotated[FromTarget, Field(discriminator="kind")])


def encode(message: FromDrafter | FromTarget) -> bytes:
    """The JSON frame."""
    return message.model_dump_json().encode()


def decode_from_drafter(frame: bytes) -> FromDrafter:
    """Parse what a target received."""
    return _decode(_FROM_DRAFTER, frame)


def decode_from_target(frame: bytes) -> FromTarget:
    """Parse what a drafter received."""
    return _decode(_FROM_TARGET, frame)


def decode_ids(ask: Ask, frame: bytes) -> list[NDArray[np.int32]]:
    """The ids of each sample, int32 [T]."""
    total = sum(item.length for item in ask.items)
    if len(frame) != 4 * total:
        raise MessageError(f"{total:,} token ids were announced and {len(frame):,} bytes came")
    ids = np.frombuffer(frame, dtype="<i4")
    ends = np.cumsum([item.length for item in ask.items])[:-1]
    return [part.astype(np.int32) for part in np.split(ids, ends)]


def encode_ids(samples: list[NDArray[np.int32]]) -> bytes:
    """The second frame of an `Ask`."""
    return np.concatenate(samples).astype("<i4").tobytes()


def _decode(adapter: TypeAdapter[Parsed], frame: bytes) -> Parsed:
    if len(frame) > MAX_HEADER_BYTES:
        raise MessageError(
            f"a message of {len(frame):,} bytes is longer than the {MAX_HEADER_BYTES:,} allowed"
        )
    try:
        return adapter.validate_json(frame)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "message"
        raise MessageError(f"{where}: {first['msg']}") from None
