"""Writes and reads a topic at the same time, and says whether anything was lost, stored twice or renumbered.

Delivery is at least once: a message whose acknowledgement meets a topic that is just leaving comes again.

python examples/cluster_load.py danube://127.0.0.1:6651 /default/orders 2000 200
"""

from __future__ import annotations

import asyncio
import sys
import time

import pydanube


async def load(url: str, topic: str, count: int, per_second: int) -> bool:
    offsets: list[int] = []
    received: dict[int, bytes] = {}
    again = 0
    longest = 0.0
    async with pydanube.connect(url, timeout=60) as client, client.consumer(topic, subscription="example") as consumer:

        async def consume() -> None:
            nonlocal again
            async for message in consumer:
                again += message.offset in received
                received[message.offset] = message.payload
                await message.ack()
                if len(received) == count:
                    break

        consuming = asyncio.create_task(consume())
        async with client.producer(topic, reliable=True) as producer:
            began = time.monotonic()
            for number in range(count):
                await asyncio.sleep(max(0.0, began + number / per_second - time.monotonic()))
                sent = time.monotonic()
                offsets.append((await producer.send(str(number).encode())).offset)
                longest = max(longest, time.monotonic() - sent)
        async with asyncio.timeout(60):
            await consuming
    first = offsets[0]
    is_whole = offsets == list(range(first, first + count))
    is_same = received == {first + number: str(number).encode() for number in range(count)}
    print(f"sent {count}, offsets {first} to {offsets[-1]}, {'no gap' if is_whole else 'WITH GAPS'}")
    print(
        f"received {len(received)}, {'every one as it was sent' if is_same else 'NOT as sent'}, {again} of them twice"
    )
    print(f"the longest that one send took: {longest * 1000:.0f} ms")
    return is_whole and is_same


if __name__ == "__main__":
    broker, name, messages, rate = sys.argv[1:]
    sys.exit(0 if asyncio.run(load(broker, name, int(messages), int(rate))) else 1)
