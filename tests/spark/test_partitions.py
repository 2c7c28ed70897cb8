"""Files divided and sorted as Iceberg's transforms say; PyIceberg's own transforms and DuckDB are the judges."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from pydanube.errors import ConfigError
from pydanube.pipeline import partitions
from pydanube.pipeline.iceberg import IcebergTable
from pydanube.pipeline.lake import Lake
from pydanube.pipeline.table_files import table_files
from pydanube.pipeline.tables import ParquetTable
from tests.spark.test_jobs import _catalog

COLUMNS = ["id", "n", "at", "country", "date"]
BY = ["day(at)", "bucket[4](id)", "truncate[10](n)", "country", "bucket(3, at)"]


def rows(spark: SparkSession) -> DataFrame:
    made: list[tuple[Any, ...]] = []
    for number in range(60):
        at = datetime(1969, 12, 31, 22, 30, tzinfo=UTC) + timedelta(minutes=95 * (number % 5))
        country = [None, "DE", "a/b=c d+e%ü"][number % 3]
        made.append((f"o-{number}-ü", (number % 4) * 7 - 9, at, country, date(2026, 11, 15)))
    made.append((None, None, None, None, None))
    return spark.createDataFrame(made, "id string, n long, at timestamp, country string, date date")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_an_iceberg_table_has_the_partitions_and_the_order_that_pyiceberg_computes(
    spark: SparkSession, tmp_path: Path
) -> None:
    layout = partitions.parse(BY, ["n", "id"], COLUMNS)
    frame = rows(spark)
    partitions.check_types(layout, frame.schema)
    table = IcebergTable(spark, _catalog(str(tmp_path)), "danube.t", job="lake-t", layout=layout)
    table.evolve(frame.schema)
    assert table.write(frame.coalesce(1), 0) == 61
    opened = _catalog(str(tmp_path)).load_table("danube.t")
    fields = [(str(field.transform), field.name) for field in opened.spec().fields]
    assert fields == [
        *[("day", "at_day"), ("bucket[4]", "id_bucket"), ("truncate[10]", "n_truncate")],
        *[("identity", "country"), ("bucket[3]", "at_bucket")],
    ]
    schema = opened.schema()
    computed = [
        (schema.find_field(f.source_id).name, f.transform.transform(schema.find_type(f.source_id)))
        for f in opened.spec().fields
    ]
    seen = 0
    for task in opened.scan().plan_files():
        found = pq.read_table(task.file.file_path)
        seen += found.num_rows
        assert task.file.sort_order_id == opened.sort_order().order_id != 0
        order = [(row["n"] is not None, row["n"], row["id"] or "") for row in found.to_pylist()]
        assert order == sorted(order)
        for row in found.to_pylist():
            row["at"] = row["at"] and round(row["at"].timestamp() * 1_000_000)
            assert list(task.file.partition) == [transform(row[name]) for name, transform in computed]
    assert seen == 61
    assert opened.scan("country = 'a/b=c d+e%ü' and id = 'o-5-ü'").to_arrow().num_rows == 1
    assert opened.scan("at < '1970-01-01T00:00:00+00:00'").to_arrow().num_rows == 12
    assert opened.scan("country is null").to_arrow().num_rows == 21
    again = IcebergTable(spark, _catalog(str(tmp_path)), "danube.t", job="lake-t")
    with pytest.raises(ConfigError, match=r"by which .* is divided"):
        again.evolve(frame.schema)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_parquet_table_has_directories_that_people_and_duckdb_read(spark: SparkSession, tmp_path: Path) -> None:
    layout = partitions.parse(["month(at)", "country"], ["n"], COLUMNS)
    table = ParquetTable(table_files(spark, str(tmp_path / "t")), layout=layout)
    frame = rows(spark)
    table.evolve(frame.schema)
    for batch in range(2):
        assert table.write(frame, batch) == 61
    directories = {path.parent.relative_to(tmp_path / "t").as_posix() for path in (tmp_path / "t").rglob("*.parquet")}
    assert "batch=000000000001/at_month=1969-12/country=DE" in directories
    assert sorted(map(tuple, table.read().drop("batch").collect()), key=str) == sorted(
        map(tuple, [*frame.collect(), *frame.collect()]), key=str
    )
    pattern = f"{tmp_path}/t/**/*.parquet"
    asked = f"select count(*), count(country), count(distinct at_month) from read_parquet('{pattern}')"
    assert duckdb.sql(asked).fetchone() == (122, 80, 2)
    again = ParquetTable(table_files(spark, str(tmp_path / "t")))
    with pytest.raises(ConfigError, match=r"month\(at\), country, by which"):
        again.evolve(frame.schema)


def test_partitions_that_cannot_be_meant_are_refused() -> None:
    good = {
        **{"service.url": "danube://h:1", "topic": "/default/t", "target": "lake", "schema": "id long, at timestamp"},
        **{"key": ["id"]},
    }
    parsed = Lake.parse({**good, "partition_by": "hour(at), bucket[8](id)", "sort_by": "id"}, has_spark=False)
    assert str(parsed.layout) == "hour(at), bucket[8](id)" and list(parsed.layout.sort) == ["id"]
    assert Lake.parse(good, has_spark=False).layout.is_by_date
    for wrong, said in (
        ({"partition_by": "when"}, "a column of the table"),
        ({"partition_by": "week(at)"}, "bucket[16](column)"),
        ({"partition_by": "bucket(id)"}, "bucket[16](column)"),
        ({"partition_by": "bucket[0](id)"}, "bucket[16](column)"),
        ({"partition_by": "day[3](at)"}, "bucket[16](column)"),
        ({"partition_by": "day(at), day(at)"}, "each column with one transform, once"),
        ({"sort_by": ["when"]}, "a column of the table"),
        ({"partition_by": "id", "schema": None, "key": None}, "with a schema"),
        ({"partition_by": "id", "mode": "upsert"}, "buckets of the key"),
    ):
        with pytest.raises(ConfigError) as caught:
            Lake.parse({**good, **wrong}, has_spark=False)
        assert said in str(caught.value)


@pytest.mark.slow
def test_a_transform_that_does_not_fit_a_type_is_refused(spark: SparkSession) -> None:
    schema = rows(spark).schema
    for wrong in ("hour(date)", "truncate[2](at)", "year(id)"):
        with pytest.raises(ConfigError, match="a column of type"):
            partitions.check_types(partitions.parse([wrong], [], COLUMNS), schema)
