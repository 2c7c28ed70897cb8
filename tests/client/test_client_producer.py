"""The producer against a broker that holds answers, refuses, and breaks connections."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

import pytest

import pydanube
from pydanube.client.producer import Producer
from pydanube.core.names import partition_of_key
from pydanube.core.producing.machine import RESEND_SECONDS
from pydanube.errors import (
    BufferFull,
    ClientClosed,
    DeadlineExceeded,
    DiskFull,
    InvalidBatch,
    LogFull,
    LogStopped,
    MessageTooLarge,
    NeverOpened,
    NotServed,
    OutOfSequence,
    ProducerFenced,
    ProtocolViolation,
    RateLimited,
    SessionUnknown,
    Unreachable,
)
from pydanube.formats.batch import messages
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import to_wire
from tests.harness.scripted import PRODUCER_ID, TOPIC, ScriptedBroker
from tests.support import run, settle

pytestmark = pytest.mark.timeout(30)

Test = Callable[[ScriptedBroker, Producer], Awaitable[None]]


def scripted(*, reliable: bool = True, **options: Any) -> Callable[[Test], Callable[[], None]]:
    """Runs a test with a scripted broker and an open producer of TOPIC."""

    def decorate(test: Test) -> Callable[[], None]:
        async def inside() -> None:
            async with ScriptedBroker(reliable=reliable) as broker, pydanube.connect(broker.url, timeout=5) as client:
                producer = client.producer(TOPIC, name="p", reliable=reliable, **options)
                short = producer._settings.timeout
                object.__setattr__(producer._settings, "timeout", 5.0)  # a busy machine may need longer to open it
                await producer.open()
                object.__setattr__(producer._settings, "timeout", short)
                try:
                    await test(broker, producer)
                finally:
                    await producer._let_go()

        @wraps(test)
        def outside() -> None:
            run(inside())

        del outside.__wrapped__  # type: ignore[attr-defined]  # pytest would take its parameters for fixtures
        return outside

    return decorate


def sends(producer: Producer, *payloads: bytes) -> list[asyncio.Task[pydanube.Receipt]]:
    return [asyncio.ensure_future(producer.send(payload)) for payload in payloads]


# --- batching -----------------------------------------------------------------------------------------


@scripted()
async def test_a_receipt_has_offset_epoch_and_durability(broker: ScriptedBroker, producer: Producer) -> None:
    await producer.send(b"a")
    assert await producer.send(b"b") == pydanube.Receipt(TOPIC, 1, 1, "fsync", False)


@scripted()
async def test_what_is_sent_in_one_turn_of_the_loop_is_one_batch(broker: ScriptedBroker, producer: Producer) -> None:
    receipts = await asyncio.gather(*sends(producer, b"a", b"b", b"c"))
    assert [receipt.offset for receipt in receipts] == [0, 1, 2]
    assert [batch.header.rows for batch in broker.produced()] == [3]


@scripted()
async def test_what_accumulates_while_batches_are_in_flight_is_the_next_batch(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.hold()
    tasks = []
    for count in range(1, 8):
        tasks += sends(producer, b"%d" % count)
        await broker.until("produce", min(count, 2))
    await asyncio.sleep(0.05)
    assert [batch.header.rows for batch in broker.produced()] == [1, 1]
    broker.release()
    await asyncio.gather(*tasks)
    assert [batch.header.rows for batch in broker.produced()] == [1, 1, 5]
    assert broker.payloads() == [b"%d" % count for count in range(1, 8)]


@scripted(batch_messages=2)
async def test_full_batches_go_out_eight_at_a_time_and_no_more(broker: ScriptedBroker, producer: Producer) -> None:
    broker.hold()
    tasks = sends(producer, *(b"%d" % number for number in range(40)))
    await broker.until("produce", 8)
    await asyncio.sleep(0.05)
    assert len(broker.produced()) == 8
    broker.release()
    await asyncio.gather(*tasks)
    assert broker.payloads() == [b"%d" % number for number in range(40)]
    assert {batch.header.rows for batch in broker.produced()} == {2}


@scripted(batch_bytes=1000)
async def test_a_batch_ends_before_it_is_larger_than_its_bound(broker: ScriptedBroker, producer: Producer) -> None:
    await asyncio.gather(*sends(producer, *[b"x" * 300] * 5))
    assert [batch.header.rows for batch in broker.produced()] == [2, 2, 1]


@scripted(linger=0.7)
async def test_lingering_waits_for_more_and_flushing_does_not(broker: ScriptedBroker, producer: Producer) -> None:
    producer.send_nowait(b"a")
    await asyncio.sleep(0.05)
    producer.send_nowait(b"b")
    assert broker.produced() == []
    await producer.flush()
    assert broker.payloads() == [b"a", b"b"] and len(broker.produced()) == 1
    receipt = await producer.send(b"c")  # nobody flushes: it goes when its time is over
    assert receipt.offset == 2


@scripted(compression="zstd")
async def test_keys_attributes_and_names_survive_compression(broker: ScriptedBroker, producer: Producer) -> None:
    payload = b"x" * 20_000
    tasks = [asyncio.ensure_future(producer.send(payload, key="k", attributes={"a": "b"}))]
    tasks += sends(producer, payload)
    await asyncio.gather(*tasks)
    [batch] = broker.produced()
    assert batch.header.codec == 2
    keyed, plain = messages(batch)
    assert (keyed.routing_key, keyed.attributes, keyed.producer_name) == ("k", {"a": "b"}, "p")
    assert (plain.routing_key, plain.attributes, plain.producer_name) == (None, {}, "p")


@scripted(batch_bytes=16 * 1024 * 1024, compression="lz4")
async def test_large_batches_are_encoded_elsewhere_and_stay_in_order(
    broker: ScriptedBroker, producer: Producer
) -> None:
    for number in range(30):
        producer.send_nowait(b"%02d" % number + bytes(100_000))
        await asyncio.sleep(0)
    await producer.flush()
    assert [payload[:2] for payload in broker.payloads()] == [b"%02d" % number for number in range(30)]


# --- back-pressure and bounds -------------------------------------------------------------------------


@scripted(buffer_bytes=1000)
async def test_a_full_buffer_makes_send_wait_and_send_nowait_refuse(broker: ScriptedBroker, producer: Producer) -> None:
    broker.hold()
    for _ in range(10):
        try:
            producer.send_nowait(b"x" * 200)
        except BufferFull:
            break
    with pytest.raises(BufferFull):
        producer.send_nowait(b"y")
    [waiting] = sends(producer, b"y")
    await asyncio.sleep(0.05)
    assert not waiting.done() and producer.buffered_bytes < 1400
    broker.release()
    await waiting
    await producer.flush()
    assert producer.buffered_bytes == 0
    assert broker.payloads()[-1] == b"y"


@scripted(buffer_bytes=100)
async def test_those_who_wait_for_room_go_in_the_order_of_arrival(broker: ScriptedBroker, producer: Producer) -> None:
    await asyncio.gather(*sends(producer, *(b"%02d" % number for number in range(50))))
    assert broker.payloads() == [b"%02d" % number for number in range(50)]


@scripted(buffer_bytes=1000)
async def test_those_who_were_woken_and_found_no_room_keep_their_order(
    broker: ScriptedBroker, producer: Producer
) -> None:
    """Room for many small messages is room for one large one."""
    await asyncio.gather(*sends(producer, *(bytes([number]) * 1000 for number in range(8))))
    assert [payload[0] for payload in broker.payloads()] == list(range(8))


@scripted(buffer_bytes=1)
async def test_who_is_cancelled_when_he_has_just_got_room_leaves_it_to_the_next(
    broker: ScriptedBroker, producer: Producer
) -> None:
    async def one() -> None:
        await producer.send(b"1")
        second.cancel()  # who was woken in this turn

    broker.hold()
    first = asyncio.ensure_future(one())
    await broker.until("produce")
    second, third = sends(producer, b"2", b"3")
    await asyncio.sleep(0)
    broker.release()
    await first
    async with asyncio.timeout(2):
        assert (await third).offset == 1
    assert second.cancelled() and broker.payloads() == [b"1", b"3"]


@scripted(buffer_bytes=1)
async def test_those_who_wait_for_room_hear_at_once_that_the_producer_has_failed(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.refusals.append(ProducerFenced(PRODUCER_ID, 1, 2))
    async with asyncio.timeout(2):
        results = await asyncio.gather(*sends(producer, b"1", b"2", b"3", b"4"), return_exceptions=True)
    assert {type(result) for result in results} == {ProducerFenced}


@scripted(buffer_bytes=100)
async def test_waiting_for_room_has_a_deadline(broker: ScriptedBroker, producer: Producer) -> None:
    broker.hold()
    producer.send_nowait(b"x" * 100)
    with pytest.raises(DeadlineExceeded, match="room"):
        await producer.send(b"y", timeout=0.05)


@scripted()
async def test_a_message_that_is_no_bytes_or_too_large_is_refused_alone(
    broker: ScriptedBroker, producer: Producer
) -> None:
    with pytest.raises(TypeError):
        await producer.send("text")  # type: ignore[arg-type]
    with pytest.raises(MessageTooLarge):
        await producer.send(bytes(61 * 1024 * 1024))
    with pytest.raises(UnicodeEncodeError):
        await producer.send(b"x", key="\ud800")
    [innocent] = sends(producer, b"fine too")
    await asyncio.sleep(0)
    with pytest.raises(TypeError, match="a key is text, not bytes"):
        await producer.send(b"x", key=b"abc")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an attribute is text, not int"):
        producer.send_nowait(b"x", attributes={"a": 5})  # type: ignore[dict-item]
    assert (await innocent).offset == 0
    assert (await producer.send(bytearray(b"fine"))).offset == 1


# --- deadlines ----------------------------------------------------------------------------------------


@scripted(timeout=0.2)
async def test_a_message_without_a_receipt_in_time_raises(broker: ScriptedBroker, producer: Producer) -> None:
    broker.hold()
    with pytest.raises(DeadlineExceeded) as caught:
        await producer.send(b"x")
    assert caught.value.retryable
    broker.release()
    assert (await producer.send(b"y", timeout=5)).offset == 1  # it was sent, so it is stored all the same


@scripted(timeout=0.2)
async def test_a_message_that_was_never_sent_is_not_sent_after_its_deadline(
    broker: ScriptedBroker, producer: Producer
) -> None:
    await broker.close()
    await asyncio.sleep(0.05)  # the client has noticed: what it takes now is not sent
    producer.send_nowait(b"kept")
    with pytest.raises(DeadlineExceeded):
        await producer.send(b"late")
    await broker.listen()
    await producer.flush(timeout=5)
    assert broker.payloads() == [b"kept"]


@scripted()
async def test_one_call_may_have_a_deadline_of_its_own(broker: ScriptedBroker, producer: Producer) -> None:
    broker.hold()
    with pytest.raises(DeadlineExceeded, match=r"0\.05 s"):
        await producer.send(b"x", timeout=0.05)
    with pytest.raises(DeadlineExceeded, match="flushing"):
        await producer.flush(timeout=0.05)


@scripted(timeout=0.1)
async def test_one_call_may_have_a_longer_deadline_than_the_producer(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.hold()
    sent = asyncio.ensure_future(producer.send(b"sent", timeout=5))
    await broker.until("produce")
    await asyncio.sleep(0.3)
    broker.release()
    assert (await sent).offset == 0
    await broker.close()
    await asyncio.sleep(0.05)
    kept = asyncio.ensure_future(producer.send(b"kept", timeout=5))
    too_short = asyncio.ensure_future(producer.send(b"late", timeout=0.02))
    (late,) = sends(producer, b"late")
    await asyncio.sleep(0.3)
    await broker.listen()
    assert (await kept).offset == 1
    for each in (late, too_short):
        with pytest.raises(DeadlineExceeded):
            await each
    assert broker.payloads() == [b"sent", b"kept"]


@scripted(timeout=0.1)
async def test_a_deadline_holds_while_another_thread_encodes(broker: ScriptedBroker, producer: Producer) -> None:
    lane, is_slow_no_more = producer._lanes[0], threading.Event()
    encode = lane._encode

    def slowly(draft: Any) -> Any:
        is_slow_no_more.wait(5)
        return encode(draft)

    lane._encode = slowly  # type: ignore[assignment, method-assign]
    try:
        async with asyncio.timeout(2):
            with pytest.raises(DeadlineExceeded):
                await producer.send(bytes(2 * 1024 * 1024))
    finally:
        is_slow_no_more.set()
    await producer.flush(timeout=5)


@scripted(timeout=0.1)
async def test_flush_waits_for_what_comes_after_messages_that_were_too_late(
    broker: ScriptedBroker, producer: Producer
) -> None:
    await broker.close()
    await asyncio.sleep(0.05)
    [late] = sends(producer, b"late")
    await asyncio.sleep(0)
    await producer.flush(timeout=5)  # which ends when they are given up
    with pytest.raises(DeadlineExceeded):
        await late
    producer.send_nowait(b"later")
    await broker.listen()
    await producer.flush(timeout=5)
    assert broker.payloads() == [b"later"]


# --- lost connections ---------------------------------------------------------------------------------


@scripted(batch_messages=1)
async def test_batches_without_a_receipt_are_sent_again_unchanged_and_in_order(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.hold()
    tasks = sends(producer, *(b"%d" % number for number in range(12)))
    first = await broker.until("produce", 8)
    broker.is_holding = False
    broker.drop()
    receipts = await asyncio.gather(*tasks)
    again = [frame for frame in broker.heard if frame.kind == "produce"][8:16]
    assert [bytes(frame.body) for frame in again] == [bytes(frame.body) for frame in first]
    assert [receipt.offset for receipt in receipts] == list(range(12))
    assert broker.payloads() == [b"%d" % number for number in range(12)]
    opens = [frame.command.open_producer.session for frame in broker.heard if frame.kind == "open_producer"]
    assert opens[0] == 0 and opens[1] != 0


@scripted(batch_messages=1)
async def test_a_lost_receipt_does_not_store_a_message_twice(broker: ScriptedBroker, producer: Producer) -> None:
    broker.loses_receipts = True
    tasks = sends(producer, b"a", b"b", b"c")
    await broker.until("produce", 3)
    await settle()
    broker.loses_receipts = False
    broker.drop()
    receipts = await asyncio.gather(*tasks)
    assert [(receipt.offset, receipt.duplicate) for receipt in receipts] == [(0, True), (1, True), (2, True)]
    assert broker.payloads() == [b"a", b"b", b"c"]


@scripted()
async def test_a_broker_that_is_away_for_a_while_costs_nothing_but_time(
    broker: ScriptedBroker, producer: Producer
) -> None:
    await broker.close()
    tasks = sends(producer, b"a", b"b")
    await asyncio.sleep(0.3)
    await broker.listen()
    assert [receipt.offset for receipt in await asyncio.gather(*tasks)] == [0, 1]


@scripted()
async def test_a_moved_topic_is_opened_again_where_it_is_now(broker: ScriptedBroker, producer: Producer) -> None:
    async with ScriptedBroker() as other:
        other.sessions = broker.sessions
        await producer.send(b"a")
        broker.hold()
        [task] = sends(producer, b"b")
        await broker.until("produce", 2)
        broker.push(moved=pb.Moved(topic=TOPIC, stream_url=other.url))
        await task
        assert other.payloads() == [b"b"]
        [opened] = await other.until("open_producer")
        assert opened.command.open_producer.session == broker.sessions.get(PRODUCER_ID).session  # type: ignore[union-attr]


@scripted()
async def test_goodbye_sends_nothing_more_there_and_goes_on_elsewhere(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.push(goodbye=pb.Goodbye(reason="restart"))
    await asyncio.sleep(0.02)
    assert (await producer.send(b"a")).offset == 0
    assert broker.connections == 2


@scripted(reliable=False)
async def test_a_non_reliable_message_in_flight_is_not_sent_twice(broker: ScriptedBroker, producer: Producer) -> None:
    assert (await producer.send(b"first")) == pydanube.Receipt(TOPIC, 0, 1, "memory", False)
    broker.hold()
    [lost] = sends(producer, b"lost")
    await broker.until("produce", 2)
    broker.is_holding = False
    broker.drop()
    with pytest.raises(Unreachable):
        await lost
    await producer.send(b"later")
    assert broker.payloads() == [b"first", b"later"]


@scripted(reliable=False, batch_messages=1)
async def test_a_non_reliable_message_that_was_refused_is_sent_again_after_a_lost_connection(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.hold()
    refused, lost = sends(producer, b"refused", b"lost")
    await broker.until("produce", 2)
    peer, frame = broker.held.popleft()
    peer.refuse(frame, RateLimited(TOPIC, 1))
    await asyncio.sleep(0.02)
    broker.is_holding = False
    broker.drop()
    await refused
    with pytest.raises(Unreachable):
        await lost
    assert broker.payloads() == [b"refused"]


@scripted()
async def test_a_connection_that_ends_for_somebody_elses_mistake_is_replaced(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.hold()
    [task] = sends(producer, b"a")
    await broker.until("produce")
    broker.held.clear()
    broker.is_holding = False
    broker.push(error=to_wire(ProtocolViolation("permits that are none")))
    assert (await task).offset == 0
    assert broker.connections == 2


@scripted()
async def test_a_batch_that_ends_every_connection_is_not_sent_for_ever(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.answers["produce"] = lambda peer, frame: peer.send(pb.Command(error=to_wire(ProtocolViolation("no"))))
    with pytest.raises(ProtocolViolation):
        await producer.send(b"a")
    assert broker.kinds().count("produce") == 2


# --- refusals -----------------------------------------------------------------------------------------


@scripted(batch_messages=1)
async def test_a_retryable_refusal_is_sent_again_with_all_that_followed(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.refusals.extend([None, DiskFull("data")])
    receipts = await asyncio.gather(*sends(producer, *(b"%d" % number for number in range(6))))
    assert [receipt.offset for receipt in receipts] == list(range(6))
    assert broker.payloads() == [b"%d" % number for number in range(6)]
    assert broker.kinds().count("open_producer") == 1


@scripted(batch_messages=1, timeout=0.8)
async def test_who_waits_in_vain_for_a_full_log_is_told_why(broker: ScriptedBroker, producer: Producer) -> None:
    broker.refusals.extend([LogFull(1024, 512, "Uploads have failed for 312 s")] * 1000)
    [lost] = sends(producer, b"a")
    with pytest.raises(DeadlineExceeded, match="Uploads have failed for 312 s"):
        await lost
    assert broker.kinds().count("open_producer") == 1


@scripted(batch_messages=1)
async def test_a_topic_that_is_not_served_is_looked_up_again(broker: ScriptedBroker, producer: Producer) -> None:
    broker.refusals.append(NotServed(TOPIC, "moving"))
    await asyncio.gather(*sends(producer, b"a", b"b", b"c"))
    assert broker.payloads() == [b"a", b"b", b"c"]
    assert broker.kinds().count("open_producer") == 2


@scripted(batch_messages=1)
async def test_a_batch_refused_for_good_fails_alone_and_the_others_close_the_gap(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.refusals.extend([None, MessageTooLarge(9, 8)])
    results = await asyncio.gather(*sends(producer, b"a", b"b", b"c", b"d"), return_exceptions=True)
    assert isinstance(results[1], MessageTooLarge)
    assert broker.payloads() == [b"a", b"c", b"d"]
    assert [batch.header.first_sequence for batch in broker.stored[TOPIC]] == [0, 1, 2]
    assert (await producer.send(b"e")).offset == 3


@scripted(batch_messages=1)
async def test_a_batch_whose_fate_a_stopped_log_does_not_know_is_sent_again_unchanged(
    broker: ScriptedBroker, producer: Producer
) -> None:
    """It was stored, as the broker sees when it is started again with a new disk."""

    def stop(peer: Any, frame: Any) -> None:
        broker.judge(peer, frame)
        peer.refuse(frame, LogStopped("it failed twice"))
        broker.answers["produce"] = broker.on_produce
        broker.loses_receipts = False
        broker.refusals.append(LogStopped("it failed twice"))  # the batch behind it

    broker.loses_receipts = True
    broker.answers["produce"] = stop
    first, second = await asyncio.gather(*sends(producer, b"a", b"b"))
    assert (first.offset, first.duplicate, second.offset) == (0, True, 1)
    assert broker.payloads() == [b"a", b"b"] and broker.kinds().count("open_producer") == 2


@scripted(batch_messages=1, timeout=0.8)
async def test_who_waits_in_vain_for_a_stopped_log_is_told_why(broker: ScriptedBroker, producer: Producer) -> None:
    broker.refusals.extend([LogStopped("it failed twice")] * 1000)
    with pytest.raises(DeadlineExceeded, match="replace the disk and restart"):
        await producer.send(b"a")


@scripted(batch_messages=1, idempotent=False)
async def test_without_a_session_a_batch_is_taken_behind_one_that_was_refused(
    broker: ScriptedBroker, producer: Producer
) -> None:
    connection = producer._lanes[0].connection
    broker.refusals.extend([RateLimited(TOPIC, 1), None, RateLimited(TOPIC, 1), MessageTooLarge(9, 8), None])
    broker.refusals.extend([None, MessageTooLarge(9, 8)])
    results = await asyncio.gather(*sends(producer, b"a", b"b", b"c", b"d", b"e"), return_exceptions=True)
    assert isinstance(results[2], MessageTooLarge)
    offsets = [result.offset for result in results if isinstance(result, pydanube.Receipt)]
    assert offsets == [2, 0, 3, 1] and broker.payloads() == [b"b", b"e", b"a", b"d"]
    assert producer._lanes[0].connection is connection and producer.buffered_bytes == 0


@scripted(batch_messages=1)
async def test_a_receipt_behind_a_refusal_is_a_mistake_in_a_session(broker: ScriptedBroker, producer: Producer) -> None:
    broker.hold()
    tasks = sends(producer, b"a", b"b")
    [first, second] = await broker.until("produce", 2)
    broker.peers[0].refuse(first, RateLimited(TOPIC, 1))
    broker.peers[0].answer(second, receipt=pb.Receipt(rows=1))
    for each in await asyncio.gather(*tasks, return_exceptions=True):
        assert isinstance(each, ProtocolViolation)


@scripted()
async def test_flush_tells_what_became_of_a_message_that_nobody_waited_for(
    broker: ScriptedBroker, producer: Producer
) -> None:
    broker.refusals.append(MessageTooLarge(9, 8))
    producer.send_nowait(b"a")
    with pytest.raises(MessageTooLarge):
        await producer.flush()
    await producer.flush()  # once


@scripted()
async def test_who_is_cancelled_while_he_sends_does_not_end_the_connection_of_others(
    broker: ScriptedBroker, producer: Producer
) -> None:
    """His receipt still comes, before the producer is closed, and nobody waits for it any more."""

    def answer_both(peer: Any, frame: Any) -> None:
        broker.release()
        peer.answer(frame, done=pb.Done())

    broker.answers["close_producer"] = answer_both
    broker.hold()
    connection = producer._lanes[0].connection
    (sending,) = sends(producer, b"a")
    await broker.until("produce")
    sending.cancel()
    await producer.__aexit__(asyncio.CancelledError, asyncio.CancelledError(), None)
    assert broker.payloads() == [b"a"]
    assert connection is not None and connection.ended is None


@scripted()
async def test_a_fenced_producer_stops_and_says_so(broker: ScriptedBroker, producer: Producer) -> None:
    broker.sessions.opened(PRODUCER_ID, broker.sessions.next_session(PRODUCER_ID, 2))
    with pytest.raises(ProducerFenced):
        await producer.send(b"a")
    with pytest.raises(ProducerFenced):
        await producer.send(b"b")
    assert broker.kinds().count("open_producer") == 1


@scripted()
async def test_everybody_gets_an_error_of_his_own(broker: ScriptedBroker, producer: Producer) -> None:
    """One for all would collect the tracebacks of all, and keep every message that is in one of them."""
    broker.refusals.append(ProducerFenced(PRODUCER_ID, 1, 2))
    producer.send_nowait(b"x")
    errors = await asyncio.gather(*sends(producer, b"a", b"b"), return_exceptions=True)
    for call in (producer.flush(), producer.send(b"c"), producer.send(b"d")):
        with pytest.raises(ProducerFenced) as caught:
            await call
        errors.append(caught.value)
    assert len({id(error) for error in errors}) == 5
    failure = producer._lanes[0].failure
    assert failure is not None and failure.__traceback__ is None


@scripted(batch_messages=1)
async def test_an_unknown_session_is_replaced_and_everything_numbered_from_zero(
    broker: ScriptedBroker, producer: Producer
) -> None:
    await producer.send(b"a")
    broker.refusals.append(SessionUnknown(PRODUCER_ID, 1))
    await asyncio.gather(*sends(producer, b"b", b"c"))
    assert broker.payloads() == [b"a", b"b", b"c"]
    assert [batch.header.first_sequence for batch in broker.stored[TOPIC]] == [0, 0, 1]
    assert len({batch.header.session for batch in broker.stored[TOPIC]}) == 2


@scripted(batch_messages=1)
async def test_what_may_be_stored_under_a_session_that_has_ended_is_not_sent_under_another(
    broker: ScriptedBroker, producer: Producer
) -> None:
    """The first may be stored: sent under a new session it would be stored again. The second was never sent before."""
    await producer.send(b"a")
    broker.hold()
    doubtful = asyncio.ensure_future(producer.send(b"b"))
    await broker.until("produce", 2)
    broker.drop()
    broker.is_holding = False
    broker.refusals.append(SessionUnknown(PRODUCER_ID, 1))
    while producer._lanes[0].connection is not None:  # noqa: ASYNC110  # it tells nobody
        await asyncio.sleep(0)
    fresh = asyncio.ensure_future(producer.send(b"c"))
    with pytest.raises(SessionUnknown, match="may be stored"):
        await doubtful
    assert (await fresh).offset == 1
    assert broker.payloads() == [b"a", b"c"]


@scripted(batch_messages=1)
async def test_a_batch_in_doubt_is_not_sent_again_after_a_day(broker: ScriptedBroker, producer: Producer) -> None:
    await producer.send(b"a")
    broker.hold()
    doubtful = asyncio.ensure_future(producer.send(b"b"))
    await broker.until("produce", 2)
    [batch] = producer._lanes[0]._machine.outstanding
    batch.begun_at -= RESEND_SECONDS + 1
    broker.drop()
    broker.is_holding = False
    with pytest.raises(SessionUnknown):
        await doubtful
    await producer.send(b"c")
    assert broker.payloads() == [b"a", b"c"]


@scripted()
async def test_a_broker_that_hangs_up_on_numbers_ahead_of_its_own_is_given_the_ones_it_wants(
    broker: ScriptedBroker, producer: Producer
) -> None:
    """It forgot what it had only written, and not synced; nothing after that can be stored there."""
    await producer.send(b"a")
    broker.sessions.opened(PRODUCER_ID, producer._lanes[0]._machine.session)  # expects sequence 0 again

    def hang_up(peer: Any, frame: Any) -> None:
        broker.judge(peer, frame)
        if broker.payloads() == [b"a"]:
            peer.transport.close()

    broker.answers["produce"] = hang_up
    receipts = await asyncio.gather(*(producer.send(b"%d" % number) for number in range(3)))
    assert broker.payloads() == [b"a", b"0", b"1", b"2"]
    assert [receipt.offset for receipt in receipts] == [1, 2, 3]


@scripted(batch_messages=1)
async def test_a_broker_that_hangs_up_on_numbers_behind_its_own_is_not_asked_again(
    broker: ScriptedBroker, producer: Producer
) -> None:
    """It has more of this session than we ever sent: somebody else uses our name."""

    def hang_up(peer: Any, frame: Any) -> None:
        peer.refuse(frame, OutOfSequence(PRODUCER_ID, 0, 500))
        peer.transport.close()

    broker.answers["produce"] = hang_up
    results = await asyncio.gather(*(producer.send(b"x") for _ in range(3)), return_exceptions=True)
    assert {type(result) for result in results} == {OutOfSequence} and broker.connections == 1


@scripted()
async def test_a_broker_that_closes_because_of_our_batch_is_not_sent_it_for_ever(
    broker: ScriptedBroker, producer: Producer
) -> None:
    def close(peer: Any, frame: Any) -> None:
        peer.refuse(frame, InvalidBatch("nonsense"))

    broker.answers["produce"] = close
    with pytest.raises(InvalidBatch):
        await producer.send(b"a")
    assert broker.kinds().count("produce") == 1


def test_a_mistake_with_one_producer_does_not_end_another_of_the_connection() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url, timeout=5) as client:
            precious = await client.producer(TOPIC, name="p").open()
            for topic, mistake in (("/default/receipt", "out of turn"), ("/default/invalid", "nonsense")):
                guilty = await client.producer(topic, batch_messages=1, idempotent=False).open()
                connection = precious._lanes[0].connection
                broker.hold()
                sending, *wrong = [*sends(precious, b"a"), *sends(guilty, b"1", b"2", b"3")]
                frames = (await broker.until("produce", len(broker.produced()) + 4))[-3:]
                [peer] = broker.peers
                if mistake == "nonsense":  # as a broker does that cannot believe the connection any more
                    peer.refuse(frames[0], InvalidBatch(mistake))
                    peer.transport.close()
                    broker.held.clear()
                else:
                    peer.answer(frames[1], receipt=pb.Receipt(rows=1))
                    broker.held = type(broker.held)([broker.held[0]])
                for each in wrong:
                    with pytest.raises((ProtocolViolation, InvalidBatch), match=mistake):
                        await each
                broker.release()
                await sending
                assert (precious._lanes[0].connection is connection) == (mistake == "out of turn")
                await guilty._let_go()
            await precious.close()

    run(inside())


# --- ends and partitions ------------------------------------------------------------------------------


def test_an_error_that_a_flush_had_no_time_to_tell_is_told_by_the_next() -> None:
    async def inside() -> None:
        async with ScriptedBroker(partitions=3) as broker, pydanube.connect(broker.url, timeout=5) as client:
            producer = await client.producer(TOPIC, idempotent=False).open()

            def refuse_the_first_two(peer: Any, frame: Any) -> None:
                topic = broker.topics[frame.command.produce.producer]
                if topic.endswith("-2"):
                    broker.on_produce(peer, frame)
                else:
                    peer.refuse(frame, MessageTooLarge(int(topic[-1]), 8))

            broker.answers["produce"] = refuse_the_first_two
            broker.hold()
            for _ in range(3):
                producer.send_nowait(b"x")
            with pytest.raises(DeadlineExceeded):
                await producer.flush(timeout=0.1)
            broker.release()
            sizes = []
            for _ in range(2):
                with pytest.raises(MessageTooLarge) as caught:
                    await producer.flush()
                sizes.append(caught.value.size_bytes)
            assert sizes == [0, 1]
            await producer.close()

    run(inside())


def test_closing_flushes_and_what_comes_later_is_refused() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            async with client.producer(TOPIC) as producer:
                producer.send_nowait(b"a")
            assert broker.payloads() == [b"a"]
            assert "close_producer" in broker.kinds()
            with pytest.raises(ClientClosed):
                await producer.send(b"b")

    run(inside())


def test_a_message_sent_soon_tells_its_future() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            async with client.producer(TOPIC) as producer:
                told: list[int] = []
                futures = [producer.send_soon(b"%d" % number) for number in range(3)]
                for future in futures:
                    future.add_done_callback(lambda done: told.append(done.result().offset))
                producer.send_nowait(b"3")
                await producer.flush()
                assert [future.result().offset for future in futures] == told == [0, 1, 2]
                assert producer.buffered_bytes == 0
            assert broker.payloads() == [b"0", b"1", b"2", b"3"]

    run(inside())


def test_a_message_sent_soon_that_fails_tells_its_future_and_nobody_else() -> None:
    async def inside() -> None:
        async with (
            ScriptedBroker() as broker,
            pydanube.connect(broker.url) as client,
            client.producer(TOPIC, buffer_bytes=100) as producer,
        ):
            broker.answers["produce"] = lambda peer, frame: peer.refuse(frame, MessageTooLarge(5, 4))
            future = producer.send_soon(b"x" * 100)
            with pytest.raises(BufferFull):
                producer.send_soon(b"y")
            await producer.flush()
            assert isinstance(future.exception(), MessageTooLarge)

    run(inside())


def test_a_producer_that_was_never_opened_says_so() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url) as client:
            producer = client.producer(TOPIC)
            with pytest.raises(NeverOpened, match=f"the producer of {TOPIC} was never opened: use async with"):
                await producer.send(b"a")
            with pytest.raises(NeverOpened):
                producer.send_nowait(b"a")
            with pytest.raises(NeverOpened):
                await producer.flush()
            assert broker.payloads() == []

    run(inside())


def test_keys_choose_partitions_as_every_client_does_and_others_take_turns() -> None:
    async def inside() -> None:
        async with ScriptedBroker(partitions=3) as broker, pydanube.connect(broker.url) as client:
            async with client.producer(TOPIC, idempotent=False) as producer:
                receipt = await producer.send(b"keyed", key="user-7")
                turns = [(await producer.send(b"x")).topic for _ in range(6)]
            assert receipt.topic == f"{TOPIC}-part-{partition_of_key('user-7', 3)}"
            assert turns == [f"{TOPIC}-part-{number % 3}" for number in range(6)]

    run(inside())


def test_batches_are_no_longer_than_the_frames_that_the_broker_takes() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker:
            broker.frame_size_max = 64 * 1024
            async with pydanube.connect(broker.url, timeout=5) as client, client.producer(TOPIC) as producer:
                sending = [producer.send(bytes([number]) * 10_000, key=f"k{number}") for number in range(30)]
                receipts = await asyncio.gather(*sending)
                assert [receipt.offset for receipt in receipts] == list(range(30))
                assert [payload[0] for payload in broker.payloads()] == list(range(30))
                frames_sent = [frame for frame in broker.heard if frame.kind == "produce"]
                assert max(len(frame.body) for frame in frames_sent) < 64 * 1024 and len(frames_sent) > 4
                with pytest.raises(MessageTooLarge):
                    await producer.send(bytes(70_000))
                producer.send_nowait(b"goes on")
                await producer.flush()
                assert broker.payloads()[-1] == b"goes on" and producer.buffered_bytes == 0

    run(inside())


def test_frames_in_pieces_of_one_byte_are_understood() -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker:
            broker.piece_bytes = 1
            async with pydanube.connect(broker.url) as client, client.producer(TOPIC) as producer:
                assert (await producer.send(b"a")).offset == 0

    run(inside())
