"""What waits in a consumer's own queue: no deadline before it is handed over, and ways back to the others."""

from __future__ import annotations

from pydanube.core.dispatch.consumer_window import Permits
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.events import (
    AckReceived,
    Activated,
    Available,
    ConsumerFinished,
    CursorReset,
    Effect,
    Granted,
    Handed,
    Joined,
    Keyed,
    Left,
    NotHeld,
    Recall,
    Returned,
    SendRanges,
    Shipped,
    Ticked,
    WakeAt,
    offsets,
    ranges,
)
from pydanube.core.dispatch.key_shared import KeySharedDispatch
from pydanube.core.dispatch.lag import explain
from pydanube.core.dispatch.machine import DispatchMachine
from pydanube.core.dispatch.range_dispatch import ExclusiveDispatch, FailoverDispatch, SharedDispatch
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.names import ConsumerId

A, B, C = ConsumerId(1), ConsumerId(2), ConsumerId(3)
POLICY = FailurePolicy(ack_timeout_ms=30_000, base_redelivery_delay_ms=0)
ROOM = Permits(10, 10_000)


def joined(
    consumer: ConsumerId, messages: int = 10, *, hands_over: bool = True, filters: tuple[str, ...] = ()
) -> Joined:
    return Joined(consumer, Permits(messages, 10_000), filters, hands_over)


def told(machine: DispatchMachine, event: object, now: float = 0.0) -> list[Effect]:
    """The effects of a step, whose sends are on the wire at once."""
    effects = machine.step(event, now)  # type: ignore[arg-type]
    for effect in list(effects):
        if isinstance(effect, SendRanges):
            effects += told(machine, Shipped(effect.consumer, 1), now)
    return effects


def sends(effects: list[Effect]) -> list[tuple[int, int, int]]:
    """Consumer, offset, attempt."""
    return [
        (each.consumer, offset, each.attempt)
        for each in effects
        if isinstance(each, SendRanges)
        for first, end in each.ranges
        for offset in range(first, end)
    ]


def shared(messages: int, *joins: Joined) -> SharedDispatch:
    machine = SharedDispatch(SubscriptionProgress(), policy=POLICY)
    for join in joins:
        told(machine, join)
    told(machine, Available(messages))
    return machine


def test_what_nobody_has_seen_has_no_deadline_and_what_is_handed_over_has_one_from_then() -> None:
    machine = shared(2, joined(A))
    told(machine, Ticked(), 1_000.0)
    assert machine.deliveries.timed_out == 0
    told(machine, Handed(A, offsets(0)), 1_000.0)
    told(machine, Ticked(), 1_029.0)
    assert machine.deliveries.timed_out == 0
    assert sends(told(machine, Ticked(), 1_030.0)) == [(A, 0, 2)]
    assert machine.deliveries.timed_out == 1 and machine.in_flight.holder(1) == A


def test_the_deadlines_of_a_consumer_that_says_nothing_run_from_sending() -> None:
    machine = shared(2, joined(A, hands_over=False))
    told(machine, Ticked(), 30.0)
    assert machine.deliveries.timed_out == 2


def test_it_wakes_when_a_handed_message_is_due() -> None:
    machine = shared(2, joined(A))
    assert WakeAt(35.0) in told(machine, Handed(A, offsets(0)), 5.0)


def test_more_time_may_be_asked_for_and_is_never_less() -> None:
    machine = shared(2, joined(A))
    told(machine, Handed(A, offsets(0, 1)), 0.0)
    told(machine, Handed(A, offsets(0), 100.0), 10.0)
    told(machine, Handed(A, offsets(1), 1.0), 10.0)
    told(machine, Handed(A, offsets(0), 5.0), 20.0)
    told(machine, Ticked(), 29.0)
    assert machine.deliveries.timed_out == 0
    told(machine, Ticked(), 30.0)
    assert machine.deliveries.timed_out == 1 and machine.in_flight.holder(0) == A
    told(machine, Ticked(), 110.0)
    assert machine.deliveries.timed_out == 2


def test_only_what_a_consumer_holds_can_be_held_for_longer() -> None:
    machine = shared(4, joined(A, 2), joined(B, 2))
    theirs = next(offset for offset in range(4) if machine.in_flight.holder(offset) == B)
    assert told(machine, Handed(A, offsets(theirs), 5.0)) == [NotHeld(offsets(theirs))]
    told(machine, AckReceived(offsets(theirs)))
    assert NotHeld(offsets(theirs)) in told(machine, Handed(B, offsets(theirs), 5.0))


def test_without_an_ack_timeout_nothing_is_ever_due() -> None:
    machine = SharedDispatch(SubscriptionProgress(), policy=FailurePolicy(ack_timeout_ms=0))
    for event in (joined(A), joined(B), Available(4), Handed(A, ranges((0, 4)), 5.0)):
        told(machine, event)
    assert sends(told(machine, Ticked(), 1e6)) == [] and machine.deliveries.timed_out == 0


def test_what_is_returned_was_not_delivered() -> None:
    machine = shared(3, joined(A))
    told(machine, Handed(A, offsets(0)))
    told(machine, joined(B))
    effects = told(machine, Returned(A, ranges((0, 3))), 1.0)
    assert sends(effects) and all(attempt == 1 and offset in (1, 2) for _, offset, attempt in sends(effects))
    assert machine.in_flight.holder(0) == A, "what was handed over is not given back"


def test_a_silent_consumer_gives_its_queue_to_one_with_room_and_is_sent_nothing_until_it_says_something() -> None:
    machine = shared(5, joined(A))
    told(machine, Handed(A, offsets(0)), 10.0)
    told(machine, Joined(B, Permits(0, 0), hands_over=True), 11.0)
    assert sends(told(machine, Ticked(), 39.0)) == []
    told(machine, Ticked(), 40.0)  # offset 0 has failed; nobody has room for what is unseen
    assert machine.in_flight.holder(1) == A
    effects = told(machine, Granted(B, ROOM), 41.0)
    assert {offset for consumer, offset, _ in sends(effects) if consumer == B} >= {1, 2, 3, 4}
    assert Recall(A, ranges((0, 5)), taken=1) in effects, "if it goes on some day, it should not begin with these"
    assert {consumer for consumer, _, _ in sends(told(machine, Available(9), 42.0))} <= {B}
    told(machine, Granted(A, ROOM), 43.0)
    assert A in {consumer for consumer, _, _ in sends(told(machine, Available(19), 44.0))}


def test_a_consumer_that_takes_something_now_and_then_keeps_its_queue() -> None:
    machine = shared(10, joined(A), joined(B, 0))
    for number in range(9):
        now = 20.0 * (number + 1)
        told(machine, Handed(A, offsets(number)), now)
        told(machine, AckReceived(offsets(number), A), now + 10)
    told(machine, Granted(B, ROOM), 180.0)
    assert machine.in_flight.holder(9) == A


def test_a_consumer_alone_keeps_its_queue() -> None:
    for kind in (ExclusiveDispatch, FailoverDispatch, SharedDispatch):
        machine = kind(SubscriptionProgress(), policy=POLICY)
        told(machine, joined(A))
        told(machine, Available(5))
        assert told(machine, Ticked(), 1_000.0) == []
        assert machine.in_flight.holder(4) == A


def failover(messages: int, *joins: Joined) -> FailoverDispatch:
    machine = FailoverDispatch(SubscriptionProgress(), policy=POLICY)
    for join in joins:
        told(machine, join)
    told(machine, Available(messages))
    return machine


def test_who_stands_by_takes_over_from_a_silent_consumer_and_keeps_the_place() -> None:
    machine = failover(5, joined(A), joined(B))
    told(machine, Handed(A, offsets(0)), 10.0)
    told(machine, Ticked(), 39.0)
    assert machine.active == A
    effects = told(machine, Ticked(), 40.0)
    assert Activated(B) in effects and Recall(A, ranges((1, 5)), taken=1) in effects
    assert [offset for consumer, offset, _ in sends(effects) if consumer == B] == [0, 1, 2, 3, 4], "all of it, in order"
    told(machine, Granted(A, ROOM), 41.0)
    assert sends(told(machine, Available(6), 41.0)) == [(B, 5, 1)], "it goes on, and stands by"
    back = sends(told(machine, Left(B), 42.0))
    assert {consumer for consumer, _, _ in back} == {A} and len(back) == 6


def test_who_stands_by_waits_for_what_the_application_of_a_silent_consumer_has_and_has_time_for() -> None:
    machine = failover(5, joined(A), joined(B))
    told(machine, Handed(A, offsets(0), 100.0), 10.0)
    assert sends(told(machine, Ticked(), 109.0)) == [] and machine.active == A
    effects = told(machine, Ticked(), 110.0)
    assert [offset for consumer, offset, _ in sends(effects) if consumer == B] == [0, 1, 2, 3, 4]


def test_who_stands_by_follows_one_that_stops_behind_what_that_one_has() -> None:
    machine = failover(5, joined(A), joined(B))
    told(machine, Handed(A, offsets(0)), 1.0)
    assert Activated(B) in told(machine, ConsumerFinished(A), 2.0)
    assert sends(told(machine, Returned(A, ranges((1, 5))), 2.0)) == [], "the application of the first has one still"
    assert [offset for _, offset, _ in sends(told(machine, AckReceived(offsets(0), A), 3.0))] == [1, 2, 3, 4]
    told(machine, Left(B), 4.0)
    assert sends(told(machine, joined(B), 5.0)), "one that stopped is not in the way of one that comes"


def test_of_two_silent_consumers_the_one_that_goes_on_first_receives() -> None:
    machine = failover(5, joined(A), joined(B))
    told(machine, Ticked(), 30.0)
    assert machine.active == B, "A was silent"
    told(machine, joined(C), 62.0)
    assert machine.active == C, "and so was B"
    told(machine, Left(C), 63.0)
    assert machine.active == B and machine.in_flight.count == 0
    effects = told(machine, Granted(A, ROOM), 64.0)
    assert Activated(A) in effects and {consumer for consumer, _, _ in sends(effects)} == {A}


def test_nobody_takes_over_from_a_silent_consumer_that_has_seen_everything() -> None:
    machine = failover(2, joined(A), joined(B))
    told(machine, Handed(A, offsets(0, 1)), 1.0)
    told(machine, AckReceived(offsets(0, 1), A), 2.0)
    assert told(machine, Ticked(), 1_000.0) == [] and machine.active == A


def test_an_idle_consumer_gets_the_upper_half_of_what_another_has_not_seen() -> None:
    machine = shared(9, joined(A))
    told(machine, Handed(A, offsets(0)))
    assert WakeAt(1.1) in told(machine, joined(B), 1.0)
    assert told(machine, Ticked(), 1.05) == []
    assert Recall(A, ranges((5, 9))) in told(machine, Ticked(), 1.1)
    assert not any(isinstance(effect, Recall) for effect in told(machine, Ticked(), 1.5)), "not again so soon"
    assert {consumer for consumer, _, _ in sends(told(machine, Returned(A, ranges((6, 9))), 1.6))} >= {B}


def test_who_has_something_to_do_is_not_idle() -> None:
    machine = shared(20, joined(A), joined(B))
    assert not any(isinstance(effect, Recall) for effect in told(machine, Ticked(), 5.0))
    old = shared(4, joined(A, hands_over=False))
    told(old, joined(B), 1.0)
    assert not any(isinstance(effect, Recall) for effect in told(old, Ticked(), 5.0)), "an old client is not asked"


def test_a_stopped_consumer_gets_nothing_and_may_acknowledge() -> None:
    machine = shared(2, joined(A))
    told(machine, ConsumerFinished(A))
    assert sends(told(machine, Available(5))) == []
    told(machine, AckReceived(offsets(0, 1), A))
    assert machine.progress.next_unacked == 2
    assert sends(told(machine, joined(A), 1.0)), "until it comes anew"


def test_a_seek_and_a_takeover_leave_nothing_unseen() -> None:
    machine = shared(5, joined(A, 5))
    told(machine, CursorReset(5))
    assert machine.standing().unseen == 0
    machine = shared(5, joined(A, 5))
    told(machine, joined(A, 0), 1.0)
    assert machine.standing().unseen == 0
    told(machine, Left(A), 2.0)


def keyed(*joins: Joined) -> KeySharedDispatch:
    machine = KeySharedDispatch(SubscriptionProgress(), policy=POLICY)
    for join in joins:
        told(machine, join)
    told(machine, Available(8))
    told(machine, Keyed(tuple((offset, f"k{offset % 4}") for offset in range(8))))
    return machine


def test_keys_of_a_consumer_that_stops_go_on_with_others_behind_what_it_holds() -> None:
    machine = keyed(joined(A))
    assert machine.in_flight.count == 4, "one of each key"
    told(machine, Handed(A, offsets(0)))
    told(machine, joined(B), 1.0)
    told(machine, ConsumerFinished(A), 2.0)
    back = sends(told(machine, Returned(A, ranges((1, 4))), 2.0))
    assert [offset for consumer, offset, _ in back if consumer == B] == [1, 2, 3]
    assert sends(told(machine, AckReceived(offsets(1, 2, 3), B), 3.0)) == [(B, 5, 1), (B, 6, 1), (B, 7, 1)]
    assert sends(told(machine, AckReceived(offsets(0), A), 4.0)) == [(B, 4, 1)]


def test_keys_of_a_silent_consumer_move_and_come_back() -> None:
    machine = keyed(joined(A))
    told(machine, Handed(A, offsets(0)), 0.0)
    moved = sends(told(machine, joined(B), 31.0))
    assert [offset for consumer, offset, _ in moved if consumer == B and offset in (1, 2, 3)] == [1, 2, 3]
    told(machine, Granted(A, ROOM), 32.0)
    assert machine.owners.filters(A) == ()


def test_an_idle_consumer_is_given_what_is_unseen_of_its_own_keys_only() -> None:
    machine = keyed(joined(A))
    told(machine, joined(B), 1.0)
    recalls = [effect for effect in told(machine, Ticked(), 1.2) if isinstance(effect, Recall)]
    wanted = {offset for recall in recalls for first, end in recall.ranges for offset in range(first, end)}
    assert wanted == {offset for offset in range(4) if machine.backlog.owner_of(offset) == B} and wanted


# --- who cannot say what it hands over ------------------------------------------------------------------------


def test_the_window_of_slow_consumers_holds_what_they_answer_in_half_an_ack_timeout() -> None:
    machine = SharedDispatch(SubscriptionProgress(), policy=POLICY)
    told(machine, Joined(A))
    told(machine, Available(1_000))
    assert machine.in_flight.count == 10
    now = 0.0
    for offset in range(40):  # five seconds each
        now += 5.0
        told(machine, AckReceived(offsets(offset), A), now)
    assert machine.in_flight.count == machine.standing().unacked_max == 3
    for offset in range(40, 200):
        now += 0.01
        told(machine, AckReceived(offsets(offset), A), now)
    assert machine.in_flight.count == 10, "and never more than is allowed"


# --- in words ---------------------------------------------------------------------------------------------


def test_explain_says_what_is_unseen() -> None:
    machine = shared(9, joined(A, 5))
    told(machine, Handed(A, offsets(0)))
    sentence = explain(machine.standing(), 0.0)
    assert sentence.startswith("no consumer has room: 5 messages wait for an ack, 4 of them unseen in the queues of")


def test_explain_does_not_forget_what_timed_out_and_is_still_in_a_queue() -> None:
    machine = shared(9, joined(A, 5, hands_over=False))
    told(machine, Ticked(), 31.0)
    sentence = explain(machine.standing(), 31.0)
    assert "0 messages wait for an ack, and consumers still have 5 messages that timed out" in sentence


def test_what_was_taken_from_a_consumer_and_sent_to_it_again_is_not_given_back_by_an_answer_from_before() -> None:
    machine = shared(5, joined(A, 20))
    told(machine, joined(B, 1), 40.0)
    assert machine.in_flight.holder(0) == B, "the first of a queue that was taken from the silent one"
    told(machine, AckReceived((), A), 41.0)  # it goes on, and has not heard of it
    held = [offset for offset in range(1, 5) if machine.in_flight.holder(offset) == A]
    assert held == [1, 2, 3, 4]
    assert sends(told(machine, Returned(A, ranges((0, 5))), 41.0)) == []
    assert [offset for offset in range(1, 5) if machine.in_flight.holder(offset) == A] == held, "it may show these"
    told(machine, Granted(B, ROOM), 41.0)
    assert sends(told(machine, Returned(A, ranges((1, 5)), taken=1), 41.0)), "these it has heard of"
