"""The client without async, for scripts and notebooks: the same names, each call returns when it is done.

    with pydanube.blocking.connect("danube://127.0.0.1:6651") as client:
        with client.producer("/default/orders") as orders:
            receipt = orders.send(b"2 coffees")
        with client.consumer("/default/orders", subscription="billing", start="earliest") as consumer:
            for message in consumer:
                message.ack()

An event loop in a thread of its own does the work; it goes on while the application is busy. Objects may be used from
several threads. Signatures are those of the async client.
"""

from __future__ import annotations

import asyncio
import functools
import ssl
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import datetime
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import pyarrow as pa

from pydanube.client import admin, client, consumer, messages, producer, tail
from pydanube.client.brokers import OnConnection, Token, with_deadline
from pydanube.client.messages import (
    BatchView,
    Delivered,
    Lag,
    Located,
    Place,
    Receipt,
    ReceivedBatch,
    Statistics,
    TopicInfo,
)
from pydanube.client.producer import Payload, Prepared
from pydanube.client.tail import TailedMessage
from pydanube.client.thread import LoopThread
from pydanube.client.working import Handled, stopped_by_sigterm
from pydanube.core.consuming.values import TakingBegan
from pydanube.errors import BufferFull, ClientClosed, NeverOpened

T = TypeVar("T")
P = ParamSpec("P")


def _like(
    model: Callable[Concatenate[Any, P], object],
) -> Callable[[Callable[..., T]], Callable[Concatenate[Any, P], T]]:
    """The parameters and the docstring of the async method."""

    def decorate(function: Callable[..., T]) -> Callable[Concatenate[Any, P], T]:
        return functools.wraps(model)(function)

    return decorate


def connect(
    url: str | Iterable[str] = "danube://127.0.0.1:6651",
    *,
    token: Token = "",
    tls: ssl.SSLContext | None = None,
    timeout: float = client.TIMEOUT_SECONDS,
    on_connection: OnConnection | None = None,
) -> Client:
    """As `pydanube.connect`. `on_connection` is called in the client's own thread: it must not wait for the client.

    >>> with pydanube.blocking.connect(url) as client:
    ...     with client.producer("/default/notes") as notes:
    ...         print(notes.send(b"buy milk").offset)
    ...     with client.consumer("/default/notes", subscription="me", start="earliest") as consumer:
    ...         message = consumer.receive()
    ...         print(message.payload)
    ...         message.ack()
    0
    b'buy milk'
    """
    return Client(url, token=token, tls=tls, timeout=timeout, on_connection=on_connection)


class Client:
    """See `pydanube.Client`."""

    def __init__(
        self,
        url: str | Iterable[str],
        *,
        token: Token = "",
        tls: ssl.SSLContext | None = None,
        timeout: float,
        on_connection: OnConnection | None = None,
    ) -> None:
        self._client = client.Client(url, token=token, tls=tls, timeout=timeout, on_connection=on_connection)
        self._thread: LoopThread | None = None
        self._was_opened = False

    def open(self) -> Self:
        """As entering the `with` block."""
        thread = LoopThread("danube client")
        try:
            thread.call(self._client.open())
        except BaseException:
            thread.stop()
            raise
        self._thread = thread
        self._was_opened = True
        return self

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                thread.call(self._client.close())
            finally:
                thread.stop()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def brokers(self) -> list[str]:
        return self._client.brokers

    @property
    def is_connected(self) -> bool:
        return self._client.is_connected

    @_like(client.Client.ping)
    def ping(self, *args: Any, **kwargs: Any) -> float:
        return self._call(self._client.ping(*args, **kwargs))

    def statistics(self) -> Statistics:
        """As the async one."""

        async def asked() -> Statistics:  # in the thread that changes them
            return self._client.statistics()

        return self._call(asked())

    @_like(client.Client.producer)
    def producer(self, *args: Any, **kwargs: Any) -> Producer:
        return Producer(self._running(), self._client.producer(*args, **kwargs))

    @_like(client.Client.consumer)
    def consumer(self, *args: Any, **kwargs: Any) -> Consumer:
        return Consumer(self._running(), self._client.consumer(*args, **kwargs))

    @_like(client.Client.fetch)
    def fetch(self, *args: Any, **kwargs: Any) -> Fetch:
        return Fetch(self._running(), self._client.fetch(*args, **kwargs))

    @_like(client.Client.tail)
    def tail(self, *args: Any, **kwargs: Any) -> Tail:
        return Tail(self._running(), self._client.tail(*args, **kwargs))

    @_like(client.Client.create_topic)
    def create_topic(self, *args: Any, **kwargs: Any) -> None:
        self._call(self._client.create_topic(*args, **kwargs))

    @_like(client.Client.delete_topic)
    def delete_topic(self, *args: Any, **kwargs: Any) -> None:
        self._call(self._client.delete_topic(*args, **kwargs))

    @_like(client.Client.describe_topic)
    def describe_topic(self, *args: Any, **kwargs: Any) -> TopicInfo:
        return self._call(self._client.describe_topic(*args, **kwargs))

    @_like(client.Client.list_topics)
    def list_topics(self, *args: Any, **kwargs: Any) -> list[str]:
        return self._call(self._client.list_topics(*args, **kwargs))

    @_like(client.Client.lookup)
    def lookup(self, *args: Any, **kwargs: Any) -> Located:
        return self._call(self._client.lookup(*args, **kwargs))

    @_like(client.Client.find_offset)
    def find_offset(self, *args: Any, **kwargs: Any) -> int:
        return self._call(self._client.find_offset(*args, **kwargs))

    @_like(client.Client.lag)
    def lag(self, *args: Any, **kwargs: Any) -> Lag:
        return self._call(self._client.lag(*args, **kwargs))

    @_like(client.Client.seek)
    def seek(self, *args: Any, **kwargs: Any) -> list[int]:
        return self._call(self._client.seek(*args, **kwargs))

    @_like(client.Client.unsubscribe)
    def unsubscribe(self, *args: Any, **kwargs: Any) -> None:
        self._call(self._client.unsubscribe(*args, **kwargs))

    def _running(self) -> LoopThread:
        if self._thread is None:
            raise self._not_open()
        return self._thread

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        if self._thread is None:
            coroutine.close()
            raise self._not_open()
        return self._thread.call(coroutine)

    def _not_open(self) -> ClientClosed:
        return (ClientClosed if self._was_opened else NeverOpened)("the client")


class Producer:
    """See `pydanube.Producer`."""

    def __init__(self, thread: LoopThread, inner: producer.Producer) -> None:
        self._thread = thread
        self._producer = inner
        self.topic = inner.topic
        self.name = inner.name
        self._handed_bytes = 0  # to the loop's thread, which has not taken them yet; counted as the buffer counts
        self._counting = threading.RLock()
        self._error: Exception | None = None  # of a message that was handed over and not taken: `flush` tells it

    def open(self) -> Self:
        self._thread.call(self._producer.open())
        return self

    def close(self, *, timeout: float | None = None) -> None:
        self._thread.call(self._producer.close(timeout=timeout))
        self._raise()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._producer.__aexit__(kind, error, trace))
        if error is None:
            self._raise()

    @_like(producer.Producer.send)
    def send(self, *args: Any, **kwargs: Any) -> Receipt:
        return self._thread.call(self._producer.send(*args, **kwargs))

    def send_nowait(
        self,
        payload: Payload,
        *,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
        deliver_at: datetime | None = None,
        deliver_after: float | None = None,
    ) -> None:
        """As the async one."""
        # All that may be wrong with it is found here, in the caller's thread, and what it refers to may change after.
        message = self._producer.prepare(payload, key, attributes, event_time, deliver_at, deliver_after)
        if self.buffered_bytes >= self._producer.buffer_bytes:
            raise BufferFull(self.topic, self._producer.buffer_bytes)
        self._thread.soon(self._take, *message)
        with self._counting:
            self._handed_bytes += message[-1]

    def send_soon(
        self,
        payload: Payload,
        *,
        key: str | None = None,
        attributes: Mapping[str, str] | None = None,
        event_time: datetime | None = None,
        deliver_at: datetime | None = None,
        deliver_after: float | None = None,
    ) -> Future[Receipt]:
        """As the async one, with a future of `concurrent.futures`. Its callbacks run in the client's thread."""
        message = self._producer.prepare(payload, key, attributes, event_time, deliver_at, deliver_after)
        if self.buffered_bytes >= self._producer.buffer_bytes:
            raise BufferFull(self.topic, self._producer.buffer_bytes)
        future: Future[Receipt] = Future()
        future.set_running_or_notify_cancel()  # it is in flight and cannot be taken back
        self._thread.soon(self._take_soon, message, future)
        with self._counting:
            self._handed_bytes += message[-1]
        return future

    @_like(producer.Producer.send_many)
    def send_many(self, *args: Any, **kwargs: Any) -> int:
        return self._thread.call(self._producer.send_many(*args, **kwargs))

    def flush(self, *, timeout: float | None = None) -> None:
        self._thread.call(self._producer.flush(timeout=timeout))
        self._raise()

    def room(self, *, timeout: float | None = None) -> None:
        self._thread.call(self._producer.room(timeout=timeout))

    @property
    def buffered_bytes(self) -> int:
        return self._producer.buffered_bytes + self._handed_bytes

    def _take(self, *message: Any) -> None:
        try:
            self._producer.take(*message)
        except Exception as error:
            self._error = self._error or error
        with self._counting:
            self._handed_bytes -= message[-1]

    def _take_soon(self, message: Prepared, future: Future[Receipt]) -> None:
        waiter: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        waiter.add_done_callback(lambda done: _copy(done, future))
        try:
            self._producer.take(*message, waiter)
        except Exception as error:
            waiter.set_exception(error)
        with self._counting:
            self._handed_bytes -= message[-1]

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _copy(done: asyncio.Future[Receipt], future: Future[Receipt]) -> None:
    if done.cancelled():
        future.set_exception(ClientClosed("the client"))
    elif (error := done.exception()) is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


class Message(Delivered):
    """See `pydanube.Message`."""

    __slots__ = ("_thread",)

    def __init__(self, thread: LoopThread, delivery: ReceivedBatch, row: int, offset: int, payload: bytes) -> None:
        super().__init__(delivery, row, offset, payload)
        self._thread = thread

    def ack(self) -> None:
        """It is done. Acks travel together; `Consumer.flush` waits for them. Raises ClientClosed if it cannot count."""
        self._delivery.lane.check()
        self._thread.soon(self._delivery.lane.ack, self.offset, self._delivery.era)

    def ack_cumulative(self) -> None:
        """It is done, and everything before it in its topic. Raises Refused in subscriptions that several share."""
        of = self._delivery
        of.lane.check()

        async def acked() -> None:
            of.lane.ack_cumulative(self.offset, of.era)

        self._thread.call(acked())

    def nack(self, delay: float | None = None, *, reason: str = "") -> None:
        """It failed: deliver it again after `delay` seconds, or as the subscription's failure policy says."""
        _check_nack(delay, reason)
        of = self._delivery
        of.lane.check()
        self._thread.soon(of.lane.nack, ((self.offset, self.offset + 1),), delay, reason, of.era)

    def extend(self, seconds: float) -> None:
        """It takes longer: the ack timeout is over in `seconds` from now, not before."""
        of = self._delivery
        self._thread.call(of.lane.extend(((self.offset, self.offset + 1),), seconds, of))


class MessageBatch(BatchView):
    """See `pydanube.MessageBatch`."""

    __slots__ = ("_thread",)

    def __init__(self, thread: LoopThread, delivery: ReceivedBatch) -> None:
        super().__init__(delivery)
        self._thread = thread

    def ack(self) -> None:
        self._delivery.lane.check()
        self._thread.soon(self._delivery.lane.ack_ranges, self._delivery.ranges, self._delivery.era)

    def extend(self, seconds: float) -> None:
        self._thread.call(self._delivery.lane.extend(self._delivery.ranges, seconds, self._delivery))

    def nack(self, delay: float | None = None, *, reason: str = "") -> None:
        _check_nack(delay, reason)
        self._delivery.lane.check()
        self._thread.soon(self._delivery.lane.nack, self._delivery.ranges, delay, reason, self._delivery.era)


def _check_nack(delay: float | None, reason: str) -> None:
    """Raises in the caller's thread what the loop's thread could not report."""
    if delay is not None:
        round(delay * 1000)
    reason.encode()


class Consumer:
    """See `pydanube.Consumer`."""

    def __init__(self, thread: LoopThread, inner: consumer.Consumer) -> None:
        self._thread = thread
        self._consumer = inner
        self.topic = inner.topic
        self.subscription = inner.subscription
        self.name = inner.name
        self._current: deque[Message] = deque()  # handed over by the loop's thread; taken by any
        self._filling = asyncio.Lock()
        self._stopping: asyncio.Future[None] | None = None

    def open(self) -> Self:
        self._thread.call(self._consumer.open())
        return self

    @_like(consumer.Consumer.stop)
    def stop(self, *args: Any, **kwargs: Any) -> None:
        self._thread.call(self._consumer.stop(*args, **kwargs))

    @_like(consumer.Consumer.close)
    def close(self, *args: Any, **kwargs: Any) -> None:
        self._thread.call(self._consumer.close(*args, **kwargs))
        self._current.clear()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.call(self._consumer.__aexit__(kind, error, trace))
        self._current.clear()

    def __iter__(self) -> Iterator[Message]:
        while bool(self._current) or self._thread.call(self._fill()):
            try:
                message = self._taken()
            except IndexError:
                continue  # another thread was faster
            yield message

    def _taken(self) -> Message:
        message = self._current.popleft()
        if not message.lane.machine.is_telling:
            self._thread.soon(message.lane.feed, TakingBegan())
        return message

    def receive(self, *, timeout: float | None = None) -> Message:
        """The next message. Raises DeadlineExceeded if none came within `timeout` seconds."""
        with suppress(IndexError):
            return self._taken()
        return self._thread.call(self._receive(timeout))

    def batches(self) -> Iterator[MessageBatch]:
        """Arrow record batches, as they were stored."""
        while (delivery := self._thread.call(self._consumer.next_delivery())) is not None:
            yield MessageBatch(self._thread, delivery)

    def run(
        self,
        handler: Callable[[Message], object],
        *,
        concurrency: int = 8,
        grace: float = 30.0,
        on_sigterm: bool = True,
    ) -> Handled:
        """Gives every message to `handler`, in `concurrency` threads, until the consumer is stopped.

        As `pydanube.Consumer.run`: acknowledges what returns, nacks what raises. `stop()` from a handler or another
        thread, SIGTERM (in the main thread, unless another handler is installed) and Ctrl-C end it in order.

        >>> with pydanube.blocking.connect(url) as client:
        ...     with client.consumer("/default/numbers", subscription="threads", start="earliest") as consumer:
        ...         def handle(message):
        ...             if message.payload == b"3":
        ...                 consumer.stop()
        ...         print(consumer.run(handle, concurrency=1))
        Handled(acked=3, nacked=0, given_up=0)
        """
        with ThreadPoolExecutor(concurrency, "danube handler") as pool:

            async def handle(message: messages.Message) -> None:
                mine = Message(self._thread, *message.parts)
                await asyncio.get_running_loop().run_in_executor(pool, handler, mine)

            work = self._consumer.run(handle, concurrency=concurrency, grace=grace, on_sigterm=False)
            with stopped_by_sigterm(lambda: self._thread.soon(self._stop_soon)) if on_sigterm else nullcontext():
                return self._thread.call(work)

    def _stop_soon(self) -> None:
        self._stopping = asyncio.ensure_future(self._consumer.stop())

    @property
    def handled(self) -> Handled:
        return self._consumer.handled

    def flush(self, *, timeout: float | None = None) -> None:
        self._thread.call(self._consumer.flush(timeout=timeout))

    def seek(self, to: Place, *, timeout: float | None = None) -> None:
        self._thread.call(self._consumer.seek(to, timeout=timeout))
        self._current.clear()

    async def _fill(self) -> bool:
        """Returns when `_current` has messages; the first of concurrent callers fills it. False: no more will come."""
        async with self._filling:
            if not self._current:
                delivery = await self._consumer.next_delivery(self._current)
                if delivery is None:
                    return False
                self._unpack(delivery)
            return True

    async def _receive(self, timeout: float | None) -> Message:
        seconds = self._consumer.timeout if timeout is None else timeout
        return await with_deadline(f"receiving from {self.topic}", seconds, self._next())

    async def _next(self) -> Message:
        while await self._fill():
            with suppress(IndexError):  # another thread was faster
                message = self._current.popleft()
                message.lane.feed(TakingBegan())
                return message
        raise self._consumer.ended

    def _unpack(self, delivery: ReceivedBatch) -> None:
        base, payloads = delivery.batch.header.base_offset, delivery.column("payload")
        for first, end in delivery.ranges:
            for offset in range(first, end):
                row = offset - base
                self._current.append(Message(self._thread, delivery, row, offset, payloads[row]))


class Fetch:
    """See `pydanube.Client.fetch`."""

    def __init__(self, thread: LoopThread, inner: admin.Fetch) -> None:
        self._thread = thread
        self._fetch = inner

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        batches = self._fetch.__aiter__()
        while (batch := self._thread.call(_next(batches))) is not None:
            yield batch

    def table(self) -> pa.Table:
        return self._thread.call(self._fetch.table())


async def _next(found: Any) -> Any:
    return await anext(found, None)


class Tail:
    """See `pydanube.Client.tail`."""

    def __init__(self, thread: LoopThread, inner: tail.Tail) -> None:
        self._thread = thread
        self._tail = inner

    def open(self) -> Self:
        self._thread.call(self._tail.open())
        return self

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def offsets(self) -> dict[str, int]:
        return self._tail.offsets

    def __iter__(self) -> Iterator[TailedMessage]:
        found = self._tail.__aiter__()
        while (message := self._thread.call(_next(found))) is not None:
            yield message

    def receive(self, *, timeout: float | None = None) -> TailedMessage:
        return self._thread.call(self._tail.receive(timeout=timeout))

    def close(self) -> None:
        self._thread.call(self._tail.close())
