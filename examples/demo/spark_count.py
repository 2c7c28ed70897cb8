"""A Spark job that reads whole topics, from the object store and from brokers, and counts what it finds.

    python -m examples.demo.spark_count danube://127.0.0.1:6651 /default/orders,/default/clicks '{"access_key": …}'

It waits for a line on standard input before it reads, so that starting Spark and reading are two times.
"""

from __future__ import annotations

import json
import sys
import time

from pyspark.sql import functions as F

from pydanube.spark.session import session


def main() -> None:
    url, topics, store_options = sys.argv[1:]
    conf = {"spark.log.level": "ERROR", "spark.driver.memory": "512m", "spark.sql.shuffle.partitions": "2"}
    spark = session("demo", master="local[2]", conf=conf)
    print(json.dumps({"event": "started"}), flush=True)
    sys.stdin.readline()
    began = time.monotonic()
    options = {"service.url": url, "subscribe": topics}
    if store_options != "{}":
        options["storage.options"] = store_options
    messages = spark.read.format("danube").options(**options).load()
    number = F.get_json_object(F.col("payload").cast("string"), "$.number").cast("long")
    found = (
        messages.select("topic", "offset", number.alias("number"))
        .groupBy("topic")
        .agg(F.count("*").alias("messages"), F.count_distinct("number").alias("orders"))
        .collect()
    )
    by_topic = {row["topic"]: {"messages": row["messages"], "orders": row["orders"]} for row in found}
    print(json.dumps({"event": "counted", "seconds": time.monotonic() - began, "topics": by_topic}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
