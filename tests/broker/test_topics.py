"""Topics and namespaces: made, found by their exact names, limited, deleted; producers among them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from pydanube.broker.base_subscription import BaseSubscription
from pydanube.broker.catalog import Catalog
from pydanube.broker.registrations import PRODUCER_SILENT_SECONDS
from pydanube.core import keys
from pydanube.core.names import ConsumerId, NamespaceName, ProducerId, TopicName
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
    Unreachable,
)
from pydanube.ports import Compare, Delete, Put
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
async def test_a_name_like_a_partitions_is_none_of_a_partitioned_topic_that_has_fewer() -> None:
    """Clients of the base would send messages there, where others read them."""
    topics = (await BrokerFixture().boot()).topics
    base = TopicName("/default/foo")
    await topics.create_partitioned(base, 4, delivery=RELIABLE)
    for number in (4, 9):
        with pytest.raises(TopicExists, match="has 4 partitions"):
            await topics.make(base.partition_name(number), delivery=RELIABLE)
    assert await topics.partitions(base) == base.partition_names(4)
    await topics.delete(base)
    for name in base.partition_names(2):  # as clients that count themselves make them, one by one
        await topics.create(name, delivery=RELIABLE)
    assert await topics.partitions(base) == base.partition_names(2)
    await topics.delete(base)
    await make_topic_of(topics, base)
    with pytest.raises(TopicExists, match="without partitions"):
        await topics.make(base.partition_name(0), delivery=RELIABLE)


@simulated
async def test_a_foreign_partition_that_an_older_broker_made_is_not_sent_to_and_goes_with_the_base() -> None:
    topics = (await BrokerFixture().boot()).topics
    base = TopicName("/default/foo")
    await topics.create_partitioned(base, 2, delivery=RELIABLE)
    record = await topics._metadata.get(keys.partitioned(base))
    assert record is not None
    await topics._metadata.transact([], [Delete(record.key)])
    await topics.create(base.partition_name(7), delivery=RELIABLE)
    await topics._metadata.transact([], [Put(record.key, record.value)])
    assert await topics.partitions(base) == base.partition_names(2)
    await topics.delete(base)
    assert await topics.names(base.namespace) == [] and await topics._metadata.get(record.key) is None


@simulated
async def test_a_partitioned_topic_that_was_half_made_is_finished_by_the_same_order() -> None:
    topics = (await BrokerFixture().boot()).topics
    base = TopicName("/default/foo")
    create, made = topics.create, 0

    async def fail_at_the_third(name: TopicName, **more: Any) -> Any:
        nonlocal made
        made += 1
        if made == 3:
            raise Unreachable("the metadata store", "timed out")
        return await create(name, **more)

    topics.create = fail_at_the_third  # type: ignore[method-assign]
    with pytest.raises(Unreachable):
        await topics.create_partitioned(base, 4, delivery=RELIABLE)
    with pytest.raises(TopicExists, match="begun with 4 partitions"):
        await topics.create_partitioned(base, 5, delivery=RELIABLE)
    await topics.create_partitioned(base, 4, delivery=RELIABLE)
    assert await topics.partitions(base) == base.partition_names(4)
    with pytest.raises(TopicExists, match="already"):
        await topics.create_partitioned(base, 4, delivery=RELIABLE)


class Meanwhile:
    """A metadata store where something happens right before the first transaction that puts this key."""

    def __init__(self, topics: Catalog, key: str, happens: Callable[[], Awaitable[object]]) -> None:
        self._store = topics._metadata
        self._key = key
        self._happens: Callable[[], Awaitable[object]] | None = happens
        topics._metadata = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> int | None:
        happens = self._happens
        if happens is not None and any(each.key == self._key for each in operations):
            self._happens = None
            await happens()
        return await self._store.transact(compares, operations)


TEAM, LATE = NamespaceName("team"), TopicName("/team/late")


async def make_topic_of(topics: Catalog, name: TopicName) -> None:
    await topics.make(name, delivery=RELIABLE)


@simulated
async def test_no_topic_outlives_its_namespace_whoever_is_first() -> None:
    topics = (await BrokerFixture().boot()).topics
    await topics.create_namespace(TEAM)
    # The namespace goes between the look at it and the making.
    Meanwhile(topics, keys.topic(LATE), lambda: topics.delete_namespace(TEAM))
    with pytest.raises(NamespaceUnknown):
        await make_topic_of(topics, LATE)
    assert not await topics.exists(LATE)
    # The topic comes between the look whether there are any and the removal, early and late.
    names = topics.names
    for is_early in (True, False):
        await topics.create_namespace(TEAM)
        looks = 0

        async def look_and_be_late(
            namespace: NamespaceName | None = None, is_early: bool = is_early
        ) -> list[TopicName]:
            nonlocal looks
            looks += 1
            if looks == 1 and is_early:
                await make_topic_of(topics, LATE)
            found = await names(namespace)
            if looks == 1 and not is_early:
                await make_topic_of(topics, LATE)
            return found

        topics.names = look_and_be_late  # type: ignore[method-assign]
        with pytest.raises(NamespaceNotEmpty):
            await topics.delete_namespace(TEAM)
        topics.names = names  # type: ignore[method-assign]
        assert TEAM in await topics.namespaces() and await topics.exists(LATE)
        stored = await topics._metadata.get(keys.namespace_policy(TEAM))
        assert stored is not None and b"removing" not in stored.value, "nothing is left of the attempt"
        await topics.delete(LATE)
        await topics.delete_namespace(TEAM)


@simulated
async def test_a_removal_that_was_cut_off_leaves_a_namespace_that_can_be_used_and_removed() -> None:
    topics = (await BrokerFixture().boot()).topics
    await topics.create_namespace(TEAM)

    async def die() -> None:
        raise Unreachable("the metadata store", "timed out")

    names, topics.names = topics.names, lambda namespace=None: die()  # type: ignore[assignment, method-assign, return-value]
    with pytest.raises(Unreachable):
        await topics.delete_namespace(TEAM)
    topics.names = names  # type: ignore[method-assign]
    await topics.create(LATE, delivery=RELIABLE)
    with pytest.raises(NamespaceNotEmpty):
        await topics.delete_namespace(TEAM)
    await topics.delete(LATE)
    await topics.delete_namespace(TEAM)
    assert TEAM not in await topics.namespaces()


@simulated
async def test_limits_that_change_while_a_topic_is_made_do_not_stop_it() -> None:
    topics = (await BrokerFixture().boot()).topics
    await topics.create_namespace(TEAM)
    key = keys.namespace_policy(TEAM)

    async def change() -> None:
        await topics._metadata.transact([], [Put(key, b'{"max_producers_per_topic": 3}')])

    Meanwhile(topics, keys.topic(LATE), change)
    await make_topic_of(topics, LATE)
    assert await topics.exists(LATE)


@simulated
async def test_a_start_does_not_undo_limits_that_are_set_at_that_moment() -> None:
    topics = (await BrokerFixture().boot()).topics
    await topics.create_namespace(TEAM)
    key = keys.namespace_policy(TEAM)
    limits = b'{"max_producers_per_topic": 3, "limits_set": ["max_producers_per_topic"]}'
    Meanwhile(topics, key, lambda: topics._metadata.transact([], [Put(key, limits)]))
    await topics.bootstrap_namespaces([TEAM], TopicPolicy(max_producers_per_topic=7))
    assert (await topics.namespace_policy(TEAM)).max_producers_per_topic == 3


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


# --- ids --------------------------------------------------------------------------------------------------------


@simulated
async def test_an_id_that_nobody_has_costs_no_look_at_any_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids are guessed by whoever likes to: a thousand a second beside 100,000 subscriptions would fill a core."""
    broker = await BrokerFixture().boot()
    for number in range(20):
        topic = await make_topic(broker, f"/default/t{number}")
        await topic.add_producer("p")
        consumer = await topic.subscribe(SUB, Kind.SHARED, "c")
    looks = 0

    def knows(self: BaseSubscription, consumer: ConsumerId) -> bool:
        nonlocal looks
        looks += 1
        return consumer in self._consumers

    monkeypatch.setattr(BaseSubscription, "knows", knows)
    for bogus in range(100):
        assert broker.topics.find_consumer(ConsumerId(bogus)) is None
        assert broker.topics.find_producer(ProducerId(bogus)) is None
    assert looks == 0
    assert broker.topics.find_consumer(consumer) == (topic, topic.subscriptions[SUB]) and looks == 1


@simulated
async def test_ids_are_found_as_long_as_somebody_has_them_and_forgotten_with_them() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    topics, index = broker.topics, broker.topics.context.services.clients
    producer = await topic.add_producer("p")
    gone = await topic.subscribe(SUB, Kind.SHARED, "gone")
    stays = await topic.subscribe(SUB, Kind.SHARED, "stays")
    assert topics.find_producer(producer) is topic
    assert topics.find_consumer(gone) == topics.find_consumer(stays) == (topic, topic.subscriptions[SUB])
    topic.subscriptions[SUB].forget(gone)
    assert topics.find_consumer(gone) is None and topics.find_consumer(stays) is not None
    topic.producers.remove(producer, topic.producers.get(producer))
    assert topics.find_producer(producer) is None
    assert (len(index.consumers), len(index.producers)) == (1, 0)
    await topic.add_producer("p")
    await asyncio.sleep(PRODUCER_SILENT_SECONDS + 1)
    assert len(topic.producers) == 0 and topics.find_producer(producer) is None and len(index.producers) == 0
    # Made anew under the same names: the same ids, at another topic.
    await topics.delete(ORDERS)
    assert topics.find_consumer(stays) is None
    again = await make_topic(broker)
    assert topics.find_consumer(stays) is None
    assert await again.subscribe(SUB, Kind.SHARED, "stays") == stays
    assert topics.find_consumer(stays) == (again, again.subscriptions[SUB])
    # And after a restart, from what is stored.
    broker = await host.restart()
    reopened = await find_topic(broker)
    assert broker.topics.find_consumer(stays) == (reopened, reopened.subscriptions[SUB])
