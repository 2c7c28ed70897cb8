"""What leaves: history that is old or too much, files whose messages are in the store, objects nobody describes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from pydanube.core import keys
from pydanube.core.history.tiers import Retention, object_name
from pydanube.core.policies import TopicPolicy
from pydanube.history.snapshots import read_snapshot
from pydanube.ports import Compare, Delete, Put
from tests.harness.brokers import (
    ORDERS,
    find_topic,
    make_topic,
    one_topic,
    simulated,
)
from tests.harness.tiers import (
    KIB,
    SMALL,
    STILL,
    Teller,
    TierFixture,
    all_uploaded,
    carried,
    check_stored,
    read_everything,
    state_of,
    tell_and_upload,
)

HOUR = 3600

pytestmark = pytest.mark.usefixtures("where")


# --- retention --------------------------------------------------------------------------------------------


@simulated
async def test_history_that_is_too_old_leaves_both_tiers_and_the_newest_stays() -> None:
    host = TierFixture(replace(SMALL, local=Retention()), policies=TopicPolicy(retention_minutes=60))
    _, orders = await one_topic(host)
    teller = Teller()
    for _ in range(3):
        await teller.tell(orders, 2)
        await asyncio.sleep(0.4 * HOUR)
    assert orders.first_offset == 2
    assert orders.log.first_offset == 2, "though nothing leaves the disk because it is old there"
    assert await read_everything(orders) == {n: text for n, text in teller.told.items() if n >= 2}
    await asyncio.sleep(2 * HOUR)
    assert (orders.first_offset, orders.head) == (6, 6)
    assert await host.object_store.names() == []
    assert await check_stored(host) == []
    await teller.tell(orders)
    assert await read_everything(orders, name="later") == {6: teller.told[6]}


@simulated
async def test_history_that_is_too_much_leaves_oldest_first() -> None:
    host = TierFixture(SMALL, policies=TopicPolicy(retention_mb=1))
    _, orders = await one_topic(host)
    teller = Teller(size=100 * KIB)
    for _ in range(15):
        await teller.tell(orders)
        await asyncio.sleep(3)
    described = await check_stored(host)
    assert 900 * KIB < sum(each.size for each in described) <= 1024 * KIB
    assert 0 < orders.first_offset == described[0].start_offset
    assert await read_everything(orders) == {n: text for n, text in teller.told.items() if n >= orders.first_offset}


@simulated
async def test_first_offset_moves_before_descriptors_go_and_they_go_before_objects() -> None:
    host = TierFixture(replace(SMALL, merged_bytes=KIB, descriptors_max=2), policies=TopicPolicy(retention_minutes=1))
    _, orders = await one_topic(host)
    seen: list[str] = []
    delete, transact = host.object_store.delete, host.metadata.transact

    async def deleting(key: str) -> None:
        if "/data-" in key:
            state, _ = await state_of(host)
            seen.append("object")
            assert key not in {f"default/orders/{each.object_id}" for each in state.keyed}
            assert state.history.first_offset >= int(key.split("-")[2]) + 1
        await delete(key)

    async def changing(compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> int | None:
        if any(isinstance(each, Delete) and "/objects/" in each.key for each in operations):
            state, _ = await state_of(host)
            if state.history.first_offset:
                seen.append("descriptor")
        return await transact(compares, operations)

    await tell_and_upload(orders, Teller(), 5)
    host.object_store.delete = deleting  # type: ignore[method-assign]
    host.metadata.transact = changing  # type: ignore[method-assign]
    await asyncio.sleep(90)
    assert seen.count("descriptor") >= 1 and seen.count("object") == 5


@simulated
async def test_a_clock_that_jumps_a_day_deletes_nothing() -> None:
    host = TierFixture(SMALL, policies=TopicPolicy(retention_minutes=60))
    _, orders = await one_topic(host)
    teller = Teller()
    await teller.tell(orders, 3)
    await asyncio.sleep(60)
    host.clock.jump(24 * HOUR)
    await asyncio.sleep(50 * 60)
    assert orders.first_offset == 0
    assert await read_everything(orders) == teller.told
    host.clock.jump(-24 * HOUR)
    await asyncio.sleep(HOUR)
    assert orders.first_offset == 3, "when the hour is really over, they go"


@simulated
async def test_a_clock_that_jumps_a_day_frees_nothing_of_the_log() -> None:
    host = TierFixture(replace(SMALL, local=Retention(seconds=HOUR)))
    _, orders = await one_topic(host)
    for _ in range(3):
        await Teller().tell(orders)
    host.clock.jump(24 * HOUR)
    await asyncio.sleep(50 * 60)
    assert orders.log.first_offset == 0
    await asyncio.sleep(20 * 60)
    assert orders.log.first_offset == 2


@simulated
async def test_messages_published_while_the_clock_was_ahead_are_kept_longer_not_shorter() -> None:
    host = TierFixture(SMALL, policies=TopicPolicy(retention_minutes=60))
    _, orders = await one_topic(host)
    host.clock.jump(24 * HOUR)
    await Teller().tell(orders)
    host.clock.jump(-24 * HOUR)
    await asyncio.sleep(2 * HOUR)
    assert orders.first_offset == 0


# --- the disk ---------------------------------------------------------------------------------------------


@simulated
async def test_only_what_is_in_the_store_leaves_the_disk() -> None:
    host = TierFixture(replace(SMALL, merged_bytes=KIB))
    _, orders = await one_topic(host)
    teller = Teller()
    await teller.tell(orders, 3)
    host.object_store.away = True
    await asyncio.sleep(60)
    assert orders.log.first_offset == 0
    host.object_store.away = False
    await asyncio.sleep(40)
    assert orders.log.first_offset == 2


@simulated
async def test_a_described_object_that_is_not_there_keeps_its_messages_on_the_disk(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = TierFixture(STILL)
    _, orders = await one_topic(host)
    teller = Teller()
    for _ in range(3):
        await teller.tell(orders)
        await asyncio.sleep(2)
    data = await host.object_store.get("default/orders/data-1-1-1.parquet")
    await host.object_store.put("default/orders/data-1-1-1.parquet", [data[:-1]])
    assert await carried(orders).maintenance.free(orders.log, 10**18) == 1
    assert "described object is not in the store" in [record.message for record in caplog.records]
    await host.object_store.put("default/orders/data-1-1-1.parquet", [data])
    assert await carried(orders).maintenance.free(orders.log, 10**18) == 2


@simulated
async def test_the_log_is_freed_across_a_gap_that_no_object_fills() -> None:
    """The end of the log was lost once, so offsets were skipped; that is no reason to keep it for ever."""
    host = TierFixture(SMALL)
    _, orders = await one_topic(host)
    teller = Teller()
    await teller.tell(orders, 2)
    await all_uploaded(orders)
    host.kill()
    await host.lose_log()
    orders = await find_topic(await host.boot())
    await teller.tell(orders, 3)
    gap = sorted(teller.told)
    assert gap[2] > 50
    await asyncio.sleep(20)
    assert orders.log.first_offset == gap[-1]
    assert await read_everything(orders) == teller.told


@simulated
async def test_a_topic_that_closes_while_its_log_is_being_freed_is_opened_whole() -> None:
    host = TierFixture(STILL)
    broker, orders = await one_topic(host)
    teller = Teller()
    await teller.tell(orders, 6)
    await asyncio.sleep(3)
    begun = asyncio.Event()
    truncate = orders.log._trimmer.truncate

    async def slowly(before: int) -> None:
        begun.set()
        await asyncio.sleep(5)
        await truncate(before)

    orders.log._trimmer.truncate = slowly  # type: ignore[method-assign]
    freeing = asyncio.ensure_future(carried(orders).maintenance.free(orders.log, 10**18))
    await begun.wait()
    freeing.cancel()
    await broker.stop()  # closing waits for what was begun
    host.kill()
    orders = await find_topic(await host.boot())
    assert orders.log.first_offset == 5
    assert await read_everything(orders) == teller.told


# --- sweeping and deleting ----------------------------------------------------------------------------------


@simulated
async def test_only_undescribed_objects_of_this_or_an_older_epoch_that_is_no_orphans_are_swept() -> None:
    host = TierFixture(replace(STILL, garbage_seconds=5.0))
    _, orders = await one_topic(host)
    await Teller().tell(orders)
    await asyncio.sleep(3)
    host.kill()
    orders = await find_topic(await host.boot())  # epoch 2
    found = carried(orders)
    found.tier.orphaned_epochs = frozenset({1})
    mine, older = object_name(7, 8, 2, attempt=1), object_name(7, 8, 1)
    strangers = {object_name(7, 8, 3), "notes.txt", "data-7-8.parquet", "manifest-9-1.json"}
    for name in {mine, older, "manifest-1-7.json", *strangers}:
        await host.object_store.put(f"default/orders/{name}", [b"x"])
    await host.object_store.put(f"default/orders-other/{mine}", [b"x"])
    assert await found.maintenance.sweep() == []
    await asyncio.sleep(6)
    assert await found.maintenance.sweep() == [mine]
    found.tier.orphaned_epochs = frozenset()
    assert await found.maintenance.sweep() == []  # they are garbage from now on
    await asyncio.sleep(6)
    assert sorted(await found.maintenance.sweep()) == [older, "manifest-1-7.json"]
    await asyncio.sleep(60)
    assert await found.maintenance.sweep() == []
    assert set(await host.object_store.names()) == {"data-0-0-1.parquet", *strangers}
    assert [info.key async for info in host.object_store.list("default/orders-other/")] == [
        f"default/orders-other/{mine}"
    ]


@simulated
async def test_a_deleted_topic_leaves_nothing_in_the_store() -> None:
    host = TierFixture(SMALL)
    broker, orders = await one_topic(host)
    other = await make_topic(broker, "/default/orders-2")
    for _ in range(4):
        await Teller().tell(orders)
        await Teller().tell(other)
        await asyncio.sleep(1.5)
    assert await read_snapshot(host.object_store, "default/orders/") is not None
    await broker.topics.delete(ORDERS)
    assert [info.key async for info in host.object_store.list("default/orders/")] == []
    assert await check_stored(host, "/default/orders-2") != []
    left = await host.metadata.list(keys.below_storage(ORDERS))
    assert [item.key for item in left] == [keys.owner(ORDERS)]


@simulated
async def test_objects_of_a_deleted_topic_that_the_store_kept_are_swept_when_the_name_is_used_again() -> None:
    host = TierFixture(SMALL)
    broker, orders = await one_topic(host)
    await Teller().tell(orders)
    await asyncio.sleep(3)
    host.object_store.away = True
    await broker.topics.delete(ORDERS)
    host.object_store.away = False
    assert await host.object_store.names() == ["data-0-0-1.parquet"]
    again = await make_topic(broker)
    teller = Teller(seed=5)
    await teller.tell(again)
    await asyncio.sleep(30)
    assert await host.object_store.names() == ["data-0-0-2.parquet"]
    assert await read_everything(again) == teller.told
