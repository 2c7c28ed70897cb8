"""Requests and replies over non-reliable topics: nothing of them touches a disk.

    ask ─► {topic} ─► one of the servers ─► {topic}.replies ─► the asker

Each request has a number, and names its asker. One without a reply in time is for the asker to ask again: it may
have been answered all the same.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self, TypeAlias

from pydanube.client.brokers import with_deadline
from pydanube.client.messages import Message
from pydanube.core.names import TopicName
from pydanube.errors import ClientClosed, ConfigError, DanubeError, DeadlineExceeded, RequestFailed

if TYPE_CHECKING:
    from pydanube.client.client import Client
    from pydanube.client.consumer import Consumer
    from pydanube.client.producer import Producer

log = logging.getLogger(__name__)

Answerer: TypeAlias = Callable[[Message], Awaitable[bytes] | bytes]

REQUEST: Final = "x-danube-request"  # a number, given by the asker
ASKER: Final = "x-danube-asker"  # its name
ERROR: Final = "x-danube-error"  # instead of an answer
SERVERS: Final = "servers"  # the subscription that all servers share
REASON_SIZE_MAX: Final = 1024


class Requests:
    """Made by `Client.requests`; used inside its `async with` block, to ask, to serve, or both.

    >>> async def square(request):
    ...     return b"%d" % int(request.payload) ** 2
    >>> async with client.requests("/default/squares") as squares:
    ...     serving = asyncio.create_task(squares.serve(square))
    ...     print(await squares.ask(b"12"))
    ...     serving.cancel()
    b'144'
    True

    Several servers share the requests. Every asker of a topic hears the replies to all of them: where there are
    many, give each group its own topic.
    """

    def __init__(self, client: Client, topic: TopicName, name: str, timeout: float) -> None:
        self.topic = topic
        self.replies = TopicName(f"{topic}.replies")
        self._client = client
        self._name = name
        self._timeout = timeout
        self._asking: tuple[Producer, Consumer, asyncio.Task[None]] | None = None
        self._opening = asyncio.Lock()
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._number = 0
        self._is_open = False

    async def open(self) -> Self:
        """As entering the `async with` block: makes the two topics if they are missing."""
        for topic in (self.topic, self.replies):
            await self._client.create_topic(topic, reliable=False, exist_ok=True, timeout=self._timeout)
        self._is_open = True
        return self

    async def close(self) -> None:
        """Requests that wait for a reply raise ClientClosed."""
        self._is_open = False
        async with self._opening:
            asking, self._asking = self._asking, None
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(ClientClosed(f"the requests of {self.topic}"))
        if asking is None:
            return
        producer, consumer, listening = asking
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        await producer.close()
        await consumer.close()
        try:
            await self._client.unsubscribe(self.replies, consumer.subscription, timeout=self._timeout)
        except DanubeError as error:  # the broker removes it by itself after a while
            log.info("replies not unsubscribed", extra={"topic": self.replies, "why": str(error)})

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # --- asking -------------------------------------------------------------------------------------

    async def ask(self, payload: bytes, *, key: str | None = None, timeout: float | None = None) -> bytes:
        """The reply. Raises DeadlineExceeded if none came in time, RequestFailed if the server's handler raised.

        Requests are sent once: the caller knows whether one may be answered twice.
        """
        seconds = self._timeout if timeout is None else timeout
        what = f"asking {self.topic}"
        producer = await with_deadline(what, seconds, self._producer())
        self._number += 1
        number = str(self._number)
        waiting: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            async with asyncio.timeout(seconds):
                await producer.send(payload, key=key, attributes={REQUEST: number, ASKER: self._name})
                return await waiting
        except TimeoutError:
            raise DeadlineExceeded(what, seconds, "no reply has come") from None
        finally:
            del self._waiting[number]

    async def _producer(self) -> Producer:
        """Opened with the first question: a server needs no subscription to replies."""
        async with self._opening:
            self._check_open()
            if self._asking is None:
                consumer = self._client.consumer(
                    self.replies, subscription=f"asker-{self._name}", type="exclusive", timeout=self._timeout
                )
                producer = self._client.producer(self.topic, reliable=False, timeout=self._timeout)
                await consumer.open()
                try:
                    await producer.open()
                except BaseException:
                    await consumer.close()
                    raise
                self._asking = producer, consumer, asyncio.create_task(self._listen(consumer), name="replies")
            return self._asking[0]

    async def _listen(self, consumer: Consumer) -> None:
        async for message in consumer:
            attributes = message.attributes
            await message.ack()
            waiting = self._waiting.get(attributes.get(REQUEST, ""))
            if waiting is None or waiting.done() or attributes.get(ASKER) != self._name:
                continue  # another's, or too late
            if ERROR in attributes:
                waiting.set_exception(RequestFailed(self.topic, attributes[ERROR]))
            else:
                waiting.set_result(message.payload)

    # --- serving ------------------------------------------------------------------------------------

    async def serve(self, handler: Answerer, *, concurrency: int = 8) -> None:
        """Answers requests with what `handler` returns, `concurrency` at a time, until it is cancelled.

        If it raises, the asker gets a RequestFailed with the reason. A plain function holds up the event loop.
        """
        self._check_open()
        async with (
            self._client.producer(self.replies, reliable=False, timeout=self._timeout) as replies,
            self._client.consumer(self.topic, subscription=SERVERS, type="shared", timeout=self._timeout) as requests,
        ):

            async def answer(request: Message) -> None:
                attributes = request.attributes
                about: dict[str, str] = {name: attributes[name] for name in (REQUEST, ASKER) if name in attributes}
                try:
                    doing = handler(request)
                    reply = await doing if inspect.isawaitable(doing) else doing
                    if not isinstance(reply, (bytes, bytearray, memoryview)):
                        raise ConfigError("reply", type(reply).__name__, "bytes")
                except Exception as error:
                    log.warning("request failed", exc_info=error, extra={"topic": self.topic})
                    reply, about[ERROR] = b"", f"{type(error).__name__}: {error}"[:REASON_SIZE_MAX]
                if REQUEST in about:  # else no reply is wanted
                    await replies.room()
                    replies.send_nowait(reply, attributes=about)

            await requests.run(answer, concurrency=concurrency, on_sigterm=False)

    def _check_open(self) -> None:
        if not self._is_open:
            raise ClientClosed(f"the requests of {self.topic}")
