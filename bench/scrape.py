"""How long a scrape takes of a broker with many topics, over HTTP as Prometheus asks for it.

    python bench/scrape.py [--topics 1000] [--subscriptions 1] [--scrapes 20]

Every topic is in use: it has a subscription that is behind, and both histograms. The broker is a process of its own;
what is measured is what a scraper waits, and what it costs the broker.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path

from processes import BrokerProcess, broker

import pydanube

BOUND_MS = 100.0
AT_ONCE = 50
IDLE_SECONDS = 3.0
SCRATCH = Path(__file__).resolve().parents[1] / "build"


async def make(url: str, topics: int, subscriptions: int) -> None:
    async with pydanube.connect(url) as client:

        async def one(topic: str) -> None:
            await client.create_topic(topic)
            for each in range(subscriptions):
                async with client.consumer(topic, subscription=f"billing-{each}", type="exclusive"):
                    pass
            async with client.producer(topic) as producer:
                await producer.send(b"x" * 100)

        for first in range(0, topics, AT_ONCE):
            numbers = range(first, min(first + AT_ONCE, topics))
            await asyncio.gather(*(one(f"/default/orders-{number}") for number in numbers))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--topics", type=int, default=1000)
    options.add_argument("--subscriptions", type=int, default=1)
    options.add_argument("--scrapes", type=int, default=20)
    given = options.parse_args()
    SCRATCH.mkdir(exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=SCRATCH) as scratch,
        broker(Path(scratch), "--upload-interval", "3600") as server,
    ):
        asyncio.run(make(f"danube://127.0.0.1:{server.stream}", given.topics, given.subscriptions))
        before = server.cpu_seconds
        time.sleep(IDLE_SECONDS)
        idle = (server.cpu_seconds - before) / IDLE_SECONDS  # heartbeats, and looking for something to upload
        before, began = server.cpu_seconds, time.perf_counter()
        times, size = scrape(server, given.scrapes)
        used = server.cpu_seconds - before - idle * (time.perf_counter() - began)
        each = used * 1000 / given.scrapes
    print(f"{given.topics} topics, {given.subscriptions} subscriptions each: {size / 1e6:.1f} MB per scrape")
    print(f"milliseconds: best {times[0]:.0f}, median {statistics.median(times):.0f}, worst {times[-1]:.0f}")
    print(f"CPU of the broker: {each:.0f} ms a scrape, besides {idle:.2f} of a core without one")
    print(f"bound {BOUND_MS:.0f}: {'kept' if statistics.median(times) < BOUND_MS else 'BROKEN'} by the median")


def scrape(server: BrokerProcess, count: int) -> tuple[list[float], int]:
    """Milliseconds, sorted, and the bytes of the last answer."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    times, size = [], 0
    for _ in range(count):
        began = time.perf_counter()
        with opener.open(f"http://127.0.0.1:{server.metrics}/metrics", timeout=60) as answer:
            size = len(answer.read())
        times.append((time.perf_counter() - began) * 1000)
        time.sleep(0.1)
    return sorted(times), size


if __name__ == "__main__":
    main()
