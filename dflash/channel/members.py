"""Who takes part in a run: small objects in the store that live processes write about themselves.

`drafters/<run>/members/<role>-<index>.json` holds a Member. They serve twice: drafters find targets in
them, and targets let in only the keys published there. A killed process leaves its object behind; the
next one of the same role and index overwrites it.
"""

import dataclasses
import logging
import socket
import threading
import uuid
from collections.abc import Callable, Sequence

from pydantic import TypeAdapter, ValidationError

from dflash import layout
from dflash.channel.interface import Member, Role
from dflash.channel.keys import KeyPair
from dflash.storage.store import NotFound, Store

logger = logging.getLogger(__name__)

_MEMBER = TypeAdapter(Member)


class MemberDirectory:
    """The members of one run. May be used from several threads; reads only what has changed."""

    def __init__(self, store: Store, run: str) -> None:
        self._store = store
        self._run = run
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, Member | None]] = {}

    def publish(
        self,
        role: Role,
        index: int,
        keys: KeyPair,
        *,
        host: str = "",
        control_port: int = 0,
        attempt: int = 0,
        fingerprint: str = "",
    ) -> Member:
        """Write this process's member. A drafter does so before it connects, a target once it listens."""
        member = Member(
            role=role,
            index=index,
            instance=uuid.uuid4().hex,
            host=host,
            control_port=control_port,
            public_key=keys.public,
            attempt=attempt,
            fingerprint=fingerprint,
        )
        self._store.put_json(layout.member(self._run, role, index), dataclasses.asdict(member))
        return member

    def withdraw(self, member: Member) -> None:
        """Remove a member that ends, unless another process has taken its place."""
        key = layout.member(self._run, member.role, member.index)
        found = self._store.find_json(key)
        if found is not None and found.get("instance") == member.instance:
            self._store.delete(key)

    def members(self) -> list[Member]:
        """All members now; what is no member is told once and left out. Raises what the store raises."""
        with self._lock:
            seen: dict[str, tuple[str, Member | None]] = {}
            for info in self._store.list(layout.drafter(self._run, "members/")):
                known = self._seen.get(info.key)
                seen[info.key] = (
                    known if known and known[0] == info.etag else (info.etag, self._read(info.key))
                )
            self._seen = seen
            return [member for _, member in seen.values() if member is not None]

    def targets(self) -> list[Member]:
        """The targets among the members: a client's discovery."""
        return [member for member in self.members() if member.role == "target"]

    def public_keys(self) -> set[str]:
        """Keys that may connect: an Authority's source."""
        return {member.public_key for member in self.members()}

    def _read(self, key: str) -> Member | None:
        try:
            data = self._store.get(key)
        except NotFound:  # withdrawn between the listing and now
            return None
        try:
            return _MEMBER.validate_json(data, strict=True)
        except ValidationError as error:
            logger.warning(
                "%s is no member and is left out: %s", key, error.errors(include_url=False)[0]["msg"]
            )
            return None


def at_addresses(targets: Callable[[], list[Member]], names: Sequence[str]) -> Callable[[], list[Member]]:
    """A discovery that keeps the targets whose host is one of `names`, resolved anew at every look.

    A name is an address or a DNS name; a headless service's name resolves to all its pods, and only to
    those that are there, so members that a killed pod left behind are passed over.
    """

    def look() -> list[Member]:
        wanted = {address for name in names for address in _addresses(name)}
        return [member for member in targets() if _addresses(member.host) & wanted]

    return look


def _addresses(name: str) -> set[str]:
    """A name's addresses; none while it does not resolve, as before a service's first pod is there."""
    try:
        return {str(info[4][0]) for info in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
    except socket.gaierror:
        return set()
