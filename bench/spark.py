"""Measures the data pipeline beside what Spark can do at best here: the same rows, from memory or from its own reader.

    make bench-spark            1,000,000 messages of 200 B; ROWS=… for more, PARTS="write lake" for some of the parts

    read      the live tail, objects and history(), each in turn with its ceiling
    pressure  how long producers wait for receipts while a query reads the tail, and while it reads memory
    write     the sink
    now       AvailableNow in limited batches
    latency   from producer to the end of the batch, at 5,000 messages a second, with the default trigger
    lake      the job, on half of the rows and on all of them: its rate, and the memory of Spark and its workers
    before    the job and that of an earlier version, in turn: BEFORE=commit

What is compared takes turns, in another order each round, behind one round to get warm. Medians of five are of the
seconds of all processors per row, which a busy machine changes less than the clock's. Ratios travel between machines,
rates do not.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, sleep, time_ns
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.pandas.types import from_arrow_schema

import pydanube
import pydanube.spark
from pydanube.client.client import Client
from pydanube.config import StorageConfig
from pydanube.core.history.tiers import TierConfig
from pydanube.formats.batch import columns_of, encode
from pydanube.pipeline import lake
from pydanube.pipeline.report import QueryWatch
from pydanube.spark.options import COLUMNS
from pydanube.spark.rows import arrow_schema
from pydanube.spark.session import session
from pydanube.testing.brokers import TestBroker

ROWS = int(os.environ.get("ROWS", "1000000"))
SIZE = 200
PER_BATCH = 10_000
TOPIC = "/default/bench"
BEST_OF = 3
ROUNDS = int(os.environ.get("ROUNDS", "5"))
BEFORE = os.environ.get("BEFORE", "")
PARTS = os.environ.get("PARTS", "read pressure write now latency lake before").split()
PER_SECOND = 5_000
LATENCY_SECONDS = 20


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


def dropping_sink() -> type[DataSource]:
    """The fastest Python sink there can be: it takes batches and forgets them."""

    class Writer(DataSourceArrowWriter):
        def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
            for _ in iterator:
                pass
            return WriterCommitMessage()

    class Dropping(DataSource):
        @classmethod
        def name(cls) -> str:
            return "dropped_rows"

        def writer(self, schema: object, overwrite: bool) -> DataSourceArrowWriter:
            return Writer()

    return Dropping


Make = Callable[[int], list[bytes]]


def hexadecimal() -> Make:
    """Payloads that look like data: they compress, but not to nothing."""
    random = np.random.default_rng(1)

    def make(first: int) -> list[bytes]:
        text = random.bytes(SIZE // 2 * PER_BATCH).hex().encode()
        return [text[SIZE * n : SIZE * (n + 1)] for n in range(PER_BATCH)]

    return make


def orders(first: int) -> list[bytes]:
    pattern = b'{"id": "order-%d", "amount": %d.25, "country": "DE", "note": "' + b"x" * 100 + b'"}'
    return [pattern % (number, number % 1000) for number in range(first, first + PER_BATCH)]


async def fill(client: Client, topic: str, rows: int, make: Make) -> None:
    await client.create_topic(topic, exist_ok=True)
    async with client.publisher(topic, "bench") as publisher:
        for first in range(0, rows, PER_BATCH):
            now = np.full(PER_BATCH, time_ns() // 1000, np.int64).tobytes()
            await publisher.send(encode(columns_of(make(first), now, producer_name="bench"), topic=topic))


class Bench:
    """A broker, Spark, and what the parts need of both."""

    def __init__(self, spark: SparkSession, broker: TestBroker, directory: Path) -> None:
        self.spark = spark
        self.broker = broker
        self.directory = directory
        spark.dataSource.register(memory_source(ROWS, 2))
        spark.dataSource.register(dropping_sink())

    def fill(self, topic: str, rows: int, make: Make) -> None:
        async def work() -> None:
            async with pydanube.connect(self.broker.url) as client:
                await fill(client, topic, rows, make)

        assert self.broker._thread is not None
        self.broker._thread.call(work())

    def head(self, topic: str) -> int:
        async def ask() -> int:
            async with pydanube.connect(self.broker.url) as client:
                return (await client.describe_topic(topic)).head

        assert self.broker._thread is not None
        return int(self.broker._thread.call(ask()))

    def upload(self) -> None:
        async def now() -> None:
            assert self.broker._broker is not None and self.broker._broker.cloud is not None
            uploader = self.broker._broker.cloud.uploader
            for carried in uploader.topics:
                while carried.uploads.waiting(carried.log) is not None:
                    await uploader.upload_all(carried)

        assert self.broker._thread is not None
        self.broker._thread.call(now())

    def options(self, topic: str, **more: str) -> dict[str, str]:
        return {"service.url": self.broker.url, "topic": topic, **more}

    def frame(self, topic: str) -> DataFrame:
        return self.spark.read.format("danube").options(**self.options(topic, minPartitions="2")).load()


class Taken(NamedTuple):
    """Of the clock, and of all processors together, by this process and those it has started."""

    seconds: float
    cpu_seconds: float


def once(work: Callable[[], object]) -> Taken:
    cpu, began = cpu_seconds(), perf_counter()
    work()
    return Taken(perf_counter() - began, cpu_seconds() - cpu)


def best(work: Callable[[], object]) -> Taken:
    return min(once(work) for _ in range(BEST_OF))


def in_turn(works: Mapping[str, Callable[[], object]]) -> dict[str, Taken]:
    """The median of each by processor time, of rounds in which each has its turn."""
    order, found = list(works), {name: list[Taken]() for name in works}
    for number in range(ROUNDS + 1):
        random.Random(number).shuffle(order)
        for name in order:
            taken = once(works[name])
            if number:
                found[name].append(taken)
    return {name: sorted(each, key=lambda one: one.cpu_seconds)[len(each) // 2] for name, each in found.items()}


def to_nowhere(frame: DataFrame) -> Callable[[], object]:
    return lambda: frame.write.format("noop").mode("overwrite").save()


def line(what: str, taken: Taken, ceiling: Taken | None, rows: int = ROWS) -> None:
    rate = f"{rows / taken.seconds:>12,.0f} rows/s"
    cpu = f"{taken.cpu_seconds / rows * 1e6:>8.2f} µs of a core each"
    ratio = ""
    if ceiling is not None:
        by_cpu = ceiling.cpu_seconds / taken.cpu_seconds
        ratio = f"{ceiling.seconds / taken.seconds:>6.0%} of the ceiling, {by_cpu:.0%} by cpu"
    print(f"{what:<44}{rate}{cpu}   {ratio}", flush=True)


def read(bench: Bench) -> None:
    spark = bench.spark
    bench.fill(TOPIC, ROWS, hexadecimal())
    memory = to_nowhere(spark.read.format("memory_rows").load())
    found = in_turn({"memory": memory, "tail": to_nowhere(bench.frame(TOPIC))})
    line("ceiling: a Python source from memory", found["memory"], None)
    line("source, live tail from the broker", found["tail"], found["memory"])
    bench.upload()
    files = [str(path) for path in (bench.directory / "objects" / TOPIC[1:]).rglob("data-*.parquet")]
    columns = [name for name in COLUMNS if name != "topic"]
    history = pydanube.spark.history(spark, TOPIC, service_url=bench.broker.url)
    found = in_turn(
        {
            "memory": memory,
            "objects": to_nowhere(bench.frame(TOPIC)),
            "parquet": to_nowhere(spark.read.parquet(*files).select(*columns)),
            "history": to_nowhere(history),
        }
    )
    line("ceiling: a Python source from memory", found["memory"], None)
    line("source, from objects", found["objects"], found["memory"])
    line("ceiling: spark.read.parquet of the objects", found["parquet"], None)
    line("history()", found["history"], found["parquet"])


def pressure(bench: Bench) -> None:
    """One message at a time, as fast as receipts come, while a query runs again and again."""
    topic = "/default/pressed"
    bench.fill(topic, ROWS, hexadecimal())
    found = {}
    memory = bench.spark.read.format("memory_rows").load()
    for name, frame in (("memory", memory), ("tail", bench.frame(topic)), ("memory again", memory)):
        to_nowhere(frame)()
        with receipts(bench.broker.url) as waits:
            best(to_nowhere(frame))
        found[name] = float(np.percentile(waits, 99)) * 1000
        print(f"{'publish p99 while a query reads ' + name:<44}{found[name]:>12.2f} ms       {len(waits):,} receipts")
    calm = (found["memory"] + found["memory again"]) / 2
    print(f"{'ratio':<44}{found['tail'] / calm:>12.2f}", flush=True)


@contextmanager
def receipts(url: str) -> Iterator[list[float]]:
    """How long each receipt took, in the `with` block."""
    waits: list[float] = []
    over = threading.Event()

    async def produce() -> None:
        async with pydanube.connect(url) as client:
            await client.create_topic("/default/waited", exist_ok=True)
            async with client.producer("/default/waited") as producer:
                while not over.is_set():
                    began = perf_counter()
                    await producer.send(b"x" * 100)
                    waits.append(perf_counter() - began)
                    await asyncio.sleep(0.005)

    with ThreadPoolExecutor(1) as thread:
        producing = thread.submit(asyncio.run, produce())
        try:
            yield waits
        finally:
            over.set()
            producing.result()


def write(bench: Bench) -> None:
    def save(rows: int, topic: str, form: str = "danube") -> None:
        frame = bench.spark.range(rows).selectExpr(
            "cast(repeat('x', 100) as binary) as payload", "cast(id as string) as key"
        )
        target = bench.options(topic, staging=str(bench.directory / "staging"))
        frame.write.format(form).options(**target).mode("append").save()

    written = [0]

    def sink() -> None:
        written[0] += 1
        save(ROWS, f"/default/written{written[0]}")

    found = in_turn({"forgets": lambda: save(ROWS, "", "dropped_rows"), "sink": sink})
    taken, ceiling = found["sink"], found["forgets"]
    little = once(lambda: save(1000, "/default/little"))
    assert all(bench.head(f"/default/written{number}") == ROWS for number in range(1, written[0] + 1))
    line("ceiling: a Python sink that forgets", ceiling, None)
    line("sink, rows of 100 B", taken, ceiling)
    print(f"{'sink, a write of 1,000 rows':<44}{little.seconds:>12.2f} s{little.cpu_seconds:>13.2f} s of a core")
    more = Taken(taken.seconds - little.seconds, taken.cpu_seconds - little.cpu_seconds)
    line("sink, behind that", more, None, ROWS - 1000)


def now(bench: Bench) -> None:
    topic = "/default/available"
    bench.fill(topic, ROWS, hexadecimal())
    stream = bench.spark.readStream.format("danube").options(
        **bench.options(topic, startingOffsets="earliest", maxOffsetsPerTrigger=str(max(1, ROWS // 10)))
    )
    made = stream.load().writeStream.format("noop").option("checkpointLocation", str(bench.directory / "now"))
    line("AvailableNow, ten batches", once(lambda: made.trigger(availableNow=True).start().awaitTermination()), None)


def latency(bench: Bench) -> None:
    topic = "/default/late"
    bench.fill(topic, PER_BATCH, hexadecimal())
    waits: list[np.ndarray] = []
    counts: list[int] = []

    def batch(frame: DataFrame, number: int) -> None:
        times = frame.select("publish_time").toArrow().column(0).cast("int64").to_numpy()
        waits.append((time_ns() // 1000 - times) / 1000)
        counts.append(len(times))

    stream = bench.spark.readStream.format("danube").options(**bench.options(topic)).load()
    query = stream.writeStream.foreachBatch(batch).option("checkpointLocation", str(bench.directory / "late")).start()

    def wait_until(is_so: Callable[[], bool]) -> None:
        deadline = perf_counter() + 300
        while not is_so():
            assert query.isActive and perf_counter() < deadline, query.exception() or "the query does not go on"
            sleep(0.1)

    wait_until(lambda: query.lastProgress is not None)

    async def produce() -> None:
        async with pydanube.connect(bench.broker.url) as client, client.producer(topic) as producer:
            began = perf_counter()
            for number in range(PER_SECOND * LATENCY_SECONDS):
                if number % 50 == 0:
                    await asyncio.sleep(max(0.0, began + number / PER_SECOND - perf_counter()))
                    await producer.room()
                producer.send_nowait(b"x" * 100)

    asyncio.run(produce())
    wait_until(lambda: sum(counts) >= PER_SECOND * LATENCY_SECONDS)
    query.stop()
    # The first seconds are those of a query that begins.
    late = np.concatenate([each for each in waits if len(each)][len(waits) // 4 :])
    p50, p99 = np.percentile(late, [50, 99])
    print(
        f"{f'latency at {PER_SECOND:,} msg/s':<44}{p50:>12.0f} ms       p99 {p99:.0f} ms, {len(counts)} batches",
        flush=True,
    )


def lake_job(bench: Bench) -> None:
    for rows in (ROWS // 2, ROWS):
        _lake_of(bench, rows)


def _lake_of(bench: Bench, rows: int) -> None:
    topic = f"/default/orders{rows}"
    bench.fill(topic, rows, orders)
    settings = {
        **{"service.url": bench.broker.url, "topic": topic, "target": str(bench.directory / f"lake{rows}")},
        "schema": "id string not null, amount double, country string, note string",
        "batch_rows": max(PER_BATCH, ROWS // 10),
    }
    found: dict[str, object] = {}

    def run() -> None:
        found.update(lake.run(bench.spark, settings, QueryWatch("lake", as_json=True, stream=io.StringIO())).values)

    with memory_used() as most:
        taken = once(run)
    assert found["typed_rows"] == rows, found
    line(f"lake, {rows:,} orders", taken, None, rows)
    print(f"{'  the most memory, Spark and workers':<44}{max(most) / 1e6:>12,.0f} MB", flush=True)


def before(bench: Bench) -> None:
    """Two processes with a Spark each, which run the job of two versions in turn on the same topic."""
    if not BEFORE:
        print("before: not run, as BEFORE names no commit")
        return
    topic, here = "/default/compared", Path(__file__).resolve().parent
    bench.fill(topic, ROWS, orders)
    bench.upload()
    old = bench.directory / "before"
    old.mkdir()
    tree = subprocess.run(["git", "archive", BEFORE, "src"], cwd=here.parent, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", str(old)], input=tree, check=True)
    workers = {}
    for name, source in (("before", old / "src"), ("now", here.parent / "src")):
        command = [sys.executable, str(here / "lake_worker.py"), bench.broker.url, topic, str(max(1, ROWS // 2))]
        environment = {**os.environ, "PYTHONPATH": str(source)}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers[name] = subprocess.Popen(command, env=environment, **pipes)  # type: ignore[call-overload]
    taken: dict[str, list[float]] = {name: [] for name in workers}
    tables = {}
    for number in range(ROUNDS + 1):
        for name in random.Random(number).sample(sorted(workers), 2):
            worker, target = workers[name], bench.directory / f"{name}{number}"
            print(target, file=worker.stdin, flush=True)
            report = json.loads(worker.stdout.readline())
            if number:
                taken[name].append(report.pop("cpu_seconds"))
            tables[name] = {key: value for key, value in report.items() if key.endswith(("rows", "messages", "copies"))}
            tables[name]["hash"] = _hash_of(target)
        assert tables["before"] == tables["now"], tables
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    medians = {name: statistics.median(each) / ROWS * 1e6 for name, each in taken.items()}
    print(f"lake, the same {ROWS:,} rows in each table, and the same in each row: {tables['now']}")
    for name, each in medians.items():
        print(
            f"{f'lake, {name}':<44}{each:>12.2f} µs of a core each{medians['before'] / each:>10.2f} × {BEFORE}",
            flush=True,
        )


def _hash_of(target: Path) -> list[object]:
    """Of all rows of raw and typed, in whatever order and files."""
    import duckdb

    return [
        duckdb.sql(
            f"select count(*), sum(hash(t)::hugeint) from (select * exclude (batch) from "
            f"read_parquet('{target}/orders_{name}/batch=*/date=*/*.parquet', hive_partitioning=true)) t"
        ).fetchone()
        for name in ("raw", "typed")
    ]


@contextmanager
def memory_used() -> Iterator[list[int]]:
    """What this process's children have in memory, once in a while."""
    found = [0]
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.5):
            found.append(sum(_resident(pid) for pid in _children(os.getpid())))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        over.set()
        thread.join()


def _children(root: int) -> list[int]:
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found, todo = [], [root]
    while todo:
        parent = todo.pop()
        mine = [pid for pid, of in parents.items() if of == parent]
        found += mine
        todo += mine
    return found


def cpu_seconds() -> float:
    """Of this process and all that it has started; of those that have ended, what their parents know."""
    ticks = 0
    for pid in (os.getpid(), *_children(os.getpid())):
        try:
            words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(int(word) for word in words[11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def _resident(pid: int) -> int:
    """Without what it shares: workers share much with the process that they were forked from."""
    try:
        words = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="danube-bench-") as name:
        directory = Path(name)
        storage = StorageConfig(url=f"file://{directory}/objects", tier=TierConfig(upload_seconds=1e9))
        with TestBroker(directory / "broker", storage=storage) as broker:
            spark = session("bench", master="local[2]", conf={"spark.log.level": "ERROR"})
            try:
                bench = Bench(spark, broker, directory)
                steps = {
                    **{"read": read, "pressure": pressure, "write": write},
                    **{"now": now, "latency": latency, "lake": lake_job, "before": before},
                }
                for part in PARTS:
                    steps[part](bench)
            finally:
                spark.stop()


if __name__ == "__main__":
    main()
