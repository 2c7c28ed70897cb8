"""Seed 001, as far as it decides: its lag numbers, its validation, its heartbeat."""

from __future__ import annotations

import pytest

from pydanube.core.dispatch.events import AckReceived, Available, Joined, Shipped, Ticked, offsets, ranges
from pydanube.core.dispatch.lag import Heartbeat, LagInfo, Standing, beat, explain
from pydanube.core.dispatch.range_dispatch import ExclusiveDispatch
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.names import ConsumerId
from pydanube.errors import ConfigError

A = ConsumerId(1)


def test_subscription_lag_detection() -> None:
    """The seed's unit test, with its numbers: 3, 1, 0."""
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A), 0.0)
    assert not dispatch.get_lag_info(0).has_lag
    assert dispatch.get_lag_info(3).has_lag
    assert dispatch.get_lag_info(3) == LagInfo(None, 3, 3, True)
    dispatch.step(Available(3), 0.0)
    dispatch.step(AckReceived(ranges((0, 2))), 0.0)
    assert dispatch.get_lag_info(3) == LagInfo(1, 3, 1, True)
    dispatch.step(AckReceived(offsets(2)), 0.0)
    assert dispatch.get_lag_info(3) == LagInfo(2, 3, 0, False)


def test_a_subscription_that_began_at_latest_has_no_lag() -> None:
    assert ExclusiveDispatch(SubscriptionProgress(100, head=100)).get_lag_info(100).lag_messages == 0


def test_lag_counts_messages_acked_out_of_order_and_is_right_without_a_consumer() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    assert dispatch.get_lag_info(5).lag_messages == 5
    dispatch.step(Joined(A), 0.0)
    dispatch.step(Available(5), 0.0)
    dispatch.step(AckReceived(offsets(3)), 0.0)
    assert dispatch.get_lag_info(6).lag_messages == 5


@pytest.mark.parametrize(
    ("text", "interval_ms", "polls"),
    [
        ("high_priority", 100, True),
        ("normal", 500, True),
        ("low_priority", 1000, True),
        ("debug", 50, True),
        ("50ms", 50, True),
        ("1000", 1000, True),
        (" 250 ms ", 250, True),
        ("observe", 500, False),
        ("off", None, False),
    ],
)
def test_profiles_and_intervals(text: str, interval_ms: int | None, polls: bool) -> None:
    heartbeat = Heartbeat.parse(text)
    assert (heartbeat.interval_ms, heartbeat.polls) == (interval_ms, polls)
    assert Heartbeat.parse(str(heartbeat)) == heartbeat


@pytest.mark.parametrize("text", ["", "49ms", "1001", "fast", "-100", "0.5s", "1e2", "500 s", "٥٠٠"])
def test_anything_else_is_refused_with_the_range(text: str) -> None:
    with pytest.raises(ConfigError, match="from 50ms to 1000ms, or one of high_priority"):
        Heartbeat.parse(text)


def test_a_lost_notification_is_found_by_the_next_heartbeat() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A), 0.0)
    assert not beat(dispatch.standing(0), Heartbeat(), 0.5).poll
    found = beat(dispatch.standing(2), Heartbeat(), 1.0)
    assert found.poll and found.lag.lag_messages == 2


def test_a_reader_that_returned_nothing_is_asked_again() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A), 0.0)
    dispatch.step(Available(2), 0.0)
    dispatch.step(Shipped(A, 0, ranges((0, 2))), 0.0)
    assert beat(dispatch.standing(2), Heartbeat(), 0.5).poll


def test_a_slow_consumer_is_lag_and_no_missed_notification() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A), 0.0)
    dispatch.step(Available(50), 0.0)
    found = beat(dispatch.standing(50), Heartbeat(), 0.5)
    assert not found.poll and found.lag.lag_messages == 50


def test_no_consumer_no_poll() -> None:
    found = beat(ExclusiveDispatch(SubscriptionProgress()).standing(50), Heartbeat(), 0.5)
    assert not found.poll and found.lag.has_lag


def test_rescued_history_is_a_reason_to_poll() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A), 0.0)
    assert beat(dispatch.standing(0), Heartbeat(), 0.5, new_history=True).poll


def test_observing_finds_lag_and_polls_nothing() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A), 0.0)
    found = beat(dispatch.standing(2), Heartbeat.parse("observe"), 0.5)
    assert found.lag.has_lag and not found.poll


def test_a_heartbeat_alone_delivers_everything() -> None:
    dispatch = ExclusiveDispatch(SubscriptionProgress())
    dispatch.step(Joined(A), 0.0)
    now = 0.0
    for head in range(1, 101):
        now += 0.5
        if beat(dispatch.standing(head), Heartbeat(), now).poll:
            dispatch.step(Available(head), now)
            dispatch.step(Ticked(), now)
        dispatch.step(AckReceived(offsets(head - 1)), now)
    assert dispatch.progress.next_unacked == 100


BEHIND = Standing(head=50, next_unacked=10, lag=40, undispatched=30, consumers=1)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lag": 0, "next_unacked": 50}, "caught up: everything below offset 50 is acknowledged"),
        ({"lag": 0, "missing": 3}, "up to 3 messages of a lost broker wait to be rescued"),
        ({"consumers": 0}, "no consumer is connected; 40 messages behind"),
        ({"unacked": 10, "window_held": 10, "unacked_max": 10}, "window full: 10 of 10 messages wait for an ack"),
        ({"unacked": 99}, "no consumer has room: 99 messages wait for an ack"),
        ({"unacked": 1}, "no consumer has room: 1 message waits for an ack"),
        ({"undispatched": 0, "waiting": 1, "retry_at": 9.0}, "1 message failed and will be tried again, the first in"),
        ({"blocked_offset": 10}, "blocked by poison at offset 10, which failed too often"),
        ({"rate_ready_at": 7.5}, "rate limited: the next message may go in 0.5 s"),
        ({"first_offset": 20}, "behind the first kept offset 20"),
        ({"has_capacity": True}, "delivering: 30 messages can be sent now"),
        ({"undispatched": 0, "dead_lettering": 2}, "copying 2 messages to the dead-letter topic"),
        ({"undispatched": 0, "unaccepted": 2}, "no connected consumer accepts the keys of 2 messages"),
        ({"undispatched": 0, "unacked": 1}, "waiting for the ack of 1 message already sent"),
        ({"undispatched": 0, "blocked_keys": 2, "blocked_key": "x", "blocked_offset": 11},
         "poison blocks 2 of its keys, 'x' at offset 11"),
    ],
)  # fmt: skip
def test_explain_names_the_cause_with_its_numbers(changes: dict[str, object], sentence: str) -> None:
    values = {name: getattr(BEHIND, name) for name in Standing.__slots__} | changes
    said = explain(Standing(**values), now=7.0)
    assert sentence in said
    assert said.endswith(".")
