"""The native protocol beside NATS JetStream and Redis Streams: `make bench`.

Broker, clients and peers are processes of their own on this machine, one after the other, with the same message size
and the same number in flight. Three rounds in turn, medians, all raw numbers at the end. `bounds.json` has what we
want to reach; a bound that is missed is shown as missed and the exit code is 1.

    python bench/native.py --only single,fan --scale 0.01     some scenarios, with few messages, to see that they run
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydanube.testing.ports import free_ports

sys.path.insert(0, str(Path(__file__).parent))

from native_peers import lanes
from processes import BrokerProcess, broker, paced_fdatasync_ms, steal_watched, wait_for_port

HERE = Path(__file__).parent
SCRATCH = HERE.parent / "build" / "bench"
PEERS = HERE.parent / "build" / "peers"  # a venv of its own: the peers' packages are none of ours
ROUNDS = 3
TOPIC = "/default/bench"
SCENARIOS = ("send", "single", "fill", "consume", "fan", "paced", "minute", "idle")
# `make bench` checks a publish of 100 B against 300,000/s or this share of raw frames, whichever is lower.
EITHER = {
    "publish 100 B, batched: messages/s",
    "publish 100 B, batched: share of raw frames, same socket and fdatasync",
}


# --- ours ------------------------------------------------------------------------------------------------


async def ours(what: str, port: int, count: int, topic: str) -> dict[str, float]:
    import pydanube

    url = f"danube://127.0.0.1:{port}"
    if what == "raw":
        import native_raw

        return await native_raw.publish(port, count)
    if what == "idle":
        return await idle_consumers(url, count, topic)
    async with pydanube.connect(url) as client:
        if what in ("send", "single"):
            async with client.producer(topic, reliable=True) as producer:
                payload = os.urandom(1024)
                await producer.send(payload)
                return await lanes(count, 256 if what == "send" else 1, lambda: producer.send(payload))
        if what == "fill":
            return await fill(client, topic, count)
        if what in ("each", "batches"):
            return await consume(client, what, topic, count)
        if what == "paced":
            return await paced(client, topic, count)
        if what == "fan":
            return await fan(client, topic, count, int(os.environ["FAN"]))
        if what == "drain":
            names = [f"drain-{os.getpid()}-{n}" for n in range(int(os.environ["FAN"]))]
            await asyncio.gather(*(drain(client, topic, name, count) for name in names))
            return {}
    raise SystemExit(f"unknown: {what}")


async def fill(client: Any, topic: str, count: int) -> dict[str, float]:
    """Batched publish of 100 B messages."""
    payload = os.urandom(100)
    async with client.producer(topic, reliable=True) as producer:
        await producer.send(payload)
        began = time.perf_counter()
        for n in range(count):
            if producer.buffered_bytes >= producer.buffer_bytes:
                await producer.room()
            producer.send_nowait(payload)
            if n % 1000 == 999:
                await asyncio.sleep(0)
        await producer.flush()
        return {"rate": count / (time.perf_counter() - began)}


async def fan(client: Any, topic: str, count: int, subscriptions: int) -> dict[str, float]:
    """Everybody gets everything, while it is published."""
    await client.create_topic(topic, exist_ok=True)
    ready = asyncio.Barrier(subscriptions + 1)
    names = [f"fan-{os.getpid()}-{n}" for n in range(subscriptions)]
    draining = [asyncio.ensure_future(drain(client, topic, name, count, "latest", ready)) for name in names]
    await ready.wait()
    result = await fill(client, topic, count)
    await asyncio.gather(*draining)
    return result


async def drain(
    client: Any,
    topic: str,
    subscription: str,
    count: int,
    start: str = "earliest",
    ready: asyncio.Barrier | None = None,
) -> None:
    async with client.consumer(topic, subscription=subscription, type="exclusive", start=start) as consumer:
        if ready is not None:
            await ready.wait()
        got = 0
        async for batch in consumer.batches():
            got += len(batch)
            await batch.ack()
            if got >= count:
                break
        await consumer.flush()


async def consume(client: Any, what: str, topic: str, count: int) -> dict[str, float]:
    async with client.consumer(
        topic, subscription=f"{what}{os.getpid()}", type="exclusive", start="earliest"
    ) as consumer:
        got = 0
        began = time.perf_counter()
        if what == "batches":
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
        return {"rate": got / (time.perf_counter() - began)}


async def paced(client: Any, topic: str, count: int) -> dict[str, float]:
    """10,000 messages a second, open loop: latency counts from the time a message was meant to be sent, until it is
    acknowledged. Counts what is missing or comes twice, too.
    """
    # As docs/client.md says for programs that must not pause: the collector would stop this one for 10 ms and more.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    late: list[float] = []
    seen = bytearray(count)
    async with (
        client.producer(topic, reliable=True) as producer,
        client.consumer(topic, subscription="paced", type="exclusive") as consumer,
    ):

        async def receive() -> None:
            async for message in consumer:
                number, meant = message.payload.split()
                await message.ack()
                late.append((time.perf_counter() - float(meant)) * 1000)
                seen[int(number)] = min(255, seen[int(number)] + 1)
                if len(late) >= count:
                    return

        receiving = asyncio.create_task(receive())
        begin = time.perf_counter() + 0.1
        for n in range(count):
            meant = begin + n / 10_000
            if n % 10 == 0 and (pause := meant - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            if producer.buffered_bytes >= producer.buffer_bytes:
                await producer.room()
            producer.send_nowait(b"%d %f" % (n, meant))
        await producer.flush()
        seconds = time.perf_counter() - begin
        await asyncio.wait_for(receiving, 120)
        await consumer.flush()
        lag = (await client.lag(topic, "paced")).messages
    late = sorted(late[count // 10 :])
    wrong = sum(times != 1 for times in seen) + lag
    return {
        "p50": late[len(late) // 2],
        "p99": late[int(len(late) * 0.99)],
        "rate": count / seconds,
        "wrong": float(wrong),
    }


async def idle_consumers(url: str, count: int, topic: str) -> dict[str, float]:
    """Each has a connection of its own, as applications have."""
    import pydanube

    async with contextlib.AsyncExitStack() as stack:
        for n in range(count):
            client = await stack.enter_async_context(pydanube.connect(url))
            consumer = client.consumer(topic, subscription=f"s{n % 50}", type="shared", name=f"c{n}")
            await stack.enter_async_context(consumer)
        print("ready", flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return {}


# --- the servers ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def nats_server(sync: str) -> Iterator[int]:
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as place:
        config = Path(place) / "nats.conf"
        always = "sync_interval: always" if sync == "always" else ""
        config.write_text(f'listen: "127.0.0.1:{port}"\njetstream {{ store_dir: "{place}"\n{always} }}\n')
        with running([str(PEERS / "bin" / "nats-server"), "-c", str(config)], port):
            yield port


@contextlib.contextmanager
def redis_server() -> Iterator[int]:
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as place:
        command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", place, "--save", ""]
        with running([*command, "--appendonly", "yes", "--appendfsync", "always"], port):
            yield port


@contextlib.contextmanager
def raw_server() -> Iterator[int]:
    with tempfile.TemporaryDirectory(dir=SCRATCH) as place:
        command = [sys.executable, __file__, "--raw-server", place]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdin is not None
            yield int(process.stdout.readline())
            process.stdin.close()


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_port(port)
            yield
        finally:
            process.terminate()


def child(who: str, what: str, port: int, count: int, topic: str = TOPIC, **environment: str) -> dict[str, float]:
    if who == "ours":
        command = [sys.executable, __file__, "--run", what, str(port), str(count), topic]
    else:
        command = [str(PEERS / "bin" / "python"), str(HERE / "native_peers.py"), who, what, str(port), str(count)]
    environment = {**os.environ, **environment}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- the run ------------------------------------------------------------------------------------------------


class Figures:
    def __init__(self) -> None:
        self.raw: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.raw.setdefault(name, []).append(value)
        print(f"  {name}: {value:,.2f}", flush=True)

    def median(self, name: str) -> float | None:
        return statistics.median(self.raw[name]) if name in self.raw else None

    def ratio(self, name: str, other: str) -> float | None:
        one, two = self.median(name), self.median(other)
        return None if one is None or two is None else one / two


class Run:
    """The scenarios that were asked for, each with `scale` times its messages."""

    def __init__(self, figures: Figures, server: BrokerProcess, scenarios: frozenset[str], scale: float) -> None:
        self._figures = figures
        self._server = server
        self._scenarios = scenarios
        self._scale = scale

    def _count(self, count: int) -> int:
        return max(1000, int(count * self._scale) // 1000 * 1000)

    def round(self, turn: int) -> None:
        figures, stream, wanted = self._figures, self._server.stream, self._scenarios
        topic = f"{TOPIC}-{turn}"
        if wanted & {"send", "single"}:
            self._peers(wanted)
        if "send" in wanted:
            figures.add("ours, send", child("ours", "send", stream, self._count(40_000), f"{topic}-send")["rate"])
        if "single" in wanted:
            one = child("ours", "single", stream, self._count(1000), f"{topic}-one")
            figures.add("ours, single p50 ms", one["p50"])
        if wanted & {"fill", "consume", "fan"}:
            self._backlog(topic, wanted)

    def paced(self, turn: int) -> None:
        figures = self._figures
        with steal_watched(lambda percent: figures.add("taken by the host, % of a core", percent)):
            alone = paced_fdatasync_ms(SCRATCH, 2.5)
            result = child("ours", "paced", self._server.stream, self._count(50_000), f"{TOPIC}-{turn}-paced")
            alone = sorted(alone + paced_fdatasync_ms(SCRATCH, 2.5))
        figures.add("disk alone, 10,000/s fdatasync p50 ms", alone[len(alone) // 2])
        figures.add("disk alone, 10,000/s fdatasync p99 ms", alone[int(len(alone) * 0.99)])
        figures.add("ours, 10,000/s p50 ms", result["p50"])
        figures.add("ours, 10,000/s p99 ms", result["p99"])

    def _peers(self, wanted: frozenset[str]) -> None:
        figures = self._figures
        with nats_server("always") as port:
            if "send" in wanted:
                figures.add("nats always, send", child("nats", "send", port, self._count(4_000))["rate"])
            if "single" in wanted:
                one = child("nats", "single", port, self._count(1000))
                figures.add("nats always, single p50 ms", one["p50"])
        if "send" in wanted:
            with nats_server("default") as port:
                figures.add("nats default, send", child("nats", "send", port, self._count(20_000))["rate"])
            if shutil.which("redis-server"):
                with redis_server() as port:
                    figures.add("redis always, send", child("redis", "send", port, self._count(4_000))["rate"])

    def _backlog(self, topic: str, wanted: frozenset[str]) -> None:
        """A topic that is filled, and read in every way."""
        figures, server, count = self._figures, self._server, self._count(400_000)
        with raw_server() as port:
            figures.add("raw frames, batched 100 B", child("ours", "raw", port, count)["rate"])
        figures.add("ours, batched 100 B", child("ours", "fill", server.stream, count, topic)["rate"])
        if "consume" in wanted:
            with nats_server("default") as port:
                figures.add("nats default, consume", child("nats", "consume", port, self._count(20_000))["rate"])
            figures.add("ours, consume batches", child("ours", "batches", server.stream, count, topic)["rate"])
            figures.add("ours, consume each", child("ours", "each", server.stream, count // 2, topic)["rate"])
        if "fan" in wanted:
            for what, name in (("fan", "publish to"), ("drain", "a backlog to")):
                for subscriptions in (1, 10):
                    before = server.cpu_seconds
                    place = topic if what == "drain" else f"{topic}-fan-{subscriptions}"
                    child("ours", what, server.stream, count, place, FAN=str(subscriptions))
                    figures.add(
                        f"ours, broker CPU s, {name} {subscriptions} subscriptions", server.cpu_seconds - before
                    )

    def once(self) -> None:
        figures, server = self._figures, self._server
        if "minute" in self._scenarios:
            before, began = server.cpu_seconds, time.monotonic()
            result = child("ours", "paced", server.stream, self._count(600_000), f"{TOPIC}-minute")
            busy = (server.cpu_seconds - before) / (time.monotonic() - began)
            figures.add("ours, a minute at 10,000/s, messages/s", result["rate"])
            figures.add("ours, a minute at 10,000/s, p99 ms", result["p99"])
            figures.add("ours, a minute at 10,000/s, missing, repeated or left over", result["wrong"])
            figures.add("ours, a minute at 10,000/s, broker % of a core", 100 * busy)
        if "idle" in self._scenarios:
            self._idle()

    def _idle(self) -> None:
        figures, server, count = self._figures, self._server, self._count(1000)
        child("ours", "single", server.stream, 1, f"{TOPIC}-idle")  # makes the topic
        empty_mb = server.rss_mb
        command = [sys.executable, __file__, "--run", "idle", str(server.stream), str(count), f"{TOPIC}-idle"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdin is not None
            process.stdout.readline()
            time.sleep(2)
            before, began = server.cpu_seconds, time.monotonic()
            time.sleep(20)
            busy = (server.cpu_seconds - before) / (time.monotonic() - began)
            figures.add("ours, 1,000 idle consumers, % of a core", 100 * busy)
            figures.add("ours, 1,000 idle consumers, broker memory MB", server.rss_mb)
            figures.add("ours, 1,000 idle consumers, of which for them MB", server.rss_mb - empty_mb)
            process.stdin.write("\n")
            process.stdin.close()
            process.stdout.read()


def reached_by(figures: Figures) -> Mapping[str, float | None]:
    """What each bound of `bounds.json` is about; None: it was not measured."""
    m, over = figures.median, figures.ratio
    paced, sync = m("ours, 10,000/s p99 ms"), m("disk alone, 10,000/s fdatasync p99 ms")
    rate, wrong = (
        m("ours, a minute at 10,000/s, messages/s"),
        m("ours, a minute at 10,000/s, missing, repeated or left over"),
    )
    return {
        "publish 1 KiB, window 256: times NATS, sync always": over("ours, send", "nats always, send"),
        "publish 1 KiB, window 256: times NATS, default sync": over("ours, send", "nats default, send"),
        "publish 100 B, batched: messages/s": m("ours, batched 100 B"),
        "publish 100 B, batched: share of raw frames, same socket and fdatasync": over(
            "ours, batched 100 B", "raw frames, batched 100 B"
        ),
        "one at a time: p50, NATS sync always over ours": over("nats always, single p50 ms", "ours, single p50 ms"),
        "publish to ack at 10,000/s: p99 ms over the disk's fdatasync (at most)": (
            None if paced is None or sync is None else paced - sync
        ),
        "consume, batches(): times nats-py fetch and ack": over("ours, consume batches", "nats default, consume"),
        "consume, async for: times nats-py fetch and ack": over("ours, consume each", "nats default, consume"),
        "fan-out: broker CPU for 10 subscriptions over 1 (at most)": over(
            "ours, broker CPU s, publish to 10 subscriptions", "ours, broker CPU s, publish to 1 subscriptions"
        ),
        "a minute at 10,000/s: messages/s": rate,
        "a minute at 10,000/s: missing, repeated or left over (at most)": wrong,
        "1,000 idle consumers: % of a core (at most)": m("ours, 1,000 idle consumers, % of a core"),
    }


def judge(figures: Figures) -> bool:
    """Prints every bound beside what was reached, and all raw numbers."""
    reached = reached_by(figures)
    bounds: dict[str, float] = json.loads((HERE / "bounds.json").read_text())
    held = {
        name: value <= wanted if "at most" in name else value >= wanted
        for name, wanted in bounds.items()
        if (value := reached[name]) is not None
    }
    print(f"\n{'bound':<76} {'wanted':>12} {'reached':>12}")
    for name, wanted in bounds.items():
        value = reached[name]
        verdict = "not measured" if value is None else "held" if held[name] else "MISSED"
        if name in EITHER and verdict == "MISSED" and any(held.get(other) for other in EITHER):
            verdict = "missed, but the other of the two is held"
        print(f"{name:<76} {wanted:>12,.1f} {value or 0:>12,.2f}  {verdict}")
    print("\nraw numbers:")
    for name, values in figures.raw.items():
        print(f"  {name}: " + ", ".join(f"{value:,.2f}" for value in values))
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, {system}")
    either = [verdict for name, verdict in held.items() if name in EITHER]
    return all(verdict for name, verdict in held.items() if name not in EITHER) and (not either or any(either))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCENARIOS), help=f"some of {','.join(SCENARIOS)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--scale", type=float, default=1.0, help="of the number of messages")
    parser.add_argument("--run", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--raw-server", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        what, port, count, topic = options.run
        print(json.dumps(asyncio.run(ours(what, int(port), int(count), topic))))
        return
    if options.raw_server:
        import native_raw
        import uvloop

        uvloop.run(native_raw.serve(Path(options.raw_server)))
        return
    scenarios = frozenset(options.only.split(","))
    if scenarios - set(SCENARIOS):
        raise SystemExit(f"unknown: {', '.join(scenarios - set(SCENARIOS))}")
    # A thousand connections, on both sides; children have the same limit.
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    SCRATCH.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    if "paced" in scenarios:
        # Before anything else, and with a broker of its own: the other has gigabytes to store, rounds long.
        with broker(SCRATCH) as server:
            for turn in range(options.rounds):
                Run(figures, server, scenarios, options.scale).paced(turn)
    with broker(SCRATCH) as server:
        run = Run(figures, server, scenarios, options.scale)
        for turn in range(options.rounds if scenarios - {"minute", "idle", "paced"} else 0):
            print(f"round {turn + 1}", flush=True)
            run.round(turn)
        run.once()
    shutil.rmtree(SCRATCH, ignore_errors=True)
    raise SystemExit(0 if judge(figures) else 1)


if __name__ == "__main__":
    main()
