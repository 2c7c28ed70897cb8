"""A round of real chaos: a broker is killed while a topic moves, and nothing is lost; what is lost would be found.

One run serves all tests that look at its history.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from pydanube.testing.checkers import check
from pydanube.testing.history import Acked, Claimed, Done, Event, Fault, Got, History, Kept
from tests.e2e.processes import Process, until
from tools.chaos.command import main, parsed
from tools.chaos.faults import FAULTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "chaos.md").read_text()
COMMAND = [sys.executable, "-m", "tools.chaos", "--small", "--ttl", "3", "--rounds", "1"]


class Finished(NamedTuple):
    directory: Path
    output: str
    exit_code: int
    history: History


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """The shortest example of the page."""
    directory = tmp_path_factory.mktemp("chaos")
    [words] = [words for words in commands() if "--small" in words]
    words += ["--ttl", "3", "--moves", "1", "--seed", "3", "--directory", str(directory)]
    command = [sys.executable, "-m", "tools.chaos", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    output = done.stdout + done.stderr
    assert (directory / "history.jsonl").exists(), output
    return Finished(directory, output, done.returncode, History.read(directory / "history.jsonl"))


def test_a_broker_is_killed_while_a_topic_moves_and_no_promise_is_broken(finished: Finished) -> None:
    assert finished.exit_code == 0, finished.output
    assert "no promise was broken" in finished.output
    assert re.search(r"^broker_kill +1 ", finished.output, re.MULTILINE), finished.output
    assert check(finished.history) == []


def test_the_history_is_of_something_that_happened(finished: Finished) -> None:
    history = finished.history
    assert [fault.kind for fault in history.all(Fault)] == ["broker_kill"]
    kept = {each.topic: each for each in history.all(Kept)}
    assert len(kept) == 2
    assert len(history.all(Acked)) >= 50
    assert {acked.offset for acked in history.all(Acked)} <= {at for each in kept.values() for at in each.messages}
    assert max(claimed.epoch for claimed in history.all(Claimed)) >= 2
    assert all(claimed.broker in (1, 2, 3) for claimed in history.all(Claimed))


def without(history: History, unwanted: Callable[[Event], bool]) -> History:
    return History(event for event in history.events if not unwanted(event))


def test_a_delivery_that_did_not_happen_is_found(finished: Finished) -> None:
    got = finished.history.all(Got)[20]
    lost = (got.topic, got.subscription, got.offset)

    def is_lost(event: Event) -> bool:
        return isinstance(event, Got | Done) and (event.topic, event.subscription, event.offset) == lost

    [violation] = check(without(finished.history, is_lost))
    assert violation.rule == "never_delivered" and violation.offsets == (got.offset,)


def test_a_receipt_for_nothing_is_found(finished: Finished) -> None:
    kept = finished.history.all(Kept)[0]
    forged = Acked(kept.topic, "never stored", kept.head + 5, at=finished.history.all(Acked)[-1].at)
    broken = check(History([*finished.history.events, forged]))
    assert "lost_write" in {violation.rule for violation in broken}


def test_a_message_that_is_gone_from_the_log_is_found(finished: Finished) -> None:
    events = [_without_one(event) if isinstance(event, Kept) else event for event in finished.history.events]
    assert {"lost_write", "gap", "phantom"} <= {violation.rule for violation in check(History(events))}


def _without_one(kept: Kept) -> Kept:
    messages = dict(kept.messages)
    del messages[min(messages)]
    return kept._replace(messages=messages)


def test_nobody_is_left_behind(finished: Finished) -> None:
    assert processes_of(finished.directory) == []


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_a_harness_that_is_ended_takes_its_processes_with_it(tmp_path: Path, number: signal.Signals) -> None:
    directory = tmp_path / "chaos"
    command = [*COMMAND, "--only", "broker_pause", "--directory", str(directory)]
    with Process(command, tmp_path / "output") as process:
        until(lambda: len(processes_of(directory)) >= 7, "everything runs", seconds=120, say=process.text)
        process.send_signal(number)
        assert process.wait(60) in (-signal.SIGKILL, 130)
    until(lambda: not processes_of(directory), "everything ends", say=lambda: str(processes_of(directory)))


def processes_of(directory: Path) -> list[str]:
    """Command lines that name a file in the directory, but for the harness itself."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = place.read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile
            continue
        if any(bytes(directory) + b"/" in word for word in words):
            found.append(b" ".join(words).decode(errors="replace"))
    return found


def test_what_is_not_permitted_here_is_skipped_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "1", "--only", "cut_all", "--only", "disk_full", "--no-namespaces"]) == 0
    assert capsys.readouterr().out == "skipped: cut_all, disk_full: it was not asked for\n"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "say either --rounds or --minutes"),
        (("--rounds", "1", "--minutes", "1"), "say either --rounds or --minutes"),
        (("--rounds", "-1"), "--rounds must be 0 at least"),
        (("--minutes", "nan"), "--minutes must be 0 at least"),
        (("--rounds", "1", "--ttl", "0"), "--ttl must be 1 at least"),
        (("--rounds", "1", "--rate", "0"), "--rate must be 0.01 at least"),
        (
            ("--rounds", "1", "--no-namespaces", "--directory", "."),
            ". is not empty: name a directory for this run alone",
        ),
    ],
)
def test_a_command_that_means_nothing_is_one_line(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], told: str
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"chaos: {told}\n"


# --- the page -----------------------------------------------------------------------------------------------


def commands() -> Sequence[list[str]]:
    lines = re.findall(r"^\s*(?:\.venv/bin/)?python -m tools\.chaos (.*)$", PAGE, re.MULTILINE)
    return [shlex.split(line, comments=True) for line in lines]


def test_the_page_names_every_fault_and_its_commands_are_understood() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)
    assert rows == list(FAULTS)
    assert len(commands()) >= 2
    for words in commands():
        given = parsed(words)
        assert bool(given.rounds) != bool(given.minutes)


def test_the_page_judges_a_history(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    monkeypatch.chdir(finished.directory)
    exec(code, {})  # the page's own words
    assert capsys.readouterr().out == ""
