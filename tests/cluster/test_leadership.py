"""One leader at a time, and what a leader that was replaced can still do: nothing."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.core import keys
from pydanube.core.names import BrokerId
from pydanube.ports import Put
from tests.harness.member_cluster import ORDERS, TTL, MemberCluster, now, simulated


async def leader(cluster: MemberCluster) -> str | None:
    item = await cluster.metadata.get(keys.LEADER)
    return item.value.decode() if item else None


@simulated
async def test_one_of_the_brokers_leads_and_all_know_who() -> None:
    cluster = MemberCluster()
    nodes = await cluster.boot(1, 2, 3)
    await asyncio.sleep(1.0)
    assert len(cluster.leaders) == 1
    assert await leader(cluster) == str(cluster.leaders[0].broker)
    assert {node.cluster.leader for node in nodes} == {cluster.leaders[0].broker}


@simulated
async def test_when_the_leader_dies_another_leads_when_its_lease_has_run_out() -> None:
    cluster = MemberCluster()
    await cluster.boot(1, 2, 3)
    await asyncio.sleep(1.0)
    old = cluster.leaders[0]
    old.kill()
    took = await cluster.until(lambda: len(cluster.leaders) == 1, TTL + 1.0)
    assert took > TTL / 2
    assert cluster.leaders[0].broker != old.broker


@simulated
async def test_a_leader_that_stops_in_order_is_replaced_at_once() -> None:
    cluster = MemberCluster()
    await cluster.boot(1, 2, 3)
    await asyncio.sleep(1.0)
    await cluster.leaders[0].stop()
    assert await cluster.until(lambda: len(cluster.leaders) == 1, 3.0) < 0.5


@simulated
async def test_a_leader_that_restarts_quickly_does_not_leave_the_cluster_without_one_for_a_ttl() -> None:
    cluster = MemberCluster()
    await cluster.boot(1, 2, 3)
    await asyncio.sleep(1.0)
    old = cluster.leaders[0]
    old.kill()
    await asyncio.sleep(2.0)
    await cluster.boot(old.broker)
    assert await cluster.until(lambda: len(cluster.leaders) == 1, 3.0) < 3.0


@simulated
async def test_a_leader_that_was_cut_off_steps_down_before_another_can_be_elected() -> None:
    cluster = MemberCluster()
    await cluster.boot(1, 2, 3)
    await asyncio.sleep(1.0)
    old = cluster.leaders[0]
    old.metadata.cut = True
    until = now() + 3 * TTL
    terms = set()
    while now() < until:
        assert len(cluster.leaders) <= 1
        terms |= {node.broker for node in cluster.leaders}
        await asyncio.sleep(0.05)
    assert len(terms) == 2
    old.metadata.cut = False
    await asyncio.sleep(TTL)
    assert len(cluster.leaders) == 1 and cluster.leaders[0] is not old


@simulated
async def test_a_leader_that_was_paused_writes_nothing_when_it_wakes_up() -> None:
    """The pause falls into the middle of its work; what it had decided is refused."""
    cluster = MemberCluster()
    await cluster.boot(1, 2, 3)
    await asyncio.sleep(1.0)
    old = cluster.leaders[0]
    old.metadata.delay_max_seconds = 1.0
    await cluster.create(ORDERS)
    await asyncio.sleep(0.2)
    old.pause()
    await cluster.until(lambda: any(node is not old for node in cluster.leaders), 2 * TTL)
    await asyncio.sleep(1.0)
    item = await cluster.metadata.get(keys.LEADER)
    assert item is not None
    before = len(cluster.leader_writes)
    old.resume()
    await asyncio.sleep(5.0)
    assert all(revision == item.revision for _, revision in cluster.leader_writes[before:])
    assert len(cluster.hosts(ORDERS)) == 1


@simulated
async def test_all_writes_of_leaders_come_in_terms_that_do_not_overlap() -> None:
    cluster = MemberCluster()
    await cluster.boot(1, 2, 3)
    for number in range(12):
        await cluster.create(f"/default/t{number}")
        await asyncio.sleep(5.0)
        if number % 4 == 3:
            old = cluster.leaders[0]
            old.pause()
            await asyncio.sleep(1.3 * TTL)
            old.resume()
    revisions = [revision for _, revision in cluster.leader_writes]
    assert revisions == sorted(revisions) and len(set(revisions)) >= 3


@pytest.mark.parametrize("reason", ["join"])
@simulated
async def test_drained_brokers_may_lead_so_that_there_is_always_somebody(reason: str) -> None:
    cluster = MemberCluster()
    [a] = await cluster.boot(1, join=True)
    await asyncio.sleep(1.0)
    assert cluster.leaders == [a]
    await cluster.create(ORDERS)
    await asyncio.sleep(5.0)
    assert cluster.hosts(ORDERS) == [] and await cluster.marker(ORDERS) is not None
    await a.process.call(a.cluster.requests.activate(BrokerId(1)))
    await asyncio.sleep(1.0)
    assert cluster.hosts(ORDERS) == [1]


@simulated
async def test_a_foreign_value_under_the_leader_key_is_left_alone() -> None:
    cluster = MemberCluster()
    await cluster.metadata.transact([], [Put(keys.LEADER, b'"somebody"')])
    await cluster.boot(1, 2)
    await asyncio.sleep(100.0)
    assert cluster.leaders == [] and await leader(cluster) == '"somebody"'


@simulated
async def test_elections_work_when_no_watch_event_ever_arrives() -> None:
    cluster = MemberCluster()
    cluster.stores = lambda store: setattr(store, "drop_every", 1)
    await cluster.boot(1, 2, 3)
    await asyncio.sleep(5.0)
    assert len(cluster.leaders) == 1
    cluster.leaders[0].kill()
    assert await cluster.until(lambda: len(cluster.leaders) == 1, TTL + 3.0) <= TTL + 3.0
