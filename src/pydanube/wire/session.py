"""One connection of the native protocol, as one of its two sides sees it. No socket, no clock, no event loop.

    for event in session.receive(data, now):      what the peer sent, command by command
        ...                                       session.reply(...), session.ask(...), session.send(...)
    transport.writelines(session.to_send(now))    after every call
    if session.end is not None:                   write what is left and close, or abort
        ...
    session.due()                                 when to call session.tick(now), unless something happens before

Both sides go through the same states:

                hello, welcome           the peer's goodbye           no request is unanswered
    GREETING ──────────────────► OPEN ──────────────────────► LEAVING ─────────────────────────┐
        │                          │                             │                             ▼
        └──────────────────────────┴─────────────────────────────┴────────────────────────► CLOSED
              a violation, a limit of time, the end of the connection, a goodbye of our own

The session decides the greeting, request ids and the matching of replies, pings, goodbyes, limits of size and time,
what is a violation, and how the connection ends. The caller has the socket, the tasks, back-pressure, and what the
commands mean. It tells the session when it stops reading, and when the peer takes nothing: limits of time depend on it.

Commands are decided one by one, each when the caller has handled the one before: answers stay in order, and a caller
may stop in the middle of a read and go on with `events` later. On the busy path (produce, deliver, ack) an event is the
decoder's own frame; bodies are passed on as the buffers that they came in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import Enum
from typing import Final, Generic, NamedTuple, TypeAlias, TypeVar

from pydanube.config.stream import StreamLimits
from pydanube.errors import ConfigError, DanubeError, ProtocolViolation, Unreachable
from pydanube.ports import Buffer
from pydanube.wire import frames, strangers
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import from_wire, to_wire

W = TypeVar("W")

GREETING_ID: Final = 1
PING_ID: Final = 2
FIRST_ID: Final = 3  # of the requests that callers make
CLIENT_MAX: Final = 200  # characters of a client's name that are kept

# What a client may say once it is greeted. `REQUESTS` need a request id, `TOLD` may have one.
REQUESTS: Final = frozenset(
    {
        "change_failure_policy",
        "close_consumer",
        "close_producer",
        "create_topic",
        "delete_topic",
        "describe_storage",
        "describe_storages",
        "describe_topic",
        "fetch",
        "find_offset",
        "flush_log",
        "get_lag",
        "list_topics",
        "lookup",
        "note_order",
        "open_producer",
        "produce",
        "seek",
        "subscribe",
        "swap_objects",
        "unsubscribe",
    }
)
TOLD: Final = frozenset({"ack", "nack", "handed", "returned"})
# What a broker says unasked.
PUSHED: Final = frozenset({"deliver", "recall", "moved"})


class Side(Enum):
    CLIENT = "client"
    SERVER = "server"


class SessionState(Enum):
    GREETING = "greeting"
    OPEN = "open"
    LEAVING = "leaving"  # the peer said goodbye; requests are still answered
    CLOSED = "closed"


# A look at an Enum's member costs as much as a call: these are on the way of every frame.
_GREETING: Final = SessionState.GREETING
_LEAVING: Final = SessionState.LEAVING


class How(Enum):
    """How a session ended, and so what becomes of the connection."""

    LEFT = "left"  # in order: write `to_send`, then close
    FAILED = "failed"  # a violation, or a refusal. A server writes the error and closes, a client aborts
    DROPPED = "dropped"  # abort


class SessionEnd(NamedTuple):
    how: How
    error: BaseException  # a DanubeError on the client's side


class Reply(NamedTuple, Generic[W]):
    """The answer to a request of ours: a frame, or the error that the peer answered with."""

    waiter: W
    answer: frames.Frame | DanubeError


# A client gets frames of the kinds `welcome` and `goodbye`, those in PUSHED, and `error` if it is a handle's.
# A server gets those in REQUESTS and TOLD, and `flow`.
Event: TypeAlias = frames.Frame | Reply[W]


class Session(Generic[W]):
    """`W` is whatever a caller of `ask` wants back with the reply."""

    def __init__(
        self,
        side: Side,
        greeting: pb.Hello | pb.Welcome,
        now: float,
        *,
        peer: str = "",
        limits: StreamLimits | None = None,
    ) -> None:
        """`greeting` is a client's Hello or a server's Welcome; versions and limits in it are filled in here. `peer` is
        what errors call the other side: a client's URL of the broker. `limits` are a server's.
        """
        self.side = side
        self._is_client = side is Side.CLIENT
        self.state = SessionState.GREETING
        self.end: SessionEnd | None = None
        self.envelope_version = 1  # the newest that the peer reads
        self.client = ""  # the client's name for itself, known to a server that was greeted
        self.frame_size_max = frames.FRAME_SIZE_LIMIT  # of what may be sent to the peer
        self._greeting = greeting
        self._peer = peer
        self._limits = limits or StreamLimits()
        self._decide = self._decide_as_client if self._is_client else self._decide_as_server
        self._decoder = frames.FrameDecoder()
        self._frames: deque[frames.Frame] = deque()  # received, and not decided
        self._out: list[Buffer] = []
        self._owed = 0  # requests of the peer without a reply
        self._waiting: dict[int, W | None] = {}  # requests of ours without a reply
        self._next_id = FIRST_ID
        self._is_greeted = self._is_gone = False
        # Of a server's limits of time:
        self._opened_at = self._heard_at = self._frame_since = self._stuck_since = now
        self._is_reading = self._is_writable = True
        self._is_handed_out = False  # what was left to write when the session ended
        # Of a client's keepalive:
        self._said_at = now
        self._pinged_at: float | None = None
        self._keepalive_seconds = 0.0
        self._check_at: float | None = None
        if isinstance(greeting, pb.Hello):
            greeting.magic = frames.MAGIC
            greeting.version_min, greeting.version_max = frames.VERSION_MIN, frames.VERSION_MAX
            self.send(pb.Command(request_id=GREETING_ID, hello=greeting))

    # --- bytes --------------------------------------------------------------------------------------

    def receive(self, data: Buffer, now: float) -> Iterator[Event[W]]:
        """Takes what was read. Returns `events`."""
        if self.end is None:
            self._heard_at = now
            self._pinged_at = None
            begins = not self._decoder.buffered_bytes
            try:
                found = self._decoder.feed(data)
            except ProtocolViolation:  # told by `events`, behind what came before it
                found = []
            if found or begins:
                self._frames.extend(found)
                self._frame_since = now
            if begins and self.state is _GREETING and self._is_client:
                advice = strangers.advice(bytes(data))  # what answers a greeting may be no broker's native port
                if advice is not None:
                    self.drop(ConfigError("url", self._peer, advice))
        return self.events()

    def events(self) -> Iterator[Event[W]]:
        """What was received and is not handled yet, in order. A violation ends the session, behind what came before."""
        while self._frames and self.end is None:
            try:
                event = self._decide(self._frames.popleft())
            except ProtocolViolation as violation:
                self.fail(violation)
                return
            if event is not None:
                yield event
            if self.state is _LEAVING:
                self._leave()
        if self.end is None and self._decoder.violation is not None:
            self.fail(self._decoder.violation)

    def to_send(self, now: float) -> list[Buffer]:
        """What is to be written now, and is not returned again."""
        out = self._out
        if out:
            self._out = []
            self._said_at = now
        if self.end is not None and not self._is_handed_out:
            self._is_handed_out = True
            self._stuck_since = now
        return out

    @property
    def partial_bytes(self) -> int:
        """Of a frame that has begun."""
        return self._decoder.buffered_bytes

    @property
    def has_events(self) -> bool:
        return bool(self._frames)

    # --- saying -------------------------------------------------------------------------------------

    def send(self, command: pb.Command, *body: Buffer) -> None:
        """Queues a command that is no reply and gets none. Dropped once the session has ended."""
        if self.end is None:
            self._out += frames.encode(command, *body)

    def reply(self, command: pb.Command, *body: Buffer) -> None:
        """Queues the one reply to a request of the peer, whose id the command has."""
        if self.end is None:
            self._out += frames.encode(command, *body)
            self._owed -= 1
            if self.state is _LEAVING:
                self._leave()

    def ask(self, command: pb.Command, waiter: W | None, *body: Buffer) -> int:
        """Queues a request, and returns its id: a `Reply` with `waiter` will come. Without one, the reply is dropped.
        Once the session has ended it returns 0.
        """
        if self.end is not None:
            return 0
        number = self._next_id
        self._next_id = number + 1
        command.request_id = number
        self._waiting[number] = waiter
        self._out += frames.encode(command, *body)
        return number

    def forget(self, number: int) -> None:
        """The request's caller has given up. A reply that comes all the same is discarded."""
        self._waiting.pop(number, None)
        if self.state is _LEAVING:
            self._leave()

    def discard(self, reply: frames.Frame) -> None:
        """A reply that no caller wants any more: what it opened is closed, or the broker would go on serving it."""
        if reply.kind == "subscribed":
            consumer = reply.command.subscribed.consumer
            self.ask(pb.Command(close_consumer=pb.CloseConsumer(consumer=consumer)), None)
        elif reply.kind == "producer_opened":
            producer = reply.command.producer_opened.producer
            self.ask(pb.Command(close_producer=pb.CloseProducer(producer=producer)), None)

    def goodbye(self, reason: str = "") -> None:
        """Asks the peer to leave: it will not ask for more, and closes when it has all its answers."""
        self.send(pb.Command(goodbye=pb.Goodbye(reason=reason)))

    # --- ending -------------------------------------------------------------------------------------

    def fail(self, error: BaseException, request_id: int = 0) -> None:
        """Nothing that follows can be believed. A server says why, as the reply if it is a request's fault."""
        if self.end is None:
            if not self._is_client:
                self._out += frames.encode(pb.Command(request_id=request_id, error=to_wire(error)))
            self._close(How.FAILED, error)

    def close(self, error: BaseException) -> None:
        """Ends in order: what is queued is still written."""
        if self.end is None:
            self._close(How.LEFT, error)

    def drop(self, error: BaseException) -> None:
        """Ends immediately, also a connection that was to be closed in order and is still there."""
        if not self._is_gone and (self.end is None or self.end.how is not How.DROPPED):
            self._close(How.DROPPED, error)

    def lost(self, why: DanubeError | str) -> list[frames.Frame]:
        """The connection is gone. Returns what was received from the peer while it was there and is not handled."""
        self._is_gone = True
        if self.end is not None:
            return []
        if isinstance(why, str):
            if self._is_client and self.state is _GREETING:
                # A broker hangs up on strangers without a word that would get through.
                is_tls = self._peer.startswith("danube+tls")
                why += " before it answered; " + (
                    "perhaps it wants a certificate of ours (tls=)" if is_tls else "if it speaks TLS, use danube+tls://"
                )
            why = Unreachable(self._peer, why)
        unhandled = list(self._frames)
        self._close(How.DROPPED, why)
        return unhandled

    def take_waiting(self) -> list[W]:
        """The waiters of replies that will not come any more."""
        waiting, self._waiting = self._waiting, {}
        return [waiter for waiter in waiting.values() if waiter is not None]

    def _leave(self) -> None:
        if not self._owed and not self._waiting:
            why = "the broker is going away" if self._is_client else "the peer said goodbye"
            self.close(Unreachable(self._peer, why))

    def _close(self, how: How, error: BaseException) -> None:
        self.state = SessionState.CLOSED
        self.end = SessionEnd(how, error)
        self._frames.clear()

    # --- time ---------------------------------------------------------------------------------------

    def due(self) -> float | None:
        """When `tick` has something to decide; None: not before something else happens."""
        if self._is_client:
            return self._check_at if self.end is None else None
        return min((time for time, _ in self._deadlines()), default=None)

    def tick(self, now: float) -> None:
        """Ends a session whose peer broke a limit of time. A client pings a broker that is quiet, to notice one that is
        silent, and to be heard itself.
        """
        if not self._is_client:
            why = next((why for time, why in self._deadlines() if now >= time), None)
            if why is not None:
                self.drop(Unreachable(self._peer, why))
            return
        if self.end is not None or self._check_at is None or now < self._check_at:
            return
        period = self._keepalive_seconds / 3
        if self._pinged_at is not None and now - self._pinged_at > self._keepalive_seconds:
            self.drop(Unreachable(self._peer, f"silent for {now - self._heard_at:.0f} s"))
            return
        quiet_at = min(self._said_at, self._heard_at)
        if self._pinged_at is None and now - quiet_at > self._keepalive_seconds - 1.5 * period:
            self._pinged_at = now
            self.send(pb.Command(request_id=PING_ID, ping=pb.Ping()))
        self._check_at = now + period

    def pause_reading(self) -> None:
        """The caller stops reading: the peer cannot be blamed for what is not heard of it."""
        self._is_reading = False

    def resume_reading(self, now: float) -> None:
        self._is_reading = True
        self._heard_at = self._frame_since = now

    def pause_writing(self, now: float) -> None:
        """The peer does not take what it is sent."""
        self._is_writable = False
        self._stuck_since = now

    def resume_writing(self) -> None:
        self._is_writable = True

    def _deadlines(self) -> list[tuple[float, str]]:
        """A server's limits of time that are running."""
        found: list[tuple[float, str]] = []
        if self._is_gone or (self.end is not None and self.end.how is How.DROPPED):
            return found
        limits = self._limits
        if not self._is_greeted:
            found.append((self._opened_at + limits.handshake_seconds, "it did not greet in time"))
        if self._is_reading and self.end is None and self._decoder.buffered_bytes:
            found.append((self._frame_since + limits.frame_seconds, "it did not finish a frame in time"))
        if self.end is not None or not self._is_writable:
            found.append((self._stuck_since + limits.stuck_seconds, "it took nothing for too long"))
        if self._is_reading:
            found.append((self._heard_at + 2 * limits.keepalive_seconds, "it was silent for too long"))
        return found

    # --- the server's side --------------------------------------------------------------------------

    def _decide_as_server(self, frame: frames.Frame) -> frames.Frame | None:
        kind, request_id = frame.kind, frame.command.request_id
        if self.state is _GREETING:
            self._greet(frame)
            return None
        if kind in REQUESTS:
            if not request_id:
                reply = "receipt" if kind == "produce" else "answer"
                raise ProtocolViolation(f"{kind} has no request id, so nobody could tell its {reply}")
            self._owed += 1
        elif kind in TOLD:
            if request_id:
                self._owed += 1
        elif kind == "ping":
            self.send(pb.Command(request_id=request_id, pong=pb.Pong()))
            return None
        elif kind == "goodbye":
            self.state = SessionState.LEAVING
            return None
        elif kind == "pong":
            return None
        elif kind == "hello":
            raise ProtocolViolation("the greeting is over")
        elif kind != "flow":
            raise ProtocolViolation(f"{kind} is the broker's to say")
        return frame

    def _greet(self, frame: frames.Frame) -> None:
        if frame.kind != "hello":
            raise ProtocolViolation(f"the first command is {frame.kind}, not hello")
        hello, welcome = frame.command.hello, self._greeting
        assert isinstance(welcome, pb.Welcome)
        welcome.version = frames.negotiate(hello)
        self.frame_size_max = frames.frame_size_of(hello)
        self.client = hello.client[:CLIENT_MAX]
        welcome.frame_size_max = self._decoder.frame_size_max = self._limits.frame_bytes
        welcome.in_flight_max = frames.IN_FLIGHT_MAX
        welcome.keepalive_seconds = self._limits.keepalive_seconds
        welcome.commands[:] = frames.ADDED
        welcome.envelope_version = frames.ENVELOPE_VERSION
        self.envelope_version = max(1, hello.envelope_version)
        self.state, self._is_greeted = SessionState.OPEN, True
        self.send(pb.Command(request_id=frame.command.request_id, welcome=welcome))

    # --- the client's side --------------------------------------------------------------------------

    def _decide_as_client(self, frame: frames.Frame) -> Event[W] | None:
        kind = frame.kind
        if self.state is _GREETING:
            return self._greeted(frame)
        if kind in PUSHED:
            return frame
        if kind == "ping":
            self.send(pb.Command(request_id=frame.command.request_id, pong=pb.Pong()))
            return None
        if kind == "goodbye":
            self.state = SessionState.LEAVING
            return frame
        number = frame.command.request_id
        if kind == "error" and not number:
            error = frame.command.error
            if error.producer or error.consumer:
                return frame
            self.drop(from_wire(error))
            return None
        if number not in self._waiting:
            self.discard(frame)
            return None
        waiter = self._waiting.pop(number)
        if waiter is None:
            return None
        return Reply(waiter, from_wire(frame.command.error) if kind == "error" else frame)

    def _greeted(self, frame: frames.Frame) -> frames.Frame | None:
        if frame.kind == "error":
            self.drop(from_wire(frame.command.error))
            return None
        if frame.kind != "welcome":
            raise ProtocolViolation(f"the greeting was answered with {frame.kind}")
        welcome = frame.command.welcome
        frames.check_welcome(welcome)
        self.frame_size_max = welcome.frame_size_max
        self._decoder.frame_size_max = frames.FRAME_SIZE_LIMIT
        self._keepalive_seconds = float(welcome.keepalive_seconds)
        self.state = SessionState.OPEN
        if self._keepalive_seconds:
            self._check_at = self._heard_at + self._keepalive_seconds / 3
        return frame
