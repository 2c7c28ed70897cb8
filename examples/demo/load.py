"""Orders that never stop, consumers that get them, and what can be said of both afterwards.

A message is *lost* if it has a receipt and was never received, and *duplicated* if it is stored under two offsets. The
same offset delivered again is neither: a consumer tells it by the offset. It is counted too, as delivered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from itertools import pairwise
from typing import Any

import pydanube

WAREHOUSE = "warehouse"
REPORTS = "reports"
TICK_SECONDS = 0.05
COUNTRIES = ("AT", "DE", "HU", "RO", "SK")
KINDS = (
    *("orders", "payments", "shipments", "returns", "clicks", "carts", "reviews", "stock", "prices", "emails"),
    *("visits", "coupons"),
)


def topic_names(count: int) -> list[str]:
    names = [*KINDS, *(f"stream{number}" for number in range(len(KINDS), count))]
    return [f"/default/{name}" for name in names[:count]]


class Stream:
    """One topic: its producer, its consumer, and what they saw."""

    def __init__(self, client: pydanube.Client, topic: str, per_second: float) -> None:
        self.topic = topic
        self.per_second = per_second
        self.receipts: list[tuple[float, int, int]] = []  # when, offset, number
        self.received: dict[int, int] = {}  # offset -> number
        self.again = 0
        self.errors: list[str] = []
        self.is_stopping = False
        self._client = client
        self._numbers = 0
        self._seen: set[int] = set()
        self._missing: set[int] = set()  # with a receipt, and not received so far

    async def produce(self) -> None:
        async with self._client.producer(self.topic, name=f"shop-{self.topic.rpartition('/')[2]}") as producer:
            began = time.perf_counter()
            waiting: set[asyncio.Task[None]] = set()
            while not self.is_stopping:
                due = int((time.perf_counter() - began) * self.per_second)
                for _ in range(min(due - self._numbers, 1 + int(self.per_second))):
                    task = asyncio.create_task(self._send(producer, self._numbers))
                    self._numbers += 1
                    waiting.add(task)
                    task.add_done_callback(waiting.discard)
                await asyncio.sleep(TICK_SECONDS)
            await asyncio.gather(*waiting)

    async def _send(self, producer: pydanube.Producer, number: int) -> None:
        order = {"number": number, "country": random.choice(COUNTRIES), "cents": random.randrange(100, 20_000)}
        try:
            receipt = await producer.send(json.dumps(order).encode(), key=f"customer-{number % 97}")
        except pydanube.DanubeError as error:
            self.errors.append(str(error))
        else:
            self.receipts.append((time.perf_counter(), receipt.offset, number))
            if number not in self._seen:
                self._missing.add(number)

    async def consume(self) -> None:
        async with self._client.consumer(
            self.topic, subscription=WAREHOUSE, type="exclusive", start="earliest"
        ) as consumer:
            async for message in consumer:
                if message.offset in self.received:
                    self.again += 1
                else:
                    number = json.loads(message.payload)["number"]
                    self.received[message.offset] = number
                    self._seen.add(number)
                    self._missing.discard(number)
                await message.ack()

    async def read_slowly(self, per_second: float) -> None:
        """A second subscription, slower than the topic: so that there is lag to look at."""
        async with self._client.consumer(
            self.topic, subscription=REPORTS, start="earliest", window_messages=50
        ) as consumer:
            async for message in consumer:
                await message.ack()
                await asyncio.sleep(1 / per_second)

    # --- what came of it --------------------------------------------------------------------------------

    @property
    def sent(self) -> int:
        return len(self.receipts)

    @property
    def lost(self) -> int:
        """With a receipt, and not received: so far."""
        return len(self._missing)

    def missing_before(self, moment: float) -> int:
        """Of those with a receipt from before."""
        if not self._missing:
            return 0
        return sum(number in self._missing for at, _, number in self.receipts if at < moment)

    @property
    def duplicated(self) -> int:
        """Stored under a second offset."""
        return len(self.received) - len(self._seen)

    def pause_seconds(self, since: float, until: float) -> float:
        """The longest time without a receipt that touches [since, until]."""
        times = [at for at, _, _ in self.receipts if at >= since - 1.0]
        return max((after - before for before, after in pairwise(times) if before <= until), default=0.0)

    def last_receipt_at(self) -> float:
        return self.receipts[-1][0] if self.receipts else 0.0


class Load:
    """All streams. Enter it to start them; they stop producing with `stop`."""

    def __init__(self, client: pydanube.Client, topics: list[str], per_second: float) -> None:
        shares = [4.0, *([1.0] * (len(topics) - 1))]  # orders are what is looked at
        self.streams = [
            Stream(client, topic, per_second * share / sum(shares)) for topic, share in zip(topics, shares, strict=True)
        ]
        self._producing: list[asyncio.Task[None]] = []
        self._consuming: list[asyncio.Task[None]] = []

    @property
    def orders(self) -> Stream:
        return self.streams[0]

    async def __aenter__(self) -> Load:
        self._consuming = [asyncio.create_task(stream.consume()) for stream in self.streams]
        self._consuming.append(asyncio.create_task(self.orders.read_slowly(self.orders.per_second * 0.6)))
        self._producing = [asyncio.create_task(stream.produce()) for stream in self.streams]
        return self

    async def __aexit__(self, *_: Any) -> None:
        for task in (*self._producing, *self._consuming):
            task.cancel()
        await asyncio.gather(*self._producing, *self._consuming, return_exceptions=True)

    async def stop(self) -> None:
        """No more orders. Returns when each of them has its receipt."""
        for stream in self.streams:
            stream.is_stopping = True
        await asyncio.gather(*self._producing)

    async def received(self, seconds: float) -> bool:
        """Waits until everything with a receipt was received."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.lost:
                    self.check()
                    await asyncio.sleep(0.1)
        return not self.lost

    def check(self) -> None:
        """Raises what ended a producer or a consumer."""
        for task in (*self._producing, *self._consuming):
            if task.done() and not task.cancelled() and task.exception() is not None:
                raise task.exception()  # type: ignore[misc]

    @property
    def sent(self) -> int:
        return sum(stream.sent for stream in self.streams)

    @property
    def received_count(self) -> int:
        return sum(len(stream.received) for stream in self.streams)

    @property
    def lost(self) -> int:
        return sum(stream.lost for stream in self.streams)

    @property
    def duplicated(self) -> int:
        return sum(stream.duplicated for stream in self.streams)

    @property
    def again(self) -> int:
        return sum(stream.again for stream in self.streams)

    @property
    def errors(self) -> list[str]:
        return [error for stream in self.streams for error in stream.errors]
