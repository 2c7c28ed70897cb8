"""Non-reliable topics: whoever is there gets it, a slow one loses its own messages, and nothing is kept."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pydanube.broker.base_subscription import ATTACH_SECONDS
from pydanube.broker.registrations import CONSUMER_SILENT_SECONDS
from pydanube.broker.topic_upkeep import REAP_SECONDS
from pydanube.broker.volatile_topic import IDLE_CHECK_SECONDS, QUEUE_MAX, UNUSED_SECONDS, VolatileTopic
from pydanube.core import keys
from pydanube.core.names import SubscriptionName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.core.policies import TopicPolicy
from pydanube.errors import LimitReached, NotServed, SubscriptionBusy, SubscriptionUnknown, Unreachable
from pydanube.testing.cluster import Cluster
from tests.harness.brokers import (
    ORDERS,
    SUB,
    BrokerFixture,
    consume,
    make_topic,
    make_volatile,
    message,
    publish,
    settle,
    simulated,
)


@simulated
async def test_every_subscription_gets_every_message_and_nothing_is_sent_twice() -> None:
    topic = await make_volatile(await BrokerFixture().boot())
    streams = [await consume(topic, f"s{number}", kind) for number, kind in enumerate(Kind)]
    assert await publish(topic, "a", "b") == [0, 0], "there are no offsets"
    await settle()
    assert [each.texts for each in streams] == [["a", "b"]] * 4
    streams[1].leave()
    back = await streams[1].come_back()
    await settle()
    assert back.texts == []


@simulated
async def test_what_nobody_hears_is_gone() -> None:
    topic = await make_volatile(await BrokerFixture().boot())
    await publish(topic, "a")
    stream = await consume(topic)
    await publish(topic, "b")
    await settle()
    assert stream.texts == ["b"]


@simulated
async def test_a_full_queue_drops_only_the_slow_consumers_messages() -> None:
    topic = await make_volatile(await BrokerFixture().boot())
    slow = await topic.subscribe(SubscriptionName("slow"), Kind.EXCLUSIVE, "slow")
    queue = topic.require(SubscriptionName("slow")).attach(slow)  # and never reads
    brisk = await consume(topic, "brisk")
    for number in range(QUEUE_MAX + 500):
        await publish(topic, str(number))
    await settle()
    assert len(brisk.texts) == QUEUE_MAX + 500
    assert len(queue) == QUEUE_MAX
    metrics = topic.require(SubscriptionName("slow")).metrics
    assert (metrics.delivered.value, metrics.dropped.value) == (QUEUE_MAX, 500)
    kept = await queue.get()
    assert kept[0].message.payload == b"0", "the oldest stay, the newest are dropped"


@simulated
async def test_a_shared_message_goes_to_the_next_consumer_if_one_is_full() -> None:
    topic = await make_volatile(await BrokerFixture().boot())
    slow = await topic.subscribe(SUB, Kind.SHARED, "slow")
    queue = topic.require(SUB).attach(slow)
    brisk = await consume(topic, consumer="brisk")
    for number in range(QUEUE_MAX * 3):
        await publish(topic, str(number))
    await settle()
    assert len(queue) == QUEUE_MAX
    assert len(brisk.texts) == QUEUE_MAX * 2
    assert brisk.subscription.metrics.dropped.value == 0


@simulated
async def test_shared_consumers_take_turns_and_exclusive_and_failover_have_one_at_a_time() -> None:
    topic = await make_volatile(await BrokerFixture().boot())
    shared = [await consume(topic, "shared", Kind.SHARED, f"c{number}") for number in range(3)]
    failover = [await consume(topic, "failover", Kind.FAILOVER, f"c{number}") for number in range(2)]
    await consume(topic, "exclusive", Kind.EXCLUSIVE, "first")
    with pytest.raises(SubscriptionBusy):
        await topic.subscribe(SubscriptionName("exclusive"), Kind.EXCLUSIVE, "second")
    await publish(topic, *map(str, range(36)))
    await settle()
    assert [len(each.texts) for each in shared] == [12, 12, 12]
    assert [len(each.texts) for each in failover] == [36, 0]
    failover[0].leave()
    await publish(topic, "x")
    await settle()
    assert failover[1].texts == ["x"]


@simulated
async def test_a_key_stays_with_one_consumer_while_consumers_stay() -> None:
    topic = await make_volatile(await BrokerFixture().boot())
    streams = [await consume(topic, kind=Kind.KEY_SHARED, consumer=f"c{number}") for number in range(3)]
    producer = await topic.add_producer("producer")
    for number in range(60):
        await topic.publish(producer, message(str(number), key=f"k{number % 6}"))
    await settle()
    owners: dict[str | None, set[Any]] = {}
    for stream in streams:
        for arrival in stream.arrivals:
            owners.setdefault(arrival.delivered.message.routing_key, set()).add(stream.consumer)
    assert len(owners) == 6
    assert all(len(each) == 1 for each in owners.values())


@simulated
async def test_a_consumer_may_change_its_key_filters_when_it_subscribes_again() -> None:
    topic = await make_volatile(await BrokerFixture().boot())
    await consume(topic, kind=Kind.KEY_SHARED, key_filters=("red",))
    stream = await consume(topic, kind=Kind.KEY_SHARED, key_filters=("blue",))
    await publish(topic, "red", key="red")
    await publish(topic, "blue", key="blue")
    await settle()
    assert stream.texts == ["blue"]


@simulated
async def test_a_consumer_that_never_opens_its_stream_is_given_up() -> None:
    topic = await make_volatile(await BrokerFixture().boot())
    identity = await topic.subscribe(SUB, Kind.EXCLUSIVE, "silent")
    assert topic.require(SUB).is_healthy(identity)
    await asyncio.sleep(ATTACH_SECONDS + 0.1)
    assert not topic.require(SUB).is_healthy(identity)
    await topic.subscribe(SUB, Kind.EXCLUSIVE, "other")


@pytest.mark.parametrize("make", [make_volatile, make_topic])
@simulated
async def test_an_exclusive_consumer_that_was_given_up_does_not_come_back_beside_another(make: Any) -> None:
    topic = await make(await BrokerFixture().boot())
    first = await topic.subscribe(SUB, Kind.EXCLUSIVE, "first")
    await asyncio.sleep(ATTACH_SECONDS + 0.1)
    await consume(topic, kind=Kind.EXCLUSIVE, consumer="second")
    with pytest.raises(SubscriptionBusy):
        topic.require(SUB).attach(first)


@simulated
async def test_a_subscription_without_consumers_is_removed_after_a_minute() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    topic = await make_volatile(broker)
    stream = await consume(topic)
    await asyncio.sleep(10 * UNUSED_SECONDS)
    assert SUB in topic.subscriptions, "it has a consumer"
    stream.leave()
    await asyncio.sleep(UNUSED_SECONDS - 1)
    assert SUB in topic.subscriptions
    await asyncio.sleep(IDLE_CHECK_SECONDS + 1)
    assert SUB not in topic.subscriptions
    assert await host.metadata.list(f"/topics{ORDERS}/subscriptions/") == []
    with pytest.raises(SubscriptionUnknown):
        await topic.unsubscribe(SUB)


@simulated
async def test_a_consumer_that_comes_back_in_time_keeps_the_subscription() -> None:
    topic = await make_volatile(await BrokerFixture().boot())
    stream = await consume(topic)
    for _ in range(5):
        stream.leave()
        await asyncio.sleep(UNUSED_SECONDS * 0.8)
        stream = await stream.come_back()
        await asyncio.sleep(1)
    assert SUB in topic.subscriptions


@simulated
async def test_registrations_survive_a_restart_and_messages_do_not() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    topic = await make_volatile(broker)
    stream = await consume(topic)
    await publish(topic, "a")
    host.kill()
    broker = await host.boot()
    found = await broker.topics.require(ORDERS)
    assert found.require(SUB).knows(stream.consumer)
    assert await host.disk.list("wal/default") == []


@simulated
async def test_limits_count_only_the_living() -> None:
    topic = await make_volatile(await BrokerFixture(policies=TopicPolicy(max_consumers_per_subscription=1)).boot())
    for number in range(3):
        (await consume(topic, consumer=f"c{number}")).leave()
    await consume(topic, consumer="a")
    for name in ("b", "c0"):
        with pytest.raises(LimitReached):
            await topic.subscribe(SUB, Kind.SHARED, name)


@simulated
async def test_streams_end_with_a_reason_when_the_broker_stops() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    topic = await make_volatile(broker)
    stream = await consume(topic)
    await broker.stop()
    await settle()
    assert stream.over and isinstance(stream.outbox.ended, NotServed)
    with pytest.raises(NotServed):
        await publish(topic, "a")


# --- as reliable topics do --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [make_volatile, make_topic])
@simulated
async def test_consumers_that_are_gone_for_good_are_forgotten_and_those_who_stay_are_not(make: Any) -> None:
    host = BrokerFixture()
    topic = await make(await host.boot())
    stays = await consume(topic, consumer="stays")
    for number in range(120):
        (await consume(topic, consumer=f"guest {number}")).leave()
    away = await consume(topic, consumer="away")
    away.leave()
    await asyncio.sleep(CONSUMER_SILENT_SECONDS - 60)
    away = await away.come_back()  # once an hour is enough
    away.leave()
    await asyncio.sleep(3 * REAP_SECONDS)
    registered = await host.metadata.list(keys.below_subscription(ORDERS, SUB))
    names = sorted(json.loads(each.value)["consumer_name"] for each in registered if keys.consumer_of(each.key))
    assert names == sorted(each.name for each in topic.require(SUB).consumers) == ["away", "stays"]
    await publish(topic, "a")
    await settle()
    assert stays.texts == ["a"]


@pytest.mark.parametrize("make", [make_volatile, make_topic])
@simulated
async def test_a_consumer_whose_stream_comes_back_while_it_is_being_forgotten_stays_registered(make: Any) -> None:
    host = BrokerFixture()
    topic = await make(await host.boot())
    await consume(topic, consumer="stays")
    away = await consume(topic, consumer="away")
    away.leave()
    await asyncio.sleep(CONSUMER_SILENT_SECONDS - 10)
    transact = host.metadata.transact

    async def slow(compares: Any, operations: Any) -> Any:
        revision = await transact(compares, operations)
        host.metadata.transact = transact  # type: ignore[method-assign]
        await away.come_back()
        return revision

    host.metadata.transact = slow  # type: ignore[method-assign]
    await asyncio.sleep(2 * REAP_SECONDS)
    assert topic.require(SUB).is_connected(away.consumer)
    assert await host.metadata.value(keys.consumer(ORDERS, SUB, away.consumer)) is not None


@pytest.mark.parametrize("make", [make_volatile, make_topic])
@simulated
async def test_a_consumer_that_could_not_be_registered_has_not_joined(make: Any) -> None:
    host = BrokerFixture()
    topic = await make(await host.boot())
    await consume(topic)
    host.metadata.away = True
    with pytest.raises(Unreachable):
        await topic.subscribe(SUB, Kind.SHARED, "late")
    assert [each.name for each in topic.require(SUB).consumers] == ["consumer"]


@simulated
async def test_a_broker_whose_lease_is_over_takes_no_messages_for_a_non_reliable_topic_either() -> None:
    cluster = await Cluster().start(2)
    name = await cluster.create("/default/orders", on=1, reliable=False)
    node = cluster.node(1)
    topic, broker = node.topic(name), node.broker
    assert isinstance(topic, VolatileTopic) and broker is not None and broker.cluster is not None
    producer = await node.call(topic.add_producer("producer"))
    stream = await consume(topic)
    assert await node.call(topic.publish(producer, message("a"))) == 0
    node.metadata.cut = True
    await cluster.until(lambda: not broker.cluster.may_serve())  # type: ignore[union-attr]
    with pytest.raises(NotServed) as refused:
        await node.call(topic.publish(producer, message("b")))
    assert refused.value.retryable
    with pytest.raises(NotServed):
        topic.publish_batch([message("b")])
    with pytest.raises(NotServed):
        await node.call(topic.add_producer("another"))
    with pytest.raises(NotServed):
        await node.call(topic.subscribe(SUB, Kind.SHARED, "another"))
    await settle()
    assert stream.texts == ["a"]
