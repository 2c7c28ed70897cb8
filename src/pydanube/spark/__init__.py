"""Topics as Spark DataFrames. `register(spark)` makes `format("danube")` known; `history` reads history at full speed.

Importing this imports neither Spark nor pyarrow: `options` and `plan` are plain values and functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["history", "register"]


def register(spark: SparkSession) -> None:
    """Makes `spark.read.format("danube")`, `readStream`, `write` and `writeStream` work in this session.

    Filters on offset, publish_time, topic and routing_key are then applied before messages are read.
    """
    from pydanube.spark.source import register as register_source

    register_source(spark)


def history(spark: SparkSession, topic: str, **options: Any) -> DataFrame:
    """A topic's uploaded history as a DataFrame that Spark's own Parquet reader fills: no Python in the way.

    Options are those of `format("danube")`, as keyword arguments with `_` for `.`: `service_url`, `startingOffsets`.
    """
    from pydanube.spark.fast import history as fast_history

    return fast_history(spark, topic, **options)
