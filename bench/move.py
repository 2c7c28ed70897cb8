"""Moves and crashes of a real cluster under load: how long publishing pauses, and whether anything is lost.

Three brokers as processes, an etcd member beside each, one object store for all. Native producers send 2,000 messages
of 1 KiB a second in total to ten topics; then one topic after the other is moved. Every receipt and delivery is kept
and compared at the end. Figures belong to the machine and the moment; the zeros do not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

from processes import fdatasync_ms, free_ports, wait_for_port
from rich.console import Console
from rich.table import Table

import pydanube

TOPICS = 10
RATE = 2000
PAYLOAD = 1024
TTL = 5.0


class Member:
    """One broker of the cluster."""

    def __init__(self, place: Path, raft: int, seeds: str, storage: str, interval: float) -> None:
        self.place = place
        self.client, self.admin, self.stream, self.metrics = free_ports(4)
        self.command = [
            *(sys.executable, "-m", "pydanube", "broker", "--mode", "cluster", "--data-dir", str(place / "data")),
            *("--broker-addr", f"127.0.0.1:{self.client}", "--admin-addr", f"127.0.0.1:{self.admin}"),
            *("--stream-addr", f"127.0.0.1:{self.stream}", "--prom-exporter", f"127.0.0.1:{self.metrics}"),
            *("--raft-addr", f"127.0.0.1:{raft}", "--seed-nodes", seeds, "--storage-url", storage),
            *("--registration-ttl", str(TTL), "--upload-interval", str(interval)),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"danube://127.0.0.1:{self.stream}"

    def start(self) -> None:
        out = (self.place / "out").open("ab")
        self.process = subprocess.Popen(self.command, stdout=out, stderr=out)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def admin_call(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pydanube", "admin", "--endpoint", f"http://127.0.0.1:{self.admin}", *words]
        return subprocess.run(command, capture_output=True, text=True)


def raft_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 50_000)
        with contextlib.suppress(OSError), socket.socket() as peer, socket.socket() as client:
            peer.bind(("127.0.0.1", port))
            client.bind(("127.0.0.1", port + 1000))
            found.append(port)
    return found


@contextlib.asynccontextmanager
async def cluster(scratch: Path, interval: float) -> AsyncIterator[list[Member]]:
    ports = raft_ports(3)
    seeds = ",".join(f"127.0.0.1:{port}" for port in ports)
    members = []
    for number, port in enumerate(ports):
        place = scratch / f"broker{number}"
        place.mkdir()
        members.append(Member(place, port, seeds, (scratch / "store").as_uri(), interval))
    try:
        for member in members:
            member.start()
        for member in members:
            await asyncio.to_thread(wait_for_port, member.stream, 60.0)
        yield members
    finally:
        for member in members:
            if member.process is not None and member.process.poll() is None:
                member.process.send_signal(signal.SIGTERM)
        for member in members:
            if member.process is not None:
                try:
                    member.process.wait(60)
                except subprocess.TimeoutExpired:
                    member.process.kill()


class Load:
    """Producers and consumers that never stop, and what they saw."""

    def __init__(self, client: pydanube.Client) -> None:
        self.client = client
        self.receipts: dict[str, list[tuple[float, int, int]]] = {}  # topic -> when, offset, number
        self.got: dict[str, list[tuple[int, int]]] = {}  # topic -> offset, number
        self.stopping = asyncio.Event()
        self.errors: list[str] = []

    async def produce(self, topic: str, per_second: float) -> None:
        receipts = self.receipts[topic] = []
        filler = os.urandom(PAYLOAD - 8)
        async with self.client.producer(topic, reliable=True) as producer:
            number = 0
            began = time.perf_counter()
            waiting: set[asyncio.Task[None]] = set()

            async def send(number: int) -> None:
                try:
                    receipt = await producer.send(number.to_bytes(8, "big") + filler)
                except pydanube.errors.DanubeError as error:
                    self.errors.append(str(error))
                else:
                    receipts.append((time.perf_counter(), receipt.offset, number))

            while not self.stopping.is_set():
                task = asyncio.create_task(send(number))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                number += 1
                await asyncio.sleep(max(0.0, began + number / per_second - time.perf_counter()))
            await asyncio.gather(*waiting)

    async def consume(self, topic: str) -> None:
        got = self.got[topic] = []
        async with self.client.consumer(topic, subscription="bench", start="earliest") as consumer:
            with contextlib.suppress(asyncio.CancelledError):
                async for message in consumer:
                    got.append((message.offset, int.from_bytes(message.payload[:8], "big")))
                    await message.ack()

    def longest_pause(self, topic: str, since: float, until: float) -> float:
        """Between two receipts of the topic, around this time."""
        times = [at for at, _, _ in self.receipts[topic] if since - 1.0 <= at <= until + 1.0]
        return max((after - before for before, after in pairwise(times)), default=0.0)

    def gaps(self, before: float) -> int:
        """Offsets between the first and the last receipt so far that nobody was told of."""
        found = 0
        for receipts in self.receipts.values():
            offsets = {offset for at, offset, _ in receipts if at < before}
            found += (max(offsets) - min(offsets) + 1 - len(offsets)) if offsets else 0
        return found

    def verdict(self) -> dict[str, int]:
        repeated = doubled = undelivered = 0
        for topic, receipts in self.receipts.items():
            offsets = [offset for _, offset, _ in receipts]
            repeated += len(offsets) - len(set(offsets))
            seen: dict[int, set[int]] = {}
            for offset, number in self.got[topic]:
                seen.setdefault(number, set()).add(offset)
            doubled += sum(len(places) > 1 for places in seen.values())
            undelivered += sum(number not in seen for _, _, number in receipts)
        return {"lost": undelivered, "offsets twice": repeated, "duplicates": doubled}


async def measure(scratch: Path, moves: int, interval: float) -> dict[str, object]:
    result: dict[str, object] = {"fdatasync p50, p99 ms": [round(ms, 2) for ms in fdatasync_ms(scratch)]}
    async with cluster(scratch, interval) as members:
        url = ",".join(member.url for member in members)
        topics = [f"/default/bench{number}" for number in range(TOPICS)]
        async with pydanube.connect(url, timeout=60) as client:
            load = Load(client)
            tasks = [asyncio.create_task(load.produce(topic, RATE / TOPICS)) for topic in topics]
            await asyncio.sleep(5)
            tasks += (consuming := [asyncio.create_task(load.consume(topic)) for topic in topics])
            await asyncio.sleep(5)
            pauses, whole = [], []
            for move in range(moves):
                topic = topics[move % TOPICS]
                began = time.perf_counter()
                done = await asyncio.to_thread(members[move % 3].admin_call, "topics", "unload", topic)
                if done.returncode != 0:
                    load.errors.append(done.stderr.strip())
                whole.append(time.perf_counter() - began)
                await asyncio.sleep(1.0)
                pauses.append(load.longest_pause(topic, began, time.perf_counter()))
            result["offset gaps after the moves"] = load.gaps(time.perf_counter() - 3)
            before = time.perf_counter()
            members[0].kill()
            await asyncio.sleep(TTL + 15)
            taken = max(load.longest_pause(topic, before, before + TTL + 15) for topic in topics)
            members[0].start()
            await asyncio.sleep(20)
            load.stopping.set()
            await asyncio.sleep(15)
            for task in consuming:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            pauses.sort()
            result["moves"] = moves
            result["publish pause p50 ms"] = round(1000 * pauses[len(pauses) // 2], 1)
            result["publish pause p99 ms"] = round(1000 * pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))], 1)
            result["crash: longest pause s (TTL " + f"{TTL:g})"] = round(taken, 2)
            result["messages"] = sum(len(receipts) for receipts in load.receipts.values())
            result |= load.verdict()
            result["errors"] = load.errors[:5]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=100)
    parser.add_argument("--upload-interval", type=float, default=30.0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="danube-move-") as scratch:
        result = asyncio.run(measure(Path(scratch), arguments.moves, arguments.upload_interval))
    if arguments.json:
        print(json.dumps(result))
        return
    table = Table("figure", "value", title="Moves under load: 3 brokers, 2,000 messages/s of 1 KiB, 10 topics")
    for name, value in result.items():
        table.add_row(name, str(value))
    Console().print(table)


if __name__ == "__main__":
    main()
