"""A drafter's control connection to one target: its sockets, its messages, and why it ended.

Decides nothing: `loop` opens connections, answers what they bring and closes them. Sockets are not for
several threads, so all of it is called from the loop's.
"""

import contextlib
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from dflash.channel import messages
from dflash.channel.interface import Member
from dflash.channel.keys import KeyPair

_ENDINGS: dict[int, str] = {
    zmq.Event.DISCONNECTED: "the connection was lost",
    zmq.Event.CLOSED: "nothing listens there",
    zmq.Event.HANDSHAKE_FAILED_AUTH: "it does not let this drafter's key in",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "it does not hold the key it published",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: "the connection was not accepted",
}
"""What a socket's monitor may report that ends a connection."""


class Connection:
    """Encrypted, never reconnected: a lost connection is a lost link."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", poller: zmq.Poller, keys: KeyPair) -> None:
        self._poller = poller
        self._keys = keys
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.ipv6 = True
        self._socket.reconnect_ivl = -1
        self._socket.maxmsgsize = messages.MAX_HEADER_BYTES
        self._monitor = self._socket.get_monitor_socket(sum(_ENDINGS))
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def connect(self, member: Member) -> str | None:
        """Begin to connect. What is wrong with the address, or None; later troubles come by `ending`."""
        self._socket.curve_publickey = self._keys.public.encode()
        self._socket.curve_secretkey = self._keys.secret.encode()
        self._socket.curve_serverkey = member.public_key.encode()
        host = f"[{member.host}]" if ":" in member.host else member.host
        try:
            self._socket.connect(f"tcp://{host}:{member.control_port}")
        except zmq.ZMQError as error:
            return f"connecting to {member.host}:{member.control_port}: {error.strerror}"
        return None

    def post(self, message: messages.FromDrafter, payload: bytes | None = None) -> None:
        """Send, without waiting."""
        frames = [messages.encode(message)] if payload is None else [messages.encode(message), payload]
        # The socket queues; when its queue is full the target hangs, and silence will end the link.
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart(frames, zmq.NOBLOCK)

    def has_messages(self, woken: dict[object, int]) -> bool:
        """Whether the poller found something to read."""
        return self._socket in woken

    def has_ended(self, woken: dict[object, int]) -> bool:
        """Whether the poller found that the connection ended."""
        return self._monitor in woken

    def ending(self) -> str:
        """Why it ended."""
        event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
        return _ENDINGS.get(event["event"], "the connection was lost")

    def received(self) -> Iterator[messages.FromTarget]:
        """All messages that are here. MessageError if one is not what a target says."""
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                raise messages.MessageError(f"{len(frames)} frames in one message")
            yield messages.decode_from_target(frames[0])

    def close(self, linger: int = 0) -> None:
        """Free the sockets; what was posted has `linger` milliseconds to leave."""
        self._poller.unregister(self._socket)
        self._poller.unregister(self._monitor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger)
