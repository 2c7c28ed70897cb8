"""A Spark session for jobs, examples and tests: it works on a laptop as it is, and on a cluster if one is named."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from pyspark.errors import PySparkImportError
from pyspark.sql import SparkSession

from pydanube.errors import ConfigError
from pydanube.spark.java import java_home
from pydanube.spark.ship import is_here, ship
from pydanube.spark.source import register

CONNECT_PORT: Final = 15002
KNOCK_SECONDS: Final = 10
# What results depend on, so a Spark Connect server is told it too.
RESULTS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    # What every other reader of Parquet understands; Spark's own default is an old format of its own.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
DEFAULTS: Final[Mapping[str, str]] = {
    **RESULTS,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
}


def session(
    name: str, *, master: str = "local[*]", remote: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Raises JavaMissing and ConfigError. With `remote` a Spark Connect server does the work: no Java is needed."""
    # Workers run this very interpreter, with what is installed beside it; else Spark takes `python3` of the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if remote is None or is_here(remote):  # `--remote local[2]` starts a server of Spark Connect here
        home = java_home()
        if home is not None:
            os.environ["JAVA_HOME"] = home
        if (remote or master).startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if remote is not None:
        _knock(remote)
    builder = builder.master(master) if remote is None else builder.remote(remote)
    for key, value in {**(DEFAULTS if remote is None else RESULTS), **(conf or {})}.items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except PySparkImportError as error:
        raise ConfigError("--remote", remote, f"pip install 'pyspark[connect]' first: {error}") from error
    if not is_here(remote or master):
        ship(spark, is_remote=remote is not None)
    register(spark)
    return spark


def _knock(remote: str) -> None:
    """Spark itself would try for ten minutes, and say nothing meanwhile. Raises ConfigError."""
    place = urlsplit(remote)
    if place.scheme == "sc" and place.hostname:
        port = place.port or CONNECT_PORT
        try:
            socket.create_connection((place.hostname, port), KNOCK_SECONDS).close()
        except OSError as error:
            named = f"sc://{place.hostname}:{port}"  # behind it may stand a token
            raise ConfigError("--remote", named, f"a Spark Connect server that answers: {error}") from error
