"""The native protocol beside NATS JetStream and Redis Streams: `make bench`.

Broker, clients and peers are processes of their own on this machine, one after the other, with the same message size
and the same number in flight. Three rounds in turn, medians, all raw numbers at the end. `bounds.json` has what we
want to reach; a bound that is missed is shown as missed and the exit code is 1.
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
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from processes import BrokerProcess, broker, fdatasync_ms, free_ports, wait_for_port

HERE = Path(__file__).parent
SCRATCH = HERE.parent / "build" / "bench"
PEERS = HERE.parent / "build" / "peers"  # a venv of its own: the peers' packages are none of ours
ROUNDS = 3
TOPIC = "/default/bench"


async def lanes(count: int, window: int, send: Callable[[], Awaitable[object]]) -> dict[str, float]:
    """`count` sends, `window` of them in flight."""
    turns = iter(range(count))
    times: list[float] = []

    async def lane() -> None:
        for _ in turns:
            began = time.perf_counter()
            await send()
            times.append((time.perf_counter() - began) * 1000)

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(window)))
    seconds = time.perf_counter() - began
    times.sort()
    return {"rate": count / seconds, "p50": times[count // 2], "p99": times[int(count * 0.99)]}


# --- ours ------------------------------------------------------------------------------------------------


async def ours(what: str, port: int, count: int, topic: str) -> dict[str, float]:
    import pydanube

    async with pydanube.connect(f"danube://127.0.0.1:{port}") as client:
        if what == "send":
            async with client.producer(topic, reliable=True) as producer:
                payload = os.urandom(1024)
                await producer.send(payload)
                return await lanes(count, 256, lambda: producer.send(payload))
        if what == "single":
            async with client.producer(topic, reliable=True) as producer:
                payload = os.urandom(1024)
                await producer.send(payload)
                return await lanes(count, 1, lambda: producer.send(payload))
        if what == "fill":
            return await fill(client, topic, count)
        if what in ("each", "batches"):
            return await consume(client, what, topic, count)
        if what == "paced":
            return await paced(client, topic, count)
        if what == "idle":
            async with contextlib.AsyncExitStack() as stack:
                for n in range(count):
                    consumer = client.consumer(topic, subscription=f"s{n % 50}", type="shared", name=f"c{n}")
                    await stack.enter_async_context(consumer)
                print("ready", flush=True)
                await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
            return {}
        if what == "fan":
            await asyncio.gather(
                *(drain(client, topic, f"fan-{os.getpid()}-{n}", count) for n in range(int(os.environ["FAN"])))
            )
            return {}
    raise SystemExit(f"unknown: {what}")


async def fill(client: Any, topic: str, count: int) -> dict[str, float]:
    """Batched publish of 100 B messages."""
    payload = os.urandom(100)
    async with client.producer(topic, reliable=True) as producer:
        await producer.send(payload)
        began = time.perf_counter()
        for n in range(count):
            producer.send_nowait(payload)
            if n % 1000 == 999:
                await producer.room()
                await asyncio.sleep(0)
        await producer.flush()
        return {"rate": count / (time.perf_counter() - began)}


async def drain(client: Any, topic: str, subscription: str, count: int) -> None:
    async with client.consumer(topic, subscription=subscription, start="earliest") as consumer:
        got = 0
        async for batch in consumer.batches():
            got += len(batch)
            await batch.ack()
            if got >= count:
                return


async def consume(client: Any, what: str, topic: str, count: int) -> dict[str, float]:
    async with client.consumer(topic, subscription=f"{what}{os.getpid()}", start="earliest") as consumer:
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
        return {"rate": got / (time.perf_counter() - began)}


async def paced(client: Any, topic: str, count: int) -> dict[str, float]:
    """10,000 messages a second, open loop: latency counts from the time a message was meant to be sent."""
    late: list[float] = []
    async with (
        client.producer(topic, reliable=True) as producer,
        client.consumer(topic, subscription="paced") as consumer,
    ):

        async def receive() -> None:
            async for message in consumer:
                late.append((time.perf_counter() - float(message.payload)) * 1000)
                await message.ack()
                if len(late) >= count:
                    return

        receiving = asyncio.create_task(receive())
        begin = time.perf_counter() + 0.1
        for n in range(count):
            meant = begin + n / 10_000
            if n % 10 == 0 and (pause := meant - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            producer.send_nowait(repr(meant).encode())
        await producer.flush()
        await asyncio.wait_for(receiving, 120)
    late = sorted(late[count // 10 :])
    return {"p50": late[len(late) // 2], "p99": late[int(len(late) * 0.99)]}


# --- peers, run with their own interpreter ------------------------------------------------------------------


async def nats(what: str, port: int, count: int) -> dict[str, float]:
    import nats as client_of_nats

    connection = await client_of_nats.connect(f"nats://127.0.0.1:{port}")
    stream = connection.jetstream()
    with contextlib.suppress(Exception):
        await stream.add_stream(name="bench", subjects=["bench"])
    payload = os.urandom(1024 if what in ("send", "single") else 100)
    if what in ("send", "single"):
        result = await lanes(count, 256 if what == "send" else 1, lambda: stream.publish("bench", payload))
    else:
        await lanes(count, 256, lambda: stream.publish("bench", payload))
        subscription = await stream.pull_subscribe("bench", durable=f"d{os.getpid()}")
        got = 0
        began = time.perf_counter()
        while got < count:
            for message in await subscription.fetch(256):
                await message.ack()
                got += 1
        result = {"rate": got / (time.perf_counter() - began)}
    await connection.close()
    return result


async def redis(what: str, port: int, count: int) -> dict[str, float]:
    from redis.asyncio import BlockingConnectionPool, Redis

    client = Redis(
        connection_pool=BlockingConnectionPool(host="127.0.0.1", port=port, max_connections=64, timeout=None)
    )
    payload = os.urandom(1024)
    result = await lanes(count, 256 if what == "send" else 1, lambda: client.xadd("bench", {"payload": payload}))
    await client.aclose()
    return result


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
def running(command: list[str], port: int) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_for_port(port)
            yield
        finally:
            process.terminate()


def child(who: str, what: str, port: int, count: int, topic: str = TOPIC, **environment: str) -> dict[str, float]:
    python = sys.executable if who == "ours" else str(PEERS / "bin" / "python")
    command = [python, __file__, "--run", who, what, str(port), str(count), topic]
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

    def median(self, name: str) -> float:
        return statistics.median(self.raw[name])


def measure(figures: Figures, server: BrokerProcess) -> None:
    for turn in range(ROUNDS):
        print(f"round {turn + 1}", flush=True)
        with nats_server("always") as port:
            figures.add("nats always, send", child("nats", "send", port, 4_000)["rate"])
            figures.add("nats always, single p50 ms", child("nats", "single", port, 500)["p50"])
        with nats_server("default") as port:
            figures.add("nats default, send", child("nats", "send", port, 20_000)["rate"])
            figures.add("nats default, consume", child("nats", "consume", port, 20_000)["rate"])
        if shutil.which("redis-server"):
            with redis_server() as port:
                figures.add("redis always, send", child("redis", "send", port, 4_000)["rate"])
        topic = f"{TOPIC}-{turn}"
        figures.add("ours, send", child("ours", "send", server.stream, 40_000, f"{topic}-send")["rate"])
        figures.add("ours, single p50 ms", child("ours", "single", server.stream, 500, f"{topic}-one")["p50"])
        figures.add("ours, batched 100 B", child("ours", "fill", server.stream, 400_000, topic)["rate"])
        figures.add("ours, consume batches", child("ours", "batches", server.stream, 400_000, topic)["rate"])
        figures.add("ours, consume each", child("ours", "each", server.stream, 200_000, topic)["rate"])
        for subscriptions in (1, 10):
            before = server.cpu_seconds
            child("ours", "fan", server.stream, 400_000, topic, FAN=str(subscriptions))
            figures.add(f"ours, broker CPU s, {subscriptions} subscriptions", server.cpu_seconds - before)
        figures.add("disk, fdatasync p99 ms", fdatasync_ms(SCRATCH)[1])
        figures.add("ours, 10,000/s p99 ms", child("ours", "paced", server.stream, 50_000, f"{topic}-paced")["p99"])


def idle(figures: Figures, server: BrokerProcess) -> None:
    command = [sys.executable, __file__, "--run", "ours", "idle", str(server.stream), "1000", f"{TOPIC}-0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        process.stdout.readline()
        time.sleep(2)
        before, began = server.cpu_seconds, time.monotonic()
        time.sleep(10)
        busy = (server.cpu_seconds - before) / (time.monotonic() - began)
        figures.add("ours, 1,000 idle consumers, % of a core", 100 * busy)
        figures.add("ours, broker memory MB", server.rss_mb)
        process.stdin.write("\n")
        process.stdin.close()


def judge(figures: Figures) -> bool:
    """Prints every bound beside what was reached."""
    m = figures.median
    reached = {
        "publish 1 KiB, window 256: times NATS, sync always": m("ours, send") / m("nats always, send"),
        "publish 1 KiB, window 256: times NATS, default sync": m("ours, send") / m("nats default, send"),
        "publish 100 B, batched: messages/s": m("ours, batched 100 B"),
        "one at a time: p50, NATS sync always over ours": m("nats always, single p50 ms") / m("ours, single p50 ms"),
        "publish to ack at 10,000/s: p99 ms over the disk's fdatasync (at most)": m("ours, 10,000/s p99 ms")
        - m("disk, fdatasync p99 ms"),
        "consume, batches(): times nats-py fetch and ack": m("ours, consume batches") / m("nats default, consume"),
        "consume, async for: times nats-py fetch and ack": m("ours, consume each") / m("nats default, consume"),
        "fan-out: broker CPU for 10 subscriptions over 1 (at most)": m("ours, broker CPU s, 10 subscriptions")
        / m("ours, broker CPU s, 1 subscriptions"),
        "1,000 idle consumers: % of a core (at most)": m("ours, 1,000 idle consumers, % of a core"),
    }
    bounds: dict[str, float] = json.loads((HERE / "bounds.json").read_text())["native"]
    print("\nbound                                                                         wanted      reached")
    all_held = True
    for name, wanted in bounds.items():
        held = reached[name] <= wanted if "at most" in name else reached[name] >= wanted
        all_held &= held
        print(f"{name:<74} {wanted:>10,.1f} {reached[name]:>12,.2f}  {'held' if held else 'MISSED'}")
    print("\nraw numbers:")
    for name, values in figures.raw.items():
        print(f"  {name}: " + ", ".join(f"{value:,.2f}" for value in values))
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, {system}")
    return all_held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        who, what, port, count, topic = options.run
        if who == "ours":
            print(json.dumps(asyncio.run(ours(what, int(port), int(count), topic))))
        else:
            peer = nats if who == "nats" else redis
            print(json.dumps(asyncio.run(peer(what, int(port), int(count)))))
        return
    SCRATCH.mkdir(parents=True, exist_ok=True)
    figures = Figures()
    with broker(SCRATCH) as server:
        measure(figures, server)
        idle(figures, server)
    shutil.rmtree(SCRATCH, ignore_errors=True)
    raise SystemExit(0 if judge(figures) else 1)


if __name__ == "__main__":
    main()
