"""One Spark session and one broker with an object store for all tests of this folder: both are slow to start."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from tests.spark.places import Place, place_in


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    from pydanube.spark.session import session

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = session(
            "tests",
            master="local[2,4]",
            conf={
                "spark.sql.shuffle.partitions": "2",
                "spark.driver.memory": "1g",
                "spark.sql.streaming.metricsEnabled": "false",
                "spark.log.level": "ERROR",
                # Rows are few and plans are many: to compile either as for a long life takes longer than to run it.
                "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
                "spark.sql.codegen.wholeStage": "false",
            },
        )
    try:
        yield made
    finally:
        made.stop()


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
