"""What is set from the pages is what the broker goes by, and what was not named stays as it is."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from pydanube.admin import calls
from pydanube.client.client import Client
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.web.settings import default_policy
from pydanube.wire.convert import failure_policy_of
from tests.web.pages import Web, opened

TOPIC = "/default/jobs"
HERE = "/topics/default/jobs/subscriptions/work"


@pytest.fixture(scope="module")
def web() -> Iterator[Web]:
    with opened() as web:
        web.run(fill(web.client))
        yield web


async def fill(client: Client) -> None:
    await client.create_topic(TOPIC)
    await client.create_topic("/default/wide", partitions=2)
    for topic in (TOPIC, "/default/wide"):
        async with client.consumer(topic, subscription="work", start="earliest"):
            pass


def test_the_defaults_that_pages_tell_are_the_brokers() -> None:
    assert failure_policy_of(default_policy()) == FailurePolicy()


def test_a_failure_policy_is_shown_changed_and_keeps_what_was_not_named(web: Web) -> None:
    page = web.get(HERE)
    assert "No failure policy is set" in page.text and "Redeliveries at most 5" in page.text
    assert "The broker's defaults: redeliveries at most 5, acknowledge within 30.0 s" in page.text
    page = web.post(
        f"{HERE}/failure-policy",
        max_redelivery_count="2",
        poison_policy="dead_letter",
        dead_letter_topic="/default/jobs-dlq",
    )
    assert "Set. Now: redeliveries at most 2" in page.text and "Then dead letter" in page.text
    assert "Acknowledge within 30.0 s" in page.text and "No failure policy" not in page.text
    web.post(f"{HERE}/failure-policy", ack_timeout_ms="5000")
    policy = web.run(web.site.gateway.ask(calls.failure_policy(TOPIC, "work"))).failure_policy
    assert (policy.max_redelivery_count, policy.ack_timeout_ms) == (2, 5_000)
    assert policy.dead_letter_topic == "/default/jobs-dlq"


@pytest.mark.parametrize(
    ("form", "sentence"),
    [
        ({"max_redelivery_count": "many"}, "a whole number from 0"),
        ({"poison_policy": "pray"}, "one of dead_letter, block, drop"),
        ({"poison_policy": "dead_letter", "dead_letter_topic": ""}, "needs a topic"),
        ({"dead_letter_topic": TOPIC, "poison_policy": "dead_letter"}, "would come back for ever"),
        ({"base_redelivery_delay_ms": "90000"}, "at most max_redelivery_delay_ms"),
    ],
)
def test_a_failure_policy_that_makes_no_sense_is_refused_in_words(
    web: Web, form: dict[str, str], sentence: str
) -> None:
    page = web.post(f"{HERE}/failure-policy", **form)
    assert 'class="flash failed"' in page.body and sentence in page.text


def test_window_and_heartbeat_are_set(web: Web) -> None:
    assert "the broker's default" in web.get(HERE).text
    page = web.post(f"{HERE}/window", max_unacked_messages="77")
    assert "77 messages at most" in page.text and "Window 77 messages" in page.text
    for wrong in ("0", "", "1000000"):
        assert 'class="flash failed"' in web.post(f"{HERE}/window", max_unacked_messages=wrong).body
    page = web.post(f"{HERE}/heartbeat", heartbeat="low_priority")
    assert "its heartbeat is low_priority" in page.text
    assert web.run(web.site.gateway.ask(calls.explain(TOPIC, "work"))).heartbeat == "low_priority"
    assert 'class="flash failed"' in web.post(f"{HERE}/heartbeat", heartbeat="often").body
    assert "its heartbeat is normal" in web.post(f"{HERE}/heartbeat", heartbeat="").text


def test_all_partitions_are_set_together_if_that_is_asked_for(web: Web) -> None:
    here = "/topics/default/wide-part-1/subscriptions/work"
    assert "in all partitions of /default/wide" in web.get(here).text
    page = web.post(f"{here}/window", max_unacked_messages="9", all_partitions="1")
    assert "In all 2 partitions." in page.text
    for number in range(2):
        found = web.run(web.site.gateway.ask(calls.dispatch_config(f"/default/wide-part-{number}", "work")))
        assert found.dispatch_config.max_unacked_messages == 9


def test_retention_of_a_topic_and_of_a_namespace(web: Web) -> None:
    here = "/topics/default/jobs"
    assert "History is kept for ever" in web.get(here).text
    page = web.post(f"{here}/retention", minutes="120", mb="")
    assert "History is kept for 2.0 h, as the topic says" in page.text
    page = web.post(f"{here}/retention", mb="500")
    assert "History is kept for 2.0 h and up to 500 MB" in page.text
    assert "as the topic says" not in web.post(f"{here}/retention", reset="1").text
    assert "how many minutes" in web.post(f"{here}/retention", minutes="").text
    page = web.post("/namespaces/retention", name="default", minutes="60")
    assert "default: History is kept for 1.0 h, as the namespace says" in page.text
    assert "as the namespace says" in web.get(here).text
    assert 'class="flash failed"' in web.post("/namespaces/retention", name="nowhere", minutes="60").body


def test_limits_of_a_namespace_are_changed_and_the_rest_stays(web: Web) -> None:
    web.post("/namespaces/create", name="shop")
    page = web.post("/namespaces/limits", name="shop", max_producers_per_topic="3")
    assert "max producers per topic" in page.text and "→ 3" in page.text
    web.post("/namespaces/limits", name="shop", max_message_size="1000")
    assert (
        json.loads(web.run(web.site.gateway.ask(calls.namespace_policies("shop"))).policies)["max_producers_per_topic"]
        == 3
    )
    for form in ({"max_publish_rate": "many"}, {}, {"max_publish_rate": "-1"}):
        assert 'class="flash failed"' in web.post("/namespaces/limits", name="shop", **form).body
    web.post("/namespaces/limits", name="shop", reset="1")
    assert (
        json.loads(web.run(web.site.gateway.ask(calls.namespace_policies("shop"))).policies)["max_producers_per_topic"]
        == 0
    )
