"""No job says ok when rows are missing: what cannot work is refused before it starts, and what was done is counted."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

import pydanube.spark
from pydanube.errors import ConfigError
from pydanube.pipeline import compact, lake, steps
from pydanube.pipeline.run import reason
from pydanube.pipeline.settings import local_path
from pydanube.spark.errors import StoreNotHere
from tests.e2e.processes import danube_here
from tests.spark.places import Place, numbers, place_in
from tests.spark.test_jobs import _catalog, copies, order, quiet

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCHEMA = "id string, amount double, at timestamp"


def orders(place: Place, topic: str, target: Path | str, **more: Any) -> dict[str, Any]:
    known = {"service.url": place.url, "topic": topic, "name": "orders", "target": str(target), "schema": SCHEMA}
    return {**known, **more}


# --- what cannot work -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "path"),
    [("/a/b", "/a/b"), ("file:///a%20b", "/a b"), ("file:/a", "/a"), ("file://localhost/a", "/a"), ("/a:b", "/a:b")],
)
def test_a_directory_is_a_path_or_a_file_url_with_one_slash_or_three(place: str, path: str) -> None:
    assert local_path("target", place) == path


@pytest.mark.parametrize("place", ["s3a://bucket/x", "hdfs:/x", "file://host/x", "file:x"])
def test_what_is_no_directory_of_this_machine_is_refused_where_one_is_needed(place: str) -> None:
    with pytest.raises(ConfigError, match="a directory that this machine and all executors have"):
        local_path("target", place)


# --- what was done --------------------------------------------------------------------------------------------


def test_messages_are_raw_rows_and_copies_and_raw_rows_are_typed_or_quarantined_or_copies(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    topic = place.new_topic("counted")
    place.send(topic, [*(order(number) for number in range(30)), b"not json", order(7)])
    copies(place, topic, [order(30), order(31)], 2)
    # One slash, as Hadoop writes it; and batches so small that copies are found in earlier ones.
    target = tmp_path / "lake"
    catalog = {"type": "sql", "uri": f"sqlite:///{target}/catalog.sqlite", "warehouse": f"file:{target}"}
    settings = orders(place, topic, target, key=["id"], format="iceberg", catalog=catalog, batch_rows=34)
    report = lake.run(spark, settings, quiet())
    found = {name: report.values[name] for name in report.values if name.endswith(("messages", "rows", "copies"))}
    assert report.problems == [] and found == {
        **{"messages": 36, "raw_rows": 34, "typed_rows": 32, "quarantine_rows": 1},
        **{"raw_copies": 2, "typed_copies": 1},
    }
    assert _catalog(str(target)).load_table("danube.orders_raw").scan().to_arrow().num_rows == 34


@pytest.mark.parametrize(
    ("step", "table"), [("once_each", "raw"), pytest.param("typed", "typed", marks=pytest.mark.long)]
)
def test_a_job_that_loses_a_row_fails_and_its_batch_is_written_again(
    spark: SparkSession, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, table: str
) -> None:
    topic = place.new_topic("losing")
    place.send(topic, [order(number) for number in range(20)])
    settings = orders(place, topic, tmp_path, format="parquet" if table == "raw" else "iceberg")
    sound = getattr(steps, step)

    def losing(rows: DataFrame, *more: Any, **named: Any) -> DataFrame:
        return sound(rows.where(F.col("offset") != 7), *more, **named)

    monkeypatch.setattr(steps, step, losing)
    with pytest.raises(PySparkException) as caught:
        lake.run(spark, settings, quiet())
    sentence = reason(str(caught.value))
    assert "batch 0 has 20 rows for " in sentence and "whose files have 19 of them, and 0 are copies" in sentence
    monkeypatch.undo()
    report = lake.run(spark, settings, quiet())
    counted = [report.values[name] for name in ("messages", "raw_rows", "typed_rows", "quarantine_rows")]
    assert counted == [20, 20, 20, 0]


def test_a_repeated_iceberg_batch_is_known_after_another_writer_and_an_expiry(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    topic = place.new_topic("repeated")
    place.send(topic, [order(number) for number in range(30)])
    settings = orders(place, topic, tmp_path / "lake", format="iceberg")
    lake.run(spark, settings, quiet())
    name = "danube.orders_raw"
    table = _catalog(str(tmp_path / "lake")).load_table(name)
    table.delete("offset = 7")
    [current] = [table.refresh().current_snapshot()]
    table.maintenance.expire_snapshots().by_ids(
        [each.snapshot_id for each in table.snapshots() if each.snapshot_id != current.snapshot_id]
    ).commit()
    # The driver died between the tables and the checkpoint.
    for file in (tmp_path / "lake" / "_checkpoint-orders" / "commits").iterdir():
        file.unlink()
    report = lake.run(spark, settings, quiet())
    assert report.problems == [] and report.values["messages"] == 30
    assert table.refresh().scan().to_arrow().num_rows == 29
    assert _catalog(str(tmp_path / "lake")).load_table("danube.orders_typed").scan().to_arrow().num_rows == 30


# --- where history is -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def default(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A broker as `make run` starts it: nobody has said where it keeps history."""
    with place_in(tmp_path_factory.mktemp("default"), url="") as made:
        yield made


def uploaded(place: Place) -> str:
    topic = place.new_topic("history")
    for first in range(0, 60, 20):
        place.send(topic, numbers(first, first + 20))
        place.upload(topic)
    return topic


def test_the_broker_of_make_run_names_its_store_so_history_and_compact_work(
    spark: SparkSession, default: Place
) -> None:
    topic = uploaded(default)
    history = pydanube.spark.history(spark, topic, service_url=default.url)
    assert sorted(row["payload"] for row in history.collect()) == sorted(numbers(0, 60))
    report = compact.run(spark, {"service.url": default.url, "topic": topic}, quiet())
    assert report.problems == []
    assert report.values == {"objects_before": 3, "objects_after": 1, "swapped": 3, "left_alone": 0}


def test_a_store_of_another_machine_is_said_and_plain_reads_go_through_the_broker(
    borrowed: SparkSession, default: Place
) -> None:
    topic = uploaded(default)
    objects = default.directory / "data" / "objects"
    hidden = objects / topic[1:]
    hidden.rename(away := objects / "elsewhere")  # as if that directory were on the broker's machine only
    try:
        frame = borrowed.read.format("danube").options(**default.options(topic)).load()
        assert sorted(row["payload"] for row in frame.collect()) == sorted(numbers(0, 60))
        with pytest.raises(StoreNotHere, match="not in that directory of this one: mount it here"):
            pydanube.spark.history(borrowed, topic, service_url=default.url)
        flags = ("--set", f"service.url={default.url}", "--set", f"topic={topic}", "--output", "json")
        done = danube_here("pipeline", "run", "compact", *flags)
        found = json.loads(done.stdout)
        assert done.returncode == 1 and found["result"] == "failed" and found["swapped"] == 0
        assert "not in that directory of this one" in found["problems"][0]
    finally:
        away.rename(hidden)
