"""Every option of the sink does what it says: what tasks make of rows, and what is staged. No Spark is started."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, LongType, MapType, StringType, StructType, TimestampType

import pydanube
from pydanube.errors import ConfigError
from pydanube.formats.batch import CODECS, columns_of
from pydanube.formats.parquet import read_raw
from pydanube.ports import ObjectStore
from pydanube.spark.sink import SinkOptions, batch_writer, envelope, split
from pydanube.spark.staging import Publishing, Staging
from pydanube.stores.objects.memory import MemoryObjectStore
from tests.spark.places import Place

SCHEMA = (
    StructType()
    .add("payload", BinaryType())
    .add("body", StringType())
    .add("routing_key", StringType())
    .add("id", BinaryType())
    .add("headers", MapType(StringType(), StringType()))
    .add("extra", MapType(StringType(), StringType()))
    .add("where", StringType())
    .add("number", IntegerType())
)
MAPS = pa.map_(pa.string(), pa.string())
ROWS = pa.RecordBatch.from_arrays(
    [
        pa.array([b"p0", b"p1", b"p2"], pa.binary()),
        pa.array(["b0", "b1", "b2"]),
        pa.array(["k0", None, "k2"]),
        pa.array([b"i0", b"i1", b"i2"], pa.binary()),
        pa.array([[("h", "0")], None, []], MAPS),
        pa.array([[("e", "0")], [("e", "1")], [("e", "2")]], MAPS),
        pa.array(["/default/x", "/default/y", "/default/x"]),
        pa.array([1, 2, 3], pa.int32()),
    ],
    SCHEMA.names,
)


def parse(**options: str) -> SinkOptions:
    given = {"service.url": "danube://127.0.0.1:1", **options}
    if "topicColumn" not in given:
        given.setdefault("topic", "/default/t")
    return SinkOptions.parse(given, SCHEMA)


class Unparted:
    """Topics of which none has partitions."""

    def partitions(self, topic: str) -> int:
        return 0


def test_columns_have_names_of_their_own_or_those_that_are_given() -> None:
    usual = envelope(ROWS, parse()).to_pydict()
    assert usual["payload"] == [b"p0", b"p1", b"p2"] and usual["routing_key"] == ["k0", None, "k2"]
    assert usual["attributes"] == [[("h", "0")], [], []]
    named = envelope(ROWS, parse(payloadColumn="body", keyColumn="id", attributesColumn="extra")).to_pydict()
    assert named["payload"] == [b"b0", b"b1", b"b2"] and named["routing_key"] == ["i0", "i1", "i2"]
    assert named["attributes"] == [[("e", "0")], [("e", "1")], [("e", "2")]]


def test_what_a_message_carried_is_kept_where_there_are_columns_for_it() -> None:
    carried = {
        "publish_time": (TimestampType(), pa.array([7, None, 9], pa.timestamp("us", "UTC"))),
        "producer_name": (StringType(), pa.array(["till", None, "app"])),
        "schema_id": (IntegerType(), pa.array([1, None, 3], pa.int32())),
        "schema_version": (LongType(), pa.array([4, None, 6], pa.int64())),
    }
    names = ("publishTimeColumn", "producerColumn", "schemaIdColumn", "schemaVersionColumn")
    for prefix in ("", "my_"):
        schema, rows = StructType().add("payload", BinaryType()), ROWS.select(["payload"])
        for name, (kind, values) in carried.items():
            schema.add(f"{prefix}{name}", kind)
            rows = rows.append_column(f"{prefix}{name}", values)
        given = {name: f"my_{column}" for name, column in zip(names, carried, strict=True)} if prefix else {}
        options = SinkOptions.parse({"service.url": "danube://h:1", "topic": "/default/t", **given}, schema)
        made = envelope(rows, options).to_pydict()
        times = [round(each.timestamp() * 1e6) for each in made["publish_time"]]
        assert times[::2] == [7, 9] and times[1] > 1e15, "without one: now"
        assert made["producer_name"] == ["till", None, "app"]
        assert (made["schema_id"], made["schema_version"]) == ([1, None, 3], [4, None, 6])
    with pytest.raises(ConfigError, match=r"publishTimeColumn.*a column of type timestamp; it is string: cast"):
        parse(publishTimeColumn="body")


def test_a_column_names_the_topic_of_each_row() -> None:
    parts = split(ROWS, parse(topicColumn="where"), Unparted())  # type: ignore[arg-type]
    found = {topic: part.column("payload").to_pylist() for topic, part in parts}
    assert found == {"/default/x": [b"p0", b"p2"], "/default/y": [b"p1"]}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"payloadColumn": "bodi"}, "one of the columns"),
        ({"keyColumn": "number"}, "cast it first"),
        ({"attributesColumn": "body"}, "a column of type map"),
        ({"topicColumn": "nowhere"}, "one of the columns"),
        ({"topic": "/default/t", "topicColumn": "where"}, "either topic"),
        ({"writeId": "a/b"}, "letters, digits"),
        ({"batchRows": "0"}, "1 or more"),
        ({"compression": "gzip"}, "none or lz4 or zstd"),
        ({"keyColum": "id"}, "did you mean keyColumn"),
    ],
)
def test_what_cannot_be_meant_is_refused_with_a_hint(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(**options)
    assert said in str(caught.value)


def test_a_topic_cannot_be_overwritten() -> None:
    with pytest.raises(ConfigError, match="a topic only grows"):
        batch_writer({"service.url": "danube://h:1", "topic": "/default/t"}, SCHEMA, overwrite=True)


def test_rows_are_staged_beside_the_checkpoint_unless_another_place_is_named(tmp_path: Path) -> None:
    assert parse(checkpointLocation=str(tmp_path)).staging == f"file://{tmp_path}/danube-sink"
    assert parse(checkpointLocation=str(tmp_path), staging="s3a://bucket/x").staging == "s3://bucket/x"
    assert parse(checkpointLocation=f"file:{tmp_path}").staging == f"file://{tmp_path}/danube-sink"
    for options in ({"checkpointLocation": "viewfs://lake/x"}, {"checkpointLocation": "/x", "staging": "hdfs:/x"}):
        with pytest.raises(ConfigError, match=r"that all executors and the driver see.*the option staging names it"):
            parse(**options)


async def staged(store: ObjectStore, payloads: list[bytes], **options: Any) -> list[Any]:
    staging = Staging(store, query="q", batch=0, partition=0, attempt="a", file_bytes=1 << 20, **options)
    await staging.add("/default/t", columns_of(payloads, bytes(8 * len(payloads))))
    return await staging.finish()


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_batches_are_as_large_and_as_compressed_as_asked_for(compression: str) -> None:
    async def test() -> None:
        store = MemoryObjectStore()
        [file] = await staged(store, [b"x" * 100] * 250, batch_rows=100, compression=compression)
        batches = read_raw(await store.get(file.key))
        assert [batch.header.rows for batch in batches] == [100, 100, 50]
        assert {batch.header.codec for batch in batches} == {CODECS[compression]}

    asyncio.run(test())


def test_rows_enter_a_topic_no_faster_than_they_may(place: Place) -> None:
    topic = place.new_topic("paced")

    async def test() -> float:
        store = MemoryObjectStore()
        async with pydanube.connect(place.url) as client:
            staging = Staging(
                store,
                query="q",
                batch=0,
                partition=0,
                attempt="a",
                file_bytes=1 << 20,
                batch_rows=10,
                compression="none",
            )
            await staging.add(topic, columns_of([b"x"] * 100, bytes(800)))
            loop = asyncio.get_running_loop()
            began = loop.time()
            await Publishing("q", store, client, rows_per_second=200).commit(0, await staging.finish())
            return loop.time() - began

    assert place.run(test()) >= 0.5
    assert len(place.payloads(topic)) == 100
