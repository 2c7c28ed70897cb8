"""Subscriptions with scattered acknowledgements: what they cost, what is saved of them, and which acks count."""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from random import Random

import pytest

from pydanube.broker import cursors
from pydanube.core.dispatch.consumer_window import Permits
from pydanube.core.dispatch.ranges import OffsetRange, work
from pydanube.core.names import SubscriptionName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import NotServed, OffsetOutOfRange
from pydanube.ports import Put
from pydanube.testing.loop import SimLoop
from tests.harness.brokers import (
    SUB,
    BrokerFixture,
    consume,
    find_topic,
    make_volatile,
    message,
    numbers,
    one_topic,
    publish_many,
    settle,
    simulated,
    small_wal,
)

HOLES = "/topics/default/orders/subscriptions/sub/ack_holes"
MESSAGES = 6_000  # every second one is a range of its own, of two bytes: more than 4 KiB
TOUCHED_MAX = 20_000
ACKED = 8_000  # scattered: every second message
STEP_MAX_SECONDS = 0.05  # of CPU


def every_second(first: int, messages: int = MESSAGES) -> tuple[OffsetRange, ...]:
    return tuple(OffsetRange(offset, offset + 1) for offset in range(first, messages, 2))


# --- what is saved ----------------------------------------------------------------------------------------


@simulated
async def test_nothing_that_was_acknowledged_comes_again_after_a_clean_stop_however_scattered() -> None:
    host = BrokerFixture(unacked_max=10_000)
    _, topic = await one_topic(host)
    await publish_many(topic, MESSAGES, at_once=1_000)
    stream = await consume(topic, start=0)
    await settle()
    stream.subscription.ack_ranges(every_second(1))
    stream.leave()
    await asyncio.sleep(10)
    value = await host.metadata.value(HOLES)
    assert value is not None and len(value) <= 4096, "what is written often is short"
    topic = await find_topic(await host.restart())
    value = await host.metadata.value(HOLES)
    assert value is not None and 4096 < len(value) <= 256 * 1024
    stream = await consume(topic)
    await settle()
    assert stream.offsets == list(range(0, MESSAGES, 2))


def test_what_does_not_fit_is_counted_and_named_and_comes_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cursors, "HOLES_LAST_SIZE_MAX_BYTES", 100)

    @simulated
    async def stop() -> None:
        host = BrokerFixture(unacked_max=1_000)
        broker, topic = await one_topic(host)
        await publish_many(topic, 200)
        stream = await consume(topic, start=0)
        await settle()
        stream.subscription.ack_ranges(every_second(1, 200))
        await broker.stop()
        assert broker.telemetry.moves.acks_cut.value == 53
        host._process.kill()
        again = await consume(await find_topic(await host.boot()))
        await settle()
        assert len(again.offsets) == 100 + 53

    with caplog.at_level(logging.WARNING):
        stop()
    (warning,) = [record for record in caplog.records if "will be delivered again" in record.message]
    assert getattr(warning, "subscription", "") == SUB and getattr(warning, "messages", 0) == 53


def test_many_large_positions_are_saved_in_several_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cursors, "BYTES_PER_TRANSACTION", 1_000)

    @simulated
    async def stop() -> None:
        host = BrokerFixture(unacked_max=1_000)
        broker, topic = await one_topic(host)
        await publish_many(topic, 400)
        for number in range(12):
            stream = await consume(topic, f"s{number}", start=0)
            await settle()
            stream.subscription.ack_ranges(every_second(1, 400))
        host.metadata.written.clear()
        await topic.save_cursors()
        sizes = [
            sum(len(each.value) for each in operations if isinstance(each, Put) and each.key.endswith("ack_holes"))
            for operations in host.metadata.written
        ]
        assert sum(sizes) > 12 * 400 and max(sizes) <= 1_000 and len(sizes) == 6
        await broker.stop()

    stop()


@simulated
async def test_a_save_for_good_that_comes_behind_a_short_one_is_written_though_nothing_changed() -> None:
    host = BrokerFixture(unacked_max=10_000)
    _, topic = await one_topic(host)
    await publish_many(topic, MESSAGES, at_once=1_000)
    stream = await consume(topic, start=0)
    await settle()
    subscription = stream.subscription
    subscription.ack_ranges(every_second(1))
    await asyncio.sleep(10)
    assert subscription.cut > 0
    await subscription.save()
    assert subscription.cut == 0
    writes = host.metadata.writes_of("/ack_holes")
    await subscription.save()
    await topic.save_cursors()
    assert host.metadata.writes_of("/ack_holes") == writes, "once is enough"


@simulated
async def test_holes_that_are_too_long_to_be_ours_are_not_believed() -> None:
    host = BrokerFixture(unacked_max=100)
    broker, topic = await one_topic(host)
    await publish_many(topic, 10)
    stream = await consume(topic, start=0)
    await settle()
    stream.ack(3, 5)
    await broker.stop()
    host._process.kill()
    await host.metadata.transact([], [Put(HOLES, bytes(256 * 1024 + 1))])
    again = await consume(await find_topic(await host.boot()))
    await settle()
    assert again.texts == numbers(10), "repeated, not lost"


# --- which acks count -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_an_ack_of_what_this_owner_has_not_sent_counts(kind: Kind) -> None:
    """As after a move: the consumer has the message from the owner before."""
    _, topic = await one_topic(BrokerFixture(unacked_max=2))
    await publish_many(topic, 6)
    stream = await consume(topic, kind=kind, start=0)
    await settle()
    stream.ack(3, 4, 3)
    stream.acks = True
    stream.ack_all()
    await settle()
    assert sorted(stream.offsets) == [0, 1, 2, 5]
    assert not stream.subscription.has_lag()


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_an_ack_at_or_above_the_head_is_refused_and_what_is_below_it_counts(kind: Kind) -> None:
    _, topic = await one_topic(BrokerFixture(unacked_max=10))
    stream = await consume(topic, kind=kind)
    await publish_many(topic, 5)
    await settle()
    with pytest.raises(OffsetOutOfRange) as refused:
        stream.subscription.ack_ranges((OffsetRange(3, 9),))
    assert (refused.value.offset, refused.value.end) == (5, 5)
    with pytest.raises(OffsetOutOfRange):
        stream.nack(5)
    stream.ack(0, 1, 2)
    assert not stream.subscription.has_lag(), "3 and 4 counted"
    await publish_many(topic, 1)
    await settle()
    assert stream.offsets[-1] == 5, "what was refused is delivered when it is there"


@simulated
async def test_an_ack_that_is_faster_than_the_notification_of_its_message_counts() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic)
    assert stream.subscription._notifier is not None
    stream.subscription._notifier.cancel()
    await publish_many(topic, 1)
    stream.ack(0)
    assert not stream.subscription.has_lag()


@simulated
async def test_an_ack_of_a_message_that_another_consumer_holds_by_now_settles_it() -> None:
    _, topic = await one_topic(BrokerFixture())
    first = await consume(topic, consumer="a")
    await publish_many(topic, 1)
    await settle()
    assert first.offsets == [0]
    first.leave()
    second = await consume(topic, consumer="b")
    await settle()
    assert second.offsets == [0]
    first.ack(0)
    second.ack(0)
    await asyncio.sleep(60)
    assert second.offsets == [0] and not second.subscription.has_lag()


@simulated
async def test_an_ack_that_comes_behind_the_close_is_refused_and_not_forgotten() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic)
    await publish_many(topic, 1)
    await settle()
    await topic.close("it is somebody else's", owned=False)
    with pytest.raises(NotServed, match="somebody else's"):
        stream.ack(0)
    with pytest.raises(NotServed):
        stream.nack(0)


@simulated
async def test_a_broker_whose_lease_may_have_run_out_takes_no_acks() -> None:
    host = BrokerFixture()
    _, topic = await one_topic(host)
    stream = await consume(topic)
    await publish_many(topic, 1)
    await settle()
    stream.subscription._services = stream.subscription._services._replace(may_serve=lambda: False)
    with pytest.raises(NotServed, match="lease"):
        stream.ack(0)
    assert stream.subscription.has_lag()


@simulated
async def test_acks_on_a_non_reliable_topic_mean_nothing_for_delivering_settles() -> None:
    broker = await BrokerFixture().boot()
    topic = await make_volatile(broker)
    stream = await consume(topic)
    stream.ack(0, 99)
    stream.nack(7)
    await broker.stop()


# --- what it costs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_others_have_their_turn_while_a_scattered_backlog_is_delivered(kind: Kind, native: bool) -> None:
    _, topic = await one_topic(BrokerFixture(unacked_max=10_000))
    producer = await topic.add_producer("producer")
    name = SubscriptionName(SUB)
    await consume(topic, name, kind)
    subscription = topic.subscriptions[name]
    subscription.forget(subscription.consumers[0].consumer_id)  # so that nothing is delivered yet
    await asyncio.gather(*(topic.publish(producer, message("x", key=each)) for each in numbers(MESSAGES)))
    subscription.ack_ranges(every_second(1))
    costliest = 0

    async def look_on() -> None:
        nonlocal costliest
        while True:
            before = work.ranges
            await asyncio.sleep(0)
            costliest = max(costliest, work.ranges - before)

    looking = asyncio.create_task(look_on())
    if native:
        identity = await topic.subscribe(name, kind, "consumer", native=True)
        outbox = subscription.attach_native(identity)
        subscription.grant(identity, Permits(100_000, 1 << 30))
        got: list[int] = []
        while len(got) < MESSAGES // 2:
            got += [at for each in await outbox.get() for first, end in each.ranges for at in range(first, end)]
    else:
        again = await consume(topic, name, kind)
        for _ in range(10_000):  # turns of the loop
            await asyncio.sleep(0)
        got = again.offsets
    looking.cancel()
    assert sorted(got) == list(range(0, MESSAGES, 2))
    assert costliest <= TOUCHED_MAX
    assert subscription._machine.touched_max <= TOUCHED_MAX


class StepMeter:
    """The CPU that the loop's longest step took, while it looks."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self.looks = False
        self._before = 0.0

    def after_step(self) -> None:
        now = time.thread_time()
        if self.looks:
            self.longest_seconds = max(self.longest_seconds, now - self._before)
        self._before = now


async def acknowledge_and_deliver_the_rest(kind: Kind, meter: StepMeter) -> None:
    """8,000 scattered acks, as many in one step as one command may have; the others delivered again; a restart."""
    host = BrokerFixture(unacked_max=10_000)
    _, topic = await one_topic(host)
    producer = await topic.add_producer("producer")
    for first in range(0, 2 * ACKED, 1_000):
        sends = (topic.publish(producer, message("x", key=each)) for each in numbers(1_000, first))
        await asyncio.gather(*sends)
    stream = await consume(topic, kind=kind, start=0)
    await settle()
    meter.looks = True
    acks = list(every_second(1, 2 * ACKED))
    Random(0).shuffle(acks)
    for first in range(0, ACKED, 1_000):
        stream.subscription.ack_ranges(tuple(sorted(acks[first : first + 1_000])))
        await asyncio.sleep(0)
    stream.leave()
    again = await consume(topic, kind=kind)
    await asyncio.sleep(10)
    again.leave()
    topic = await find_topic(await host.restart())
    restarted = await consume(topic, kind=kind)
    await settle()
    meter.looks = False
    for each in (again, restarted):
        assert sorted(each.offsets) == list(range(0, 2 * ACKED, 2))


def longest_step_seconds(kind: Kind) -> float:
    meter = StepMeter()
    loop = SimLoop(Random(0), shuffled=False)  # type: ignore[abstract]
    loop.after_step = meter.after_step
    gc.collect()
    gc.disable()  # it falls on any step, and takes as long as the process is large
    try:
        with small_wal():
            loop.run_until_complete(acknowledge_and_deliver_the_rest(kind, meter))
    finally:
        gc.enable()
        loop.close()
    return meter.longest_seconds


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Kind.SHARED, Kind.KEY_SHARED])
def test_no_step_costs_more_than_fifty_milliseconds_with_eight_thousand_scattered_acks(kind: Kind) -> None:
    """The best of eight: whatever else the machine does can only make a step look longer."""
    measured: list[float] = []
    while len(measured) < 8 and min(measured, default=1.0) > STEP_MAX_SECONDS:
        measured.append(longest_step_seconds(kind))
    assert min(measured) <= STEP_MAX_SECONDS, measured
    print(f"{kind.value}: {min(measured) * 1000:.1f} ms")
