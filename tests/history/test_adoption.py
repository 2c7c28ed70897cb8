"""Adoption beside readers, and what the owner's own disk has of an orphan before that."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from pydanube.core import keys
from pydanube.core.history.tiers import Retention, TierConfig
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.history.change import HistoryChange
from pydanube.history.rescue import Rescuer
from pydanube.history.tier_state import all_descriptors, read_state
from pydanube.ports import Compare, Delete, Put, Revision
from pydanube.testing.cluster import Cluster
from tests.cluster.test_moving import orphans
from tests.cluster.test_moving import send as send_one
from tests.harness.brokers import consume, simulated
from tests.harness.tiers import carried
from tests.history.test_leftovers import begun, boot_active, flush_to_segments, lose, not_yet, send, texts, verified

LISTING = TierConfig(
    upload_seconds=1.0,
    object_bytes=256 * 1024,
    merged_bytes=1024,
    merge_count_min=100,
    descriptors_max=1,
    descriptors_moved=1,
    garbage_seconds=600.0,
    local=Retention(seconds=0.0),
    retention_check_seconds=300.0,
    sweep_seconds=3600.0,
)


@simulated
async def test_an_adoption_during_which_somebody_reads_the_manifest_forgets_nothing_that_is_in_it() -> None:
    cluster = await Cluster(tier=LISTING, segment_bytes=4096).start(3)
    topic = await cluster.create("/default/orders", on=1)
    told = []
    for number in range(6):
        told.append((await send_one(cluster, topic, f"{number}:" + "x" * 3000))[0])
        await asyncio.sleep(3)
    cluster.node(1).objects.away = True
    told.append((await send_one(cluster, topic, "lost"))[0])
    cluster.node(1).kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    assert await orphans(cluster, topic) == 1
    told.append((await send_one(cluster, topic, "after"))[0])
    await asyncio.sleep(32)
    owner, found = cluster.host(topic), await cluster.served(topic)
    assert owner is not None
    tier = carried(found).tier

    async def give_up_a_change() -> None:
        """As a move that was called off does: the next step reads anew, all but the manifest."""
        async with carried(found).working:
            fencing = asyncio.ensure_future(tier.fence())
            await cluster.until(lambda: tier._is_stale or fencing.done())
            fencing.cancel()
            await asyncio.gather(fencing, return_exceptions=True)

    owner.metadata.delay_max_seconds = 0.5
    await owner.call(give_up_a_change())
    owner.metadata.delay_max_seconds = 0.0
    really_apply, really_write = tier.apply, tier._write
    reading: list[asyncio.Future[Any]] = []

    async def slow(compares: Sequence[Compare], operations: Sequence[Put | Delete], /) -> Revision | None:
        await asyncio.sleep(0.2)
        return await really_write(compares, operations)

    async def apply(change: HistoryChange) -> list[str]:
        if any(each.key.startswith(keys.orphans(topic)) for each in change.others):
            reading.append(asyncio.ensure_future(found.rows(0, 1)))
            tier._write = slow
        try:
            return await really_apply(change)
        finally:
            tier._write = really_write

    tier.apply = apply  # type: ignore[method-assign]
    await cluster.node(1).boot()
    await cluster.until(lambda: bool(reading), 60)
    await asyncio.sleep(1)
    tier.apply = really_apply  # type: ignore[method-assign]
    described = await all_descriptors(cluster.objects, await read_state(cluster.metadata, topic))
    assert [each.object_id for each in tier.objects] == [each.object_id for each in described]
    stream = await consume(found, "late", Kind.EXCLUSIVE, start=0, acks=True)
    await asyncio.sleep(10)
    assert sorted(stream.offsets) == sorted(told)


@simulated
async def test_what_the_owners_own_disk_has_of_an_orphan_is_not_seen_before_it_is_adopted() -> None:
    """Some of it was sent again since."""
    cluster, topic, session = await begun()
    await send(cluster, topic, session, range(3))
    node = await lose(cluster, topic)
    await send(cluster, topic, session, range(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rescuer, "_bring_all", not_yet)
        await boot_active(node)
        await flush_to_segments(cluster, topic, 1)
        assert await texts(cluster, topic) == ["0", "1", "2", "3"]
    await asyncio.sleep(30)
    assert await texts(cluster, topic) == ["0", "1", "2", "3"]


@simulated
async def test_an_orphan_that_is_discarded_where_its_files_are_never_comes_back() -> None:
    cluster, topic, session = await begun()
    await send(cluster, topic, session, range(3))
    node = await lose(cluster, topic)
    await send(cluster, topic, session, [3])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rescuer, "_bring_all", not_yet)
        await boot_active(node)
        await flush_to_segments(cluster, topic, 1)
        found = await cluster.served(topic)
        await cluster.node(1).call(found.discard_orphan(0))
        assert await texts(cluster, topic) == ["3"]
    await send(cluster, topic, session, [4])
    await flush_to_segments(cluster, topic, 2)
    assert await texts(cluster, topic) == ["3", "4"]
    assert await verified(cluster, topic) == []
