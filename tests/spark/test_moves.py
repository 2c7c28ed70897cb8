"""Spark beside a real cluster: the example, whose topic moves in the middle, and a stream that outlives a crash."""

from __future__ import annotations

import os
import re
import runpy
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import pydanube
from pydanube.testing.ports import free_block
from tests.e2e.processes import until
from tests.spark.places import numbers

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "orders_pipeline.py"
STARTS = {"RAFT": 0, "CLIENT": 10, "STREAM": 11, "ADMIN": 12, "METRICS": 15}  # two of them in steps of ten


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture(scope="module")
def cluster(example: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The example's own, on ports that nobody has."""
    with pytest.MonkeyPatch.context() as patch:
        base = free_block(60, members=3)
        for name, start in STARTS.items():
            patch.setenv(name, str(base + start))
        with example["cluster_in"](tmp_path_factory.mktemp("brokers")) as made:
            yield made


def test_the_orders_example_moves_its_topic_and_finds_every_order(
    spark: SparkSession, example: dict[str, Any], cluster: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example["run"](spark, cluster, tmp_path / "lake") == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "2001 messages, 2000 orders, 1 in quarantine",
        "owner 1 stored offsets 0 to 999",
        "owner 2 stored offsets 1000 to 2000",
        "AT    482 orders    24602.56 EUR",
        "DE    485 orders    24069.54 EUR",
        "HU    511 orders    25527.26 EUR",
        "RO    522 orders    27220.40 EUR",
    ]


@pytest.mark.long
def test_three_engines_read_what_was_acknowledged_while_orders_go_on_and_a_broker_is_killed(
    spark: SparkSession, example: dict[str, Any], cluster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert example["agree"](spark, cluster) == 0
    assert "Spark, DuckDB and PyIceberg read the orders that were acknowledged" in capsys.readouterr().out


class Watched:
    """The rows of a running stream, in the order in which Spark delivers them."""

    def __init__(self) -> None:
        self.batches: list[list[tuple[int, bytes]]] = []

    def __call__(self, frame: DataFrame, number: int) -> None:
        rows = frame.select("offset", "payload").collect()
        self.batches.append(sorted((row["offset"], bytes(row["payload"])) for row in rows))

    @property
    def rows(self) -> list[tuple[int, bytes]]:
        return [row for batch in self.batches for row in batch]


@pytest.mark.long
def test_a_running_stream_reads_each_message_once_over_a_move_and_a_crash(
    spark: SparkSession, cluster: Any, tmp_path: Path
) -> None:
    topic = "/default/watched"
    seen = Watched()
    with pydanube.blocking.connect(cluster.url, timeout=120) as client:
        client.create_topic(topic)
        query = (
            spark.readStream.format("danube")
            .options(**{"service.url": cluster.url, "topic": topic, "startingOffsets": "earliest"})
            .load()
            .writeStream.foreachBatch(seen)
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .start()
        )

        def arrive(first: int, end: int) -> None:
            with client.producer(topic) as producer:
                for payload in numbers(first, end):
                    producer.send(payload)

        def arrived(count: int) -> Callable[[], bool]:
            def all_there() -> bool:
                assert query.isActive, query.exception()
                return len(seen.rows) >= count

            return all_there

        try:
            arrive(0, 40)
            until(arrived(40), "the stream reads", seconds=120)
            cluster.admin("topics", "unload", topic, "--wait")
            arrive(40, 80)
            until(arrived(80), "it goes on behind the move", seconds=120)
            owner = owner_of(client.lookup(topic).stream_url, cluster)
            os.kill(int((cluster.directory / owner / "pid").read_text()), signal.SIGKILL)
            arrive(80, 120)  # at the broker that takes over
            cluster.do("start", "--registration-ttl", "5", "--upload-interval", "2")
            until(arrived(120), "it goes on when the broker is back", seconds=120)
        finally:
            query.stop()
    offsets = [offset for offset, _ in seen.rows]
    assert offsets == sorted(set(offsets)), "they never go back"
    assert [payload for _, payload in seen.rows] == numbers(0, 120)


def owner_of(url: str, cluster: Any) -> str:
    """The number of the broker that has this address."""
    ports = [re.sub(r".*:", "", each) for each in cluster.url.split(",")]
    return str(ports.index(re.sub(r".*:", "", url)))
