from __future__ import annotations

from dataclasses import replace

from pydanube.core.dispatch.consumer_window import DispatchLimits, Permits
from pydanube.core.dispatch.delivery import FailurePolicy, PoisonPolicy, Tries
from pydanube.core.dispatch.events import (
    AckReceived,
    AckRefused,
    Available,
    Blocked,
    CursorReset,
    DeadLetter,
    DeadLettered,
    DeadLetterFailed,
    Effect,
    Expired,
    Forgotten,
    HistoryAvailable,
    Joined,
    Keyed,
    Left,
    LogTrimmed,
    NackReceived,
    PolicyChanged,
    ReadKeys,
    Returned,
    SendRanges,
    Shipped,
    Ticked,
    WakeAt,
    offsets,
    ranges,
)
from pydanube.core.dispatch.key_shared import KeySharedDispatch, Unaccepted
from pydanube.core.dispatch.lag import explain
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.names import ConsumerId

A, B = ConsumerId(1), ConsumerId(2)
POLICY = FailurePolicy(max_redelivery_count=0)


def key_shared(*keys: str, policy: FailurePolicy = POLICY, unacked_max: int = 10) -> KeySharedDispatch:
    """Consumer A, and messages with these keys, their keys read."""
    dispatch = KeySharedDispatch(SubscriptionProgress(), policy=policy, limits=DispatchLimits(unacked_max=unacked_max))
    dispatch.step(Joined(A), 0.0)
    if keys:
        commit(dispatch, *keys)
    return dispatch


def commit(dispatch: KeySharedDispatch, *keys: str) -> list[Effect]:
    first = dispatch.progress.head
    step(dispatch, Available(first + len(keys)))
    return step(dispatch, Keyed(tuple((first + at, key) for at, key in enumerate(keys))))


def step(dispatch: KeySharedDispatch, event: object, now: float = 0.0) -> list[Effect]:
    effects = dispatch.step(event, now)  # type: ignore[arg-type]
    return [effect for effect in effects if not isinstance(effect, WakeAt)]


def test_keys_are_asked_for_and_one_message_per_key_is_sent() -> None:
    dispatch = key_shared()
    assert step(dispatch, Available(4)) == [ReadKeys(ranges((0, 4))[0])]
    keyed = Keyed(((0, "x"), (1, "x"), (2, "y"), (3, "x")))
    assert step(dispatch, keyed) == [SendRanges(A, offsets(0, 2), 1)]
    assert step(dispatch, AckReceived(offsets(0))) == [SendRanges(A, offsets(1), 1)]
    assert dispatch.progress.next_unacked == 1


def test_a_short_answer_is_asked_for_again_and_skips_nothing() -> None:
    dispatch = key_shared()
    step(dispatch, Available(3))
    assert step(dispatch, Keyed(())) == []  # no busy loop
    assert step(dispatch, Ticked()) == [ReadKeys(ranges((0, 3))[0])]
    assert step(dispatch, Keyed(((0, "x"), (2, "z")))) == [ReadKeys(ranges((1, 3))[0]), SendRanges(A, offsets(0), 1)]


def test_nothing_is_read_ahead_while_nobody_has_room() -> None:
    dispatch = key_shared("x", "y", unacked_max=2)
    assert step(dispatch, Available(10)) == []
    assert step(dispatch, AckReceived(offsets(0))) == [ReadKeys(ranges((2, 10))[0])]
    assert dispatch.progress.next_unacked == 1


def test_a_nacked_message_holds_only_its_key() -> None:
    dispatch = key_shared("x", "x", "y", policy=FailurePolicy())
    assert step(dispatch, NackReceived(offsets(0)), 0.0) == []
    assert commit(dispatch, "x", "z") == [SendRanges(A, offsets(4), 1)]
    assert step(dispatch, Ticked(), 1.0) == [SendRanges(A, offsets(0), 2)]
    assert step(dispatch, AckReceived(offsets(0)), 1.0) == [SendRanges(A, offsets(1), 1)]
    assert dispatch.progress.next_unacked == 1


def test_a_key_moves_to_a_new_consumer_only_after_its_message_is_answered() -> None:
    dispatch = key_shared("key-1", "key-1")
    step(dispatch, Joined(B))
    mine = next(f"key-{n}" for n in range(1, 100) if dispatch.owners.owner(f"key-{n}") == B)
    fresh = KeySharedDispatch(SubscriptionProgress())
    step(fresh, Joined(A))
    commit(fresh, mine, mine)
    assert step(fresh, Joined(B)) == []  # A still holds offset 0
    assert step(fresh, AckReceived(offsets(0))) == [SendRanges(B, offsets(1), 1)]
    assert fresh.progress.next_unacked == 1


def test_messages_of_a_consumer_that_leaves_come_first_in_their_keys() -> None:
    dispatch = key_shared("x", "x", "y")
    assert step(dispatch, Left(A)) == []
    assert step(dispatch, Joined(B)) == [SendRanges(B, offsets(0, 2), 2)]


def test_poison_blocks_its_key_and_no_other_and_loses_nothing() -> None:
    dispatch = key_shared("x", "x", "y")
    assert step(dispatch, NackReceived(offsets(0), reason="bad")) == [Blocked(0, Tries(1, 1, "bad"), "x")]
    assert commit(dispatch, "x", "z") == [SendRanges(A, offsets(4), 1)]
    assert "poison blocks 1 of its keys, 'x' at offset 0" in explain(dispatch.standing(), 0.0)
    step(dispatch, AckReceived(offsets(2, 4)))
    again = step(dispatch, PolicyChanged(policy=FailurePolicy()))
    assert again == [SendRanges(A, offsets(0), 2)]
    for offset in (0, 1, 3):
        step(dispatch, AckReceived(offsets(offset)))
    assert dispatch.progress.next_unacked == 5


def test_a_dead_letter_holds_its_key_until_the_copy_is_safe() -> None:
    policy = replace(POLICY, poison_policy=PoisonPolicy.DEAD_LETTER, dead_letter_topic="/default/dead")
    dispatch = key_shared("x", "x", policy=policy)
    (effect,) = step(dispatch, NackReceived(offsets(0)))
    assert isinstance(effect, DeadLetter)
    assert step(dispatch, DeadLettered(offsets(0))) == [SendRanges(A, offsets(1), 1)]
    assert dispatch.progress.next_unacked == 1


def test_a_copy_that_failed_is_tried_again_by_the_policy_of_that_day() -> None:
    policy = replace(POLICY, poison_policy=PoisonPolicy.DEAD_LETTER, dead_letter_topic="/default/dead")
    dispatch = key_shared("x", policy=policy)
    step(dispatch, NackReceived(offsets(0)), 0.0)
    assert step(dispatch, DeadLetterFailed(offsets(0)), 0.0) == []
    assert isinstance(step(dispatch, Ticked(), 1.0)[0], DeadLetter)
    step(dispatch, DeadLetterFailed(offsets(0)), 1.0)
    step(dispatch, PolicyChanged(policy=FailurePolicy()), 1.0)
    assert step(dispatch, Ticked(), 2.0) == []  # no poison any more: an ordinary retry
    assert step(dispatch, Ticked(), 3.0) == [SendRanges(A, offsets(0), 2)]


def test_a_key_that_waits_goes_on_waiting_when_a_consumer_joins() -> None:
    dispatch = key_shared("x", "x", policy=FailurePolicy())
    step(dispatch, NackReceived(offsets(0)), 0.0)
    assert step(dispatch, Joined(B), 0.1) == []
    assert [type(effect) for effect in step(dispatch, Ticked(), 1.0)] == [SendRanges]


def test_a_key_nobody_accepts_is_skipped() -> None:
    dispatch = KeySharedDispatch(SubscriptionProgress())
    step(dispatch, Joined(A, key_filters=("orders-*",)))
    effects = commit(dispatch, "orders-1", "payments-1")
    assert effects == [SendRanges(A, offsets(0), 1)]
    assert list(dispatch.progress.settled) == [OffsetRange(1, 2)]


def test_a_key_nobody_accepts_may_be_kept_instead() -> None:
    dispatch = KeySharedDispatch(SubscriptionProgress(), unaccepted=Unaccepted.KEEP)
    step(dispatch, Joined(A, key_filters=("orders-*",)))
    assert commit(dispatch, "payments-1") == []
    assert step(dispatch, Joined(B)) == [SendRanges(B, offsets(0), 1)]


def test_nothing_is_skipped_while_no_consumer_is_connected() -> None:
    dispatch = key_shared("x")
    step(dispatch, Left(A))
    step(dispatch, Forgotten(A))
    assert step(dispatch, Joined(B)) == [SendRanges(B, offsets(0), 2)]


def test_keys_of_a_consumer_that_is_only_away_are_kept_for_it() -> None:
    dispatch = KeySharedDispatch(SubscriptionProgress())
    step(dispatch, Joined(A, key_filters=("a*",)))
    step(dispatch, Joined(B, key_filters=("b*",)))
    commit(dispatch, "a1", "b1")
    assert step(dispatch, Left(A)) == []
    assert "no connected consumer accepts" in explain(dispatch.standing(), 0.0)
    assert step(dispatch, Joined(A, key_filters=("a*",))) == [SendRanges(A, offsets(0), 2)]
    step(dispatch, Left(A))
    assert step(dispatch, Forgotten(A)) == []
    assert dispatch.progress.next_unacked == 1


def test_late_acks_count_and_so_do_acks_of_queued_messages() -> None:
    dispatch = key_shared("x", "x", "x", policy=FailurePolicy())
    step(dispatch, NackReceived(offsets(0)))
    assert step(dispatch, AckReceived(offsets(1))) == []
    assert step(dispatch, AckReceived(offsets(0))) == [SendRanges(A, offsets(2), 1)]
    assert dispatch.progress.next_unacked == 2
    assert step(dispatch, AckReceived(offsets(3))) == [AckRefused(offsets(3))]


def test_a_message_that_retention_takes_holds_its_key_until_its_consumer_answers() -> None:
    for answer in (AckReceived(offsets(0)), NackReceived(offsets(0)), NackReceived(offsets(0), consumer=A)):
        dispatch = key_shared("x", "x", "y")
        assert step(dispatch, LogTrimmed(1)) == [Expired(offsets(0))]
        assert dispatch.progress.next_unacked == 1
        assert step(dispatch, Joined(B)) == [], "its consumer may look at it yet"
        assert dispatch.standing().lag == 2 and dispatch.in_flight.holder(0) == A
        assert [each for each in step(dispatch, answer) if isinstance(each, SendRanges)] == [
            SendRanges(dispatch.owners.owner("x") or A, offsets(1), 1)
        ]
        assert dispatch.in_flight.holder(0) is None and dispatch.in_flight.count == 2


def test_a_late_nack_frees_no_key_whose_message_retention_took_from_another_consumer() -> None:
    dispatch = key_shared("x", "x")
    step(dispatch, Joined(B))
    assert step(dispatch, Left(A)) == [SendRanges(B, offsets(0), 2)]
    assert step(dispatch, LogTrimmed(1)) == [Expired(offsets(0))]
    assert step(dispatch, NackReceived(offsets(0), consumer=A)) == [], "B may look at it yet"
    assert dispatch.in_flight.holder(0) == B
    assert step(dispatch, NackReceived(offsets(0), consumer=B)) == [SendRanges(B, offsets(1), 1)]


def test_a_message_that_retention_takes_holds_its_key_no_longer_than_its_consumer_has_it() -> None:
    dispatch = key_shared("x", "x")
    step(dispatch, LogTrimmed(1))
    assert step(dispatch, Ticked(), 29.9) == []
    assert step(dispatch, Ticked(), 30.0) == [SendRanges(A, offsets(1), 1)], "it has timed out, and is no poison"
    step(dispatch, LogTrimmed(2), 30.0)
    commit(dispatch, "x")
    step(dispatch, Joined(B), 31.0)
    assert step(dispatch, Left(A), 31.0) == [SendRanges(B, offsets(2), 1)]
    step(dispatch, LogTrimmed(3), 31.0)
    commit(dispatch, "x")
    assert step(dispatch, Shipped(B, 0, offsets(2)), 31.0) == [], "it was gone before it was read"
    assert step(dispatch, Ticked(), 31.0) == [SendRanges(B, offsets(3), 1)]
    step(dispatch, LogTrimmed(4), 31.0)
    commit(dispatch, "x")
    assert step(dispatch, CursorReset(4), 31.0) == [ReadKeys(ranges((4, 5))[0])]
    assert dispatch.progress.next_unacked == 4
    assert dispatch.in_flight.count == 0


def test_a_message_that_retention_takes_from_an_unseen_queue_holds_its_key_until_it_is_given_back() -> None:
    dispatch = KeySharedDispatch(SubscriptionProgress(), policy=POLICY)
    step(dispatch, Joined(A, Permits(10, 1_000), hands_over=True))
    commit(dispatch, "x", "x")
    step(dispatch, Shipped(A, 10))
    step(dispatch, LogTrimmed(1))
    assert step(dispatch, Ticked(), 1_000.0) == []
    assert step(dispatch, Returned(A, offsets(0)), 1_000.0) == [SendRanges(A, offsets(1), 1, 990)]


def test_rescued_messages_are_read_and_delivered_late() -> None:
    dispatch = KeySharedDispatch(SubscriptionProgress(head=3, missing=[(0, 1)]))
    assert step(dispatch, Joined(A)) == [ReadKeys(ranges((1, 3))[0])]
    assert step(dispatch, Keyed(((1, "x"), (2, "x")))) == [SendRanges(A, offsets(1), 1)]
    assert step(dispatch, HistoryAvailable(offsets(0))) == [ReadKeys(offsets(0)[0])]
    assert step(dispatch, Keyed(((0, "x"),))) == []  # its key is busy
    assert step(dispatch, AckReceived(offsets(1))) == [SendRanges(A, offsets(0), 1)]


def test_a_stuck_hot_key_fills_its_bound_and_no_more() -> None:
    dispatch = KeySharedDispatch(SubscriptionProgress(), policy=POLICY, queued_max=50)
    step(dispatch, Joined(A))
    effects = step(dispatch, Available(10_000))
    while questions := [effect for effect in effects if isinstance(effect, ReadKeys)]:
        first, end = questions[0].range
        effects = step(dispatch, Keyed(tuple((offset, "hot") for offset in range(first, min(end, first + 20)))))
    assert len(dispatch.backlog.key_of) == 60
