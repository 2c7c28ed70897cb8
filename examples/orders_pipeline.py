"""From messages to a table: orders are produced, their topic moves to another broker, Spark makes tables, DuckDB asks.

    make example-orders

Three brokers of a cluster, each with its member of the metadata store, an object store that they share, the tables, and
Spark in this process: everything is in a temporary directory, and nothing is left behind.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from random import Random

import duckdb
from pyspark.sql import SparkSession

import pydanube
from pydanube.pipeline import lake
from pydanube.pipeline.report import QueryWatch
from pydanube.spark.session import session

BROKERS = Path(__file__).resolve().parent.parent / "scripts" / "brokers"
# The first broker's; scripts/brokers says which the others have. Not those of `make brokers`.
PORTS = {"CLIENT": "26650", "STREAM": "26651", "ADMIN": "25051", "METRICS": "29040", "RAFT": "27650"}
TOPIC = "/default/orders"
COUNT = 2_000
COUNTRIES = ("DE", "AT", "HU", "RO")


class Cluster:
    """Three brokers on this machine."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = dict(environment)
        self.directory = Path(environment["DANUBE_CLUSTER_DIR"])
        first = int(environment["STREAM"])
        self.url = ",".join(f"danube://127.0.0.1:{first + 10 * number}" for number in range(3))

    def do(self, verb: str, *flags: str) -> None:
        """What scripts/brokers can do: start, stop, clean."""
        done = subprocess.run([BROKERS, verb, *flags], env=self._environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(done.stderr.strip())

    def admin(self, *words: str) -> str:
        """What `danube admin …` answers."""
        endpoint = f"http://127.0.0.1:{self._environment['ADMIN']}"
        command = [sys.executable, "-m", "pydanube", "admin", "--endpoint", endpoint, *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise SystemExit(done.stderr.strip())
        return done.stdout


@contextmanager
def cluster_in(directory: Path) -> Iterator[Cluster]:
    ports = {name: os.environ.get(name, port) for name, port in PORTS.items()}
    cluster = Cluster({**os.environ, **ports, "DANUBE_CLUSTER_DIR": str(directory / "cluster")})
    try:
        cluster.do("start", "--registration-ttl", "5", "--upload-interval", "2")
        yield cluster
    finally:
        cluster.do("clean")


def order(number: int, random: Random) -> bytes:
    value = {"id": f"order-{number}", "country": random.choice(COUNTRIES), "cents": random.randrange(100, 10_000)}
    return json.dumps(value).encode()


def produce(cluster: Cluster, orders: list[bytes]) -> None:
    """Half of the orders, then the topic moves, then the others. The producer is not told: it finds the new broker."""
    with pydanube.blocking.connect(cluster.url, timeout=60) as client, client.producer(TOPIC) as producer:
        for number, payload in enumerate(orders):
            if number == len(orders) // 2:
                producer.flush()
                cluster.admin("topics", "unload", TOPIC, "--wait")
            producer.room()
            producer.send_nowait(payload, key=f"customer-{number % 97}")


def make_tables(spark: SparkSession, url: str, target: Path) -> dict[str, object]:
    """Runs the job *lake*, as `danube pipeline run lake` does."""
    settings = {
        "service.url": url,
        "topic": TOPIC,
        "target": str(target),
        "schema": "id string not null, country string, cents long",
        "key": ["id"],
    }
    return lake.run(spark, settings, QueryWatch("lake", as_json=True, stream=io.StringIO())).values


def ask(target: Path) -> None:
    """DuckDB reads the tables. It knows nothing of Danube, or of Spark."""

    def table(name: str) -> str:
        return f"read_parquet('{target}/orders_{name}/batch=*/date=*/*.parquet', hive_partitioning=true)"

    owners = f'select epoch, min("offset"), max("offset") from {table("raw")} group by epoch order by epoch'
    for number, (_, first, last) in enumerate(duckdb.sql(owners).fetchall(), 1):
        print(f"owner {number} stored offsets {first} to {last}")
    totals = f"select country, count(*), sum(cents) / 100 from {table('typed')} group by country order by country"
    for country, count, euros in duckdb.sql(totals).fetchall():
        print(f"{country}  {count:>5} orders  {euros:>10.2f} EUR")


def run(spark: SparkSession, cluster: Cluster, target: Path) -> int:
    """0 if every order is in the table once, and what is no order is not."""
    random = Random(42)
    orders = [order(number, random) for number in range(COUNT)]
    produce(cluster, [*orders[: COUNT // 2], b"this is no order", *orders[COUNT // 2 :]])
    found = make_tables(spark, cluster.url, target)
    print(f"{found['messages']} messages, {found['typed_rows']} orders, {found['quarantine_rows']} in quarantine")
    ask(target)
    return 0 if (found["typed_rows"], found["quarantine_rows"]) == (COUNT, 1) else 1


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="danube-orders-") as name, cluster_in(Path(name)) as cluster:
        spark = session("orders example", master="local[2]", conf={"spark.log.level": "ERROR"})
        try:
            return run(spark, cluster, Path(name) / "lake")
        finally:
            spark.stop()


if __name__ == "__main__":
    sys.exit(main())
