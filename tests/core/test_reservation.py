"""How far ahead of its head a topic reserves offsets: by its traffic."""

from __future__ import annotations

import pytest

from pydanube.core.history.ownership import (
    VOIDS_MAX,
    Orphan,
    Owner,
    first_reservation,
    next_ahead,
    next_epoch,
    next_reservation,
)


def stream(per_second: float, seconds: float, *, answer_seconds: float = 0.004) -> tuple[int, int, int]:
    """A steady stream from an empty topic on: how often the store is asked, how often somebody waits for it, and how
    far the reservation is ahead at the end. The store takes a while, in which more is asked for.
    """
    asked = waited = 0
    ahead, reserved, since = next_ahead(0, 0, 0.0), 0, (0.0, 0)
    answer: tuple[float, int] | None = None
    step = 0.001
    for tick in range(round(seconds / step)):
        now = tick * step
        needed = int(per_second * now) + 1
        if answer is not None and now >= answer[0]:
            reserved, answer = answer[1], None
        head = min(needed, reserved)
        waited += needed > reserved
        if answer is None and next_reservation(head, reserved, needed, ahead) is not None:
            ahead = next_ahead(ahead, needed - since[1], now - since[0])
            since = (now, needed)
            end = next_reservation(head, reserved, needed, ahead)
            assert end is not None and end > needed
            answer = now + answer_seconds, end
            asked += 1
    return asked, waited, reserved - min(needed, reserved)


def test_the_first_reservation_is_small() -> None:
    assert first_reservation(10, 0) == 10 + 1 + 64
    assert first_reservation(10, 200) is None  # what an earlier life has reserved will do
    assert next_ahead(64, 1, 0.001) == next_ahead(64, 31, 0.001) == 64  # a few messages are no traffic yet


@pytest.mark.parametrize(
    ("per_second", "asked_max", "waited_max_ms", "ahead_max"),
    [(0.1, 3, 10, 64), (10, 12, 10, 1_200), (1_000, 14, 20, 20_000), (100_000, 16, 60, 2_100_000)],
)
def test_it_grows_with_the_traffic_and_asks_the_store_seldom(
    per_second: float, asked_max: int, waited_max_ms: int, ahead_max: int
) -> None:
    """In the first minute. Publishes wait for the store only until it has grown: some milliseconds in all."""
    asked, waited, ahead = stream(per_second, 60.0)
    assert asked <= asked_max
    assert waited <= waited_max_ms  # of 60,000
    assert ahead <= ahead_max


def test_a_topic_at_100000_a_second_asks_the_store_ten_times_in_its_first_second() -> None:
    asked, waited, _ = stream(100_000, 1.0)
    assert asked <= 10 and waited <= 60


def test_one_large_batch_is_no_traffic() -> None:
    assert next_ahead(64, 100_000, 0.001) == 256


def test_a_topic_that_became_slow_reserves_less_with_the_next_extension() -> None:
    assert next_ahead(2_000_000, 100, 1000.0) == 64
    assert next_ahead(2_000_000, 1_000_000, 10.0) == 2_000_000


def lost_owner(**fields: int) -> Owner:
    return Owner(epoch=3, session=1, broker_id=1, start_offset=10, **fields)


def test_the_next_owner_begins_behind_what_a_lost_one_reserved_and_leaves_what_no_object_holds() -> None:
    found = next_epoch(lost_owner(since=1), None, 100, broker_id=2, placed_end=40, orphans=(), voids=[(40, 45)])
    assert found.start.offset == 100
    assert found.leaves == Orphan(start=45, end=100, broker_id=1, epoch=3)
    assert found.covered_end == 45


def test_voids_above_what_only_the_lost_owner_has_are_part_of_what_it_leaves_unless_they_are_too_many() -> None:
    few = [(first, first + 1) for first in range(50, 50 + 2 * VOIDS_MAX, 2)]
    many = [(first, first + 1) for first in range(50, 52 + 2 * VOIDS_MAX, 2)]
    of_few = next_epoch(lost_owner(since=1), None, 1000, broker_id=2, placed_end=40, orphans=(), voids=few)
    of_many = next_epoch(lost_owner(since=1), None, 1000, broker_id=2, placed_end=40, orphans=(), voids=many)
    assert of_few.leaves is not None and of_few.leaves.start == 40
    assert of_many.leaves is not None and of_many.leaves.start == of_many.covered_end == many[-1][1]
