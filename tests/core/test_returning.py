"""When a broker that was away is active again without a person, on values alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pydanube.core.cluster.leader import Activate, Leading, World
from pydanube.core.cluster.lifecycle import BrokerLoss, BrokerMode, BrokerState
from pydanube.core.cluster.placement import Rules
from pydanube.core.cluster.returning import Waiting, delay, returned
from pydanube.core.names import BrokerId

A, B, C = BrokerId(1), BrokerId(2), BrokerId(3)
SESSIONS = {A: 10, B: 20, C: 30}
TTL = 32.0


def active(broker: BrokerId, reason: str = "boot", **more: Any) -> BrokerState:
    return BrokerState(mode=BrokerMode.ACTIVE, reason=reason, session=SESSIONS[broker], **more)


def drained(broker: BrokerId, reason: str = "stale_restart", **more: Any) -> BrokerState:
    return BrokerState(mode=BrokerMode.DRAINED, reason=reason, session=SESSIONS[broker], **more)


def world(states: Mapping[BrokerId, BrokerState], *gone: BrokerId, lost: Mapping[BrokerId, int] = {}) -> World:
    return World(
        alive={broker: SESSIONS[broker] for broker in states if broker not in gone},
        witnessed={},
        states=states,
        lost={broker: (BrokerLoss(session=session), 1) for broker, session in lost.items()},
        assigned={},
        markers={},
        reports={},
        history=[],
    )


def activated(leader: Leading, now: float, seen: World) -> list[BrokerId]:
    return [each.broker for each in leader.step(now, round(now * 1000), seen) if isinstance(each, Activate)]


def leading() -> Leading:
    return Leading("fair", Rules(), TTL)


# --- when nobody is active --------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason", ["stale_restart", "registration_expired"])
def test_a_broker_that_was_away_stays_drained_while_another_is_active(reason: str) -> None:
    assert activated(leading(), 0.0, world({A: active(A), B: drained(B, reason)})) == []


@pytest.mark.parametrize("reason", ["stale_restart", "registration_expired"])
def test_a_broker_that_was_away_is_activated_when_nobody_is_active(reason: str) -> None:
    assert activated(leading(), 0.0, world({A: drained(A, reason)})) == [A]


@pytest.mark.parametrize("reason", ["join", "drain_complete", "no_topics", "admin_unload", "whatever"])
def test_a_broker_that_an_operator_drained_is_never_activated(reason: str) -> None:
    assert activated(leading(), 0.0, world({A: drained(A, reason)})) == []
    assert activated(leading(), 0.0, world({A: drained(A, reason), B: drained(B)})) == [B]
    draining = BrokerState(mode=BrokerMode.DRAINING, reason="stale_restart", session=10)
    assert activated(leading(), 0.0, world({A: draining})) == []


def test_a_broker_that_leaves_or_registers_anew_is_not_activated() -> None:
    assert activated(leading(), 0.0, world({A: drained(A, has_left=True)})) == []
    assert (
        activated(leading(), 0.0, world({A: BrokerState(mode=BrokerMode.DRAINED, reason="stale_restart", session=1)}))
        == []
    )


def test_the_last_active_broker_is_waited_for_until_it_is_declared_dead() -> None:
    leader = leading()
    seen = {A: active(A), B: drained(B)}
    assert activated(leader, 0.0, world(seen, A)) == []  # it may restart
    assert activated(leader, 1.0, world(seen, A, lost={A: 5})) == []  # another life of its was
    assert activated(leader, 2.0, world(seen, A, lost={A: 10})) == [B]


def test_one_that_stopped_in_order_is_not_waited_for() -> None:
    assert activated(leading(), 0.0, world({A: active(A, has_left=True), B: drained(B)}, A)) == [B]
    assert activated(leading(), 0.0, world({A: active(A, has_left=True), B: drained(B)})) == [B]


def test_all_that_were_away_come_back_one_after_the_other() -> None:
    leader = leading()
    states = {A: drained(A), B: drained(B), C: drained(C, "registration_expired")}
    order: list[tuple[float, BrokerId]] = []
    for tenth in range(300):
        now = 1000.0 + tenth / 10
        for broker in activated(leader, now, world(states)):
            order.append((now, broker))
            states = {**states, broker: returned(states[broker], "no_active_broker", round(now * 1000), TTL)}
    assert order == [(1000.0, A), (1004.0, B), (1008.0, C)]


def test_a_broker_that_comes_back_long_after_the_others_were_activated_is_drained_while_they_serve() -> None:
    now_ms = 10_000_000
    others = {A: returned(drained(A), "no_active_broker", now_ms, TTL)}
    soon, late = now_ms / 1000 + 30.0, now_ms / 1000 + 34.0
    assert activated(leading(), soon, world({**others, B: drained(B)})) == [B]
    assert activated(leading(), late, world({**others, B: drained(B)})) == []


def test_a_leader_steps_again_when_the_next_is_due() -> None:
    leader = leading()
    states = {A: drained(A), B: drained(B)}
    assert activated(leader, 50.0, world(states)) == [A]
    assert leader.due == 54.0
    states[A] = returned(states[A], "no_active_broker", 50_000, TTL)
    assert activated(leader, 51.0, world(states)) == [] and leader.due == 54.0
    assert activated(leader, 54.0, world(states)) == [B]


# --- leases that flap ---------------------------------------------------------------------------------------------


def test_each_return_takes_longer_than_the_one_before_up_to_sixteen_ttls() -> None:
    state, now_ms = drained(A), 1_000_000
    pauses = []
    for _ in range(7):
        pause = delay(state, now_ms, TTL)
        pauses.append(pause / TTL)
        now_ms += round(pause * 1000)
        state = returned(state, "rejoined", now_ms, TTL).drained("registration_expired")  # lost at once
    assert pauses == [0, 2, 4, 8, 16, 16, 16]


def test_a_flapping_lease_alone_in_the_cluster_moves_its_topics_seldom() -> None:
    """It is lost one TTL after every activation; whoever leads has just begun to, for the leader flaps with it."""
    state, times = drained(A), []
    now = 1000.0
    while now < 1000.0 + 3600:
        if activated(leading(), now, world({A: state})):
            times.append(now)
            state = returned(state, "no_active_broker", round(now * 1000), TTL).drained("registration_expired")
            now += TTL
        now += 1.0
    assert len(times) <= 10
    assert times[-1] - times[-2] >= 16 * TTL


def test_a_return_long_ago_does_not_count_and_an_operator_makes_all_forgotten() -> None:
    state = drained(A, rejoins=4, rejoined_at=1_000_000)
    assert delay(state, 1_000_000 + round(31 * TTL * 1000), TTL) == 0.0  # the pause was longer already
    assert returned(state, "rejoined", 1_000_000 + round(31 * TTL * 1000), TTL).rejoins == 5
    assert returned(state, "rejoined", 1_000_000 + round(32 * TTL * 1000), TTL).rejoins == 1
    by_hand = state.activated("admin_activate")
    assert (by_hand.rejoins, by_hand.rejoined_at) == (0, 0)


def test_who_came_back_least_often_comes_first() -> None:
    often = drained(A, rejoins=2, rejoined_at=1_000_000)
    now = 1000.0 + 5 * TTL
    assert activated(leading(), now, world({A: often, B: drained(B)})) == [B]


@pytest.mark.parametrize("wrong_by", [-100_000.0, 100_000.0])
def test_a_date_that_is_wrong_by_a_day_does_not_keep_a_broker_away_for_a_day(wrong_by: float) -> None:
    now_ms = 1_000_000_000
    state = drained(A, rejoins=2, rejoined_at=now_ms)
    waiting = Waiting()
    waiting.see(500.0, [A])
    assert waiting.due(500.0, A, state, now_ms + round(wrong_by * 1000), TTL) <= 500.0 + 4 * TTL
    waiting.see(600.0, [A])
    assert waiting.due(600.0, A, state, now_ms + round(wrong_by * 1000), TTL) <= 500.0 + 4 * TTL
