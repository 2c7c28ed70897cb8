"""The consumer against a broker that counts its permits, breaks connections and takes topics away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from functools import wraps
from itertools import count
from typing import Any

import pyarrow as pa
import pytest

import pydanube
import pydanube.testing
from pydanube.client.connection import BrokerConnection
from pydanube.client.consumer import Consumer
from pydanube.core.consuming import answers
from pydanube.errors import (
    ClientClosed,
    ConfigError,
    DeadlineExceeded,
    NeverOpened,
    NotServed,
    OffsetOutOfRange,
    SubscriptionBusy,
    Unreachable,
)
from pydanube.formats.batch import Envelope, encode, rows_of, stamp
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import to_wire
from tests.harness.scripted import TOPIC, ScriptedBroker
from tests.support import run

pytestmark = pytest.mark.timeout(30)

Test = Callable[[ScriptedBroker, Consumer], Awaitable[None]]


def scripted(**options: Any) -> Callable[[Test], Callable[[], None]]:
    """Runs a test with a scripted broker and an open consumer of TOPIC."""

    def decorate(test: Test) -> Callable[[], None]:
        async def inside() -> None:
            async with (
                ScriptedBroker() as broker,
                pydanube.connect(broker.url, timeout=5) as client,
                client.consumer(TOPIC, subscription="s", name="c", **options) as consumer,
            ):
                await test(broker, consumer)

        @wraps(test)
        def outside() -> None:
            run(inside())

        del outside.__wrapped__  # type: ignore[attr-defined]  # pytest would take its parameters for fixtures
        return outside

    return decorate


async def receive(consumer: Consumer, number: int) -> list[pydanube.Message]:
    return [await consumer.receive(timeout=5) for _ in range(number)]


def acked(broker: ScriptedBroker) -> list[list[int]]:
    return [list(frame.command.ack.ranges) for frame in broker.heard if frame.kind == "ack"]


# --- receiving ----------------------------------------------------------------------------------------


@scripted()
async def test_messages_have_everything_they_were_sent_with(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(5, [b"a", b"b"], attempt=2)
    first, second = await receive(consumer, 2)
    assert (first.payload, first.offset, first.topic, first.key, first.attempt) == (b"a", 5, TOPIC, "k", 2)
    assert (second.payload, second.offset, second.attributes) == (b"b", 6, {"a": "b"})
    assert first.publish_time == datetime(1970, 1, 1, tzinfo=UTC) and first.producer_name is None


@scripted()
async def test_only_the_rows_in_the_ranges_are_handed_over(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(10, [b"%d" % number for number in range(6)], [11, 13, 15, 16])
    assert [message.offset for message in await receive(consumer, 3)] == [11, 12, 15]


@scripted()
async def test_a_loop_that_was_left_goes_on_where_it_was(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(0, [b"a", b"b", b"c"])
    async for message in consumer:
        assert message.payload == b"a"
        break
    assert [message.payload for message in await receive(consumer, 2)] == [b"b", b"c"]


@scripted()
async def test_tasks_that_receive_together_share_the_messages(broker: ScriptedBroker, consumer: Consumer) -> None:
    tasks = [asyncio.ensure_future(receive(consumer, 5)) for _ in range(4)]
    for first in range(0, 20, 4):
        broker.deliver(first, [b"x"] * 4)
    received = [message.offset for messages in await asyncio.gather(*tasks) for message in messages]
    assert sorted(received) == list(range(20))


@scripted()
async def test_receiving_has_a_deadline_and_loses_nothing(broker: ScriptedBroker, consumer: Consumer) -> None:
    with pytest.raises(DeadlineExceeded):
        await consumer.receive(timeout=0.05)
    broker.deliver(0, [b"a"])
    assert (await consumer.receive()).payload == b"a"


@scripted()
async def test_batches_are_arrow_with_offsets_and_one_ack(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(10, [b"a", b"b", b"c", b"d"], [10, 12, 13, 14])
    async for batch in consumer.batches():
        assert isinstance(batch.arrow, pa.RecordBatch)
        assert batch.arrow.column("offset").to_pylist() == [10, 11, 13]
        assert batch.arrow.column("payload").to_pylist() == [b"a", b"b", b"d"]
        assert len(batch) == 3 and batch.offsets == [range(10, 12), range(13, 14)]
        assert pa.table(batch).num_rows == 3 and pa.record_batch(batch).num_rows == 3  # as Polars and DuckDB take it
        await batch.ack()
        break
    await consumer.flush()
    assert acked(broker) == [[10, 12, 13, 14]]


@scripted()
async def test_closing_ends_a_loop_that_waits(broker: ScriptedBroker, consumer: Consumer) -> None:
    async def loop() -> int:
        return len([message async for message in consumer])

    waiting = asyncio.ensure_future(loop())
    await asyncio.sleep(0.02)
    await consumer.close()
    assert await waiting == 0
    with pytest.raises(ClientClosed):
        await consumer.receive()


@pytest.mark.parametrize(
    ("text", "kind"),
    [("key_shared", pb.KEY_SHARED), ("key-shared", pb.KEY_SHARED), ("KeyShared", pb.KEY_SHARED),
     ("failover", pb.FAILOVER), ("fail-over", pb.FAILOVER), ("shared", pb.SHARED)],
)  # fmt: skip
def test_the_type_of_a_subscription_may_be_spelt_as_commands_do(text: str, kind: int) -> None:
    async def inside() -> None:
        async with (
            ScriptedBroker() as broker,
            pydanube.connect(broker.url) as client,
            client.consumer(TOPIC, subscription="s", type=text),  # type: ignore[arg-type]
        ):
            [asked] = [frame.command.subscribe for frame in broker.heard if frame.kind == "subscribe"]
            assert asked.type == kind

    run(inside())


def test_several_topics_for_one_producer_are_refused_with_a_sentence() -> None:
    async def inside() -> None:
        client = pydanube.connect("danube://127.0.0.1:1")
        several: Any = ["/default/a", "/default/b"]
        assert client.consumer(several, subscription="s").topic == "/default/a, /default/b"
        with pytest.raises(ConfigError, match="one topic, as text"):
            client.producer(several, name="p")
        with pytest.raises(ConfigError, match="type = 'nobody' is not allowed: one of exclusive, shared"):
            client.consumer(TOPIC, subscription="s", type="nobody")  # type: ignore[arg-type]

    run(inside())


def test_a_consumer_that_was_never_opened_says_so_instead_of_ending() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            consumer = client.consumer(TOPIC, subscription="s")

            async def loop() -> None:
                async for _ in consumer:
                    pass

            async def batches() -> None:
                async for _ in consumer.batches():
                    pass

            for use in (loop, batches, consumer.receive, consumer.flush, lambda: consumer.seek("earliest")):
                with pytest.raises(NeverOpened, match=f"the consumer of {TOPIC} was never opened: use async with"):
                    await use()
            async with consumer:
                pass
            with pytest.raises(ClientClosed, match="is closed"):
                await consumer.receive()

    run(inside())


def test_closed_producers_and_consumers_leave_nothing_on_the_connection() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            for _ in range(3):
                async with client.producer(TOPIC), client.consumer(TOPIC, subscription="s"):
                    pass
            connection = await client._brokers.any()
            assert (connection.producers, connection.consumers) == ({}, {})
            assert broker.kinds().count("close_producer") == broker.kinds().count("close_consumer") == 3

    run(inside())


# --- acks ---------------------------------------------------------------------------------------------


@scripted()
async def test_acks_of_one_turn_travel_as_ranges_in_one_command(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(0, [b"x"] * 10)
    received = await receive(consumer, 10)
    for number in (0, 1, 2, 7, 6, 9, 4):
        await received[number].ack()
    [ack] = await broker.until("ack")
    assert list(ack.command.ack.ranges) == [0, 3, 4, 5, 6, 8, 9, 10]


@scripted()
async def test_more_ranges_than_a_command_may_have_need_several(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(0, [b"x"] * 3000)
    for message in await receive(consumer, 3000):
        if message.offset % 2:
            await message.ack()
    await consumer.flush()
    assert [len(ranges) for ranges in acked(broker)] == [2048, 952]


@scripted()
async def test_a_nack_has_its_delay_and_its_reason(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(0, [b"a", b"b", b"c"])
    first, second, third = await receive(consumer, 3)
    await first.nack(1.5, reason="not today")
    await second.nack()
    await third.nack(0)
    nacks = [frame.command.nack for frame in await broker.until("nack", 3)]
    assert [(list(nack.ranges), nack.delay_ms) for nack in nacks] == [([0, 1], 1500), ([1, 2], 0), ([2, 3], 1)]
    assert nacks[0].reason == "not today"


@scripted(window_messages=20_000)
async def test_nacks_of_one_turn_travel_as_ranges_and_none_is_left_out(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    broker.deliver(0, [b"x"] * 12_000)
    for message in await receive(consumer, 12_000):
        await message.nack(0 if message.offset < 10_000 or message.offset % 2 else None)
    await consumer.flush()
    nacks = [frame.command.nack for frame in broker.heard if frame.kind == "nack"]
    assert [(len(nack.ranges), nack.delay_ms) for nack in nacks] == [(2000 + 2, 1), (2000, 0)]
    assert list(nacks[0].ranges[:4]) == [0, 10_000, 10_001, 10_002]


def test_nacks_are_left_out_only_if_there_is_no_connection_and_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "UNSENT_MAX", 3)

    @scripted()
    async def inside(broker: ScriptedBroker, consumer: Consumer) -> None:
        broker.deliver(0, [b"x"] * 5)
        received = await receive(consumer, 5)
        for message in received:
            await message.nack(reason=f"{message.offset}")
        await broker.until("nack", 5)
        await broker.close()
        await asyncio.sleep(0.05)
        broker.heard.clear()
        for message in received:
            await message.nack(reason=f"{message.offset}")
        await broker.listen()
        await broker.until("flow")
        assert [frame.command.nack.reason for frame in broker.heard if frame.kind == "nack"] == ["0", "1", "2"]

    inside()


# --- permits ------------------------------------------------------------------------------------------


@scripted(window_messages=100, window_bytes=1_000_000)
async def test_permits_are_granted_again_as_messages_are_handed_over(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    [subscribe] = await broker.until("subscribe")
    assert (subscribe.command.subscribe.messages, subscribe.command.subscribe.bytes) == (100, 1_000_000)
    for first in range(0, 100, 10):
        broker.deliver(first, [b"x"] * 10)
    await asyncio.sleep(0.05)
    assert "flow" not in broker.kinds()  # nobody has taken them: no room for more
    await receive(consumer, 60)
    flows = [frame.command.flow for frame in await broker.until("flow", 1)]
    await asyncio.sleep(0.05)
    flows = [frame.command.flow for frame in broker.heard if frame.kind == "flow"]
    assert sum(flow.messages for flow in flows) == 30
    assert all(flow.bytes > 0 for flow in flows)


@scripted(window_messages=100, window_bytes=1_000)
async def test_large_messages_are_granted_again_by_their_bytes(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(0, [b"x" * 5000])
    broker.deliver(1, [b"x" * 5000])
    await receive(consumer, 2)
    [flow] = await broker.until("flow")
    assert flow.command.flow.messages == 1 and flow.command.flow.bytes > 5000


# --- lost connections ---------------------------------------------------------------------------------


@scripted(start="earliest")
async def test_a_lost_connection_is_subscribed_again_and_what_nobody_had_is_dropped(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    broker.deliver(0, [b"a", b"b", b"c"])
    await consumer.receive()
    broker.drop()
    again = await broker.until("subscribe", 2)
    assert again[1].command.subscribe.consumer_name == again[0].command.subscribe.consumer_name == "c"
    await asyncio.sleep(0.02)
    broker.deliver(1, [b"b", b"c"], attempt=2)
    received = await receive(consumer, 2)
    assert [(message.offset, message.attempt) for message in received] == [(1, 2), (2, 2)]


@scripted()
async def test_acks_that_found_no_connection_go_out_before_anything_is_delivered(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    broker.deliver(0, [b"a", b"b"])
    received = await receive(consumer, 2)
    await broker.close()
    await asyncio.sleep(0.05)
    for message in received:
        await message.ack()
    await asyncio.sleep(0.05)
    await broker.listen()
    await broker.until("flow")
    kinds = [kind for kind in broker.kinds() if kind in ("subscribe", "ack", "flow")]
    assert kinds == ["subscribe", "subscribe", "ack", "flow"]
    assert acked(broker) == [[0, 2]]
    again = (await broker.until("subscribe", 2))[1].command.subscribe
    assert (again.messages, again.bytes) == (0, 0)


@scripted()
async def test_an_ack_without_an_answer_is_sent_again_on_the_next_connection(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    broker.deliver(0, [b"a", b"b", b"c"])
    received = await receive(consumer, 3)
    silent = broker.answers.pop("ack")
    await received[0].ack()
    await broker.until("ack")
    broker.answers["ack"] = silent
    broker.drop()
    await broker.until("ack", 2)
    assert acked(broker) == [[0, 1], [0, 1]]
    await consumer.flush()


@scripted()
async def test_a_message_that_is_done_and_comes_again_is_acknowledged_and_not_handed_over(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    """The next broker may know nothing of the first delivery, and so not take the ack that came before its own."""
    broker.deliver(0, [b"a", b"b", b"c"])
    received = await receive(consumer, 3)
    del broker.answers["ack"]
    await received[1].ack()
    await broker.until("ack")
    broker.answers["ack"] = broker.on_answered
    broker.drop()
    await broker.until("flow")
    broker.deliver(0, [b"a", b"b", b"c"])
    assert [message.payload for message in await receive(consumer, 2)] == [b"a", b"c"]
    await consumer.flush()
    broker.deliver(1, [b"b"])
    assert (await consumer.receive()).payload == b"b", "once is enough"
    assert acked(broker) == [[1, 2], [1, 2], [1, 2]]


@pytest.mark.parametrize("is_there", [True, False])
def test_a_copy_of_what_is_done_is_not_handed_over_although_the_next_broker_calls_it_the_first(is_there: bool) -> None:
    """The application has the messages when the topic moves, and acknowledges one when its copy is there, or just
    before.
    """

    @scripted()
    async def inside(broker: ScriptedBroker, consumer: Consumer) -> None:
        broker.deliver(0, [b"a", b"b", b"c"])
        received = await receive(consumer, 3)
        broker.drop()
        await broker.until("subscribe", 2)
        await asyncio.sleep(0.02)
        if is_there:
            broker.deliver(0, [b"a", b"b", b"c"])
            await asyncio.sleep(0.02)
            await received[1].ack()
        else:
            del broker.answers["ack"]
            await received[1].ack()
            await broker.until("ack")
            broker.deliver(0, [b"a", b"b", b"c"])
        broker.deliver(3, [b"d"])
        assert [message.payload for message in await receive(consumer, 3)] == [b"a", b"c", b"d"]

    inside()


def test_an_ack_of_a_topic_that_was_made_anew_is_not_taken_for_another_message() -> None:
    """The application has a message of the old one, and answers when the consumer is at the new one."""

    async def inside() -> None:
        async with (
            pydanube.testing.broker(memory=True) as broker,
            pydanube.connect(broker.url, timeout=5) as client,
            pydanube.connect(broker.url, timeout=5) as operator,
        ):

            async def make(*payloads: bytes) -> None:
                await operator.create_topic(TOPIC)
                async with operator.producer(TOPIC) as producer:
                    await asyncio.gather(*map(producer.send, payloads))

            await make(b"a", b"b", b"c")
            async with client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
                received = await receive(consumer, 3)
                await operator.delete_topic(TOPIC)
                await make(b"d", b"e", b"f")
                assert (await consumer.receive(timeout=5)).payload == b"d"
                await received[1].ack()
                await received[2].nack(0.0)
                await consumer.flush()
                assert (await operator.lag(TOPIC, "s")).messages == 3
            async with client.consumer(TOPIC, subscription="s") as consumer:
                assert [message.payload for message in await receive(consumer, 3)] == [b"d", b"e", b"f"]

    run(inside())


async def break_with_an_ack_under_way(broker: ScriptedBroker, consumer: Consumer, epoch: int = 1) -> None:
    """Three messages were delivered, and the middle one acknowledged; there is a new connection."""
    broker.deliver(0, [b"a", b"b", b"c"], epoch=epoch)
    received = await receive(consumer, 3)
    del broker.answers["ack"]
    await received[1].ack()
    await broker.until("ack")
    broker.answers["ack"] = broker.on_answered
    broker.drop()
    await broker.until("flow")


@pytest.mark.parametrize("epoch", [2, 0])
def test_a_new_message_at_an_offset_that_is_done_is_handed_over(epoch: int) -> None:
    """The topic was made anew, perhaps as a non-reliable one."""

    @scripted()
    async def inside(broker: ScriptedBroker, consumer: Consumer) -> None:
        await break_with_an_ack_under_way(broker, consumer)
        broker.deliver(0, [b"d", b"e", b"f"], epoch=epoch)
        assert [message.payload for message in await receive(consumer, 3)] == [b"d", b"e", b"f"]
        assert acked(broker) == [[1, 2], [1, 2]]

    inside()


@scripted()
async def test_nothing_of_a_non_reliable_topic_is_held_back(broker: ScriptedBroker, consumer: Consumer) -> None:
    await break_with_an_ack_under_way(broker, consumer, epoch=0)
    broker.deliver(0, [b"d", b"e", b"f"], epoch=0)
    assert [message.payload for message in await receive(consumer, 3)] == [b"d", b"e", b"f"]
    assert "get_lag" not in broker.kinds()


@scripted()
async def test_what_is_done_is_handed_over_again_if_somebody_else_has_sought_back(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    def subscribe(peer: Any, frame: Any) -> None:
        peer.answer(frame, subscribed=pb.Subscribed(consumer=1, consumer_id=9, next_unacked=1))

    broker.answers["subscribe"] = subscribe
    await break_with_an_ack_under_way(broker, consumer)
    broker.deliver(0, [b"a", b"b", b"c"])  # below what the broker knew to be done
    assert [message.payload for message in await receive(consumer, 3)] == [b"a", b"b", b"c"]


@pytest.mark.parametrize(("cursor", "payloads"), [(1, [b"b", b"c"]), (0, [b"c"])])
def test_what_is_done_is_held_back_only_if_the_broker_has_not_taken_the_ack(cursor: int, payloads: list[bytes]) -> None:
    @scripted()
    async def inside(broker: ScriptedBroker, consumer: Consumer) -> None:
        broker.answers["get_lag"] = lambda peer, frame: peer.answer(frame, lag=pb.Lag(cursor=cursor))
        await break_with_an_ack_under_way(broker, consumer)
        kinds = [kind for kind in broker.kinds() if kind in ("ack", "get_lag", "flow")]
        assert kinds == ["ack", "ack", "get_lag", "flow"], "asked behind the ack"
        broker.deliver(1, [b"b", b"c"])
        assert [message.payload for message in await receive(consumer, len(payloads))] == payloads

    inside()


@scripted()
async def test_an_ack_that_comes_while_subscribing_is_remembered_and_not_asked_about(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    """The permits are there already, so what is acknowledged may be under way behind the answer."""
    broker.deliver(0, [b"a", b"b"])
    first, _ = await receive(consumer, 2)
    del broker.answers["subscribe"]
    broker.drop()
    [_, subscribe] = await broker.until("subscribe", 2)
    await first.ack()
    broker.on_subscribe(broker.peers[-1], subscribe)
    await broker.until("ack")
    broker.deliver(0, [b"a", b"b"], attempt=2)
    assert (await consumer.receive()).payload == b"b"
    assert "get_lag" not in broker.kinds()


@pytest.mark.parametrize("what", ["made anew", "sought back", "sought back meanwhile"])
def test_a_connection_that_broke_hides_nothing_that_a_broker_delivers_on_purpose(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a real broker, whose epochs and cursors tell the client."""

    async def inside() -> None:
        async with (
            pydanube.testing.broker(memory=True) as broker,
            pydanube.connect(broker.url, timeout=5) as client,
            pydanube.connect(broker.url, timeout=5) as operator,
        ):

            async def publish(*payloads: bytes) -> None:
                async with operator.producer(TOPIC) as producer:
                    await asyncio.gather(*map(producer.send, payloads))

            await operator.create_topic(TOPIC)
            await publish(b"a", b"b", b"c")
            async with client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
                received = await receive(consumer, 3)
                await received[0].ack()
                await consumer.flush()
                [lane] = consumer._lanes
                find, may_go = lane._find, asyncio.Event()

                async def find_later() -> BrokerConnection:
                    await may_go.wait()
                    return await find()

                monkeypatch.setattr(lane, "_find", find_later)
                assert lane.connection is not None
                lane.connection.end(Unreachable(broker.url, "the cable was pulled"))
                for message in received[1:]:
                    await message.ack()
                if what == "made anew":
                    await operator.delete_topic(TOPIC)
                    await operator.create_topic(TOPIC)
                    await publish(b"d", b"e", b"f")
                    may_go.set()
                    assert [message.payload for message in await receive(consumer, 3)] == [b"d", b"e", b"f"]
                else:
                    if what == "sought back":
                        may_go.set()
                        await consumer.flush()
                    await operator.seek(TOPIC, "s", 1)
                    may_go.set()
                    assert [message.payload for message in await receive(consumer, 2)] == [b"b", b"c"]

    run(inside())


@scripted()
async def test_an_ack_that_cannot_be_taken_just_now_is_sent_again(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(0, [b"a"])
    (message,) = await receive(consumer, 1)
    refusals = iter([NotServed(TOPIC, "it is about to move")])

    def ack(peer: Any, frame: Any) -> None:
        refusal = next(refusals, None)
        peer.answer(frame, done=pb.Done()) if refusal is None else peer.refuse(frame, refusal)

    broker.answers["ack"] = ack
    await message.ack()
    await consumer.flush()
    assert acked(broker) == [[0, 1], [0, 1]]


def test_an_ack_that_is_refused_for_good_is_a_warning_although_nobody_flushes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @scripted()
    async def inside(broker: ScriptedBroker, consumer: Consumer) -> None:
        broker.deliver(0, [b"a", b"b"])
        first, second = await receive(consumer, 2)
        broker.answers["ack"] = lambda peer, frame: peer.refuse(frame, OffsetOutOfRange(TOPIC, 0, 0, 0))
        await first.ack()
        await broker.until("ack")
        await asyncio.sleep(0.05)
        await second.ack()
        with pytest.raises(OffsetOutOfRange):
            await consumer.flush()
        assert acked(broker) == [[0, 1], [1, 2]], "what is refused for good is not sent again"

    with caplog.at_level("WARNING"):
        inside()
    refused = [record for record in caplog.records if record.message == "ack refused"]
    assert len(refused) == 2 and "offset 0 of" in getattr(refused[0], "why", "")


@scripted()
async def test_flushing_waits_for_the_brokers_word_and_no_longer_than_its_deadline(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    broker.deliver(0, [b"a"])
    (message,) = await receive(consumer, 1)
    del broker.answers["ack"]
    await message.ack()
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await consumer.flush(timeout=0.05)
    [ack] = await broker.until("ack")
    broker.peers[-1].answer(ack, done=pb.Done())
    await consumer.flush()


@scripted()
async def test_one_who_gives_up_flushing_does_not_stop_another(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(0, [b"a"])
    (message,) = await receive(consumer, 1)
    del broker.answers["ack"]
    await message.ack()
    one, other = asyncio.ensure_future(consumer.flush()), asyncio.ensure_future(consumer.flush())
    [ack] = await broker.until("ack")
    one.cancel()
    await asyncio.wait([one])
    broker.peers[-1].answer(ack, done=pb.Done())
    await other


@scripted()
async def test_flushing_raises_what_the_broker_refuses_for_good(broker: ScriptedBroker, consumer: Consumer) -> None:
    broker.deliver(0, [b"a", b"b"])
    first, second = await receive(consumer, 2)
    broker.answers["nack"] = lambda peer, frame: peer.refuse(frame, SubscriptionBusy(TOPIC, "s", "c"))
    await first.nack()
    await second.ack()
    with pytest.raises(SubscriptionBusy):
        await consumer.flush()
    await consumer.flush()


@scripted()
async def test_a_moved_topic_is_subscribed_where_it_is_now(broker: ScriptedBroker, consumer: Consumer) -> None:
    async with ScriptedBroker() as other:
        broker.push(moved=pb.Moved(topic=TOPIC, stream_url=other.url))
        await other.until("subscribe")
        await asyncio.sleep(0.02)
        other.deliver(3, [b"there"])
        assert (await consumer.receive()).payload == b"there"


@scripted()
async def test_a_consumer_whose_place_was_taken_says_so_and_does_not_come_back(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    error = to_wire(SubscriptionBusy(TOPIC, "s", "c"), consumer=1)
    broker.push(error=error)
    lengths = set()
    for _ in range(3):
        with pytest.raises(SubscriptionBusy) as caught:
            await consumer.receive()
        lengths.add(len(caught.traceback))
    assert len(lengths) == 1, "what is raised again has a traceback of its own"
    await asyncio.sleep(0.2)
    assert broker.kinds().count("subscribe") == 1


@scripted()
async def test_nonsense_from_the_broker_ends_the_connection_and_a_new_one_goes_on(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    broker.peers[-1].transport.write(b"\xff" * 100)
    await broker.until("subscribe", 2)
    await asyncio.sleep(0.02)
    broker.deliver(0, [b"a"])
    assert (await consumer.receive()).payload == b"a"


# --- places -------------------------------------------------------------------------------------------


@scripted()
async def test_seeking_drops_what_was_delivered_before(broker: ScriptedBroker, consumer: Consumer) -> None:
    def seek(peer: Any, frame: Any) -> None:
        broker.deliver(7, [b"stale"])
        peer.answer(frame, offset_found=pb.OffsetFound(offset=2))
        broker.deliver(2, [b"fresh"])

    broker.answers["seek"] = seek
    broker.deliver(5, [b"a", b"b"])
    assert (await consumer.receive()).payload == b"a"
    await consumer.seek(2)
    assert (await consumer.receive()).payload == b"fresh"


@scripted()
async def test_seeking_is_tried_again_while_the_topic_is_moving(broker: ScriptedBroker, consumer: Consumer) -> None:
    refusals = iter([NotServed(TOPIC, "it is about to move")])

    def seek(peer: Any, frame: Any) -> None:
        refusal = next(refusals, None)
        if refusal is None:
            peer.answer(frame, offset_found=pb.OffsetFound(offset=2))
        else:
            peer.refuse(frame, refusal)

    broker.answers["seek"] = seek
    await consumer.seek(2)
    assert broker.kinds().count("seek") == 2
    broker.answers["seek"] = lambda peer, frame: peer.refuse(frame, NotServed(TOPIC, "it is about to move"))
    with pytest.raises(DeadlineExceeded, match="about to move"):
        await consumer.seek(2, timeout=0.3)


@pytest.mark.parametrize(
    ("start", "place"),
    [
        ("earliest", pb.Place(edge=pb.EARLIEST)),
        ("latest", pb.Place(edge=pb.LATEST)),
        (42, pb.Place(offset=42)),
        (datetime(1970, 1, 2, 0, 0, 0, 5, tzinfo=UTC), pb.Place(time_us=86_400_000_005)),
    ],
)
def test_a_subscription_starts_where_it_is_told(start: Any, place: pb.Place) -> None:
    async def inside() -> None:
        async with (
            ScriptedBroker() as broker,
            pydanube.connect(broker.url) as client,
            client.consumer(TOPIC, subscription="s", start=start),
        ):
            [subscribe] = await broker.until("subscribe")
            assert subscribe.command.subscribe.start == place

    run(inside())


@pytest.mark.parametrize("start", ["first", -1, True, 1.5, None])
def test_a_place_that_is_none_is_refused(start: Any) -> None:
    async def inside() -> None:
        client = pydanube.connect("danube://127.0.0.1:1")
        with pytest.raises(ConfigError):
            client.consumer(TOPIC, subscription="s", start=start)

    run(inside())


def test_partitions_share_the_window_and_one_loop() -> None:
    async def inside() -> None:
        async with (
            ScriptedBroker(partitions=3) as broker,
            pydanube.connect(broker.url) as client,
            client.consumer(TOPIC, subscription="s", window_messages=300) as consumer,
        ):
            subscribed = await broker.until("subscribe", 3)
            assert [frame.command.subscribe.messages for frame in subscribed] == [100] * 3
            offsets = count()
            for handle in (1, 2, 3):
                broker.deliver(next(offsets), [b"x"], consumer=handle)
            received = await receive(consumer, 3)
            for message in received:
                await message.ack()
            acks = await broker.until("ack", 3)
            assert {message.topic for message in received} == {f"{TOPIC}-part-{n}" for n in range(3)}
            assert {frame.command.ack.consumer for frame in acks} == {1, 2, 3}

    run(inside())


def deliver_sought(broker: ScriptedBroker, first: int, payloads: list[bytes], seeks: int) -> None:
    batch = stamp(
        encode(rows_of([Envelope(each) for each in payloads]), topic=TOPIC), base_offset=first, epoch=1, append_time=1
    )
    deliver = pb.Deliver(consumer=1, ranges=[first, first + len(payloads)], attempt=1, seeks=seeks)
    broker.peers[-1].send(pb.Command(deliver=deliver), *batch.buffers)


@scripted()
async def test_an_ack_that_a_seek_made_void_hides_nothing_on_the_next_connection(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    broker.answers["seek"] = lambda peer, frame: peer.answer(frame, offset_found=pb.OffsetFound(offset=0, seeks=1))
    broker.answers["ack"] = lambda peer, frame: None  # its answer is lost with the connection
    deliver_sought(broker, 0, [b"a", b"b"], 0)
    for each in await receive(consumer, 2):
        await each.ack()
    await broker.until("ack")
    await consumer.seek(0)
    broker.answers["ack"] = lambda peer, frame: peer.answer(frame, done=pb.Done())

    def subscribe(peer: Any, frame: Any) -> None:
        broker.on_subscribe(peer, frame)
        deliver_sought(broker, 0, [b"a", b"b"], 1)

    broker.answers["subscribe"] = subscribe
    broker.drop()
    assert [message.payload for message in await receive(consumer, 2)] == [b"a", b"b"]


@scripted()
async def test_what_was_on_its_way_when_a_seek_was_answered_is_not_shown(
    broker: ScriptedBroker, consumer: Consumer
) -> None:
    def seek(peer: Any, frame: Any) -> None:
        peer.answer(frame, offset_found=pb.OffsetFound(offset=2, seeks=1))
        deliver_sought(broker, 7, [b"stale"], 0)
        deliver_sought(broker, 2, [b"fresh"], 1)

    broker.answers["seek"] = seek
    deliver_sought(broker, 5, [b"a", b"b"], 0)
    assert (await consumer.receive()).payload == b"a"
    await consumer.seek(2)
    assert (await consumer.receive()).payload == b"fresh"
