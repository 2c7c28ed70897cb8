"""The metadata store does not fill up: the leader compacts it, every broker looks at its size and says so."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest

from pydanube.cluster.upkeep import Upkeep
from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.names import TopicName
from pydanube.errors import Unreachable
from pydanube.ports import Put, Usage
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.telemetry import ClusterMetrics
from pydanube.testing.cluster import Cluster
from pydanube.testing.loop import SimClock
from tests.harness.member_cluster import MemberCluster, simulated


class Counting(MemoryMetadataStore):
    def __init__(self, clock: SimClock) -> None:
        super().__init__(clock)
        self.compacted: list[tuple[float, int, int]] = []  # when, to which revision, and which there was
        self.size_bytes, self.quota_bytes = 0, 0
        self.away = False

    async def compact(self, revision: int) -> None:
        self.compacted.append((self._clock.elapsed(), revision, self._revision))
        await super().compact(revision)

    async def usage(self) -> Usage:
        if self.away:
            raise Unreachable("metadata", "it is away")
        return Usage(self._revision, self.size_bytes, self.quota_bytes)


def cluster_on(store: Counting) -> MemberCluster:
    cluster = MemberCluster()
    cluster.metadata = store  # type: ignore[assignment]
    return cluster


@simulated
async def test_one_broker_compacts_every_five_minutes_and_leaves_five_minutes_of_history() -> None:
    store = Counting(SimClock())
    cluster = cluster_on(store)
    await cluster.boot(1, 2, 3)
    began = cluster.clock.elapsed()
    revisions: dict[int, int] = {}
    for second in range(1800):
        revisions[second] = await store.transact([], [Put("/x", b"")]) or 0
        await asyncio.sleep(1.0)
    times = [round((at - began) / 60) for at, _, _ in store.compacted]
    assert times == [5, 10, 15, 20, 25, 30]
    for at, revision, now in store.compacted:
        second = round(at - began)
        assert revisions[max(second - 365, 0)] - 20 <= revision <= revisions[second - 299], "about five minutes before"
        assert revision < now


@simulated
async def test_a_leader_that_dies_is_followed_by_one_that_compacts_on() -> None:
    store = Counting(SimClock())
    cluster = cluster_on(store)
    await cluster.boot(1, 2, 3)
    await asyncio.sleep(640.0)
    before = len(store.compacted)
    cluster.leaders[0].kill()
    await asyncio.sleep(360.0)
    assert before == 2 and len(store.compacted) > before


@simulated
async def test_where_others_use_the_store_nothing_is_compacted() -> None:
    """meta_store.compaction: off."""
    for chosen, times in (("off", 0), ("auto", 1)):
        cluster = Cluster()
        cluster.metadata = store = Counting(cluster.clock)
        cluster.config = replace(cluster.config, cluster=replace(cluster.config.cluster, compaction=chosen))
        await cluster.start(1)
        await asyncio.sleep(400.0)
        assert len(store.compacted) == times


@simulated
async def test_a_view_that_a_compaction_overtakes_is_made_anew() -> None:
    clock = SimClock()
    store = MemoryMetadataStore(clock)
    view = View(store, clock, ttl_seconds=32.0, relist_seconds=1e9)
    watching = store.watch(keys.CLUSTER, 0)
    running = asyncio.create_task(view.run())
    await asyncio.sleep(1.0)
    follow = view._follow

    async def late(after: int) -> None:
        """The store forgets what happened between the list and the watch."""
        view._follow = follow  # type: ignore[method-assign]
        for number in range(10):
            topic = TopicName(f"/default/t{number}")
            await store.transact([], [Put(keys.unassigned(topic), b"null")])
        await store.compact(10)
        await follow(after)

    view._follow = late  # type: ignore[method-assign]
    running.cancel()
    running = asyncio.create_task(view.run())
    await asyncio.sleep(5.0)
    assert len(view.markers) == 10
    with pytest.raises(Unreachable, match="no longer kept"):
        await anext(watching)
    running.cancel()


@simulated
async def test_a_store_that_is_half_full_is_warned_of_at_the_start_and_once_when_it_becomes_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    [node] = await MemberCluster().boot(1)
    store = Counting(SimClock())
    store.quota_bytes = 2_000
    metrics = ClusterMetrics()
    upkeep = Upkeep(store, SimClock(), node.cluster.leadership, metrics, compacts=False)
    with caplog.at_level(logging.WARNING):
        store.size_bytes = 1_100
        task = asyncio.create_task(upkeep.run())
        for size, expected in ((1_100, 1), (1_200, 1), (900, 1), (1_001, 2), (1_002, 2)):
            store.size_bytes = size
            await asyncio.sleep(60.5)
            assert len([each for each in caplog.records if "half of its quota" in each.message]) == expected
            assert (metrics.metadata_size_bytes, metrics.metadata_quota_bytes) == (size, 2_000)
        store.away = True
        await asyncio.sleep(200.0)
        store.away = False
        store.size_bytes = 5
        await asyncio.sleep(61.0)
        assert metrics.metadata_size_bytes == 5, "it goes on after the store was away"
        task.cancel()


@simulated
async def test_a_store_that_does_not_say_how_large_it_may_become_is_not_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = Counting(SimClock())
    store.size_bytes = 10**12
    with caplog.at_level(logging.WARNING):
        await cluster_on(store).boot(1, 2)
        await asyncio.sleep(200.0)
    assert [record for record in caplog.records if "quota" in record.message] == []
