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
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import NullType, StructField, StructType

from pydanube.core.declared import says
from pydanube.errors import ConfigError, DataDamaged
from pydanube.pipeline import ddl, steps
from pydanube.pipeline.iceberg import IcebergTable
from pydanube.pipeline.known_keys import KnownKeys
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import CONNECTION, TOPICS, JobSettings, local_path, scheme_of
from pydanube.pipeline.table_files import OBJECTS, check_objects, hadoop_of, table_files
from pydanube.pipeline.tables import LakeTable, ParquetTable, with_date
from pydanube.pipeline.task_files import parallelism
from pydanube.spark.options import SourceOptions
from pydanube.spark.rows import arrow_schema

KNOWN: Final = (
    *CONNECTION,
    *TOPICS,
    "name",
    "target",
    "target_options",
    "format",
    "catalog",
    "schema",
    "key",
    "time",
    "deduplicate_days",
    "checkpoint",
    "batch_rows",
    "rows_per_file",
    "follow_seconds",
    "start",
    "orphans",
    "fail_on_data_loss",
)


# What PyIceberg has a FileIO for, besides directories.
WAREHOUSES: Final = ("s3", "s3a", "s3n", "gs", "abfs", "abfss", "wasb", "wasbs", "oss", "hdfs", "viewfs", "hf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lake:
    """The job's settings, checked."""

    source: dict[str, str]
    name: str
    target: str
    target_options: dict[str, Any] = field(repr=False)  # secrets
    format: str
    catalog: dict[str, Any] = field(repr=False)
    schema: StructType | None
    key: Sequence[str]
    time: str | None
    deduplicate_days: int
    checkpoint: str
    rows_per_file: int
    follow_seconds: int | None

    @classmethod
    def parse(cls, values: dict[str, Any], *, has_spark: bool = True) -> Lake:
        """Without Spark the schema has names alone, which is what other settings are checked with."""
        settings = JobSettings(values, KNOWN, "lake")
        topics = settings.topics()
        settings.required("target", "where the tables are to be")
        target = (settings.place("target") or "").rstrip("/")
        form = settings.one_of("format", "parquet", ("parquet", "iceberg"))
        catalog, options = settings.mapping("catalog"), settings.mapping("target_options")
        _check_places(target, options, form, catalog)
        name = settings.text("name") or topics[0].rpartition("/")[2]
        text = settings.text("schema")
        schema = _schema(text, has_spark) if text is not None else None
        key, time = settings.texts("key"), settings.text("time")
        for column in [*key, *([time] if time else [])]:
            if schema is None or column not in schema.names:
                raise ConfigError("key" if column in key else "time", column, "a column of the schema")
        source = {
            **settings.connection(),
            "subscribe": ",".join(topics),
            "startingOffsets": settings.text("start", "earliest") or "earliest",
            "maxOffsetsPerTrigger": str(settings.number("batch_rows", 1_000_000)),
            "columns": ",".join(steps.RAW_COLUMNS),
            "orphans": settings.one_of("orphans", "wait", ("wait", "skip")),
            "failOnDataLoss": str(settings.flag("fail_on_data_loss", True)).lower(),
            "group.id": f"lake-{name}",
        }
        return cls(
            source=source,
            name=name,
            target=target,
            target_options=options,
            format=form,
            catalog=catalog,
            schema=schema,
            key=key,
            time=time,
            deduplicate_days=settings.number("deduplicate_days", 1, least=0) or 0,
            checkpoint=settings.place("checkpoint") or _checkpoint(target, name),
            rows_per_file=settings.number("rows_per_file", 1_000_000) or 1_000_000,
            follow_seconds=settings.number("follow_seconds"),
        )


def _check_places(target: str, options: dict[str, Any], form: str, catalog: dict[str, Any]) -> None:
    """What can be said of places without Spark. Raises ConfigError."""
    scheme = scheme_of(target)
    if scheme in OBJECTS:
        check_objects("target", target, options)
    elif options:
        raise ConfigError("target_options", "(hidden)", "nothing: they are for a target on s3://, gs:// or az://")
    elif scheme in ("", "file"):
        local_path("target", target)
    if form == "iceberg" and not catalog:
        local_path("target", target)  # a SQLite file is in it
    if isinstance(warehouse := catalog.get("warehouse"), str) and scheme_of(warehouse):
        if scheme_of(warehouse) == "file":
            local_path("catalog.warehouse", warehouse)
        elif scheme_of(warehouse) not in WAREHOUSES or "://" not in warehouse:
            what = f"a path or URL that PyIceberg can write to: file, {', '.join(WAREHOUSES)}"
            raise ConfigError("catalog.warehouse", warehouse, what)


def _checkpoint(target: str, name: str) -> str:
    if scheme_of(target) in OBJECTS:
        what = f"where Spark keeps what it has read: a directory, or a URL of its own; for {target} it has none"
        raise ConfigError("checkpoint", None, what)
    return f"{target}/_checkpoint-{name}"


def _schema(text: str, has_spark: bool) -> StructType:
    """Columns as SQL writes them: `order_id string not null, amount double, at timestamp`."""
    try:
        names = ddl.column_names(text)
        if not has_spark:
            return StructType([StructField(name, NullType()) for name in names])
        found = StructType.fromDDL(text)
        if not isinstance(found, StructType):
            raise ddl.Unreadable("these are no columns")
        return found
    except Exception as error:  # Spark's parser has its own errors, and some are Java's
        why = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError("schema", text, f"columns as in SQL, `id string not null, amount double`: {why}") from error


class LakeTables(NamedTuple):
    """The tables of a job. Without a schema there is only the raw one."""

    raw: LakeTable
    typed: LakeTable | None
    quarantine: LakeTable | None

    @classmethod
    def open(cls, spark: SparkSession, lake: Lake) -> LakeTables:
        """Made if they are missing, with room for the columns that the settings say."""
        raw_schema = with_date(from_arrow_schema(arrow_schema(steps.RAW_COLUMNS)))
        raw = _table(spark, lake, "raw")
        raw.evolve(raw_schema)
        if lake.schema is None:
            return cls(raw, None, None)
        typed, quarantine = _table(spark, lake, "typed"), _table(spark, lake, "quarantine")
        typed.evolve(_typed_schema(spark, lake.schema, lake.time))
        quarantine.evolve(_quarantine_schema(raw_schema))
        return cls(raw, typed, quarantine)


def _table(spark: SparkSession, lake: Lake, kind: str) -> LakeTable:
    name = f"{lake.name}_{kind}".replace("-", "_")
    if lake.format == "iceberg":
        job = f"lake-{lake.name}"
        return IcebergTable(spark, catalog(lake), f"danube.{name}", job=job, rows_per_file=lake.rows_per_file)
    files = table_files(spark, f"{lake.target}/{name}", lake.target_options)
    return ParquetTable(files, rows_per_file=lake.rows_per_file)


class RowTally(NamedTuple):
    """One batch, counted: what came, what the tables have of it, what was left out as a copy."""

    messages: int
    raw: int
    raw_copies: int
    typed: int = 0
    quarantine: int = 0
    typed_copies: int = 0


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
        self.tallies: dict[int, RowTally] = {}  # by batch; those of a Spark Connect server stay there

    def __getstate__(self) -> dict[str, Any]:
        """A Spark Connect server gets a copy, and opens the tables in its own session."""
        return {"_lake": self._lake, "_tables": None, "_known": KnownKeys(self._lake.key), "tallies": {}}

    def __call__(self, frame: DataFrame, batch: int) -> None:
        if self._tables is None:
            self._tables = self._claimed(frame.sparkSession, batch)
        # Kept on the executors, in memory or on their disks: the topic is read once per batch.
        rows = steps.raw(frame).persist(StorageLevel.MEMORY_AND_DISK)
        try:
            tally = self._write_raw(self._tables, rows, batch)
        finally:
            rows.unpersist()
        self.tallies[batch] = self._write_typed(self._tables, tally, batch)

    def _claimed(self, spark: SparkSession, batch: int) -> LakeTables:
        tables = LakeTables.open(spark, self._lake)
        query = _query_of(spark, self._lake.checkpoint)
        for table in tables:
            if table is not None:
                table.claim(query, batch)
        return tables

    def _write_raw(self, tables: LakeTables, rows: DataFrame, batch: int) -> RowTally:
        dates = steps.count_dates(rows)
        messages, days = sum(dates.values()), self._lake.deduplicate_days
        known = None
        if days and dates:
            # Copies are published about when the batch was.
            known = tables.raw.before(batch, min(dates) - timedelta(days=days))
        fresh = steps.without_repetitions(rows)
        if known is not None:
            fresh = steps.unseen_messages(fresh, known)
        copies = 0

        def check(stored: int) -> None:
            nonlocal copies
            if stored != messages:  # copies are rare: they are looked for when something is not there
                copies = messages - steps.count_messages(rows, known)
            if stored + copies != messages:
                raise RowsMissing(tables.raw.path, batch, messages, stored, copies)

        return RowTally(messages, tables.raw.write(_spread(fresh, dates, "offset"), batch, check), copies)

    def _write_typed(self, tables: LakeTables, tally: RowTally, batch: int) -> RowTally:
        lake = self._lake
        if lake.schema is None or tables.typed is None or tables.quarantine is None:
            return tally
        # Kept: payloads are parsed once, and then counted, written and put aside.
        decoded = steps.decoded(tables.raw.batch(batch), lake.schema, key=lake.key)
        decoded = decoded.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            return self._write_decoded(tables.typed, tables.quarantine, decoded, lake.schema, tally, batch)
        finally:
            decoded.unpersist()

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
        earlier = None
        if key:
            good = steps.first_by_key(good, key)
            if found := self._known.batches_with(table, every, batch):
                earlier = table.among(found)
                good = steps.unseen(good, earlier, key)
        bad = steps.quarantined(decoded)
        quarantine = aside.write(_spread(bad, steps.count_dates(bad), "offset"), batch)
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
    stream = spark.readStream.format("danube").options(**lake.source).load()
    made = stream.writeStream.foreachBatch(writer or Writer(lake)).option("checkpointLocation", lake.checkpoint)
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
                # Not its item of that name, which a server of Spark Connect leaves out.
                if progress.batchId > seen and progress.numInputRows:
                    seen = progress.batchId
                    rows += progress.numInputRows
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
            report.values[f"{name}_rows"] = table.read().count()
    tallies = writer.tallies.values()
    is_known = bool(tallies) or not batches  # a Spark Connect server checks them all the same
    if tallies:
        report.values["messages"] = sum(each.messages for each in tallies)
        if lake.schema is not None:
            report.values["quarantined"] = sum(each.quarantine for each in tallies)
    for name in ("raw_copies", *(["typed_copies"] if lake.key else [])):
        report.values[name] = sum(getattr(each, name) for each in tallies) if is_known else "not known here"
    return report
