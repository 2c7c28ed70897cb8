"""Writes the commit journal, and what is in it to the segments.

    write ─► record synced: the groups are safe ─► copy ─► in their segments, unsynced ─► retire ─► synced there,
                                                                                          the journal is dropped

Groups that were recorded stay in memory until they are also written to their segments (`SegmentFile.copied`), and in
the journal until those are synced (`SegmentFile.synced`). At most two journals exist: one that takes records and one
that is being emptied.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydanube.core.commit.values import JournalState, RefusePart, Route, Stop
from pydanube.errors import DiskFailed, DiskFull, ResourcesShort
from pydanube.formats.journal import (
    END_OF_RECORDS,
    JOURNAL_HEADER_SIZE,
    RECORD_HEADER_SIZE,
    JournalEntry,
    JournalHeader,
    encode_journal_header,
    encode_record,
    entry_size,
)
from pydanube.log.catalog import SegmentFile
from pydanube.log.commit_context import Answer, CommitContext, EncodedPart
from pydanube.log.layout import JOURNALS, SPARE_JOURNAL, journal_path, write_and_sync
from pydanube.log.space import WalSpace
from pydanube.ports import Buffer, Write

log = logging.getLogger(__name__)

COPY_FILES: Final = 64  # written to between two groups


@dataclass(slots=True)
class _Journal:
    path: str
    header: JournalHeader
    end: int = JOURNAL_HEADER_SIZE
    next_number: int = 0
    dirty: dict[SegmentFile, int] = field(default_factory=dict)  # must be synced up to here before it may go


class JournalWriter:
    """The journals of one data directory. Only one call at a time (`CommitContext.exclusive`), unless it says so."""

    def __init__(self, context: CommitContext, space: WalSpace) -> None:
        self._context = context
        self._disk = context.disk
        self._space = space
        self._journal: _Journal | None = None
        self.journals_made = 0
        self._has_spare = False
        self._sparing: asyncio.Task[None] | None = None
        self.retiring: asyncio.Task[None] | None = None
        self._emptied: _Journal | None = None  # the one that is being retired, until its segments are synced
        self.uncopied: dict[SegmentFile, list[Buffer]] = {}
        self.uncopied_bytes = 0

    # --- records ------------------------------------------------------------------------------------

    def is_choice(self, parts: int) -> bool:
        """Whether so many parts may go to the journal at all: else there is no need to measure the record."""
        return self._context.machine.may_use_journal(parts, self._state())

    async def write(self, parts: Sequence[EncodedPart]) -> bool:
        """All parts as one record, if that is cheaper than a sync each.

        True: the parts are safe, or refused and decided. False: nothing was done. Raises DiskFailed if the log stops.
        """
        entries = []
        total = RECORD_HEADER_SIZE + len(END_OF_RECORDS)
        for each in parts:
            segment, group = each.segment, each.group
            entries.append(JournalEntry(segment.path, segment.segment_id, segment.end, group.buffers, group.length))
            total += group.length + entry_size(segment.path)
        route = self._context.machine.route(len(parts), total, self._state())
        if route is Route.DIRECT:
            return False
        if not await self._write_entries(parts, entries, route):
            return True
        journal = self._journal
        assert journal is not None
        for each in parts:
            segment, group = each.segment, each.group
            self.uncopied.setdefault(segment, []).extend(group.buffers)
            self.uncopied_bytes += group.length
            journal.dirty[segment] = segment.end + group.length
        return True

    def _state(self) -> JournalState:
        return JournalState(
            JOURNAL_HEADER_SIZE,
            self._journal.end if self._journal is not None else None,
            is_being_made=self._sparing is not None,
            is_retiring=self.retiring is not None and not self.retiring.done(),
        )

    async def _write_entries(
        self, encoded: Sequence[EncodedPart], entries: Sequence[JournalEntry], route: Route
    ) -> bool:
        """Whether the record is safe; false: the parts are refused."""
        machine, parts = self._context.machine, [each.part for each in encoded]
        try:
            if route is Route.NEW_JOURNAL:
                await self._next_journal()
        except DiskFull as error:
            await self._refuse(machine.journal_not_made(parts, error))
            return False
        try:
            await self._write_record(entries)
        except (DiskFull, DiskFailed) as failure:
            effect = machine.not_recorded(parts, failure)
            if isinstance(effect, RefusePart):
                await self._refuse(effect)
                return False
            log.error("journal sync failed", extra={"why": str(failure)})
            try:
                await self._space.retry(lambda: self._next_journal(after_failure=True))
                await self._space.retry(lambda: self._write_record(entries))
            except (DiskFull, DiskFailed) as again:
                effect = machine.not_recorded(parts, again)
                assert isinstance(effect, Stop)
                raise DiskFailed(JOURNALS, "sync", str(effect.error)) from again
        return True

    async def _refuse(self, effect: RefusePart[Answer]) -> None:
        self._context.answer(effect.answers)
        await self._space.disk_is_full(effect.error)

    async def _write_record(self, entries: Sequence[JournalEntry]) -> None:
        journal = self._journal
        assert journal is not None
        buffers, length = encode_record(
            entries, journal_id=journal.header.journal_id, number=journal.next_number, position=journal.end
        )
        await write_and_sync(self._disk, journal.path, journal.end, *buffers, END_OF_RECORDS)
        journal.end += length
        journal.next_number += 1

    # --- files --------------------------------------------------------------------------------------

    async def make_spare_ahead(self) -> None:
        """Many topics are open: makes the file for the journal now, so that no producer waits for it. At any time."""
        has_none = self._journal is None and not self._has_spare and self._sparing is None
        if has_none and self._context.machine.stopped is None:
            self._sparing = asyncio.create_task(self._spare_beside(), name="make spare journal")
        if self._sparing is not None:
            await asyncio.shield(self._sparing)

    async def _next_journal(self, *, after_failure: bool = False) -> None:
        """A fresh journal, zero-filled and synced; the one before is emptied in the background.

        After a failed sync of that one its file is not used again: no later sync of it can be believed.
        """
        if self.retiring is not None:
            await self.retiring  # at most two exist
        old = self._journal
        if old is not None:
            await self.copy()
            if self.uncopied:  # no room: the old journal must stay, so there cannot be a new one
                raise DiskFull(old.path)
        path = journal_path(self.journals_made)
        header = JournalHeader(
            self._context.work.random_u64(),
            self.journals_made,
            old.header.journal_id if old else 0,
            old.end if old else 0,
            self._context.config.journal_bytes,
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
        await self._space.sync_name(JOURNALS)
        self.journals_made += 1
        self._journal = _Journal(path, header)
        if old is not None:
            await self._start_retiring(old, keep=not after_failure)

    async def _begin_spare(self, header: JournalHeader) -> None:
        if not self._has_spare:
            await self._make_spare()
        self._has_spare = False
        await write_and_sync(self._disk, SPARE_JOURNAL, 0, encode_journal_header(header), END_OF_RECORDS)

    async def _spare_beside(self) -> None:
        """Makes it in the background; if the disk is full, the first group that needs it finds out."""
        try:
            await self._make_spare()
        except (DiskFull, DiskFailed) as error:
            log.warning(
                "spare journal not made", extra={"why": str(error)}
            )  # the first group that needs one tries again
        except Exception as error:
            self._context.stop(error)
        finally:
            self._sparing = None

    async def _make_spare(self) -> None:
        """A file of a journal's size whose every block is allocated, so that no record can find the disk full."""
        await self._disk.make_directory(JOURNALS)
        await self._disk.remove(SPARE_JOURNAL)
        await self._disk.create(SPARE_JOURNAL)
        try:
            await write_and_sync(self._disk, SPARE_JOURNAL, 0, bytes(self._context.config.journal_bytes))
        except DiskFull:
            await self._disk.remove(SPARE_JOURNAL)
            raise
        self._has_spare = True

    # --- copies in the segments ---------------------------------------------------------------------

    async def copy_if_due(self) -> None:
        if self._context.machine.copies_are_due(self.uncopied_bytes):
            await self.copy()

    async def copy(self, files_max: int | None = None) -> bool:
        """Writes recorded groups to their segments, unsynced: from now on they can be read there.

        At most to so many files; true if others are left, and the disk took what it was given.
        """
        if not self.uncopied:
            return False
        chosen = dict(itertools.islice(self.uncopied.items(), files_max))
        writes = [Write(segment.path, segment.copied, data) for segment, data in chosen.items()]
        ends = {segment: segment.end for segment in chosen}
        results = await self._disk.write(writes, sync=False)
        again: list[str] = []
        for (segment, end), result in zip(ends.items(), results, strict=True):
            if segment not in self.uncopied:
                # It was closed in the meantime, with all of this; retention may even have removed it.
                again += [segment.path] if result is None else []
            elif result is None or (isinstance(result, DiskFailed) and await self._is_gone(segment)):
                self.copied(segment, end)
            elif isinstance(result, DiskFailed):
                raise result
            else:
                await self._space.disk_is_full(result)  # they stay in memory and in the journal until there is room
        if again:
            await self._disk.sync(again)  # the same bytes, which are safe; but nothing would ever sync the file again
        return bool(self.uncopied) and not any(results)

    def copied(self, segment: SegmentFile, end: int) -> None:
        """The segment's file has everything up to `end`."""
        data = self.uncopied.pop(segment, None)
        if data is not None:
            self.uncopied_bytes -= end - segment.copied
        segment.copied = end
        segment.filled = max(segment.filled, end)

    async def copy_directory(self, directory: str) -> None:
        """What only a journal and memory have of the segments in there is safe in their files. For opening it again.

        Recovery does not ask a journal that is in use. Synced, too: the caller may remove the files, and then no
        journal must wait for their sync any more. Raises LogStopped, or DiskFull if there is no room.
        """

        def inside(segments: Iterable[SegmentFile]) -> list[SegmentFile]:
            return [segment for segment in segments if segment.path.startswith(f"{directory}/")]

        def unsynced() -> list[SegmentFile]:
            journals = [journal for journal in (self._emptied, self._journal) if journal is not None]
            vouched = inside(dict.fromkeys(segment for journal in journals for segment in journal.dirty))
            return [segment for segment in vouched if segment.synced < segment.end]

        machine = self._context.machine
        if self.retiring is not None and unsynced():
            await self.retiring
        if machine.stopped is not None and (inside(self.uncopied) or unsynced()):
            raise machine.stopped
        try:
            if inside(self.uncopied):
                await self.copy()
            for segment in inside(self.uncopied):
                raise DiskFull(segment.path)
            if segments := unsynced():
                await self._sync_copies({segment: segment.end for segment in segments})
        except DiskFailed as error:
            self._context.stop(error)
            assert machine.stopped is not None
            raise machine.stopped from error

    async def sync_segment(self, segment: SegmentFile, *, is_needed: bool) -> None:
        """The segment's file itself is safe up to its end. Raises DiskFull or DiskFailed, of a sync if `is_needed`.

        At any time, if nothing is added to the segment while it runs.
        """
        if segment in self.uncopied:
            end = segment.end
            await write_and_sync(self._disk, segment.path, segment.copied, *self.uncopied[segment])
            if segment not in self.uncopied:  # copied by another task in the meantime, perhaps behind the sync
                for failure in await self._disk.sync([segment.path]):
                    if failure is not None:
                        raise failure
            self.copied(segment, end)
        elif segment.synced < segment.end:
            (failure,) = await self._disk.sync([segment.path])
            if failure is not None and is_needed:
                raise failure
        segment.synced = segment.end

    async def _is_gone(self, segment: SegmentFile) -> bool:
        """Whether its file was removed with its log, or by another opening of that; its bytes are not missed.

        Recovery sees it the same way: no other segment ever gets its id. The file of an open log is not gone but lost.
        """
        if not segment.released:
            return False
        try:
            await self._space.retry(lambda: self._disk.size(segment.path))
        except FileNotFoundError:
            return True
        return False

    # --- the end of a journal -----------------------------------------------------------------------

    async def retire_last(self) -> None:
        """The journal is emptied into the segments, in the background: see `retired`."""
        await self.copy()
        if self._journal is not None:
            await self._start_retiring(self._journal, keep=False)
            self._journal = None

    async def retired(self) -> None:
        """Returns when no journal is left. At any time, behind `retire_last`."""
        if self.retiring is not None:
            await self.retiring
        if self._has_spare:
            await self._disk.remove(SPARE_JOURNAL)

    async def _start_retiring(self, journal: _Journal, *, keep: bool) -> None:
        if self.retiring is not None:
            await self.retiring
        self._emptied = journal
        self.retiring = asyncio.create_task(self._retire(journal, keep), name="retire journal")

    async def _retire(self, journal: _Journal, keep: bool) -> None:
        """Syncs every segment the journal vouches for, then makes a spare of it, or removes it.

        If that fails the journal stays.
        """
        dirty = {segment: end for segment, end in journal.dirty.items() if segment.synced < end}
        if any(segment.copied < end for segment, end in dirty.items()):
            return  # no room for the copies yet: the journal is still needed, and recovery will redo it
        try:
            await self._space.retry(lambda: self._sync_copies(dirty))
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
            self._space.log_short(error)  # the journal stays, or its name does: a restart redoes it, with no effect
        except Exception as error:
            self._context.stop(error)

    async def _sync_copies(self, ends: Mapping[SegmentFile, int]) -> None:
        """Makes the files of these segments safe up to there. Raises DiskFailed."""
        results = await self._disk.sync([segment.path for segment in ends])
        for (segment, end), failure in zip(ends.items(), results, strict=True):
            # One that was rolled in the meantime is synced already, and retention may even have removed it.
            if failure is not None and segment.synced < end and not await self._is_gone(segment):
                raise failure
            segment.synced = max(segment.synced, end)
