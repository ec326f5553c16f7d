"""A target's control connection: who may join, what they ask for, who has gone. One thread.

It owns the ZeroMQ socket. Requests are put into their session's queue, where `server` finds them.
"""

import logging
import threading
import time
from collections.abc import Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator

from dflash.channel import messages
from dflash.channel.interface import Identity
from dflash.channel.keys import Authority, KeyPair
from dflash.channel.link import host_store
from dflash.channel.roster import Pending, Roster, Session
from dflash.channel.sending import Sender, SendSettings, first_line
from dflash.channel.threads import join_all

logger = logging.getLogger(__name__)

GOODBYE_SECONDS = 3.0
"""Time for threads to end; one that is stuck in a transfer is left behind."""
_MOST_PENDING = 65_536
"""Requests of one drafter that wait; an honest one never comes near."""
_POLL_MS = 500


class Control:
    """Listens, lets drafters in and takes their requests until the roster stops."""

    def __init__(
        self,
        roster: Roster,
        sending: SendSettings,
        *,
        run: str,
        keys: KeyPair,
        authority: Authority,
        token_budget: int,
        silence_timeout: float,
    ) -> None:
        self._roster = roster
        self._sending = sending
        self._run = run
        self._keys = keys
        self._authority = authority
        self._token_budget = token_budget
        self._silence_timeout = silence_timeout
        self._context = zmq.Context()
        self._highest_attempt = 0
        self._arrivals = 0
        self._senders: list[threading.Thread] = []
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """What ended the thread, if nobody asked it to end."""

    def start(self, bind: str, port: int) -> int:
        """Listen; the port, which is chosen where 0 is given."""
        authenticator = ThreadAuthenticator(self._context, log=logging.getLogger("dflash.channel.zap"))
        authenticator.start()
        authenticator.configure_curve_callback(domain="*", credentials_provider=self._authority)
        router = self._context.socket(zmq.ROUTER)
        router.linger = 0
        router.ipv6 = ":" in bind
        router.curve_server = True
        router.curve_publickey = self._keys.public.encode()
        router.curve_secretkey = self._keys.secret.encode()
        router.maxmsgsize = messages.MAX_FRAME_BYTES
        router.router_mandatory = True  # an error for who is gone, instead of silence
        host = f"[{bind}]" if ":" in bind else bind
        router.bind(f"tcp://{host}:{port or '*'}")
        self._thread = threading.Thread(
            target=self._run_thread, args=(router, authenticator), name="channel-control", daemon=True
        )
        self._thread.start()
        return int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])

    def join(self) -> None:
        """Wait until the thread has ended; the roster must have been stopped."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=2 * GOODBYE_SECONDS)

    def _run_thread(self, router: "zmq.Socket[bytes]", authenticator: ThreadAuthenticator) -> None:
        roster = self._roster
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(roster.outbox.fileno(), zmq.POLLIN)
        try:
            turned_at = time.monotonic()
            while not roster.stopping:
                poller.poll(_POLL_MS)
                held_up, turned_at = time.monotonic() - turned_at, time.monotonic()
                self._send_all(router)
                while router.poll(0):
                    self._receive(router)
                self._drop_silent(held_up if held_up > 2 * _POLL_MS / 1000 else 0.0)
        except BaseException as error:
            logger.exception("the control thread failed")
            self.failure = error
        finally:
            with roster.changed:
                roster.stopping = True
                sessions = list(roster.sessions.values())
                roster.changed.notify_all()
            for session in sessions:
                roster.end(session, "the target stops")
            self._send_all(router)
            router.close(linger=500)
            authenticator.stop()
            self._context.term()
            roster.outbox.close()
            join_all(self._senders, GOODBYE_SECONDS)

    # Messages

    def _send_all(self, router: "zmq.Socket[bytes]") -> None:
        for route, message in self._roster.outbox.drain():
            self.send(router, route, message)

    def send(self, router: "zmq.Socket[bytes]", route: bytes, message: messages.FromTarget) -> None:
        """The one place where messages leave; tests of faulty targets replace it."""
        try:
            router.send_multipart([route, messages.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            session = self._roster.sessions.get(route)
            if session is not None:
                gone = error.errno == zmq.EHOSTUNREACH
                cause = "the drafter is gone" if gone else f"control: {error.strerror}"
                self._roster.end(session, cause, tell=False)

    def _receive(self, router: "zmq.Socket[bytes]") -> None:
        route, *frames = router.recv_multipart(zmq.NOBLOCK)
        session = self._roster.sessions.get(route)
        try:
            self._message(router, route, session, frames)
        except messages.MessageError as error:
            cause = f"bad control message: {error}"
            self._roster.note(cause)
            if session is not None:
                self._roster.end(session, cause)
            else:
                self.send(router, route, messages.Closed(text=cause))

    def _message(
        self, router: "zmq.Socket[bytes]", route: bytes, session: Session | None, frames: Sequence[bytes]
    ) -> None:
        if not 1 <= len(frames) <= 2:
            raise messages.MessageError(f"{len(frames)} frames in one message")
        message = messages.decode_from_drafter(frames[0])
        if isinstance(message, messages.Hello):
            self._hello(router, route, message)
            return
        if session is None:
            if not isinstance(message, messages.Bye):
                self.send(router, route, messages.Closed(text="no such link here"))
            return
        session.last_heard = time.monotonic()
        if isinstance(message, messages.Ask):
            self._ask(session, message, frames[1] if len(frames) > 1 else b"")
        elif isinstance(message, messages.Ping):
            self.send(router, route, messages.Pong(idle_share=self._roster.idle_share()))
        else:
            self._roster.end(session, "the drafter is done", tell=False, clean=True)

    def _ask(self, session: Session, ask: messages.Ask, frame: bytes) -> None:
        samples = messages.decode_ids(ask, frame)
        with self._roster.changed:
            if session.closed:
                return
            if len(session.pending) + len(samples) > _MOST_PENDING:
                raise messages.MessageError(f"more than {_MOST_PENDING:,} requests are waiting")
            for item, ids in zip(ask.items, samples, strict=True):
                session.pending.append(Pending(self._arrivals, item, ids))
                self._arrivals += 1
            self._roster.changed.notify_all()

    # Sessions

    def _hello(self, router: "zmq.Socket[bytes]", route: bytes, hello: messages.Hello) -> None:
        roster = self._roster
        denied = self._judge(hello)
        if denied is not None:
            with roster.changed:
                roster.counts["links_refused"] += 1
            roster.note(f"refused: {denied.code}")
            logger.warning("refused drafter-%d (attempt %d): %s", hello.index, hello.attempt, denied.text)
            self.send(router, route, denied)
            return
        self._highest_attempt = max(self._highest_attempt, hello.attempt)
        for other in list(roster.sessions.values()):
            if other.attempt < hello.attempt:
                roster.end(other, f"attempt {hello.attempt} has taken over")
            elif other.drafter == hello.index:
                roster.end(other, "the drafter opened a new link")
        address = self._sending.address
        try:
            store = host_store(address)
        except (OSError, RuntimeError) as error:  # out of descriptors or ports: others go on
            roster.note(f"no rendezvous for a link: {error}")
            self.send(router, route, messages.Closed(text=f"no rendezvous: {first_line(error)}"))
            return
        session = Session(hello.link, route, hello.index, hello.attempt, time.monotonic())
        with roster.changed:
            roster.sessions[route] = session
        sender = Sender(session, store, roster, self._sending)
        sender.start()
        self._senders = [thread for thread in self._senders if thread.is_alive()] + sender.threads
        welcome = messages.Welcome(
            host=address, store_port=store.port, group=session.name, token_budget=self._token_budget
        )
        self.send(router, route, welcome)
        logger.info("linked with %s", session.label)

    def _judge(self, hello: messages.Hello) -> messages.Denied | None:
        """Why a drafter may not join, or None."""
        if hello.version != messages.VERSION:
            text = f"the target speaks version {messages.VERSION} of the channel, the drafter {hello.version}"
            return messages.Denied(code="version", text=text)
        if hello.run != self._run:
            return messages.Denied(code="run", text=f"the target serves run {self._run}, not {hello.run}")
        if hello.backend != self._sending.backend:
            text = f"the target sends by {self._sending.backend}, the drafter wants {hello.backend}"
            return messages.Denied(code="backend", text=text)
        offered = Identity(hello.fingerprint, tuple(hello.taps), hello.hidden_size, hello.dtype, hello.final)
        for name in ("fingerprint", "taps", "hidden_size", "dtype", "final"):
            have, want = getattr(self._sending.identity, name), getattr(offered, name)
            if have != want:
                text = f"{name} differs: the target has {have}, the drafter expects {want}"
                return messages.Denied(code="identity", text=text)
        if hello.attempt < self._highest_attempt:
            text = f"attempt {self._highest_attempt} is running; attempt {hello.attempt} is over"
            return messages.Denied(code="superseded", text=text)
        return None

    def _drop_silent(self, late: float) -> None:
        """Drop who has said nothing. `late`: how long this thread itself was held up, which is not theirs."""
        limit = time.monotonic() - self._silence_timeout
        for session in list(self._roster.sessions.values()):
            session.last_heard += late
            if session.last_heard < limit:
                self._roster.end(session, f"nothing heard from the drafter for {self._silence_timeout:.0f} s")
