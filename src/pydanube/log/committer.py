"""The one task that writes: all topics' pending batches, one group at a time, acknowledged when they are on disk.

    submit ─► log.pending ─► form ─► write + sync ─► decide ─► receipts, head, cache, readers
                       ▲      ▲        │ no room: undo, DiskFull
                       │      └────────┘ sync failed: once more into a new file; again: stopped
                       └─ making a segment: the log waits its turn, the others do not

What is decided is `core/commit/machine.py`'s; this carries it out (writer.py, journal_writer.py). *Form* and *decide*
never wait, so between two awaits every log is consistent. commit_context.py draws the parts.

Small groups of many topics go to the commit journal: one write and one sync for all. Their bytes stay in memory
until they are also written to the segments (`copied`), and in the journal until those are synced (`synced`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, TypeAlias

from pydanube.core.commit.values import PREPARED, SPACE, CommitReceipt
from pydanube.errors import DiskFailed, DiskFull, LogClosed, LogFull, LogStopped
from pydanube.formats.batch import Batch
from pydanube.log import journal_writer
from pydanube.log.commit_context import Answer, CommitConfig, CommitContext, EncodedPart, SegmentedLog
from pydanube.log.journal_writer import JournalWriter
from pydanube.log.pressure import Pressure
from pydanube.log.segment_maker import SegmentMaker
from pydanube.log.space import WalSpace
from pydanube.log.writer import GroupWriter
from pydanube.log.zero_fill import ZeroFill
from pydanube.ports import Clock, Disk, Work
from pydanube.telemetry import WalMetrics

log = logging.getLogger(__name__)

COPY_AFTER_SECONDS: Final = 0.1

# Called after every group: batches, bytes, seconds from forming to decided.
Observe: TypeAlias = Callable[[int, int, float], None]


class Committer:
    """Writes for every log of one data directory. `run` is its only task; the rest is called by logs."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        work: Work,
        config: CommitConfig,
        *,
        observe: Observe,
        metrics: WalMetrics,
        may_answer: Callable[[], bool],
        on_stopped: Callable[[LogStopped], None],
        why_not_freed: Callable[[], str],
    ) -> None:
        self._clock = clock
        self._observe = observe
        self._context = context = CommitContext(
            disk, clock, work, config, metrics=metrics, may_answer=may_answer, on_stopped=on_stopped
        )
        self._machine = context.machine
        self._exclusive = context.exclusive
        self._wake = context.wake
        self._decided = context.decided
        self.pressure: Pressure = context.pressure
        self.space = WalSpace(disk, clock, config, why_not_freed)
        self._journal = JournalWriter(context, self.space)
        self._segments = SegmentMaker(context, self.space, self._journal)
        self._zeros = ZeroFill(context)
        self._writer = GroupWriter(context, self.space, self._journal, self._segments, self._zeros)
        self._copy_due = False
        self._napping: asyncio.Task[None] | None = None
        self.groups = 0

    @property
    def stopped(self) -> LogStopped | None:
        """Why nothing is acknowledged any more, if the disk has failed for good."""
        return self._machine.stopped

    @property
    def pending_bytes(self) -> int:
        """Of the batches that are queued."""
        return self._machine.pending_bytes

    @property
    def journaled_groups(self) -> int:
        return self._writer.journaled_groups

    # --- what logs call -----------------------------------------------------------------------------

    def submit(self, to: SegmentedLog, batch: Batch, on_decided: Callable[[], None] | None = None) -> Answer:
        """Queues the batch; the future gets its receipt, or why it was refused. Never waits.

        `on_decided` is for a caller that cannot wait for the loop's next turn, in which the future calls back: it is
        called as soon as the receipt is there, if nothing else waits for the disk. One call may stand for several
        batches.
        """
        done: asyncio.Future[CommitReceipt] = asyncio.get_running_loop().create_future()
        refused = self._machine.submit(to, batch, done, on_decided)
        if refused is not None:
            done.set_exception(refused)
        elif to in self._machine.ready:
            self._wake.set()
        return done

    def reservation_grew(self, to: SegmentedLog) -> None:
        """Batches of the log that waited for a larger reservation can go on."""
        if self._machine.reservation_grew(to):
            self._wake.set()

    async def expect_many(self) -> None:
        """Many topics are open: makes the file for the commit journal now, so that no producer waits for it."""
        await self._journal.make_spare_ahead()

    async def prepare(self, of: SegmentedLog) -> None:
        """The log is about to get its first batch: makes its segment. A full disk is left for that batch to find."""
        async with self._exclusive:
            making = self._segments.tasks.get(of)
            if making is None and of.active is None and not of.closed and self.stopped is None:
                making = self._segments.begin(of, PREPARED)
        if making is not None:
            await asyncio.shield(making)

    async def roll(self, of: SegmentedLog) -> None:
        """The log goes on in a new segment, so that the one it has can be dropped. On a full disk it keeps that."""
        while True:
            async with self._exclusive:
                active = of.active
                if of.closed or self.stopped is not None or (active is not None and active.end == active.start):
                    return
                begun = self._segments.tasks.get(of)
                making = begun or self._segments.begin(of, SPACE)
            failure = await asyncio.shield(making)
            if begun is None:
                if failure is not None and not isinstance(failure, DiskFull):
                    raise failure
                return

    async def made(self, of: SegmentedLog) -> None:
        """Returns when no segment of this log is being made."""
        await self._segments.wait(of)

    async def copy_journal_to_segments(self, directory: str) -> None:
        """What only a journal and memory have of the segments in there is safe in their files. For opening it again.

        Raises LogStopped, or DiskFull if there is no room.
        """
        async with self._exclusive:
            await self._journal.copy_directory(directory)

    async def sync_segment(self, of: SegmentedLog) -> None:
        """Everything committed of this log is in its segment file and synced there. For closing it."""
        assert of not in self._machine.making
        async with self._exclusive:
            if self.stopped is not None:
                raise self.stopped
            if of.active is not None:
                try:
                    await self._journal.sync_segment(of.active, is_needed=of.is_synced)
                except DiskFailed as error:
                    # A later sync of the same file may succeed without its lost pages: the journal must stay.
                    self._context.stop(error)
                    raise

    def awaits_turn(self, of: SegmentedLog) -> bool:
        """Whether its batches wait for nothing but their turn, or a segment that is being made."""
        return self._machine.awaits_turn(of)

    def refuse_pending(self, of: SegmentedLog) -> None:
        """The log is closing: refuses its batches that are in no group yet."""
        self._context.refuse_pending(of, LogClosed(of.topic))
        self._decided.fire()  # for callers that wait for a group of it: there may be none any more

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
            await self._journal.retire_last()
        await self._journal.retired()

    async def filled(self) -> None:
        """Ends the filling of files with zeros; returns when none is being filled."""
        await self._zeros.close()

    # --- the task -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Commits until cancelled, or until the disk has failed twice."""
        machine = self._machine
        while machine.stopped is None:
            await self._wake.wait()
            self._wake.clear()
            try:
                while self._can_write() and machine.stopped is None:
                    async with self._exclusive:
                        await self._commit_group()
                    self._decided.fire()
                if self._copy_due and machine.stopped is None:
                    async with self._exclusive:
                        self._copy_due = await self._journal.copy(journal_writer.COPY_FILES)
                    if self._copy_due:  # the rest behind the groups that wait by now
                        self._wake.set()
                elif self._journal.uncopied and self._napping is None:
                    self._napping = asyncio.create_task(self._nap(), name="copy when idle")
            except Exception as error:
                # Also a defect of ours: a task that dies silently would leave every producer waiting.
                self._context.stop(error)
            self._decided.fire()

    def _can_write(self) -> bool:
        filling = self._zeros.filling
        return any(each.active not in filling for each in self._machine.ready)

    async def _nap(self) -> None:
        """Delays the copies a little: one write then serves many groups of a topic."""
        await self._clock.sleep(COPY_AFTER_SECONDS)
        self._napping = None
        self._copy_due = True
        self._wake.set()

    async def _commit_group(self) -> None:
        machine, space, filling = self._machine, self.space, self._zeros.filling
        logs = [each for each in machine.ready if each.active not in filling]
        refusal: DiskFull | LogFull | None = space.full
        if refusal is not None and await space.is_free_again():
            refusal = None
        if refusal is None:
            refusal = space.why_too_large()
        if refusal is not None:
            for each in logs:
                self._context.refuse_pending(each, refusal)
            return
        self._segments.begin_where_needed(logs)
        line = [each for each in logs if each in machine.ready]
        parts, answers = machine.form(line, self._clock.time_us(), may_answer=self._context.may_answer())
        if answers:
            self._context.answer(answers)
        if not parts:
            return
        self.groups += 1
        began = self._clock.elapsed()
        try:
            await self._writer.write([EncodedPart.of(part) for part in parts])
        except Exception as error:
            self._context.answer(machine.given_up(parts, str(error)))
            raise
        batches, size = sum(len(part.batches) for part in parts), sum(part.size_bytes for part in parts)
        # By call_soon: receipts go out first, before the metrics are counted.
        asyncio.get_running_loop().call_soon(self._observe, batches, size, self._clock.elapsed() - began)
