"""DataFrames into topics, exactly once, on real Spark; with processes that are killed where it hurts."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from tests.spark.places import Place, numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def register_dying(spark: SparkSession, flags: Path) -> None:
    """`format("dying")`: as danube, but whoever comes to a step for which there is a flag is killed there, once.

    Classes are made here, so that workers get them by value: tests are not installed.
    """
    from pydanube.spark.sink import DanubeStreamWriter, SinkOptions
    from pydanube.spark.source import DanubeSource

    directory = str(flags)

    class DyingWriter(DanubeStreamWriter):
        def step(self, name: str) -> None:
            flag = os.path.join(directory, name.replace(" ", "_"))
            try:
                os.remove(flag)
            except FileNotFoundError:
                return
            os.kill(os.getpid(), signal.SIGKILL)

    class DyingSource(DanubeSource):
        @classmethod
        def name(cls) -> str:
            return "dying"

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:
            return DyingWriter(SinkOptions.parse(dict(self.options), schema))

    spark.dataSource.register(DyingSource)


def test_a_stream_into_a_topic_is_complete_and_without_repetition_wherever_it_is_killed(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    source, target = place.new_topic("in"), place.new_topic("out")
    flags = tmp_path / "flags"
    flags.mkdir()
    register_dying(spark, flags)
    checkpoint = tmp_path / "checkpoint"
    sent: list[bytes] = []

    def run(partitions: int, count: int = 200) -> None:
        if count:
            more = numbers(len(sent), len(sent) + count)
            place.send(source, more, keys=["a", "b", "c"])
            sent.extend(more)
        frame = (
            spark.readStream.format("danube")
            .options(**place.options(source, startingOffsets="earliest"))
            .load()
            # Another number of partitions is another order of rows, and other rows in every task.
            .repartition(partitions, F.rand())
            .select("payload", "routing_key", "attributes")
        )
        query = (
            frame.writeStream.format("dying")
            .options(**{"service.url": place.url, "topic": target, "batchRows": "40"})
            .option("checkpointLocation", str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        assert query.awaitTermination(500)

    for step in ("stage", "stage_rows", "staged"):  # a task dies and is tried again, before, in the middle and after
        (flags / step).touch()
    # The driver's part dies: before the commit, and in the middle of sending. All its steps: test_staging.py.
    for step, partitions in (("commit", 2), ("send", 4)):
        (flags / step).touch()
        with pytest.raises(PySparkException):
            run(partitions, count=0 if sent else 200)
        assert not list(flags.iterdir())
    run(3, count=0)
    # Committed, and killed before Spark could note that: the batch comes again, and then a new one.
    for name in ("0", ".0.crc"):
        (checkpoint / "commits" / name).unlink()
    run(2)
    table = place.table(target)
    assert Counter(table.column("payload").to_pylist()) == Counter(sent)
    keys = dict(zip(table.column("payload").to_pylist(), table.column("routing_key").to_pylist(), strict=True))
    assert keys[b"0"] == "a" and keys[b"2"] == "c"
    assert dict(table.column("attributes")[0].as_py()) != {}
    assert not list((checkpoint / "danube-sink").rglob("*.rows"))


def test_a_table_is_written_with_keys_to_partitions_and_to_the_topics_it_names(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    one, parted = place.new_topic("one"), place.new_topic("parted", partitions=2)
    rows = [(one if n % 2 else parted, f"k{n % 5}", f"text {n}", {"n": str(n)}) for n in range(100)]
    frame = spark.createDataFrame(
        rows, "target string, key string, value string, headers map<string,string>"
    ).repartition(3)
    options = {"service.url": place.url, "topicColumn": "target", "staging": str(tmp_path), "writeId": "import-1"}
    for _ in range(2):  # with a name, the same write again changes nothing
        frame.write.format("danube").options(**options).mode("append").save()
    expected = {n for n in range(100) if n % 2}
    assert {int(text.split()[1]) for text in place.payloads(one)} == expected
    assert len(place.payloads(one)) == 50
    seen: dict[str, int] = {}
    for part in range(2):
        for row in place.table(f"{parted}-part-{part}").to_pylist():
            assert dict(row["attributes"])["n"] == row["payload"].decode().split()[1]
            assert seen.setdefault(row["routing_key"], part) == part
    assert sum(len(place.payloads(f"{parted}-part-{part}")) for part in range(2)) == 50
    wrong = spark.range(1).selectExpr("id as payload")
    with pytest.raises(PySparkException, match="cast it first"):
        wrong.write.format("danube").options(**place.options(one)).mode("append").save()
