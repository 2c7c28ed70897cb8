"""The log beside the disk it stands on: `make bench-log`.

Every row is measured once to warm up and then three times, and the medians are shown: these machines are noisy. The
raw disk is `write` + `fdatasync` of the same bytes in blocks of one batch, from buffers that are ready, in
the same thread: the best that one could do without grouping. Ratios above 100 % come from group commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pydanube.formats import batch as batches
from pydanube.log.wal import TopicLog, Wal, WalConfig
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.work.system import SystemClock, SystemWork

KIB, MB = 1024, 1_000_000
MESSAGE_BYTES = KIB
ROUNDS = 3
WARM_UP = 1
REST_SECONDS = 1.0


def encoded(topic: str, rows: int) -> batches.Batch:
    payload = os.urandom(MESSAGE_BYTES)
    now = time.time_ns() // 1000
    return batches.encode(
        batches.rows_of([batches.Envelope(payload, now + i, None, None, {}, None, None, i) for i in range(rows)]),
        topic=topic,
    )


async def open_wal(directory: Path, config: WalConfig | None = None) -> tuple[Wal, FileDisk]:
    disk = FileDisk(directory)
    return await Wal.open(disk, SystemClock(), SystemWork(), config or WalConfig()), disk


class Appended:
    def __init__(self, seconds: float, latencies: list[float], size_bytes: int, messages: int) -> None:
        latencies.sort()
        self.seconds = seconds
        self.messages_per_s = messages / seconds
        self.mb_per_s = size_bytes / seconds / MB
        self.p50_ms = latencies[len(latencies) // 2] * 1000
        self.p99_ms = latencies[int(len(latencies) * 0.99)] * 1000


async def append(directory: Path, topics: int, rows: int, count: int, window: int) -> Appended:
    """`count` batches over all topics, `window` of them in flight."""
    wal, disk = await open_wal(directory)
    logs = [await wal.topic(f"/bench/t{n}", epoch=1) for n in range(topics)]
    ready = [encoded(log.topic, rows) for log in logs]
    for log, batch in zip(logs, ready, strict=True):
        await log.append(batch)  # the first append makes the segment
    latencies: list[float] = []
    turns = iter(range(count))

    async def lane() -> None:
        for turn in turns:
            n = turn % topics
            began = time.perf_counter()
            await logs[n].append(ready[n])
            latencies.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(window)))
    seconds = time.perf_counter() - began
    await wal.close()
    disk.close()  # else its open files would keep the blocks of what is removed
    return Appended(seconds, latencies, count * ready[0].header.size_bytes, count * rows)


def raw_append(directory: Path, rows: int, count: int) -> Appended:
    block = encoded("/bench/raw", rows).to_bytes()
    latencies = []
    file = os.open(directory / "raw", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    began = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        os.write(file, block)
        os.fdatasync(file)
        latencies.append(time.perf_counter() - start)
    seconds = time.perf_counter() - began
    os.close(file)
    return Appended(seconds, latencies, count * len(block), count * rows)


class Rows:
    """Collects the table; prints it and keeps it for the record."""

    def __init__(self) -> None:
        self.cells: list[list[str]] = []

    def add(self, *cells: str) -> None:
        self.cells.append(list(cells))
        print("  " + "  ".join(cells), file=sys.stderr, flush=True)


HEAD = ["what", "messages/s", "MB/s", "p50 ms", "p99 ms", "raw MB/s", "of raw"]


def bench_append(scratch: Path, rows: Rows, scale: float) -> None:
    plan = [(1, 8_000, 200), (100, 1_500, 200), (1000, 200, 32)]
    for per_batch, count, window in plan:
        count = max(window, int(count * scale))
        seconds: dict[int, list[float]] = {0: [], 1: [], 200: []}
        results: dict[int, list[Appended]] = {0: [], 1: [], 200: []}
        for topics in (0, 1, 200):  # 0: the raw disk
            for turn in range(WARM_UP + ROUNDS):
                if topics == 0:
                    result = raw_append(fresh(scratch), per_batch, count)
                else:
                    result = asyncio.run(append(fresh(scratch), topics, per_batch, count, window))
                tidy(scratch)
                if turn >= WARM_UP:
                    results[topics].append(result)
                    seconds[topics].append(result.seconds)
        raws = results[0]
        raw = median(raws, lambda r: r.mb_per_s)
        for topics in (1, 200):
            chosen = results[topics]
            speed = median(chosen, lambda r: r.mb_per_s)
            rows.add(
                f"append, batches of {per_batch}, {topics} topic{'s' if topics > 1 else ''}, {window} in flight",
                f"{median(chosen, lambda r: r.messages_per_s):,.0f}",
                f"{speed:,.1f}",
                f"{median(chosen, lambda r: r.p50_ms):.2f}",
                f"{median(chosen, lambda r: r.p99_ms):.2f}",
                f"{raw:,.1f}",
                f"{100 * speed / raw:.0f} %",
            )
        ratio = statistics.median(seconds[200]) / statistics.median(seconds[1])
        rows.add(f"  200 topics take {ratio:.2f} × the time of 1", "", "", "", "", "", "")


def fresh(scratch: Path) -> Path:
    """Always the same directory, emptied: a file system puts a new one elsewhere on the disk."""
    place = scratch / "place"
    place.mkdir(exist_ok=True)
    return place


def tidy(scratch: Path) -> None:
    """Removes what was measured, so that the next measurement gets the same blocks, and lets the disk rest.

    The first write to a block of a virtual disk may cost four times as much as the next: 1,200 MB/s on blocks that were
    used before, 250 MB/s on others, for a plain file just as for a log. That is what WARM_UP is for.
    """
    for left in (scratch / "place").iterdir():
        shutil.rmtree(left) if left.is_dir() else left.unlink()
    os.sync()
    time.sleep(REST_SECONDS)


def median(results: list[Appended], of: Callable[[Appended], float]) -> float:
    return statistics.median(of(result) for result in results)


# --- reading and recovery ------------------------------------------------------------------------------


async def fill(directory: Path, size_bytes: int) -> None:
    wal, _ = await open_wal(directory)
    log = await wal.topic("/bench/t", epoch=1)
    batch = encoded(log.topic, 100)
    count = size_bytes // batch.header.size_bytes
    for done in range(0, count, 64):
        await asyncio.gather(*(log.append(batch) for _ in range(min(64, count - done))))
    os._exit(0)  # no clean close: the next open must recover


def run_child(*arguments: str) -> dict[str, float]:
    """Runs a part of this file in its own process, so that memory is its own."""
    done = subprocess.run([sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout or "{}")
    return result


def rss_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1000
    return 0.0


async def recover(directory: Path) -> None:
    before = rss_mb()
    began = time.perf_counter()
    wal, _ = await open_wal(directory, WalConfig(cache_bytes=0))
    log = await wal.topic("/bench/t", epoch=2)
    opened = time.perf_counter() - began
    opened_mb = rss_mb()
    began = time.perf_counter()
    reader = log.reader(0)
    size = 0
    while found := await reader.read(4 * KIB * KIB):
        size += sum(batch.header.size_bytes for batch in found)
    read = time.perf_counter() - began
    print(json.dumps({
        "opened_s": opened, "rss_mb": opened_mb, "grown_mb": opened_mb - before,
        "read_mb_per_s": size / read / MB, "read_rss_mb": rss_mb(), "size_mb": size / MB, "head": log.head,
    }))  # fmt: skip
    os._exit(0)


async def read_memory(directory: Path) -> float:
    wal, disk = await open_wal(directory, WalConfig(cache_bytes=400 * KIB * KIB))
    log: TopicLog = await wal.topic("/bench/m", epoch=1)
    batch = encoded(log.topic, 100)
    for _ in range(40):
        await asyncio.gather(*(log.append(batch) for _ in range(64)))
    began = time.perf_counter()
    size = 0
    for _ in range(5):
        reader = log.reader(0)
        while found := await reader.read(4 * KIB * KIB):
            size += sum(b.header.size_bytes for b in found)
    speed = size / (time.perf_counter() - began) / MB
    await wal.close()
    disk.close()
    return speed


def raw_read(directory: Path) -> float:
    files = sorted(directory.glob("wal/bench/t/*/*.wal"))
    began = time.perf_counter()
    size = 0
    for path in files:
        with path.open("rb", buffering=0) as file:
            while piece := file.read(4 * KIB * KIB):
                size += len(piece)
    return size / (time.perf_counter() - began) / MB


def bench_read(scratch: Path, rows: Rows, scale: float) -> None:
    speeds = []
    for _ in range(ROUNDS):
        speeds.append(asyncio.run(read_memory(fresh(scratch))))
        tidy(scratch)
    rows.add("read from memory", "", f"{statistics.median(speeds):,.0f}", "", "", "", "")
    rss: dict[int, float] = {}
    for gigabytes in (1, 4):
        with tempfile.TemporaryDirectory(dir=scratch) as place:
            subprocess.run([sys.executable, __file__, "--fill", place, str(int(gigabytes * 1e9 * scale))], check=True)
            raw = raw_read(Path(place))
            result = run_child("--recover", place)
            rss[gigabytes] = result["rss_mb"]
            size = result["size_mb"] / 1000
            rows.add(f"open after a crash, {size:.1f} GB: {result['opened_s']:.2f} s", "", "", "", "", "", "")
            rows.add(
                f"read {size:.1f} GB from files",
                "",
                f"{result['read_mb_per_s']:,.0f}",
                "",
                "",
                f"{raw:,.0f}",
                f"{100 * result['read_mb_per_s'] / raw:.0f} %",
            )
            opened, read = result["rss_mb"], result["read_rss_mb"]
            rows.add(f"resident memory, {size:.1f} GB: {opened:.0f} MB opened, {read:.0f} MB read", *[""] * 6)
    rows.add(f"  4 GB needs {rss[4] - rss[1]:+.0f} MB more than 1 GB", "", "", "", "", "", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="fraction of the work, for a quick look")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure (default: build/)")
    parser.add_argument("--fill", nargs=2, metavar=("DIR", "BYTES"), help=argparse.SUPPRESS)
    parser.add_argument("--recover", metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.fill:
        asyncio.run(fill(Path(options.fill[0]), int(options.fill[1])))
    if options.recover:
        asyncio.run(recover(Path(options.recover)))
    scratch = options.directory or Path(__file__).parent.parent / "build" / "bench"
    scratch.mkdir(parents=True, exist_ok=True)
    rows = Rows()
    print(f"durable append of 1 KiB messages, medians of {ROUNDS} rounds:", file=sys.stderr)
    bench_append(scratch, rows, options.scale)
    bench_read(scratch, rows, options.scale)
    shutil.rmtree(scratch, ignore_errors=True)
    table = Table(title="The log beside the raw disk", box=None, header_style="bold")
    for name in HEAD:
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    for cells in rows.cells:
        table.add_row(*cells)
    Console(width=130).print(table)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
