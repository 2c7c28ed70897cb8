"""Our sans-I/O gRPC server and a client at the other end of two byte strings: raw frames, or `h2`, which obeys rules.

No socket, no loop, time is a number. `Server` is the layer above: it answers what has come, and keeps the accounts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import h2.connection
import h2.events
from h2.config import H2Configuration
from hpack.hpack import Encoder

from pydanube.wire.grpc.calls import (
    Called,
    CallEvent,
    CallLimits,
    CallRefused,
    Cancelled,
    Held,
    ServerCall,
    ServerMethod,
)
from pydanube.wire.grpc.messages import framed
from pydanube.wire.grpc.server import GrpcServerConnection
from pydanube.wire.http2 import frames
from pydanube.wire.http2.sending import Unsent
from pydanube.wire.http2.values import Http2Limits

UNARY, SMALL, CLIENT_STREAM, ANSWERS = "/t.T/Unary", "/t.T/Small", "/t.T/Requests", "/t.T/Answers"
MIB = 1024 * 1024
LIMITS = Http2Limits()


def too_large(size: int, limit: int) -> str:
    return f"{size} bytes are over the limit of {limit}"


METHODS = {
    UNARY: ServerMethod(UNARY, "unary", False, 4 * MIB, too_large),
    SMALL: ServerMethod(SMALL, "unary", False, 1024, too_large),
    CLIENT_STREAM: ServerMethod(CLIENT_STREAM, "requests", True, 4 * MIB, too_large),
    ANSWERS: ServerMethod(ANSWERS, "answers", False, 4 * MIB, too_large),
}
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", UNARY),
    (":authority", "here"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
    ("user-agent", "test"),
]


def headers(path: str = UNARY, *more: tuple[str, str]) -> list[tuple[str, str]]:
    return [(name, path if name == ":path" else value) for name, value in HEADERS] + list(more)


@dataclass
class Server:
    """One connection; `held` and `unsent` may be shared with others."""

    limits: Http2Limits = LIMITS
    held: Held = field(default_factory=lambda: Held(CallLimits()))
    unsent: Unsent = field(default_factory=lambda: Unsent(256 * MIB))
    now: float = 0.0
    answers: Callable[[bytes], bytes] = lambda request: request[:16]
    calls: dict[ServerCall, list[bytes]] = field(default_factory=dict)  # open, with what has come
    log: list[CallEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.grpc = GrpcServerConnection(METHODS.get, self.held, self.unsent, self.limits, self.now)

    def receive(self, data: bytes) -> list[CallEvent]:
        return self._note(self.grpc.receive(data, self.now))

    def tick(self, seconds: float = 0) -> list[CallEvent]:
        self.now += seconds
        return self._note(self.grpc.tick(self.now))

    def _note(self, events: list[CallEvent]) -> list[CallEvent]:
        self.log.extend(events)
        for event in events:
            match event:
                case Called(call, message):
                    assert call not in self.calls
                    self.calls[call] = [] if message is None else [message]
                case CallRefused(call, code, sentence):
                    self.calls.pop(call, None)
                    self.grpc.finish(call, code, sentence)
                case Cancelled(call):
                    self.calls.pop(call, None)
                case _:
                    if event.call in self.calls and event.message is not None:
                        self.calls[event.call].append(event.message)
                    self.grpc.done_with(event.call)
        return events

    def answer_all(self) -> int:
        """Answers every unary call that has come; returns how many."""
        ready = [call for call in self.calls if call.method.handler == "unary"]
        for call in ready:
            self.grpc.answer(call, self.answers(self.calls.pop(call)[0]))
        return len(ready)

    def output(self) -> bytes:
        return self.grpc.data_to_send()

    def check_accounts(self) -> None:
        """Every sum is the sum of its parts, whatever goes on."""
        http = self.grpc._http
        streams = list(http.streams.values())
        calls = [stream.call for stream in streams if stream.call is not None]
        assert self.held.size_bytes == sum(call.held_bytes for call in calls)
        assert self.unsent.size_bytes == http._sending.queued_bytes == sum(stream.queued_bytes for stream in streams)
        for stream in streams:
            queued = sum(map(len, stream.queue or ())) - stream.cursor
            assert stream.queued_bytes == queued and not (stream.remote_ended and stream.local_ended)
            assert not stream.is_ready or stream in http._sending._ready
            assert stream.is_ready or not stream.queued_bytes or stream.send_window <= 0
        if http.end is None:
            on_their_way = sum(call.taken_bytes - call.granted_bytes for call in calls)
            assert http._receive_window + http._returned_bytes + on_their_way == self.limits.connection_window_bytes
        else:
            assert not streams

    def check_idle(self) -> None:
        """Nothing is left of calls: no bytes held or queued, no stream, and the windows are what they were."""
        http = self.grpc._http
        assert not self.calls
        assert self.held.size_bytes == 0 and self.held.waiting == 0
        assert self.unsent.size_bytes == 0 and http._sending.queued_bytes == 0
        assert not self.grpc._unfinished
        if http.end is None:
            assert not http.streams
            assert http._receive_window + http._returned_bytes == self.limits.connection_window_bytes
        else:
            assert not http.streams and not http._our_resets and not http._receiving.partial_bytes


class Raw:
    """A client of frames as they come, right or wrong."""

    def __init__(self, server: Server | None = None) -> None:
        self.server = server or Server()
        self.encoder = Encoder()
        self.sent_bytes = 0
        self.stream = -1
        self.said = bytearray()
        self.send(frames.PREFACE + frames.settings(()))

    def send(self, data: bytes) -> None:
        self.sent_bytes += len(data)
        self.server.receive(data)
        self.said += self.server.output()

    def block(self, path: str = UNARY, *more: tuple[str, str]) -> bytes:
        return bytes(self.encoder.encode(headers(path, *more)))

    def request(self, path: str = UNARY, *more: tuple[str, str], end: bool = False) -> bytes:
        """The headers of a new stream."""
        self.stream += 2
        return frames.headers(self.stream, self.block(path, *more), end=end)

    def data(self, data: bytes, *, end: bool = False, stream: int | None = None) -> bytes:
        return frames.frame(frames.DATA, frames.END_STREAM if end else 0, stream or self.stream, data)

    def call(self, message: bytes = b"hello", path: str = UNARY, *more: tuple[str, str]) -> bytes:
        return self.request(path, *more) + self.data(framed(message), end=True)

    @property
    def ended(self) -> str:
        """The name of the code with which the server ended the connection."""
        end = self.server.grpc.end
        return "" if end is None else end.code.name


@dataclass
class Answer:
    headers: dict[str, str] = field(default_factory=dict)
    data: bytearray = field(default_factory=bytearray)
    ended: bool = False
    reset: int | None = None

    @property
    def status(self) -> int:
        return int(self.headers.get("grpc-status", -1))


class Client:
    """h2, which keeps every rule, and what it was answered. It opens its windows again as it reads."""

    def __init__(self, server: Server | None = None) -> None:
        self.server = server or Server()
        self.h2 = h2.connection.H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.answers: dict[int, Answer] = {}
        self.goaways: list[int] = []
        self.stream = 0  # of the test's choice
        self.reads = True  # else what it is sent stays unacknowledged
        self.cut: Callable[[bytes], list[bytes]] = lambda data: [data]  # how what it sends is cut

    def open(self, path: str = UNARY, *more: tuple[str, str]) -> int:
        stream: int = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, headers(path, *more))
        self.answers[stream] = Answer()
        return stream

    def call(self, message: bytes = b"hello", path: str = UNARY, *more: tuple[str, str]) -> int:
        stream = self.open(path, *more)
        self.send(stream, framed(message), end=True)
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """As far as windows go, which `exchange` may open."""
        while data:
            room = min(self.h2.local_flow_control_window(stream), self.h2.max_outbound_frame_size)
            if not room:
                before = self.h2.local_flow_control_window(stream)
                self.exchange()
                if self.h2.local_flow_control_window(stream) == before:
                    raise AssertionError("the server does not open the window")
                continue
            piece, data = data[:room], data[room:]
            self.h2.send_data(stream, piece, end_stream=end and not data)

    def exchange(self) -> None:
        """Until neither has anything to say."""
        while True:
            out = self.h2.data_to_send()
            for piece in self.cut(out) if out else ():
                self.server.receive(piece)
            back = self.server.output()
            if not out and not back:
                return
            for event in self.h2.receive_data(back) if back else ():
                self._note(event)

    def _note(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.ConnectionTerminated):
            self.goaways.append(event.last_stream_id or 0)
        stream = getattr(event, "stream_id", None)
        if stream is None or stream not in self.answers:
            return
        answer = self.answers[stream]
        if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
            answer.headers.update(event.headers or ())
        elif isinstance(event, h2.events.DataReceived):
            answer.data += event.data
            if self.reads:
                self.h2.acknowledge_received_data(event.flow_controlled_length, stream)
        elif isinstance(event, h2.events.StreamEnded):
            answer.ended = True
        elif isinstance(event, h2.events.StreamReset):
            answer.reset = int(event.error_code)
