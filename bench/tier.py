"""The cloud tier on a real S3-compatible server: `make bench-tier`.

    keep up     100,000 messages/s of 100 B for five minutes: how far uploads lag; then DuckDB counts the objects
    p99         publishes with and without uploads, five runs of each in turn
    catch up    history read from the server, beside a plain GET of the same objects in the same process
    memory      the same with 1 MiB messages in objects of 256 MB

Broker, producer, reader and server are processes of their own on this machine. Every figure is a ratio to a limit or
to something measured in the same run. `tier_bounds.json` has what we want to reach; a bound that is missed is shown as
missed and the exit code is 1. `--scale 0.05` is a quick look: less of everything, and its figures prove nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path[:0] = [str(HERE), str(ROOT)]

import yaml  # noqa: E402
from processes import BrokerProcess, broker, fdatasync_ms, steal_watched  # noqa: E402

SCRATCH = ROOT / "build" / "bench-tier"
TOPIC = "/default/bench"
RATE = 100_000
SMALL = 100
KIB, MIB = 1 << 10, 1 << 20
# The server stands for one on another machine: with a disk of its own, and cores that broker and clients do not need.
OTHER_MACHINE = Path("/dev/shm")
P99_RUNS = 5
READS = 3


# --- children: a producer, a reader, a consumer -----------------------------------------------------------


async def publish(port: int, rate: float, seconds: float, size: int) -> dict[str, float]:
    """Open loop. A message in every hundredth of a second is watched, from when it was meant to be sent to its ack."""
    import pydanube

    # As docs/client.md says for programs that must not pause.
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    # Nothing repeats within what a compressor remembers.
    pool = os.urandom(max(16 * MIB, 64 * size))
    payloads = [pool[at : at + size] for at in range(0, len(pool) - size + 1, size)]
    fresh = itertools.cycle(payloads)
    late: list[float] = []
    watched: list[asyncio.Task[None]] = []

    async def watch(producer: Any, meant: float) -> None:
        await producer.send(next(fresh))
        late.append((time.perf_counter() - meant) * 1000)

    async with (
        pydanube.connect(f"danube://127.0.0.1:{port}", timeout=120) as client,
        client.producer(TOPIC, reliable=True) as producer,
    ):
        await producer.send(next(fresh))
        each = max(1, int(rate / 100))
        turns = int(rate * seconds / each)
        begin = time.perf_counter() + 0.1
        for turn in range(turns):
            meant = begin + turn * each / rate
            if (pause := meant - time.perf_counter()) > 0:
                await asyncio.sleep(pause)
            watched.append(asyncio.create_task(watch(producer, meant)))
            for _ in range(each - 1):
                if producer.buffered_bytes + size > producer.buffer_bytes:
                    await producer.room()
                producer.send_nowait(next(fresh))
            await asyncio.sleep(0)
        await asyncio.gather(*watched)
        await producer.flush()
        took = time.perf_counter() - begin
    late = sorted(late[len(late) // 10 :])
    sent = turns * each
    return {
        "acknowledged": sent + 1,
        "rate": sent / took,
        "p50": late[len(late) // 2],
        "p99": late[int(len(late) * 0.99)],
    }


async def read(url: str, options: dict[str, object], payload_bytes: int) -> dict[str, float]:
    """Everything in the bucket as messages, and everything as plain objects, in turn."""
    from pydanube.api.memory import give_back_large_blocks
    from pydanube.broker.service import READING_THREADS
    from pydanube.core import keys
    from pydanube.core.history.tiers import TierConfig, TopicHistory
    from pydanube.core.names import TopicName
    from pydanube.history.reader import CloudReader
    from pydanube.history.snapshots import read_snapshot
    from pydanube.history.tier import TopicTier
    from pydanube.history.tier_state import topic_prefix
    from pydanube.ports import Put
    from pydanube.stores.metadata.memory import MemoryMetadataStore
    from pydanube.stores.objects.urls import open_object_store
    from pydanube.stores.work.system import SystemClock, SystemWork
    from pydanube.telemetry import CloudMetrics

    give_back_large_blocks()  # as a broker does
    topic = TopicName(TOPIC)
    store = await open_object_store(url, options)
    snapshot = await read_snapshot(store, topic_prefix(topic))
    assert snapshot is not None
    clock, work = SystemClock(), SystemWork(READING_THREADS)
    metadata = MemoryMetadataStore(clock)
    puts = [Put(keys.storage_object(topic, each.start_offset), each.to_bytes()) for each in snapshot.objects]
    history = TopicHistory(first_offset=snapshot.first_offset, manifest=snapshot.manifest)
    await metadata.transact([], [*puts, Put(keys.history(topic), history.to_bytes())])

    async def nobody_writes(compares: object, operations: object) -> None:
        raise AssertionError("a reader changes nothing")

    gets: list[float] = []
    reads: list[float] = []
    messages = 0
    memory_mb: list[float] = []
    for _ in range(READS):
        tier = TopicTier(topic, 1, store, clock, work, nobody_writes, metadata, TierConfig())
        await tier.load()
        objects = list(await tier.load_manifest())
        before = rss_mb("self")
        forget_peak("self")
        reader = CloudReader(store, clock, work, CloudMetrics())
        offset, end, messages = objects[0].start_offset, objects[-1].end, 0
        began = time.perf_counter()
        while offset < end:
            batches = await reader.read(tier, offset, 4 * MIB)
            assert batches, f"offset {offset} is not there"
            messages += sum(min(each.header.end_offset, end) - max(each.header.base_offset, offset) for each in batches)
            offset = batches[-1].header.end_offset
        reads.append(time.perf_counter() - began)
        memory_mb.append(peak_mb("self") - before)
        await reader.close()
        began = time.perf_counter()
        for each in objects:
            await store.get(tier.key(each.object_id))
        gets.append(time.perf_counter() - began)
    payload_mb = messages * payload_bytes / 1e6
    return {
        "messages": messages,
        "objects": len(objects),
        "object_bytes": sum(each.size for each in objects),
        "read_mb_s": payload_mb / statistics.median(reads),
        "get_mb_s": payload_mb / statistics.median(gets),  # of the same payload, so that the two can be compared
        "memory_mb": max(memory_mb),
    }


async def consume(port: int, count: int) -> dict[str, float]:
    import pydanube

    async with (
        pydanube.connect(f"danube://127.0.0.1:{port}", timeout=120) as client,
        client.consumer(TOPIC, subscription="late", type="exclusive", start="earliest") as consumer,
    ):
        got = 0
        began = time.perf_counter()
        async for batch in consumer.batches():
            got += len(batch)
            await batch.ack()
            if got >= count:
                break
        return {"rate": got / (time.perf_counter() - began)}


def child(what: str, *arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, "--run", what, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def run_child(what: str, arguments: Sequence[str]) -> dict[str, float]:
    if what == "publish":
        port, rate, seconds, size = arguments
        return asyncio.run(publish(int(port), float(rate), float(seconds), int(size)))
    if what == "read":
        url, options, payload_bytes = arguments
        return asyncio.run(read(url, json.loads(options), int(payload_bytes)))
    port, count = arguments
    return asyncio.run(consume(int(port), int(count)))


# --- memory of a process ------------------------------------------------------------------------------------


def rss_mb(pid: int | str) -> float:
    return _status_mb(pid, "VmRSS")


def peak_mb(pid: int | str) -> float:
    return _status_mb(pid, "VmHWM")


def forget_peak(pid: int | str) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def _status_mb(pid: int | str, name: str) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1000


# --- the broker and its store ---------------------------------------------------------------------------


class Bench:
    def __init__(self, server: Any, scale: float) -> None:
        self.server = server
        self.scale = scale
        self.raw: dict[str, list[float]] = {}

    def add(self, name: str, value: float) -> None:
        self.raw.setdefault(name, []).append(value)
        print(f"  {name}: {value:,.2f}", flush=True)

    def median(self, name: str) -> float:
        return statistics.median(self.raw[name])

    @contextlib.contextmanager
    def broker(
        self, url: str, *, interval_seconds: float, object_mb: int = 64, data_dir: Path | None = None
    ) -> Iterator[BrokerProcess]:
        config = SCRATCH / "broker.yml"
        storage: dict[str, object] = {"upload": {"max_mb": object_mb}}
        if url.startswith("s3:"):
            storage["durable"] = self.server.options
        config.write_text(yaml.safe_dump({"storage": storage}))
        flags = ("--config-file", str(config), "--storage-url", url, "--upload-interval", f"{interval_seconds:g}")
        with broker(SCRATCH, *flags, data_dir=data_dir) as started:
            yield started


def danube_admin(server: BrokerProcess, *arguments: str) -> str:
    command = [sys.executable, "-m", "pydanube", "admin", "--endpoint", f"http://127.0.0.1:{server.admin}", *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def wait_until_uploaded(server: BrokerProcess, seconds: float = 600.0) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while True:
        try:
            found: dict[str, Any] = json.loads(danube_admin(server, "storage", "list", TOPIC, "--output", "json"))
        except subprocess.CalledProcessError:  # it has said why; a machine that is busy may need more time than that
            if time.monotonic() > deadline or not server.is_alive:
                raise
        else:
            if not found["only_in_log"]:
                return found
            if time.monotonic() > deadline:
                raise SystemExit(f"not uploaded after {seconds:.0f} s: {found['only_in_log']}")
        time.sleep(1)


class LagWatch:
    """Asks the broker once a second how long its oldest messages have waited for their upload."""

    def __init__(self, port: int) -> None:
        self.worst_seconds = 0.0
        self._url = f"http://127.0.0.1:{port}/metrics"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> LagWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while not self._over.wait(1.0):
            with opener.open(self._url, timeout=30) as answer:
                lines = answer.read().decode().splitlines()
            [line] = [line for line in lines if line.startswith("danube_cloud_upload_lag_seconds{")]
            self.worst_seconds = max(self.worst_seconds, float(line.split()[1]))


# --- the run ------------------------------------------------------------------------------------------------


def keep_up(bench: Bench) -> None:
    seconds, interval = max(20.0, 300 * bench.scale), max(2.0, 30 * bench.scale)
    rate = RATE if bench.scale >= 0.2 else RATE * 0.2
    print(
        f"keep up: {rate:,.0f} messages/s of {SMALL} B for {seconds:.0f} s, upload every {interval:.0f} s", flush=True
    )
    url = bench.server.url()
    with bench.broker(url, interval_seconds=interval) as server:
        danube_admin(server, "topics", "create", TOPIC, "--dispatch-strategy", "reliable")
        with LagWatch(server.metrics) as watch:
            before = server.cpu_seconds
            sent = child("publish", server.stream, rate, seconds, SMALL)
        bench.add("keep up: messages/s reached", sent["rate"])
        bench.add("keep up: publish p99 ms", sent["p99"])
        bench.add("keep up: broker CPU, cores", (server.cpu_seconds - before) / seconds)
        bench.add("keep up: worst lag, intervals", watch.worst_seconds / interval)
        found = wait_until_uploaded(server)
        paths = danube_admin(server, "storage", "list", TOPIC, "--output", "paths").splitlines()
        counted = count_with_duckdb(bench.server, paths)
        acknowledged = int(sent["acknowledged"])
        bench.add("keep up: acknowledged", acknowledged)
        bench.add("DuckDB: rows missing or too many", abs(counted[0] - acknowledged))
        bench.add("DuckDB: last offset differs by", abs(counted[1] - (acknowledged - 1)))
        bench.add("objects", len(found["objects"]))
        bench.add(f"object bytes over payload, {SMALL} random B", found["size_bytes"] / (acknowledged * SMALL))


def count_with_duckdb(server: Any, paths: list[str]) -> tuple[int, int]:
    import duckdb
    import duckdb_extension_httpfs

    [httpfs] = Path(duckdb_extension_httpfs.__path__[0]).rglob("httpfs.duckdb_extension")
    with duckdb.connect() as connection:
        connection.execute(f"LOAD '{httpfs}'")
        connection.execute(
            f"CREATE SECRET (TYPE s3, KEY_ID '{server.access_key}', SECRET '{server.secret_key}', "
            f"REGION '{server.region}', ENDPOINT '{server.endpoint.removeprefix('http://')}', "
            "URL_STYLE 'path', USE_SSL false)"
        )
        [row] = connection.execute('SELECT count(*), max("offset") FROM read_parquet(?)', [paths]).fetchall()
        return int(row[0]), int(row[1])


def p99(bench: Bench) -> None:
    """With uploads as a broker makes them by default: at this rate every five seconds, for 64 MB are there.

    Without: the interval is a day, and less is published than makes an object.
    """
    seconds = max(5.0, 30 * bench.scale)
    rate = RATE if bench.scale >= 0.2 else RATE * 0.1
    print(f"p99: {rate:,.0f} messages/s of {SMALL} B for {seconds:.0f} s, with and without uploads", flush=True)
    for _ in range(P99_RUNS if bench.scale >= 0.2 else 2):
        directory = SCRATCH / "objects"
        for name, url, interval, object_mb in (
            ("without upload", bench.server.url(), 86_400.0, 512),
            ("with upload to S3", bench.server.url(), 30.0, 64),
            ("with upload to a directory", directory.as_uri(), 30.0, 64),
        ):
            with bench.broker(url, interval_seconds=interval, object_mb=object_mb) as server:
                danube_admin(server, "topics", "create", TOPIC, "--dispatch-strategy", "reliable")
                with steal_watched(lambda percent: bench.add("taken by the host, % of a core", percent)):
                    found = child("publish", server.stream, rate, seconds, SMALL)
                bench.add(f"p99 ms, {name}", found["p99"])
            shutil.rmtree(directory, ignore_errors=True)
        bench.add("disk, fdatasync p99 ms", fdatasync_ms(SCRATCH)[1])


def catch_up(bench: Bench, what: str, size: int, total_bytes: float, object_mb: int) -> None:
    """Publishes, uploads, loses the log, and reads: with the reader alone, and through a broker."""
    count = max(50, int(total_bytes / size))
    print(f"{what}: {count:,} messages of {size:,} B in objects of {object_mb} MB", flush=True)
    url = bench.server.url()
    data = SCRATCH / "data"
    with bench.broker(url, interval_seconds=5.0, object_mb=object_mb, data_dir=data) as server:
        danube_admin(server, "topics", "create", TOPIC, "--dispatch-strategy", "reliable")
        rate = min(RATE, 60 * MIB / size)
        count = int(child("publish", server.stream, rate, count / rate, size)["acknowledged"])
        wait_until_uploaded(server)
    options = json.dumps(bench.server.options)
    found = child("read", url, options, size)
    assert found["messages"] == count, f"{count} were acknowledged, {found['messages']} are in the bucket"
    bench.add(f"{what}: read MB/s of payload", found["read_mb_s"])
    bench.add(f"{what}: plain GET MB/s of the same", found["get_mb_s"])
    bench.add(f"{what}: reader memory MB", found["memory_mb"])
    bench.add(f"{what}: objects", found["objects"])
    bench.add(f"{what}: object bytes over payload", found["object_bytes"] / (count * size))
    shutil.rmtree(data / "wal")
    shutil.rmtree(data / "journal", ignore_errors=True)
    with bench.broker(url, interval_seconds=5.0, object_mb=object_mb, data_dir=data) as server:
        before = server.rss_mb
        forget_peak(server.pid)
        bench.add(f"{what}: through a broker, MB/s", child("consume", server.stream, count)["rate"] * size / 1e6)
        bench.add(f"{what}: broker memory beyond its start MB", peak_mb(server.pid) - before)
    shutil.rmtree(data)


def judge(bench: Bench, parts: Sequence[str]) -> bool:
    """Prints every bound beside what was reached."""
    m = bench.median
    reached: dict[str, float] = {}
    if "keep-up" in parts:
        reached["upload: lag at 100,000 msg/s x 100 B, in intervals (at most)"] = m("keep up: worst lag, intervals")
        reached["SELECT count(*), max(offset) differs from what was acknowledged by (at most)"] = m(
            "DuckDB: rows missing or too many"
        ) + m("DuckDB: last offset differs by")
    if "p99" in parts:
        reached["publish p99 with upload, times without (at most)"] = m("p99 ms, with upload to S3") / m(
            "p99 ms, without upload"
        )
    if "catch-up" in parts:
        lower = min(200.0, 0.7 * m("catch up: plain GET MB/s of the same"))
        reached["catch-up read, MB/s of payload, over the lower of 200 and 70 % of a plain GET"] = (
            m("catch up: read MB/s of payload") / lower
        )
        reached["reader memory beyond its start, MB (at most)"] = m("catch up: reader memory MB")
    if "memory" in parts:
        name = "reader memory, 1 MiB payloads in 256 MB objects, MB (at most)"
        reached[name] = m("large: reader memory MB")
    bounds: dict[str, float] = json.loads((HERE / "tier_bounds.json").read_text())
    print(f"\n{'bound':<80} {'wanted':>8} {'reached':>10}")
    all_held = True
    for name, value in reached.items():
        wanted = bounds[name]
        held = value <= wanted if "at most" in name else value >= wanted
        all_held &= held
        print(f"{name:<80} {wanted:>8,.1f} {value:>10,.2f}  {'held' if held else 'MISSED'}")
    print("\nraw numbers:")
    for name, values in bench.raw.items():
        print(f"  {name}: " + ", ".join(f"{value:,.2f}" for value in values))
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    scaled = "" if bench.scale == 1 else f", scale {bench.scale}: these figures prove nothing"
    print(f"\n{platform.machine()}, {os.cpu_count()} cores, {system}{scaled}")
    return all_held


PARTS = ("keep-up", "p99", "catch-up", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the work, for a quick look")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be given several times")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        print(json.dumps(run_child(options.run[0], options.run[1:])))
        return
    from tests.e2e.objectstores import running_s3_server

    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    parts = options.part or PARTS
    try:
        with running_s3_server(OTHER_MACHINE, modest=True) as server:
            bench = Bench(server, options.scale)
            if "keep-up" in parts:
                keep_up(bench)
            if "p99" in parts:
                p99(bench)
            if "catch-up" in parts:
                catch_up(bench, "catch up", KIB, 512 * MIB * bench.scale, object_mb=64)
            if "memory" in parts:
                catch_up(bench, "large", MIB, 2048 * MIB * bench.scale, object_mb=256)
        held = judge(bench, parts)
    finally:
        shutil.rmtree(SCRATCH, ignore_errors=True)
    raise SystemExit(0 if held else 1)


if __name__ == "__main__":
    main()
