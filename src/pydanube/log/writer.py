"""Carries out the commit decision on a group: writes it, then makes it visible, refuses it, or writes it again.

`core/commit/machine.py` decides; here are the files.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import assert_never

from pydanube.core.commit.machine import by_severity
from pydanube.core.commit.values import RefusePart, Stop, WriteAgain
from pydanube.errors import DiskFailed, DiskFull
from pydanube.log.commit_context import Answer, CommitContext, EncodedPart
from pydanube.log.journal_writer import JournalWriter
from pydanube.log.layout import write_and_sync
from pydanube.log.segment_maker import SegmentMaker
from pydanube.log.space import WalSpace
from pydanube.log.zero_fill import ZeroFill
from pydanube.ports import Write

log = logging.getLogger(__name__)


class GroupWriter:
    """Writes one group at a time, while `CommitContext.exclusive` is held."""

    def __init__(
        self, context: CommitContext, space: WalSpace, journal: JournalWriter, segments: SegmentMaker, zeros: ZeroFill
    ) -> None:
        self._context = context
        self._space = space
        self._journal = journal
        self._segments = segments
        self._zeros = zeros
        self.journaled_groups = 0

    async def write(self, parts: Sequence[EncodedPart]) -> None:
        """Returns when every part is decided. Raises if the log must stop; then some may not be."""
        unsynced = [each for each in parts if not each.log.is_synced]
        if unsynced:
            await self._write_direct(unsynced, sync=False)
            parts = [each for each in parts if each.log.is_synced]
        if len(parts) > 1 and self._journal.is_choice(len(parts)) and await self._write_journaled(parts):
            return
        if parts:
            await self._write_direct(parts, sync=True)

    async def _write_journaled(self, parts: Sequence[EncodedPart]) -> bool:
        if not await self._journal.write(parts):
            return False
        if not parts[0].part.decided:  # else they are refused
            self.journaled_groups += 1
            for each in parts:
                self._commit(each, synced=False)
            await self._journal.copy_if_due()
        return True

    async def _write_direct(self, parts: Sequence[EncodedPart], *, sync: bool) -> None:
        """Each part to its own file."""
        # In one piece: if there is no room for what comes before it, the group must not be whole.
        uncopied = self._journal.uncopied
        writes = [
            Write(each.segment.path, each.segment.copied, [*uncopied.get(each.segment, ()), *each.group.buffers])
            for each in parts
        ]
        results = await self._context.disk.write(writes, sync=sync)
        for place in by_severity(results):
            each, failure = parts[place], results[place]
            if failure is not None:
                await self._not_written(each, failure, sync=sync)
                continue
            self._journal.copied(each.segment, each.segment.end)
            self._commit(each, synced=sync)
            if sync:
                self._zeros.after_group(each.log, each.segment, each.group.length)

    def _commit(self, each: EncodedPart, *, synced: bool) -> None:
        """The part is safe: it becomes visible, then its producers get their receipts."""
        segment, group, target = each.segment, each.group, each.log
        effect = self._context.machine.committed(each.part, may_answer=self._context.may_answer())
        segment.grow(group.header, group.length)
        self._space.size_bytes += group.length
        if synced:
            segment.synced = segment.copied = segment.end
        elif not target.is_synced:
            segment.copied = segment.end
        segment.filled = max(segment.filled, segment.copied)
        target.committed(each.batches, segment)
        self._context.answer(effect.answers)
        for on_decided in effect.on_decided:
            try:
                on_decided()
            except Exception:
                log.exception("receipt not told", extra={"topic": target.topic})  # the log itself is well

    async def _not_written(self, each: EncodedPart, failure: DiskFull | DiskFailed, *, sync: bool) -> None:
        segment = each.segment
        if sync and isinstance(failure, DiskFailed):
            log.error("sync failed", extra={"topic": each.log.topic, "path": segment.path, "why": failure.why})
        effect = self._context.machine.not_written(each.part, failure, was_synced=segment.synced >= segment.end)
        match effect:
            case RefusePart():
                await self._on_no_space(each, effect)
            case WriteAgain():
                await self._write_again(each)
            case Stop(error):
                if not sync:
                    raise error
                raise DiskFailed(segment.path, "sync", str(error)) from error
            case _:
                assert_never(effect)

    async def _write_again(self, each: EncodedPart) -> None:
        """What the old file holds behind its last good sync stays unknown, so it ends there."""
        machine, segment, disk = self._context.machine, each.segment, self._context.disk
        try:
            tentative = machine.set_aside(each.part)
            await self._space.retry(lambda: self._segments.go_on_in_another(each.log))
            machine.put_back(each.part, tentative)
            fresh = each.log.active
            assert fresh is not None
            each.move_to(fresh)
            await self._space.retry(lambda: write_and_sync(disk, fresh.path, fresh.end, *each.group.buffers))
        except (DiskFull, DiskFailed) as again:
            effect = machine.not_written(each.part, again)
            assert isinstance(effect, Stop), "one more write is all that a part gets"
            raise DiskFailed(segment.path, "sync", str(effect.error)) from again
        self._commit(each, synced=True)

    async def _on_no_space(self, each: EncodedPart, effect: RefusePart[Answer]) -> None:
        """Part of the group stands behind the segment's end; it is no group and the next one overwrites it."""
        segment = each.segment
        self._context.answer(effect.answers)
        await self._space.disk_is_full(effect.error)
        with contextlib.suppress(DiskFull):  # or without a descriptor: what stands there is overwritten in any case
            await self._context.disk.truncate(segment.path, segment.copied)  # the journal has what is behind it
        segment.filled = segment.zeroed = segment.copied
