"""Peers that stall, and what stalls them: permits that do not come back, places that nobody gives up, bytes that stay
counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pydanube.api.admission import RECEIVING_MAX, Intake
from pydanube.config.stream import StreamLimits
from pydanube.errors import DeadlineExceeded
from pydanube.log.pressure import Pressure
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.api.test_native_server import MIB, SUBSCRIPTION, opened_server
from tests.harness.brokers import KIB, ORDERS, find_topic, settle, simulated
from tests.harness.peers import Peer, batch_of, server_of
from tests.log.test_pressure import held, host_with, sweep

UNSENT = StreamLimits().unsent_bytes


@pytest.mark.parametrize(
    ("size", "window"),
    [(UNSENT + KIB, 100 * KIB), (2 * UNSENT + 100 * KIB, 100 * KIB), (2 * UNSENT + 100 * KIB, UNSENT)],
)
@simulated
async def test_a_consumer_goes_on_behind_batches_larger_than_what_may_be_unsent(size: int, window: int) -> None:
    server = await opened_server()
    producer = await Peer.greeted(server)
    opened = await producer.open_producer()
    for number in range(3):
        producer.produce(opened, number * 4, *(bytes(size // 4) for _ in range(4)))
        await settle()
    topic = await find_topic(server.broker)
    assert topic.head == 12
    peer = await Peer.greeted(server)
    subscribed = await peer.subscribe(messages=1000, size_bytes=window)
    seen = 0
    for _ in range(20):
        await settle()
        delivered = [frame for frame in peer.frames if frame.kind == "deliver"]
        for frame in delivered[seen:]:
            first, end = frame.command.deliver.ranges
            peer.say(flow=pb.Flow(consumer=subscribed.consumer, messages=end - first, bytes=len(frame.body)))
            peer.say(ack=pb.Ack(consumer=subscribed.consumer, ranges=[first, end], seeks=0))
        seen = len(delivered)
    assert topic.require(SUBSCRIPTION).get_lag_info().lag_messages == 0


@simulated
async def test_a_delivery_in_pieces_says_how_often_the_subscription_was_moved() -> None:
    server = await opened_server()
    producer = await Peer.greeted(server)
    opened = await producer.open_producer()
    producer.produce(opened, 0, *(bytes([number]) * 10 * KIB for number in range(30)))
    await settle()
    peer = await Peer.greeted(server, frame_size_max=64 * KIB)
    subscribed = await peer.subscribe()
    await settle()
    answer = await peer.ask(seek=pb.Seek(topic=ORDERS, subscription=SUBSCRIPTION, to=pb.Place(offset=0)))
    assert answer.command.offset_found.seeks == 1
    peer.say(flow=pb.Flow(consumer=subscribed.consumer, messages=100, bytes=MIB))
    await settle()
    last = [frame for frame in peer.frames if frame.kind == "deliver"][-1].command.deliver
    done = await peer.ask(ack=pb.Ack(consumer=subscribed.consumer, ranges=last.ranges, seeks=last.seeks))
    assert (last.seeks, done.kind) == (1, "done")


@pytest.mark.parametrize("busy", [True, False])
@simulated
async def test_a_peer_that_failed_and_takes_nothing_leaves_nothing_counted(busy: bool) -> None:
    host = await host_with(256 * KIB)
    server = server_of(host)
    peer, other = await Peer.greeted(server), await Peer.greeted(server)
    opened, others = await peer.open_producer("p"), await other.open_producer("q")
    pressure = host.broker.wal.committer.pressure
    peer.takes_nothing = True
    peer.say(request_id=900, ping=pb.Ping())  # an answer that it does not take
    raw = b"".join(bytes(each) for each in batch_of(opened, 0, bytes(200 * KIB)).buffers)
    bad = bytearray(raw)
    bad[5000] ^= 0xFF

    def frame(body: bytes, number: int) -> bytes:
        command = pb.Command(request_id=number, produce=pb.Produce(producer=opened.producer))
        return b"".join(bytes(each) for each in frames.encode(command, body))

    data = frame(bytes(bad), 5) + frame(raw, 6) + frame(raw, 7)
    if busy:
        async with held(host.broker):
            other.produce(others, 0, bytes(200 * KIB))
            await settle()
            peer.write(data)
            await settle()
    else:
        peer.write(data)
        await settle()
    await settle()
    for _ in range(5):
        await sweep(server, 60)
        if not other.is_closed:
            other.say(ping=pb.Ping())
    assert (pressure.queued_bytes, pressure.held) == (0, 0)


@simulated
async def test_requests_that_never_come_do_not_keep_the_places_for_ever() -> None:
    intake = Intake(Pressure(100, lambda: 0))

    async def answer(request: Any, context: Any) -> Any:
        return request

    async def refuse(error: Exception, context: Any) -> Any:
        return error

    async def never() -> AsyncIterator[str]:
        await asyncio.Event().wait()
        yield ""

    async def one() -> AsyncIterator[str]:
        yield "x"

    careful = intake.carefully(answer, refuse)
    stuck: list[asyncio.Task[Any]] = [asyncio.create_task(careful(never(), None)) for _ in range(RECEIVING_MAX)]
    await asyncio.sleep(0)
    good: asyncio.Task[Any] = asyncio.create_task(careful(one(), None))
    await asyncio.sleep(120)
    assert good.result() == "x" and all(isinstance(each.result(), DeadlineExceeded) for each in stuck)
