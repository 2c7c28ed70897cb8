"""Whole brokers with very many topics, on a virtual clock: a crash, a stop, a stop that does not get through."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from pydanube.cluster import assignment_reconciler
from pydanube.core import keys
from pydanube.core.cluster.placement import Marker
from pydanube.core.names import TopicName
from pydanube.core.policies import Delivery
from pydanube.ports import Put
from pydanube.testing.cluster import Cluster, Node
from tests.harness.brokers import simulated


async def with_topics(cluster: Cluster, node: Node, count: int) -> list[TopicName]:
    """Topics that this broker has, the only one that runs."""
    topics = [TopicName(f"/default/t{number:04}") for number in range(count)]
    for first in range(0, count, 30):
        puts = [
            put
            for topic in topics[first : first + 30]
            for put in (
                Put(keys.topic(topic), b"null"),
                Put(keys.delivery(topic), b'"Reliable"'),
                Put(keys.namespace_topic(topic), b"null"),
                Put(keys.unassigned(topic), b"null"),
            )
        ]
        await cluster.metadata.transact([], puts)
    await cluster.until(lambda: len(loaded(node)) == count, 120.0)
    return topics


def loaded(node: Node) -> list[TopicName]:
    assert node.broker is not None
    return sorted(topic.name for topic in node.broker.topics.loaded)


async def join(cluster: Cluster, *numbers: int) -> list[Node]:
    for number in numbers:
        cluster.nodes.append(Node(cluster, number))
        await cluster.nodes[-1].boot()
    await asyncio.sleep(cluster.config.cluster.ttl_seconds + 1.0)
    return cluster.nodes[-len(numbers) :]


@simulated
async def test_brokers_take_very_many_topics_over_and_none_is_redirected(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A taker claims four at a time, and every way to the metadata store takes a while: the last waits for long."""
    monkeypatch.setattr(assignment_reconciler, "CLAIMS_MAX", 4)
    cluster = await Cluster(ttl_seconds=5.0).start(1)
    first = cluster.node(1)
    topics = await with_topics(cluster, first, 200)
    takers = await join(cluster, 2, 3)
    for node in takers:
        node.metadata.delay_max_seconds = 0.2
    targets: dict[TopicName, int] = {}
    redirected: list[TopicName] = []
    change = cluster.metadata._change

    def watched(operations):  # type: ignore[no-untyped-def]
        change(operations)
        for operation in operations:
            topic = keys.topic_of_unassigned(operation.key)
            marker = Marker.from_bytes(operation.value) if topic and isinstance(operation, Put) else None
            target = marker.to if marker is not None else None
            if topic is not None and target is not None and targets.setdefault(topic, target) != target:
                redirected.append(topic)

    cluster.metadata._change = watched  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        first.kill()
        took = await cluster.until(lambda: sum(len(loaded(node)) for node in takers) == 200, 60.0)
    assert took > 5.0 + 3.0, "otherwise this proves nothing"
    assert redirected == []
    assert sorted(topic for node in takers for topic in loaded(node)) == topics
    assert [record.message for record in caplog.records if "cannot be taken" in record.message] == []


@simulated
async def test_a_broker_that_makes_a_topic_and_gets_it_has_it_open_when_it_answers() -> None:
    """Its view knows of the claim before the topic is open."""
    cluster = await Cluster().start(1)
    node = cluster.node(1)
    assert node.broker is not None
    node.metadata.delay_max_seconds = 0.3
    for number in range(10):
        name = TopicName(f"/default/t{number}")
        topic = await node.call(node.broker.topics.create(name, delivery=Delivery.RELIABLE))
        assert topic is node.broker.topics.get(name)


@simulated
async def test_a_stop_seals_sixteen_topics_at_once() -> None:
    """Four hundred, each of which takes most of a second: in 30 s, of which the last is the leaving."""
    cluster = await Cluster(ttl_seconds=5.0).start(1)
    await with_topics(cluster, cluster.node(1), 400)
    [taker] = await join(cluster, 2)
    cluster.node(1).metadata.delay_max_seconds = 0.4
    began = cluster.clock.elapsed()
    await cluster.node(1).stop()
    assert cluster.clock.elapsed() - began < 30.0
    await cluster.until(lambda: len(loaded(taker)) == 400, 5.0)


@simulated
async def test_what_a_stop_could_not_hand_over_is_an_error_in_the_last_line(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster(ttl_seconds=5.0)
    cluster.config = replace(cluster.config, cluster=replace(cluster.config.cluster, shutdown_seconds=3.0))
    await cluster.start(1)
    await with_topics(cluster, cluster.node(1), 40)
    await join(cluster, 2)
    cluster.node(1).metadata.delay_max_seconds = 2.0
    with caplog.at_level(logging.INFO):
        await cluster.node(1).stop()
    ends = [record for record in caplog.records if record.message.startswith("broker stopped")]
    assert [record.levelname for record in ends] == ["ERROR"]
    assert ends[0].__dict__["topics"] > 0
    tries = [record for record in caplog.records if record.message == "topics not handed over"]
    assert len(tries) == 1, "the time for it is given once"


@simulated
async def test_a_stop_that_hands_everything_over_says_so_without_an_error(caplog: pytest.LogCaptureFixture) -> None:
    cluster = await Cluster(ttl_seconds=5.0).start(1)
    await with_topics(cluster, cluster.node(1), 5)
    await join(cluster, 2)
    with caplog.at_level(logging.INFO):
        await cluster.node(1).stop()
    assert [record.levelname for record in caplog.records if record.message == "broker stopped"] == ["INFO"]
