"""What the command line itself answers: mistakes in it, and a reader that leaves early."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator

import pytest

import pydanube
from pydanube.cli.exits import Exit
from pydanube.cli.main import main
from pydanube.testing.brokers import TestBroker
from tests.e2e.processes import danube_here

TOPIC = "/default/orders"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running, pydanube.blocking.connect(running.url) as client:
        client.create_topic(TOPIC)
        yield running


# --- mistakes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("admin topics list --nmespace x", "no such option: --nmespace"),
        (
            "admin topics create -o json",
            "missing argument 'TOPIC'; `danube admin topics create --help` shows what there is",
        ),
        ("admin topics peek /default/a --count 0", "invalid value for '--count'"),
        ("admin topics describe /a/b /a/c", "unexpected extra argument"),
        ("prodce", "no such command 'prodce'. Did you mean 'produce'? `danube --help` shows what there is"),
        ("consume -m s --sub-type odd", "'odd' is not one of shared, key_shared, failover, exclusive"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line_on_standard_error(words: str, said: str) -> None:
    done = danube_here(*words.split())
    assert done.returncode == Exit.USAGE and done.stdout == ""
    assert done.stderr.startswith("danube: ") and said in done.stderr and done.stderr.count("\n") == 1


def test_a_group_without_a_command_shows_its_help_and_is_a_mistake() -> None:
    done = danube_here("admin", "topics")
    assert done.returncode == Exit.USAGE and "Usage: danube admin topics" in done.stdout


# --- a reader that leaves -------------------------------------------------------------------------------


class Left(io.StringIO):
    """A pipe whose reader has left after so many lines."""

    def __init__(self, lines: int = 0) -> None:
        super().__init__()
        self.lines = lines

    def write(self, text: str) -> int:
        if self.getvalue().count("\n") >= self.lines:
            raise BrokenPipeError(32, "Broken pipe")
        return super().write(text)


def left_by_its_reader(monkeypatch: pytest.MonkeyPatch, *words: object, lines: int = 0) -> tuple[int, str]:
    """The exit code, and what stands on standard error."""
    errors = io.StringIO()
    monkeypatch.setattr(sys, "argv", ["danube", *map(str, words)])
    with (
        contextlib.redirect_stdout(Left(lines)),
        contextlib.redirect_stderr(errors),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    return int(ended.value.code or 0), errors.getvalue()


@pytest.mark.parametrize(
    "words",
    ["status", "status -o json", "topics list"],
)
def test_a_question_whose_reader_leaves_ends_well(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    assert left_by_its_reader(monkeypatch, "admin", "--endpoint", broker.admin_url, *words.split()) == (0, "")


def test_help_whose_reader_leaves_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    assert left_by_its_reader(monkeypatch, "admin", "--help", lines=1) == (0, "")


def test_messages_are_all_sent_whether_or_not_somebody_reads_the_report(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"{TOPIC}-sent"
    words = ["produce", "-s", broker.url, "-t", topic, "-m", "x", "-c", 20, "-i", 0, "-o", "json"]
    assert left_by_its_reader(monkeypatch, *words, lines=1) == (0, "")
    with pydanube.blocking.connect(broker.url) as client:
        assert client.describe_topic(topic).head == 20


def test_messages_are_printed_as_long_as_somebody_reads_them(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = f"{TOPIC}-read"
    danube_here("produce", "-s", broker.url, "-t", topic, "-m", "x", "-c", 20, "-i", 0)
    words = ["consume", "-s", broker.url, "-t", topic, "-m", "reader", "--start", "earliest", "-o", "json"]
    code, said = left_by_its_reader(monkeypatch, *words, lines=5)
    assert code == 0 and "Total received: 6 messages" in said
    lag = danube_here("admin", "--endpoint", broker.admin_url, "subscriptions", "lag", topic, "reader", "-o", "json")
    assert json.loads(lag.stdout)["lag_messages"] == 15  # the one that met nobody is not acknowledged


def test_a_refusal_keeps_its_exit_code_without_a_reader(broker: TestBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["admin", "--endpoint", broker.admin_url, "topics", "delete", "/default/none"]
    code, said = left_by_its_reader(monkeypatch, *words)
    assert code == Exit.NOT_FOUND and said.startswith("danube: ")
