"""Runs *lake* whenever a line says where to: for `spark.py`, which compares two versions of it. Not for people.

    python lake_worker.py URL TOPIC BATCH_ROWS < targets        PYTHONPATH says which version

One line of JSON per target: what the job reports, and the seconds of all processors that it took.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
from pathlib import Path

from pydanube.pipeline import lake
from pydanube.pipeline.report import QueryWatch
from pydanube.spark.session import session

SCHEMA = "id string not null, amount double, country string, note string"


def cpu_seconds() -> float:
    """Of this process and what it has started; of those that have ended, what their parents know."""
    parents, ticks = {}, {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(words[1])
                ticks[int(entry.name)] = sum(int(word) for word in words[11:15])
    mine, todo = {os.getpid()}, [os.getpid()]
    while todo:
        parent = todo.pop()
        children = [pid for pid, of in parents.items() if of == parent]
        mine.update(children)
        todo += children
    return sum(ticks[pid] for pid in mine) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    url, topic, batch_rows = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr
    # Workers that end take their seconds with them: they stay for the whole run.
    conf = {"spark.log.level": "ERROR", "spark.python.worker.idleTimeoutSeconds": "0"}
    spark = session("lake", master="local[2]", conf=conf)
    for line in sys.stdin:
        settings = {
            **{"service.url": url, "topic": topic, "target": line.strip(), "name": "orders"},
            **{"schema": SCHEMA, "batch_rows": int(batch_rows)},
        }
        before = cpu_seconds()
        report = lake.run(spark, settings, QueryWatch("lake", as_json=True, stream=io.StringIO()))
        print(json.dumps({**report.values, "cpu_seconds": cpu_seconds() - before}), file=answers, flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
