"""Schemas on a real broker, with real parsers: the official client's calls, and the page's commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.processes import BrokerProcess, broker_in, danube_here
from tests.pages import DOCS, blocks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ORDER = {"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}
NEXT = {"type": "record", "name": "Order", "fields": [*ORDER["fields"], {"name": "n", "type": "int", "default": 1}]}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_in(tmp_path_factory.mktemp("schemas")) as started:
        yield started


def test_the_official_clients_schema_calls_work_and_its_producers_are_held_to_the_policy(broker: BrokerProcess) -> None:
    with broker.run("schemas", "/default/official") as program:
        program.until("done")
        said = {line.pop("event"): line for line in program.lines()}
    assert said["same id"] == {"same": True}
    assert said["read"] == {"latest": 2, "first": True, "type": "json_schema"}
    assert said["versions"] == {"versions": [1, 2]}
    assert said["check"]["compatible"] is False
    assert said["check"]["errors"][0].startswith("Backward incompatible: removed required field 'name'")
    assert said["check none"] == {"compatible": True}
    assert all(said[call]["done"][0] is True for call in ("mode", "deleted", "configured", "warned"))
    assert said["config"] == {"subject": "official", "policy": "enforce", "same": True}
    assert said["refused payload"]["code"] == said["refused missing"]["code"] == "INVALID_ARGUMENT"
    assert "/name" in said["refused payload"]["why"] and "no schema id" in said["refused missing"]["why"]
    assert "cannot use nosuch" in said["refused subject"]["why"]


def test_the_commands_of_the_page_run(broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("order.avsc").write_text(json.dumps(ORDER))
    Path("next.avsc").write_text(json.dumps(NEXT))
    commands = [line for block in blocks((DOCS / "schemas.md").read_text()) for line in block.text.splitlines()]
    for command in commands:
        _, admin, *words = shlex.split(command)
        assert admin == "admin"
        assert broker.admin(*words)
    assert "schema_subject:" in broker.admin("schemas", "topic", "/default/orders")
    assert json.loads(broker.admin("schemas", "get", "orders", "-o", "json"))["version"] == 1
    broker.admin("schemas", "register", "orders", "--schema-type", "avro", "--file", "next.avsc")
    listed = json.loads(broker.admin("schemas", "versions", "orders", "-o", "json"))
    assert [each["version"] for each in listed] == [1, 2]
    assert "orders" in broker.admin("schemas", "list-subjects")
    broker.admin("schemas", "set-compatibility", "orders", "--mode", "full_transitive")
    assert "full_transitive" in broker.admin("schemas", "get-compatibility", "orders")
    wrong = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "string"}]}'
    flags = ["--schema-type", "avro", "--schema", wrong]
    done = danube_here("admin", "--endpoint", broker.endpoint, "schemas", "check", "orders", *flags)
    assert done.returncode == 1 and "changed type of field 'id' from long to string" in done.stdout
    broker.admin("schemas", "delete", "orders", "--version", 1, "--confirm")
    done = danube_here(
        "admin", "--endpoint", broker.endpoint, "topics", "create", "/default/x", "--schema-subject", "nosuch"
    )
    assert done.returncode == 5 and "nosuch" in done.stderr
