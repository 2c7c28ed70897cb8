"""`format("danube")` reads each message once, whatever tier it is in: finished queries and streams, on real Spark."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import pydanube.spark
from pydanube.spark.source import parallelism_of
from tests.spark.places import Place, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def read(spark: SparkSession, options: dict[str, str]) -> DataFrame:
    return spark.read.format("danube").options(**options).load()


class Collected:
    """The rows of a stream, batch by batch, in the order of offsets."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, bytes]]] = []
        self.before: Callable[[int], None] = lambda number: None

    def __call__(self, frame: DataFrame, number: int) -> None:
        self.before(number)
        rows = frame.select("offset", "payload").collect()
        self.batches.append(sorted((row["offset"], bytes(row["payload"])) for row in rows))

    @property
    def offsets(self) -> list[int]:
        return [offset for batch in self.batches for offset, _ in batch]

    @property
    def payloads(self) -> list[bytes]:
        return [payload for batch in self.batches for _, payload in batch]


def run_stream(spark: SparkSession, options: dict[str, str], checkpoint: str, into: Collected) -> Any:
    """Reads what is there now; returns Spark's report of the last batch that had rows."""
    query = (
        spark.readStream.format("danube")
        .options(**options)
        .load()
        .writeStream.foreachBatch(into)
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(500)
    return query.lastProgress


def sentence(caught: pytest.ExceptionInfo[BaseException]) -> str:
    return str(caught.value)


# --- finished queries -----------------------------------------------------------------------------------


def test_a_batch_reads_objects_and_the_live_tail_as_one_table(spark: SparkSession, place: Place) -> None:
    topic = place.new_topic("both")
    place.send(topic, numbers(0, 300), keys=["a", "b", None])
    place.upload(topic)
    place.send(topic, numbers(300, 400))
    frame = read(spark, place.options(topic))
    rows = frame.orderBy("offset").collect()
    truth = place.table(topic).to_pylist()
    assert [row["offset"] for row in rows] == [each["offset"] for each in truth] == list(range(400))
    assert [bytes(row["payload"]) for row in rows] == [each["payload"] for each in truth]
    assert [row["routing_key"] for row in rows] == [each["routing_key"] for each in truth]
    assert [row["attributes"] for row in rows] == [dict(each["attributes"]) for each in truth]
    assert [row["publish_time"].timestamp() for row in rows] == [each["publish_time"].timestamp() for each in truth]
    assert {row["topic"] for row in rows} == {topic}
    assert frame.columns == [
        "topic", "offset", "publish_time", "producer_name", "routing_key", "schema_id", "schema_version", "attributes",
        "payload",
    ]  # fmt: skip

    # Offsets, times and columns choose.
    part = read(spark, place.options(topic, startingOffsets=f'{{"{topic}": 290}}', endingOffsets=f'{{"{topic}": 310}}'))
    assert sorted(row[0] for row in part.select("offset").collect()) == list(range(290, 310))
    middle = truth[150]["publish_time"]
    since = read(spark, place.options(topic, startingTimestamp=middle.isoformat(), columns="publish_time,offset,epoch"))
    assert since.columns == ["publish_time", "offset", "epoch"]
    assert since.agg(F.min("offset")).first()[0] <= 150  # type: ignore[index]
    assert since.count() == 400 - since.agg(F.min("offset")).first()[0]  # type: ignore[index]

    # Of a DataFrame that is read in many ways each gets what it asks for.
    wanted = "offset >= 100 and offset < 350 and routing_key = 'a'"
    right = [n for n in range(100, 300) if n % 3 == 0]
    assert sorted(row[0] for row in frame.where(wanted).select("offset").collect()) == right
    assert frame.count() == 400
    assert frame.where("offset < 10").union(frame.where("offset >= 395")).count() == 15

    # With pushFilters they reach the plan, and what Spark does not repeat is right.
    filtered = read(spark, place.options(topic, pushFilters="true")).where(wanted)
    assert sorted(row[0] for row in filtered.select("offset").collect()) == right
    said = StringIO()
    with redirect_stdout(said):
        filtered.explain("formatted")
    assert "PushedFilters: [GreaterThanOrEqual(offset,100), LessThan(offset,350)]" in said.getvalue()

    # With every broker stopped, uploaded messages are read all the same.
    place.stop()
    try:
        offline = {"storage.url": place.storage_url, "topic": topic}
        assert read(spark, offline).agg(F.count("*"), F.max("offset")).first()[:] == (300, 299)  # type: ignore[index]
        with_both = {**offline, "service.url": "danube://127.0.0.1:9", "timeout": "5"}
        assert read(spark, with_both).count() == 300
    finally:
        place.start()


def test_partitions_of_a_topic_and_patterns_expand(spark: SparkSession, place: Place) -> None:
    topic = place.new_topic("parts", partitions=3)
    place.send(topic, numbers(0, 90))
    place.upload(topic)
    place.send(topic, numbers(90, 120))
    frame = read(spark, place.options(topic, minPartitions="6"))
    assert frame.rdd.getNumPartitions() >= 6
    assert sorted(int(row[0]) for row in frame.select("payload").collect()) == list(range(120))
    assert {row[0] for row in frame.select("topic").distinct().collect()} == {f"{topic}-part-{n}" for n in range(3)}
    pattern = {"service.url": place.url, "subscribePattern": f"{topic}-part-[01]"}
    assert {row[0] for row in read(spark, pattern).select("topic").distinct().collect()} == {
        f"{topic}-part-0",
        f"{topic}-part-1",
    }


@pytest.mark.long
def test_spark_finds_the_source_by_itself_where_it_is_installed(spark: SparkSession, place: Place) -> None:
    topic = place.new_topic("found")
    place.send(topic, numbers(0, 10))
    fresh = spark.newSession()  # in which nobody has registered anything, and filters are Spark's
    assert fresh.conf.get("spark.sql.python.filterPushdown.enabled") == "false"
    assert read(fresh, place.options(topic)).where("offset < 4").count() == 4


def test_a_topic_is_a_table_of_sql_with_its_history_and_its_live_end(spark: SparkSession, place: Place) -> None:
    topic = place.new_topic("sql")
    place.send(topic, [os.urandom(50_000) for _ in range(200)])
    place.upload(topic)
    place.send(topic, numbers(0, 5), keys=["late"])
    spark.sql(f"CREATE TABLE in_sql USING danube OPTIONS ('service.url' '{place.url}', topic '{topic}')")
    try:
        assert spark.sql("SELECT count(*), max(offset) FROM in_sql").first()[:] == (205, 204)  # type: ignore[index]
        late = spark.sql("SELECT offset FROM in_sql WHERE offset >= 202 AND routing_key = 'late'")
        assert sorted(row[0] for row in late.collect()) == [202, 203, 204]
        # There is enough for each of the session's two cores.
        assert parallelism_of(spark) == spark.sparkContext.defaultParallelism == 2
        assert spark.table("in_sql").rdd.getNumPartitions() == 3  # two of objects, and the tail's in one of their own
    finally:
        spark.sql("DROP TABLE in_sql")


def test_bad_input_is_a_sentence(spark: SparkSession, place: Place) -> None:
    """That people see it; which sentence it is, and when: test_options.py and test_readers.py."""
    topic = place.new_topic("bad")
    place.send(topic, numbers(0, 100))
    place.upload(topic)
    with pytest.raises(PySparkException, match="did you mean startingOffsets"):
        read(spark, place.options(topic, startingOffset="earliest"))
    with pytest.raises(PySparkException, match="unable to find the topic /default/nobody"):
        read(spark, place.options("/default/nobody")).count()
    [path] = place.objects(topic)
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(PySparkException, match=f"{topic}.*checksum"):
        read(spark, place.options(topic)).count()
    path.write_bytes(whole)


# --- streams --------------------------------------------------------------------------------------------


def test_a_stream_reads_each_message_once_while_its_range_changes_tier(
    spark: SparkSession, place: Place, checkpoint: str
) -> None:
    topic = place.new_topic("stream")
    place.send(topic, numbers(0, 100))
    options = place.options(topic, startingOffsets="earliest", maxOffsetsPerTrigger="40", **{"group.id": "spark-query"})
    seen = Collected()

    def meanwhile(number: int) -> None:
        # After Spark has planned the batch and before it is read: the tail becomes objects, and they are merged.
        if number == 1:
            place.upload(topic)
        if number == 2:
            for each in range(9):
                place.send(topic, numbers(100 + each, 101 + each))
                place.upload(topic)
            place.upload(topic, merge=True)

    seen.before = meanwhile
    run_stream(spark, options, checkpoint, seen)
    assert [len(batch) for batch in seen.batches] == [40, 40, 20]
    assert seen.offsets == list(range(100))
    assert seen.payloads == numbers(0, 100)

    # Restarted from its checkpoint it goes on where it was, and the broker shows it as a subscription.
    place.send(topic, numbers(109, 150))
    progress = run_stream(spark, options, checkpoint, seen)
    assert seen.offsets == list(range(150))
    assert progress["sources"][0]["description"]
    lag = place.asking(lambda client: client.lag(topic, "spark-query"))
    assert lag.cursor is not None and lag.messages <= 50


def test_history_is_read_by_sparks_own_reader_and_is_the_same(spark: SparkSession, place: Place) -> None:
    topic = place.new_topic("fast.v1")
    for first in (0, 100, 200):
        place.send(topic, numbers(first, first + 100), keys=["k"])
        place.upload(topic)
    place.send(topic, numbers(300, 310))
    options: dict[str, Any] = {"service_url": place.url}
    frame = pydanube.spark.history(spark, topic, **options)
    ours = read(spark, place.options(topic, endingOffsets=f'{{"{topic}": 300}}'))
    assert frame.columns == ours.columns
    columns = [name for name in ours.columns if name != "attributes"]  # Spark does not compare maps
    assert frame.select(columns).exceptAll(ours.select(columns)).count() == 0
    assert ours.select(columns).exceptAll(frame.select(columns)).count() == 0
    assert "BatchScan" not in frame._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    some = pydanube.spark.history(spark, topic, startingOffsets=f'{{"{topic}": 150}}', columns="offset", **options)
    assert sorted(row[0] for row in some.collect()) == list(range(150, 300))
    place.stop()
    try:
        assert pydanube.spark.history(spark, topic, storage_url=place.storage_url).count() == 300
    finally:
        place.start()
