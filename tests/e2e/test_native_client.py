"""Our own client against a broker in another process: killed brokers, other clients on the topic, every call."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import pydanube
from pydanube.core.names import partition_of_key
from pydanube.errors import (
    DeliveryMismatch,
    ProducerFenced,
    SubscriptionBusy,
    SubscriptionUnknown,
    TopicExists,
    TopicUnknown,
)
from tests.e2e.processes import BrokerProcess, broker_in
from tests.support import run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

NUMBERS = count()
README = Path(__file__).resolve().parent.parent.parent / "README.md"

Test = Callable[[pydanube.Client, str], Awaitable[None]]


def url_of(broker: BrokerProcess) -> str:
    return f"danube://127.0.0.1:{broker.stream_port}"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with broker_in(tmp_path_factory.mktemp("native")) as started:
        yield started


@pytest.fixture
def topic() -> str:
    return f"/default/native{next(NUMBERS)}"


def connected(test: Test) -> Callable[[BrokerProcess, str], None]:
    """Runs a test with a client of the module's broker and a topic of its own."""

    async def inside(url: str, topic: str) -> None:
        async with pydanube.connect(url, timeout=20) as client:
            await test(client, topic)

    @wraps(test)
    def outside(broker: BrokerProcess, topic: str) -> None:
        run(inside(url_of(broker), topic))

    del outside.__wrapped__  # type: ignore[attr-defined]  # pytest would take its parameters for fixtures
    return outside


async def publish(client: pydanube.Client, topic: str, *payloads: bytes, **options: Any) -> list[pydanube.Receipt]:
    async with client.producer(topic, **options) as producer:
        return [await producer.send(payload) for payload in payloads]


async def receive(consumer: pydanube.Consumer, number: int) -> list[pydanube.Message]:
    messages = [await consumer.receive(timeout=20) for _ in range(number)]
    for message in messages:
        await message.ack()
    return messages


# --- produce and consume ------------------------------------------------------------------------------


@connected
async def test_what_is_sent_arrives_once_in_order_and_with_everything(client: pydanube.Client, topic: str) -> None:
    async with client.producer(topic, name="p") as producer:
        receipts = await asyncio.gather(
            *(producer.send(b"%d" % n, key=f"k{n % 3}", attributes={"n": str(n)}) for n in range(100))
        )
        assert [receipt.offset for receipt in receipts] == list(range(100))
        assert {receipt.durability for receipt in receipts} == {"fsync"}
    async with client.consumer(topic, subscription="s", start="earliest") as consumer:
        messages = await receive(consumer, 100)
        assert [message.payload for message in messages] == [b"%d" % n for n in range(100)]
        assert [message.key for message in messages] == [f"k{n % 3}" for n in range(100)]
        assert messages[7].attributes == {"n": "7"} and messages[7].producer_name == "p"
        await consumer.flush()
        assert (await client.lag(topic, "s")).messages == 0


@connected
async def test_ten_thousand_in_large_batches_compressed(client: pydanube.Client, topic: str) -> None:
    async with client.producer(topic, compression="zstd") as producer:
        for number in range(10_000):
            producer.send_nowait(b"%d" % number)
        await producer.flush()
    async with client.consumer(topic, subscription="s", start="earliest") as consumer:
        payloads = []
        async for batch in consumer.batches():
            assert isinstance(batch.arrow, pa.RecordBatch)
            payloads += batch.arrow.column("payload").to_pylist()
            await batch.ack()
            if len(payloads) >= 10_000:
                break
    assert payloads == [b"%d" % number for number in range(10_000)]


@connected
async def test_non_reliable_messages_reach_who_is_there(client: pydanube.Client, topic: str) -> None:
    async with (
        client.producer(topic, reliable=False) as producer,
        client.consumer(topic, subscription="s") as consumer,
    ):
        assert (await producer.send(b"now")).durability == "memory"
        assert (await consumer.receive(timeout=10)).payload == b"now"


@connected
async def test_start_at_earliest_latest_an_offset_and_a_time(client: pydanube.Client, topic: str) -> None:
    await publish(client, topic, b"0", b"1", b"2")
    await asyncio.sleep(0.05)
    later = datetime.now(UTC)
    await asyncio.sleep(0.05)
    await publish(client, topic, b"3")
    places: dict[str, Any] = {"earliest": b"0", "latest": b"4"}
    async with ExitStackAsync() as stack:
        consumers = {
            name: await stack.enter(client.consumer(topic, subscription=name, start=start))
            for name, start in {"earliest": "earliest", "latest": "latest", "offset": 2, "time": later}.items()
        }
        await publish(client, topic, b"4")
        places |= {"offset": b"2", "time": b"3"}
        for name, consumer in consumers.items():
            message = await consumer.receive(timeout=10)
            assert message.payload == places[name], name
            await message.ack()


@connected
async def test_a_nacked_message_comes_again_after_its_delay(client: pydanube.Client, topic: str) -> None:
    await publish(client, topic, b"a")
    async with client.consumer(topic, subscription="s", start="earliest") as consumer:
        first = await consumer.receive(timeout=10)
        began = asyncio.get_running_loop().time()
        await first.nack(0.3, reason="not yet")
        again = await consumer.receive(timeout=10)
        assert again.offset == first.offset and again.attempt == 2
        assert asyncio.get_running_loop().time() - began >= 0.25


@connected
async def test_seeking_back_delivers_again(client: pydanube.Client, topic: str) -> None:
    await publish(client, topic, b"0", b"1", b"2", b"3")
    async with client.consumer(topic, subscription="s", start="earliest") as consumer:
        await receive(consumer, 4)
        await consumer.flush()
        await consumer.seek(2)
        assert [message.payload for message in await receive(consumer, 2)] == [b"2", b"3"]
    assert await client.seek(topic, "s", "earliest") == [0]
    async with client.consumer(topic, subscription="s") as consumer:
        assert (await consumer.receive(timeout=10)).payload == b"0"


@connected
async def test_shared_consumers_get_everything_between_them(client: pydanube.Client, topic: str) -> None:
    await client.create_topic(topic)
    async with (
        client.consumer(topic, subscription="s", type="shared", name="a") as first,
        client.consumer(topic, subscription="s", type="shared", name="b") as second,
    ):
        got: list[bytes] = []

        async def take(consumer: pydanube.Consumer) -> None:
            async for message in consumer:
                got.append(message.payload)
                await message.ack()

        tasks = [asyncio.ensure_future(take(consumer)) for consumer in (first, second)]
        await publish(client, topic, *(b"%d" % number for number in range(50)))
        async with asyncio.timeout(20):
            while len(got) < 50:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for task in tasks:
            task.cancel()
    assert sorted(got) == sorted(b"%d" % number for number in range(50))


# --- partitions and ranges ----------------------------------------------------------------------------


@connected
async def test_partitions_are_chosen_by_key_and_read_together(client: pydanube.Client, topic: str) -> None:
    async with client.producer(topic, partitions=3) as producer:
        for number in range(30):
            key = f"key-{number}"
            receipt = await producer.send(b"%d" % number, key=key)
            assert receipt.topic == f"{topic}-part-{partition_of_key(key, 3)}"
    assert (await client.describe_topic(topic)).partitions == 3
    async with client.consumer(topic, subscription="s", start="earliest") as consumer:
        messages = await receive(consumer, 30)
        await consumer.flush()
    assert sorted(int(message.payload) for message in messages) == list(range(30))
    assert (await client.lag(topic, "s")).messages == 0
    await client.unsubscribe(topic, "s")
    with pytest.raises(SubscriptionUnknown):
        await client.lag(topic, "s")


@connected
async def test_a_range_is_fetched_without_a_trace(client: pydanube.Client, topic: str) -> None:
    await publish(client, topic, *(b"%d" % number for number in range(20)))
    table = await client.fetch(topic, 3, 17).table()
    assert table.column("offset").to_pylist() == list(range(3, 17))
    assert table.column("payload").to_pylist() == [b"%d" % number for number in range(3, 17)]
    assert (await client.fetch(topic).table()).num_rows == 20
    assert (await client.fetch(topic, 20).table()).num_rows == 0
    assert (await client.describe_topic(topic)).subscriptions == 0
    assert await client.find_offset(topic, "latest") == 20


# --- what is refused ----------------------------------------------------------------------------------


@connected
async def test_refusals_are_the_errors_of_the_tree(client: pydanube.Client, topic: str) -> None:
    with pytest.raises(TopicUnknown):
        await client.consumer(topic, subscription="s").open()
    with pytest.raises(TopicUnknown):
        await client.producer(topic, create=False).open()
    await client.create_topic(topic)
    with pytest.raises(TopicExists) as caught:
        await client.create_topic(topic)
    assert not caught.value.retryable
    with pytest.raises(DeliveryMismatch):
        await client.producer(topic, reliable=False).open()
    async with client.consumer(topic, subscription="s", name="holder", type="exclusive"):
        with pytest.raises(SubscriptionBusy, match="holder"):
            await client.consumer(topic, subscription="s", name="other").open()
    assert topic in await client.list_topics("default")
    await client.delete_topic(topic)
    assert topic not in await client.list_topics()


@connected
async def test_a_second_producer_of_the_same_name_fences_the_first(client: pydanube.Client, topic: str) -> None:
    first = await client.producer(topic, name="same").open()
    await first.send(b"a")
    await publish(client, topic, b"b", name="same")
    with pytest.raises(ProducerFenced):
        await first.send(b"c")
    await first._let_go()


# --- a broker that dies -------------------------------------------------------------------------------


def test_a_broker_killed_and_started_again_loses_nothing_and_repeats_nothing(tmp_path: Path) -> None:
    """Four kills while a producer sends as fast as it can. Every receipt is true and every message is there once."""

    async def inside(broker: BrokerProcess) -> None:
        topic, receipts = "/default/killed", {}
        loop = asyncio.get_running_loop()
        async with pydanube.connect(url_of(broker), timeout=60) as client:
            async with client.producer(topic, batch_messages=50) as producer:
                stop = False
                numbers = count()

                async def send() -> None:
                    while not stop:
                        number = next(numbers)
                        receipt = await producer.send(b"%d" % number)
                        receipts[number] = receipt.offset

                senders = [asyncio.ensure_future(send()) for _ in range(100)]

                async def work() -> None:
                    """For half a second, and until more is acknowledged than the senders have on their way."""
                    before = len(receipts)
                    await asyncio.sleep(0.5)
                    while len(receipts) <= before + len(senders):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)

                for _ in range(4):
                    await work()
                    broker.kill()
                    await asyncio.sleep(0.1)
                    await loop.run_in_executor(None, broker.start)
                await work()
                stop = True
                await asyncio.gather(*senders)
            table = await client.fetch(topic).table()
        stored = [int(payload) for payload in table.column("payload").to_pylist()]
        offsets = table.column("offset").to_pylist()
        assert len(stored) == len(set(stored)), "a message is stored twice"
        assert set(stored) == set(receipts) and len(stored) > 500
        assert dict(zip(stored, offsets, strict=True)) == receipts

    with BrokerProcess(tmp_path) as broker:
        run(inside(broker))


def test_a_consumer_goes_on_after_the_broker_was_killed(tmp_path: Path) -> None:
    async def inside(broker: BrokerProcess) -> None:
        topic = "/default/survivor"
        loop = asyncio.get_running_loop()
        async with pydanube.connect(url_of(broker), timeout=60) as client:
            await publish(client, topic, *(b"%d" % number for number in range(10)))
            async with client.consumer(topic, subscription="s", start="earliest") as consumer:
                seen = {message.offset for message in await receive(consumer, 5)}
                broker.kill()
                await loop.run_in_executor(None, broker.start)
                await publish(client, topic, *(b"%d" % number for number in range(10, 20)))
                while len(seen) < 20:
                    message = await consumer.receive(timeout=30)
                    seen.add(message.offset)
                    await message.ack()
                assert seen == set(range(20))
                await consumer.flush()
                assert (await client.lag(topic, "s")).messages == 0

    with BrokerProcess(tmp_path) as broker:
        run(inside(broker))


def test_a_broker_that_is_stopped_lets_go_of_its_clients_at_once(tmp_path: Path) -> None:
    async def inside(broker: BrokerProcess) -> None:
        loop = asyncio.get_running_loop()
        async with (
            pydanube.connect(url_of(broker), timeout=60) as client,
            client.producer("/default/stopped") as producer,
        ):
            await producer.send(b"a")
            took: list[float] = []
            while len(took) < 3 and min(took, default=9.0) >= 4:  # a machine may be busy once, or twice
                began = loop.time()
                assert await loop.run_in_executor(None, broker.stop) == 0
                took.append(loop.time() - began)
                sending = asyncio.ensure_future(producer.send(b"b"))
                await loop.run_in_executor(None, broker.start)
                assert (await sending).offset == len(took)
            assert min(took) < 4, "the broker waited for us to go"

    with BrokerProcess(tmp_path) as broker:
        run(inside(broker))


# --- other clients ------------------------------------------------------------------------------------


def test_the_official_client_and_ours_share_a_topic(broker: BrokerProcess, topic: str) -> None:
    async def ours() -> None:
        async with pydanube.connect(url_of(broker)) as client:
            await publish(client, topic, *(b"message %d" % number for number in range(100, 110)), name="ours")
            async with client.consumer(topic, subscription="native", start="earliest") as consumer:
                messages = await receive(consumer, 20)
                assert {message.producer_name for message in messages} == {"official", "ours"}
                assert sorted(message.offset for message in messages) == list(range(20))

    with ExitStack() as programs:
        producer = programs.enter_context(
            broker.run("producer", topic, "--reliable", "--count", 10, "--name", "official")
        )
        producer.until("created")
        consumer = programs.enter_context(broker.run("consumer", topic, "--name", "c"))
        consumer.until("subscribed")
        producer.go()
        producer.until("done")
        run(ours())
        received = consumer.until("received", 20)
        assert sorted(line["number"] for line in received) == [*range(10), *range(100, 110)]
        assert {line["producer"] for line in received} == {"official", "ours"}


def test_a_key_goes_to_the_same_partition_from_every_client(broker: BrokerProcess, topic: str) -> None:
    async def ours() -> dict[str, set[str]]:
        places: dict[str, set[str]] = {}
        async with pydanube.connect(url_of(broker)) as client:
            async with client.producer(topic) as producer:
                for number in range(12):
                    receipt = await producer.send(b"message %d" % (100 + number), key=f"key-{number % 6}")
                    places.setdefault(f"key-{number % 6}", set()).add(receipt.topic)
            async with client.consumer(topic, subscription="native", start="earliest") as consumer:
                for message in await receive(consumer, 24):
                    places[message.key or ""].add(message.topic)
        return places

    with broker.run("producer", topic, "--reliable", "--partitions", 3, "--keys", 6, "--count", 12) as producer:
        producer.until("created")
        producer.go()
        producer.until("done")
        places = run(ours())
    assert len(places) == 6 and all(len(topics) == 1 for topics in places.values())


# --- without async, and the first page ----------------------------------------------------------------


def test_the_blocking_client_does_the_same(broker: BrokerProcess, topic: str) -> None:
    with pydanube.blocking.connect(url_of(broker)) as client:
        with client.producer(topic) as producer:
            assert producer.send(b"0", key="k").offset == 0
            for number in range(1, 1000):
                producer.send_nowait(b"%d" % number)
            producer.flush()
        with client.consumer(topic, subscription="s", start="earliest") as consumer:
            got = []
            for message in consumer:
                got.append(int(message.payload))
                message.ack()
                if len(got) == 1000:
                    break
            consumer.flush()
            assert got == list(range(1000))
            assert client.lag(topic, "s").messages == 0
            consumer.seek("earliest")
            batch = next(consumer.batches())
            assert batch.arrow.column("offset")[0].as_py() == 0
            batch.ack()
        assert client.fetch(topic, 10, 20).table().num_rows == 10
        assert sum(batch.num_rows for batch in client.fetch(topic)) == 1000
        with pytest.raises(TopicExists):
            client.create_topic(topic)


def first_python_block(text: str) -> str:
    match = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    return match[1] if match else ""


def test_the_first_example_of_the_readme_runs(broker: BrokerProcess) -> None:
    """As it stands there, but for the port."""
    code = first_python_block(README.read_text())
    assert code.count("danube://127.0.0.1:6651") == 1
    program = code.replace("danube://127.0.0.1:6651", url_of(broker))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "offset 0" in done.stdout and "user-7" in done.stdout


class ExitStackAsync:
    """Consumers entered one by one, closed together."""

    def __init__(self) -> None:
        self._entered: list[pydanube.Consumer] = []

    async def __aenter__(self) -> ExitStackAsync:
        return self

    async def __aexit__(self, *_: object) -> None:
        for consumer in self._entered:
            await consumer.close()

    async def enter(self, consumer: pydanube.Consumer) -> pydanube.Consumer:
        self._entered.append(await consumer.open())
        return consumer
