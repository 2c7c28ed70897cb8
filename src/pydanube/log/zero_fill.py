"""Zeros ahead of small groups: overwriting allocated blocks syncs about twice as fast as growing a file.

Zeros are never needed, and no receipt waits for them: they are written in a pause of the topic when half are used, or,
if it makes none, between two of its groups. They are written only behind a group that was synced, and until they are,
nothing of the log is formed. So syncs of the file do not overlap, all that it holds is safe, and a failure costs
nothing but its further use. One file at a time, or they would stand between the other topics and the disk.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from pydanube.errors import DiskFailed, DiskFull
from pydanube.log.catalog import SegmentFile
from pydanube.log.commit_context import CommitContext, SegmentedLog
from pydanube.ports import Write

log = logging.getLogger(__name__)

FILL_BYTES: Final = 512 * 1024
FILL_BELOW_BYTES: Final = 64 * 1024
_ZEROS: Final = bytes(FILL_BYTES)
FILL_FROM_GROUP: Final = 3  # of a segment: a topic that gets a message now and then has no use for them
FILL_AFTER_SECONDS: Final = 0.002  # without a group: a pause


class ZeroFill:
    """Of all segments of one data directory."""

    def __init__(self, context: CommitContext) -> None:
        self._context = context
        self.filling: dict[SegmentFile, asyncio.Task[None]] = {}  # their logs wait until it is done, the others do not
        self._unfilled: dict[SegmentedLog, float] = {}  # logs that get zeros in their next pause: when they last wrote
        self._pausing: asyncio.Task[None] | None = None

    def after_group(self, of: SegmentedLog, segment: SegmentFile, length: int) -> None:
        """A group of this length was synced. Has zeros written in the next pause if half are used, now if there were
        none.
        """
        if length > FILL_BELOW_BYTES:
            return
        left = max(segment.zeroed, segment.start) - segment.end
        if left >= FILL_BYTES // 2 or segment.end + FILL_BYTES // 2 >= self._context.config.segment_bytes:
            return
        if segment.next_number < FILL_FROM_GROUP:
            return
        self._unfilled[of] = self._context.clock.elapsed()
        if left < -FILL_BYTES // 8 and not self.filling:
            self._begin(of)
        elif self._pausing is None:
            self._pausing = asyncio.create_task(self._fill_in_pauses(), name="fill when idle")

    async def close(self) -> None:
        """Returns when no file is being filled; none will be."""
        if self._pausing is not None:
            self._pausing.cancel()
        if self.filling:
            await asyncio.wait(self.filling.values())

    async def _fill_in_pauses(self) -> None:
        while self._unfilled:
            await self._context.clock.sleep(FILL_AFTER_SECONDS)
            while self.filling or await self._fill_rested():
                await asyncio.wait(self.filling.values())
        self._pausing = None

    async def _fill_rested(self) -> bool:
        """Begins with one log that has paused, if there is one."""
        async with self._context.exclusive:  # no group is on its way to where the zeros go
            rested = self._context.clock.elapsed() - FILL_AFTER_SECONDS
            return any(self._begin(each) for each, since in list(self._unfilled.items()) if since <= rested)

    def _begin(self, of: SegmentedLog) -> bool:
        assert self._context.exclusive.locked()
        self._unfilled.pop(of, None)
        segment = of.active
        if of.closed or of in self._context.machine.making or segment in self.filling:
            return False
        if segment is None or segment.synced < segment.end:
            return False
        self.filling[segment] = asyncio.create_task(self._fill(segment), name=f"fill {segment.path}")
        return True

    async def _fill(self, segment: SegmentFile) -> None:
        disk = self._context.disk
        start = max(segment.filled, segment.end)
        zeros = memoryview(_ZEROS)[: segment.end + FILL_BYTES - start]
        try:
            (result,) = await disk.write([Write(segment.path, start, [zeros])], sync=True)
            if result is None:
                segment.filled = segment.zeroed = start + len(zeros)
            elif isinstance(result, DiskFull):
                segment.zeroed = self._context.config.segment_bytes  # then it grows group by group
                segment.filled = segment.end
                await disk.truncate(segment.path, segment.end)
            elif not segment.released:
                log.error("sync failed", extra={"path": segment.path, "why": result.why})
                segment.failed = True
        except (OSError, DiskFull, DiskFailed) as error:  # nothing that is committed needs this
            log.warning("zeros not cut off", extra={"path": segment.path, "why": str(error)})
        finally:
            del self.filling[segment]
            self._context.wake.set()
