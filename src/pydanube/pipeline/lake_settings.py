"""The settings of *lake*, checked before Spark starts as far as they can be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DoubleType,
    FloatType,
    MapType,
    NullType,
    StructField,
    StructType,
)

from pydanube.errors import ConfigError
from pydanube.pipeline import ddl, partitions, steps
from pydanube.pipeline.partitions import TableLayout
from pydanube.pipeline.settings import CONNECTION, TOPICS, JobSettings, local_path, scheme_of
from pydanube.pipeline.table_files import OBJECTS, check_objects
from pydanube.pipeline.upserts import UpsertRules

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
    "mode",
    "envelope",
    "deletes",
    "version",
    "buckets",
    "tombstone_days",
    "partition_by",
    "sort_by",
    "checkpoint",
    "batch_rows",
    "rows_per_file",
    "follow_seconds",
    "start",
    "orphans",
    "fail_on_data_loss",
)


# What two writers may write in two ways.
UNKEYED: Final = (FloatType, DoubleType, BinaryType, ArrayType, MapType, StructType)
# What PyIceberg has a FileIO for, besides directories.
WAREHOUSES: Final = ("s3", "s3a", "s3n", "gs", "abfs", "abfss", "wasb", "wasbs", "oss", "hdfs", "viewfs", "hf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Upserting:
    """How messages change rows."""

    rules: UpsertRules
    envelope: str
    deletes: dict[str, str]
    tombstone_days: int


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
    upserts: Upserting | None  # None: rows are added
    layout: TableLayout  # of the typed table
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
        upserts = _upserts(settings, schema, key, form, target)
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
            upserts=upserts,
            layout=_layout(settings, schema, upserts, has_spark),
            deduplicate_days=settings.number("deduplicate_days", 1, least=0) or 0,
            checkpoint=settings.place("checkpoint") or _checkpoint(target, name),
            rows_per_file=settings.number("rows_per_file", 1_000_000) or 1_000_000,
            follow_seconds=settings.number("follow_seconds"),
        )


def _upserts(
    settings: JobSettings, schema: StructType | None, key: Sequence[str], form: str, target: str
) -> Upserting | None:
    mode = settings.one_of("mode", "append", ("append", "upsert"))
    if mode == "append":
        for name in ("envelope", "deletes", "version", "buckets", "tombstone_days"):
            if name in settings:
                raise ConfigError(name, settings.text(name), "nothing: it is for mode: upsert, in which rows change")
        return None
    if schema is None or not key:
        raise ConfigError("mode", mode, "with schema and key: one row is kept of each key")
    if form == "parquet" and scheme_of(target) not in ("", "file"):
        what = "a directory for mode: upsert: other places cannot switch from old files to new ones in one step; "
        raise ConfigError("target", target, what + "use format: iceberg, whose catalog does it on any store")
    version, deletes = settings.text("version"), settings.mapping("deletes")
    envelope = settings.one_of("envelope", "none", ("none", "debezium"))
    if deletes and envelope != "none":
        raise ConfigError("deletes", deletes, "nothing: in an envelope the operation d deletes")
    for setting, column in (*(("deletes", name) for name in deletes), *([("version", version)] if version else [])):
        if column not in schema.names:
            raise ConfigError(setting, column, "a column of the schema")
    for column in key:
        if isinstance(schema[column].dataType, UNKEYED):
            raise ConfigError("key", column, "text, a whole number, a date or a time for mode: upsert")
    return Upserting(
        rules=UpsertRules(key, version, settings.number("buckets")),
        envelope=envelope,
        deletes={name: _as_text(value) for name, value in deletes.items()},
        tombstone_days=settings.number("tombstone_days", 7, least=0) or 0,
    )


def _layout(
    settings: JobSettings, schema: StructType | None, upserts: Upserting | None, has_spark: bool
) -> TableLayout:
    divided, ordered = settings.texts("partition_by"), settings.texts("sort_by")
    for name, given in (("partition_by", divided), ("sort_by", ordered)):
        if given and schema is None:
            raise ConfigError(name, ", ".join(given), "with a schema: it is about the typed table")
        if given and upserts is not None:
            raise ConfigError(name, ", ".join(given), "nothing with mode: upsert, which divides by buckets of the key")
    origin = StructType().add("_topic", "string").add("_offset", "long").add("_publish_time", "timestamp")
    origin = origin.add("_append_time", "timestamp").add("_key", "string").add("date", "date")
    columns = StructType([*(schema.fields if schema is not None else ()), *origin.fields])
    layout = partitions.parse(divided, ordered, columns.names)
    if has_spark:
        partitions.check_types(layout, columns)
    return layout


def _as_text(value: object) -> str:
    """As Spark writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


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
