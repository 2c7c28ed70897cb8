"""Tables with one row per key, the last: plain Parquet and Iceberg. See docs/adr/0016-upserts.md.

A key belongs to a bucket, and a file to one bucket. A batch reads the buckets that its keys are in, merges, and writes
them anew beside the old files. One atomic step says which files count from now on, and that the batch is in them:

    Parquet   {table}/versions/000000000007.json, made if there is none of that name; the greatest is the table
    Iceberg   one transaction: these files go, those come, property danube.progress

What a crash leaves are files without a name anywhere. A batch that comes again finds itself in the newest version.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from secrets import token_hex
from time import time
from typing import Any, Final, NamedTuple, Protocol

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import IntegerType, StructField, StructType

from pydanube.errors import ConfigError
from pydanube.pipeline.changes import DELETED, last_by_key
from pydanube.pipeline.iceberg import COMMITS_MAX, PROGRESS, BatchProgress, IcebergTable, LocalData, transaction
from pydanube.pipeline.partitions import Division, TableLayout
from pydanube.pipeline.table_files import LocalFiles
from pydanube.pipeline.tables import OlderCheckpoint, ParquetTable, TableDamaged, check_query
from pydanube.pipeline.task_files import WrittenFile, parallelism

log = logging.getLogger(__name__)

BUCKET: Final = "_bucket"
BUCKETS: Final = 16
KEY: Final = "danube.key"
BUCKET_COUNT: Final = "danube.buckets"
KEPT_SECONDS: Final = 600  # how long a reader may go on with files that were replaced
ROWS_PER_TASK: Final = 200_000

BY_BUCKET: Final = TableLayout((Division("identity", BUCKET),))


@dataclass(frozen=True, slots=True)
class UpsertRules:
    """What makes a row the last of its key. `buckets` None: as the table has them, or BUCKETS."""

    key: Sequence[str]
    version: str | None = None
    buckets: int | None = None


class MergedBatch(NamedTuple):
    """What a batch did: rows that it set, and how many the table has since."""

    set: int
    rows: int


class UpsertTable(Protocol):
    path: str

    def evolve(self, schema: StructType) -> None: ...

    def claim(self, query: str, batch: int) -> None: ...

    def merge(self, changes: DataFrame, gone: DataFrame | None, batch: int) -> MergedBatch:
        """Makes the changes of a batch part of the table, once. `gone`: earlier deletions, that a late change may be
        older than. Raises TableDamaged if the files do not have what was merged.
        """
        ...

    def read(self) -> DataFrame: ...


def with_bucket(rows: DataFrame, key: Sequence[str], buckets: int) -> DataFrame:
    """By the key as text: a number keeps its bucket when its column gets a wider type."""
    return rows.withColumn(
        BUCKET, F.pmod(F.xxhash64(*(F.col(name).cast("string") for name in key)), buckets).cast("int")
    )


def merged(
    schema: StructType, changes: DataFrame, rows: Sequence[DataFrame], gone: DataFrame | None, rules: UpsertRules
) -> DataFrame:
    """The rows that are left, in the table's columns, and `__new`: whether this batch set them."""
    parts = [_fitted(changes, schema, deleted=None, new=True)]
    parts += [_fitted(each, schema, deleted=False, new=False) for each in rows]
    if gone is not None:
        parts.append(_fitted(gone, schema, deleted=True, new=False))
    every = reduce(DataFrame.union, parts)
    return last_by_key(every, rules.key, rules.version).where(~F.col(DELETED)).drop(DELETED)


def _fitted(rows: DataFrame, schema: StructType, *, deleted: bool | None, new: bool) -> DataFrame:
    have = set(rows.columns)
    columns = [
        (F.col(field.name) if field.name in have else F.lit(None)).cast(field.dataType).alias(field.name)
        for field in schema.fields
    ]
    is_deleted = F.col(DELETED) if deleted is None else F.lit(deleted)
    return rows.select(*columns, is_deleted.alias(DELETED), F.lit(new).alias("__new"))


def _buckets_in(changes: DataFrame) -> list[int]:
    return sorted(int(row[0]) for row in changes.select(BUCKET).distinct().collect())


class _Written(NamedTuple):
    files: list[WrittenFile]
    set: int
    rows: int


def _write(files: Any, table: str, kept: DataFrame, place: str, rows_per_file: int) -> _Written:
    """Writes merged rows by bucket, and counts what the files have."""
    kept = kept.persist()
    try:
        counts = {row["__new"]: row["count"] for row in kept.groupBy("__new").count().collect()}
        total = sum(counts.values())
        tasks = max(1, min(parallelism(kept.sparkSession), -(-total // ROWS_PER_TASK)))
        found = files.write(kept.drop("__new").repartition(tasks, BUCKET), place, rows_per_file, BY_BUCKET)
    finally:
        kept.unpersist()
    stored = sum(file.rows for file in found)
    if stored != total:
        raise TableDamaged(table, f"{total} rows were merged, and the files in {place} have {stored}")
    return _Written(found, counts.get(True, 0), total)


def _check_same(table: str, name: str, known: str, asked: str) -> None:
    if known != asked:
        what = f"{known}, as {table} has it: a table is divided by it for good; use another name for a new one"
        raise ConfigError(name, asked, what)


# --- Parquet --------------------------------------------------------------------------------------------------


class ParquetUpserts:
    """A directory of this machine and all executors.

    {table}/versions/{batch}.json        files, rows, key, buckets, query; never changed; the greatest counts
    {table}/data/{batch}-{attempt}/…     files of one bucket each
    """

    def __init__(self, spark: SparkSession, path: str, rules: UpsertRules, *, rows_per_file: int) -> None:
        self.path = path
        self._spark = spark
        self._rules = rules
        self._rows_per_file = rows_per_file
        self._files = LocalData(spark)
        self._schemas = ParquetTable(LocalFiles(spark, path))
        self._query = ""

    def evolve(self, schema: StructType) -> None:
        if any(Path(self.path).glob("batch=*")):
            raise ConfigError("mode", "upsert", f"append, as {self.path} has it: use another name for a new table")
        newest = self._newest()
        if newest is not None:
            _check_same(self.path, "key", ",".join(newest["key"]), ",".join(self._rules.key))
            if self._rules.buckets is not None:
                _check_same(self.path, "buckets", str(newest["buckets"]), str(self._rules.buckets))
        self._schemas.evolve(StructType([*schema.fields, StructField(BUCKET, IntegerType())]))

    def claim(self, query: str, batch: int) -> None:
        newest = self._newest()
        check_query(
            self.path, str(newest["query"]) if newest else None, query, newest["batch"] if newest else -1, batch
        )
        self._query = query

    def merge(self, changes: DataFrame, gone: DataFrame | None, batch: int) -> MergedBatch:
        newest = self._newest()
        if newest is not None and newest["batch"] >= batch:
            return self._known(newest, batch)
        buckets = newest["buckets"] if newest else self._rules.buckets or BUCKETS
        changes = with_bucket(changes, self._rules.key, buckets)
        touched = _buckets_in(changes)
        if not touched:
            return MergedBatch(0, newest["rows"] if newest else 0)
        there: dict[str, list[list[Any]]] = dict(newest["files"]) if newest else {}
        schema = self._schemas.schema()
        old = [f"{self.path}/{name}" for bucket in touched for name, _ in there.get(str(bucket), ())]
        rows = [self._files.read(old, schema)] if old else []
        if gone is not None:
            gone = with_bucket(gone, self._rules.key, buckets).where(F.col(BUCKET).isin(touched))
        place = f"{self.path}/data/{batch:012}-{token_hex(8)}"
        kept = merged(schema, changes, rows, gone, self._rules)
        written = _write(self._files, self.path, kept, place, self._rows_per_file)
        for bucket in touched:
            there.pop(str(bucket), None)
        for file in written.files:
            number = Path(file.path).parent.name.partition("=")[2]
            there.setdefault(number, []).append([os.path.relpath(file.path, self.path), file.rows])
        version = {
            "format": 1,
            "batch": batch,
            "query": self._query,
            "key": list(self._rules.key),
            "buckets": buckets,
            "set": written.set,
            "rows": sum(count for each in there.values() for _, count in each),
            "names": sorted(name for each in there.values() for name, _ in each),
            "files": there,
        }
        if not self._made(batch, version):  # by a driver that was taken for dead, or that took over
            return self._known(self._newest() or {}, batch)
        self._tidy()
        return MergedBatch(written.set, version["rows"])

    def _known(self, newest: dict[str, Any], batch: int) -> MergedBatch:
        if newest["batch"] > batch:
            raise OlderCheckpoint(self.path, newest["batch"], batch)
        return MergedBatch(newest["set"], newest["rows"])

    def _made(self, batch: int, version: dict[str, Any]) -> bool:
        """Whether the version is there now by us. A reader finds none of it or all of it."""
        place = Path(self.path) / "versions"
        place.mkdir(parents=True, exist_ok=True)
        text, final = place / f".{batch:012}-{token_hex(8)}", place / f"{batch:012}.json"
        with text.open("w") as file:
            json.dump(version, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(text, final)
        except FileExistsError:
            return False
        finally:
            text.unlink()
        return True

    def _versions(self) -> list[Path]:
        return sorted((Path(self.path) / "versions").glob("*.json"))

    def _newest(self) -> dict[str, Any] | None:
        found = self._versions()
        if not found:
            return None
        try:
            version: dict[str, Any] = json.loads(found[-1].read_text())
            if version["format"] != 1:
                raise ValueError(f"its format is {version['format']}, known is 1")
        except (ValueError, KeyError, TypeError) as error:
            raise TableDamaged(self.path, f"versions/{found[-1].name} cannot be understood: {error}") from error
        return version

    def _tidy(self) -> None:
        """Removes what no version names that readers may be at: the newest, and those of the last ten minutes."""
        horizon = time() - KEPT_SECONDS
        versions = self._versions()
        for path in versions[:-1]:
            if path.stat().st_mtime < horizon:
                path.unlink(missing_ok=True)
        named: set[str] = set()
        for path in self._versions():
            named.update(name.split("/")[1] for name in json.loads(path.read_text())["names"])
        for place in (Path(self.path) / "data").glob("*"):
            if place.name not in named and place.stat().st_mtime < horizon:
                shutil.rmtree(place, ignore_errors=True)

    def read(self) -> DataFrame:
        newest, schema = self._newest(), self._schemas.schema()
        files = [f"{self.path}/{name}" for name in newest["names"]] if newest else []
        found = self._files.read(files, schema) if files else self._spark.createDataFrame([], schema)
        return found.drop(BUCKET)


# --- Iceberg --------------------------------------------------------------------------------------------------


class IcebergUpserts(IcebergTable):
    """A table whose partitions are buckets of the key: a column of its own, as it is, which any engine understands."""

    def __init__(
        self, spark: SparkSession, catalog: Any, identifier: str, rules: UpsertRules, *, job: str, rows_per_file: int
    ) -> None:
        super().__init__(spark, catalog, identifier, job=job, rows_per_file=rows_per_file, layout=BY_BUCKET)
        self.rules = rules

    def evolve(self, schema: StructType) -> None:
        super().evolve(StructType([*schema.fields, StructField(BUCKET, IntegerType())]))
        known = self._table.properties.get(KEY)
        if known is None:
            raise ConfigError(
                "mode", "upsert", f"append, as {self._identifier} has it: use another name for a new table"
            )
        _check_same(self._identifier, "key", known, ",".join(self.rules.key))
        if self.rules.buckets is not None:
            _check_same(self._identifier, "buckets", self._table.properties[BUCKET_COUNT], str(self.rules.buckets))

    def first_properties(self) -> dict[str, str]:
        return {KEY: ",".join(self.rules.key), BUCKET_COUNT: str(self.rules.buckets or BUCKETS)}

    def merge(self, changes: DataFrame, gone: DataFrame | None, batch: int) -> MergedBatch:
        from pyiceberg.exceptions import CommitFailedException

        buckets = int(self._table.properties[BUCKET_COUNT])
        changes = with_bucket(changes, self.rules.key, buckets)
        touched = _buckets_in(changes)
        if gone is not None:
            gone = with_bucket(gone, self.rules.key, buckets).where(F.col(BUCKET).isin(touched))
        for attempt in range(COMMITS_MAX):
            self._table.refresh()
            newest = self._newest()
            if newest > batch:
                raise OlderCheckpoint(self._identifier, newest, batch)
            if newest == batch or not touched:
                known = self._stored(batch)
                return MergedBatch(0 if known is None else known.rows, self._count())
            try:
                return self._merge_once(changes, gone, batch, touched)
            except CommitFailedException:
                if attempt + 1 == COMMITS_MAX:
                    raise
                log.info("commit overtaken", extra={"table": self._identifier, "batch": batch})
        raise AssertionError("unreachable")

    def _merge_once(self, changes: DataFrame, gone: DataFrame | None, batch: int, touched: list[int]) -> MergedBatch:
        among = f"{BUCKET} in ({', '.join(map(str, touched))})"
        tasks = list(self._table.scan(among).plan_files())
        if any(task.delete_files for task in tasks):
            what = "another writer has put delete files into it, which only an engine can merge: rewrite its data files"
            raise TableDamaged(self._identifier, what)
        old = [task.file for task in tasks]
        schema = self.schema()
        rows = [self._files.read([each.file_path for each in old], schema)] if old else []
        place = f"{self._place(batch)}/{token_hex(8)}"
        kept = merged(schema, changes, rows, gone, self.rules)
        written = _write(self._files, self._identifier, kept, place, self._rows_per_file)
        progress = BatchProgress(batch, written.set, place)
        expired = self._expired()
        with transaction(self._table) as change:
            change.replace_files(
                old, self._data_files([file.path for file in written.files]), progress.summary(self._job)
            )
            change.set_properties({PROGRESS: progress.to_json()})
            if expired:
                change.expire([each.snapshot_id for each in expired])
        self._forget(expired)
        return MergedBatch(written.set, self._count())

    def _count(self) -> int:
        return sum(task.file.record_count for task in self._table.scan().plan_files())

    def read(self) -> DataFrame:
        return super().read().drop(BUCKET)
