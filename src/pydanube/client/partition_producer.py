"""One topic's producer as a lane: it puts messages into the open batch, and carries out what its machine decides.

    append ─► OpenBatch ─┐                                   ┌─► encode, here or in another thread
    answers, timers ─────┴─► core/producing ─► effects ──────┼─► connection.ask(Produce) ─► answers
    lost, opened ────────┘                                   └─► receipts and errors for those who wait

When a batch is cut and sent, and what every answer means, is decided in `core/producing/machine.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Final, assert_never

from pydanube.client.brokers import Brokers
from pydanube.client.connection import BrokerConnection
from pydanube.client.messages import DURABILITIES, Receipt
from pydanube.client.open_batch import OpenBatch, ProducerSettings, Times
from pydanube.client.partition_handle import PartitionHandle
from pydanube.core.producing.machine import ProducerMachine
from pydanube.core.producing.values import (
    AwaitTurn,
    Effect,
    Encode,
    Event,
    Expire,
    Fail,
    FlushRequested,
    GiveUp,
    HandleLost,
    Leaving,
    NotEncoded,
    NoteNumbered,
    Opened,
    OpeningBegan,
    Overflowed,
    Pause,
    ProducerEnded,
    Reopen,
    Resolve,
    Resumed,
    SendParcel,
    SessionLost,
    SetTimer,
    TellLate,
    TimerFired,
    TurnCame,
)
from pydanube.errors import DanubeError, DeadlineExceeded, InvalidBatch, Refused, SessionUnknown, Unavailable
from pydanube.formats.batch import Batch, renumber
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

log = logging.getLogger(__name__)

PRODUCE_OVERHEAD_BYTES: Final = 64  # lengths and command in front of a batch
ENCODE_ON_LOOP_BYTES: Final = 1024 * 1024
COMPRESS_ON_LOOP_BYTES: Final = 128 * 1024


class PartitionProducer(PartitionHandle):
    """Sends to one topic, or to one partition. `released` is called with the bytes that leave the buffer."""

    what = "producer"

    def __init__(
        self, brokers: Brokers, topic: str, settings: ProducerSettings, released: Callable[[int], None]
    ) -> None:
        super().__init__(brokers, topic)
        self.message_size_max = 0
        self._settings = settings
        self._released = released
        self._loop = asyncio.get_running_loop()
        self._time_ns = brokers.connector.time_ns
        self._machine = ProducerMachine(OpenBatch, settings)
        self._seen_epoch = 0  # the highest of an owner that has opened this producer
        self._produce = pb.Command()  # what goes in front of every batch; the connection numbers it
        self._schema: tuple[int, int] | None = None  # id and version, as the broker said
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._lost_error: DanubeError | None = None  # of a message whose receipt is not awaited: `flush` raises it

    # --- for the producer ---------------------------------------------------------------------------

    def append(
        self,
        payload: bytes,
        key: str | None,
        attributes: Mapping[str, str] | None,
        size: int,
        waiter: asyncio.Future[Receipt] | None,
        own_deadline: bool = False,
        times: Times | None = None,
    ) -> None:
        """Never waits. Raises why the lane has failed. A waiter with a deadline of its own ignores the lane's."""
        if times is not None:
            self._check_times()
        batch = self._machine.open
        if batch.size + size > batch.size_max:
            batch = self._next_batch()
        row = batch.rows
        batch.payloads.append(payload)
        batch.times.append(self._time_ns() // 1000)
        if batch.keys is not None:
            batch.keys.append(key)
        elif key is not None:
            batch.keys = [*[None] * row, key]
        if batch.attributes is not None:
            batch.attributes.append(attributes)
        elif attributes:
            batch.attributes = [*[None] * row, attributes]
        if batch.more is not None:
            batch.more.append(times)
        elif times is not None:
            batch.more = [*[None] * row, times]
        if waiter is not None:
            batch.waiters.append((row, waiter, own_deadline))
        batch.size += size
        batch.rows = row + 1
        if row == 0 or row + 1 >= batch.rows_max:
            self._carry_out(self._machine.appended(self._loop.time()))

    def _check_times(self) -> None:
        """A broker that does not know these columns would take the batch for a broken one."""
        connection = self.connection
        if connection is not None and connection.welcome.done() and connection.welcome.result().envelope_version < 2:
            raise Refused(f"the broker of {self.topic} is too old for event_time, deliver_at and deliver_after")

    def _next_batch(self) -> OpenBatch:
        if self._machine.end is not None:
            raise copy(self._machine.end)  # the shared one would collect the traceback of every call
        self._feed(Overflowed())
        return self._machine.open

    async def flush(self) -> None:
        """Returns when everything appended before has been answered."""
        waiting = []
        for batch in self._machine.outstanding:
            batch.done = batch.done or self._loop.create_future()
            waiting.append(batch.done)
        if waiting:
            self._feed(FlushRequested())
            await asyncio.wait(waiting)

    def raise_lost(self) -> None:
        """Raises, once, why a message was lost whose receipt is not awaited."""
        error, self._lost_error = self._lost_error, None
        if error is not None:
            raise error

    async def close(self) -> None:
        """Tells the broker that no more comes. What is not flushed is gone."""
        if self.connection is not None and self.connection.usable:
            close = pb.Command(close_producer=pb.CloseProducer(producer=self.handle))
            self.connection.producers.pop(self.handle, None)
            await self.connection.request(close, "done")

    def abandon(self, error: DanubeError) -> None:
        """Everything that has no receipt has failed. A receipt that still comes is ignored."""
        self._feed(ProducerEnded(error))
        while self._timers:
            self._timers.popitem()[1].cancel()

    # --- the machine --------------------------------------------------------------------------------

    def _feed(self, event: Event[OpenBatch]) -> None:
        self._carry_out(self._machine.step(event, self._loop.time()))

    def _carry_out(self, effects: list[Effect[OpenBatch]]) -> None:
        for effect in effects:
            match effect:
                case SendParcel(batch, generation):
                    self._send(batch, generation)
                case Resolve(batch, receipt):
                    self._resolve(batch, receipt)
                case Encode(batch):
                    self._start_encoding(batch)
                case AwaitTurn():
                    self._loop.call_soon(self._feed, TurnCame())
                case Fail(batch, error):
                    batch.tell(error, all_of_them=True)
                    if len(batch.waiters) < batch.rows:
                        self._lost_error = self._lost_error or copy(error)
                    self._released(batch.size)
                    batch.finish()
                case TellLate(batch):
                    batch.tell(self._late())
                case Expire(batch):
                    self._released(batch.expire(self._late()))
                    if not batch.rows:
                        batch.finish()
                case SetTimer(at):
                    self._set_timer("wake", at, TimerFired())
                case Pause(error):
                    self._last_error = error  # the reason that a deadline then names
                    self._set_timer("pause", self._loop.time() + self._backoff.seconds(), Resumed())
                case NoteNumbered(expected):
                    log.warning("batches numbered anew", extra={"topic": self.topic, "expected": expected})
                case Reopen(error):
                    self._reopen(error)
                case GiveUp(error):
                    self._give_up(error)
                case _:
                    assert_never(effect)

    def _set_timer(self, name: str, at: float, event: Event[OpenBatch]) -> None:
        if name in self._timers:
            self._timers[name].cancel()
        self._timers[name] = self._loop.call_at(at, self._on_timer, name, at, event)

    def _on_timer(self, name: str, at: float, event: Event[OpenBatch]) -> None:
        del self._timers[name]
        self._carry_out(self._machine.step(event, max(self._loop.time(), at)))  # a timer may be a little early

    def _late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"sending to {self.topic}", self._settings.timeout, str(self._last_error or ""))

    # --- sending ------------------------------------------------------------------------------------

    def _start_encoding(self, batch: OpenBatch) -> None:
        limit = ENCODE_ON_LOOP_BYTES if self._settings.compression == "none" else COMPRESS_ON_LOOP_BYTES
        if batch.size > limit:
            encoding = self._brokers.connector.run(partial(self._encode, batch))
            encoding.add_done_callback(partial(self._on_encoded, batch))
            return
        try:
            encoded = self._encode(batch)
        except InvalidBatch as error:
            self._feed(NotEncoded(batch, error))
        else:
            self._take(batch, encoded)

    def _encode(self, batch: OpenBatch) -> Batch:
        machine = self._machine
        numbers = machine.producer_id, machine.session, machine.next_sequence
        return batch.encode(self.topic, self._settings, *numbers, schema=self._schema)

    def _on_encoded(self, batch: OpenBatch, encoding: asyncio.Future[Batch]) -> None:
        if encoding.cancelled():
            self._feed(NotEncoded(batch, self.failure or Unavailable("encoding was cancelled")))
            return
        error = encoding.exception()
        if error is None:
            self._take(batch, encoding.result())
        else:
            self._feed(NotEncoded(batch, error if isinstance(error, DanubeError) else InvalidBatch(str(error))))

    def _take(self, batch: OpenBatch, encoded: Batch) -> None:
        batch.batch = encoded
        self._carry_out(self._machine.encoded(batch, encoded.header.size_bytes, self._loop.time()))
        batch.forget_columns()

    def _send(self, batch: OpenBatch, generation: int) -> None:
        assert self.connection is not None, "the machine sends only while it is open"
        machine, header = self._machine, batch.batch.header
        numbers = (machine.producer_id, machine.session, batch.first_sequence)
        if (header.producer_id, header.session, header.first_sequence) != numbers:
            producer_id, session, first_sequence = numbers
            batch.batch = renumber(batch.batch, producer_id=producer_id, session=session, first_sequence=first_sequence)
        self.connection.ask(self._produce, partial(self._on_answer, batch, generation), *batch.batch.buffers)

    def _on_answer(self, batch: OpenBatch, generation: int, answer: frames.Frame | DanubeError) -> None:
        said: pb.Receipt | DanubeError | None
        if isinstance(answer, DanubeError):
            said = answer
        else:
            said = answer.command.receipt if answer.kind == "receipt" else None
        self._carry_out(self._machine.answered(batch, generation, said, self._loop.time()))

    def _resolve(self, batch: OpenBatch, receipt: pb.Receipt) -> None:
        self._progressed()
        topic, offset, epoch, duplicate = self.topic, receipt.offset, receipt.epoch, receipt.duplicate
        durability = DURABILITIES.get(receipt.durability, "memory")
        step = 1 if durability != "memory" else 0
        for row, waiter, _ in batch.waiters:
            if not waiter.done():
                waiter.set_result(Receipt(topic, offset + row * step, epoch, durability, duplicate))
        self._released(batch.size)
        batch.finish()

    # --- the lane -----------------------------------------------------------------------------------

    def leave(self, connection: BrokerConnection) -> None:
        if connection is self.connection:
            self._feed(Leaving())  # the connection ends with the last answer

    def _on_lost(self, error: DanubeError) -> None:
        self._feed(HandleLost(error))

    def _on_failed(self, error: DanubeError) -> None:
        self.abandon(error)

    def _forget_handle(self, connection: BrokerConnection) -> None:
        if connection.producers.pop(self.handle, None) is not None and connection.usable:
            # The connection goes on without it, so the broker must know; the answer is not awaited.
            connection.ask(pb.Command(close_producer=pb.CloseProducer(producer=self.handle)), lambda _: None)

    async def _find(self) -> BrokerConnection:
        if self._settings.create:
            return await self._brokers.owner_or_any(self.topic)
        return await super()._find()

    async def _open_at(self, connection: BrokerConnection) -> None:
        self._feed(OpeningBegan())
        settings = self._settings
        request = pb.OpenProducer(
            topic=self.topic,
            producer_name=settings.name,
            reliable=settings.reliable,
            create=settings.create,
            exclusive=settings.exclusive,
            schema_subject=settings.schema_subject,
            session=self._machine.session,
            seen_epoch=self._seen_epoch,
            without_session=not settings.idempotent,
        )
        try:
            await connection.request(
                pb.Command(open_producer=request), "producer_opened", accept=partial(self._opened, connection)
            )
        except SessionUnknown as error:
            self._feed(SessionLost(error))  # whatever that session has stored, this broker does not know it
            await self._open_at(connection)

    def _opened(self, connection: BrokerConnection, frame: frames.Frame) -> None:
        answer, welcome = frame.command.producer_opened, connection.welcome.result()
        self._attach(connection, answer.producer)
        self._produce = pb.Command(produce=pb.Produce(producer=answer.producer))
        connection.producers[answer.producer] = self
        self.message_size_max = answer.message_size_max
        self._schema = (answer.schema_id, answer.schema_version) if answer.schema_id else None
        # Before anything is sent there: it may be stored although no receipt comes back.
        self._seen_epoch = max(self._seen_epoch, answer.epoch)
        opened = Opened(
            producer_id=answer.producer_id,
            session=answer.session,
            in_flight_max=0 if connection.leaving else welcome.in_flight_max,
            frame_room_bytes=welcome.frame_size_max - PRODUCE_OVERHEAD_BYTES,
            is_volatile=answer.durability == pb.MEMORY,
        )
        self._feed(opened)
