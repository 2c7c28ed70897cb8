"""The log of a broker: one data directory, one committer, one `TopicLog` per open topic.

    wal = await Wal.open(disk, clock, work, WalConfig())
    orders = await wal.topic("/default/orders", epoch=1)
    receipt = await orders.append(batch)          # on disk when this returns
    async for batch in orders.follow(0): ...      # only what is committed, then whatever comes
    await wal.close()

The contract of `Wal`:

    open            takes the directory's lock; brings back what the commit journals hold
    topic           opens a topic in a new epoch, behind everything that is proven to exist; at most once at a time
    lost_log        what the disk has of a topic that is not open, for reading
    close           commits what is queued, finishes every log, empties the journals, lets the directory go

and of `TopicLog`:

    append, submit  a batch is acknowledged when it is as safe as the topic's durability says: `fsync`, synced, `os`,
                    written. Batches of one topic are committed in the order of submits. A batch of a session is
                    stored once: its repetition gets the same receipt.
                    DiskFull, LogFull: nothing of the batch was kept, and it may be sent again.
                    LogStopped: the disk failed; whether the batch was kept shows after a restart.
    open_session    a number above every one that the producer had; older sessions are refused from now on
    head            behind the last committed batch. Nothing at or beyond it is ever read.
    read, follow    committed batches in order, verified; a gap or damage is raised, never skipped
    reserve         offsets up to there may be given out; batches beyond it wait
    roll, truncate  ends the newest segment; drops segments that lie wholly below an offset
    close           commits what is queued and ends the epoch: nothing is ever added to it

Every open of a topic is a new epoch with a directory of its own; older epochs on this disk are recovered, finished and
read-only. Where the next offset comes from is the caller's knowledge if it gives `start_offset` (a move), and the
recovered head otherwise; a log that cannot prove its head refuses to guess.

What follows from every failure is the table in docs/adr/0001-the-log.md; core/commit/machine.py decides it.

What this leaves to others: who may open which epoch (cluster), what to do with damage (the operator), and
everything about consumers (broker).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from typing import Final

from pydanube.core.commit.values import CommitReceipt
from pydanube.errors import (
    ConfigError,
    DanubeError,
    FormatTooNew,
    LogClosed,
    LogFull,
    LogStopped,
    OffsetTaken,
    TailUnproven,
)
from pydanube.log.cache import TailCache
from pydanube.log.closed_log import ClosedLog
from pydanube.log.committer import Committer, Observe
from pydanube.log.journal_redo import clear_journals, redo_journals
from pydanube.log.layout import FORMAT, FORMAT_VERSION, LOCK, WAL, read_file, replace_file, topic_directory
from pydanube.log.recovered import Recovered, TailState
from pydanube.log.recovery import recover_topic
from pydanube.log.space import make_ballast
from pydanube.log.topic_log import HandedOver, LogResources, TopicLog
from pydanube.log.wal_config import WalConfig
from pydanube.ports import Clock, Disk, Work
from pydanube.telemetry import PressureNow, WalMetrics

log = logging.getLogger(__name__)

MANY_TOPICS: Final = 8  # with so many open, small groups will go through the commit journal
DURABILITIES: Final = ("fsync", "os")
NOTHING_UPLOADS: Final = "Nothing uploads what is in it"


class Wal:
    """A data directory that this process holds."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        work: Work,
        config: WalConfig,
        *,
        observe: Observe,
        metrics: WalMetrics,
        may_answer: Callable[[], bool],
        on_stopped: Callable[[LogStopped], None],
        why_not_freed: Callable[[], str],
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._work = work
        self._config = config
        self._cache = TailCache(config.cache_bytes)
        self.metrics = metrics
        self._committer = Committer(
            disk,
            clock,
            work,
            config,
            observe=observe,
            metrics=metrics,
            may_answer=may_answer,
            on_stopped=on_stopped,
            why_not_freed=why_not_freed,
        )
        self._resources = LogResources(disk, clock, config, self._committer, self._cache, metrics)
        self._task: asyncio.Task[None] | None = None
        self._logs: dict[str, TopicLog] = {}
        self._names_synced: set[str] = set()
        self.problems: list[str] = []  # damage found in commit journals, in words

    @classmethod
    async def open(
        cls,
        disk: Disk,
        clock: Clock,
        work: Work,
        config: WalConfig | None = None,
        *,
        observe: Observe = lambda *group: None,
        metrics: WalMetrics | None = None,
        may_answer: Callable[[], bool] = lambda: True,
        on_stopped: Callable[[LogStopped], None] = lambda error: None,
        why_not_freed: Callable[[], str] = lambda: NOTHING_UPLOADS,
    ) -> Wal:
        """Takes the directory, checks its format and brings back what the commit journals hold.

        `may_answer` is asked between sync and acknowledgement: a broker whose lease may have run out acknowledges
        nothing. `on_stopped` is called once, when the disk has failed for good. `why_not_freed` is asked when the log
        is full: what keeps it from being emptied, as a sentence. None of them may wait.

        Raises DirectoryInUse, FormatTooNew, or DiskFull if there is no room for what must be brought back.
        """
        wal = cls(
            disk,
            clock,
            work,
            config or WalConfig(),
            observe=observe,
            metrics=metrics or WalMetrics(),
            may_answer=may_answer,
            on_stopped=on_stopped,
            why_not_freed=why_not_freed,
        )
        if metrics is not None:
            metrics.size_bytes = wal.size_bytes
            metrics.bytes_max = wal._config.bytes_max
            metrics.sessions = wal.sessions
            metrics.pressure = wal.pressure_now
        await disk.lock(LOCK)
        try:
            await check_format(disk)
            await wal._sync_names("")
            damaged = await redo_journals(disk)
            wal.problems = list(damaged.values())
            if damaged:
                # What the journal held is gone; every log that may have had a part in it must remember that.
                for topic in await topics_on(disk):
                    await recover_topic(disk, clock, work, topic, journal_damaged=True)
            await clear_journals(disk, damaged)
            await make_ballast(disk, wal._config.ballast_bytes)
        except BaseException:
            await disk.unlock(LOCK)
            raise
        wal._task = asyncio.create_task(wal._committer.run(), name="committer")
        return wal

    @property
    def committer(self) -> Committer:
        return self._committer

    def size_bytes(self) -> int:
        """Of the segments of all open topics. Every file counts until it is removed."""
        return self._committer.space.size_bytes

    def sessions(self) -> int:
        """Of producers, in all open topics."""
        return sum(len(each.sessions) for each in self._logs.values())

    def pressure_now(self) -> PressureNow:
        pressure = self._committer.pressure
        return PressureNow(
            pressure.queued_bytes, pressure.partial_bytes, pressure.limit_bytes, pressure.held, pressure.refused
        )

    def excess_bytes(self) -> int:
        """How much of what is uploaded should be freed now, so that the bound is not met; negative if nothing must."""
        return self._committer.space.excess_bytes()

    @property
    def full(self) -> LogFull | None:
        """Why publishes are refused, if the bound is met."""
        return self._committer.space.too_large

    async def topic(
        self,
        topic: str,
        *,
        epoch: int,
        start_offset: int | None = None,
        known_end: int = 0,
        durability: str = "fsync",
        adopts_unknown: bool = False,
        handed_over: HandedOver | None = None,
    ) -> TopicLog:
        """Opens the topic's log for this epoch, which must be greater than any it had.

        `start_offset` is where the first batch goes, if the caller knows; the recovered head else.
        `known_end` is an offset below which everything is known to have existed (a cursor, an uploaded object): a
        head recovered below it is not believed. `adopts_unknown`: see core.sessions. `handed_over`: the owner before
        was another broker, so what this disk knows of producers is out of date.
        """
        if durability not in DURABILITIES:
            raise ConfigError("durability", durability, f"one of {', '.join(DURABILITIES)}")
        if topic in self._logs:
            raise OffsetTaken(topic, epoch, self._logs[topic].epoch + 1, "epoch")
        directory = topic_directory(topic)
        await self._sync_names(WAL, directory.rpartition("/")[0], directory)
        await self._committer.copy_journal_to_segments(directory)
        recovered = await recover_topic(self._disk, self._clock, self._work, topic)
        newest = recovered.epochs[-1].epoch if recovered.epochs else -1
        if epoch <= newest:
            raise OffsetTaken(topic, epoch, newest + 1, "epoch")
        for torn in recovered.torn:
            log.warning(
                "unfinished write cut off",
                extra={"topic": topic, "path": torn.path, "position": torn.position, "kept_as": torn.kept_as},
            )
        for damage in recovered.damage:
            log.error("log damaged", extra={"topic": topic, "damage": str(damage)})
        head = _next_offset(recovered, start_offset, known_end)
        opened = TopicLog(
            self._resources,
            recovered,
            epoch,
            head,
            durability,
            handed_over=handed_over,
            adopts_unknown=adopts_unknown,
            on_closed=lambda: self._closed(topic),
        )
        if len(self._logs) + 1 == MANY_TOPICS:
            await self._committer.expect_many()
        self._logs[topic] = opened  # last: a caller that gives up before has nothing to close
        opened.count()
        return opened

    def _closed(self, topic: str) -> None:
        self._logs.pop(topic, None)

    async def _sync_names(self, *directories: str) -> None:
        """Directories that an earlier process made may have names that only the page cache knows: it may have died
        before it synced them. What is acknowledged below them needs them, so they are made safe once per process.
        """
        for directory in directories:
            if directory not in self._names_synced:
                with contextlib.suppress(FileNotFoundError):
                    await self._disk.sync_directory(directory)
                    self._names_synced.add(directory)

    def is_open(self, topic: str) -> bool:
        """Also while it is being closed."""
        return topic in self._logs

    async def lost_log(self, topic: str, last: int | None = None) -> ClosedLog:
        """What this disk has of a topic that is not open here, up to epoch `last`: to be read, never to be added to.

        Raises LogClosed while it is still being closed: two that finish one epoch would tear its files.
        """
        if topic in self._logs:
            raise LogClosed(topic)
        await self._committer.copy_journal_to_segments(topic_directory(topic))
        return ClosedLog(await recover_topic(self._disk, self._clock, self._work, topic, last=last), self._disk)

    async def close(self) -> None:
        """Commits what is queued, finishes every log, empties the journals and lets the directory go.

        Raises if a log could not be finished (no room, say); the directory is released all the same, and the next start
        recovers that log.
        """
        failures: list[DanubeError] = []
        for each in list(self._logs.values()):
            try:
                await each.close()
            except DanubeError as error:
                failures.append(error)
        try:
            if self._committer.stopped is None:
                await self._committer.retire_all()
        finally:
            assert self._task is not None
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            await self._committer.filled()
            await self._disk.unlock(LOCK)
        if failures:
            raise failures[0]


def _next_offset(recovered: Recovered, start_offset: int | None, known_end: int) -> int:
    head = recovered.head
    if start_offset is not None:
        if start_offset < head:
            raise OffsetTaken(recovered.topic, start_offset, head, "offset")
        return start_offset
    if recovered.tail is TailState.UNPROVEN:
        raise TailUnproven(recovered.topic, head, recovered.epochs[-1].why)
    if head < known_end:
        raise TailUnproven(recovered.topic, head, f"offsets up to {known_end} are known to exist")
    return head


async def check_format(disk: Disk) -> None:
    """Marks a new directory with our format; raises FormatTooNew for one from a newer version."""
    data = await read_file(disk, FORMAT)
    if data is None:
        text = json.dumps({"product": "pydanube", "format": FORMAT_VERSION}) + "\n"
        await replace_file(disk, FORMAT, text.encode())
        return
    try:
        found = int(json.loads(data)["format"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise ConfigError(FORMAT, data[:80], "a data directory of PyDanube") from None
    if found > FORMAT_VERSION:
        raise FormatTooNew(FORMAT, found, FORMAT_VERSION)


async def topics_on(disk: Disk) -> list[str]:
    """Every topic that has a directory, whether it is open or not."""
    return [
        f"/{namespace.name}/{topic.name}"
        for namespace in await disk.list(WAL)
        if namespace.is_directory
        for topic in await disk.list(f"{WAL}/{namespace.name}")
        if topic.is_directory
    ]


__all__ = ["ClosedLog", "CommitReceipt", "HandedOver", "LogClosed", "TopicLog", "Wal", "WalConfig", "topics_on"]
