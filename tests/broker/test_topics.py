"""Topics and namespaces: made, found by their exact names, limited, deleted; producers among them."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.broker.registrations import PRODUCER_SILENT_SECONDS
from pydanube.core.names import NamespaceName, ProducerId, TopicName
from pydanube.core.policies import Delivery, TopicPolicy
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import (
    ConfigError,
    InvalidName,
    LimitReached,
    MessageTooLarge,
    NamespaceExists,
    NamespaceNotEmpty,
    NamespaceUnknown,
    NotServed,
    ProducerExists,
    ProducerUnknown,
    RateLimited,
    TopicExists,
    TopicUnknown,
)
from tests.harness.brokers import (
    ORDERS,
    SUB,
    BrokerFixture,
    consume,
    find_topic,
    make_topic,
    message,
    one_topic,
    publish,
    settle,
    simulated,
)

RELIABLE = Delivery.RELIABLE


# --- names (defect A16) -----------------------------------------------------------------------------------------


@simulated
async def test_names_match_exactly() -> None:
    broker = await BrokerFixture().boot()
    topics = broker.topics
    await make_topic(broker, "/default/foobar")
    assert await topics.partitions(TopicName("/default/foo")) == []
    assert not await topics.exists(TopicName("/default/foo"))
    with pytest.raises(TopicUnknown):
        await topics.require(TopicName("/default/foo"))
    await make_topic(broker, "/default/foo")
    assert await topics.partitions(TopicName("/default/foo")) == ["/default/foo"]
    await topics.delete(TopicName("/default/foo"))
    assert await topics.exists(TopicName("/default/foobar"))


@simulated
async def test_namespaces_whose_names_begin_alike_do_not_mix() -> None:
    broker = await BrokerFixture().boot()
    topics = broker.topics
    for name in ("team", "team-a"):
        await topics.create_namespace(NamespaceName(name))
        await make_topic(broker, f"/{name}/t")
    assert await topics.names(NamespaceName("team")) == ["/team/t"]
    with pytest.raises(NamespaceNotEmpty):
        await topics.delete_namespace(NamespaceName("team"))
    await topics.delete(TopicName("/team/t"))
    await topics.delete_namespace(NamespaceName("team"))
    assert await topics.exists(TopicName("/team-a/t"))


@simulated
async def test_partitions_are_found_in_order_and_belong_to_their_base_alone() -> None:
    broker = await BrokerFixture().boot()
    topics = broker.topics
    base = TopicName("/default/foo")
    await topics.create_partitioned(base, 12, delivery=RELIABLE)
    await make_topic(broker, "/default/foo-part-time-job")
    await make_topic(broker, "/default/foobar")
    assert await topics.partitions(base) == [f"/default/foo-part-{number}" for number in range(12)]
    with pytest.raises(TopicExists):
        await make_topic(broker, "/default/foo")
    with pytest.raises(InvalidName, match="Cannot delete individual partition"):
        await topics.delete(TopicName("/default/foo-part-3"))
    await topics.delete(base)
    assert await topics.partitions(base) == []
    assert sorted(topic.name for topic in topics.loaded) == ["/default/foo-part-time-job", "/default/foobar"]


@simulated
async def test_a_topic_is_made_once_however_many_ask_at_the_same_time() -> None:
    broker = await BrokerFixture().boot()
    results = await asyncio.gather(*(make_topic(broker) for _ in range(10)), return_exceptions=True)
    made = [each for each in results if not isinstance(each, BaseException)]
    assert len(made) == 1
    assert all(isinstance(each, TopicExists) for each in results if each is not made[0])


@simulated
async def test_a_topic_needs_its_namespace_and_namespaces_are_listed_once() -> None:
    broker = await BrokerFixture().boot()
    with pytest.raises(NamespaceUnknown):
        await make_topic(broker, "/nowhere/t")
    for number in range(3):
        await make_topic(broker, f"/default/t{number}")
    assert sorted(await broker.topics.namespaces()) == ["default", "system"]
    with pytest.raises(NamespaceExists):
        await broker.topics.create_namespace(NamespaceName("default"))


@simulated
async def test_everything_is_served_again_after_a_restart() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    for number in range(40):
        topic = await make_topic(broker, f"/default/t{number}")
        await consume(topic)
        await publish(topic, str(number))
    broker = await host.restart()
    assert len(broker.topics.loaded) == 40
    assert not broker.topics.unopened
    for number in range(40):
        topic = await find_topic(broker, f"/default/t{number}")
        ((_, row),) = await topic.peek(0, 5)
        assert row.payload == str(number).encode()
        assert topic.require(SUB).get_lag_info().lag_messages == 1


@simulated
async def test_a_broker_that_stops_refuses_new_work() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await publish(topic, "a")
    await broker.stop()
    with pytest.raises(NotServed):
        await publish(topic, "b")
    with pytest.raises(NotServed):
        await make_topic(broker, "/default/new")
    with pytest.raises(NotServed):
        await broker.topics.require(ORDERS)


@simulated
async def test_a_schema_subject_given_at_creation_is_kept() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    await broker.schemas.register("orders-value", "string", b"")
    await broker.topics.create(ORDERS, delivery=RELIABLE, schema_subject="orders-value")
    broker = await host.restart()
    assert (await find_topic(broker)).schema_subject == "orders-value"


# --- producers --------------------------------------------------------------------------------------------------


@simulated
async def test_an_exclusive_producer_has_the_topic_for_itself() -> None:
    """Defect A17."""
    _, topic = await one_topic(BrokerFixture())
    first = await topic.add_producer("first", exclusive=True)
    with pytest.raises(ProducerExists, match="first"):
        await topic.add_producer("second")
    with pytest.raises(ProducerExists):
        await topic.add_producer("second", exclusive=True)
    assert await topic.add_producer("first", exclusive=True) == first, "it may come back"
    await asyncio.sleep(PRODUCER_SILENT_SECONDS + 1)
    await topic.add_producer("second")
    with pytest.raises(ProducerExists):
        await topic.add_producer("third", exclusive=True)


@simulated
async def test_a_producer_that_is_heard_of_keeps_its_place() -> None:
    _, topic = await one_topic(BrokerFixture())
    first = await topic.add_producer("first", exclusive=True)
    for turn in range(10):
        await asyncio.sleep(PRODUCER_SILENT_SECONDS - 5)
        if turn % 2:
            assert topic.touch_producer(first)
        else:
            await topic.publish(first, message("x", producer="first"))
        with pytest.raises(ProducerExists):
            await topic.add_producer("second")


@simulated
async def test_the_limit_of_producers_counts_only_the_living() -> None:
    """Defect A2."""
    _, topic = await one_topic(BrokerFixture(policies=TopicPolicy(max_producers_per_topic=2)))
    await topic.add_producer("a")
    await topic.add_producer("b")
    await topic.add_producer("a")
    with pytest.raises(LimitReached):
        await topic.add_producer("c")
    await asyncio.sleep(PRODUCER_SILENT_SECONDS + 1)
    await topic.add_producer("c")


@simulated
async def test_a_producer_may_go_on_after_a_restart_with_its_old_id_and_nobody_elses() -> None:
    """Defect A4."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    identity = await topic.add_producer("producer")
    await topic.publish(identity, message("a"))
    host.kill()
    topic = await find_topic(await host.boot())
    assert await topic.publish(identity, message("b")) == 1
    with pytest.raises(ProducerUnknown):
        await topic.publish(ProducerId(12345), message("c"))


@simulated
async def test_a_publish_rate_is_enforced_and_refills() -> None:
    _, topic = await one_topic(BrokerFixture(policies=TopicPolicy(max_publish_rate=5)))
    producer = await topic.add_producer("producer")
    for _ in range(5):
        await topic.publish(producer, message("x"))
    with pytest.raises(RateLimited):
        await topic.publish(producer, message("x"))
    await asyncio.sleep(1)
    await topic.publish(producer, message("x"))


@simulated
async def test_a_message_larger_than_allowed_is_refused_and_the_next_is_not() -> None:
    _, topic = await one_topic(BrokerFixture(policies=TopicPolicy(max_message_size=100)))
    with pytest.raises(MessageTooLarge):
        await publish(topic, "x" * 101)
    assert await publish(topic, "x" * 100) == [0]


@simulated
async def test_the_limit_of_subscriptions_counts_those_that_exist() -> None:
    _, topic = await one_topic(BrokerFixture(policies=TopicPolicy(max_subscriptions_per_topic=1)))
    stream = await consume(topic, "a")
    with pytest.raises(LimitReached):
        await consume(topic, "b")
    stream.leave()
    await consume(topic, "a")
    (await consume(topic, "a")).leave()
    await topic.unsubscribe(stream.subscription.name)
    await consume(topic, "b")


@pytest.mark.parametrize("unacked_max", [0, -1, 10_001])
@simulated
async def test_an_absurd_window_is_refused_and_nothing_is_stored(unacked_max: int) -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await topic.subscribe(SUB, Kind.SHARED, "c")
    before = len(host.metadata.written)
    with pytest.raises(ConfigError):
        await broker.topics.set_dispatch_config(ORDERS, SUB, unacked_max=unacked_max)
    assert len(host.metadata.written) == before


# --- deleting ---------------------------------------------------------------------------------------------------


@simulated
async def test_deleting_a_topic_ends_its_streams_and_refuses_its_producers() -> None:
    broker, topic = await one_topic(BrokerFixture())
    stream = await consume(topic)
    producer = await topic.add_producer("producer")
    await publish(topic, "a")
    await broker.topics.delete(ORDERS)
    await settle()
    assert stream.over
    with pytest.raises(NotServed):
        await publish(topic, "b")
    with pytest.raises(TopicUnknown):
        await broker.topics.delete(ORDERS)
    assert broker.topics.find_producer(producer) is None
    assert broker.topics.find_consumer(stream.consumer) is None
