"""Measures the data pipeline beside what Spark can do at best here: the same rows, from memory or from its own reader.

    make bench-spark            1,000,000 messages of 200 B; ROWS=… for another number

Every line has its ceiling, measured in the same run; ratios travel between machines, rates do not.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema

import pydanube
import pydanube.spark
from pydanube.client.client import Client
from pydanube.config import StorageConfig
from pydanube.core.tiers import TierConfig
from pydanube.log.batch import columns_of, encode
from pydanube.spark.options import COLUMNS
from pydanube.spark.rows import arrow_schema
from pydanube.spark.session import session
from pydanube.testing.brokers import TestBroker

ROWS = int(os.environ.get("ROWS", "1000000"))
SIZE = 200
PER_BATCH = 10_000
TOPIC = "/default/bench"
BEST_OF = 3


def memory_source(rows: int, parts: int) -> type[DataSource]:
    """The fastest Python source there can be: it yields batches that it has already."""
    schema = arrow_schema(COLUMNS)

    def one_batch() -> pa.RecordBatch:
        count = PER_BATCH
        columns = {
            "topic": pa.repeat(pa.scalar(TOPIC), count),
            "offset": pa.array(np.arange(count, dtype=np.int64)),
            "publish_time": pa.array(np.arange(count), schema.field("publish_time").type),
            "producer_name": pa.repeat(pa.scalar("bench"), count),
            "routing_key": pa.nulls(count, pa.string()),
            "schema_id": pa.nulls(count, pa.int64()),
            "schema_version": pa.nulls(count, pa.int32()),
            "attributes": pa.array([[]] * count, schema.field("attributes").type),
            "payload": pa.repeat(pa.scalar(b"x" * SIZE, pa.binary()), count),
        }
        return pa.RecordBatch.from_arrays([columns[name] for name in COLUMNS], schema=schema)

    class Reader(DataSourceReader):
        def partitions(self) -> list[InputPartition]:
            return [InputPartition(number) for number in range(parts)]

        def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
            batch = one_batch()
            for _ in range(rows // parts // PER_BATCH):
                yield batch

    class Memory(DataSource):
        @classmethod
        def name(cls) -> str:
            return "memory_rows"

        def schema(self) -> object:
            return from_arrow_schema(schema)

        def reader(self, schema: object) -> DataSourceReader:
            return Reader()

    return Memory


async def fill(client: Client, rows: int) -> None:
    random = np.random.default_rng(1)
    async with client.publisher(TOPIC, "bench") as publisher:
        for _ in range(rows // PER_BATCH):
            text = random.bytes(SIZE // 2 * PER_BATCH).hex().encode()
            payloads = [text[SIZE * n : SIZE * (n + 1)] for n in range(PER_BATCH)]
            batch = encode(columns_of(payloads, bytes(8 * PER_BATCH), producer_name="bench"), topic=TOPIC)
            await publisher.send(batch)


def seconds(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(BEST_OF):
        began = perf_counter()
        work()
        best = min(best, perf_counter() - began)
    return best


def to_nowhere(frame: DataFrame) -> Callable[[], object]:
    return lambda: frame.write.format("noop").mode("overwrite").save()


def line(what: str, taken: float, ceiling: float | None, rows: int = ROWS) -> None:
    rate = f"{rows / taken:>12,.0f} rows/s"
    ratio = f"{ceiling / taken:>6.0%} of {rows / ceiling:,.0f}" if ceiling is not None else ""
    print(f"{what:<44}{rate}   {ratio}", flush=True)


def measure(spark: SparkSession, broker: TestBroker, directory: Path) -> None:
    options = {"service.url": broker.url, "topic": TOPIC, "minPartitions": "2"}
    spark.dataSource.register(memory_source(ROWS, 2))
    memory = seconds(to_nowhere(spark.read.format("memory_rows").load()))
    line("ceiling: a Python source from memory", memory, None)
    tail = seconds(to_nowhere(spark.read.format("danube").options(**options).load()))
    line("source, live tail from the broker", tail, memory)
    upload(broker)
    files = [str(path) for path in (directory / "objects").rglob("data-*.parquet")]
    cloud = seconds(to_nowhere(spark.read.format("danube").options(**options).load()))
    line("source, from objects", cloud, memory)
    columns = [name for name in COLUMNS if name != "topic"]
    native = seconds(to_nowhere(spark.read.parquet(*files).select(*columns)))
    line("ceiling: spark.read.parquet of the objects", native, None)
    fast = seconds(to_nowhere(pydanube.spark.history(spark, TOPIC, service_url=broker.url)))
    line("history()", fast, native)
    rows = ROWS // 2
    frame = spark.range(rows).selectExpr("cast(repeat('x', 100) as binary) as payload", "cast(id as string) as key")
    began = perf_counter()
    target = {"service.url": broker.url, "topic": "/default/written", "staging": str(directory / "staging")}
    frame.write.format("danube").options(**target).mode("append").save()
    line("sink, rows of 100 B", perf_counter() - began, None, rows)


def upload(broker: TestBroker) -> None:
    async def now() -> None:
        assert broker._broker is not None and broker._broker.cloud is not None
        tiering = broker._broker.cloud.tiering
        for carried in tiering.topics:
            while carried.tier.waiting(carried.log) is not None:
                await tiering.upload_all(carried)

    assert broker._thread is not None
    broker._thread.call(now())


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="danube-bench-") as name:
        directory = Path(name)
        storage = StorageConfig(url=f"file://{directory}/objects", tier=TierConfig(upload_seconds=1e9))
        with TestBroker(directory / "broker", storage=storage) as broker:
            assert broker._thread is not None

            async def prepare() -> None:
                async with pydanube.connect(broker.url) as client:
                    await client.create_topic(TOPIC)
                    await fill(client, ROWS)

            broker._thread.call(prepare())
            spark = session("bench", master="local[2]", conf={"spark.log.level": "ERROR"})
            try:
                measure(spark, broker, directory)
            finally:
                spark.stop()


if __name__ == "__main__":
    main()
