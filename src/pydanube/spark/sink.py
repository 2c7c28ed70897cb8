"""`write` and `writeStream.format("danube")`: rows of a DataFrame into topics, each exactly once.

    executors   record batches ─► envelope ─► split by topic and partition ─► staged files      Staging
    driver      files of the tasks that count ─► manifest ─► topics                             Publishing

| column         | from                                                             | type             |
|----------------|------------------------------------------------------------------|------------------|
| payload        | payloadColumn, else payload, else value                          | binary or string |
| routing_key    | keyColumn, else routing_key, else key; it may be missing         | string or binary |
| attributes     | attributesColumn, else attributes, else headers; or missing      | map of strings   |
| topic          | topicColumn; without it the option topic is meant                | string           |
| publish_time   | publishTimeColumn, else publish_time; missing or null: now       | timestamp        |
| producer_name  | producerColumn, else producer_name; missing or null: the query   | string           |
| schema_id      | schemaIdColumn, else schema_id; it may be missing                | long or int      |
| schema_version | schemaVersionColumn, else schema_version; it may be missing      | int or long      |
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import time_ns
from typing import Any, Final, NamedTuple
from uuid import uuid4

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
)

from pydanube.client.client import Client
from pydanube.core.history.object_keys import is_part
from pydanube.core.names import TopicName, partition_of_key
from pydanube.errors import ConfigError, TopicUnknown
from pydanube.formats.batch import ENVELOPE
from pydanube.spark.options import SINK_OPTIONS, BrokerOptions, QueryOptions
from pydanube.spark.reach import Reach
from pydanube.spark.staging import Publishing, StagedFile, Staging
from pydanube.spark.versions import DataSourceStreamArrowWriter
from pydanube.stores.objects.settings import parse_url

log = logging.getLogger(__name__)

MIB: Final = 1 << 20
FILE_BYTES: Final = 32 * MIB
BATCH_ROWS: Final = 10_000
QUERY_ID: Final = "sql.streaming.queryId"
BATCH_ID: Final = "streaming.sql.batchId"
SINK: Final = "danube-sink"  # the folder in a checkpoint
CARRIED: Final[Mapping[str, tuple[str, tuple[type[DataType], ...]]]] = {
    "publish_time": ("publishTimeColumn", (TimestampType,)),
    "producer_name": ("producerColumn", (StringType,)),
    "schema_id": ("schemaIdColumn", (LongType, IntegerType)),
    "schema_version": ("schemaVersionColumn", (IntegerType, LongType)),
}


class SinkOptions(NamedTuple):
    """Checked; travels to executors."""

    connection: BrokerOptions
    topic: str | None
    topic_column: str | None
    payload_column: str
    key_column: str | None
    attributes_column: str | None
    carried: dict[str, str]  # what a message carried elsewhere: columns of the envelope, and whence they come
    staging: str
    write_id: str
    is_named: bool  # the write id was given, so the same write may come again
    batch_rows: int
    rows_per_second: int | None
    compression: str

    @classmethod
    def parse(cls, options: Mapping[str, str], schema: StructType) -> SinkOptions:
        """Raises ConfigError."""
        given = QueryOptions(options, SINK_OPTIONS)
        connection = BrokerOptions.of(given)
        if connection.url is None:
            raise ConfigError("service.url", None, "danube://host:6651: messages are stored by brokers")
        topic, topic_column = given.text("topic"), given.text("topicColumn")
        if (topic is None) == (topic_column is None):
            raise ConfigError("topic", topic, "either topic, the one topic to write to, or topicColumn")
        payload = _column(given, "payloadColumn", ("payload", "value"), schema)
        if payload is None:
            raise ConfigError(
                "payloadColumn", None, f"the column with the message; there are {', '.join(schema.names)}"
            )
        key = _column(given, "keyColumn", ("routing_key", "key"), schema)
        attributes = _column(given, "attributesColumn", ("attributes", "headers"), schema)
        if topic_column is not None and topic_column not in schema.names:
            raise ConfigError("topicColumn", topic_column, f"one of the columns {', '.join(schema.names)}")
        _check(schema, "payloadColumn", payload, (BinaryType, StringType))
        _check(schema, "keyColumn", key, (StringType, BinaryType))
        _check(schema, "attributesColumn", attributes, (MapType,))
        _check(schema, "topicColumn", topic_column, (StringType,))
        carried = {}
        for name, (option, types) in CARRIED.items():
            column = _column(given, option, (name,), schema)
            _check(schema, option, column, types)
            if column is not None:
                carried[name] = column
        write_id = given.text("writeId")
        if write_id is not None and not is_part(write_id):
            raise ConfigError("writeId", write_id, "letters, digits, '_', '-', '.' and '='")
        return cls(
            connection,
            None if topic is None else str(TopicName(topic)),
            topic_column,
            payload,
            key,
            attributes,
            carried,
            _staging(given),
            write_id or uuid4().hex,
            write_id is not None,
            given.number("batchRows") or min(BATCH_ROWS, max(1, (given.number("rowsPerSecond") or 1 << 40) // 4)),
            given.number("rowsPerSecond"),
            given.one_of("compression", "none", ("none", "lz4", "zstd")),
        )


def _column(given: QueryOptions, option: str, defaults: Sequence[str], schema: StructType) -> str | None:
    name = given.text(option)
    if name is not None and name not in schema.names:
        raise ConfigError(option, name, f"one of the columns {', '.join(schema.names)}")
    return name or next((each for each in defaults if each in schema.names), None)


def _check(schema: StructType, option: str, column: str | None, types: tuple[type[DataType], ...]) -> None:
    if column is None:
        return
    found = schema[column].dataType
    if not isinstance(found, types):
        allowed = " or ".join(each.typeName() for each in types)
        raise ConfigError(option, column, f"a column of type {allowed}; it is {found.simpleString()}: cast it first")


def _staging(given: QueryOptions) -> str:
    """Where tasks put rows until the driver publishes them: beside the checkpoint, unless the user says otherwise."""
    place = given.text("staging")
    if place is None:
        checkpoint = given.text("checkpointLocation")
        if checkpoint is not None:
            place = f"{checkpoint.rstrip('/')}/{SINK}"
        else:
            place = str(Path(tempfile.gettempdir()) / SINK)
    scheme, separator, rest = place.partition(":")
    if not separator or "/" in scheme:
        return f"file://{Path(place).absolute()}"
    if scheme == "file":
        return f"file:///{rest.lstrip('/')}"
    url = place.replace("s3a://", "s3://", 1)
    if scheme not in ("s3", "s3a", "gs", "az"):
        # Tasks open it themselves, in Python: file systems of Spark's JVM are not there.
        allowed = (
            "a directory that all executors and the driver see, or s3://, gs:// or az://; the option staging names it"
        )
        raise ConfigError("staging" if given.text("staging") else "checkpointLocation", place, allowed)
    parse_url("staging", url)
    return url


class Staged(WriterCommitMessage):
    """What a task tells the driver."""

    def __init__(self, query: str, files: list[StagedFile]) -> None:
        self.query = query
        self.files = files


# --- writers --------------------------------------------------------------------------------------------------


class _Writing:
    """What both writers do. `step` is for tests that die at a certain step."""

    def __init__(self, options: SinkOptions) -> None:
        self.options = options

    def step(self, name: str) -> None:
        pass

    def stage(self, iterator: Iterator[pa.RecordBatch], query: str, batch: int) -> Staged:
        context = TaskContext.get()
        assert context is not None, "writers run in tasks"
        options = self.options
        self.step("stage")
        with Reach(options.connection) as reach:
            store = reach.call(reach.store(options.staging))
            staging = Staging(
                store,
                query=query,
                batch=batch,
                partition=context.partitionId(),
                attempt=f"{context.taskAttemptId()}-{uuid4().hex[:8]}",
                file_bytes=FILE_BYTES,
                batch_rows=options.batch_rows,
                compression=options.compression,
            )
            targets = Targets(reach)
            for rows in iterator:
                self.step("stage rows")
                for topic, part in split(rows, options, targets):
                    reach.call(staging.add(topic, part))
            files = reach.call(staging.finish())
        self.step("staged")
        return Staged(query, files)

    def publish(self, messages: Sequence[WriterCommitMessage | None], batch: int) -> None:
        staged = [message for message in messages if isinstance(message, Staged)]
        if not staged:
            return
        files = [file for message in staged for file in message.files]
        self.step("commit")
        with Reach(self.options.connection) as reach:
            stored = reach.call(self._publish(reach, staged[0].query, batch, files))
        log.info("batch published", extra={"query": staged[0].query, "batch": batch, "rows": stored})
        self.step("committed")

    async def _publish(self, reach: Reach, query: str, batch: int, files: Sequence[StagedFile]) -> int:
        store = await reach.store(self.options.staging)
        publishing = Publishing(
            query, store, await reach.client(), self.step, rows_per_second=self.options.rows_per_second
        )
        return await publishing.commit(batch, files)

    def discard(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        staged = [message for message in messages if isinstance(message, Staged)]
        with Reach(self.options.connection) as reach:
            for message in staged:
                reach.call(self._discard(reach, message))

    async def _discard(self, reach: Reach, message: Staged) -> None:
        store = await reach.store(self.options.staging)
        await Publishing(message.query, store, await reach.client()).discard(message.files)


class DanubeStreamWriter(_Writing, DataSourceStreamArrowWriter):
    """`writeStream`. The query's id is in its checkpoint, so a query that is started again is the same one."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        context = TaskContext.get()
        assert context is not None
        query, batch = context.getLocalProperty(QUERY_ID), context.getLocalProperty(BATCH_ID)
        assert query is not None and batch is not None, "Spark tells streaming tasks their query and batch"
        return self.stage(iterator, query, int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self.publish(messages, batchId)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        # A manifest may name these files already: what looks failed here may be half published.
        pass


class DanubeWriter(_Writing, DataSourceArrowWriter):
    """`write`. With a write id the same write may be made again, and stores nothing twice."""

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self.stage(iterator, self.options.write_id, 0)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self.publish(messages, 0)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        if not self.options.is_named:
            self.discard(messages)


def stream_writer(options: Mapping[str, str], schema: StructType) -> DanubeStreamWriter:
    return DanubeStreamWriter(SinkOptions.parse(options, schema))


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> DanubeWriter:
    if overwrite:
        raise ConfigError("mode", "overwrite", "append: a topic only grows")
    return DanubeWriter(SinkOptions.parse(options, schema))


# --- rows -----------------------------------------------------------------------------------------------------


class Targets:
    """Topics and how many partitions each has, asked once per task. A topic that is missing is made."""

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._known: dict[str, int] = {}

    def partitions(self, topic: str) -> int:
        """0: not partitioned."""
        if topic not in self._known:
            self._known[topic] = self._reach.call(self._ask(TopicName(topic)))
        return self._known[topic]

    async def _ask(self, topic: TopicName) -> int:
        client: Client = await self._reach.client()
        try:
            return (await client.lookup(topic)).partitions
        except TopicUnknown:
            await client.create_topic(topic, exist_ok=True)
            return 0


def split(rows: pa.RecordBatch, options: SinkOptions, targets: Targets) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows as envelopes, by topic and partition. Rows of one topic stay in their order."""
    if rows.num_rows == 0:
        return
    made = envelope(rows, options)
    for topic, part in _by_topic(rows, made, options):
        count = targets.partitions(topic)
        if not count:
            yield topic, part
            continue
        places = _places(part.column("routing_key"), count)
        for number in np.unique(places):
            yield f"{topic}-part-{number}", part.filter(pa.array(places == number))


def _by_topic(rows: pa.RecordBatch, made: pa.RecordBatch, options: SinkOptions) -> Iterator[tuple[str, pa.RecordBatch]]:
    if options.topic_column is None:
        assert options.topic is not None
        yield options.topic, made
        return
    column = rows.column(options.topic_column)
    for topic in pc.unique(column).to_pylist():
        if topic is None:
            raise ConfigError("topicColumn", options.topic_column, "a topic in every row; in one it is null")
        yield topic, made.filter(pc.equal(column, topic))


def _places(keys: pa.Array, count: int) -> np.ndarray:
    """As every Danube client chooses: by the key's hash; rows without a key in turn."""
    encoded = keys.dictionary_encode()
    chosen = np.array([partition_of_key(key, count) for key in encoded.dictionary.to_pylist()] or [0], np.int64)
    indices = encoded.indices
    missing = indices.is_null().to_numpy(zero_copy_only=False)
    places = chosen[indices.fill_null(0).to_numpy()]
    return np.where(missing, np.arange(len(keys)) % count, places)


def envelope(rows: pa.RecordBatch, options: SinkOptions) -> pa.RecordBatch:
    """The columns that a message has. Raises ConfigError for a null payload."""
    count = rows.num_rows
    payload = rows.column(options.payload_column).cast(pa.binary())
    if payload.null_count:
        raise ConfigError("payloadColumn", options.payload_column, "a value in every row; in one it is null")
    if options.key_column is None:
        key = pa.nulls(count, pa.string())
    else:
        key = rows.column(options.key_column).cast(pa.string())
    map_type = ENVELOPE.field("attributes").type
    nothing = pa.MapArray.from_arrays(
        pa.array(np.zeros(count + 1, np.int32)), pa.array([], pa.string()), pa.array([], pa.string()), map_type
    )
    if options.attributes_column is None:
        attributes = nothing
    else:
        attributes = _attributes(rows.column(options.attributes_column), nothing, map_type)
    columns: dict[str, Any] = {"payload": payload, "routing_key": key, "attributes": attributes}
    for field in ENVELOPE:
        if field.name in options.carried:
            columns[field.name] = rows.column(options.carried[field.name]).cast(field.type)
        elif field.name not in columns:
            columns[field.name] = pa.nulls(count, field.type)
    now = pa.scalar(time_ns() // 1000, ENVELOPE.field("publish_time").type)
    columns["publish_time"] = pc.fill_null(columns["publish_time"], now)
    columns["request_id"] = pa.repeat(pa.scalar(0, pa.int64()), count)
    return pa.RecordBatch.from_arrays([columns[field.name] for field in ENVELOPE], schema=ENVELOPE)


def _attributes(given: pa.Array, nothing: pa.Array, map_type: pa.DataType) -> pa.Array:
    cast = given.cast(map_type)
    if cast.null_count:
        cast = pc.if_else(cast.is_valid(), cast, nothing)
    if cast.items.null_count:
        raise ConfigError("attributesColumn", "null", "text in every attribute; in one it is null")
    return cast
