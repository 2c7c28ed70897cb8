"""The newest batches of all topics in memory, bounded in bytes over all of them together.

What leaves is the oldest batch of the whole broker, so a topic that is written and read now keeps its tail at the cost
of one that is quiet. A batch that is only in the commit journal and not in its segment file yet is never dropped:
readers could not find it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

from pydanube.formats.batch import Batch
from pydanube.log.catalog import SegmentFile

# What a cached batch costs in Python objects, in addition to its bytes.
_OVERHEAD_BYTES: Final = 1024


class _Cached(NamedTuple):
    base_offset: int
    batch: Batch
    segment: SegmentFile
    end: int  # position behind its group


class LogTail:
    """One topic's part of the cache: contiguous up to the head."""

    __slots__ = ("batches", "dropped", "start")

    def __init__(self) -> None:
        self.batches: list[_Cached] = []
        self.start = 0  # the ones before were dropped; they are deleted in bulk
        self.dropped = False

    @property
    def first_offset(self) -> int | None:
        return self.batches[self.start].base_offset if self.start < len(self.batches) else None

    def read(self, offset: int, bytes_max: int) -> list[Batch]:
        """Batches from the one with `offset` on, up to about `bytes_max`; empty if `offset` is not here."""
        place = bisect_right(self.batches, offset, lo=self.start, key=_base_offset) - 1
        if place < self.start:
            return []
        first = self.batches[place].batch
        if offset >= first.header.end_offset:
            return []
        found = [first]
        size = first.header.size_bytes
        for cached in self.batches[place + 1 :] if len(self.batches) - place < 64 else _from(self.batches, place + 1):
            size += cached.batch.header.size_bytes
            if size > bytes_max:
                break
            found.append(cached.batch)
        return found


class TailCache:
    __slots__ = ("_bytes_max", "_order", "size_bytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._order: deque[tuple[LogTail, int]] = deque()
        self.size_bytes = 0

    def new_tail(self) -> LogTail:
        return LogTail()

    def add(self, tail: LogTail, batch: Batch, segment: SegmentFile) -> None:
        """The batch was committed to `segment`, whose end is already behind it."""
        size = batch.header.size_bytes + _OVERHEAD_BYTES
        tail.batches.append(_Cached(batch.header.base_offset, batch, segment, segment.end))
        self._order.append((tail, size))
        self.size_bytes += size
        while self.size_bytes > self._bytes_max and self._order:
            oldest, size = self._order[0]
            if not oldest.dropped:
                cached = oldest.batches[oldest.start]
                if cached.end > cached.segment.copied:
                    break
                _drop_first(oldest)
            self._order.popleft()
            self.size_bytes -= size

    def without(self, tail: LogTail, before: int) -> LogTail:
        """What the tail has from `before` on, as a tail of its own; the rest is not in memory any more."""
        kept = self.new_tail()
        rest = [cached for cached in tail.batches[tail.start :] if cached.base_offset >= before]
        self.drop(tail)
        for cached in rest:
            size = cached.batch.header.size_bytes + _OVERHEAD_BYTES
            kept.batches.append(cached)
            self._order.append((kept, size))
            self.size_bytes += size
        return kept

    def drop(self, tail: LogTail) -> None:
        """The topic is closed. Its entries in the order of age go when their turn comes."""
        tail.dropped = True
        tail.batches = []
        tail.start = 0


def _drop_first(tail: LogTail) -> None:
    # The slot is overwritten so that the batch is freed now, not when the list is compacted.
    tail.batches[tail.start] = tail.batches[tail.start]._replace(batch=_NOTHING)
    tail.start += 1
    if tail.start > 32 and tail.start * 2 > len(tail.batches):
        del tail.batches[: tail.start]
        tail.start = 0


def _from(batches: list[_Cached], place: int) -> list[_Cached]:
    return batches[place : place + 4096]


def _base_offset(cached: _Cached) -> int:
    return cached.base_offset


_NOTHING: Final = Batch((), b"", b"")  # type: ignore[arg-type]
