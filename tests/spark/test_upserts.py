"""Tables with one row per key, the last; DuckDB and PyIceberg read them. See docs/adr/0016-upserts.md."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import duckdb
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from pydanube.errors import ConfigError
from pydanube.pipeline import lake
from pydanube.pipeline.lake import Lake
from pydanube.pipeline.tables import OlderCheckpoint, OtherCheckpoint, TableDamaged
from pydanube.pipeline.upserts import IcebergUpserts, ParquetUpserts, UpsertRules
from tests.spark.places import Place
from tests.spark.test_jobs import _catalog, quiet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
COLUMNS = "id long, state string, _topic string, _offset long, _append_time timestamp"
FORMS = pytest.mark.parametrize("form", ["parquet", "iceberg"])


def changes(spark: SparkSession, first: int, *rows: tuple[int, str | None]) -> DataFrame:
    """Offsets from `first` on; a state of None deletes."""
    made = [
        (key, state, "/default/t", offset, NOON + timedelta(seconds=offset), state is None)
        for offset, (key, state) in enumerate(rows, first)
    ]
    return spark.createDataFrame(made, f"{COLUMNS}, __deleted boolean").coalesce(1)


def opened(spark: SparkSession, form: str, directory: Path, **rules: Any) -> Any:
    chosen = UpsertRules(key=("id",), **{"buckets": 2, **rules})
    if form == "parquet":
        table: Any = ParquetUpserts(spark, str(directory / "t"), chosen, rows_per_file=1000)
    else:
        directory.mkdir(exist_ok=True)
        table = IcebergUpserts(spark, _catalog(str(directory)), "danube.t", chosen, job="lake-t", rows_per_file=1000)
    table.evolve(spark.createDataFrame([], COLUMNS).schema)
    return table


def duck(form: str, directory: Path) -> list[tuple[int, str]]:
    """As docs/spark.md says to read it."""
    if form == "parquet":
        duckdb.sql(f"""
            set variable files = (
                select list_transform(names, name -> '{directory}/t/' || name)
                from read_json('{directory}/t/versions/*.json') order by batch desc limit 1
            )
        """)
        return duckdb.sql("select id, state from read_parquet(getvariable('files')) order by id").fetchall()
    return rows_of(_catalog(str(directory)).load_table("danube.t").scan().to_arrow())


def rows_of(scanned: pa.Table) -> list[tuple[int, str]]:
    return duckdb.from_arrow(scanned).order("id").project("id, state").fetchall()


@FORMS
def test_a_table_has_the_last_row_of_each_key_once_whatever_comes_again(
    spark: SparkSession, tmp_path: Path, form: str
) -> None:
    table = opened(spark, form, tmp_path)
    table.claim("query", 0)
    first = changes(spark, 0, (1, "a"), (2, "a"), (3, "a"), (1, "b"))
    assert table.merge(first, None, 0) == (3, 3)
    assert table.merge(first, None, 0) == (3, 3), "the batch again"
    second = changes(spark, 4, (2, None), (3, "c"), (4, "a"), (9, None))
    assert opened(spark, form, tmp_path).merge(second, None, 1) == (2, 3)
    assert duck(form, tmp_path) == [(1, "b"), (3, "c"), (4, "a")]
    # A change that comes late is older than the row, or than a deletion that is told.
    late = changes(spark, 2, (3, "late"), (2, "late"))
    gone = second.where("__deleted").drop("__deleted", "state")
    again = opened(spark, form, tmp_path)
    assert again.merge(late, gone, 2) == (0, 3)
    assert duck(form, tmp_path) == [(1, "b"), (3, "c"), (4, "a")]
    assert sorted(row["id"] for row in again.read().collect()) == [1, 3, 4]
    with pytest.raises(OlderCheckpoint):
        again.merge(first, None, 0)
    with pytest.raises(OtherCheckpoint):
        opened(spark, "parquet", tmp_path).claim("another", 3) if form == "parquet" else _claimed(again)


def _claimed(table: IcebergUpserts) -> None:
    table.claim("another", 3)


@FORMS
def test_a_driver_that_wakes_up_beside_its_successor_changes_nothing(
    spark: SparkSession, tmp_path: Path, form: str
) -> None:
    asleep, successor = opened(spark, form, tmp_path), opened(spark, form, tmp_path)
    for table in (asleep, successor):
        table.claim("query", 0)
    successor.merge(changes(spark, 0, (1, "a"), (2, "a")), None, 0)
    sound = asleep._files.write

    def overtaken(*rows: Any, **named: Any) -> Any:
        asleep._files.write = sound
        found = sound(*rows, **named)
        successor.merge(changes(spark, 2, (1, "b")), None, 1)
        successor.merge(changes(spark, 3, (2, "c")), None, 2)
        return found

    asleep._files.write = overtaken
    with pytest.raises(OlderCheckpoint, match="has batches up to 2"):
        asleep.merge(changes(spark, 2, (1, "b")), None, 1)
    assert duck(form, tmp_path) == [(1, "b"), (2, "c")]


def test_an_iceberg_merge_goes_on_top_of_what_another_writer_did(spark: SparkSession, tmp_path: Path) -> None:
    table = opened(spark, "iceberg", tmp_path)
    table.claim("query", 0)
    table.merge(changes(spark, 0, (1, "a"), (2, "a"), (3, "a")), None, 0)
    other = _catalog(str(tmp_path)).load_table("danube.t")
    sound = table._files.write

    def overtaken(*rows: Any, **named: Any) -> Any:
        table._files.write = sound
        other.delete("id = 2")  # rewrites a file that the merge has read
        return sound(*rows, **named)

    table._files.write = overtaken
    assert table.merge(changes(spark, 3, (1, "b")), None, 1) == (1, 2)
    assert duck("iceberg", tmp_path) == [(1, "b"), (3, "a")]
    spec = other.refresh().spec()
    assert [(field.name, str(field.transform)) for field in spec.fields] == [("_bucket", "identity")]
    rows = other.scan("_bucket = 0").to_arrow().num_rows + other.scan("_bucket = 1").to_arrow().num_rows
    assert rows == 2, "each row is in the partition that its file says"


def test_delete_files_of_another_writer_are_refused(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = opened(spark, "iceberg", tmp_path)
    table.claim("query", 0)
    table.merge(changes(spark, 0, (1, "a")), None, 0)
    with_deletes = Mock(plan_files=lambda: [Mock(delete_files={"deletes.parquet"})])
    monkeypatch.setattr(type(table._table), "scan", lambda *asked: with_deletes)
    with pytest.raises(TableDamaged, match="rewrite its data files"):
        table.merge(changes(spark, 1, (1, "b")), None, 1)


def test_old_versions_of_a_parquet_table_stay_for_readers_and_go_later(spark: SparkSession, tmp_path: Path) -> None:
    table = opened(spark, "parquet", tmp_path)
    table.claim("query", 0)
    for batch in range(3):
        table.merge(changes(spark, batch, (1, str(batch))), None, batch)
    attempts = tmp_path / "t" / "data"
    (attempts / "000000000009-crashed").mkdir()
    assert len(list(attempts.iterdir())) == 4
    long_ago = time.time() - 3600
    for path in [*attempts.iterdir(), *(tmp_path / "t" / "versions").iterdir()]:
        os.utime(path, (long_ago, long_ago))
    table.merge(changes(spark, 3, (1, "3")), None, 3)
    assert [path.name[:12] for path in sorted(attempts.iterdir())] == ["000000000003"]
    assert duck("parquet", tmp_path) == [(1, "3")]
    newest = tmp_path / "t" / "versions" / "000000000003.json"
    newest.write_text(newest.read_text()[:-9])
    with pytest.raises(TableDamaged, match="cannot be understood"):
        opened(spark, "parquet", tmp_path)


@FORMS
def test_a_table_is_not_divided_in_another_way_later(spark: SparkSession, tmp_path: Path, form: str) -> None:
    table = opened(spark, form, tmp_path)
    table.claim("query", 0)
    table.merge(changes(spark, 0, (1, "a")), None, 0)
    with pytest.raises(ConfigError, match="divided by it for good"):
        opened(spark, form, tmp_path, buckets=3)
    assert opened(spark, form, tmp_path, buckets=None).merge(changes(spark, 1, (1, "b")), None, 1) == (1, 1)


def test_rows_that_the_files_do_not_have_fail_the_batch(spark: SparkSession, tmp_path: Path) -> None:
    table = opened(spark, "parquet", tmp_path)
    table.claim("query", 0)
    sound = table._files.write
    table._files.write = lambda *rows, **named: sound(*rows, **named)[1:]
    with pytest.raises(TableDamaged, match=r"2 rows were merged, and the files in .* have 1"):
        table.merge(changes(spark, 0, (1, "a"), (2, "a")), None, 0)
    assert not list((tmp_path / "t").glob("versions/*"))


@FORMS
def test_a_topic_of_changes_becomes_a_table(spark: SparkSession, place: Place, tmp_path: Path, form: str) -> None:
    topic = place.new_topic("changes")
    rows = [{"id": number, "state": "new"} for number in range(20)]
    made = [json.dumps({"op": "c", "after": row}).encode() for row in rows]
    place.send(topic, [*made, b"not json"])
    place.upload(topic)
    paid = [json.dumps({"payload": {"op": "u", "after": {**row, "state": "paid"}}}).encode() for row in rows[:10]]
    gone = [json.dumps({"op": "d", "before": row}).encode() for row in rows[15:]]
    place.send(topic, [*paid, *gone])
    place.send(topic, [b""], keys=['{"id": 0}'])
    settings = {
        **{"service.url": place.url, "topic": topic, "name": "c", "target": str(tmp_path / "lake"), "format": form},
        **{"schema": "id long, state string", "key": ["id"], "mode": "upsert", "envelope": "debezium"},
        **{"batch_rows": 21, "buckets": 2},
    }
    report = lake.run(spark, settings, quiet())
    counted = {name: report.values[name] for name in report.values if name.endswith(("messages", "rows", "copies"))}
    assert counted == {
        **{"messages": 37, "raw_rows": 37, "quarantine_rows": 1, "typed_rows": 14, "deleted_rows": 6},
        **{"raw_copies": 0, "typed_copies": 1},  # a row that was paid, and deleted in the same batch
    }
    expected = [(number, "paid" if number < 10 else "new") for number in range(1, 15)]
    (tmp_path / "lake" / "t").symlink_to(tmp_path / "lake" / "c_typed")
    if form == "parquet":
        assert duck(form, tmp_path / "lake") == expected
    else:
        assert rows_of(_catalog(settings["target"]).load_table("danube.c_typed").scan().to_arrow()) == expected
    with pytest.raises(ConfigError, match="append"):
        lake.run(spark, {**settings, "mode": "append", "envelope": None, "buckets": None}, quiet())


def test_settings_of_upserts_that_cannot_be_meant_are_refused() -> None:
    good = {
        **{"service.url": "danube://h:1", "topic": "/default/t", "target": "lake", "schema": "id long, at long"},
        **{"key": ["id"], "mode": "upsert"},
    }
    parsed = Lake.parse(good, has_spark=False).upserts
    assert parsed is not None and (parsed.rules.key, parsed.tombstone_days) == (("id",), 7)
    for wrong, said in (
        ({"mode": "append", "version": "at"}, "it is for mode: upsert"),
        ({"key": None}, "one row is kept of each key"),
        ({"schema": None, "key": None}, "one row is kept of each key"),
        ({"version": "when"}, "a column of the schema"),
        ({"deletes": {"op": "d"}}, "a column of the schema"),
        ({"envelope": "avro"}, "none or debezium"),
        ({"envelope": "debezium", "deletes": {"at": 0}}, "the operation d deletes"),
        ({"target": "s3a://bucket/lake"}, "use format: iceberg"),
        ({"buckets": 0}, "a whole number"),
    ):
        with pytest.raises(ConfigError) as caught:
            Lake.parse({**good, **wrong}, has_spark=False)
        assert said in str(caught.value)
