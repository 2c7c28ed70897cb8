"""Declared pipelines on real Spark: what a stream says of itself, and a supervisor that is killed."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.dataset as ds
import pytest
from pyspark.sql import SparkSession

from pydanube.pipeline import lake
from pydanube.pipeline.lake_settings import Lake
from pydanube.pipeline.progress import facts, of_progress
from pydanube.pipeline.report import QueryWatch
from tests.e2e.processes import danube_here
from tests.spark.places import Place

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


TEN = 1_794_996_000_500_000


def progress(end: dict[str, int] | None, latest: dict[str, int] | None) -> Any:
    def offset(of: dict[str, int] | None) -> str | None:
        return None if of is None else json.dumps({"format": 1, "offsets": of})

    source = SimpleNamespace(endOffset=offset(end), latestOffset=offset(latest))
    return SimpleNamespace(sources=[source], timestamp="2026-11-18T10:00:00.500Z")


def test_a_stream_is_fresh_only_when_it_came_up_to_the_head() -> None:
    assert of_progress(progress({"/a/b": 7}, {"/a/b": 7})) == {"behind_messages": 0, "fresh_us": TEN}
    assert of_progress(progress({"/a/b": 7}, {"/a/b": 9})) == {"behind_messages": 2}
    assert of_progress(progress({"/a/b": 7}, {"/a/b": 7, "/a/new": 3})) == {"behind_messages": 3}
    assert of_progress(progress({"/a/b": 7}, None)) == {}, "before Spark 4.2 the head is not in it"
    assert of_progress(progress({"/a/b": 9}, {"/a/b": 7})) == {"behind_messages": 0, "fresh_us": TEN}
    assert of_progress(None) == {}


def test_a_follower_says_how_fresh_its_tables_are_and_what_waits(
    spark: SparkSession, place: Place, tmp_path: Path
) -> None:
    topic = place.new_topic("followed")
    place.send(topic, [b'{"id": "1"}', b"no json"])
    settings = {
        "service.url": place.url,
        "topic": topic,
        "target": str(tmp_path / "lake"),
        "schema": "id string",
        "follow_seconds": 1,
    }
    began_us = time.time_ns() // 1000
    query = lake.start(spark, Lake.parse(settings))
    try:
        query.processAllAvailable()
        lines = io.StringIO()
        watch = QueryWatch("lake", as_json=True, stream=lines)
        watch.facts = lambda: facts(spark)
        watch.says("going")
    finally:
        query.stop()
    said = json.loads(lines.getvalue())
    assert said["behind_messages"] == 0 and said["fresh_us"] >= began_us - 1_000_000
    assert facts(spark) == {}, "a stream that has ended says nothing"


@pytest.mark.long
def test_a_supervisor_that_is_killed_twice_leaves_every_order_once(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Spark in the runs: the next supervisor goes on from the checkpoint, half a minute later."""
    monkeypatch.setenv("DANUBE_ADMIN_ENDPOINT", place.admin_url)
    monkeypatch.setenv("LAKE_SCHEMA", "id string")
    topic = place.new_topic("supervised")
    declaration = {
        "name": "orders",
        "job": "lake",
        "follow": "1s",
        "freshness": "20s",
        "master": "local[1]",
        "settings": {
            "service.url": place.url,
            "topic": topic,
            "target": str(tmp_path / "lake"),
            "name": "orders",
            "schema": {"from_env": "LAKE_SCHEMA"},
            "spark": {"spark.sql.shuffle.partitions": "1", "spark.ui.enabled": "false", "spark.driver.memory": "512m"},
        },
    }
    (tmp_path / "orders.yaml").write_text(json.dumps(declaration))
    assert danube_here("pipeline", "apply", str(tmp_path / "orders.yaml")).returncode == 0
    sent = 0
    for name in ("first", "second", "third"):
        supervisor = subprocess.Popen([sys.executable, "-m", "pydanube", "pipeline", "supervise", "--name", name])
        try:
            place.send(topic, [b'{"id": "%d"}' % number for number in range(sent, sent + 50)] + [b"no json"])
            sent += 50
            until_fresh(name)
        finally:
            supervisor.send_signal(signal.SIGTERM if name == "third" else signal.SIGKILL)
            code = supervisor.wait(60)
        runs = subprocess.run(["pgrep", "-f", "pydanube.pipeline.child"], capture_output=True, text=True, check=False)
        time.sleep(2)
        for pid in runs.stdout.split():
            with suppress(FileNotFoundError):
                environment = Path(f"/proc/{pid}/environ").read_bytes()
                assert place.admin_url.encode() not in environment, "a run outlived its supervisor"
    assert code == 0
    rows = ds.dataset(str(tmp_path / "lake/orders_typed"), format="parquet", partitioning="hive").to_table()
    assert sorted(rows["id"].to_pylist(), key=int) == [str(number) for number in range(sent)]


def until_fresh(supervisor: str) -> None:
    """Returns when this supervisor's run has all that was sent before."""
    began = time.time()
    found: dict[str, Any] = {}
    while time.time() < began + 240:
        time.sleep(2)
        found = json.loads(danube_here("pipeline", "status", "orders", "--output", "json").stdout)
        assert found["health"] != "failing", found
        is_ours = found["supervisor"] == supervisor and found["health"] == "ok"
        if is_ours and time.time() - found["fresh_seconds"] > began + 1 and found["behind_messages"] == 0:
            return
    raise AssertionError(found)
