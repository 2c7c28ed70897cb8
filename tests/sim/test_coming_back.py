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


async def town_of(count: int, *, rejoin: str = "drained") -> Cluster:
    town = Cluster(ttl_seconds=TTL, tier=SELDOM)
    town.config = replace(town.config, cluster=replace(town.config.cluster, rejoin=rejoin))
    return await town.start(count)


def breaking(town: Cluster, topics: Sequence[TopicName]) -> Breaking:
    return Breaking(town, History(), topics, lambda what: None)


async def state(town: Cluster, node: Node) -> tuple[str, str]:
    value = await town.value(keys.broker_state(node.broker_id))
    return value["mode"], value["reason"]


async def states(town: Cluster) -> list[tuple[str, str]]:
    return [await state(town, node) for node in town.nodes]


@simulated
async def test_three_reboots_longer_than_the_lease_end_with_every_topic_served_and_nothing_left_on_one_disk() -> None:
    town = await town_of(3)
    topics = [await town.create(f"/default/t{number}", on=number % 3 + 1) for number in range(4)]
    for topic in topics:
        await send(town, topic, *numbers(3))
    await breaking(town, topics).rolling_reboot(town.node(1), Random(1))
    for topic in topics:
        await town.served(topic, 60)
        await send(town, topic, "after")
    assert ("active", "no_active_broker") in await states(town)
    # What lay on a disk alone, and was an orphan, is home.
    await town.until(lambda: not any(getattr(town.host(topic).topic(topic), "orphans", ()) for topic in topics), 120)  # type: ignore[union-attr]


@simulated
async def test_two_that_were_away_serve_when_the_last_active_broker_is_killed() -> None:
    town = await town_of(3)
    topics = [await town.create(f"/default/t{number}", on=number % 3 + 1) for number in range(4)]
    for topic in topics:
        await send(town, topic, *numbers(3))
    task = asyncio.create_task(breaking(town, topics).last_active(town.node(3), Random(1)))
    await town.until(lambda: not town.node(1).alive, 5)
    await town.until(lambda: town.node(3).boots == 1 and town.node(2).broker is not None and town.node(2).alive, 120)
    await town.until(lambda: not town.node(3).alive, 60)
    for topic in topics:
        await town.served(topic, 3 * TTL)
        await send(town, topic, "after")
    await asyncio.sleep(TTL / 4)
    assert [await state(town, town.node(number)) for number in (1, 2)] == [("active", "no_active_broker")] * 2
    await task
    # It comes back while others serve: somebody should look first.
    assert await state(town, town.node(3)) == ("drained", "stale_restart")


@pytest.mark.parametrize("rejoin", ["drained", "active"])
def test_a_broker_that_is_cut_off_for_longer_than_its_lease_comes_back_as_it_was_told_to(rejoin: str) -> None:
    @simulated
    async def history() -> None:
        town = await town_of(3, rejoin=rejoin)
        topic = await town.create("/default/orders", on=1)
        await send(town, topic, *numbers(3))
        await breaking(town, [topic]).cut_off(town.node(1), Random(2))
        await town.until(lambda: town.host(topic) not in (None, town.node(1)), 60)
        await asyncio.sleep(60)
        found = await town.served(topic)
        assert not found.orphans, "what only its disk had was brought"
        expected = ("active", "rejoined") if rejoin == "active" else ("drained", "registration_expired")
        assert await state(town, town.node(1)) == expected

    history()


@simulated
async def test_a_broker_takes_no_topics_before_what_only_its_disk_had_is_in_the_store() -> None:
    town = await town_of(2, rejoin="active")
    topic = await town.create("/default/orders", on=1)
    await send(town, topic, *numbers(5))
    town.node(1).kill()
    await asyncio.sleep(2 * TTL)
    assert town.host(topic) is town.node(2)
    await town.node(1).boot()
    town.node(1).objects.away = True
    await asyncio.sleep(2 * TTL)
    assert await state(town, town.node(1)) == ("drained", "stale_restart")
    assert (await town.served(topic)).orphans
    town.node(1).objects.away = False
    await asyncio.sleep(30)
    assert await state(town, town.node(1)) == ("active", "rejoined")
    assert not (await town.served(topic)).orphans


def test_some_seeds_have_brokers_that_nobody_looks_after_and_the_others_are_the_runs_that_they_were() -> None:
    schedules = [cluster_faults.plan(seed, nodes=3, first=12.0, end=202.0) for seed in range(300)]
    kinds = [each.kind for schedule in schedules for each in schedule]
    for kind in cluster_faults.RETURNS:
        assert 3 <= kinds.count(kind) <= 40
    for schedule in schedules:
        assert sum(each.kind in cluster_faults.RETURNS for each in schedule) <= 1
        assert [each.number for each in schedule] == list(range(len(schedule)))
        assert [each.at for each in schedule] == sorted(each.at for each in schedule)
