"""A tail reads what is published, without a subscription; requests get their replies over non-reliable topics."""

from __future__ import annotations

import asyncio

import pytest

import pydanube
import pydanube.testing
from pydanube.client.client import Client
from pydanube.client.messages import Message
from pydanube.core.names import TopicName
from pydanube.errors import ClientClosed, DeadlineExceeded, DeliveryMismatch, NeverOpened, RequestFailed, TopicUnknown
from pydanube.testing import Cluster
from pydanube.testing.loop import run as simulate
from tests.harness.wired import Wires, wired

TOPIC = "/default/t"


async def put(client: Client, *payloads: bytes, topic: str = TOPIC) -> None:
    async with client.producer(topic) as producer:
        for payload in payloads:
            await producer.send(payload)


# --- the tail -----------------------------------------------------------------------------------------


@wired
async def test_a_tail_reads_what_comes_and_leaves_nothing_at_the_broker(wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, b"before")
        metadata = wires.broker.topics.context.metadata
        known = [item.key for item in await metadata.list("/topics/")]
        async with client.tail(TOPIC) as tail:
            reading = asyncio.create_task(tail.receive(timeout=100))
            await asyncio.sleep(50)  # longer than one question takes
            await put(client, b"a", b"b")
            first, second = await reading, await tail.receive()
            assert (first.payload, first.offset, second.payload, second.attempt) == (b"a", 1, b"b", 1)
            assert first.append_time is not None and first.producer_name is not None and first.key is None
            with pytest.raises(DeadlineExceeded):
                await tail.receive(timeout=0.1)
            topic = wires.broker.topics.get(TopicName(TOPIC))
            assert topic is not None and not topic.subscriptions
            assert not [item.key for item in await metadata.list("/topics/") if "subscriptions" in item.key]
        assert tail.offsets == {TOPIC: 3}
        assert {item.key.rsplit("/", 1)[0] for item in await metadata.list("/topics/")} >= {
            key.rsplit("/", 1)[0] for key in known
        }


@wired
async def test_a_tail_goes_on_where_another_ended(wires: Wires) -> None:
    async with wires.connect() as client:
        await put(client, *(b"%d" % number for number in range(10)))
        async with client.tail(TOPIC, start="earliest") as tail:
            for _ in range(4):
                await tail.receive()
        async with client.tail(TOPIC, start=tail.offsets[TOPIC]) as again:
            found = [(await again.receive()).payload for _ in range(6)]
        assert found == [b"4", b"5", b"6", b"7", b"8", b"9"]


@wired
async def test_a_tail_reads_all_partitions_each_in_order(wires: Wires) -> None:
    async with wires.connect() as client:
        await client.create_topic(TOPIC, partitions=3)
        async with client.producer(TOPIC) as producer:
            for number in range(60):
                producer.send_nowait(b"%d" % number)
            await producer.flush()
        found: dict[str, list[int]] = {}
        async with client.tail(TOPIC, start="earliest") as tail:
            async for message in tail:
                found.setdefault(message.topic, []).append(message.offset)
                if sum(map(len, found.values())) == 60:
                    break
        assert sorted(found) == [f"{TOPIC}-part-{part}" for part in range(3)]
        assert all(offsets == list(range(20)) for offsets in found.values())


@wired
async def test_batches_of_a_tail_go_on_behind_the_messages_that_were_read(wires: Wires) -> None:
    async with wires.connect() as client:
        async with client.producer(TOPIC) as producer:
            for number in range(5):
                producer.send_nowait(b"%d" % number)
            await producer.flush()
        async with client.tail(TOPIC, start=1) as tail:
            assert (await tail.receive()).offset == 1
            found: list[int] = []
            async for batch in tail.batches():
                found += batch.arrow.column("offset").to_pylist()
                assert len(batch) == batch.arrow.num_rows and batch.topic == TOPIC
                if found[-1] == 4:
                    break
        assert found == [2, 3, 4] and tail.offsets == {TOPIC: 5}


@wired
async def test_what_a_tail_cannot_read_is_said(wires: Wires) -> None:
    async with wires.connect() as client:
        await client.create_topic("/default/volatile", reliable=False)
        with pytest.raises(DeliveryMismatch):
            await client.tail("/default/volatile").open()
        with pytest.raises(TopicUnknown):
            await client.tail("/default/none").open()
        await put(client, b"x")
        tail = client.tail(TOPIC)
        with pytest.raises(NeverOpened):
            await tail.receive()
        with pytest.raises(NeverOpened):
            async for _ in tail:
                pass
        await tail.open()
        reading = asyncio.create_task(tail.receive())
        await asyncio.sleep(1)
        await tail.close()
        with pytest.raises(ClientClosed):
            await reading
        async with client.tail(TOPIC) as tail:
            await client.delete_topic(TOPIC)
            with pytest.raises(TopicUnknown):
                await tail.receive(timeout=50)


def test_a_tail_follows_its_topic_to_another_broker_and_says_what_only_the_lost_one_may_have() -> None:
    async def inside() -> list[bytes]:
        cluster = await Cluster(seed=3).start(3)
        topic = await cluster.create("/default/orders", on=1)
        async with cluster.client() as client, client.producer(topic) as producer, client.tail(topic) as tail:
            await producer.send(b"1")
            found = [(await tail.receive()).payload]
            cluster.node(1).kill()
            await producer.send(b"2")
            found.append((await tail.receive(timeout=120)).payload)
            [(of, first, end)] = tail.skipped  # what the dead broker may have stored behind the first
            assert (of, first) == (topic, 1) and end > 1
            return found

    assert simulate(inside(), seed=3) == [b"1", b"2"]


def test_a_tail_without_async_ends_with_its_block() -> None:
    with pydanube.testing.broker(memory=True) as broker, pydanube.blocking.connect(broker.url) as client:
        with client.producer(TOPIC) as producer:
            for number in range(3):
                producer.send(b"%d" % number)
        with client.tail(TOPIC, start="earliest") as tail:
            found = []
            for message in tail:
                found.append(message.payload)
                if len(found) == 2:
                    break
            assert tail.receive(timeout=5).payload == b"2"
        assert (found, tail.offsets) == ([b"0", b"1"], {TOPIC: 3})


# --- requests -----------------------------------------------------------------------------------------


@wired
async def test_many_requests_at_once_each_get_their_own_reply_from_several_who_serve(wires: Wires) -> None:
    async with wires.connect() as one, wires.connect() as other:
        async with one.requests(TOPIC) as here, other.requests(TOPIC) as there:
            served = [0, 0]

            async def square(request: Message, who: int) -> bytes:
                served[who] += 1
                await asyncio.sleep(0.1)
                return b"%d" % int(request.payload) ** 2

            serving = [
                asyncio.create_task(here.serve(lambda request: square(request, 0))),
                asyncio.create_task(there.serve(lambda request: square(request, 1))),
            ]
            await asyncio.sleep(1)
            replies = await asyncio.gather(*(here.ask(b"%d" % n) for n in range(20)), there.ask(b"100"))
            assert replies == [*(b"%d" % n**2 for n in range(20)), b"10000"]
            assert min(served) > 0 and sum(served) == 21
            for task in serving:
                task.cancel()
            await asyncio.gather(*serving, return_exceptions=True)
        topic = wires.broker.topics.get(TopicName(f"{TOPIC}.replies"))
        assert topic is not None and not topic.subscriptions  # those who asked left nothing behind


@wired
async def test_a_request_that_nobody_answers_and_one_that_cannot_be_answered_are_told_apart(wires: Wires) -> None:
    async with wires.connect() as client, client.requests(TOPIC) as requests:
        with pytest.raises(DeadlineExceeded, match="no reply has come"):
            await requests.ask(b"1", timeout=2)

        def refuse(request: Message) -> bytes:
            raise ValueError(f"{request.payload!r} is odd")

        serving = asyncio.create_task(requests.serve(refuse))
        await asyncio.sleep(1)
        with pytest.raises(RequestFailed, match="ValueError: b'1' is odd"):
            await requests.ask(b"1")
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        asking = asyncio.create_task(requests.ask(b"1"))
        await asyncio.sleep(0.5)
        await requests.close()
        with pytest.raises(ClientClosed):
            await asking
        with pytest.raises(ClientClosed):
            await requests.ask(b"1")
