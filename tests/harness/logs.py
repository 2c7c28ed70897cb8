"""A machine to run a log on, batches to put into it, and ways to look at what it kept.

    machine = LogFixture()
    wal = await machine.boot(segment_bytes=1024)
    log = await wal.topic(TOPIC, epoch=1)
    await log.append(batch("a", "b"))
    machine.cut_power()
    wal = await machine.boot()

Everything runs on the simulator's loop: time is virtual, and a test in which nothing can ever happen again says who
waits where instead of hanging.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from random import Random
from typing import Any

from pydanube.core.commit.values import CommitReceipt
from pydanube.errors import DiskFailed
from pydanube.formats.batch import Batch, Envelope, encode, messages, rows_of
from pydanube.formats.segment import (
    GROUP_HEADER_SIZE,
    GroupHeader,
    decode_group_header,
    decode_segment_header,
    segment_header_length,
)
from pydanube.log import zero_fill
from pydanube.log.reader import LogReader
from pydanube.log.verify import LogReport, verify
from pydanube.log.wal import TopicLog, Wal, WalConfig
from pydanube.ports import Entry, Write, WriteResult
from pydanube.testing.disk_faults import Faults
from pydanube.testing.faulty_disk import FaultyDisk
from pydanube.testing.loop import SimClock, SimLoop, SimWork
from pydanube.testing.process_disk import ProcessDisk

TOPIC = "/default/orders"
OTHER_TOPIC = "/default/payments"

SMALL = {
    "segment_bytes": 1 << 20,
    "group_bytes": 64 * 1024,
    "journal_bytes": 64 * 1024,
    "copy_bytes": 64 * 1024,
    "cache_bytes": 1 << 20,
    "pending_bytes": 1 << 20,
    "ballast_bytes": 4096,
}
FILL_BYTES = 64 * 1024  # zeros ahead of small groups


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on the simulator's loop. An error that nobody took fails it."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        saved = zero_fill.FILL_BYTES, zero_fill._ZEROS
        zero_fill.FILL_BYTES, zero_fill._ZEROS = FILL_BYTES, bytes(FILL_BYTES)  # type: ignore[misc]
        loop = SimLoop(Random(0), shuffled=False)  # type: ignore[abstract]
        try:
            loop.run_until_complete(test(*arguments, **named))
            assert not loop.problems, loop.problems
        finally:
            loop.close()
            zero_fill.FILL_BYTES, zero_fill._ZEROS = saved  # type: ignore[misc]

    return run


async def settle(rounds: int = 200) -> None:
    """Lets every task that can go on do so, without time passing."""
    for _ in range(rounds):
        await asyncio.sleep(0)


# --- the machine ------------------------------------------------------------------------------------


class WatchedDisk:
    """Stands before a Disk: counts what is asked of it, and holds back or fails syncs on demand.

    A write with sync is two steps here, so that something can happen between them.
    """

    def __init__(self, under: ProcessDisk) -> None:
        self.under = under
        self.steps: list[str] = []
        self.syncs: list[str] = []  # one entry per file and sync, as the hardware sees them
        self.written: list[Write] = []
        self.before_step: Callable[[int], Awaitable[None]] | None = None
        self.before_read: Callable[[str], Awaitable[None]] | None = None
        self.sync_failures: list[str] = []  # parts of paths; each fails one sync
        self.all_syncs_fail = False
        self._held: list[asyncio.Future[None]] | None = None
        self._held_paths = ""

    # --- what tests do ---

    def hold_syncs(self, path_part: str = "") -> None:
        """Syncs of such files do not return until `release_syncs`."""
        self._held, self._held_paths = [], path_part

    def release_syncs(self) -> None:
        held, self._held = self._held or [], None
        for waiter in held:
            if not waiter.done():  # else who waited has given up
                waiter.set_result(None)

    @property
    def syncs_waiting(self) -> int:
        return len(self._held or ())

    # --- the port ---

    async def _step(self, what: str) -> None:
        self.steps.append(what)
        if self.before_step is not None:
            await self.before_step(len(self.steps))

    async def create(self, path: str) -> None:
        await self._step(f"create {path}")
        await self.under.create(path)

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        await self._step(f"write {[(path, position) for path, position, _ in writes]}")
        self.written += writes
        results = await self.under.write(writes, sync=False)
        if not sync:
            return results
        await self._step(f"sync {[path for path, _, _ in writes]}")
        failures = await self._sync({path: None for path, _, _ in writes})
        return [failures[path] or result for result, (path, _, _) in zip(results, writes, strict=True)]

    async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        await self._step(f"sync {paths}")
        failures = await self._sync(dict.fromkeys(paths))
        return [failures[path] for path in paths]

    async def _sync(self, failures: dict[str, WriteResult]) -> dict[str, WriteResult]:
        while self._held is not None and any(self._held_paths in path for path in failures):
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._held.append(waiter)
            await waiter
        for path in failures:
            self.syncs.append(path)
            failing = next((part for part in self.sync_failures if part in path), None)
            if self.all_syncs_fail:
                failures[path] = DiskFailed(path, "sync", "the disk is gone")
            elif failing is not None:
                self.sync_failures.remove(failing)
                failures[path] = DiskFailed(path, "sync", "input/output error")
            else:
                failures[path] = (await self.under.sync([path]))[0]
        return failures

    async def sync_directory(self, path: str) -> None:
        await self._step(f"sync_directory {path}")
        await self.under.sync_directory(path)

    async def read(self, path: str, position: int, length: int) -> bytes:
        await self._step(f"read {path}")
        if self.before_read is not None:
            await self.before_read(path)
        return await self.under.read(path, position, length)

    async def size(self, path: str) -> int:
        await self._step(f"size {path}")
        return await self.under.size(path)

    async def truncate(self, path: str, length: int) -> None:
        await self._step(f"truncate {path}")
        await self.under.truncate(path, length)

    async def list(self, path: str) -> list[Entry]:
        await self._step(f"list {path}")
        return await self.under.list(path)

    async def make_directory(self, path: str) -> None:
        await self._step(f"make_directory {path}")
        await self.under.make_directory(path)

    async def rename(self, source: str, target: str) -> None:
        await self._step(f"rename {source}")
        await self.under.rename(source, target)

    async def remove(self, path: str) -> None:
        await self._step(f"remove {path}")
        await self.under.remove(path)

    async def free_bytes(self) -> int:
        await self._step("free_bytes")
        return await self.under.free_bytes()

    async def lock(self, path: str) -> None:
        await self._step(f"lock {path}")
        await self.under.lock(path)

    async def unlock(self, path: str) -> None:
        await self._step(f"unlock {path}")
        await self.under.unlock(path)


class LogFixture:
    """One computer: its disk survives, processes on it come and go."""

    def __init__(self, seed: int = 0, *, capacity_bytes: int | None = None) -> None:
        self.hardware = FaultyDisk(
            Random(seed), capacity_bytes=capacity_bytes, faults=Faults(latency_seconds_max=0.0, stale_sectors=0.0)
        )
        self.clock = SimClock()
        self.work = SimWork(Random(seed))
        self._pid = 100
        self.wal: Wal | None = None  # the one that was opened last
        self.new_process()

    def new_process(self) -> None:
        self._pid += 1
        self.disk = WatchedDisk(self.hardware.process(self._pid))

    async def boot(self, **config: Any) -> Wal:
        """A new process opens the data directory."""
        self.new_process()
        return await self.open(**config)

    async def open(self, **config: Any) -> Wal:
        self.wal = await Wal.open(self.disk, self.clock, self.work, WalConfig(**{**SMALL, **config}))
        return self.wal

    async def reopened(self, topic: str = TOPIC, *, epoch: int, **options: Any) -> TopicLog:
        """A new process opens the directory and this topic."""
        wal = await self.boot()
        return await wal.topic(topic, epoch=epoch, **options)

    def kill(self) -> None:
        """kill -9: the page cache stays."""
        self.hardware.kill(self.disk.under)

    def cut_power(self, seed: int = 0) -> None:
        """Whatever was not synced is there in part, in whole or not at all."""
        self.hardware.crash(Random(seed))

    async def crash_during(self, action: Callable[[], Awaitable[object]], step: int, *, power: bool = True) -> bool:
        """Runs `action` and ends the process before its disk call number `step`. False if it needs no so many."""
        disk = self.disk
        first = len(disk.steps)
        crashed = asyncio.Event()

        async def crash(number: int) -> None:
            if number - first == step:
                crashed.set()
                await asyncio.get_running_loop().create_future()

        disk.before_step = crash
        done = asyncio.ensure_future(action())
        waiting = asyncio.ensure_future(crashed.wait())
        await asyncio.wait({done, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if done.done():
            done.result()
            waiting.cancel()
            disk.before_step = None
            return False
        if power:
            self.cut_power(step)
        else:
            self.kill()
        return True

    # --- looking at files and changing them, as an operator could ---

    def files(self, part: str = "") -> list[str]:
        return [path for path in self.hardware.paths() if part in path]

    def segments(self, topic: str = TOPIC) -> list[str]:
        return [path for path in self.files(f"wal{topic}/") if path.endswith(".wal")]

    async def overwrite(self, path: str, position: int, data: bytes) -> None:
        """These bytes are there from now on, durably."""
        disk = self.hardware.process(99)
        assert await disk.write([Write(path, position, [data])], sync=True) == [None]

    async def replace(self, path: str, data: bytes) -> None:
        """The file holds exactly this from now on, durably."""
        disk = self.hardware.process(99)
        await disk.truncate(path, 0)
        assert await disk.write([Write(path, 0, [data])], sync=True) == [None]

    async def create(self, path: str, data: bytes = b"") -> None:
        disk = self.hardware.process(99)
        await disk.make_directory(path.rpartition("/")[0])
        await disk.create(path)
        assert await disk.write([Write(path, 0, [data])], sync=True) == [None]
        await disk.sync_directory(path.rpartition("/")[0])

    async def remove(self, path: str) -> None:
        disk = self.hardware.process(99)
        await disk.remove(path)
        await disk.sync_directory(path.rpartition("/")[0])

    async def verify(self) -> LogReport:
        """What `danube log verify` would say now."""
        return await verify(self.hardware.process(98), self.clock, self.work)


# --- batches ----------------------------------------------------------------------------------------


def batch(*payloads: str, topic: str = TOPIC, times: Sequence[int] | None = None, **fields: Any) -> Batch:
    """One message per payload."""
    publish_times = times or [0] * len(payloads)
    rows = rows_of([Envelope(text.encode(), at) for text, at in zip(payloads, publish_times, strict=True)])
    return encode(rows, topic=topic, **fields)


def sized(size_bytes: int, text: str = "x", topic: str = TOPIC) -> Batch:
    """One message, and about this many bytes."""
    return batch(text.ljust(size_bytes, "."), topic=topic)


class Producer:
    """An idempotent producer: numbers what it makes; remembers nothing else."""

    def __init__(self, producer_id: int, session: int, topic: str = TOPIC) -> None:
        self.producer_id = producer_id
        self.session = session
        self.next_sequence = 0
        self.topic = topic

    @classmethod
    async def open(cls, log: TopicLog, producer_id: int = 7) -> Producer:
        return cls(producer_id, await log.open_session(producer_id), log.topic)

    def make(self, *payloads: str) -> Batch:
        made = batch(
            *payloads,
            topic=self.topic,
            producer_id=self.producer_id,
            session=self.session,
            first_sequence=self.next_sequence,
        )
        self.next_sequence += len(payloads)
        return made


# --- what a file holds ------------------------------------------------------------------------------


def groups_of(content: bytes) -> list[GroupHeader]:
    """The groups that stand in a segment file, up to the first place where there is none."""
    start = segment_header_length(content)
    assert start is not None
    header = decode_segment_header(content[:start])
    assert header is not None
    found: list[GroupHeader] = []
    while (group := decode_group_header(content, start, start, header.segment_id)) is not None:
        found.append(group)
        start += GROUP_HEADER_SIZE + group.length
    return found


# --- what a log holds -------------------------------------------------------------------------------


async def contents(log: TopicLog, offset: int | None = None, *, bytes_max: int = 1 << 20) -> dict[int, str]:
    """Every message from `offset` on, the first kept one if None, by offset."""
    found: dict[int, str] = {}
    reader = LogReader(log, log.first_offset if offset is None else offset)
    while got := await reader.read(bytes_max):
        for each in got:
            for row, message in enumerate(messages(each)):
                assert each.header.base_offset + row not in found, "a batch came twice"
                found[each.header.base_offset + row] = message.payload.decode().rstrip(".")
    return found


def texts(batches: Sequence[Batch]) -> list[str]:
    return [message.payload.decode().rstrip(".") for each in batches for message in messages(each)]


async def fill(log: TopicLog, *payloads: str) -> list[CommitReceipt]:
    """Appends one batch after the other: each is a group of its own."""
    return [await log.append(batch(payload, topic=log.topic)) for payload in payloads]


def numbered(*payloads: str, first: int = 0) -> dict[int, str]:
    return {first + i: payload for i, payload in enumerate(payloads)}
