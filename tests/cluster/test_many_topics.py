"""A thousand topics change hands at once: nobody is replaced for being busy, nothing is begun twice."""

from __future__ import annotations

import asyncio
import logging

import pytest

from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import NotServed
from pydanube.ports import Delete, Event, Put
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.testing.loop import SimClock
from tests.harness.member_cluster import MemberCluster, MemberNode, simulated

MANY = 1_000


def redirected(cluster: MemberCluster) -> list[TopicName]:
    """Topics for which another target was named before anybody had claimed them."""
    found: list[TopicName] = []
    targets: dict[TopicName, BrokerId] = {}
    for topic, marker in cluster.markers:
        if marker is not None and marker.to is not None:
            if targets.get(topic, marker.to) != marker.to:
                found.append(topic)
            targets[topic] = marker.to
    return found


async def with_many(cluster: MemberCluster, node: MemberNode, count: int = MANY) -> list[TopicName]:
    """Topics that this broker is given, all at once."""
    topics = [TopicName(f"/default/t{number:04}") for number in range(count)]
    for first in range(0, count, 50):
        puts = [
            put
            for topic in topics[first : first + 50]
            for put in (Put(keys.topic(topic), b"null"), Put(keys.unassigned(topic), b"null"))
        ]
        await cluster.metadata.transact([], puts)
    await cluster.until(lambda: all(topic in node.owned for topic in topics), 30.0)
    return topics


@simulated
async def test_a_thousand_topics_of_a_dead_broker_are_taken_over_and_none_is_redirected() -> None:
    """32 claims at once, half a second each: a taker is at it for eight seconds, the last topic waits as long."""
    cluster = MemberCluster(ttl_seconds=5.0)
    [a] = await cluster.boot(1)
    topics = await with_many(cluster, a)
    b, c = await cluster.boot(2, 3)
    await asyncio.sleep(6.0)
    cluster.markers.clear()
    claims = len(cluster.claims)
    b.claim_seconds = c.claim_seconds = 0.5
    a.kill()
    await cluster.until(lambda: len(b.owned) + len(c.owned) == MANY, 5.0 + 9.0)
    assert redirected(cluster) == []
    assert len(cluster.claims) - claims == MANY
    assert abs(len(b.owned) - len(c.owned)) <= 1
    assert sorted([*b.owned, *c.owned]) == topics


@simulated
async def test_a_taker_that_stops_claiming_half_way_loses_only_what_it_has_not_claimed() -> None:
    cluster = MemberCluster(ttl_seconds=5.0)
    [a] = await cluster.boot(1)
    await with_many(cluster, a, 400)
    b, c = await cluster.boot(2, 3)
    await asyncio.sleep(6.0)
    b.claim_seconds = c.claim_seconds = 0.2
    a.kill()
    await cluster.until(lambda: len(b.owned) >= 64, 10.0)
    b.claims_fail = NotServed("", "its disk is full")
    has = dict(b.owned)
    await cluster.until(lambda: len(b.owned) + len(c.owned) == 400, 10.0)
    assert set(has) <= set(b.owned) and len(b.owned) < 130


@simulated
async def test_a_topic_that_is_claimed_is_not_claimed_again_before_the_watch_has_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The watch of the broker that claims is late by a second; it looks at its markers all the time."""
    cluster = MemberCluster()
    cluster.stores = lambda store: setattr(store, "delay_max_seconds", 0.5)
    a, b = await cluster.boot(1, 2)
    await asyncio.sleep(3.0)
    with caplog.at_level(logging.WARNING):
        topics = await cluster.create(*(f"/default/t{number}" for number in range(50)))
        await cluster.until(lambda: len(a.owned) + len(b.owned) == 50, 30.0)
        await asyncio.sleep(5.0)
    assert len(cluster.claims) == 50
    assert [record for record in caplog.records if "cannot be taken" in record.message] == []
    assert sorted([*a.owned, *b.owned]) == sorted(topics)


@simulated
async def test_what_this_process_deleted_is_not_seen_again_when_the_watch_tells_of_its_past() -> None:
    clock = SimClock()
    store = MemoryMetadataStore(clock)
    view = View(store, clock, ttl_seconds=32.0)
    after = await view.refresh()
    topic = TopicName("/default/orders")
    key = keys.unassigned(topic)
    put = await store.transact([], [Put(key, b"null")])
    assert await view.transact([], [Delete(key)]) == 2  # the watch has told of neither
    version = view.version
    told = store.watch(keys.CLUSTER, after)
    view._apply([Event(key, b"null", put or 0)])
    assert topic not in view.markers and view.version == version
    view._apply(await anext(told))
    assert topic not in view.markers
    again = await store.transact([], [Put(key, b"null")])
    view._apply([Event(key, b"null", again or 0)])
    assert view.markers[topic].revision == again, "what comes later is seen"


@simulated
async def test_a_refused_claim_reads_a_few_keys_and_not_the_whole_cluster() -> None:
    cluster = MemberCluster()
    a, b = await cluster.boot(1, 2)
    await asyncio.sleep(1.0)
    [topic] = await cluster.create_on(a, "/default/owned")
    listed = []
    real = cluster.metadata.list

    async def counted(prefix: str) -> list[object]:
        listed.append(prefix)
        return list(await real(prefix))

    cluster.metadata.list = counted  # type: ignore[assignment]
    marker = b'{"reason": "shutdown", "from_broker": 1, "ready": true, "to": 2}'
    await cluster.metadata.transact([], [Put(keys.unassigned(topic), marker)])
    await asyncio.sleep(2.0)
    assert cluster.hosts(topic) == [BrokerId(1)]
    assert b.owned == {}
    assert listed == []
