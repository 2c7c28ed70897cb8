"""A Spark session for jobs, examples and tests: it works on a laptop as it is, and on a cluster if one is named."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from pyspark.errors import PySparkImportError
from pyspark.sql import SparkSession

from pydanube.errors import ConfigError
from pydanube.spark.java import java_home
from pydanube.spark.source import register

DEFAULTS: Final[Mapping[str, str]] = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "8",
    # What every other reader of Parquet understands; Spark's own default is an old format of its own.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}


def session(
    name: str, *, master: str = "local[*]", remote: str | None = None, conf: Mapping[str, str] | None = None
) -> SparkSession:
    """Raises JavaMissing and ConfigError. With `remote` a Spark Connect server does the work: no Java is needed."""
    # Workers run this very interpreter, with what is installed beside it; else Spark takes `python3` of the PATH.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if remote is None or remote.startswith("local"):  # `--remote local[2]` starts a server of Spark Connect here
        home = java_home()
        if home is not None:
            os.environ["JAVA_HOME"] = home
        if (remote or master).startswith("local"):
            os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    if remote is not None:
        builder = builder.remote(remote)
    else:
        builder = builder.master(master)
        for key, value in DEFAULTS.items():
            builder = builder.config(key, value)
    for key, value in (conf or {}).items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except PySparkImportError as error:
        raise ConfigError("--remote", remote, f"pip install 'pyspark[connect]' first: {error}") from error
    register(spark)
    return spark
