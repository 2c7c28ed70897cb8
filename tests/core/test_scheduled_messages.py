"""The schedule of a subscription: due by the date, whatever the date does; nothing settled stays in it."""

from __future__ import annotations

from pydanube.core.dispatch.consumer_window import Permits
from pydanube.core.dispatch.events import (
    AckReceived,
    Available,
    CursorReset,
    DateSet,
    Effect,
    Granted,
    Joined,
    Keyed,
    LogTrimmed,
    ReadKeys,
    Scheduled,
    SendRanges,
    Shipped,
    Ticked,
    WakeAt,
    ranges,
)
from pydanube.core.dispatch.key_shared import KeySharedDispatch
from pydanube.core.dispatch.lag import explain
from pydanube.core.dispatch.range_dispatch import SharedDispatch
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.dispatch.schedule import LATER_SECONDS, Schedule, ScheduleTally
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.names import ConsumerId

ONE = ConsumerId(1)
SECOND = 1_000_000
DATE = 1_700_000_000 * SECOND  # when the machine's time is 0


def sent(effects: list[Effect]) -> list[tuple[int, int]]:
    return [(first, end) for effect in effects if isinstance(effect, SendRanges) for first, end in effect.ranges]


def wakes(effects: list[Effect]) -> list[float]:
    return [effect.time for effect in effects if isinstance(effect, WakeAt)]


def shared(head: int = 10, permits: int = 100) -> SharedDispatch:
    machine = SharedDispatch(SubscriptionProgress())
    machine.step(Joined(ONE, Permits(0, 0)), 0.0)
    machine.step(DateSet(DATE), 0.0)
    machine.step(Granted(ONE, Permits(permits, 1 << 20)), 0.0)
    machine.step(Available(head), 0.0)
    return machine


def test_what_is_too_early_leaves_the_window_is_no_lag_and_comes_when_it_is_due() -> None:
    machine = shared()
    effects = machine.step(Scheduled(((2, 4, DATE + 5 * SECOND),), ONE), 0.0)
    effects += machine.step(Shipped(ONE, 100), 0.0)
    assert min(wakes(effects)) == 5 + LATER_SECONDS
    machine.step(AckReceived(ranges((0, 2), (4, 10)), ONE), 1.0)
    standing = machine.standing()
    assert (standing.lag, standing.scheduled, standing.missing, standing.unacked) == (0, 2, 0, 0)
    assert standing.next_unacked == 2 and "2 messages are scheduled for later" in explain(standing, 1.0)
    assert not sent(machine.step(Ticked(), 5.0))
    assert sent(machine.step(Ticked(), 5.002)) == [(2, 4)]
    machine.step(Shipped(ONE, 10), 5.002)
    machine.step(AckReceived(ranges((2, 4)), ONE), 6.0)
    assert machine.progress.next_unacked == 10 and machine.standing().scheduled == 0


def test_a_date_that_jumps_moves_what_is_due() -> None:
    machine = shared()
    machine.step(Scheduled(((2, 4, DATE + 100 * SECOND),), ONE), 0.0)
    machine.step(Shipped(ONE, 100), 0.0)
    machine.step(DateSet(DATE - 50 * SECOND), 0.0)
    assert machine.standing().due_at == 150 + LATER_SECONDS
    assert sent(machine.step(DateSet(DATE + 200 * SECOND), 1.0)) == [(2, 4)]


def test_permits_of_what_was_not_sent_are_given_back() -> None:
    machine = shared(permits=10)
    machine.step(Scheduled(((0, 10, DATE + 5 * SECOND),), ONE), 0.0)
    machine.step(Shipped(ONE, 0), 0.0)
    effects = machine.step(Available(30), 0.0)
    assert sent(effects) == [(10, 20)]


def test_what_is_acknowledged_or_removed_by_retention_is_forgotten() -> None:
    machine = shared()
    machine.step(Scheduled(((0, 4, DATE + 5 * SECOND),), ONE), 0.0)
    machine.step(Shipped(ONE, 100), 0.0)
    machine.step(AckReceived(ranges((1, 2)), ONE), 0.0)
    assert machine.schedule.count == 3
    machine.step(LogTrimmed(3), 0.0)
    assert machine.schedule.count == 1 and machine.progress.next_unacked == 3
    assert sent(machine.step(Ticked(), 10.0)) == [(3, 4)]


def test_too_many_let_nothing_behind_them_be_looked_at_until_one_is_due() -> None:
    machine = shared(head=4)
    machine.schedule.count_max = 3
    machine.step(Scheduled(((0, 2, DATE + 5 * SECOND), (2, 4, DATE + 9 * SECOND)), ONE), 0.0)
    machine.step(Shipped(ONE, 0), 0.0)
    assert sent(machine.step(Available(9), 0.0)) == []
    assert explain(machine.standing(), 0.0).startswith("held: no more may be scheduled")
    assert machine.standing().undispatched == 0 and machine.standing().lag == 5  # no heartbeat polls for it
    assert sent(machine.step(Ticked(), 6.0)) == [(0, 2), (4, 9)]


def test_as_many_as_a_topic_takes_hold_up_nothing() -> None:
    machine = shared(head=4)
    machine.schedule.count_max = 4
    machine.step(Scheduled(((0, 4, DATE + 5 * SECOND),), ONE), 0.0)
    machine.step(Shipped(ONE, 0), 0.0)
    assert sent(machine.step(Available(9), 0.0)) == [(4, 9)]


def test_what_a_seek_leaves_behind_is_not_scheduled_any_more_and_holds_up_nothing() -> None:
    machine = shared(head=6)
    machine.schedule.count_max = 3
    machine.step(Scheduled(((0, 6, DATE + 5 * SECOND),), ONE), 0.0)
    machine.step(Shipped(ONE, 0), 0.0)
    machine.step(CursorReset(5), 0.0)
    assert (machine.standing().scheduled, machine.standing().missing) == (1, 0)
    assert sent(machine.step(Available(9), 0.0)) == [(6, 9)]
    machine.step(Shipped(ONE, 10), 0.0)
    assert sent(machine.step(CursorReset(0), 0.0)) == [(0, 5), (6, 9)], "read again, and compared again"


def test_a_key_goes_on_without_what_is_scheduled_of_it() -> None:
    machine = KeySharedDispatch(SubscriptionProgress())
    machine.step(DateSet(DATE), 0.0)
    machine.step(Joined(ONE, Permits(100, 1 << 20)), 0.0)
    effects = machine.step(Available(4), 0.0)
    assert [each.range for each in effects if isinstance(each, ReadKeys)] == [OffsetRange(0, 4)]
    effects = machine.step(Keyed(((0, "k"), (2, "k"), (3, "other")), ((1, 2, DATE + 5 * SECOND),)), 0.0)
    assert sent(effects) == [(0, 1), (3, 4)]
    machine.step(Shipped(ONE, 10), 0.0)
    assert sent(machine.step(AckReceived(ranges((0, 1)), ONE), 0.0)) == [(2, 3)]
    machine.step(Shipped(ONE, 10), 0.0)
    machine.step(AckReceived(ranges((2, 4)), ONE), 0.0)
    effects = machine.step(Ticked(), 6.0)
    assert [each.range for each in effects if isinstance(each, ReadKeys)] == [OffsetRange(1, 2)]
    assert sent(machine.step(Keyed(((1, "k"),)), 6.0)) == [(1, 2)]


def test_what_was_forgotten_costs_no_memory() -> None:
    schedule = Schedule()
    for round_ in range(10_000):
        schedule.put(round_, round_ + 1, DATE)
        schedule.forget(round_, round_ + 1)
    assert schedule.count == 0 and len(schedule._due) < 200 and schedule.next_due() is None


def test_a_topic_counts_what_is_not_due_and_takes_all_of_a_batch_or_nothing() -> None:
    tally = ScheduleTally(count_max=3)
    assert tally.admits([None, DATE + 1, DATE + 5, DATE - 1], DATE)
    assert not tally.admits([DATE + 5, DATE + 5], DATE)
    assert tally.admits([DATE + 5, None], DATE)
    assert tally.admits([None] * 100, DATE)
    assert not tally.admits([DATE + 9], DATE)
    assert tally.admits([DATE + 9], DATE + 1)
    assert not tally.admits([DATE + 9], DATE + 8, known=3)
