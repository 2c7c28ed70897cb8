"""A driver program for a cluster: reads a topic while one of its executors is killed, writes it to another, makes a
table of it in an object store, and tells.

python cluster_query.py MASTER URL SOURCE TARGET DIRECTORY S3_URL S3_OPTIONS
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pyarrow as pa
from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from pydanube.pipeline.table_files import table_files
from pydanube.spark.session import session


def executors(application: str) -> list[int]:
    """Process ids of the application's executors on this machine."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if application.encode() in words and any(b"CoarseGrainedExecutorBackend" in word for word in words):
                found.append(int(entry.name))
    return found


def kill_one(spark: SparkSession, killed: list[int]) -> None:
    """Waits until some tasks are done, then kills an executor."""
    tracker = spark.sparkContext.statusTracker()
    while not killed:
        time.sleep(0.05)
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None and info.numCompletedTasks >= 2:
                victim = executors(spark.sparkContext.applicationId)[0]
                os.kill(victim, signal.SIGKILL)
                killed.append(victim)
                return


def slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        time.sleep(0.4)
        yield batch


def main() -> None:
    master, url, source, target, directory, s3_url, s3_options = sys.argv[1:]
    conf = {
        "spark.executor.memory": "512m",
        "spark.executor.cores": "1",
        "spark.cores.max": "2",
        "spark.log.level": "ERROR",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    spark = session("cluster test", master=master, conf=conf)
    options = {"service.url": url, "topic": source, "minPartitions": "12"}
    messages = spark.read.format("danube").options(**options).load().select("offset", "payload")
    killed: list[int] = []
    threading.Thread(target=kill_one, args=(spark, killed), daemon=True).start()
    slow = messages.mapInArrow(slowly, messages.schema)
    row = slow.agg(F.count("*"), F.countDistinct("offset"), F.max("offset")).first()
    assert row is not None
    messages.write.format("danube").options(
        **{"service.url": url, "topic": target, "staging": f"{directory}/staging"}
    ).mode("append").save()
    files = table_files(spark, s3_url, json.loads(s3_options))
    stored = files.replace(0, messages.withColumn("date", F.lit(date(2026, 11, 15))), 1000)
    found = files.read(messages.schema, 0).distinct().count()
    told = {"rows": row[0], "distinct": row[1], "last": row[2], "killed": len(killed)}
    print(json.dumps({**told, "stored": stored, "found": found}))
    spark.stop()


if __name__ == "__main__":
    main()
