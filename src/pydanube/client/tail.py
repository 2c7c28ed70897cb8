"""What is published to a topic, as it comes, without a subscription: nothing of it is kept at the broker.

    a task per partition: fetch from `offsets[partition]` on, wait for more ─► a short queue ─► the application

The broker knows the reader only while it answers a fetch. A program that is to go on later keeps `offsets`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from copy import copy
from types import TracebackType
from typing import Final, Self

import pyarrow as pa

from pydanube.client.admin import FETCH_BYTES, NativeAdmin, batches_in
from pydanube.client.messages import BatchColumns, MessageView, Place, place_of, with_offsets
from pydanube.errors import ClientClosed, DanubeError, DeadlineExceeded, NeverOpened, OffsetOutOfRange, Refused
from pydanube.formats.batch import Batch
from pydanube.wire._pb.pydanube import stream_pb2 as pb

log = logging.getLogger(__name__)

WAIT_SECONDS: Final = 20.0  # for something to come, per question
PAUSE_SECONDS: Final = 0.5  # before a broker that is behind what was read already is asked again


class FetchedBatch(BatchColumns):
    """One batch as the log has it, and which of its rows are meant."""

    __slots__ = ("_columns", "_rows", "attempt", "batch", "end", "first", "topic")

    def __init__(self, topic: str, batch: Batch, first: int) -> None:
        self.topic = topic
        self.batch = batch
        self.attempt = 1
        self.first = max(first, batch.header.base_offset)
        self.end = batch.header.end_offset
        self._rows = None
        self._columns = {}


class TailedMessage(MessageView):
    """A message that was read. There is nothing to acknowledge."""

    __slots__ = ()


class TailedBatch:
    """Messages of one topic as Arrow: the column `offset`, and those of the envelope."""

    __slots__ = ("arrow", "topic")

    def __init__(self, found: FetchedBatch) -> None:
        base = found.batch.header.base_offset
        self.topic = found.topic
        self.arrow: pa.RecordBatch = with_offsets(found.rows, base).slice(found.first - base)

    def __len__(self) -> int:
        count: int = self.arrow.num_rows
        return count

    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return self.arrow.__arrow_c_array__(requested_schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pa.Table.from_batches([self.arrow]).__arrow_c_stream__(requested_schema)


class Tail:
    """Made by `Client.tail`; reads inside its `async with` block.

    >>> async with client.tail("/default/numbers", start=1) as tail:
    ...     async for message in tail:
    ...         print(message.offset, message.payload)
    ...         if message.payload == b"3":
    ...             break
    1 b'2'
    2 b'3'
    >>> tail.offsets
    {'/default/numbers': 3}

    Messages of one partition come in order, each once. What only a broker that was lost may have is passed over, and in
    `skipped`: subscriptions get it when that broker is back. One task reads at a time.
    """

    def __init__(
        self,
        admin: NativeAdmin,
        topic: str,
        start: Place,
        *,
        partitions: Callable[[], Awaitable[list[str]]],
        timeout: float,
    ) -> None:
        place_of(start)
        self.topic = topic
        self.offsets: dict[str, int] = {}  # where it goes on, by topic or partition
        self.skipped: list[tuple[str, int, int]] = []  # [first, end) of a topic, which a lost broker may have
        self._admin = admin
        self._start = start
        self._partitions = partitions
        self._timeout = timeout
        self._tasks: list[asyncio.Task[None]] = []
        self._line: deque[FetchedBatch] = deque()
        self._line_max = 1
        self._changed = asyncio.Condition()  # the line, or what ended it
        self._failure: DanubeError | None = None
        self._current: FetchedBatch | None = None
        self._was_opened = self._is_open = False

    async def open(self) -> Self:
        """As entering the `async with` block: what is published from now on comes after "latest"."""
        if self._tasks:
            return self
        topics = await self._partitions()
        starts = await asyncio.gather(*(self._admin.find_offset(topic, self._start, self._timeout) for topic in topics))
        self.offsets = dict(zip(topics, starts, strict=True))
        self._line.clear()
        self._line_max = len(topics)
        self._current = self._failure = None
        self._was_opened = self._is_open = True
        self._tasks = [asyncio.create_task(self._follow(topic), name=f"tail {topic}") for topic in topics]
        return self

    async def close(self) -> None:
        """Reads no more. An `async for` ends."""
        tasks, self._tasks = self._tasks, []
        self._is_open = False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        async with self._changed:
            self._changed.notify_all()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- reading ------------------------------------------------------------------------------------

    def __aiter__(self) -> AsyncGenerator[TailedMessage, None]:
        return self._messages()

    async def _messages(self) -> AsyncGenerator[TailedMessage, None]:
        while await self._advance():
            while (message := self._taken()) is not None:
                yield message

    async def receive(self, *, timeout: float | None = None) -> TailedMessage:
        """The next message. Raises DeadlineExceeded if none came within `timeout` seconds."""
        seconds = self._timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(seconds):
                while await self._advance():
                    if (message := self._taken()) is not None:
                        return message
        except TimeoutError:
            raise DeadlineExceeded(f"reading {self.topic}", seconds) from None
        raise ClientClosed(f"the tail of {self.topic}")

    async def batches(self) -> AsyncGenerator[TailedBatch, None]:
        """Arrow record batches, as they were stored.

        >>> async with client.tail("/default/numbers", start="earliest") as tail:
        ...     async for batch in tail.batches():
        ...         print(batch.topic, batch.arrow.column("offset").to_pylist())
        ...         break
        /default/numbers [0, 1, 2]
        """
        while await self._advance():
            found, self._current = self._current, None
            assert found is not None, "something is there after an advance"
            rest = FetchedBatch(found.topic, found.batch, self.offsets[found.topic])
            self.offsets[found.topic] = found.end
            yield TailedBatch(rest)

    def _taken(self) -> TailedMessage | None:
        """The next message of the batch in hand."""
        found = self._current
        if found is None:
            return None
        offset = self.offsets[found.topic]
        row = offset - found.batch.header.base_offset
        self.offsets[found.topic] = offset + 1
        if offset + 1 == found.end:
            self._current = None
        return TailedMessage(found, row, offset, found.column("payload")[row])

    async def _advance(self) -> bool:
        """Returns when a batch is in hand; False: it is closed. Raises what ended one of the partitions."""
        if not self._was_opened:
            raise NeverOpened(f"the tail of {self.topic}")
        if self._current is None:
            async with self._changed:
                await self._changed.wait_for(lambda: self._line or self._failure is not None or not self._is_open)
                if self._is_open and not self._line and self._failure is not None:
                    raise copy(self._failure)
                if self._is_open:
                    self._current = self._line.popleft()
                    self.offsets[self._current.topic] = self._current.first
                    self._changed.notify_all()
        return self._is_open

    # --- a partition --------------------------------------------------------------------------------

    async def _follow(self, topic: str) -> None:
        at, is_first = self.offsets[topic], True
        try:
            while True:
                at, found = await self._next(topic, at, is_first=is_first)
                for batch in found:
                    is_first = False
                    async with self._changed:
                        await self._changed.wait_for(lambda: len(self._line) < self._line_max)
                        self._line.append(batch)
                        self._changed.notify_all()
        except DanubeError as error:
            async with self._changed:
                self._failure = error
                self._changed.notify_all()

    async def _orphan_end(self, topic: str, offset: int) -> int | None:
        """Where offsets end that only a lost broker may have, if this is one of them."""
        orphans = (await self._admin.describe_storage(topic, self._timeout)).orphans
        return next((end for first, end in orphans if first <= offset < end), None)

    async def _next(self, topic: str, at: int, *, is_first: bool) -> tuple[int, list[FetchedBatch]]:
        """Where to go on, and what was found. Tries again for as long as time may help."""
        loop = asyncio.get_running_loop()
        behind_since: float | None = None
        fetch = pb.Fetch(topic=topic, start=at, bytes_max=FETCH_BYTES, wait_ms=round(WAIT_SECONDS * 1000))
        while True:
            try:
                frame = await self._admin.call(
                    topic, pb.Command(fetch=fetch), "fetched", self._timeout + WAIT_SECONDS
                )  # fmt: skip
                found = [FetchedBatch(topic, batch, at) for batch in batches_in(frame.body)]
                return frame.command.fetched.next_offset, [each for each in found if each.end > at]
            except OffsetOutOfRange as error:
                if at < error.first and is_first and self._start == "earliest":
                    return error.first, []  # retention was faster
                if at <= error.end:
                    raise
                # Read already, and not there: this broker has lost the topic and does not know it yet.
                behind_since = behind_since or loop.time()
                if loop.time() - behind_since > self._timeout:
                    raise
                await asyncio.sleep(PAUSE_SECONDS)
            except DanubeError as error:
                if error.retryable:
                    log.warning("tail waits", extra={"topic": topic, "why": str(error)})
                elif type(error) is not Refused or (end := await self._orphan_end(topic, at)) is None:
                    raise
                else:
                    log.warning("tail passes over what a lost broker has", extra={"topic": topic, "why": str(error)})
                    self.skipped.append((topic, at, end))
                    return end, []
