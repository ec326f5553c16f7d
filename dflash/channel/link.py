"""The tensors' half of a link: a private two-rank process group between one target and one drafter.

Gloo on CPUs and NCCL on GPUs, by one setting. No global process group is involved, so a link that
breaks concerns its two ends only. The target hosts the rendezvous store, one per link, and it goes with
the link. A call that fails leaves the group unusable: the link is given up, never repaired.
"""

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
    Work,
)

Backend = Literal["gloo", "nccl"]

TARGET_RANK = 0
DRAFTER_RANK = 1

_NCCL_CHANNELS = 2
"""Every link is a communicator and every channel of it holds GPU memory; two saturate one stream."""


def resolve_backend(backend: str, device: torch.device) -> Backend:
    """`auto` is NCCL where the states are on a GPU, else Gloo."""
    if backend == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend {backend!r} is neither gloo, nccl nor auto")
    return "nccl" if backend == "nccl" else "gloo"


def local_address_towards(host: str, port: int) -> str:
    """This machine's address as the other side sees it: the one the route to it starts from."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing: UDP
        return str(probe.getsockname()[0])


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Let this thread work on `device` in a stream of its own, so that it never waits for the others'."""
    if device.type != "cuda":
        yield None
        return
    with torch.cuda.device(device):
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            yield stream


def listen(host: str) -> socket.socket:
    """Listen at a free port of one of this machine's addresses; OSError if `host` is none of them."""
    family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family)


def host_store(host: str) -> TCPStore:
    """Open a rendezvous store that listens on `host` only, at a free port."""
    listener = listen(host)
    port = listener.getsockname()[1]
    # The store takes the descriptor over and closes it at its own end.
    return TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=listener.detach())


def join_store(host: str, port: int, timeout: float) -> TCPStore:
    """Connect to the other side's rendezvous store; RuntimeError if it is not there in `timeout` seconds."""
    return TCPStore(host, port, None, False, timeout=timedelta(seconds=timeout))


class TensorLink:
    """Two ranks, one sender, one receiver. Not for several threads at once."""

    def __init__(
        self,
        store: TCPStore,
        group: str,
        rank: int,
        *,
        address: str,
        backend: Backend,
        timeout: float,
        device: torch.device,
    ) -> None:
        """Form the group with the other side; raises RuntimeError if it is not there in `timeout` seconds."""
        self._store = store
        self._timeout = timedelta(seconds=timeout)
        self._peer = 1 - rank
        self._device = device
        prefixed = PrefixStore(group, store)
        self._group: Any  # torch declares no common type that has send and recv with a tag
        if backend == "gloo":
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [ProcessGroupGloo.create_device(hostname=address)]
            options._timeout = self._timeout
            self._group = ProcessGroupGloo(prefixed, rank, 2, options)
        else:
            from torch.distributed import ProcessGroupNCCL

            nccl = ProcessGroupNCCL.Options()
            nccl._timeout = self._timeout
            nccl.config.max_ctas = _NCCL_CHANNELS
            self._group = ProcessGroupNCCL(prefixed, rank, 2, nccl)

    def set_timeout(self, seconds: float) -> None:
        """Longest time one transfer may take from now on."""
        self._timeout = timedelta(seconds=seconds)

    def start_send(self, flat: Tensor) -> Work:
        """Start to send a uint8 buffer, which must stay as it is until `finish`."""
        work: Work = self._group.send([flat], self._peer, 0)
        return work

    def start_receive(self, flat: Tensor) -> Work:
        """Start to receive into a uint8 buffer."""
        work: Work = self._group.recv([flat], self._peer, 0)
        return work

    def finish(self, work: Work) -> None:
        """Wait until a transfer is over. RuntimeError if the other side is gone or hangs."""
        work.wait(self._timeout)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
