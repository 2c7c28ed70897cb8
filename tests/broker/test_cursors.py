"""Cursors: written seldom, lost never further back than the last write, and never ahead of what was acknowledged."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pydanube.broker.cursors import PER_TRANSACTION
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.names import SubscriptionName
from pydanube.core.policies import SubscriptionKind as Kind
from tests.harness.brokers import (
    SUB,
    BrokerFixture,
    Stream,
    consume,
    find_topic,
    make_topic,
    numbers,
    one_topic,
    publish,
    publish_many,
    settle,
    simulated,
)

CURSOR = "/topics/default/orders/subscriptions/sub/cursor"
HOLES = "/topics/default/orders/subscriptions/sub/ack_holes"


async def stored(host: BrokerFixture) -> int:
    value = await host.metadata.value(CURSOR)
    assert value is not None
    return int(value)


async def come_back(host: BrokerFixture) -> tuple[Topic, Stream]:
    """The broker is killed and started again; the same consumer opens its stream."""
    host.kill()
    topic = await find_topic(await host.boot())
    stream = await consume(topic)
    await settle()
    return topic, stream


# --- when they are written ------------------------------------------------------------------------------------


@simulated
async def test_the_place_of_a_new_subscription_is_written_before_subscribe_returns() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await publish_many(topic, 3)
    await consume(topic)
    assert await stored(host) == 2


@simulated
async def test_a_cursor_is_written_when_its_oldest_ack_is_5_seconds_old() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stream = await consume(topic, acks=True)
    await publish(topic, "a")
    await asyncio.sleep(3.5)
    assert await stored(host) == -1
    await asyncio.sleep(1.5)
    assert await stored(host) == 0
    assert stream.texts == ["a"]


@simulated
async def test_a_cursor_is_written_after_a_thousand_acks_but_at_most_once_a_second() -> None:
    host = BrokerFixture(unacked_max=1000)
    _, topic = await one_topic(host)
    await consume(topic, acks=True)
    before = host.metadata.writes_of("/cursor")
    for _ in range(30):  # three thousand acks a second for three seconds
        await publish_many(topic, 300, at_once=300)
        await asyncio.sleep(0.1)
    await settle()
    writes = host.metadata.writes_of("/cursor") - before
    assert 2 <= writes <= 3
    assert await stored(host) >= 5_000


@simulated
async def test_a_trickle_of_acks_is_written_every_few_seconds() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await consume(topic, acks=True)
    before = host.metadata.writes_of("/cursor")
    for number in range(200):
        await publish(topic, str(number))
        await asyncio.sleep(0.1)
    assert 3 <= host.metadata.writes_of("/cursor") - before <= 6
    assert await stored(host) >= 150


@simulated
async def test_a_cursor_is_written_when_a_consumer_leaves() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stream = await consume(topic, acks=True)
    await publish_many(topic, 7)
    await settle()
    stream.leave()
    await settle()
    assert await stored(host) == 6


@simulated
async def test_a_cursor_is_written_when_the_broker_stops() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    stream = await consume(topic)
    await publish_many(topic, 7)
    await settle()
    stream.ack(0, 1, 2, 4)
    await broker.stop()
    assert await stored(host) == 2
    assert await host.metadata.value(HOLES)


@simulated
async def test_many_subscriptions_share_one_transaction() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    streams = [await consume(topic, f"s{number}", acks=True) for number in range(120)]
    others = [await make_topic(broker, f"/default/t{number}") for number in range(60)]
    streams += [await consume(other, acks=True) for other in others]
    before = host.metadata.writes_of("/cursor")
    await publish(topic, "a")
    for other in others:
        await publish(other, "a")
    await asyncio.sleep(10)
    assert all(stream.texts == ["a"] for stream in streams)
    assert host.metadata.writes_of("/cursor") - before == 3, "180 cursors, 60 in a transaction"


@simulated
async def test_an_idle_broker_writes_nothing() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await consume(topic, acks=True)
    await publish(topic, "a")
    await asyncio.sleep(60)  # the cursor is saved, and the reservation is given back
    before = len(host.metadata.written)
    await asyncio.sleep(1000)
    assert len(host.metadata.written) == before


@simulated
async def test_a_store_that_is_away_for_a_while_costs_nothing_but_time() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stream = await consume(topic, acks=True)
    await publish(topic, "a")
    await settle()
    host.metadata.away = True
    await asyncio.sleep(20)
    assert await stored(host) == -1
    host.metadata.away = False
    await asyncio.sleep(6)
    assert await stored(host) == 0
    assert stream.texts == ["a"]


# --- what a crash repeats -------------------------------------------------------------------------------------


@simulated
async def test_kill_9_after_999_acks_repeats_at_most_those_and_skips_nothing() -> None:
    host = BrokerFixture(unacked_max=1000)
    _, topic = await one_topic(host)
    stream = await consume(topic, acks=True)
    await publish_many(topic, 999, at_once=999)
    await settle()
    assert len(stream.texts) == 999
    topic, again = await come_back(host)
    again.ack_all()
    await publish(topic, "new")
    await settle()
    repeated = again.offsets[:-1]
    assert repeated == list(range(repeated[0] if repeated else 999, 999)), "an unbroken end of what was acknowledged"
    assert again.texts[-1] == "new"


@simulated
async def test_kill_9_six_seconds_after_the_last_of_999_acks_repeats_nothing() -> None:
    host = BrokerFixture(unacked_max=1000)
    _, topic = await one_topic(host)
    await consume(topic, acks=True)
    await publish_many(topic, 999, at_once=999)
    await asyncio.sleep(6)
    topic, again = await come_back(host)
    assert again.texts == []
    await publish(topic, "new")
    await settle()
    assert (again.texts, again.offsets) == (["new"], [999])


@pytest.mark.parametrize("seconds", [0.0, 0.9, 2.2, 4.9])
@simulated
async def test_a_crash_repeats_at_most_what_was_acknowledged_since_the_last_write(seconds: float) -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await consume(topic, acks=True)
    for number in range(100):
        await publish(topic, str(number))
        await asyncio.sleep(0.1)
    await asyncio.sleep(seconds)
    cursor = await stored(host)
    assert cursor >= 50 - 1, "never older than 5 s"
    _, again = await come_back(host)
    again.acks = True
    again.ack_all()
    await settle()
    assert again.offsets == list(range(cursor + 1, 100))


@simulated
async def test_acks_out_of_order_survive_a_crash_six_seconds_later() -> None:
    """The cursor cannot move past 0, but what was acknowledged above it is known."""
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stream = await consume(topic)
    await publish_many(topic, 10)
    await settle()
    stream.ack(1, 2, 3, 7, 9)
    await asyncio.sleep(6)
    _, again = await come_back(host)
    assert again.offsets == [0, 4, 5, 6, 8]
    again.ack_all()
    assert not again.subscription.has_lag()


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_a_subscription_that_never_acknowledged_anything_survives_at_its_place(kind: Kind) -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await publish_many(topic, 5)
    stream = await consume(topic, kind=kind)
    host.kill()
    topic = await find_topic(await host.boot())
    await publish_many(topic, 3)
    host.kill()
    topic = await find_topic(await host.boot())
    assert topic.require(SUB).kind is kind
    again = Stream(topic, topic.require(SUB), stream.consumer, acks=True)
    await settle()
    assert again.offsets == [5, 6, 7]


@simulated
async def test_a_subscription_made_before_anything_was_published_gets_the_first_message_after_a_crash() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await consume(topic)
    await publish(topic, "first")
    _, again = await come_back(host)
    assert again.texts == ["first"]


@simulated
async def test_what_a_policy_dropped_is_not_delivered_again_after_an_orderly_restart() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stream = await consume(topic)
    await publish_many(topic, 3)
    await settle()
    stream.ack_all()
    topic = await find_topic(await host.restart())
    again = await consume(topic)
    await settle()
    assert again.texts == []


@simulated
async def test_a_seek_is_stored_as_well() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stream = await consume(topic, acks=True)
    await publish_many(topic, 5)
    await asyncio.sleep(6)
    assert await stored(host) == 4
    stream.acks = False
    stream.subscription.seek(2)
    await asyncio.sleep(6)
    assert await stored(host) == 1
    _, again = await come_back(host)
    assert again.texts == numbers(3, first=2)


@simulated
async def test_a_subscription_that_was_removed_writes_no_cursor_any_more() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stream = await consume(topic, acks=True)
    await publish(topic, "a")
    await settle()
    stream.leave()
    await topic.unsubscribe(SubscriptionName(SUB))
    await asyncio.sleep(10)
    assert await host.metadata.value(CURSOR) is None


@simulated
async def test_a_removed_subscription_does_not_move_the_cursor_of_the_next_of_its_name() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    streams = [await consume(topic, f"s{number:03}", acks=True) for number in range(PER_TRANSACTION + 1)]
    await publish_many(topic, 3)
    await settle()
    name = SubscriptionName(f"s{PER_TRANSACTION:03}")
    last = keys.cursor(topic.name, name)
    gates = [asyncio.Event(), asyncio.Event()]
    transact, seen = host.metadata.transact, 0

    async def slow(compares: Any, operations: Any) -> Any:
        nonlocal seen
        cursors = [each.key for each in operations if each.key.endswith("/cursor")]
        if len(cursors) == PER_TRANSACTION:
            await gates[0].wait()
        if last in cursors and not any(each.key == keys.subscription(topic.name, name) for each in operations):
            seen += 1
            if seen == 2:  # the first is that of `unsubscribe`
                await gates[1].wait()
        return await transact(compares, operations)

    host.metadata.transact = slow  # type: ignore[method-assign]
    await asyncio.sleep(4.5)  # all but one are on their way, and that one is in the second group
    streams[-1].leave()
    broker.cursors._leaving.clear()
    removing = asyncio.create_task(topic.unsubscribe(name))
    await settle()
    gates[0].set()
    await settle()
    await removing
    again = await consume(topic, name, start=0)
    await settle()
    assert again.texts == ["0", "1", "2"]
    gates[1].set()
    await asyncio.sleep(1)
    host.kill()
    topic = await find_topic(await host.boot())
    again = await consume(topic, name)
    await settle()
    assert again.texts == ["0", "1", "2"]
