"""Many topics change their broker at once: how long until all are served again, how often a target is replaced, CPU.

    python bench/takeover.py [--topics 1000] [--create 300] [--runs 3] [--ttl 5] [--part create,assign,kill,stop]

Three brokers as processes, one etcd that nobody else uses, a directory as object store, no clients while it counts.

    create   topics are created through a broker, 16 at a time
    assign   topics appear all at once, written straight into etcd, while one broker is there to take them
    kill     a message in each; two more brokers come, and the one that has everything (and leads) is killed with -9
    stop     the same again with another broker, which gets SIGTERM

Times are those of a watch on etcd, from the command until the claim of the first, of half and of all topics; `served`
is when brokers say that they have opened all. A topic is redirected when the leader names another target for it before
anybody has claimed it. CPU is user and system time of each process, which hardly depends on what else the machine does;
the times do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

from processes import wait_for_port
from rich.console import Console
from rich.table import Table

import pydanube
from pydanube.core import keys
from pydanube.core.cluster.placement import Marker
from pydanube.core.names import BrokerId, TopicName
from pydanube.ports import Put
from pydanube.stores.metadata.etcd import EtcdMetadataStore
from pydanube.testing.ports import free_ports

SCRATCH = Path(__file__).resolve().parents[1] / "build"
AT_ONCE = 16
LATE_SECONDS = 600.0  # by then it has failed


class Child:
    def __init__(self, command: Sequence[str], out: Path) -> None:
        with out.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file)
        self.out = out

    @property
    def cpu_seconds(self) -> float:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def end(self, number: signal.Signals) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait()


class Broker(Child):
    def __init__(self, place: Path, etcd: str, store: Path, ttl: float) -> None:
        place.mkdir()
        client, admin, self.stream, self.metrics = free_ports(4)
        super().__init__(
            [
                *(sys.executable, "-m", "pydanube", "broker", "--mode", "cluster", "--data-dir", str(place / "data")),
                *("--broker-addr", f"127.0.0.1:{client}", "--admin-addr", f"127.0.0.1:{admin}", "--web-addr", "off"),
                *("--stream-addr", f"127.0.0.1:{self.stream}", "--prom-exporter", f"127.0.0.1:{self.metrics}"),
                *("--etcd", etcd, "--storage-url", store.as_uri(), "--registration-ttl", str(ttl)),
            ],
            place / "out",
        )
        self.place = place

    @property
    def id(self) -> BrokerId:
        return BrokerId(int((self.place / "data" / "node_id").read_text()))

    @property
    def topics_owned(self) -> int:
        """That it serves, by its own word."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=60) as answer:
            found = [line for line in answer if line.startswith(b"danube_broker_topics_owned")]
        return round(float(found[0].split()[-1]))

    def said(self, words: str) -> int:
        return self.out.read_text(errors="replace").count(words)


class ServerCluster:
    """One etcd and the brokers on it."""

    def __init__(self, place: Path, etcd: Child, address: str, options: argparse.Namespace) -> None:
        self.place = place
        self.etcd = etcd
        self.address = address
        self.options = options
        self.store = EtcdMetadataStore([address])
        self.brokers: list[Broker] = []
        self.topics = 0  # that there are

    def start(self) -> Broker:
        place = self.place / f"broker{len(self.brokers)}"
        broker = Broker(place, self.address, self.place / "store", self.options.ttl)
        self.brokers.append(broker)
        try:
            wait_for_port(broker.stream, 120.0)
        except SystemExit as error:
            raise SystemExit(f"{error}\n{broker.out.read_text(errors='replace')[-4000:]}") from None
        return broker

    async def write_topics(self, names: Sequence[TopicName]) -> None:
        """As creating them does, without asking a broker."""
        for first in range(0, len(names), 30):
            operations = [
                put
                for name in names[first : first + 30]
                for put in (
                    Put(keys.topic(name), b"null"),
                    Put(keys.delivery(name), b'"Reliable"'),
                    Put(keys.namespace_topic(name), b"null"),
                    Put(keys.unassigned(name), b"null"),
                )
            ]
            await self.store.transact([], operations)


class Watch:
    """What became of topics since it began, by the clock of this process."""

    def __init__(self, topics: Sequence[TopicName], gone: BrokerId | None = None) -> None:
        self._topics = set(topics)
        self._gone = gone
        self._targets: dict[TopicName, BrokerId] = {}
        self.claimed: dict[TopicName, float] = {}
        self.redirected = 0
        self.changes = 0
        self.began = time.perf_counter()

    async def follow(self, store: EtcdMetadataStore, after: int) -> None:
        async for events in store.watch(keys.CLUSTER, after):
            for event in events:
                self.changes += 1
                if (found := keys.assignment_of(event.key)) is not None:
                    broker, topic = found
                    if event.value is not None and broker != self._gone and topic in self._topics:
                        self.claimed.setdefault(topic, time.perf_counter() - self.began)
                        self._targets.pop(topic, None)
                elif (topic := keys.topic_of_unassigned(event.key)) is not None and event.value is not None:
                    marker = Marker.from_bytes(event.value)
                    if marker is None or marker.to is None:
                        continue
                    self.redirected += self._targets.get(topic, marker.to) != marker.to
                    self._targets[topic] = marker.to

    @property
    def is_complete(self) -> bool:
        return len(self.claimed) == len(self._topics)


@contextlib.asynccontextmanager
async def watched(
    cluster: ServerCluster, topics: Sequence[TopicName], gone: BrokerId | None = None
) -> AsyncIterator[Watch]:
    """Leaves the block when all topics were claimed."""
    after = await cluster.store.transact([], [])
    assert after is not None
    watch = Watch(topics, gone)
    following = asyncio.create_task(watch.follow(cluster.store, after))
    try:
        watch.began = time.perf_counter()
        yield watch
        async with asyncio.timeout(LATE_SECONDS):
            while not watch.is_complete:
                if following.done():
                    await following
                await asyncio.sleep(0.02)
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


class Results:
    def __init__(self, title: str) -> None:
        self._table = Table(title=title)
        for column in (
            "part",
            "topics",
            "first",
            "half",
            "all",
            "served",
            "redirected",
            "CPU of brokers",
            "of etcd",
            "said",
        ):
            self._table.add_column(column, justify="left" if column in ("part", "said") else "right")

    @contextlib.asynccontextmanager
    async def part(
        self, name: str, cluster: ServerCluster, topics: Sequence[TopicName], gone: Broker | None = None
    ) -> AsyncIterator[Watch]:
        before = [broker.cpu_seconds for broker in cluster.brokers]
        etcd = cluster.etcd.cpu_seconds
        async with watched(cluster, topics, gone.id if gone else None) as watch:
            yield watch
        living = [broker for broker in cluster.brokers if broker.process.poll() is None]
        while True:  # what was claimed is opened next
            owned = [await asyncio.to_thread(lambda broker=broker: broker.topics_owned) for broker in living]
            if sum(owned) >= cluster.topics:
                break
            await asyncio.sleep(0.05)
        served = time.perf_counter() - watch.began
        times = sorted(watch.claimed.values())
        used = [
            f"{broker.cpu_seconds - then:.1f}"
            for broker, then in zip(cluster.brokers, before, strict=True)
            if broker.process.poll() is None
        ]
        again = sum(broker.said("cannot be taken or moved yet") for broker in cluster.brokers)
        left = next((line for line in _lines(gone) if "not handed over" in line), "")
        said = [f"{again} begun in vain" if again else "", left[:80]]
        self._table.add_row(
            name,
            str(len(topics)),
            *(f"{each:.1f} s" for each in (times[0], times[len(times) // 2], times[-1], served)),
            str(watch.redirected),
            ", ".join(used),
            f"{cluster.etcd.cpu_seconds - etcd:.1f}",
            "; ".join(filter(None, said)),
        )
        print(f"{name}: {times[-1]:.1f} s, {watch.redirected} redirected", flush=True)

    def show(self) -> None:
        Console(width=150).print(self._table)


def _lines(broker: Broker | None) -> list[str]:
    return broker.out.read_text(errors="replace").splitlines() if broker else []


async def publish(broker: Broker, topics: Sequence[TopicName]) -> None:
    """One message to each."""
    room = asyncio.Semaphore(AT_ONCE)
    async with pydanube.connect(f"danube://127.0.0.1:{broker.stream}", timeout=120) as client:

        async def one(topic: TopicName) -> None:
            async with room, client.producer(topic, reliable=True) as producer:
                await producer.send(b"one message")

        await asyncio.gather(*map(one, topics))


async def create(broker: Broker, topics: Sequence[TopicName]) -> None:
    room = asyncio.Semaphore(AT_ONCE)
    async with pydanube.connect(f"danube://127.0.0.1:{broker.stream}", timeout=120) as client:

        async def one(topic: TopicName) -> None:
            async with room:
                await client.create_topic(topic)

        await asyncio.gather(*map(one, topics))


async def run(cluster: ServerCluster, options: argparse.Namespace, results: Results) -> None:
    names = [TopicName(f"/default/topic{number:05}") for number in range(options.topics)]
    parts = options.part.split(",")
    first = cluster.start()
    made = names[: options.create] if "create" in parts else []
    new = names[len(made) :]
    if made:
        cluster.topics += len(made)
        async with results.part("create", cluster, made):
            await create(first, made)
    cluster.topics += len(new)
    async with results.part("assign", cluster, new):
        await cluster.write_topics(new)
    if options.messages:
        await publish(first, names)
    holder = first
    for part, number in (("kill", signal.SIGKILL), ("stop", signal.SIGTERM)):
        if part not in parts:
            continue
        while sum(broker.process.poll() is None for broker in cluster.brokers) < 3:
            cluster.start()
        await asyncio.sleep(options.ttl + 2)  # who was there before us is known to live only after a lease
        theirs = [
            found[1]
            for item in await cluster.store.list(keys.assignments(holder.id))
            if (found := keys.assignment_of(item.key)) is not None
        ]
        async with results.part(part, cluster, theirs, holder):
            await asyncio.to_thread(holder.end, number)
        living = [broker for broker in cluster.brokers if broker.process.poll() is None]
        counts = [len(await cluster.store.list(keys.assignments(broker.id))) for broker in living]
        holder = living[counts.index(max(counts))]


@contextlib.contextmanager
def etcd_in(place: Path) -> Iterator[tuple[Child, str]]:
    program = shutil.which(os.environ.get("DANUBE_TEST_ETCD", "etcd"))
    if program is None:
        raise SystemExit(
            "this needs etcd 3.4 or newer: install etcd-server (Debian, Ubuntu: apt-get install etcd-server)"
        )
    client, peer = free_ports(2)
    url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
    command = [
        *(program, "--name", "single", "--data-dir", str(place / "etcd")),
        *("--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", peer_url),
        *("--initial-advertise-peer-urls", peer_url, "--initial-cluster", f"single={peer_url}"),
        *("--logger", "zap", "--log-outputs", "stderr", "--log-level", "warn"),
    ]
    child = Child(command, place / "etcd.log")
    try:
        wait_for_port(client, 60.0)
        yield child, f"127.0.0.1:{client}"
    finally:
        child.end(signal.SIGTERM)


async def one_run(options: argparse.Namespace, results: Results) -> None:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as scratch, etcd_in(Path(scratch)) as (etcd, address):
        cluster = ServerCluster(Path(scratch), etcd, address, options)
        try:
            await run(cluster, options, results)
        finally:
            await cluster.store.close()
            for broker in cluster.brokers:
                broker.end(signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topics", type=int, default=1000)
    parser.add_argument("--create", type=int, default=300, help="how many of them are created one by one")
    parser.add_argument("--messages", type=int, default=1, choices=(0, 1), help="in each topic")
    parser.add_argument("--ttl", type=float, default=5.0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--part", default="create,assign,kill,stop", help="assign always runs")
    options = parser.parse_args()
    SCRATCH.mkdir(exist_ok=True)
    for number in range(options.runs):
        load = os.getloadavg()[0]
        results = Results(f"run {number + 1}, lease {options.ttl:g} s, load average at the start {load:.1f}")
        asyncio.run(one_run(options, results))
        results.show()


if __name__ == "__main__":
    main()
