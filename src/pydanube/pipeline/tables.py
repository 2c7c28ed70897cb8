"""Tables that batches are added to exactly once: plain Parquet, or Iceberg.

    {table}/batch=000000000007/date=2026-11-15/part-….parquet     Parquet: a batch that comes again replaces itself
    {table}/_schema.json                                           the columns that the table has now
    {table}/_query                                                 the query whose batches these are

    Iceberg: executors write the same files below data/, and the driver adds them to the table in one transaction whose
    snapshot says the batch; a batch that a snapshot has already is not added again. A property says the query.

A query counts its batches, and its checkpoint keeps the count. Another checkpoint begins with 0 again, so a table goes
on with its own only.

Columns are only ever added, and types only widened; old files stay as they are. A reader of the Parquet table takes
columns by name (`read`, or DuckDB's union_by_name).
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

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

from pydanube.errors import ConfigError, DataDamaged, Refused

ROWS_PER_FILE: Final = 1_000_000
QUERY: Final = "danube.query"
WIDER: Final[dict[type[DataType], tuple[type[DataType], ...]]] = {
    ShortType: (IntegerType, LongType),
    IntegerType: (LongType,),
    FloatType: (DoubleType,),
}


class Table(Protocol):
    """What jobs need of one."""

    path: str

    def evolve(self, schema: StructType) -> None:
        """Makes room for these columns. Raises ConfigError if a type cannot become what is asked for."""
        ...

    def claim(self, query: str, batch: int) -> None:
        """Must come before the first batch of a run, with its number. Raises OtherCheckpoint."""
        ...

    def write(self, rows: DataFrame, batch: int) -> None:
        """Adds a batch; the same batch again changes nothing."""
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


class OtherCheckpoint(Refused):
    """`table` has batches of the query `theirs` (None: of a version that did not say); they are not those of `ours`."""

    def __init__(self, table: str, theirs: str | None, ours: str) -> None:
        super().__init__(table, theirs, ours)
        self.table = table
        self.theirs = theirs
        self.ours = ours

    def __str__(self) -> str:
        theirs = f" (query {self.theirs})" if self.theirs else ""
        return (
            f"{self.table} was written with another checkpoint{theirs} than this one (query {self.ours}), so nobody "
            "can say what it has already, and nothing was written: go on with the checkpoint that wrote the table, or "
            "give the job another name and a new checkpoint, for tables from the beginning"
        )


def check_query(table: str, theirs: str | None, ours: str, newest: int, batch: int) -> None:
    """May a query go on with `batch` in a table whose newest batch is `newest`, or -1? Raises OtherCheckpoint.

    A table of a version that did not say its query is known by the number: the newest may come again, or what follows.
    """
    is_ours = theirs == ours if theirs is not None else batch >= newest
    if newest >= 0 and not is_ours:
        raise OtherCheckpoint(table, theirs, ours)


class ParquetTable:
    """A directory."""

    def __init__(self, spark: SparkSession, path: str, *, rows_per_file: int = ROWS_PER_FILE) -> None:
        self.path = path.rstrip("/")
        self._spark = spark
        self._rows_per_file = rows_per_file

    def evolve(self, schema: StructType) -> None:
        known = self._schema() or StructType([])
        wanted = widened(known, schema, self.path)
        if wanted != known:
            self._keep("_schema.json", wanted.json())

    def _keep(self, name: str, text: str) -> None:
        file = Path(self._local) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        made = file.with_name(f"{name}.new")
        made.write_text(text)
        made.replace(file)

    def _schema(self) -> StructType | None:
        file = Path(self._local) / "_schema.json"
        if not file.is_file():
            return None
        try:
            return StructType.fromJson(json.loads(file.read_text()))
        except (ValueError, KeyError) as error:
            raise TableDamaged(self.path, f"_schema.json cannot be understood: {error}") from error

    @property
    def _local(self) -> str:
        return self.path.removeprefix("file://")

    def claim(self, query: str, batch: int) -> None:
        file = Path(self._local) / "_query"
        known = file.read_text() if file.is_file() else None
        newest = max((int(path.name[6:]) for path in Path(self._local).glob("batch=*")), default=-1)
        check_query(self.path, known, query, newest, batch)
        if known != query:
            self._keep("_query", query)

    def write(self, rows: DataFrame, batch: int) -> None:
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

    def batch(self, number: int) -> DataFrame:
        return self._read(f"{self.path}/batch={number:012}")

    def before(self, number: int) -> DataFrame | None:
        if not any(Path(self._local).glob("batch=*")):
            return None
        return self.read().where(F.col("batch") < number).drop("batch")

    def read(self) -> DataFrame:
        schema = self._schema()
        if schema is None:
            raise TableDamaged(self.path, "there is no table")
        with_batch = StructType([*schema.fields, StructField("batch", LongType())])
        if not any(Path(self._local).glob("batch=*")):
            return self._spark.createDataFrame([], with_batch)
        return self._spark.read.schema(with_batch).parquet(self.path)

    def _read(self, path: str) -> DataFrame:
        schema = self._schema()
        reader = self._spark.read if schema is None else self._spark.read.schema(schema)
        return reader.parquet(path)


class TableDamaged(DataDamaged):
    def __init__(self, table: str, what: str) -> None:
        super().__init__(table, what)
        self.table = table
        self.what = what

    def __str__(self) -> str:
        return f"{self.table}: {self.what}"


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
        self.path = self._table.location()

    def claim(self, query: str, batch: int) -> None:
        self._table.refresh()
        known = self._table.properties.get(QUERY)
        # Snapshots go when a table is looked after, but for the last.
        newest = max(self._added(), default=0) if self._table.current_snapshot() is not None else -1
        check_query(self._identifier, known, query, newest, batch)
        if known != query:
            with self._table.transaction() as change:
                change.set_properties({QUERY: query})

    def write(self, rows: DataFrame, batch: int) -> None:
        self._table.refresh()
        if batch in self._added():
            return
        place = self._place(batch)
        # The date stays inside the files too: Iceberg learns a file's partition from its statistics.
        (
            rows.withColumn("__date", F.col("date"))
            .repartition("date")
            .write.mode("overwrite")
            .option("maxRecordsPerFile", self._rows_per_file)
            .partitionBy("__date")
            .parquet(place)
        )
        files = sorted(str(path) for path in Path(place.removeprefix("file://")).rglob("*.parquet"))
        properties = {"danube.job": self._job, "danube.batch": str(batch)}
        if files:
            self._table.add_files(files, snapshot_properties=properties)

    def _place(self, batch: int) -> str:
        return f"{self.path}/data/{self._job}/batch-{batch:012}"

    def _added(self) -> set[int]:
        """The batches that snapshots name."""
        summaries = [each.summary for each in self._table.snapshots() if each.summary is not None]
        return {int(each["danube.batch"]) for each in summaries if each.get("danube.job") == self._job}

    def batch(self, number: int) -> DataFrame:
        place = self._place(number)
        if not any(Path(place.removeprefix("file://")).rglob("*.parquet")):
            return self._empty()
        return self._spark.read.schema(self._spark_schema()).parquet(place)

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


def _arrow(schema: StructType) -> Any:
    """With columns that may all be null, as Iceberg gets them."""
    nullable = StructType([StructField(field.name, field.dataType, True) for field in schema.fields])
    return to_arrow_schema(nullable, timezone="UTC")


def with_date(schema: StructType) -> StructType:
    return StructType([*schema.fields, StructField("date", DateType(), True)])
