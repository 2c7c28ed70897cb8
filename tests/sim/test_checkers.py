"""Every checker, with a history in which its promise holds and one in which it is broken.

A check that has never found anything proves nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from pydanube.testing.checkers import RULES, check, shortened
from pydanube.testing.history import (
    Acked,
    Claimed,
    Created,
    Cursor,
    Damaged,
    Dead,
    Departed,
    Done,
    Event,
    Fault,
    Fetched,
    Flushed,
    Forgot,
    Given,
    Got,
    Grew,
    Head,
    History,
    Kept,
    Lease,
    Nacked,
    Orphaned,
    Policy,
    Quiet,
    Released,
    Sent,
    Serving,
    Stopped,
    Subscribed,
    Worked,
)

TOPIC = "/default/orders"
BEGIN = [Created(TOPIC, True), Claimed(TOPIC, 1, broker=1, start=0), Subscribed(TOPIC, "sub", "Exclusive")]


def sent(*messages: str, at: float = 0.0) -> list[Event]:
    return [Sent(TOPIC, message, at=at) for message in messages]


def acked(message: str, offset: int, epoch: int = 1, *, broker: int = 0, at: float = 1.0) -> Acked:
    return Acked(TOPIC, message, offset, epoch, broker, at)


def got(message: str, offset: int, *, key: str = "", epoch: int = 1, at: float = 2.0, rescued: bool = False) -> Got:
    return Got(TOPIC, "sub", "c0", message, offset, key, 1, epoch, rescued, at)


def kept(messages: dict[int, str], head: int | None = None, **fields: object) -> Kept:
    end = max(messages, default=-1) + 1 if head is None else head
    return Kept(TOPIC, 0, end, messages, **fields)  # type: ignore[arg-type]


def broken(events: Iterable[Event]) -> set[str]:
    """The rules that this history breaks."""
    return {violation.rule for violation in check(History(events))}


def test_a_history_in_which_all_is_well_breaks_no_rule() -> None:
    history = [
        *BEGIN,
        *sent("a", "b", "c"),
        acked("a", 0, broker=1),
        got("a", 0),
        Done(TOPIC, "sub", 0, 1),
        Cursor(TOPIC, "sub", 0),
        acked("b", 1, broker=1),
        Head(TOPIC, 1, 1, 2),
        Released(TOPIC, 1, 2, clean=True),
        Claimed(TOPIC, 2, broker=2, start=2),
        Head(TOPIC, 2, 2, 2),
        got("b", 1, epoch=2),
        Done(TOPIC, "sub", 1, 2),
        acked("c", 2, 2, broker=2, at=3.0),
        Quiet(1.0, 3.0),
        got("c", 2, epoch=2, at=3.1),
        Done(TOPIC, "sub", 2, 2),
        kept({0: "a", 1: "b", 2: "c"}),
    ]
    assert broken(history) == set()


def test_an_empty_history_breaks_no_rule() -> None:
    assert broken([]) == set()


PLANTED: dict[str, list[Event]] = {
    "lost_write": [
        *BEGIN,
        *sent("a", "b"),
        acked("a", 0),
        acked("b", 1),
        got("a", 0),
        kept({0: "a"}, 2, voids=[(1, 2)]),
    ],
    "duplicate_offset": [*BEGIN, *sent("a", "b"), got("a", 0), got("b", 0)],
    "stored_twice": [
        *BEGIN,
        Sent(TOPIC, "a", once=True),
        got("a", 0),
        got("a", 1),
        kept({0: "a", 1: "a"}),
    ],
    "gap": [*BEGIN, *sent("a", "c"), got("a", 0), got("c", 2), kept({0: "a", 2: "c"})],
    "phantom": [*BEGIN, *sent("a", "b"), got("a", 0), got("b", 1), kept({0: "a"})],
    "head_back": [*BEGIN, Head(TOPIC, 1, 1, 7), Head(TOPIC, 1, 1, 5)],
    "two_owners": [*BEGIN, Claimed(TOPIC, 2, broker=2, start=10), acked("a", 3, 1, broker=3)],
    "unreserved": [*BEGIN, Given(TOPIC, offset=7, epoch=1, reserved=7, believed=20)],
    "replaced_owner": [
        *BEGIN,
        Lease(16.0),
        Claimed(TOPIC, 2, broker=2, start=10, at=5.0),
        acked("a", 3, 1, broker=1, at=30.0),
    ],
    "stray_claim": [*BEGIN, Claimed(TOPIC, 2, broker=2, start=0, registered=False)],
    "forgotten": [*BEGIN, Forgot(TOPIC, first=4, size_bytes=900, limit_bytes=1000)],
    "needless_stop": [Stopped(2, "LogStopped: sync of journal/spare.tmp failed", failed_seconds=40.0)],
    "growth": [Grew(1, "waiters", 3, 40)],
    "long_step": [Worked(2_000_000)],
    "cursor_back": [*BEGIN, Cursor(TOPIC, "sub", 5), Cursor(TOPIC, "sub", 4)],
    "repeated_after_move": [
        *BEGIN,
        got("a", 0),
        Done(TOPIC, "sub", 0, 1),
        Released(TOPIC, 1, 1, clean=True),
        Claimed(TOPIC, 2, broker=2, start=1),
        got("a", 0, epoch=2),
    ],
    "shown_again": [*BEGIN, got("a", 0), Done(TOPIC, "sub", 0, 1, consumer="c0"), got("a", 0)],
    "flushed_in_vain": [
        *BEGIN,
        Done(TOPIC, "sub", 0, 1),
        Flushed(TOPIC, "sub", 0, "c0"),
        Flushed(TOPIC, "sub", 1, "c0"),
        Done(TOPIC, "sub", 1, 1),
    ],
    "key_order": [*BEGIN, got("b", 1, key="k"), got("a", 0, key="k")],
    "never_delivered": [*BEGIN, *sent("a", "b"), got("a", 0), kept({0: "a", 1: "b"})],
    "delivered_twice": [
        Created("/default/fanout", False),
        Got("/default/fanout", "sub", "c0", "a", 0),
        Got("/default/fanout", "sub", "c0", "a", 0),
    ],
    "dead_letter": [
        *BEGIN,
        Policy(TOPIC, "sub", 2, dead_letter=True),
        *[Nacked(TOPIC, "sub", 0, 1)] * 2,
        Dead(TOPIC, "sub", "a", 0),
    ],
    "stuck": [
        *BEGIN,
        *sent("a", "b"),
        Quiet(1.0, 10.0),
        got("a", 0, at=10.5),
        Done(TOPIC, "sub", 0, 1),
        got("b", 1, at=13.0),
        Done(TOPIC, "sub", 1, 1),
        kept({0: "a", 1: "b"}),
    ],
}


@pytest.mark.parametrize("rule", PLANTED)
def test_a_planted_violation_is_found_by_its_checker_alone(rule: str) -> None:
    assert broken(PLANTED[rule]) == {rule}


def test_every_checker_has_a_planted_violation() -> None:
    assert {rule.__name__ for rule in RULES} == set(PLANTED)


# --- what else each of them must see ------------------------------------------------------------------------


def test_a_message_under_another_offset_than_its_producer_was_told_is_lost() -> None:
    events = [*BEGIN, *sent("a", "b"), acked("a", 0), kept({0: "b", 1: "a"}), got("a", 1), got("b", 0)]
    assert "lost_write" in broken(events)


def test_what_went_bad_on_a_disk_may_be_missing_where_that_is_recorded() -> None:
    events = [*BEGIN, *sent("a", "b"), acked("a", 0), acked("b", 1), got("a", 0), got("b", 1)]
    assert broken([*events, Damaged(TOPIC), kept({0: "a"}, 2, voids=[(1, 2)])]) == set()
    assert broken([*events, Damaged(TOPIC), kept({0: "a"}, 2)]) == {"lost_write", "gap", "phantom"}


def test_one_offset_is_told_to_two_producers() -> None:
    assert broken([*BEGIN, acked("a", 4), acked("b", 4)]) == {"duplicate_offset"}


def test_what_somebody_read_from_the_log_counts_as_what_a_consumer_received() -> None:
    assert broken([*BEGIN, acked("a", 4), Fetched(TOPIC, "b", 4)]) == {"duplicate_offset"}
    assert broken([*BEGIN, acked("a", 4), Fetched(TOPIC, "a", 4)]) == set()


def test_a_log_that_believes_in_more_than_the_store_has_is_found_before_it_gives_it_out() -> None:
    assert broken([*BEGIN, Given(TOPIC, offset=3, epoch=1, reserved=7, believed=20)]) == {"unreserved"}


def test_a_replaced_owner_may_acknowledge_for_a_lease_and_what_an_answer_takes() -> None:
    events = [*BEGIN, Lease(16.0), Claimed(TOPIC, 2, broker=2, start=10, at=5.0)]
    assert broken([*events, acked("a", 3, 1, broker=1, at=25.0)]) == set()
    assert broken([*events, acked("a", 3, 1, broker=0, at=90.0)]) == set(), "its successor answers a repetition"


def test_retention_may_take_an_object_while_there_is_more_than_its_limit() -> None:
    assert broken([*BEGIN, Forgot(TOPIC, first=4, size_bytes=1001, limit_bytes=1000)]) == set()


def test_a_broker_may_stop_when_its_disk_fails_and_not_without() -> None:
    assert broken([Stopped(2, "LogStopped", failed_seconds=0.5)]) == set()
    assert broken([Stopped(2, "LogStopped: there is no room", failed_seconds=-1.0)]) == {"needless_stop"}


def test_what_was_sent_without_a_session_or_in_two_may_be_there_twice() -> None:
    twice = [got("a", 0), got("a", 1), kept({0: "a", 1: "a"})]
    assert broken([*BEGIN, Sent(TOPIC, "a"), *twice]) == set()
    assert broken([*BEGIN, Sent(TOPIC, "a", once=True), Sent(TOPIC, "a", once=True), *twice]) == set()


def test_a_gap_at_the_end_is_a_gap() -> None:
    assert "gap" in broken([*BEGIN, *sent("a"), got("a", 0), kept({0: "a"}, head=3)])
    assert broken([*BEGIN, *sent("a"), got("a", 0), kept({0: "a"}, 3, orphans=[(1, 3)])]) == set()


def test_a_message_that_nobody_sent_is_a_phantom() -> None:
    assert "phantom" in broken([*BEGIN, *sent("a"), got("a", 0), got("x", 1), kept({0: "a", 1: "x"})])


def test_the_next_epoch_begins_below_what_the_last_one_reached() -> None:
    assert "head_back" in broken([*BEGIN, Head(TOPIC, 1, 1, 7), Claimed(TOPIC, 2, broker=2, start=5)])


def test_a_message_gets_an_offset_below_one_that_was_given_before_it_was_sent() -> None:
    events = [*BEGIN, *sent("a"), acked("a", 9, at=1.0), *sent("b", at=2.0), acked("b", 4, at=3.0)]
    assert broken(events) == {"head_back"}
    assert broken([*events, Orphaned(TOPIC, 0, 5)]) == set(), "a lost owner's messages come late by nature"


def test_two_that_are_sent_at_the_same_time_may_change_places() -> None:
    assert broken([*BEGIN, *sent("a", "b"), acked("a", 1, at=1.0), acked("b", 0, at=2.0)]) == set()


def test_an_epoch_is_claimed_twice() -> None:
    assert broken([*BEGIN, Claimed(TOPIC, 1, broker=2, start=0)]) == {"two_owners"}


def test_an_owner_that_was_replaced_gives_out_what_belongs_to_the_next() -> None:
    assert "two_owners" in broken([*BEGIN, Claimed(TOPIC, 2, broker=2, start=10), acked("a", 12, 1, broker=1)])


def test_two_brokers_say_at_once_that_they_may_serve() -> None:
    assert broken([*BEGIN, Serving(TOPIC, [1, 2], at=4.0)]) == {"two_owners"}


def test_what_another_consumer_acknowledged_or_another_owner_was_told_may_be_shown() -> None:
    taken = [*BEGIN, got("a", 0)]
    assert broken([*taken, Done(TOPIC, "sub", 0, 1, consumer="c1"), got("a", 0)]) == set(), "it was on its way"
    assert broken([*taken, Done(TOPIC, "sub", 0, 1, consumer="c0"), got("a", 0, epoch=2)]) == set()
    assert broken([*taken, got("a", 0), Done(TOPIC, "sub", 0, 1, consumer="c0")]) == set(), "it was not, by then"


def test_what_was_acknowledged_two_clean_moves_ago_comes_again() -> None:
    moves: list[Event] = [
        Released(TOPIC, 1, 1, clean=True),
        Claimed(TOPIC, 2, broker=2, start=1),
        Released(TOPIC, 2, 1, clean=True),
        Claimed(TOPIC, 3, broker=1, start=1),
    ]
    done: list[Event] = [*BEGIN, got("a", 0), Done(TOPIC, "sub", 0, 1)]
    assert broken([*done, *moves, got("a", 0, epoch=3)]) == {"repeated_after_move"}
    dirty = [Released(TOPIC, 1, 1, clean=False) if event == moves[0] else event for event in moves]
    assert broken([*done, *dirty, got("a", 0, epoch=3)]) == set(), "its cursor could not be stored"


def test_after_a_crash_takeover_what_was_acknowledged_may_come_again() -> None:
    events = [*BEGIN, got("a", 0), Done(TOPIC, "sub", 0, 1), Claimed(TOPIC, 2, broker=2, start=1), got("a", 0, epoch=2)]
    assert broken(events) == set()


def test_a_repetition_a_rescued_message_and_a_shared_subscription_break_no_order() -> None:
    assert broken([*BEGIN, got("a", 0, key="k"), got("b", 1, key="k"), got("a", 0, key="k")]) == set()
    assert broken([*BEGIN, got("b", 1, key="k"), got("a", 0, key="k", rescued=True)]) == set()
    assert broken([*BEGIN, got("b", 1, key="k"), got("a", 0, key="other")]) == set()
    shared = [Created(TOPIC, True), Subscribed(TOPIC, "sub", "Shared"), got("b", 1, key="k"), got("a", 0, key="k")]
    assert broken(shared) == set()


def test_a_rescued_message_that_comes_again_without_its_mark_breaks_no_order() -> None:
    """The first delivery counts, and that one was marked."""
    rescued = [*BEGIN, got("b", 1, key="k"), got("a", 0, key="k", rescued=True)]
    assert broken([*rescued, got("a", 0, key="k")]) == set()
    assert broken([*BEGIN, got("b", 1, key="k"), got("a", 0, key="k"), got("a", 0, key="k", rescued=True)]) == {
        "key_order"
    }


def test_a_message_that_was_received_and_never_answered_for_was_not_delivered() -> None:
    events = [*BEGIN, *sent("a", "b"), got("a", 0), got("b", 1), Done(TOPIC, "sub", 1, 1)]
    assert broken([*events, kept({0: "a", 1: "b"})]) == set(), "it may still come"
    assert broken([*events, Quiet(1.0, 3.0), kept({0: "a", 1: "b"})]) == {"never_delivered"}
    assert broken([*events, Quiet(1.0, 3.0), Done(TOPIC, "sub", 0, 1), kept({0: "a", 1: "b"})]) == set()


def test_what_lies_before_a_subscriptions_start_need_not_be_delivered() -> None:
    events = [Created(TOPIC, True), Subscribed(TOPIC, "sub", "Shared", start=1), *sent("a", "b")]
    assert broken([*events, got("b", 1), kept({0: "a", 1: "b"})]) == set()


def test_what_was_stored_when_the_consumers_had_left_need_not_be_delivered() -> None:
    events = [*BEGIN, *sent("a", "b"), got("a", 0), Done(TOPIC, "sub", 0, 1), Quiet(1.0, 3.0)]
    end = kept({0: "a", 1: "b"})
    assert broken([*events, Departed(TOPIC, 1, 4.0), end]) == set()
    assert broken([*events, Departed(TOPIC, 2, 4.0), end]) == {"never_delivered"}, "it was there before they left"
    late = [got("b", 1, at=9.0), Done(TOPIC, "sub", 1, 1)]
    assert broken([*events, Departed(TOPIC, 1, 4.0), *late, end]) == set(), "who has not gone yet may get it"
    assert broken([*events, *late, Departed(TOPIC, 2, 9.5), end]) == {"stuck"}


def test_a_dead_letter_after_its_last_try_is_as_it_should_be() -> None:
    policy = Policy(TOPIC, "sub", 2, dead_letter=True)
    nacks = [Nacked(TOPIC, "sub", 0, 1)] * 3
    events: list[Event] = [*BEGIN, *sent("a"), got("a", 0), policy, *nacks]
    assert broken([*events, Dead(TOPIC, "sub", "a", 0), kept({0: "a"})]) == set()
    assert broken([*events, kept({0: "a"})]) == {"dead_letter"}, "it is nowhere"
    assert broken([*events, Done(TOPIC, "sub", 0, 1), kept({0: "a"})]) == set(), "somebody took it after all"


def test_a_message_is_tried_once_more_than_its_policy_says() -> None:
    policy = Policy(TOPIC, "sub", 2, dead_letter=True)
    nacks = [Nacked(TOPIC, "sub", 0, 1)] * 4
    assert broken([*BEGIN, policy, *nacks, Dead(TOPIC, "sub", "a", 0)]) == {"dead_letter"}
    other_owner = [*nacks[:2], Claimed(TOPIC, 2, broker=2, start=9), *[Nacked(TOPIC, "sub", 0, 2)] * 3]
    assert broken([*BEGIN, policy, *other_owner, Dead(TOPIC, "sub", "a", 0)]) == set(), "a new owner counts anew"


def test_a_message_that_was_sent_after_the_quiet_began_is_not_waited_for() -> None:
    events = [
        *BEGIN,
        *sent("a", at=14.0),
        Quiet(1.0, 10.0),
        acked("a", 0, at=14.0),
        got("a", 0, at=14.1),
        Done(TOPIC, "sub", 0, 1),
        kept({0: "a"}),
    ]
    assert broken(events) == set()


# --- a failing history, made readable -----------------------------------------------------------------------


def test_a_shortened_history_has_what_matters_and_nothing_else() -> None:
    history = History([
        *BEGIN,
        Fault("kill", 1, 0.5),
        *sent("a", "b"),
        acked("a", 0),
        acked("b", 1),
        got("a", 0),
        got("b", 1),
        Head(TOPIC, 1, 1, 2),
        Claimed("/default/other", 1, broker=1, start=0),
        kept({1: "b"}, voids=[(0, 1)]),
    ])  # fmt: skip
    found = check(history)
    assert {violation.rule for violation in found} == {"lost_write", "phantom"}
    assert shortened(history, found) == [*BEGIN, *sent("a"), acked("a", 0), got("a", 0)]
    assert str(found[0]).startswith("lost_write: /default/orders: 'a' was acknowledged at 0 in epoch 1")


def test_acks_of_a_topic_that_is_gone_and_of_one_that_keeps_nothing_need_nobody_to_take_them() -> None:
    assert not check(
        History(
            [*BEGIN, Created(f"{TOPIC}@2", True), Flushed(TOPIC, "sub", 0, "c0"), Created("/default/fanout", False)]
        )
    )
    assert not check(History([Created("/default/fanout", False), Flushed("/default/fanout", "sub", 0, "c0")]))
