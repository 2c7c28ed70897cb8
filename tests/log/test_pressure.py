"""What has come and is not on disk has a bound: native producers wait, unary sends are refused and may try again."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import pytest

from pydanube.api import admission
from pydanube.api.admission import Intake
from pydanube.api.server import OPTIONS, UNREAD_MAX_BYTES
from pydanube.broker.service import Broker
from pydanube.config import StorageConfig
from pydanube.config.grpc import GrpcConfig
from pydanube.errors import LogBusy
from pydanube.log.pressure import Pressure
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.harness.brokers import KIB, ORDERS, BrokerFixture, find_topic, message, settle, simulated, small_wal
from tests.harness.peers import Peer, batch_of, server_of
from tests.harness.servers import Calls, refused, served, serving
from tests.support import run

BOUND = 1024 * KIB
SWEEP_SECONDS = 2.0
INITIAL_WINDOW_SIZE = 4  # of HTTP/2's settings


async def host_with(bound: int = BOUND) -> BrokerFixture:
    host = BrokerFixture()
    host.config = replace(host.config, storage=replace(host.config.storage, pending_bytes=bound))
    with small_wal(group_bytes=64 * KIB):
        await host.boot()
    return host


@asynccontextmanager
async def held(broker: Broker) -> AsyncIterator[Pressure]:
    """The disk does not answer."""
    async with broker.wal.committer.between_groups():
        yield broker.wal.committer.pressure


async def sweep(server: Any, seconds: float) -> None:
    """As the server does by itself."""
    for _ in range(int(seconds / SWEEP_SECONDS)):
        await asyncio.sleep(SWEEP_SECONDS)
        for connection in list(server.connections):
            connection.check_time(asyncio.get_running_loop().time())


# --- native -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [16 * KIB, 128 * KIB])  # parsed on the loop, and in a thread
@simulated
async def test_a_hundred_native_producers_wait_when_too_much_is_not_on_disk_and_all_is_stored(size_bytes: int) -> None:
    host = await host_with()
    server = server_of(host)
    peers = [await Peer.greeted(server) for _ in range(100)]
    opened = [await peer.open_producer(f"p{number}") for number, peer in enumerate(peers)]
    async with held(host.broker) as pressure:
        for sequence in range(8):
            for peer, each in zip(peers, opened, strict=True):
                peer.produce(each, sequence, bytes(size_bytes))
            await settle()
        # Whoever produced nothing before may add what one read brings.
        assert BOUND < pressure.queued_bytes < BOUND + 100 * (size_bytes + KIB)
        assert pressure.held == sum(not peer.transport.reads for peer in peers) > 0
    await asyncio.sleep(5)
    assert [len(peer.heard("receipt")) for peer in peers] == [8] * 100
    assert (await find_topic(host.broker)).head == 800
    assert (pressure.queued_bytes, pressure.partial_bytes, pressure.held) == (0, 0, 0)
    assert all(peer.transport.reads for peer in peers)


@simulated
async def test_a_frame_that_has_come_in_part_counts_and_its_peer_waits() -> None:
    host = await host_with()
    server = server_of(host)
    peers = [await Peer.greeted(server) for _ in range(2)]
    opened = [await peer.open_producer(f"p{number}") for number, peer in enumerate(peers)]
    whole = b"".join(bytes(each) for each in batch_of(opened[1], 0, bytes(700 * KIB)).buffers)
    command = pb.Command(request_id=5, produce=pb.Produce(producer=opened[1].producer)).SerializeToString()
    frame = (2 + len(command) + len(whole)).to_bytes(4, "little") + len(command).to_bytes(2, "little") + command + whole
    async with held(host.broker) as pressure:
        peers[0].produce(opened[0], 0, bytes(600 * KIB))
        await settle()
        peers[1].write(frame[: 600 * KIB])
        assert pressure.partial_bytes >= 590 * KIB and not peers[1].transport.reads
        peers[1].write(frame[600 * KIB :])
    await settle()
    assert peers[1].heard("receipt") and pressure.partial_bytes == 0
    peers[1].write(frame[: 600 * KIB])
    peers[1].transport.abort()
    await settle()
    assert pressure.partial_bytes == 0


@simulated
async def test_a_batch_larger_than_the_bound_is_stored_like_any_other() -> None:
    host = await host_with(4 * KIB)
    peer = await Peer.greeted(server_of(host))
    opened = await peer.open_producer()
    for sequence in range(3):
        peer.produce(opened, sequence, bytes(200 * KIB))
        await settle()
    assert len(peer.heard("receipt")) == 3 and peer.transport.reads


@simulated
async def test_a_peer_that_is_held_is_not_taken_for_dead_and_its_acks_and_pings_wait_a_bounded_time() -> None:
    host = await host_with(64 * KIB)
    server = server_of(host)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    peer.produce(opened, 0, b"first")
    subscribed = await peer.subscribe()
    await settle()
    async with held(host.broker) as pressure:
        peer.produce(opened, 1, bytes(100 * KIB))
        await settle()
        assert not peer.transport.reads and pressure.held == 1
        peer.say(request_id=50, ack=pb.Ack(consumer=subscribed.consumer, ranges=[0, 1]))
        peer.say(request_id=51, ping=pb.Ping())
        peer.produce(opened, 2, b"refused")
        await sweep(server, 8)
        assert [frame.command.request_id for frame in peer.frames[-2:]] == [50, 51]
        assert peer.transport.reads and pressure.refused == 1
        for number in range(52, 60):
            await sweep(server, 10)
            answer = await peer.ask(ping=pb.Ping())
            assert answer.kind == "pong", number
    await settle()
    assert [command.request_id for command in peer.heard("receipt")] == [10_000, 10_001]
    [error] = peer.heard("error")
    assert (error.request_id, error.error.code, error.error.retryable) == (10_002, pb.LOG_BUSY, True)
    peer.produce(opened, 2, b"again", request_id=60)
    await settle()
    assert peer.heard("receipt")[-1].receipt.offset == 2


@simulated
async def test_a_batch_that_is_refused_is_answered_behind_a_larger_one_that_is_still_being_parsed() -> None:
    """A client that gets an answer out of turn can only give up."""
    host = await host_with()
    server = server_of(host)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    async with held(host.broker) as pressure:
        pressure.add(BOUND)  # others have sent
        peer.produce(opened, 0, b"first")
        await sweep(server, 8)
        assert peer.transport.reads, "what it sends is refused from now on, as long as too much waits"
        pressure.remove(100 * KIB)  # not enough for the peers that are held
        peer.produce(opened, 1, bytes(200 * KIB))
        peer.produce(opened, 2, b"refused")
        await settle()
        assert pressure.refused == 1
        pressure.remove(BOUND - 100 * KIB)
    await settle()
    answers = [
        command.request_id for command in (frame.command for frame in peer.frames) if command.request_id >= 10_000
    ]
    assert answers == [10_000, 10_001, 10_002]
    assert [command.request_id for command in peer.heard("error")] == [10_002]


@simulated
async def test_a_peer_with_too_much_of_its_own_that_is_not_on_disk_is_heard_again_after_a_while() -> None:
    host = await host_with()
    server = server_of(host, unwritten_bytes=100 * KIB)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    async with held(host.broker):
        for sequence in range(3):
            peer.produce(opened, sequence, bytes(60 * KIB))
        peer.say(request_id=51, ping=pb.Ping())
        assert not peer.transport.reads
        await sweep(server, 20)
        assert peer.heard("pong") and not peer.is_closed
    await settle()
    assert [command.request_id for command in peer.heard("receipt")] == [10_000, 10_001]
    assert [command.error.code for command in peer.heard("error")] == [pb.LOG_BUSY]


@simulated
async def test_who_only_consumes_is_never_held() -> None:
    host = await host_with(16 * KIB)
    server = server_of(host)
    producer, consumer = await Peer.greeted(server), await Peer.greeted(server)
    opened = await producer.open_producer()
    producer.produce(opened, 0, b"a")
    subscribed = await consumer.subscribe()
    async with held(host.broker):
        producer.produce(opened, 1, bytes(60 * KIB))
        answer = await consumer.ask(ack=pb.Ack(consumer=subscribed.consumer, ranges=[0, 1]))
        assert answer.kind == "done" and consumer.transport.reads


@simulated
async def test_nothing_stays_counted_of_connections_that_are_lost() -> None:
    host = await host_with()
    server = server_of(host)
    peer = await Peer.greeted(server)
    opened = await peer.open_producer()
    async with held(host.broker) as pressure:
        for sequence in range(8):
            peer.produce(opened, sequence, bytes(200 * KIB))
        peer.transport.abort()
        await settle()
        assert pressure.held == 0
    await settle()
    assert pressure.queued_bytes == 0


# --- unary ------------------------------------------------------------------------------------------


@simulated
async def test_unary_messages_beyond_the_bound_are_refused_and_may_be_tried_again() -> None:
    host = await host_with(256 * KIB)
    broker = host.broker
    peer = await Peer.greeted(server_of(host))
    await peer.open_producer()
    topic = await find_topic(broker)
    producer = await topic.add_producer("unary")
    async with held(broker) as pressure:
        sends = [asyncio.ensure_future(topic.publish(producer, message("x" * 16 * KIB))) for _ in range(100)]
        await settle()
        assert 256 * KIB < pressure.queued_bytes < 512 * KIB
        answered = [each for each in sends if each.done()]
        assert 80 < len(answered) < 100 and all(isinstance(each.exception(), LogBusy) for each in answered)
        assert pressure.refused == len(answered)
    stored = [await each for each in sends if each not in answered]
    assert stored == list(range(100 - len(answered)))
    assert pressure.queued_bytes == 0
    assert await topic.publish(producer, message("again")) == len(stored)


@served(storage=StorageConfig(pending_bytes=2 * KIB * KIB))
async def test_unary_sends_beyond_the_bound_are_exhausted_which_clients_try_again(calls: Calls) -> None:
    producer = await calls.create_producer()
    await calls.send(producer)
    async with held(calls.broker) as pressure:
        sends = [asyncio.ensure_future(calls.send(producer, bytes(256 * KIB))) for _ in range(100)]
        while sum(each.done() for each in sends) < 90:
            await asyncio.wait([each for each in sends if not each.done()], return_when=asyncio.FIRST_COMPLETED)
        assert pressure.queued_bytes < 2 * pressure.limit_bytes
        code, sentence = await refused(calls.send(producer, b"small"))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "storage.wal.pending_mb" in sentence
    results = await asyncio.gather(*sends, return_exceptions=True)
    codes = {each.code() for each in results if isinstance(each, grpc.aio.AioRpcError)}
    assert codes == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert await calls.send(producer) == 7
    assert pressure.queued_bytes == 0


@served()
async def test_requests_are_answered_alike_whichever_way_they_are_received(
    calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = await calls.create_producer()
    monkeypatch.setattr(admission, "RECEIVING_MAX", 0)  # all of them the careful way
    assert await asyncio.gather(*(calls.send(producer, bytes(100 * KIB)) for _ in range(50))) == [7] * 50
    assert (await find_topic(calls.broker, ORDERS)).head == 50
    code, _ = await refused(calls.send(producer, bytes(5 * KIB * KIB)))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


@simulated
async def test_only_so_many_requests_are_received_at_once_and_a_cancelled_one_is_forgotten() -> None:
    bounded = Intake(Pressure(100, lambda: 0))
    assert [bounded.begins() for _ in range(admission.RECEIVING_MAX + 1)].count(True) == admission.RECEIVING_MAX
    bounded.received()
    assert [bounded.begins(), bounded.begins()] == [True, False]
    await asyncio.sleep(admission.FORGOTTEN_SECONDS + 1)
    assert bounded.begins()


@simulated
async def test_a_request_that_would_be_refused_is_not_received_and_is_refused_once() -> None:
    pressure = Pressure(100, lambda: 0)
    intake = Intake(pressure)
    pressure.add(101)
    assert not intake.begins()

    async def requests() -> AsyncIterator[Any]:
        raise AssertionError("it was read")
        yield

    async def refuse(error: Exception, context: Any) -> Exception:
        return error

    async def answer(request: Any, context: Any) -> None:
        raise AssertionError("it was answered")

    assert isinstance(await intake.carefully(answer, refuse)(requests(), None), LogBusy)
    assert pressure.refused == 1
    pressure.remove(1)
    assert intake.begins()


@pytest.mark.parametrize(("server", "unread_bytes"), [("own", 65_535), ("grpcio", UNREAD_MAX_BYTES)])
def test_of_a_call_that_nobody_has_looked_at_only_the_beginning_is_received(server: str, unread_bytes: int) -> None:
    """This much of every call comes unasked. Of a larger one our own server lets the rest come when all calls together
    have room for it (`Held`; tests/wire/test_grpc_server.py).
    """

    async def main() -> None:
        async with serving(grpc_config=GrpcConfig(server=server)) as calls:
            host, port = calls.servers.client_addr.rsplit(":", 1)
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))  # no settings
            length = int.from_bytes(await reader.readexactly(3))
            kind = (await reader.readexactly(6))[0]
            settings = dict(struct.iter_unpack(">HI", await reader.readexactly(length)))
            writer.close()
            assert kind == 4 and settings[INITIAL_WINDOW_SIZE] == unread_bytes

    run(main())
    assert ("grpc.http2.bdp_probe", 0) in OPTIONS, "the probe would announce megabytes later"


# --- the count itself -------------------------------------------------------------------------------


def test_nobody_is_held_by_frames_alone_for_nobody_would_wake_him() -> None:
    pressure = Pressure(100, lambda: 0)
    pressure.partial_bytes = 1000
    assert not pressure.holds
    pressure.add(1)
    assert pressure.holds and not pressure.is_over
    pressure.check()


def test_frames_that_have_come_in_part_take_half_of_the_bound_from_calls_and_never_all_of_it() -> None:
    pressure = Pressure(100, lambda: 0)
    pressure.partial_bytes = 100
    pressure.add(50)
    pressure.check()
    pressure.add(1)
    with pytest.raises(LogBusy):
        pressure.check()
    pressure.partial_bytes = 1000
    pressure.remove(1)
    pressure.check()


def test_those_that_wait_are_called_once_when_half_of_the_bound_is_free() -> None:
    pressure = Pressure(100, lambda: 0)
    called: list[int] = []
    pressure.add(150)
    pressure.call_when_relieved(lambda: called.append(1))
    pressure.remove(90)
    assert not called
    pressure.remove(10)
    pressure.remove(50)
    assert called == [1] and pressure.held == 0
