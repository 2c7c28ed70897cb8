"""The jobs of the data pipeline, on real Spark; DuckDB checks their results, and what they must find is planted."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import pydanube
from pydanube.client.client import Client
from pydanube.core.history.tiers import Descriptor
from pydanube.errors import DanubeError
from pydanube.formats.batch import columns_of, encode
from pydanube.pipeline import audit, compact, lake, replay, stats
from pydanube.pipeline.iceberg import QUERY
from pydanube.pipeline.report import QueryWatch
from pydanube.pipeline.run import reason
from pydanube.spark.options import CONNECTION_OPTIONS, BrokerOptions, QueryOptions
from pydanube.spark.plan import TaskShare, layout
from pydanube.spark.reach import Reach
from pydanube.spark.rows import Wanted, read_share
from tests.e2e.processes import until
from tests.spark.places import Place, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def quiet() -> QueryWatch:
    return QueryWatch("test", as_json=True, stream=io.StringIO())


def order(number: int, **more: Any) -> bytes:
    return json.dumps({"id": f"o-{number}", "amount": number / 4, "at": "2026-11-15T10:00:00Z", **more}).encode()


def copies(place: Place, topic: str, payloads: list[bytes], times: int, *, taken_over: bool = True) -> None:
    """The same batch, from the same producer, stored more than once: as a takeover that forgot a session could."""

    async def publish(client: Client) -> None:
        rows = columns_of(payloads, b"\1" * 8 * len(payloads), producer_name="twice")
        async with client.publisher(topic, "twice") as publisher:
            await publisher.send(encode(rows, topic=topic))

    for number in range(times):
        if number and taken_over:  # in another epoch, therefore
            place.stop()
            place.start()
        place.asking(publish)


@pytest.mark.parametrize("form", ["parquet", "iceberg"])
def test_a_topic_becomes_tables_with_every_order_once(
    spark: SparkSession, place: Place, tmp_path: Path, form: str
) -> None:
    topic = place.new_topic("orders")
    good = [order(number) for number in range(60)]
    bad = [b"not json", b"\xff\xfe", b'{"id": "o-x", "amount": "many"}', b'{"amount": 1.0}']
    place.send(topic, [*good[:40], *bad, good[0]])  # the last one is an order that was sent twice
    place.upload(topic)
    place.send(topic, good[40:])
    copies(place, topic, [order(60), order(61)], 2)
    settings = {
        "service.url": place.url,
        "topic": topic,
        "name": "orders",
        "target": str(tmp_path / "lake"),
        "format": form,
        "schema": "id string, amount float, at timestamp",
        "key": ["id"],
        "time": "at",
        "batch_rows": 40,
        "rows_per_file": 10,
    }
    report = lake.run(spark, settings, quiet())
    assert report.values["messages"] == 40 + 5 + 20 + 4
    assert (report.values["typed_rows"], report.values["quarantine_rows"]) == (62, 4)

    largest = (
        f"select max(n) from (select count(*) n from {_duck(str(tmp_path / 'lake'), 'orders_raw', form)} group by f)"
    )
    assert duckdb.sql(largest.replace("hive_", "filename='f', hive_")).fetchone() == (10,)

    # More comes, with one column more and a wider one; the last batch was written, but Spark did not know. The tables
    # are of a version that did not say whose batches they have.
    _forget_queries(settings["target"], form)
    place.send(topic, [order(number, amount=number + 0.125, country="DE") for number in range(62, 80)])
    newest = max(
        (Path(settings["target"]) / "_checkpoint-orders" / "commits").glob("[0-9]*"), key=lambda p: int(p.name)
    )
    for file in (newest, newest.with_name(f".{newest.name}.crc")):
        file.unlink()
    settings["schema"] = "id string not null, amount double, at timestamp, country string"
    old = {path: path.read_bytes() for path in (tmp_path / "lake").rglob("*.parquet") if _batch_of(path) == 0}
    report = lake.run(spark, settings, quiet())
    assert old and all(path.read_bytes() == data for path, data in old.items()), "the old files stay as they were"
    assert (report.values["typed_rows"], report.values["quarantine_rows"]) == (80, 4)

    # What DuckDB finds is what was sent.
    tables = {name: _duck(settings["target"], f"orders_{name}", form) for name in ("raw", "typed", "quarantine")}
    sent = duckdb.sql(f"select count(*), count(distinct payload) from {tables['raw']}").fetchone()
    assert sent == (len([*good, *bad]) + 1 + 2 + 18, len([*good, *bad]) + 2 + 18)
    found = duckdb.sql(f"select id, amount, country from {tables['typed']} order by id").fetchall()
    expected = [(f"o-{n}", n / 4 if n < 62 else n + 0.125, None if n < 62 else "DE") for n in range(80)]
    assert _hash(found) == _hash(sorted(expected))
    reasons = dict(duckdb.sql(f"select reason, count(*) from {tables['quarantine']} group by 1").fetchall())
    assert reasons == {
        "the payload is not JSON": 1,
        "the payload is not UTF-8": 1,
        "a value does not have the type that the schema says": 1,
        "id is missing": 1,
    }
    assert duckdb.sql(f"select distinct date from {tables['typed']}").fetchall()[0][0].isoformat() == "2026-11-15"

    # The checkpoint is lost: a new one counts from 0 again, and the tables could not tell what they have.
    shutil.rmtree(tmp_path / "lake" / "_checkpoint-orders")
    with pytest.raises(PySparkException) as caught:
        lake.run(spark, settings, quiet())
    assert "was written with another checkpoint" in reason(str(caught.value))
    assert duckdb.sql(f"select count(*) from {_duck(settings['target'], 'orders_raw', form)}").fetchone() == (sent[0],)


def _forget_queries(target: str, form: str) -> None:
    if form == "parquet":
        for file in Path(target).glob("*/_query"):
            file.unlink()
        return
    for name in ("raw", "typed", "quarantine"):
        with _catalog(target).load_table(f"danube.orders_{name}").transaction() as change:
            change.remove_properties(QUERY)


def test_a_lake_follows_a_topic_from_its_beginning_without_a_seam_and_takes_what_is_late(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    topic = place.new_topic("followed")
    place.send(topic, [order(number) for number in range(50)])
    place.upload(topic)
    settings = {
        **{"service.url": place.url, "topic": topic, "name": "followed", "target": str(tmp_path / "lake")},
        **{"schema": "id string, amount double, at timestamp", "time": "at", "follow_seconds": 1},
    }
    parsed = lake.Lake.parse(settings)
    writer = lake.Writer(parsed)
    query = lake.start(spark, parsed, writer)
    try:

        def have(count: int) -> bool:  # not as Spark counts: of what its own reader took, it counts none
            assert query.isActive, query.exception()
            return sum(each.messages for each in list(writer.tallies.values())) >= count

        until(lambda: have(50), "history is there", seconds=120)
        place.send(topic, [*(order(number) for number in range(50, 79)), order(79, at="2026-10-31T10:00:00Z")])
        until(lambda: have(80), "what came is there", seconds=120)
    finally:
        query.stop()
    table = _duck(settings["target"], "followed_typed", "parquet")
    found = duckdb.sql(f"select id, date from {table} order by _offset").fetchall()
    assert [row[0] for row in found] == [f"o-{number}" for number in range(80)]
    assert [row[1].isoformat() for row in found[78:]] == ["2026-11-15", "2026-10-31"]


def _batch_of(path: Path) -> int:
    """Of a file, by its directory."""
    [number] = [int(part[6:]) for part in path.parts if re.fullmatch(r"batch[=-]\d+", part)]
    return number


def _duck(target: str, table: str, form: str) -> str:
    """The table, as DuckDB reads it."""
    if form == "parquet":
        return f"read_parquet('{target}/{table}/batch=*/date=*/*.parquet', union_by_name=true, hive_partitioning=true)"
    catalog = _catalog(target)
    scan = catalog.load_table(f"danube.{table}").scan()
    said = [snapshot.summary["danube.batch"] for snapshot in catalog.load_table(f"danube.{table}").snapshots()]
    assert said == [str(batch) for batch in sorted({int(each) for each in said})], "one snapshot for each batch"
    names = [task.file.file_path.removeprefix("file://") for task in scan.plan_files()]
    return f"read_parquet({names!r}, union_by_name=true, hive_partitioning=false)"


def _catalog(target: str) -> Any:
    from pyiceberg.catalog import load_catalog

    return load_catalog("danube", type="sql", uri=f"sqlite:///{target}/catalog.sqlite", warehouse=f"file://{target}")


def _hash(rows: list[tuple[Any, ...]]) -> str:
    return hashlib.sha256(repr(rows).encode()).hexdigest()


def test_an_audit_proves_a_topic_and_names_what_is_wrong(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("audited")
    for first in (0, 50, 100):
        place.send(topic, [b"%d" % number for number in range(first, first + 50)])
        place.upload(topic)
    place.send(topic, [b"tail"])
    receipts = tmp_path / "receipts.jsonl"

    def acknowledge(*offsets: tuple[int, bytes]) -> None:
        lines = [{"topic": topic, "offset": at, "sha256": hashlib.sha256(text).hexdigest()} for at, text in offsets]
        receipts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    settings = {"service.url": place.url, "topic": topic, "receipts": str(receipts)}
    acknowledge((0, b"0"), (149, b"149"), (150, b"tail"))
    report = audit.run(spark, settings, quiet())
    assert report.problems == []
    assert report.values == {"topics": 1, "objects": 3, "messages": 151, "erased": 0, "voids": 0, "receipts": 3}

    # Receipts of messages that are not there, or are another; and a message that is there twice.
    copies(place, topic, [b"again"], 2, taken_over=False)
    acknowledge((7, b"seven"), (500, b"never"))
    problems = "\n".join(audit.run(spark, settings, quiet()).problems)
    assert "offset 7 holds another payload" in problems
    assert "offset 500 was acknowledged and is not there" in problems
    assert "is there 2 times, at offsets 151, 152" in problems

    # A bit that flipped in an object.
    path = place.objects(topic)[0]
    whole = path.read_bytes()
    path.write_bytes(whole[:200] + bytes([whole[200] ^ 4]) + whole[201:])
    [problem] = audit.run(spark, {**settings, "service.url": place.url}, quiet()).problems
    assert path.name in problem and "checksum" in problem
    path.write_bytes(whole)

    # A gap, and an overlap, in what the store says of itself.
    offline = {"storage.url": place.storage_url, "topic": topic}
    snapshot = max((place.directory / "objects").joinpath(topic[1:]).glob("_snapshot-*"))
    said = json.loads(snapshot.read_text())
    snapshot.write_text(json.dumps({**said, "objects": [said["objects"][0], said["objects"][2]]}))
    [problem] = audit.run(spark, offline, quiet()).problems
    assert "offsets 50 to 99 are in no object" in problem
    again = Descriptor.from_json({**said["objects"][1], "start_offset": 40})
    snapshot.write_text(json.dumps({**said, "objects": [said["objects"][0], again.to_json(), said["objects"][2]]}))
    [problem] = audit.run(spark, offline, quiet()).problems
    assert "overlaps" in problem
    snapshot.write_text(json.dumps(said))


class Consuming:
    """A consumer that has five messages when it is made, and the rest when it is asked."""

    def __init__(self, place: Place, topic: str) -> None:
        self._stack = contextlib.ExitStack()
        client = self._stack.enter_context(pydanube.blocking.connect(place.url))
        self._consumer = self._stack.enter_context(
            client.consumer(topic, subscription="meanwhile", start=0, window_messages=5)
        )
        self._seen = [self._take() for _ in range(5)]

    def _take(self) -> bytes:
        message = self._consumer.receive(timeout=60)
        message.ack()
        return message.payload

    def rest(self) -> list[bytes]:
        with self._stack:
            return [*self._seen, *(self._take() for _ in range(55))]


def test_compaction_makes_few_objects_of_many_and_readers_notice_nothing(spark: SparkSession, place: Place) -> None:
    topic = place.new_topic("compacted")
    for first in range(0, 60, 10):
        place.send(topic, numbers(first, first + 10))
        place.upload(topic)
    with Reach(BrokerOptions.of(QueryOptions({"service.url": place.url}, CONNECTION_OPTIONS))) as reach:
        [state] = reach.states([topic])
        share = TaskShare(tuple(layout(state, 0, 60).pieces))
        reading = read_share(reach, share, Wanted(("payload",), urls={topic: place.storage_url}))
        seen = next(reading).column("payload").to_pylist()
        consuming = Consuming(place, topic)
        report = compact.run(spark, {"service.url": place.url, "topic": topic}, quiet())
        assert report.problems == []
        assert report.values == {"objects_before": 6, "objects_after": 1, "swapped": 6, "left_alone": 0}
        for path in place.objects(topic):  # as the owner's sweep will
            if not place.is_described(topic, path.name):
                path.unlink()
        for batch in reading:
            seen += batch.column("payload").to_pylist()
        assert seen == place.payloads(topic) == numbers(0, 60)
        assert consuming.rest() == numbers(0, 60)
    offline = spark.read.format("danube").options(**{"storage.url": place.storage_url, "topic": topic}).load()
    assert offline.count() == 60
    assert compact.run(spark, {"service.url": place.url, "topic": topic}, quiet()).values["swapped"] == 0


def test_the_owner_swaps_nothing_that_it_does_not_have_or_that_is_not_the_same(place: Place) -> None:
    topic = place.new_topic("swapped")
    for first in range(0, 40, 10):
        place.send(topic, numbers(first, first + 10))
        place.upload(topic)
    one, two, three, _ = place.asking(lambda client: client.describe_storage(topic)).objects
    with Reach(BrokerOptions.of(QueryOptions({"service.url": place.url}, CONNECTION_OPTIONS))) as reach:
        made = reach.call(compact.write_group(reach, topic, place.storage_url, [one, two]))

    def swap(old: list[Descriptor], new: Descriptor) -> None:
        place.asking(lambda client: client.swap_objects(topic, [each.object_id for each in old], new))

    for old, new in (
        ([two, three], made),  # other offsets
        ([one, three], made),  # no neighbours
        ([one], made),
        ([one, two], replace(made, object_id="data-0-19-99.parquet")),  # an epoch to come
        ([one, two], replace(made, object_id="data-0-19-1-5.parquet")),  # not in the store
        ([one, two], replace(made, footer_crc=made.footer_crc ^ 1)),
        ([one, two], replace(made, size=made.size + 1)),
    ):
        with pytest.raises(DanubeError):
            swap(old, new)
    assert len(place.asking(lambda client: client.describe_storage(topic)).objects) == 4
    swap([one, two], made)
    assert len(place.asking(lambda client: client.describe_storage(topic)).objects) == 3
    with pytest.raises(DanubeError):
        swap([one, two], made)
    assert place.payloads(topic) == numbers(0, 40)


def test_a_replay_is_made_once_into_a_topic_and_again_into_files(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    source, target = place.new_topic("played"), place.new_topic("replayed")
    place.send(source, [order(number) for number in range(100)], keys=["a", "b"])
    settings = {
        "service.url": place.url,
        "topic": source,
        "start": {source: 10},
        "end": {source: 60},
        "filter": "routing_key = 'a' and cast(get_json_object(text, '$.amount') as double) < 10",
        "to_topic": target,
        "staging": str(tmp_path / "staging"),
        "rows_per_second": 1000,
    }
    for _ in range(2):
        replay.run(spark, settings, quiet())
    rows = place.table(target).to_pylist()
    assert sorted(row["payload"] for row in rows) == sorted(order(number) for number in range(10, 40, 2))
    assert dict(rows[0]["attributes"])["x-replayed-topic"] == source
    said = {row["payload"]: (row["publish_time"], row["producer_name"], row["routing_key"]) for row in rows}
    truth = {row["payload"]: row for row in place.table(source).to_pylist()}
    for payload, carried in said.items():
        assert carried == tuple(truth[payload][name] for name in ("publish_time", "producer_name", "routing_key"))
    # A replay of the replay says where *it* came from.
    again = {**settings, "topic": target, "start": None, "end": None, "filter": None, "to_topic": place.new_topic("b")}
    replay.run(spark, again, quiet())
    found = place.table(again["to_topic"]).to_pylist()
    assert {dict(row["attributes"])["x-replayed-topic"] for row in found} == {target}
    assert sorted(row["publish_time"] for row in found) == sorted(row["publish_time"] for row in rows)
    file = {**settings, "to_topic": None, "to_file": str(tmp_path / "out"), "staging": None, "rows_per_second": None}
    assert replay.run(spark, file, quiet()).values["messages"] == 15

    truth = place.table(source)
    times = truth.column("publish_time").to_pylist()
    timed = {
        **{"service.url": place.url, "topic": source, "start_time": times[30].isoformat()},
        **{"end_time": times[70].isoformat(), "to_file": str(tmp_path / "timed"), "file_format": "parquet"},
    }
    replay.run(spark, timed, quiet())
    rows = duckdb.sql(f"select payload from read_parquet('{tmp_path}/timed/*.parquet') order by \"offset\"").fetchall()
    assert [row[0] for row in rows] == [order(n) for n in range(100) if times[30] <= times[n] < times[70]] and rows


def test_a_page_tells_what_happened_hour_by_hour(spark: SparkSession, place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("told")
    place.send(topic, numbers(0, 99), keys=["a", "a", "b"])

    async def bury(client: Client) -> None:
        async with client.producer(topic) as producer:
            await producer.send(b"dead", attributes={"x-original-topic": "/default/other"})

    place.asking(bury)
    page, file = tmp_path / "page.html", tmp_path / "hours.json"
    settings = {"service.url": place.url, "topic": topic, "page": str(page), "json": str(file), "top_keys": 1}
    report = stats.run(spark, settings, quiet())
    assert report.values["topics"][topic] == {"messages": 100, "bytes": sum(map(len, numbers(0, 99))) + 4}
    assert (report.values["dead_letters"], report.values["hours"]) == (1, len(json.loads(file.read_text())["hours"]))
    [key] = report.values["top_keys"]
    assert (key["routing_key"], key["messages"]) == ("a", 66)
    hours = json.loads(file.read_text())["hours"]
    assert sum(hour["messages"] for hour in hours) == 100
    for hour in hours:
        assert 0 <= hour["latency_p50_ms"] <= hour["latency_p95_ms"] <= hour["latency_p99_ms"] < 60_000
        assert 1 <= hour["keys"] <= 2
    assert "<svg" in page.read_text() and topic in page.read_text() and "1 dead letters" in page.read_text()
