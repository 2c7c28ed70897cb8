from __future__ import annotations

from dataclasses import replace

import pytest

from pydanube.core.dispatch.consumer_window import DispatchLimits, Permits
from pydanube.core.dispatch.delivery import FailurePolicy, PoisonPolicy, Tries
from pydanube.core.dispatch.events import (
    AckReceived,
    AckRefused,
    Activated,
    Available,
    Blocked,
    CursorReset,
    DeadLetter,
    DeadLettered,
    DeadLetterFailed,
    Effect,
    Expired,
    Granted,
    HistoryAvailable,
    Joined,
    JoinRefused,
    Left,
    LogTrimmed,
    NackReceived,
    PoisonDropped,
    PolicyChanged,
    SendRanges,
    Shipped,
    Ticked,
    Voided,
    WakeAt,
    Withheld,
    offsets,
    ranges,
)
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.range_dispatch import ExclusiveDispatch, FailoverDispatch, RangeDispatch, SharedDispatch
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.names import ConsumerId

A, B, C = ConsumerId(1), ConsumerId(2), ConsumerId(3)
PLENTY = Permits(1_000_000, 1 << 40)
POLICY = FailurePolicy(max_redelivery_count=1)
TO_DEAD = replace(POLICY, poison_policy=PoisonPolicy.DEAD_LETTER, dead_letter_topic="/default/dead")


def wakes_left_out(effects: list[Effect]) -> list[Effect]:
    return [effect for effect in effects if not isinstance(effect, WakeAt)]


def shared(*consumers: ConsumerId, committed: int, window: int = 10) -> SharedDispatch:
    dispatch = SharedDispatch(SubscriptionProgress(), limits=DispatchLimits(unacked_max=window))
    for consumer in consumers:
        dispatch.step(Joined(consumer), 0.0)
    dispatch.step(Available(committed), 0.0)
    return dispatch


def exclusive(*, committed: int = 0, policy: FailurePolicy = POLICY, window: int = 10) -> ExclusiveDispatch:
    dispatch = ExclusiveDispatch(SubscriptionProgress(), policy=policy, limits=DispatchLimits(unacked_max=window))
    dispatch.step(Joined(A), 0.0)
    dispatch.step(Available(committed), 0.0)
    return dispatch


def step(dispatch: RangeDispatch, event: object, now: float = 0.0) -> list[Effect]:
    return wakes_left_out(dispatch.step(event, now))  # type: ignore[arg-type]


# --- Shared -----------------------------------------------------------------------------------------------


def test_messages_of_a_consumer_that_leaves_go_to_the_others_in_order() -> None:
    dispatch = shared(A, B, committed=3)  # A: 0 2   B: 1
    assert step(dispatch, Left(A)) == [SendRanges(B, offsets(0, 2), 2)]


def test_a_nack_of_a_consumer_that_was_away_takes_nothing_from_the_one_that_has_the_message_now() -> None:
    dispatch = shared(A, B, committed=1)
    assert dispatch.in_flight.holder(0) == A
    step(dispatch, Left(A))
    assert dispatch.in_flight.holder(0) == B
    step(dispatch, Joined(A))
    assert step(dispatch, NackReceived(offsets(0), consumer=A)) == []
    assert dispatch.in_flight.holder(0) == B
    step(dispatch, NackReceived(offsets(0), consumer=B))
    assert dispatch.in_flight.holder(0) != B


def test_the_cursor_waits_for_the_oldest_unacked_message() -> None:
    dispatch = shared(A, committed=3)
    assert step(dispatch, AckReceived(offsets(1))) == []
    assert step(dispatch, AckReceived(offsets(0))) == []
    assert dispatch.progress.next_unacked == 2


def test_thirty_six_messages_reach_three_consumers_twelve_each() -> None:
    dispatch = shared(A, B, C, committed=0)
    received = {A: 0, B: 0, C: 0}
    pending = [effect for n in range(36) for effect in step(dispatch, Available(n + 1))]
    while pending:
        send = pending.pop(0)
        if isinstance(send, SendRanges):
            for part in send.ranges:
                received[send.consumer] += part.size
                pending += step(dispatch, AckReceived((part,)))
    assert received == {A: 12, B: 12, C: 12}


def test_a_consumer_without_room_is_passed_over() -> None:
    dispatch = SharedDispatch(SubscriptionProgress())
    dispatch.step(Joined(A, Permits(1, 1000)), 0.0)
    dispatch.step(Joined(B), 0.0)
    assert step(dispatch, Available(4)) == [SendRanges(A, offsets(0), 1, 1000), SendRanges(B, ranges((1, 4)), 1)]


def test_consumers_with_permits_share_what_there_is_in_ranges() -> None:
    dispatch = SharedDispatch(SubscriptionProgress())
    for consumer in (A, B, C):
        dispatch.step(Joined(consumer, PLENTY), 0.0)
    sends = step(dispatch, Available(3000))
    assert sends == [
        SendRanges(A, ranges((0, 1000)), 1, 1 << 40),
        SendRanges(B, ranges((1000, 2000)), 1, 1 << 40),
        SendRanges(C, ranges((2000, 3000)), 1, 1 << 40),
    ]


def test_turns_go_on_where_they_were_when_a_consumer_leaves() -> None:
    dispatch = shared(A, B, C, committed=1)  # A: 0, B is next
    step(dispatch, AckReceived(offsets(0)))
    step(dispatch, Left(A))
    assert step(dispatch, Available(3)) == [SendRanges(B, offsets(1), 1), SendRanges(C, offsets(2), 1)]


# --- Exclusive and Failover -------------------------------------------------------------------------------


def test_a_second_exclusive_consumer_is_refused_while_the_first_is_connected() -> None:
    dispatch = exclusive()
    assert step(dispatch, Joined(B)) == [JoinRefused(B, A)]
    step(dispatch, Left(A))
    assert step(dispatch, Joined(B)) == [Activated(B)]


def test_a_takeover_under_the_same_name_gets_everything_unacked_again() -> None:
    dispatch = exclusive(committed=3)
    step(dispatch, AckReceived(offsets(1)))
    assert step(dispatch, Joined(A)) == [SendRanges(A, offsets(0, 2), 2)]


def test_the_next_in_line_is_promoted_when_the_active_consumer_leaves() -> None:
    dispatch = FailoverDispatch(SubscriptionProgress())
    for consumer in (A, B, C):
        step(dispatch, Joined(consumer))
    assert step(dispatch, Available(2)) == [SendRanges(A, ranges((0, 2)), 1)]
    assert step(dispatch, Left(A)) == [Activated(B), SendRanges(B, ranges((0, 2)), 2)]
    assert step(dispatch, Left(C)) == []
    assert step(dispatch, Joined(A)) == []
    assert step(dispatch, Left(B)) == [Activated(A), SendRanges(A, ranges((0, 2)), 3)]


def test_an_active_consumer_that_reconnects_keeps_its_place() -> None:
    dispatch = FailoverDispatch(SubscriptionProgress())
    step(dispatch, Joined(A))
    step(dispatch, Joined(B))
    step(dispatch, Joined(A))
    assert dispatch.active == A


def test_a_thousand_messages_are_one_range() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A, PLENTY), 0.0)
    assert step(dispatch, Available(1000)) == [SendRanges(A, ranges((0, 1000)), 1, 1 << 40)]
    assert len(dispatch.in_flight._held) == 1
    assert step(dispatch, AckReceived(ranges((0, 1000)))) == []
    assert dispatch.progress.next_unacked == 1000


# --- room ---------------------------------------------------------------------------------------------------


def test_the_window_is_pipelined_and_never_exceeded() -> None:
    dispatch = exclusive(committed=20, window=3)
    assert dispatch.in_flight.count == 3
    assert step(dispatch, AckReceived(offsets(2))) == [SendRanges(A, offsets(3), 1)]


def test_a_window_changed_while_running_takes_effect_at_once() -> None:
    dispatch = exclusive(committed=20, window=2)
    assert step(dispatch, PolicyChanged(limits=DispatchLimits(unacked_max=5))) == [SendRanges(A, ranges((2, 5)), 1)]


def test_permits_are_used_up_and_granted_anew() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A, Permits(2, 1000)), 0.0)
    assert step(dispatch, Available(5)) == [SendRanges(A, ranges((0, 2)), 1, 1000)]
    assert step(dispatch, Shipped(A, 20)) == []
    assert step(dispatch, Granted(A, Permits(1, 0))) == [SendRanges(A, offsets(2), 1, 980)]


def test_a_consumer_that_grants_permits_leaves_the_window() -> None:
    dispatch = SharedDispatch(SubscriptionProgress(), limits=DispatchLimits(unacked_max=2))
    dispatch.step(Joined(A), 0.0)
    step(dispatch, Available(2))
    step(dispatch, Granted(A, Permits(1, 1000)))
    step(dispatch, Joined(B))
    assert step(dispatch, Available(5)) == [SendRanges(B, offsets(2, 4), 1), SendRanges(A, offsets(3), 1, 1000)]


def test_nothing_is_sent_while_the_bytes_of_the_last_delivery_are_unknown() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A, Permits(100, 1000)), 0.0)
    step(dispatch, Available(1))
    assert step(dispatch, Available(2)) == []
    assert step(dispatch, Shipped(A, 1200)) == []  # overdrawn by its last message
    assert step(dispatch, Granted(A, Permits(0, 500))) == [SendRanges(A, offsets(1), 1, 300)]


def test_what_could_not_be_sent_waits_for_the_next_heartbeat_and_counts_as_no_attempt() -> None:
    dispatch = exclusive(committed=4)
    assert step(dispatch, Shipped(A, 0, ranges((1, 4)))) == []
    assert step(dispatch, AckReceived(offsets(0))) == []
    assert dispatch.progress.next_unacked == 1
    assert step(dispatch, Ticked()) == [SendRanges(A, ranges((1, 4)), 1)]


def test_a_rate_limit_delays_and_says_when_it_goes_on() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress(), rate=TokenBucket(2.0))
    dispatch.step(Joined(A), 0.0)
    effects = dispatch.step(Available(5), 0.0)
    assert effects == [SendRanges(A, ranges((0, 2)), 1), WakeAt(0.5)]
    assert step(dispatch, Ticked(), 0.5) == [SendRanges(A, offsets(2), 1)]


# --- failures -------------------------------------------------------------------------------------------------


def test_a_nacked_message_comes_again_after_its_delay_and_others_go_on() -> None:
    dispatch = exclusive(committed=12)
    assert step(dispatch, NackReceived(offsets(3)), 0.0) == [SendRanges(A, offsets(10), 1)]
    assert step(dispatch, Ticked(), 0.9) == []
    step(dispatch, AckReceived(offsets(0)), 0.95)
    assert step(dispatch, AckReceived(offsets(1)), 1.0) == [SendRanges(A, offsets(3), 2)]
    assert dispatch.progress.next_unacked == 2


def test_a_nack_may_ask_for_a_longer_delay() -> None:
    dispatch = exclusive(committed=1)
    assert WakeAt(7.0) in dispatch.step(NackReceived(offsets(0), delay_seconds=7.0), 0.0)


def test_unacked_messages_time_out_and_are_sent_again() -> None:
    dispatch = exclusive(committed=3)
    step(dispatch, AckReceived(offsets(1)))
    assert step(dispatch, Ticked(), 29.9) == []
    effects = dispatch.step(Ticked(), 30.0)
    assert effects == [WakeAt(31.0)]
    assert step(dispatch, Ticked(), 31.0) == [SendRanges(A, offsets(0, 2), 2)]


def test_a_late_ack_of_a_message_that_waits_for_its_retry_counts() -> None:
    dispatch = exclusive(committed=1)
    step(dispatch, NackReceived(offsets(0)))
    assert step(dispatch, AckReceived(offsets(0))) == []
    assert dispatch.progress.next_unacked == 1
    assert step(dispatch, Ticked(), 5.0) == []


def test_repeated_acks_are_normal_and_acks_at_or_above_the_head_are_refused() -> None:
    dispatch = exclusive(committed=2)
    assert step(dispatch, AckReceived(offsets(0))) == []
    assert dispatch.progress.next_unacked == 1
    assert step(dispatch, AckReceived(offsets(0))) == []
    assert step(dispatch, AckReceived(ranges((1, 9)))) == [AckRefused(ranges((2, 9)))]
    assert dispatch.progress.next_unacked == 2
    assert step(dispatch, NackReceived(offsets(7))) == [AckRefused(offsets(7))]


def test_poison_blocks_the_whole_subscription_and_loses_nothing() -> None:
    dispatch = exclusive(committed=2)
    step(dispatch, NackReceived(offsets(0)), 0.0)
    step(dispatch, Ticked(), 1.0)
    assert step(dispatch, NackReceived(offsets(0), reason="bad"), 1.0) == [Blocked(0, Tries(2, 2, "bad"))]
    assert step(dispatch, Available(5), 1.0) == []
    assert step(dispatch, AckReceived(offsets(1)), 1.0) == []
    dropping = replace(POLICY, poison_policy=PoisonPolicy.DROP)
    assert step(dispatch, PolicyChanged(policy=dropping), 2.0) == [
        PoisonDropped(offsets(0)[0], Tries(2, 2, "bad")),
        SendRanges(A, ranges((2, 5)), 1),
    ]
    assert dispatch.progress.next_unacked == 2


def test_a_late_ack_of_the_poison_itself_unblocks() -> None:
    dispatch = exclusive(committed=1, policy=replace(POLICY, max_redelivery_count=0))
    assert step(dispatch, NackReceived(offsets(0))) == [Blocked(0, Tries(1, 1, ""))]
    assert dispatch.standing().blocked_offset == 0
    assert step(dispatch, AckReceived(offsets(0))) == []
    assert dispatch.standing().blocked_offset is None
    assert dispatch.progress.next_unacked == 1


def test_a_blocked_message_is_not_settled_by_a_dead_letter_nobody_asked_for() -> None:
    dispatch = exclusive(committed=1, policy=replace(POLICY, max_redelivery_count=0))
    step(dispatch, NackReceived(offsets(0)))
    assert step(dispatch, DeadLettered(offsets(0))) == []


def test_a_larger_redelivery_count_sends_the_poison_again() -> None:
    dispatch = exclusive(committed=1, policy=replace(POLICY, max_redelivery_count=0))
    step(dispatch, NackReceived(offsets(0)))
    assert step(dispatch, PolicyChanged(policy=POLICY)) == [SendRanges(A, offsets(0), 2)]


def test_a_dead_letter_is_settled_only_when_its_copy_is_safe() -> None:
    dispatch = exclusive(committed=2, policy=replace(TO_DEAD, max_redelivery_count=0))
    assert step(dispatch, NackReceived(offsets(0), reason="bad"), 0.0) == [
        DeadLetter(offsets(0)[0], Tries(1, 1, "bad"), "/default/dead")
    ]
    assert step(dispatch, AckReceived(offsets(1)), 0.0) == []
    assert step(dispatch, DeadLetterFailed(offsets(0)), 0.0) == []
    assert step(dispatch, Ticked(), 1.0) == [DeadLetter(offsets(0)[0], Tries(1, 1, "bad"), "/default/dead")]
    assert step(dispatch, DeadLettered(offsets(0)), 1.0) == []
    assert dispatch.progress.next_unacked == 2


def test_a_consumer_that_leaves_again_and_again_makes_no_poison() -> None:
    dispatch = exclusive(committed=1)
    for _ in range(20):
        step(dispatch, Left(A))
        step(dispatch, Joined(A))
    assert step(dispatch, NackReceived(offsets(0)), 0.0) == []
    assert step(dispatch, Ticked(), 1.0) == [SendRanges(A, offsets(0), 22)]


# --- the log ----------------------------------------------------------------------------------------------------


def test_a_message_committed_before_the_consumer_came_is_delivered() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress(100, head=100))
    assert step(dispatch, Available(101)) == []
    assert step(dispatch, Joined(A)) == [Activated(A), SendRanges(A, offsets(100), 1)]


def test_one_notification_is_enough_for_any_number_of_commits() -> None:
    dispatch = exclusive(window=1000)
    assert step(dispatch, Available(1000)) == [SendRanges(A, ranges((0, 1000)), 1)]


def test_orphans_hold_the_cursor_and_are_delivered_when_rescued() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress(head=10, missing=[(2, 4)]))
    assert step(dispatch, Joined(A)) == [Activated(A), SendRanges(A, ranges((0, 2), (4, 10)), 1)]
    assert step(dispatch, AckReceived(ranges((0, 2), (4, 10)))) == []
    assert dispatch.progress.next_unacked == 2
    assert step(dispatch, HistoryAvailable(ranges((2, 4)))) == [SendRanges(A, ranges((2, 4)), 1)]
    assert step(dispatch, AckReceived(ranges((2, 4)))) == []
    assert dispatch.progress.next_unacked == 10


def test_voids_are_stepped_over() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress(head=6, missing=[(2, 4)]))
    step(dispatch, Joined(A))
    step(dispatch, AckReceived(ranges((0, 2), (4, 6))))
    assert step(dispatch, Voided(ranges((2, 4)))) == []
    assert dispatch.progress.next_unacked == 6


@pytest.mark.parametrize("found", [Voided(ranges((1, 8))), LogTrimmed(8)])
def test_what_turns_out_not_to_exist_while_it_is_read_costs_no_permits(found: Voided | LogTrimmed) -> None:
    """Its consumer never sees it, and cannot grant them again."""
    dispatch = ExclusiveDispatch(SubscriptionProgress(head=10))
    step(dispatch, Joined(A, Permits(5, 1000)))  # 0 to 4 are on their way to it
    step(dispatch, found)
    step(dispatch, Shipped(A, 100, ranges((1, 5))))
    assert step(dispatch, Ticked()) == [SendRanges(A, ranges((8, 10)), 1, 900)]


def test_a_range_found_to_be_orphaned_while_reading_is_withheld() -> None:
    dispatch = exclusive(committed=4)
    step(dispatch, Shipped(A, 0, ranges((1, 3))))
    assert step(dispatch, Withheld(ranges((1, 3)))) == []
    assert step(dispatch, Ticked()) == []
    assert step(dispatch, HistoryAvailable(ranges((1, 3)))) == [SendRanges(A, ranges((1, 3)), 1)]


def test_what_retention_removed_is_reported_and_not_waited_for() -> None:
    dispatch = exclusive(committed=20)
    step(dispatch, AckReceived(offsets(1)))
    assert step(dispatch, LogTrimmed(4)) == [
        Expired(ranges((0, 1), (2, 4))),
        SendRanges(A, ranges((11, 14)), 1),
    ]
    assert dispatch.progress.next_unacked == 4


def test_a_seek_forgets_acks_and_delivers_from_there() -> None:
    dispatch = exclusive(committed=5)
    step(dispatch, AckReceived(ranges((0, 3))))
    assert step(dispatch, CursorReset(1)) == [SendRanges(A, ranges((1, 5)), 1)]
    assert dispatch.progress.next_unacked == 1


def test_a_restart_repeats_only_what_was_not_acked() -> None:
    dispatch = exclusive(committed=10)
    step(dispatch, AckReceived(ranges((0, 2), (5, 8))))
    saved = dispatch.progress.saved()
    progress, intact = SubscriptionProgress.restore(saved.cursor, saved.holes, head=10)
    again = ExclusiveDispatch(progress)
    assert intact
    assert step(again, Joined(B)) == [Activated(B), SendRanges(B, ranges((2, 5), (8, 10)), 1)]


def test_acks_above_the_cursor_are_worth_saving_too() -> None:
    dispatch = exclusive(committed=10)
    before = dispatch.progress.saved()
    assert step(dispatch, AckReceived(offsets(5))) == []
    assert dispatch.progress.saved().changes != before.changes
