"""What is in memory for consumers is bounded in bytes, over all topics, and goes when nobody uses it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from pydanube.broker import outbox as outboxes
from pydanube.broker.kept import KEPT_SECONDS, KeptBytes
from pydanube.broker.outbox import Budget, DeliveredMessage, MessageOutbox
from pydanube.broker.service import Broker
from pydanube.broker.timer import Timer
from pydanube.broker.topic import Topic
from pydanube.core.names import SubscriptionName
from pydanube.core.policies import SubscriptionKind
from pydanube.formats.batch import Envelope
from pydanube.telemetry import DispatchNow
from pydanube.testing.loop import SimClock
from tests.harness.brokers import (
    KIB,
    BrokerFixture,
    consume,
    make_topic,
    make_volatile,
    message,
    publish,
    settle,
    simulated,
)

BIG = 64 * KIB


async def broker_with(**dispatch: int) -> Broker:
    host = BrokerFixture(unacked_max=1_000)
    host.config = replace(host.config, dispatch=replace(host.config.dispatch, **dispatch))
    return await host.boot()


def now(broker: Broker) -> DispatchNow:
    assert broker.telemetry.dispatch is not None
    return broker.telemetry.dispatch()


async def filled(broker: Broker, name: str, count: int = 100) -> Topic:
    topic = await make_topic(broker, name)
    for first in range(0, count, 10):
        await asyncio.gather(*(publish(topic, f"{number}".ljust(BIG)) for number in range(first, first + 10)))
    return topic


async def attached(topic: Topic, name: str = "s", consumer: str = "c") -> MessageOutbox:
    """The stream of a consumer that takes nothing by itself."""
    identity = await topic.subscribe(SubscriptionName(name), SubscriptionKind.SHARED, consumer, start=0)
    return topic.require(SubscriptionName(name)).attach(identity)


# --- outboxes ---------------------------------------------------------------------------------------


@simulated
async def test_a_consumer_with_a_wide_window_of_large_messages_holds_a_bounded_amount_and_gets_all_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outboxes, "CONSUMER_BYTES_MAX", 8 * BIG)
    broker = await broker_with()
    topic = await filled(broker, "/default/large")
    outbox = await attached(topic)
    await settle()
    assert 6 <= len(outbox) <= 9
    assert now(broker).outbox_bytes <= 9 * (BIG + KIB)
    offsets: list[int] = []
    while len(offsets) < 100:
        offsets += [each.offset for each in await outbox.get()]
        assert now(broker).outbox_bytes <= 9 * (BIG + KIB) + outboxes.CHUNK_BYTES
        await settle()
    assert offsets == list(range(100))
    outbox.end()
    assert now(broker).outbox_bytes == 0


@simulated
async def test_the_bound_is_one_for_all_topics_and_each_consumer_gets_a_message_in_any_case() -> None:
    broker = await broker_with(outbox_bytes=10 * BIG)
    topics = [await filled(broker, f"/default/t{number}", 40) for number in range(5)]
    streams = [await attached(topic, f"s{number}") for topic in topics for number in range(4)]
    await settle()
    assert all(len(stream) >= 1 for stream in streams)
    assert now(broker).outbox_bytes <= 10 * BIG + len(streams) * (BIG + KIB)
    got: dict[int, list[int]] = {place: [] for place in range(len(streams))}
    for _ in range(200):
        for place, stream in enumerate(streams):
            if len(stream):
                got[place] += [each.offset for each in await stream.get()]
        await settle()
        if all(len(offsets) == 40 for offsets in got.values()):
            break
        for place, stream in enumerate(streams):  # as a stream that has written what it took
            if not len(stream) and len(got[place]) < 40:
                waiting = asyncio.ensure_future(stream.get())
                await settle()
                assert waiting.done()
                got[place] += [each.offset for each in waiting.result()]
    assert list(got.values()) == [list(range(40))] * len(streams)
    assert now(broker).outbox_limit_bytes == 10 * BIG


@simulated
async def test_a_consumer_that_leaves_while_messages_wait_for_room_gives_them_to_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outboxes, "CONSUMER_BYTES_MAX", 2 * BIG)
    broker = await broker_with()
    topic = await filled(broker, "/default/shared", 20)
    slow = await attached(topic)
    await settle()
    subscription = topic.require(SubscriptionName("s"))
    other = await consume(topic, "s", consumer="other")
    for registration in subscription.consumers:
        if registration.name == "c":
            subscription.detach(registration.consumer_id, slow)
    await settle()
    assert sorted(other.offsets) == list(range(20))
    assert now(broker).outbox_bytes <= outboxes.CHUNK_BYTES + 2 * BIG


@simulated
async def test_a_seek_forgets_what_waits_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "CONSUMER_BYTES_MAX", 2 * BIG)
    broker = await broker_with()
    topic = await filled(broker, "/default/sought", 20)
    outbox = await attached(topic)
    await settle()
    topic.require(SubscriptionName("s")).seek(15)
    offsets: list[int] = []
    while len(offsets) < 5:
        await settle()
        offsets += [each.offset for each in await outbox.get()]
    assert offsets == list(range(15, 20))


@simulated
async def test_a_queue_of_a_non_reliable_topic_is_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outboxes, "CONSUMER_BYTES_MAX", 4 * BIG)
    broker = await broker_with()
    topic = await make_volatile(broker, "/default/fast")
    identity = await topic.subscribe(SubscriptionName("s"), SubscriptionKind.SHARED, "c")
    outbox = topic.require(SubscriptionName("s")).attach(identity)
    for _ in range(100):
        topic.publish_batch([message("x" * BIG)])
    assert 1 <= len(outbox) <= 5 and now(broker).outbox_bytes <= 5 * (BIG + KIB)
    assert topic.require(SubscriptionName("s")).metrics.dropped.value >= 95


@simulated
async def test_one_message_larger_than_every_bound_is_delivered() -> None:
    budget = Budget(10)
    outbox = MessageOutbox(budget)
    assert outbox.free_bytes > 0
    outbox.put([DeliveredMessage(0, Envelope(bytes(1000)), 1)])
    assert outbox.free_bytes == 0
    assert len(await outbox.get()) == 1
    outbox.end()
    assert budget.size_bytes == 0


# --- what is kept decoded ---------------------------------------------------------------------------


@simulated
async def test_what_is_kept_decoded_is_bounded_over_all_topics_and_goes_when_nobody_reads() -> None:
    broker = await broker_with(decoded_bytes=20 * BIG)
    for number in range(4):
        topic = await filled(broker, f"/default/t{number}", 30)
        stream = await consume(topic)
        await settle()
        assert len(stream.offsets) <= 30
        await topic.rows(0, 30)
        assert now(broker).decoded_bytes <= 20 * BIG
    assert now(broker).decoded_bytes > 0
    await asyncio.sleep(2 * KEPT_SECONDS + 1)
    assert now(broker).decoded_bytes == 0


@simulated
async def test_what_is_used_stays_and_the_newest_stays_however_large() -> None:
    clock = SimClock()
    timer = Timer(clock)
    running = asyncio.create_task(timer.run())
    kept = KeptBytes(100, clock, timer)
    kept.put("a", 1, 60)
    kept.put("b", 2, 30)
    assert kept.get("a") == 1
    kept.put("c", 3, 50)  # b goes, then a
    assert (kept.get("a"), kept.get("b"), kept.get("c"), kept.size_bytes) == (None, None, 3, 50)
    kept.put("d", 4, 1000)
    assert (kept.get("c"), kept.get("d"), kept.size_bytes, len(kept)) == (None, 4, 1000, 1)
    for _ in range(5):
        await asyncio.sleep(KEPT_SECONDS * 0.7)
        assert kept.get("d") == 4
    await asyncio.sleep(KEPT_SECONDS + 0.1)
    assert len(kept) == kept.size_bytes == 0
    running.cancel()
