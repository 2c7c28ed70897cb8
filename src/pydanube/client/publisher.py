"""Batches that the caller encoded before, sent in order to one topic, or partition, and never sent twice.

    open ─► a new session: what an older publisher of this name still has on its way is refused from now on
    send ─► at most in_flight_max without a receipt
    close ─► every batch has its receipt, or the first error is raised

A producer sends again until it has a receipt. This one does not: after an error some batches are stored and some are
not, and its owner reads the log to see which, behind the fence that the next `open` is. So no answer that was lost, no
broker that forgot a session and no second process of the same name stores a batch twice.
"""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from pydanube.client.brokers import Brokers, with_deadline
from pydanube.client.connection import BrokerConnection
from pydanube.errors import DanubeError, DeliveryMismatch, NotServed, Unreachable
from pydanube.formats.batch import Batch, renumber
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb


class Publisher:
    """Made by `Client.publisher`; open inside its `async with` block."""

    def __init__(self, brokers: Brokers, topic: str, name: str, timeout: float) -> None:
        self.topic = topic
        self._brokers = brokers
        self._name = name
        self._timeout = timeout
        self._connection: BrokerConnection | None = None
        self._opened = pb.ProducerOpened()
        self._room = asyncio.Semaphore(1)
        self._in_flight_max = 1
        self._next_sequence = 0
        self._error: DanubeError | None = None

    async def __aenter__(self) -> Self:
        await self._brokers.retry_until(f"opening a publisher of {self.topic}", self._timeout, self._open)
        self._in_flight_max = min(self._connection_in_use().welcome.result().in_flight_max, frames.IN_FLIGHT_MAX)
        self._room = asyncio.Semaphore(self._in_flight_max)
        return self

    async def _open(self) -> None:
        connection = await self._brokers.owner_or_any(self.topic)
        request = pb.OpenProducer(topic=self.topic, producer_name=self._name, reliable=True)
        try:
            frame = await connection.request(pb.Command(open_producer=request), "producer_opened")
        except NotServed:
            self._brokers.bad_route(connection)
            raise
        self._connection, self._opened = connection, frame.command.producer_opened
        if not self._opened.session:
            self._close_handle()  # the block is not entered, so `__aexit__` is not called
            raise DeliveryMismatch(self.topic, "reliable", "non-reliable")

    async def send(self, batch: Batch) -> None:
        """Waits for a free slot, not for the receipt. Raises what became of an earlier batch."""
        await with_deadline(f"publishing to {self.topic}", self._timeout, self._room.acquire())
        self._check()
        opened = self._opened
        numbered = renumber(
            batch, producer_id=opened.producer_id, session=opened.session, first_sequence=self._next_sequence
        )
        self._next_sequence += numbered.header.rows
        command = pb.Command(produce=pb.Produce(producer=opened.producer))
        self._connection_in_use().ask(command, self._answered, *numbered.buffers)

    async def flush(self) -> None:
        """Returns when every batch is stored; raises if one is not, or may not be."""
        for _ in range(self._in_flight_max):
            await with_deadline(f"publishing to {self.topic}", self._timeout, self._room.acquire())
        for _ in range(self._in_flight_max):
            self._room.release()
        self._check()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                await self.flush()
        finally:
            self._close_handle()

    def _close_handle(self) -> None:
        """Tells the broker that no more comes. Does not wait for its answer."""
        connection, self._connection = self._connection, None
        if connection is not None and connection.usable:
            connection.ask(pb.Command(close_producer=pb.CloseProducer(producer=self._opened.producer)), lambda _: None)

    def _answered(self, answer: frames.Frame | DanubeError) -> None:
        if isinstance(answer, DanubeError):
            self._error = self._error or answer
        elif answer.kind != "receipt":
            self._error = self._error or Unreachable(self.topic, f"a batch was answered with {answer.kind}")
        self._room.release()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _connection_in_use(self) -> BrokerConnection:
        assert self._connection is not None, "it is open"
        return self._connection
