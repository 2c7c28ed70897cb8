"""A broker with its etcd member inside is cut off for longer than its lease: the resilience document's own test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def cut_off(directory: Path, rejoin: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.e2e.cut_off", str(directory), rejoin]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY / 'src'}:{REPOSITORY}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, env=environment, cwd=REPOSITORY)
    logs = "\n".join(f"--- {each.name}\n{each.read_text()[-3000:]}" for each in sorted(directory.glob("*.log")))
    assert done.returncode == 0, f"{done.stderr[-3000:]}\n{logs}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "skipped" in found:
        pytest.skip(found["skipped"])
    return found


@pytest.mark.parametrize("rejoin", ["active", "drained"])
def test_a_broker_with_its_member_inside_that_is_cut_off_for_longer_than_its_lease(tmp_path: Path, rejoin: str) -> None:
    seen = cut_off(tmp_path, rejoin)
    assert seen["lived"], "it waits for its network, and does not end"
    assert "Registration recovered after expiry. Setting broker to drained." in seen["log"]
    assert "Broker registration expired. Registered as drained." in seen["log"]
    assert ("it takes topics by itself (rejoin: active)" in seen["log"]) == (rejoin == "active")
    assert seen["ready"], "drained for having been away is ready, too"
    # The first three were on its disk alone, and came back with it.
    assert set(seen["received"]) == {"a", "b", "c", "d"}
