"""A broker as a process of its own, for benchmarks: free ports, a directory that goes when it stops."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pydanube.testing.ports import free_ports


class BrokerProcess(NamedTuple):
    pid: int
    client: int
    admin: int
    stream: int
    metrics: int

    @property
    def is_alive(self) -> bool:
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

    @property
    def cpu_seconds(self) -> float:
        """User and system time of the process so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def rss_mb(self) -> float:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000


@contextlib.contextmanager
def broker(scratch: Path, *flags: str, data_dir: Path | None = None) -> Iterator[BrokerProcess]:
    """A standalone broker that is ready to be used. Its data goes with it, unless `data_dir` says where to leave it."""
    client, admin, stream, metrics = free_ports(4)
    with contextlib.ExitStack() as stack:
        place = str(data_dir or stack.enter_context(tempfile.TemporaryDirectory(dir=scratch)))
        Path(place).mkdir(exist_ok=True)
        command = [
            sys.executable, "-m", "pydanube", "broker", "--mode", "standalone", "--data-dir", place,
            "--broker-addr", f"127.0.0.1:{client}", "--admin-addr", f"127.0.0.1:{admin}",
            "--stream-addr", f"127.0.0.1:{stream}", "--prom-exporter", f"127.0.0.1:{metrics}", *flags,
        ]  # fmt: skip
        with (Path(place) / "out").open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
            try:
                wait_for_port(client)
                wait_for_port(stream)
                yield BrokerProcess(process.pid, client, admin, stream, metrics)
            except BaseException:
                last = "".join((Path(place) / "out").read_text(errors="replace").splitlines(keepends=True)[-20:])
                print(f"the broker (exit code {process.poll()}) said last:\n{last}", file=sys.stderr)
                raise
            finally:
                process.terminate()
                process.wait()


def wait_for_port(port: int, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"nothing listens on port {port} after {seconds:.0f} s")
        time.sleep(0.05)


@contextlib.contextmanager
def steal_watched(found: Callable[[float], None]) -> Iterator[None]:
    """Tells how much of a core the host kept for itself while we wanted to run, in percent."""
    began, before = time.monotonic(), _steal_seconds()
    yield
    found((_steal_seconds() - before) / (time.monotonic() - began) * 100)


def _steal_seconds() -> float:
    return int(Path("/proc/stat").read_text().split("\n", 1)[0].split()[8]) / os.sysconf("SC_CLK_TCK")


def paced_fdatasync_ms(scratch: Path, seconds: float, rate: int = 10_000, size: int = 64) -> list[float]:
    """What a log that did nothing else would need: messages come at a rate, and what has come is written and synced.

    Milliseconds of each message from the time it was meant to come until it is on disk. A disk that stands still for
    50 ms once a second spoils one sync in thousands, and one message in twenty.
    """
    times: list[float] = []
    path = scratch / "probe"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.pwrite(file, bytes(16 << 20), 0)  # blocks that are there already, as the log's are
        os.fsync(file)
        count, done, position, began = int(seconds * rate), 0, 0, time.perf_counter()
        while done < count:
            due = min(count, int((time.perf_counter() - began) * rate))
            if due == done:
                time.sleep(1 / rate)
                continue
            os.pwrite(file, bytes((due - done) * size), position)
            os.fdatasync(file)
            position = (position + (due - done) * size) % (15 << 20)
            now = time.perf_counter() - began
            times += [(now - n / rate) * 1000 for n in range(done, due)]
            done = due
    finally:
        os.close(file)
        path.unlink()
    return times


def fdatasync_ms(scratch: Path, size: int = 4096, count: int = 300) -> tuple[float, float]:
    """p50 and p99 of a write and fdatasync on the same disk, now."""
    times = []
    path = scratch / "probe"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    block = os.urandom(size)
    for _ in range(count):
        began = time.perf_counter()
        os.write(file, block)
        os.fdatasync(file)
        times.append((time.perf_counter() - began) * 1000)
    os.close(file)
    path.unlink()
    times.sort()
    return times[count // 2], times[int(count * 0.99)]
