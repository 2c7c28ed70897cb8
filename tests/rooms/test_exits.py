"""Exit codes say what kind of failure it was, whoever noticed it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import pydanube
from pydanube import errors
from pydanube.cli import exits
from pydanube.cli.rpc import BrokerRefused
from pydanube.testing.brokers import TestBroker
from pydanube.wire.status import Code
from tests.e2e.processes import danube_here

PAGE = Path(__file__).parents[2] / "docs" / "cli.md"
ORDERS = "/default/orders"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running, pydanube.blocking.connect(running.url) as client:
        client.create_topic(ORDERS)
        yield running


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("topics", "describe", ORDERS), 0),
        (("topics", "describe", "orders"), exits.USAGE),
        (("topics", "describe"), exits.USAGE),
        (("topics", "nonsense"), exits.USAGE),
        (("topics", "describe", "/default/nowhere"), exits.NOT_FOUND),
        (("subscriptions", "lag", ORDERS, "nobody"), exits.NOT_FOUND),
        (("topics", "create", ORDERS), exits.REFUSED),
        (("namespaces", "delete", "default"), exits.REFUSED),
        (("subscriptions", "set-failure-policy", ORDERS, "s", "--poison-policy", "dead_letter"), exits.USAGE),
    ],
)
def test_a_command_ends_with_the_code_of_its_failure(broker: TestBroker, words: tuple[str, ...], code: int) -> None:
    assert danube_here("admin", "--endpoint", broker.admin_url, *words).returncode == code


def test_a_broker_that_is_not_there_is_not_reachable() -> None:
    done = danube_here("admin", "--endpoint", "http://127.0.0.1:1", "topics", "describe", ORDERS)
    assert done.returncode == exits.NOT_REACHABLE


def test_every_answer_of_a_broker_has_a_code_and_so_has_every_error() -> None:
    for code in Code:
        assert exits.exit_code(BrokerRefused(code.name, "no")) in (1, 2, 3, 4, 5)
    assert exits.exit_code(errors.Unreachable("it", "away")) == exits.NOT_REACHABLE
    assert exits.exit_code(errors.ConfigError("a", 1, "2")) == exits.USAGE
    assert exits.exit_code(errors.DirectoryInUse("data", 7)) == exits.REFUSED
    assert exits.exit_code(errors.TopicUnknown("/default/a")) == exits.NOT_FOUND


def test_the_page_has_every_code() -> None:
    listed = set(re.findall(r"^  \| (\d+) \|", PAGE.read_text(), re.MULTILINE))
    said = {value for name, value in vars(exits).items() if name.isupper() and type(value) is int}
    assert listed == {"0", *map(str, said)}
