"""`danube admin storage` and retention as an operator uses them: exit codes, lines, JSON, damage in a directory."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from pydanube.testing.ports import free_ports
from tests.e2e.processes import BrokerProcess, broker_in, danube, danube_here, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

NUMBERS = count()
MESSAGES = 20


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_in(tmp_path_factory.mktemp("storage"), "--upload-interval", "1") as started:
        yield started


@pytest.fixture
def topic(broker: BrokerProcess) -> str:
    """Twenty messages, uploaded."""
    name = f"/default/storage{next(NUMBERS)}"
    broker.admin("topics", "create", name, "--dispatch-strategy", "reliable")
    lines = "".join(f"line {number}\n" for number in range(MESSAGES))
    done = danube("produce", "-s", broker.url, "-t", name, "--reliable", "--lines", text=lines)
    assert done.returncode == 0, done.stderr
    until(lambda: listed(broker, name)["cloud"] == [{"first": 0, "end": MESSAGES}], "it is uploaded")
    return name


def listed(broker: BrokerProcess, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(broker.admin("storage", "list", topic, "-o", "json"))
    return found


def admin(broker: BrokerProcess, *arguments: object) -> subprocess.CompletedProcess[str]:
    return danube_here("admin", "--endpoint", broker.endpoint, *arguments)


def test_a_list_for_people_for_scripts_and_for_sql(broker: BrokerProcess, topic: str) -> None:
    found = listed(broker, topic)
    assert (found["topic"], found["first_offset"], found["head"]) == (topic, 0, MESSAGES)
    assert found["only_in_log"] == found["orphans"] == found["voids"] == []
    urls = [each["url"] for each in found["objects"]]
    assert [(each["first"], each["end"]) for each in found["objects"]][-1][1] == MESSAGES
    assert broker.admin("storage", "list", topic, "-o", "paths").splitlines() == urls
    assert all(Path(url).stat().st_size == each["size_bytes"] for url, each in zip(urls, found["objects"], strict=True))
    text = broker.admin("storage", "list", topic)
    assert all(url in text for url in urls)
    assert f"{MESSAGES} messages" in text and f"{topic} has offsets 0 up to {MESSAGES}" in text


def test_describe_and_explain_show_the_tiers(broker: BrokerProcess, topic: str) -> None:
    lines = dict(line.split(maxsplit=1) for line in broker.admin("topics", "describe", topic).splitlines())
    assert lines["in_objects:"] == lines["in_log:"] == f"0…{MESSAGES - 1}"
    described = json.loads(broker.admin("topics", "describe", topic, "-o", "json"))
    everything = [{"first": 0, "end": MESSAGES}]
    assert described["cloud"] == everything and described["log"] == everything
    assert danube("consume", "-s", broker.url, "-t", topic, "-m", "sub", "--timeout", 0.01).returncode == 0
    explained = json.loads(broker.admin("subscriptions", "explain", topic, "sub", "-o", "json"))
    assert explained["tiers"]["cloud"] == everything


def test_a_whole_history_is_exit_code_0(broker: BrokerProcess, topic: str) -> None:
    done = admin(broker, "storage", "verify", topic)
    assert done.returncode == 0
    assert "everything verifies" in done.stdout.splitlines()[-1] and done.stderr == ""
    done = admin(broker, "storage", "verify", topic, "-o", "json")
    assert done.returncode == 0, done
    report = json.loads(done.stdout)
    assert report["ok"] and report["problems"] == [] and report["messages"] == MESSAGES


def test_damage_is_exit_code_1_with_the_object_and_its_offsets(broker: BrokerProcess, topic: str) -> None:
    first = Path(listed(broker, topic)["objects"][0]["url"])
    saved = first.read_bytes()
    first.write_bytes(saved[:100] + bytes([saved[100] ^ 1]) + saved[101:])
    done = admin(broker, "storage", "verify", topic)
    assert done.returncode == 1
    [line] = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert first.name in line and "offsets 0…" in line and "1 problem found" in done.stdout
    first.unlink()
    report = json.loads(admin(broker, "storage", "verify", topic, "-o", "json").stdout)
    assert [problem["kind"] for problem in report["problems"]] == ["missing"] and not report["ok"]
    first.write_bytes(saved)
    assert admin(broker, "storage", "verify", topic).returncode == 0


def test_repair_says_what_it_left_and_why(broker: BrokerProcess, topic: str) -> None:
    place = Path(listed(broker, topic)["objects"][0]["url"]).parent
    foreign, left_over = place / "notes.txt", place / "data-0-9-1-9.parquet"
    foreign.write_text("mine")
    left_over.write_text("half an upload")
    done = admin(broker, "storage", "verify", topic, "--repair")
    assert done.returncode == 0  # neither hides a message
    assert "notes.txt: nobody describes it; PyDanube does not give such names: it stays" in done.stdout
    assert "data-0-9-1-9.parquet: nobody describes it" in done.stdout and "it may go in" in done.stdout
    assert foreign.exists() and left_over.exists()


def test_what_could_not_be_checked_has_the_exit_code_of_its_reason(broker: BrokerProcess) -> None:
    done = admin(broker, "storage", "verify", "/default/never")
    assert done.returncode == 4 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and "/default/never" in done.stderr
    [port] = free_ports(1)
    done = danube("admin", "--endpoint", f"http://127.0.0.1:{port}", "storage", "verify", "/default/a")
    assert done.returncode == 3 and len(done.stderr.splitlines()) == 1


def test_retention_is_shown_set_and_reset(broker: BrokerProcess, topic: str) -> None:
    def rule(*arguments: object) -> tuple[int, int, str]:
        found = json.loads(broker.admin(*arguments, "-o", "json"))
        return found["retention_minutes"], found["retention_mb"], found["set_by"]

    broker.admin("namespaces", "create", "kept")
    mine = f"/kept{topic.removeprefix('/default')}"
    broker.admin("topics", "create", mine, "--dispatch-strategy", "reliable")
    assert rule("topics", "retention", mine) == (0, 0, "configuration")
    assert rule("namespaces", "retention", "kept", "--minutes", 60) == (60, 0, "namespace")
    assert rule("topics", "retention", mine) == (60, 0, "namespace")
    assert rule("topics", "retention", mine, "--mb", 5) == (60, 5, "topic")
    assert rule("namespaces", "retention", "kept", "--reset") == (0, 0, "configuration")
    assert rule("topics", "retention", mine) == (60, 5, "topic")
    assert rule("topics", "retention", mine, "--reset") == (0, 0, "configuration")
    done = admin(broker, "topics", "retention", mine, "--minutes", 1, "--reset")
    assert done.returncode == 2 and "--reset" in done.stderr
    assert "retention_minutes: 0" in " ".join(broker.admin("namespaces", "policies", "kept").split())


def test_retention_can_be_applied_now(broker: BrokerProcess, topic: str) -> None:
    assert "0 objects forgotten: history begins at offset 0" in broker.admin("storage", "retain", topic)


def test_a_restart_keeps_the_retention_of_a_namespace_that_the_configuration_names(tmp_path: Path) -> None:
    with broker_in(tmp_path) as broker:
        broker.admin("namespaces", "retention", "default", "--mb", 7)
        broker.stop()
        broker.start()
        found = json.loads(broker.admin("namespaces", "retention", "default", "-o", "json"))
        assert (found["retention_mb"], found["set_by"]) == (7, "namespace")
