"""kill -9 of the whole job while it merges: each key has its last row, once. DuckDB and PyIceberg say so."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from tests.spark.places import Place
from tests.spark.test_jobs import _catalog
from tests.spark.test_upserts import rows_of

KILLS = 4


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", ["parquet", "iceberg"])
def test_a_job_that_is_killed_at_any_moment_leaves_one_row_per_key(place: Place, tmp_path: Path, form: str) -> None:
    seed = int(os.environ.get("SEED", time.time_ns() % 1_000_000))
    print(f"SEED={seed}")
    random_ = random.Random(seed)
    topic = place.new_topic("killed")
    truth: dict[int, int] = {}
    payloads, keys = [], []
    for number in range(6000):
        key = random_.randrange(500)
        if random_.random() < 0.2:
            payloads.append(b"")
            truth.pop(key, None)
        else:
            payloads.append(json.dumps({"id": key, "n": number}).encode())
            truth[key] = number
        keys.append(str(key))
    place.send(topic, payloads, keys=keys)
    conf = tmp_path / "lake.yaml"
    settings = {
        **{"service.url": place.url, "topic": topic, "name": "k", "target": str(tmp_path / "lake"), "format": form},
        **{"schema": "id long, n long", "key": ["id"], "mode": "upsert", "batch_rows": 300, "buckets": 4},
    }
    conf.write_text(yaml.safe_dump(settings))
    commits = tmp_path / "lake" / "_checkpoint-k" / "commits"

    def started() -> subprocess.Popen[Any]:
        command = [sys.executable, "-m", "pydanube.pipeline", "run", "lake", "--conf", str(conf)]
        return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    for kill in range(KILLS):
        job = started()
        wanted = len(list(commits.glob("[0-9]*"))) + 1
        deadline = time.monotonic() + 240
        while len(list(commits.glob("[0-9]*"))) < wanted and job.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(random_.uniform(0, 2.5))  # somewhere in the next batch
        assert job.poll() is None, f"kill {kill}: the job ended by itself"
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert len(list(commits.glob("[0-9]*"))) < 20, "it was killed before its end"
    assert started().wait(timeout=600) == 0
    if form == "parquet":
        versions = f"{tmp_path}/lake/k_typed/versions/*.json"
        duckdb.sql(f"""
            set variable files = (
                select list_transform(names, name -> '{tmp_path}/lake/k_typed/' || name)
                from read_json('{versions}') order by batch desc limit 1
            )
        """)
        found = duckdb.sql("select id, n from read_parquet(getvariable('files')) order by id").fetchall()
    else:
        scanned = _catalog(settings["target"]).load_table("danube.k_typed").scan().to_arrow()
        found = rows_of(scanned.select(["id", "n"]).rename_columns(["id", "state"]))
    assert found == sorted(truth.items())
