"""What operators do to a cluster, in one process on a virtual clock: stopping brokers, giving up what is lost."""

from __future__ import annotations

import asyncio

from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.dispatch.delivery import FailurePolicy, PoisonPolicy
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.testing.cluster import Cluster
from tests.harness.brokers import consume, message, numbers, simulated


async def send(cluster: Cluster, topic: TopicName, *texts: str) -> list[int]:
    offsets = []
    for text in texts:

        async def one(found: Topic, text: str = text) -> int:
            return await found.publish(await found.add_producer("producer"), message(text))

        offsets.append(await cluster.publish(topic, one))
    return offsets


@simulated
async def test_a_broker_that_is_told_to_stop_hands_its_topics_over_at_once() -> None:
    cluster = await Cluster().start(3)
    topics = [await cluster.create(f"/default/t{number}", on=1) for number in range(12)]
    for topic in topics:
        assert await send(cluster, topic, "a", "b") == [0, 1]
    stopping = asyncio.ensure_future(cluster.node(1).stop())
    took = await cluster.until(lambda: all(cluster.host(topic) not in (None, cluster.node(1)) for topic in topics))
    await stopping
    assert took < 1.0
    for topic in topics:
        assert await send(cluster, topic, "c") == [2]
        assert await cluster.metadata.list(keys.orphans(topic)) == []


@simulated
async def test_topics_of_a_broker_that_takes_long_to_stop_do_not_wait_for_it() -> None:
    cluster = await Cluster().start(3)
    topics = [await cluster.create(f"/default/t{number}", on=1) for number in range(12)]
    for topic in topics:
        await send(cluster, topic, "a")
    cluster.node(1).objects.delay_max_seconds = 2.0  # sealing takes its time
    stopping = asyncio.ensure_future(cluster.node(1).stop())
    released: dict[TopicName, float] = {}
    served: dict[TopicName, float] = {}

    def look() -> bool:
        now = cluster.clock.elapsed()
        for topic in topics:
            if cluster.node(1).topic(topic) is None:
                released.setdefault(topic, now)
            if cluster.host(topic) not in (None, cluster.node(1)):
                served.setdefault(topic, now)
        return len(served) == len(topics)

    await cluster.until(look)
    await stopping
    assert max(released.values()) - min(released.values()) > 2
    assert max(served[topic] - released[topic] for topic in topics) < 0.5


@simulated
async def test_a_stopping_broker_takes_no_new_topic() -> None:
    cluster = await Cluster().start(2)
    busy = await cluster.create("/default/busy", on=1)
    await send(cluster, busy, "a")
    cluster.node(1).objects.delay_max_seconds = 2.0  # sealing takes its time
    stopping = asyncio.ensure_future(cluster.node(1).stop())
    await asyncio.sleep(0.05)
    for number in range(6):
        await cluster.create(f"/default/new{number}")
        assert cluster.host(TopicName(f"/default/new{number}")) is cluster.node(2)
    await stopping


@simulated
async def test_what_is_given_up_will_never_be_read_and_lag_goes_on_without_it() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await consume(await cluster.served(topic), "sub", Kind.SHARED)
    assert await send(cluster, topic, "a", "b") == [0, 1]
    cluster.node(1).kill()
    after = await send(cluster, topic, "c")
    owner = await cluster.served(topic)
    stream = await consume(owner, "sub", Kind.SHARED, acks=True)
    await asyncio.sleep(3)
    subscription = owner.subscriptions[SubscriptionName("sub")]
    assert stream.texts == ["c"] and "lost broker" in subscription.explain()
    [orphan] = owner.orphans
    assert (orphan.start, orphan.end) == (0, after[0])
    assert await owner.discard_orphan(1) is None
    assert await owner.discard_orphan(0) == orphan
    assert owner.orphans == [] and subscription.get_lag_info().lag_messages == 0
    assert "lost broker" not in subscription.explain()
    await asyncio.sleep(10)
    assert await cluster.value(keys.cursor(topic, SubscriptionName("sub"))) == after[0]
    # The broker that had it comes too late, and its messages do not come back.
    await cluster.node(1).boot()
    await asyncio.sleep(30)
    assert stream.texts == ["c"] and owner.orphans == []
    assert [keys.start_of(item.key) for item in await cluster.metadata.list(keys.voids(topic))] == [0]
    assert (await cluster.descriptors(topic))[0][0] == after[0]


@simulated
async def test_a_dead_letter_topic_is_made_and_may_live_on_another_broker() -> None:
    cluster = await Cluster().start(2)
    topic = await cluster.create("/default/orders", on=1)
    letters = TopicName("/default/letters")
    owner = await cluster.served(topic)
    broker = cluster.node(1).broker
    assert broker is not None
    policy = FailurePolicy(max_redelivery_count=0, poison_policy=PoisonPolicy.DEAD_LETTER, dead_letter_topic=letters)
    await broker.topics.set_failure_policy(topic, SubscriptionName("sub"), policy)
    stream = await consume(owner, "sub", Kind.SHARED)
    await send(cluster, topic, *numbers(3))
    await asyncio.sleep(0.1)
    for offset in stream.offsets:
        owner.subscriptions[SubscriptionName("sub")].nack(offset)
    await cluster.until(lambda: cluster.host(letters) is not None)
    if cluster.host(letters) is cluster.node(1):
        await cluster.unload(letters)
    await cluster.until(lambda: isinstance(found := cluster.node(2).topic(letters), Topic) and found.head == 3)
    texts = [found.payload.decode() for _, found in await (await cluster.served(letters)).rows(0, 3)]
    assert sorted(texts) == numbers(3)
