"""Where topics go: markers, three ways to measure load, and which topic should move. Figures computed by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.cluster.load import (
    STRATEGIES,
    Figures,
    LoadReport,
    TopicLoad,
    balance,
    loads_of_topics,
    measure,
    rank,
)
from pydanube.core.cluster.placement import (
    HISTORY_MAX,
    PLAN_MAX,
    THRESHOLDS,
    WORK_SLACK,
    Marker,
    Move,
    Plan,
    Proposal,
    Rules,
    choose,
    least_loaded,
    old_entries,
    plan,
    propose,
    too_soon,
)
from pydanube.core.names import BrokerId, TopicName

A, B, C = BrokerId(1), BrokerId(2), BrokerId(3)
T = TopicName("/default/orders")


def topics(prefix: str, count: int) -> list[TopicName]:
    return [TopicName(f"/default/{prefix}{number}") for number in range(count)]


def spread(names: Sequence[str], *, mbps: float, connections: int, backlog: int = 0) -> list[TopicLoad]:
    """Topics that have these figures together."""
    each = len(names)
    return [
        TopicLoad(
            topic_name=name,
            byte_rate=mbps / each * 1e6 / 8,
            producer_count=connections if number == 0 else 0,
            backlog_messages=backlog if number == 0 else 0,
            age_seconds=1e6,
        )
        for number, name in enumerate(names)
    ]


# One recorded set of reports. A has few topics and no CPU left; B is idle and moves much data; C has many small topics.
TOPICS = {A: topics("a", 2), B: topics("b", 4), C: topics("c", 5)}
REPORTS = {
    A: LoadReport(broker_id=A, timestamp=1, cpu=80, memory=85, disk=10, network=20,
                  topics=spread(TOPICS[A], mbps=40, connections=10)),
    B: LoadReport(broker_id=B, timestamp=1, cpu=10, memory=30, disk=0, network=80,
                  topics=spread(TOPICS[B], mbps=80, connections=20)),
    C: LoadReport(broker_id=C, timestamp=1, cpu=40, memory=30, disk=0, network=10,
                  topics=spread(TOPICS[C], mbps=10, connections=30, backlog=20_000)),
}  # fmt: skip


# --- strategies -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "loads", "chosen"),
    [
        ("fair", {A: 2, B: 4, C: 5}, A),
        # W: 0.4 + 12 + 3, 0.8 + 24 + 6, 1.0 + 3 + 9 + 0.4; then 0.3 W + 0.35 CPU + 0.35 · half of A's last 30 %
        ("balanced", {A: 4.62 + 28 + 17.5, B: 9.24 + 3.5, C: 4.02 + 14}, B),
        # A lacks CPU: .5 + .2·5/7 + .15·½ + .15·⅖; B throughput: .5 + .2 + .15·⅛; C topics: .5 + .2·½ + .1·⅛
        ("weighted_load", {A: 63.5 + 100 / 7, B: 71.875, C: 61.25}, C),
    ],
)
def test_each_strategy_chooses_differently_on_one_set_of_reports(
    strategy: str, loads: dict[BrokerId, float], chosen: BrokerId
) -> None:
    found = rank(strategy, measure(TOPICS, REPORTS))
    assert found == pytest.approx(loads)
    assert {choose(Marker(), found, turn=turn) for turn in range(5)} == {chosen}


@pytest.mark.parametrize(
    ("figures", "load"),
    [
        # Memory counts from 70 % on: 76 is 20 of what is left, 94 is 80, 73 is 10.
        (Figures(cpu=80, memory=76, network=10, mbps=10, topics=1), 0.5 * 80 + 0.2 * 20 + 0.15 * 10 + 0.15 * 10),
        (Figures(cpu=20, memory=94, network=10, mbps=10, topics=1), 0.5 * 80 + 0.2 * 20 + 0.15 * 10 + 0.15 * 10),
        (Figures(cpu=20, memory=73, network=30, mbps=80, topics=2), 0.5 * 80 + 0.2 * 30 + 0.15 * 20 + 0.15 * 10),
        (Figures(cpu=20, memory=73, network=80, mbps=30, topics=2), 0.5 * 80 + 0.2 * 30 + 0.15 * 20 + 0.15 * 10),
        (Figures(cpu=20, memory=73, network=30, mbps=10, topics=8), 0.5 * 80 + 0.2 * 20 + 0.2 * 10 + 0.1 * 10),
        (Figures(cpu=20, memory=73, disk=90, mbps=10, topics=2), 0.5 * 90 + 0.2 * 10 + 0.15 * 20 + 0.15 * 20),
        # Nothing above 0.7: everything counts its share.
        (Figures(cpu=60, memory=82, network=10, mbps=20, topics=7), 0.25 * (70 + 60 + 40) + 0.15 * 20 + 0.1 * 10),
    ],
)
def test_what_a_broker_lacks_most_counts_most(figures: Figures, load: float) -> None:
    """Beside a broker that makes the cluster's largest of every figure 100, and of topics 10."""
    largest = Figures(cpu=100, memory=100, disk=100, network=100, mbps=100, topics=10)
    figures = figures._replace(disk=figures.disk or 0.0, network=figures.network or 0.0)
    assert rank("weighted_load", {A: figures, B: largest})[A] == pytest.approx(load)


def test_figures_that_are_small_everywhere_do_not_decide() -> None:
    loads = rank("weighted_load", {A: Figures(mbps=0.01, topics=1), B: Figures(mbps=0.02, topics=1)})
    assert loads[A] == pytest.approx(100 * (0.5 + 0.1 * 0.01))
    assert loads[B] == pytest.approx(100 * (0.5 + 0.1 * 0.02))


@pytest.mark.parametrize("strategy", ["balanced", "weighted_load"])
def test_memory_in_use_that_is_not_scarce_and_machines_with_nothing_to_do_decide_nothing(strategy: str) -> None:
    """A neighbour has half of A's memory, B wrote a file just now: no reason to avoid them, or to move."""
    idle = {
        A: Figures(topics=4, connections=8, mbps=0.01, cpu=1.0, memory=69.0, disk=0.1, network=0.01),
        B: Figures(topics=4, connections=8, mbps=0.01, cpu=4.0, memory=15.0, disk=9.0, network=0.01),
        C: Figures(topics=4, connections=8, mbps=0.01, cpu=0.5, memory=15.0, disk=0.1, network=0.01),
    }
    loads = rank(strategy, idle)
    assert max(loads.values()) - min(loads.values()) < WORK_SLACK
    assert least_loaded(loads, {A: 4, B: 4, C: 4}) == [A, B, C]
    names = {A: topics("a", 4), B: topics("b", 4), C: topics("c", 4)}
    known = {T: TopicLoad(topic_name=T, producer_count=1, consumer_count=1) for each in names.values() for T in each}
    assert plan(strategy, idle, names, known, Rules()).moves == ()


@pytest.mark.parametrize("strategy", ["balanced", "weighted_load"])
def test_a_machine_that_runs_out_of_memory_is_given_nothing_more(strategy: str) -> None:
    loads = rank(
        strategy, {A: Figures(topics=4, cpu=5, memory=93), B: Figures(topics=4, cpu=5, memory=50), C: Figures(topics=4)}
    )
    assert least_loaded(loads, {A: 0, B: 4, C: 9}) == [B]


def test_balanced_counts_topics_while_nobody_reports_cpu_or_memory() -> None:
    measured = measure({A: topics("a", 3), B: topics("b", 1)}, {})
    assert rank("balanced", measured) == {A: 3.0, B: 1.0}


@pytest.mark.parametrize("strategy", ["balanced", "weighted_load"])
def test_a_broker_that_says_nothing_of_its_cpu_is_not_taken_for_an_idle_one(strategy: str) -> None:
    silent, busy = Figures(topics=3), Figures(topics=3, cpu=60, memory=50, disk=10, network=5)
    loads = rank(strategy, {A: silent, B: busy, C: busy})
    assert loads[A] == pytest.approx(loads[B]) == pytest.approx(loads[C])
    idle = Figures(topics=3, cpu=2, memory=5, disk=0, network=0)
    loads = rank(strategy, {A: silent, B: busy, C: idle})
    assert loads[C] < loads[A] < loads[B], "unknown lies between what is known"


def test_brokers_that_are_equally_busy_within_a_few_points_share_new_topics_by_number() -> None:
    loads = {A: 11.0, B: 8.2, C: 40.0}  # B had nothing to do for a moment
    assert least_loaded(loads, {A: 3, B: 9, C: 0}) == [A]
    assert least_loaded(loads, {A: 4, B: 4, C: 0}) == [A, B]
    assert choose(Marker(), loads, turn=1, topics={A: 9, B: 3, C: 0}) == B
    assert least_loaded({}, {}) == []


def test_a_topic_counts_where_it_is_not_where_it_was_reported() -> None:
    moved = measure({A: TOPICS[A][1:], B: [*TOPICS[B], TOPICS[A][0]], C: TOPICS[C]}, REPORTS)
    assert moved[A].topics == 1 and moved[A].mbps == pytest.approx(20)
    assert moved[B].topics == 5 and moved[B].mbps == pytest.approx(100)
    assert moved[B].connections == 30
    assert measure({A: [T]}, REPORTS)[A] == Figures(topics=1, cpu=80, memory=85, disk=10, network=20)


def test_the_newest_report_on_a_topic_counts() -> None:
    old = LoadReport(broker_id=A, timestamp=1, topics=[TopicLoad(topic_name=T, byte_rate=1e6)])
    new = LoadReport(broker_id=B, timestamp=2, topics=[TopicLoad(topic_name=T, byte_rate=3e6)])
    assert measure({A: [], B: [T]}, {B: new, A: old})[B].mbps == pytest.approx(24)


def test_a_report_comes_back_as_it_was_written_and_has_the_fields_of_the_reference() -> None:
    report = REPORTS[C]
    again = LoadReport.from_bytes(report.to_bytes())
    assert again is not None
    assert (again.cpu, again.memory, again.disk, again.network) == (40, 30, 0, 10)
    assert sorted(each.topic_name for each in again.topics) == sorted(TOPICS[C])
    stored = json.loads(report.to_bytes())
    assert stored["total_throughput_mbps"] == pytest.approx(10) and stored["total_lag_messages"] == 20_000
    assert {"resource": "CPU", "usage": 40} in stored["resources_usage"]
    assert stored["topics"][0].keys() >= {
        "topic_name", "message_rate", "byte_rate", "byte_rate_mbps", "producer_count", "consumer_count",
        "subscription_count", "backlog_messages",
    }  # fmt: skip


def test_a_report_has_the_busiest_thousand_topics_and_fits_into_the_store() -> None:
    many = [TopicLoad(topic_name=f"/{'n' * 100}/{'t' * 90}{number}", byte_rate=float(number)) for number in range(3000)]
    value = LoadReport(broker_id=A, timestamp=1, topics=many).to_bytes()
    assert len(value) < 1_000_000
    stored = json.loads(value)
    assert len(stored["topics"]) == 1000 and stored["topics_len"] == 3000
    assert stored["topics"][0]["byte_rate"] == 2999


@pytest.mark.parametrize("value", [b"", b"null", b"[]", b"7", b"{}", b'{"broker_id": 1, "topics": [7]}', b"\xff"])
def test_foreign_values_are_no_reports_no_moves(value: bytes) -> None:
    assert LoadReport.from_bytes(value) is None
    assert Move.from_bytes(value) is None


# --- choosing -------------------------------------------------------------------------------------------------


def test_small_loads_tie_exactly_and_larger_ones_within_a_tenth() -> None:
    assert least_loaded({A: 9.0, B: 9.5}) == [A]
    assert least_loaded({A: 9.0, B: 9.0}) == [A, B]
    assert least_loaded({A: 10.0, B: 11.0, C: 11.1}) == [A, B]
    assert least_loaded({}) == []


def test_equals_take_turns() -> None:
    assert [choose(Marker(), {A: 0, B: 0, C: 0}, turn=turn) for turn in range(4)] == [A, B, C, A]


@pytest.mark.parametrize("reason", ["unload", "rebalance", "drain"])
def test_a_move_never_goes_back_to_where_it_came_from(reason: str) -> None:
    marker = Marker(reason=reason, from_broker=A)
    assert choose(marker, {A: 0, B: 5}, turn=0) == B
    assert choose(marker, {A: 0}, turn=0) is None


def test_after_a_crash_the_broker_that_has_the_end_of_the_log_is_preferred() -> None:
    marker = Marker(reason="broker_lost", from_broker=A)
    assert choose(marker, {A: 50, B: 0}, turn=0) == A
    assert choose(marker, {B: 0}, turn=0) == B
    assert choose(marker, {A: 50, B: 0}, turn=0, avoid={A}) == B


def test_a_topic_of_a_broker_that_stopped_may_go_back_to_it() -> None:
    marker = Marker(reason="shutdown", from_broker=A, ready=True)
    assert choose(marker, {A: 0}, turn=0) == A
    assert choose(marker, {A: 1, B: 0}, turn=0) == B


def test_whoever_did_not_claim_is_asked_again_only_when_there_is_nobody_else() -> None:
    assert choose(Marker(), {A: 0, B: 5}, turn=0, avoid={A}) == B
    assert choose(Marker(), {A: 0}, turn=0, avoid={A}) == A


# --- markers --------------------------------------------------------------------------------------------------


def test_markers_have_the_form_of_the_documents() -> None:
    assert Marker().to_bytes() == b"null"
    unload = Marker(reason="unload", from_broker=BrokerId(10285063371164059634))
    assert json.loads(unload.to_bytes()) == {"reason": "unload", "from_broker": 10285063371164059634}
    lost = Marker(reason="broker_lost", from_broker=A)
    assert json.loads(lost.to_bytes()) == {"reason": "broker_lost", "from_broker": 1}


@given(
    st.builds(
        Marker,
        reason=st.sampled_from(["unload", "rebalance", "drain", "broker_lost", "shutdown"]),
        from_broker=st.integers(1, 2**64 - 1),
        to=st.none() | st.integers(1, 2**64 - 1),
        ready=st.booleans(),
        wait=st.booleans(),
        phase=st.text(),
        error=st.text(),
        timestamp=st.integers(0, 2**53),
    )
    | st.builds(Marker, to=st.none() | st.integers(1, 2**64 - 1))
)
def test_a_marker_comes_back_as_it_was_written(marker: Marker) -> None:
    assert Marker.from_bytes(marker.to_bytes()) == marker


@pytest.mark.parametrize(
    "value",
    [b"", b"7", b"[]", b'"x"', b"\xff", b'{"reason": "party", "from_broker": 1}', b'{"reason": "unload"}',
     b'{"from_broker": 1}', b'{"reason": "unload", "from_broker": "1"}', b'{"reason": "unload", "from_broker": 0}',
     b'{"to": true}', b'{"to": -1}'],
)  # fmt: skip
def test_foreign_values_are_no_markers(value: bytes) -> None:
    assert Marker.from_bytes(value) is None


def test_a_topic_is_free_when_nobody_can_own_it() -> None:
    move = Marker(reason="unload", from_broker=A, to=B)
    assert Marker().is_free and Marker(reason="broker_lost", from_broker=A).is_free
    assert not move.is_free and move.is_move
    assert move.as_ready().is_free and not move.as_ready().is_move
    assert not move.as_failed("no room").is_free and not move.as_failed("no room").is_move


def test_a_marker_says_in_words_where_the_topic_is_on_its_way() -> None:
    move = Marker(reason="unload", from_broker=A)
    assert move.stage == "waiting for a broker that can take it"
    assert move.towards(B).stage == "waiting for broker 1 to let go"
    assert Marker(reason="unload", from_broker=A, to=B, phase="uploading").stage == "uploading"
    assert move.towards(B).as_ready().stage == "waiting for broker 2 to open it"
    assert move.as_failed("the object store is away").stage == "failed: the object store is away"
    assert Marker(reason="broker_lost", from_broker=A, wait=True).stage == "waiting for broker 1 to come back"


# --- balance --------------------------------------------------------------------------------------------------


def test_balance_is_mean_deviation_and_their_ratio() -> None:
    even = balance({A: 2, B: 4, C: 12})
    assert even.mean == 6
    assert even.deviation == pytest.approx((56 / 3) ** 0.5)
    assert even.variation == pytest.approx((56 / 3) ** 0.5 / 6)
    # CV 0.72 > 0.3, so half a deviation: above 8.16 and below 3.84
    assert even.overloaded == [C] and even.underloaded == [A]


def test_a_deviation_of_almost_nothing_overloads_nobody() -> None:
    even = balance({A: 10, B: 11})  # CV 0.05: a whole margin of max(0.5, 2, 2.1)
    assert even.overloaded == [] and even.underloaded == []
    assert balance({A: 1, B: 2}).overloaded == []  # CV 0.33, half of the smallest margin: above 2.5
    assert balance({}).variation == 0 and balance({A: 0, B: 0}).variation == 0


def test_the_thresholds_are_the_references() -> None:
    assert THRESHOLDS == {"conservative": 0.40, "balanced": 0.30, "aggressive": 0.20}


# --- rebalancing ----------------------------------------------------------------------------------------------


def reports_of(topics_of: dict[BrokerId, list[TopicName]], age: float = 1e6) -> dict[BrokerId, LoadReport]:
    return {
        broker: LoadReport(
            broker_id=broker,
            timestamp=1,
            topics=[
                TopicLoad(topic_name=name, byte_rate=1e6 * (len(names) - number), age_seconds=age)
                for number, name in enumerate(names)
            ],
        )
        for broker, names in topics_of.items()
    }


def proposed(
    topics_of: dict[BrokerId, list[TopicName]], rules: Rules, age: float = 1e6, busy: Sequence[TopicName] = ()
) -> Proposal:
    reports = reports_of(topics_of, age)
    return propose("fair", measure(topics_of, reports), topics_of, reports, rules, busy=busy)


UNEVEN = {A: topics("a", 6), B: topics("b", 6), C: []}


def test_the_lightest_topic_of_the_busiest_goes_to_the_idlest() -> None:
    proposal = proposed(UNEVEN, Rules())
    move = proposal.move
    assert move is not None
    assert (move.topic, move.from_broker, move.to_broker) == ("/default/a5", A, C)
    assert move.estimated_load == pytest.approx(0.5 * 8)  # one million bytes a second is 8 Mbit/s
    assert proposal.balance.variation == pytest.approx(8**0.5 / 4)


def test_an_even_cluster_is_left_alone_and_says_so() -> None:
    proposal = proposed({A: topics("a", 5), B: topics("b", 5), C: topics("c", 4)}, Rules())
    assert proposal.move is None
    assert proposal.why == "Cluster is balanced (CV: 0.10, threshold: 0.30)"


def test_aggressiveness_decides_how_uneven_is_too_uneven() -> None:
    uneven = {A: topics("a", 10), B: topics("b", 5)}  # CV 1/3
    assert proposed(uneven, Rules(threshold=THRESHOLDS["conservative"])).move is None
    for name in ("balanced", "aggressive"):
        assert proposed(uneven, Rules(threshold=THRESHOLDS[name])).move is not None


@pytest.mark.parametrize(
    ("rules", "age", "busy"),
    [
        (Rules(topic_age_min_seconds=300), 299.0, ()),
        (Rules(blacklist=("/default/*",)), 1e6, ()),
        (Rules(blacklist=tuple(topics("a", 6) + topics("b", 6))), 1e6, ()),
        (Rules(), 1e6, topics("a", 6) + topics("b", 6)),
    ],
)
def test_young_blacklisted_and_moving_topics_stay(rules: Rules, age: float, busy: Sequence[TopicName]) -> None:
    proposal = proposed(UNEVEN, rules, age, busy)
    assert proposal.move is None
    assert proposal.why == "No suitable topics found for rebalancing"


def test_a_blacklist_names_topics_exactly_and_namespaces_with_a_star() -> None:
    rules = Rules(blacklist=("/default/foo", "/billing/*"))
    assert not rules.allows(TopicName("/default/foo"))
    assert rules.allows(TopicName("/default/foobar"))
    assert not rules.allows(TopicName("/billing/any"))
    assert rules.allows(TopicName("/billing2/any"))
    assert not Rules().allows(TopicName("/system/_events"))


def test_too_few_brokers_move_nothing() -> None:
    assert proposed({A: topics("a", 9)}, Rules()).move is None
    assert proposed(UNEVEN, Rules(brokers_min=4)).move is None


def test_a_topic_that_would_only_swap_places_stays() -> None:
    """Two brokers, one topic that is all the load: moving it would overload the other one instead."""
    topics_of = {A: [T], B: []}
    reports = {
        A: LoadReport(broker_id=A, timestamp=1, cpu=1, topics=[TopicLoad(topic_name=T, byte_rate=1e9, age_seconds=1e6)])
    }
    proposal = propose("balanced", measure(topics_of, reports), topics_of, reports, Rules())
    assert proposal.balance.overloaded == [A]
    assert proposal.move is None


def test_cooldown_and_the_hourly_limit_hold_moves_back() -> None:
    def moved(*seconds_ago: float) -> list[Move]:
        return [
            Move(topic=T, from_broker=A, to_broker=B, estimated_load=0, reason="", timestamp=now - round(ago * 1000))
            for ago in seconds_ago
        ]

    now = 10**12
    rules = Rules(cooldown_seconds=60, moves_per_hour_max=2)
    assert too_soon([], now, rules) == ""
    assert "cooldown" in too_soon(moved(59), now, rules)
    assert too_soon(moved(60), now, rules) == ""
    assert "2 moves in the last hour" in too_soon(moved(100, 3500), now, rules)
    assert too_soon(moved(100, 3600), now, rules) == ""
    # An entry from the future, after the clock was set back, holds nothing back for ever.
    assert too_soon(moved(-86400), now, rules) == ""


@given(st.lists(st.integers(0, 12), min_size=2, max_size=5), st.sampled_from(STRATEGIES))
def test_a_plan_carried_out_comes_to_an_end_and_never_makes_it_worse(counts: list[int], strategy: str) -> None:
    topics_of = {BrokerId(n + 1): topics(f"t{n}_", count) for n, count in enumerate(counts)}
    reports = reports_of(topics_of)
    before = balance(rank(strategy, measure(topics_of, reports))).variation
    for _ in range(sum(counts) + 1):
        proposal = propose(strategy, measure(topics_of, reports), topics_of, reports, Rules())
        assert proposal.balance.variation <= before
        before = proposal.balance.variation
        if proposal.move is None:
            return
        topics_of[proposal.move.from_broker].remove(proposal.move.topic)
        topics_of[proposal.move.to_broker].append(proposal.move.topic)
    pytest.fail("rebalancing went on for ever")


# --- what an operator asks for ----------------------------------------------------------------------------------


def planned(
    topics_of: dict[BrokerId, list[TopicName]],
    rules: Rules | None = None,
    reports: dict[BrokerId, LoadReport] | None = None,
    strategy: str = "fair",
    busy: Sequence[TopicName] = (),
    moves_max: int = 100,
) -> Plan:
    reports = reports_of(topics_of, age=0.0) if reports is None else reports
    measured, known = measure(topics_of, reports), loads_of_topics(reports.values())
    return plan(strategy, measured, topics_of, known, rules or Rules(), busy=busy, moves_max=moves_max)


def carried_out(topics_of: dict[BrokerId, list[TopicName]], moves: Sequence[Move]) -> dict[BrokerId, list[TopicName]]:
    after = {broker: list(names) for broker, names in topics_of.items()}
    for move in moves:
        after[move.from_broker].remove(move.topic)
        after[move.to_broker].append(move.topic)
    return after


@pytest.mark.parametrize("reports", [None, {}], ids=["young", "nobody has reported yet"])
def test_an_order_moves_topics_however_young_they_are(reports: dict[BrokerId, LoadReport] | None) -> None:
    """Three brokers, one activated again: seed 004's inspect, activate, rebalance."""
    found = planned(UNEVEN, reports=reports)
    after = carried_out(UNEVEN, found.moves)
    assert [len(names) for names in after.values()] == [4, 4, 4] and not found.rule
    assert len(planned(UNEVEN, reports=reports, moves_max=2).moves) == 2
    assert found.moves[:2] == planned(UNEVEN, reports=reports, moves_max=2).moves


def test_one_order_is_bounded_and_says_so() -> None:
    found = planned({A: topics("a", 3 * PLAN_MAX), B: []}, moves_max=10**6)
    assert len(found.moves) == PLAN_MAX and "ask again" in found.why
    assert "ask again" not in planned(UNEVEN).why


def test_two_topics_on_one_of_two_brokers_are_shared_though_nobody_is_overloaded() -> None:
    [move] = planned({A: topics("a", 2), B: []}).moves
    assert (move.from_broker, move.to_broker) == (A, B)


@pytest.mark.parametrize(
    ("topics_of", "sentence"),
    [
        ({A: topics("a", 5), B: topics("b", 5), C: topics("c", 4)}, "Cluster is balanced (CV: 0.10, threshold: 0.30)"),
        ({A: topics("a", 1), B: []}, "as even as moving whole topics makes it (CV: 1.00)"),
        ({A: topics("a", 2), B: topics("b", 1)}, "as even as moving whole topics makes it (CV: 0.33)"),
        ({A: [], B: []}, "Cluster is balanced (CV: 0.00"),
    ],
)
def test_an_order_that_has_nothing_to_do_says_so_and_names_no_rule(
    topics_of: dict[BrokerId, list[TopicName]], sentence: str
) -> None:
    found = planned(topics_of)
    assert not found.moves and not found.rule and sentence in found.why


@pytest.mark.parametrize(
    ("rules", "busy", "rule", "sentence"),
    [
        (Rules(blacklist=("/default/*",)), (), "blacklist_topics", "topics unload"),
        (Rules(), topics("a", 6) + topics("b", 6), "moving", "on their way already (12)"),
        (Rules(brokers_min=4), (), "min_brokers_for_rebalance", "needs 4 active brokers"),
        (Rules(blacklist=tuple(topics("a", 6))), topics("b", 6), "moving", "ask again"),
    ],
)
def test_an_order_that_a_rule_stops_names_it(rules: Rules, busy: Sequence[TopicName], rule: str, sentence: str) -> None:
    found = planned(UNEVEN, rules, busy=busy)
    assert not found.moves and found.rule == rule and sentence in found.why


def test_work_is_weighed_and_the_topics_that_do_nothing_are_shared_by_number() -> None:
    """One broker has all the work; the other one more topics, which do nothing."""
    busy, idle = topics("busy", 4), topics("idle", 6)
    loads = [TopicLoad(topic_name=name, byte_rate=5e6) for name in busy]
    quiet = [TopicLoad(topic_name=name) for name in idle]
    reports = {
        A: LoadReport(broker_id=A, timestamp=1, cpu=80, memory=20, network=160, topics=loads),
        B: LoadReport(broker_id=B, timestamp=1, cpu=4, memory=20, network=0, topics=quiet),
    }
    topics_of = {A: busy, B: idle}
    assert not planned(topics_of, reports=reports).moves, "by number it is even enough"
    fewer = reports | {B: LoadReport(broker_id=B, timestamp=1, cpu=4, memory=5, network=0, topics=quiet[:3])}
    for strategy, seen, count in (("balanced", reports, 6), ("weighted_load", fewer, 3)):
        there = {A: busy, B: idle[:count]}
        after = carried_out(there, planned(there, reports=seen, strategy=strategy).moves)
        work = {broker: sum(name in busy for name in names) for broker, names in after.items()}
        assert 1 <= work[B] <= work[A], (strategy, "shared, and not all of it the other one's")
    # Nothing happens anywhere, and one broker has everything.
    reports = {broker: LoadReport(broker_id=broker, timestamp=1, cpu=3, memory=20, network=0) for broker in (A, B)}
    found = planned({A: idle, B: []}, reports=reports, strategy="balanced")
    assert len(found.moves) == 3 and "topics" in found.moves[0].reason
    calm = {b: LoadReport(broker_id=b, timestamp=1, cpu=c, memory=3, network=0) for b, c in ((A, 1), (B, 9))}
    assert balance(rank("balanced", measure({A: [], B: idle}, calm))).variation > 0.3
    assert all("topics" in move.reason for move in planned({A: [], B: idle}, reports=calm, strategy="balanced").moves)
    assert not planned({A: idle[:3], B: idle[3:]}, reports=calm, strategy="balanced").moves, "next to no work"
    hot = reports | {B: LoadReport(broker_id=B, timestamp=1, cpu=40, memory=20, network=0)}
    found = planned({A: idle, B: []}, reports=hot, strategy="balanced")
    assert len(found.moves) == 3, "also to one that is busy with something else for a moment"
    young = propose("balanced", measure({A: idle, B: []}, reports), {A: idle, B: []}, reports, Rules())
    assert young.move is None, "the leader by itself does not move what does nothing"


def test_an_order_speaks_of_one_evenness_that_of_the_strategy_before_and_after() -> None:
    """Work is even, the number of topics is not: what is moved by number is still measured by work."""
    idle = topics("idle", 6)
    reports = {broker: LoadReport(broker_id=broker, timestamp=1, cpu=30, memory=20, network=0) for broker in (A, B)}
    found = planned({A: idle, B: []}, reports=reports, strategy="balanced")
    before = f"CV {found.balance.variation:.2f}"
    assert len(found.moves) == 3 and found.why.startswith(f"{before}, and ")
    assert found.moves[0].reason == f"topics 6.0 against 0.0, {before}"
    assert found.why.endswith("topics of a broker: 0 to 6, and 3 to 3 afterwards")


@given(
    st.lists(st.lists(st.sampled_from([0.0, 1e5, 1e6, 2e7]), max_size=8), min_size=2, max_size=4),
    st.lists(st.sampled_from([None, 3.0, 20.0, 70.0]), min_size=4, max_size=4),
    st.sampled_from(STRATEGIES),
)
def test_an_order_that_was_carried_out_leaves_the_next_one_nothing_to_undo(
    rates: list[list[float]], cpus: list[float | None], strategy: str
) -> None:
    """Its moves never go back, no topic moves twice, and by its own measure the cluster is no less even."""
    topics_of = {BrokerId(n + 1): topics(f"t{n}_", len(each)) for n, each in enumerate(rates)}
    reports = {
        broker: LoadReport(
            broker_id=broker,
            timestamp=1,
            cpu=cpu,
            memory=cpu,
            topics=[TopicLoad(topic_name=name, byte_rate=rate) for name, rate in zip(names, each, strict=True)],
        )
        for (broker, names), each, cpu in zip(topics_of.items(), rates, cpus, strict=False)
    }
    found = planned(topics_of, reports=reports, strategy=strategy)
    assert len({move.topic for move in found.moves}) == len(found.moves) and not found.rule
    counts = {broker: len(names) for broker, names in carried_out(topics_of, found.moves).items()}
    if strategy == "fair" and sum(counts.values()) >= 4 * len(counts):
        assert balance({b: float(n) for b, n in counts.items()}).variation < 0.3


def test_the_history_is_bounded_whoever_adds_to_it() -> None:
    entries = [f"{number:05}" for number in range(HISTORY_MAX + 10)]
    assert old_entries(entries) == entries[:11]
    assert old_entries(entries[: HISTORY_MAX - 1]) == []


def test_every_aggressiveness_of_the_configuration_has_thresholds() -> None:
    from pydanube.config import settings

    assert set(settings.AGGRESSIVENESS) == set(THRESHOLDS)


def test_a_move_comes_back_from_the_history_as_it_was_written() -> None:
    move = Move(topic=T, from_broker=A, to_broker=B, estimated_load=1.5, reason="load", timestamp=7)
    assert Move.from_bytes(move.to_bytes()) == move
