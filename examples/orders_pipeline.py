"""From messages to a table: orders are produced, their topic moves to another broker, Spark makes tables, DuckDB asks.
Then the topic itself is a table: while orders go on and its broker is killed, three engines read the same rows of it.

    make example-orders

Three brokers of a cluster, each with its member of the metadata store, an object store that they share, the tables, and
Spark in this process: everything is in a temporary directory, and nothing is left behind.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from random import Random

import duckdb
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import RESTError
from pyspark.sql import SparkSession

import pydanube
from pydanube.pipeline import lake
from pydanube.pipeline.report import QueryWatch
from pydanube.spark.session import session

BROKERS = Path(__file__).resolve().parent.parent / "scripts" / "brokers"
# The first broker's; scripts/brokers says which the others have. Not those of `make brokers`.
PORTS = {"CLIENT": "26650", "STREAM": "26651", "ADMIN": "25051", "METRICS": "29040", "RAFT": "27650"}
TOPIC = "/default/orders"
WAIT_SECONDS = 240  # for a broker to be declared dead, and what it had to be brought back: seconds on a quiet machine
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

    def kill_owner(self, stream_url: str) -> None:
        """kill -9 of the broker with this address."""
        number = [url.rpartition(":")[2] for url in self.url.split(",")].index(stream_url.rpartition(":")[2])
        os.kill(int((self.directory / str(number) / "pid").read_text()), signal.SIGKILL)

    @property
    def catalog(self) -> str:
        """Of the first broker; each of them has it, for all topics."""
        return f"http://127.0.0.1:{self._environment['METRICS']}/iceberg"

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


# --- the topic is a table ---------------------------------------------------------------------------------------


class Orders(threading.Thread):
    """Produces one order after the other until it is stopped; `acknowledged` has those that are stored, by offset."""

    def __init__(self, url: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._topic = topic
        self._is_over = threading.Event()
        self.acknowledged: dict[int, bytes] = {}

    def run(self) -> None:
        random = Random(17)
        with pydanube.blocking.connect(self._url, timeout=WAIT_SECONDS) as client, client.producer(self._topic) as to:
            while not self._is_over.is_set():
                payload = order(len(self.acknowledged), random)
                self.acknowledged[to.send(payload).offset] = payload

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def by_spark(spark: SparkSession, cluster: Cluster, topic: str, end: int) -> dict[int, bytes]:
    """Our source, from the brokers: objects of the store, and the live end."""
    reader = spark.read.format("danube").option("service.url", cluster.url).option("topic", topic)
    return {row["offset"]: bytes(row["payload"]) for row in reader.load().where(f"offset < {end}").collect()}


def by_duckdb(cluster: Cluster, topic: str, end: int) -> dict[int, bytes]:
    connection = duckdb.connect()
    for name in ("avro", "httpfs", "iceberg"):
        try:  # from packages, if they are there
            place = Path(next(iter(import_module(f"duckdb_extension_{name}").__path__)))
            connection.load_extension(str(next(place.rglob(f"{name}.duckdb_extension"))))
        except ImportError:
            connection.install_extension(name)
            connection.load_extension(name)
    connection.execute(
        f"ATTACH 'danube' AS danube (TYPE iceberg, ENDPOINT '{cluster.catalog}', AUTHORIZATION_TYPE 'none')"
    )
    table = topic.replace("/", ".")
    return dict(connection.execute(f'SELECT "offset", payload FROM danube{table} WHERE "offset" < {end}').fetchall())


def by_pyiceberg(cluster: Cluster, topic: str, end: int) -> dict[int, bytes]:
    table = RestCatalog("danube", uri=cluster.catalog).load_table(topic[1:].replace("/", "."))
    rows = table.scan(f"offset < {end}", selected_fields=("offset", "payload")).to_arrow()
    return dict(zip(rows["offset"].to_pylist(), rows["payload"].to_pylist(), strict=True))


def until(is_so: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not is_so():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {WAIT_SECONDS} s")
        time.sleep(0.2)


def agree(spark: SparkSession, cluster: Cluster, topic: str = "/default/live_orders") -> int:
    """0 if Spark, DuckDB and PyIceberg read the orders that were acknowledged, each once, while more are produced."""
    with pydanube.blocking.connect(cluster.url) as client:
        client.create_topic(topic)
        orders = Orders(cluster.url, topic)
        orders.start()
        try:
            until(lambda: len(orders.acknowledged) >= 200, "orders are produced")
            cluster.kill_owner(client.lookup(topic).stream_url)
            known = len(orders.acknowledged)
            until(lambda: len(orders.acknowledged) >= known + 200, "another broker takes the topic")
            cluster.do("start", "--registration-ttl", "5", "--upload-interval", "2")  # it brings what only it has
            end = max(list(orders.acknowledged)) + 1
            expected = {offset: payload for offset, payload in list(orders.acknowledged.items()) if offset < end}

            def is_as_expected(read: Callable[[], dict[int, bytes]]) -> Callable[[], bool]:
                def look() -> bool:
                    try:
                        return read() == expected
                    except duckdb.ProgrammingError:
                        raise
                    except (duckdb.Error, RESTError, OSError):  # a broker that starts says 503, and DuckDB may be early
                        return False

                return look

            until(is_as_expected(lambda: by_pyiceberg(cluster, topic, end)), "PyIceberg reads what was acknowledged")
            until(is_as_expected(lambda: by_duckdb(cluster, topic, end)), "DuckDB reads what was acknowledged")
            until(is_as_expected(lambda: by_spark(spark, cluster, topic, end)), "Spark reads what was acknowledged")
            is_live = len(orders.acknowledged) > len(expected)
        finally:
            orders.stop()
    print("a broker was killed: Spark, DuckDB and PyIceberg read the orders that were acknowledged, each of them once")
    return 0 if is_live else 1


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
            return run(spark, cluster, Path(name) / "lake") or agree(spark, cluster)
        finally:
            spark.stop()


if __name__ == "__main__":
    sys.exit(main())
