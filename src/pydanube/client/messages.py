"""What applications hold in their hands: messages, batches of them, receipts, and answers of the broker."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

import pyarrow as pa

from pydanube.core.consuming.values import Arrival
from pydanube.core.history.tiers import Descriptor, LogRun
from pydanube.core.units import UNIX_EPOCH
from pydanube.errors import ConfigError
from pydanube.formats.batch import Batch, decode
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.convert import ASKED_BY_HEADER, START_HEADER

if TYPE_CHECKING:
    from pydanube.client.partition_consumer import PartitionConsumer

Durability: TypeAlias = Literal["memory", "os", "fsync"]
Place: TypeAlias = Literal["earliest", "latest"] | int | datetime
SubscriptionType: TypeAlias = Literal["exclusive", "shared", "failover", "key_shared", "fail-over", "key-shared"]

DURABILITIES: Final[Mapping[int, Durability]] = {pb.MEMORY: "memory", pb.OS: "os", pb.FSYNC: "fsync"}
TYPES: Final[Mapping[str, pb.SubscriptionType]] = {
    "exclusive": pb.EXCLUSIVE,
    "shared": pb.SHARED,
    "failover": pb.FAILOVER,
    "key_shared": pb.KEY_SHARED,
}


def place_of(place: Place) -> pb.Place:
    """A place in a log, as commands have it. A datetime without a time zone is local time, as everywhere in Python."""
    match place:
        case "earliest":
            return pb.Place(edge=pb.EARLIEST)
        case "latest":
            return pb.Place(edge=pb.LATEST)
        case datetime():
            since = place.astimezone(UTC) - UNIX_EPOCH
            return pb.Place(time_us=(since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds)
        case int() if not isinstance(place, bool) and 0 <= place < 1 << 64:
            return pb.Place(offset=place)
    raise ConfigError("start", place, '"earliest", "latest", an offset, or a datetime')


def start_header(place: Place) -> tuple[str, bytes]:
    """The same as metadata of a gRPC ConsumerRequest, which has no field for it."""
    return START_HEADER, place_of(place).SerializeToString()


def asked_by_header(who: str) -> tuple[str, bytes]:
    """Metadata of an order to the admin services: for whom it is given. The broker's log of what happened says so."""
    return ASKED_BY_HEADER, who.encode()


# --- messages ---------------------------------------------------------------------------------------


class BatchColumns:
    """The rows of a batch, turned into values when they are asked for. Subclasses have the attributes."""

    __slots__ = ()

    batch: Batch
    topic: str
    attempt: int
    _rows: pa.RecordBatch | None
    _columns: dict[str, list[Any]]

    @property
    def rows(self) -> pa.RecordBatch:
        """All rows of the batch, ours or not."""
        rows = self._rows
        if rows is None:
            rows = self._rows = decode(self.batch)  # type: ignore[misc]  # subclasses have the slot
        return rows

    def column(self, name: str) -> list[Any]:
        values = self._columns.get(name)
        if values is None:
            values = self._columns[name] = self.rows.column(name).to_pylist()
        return values


class ReceivedBatch(Arrival, BatchColumns):
    """One batch as it came, and which of its rows are meant for us."""

    __slots__ = ("_columns", "_rows", "batch", "lane", "topic")

    def __init__(
        self,
        lane: PartitionConsumer,
        batch: Batch,
        ranges: Sequence[tuple[int, int]],
        attempt: int,
        size: int,
        seeks: int = 0,
    ) -> None:
        generation = lane.machine.generation
        super().__init__(
            ranges, attempt=attempt, size=size, seeks=seeks, epoch=batch.header.epoch, generation=generation
        )
        self.lane = lane
        self.topic: str = lane.topic
        self.batch = batch
        self._rows: pa.RecordBatch | None = None
        self._columns: dict[str, list[Any]] = {}

    def table(self) -> pa.RecordBatch:
        """Our rows, with their offsets as the first column."""
        base = self.batch.header.base_offset
        rows = with_offsets(self.rows, base)
        if self.count == rows.num_rows:
            return rows
        parts = [rows.slice(first - base, end - first) for first, end in self.ranges]
        return parts[0] if len(parts) == 1 else pa.concat_batches(parts)


class MessageView:
    """A message, as it can be read. `payload` and `offset` are decoded; the rest is looked up on access."""

    __slots__ = ("_delivery", "_row", "offset", "payload")

    def __init__(self, delivery: BatchColumns, row: int, offset: int, payload: bytes) -> None:
        self._delivery = delivery
        self._row = row
        self.offset = offset
        self.payload = payload

    @property
    def topic(self) -> str:
        """Of a partitioned topic: the partition."""
        return self._delivery.topic

    @property
    def key(self) -> str | None:
        key: str | None = self._delivery.column("routing_key")[self._row]
        return key

    @property
    def attributes(self) -> dict[str, str]:
        return dict(self._delivery.column("attributes")[self._row])

    @property
    def producer_name(self) -> str | None:
        name: str | None = self._delivery.column("producer_name")[self._row]
        return name

    @property
    def publish_time(self) -> datetime:
        """By the producer's clock."""
        time: datetime = self._delivery.column("publish_time")[self._row]
        return time

    @property
    def append_time(self) -> datetime | None:
        """When the broker stored it, by the broker's clock; None in a topic that keeps nothing."""
        stored_us = self._delivery.batch.header.append_time
        return UNIX_EPOCH + timedelta(microseconds=stored_us) if stored_us else None

    @property
    def event_time(self) -> datetime | None:
        """When it happened, if its producer said so."""
        time: datetime | None = self._delivery.column("event_time")[self._row]
        return time

    @property
    def deliver_at(self) -> datetime | None:
        """Before when it was not to be delivered, if its producer said so."""
        time: datetime | None = self._delivery.column("deliver_at")[self._row]
        return time

    @property
    def schema_id(self) -> int | None:
        number: int | None = self._delivery.column("schema_id")[self._row]
        return number

    @property
    def schema_version(self) -> int | None:
        number: int | None = self._delivery.column("schema_version")[self._row]
        return number

    @property
    def attempt(self) -> int:
        """1 the first time, more when it comes again."""
        return self._delivery.attempt

    def __repr__(self) -> str:
        shown = self.payload if len(self.payload) <= 40 else self.payload[:37] + b"..."
        return f"<{type(self).__name__} {self.topic} offset {self.offset}: {shown!r}>"


class Delivered(MessageView):
    """A message that was delivered to a consumer, and is to be answered."""

    __slots__ = ()

    _delivery: ReceivedBatch

    @property
    def lane(self) -> PartitionConsumer:
        """Where it came from. For facades."""
        return self._delivery.lane

    @property
    def parts(self) -> tuple[ReceivedBatch, int, int, bytes]:
        """What another view of the same message is made of. For facades."""
        return self._delivery, self._row, self.offset, self.payload


class Message(Delivered):
    """One message, to be acknowledged."""

    __slots__ = ()

    async def ack(self) -> None:
        """It is done. Many acks travel together, at the end of the event loop's turn; `consumer.flush` waits for them.

        An ack that is lost with its connection is sent again on the next one; the message may have come again by then.
        Raises ClientClosed if the consumer is closed: the ack could not count.
        """
        self._delivery.lane.ack(self.offset, self._delivery.era)

    async def ack_cumulative(self) -> None:
        """It is done, and everything before it in its topic, or partition: as `ack` of each of them.

        Raises Refused in shared and key_shared subscriptions, where other consumers have some of it.

        >>> async with client.consumer("/default/numbers", subscription="all", type="exclusive", start=0) as consumer:
        ...     messages = [await consumer.receive() for _ in range(3)]
        ...     await messages[-1].ack_cumulative()
        ...     await consumer.flush()
        >>> (await client.lag("/default/numbers", "all")).messages
        0
        """
        self._delivery.lane.ack_cumulative(self.offset, self._delivery.era)

    async def extend(self, seconds: float) -> None:
        """It takes longer: the ack timeout is over in `seconds` from now, not before. Never shortens it.

        Returns when the broker has taken note. Raises if the message is not this consumer's any more.

        >>> async with client.consumer("/default/numbers", subscription="slow", start=2) as consumer:
        ...     message = await consumer.receive()
        ...     await message.extend(120)
        ...     await message.ack()
        """
        one = ((self.offset, self.offset + 1),)
        await self._delivery.lane.extend(one, seconds, self._delivery)

    async def nack(self, delay: float | None = None, *, reason: str = "") -> None:
        """It failed: deliver it again after `delay` seconds, or as the subscription's failure policy says.

        >>> async with client.consumer("/default/numbers", subscription="later", start=2) as consumer:
        ...     message = await consumer.receive()
        ...     await message.nack(delay=0.1, reason="not now")
        ...     again = await consumer.receive()
        ...     print(again.payload, again.attempt)
        b'3' 2
        """
        self._delivery.lane.nack(((self.offset, self.offset + 1),), delay, reason, self._delivery.era)


class BatchView:
    """Messages as Arrow. Polars, DuckDB, pandas and PyArrow take it as it is (Arrow's PyCapsule interface).

    `arrow` is the record batch itself; its columns are `offset` and those of the envelope.
    """

    __slots__ = ("_delivery", "arrow")

    def __init__(self, delivery: ReceivedBatch) -> None:
        self._delivery = delivery
        self.arrow: pa.RecordBatch = delivery.table()

    def __len__(self) -> int:
        return self._delivery.count

    @property
    def topic(self) -> str:
        return self._delivery.topic

    @property
    def attempt(self) -> int:
        return self._delivery.attempt

    @property
    def offsets(self) -> list[range]:
        """Which offsets, as ranges: a shared subscription may get some rows of a batch and not others."""
        return [range(first, end) for first, end in self._delivery.ranges]

    def __arrow_c_array__(self, requested_schema: object = None) -> object:
        return self.arrow.__arrow_c_array__(requested_schema)

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        return pa.Table.from_batches([self.arrow]).__arrow_c_stream__(requested_schema)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.topic} {len(self)} messages>"


class MessageBatch(BatchView):
    """Messages as Arrow, to be acknowledged together."""

    __slots__ = ()

    async def ack(self) -> None:
        """All of them are done."""
        self._delivery.lane.ack_ranges(self._delivery.ranges, self._delivery.era)

    async def extend(self, seconds: float) -> None:
        """All of them take longer: as `Message.extend`."""
        await self._delivery.lane.extend(self._delivery.ranges, seconds, self._delivery)

    async def nack(self, delay: float | None = None, *, reason: str = "") -> None:
        """All of them failed."""
        self._delivery.lane.nack(self._delivery.ranges, delay, reason, self._delivery.era)


def messages_of(rows: Any) -> Iterator[list[tuple[bytes, str | None, dict[str, str] | None]]]:
    """Payload, key and attributes of every row of something that Arrow can read, some rows at a time."""
    table = pa.table(rows)
    names = table.column_names
    if "payload" not in names:
        raise ConfigError("send_many", ", ".join(names), "rows with a column payload (and perhaps key, attributes)")
    if table["payload"].null_count:
        raise ConfigError("send_many", "payload", "a payload in every row: an empty one is b''")
    key = next((name for name in ("key", "routing_key") if name in names), None)
    for chunk in table.to_batches(max_chunksize=ROWS_AT_ONCE):
        nothing: list[Any] = [None] * chunk.num_rows
        keys = nothing if key is None else chunk[key].to_pylist()
        attributes = chunk["attributes"].to_pylist() if "attributes" in names else nothing
        yield [
            (payload.encode() if isinstance(payload, str) else payload, key, dict(more) if more else None)
            for payload, key, more in zip(chunk["payload"].to_pylist(), keys, attributes, strict=True)
        ]


def offsets_from(first: int, count: int) -> pa.Array:
    """first, first + 1, ... as an Arrow column."""
    # Arrow's own ways to do so are slower: they look for pandas on every call.
    numbers = memoryview(array("q", range(first, first + count))).cast("B")
    return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(numbers)])


def with_offsets(rows: pa.RecordBatch, base_offset: int) -> pa.RecordBatch:
    columns = [offsets_from(base_offset, rows.num_rows), *rows.columns]
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([OFFSET, *rows.schema]))


ROWS_AT_ONCE: Final = 1_000
OFFSET: Final = pa.field("offset", pa.int64(), nullable=False)


# --- answers ----------------------------------------------------------------------------------------


class Receipt(NamedTuple):
    """The message is stored, with this durability: "fsync", on disk; "os", written; "memory", handed on.

    A non-reliable topic has no offsets: `offset` is 0. `duplicate`: it was stored at an earlier attempt.
    """

    topic: str
    offset: int
    epoch: int
    durability: Durability
    duplicate: bool = False


class Located(NamedTuple):
    """Where a topic is served. `partitions` 0: it is not the base of a partitioned topic."""

    topic: str
    stream_url: str
    connect_url: str
    partitions: int


class TopicInfo(NamedTuple):
    """A topic as its broker sees it. Of the base of a partitioned topic only the first three are known."""

    topic: str
    reliable: bool
    partitions: int
    first_offset: int
    head: int
    durability: Durability | None
    schema_subject: str | None
    message_size_max: int | None
    subscriptions: int
    producers: int
    consumers: int

    @classmethod
    def of(cls, info: pb.TopicInfo) -> TopicInfo:
        return cls(
            info.topic,
            info.reliable,
            info.partitions,
            info.first_offset,
            info.head,
            DURABILITIES.get(info.durability),
            info.schema_subject or None,
            info.message_size_max or None,
            info.subscriptions,
            info.producers,
            info.consumers,
        )


class LogFlushed(NamedTuple):
    """What `flush_log` did: everything below `first_on_disk` is in the object store alone."""

    head: int  # when it was asked
    first_on_disk: int
    dead_letter_topics: Sequence[str]  # that the topic's subscriptions name
    garbage_seconds: int  # by when an owner that stays removes an object that was swapped away
    set_aside: Sequence[str] = ()  # files on the owner's disk that were set aside as damaged, with what they hold


class StorageInfo(NamedTuple):
    """Where a topic's messages are. Ranges are half-open; what is in none of them is in the broker's log only."""

    topic: str
    first_offset: int
    head: int
    url: str | None  # of the object store; None: the broker has none
    history_version: int
    objects: Sequence[Descriptor]
    manifest: str | None  # the object that names older ones
    manifest_crc: int  # of its bytes; 0: not known
    orphans: Sequence[tuple[int, int]]
    voids: Sequence[tuple[int, int]]
    log: Sequence[LogRun] = ()  # what the broker's own log holds; empty if it is too old to tell
    tag: str = ""  # another one whenever objects, orphans or voids are others; empty: they are changing

    @classmethod
    def of(cls, info: pb.StorageInfo, known: StorageInfo | None = None) -> StorageInfo:
        """`known` is what an answer that says "unchanged" leaves out."""
        if info.unchanged:
            assert known is not None and known.tag == info.tag, "only what was told can be unchanged"
            return known._replace(first_offset=info.first_offset, head=info.head, log=_runs(info.log))
        return cls(
            info.topic,
            info.first_offset,
            info.head,
            info.storage_url or None,
            info.history_version,
            [Descriptor.from_bytes(each) for each in info.descriptors],
            info.manifest or None,
            info.manifest_crc,
            list(zip(info.orphans[::2], info.orphans[1::2], strict=True)),
            list(zip(info.voids[::2], info.voids[1::2], strict=True)),
            _runs(info.log),
            info.tag,
        )


def _runs(numbers: Sequence[int]) -> list[LogRun]:
    return [LogRun(*numbers[at : at + 4]) for at in range(0, len(numbers), 4)]


class Lag(NamedTuple):
    """How far a subscription is behind. `cursor` is the last acknowledged offset, None if there is none.

    `scheduled` messages are not to be delivered yet, and not among those that it is behind.
    """

    cursor: int | None
    head: int
    messages: int
    sentence: str
    scheduled: int = 0

    @classmethod
    def of(cls, parts: Iterable[pb.Lag]) -> Lag:
        """Of a partitioned topic: messages in sum; cursor and head only if there is one partition."""
        lags = list(parts)
        if len(lags) == 1:
            [lag] = lags
            cursor = lag.cursor if lag.HasField("cursor") else None
            return cls(cursor, lag.head, lag.lag_messages, lag.sentence, lag.scheduled)
        messages = sum(lag.lag_messages for lag in lags)
        return cls(
            None,
            sum(lag.head for lag in lags),
            messages,
            "; ".join(dict.fromkeys(lag.sentence for lag in lags)),
            sum(lag.scheduled for lag in lags),
        )


class Statistics(NamedTuple):
    """A client's connections: which brokers, how often one was opened and lost so far, and what uses them now.

    `producers` and `consumers` are counted by topic and partition. `last_error` says why a connection was last lost, or
    could not be opened; it is empty if that never happened.
    """

    connected: list[str]
    connections_opened: int
    connections_lost: int
    producers: int
    consumers: int
    last_error: str
