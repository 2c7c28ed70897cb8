"""docs/pipelines.md: its declarations are accepted, its commands run, mistakes are said before anything is stored."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from pydanube.core.pipelines.declaration import FIELDS
from pydanube.core.pipelines.status import Health
from pydanube.testing.brokers import TestBroker
from tests.e2e.processes import danube_here
from tests.pages import DOCS, blocks

PAGE = (DOCS / "pipelines.md").read_text()
RUNBOOKS = sorted((DOCS / "runbooks").glob("DanubePipeline*.md"))


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running:
        yield running


@pytest.fixture
def danube(broker: TestBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("DANUBE_ADMIN_ENDPOINT", broker.admin_url)
    (tmp_path / "orders.yaml").write_text(declarations())
    with chdir(tmp_path):
        yield danube_here
        for each in json.loads(danube_here("pipeline", "list", "--output", "json").stdout):
            assert danube_here("pipeline", "delete", each["pipeline"]).returncode == 0


def declarations() -> str:
    [found] = [each.text for each in blocks(PAGE) if each.language == "yaml"]
    return found


def supervise(broker: TestBroker, *words: str) -> None:
    """Until it has joined, and then SIGTERM."""
    command = [sys.executable, "-m", "pydanube", *words, "--endpoint", broker.admin_url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        for line in running.stderr:
            if "supervisor joined" in line:
                break
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0, running.stderr.read()


def test_the_commands_of_the_page_and_of_the_runbooks_run(broker: TestBroker, danube: Any) -> None:
    page = [each for block in blocks(PAGE) if block.language == "sh" for each in block.commands]
    runbooks = [
        each
        for file in RUNBOOKS
        for block in blocks(file.read_text())
        if block.language == "sh"
        for each in block.commands
    ]
    *commands, last = page
    assert shlex.split(last)[1:3] == ["pipeline", "supervise"]
    at = next(place for place, each in enumerate(commands) if "delete" in each)
    for command in [*commands[:at], *dict.fromkeys(runbooks), *commands[at:]]:
        words = shlex.split(command)
        if words[1] != "pipeline":
            continue  # tests/e2e/test_observed.py
        done = danube(*words[1:])
        wrong = 1 if words[2] == "status" else 0  # no supervisor has claimed it
        assert done.returncode == wrong and not done.stderr, (command, done)
    for each in ("orders",):
        assert danube("pipeline", "delete", each).returncode == 0
    supervise(broker, *shlex.split(last)[1:])


def test_a_pipeline_is_shown_with_what_is_known_and_no_more(danube: Any) -> None:
    assert "Pipeline created: orders" in danube("pipeline", "apply", "orders.yaml").stdout
    assert "Pipeline unchanged: orders" in danube("pipeline", "apply", "orders.yaml").stdout
    found = json.loads(danube("pipeline", "status", "orders", "--output", "json").stdout)
    assert (found["health"], found["freshness_goal_seconds"], found["when"]) == ("unknown", 300, "follows, every 30s")
    assert found["fresh_seconds"] is None and found["behind_messages"] is None and found["error"] is None
    table = danube("pipeline", "list").stdout
    assert "unknown of 5 min" in table and "cron 15 3 * * *" in table
    danube("pipeline", "pause", "orders")
    assert "already" in danube("pipeline", "pause", "orders").stdout
    assert danube("pipeline", "status", "orders").returncode == 0, "paused is as ordered"
    missing = danube("pipeline", "status", "nothing")
    assert missing.returncode == 4 and "danube pipeline list" in missing.stderr


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("topic: /default/orders", "topik: /default/orders", "did you mean topic?"),
        ("job: audit", "job: audits", "did you mean audit?"),
        ("cron: 15 3 * * *", "follow: 5s", "audit has an end"),
        ("cron: 15 3 * * *", "crom: 15 3 * * *", "did you mean cron?"),
        ("{from_file: /run/secrets/danube-token}", "s3cr3t", "from_env"),
        ("id string not null", "id strng", "id is of no type"),
        ("name: orders-audit", "name: orders", "declared once"),
        ("settings:", "settings: [", "YAML"),
    ],
)
def test_a_mistake_anywhere_in_a_file_is_said_and_nothing_of_it_is_stored(
    danube: Any, tmp_path: Path, old: str, new: str, said: str
) -> None:
    place = declarations().rfind(old) if "topic" in old else declarations().find(old)
    text = declarations()
    (tmp_path / "wrong.yaml").write_text(text[:place] + new + text[place + len(old) :])
    done = danube("pipeline", "apply", "wrong.yaml")
    assert done.returncode == 2 and said in done.stderr and "s3cr3t" not in done.stderr, done
    assert len(done.stderr.splitlines()) == 1
    assert json.loads(danube("pipeline", "list", "--output", "json").stdout) == []


def test_the_page_names_every_field_and_every_word_for_how_it_is_doing() -> None:
    table = PAGE.partition("| | |")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)))) == set(FIELDS)
    table = PAGE.partition("| health | means |")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == {each.value for each in Health}
