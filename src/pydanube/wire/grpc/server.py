"""The server's side of one gRPC connection, sans-I/O: bytes in, calls out, and the answers to them as bytes.

    unary      headers ─► data … end ─► Called(message) ─► answer | finish
    streamed   headers ─► Called(None) ─► MessageReceived … ─► start, write …, finish
    wrong      ─► CallRefused ─► finish                       left ─► Cancelled, at any time

What a peer may have on its way is bounded three times: by its stream's window until its message's length is known (a
larger message is granted what it needs, when all connections together have room), by its connection's window, which
opens again when calls are answered, and by the sum of all connections (`Held`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final

from pydanube.wire.grpc.calls import (
    Called,
    CallEvent,
    CallRefused,
    Cancelled,
    Held,
    MessageReceived,
    ServerCall,
    ServerMethod,
    Share,
)
from pydanube.wire.grpc.headers import (
    FIRST,
    NOT_GRPC,
    NOT_GRPC_SENTENCE,
    OK_TRAILERS,
    call_headers,
    first_headers,
    trailers,
)
from pydanube.wire.grpc.messages import Incoming, MessageRefused, framed
from pydanube.wire.http2.connection import Http2Connection
from pydanube.wire.http2.frames import ErrorCode
from pydanube.wire.http2.sending import Unsent
from pydanube.wire.http2.values import (
    DataReceived,
    Event,
    Http2Error,
    Http2Limits,
    Http2Stream,
    StreamOpened,
    StreamReset,
)
from pydanube.wire.status import Code

NO_SUCH = ServerMethod("", None, False, 0, lambda size, limit: "")


def _nothing() -> None:
    pass


NO_METHOD: Final = "Method not found!"  # the words of every gRPC server: clients look for them


class GrpcServerConnection:
    """One peer. `find` gives the method of a path, or None."""

    def __init__(
        self,
        find: Callable[[str], ServerMethod | None],
        held: Held,
        unsent: Unsent,
        limits: Http2Limits,
        now: float,
        on_output: Callable[[], None] | None = None,
    ) -> None:
        self._http = Http2Connection(limits, unsent, now)
        self._find = find
        self._held = held
        self._share = Share()
        self._stream_window = limits.stream_window_bytes
        self._unfinished: OrderedDict[Http2Stream, None] = OrderedDict()  # requests that have begun, the oldest first
        self._on_output = on_output or _nothing  # there is room for a large message: something is to be sent
        self._short: list[ServerCall] = []  # whose message is larger than what its stream may send
        self._now = now

    @property
    def end(self) -> Http2Error | None:
        return self._http.end

    @property
    def calls(self) -> int:
        """Open streams, of calls and of what is not gRPC."""
        return len(self._http.streams)

    # --- receiving --------------------------------------------------------------------------------------

    def receive(self, data: bytes, now: float) -> list[CallEvent]:
        self._now = now
        return self._calls_of(self._http.receive(data, now))

    def tick(self, now: float) -> list[CallEvent]:
        """Limits of time: of the connection, and of requests that do not end."""
        self._now = now
        found = self._calls_of(self._http.tick(now))
        seconds = self._held.limits.request_seconds
        while self._unfinished:
            stream = next(iter(self._unfinished))
            if now - stream.opened_at <= seconds:
                break
            if stream.call is None:
                del self._unfinished[stream]
                self._http.reset(stream, ErrorCode.CANCEL)
                continue
            why = f"the request was not complete within {seconds:g} s"
            self._refuse(found, stream.call, Code.DEADLINE_EXCEEDED, why)
        return found

    def lose(self) -> list[CallEvent]:
        """The transport is gone. No reference leads back to it from here."""
        self._on_output = _nothing
        return self._calls_of(self._http.lose())

    def leave(self, now: float) -> None:
        self._http.leave(now)

    def _calls_of(self, events: list[Event]) -> list[CallEvent]:
        found: list[CallEvent] = []
        for event in events:
            if type(event) is DataReceived:
                call: ServerCall | None = event.stream.call
                if call is not None:
                    self._received(found, call, event.data, event.ended)
                else:
                    self._http.give_back(len(event.data), event.stream)
                    if event.ended:
                        self._unfinished.pop(event.stream, None)
                        self._say_not_grpc(event.stream)
            elif type(event) is StreamOpened:
                self._opened(found, event)
            elif type(event) is StreamReset:
                self._unfinished.pop(event.stream, None)
                if event.stream.call is not None:
                    self._over(event.stream.call)
                    found.append(Cancelled(event.stream.call))
        if self._short:
            self._ask_for_room()
        return found

    def _ask_for_room(self) -> None:
        """For messages that their streams' windows are too small for, when all that has come was looked at."""
        short, self._short = self._short, []
        for call in short:
            incoming, stream = call.incoming, call.stream
            if incoming is not None and not call.asked and not stream.remote_ended:
                missing = incoming.missing - max(stream.receive_window, 0)
                if missing > 0:
                    call.asked = True
                    self._held.ask(call, missing, self._grant)

    def _opened(self, found: list[CallEvent], event: StreamOpened) -> None:
        stream = event.stream
        if stream.local_ended:
            return  # it was reset by a later frame of the same bytes
        headers = call_headers(event.headers)
        if not headers.path:
            if event.ended:
                self._say_not_grpc(stream)
            else:
                self._unfinished[stream] = None
            return
        method = self._find(headers.path)
        call = stream.call = ServerCall(stream, headers, method or NO_SUCH, self._share)
        self._held.hold(call, self._held.limits.call_bytes)
        if method is None:
            self._refuse(found, call, Code.UNIMPLEMENTED, NO_METHOD)
        elif headers.wrong:
            self._refuse(found, call, headers.code, headers.wrong)
        elif self._held.is_full:
            self._refuse_full(found, call)
        else:
            call.incoming = Incoming(method.size_max_bytes, headers.encoding)
            self._unfinished[stream] = None
            if method.streams_requests:
                found.append(Called(call, None))
            if event.ended:
                self._received(found, call, b"", True)

    def _say_not_grpc(self, stream: Http2Stream) -> None:
        self._http.start(stream, NOT_GRPC)
        self._http.write(stream, NOT_GRPC_SENTENCE)
        self._http.finish(stream, b"")

    def _received(self, found: list[CallEvent], call: ServerCall, data: bytes, ended: bool) -> None:
        size = len(data)
        incoming = call.incoming
        if incoming is None:  # refused, or more than one message: what still comes is dropped
            self._http.give_back(size)
            return
        self._count(call, size)
        try:
            messages = incoming.feed(data) if size else []
        except MessageRefused as refused:
            if refused.size_bytes:
                sentence = call.method.too_large(refused.size_bytes, call.method.size_max_bytes)
                self._refuse(found, call, Code.INVALID_ARGUMENT, sentence)
            else:
                self._refuse(found, call, Code.INTERNAL, refused.sentence)
            return
        is_inflated = bool(messages) and call.headers.encoding != "identity"
        if is_inflated:
            self._held.hold(call, sum(map(len, messages)))  # what has come says nothing of what it became
        if self._held.is_full and (is_inflated or not ended):
            self._refuse_full(found, call)
            return
        if call.method.streams_requests:
            for message in messages:
                found.append(MessageReceived(call, message))
        else:
            if len(messages) + (call.request is not None) > 1:
                self._refuse(found, call, Code.INTERNAL, "a unary call has one message")
                return
            if messages:
                call.request = messages[0]
        if ended:
            self._request_ended(found, call, incoming)
        elif incoming.missing > call.stream.receive_window and not call.asked:
            self._short.append(call)

    def _request_ended(self, found: list[CallEvent], call: ServerCall, incoming: Incoming) -> None:
        if not incoming.is_between:
            self._refuse(found, call, Code.INTERNAL, "the request ends inside a message")
            return
        call.incoming = None
        self._unfinished.pop(call.stream, None)
        if call.method.streams_requests:
            found.append(MessageReceived(call, None))
        elif call.request is None:
            self._refuse(found, call, Code.INTERNAL, "the request has no message")
        else:
            message, call.request = call.request, None
            found.append(Called(call, message))

    def _count(self, call: ServerCall, size: int) -> None:
        """Data that was granted is held already, and the connection's window was opened for it."""
        granted = min(size, call.granted_bytes)
        call.granted_bytes -= granted
        call.taken_bytes += size - granted
        if size > granted:
            self._held.hold(call, size - granted)

    def _grant(self, call: ServerCall, size: int) -> bool:
        if call.incoming is None or call.stream.remote_ended:
            return False
        self._http.grant(call.stream, size)
        self._on_output()
        return True

    def done_with(self, call: ServerCall) -> None:
        """What has come of a stream of requests was taken: its window opens again."""
        if not call.is_open:
            return
        call.asked = False
        self._held.release(call)
        self._held.hold(call, self._held.limits.call_bytes)
        self._held.promise(call, call.granted_bytes)
        taken, call.taken_bytes = call.taken_bytes, 0
        self._http.give_back(taken)
        self._http.reopen(call.stream, self._stream_window)

    def begin_answers(self, call: ServerCall) -> None:
        """The request of a stream of answers is done with: the stream may go on for ever, its request is small."""
        self._held.release(call)
        taken, call.taken_bytes = call.taken_bytes, 0
        self._http.give_back(taken)

    # --- answering --------------------------------------------------------------------------------------

    def answer(self, call: ServerCall, message: bytes) -> None:
        """The whole answer of a unary call."""
        if call.is_open:
            if call.started:
                self._http.write(call.stream, framed(message))
                self._http.finish(call.stream, OK_TRAILERS)
            else:
                self._http.respond(call.stream, FIRST, framed(message), OK_TRAILERS)
            self._over(call)

    def start(self, call: ServerCall, metadata: Iterable[tuple[str, str | bytes]] = ()) -> None:
        if call.is_open and not call.started:
            call.started = True
            self._http.start(call.stream, first_headers(metadata) if metadata else FIRST)

    def write(self, call: ServerCall, message: bytes) -> None:
        if call.is_open:
            if not call.started:
                self.start(call)
            self._http.write(call.stream, framed(message))

    def has_room(self, call: ServerCall) -> bool:
        return not call.is_open or self._http.has_room(call.stream)

    def finish(
        self, call: ServerCall, code: Code, sentence: str = "", metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> None:
        """The status. Whatever the client still sends is not looked at."""
        if call.is_open:
            last = trailers(code, sentence, metadata)
            self._http.finish(call.stream, last if call.started else FIRST + last)
            self._over(call)

    def data_to_send(self) -> bytes:
        return self._http.data_to_send()

    def take_roomy(self) -> list[Http2Stream]:
        return self._http.take_roomy()

    def _refuse(self, found: list[CallEvent], call: ServerCall, code: Code, sentence: str) -> None:
        if call.incoming is not None:
            call.incoming.close()
            call.incoming = None
        self._unfinished.pop(call.stream, None)
        call.request = None
        found.append(CallRefused(call, code, sentence))

    def _refuse_full(self, found: list[CallEvent], call: ServerCall) -> None:
        self._refuse(found, call, Code.RESOURCE_EXHAUSTED, "the broker is receiving too much at once: try again")

    def _over(self, call: ServerCall) -> None:
        """Ends what the call holds. Its windows open again for others."""
        if not call.is_open:
            return
        call.is_open = False
        call.incoming = call.request = None
        self._unfinished.pop(call.stream, None)
        self._held.release(call)
        open_again = call.taken_bytes - call.granted_bytes
        call.taken_bytes = call.granted_bytes = 0
        if open_again:
            self._http.give_back(open_again)
