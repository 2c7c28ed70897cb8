"""One Spark session and one broker with an object store for all tests of this folder: both are slow to start."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.places import Place, free_port, place_in

HERE = Path(__file__).parent
WARM = HERE / "warm"
CONNECT_PORT = "spark.connect.grpc.binding.port"
JAVA = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    # Spark's classes are read, not checked: that took a third of the time to start.
    "-XX:+IgnoreUnrecognizedVMOptions -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What needs the session comes first of all tests: so one process of many runs it, and Spark is started once.

    Each process begins with the front of its part of the list, and idle ones take from the back of another's.
    """

    def rank(item: pytest.Item) -> int:
        if not item.path.is_relative_to(HERE):
            return 2
        return 0 if "spark" in getattr(item, "fixturenames", ()) else 1

    items.sort(key=rank)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from pydanube.spark.session import session

    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        patch.setenv("PYTHONPATH", str(WARM), prepend=os.pathsep)
        made = session(
            "tests",
            master="local[2,4]",
            conf={
                "spark.sql.shuffle.partitions": "2",
                "spark.driver.memory": "1g",
                "spark.sql.streaming.metricsEnabled": "false",
                "spark.log.level": "ERROR",
                # Rows are few and plans are many: to compile either as for a long life takes longer than to run it.
                "spark.driver.extraJavaOptions": " ".join(JAVA),
                "spark.sql.codegen.wholeStage": "false",
                # The same process is a server of Spark Connect.
                "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
                "spark.connect.grpc.binding.address": "127.0.0.1",
                CONNECT_PORT: str(free_port()),
            },
        )
    try:
        yield made
    finally:
        made.stop()


@pytest.fixture
def connect_url(spark: SparkSession) -> str:
    """Where the session's process can be reached as a server of Spark Connect."""
    return f"sc://127.0.0.1:{spark.conf.get(CONNECT_PORT)}"


@pytest.fixture
def borrowed(spark: SparkSession) -> Iterator[SparkSession]:
    """The session, for code that asks for one with settings of its own; the tests behind have theirs again."""
    name = "spark.sql.shuffle.partitions"
    before = spark.conf.get(name)
    yield spark
    spark.conf.set(name, before or "")


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """A broker whose messages are uploaded when a test says so."""
    with place_in(tmp_path_factory.mktemp("place")) as made:
        yield made


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")
