"""Batches of a consumer, and ranges that were fetched, straight into pandas, Polars and DuckDB."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import wraps
from typing import Any

import duckdb
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import pydanube
from pydanube.client.messages import MessageBatch
from pydanube.testing.brokers import TestBroker
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

TOPIC = "/default/readings"
ROOMS = ["kitchen", "garden", None]

Test = Callable[[pydanube.Client, MessageBatch], Awaitable[None]]


def with_readings(test: Test) -> Callable[[], None]:
    """Runs a test with a batch of 30 messages: room by room, with and without keys and attributes."""

    async def inside() -> None:
        async with (
            asyncio.timeout(30),
            TestBroker(memory=True) as broker,
            pydanube.connect(broker.url) as client,
            client.producer(TOPIC, name="sensor") as readings,
        ):
            for number in range(30):
                room = ROOMS[number % 3]
                readings.send_nowait(b"%d" % number, key=room, attributes={"unit": "C"} if room else None)
            await readings.flush()
            async with client.consumer(TOPIC, subscription="s", type="exclusive", start="earliest") as consumer:
                async for batch in consumer.batches():
                    assert len(batch) == 30
                    await test(client, batch)
                    await batch.ack()
                    break
                await consumer.flush()
            assert (await client.lag(TOPIC, "s")).messages == 0

    @wraps(test)
    def outside() -> None:
        run(inside())

    del outside.__wrapped__  # type: ignore[attr-defined]  # pytest would take its parameters for fixtures
    return outside


@with_readings
async def test_a_message_has_the_time_at_which_the_broker_stored_it(
    client: pydanube.Client, batch: MessageBatch
) -> None:
    async with client.consumer(TOPIC, subscription="times", start="earliest") as consumer:
        first = await consumer.receive()
        second = await consumer.receive()
    assert first.append_time is not None and second.append_time is not None
    assert first.publish_time <= first.append_time <= second.append_time <= datetime.now(UTC)
    await client.create_topic("/default/passing", reliable=False)
    async with (
        client.consumer("/default/passing", subscription="s", type="exclusive") as consumer,
        client.producer("/default/passing", reliable=False) as producer,
    ):
        await producer.send(b"x")
        assert (await consumer.receive()).append_time is None  # it was not stored


@with_readings
async def test_rows_of_a_frame_a_table_and_a_batch_are_messages(client: pydanube.Client, batch: MessageBatch) -> None:
    frames = [
        pl.DataFrame({"payload": ["a", "b"], "key": ["k", None], "celsius": [1.0, 2.0]}),
        pd.DataFrame({"payload": [b"c"]}),
        pa.table({"payload": [b""], "attributes": pa.array([[("unit", "C")]], pa.map_(pa.string(), pa.string()))}),
        batch,
    ]
    async with client.producer("/default/copies", compression="zstd", buffer_bytes=200) as copies:
        assert [await copies.send_many(frame) for frame in frames] == [2, 1, 1, 30]
    stored = (await client.fetch("/default/copies").table()).to_pylist()
    rows = [(row["payload"], row["routing_key"], dict(row["attributes"])) for row in stored]
    assert rows[:4] == [(b"a", "k", {}), (b"b", None, {}), (b"c", None, {}), (b"", None, {"unit": "C"})]
    assert rows[4:6] == [(b"0", "kitchen", {"unit": "C"}), (b"1", "garden", {"unit": "C"})] and len(rows) == 34


@with_readings
async def test_rows_that_are_no_messages_are_refused_before_any_is_sent(
    client: pydanube.Client, batch: MessageBatch
) -> None:
    head = (await client.describe_topic(TOPIC)).head
    async with client.producer(TOPIC) as producer:
        for rows in (pa.table({"value": [b"x"]}), pa.table({"payload": [b"x", None]})):
            with pytest.raises(pydanube.errors.ConfigError, match="payload"):
                await producer.send_many(rows)
    assert (await client.describe_topic(TOPIC)).head == head


@with_readings
async def test_a_batch_is_a_pandas_frame(client: pydanube.Client, batch: MessageBatch) -> None:
    frame = batch.arrow.to_pandas()
    assert list(frame.columns) == batch.arrow.schema.names
    assert frame["offset"].tolist() == list(range(30))
    assert frame["payload"].map(int).groupby(frame["routing_key"].fillna("nowhere")).sum().to_dict() == {
        "kitchen": sum(range(0, 30, 3)),
        "garden": sum(range(1, 30, 3)),
        "nowhere": sum(range(2, 30, 3)),
    }
    assert isinstance(frame["publish_time"].dtype, pd.DatetimeTZDtype)
    assert abs(frame["publish_time"].max() - pd.Timestamp.now(tz="UTC")) < pd.Timedelta(minutes=5)
    assert frame["attributes"].map(dict).tolist()[:3] == [{"unit": "C"}, {"unit": "C"}, {}]


@with_readings
async def test_polars_takes_a_batch_as_it_is(client: pydanube.Client, batch: MessageBatch) -> None:
    frame = pl.DataFrame(batch)
    assert frame.columns == batch.arrow.schema.names and frame.height == 30
    by_room = frame.group_by("routing_key").agg(pl.col("offset").count()).sort("routing_key", nulls_last=True)
    assert by_room.rows() == [("garden", 10), ("kitchen", 10), (None, 10)]
    assert frame["payload"].to_list() == [b"%d" % number for number in range(30)]
    assert frame["producer_name"].unique().to_list() == ["sensor"]
    newest = frame["publish_time"].max()
    assert isinstance(newest, datetime) and abs((newest - datetime.now(UTC)).total_seconds()) < 300


@with_readings
async def test_duckdb_queries_a_batch_by_its_name(client: pydanube.Client, batch: MessageBatch) -> None:
    found = duckdb.sql('select routing_key, count(*), min("offset") from batch group by 1 order by 3').fetchall()
    assert found == [("kitchen", 10, 0), ("garden", 10, 1), (None, 10, 2)]
    units = duckdb.sql("select distinct attributes['unit'] from batch order by 1 nulls last").fetchall()
    assert [unit for (unit,) in units] == ["C", None]
    assert duckdb.sql("select sum(decode(payload)::int) from batch").fetchone() == (sum(range(30)),)


@with_readings
async def test_some_rows_of_a_batch_are_all_that_anybody_sees(client: pydanube.Client, batch: MessageBatch) -> None:
    """A shared subscription may give a consumer some rows and not others."""
    batch._delivery.keep([(2, 4), (9, 10)])
    ours = MessageBatch(batch._delivery)
    assert [list(each) for each in ours.offsets] == [[2, 3], [9]]
    assert ours.arrow.to_pandas()["offset"].tolist() == [2, 3, 9]
    assert pl.DataFrame(ours)["offset"].to_list() == [2, 3, 9]
    assert duckdb.sql('select "offset" from ours order by 1').fetchall() == [(2,), (3,), (9,)]
    batch._delivery.keep([(0, 30)])


@with_readings
async def test_nothing_is_copied_on_the_way_from_the_socket(client: pydanube.Client, batch: MessageBatch) -> None:
    payloads = batch.arrow.column("payload")
    theirs = pa.record_batch(batch).column("payload")
    assert [each.address for each in theirs.buffers() if each] == [each.address for each in payloads.buffers() if each]


@with_readings
async def test_a_fetched_range_is_a_table_for_all_of_them(client: pydanube.Client, batch: MessageBatch) -> None:
    fetched = await client.fetch(TOPIC, 5, 25).table()
    assert fetched.to_pandas()["offset"].tolist() == list(range(5, 25))
    frame: Any = pl.from_arrow(fetched)
    assert frame["offset"].to_list() == list(range(5, 25))
    assert duckdb.sql('select min("offset"), max("offset") from fetched').fetchone() == (5, 24)
