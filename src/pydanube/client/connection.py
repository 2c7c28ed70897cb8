"""One connection to one broker: the protocol's session (wire/session.py) with a socket.

    ask(command) ──► Session ──► broker ──► Session ──► the callback of the request
                                               └──────► Deliver, Moved, Error: the lane that has the handle

A connection ends once, with one error, and is never used again: everything that waited for an answer gets that error,
and every lane is notified. Opening the next connection, and what is sent on it again, is up to the lanes.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import Protocol, TypeAlias, cast

from pydanube.errors import ConfigError, DanubeError, InvalidBatch, NotServed, ProtocolViolation, Unreachable
from pydanube.formats.batch_header import ENVELOPE_VERSION
from pydanube.ports import Buffer
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import from_wire
from pydanube.wire.session import How, Reply, Session, SessionEnd, Side

log = logging.getLogger(__name__)

Answer: TypeAlias = Callable[[frames.Frame | DanubeError], None]


@lru_cache
def _client_name() -> str:
    """For the broker's log."""
    try:
        return f"pydanube {version('pydanube')}"
    except PackageNotFoundError:  # run from its sources
        return "pydanube"


def tls_refusal(url: str, error: ssl.SSLError) -> DanubeError:
    """What is wrong with the TLS between us and a broker. Retrying does not help: the configuration must change."""
    if isinstance(error, ssl.SSLCertVerificationError):
        allowed = f"a broker whose certificate we trust ({error.verify_message}); give its authority with tls="
        return ConfigError("tls", url, allowed)
    reason = error.reason or str(error)
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return ConfigError("url", url, "the broker does not speak TLS on that port; use danube://")
    if "CERTIFICATE_REQUIRED" in reason or "HANDSHAKE_FAILURE" in reason:
        return ConfigError("tls", url, "the broker wants a certificate of ours; give tls= a context with one")
    return ConfigError("tls", url, f"the broker and we cannot agree on TLS ({reason})")


class Attached(Protocol):
    """A producer or consumer of one topic, as its connection knows it. The methods never wait."""

    topic: str

    def ended(self, connection: BrokerConnection, error: DanubeError) -> None:
        """Its handle on `connection` is not valid any more. A NotServed may say which broker has the topic now."""

    def leave(self, connection: BrokerConnection) -> None:
        """The broker is going away; what was asked is still answered."""


class Receiving(Attached, Protocol):
    """A consumer."""

    def delivered(self, ranges: tuple[tuple[int, int], ...], attempt: int, seeks: int, body: memoryview) -> None: ...

    def recalled(self, ranges: tuple[tuple[int, int], ...], seeks: int, taken: int) -> None: ...


class BrokerConnection(asyncio.Protocol):
    """Made by `loop.create_connection`; usable when `welcome` is done."""

    def __init__(self, url: str, token: str = "") -> None:
        loop = asyncio.get_running_loop()
        self.url = url
        self.welcome: asyncio.Future[pb.Welcome] = loop.create_future()
        self.closed: asyncio.Future[None] = loop.create_future()  # the socket is gone
        self.ended: DanubeError | None = None
        self.leaving = False  # the broker said goodbye
        self.producers: dict[int, Attached] = {}
        self.consumers: dict[int, Receiving] = {}
        self._loop = loop
        hello = pb.Hello(client=_client_name(), token=token, envelope_version=ENVELOPE_VERSION)
        self._session: Session[Answer] = Session(Side.CLIENT, hello, loop.time(), peer=url)
        self._transport: asyncio.Transport | None = None
        self._is_handling = False  # events: what they have to say is written together
        self._timer: asyncio.TimerHandle | None = None

    @property
    def usable(self) -> bool:
        return self.ended is None and not self.leaving

    # --- asking -------------------------------------------------------------------------------------

    def say(self, command: pb.Command, *body: Buffer) -> None:
        """Sends a command that expects no reply. Dropped once the connection has ended: the lanes know already."""
        self._session.send(command, *body)
        self._flush()

    def ask(self, command: pb.Command, answer: Answer, *body: Buffer) -> int:
        """Sends a request; `answer` is called once, with the frame or with why there is none. Never waits."""
        if self.ended is not None:
            self._loop.call_soon(answer, self.ended)
            return 0
        number = self._session.ask(command, answer, *body)
        if not self._is_handling:
            self._write()
        return number

    async def request(
        self, command: pb.Command, kind: str, accept: Callable[[frames.Frame], None] | None = None, body: Buffer = b""
    ) -> frames.Frame:
        """The answer, which is of this kind. `accept` sees it before any later frame of the connection is looked at."""
        future: asyncio.Future[frames.Frame] = self._loop.create_future()

        def answered(answer: frames.Frame | DanubeError) -> None:
            if future.done():  # cancelled in this turn of the loop
                if not isinstance(answer, DanubeError):
                    self._session.discard(answer)
                    self._flush()
            elif isinstance(answer, DanubeError):
                future.set_exception(answer)
            elif answer.kind != kind:
                violation = ProtocolViolation(f"the answer is {answer.kind}, not {kind}")
                future.set_exception(violation)
                self.end(violation)
            else:
                if accept is not None:
                    accept(answer)
                future.set_result(answer)

        number = self.ask(command, answered, *([body] if body else []))
        try:
            return await future
        finally:
            self._session.forget(number)
            self._flush()

    # --- ending -------------------------------------------------------------------------------------

    def end(self, error: DanubeError) -> None:
        """Ends every request that waits, and every lane, with `error`. Once."""
        self._session.drop(error)
        self._write()

    def close(self) -> None:
        """Says goodbye: the application is done with the broker."""
        self._session.goodbye()
        self._session.close(Unreachable(self.url, "the client closed the connection"))
        self._write()

    def _flush(self) -> None:
        """Writes what the session has to say, after the last event of a read."""
        if not self._is_handling:
            self._write()

    def _write(self) -> None:
        """Writes what the session has to say, and ends the connection when the session has ended."""
        session = self._session
        if self._transport is not None:
            buffers = session.to_send(self._loop.time())
            if buffers:
                self._transport.writelines(buffers)
        if session.end is not None and self.ended is None:
            self._carry_out(session.end)

    def _carry_out(self, end: SessionEnd) -> None:
        assert isinstance(end.error, DanubeError)
        error = self.ended = end.error
        if end.how is How.FAILED:
            log.error("broker sent nonsense", extra={"broker": self.url, "why": str(error)})
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            if end.how is How.LEFT:
                self._transport.close()
            else:
                self._transport.abort()
        if not self.welcome.done():
            self.welcome.set_exception(error)
            self.welcome.exception()  # the caller that dialed may have given up
        waiting = self._session.take_waiting()
        lanes: list[Attached] = [*self.producers.values(), *self.consumers.values()]
        self.producers.clear()
        self.consumers.clear()
        for lane in lanes:  # first, so that a batch without an answer is known to be sent again
            lane.ended(self, error)
        for answer in waiting:
            answer(error)

    # --- the transport's side -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not of asyncio's classes
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        why = str(exc) if exc else "the broker closed the connection"
        self._session.lost(tls_refusal(self.url, exc) if isinstance(exc, ssl.SSLError) else why)
        self._flush()
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        session = self._session
        if session.end is not None:
            return
        self._is_handling = True
        try:
            for event in session.receive(data, self._loop.time()):
                if type(event) is Reply:
                    event.waiter(event.answer)
                else:
                    self._handle(cast(frames.Frame, event))
        except (ProtocolViolation, InvalidBatch) as error:
            session.fail(error)
        finally:
            self._is_handling = False
        self._write()

    def _handle(self, frame: frames.Frame) -> None:
        kind, command = frame.kind, frame.command
        if kind == "deliver":
            deliver = command.deliver
            consumer = self.consumers.get(deliver.consumer)
            if consumer is not None:  # it may have been closed a moment ago
                consumer.delivered(frames.ranges_of(deliver.ranges), deliver.attempt, deliver.seeks, frame.body)
        elif kind == "recall":
            recall = command.recall
            consumer = self.consumers.get(recall.consumer)
            if consumer is not None:
                consumer.recalled(frames.ranges_of(recall.ranges), recall.seeks, recall.taken)
        elif kind == "welcome":
            self.welcome.set_result(command.welcome)
            self._watch()
        elif kind == "error":
            self._handle_ended(command.error)
        elif kind == "moved":
            self._moved(command.moved)
        elif kind == "goodbye":
            self.leaving = True
            for lane in [*self.producers.values(), *self.consumers.values()]:
                lane.leave(self)

    def _handle_ended(self, error: pb.Error) -> None:
        """The broker has ended one handle."""
        lane: Attached | None
        if error.producer:
            lane = self.producers.pop(error.producer, None)
        else:
            lane = self.consumers.pop(error.consumer, None)
        if lane is not None:
            lane.ended(self, from_wire(error))

    def _moved(self, moved: pb.Moved) -> None:
        error = NotServed(moved.topic, f"it moved to {moved.stream_url or 'another broker'}", moved.stream_url)
        for handles in (self.producers, self.consumers):
            lanes: list[tuple[int, Attached]] = [
                (handle, lane) for handle, lane in handles.items() if lane.topic == moved.topic
            ]
            for handle, lane in lanes:
                del handles[handle]
                lane.ended(self, error)

    def _watch(self) -> None:
        """Calls the session when it is due."""
        due = self._session.due()
        if due is not None:
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now, due = self._loop.time(), self._session.due()
        self._session.tick(now if due is None else max(now, due))  # a timer may be a little early
        self._flush()
        self._watch()
