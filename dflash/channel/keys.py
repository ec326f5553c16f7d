"""CURVE keys of one process, and who may connect: only keys that the run's members published.

A key pair is made at every start and never stored. Whoever may write into the run's folder of the store
may join, and nobody else; there is no other secret.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import zmq

logger = logging.getLogger(__name__)

_REFETCH_SECONDS = 0.5
"""An unknown key is looked up at most this often, so that strangers cannot make the store busy."""


@dataclass(frozen=True)
class KeyPair:
    """A CURVE key pair in Z85."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> "KeyPair":
        """A fresh pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


class Authority:
    """Answers whether a public key belongs to a member; called by ZeroMQ's authenticator thread."""

    def __init__(
        self, fetch: Callable[[], Collection[str]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`fetch` returns all published keys; it may be slow, and is asked only about unknown keys."""
        self._fetch = fetch
        self._clock = clock
        self._known: frozenset[str] = frozenset()
        self._fetched_at: float | None = None
        self._lock = threading.Lock()
        self.refused = 0

    def callback(self, domain: str, key: bytes) -> bool:  # noqa: ARG002
        """ZAP credentials provider: True lets the connection in."""
        public = key.decode("ascii", "replace")
        with self._lock:
            if public not in self._known:
                self._refetch()
            if public in self._known:
                return True
            self.refused += 1
        logger.warning("a connection with an unpublished key was refused")
        return False

    def _refetch(self) -> None:
        now = self._clock()
        if self._fetched_at is not None and now - self._fetched_at < _REFETCH_SECONDS:
            return
        self._fetched_at = now
        try:
            self._known = frozenset(self._fetch())
        except Exception as error:  # noqa: BLE001 - an outage of the store must not end the authenticator
            logger.warning("the members' keys could not be read: %s", error)
