"""The hybrid lag monitor: a notification is fast, the heartbeat cannot be lost, and the counters tell which it was.

Seed 001's two unit tests with their numbers, its five validation tests and its six integration tests. Where the seed
says "within the interval", virtual time makes it exact.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pydanube.broker.service import Broker
from pydanube.broker.timer import Timer
from pydanube.broker.topic import Topic
from pydanube.config import Config, DispatchConfig
from pydanube.core import keys
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.names import SubscriptionName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import ConfigError
from pydanube.formats.batch import Envelope
from pydanube.stores.work.system import SystemClock
from tests.harness.brokers import (
    OFF,
    ORDERS,
    SUB,
    BrokerFixture,
    Stream,
    consume,
    find_topic,
    make_topic,
    message,
    now,
    numbers,
    one_topic,
    publish,
    publish_many,
    settle,
    simulated,
    stop_notifier,
)

INTERVALS = ("debug", "high_priority", "normal", "low_priority")
OBSERVE = Heartbeat.parse("observe")


class Polls:
    """What a subscription's counters say."""

    def __init__(self, stream: Stream) -> None:
        metrics = stream.subscription.metrics
        self.notifier = metrics.notifier_polls.value
        self.heartbeat = metrics.heartbeat_polls.value
        self.lag_detected = metrics.lag_detected.value


# --- the seed's two unit tests ------------------------------------------------------------------------------


@simulated
async def test_the_head_is_the_next_offset_0_1_2() -> None:
    _, topic = await one_topic(BrokerFixture())
    assert topic.log.current_offset() == 0
    assert await publish(topic, "a") == [0]
    assert topic.log.current_offset() == 1
    assert await publish(topic, "b") == [1]
    assert topic.log.current_offset() == 2


@simulated
async def test_lag_is_3_then_1_then_0() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic)
    subscription = stream.subscription
    assert not subscription.has_lag()

    await publish(topic, "a", "b", "c")
    await settle()
    assert subscription.has_lag()
    assert subscription.get_lag_info().lag_messages == 3
    assert subscription.get_lag_info().cursor is None

    stream.ack(0, 1)
    assert subscription.has_lag()
    assert subscription.get_lag_info() == (1, 3, 1, True)

    stream.ack(2)
    assert not subscription.has_lag()
    assert subscription.get_lag_info() == (2, 3, 0, False)


# --- the seed's validation and integration tests --------------------------------------------------------------


@pytest.mark.parametrize("heartbeat", [Heartbeat(), OFF], ids=["heartbeat", "no heartbeat"])
@pytest.mark.parametrize("turns", range(0, 12))
@simulated
async def test_what_is_published_while_a_subscription_is_made_arrives(turns: int, heartbeat: Heartbeat) -> None:
    """The publishes are acknowledged at every possible moment of Subscribe; from its start on nothing is missed."""
    _, topic = await one_topic(BrokerFixture(heartbeat=heartbeat))
    await publish(topic, "before")
    producer = await topic.add_producer("producer")
    sends: list[asyncio.Task[int]] = []

    async def keep_publishing() -> None:
        for number in range(40):
            sends.append(asyncio.create_task(topic.publish(producer, message(str(number)))))
            await asyncio.sleep(0)

    publishing = asyncio.create_task(keep_publishing())
    for _ in range(turns):
        await asyncio.sleep(0)
    stream = await consume(topic, acks=True)
    await publishing
    offsets = await asyncio.gather(*sends)
    await settle()
    first = stream.offsets[0]
    assert stream.offsets == list(range(first, topic.head))
    assert first <= min(offset for offset in offsets if offset >= first)
    assert stream.offsets[-1] == offsets[-1], "what was acknowledged after Subscribe returned is delivered"


@simulated
async def test_what_is_published_between_subscribing_and_opening_the_stream_arrives() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    identity = await topic.subscribe(SUB, Kind.EXCLUSIVE, "consumer")
    await publish(topic, "a", "b")
    await asyncio.sleep(2)
    stream = Stream(topic, topic.require(SUB), identity, acks=True)
    await settle()
    assert stream.texts == ["a", "b"]


@simulated
async def test_a_thousand_rapid_publishes_all_arrive_though_their_notifications_coalesce() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    stream = await consume(topic, acks=True)
    await publish_many(topic, 1000, at_once=1000)
    await settle()
    assert stream.texts == numbers(1000)
    assert Polls(stream).notifier < 1000, "one notification stands for many commits"
    assert not stream.subscription.has_lag()


@simulated
async def test_notifications_while_the_consumer_is_busy_are_not_forgotten() -> None:
    """The seed's example: A is being worked on while B and C are published; nobody publishes D."""
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF, unacked_max=1))
    stream = await consume(topic)
    await publish(topic, "A")
    await settle()
    await publish(topic, "B")
    await publish(topic, "C")
    await settle()
    assert stream.texts == ["A"]
    for offset in range(3):
        stream.ack(offset)
        await settle()
    assert stream.texts == ["A", "B", "C"]


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_a_reader_that_returns_nothing_for_a_moment_is_asked_again_within_the_interval(kind: Kind) -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic, kind=kind, acks=True)
    await settle()
    read, read_keys = topic.rows, topic.row_keys
    topic.rows = topic.row_keys = nothing  # type: ignore[method-assign,assignment]
    await publish(topic, "a", "b", "c")
    await settle()
    assert stream.texts == []
    topic.rows, topic.row_keys = read, read_keys  # type: ignore[method-assign]
    began = now()
    await asyncio.sleep(0.5)
    assert stream.texts == ["a", "b", "c"]
    assert stream.arrivals[-1].at - began <= 0.5
    assert Polls(stream).heartbeat == 1
    assert stream.attempts == [1, 1, 1], "what was never sent does not count as a try"


async def nothing(first: int, end: int, bytes_max: int | None = None) -> list[Any]:
    return []


@simulated
async def test_a_reader_that_returns_half_is_asked_for_the_rest() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic, acks=True)
    read = topic.rows

    async def half(first: int, end: int, bytes_max: int | None = None) -> list[tuple[int, Envelope]]:
        return (await read(first, end))[: (end - first) // 2]

    topic.rows = half  # type: ignore[method-assign]
    await publish(topic, *"abcdef")
    await settle()
    topic.rows = read  # type: ignore[method-assign]
    assert stream.texts == ["a", "b", "c"]
    await asyncio.sleep(0.5)
    assert stream.texts == list("abcdef")
    assert stream.attempts == [1] * 6


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_delivery_goes_on_by_heartbeat_alone_when_the_notifier_task_is_killed(kind: Kind) -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic, kind=kind, acks=True)
    await publish(topic, "a")
    await settle()
    before = Polls(stream)
    stop_notifier(stream.subscription)
    await settle()
    for text in "bcd":
        await publish(topic, text)
        await settle()
        assert stream.texts[-1] != text
        await asyncio.sleep(0.5)
        assert stream.texts[-1] == text
    after = Polls(stream)
    assert (after.notifier, after.heartbeat) == (before.notifier, before.heartbeat + 3)


@simulated
async def test_a_consumer_that_disconnects_in_mid_dispatch_gets_its_messages_again() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    stream = await consume(topic)
    await publish_many(topic, 30)
    await settle()
    stream.ack(0, 1, 2)
    stream.leave()  # with three more on their way to it
    again = await stream.come_back()
    await settle()
    assert stream.texts == numbers(10)
    assert again.texts == numbers(10, first=3)
    assert again.attempts == [2] * 10
    again.ack_all()
    again.acks = True
    await settle()
    assert again.texts == numbers(27, first=3)


@simulated
async def test_a_consumer_that_disconnects_while_its_messages_are_read_gets_them_on_its_new_stream() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    stream = await consume(topic)
    read, gate = topic.rows, asyncio.Event()

    async def slow(first: int, end: int, bytes_max: int | None = None) -> list[tuple[int, Envelope]]:
        rows = await read(first, end)
        await gate.wait()
        return rows

    topic.rows = slow  # type: ignore[method-assign]
    await publish(topic, "a", "b")
    await settle()
    stream.leave()
    again = await stream.come_back()
    gate.set()
    await settle()
    assert stream.texts == []
    assert again.texts == ["a", "b"]


@simulated
async def test_ten_thousand_messages_a_second_all_arrive_in_order() -> None:
    """The deterministic version: two virtual seconds, a hundred messages every 10 ms."""
    _, topic = await one_topic(BrokerFixture(unacked_max=1000))
    stream = await consume(topic, acks=True)
    for start in range(0, 20_000, 100):
        producer = await topic.add_producer("producer")
        sends = [topic.publish(producer, message(str(start + number))) for number in range(100)]
        await asyncio.gather(*sends)
        await asyncio.sleep(0.01)
    await settle()
    assert stream.texts == numbers(20_000)
    assert Polls(stream).heartbeat == 0
    assert max(arrival.at for arrival in stream.arrivals) == pytest.approx(2.0, abs=0.011)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_ten_thousand_messages_a_second_for_a_minute(tmp_path: Path) -> None:
    """The soak: real files, real time. The pace is kept, nothing is lost, nothing waits for a heartbeat."""
    asyncio.run(soak(tmp_path, seconds=60, per_second=10_000))


async def soak(directory: Path, *, seconds: int, per_second: int) -> None:
    broker = await Broker.start(Config(data_dir=directory, dispatch=DispatchConfig(max_unacked_messages=2_000)))
    topic = await make_topic(broker)
    stream = await consume(topic, acks=True)
    producer = await topic.add_producer("producer")
    clock = SystemClock()
    burst = per_second // 100
    began = clock.elapsed()
    payload = bytes(100)
    sends: set[asyncio.Task[int]] = set()
    for tick in range(seconds * 100):
        for _ in range(burst):
            task = asyncio.create_task(topic.publish(producer, Envelope(payload, 0, None, "producer")))
            sends.add(task)
            task.add_done_callback(sends.discard)
        await clock.sleep(max(0.0, began + (tick + 1) / 100 - clock.elapsed()))
    await asyncio.gather(*sends)
    took = clock.elapsed() - began
    async with asyncio.timeout(10):
        while stream.subscription.has_lag():
            await clock.sleep(0.01)
    count = seconds * per_second
    assert stream.offsets == list(range(count)), "each once, in order"
    assert took < seconds * 1.05, f"{count} messages took {took:.1f} s"
    stream.leave()
    await broker.stop()


# --- which of the two it was --------------------------------------------------------------------------------


@simulated
async def test_with_the_heartbeat_off_a_thousand_messages_arrive_by_notification_alone() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    stream = await consume(topic, acks=True)
    for number in range(1000):
        await publish(topic, str(number))
    await settle()
    assert stream.texts == numbers(1000)
    polls = Polls(stream)
    assert (polls.heartbeat, polls.lag_detected) == (0, 0)
    assert 0 < polls.notifier <= 1000


@simulated
async def test_with_the_notifier_stopped_a_thousand_messages_arrive_by_heartbeat_alone() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic, acks=True)
    await settle()
    stop_notifier(stream.subscription)
    for number in range(1000):
        await publish(topic, str(number))
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    assert stream.texts == numbers(1000)
    polls = Polls(stream)
    assert polls.notifier == 0
    assert polls.heartbeat == polls.lag_detected
    assert 20 <= polls.heartbeat <= 22, "ten seconds at two beats each"


@simulated
async def test_when_all_is_well_the_heartbeat_finds_nothing_to_do() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic, acks=True)
    for number in range(100):
        await publish(topic, str(number))
        await asyncio.sleep(0.1)
    polls = Polls(stream)
    assert (polls.notifier, polls.heartbeat, polls.lag_detected) == (100, 0, 0)


@simulated
async def test_a_slow_consumer_is_lag_but_never_a_poll() -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic)
    await publish_many(topic, 50)
    await asyncio.sleep(10)
    assert stream.subscription.get_lag_info().lag_messages == 50
    polls = Polls(stream)
    assert (polls.heartbeat, polls.lag_detected) == (0, 0)


@simulated
async def test_observe_counts_and_polls_nothing() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OBSERVE))
    stream = await consume(topic, acks=True)
    await settle()
    stop_notifier(stream.subscription)
    await publish(topic, "a")
    await asyncio.sleep(5)
    polls = Polls(stream)
    assert stream.texts == []
    assert (polls.notifier, polls.heartbeat, polls.lag_detected) == (0, 0, 10)


# --- settings -------------------------------------------------------------------------------------------------


@simulated
async def test_the_heartbeat_of_one_subscription_is_changed_while_it_runs() -> None:
    broker, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    stream = await consume(topic, acks=True)
    await settle()
    stop_notifier(stream.subscription)
    await publish(topic, "a")
    await asyncio.sleep(5)
    assert stream.texts == []
    await broker.topics.set_dispatch_config(ORDERS, SUB, heartbeat=Heartbeat.parse("100ms"))
    began = now()
    await asyncio.sleep(1)
    assert stream.texts == ["a"]
    assert stream.arrivals[0].at - began <= 0.1
    assert (await broker.topics.get_dispatch_config(ORDERS, SUB)).heartbeat == Heartbeat(100)

    await broker.topics.set_dispatch_config(ORDERS, SUB, heartbeat=OFF)
    detected = Polls(stream).lag_detected
    await publish(topic, "b")
    await asyncio.sleep(5)
    assert stream.texts == ["a"]
    assert Polls(stream).lag_detected == detected, "off is off at once"


@simulated
async def test_changing_the_heartbeat_often_leaves_one_beat_per_interval() -> None:
    broker, topic = await one_topic(BrokerFixture(heartbeat=OBSERVE))
    stream = await consume(topic)
    await settle()
    stop_notifier(stream.subscription)
    for text in ("50ms", "1000ms", "observe", "70ms", "observe", "off", "observe"):
        await broker.topics.set_dispatch_config(ORDERS, SUB, heartbeat=Heartbeat.parse(text))
    await publish(topic, "a")
    await asyncio.sleep(10)
    assert Polls(stream).lag_detected == 20


@simulated
async def test_a_heartbeat_that_was_set_survives_a_restart() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await consume(topic)
    await broker.topics.set_dispatch_config(ORDERS, SUB, heartbeat=Heartbeat(70))
    assert await host.metadata.value("/topics/default/orders/subscriptions/sub/dispatch_config") is not None
    topic = await find_topic(await host.restart())
    assert topic.require(SUB).heartbeat == Heartbeat(70)


@simulated
async def test_the_heartbeat_of_a_topic_is_that_of_its_subscriptions_that_have_none_of_their_own() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    await consume(topic, "before")
    await consume(topic, "own")
    own = SubscriptionName("own")
    await broker.topics.set_dispatch_config(ORDERS, own, heartbeat=Heartbeat(70))
    await topic.set_heartbeat(Heartbeat.parse("high_priority"))
    await consume(topic, "later")

    def intervals(of: Topic) -> dict[str, int | None]:
        return {name: each.heartbeat.interval_ms for name, each in of.subscriptions.items()}

    assert intervals(topic) == {"before": 100, "own": 70, "later": 100}
    assert json.loads(await host.metadata.value(keys.topic_dispatch_config(ORDERS))) == {"heartbeat": "high_priority"}
    broker = await host.restart()
    topic = await find_topic(broker)
    assert intervals(topic) == {"before": 100, "own": 70, "later": 100}, "it is kept"
    await broker.topics.set_dispatch_config(ORDERS, own, unacked_max=5)
    assert intervals(topic)["own"] == 70
    await broker.topics.set_dispatch_config(ORDERS, own, forget_heartbeat=True)
    assert intervals(topic) == {"before": 100, "own": 100, "later": 100}
    await topic.set_heartbeat(None)
    assert intervals(topic) == {"before": 500, "own": 500, "later": 500}
    assert await host.metadata.value(keys.topic_dispatch_config(ORDERS)) is None


@simulated
async def test_a_shorter_heartbeat_of_a_topic_is_in_force_at_once() -> None:
    _, topic = await one_topic(BrokerFixture(heartbeat=OFF))
    stream = await consume(topic, acks=True)
    await settle()
    stop_notifier(stream.subscription)
    await publish(topic, "a")
    await asyncio.sleep(5)
    assert stream.texts == []
    await topic.set_heartbeat(Heartbeat(100))
    await asyncio.sleep(0.1)
    assert stream.texts == ["a"]


# --- what the log says ------------------------------------------------------------------------------------------


def said(caplog: pytest.LogCaptureFixture, phrase: str) -> list[dict[str, object]]:
    return [vars(each) for each in caplog.records if each.getMessage().startswith(phrase)]


def test_a_missed_notification_is_a_warning_with_lag_cursor_and_head_and_does_not_flood_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @simulated
    async def story() -> None:
        _, topic = await one_topic(BrokerFixture())
        stream = await consume(topic, acks=True)
        await publish(topic, "a", "b", "c")
        await asyncio.sleep(2)
        assert said(caplog, "Heartbeat") == [], "a notification told of it"
        stop_notifier(stream.subscription)
        await settle()
        await publish(topic, "d", "e")
        await asyncio.sleep(0.5)
        [line] = said(caplog, "Heartbeat detected lag, triggering poll")
        assert line["levelname"] == "WARNING" and (line["topic"], line["subscription"]) == (ORDERS, SUB)
        assert (line["lag"], line["cursor"], line["head"], line["times"]) == (2, 2, 5, 1)
        for number in range(60):
            await publish(topic, str(number))
            await asyncio.sleep(0.5)
        lines = said(caplog, "Heartbeat detected lag, triggering poll")
        assert 3 <= len(lines) <= 5 and sum(int(str(each["times"])) for each in lines) >= 40

    caplog.set_level(logging.WARNING)
    story()


def test_which_consumer_gets_what_is_in_the_log_when_somebody_debugs(caplog: pytest.LogCaptureFixture) -> None:
    @simulated
    async def story() -> None:
        _, topic = await one_topic(BrokerFixture())
        streams = [await consume(topic, kind=Kind.SHARED, consumer=name, acks=True) for name in ("a", "b")]
        await publish(topic, "1")
        await settle()
        assert said(caplog, "consumer chosen") == []
        caplog.set_level(logging.DEBUG, logger="pydanube.broker.subscription")
        await publish(topic, "2", "3")
        await settle()
        lines = said(caplog, "consumer chosen")
        assert {line["consumer"] for line in lines} <= {each.consumer for each in streams} and lines
        assert sum(each.size for line in lines for each in line["offsets"]) == 2  # type: ignore[attr-defined]

    caplog.set_level(logging.INFO)
    story()


@pytest.mark.parametrize("text", ["0", "49ms", "1001ms", "fast", "", "-100", "1s"])
def test_any_other_heartbeat_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(ConfigError, match="50ms to 1000ms"):
        Heartbeat.parse(text)


# --- bounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", INTERVALS)
@simulated
async def test_without_notifications_no_message_waits_longer_than_one_interval(profile: str) -> None:
    """Exact in virtual time: published at odd moments, each arrives with the next beat."""
    heartbeat = Heartbeat.parse(profile)
    assert heartbeat.interval_ms is not None
    interval = heartbeat.interval_ms / 1000
    _, topic = await one_topic(BrokerFixture(heartbeat=heartbeat))
    stream = await consume(topic, acks=True)
    await settle()
    stop_notifier(stream.subscription)
    published = []
    for number in range(200):
        await publish(topic, str(number))
        published.append(now())
        await asyncio.sleep(interval * 0.37)
    await asyncio.sleep(interval)
    delays = [arrival.at - at for arrival, at in zip(stream.arrivals, published, strict=True)]
    assert max(delays) <= interval + 1e-9
    assert max(delays) > interval * 0.9, "the bound is the interval, not less"
    assert Polls(stream).notifier == 0


@pytest.mark.parametrize("interval_ms", [50, 77, 100, 333, 500, 1000])
@simulated
async def test_a_heartbeat_goes_on_for_a_day(interval_ms: int) -> None:
    """A beat is a multiple of its interval, and some multiples, divided by it again, come out one too low."""
    timer = Timer(BrokerFixture().clock)
    interval = interval_ms / 1000
    for number in range(0, int(86_400 / interval), 7):
        at = number * interval
        timer._clock = At(at)  # type: ignore[assignment]
        following = timer.next_beat(interval)
        assert at < following <= at + interval + 1e-9, number


class At:
    def __init__(self, time: float) -> None:
        self.time = time

    def elapsed(self) -> float:
        return self.time


# --- metrics --------------------------------------------------------------------------------------------------

FOUR = (
    "danube_subscription_lag_messages",
    "danube_subscription_lag_detected_total",
    "danube_dispatcher_heartbeat_polls_total",
    "danube_dispatcher_notifier_polls_total",
)


def scraped(broker: Broker, metric: str) -> float | None:
    labels = {"topic": ORDERS, "subscription": "sub", "broker": str(broker.broker_id)}
    value: float | None = broker.telemetry.registry.get_sample_value(metric, labels)
    return value


@simulated
async def test_all_four_metrics_are_0_from_the_creation_of_a_subscription_and_go_with_it() -> None:
    broker, topic = await one_topic(BrokerFixture())
    assert [scraped(broker, metric) for metric in FOUR] == [None] * 4
    stream = await consume(topic)
    assert [scraped(broker, metric) for metric in FOUR] == [0, 0, 0, 0]
    stream.leave()
    await topic.unsubscribe(SUB)
    assert [scraped(broker, metric) for metric in FOUR] == [None] * 4


@simulated
async def test_the_lag_gauge_is_right_with_no_consumer_and_while_acks_are_pending_and_after_a_restart() -> None:
    host = BrokerFixture()
    broker, topic = await one_topic(host)
    stream = await consume(topic)
    await publish_many(topic, 7)
    await settle()
    assert scraped(broker, FOUR[0]) == 7, "sent, not acknowledged"
    stream.ack(5)
    assert scraped(broker, FOUR[0]) == 6
    stream.leave()
    await publish_many(topic, 5)
    assert scraped(broker, FOUR[0]) == 11, "nobody is connected"
    broker = await host.restart()
    assert scraped(broker, FOUR[0]) == 11
    assert [scraped(broker, metric) for metric in FOUR[1:]] == [0, 0, 0]


@simulated
async def test_the_counters_of_a_scrape_tell_notifications_from_heartbeats() -> None:
    broker, topic = await one_topic(BrokerFixture())
    stream = await consume(topic, acks=True)
    await publish(topic, "a")
    await settle()
    stop_notifier(stream.subscription)
    await publish(topic, "b")
    await asyncio.sleep(0.5)
    assert [scraped(broker, metric) for metric in FOUR] == [0, 1, 1, 1]


# --- one timer ------------------------------------------------------------------------------------------------


@simulated
async def test_one_timer_serves_a_thousand_idle_subscriptions() -> None:
    """Twenty wake-ups in ten seconds, not twenty thousand."""
    broker, topic = await one_topic(BrokerFixture())
    for number in range(1000):
        await topic.subscribe(SubscriptionName(f"s{number}"), Kind.EXCLUSIVE, "consumer")
    await asyncio.sleep(30)  # consumers that never opened a stream are given up after 10 s
    naps = count_naps(broker)
    steps = asyncio.get_running_loop().steps  # type: ignore[attr-defined]
    await asyncio.sleep(10)
    assert len(naps) == 20
    assert asyncio.get_running_loop().steps - steps < 500  # type: ignore[attr-defined]


@simulated
async def test_subscriptions_of_different_intervals_share_the_beats_that_fall_together() -> None:
    broker, topic = await one_topic(BrokerFixture())
    for number, profile in enumerate(INTERVALS):
        name = SubscriptionName(f"s{number}")
        await topic.subscribe(name, Kind.EXCLUSIVE, "consumer")
        await broker.topics.set_dispatch_config(ORDERS, name, heartbeat=Heartbeat.parse(profile))
    await asyncio.sleep(30)
    naps = count_naps(broker)
    await asyncio.sleep(10)
    assert 200 <= len(naps) <= 210, "every 50 ms; the others beat with them"


def count_naps(broker: Broker) -> list[float]:
    timer = broker.topics.context.services.timer
    naps: list[float] = []
    sleep: Callable[[float], Coroutine[Any, Any, None]] = timer._sleep

    async def counting(seconds: float) -> None:
        naps.append(seconds)
        await sleep(seconds)

    timer._sleep = counting  # type: ignore[method-assign]
    return naps


# --- has_lag --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", Kind)
@simulated
async def test_has_lag_agrees_with_lag_messages_at_every_moment(kind: Kind) -> None:
    _, topic = await one_topic(BrokerFixture())
    stream = await consume(topic, kind=kind)

    def check() -> None:
        info = stream.subscription.get_lag_info()
        assert stream.subscription.has_lag() == info.has_lag == (info.lag_messages > 0)

    check()
    for number in range(20):
        await publish(topic, str(number))
        check()
        await settle()
        check()
        stream.ack(number)
        check()
    assert isinstance(topic, Topic) and not stream.subscription.has_lag()
