"""A Spark session for jobs, examples and tests: it works on a laptop as it is, and on a cluster if one is named.

what the program says      conf=, master=              wins
what the session has       spark-submit, spark-defaults.conf, a session that is there already: left alone
what suits a laptop        no UI, few partitions       only if the master is this machine and nothing else is set
what results depend on     UTC, readable timestamps    unless something else is set
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from pyspark.errors import PySparkImportError
from pyspark.sql import SparkSession

from pydanube.core.hidden import names_a_secret
from pydanube.errors import ConfigError
from pydanube.spark.java import java_home
from pydanube.spark.ship import is_here, ship
from pydanube.spark.source import register

CONNECT_PORT: Final = 15002
KNOCK_SECONDS: Final = 10
LOCAL: Final = "local[*]"
MASTER: Final = "spark.master"
PYTHON: Final = "spark.pyspark.python"
# What results depend on, so a Spark Connect server is told it too.
RESULTS: Final[Mapping[str, str]] = {
    "spark.sql.session.timeZone": "UTC",
    # What every other reader of Parquet understands; Spark's own default is an old format of its own.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}
LAPTOP: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
}
# Of a JVM that PySpark starts by itself, which counts as a shell: no user has set these.
SET_BY_PYSPARK: Final = frozenset({"spark.ui.showConsoleProgress"})


class ChosenSettings(NamedTuple):
    """`settings` are for the builder; `master` is where the session runs."""

    master: str
    settings: Mapping[str, str]


def choose(
    present: Mapping[str, str],
    *,
    master: str | None = None,
    conf: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> ChosenSettings:
    """What to ask Spark for, if `present` is what it has been told already. `defaults` are those of the program."""
    given = dict(conf or {})
    chosen = master or given.get(MASTER) or present.get(MASTER) or LOCAL
    ours = {**RESULTS, **(LAPTOP if is_here(chosen) else {}), **(defaults or {})}
    settings = {name: value for name, value in ours.items() if name not in present}
    return ChosenSettings(chosen, {**settings, **given, MASTER: chosen})


def python_of(conf: Mapping[str, str], environment: Mapping[str, str]) -> str:
    """The interpreter of executors: as Spark itself, a setting before PYSPARK_PYTHON. Without either, this very one,
    with what is installed beside it; else Spark would take `python3` of the PATH.
    """
    return conf.get(PYTHON) or environment.get("PYSPARK_PYTHON") or sys.executable


def session(
    name: str,
    *,
    master: str | None = None,
    remote: str | None = None,
    conf: Mapping[str, str] | None = None,
    defaults: Mapping[str, str] | None = None,
) -> SparkSession:
    """Raises JavaMissing and ConfigError. With `remote` a Spark Connect server does the work: no Java is needed.

    Without `master` it is where `spark-submit` says, or this machine. `conf` wins over everything; `defaults` are for
    what is not set.
    """
    given = dict(conf or {})
    if master is None and MASTER not in given:
        remote = remote or os.environ.get("SPARK_REMOTE")
    os.environ["PYSPARK_PYTHON"] = python_of(given, os.environ)
    if remote is None or is_here(remote):  # `--remote local[2]` starts a server of Spark Connect here
        home = java_home()
        if home is not None:
            os.environ["JAVA_HOME"] = home
    builder = SparkSession.builder.appName(name)
    if remote is not None:
        if is_here(remote):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
        _knock(remote)
        builder = builder.remote(remote)
        chosen = ChosenSettings(remote, {**RESULTS, **given})
    else:
        chosen = choose(_present(master, given), master=master, conf=given, defaults=defaults)
    for key, value in chosen.settings.items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except PySparkImportError as error:
        raise ConfigError("--remote", remote, f"pip install 'pyspark[connect]' first: {error}") from error
    if not is_here(chosen.master):
        ship(spark, is_remote=remote is not None)
    register(spark)
    return spark


def _present(master: str | None, conf: Mapping[str, str]) -> dict[str, str]:
    """What Spark has been told: by a session that is there, by spark-submit, or by spark-defaults.conf.

    Starts the JVM, if there is none: only it reads the last two.
    """
    from pyspark import SparkConf, SparkContext

    active = SparkSession.getActiveSession()
    if active is not None:
        return _of_its_owner(active)
    is_submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if not is_submitted and is_here(master or conf.get(MASTER) or LOCAL):
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    # What starts the JVM stands in its command line, which all users of the machine see. The session gets all of them.
    begun = SparkConf(loadDefaults=False).setAll([each for each in conf.items() if not names_a_secret(each[0])])
    if master is not None:
        begun.setMaster(master)
    SparkContext._ensure_initialized(conf=begun)
    found = dict(SparkConf(loadDefaults=True).getAll())
    if PYTHON in found and PYTHON not in conf:
        os.environ["PYSPARK_PYTHON"] = found[PYTHON]
    return {key: value for key, value in found.items() if is_submitted or key not in SET_BY_PYSPARK}


def _of_its_owner(spark: SparkSession) -> dict[str, str]:
    """Settings of a session that is there: what suits a laptop is not for us to change in it."""
    said = {name: value for name in RESULTS if (value := spark.conf.get(name, None)) is not None}
    return {**LAPTOP, **dict(spark.sparkContext.getConf().getAll()), **said}


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
