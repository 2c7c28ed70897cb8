"""docs/cli.md is what the commands say of themselves, and they say something everywhere.

Its examples are run in tests/e2e/test_pages.py and tests/spark/test_page.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pydanube
from pydanube.core.cluster import cluster_conditions, conditions
from pydanube.testing.brokers import TestBroker
from tests.e2e.processes import danube_here
from tools.docs.commands import commands, page

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
# They print no data: a server's address, or what they do as they do it.
WITHOUT_OUTPUT = {"danube broker", "danube admin serve", "danube log demo", "danube pipeline supervise"}


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text() == page(), "python -m tools.docs.commands > docs/cli.md"


def test_every_command_and_every_option_has_a_help_text() -> None:
    silent = [
        f"{words} {each.name}"
        for words, command in commands()
        for each in command.params
        if not getattr(each, "hidden", False) and not each.help and each.metavar != "NAMESPACE"
    ]
    assert silent == []
    assert [words for words, command in commands() if not (command.help or "").strip()] == []


def test_the_commands_that_conditions_recommend_exist() -> None:
    known = {words for words, _ in commands()}
    recommended = re.findall(
        r"\b(danube admin (?:[a-z-]+ )?[a-z-]+)",
        "".join(Path(each.__file__).read_text() for each in (conditions, cluster_conditions)),
    )
    assert recommended
    assert [words for words in recommended if words not in known] == []


def test_every_command_that_prints_data_takes_output_json() -> None:
    without = {
        words
        for words, command in commands()
        if not hasattr(command, "commands") and not any(each.name == "output" for each in command.params)
    }
    assert without == WITHOUT_OUTPUT


def test_no_help_text_tells_of_things_a_user_cannot_see() -> None:
    assert not re.search(r"\b(features\.md|the reference|gRPC's server|TODO)\b", page())


@pytest.mark.parametrize("words", ["", "admin", "admin topics", "admin topics redrive", "produce", "top"])
def test_help_fits_80_columns(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    done = danube_here(*words.split(), "--help")
    assert done.returncode == 0
    assert max(map(len, done.stdout.splitlines())) <= 80


# --- the Tab key ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running, pydanube.blocking.connect(running.url) as client:
        for topic in ("/default/orders", "/default/orders-dlq", "/default/clicks"):
            client.create_topic(topic)
        with client.consumer("/default/orders", subscription="billing"):
            pass
        yield running


def complete(line: str, **environment: str) -> list[str]:
    """What bash would offer for the last word of the line."""
    words = line.split(" ")
    asked = {"_DANUBE_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**asked, **environment}.items():
            patch.setenv(name, value)
        done = danube_here()
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_every_shell_is_printed(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    done = danube_here("--show-completion", shell)
    assert done.returncode == 0, done.stderr
    assert f"_DANUBE_COMPLETE=complete_{shell}" in done.stdout


def test_commands_are_completed() -> None:
    assert complete("danube adm") == ["admin"]
    assert {"redrive", "rebalance"} & set(complete("danube admin topics re")) == {"redrive"}


@pytest.mark.slow
def test_names_are_asked_of_the_broker(broker: TestBroker) -> None:
    here = {"DANUBE_ADMIN_ENDPOINT": broker.admin_url}
    assert complete("danube admin topics describe /default/o", **here) == ["/default/orders", "/default/orders-dlq"]
    typed = f"danube admin --endpoint {broker.admin_url} topics peek /"
    assert complete(typed) == ["/default/clicks", "/default/orders", "/default/orders-dlq"]
    assert complete("danube admin subscriptions lag /default/orders b", **here) == ["billing"]
    assert complete("danube admin namespaces topics d", **here) == ["default"]
    assert len(complete("danube admin brokers unload ", **here)) == 1


def test_without_a_broker_nothing_is_offered_and_nothing_is_said() -> None:
    assert complete("danube admin topics describe /", DANUBE_ADMIN_ENDPOINT="http://127.0.0.1:1") == []
