"""SIGHUP and the one stream of a container: a real broker."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from pydanube.cli.hangups import starts_broker
from tests.e2e.processes import BrokerProcess, Process, danube, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_sighup_reloads_says_what_it_did_and_never_kills(tmp_path: Path) -> None:
    file = tmp_path / "danube.yml"
    file.write_text("log: {format: json}\npolicies: {max_publish_rate: 500}\n")
    with BrokerProcess(tmp_path, "--config-file", str(file)) as broker:
        process = broker.process
        assert process is not None

        def lines() -> list[dict[str, object]]:
            """All of what it wrote, to both streams: every line is an object, the greeting too."""
            return [json.loads(line) for line in broker.output.read_text().splitlines()]

        def told(message: str) -> list[dict[str, object]]:
            return [each for each in lines() if each["message"] == message]

        def hang_up(text: str, message: str) -> dict[str, object]:
            known = len(told(message))
            file.write_text(text)
            process.send_signal(signal.SIGHUP)
            until(lambda: len(told(message)) > known, message, say=process.text)
            return told(message)[-1]

        [greeting] = [each for each in lines() if str(each["message"]).endswith("is ready.")]
        assert greeting["admin"] == broker.endpoint and greeting["level"] == "INFO"

        text = "log: {format: json, level: error}\npolicies: {max_publish_rate: 600}\ncluster_name: other\n"
        done = hang_up(text, "configuration reloaded")
        assert done["changed"] == "log.level: info -> error; policies.max_publish_rate: 500 -> 600"
        assert done["needs_restart"] == "cluster_name"
        shown = json.loads(broker.admin("namespaces", "policies", "default", "-o", "json"))
        assert shown["max_publish_rate"] == 600

        done = hang_up("policies: {max_publish_rate: many}\n", "configuration not reloaded: nothing was changed")
        assert "policies.max_publish_rate" in str(done["why"])
        assert json.loads(broker.admin("namespaces", "policies", "default", "-o", "json")) == shown

        file.write_text("log: {format: json}\n")
        second = danube(*broker.command[5:])  # the directory and the ports are in use
        assert second.returncode == 5 and second.stdout == ""
        assert json.loads(second.stderr.splitlines()[-1])["message"] == "broker ended"
        assert broker.stop() == 0


# Python reads it before anything else: it hangs up at every import from typer's on, the first that takes long, and once
# more on the way out.
HANGING_UP = """
import atexit, os, signal, sys

class HangUp:
    told = 0

    def find_spec(self, name, *_):
        if self.told or name == "typer":
            self.told += 1
            os.kill(os.getpid(), signal.SIGHUP)

hang_up = HangUp()

@atexit.register
def leave():
    print("hung up", hang_up.told, "times", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGHUP)

sys.meta_path.insert(0, hang_up)
"""


def test_sighup_ends_no_broker_that_still_loads_its_code_nor_one_that_leaves(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGING_UP)
    file = tmp_path / "danube.yml"
    file.write_text("log: {format: json}\n")
    broker = BrokerProcess(tmp_path, "--config-file", str(file))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with Process(broker.command, tmp_path / "new.log", env={**os.environ, "PYTHONPATH": path}) as process:
        until(lambda: "is ready." in process.text() or process.exit_code is not None, "it is ready", say=process.text)
        assert process.exit_code is None
        until(lambda: "configuration reloaded" in process.text(), "one of before is heard now", say=process.text)
        assert json.loads(broker.admin("namespaces", "policies", "default", "-o", "json"))
        assert process.stop() == 0, process.text()
    [said] = [line for line in process.text().splitlines() if line.startswith("hung up ")]
    assert int(said.split()[2]) > 200  # modules, typer's among them


@pytest.mark.parametrize(
    ("line", "starts"),
    [
        ("/usr/bin/danube broker --mode standalone", True),
        ("/usr/bin/danube --context x broker", True),
        ("/usr/bin/danube-broker --mode standalone", True),
        ("/site-packages/pydanube/__main__.py broker", True),
        ("/usr/bin/danube --context broker admin status", False),
        ("/usr/bin/danube produce -t broker", False),
        ("/usr/bin/danube", False),
        ("/usr/bin/danube-admin broker", False),
        ("/usr/bin/pytest broker", False),
        ("", False),
    ],
)
def test_only_a_broker_outlives_its_terminal(line: str, starts: bool) -> None:
    assert starts_broker(line.split()) is starts
