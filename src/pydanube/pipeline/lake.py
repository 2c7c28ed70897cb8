"""Job *lake*: topics become tables. Raw as the log has them, then typed, without repetitions, what does not fit aside.

    topic ─► batch ─► raw table ─► decode ─┬─► typed table       one row per message, or per business key
                                           └─► quarantine table  with the reason

Everything of a batch is written under its number, raw first; a batch that comes again after a crash finds or replaces
its own rows. The number is the checkpoint's, so the tables go on with that checkpoint only. So the tables have each
message once, from offset 0 to the live end, with no seam between the two.

A batch counts only if its numbers are right: messages = raw rows + copies left out of raw, and raw rows = typed rows +
quarantined rows + copies left out of typed. Otherwise it fails, the query with it, and the checkpoint stays before it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from pyspark import StorageLevel
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import StructType

from pydanube.core.declared import says
from pydanube.errors import DataDamaged
from pydanube.pipeline import changes, steps
from pydanube.pipeline.backfill import first_offsets, history_rows
from pydanube.pipeline.copies import EpochGroup, KnownEpochs
from pydanube.pipeline.iceberg import IcebergTable
from pydanube.pipeline.known_keys import KnownKeys
from pydanube.pipeline.lake_settings import KNOWN as KNOWN
from pydanube.pipeline.lake_settings import Lake as Lake
from pydanube.pipeline.partitions import BY_DATE
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import local_path, scheme_of
from pydanube.pipeline.table_files import hadoop_of, table_files
from pydanube.pipeline.tables import LakeTable, ParquetTable, with_date
from pydanube.pipeline.task_files import parallelism
from pydanube.pipeline.upserts import IcebergUpserts, ParquetUpserts, UpsertRules, UpsertTable
from pydanube.spark.options import SourceOptions
from pydanube.spark.rows import arrow_schema

log = logging.getLogger(__name__)


class LakeTables(NamedTuple):
    """The tables of a job. Without a schema there is only the raw one; with mode: upsert `upserts` is the typed one."""

    raw: LakeTable
    typed: LakeTable | None = None
    quarantine: LakeTable | None = None
    upserts: UpsertTable | None = None
    deleted: LakeTable | None = None

    @classmethod
    def open(cls, spark: SparkSession, lake: Lake) -> LakeTables:
        """Made if they are missing, with room for the columns that the settings say."""
        raw_schema = with_date(from_arrow_schema(arrow_schema(steps.RAW_COLUMNS)))
        raw = _table(spark, lake, "raw")
        raw.evolve(raw_schema)
        if lake.schema is None:
            return cls(raw)
        schema = _typed_schema(spark, lake.schema, lake.time)
        quarantine = _table(spark, lake, "quarantine")
        if lake.upserts is None:
            typed = _table(spark, lake, "typed")
            typed.evolve(schema)
            quarantine.evolve(_quarantine_schema(raw_schema))
            return cls(raw, typed, quarantine)
        upserts, deleted = _upsert_table(spark, lake, lake.upserts.rules), _table(spark, lake, "deleted")
        upserts.evolve(schema)
        deleted.evolve(StructType([schema[name] for name in _deleted_columns(lake.upserts.rules)]))
        quarantine.evolve(_quarantine_schema(raw_schema))
        return cls(raw, None, quarantine, upserts, deleted)


def _table(spark: SparkSession, lake: Lake, kind: str) -> LakeTable:
    how: Any = {"rows_per_file": lake.rows_per_file, "layout": lake.layout if kind == "typed" else BY_DATE}
    if lake.format == "iceberg":
        job = f"lake-{lake.name}"
        return IcebergTable(spark, catalog(lake), _named(lake, kind), job=job, **how)
    files = table_files(spark, f"{lake.target}/{_named(lake, kind)}", lake.target_options)
    return ParquetTable(files, **how)


def _upsert_table(spark: SparkSession, lake: Lake, rules: UpsertRules) -> UpsertTable:
    if lake.format == "iceberg":
        job = f"lake-{lake.name}"
        return IcebergUpserts(
            spark, catalog(lake), _named(lake, "typed"), rules, job=job, rows_per_file=lake.rows_per_file
        )
    path = f"{local_path('target', lake.target)}/{_named(lake, 'typed')}"
    return ParquetUpserts(spark, path, rules, rows_per_file=lake.rows_per_file)


def _named(lake: Lake, kind: str) -> str:
    name = f"{lake.name}_{kind}".replace("-", "_")
    return f"danube.{name}" if lake.format == "iceberg" else name


def _deleted_columns(rules: UpsertRules) -> list[str]:
    """What is kept of a deletion: enough to know a change that is older."""
    names = [*rules.key, *([rules.version] if rules.version else []), *steps.ORIGIN, "date"]
    return list(dict.fromkeys(names))


class RowTally(NamedTuple):
    """One batch, counted: what came, what the tables have of it, what was left out as a copy.

    With mode: upsert `typed` are rows that the batch set, and `typed_copies` changes that another one replaced.
    """

    messages: int
    raw: int
    raw_copies: int
    typed: int = 0
    quarantine: int = 0
    typed_copies: int = 0
    deletions: int = 0


@says(
    "batch {batch} has {came} rows for {table}, whose files have {stored} of them, and {copies} are copies of "
    "others: do all executors write to the directory that this machine reads? The checkpoint stays before this "
    "batch, which is written again by the next run"
)
class RowsMissing(DataDamaged):
    """Rows of a batch are in no table, or there are too many of them."""

    table: str
    batch: int
    came: int
    stored: int
    copies: int


class Writer:
    """Adds batches to the tables. Spark calls it once per batch, beside the driver; rows never come here."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._tables: LakeTables | None = None
        self._known = KnownKeys(lake.key)
        self._epochs = KnownEpochs()
        self._epochs_since: date | None = None
        self.begun: dict[str, int] | None = None  # where batch 0 begins, if that was said
        self.tallies: dict[int, RowTally] = {}  # by batch; those of a Spark Connect server stay there

    def __getstate__(self) -> dict[str, Any]:
        """A Spark Connect server gets a copy, and opens the tables in its own session."""
        return {**Writer(self._lake).__dict__, "begun": self.begun}

    def __call__(self, frame: DataFrame, batch: int) -> None:
        if self._tables is None:
            self._tables = self._claimed(frame.sparkSession, batch)
        tally = self._read_raw(self._tables, frame, batch)
        self.tallies[batch] = self._write_typed(self._tables, tally, batch)

    def _claimed(self, spark: SparkSession, batch: int) -> LakeTables:
        tables = LakeTables.open(spark, self._lake)
        query = _query_of(spark, self._lake.checkpoint)
        for table in tables:
            if table is not None:
                table.claim(query, batch)
        return tables

    def _read_raw(self, tables: LakeTables, frame: DataFrame, batch: int) -> RowTally:
        lake = self._lake
        history = history_rows(frame.sparkSession, lake.source, lake.checkpoint, batch, self.begun)
        if history is not None:
            rows = steps.raw(history.frame)
            try:
                groups = steps.epoch_groups(rows)  # of three columns: that costs little, the rows are read later
            except PySparkException as error:
                log.warning("objects are gone", extra={"batch": batch, "why": str(error).partition("\n")[0]})
            else:
                if history.fits(groups):
                    return self._write_raw(tables, rows, groups, batch)
                log.warning("objects do not have what was planned: the stream reads", extra={"batch": batch})
        # Kept on the executors, in memory or on their disks: brokers are asked once per batch.
        rows = steps.raw(frame).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return self._write_raw(tables, rows, steps.epoch_groups(rows), batch)
        finally:
            rows.unpersist()

    def _write_raw(self, tables: LakeTables, rows: DataFrame, groups: Sequence[EpochGroup], batch: int) -> RowTally:
        dates = _dates(groups)
        messages, days = sum(dates.values()), self._lake.deduplicate_days
        known = None
        if days and dates:
            # Copies are published about when the batch was.
            since = min(dates) - timedelta(days=days)
            known = tables.raw.before(batch, since)
            self._know_epochs(known, since)
        spans = self._epochs.with_copies(groups)
        fresh = steps.once_each(rows, spans, known)
        copies = 0

        def check(stored: int) -> None:
            nonlocal copies
            if stored != messages:  # copies are rare: they are looked for when something is not there
                copies = messages - steps.count_messages(rows, spans, known)
            if stored + copies != messages:
                raise RowsMissing(tables.raw.path, batch, messages, stored, copies)

        written = tables.raw.write(_spread(fresh, dates, "offset"), batch, check)
        self._epochs.add(groups)
        return RowTally(messages, written, copies)

    def _know_epochs(self, known: DataFrame | None, since: date) -> None:
        """Reads the table once per run, and again for a batch with older messages."""
        if self._epochs_since is None or since < self._epochs_since:
            self._epochs_since = since
            if known is not None:
                self._epochs.add(steps.epoch_groups(known))

    def _write_typed(self, tables: LakeTables, tally: RowTally, batch: int) -> RowTally:
        lake = self._lake
        if lake.schema is None or tables.quarantine is None:
            return tally
        # Kept: payloads are parsed once, and then counted, written and put aside.
        decoded = self._decoded(tables.raw.batch(batch), lake.schema).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            if tables.typed is None:
                return self._merge(tables, decoded, lake.schema, tally, batch)
            return self._write_decoded(tables.typed, tables.quarantine, decoded, lake.schema, tally, batch)
        finally:
            decoded.unpersist()

    def _decoded(self, raw: DataFrame, schema: StructType) -> DataFrame:
        key, upserts = self._lake.key, self._lake.upserts
        if upserts is None:
            return steps.slim(steps.decoded(raw, schema, key=key))
        decoded = changes.decoded(
            raw,
            schema,
            key=key,
            envelope=upserts.envelope,
            deletes=upserts.deletes,
            version=upserts.rules.version,
        )
        return steps.slim(decoded, also=(changes.DELETED,))

    def _merge(
        self, tables: LakeTables, decoded: DataFrame, schema: StructType, tally: RowTally, batch: int
    ) -> RowTally:
        """Deletions first, then the table: should the batch come again in between, they are there already."""
        how, deleted, aside = self._lake.upserts, tables.deleted, tables.quarantine
        assert how is not None and tables.upserts is not None and deleted is not None and aside is not None
        every = changes.changes(decoded, schema, time=self._lake.time)
        counts = {row[changes.DELETED]: row["count"] for row in every.groupBy(changes.DELETED).count().collect()}
        rows, deletions = sum(counts.values()), 0
        if counts.get(True) or deleted.has(batch):
            going = every.where(changes.DELETED).withColumn("date", F.to_date("_append_time"))
            going = going.select(*_deleted_columns(how.rules))
            deletions = deleted.write(_spread(going, steps.count_dates(going), "_offset"), batch)
        quarantine = self._put_aside(aside, decoded, rows != tally.raw, batch)

        if rows + quarantine != tally.raw or deletions != counts.get(True, 0):
            raise RowsMissing(tables.upserts.path, batch, tally.raw, rows + quarantine, 0)
        newest = every.agg(F.to_date(F.max("_append_time"))).collect()[0][0]
        since = newest - timedelta(days=how.tombstone_days) if newest is not None else None
        done = tables.upserts.merge(every, deleted.before(batch, since) if since is not None else None, batch)
        replaced = rows - deletions - done.set
        return tally._replace(typed=done.set, quarantine=quarantine, typed_copies=replaced, deletions=deletions)

    def _put_aside(self, aside: LakeTable, decoded: DataFrame, are_bad: bool, batch: int) -> int:
        if not are_bad and not aside.has(batch):
            return 0
        bad = steps.quarantined(decoded)
        return aside.write(_spread(bad, steps.count_dates(bad), "offset"), batch)

    def _write_decoded(
        self,
        table: LakeTable,
        aside: LakeTable,
        decoded: DataFrame,
        schema: StructType,
        tally: RowTally,
        batch: int,
    ) -> RowTally:
        key = self._lake.key
        every = good = steps.typed(decoded, schema, time=self._lake.time)
        dates = steps.count_dates(every)
        rows = sum(dates.values())
        earlier = None
        if key:
            found = self._known.batches_with(table, every, batch)
            if self._known.asked != rows:  # as many hashes as rows: no key is there twice
                good = steps.first_by_key(good, key)
            if found:
                earlier = table.among(found)
                good = steps.unseen(good, earlier, key)
        quarantine = self._put_aside(aside, decoded, rows != tally.raw, batch)
        copies = 0

        def check(typed: int) -> None:
            nonlocal copies
            if typed + quarantine != tally.raw and key:
                copies = every.count() - steps.count_keys(every, earlier, key)
            if typed + quarantine + copies != tally.raw:
                raise RowsMissing(table.path, batch, tally.raw, typed + quarantine, copies)

        typed = table.write(_spread(good, dates, "_offset"), batch, check)
        if key:
            self._known.added(table, batch)
        return tally._replace(typed=typed, quarantine=quarantine, typed_copies=copies)


def _dates(groups: Sequence[EpochGroup]) -> dict[date, int]:
    found: dict[date, int] = {}
    for each in groups:
        assert each.date is not None, "every message has a time"
        found[each.date] = found.get(each.date, 0) + each.rows
    return found


def _spread(rows: DataFrame, dates: dict[date, int], offset: str) -> DataFrame:
    return steps.spread(rows, dates, offset=offset, tasks_max=parallelism(rows.sparkSession))


def _query_of(spark: SparkSession, checkpoint: str) -> str:
    """The id that Spark gave the query when it made the checkpoint. By Spark: it may be where only Spark can read."""
    [row] = spark.read.option("wholetext", True).text(f"{checkpoint}/metadata").collect()
    return str(json.loads(row["value"])["id"])


def _typed_schema(spark: SparkSession, schema: StructType, time: str | None) -> StructType:
    raw = spark.createDataFrame([], with_date(from_arrow_schema(arrow_schema(steps.RAW_COLUMNS))))
    return steps.typed(steps.decoded(raw, schema), schema, time=time).schema


def _quarantine_schema(raw: StructType) -> StructType:
    fields = {field.name: field for field in raw.fields}
    fields["reason"] = StructType().add("reason", "string").fields[0]
    return StructType([fields[name] for name in steps.QUARANTINE_COLUMNS])


def catalog(lake: Lake) -> Any:
    """The Iceberg catalog: as the settings say, or a SQLite file beside the tables."""
    from pyiceberg.catalog import load_catalog

    chosen = lake.catalog
    if scheme_of(lake.target) in ("", "file"):
        target = Path(local_path("target", lake.target))
        target.mkdir(parents=True, exist_ok=True)
        sqlite = {"type": "sql", "uri": f"sqlite:///{target}/catalog.sqlite", "warehouse": f"file://{target}"}
        chosen = chosen or sqlite
    return load_catalog("danube", **{name: str(value) for name, value in chosen.items()})


def check(values: dict[str, Any]) -> None:
    """The settings, checked without Spark. Raises ConfigError."""
    SourceOptions.parse(Lake.parse(values, has_spark=False).source, streaming=True)


def start(spark: SparkSession, lake: Lake, writer: Writer | None = None) -> StreamingQuery:
    """The query, running."""
    writer = writer or Writer(lake)
    writer.begun = first_offsets(lake.source)
    if writer.begun is not None:  # in numbers, so that the query and the writer mean the same
        lake = replace(lake, source={**lake.source, "startingOffsets": json.dumps(writer.begun)})
    stream = spark.readStream.format("danube").options(**lake.source).load()
    made = stream.writeStream.foreachBatch(writer).option("checkpointLocation", lake.checkpoint)
    made = made.queryName(f"lake-{lake.name}")
    if lake.follow_seconds is None:
        made = made.trigger(availableNow=True)
    else:
        made = made.trigger(processingTime=f"{lake.follow_seconds} seconds")
    return made.start()


def run(spark: SparkSession, values: dict[str, Any], watch: QueryWatch) -> JobReport:
    """Runs until everything that is there is in the tables, or, with follow_seconds, until it is stopped."""
    lake = Lake.parse(values)
    if lake.format == "parquet":
        table_files(spark, lake.target, lake.target_options)  # opened, and nothing written yet
    if scheme_of(lake.checkpoint) not in ("", "file") and getattr(spark, "_jvm", None) is not None:
        hadoop_of(spark, lake.checkpoint, key="checkpoint")  # else a Spark Connect server says what it cannot
    tables = LakeTables.open(spark, lake)  # a schema that does not fit is said before anything runs
    writer = Writer(lake)
    query = start(spark, lake, writer)
    rows = batches = 0
    seen = -1
    try:
        while True:
            ended = query.awaitTermination(1)
            for progress in query.recentProgress:
                # Not its item of that name, which a server of Spark Connect leaves out. Of history Spark counts none.
                tally = writer.tallies.get(progress.batchId)
                came = progress.numInputRows if tally is None else tally.messages
                if progress.batchId > seen and came:
                    seen = progress.batchId
                    rows += came
                    batches += 1
            aside = (
                {"quarantined": sum(each.quarantine for each in list(writer.tallies.values()))} if lake.schema else {}
            )
            watch.says(f"{rows:,} messages in {batches} batches", rows, None, batches=batches, messages=rows, **aside)
            if ended:
                break
    except KeyboardInterrupt:
        query.stop()
    report = JobReport("lake", {"messages": rows, "batches": batches, "tables": tables.raw.path.rpartition("/")[0]})
    for name, table in tables._asdict().items():
        if table is not None:
            report.values[f"{'typed' if name == 'upserts' else name}_rows"] = table.read().count()
    tallies = writer.tallies.values()
    is_known = bool(tallies) or not batches  # a Spark Connect server checks them all the same
    if tallies:
        report.values["messages"] = sum(each.messages for each in tallies)
        if lake.schema is not None:
            report.values["quarantined"] = sum(each.quarantine for each in tallies)
    for name in ("raw_copies", *(["typed_copies"] if lake.key else [])):
        report.values[name] = sum(getattr(each, name) for each in tallies) if is_known else "not known here"
    return report
