"""What a leader decides on a world of values, step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydanube.core.cluster.leader import (
    Abandon,
    Decision,
    Declare,
    Direct,
    FinishDrain,
    Leading,
    NoBroker,
    Remove,
    StartMove,
    World,
    plan_moves,
    start_of,
)
from pydanube.core.cluster.lifecycle import BrokerLoss, BrokerMode, BrokerState, Drain
from pydanube.core.cluster.load import LoadReport, LoadTally, TopicLoad, measure
from pydanube.core.cluster.placement import Marker, Move, Rules
from pydanube.core.names import BrokerId, TopicName

A, B, C = BrokerId(1), BrokerId(2), BrokerId(3)
T, U, V = TopicName("/default/t"), TopicName("/default/u"), TopicName("/other/v")
TTL = 32.0
SESSIONS = {A: 10, B: 20, C: 30}


def world(
    alive: Sequence[BrokerId] = (A, B, C),
    *,
    saw: Sequence[BrokerId] = (A, B, C),
    states: Mapping[BrokerId, BrokerState] | None = None,
    **more: Any,
) -> World:
    """Three brokers, active and seen alive, unless it is said otherwise."""
    modes = {b: BrokerState(mode=BrokerMode.ACTIVE, session=SESSIONS[b]) for b in (A, B, C)}
    empty: dict[str, Any] = {"lost": {}, "assigned": {}, "markers": {}, "reports": {}, "history": []}
    return World(
        alive={broker: SESSIONS[broker] for broker in alive},
        witnessed={broker: SESSIONS[broker] for broker in saw},
        states={**modes, **(states or {})},
        **{**empty, **more},
    )


def leading(strategy: str = "fair", **rules: Any) -> Leading:
    return Leading(strategy, Rules(**rules), TTL)


def step(leader: Leading, now: float, seen: World) -> list[Decision]:
    return leader.step(now, round(now * 1000), seen)


# --- brokers that are gone ------------------------------------------------------------------------------------


def test_nothing_is_to_be_done_in_a_quiet_cluster() -> None:
    assert step(leading(), 0.0, world(assigned={A: {T: 1}, B: {U: 2}})) == []


def test_a_broker_that_died_before_our_eyes_is_declared_dead_at_once() -> None:
    assert step(leading(), 5.0, world([A, B])) == [Declare(C, 30)]


def test_a_broker_that_this_process_never_saw_alive_has_one_ttl_to_appear() -> None:
    leader = leading()
    missing = world([A], saw=[A], assigned={B: {T: 4}})
    assert step(leader, 5.0, missing) == []
    assert leader.due == 5.0 + TTL
    assert step(leader, 5.0 + TTL - 0.1, missing) == []
    assert step(leader, 5.0 + TTL, missing) == [Declare(B, 20), Declare(C, 30)]


def test_one_that_appears_meanwhile_is_not_declared_and_has_its_time_anew_later() -> None:
    leader = leading()
    step(leader, 0.0, world([A, B], saw=[A, B]))
    assert step(leader, 30.0, world([A, B, C], saw=[A, B])) == []
    assert step(leader, 40.0, world([A, B], saw=[A, B])) == []
    assert step(leader, 40.0 + TTL, world([A, B], saw=[A, B])) == [Declare(C, 30)]


def test_a_broker_seen_in_another_life_only_has_one_ttl_too() -> None:
    seen = world([A, B])._replace(witnessed={A: 10, B: 20, C: 29})
    assert step(leading(), 0.0, seen) == []


def test_a_broker_that_stopped_in_order_has_one_ttl_to_come_back() -> None:
    leader = leading()
    left = world([A, B], states={C: BrokerState(mode=BrokerMode.ACTIVE, session=30, has_left=True)})
    assert step(leader, 0.0, left) == []
    assert step(leader, TTL, left) == [Declare(C, 30)]


def test_nobody_is_declared_dead_twice() -> None:
    assert step(leading(), 0.0, world([A, B], lost={C: (BrokerLoss(session=30), 9)})) == []
    assert step(leading(), 0.0, world([A, B], lost={C: (BrokerLoss(session=29), 9)})) == [Declare(C, 30)]


def test_what_a_dead_session_had_loses_its_owner_and_what_was_claimed_later_does_not() -> None:
    """Also when the broker is back already, and the leader that declared it died half-way."""
    for alive in ([A, B], [A, B, C]):
        lost = {C: (BrokerLoss(session=30), 9)}
        assigned = {C: {T: 8, U: 10, V: 3}}
        assert step(leading(), 0.0, world(alive, lost=lost, assigned=assigned)) == [Abandon(C, (T, V))]


# --- topics without owner -------------------------------------------------------------------------------------


def test_new_topics_are_spread_over_active_brokers() -> None:
    markers = {TopicName(f"/default/n{number}"): Marker() for number in range(6)}
    decisions = step(leading(), 0.0, world(markers=markers))
    assert sorted(d.to for d in decisions if isinstance(d, Direct)) == [A, A, B, B, C, C]


def test_a_topic_without_a_candidate_waits_until_one_appears() -> None:
    leader = leading()
    drained = BrokerState(mode=BrokerMode.DRAINED)
    markers = {T: Marker(reason="unload", from_broker=A, ready=True)}
    nobody = world(states={B: drained, C: drained}, markers=markers)
    assert step(leader, 0.0, nobody) == []
    assert step(leader, 0.9, world(states={B: drained}, markers=markers)) == [Direct(T, C)]


def test_that_nobody_can_have_a_topic_is_said_once_after_a_moment_with_what_to_do() -> None:
    leader = leading()
    drained = BrokerState(mode=BrokerMode.DRAINED)
    lost = {T: Marker(reason="broker_lost", from_broker=C), V: Marker(reason="broker_lost", from_broker=C, wait=True)}
    nobody = world([A, B], states={A: drained, B: drained}, lost={C: (BrokerLoss(session=30), 9)}, markers=lost)
    assert step(leader, 0.0, nobody) == [] and leader.due == 1.0
    [said] = step(leader, 1.0, nobody)
    assert isinstance(said, NoBroker) and said.topics == (T,), "one that waits for its own broker is no error"
    assert said.why == "no broker is active" and "brokers activate" in said.advice
    assert step(leader, 2.0, nobody) == [] and step(leader, 50.0, nobody) == []
    more = nobody._replace(markers={**lost, U: Marker(reason="broker_lost", from_broker=C)})
    [said] = [*step(leader, 51.0, more), *step(leader, 52.0, more)]
    assert isinstance(said, NoBroker) and said.topics == (U,)
    assert step(leader, 53.0, world(lost={C: (BrokerLoss(session=30), 9)})) == []
    assert step(leader, 54.0, nobody) == []
    assert [type(each) for each in step(leader, 55.0, nobody)] == [NoBroker], "it is so again"


def test_a_topic_that_leaves_the_only_active_broker_is_told_so() -> None:
    leader = leading()
    drained = BrokerState(mode=BrokerMode.DRAINED)
    nobody = world(states={B: drained, C: drained}, markers={T: Marker(reason="unload", from_broker=A, ready=True)})
    step(leader, 0.0, nobody)
    [said] = step(leader, 1.0, nobody)
    assert isinstance(said, NoBroker) and "the one that they leave" in said.why


def test_a_target_that_dies_or_is_drained_is_replaced_at_once() -> None:
    marker = Marker(reason="unload", from_broker=A, to=B)
    for waiting in (marker, marker.as_ready()):
        assert step(leading(), 0.0, world([A, C], saw=[A, C], markers={T: waiting})) == [Direct(T, C)]
        drained = world(states={B: BrokerState(mode=BrokerMode.DRAINED)}, markers={T: waiting})
        assert step(leading(), 0.0, drained) == [Direct(T, C)]


def test_a_target_that_has_not_claimed_in_three_seconds_is_replaced() -> None:
    leader = leading()
    asked = world(markers={T: Marker(reason="unload", from_broker=A, to=B, ready=True)})
    assert step(leader, 0.0, asked) == []
    assert leader.due == 3.0
    assert step(leader, 2.9, asked) == []
    assert step(leader, 3.0, asked) == [Direct(T, C)]


def test_a_target_has_its_three_seconds_only_once_the_topic_is_free() -> None:
    leader = leading()
    moving = Marker(reason="unload", from_broker=A, to=B)
    for now in (0.0, 100.0):
        assert step(leader, now, world(markers={T: moving})) == []
    assert step(leader, 101.0, world(markers={T: moving.as_ready()})) == []
    assert step(leader, 104.0, world(markers={T: moving.as_ready()})) == [Direct(T, C)]


def told(to: BrokerId, *names: str) -> dict[TopicName, Marker]:
    return {TopicName(f"/default/{name}"): Marker(reason="broker_lost", from_broker=A, to=to) for name in names}


def test_a_target_that_claims_one_topic_after_the_other_keeps_those_that_wait_however_long_it_takes() -> None:
    """It has a topic every two seconds; the last of ten waits for twenty, and none is given to anybody else."""
    leader = leading()
    waiting = told(B, *(f"t{number}" for number in range(10)))
    lost = {A: (BrokerLoss(session=10), 1)}
    claimed: dict[TopicName, int] = {}
    for number in range(200):
        if number and number % 20 == 0:
            claimed[sorted(waiting)[0]] = number
            del waiting[sorted(waiting)[0]]
        seen = world([B, C], saw=[B, C], lost=lost, markers=waiting, assigned={B: claimed})
        assert step(leader, number / 10, seen) == []


def test_a_target_that_claims_nothing_more_for_three_seconds_is_replaced_for_all_that_wait() -> None:
    leader = leading()
    waiting = told(B, "t0", "t1", "t2")
    lost = {A: (BrokerLoss(session=10), 1)}
    first = world([B, C], saw=[B, C], lost=lost, markers=waiting)
    assert step(leader, 0.0, first) == []
    waiting = told(B, "t1", "t2")
    then = world([B, C], saw=[B, C], lost=lost, markers=waiting, assigned={B: {TopicName("/default/t0"): 7}})
    assert step(leader, 2.0, then) == []
    assert leader.due == 5.0
    assert step(leader, 4.9, then) == []
    assert step(leader, 5.0, then) == [Direct(topic, C) for topic in waiting]


def test_a_topic_that_its_target_cannot_open_does_not_wait_for_ever_because_new_ones_keep_coming() -> None:
    """One other waited when it was asked for: only one of the claims since then has given it its time anew."""
    leader = leading()
    stuck = TopicName("/default/stuck")
    claimed: dict[TopicName, int] = {}
    for number in range(31):
        new = TopicName(f"/default/new{number}")
        markers = {stuck: Marker(to=B), new: Marker(to=B)}
        decisions = step(leader, number / 10, world(markers=markers, assigned={B: dict(claimed)}))
        assert decisions == [], number
        claimed[new] = number
    [direct] = step(leader, 3.1, world(markers={stuck: Marker(to=B)}, assigned={B: claimed}))
    assert isinstance(direct, Direct) and direct.topic == stuck and direct.to != B


def test_a_topic_that_somebody_else_took_is_no_claim_of_the_target() -> None:
    """Deleted, or claimed by another: that says nothing about the one that was asked."""
    leader = leading()
    assert step(leader, 0.0, world(markers=told(B, "t0", "t1"))) == []
    elsewhere = {C: {TopicName("/default/t0"): 7}}
    assert step(leader, 2.0, world(markers=told(B, "t1"), assigned=elsewhere)) == []
    [direct] = step(leader, 3.0, world(markers=told(B, "t1"), assigned=elsewhere))
    assert direct == Direct(TopicName("/default/t1"), A) or direct == Direct(TopicName("/default/t1"), C)


def test_a_broker_with_very_many_topics_loses_them_in_pieces() -> None:
    """So that the first are claimed while the others are still being written down."""
    topics = [TopicName(f"/default/t{number:03}") for number in range(450)]
    lost, assigned = {C: (BrokerLoss(session=30), 9)}, dict.fromkeys(topics, 8)
    pieces = []
    while assigned:
        [abandon] = step(leading(), 0.0, world([A, B], lost=lost, assigned={C: dict(assigned)}))
        assert isinstance(abandon, Abandon)
        pieces.append(len(abandon.topics))
        for topic in abandon.topics:
            del assigned[topic]
    assert pieces == [200, 200, 50]


class Unlooked(dict[TopicName, int]):
    """Topics that may be asked for one by one, and not gone through."""

    def __iter__(self) -> Any:
        raise AssertionError("somebody looks at all topics")

    items = keys = values = __iter__  # type: ignore[assignment]


def test_a_step_looks_at_topics_without_owner_and_not_at_all_the_others() -> None:
    many = {broker: Unlooked({TopicName(f"/default/b{broker}t{n}"): n for n in range(100)}) for broker in (A, B)}
    tally = LoadTally()
    for broker in (A, B):
        for number in range(100):
            tally.assign(broker, TopicName(f"/default/b{broker}t{number}"))
    seen = world(assigned=many, markers={T: Marker()})._replace(counted=tally.figures, known=tally.known)
    assert step(leading(), 0.0, seen) == [Direct(T, C)]


def test_what_was_counted_already_is_not_counted_anew_and_decides_the_same() -> None:
    reports = {
        A: LoadReport(broker_id=A, timestamp=2, cpu=20.0, topics=[TopicLoad(topic_name=T, byte_rate=4e6)]),
        B: LoadReport(broker_id=B, timestamp=1, cpu=30.0, topics=[TopicLoad(topic_name=U, consumer_count=9)]),
    }
    tally = LoadTally()
    assigned = {A: {T: 1}, B: {U: 2, V: 3}}
    for broker, report in reports.items():
        tally.report(broker, report)
    for broker, topics in assigned.items():
        for topic in topics:
            tally.assign(broker, topic)
    markers = {U: Marker(reason="unload", from_broker=B, to=A), TopicName("/default/new"): Marker(to=C)}
    seen = world(assigned=assigned, reports=reports, markers=markers)
    counted = seen._replace(counted=tally.figures, known=tally.known)
    assert counted.measured() == seen.measured() == measure(seen.topics_of([A, B, C]), reports)


def test_when_nobody_claims_everybody_is_asked_again_and_given_longer_each_round() -> None:
    leader = leading()
    marker, now, waits = Marker(to=A), 0.0, []
    for _ in range(16):
        asked = now
        while not (decisions := step(leader, now, world(markers={T: marker}))):
            now = leader.due
        waits.append(now - asked)
        [direct] = decisions
        assert isinstance(direct, Direct) and direct.to != marker.to
        marker = marker.towards(direct.to)
    assert waits[:3] == [3, 3, 3]
    assert waits[-1] == 48  # longer than it takes to list the markers that no event told of
    assert waits == sorted(waits)


def test_the_only_candidate_is_waited_for() -> None:
    leader = leading()
    asked = world(
        [A], saw=[A], lost={b: (BrokerLoss(session=SESSIONS[b]), 1) for b in (B, C)}, markers={T: Marker(to=A)}
    )
    now = 0.0
    for _ in range(10):
        assert step(leader, now, asked) == []
        now = leader.due


def test_after_a_crash_the_broker_with_the_log_is_preferred_if_it_is_back_and_active() -> None:
    marker = Marker(reason="broker_lost", from_broker=C)
    loaded = {C: {TopicName(f"/default/c{n}"): 99 for n in range(5)}}
    assert step(leading(), 0.0, world(assigned=loaded, markers={T: marker})) == [Direct(T, C)]
    drained = world(states={C: BrokerState(mode=BrokerMode.DRAINED)}, markers={T: marker})
    [direct] = step(leading(), 0.0, drained)
    assert isinstance(direct, Direct) and direct.to in (A, B)


def test_a_topic_that_waits_for_its_broker_goes_to_no_other_and_to_that_one_even_drained() -> None:
    marker = Marker(reason="broker_lost", from_broker=C, wait=True)
    lost = {C: (BrokerLoss(session=30), 9)}
    assert step(leading(), 0.0, world([A, B], lost=lost, markers={T: marker})) == []
    back = world(states={C: BrokerState(mode=BrokerMode.DRAINED)}, markers={T: marker})
    assert step(leading(), 0.0, back) == [Direct(T, C)]


def test_a_failed_move_is_forgotten_after_ten_seconds() -> None:
    leader = leading()
    failed = world(assigned={A: {T: 1}}, markers={T: Marker(reason="unload", from_broker=A, to=B, error="no")})
    assert step(leader, 0.0, failed) == []
    assert step(leader, 9.9, failed) == []
    assert step(leader, 10.0, failed) == [Remove(T)]


# --- drains ---------------------------------------------------------------------------------------------------


def draining(parallel_max: int = 2, **filters: tuple[str, ...]) -> dict[BrokerId, BrokerState]:
    drain = Drain(parallel_max=parallel_max, **filters)
    return {A: BrokerState(mode=BrokerMode.DRAINING, reason="admin_unload", session=10, drain=drain)}


MANY = {A: {TopicName(f"/default/a{n}"): n + 1 for n in range(5)}}


def test_a_drain_moves_so_many_topics_at_a_time_to_the_others() -> None:
    leader = leading()
    started = step(leader, 0.0, world(states=draining(2), assigned=MANY))
    assert [d.topic for d in started if isinstance(d, StartMove)] == ["/default/a0", "/default/a1"]
    assert {d.marker.to for d in started if isinstance(d, StartMove)} == {B, C}
    markers = {d.topic: d.marker for d in started if isinstance(d, StartMove)}
    assert step(leader, 1.0, world(states=draining(2), assigned=MANY, markers=markers)) == []
    del markers[TopicName("/default/a0")]
    left = {A: {topic: at for topic, at in MANY[A].items() if topic != "/default/a0"}}
    [one_more] = step(leader, 2.0, world(states=draining(2), assigned=left, markers=markers))
    assert isinstance(one_more, StartMove) and one_more.topic == "/default/a2"


def test_a_drain_ends_when_the_last_topic_has_a_new_owner() -> None:
    ready = {T: Marker(reason="drain", from_broker=A, to=B, ready=True)}
    assert step(leading(), 0.0, world(states=draining(), markers=ready)) == []
    assert step(leading(), 0.0, world(states=draining())) == [FinishDrain(A, "drain_complete")]


def test_a_drain_of_some_namespaces_leaves_the_others() -> None:
    assigned = {A: {T: 1, V: 2}}
    [start] = step(leading(), 0.0, world(states=draining(include=("other",)), assigned=assigned))
    assert isinstance(start, StartMove) and start.topic == V
    [start] = step(leading(), 0.0, world(states=draining(exclude=("other",)), assigned=assigned))
    assert isinstance(start, StartMove) and start.topic == T
    only = world(states=draining(include=("other",)), assigned={A: {T: 1}})
    assert step(leading(), 0.0, only) == [FinishDrain(A, "drain_complete")]


def test_a_drain_without_a_target_waits() -> None:
    drained = BrokerState(mode=BrokerMode.DRAINED)
    assert step(leading(), 0.0, world(states={**draining(), B: drained, C: drained}, assigned=MANY)) == []


def test_a_drain_tries_a_topic_again_half_a_minute_after_its_move_failed() -> None:
    leader = leading()
    assigned = {A: {T: 1}}
    failed = {T: Marker(reason="drain", from_broker=A, to=B, error="no room")}
    step(leader, 0.0, world(states=draining(), assigned=assigned, markers=failed))
    assert step(leader, 10.0, world(states=draining(), assigned=assigned, markers=failed)) == [Remove(T)]
    assert step(leader, 11.0, world(states=draining(), assigned=assigned)) == []
    assert leader.due == 40.0
    [again] = step(leader, 40.0, world(states=draining(), assigned=assigned))
    assert isinstance(again, StartMove) and again.topic == T


# --- rebalancing ----------------------------------------------------------------------------------------------


def uneven(**more: Any) -> World:
    names = [TopicName(f"/default/a{n}") for n in range(6)]
    report = LoadReport(broker_id=A, timestamp=1, topics=[TopicLoad(topic_name=n, age_seconds=999) for n in names])
    return world(assigned={A: {name: 1 for name in names}}, reports={A: report}, **more)


def test_an_uneven_cluster_is_evened_out_one_move_per_interval() -> None:
    leader = leading(enabled=True, check_interval_seconds=100, cooldown_seconds=0)
    [start] = step(leader, 1000.0, uneven())
    assert isinstance(start, StartMove)
    assert start.marker == Marker(reason="rebalance", from_broker=A, to=B, timestamp=1_000_000)
    assert start.entry is not None and start.entry.timestamp == 1_000_000
    assert step(leader, 1099.0, uneven()) == []
    assert step(leader, 1100.0, uneven()) != []


def test_rebalancing_is_off_unless_it_is_enabled_and_waits_for_the_last_move() -> None:
    assert step(leading(), 1000.0, uneven()) == []
    moving = {TopicName("/default/a0"): Marker(reason="rebalance", from_broker=A, to=B)}
    assert step(leading(enabled=True), 1000.0, uneven(markers=moving)) == []


def test_the_history_holds_the_next_move_back_also_under_a_new_leader() -> None:
    before = Move(topic=T, from_broker=A, to_broker=B, estimated_load=0, reason="", timestamp=999_000)
    assert step(leading(enabled=True, cooldown_seconds=60), 1000.0, uneven(history=[before])) == []


def test_moves_of_an_order_hold_the_leaders_own_back_and_what_is_under_way_is_counted_where_it_goes() -> None:
    """Otherwise the leader would go on where an operator has just evened everything out."""
    names = sorted(uneven().assigned[A])
    order = plan_moves(uneven(), "fair", Rules(topic_age_min_seconds=300), moves_max=10)
    assert {move.topic for move in order.moves} <= set(names) and {move.to_broker for move in order.moves} == {B, C}
    by_hand = [replace(move, timestamp=990_000 + n) for n, move in enumerate(order.moves)]
    markers = {move.topic: start_of(move, 990_000).marker for move in order.moves}
    for limits in ({"cooldown_seconds": 60}, {"cooldown_seconds": 0, "moves_per_hour_max": len(by_hand)}):
        leader = leading(enabled=True, **limits)
        assert step(leader, 1000.0, uneven(history=by_hand)) == [], limits
    again = plan_moves(uneven(markers=markers), "fair", Rules(), moves_max=10)
    assert not again.moves and not again.rule and "balanced" in again.why
