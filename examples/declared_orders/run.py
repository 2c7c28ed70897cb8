"""Orders in a topic, tables that Spark's own pipelines make of them, and DuckDB that asks.

    .venv/bin/python examples/declared_orders/run.py

Declared pipelines run on Spark Connect, which `make setup-spark` installs. Spark forgets tables with its
process here; with a catalog that stays (a metastore), the next run reads only what is new.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import duckdb
import pyspark

import pydanube
from pydanube.spark.java import java_home
from pydanube.testing import broker

HERE = Path(__file__).resolve().parent
TOPIC = "/default/orders"
COUNTRIES = ("DE", "AT", "HU", "RO")
SPEC = """
name: orders
storage: file://{directory}/pipeline
libraries:
  - glob: {{include: tables.py}}
configuration:
  spark.danube.url: {url}
  spark.sql.shuffle.partitions: "2"
"""


def produce(url: str, count: int) -> None:
    with pydanube.blocking.connect(url) as client, client.producer(TOPIC) as producer:
        for number in range(count):
            value = {"id": f"order-{number}", "country": COUNTRIES[number % 4], "cents": number}
            producer.room()
            producer.send_nowait(json.dumps(value).encode())


def update(directory: Path, url: str) -> None:
    """Brings the tables up to date, as `spark-pipelines run` on the command line does."""
    spec = directory / "spark-pipeline.yml"
    spec.write_text(SPEC.format(directory=directory, url=url))
    shutil.copy(HERE / "tables.py", directory)  # Spark looks for definitions below the specification
    home = java_home()
    environment = {
        **os.environ,
        **({"JAVA_HOME": home} if home else {}),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    command = [Path(pyspark.__file__).parent / "bin" / "spark-pipelines", "run", "--spec", spec]
    done = subprocess.run(
        command, env=environment, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        raise SystemExit(done.stdout)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="danube-declared-") as name, broker() as running:
        directory = Path(name)
        produce(running.url, 1000)
        update(directory, running.url)
        table = f"read_parquet('{directory}/spark-warehouse/orders_by_country/*.parquet')"
        for country, count, cents in duckdb.sql(f"select country, orders, cents from {table} order by 1").fetchall():
            print(f"{country}  {count:>4} orders  {cents / 100:>8.2f} EUR")


if __name__ == "__main__":
    main()
