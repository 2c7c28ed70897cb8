from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.dispatch.delivery import UNTRIED
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.dispatch.window import HOLES_SIZE_MAX_BYTES, InFlight, SubscriptionProgress
from pydanube.core.names import ConsumerId

A, B = ConsumerId(1), ConsumerId(2)


def test_the_cursor_waits_for_the_oldest_unacked_message() -> None:
    progress = SubscriptionProgress(head=10)
    progress.settle(1, 3)
    assert progress.next_unacked == 0
    progress.settle(0, 1)
    assert progress.next_unacked == 3
    assert not progress.settled


def test_a_subscription_that_never_acked_is_stored_as_minus_one() -> None:
    saved = SubscriptionProgress(head=7).saved()
    assert (saved.cursor, saved.holes) == (-1, b"")
    progress, intact = SubscriptionProgress.restore(saved.cursor, saved.holes, head=7)
    assert intact and progress.next_unacked == 0 and progress.lag() == 7


def test_damaged_holes_repeat_messages_and_skip_none() -> None:
    progress = SubscriptionProgress(5, head=20)
    progress.settle(10, 15)
    saved = progress.saved()
    again, intact = SubscriptionProgress.restore(saved.cursor, saved.holes[:-1] + b"\x00", head=20)
    assert not intact
    assert again.lag() == 15


def test_holes_stored_for_another_cursor_are_not_believed() -> None:
    progress = SubscriptionProgress(5, head=20)
    progress.settle(10, 15)
    again, intact = SubscriptionProgress.restore(2, progress.saved().holes, head=20)
    assert not intact and again.next_unacked == 3


def test_fresh_ranges_step_over_what_is_settled_or_missing() -> None:
    progress = SubscriptionProgress(head=20, missing=[(5, 8)])
    progress.settle(8, 10)
    progress.settle(2, 3)
    taken = []
    while fresh := progress.take_fresh(100):
        taken.append(tuple(fresh))
    assert taken == [(0, 2), (3, 5), (10, 20)]
    assert progress.fresh_count() == 0


def test_missing_offsets_are_no_lag_and_hold_the_cursor() -> None:
    progress = SubscriptionProgress(head=10, missing=[(4, 6)])
    assert progress.lag() == 8
    progress.settle(0, 4)
    progress.settle(6, 10)
    assert (progress.lag(), progress.next_unacked) == (0, 4)
    assert progress.reveal(4, 6) == []  # not passed by take_fresh yet
    assert progress.lag() == 2


def test_revealed_offsets_that_were_passed_are_returned() -> None:
    progress = SubscriptionProgress(head=10, missing=[(4, 6)])
    while progress.take_fresh(100):
        pass
    assert progress.reveal(0, 10) == [OffsetRange(4, 6)]


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=20),
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=4),
)
def test_what_waits_longest_is_behind_whatever_is_missing(
    acks: list[tuple[int, int]], lost: list[tuple[int, int]]
) -> None:
    missing = [(first, first + length) for first, length in lost]
    progress = SubscriptionProgress(head=50, missing=missing)
    for first, length in acks:
        progress.settle(first, first + length)
    gone = {offset for first, length in (*acks, *lost) for offset in range(first, first + length)}
    assert progress.oldest_open() == next(offset for offset in range(51) if offset not in gone)


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 10)), max_size=40), st.integers(8, 64))
def test_what_is_restored_was_acknowledged(acks: list[tuple[int, int]], size_max: int) -> None:
    progress = SubscriptionProgress(head=70)
    model: set[int] = set()
    cursor = 0
    for first, length in acks:
        progress.settle(first, first + length)
        model |= set(range(first, first + length))
        assert progress.next_unacked >= cursor
        cursor = progress.next_unacked
        assert cursor == next(n for n in range(100) if n not in model)
        assert progress.lag() == 70 - len(model)
        assert progress.changes == len(model)
    saved = progress.saved(size_max)
    again, intact = SubscriptionProgress.restore(saved.cursor, saved.holes, head=70)
    assert intact
    assert len(saved.holes) <= size_max
    assert again.next_unacked == progress.next_unacked
    assert all(set(range(*part)) <= model for part in again.settled)
    everything, _ = SubscriptionProgress.restore(saved.cursor, progress.saved().holes, head=70)
    assert everything.lag() == progress.lag()


def test_holes_never_exceed_their_bound() -> None:
    progress = SubscriptionProgress(head=1_000_000)
    for offset in range(1, 100_000, 2):
        progress.settle(offset, offset + 1)
    assert len(progress.saved().holes) <= HOLES_SIZE_MAX_BYTES


# --- in flight --------------------------------------------------------------------------------------------


def test_a_consumers_messages_come_back_lowest_first() -> None:
    flights = InFlight()
    flights.put(5, 8, A, UNTRIED, 1.0)
    flights.put(0, 2, B, UNTRIED, 2.0)
    flights.put(2, 4, A, UNTRIED, 3.0)
    assert [(p.first, p.end) for p in flights.cut_consumer(A)] == [(2, 4), (5, 8)]
    assert flights.count == 2
    assert flights.holder(0) == B and flights.holder(5) is None


def test_only_what_is_left_of_a_flight_times_out() -> None:
    flights = InFlight()
    flights.put(0, 10, A, UNTRIED, 1.0)
    flights.put(10, 20, A, UNTRIED, 2.0)
    flights.cut(3, 5)
    late = flights.cut_sent(lambda sent_at: sent_at <= 1.0, 10)
    assert [(p.first, p.end) for p in late] == [(0, 3), (5, 10)]
    assert flights.oldest_sent_at() == 2.0


def test_a_range_sent_again_does_not_time_out_by_its_old_flight() -> None:
    flights = InFlight()
    flights.put(0, 4, A, UNTRIED, 1.0)
    flights.put(9, 10, A, UNTRIED, 1.0)
    flights.cut(1, 4)
    flights.put(1, 4, B, UNTRIED, 5.0)
    assert [(p.first, p.end) for p in flights.cut_sent(lambda sent_at: sent_at <= 1.0, 10)] == [(0, 1), (9, 10)]
    assert flights.holder(2) == B


def test_one_message_never_acked_does_not_keep_all_later_flights_in_memory() -> None:
    flights = InFlight()
    flights.put(0, 1, A, UNTRIED, 0.0)
    for offset in range(1, 10_000):
        flights.put(offset, offset + 1, A, UNTRIED, float(offset))
        flights.cut(offset, offset + 1)
    assert len(flights._by_age) < 100
