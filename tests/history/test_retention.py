"""Rules of retention take effect on topics that are open, whoever stored them; on memory ports and a virtual clock."""

from __future__ import annotations

import asyncio
import json

from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.history.tiers import GARBAGE_SECONDS, TierConfig
from pydanube.core.names import NamespaceName
from pydanube.core.policies import TopicPolicy
from pydanube.history.retention import RetentionChange, RetentionDesk, Rule
from pydanube.ports import Put
from tests.harness.brokers import ORDERS, BrokerFixture, find_topic, make_topic, one_topic, publish_many, simulated

LOOKING = TierConfig(upload_seconds=10.0, retention_check_seconds=60.0)
DEFAULT = NamespaceName("default")
HOUR = 3600.0


def desk_of(broker: Broker, configured: TopicPolicy | None = None) -> RetentionDesk:
    return RetentionDesk(broker.topics, lambda name: configured if name == DEFAULT else None)


async def with_history(host: BrokerFixture) -> tuple[Broker, Topic]:
    """Fifty messages in an object, and an hour later fifty more in another."""
    broker, orders = await one_topic(host)
    for _ in range(2):
        await publish_many(orders, 50)
        await asyncio.sleep(HOUR)
    return broker, orders


async def stored_names(host: BrokerFixture) -> list[str]:
    assert host.objects is not None
    return [info.key async for info in host.objects.list("default/orders/data-")]


@simulated
async def test_nothing_is_forgotten_without_a_rule() -> None:
    host = BrokerFixture(tier=LOOKING)
    broker, orders = await with_history(host)
    assert await desk_of(broker).of_topic(orders) == Rule(0, 0, "configuration")
    assert orders.first_offset == 0 and len(await stored_names(host)) == 2


@simulated
async def test_a_rule_of_a_topic_is_obeyed_at_its_next_look() -> None:
    host = BrokerFixture(tier=LOOKING)
    broker, orders = await with_history(host)
    desk = desk_of(broker)
    await desk.set_topic(orders, RetentionChange(minutes=90))
    due = await desk.due(orders)
    assert (due.objects, due.first_offset) == (1, 50)
    assert orders.first_offset == 0
    await asyncio.sleep(61)
    assert orders.first_offset == 50
    assert (await desk.due(orders)).objects == 0
    assert len(await stored_names(host)) == 2
    await asyncio.sleep(2 * GARBAGE_SECONDS)
    assert await stored_names(host) == ["default/orders/data-50-99-1.parquet"]


@simulated
async def test_a_rule_can_be_applied_at_once() -> None:
    host = BrokerFixture(tier=LOOKING)
    broker, orders = await with_history(host)
    desk = desk_of(broker)
    await desk.set_topic(orders, RetentionChange(minutes=90))
    assert await desk.apply(orders) == (50, 1)
    assert await desk.apply(orders) == (50, 0)


@simulated
async def test_a_rule_of_the_namespace_reaches_its_topics_but_not_one_that_says_otherwise() -> None:
    host = BrokerFixture(tier=LOOKING)
    broker, orders = await with_history(host)
    kept = await make_topic(broker, "/default/kept")
    await publish_many(kept, 50)
    desk = desk_of(broker)
    await desk.set_topic(kept, RetentionChange(minutes=0))
    await asyncio.sleep(2 * HOUR)
    await desk.set_namespace(DEFAULT, RetentionChange(minutes=30))
    await asyncio.sleep(61)
    assert orders.first_offset == 100 and kept.first_offset == 0


@simulated
async def test_a_rule_that_another_broker_stored_is_obeyed_too() -> None:
    host = BrokerFixture(tier=LOOKING)
    _, orders = await with_history(host)
    policy = TopicPolicy(retention_minutes=90, max_message_size=0)
    value = json.dumps({**policy.to_json(), "retention_set": True}).encode()
    await host.metadata.transact([], [Put(keys.namespace_policy(DEFAULT), value)])
    await asyncio.sleep(61)
    assert orders.first_offset == 50


@simulated
async def test_a_restart_brings_the_configured_limits_and_leaves_the_rule_that_was_set() -> None:
    host = BrokerFixture(tier=LOOKING, policies=TopicPolicy(retention_minutes=1, max_producers_per_topic=7))
    broker = await host.boot()
    desk = desk_of(broker, host.config.policies)
    assert await desk.of_namespace(DEFAULT) == Rule(1, 0, "configuration")
    await desk.set_namespace(DEFAULT, RetentionChange(minutes=0))
    orders = await make_topic(broker)
    await publish_many(orders, 50)
    broker = await host.restart()
    desk = desk_of(broker, host.config.policies)
    orders = await find_topic(broker)
    assert await desk.of_topic(orders) == Rule(0, 0, "namespace") and orders.policy.max_producers_per_topic == 7
    await asyncio.sleep(HOUR)
    assert orders.first_offset == 0
    await desk.set_namespace(DEFAULT, RetentionChange(reset=True))
    assert await desk.of_topic(orders) == Rule(1, 0, "configuration")
    await asyncio.sleep(61)
    assert orders.first_offset == 50


@simulated
async def test_the_rule_of_a_deleted_topic_does_not_come_back_with_its_name() -> None:
    host = BrokerFixture(tier=LOOKING)
    broker, orders = await with_history(host)
    await desk_of(broker).set_topic(orders, RetentionChange(minutes=1))
    await broker.topics.delete(ORDERS)
    again = await make_topic(broker)
    assert await desk_of(broker).of_topic(again) == Rule(0, 0, "configuration")
