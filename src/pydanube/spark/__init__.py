"""Topics as Spark DataFrames. `register(spark)` makes `format("danube")` known; `history` reads history at full speed.

Importing this imports neither Spark nor pyarrow: `options` and `plan` are plain values and functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["history", "keep_running", "register"]


def register(spark: SparkSession) -> None:
    """Makes `spark.read.format("danube")`, `readStream`, `write` and `writeStream` work in this session.

    Tasks are then as many as the session runs at once, and the option pushFilters is allowed.
    """
    from pydanube.spark.source import register as register_source

    register_source(spark)


def history(spark: SparkSession, topic: str, **options: Any) -> DataFrame:
    """A topic's uploaded history as a DataFrame that Spark's own Parquet reader fills: no Python in the way.

    Options are those of `format("danube")`, as keyword arguments with `_` for `.`: `service_url`, `startingOffsets`.
    """
    from pydanube.spark.fast import history as fast_history

    return fast_history(spark, topic, **options)


def keep_running(start: Callable[[], StreamingQuery], *, restarts_max: int = 5) -> None:
    """Starts a stream with a checkpoint and waits for its end; starts it again, after a pause and at most so many times
    one after the other, if a Python worker of Spark did not start in time. Other failures are raised.
    """
    from pydanube.spark.restarts import keep_running as keep_stream_running

    keep_stream_running(start, restarts_max=restarts_max)
