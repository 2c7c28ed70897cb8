"""The log of a broker: one data directory, one committer, one `TopicLog` per open topic.

    wal = await Wal.open(disk, clock, work, WalConfig())
    orders = await wal.topic("/default/orders", epoch=1)
    receipt = await orders.append(batch)          # on disk when this returns
    async for batch in orders.follow(0): ...      # only what is committed, then whatever comes
    await wal.close()

Every open of a topic is a new epoch with a directory of its own; older epochs on this disk are recovered, finished and
read-only. Where the next offset comes from is the caller's knowledge if it gives `start_offset` (a move), and the
recovered head otherwise; a log that cannot prove its head refuses to guess.

What this leaves to others: who may open which epoch (cluster), what to do with damage (the operator), and
everything about consumers (broker).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from pydanube.core.commit.machine import SESSIONS
from pydanube.core.commit.values import Receipt
from pydanube.core.sessions import IDLE_HOURS_DEFAULT, SESSIONS_DEFAULT, SESSIONS_LIMIT, Sessions
from pydanube.errors import (
    ConfigError,
    DanubeError,
    FormatTooNew,
    InvalidBatch,
    LimitReached,
    LogClosed,
    LogDamaged,
    LogFull,
    LogStopped,
    OffsetOutOfRange,
    OffsetTaken,
    TailUnproven,
)
from pydanube.log.batch import Batch, session_end, session_record, topic_hash
from pydanube.log.cache import TailCache
from pydanube.log.catalog import SegmentFile, segment_holding
from pydanube.log.commit_context import Answer, Broadcast, SegmentedLog
from pydanube.log.committer import Committer, Observe
from pydanube.log.layout import (
    CHECKPOINT,
    DAMAGE_SUFFIX,
    FORMAT,
    FORMAT_VERSION,
    LOCK,
    QUARANTINE_SUFFIX,
    WAL,
    Checkpoint,
    epoch_directory,
    read_file,
    replace_file,
    topic_directory,
)
from pydanube.log.pressure import Pressure
from pydanube.log.reader import LogReader, first_row_since
from pydanube.log.recovery import Recovered, RecoveredEpoch, Tail, clear_journals, recover_topic, redo_journals
from pydanube.log.space import make_ballast
from pydanube.ports import Clock, Disk, Work
from pydanube.telemetry import PressureNow, WalMetrics

log = logging.getLogger(__name__)

MIB: Final = 1024 * 1024
READ_BYTES: Final = MIB
MANY_TOPICS: Final = 8  # with so many open, small groups will go through the commit journal
ENDS_AT_ONCE: Final = 1_000  # records that a look at the sessions makes
DURABILITIES: Final = ("fsync", "os")
NOTHING_UPLOADS: Final = "Nothing uploads what is in it"


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """Defaults run well on a laptop; the small values that tests use are allowed."""

    segment_bytes: int = 64 * MIB
    segment_seconds: float = 24 * 3600.0
    group_bytes: int = 8 * MIB
    journal_bytes: int = 32 * MIB
    copy_bytes: int = 4 * MIB
    cache_bytes: int = 256 * MIB
    pending_bytes: int = 64 * MIB
    ballast_bytes: int = 16 * MIB
    sessions_max: int = field(default=SESSIONS_DEFAULT, repr=False)  # of one topic: then no producer opens another
    session_seconds: float = field(default=IDLE_HOURS_DEFAULT * 3600.0, repr=False)  # unused for so long it ends
    # And only when this process has itself had the log open for so long: a clock that is wrong at the start must not
    # end a session of which something may be resent. Clients resend for a day (client/outgoing.py).
    watched_seconds: float = field(default=36 * 3600.0, repr=False)
    # Of the segments of all topics: then publishes are refused. 0: the disk is the bound. No part of a seed's meaning.
    bytes_max: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "group_bytes", "journal_bytes", "copy_bytes", "pending_bytes"):
            if getattr(self, name) < 1024:
                raise ConfigError(f"wal.{name}", getattr(self, name), "at least 1024 bytes")
        if self.segment_bytes + self.group_bytes > 2**31:
            raise ConfigError("wal.segment_bytes", self.segment_bytes, "with wal.group_bytes, at most 2 GiB")
        if self.segment_seconds <= 0:
            raise ConfigError("wal.segment_seconds", self.segment_seconds, "more than 0")
        if self.session_seconds <= 0:
            raise ConfigError("wal.session_seconds", self.session_seconds, "more than 0")
        if not 1 <= self.sessions_max <= SESSIONS_LIMIT:
            raise ConfigError("wal.sessions_max", self.sessions_max, f"1 to {SESSIONS_LIMIT}")
        for name in ("cache_bytes", "ballast_bytes", "bytes_max"):
            if getattr(self, name) < 0:
                raise ConfigError(f"wal.{name}", getattr(self, name), "0 or more")


class HandedOver(NamedTuple):
    """What an owner tells the next: where producers stand, and when it appended last."""

    sessions: Sessions
    append_time: int = 0


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
        return self._committer.too_large

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

        `start_offset` is where the first batch goes, if somebody else knows; the recovered head else.
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
        opened = TopicLog(self, recovered, epoch, head, durability)
        if handed_over is not None:
            opened.sessions = handed_over.sessions
            opened.append_time = max(opened.append_time, handed_over.append_time)
        opened.sessions.adopts_unknown |= adopts_unknown
        if len(self._logs) + 1 == MANY_TOPICS:
            await self._committer.expect_many()
        self._logs[topic] = opened  # last: whoever gives up before has nothing to close
        self._committer.space.size_bytes += opened.size_bytes
        return opened

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

        Raises if a log could not be finished (no room, say); the directory is let go all the same, and the next start
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
    if recovered.tail is Tail.UNPROVEN:
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


class ClosedLog:
    """A topic's epochs that were finished or cut off long ago, for reading."""

    def __init__(self, recovered: Recovered, disk: Disk) -> None:
        self.topic = recovered.topic
        self.topic_hash = topic_hash(recovered.topic)
        self.head = recovered.head
        self.disk = disk
        self.recovered = recovered
        self.segments = recovered.segments
        self.tail = TailCache(0).new_tail()
        self.closed = False

    def reader(self, offset: int) -> LogReader:
        return LogReader(self, offset)

    def segment_for(self, offset: int) -> SegmentFile:
        segment = segment_holding(self.segments, offset)
        if segment is None:
            following = min(
                (each.first_offset for each in self.segments if each.first_offset > offset < each.end_offset),
                default=self.head,
            )
            raise OffsetOutOfRange(self.topic, offset, following, self.head)
        return segment


class TopicLog(SegmentedLog):
    """One topic's log in one epoch: append at the head, read from anywhere.

    `head` is the next offset of what is committed, `first_offset` the first that is still kept here. What lies
    between may have holes where another broker owned the topic (`held` tells).
    """

    def __init__(self, wal: Wal, recovered: Recovered, epoch: int, head: int, durability: str) -> None:
        newest = recovered.epochs[-1] if recovered.epochs else RecoveredEpoch(0, "")
        super().__init__(
            recovered.topic,
            topic_hash=topic_hash(recovered.topic),
            epoch=epoch,
            durability=durability,
            head=head,
            append_time=newest.append_time,
            max_publish_time=newest.max_publish_time,
            sessions=newest.sessions,
        )
        self.directory = epoch_directory(self.topic, epoch)
        self.recovered = recovered
        self.active = None
        self._ended = asyncio.Event()  # whoever closed it is done with it
        self.disk = wal._disk
        self.segments: list[SegmentFile] = recovered.segments
        self._opening: dict[int, int] = {}  # producer -> newest session that is being opened and not stored yet
        self._opened_at, self._opened_us = wal._clock.elapsed(), wal._clock.time_us()
        self._kept_from = 0  # retention has removed what lies below
        self._wal = wal
        self._committer = wal._committer
        self._cache = wal._cache
        self.tail = wal._cache.new_tail()
        self._news = Broadcast()  # something was committed, or nothing will be
        self._changing: set[asyncio.Task[None]] = set()  # segments that are being made for `prepare` or `roll`
        self._checkpointing = asyncio.Lock()  # held while wal.ckpt is read and replaced

    @property
    def pressure(self) -> Pressure:
        """Of all topics' logs together."""
        return self._committer.pressure

    @property
    def metrics(self) -> WalMetrics:
        return self._wal.metrics

    # --- appending ----------------------------------------------------------------------------------

    def current_offset(self) -> int:
        """The next offset of what is committed."""
        return self.head

    def submit(self, batch: Batch, on_decided: Callable[[], None] | None = None) -> Answer:
        """Queues a batch that was parsed or encoded here; the future gets its receipt. Never waits.

        `on_decided` may be called before the future calls back: see `Committer.submit`.
        """
        if batch.header.topic_hash != self.topic_hash:
            raise InvalidBatch(f"it was made for another topic than {self.topic}")
        return self._committer.submit(self, batch, on_decided)

    async def append(self, batch: Batch) -> Receipt:
        """Returns once the batch is as safe as `durability` says. Waits first while too much is queued."""
        committer = self._committer
        while committer.pending_bytes > self._wal._config.pending_bytes and not (committer.stopped or self.closed):
            await committer.next_group()
        return await self.submit(batch)

    async def open_session(self, producer_id: int) -> int:
        """A new session for this producer, durably; older ones are refused from now on. Raises LimitReached."""
        if self.sessions.get(producer_id) is None and self._sessions_full():
            await asyncio.gather(*self._end_idle(is_sure=False), return_exceptions=True)
            if self._sessions_full():
                raise LimitReached(SESSIONS, self._wal._config.sessions_max)
        session = max(self.sessions.next_session(producer_id, self.epoch), self._opening.get(producer_id, 0) + 1)
        self._opening[producer_id] = session
        try:
            await self.submit(session_record(topic=self.topic, producer_id=producer_id, session=session))
        finally:
            if self._opening.get(producer_id) == session:
                del self._opening[producer_id]
        return session

    def _sessions_full(self) -> bool:
        opening = sum(self.sessions.get(producer_id) is None for producer_id in self._opening)
        return len(self.sessions) + opening >= self._wal._config.sessions_max

    def end_idle_sessions(self, *, is_sure: bool) -> int:
        """Ends sessions that nobody used for `session_seconds`, some at a time; how many. Each end is a record.

        Not `is_sure`: a lost owner may have messages that nobody has seen yet. As long as sessions that nobody knows
        are adopted, none may be forgotten: its resend would be stored again.
        """
        if self.closed or self._committer.stopped is not None:
            return 0
        return len(self._end_idle(is_sure=is_sure))

    def _end_idle(self, *, is_sure: bool) -> list[asyncio.Future[Receipt]]:
        sessions, config = self.sessions, self._wal._config
        watched = self._wal._clock.elapsed() - self._opened_at
        if sessions.adopts_unknown:
            # Whoever sent nothing for so long in this epoch is somebody whose session would have ended.
            if not is_sure or watched < max(config.session_seconds, config.watched_seconds):
                return []
            sessions.adopts_unknown = False
        if watched < config.watched_seconds:
            return []
        # The clock as it was when the log was opened, and then the time that passed, or the clock if that says less: a
        # jump in either direction makes sessions last longer, never shorter.
        now = min(self._opened_us + int(watched * 1_000_000), self._wal._clock.time_us())
        ending = []
        for producer_id, known in sessions.idle(now - int(config.session_seconds * 1_000_000), now, ENDS_AT_ONCE):
            record = session_end(
                topic=self.topic, producer_id=producer_id, session=known.session, next_sequence=known.next_sequence
            )
            ending.append(self.submit(record))
            ending[-1].add_done_callback(self._session_ended)
        if ending:
            log.info("idle sessions of producers end", extra={"topic": self.topic, "sessions": len(ending)})
        return ending

    def _session_ended(self, ended: asyncio.Future[Receipt]) -> None:
        if not ended.cancelled() and ended.exception() is None:  # else it goes on: it was used meanwhile, or no room
            self._wal.metrics.sessions_ended.inc()

    async def settled(self) -> None:
        """Returns when the group that is being written now, if any, is decided."""
        await self._committer.barrier()

    def between_groups(self) -> asyncio.Lock:
        """Whoever holds it knows that everything that was accepted lies below the head, or was never accepted."""
        return self._committer.between_groups()

    async def quiet(self) -> None:
        """Returns when nothing that was submitted is undecided. Raises LogStopped if nothing will be any more."""
        while True:
            while self.pending:
                if self._committer.stopped is not None:
                    raise self._committer.stopped
                await self._committer.next_group()
            await self._committer.barrier()
            if not self.pending:
                return

    async def prepare(self) -> None:
        """Makes the first segment now, so that whoever appends first does not wait for its directory.

        Once begun it is finished, as `roll`.
        """
        await self._finish_in_any_case(self._committer.prepare(self))

    def reserve(self, end: int) -> None:
        """Offsets below `end` may be given out; batches beyond it wait."""
        self.reserved_end = end
        self._committer.reservation_grew(self)

    def adopt(self, segment: SegmentFile) -> None:
        """Called by the committer: the next group goes here."""
        self.active = segment
        self.segments.append(segment)
        if self._wal._logs.get(self.topic) is self:  # else it was taken off with the others when the log was closed
            self._committer.space.size_bytes += segment.end

    def committed(self, batches: Sequence[Batch], segment: SegmentFile) -> None:
        """Called by the committer: these are safe, so they may be seen."""
        for batch in batches:
            if batch.header.rows:
                self._cache.add(self.tail, batch, segment)
        self._news.fire()

    # --- reading ------------------------------------------------------------------------------------

    @property
    def first_offset(self) -> int:
        """The first offset that is kept here; the head if nothing is."""
        return next((s.first_offset for s in self.segments if s.end_offset > s.first_offset), self.head)

    def held(self) -> list[tuple[int, int]]:
        """The ranges of offsets [first, end) that are kept here, in order."""
        ranges: list[tuple[int, int]] = []
        for segment in self.segments:
            if segment.end_offset == segment.first_offset:
                continue
            if ranges and ranges[-1][1] == segment.first_offset:
                ranges[-1] = (ranges[-1][0], segment.end_offset)
            else:
                ranges.append((segment.first_offset, segment.end_offset))
        return ranges

    @property
    def size_bytes(self) -> int:
        """Of its segments."""
        return sum(segment.end for segment in self.segments)

    @property
    def memory_first(self) -> int | None:
        """From here up to the head it is in memory too; None: nothing of it."""
        return self.tail.first_offset

    def reader(self, offset: int) -> LogReader:
        """A place in the log that moves forward as it is read."""
        return LogReader(self, offset)

    async def read(self, offset: int, *, bytes_max: int = READ_BYTES) -> list[Batch]:
        """Committed batches from the one that holds `offset` on: at least one if there is one, about `bytes_max`.

        Batches come whole, so the first may begin before `offset`. Empty at the head.
        """
        if offset < self.head and (cached := self.tail.read(offset, bytes_max)):
            self._wal.metrics.reads["memory"] += 1
            return cached
        found = await LogReader(self, offset).read(bytes_max)
        if found:
            self._wal.metrics.reads["file"] += 1
        return found

    async def follow(self, offset: int, *, bytes_max: int = READ_BYTES) -> AsyncIterator[Batch]:
        """Committed batches from `offset` on, for ever; ends when the log is closed."""
        reader = LogReader(self, offset)
        while True:
            for batch in await reader.read(bytes_max):
                yield batch
            if reader.offset >= self.head:
                if self.closed:
                    return
                await self.wait_beyond(reader.offset)

    async def wait_beyond(self, offset: int) -> None:
        """Returns when something at or beyond `offset` is committed, or the log is closed."""
        while self.head <= offset and not self.closed:
            await self._news.wait()

    async def offset_at(self, time_us: int, first: int = 0) -> int:
        """The smallest offset from `first` on that was published at or after `time_us`; the head if there is none."""
        head = self.head
        if self.max_publish_time < time_us or not self.segments:
            return head
        segments = list(self.segments)  # the log goes on while we read
        for segment, following in zip(segments, [*segments[1:], None], strict=True):
            # The running maximum at a segment's end stands in the header of the next.
            latest = following.header.max_publish_time if following else self.max_publish_time
            if latest >= time_us and segment.end_offset > max(segment.first_offset, first):
                reader = LogReader(self, max(segment.first_offset, first))
                while reader.offset < segment.end_offset:
                    for batch in await reader.read(READ_BYTES):
                        if batch.header.max_publish_time >= time_us:
                            found = first_row_since(batch, time_us, first)
                            if found is not None:
                                return found
        return head

    def segment_for(self, offset: int) -> SegmentFile:
        segment = segment_holding(self.segments, offset)
        if segment is None:
            self._check_lost(offset)
            following = next((first for first, end in self.held() if first > offset), self.head)
            raise OffsetOutOfRange(self.topic, offset, following, self.head)
        return segment

    def _check_lost(self, offset: int) -> None:
        """Raises LogDamaged if recovery found that the offset was here and is not any more."""
        for damage in sorted(self.recovered.damage, key=lambda damage: damage.end is None):
            if max(damage.first, self._kept_from) <= offset and (damage.end is None or offset < damage.end):
                raise LogDamaged(self.topic, damage.path, damage.position, damage.first, damage.end, damage.why)

    # --- retention and closing ----------------------------------------------------------------------

    async def truncate(self, before: int) -> int:
        """Drops segments that lie wholly below `before`; returns the first offset that is still kept.

        The newest segment always stays: it knows where the log ends. A damaged one is set aside, not removed.
        """
        async with self._checkpointing:
            if self.closed:
                raise LogClosed(self.topic)
            await self._truncate(before)
        return self.first_offset

    async def _truncate(self, before: int) -> None:
        doomed: list[SegmentFile] = []
        for segment in self.segments[:-1]:
            if segment.end_offset > before or segment is self.active or segment.synced < segment.end:
                break
            doomed.append(segment)
        by_directory: dict[str, list[SegmentFile]] = {}
        for segment in doomed:
            by_directory.setdefault(segment.path.rpartition("/")[0], []).append(segment)
        for directory, segments in by_directory.items():
            await self._move_first_offset(directory, segments[-1].end_offset)
            del self.segments[: len(segments)]
            _release(segments)
            self._uncount(segments)
            self._kept_from = segments[-1].end_offset
            for segment in segments:
                await self._drop(segment)
            self._wal.metrics.deletions["retention"] += len(segments)
            await self.disk.sync_directory(directory)

    def _uncount(self, segments: Sequence[SegmentFile]) -> None:
        if self._wal._logs.get(self.topic) is self:  # else they were all taken off when it was closed
            self._committer.space.freed(sum(segment.end for segment in segments))

    async def roll(self) -> None:
        """Ends the newest segment, so that `truncate` may drop it too.

        Once begun it is finished, whoever gives up here: a segment that nobody knows of would bound the one before it.
        """
        await self._finish_in_any_case(self._committer.roll(self))

    async def _finish_in_any_case(self, change: Coroutine[Any, Any, None]) -> None:
        """Also if the caller gives up. `close` waits for it."""
        task = asyncio.create_task(change)
        self._changing.add(task)
        task.add_done_callback(self._changing.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(task)

    async def _move_first_offset(self, directory: str, first_offset: int) -> None:
        """Durably, before anything is removed: after a crash in between the rest is removed too."""
        path = f"{directory}/{CHECKPOINT}"
        known = Checkpoint.from_bytes(await read_file(self.disk, path) or b"")
        fields = {name: getattr(known, name) for name in Checkpoint.__slots__} if known else {}
        moved = Checkpoint(**{**fields, "first_offset": first_offset})
        await replace_file(self.disk, path, moved.to_bytes())

    async def _drop(self, segment: SegmentFile, *, set_aside: bool = False) -> None:
        try:
            await self.disk.size(segment.path + DAMAGE_SUFFIX)
        except FileNotFoundError:
            if not (segment.damaged or set_aside):
                await self.disk.remove(segment.path)
                return
        await self.disk.rename(segment.path, segment.path + QUARANTINE_SUFFIX)

    def lost_segments(self, epoch: int, start: int) -> list[SegmentFile]:
        """Of the epochs up to this older one, those that reach beyond `start`, as a whole."""
        older = [segment for segment in self.segments if segment.header.epoch <= epoch]
        reaching = {segment.header.epoch for segment in older if segment.end_offset > start}
        return [segment for segment in older if segment.header.epoch in reaching]

    async def forget_lost(self, epoch: int, start: int, damaged: Sequence[tuple[int, int]] = ()) -> None:
        """Drops the `lost_segments`: somebody else keeps them now, and keeps them differently.

        What has `damaged` offsets, found while it was read, is set aside for a person.
        """
        assert epoch < self.epoch
        async with self._checkpointing:
            doomed = self.lost_segments(epoch, start)
            if self.closed or not doomed:
                return
            # First: also if the disk is full, nobody reads them here any more, until the next start.
            self.segments[:] = [segment for segment in self.segments if segment not in doomed]
            _release(doomed)
            self._uncount(doomed)
            for directory in dict.fromkeys(segment.path.rpartition("/")[0] for segment in doomed):
                inside = [segment for segment in doomed if segment.path.startswith(f"{directory}/")]
                await self._move_first_offset(directory, inside[-1].end_offset)
                for segment in inside:
                    rotten = any(first < segment.end_offset and segment.first_offset < end for first, end in damaged)
                    await self._drop(segment, set_aside=rotten)
                self._wal.metrics.deletions["adopted"] += len(inside)
                await self.disk.sync_directory(directory)

    async def close(self) -> None:
        """Commits what is queued, then ends the epoch: nothing is ever added to it."""
        if self.closed:
            await self._ended.wait()  # whoever closes the directory behind this must not overtake it
            return
        self.closed = True
        committer = self._committer
        while self.pending and committer.stopped is None and committer.awaits_turn(self):
            await committer.next_group()
        committer.refuse_pending(self)
        try:
            if self._changing:  # what it makes is this log's, and ends with it
                await asyncio.wait(self._changing)
            await committer.made(self)  # a segment that appeared behind the end would be taken for lost
            if self.active is not None:
                await committer.sync_segment(self)
            async with self._checkpointing:  # also waits for a truncation that is under way
                if self.active is not None:
                    await self._finish(self.active)
            # Only now: until it was settled, memory was the only place to read the newest batches from.
            self._cache.drop(self.tail)
        except LogStopped:
            log.error("log left unfinished", extra={"topic": self.topic})  # the next start recovers it
        finally:
            _release(self.segments)
            self._uncount(self.segments)
            self._wal._logs.pop(self.topic, None)
            self._news.fire()
            self._ended.set()

    async def _finish(self, active: SegmentFile) -> None:
        directory = self.directory
        known = Checkpoint.from_bytes(await read_file(self.disk, f"{directory}/{CHECKPOINT}") or b"")
        finished = Checkpoint(
            first_offset=known.first_offset if known else self._epoch_first_offset(),
            finished=True,
            end_offset=self.head,
            segment_id=active.segment_id,
            end_position=active.end,
            append_time=self.append_time,
            max_publish_time=self.max_publish_time,
            sessions=self.sessions.to_bytes(),
        )
        await replace_file(self.disk, f"{directory}/{CHECKPOINT}", finished.to_bytes())

    def _epoch_first_offset(self) -> int:
        return next(s.first_offset for s in self.segments if s.header.epoch == self.epoch)


def _release(segments: Sequence[SegmentFile]) -> None:
    for segment in segments:
        segment.released = True


__all__ = ["LogClosed", "Receipt", "TopicLog", "Wal", "WalConfig", "topics_on"]
