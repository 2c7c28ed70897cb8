"""What cursors cost the metadata store: one broker with many subscriptions that all acknowledge, and a real etcd.

    python bench/cursors.py [--subscriptions 5000] [--topics 100] [--rate 1] [--seconds 60]

Every topic has a producer that sends so many messages a second, and every subscription a consumer that acknowledges
each of them at once. Transactions are counted in etcd: a watch of the topics' keys tells of each by its revision.
Broker, etcd and clients share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from processes import BrokerProcess, wait_for_port

import pydanube
from pydanube.stores.metadata.etcd import CLIENT_PORT_OFFSET, EtcdMetadataStore
from pydanube.testing.ports import free_ports, member_ports

AT_ONCE = 32
SETTLE_SECONDS = 10.0  # until cursors are written in their rounds
LATE_SECONDS = 3.0  # a watch tells of what was
SCRATCH = Path(__file__).resolve().parents[1] / "build"


@contextlib.contextmanager
def cluster_of_one(scratch: Path) -> Iterator[tuple[BrokerProcess, str]]:
    """A broker with an etcd member beside it, and where that is."""
    client, admin, stream, metrics = free_ports(4)
    [raft] = member_ports(1)
    command = [
        *(sys.executable, "-m", "pydanube", "broker", "--mode", "cluster", "--data-dir", str(scratch / "data")),
        *("--broker-addr", f"127.0.0.1:{client}", "--admin-addr", f"127.0.0.1:{admin}", "--web-addr", "off"),
        *("--stream-addr", f"127.0.0.1:{stream}", "--prom-exporter", f"127.0.0.1:{metrics}"),
        *("--raft-addr", f"127.0.0.1:{raft}", "--seed-nodes", f"127.0.0.1:{raft}"),
        *("--storage-url", (scratch / "store").as_uri(), "--upload-interval", "3600"),
    ]
    with (scratch / "out").open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            try:
                wait_for_port(stream, 60.0)
            except SystemExit as error:
                raise SystemExit(f"{error}\n{(scratch / 'out').read_text()}") from None
            broker = BrokerProcess(process.pid, client, admin, stream, metrics)
            yield broker, f"127.0.0.1:{raft + CLIENT_PORT_OFFSET}"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()


def etcd_cpu_seconds(broker: BrokerProcess) -> float:
    tick = os.sysconf("SC_CLK_TCK")
    used = 0.0
    for children in Path(f"/proc/{broker.pid}/task").glob("*/children"):
        for child in children.read_text().split():
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            used += (int(fields[11]) + int(fields[12])) / tick
    return used


class Load:
    """Producers, and a consumer for each subscription, until they are cancelled."""

    def __init__(self, client: pydanube.Client, options: argparse.Namespace) -> None:
        self._client = client
        self._options = options
        self.acks = 0
        self.open = 0
        self._room = asyncio.Semaphore(AT_ONCE)

    @property
    def topics(self) -> list[str]:
        return [f"/default/orders{number}" for number in range(self._options.topics)]

    async def produce(self, topic: str) -> None:
        async with self._client.producer(topic, reliable=True) as producer:
            await asyncio.sleep(random.random() / self._options.rate)  # not all at once
            began, number = time.perf_counter(), 0
            while True:
                await producer.send(b"x" * 100)
                number += 1
                await asyncio.sleep(max(0.0, began + number / self._options.rate - time.perf_counter()))

    async def consume(self, topic: str, subscription: str) -> None:
        async with contextlib.AsyncExitStack() as stack:
            async with self._room:
                consumer = await stack.enter_async_context(
                    self._client.consumer(topic, subscription=subscription, type="exclusive")
                )
            self.open += 1
            async for message in consumer:
                await message.ack()
                self.acks += 1


@contextlib.asynccontextmanager
async def counting(etcd: str) -> AsyncIterator[Counter[int]]:
    """Revision in which cursors changed → how many did, within the block. Complete when it is left."""
    store = EtcdMetadataStore([etcd])
    changed: Counter[int] = Counter()

    async def revision() -> int:
        now = await store.transact([], [])
        assert now is not None
        return now

    async def watch(after: int) -> None:
        while True:
            with contextlib.suppress(pydanube.errors.Unreachable):  # a watch may end at any time
                async for events in store.watch("/topics/", after):
                    changed.update(event.revision for event in events if event.key.endswith("/cursor"))
                    after = max(event.revision for event in events)

    watching = asyncio.create_task(watch(await revision()))
    try:
        yield changed
        last = await revision()
        await asyncio.sleep(LATE_SECONDS)
        if watching.done():
            await watching
        for late in [each for each in changed if each > last]:
            del changed[late]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await store.close()


async def measure(broker: BrokerProcess, etcd: str, options: argparse.Namespace) -> None:
    async with pydanube.connect(f"danube://127.0.0.1:{broker.stream}", timeout=120) as client:
        load = Load(client, options)
        for topic in load.topics:
            await client.create_topic(topic)
        began = time.perf_counter()
        tasks = [
            asyncio.create_task(load.consume(load.topics[number % options.topics], f"sub{number}"))
            for number in range(options.subscriptions)
        ]
        while load.open < options.subscriptions:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        print(f"{options.subscriptions} subscriptions of {options.topics} topics: made in {seconds_since(began):.0f} s")
        tasks += [asyncio.create_task(load.produce(topic)) for topic in load.topics]
        await asyncio.sleep(SETTLE_SECONDS)
        async with counting(etcd) as changed:
            acks, cpu, etcd_cpu, began = load.acks, broker.cpu_seconds, etcd_cpu_seconds(broker), time.perf_counter()
            await asyncio.sleep(options.seconds)
            passed = seconds_since(began)
            acks, cpu, etcd_cpu = load.acks - acks, broker.cpu_seconds - cpu, etcd_cpu_seconds(broker) - etcd_cpu
        per_transaction = sorted(changed.values())
        over = [task.exception() for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if over:
            raise SystemExit(f"{len(over)} clients ended, the first with: {over[0]!r}")
    transactions, cursors = len(per_transaction), sum(per_transaction)
    if not transactions:
        raise SystemExit(f"no cursor was stored in {passed:.0f} s, in which {acks} messages were acknowledged")
    print(f"acks/s                    {acks / passed:,.0f}")
    print(f"cursors stored/s          {cursors / passed:,.0f}")
    print(f"metadata transactions/s   {transactions / passed:.1f}")
    print(f"cursors per transaction   {cursors / transactions:.1f} (median {per_transaction[transactions // 2]})")
    print(f"acks per transaction      {acks / transactions:,.0f}")
    print(f"CPU of the broker, of etcd {100 * cpu / passed:.0f} %, {100 * etcd_cpu / passed:.0f} % of a core")


def seconds_since(began: float) -> float:
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subscriptions", type=int, default=5000)
    parser.add_argument("--topics", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1.0, help="messages a second to each topic")
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch, cluster_of_one(Path(scratch)) as (broker, etcd):
        asyncio.run(measure(broker, etcd, options))


if __name__ == "__main__":
    main()
