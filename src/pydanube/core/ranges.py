"""Half-open offset ranges: available, acknowledged, missing.

    OffsetRange   [first, end)
    OffsetRanges  a set of offsets, kept as sorted ranges that never touch:   ──[0,5)──[9,12)──
    RangeMap      the same with a value per range; neighbours with equal values are one range

A million contiguous offsets cost as much as one. Every operation is a binary search and a list splice, so it
depends on how many ranges it touches, never on how many offsets they hold.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, Generic, NamedTuple, NewType, TypeVar
from zlib import crc32

Offset = NewType("Offset", int)
V = TypeVar("V")

FORMAT: Final = 1
CRC_SIZE_BYTES: Final = 4


class OffsetRange(NamedTuple):
    """The offsets from `first` up to, not including, `end`."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first


class Piece(NamedTuple, Generic[V]):
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
        if low >= high:
            return 0
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

    def overlap(self, first: int, end: int) -> list[OffsetRange]:
        """The parts of [first, end) that are in the set."""
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        return [
            OffsetRange(max(first, self._firsts[at]), min(end, self._ends[at]))
            for at in range(low, high)
            if first < end
        ]

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
        out = bytearray([FORMAT])
        _put_number(out, base)
        previous = base
        for first, end in self.overlap(base, self._ends[-1] if self._ends else base):
            entry = bytearray()
            _put_number(entry, first - previous)
            _put_number(entry, end - first)
            if len(out) + len(entry) + CRC_SIZE_BYTES > size_max_bytes:
                break
            out += entry
            previous = end
        return bytes(out) + crc32(out).to_bytes(CRC_SIZE_BYTES, "little")

    @classmethod
    def decode(cls, data: bytes, base: int) -> OffsetRanges | None:
        """The inverse of `encode`, or None for bytes that were not made by it for this `base`.

        Only the caller knows what damage means. For acknowledgements it is harmless to go on without:
        messages are repeated. Believing a damaged range would skip some.
        """
        body, crc = data[:-CRC_SIZE_BYTES], int.from_bytes(data[-CRC_SIZE_BYTES:], "little")
        if not body or body[0] != FORMAT or crc32(body) != crc:
            return None
        numbers = list(_numbers(body[1:]))
        if len(numbers) % 2 == 0 or numbers[0] != base:
            return None
        ranges = cls()
        end = base
        for gap, length in zip(numbers[1::2], numbers[2::2], strict=True):
            ranges.add(end + gap, end + gap + length)
            end += gap + length
        return ranges


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

    def __iter__(self) -> Iterator[Piece[V]]:
        return map(Piece, tuple(self._firsts), tuple(self._ends), tuple(self._values))

    def __repr__(self) -> str:
        return f"RangeMap({[tuple(p) for p in self]})"

    def lowest(self) -> Piece[V] | None:
        return Piece(self._firsts[0], self._ends[0], self._values[0]) if self._firsts else None

    def get(self, offset: int) -> V | None:
        at = bisect_right(self._firsts, offset) - 1
        return self._values[at] if at >= 0 and offset < self._ends[at] else None

    def put(self, first: int, end: int, value: V) -> None:
        """Gives `value` to offsets that have none yet."""
        assert first < end, "an empty piece"
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

    def overlap(self, first: int, end: int) -> list[Piece[V]]:
        """The parts of [first, end) that have a value."""
        if first >= end:
            return []
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        return [
            Piece(max(first, self._firsts[at]), min(end, self._ends[at]), self._values[at]) for at in range(low, high)
        ]

    def cut(self, first: int, end: int) -> list[Piece[V]]:
        """Takes [first, end) out and returns the parts of it that had a value."""
        if first >= end:
            return []
        low = bisect_right(self._ends, first)
        high = bisect_left(self._firsts, end)
        if low >= high:
            return []
        taken = [Piece(self._firsts[at], self._ends[at], self._values[at]) for at in range(low, high)]
        kept: list[Piece[V]] = []
        left, right = taken[0], taken[-1]
        if left.first < first:
            kept.append(Piece(left.first, first, left.value))
            taken[0] = Piece(first, left.end, left.value)
        if end < right.end:
            kept.append(Piece(end, right.end, right.value))
            taken[-1] = Piece(taken[-1].first, end, right.value)
        self._firsts[low:high] = [piece.first for piece in kept]
        self._ends[low:high] = [piece.end for piece in kept]
        self._values[low:high] = [piece.value for piece in kept]
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


def _numbers(data: bytes) -> Iterator[int]:
    """The numbers in `data`; a last one that is cut short is left out."""
    number = shift = 0
    for byte in data:
        number |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            yield number
            number = shift = 0
