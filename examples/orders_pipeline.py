"""From messages to a table: orders are produced, their topic gets a new owner, Spark makes tables, DuckDB asks.

    make example-orders

Everything happens in a temporary directory: a broker with an object store, the tables, and Spark in this process.
"""

from __future__ import annotations

import io
import json
import sys
import tempfile
from pathlib import Path
from random import Random

import duckdb
from pyspark.sql import SparkSession

import pydanube
from pydanube.config import StorageConfig
from pydanube.core.tiers import TierConfig
from pydanube.pipeline import lake
from pydanube.pipeline.report import Watch
from pydanube.spark.session import session
from pydanube.testing.brokers import TestBroker

TOPIC = "/default/orders"
COUNT = 2_000
COUNTRIES = ("DE", "AT", "HU", "RO")


def order(number: int, random: Random) -> bytes:
    value = {"id": f"order-{number}", "country": random.choice(COUNTRIES), "cents": random.randrange(100, 10_000)}
    return json.dumps(value).encode()


def produce(url: str, payloads: list[bytes]) -> None:
    with pydanube.blocking.connect(url) as client, client.producer(TOPIC) as orders:
        for number, payload in enumerate(payloads):
            orders.room()
            orders.send_nowait(payload, key=f"customer-{number % 97}")


def make_tables(spark: SparkSession, url: str, directory: Path) -> dict[str, object]:
    """Runs the job *lake*, as `danube pipeline run lake` does."""
    settings = {
        "service.url": url,
        "topic": TOPIC,
        "target": str(directory / "lake"),
        "schema": "id string not null, country string, cents long",
        "key": ["id"],
    }
    return lake.run(spark, settings, Watch("lake", as_json=True, stream=io.StringIO())).values


def run(spark: SparkSession) -> int:
    """0 if every order is in the table once, and what is no order is not."""
    random = Random(42)
    orders = [order(number, random) for number in range(COUNT)]
    with tempfile.TemporaryDirectory(prefix="danube-orders-") as name:
        directory = Path(name)
        storage = StorageConfig(url=f"file://{directory}/objects", tier=TierConfig(upload_seconds=0.1))
        with TestBroker(directory / "broker", storage=storage) as broker:
            produce(broker.url, [*orders[: COUNT // 2], b"this is no order"])
        # The broker that starts again claims its topics anew, under the next epoch: offsets go on where they were.
        with TestBroker(directory / "broker", storage=storage) as broker:
            produce(broker.url, orders[COUNT // 2 :])
            found = make_tables(spark, broker.url, directory)
        print(f"{found['messages']} messages, {found['typed_rows']} orders, {found['quarantine_rows']} in quarantine")
        table = f"read_parquet('{directory}/lake/orders_typed/batch=*/**/*.parquet', hive_partitioning=true)"
        question = f"select country, count(*), sum(cents) / 100 from {table} group by country order by country"
        for country, count, euros in duckdb.sql(question).fetchall():
            print(f"{country}  {count:>5} orders  {euros:>10.2f} EUR")
    return 0 if (found["typed_rows"], found["quarantine_rows"]) == (COUNT, 1) else 1


if __name__ == "__main__":
    spark = session("orders example", master="local[2]", conf={"spark.log.level": "ERROR"})
    try:
        code = run(spark)
    finally:
        spark.stop()
    sys.exit(code)
