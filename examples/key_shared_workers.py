"""A key-shared subscription whose workers come and go: each key is with one worker at a time, and in order.

Accounts are keys; their events must be handled in order, and different accounts may be handled at the same time.
Workers join and leave while events come, as when a deployment scales.

python examples/key_shared_workers.py danube://127.0.0.1:6651
"""

from __future__ import annotations

import asyncio
import sys
from collections import defaultdict
from contextlib import suppress

import pydanube

TOPIC = "/default/account.events"


class Ledger:
    """What was handled, in the order in which it was; shared by all workers here, a database elsewhere."""

    def __init__(self, total: int) -> None:
        self.events: dict[str, list[int]] = defaultdict(list)
        self.by_worker: dict[str, int] = defaultdict(int)
        self.done = asyncio.Event()
        self._total = total

    def handle(self, worker: str, account: str, number: int) -> None:
        if number in self.events[account]:
            return  # delivery is at least once: it came again, because an ack was lost
        self.events[account].append(number)
        self.by_worker[worker] += 1
        if sum(map(len, self.events.values())) == self._total:
            self.done.set()


async def work(client: pydanube.Client, name: str, ledger: Ledger) -> None:
    """Until it is cancelled. What it has begun is finished and acknowledged: it is left between two messages."""
    async with client.consumer(
        TOPIC, subscription="ledger", type="key_shared", start="earliest", name=name, window_messages=20
    ) as consumer:
        async for message in consumer:
            assert message.key is not None
            ledger.handle(name, message.key, int(message.payload))
            await message.ack()
            await asyncio.sleep(0.001)  # the work; the only place, but for the next message, where it is cancelled


async def leave(worker: asyncio.Task[None]) -> None:
    worker.cancel()
    with suppress(asyncio.CancelledError):
        await worker


async def main(url: str, accounts: int = 20, events: int = 25) -> Ledger:
    ledger = Ledger(accounts * events)
    async with pydanube.connect(url) as client:
        await client.create_topic(TOPIC, exist_ok=True)
        workers = [asyncio.create_task(work(client, f"worker-{number}", ledger)) for number in range(2)]
        async with client.producer(TOPIC) as producer:
            for number in range(events):
                for account in range(accounts):
                    producer.send_nowait(b"%d" % number, key=f"account-{account}")
                if number == 5:
                    workers.append(asyncio.create_task(work(client, "worker-2", ledger)))
                if number == 15:
                    await leave(workers.pop(0))
                await asyncio.sleep(0.005)
        async with asyncio.timeout(100):
            await ledger.done.wait()
        for worker in workers:
            await leave(worker)
    in_order = all(numbers == sorted(numbers) for numbers in ledger.events.values())
    print(f"{sum(map(len, ledger.events.values()))} handled, in order: {in_order}, by {len(ledger.by_worker)} workers")
    return ledger


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else "danube://127.0.0.1:6651"))
