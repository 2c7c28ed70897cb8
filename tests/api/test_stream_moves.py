"""A topic that goes to another broker: its native peers are told once and go on there, with nothing lost or repeated.

Two brokers in one process, each with a topic of the same name; closing it on the first with the URL of the second is
what a move looks like to clients.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import wraps

import grpc
import pytest

import pydanube
from pydanube.broker.topic import Topic
from pydanube.core.names import TopicName
from pydanube.core.policies import Delivery
from pydanube.formats.batch import Envelope, messages
from pydanube.testing.brokers import TestBroker
from pydanube.wire._pb.danube import DanubeApi_pb2
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from tests.harness.brokers import ORDERS, BrokerFixture, find_topic, settle, simulated
from tests.harness.peers import Peer, server_of
from tests.stubs.danube import DanubeApi_pb2_grpc
from tests.support import run

TOPIC = TopicName(ORDERS)
REASON = "it moved to another broker"


# --- what a peer is told ------------------------------------------------------------------------------


@simulated
async def test_each_connection_is_told_once_where_the_topic_is_now() -> None:
    host = BrokerFixture()
    await host.boot()
    server = server_of(host)
    both, only_producer, stranger = [await Peer.greeted(server) for _ in range(3)]
    opened = await both.open_producer("a")
    await both.open_producer("b")
    subscribed = await both.subscribe()
    await only_producer.open_producer("c")
    await stranger.open_producer("d", "/default/elsewhere")
    await (await find_topic(host.broker)).close(REASON, moved_to="danube://there:6651", owned=False)
    await settle()
    for peer in (both, only_producer):
        (moved,) = peer.heard("moved")
        assert (moved.moved.topic, moved.moved.stream_url) == (ORDERS, "danube://there:6651")
        assert not peer.heard("error") and not peer.is_closed
    assert not stranger.heard("moved")
    both.produce(opened, 0, b"late", request_id=5)
    both.say(flow=pb.Flow(consumer=subscribed.consumer, messages=1))
    await settle()
    assert both.heard("error")[-1].error.code == pb.PRODUCER_UNKNOWN


@simulated
async def test_receipts_of_what_was_stored_come_before_the_news() -> None:
    host = BrokerFixture()
    await host.boot()
    peer = await Peer.greeted(server_of(host))
    opened = await peer.open_producer()
    topic = await find_topic(host.broker)
    for sequence in range(3):
        peer.produce(opened, sequence, b"x")
    await topic.close(REASON, moved_to="danube://there:6651", owned=False)
    await settle()
    kinds = [frame.kind for frame in peer.frames if frame.kind in ("receipt", "error", "moved")]
    assert kinds == [*["receipt"] * topic.head, *["error"] * (3 - topic.head), "moved"]


@simulated
async def test_a_peer_whose_handles_are_closed_is_not_told() -> None:
    host = BrokerFixture()
    await host.boot()
    peer = await Peer.greeted(server_of(host))
    opened = await peer.open_producer()
    subscribed = await peer.subscribe()
    await peer.ask(close_producer=pb.CloseProducer(producer=opened.producer))
    await peer.ask(close_consumer=pb.CloseConsumer(consumer=subscribed.consumer))
    gone = await Peer.greeted(server_of(host))
    await gone.open_producer("gone")
    gone.transport.abort()
    await settle()
    topic = await find_topic(host.broker)
    assert not topic.closed._watchers
    await topic.close(REASON, owned=False)
    await settle()
    assert not peer.heard("moved")


@simulated
async def test_acks_of_a_topic_that_is_about_to_leave_are_refused_and_not_the_end_of_the_connection() -> None:
    host = BrokerFixture()
    await host.boot()
    peer = await Peer.greeted(server_of(host))
    opened = await peer.open_producer()
    subscribed = await peer.subscribe()
    peer.produce(opened, 0, b"x")
    await settle()
    topic = await find_topic(host.broker)
    topic.pause("it is about to move")
    ack = pb.Ack(consumer=subscribed.consumer, ranges=[0, 1])
    peer.say(ack=ack)
    answer = await peer.ask(ack=ack)
    assert answer.command.error.code == pb.NOT_SERVED and answer.command.error.retryable
    peer.produce(opened, 1, b"y", request_id=9)
    await settle()
    assert peer.heard("error")[-1].error.code == pb.NOT_SERVED and not peer.is_closed
    topic.resume()
    assert (await peer.ask(ack=ack)).kind == "done"


# --- what a client does -------------------------------------------------------------------------------


class Pair:
    """Two brokers with a topic of the same name, and a client that knows the first."""

    def __init__(self, old: TestBroker, new: TestBroker, client: pydanube.Client) -> None:
        self.old, self.new, self.client = old, new, client

    async def move(self) -> None:
        old, new = topic_of(self.old), topic_of(self.new)
        old.pause(REASON, self.new.url)
        await old.drain()
        new.log.sessions = old.log.sessions.copy()  # as a seal hands them over
        await old.close(REASON, moved_to=self.new.url, owned=False)

    async def stored(self) -> list[int]:
        """What both brokers have, in order."""
        found: list[int] = []
        for broker in (self.old, self.new):
            batches = await topic_of(broker).log.read(0, bytes_max=1 << 30)
            found += [int(message.payload) for batch in batches for message in messages(batch)]
        return found


TOPICS: dict[TestBroker, Topic] = {}


def topic_of(broker: TestBroker) -> Topic:
    """Also one that is closed."""
    return TOPICS[broker]


@asynccontextmanager
async def pair(delivery: Delivery = Delivery.RELIABLE) -> AsyncIterator[Pair]:
    async with TestBroker(memory=True) as old, TestBroker(memory=True) as new:
        for broker in (old, new):
            assert broker._broker is not None
            topic = await broker._broker.topics.create(TOPIC, delivery=delivery)
            assert isinstance(topic, Topic)
            TOPICS[broker] = topic
        async with pydanube.connect(old.url, timeout=20) as client:
            yield Pair(old, new, client)
        TOPICS.clear()


def moving(test: Callable[[Pair], Awaitable[None]]) -> Callable[[], None]:
    async def inside() -> None:
        async with pair() as brokers, asyncio.timeout(30):
            await test(brokers)

    @wraps(test)
    def outside() -> None:
        run(inside())

    del outside.__wrapped__  # type: ignore[attr-defined]  # pytest would take its parameters for fixtures
    return pytest.mark.slow(outside)


@moving
async def test_a_producer_goes_on_there_and_loses_and_repeats_nothing(brokers: Pair) -> None:
    async with brokers.client.producer(TOPIC, batch_messages=7) as producer:
        receipts = {}

        async def send(number: int) -> None:
            receipts[number] = await producer.send(b"%d" % number)

        sending = [asyncio.ensure_future(send(number)) for number in range(200)]
        await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
        await brokers.move()
        sending += [asyncio.ensure_future(send(number)) for number in range(200, 300)]
        await asyncio.gather(*sending)
        stored = await brokers.stored()
        assert stored == list(range(300)), "each once, in the order in which they were sent"
        assert topic_of(brokers.new).head > 0 and brokers.new.url in brokers.client.brokers
        assert receipts[299].offset == topic_of(brokers.new).head - 1


@moving
async def test_a_consumer_goes_on_there(brokers: Pair) -> None:
    async with brokers.client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
        async with brokers.client.producer(TOPIC) as producer:
            await producer.send(b"0")
            message = await consumer.receive()
            assert message.payload == b"0"
            await message.ack()
            await consumer.flush()
            await brokers.move()
            await producer.send(b"1")
            again = await consumer.receive()
            assert again.payload == b"1"
            await again.ack()
            await consumer.flush()
        subscription = next(iter(topic_of(brokers.new).subscriptions.values()))
        assert topic_of(brokers.new).head == 1 and not subscription.has_lag()


@moving
async def test_an_ack_that_the_old_broker_did_not_take_is_told_to_the_new_one(brokers: Pair) -> None:
    """Both topics hold the same message, as after a real move."""
    for broker in (brokers.old, brokers.new):
        topic = topic_of(broker)
        await topic.publish(await topic.add_producer("p"), Envelope(b"0", producer_name="p"))
    async with brokers.client.consumer(TOPIC, subscription="s", start="earliest") as consumer:
        message = await consumer.receive()
        topic_of(brokers.old).pause("it is about to move")
        await message.ack()
        await asyncio.sleep(0.05)
        await brokers.move()
        await consumer.flush()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await consumer.receive()
    subscription = next(iter(topic_of(brokers.new).subscriptions.values()))
    assert not subscription.has_lag()


@moving
async def test_a_topic_that_moved_without_saying_where_is_looked_up(brokers: Pair) -> None:
    """The old broker opens it again when it is asked for: a restart looks like this."""
    async with brokers.client.producer(TOPIC) as producer:
        await producer.send(b"0")
        assert brokers.old._broker is not None
        topics = brokers.old._broker.topics
        await topics._open.pop(TOPIC).close("it is opened again")
        assert (await producer.send(b"1")).offset == 1


@moving
async def test_brokers_that_name_each_other_are_not_asked_without_end(brokers: Pair) -> None:
    async with brokers.client.producer(TOPIC) as producer:
        await producer.send(b"0")
        old, new = topic_of(brokers.old), topic_of(brokers.new)
        asked: list[str] = []
        for topic, other in ((old, brokers.new), (new, brokers.old)):
            topic.pause("it is about to move", other.url)
            add = topic.add_producer

            async def count(name: str, *, exclusive: bool = False, add: object = add) -> object:
                asked.append(name)
                return await add(name, exclusive=exclusive)  # type: ignore[operator]

            topic.add_producer = count  # type: ignore[method-assign, assignment]
        sending = asyncio.ensure_future(producer.send(b"1"))
        await asyncio.sleep(1.0)
        assert 4 <= len(asked) <= 12, "four at once, then with growing pauses"
        new.log.sessions = old.log.sessions.copy()  # as a seal hands them over
        new.resume()
        await sending


@moving
async def test_streams_of_official_clients_end_so_that_they_look_the_topic_up_again(brokers: Pair) -> None:
    async with grpc.aio.insecure_channel(brokers.old.grpc_url.removeprefix("http://")) as channel:
        consumers = DanubeApi_pb2_grpc.ConsumerServiceStub(channel)
        request = DanubeApi_pb2.ConsumerRequest(
            topic_name=TOPIC, consumer_name="c", subscription="s", subscription_type=1
        )
        identity = (await consumers.Subscribe(request)).consumer_id
        stream = consumers.ReceiveMessages(DanubeApi_pb2.ReceiveRequest(consumer_id=identity))
        reading = asyncio.ensure_future(stream.read())
        await asyncio.sleep(0.1)
        await brokers.move()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await reading
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
