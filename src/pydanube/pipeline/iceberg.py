"""Iceberg tables that batches are added to exactly once, beside other writers and beside expiry.

    {location}/data/{job}/batch-000000000007/{attempt}/…   files that executors wrote; no attempt writes to another's
    danube.progress                                        property: the newest batch, its rows and its directory
    danube.query                                           property: the query whose batches these are

One transaction adds the files of a batch and sets `danube.progress`, so a batch that comes again is known however many
snapshots have expired, and whatever else writes to the table. A commit that another one has overtaken is not repeated
before that property was read again: the other one may have been of a driver that has the same batch.

What a commit costs does not depend on how many there were: no file is looked for in the table, manifests are merged,
old metadata is deleted, and snapshots expire as the table's own properties say (`MAINTENANCE`; an engine, or the user,
may change them). What goes is metadata alone; data files that another writer replaced are for its own maintenance.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection
from contextlib import suppress
from datetime import date
from secrets import token_hex
from time import time
from typing import Any, Final, NamedTuple, Protocol

import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import LongType, StructField, StructType

from pydanube.errors import ConfigError
from pydanube.pipeline.partitions import (
    BY_DATE,
    DIRECTORY,
    TableLayout,
    from_directory,
    with_directory,
    with_divisions,
)
from pydanube.pipeline.settings import local_path, scheme_of
from pydanube.pipeline.table_files import files_in
from pydanube.pipeline.tables import (
    BATCH,
    OTHERS,
    ROWS_PER_FILE,
    Check,
    OlderCheckpoint,
    TableDamaged,
    check_partitions,
    check_query,
    does_not_fit,
)
from pydanube.pipeline.task_files import IcebergAccess, WrittenFile, read_by_tasks, write_by_tasks

log = logging.getLogger(__name__)

QUERY: Final = "danube.query"
PROGRESS: Final = "danube.progress"
COMMITS_MAX: Final = 8  # one batch against writers that are always faster
SNAPSHOT_AGE: Final = "history.expire.max-snapshot-age-ms"
SNAPSHOTS_MIN: Final = "history.expire.min-snapshots-to-keep"
EXPIRED_MIN: Final = 16  # snapshots go in dozens: finding what only they name costs requests
EXPIRED_MAX: Final = 256  # and a table that has thousands, of an earlier version, gets rid of them batch by batch
_BATCH: Final = re.compile(r"/batch-(\d{12})/")
MAINTENANCE: Final = {
    "commit.manifest-merge.enabled": "true",
    "commit.manifest.min-count-to-merge": "16",
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "20",
    # Every commit writes the list of all snapshots, and PyIceberg copies it some twenty times: at ten seconds a batch
    # these are 60, and those of a day were 8,640.
    SNAPSHOT_AGE: "600000",
    SNAPSHOTS_MIN: "16",
}


class BatchProgress(NamedTuple):
    """The newest batch of a job in an Iceberg table."""

    batch: int
    rows: int
    place: str

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    def summary(self, job: str) -> dict[str, str]:
        """For people, and for versions that look at snapshots."""
        return {"danube.job": job, "danube.batch": str(self.batch)}


class IcebergTable:
    """A table of an Iceberg catalog; by default one in a SQLite file beside the data."""

    def __init__(
        self,
        spark: SparkSession,
        catalog: Any,
        identifier: str,
        *,
        job: str,
        rows_per_file: int = ROWS_PER_FILE,
        layout: TableLayout = BY_DATE,
    ) -> None:
        self._spark = spark
        self._catalog = catalog
        self._identifier = identifier
        self._job = job
        self._rows_per_file = rows_per_file
        self._layout = layout
        self._table: Any = None
        self._files: DataFiles = LocalData(spark)
        self.path = ""

    def evolve(self, schema: StructType) -> None:
        from pyiceberg.exceptions import NoSuchTableError, ValidationError

        try:
            self._table = self._catalog.load_table(self._identifier)
        except NoSuchTableError:
            self._table = self._created(schema)
        else:
            self._check_partitions()
            with self._table.update_schema() as change:
                for field in schema.fields:
                    try:
                        change.union_by_name(_arrow(StructType([field])))
                    except (ValidationError, ValueError, TypeError) as error:
                        raise does_not_fit(field, self._identifier, f"it has another type ({error})") from error
            unsaid = {name: value for name, value in MAINTENANCE.items() if name not in self._table.properties}
            if unsaid:  # of an earlier version
                with self._table.transaction() as change:
                    change.set_properties(unsaid)
        location = self._table.location().rstrip("/")
        if scheme_of(location) in ("", "file"):
            self.path = local_path("catalog", location)
        else:
            self.path, self._files = location, RemoteData(self._spark, self._table.io)

    def _created(self, schema: StructType) -> Any:
        from pyiceberg.exceptions import NamespaceAlreadyExistsError

        with suppress(NamespaceAlreadyExistsError):
            self._catalog.create_namespace(self._identifier.rpartition(".")[0])
        try:
            properties = {**MAINTENANCE, **self.first_properties()}
            table = self._catalog.create_table(self._identifier, schema=_arrow(schema), properties=properties)
        except (ValueError, OSError) as error:  # no FileIO for the warehouse's scheme, or one that it does not let in
            warehouse = self._catalog.properties.get("warehouse")
            why = str(error).partition("\n")[0]
            raise ConfigError("catalog.warehouse", warehouse, f"a place that PyIceberg can write to: {why}") from error
        with table.update_spec() as change:
            self.partitioned(change)
        if self._layout.sort:
            from pyiceberg.table.sorting import NullOrder
            from pyiceberg.transforms import IdentityTransform

            with table.update_sort_order() as change:
                for name in self._layout.sort:
                    change.asc(name, IdentityTransform(), NullOrder.NULLS_FIRST)  # as Spark sorts
        return table

    def _check_partitions(self) -> None:
        schema, fields = self._table.schema(), self._table.spec().fields
        there = [(str(field.transform), schema.find_column_name(field.source_id)) for field in fields]
        if there != [(each.iceberg, each.column) for each in self._layout.divisions]:
            shown = ", ".join(str(name) if how == "identity" else f"{how}({name})" for how, name in there)
            check_partitions(self._identifier, shown or "nothing", self._layout)

    def partitioned(self, change: Any) -> None:
        """Says how a new table is divided."""
        from pyiceberg.transforms import parse_transform

        for each in self._layout.divisions:
            change.add_field(each.column, parse_transform(each.iceberg), each.name)

    def first_properties(self) -> dict[str, str]:
        """Of a new table."""
        return {}

    def claim(self, query: str, batch: int) -> None:
        self._table.refresh()
        known = self._table.properties.get(QUERY)
        check_query(self._identifier, known, query, self._newest(), batch)
        if known != query:
            with self._table.transaction() as change:
                change.set_properties({QUERY: query})

    def write(self, rows: DataFrame, batch: int, check: Check = lambda stored: None) -> int:
        self._table.refresh()
        known = self._stored(batch)
        if known is not None:
            check(known.rows)
            return known.rows
        place = f"{self._place(batch)}/{token_hex(8)}"
        files = self._files.write(rows, place, self._rows_per_file, self._layout)
        stored = sum(file.rows for file in files)
        check(stored)
        return self._commit(BatchProgress(batch, stored, place), [file.path for file in files]) if stored else 0

    def _commit(self, progress: BatchProgress, files: list[str]) -> int:
        """Adds the files, or finds that the batch is there. Returns how many rows the table has of it."""
        from pyiceberg.exceptions import CommitFailedException

        for attempt in range(COMMITS_MAX):
            expired = self._expired()
            try:
                with transaction(self._table) as change:
                    # No other attempt ever had such a path, so no other file needs to be looked at.
                    change.append_files(self._data_files(files), progress.summary(self._job))
                    change.set_properties({PROGRESS: progress.to_json()})
                    if expired:
                        change.expire([each.snapshot_id for each in expired])
            except CommitFailedException:
                if attempt + 1 == COMMITS_MAX:
                    raise
                log.info("commit overtaken", extra={"table": self._identifier, "batch": progress.batch})
                self._table.refresh()
                if (known := self._stored(progress.batch)) is not None:
                    return known.rows
                if (newest := self._newest()) > progress.batch:
                    raise OlderCheckpoint(self._identifier, newest, progress.batch) from None
            else:
                self._forget(expired)
                break
        return progress.rows

    def _data_files(self, paths: list[str]) -> list[Any]:
        """What the table is told of files: counts and bounds of their footers, and the partition of their paths."""
        from pyiceberg.io.pyarrow import (
            compute_statistics_plan,
            data_file_statistics_from_parquet_metadata,
            parquet_path_to_id_mapping,
        )
        from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
        from pyiceberg.typedef import Record

        metadata, spark_schema = self._table.metadata, self.schema()
        schema, found = metadata.schema(), []
        plan, ids = compute_statistics_plan(schema, metadata.properties), parquet_path_to_id_mapping(schema)
        for path in paths:
            file = self._table.io.new_input(path)
            with file.open() as stream:
                footer = pq.read_metadata(stream)
            statistics = data_file_statistics_from_parquet_metadata(footer, plan, ids)
            values = from_directory(path.removeprefix(self.path), self._layout, spark_schema)
            made = DataFile.from_args(
                content=DataFileContent.DATA,
                file_path=path,
                file_format=FileFormat.PARQUET,
                partition=Record(*values),
                file_size_in_bytes=len(file),
                sort_order_id=metadata.default_sort_order_id or None,
                spec_id=metadata.default_spec_id,
                equality_ids=None,
                key_metadata=None,
                **statistics.to_serialized_dict(),
            )
            found.append(made)
        return found

    def _place(self, batch: int) -> str:
        return f"{self.path}/data/{self._job}/batch-{batch:012}"

    # --- what is there --------------------------------------------------------------------------------

    def _progress(self) -> BatchProgress | None:
        text = self._table.properties.get(PROGRESS)
        try:
            return None if text is None else BatchProgress(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise TableDamaged(self._identifier, f"its property {PROGRESS} cannot be understood: {error}") from error

    def _newest(self) -> int:
        """The newest batch with rows; -1: there is none."""
        progress = self._progress()
        if progress is not None:
            return progress.batch
        # Of a version that told it by snapshots alone. They go when a table is looked after, but for the last.
        return max(self._added(), default=0) if self._table.current_snapshot() is not None else -1

    def _stored(self, batch: int) -> BatchProgress | None:
        """What the table has of a batch; None: nothing."""
        progress = self._progress()
        if progress is None and batch in self._added():
            rows = sum(file.rows for file in self._files.written(self._place(batch)))
            progress = BatchProgress(batch, rows, self._place(batch))
        return progress if progress is not None and progress.batch == batch else None

    def _added(self) -> set[int]:
        """The batches that snapshots name."""
        summaries = [each.summary for each in self._table.snapshots() if each.summary is not None]
        return {int(each["danube.batch"]) for each in summaries if each.get("danube.job") == self._job}

    def has(self, batch: int) -> bool:
        return self._stored(batch) is not None

    def batch(self, number: int) -> DataFrame:
        stored = self._stored(number)
        if stored is None or not stored.rows:
            return self._read([])
        files = self._files.written(stored.place)
        if sum(file.rows for file in files) != stored.rows:
            raise TableDamaged(self._identifier, f"the files of batch {number} are gone from {stored.place}")
        return self._read([file.path for file in files])

    def before(self, number: int, since: date | None = None) -> DataFrame | None:
        """Earlier batches of this job, by their files. Manifests and files of earlier dates are not opened."""
        scan = self._table.refresh().scan() if since is None else self._table.refresh().scan(f"date >= '{since}'")
        files = [task.file.file_path for task in scan.plan_files()]
        files = [file for file in files if f"/batch-{number:012}/" not in file]
        return self._read(files) if files else None

    def read(self) -> DataFrame:
        self._table.refresh()
        return self._read([file for files in self._by_batch().values() for file in files])

    def numbers(self) -> list[int]:
        return sorted(self._by_batch())

    def among(self, batches: Collection[int]) -> DataFrame:
        by_batch = self._by_batch()
        files = [file for batch in batches for file in by_batch.get(batch, ())]
        schema = StructType([*self.schema().fields, StructField(BATCH, LongType())])
        return self._files.read(files, schema) if files else self._spark.createDataFrame([], schema)

    def version(self) -> str:
        snapshot = self._table.refresh().current_snapshot()
        return "" if snapshot is None else str(snapshot.snapshot_id)

    def version_before(self) -> str:
        snapshot = self._table.current_snapshot()
        return "" if snapshot is None or snapshot.parent_snapshot_id is None else str(snapshot.parent_snapshot_id)

    def _by_batch(self) -> dict[int, list[str]]:
        """The table's files, by the batch that wrote them, as of when `version` was asked for, or the table written.

        Later ones may be of a maintenance, and of another batch or none, with the same rows.
        """
        found: dict[int, list[str]] = {}
        for task in self._table.scan().plan_files():
            path = task.file.file_path
            number = _BATCH.search(path) if f"/data/{self._job}/" in path else None
            found.setdefault(OTHERS if number is None else int(number[1]), []).append(path)
        return found

    def _read(self, files: list[str]) -> DataFrame:
        schema = self.schema()
        return self._files.read(files, schema) if files else self._spark.createDataFrame([], schema)

    def schema(self) -> StructType:
        return from_arrow_schema(self._table.schema().as_arrow())

    # --- expiry ---------------------------------------------------------------------------------------

    def _expired(self) -> list[Any]:
        """Snapshots that the table's properties let go, oldest first; none while they are few.

        What a tag names, or a branch beside main comes from, stays.
        """
        metadata = self._table.metadata
        properties = {**MAINTENANCE, **self._table.properties}
        try:
            age_ms, least = int(properties[SNAPSHOT_AGE]), max(1, int(properties[SNAPSHOTS_MIN]))
        except ValueError as error:
            raise TableDamaged(self._identifier, f"a property of its expiry is no number: {error}") from error
        named = {
            snapshot.snapshot_id
            for name, ref in metadata.refs.items()
            if name != "main"
            for snapshot in _line(metadata, ref.snapshot_id)[-1 if ref.snapshot_ref_type == "tag" else 0 :]
        }
        line = _line(metadata, metadata.current_snapshot_id)
        newest_ms = time() * 1000 - age_ms
        old = [each for each in line[: max(0, len(line) - least)] if each.timestamp_ms <= newest_ms]
        expired = [each for each in old if each.snapshot_id not in named]
        return expired[:EXPIRED_MAX] if len(expired) >= EXPIRED_MIN else []

    def _forget(self, expired: list[Any]) -> None:
        """Deletes the manifest lists of expired snapshots, and manifests that only they named. Never fails a batch."""
        io, metadata = self._table.io, self._table.metadata
        kept = _line(metadata, metadata.current_snapshot_id)
        if not expired or len(kept) != len(metadata.snapshots) or len(metadata.refs) != 1:
            return  # other snapshots may name the same manifests
        try:
            # In one line, what the oldest that is kept does not name is never named again.
            named = {each.manifest_path for each in kept[0].manifests(io)}
            gone = {each.manifest_path for snapshot in expired for each in snapshot.manifests(io)} - named
            for path in [*gone, *(each.manifest_list for each in expired)]:
                io.delete(path)
        except OSError as error:
            log.warning("expired metadata stays", extra={"table": self._identifier, "why": str(error)})


def _line(metadata: Any, newest: int | None) -> list[Any]:
    """A snapshot and those that it comes from, oldest first, as far as they are there."""
    by_id = {each.snapshot_id: each for each in metadata.snapshots}
    found = []
    while newest is not None and (snapshot := by_id.pop(newest, None)) is not None:
        found.append(snapshot)
        newest = snapshot.parent_snapshot_id
    return found[::-1]


def transaction(table: Any) -> Any:
    """A transaction that fails if it was overtaken.

    PyIceberg's own would be tried again on top of whatever overtook it, also if that was this very batch.
    """
    from pyiceberg.table import TableProperties, Transaction
    from pyiceberg.table.update.snapshot import ExpireSnapshots

    class Once(Transaction):
        def _register_snapshot_producer(self, producer: Any) -> None:
            pass

        def expire(self, ids: list[int]) -> None:
            ExpireSnapshots(self).by_ids(ids).commit()

        def append_files(self, new: list[Any], summary: dict[str, str]) -> None:
            self._map_names()
            with self._append_snapshot_producer(summary) as change:
                for file in new:
                    change.append_data_file(file)

        def replace_files(self, old: list[Any], new: list[Any], summary: dict[str, str]) -> None:
            self._map_names()
            with self.update_snapshot(snapshot_properties=summary).overwrite() as change:
                for file in old:
                    change.delete_data_file(file)
                for file in new:
                    change.append_data_file(file)

        def _map_names(self) -> None:
            """Spark's files have no field ids."""
            if self.table_metadata.name_mapping() is None:
                mapping = self.table_metadata.schema().name_mapping.model_dump_json()
                self.set_properties({TableProperties.DEFAULT_NAME_MAPPING: mapping})

    return Once(table)


# --- files ----------------------------------------------------------------------------------------------------


class DataFiles(Protocol):
    """Who writes and reads the files of an Iceberg table."""

    def write(
        self, rows: DataFrame, place: str, rows_per_file: int, layout: TableLayout = BY_DATE
    ) -> list[WrittenFile]:
        """Writes rows to a directory of its own, in files of one partition each."""
        ...

    def written(self, place: str) -> list[WrittenFile]:
        """What `write` returned for this directory; nothing if it is gone."""
        ...

    def read(self, files: list[str], schema: StructType) -> DataFrame:
        """The rows of files; a column BATCH is what each file's name says."""
        ...


class LocalData:
    """Spark writes and reads directories that this machine and all executors have."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def write(
        self, rows: DataFrame, place: str, rows_per_file: int, layout: TableLayout = BY_DATE
    ) -> list[WrittenFile]:
        # The columns stay inside the files too, as Iceberg wants them.
        divided, names = with_divisions(rows, layout, rows.schema, "__")
        writer = divided.write.mode("errorifexists").option("maxRecordsPerFile", rows_per_file)
        writer.partitionBy(*names).parquet(place)
        return self.written(place)

    def written(self, place: str) -> list[WrittenFile]:
        return files_in(place)

    def read(self, files: list[str], schema: StructType) -> DataFrame:
        inside = StructType([each for each in schema.fields if each.name != BATCH])
        found = self._spark.read.schema(inside).parquet(*files)
        if BATCH not in schema.names:
            return found
        number = F.regexp_extract(F.col("_metadata.file_path"), _BATCH.pattern, 1)
        return found.withColumn(BATCH, F.when(number == "", OTHERS).otherwise(number.cast("long")))


class RemoteData:
    """Tasks write and read with PyIceberg's own FileIO, and the credentials that it has of the catalog."""

    def __init__(self, spark: SparkSession, io: Any) -> None:
        self._spark = spark
        self._access = IcebergAccess(io)

    def write(
        self, rows: DataFrame, place: str, rows_per_file: int, layout: TableLayout = BY_DATE
    ) -> list[WrittenFile]:
        rows, by = with_directory(rows, layout, rows.schema), DIRECTORY
        found = write_by_tasks(rows, self._access, place, rows_per_file=rows_per_file, date_inside=True, by=by)
        # A FileIO cannot list.
        self._access.put(f"{place}/_files.json", json.dumps([list(file) for file in found]).encode())
        return found

    def written(self, place: str) -> list[WrittenFile]:
        try:
            return [WrittenFile(*each) for each in json.loads(self._access.get(f"{place}/_files.json").to_pybytes())]
        except FileNotFoundError:
            return []

    def read(self, files: list[str], schema: StructType) -> DataFrame:
        found = read_by_tasks(self._spark, self._access, files, schema)
        return found.fillna(OTHERS, [BATCH]) if BATCH in schema.names else found


def _arrow(schema: StructType) -> Any:
    """With columns that may all be null, as Iceberg gets them."""
    nullable = StructType([StructField(field.name, field.dataType, True) for field in schema.fields])
    return to_arrow_schema(nullable, timezone="UTC")
