"""Which settings a session gets, and what a worker of Spark must load. No Spark is started, but in the long tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkContext
from pyspark.sql import SparkSession

from pydanube.spark import session
from pydanube.spark.java import java_home
from pydanube.spark.session import choose, python_of

SHUFFLE = "spark.sql.shuffle.partitions"
UI = "spark.ui.enabled"
ZONE = "spark.sql.session.timeZone"
SUBMIT = Path(pyspark.__file__).parent / "bin" / "spark-submit"


def test_what_spark_submit_says_is_left_alone() -> None:
    submitted = {"spark.master": "yarn", SHUFFLE: "64", ZONE: "Europe/Vienna", "spark.log.level": "INFO"}
    chosen = choose(submitted, defaults={"spark.log.level": "ERROR"})
    assert chosen.master == "yarn"
    assert not {SHUFFLE, UI, ZONE, "spark.log.level"} & set(chosen.settings)


def test_a_laptop_gets_few_partitions_and_no_page_and_a_cluster_what_spark_has() -> None:
    for present in ({}, {"spark.master": "local[*]"}):
        here = choose(present)
        assert here.master == "local[*]" and (here.settings[SHUFFLE], here.settings[UI]) == ("8", "false")
    there = choose({}, master="spark://master:7077")
    assert SHUFFLE not in there.settings and UI not in there.settings and there.settings[ZONE] == "UTC"


def test_what_the_program_says_wins() -> None:
    submitted = {"spark.master": "yarn", SHUFFLE: "64"}
    chosen = choose(submitted, master="local[2]", conf={SHUFFLE: "3"})
    assert chosen.master == "local[2]" and chosen.settings[SHUFFLE] == "3"
    assert choose(submitted, conf={"spark.master": "local"}).master == "local"


def test_no_secret_stands_in_the_command_line_of_the_jvm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark writes what it is told at its start behind --conf; the session is told all of it."""
    begun: dict[str, str] = {}
    monkeypatch.setattr(SparkSession, "getActiveSession", lambda: None)
    monkeypatch.setattr(
        SparkContext, "_ensure_initialized", classmethod(lambda cls, conf: begun.update(dict(conf.getAll())))
    )
    monkeypatch.setattr(SparkContext, "_jvm", None)
    given = {
        "spark.driver.memory": "2g",
        "spark.hadoop.fs.s3a.secret.key": "hunter2",
        "spark.sql.catalog.lake.token": "hunter2",
        "spark.hadoop.fs.s3a.aws.credentials.provider": "a.b.C",
        "spark.authenticate.secret.file": "/run/secrets/spark",
    }
    session._present(None, given)
    assert "hunter2" not in begun.values() and len(begun) == 3
    assert choose({}, conf=given).settings["spark.hadoop.fs.s3a.secret.key"] == "hunter2"


def test_the_interpreter_of_executors_is_the_one_that_was_named() -> None:
    setting = {"spark.pyspark.python": "./environment/bin/python"}
    assert python_of(setting, {"PYSPARK_PYTHON": "/other"}) == "./environment/bin/python"
    assert python_of({}, {"PYSPARK_PYTHON": "/other"}) == "/other"
    assert python_of({}, {}) == sys.executable


def test_a_worker_loads_neither_pandas_nor_the_client_to_know_the_source() -> None:
    program = (
        "import json, sys, pyspark.worker, pyspark.sql.worker.plan_data_source_read;"
        "before = set(sys.modules);"
        "import pydanube.spark.source;"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    loaded = json.loads(subprocess.run([sys.executable, "-c", program], capture_output=True, check=True).stdout)
    assert not {"pandas", "obstore", "pydanube.client.client", "pydanube.config", "google.protobuf"} & set(loaded)
    assert len(loaded) < 150, loaded


PROGRAM = """
import json
from pydanube.spark.session import session
spark = session("submitted")
names = ("spark.sql.shuffle.partitions", "spark.ui.enabled", "spark.pyspark.python")
told = {name: spark.conf.get(name, None) for name in names}
rows = spark.range(10).mapInArrow(lambda batches: batches, "id long").count()
print(json.dumps({"master": spark.sparkContext.master, "python": spark.sparkContext.pythonExec, "rows": rows, **told}))
spark.stop()
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_program_that_is_submitted_runs_where_and_as_it_was_submitted(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(PROGRAM)
    home = java_home()
    environment = {**os.environ, **({"JAVA_HOME": home} if home else {}), "SPARK_LOCAL_IP": "127.0.0.1"}
    environment.pop("PYSPARK_PYTHON", None)
    settings = {"spark.sql.shuffle.partitions": "64", "spark.ui.enabled": "false", "spark.log.level": "ERROR"}
    done = subprocess.run(
        [
            *(str(SUBMIT), "--master", "local-cluster[1,1,1024]"),
            *(word for name, value in settings.items() for word in ("--conf", f"{name}={value}")),
            *("--conf", f"spark.pyspark.python={sys.executable}", str(tmp_path / "job.py")),
        ],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {
        "master": "local-cluster[1,1,1024]",
        "python": sys.executable,
        "rows": 10,
        "spark.sql.shuffle.partitions": "64",
        "spark.ui.enabled": "false",
        "spark.pyspark.python": sys.executable,
    }
