"""The demo runs, loses nothing and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.processes import until

ROOT = Path(__file__).parents[2]
DEMO = [sys.executable, "-m", "examples.demo", "--output", "json"]
SMALL = ["--topics", "3", "--rate", "60", "--moves", "1", "--seconds", "0.5"]


def processes_of(directory: Path) -> list[str]:
    """Command lines that name the directory: brokers, metadata members, the store."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and entry.name != str(os.getpid()):
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            if str(directory) in command:
                found.append(command)
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_loses_nothing_stays_if_told_to_and_is_gone_after_ctrl_c(tmp_path: Path) -> None:
    command = [*DEMO, *SMALL, "--no-spark", "--no-s3", "--keep"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as demo:
        assert demo.stdout is not None and demo.stderr is not None
        try:
            line = demo.stdout.readline()
            assert line, demo.stderr.read().decode()
            result = json.loads(line)
            assert result["success"] and result["lost"] == 0 and result["errors"] == []
            assert result["received"] == result["sent"] > 0
            assert result["moves"] == len(result["move_pause_ms"]) == 1
            assert result["crash_topics"] >= 1 and result["crash_pause_ms"] > 0
            assert demo.poll() is None and processes_of(tmp_path), "it stays"
            demo.send_signal(signal.SIGINT)
            assert demo.wait(60) == 0, demo.stderr.read().decode()
        finally:
            demo.kill()
    until(lambda: not processes_of(tmp_path), "all of its processes are gone")
    assert list(tmp_path.glob("danube-demo-*")) == []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_spark_finds_every_order_of_the_demo_in_the_s3_store(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([*DEMO, *SMALL], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["spark_orders"] == result["received"] == result["sent"] > 0
    assert "history: S3 (SeaweedFS" in done.stderr
    assert processes_of(tmp_path) == []
