"""The client without async: threads that use it at the same time, and what is handed from one thread to another."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

import pydanube
from pydanube.client.blocking import Client, Consumer, Message
from pydanube.client.open_batch import MESSAGE_OVERHEAD_BYTES
from pydanube.client.thread import LoopThread
from pydanube.errors import BufferFull, ClientClosed, ConsumerStopped, DeadlineExceeded, MessageTooLarge, NeverOpened
from pydanube.testing.brokers import TestBroker

pytestmark = pytest.mark.timeout(60)

TOPIC = "/default/orders"


@pytest.fixture(scope="module")
def broker() -> Iterator[TestBroker]:
    with TestBroker(memory=True) as running:
        yield running


@pytest.fixture
def client(broker: TestBroker) -> Iterator[Client]:
    with pydanube.blocking.connect(broker.url, timeout=10) as found:
        found.create_topic(TOPIC)
        yield found
        found.delete_topic(TOPIC)


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("under test")
    yield thread
    thread.stop()


@contextmanager
def standing(thread: LoopThread | None) -> Iterator[None]:
    """Its loop does nothing inside the block."""
    assert thread is not None
    begun, over = threading.Event(), threading.Event()

    def stand() -> None:
        begun.set()
        over.wait(30)

    thread._loop.call_soon_threadsafe(stand)
    begun.wait(30)
    try:
        yield
    finally:
        over.set()


def payloads(client: Client) -> list[bytes]:
    found: list[bytes] = client.fetch(TOPIC).table().column("payload").to_pylist()
    return found


# --- send_nowait --------------------------------------------------------------------------------------


def test_what_is_handed_over_counts_as_the_buffer_counts(client: Client) -> None:
    limit = 10 * (MESSAGE_OVERHEAD_BYTES + 2)
    with client.producer(TOPIC, buffer_bytes=limit) as producer:
        with standing(client._thread):
            for number in range(10):
                producer.send_nowait(b"%d" % number, key="k")
            assert producer.buffered_bytes == limit
            with pytest.raises(BufferFull):
                producer.send_nowait(b"too much")
        producer.room()
        producer.send_nowait(b"last")
        producer.flush()
        assert producer.buffered_bytes == 0
    assert payloads(client) == [*(b"%d" % number for number in range(10)), b"last"]


def test_what_was_handed_over_is_taken_even_if_another_thread_fills_the_buffer_first(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client._thread is not None
    soon = client._thread.soon
    with client.producer(TOPIC, buffer_bytes=100) as producer:

        def late(take: Callable[..., None], *message: Any) -> None:
            def after_another() -> None:
                producer._producer.send_nowait(b"x" * 100)
                take(*message)

            soon(after_another)

        monkeypatch.setattr(client._thread, "soon", late)
        producer.send_nowait(b"mine")
        producer.flush()
    assert payloads(client) == [b"x" * 100, b"mine"]


def test_a_message_is_what_it_was_when_it_was_handed_over(client: Client) -> None:
    buffer, attributes = bytearray(b"0"), {"number": "0"}
    with client.producer(TOPIC) as producer, standing(client._thread):
        for number in range(10):
            buffer[:] = b"%d" % number
            attributes["number"] = str(number)
            producer.send_nowait(buffer if number % 2 else memoryview(buffer), attributes=attributes)
        buffer.clear()
        attributes["number"] = "none"
    table = client.fetch(TOPIC).table()
    assert table.column("payload").to_pylist() == [b"%d" % number for number in range(10)]
    assert [dict(each) for each in table.column("attributes").to_pylist()] == [{"number": str(n)} for n in range(10)]
    assert producer.buffered_bytes == 0


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"payload": "text"}, TypeError),
        ({"payload": b"", "attributes": {"n": 5}}, TypeError),
        ({"payload": b"", "key": b"bytes"}, TypeError),
        ({"payload": b"", "key": "\ud800"}, UnicodeEncodeError),
        ({"payload": bytes(60 * 1024 * 1024 + 1)}, MessageTooLarge),
    ],
    ids=["text", "attribute", "key", "surrogate", "large"],
)
def test_a_message_that_cannot_be_sent_is_refused_at_once_and_alone(
    client: Client, wrong: dict[str, Any], error: type[Exception]
) -> None:
    with client.producer(TOPIC) as producer:
        producer.send_nowait(b"before")
        with pytest.raises(error):
            producer.send_nowait(**wrong)
        producer.send_nowait(b"behind")
        producer.flush()
        assert producer.buffered_bytes == 0
    assert payloads(client) == [b"before", b"behind"]


def test_flush_tells_of_a_message_that_was_handed_over_and_not_taken(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.producer(TOPIC) as producer:
        take = producer._producer.take

        def fails_once(*message: Any) -> None:
            monkeypatch.setattr(producer._producer, "take", take)
            raise ValueError("as nobody expected")

        monkeypatch.setattr(producer._producer, "take", fails_once)
        producer.send_nowait(b"lost")
        producer.send_nowait(b"behind")
        with pytest.raises(ValueError, match="as nobody expected"):
            producer.flush()
        producer.flush()
        assert producer.buffered_bytes == 0
    assert payloads(client) == [b"behind"]


# --- receiving ----------------------------------------------------------------------------------------


def test_threads_that_wait_share_the_messages_of_one_batch(client: Client) -> None:
    with (
        client.consumer(TOPIC, subscription="s", start="earliest") as consumer,
        client.producer(TOPIC) as producer,
        ThreadPoolExecutor(3) as threads,
    ):
        waiting = [threads.submit(consumer.receive, timeout=10) for _ in range(3)]
        with standing(client._thread):
            for number in range(3):
                producer.send_nowait(b"%d" % number)
        assert sorted(each.result().payload for each in waiting) == [b"0", b"1", b"2"]


@pytest.mark.parametrize("way", ["receive", "iterate"])
def test_a_message_that_another_thread_took_first_is_waited_for_again(
    client: Client, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    unpack, stolen = Consumer._unpack, list[Message]()

    def robbed(consumer: Consumer, delivery: Any) -> None:
        unpack(consumer, delivery)
        if not stolen:
            stolen.append(consumer._current.popleft())

    monkeypatch.setattr(Consumer, "_unpack", robbed)
    with client.consumer(TOPIC, subscription="s", start="earliest") as consumer, client.producer(TOPIC) as producer:
        producer.send(b"0")
        producer.send(b"1")
        message = consumer.receive() if way == "receive" else next(iter(consumer))
        assert (stolen[0].payload, message.payload) == (b"0", b"1")
        with pytest.raises(DeadlineExceeded, match=r"0\.01 s"):
            consumer.receive(timeout=0.01)


def test_a_nack_that_cannot_be_sent_is_refused_at_once(client: Client) -> None:
    with client.consumer(TOPIC, subscription="s", start="earliest") as consumer, client.producer(TOPIC) as producer:
        producer.send(b"0")
        message = consumer.receive()
        for wrong in ({"delay": "1"}, {"delay": float("nan")}, {"reason": 5}):
            with pytest.raises((TypeError, ValueError, AttributeError)):
                message.nack(**wrong)
        message.ack()
        consumer.flush()
        assert client.lag(TOPIC, "s").messages == 0


# --- the end ------------------------------------------------------------------------------------------


def test_a_closed_client_says_so_every_time_and_may_be_closed_again(broker: TestBroker) -> None:
    client = pydanube.blocking.connect(broker.url).open()
    producer = client.producer("/default/closed").open()
    consumer = client.consumer("/default/closed", subscription="s", start="earliest").open()
    producer.send(b"0")
    message = consumer.receive()
    client.close()
    for _ in range(2):
        for use in (
            lambda: producer.send_nowait(b"1"),
            message.ack,
            producer.flush,
            consumer.receive,
            client.list_topics,
        ):
            with pytest.raises(ClientClosed):
                use()
        client.close()


def test_a_consumer_that_was_stopped_says_so_until_it_is_closed(client: Client) -> None:
    with client.consumer(TOPIC, subscription="stopped") as consumer:
        consumer.stop()
        with pytest.raises(ConsumerStopped, match=f"the consumer of {TOPIC} was stopped: it receives no more messages"):
            consumer.receive()
    with pytest.raises(ClientClosed, match=f"the consumer of {TOPIC} is closed"):
        consumer.receive()


def test_a_message_sent_soon_has_a_future_of_threads(client: Client) -> None:
    with client.producer("/default/soon") as producer:
        told: list[int] = []
        futures = [producer.send_soon(b"%d" % number) for number in range(5)]
        futures[0].add_done_callback(lambda done: told.append(done.result().offset))
        assert [future.result(10).offset for future in futures] == [0, 1, 2, 3, 4]
        producer.flush()
        assert told == [0] and producer.buffered_bytes == 0
    with pytest.raises(ClientClosed):
        producer.send_soon(b"late")


def test_a_blocking_client_knows_whether_it_is_connected(client: Client) -> None:
    assert client.is_connected and client.ping(timeout=5) >= 0
    assert client.statistics().connections_opened == 1


def test_what_was_never_opened_says_so_without_async_too(client: Client) -> None:
    with pytest.raises(NeverOpened, match="the client was never opened"):
        pydanube.blocking.connect("danube://127.0.0.1:1").list_topics()
    with pytest.raises(NeverOpened):
        client.producer("/default/unopened").send(b"x")
    with pytest.raises(NeverOpened):
        list(client.consumer("/default/unopened", subscription="s"))


def test_a_client_that_could_not_connect_can_be_closed() -> None:
    client = pydanube.blocking.connect("danube://127.0.0.1:1", timeout=0.01)
    with pytest.raises(DeadlineExceeded):
        client.open()
    client.close()


def test_whoever_waits_for_a_loop_that_stops_is_told_and_so_is_whoever_comes_later(thread: LoopThread) -> None:
    begun, ending, over = threading.Event(), threading.Event(), threading.Event()

    async def ends_slowly() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ending.set()
            over.wait(30)

    with ThreadPoolExecutor(3) as threads:
        try:
            waiting = threads.submit(thread.call, ends_slowly())
            begun.wait(30)
            stopping = threads.submit(thread.stop)
            ending.wait(30)
            with pytest.raises(ClientClosed):
                threads.submit(thread.call, nothing()).result(10)
        finally:
            over.set()
        with pytest.raises(ClientClosed):
            waiting.result(10)
        stopping.result(10)


def test_a_forked_process_is_told_that_the_client_stayed_behind(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.producer(TOPIC) as producer:
        with monkeypatch.context() as forked:
            forked.setattr(os, "getpid", lambda: -1)
            uses: list[Callable[[], object]] = [lambda: producer.send_nowait(b"child"), producer.flush]
            for use in uses:
                with pytest.raises(ClientClosed, match="forked"):
                    use()
        assert producer.send(b"parent").offset == 0


# --- the thread ---------------------------------------------------------------------------------------


def test_a_call_that_fails_does_not_take_those_behind_it_along(thread: LoopThread) -> None:
    told: list[dict[str, Any]] = []
    thread._loop.set_exception_handler(lambda loop, context: told.append(context))
    behind = threading.Event()
    with standing(thread):
        thread.soon(fail)
        thread.soon(behind.set)
    assert behind.wait(5)
    assert [str(each["exception"]) for each in told] == ["as nobody expected"]


def test_what_is_given_soon_comes_before_a_call_though_another_thread_has_yet_to_schedule_it(
    thread: LoopThread,
) -> None:
    done: list[int] = []
    thread._is_scheduled = True  # by a thread that was interrupted just before it did
    thread.soon(done.append, 1)
    thread.call(nothing())
    assert done == [1]


async def nothing() -> None:
    pass


def fail() -> None:
    raise ValueError("as nobody expected")
