"""Carries out the commit decision on a group: writes it, then makes it visible, refuses it, or writes it again.

`core/commit/machine.py` decides; here are the files.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence

from pydanube.core.commit.machine import by_severity
from pydanube.core.commit.values import Commit, Refuse, Stop, WriteAgain
from pydanube.errors import DiskFailed, DiskFull, ResourcesShort
from pydanube.log.commit_context import Answer, CommitContext, EncodedPart
from pydanube.log.journal_writer import JournalWriter
from pydanube.log.layout import write_and_sync
from pydanube.log.segment_maker import SegmentMaker
from pydanube.log.space import WalSpace
from pydanube.log.zero_fill import ZeroFill
from pydanube.ports import Write, WriteResult

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
        synced = [each for each in parts if each.log.is_synced]
        if unsynced:
            await self._write_direct(unsynced, sync=False)
        if synced and not await self._write_journaled(synced):
            await self._write_direct(synced, sync=True)

    async def _write_journaled(self, parts: Sequence[EncodedPart]) -> bool:
        if not await self._journal.write(parts):
            return False
        if not parts[0].part.decided:
            self.journaled_groups += 1
            for each in parts:
                self._decide(each, None, synced=False)
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
            if failure is None:
                self._journal.copied(each.segment, each.segment.end)
            elif sync and isinstance(failure, DiskFailed):
                log.error("sync failed", extra={"topic": each.log.topic, "path": each.segment.path, "why": failure.why})
            effect = self._decide(each, failure, synced=sync)
            if isinstance(effect, Refuse):
                await self._no_room(each, effect)
            elif isinstance(effect, WriteAgain):
                await self._write_again(each)
            elif isinstance(effect, Stop):
                if not sync:
                    raise effect.error
                raise DiskFailed(each.segment.path, "sync", str(effect.error)) from effect.error
            elif sync:
                self._zeros.after_group(each.log, each.segment, each.group.length)

    def _decide(
        self, each: EncodedPart, failure: WriteResult, *, synced: bool
    ) -> Commit[Answer] | Refuse[Answer] | WriteAgain | Stop:
        context, segment = self._context, each.segment
        effect = context.machine.written(
            each.part, failure, may_answer=context.may_answer(), was_synced=segment.synced >= segment.end
        )
        if isinstance(effect, Commit):
            self._commit(each, effect, synced=synced)
        return effect

    def _commit(self, each: EncodedPart, effect: Commit[Answer], *, synced: bool) -> None:
        """The part is safe: it becomes visible, then its producers are told."""
        segment, group, target = each.segment, each.group, each.log
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

    async def _write_again(self, each: EncodedPart) -> None:
        """What the old file holds behind its last good sync is unknown for ever, so it ends there."""
        machine, segment, disk = self._context.machine, each.segment, self._context.disk
        failure: WriteResult = None
        try:
            tentative = machine.set_aside(each.part)
            await self._space.patiently(lambda: self._segments.go_on_in_another(each.log))
            machine.put_back(each.part, tentative)
            fresh = each.log.active
            assert fresh is not None
            each.move_to(fresh)
            await self._space.patiently(lambda: write_and_sync(disk, fresh.path, fresh.end, *each.group.buffers))
        except (DiskFull, DiskFailed) as again:
            failure = again
        effect = self._decide(each, failure, synced=True)
        if isinstance(effect, Stop):
            raise DiskFailed(segment.path, "sync", str(effect.error)) from failure

    async def _no_room(self, each: EncodedPart, effect: Refuse[Answer]) -> None:
        """Part of the group stands behind the segment's end; it is no group and the next one overwrites it."""
        segment = each.segment
        self._context.answer(effect.answers)
        await self._space.disk_is_full(effect.error)
        with contextlib.suppress(ResourcesShort):  # what stands there is overwritten all the same
            await self._context.disk.truncate(segment.path, segment.copied)  # the journal has what is behind it
        segment.filled = segment.zeroed = segment.copied
