"""One native connection: the protocol's session (wire/session.py) with a socket, and the tasks that work for its peer.

What a peer can cost is bounded (`StreamLimits`): a frame by its announced length, produced bytes that are not on disk
(intake.py) and requests under way by not reading the socket, deliveries by the permits it granted and by what may wait
for the socket. Nothing is read from a peer that does not take its answers. The session drops peers that do not greet,
do not finish a frame, do not take what they asked for, or say nothing at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Final, Never, cast

from pydanube.api.native.handle_table import HandleTable
from pydanube.api.native.handles import ConsumerHandle
from pydanube.api.native.intake import BatchIntake
from pydanube.api.native.pump import Pump
from pydanube.api.native.requests import NativeRequests
from pydanube.broker.outbox import Caller
from pydanube.errors import (
    ConsumerUnknown,
    DanubeError,
    LimitReached,
    ProtocolViolation,
    TooManyConnections,
    Unreachable,
)
from pydanube.ports import Buffer
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import to_wire
from pydanube.wire.session import Event, How, Session, SessionEnd, Side

if TYPE_CHECKING:
    from pydanube.api.native.server import NativeServer

log = logging.getLogger("pydanube.api.native.server")  # one name for all lines about native connections

WRITE_BUFFER_BYTES: Final = 1024 * 1024
TURN_SETTLED: Final = 1024  # ranges acknowledged or refused, before others have a turn


@lru_cache
def _name() -> str:
    """For people who look at what they are connected to."""
    try:
        return f"PyDanube {version('pydanube')}"
    except PackageNotFoundError:  # run from its sources
        return "PyDanube"


class NativeConnection(asyncio.Protocol):
    """One peer: its session, the tasks that work for it, and back-pressure."""

    def __init__(self, server: NativeServer) -> None:
        self.broker = server.broker
        self.limits = server.limits
        self._server = server
        self.elapsed = self.broker.clock.elapsed
        welcome = pb.Welcome(broker_id=self.broker.broker_id, broker=_name(), notes_orders=True)
        self.session: Session[Never] = Session(Side.SERVER, welcome, self.elapsed(), limits=self.limits)
        self._turn: asyncio.Handle | None = None  # when the rest of the events is handled
        self._is_handling = False  # events: what they have to say is written together
        self._carried_out: SessionEnd | None = None
        self._transport: asyncio.Transport
        self._handles = HandleTable(self)
        self._requests = NativeRequests(self, self._handles, server.operations)
        self.intake = BatchIntake(self, self._handles, server.connections)
        self._tasks: set[asyncio.Task[None]] = set()
        self.writable = asyncio.Event()
        self.writable.set()
        self._reading = True

    # --- the transport's side -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have all of its methods and are none of its subclasses.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if self._server.closing:
            self.abort("the broker is shutting down")
        elif len(self._server.connections) >= self.limits.connections:
            self.fail(LimitReached("connections", self.limits.connections))
        elif len(self._server.connections) >= self._server.open_files.native:
            self.fail(TooManyConnections(self._server.open_files.native, self._server.open_files.limit))
        else:
            self._server.connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.pop(self, None)
        unhandled = self.session.lost("the peer closed the connection")
        self._carried_out = self.session.end
        if self._turn is not None:
            self._turn.cancel()
        for frame in unhandled:  # said while it was there, so these count
            if frame.kind in ("ack", "nack"):
                self._settle(frame)
        self.intake.end()
        self.writable.set()
        for task in list(self._tasks):
            task.cancel()
        self._handles.end()

    def pause_writing(self) -> None:
        self.writable.clear()
        self.session.pause_writing(self.elapsed())
        self.throttle()

    def resume_writing(self) -> None:
        self.writable.set()
        self.session.resume_writing()
        self.throttle()

    def data_received(self, data: bytes) -> None:
        session = self.session
        if session.end is not None:
            return
        events = session.receive(data, self.elapsed())
        if self._turn is None:
            self._handle_some(events)
        if session.end is None:
            self.intake.received(session.partial_bytes)

    def _handle_some(self, events: Iterator[Event[Never]]) -> None:
        """Handles events, in order. After many acks it yields to other connections, and reads nothing until then."""
        settled = 0
        self._is_handling = True
        try:
            for frame in cast(Iterator[frames.Frame], events):  # a server asks nothing, so it gets no replies
                if frame.kind in ("ack", "nack"):
                    settled += (len(frame.command.ack.ranges) + len(frame.command.nack.ranges)) // 2
                self._handle(frame)
                if settled >= TURN_SETTLED and self.session.has_events:
                    self._turn = asyncio.get_running_loop().call_soon(self._go_on)
                    break
        except ProtocolViolation as violation:
            self.session.fail(violation)
        except Exception as error:
            log.exception("stream broken", extra={"peer": self.peer})
            self.session.fail(error)
        finally:
            self._is_handling = False
        self._flush()
        self.throttle()

    def _go_on(self) -> None:
        self._turn = None
        self._handle_some(self.session.events())

    def check_time(self, now: float) -> None:
        """Drops the peer if it broke a limit of time."""
        self._handles.touch()
        self.intake.check_time(now)
        self.session.tick(now)
        self._flush()

    @property
    def peer(self) -> str:
        return str(self._transport.get_extra_info("peername"))

    def caller(self) -> Caller:
        """The peer, as lists of connections show it."""
        place = self._transport.get_extra_info("peername")
        address = f"{place[0]}:{place[1]}" if isinstance(place, tuple) and len(place) > 1 else ""
        return Caller(address, self.session.client, "native", self.broker.clock.time_us())

    # --- sending ------------------------------------------------------------------------------------

    def send(self, command: pb.Command, *body: Buffer) -> None:
        """What the peer did not ask for."""
        self.session.send(command, *body)
        self._flush()

    def answer(self, command: pb.Command, *body: Buffer) -> None:
        """The one reply to a request of the peer."""
        self.session.reply(command, *body)
        self._flush()

    def answer_error(self, request_id: int, error: BaseException) -> None:
        self.answer(pb.Command(request_id=request_id, error=to_wire(error)))

    def fail(self, error: BaseException, request_id: int = 0) -> None:
        """One clear error, as the answer if it is a request's fault, then the end: the connection cannot continue."""
        self.session.fail(error, request_id)
        self._flush()

    def close(self, error: BaseException) -> None:
        """Ends in order: what is queued is still written."""
        self.session.close(error)
        self._flush()

    def abort(self, why: str) -> None:
        self.session.drop(Unreachable(self.peer, why))
        self._flush()

    def send_goodbye(self, reason: str) -> None:
        self.session.goodbye(reason)
        self._flush()

    def _flush(self) -> None:
        """Writes what the session has to say, and ends the connection when the session has ended."""
        if self._is_handling:
            return
        session = self.session
        buffers = session.to_send(self.elapsed())
        if buffers:
            self._transport.writelines(buffers)
        if session.end is not None and session.end is not self._carried_out:
            self._carry_out(session.end)

    def _carry_out(self, end: SessionEnd) -> None:
        self._carried_out = end
        if end.how is How.DROPPED:
            why = end.error.why if isinstance(end.error, Unreachable) else str(end.error)
            log.info("stream dropped", extra={"peer": self.peer, "why": why})
            self._transport.abort()
            return
        if end.how is How.FAILED:
            log.info("stream failed", extra={"peer": self.peer, "why": str(end.error)})
        self._transport.close()

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that ends with the connection."""
        task = asyncio.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        self.throttle()
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self.throttle()

    def pump(self, consuming: ConsumerHandle) -> Pump:
        """What sends the deliveries of a consumer of this connection."""
        return Pump(self, self._handles, consuming)

    def throttle(self) -> None:
        """Stops reading while the peer has asked for more than it may have under way, or does not take its answers."""
        if self.session.end is not None:
            return
        busy = self.intake.is_held() or not self.writable.is_set()
        busy = busy or len(self._tasks) - self._requests.pumps > self.limits.requests or self._turn is not None
        if busy == self._reading:
            self._reading = not busy
            if busy:
                self.session.pause_reading()
                self._transport.pause_reading()
            else:
                self.session.resume_reading(self.elapsed())
                self._transport.resume_reading()

    # --- receiving ----------------------------------------------------------------------------------

    def _handle(self, frame: frames.Frame) -> None:
        kind, command = frame.kind, frame.command
        if kind == "produce":
            self.intake.produce(command.request_id, command.produce.producer, frame.body)
        elif kind == "flow":
            flow = command.flow
            if consuming := self._handles.consumer(flow.consumer):
                consuming.grant(flow.messages, flow.bytes)
        elif kind in ("ack", "nack"):
            self._settle(frame)
        elif kind in ("handed", "returned"):
            self._note_queue(frame)
        else:
            self._requests.take(kind, command, frame.body)

    def _settle(self, frame: frames.Frame) -> None:
        """An ack or nack. Without a request id there is no answer."""
        request_id, ack, nack = frame.command.request_id, frame.command.ack, frame.command.nack
        is_ack = frame.kind == "ack"
        handle = ack.consumer if is_ack else nack.consumer
        ranges = frames.ranges_of(ack.ranges if is_ack else nack.ranges)
        consuming = self._handles.consumer(handle)
        try:
            if consuming is None:
                raise ConsumerUnknown(handle)
            if is_ack:
                consuming.ack(ranges, ack.seeks if ack.HasField("seeks") else None)
            else:
                delivered_at = nack.seeks if nack.HasField("seeks") else None
                consuming.nack(ranges, nack.delay_ms / 1000, nack.reason, delivered_at)
        except DanubeError as error:
            if request_id:
                self.answer_error(request_id, error)
        else:
            if request_id:
                self.answer(pb.Command(request_id=request_id, done=pb.Done()))

    def _note_queue(self, frame: frames.Frame) -> None:
        """What a consumer's application took, or will not take."""
        request_id, handed, returned = frame.command.request_id, frame.command.handed, frame.command.returned
        is_handed = frame.kind == "handed"
        handle = handed.consumer if is_handed else returned.consumer
        consuming = self._handles.consumer(handle)
        try:
            if consuming is None:
                raise ConsumerUnknown(handle)
            if is_handed:
                consuming.handed(frames.ranges_of(handed.ranges), handed.seeks, handed.extend_ms / 1000)
            else:
                ranges = frames.ranges_of(returned.ranges) if returned.ranges else ()
                consuming.returned(ranges, returned.seeks, stop=returned.stop, taken=returned.taken)
        except DanubeError as error:
            if isinstance(error, ProtocolViolation):
                raise
            if request_id:
                self.answer_error(request_id, error)
        else:
            if request_id:
                self.answer(pb.Command(request_id=request_id, done=pb.Done()))
