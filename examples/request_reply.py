"""Requests and replies over two topics. They are non-reliable: nothing is kept, so a question takes no disk, and one
that nobody answers is asked again by whoever asked it.

python examples/request_reply.py danube://127.0.0.1:6651
"""

from __future__ import annotations

import asyncio
import sys

import pydanube

SQUARES = "/default/square.requests"


async def square(request: pydanube.Message) -> bytes:
    return b"%d" % int(request.payload) ** 2


async def ask(requests: pydanube.Requests, question: bytes) -> bytes:
    """Again if it was lost, as squaring twice does no harm."""
    for _ in range(10):
        try:
            return await requests.ask(question, timeout=1.0)
        except pydanube.errors.DeadlineExceeded:
            continue
    raise TimeoutError(f"nobody squares {question!r}")


async def main(url: str) -> list[int]:
    async with pydanube.connect(url) as client, client.requests(SQUARES) as requests:
        serving = asyncio.create_task(requests.serve(square))  # several of these, anywhere, share the requests
        replies = await asyncio.gather(*(ask(requests, b"%d" % number) for number in range(5)))
        serving.cancel()
    print(*(reply.decode() for reply in replies))
    return [int(reply) for reply in replies]


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["danube://127.0.0.1:6651"]))
