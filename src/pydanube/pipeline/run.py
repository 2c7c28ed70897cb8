"""Runs a job by its name: settings, session, progress, report."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final

from pydanube.core.declared import says
from pydanube.errors import ConfigError, DanubeError, Refused
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import read_settings

JOBS: Final = {
    "lake": "topics become tables: raw, typed, quarantine; Parquet or Iceberg",
    "compact": "many small objects become few large ones",
    "audit": "proves a topic: offsets, objects, checksums, repetitions, receipts",
    "replay": "a range of a topic again, to another topic or to a file",
    "erase": "the bytes of a key's messages go from history; offsets stay",
    "stats": "counts, bytes, keys and latencies per topic and hour",
}


class SparkMissing(Refused):
    """The extra is not installed."""

    def __str__(self) -> str:
        return "the data pipeline needs Spark: pip install 'pydanube[spark]', or make setup-spark in a checkout"


@says("{job} failed: {why}")
class JobFailed(DanubeError):
    """Spark gave up; `why` is the first line of its reason."""

    job: str
    why: str


def run_job(
    job: str,
    *,
    conf: Path | None = None,
    changes: tuple[str, ...] = (),
    master: str = "local[*]",
    remote: str | None = None,
    as_json: bool = False,
) -> JobReport:
    """Raises ConfigError, SparkMissing, JavaMissing and JobFailed. A session that is there is used, and stays."""
    if job not in JOBS:
        raise ConfigError("JOB", job, f"one of {', '.join(JOBS)}")
    values = read_settings(conf, changes)
    spark_conf = {str(name): str(value) for name, value in (values.pop("spark", None) or {}).items()}
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        from pydanube.spark.session import session
    except ImportError:
        raise SparkMissing from None
    module: Any = import_module(f"pydanube.pipeline.{job}")
    with QueryWatch(job, as_json=as_json) as watch:
        watch.says("starting Spark")
        is_ours = SparkSession.getActiveSession() is None
        if remote is None:  # a server has its own
            spark_conf.setdefault("spark.log.level", "ERROR")
        try:
            spark = session(f"danube {job}", master=master, remote=remote, conf=spark_conf)
            try:
                report: JobReport = module.run(spark, values, watch)
            finally:
                if is_ours:
                    spark.stop()
        except PySparkException as error:
            raise JobFailed(job, reason(str(error))) from error
        report.seconds = watch.seconds
        return report


def reason(text: str) -> str:
    """What went wrong, out of Spark's page of stack traces: our own sentence if there is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        name, separator, sentence = line.partition(": ")
        if separator and name.startswith("pydanube.") and sentence:
            return sentence
    return lines[0] if lines else "Spark does not say why"
