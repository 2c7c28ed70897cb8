"""A place in a topic's log that moves forward: memory where it can, files where it must.

Every batch that comes from a file is verified (its checksums, its offset, its topic) before it is handed out; what does
not verify is named and never skipped. Reading costs memory for one piece of a file, or one batch if that is larger.
"""

from __future__ import annotations

from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from pydanube.errors import InvalidBatch, LogClosed, LogDamaged
from pydanube.formats.batch import HEADER_SIZE, Batch, decode, load, parse_header
from pydanube.formats.segment import GROUP_HEADER_SIZE, decode_group_header, pad
from pydanube.log.cache import LogTail
from pydanube.log.catalog import SegmentFile
from pydanube.log.searching import GroupSearch
from pydanube.ports import Disk

_PIECE_BYTES_MIN: Final = 64 * 1024


class _Unreadable(Exception):
    """What stands at the reader's position is not what must stand there."""


class Readable(Protocol):
    """What a reader needs of a log."""

    topic: str
    topic_hash: int
    head: int
    disk: Disk
    tail: LogTail
    closed: bool  # the next open may remove files that this one knows

    def segment_for(self, offset: int) -> SegmentFile: ...


class LogReader:
    """Reads forward from `offset`, which is always the next offset that was not returned yet."""

    __slots__ = ("_group_end", "_log", "_next", "_position", "_segment", "offset")

    def __init__(self, log: Readable, offset: int) -> None:
        self.offset = offset
        self._log = log
        self._segment: SegmentFile | None = None
        self._position = 0  # of a group header, or of a batch if below _group_end
        self._group_end = 0
        self._next = -1  # offset of what stands at _position

    async def read(self, bytes_max: int) -> list[Batch]:
        """Whole batches, the first holding `offset`; [] at the head. The total is about `bytes_max`.

        Raises OffsetOutOfRange where this disk does not hold the offset, LogDamaged where it cannot be read, LogClosed
        where the log is closed and the file gone: it is another one's by now.
        """
        if self.offset >= self._log.head:
            return []
        found = self._log.tail.read(self.offset, bytes_max)
        while not found:
            found = await self._read_file(bytes_max)
        self.offset = found[-1].header.end_offset
        return found

    async def _read_file(self, bytes_max: int) -> list[Batch]:
        """The batches of one piece of a file; [] if the piece held none for us."""
        segment = self._log.segment_for(self.offset)
        if segment is not self._segment or self._next > self.offset or self._next < 0:
            self._segment = segment
            self._position = self._group_end = segment.index.lookup(self.offset, segment.start)
            self._next = -1
        end = min(segment.end, segment.copied)
        try:
            if self._position >= end:
                raise _Unreadable("it ends too early")
            length = min(max(bytes_max, _PIECE_BYTES_MIN), end - self._position)
            piece = await self._log.disk.read(segment.path, self._position, length)
            while (needed := self._needed(piece, segment)) > len(piece):
                if self._position + needed > end:
                    raise _Unreadable("a batch reaches beyond its end")
                piece = await self._log.disk.read(segment.path, self._position, needed)
                if len(piece) < needed:
                    raise _Unreadable("the file ends too early")
            return self._take(memoryview(piece), segment)
        except _Unreadable as damage:
            await self._step_over(segment, end, str(damage))
            return []
        except FileNotFoundError:
            self._log.segment_for(self.offset)  # raises if it was retention
            if self._log.closed:
                raise LogClosed(self._log.topic) from None
            raise self._damage(segment, segment.end_offset, "the file is missing") from None

    async def _step_over(self, segment: SegmentFile, end: int, why: str) -> None:
        """Goes on with the next group that there is. Raises LogDamaged if our offset is not behind the damage."""
        behind = await GroupSearch(self._log.disk, segment.path, self._position + 1, end, segment.segment_id).next()
        lost_end = behind.first_offset if behind else segment.end_offset
        if behind is None or self.offset < lost_end:
            raise self._damage(segment, lost_end, why)
        self._position = self._group_end = behind.position
        self._next = behind.first_offset

    def _needed(self, piece: bytes, segment: SegmentFile) -> int:
        """How many bytes from the current position on make at least one batch."""
        start = 0
        if self._position >= self._group_end:
            group = decode_group_header(piece, 0, self._position, segment.segment_id)
            if group is None:
                raise _Unreadable("there is no group where one must be")
            if group.length == 0:
                return GROUP_HEADER_SIZE
            start = GROUP_HEADER_SIZE
        if len(piece) < start + HEADER_SIZE:
            return start + HEADER_SIZE
        try:
            header = parse_header(memoryview(piece)[start : start + HEADER_SIZE])
        except InvalidBatch as error:
            raise _Unreadable(error.what) from error
        return start + header.size_bytes

    def _take(self, piece: memoryview, segment: SegmentFile) -> list[Batch]:
        """Walks through the piece as far as it holds whole things."""
        found: list[Batch] = []
        place = 0
        while place < len(piece):
            if self._position >= self._group_end:
                if place + GROUP_HEADER_SIZE > len(piece):
                    break
                group = decode_group_header(piece, place, self._position, segment.segment_id)
                if group is None:
                    if found:
                        break  # hand out what is good; the next read meets the damage and says so
                    raise _Unreadable("there is no group where one must be")
                if self._next not in (-1, group.first_offset):
                    raise _Unreadable(f"offset {group.first_offset} follows {self._next - 1}")
                self._next = group.first_offset
                segment.index.add(group.first_offset, self._position)
                place += GROUP_HEADER_SIZE
                self._position += GROUP_HEADER_SIZE
                self._group_end = self._position + group.length
                continue
            batch = self._batch_at(piece[place:], segment, found)
            if batch is None:
                break
            size = batch.header.size_bytes + pad(batch.header.size_bytes)
            place += size
            self._position += size
            self._next = batch.header.end_offset
            if batch.header.rows and batch.header.end_offset > self.offset:
                found.append(batch)
        return found

    def _batch_at(self, piece: memoryview, segment: SegmentFile, found: list[Batch]) -> Batch | None:
        """The batch at the start of `piece`; None if it is not all there, or is damaged but not the first."""
        try:
            if len(piece) < HEADER_SIZE or len(piece) < parse_header(piece).size_bytes:
                return None
            batch = load(piece)
        except InvalidBatch as error:
            if found:
                return None
            raise _Unreadable(error.what) from error
        header = batch.header
        if header.base_offset != self._next or header.topic_hash != self._log.topic_hash:
            if found:
                return None
            raise _Unreadable(f"a batch with offset {header.base_offset} stands where {self._next} must be")
        return batch

    def _damage(self, segment: SegmentFile, end_offset: int, why: str) -> LogDamaged:
        first = max(self._next, segment.first_offset)
        return LogDamaged(self._log.topic, segment.path, self._position, first, end_offset, why)


def first_row_since(batch: Batch, time_us: int, first: int = 0) -> int | None:
    """The offset of the first row, from `first` on, that was published at or after `time_us`; None without one."""
    skipped = max(0, first - batch.header.base_offset)
    late = pc.greater_equal(decode(batch).column(0).slice(skipped).view(pa.int64()), time_us)
    row: int = pc.index(late, True).as_py()
    return None if row < 0 else batch.header.base_offset + skipped + row
