"""Tables wherever their URL says: on Spark's own file systems, and on a real S3-compatible server without any jar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from pydanube.errors import ConfigError
from pydanube.pipeline import lake, steps, task_files
from pydanube.pipeline.table_files import table_files
from tests.e2e.objectstores import S3Server
from tests.spark.places import Place
from tests.spark.test_jobs import copies, order, quiet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCHEMA = "id string not null, amount double, at timestamp"


def settings(place: Place, topic: str, target: str, **more: Any) -> dict[str, Any]:
    known = {"service.url": place.url, "topic": topic, "name": "orders", "target": target, "schema": SCHEMA}
    return {**known, **more}


def counted(report: Any) -> dict[str, Any]:
    assert report.problems == []
    return {name: report.values[name] for name in ("messages", "raw_rows", "typed_rows", "quarantine_rows")}


@pytest.fixture(scope="module")
def keyed(place: Place) -> str:
    """6,000 messages with 1,000 keys."""
    topic = place.new_topic("keyed")
    place.send(topic, [order(number % 1000) for number in range(6000)])
    return topic


@pytest.mark.long
def test_keys_hold_on_any_file_system_that_spark_has(
    spark: SparkSession, place: Place, keyed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "there").mkdir()
    spark.conf.set("fs.viewfs.mounttable.lake.link./data", f"file://{tmp_path}/there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(steps, "ROWS_PER_TASK", 500)
    given = settings(place, keyed, "viewfs://lake/data/x", key=["id"], batch_rows=3000)
    report = lake.run(spark, given, quiet())
    assert counted(report) == {"messages": 6000, "raw_rows": 6000, "typed_rows": 1000, "quarantine_rows": 0}
    assert [path.name for path in tmp_path.iterdir()] == ["there"], "nothing is written beside it"
    found = duckdb.sql(
        f"select count(*), count(distinct id) from read_parquet('{tmp_path}/there/x/orders_typed/*/*/*.parquet')"
    ).fetchone()
    assert found == (1000, 1000)
    # Every task of the cluster wrote, though all is of one date.
    assert len(list((tmp_path / "there/x/orders_raw/batch=000000000000").rglob("*.parquet"))) == 2


def test_a_parquet_lake_is_on_an_s3_server_without_a_jar(
    spark: SparkSession, place: Place, tmp_path: Path, s3_server: S3Server
) -> None:
    topic, url = place.new_topic("objects"), s3_server.url()
    place.send(topic, [order(number % 40) for number in range(60)])
    given = settings(
        place, topic, url, key=["id"], batch_rows=30, target_options=s3_server.options,
        checkpoint=str(tmp_path / "checkpoint"), rows_per_file=10,
    )  # fmt: skip
    assert counted(lake.run(spark, given, quiet())) == {
        **{"messages": 60, "raw_rows": 60, "typed_rows": 40, "quarantine_rows": 0}
    }
    # As somebody else reads it.
    files = _arrow(s3_server)
    listed = files.get_file_info(pyarrow.fs.FileSelector(url.removeprefix("s3://"), recursive=True))
    names = [each.path.partition("/orders_")[2] for each in listed if each.is_file]
    assert not [name for name in names if "_staged" in name]
    found = [name for name in names if name.startswith("raw/batch=000000000000/date=")]
    assert len(found) == 3 and all(name.endswith(".parquet") for name in found)
    typed = [each.path for each in listed if each.is_file and "orders_typed/batch=" in each.path]
    rows = [pq.read_table(path, filesystem=files) for path in typed]
    ids = [one for table in rows for one in table.column("id").to_pylist()]
    assert sorted(ids) == sorted(f"o-{number}" for number in range(40))


def test_a_batch_on_an_s3_server_that_comes_again_replaces_itself(spark: SparkSession, s3_server: S3Server) -> None:
    files = table_files(spark, s3_server.url(), s3_server.options)
    for count in (25, 12):
        rows = spark.range(count).selectExpr("id", "date_add(date'2026-11-15', cast(id % 2 as int)) as date")
        for batch in (3, 4):
            assert files.replace(batch, rows, 10) == count
    assert files.batches() == [3, 4]
    found = files.read_before(rows.schema, 4, date(2026, 11, 16)).collect()
    assert sorted(tuple(row) for row in found) == [(number, date(2026, 11, 16), 3) for number in range(1, 12, 2)]


@pytest.mark.long
def test_an_iceberg_lake_is_on_an_s3_server_without_a_jar(
    spark: SparkSession, place: Place, tmp_path: Path, s3_server: S3Server
) -> None:
    from pyiceberg.catalog import load_catalog

    topic = place.new_topic("iceberg")
    place.send(topic, [*(order(number) for number in range(50)), b"not json", order(7)])
    copies(place, topic, [order(50), order(51)], 2)
    catalog = {
        "type": "sql",
        "uri": f"sqlite:///{tmp_path}/catalog.sqlite",
        "warehouse": s3_server.url(),
        "s3.endpoint": s3_server.endpoint,
        "s3.access-key-id": s3_server.access_key,
        "s3.secret-access-key": s3_server.secret_key,
        "s3.region": s3_server.region,
    }
    given = settings(place, topic, str(tmp_path), format="iceberg", catalog=catalog, key=["id"], batch_rows=30)
    assert counted(lake.run(spark, given, quiet())) == {
        **{"messages": 56, "raw_rows": 54, "typed_rows": 52, "quarantine_rows": 1}
    }
    typed = load_catalog("danube", **catalog).load_table("danube.orders_typed").scan().to_arrow()
    assert sorted(typed.column("id").to_pylist()) == sorted(f"o-{number}" for number in range(52))
    assert typed.schema.field("at").type.tz == "UTC"
    raw = load_catalog("danube", **catalog).load_table("danube.orders_raw").scan().to_arrow()
    assert [dict(row["attributes"]) for row in raw.to_pylist() if row["offset"] == 3] == [{"n": "3"}]


def _arrow(server: S3Server) -> pyarrow.fs.S3FileSystem:
    return pyarrow.fs.S3FileSystem(
        endpoint_override=server.endpoint, access_key=server.access_key, secret_key=server.secret_key,
        region=server.region, allow_bucket_creation=False,
    )  # fmt: skip


def test_small_files_on_a_spark_file_system_are_replaced_whole(spark: SparkSession, tmp_path: Path) -> None:
    spark.conf.set("fs.viewfs.mounttable.small.link./data", f"file://{tmp_path}")
    files = table_files(spark, "viewfs://small/data/t")
    assert files.text("_query") is None and files.batches() == []
    for text in ("one", "zwei ä"):
        files.keep("_query", text)
        assert files.text("_query") == text
    assert [path.name for path in (tmp_path / "t").iterdir() if not path.name.endswith(".crc")] == ["_query"]
    # The driver died between the two last steps.
    (tmp_path / "t" / "_query").rename(tmp_path / "t" / "_query.new")
    (tmp_path / "t" / "._query.crc").rename(tmp_path / "t" / "._query.new.crc")
    assert files.text("_query") == "zwei ä"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": "nofs://lake/x"}, "No FileSystem for scheme"),
        ({"target": "s3a://bucket/x"}, "or s3:// which needs no jar"),
        ({"checkpoint": "s3a://bucket/x"}, "checkpoint = .*for which this Spark has a file system; it says"),
        ({"format": "iceberg", "catalog": "hdfs://nowhere/x"}, r"catalog\.warehouse.*that PyIceberg can write to"),
    ],
)
def test_a_place_that_this_spark_cannot_write_to_is_refused_before_the_query_starts(
    spark: SparkSession, tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    given = {"service.url": "danube://127.0.0.1:1", "topic": "/default/t", "target": str(tmp_path), **changes}
    if "catalog" in given:
        given["catalog"] = {"type": "sql", "uri": f"sqlite:///{tmp_path}/c.sqlite", "warehouse": given["catalog"]}
    with pytest.raises(ConfigError, match=says):
        lake.run(spark, given, quiet())
    assert not spark.streams.active


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"target": "s3://bucket/x"}, "checkpoint.*where Spark keeps what it has read"),
        ({"target": "s3:x"}, "target.*s3://bucket/prefix"),
        ({"target": "file://host/x"}, "target.*as a path or as file:///path"),
        ({"target": "s3://b/x", "target_options": {"secrt_key": "hidden-one"}}, "secrt_key"),
        ({"target": "/x", "target_options": {"region": "x"}}, "target_options"),
        ({"target": "s3://b/x", "format": "iceberg"}, "target.*as a path or as file:///path"),
        ({"target": "/x", "format": "iceberg", "catalog": {"warehouse": "nofs://x"}}, r"catalog\.warehouse.*PyIceberg"),
    ],
)
def test_a_place_that_nothing_can_write_to_is_refused_without_spark(changes: dict[str, Any], says: str) -> None:
    given = {"service.url": "danube://127.0.0.1:1", "topic": "/default/t", **changes}
    with pytest.raises(ConfigError, match=says) as caught:
        lake.check(given)
    assert "hidden-one" not in json.dumps(str(caught.value))


def test_a_task_holds_no_more_rows_than_it_may_and_a_file_no_more_than_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    put: dict[str, pa.Table] = {}

    class Kept:
        @contextmanager
        def open(self) -> Iterator[Kept]:
            yield self

        def put(self, path: str, data: pa.Buffer) -> None:
            put[path] = pq.read_table(pa.BufferReader(data))

        def get(self, path: str) -> pa.Buffer:
            raise AssertionError(path)

    days = [date(2026, 11, 1 + number % 3) for number in range(90)]
    batch = pa.record_batch({"n": pa.array(range(90)), "text": pa.array(["x" * 1000] * 90), "date": pa.array(days)})
    monkeypatch.setattr(task_files, "TASK_BYTES", 8_000)
    [told] = task_files._write(Kept(), "d", 12, False, "date", [batch.slice(0, 45), batch.slice(45)])
    assert [put[path].num_rows for path in told.column("path").to_pylist()] == told.column("rows").to_pylist()
    assert max(told.column("rows").to_pylist()) == 12 and len(put) > 9, "some were written before they were full"
    for day in set(days):
        rows = [table for path, table in put.items() if f"/date={day}/" in path]
        found = sorted(n for table in rows for n in table.column("n").to_pylist())
        assert found == [number for number in range(90) if days[number] == day]
    assert all(table.column_names == ["n", "text"] for table in put.values())
