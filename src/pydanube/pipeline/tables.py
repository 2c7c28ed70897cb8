"""Tables that batches are added to exactly once: plain Parquet, or Iceberg.

    {table}/batch=000000000007/date=2026-11-15/part-….parquet     Parquet: a batch that comes again replaces itself
    {table}/_schema.json                                           the columns that the table has now
    {table}/_query                                                 the query whose batches these are

    Iceberg: executors write the same files below data/, each attempt in a directory of its own, and the driver adds
    them to the table. The same transaction sets the property danube.progress to the batch, its rows and its directory,
    so a batch that comes again is known however many snapshots have expired, and whatever else writes to the table.

A query counts its batches, and its checkpoint keeps the count. Another checkpoint begins with 0 again, and an older
copy goes back, so a table goes on with its own only. Tables are local directories; `write` counts the rows of their
files.

Columns are only ever added, and types only widened; old files stay as they are. A reader of the Parquet table takes
columns by name (`read`, or DuckDB's union_by_name).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

from pyarrow.parquet import read_metadata
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    DataType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructField,
    StructType,
)

from pydanube.core.declared import says
from pydanube.errors import ConfigError, DataDamaged, Refused
from pydanube.pipeline.settings import local_path

ROWS_PER_FILE: Final = 1_000_000
QUERY: Final = "danube.query"
PROGRESS: Final = "danube.progress"
WIDER: Final[dict[type[DataType], tuple[type[DataType], ...]]] = {
    ShortType: (IntegerType, LongType),
    IntegerType: (LongType,),
    FloatType: (DoubleType,),
}


Check: TypeAlias = Callable[[int], None]


class LakeTable(Protocol):
    """What jobs need of one."""

    path: str

    def evolve(self, schema: StructType) -> None:
        """Makes room for these columns. Raises ConfigError if a type cannot become what is asked for."""
        ...

    def claim(self, query: str, batch: int) -> None:
        """Must come before the first batch of a run, with its number. Raises OtherCheckpoint."""
        ...

    def write(self, rows: DataFrame, batch: int, check: Check = lambda stored: None) -> int:
        """Adds a batch; the same batch again changes nothing. Returns how many rows the table's files have of it.

        `check` is called with that number, and may raise: an Iceberg table does not have the batch then, and a Parquet
        table has it until it is written again.
        """
        ...

    def batch(self, number: int) -> DataFrame:
        """The rows of a batch that was written."""
        ...

    def before(self, number: int) -> DataFrame | None:
        """The rows of earlier batches; None if there are none."""
        ...

    def read(self) -> DataFrame:
        """All rows."""
        ...


def widened(old: StructType, new: StructType, table: str) -> StructType:
    """The columns of both. Raises ConfigError."""
    fields = {field.name: field for field in old.fields}
    for field in new.fields:
        known = fields.get(field.name)
        if known is None or known.dataType == field.dataType:
            # A column that was not there from the beginning is null in older rows.
            nullable = field.nullable if known is None and not old.fields else True
            fields[field.name] = StructField(field.name, field.dataType, nullable)
        elif type(field.dataType) in WIDER.get(type(known.dataType), ()):
            fields[field.name] = StructField(field.name, field.dataType, True)
        elif type(known.dataType) not in WIDER.get(type(field.dataType), ()):
            raise _does_not_fit(field, table, f"it is {known.dataType.simpleString()}")
    return StructType(list(fields.values()))


def _does_not_fit(field: StructField, table: str, why: str) -> ConfigError:
    asked = f"{field.name} {field.dataType.simpleString()}"
    return ConfigError("schema", asked, f"in {table} {why}: add a column of another name, or use a new table")


@says()
class OtherCheckpoint(Refused):
    """`table` has batches of the query `theirs` (None: of a version that did not say); they are not those of `ours`."""

    table: str
    theirs: str | None
    ours: str

    def __str__(self) -> str:
        theirs = f" (query {self.theirs})" if self.theirs else ""
        return (
            f"{self.table} was written with another checkpoint{theirs} than this one (query {self.ours}), so nobody "
            "can say what it has already, and nothing was written: go on with the checkpoint that wrote the table, or "
            "give the job another name and a new checkpoint, for tables from the beginning"
        )


@says(
    "{table} has batches up to {newest}, and the checkpoint goes on with {batch}: it is an older copy, whose "
    "batches need not be the same messages, and nothing was written: bring the newest checkpoint back, or give "
    "the job another name and a new checkpoint, for tables from the beginning"
)
class OlderCheckpoint(Refused):
    """`table` has batches up to `newest`, and its query goes on with `batch`: an older copy of its checkpoint."""

    table: str
    newest: int
    batch: int


def check_query(table: str, theirs: str | None, ours: str, newest: int, batch: int) -> None:
    """May a query go on with `batch` in a table whose newest batch is `newest`, or -1?

    The newest may come again, or what follows. Raises OtherCheckpoint, OlderCheckpoint. A table of a version that did
    not say its query is known by the number alone.
    """
    if newest < 0:
        return
    if theirs != ours and (theirs is not None or batch < newest):
        raise OtherCheckpoint(table, theirs, ours)
    if batch < newest:
        raise OlderCheckpoint(table, newest, batch)


class ParquetTable:
    """A directory."""

    def __init__(self, spark: SparkSession, path: str, *, rows_per_file: int = ROWS_PER_FILE) -> None:
        self.path = local_path("target", path).rstrip("/")
        self._spark = spark
        self._rows_per_file = rows_per_file

    def evolve(self, schema: StructType) -> None:
        known = self._schema() or StructType([])
        wanted = widened(known, schema, self.path)
        if wanted != known:
            self._keep("_schema.json", wanted.json())

    def _keep(self, name: str, text: str) -> None:
        file = Path(self.path) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f"{name}.new")
        made.write_text(text)
        made.replace(file)

    def _schema(self) -> StructType | None:
        file = Path(self.path) / "_schema.json"
        if not file.is_file():
            return None
        try:
            return StructType.fromJson(json.loads(file.read_text()))
        except (ValueError, KeyError) as error:
            raise TableDamaged(self.path, f"_schema.json cannot be understood: {error}") from error

    def claim(self, query: str, batch: int) -> None:
        file = Path(self.path) / "_query"
        known = file.read_text() if file.is_file() else None
        newest = max((int(path.name[6:]) for path in Path(self.path).glob("batch=*")), default=-1)
        check_query(self.path, known, query, newest, batch)
        if known != query:
            self._keep("_query", query)

    def write(self, rows: DataFrame, batch: int, check: Check = lambda stored: None) -> int:
        wanted = self._schema()
        if wanted is not None:  # in the order and with the types that the table has
            have = set(rows.columns)
            rows = rows.select(
                *(
                    (F.col(f.name) if f.name in have else F.lit(None)).cast(f.dataType).alias(f.name)
                    for f in wanted.fields
                )
            )
        (
            rows.repartition("date")
            .write.mode("overwrite")
            .option("maxRecordsPerFile", self._rows_per_file)
            .partitionBy("date")
            .parquet(f"{self.path}/batch={batch:012}")
        )
        stored = rows_in(f"{self.path}/batch={batch:012}")
        check(stored)
        return stored

    def batch(self, number: int) -> DataFrame:
        return self._read(f"{self.path}/batch={number:012}")

    def before(self, number: int) -> DataFrame | None:
        if not any(Path(self.path).glob("batch=*")):
            return None
        return self.read().where(F.col("batch") < number).drop("batch")

    def read(self) -> DataFrame:
        schema = self._schema()
        if schema is None:
            raise TableDamaged(self.path, "there is no table")
        with_batch = StructType([*schema.fields, StructField("batch", LongType())])
        if not any(Path(self.path).glob("batch=*")):
            return self._spark.createDataFrame([], with_batch)
        return self._spark.read.schema(with_batch).parquet(self.path)

    def _read(self, path: str) -> DataFrame:
        schema = self._schema()
        reader = self._spark.read if schema is None else self._spark.read.schema(schema)
        return reader.parquet(path)


@says("{table}: {what}")
class TableDamaged(DataDamaged):
    table: str
    what: str


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
    ) -> None:
        self._spark = spark
        self._catalog = catalog
        self._identifier = identifier
        self._job = job
        self._rows_per_file = rows_per_file
        self._table: Any = None
        self.path = ""

    def evolve(self, schema: StructType) -> None:
        from pyiceberg.exceptions import NamespaceAlreadyExistsError, NoSuchTableError, ValidationError

        namespace = self._identifier.rpartition(".")[0]
        try:
            self._table = self._catalog.load_table(self._identifier)
        except NoSuchTableError:
            with suppress(NamespaceAlreadyExistsError):
                self._catalog.create_namespace(namespace)
            self._table = self._catalog.create_table(self._identifier, schema=_arrow(schema))
            with self._table.update_spec() as change:
                change.add_identity("date")
        else:
            with self._table.update_schema() as change:
                for field in schema.fields:
                    try:
                        change.union_by_name(_arrow(StructType([field])))
                    except (ValidationError, ValueError, TypeError) as error:
                        raise _does_not_fit(field, self._identifier, f"it has another type ({error})") from error
        self.path = local_path("catalog", self._table.location()).rstrip("/")

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
        # The date stays inside the files too: Iceberg learns a file's partition from its statistics.
        (
            rows.withColumn("__date", F.col("date"))
            .repartition("date")
            .write.mode("errorifexists")
            .option("maxRecordsPerFile", self._rows_per_file)
            .partitionBy("__date")
            .parquet(place)
        )
        stored = rows_in(place)
        check(stored)
        if stored:
            progress = BatchProgress(batch, stored, place)
            with self._table.transaction() as change:
                # No other job ever had such a path, so no other file needs to be looked at.
                change.add_files(files_in(place), progress.summary(self._job), check_duplicate_files=False)
                change.set_properties({PROGRESS: progress.to_json()})
        return stored

    def _place(self, batch: int) -> str:
        return f"{self.path}/data/{self._job}/batch-{batch:012}"

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
            progress = BatchProgress(batch, rows_in(self._place(batch)), self._place(batch))
        return progress if progress is not None and progress.batch == batch else None

    def _added(self) -> set[int]:
        """The batches that snapshots name."""
        summaries = [each.summary for each in self._table.snapshots() if each.summary is not None]
        return {int(each["danube.batch"]) for each in summaries if each.get("danube.job") == self._job}

    def batch(self, number: int) -> DataFrame:
        stored = self._stored(number)
        if stored is None or not stored.rows:
            return self._empty()
        if rows_in(stored.place) != stored.rows:
            raise TableDamaged(self._identifier, f"the files of batch {number} are gone from {stored.place}")
        return self._spark.read.schema(self._spark_schema()).parquet(stored.place)

    def before(self, number: int) -> DataFrame | None:
        """Earlier batches of this job, by their files."""
        files = [
            task.file.file_path
            for task in self._table.refresh().scan().plan_files()
            if f"/batch-{number:012}/" not in task.file.file_path
        ]
        return self._spark.read.schema(self._spark_schema()).parquet(*files) if files else None

    def read(self) -> DataFrame:
        files = [task.file.file_path for task in self._table.refresh().scan().plan_files()]
        return self._spark.read.schema(self._spark_schema()).parquet(*files) if files else self._empty()

    def _empty(self) -> DataFrame:
        return self._spark.createDataFrame([], self._spark_schema())

    def _spark_schema(self) -> StructType:
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(self._table.schema().as_arrow())


def files_in(directory: str) -> list[str]:
    return sorted(str(path) for path in Path(directory).rglob("*.parquet"))


def rows_in(directory: str) -> int:
    """How many rows its Parquet files say they have."""
    return sum(read_metadata(file).num_rows for file in files_in(directory))


def _arrow(schema: StructType) -> Any:
    """With columns that may all be null, as Iceberg gets them."""
    nullable = StructType([StructField(field.name, field.dataType, True) for field in schema.fields])
    return to_arrow_schema(nullable, timezone="UTC")


def with_date(schema: StructType) -> StructType:
    return StructType([*schema.fields, StructField("date", DateType(), True)])
