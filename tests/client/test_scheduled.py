"""Messages that are not to be delivered before a time: with the real client, a real broker, and a clock that jumps."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pydanube.client.client import Client
from pydanube.core.dispatch import schedule
from pydanube.core.dispatch.events import LogTrimmed
from pydanube.core.names import ProducerId
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import ConfigError, DeadlineExceeded, LimitReached, OutOfSequence, Refused
from pydanube.formats.batch import Batch, encode, load, messages, rows_of
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.harness.brokers import SUB, BrokerFixture, consume, make_topic, message, now, simulated
from tests.harness.peers import Peer
from tests.harness.wired import Wires, wired

TOPIC = "/default/orders"
SHARING: list[Any] = ["shared", "key_shared"]


async def send(client: Client, *sent: tuple[bytes, float | None], key: str | None = None) -> None:
    async with client.producer(TOPIC) as producer:
        for payload, after in sent:
            await producer.send(payload, key=key, deliver_after=after)


@pytest.mark.parametrize("kind", SHARING)
@wired
async def test_a_message_is_not_delivered_before_its_time_and_holds_up_nothing(kind: Any, wires: Wires) -> None:
    async with wires.connect() as client:
        await client.create_topic(TOPIC)
        async with client.consumer(TOPIC, subscription="s", type=kind, start="earliest") as consumer:
            begun = now()
            await send(client, (b"later", 60), (b"now", None), (b"soon", 30), key="one key")
            first = await consumer.receive()
            assert first.payload == b"now" and now() - begun < 5
            await first.ack()
            await consumer.flush()
            lag = await client.lag(TOPIC, "s")
            assert (lag.messages, lag.scheduled, lag.cursor) == (0, 2, None)
            assert "caught up with what is due" in lag.sentence and "2 messages are scheduled" in lag.sentence
            for payload, seconds in ((b"soon", 30), (b"later", 60)):
                message = await consumer.receive(timeout=100)
                assert message.payload == payload and message.attempt == 1
                assert seconds <= now() - begun < seconds + 2
                assert message.deliver_at is not None
                await message.ack()
            await consumer.flush()
            lag = await client.lag(TOPIC, "s")
            assert (lag.messages, lag.scheduled, lag.cursor) == (0, 0, 2)


@pytest.mark.parametrize("kind", ["exclusive", "failover"])
@wired
async def test_subscriptions_that_keep_the_order_deliver_at_once(kind: Any, wires: Wires) -> None:
    async with wires.connect() as client:
        await send(client, (b"later", 600), (b"now", None))
        async with client.consumer(TOPIC, subscription="s", type=kind, start="earliest") as consumer:
            assert [(await consumer.receive(timeout=5)).payload for _ in range(2)] == [b"later", b"now"]


@wired
async def test_one_batch_is_delivered_in_parts_as_its_messages_fall_due(wires: Wires) -> None:
    async with wires.connect() as client:
        await client.create_topic(TOPIC)
        async with client.producer(TOPIC, linger=0.5) as producer:
            for number in range(40):
                producer.send_nowait(b"%d" % number, deliver_after=60.0 if number % 4 == 1 else None)
            await producer.flush()
        async with client.consumer(TOPIC, subscription="s", start="earliest", window_messages=7) as consumer:
            early = []
            for _ in range(30):
                message = await consumer.receive(timeout=20)
                early.append(int(message.payload))
                await message.ack()
            assert early == [number for number in range(40) if number % 4 != 1]
            with pytest.raises(DeadlineExceeded):
                await consumer.receive(timeout=20)
            late = [int((await consumer.receive(timeout=60)).payload) for _ in range(10)]
            assert late == [number for number in range(40) if number % 4 == 1]


@wired
async def test_times_of_the_event_and_of_delivery_arrive_and_wrong_ones_are_refused(wires: Wires) -> None:
    async with wires.connect() as client, client.producer(TOPIC) as producer:
        happened = datetime(2001, 2, 3, 4, 5, 6, 7, tzinfo=UTC)
        await producer.send(b"a", event_time=happened, deliver_at=happened)
        producer.send_nowait(b"b", event_time=happened + timedelta(1))
        assert (await producer.send_soon(b"c")).offset == 2
        async with client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
            found = [await consumer.receive(timeout=5) for _ in range(3)]
            assert [each.event_time for each in found] == [happened, happened + timedelta(1), None]
            assert [each.deliver_at for each in found] == [happened, None, None]
        wrong: Any
        for wrong in (
            {"deliver_after": -1},
            {"deliver_after": 1e9},
            {"deliver_at": 7},
            {"event_time": "today"},
            {"deliver_at": happened, "deliver_after": 1},
        ):
            with pytest.raises(ConfigError):
                await producer.send(b"x", **wrong)
        async with client.producer("/default/volatile", reliable=False) as volatile:
            with pytest.raises(Refused, match="keeps nothing"):
                await volatile.send(b"x", deliver_after=5)


@wired
async def test_more_than_a_subscription_may_have_is_refused_until_some_are_due(wires: Wires) -> None:
    async with wires.connect() as client, client.producer(TOPIC) as producer:
        for _ in range(schedule.SCHEDULED_MAX):
            producer.send_nowait(b"x", deliver_after=100.0)
        await producer.flush()
        with pytest.raises(LimitReached, match="1000 messages scheduled for later in /default/orders"):
            await producer.send(b"one more", deliver_after=100.0)
        await producer.send(b"others go on")
        async with client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
            other = await consumer.receive(timeout=20)
            assert other.payload == b"others go on"
            await other.ack()
            await consumer.flush()
            lag = await client.lag(TOPIC, "s")
            assert (lag.scheduled, lag.messages) == (1000, 0)
            found = [(await consumer.receive(timeout=200)).payload for _ in range(1000)]
            assert found == [b"x"] * 1000
        await producer.send(b"again", deliver_after=100.0)


@simulated
async def test_a_batch_that_is_sent_again_or_was_refused_is_not_counted_once_more() -> None:
    broker = await BrokerFixture().boot()
    topic = await make_topic(broker, TOPIC)
    producer = ProducerId(7)
    session = await topic.open_session(producer)
    later = topic._services.clock.time_us() + 100_000_000

    def batch(first: int, rows: int) -> Batch:
        sent = [message("x")._replace(deliver_at=later)] * rows
        return encode(rows_of(sent), topic=topic.name, producer_id=producer, session=session, first_sequence=first)

    stored = await topic.submit_batch(batch(0, 600))
    again = await topic.submit_batch(batch(0, 600))
    assert (again.offset, again.duplicate) == (stored.offset, True)
    for _ in range(3):
        with pytest.raises(OutOfSequence):
            await topic.submit_batch(batch(5_000, 300))
    assert not (await topic.submit_batch(batch(600, 400))).duplicate
    with pytest.raises(LimitReached):
        await topic.submit_batch(batch(1_000, 1))
    await broker.stop()


# --- faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["kill", "stop"])
@simulated
async def test_what_is_scheduled_is_scheduled_after_a_restart_and_what_is_done_does_not_come_again(how: str) -> None:
    host = BrokerFixture()
    broker = await host.boot()
    wires = Wires(broker)
    async with wires.connect() as client:
        await client.create_topic(TOPIC)
        begun = now()
        await send(client, (b"later", 100), *((b"%d" % number, None) for number in range(5)))
        async with client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
            for _ in range(5):
                await (await consumer.receive(timeout=5)).ack()
            await consumer.flush()
            await asyncio.sleep(10)  # the cursor is stored: it stands before what is scheduled
    if how == "kill":
        host.kill()
    else:
        await broker.stop()
    wires = Wires(await host.boot())
    async with wires.connect() as client:
        async with client.consumer(TOPIC, subscription="s") as consumer:
            with pytest.raises(DeadlineExceeded):
                await consumer.receive(timeout=begun + 100 - now() - 0.1)
            assert (await client.lag(TOPIC, "s")).scheduled == 1
            message = await consumer.receive(timeout=5)
            assert message.payload == b"later" and now() - begun >= 100
            await message.ack()
        assert (await client.lag(TOPIC, "s")).messages == 0


@pytest.mark.parametrize("kind", SHARING)
@pytest.mark.parametrize("jump", [-1000.0, 1000.0])
@simulated
async def test_a_clock_that_jumps_makes_it_earlier_or_later_and_never_early_by_its_date(jump: float, kind: Any) -> None:
    host = BrokerFixture()
    broker = await host.boot()
    wires = Wires(broker)
    async with wires.connect() as client:
        await client.create_topic(TOPIC)
        async with client.consumer(TOPIC, subscription="s", type=kind, start="earliest") as consumer:
            begun = now()
            await send(client, (b"later", 100))
            await asyncio.sleep(5)
            host.clock.jump(jump)
            message = await consumer.receive(timeout=3000)
            assert message.deliver_at is not None
            date_us = host.clock.time_us()
            assert date_us >= message.deliver_at.timestamp() * 1_000_000 - 1
            assert now() - begun == pytest.approx(6 if jump > 0 else 1100, abs=2)


@simulated
async def test_retention_takes_what_is_scheduled_and_says_so() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    wires = Wires(broker)
    async with wires.connect() as client:
        await client.create_topic(TOPIC)
        async with client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
            await send(client, (b"later", 1000), (b"now", None))
            await (await consumer.receive(timeout=5)).ack()
            await consumer.flush()
            subscription = wires.subscription(TOPIC, "s")
            subscription._step(LogTrimmed(2))
            assert subscription.scheduled == 0 and subscription.metrics.skipped.value == 1
            assert subscription.get_lag_info().lag_messages == 0
            assert "retention removed 1 message" in subscription.explain()


@simulated
async def test_consumers_by_grpc_are_not_sent_it_before_its_time_either() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    orders = await make_topic(broker)
    wires = Wires(broker)
    for kind in (Kind.SHARED, Kind.KEY_SHARED):
        stream = await consume(orders, f"{SUB}-{kind.value}", kind)
        async with wires.connect() as client:
            await send(client, (b"later", 20), key="a")
            await send(client, (b"now", None), key="b")
        await asyncio.sleep(15)
        assert stream.texts == ["now"]
        await asyncio.sleep(10)  # and the ack timeout is not over
        assert stream.texts == ["now", "later"]


@simulated
async def test_a_client_that_knows_no_such_columns_gets_the_batch_without_them() -> None:
    host = BrokerFixture()
    broker = await host.boot()
    wires = Wires(broker)
    async with wires.connect() as client:
        await send(client, (b"a", -0.0), (b"b", None))
    for known, version in ((0, 1), (1, 1), (2, 2), (3, 2)):
        peer = await Peer.greeted(wires.server, envelope_version=known)
        found = load((await peer.ask(fetch=pb.Fetch(topic=TOPIC, start=0))).body)
        assert found.header.envelope == version and messages(found)[0].payload == b"a"
