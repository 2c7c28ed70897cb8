"""A batch is compared with the batches that may have its keys, and with no other; the table stays the only truth."""

from __future__ import annotations

from datetime import date
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from pydanube.pipeline import steps
from pydanube.pipeline.iceberg import IcebergTable
from pydanube.pipeline.known_keys import KnownKeys
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
