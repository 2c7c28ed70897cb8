"""The hybrid lag monitor on real files: `make bench-lag`.

One broker inside this process, on a real directory, no network. Measured are the time from a publish to its delivery
by notification beside the time of an fdatasync in the same minute, the time a message waits when every notification
is lost, and what idle subscriptions cost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pydanube.broker.outbox import DeliveredMessage, Outbox
from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.config import Config, DispatchConfig
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.names import ConsumerId, SubscriptionName, TopicName
from pydanube.core.policies import Delivery, SubscriptionKind
from pydanube.formats.batch import Envelope

RATE = 200
PAYLOAD = bytes(1024)
SUB = SubscriptionName("sub")
HEAD = ["what", "measured", "target", ""]


class Rows:
    def __init__(self) -> None:
        self.cells: list[tuple[str, str, str, str]] = []

    def add(self, what: str, measured: str, target: str = "", good: bool | None = None) -> None:
        verdict = "" if good is None else "yes" if good else "NO"
        self.cells.append((what, measured, target, verdict))
        print("  " + "  ".join(cell for cell in self.cells[-1] if cell), file=sys.stderr, flush=True)


@contextlib.asynccontextmanager
async def running(directory: Path, heartbeat: str = "normal"):  # type: ignore[no-untyped-def]
    dispatch = DispatchConfig(heartbeat=Heartbeat.parse(heartbeat), max_unacked_messages=100)
    broker = await Broker.start(Config(data_dir=directory, dispatch=dispatch))
    try:
        yield broker
    finally:
        await broker.stop()


async def make_topic(broker: Broker, name: str) -> Topic:
    topic = await broker.topics.create(TopicName(name), delivery=Delivery.RELIABLE)
    assert isinstance(topic, Topic)
    return topic


class Reader:
    """Takes everything, acknowledges it, and remembers when it came."""

    def __init__(self, subscription: Subscription, consumer: ConsumerId) -> None:
        self.at: dict[int, float] = {}
        self._news = asyncio.Event()
        self._subscription = subscription
        self._outbox: Outbox[DeliveredMessage] = subscription.attach(consumer)
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        while messages := await self._outbox.get():
            came = time.perf_counter()
            for message in messages:
                self.at[message.offset] = came
                self._subscription.ack(message.offset)
            self._news.set()

    async def wait_for(self, offset: int) -> None:
        while offset not in self.at:
            self._news.clear()
            await self._news.wait()


async def reading(topic: Topic) -> tuple[Subscription, Reader]:
    consumer = await topic.subscribe(SUB, SubscriptionKind.EXCLUSIVE, "reader")
    return topic.require(SUB), Reader(topic.require(SUB), consumer)


# --- from publish to delivery ---------------------------------------------------------------------------------


def fdatasyncs(directory: Path, stop_at: float) -> Iterator[float]:
    """Times of write + fdatasync of one message, into space that is there already, as the log has it."""
    file = os.open(directory / "raw", os.O_RDWR | os.O_CREAT, 0o644)
    os.write(file, bytes(4 << 20))
    os.fsync(file)
    position = 0
    while time.perf_counter() < stop_at:
        began = time.perf_counter()
        os.pwrite(file, PAYLOAD, position % (4 << 20))
        os.fdatasync(file)
        yield time.perf_counter() - began
        position += len(PAYLOAD)
        time.sleep(max(0.0, 1 / RATE - (time.perf_counter() - began)))
    os.close(file)


def measure_fdatasync(directory: Path, seconds: float) -> list[float]:
    return sorted(fdatasyncs(directory, time.perf_counter() + seconds))


async def notified(directory: Path, seconds: float) -> tuple[list[float], list[float], list[float], int, int]:
    """Publishes at a steady rate; times to the delivery, to the answer, between the two, and the two counters."""
    async with running(directory) as broker:
        topic = await make_topic(broker, "/default/bench")
        subscription, reader = await reading(topic)
        producer = await topic.add_producer("bench")
        sent: dict[int, float] = {}
        answered: dict[int, float] = {}

        async def send() -> None:
            began = time.perf_counter()
            offset = await topic.publish(producer, Envelope(PAYLOAD, time.time_ns() // 1000, None, "bench"))
            sent[offset] = began
            answered[offset] = time.perf_counter()

        began = time.perf_counter()
        sends = []
        for number in range(int(seconds * RATE)):
            sends.append(asyncio.create_task(send()))
            await asyncio.sleep(max(0.0, began + (number + 1) / RATE - time.perf_counter()))
        await asyncio.gather(*sends)
        await reader.wait_for(topic.head - 1)
        late = sorted(reader.at[offset] - at for offset, at in sent.items())
        metrics = subscription.metrics
        waits = sorted(at - sent[offset] for offset, at in answered.items())
        behind = sorted(reader.at[offset] - at for offset, at in answered.items())
        return late, waits, behind, metrics.notifier_polls.value, metrics.heartbeat_polls.value


def p(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))] * 1000


def bench_notifier(scratch: Path, rows: Rows, scale: float) -> None:
    """The probe of the disk is a process of its own beside the broker's: both have the same machine, busy or not."""
    seconds = max(2.0, 15.0 * scale)
    over = []
    for turn in range(3):
        with tempfile.TemporaryDirectory(dir=scratch) as place, tempfile.TemporaryDirectory(dir=scratch) as raw_place:
            command = [sys.executable, __file__, "--probe", raw_place, str(seconds)]
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as probe:
                late, answered, behind, notifier, heartbeat = asyncio.run(notified(Path(place), seconds))
                raw = json.loads(probe.communicate()[0])
        over.append(p(late, 0.99) - p(raw, 0.99))
        rows.add(
            f"publish→deliver by notification, {RATE}/s, round {turn + 1}",
            f"p50 {p(late, 0.5):.2f}, p99 {p(late, 0.99):.2f} ms; answered p99 {p(answered, 0.99):.2f} ms; delivery "
            f"after the answer p99 {p(behind, 0.99):.2f} ms; fdatasync p50 {p(raw, 0.5):.2f}, "
            f"p99 {p(raw, 0.99):.2f} ms; polls {notifier} / {heartbeat}",
        )
    median = statistics.median(over)
    rows.add("p99 over the p99 of fdatasync, median", f"{median:.2f} ms", "< 5 ms", median < 5)


# --- by heartbeat alone -----------------------------------------------------------------------------------------


async def recovered(directory: Path, interval_ms: int, count: int) -> list[float]:
    """From the acknowledgement of a publish to its delivery, with every notification lost."""
    async with running(directory, f"{interval_ms}ms") as broker:
        topic = await make_topic(broker, "/default/bench")
        subscription, reader = await reading(topic)
        assert subscription._notifier is not None
        subscription._notifier.cancel()
        producer = await topic.add_producer("bench")
        waits = []
        for number in range(count):
            offset = await topic.publish(producer, Envelope(PAYLOAD, time.time_ns() // 1000, None, "bench"))
            committed = time.perf_counter()
            await reader.wait_for(offset)
            waits.append(reader.at[offset] - committed)
            await asyncio.sleep(interval_ms / 1000 * (number * 0.37 % 1))
        assert subscription.metrics.notifier_polls.value == 0
        return sorted(waits)


def bench_heartbeat(scratch: Path, rows: Rows, scale: float) -> None:
    for interval_ms in (50, 100, 500, 1000):
        count = max(5, int(scale * min(60, 20_000 / interval_ms)))
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            waits = asyncio.run(recovered(Path(place), interval_ms, count))
        slack_ms = 10  # what the loop and the read behind the beat take
        rows.add(
            f"notifier disabled, heartbeat {interval_ms} ms, {count} messages",
            f"median {p(waits, 0.5):.0f}, worst {waits[-1] * 1000:.1f} ms",
            f"≤ {interval_ms} ms + {slack_ms}",
            waits[-1] * 1000 <= interval_ms + slack_ms,
        )


# --- idle -------------------------------------------------------------------------------------------------------


def rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1000
    return 0.0


async def idle(directory: Path, topics: int, each: int, seconds: float) -> None:
    """Child process: prints what so many idle subscriptions cost."""
    async with running(directory) as broker:
        empty_mb = rss_mb()
        began = time.perf_counter()
        for number in range(topics):
            topic = await make_topic(broker, f"/default/t{number}")
            for sub in range(each):
                name = SubscriptionName(f"s{sub}")
                consumer = await topic.subscribe(name, SubscriptionKind.EXCLUSIVE, "c")
                Reader(topic.require(name), consumer)
        made = time.perf_counter() - began
        await asyncio.sleep(12)  # timers of the beginning have run out
        cpu = time.process_time()
        began = time.perf_counter()
        await asyncio.sleep(seconds)
        used = (time.process_time() - cpu) / (time.perf_counter() - began)
        print(json.dumps({"cpu": used * 100, "rss_mb": rss_mb(), "empty_mb": empty_mb, "made_s": made}), flush=True)
    os._exit(0)


def bench_idle(scratch: Path, rows: Rows, scale: float) -> None:
    plan = [(0, 0, "no topic", None), (1, 100, "100 subscriptions of 1 topic", 1.0)]
    plan += [(1000, 1, "1,000 topics with a subscription each", 2.0)]
    for topics, each, name, target in plan:
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            seconds = str(max(3.0, 15.0 * scale))
            command = [sys.executable, __file__, "--idle", place, str(topics), str(each), seconds]
            got = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        rows.add(
            f"idle, {name}",
            f"{got['cpu']:.2f} % of a core, {got['rss_mb']:.0f} MB resident ({got['empty_mb']:.0f} MB empty), "
            f"made in {got['made_s']:.1f} s",
            f"< {target:.0f} % of a core" if target else "",
            got["cpu"] < target if target else None,
        )


async def has_lag_ns(directory: Path) -> tuple[float, float]:
    async with running(directory) as broker:
        topic = await make_topic(broker, "/default/bench")
        await topic.subscribe(SUB, SubscriptionKind.EXCLUSIVE, "c")
        subscription = topic.require(SUB)
        producer = await topic.add_producer("bench")

        def one() -> float:
            best = []
            for _ in range(5):
                began = time.perf_counter_ns()
                for _ in range(100_000):
                    subscription.has_lag()
                best.append((time.perf_counter_ns() - began) / 100_000)
            return min(best)

        caught_up = one()
        for _ in range(100):
            await topic.publish(producer, Envelope(PAYLOAD, 0, None, "bench"))
        return caught_up, one()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the work, for a quick look")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure (default: build/)")
    parser.add_argument("--idle", nargs=4, metavar=("DIR", "TOPICS", "EACH", "SECONDS"), help=argparse.SUPPRESS)
    parser.add_argument("--probe", nargs=2, metavar=("DIR", "SECONDS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.probe:
        print(json.dumps(measure_fdatasync(Path(options.probe[0]), float(options.probe[1]))))
        return
    if options.idle:
        place, topics, each, seconds = options.idle
        asyncio.run(idle(Path(place), int(topics), int(each), float(seconds)))
    scratch = options.directory or Path(__file__).parent.parent / "build" / "bench-lag"
    scratch.mkdir(parents=True, exist_ok=True)
    rows = Rows()
    bench_notifier(scratch, rows, options.scale)
    bench_heartbeat(scratch, rows, options.scale)
    bench_idle(scratch, rows, options.scale)
    with tempfile.TemporaryDirectory(dir=scratch) as place:
        caught_up, behind = asyncio.run(has_lag_ns(Path(place)))
    rows.add("has_lag()", f"{caught_up:.0f} ns caught up, {behind:.0f} ns behind")
    shutil.rmtree(scratch, ignore_errors=True)
    table = Table(title="The hybrid lag monitor", box=None, header_style="bold")
    for name in HEAD:
        table.add_column(name or "kept", overflow="fold")
    for cells in rows.cells:
        table.add_row(*cells)
    Console(width=170).print(table)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
