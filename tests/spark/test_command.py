"""`danube pipeline`: what a person sees before Spark has anything to do."""

from __future__ import annotations

import subprocess
import sys

import pytest


def danube(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pydanube.pipeline", *words], capture_output=True, text=True, timeout=100
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "nothing"), "one of lake, compact, audit, replay, stats"),
        (("run", "audit", "--conf", "no/such/file"), "a file that can be read"),
        (("run", "audit", "--set", "topic"), "name=value"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_1(words: tuple[str, ...], said: str) -> None:
    done = danube(*words)
    assert done.returncode == 1
    assert said in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_jobs_are_listed() -> None:
    done = danube("jobs")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["lake", "compact", "audit", "replay", "stats"]
