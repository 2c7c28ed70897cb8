"""Where offsets lie, against the plainest model: one name per offset; and what may be removed."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.history.coverage import CoverageRange, Fate, Where, judge, overlaps, places
from pydanube.core.history.tiers import Descriptor

END = 30
spans = st.tuples(st.integers(0, END), st.integers(0, END)).map(lambda pair: (min(pair), max(pair)))
sources = st.lists(
    st.tuples(spans, st.sampled_from([Where.OBJECTS, Where.LOG, Where.ORPHAN, Where.VOID])).map(
        lambda pair: CoverageRange(*pair[0], pair[1])
    ),
    max_size=8,
)


def described(start: int, end: int, name: str = "") -> Descriptor:
    return Descriptor(
        start_offset=start,
        end_offset=end - 1,
        object_id=name or f"data-{start}-{end - 1}-1.parquet",
        size=1,
        etag="",
        min_publish_time=0,
        max_publish_time=0,
        epoch=1,
        created_at=0,
    )


@given(st.integers(0, END), st.integers(0, END), sources)
def test_every_offset_below_the_head_has_exactly_one_place(first: int, head: int, given: list[CoverageRange]) -> None:
    found = places(first, head, given)
    assert [offset for place in found for offset in range(place.first, place.end)] == list(range(head))
    for place in found:
        for offset in range(place.first, place.end):
            holders = [each.where for each in given if each.first <= offset < each.end]
            expected = Where.FORGOTTEN if offset < first else holders[0] if holders else Where.NOWHERE
            assert place.where is expected


@given(sources)
def test_neighbours_of_one_kind_are_one_place(given: list[CoverageRange]) -> None:
    found = places(0, END, given)
    assert all(left.where is not right.where for left, right in pairwise(found))


def test_descriptors_that_claim_one_offset_are_found_also_across_others() -> None:
    wide, narrow, later = described(0, 10, "wide"), described(2, 4, "narrow"), described(9, 12, "later")
    assert overlaps([later, narrow, wide]) == [(wide, narrow), (wide, later)]
    assert overlaps([described(0, 5), described(5, 9), described(20, 21)]) == []


OLD = "data-0-9-2.parquet"
NORMAL = {"owner_epoch": 3, "orphaned": (), "seen_seconds": 600.0, "grace_seconds": 600.0}


@pytest.mark.parametrize(
    ("name", "changes", "fate"),
    [
        (OLD, {}, Fate.GARBAGE),
        ("data-0-9-3-m1.parquet", {}, Fate.GARBAGE),
        ("manifest-3-1.json", {}, Fate.GARBAGE),
        (OLD, {"seen_seconds": 599.9}, Fate.YOUNG),
        ("data-0-9-4.parquet", {}, Fate.NEWER),
        (OLD, {"orphaned": (2,)}, Fate.ORPHANED),
        (OLD, {"all_known": False}, Fate.UNKNOWN),
        ("report.parquet", {}, Fate.FOREIGN),
        ("sub/data-0-9-2.parquet", {}, Fate.FOREIGN),
        ("data-0-9-2.parquet.bak", {}, Fate.FOREIGN),
    ],
)
def test_only_old_undescribed_objects_of_our_own_past_are_garbage(
    name: str, changes: dict[str, object], fate: Fate
) -> None:
    verdict = judge(name, **{**NORMAL, **changes})  # type: ignore[arg-type]
    assert verdict.fate is fate
    assert ("may go" in verdict.why) == (fate in (Fate.GARBAGE, Fate.YOUNG))
