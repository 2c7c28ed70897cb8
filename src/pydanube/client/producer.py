"""A producer: one topic, or all partitions of one.

send         waits for buffer space, then for the receipt
send_nowait  waits for nothing; `flush` raises what became of it
send_soon    waits for nothing; a future tells what became of it
send_many    rows of a DataFrame or an Arrow table; waits until all are stored
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from copy import copy
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

from pydanube.client.brokers import Brokers, with_deadline
from pydanube.client.messages import Receipt, messages_of
from pydanube.client.open_batch import MESSAGE_OVERHEAD_BYTES, ProducerSettings, Times
from pydanube.client.partition_producer import PartitionProducer
from pydanube.core.names import partition_of_key
from pydanube.core.units import UNIX_EPOCH
from pydanube.errors import (
    BufferFull,
    ClientClosed,
    ConfigError,
    DanubeError,
    DeadlineExceeded,
    MessageTooLarge,
    NeverOpened,
)

Payload: TypeAlias = bytes | bytearray | memoryview
# The lane, payload, key, attributes, times, and how much of the buffer it takes.
Prepared: TypeAlias = tuple[PartitionProducer, bytes, str | None, Mapping[str, str] | None, Times | None, int]

# One message fits into a batch, with its key and attributes.
PAYLOAD_SIZE_MAX_BYTES: Final = 60 * 1024 * 1024
TIMES_BYTES: Final = 16
DELIVER_AFTER_MAX: Final = 366 * 24 * 3600.0
KEYS_CACHED: Final = 65_536  # hashing a key in Python costs a microsecond for ten bytes

_partition_of = lru_cache(maxsize=KEYS_CACHED)(partition_of_key)


class Producer:
    """Made by `Client.producer`; open inside its `async with` block.

    >>> async with client.producer("/default/readings") as readings:
    ...     receipt = await readings.send(b"21.5", key="kitchen", attributes={"unit": "C"})
    >>> receipt.offset, receipt.durability
    (0, 'fsync')

    Messages to one topic, or to one partition, are stored in the order in which they were sent. After a lost connection
    those without a receipt are sent again; an idempotent producer's are stored once all the same. With
    `idempotent=False` a batch that the broker refused for a while is stored when it is sent again, behind later ones.
    """

    def __init__(
        self,
        brokers: Brokers,
        topic: str,
        settings: ProducerSettings,
        *,
        partitions: Callable[[], Awaitable[list[str]]],
        buffer_bytes: int,
    ) -> None:
        self.topic = topic
        self.name = settings.name
        self._brokers = brokers
        self._settings = settings
        self._partitions = partitions
        self.buffer_bytes = buffer_bytes
        self._buffered_bytes = 0
        self._room: deque[tuple[int, asyncio.Future[None]]] = deque()  # who waits for buffer space, by time of arrival
        self._arrivals = 0
        self._lanes: list[PartitionProducer] = []
        self._only: PartitionProducer | None = None  # of a topic without partitions
        self._turn = 0
        self._is_open = False
        self._was_opened = False
        self._changing = asyncio.Lock()  # held while it opens or closes, so that no second set of lanes is opened
        self._loop: asyncio.AbstractEventLoop

    # --- life ---------------------------------------------------------------------------------------

    async def open(self) -> Self:
        """As entering the `async with` block. Does nothing if it is open; simultaneous calls share one opening."""
        async with self._changing:
            if not self._is_open:
                await self._open()
        return self

    async def _open(self) -> None:
        self._loop = asyncio.get_running_loop()
        topics = await self._partitions()
        lanes = [PartitionProducer(self._brokers, topic, self._settings, self._released) for topic in topics]
        opening = [asyncio.ensure_future(lane.open(self._settings.timeout)) for lane in lanes]
        try:
            await asyncio.gather(*opening)
        except BaseException:
            for each in opening:
                each.cancel()
            await asyncio.gather(*opening, *(lane.stop() for lane in lanes), return_exceptions=True)
            raise
        self._lanes = lanes
        self._only = lanes[0] if len(lanes) == 1 else None
        self._is_open = self._was_opened = True

    async def close(self, *, timeout: float | None = None) -> None:
        """Flushes, then releases everything. Raises what `flush` raises, after the release. Waits for an `open`."""
        async with self._changing:
            if not self._is_open:
                return
            try:
                await self.flush(timeout=timeout)
            finally:
                await self._let_go()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A block that leaves with an error still wants what it sent to arrive, but not an error of ours in its place.
        if error is None:
            await self.close()
        else:
            async with self._changing:
                if not self._is_open:
                    return
                try:
                    if isinstance(error, Exception):
                        await self.flush()
                except DanubeError:
                    pass
                finally:
                    await self._let_go()

    async def _let_go(self) -> None:
        self._is_open = False
        closed = ClientClosed(f"the producer of {self.topic}")
        for lane in self._lanes:
            lane.abandon(closed)
        closing = [asyncio.ensure_future(self._close_quietly(each)) for each in self._lanes if each.failure is None]
        if closing:
            await asyncio.wait(closing, timeout=1.0)
        for lane in self._lanes:
            await lane.stop()
        while self._room:
            _, waiter = self._room.popleft()
            if not waiter.done():
                waiter.set_exception(closed)

    async def _close_quietly(self, lane: PartitionProducer) -> None:
        with suppress(DanubeError):  # the broker is gone: it closes by itself
            await lane.close()

    # --- sending ------------------------------------------------------------------------------------

    async def send(
        self,
        payload: Payload,
        *,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
        deliver_at: datetime | None = None,
        deliver_after: float | None = None,
        timeout: float | None = None,
    ) -> Receipt:
        """Returns when the message has the durability that its topic promises.

        `event_time` says when it happened. Shared and key_shared subscriptions are not sent it before `deliver_at`, or
        for `deliver_after` seconds; exclusive and failover ones, which keep the order, at once. By the broker's clock.

        Many sends at the same time share batches: await them together (`asyncio.gather`, a TaskGroup), or use
        `send_nowait`. A message without a receipt after `timeout` seconds raises DeadlineExceeded; if it was sent
        before, it may be stored all the same. Cancelling does not take it back either.
        """
        if type(payload) is not bytes:
            payload = _as_bytes(payload)
        size = len(payload) + MESSAGE_OVERHEAD_BYTES
        if key is not None or attributes is not None:
            size += _checked(key, attributes)
        if self._buffered_bytes >= self.buffer_bytes or self._room:
            await self._wait_for_room(timeout)
        lane = self._only or self._lane_for(key)
        if 0 < lane.message_size_max < len(payload) or size > PAYLOAD_SIZE_MAX_BYTES:
            raise MessageTooLarge(len(payload), lane.message_size_max or PAYLOAD_SIZE_MAX_BYTES)
        waiter: asyncio.Future[Receipt] = self._loop.create_future()
        times = None
        if event_time is not None or deliver_at is not None or deliver_after is not None:
            times, size = self._times(event_time, deliver_at, deliver_after), size + TIMES_BYTES
        lane.append(payload, key, attributes and dict(attributes), size, waiter, timeout is not None, times)
        self._buffered_bytes += size
        if timeout is None:
            return await waiter
        return await with_deadline(f"sending to {self.topic}", timeout, waiter)

    def send_nowait(
        self,
        payload: Payload,
        *,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
        deliver_at: datetime | None = None,
        deliver_after: float | None = None,
    ) -> None:
        """Takes the message and returns. `flush` waits until all such messages are stored, and raises if one is not.

        Raises BufferFull, with nothing taken, if `buffer_bytes` wait for their receipts already.

        >>> async with client.producer("/default/readings") as readings:
        ...     for number in range(1000):
        ...         readings.send_nowait(b"%d" % number)
        ...     await readings.flush()
        """
        if type(payload) is not bytes:
            payload = _as_bytes(payload)
        size = len(payload) + MESSAGE_OVERHEAD_BYTES
        if key is not None or attributes is not None:
            size += _checked(key, attributes)
        if self._buffered_bytes >= self.buffer_bytes:
            raise BufferFull(self.topic, self.buffer_bytes)
        lane = self._only or self._lane_for(key)
        if 0 < lane.message_size_max < len(payload) or size > PAYLOAD_SIZE_MAX_BYTES:
            raise MessageTooLarge(len(payload), lane.message_size_max or PAYLOAD_SIZE_MAX_BYTES)
        times = None
        if event_time is not None or deliver_at is not None or deliver_after is not None:
            times, size = self._times(event_time, deliver_at, deliver_after), size + TIMES_BYTES
        lane.append(payload, key, attributes and dict(attributes), size, None, times=times)
        self._buffered_bytes += size

    def send_soon(
        self,
        payload: Payload,
        *,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
        deliver_at: datetime | None = None,
        deliver_after: float | None = None,
    ) -> asyncio.Future[Receipt]:
        """As `send_nowait`; the future gets the receipt, or the error. Its callbacks run on the event loop.

        Raises BufferFull, with nothing taken. What goes wrong with the message later is for its future: `flush` waits
        for it and does not raise it. Costs about twice as much as `send_nowait`. Cancelling it takes nothing back.

        >>> def stored(future):
        ...     print("error" if future.exception() else f"offset {future.result().offset}")
        >>> async with client.producer("/default/readings") as readings:
        ...     readings.send_soon(b"21.5").add_done_callback(stored)
        offset 0
        """
        if self._buffered_bytes >= self.buffer_bytes:
            raise BufferFull(self.topic, self.buffer_bytes)
        message = self.prepare(payload, key, attributes, event_time, deliver_at, deliver_after)
        waiter: asyncio.Future[Receipt] = self._loop.create_future()
        self.take(*message, waiter)
        return waiter

    async def send_many(self, rows: Any, *, timeout: float | None = None) -> int:
        """Sends a message per row of a DataFrame, an Arrow table or a batch, and returns how many when all are stored.

        The column `payload` is bytes or text. `key` (or `routing_key`, as batches have it) and `attributes` may be
        there too; other columns are left out. `timeout` is that of every wait for buffer space, and of the last
        receipt. Raises as `flush` does: then some may be stored and others not.

        >>> import pyarrow
        >>> rows = pyarrow.table({"payload": [b"21.5", b"22.0"], "key": ["attic", "cellar"]})
        >>> async with client.producer("/default/readings") as readings:
        ...     print(await readings.send_many(rows))
        2
        """
        self._check_open()
        sent = 0
        for some in messages_of(rows):
            for payload, key, attributes in some:
                await self.room(timeout=timeout)
                self.send_nowait(payload, key=key, attributes=attributes)
            sent += len(some)
            await asyncio.sleep(0)  # others have their turn
        await self.flush(timeout=timeout)
        return sent

    def prepare(
        self,
        payload: Payload,
        key: str | None,
        attributes: Mapping[str, str] | None,
        event_time: datetime | None = None,
        deliver_at: datetime | None = None,
        deliver_after: float | None = None,
    ) -> Prepared:
        """A copy of a message for `take`, and at its end how much of the buffer it takes. For facades, in any thread.

        Raises what `send_nowait` raises, but for BufferFull.
        """
        if type(payload) is not bytes:
            payload = _as_bytes(payload)
        attributes = attributes and dict(attributes)
        size = len(payload) + MESSAGE_OVERHEAD_BYTES
        if key is not None or attributes is not None:
            size += _checked(key, attributes)
        times = None
        if event_time is not None or deliver_at is not None or deliver_after is not None:
            times, size = self._times(event_time, deliver_at, deliver_after), size + TIMES_BYTES
        lane = self._only or self._lane_for(key)
        if lane.failure is not None:
            raise copy(lane.failure)
        if 0 < lane.message_size_max < len(payload) or size > PAYLOAD_SIZE_MAX_BYTES:
            raise MessageTooLarge(len(payload), lane.message_size_max or PAYLOAD_SIZE_MAX_BYTES)
        return lane, payload, key, attributes, times, size

    def take(
        self,
        lane: PartitionProducer,
        payload: bytes,
        key: str | None,
        attributes: Mapping[str, str] | None,
        times: Times | None,
        size: int,
        waiter: asyncio.Future[Receipt] | None = None,
    ) -> None:
        """Appends what was prepared, whether the buffer has space or not. Raises if the producer has failed since."""
        lane.append(payload, key, attributes, size, waiter, times=times)
        self._buffered_bytes += size

    async def room(self, *, timeout: float | None = None) -> None:
        """Returns when `send_nowait` would not raise BufferFull."""
        if self._buffered_bytes >= self.buffer_bytes:
            await self._wait_for_room(timeout)

    async def flush(self, *, timeout: float | None = None) -> None:
        """Returns when everything sent before has its receipt. Raises the first error of a `send_nowait`.

        Raises DeadlineExceeded after `timeout` seconds; what is left is still on its way then, and an error that was
        not raised is raised by the next `flush`.
        """
        self._check_open()
        seconds = self._settings.timeout if timeout is None else timeout
        await with_deadline(f"flushing {self.topic}", seconds, asyncio.gather(*(lane.flush() for lane in self._lanes)))
        for lane in self._lanes:
            lane.raise_lost()

    @property
    def buffered_bytes(self) -> int:
        """Without a receipt, as counted against `buffer_bytes`: payloads, keys, attributes, and 64 per message."""
        return self._buffered_bytes

    def _times(self, event_time: datetime | None, deliver_at: datetime | None, deliver_after: float | None) -> Times:
        return _times_of(event_time, deliver_at, deliver_after, self._brokers.connector.time_ns() // 1000)

    # --- inside -------------------------------------------------------------------------------------

    def _lane_for(self, key: str | None) -> PartitionProducer:
        """As every Danube client chooses: by the key's hash, or in turn."""
        self._check_open()
        if key is not None:
            return self._lanes[_partition_of(key, len(self._lanes))]
        self._turn = (self._turn + 1) % len(self._lanes)
        return self._lanes[self._turn - 1]

    def _released(self, size: int) -> None:
        self._buffered_bytes -= size
        room, free = self._room, self.buffer_bytes - self._buffered_bytes
        while room and free > 0:
            _, waiter = room.popleft()
            if not waiter.done():
                waiter.set_result(None)
                free -= MESSAGE_OVERHEAD_BYTES  # it takes at least so much; who comes too early waits again

    async def _wait_for_room(self, timeout: float | None) -> None:
        """In the order of arrival."""
        self._check_open()
        seconds = self._settings.timeout if timeout is None else timeout
        deadline = self._loop.time() + seconds
        self._arrivals = arrival = self._arrivals + 1
        is_first = True
        while self._buffered_bytes >= self.buffer_bytes or (is_first and self._room):
            waiter: asyncio.Future[None] = self._loop.create_future()
            insort(self._room, (arrival, waiter))
            is_first = False
            try:
                async with asyncio.timeout_at(deadline):
                    await waiter
            except TimeoutError:
                raise DeadlineExceeded(f"waiting for room to send to {self.topic}", seconds) from None
            finally:
                if waiter.cancelled() and (arrival, waiter) in self._room:
                    self._room.remove((arrival, waiter))  # else it stays until there is space, which may never be
                # When this caller has taken space, given up, or was refused: the next one may wait only for that.
                self._loop.call_soon(self._released, 0)

    def _check_open(self) -> None:
        if not self._is_open:
            raise (ClientClosed if self._was_opened else NeverOpened)(f"the producer of {self.topic}")


def _times_of(
    event_time: datetime | None, deliver_at: datetime | None, deliver_after: float | None, now_us: int
) -> Times:
    """As batches have them. A datetime without a time zone is local time, as everywhere in Python."""
    if deliver_after is not None:
        if deliver_at is not None:
            raise ConfigError("deliver_after", deliver_after, "either deliver_at or deliver_after, not both")
        if not 0 <= deliver_after <= DELIVER_AFTER_MAX:
            raise ConfigError("deliver_after", deliver_after, f"seconds from 0 to {DELIVER_AFTER_MAX:g}")
        return _microseconds("event_time", event_time), now_us + round(deliver_after * 1_000_000)
    return _microseconds("event_time", event_time), _microseconds("deliver_at", deliver_at)


def _microseconds(name: str, time: object) -> int | None:
    if time is None:
        return None
    if not isinstance(time, datetime):
        raise ConfigError(name, time, "a datetime")
    return (time.astimezone(UTC) - UNIX_EPOCH) // timedelta(microseconds=1)


def _as_bytes(payload: object) -> bytes:
    if not isinstance(payload, bytes | bytearray | memoryview):
        raise TypeError(f"a payload is bytes, not {type(payload).__name__}")
    return bytes(payload)


def _checked(key: str | None, attributes: Mapping[str, str] | None) -> int:
    """How many bytes they take. One that does not fit would spoil the batch for all the others."""
    size = 0
    if key is not None:
        size += _text_size("a key", key)
    if attributes:
        for text in (*attributes.keys(), *attributes.values()):
            size += _text_size("an attribute", text) + 8
    return size


def _text_size(what: str, text: object) -> int:
    if not isinstance(text, str):
        raise TypeError(f"{what} is text, not {type(text).__name__}")
    return len(text) if text.isascii() else len(text.encode())
