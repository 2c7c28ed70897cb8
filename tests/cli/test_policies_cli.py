"""Limits and failure policies from the command line: what is given changes, and what changed is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import pydanube
from pydanube.testing.brokers import TestBroker
from tests.e2e.processes import danube_here

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

JOBS = "/default/jobs"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running, pydanube.blocking.connect(running.url) as client:
        client.create_topic(JOBS)
        yield running


def admin(broker: TestBroker, *words: object) -> Any:
    done = danube_here("admin", "--endpoint", broker.admin_url, *words)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "json" in words else done.stdout


def test_a_new_ack_timeout_leaves_the_dead_letters_alone(broker: TestBroker) -> None:
    change = ("subscriptions", "set-failure-policy", JOBS, "work")
    dead = ("--poison-policy", "dead_letter", "--dead-letter-topic", "/default/dead", "--max-redelivery-count", 2)
    assert "poison_policy: block -> dead_letter" in admin(broker, *change, *dead).splitlines()
    assert admin(broker, *change, "--ack-timeout-ms", 5000) == "ack_timeout_ms: 30000 -> 5000\n"
    assert admin(broker, *change, "--ack-timeout-ms", 5000) == "nothing changed: it was so already\n"
    policy = admin(broker, "subscriptions", "get-failure-policy", JOBS, "work", "-o", "json")
    assert policy["poison_policy"] == "dead_letter" and policy["dead_letter_topic"] == "/default/dead"
    assert (policy["max_redelivery_count"], policy["ack_timeout_ms"]) == (2, 5000)


def test_a_change_of_nothing_is_refused_with_what_could_be_changed(broker: TestBroker) -> None:
    for words in (("subscriptions", "set-failure-policy", JOBS, "work"), ("namespaces", "set-policies", "default")):
        done = danube_here("admin", "--endpoint", broker.admin_url, *words)
        assert done.returncode == 2 and "say " in done.stderr


def test_the_reference_spelling_sets_the_whole_policy(broker: TestBroker) -> None:
    admin(broker, "subscriptions", "set-failure-policy", JOBS, "old", "--dead-letter-topic", "/default/dead")
    numbers = ("--max-redelivery-count", 1, "--ack-timeout-ms", 9, "--base-redelivery-delay-ms", 1)
    rest = ("--max-redelivery-delay-ms", 2, "--poison-policy", "drop")
    admin(broker, "topics", "set-failure-policy", JOBS, "-s", "old", *numbers, *rest)
    policy = admin(broker, "subscriptions", "get-failure-policy", JOBS, "old", "-o", "json")
    assert policy["dead_letter_topic"] is None and policy["backoff_strategy"] == "fixed"


def test_limits_of_a_namespace_are_set_shown_and_given_back(broker: TestBroker) -> None:
    admin(broker, "namespaces", "create", "team")
    change = ("namespaces", "set-policies", "team")
    said = admin(broker, *change, "--max-publish-rate", 50, "--max-message-size", 1000)
    assert said == "max_publish_rate: 0 -> 50\nmax_message_size: 0 -> 1000\n"
    assert admin(broker, "namespaces", "policies", "team", "-o", "json")["max_publish_rate"] == 50
    told = admin(broker, *change, "--reset", "max_publish_rate", "-o", "json")
    assert told["changed"] == {"max_publish_rate": {"before": "50", "after": "0"}}
    assert told["set_by_operator"] == ["max_message_size"]
