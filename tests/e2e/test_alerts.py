"""The alerts that an operator is given fire when they should and stay quiet when they should not."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import yaml

from pydanube.telemetry import Telemetry

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def test_each_alert_fires_and_each_stays_quiet() -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is missing: run `make setup-test`, or install prometheus (Debian, Ubuntu: apt-get)"
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        result = subprocess.run([promtool, *command], cwd=DEPLOY, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stdout + result.stderr


def test_alerts_speak_of_series_that_every_broker_and_every_subscription_has() -> None:
    telemetry = Telemetry()
    telemetry.subscription("/default/a", "s")
    telemetry.cloud.waiting = lambda: (0, 0, 0.0)
    exported = {family.name for family in telemetry.snapshot().collect()}
    rules = [rule for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
    named = {word for rule in rules for word in _metrics(rule["expr"])}
    assert {name.removesuffix("_total") for name in named} <= exported


def _metrics(expression: str) -> list[str]:
    words = expression.replace("(", " ").replace("[", " ").split()
    return [word for word in words if word.startswith("danube_")]
