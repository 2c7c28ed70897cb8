"""Ranges against the plainest possible model: a Python set."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges, RangeMap, RangePiece

SMALL = 40
spans = st.tuples(st.integers(0, SMALL), st.integers(0, SMALL)).map(lambda pair: (min(pair), max(pair)))
changes = st.lists(st.tuples(st.sampled_from(["add", "remove"]), spans), max_size=30)


def built(operations: list[tuple[str, tuple[int, int]]]) -> tuple[OffsetRanges, set[int]]:
    ranges, model = OffsetRanges(), set[int]()
    for operation, (first, end) in operations:
        offsets = set(range(first, end))
        if operation == "add":
            assert ranges.add(first, end) == len(offsets - model)
            model |= offsets
        else:
            assert ranges.remove(first, end) == len(offsets & model)
            model -= offsets
    return ranges, model


def offsets_of(ranges: object) -> list[int]:
    return [offset for first, end in ranges for offset in range(first, end)]  # type: ignore[attr-defined]


@given(changes)
def test_ranges_hold_what_a_set_holds(operations: list[tuple[str, tuple[int, int]]]) -> None:
    ranges, model = built(operations)
    assert offsets_of(ranges) == sorted(model)
    assert ranges.count == len(model)
    assert bool(ranges) == bool(model)
    assert all((offset in ranges) == (offset in model) for offset in range(-1, SMALL + 1))


@given(changes)
def test_ranges_never_touch_one_another(operations: list[tuple[str, tuple[int, int]]]) -> None:
    ranges = list(built(operations)[0])
    assert all(first < end for first, end in ranges)
    assert all(left.end < right.first for left, right in pairwise(ranges))


@given(changes, spans)
def test_overlap_and_gaps_divide_a_range_between_them(
    operations: list[tuple[str, tuple[int, int]]], span: tuple[int, int]
) -> None:
    ranges, model = built(operations)
    assert offsets_of(ranges.overlap(*span)) == [offset for offset in range(*span) if offset in model]
    assert offsets_of(ranges.gaps(*span)) == [offset for offset in range(*span) if offset not in model]


@given(changes, st.integers(0, SMALL))
def test_first_gap_and_next_first_find_the_nearest(operations: list[tuple[str, tuple[int, int]]], start: int) -> None:
    ranges, model = built(operations)
    assert ranges.first_gap(start) == next(n for n in range(start, SMALL + 2) if n not in model)
    firsts = [first for first, _ in ranges if first >= start]
    assert ranges.next_first(start) == (firsts[0] if firsts else None)


@given(changes, changes)
def test_union_and_subtract_make_new_sets(
    left: list[tuple[str, tuple[int, int]]], right: list[tuple[str, tuple[int, int]]]
) -> None:
    (ours, our_model), (others, other_model) = built(left), built(right)
    assert offsets_of(ours.union(others)) == sorted(our_model | other_model)
    assert offsets_of(ours.subtract(others)) == sorted(our_model - other_model)
    assert offsets_of(ours) == sorted(our_model)


@given(changes, st.integers(0, SMALL))
def test_encoding_keeps_everything_at_or_above_the_base(
    operations: list[tuple[str, tuple[int, int]]], base: int
) -> None:
    ranges, model = built(operations)
    again = OffsetRanges.decode(ranges.encode(base, 4096), base)
    assert again is not None
    assert offsets_of(again) == sorted(offset for offset in model if offset >= base)


@given(changes, st.integers(8, 30))
def test_what_does_not_fit_is_left_out_from_the_top(
    operations: list[tuple[str, tuple[int, int]]], size_max: int
) -> None:
    ranges, _ = built(operations)
    data = ranges.encode(0, size_max)
    again = OffsetRanges.decode(data, 0)
    assert len(data) <= size_max
    assert again is not None
    assert list(again) == list(ranges)[: again.range_count]


def test_fourteen_hundred_scattered_holes_fit_into_four_kib() -> None:
    scattered = OffsetRanges((1_000_000_000 + n * 40, 1_000_000_000 + n * 40 + 3) for n in range(5_000))
    again = OffsetRanges.decode(scattered.encode(999_999_999, 4096), 999_999_999)
    assert again is not None
    assert again.range_count > 1_400


@given(st.binary(max_size=40), st.integers(0, 100))
def test_foreign_bytes_are_not_believed(data: bytes, base: int) -> None:
    assert OffsetRanges.decode(data, base) is None


@given(changes, st.data())
def test_a_flipped_bit_or_another_base_is_not_believed(
    operations: list[tuple[str, tuple[int, int]]], data: st.DataObject
) -> None:
    encoded = bytearray(built(operations)[0].encode(0, 4096))
    assert OffsetRanges.decode(bytes(encoded), 1) is None
    at = data.draw(st.integers(0, len(encoded) * 8 - 1))
    encoded[at // 8] ^= 1 << at % 8
    assert OffsetRanges.decode(bytes(encoded), 0) is None


def test_a_million_contiguous_offsets_are_one_range() -> None:
    acked = OffsetRanges()
    for first in range(0, 1_000_000, 1000):
        acked.add(first, first + 1000)
    assert list(acked) == [OffsetRange(0, 1_000_000)]


@given(st.lists(st.tuples(st.sampled_from(["put", "cut"]), spans, st.integers(0, 2)), max_size=30))
def test_a_range_map_holds_what_a_dictionary_holds(
    operations: list[tuple[str, tuple[int, int], int]],
) -> None:
    pieces: RangeMap[int] = RangeMap()
    model: dict[int, int] = {}
    for operation, (first, end), value in operations:
        inside = {offset: model[offset] for offset in range(first, end) if offset in model}
        assert flat(pieces.overlap(first, end)) == inside
        if operation == "cut":
            assert flat(pieces.cut(first, end)) == inside
            for offset in inside:
                del model[offset]
        elif first < end and not inside:
            pieces.put(first, end, value)
            model |= dict.fromkeys(range(first, end), value)
    assert flat(list(pieces)) == model
    assert pieces.count == len(model)
    assert all(pieces.get(offset) == model.get(offset) for offset in range(-1, SMALL + 1))
    found = list(pieces)
    assert pieces.lowest() == (found[0] if found else None)
    for left, right in pairwise(found):
        assert left.end < right.first or (left.end == right.first and left.value != right.value)


def flat(pieces: list[RangePiece[int]]) -> dict[int, int]:
    return {offset: piece.value for piece in pieces for offset in range(piece.first, piece.end)}
