"""Whole brokers that are away for longer than their lease, with nobody who looks after them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from pydanube.core import keys
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import TopicName
from pydanube.testing.cluster import TTL, Cluster, Node
from pydanube.testing.history import History
from tests.harness.brokers import numbers, simulated
from tests.sim.test_cluster_faults import send
from tools.sim import cluster_faults
from tools.sim.cluster_faults import Breaking

SELDOM = TierConfig(upload_seconds=3600.0)


async def server_cluster(count: int, *, rejoin: str = "drained") -> Cluster:
    cluster = Cluster(ttl_seconds=TTL, tier=SELDOM)
    cluster.config = replace(cluster.config, cluster=replace(cluster.config.cluster, rejoin=rejoin))
    return await cluster.start(count)


def breaking(cluster: Cluster, topics: Sequence[TopicName]) -> Breaking:
    return Breaking(cluster, History(), topics, lambda what: None)


async def state(cluster: Cluster, node: Node) -> tuple[str, str]:
    value = await cluster.value(keys.broker_state(node.broker_id))
    return value["mode"], value["reason"]


async def states(cluster: Cluster) -> list[tuple[str, str]]:
    return [await state(cluster, node) for node in cluster.nodes]


@simulated
async def test_three_reboots_longer_than_the_lease_end_with_every_topic_served_and_nothing_left_on_one_disk() -> None:
    cluster = await server_cluster(3)
    topics = [await cluster.create(f"/default/t{number}", on=number % 3 + 1) for number in range(4)]
    for topic in topics:
        await send(cluster, topic, *numbers(3))
    await breaking(cluster, topics).rolling_reboot(cluster.node(1), Random(1))
    for topic in topics:
        await cluster.served(topic, 60)
        await send(cluster, topic, "after")
    assert ("active", "no_active_broker") in await states(cluster)
    # What lay on a disk alone, and was an orphan, is home.
    await cluster.until(
        lambda: not any(getattr(cluster.host(topic).topic(topic), "orphans", ()) for topic in topics), 120
    )  # type: ignore[union-attr]


@simulated
async def test_two_that_were_away_serve_when_the_last_active_broker_is_killed() -> None:
    cluster = await server_cluster(3)
    topics = [await cluster.create(f"/default/t{number}", on=number % 3 + 1) for number in range(4)]
    for topic in topics:
        await send(cluster, topic, *numbers(3))
    task = asyncio.create_task(breaking(cluster, topics).last_active(cluster.node(3), Random(1)))
    await cluster.until(lambda: not cluster.node(1).alive, 5)
    await cluster.until(
        lambda: cluster.node(3).boots == 1 and cluster.node(2).broker is not None and cluster.node(2).alive, 120
    )
    await cluster.until(lambda: not cluster.node(3).alive, 60)
    for topic in topics:
        await cluster.served(topic, 3 * TTL)
        await send(cluster, topic, "after")
    await asyncio.sleep(TTL / 4)
    assert [await state(cluster, cluster.node(number)) for number in (1, 2)] == [("active", "no_active_broker")] * 2
    await task
    # It comes back while others serve: somebody should look first.
    assert await state(cluster, cluster.node(3)) == ("drained", "stale_restart")


@pytest.mark.parametrize("rejoin", ["drained", "active"])
def test_a_broker_that_is_cut_off_for_longer_than_its_lease_comes_back_as_it_was_told_to(rejoin: str) -> None:
    @simulated
    async def history() -> None:
        cluster = await server_cluster(3, rejoin=rejoin)
        topic = await cluster.create("/default/orders", on=1)
        await send(cluster, topic, *numbers(3))
        await breaking(cluster, [topic]).cut_off(cluster.node(1), Random(2))
        await cluster.until(lambda: cluster.host(topic) not in (None, cluster.node(1)), 60)
        await asyncio.sleep(60)
        found = await cluster.served(topic)
        assert not found.orphans, "what only its disk had was brought"
        expected = ("active", "rejoined") if rejoin == "active" else ("drained", "registration_expired")
        assert await state(cluster, cluster.node(1)) == expected

    history()


@simulated
async def test_a_broker_takes_no_topics_before_what_only_its_disk_had_is_in_the_store() -> None:
    cluster = await server_cluster(2, rejoin="active")
    topic = await cluster.create("/default/orders", on=1)
    await send(cluster, topic, *numbers(5))
    cluster.node(1).kill()
    await asyncio.sleep(2 * TTL)
    assert cluster.host(topic) is cluster.node(2)
    await cluster.node(1).boot()
    cluster.node(1).objects.away = True
    await asyncio.sleep(2 * TTL)
    assert await state(cluster, cluster.node(1)) == ("drained", "stale_restart")
    assert (await cluster.served(topic)).orphans
    cluster.node(1).objects.away = False
    await asyncio.sleep(30)
    assert await state(cluster, cluster.node(1)) == ("active", "rejoined")
    assert not (await cluster.served(topic)).orphans


def test_some_seeds_have_brokers_that_nobody_looks_after_and_the_others_are_the_runs_that_they_were() -> None:
    schedules = [cluster_faults.plan(seed, nodes=3, first=12.0, end=202.0) for seed in range(300)]
    kinds = [each.kind for schedule in schedules for each in schedule]
    for kind in cluster_faults.RETURNS:
        assert 3 <= kinds.count(kind) <= 40
    for schedule in schedules:
        assert sum(each.kind in cluster_faults.RETURNS for each in schedule) <= 1
        assert [each.number for each in schedule] == list(range(len(schedule)))
        assert [each.at for each in schedule] == sorted(each.at for each in schedule)
