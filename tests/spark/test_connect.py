"""What needs Spark Connect, whose packages are an extra of Spark: jobs on a server, and declared pipelines."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.spark.places import Place

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(
        importlib.util.find_spec("grpc_status") is None or importlib.util.find_spec("google.rpc") is None,
        reason="pip install 'pyspark[connect]'",
    ),
]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "declared_orders" / "run.py"


def test_jobs_run_on_a_spark_connect_server(place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("connected")
    payloads = [b'{"id": "%d"}' % number for number in range(40)]
    place.send(topic, payloads)
    place.upload(topic)
    place.send(topic, [b"no order"])
    settings = [f"service.url={place.url}", f"topic={topic}"]
    for job, more, expected in (
        ("audit", [], {"messages": 41, "problems": []}),
        (
            "lake",
            ["schema=id string not null", f"target={tmp_path}/lake", "name=orders"],
            {"messages": 41, "typed_rows": 40, "quarantine_rows": 1},
        ),
    ):
        words = [word for each in [*settings, *more] for word in ("--set", each)]
        done = subprocess.run(
            [sys.executable, "-m", "pydanube.pipeline", "run", job, "--remote", "local[2]", "--output", "json", *words],
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout)
        assert {name: found[name] for name in expected} == expected


def test_a_declared_pipeline_makes_tables_of_a_topic() -> None:
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        [country, "250"] for country in ("AT", "DE", "HU", "RO")
    ]
