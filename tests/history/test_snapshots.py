"""What an object store says of a topic by itself: the newest owner's newest copy, and never more than a few of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pydanube.core.history.tiers import Descriptor
from pydanube.errors import Unreachable
from pydanube.history.snapshots import KEPT, HistorySnapshot, Snapshots, read_snapshot, snapshot_name
from pydanube.ports import Buffer, ObjectInfo
from pydanube.stores.objects.memory import MemoryObjectStore
from tests.support import run

PREFIX = "default/orders/"


def snapshot(head: int) -> HistorySnapshot:
    described = Descriptor(
        start_offset=0,
        end_offset=head - 1,
        object_id=f"data-0-{head - 1}-1.parquet",
        size=9,
        etag="e",
        min_publish_time=1,
        max_publish_time=2,
        epoch=1,
        created_at=3,
    )
    return HistorySnapshot("/default/orders", 0, head, None, 0, [described], [(5, 7)], [(7, 9)], 4)


def test_a_snapshot_survives_its_bytes() -> None:
    assert HistorySnapshot.from_bytes(snapshot(10).to_bytes()) == snapshot(10)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"format": 2}', b'{"format": 1, "topic": "t"}'])
def test_bytes_that_are_none_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        HistorySnapshot.from_bytes(data)


def test_the_newest_is_read_and_only_a_few_are_kept() -> None:
    async def test() -> None:
        store = MemoryObjectStore()
        assert await read_snapshot(store, PREFIX) is None
        owner = Snapshots(store, PREFIX, epoch=2)
        for head in range(1, 6):
            await owner.publish(snapshot(head))
        assert await read_snapshot(store, PREFIX) == snapshot(5)
        names = [info.key async for info in store.list(PREFIX)]
        assert names == [PREFIX + snapshot_name(2, number) for number in (3, 4, 5)]
        assert len(names) == KEPT

    run(test())


def test_an_owner_that_lost_the_topic_neither_wins_nor_removes_what_is_newer() -> None:
    async def test() -> None:
        store = MemoryObjectStore()
        old, new = Snapshots(store, PREFIX, epoch=2), Snapshots(store, PREFIX, epoch=3)
        await old.publish(snapshot(1))
        await new.publish(snapshot(2))
        for head in range(10, 20):
            await old.publish(snapshot(head))
        assert await read_snapshot(store, PREFIX) == snapshot(2)
        # The new owner removes what the old one left, sooner or later.
        again = Snapshots(store, PREFIX, epoch=4)
        for head in (21, 22, 23):
            await again.publish(snapshot(head))
        names = [info.key async for info in store.list(PREFIX)]
        assert names == [PREFIX + snapshot_name(4, number) for number in (1, 2, 3)]

    run(test())


class Away(MemoryObjectStore):
    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        raise Unreachable("the store", "it is away")


def test_a_store_that_is_away_stops_nobody() -> None:
    run(Snapshots(Away(), PREFIX, epoch=1).publish(snapshot(1)))
