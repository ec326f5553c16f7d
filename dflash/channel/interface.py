"""What goes through the channel, who takes part, and what both sides count.

Plain data only: no sockets, no threads. Everything else in the package is built on these.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dflash.model.states import States

Role = Literal["target", "drafter"]


@dataclass(frozen=True)
class Request:
    """One sample whose hidden states are wanted.

    `index` is the place in the order of consumption: 0, 1, 2, ... without gaps within one stream.
    `ids` are token ids, int32 [T], T at least 1.
    """

    index: int
    sample_id: str
    ids: NDArray[np.int32]


@dataclass(frozen=True)
class Reply:
    """A request and its states: `taps` [T, K·D] and, when asked for, `final` [T, D].

    `states` is None when every try for the sample was refused or spoilt; `fault` then says why.
    """

    request: Request
    states: States | None
    fault: str = ""


@dataclass(frozen=True)
class Identity:
    """What both ends must agree on before one tensor is sent.

    `taps` are 0-based layer indexes in the order of the K columns; `dtype` is the states' (`bfloat16`
    or `float32`); `final` says whether the final normed state is sent as well.
    """

    fingerprint: str
    taps: tuple[int, ...]
    hidden_size: int
    dtype: str
    final: bool

    @property
    def width(self) -> int:
        """Numbers per token on the wire: K·D for the taps, and D more for the final state."""
        return self.hidden_size * (len(self.taps) + int(self.final))


@dataclass(frozen=True)
class Member:
    """One live process of a run, as it publishes itself.

    `instance` is new at every start of the process, so that a replacement is told from what it
    replaces. `host` may be an address or a DNS name, which is resolved at every connection. A
    drafter listens nowhere: its `control_port` is 0. `public_key` is CURVE's, in Z85.
    """

    role: Role
    index: int
    instance: str
    host: str
    control_port: int
    public_key: str
    attempt: int
    fingerprint: str

    @property
    def name(self) -> str:
        """`target-3`: how logs and errors call it."""
        return f"{self.role}-{self.index}"


@dataclass(frozen=True)
class Timeouts:
    """Seconds. Every wait of a drafter's client has one."""

    hello: float = 15.0
    """From connecting until the first tensors could flow."""
    heartbeat: float = 0.5
    """Between two pings."""
    silence: float = 20.0
    """Without a word from a target: it hangs, or the network is cut."""
    request: float = 180.0
    """From asking for a sample until it is here."""
    transfer: float = 60.0
    """For one transfer that was announced."""
    discovery: float = 1.0
    """Between two looks at who the targets are."""
    no_target: float = 600.0
    """Without any live target: then TemporaryError."""


@dataclass(frozen=True)
class TargetStats:
    """One target as a drafter sees it."""

    name: str
    live: bool
    outstanding: int
    outstanding_tokens: int
    delivered: int
    idle_share: float | None
    """Share of the last half minute in which the target did not compute; None before it said so."""


@dataclass(frozen=True)
class ClientStats:
    """What a drafter counted since it started, and its state now."""

    status: str
    requested: int = 0
    """Requests sent, re-issues not counted."""
    reissued: int = 0
    """Requests sent once more: after a lost link, a refusal or a bad reply."""
    delivered: int = 0
    """Samples handed over, in order."""
    depth: int = 0
    """Samples requested or ready now; never above the queue depth."""
    ready: int = 0
    """Samples of these that have arrived."""
    bytes_received: int = 0
    wait_seconds: float = 0.0
    """Time in which the consumer waited for a sample."""
    wait_share: float = 0.0
    """The same, as a share of the last half minute."""
    links_lost: int = 0
    bad_replies: int = 0
    refusals: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    """Why links ended or replies were refused, counted."""
    targets: tuple[TargetStats, ...] = ()


@dataclass(frozen=True)
class ServerStats:
    """What a target counted since it started, and its state now."""

    links: int = 0
    pending: int = 0
    """Requests received and not yet captured."""
    samples: int = 0
    tokens: int = 0
    batches: int = 0
    bytes_sent: int = 0
    capture_seconds: float = 0.0
    idle_seconds: float = 0.0
    """Time without a request to work on."""
    blocked_seconds: float = 0.0
    """Time with requests but with every requester's two send buffers full."""
    idle_share: float = 0.0
    """Idle and blocked together, as a share of the last half minute."""
    refused: int = 0
    """Samples refused because capturing them failed."""
    links_refused: int = 0
    links_dropped: int = 0
    causes: dict[str, int] = field(default_factory=dict)
    """Why links were refused or ended, counted."""
