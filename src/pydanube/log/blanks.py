"""A file of zeros, made ahead, that becomes the next segment of a topic that grows fast.

A sync of a file that grows waits until the file system has written down its new blocks, and with them whatever other
files were given just before: beside an object that is being stored, one such sync in a hundred took 20 to 110 ms, and
3 to 6 where the blocks were there already and only had to be overwritten.

    none ── a topic is busy ──► making ──► ready ── a busy topic gets a segment ──► taken: header, rename
     ▲                            │          │
     └── no room, disk failed ────┴──────────┘      and for a while no other is made

What is taken is a segment like any other, with more zeros behind its end. Of those there are at most LONG_MAX that are
being written: the one that has been quiet longest gives its zeros back.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from typing import Final

from pydanube.errors import DanubeError, DiskFailed, DiskFull
from pydanube.log.catalog import SegmentFile
from pydanube.log.layout import BLANK, JOURNALS, write_and_sync
from pydanube.log.segment import SegmentHeader, encode_segment_header, file_name
from pydanube.ports import Clock, Disk

log = logging.getLogger(__name__)

BUSY_SECONDS: Final = 1.0
LONG_MAX: Final = 4
PIECE_BYTES: Final = 256 * 1024
PIECE_SECONDS: Final = 0.008  # between two pieces, so that syncs of the log have the disk: 32 MiB/s
ROOM: Final = 4  # there must be room for so many
AGAIN_SECONDS: Final = 60.0
_ZEROS: Final = bytes(PIECE_BYTES)


class Blanks:
    """One at a time, of `size_bytes`, for topics that grow by `busy_bytes` in a second; 0: for none."""

    def __init__(self, disk: Disk, clock: Clock, size_bytes: int, busy_bytes: int) -> None:
        self._disk = disk
        self._clock = clock
        self._size_bytes = size_bytes
        self._busy_bytes = busy_bytes
        self._ready = False
        self._making: asyncio.Task[None] | None = None
        self._unwanted = False
        self._not_before = -math.inf
        self._long: dict[SegmentFile, None] = {}  # those that are being written and were blanks

    def grown(self, segment: SegmentFile) -> None:
        """A group was written to the segment, and synced there. Never waits."""
        if not self._busy_bytes or segment.end - segment.noted_end < self._busy_bytes:
            return
        now = self._clock.elapsed()
        segment.is_busy = now - segment.noted_at <= BUSY_SECONDS
        segment.noted_end, segment.noted_at = segment.end, now
        if segment.is_busy and not self._ready and self._making is None and now >= self._not_before:
            self._unwanted = False
            self._making = asyncio.create_task(self._make(), name="make a blank segment")

    def suits(self, segment: SegmentFile) -> bool:
        """Whether the topic of this segment is busy now, and there is a blank for it.

        While LONG_MAX other topics are busy there is none: they would take them from each other.
        """
        quiet_from = self._clock.elapsed() - BUSY_SECONDS
        if not self._ready or not segment.is_busy or segment.noted_at < quiet_from:
            return False
        return segment in self._long or len(self._long) < LONG_MAX or self._quietest().noted_at < quiet_from

    def was_one(self, segment: SegmentFile) -> bool:
        return segment in self._long

    async def take(self, directory: str, header: SegmentHeader, previous: SegmentFile) -> SegmentFile | None:
        """The blank as the segment behind `previous`; None if nothing came of it, and nothing is left of it.

        It survives from the moment its name appears, and bounds `previous`: whoever calls adopts it at once.
        """
        assert self._ready
        self._ready = False
        await self.trim(previous)
        while len(self._long) >= LONG_MAX:
            await self.trim(self._quietest())
        path = f"{directory}/{file_name(header.first_offset, header.segment_id)}"
        encoded = encode_segment_header(header)
        try:
            await write_and_sync(self._disk, BLANK, 0, encoded)
            await self._disk.rename(BLANK, path)
        except (DiskFull, DiskFailed) as error:
            if await self._is_there(path):
                raise DiskFailed(path, "rename", str(error)) from error
            log.warning("segment made ahead not used", extra={"path": path, "why": str(error)})
            await self.drop()
            self._not_before = math.inf  # another file system, perhaps: it would be no different next time
            return None
        await self._disk.sync_directory(directory)
        start = len(encoded)
        filled = max(start, self._size_bytes)
        segment = SegmentFile(path, header, start, start, header.first_offset, 0, start, start, filled)
        segment.noted_end, segment.noted_at = start, self._clock.elapsed()
        self._long[segment] = None
        return segment

    async def trim(self, segment: SegmentFile) -> None:
        """The segment gives back the zeros behind its end."""
        if segment not in self._long:
            return
        del self._long[segment]
        if segment.copied < segment.filled:
            with suppress(FileNotFoundError, DiskFull, DiskFailed):  # gone with its topic; or it keeps them
                await self._disk.truncate(segment.path, segment.copied)
            segment.filled = segment.copied

    async def drop(self) -> None:
        """There is none any more, all zeros are given back, and for a while no other is made."""
        self._not_before = self._clock.elapsed() + AGAIN_SECONDS
        self._unwanted = True
        if self._making is not None:
            await self._making
        self._ready = False
        await self._remove()
        for segment in list(self._long):
            await self.trim(segment)

    def _quietest(self) -> SegmentFile:
        return min(self._long, key=lambda segment: segment.noted_at)

    async def _is_there(self, path: str) -> bool:
        try:
            await self._disk.size(path)
        except FileNotFoundError:
            return False
        return True

    async def _remove(self) -> None:
        with suppress(DiskFull, DiskFailed):  # then the next start removes it
            await self._disk.remove(BLANK)

    async def _make(self) -> None:
        try:
            if await self._disk.free_bytes() < ROOM * self._size_bytes:
                self._not_before = self._clock.elapsed() + AGAIN_SECONDS
                return
            await self._disk.make_directory(JOURNALS)
            await self._disk.remove(BLANK)
            await self._disk.create(BLANK)
            for position in range(0, self._size_bytes, PIECE_BYTES):
                if self._unwanted:
                    return
                piece = memoryview(_ZEROS)[: self._size_bytes - position]
                await write_and_sync(self._disk, BLANK, position, piece)
                await self._clock.sleep(PIECE_SECONDS)
            self._ready = not self._unwanted
        except (DanubeError, OSError) as error:  # topics do without
            log.warning("no segment made ahead", extra={"why": str(error)})
            self._not_before = self._clock.elapsed() + AGAIN_SECONDS
            await self._remove()
        finally:
            self._making = None
