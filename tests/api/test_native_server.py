"""The native server: what a peer may do, what it may cost, and that nobody else notices when it does more."""

from __future__ import annotations

import asyncio
import struct
from random import Random
from typing import Any

import pytest
from crc32c import crc32c

from pydanube.api.native.connection import TURN_SETTLED
from pydanube.api.native.server import SWEEP_SECONDS, NativeServer
from pydanube.core.dispatch.ranges import work
from pydanube.core.names import SubscriptionName
from pydanube.core.policies import TopicPolicy
from pydanube.errors import DiskFull
from pydanube.formats.batch import HEADER_SIZE, Batch, Envelope, encode, messages, parse, rows_of
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.harness.brokers import ORDERS, BrokerFixture, find_topic, now, publish_many, settle, simulated
from tests.harness.peers import Peer, batch_of, bystander, greeting, notices_nothing, server_of

SUBSCRIPTION = SubscriptionName("s")
KIB = 1024
MIB = 1024 * KIB


async def opened_server(**limits: Any) -> NativeServer:
    host = BrokerFixture()
    await host.boot()
    server = server_of(host, **limits)
    server.host = host  # type: ignore[attr-defined]
    server.sweeping = asyncio.create_task(server._sweep())  # type: ignore[attr-defined]
    return server


# --- bad input ----------------------------------------------------------------------------------------


HELLO = b"".join(frames.encode(pb.Command(request_id=1, hello=greeting())))
NONSENSE: dict[str, tuple[bytes, str]] = {
    "another protocol": (b"GET / HTTP/1.1\r\n\r\n", "HTTP"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "TLS"),
    "wrong magic": (b"".join(frames.encode(pb.Command(request_id=1, hello=greeting(magic=7)))), "magic"),
    "a future version": (
        b"".join(frames.encode(pb.Command(request_id=1, hello=greeting(version_min=2, version_max=9)))),
        "versions 2 to 9, the broker 1 to 1",
    ),
    "no greeting": (b"".join(frames.encode(pb.Command(request_id=1, ping=pb.Ping()))), "not hello"),
    "a greeting that is too long": (struct.pack("<IH", 70_000, 10), "over the limit of 65536"),
}
VIOLATIONS: dict[str, tuple[bytes, str]] = {
    "an over-long frame": (struct.pack("<IH", frames.FRAME_SIZE_LIMIT + 1, 10), "over the limit"),
    "an unknown command": (struct.pack("<IH", 2 + 3, 3) + b"\xa0\x3f\x01", "no kind that version 1 knows"),
    "no protobuf": (struct.pack("<IH", 2 + 3, 3) + b"\xff\xff\xff", "no protobuf message"),
    "a body where none may be": (b"".join(frames.encode(pb.Command(ping=pb.Ping()), b"body")), "may not have one"),
    "a second greeting": (HELLO, "the greeting is over"),
    "the broker's words": (b"".join(frames.encode(pb.Command(request_id=9, done=pb.Done()))), "the broker's to say"),
    "a request without an id": (
        b"".join(frames.encode(pb.Command(lookup=pb.Lookup(topic=ORDERS)))),
        "lookup has no request id",
    ),
    "a handle that never was": (
        b"".join(frames.encode(pb.Command(ack=pb.Ack(consumer=9, ranges=[0, 1])))),
        "consumer 9 was never opened",
    ),
}


@pytest.mark.parametrize("what", NONSENSE)
@simulated
async def test_bytes_that_are_no_greeting_get_one_clear_error_and_the_end(what: str) -> None:
    server = await opened_server()
    other = await bystander(server)
    data, sentence = NONSENSE[what]
    peer = Peer(server)
    peer.write(data)
    assert peer.error.code == pb.PROTOCOL_VIOLATION and sentence in peer.error.sentence
    assert peer.is_closed and not peer.error.retryable
    assert await notices_nothing(other)


@pytest.mark.parametrize("what", VIOLATIONS)
@simulated
async def test_a_violation_gets_one_clear_error_and_the_end(what: str) -> None:
    server = await opened_server()
    other = await bystander(server)
    data, sentence = VIOLATIONS[what]
    peer = await Peer.greeted(server)
    peer.write(data)
    assert peer.error.code == pb.PROTOCOL_VIOLATION and sentence in peer.error.sentence
    await settle()
    assert peer.is_closed and peer.connection not in server.connections
    assert await notices_nothing(other)


def resealed(data: bytes, **changes: Any) -> bytes:
    """A batch with other header fields, or another body, and right checksums."""
    body = changes.pop("body", data[HEADER_SIZE:])
    header = parse(data).header._replace(body_length=len(body), uncompressed_length=len(body), body_crc=crc32c(body))
    packed = struct.pack("<4sBBBBQIIIQQQQQqqIII", *header._replace(**changes))
    return packed[:-4] + struct.pack("<I", crc32c(packed[:-4])) + body


BATCHES: dict[str, tuple[Any, str]] = {
    "a body that fails its checksum": (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "body checksum"),
    "a header that fails its checksum": (lambda data: data[:20] + b"\x07" + data[21:], "header checksum"),
    "too few bytes": (lambda data: data[:-8], "ends after"),
    "bytes behind it": (lambda data: data + bytes(8), "bytes follow its end"),
    "no Arrow": (lambda data: resealed(data, body=b"\xff" * 200), "not a record batch"),
    "Arrow with bad offsets": (
        lambda data: resealed(
            data, body=data[HEADER_SIZE:].replace(struct.pack("<ii", 0, 5), struct.pack("<ii", 0, 1 << 30))
        ),
        "not a record batch of the envelope",
    ),
    "an absurd number of rows": (lambda data: resealed(data, rows=4_000_000_000), "4000000000 rows"),
    "another producer's": (lambda data: resealed(data, producer_id=12345), "it is of producer 12345"),
    "another session's": (lambda data: resealed(data, session=77), "session 77"),
    "the log's own flags": (lambda data: resealed(data, flags=1), "rows"),
}


@pytest.mark.parametrize("what", BATCHES)
@simulated
async def test_a_batch_that_is_none_is_refused_before_anything_is_stored(what: str) -> None:
    server = await opened_server()
    other = await bystander(server)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    damage, sentence = BATCHES[what]
    data = damage(batch_of(opened, 0, b"hello").to_bytes())
    peer.write(b"".join(frames.encode(pb.Command(request_id=7, produce=pb.Produce(producer=opened.producer)), data)))
    await settle()
    assert peer.error.code == pb.INVALID_BATCH and sentence in peer.error.sentence
    assert peer.is_closed and peer.frames[-1].command.request_id == 7
    assert (await find_topic(server.broker)).head == 0
    assert await notices_nothing(other)


@simulated
async def test_a_large_batch_that_is_none_is_refused_too() -> None:
    """It is looked at in a thread, and the small one behind it waits for its turn."""
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    large = batch_of(opened, 0, bytes(200 * KIB)).to_bytes()
    produce = pb.Produce(producer=opened.producer)
    peer.write(b"".join(frames.encode(pb.Command(request_id=7, produce=produce), large[:-1] + b"\x01")))
    peer.produce(opened, 1, b"behind it")
    await settle()
    assert peer.error.code == pb.INVALID_BATCH and peer.is_closed
    assert peer.frames[-1].command.request_id == 7
    assert (await find_topic(server.broker)).head == 0


@simulated
async def test_a_sequence_that_jumps_is_answered_and_the_connection_ends() -> None:
    server = await opened_server()
    other = await bystander(server)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    peer.produce(opened, 0, b"a")
    await settle()
    peer.produce(opened, 5, b"jumped", request_id=77)
    await settle()
    assert peer.error.code == pb.OUT_OF_SEQUENCE and peer.heard("error")[0].request_id == 77
    assert peer.error.fields["expected"].integer == 1
    assert peer.is_closed and (await find_topic(server.broker)).head == 1
    assert await notices_nothing(other)


@simulated
async def test_what_follows_a_refused_batch_is_refused_without_the_end_of_the_connection() -> None:
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    topic = await find_topic(server.broker)
    refuse_next(topic)
    for sequence in range(3):
        peer.produce(opened, sequence, b"x")
    await settle()
    errors = [command.error for command in peer.heard("error")]
    assert [error.code for error in errors] == [pb.DISK_FULL, pb.OUT_OF_SEQUENCE, pb.OUT_OF_SEQUENCE]
    assert not peer.is_closed and topic.head == 0
    for sequence in range(3):
        peer.produce(opened, sequence, b"x", request_id=50 + sequence)
    await settle()
    assert [command.request_id for command in peer.heard("receipt")] == [50, 51, 52] and topic.head == 3


def refuse_next(topic: Any) -> None:
    """The next batch finds no room on the disk."""
    real = topic.submit_batch

    def submit(batch: Any, tell: Any) -> Any:
        topic.submit_batch = real
        raise DiskFull("wal")

    topic.submit_batch = submit


@simulated
async def test_answers_come_in_the_order_of_the_batches_whoever_decides_first() -> None:
    """The second batch is refused at once, while the first is still on its way to the disk."""
    host = BrokerFixture(policies=TopicPolicy(max_message_size=100))
    await host.boot()
    peer = await Peer.greeted(server_of(host))
    opened = await peer.open_producer()
    assert opened.message_size_max == 100
    peer.produce(opened, 0, b"small", request_id=11)
    peer.produce(opened, 1, bytes(101), request_id=12)
    await settle()
    answers = [frame for frame in peer.frames if frame.command.request_id in (11, 12)]
    assert [(frame.command.request_id, frame.kind) for frame in answers] == [(11, "receipt"), (12, "error")]
    assert answers[1].command.error.code == pb.MESSAGE_TOO_LARGE and not peer.is_closed


@simulated
async def test_permits_that_overflow_are_a_violation() -> None:
    server = await opened_server()
    other = await bystander(server)
    peer = await Peer.greeted(server)
    await peer.open_producer()
    subscribed = await peer.subscribe(messages=frames.PERMITS_MAX)
    peer.say(flow=pb.Flow(consumer=subscribed.consumer, messages=1))
    assert peer.error.code == pb.PROTOCOL_VIOLATION and "permits" in peer.error.sentence
    assert peer.is_closed and await notices_nothing(other)


@simulated
async def test_commands_for_a_handle_that_has_ended_are_no_violation() -> None:
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    subscribed = await peer.subscribe()
    for command in (
        {"close_producer": pb.CloseProducer(producer=opened.producer)},
        {"close_consumer": pb.CloseConsumer(consumer=subscribed.consumer)},
    ):
        assert (await peer.ask(**command)).kind == "done"
        assert (await peer.ask(**command)).kind == "done", "closing twice is done"
    peer.say(flow=pb.Flow(consumer=subscribed.consumer, messages=1))
    peer.say(ack=pb.Ack(consumer=subscribed.consumer, ranges=[0, 1]))
    late = await peer.ask(ack=pb.Ack(consumer=subscribed.consumer, ranges=[0, 1]))
    assert late.command.error.code == pb.CONSUMER_UNKNOWN
    peer.produce(opened, 0, b"x", request_id=9)
    await settle()
    assert peer.heard("error")[-1].error.code == pb.PRODUCER_UNKNOWN and not peer.is_closed


@simulated
async def test_acks_count_below_the_head_and_are_refused_from_there_on() -> None:
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    for number in range(4):
        peer.produce(opened, number, b"x", request_id=10 + number)
    await settle()
    subscribed = await peer.subscribe(messages=1)
    await settle()
    assert peer.offsets == [0]
    for _ in range(2):
        done = await peer.ask(ack=pb.Ack(consumer=subscribed.consumer, ranges=[2, 3]))
        assert done.kind == "done", "not sent yet, or acknowledged before: it is settled"
    for kind in ("ack", "nack"):
        command = pb.Ack if kind == "ack" else pb.Nack
        late = await peer.ask(**{kind: command(consumer=subscribed.consumer, ranges=[3, 9])})
        assert late.command.error.code == pb.OFFSET_OUT_OF_RANGE and "offset 4 of" in late.command.error.sentence
    peer.say(flow=pb.Flow(consumer=subscribed.consumer, messages=10, bytes=64 * KIB))
    await settle()
    assert peer.offsets == [0, 1], "what was acknowledged below the head counts, also beside what was refused"


@pytest.mark.parametrize("leaves", [False, True])
@simulated
async def test_thousands_of_scattered_acks_in_one_go_are_applied_in_turns(leaves: bool) -> None:
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    peer.produce(opened, 0, *(b"%d" % number for number in range(8_192)))
    await settle()
    subscribed = await peer.subscribe(messages=10_000)
    await settle()
    assert peer.offsets == list(range(8_192))
    acks = [
        pb.Ack(consumer=subscribed.consumer, ranges=[at for n in range(first, first + 2048, 2) for at in (n, n + 1)])
        for first in range(0, 8_192, 2048)
    ]
    commands = [pb.Command(request_id=100 + number, ack=ack) for number, ack in enumerate(acks)]
    topic = await find_topic(server.broker)
    [subscription] = topic.subscriptions.values()
    before = work.ranges
    peer.write(b"".join(part for command in commands for part in frames.encode(command)))
    if leaves:
        peer.connection.connection_lost(None)
    else:
        assert work.ranges - before < 4 * TURN_SETTLED * 8, "one command in the first turn"
        await settle()
        assert [command.request_id for command in peer.heard("done")[-4:]] == [100, 101, 102, 103]
    assert subscription.get_lag_info().lag_messages == 4_096, "each counts, also if the peer is gone by then"


# --- limits of time -----------------------------------------------------------------------------------


@simulated
async def test_a_peer_that_does_not_greet_is_dropped() -> None:
    server = await opened_server(handshake_seconds=10)
    other = await bystander(server)
    peer = Peer(server)
    peer.write(HELLO[:7])
    await asyncio.sleep(10 - SWEEP_SECONDS)
    assert not peer.is_closed
    await asyncio.sleep(2 * SWEEP_SECONDS)
    assert peer.is_closed and await notices_nothing(other)


@simulated
async def test_a_peer_that_sends_a_byte_at_a_time_and_never_finishes_is_dropped() -> None:
    server = await opened_server(frame_seconds=30, keepalive_seconds=20)
    other = await bystander(server)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    frame = frames.encode(pb.Command(request_id=5, produce=pb.Produce(producer=opened.producer)), bytes(5000))
    began = now()
    for byte in b"".join(frame):
        if peer.is_closed:
            break
        peer.write(bytes([byte]))
        other.say(ping=pb.Ping())
        await asyncio.sleep(0.5)
    assert peer.is_closed and 30 <= now() - began <= 30 + 2 * SWEEP_SECONDS
    assert await notices_nothing(other)


@simulated
async def test_a_peer_that_vanished_without_a_word_is_dropped_and_a_quiet_one_that_pings_is_not() -> None:
    server = await opened_server(keepalive_seconds=15)
    vanished, quiet = await Peer.greeted(server), await Peer.greeted(server)
    await vanished.open_producer()
    held = await vanished.subscribe()
    assert held.consumer
    for _ in range(6):
        await asyncio.sleep(10)
        quiet.say(request_id=3, ping=pb.Ping())
    assert vanished.is_closed and not quiet.is_closed
    assert len(quiet.heard("pong")) == 6
    assert (await quiet.subscribe(consumer_name="another")).consumer, "its place is free again"


@simulated
async def test_a_peer_that_takes_nothing_is_dropped_and_costs_a_bounded_amount_until_then() -> None:
    server = await opened_server(stuck_seconds=30, unsent_bytes=256 * KIB, keepalive_seconds=600)
    other = await bystander(server)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    for sequence in range(40):
        peer.produce(opened, sequence, bytes(100 * KIB))
        await settle()
    peer.takes_nothing = True
    peer.say(request_id=9, subscribe=pb.Subscribe(
        topic=ORDERS, subscription="s", consumer_name="c", start=pb.Place(edge=pb.EARLIEST),
        messages=1 << 40, bytes=1 << 40,
    ))  # fmt: skip
    await settle()
    subscription = next(iter((await find_topic(server.broker)).subscriptions.values()))
    waiting = sum(item.batch.header.size_bytes for each in subscription.consumers for item in each.outbox._queue)
    assert len(peer.transport.unread) + waiting < 2 * MIB, "it granted a terabyte, and there are 4 MiB for it"
    assert not peer.transport.reads, "nobody hears what it asks for before it has taken its answers"
    await asyncio.sleep(30 - SWEEP_SECONDS)
    assert not peer.is_closed
    await asyncio.sleep(2 * SWEEP_SECONDS)
    assert peer.is_closed and await notices_nothing(other)


@simulated
async def test_a_slow_consumer_that_reads_again_gets_everything_once() -> None:
    server = await opened_server(unsent_bytes=256 * KIB)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    for sequence in range(40):
        peer.produce(opened, sequence, bytes(100 * KIB))
        await settle()
    peer.takes_nothing = True
    peer.say(request_id=9, subscribe=pb.Subscribe(
        topic=ORDERS, subscription="s", consumer_name="c", start=pb.Place(edge=pb.EARLIEST),
        messages=1 << 40, bytes=1 << 40,
    ))  # fmt: skip
    await asyncio.sleep(20)
    peer.take()
    await settle()
    assert peer.offsets == list(range(40))


# --- limits of amount ---------------------------------------------------------------------------------


@simulated
async def test_a_peer_that_floods_with_pings_and_reads_no_pong_is_not_read_any_more() -> None:
    server = await opened_server(stuck_seconds=30, keepalive_seconds=600)
    other = await bystander(server)
    peer = await Peer.greeted(server)
    peer.takes_nothing = True
    ping = b"".join(frames.encode(pb.Command(request_id=3, ping=pb.Ping()))) * 100
    for _ in range(5000):
        peer.write(ping)
        if not peer.transport.reads:
            break
    peer.write(ping * 10_000)
    assert len(peer.transport.unread) < 2 * MIB
    await asyncio.sleep(30 + 2 * SWEEP_SECONDS)
    assert peer.is_closed and await notices_nothing(other)


@simulated
async def test_a_peer_that_asks_for_too_much_at_once_is_not_read_until_that_is_done() -> None:
    server = await opened_server(requests=8)
    peer = await Peer.greeted(server)
    await peer.open_producer()
    fetch = pb.Fetch(topic=ORDERS, start=0, wait_ms=5000)
    for number in range(20):
        peer.say(request_id=200 + number, fetch=fetch)
        await settle()
    assert not peer.transport.reads and len(peer.connection._tasks) == 9
    await asyncio.sleep(60)
    assert len(peer.heard("fetched")) == 20 and peer.transport.reads


@simulated
async def test_produced_bytes_that_are_not_on_disk_stop_the_reading() -> None:
    server = await opened_server(unwritten_bytes=300 * KIB)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    for sequence in range(4):
        peer.produce(opened, sequence, bytes(100 * KIB))
    assert not peer.transport.reads
    await settle()
    assert peer.transport.reads and len(peer.heard("receipt")) == 4


@simulated
async def test_more_batches_in_flight_than_allowed_are_a_violation() -> None:
    server = await opened_server()
    other = await bystander(server)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    for sequence in range(frames.IN_FLIGHT_MAX + 1):
        peer.produce(opened, sequence, b"x")
    assert peer.error.code == pb.PROTOCOL_VIOLATION and "8 batches in flight" in peer.error.sentence
    assert peer.is_closed and await notices_nothing(other)


@simulated
async def test_a_frame_longer_than_the_broker_takes_is_refused_by_its_length() -> None:
    server = await opened_server(frame_bytes=128 * KIB)
    peer = await Peer.greeted(server)
    assert peer.heard("welcome")[0].welcome.frame_size_max == 128 * KIB
    peer.write(struct.pack("<IH", 128 * KIB + 1, 7))
    assert "over the limit of 131072" in peer.error.sentence and peer.is_closed


@simulated
async def test_a_connection_beyond_the_limit_is_told_so_and_closed() -> None:
    server = await opened_server(connections=2)
    other, second = await bystander(server), await Peer.greeted(server)
    third = Peer(server)
    assert third.error.code == pb.LIMIT_REACHED and third.is_closed
    assert await notices_nothing(other)
    second.transport.abort()
    await settle()
    await Peer.greeted(server)


@simulated
async def test_a_connection_beyond_what_the_limit_of_open_files_leaves_is_told_to_come_again() -> None:
    server = await opened_server()
    server.open_files = server.open_files._replace(limit=256, native=2)
    other, second = await bystander(server), await Peer.greeted(server)
    third = Peer(server)
    assert third.error.code == pb.UNAVAILABLE and third.error.retryable and third.is_closed
    assert "at most 2 connections here, because its limit of open files is 256" in third.error.sentence
    assert await notices_nothing(other)
    second.transport.abort()
    await settle()
    await Peer.greeted(server)


@simulated
async def test_a_peer_opens_as_many_producers_and_consumers_as_it_may() -> None:
    server = await opened_server(handles=2)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer("a")
    await peer.open_producer("b")
    request = pb.OpenProducer(topic=ORDERS, producer_name="c", reliable=True)
    answer = await peer.ask(open_producer=request)
    assert answer.command.error.code == pb.LIMIT_REACHED and not peer.is_closed
    await peer.ask(close_producer=pb.CloseProducer(producer=opened.producer))
    assert (await peer.ask(open_producer=request)).kind == "producer_opened"


@simulated
async def test_the_store_decides_about_a_client_that_has_seen_a_newer_owner() -> None:
    """As after the store was restored from a backup: this broker is the owner, whatever producers were told before."""
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer("a")
    assert opened.epoch == opened.session >> 32
    for session in ((10**6 << 32) + 1, 2**64 - 1):
        request = pb.OpenProducer(topic=ORDERS, producer_name="a", reliable=True, session=session)
        error = (await peer.ask(open_producer=request)).command.error
        assert error.code == pb.SESSION_UNKNOWN
    again = await peer.open_producer("a", session=opened.session, seen_epoch=10**6)
    assert again.session == opened.session
    subscribe = pb.Subscribe(topic=ORDERS, subscription="s", consumer_name="c", type=pb.EXCLUSIVE, seen_epoch=10**6)
    assert (await peer.ask(subscribe=subscribe)).kind == "subscribed"


@simulated
@pytest.mark.parametrize("counter", [1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("ahead", [-1, 0, 1])
async def test_no_number_that_a_client_chooses_after_a_takeover_ends_a_producers_name(ahead: int, counter: int) -> None:
    """An owner that could not be told of the sessions before it adopts them: 2⁶⁴ - 1 would be the last of all."""
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer("a")
    topic = await find_topic(server.broker)
    topic.log.sessions.adopts_unknown = True
    hostile = ((opened.epoch + ahead) << 32) + counter
    other = await Peer.greeted(server)
    request = pb.OpenProducer(topic=ORDERS, producer_name="b", reliable=True, session=hostile)
    answer = await other.ask(open_producer=request)
    if answer.kind == "producer_opened":
        other.produce(answer.command.producer_opened, 0, b"x")
    else:
        assert answer.command.error.code == pb.SESSION_UNKNOWN and ahead > 0
    await settle()
    for number in range(3):
        again = await peer.open_producer("b")
        assert again.session >> 32 == opened.epoch and again.session < 2**63
        peer.produce(again, 0, b"y", request_id=500 + number)
        await settle()
    topic.log.sessions.to_bytes()
    stored = [each.payload for batch in await topic.log.read(0, bytes_max=1 << 20) for each in messages(batch)]
    assert stored.count(b"y") == 3 and stored.count(b"x") == (ahead < 0)


# --- frames that the peer takes -----------------------------------------------------------------------


@simulated
async def test_a_batch_larger_than_the_peers_frames_is_cut() -> None:
    server = await opened_server()
    producer = await Peer.greeted(server)
    opened = await producer.open_producer()
    producer.produce(opened, 0, *(bytes([number]) * 10 * KIB for number in range(30)))
    await settle()
    peer = await Peer.greeted(server, frame_size_max=64 * KIB)
    await peer.subscribe()
    await settle()
    delivered = [frame for frame in peer.frames if frame.kind == "deliver"]
    assert len(delivered) > 5 and peer.offsets == list(range(30))
    payloads = []
    for frame in delivered:
        assert 2 + len(frame.body) <= 64 * KIB
        payloads += [message.payload[:1] for message in messages(parse(frame.body))]
    assert payloads == [bytes([number]) for number in range(30)]


@simulated
async def test_a_peer_with_small_frames_is_sent_no_more_bytes_than_it_has_granted() -> None:
    """A batch in parts is longer than it was."""
    server = await opened_server()
    producer = await Peer.greeted(server)
    opened = await producer.open_producer()
    for first in range(0, 300, 30):
        producer.produce(opened, first, *(bytes(5 * KIB) for _ in range(30)))
        await settle()
    peer = await Peer.greeted(server, frame_size_max=64 * KIB)
    subscribed = await peer.subscribe(messages=300, size_bytes=0)
    granted = 0
    while len(peer.offsets) < 300:
        peer.say(flow=pb.Flow(consumer=subscribed.consumer, bytes=100 * KIB))
        granted += 100 * KIB
        await settle()
        sent = sum(len(frame.body) for frame in peer.frames if frame.kind == "deliver")
        assert sent <= granted + 160 * KIB, "it may be overdrawn by one batch"
        assert granted < 4 * MIB


@simulated
async def test_a_message_larger_than_the_peers_frames_ends_the_consumer_with_a_clear_error() -> None:
    server = await opened_server()
    producer = await Peer.greeted(server)
    opened = await producer.open_producer()
    producer.produce(opened, 0, b"small", bytes(100 * KIB))
    await settle()
    peer = await Peer.greeted(server, frame_size_max=64 * KIB)
    subscribed = await peer.subscribe()
    await settle()
    error = peer.heard("error")[0].error
    assert error.code == pb.MESSAGE_TOO_LARGE and error.consumer == subscribed.consumer and not error.retryable
    assert not peer.is_closed, "everything else on this connection goes on"
    assert (await producer.subscribe()).consumer, "somebody with larger frames may have its place"


@simulated
async def test_a_fetch_is_cut_to_the_peers_frames_and_goes_on_where_it_ended() -> None:
    server = await opened_server()
    producer = await Peer.greeted(server)
    opened = await producer.open_producer()
    producer.produce(opened, 0, *(bytes(10 * KIB) for _ in range(30)))
    await settle()
    peer = await Peer.greeted(server, frame_size_max=64 * KIB)
    at, answers = 0, 0
    while at < 30:
        answer = await peer.ask(fetch=pb.Fetch(topic=ORDERS, start=at, bytes_max=10 * MIB))
        assert answer.kind == "fetched" and len(answer.body) < 64 * KIB and answers < 30
        assert parse(answer.body).header.base_offset <= at < answer.command.fetched.next_offset
        at, answers = answer.command.fetched.next_offset, answers + 1
    assert answers > 5


# --- rows that are for others -------------------------------------------------------------------------


def keyed_batch(opened: pb.ProducerOpened, keys: list[str], codec: str = "none") -> Batch:
    """Messages of 1 KiB that do not compress."""
    chance = Random(1)
    rows = rows_of([Envelope(chance.randbytes(KIB), 1, key, "p") for key in keys])
    return encode(rows, topic=ORDERS, producer_id=opened.producer_id, session=opened.session, codec=codec)


@simulated
async def test_of_a_batch_that_comes_key_by_key_each_delivery_has_only_its_rows_and_takes_permits_for_no_more() -> None:
    server = await opened_server(unsent_bytes=64 * KIB)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    stored = keyed_batch(opened, ["k"] * 50)
    peer.say(request_id=7, produce=pb.Produce(producer=opened.producer), body=stored)
    await settle()
    subscribed = await peer.subscribe(size_bytes=64 * KIB, type=pb.KEY_SHARED)
    await settle()
    for offset in range(50):
        frame = peer.frames[-1]
        assert frame.kind == "deliver" and peer.offsets == list(range(offset + 1))
        assert len(frame.body) < 4 * KIB
        part = parse(frame.body)
        assert part.header.base_offset == offset and messages(part) == [messages(stored)[offset]]
        peer.say(flow=pb.Flow(consumer=subscribed.consumer, bytes=len(frame.body)))
        peer.say(ack=pb.Ack(consumer=subscribed.consumer, ranges=[offset, offset + 1]))
        await settle()


async def delivered_again(peer: Peer, unacked: list[int], rows: int) -> list[tuple[list[int], bytes]]:
    """Ranges and bodies that a consumer gets who has acknowledged everything else."""
    subscribed = await peer.subscribe(messages=10_000)
    await settle()
    assert peer.offsets == list(range(rows))
    for offset in range(rows):
        if offset not in unacked:
            peer.say(ack=pb.Ack(consumer=subscribed.consumer, ranges=[offset, offset + 1]))
    await peer.ask(close_consumer=pb.CloseConsumer(consumer=subscribed.consumer))
    peer.frames.clear()
    await peer.subscribe(messages=10_000)
    await settle()
    assert peer.offsets == unacked
    found = [frame for frame in peer.frames if frame.kind == "deliver"]
    for frame in found:
        base = parse(frame.body).header.base_offset
        assert base <= frame.command.deliver.ranges[0]
    return [(list(frame.command.deliver.ranges), bytes(frame.body)) for frame in found]


@pytest.mark.parametrize("first", [0, 30])
@simulated
async def test_a_batch_whose_rows_are_nearly_all_meant_comes_as_it_was_stored(first: int) -> None:
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    stored = keyed_batch(opened, ["k"] * 100)
    peer.say(request_id=7, produce=pb.Produce(producer=opened.producer), body=stored)
    await settle()
    ((ranges, body),) = await delivered_again(peer, list(range(first, 100)), 100)
    assert ranges == [first, 100] and body[HEADER_SIZE:] == bytes(stored.body)


@pytest.mark.parametrize(
    ("codec", "ranges"), [("none", [[40, 41], [50, 52, 53, 54], [65, 66]]), ("lz4", [[40, 41, 50, 52, 53, 54, 65, 66]])]
)
@simulated
async def test_what_lies_between_rows_that_are_meant_is_left_out_if_it_is_much(
    codec: str, ranges: list[list[int]]
) -> None:
    """A compressed batch is opened once."""
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    stored = keyed_batch(opened, ["k"] * 100, codec)
    peer.say(request_id=7, produce=pb.Produce(producer=opened.producer), body=stored)
    await settle()
    delivered = await delivered_again(peer, [40, 50, 51, 53, 65], 100)
    assert [each for each, _ in delivered] == ranges
    assert sum(len(body) for _, body in delivered) < 35 * KIB
    for each, body in delivered:
        part = parse(body)
        assert messages(part) == messages(stored)[each[0] : each[-1]]


@simulated
async def test_a_delivery_has_no_more_ranges_than_a_command_may_have() -> None:
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    peer.produce(opened, 0, *(b"%d" % number for number in range(2_200)))
    await settle()
    unacked = list(range(0, 2_200, 2))
    delivered = await delivered_again(peer, unacked, 2_200)
    assert [len(ranges) // 2 for ranges, _ in delivered] == [frames.RANGES_MAX, 1_100 - frames.RANGES_MAX]


# --- the rest of the rules ----------------------------------------------------------------------------


@pytest.mark.parametrize("turns", range(8))
@simulated
async def test_seeking_gives_back_the_permits_of_what_was_never_sent(turns: int) -> None:
    """Else the consumer would wait for messages that it has granted, and the broker for permits.

    The seek comes before the log is read, while it is read, while what was read waits, or when it was sent.
    """
    server = await opened_server()
    peer = await Peer.greeted(server)
    await peer.open_producer()
    topic = await find_topic(server.broker)
    await publish_many(topic, 50)
    subscribed = await peer.subscribe(messages=0, size_bytes=MIB)
    peer.say(flow=pb.Flow(consumer=subscribed.consumer, messages=50))
    for _ in range(turns):
        await asyncio.sleep(0)
    sent = len(peer.offsets)
    topic.require(SUBSCRIPTION).seek(20)
    await settle()
    assert peer.offsets == [*range(sent), *range(20, min(50, 70 - sent))]
    assert sent in (0, 50)
    peer.say(flow=pb.Flow(consumer=subscribed.consumer, messages=30))
    await settle()
    assert peer.offsets == [*range(sent), *range(20, 50)]


@simulated
async def test_an_exclusive_producers_place_is_free_when_it_closes_and_when_its_connection_ends() -> None:
    server = await opened_server()
    first, second = await Peer.greeted(server), await Peer.greeted(server)
    opened = await first.open_producer("a", exclusive=True)
    request = pb.OpenProducer(topic=ORDERS, producer_name="b", reliable=True, exclusive=True)
    assert (await second.ask(open_producer=request)).command.error.code == pb.PRODUCER_EXISTS
    await asyncio.sleep(20)
    first.say(ping=pb.Ping())
    second.say(ping=pb.Ping())
    await asyncio.sleep(20)
    answer = await second.ask(open_producer=request)
    assert answer.command.error.code == pb.PRODUCER_EXISTS, "it is quiet, and its connection is there"
    await first.ask(close_producer=pb.CloseProducer(producer=opened.producer))
    assert (await second.ask(open_producer=request)).kind == "producer_opened"
    second.transport.abort()
    await settle()
    assert await first.open_producer("c", exclusive=True)


@simulated
async def test_closing_a_producer_is_answered_after_everything_in_flight() -> None:
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    for sequence in range(3):
        peer.produce(opened, sequence, b"x", request_id=31 + sequence)
    peer.say(request_id=34, close_producer=pb.CloseProducer(producer=opened.producer))
    await settle()
    answered = [frame.command.request_id for frame in peer.frames if 31 <= frame.command.request_id <= 34]
    assert answered == [31, 32, 33, 34]


@simulated
async def test_goodbye_is_followed_by_the_answers_and_the_end() -> None:
    server = await opened_server()
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    await peer.subscribe()
    peer.produce(opened, 0, b"x")
    peer.say(goodbye=pb.Goodbye())
    await settle()
    assert peer.heard("receipt") and peer.is_closed
    assert not server.connections


@simulated
async def test_non_reliable_messages_beyond_the_permits_are_dropped() -> None:
    server = await opened_server()
    peer = await Peer.greeted(server)
    request = pb.OpenProducer(topic="/default/fast", producer_name="p", create=True)
    opened = (await peer.ask(open_producer=request)).command.producer_opened
    subscribed = await peer.subscribe(messages=3, topic="/default/fast")
    rows = rows_of([Envelope(b"%d" % number) for number in range(5)])
    produce = pb.Produce(producer=opened.producer)
    peer.say(request_id=5, produce=produce, body=encode(rows, topic="/default/fast"))
    await settle()
    assert peer.heard("receipt")[0].receipt.durability == pb.MEMORY
    assert len(peer.offsets) == 3
    peer.say(request_id=6, produce=produce, body=encode(rows, topic="/default/fast"))
    await settle()
    assert len(peer.offsets) == 3, "it has no permits"
    peer.say(flow=pb.Flow(consumer=subscribed.consumer, messages=10))
    peer.say(request_id=7, produce=produce, body=encode(rows, topic="/default/fast"))
    await settle()
    assert len(peer.offsets) == 8


@simulated
async def test_a_non_reliable_batch_over_the_rate_is_refused_whole_and_sent_again_comes_once() -> None:
    host = BrokerFixture(policies=TopicPolicy(max_publish_rate=10))
    await host.boot()
    peer = await Peer.greeted(server_of(host))
    request = pb.OpenProducer(topic="/default/fast", producer_name="p", create=True)
    opened = (await peer.ask(open_producer=request)).command.producer_opened
    await peer.subscribe(topic="/default/fast")
    arrived: list[bytes] = []
    for number, pause, answer in [(0, 0.0, "receipt"), (1, 1.0, "error"), (1, 0.6, "receipt"), (2, 2.4, "error")]:
        await asyncio.sleep(pause)
        rows = rows_of([Envelope(b"%d %d" % (number, row)) for row in range(25)])
        body = encode(rows, topic="/default/fast")
        answered = await peer.ask(produce=pb.Produce(producer=opened.producer), body=body)
        assert answered.kind == answer
        assert answer == "receipt" or answered.command.error.code == pb.RATE_LIMITED
        await settle()
    for frame in peer.frames:
        if frame.kind == "deliver":
            arrived += [message.payload for message in messages(parse(frame.body))]
    assert arrived == [b"%d %d" % (number, row) for number in range(2) for row in range(25)]
