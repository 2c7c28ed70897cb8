"""Half-open offset ranges: available, acknowledged, missing.

    OffsetRange   [first, end)
    OffsetRanges  a set of offsets, kept as sorted ranges that never touch:   ──[0,5)──[9,12)──
    RangeMap      the same with a value per range; neighbours with equal values are one range

A million contiguous offsets cost as much as one. Every operation is a binary search and a list splice, so it
depends on how many ranges it touches, never on how many offsets they hold. `work` counts the ranges touched: what
must stay small whatever a subscription looks like is asserted by tests and simulators, not hoped for.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator
from itertools import accumulate
from typing import Final, Generic, NamedTuple, NewType, TypeVar
from zlib import crc32

Offset = NewType("Offset", int)
V = TypeVar("V")

FORMAT: Final = 1
CRC_SIZE_BYTES: Final = 4
OFFSET_END_MAX: Final = 2**63
STRETCH: Final = 4096  # ranges (or bytes) that are encoded or decoded before other tasks may have a turn


class WorkCounter:
    """How many ranges were touched one by one, in this process. Only differences mean something.

    Ranges that the interpreter sums or copies as a block count as a 64th: they cost about as much.
    """

    __slots__ = ("ranges",)

    def __init__(self) -> None:
        self.ranges = 0


work: Final = WorkCounter()


class OffsetRange(NamedTuple):
    """The offsets from `first` up to, not including, `end`."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


class RangePiece(NamedTuple, Generic[V]):
    """A range of a RangeMap and its value."""

    first: int
    end: int
    value: V


class OffsetRanges:
    """A set of offsets.

    Invariant: `_firsts` and `_ends` are as long as each other, and first < end < next first < next end ...
    """

    __slots__ = ("_count", "_ends", "_firsts")

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self._count = 0
        for first, end in ranges:
            self.add(first, end)

    @property
    def count(self) -> int:
        """How many offsets."""
        return self._count

    @property
    def range_count(self) -> int:
        """How many ranges they form."""
        return len(self._firsts)

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __iter__(self) -> Iterator[OffsetRange]:
        return map(OffsetRange, tuple(self._firsts), tuple(self._ends))

    def __contains__(self, offset: object) -> bool:
        assert isinstance(offset, int)
        at = bisect_right(self._firsts, offset) - 1
        return at >= 0 and offset < self._ends[at]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, OffsetRanges):
            return NotImplemented
        return self._firsts == other._firsts and self._ends == other._ends

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        return f"OffsetRanges({[tuple(r) for r in self]})"

    def copy(self) -> OffsetRanges:
        same = OffsetRanges()
        same._firsts, same._ends, same._count = self._firsts.copy(), self._ends.copy(), self._count
        return same

    def clear(self) -> None:
        self._firsts.clear()
        self._ends.clear()
        self._count = 0

    def add(self, first: int, end: int) -> int:
        """Returns how many offsets are new."""
        if first >= end:
            return 0
        # Ranges [low, high) overlap or touch the new one and become part of it.
        low = bisect_left(self._ends, first)
        high = bisect_right(self._firsts, end)
        work.ranges += high - low + 1
        known = 0
        if low < high:
            known = sum(self._ends[low:high]) - sum(self._firsts[low:high])
            joined_first = min(first, self._firsts[low])
            joined_end = max(end, self._ends[high - 1])
        else:
            joined_first, joined_end = first, end
        self._firsts[low:high] = [joined_first]
        self._ends[low:high] = [joined_end]
        new = joined_end - joined_first - known
        self._count += new
        return new

    def remove(self, first: int, end: int) -> int:
        """Returns how many offsets were there."""
        if first >= end:
            return 0
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        work.ranges += 1
        if low >= high:
            return 0
        work.ranges += high - low
        known = sum(self._ends[low:high]) - sum(self._firsts[low:high])
        left, right = self._firsts[low], self._ends[high - 1]
        firsts: list[int] = []
        ends: list[int] = []
        if left < first:
            firsts.append(left)
            ends.append(first)
        if end < right:
            firsts.append(end)
            ends.append(right)
        self._firsts[low:high] = firsts
        self._ends[low:high] = ends
        gone = known - sum(ends) + sum(firsts)
        self._count -= gone
        return gone

    def union(self, other: Iterable[tuple[int, int]]) -> OffsetRanges:
        both = self.copy()
        for first, end in other:
            both.add(first, end)
        return both

    def subtract(self, other: Iterable[tuple[int, int]]) -> OffsetRanges:
        rest = self.copy()
        for first, end in other:
            rest.remove(first, end)
        return rest

    def first_gap(self, start: int) -> int:
        """The lowest offset at or above `start` that is not in the set."""
        at = bisect_right(self._firsts, start) - 1
        return self._ends[at] if at >= 0 and start < self._ends[at] else start

    def next_first(self, start: int) -> int | None:
        """Where the next range at or above `start` begins; None if there is none."""
        at = bisect_left(self._firsts, start)
        return self._firsts[at] if at < len(self._firsts) else None

    def lowest(self) -> OffsetRange | None:
        return OffsetRange(self._firsts[0], self._ends[0]) if self._firsts else None

    def count_in(self, first: int, end: int) -> int:
        """How many offsets of [first, end) are in the set. Touches no range one by one."""
        if first >= end:
            return 0
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        if low >= high:
            return 0
        firsts, ends = self._firsts, self._ends
        if 2 * (high - low) <= len(firsts):
            work.ranges += (high - low) // 64 + 1
            inside = sum(ends[low:high]) - sum(firsts[low:high])
        else:
            work.ranges += (len(firsts) - high + low) // 64 + 1
            inside = self._count - sum(ends[:low]) + sum(firsts[:low]) - sum(ends[high:]) + sum(firsts[high:])
        return inside - max(0, first - firsts[low]) - max(0, ends[high - 1] - end)

    def overlap(self, first: int, end: int) -> list[OffsetRange]:
        """The parts of [first, end) that are in the set."""
        if first >= end:
            return []
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        if low >= high:
            return []
        work.ranges += high - low
        found = list(map(OffsetRange, self._firsts[low:high], self._ends[low:high]))
        found[0] = OffsetRange(max(first, found[0].first), found[0].end)
        found[-1] = OffsetRange(found[-1].first, min(end, found[-1].end))
        return found

    def gaps(self, first: int, end: int) -> list[OffsetRange]:
        """The parts of [first, end) that are not in the set."""
        gaps: list[OffsetRange] = []
        for known in self.overlap(first, end):
            if first < known.first:
                gaps.append(OffsetRange(first, known.first))
            first = known.end
        if first < end:
            gaps.append(OffsetRange(first, end))
        return gaps

    # --- bytes ------------------------------------------------------------------------------------

    def encode(self, base: int, size_max_bytes: int) -> bytes:
        """The lowest ranges at or above `base` that fit into `size_max_bytes`; the rest is left out.

            | format u8 | base | gap, length | gap, length | ... | crc32 u32 |

        All numbers are LEB128; a gap is counted from the end of the range before (the first from `base`).
        """
        return finished(self.encoding(base, size_max_bytes))[0]

    def encoding(self, base: int, size_max_bytes: int) -> Generator[None, None, tuple[bytes, int]]:
        """As `encode`, with pauses, in which the set must not change. Returns also how many offsets the bytes hold."""
        out = bytearray([FORMAT])
        _put_number(out, base)
        free_bytes = size_max_bytes - CRC_SIZE_BYTES
        previous = base
        held = 0
        at = bisect_right(self._ends, base)
        while at < len(self._firsts):
            upto = at + STRETCH
            for first, end in zip(self._firsts[at:upto], self._ends[at:upto], strict=True):
                gap, length = max(first, base) - previous, end - max(first, base)
                size = len(out)
                if gap < 0x80 and length < 0x80:
                    out.append(gap)
                    out.append(length)
                else:
                    _put_number(out, gap)
                    _put_number(out, length)
                if len(out) > free_bytes:
                    del out[size:]
                    at = len(self._firsts)
                    break
                previous = end
                held += length
            else:
                at = upto
                yield
        return bytes(out) + crc32(out).to_bytes(CRC_SIZE_BYTES, "little"), held

    @classmethod
    def decode(cls, data: bytes, base: int) -> OffsetRanges | None:
        """The inverse of `encode`, or None for bytes that were not made by it for this `base`.

        Only the caller knows what damage means. For acknowledgements it is harmless to go on without:
        messages are repeated. Believing a damaged range would skip some.
        """
        return finished(cls.decoding(data, base))

    @classmethod
    def decoding(cls, data: bytes, base: int) -> Generator[None, None, OffsetRanges | None]:
        """As `decode`, with pauses."""
        body, crc = data[:-CRC_SIZE_BYTES], int.from_bytes(data[-CRC_SIZE_BYTES:], "little")
        if not body or body[0] != FORMAT or crc32(body) != crc:
            return None
        numbers: list[int] = []
        number = shift = 0
        for at in range(1, len(body), STRETCH):
            for byte in body[at : at + STRETCH]:
                if byte < 0x80 and not shift:
                    numbers.append(byte)
                    continue
                number |= (byte & 0x7F) << shift
                shift += 7
                if byte < 0x80:
                    numbers.append(number)
                    number = shift = 0
                elif shift > 63:
                    return None
            yield
        if shift or len(numbers) % 2 == 0 or numbers[0] != base or 0 in numbers[2:]:
            return None  # cut short, for another base, or ranges that are empty or touch: we write none of these
        marks = list(accumulate(numbers))
        if marks[-1] > OFFSET_END_MAX:
            return None
        ranges = cls()
        ranges._firsts, ranges._ends = marks[1::2], marks[2::2]
        ranges._count = sum(ranges._ends) - sum(ranges._firsts)
        return ranges


Made = TypeVar("Made")


def finished(making: Generator[None, None, Made]) -> Made:
    """What it makes, without a pause."""
    while True:
        try:
            next(making)
        except StopIteration as end:
            made: Made = end.value
            return made


class RangeMap(Generic[V]):
    """Offsets with values, kept as sorted pieces that never overlap.

    Neighbouring pieces are one piece if their values are equal; a value that must keep pieces apart compares
    by identity.
    """

    __slots__ = ("_count", "_ends", "_firsts", "_values")

    def __init__(self) -> None:
        self._firsts: list[int] = []
        self._ends: list[int] = []
        self._values: list[V] = []
        self._count = 0

    @property
    def count(self) -> int:
        """How many offsets."""
        return self._count

    def __bool__(self) -> bool:
        return bool(self._firsts)

    def __len__(self) -> int:
        """How many pieces."""
        return len(self._firsts)

    def __iter__(self) -> Iterator[RangePiece[V]]:
        return map(RangePiece, tuple(self._firsts), tuple(self._ends), tuple(self._values))

    def __repr__(self) -> str:
        return f"RangeMap({[tuple(p) for p in self]})"

    def lowest(self) -> RangePiece[V] | None:
        return RangePiece(self._firsts[0], self._ends[0], self._values[0]) if self._firsts else None

    def get(self, offset: int) -> V | None:
        at = bisect_right(self._firsts, offset) - 1
        return self._values[at] if at >= 0 and offset < self._ends[at] else None

    def put(self, first: int, end: int, value: V) -> None:
        """Gives `value` to offsets that have none yet."""
        assert first < end, "an empty piece"
        work.ranges += 1
        at = bisect_right(self._firsts, first)
        assert at == 0 or self._ends[at - 1] <= first, "offsets have one value at a time"
        assert at == len(self._firsts) or end <= self._firsts[at], "offsets have one value at a time"
        self._count += end - first
        joins_left = at > 0 and self._ends[at - 1] == first and self._values[at - 1] == value
        joins_right = at < len(self._firsts) and self._firsts[at] == end and self._values[at] == value
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends[at]
            del self._firsts[at], self._ends[at], self._values[at]
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._firsts[at] = first
        else:
            self._firsts.insert(at, first)
            self._ends.insert(at, end)
            self._values.insert(at, value)

    def overlap(self, first: int, end: int) -> list[RangePiece[V]]:
        """The parts of [first, end) that have a value."""
        if first >= end:
            return []
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        work.ranges += high - low + 1
        return [
            RangePiece(max(first, self._firsts[at]), min(end, self._ends[at]), self._values[at])
            for at in range(low, high)
        ]

    def cut(self, first: int, end: int) -> list[RangePiece[V]]:
        """Takes [first, end) out and returns the parts of it that had a value."""
        if first >= end:
            return []
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        work.ranges += 1
        if low >= high:
            return []
        work.ranges += high - low
        taken = [RangePiece(self._firsts[at], self._ends[at], self._values[at]) for at in range(low, high)]
        kept: list[RangePiece[V]] = []
        left, right = taken[0], taken[-1]
        if left.first < first:
            kept.append(RangePiece(left.first, first, left.value))
            taken[0] = RangePiece(first, left.end, left.value)
        if end < right.end:
            kept.append(RangePiece(end, right.end, right.value))
            taken[-1] = RangePiece(taken[-1].first, end, right.value)
        self._firsts[low:high] = [piece.first for piece in kept]
        self._ends[low:high] = [piece.end for piece in kept]
        self._values[low:high] = [piece.value for piece in kept]
        self._count -= sum(piece.end - piece.first for piece in taken)
        return taken

    def extract(self, wanted: Callable[[V], bool]) -> list[RangePiece[V]]:
        """Takes all pieces with such a value out, in one pass."""
        taken: list[RangePiece[V]] = []
        kept: list[RangePiece[V]] = []
        for piece in map(RangePiece, self._firsts, self._ends, self._values):
            (taken if wanted(piece.value) else kept).append(piece)
        work.ranges += len(self._firsts)
        if taken:
            self._firsts = [piece.first for piece in kept]
            self._ends = [piece.end for piece in kept]
            self._values = [piece.value for piece in kept]
            self._count -= sum(piece.end - piece.first for piece in taken)
        return taken

    def clear(self) -> None:
        self._firsts.clear()
        self._ends.clear()
        self._values.clear()
        self._count = 0


def _put_number(out: bytearray, number: int) -> None:
    assert number >= 0, "offsets only grow"
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
