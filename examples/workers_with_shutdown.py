"""Workers of a shared subscription that end in order: on SIGTERM or Ctrl-C they take no more, finish what they have
begun and acknowledge it. Nothing that was done is done again.

python examples/workers_with_shutdown.py danube://127.0.0.1:6651

Start it several times: all processes share the work.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable

import pydanube

PATIENCE_SECONDS = 0.5  # a worker that waits notices after so long that it is to stop
Handler = Callable[[pydanube.Message], Awaitable[None]]


async def work(consumer: pydanube.Consumer, handle: Handler, stopping: asyncio.Event) -> int:
    """One of several workers of one consumer: each message goes to one of them. Returns how many it handled."""
    handled = 0
    while not stopping.is_set():
        try:
            message = await consumer.receive(timeout=PATIENCE_SECONDS)
        except pydanube.errors.DeadlineExceeded:
            continue  # nothing came: time to look whether to stop
        try:
            await handle(message)
        except Exception as error:
            await message.nack(reason=str(error))  # it comes again, as the subscription's failure policy says
        else:
            await message.ack()
            handled += 1
    return handled


async def run(url: str, handle: Handler, stopping: asyncio.Event, workers: int = 8) -> int:
    """Works until `stopping` is set. Returns how many messages were handled."""
    async with (
        pydanube.connect(url) as client,
        client.consumer("/default/tasks", subscription="workers", type="shared", start="earliest") as consumer,
    ):
        # The block is left when every worker has ended; that sends the acks, and gives back what nobody has begun.
        return sum(await asyncio.gather(*(work(consumer, handle, stopping) for _ in range(workers))))


async def main(url: str) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)

    async def handle(message: pydanube.Message) -> None:
        await asyncio.sleep(0.1)
        print(message.offset, message.payload)

    print(await run(url, handle, stopping), "handled")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2] or ["danube://127.0.0.1:6651"]))
