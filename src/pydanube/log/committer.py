"""The one task that writes: all topics' pending batches, one group at a time, acknowledged when they are on disk.

    submit ─► log.pending ─► form ─► write + sync ─► decide ─► receipts, head, cache, readers
                       ▲      ▲        │ no room: undo, DiskFull
                       │      └────────┘ sync failed: once more into a new file; again: stopped
                       └─ making a segment: the log waits its turn, the others do not

*Form* and *decide* never wait, so whoever looks between two awaits sees a log that is consistent. A group is formed
only when the one before is decided: tentative offsets and sessions never outlive one group, and a batch that was
queued behind a refused one meets the rolled-back state.

A log without a segment, or with one that is full or old, leaves the line while its next one is made, beside the groups
of the others and beside a few of its kind. Nothing of it is formed meanwhile, so the snapshot in the new segment's
header, and where it begins, are still true when the log adopts it.

Small groups of many topics go to the commit journal: one write and one sync for all. Their bytes stay in memory
until they are also written to the segments (`copied`), and in the journal until those are synced (`synced`).
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from pydanube.core.sessions import SESSION_SIZE_MAX_BYTES, Producer, Sessions, Stored
from pydanube.errors import (
    DanubeError,
    DiskFailed,
    DiskFull,
    LimitReached,
    LogClosed,
    LogFull,
    LogStopped,
    NotServed,
    Refused,
    ResourcesShort,
    SessionUnknown,
)
from pydanube.log.batch import SESSION_ENDS, Batch, stamp
from pydanube.log.catalog import SegmentFile
from pydanube.log.journal import (
    END_OF_RECORDS,
    JOURNAL_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    JournalEntry,
    JournalHeader,
    encode_journal_header,
    encode_record,
    entry_size,
)
from pydanube.log.layout import BALLAST, JOURNALS, SPARE_JOURNAL, journal_path, write_and_sync
from pydanube.log.pressure import Pressure
from pydanube.log.recovery import place_segment
from pydanube.log.segment import SNAPSHOT_LENGTH_MAX, UNSYNCED, Group, SegmentHeader, encode_group
from pydanube.ports import Buffer, Clock, Disk, Work, Write
from pydanube.telemetry import WalMetrics

log = logging.getLogger(__name__)
T = TypeVar("T")

# What one sync costs, in bytes written: about 0.2 ms. Decides between many syncs and writing twice.
SYNC_COST_BYTES: Final = 192 * 1024
# Zeros written ahead of small groups: overwriting allocated blocks syncs about twice as fast as growing a file.
FILL_BYTES: Final = 512 * 1024
FILL_BELOW_BYTES: Final = 64 * 1024
_ZEROS: Final = bytes(FILL_BYTES)
FILL_FROM_GROUP: Final = 3  # of a segment: a topic that gets a message now and then has no use for them
FILL_AFTER_SECONDS: Final = 0.002  # without a group: a pause
COPY_AFTER_SECONDS: Final = 0.1
COPY_FILES: Final = 64  # written to between two groups
# Segments at once, of busy topics that have filled theirs, and of all others: more would only keep each other, and the
# commits, from the disk.
MAKING_MAX: Final = 8
# Why a segment is made, besides `size`, `time` and `failure` of the one before it.
FIRST, PREPARED, ROOM = "first", "prepared", "room"
# Topics that were opened together do not all roll together: each does so a little earlier than it must.
ROLL_EARLY: Final = 0.2
_ROOM_CHECK_SECONDS: Final = 0.25
_SHORT_SECONDS: Final = 0.1
_SHORT_SECONDS_MAX: Final = 30.0
_SHORT_LINE_SECONDS: Final = 10.0
SESSIONS: Final = "sessions of producers in the topic (storage.wal.sessions_max)"
NEAR_PERCENT: Final = 80  # of the bound: beyond that, what is uploaded leaves the disk whatever local retention says


# Called after every group: batches, bytes, seconds from forming to decided.
Observe: TypeAlias = Callable[[int, int, float], None]


class Receipt(NamedTuple):
    """What an acknowledged batch got: its first offset, the owner's epoch, and how safe it is."""

    offset: int
    epoch: int
    durability: str
    duplicate: bool = False  # it was stored before: this is where


class Pending(NamedTuple):
    batch: Batch
    done: asyncio.Future[Receipt]
    tell: Callable[[], None] | None


class Signal:
    """Wakes everybody who waits at this moment."""

    __slots__ = ("_also", "_waiters")

    def __init__(self, also: Callable[[], None] = lambda: None) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they came
        self._also = also  # called, too

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = None
        try:
            await waiter
        finally:  # whoever gives up leaves nothing behind, also if it never fires
            self._waiters.pop(waiter, None)

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, {}
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._also()


class CommitConfig(Protocol):
    """The settings the committer looks at; see WalConfig."""

    @property
    def segment_bytes(self) -> int: ...
    @property
    def segment_seconds(self) -> float: ...
    @property
    def group_bytes(self) -> int: ...
    @property
    def journal_bytes(self) -> int: ...
    @property
    def copy_bytes(self) -> int: ...
    @property
    def ballast_bytes(self) -> int: ...
    @property
    def bytes_max(self) -> int: ...
    @property
    def sessions_max(self) -> int: ...
    @property
    def pending_bytes(self) -> int: ...


class Committed(Protocol):
    """One topic's log, as far as the committer needs it."""

    topic: str
    topic_hash: int
    epoch: int
    directory: str
    durability: str
    head: int
    append_time: int
    max_publish_time: int
    reserved_end: int | None
    sessions: Sessions
    pending: deque[Pending]
    active: SegmentFile | None
    closed: bool

    def adopt(self, segment: SegmentFile) -> None: ...

    def committed(self, batches: Sequence[Batch], segment: SegmentFile) -> None: ...


@dataclass(slots=True)
class Forming:
    """One topic's part of the group being written, with what is needed to take it back."""

    log: Committed
    batches: list[Batch] = field(default_factory=list)
    done: list[tuple[asyncio.Future[Receipt], int, bool]] = field(default_factory=list)  # offset, duplicate
    tell: dict[Callable[[], None], None] = field(default_factory=dict)
    undo: dict[int, Producer | None] = field(default_factory=dict)
    size: int = 0
    end_offset: int = 0
    append_time: int = 0
    group: Group | None = None
    decided: bool = False

    def take_back(self) -> None:
        for producer_id, producer in self.undo.items():
            self.log.sessions.put(producer_id, producer)


@dataclass(slots=True)
class _Journal:
    path: str
    header: JournalHeader
    end: int = JOURNAL_HEADER_SIZE
    next_number: int = 0
    dirty: dict[SegmentFile, int] = field(default_factory=dict)  # must be synced up to here before it may go


class Committer:
    """Writes for every log of one data directory. `run` is its only task; the rest is called by logs."""

    def __init__(
        self, disk: Disk, clock: Clock, work: Work, config: CommitConfig, observe: Observe = lambda *group: None
    ) -> None:
        self._disk = disk
        self._clock = clock
        self._work = work
        self._config = config
        self._observe = observe
        self.metrics = WalMetrics()  # those of whoever opens the log
        self._ready: dict[Committed, None] = {}  # logs with pending batches, in order of arrival
        self._waiting: dict[Committed, None] = {}  # logs whose next batch waits for a larger reservation
        self._making: dict[Committed, asyncio.Task[Exception | None]] = {}  # logs whose segment is being made
        self._makers = asyncio.Semaphore(MAKING_MAX)
        self._makers_for_busy = asyncio.Semaphore(MAKING_MAX)  # who writes much does not stand behind many who do not
        self._sparing: asyncio.Task[None] | None = None
        self._said_short = -_SHORT_LINE_SECONDS
        self._wake = asyncio.Event()
        self.pending_bytes = 0
        self.pressure = Pressure(config.pending_bytes, lambda: self.pending_bytes)
        self._decided = Signal(self.pressure.relieve)
        self._journal: _Journal | None = None
        self._journals_made = 0
        self._has_spare = False
        self._retiring: asyncio.Task[None] | None = None
        self._emptied: _Journal | None = None  # the one that is being retired, until its segments are synced
        self._uncopied: dict[SegmentFile, list[Buffer]] = {}
        self._uncopied_bytes = 0
        self._copy_due = False
        self._unfilled: dict[
            Committed, float
        ] = {}  # logs that get more zeros in their next pause: when they last wrote
        self._pausing: asyncio.Task[None] | None = None
        self._filling: dict[SegmentFile, asyncio.Task[None]] = {}  # their logs wait meanwhile, the others do not
        self._napping: asyncio.Task[None] | None = None
        self._exclusive = asyncio.Lock()  # held while files are touched
        self._full_until = 0.0
        self._full: DiskFull | None = None
        self.stopped: LogStopped | None = None
        self.may_answer: Callable[[], bool] = lambda: True  # asked between sync and acknowledgement
        self.when_stopped: Callable[[LogStopped], None] = lambda error: None
        self.why_not_freed: Callable[[], str] = lambda: "Nothing uploads what is in it"  # asked when it is full
        self.size_bytes = 0  # of the segments of all open logs
        self._bytes_max = config.bytes_max or sys.maxsize
        self._too_large: LogFull | None = None
        self._asked_why = 0.0
        self.groups = 0
        self.journaled_groups = 0

    # --- what logs call -----------------------------------------------------------------------------

    def submit(self, to: Committed, batch: Batch, tell: Callable[[], None] | None = None) -> asyncio.Future[Receipt]:
        """Queues the batch; the future gets its receipt, or why it was refused. Never waits.

        `tell` is for who cannot wait for the loop's next turn, in which the future calls back: it is called as soon as
        the receipt is there, if nothing else waits for the disk. It may be called for several batches at once, or not.
        """
        done: asyncio.Future[Receipt] = asyncio.get_running_loop().create_future()
        if self.stopped is not None:
            done.set_exception(self.stopped)
            return done
        if to.closed:
            done.set_exception(LogClosed(to.topic))
            return done
        to.pending.append(Pending(batch, done, tell))
        self.pending_bytes += batch.header.size_bytes
        if to not in self._making:
            self._ready[to] = None
            self._wake.set()
        return done

    def nudge(self, to: Committed) -> None:
        """The log's reservation has grown; what waited for it can go on."""
        if to in self._waiting:
            del self._waiting[to]
            self._ready[to] = None
            self._wake.set()

    async def expect_many(self) -> None:
        """Many topics are open: makes the file for the commit journal now, so that no producer waits for it."""
        if self._journal is None and not self._has_spare and self._sparing is None and self.stopped is None:
            self._sparing = asyncio.create_task(self._spare_beside(), name="make spare journal")
        if self._sparing is not None:
            await asyncio.shield(self._sparing)

    async def prepare(self, of: Committed) -> None:
        """The log is about to get its first batch: makes its segment. No room for it is left for that batch to find."""
        async with self._exclusive:
            making = self._making.get(of)
            if making is None and of.active is None and not of.closed and self.stopped is None:
                making = self._begin_segment(of, PREPARED)
        if making is not None:
            await asyncio.shield(making)

    async def roll(self, of: Committed) -> None:
        """The log goes on in a new segment, so that the one it has can be dropped. Without room it keeps that."""
        while True:
            async with self._exclusive:
                active = of.active
                if of.closed or self.stopped is not None or (active is not None and active.end == active.start):
                    return
                begun = self._making.get(of)
                making = begun or self._begin_segment(of, ROOM)
            failure = await asyncio.shield(making)
            if begun is None:
                if failure is not None and not isinstance(failure, DiskFull):
                    raise failure
                return

    async def made(self, of: Committed) -> None:
        """Returns when no segment of this log is being made."""
        while (making := self._making.get(of)) is not None:
            await asyncio.shield(making)

    async def bring_home(self, directory: str) -> None:
        """What only a journal and memory have of the segments in there is safe in their files. For opening it again.

        Recovery does not ask a journal that is in use. Synced, too: whoever opens them may remove them, and then no
        journal must wait for their sync any more. Raises LogStopped, or DiskFull if there is no room.
        """

        def inside(segments: Iterable[SegmentFile]) -> list[SegmentFile]:
            return [segment for segment in segments if segment.path.startswith(f"{directory}/")]

        def unsynced() -> list[SegmentFile]:
            journals = [journal for journal in (self._emptied, self._journal) if journal is not None]
            vouched = inside(dict.fromkeys(segment for journal in journals for segment in journal.dirty))
            return [segment for segment in vouched if segment.synced < segment.end]

        async with self._exclusive:
            if self._retiring is not None and unsynced():
                await self._retiring
            if self.stopped is not None and (inside(self._uncopied) or unsynced()):
                raise self.stopped
            try:
                if inside(self._uncopied):
                    await self._copy()
                for segment in inside(self._uncopied):
                    raise DiskFull(segment.path)
                if segments := unsynced():
                    await self._sync_copies({segment: segment.end for segment in segments})
            except DiskFailed as error:
                self._stop(error)
                assert self.stopped is not None
                raise self.stopped from error

    async def settle(self, of: Committed) -> None:
        """Everything committed of this log is in its segment file and synced there. For closing it."""
        assert of not in self._making
        async with self._exclusive:
            if self.stopped is not None:
                raise self.stopped
            if of.active is not None:
                try:
                    await self._sync_segment(of, of.active)
                except DiskFailed as error:
                    # A later sync of the same file may succeed without its lost pages: the journal must stay.
                    self._stop(error)
                    raise

    def awaits_turn(self, of: Committed) -> bool:
        """Whether its batches wait for nothing but their turn, or a segment that is being made."""
        return of in self._ready or of in self._making

    async def next_group(self) -> None:
        """Returns after the group that is being written, or the next one, is decided."""
        await self._decided.wait()

    def between_groups(self) -> asyncio.Lock:
        """To be held while nothing may be in the middle of being committed."""
        return self._exclusive

    async def barrier(self) -> None:
        """Returns when the group that is being written now, if any, is decided."""
        async with self._exclusive:
            pass

    async def retire_all(self) -> None:
        """Every journal is emptied into the segments and removed."""
        async with self._exclusive:
            if self._napping is not None:
                self._napping.cancel()
            await self._copy()
            if self._journal is not None:
                await self._start_retiring(self._journal, keep=False)
                self._journal = None
        if self._retiring is not None:
            await self._retiring
        if self._has_spare:
            await self._disk.remove(SPARE_JOURNAL)

    async def run(self) -> None:
        """Commits until cancelled, or until the disk has failed twice."""
        while self.stopped is None:
            await self._wake.wait()
            self._wake.clear()
            try:
                while self._can_write() and self.stopped is None:
                    async with self._exclusive:
                        await self._commit_group()
                    self._decided.fire()
                if self._copy_due and self.stopped is None:
                    async with self._exclusive:
                        self._copy_due = await self._copy(COPY_FILES)
                    if self._copy_due:  # the rest behind the groups that wait by now
                        self._wake.set()
                elif self._uncopied and self._napping is None:
                    self._napping = asyncio.create_task(self._nap(), name="copy when idle")
            except Exception as error:
                # Our own mistakes too: a task that dies in silence would leave every producer waiting.
                self._stop(error)
            self._decided.fire()

    async def _nap(self) -> None:
        """Copies wait a little: one write then serves many groups of a topic."""
        await self._clock.sleep(COPY_AFTER_SECONDS)
        self._napping = None
        self._copy_due = True
        self._wake.set()

    # --- one group ----------------------------------------------------------------------------------

    async def _commit_group(self) -> None:
        logs = [each for each in self._ready if each.active not in self._filling]
        full = self._full
        if full is not None and not await self._room_again():
            for each in logs:
                self._refuse_pending(each, full)
            return
        if self.size_bytes >= self._bytes_max:
            self._refuse_all(logs)
            return
        self._begin_segments(logs)
        parts = self._form([each for each in logs if each in self._ready])
        if not parts:
            return
        self.groups += 1
        began = self._clock.elapsed()
        unsynced = [part for part in parts if part.log.durability == "os"]
        synced = [part for part in parts if part.log.durability != "os"]
        try:
            if unsynced:
                await self._write_direct(unsynced, sync=False)
            if synced and not await self._write_journaled(synced):
                await self._write_direct(synced, sync=True)
        except Exception as error:
            # Some of them may be on disk: nobody can say, so nobody is told that they were refused for good.
            for part in parts:
                if not part.decided:
                    part.take_back()
                    self._refuse(part, LogStopped(str(error)))
            raise
        batches, size = sum(len(part.batches) for part in parts), sum(part.size for part in parts)
        # Soon: whoever waits for a receipt was called before, and is not kept waiting for our numbers.
        asyncio.get_running_loop().call_soon(self._observe, batches, size, self._clock.elapsed() - began)

    def _begin_segments(self, logs: Sequence[Committed]) -> None:
        """Logs with something to write and no segment with room for it leave the line until they have one."""
        now = self._clock.time_us()
        for each in logs:
            active = each.active
            why = self._why_to_roll(each, active, now) if active is not None else FIRST
            if why is not None:
                self._begin_segment(each, why)

    def _begin_segment(self, of: Committed, why: str) -> asyncio.Task[Exception | None]:
        """Only between two groups: what the new segment's header says of the log must hold until it is adopted."""
        assert self._exclusive.locked() and of not in self._making
        self._ready.pop(of, None)
        self._waiting.pop(of, None)
        making = asyncio.create_task(self._make_segment(of, why), name=f"make segment of {of.topic}")
        self._making[of] = making
        return making

    async def _make_segment(self, of: Committed, why: str) -> Exception | None:
        """Ends the log's segment and makes the next, beside the groups of other logs. Returns what went wrong.

        Nobody cancels it: between the rename and the adoption nothing may be given up. What goes wrong is this log's
        alone if nothing was made; else it is the disk's, and all stop.
        """
        failure: Exception | None = None
        try:
            async with self._makers_for_busy if why in ("size", "failure") else self._makers:
                if self.stopped is None:
                    if of.active is not None:
                        await self._sync_segment(of, of.active)
                    of.adopt(await self._new_segment(of))
                    if why not in (FIRST, PREPARED):
                        self.metrics.rotations[why] += 1
        except DiskFull as error:
            failure = error
            if why not in (ROOM, PREPARED):  # else it goes on in the one it has, or its first batch finds out
                self._refuse_pending(of, error)
        except Exception as error:
            failure = error
            self._stop(error)
        del self._making[of]
        if of.pending:
            self._ready[of] = None
        self._wake.set()
        self._decided.fire()
        if isinstance(failure, DiskFull) and why != PREPARED:
            try:
                await self._disk_is_full(failure)
            except DiskFailed as error:
                self._stop(error)
        return failure

    def _why_to_roll(self, of: Committed, segment: SegmentFile, now_us: int) -> str | None:
        """`size`, `time` or `failure`; None: there is room, and it is young."""
        if segment.failed:
            return "failure"
        if segment.end == segment.start:
            return None
        if segment.end >= self._config.segment_bytes:
            return "size"
        age_us = now_us - segment.header.created_us
        early = ROLL_EARLY * (of.topic_hash % 1024) / 1024
        return "time" if age_us >= self._config.segment_seconds * (1 - early) * 1_000_000 else None

    async def _new_segment(self, of: Committed) -> SegmentFile:
        previous = of.active
        if previous is None:
            await self._disk.make_directory(of.directory)
        header = SegmentHeader(
            segment_id=self._work.random_u64(),
            topic_hash=of.topic_hash,
            epoch=of.epoch,
            first_offset=of.head,
            created_us=self._clock.time_us(),
            previous_id=previous.segment_id if previous else 0,
            previous_end=previous.end if previous else 0,
            append_time=of.append_time,
            max_publish_time=of.max_publish_time,
            flags=UNSYNCED if of.durability == "os" else 0,
            snapshot=self._snapshot(of),
        )
        segment = await place_segment(self._disk, of.directory, header)
        await self._sync_name(of.directory)
        return segment

    async def _sync_name(self, directory: str) -> None:
        """Behind a rename, which cannot be taken back: whatever fails here is DiskFailed."""
        try:
            await self._patiently(lambda: self._disk.sync_directory(directory))
        except DiskFull as error:
            raise DiskFailed(directory, "sync", str(error)) from error

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Calls again, for a while, if the system has no descriptor: where giving up would stop the log."""
        since = self._clock.elapsed()
        while True:
            try:
                return await call()
            except ResourcesShort as error:
                self._say_short(error)
                if self._clock.elapsed() - since >= _SHORT_SECONDS_MAX:
                    raise
                await self._clock.sleep(_SHORT_SECONDS)

    def _snapshot(self, of: Committed) -> bytes:
        """For a segment's header. Never more than one can have that shall be read again."""
        if len(of.sessions) * SESSION_SIZE_MAX_BYTES <= SNAPSHOT_LENGTH_MAX:
            return of.sessions.to_bytes()
        kept = of.sessions.newest(SNAPSHOT_LENGTH_MAX)
        if kept.cut:
            self.metrics.sessions_cut["segment"] += kept.cut
            log.error("sessions of producers cut in a segment", extra={"topic": of.topic, "sessions": kept.cut})
        return kept.to_bytes(timed=False)

    def _form(self, prepared: Sequence[Committed]) -> list[Forming]:
        """Takes batches from the logs that have a segment, in turn, up to the group's size; numbers and stamps them."""
        now = self._clock.time_us()
        share = max(1, self._config.group_bytes // max(1, len(prepared)))
        room = self._config.group_bytes
        parts: list[Forming] = []
        for each in prepared:
            if each not in self._ready:
                continue  # refused since, or waits for its segment
            if room <= 0:
                break
            del self._ready[each]
            part = self._form_one(each, min(share, room), now)
            assert part.batches or not part.done, "a repetition of what is in this group needs the original in it"
            if part.batches:
                room -= part.size
                self._encode(part, each.active)
                parts.append(part)
            if each.pending:  # to the end of the line
                line = self._waiting if self._waits_for_reservation(each) else self._ready
                line[each] = None
        return parts

    def _form_one(self, of: Committed, size_max: int, now_us: int) -> Forming:
        part = Forming(of, end_offset=of.head, append_time=max(now_us, of.append_time))
        sessions = of.sessions
        pending = of.pending
        while pending:
            batch, done, tell = pending[0]
            header = batch.header
            size = header.size_bytes
            if part.batches and part.size + size > size_max:
                break  # the first always fits, however large
            if of.reserved_end is not None and part.end_offset + header.rows > of.reserved_end:
                break
            pending.popleft()
            self.pending_bytes -= size
            if done.done():
                continue  # the caller left before anything was decided
            producer_id = header.producer_id
            if header.flags and header.logical_crc == SESSION_ENDS:
                if not sessions.ends(producer_id, header.session, header.first_sequence):
                    done.set_exception(SessionUnknown(producer_id, header.session))  # it was used since, or replaced
                    continue
                part.undo.setdefault(producer_id, sessions.get(producer_id))
                sessions.ended(producer_id, header.session)
            elif header.flags:
                part.undo.setdefault(producer_id, sessions.get(producer_id))
                sessions.opened(producer_id, header.session, part.append_time)
            elif producer_id:
                stored = self._check_sequence(of, batch, done)
                if done.done():
                    continue
                if stored is not None:
                    if stored.base_offset >= of.head:  # still in this group: its fate is shared
                        part.done.append((done, stored.base_offset, True))
                    elif self.may_answer():
                        done.set_result(Receipt(stored.base_offset, stored.epoch, of.durability, True))
                    else:
                        done.set_exception(_fenced(of))
                    continue
                part.undo.setdefault(producer_id, sessions.get(producer_id))
                sessions.accepted(
                    producer_id, header.session, header.first_sequence, header.rows,
                    header.body_crc, part.end_offset, of.epoch, part.append_time,
                )  # fmt: skip
            part.batches.append(stamp(batch, base_offset=part.end_offset, epoch=of.epoch, append_time=part.append_time))
            part.done.append((done, part.end_offset, False))
            if tell is not None:
                part.tell[tell] = None
            part.end_offset += header.rows
            part.size += size
        return part

    def _check_sequence(self, of: Committed, batch: Batch, done: asyncio.Future[Receipt]) -> Stored | None:
        header = batch.header
        try:
            if header.session >> 32 > of.epoch:  # no owner up to now can have issued it
                raise SessionUnknown(header.producer_id, header.session)
            stored = of.sessions.check(
                header.producer_id, header.session, header.first_sequence, header.rows, header.body_crc
            )
            limit = self._config.sessions_max
            if len(of.sessions) >= limit and stored is None and of.sessions.get(header.producer_id) is None:
                raise LimitReached(SESSIONS, limit)  # else it would be adopted
            return stored
        except Refused as refusal:
            done.set_exception(refusal)
            return None

    @staticmethod
    def _waits_for_reservation(of: Committed) -> bool:
        end = of.head + of.pending[0].batch.header.rows
        return of.reserved_end is not None and end > of.reserved_end

    @staticmethod
    def _encode(part: Forming, segment: SegmentFile | None) -> Group:
        assert segment is not None
        durable = segment.synced if part.log.durability == "os" else segment.end
        part.group = encode_group(
            part.batches,
            segment_id=segment.segment_id,
            number=segment.next_number,
            position=segment.end,
            durable_before=durable,
            first_offset=part.log.head,
        )
        return part.group

    # --- writing ------------------------------------------------------------------------------------

    async def _write_direct(self, parts: Sequence[Forming], *, sync: bool) -> None:
        """Each part to its own file."""
        writes: list[Write] = []
        for part in parts:
            segment, group = part.log.active, part.group
            assert segment is not None and group is not None
            # In one piece: if there is no room for what comes before it, the group must not be whole.
            writes.append(Write(segment.path, segment.copied, [*self._uncopied.get(segment, ()), *group.buffers]))
        results = await self._disk.write(writes, sync=sync)
        for part, failure in zip(parts, results, strict=True):
            if failure is None:
                segment, group = part.log.active, part.group
                assert segment is not None and group is not None
                self._forget_copies(segment, segment.end)
                self._decide(part, synced=sync)
                if sync and group.length <= FILL_BELOW_BYTES:
                    self._fill_ahead(part.log, segment)
        for i, failure in enumerate(results):
            if isinstance(failure, DiskFull):
                await self._no_room(parts[i], failure)
        for i, failure in enumerate(results):
            if isinstance(failure, DiskFailed):
                if not sync:
                    raise failure
                await self._once_more(parts[i], failure)

    async def _once_more(self, part: Forming, failure: DiskFailed) -> None:
        """The sync failed: what the old file holds behind its last good sync is unknown for ever, so it ends there
        and the group goes to a new one. A second failure is the disk's last word.
        """
        segment = part.log.active
        assert segment is not None
        log.error("sync failed", extra={"topic": part.log.topic, "path": segment.path, "why": failure.why})
        try:
            if segment.synced < segment.end:
                # Groups that only the journal has: a new file would have to hold them too. A restart redoes them.
                raise failure
            tentative = {producer_id: part.log.sessions.get(producer_id) for producer_id in part.undo}
            part.take_back()  # the new file's snapshot must not know what is not stored
            await self._patiently(lambda: self._go_on_in_another(part.log))
            for producer_id, producer in tentative.items():
                part.log.sessions.put(producer_id, producer)
            fresh = part.log.active
            group = self._encode(part, fresh)
            assert fresh is not None
            await self._patiently(lambda: write_and_sync(self._disk, fresh.path, fresh.end, *group.buffers))
        except (DiskFull, DiskFailed) as again:
            # Whether the group will be there after a restart is unknown, so it cannot be refused: stop.
            raise DiskFailed(segment.path, "sync", str(again)) from again
        self._decide(part, synced=True)

    async def _go_on_in_another(self, of: Committed) -> None:
        of.adopt(await self._new_segment(of))

    async def _no_room(self, part: Forming, failure: DiskFull) -> None:
        """Part of the group stands behind the segment's end; it is no group and the next one overwrites it."""
        segment = part.log.active
        assert segment is not None
        part.take_back()
        self._refuse(part, failure)
        await self._disk_is_full(failure)
        with contextlib.suppress(ResourcesShort):  # what stands there is overwritten all the same
            await self._disk.truncate(segment.path, segment.copied)  # what is committed behind it, the journal has
        segment.filled = segment.zeroed = segment.copied

    def _fill_ahead(self, of: Committed, segment: SegmentFile) -> None:
        """Has zeros written behind the segment's end: in the next pause if half are used, at once if there were none.

        Only behind a group that was synced, and until they are written nothing of the log is formed. So syncs of the
        file do not overlap, all that it holds is safe, and a failure costs nothing but its further use. Zeros are
        never needed: they make the next syncs faster, and whoever published does not wait for them. One file at a
        time, or they would stand between the other topics and the disk.
        """
        left = max(segment.zeroed, segment.start) - segment.end
        if left >= FILL_BYTES // 2 or segment.end + FILL_BYTES // 2 >= self._config.segment_bytes:
            return
        if segment.next_number < FILL_FROM_GROUP:
            return
        self._unfilled[of] = self._clock.elapsed()
        if left < -FILL_BYTES // 8 and not self._filling:
            self._begin_fill(of)
        elif self._pausing is None:
            self._pausing = asyncio.create_task(self._fill_in_pauses(), name="fill when idle")

    async def _fill_in_pauses(self) -> None:
        while self._unfilled:
            await self._clock.sleep(FILL_AFTER_SECONDS)
            while self._filling or await self._fill_rested():
                await asyncio.wait(self._filling.values())
        self._pausing = None

    async def _fill_rested(self) -> bool:
        """Begins with one log that has paused, if there is one."""
        async with self._exclusive:  # no group is on its way to where the zeros go
            rested = self._clock.elapsed() - FILL_AFTER_SECONDS
            return any(self._begin_fill(each) for each, since in list(self._unfilled.items()) if since <= rested)

    def _begin_fill(self, of: Committed) -> bool:
        assert self._exclusive.locked()
        self._unfilled.pop(of, None)
        segment = of.active
        if of.closed or of in self._making or segment in self._filling:
            return False
        if segment is None or segment.synced < segment.end:
            return False
        self._filling[segment] = asyncio.create_task(self._fill(segment), name=f"fill {segment.path}")
        return True

    async def _fill(self, segment: SegmentFile) -> None:
        start = max(segment.filled, segment.end)
        zeros = memoryview(_ZEROS)[: segment.end + FILL_BYTES - start]
        try:
            (result,) = await self._disk.write([Write(segment.path, start, [zeros])], sync=True)
            if result is None:
                segment.filled = segment.zeroed = start + len(zeros)
            elif isinstance(result, DiskFull):
                segment.zeroed = self._config.segment_bytes  # then it grows group by group
                segment.filled = segment.end
                await self._disk.truncate(segment.path, segment.end)
            elif not segment.released:
                log.error("sync failed", extra={"path": segment.path, "why": result.why})
                segment.failed = True
        except (OSError, DiskFull, DiskFailed) as error:  # nothing that is committed needs this
            log.warning("zeros not cut off", extra={"path": segment.path, "why": str(error)})
        finally:
            del self._filling[segment]
            self._wake.set()

    def _can_write(self) -> bool:
        return any(each.active not in self._filling for each in self._ready)

    async def filled(self) -> None:
        """Ends the filling of files with zeros; returns when none is being filled."""
        if self._pausing is not None:
            self._pausing.cancel()
        if self._filling:
            await asyncio.wait(self._filling.values())

    async def _write_journaled(self, parts: Sequence[Forming]) -> bool:
        """All parts as one record, if that is cheaper than a sync each. False if nothing was done."""
        if len(parts) == 1:
            return False  # one sync either way
        if self._journal is None and self._sparing is not None:
            return False  # it is made for those who come later; nobody waits for it now
        entries = []
        total = RECORD_HEADER_SIZE + len(END_OF_RECORDS)
        for part in parts:
            segment, group = part.log.active, part.group
            assert segment is not None and group is not None
            entries.append(JournalEntry(segment.path, segment.segment_id, segment.end, group.buffers, group.length))
            total += group.length + entry_size(segment.path)
        if (len(parts) - 1) * SYNC_COST_BYTES <= total or total + JOURNAL_HEADER_SIZE > self._config.journal_bytes:
            return False
        is_full = self._journal is not None and self._journal.end + total > self._config.journal_bytes
        if is_full and self._retiring is not None and not self._retiring.done():
            return False  # the one before waits for the syncs of all its files; these few do not wait for that
        try:
            if self._journal is None or is_full:
                await self._next_journal()
        except DiskFull as error:
            for part in parts:
                part.take_back()
                self._refuse(part, error)
            await self._disk_is_full(error)
            return True
        try:
            await self._write_record(entries)
        except ResourcesShort as error:  # nothing was written that the next record does not overwrite
            for part in parts:
                part.take_back()
                self._refuse(part, error)
            await self._disk_is_full(error)
            return True
        except (DiskFull, DiskFailed) as failure:
            log.error("journal sync failed", extra={"why": str(failure)})
            try:
                await self._patiently(lambda: self._next_journal(after_failure=True))
                await self._patiently(lambda: self._write_record(entries))
            except (DiskFull, DiskFailed) as again:
                raise DiskFailed(JOURNALS, "sync", str(again)) from again
        journal = self._journal
        assert journal is not None
        self.journaled_groups += 1
        for part in parts:
            segment, group = part.log.active, part.group
            assert segment is not None and group is not None
            self._uncopied.setdefault(segment, []).extend(group.buffers)
            self._uncopied_bytes += group.length
            journal.dirty[segment] = segment.end + group.length
            self._decide(part, synced=False)
        if self._uncopied_bytes >= self._config.copy_bytes:
            await self._copy()
        return True

    async def _write_record(self, entries: Sequence[JournalEntry]) -> None:
        journal = self._journal
        assert journal is not None
        buffers, length = encode_record(
            entries, journal_id=journal.header.journal_id, number=journal.next_number, position=journal.end
        )
        await write_and_sync(self._disk, journal.path, journal.end, *buffers, END_OF_RECORDS)
        journal.end += length
        journal.next_number += 1

    async def _next_journal(self, *, after_failure: bool = False) -> None:
        """A fresh journal, zero-filled and synced; the one before is emptied in the background.

        After a failed sync of that one its file is not used again: no later sync of it can be believed.
        """
        if self._retiring is not None:
            await self._retiring  # at most two exist
        old = self._journal
        if old is not None:
            await self._copy()
            if self._uncopied:  # no room: the old journal must stay, so there cannot be a new one
                raise DiskFull(old.path)
        path = journal_path(self._journals_made)
        header = JournalHeader(
            self._work.random_u64(),
            self._journals_made,
            old.header.journal_id if old else 0,
            old.end if old else 0,
            self._config.journal_bytes,
        )
        if self._sparing is not None:
            await self._sparing
        try:
            await self._begin_spare(header)
        except DiskFailed as failure:  # nothing mentions it yet
            if after_failure:
                raise
            log.error("journal not made, trying another file", extra={"why": failure.why})
            await self._begin_spare(header)
        await self._disk.rename(SPARE_JOURNAL, path)
        await self._sync_name(JOURNALS)
        self._journals_made += 1
        self._journal = _Journal(path, header)
        if old is not None:
            await self._start_retiring(old, keep=not after_failure)

    async def _begin_spare(self, header: JournalHeader) -> None:
        if not self._has_spare:
            await self._make_spare()
        self._has_spare = False
        await write_and_sync(self._disk, SPARE_JOURNAL, 0, encode_journal_header(header), END_OF_RECORDS)

    async def _spare_beside(self) -> None:
        """Makes it beside the groups; if there is no room, the first group that needs it finds out."""
        try:
            await self._make_spare()
        except (DiskFull, DiskFailed) as error:
            log.warning("spare journal not made", extra={"why": str(error)})  # the first who needs one tries again
        except Exception as error:
            self._stop(error)
        finally:
            self._sparing = None

    async def _make_spare(self) -> None:
        """A file of a journal's size whose every block is allocated, so that no record can find the disk full."""
        await self._disk.make_directory(JOURNALS)
        await self._disk.remove(SPARE_JOURNAL)
        await self._disk.create(SPARE_JOURNAL)
        try:
            await write_and_sync(self._disk, SPARE_JOURNAL, 0, bytes(self._config.journal_bytes))
        except DiskFull:
            await self._disk.remove(SPARE_JOURNAL)
            raise
        self._has_spare = True

    # --- copying and emptying journals ---------------------------------------------------------------

    async def _copy(self, files_max: int | None = None) -> bool:
        """Writes journaled groups to their segments, unsynced: from now on they can be read there.

        At most to so many files; true if others are left, and the disk took what it was given.
        """
        if not self._uncopied:
            return False
        chosen = dict(itertools.islice(self._uncopied.items(), files_max))
        writes = [Write(segment.path, segment.copied, data) for segment, data in chosen.items()]
        ends = {segment: segment.end for segment in chosen}
        results = await self._disk.write(writes, sync=False)
        again: list[str] = []
        for (segment, end), result in zip(ends.items(), results, strict=True):
            if segment not in self._uncopied:
                # It was ended meanwhile, with all of this; retention may even have removed it.
                again += [segment.path] if result is None else []
            elif result is None or (isinstance(result, DiskFailed) and await self._is_gone(segment)):
                self._forget_copies(segment, end)
            elif isinstance(result, DiskFailed):
                raise result
            else:
                await self._disk_is_full(result)  # they stay in memory and in the journal until there is room
        if again:
            await self._disk.sync(again)  # the same bytes, which are safe; but nobody would ever sync the file again
        return bool(self._uncopied) and not any(results)

    async def _is_gone(self, segment: SegmentFile) -> bool:
        """Whether its file was removed with its log, or by whoever opened that again; nobody misses its bytes.

        Recovery sees it the same way: no other segment ever gets its id. The file of an open log is not gone but lost.
        """
        if not segment.released:
            return False
        try:
            await self._patiently(lambda: self._disk.size(segment.path))
        except FileNotFoundError:
            return True
        return False

    def _forget_copies(self, segment: SegmentFile, end: int) -> None:
        data = self._uncopied.pop(segment, None)
        if data is not None:
            self._uncopied_bytes -= end - segment.copied
        segment.copied = end
        segment.filled = max(segment.filled, end)

    async def _sync_segment(self, of: Committed, segment: SegmentFile) -> None:
        """The segment's file itself is safe up to its end. Raises DiskFull or DiskFailed."""
        if segment in self._uncopied:
            end = segment.end
            await write_and_sync(self._disk, segment.path, segment.copied, *self._uncopied[segment])
            if segment not in self._uncopied:  # copied by others meanwhile, perhaps behind the sync
                for failure in await self._disk.sync([segment.path]):
                    if failure is not None:
                        raise failure
            self._forget_copies(segment, end)
        elif segment.synced < segment.end:
            (failure,) = await self._disk.sync([segment.path])
            if failure is not None and of.durability != "os":
                raise failure
        segment.synced = segment.end

    async def _start_retiring(self, journal: _Journal, *, keep: bool) -> None:
        if self._retiring is not None:
            await self._retiring
        self._emptied = journal
        self._retiring = asyncio.create_task(self._retire(journal, keep), name="retire journal")

    async def _retire(self, journal: _Journal, keep: bool) -> None:
        """Syncs every segment the journal vouches for, then makes a spare of it, or removes it.

        If that fails the journal stays.
        """
        dirty = {segment: end for segment, end in journal.dirty.items() if segment.synced < end}
        if any(segment.copied < end for segment, end in dirty.items()):
            return  # no room for the copies yet: the journal is still needed, and recovery will redo it
        try:
            await self._patiently(lambda: self._sync_copies(dirty))
            if keep:
                try:
                    # Its records carry an id that no later journal has, so they can never be taken for new ones.
                    await self._disk.rename(journal.path, SPARE_JOURNAL)
                except DiskFull:  # not even for a name: the next journal is made from nothing
                    keep = False
            if not keep:
                await self._disk.remove(journal.path)
            await self._disk.sync_directory(JOURNALS)
            self._has_spare |= keep
            self._emptied = None
        except ResourcesShort as error:
            self._say_short(error)  # the journal stays, or its name does: a restart redoes it, which changes nothing
        except Exception as error:
            self._stop(error)

    async def _sync_copies(self, ends: Mapping[SegmentFile, int]) -> None:
        """Makes the files of these segments safe up to there. Raises DiskFailed."""
        results = await self._disk.sync([segment.path for segment in ends])
        for (segment, end), failure in zip(ends.items(), results, strict=True):
            # One that was rolled meanwhile is synced already, and retention may even have removed it.
            if failure is not None and segment.synced < end and not await self._is_gone(segment):
                raise failure
            segment.synced = max(segment.synced, end)

    # --- deciding -----------------------------------------------------------------------------------

    def _decide(self, part: Forming, *, synced: bool) -> None:
        """The part is safe: it becomes visible, then its producers are told."""
        segment, group = part.log.active, part.group
        assert segment is not None and group is not None
        part.decided = True
        segment.grow(group.header, group.length)
        self.size_bytes += group.length
        if synced:
            segment.synced = segment.copied = segment.end
        elif part.log.durability == "os":
            segment.copied = segment.end
        segment.filled = max(segment.filled, segment.copied)
        part.log.append_time = part.append_time
        part.log.committed(part.batches, segment)
        if not self.may_answer():
            # It is stored, and may turn up later as rescued. Nobody may rely on it, and nobody is told that he can.
            self._refuse(part, _fenced(part.log))
            return
        for done, offset, duplicate in part.done:
            if not done.done():  # the caller left; its batch stays
                done.set_result(Receipt(offset, part.log.epoch, part.log.durability, duplicate))
        if not self._ready:  # else the disk is given work first
            for tell in part.tell:
                try:
                    tell()
                except Exception:
                    log.exception("receipt not told", extra={"topic": part.log.topic})  # the log itself is well

    @staticmethod
    def _refuse(part: Forming, error: DanubeError) -> None:
        for done, _, _ in part.done:
            if not done.done():
                done.set_exception(error)

    def refuse_pending(self, of: Committed) -> None:
        """The log is closing: what it has not formed yet, it will not."""
        self._refuse_pending(of, LogClosed(of.topic))
        self._decided.fire()  # whoever waits for a group of it: there may be none any more

    def _refuse_pending(self, of: Committed, error: DanubeError) -> None:
        self._ready.pop(of, None)
        self._waiting.pop(of, None)
        while of.pending:
            batch, done, _ = of.pending.popleft()
            self.pending_bytes -= batch.header.size_bytes
            if not done.done():
                done.set_exception(error)

    def _stop(self, error: Exception) -> None:
        """The disk has failed for good: nothing is acknowledged any more, reads of what is committed go on."""
        if self.stopped is None:
            self.stopped = LogStopped(str(error) or repr(error))
            log.critical("log stopped", extra={"why": str(error)}, exc_info=not isinstance(error, DanubeError))
            self.when_stopped(self.stopped)
        for each in [*self._ready, *self._waiting, *self._making]:
            self._refuse_pending(each, self.stopped)
        self._wake.set()
        self._decided.fire()

    # --- no room ------------------------------------------------------------------------------------

    def _refuse_all(self, logs: Sequence[Committed]) -> None:
        """The segments have the size they may have. What is queued is refused, so nobody waits for an upload."""
        full, now = self._too_large, self._clock.elapsed()
        if full is None or now - self._asked_why >= _ROOM_CHECK_SECONDS:  # the answer is a look at every topic
            begins = full is None
            full = self._too_large = LogFull(self.size_bytes, self._bytes_max, self.why_not_freed())
            self._asked_why = now
            if begins:
                log.error("log full", extra={"size_bytes": self.size_bytes, "why": str(full)})
        for each in logs:
            self._refuse_pending(each, full)

    @property
    def too_large(self) -> LogFull | None:
        """Why publishes are refused, if they are because the segments are too large."""
        return self._too_large

    def freed(self, size_bytes: int) -> None:
        """Segments of so many bytes are not the log's any more."""
        self.size_bytes -= size_bytes
        if self._too_large is not None and self.size_bytes < self._bytes_max:
            self._too_large = None
            log.warning("log has room again", extra={"size_bytes": self.size_bytes})

    def excess_bytes(self) -> int:
        """How much should be freed now, so that the bound is not met; negative if nothing must."""
        return self.size_bytes - self._bytes_max * NEAR_PERCENT // 100

    def _say_short(self, error: ResourcesShort) -> None:
        if self._clock.elapsed() - self._said_short >= _SHORT_LINE_SECONDS:
            self._said_short = self._clock.elapsed()
            log.error("resources short", extra={"path": error.path, "why": error.why})

    async def _disk_is_full(self, error: DiskFull) -> None:
        if isinstance(error, ResourcesShort):
            self._say_short(error)  # the disk has room, and other files may well be open
            return
        if self._full is None:
            log.error("disk full", extra={"path": error.path})
            self._full = error
            await self._disk.remove(BALLAST)  # leaves the metadata store room to write
        self._full_until = self._clock.elapsed() + _ROOM_CHECK_SECONDS

    async def _room_again(self) -> bool:
        """Whether there is room for the ballast and a group; looks at most every _ROOM_CHECK_SECONDS."""
        if self._clock.elapsed() < self._full_until:
            return False
        needed = self._config.ballast_bytes + 2 * self._config.group_bytes
        if await self._disk.free_bytes() < needed:
            self._full_until = self._clock.elapsed() + _ROOM_CHECK_SECONDS
            return False
        await make_ballast(self._disk, self._config.ballast_bytes)
        log.warning("disk has room again")
        self._full = None
        return True


def _fenced(of: Committed) -> NotServed:
    return NotServed(of.topic, "this broker's lease was not renewed in time, so another may have it")


async def make_ballast(disk: Disk, size_bytes: int) -> None:
    """Room that can be given up at once when the disk is full. Doing without is not an error."""
    if size_bytes == 0:
        return
    with contextlib.suppress(DiskFull):  # not even for a name, or no descriptor
        try:
            if await disk.size(BALLAST) == size_bytes:
                return
            await disk.remove(BALLAST)
        except FileNotFoundError:
            pass
        await disk.create(BALLAST)
        for failure in await disk.write([Write(BALLAST, 0, [bytes(size_bytes)])], sync=True):
            if failure is not None:
                await disk.remove(BALLAST)
