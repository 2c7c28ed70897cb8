"""Moves, drains and crashes of a real cluster under load: how long publishing pauses, and whether anything is lost.

Three brokers as processes, an etcd member beside each, one object store for all.

    moves    native producers send 2,000 messages of 1 KiB a second in total to ten topics, an official client 50 a
             second to another, which an official consumer reads; one topic after the other is moved, now and then one
             that keeps nothing; then a broker is killed and comes back, and another one whose etcd member leads the
             others. Every receipt and delivery is kept and compared at the end, and stored cursors are looked at every
             second
    drain    a broker with many topics, a message in each, gives all of them to the two others

Figures belong to the machine and the moment; the zeros do not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import yaml
from processes import fdatasync_ms, wait_for_port
from rich.console import Console
from rich.table import Table

import pydanube
from pydanube.core import keys
from pydanube.stores.metadata.etcd import CLIENT_PORT_OFFSET, EtcdMetadataStore
from pydanube.testing.ports import free_ports, member_ports
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.pydanube import admin_pb2 as pb

TOPICS = 10
RATE = 2000
OFFICIAL_RATE = 50
PAYLOAD = 1024
TTL = 5.0
OFFICIAL = "/default/official"
OFFICIAL_CONSUMER = "official consumer"
NEWS = "/default/news"  # keeps nothing
BROKERS = "danube_admin.BrokerAdmin"
OURS = "pydanube.admin.v1.Admin"


class Member:
    """One broker of the cluster."""

    def __init__(self, place: Path, raft: int, seeds: str, storage: Sequence[str], interval: float) -> None:
        self.place = place
        self.etcd = f"127.0.0.1:{raft + CLIENT_PORT_OFFSET}"
        self.client, self.admin, self.stream, self.metrics = free_ports(4)
        self.command = [
            *(sys.executable, "-m", "pydanube", "broker", "--mode", "cluster", "--data-dir", str(place / "data")),
            *("--broker-addr", f"127.0.0.1:{self.client}", "--admin-addr", f"127.0.0.1:{self.admin}"),
            *("--stream-addr", f"127.0.0.1:{self.stream}", "--prom-exporter", f"127.0.0.1:{self.metrics}"),
            *("--raft-addr", f"127.0.0.1:{raft}", "--seed-nodes", seeds, *storage, "--web-addr", "off"),
            *("--registration-ttl", str(TTL), "--upload-interval", str(interval)),
        ]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"danube://127.0.0.1:{self.stream}"

    @property
    def cpu_seconds(self) -> float:
        """Of the broker, without the etcd member beside it."""
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def start(self) -> None:
        out = (self.place / "out").open("ab")
        self.process = subprocess.Popen(self.command, stdout=out, stderr=out)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def leads_etcd(self) -> bool:
        request = urllib.request.Request(f"http://{self.etcd}/v3/maintenance/status", b"{}")
        with urllib.request.urlopen(request, timeout=5) as answer:
            status = json.load(answer)
        return bool(status["header"]["member_id"] == status["leader"])

    @contextlib.asynccontextmanager
    async def channel(self) -> AsyncIterator[Any]:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.admin}") as channel:
            yield channel

    async def ask(self, service: str, method: str, request: Any, answer: Any) -> Any:
        async with self.channel() as channel:
            call = channel.unary_unary(
                f"/{service}/{method}",
                request_serializer=type(request).SerializeToString,
                response_deserializer=answer.FromString,
            )
            return await call(request, timeout=3600)

    async def unload(self, topic: str) -> pb.UnloadResult:
        """Moves the topic; returns when somebody else serves it. Not by the command, whose start would be felt."""
        request = pb.UnloadTopicRequest(topic=topic, wait=True)
        async with self.channel() as channel:
            call = channel.unary_stream(
                f"/{OURS}/UnloadTopic",
                request_serializer=pb.UnloadTopicRequest.SerializeToString,
                response_deserializer=pb.UnloadTopicResponse.FromString,
            )
            async for answer in call(request, timeout=120):
                if answer.HasField("result"):
                    return answer.result
        raise SystemExit(f"the move of {topic} has no result")


@contextlib.contextmanager
def storage_in(scratch: Path, store: str) -> Iterator[list[str]]:
    """What brokers are told about their store: a directory, or SeaweedFS, which speaks S3."""
    if store == "file":
        yield ["--storage-url", (scratch / "store").as_uri()]
        return
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests.e2e.objectstores import running_s3_server

    with running_s3_server() as server:
        config = scratch / "storage.yml"
        config.write_text(yaml.safe_dump({"storage": {"durable": server.options}}))
        yield ["--config-file", str(config), "--storage-url", server.url()]


@contextlib.asynccontextmanager
async def cluster(scratch: Path, store: str, interval: float) -> AsyncIterator[list[Member]]:
    ports = member_ports(3)
    seeds = ",".join(f"127.0.0.1:{port}" for port in ports)
    with storage_in(scratch, store) as storage:
        members = []
        for number, port in enumerate(ports):
            place = scratch / f"broker{number}"
            place.mkdir()
            members.append(Member(place, port, seeds, storage, interval))
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


# --- load ---------------------------------------------------------------------------------------------------


class Load:
    """Producers and consumers that never stop, and what they saw."""

    def __init__(self, client: pydanube.Client) -> None:
        self.client = client
        self.receipts: dict[str, list[tuple[float, int, int]]] = {}  # topic -> when, offset, number
        self.got: dict[str, list[tuple[int, int]]] = {}  # topic -> offset, number
        self.answered: dict[str, list[float]] = defaultdict(list)  # topics of which only the times matter
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
        async with self.client.consumer(topic, subscription="bench", type="exclusive", start="earliest") as consumer:
            with contextlib.suppress(asyncio.CancelledError):
                async for message in consumer:
                    got.append((message.offset, int.from_bytes(message.payload[:8], "big")))
                    await message.ack()

    async def produce_news(self) -> None:
        """To a topic that keeps nothing."""
        async with self.client.producer(NEWS, reliable=False) as producer:
            while not self.stopping.is_set():
                with contextlib.suppress(pydanube.errors.DanubeError):  # lost, as such a topic may lose
                    await producer.send(b"news")
                    self.answered[NEWS].append(time.perf_counter())
                await asyncio.sleep(1 / OFFICIAL_RATE)

    def longest_pause(self, topic: str, since: float, until: float) -> float:
        """Between two answers, around this time."""
        at = [each[0] for each in self.receipts[topic]] if topic in self.receipts else self.answered[topic]
        times = [each for each in at if since - 1.0 <= each <= until + 1.0]
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


class Beside:
    """What others do meanwhile, in a process of their own: the official client, and somebody who looks at cursors."""

    def __init__(self, path: Path) -> None:
        self._out = path.open("w", buffering=1)

    def say(self, what: str) -> None:
        self._out.write(f"{what} {time.perf_counter()}\n")

    async def produce(self, url: str) -> None:
        """One message after the other, as it comes: the client finds its topic again by itself."""
        from danube import DanubeClientBuilder, DispatchStrategy
        from danube import errors as official_errors

        client = await DanubeClientBuilder().service_url(url).build()
        builder = client.new_producer().with_topic(OFFICIAL).with_name("official")
        producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
        await producer.create()
        while True:
            try:
                await producer.send(os.urandom(PAYLOAD))
                self.say(OFFICIAL)
            except (official_errors.DanubeError, grpc.aio.AioRpcError):
                self.say("failed")
            await asyncio.sleep(1 / OFFICIAL_RATE)

    async def consume(self, url: str) -> None:
        from danube import DanubeClientBuilder, SubType

        client = await DanubeClientBuilder().service_url(url).build()
        builder = client.new_consumer().with_topic(OFFICIAL).with_consumer_name("official")
        consumer = builder.with_subscription("bench").with_subscription_type(SubType.EXCLUSIVE).build()
        await consumer.subscribe()
        queue = await consumer.receive()
        while True:
            message = await queue.get()
            self.say(OFFICIAL_CONSUMER)
            with contextlib.suppress(grpc.aio.AioRpcError):  # it moves just now: it comes again
                await consumer.ack(message)

    async def watch_cursors(self, endpoints: Sequence[str]) -> None:
        store = EtcdMetadataStore(endpoints)
        known: dict[str, int] = {}
        while True:
            with contextlib.suppress(pydanube.errors.DanubeError):
                for item in await store.list(keys.TOPICS):
                    if item.key.endswith("/cursor"):
                        before, known[item.key] = known.get(item.key, -1), int(item.value)
                        if known[item.key] != before:
                            self.say("cursor back" if known[item.key] < before else "cursor")
            await asyncio.sleep(1.0)

    async def run(self, url: str, endpoints: Sequence[str]) -> None:
        producing = asyncio.create_task(self.produce(url))
        await asyncio.sleep(2)
        await asyncio.gather(producing, self.consume(url), self.watch_cursors(endpoints))


@contextlib.contextmanager
def beside(path: Path, members: Sequence[Member]) -> Iterator[None]:
    logs = path.with_suffix(".log").open("w")
    url = f"http://127.0.0.1:{members[0].client}"
    command = [sys.executable, __file__, "--beside", str(path), url, *(member.etcd for member in members)]
    process = subprocess.Popen(command, stdout=logs, stderr=logs)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def said(path: Path) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(list)
    for line in path.read_text().splitlines():
        what, _, at = line.rpartition(" ")
        found[what].append(float(at))
    return found


def percentile(values: Sequence[float], part: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def milliseconds(values: Sequence[float]) -> str:
    return f"p50 {1000 * percentile(values, 0.5):.0f}, p99 {1000 * percentile(values, 0.99):.0f}"


# --- scenarios ----------------------------------------------------------------------------------------------


async def measure_moves(scratch: Path, options: argparse.Namespace) -> dict[str, object]:
    result: dict[str, object] = {"fdatasync p50, p99 ms": [round(ms, 2) for ms in fdatasync_ms(scratch)]}
    async with cluster(scratch, options.store, options.upload_interval) as members:
        url = ",".join(member.url for member in members)
        topics = [f"/default/bench{number}" for number in range(TOPICS)]
        async with pydanube.connect(url, timeout=60) as client:
            load = Load(client)
            tasks = [asyncio.create_task(load.produce(topic, RATE / TOPICS)) for topic in topics]
            tasks.append(asyncio.create_task(load.produce_news()))
            await asyncio.sleep(5)
            tasks += (consuming := [asyncio.create_task(load.consume(topic)) for topic in topics])
            await asyncio.sleep(5)
            phases: dict[str, list[float]] = defaultdict(list)
            pauses: dict[str, list[float]] = defaultdict(list)

            async def move(topic: str, kind: str, asked: Member) -> None:
                began = time.perf_counter()
                try:
                    moved = await asked.unload(topic)
                except grpc.aio.AioRpcError as error:
                    load.errors.append(f"move of {topic}: {error.details()}")
                    return
                if kind == "native":
                    for phase in moved.phases:
                        phases[phase.name].append(phase.duration_ms / 1000)
                await asyncio.sleep(1.0)
                if kind == "official":
                    windows.append((began, time.perf_counter()))
                else:
                    pauses[kind].append(load.longest_pause(topic, began, time.perf_counter()))

            windows: list[tuple[float, float]] = []
            others = scratch / "beside"
            with beside(others, members):
                await asyncio.sleep(5)
                for number in range(options.moves):
                    await move(topics[number % TOPICS], "native", members[number % 3])
                    if number % 10 == 0:
                        await move(OFFICIAL, "official", members[number % 3])
                        await move(NEWS, "non-reliable", members[number % 3])
            load.answered |= (told := said(others))
            for who in (OFFICIAL, OFFICIAL_CONSUMER):
                pauses[who.removeprefix("/default/")] = [load.longest_pause(who, *window) for window in windows]
            result["moves"] = options.moves
            for kind, times in pauses.items():
                result[f"publish pause ms, {kind}"] = milliseconds(times)
            for name, times in phases.items():
                result[f"phase {name} ms"] = milliseconds(times)
            result["offset gaps after the moves"] = load.gaps(time.perf_counter() - 3)
            result["messages of the official client, received"] = [
                len(told[OFFICIAL]),
                len(told[OFFICIAL_CONSUMER]),
            ]
            result["cursors stored, went back"] = [len(told["cursor"]), len(told["cursor back"])]
            for leads in () if options.no_crash else (False, True):
                member = next(each for each in members if each.leads_etcd() == leads)
                before = time.perf_counter()
                member.kill()
                await asyncio.sleep(TTL + 15)
                taken = [load.longest_pause(topic, before, before + TTL + 15) for topic in topics]
                whose = "led etcd" if leads else "followed in etcd"
                result[f"crash, its member {whose}: longest pause s (TTL {TTL:g})"] = round(max(taken), 2)
                result[f"crash, its member {whose}: topics taken over"] = sum(pause > TTL / 2 for pause in taken)
                member.start()
                await asyncio.sleep(20)
            load.stopping.set()
            await asyncio.sleep(15 if not options.no_crash else 3)
            for task in consuming:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            result["messages"] = sum(len(receipts) for receipts in load.receipts.values())
            result |= load.verdict()
            result["errors"] = [error[:100] for error in load.errors]
    return result


async def measure_drain(scratch: Path, options: argparse.Namespace) -> dict[str, object]:
    async with cluster(scratch, options.store, options.upload_interval) as members:
        listed = await members[0].ask(BROKERS, "ListBrokers", admin_pb.Empty(), admin_pb.BrokerListResponse)
        by_port = {int(each.admin_addr.rpartition(":")[2]): each.broker_id for each in listed.brokers}
        ids = [by_port[member.admin] for member in members]
        # Everything goes to the first while the others are drained.
        for other in ids[1:]:
            request = admin_pb.UnloadBrokerRequest(broker_id=other, timeout_seconds=60)
            await members[0].ask(BROKERS, "UnloadBroker", request, admin_pb.UnloadBrokerResponse)
        topics = [f"/default/t{number:04}" for number in range(options.drain)]
        began = time.perf_counter()
        async with pydanube.connect(members[0].url, timeout=300) as client:
            room = asyncio.Semaphore(16)

            async def fill(topic: str) -> None:
                async with room, client.producer(topic, reliable=True) as producer:
                    await producer.send(b"one")

            await asyncio.gather(*map(fill, topics))
        made = time.perf_counter() - began
        for other in ids[1:]:
            request = admin_pb.ActivateBrokerRequest(broker_id=other)
            await members[0].ask(BROKERS, "ActivateBroker", request, admin_pb.ActivateBrokerResponse)
        leads = await members[0].ask(BROKERS, "GetLeaderBroker", admin_pb.Empty(), admin_pb.BrokerResponse)
        leader = members[next((n for n, each in enumerate(ids) if each in leads.leader), 0)]
        cpu_before, began = leader.cpu_seconds, time.perf_counter()
        request = admin_pb.UnloadBrokerRequest(
            broker_id=ids[0], max_parallel=options.max_parallel, timeout_seconds=3600
        )
        drained = await members[1].ask(BROKERS, "UnloadBroker", request, admin_pb.UnloadBrokerResponse)
        seconds = time.perf_counter() - began
        cpu = leader.cpu_seconds - cpu_before
        async with pydanube.connect(members[1].url, timeout=60) as client:
            for topic in random.sample(topics, min(10, len(topics))):
                async with client.producer(topic, reliable=True) as producer:
                    assert (await producer.send(b"two")).offset == 1, topic
        return {
            "topics": options.drain,
            "made s": round(made, 1),
            "drained": f"{drained.succeeded} of {drained.total}, {drained.failed} failed, {drained.pending} pending",
            "drain s": round(seconds, 1),
            "topics/s": round(drained.succeeded / seconds, 1),
            "leader": "the drained broker" if leader is members[0] else "another broker",
            "leader's CPU s": round(cpu, 1),
            "leader's CPU %": round(100 * cpu / seconds),
        }


def main() -> None:
    if sys.argv[1:2] == ["--beside"]:
        logging.getLogger("danube").setLevel(logging.CRITICAL)  # the official client tells of every move
        path, url, *endpoints = sys.argv[2:]
        asyncio.run(Beside(Path(path)).run(url, endpoints))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=100, help="0: none")
    parser.add_argument("--no-crash", action="store_true", help="nobody is killed after the moves")
    parser.add_argument("--drain", type=int, default=1000, metavar="TOPICS", help="0: none")
    parser.add_argument("--max-parallel", type=int, default=0, help="topics that leave at once; 0: the default")
    parser.add_argument("--store", choices=("s3", "file"), default="s3")
    parser.add_argument("--upload-interval", type=float, default=30.0)
    parser.add_argument("--keep", type=Path, help="a directory in which data and logs of the brokers are left")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    for wanted, measure, title in (
        (options.moves, measure_moves, "Moves under load: 3 brokers, 2,000 messages/s of 1 KiB, 10 topics"),
        (options.drain, measure_drain, "Drain of a broker"),
    ):
        if not wanted:
            continue
        with contextlib.ExitStack() as stack:
            if options.keep is not None:
                scratch = options.keep / measure.__name__
                scratch.mkdir(parents=True)
            else:
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="danube-move-")))
            result = asyncio.run(measure(scratch, options))
        if options.json:
            print(json.dumps(result))
            continue
        table = Table("figure", "value", title=title)
        for name, value in result.items():
            table.add_row(name, str(value))
        Console().print(table)


if __name__ == "__main__":
    main()
