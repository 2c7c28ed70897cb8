"""Topics as Iceberg tables: what a load puts, what it puts again, what a sweep leaves. PyIceberg reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import StaticTable

from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.iceberg.manifests import FOLDER
from pydanube.core.names import TopicName
from pydanube.errors import ObjectDamaged, TopicUnknown, Unreachable
from pydanube.history.tables import Loaded, Tables
from pydanube.ports import Put
from tests.harness.brokers import ORDERS, find_topic, make_topic, one_topic, simulated
from tests.harness.tiers import KIB, SMALL, STILL, Teller, TierFixture, carried, tell_and_upload

WINDOW = 600.0


class TableSetup:
    """A broker, and the tables as another process derives them. `path` is where the store's objects are put, too."""

    def __init__(self, host: TierFixture, path: Path) -> None:
        self.host, self.path = host, path
        self.tables = self.another()

    def another(self) -> Tables:
        host = self.host
        return Tables(host.metadata, host.object_store, host.clock, host.work, lambda key: f"{self.path}/{key}", WINDOW)

    async def load(self, name: str = ORDERS) -> Loaded:
        return await self.tables.load(TopicName(name))

    async def rows(self, loaded: Loaded, snapshot: int | None = None) -> list[int]:
        """Offsets of all rows, as PyIceberg reads them from a directory with what the store has."""
        async for info in self.host.object_store.list(""):
            target = self.path / info.key
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(await self.host.object_store.get(info.key))
        table = StaticTable.from_metadata(loaded.location)
        found: pa.Table = table.scan(snapshot_id=snapshot).to_arrow()
        return sorted(found.column("offset").to_pylist())

    async def files(self, name: str = ORDERS) -> set[str]:
        return {info.key async for info in self.host.object_store.list(name[1:] + "/" + FOLDER)}


async def setup_of(tmp_path: Path, tier: Any = STILL) -> tuple[TableSetup, Topic]:
    host = TierFixture(tier)
    _, orders = await one_topic(host)
    return TableSetup(host, tmp_path), orders


@simulated
async def test_a_table_has_the_rows_that_were_uploaded_and_follows_every_upload(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    teller = Teller()
    for count in range(1, 5):
        await tell_and_upload(orders, teller, count=3)
        loaded = await setup.load()
        assert await setup.rows(loaded) == list(range(3 * count))
        assert loaded.metadata["properties"]["danube.head"] == str(3 * count)


@simulated
async def test_a_table_is_the_same_before_and_after_merges_and_moves_to_the_manifest(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path, SMALL)
    teller = Teller(size=8 * KIB)
    before = await setup.load()
    for _ in range(12):
        await tell_and_upload(orders, teller, count=2)
        await asyncio.sleep(0.7)
        assert await setup.rows(before) == list(range(orders.head - 2))  # who reads it still reads it to its end
        before = await setup.load()
        assert await setup.rows(before) == list(range(orders.head))
    await asyncio.sleep(10)
    tier = carried(orders).tier
    assert tier.history.manifest is not None and any("-m" in each.object_id for each in tier.objects)
    assert await setup.rows(await setup.load()) == list(range(24))


@simulated
async def test_nothing_is_put_when_nothing_changed_and_the_answer_is_the_same(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 3)
    first = await setup.load()
    files = await setup.files()
    calls = setup.host.object_store.calls
    assert await setup.load() == first and setup.host.object_store.calls == calls
    setup.tables = setup.another()
    assert (await setup.load()).metadata == first.metadata and await setup.files() == files


@simulated
async def test_the_versions_of_the_last_minutes_can_be_read_and_older_ones_are_not_named(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    teller = Teller()
    await tell_and_upload(orders, teller, count=2)
    before = await setup.load()
    await asyncio.sleep(60)
    await tell_and_upload(orders, teller, count=2)
    setup.tables = setup.another()  # the chain is in the store
    after = await setup.load()
    [old, new] = [each["snapshot-id"] for each in after.metadata["snapshots"]]
    assert old == before.metadata["current-snapshot-id"] and new == after.metadata["current-snapshot-id"] > old
    assert (await setup.rows(after, old), await setup.rows(after)) == ([0, 1], [0, 1, 2, 3])
    await asyncio.sleep(WINDOW)
    later = await setup.load()
    assert [each["snapshot-id"] for each in later.metadata["snapshots"]] == [new] and later.etag != after.etag


@simulated
async def test_what_retention_forgets_leaves_the_table_and_the_version_before_is_readable(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 4)
    before = await setup.load()
    await carried(orders).maintenance.move_first_offset(3)
    after = await setup.load()
    assert await setup.rows(after) == [3]
    assert await setup.rows(after, before.metadata["current-snapshot-id"]) == [0, 1, 2, 3]
    assert after.metadata["properties"]["danube.first-offset"] == "3"


@simulated
async def test_a_sweep_leaves_what_the_table_needs_and_removes_the_rest_after_the_window(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    teller = Teller()
    for _ in range(4):
        await tell_and_upload(orders, teller)
        await setup.load()
    await setup.host.object_store.put(f"default/orders/{FOLDER}notes.txt", [b"not ours"])
    many = len(await setup.files())
    await asyncio.sleep(WINDOW / 2)
    await setup.load()
    assert len(await setup.files()) >= many
    for _ in range(3):
        await asyncio.sleep(WINDOW / 2)
        loaded = await setup.load()
    assert await setup.rows(loaded) == [0, 1, 2, 3]
    assert len(await setup.files()) == 4  # a manifest, a list, metadata; and what is not ours


@simulated
async def test_what_somebody_else_removed_is_put_again_after_half_of_the_window(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 2)
    await setup.load()
    files = await setup.files()
    for key in files:
        await setup.host.object_store.delete(key)
    await asyncio.sleep(WINDOW / 2)
    assert await setup.rows(await setup.load()) == [0, 1]
    assert await setup.files() == files


@simulated
async def test_two_processes_that_derive_the_same_table_at_once_both_answer(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 3)
    first, second = await asyncio.gather(setup.load(), setup.another().load(TopicName(ORDERS)))
    assert first == second and len(await setup.files()) == 3


@simulated
async def test_a_process_that_dies_between_two_puts_leaves_files_that_the_next_load_uses(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 3)
    put, puts = setup.host.object_store.put, 0

    async def dying(key: str, *given: Any, **named: Any) -> Any:
        nonlocal puts
        puts += 1
        if puts > 1:
            raise Unreachable("the store", "this process has died")
        return await put(key, *given, **named)

    setup.host.object_store.put = dying  # type: ignore[method-assign]
    with pytest.raises(Unreachable):
        await setup.load()
    setup.host.object_store.put = put  # type: ignore[method-assign]
    left = await setup.files()
    setup.tables = setup.another()
    assert await setup.rows(await setup.load()) == [0, 1, 2]
    assert len(left) == 1 and left < await setup.files() and len(await setup.files()) == 3


@simulated
async def test_processes_that_derived_different_changes_are_both_right(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 2)
    older = await setup.load()
    await tell_and_upload(orders, Teller())
    newer = await setup.another().load(TopicName(ORDERS))
    assert (await setup.rows(older), await setup.rows(newer)) == ([0, 1], [0, 1, 2])
    assert older.metadata["current-snapshot-id"] < newer.metadata["current-snapshot-id"]
    assert older.metadata["table-uuid"] == newer.metadata["table-uuid"]


@simulated
async def test_an_object_that_nobody_described_is_no_row_and_is_left_alone(tmp_path: Path) -> None:
    """The owner died between put and descriptor, or somebody put a file of his own there."""
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 2)
    [first, *_] = [info.key async for info in setup.host.object_store.list("default/orders/data-0")]
    strange = ("default/orders/data-2-2-1.parquet", "default/orders/notes.parquet")
    for key in strange:
        await setup.host.object_store.put(key, [await setup.host.object_store.get(first)])
    for _ in range(4):
        assert await setup.rows(await setup.load()) == [0, 1]
        await asyncio.sleep(WINDOW)
    assert {info.key async for info in setup.host.object_store.list("default/orders/")} >= set(strange)


@simulated
async def test_what_was_current_a_moment_ago_can_be_read_although_it_was_made_long_ago(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 2)
    old = (await setup.load()).metadata["current-snapshot-id"]
    await asyncio.sleep(3 * WINDOW)
    await setup.load()
    await tell_and_upload(orders, Teller(), 2)
    after = await setup.load()
    assert [each["snapshot-id"] for each in after.metadata["snapshots"]][:-1] == [old]
    assert await setup.rows(after, old) == [0, 1]


@simulated
async def test_a_topic_made_anew_is_another_table_and_the_files_of_the_old_one_are_gone(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 2)
    old = await setup.load()
    before = await setup.files()
    await setup.host.broker.topics.delete(TopicName(ORDERS))
    assert await setup.files() == set()
    with pytest.raises(TopicUnknown):
        await setup.load()
    orders = await make_topic(setup.host.broker)
    await tell_and_upload(orders, Teller())
    new = await setup.load()
    assert new.metadata["table-uuid"] != old.metadata["table-uuid"] and len(new.metadata["snapshots"]) == 1
    assert await setup.rows(new) == [0] and not before & await setup.files()


@simulated
async def test_partitions_are_one_table_whose_snapshot_changes_with_any_of_them(tmp_path: Path) -> None:
    setup, _ = await setup_of(tmp_path)
    broker = setup.host.broker
    for number in (0, 1):
        await make_topic(broker, f"/default/clicks-part-{number}")
    seen = []
    for number in (0, 1, 1):
        await tell_and_upload(await find_topic(broker, f"/default/clicks-part-{number}"), Teller(), count=2)
        seen.append((await setup.load("/default/clicks")).metadata["current-snapshot-id"])
    assert seen == sorted(set(seen))
    loaded = await setup.load("/default/clicks")
    assert await setup.rows(loaded) == [0, 0, 1, 1, 2, 3]
    of_one = StaticTable.from_metadata(loaded.location).scan("part = 1")
    assert len(list(of_one.plan_files())) == 2 and of_one.to_arrow().column("part").to_pylist() == [1] * 4
    for number in (0, 1):
        await broker.topics.delete_here(await find_topic(broker, f"/default/clicks-part-{number}"))
    assert await setup.files("/default/clicks") == set()


@simulated
async def test_a_table_whose_descriptors_cannot_all_be_read_is_not_served(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 2)
    await setup.host.metadata.transact([], [Put(keys.storage_object(TopicName(ORDERS), 0), b"[]")])
    with pytest.raises(ObjectDamaged):
        await setup.load()


@simulated
async def test_a_store_that_is_away_fails_the_load_and_the_next_one_puts_what_is_missing(tmp_path: Path) -> None:
    setup, orders = await setup_of(tmp_path)
    await tell_and_upload(orders, Teller(), 2)
    setup.host.object_store.away = True
    with pytest.raises(Unreachable):
        await setup.load()
    setup.host.object_store.away = False
    assert await setup.rows(await setup.load()) == [0, 1]


@simulated
async def test_a_topic_that_nobody_made_is_no_table(tmp_path: Path) -> None:
    setup, _ = await setup_of(tmp_path)
    with pytest.raises(TopicUnknown):
        await setup.load("/default/none")
