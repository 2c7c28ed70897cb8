"""Parquet files that tasks write and read with Arrow, on stores for which Spark has no file system.

    rows ─► task ─► {directory}/date=2026-11-15/part-00003-{attempt}-0.parquet ─► its name and rows, to the driver

Every attempt of a task writes names of its own, and Spark gives the driver those of the attempts that count: what a
failed, repeated or late attempt wrote is never among them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from secrets import token_hex
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from pydanube.client.thread import LoopThread
from pydanube.pipeline.partitions import DIRECTORY
from pydanube.stores.objects.urls import OpenObjectStore, open_object_store

TASK_BYTES: Final = 128 << 20  # of rows that wait in memory for their files, which are smaller
ROW_GROUP_ROWS: Final = 131_072
NO_DATE: Final = "__HIVE_DEFAULT_PARTITION__"
_PARTITION: Final = re.compile(r"(?<![^/])(date|batch)[=-]([^/]+)/")


class TaskFileSystem(Protocol):
    """Whole files by name."""

    def put(self, path: str, data: pa.Buffer) -> None: ...

    def get(self, path: str) -> pa.Buffer: ...


class FileAccess(Protocol):
    """How a task, or the driver, opens a store. Travels to executors."""

    def open(self) -> AbstractContextManager[TaskFileSystem]: ...


class WrittenFile(NamedTuple):
    path: str
    rows: int


# --- stores ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObjectAccess:
    """An object store of ours; names are keys below its URL."""

    url: str
    options: Mapping[str, object] = field(repr=False)  # secrets
    key: str = "target"

    @contextmanager
    def open(self) -> Iterator[OpenObjects]:
        thread = LoopThread("danube tables")
        try:
            yield OpenObjects(thread, thread.call(open_object_store(self.url, self.options, key=self.key)))
        finally:
            thread.stop()


class OpenObjects:
    def __init__(self, thread: LoopThread, store: OpenObjectStore) -> None:
        self._thread = thread
        self.store: Any = store

    def call(self, coroutine: Any) -> Any:
        return self._thread.call(coroutine)

    def put(self, path: str, data: pa.Buffer) -> None:
        self.call(self.store.put(path, [memoryview(data)]))

    def get(self, path: str) -> pa.Buffer:
        return pa.py_buffer(self.call(self.store.get(path)))

    def keys(self, prefix: str) -> list[str]:
        async def listed() -> list[str]:
            return [info.key async for info in self.store.list(prefix)]

        found: list[str] = self.call(listed())
        return found


@dataclass(frozen=True)
class IcebergAccess:
    """PyIceberg's own FileIO, with the credentials that the catalog gave; names are whole URLs."""

    io: Any = field(repr=False)

    @contextmanager
    def open(self) -> Iterator[IcebergAccess]:
        yield self

    def put(self, path: str, data: pa.Buffer) -> None:
        with self.io.new_output(path).create(overwrite=True) as stream:
            stream.write(memoryview(data))

    def get(self, path: str) -> pa.Buffer:
        with self.io.new_input(path).open() as stream:
            return pa.py_buffer(stream.read())


# --- writing --------------------------------------------------------------------------------------------------


def write_by_tasks(
    rows: DataFrame, access: FileAccess, directory: str, *, rows_per_file: int, date_inside: bool, by: str = "date"
) -> list[WrittenFile]:
    """Writes the rows below a directory, by their date, or `by` another column. `date_inside`: it is a column of the
    files, too.
    """
    task = partial(_write, access, directory, rows_per_file, date_inside, by)
    found = rows.mapInArrow(task, "path string, rows bigint").collect()
    return sorted(WrittenFile(row["path"], row["rows"]) for row in found)


def _write(
    access: FileAccess,
    directory: str,
    rows_per_file: int,
    date_inside: bool,
    by: str,
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    context = TaskContext.get()
    attempt = f"{context.partitionId() if context is not None else 0:05}-{token_hex(8)}"
    with access.open() as files:
        writer = _Writer(files, directory, attempt, rows_per_file, date_inside, by)
        for batch in batches:
            writer.add(batch)
        done = writer.finish()
    yield pa.RecordBatch.from_arrays(
        [pa.array([each.path for each in done], pa.string()), pa.array([each.rows for each in done], pa.int64())],
        names=["path", "rows"],
    )


class _Writer:
    """One attempt of one task."""

    def __init__(
        self, files: TaskFileSystem, directory: str, attempt: str, rows_per_file: int, date_inside: bool, by: str
    ) -> None:
        self._files = files
        self._directory = directory
        self._attempt = attempt
        self._rows_per_file = rows_per_file
        self._date_inside = date_inside
        self._by = by
        self._waiting: dict[Any, list[pa.RecordBatch]] = {}
        self._bytes: dict[Any, int] = {}
        self._done: list[WrittenFile] = []

    def add(self, batch: pa.RecordBatch) -> None:
        dates = batch.column(self._by)
        for each in pc.unique(dates).to_pylist():
            same = pc.is_null(dates) if each is None else pc.equal(dates, pa.scalar(each, dates.type))
            self._add(each, batch.filter(same))

    def _add(self, day: Any, rows: pa.RecordBatch) -> None:
        while rows.num_rows:
            waiting = self._waiting.setdefault(day, [])
            space = self._rows_per_file - sum(each.num_rows for each in waiting)
            part, rows = rows.slice(0, space), rows.slice(space)
            waiting.append(part)
            self._bytes[day] = self._bytes.get(day, 0) + part.nbytes
            if part.num_rows == space:
                self._write(day)
        if sum(self._bytes.values()) >= TASK_BYTES:
            self._write(max(self._bytes, key=lambda each: self._bytes[each]))

    def _write(self, day: Any) -> None:
        self._bytes.pop(day)
        table = pa.Table.from_batches(self._waiting.pop(day))
        if not self._date_inside or self._by == DIRECTORY:
            table = table.drop_columns([self._by])
        stream = pa.BufferOutputStream()
        pq.write_table(_in_utc(table), stream, row_group_size=ROW_GROUP_ROWS, compression="snappy")
        named = NO_DATE if day is None else day.isoformat() if isinstance(day, date) else str(day)
        below = named if self._by == DIRECTORY else f"{self._by}={named}"
        path = f"{self._directory}/{below}/part-{self._attempt}-{len(self._done)}.parquet"
        self._files.put(path, stream.getvalue())
        self._done.append(WrittenFile(path, table.num_rows))

    def finish(self) -> list[WrittenFile]:
        for day in list(self._waiting):
            self._write(day)
        return self._done


def _in_utc(table: pa.Table) -> pa.Table:
    """Spark's batches name the session's time zone; tables are in UTC."""
    fields = [
        pa.field(each.name, pa.timestamp("us", "UTC"), each.nullable)
        if pa.types.is_timestamp(each.type) and each.type.tz is not None
        else each
        for each in table.schema
    ]
    return table.cast(pa.schema(fields))


# --- reading --------------------------------------------------------------------------------------------------


def read_by_tasks(spark: SparkSession, access: FileAccess, paths: list[str], schema: StructType) -> DataFrame:
    """The rows of files, with these columns: null where a file has none, or what their directories say."""
    if not paths:
        return spark.createDataFrame([], schema)
    names = spark.createDataFrame([(path,) for path in paths], "path string")
    names = names.repartition(min(len(paths), parallelism(spark)))
    return names.mapInArrow(partial(_read, access, to_arrow_schema(schema, timezone="UTC")), schema)


def _read(access: FileAccess, schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    with access.open() as files:
        for batch in batches:
            for path in batch.column(0).to_pylist():
                found = pq.ParquetFile(pa.BufferReader(files.get(path)))
                wanted = [each.name for each in schema if each.name in found.schema_arrow.names]
                for rows in found.iter_batches(columns=wanted):
                    yield _fitted(rows, schema, dict(_PARTITION.findall(path)))


def _fitted(rows: pa.RecordBatch, schema: pa.Schema, partition: Mapping[str, str]) -> pa.RecordBatch:
    """`partition` has what directories say: a column of that name, or of that name behind `__`."""
    columns = []
    for wanted in schema:
        name = wanted.name.removeprefix("__")
        if wanted.name in rows.schema.names:
            columns.append(rows.column(wanted.name).cast(wanted.type))
        elif partition.get(name, NO_DATE) != NO_DATE:
            columns.append(pa.repeat(pa.scalar(partition[name]).cast(wanted.type), rows.num_rows))
        else:
            columns.append(pa.nulls(rows.num_rows, wanted.type))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema([each.with_nullable(True) for each in schema]))


def parallelism(spark: SparkSession) -> int:
    """How many tasks the cluster runs at once; what a Spark Connect server is not asked for is its shuffle's."""
    context = getattr(spark, "_sc", None)
    if context is not None:
        return max(1, int(context.defaultParallelism))
    return max(1, int(spark.conf.get("spark.sql.shuffle.partitions") or 1))
