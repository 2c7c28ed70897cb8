"""Topics that wait for their own broker after a crash (`on_crash: wait`): whole brokers, on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.broker.overview import Overview, TopicStanding
from pydanube.core import keys
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import Delivery
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import MoveRefused, NotServed, Refused, TopicUnknown
from pydanube.testing.cluster import TTL, Cluster, Node
from tests.harness.brokers import consume, message, simulated

SELDOM = TierConfig(upload_seconds=3600.0)


async def send(cluster: Cluster, topic: TopicName, *texts: str) -> list[int]:
    async def one(text: str) -> int:
        async def publish(found):  # type: ignore[no-untyped-def]
            return await found.publish(await found.add_producer("producer"), message(text))

        return await cluster.publish(topic, publish)

    return [await one(text) for text in texts]


async def waiting_topic(cluster: Cluster) -> TopicName:
    topic = await cluster.create("/default/ledger", on=1)
    await set_on_crash(cluster, topic, wait=True)
    return topic


async def set_on_crash(cluster: Cluster, topic: TopicName, *, wait: bool) -> None:
    """Asked of whichever broker."""
    node = cluster.living[-1]
    assert node.broker is not None
    await node.call(node.broker.topics.set_on_crash(topic, wait=wait))


async def told(node: Node, topic: TopicName) -> TopicStanding:
    assert node.broker is not None
    return await node.call(Overview(node.broker).state(topic))


async def refusal(node: Node, topic: TopicName) -> NotServed:
    assert node.broker is not None
    with pytest.raises(NotServed) as refused:
        await node.call(node.broker.topics.require(topic))
    return refused.value


@simulated
async def test_nobody_takes_it_over_publishes_wait_and_its_own_broker_goes_on_at_the_next_offset() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await waiting_topic(cluster)
    owner = cluster.node(1).broker_id
    stream = await consume(await cluster.served(topic), "sub", Kind.EXCLUSIVE)
    assert await send(cluster, topic, "a", "b") == [0, 1]
    await asyncio.sleep(0.1)
    stream.ack(0)
    before = await cluster.owner(topic)
    cluster.node(1).kill()
    publishing = asyncio.ensure_future(send(cluster, topic, "c"))
    await asyncio.sleep(5 * TTL)
    assert cluster.host(topic) is None and not publishing.done()
    assert await cluster.owner(topic) == before, "nobody claimed it"
    sentence = f"waiting for broker {owner} to come back"
    for node in (cluster.node(2), cluster.node(3)):
        refused = await refusal(node, topic)
        assert refused.retryable and sentence in str(refused) and refused.moved_to == ""
        state = await told(node, topic)
        assert (state.state, state.sentence, state.to, state.orphans) == ("unassigned", sentence, None, [])
    await cluster.node(1).boot()
    assert await publishing == [2], "behind what its disk has, without a gap"
    state = await told(cluster.node(2), topic)
    assert (state.state, state.broker, state.orphans) == ("active", owner, [])
    again = await consume(await cluster.served(topic), "sub", Kind.EXCLUSIVE, acks=True)
    await asyncio.sleep(1)
    assert again.texts[-2:] == ["b", "c"] and again.offsets == sorted(again.offsets), "in strict order"
    assert await cluster.value(keys.cursor(topic, SubscriptionName("sub"))) in (-1, 0, 2)
    assert await cluster.value(keys.unassigned(topic)) is None


@simulated
async def test_others_of_the_same_broker_are_taken_over_as_ever() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    waiting = await waiting_topic(cluster)
    other = await cluster.create("/default/orders", on=1)
    for topic in (waiting, other):
        await send(cluster, topic, "a")
    cluster.node(1).kill()
    assert await cluster.until(lambda: cluster.host(other) is not None) <= TTL + 1
    assert cluster.host(waiting) is None


@simulated
async def test_while_nobody_knows_whether_its_broker_is_lost_it_is_said_to_wait() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await waiting_topic(cluster)
    other = await cluster.create("/default/orders", on=1)
    owner = cluster.node(1).broker_id
    for node in cluster.nodes:
        node.kill()
    await asyncio.sleep(2 * TTL)
    await cluster.node(2).boot()
    away = f"broker {owner} has it and is away; "
    assert (await told(cluster.node(2), topic)).sentence == f"{away}it waits for that broker"
    assert (await told(cluster.node(2), other)).sentence == f"{away}when its lease has run out another one takes it"


@simulated
async def test_who_will_not_wait_any_longer_has_it_taken_over() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await waiting_topic(cluster)
    await send(cluster, topic, "a")
    cluster.node(1).kill()
    await asyncio.sleep(3 * TTL)
    assert cluster.host(topic) is None
    await set_on_crash(cluster, topic, wait=False)
    assert await cluster.until(lambda: cluster.host(topic) is not None) < 2
    (after,) = await send(cluster, topic, "b")
    assert after > 0 and len((await told(cluster.node(2), topic)).orphans) == 1
    assert not (await told(cluster.node(2), topic)).waits
    await cluster.node(1).boot()
    await asyncio.sleep(20)
    assert (await told(cluster.node(2), topic)).orphans == [], "late, not lost"


@simulated
async def test_only_what_is_kept_can_wait_and_a_topic_made_again_does_not() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await waiting_topic(cluster)
    assert (await told(cluster.node(2), topic)).waits
    host = cluster.node(1)
    assert host.broker is not None
    await host.call(host.broker.topics.delete(topic))
    with pytest.raises(TopicUnknown):
        await set_on_crash(cluster, topic, wait=True)
    await cluster.create(topic)
    assert not (await told(cluster.node(2), topic)).waits
    news = await cluster.create("/default/news", reliable=False)
    with pytest.raises(Refused, match="keeps nothing"):
        await set_on_crash(cluster, news, wait=True)
    await host.call(host.broker.topics.create_partitioned(TopicName("/default/many"), 2, delivery=Delivery.RELIABLE))
    await set_on_crash(cluster, TopicName("/default/many"), wait=True)
    for part in ("/default/many-part-0", "/default/many-part-1"):
        assert (await told(cluster.node(2), TopicName(part))).waits


@simulated
async def test_it_is_not_moved_away_while_it_waits_and_moves_as_any_other_while_it_does_not() -> None:
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await waiting_topic(cluster)
    await send(cluster, topic, "a")
    cluster.node(1).kill()
    await asyncio.sleep(2 * TTL)
    with pytest.raises(MoveRefused, match="waiting for broker"):
        await cluster.unload(topic, asked=cluster.node(2))
    await cluster.node(1).boot()
    assert await send(cluster, topic, "b") == [1]
    await cluster.unload(topic, to=2, asked=cluster.node(3))
    assert await send(cluster, topic, "c") == [2]
    cluster.node(2).kill()  # and then waits for that one
    await asyncio.sleep(5 * TTL)
    assert cluster.host(topic) is None
    await cluster.node(2).boot()
    assert await send(cluster, topic, "d") == [3]
    assert (await told(cluster.node(3), topic)).orphans == []
