"""`danube context`: clusters by name, which addresses a command uses, and the file that keeps them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pydanube.cli import contexts
from pydanube.cli.exits import Exit
from pydanube.testing.brokers import TestBroker
from tests.cli.test_cli_page import complete
from tests.e2e.processes import danube_here

HERE = ("--endpoint", "http://here:50051")


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "config" / "danube"
    monkeypatch.setenv("DANUBE_CONFIG_DIR", str(directory))
    return directory


def context(*words: object) -> str:
    done = danube_here("context", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(*words: object) -> Any:
    done = danube_here(*words, "context", "show", "-o", "json")
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def test_the_first_context_is_used_and_another_when_it_is_told_to() -> None:
    assert shown() == {"name": None, "endpoint": "http://127.0.0.1:50051", "service_addr": "danube://127.0.0.1:6651"}
    assert context("add", "one", *HERE) == "Context added: one, in use\n"
    assert context("add", "two", "-s", "danube+tls://two:7000") == "Context added: two\n"
    assert shown()["name"] == "one"
    assert context("use", "two") == "Context in use: two\n"
    listed = json.loads(context("list", "-o", "json"))
    assert [(each["name"], each["in_use"]) for each in listed] == [("one", False), ("two", True)]
    assert "two   *" in context("list")
    assert context("remove", "two") == "Context removed: two\n"
    assert shown()["name"] is None


def test_the_address_that_is_not_given_is_the_usual_port_of_the_same_host() -> None:
    context("add", "admin", "--endpoint", "http://[::1]:9")
    context("add", "messages", "-s", "danube://a:1,danube://b:2")
    context("add", "grpc", "-s", "http://c:6650")
    found = contexts.load().contexts
    assert found["admin"] == ("http://[::1]:9", "danube://[::1]:6651")
    assert found["messages"] == ("http://a:50051", "danube://a:1,danube://b:2")
    assert found["grpc"] == ("http://c:50051", "http://c:6650")


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("add", "new"), Exit.USAGE, "--endpoint"),
        (("add", "-bad", *HERE), Exit.USAGE, ""),
        (("add", "a/b", *HERE), Exit.USAGE, "letters, digits"),
        (("add", "new", "--endpoint", "nonsense"), Exit.USAGE, "http://host:port"),
        (("add", "new", "-s", "ftp://a:1"), Exit.USAGE, "danube://host:port"),
        (("add", "one", *HERE), Exit.REFUSED, "--replace"),
        (("use", "nobody"), Exit.NOT_FOUND, "there is no context nobody; known: one"),
        (("remove", "nobody"), Exit.NOT_FOUND, "there is no context nobody; known: one"),
        (("show", "nobody"), Exit.NOT_FOUND, "there is no context nobody; known: one"),
    ],
)
def test_mistakes_are_sentences_and_change_nothing(words: tuple[str, ...], code: Exit, said: str) -> None:
    context("add", "one", *HERE)
    before = contexts.load()
    done = danube_here("context", *words)
    assert done.returncode == code and said in done.stderr
    assert contexts.load() == before


def test_the_file_is_its_owner_s_alone_and_one_that_is_broken_is_named(config: Path) -> None:
    context("add", "one", *HERE)
    file = config / "contexts.json"
    assert (config.stat().st_mode & 0o777, file.stat().st_mode & 0o777) == (0o700, 0o600)
    assert [each.name for each in config.iterdir()] == ["contexts.json"]
    context("add", "one", "--replace", "--endpoint", "http://there:50051")
    assert contexts.load().get("one").endpoint == "http://there:50051"
    for text in ("{", "[]", '{"contexts": {"one": {}}}'):
        file.write_text(text)
        done = danube_here("admin", "brokers", "list")
        assert done.returncode == Exit.USAGE and str(file) in done.stderr and "danube context add" in done.stderr


# --- what a command uses --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running:
        yield running


@pytest.mark.slow
def test_commands_ask_the_cluster_of_their_context(broker: TestBroker) -> None:
    context("add", "mine", "--endpoint", broker.admin_url, "-s", broker.url)
    made = danube_here("produce", "-t", "/default/contexts", "-m", "x")
    assert made.returncode == 0, made.stderr
    assert "/default/contexts" in danube_here("admin", "topics", "list").stdout
    assert payload(
        danube_here("consume", "-t", "/default/contexts", "-m", "s", "--start", "earliest", "--once", "-o", "json")
    )
    top = danube_here("top", "--once", "--interval", 0.5, "-o", "json")
    assert top.returncode == 0, top.stderr
    assert complete("danube admin topics describe /default/c") == ["/default/contexts"]


def payload(done: Any) -> bool:
    return bool(json.loads(done.stdout)["payload"] == "x")


@pytest.mark.slow
def test_an_option_wins_over_the_context_that_is_typed_over_variables_over_the_context_in_use(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = "http://127.0.0.1:1"

    def asked(*before: str, options: tuple[str, ...] = ()) -> bool:
        done = danube_here(*before, "admin", *options, "brokers", "list")
        assert done.returncode in (Exit.DONE, Exit.NOT_REACHABLE), done.stderr
        return done.returncode == Exit.DONE

    context("add", "nobody", "--endpoint", nobody)
    context("add", "mine", "--endpoint", broker.admin_url)
    assert not asked() and asked("--context", "mine")
    assert asked("--context", "nobody", options=("--endpoint", broker.admin_url))
    monkeypatch.setenv("DANUBE_CONTEXT", "mine")
    assert asked() and not asked("--context", "nobody")
    monkeypatch.setenv("DANUBE_ADMIN_ENDPOINT", nobody)
    assert not asked() and asked("--context", "mine")
    monkeypatch.setenv("DANUBE_CONTEXT", "away")
    gone = danube_here("--context", "gone", "admin", "brokers", "list")
    assert gone.returncode == Exit.NOT_FOUND and "there is no context gone; known: mine, nobody" in gone.stderr


def test_the_native_address_of_an_endpoint_is_the_context_s_if_it_is_its_endpoint() -> None:
    context("add", "one", "--endpoint", "http://one:50051", "-s", "danube://messages.one:7000")
    contexts.CHOSEN.set(contexts.Chosen())
    assert contexts.native_address("http://one:50051") == "danube://messages.one:7000"
    assert contexts.native_address("http://other:50051") == "danube://other:6651"


def test_the_native_address_of_the_variables_is_that_of_their_endpoint_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DANUBE_ADMIN_ENDPOINT", "http://one:50051")
    monkeypatch.setenv("DANUBE_SERVICE_ADDR", "danube://messages.one:7000")
    assert contexts.native_address("http://one:50051") == "danube://messages.one:7000"
    assert contexts.native_address("http://other:50051") == "danube://other:6651"
