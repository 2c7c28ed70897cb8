"""What needs Spark Connect: jobs on a server, and declared pipelines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.spark.places import Place

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "declared_orders" / "run.py"
PROGRAM = Path(__file__).with_name("connect_query.py")


ORDERS = [b'{"id": "%d"}' % number for number in range(40)]
MESSAGES = [*ORDERS, b"no order"]


def told(what: str, connect_url: str, place: Place, target: str, directory: Path) -> dict[str, Any]:
    """What the program says that a client of the server found; half of its topic is in objects."""
    source = place.new_topic("connected")
    place.send(source, ORDERS)
    place.upload(source)
    place.send(source, MESSAGES[40:])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), what, connect_url, place.url, source, target, str(directory)],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_client_of_spark_connect_replays_a_topic(connect_url: str, place: Place, tmp_path: Path) -> None:
    target = place.new_topic("replayed")
    assert told("replay", connect_url, place, target, tmp_path)["to"] == target
    assert place.payloads(target) == ORDERS[:10]


def test_a_client_of_spark_connect_copies_a_stream(connect_url: str, place: Place, tmp_path: Path) -> None:
    target = place.new_topic("copied")
    assert told("copy", connect_url, place, target, tmp_path) == {"batches": 2}
    assert place.payloads(target) == MESSAGES


def test_a_client_of_spark_connect_makes_tables(connect_url: str, place: Place, tmp_path: Path) -> None:
    found = told("lake", connect_url, place, "", tmp_path)
    expected = {"messages": 41, "batches": 1, "raw_rows": 41, "typed_rows": 40, "quarantine_rows": 1}
    assert {name: found[name] for name in expected} == expected


def test_a_declared_pipeline_makes_tables_of_a_topic() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [country, "250"] for country in ("AT", "DE", "HU", "RO")
    ]
