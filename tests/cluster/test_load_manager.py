"""Topics find brokers: assignment, crash, move, drain, rebalancing, and every request that must be refused."""

from __future__ import annotations

import asyncio
import json
from random import Random
from typing import Any

import pytest

from pydanube.config import LoadManagerConfig
from pydanube.core import keys
from pydanube.core.cluster.placement import Marker
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import BrokerUnknown, DeadlineExceeded, MoveFailed, MoveRefused, NotServed, TopicUnknown
from pydanube.ports import Delete, Put
from tests.harness.member_cluster import ORDERS, TTL, MemberCluster, MemberNode, now, simulate, simulated

EAGER = LoadManagerConfig(
    assignment_strategy="fair",
    rebalancing_enabled=True,
    check_interval_seconds=10,
    cooldown_seconds=5,
    load_report_interval_seconds=5,
)


async def three(**more: Any) -> tuple[MemberCluster, MemberNode, MemberNode, MemberNode]:
    cluster = MemberCluster(**more)
    a, b, c = await cluster.boot(1, 2, 3)
    await asyncio.sleep(1.0)
    return cluster, a, b, c


async def ask(node: MemberNode, request: Any) -> Any:
    return await node.process.call(request)


# --- assignment -----------------------------------------------------------------------------------------------


@simulated
async def test_new_topics_are_spread_evenly_and_quickly() -> None:
    cluster, *nodes = await three()
    topics = await cluster.create(*(f"/default/t{number}" for number in range(30)))
    await cluster.until(lambda: all(cluster.hosts(topic) for topic in topics), 1.0)
    assert [len(node.owned) for node in nodes] == [10, 10, 10]
    assert await cluster.metadata.list(keys.UNASSIGNED) == []


@simulated
async def test_a_topic_in_a_namespace_called_state_is_a_topic() -> None:
    cluster, a, *_ = await three()
    [topic] = await cluster.create_on(a, "/state/state")
    a.kill()
    await cluster.until(lambda: cluster.hosts(topic) != [], 2 * TTL)


@simulated
async def test_a_target_that_cannot_open_a_topic_is_replaced_after_three_seconds() -> None:
    cluster, *nodes = await three()
    for node in nodes[:2]:
        node.claims_fail = NotServed("", "no room")
    [topic] = await cluster.create(ORDERS)
    took = await cluster.until(lambda: cluster.hosts(topic) != [], 20.0)
    assert cluster.hosts(topic) == [3] and took < 7.0


@simulated
async def test_a_topic_that_was_deleted_meanwhile_leaves_no_marker() -> None:
    cluster, *_ = await three()
    await cluster.metadata.transact([], [Put(keys.unassigned(ORDERS), b"null")])  # and no topic
    await asyncio.sleep(2.0)
    assert await cluster.metadata.list(keys.UNASSIGNED) == []


@simulated
async def test_nobody_is_told_to_claim_what_somebody_owns() -> None:
    """A marker of a new topic, in error, on a topic that is served."""
    cluster, a, *_ = await three()
    await cluster.create_on(a, ORDERS)
    await cluster.metadata.transact([], [Put(keys.unassigned(ORDERS), b"null")])
    await asyncio.sleep(60.0)
    assert cluster.hosts(ORDERS) == [1] and len(cluster.claims) == 1


@pytest.mark.parametrize("value", [b"garbage", b"7", b'{"reason": "unload"}', b'{"reason": "x", "from_broker": 1}'])
@simulated
async def test_a_foreign_value_under_a_marker_is_left_alone(value: bytes) -> None:
    cluster, a, *_ = await three()
    await cluster.create_on(a, ORDERS)
    await cluster.metadata.transact([], [Put(keys.unassigned(ORDERS), value)])
    await asyncio.sleep(10.0)
    with pytest.raises(MoveRefused, match="no marker"):
        await ask(a, a.cluster.requests.request_move(ORDERS))
    item = await cluster.metadata.get(keys.unassigned(ORDERS))
    assert item is not None and item.value == value
    assert cluster.hosts(ORDERS) == [1]


# --- crash ----------------------------------------------------------------------------------------------------


@simulated
async def test_the_topics_of_a_dead_broker_are_elsewhere_one_second_after_its_lease_ended() -> None:
    cluster, a, _, c = await three()
    topics = await cluster.create_on(c, *(f"/default/t{number}" for number in range(200)))
    await asyncio.sleep(20.0)
    begun = now()
    c.kill()
    await cluster.until(lambda: all(cluster.hosts(topic) for topic in topics), TTL + 2.0)
    assert now() - begun <= TTL + 1.0
    assert a.owned.keys() | {t for t in topics if t not in a.owned} == set(topics)
    assert await cluster.metadata.list(keys.assignments(BrokerId(3))) != []  # its state alone
    assert [keys.assignment_of(item.key) for item in await cluster.metadata.list(keys.assignments(BrokerId(3)))] == [
        None
    ]


@simulated
async def test_a_crashed_topic_with_nobody_to_take_it_waits_for_somebody() -> None:
    cluster, _, b, c = await three()
    await ask(b, b.cluster.requests.drain(BrokerId(1)))
    await ask(b, b.cluster.requests.drain(BrokerId(2)))
    await cluster.create_on(c, ORDERS)
    c.kill()
    await asyncio.sleep(5 * TTL)
    marker = await cluster.marker(ORDERS)
    assert marker is not None and (marker.reason, marker.from_broker, marker.to) == ("broker_lost", 3, None)
    await ask(b, b.cluster.requests.activate(BrokerId(2)))
    assert await cluster.until(lambda: cluster.hosts(ORDERS) == [2], 5.0) < 1.0


@simulated
async def test_a_topic_created_to_wait_waits_for_the_broker_that_has_its_log() -> None:
    cluster, *_, c = await three()
    await cluster.create_on(c, ORDERS)
    await cluster.metadata.transact([], [Put(keys.on_crash(ORDERS), b'"wait"')])
    c.kill()
    await asyncio.sleep(5 * TTL)
    marker = await cluster.marker(ORDERS)
    assert cluster.hosts(ORDERS) == [] and marker is not None
    assert marker.stage == "waiting for broker 3 to come back"
    [c] = await cluster.boot(3)
    assert c.entry.reason == "stale_restart"
    await asyncio.sleep(2.0)
    assert cluster.hosts(ORDERS) == [3]


@simulated
async def test_a_broker_that_comes_back_while_its_topics_are_being_given_away_gets_none_of_them_twice() -> None:
    """The leader dies between declaring it dead and giving its topics away; another goes on."""
    cluster, *nodes = await three()
    leader = cluster.leaders[0]
    victim = next(node for node in nodes if node is not leader)
    topics = await cluster.create_on(victim, *(f"/default/t{number}" for number in range(120)))
    await asyncio.sleep(2.0)
    victim.kill()
    leader.metadata.delay_max_seconds = 2.0  # so that it is caught in the middle
    await cluster.until(lambda: any(key.startswith(keys.UNASSIGNED) for key in cluster.metadata.keys), 2 * TTL)
    leader.kill()
    assert 0 < len(await cluster.metadata.list(keys.UNASSIGNED)) < 120
    back = await cluster.boot_one(victim.broker)
    assert back.entry.reason == "stale_restart" and back.owned == {}
    await cluster.until(lambda: all(cluster.hosts(topic) for topic in topics), 2 * TTL)
    assert sorted(topic for topic, _ in cluster.claims) == sorted([*topics, *topics])


# --- move -----------------------------------------------------------------------------------------------------


@simulated
async def test_an_unload_asked_of_any_broker_moves_the_topic_elsewhere() -> None:
    cluster, a, b, c = await three()
    await cluster.create_on(a, ORDERS)
    for asked in (a, b, c):
        host = cluster.sole_host(ORDERS)
        assert await ask(asked, asked.cluster.requests.unload(ORDERS)) == host.broker
        assert await ask(asked, asked.cluster.requests.hosted(ORDERS, timeout_seconds=5.0)) != host.broker
        assert cluster.host(ORDERS) is not host
    assert await cluster.marker(ORDERS) is None


@simulated
async def test_an_unload_answers_when_the_old_owner_has_let_go_not_before() -> None:
    cluster, a, b, _ = await three()
    await cluster.create_on(a, ORDERS)
    a.move_seconds = 7.0
    b.claim_seconds = 2.0
    begun = now()
    await ask(b, b.cluster.requests.unload(ORDERS, BrokerId(2)))
    assert now() - begun == pytest.approx(7.0, abs=0.1)
    assert ORDERS not in a.owned and cluster.hosts(ORDERS) == []
    await ask(a, a.cluster.requests.hosted(ORDERS, timeout_seconds=5.0))
    assert cluster.hosts(ORDERS) == [2]


@simulated
async def test_the_old_owner_serves_until_it_has_let_go_and_is_told_the_target() -> None:
    cluster, a, b, _ = await three()
    await cluster.create_on(a, ORDERS)
    a.move_seconds = 5.0
    await ask(b, b.cluster.requests.request_move(ORDERS, to=BrokerId(3)))
    await asyncio.sleep(4.0)
    marker = await cluster.marker(ORDERS)
    assert marker is not None and (marker.to, marker.ready) == (3, False)
    assert cluster.hosts(ORDERS) == [1]
    await asyncio.sleep(2.0)
    assert cluster.hosts(ORDERS) == [3]


@simulated
async def test_a_move_that_its_owner_undid_is_told_and_forgotten_and_may_be_tried_again() -> None:
    cluster, a, b, _ = await three()
    await cluster.create_on(a, ORDERS)
    a.moves_fail = NotServed(ORDERS, "the object store is away")
    with pytest.raises(MoveFailed, match="the object store is away"):
        await ask(b, b.cluster.requests.unload(ORDERS))
    assert cluster.hosts(ORDERS) == [1] and len(cluster.claims) == 1
    a.moves_fail = None
    await ask(b, b.cluster.requests.unload(ORDERS))  # at once, in place of the failed marker
    await asyncio.sleep(1.0)
    assert cluster.hosts(ORDERS) != [1]
    a, b = cluster.sole_host(ORDERS), next(node for node in cluster.nodes if node is not cluster.host(ORDERS))
    a.moves_fail = NotServed(ORDERS, "no")
    with pytest.raises(MoveFailed):
        await ask(b, b.cluster.requests.unload(ORDERS))
    await asyncio.sleep(15.0)
    assert await cluster.marker(ORDERS) is None


@simulated
async def test_a_target_that_dies_before_it_claims_is_replaced() -> None:
    """The row of the table: B dies before claim."""
    cluster, a, b, c = await three()
    await cluster.create_on(a, ORDERS)
    b.claim_seconds = 1000.0
    await ask(c, c.cluster.requests.unload(ORDERS, BrokerId(2)))
    b.kill()
    took = await cluster.until(lambda: cluster.hosts(ORDERS) != [], TTL)
    assert cluster.hosts(ORDERS) == [3] and took < 4.0


@simulated
async def test_an_owner_that_dies_while_it_lets_go_is_taken_over_as_after_any_crash() -> None:
    """The row of the table: A draining, dies."""
    cluster, a, b, _ = await three()
    await cluster.create_on(a, ORDERS)
    a.move_seconds = 1000.0
    await ask(b, b.cluster.requests.request_move(ORDERS))
    await asyncio.sleep(3.0)
    a.kill()
    await cluster.until(lambda: cluster.hosts(ORDERS) != [], TTL + 1.0)
    reasons = [marker.reason for _, marker in cluster.markers if marker is not None]
    assert reasons == ["unload", "unload", "broker_lost", "broker_lost"]  # each first without a target
    assert len(cluster.claims) == 2


@simulated
async def test_an_owner_that_seals_after_it_was_declared_dead_leaves_one_owner() -> None:
    """The row of the table: A's lease lost, A alive. The seal succeeds if nobody has claimed the topic before."""
    for pause in (TTL + 0.5, TTL + 5.0):
        cluster, a, b, _ = await three()
        await cluster.create_on(a, ORDERS)
        a.move_seconds = TTL
        for node in cluster.nodes:
            node.claim_seconds = 2.0
        await ask(b, b.cluster.requests.request_move(ORDERS))
        await asyncio.sleep(1.0)
        a.pause()
        await asyncio.sleep(pause)
        a.resume()
        await asyncio.sleep(30.0)
        assert len(cluster.hosts(ORDERS)) == 1 and cluster.hosts(ORDERS) != [1]
        for node in list(cluster.nodes):
            node.kill()


@simulated
async def test_the_leader_killed_after_the_marker_leaves_the_same_move_to_the_next() -> None:
    """The row of the table: marker written, leader dies."""
    cluster, *nodes = await three()
    leader = cluster.leaders[0]
    owner, asked = (node for node in nodes if node is not leader)
    await cluster.create_on(owner, ORDERS)
    leader.pause()  # it will not do anything about it
    await ask(asked, asked.cluster.requests.request_move(ORDERS))
    leader.kill()
    await cluster.until(lambda: cluster.hosts(ORDERS) == [asked.broker], TTL + 2.0)


# --- the leader killed at random points -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_leader_killed_between_marker_and_assignment_leaves_one_owner(seed: int) -> None:
    async def history() -> None:
        rng = Random(seed)
        cluster = MemberCluster(seed=seed, ttl_seconds=3.2)
        nodes = await cluster.boot(1, 2, 3, 4)
        await asyncio.sleep(1.0)
        leader = cluster.leaders[0]
        others = [node for node in nodes if node is not leader]
        owned = await cluster.create_on(others[0], *(f"/default/o{number}" for number in range(5)))
        for node in nodes:
            node.metadata.delay_max_seconds = 0.2
            node.move_seconds = rng.random()
        begun = await cluster.create(*(f"/default/n{number}" for number in range(5)))
        for topic in owned[:3]:
            await ask(others[1], others[1].cluster.requests.request_move(topic))
        if rng.random() < 0.5:
            others[0].kill()
        await asyncio.sleep(rng.random() * 0.8)
        leader.kill()
        await cluster.until(lambda: all(len(cluster.hosts(topic)) == 1 for topic in (*owned, *begun)), 30.0)
        await asyncio.sleep(30.0)
        assert all(len(cluster.hosts(topic)) == 1 for topic in (*owned, *begun))
        assert await cluster.metadata.list(keys.UNASSIGNED) == []
        for topic in begun:
            # A new topic is claimed once. Again only if its first owner was the one that died.
            claimants = [broker for name, broker in cluster.claims if name == topic]
            dead = {node.broker for node in nodes} - {node.broker for node in cluster.nodes}
            assert all(broker in dead for broker in claimants[:-1]) and claimants[-1] not in dead

    simulate(history(), seed)


# --- refusals -------------------------------------------------------------------------------------------------


@simulated
async def test_requests_that_cannot_be_done_are_refused_with_a_sentence_and_change_nothing() -> None:
    cluster = MemberCluster()
    [a] = await cluster.boot(1)
    await asyncio.sleep(1.0)
    await cluster.create_on(a, ORDERS)
    requests = a.cluster.requests

    async def refused(kind: type[Exception], request: Any, text: str) -> None:
        before = await cluster.metadata.list("/")
        with pytest.raises(kind) as error:
            await ask(a, request)
        assert text in str(error.value)
        assert [item for item in await cluster.metadata.list("/") if "load" not in item.key] == [
            item for item in before if "load" not in item.key
        ]

    await refused(
        MoveRefused,
        requests.request_move(ORDERS),
        "Cannot unload topic: single broker cluster detected. Unload requires at least 2 brokers. "
        "Use delete if you want to remove the topic.",
    )
    await refused(MoveRefused, requests.drain(BrokerId(1)), "single broker cluster")
    await refused(TopicUnknown, requests.request_move(TopicName("/default/ghost")), "/default/ghost")
    await refused(BrokerUnknown, requests.drain(BrokerId(99)), "99")
    await refused(BrokerUnknown, requests.activate(BrokerId(99)), "99")

    [b] = await cluster.boot(2, join=True)
    await refused(MoveRefused, requests.request_move(ORDERS), "no other broker is active")
    await refused(MoveRefused, requests.drain(BrokerId(1)), "no other broker is active")
    await ask(a, requests.activate(BrokerId(2)))
    await refused(BrokerUnknown, requests.request_move(ORDERS, to=BrokerId(99)), "99")
    await refused(MoveRefused, requests.request_move(ORDERS, to=BrokerId(1)), "hosts it already")

    ghost = TopicName("/default/homeless")
    await cluster.metadata.transact([], [Put(keys.topic(ghost), b"null")])
    await refused(MoveRefused, requests.request_move(ghost), "no broker hosts it just now")

    a.move_seconds = 3.0
    await ask(a, requests.request_move(ORDERS))
    await refused(MoveRefused, requests.request_move(ORDERS), "is being moved already")
    await asyncio.sleep(0.5)
    await refused(MoveRefused, requests.request_move(ORDERS), "waiting for broker 1 to let go")
    await asyncio.sleep(4.0)
    assert cluster.hosts(ORDERS) == [2] and b.owned.keys() == {ORDERS}


@simulated
async def test_of_two_unloads_at_once_one_is_refused() -> None:
    cluster, a, b, c = await three()
    await cluster.create_on(a, ORDERS)
    results = await asyncio.gather(
        ask(b, b.cluster.requests.request_move(ORDERS)),
        ask(c, c.cluster.requests.request_move(ORDERS)),
        return_exceptions=True,
    )
    assert sorted(type(result) for result in results if not isinstance(result, int)) == [MoveRefused]  # type: ignore[type-var]
    assert 1 in results


@simulated
async def test_waiting_for_a_move_ends_with_a_sentence_when_it_takes_too_long() -> None:
    cluster, a, b, _ = await three()
    await cluster.create_on(a, ORDERS)
    a.move_seconds = 100.0
    with pytest.raises(DeadlineExceeded, match="waiting for broker 1 to let go"):
        await ask(b, b.cluster.requests.unload(ORDERS, timeout_seconds=10.0))


# --- drain and activate ---------------------------------------------------------------------------------------


@simulated
async def test_a_drain_moves_everything_a_few_at_a_time_and_ends_drained() -> None:
    cluster, a, b, c = await three()
    topics = sorted(await cluster.create_on(a, *(f"/default/t{number}" for number in range(20))))
    assert (await ask(b, b.cluster.requests.drain(BrokerId(1), dry_run=True))).pending == topics
    assert await cluster.state(1) == ("active", "boot")
    progress = await ask(b, b.cluster.requests.drain(BrokerId(1), parallel_max=3))
    assert progress.started and len(progress.topics) == 20
    most = 0
    while (await cluster.state(1) or ("",))[0] != "drained":
        moving = [await cluster.marker(topic) for topic in topics]
        most = max(most, sum(marker is not None for marker in moving))
        await asyncio.sleep(0.01)
    assert most == 3
    assert await cluster.state(1) == ("drained", "drain_complete")
    assert a.owned == {} and len(b.owned) == len(c.owned) == 10
    assert b.cluster.requests.drain_progress(BrokerId(1), topics).succeeded == 20
    await cluster.create("/default/x", "/default/y", "/default/z")
    await asyncio.sleep(1.0)
    assert a.owned == {}


@simulated
async def test_a_drain_of_a_broker_without_topics_is_done_at_once() -> None:
    cluster, a, b, _ = await three()
    assert (await ask(b, b.cluster.requests.drain(BrokerId(1)))).topics == []
    assert await cluster.state(1) == ("drained", "no_topics")
    assert a.owned == {}


@simulated
async def test_a_drain_tells_which_topics_stay_and_why_and_goes_on_with_them_later() -> None:
    cluster, a, b, _ = await three()
    topics = await cluster.create_on(a, "/default/x", "/default/y", "/default/z")
    a.moves_fail = NotServed("/default/x", "the object store is away")
    await ask(b, b.cluster.requests.drain(BrokerId(1)))
    progress = await ask(b, b.cluster.requests.drained(BrokerId(1), topics, 5.0))
    assert set(progress.failed) == set(topics) and progress.succeeded == 0
    assert "the object store is away" in progress.failed[topics[0]]
    a.moves_fail = None
    progress = await ask(b, b.cluster.requests.drained(BrokerId(1), topics, 1.0))
    await cluster.until(lambda: a.owned == {}, 60.0)


@simulated
async def test_a_drain_survives_its_leader_and_a_restart_of_the_drained() -> None:
    cluster, *nodes = await three()
    leader = cluster.leaders[0]
    victim = next(node for node in nodes if node is not leader)
    topics = await cluster.create_on(victim, *(f"/default/t{number}" for number in range(30)))
    asked = next(node for node in nodes if node not in (leader, victim))
    await ask(asked, asked.cluster.requests.drain(victim.broker, parallel_max=1))
    await asyncio.sleep(1.0)
    leader.kill()
    victim.kill()
    await asyncio.sleep(3.0)
    victim = await cluster.boot_one(victim.broker)
    assert victim.entry.mode.value == "draining" and victim.owned
    await cluster.until(lambda: victim.owned == {}, 4 * TTL)
    assert all(cluster.hosts(topic) == [asked.broker] for topic in topics)


@simulated
async def test_activate_then_rebalance_brings_topics_back() -> None:
    """The end of scenarios 2 and 3b."""
    cluster, a, b, c = await three(config=EAGER)
    await cluster.create(*(f"/default/t{number}" for number in range(12)))
    await asyncio.sleep(5.0)
    c.kill()
    await asyncio.sleep(TTL + 10.0)
    [c] = await cluster.boot(3)
    assert c.entry.reason == "stale_restart" and (len(a.owned), len(b.owned)) == (6, 6)
    await asyncio.sleep(60.0)
    assert c.owned == {}
    await ask(a, a.cluster.requests.activate(BrokerId(3)))
    await asyncio.sleep(200.0)
    assert len(c.owned) >= 2
    assert len(a.owned) + len(b.owned) + len(c.owned) == 12


def test_that_no_broker_can_take_a_topic_is_an_error_in_the_log_with_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two are drained, the third one dies: its topics are kept, and wait."""

    async def story() -> None:
        cluster, a, b, c = await three()
        topics = await cluster.create_on(a, *(f"/default/t{number}" for number in range(5)))
        for node in (b, c):
            await ask(a, a.cluster.requests.drain(node.broker))
        await cluster.until(lambda: a.cluster.view.active() == [a.broker], TTL)
        a.kill()
        await asyncio.sleep(3 * TTL)
        [said] = [each for each in caplog.records if each.getMessage().startswith("no broker can take topics")]
        assert said.levelname == "ERROR" and said.__dict__["topics"] == len(topics)
        assert "brokers activate" in said.__dict__["do"] and said.__dict__["why"] == "no broker is active"
        await ask(b, b.cluster.requests.activate(b.broker))
        await cluster.until(lambda: len(b.owned) == len(topics), TTL)

    simulate(story(), None)


# --- rebalancing ----------------------------------------------------------------------------------------------


@simulated
async def test_activate_then_rebalance_by_hand_works_at_once_with_the_default_limits() -> None:
    """As seed 004 prescribes it. Topics are seconds old, and more move than the limit of an hour."""
    config = LoadManagerConfig(assignment_strategy="fair")
    cluster, a, b, c = await three(config=config)
    await cluster.create(*(f"/default/t{number}" for number in range(60)))
    await asyncio.sleep(5.0)
    for node in (a, b):
        node.topic_age = 0.0
    c.kill()
    await asyncio.sleep(TTL + 10.0)
    [c] = await cluster.boot(3)
    assert (len(a.owned), len(b.owned), len(c.owned)) == (30, 30, 0) and c.entry.reason == "stale_restart"
    await ask(a, a.cluster.requests.activate(BrokerId(3)))
    dry = await ask(b, b.cluster.requests.rebalance(dry_run=True))
    assert len(dry.moves) >= 18 and not dry.started and dry.why.startswith("Dry run") and not dry.rule
    await asyncio.sleep(5.0)
    assert c.owned == {} and b.cluster.requests.history() == []
    order = await ask(b, b.cluster.requests.rebalance())
    assert order.started and len(order.moves) == 4 and len(order.rest) == len(dry.moves) - 4
    assert "4 begun" in order.why and "in the background" in order.why
    b.process.run(b.cluster.rebalance_in_background, order)
    await cluster.until(lambda: len(c.owned) == len(dry.moves), 20.0)
    assert len(a.owned) + len(b.owned) + len(c.owned) == 60
    history = b.cluster.requests.history()
    assert {move.topic for move in history} == set(c.owned) and len(history) == len(dry.moves)
    again = await ask(a, a.cluster.requests.rebalance())
    assert not again.started and not again.rule and again.why.startswith("Cluster is balanced")


@simulated
async def test_an_order_never_moves_more_than_it_was_told_nor_more_than_a_few_at_a_time() -> None:
    cluster, a, b, c = await three(config=LoadManagerConfig(assignment_strategy="fair"))
    await cluster.create_on(a, *(f"/default/t{number}" for number in range(12)))
    for node in (a, b, c):
        node.move_seconds = 1.0
    await asyncio.sleep(1.0)
    order = await ask(c, c.cluster.requests.rebalance(moves_max=6))
    c.process.run(c.cluster.rebalance_in_background, order)
    most = 0
    for _ in range(60):
        moving = [seen for seen in c.cluster.view.markers.values() if seen.value.reason == "rebalance"]
        most = max(most, len(moving))
        await asyncio.sleep(0.1)
    assert most == 4 and len(a.owned) == 6 and len(a.cluster.requests.history()) == 6


@simulated
async def test_an_order_goes_round_a_broker_that_died_meanwhile_and_one_whose_topics_do_not_move() -> None:
    cluster, a, b, c = await three(config=LoadManagerConfig(assignment_strategy="fair"))
    await cluster.create_on(a, *(f"/default/t{number}" for number in range(15)))
    await asyncio.sleep(1.0)
    a.moves_fail = NotServed(ORDERS, "not today")
    order = await ask(b, b.cluster.requests.rebalance())
    b.process.run(b.cluster.rebalance_in_background, order)
    await asyncio.sleep(0.5)
    c.kill()
    await asyncio.sleep(3 * TTL)
    assert len(a.owned) == 15, "what could not move is served on"
    a.moves_fail = None
    order = await ask(b, b.cluster.requests.rebalance())
    assert {move.to_broker for move in (*order.moves, *order.rest)} == {2}
    b.process.run(b.cluster.rebalance_in_background, order)
    await cluster.until(lambda: len(b.owned) >= 5, 20.0)


@simulated
async def test_an_order_and_the_leaders_own_rebalancing_do_not_chase_each_other() -> None:
    """What was moved by hand counts for the leader: it waits its cooldown, and moves nothing back."""
    config = LoadManagerConfig(
        assignment_strategy="fair", rebalancing_enabled=True, check_interval_seconds=5, cooldown_seconds=5,
        load_report_interval_seconds=5, max_moves_per_hour=8,
    )  # fmt: skip
    cluster, a, b, _ = await three(config=config)
    await cluster.create_on(a, *(f"/default/t{number}" for number in range(18)))
    orders = []
    for _ in range(6):
        order = await ask(b, b.cluster.requests.rebalance())
        if order.rest:
            b.process.run(b.cluster.rebalance_in_background, order)
        orders.append(len(order.moves) + len(order.rest))
        await asyncio.sleep(20.0)
    assert orders[0] >= 8 and not any(orders[1:])
    moved = len(a.cluster.requests.history())
    await asyncio.sleep(200.0)
    history = a.cluster.requests.history()
    assert len(history) == moved and len({move.topic for move in history}) == moved, "no topic moved twice"
    await cluster.create_on(a, *(f"/default/more{number}" for number in range(18)))
    await asyncio.sleep(200.0)
    assert len(a.cluster.requests.history()) == moved, "the limit of an hour is used up for the leader alone"
    order = await ask(b, b.cluster.requests.rebalance(moves_max=2))
    assert order.started and len(order.moves) == 2


@simulated
async def test_an_order_that_a_rule_stops_says_which() -> None:
    config = LoadManagerConfig(assignment_strategy="fair", blacklist_topics=("/default/*",))
    cluster, a, b, _ = await three(config=config)
    await cluster.create_on(a, *(f"/default/t{number}" for number in range(9)))
    await asyncio.sleep(1.0)
    stopped = await ask(b, b.cluster.requests.rebalance())
    assert stopped.rule == "blacklist_topics" and not stopped.started and "blacklist_topics" in stopped.why


@simulated
async def test_an_even_cluster_says_so() -> None:
    cluster, a, b, c = await three()
    for node in (a, b, c):
        await cluster.create_on(node, f"/default/t{node.broker}")
    await asyncio.sleep(1.0)
    result = await ask(a, a.cluster.requests.rebalance(dry_run=False))
    assert result.why == "Cluster is balanced (CV: 0.00, threshold: 0.30)" and not result.started
    even = a.process.run(a.cluster.requests.balance)
    assert even.loads == {1: 1.0, 2: 1.0, 3: 1.0}


@simulated
async def test_automatic_rebalancing_keeps_a_history_and_its_limits_over_leaders() -> None:
    config = LoadManagerConfig(
        assignment_strategy="fair", rebalancing_enabled=True, check_interval_seconds=5, cooldown_seconds=5,
        load_report_interval_seconds=5, max_moves_per_hour=2,
    )  # fmt: skip
    cluster, a, b, c = await three(config=config)
    await cluster.create_on(a, *(f"/default/t{number}" for number in range(9)))
    await asyncio.sleep(200.0)
    assert len(a.owned) == 7
    cluster.leaders[0].pause()
    await asyncio.sleep(3 * TTL)
    stored = [json.loads(item.value) for item in await cluster.metadata.list(keys.REBALANCING_HISTORY)]
    assert len(stored) == 2
    assert stored[0].keys() >= {"topic", "from_broker", "to_broker", "reason", "timestamp"}
    assert sum(len(node.owned) for node in (b, c)) >= 2


@simulated
async def test_load_reports_are_written_every_interval_and_go_with_their_broker() -> None:
    cluster, a, *_ = await three()
    await cluster.create_on(a, ORDERS)
    await asyncio.sleep(31.0)
    item = await cluster.metadata.get(keys.load(BrokerId(1)))
    assert item is not None
    report = json.loads(item.value)
    assert [topic["topic_name"] for topic in report["topics"]] == [ORDERS]
    await asyncio.sleep(30.0)
    again = await cluster.metadata.get(keys.load(BrokerId(1)))
    assert again is not None and json.loads(again.value)["timestamp"] - report["timestamp"] == 30_000
    a.kill()
    await asyncio.sleep(TTL)
    assert await cluster.metadata.get(keys.load(BrokerId(1))) is None


@simulated
async def test_topics_in_which_nothing_happens_are_reported_once_and_known_to_a_broker_that_comes_later() -> None:
    cluster, a, *_ = await three()
    await cluster.create_on(a, *(f"/default/t{number}" for number in range(50)))
    await asyncio.sleep(70.0)
    first = await cluster.metadata.get(keys.quiet_load(BrokerId(1)))
    assert first is not None and len(json.loads(first.value)["topics"]) == 50
    await asyncio.sleep(600.0)
    assert await cluster.metadata.get(keys.quiet_load(BrokerId(1))) == first, "it was not written again"
    item = await cluster.metadata.get(keys.load(BrokerId(1)))
    assert item is not None and (json.loads(item.value)["topics"], len(item.value) < 300) == ([], True)
    [late] = await cluster.boot(4)
    await asyncio.sleep(1.0)
    assert len(late.cluster.view.reports[BrokerId(1)].topics) == 50
    a.kill()
    await asyncio.sleep(TTL + 1.0)
    assert await cluster.metadata.list(keys.load(BrokerId(1))) == [], "it goes with its broker, too"


@simulated
async def test_a_broker_that_lost_its_lease_reports_everything_anew() -> None:
    """It was alone and cut off: nobody declared it dead, it keeps its topics, and its reports went with the lease."""
    cluster = MemberCluster()
    [a] = await cluster.boot(1)
    await cluster.create_on(a, *(f"/default/t{number}" for number in range(5)))
    await asyncio.sleep(70.0)
    lease = a.cluster.membership.lease.id
    a.metadata.cut = True
    await asyncio.sleep(2 * TTL)
    a.metadata.cut = False
    await asyncio.sleep(70.0)
    assert a.cluster.membership.lease.id != lease and len(a.owned) == 5
    stored = await cluster.metadata.get(keys.quiet_load(BrokerId(1)))
    assert stored is not None and len(json.loads(stored.value)["topics"]) == 5
    assert sorted(topic.topic_name for topic in a.cluster.view.reports[BrokerId(1)].topics) == sorted(a.owned)


# --- lost events ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drop_every", "seconds"), [(10, 120.0), (2, 200.0), (1, 600.0)])
@simulated
async def test_events_that_never_arrive_cost_time_and_nothing_else(drop_every: int, seconds: float) -> None:
    cluster = MemberCluster()
    cluster.stores = lambda store: setattr(store, "drop_every", drop_every)
    a, b, c = await cluster.boot(1, 2, 3)
    topics = await cluster.create(*(f"/default/t{number}" for number in range(20)))
    await cluster.until(lambda: all(len(cluster.hosts(topic)) == 1 for topic in topics), seconds)
    for topic in topics[:5]:
        host = cluster.sole_host(topic)
        await ask(a, a.cluster.requests.request_move(topic))
        await cluster.until(lambda topic=topic, host=host: cluster.hosts(topic) not in ([], [host.broker]), seconds)  # type: ignore[misc]
    c.kill()
    await cluster.until(lambda: all(len(cluster.hosts(topic)) == 1 for topic in topics), seconds)
    assert len(a.owned) + len(b.owned) == 20


@simulated
async def test_a_view_is_listed_again_every_thirty_seconds_and_after_a_cut() -> None:
    cluster = MemberCluster()
    cluster.stores = lambda store: setattr(store, "drop_every", 1)
    [a] = await cluster.boot(1)
    await cluster.boot(2)
    await cluster.until(lambda: set(a.cluster.peers) == {1, 2}, 31.0)
    a.metadata.drop_every = 0
    a.metadata.cut = True
    await asyncio.sleep(10.0)
    await cluster.boot(3)
    a.metadata.cut = False
    assert await cluster.until(lambda: set(a.cluster.peers) == {1, 2, 3}, 20.0) < 7.0


@simulated
async def test_markers_keep_the_form_of_the_documents_in_the_store() -> None:
    cluster, a, b, _ = await three()
    await cluster.create_on(a, ORDERS)
    a.move_seconds = 5.0
    await ask(b, b.cluster.requests.request_move(ORDERS))
    item = await cluster.metadata.get("/cluster/unassigned/default/orders")
    assert item is not None
    stored = json.loads(item.value)
    assert (stored["reason"], stored["from_broker"]) == ("unload", 1)
    await cluster.metadata.transact([], [Delete("/cluster/unassigned/default/orders")])
    assert Marker.from_bytes(item.value) is not None


@simulated
async def test_a_topic_that_is_assigned_and_not_served_is_offered_again() -> None:
    cluster, a, *_ = await three()
    await cluster.create_on(a, ORDERS)
    a.claims_fail = NotServed(ORDERS, "the disk is full")
    a.owned.clear()  # as if it could not be opened, or the answer to the claim was lost
    await asyncio.sleep(60.0)
    assert cluster.hosts(ORDERS) == []
    a.claims_fail = None
    assert await cluster.until(lambda: cluster.hosts(ORDERS) == [1], 10.0) < 6.0


@simulated
async def test_a_topic_that_a_lost_broker_does_not_have_any_more_is_not_given_away_again() -> None:
    """As a leader would whose first write was done without an answer: by now a living broker has claimed the topic."""
    cluster, a, b, c = await three()
    [topic] = await cluster.create_on(a, "/default/orders")
    leader = next(node for node in (a, b, c) if node.cluster.leader == node.cluster.broker)
    await cluster.until(lambda: leader.cluster.host_of(topic) == a.broker, 5.0)
    manager = leader.cluster._load_manager
    assert await ask(leader, manager._abandon_some(b.broker, [topic]))
    assert await cluster.metadata.get(keys.unassigned(topic)) is None
    assert cluster.hosts(topic) == [a.broker]
