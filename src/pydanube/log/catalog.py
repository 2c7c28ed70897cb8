"""The segments of one topic as this process knows them: which file holds which offsets, up to which position."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

from pydanube.core.history.tiers import LogRun
from pydanube.formats.segment import GroupHeader, SegmentHeader

# One index entry per this many bytes: a reader that starts anywhere scans at most so much for nothing.
INDEX_STEP_BYTES: Final = 256 * 1024
RUNS_MAX: Final = 64  # as StorageInfo.log promises
SIMILAR: Final = 1.5  # row sizes that differ by less are told as one


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

    def points(self) -> Iterator[tuple[int, int]]:
        """Offset and position of every entry."""
        return zip(self._offsets, self._positions, strict=True)


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


def runs_of(segments: Iterable[SegmentFile], detailed_from: int, count_max: int = RUNS_MAX) -> list[LogRun]:
    """What segments hold, in order, as few runs: neighbours of one epoch whose rows are of similar size are one.

    Segments that lie wholly below `detailed_from` are looked at as a whole, others entry by entry of their index.
    """
    found: list[LogRun] = []
    for segment in segments:
        for run in _runs_in(segment, detailed=segment.end_offset > detailed_from):
            if found and _is_neighbour(found[-1], run) and _are_similar(found[-1], run):
                found[-1] = _together(found[-1], run)
            else:
                found.append(run)
    while len(found) > count_max:
        fewer: list[LogRun] = []
        for number, run in enumerate(found):
            if number % 2 and _is_neighbour(fewer[-1], run):
                fewer[-1] = _together(fewer[-1], run)
            else:
                fewer.append(run)
        if len(fewer) == len(found):  # each is an epoch of its own: what is newest is what is read
            return found[-count_max:]
        found = fewer
    return found


def _runs_in(segment: SegmentFile, *, detailed: bool) -> Iterator[LogRun]:
    points = [(segment.first_offset, segment.start)]
    if detailed:
        points += [point for point in segment.index.points() if point[0] > points[0][0]]
    points.append((segment.end_offset, segment.end))
    for (first, begin), (end, behind) in pairwise(points):
        if end > first:
            yield LogRun(first, end, behind - begin, segment.header.epoch)


def _is_neighbour(one: LogRun, other: LogRun) -> bool:
    return one.end == other.first and one.epoch == other.epoch


def _are_similar(one: LogRun, other: LogRun) -> bool:
    small, large = sorted((one.row_bytes, other.row_bytes))
    return large <= SIMILAR * small


def _together(one: LogRun, other: LogRun) -> LogRun:
    return LogRun(one.first, other.end, one.size_bytes + other.size_bytes, one.epoch)
