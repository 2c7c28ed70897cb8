"""`danube pipeline`: what people see, and what scripts get, in a file, on a terminal and in an exit code."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from pydanube.errors import ConfigError
from pydanube.pipeline.report import JobReport, QueryWatch
from pydanube.pipeline.run import JobFailed, run_job
from pydanube.spark.session import session
from tests.e2e.processes import danube_here
from tests.spark.places import Place, free_port, numbers


def danube(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pydanube.pipeline", *words], capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "nothing"), "one of lake, compact, audit, replay, erase, maintain, stats"),
        (("run", "audit", "--conf", "no/such/file"), "a file that can be read"),
        (("run", "audit", "--set", "topic"), "name=value"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: tuple[str, ...], said: str) -> None:
    done = danube_here("pipeline", *words)
    assert done.returncode == 2
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("job", "wrong", "said"),
    [
        ("lake", "topik=x", "did you mean topic?"),
        ("lake", "schema='id strng, amount double'", "id is of no type that there is: strng; string is one"),
        ("lake", "start=sometime", "startingOffsets"),
        ("lake", "batch_rows=many", "a whole number"),
        ("audit", "problems_max=0", "a whole number"),
        ("compact", "object_mb=0", "a whole number"),
        ("replay", "to_topic=/default/t", "another topic"),
        ("replay", "start_time=yesterday", "startingTimestamp"),
        ("erase", "key=", "the routing key to erase"),
        ("stats", "top_keys=few", "a whole number"),
        ("stats", "spark=local", "Spark's own settings"),
    ],
)
def test_settings_are_checked_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch, job: str, wrong: str, said: str
) -> None:
    started = Mock(side_effect=AssertionError("Spark was started"))
    monkeypatch.setattr("pydanube.spark.session.session", started)
    good = ("service.url=danube://127.0.0.1:1", "topic=/default/t", *(["target=/x"] if job == "lake" else []))
    changes = (*good, *(["to_file=/x"] if job == "replay" and "to_topic" not in wrong else []), wrong)
    with pytest.raises(ConfigError) as caught:
        run_job(job, changes=changes)
    assert said in str(caught.value)


@pytest.mark.parametrize("fails", [True, False])
def test_the_terminal_is_for_progress_and_what_spark_writes_is_in_a_file_if_the_job_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path, fails: bool
) -> None:
    def started(*words: object, **named: object) -> Mock:
        os.write(2, b"WARNING: Using incubator modules: jdk.incubator.vector\n")  # as a JVM does
        return Mock()

    def run(*words: object) -> JobReport:
        if fails:
            raise PySparkException("[NOT] today")
        return JobReport("audit")

    monkeypatch.setattr("pydanube.spark.session.session", started)
    monkeypatch.setattr("pydanube.pipeline.audit.run", run)
    monkeypatch.setattr("pyspark.sql.SparkSession.getActiveSession", lambda: None)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    changes = ("service.url=danube://127.0.0.1:1", "topic=/default/t")
    if fails:
        with pytest.raises(JobFailed, match=r"\[NOT\] today \(what Spark wrote is in "):
            run_job("audit", changes=changes)
        [log] = tmp_path.iterdir()
        assert "incubator" in log.read_text()
    else:
        run_job("audit", changes=changes)
        assert not list(tmp_path.iterdir())
    [line] = capfd.readouterr().err.splitlines()
    assert json.loads(line)["progress"] == "starting Spark"


def test_the_jobs_are_listed() -> None:
    done = danube("jobs")
    assert done.returncode == 0
    jobs = ["lake", "compact", "audit", "replay", "erase", "maintain", "stats"]
    assert [line.split()[0] for line in done.stdout.splitlines()] == jobs


def test_a_remote_spark_without_its_packages_is_one_line_that_names_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "grpc_status.py").write_text("raise ImportError('No module named grpc_status')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    settings = ("--set", "topic=/default/t", "--set", "service.url=danube://127.0.0.1:1")
    done = danube("run", "audit", *settings, "--remote", "local[2]")
    assert done.returncode == 2
    [line] = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert "pip install 'pyspark[connect]'" in line


def test_a_remote_spark_that_does_not_answer_is_said_at_once() -> None:
    with pytest.raises(ConfigError, match="a Spark Connect server that answers") as caught:
        session("test", remote=f"sc://127.0.0.1:{free_port()}/;token=secret")
    assert "secret" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_file_of_settings_runs_a_job_and_its_exit_code_says_whether_all_is_well(
    borrowed: SparkSession, place: Place, tmp_path: Path
) -> None:
    topic = place.new_topic("commanded")
    place.send(topic, numbers(0, 20))
    place.upload(topic)
    conf = tmp_path / "audit.yaml"
    conf.write_text(f"service:\n  url: {place.url}\ntopic: {topic}\nspark:\n  spark.sql.shuffle.partitions: 2\n")
    done = danube_here("pipeline", "run", "audit", "--conf", conf, "--output", "json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["job"], found["result"], found["messages"], found["problems"]) == ("audit", "ok", 20, [])
    assert found["seconds"] > 0
    assert all(json.loads(line)["job"] == "audit" for line in done.stderr.splitlines() if line.startswith("{"))
    [path] = place.objects(topic)
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    done = danube_here("pipeline", "run", "audit", "--conf", conf)
    assert done.returncode == 1
    assert done.stdout.startswith("audit: FAILED in ") and f"problem: {topic}: {path.name}" in done.stdout
    done = danube_here("pipeline", "run", "stats", "--set", f"service.url={place.url}", "--set", "topic=/default/no")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "stats failed: unable to find the topic /default/no" in done.stderr.splitlines()[-1]
    assert borrowed.range(3).count() == 3, "the session stays: it was there before"


# --- progress -------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_a_bar_on_a_terminal_and_json_elsewhere() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with QueryWatch("lake", as_json=False, stream=stream) as watch:
            watch.says("3 messages", 3, 3, batches=1)
    assert json.loads(pipe.getvalue()) == {
        "job": "lake", "progress": "3 messages", "done": 3, "total": 3, "batches": 1,
    }  # fmt: skip
    assert "{" not in terminal.getvalue() and "lake: 3 messages" in terminal.getvalue()


def test_a_script_can_ask_for_json_on_a_terminal_too() -> None:
    terminal = Terminal()
    with QueryWatch("lake", as_json=True, stream=terminal) as watch:
        watch.says("all", 1, 1)
    assert json.loads(terminal.getvalue())["done"] == 1


def test_a_report_is_lines_for_people() -> None:
    report = JobReport("audit", {"messages": 1_234_567, "keys": ["a"]}, ["offset 7 is gone"], 1.25)
    assert report.lines() == [
        "audit: FAILED in 1.2 s",
        "  messages  1,234,567",
        '  keys      ["a"]',
        "  problem: offset 7 is gone",
    ]
