"""Topics that move and brokers that die, in one process on a virtual clock."""

from __future__ import annotations

import asyncio

from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.names import ProducerId, SubscriptionName, TopicName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.formats.batch import encode, rows_of
from pydanube.testing.cluster import TTL, Cluster
from tests.harness.brokers import consume, message, numbers, simulated

RESCUED = {"x-danube-rescued": "true"}


async def send(cluster: Cluster, topic: TopicName, *texts: str) -> list[int]:
    offsets = []
    for text in texts:

        async def one(found, text=text):  # type: ignore[no-untyped-def]
            producer = await found.add_producer("producer")
            return await found.publish(producer, message(text))

        offsets.append(await cluster.publish(topic, one))
    return offsets


@simulated
async def test_a_topic_moves_with_its_offsets_its_cursor_and_every_message() -> None:
    """Seed 000: 22 messages, cursor 13, then six more on the new broker."""
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/reliable_topic", on=1)
    orders = await cluster.served(topic)
    stream = await consume(orders, "subs_reliable", Kind.EXCLUSIVE)
    assert await send(cluster, topic, *numbers(22)) == list(range(22))
    await asyncio.sleep(0.1)
    stream.ack(*range(14))
    await cluster.unload(topic)
    sealed = await cluster.value(keys.seal(topic))
    assert sealed["sealed"] is True and sealed["last_committed_offset"] == 21
    assert await cluster.value(keys.cursor(topic, SubscriptionName("subs_reliable"))) == 13
    await asyncio.sleep(0.1)
    assert await cluster.node(1).disk.list("wal/default/reliable_topic") == []
    assert stream.over
    moved = await cluster.served(topic)
    assert cluster.host(topic) is not cluster.node(1)
    assert await send(cluster, topic, *numbers(6, 22)) == list(range(22, 28))
    again = await consume(moved, "subs_reliable", Kind.EXCLUSIVE, acks=True)
    await asyncio.sleep(7)
    assert again.offsets == list(range(14, 28)) and again.texts == numbers(14, 14)
    assert await cluster.descriptors(topic) == [(0, 21), (22, 27)]
    assert await cluster.value(keys.cursor(topic, SubscriptionName("subs_reliable"))) == 27


@simulated
async def test_a_topic_of_a_killed_broker_is_served_by_another_behind_what_may_have_been_given_out() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    orders = await cluster.served(topic)
    await consume(orders, "sub", Kind.SHARED)
    assert await send(cluster, topic, "a", "b") == [0, 1]
    cluster.node(1).kill()
    took = await cluster.until(lambda: cluster.host(topic) is not None)
    assert took <= TTL + 1
    after = await send(cluster, topic, "c")
    assert after[0] >= 64
    stream = await consume(await cluster.served(topic), "sub", Kind.SHARED, acks=True)
    await asyncio.sleep(3)
    assert stream.texts == ["c"]
    assert len(await cluster.metadata.list(keys.orphans(topic))) == 1
    await cluster.node(1).boot()
    await asyncio.sleep(20)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    assert stream.texts == ["c", "a", "b"], "late, not lost"
    assert stream.offsets == [after[0], 0, 1]
    assert [each.delivered.message.attributes for each in stream.arrivals] == [{}, RESCUED, RESCUED]
    assert not stream.subscription.has_lag()
    await asyncio.sleep(10)
    assert await cluster.value(keys.cursor(topic, SubscriptionName("sub"))) == after[0]
    assert await cluster.node(1).disk.list("wal/default/orders") == []


async def native(
    cluster: Cluster, topic: TopicName, session: int, sequence: int, *texts: str, producer: int = 7
) -> int:
    """One batch of an idempotent producer; its first offset."""

    async def submit(found: Topic) -> int:
        rows = rows_of([message(text) for text in texts])
        batch = encode(rows, topic=topic, producer_id=producer, session=session, first_sequence=sequence)
        return (await found.submit_batch(batch)).offset

    return await cluster.publish(topic, submit)


@simulated
async def test_what_a_producer_resent_before_its_broker_came_back_is_not_there_twice() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await consume(await cluster.served(topic), "sub", Kind.EXCLUSIVE)
    session = await cluster.publish(topic, lambda found: found.open_session(ProducerId(7)))
    assert await native(cluster, topic, session, 0, "a", "b") == 0
    assert await native(cluster, topic, session, 2, "c") == 2
    cluster.node(1).kill()  # the producer did not hear of c, say
    again = await native(cluster, topic, session, 2, "c")
    assert again >= 64
    await native(cluster, topic, session, 3, "d")
    await cluster.node(1).boot()
    stream = await consume(await cluster.served(topic), "sub", Kind.EXCLUSIVE, acks=True)
    await asyncio.sleep(20)
    assert sorted(stream.texts) == ["a", "b", "c", "d"] and sorted(stream.offsets) == [0, 1, again, again + 1]
    assert await native(cluster, topic, session, 2, "c") == again, "a resend is still known"


@simulated
async def test_an_idle_topic_leaves_no_orphan() -> None:
    cluster = await Cluster().start(3)
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, "a", "b")
    await asyncio.sleep(60)
    cluster.node(1).kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    assert await send(cluster, topic, "c") == [2]
