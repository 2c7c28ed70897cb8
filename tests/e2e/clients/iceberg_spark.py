"""Spark with Iceberg's own runtime, in an environment of its own: asks a catalog, and prints what it was told.

python iceberg_spark.py JAR CATALOG            prints one JSON object
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile

from pyspark.sql import SparkSession


def refusal(spark: SparkSession, statement: str) -> str | None:
    try:
        spark.sql(statement).collect()
    except Exception as error:
        return str(error)[:2000]
    return None


def stream_refusal(spark: SparkSession, table: str) -> str | None:
    try:
        with tempfile.TemporaryDirectory() as scratch:
            stream = spark.readStream.format("iceberg").option("stream-from-timestamp", "0").load(table)
            query = stream.writeStream.format("noop").option("checkpointLocation", scratch).trigger(availableNow=True)
            started = query.start()
            started.awaitTermination(60)
            return None if started.exception() is None else str(started.exception())[:4000]
    except Exception as error:
        return str(error)[:4000]


def main(jar: str, catalog: str) -> None:
    spark = (
        SparkSession.builder.master("local[2]")
        .config("spark.jars", jar)
        .config("spark.ui.enabled", "false")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.sql.catalog.danube", "org.apache.iceberg.spark.SparkCatalog")
        .config("spark.sql.catalog.danube.type", "rest")
        .config("spark.sql.catalog.danube.uri", catalog)
        .config("spark.sql.catalog.danube.cache-enabled", "false")
        .getOrCreate()
    )
    rows = spark.sql("SELECT `offset`, payload FROM danube.default.orders ORDER BY 1").collect()
    found = hashlib.sha256()
    for offset, payload in rows:
        for piece in (str(offset).encode(), bytes(payload)):
            found.update(len(piece).to_bytes(8, "big") + piece)
    snapshots = spark.sql("SELECT snapshot_id, committed_at FROM danube.default.orders.snapshots ORDER BY 2").collect()
    at = {}
    for snapshot, committed in snapshots:
        count = "SELECT count(*) FROM danube.default.orders"
        at[str(snapshot)] = [
            spark.sql(f"{count} VERSION AS OF {snapshot}").collect()[0][0],
            spark.sql(f"{count} TIMESTAMP AS OF '{committed}'").collect()[0][0],
        ]
    print(
        json.dumps(
            {
                "version": spark.version,
                "namespaces": sorted(row[0] for row in spark.sql("SHOW NAMESPACES IN danube").collect()),
                "tables": sorted(row[1] for row in spark.sql("SHOW TABLES IN danube.default").collect()),
                "rows": len(rows),
                "digest": found.hexdigest(),
                "some": spark.sql("SELECT count(*) FROM danube.default.orders WHERE `offset` >= 100").collect()[0][0],
                "files": spark.sql("SELECT count(*) FROM danube.default.orders.files").collect()[0][0],
                "at": at,
                "parts": [list(row) for row in spark.sql(
                    "SELECT part, count(*) FROM danube.default.clicks GROUP BY part ORDER BY part"
                ).collect()],
                "insert": refusal(spark, "INSERT INTO danube.default.orders SELECT * FROM danube.default.orders"),
                "create": refusal(spark, "CREATE TABLE danube.default.more (a INT) USING iceberg"),
                "drop": refusal(spark, "DROP TABLE danube.default.orders"),
                "stream": stream_refusal(spark, "danube.default.orders"),
            }
        )
    )  # fmt: skip


main(*sys.argv[1:])
