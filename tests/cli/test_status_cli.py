"""`danube admin status`, `connections`, `events`, `subscriptions list`: what an operator types, and what is printed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import pydanube
from pydanube.cli.exits import Exit
from pydanube.testing.brokers import TestBroker
from tests.e2e.processes import danube_here

pytestmark = pytest.mark.slow  # every command is a program that starts

TOPIC = "/default/orders"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running, pydanube.blocking.connect(running.url) as client:
        client.create_topic(TOPIC)
        with (
            client.consumer(TOPIC, subscription="billing", name="worker"),
            client.producer(TOPIC, name="shop") as shop,
        ):
            shop.send(b"x")
            yield running


def asked(broker: TestBroker, *words: str) -> Any:
    done = danube_here("admin", "--endpoint", broker.admin_url, *words, "--output", "json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


def printed(broker: TestBroker, *words: str) -> str:
    done = danube_here("admin", "--endpoint", broker.admin_url, *words)
    assert done.returncode == 0, done
    return done.stdout


def test_a_healthy_broker_says_so_and_what_is_not_known_is_null(broker: TestBroker) -> None:
    found = asked(broker, "status")
    assert found["conditions"] == [] and found["brokers_alive"] == found["brokers_known"] == 1
    [each] = found["brokers"]
    assert each["life"] == "answers" and each["version"] and each["reason"] is None
    assert printed(broker, "status").startswith("All is well.")


def test_who_is_connected_is_listed(broker: TestBroker) -> None:
    found = asked(broker, "connections", "--topic", TOPIC)
    assert {(each["kind"], each["name"], each["subscription"]) for each in found["connections"]} == {
        ("producer", "shop", None),
        ("consumer", "worker", "billing"),
    }
    assert all(each["protocol"] == "native" and each["since"] and each["address"] for each in found["connections"])
    assert found["unknown"] == [] and found["left_out"] == 0
    assert "worker" in printed(broker, "connections")


def test_all_subscriptions_are_listed_with_their_lag(broker: TestBroker) -> None:
    [each] = asked(broker, "subscriptions", "list")["subscriptions"]
    assert (each["topic"], each["subscription"], each["lag_messages"]) == (TOPIC, "billing", 1)
    assert asked(broker, "subscriptions", "list", "--namespace", "system")["subscriptions"] == []
    assert "billing" in printed(broker, "subscriptions", "list")
    lag = asked(broker, "subscriptions", "lag", TOPIC, "billing")
    assert lag["lag_seconds"] > 0 and lag["course"]


def test_a_partitioned_topic_is_one_line_unless_its_partitions_are_asked_for(broker: TestBroker) -> None:
    clicks = "/default/clicks"
    with (
        pydanube.blocking.connect(broker.url) as client,
        client.producer(clicks, name="clicker", partitions=3) as clicker,
        client.consumer(clicks, subscription="audit", name="auditor", start="earliest"),
    ):
        for number in range(9):
            clicker.send(b"x", key=str(number))
        for words in (("subscriptions", "list"), ("connections",)):
            words = (*words, "--topic", clicks)
            header, *lines = printed(broker, *words).splitlines()
            assert header.split()[-1] == "partitions"
            assert [line.split()[0] for line in lines] == [clicks] * (1 if words[0] == "subscriptions" else 2)
            assert all(line.split()[-1] == "3" for line in lines)
            _, *lines = printed(broker, *words, "--partitions").splitlines()
            every = [f"{clicks}-part-{number}" for number in range(3)]
            assert {line.split()[0] for line in lines} == set(every)
            found = asked(broker, *words)
            assert {each["topic"] for each in found[words[0]]} == set(every)
            assert found["unserved"] == 0
        [line] = printed(broker, "subscriptions", "list", "--topic", clicks).splitlines()[1:]
        assert line.split()[1:4] == ["audit", "shared", "9"]
        done = danube_here("admin", "--endpoint", broker.admin_url, "connections", "--count", "1")
        assert len(done.stdout.splitlines()) == 2 and "3 more" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "connections --topic /default/none",
        "subscriptions list --topic /default/none",
        "subscriptions list --namespace none -o json",
    ],
)
def test_a_name_that_does_not_exist_is_a_sentence_and_no_empty_table(broker: TestBroker, words: str) -> None:
    done = danube_here("admin", "--endpoint", broker.admin_url, *words.split())
    assert done.returncode == Exit.NOT_FOUND and done.stdout == "" and "none" in done.stderr


@pytest.mark.parametrize(
    "words",
    [
        "topics subscriptions /default/none",
        "topics set-heartbeat /default/none off",
        "namespaces topics none",
        "subscriptions get-failure-policy /default/none s",
        "subscriptions get-dispatch-config /default/none s",
        "subscriptions set-dispatch-config /default/none s --max-unacked-messages 5",
        "subscriptions set-failure-policy /default/none s --ack-timeout-ms 5",
    ],
)
def test_nothing_is_said_of_what_does_not_exist(broker: TestBroker, words: str) -> None:
    done = danube_here("admin", "--endpoint", broker.admin_url, *words.split())
    assert done.returncode == Exit.NOT_FOUND and done.stdout == "" and "none" in done.stderr


def test_an_order_is_an_event(broker: TestBroker) -> None:
    printed(broker, "namespaces", "create", "made")
    text = printed(broker, "events")
    for _ in range(20):  # it is written behind the answer
        if "CreateNamespace name=made" in text:
            break
        text = printed(broker, "events")
    assert "CreateNamespace name=made" in text and "127.0.0.1:" in text


def test_forgetting_needs_a_broker_that_is_gone(broker: TestBroker) -> None:
    done = danube_here("admin", "--endpoint", broker.admin_url, "brokers", "forget", "17")
    assert done.returncode != 0 and "standalone" in done.stderr
