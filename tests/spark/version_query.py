"""A program for an older PySpark: reads a topic, follows it with a stream that writes to another, and tells.

python version_query.py URL SOURCE TARGET CHECKPOINT
"""

from __future__ import annotations

import json
import sys

import pyspark
from pyspark.sql import functions as F

import pydanube.spark
from pydanube.spark.session import session


def main() -> None:
    url, source, target, checkpoint = sys.argv[1:]
    spark = session("version test", master="local[2]", conf={"spark.log.level": "ERROR"})
    messages = spark.read.format("danube").options(**{"service.url": url, "topic": source}).load()
    rows = messages.agg(F.count("*"), F.countDistinct("offset"), F.max("offset")).first()
    assert rows is not None
    some = messages.where("offset >= 10 and offset < 15").orderBy("offset").collect()
    again = messages.limit(7).withColumn("routing_key", F.lit("again"))
    again.write.format("danube").options(**{"service.url": url, "topic": target}).mode("append").save()
    copied = (
        spark.readStream.format("danube")
        .options(**{"service.url": url, "topic": source, "startingOffsets": "earliest"})
        .load()
        .select("routing_key", "payload", "attributes")
        .writeStream.format("danube")
        .options(**{"service.url": url, "topic": target})
        .option("checkpointLocation", checkpoint)
        .trigger(availableNow=True)
    )
    pydanube.spark.keep_running(copied.start)
    told = {
        "version": pyspark.__version__,
        "rows": list(rows),
        "some": [row["offset"] for row in some],
        "tasks": messages.rdd.getNumPartitions(),
    }
    print(json.dumps(told))
    spark.stop()


if __name__ == "__main__":
    main()
