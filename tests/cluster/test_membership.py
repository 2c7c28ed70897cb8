"""Registration, self-fencing and coming back: the scenarios of the resilience document with their own seconds."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from pydanube.core import keys
from pydanube.core.cluster.lifecycle import BrokerMode, BrokerRegistration, BrokerState
from pydanube.core.names import BrokerId
from pydanube.errors import NodeIdInUse
from pydanube.ports import Delete, Put
from tests.harness.member_cluster import ORDERS, TTL, MemberCluster, MemberNode, now, simulated


async def registration(cluster: MemberCluster, broker: int) -> BrokerRegistration | None:
    item = await cluster.metadata.get(keys.registration(BrokerId(broker)))
    return BrokerRegistration.from_bytes(item.value) if item else None


async def crashes(cluster: MemberCluster, broker: int) -> int:
    item = await cluster.metadata.get(keys.broker_state(BrokerId(broker)))
    state = BrokerState.from_bytes(item.value) if item else None
    assert state is not None
    return state.crashes


# --- registering ----------------------------------------------------------------------------------------------


@simulated
async def test_a_registration_says_where_the_broker_is_found() -> None:
    cluster = MemberCluster()
    [node] = await cluster.boot(7)
    item = await cluster.metadata.get("/cluster/register/7")
    assert item is not None
    stored = json.loads(item.value)
    assert stored["broker_url"] == "http://b7:6650" and stored["stream_url"] == "danube://b7:6651"
    assert stored["session"] == node.cluster.session
    assert await cluster.state(7) == ("active", "boot")


@simulated
async def test_a_registration_outlives_its_ttl_many_times_by_being_renewed_every_third_of_it() -> None:
    cluster = MemberCluster()
    [node] = await cluster.boot(1)
    lease = node.cluster.membership.lease.id
    for _ in range(100):
        await asyncio.sleep(TTL / 2)
        assert node.cluster.may_serve()
    assert node.cluster.membership.lease.id == lease


@simulated
async def test_a_broker_may_serve_until_a_quarter_of_the_ttl_before_its_lease_can_end() -> None:
    cluster = MemberCluster()
    [node] = await cluster.boot(1)
    until = node.cluster.membership.lease.serve_until
    assert until == 24.0
    node.metadata.cut = True
    await asyncio.sleep(until - now() - 0.001)
    assert node.cluster.may_serve()
    await asyncio.sleep(0.002)
    assert not node.cluster.may_serve()
    assert await registration(cluster, 1) is not None  # the store would still have it


@simulated
async def test_the_time_counts_from_when_a_renewal_was_sent_not_from_when_it_was_answered() -> None:
    cluster = MemberCluster()
    [node] = await cluster.boot(1)
    node.metadata.delay_max_seconds = 4.0
    await asyncio.sleep(100.0)
    node.metadata.cut = True
    lease = node.cluster.membership.lease
    left = cluster.metadata._leases[lease.id].deadline - lease.serve_until
    assert left >= TTL / 4  # the store got it later than it was sent


# --- scenario 1 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begins", [0.0, 3.0, 6.0, 10.6, 10.7])
@simulated
async def test_scenario_1_a_glitch_of_15_seconds_heals_by_itself(begins: float) -> None:
    cluster = MemberCluster()
    *_, c = await cluster.boot(1, 2, 3)
    await cluster.create_on(c, ORDERS)
    await asyncio.sleep(begins)
    session = c.cluster.session
    c.metadata.cut = True
    await asyncio.sleep(15.0)
    c.metadata.cut = False
    await asyncio.sleep(60.0)
    assert c.cluster.session == session and c.lost_for == []
    assert cluster.hosts(ORDERS) == [3]
    assert await cluster.state(3) == ("active", "boot")
    assert len(cluster.claims) == 1


# --- scenario 2 -----------------------------------------------------------------------------------------------


@simulated
async def test_scenario_2_away_for_three_minutes_comes_back_drained(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    cluster = MemberCluster()
    *_, c = await cluster.boot(1, 2, 3)
    await cluster.create_on(c, ORDERS)
    session = c.cluster.session
    begun = now()
    c.metadata.cut = True  # T=0
    await cluster.until(lambda: cluster.hosts(ORDERS) in ([1], [2]), TTL + 1.0)  # T=33: others have its topics
    assert ORDERS in c.owned and ORDERS not in c.serving  # it knows nothing, and serves nothing
    await asyncio.sleep(begun + 180.0 - now())
    c.metadata.cut = False  # T=180
    await asyncio.sleep(10.0)
    assert await cluster.state(3) == ("drained", "registration_expired")
    assert c.lost_for == ["registration_expired"] and c.owned == {}
    assert c.cluster.session != session and c.process.alive
    assert c.cluster.may_serve()
    messages = [record.getMessage() for record in caplog.records]
    for line in (
        "Failed to renew broker registration",
        "Registration likely expired (failures > TTL). Will register as drained on recovery",
        "broker no longer alive",
        "Registration recovered after expiry. Setting broker to drained.",
        "Broker registration expired. Registered as drained. Use `danube-admin brokers activate` to resume.",
    ):
        assert any(message.startswith(line) for message in messages), line


@simulated
async def test_a_broker_that_was_lost_twice_is_drained_twice() -> None:
    cluster = MemberCluster()
    a, _, c = await cluster.boot(1, 2, 3)
    for _ in range(2):
        c.metadata.cut = True
        await asyncio.sleep(2 * TTL)
        c.metadata.cut = False
        await asyncio.sleep(10.0)
        assert await cluster.state(3) == ("drained", "registration_expired")
        await a.process.call(a.cluster.requests.activate(BrokerId(3)))
        assert await cluster.state(3) == ("active", "admin_activate")
    assert c.lost_for == ["registration_expired"] * 2


# --- scenarios 3a and 3b --------------------------------------------------------------------------------------


@simulated
async def test_scenario_3a_restarted_in_5_seconds_has_its_topics_at_once() -> None:
    cluster = MemberCluster()
    *_, c = await cluster.boot(1, 2, 3)
    await cluster.create_on(c, ORDERS)
    c.kill()
    await asyncio.sleep(5.0)
    begun = now()
    [c] = await cluster.boot(3)
    assert now() - begun < 0.1
    assert cluster.hosts(ORDERS) == [3]
    assert await cluster.state(3) == ("active", "fast_restart")
    await asyncio.sleep(2 * TTL)  # the dead process's lease has run out and took nothing with it
    assert cluster.hosts(ORDERS) == [3]
    assert [broker for _, broker in cluster.claims] == [3, 3]


@simulated
async def test_scenario_3b_restarted_after_5_minutes_is_drained_and_has_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    cluster = MemberCluster()
    a, _, c = await cluster.boot(1, 2, 3)
    await cluster.create_on(c, ORDERS)
    c.kill()
    await asyncio.sleep(300.0)
    assert cluster.hosts(ORDERS) in ([1], [2])
    [c] = await cluster.boot(3)
    assert c.owned == {}
    assert await cluster.state(3) == ("drained", "stale_restart")
    assert any(
        record.getMessage().startswith("Broker registration was expired (unavailable > TTL). Registered as drained.")
        for record in caplog.records
    )
    await cluster.create("/default/new1", "/default/new2", "/default/new3")
    await asyncio.sleep(5.0)
    assert c.owned == {}
    await a.process.call(a.cluster.requests.activate(BrokerId(3)))
    await cluster.create("/default/new4")
    await asyncio.sleep(5.0)
    assert list(c.owned) == ["/default/new4"]


# --- scenario 4 -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
@pytest.mark.parametrize("down", [1.0, 40.0, 3600.0])
@simulated
async def test_scenario_4_after_a_restart_of_everything_each_has_its_own_topics_back(
    order: tuple[int, int, int], down: float, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    cluster = MemberCluster()
    before = {}
    for node in await cluster.boot(1, 2, 3):
        [topic] = await cluster.create_on(node, f"/default/of{node.broker}")
        before[topic] = node.broker
    await asyncio.sleep(100.0)
    for node in list(cluster.nodes):
        node.kill()
    await asyncio.sleep(down)
    for broker in order:
        await cluster.boot(broker)
        await asyncio.sleep(9.0)
    await asyncio.sleep(2 * TTL)
    reason = "fast_restart" if down == 1.0 else "full_cluster_restart"
    for broker in order:
        mode, found = await cluster.state(broker) or ("", "")
        assert mode == "active" and found in (reason, "full_cluster_restart")
    assert {topic: cluster.sole_host(topic).broker for topic in before} == before
    assert len(cluster.claims) == 6
    said = any(record.getMessage().startswith("Full cluster restart detected") for record in caplog.records)
    assert said == (down > TTL)


@simulated
async def test_one_that_does_not_return_with_the_others_is_waited_for_one_ttl() -> None:
    cluster = MemberCluster()
    a, b, c = await cluster.boot(1, 2, 3)
    await cluster.create_on(c, ORDERS)
    for node in (a, b, c):
        node.kill()
    await asyncio.sleep(100.0)
    begun = now()
    await cluster.boot(1, 2)
    await cluster.until(lambda: cluster.hosts(ORDERS) != [], 2 * TTL)
    assert TTL <= now() - begun < TTL + 1.0
    [c] = await cluster.boot(3)
    assert await cluster.state(3) == ("drained", "stale_restart")


# --- the majority -------------------------------------------------------------------------------------------------


async def three_without_a_store() -> tuple[MemberCluster, list[MemberNode]]:
    """Each with a topic of its own, and all cut off now."""
    cluster = MemberCluster()
    nodes = await cluster.boot(1, 2, 3)
    for node in nodes:
        await cluster.create_on(node, f"/default/of{node.broker}")
    for node in nodes:
        node.metadata.cut = True
    return cluster, nodes


@pytest.mark.parametrize("hours", [0.02, 1, 4])
@simulated
async def test_when_the_store_was_away_for_everybody_all_go_on_where_they_were(hours: float) -> None:
    cluster, nodes = await three_without_a_store()
    await asyncio.sleep(3600 * hours)
    assert all(node.serving == set() for node in nodes)
    for node in nodes:
        node.metadata.cut = False
    await asyncio.sleep(10.0)
    for node in nodes:
        assert node.serving == {f"/default/of{node.broker}"}
        assert node.lost_for == []
        assert await cluster.state(node.broker) == ("active", "boot")
    assert len(cluster.claims) == 3
    await asyncio.sleep(3 * TTL)
    assert len(cluster.claims) == 3 and len(cluster.leaders) == 1


@pytest.mark.parametrize("late", [1, 2, 3])
@simulated
async def test_who_comes_back_a_little_later_than_the_others_has_lost_nothing_either(late: int) -> None:
    """Every lease ran out while the store was away: whoever leads then saw nobody die."""
    cluster, nodes = await three_without_a_store()
    await asyncio.sleep(3 * TTL)
    for node in nodes:
        node.metadata.cut = node.broker == late
    await asyncio.sleep(TTL / 2)
    assert len(cluster.leaders) == 1
    nodes[late - 1].metadata.cut = False
    await asyncio.sleep(10.0)
    for node in nodes:
        assert node.serving == {f"/default/of{node.broker}"}
        assert await cluster.state(node.broker) == ("active", "boot")
    assert len(cluster.claims) == 3


@simulated
async def test_who_does_not_come_back_when_the_store_does_is_declared_lost_a_lease_later() -> None:
    cluster = MemberCluster()
    nodes = await cluster.boot(1, 2, 3)
    await cluster.create_on(nodes[0], ORDERS)
    for node in nodes:
        node.metadata.cut = True
    await asyncio.sleep(3 * TTL)
    nodes[0].kill()
    for node in nodes[1:]:
        node.metadata.cut = False
    took = await cluster.until(lambda: cluster.hosts(ORDERS) != [1] and bool(cluster.hosts(ORDERS)), 3 * TTL)
    assert TTL <= took < TTL + 10.0


@simulated
async def test_a_store_that_is_slow_or_loses_every_third_answer_drains_nobody() -> None:
    cluster = MemberCluster(seed=1)  # one life in sixty loses five answers in a row, and then a lease
    nodes = await cluster.boot(1, 2, 3)
    await cluster.create_on(nodes[0], ORDERS)
    for node in nodes:
        node.metadata.delay_max_seconds = 3.0
        node.metadata.answers_lost = 0.3
    await asyncio.sleep(2000.0)
    assert cluster.hosts(ORDERS) == [1]
    for node in nodes:
        assert await cluster.state(node.broker) == ("active", "boot")


# --- pauses ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("begins", [0.0, 5.0, 10.6, 10.7])
@simulated
async def test_a_loop_that_stands_still_for_six_tenths_of_the_ttl_costs_nothing_but_that_time(begins: float) -> None:
    """A renewal is due every third: however it falls, the store still has the lease when the loop goes on."""
    cluster = MemberCluster()
    *_, c = await cluster.boot(1, 2, 3)
    await cluster.create_on(c, ORDERS)
    session, lease = c.cluster.session, c.cluster.membership.lease.id
    await asyncio.sleep(begins)
    last = c.cluster.membership.lease.serve_until - 0.75 * TTL
    c.pause()
    await asyncio.sleep(0.6 * TTL)
    c.resume()
    assert c.cluster.may_serve() == (now() - last < 0.75 * TTL), "by the clock, before anything of it ran"
    await asyncio.sleep(1.0)
    assert c.cluster.may_serve() and (c.cluster.session, c.cluster.membership.lease.id) == (session, lease)
    await asyncio.sleep(2 * TTL)
    assert c.lost_for == [] and cluster.hosts(ORDERS) == [3] and len(cluster.claims) == 1


@simulated
async def test_a_process_stopped_for_longer_than_its_ttl_wakes_up_fenced_and_ends_drained() -> None:
    cluster = MemberCluster()
    *_, c = await cluster.boot(1, 2, 3)
    await cluster.create_on(c, ORDERS)
    c.pause()
    await asyncio.sleep(2 * TTL)
    assert cluster.hosts(ORDERS) in ([1], [2])
    c.resume()
    assert not c.cluster.may_serve()  # before anything of it ran
    await asyncio.sleep(5.0)
    assert c.lost_for == ["registration_expired"]
    assert await cluster.state(3) == ("drained", "registration_expired")
    assert len(cluster.hosts(ORDERS)) == 1


@simulated
async def test_a_date_that_jumps_changes_nothing() -> None:
    cluster = MemberCluster()
    _, b = await cluster.boot(1, 2)
    await cluster.create_on(b, ORDERS)
    for seconds in (86_400.0, -7 * 86_400.0):
        cluster.clock.jump(seconds)
        await asyncio.sleep(3 * TTL)
        assert cluster.hosts(ORDERS) == [2] and len(cluster.claims) == 1


# --- ends -----------------------------------------------------------------------------------------------------


@simulated
async def test_a_broker_that_stops_in_order_gives_its_topics_away_at_once_and_may_come_back_active() -> None:
    cluster = MemberCluster()
    *_, c = await cluster.boot(1, 2, 3)
    topics = await cluster.create_on(c, *(f"/default/t{number}" for number in range(20)))
    await asyncio.sleep(1.0)
    await c.stop()  # some two seconds
    took = await cluster.until(lambda: all(cluster.hosts(topic) for topic in topics), 1.0)
    assert took < 0.5
    assert await registration(cluster, 3) is None
    # Nothing came back to it while it was stopping.
    assert [broker for topic, broker in cluster.claims].count(BrokerId(3)) == 20
    await asyncio.sleep(10.0)
    [c] = await cluster.boot(3)
    assert await cluster.state(3) == ("active", "fast_restart")


@simulated
async def test_only_starts_that_follow_no_orderly_stop_count_as_crashes() -> None:
    cluster = MemberCluster()
    *_, c = await cluster.boot(1, 2, 3)
    await c.stop()
    [c] = await cluster.boot(3)
    assert await crashes(cluster, 3) == 0
    c.kill()
    [c] = await cluster.boot(3)
    assert await crashes(cluster, 3) == 1
    await c.stop()
    await cluster.boot(3)
    assert await crashes(cluster, 3) == 1


@simulated
async def test_a_broker_that_stopped_in_order_and_stays_away_is_declared_dead_after_all() -> None:
    cluster = MemberCluster()
    *_, c = await cluster.boot(1, 2, 3)
    await asyncio.sleep(1.0)
    await c.stop()
    await asyncio.sleep(TTL + 1.0)
    [c] = await cluster.boot(3)
    assert await cluster.state(3) == ("drained", "stale_restart")


@simulated
async def test_one_broker_alone_stops_and_starts_and_has_its_topics_back() -> None:
    cluster = MemberCluster()
    [a] = await cluster.boot(1)
    await cluster.create_on(a, ORDERS)
    await asyncio.sleep(1.0)
    await a.stop()
    await asyncio.sleep(1000.0)
    await cluster.boot(1)
    await asyncio.sleep(1.0)
    assert cluster.hosts(ORDERS) == [1]


# --- copies ---------------------------------------------------------------------------------------------------


@simulated
async def test_a_copy_of_a_data_directory_is_refused_beside_the_original() -> None:
    cluster = MemberCluster()
    a, _ = await cluster.boot(1, 2)
    await cluster.create_on(a, ORDERS)
    with pytest.raises(NodeIdInUse) as refused:
        await cluster.boot_one(1, home="a copy")
    assert "http://b1:6650" in str(refused.value) and "disk of 1" in str(refused.value)
    await asyncio.sleep(2 * TTL)
    assert cluster.hosts(ORDERS) == [1] and a.lost_for == []


@simulated
async def test_a_directory_that_moved_to_another_machine_starts_once_the_old_lease_has_run_out() -> None:
    cluster = MemberCluster()
    a, _ = await cluster.boot(1, 2)
    a.kill()
    await cluster.boot_one(1, home="another machine")
    mode, reason = await cluster.state(1) or ("", "")
    assert (mode, reason) in (("active", "full_cluster_restart"), ("drained", "stale_restart"))


@simulated
async def test_a_registration_that_somebody_deletes_is_noticed_and_made_again() -> None:
    cluster = MemberCluster()
    _, _ = await cluster.boot(1, 2)
    await asyncio.sleep(1.0)
    await cluster.metadata.transact([], [Delete(keys.registration(BrokerId(2)))])
    await asyncio.sleep(TTL)
    assert await registration(cluster, 2) is not None
    # The leader saw it go, and declared it dead: whoever deletes registrations by hand drains brokers.
    assert await cluster.state(2) == ("drained", "registration_expired")


@simulated
async def test_a_process_whose_id_somebody_else_took_stops() -> None:
    cluster = MemberCluster()
    [a] = await cluster.boot(1)
    other = BrokerRegistration(
        broker_url="http://x:1", connect_url="", admin_addr="", prom_exporter="", stream_url="", session=5, home="x"
    )
    await cluster.metadata.transact([], [Put(keys.registration(BrokerId(1)), other.to_bytes())])
    assert a.cluster.ended is not None
    with pytest.raises(NodeIdInUse):
        await a.process.wait(a.cluster.ended)
    assert a.lost_for == ["replaced"] and not a.cluster.may_serve()


@simulated
async def test_joining_brokers_are_drained_until_they_are_activated() -> None:
    cluster = MemberCluster()
    [a] = await cluster.boot(1)
    [b] = await cluster.boot(2, join=True)
    assert b.cluster.mode is BrokerMode.DRAINED or await cluster.state(2) == ("drained", "join")
    await cluster.create("/default/x", "/default/y")
    await asyncio.sleep(3.0)
    assert len(a.owned) == 2 and b.owned == {}
