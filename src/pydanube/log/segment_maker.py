"""Makes the next segments of logs, concurrently with the groups of the others.

A log without a segment, or with one that is full or old, leaves the queue while its next one is made. Nothing of it is
formed until then, so the snapshot in the new segment's header, and where it begins, are still true when the log adopts
it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from pydanube.core.commit.sessions import SESSION_SIZE_MAX_BYTES
from pydanube.core.commit.values import FAILURE, FIRST, PREPARED, SIZE
from pydanube.errors import DiskFailed, DiskFull
from pydanube.formats.segment import SNAPSHOT_LENGTH_MAX, UNSYNCED, SegmentHeader
from pydanube.log.catalog import SegmentFile
from pydanube.log.commit_context import CommitContext, SegmentedLog
from pydanube.log.journal_writer import JournalWriter
from pydanube.log.segment_files import place_segment
from pydanube.log.space import WalSpace

log = logging.getLogger(__name__)

# Segments made concurrently, of busy topics that have filled theirs, and of all others: more would only keep each
# other, and the commits, from the disk.
MAKING_MAX: Final = 8


class SegmentMaker:
    """Of all logs of one data directory."""

    def __init__(self, context: CommitContext, space: WalSpace, journal: JournalWriter) -> None:
        self._context = context
        self._space = space
        self._journal = journal
        self.tasks: dict[SegmentedLog, asyncio.Task[Exception | None]] = {}
        self._makers = asyncio.Semaphore(MAKING_MAX)
        self._makers_for_busy = asyncio.Semaphore(MAKING_MAX)  # logs that write much do not wait for many that do not

    def begin_where_needed(self, logs: Sequence[SegmentedLog]) -> None:
        """Logs with something to write and no segment that it fits into leave the queue until they have one."""
        now = self._context.clock.time_us()
        why_new_segment = self._context.machine.why_new_segment
        for each in logs:
            why = why_new_segment(each, each.active, now)
            if why is not None:
                self.begin(each, why)

    def begin(self, of: SegmentedLog, why: str) -> asyncio.Task[Exception | None]:
        """Only between two groups: what the new segment's header says of the log must hold until it is adopted."""
        assert self._context.exclusive.locked()
        self._context.machine.segment_begun(of)
        making = asyncio.create_task(self._make(of, why), name=f"make segment of {of.topic}")
        self.tasks[of] = making
        return making

    async def wait(self, of: SegmentedLog) -> None:
        """Returns when no segment of this log is being made."""
        while (making := self.tasks.get(of)) is not None:
            await asyncio.shield(making)

    async def _make(self, of: SegmentedLog, why: str) -> Exception | None:
        """Ends the log's segment and makes the next, concurrently with other logs' groups. Returns what went wrong.

        Nothing cancels it: between the rename and the adoption nothing may be given up. What goes wrong is this log's
        alone if nothing was made; else it is the disk's, and all stop.
        """
        context = self._context
        failure: Exception | None = None
        try:
            async with self._makers_for_busy if why in (SIZE, FAILURE) else self._makers:
                if context.machine.stopped is None:
                    if of.active is not None:
                        await self._journal.sync_segment(of.active, is_needed=of.is_synced)
                    await self.go_on_in_another(of)
                    if why not in (FIRST, PREPARED):
                        context.metrics.rotations[why] += 1
        except DiskFull as error:
            failure = error
            context.answer(context.machine.segment_not_made(of, why, error))
        except Exception as error:
            failure = error
            context.stop(error)
        del self.tasks[of]
        context.machine.segment_ended(of)
        context.wake.set()
        context.decided.fire()
        if isinstance(failure, DiskFull) and why != PREPARED:
            try:
                await self._space.disk_is_full(failure)
            except DiskFailed as error:
                context.stop(error)
        return failure

    async def go_on_in_another(self, of: SegmentedLog) -> None:
        of.adopt(await self._new_segment(of))

    async def _new_segment(self, of: SegmentedLog) -> SegmentFile:
        context = self._context
        previous = of.active
        if previous is None:
            await context.disk.make_directory(of.directory)
        header = SegmentHeader(
            segment_id=context.work.random_u64(),
            topic_hash=of.topic_hash,
            epoch=of.epoch,
            first_offset=of.head,
            created_us=context.clock.time_us(),
            previous_id=previous.segment_id if previous else 0,
            previous_end=previous.end if previous else 0,
            append_time=of.append_time,
            max_publish_time=of.max_publish_time,
            flags=0 if of.is_synced else UNSYNCED,
            snapshot=self._snapshot(of),
        )
        segment = await place_segment(context.disk, of.directory, header)
        await self._space.sync_name(of.directory)
        return segment

    def _snapshot(self, of: SegmentedLog) -> bytes:
        """For a segment's header. Never more than one can have that shall be read again."""
        if len(of.sessions) * SESSION_SIZE_MAX_BYTES <= SNAPSHOT_LENGTH_MAX:
            return of.sessions.to_bytes()
        kept = of.sessions.newest(SNAPSHOT_LENGTH_MAX)
        if kept.cut:
            self._context.metrics.sessions_cut["segment"] += kept.cut
            log.error("sessions of producers cut in a segment", extra={"topic": of.topic, "sessions": kept.cut})
        return kept.to_bytes(timed=False)
