"""How the files of a table are divided and sorted: Iceberg's transforms, for Iceberg and for directories of Parquet.

    partition_by: [day(at), bucket[16](id)]     at_day=2026-11-15/id_bucket=7/part-….parquet
    sort_by: [id]                               rows within each file

The values are Iceberg's own: in UTC, and a bucket is that of every other engine. In a directory's name they are as
people write them; the columns themselves stay in the files.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

import pandas as pd
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import (
    BooleanType,
    DataType,
    DateType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from pydanube.errors import ConfigError

NOTHING: Final = "__HIVE_DEFAULT_PARTITION__"
DIRECTORY: Final = "__directory"
TIMES: Final = ("year", "month", "day", "hour")
WHOLE: Final = (ShortType, IntegerType, LongType)
TYPES: Final[dict[str, tuple[type[DataType], ...]]] = {
    "identity": (StringType, BooleanType, DateType, *WHOLE),
    "bucket": (StringType, DateType, TimestampType, *WHOLE),
    "truncate": (StringType, *WHOLE),
    "hour": (TimestampType,),
    **dict.fromkeys(("year", "month", "day"), (DateType, TimestampType)),
}
_FIELD: Final = re.compile(r"(?:(\w+)\s*(?:\[\s*(\d+)\s*\])?\s*\(\s*(?:(\d+)\s*,\s*)?(\w+)\s*\)|(\w+))")


class Division(NamedTuple):
    """One field of a partition spec."""

    transform: str
    column: str
    width: int | None = None

    @property
    def name(self) -> str:
        return self.column if self.transform == "identity" else f"{self.column}_{self.transform}"

    @property
    def iceberg(self) -> str:
        return self.transform if self.width is None else f"{self.transform}[{self.width}]"

    def __str__(self) -> str:
        return self.column if self.transform == "identity" else f"{self.iceberg}({self.column})"


@dataclass(frozen=True, slots=True)
class TableLayout:
    divisions: Sequence[Division] = (Division("identity", "date"),)
    sort: Sequence[str] = ()

    @property
    def is_by_date(self) -> bool:
        return [*self.divisions] == [Division("identity", "date")]

    def __str__(self) -> str:
        return ", ".join(map(str, self.divisions)) or "nothing"


BY_DATE: Final = TableLayout()


def parse(partition_by: Sequence[str], sort_by: Sequence[str], columns: Sequence[str]) -> TableLayout:
    """Raises ConfigError. Without `partition_by` the date divides."""
    divisions = [_division(text) for text in partition_by]
    for setting, names in (("partition_by", [each.column for each in divisions]), ("sort_by", sort_by)):
        for name in names:
            if name not in columns:
                raise ConfigError(setting, name, f"a column of the table: {', '.join(columns)}")
    if len({each.name for each in divisions}) != len(divisions):
        raise ConfigError("partition_by", ", ".join(partition_by), "each column with one transform, once")
    return TableLayout(tuple(divisions) or BY_DATE.divisions, tuple(sort_by))


def _division(text: str) -> Division:
    what = "a column, or year, month, day, hour(column), bucket[16](column) or truncate[4](column)"
    found = _FIELD.fullmatch(text.strip())
    if found is None:
        raise ConfigError("partition_by", text, what)
    transform, first, second, column, alone = found.groups()
    if alone:
        return Division("identity", alone)
    width = first or second
    needs_width = transform in ("bucket", "truncate")
    if transform not in TYPES or (width is not None) != needs_width or (first and second) or width == "0":
        raise ConfigError("partition_by", text, what)
    return Division(transform, column, int(width) if width is not None else None)


def check_types(layout: TableLayout, schema: StructType) -> None:
    """Raises ConfigError."""
    for each in layout.divisions:
        kind = schema[each.column].dataType
        if not isinstance(kind, TYPES[each.transform]):
            allowed = ", ".join(sorted({one().simpleString() for one in TYPES[each.transform]}))
            raise ConfigError("partition_by", str(each), f"a column of type {allowed}; it is {kind.simpleString()}")


# --- values ---------------------------------------------------------------------------------------------------


def value_of(each: Division, schema: StructType) -> Column:
    """Iceberg's value of a row: a number since 1970 for times."""
    column, kind = F.col(each.column), schema[each.column].dataType
    if each.transform == "identity":
        return F.unix_date(column) if isinstance(kind, DateType) else column
    if each.transform == "bucket":
        return _bucket(column, kind, each.width or 1)
    if each.transform == "truncate":
        width = each.width or 1
        return F.substring(column, 1, width) if isinstance(kind, StringType) else column - F.pmod(column, F.lit(width))
    if each.transform == "hour":
        return F.floor(F.unix_micros(column) / 3_600_000_000).cast("int")
    day = column if isinstance(kind, DateType) else F.date_from_unix_date(_days(column))
    if each.transform == "day":
        return F.unix_date(day)
    years = F.year(day) - 1970
    return years if each.transform == "year" else years * 12 + F.month(day) - 1


def _days(time: Column) -> Column:
    return F.floor(F.unix_micros(time) / 86_400_000_000).cast("int")


def _shown(each: Division, schema: StructType) -> Column:
    """The value of a row as people write it."""
    value, kind, day = value_of(each, schema), schema[each.column].dataType, F.date_from_unix_date
    if each.transform == "year":
        return (value + 1970).cast("string")
    if each.transform == "month":
        return F.format_string("%04d-%02d", F.floor(value / 12) + 1970, F.pmod(value, F.lit(12)) + 1)
    if each.transform == "day" or (each.transform == "identity" and isinstance(kind, DateType)):
        return day(value).cast("string")
    if each.transform == "hour":
        date = day(F.floor(value / 24).cast("int")).cast("string")
        return F.format_string("%s-%02d", date, F.pmod(value, F.lit(24)))
    return value.cast("string")


def with_divisions(
    rows: DataFrame, layout: TableLayout, schema: StructType, prefix: str
) -> tuple[DataFrame, list[str]]:
    """The rows with a column for each division, for Spark's writer, and their names.

    Without a prefix a column that divides as it is stands for itself: readers take it from the directory.
    """
    names = []
    for each in layout.divisions:
        name = f"{prefix}{each.name}"
        if each.transform == "identity":
            rows = rows.withColumn(name, F.col(each.column))  # Spark writes it as we do
        else:
            shown = F.when(value_of(each, schema).isNotNull(), _shown(each, schema))
            rows = rows.withColumn(name, shown)
        names.append(name)
    return sorted_rows(rows, layout, names), names


def with_directory(rows: DataFrame, layout: TableLayout, schema: StructType) -> DataFrame:
    """The rows with the directory of each, below the table's or the batch's own: for tasks that write."""
    parts = []
    for each in layout.divisions:
        named = F.regexp_replace(F.url_encode(_shown(each, schema)), r"\+", "%20")
        known = F.when(value_of(each, schema).isNotNull(), named)
        parts.append(F.concat(F.lit(f"{each.name}="), F.coalesce(known, F.lit(NOTHING))))
    return sorted_rows(rows.withColumn(DIRECTORY, F.concat_ws("/", *parts)), layout, [DIRECTORY])


def sorted_rows(rows: DataFrame, layout: TableLayout, first: Sequence[str] = ()) -> DataFrame:
    """Rows of each task in the order of the table, below columns that its files are divided by."""
    return rows.sortWithinPartitions(*first, *layout.sort) if layout.sort else rows


def _bucket(column: Column, kind: DataType, width: int) -> Column:
    """Iceberg's: Murmur3, of eight bytes for numbers and times."""
    if isinstance(kind, StringType):
        return _udf(_texts(width), column)
    if isinstance(kind, DateType):
        column = F.unix_date(column)
    elif isinstance(kind, TimestampType):
        column = F.unix_micros(column)
    return _udf(_numbers(width), column.cast("long"))


def _udf(function: Callable[[pd.Series], pd.Series], column: Column) -> Column:
    from pyspark.sql.pandas.functions import pandas_udf

    made: Any = pandas_udf(function, IntegerType())  # type: ignore[call-overload]
    called: Column = made(column)
    return called


def _texts(width: int) -> Callable[[pd.Series], pd.Series]:
    def buckets(values: pd.Series) -> pd.Series:
        from mmh3 import hash as murmur

        return values.map({each: (murmur(each) & 0x7FFFFFFF) % width for each in values.dropna().unique()})

    return _typed(buckets)


def _numbers(width: int) -> Callable[[pd.Series], pd.Series]:
    def buckets(values: pd.Series) -> pd.Series:
        from mmh3 import hash as murmur

        known = values.dropna().unique()
        return values.map({each: (murmur(struct.pack("<q", int(each))) & 0x7FFFFFFF) % width for each in known})

    return _typed(buckets)


def _typed(function: Callable[[pd.Series], pd.Series]) -> Callable[[pd.Series], pd.Series]:
    """Spark looks at what annotations are, not at how they are written."""
    function.__annotations__ = {"values": pd.Series, "return": pd.Series}
    return function


# --- Iceberg --------------------------------------------------------------------------------------------------


def from_directory(path: str, layout: TableLayout, schema: StructType) -> list[Any]:
    """The values of a file, of its path: what `with_directory` or Spark wrote."""
    found = dict(part.removeprefix("__").partition("=")[::2] for part in path.split("/") if "=" in part)
    return [_read(each, found[each.name], schema[each.column].dataType) for each in layout.divisions]


def _read(each: Division, text: str, kind: DataType) -> Any:
    from datetime import date

    text = unquote(text)
    if text == NOTHING:
        return None
    if each.transform == "year":
        return int(text) - 1970
    if each.transform == "month":
        year, month = text.rsplit("-", 1)
        return (int(year) - 1970) * 12 + int(month) - 1
    if each.transform == "day" or (each.transform == "identity" and isinstance(kind, DateType)):
        return (date.fromisoformat(text) - date(1970, 1, 1)).days
    if each.transform == "hour":
        day, hour = text.rsplit("-", 1)
        return (date.fromisoformat(day) - date(1970, 1, 1)).days * 24 + int(hour)
    if each.transform == "bucket" or isinstance(kind, WHOLE):
        return int(text)
    return text == "true" if isinstance(kind, BooleanType) else text
