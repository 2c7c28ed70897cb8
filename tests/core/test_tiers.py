"""The cloud tier's decisions: which object holds an offset, what is merged, moved and forgotten, and when."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.core.history.tiers import (
    MERGE_COUNT_MAX,
    MERGED_BYTES,
    RAW,
    Descriptor,
    Objects,
    Retention,
    SteadyTime,
    TierConfig,
    TopicHistory,
    descriptors_to_move,
    epoch_of_name,
    first_kept,
    manifest_from_bytes,
    manifest_name,
    manifest_to_bytes,
    merge_next,
    object_name,
)
from pydanube.core.units import MIB

CONFIG = TierConfig()
DAY_US = 24 * 3600 * 1_000_000


def described(start: int, end: int, *, size: int = 1000, append_time: int = 0, name: str = "") -> Descriptor:
    return Descriptor(
        start_offset=start,
        end_offset=end - 1,
        object_id=name or object_name(start, end - 1, 1),
        size=size,
        etag="e",
        min_publish_time=0,
        max_publish_time=0,
        epoch=1,
        created_at=0,
        max_append_time=append_time,
    )


def row(*sizes: int, first: int = 0) -> list[Descriptor]:
    """Neighbours of ten messages each."""
    return [described(first + 10 * n, first + 10 * n + 10, size=size) for n, size in enumerate(sizes)]


# --- what is stored -------------------------------------------------------------------------------------


def test_a_descriptor_is_stored_with_the_seeds_names_and_an_inclusive_end() -> None:
    stored = json.loads(described(0, 22).to_bytes())
    assert {"start_offset": 0, "end_offset": 21, "object_id": "data-0-21-1.parquet"}.items() <= stored.items()
    assert {"size", "etag", "min_publish_time", "max_publish_time", "epoch", "created_at"} <= stored.keys()


def test_descriptor_and_history_survive_storing_and_ignore_what_a_newer_version_adds() -> None:
    one = replace(described(3, 9), footer_crc=7, format=RAW)
    assert Descriptor.from_bytes(one.to_bytes()) == one
    newer = json.dumps({**one.to_json(), "colour": "green"}).encode()
    assert Descriptor.from_bytes(newer) == one
    history = TopicHistory(first_offset=5, manifest="m", manifest_end=9, manifest_crc=1, epoch=2, change=3)
    assert TopicHistory.from_bytes(history.to_bytes()) == history
    assert TopicHistory.from_bytes(b"{}") == TopicHistory()


def test_a_history_says_when_it_was_changed_and_a_clock_that_was_set_back_does_not_move_it_back() -> None:
    before = TopicHistory.from_bytes(b'{"first_offset": 5, "epoch": 2, "change": 3}')
    assert before.changed_at == 0  # written by an older version
    changed = before.changed(2, 4, 1_000)
    assert (changed.first_offset, changed.epoch, changed.change, changed.changed_at) == (5, 2, 4, 1_000)
    assert changed.changed(3, 1, 900).changed_at == 1_000


def test_a_manifest_survives_storing_and_something_else_is_refused() -> None:
    assert manifest_from_bytes(manifest_to_bytes(row(1, 2, 3))) == row(1, 2, 3)
    for broken in (b"", b"[]", b'{"objects": [{}]}', b'{"format": 1}', b"\xff"):
        with pytest.raises(ValueError):
            manifest_from_bytes(broken)


# --- names ----------------------------------------------------------------------------------------------


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50),
            st.integers(0, 50),
            st.integers(1, 5),
            st.integers(0, 3),
            st.integers(0, 3),
            st.booleans(),
        ).filter(lambda each: each[0] <= each[1]),
        min_size=2,
        max_size=20,
        unique=True,
    )
)
def test_two_uploads_never_have_the_same_name(
    uploads: list[tuple[int, int, int, int, int, bool]],
) -> None:
    names: dict[str, Any] = {}
    for start, end, epoch, attempt, merged, raw in uploads:
        name = object_name(start, end, epoch, attempt=attempt, merged=merged, raw=raw)
        # A merge has its own number, so it has no attempts.
        what = (start, end, epoch, raw, ("merged", merged) if merged else ("attempt", attempt))
        assert names.setdefault(name, what) == what
        assert epoch_of_name(name) == epoch


def test_a_name_tells_its_epoch_and_a_strangers_name_tells_none() -> None:
    assert epoch_of_name(manifest_name(7, 3)) == 7
    assert epoch_of_name(object_name(0, 9, 4, merged=2)) == 4
    for name in (
        "data-1-2.parquet",
        "data-1-2-3.parquet.tmp",
        "notes.txt",
        "xdata-1-2-3.parquet",
        "data-1-2-3-m.parquet",
    ):
        assert epoch_of_name(name) is None


# --- objects --------------------------------------------------------------------------------------------


def test_an_offset_is_found_in_its_object_and_nowhere_else() -> None:
    objects = Objects([described(20, 30), described(0, 10)])
    assert [each.start_offset for each in objects] == [0, 20]
    assert objects.find(0) == objects.find(9) == described(0, 10)
    assert objects.find(10) is objects.find(19) is objects.find(30) is None
    assert objects.after(1) == objects.after(20) == described(20, 30)
    assert objects.after(21) is None
    assert objects.end == 30 and Objects().end == 0
    assert objects.missing(5, 40) == [(10, 20), (30, 40)]
    assert objects.missing(22, 28) == []
    assert Objects().missing(3, 5) == [(3, 5)]


def test_objects_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        Objects([described(0, 10), described(9, 12)])
    with pytest.raises(ValueError, match="overlaps"):
        Objects([described(0, 10)]).with_added(described(0, 10))


def test_what_is_listed_in_the_manifest_stays_so_whatever_comes_before_or_goes() -> None:
    objects = Objects(row(1, 1, 1, 1, first=100)).with_listed(row(1, 1, first=100))
    assert [each.start_offset for each in objects.listed] == [100, 110]
    rescued = described(50, 60)
    more = objects.with_added(rescued)
    assert [each.start_offset for each in more.listed] == [100, 110]
    assert [each.start_offset for each in more.keyed] == [50, 120, 130]
    assert [each.start_offset for each in more.with_listed([rescued]).listed] == [50, 100, 110]
    later = more.from_offset(110)
    assert [each.start_offset for each in later] == [110, 120, 130]
    assert [each.start_offset for each in later.listed] == [110]
    merged = described(120, 140, name="merged")
    assert [each.start_offset for each in later.with_replaced(later.keyed, merged)] == [110, 120]


@given(st.sets(st.integers(0, 30)), st.integers(0, 30), st.integers(0, 30))
def test_what_is_missing_and_what_is_found_are_everything(held: set[int], first: int, end: int) -> None:
    objects = Objects(described(offset, offset + 1) for offset in held)
    missing = {offset for gap in objects.missing(first, end) for offset in range(*gap)}
    found = {offset for offset in range(first, end) if objects.find(offset) is not None}
    assert missing | found == set(range(first, end)) and not missing & found


# --- merging --------------------------------------------------------------------------------------------


def test_eight_neighbours_of_one_size_become_one_and_seven_do_not() -> None:
    assert merge_next(row(*[5000] * 7), CONFIG) == []
    assert merge_next(row(*[5000] * 8), CONFIG) == row(*[5000] * 8)


def test_a_gap_a_raw_object_a_large_one_and_an_unreadable_one_end_a_run() -> None:
    small = row(*[5000] * 8)
    assert merge_next([*small[:4], *row(*[5000] * 7, first=41)], CONFIG) == []
    for odd in (replace(small[3], format=RAW), replace(small[3], size=MERGED_BYTES)):
        assert merge_next([*small[:3], odd, *small[4:]], CONFIG) == []
    assert merge_next(small, CONFIG, spared=[small[3].object_id]) == []
    assert merge_next(row(*[5000] * 20), CONFIG, spared=[small[3].object_id])[0].start_offset == 40


def test_a_large_object_is_not_written_again_for_a_few_small_ones() -> None:
    """Else every upload of a quiet topic would rewrite its newest large object."""
    assert merge_next(row(40 * MIB, *[5000] * 7), CONFIG) == []
    assert [each.size for each in merge_next(row(40 * MIB, *[5000] * 8), CONFIG)] == [5000] * 8
    assert [each.size for each in merge_next(row(MIB - 1, *[5000] * 8), CONFIG)] == [5000] * 8


def test_two_that_fill_an_object_are_merged() -> None:
    assert len(merge_next(row(30 * MIB, 25 * MIB), CONFIG)) == 2
    assert merge_next(row(40 * MIB, 40 * MIB), CONFIG) == []


SIZES = st.lists(st.integers(4600, 70 * MIB) | st.integers(4600, 40_000), max_size=150)


@given(SIZES)
def test_what_is_merged_is_contiguous_fits_one_object_and_one_transaction(sizes: list[int]) -> None:
    run = merge_next(row(*sizes), CONFIG)
    assert len(run) != 1 and len(run) <= MERGE_COUNT_MAX
    assert sum(each.size for each in run) <= MERGED_BYTES
    assert all(later.start_offset == earlier.end for earlier, later in pairwise(run))


def carry(sizes: Sequence[int], overhead: int = 4600) -> tuple[int, int, float]:
    """Uploads one after the other and merges as a broker does: most keys, keys left, bytes written per byte kept."""
    kept: list[Descriptor] = []
    most, written = 0, 0
    for number, size in enumerate(sizes):
        kept.append(described(10 * number, 10 * number + 10, size=size + overhead))
        written += size + overhead
        while run := merge_next(kept, CONFIG):
            size_merged = sum(each.size - overhead for each in run) + overhead
            merged = described(run[0].start_offset, run[-1].end, size=size_merged)
            written += size_merged
            kept = sorted([*(each for each in kept if each not in run), merged], key=lambda each: each.start_offset)
        kept = kept[descriptors_to_move(len(kept), CONFIG) :]  # those have no keys any more, and are not merged
        most = max(most, len(kept))
    return most, len(kept), written / sum(size + overhead for size in sizes)


@pytest.mark.parametrize(
    ("size", "keys", "amplification"),
    [
        (300, 18, 1.6),
        pytest.param(100_000, 74, 4.9, marks=pytest.mark.long),
        pytest.param(3 * MIB, 256, 3.2, marks=pytest.mark.long),
    ],
)
def test_a_week_of_uploads_every_30_seconds_leaves_few_keys_and_writes_each_byte_a_few_times(
    size: int, keys: int, amplification: float
) -> None:
    most, _, written = carry([size] * (7 * 24 * 120))
    assert most <= keys
    assert written <= amplification


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 2000) | st.integers(1, 200_000) | st.integers(1, 20 * MIB), min_size=1, max_size=300))
def test_merging_ends_keeps_few_objects_and_writes_each_byte_a_few_times(sizes: list[int]) -> None:
    most, left, amplification = carry(sizes)
    full = sum(sizes) // (MERGED_BYTES // 4)  # what is beyond a quarter of an object may be left alone
    assert most <= 60 + 2 * full and left <= most
    assert amplification < 8


# --- manifest and retention -------------------------------------------------------------------------------


def test_the_oldest_descriptors_move_when_there_are_too_many_keys() -> None:
    assert descriptors_to_move(256, CONFIG) == 0
    assert descriptors_to_move(257, CONFIG) == 100


def test_nothing_is_forgotten_without_a_rule() -> None:
    assert first_kept(row(1, 1), Retention(), 10**18) is None


def test_whole_objects_are_forgotten_when_their_newest_message_is_too_old() -> None:
    objects = [
        described(0, 10, append_time=100),
        described(10, 20, append_time=200),
        described(20, 30, append_time=300),
    ]
    keep = Retention(seconds=100e-6)
    assert first_kept(objects, keep, 200) is None
    assert first_kept(objects, keep, 201) == 10
    assert first_kept(objects, keep, 10**9) == 30


def test_the_oldest_objects_are_forgotten_until_the_rest_is_small_enough() -> None:
    objects = row(400, 300, 200)
    assert first_kept(objects, Retention(size_bytes=900), 0) is None
    assert first_kept(objects, Retention(size_bytes=899), 0) == 10
    assert first_kept(objects, Retention(size_bytes=499), 0) == 20
    assert first_kept(objects, Retention(size_bytes=0), 0) == 30


def test_an_old_object_behind_a_young_one_stays() -> None:
    """History begins somewhere and has no holes: rescued messages come late."""
    objects = [described(0, 10, append_time=DAY_US), described(10, 20, append_time=1)]
    assert first_kept(objects, Retention(seconds=60), DAY_US) is None


def test_steady_time_is_the_clocks_until_that_jumps_ahead() -> None:
    steady = SteadyTime(1000, 0.0)
    assert steady.at(1_001_000, 1.0) == 1_001_000
    jumped = steady.at(1_001_000 + DAY_US, 2.0)
    assert jumped <= 1_001_000 + 1_050_000
    assert steady.at(3_001_000, 3.0) <= 3_001_000  # and it never runs ahead of a clock that was set right again


@given(st.lists(st.tuples(st.integers(-DAY_US, DAY_US), st.floats(0, 1000)), max_size=30))
def test_steady_time_never_runs_ahead_of_the_clock_nor_far_ahead_of_time_itself(
    steps: list[tuple[int, float]],
) -> None:
    wall, elapsed = 10**15, 0.0
    steady = SteadyTime(wall, elapsed)
    known = wall
    for jump, seconds in steps:
        elapsed += seconds
        wall += int(seconds * 1e6) + jump
        now = steady.at(wall, elapsed)
        assert now <= wall
        assert now - known <= seconds * 1.05e6 + 1
        known = now
