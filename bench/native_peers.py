"""The clients of NATS and Redis that `native.py` runs with the peers' own interpreter.

That interpreter has their packages and none of ours: nothing here may need PyDanube.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable


async def lanes(count: int, window: int, send: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """`count` sends, `window` of them in flight."""
    turns = iter(range(count))
    times: list[float] = []

    async def lane() -> None:
        for _ in turns:
            began = time.perf_counter()
            await send()
            times.append((time.perf_counter() - began) * 1000)

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(window)))
    seconds = time.perf_counter() - began
    times.sort()
    return {"rate": count / seconds, "p50": times[count // 2], "p99": times[int(count * 0.99)]}


async def nats(what: str, port: int, count: int) -> dict[str, float]:
    import nats as client_of_nats

    connection = await client_of_nats.connect(f"nats://127.0.0.1:{port}")
    stream = connection.jetstream()
    await stream.add_stream(name=what, subjects=[what])
    payload = os.urandom(1024 if what in ("send", "single") else 100)
    await stream.publish(what, payload)
    if what in ("send", "single"):
        result = await lanes(count, 256 if what == "send" else 1, lambda: stream.publish(what, payload))
    else:
        await lanes(count, 256, lambda: stream.publish(what, payload))
        subscription = await stream.pull_subscribe(what, durable="d")
        got = 0
        began = time.perf_counter()
        while got < count:
            for message in await subscription.fetch(256):
                await message.ack()
                got += 1
        await connection.flush()
        result = {"rate": got / (time.perf_counter() - began)}
    await connection.close()
    return result


async def redis(what: str, port: int, count: int) -> dict[str, float]:
    from redis.asyncio import BlockingConnectionPool, Redis

    window = 256 if what == "send" else 1
    pool = BlockingConnectionPool(host="127.0.0.1", port=port, max_connections=window, timeout=None)
    client = Redis(connection_pool=pool)
    payload = os.urandom(1024)
    result = await lanes(count, window, lambda: client.xadd("bench", {"payload": payload}))
    await client.aclose()
    return result


if __name__ == "__main__":
    who, what, port, count = sys.argv[1:]
    print(json.dumps(asyncio.run({"nats": nats, "redis": redis}[who](what, int(port), int(count)))))
