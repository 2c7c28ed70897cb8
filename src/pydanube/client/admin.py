"""Calls about topics and subscriptions: one question to the right broker, asked again while time may help."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

import pyarrow as pa

from pydanube.client.brokers import Brokers
from pydanube.client.connection import BrokerConnection
from pydanube.client.messages import (
    OFFSET,
    Lag,
    Located,
    LogFlushed,
    Place,
    StorageInfo,
    TopicInfo,
    place_of,
    with_offsets,
)
from pydanube.client.storages import Storages
from pydanube.client.topics import TopicSelection
from pydanube.core.history.tiers import Descriptor
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.errors import DanubeError, NotServed, Refused, TopicExists, TopicUnknown, Unavailable, Unreachable
from pydanube.formats.batch import ENVELOPE, Batch, decode, load
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

FETCH_BYTES: Final = 4 * 1024 * 1024
WITH_OFFSETS: Final = pa.schema([OFFSET, *ENVELOPE])


class Fetch:
    """A range of a topic, read when it is iterated; every iteration reads anew.

    Iterating yields Arrow record batches; `table` collects them.
    """

    def __init__(self, admin: NativeAdmin, topic: TopicName, start: int, end: int | None, timeout: float) -> None:
        self._admin = admin
        self._topic = topic
        self._start = start
        self._end = end
        self._timeout = timeout

    async def __aiter__(self) -> AsyncIterator[pa.RecordBatch]:
        async for at, end, batches in self.stored():
            for batch in batches:
                rows = _rows_between(batch, at, end)
                if rows.num_rows:
                    yield rows

    async def stored(self) -> AsyncIterator[tuple[int, int, list[Batch]]]:
        """Batches as the log has them, with the range [first, end) that is meant: they may reach beyond it."""
        at, end = self._start, self._end
        while end is None or at < end:
            request = pb.Fetch(topic=self._topic, start=at, end=end, bytes_max=FETCH_BYTES)
            frame = await self._admin.call(self._topic, pb.Command(fetch=request), "fetched", self._timeout)
            fetched = frame.command.fetched
            end = fetched.head if end is None else min(end, fetched.head)
            yield at, end, list(batches_in(frame.body))
            if fetched.next_offset <= at:
                return  # there is nothing, and there will not be
            at = fetched.next_offset

    async def table(self) -> pa.Table:
        return pa.Table.from_batches([batch async for batch in self], schema=WITH_OFFSETS)


def batches_in(body: memoryview) -> Iterable[Batch]:
    while body:
        batch = load(body)
        yield batch
        body = body[batch.header.size_bytes :]


def _rows_between(batch: Batch, first: int, end: int) -> pa.RecordBatch:
    base = batch.header.base_offset
    first, end = max(first, base), min(end, batch.header.end_offset)
    return with_offsets(decode(batch), base).slice(first - base, max(0, end - first))


class NativeAdmin:
    """The calls of a client that open nothing."""

    def __init__(self, brokers: Brokers, timeout: float) -> None:
        self._brokers = brokers
        self.timeout = timeout
        self._storages = Storages(brokers, lambda topic: self.describe_storage(topic, None))

    async def call(
        self, topic: str | None, command: pb.Command, kind: str, timeout: float | None = None
    ) -> frames.Frame:
        """The answer of the topic's broker, or of any."""
        asked = command.WhichOneof("kind") or "a request"

        async def attempt() -> frames.Frame:
            return await self._ask(await self._connection(topic), topic, command, kind)

        seconds = self.timeout if timeout is None else timeout
        return await self._brokers.retry_until(f"{asked} {topic or ''}".strip(), seconds, attempt)

    async def _connection(self, topic: str | None) -> BrokerConnection:
        if topic is None:
            return await self._brokers.any()
        return await self._brokers.owner_or_any(topic)

    async def _ask(
        self, connection: BrokerConnection, topic: str | None, command: pb.Command, kind: str
    ) -> frames.Frame:
        """A broker that could not answer, or to which a stale route led, is not the first to be asked again."""
        try:
            return await connection.request(command, kind)
        except Unavailable as error:
            if topic is None:
                self._brokers.deprioritize(connection.url)
            elif isinstance(error, NotServed):
                self._brokers.bad_route(connection)
            raise

    async def call_once(self, topic: str, command: pb.Command, timeout: float | None, done: type[Refused]) -> None:
        """For calls that must not be done twice: if an answer was lost, `done` says that it was done."""
        lost = False

        async def attempt() -> None:
            nonlocal lost
            connection = await self._connection(topic)
            try:
                await self._ask(connection, topic, command, "done")
            except Unreachable:
                lost = True
                raise
            except done:
                if not lost:
                    raise

        seconds = self.timeout if timeout is None else timeout
        await self._brokers.retry_until(f"{command.WhichOneof('kind')} {topic}", seconds, attempt)

    # --- topics -------------------------------------------------------------------------------------

    async def lookup(self, topic: str, timeout: float | None = None) -> Located:
        name = TopicName(topic)
        frame = await self.call(None, pb.Command(lookup=pb.Lookup(topic=name)), "located", timeout)
        located = frame.command.located
        return Located(located.topic, located.stream_url, located.connect_url, located.partitions)

    async def parts(self, topic: str, timeout: float | None = None) -> list[TopicName]:
        """The topic itself, or its partitions. Raises TopicUnknown."""
        name = TopicName(topic)
        partitions = (await self.lookup(name, timeout)).partitions
        return name.partition_names(partitions) if partitions else [name]

    async def selected(self, selection: TopicSelection, timeout: float | None = None) -> list[str]:
        """The topics and partitions that a consumer of these reads now. Raises TopicUnknown for a name."""
        found: dict[str, None] = {}
        for name in selection.names:
            found.update(dict.fromkeys(await self.parts(name, timeout)))
        for namespace in selection.namespaces:
            listed = await self.list_topics(namespace, timeout)
            found.update(dict.fromkeys(name for name in listed if selection.matches(name)))
        return list(found)

    async def create_topic(
        self,
        topic: str,
        *,
        reliable: bool,
        partitions: int,
        schema_subject: str | None,
        exist_ok: bool,
        timeout: float | None,
    ) -> None:
        create = pb.CreateTopic(
            topic=TopicName(topic), reliable=reliable, partitions=partitions, schema_subject=schema_subject or ""
        )
        try:
            await self.call_once(topic, pb.Command(create_topic=create), timeout, TopicExists)
        except TopicExists:
            if not exist_ok:
                raise

    async def delete_topic(self, topic: str, timeout: float | None) -> None:
        delete = pb.DeleteTopic(topic=TopicName(topic))
        await self.call_once(topic, pb.Command(delete_topic=delete), timeout, TopicUnknown)

    async def describe_topic(self, topic: str, timeout: float | None) -> TopicInfo:
        describe = pb.DescribeTopic(topic=TopicName(topic))
        frame = await self.call(topic, pb.Command(describe_topic=describe), "topic_info", timeout)
        return TopicInfo.of(frame.command.topic_info)

    async def describe_storage(self, topic: str, timeout: float | None) -> StorageInfo:
        describe = pb.DescribeStorage(topic=TopicName(topic))
        frame = await self.call(topic, pb.Command(describe_storage=describe), "storage_info", timeout)
        return StorageInfo.of(frame.command.storage_info)

    async def describe_storages(
        self, topics: Iterable[str], timeout: float | None
    ) -> dict[TopicName, StorageInfo | DanubeError]:
        seconds = self.timeout if timeout is None else timeout
        return await self._storages.describe([TopicName(topic) for topic in topics], seconds)

    async def swap_objects(self, topic: str, old: Sequence[str], new: Descriptor) -> None:
        request = pb.SwapObjects(topic=TopicName(topic), old=old, descriptor=new.to_bytes())
        connection = await self._connection(topic)
        await connection.request(pb.Command(swap_objects=request), "done")

    async def flush_log(self, topic: str, timeout: float | None) -> LogFlushed:
        request = pb.FlushLog(topic=TopicName(topic))
        frame = await self.call(topic, pb.Command(flush_log=request), "log_flushed", timeout)
        found = frame.command.log_flushed
        letters, set_aside = tuple(found.dead_letter_topics), tuple(found.set_aside)
        return LogFlushed(found.head, found.first_on_disk, letters, found.garbage_seconds, set_aside)

    async def note_order(self, request: pb.NoteOrder, timeout: float | None) -> bool:
        async def attempt() -> bool:
            connection = await self._connection(None)
            if not connection.welcome.result().notes_orders:
                return False
            await self._ask(connection, None, pb.Command(note_order=request), "done")
            return True

        seconds = self.timeout if timeout is None else timeout
        return await self._brokers.retry_until(f"note {request.order} {request.topic}", seconds, attempt)

    async def list_topics(self, namespace: str | None, timeout: float | None) -> list[str]:
        found: list[str] = []
        while True:
            request = pb.ListTopics(namespace=namespace or "", after=found[-1] if found else "")
            frame = await self.call(None, pb.Command(list_topics=request), "topic_list", timeout)
            found += frame.command.topic_list.topics
            if not frame.command.topic_list.more or not frame.command.topic_list.topics:
                return found

    # --- subscriptions ------------------------------------------------------------------------------

    async def change_failure_policy(
        self, topic: str, subscription: str, change: pb.ChangeFailurePolicy, timeout: float | None
    ) -> None:
        """Of one topic or partition; only what the change has."""
        request = pb.ChangeFailurePolicy(topic=topic, subscription=subscription)
        request.MergeFrom(change)
        command = pb.Command(change_failure_policy=request)

        async def attempt() -> None:
            connection = await self._connection(topic)
            if "change_failure_policy" not in connection.welcome.result().commands:
                raise Refused(f"the broker of {topic} takes no failure policy from a client: use danube admin instead")
            await self._ask(connection, topic, command, "done")

        seconds = self.timeout if timeout is None else timeout
        await self._brokers.retry_until(f"changing the failure policy of {topic}", seconds, attempt)

    async def lag(self, topic: str, subscription: str, timeout: float | None) -> Lag:
        name = SubscriptionName(subscription)
        lags = []
        for part in await self.parts(topic, timeout):
            request = pb.GetLag(topic=part, subscription=name)
            frame = await self.call(part, pb.Command(get_lag=request), "lag", timeout)
            lags.append(frame.command.lag)
        return Lag.of(lags)

    async def seek(self, topic: str, subscription: str, to: Place, timeout: float | None) -> list[int]:
        name, place = SubscriptionName(subscription), place_of(to)
        found = []
        for part in await self.parts(topic, timeout):
            request = pb.Seek(topic=part, subscription=name, to=place)
            frame = await self.call(part, pb.Command(seek=request), "offset_found", timeout)
            found.append(frame.command.offset_found.offset)
        return found

    async def unsubscribe(self, topic: str, subscription: str, timeout: float | None) -> None:
        name = SubscriptionName(subscription)
        for part in await self.parts(topic, timeout):
            request = pb.Unsubscribe(topic=part, subscription=name)
            await self.call(part, pb.Command(unsubscribe=request), "done", timeout)

    async def find_offset(self, topic: str, at: Place, timeout: float | None) -> int:
        request = pb.FindOffset(topic=TopicName(topic), at=place_of(at))
        frame = await self.call(topic, pb.Command(find_offset=request), "offset_found", timeout)
        return frame.command.offset_found.offset
