"""SIGHUP and the one stream of a container: a real broker."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.e2e.processes import BrokerProcess, danube, until

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
