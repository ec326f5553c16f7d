"""A queue that a thread can wait on together with its sockets. Any thread may put."""

import contextlib
import socket
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Mailbox(Generic[Item]):
    """Unbounded; what bounds it is that every item answers something its reader started."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._woken = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def put(self, item: Item) -> None:
        """Add an item and wake the reader, unless it has been woken and has not looked yet."""
        self._items.append(item)
        if not self._woken:
            self._woken = True
            self.wake()

    def wake(self) -> None:
        """Make the reader look, with or without an item."""
        # A full pipe means that the reader has been woken already; a closed one that it is gone.
        with contextlib.suppress(BlockingIOError, OSError):
            self._writer.send(b"\0")

    def fileno(self) -> int:
        """Readable when there may be items."""
        return self._reader.fileno()

    def drain(self) -> list[Item]:
        """All items put so far, oldest first."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(4096):
                pass
        # Between emptying the pipe and the items: whoever finds this still set has put its item already.
        self._woken = False
        items = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        """Free the descriptors; items put later are dropped."""
        self._reader.close()
        self._writer.close()
