"""Tables read by Spark with Iceberg's own runtime: the newest pair of which there is a release, in a place of its own.

It needs PySpark from the package index and a jar from Maven Central, once; both stay in build/. Without them it fails
and says NOT RUN: nobody is to believe that Spark reads these tables because this file was green.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Final, NoReturn

import pytest

from pydanube.spark.java import java_home
from pydanube.testing.brokers import TestBroker
from tests.e2e.processes import CLIENTS
from tests.e2e.test_tables import TableSetup
from tests.harness.engines import digest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

PYSPARK: Final = "4.1.4"
RUNTIME: Final = "iceberg-spark-runtime-4.1_2.13"
ICEBERG: Final = "1.12.0"
JAR: Final = f"https://repo1.maven.org/maven2/org/apache/iceberg/{RUNTIME}/{ICEBERG}/{RUNTIME}-{ICEBERG}.jar"
SHA256: Final = "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82"
BUILD: Final = Path(__file__).resolve().parents[2] / "build"


def not_run(what: str, why: object) -> NoReturn:
    pytest.fail(
        f"NOT RUN: Spark {PYSPARK} with Iceberg {ICEBERG} did not read any table, because {what}: {why}", pytrace=False
    )


@pytest.fixture(scope="module")
def python() -> Path:
    place = BUILD / f"pyspark-{PYSPARK}"
    made = place / "made"
    if not made.exists():  # the last thing that is written
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        command = [place / "bin" / "python", "-m", "pip", "install", "--quiet", f"pyspark=={PYSPARK}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode:
            not_run("PySpark cannot be installed", done.stderr[-500:])
        made.touch()
    return place / "bin" / "python"


@pytest.fixture(scope="module")
def jar() -> Path:
    place = BUILD / JAR.rpartition("/")[2]
    if not place.exists():
        try:
            with urllib.request.urlopen(JAR, timeout=300) as answer:
                content = answer.read()
        except OSError as error:
            not_run("Maven Central does not answer", error)
        assert hashlib.sha256(content).hexdigest() == SHA256, "the jar is not the one that was released"
        unfinished = place.with_suffix(".part")
        unfinished.write_bytes(content)
        unfinished.rename(place)
    return place


def test_spark_reads_what_was_acknowledged_and_refuses_what_would_be_wrong(
    python: Path, jar: Path, tmp_path: Path
) -> None:
    with TestBroker(tmp_path) as broker:
        setup = TableSetup(broker)
        setup.await_rows()
        before = len(setup.sent)
        setup.send("orders", 100)
        setup.await_rows()
        environment = {**os.environ, "PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"}
        environment.pop("PYTHONPATH", None)  # another PySpark may be on it
        environment.pop("SPARK_HOME", None)
        if home := java_home():
            environment["JAVA_HOME"] = home
        command = [python, CLIENTS / "iceberg_spark.py", jar, setup.catalog]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=tmp_path)
        assert done.returncode == 0, done.stderr[-6000:]
        told = json.loads(done.stdout.splitlines()[-1])
        assert told["version"] == PYSPARK
        assert told["namespaces"] == ["default", "system"] and told["tables"] == ["clicks", "orders"]
        assert (told["rows"], told["digest"]) == (len(setup.sent), digest(enumerate(setup.sent)))
        assert told["some"] == len(setup.sent) - 100 and told["files"] >= 2
        assert [len(setup.sent)] * 2 in told["at"].values() and [before] * 2 in told["at"].values()
        assert [part for part, _ in told["parts"]] == [0, 1] and sum(count for _, count in told["parts"]) == 300
        for statement in ("insert", "create", "drop"):
            assert "Server does not support endpoint" in told[statement], told[statement]
        assert "Cannot process overwrite snapshot" in told["stream"]  # not twice as many rows, in silence
        setup.check()
