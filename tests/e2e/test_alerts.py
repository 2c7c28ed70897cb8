"""The alerts that an operator is given fire when they should, stay quiet when they should not, and say what to do."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import yaml

from pydanube.core.dispatch.lag import Standing
from pydanube.core.pipelines.conditions import PipelineRow
from pydanube.telemetry import ClusterNow, DiskSpace, Telemetry

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
PARTS = ("Look", "Do", "When it is no problem")


def rules() -> dict[str, dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"]
    return {rule["alert"]: rule for group in groups for rule in group["rules"]}


def test_each_alert_fires_and_each_stays_quiet() -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: run `make setup-test`, or install prometheus (Debian, Ubuntu: apt-get)"
    commands = (
        ["check", "rules", "alerts.yml"],
        ["test", "rules", "alerts_test.yml"],
        ["check", "config", "prometheus.yml"],
    )
    for command in commands:
        result = subprocess.run([promtool, *command], cwd=DEPLOY, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr


def test_no_alert_is_without_a_case_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    tests = yaml.safe_load((DEPLOY / "alerts_test.yml").read_text())["tests"]
    cases = [(case["alertname"], bool(case["exp_alerts"])) for test in tests for case in test["alert_rule_test"]]
    assert {name for name, fires in cases if fires} == set(rules())
    assert {name for name, fires in cases if not fires} == set(rules())


def test_every_alert_has_a_severity_and_a_runbook_and_no_runbook_is_left_over() -> None:
    for name, rule in rules().items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/{name}.md"
    pages = {page.stem: page.read_text() for page in (REPOSITORY / "docs" / "runbooks").glob("*.md")}
    assert set(pages) == set(rules())
    for name, text in pages.items():
        assert text.startswith(f"# {name}\n\n"), name
        assert tuple(re.findall(r"^## (.+)$", text, re.MULTILINE)) == PARTS, name
        for link in re.findall(r"\]\(([^)#]+)", text):
            assert (REPOSITORY / "docs" / "runbooks" / link).exists(), f"{name}: {link}"


def test_alerts_speak_of_series_that_brokers_have() -> None:
    telemetry = Telemetry()
    telemetry.subscription("/default/a", "s", lambda: Standing(head=1, next_unacked=0, lag=1, undispatched=1))
    telemetry.topic("/default/a").orphan_ranges.set(1)
    telemetry.waiting = lambda: (0, 0, 0.0)
    telemetry.wal.size_bytes = lambda: 1
    telemetry.disk_space = lambda: DiskSpace(1, 1)
    telemetry.cluster = lambda: ClusterNow("active", True, 1, 0.0)
    row = PipelineRow("orders", "ok", 1.0, 60, 0, 0, 0, 1, 0, True)
    telemetry.pipelines = lambda: [row]
    exported = {sample.name for family in telemetry.snapshot().collect() for sample in family.samples}
    for name, rule in rules().items():
        named = set(re.findall(r"danube_\w+", rule["expr"]))
        assert named <= exported, name
        assert named or re.search(r"\b(up|process_start_time_seconds)\{", rule["expr"]), name
