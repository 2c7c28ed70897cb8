"""What there is, said to Spark's own pipelines (`pyspark.pipelines`): a topic as a streaming table, and a view of it.

Spark finds out what depends on what, runs it, and keeps the checkpoint. `run.py` beside this file starts it.
"""

from __future__ import annotations

from pyspark import pipelines
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

SCHEMA = "id string, country string, cents long"


@pipelines.table
def orders() -> DataFrame:
    """Every order once, from the first message on."""
    spark = SparkSession.active()
    options = {"service.url": spark.conf.get("spark.danube.url"), "topic": "/default/orders"}
    messages = spark.readStream.format("danube").options(**options).option("startingOffsets", "earliest").load()
    decoded = F.from_json(F.col("payload").cast("string"), SCHEMA).alias("value")
    return messages.select("offset", "publish_time", decoded).select("offset", "publish_time", "value.*")


@pipelines.materialized_view
def orders_by_country() -> DataFrame:
    table = SparkSession.active().read.table("orders")
    return table.groupBy("country").agg(F.count("*").alias("orders"), F.sum("cents").alias("cents"))
