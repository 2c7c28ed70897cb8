"""Windows that adapt beside a fixed one of 10,000: `make bench-windows`.

One broker, and a consumer process per measurement, on a shared subscription with everything waiting: message by
message, and in batches. Five rounds in turn, medians. The adaptive one should reach nine tenths of the fixed one;
the exit code is 1 if it does not.

    python bench/windows.py --scale 0.1
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from processes import broker

SCRATCH = Path(__file__).parent.parent / "build" / "bench-windows"
TOPIC = "/default/windows"
ROUNDS = 5
SHARE = 0.9
WAYS = ("each", "batches")
FIXED = 10_000


async def fill(port: int, count: int) -> None:
    import pydanube

    payload = os.urandom(100)
    async with pydanube.connect(f"danube://127.0.0.1:{port}") as client, client.producer(TOPIC) as producer:
        for number in range(count):
            if producer.buffered_bytes >= producer.buffer_bytes:
                await producer.room()
            producer.send_nowait(payload)
            if number % 1000 == 999:
                await asyncio.sleep(0)
        await producer.flush()


async def consume(port: int, way: str, window: int | None, count: int) -> float:
    """Messages a second, from opening the consumer to the last ack."""
    import pydanube

    settings: dict[str, Any] = {"subscription": f"s{os.getpid()}", "type": "shared", "start": "earliest"}
    got = 0
    async with pydanube.connect(f"danube://127.0.0.1:{port}") as client:
        began = time.perf_counter()
        async with client.consumer(TOPIC, window_messages=window, **settings) as consumer:
            if way == "batches":
                async for batch in consumer.batches():
                    got += len(batch)
                    await batch.ack()
                    if got >= count:
                        break
            else:
                async for message in consumer:
                    got += 1
                    await message.ack()
                    if got >= count:
                        break
            await consumer.flush()
        return got / (time.perf_counter() - began)


def measured(port: int, way: str, window: int | None, count: int) -> float:
    """In a process of its own, so that nobody profits from what another has loaded."""
    order = json.dumps([port, way, window, count])
    done = subprocess.run([sys.executable, __file__, "--consume", order], stdout=subprocess.PIPE, check=True)
    return float(done.stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the messages, for a quick look")
    parser.add_argument("--consume", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.consume:
        print(asyncio.run(consume(*json.loads(options.consume))))
        return 0
    count = max(1_000, int(1_000_000 * options.scale))
    SCRATCH.mkdir(parents=True, exist_ok=True)
    rates: dict[tuple[str, str], list[float]] = {}
    with broker(SCRATCH) as served:
        asyncio.run(fill(served.stream, count))
        for _ in range(ROUNDS):
            for way in WAYS:
                for name, window in (("fixed", FIXED), ("adaptive", None)):
                    rates.setdefault((way, name), []).append(measured(served.stream, way, window, count))
    reached = True
    print(f"{count:,} messages of 100 B, shared, {ROUNDS} rounds in turn, messages/s")
    for way in WAYS:
        fixed, adaptive = (statistics.median(rates[way, name]) for name in ("fixed", "adaptive"))
        reached = reached and adaptive >= SHARE * fixed
        print(f"{way:8} fixed {fixed:>10,.0f}   adaptive {adaptive:>10,.0f}   share {adaptive / fixed:.2f}")
    for (way, name), found in rates.items():
        print(f"  {way} {name}: {', '.join(f'{rate:,.0f}' for rate in found)}")
    print(f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, load {os.getloadavg()[0]:.1f}")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
