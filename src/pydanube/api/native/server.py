"""The native server: the protocol's session (wire/session.py) with a socket, over TCP or TLS.

    transport ─► Session ─► Connection ─┬─► requests (stream_requests.py), a task each
                                        ├─► produce: parse, append, receipt when it is on disk
                                        └─► flow, ack, nack: at once
    outbox ─► pump, one task per consumer ─► Session ─► transport, as long as the peer takes it

What a peer can cost is bounded (`StreamLimits`): a frame by its announced length, produced bytes that are not on disk
and requests under way by not reading the socket, deliveries by the permits it granted and by what may wait for the
socket. Nothing is read from a peer that does not take its answers. The session drops peers that do not greet, do not
finish a frame, do not take what they asked for, or say nothing at all.

What all peers together produced and is not on disk is bounded too (`log/pressure.py`): whoever produces more is
*held*, that is, not read from. Its acks and pings wait in the socket meanwhile, so that lasts a third of the keepalive
at most; then it is read from again and what it produces is refused (LogBusy), until there is room.

    reading ──too much is not on disk──► held ──a third of the keepalive──► refusing
       ▲                                   │ half of the bound is free         │ it is free
       └───────────────────────────────────┴───────────────────────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Coroutine, Iterator
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Any, Final, Never, cast

from pydanube.api.grpc.data import camel
from pydanube.api.native.handles import Consuming, Producing, Undecided, failed, fits, groups_of, parts_of
from pydanube.api.native.requests import Requests
from pydanube.broker.outbox import Caller, DeliveredBatch, Recalled
from pydanube.broker.service import Broker
from pydanube.broker.volatile_topic import VolatileTopic
from pydanube.config import open_files
from pydanube.config.stream import StreamLimits
from pydanube.errors import (
    ConsumerUnknown,
    DanubeError,
    InvalidBatch,
    LimitReached,
    LogBusy,
    MessageTooLarge,
    NotServed,
    ProducerUnknown,
    ProtocolViolation,
    SubscriptionBusy,
    TooManyConnections,
    Unreachable,
)
from pydanube.formats.batch import Batch, messages, parse, parse_header
from pydanube.ports import Buffer
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import to_wire
from pydanube.wire.session import End, Event, How, Session, Side
from pydanube.wire.status import SEND, Code, status

log = logging.getLogger(__name__)

MIB: Final = 1024 * 1024
# Below this a batch is parsed, or cut, on the loop: a hop to a thread and back costs more.
PARSE_ON_LOOP_BYTES: Final = 64 * 1024
WRITE_BUFFER_BYTES: Final = 1 * MIB
TURN_SETTLED: Final = 1024  # ranges acknowledged or refused, before others have a turn
SWEEP_SECONDS: Final = 2.0
SHUTDOWN_SECONDS: Final = 2.0  # for a TLS peer's goodbye


@lru_cache
def _name() -> str:
    """For people who look at what they are connected to."""
    try:
        return f"PyDanube {version('pydanube')}"
    except PackageNotFoundError:  # run from its sources
        return "PyDanube"


class StreamDoor:
    """Listens, and sweeps out connections that broke a limit of time."""

    def __init__(self, broker: Broker, limits: StreamLimits | None = None) -> None:
        self.broker = broker
        self.limits = limits or broker.config.stream.limits
        self.open_files = open_files.current()
        self.connections: dict[Connection, None] = {}  # by age
        self.closing = False
        self._server: asyncio.Server | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def open(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Returns the port that was bound. Raises OSError."""
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            self.accept,
            host,
            port,
            backlog=1024,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self.limits.handshake_seconds,
            ssl_shutdown_timeout=None if tls is None else SHUTDOWN_SECONDS,
        )
        self.start()
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    def start(self) -> None:
        """As `open`, for connections that come from elsewhere than a socket: they are given to `accept`."""
        self._sweeper = asyncio.create_task(self._sweep(), name="sweep streams")

    def accept(self) -> Connection:
        """The protocol of a new connection."""
        return Connection(self)

    async def close(self, grace_seconds: float) -> None:
        """Takes no more connections, says goodbye to those there are, and lets them end."""
        self.closing = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.say_goodbye("the broker is shutting down")
        deadline = self.broker.clock.elapsed() + grace_seconds
        while self.connections and self.broker.clock.elapsed() < deadline:
            await self.broker.clock.sleep(0.02)
        for connection in list(self.connections):
            connection.abort("the broker has shut down")
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.gather(self._sweeper, return_exceptions=True)

    async def _sweep(self) -> None:
        while True:
            await self.broker.clock.sleep(SWEEP_SECONDS)
            now = self.broker.clock.elapsed()
            for connection in list(self.connections):
                connection.check_time(now)


class Connection(asyncio.Protocol):
    """One peer: its session, the tasks that work for it, and back-pressure."""

    def __init__(self, door: StreamDoor) -> None:
        self.broker = door.broker
        self.limits = door.limits
        self._door = door
        self._elapsed = self.broker.clock.elapsed
        welcome = pb.Welcome(broker_id=self.broker.broker_id, broker=_name())
        self.session: Session[Never] = Session(Side.SERVER, welcome, self._elapsed(), limits=self.limits)
        self._turn: asyncio.Handle | None = None  # when the rest of the events is handled
        self._is_handling = False  # events: what they have to say is written together
        self._carried_out: End | None = None
        self._transport: asyncio.Transport
        self._requests = Requests(self)
        self._tasks: set[asyncio.Task[None]] = set()
        self._writable = asyncio.Event()
        self._writable.set()
        self._reading = True
        self._unwritten_bytes = 0
        self._pressure = self.broker.wal.committer.pressure
        self._held_since: float | None = None  # not read from because of what it, or all, produced
        self._refusing = False
        self._pressed = False  # waits to be called by the pressure
        self._partial_bytes = self._parsing_bytes = 0  # as counted in the pressure
        self._to_parse: deque[tuple[int, Producing, memoryview | Undecided]] = deque()  # those refused in their turn
        self._parsing: asyncio.Task[None] | None = None

    # --- the transport's side -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports have all of its methods and are none of its subclasses.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if self._door.closing:
            self.abort("the broker is shutting down")
        elif len(self._door.connections) >= self.limits.connections:
            self.fail(LimitReached("connections", self.limits.connections))
        elif len(self._door.connections) >= self._door.open_files.native:
            self.fail(TooManyConnections(self._door.open_files.native, self._door.open_files.limit))
        else:
            self._door.connections[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._door.connections.pop(self, None)
        unhandled = self.session.lost("the peer closed the connection")
        self._carried_out = self.session.end
        if self._turn is not None:
            self._turn.cancel()
        for frame in unhandled:  # said while it was there, so these count
            if frame.kind in ("ack", "nack"):
                self._settle(frame)
        self._pressure.forget(self._relieved)
        self._count_partial(0)
        self._pressure.remove(self._parsing_bytes)
        self._parsing_bytes = 0
        self._to_parse.clear()
        self._writable.set()
        for task in list(self._tasks):
            task.cancel()
        self._requests.end()

    def pause_writing(self) -> None:
        self._writable.clear()
        self.session.pause_writing(self._elapsed())
        self._throttle()

    def resume_writing(self) -> None:
        self._writable.set()
        self.session.resume_writing()
        self._throttle()

    def data_received(self, data: bytes) -> None:
        session = self.session
        if session.end is not None:
            return
        events = session.receive(data, self._elapsed())
        if self._turn is None:
            self._handle_some(events)
        partial_bytes = session.partial_bytes
        if partial_bytes != self._partial_bytes and session.end is None:
            self._count_partial(partial_bytes)
            if partial_bytes > PARSE_ON_LOOP_BYTES:  # only a batch is so long
                self._hold()

    def _handle_some(self, events: Iterator[Event[Never]]) -> None:
        """Handles events, in order. After many acks others have their turn first, and nothing is read meanwhile."""
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
        self._throttle()

    def _go_on(self) -> None:
        self._turn = None
        self._handle_some(self.session.events())

    def check_time(self, now: float) -> None:
        """Drops the peer if it broke a limit of time."""
        self._requests.touch()
        if self._held_since is not None and now - self._held_since > self.limits.keepalive_seconds / 3:
            self._held_since, self._refusing = None, True
            self._throttle()
        self.session.tick(now)
        self._flush()

    @property
    def peer(self) -> str:
        return str(self._transport.get_extra_info("peername"))

    def caller(self) -> Caller:
        """Who is at the other end, for whoever asks who is connected."""
        place = self._transport.get_extra_info("peername")
        address = f"{place[0]}:{place[1]}" if isinstance(place, tuple) and len(place) > 1 else ""
        return Caller(address, self.session.client, "native", self.broker.clock.time_us())

    # --- saying things ------------------------------------------------------------------------------

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
        """One clear error, as the answer if it is a request's fault, then the end: nobody can go on after this."""
        self.session.fail(error, request_id)
        self._flush()

    def abort(self, why: str) -> None:
        self.session.drop(Unreachable(self.peer, why))
        self._flush()

    def say_goodbye(self, reason: str) -> None:
        self.session.goodbye(reason)
        self._flush()

    def _flush(self) -> None:
        """Writes what the session has to say, and ends the connection when the session has ended."""
        if self._is_handling:
            return
        session = self.session
        buffers = session.to_send(self._elapsed())
        if buffers:
            self._transport.writelines(buffers)
        if session.end is not None and session.end is not self._carried_out:
            self._carry_out(session.end)

    def _carry_out(self, end: End) -> None:
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
        self._throttle()
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._throttle()

    def _throttle(self) -> None:
        """Stops reading while the peer has asked for more than it may have under way, or does not take its answers."""
        if self.session.end is not None:
            return
        if self._held_since is None and not self._refusing and self._unwritten_bytes > self.limits.unwritten_bytes:
            self._held_since = self._elapsed()
        elif not self._pressed and self._unwritten_bytes <= self.limits.unwritten_bytes:
            self._held_since, self._refusing = None, False
        busy = self._held_since is not None or not self._writable.is_set()
        busy = busy or len(self._tasks) - self._requests.pumps > self.limits.requests or self._turn is not None
        if busy == self._reading:
            self._reading = not busy
            if busy:
                self.session.pause_reading()
                self._transport.pause_reading()
            else:
                self.session.resume_reading(self._elapsed())
                self._transport.resume_reading()

    def _hold(self) -> None:
        """All peers together may have produced too much: then this one waits, as it would add to it."""
        if not (self._pressed or self._refusing or self.session.end is not None) and self._pressure.holds:
            self._pressed = True
            self._held_since = self._held_since or self._elapsed()
            self._pressure.call_when_relieved(self._relieved)
            self._throttle()
            if (
                self._pressure.held == 1
            ):  # the first: those that produce just now would each add a batch before they wait
                for other in self._door.connections:
                    if other._unwritten_bytes:
                        other._hold()

    def _relieved(self) -> None:
        self._pressed = False
        self._throttle()

    def _count_partial(self, partial_bytes: int) -> None:
        self._pressure.partial_bytes += partial_bytes - self._partial_bytes
        self._partial_bytes = partial_bytes

    # --- hearing things -----------------------------------------------------------------------------

    def _handle(self, frame: frames.Frame) -> None:
        kind, command = frame.kind, frame.command
        if kind == "produce":
            self._produce(command.request_id, command.produce.producer, frame.body)
        elif kind == "flow":
            flow = command.flow
            if consuming := self._requests.consumer(flow.consumer):
                consuming.grant(flow.messages, flow.bytes)
        elif kind in ("ack", "nack"):
            self._settle(frame)
        elif kind in ("handed", "returned"):
            self._hear_of_queue(frame)
        else:
            self._requests.take(kind, command)

    def _settle(self, frame: frames.Frame) -> None:
        """An ack or nack. Without a request id nobody is told what became of it."""
        request_id, ack, nack = frame.command.request_id, frame.command.ack, frame.command.nack
        is_ack = frame.kind == "ack"
        handle = ack.consumer if is_ack else nack.consumer
        ranges = frames.ranges_of(ack.ranges if is_ack else nack.ranges)
        consuming = self._requests.consumer(handle)
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

    def _hear_of_queue(self, frame: frames.Frame) -> None:
        """What a consumer's application took, or will not take."""
        request_id, handed, returned = frame.command.request_id, frame.command.handed, frame.command.returned
        is_handed = frame.kind == "handed"
        handle = handed.consumer if is_handed else returned.consumer
        consuming = self._requests.consumer(handle)
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

    # --- producing ----------------------------------------------------------------------------------

    def _produce(self, request_id: int, handle: int, body: memoryview) -> None:
        """Batches of a connection are appended in the order in which they came, small and large."""
        producing = self._requests.producer(handle)
        if producing is None:
            self.answer_error(request_id, ProducerUnknown(handle))
            return
        if self._refusing and (busy := self._why_busy()) is not None:
            self._refuse(request_id, producing, body, busy)
            return
        self._unwritten_bytes += len(body)
        self._throttle()
        if self._parsing is None and len(body) <= PARSE_ON_LOOP_BYTES:
            self._append(request_id, producing, body, None)
        else:
            self._to_parse.append((request_id, producing, body))
            self._parsing_bytes += len(body)
            self._pressure.add(len(body))
            if self._parsing is None:
                self._parsing = self.spawn(self._parse_large())
        self._hold()

    def _why_busy(self) -> LogBusy | None:
        if self._pressure.is_over:
            return LogBusy(self._pressure.queued_bytes, self._pressure.limit_bytes)
        if self._unwritten_bytes > self.limits.unwritten_bytes:
            return LogBusy(self._unwritten_bytes, self.limits.unwritten_bytes)
        return None

    def _refuse(self, request_id: int, producing: Producing, body: memoryview, error: DanubeError) -> None:
        """Without a look at the batch: it is answered in its turn, also behind what is still being parsed."""
        try:
            header = parse_header(body)
            producing.check_room()
        except (InvalidBatch, ProtocolViolation) as violation:
            self.fail(violation, request_id)
            return
        self._pressure.refused += 1
        sequence, rows = header.first_sequence, header.rows
        refused = Undecided(request_id, sequence, rows, 0, failed(error), perf_counter())
        if self._parsing is None:
            self._await_outcome(producing, refused)
        else:
            self._to_parse.append((request_id, producing, refused))

    async def _parse_large(self) -> None:
        try:
            while self._to_parse and self.session.end is None:
                request_id, producing, body = self._to_parse.popleft()
                if isinstance(body, Undecided):
                    self._await_outcome(producing, body)
                    continue
                batch: Batch | None = None
                if len(body) > PARSE_ON_LOOP_BYTES:
                    try:
                        batch = await self.broker.run(lambda body=body: parse(body))  # type: ignore[misc]
                    except InvalidBatch as error:
                        self.fail(error, request_id)
                        return
                self._append(request_id, producing, body, batch)
                self._parsing_bytes -= len(body)
                self._pressure.remove(len(body))
        finally:
            self._parsing = None

    def _append(self, request_id: int, producing: Producing, body: memoryview, batch: Batch | None) -> None:
        outcome: asyncio.Future[Any]
        try:
            batch = batch or parse(body)
            header = batch.header
            producing.check_room()
            producing.check(batch)
            topic = producing.topic
            if topic.reliable:
                outcome = topic.submit_batch(batch, producing.tell)
            else:
                outcome = _fan_out(topic, producing.name, batch)
        except (InvalidBatch, ProtocolViolation) as error:
            self.fail(error, request_id)  # its bytes are not what it says: nothing here can be believed
            return
        except DanubeError as error:
            outcome = failed(error)
        undecided = Undecided(request_id, header.first_sequence, header.rows, len(body), outcome, perf_counter())
        self._await_outcome(producing, undecided)

    def _await_outcome(self, producing: Producing, undecided: Undecided) -> None:
        producing.in_flight.append(undecided)
        if undecided.outcome.done():
            self.answer_decided(producing)
        else:
            undecided.outcome.add_done_callback(lambda _: producing.tell())

    def answer_decided(self, producing: Producing) -> None:
        """Receipts and refusals, in the order of the batches."""
        while (decided := producing.decided()) is not None:
            self._unwritten_bytes -= decided.size_bytes
            outcome = decided.outcome
            error = ProducerUnknown(producing.handle) if outcome.cancelled() else outcome.exception()
            if error is None:
                receipt = producing.receipt(outcome.result(), decided.rows)
                self.answer(pb.Command(request_id=decided.request_id, receipt=receipt))
                producing.topic.metrics.send_latency.observe(perf_counter() - decided.came_at)
                producing.count(decided.rows)
                continue
            code = status(error, SEND).code if isinstance(error, DanubeError) else Code.UNKNOWN
            producing.topic.metrics.send_errors[camel(code)] += 1
            goes_on = producing.refused(decided.first_sequence, error)
            self.answer_error(decided.request_id, error)
            if not goes_on:
                self.session.close(error)
                self._flush()
        self._throttle()

    # --- delivering ---------------------------------------------------------------------------------

    async def pump(self, consuming: Consuming) -> None:
        """Sends what the outbox holds, as fast as the peer takes it."""
        while self.session.end is None:
            items = await consuming.outbox.get()
            if not items:
                self._consumer_ended(consuming)
                return
            for item in items if consuming.is_reliable else consuming.packed(items):
                if isinstance(item, Recalled):
                    ranges = frames.flat(item.ranges)
                    recall = pb.Recall(consumer=consuming.handle, ranges=ranges, seeks=item.seeks, taken=item.taken)
                    self.send(pb.Command(recall=recall))
                    continue
                groups, cost_bytes = groups_of(item)
                if not groups and fits(item.batch, self.session.frame_size_max):
                    await self._deliver(consuming, item)
                    continue
                cutting = partial(parts_of, item, groups, self.session.frame_size_max)
                is_quick = 0 < cost_bytes <= PARSE_ON_LOOP_BYTES and item.batch.header.codec == 0
                try:
                    parts = cutting() if is_quick else await self.broker.run(cutting)
                except MessageTooLarge as error:
                    self._requests.forget(consuming)
                    consuming.subscription.detach(consuming.consumer_id, consuming.outbox)
                    self.send(pb.Command(error=to_wire(error, consumer=consuming.handle)))
                    return
                consuming.account(item, parts)
                for part in parts:
                    await self._deliver(consuming, part)

    async def _deliver(self, consuming: Consuming, item: DeliveredBatch) -> None:
        await self._writable.wait()
        wanted = consuming.wanted(item)
        if wanted is None:
            return
        deliver = pb.Deliver(
            consumer=consuming.handle, ranges=frames.flat(wanted.ranges), attempt=item.attempt, seeks=item.seeks
        )
        self.send(pb.Command(deliver=deliver), *item.batch.buffers)
        consuming.sent(wanted)

    def _consumer_ended(self, consuming: Consuming) -> None:
        ended = consuming.outbox.ended
        if isinstance(ended, NotServed):
            return  # the topic closes: the peer is told when everything of it has ended
        if self._requests.consumer(consuming.handle) is not None:  # else it was the peer who closed it
            self._requests.forget(consuming)
            taken = SubscriptionBusy(consuming.topic.name, consuming.subscription.name, "a newer one of this name")
            self.send(pb.Command(error=to_wire(ended or taken, consumer=consuming.handle)))


def _fan_out(topic: VolatileTopic, producer_name: str, batch: Batch) -> asyncio.Future[None]:
    """A batch to a non-reliable topic, message by message, to whoever is there."""
    topic.publish_batch(
        [
            message if message.producer_name is not None else message._replace(producer_name=producer_name)
            for message in messages(batch)
        ]
    )
    handed_on: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    handed_on.set_result(None)
    return handed_on
