"""Runs a job by its name: settings, session, progress, report."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NamedTuple, Self, TextIO

from pydanube.core.declared import says
from pydanube.errors import ConfigError, DanubeError, Refused
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.settings import dotted, read_settings

JOBS: Final = {
    "lake": "topics become tables: raw, typed, quarantine; Parquet or Iceberg",
    "compact": "many small objects become few large ones",
    "audit": "proves a topic: offsets, objects, checksums, repetitions, receipts",
    "replay": "a range of a topic again, to another topic or to a file",
    "erase": "the bytes of a key's messages go from history; offsets stay",
    "maintain": "Iceberg tables of lake: small files rewritten, snapshots expired, orphans removed",
    "stats": "counts, bytes, keys and latencies per topic and hour",
}


WITH_CHECKPOINT: Final = frozenset({"lake"})


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
    master: str | None = None,
    remote: str | None = None,
    as_json: bool = False,
) -> JobReport:
    """Raises ConfigError, SparkMissing, JavaMissing and JobFailed. A session that is there is used, and stays."""
    if job not in JOBS:
        raise ConfigError("JOB", job, f"one of {', '.join(JOBS)}")
    return run_values(job, read_settings(conf, changes), master=master, remote=remote, as_json=as_json)


def check_values(job: str, values: Mapping[str, Any]) -> JobCall:
    """The job with its settings, those of a file as they are nested there. Raises ConfigError and SparkMissing."""
    found = dotted(values)
    given = found.pop("spark", None) or {}
    if not isinstance(given, dict):
        raise ConfigError("spark", given, "names and values of Spark's own settings")
    spark_conf = {str(name): str(value) for name, value in given.items()}
    try:
        module: Any = import_module(f"pydanube.pipeline.{job}")
    except ImportError:
        raise SparkMissing from None
    module.check(dict(found))
    return JobCall(module, found, spark_conf)


def run_values(
    job: str,
    values: Mapping[str, Any],
    *,
    master: str | None = None,
    remote: str | None = None,
    as_json: bool = False,
    progress: TextIO | None = None,
) -> JobReport:
    """`progress` is where lines about it go, one JSON object each; else stderr. Raises as `run_job`."""
    # A mistake is said at once: Spark takes seconds, or a cluster's minutes, to start.
    module, values, spark_conf = check_values(job, values)
    if not getattr(module, "NEEDS_SPARK", True):
        with QueryWatch(job, as_json=as_json, stream=progress) as watch:
            done: JobReport = module.run(None, dict(values), watch)
        done.seconds = watch.seconds
        return done
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession

        from pydanube.pipeline.progress import facts
        from pydanube.spark.session import session
    except ImportError:
        raise SparkMissing from None
    is_ours = SparkSession.getActiveSession() is None
    with SparkLog() as spark_log, QueryWatch(job, as_json=as_json, stream=progress or spark_log.stderr) as watch:
        watch.says("starting Spark")
        try:
            with spark_log.catching() if is_ours and remote is None else nullcontext():
                spark = session(
                    f"danube {job}",
                    master=master,
                    remote=remote,
                    conf=spark_conf,
                    defaults={"spark.log.level": "ERROR"},
                )
            watch.facts = lambda: facts(spark)
            try:
                report: JobReport = _run(job, lambda: module.run(spark, dict(values), watch))
            finally:
                if is_ours:
                    spark.stop()
        except PySparkException as error:
            raise JobFailed(job, reason(str(error)) + spark_log.kept()) from error
        report.seconds = watch.seconds
        return report


class JobCall(NamedTuple):
    """A job's module, its settings, checked, and Spark's own."""

    module: Any
    values: dict[str, Any]
    spark_conf: dict[str, str]


class SparkLog:
    """What Spark's JVM and its Python workers write to stderr, in a file: the terminal is for progress and for us.

    The file is named in the error of a job that failed, and removed otherwise.
    """

    def __init__(self) -> None:
        self.stderr: TextIO | None = None  # what was stderr before; None: it still is
        self._file: Path | None = None
        self._is_kept = False

    def __enter__(self) -> Self:
        with suppress(OSError, ValueError):  # without a stderr there is nothing to keep clean
            self.stderr = os.fdopen(os.dup(sys.stderr.fileno()), "w")
        return self

    def __exit__(self, *about: object) -> None:
        if self.stderr is not None:
            self.stderr.close()
        if self._file is not None and not self._is_kept:
            self._file.unlink(missing_ok=True)

    @contextmanager
    def catching(self) -> Iterator[None]:
        """A JVM that starts inside has the file as its stderr, for as long as it lives."""
        if self.stderr is None:
            yield
            return
        sys.stderr.flush()
        file, name = tempfile.mkstemp(prefix="danube-spark-", suffix=".log")
        self._file = Path(name)
        os.dup2(file, 2)
        os.close(file)
        try:
            yield
        finally:
            os.dup2(self.stderr.fileno(), 2)

    def kept(self) -> str:
        """Words behind a reason that say where Spark's own words are."""
        self._is_kept = self._file is not None and self._file.stat().st_size > 0
        return f" (what Spark wrote is in {self._file})" if self._is_kept else ""


def _run(job: str, once: Callable[[], JobReport]) -> JobReport:
    """Once, or again if it is safe: a job with a checkpoint goes on from there."""
    from pydanube.spark.restarts import run_again

    return run_again(once, what=job) if job in WITH_CHECKPOINT else once()


def reason(text: str) -> str:
    """What went wrong, out of Spark's page of stack traces: our own sentence if there is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for line in lines:
        name, separator, sentence = line.partition(": ")
        if separator and name.startswith("pydanube.") and sentence:
            return sentence
    return lines[0] if lines else "Spark does not say why"
