"""A subscription is moved by a seek: what was delivered before is void, whoever acknowledges it, and wherever."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from pydanube.core import keys
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.names import SubscriptionName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import AckOutdated, NotServed, OffsetOutOfRange, OwnershipLost
from pydanube.ports import Put
from pydanube.wire._pb.pydanube import admin_pb2 as ours_pb
from tests.harness.brokers import (
    ORDERS,
    SUB,
    BrokerFixture,
    consume,
    find_topic,
    now,
    numbers,
    one_topic,
    publish_many,
    settle,
    simulated,
)
from tests.harness.servers import TOPIC, Calls, refused, served

NAME = SubscriptionName(SUB)


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_acks_of_what_was_delivered_before_a_seek_do_not_hide_it(kind: Kind) -> None:
    _, topic = await one_topic(BrokerFixture(unacked_max=3))
    await publish_many(topic, 10)
    stream = await consume(topic, SUB, kind, start=0)
    await settle()
    assert stream.offsets[0] == 0
    stream.leave()
    subscription = stream.subscription
    await subscription.move_to(0)
    with pytest.raises(AckOutdated):  # with the number of its deliveries
        subscription.ack_ranges((OffsetRange(0, 1),), seeks=0)
    with pytest.raises(OffsetOutOfRange):
        subscription.ack_ranges((OffsetRange(10, 11),), seeks=1)
    again = await consume(topic, SUB, kind, consumer="another", acks=True)
    await settle()
    assert again.texts == numbers(10)
    assert subscription.get_lag_info().lag_messages == 0


@simulated
async def test_an_ack_without_the_number_counts_for_what_was_delivered_since() -> None:
    _, topic = await one_topic(BrokerFixture(unacked_max=3))
    await publish_many(topic, 10)
    stream = await consume(topic, SUB, start=0)
    await settle()
    stream.leave()
    await stream.subscription.move_to(0)
    with pytest.raises(AckOutdated, match=f"offset 1 of {ORDERS} was delivered before subscription {SUB} was moved"):
        stream.ack(1)
    again = await consume(topic, SUB, consumer="another")
    await settle()
    again.ack(0, 1)
    await settle()
    assert again.offsets == [0, 1, 2, 3, 4] and stream.subscription.get_lag_info().lag_messages == 8


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_an_ack_from_before_a_seek_hides_nothing_that_waits_for_its_turn(kind: Kind) -> None:
    _, topic = await one_topic(BrokerFixture(unacked_max=1))
    stream = await consume(topic, SUB, kind, start=0)
    await publish_many(topic, 5)
    for offset in range(4):
        await settle()
        stream.ack(offset)
    await settle()
    assert stream.offsets == [0, 1, 2, 3, 4]
    await stream.subscription.move_to(0)
    await settle()
    assert stream.offsets[5:] == [0]
    with pytest.raises(AckOutdated):
        stream.ack(4)  # of the delivery before
    for offset in range(4):
        stream.ack(offset)
        await settle()
    assert stream.offsets[5:] == [0, 1, 2, 3, 4]


@simulated
async def test_the_next_owner_knows_what_was_delivered_before_a_seek() -> None:
    host = BrokerFixture(unacked_max=10)
    _, topic = await one_topic(host)
    await publish_many(topic, 5)
    stream = await consume(topic, SUB, start=0)
    await settle()
    await stream.subscription.move_to(0)
    await host.restart()
    topic = await find_topic(host.broker)
    subscription = topic.subscriptions[NAME]
    assert subscription.seeks == 1
    with pytest.raises(AckOutdated):  # unconfirmed on the old connection, sent again on the new one
        subscription.ack_ranges((OffsetRange(0, 5),), seeks=0)
    assert subscription.get_lag_info().lag_messages == 5
    subscription.ack_ranges((OffsetRange(0, 2),), seeks=1)  # delivered by the owner before, after the seek
    assert subscription.get_lag_info().lag_messages == 3


@simulated
async def test_a_seek_that_was_answered_survives_a_crash_at_once() -> None:
    host = BrokerFixture(unacked_max=10)
    _, topic = await one_topic(host)
    await publish_many(topic, 5)
    stream = await consume(topic, SUB, start=0, acks=True)
    await settle()
    at = now()
    await stream.subscription.move_to(1)
    assert now() - at < 1, "and not when the next round of cursors has come"
    host.kill()
    topic = await find_topic(await host.boot())
    again = await consume(topic, SUB)
    await settle()
    assert again.offsets == [1, 2, 3, 4]


@simulated
async def test_a_seek_is_refused_while_the_topic_leaves_and_when_it_has_left() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    await publish_many(topic, 5)
    stream = await consume(topic, SUB, start=0, acks=True)
    await settle()
    stream.subscription.pause(NotServed(topic.name, "it is about to move"))
    with pytest.raises(NotServed, match="about to move"):
        await stream.subscription.move_to(0)
    assert await host.metadata.get(keys.seeks(topic.name, NAME)) is None
    stream.subscription.resume()
    await host.metadata.transact([], [Put(keys.owner(topic.name), b"{}")])
    with pytest.raises(OwnershipLost):
        await stream.subscription.move_to(0)
    assert stream.subscription.get_lag_info().lag_messages == 0, "nothing was moved"


@served()
async def test_an_official_consumer_hears_that_its_ack_is_outdated(calls: Calls) -> None:
    producer = await calls.create_producer()
    consumer = await calls.subscribe()
    for _ in range(3):
        await calls.send(producer)
    stream = calls.receive(consumer)
    first = await stream.read()
    stream.cancel()
    place = {"topic": TOPIC, "subscription": "s"}
    await calls.ours.SeekSubscription(ours_pb.SeekSubscriptionRequest(**place, offset=0))
    code, sentence = await refused(calls.ack(first))
    assert code is StatusCode.FAILED_PRECONDITION and "was moved by a seek" in sentence
    first = await calls.receive(consumer).read()
    await calls.ack(first)
