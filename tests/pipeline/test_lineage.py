"""OpenLineage events: as the specification wants them, to a real server or a file, and never in the way of a job."""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from pydanube.errors import ConfigError, DanubeError
from pydanube.pipeline import lineage, run
from pydanube.pipeline.lineage import Dataset, Lineage, LineageSettings, dataset_at, inputs_of, outputs_of
from pydanube.pipeline.report import JobReport

LAKE = {
    "service.url": "danube://broker-1:6651,broker-2:6651",
    "topic": "/default/orders",
    "name": "orders-eu",
    "target": "s3://lake/tables",
    "schema": "id string",
}


@contextmanager
def server(status: int = 200, wait: float = 0.0) -> Iterator[tuple[str, list[tuple[str, Mapping[str, str], Any]]]]:
    came: list[tuple[str, Mapping[str, str], Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            came.append((self.path, dict(self.headers), body))
            time.sleep(wait)
            self.send_response(status)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listening = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", came
    finally:
        listening.shutdown()
        thread.join()
        listening.server_close()


def check_run_event(event: Any) -> None:
    """What the specification requires: fields, types, formats, and both base fields in every facet."""
    assert event["eventType"] in ("START", "COMPLETE", "ABORT", "FAIL", "OTHER", "RUNNING")
    assert event["eventTime"].endswith("Z") and datetime.fromisoformat(event["eventTime"].replace("Z", "+00:00"))
    assert str(uuid.UUID(event["run"]["runId"])) == event["run"]["runId"]
    assert event["job"]["namespace"] and event["job"]["name"]
    for name in ("producer", "schemaURL"):
        assert urlsplit(event[name]).scheme == "https" and urlsplit(event[name]).netloc
    for each in (*event["inputs"], *event["outputs"]):
        assert set(each) <= {"namespace", "name", "facets"} and each["namespace"] and each["name"]
    for facet in event["run"].get("facets", {}).values():
        assert facet["_producer"] and re.search(r"#/\$defs/\w+$", facet["_schemaURL"])
    assert set(event) == {"eventType", "eventTime", "run", "job", "inputs", "outputs", "producer", "schemaURL"}


def ran(monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any], outcome: JobReport | BaseException) -> JobReport:
    """A job that ends so, without Spark."""

    def end(*_: object) -> JobReport:
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(run, "_run_call", end)
    return run.run_values("audit", {"service.url": "danube://b:6651", "topic": "/default/orders", **settings})


@pytest.mark.parametrize(
    ("outcome", "kind", "message"),
    [
        (JobReport("audit"), "COMPLETE", None),
        (JobReport("audit", problems=["offset 7 is missing"]), "FAIL", "offset 7 is missing"),
        (DanubeError("no broker"), "FAIL", "no broker"),
        (KeyboardInterrupt(), "ABORT", "it was interrupted"),
    ],
)
def test_a_run_is_told_to_a_server_by_its_start_and_its_end(
    monkeypatch: pytest.MonkeyPatch, outcome: JobReport | BaseException, kind: str, message: str | None
) -> None:
    with server() as (url, came):
        settings = {"lineage": {"url": url, "token": "t0ken"}}
        if isinstance(outcome, BaseException):
            with pytest.raises(type(outcome)):
                ran(monkeypatch, settings, outcome)
        else:
            assert ran(monkeypatch, settings, outcome).values["lineage"] == "2 events sent"
    for path, headers, event in came:
        check_run_event(event)
        assert path == "/api/v1/lineage" and headers["Authorization"] == "Bearer t0ken"
        assert event["inputs"] == [{"namespace": "danube://b:6651", "name": "/default/orders"}]
        assert event["job"] == {"namespace": "danube", "name": "audit.orders"}
    start, end = (event for *_, event in came)
    assert (start["eventType"], end["eventType"]) == ("START", kind) and start["run"]["runId"] == end["run"]["runId"]
    assert end["run"].get("facets", {}).get("errorMessage", {}).get("message") == message


def test_events_go_to_a_file_one_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = {"lineage.file": str(tmp_path / "lineage.jsonl"), "lineage.namespace": "prod", "lineage.job": "proof"}
    ran(monkeypatch, settings, JobReport("audit"))
    ran(monkeypatch, settings, JobReport("audit"))
    events = [json.loads(line) for line in (tmp_path / "lineage.jsonl").read_text().splitlines()]
    assert [each["eventType"] for each in events] == ["START", "COMPLETE"] * 2
    assert {(each["job"]["namespace"], each["job"]["name"]) for each in events} == {("prod", "proof")}
    assert len({each["run"]["runId"] for each in events}) == 2


def test_a_server_that_is_away_refuses_or_is_slow_never_stops_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lineage, "END_SECONDS", 0.3)
    away = ran(monkeypatch, {"lineage.url": "http://127.0.0.1:9"}, JobReport("audit"))
    assert away.is_good and "0 of 2 events sent: " in away.values["lineage"]
    with server(status=500) as (url, _):
        refused = ran(monkeypatch, {"lineage.url": url}, JobReport("audit"))
        assert refused.is_good and "0 of 2 events sent: HTTPError" in refused.values["lineage"]
    with server(wait=1.0) as (url, _):
        began = time.monotonic()
        slow = ran(monkeypatch, {"lineage.url": url}, JobReport("audit"))
        assert slow.is_good and time.monotonic() - began < 0.9
        assert slow.values["lineage"] == "0 of 2 events sent: no answer in time"
    full = ran(monkeypatch, {"lineage.file": "/no/such/directory/x"}, JobReport("audit"))
    assert full.is_good and "No such file" in full.values["lineage"]


def test_without_the_option_nothing_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lineage" not in ran(monkeypatch, {}, JobReport("audit")).values
    assert Lineage(None, "lake", LAKE).ended("COMPLETE") is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"lineage.urll": "http://x"}, "did you mean lineage.url?"),
        ({"lineage.url": "ftp://x"}, "http://host:port"),
        ({"lineage.url": "http://me:s3cr3t@x"}, "without a user"),
        ({"lineage.namespace": "x"}, "either lineage.url or lineage.file"),
        ({"lineage.url": "http://x", "lineage.file": "y"}, "either"),
    ],
)
def test_a_mistake_is_said_before_the_job_begins(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        run.check_values("audit", {"service.url": "danube://b:6651", "topic": "/default/orders", **values})
    assert "s3cr3t" not in str(refused.value)


def test_a_whole_url_is_posted_to_as_it_is() -> None:
    found = LineageSettings.parse("lake", {"lineage.url": "https://catalog/openlineage"}, LAKE)
    assert found is not None and found.url == "https://catalog/openlineage" and found.job == "lake.orders-eu"


@pytest.mark.parametrize(
    ("place", "namespace", "name"),
    [
        ("/srv/lake/orders_raw", "file", "/srv/lake/orders_raw"),
        ("file:///srv/lake", "file", "/srv/lake"),
        ("s3a://bucket/a/b", "s3://bucket", "a/b"),
        ("gs://bucket/a/", "gs://bucket", "a"),
        ("hdfs://namenode:8020/a/b", "hdfs://namenode:8020", "/a/b"),
        ("abfss://box@account.dfs.core.windows.net/a", "abfss://box@account.dfs.core.windows.net", "a"),
    ],
)
def test_datasets_are_named_by_the_rules(place: str, namespace: str, name: str) -> None:
    assert dataset_at(place) == Dataset(namespace, name)


def test_each_job_says_what_it_reads_and_what_it_makes() -> None:
    topic = Dataset("danube://broker-1:6651", "/default/orders")
    assert inputs_of(LAKE) == [topic]
    assert outputs_of("lake", LAKE) == [
        Dataset("s3://lake", f"tables/orders_eu_{kind}") for kind in ("raw", "typed", "quarantine")
    ]
    iceberg = {**LAKE, "format": "iceberg", "schema": None, "catalog": {"warehouse": "gs://warehouse/x"}}
    assert outputs_of("lake", iceberg) == [Dataset("gs://warehouse", "danube.orders_eu_raw")]
    assert outputs_of("maintain", {"target": "/lake", "tables": ["a.b"]}) == [Dataset("file", "a.b")]
    copy = {**LAKE, "to_topic": "/default/again"}
    assert outputs_of("replay", copy) == [Dataset("danube://broker-1:6651", "/default/again")]
    assert outputs_of("replay", {**LAKE, "to_file": "/x.jsonl"}) == [Dataset("file", "/x.jsonl")]
    assert outputs_of("compact", LAKE) == [topic] and outputs_of("audit", LAKE) == []
    offline = {"storage.url": "s3://lake/objects", "topics": ["/default/a", "/default/b"]}
    assert inputs_of(offline) == [Dataset("s3://lake", f"objects/default/{each}") for each in "ab"]
