"""Tables that batches are added to exactly once: plain Parquet here, Iceberg in `iceberg.py`.

    {table}/batch=000000000007/date=2026-11-15/part-….parquet     a batch that comes again replaces itself
    {table}/_schema.json                                           the columns that the table has now
    {table}/_query                                                 the query whose batches these are

A query counts its batches, and its checkpoint keeps the count. Another checkpoint begins with 0 again, and an older
copy goes back, so a table goes on with its own only. `write` counts the rows that the files have.

Columns are only ever added, and types only widened; old files stay as they are. A reader of the Parquet table takes
columns by name (`read`, or DuckDB's union_by_name).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from datetime import date
from typing import Final, Protocol, TypeAlias

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
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
from pydanube.pipeline.partitions import BY_DATE, TableLayout
from pydanube.pipeline.table_files import TableFiles

ROWS_PER_FILE: Final = 1_000_000
WIDER: Final[dict[type[DataType], tuple[type[DataType], ...]]] = {
    ShortType: (IntegerType, LongType),
    IntegerType: (LongType,),
    FloatType: (DoubleType,),
}


BATCH: Final = "__batch"  # the column that says of which batch a row is
OTHERS: Final = -1  # in place of a batch

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

    def has(self, batch: int) -> bool:
        """Whether it was written, with rows."""
        ...

    def batch(self, number: int) -> DataFrame:
        """The rows of a batch that was written."""
        ...

    def before(self, number: int, since: date | None = None) -> DataFrame | None:
        """The rows of earlier batches, of this date and later ones; None if there are no such batches."""
        ...

    def read(self) -> DataFrame:
        """All rows."""
        ...

    def schema(self) -> StructType:
        """The columns that the table has now."""
        ...

    def numbers(self) -> list[int]:
        """The batches whose rows it has, and OTHERS if it has rows of other writers."""
        ...

    def among(self, batches: Collection[int]) -> DataFrame:
        """The rows of these batches, which are `numbers`, with the column BATCH. Opens no file of others."""
        ...

    def version(self) -> str:
        """Changes when anybody writes to the table, or may not, if it can be this job only. `numbers` and `among` are
        of what it was when this was asked for, or when this job wrote to it.
        """
        ...

    def version_before(self) -> str:
        """What `version` was before the last write."""
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
            raise does_not_fit(field, table, f"it is {known.dataType.simpleString()}")
    return StructType(list(fields.values()))


def does_not_fit(field: StructField, table: str, why: str) -> ConfigError:
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


def check_partitions(table: str, there: str, layout: TableLayout) -> None:
    """Raises ConfigError if a table is divided in another way."""
    if there != str(layout):
        raise ConfigError("partition_by", str(layout), f"{there}, by which {table} is divided: or use another name")


class ParquetTable:
    """A directory of batches, on any store (`table_files.py`)."""

    def __init__(self, files: TableFiles, *, rows_per_file: int = ROWS_PER_FILE, layout: TableLayout = BY_DATE) -> None:
        self.path = files.url
        self._files = files
        self._rows_per_file = rows_per_file
        self._layout = layout

    def evolve(self, schema: StructType) -> None:
        known = self._schema() or StructType([])
        there = self._files.text("_partitions") or (str(BY_DATE) if known.fields else None)
        if there is not None:
            check_partitions(self.path, there, self._layout)
        elif self._layout.divisions != BY_DATE.divisions:
            self._files.keep("_partitions", str(self._layout))
        wanted = widened(known, schema, self.path)
        if wanted != known:
            self._files.keep("_schema.json", wanted.json())

    def _schema(self) -> StructType | None:
        text = self._files.text("_schema.json")
        try:
            return None if text is None else StructType.fromJson(json.loads(text))
        except (ValueError, KeyError) as error:
            raise TableDamaged(self.path, f"_schema.json cannot be understood: {error}") from error

    def schema(self) -> StructType:
        schema = self._schema()
        if schema is None:
            raise TableDamaged(self.path, "there is no table")
        return schema

    def claim(self, query: str, batch: int) -> None:
        known = self._files.text("_query")
        check_query(self.path, known, query, max(self._files.batches(), default=-1), batch)
        if known != query:
            self._files.keep("_query", query)

    def write(self, rows: DataFrame, batch: int, check: Check = lambda stored: None) -> int:
        wanted = self.schema()  # in the order and with the types that the table has
        have = set(rows.columns)
        fitted = rows.select(
            *((F.col(f.name) if f.name in have else F.lit(None)).cast(f.dataType).alias(f.name) for f in wanted.fields)
        )
        stored = self._files.replace(batch, fitted, self._rows_per_file, self._layout)
        check(stored)
        return stored

    def has(self, batch: int) -> bool:
        return batch in self._files.batches()

    def batch(self, number: int) -> DataFrame:
        return self._files.read(self.schema(), number)

    def before(self, number: int, since: date | None = None) -> DataFrame | None:
        if not any(each < number for each in self._files.batches()):
            return None
        return self._files.read_before(self.schema(), number, since).drop("batch")

    def read(self) -> DataFrame:
        return self._files.read_before(self.schema())

    def numbers(self) -> list[int]:
        return self._files.batches()

    def among(self, batches: Collection[int]) -> DataFrame:
        return self._files.read_among(self.schema(), sorted(batches)).withColumnRenamed("batch", BATCH)

    def version(self) -> str:
        return ""

    def version_before(self) -> str:
        return ""


@says("{table}: {what}")
class TableDamaged(DataDamaged):
    table: str
    what: str


def with_date(schema: StructType) -> StructType:
    return StructType([*schema.fields, StructField("date", DateType(), True)])
