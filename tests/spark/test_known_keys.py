"""A batch is compared with the batches that may have its keys, and with no other; the table stays the only truth."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from pydanube.pipeline import maintain, steps
from pydanube.pipeline.iceberg import IcebergTable
from pydanube.pipeline.known_keys import KnownKeys
from pydanube.pipeline.report import QueryWatch
from pydanube.pipeline.table_files import table_files
from pydanube.pipeline.tables import BATCH, OTHERS, ParquetTable
from tests.e2e.objectstores import S3Server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DAY = date(2026, 11, 15)


def rows(spark: SparkSession, *numbers: int, kind: str = "long") -> DataFrame:
    return spark.createDataFrame([(number, DAY) for number in numbers], f"id {kind}, date date").coalesce(1)


def made(spark: SparkSession, form: str, directory: Path, server: S3Server) -> Any:
    from pyiceberg.catalog import load_catalog

    if form == "parquet":
        return ParquetTable(table_files(spark, str(directory)))
    where: dict[str, str] = {"warehouse": f"file://{directory}"}
    if form == "iceberg on s3":
        where = {
            "warehouse": server.url(),
            "s3.endpoint": server.endpoint,
            "s3.access-key-id": server.access_key,
            "s3.secret-access-key": server.secret_key,
        }
    catalog = load_catalog("danube", type="sql", uri=f"sqlite:///{directory}/c.sqlite", **where)
    return IcebergTable(spark, catalog, "danube.t", job="lake-t")


@pytest.mark.parametrize("form", ["parquet", "iceberg", pytest.param("iceberg on s3", marks=pytest.mark.long)])
def test_only_batches_that_may_have_a_key_are_compared(
    spark: SparkSession, tmp_path: Path, form: str, s3_server: S3Server
) -> None:
    table = made(spark, form, tmp_path, s3_server)
    table.evolve(rows(spark, 1).schema)
    for batch in range(3):
        table.write(rows(spark, 10 * batch, 10 * batch + 1), batch)
    known = KnownKeys(["id"])
    assert known.batches_with(table, rows(spark, 5, 99), 3) == []
    assert known.batches_with(table, rows(spark, 5, 11, kind="int"), 3) == [1], "an int is the long that it was"
    assert known.batches_with(table, rows(spark, 0, 21, 5), 2) == [0], "its own rows are not earlier ones"
    fresh = steps.unseen(rows(spark, 0, 21, 5), table.among([0]), ["id"])
    assert sorted(row["id"] for row in fresh.collect()) == [5, 21]
    known.batches_with(table, rows(spark, 30, 0), 3)
    table.write(rows(spark, 30), 3)
    known.added(table, 3)
    assert known.batches_with(table, rows(spark, 30), 4) == [3]
    assert KnownKeys(["id"], keys_max=3).batches_with(table, rows(spark, 5), 4) == [0, 1, 2, 3], "too many to know"
    if form != "parquet":  # somebody else may write
        table._table.append(pa.table({"id": pa.array([77], pa.int64()), "date": pa.array([DAY], pa.date32())}))
        assert known.batches_with(table, rows(spark, 77, 10), 4) == [OTHERS, 1]
        found = table.among([OTHERS, 1]).select("id", BATCH).collect()
        assert sorted(tuple(row) for row in found) == [(10, 1), (11, 1), (77, OTHERS)]


def put_together(directory: Path, batches: list[int]) -> None:
    """What `maintain` does, in another process: files of these batches become one that is of none."""
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("danube", type="sql", uri=f"sqlite:///{directory}/c.sqlite")
    table = catalog.load_table("danube.t")
    tasks = [
        task for task in table.scan().plan_files() if any(f"/batch-{n:012}/" in task.file.file_path for n in batches)
    ]
    settings = maintain.check({"catalog": {"type": "sql"}, "tables": ["danube.t"]})
    job = maintain.TableJob(
        settings, "danube.t", table, maintain.Budget(settings), [], QueryWatch("test", as_json=True)
    )
    assert job._rewrite(maintain.Group([task.file for task in tasks])) == "rewritten"


def test_keys_are_found_where_a_maintenance_has_put_them_meanwhile(
    spark: SparkSession, tmp_path: Path, s3_server: S3Server
) -> None:
    table = made(spark, "iceberg", tmp_path, s3_server)
    table.evolve(rows(spark, 1).schema)
    for batch in range(4):
        table.write(rows(spark, 10 * batch, 10 * batch + 1), batch)
    known = KnownKeys(["id"])
    known.batches_with(table, rows(spark, 40), 4)
    put_together(tmp_path, [0, 1])
    table.write(rows(spark, 40), 4)
    known.added(table, 4)
    assert known.batches_with(table, rows(spark, 10, 40), 5) == [OTHERS, 4], "10 is not where it was"
    put_together(tmp_path, [2, 3])
    found = [row["id"] for row in table.among([OTHERS, 4]).select("id").collect()]
    assert sorted(found) == [0, 1, 10, 11, 40], "as it was when it was asked for"
    assert known.batches_with(table, rows(spark, 20), 5) == [OTHERS]
