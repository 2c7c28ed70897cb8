"""Requests and replies over two topics. They are non-reliable: nothing is kept, so a question takes no disk, and one
that nobody answers is asked again by whoever asked it.

python examples/request_reply.py danube://127.0.0.1:6651
"""

from __future__ import annotations

import asyncio
import sys
from secrets import token_hex
from types import TracebackType
from typing import Self

import pydanube

REQUESTS = "/default/square.requests"
REPLIES = "/default/square.replies"


class Asker:
    """Asks, and gives every reply to whoever waits for it."""

    def __init__(self, client: pydanube.Client) -> None:
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._name = token_hex(8)
        # Each asker has a subscription of its own, and sees the replies to all; those to others are not looked at.
        self._replies = client.consumer(REPLIES, subscription=f"asker-{self._name}")
        self._requests = client.producer(REQUESTS, reliable=False)
        self._client = client

    async def __aenter__(self) -> Self:
        await self._requests.open()
        await self._replies.open()
        self._task = asyncio.create_task(self._listen())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        await self._replies.close()
        await self._requests.close()
        await self._client.unsubscribe(REPLIES, f"asker-{self._name}")

    async def ask(self, question: bytes, *, timeout: float = 5.0) -> bytes:
        """Raises TimeoutError if nobody answers."""
        number = token_hex(8)
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reply
        try:
            async with asyncio.timeout(timeout):
                await self._requests.send(question, attributes={"request": number})
                return await reply
        finally:
            del self._waiting[number]

    async def _listen(self) -> None:
        async for message in self._replies:
            await message.ack()
            waiting = self._waiting.get(message.attributes["request"])
            if waiting is not None and not waiting.done():
                waiting.set_result(message.payload)


async def answer(client: pydanube.Client, ready: asyncio.Event) -> None:
    """Squares numbers until it is cancelled. Several of these share the requests."""
    async with (
        client.producer(REPLIES, reliable=False) as replies,
        client.consumer(REQUESTS, subscription="squarers", type="shared") as requests,
    ):
        ready.set()
        async for message in requests:
            squared = b"%d" % int(message.payload) ** 2
            replies.send_nowait(squared, attributes={"request": message.attributes["request"]})
            await message.ack()


async def main(url: str) -> list[int]:
    async with pydanube.connect(url) as client:
        for topic in (REQUESTS, REPLIES):
            await client.create_topic(topic, reliable=False, exist_ok=True)
        ready = asyncio.Event()
        answering = asyncio.create_task(answer(client, ready))
        await ready.wait()
        async with Asker(client) as asker:
            replies = await asyncio.gather(*(asker.ask(b"%d" % number) for number in range(5)))
        answering.cancel()
    print(*(reply.decode() for reply in replies))
    return [int(reply) for reply in replies]


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["danube://127.0.0.1:6651"]))
