"""The segments of one topic as this process knows them: which file holds which offsets, up to which position."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

from pydanube.formats.segment import GroupHeader, SegmentHeader

# One index entry per this many bytes: a reader that starts anywhere scans at most so much for nothing.
INDEX_STEP_BYTES: Final = 256 * 1024


class PositionIndex:
    """Offsets to positions, sparse: 16 bytes per INDEX_STEP_BYTES of log."""

    __slots__ = ("_offsets", "_positions")

    def __init__(self) -> None:
        self._offsets = array("Q")
        self._positions = array("Q")

    def add(self, offset: int, position: int) -> None:
        """A group that begins with `offset` stands at `position`. Calls may repeat or go back; those are ignored."""
        if not self._positions or position >= self._positions[-1] + INDEX_STEP_BYTES:
            self._offsets.append(offset)
            self._positions.append(position)

    def lookup(self, offset: int, start: int) -> int:
        """A position at or before the group that holds `offset`; `start` if nothing better is known."""
        # Groups without rows share their offset with the next group, so the first of equals is the safe one.
        place = bisect_right(self._offsets, offset) - 1
        while place > 0 and self._offsets[place] == offset:
            place -= 1
        return self._positions[place] if place >= 0 else start


@dataclass(slots=True, eq=False)
class SegmentFile:
    """One file. Positions only grow.

        start ≤ synced ≤ end        start ≤ copied ≤ end

    [start, end) is committed. [copied, end) is in the commit journal and in memory but not written to this file
    yet; [synced, end) is safe only through the journal (or, with durability os, not safe).
    """

    path: str
    header: SegmentHeader
    start: int
    end: int
    end_offset: int
    next_number: int = 0
    synced: int = 0
    copied: int = 0
    filled: int = 0  # the file has bytes or zeros up to here
    zeroed: int = 0  # end of the zeros that were written ahead of groups
    failed: bool = False  # a sync failed behind `end`: no later one can be believed, so nothing more is written
    damaged: bool = False
    released: bool = False  # its log is closed or has dropped it: its file may be removed at any time
    index: PositionIndex = field(default_factory=PositionIndex)

    @property
    def first_offset(self) -> int:
        return self.header.first_offset

    @property
    def segment_id(self) -> int:
        return self.header.segment_id

    @property
    def created_us(self) -> int:
        return self.header.created_us

    def grow(self, group: GroupHeader, length: int) -> None:
        """The group at `end` is committed."""
        assert group.position == self.end and group.number == self.next_number
        self.index.add(group.first_offset, self.end)
        self.end += length
        self.end_offset = group.end_offset
        self.next_number += 1


def segment_holding(segments: list[SegmentFile], offset: int) -> SegmentFile | None:
    """The segment with `offset`. `segments` are in offset order and do not overlap; some may be empty."""
    place = bisect_right(segments, offset, key=_first_offset) - 1
    while place >= 0:
        segment = segments[place]
        if segment.first_offset <= offset < segment.end_offset:
            return segment
        if segment.end_offset > segment.first_offset:
            return None
        place -= 1  # an empty one: its neighbour before may hold the offset
    return None


def _first_offset(segment: SegmentFile) -> int:
    return segment.first_offset
