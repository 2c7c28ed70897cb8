"""A change of history: what it writes, and what is known of it when the write is done, refused, lost or given up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import Any

import pytest

from pydanube.core import keys
from pydanube.core.commit.sessions import Sessions, Stored
from pydanube.core.history.ownership import void_to_bytes
from pydanube.core.history.tiers import Descriptor, Objects, TierConfig, TopicHistory
from pydanube.core.names import TopicName
from pydanube.errors import Conflict, OwnershipLost, Unreachable
from pydanube.history.change import HistoryChange, KnownHistory, StoredManifest, Void
from pydanube.history.tier import TopicTier
from pydanube.ports import Compare, Delete, Put, Revision
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.stores.work.memory import MemoryWork
from pydanube.stores.work.memory_clock import LoopClock
from tests.harness.brokers import simulated

TOPIC = TopicName("/default/orders")
Answer = Callable[[Callable[[], Awaitable[Revision | None]]], Awaitable[Revision | None]]


def described(start: int, end: int, name: str = "") -> Descriptor:
    return Descriptor(
        start_offset=start,
        end_offset=end - 1,
        object_id=name or f"data-{start}-{end - 1}-1.parquet",
        size=10,
        etag="",
        min_publish_time=0,
        max_publish_time=0,
        epoch=1,
        created_at=0,
    )


class Owner:
    """A tier whose writes can be made to fail, one by one, and its metadata store."""

    def __init__(self, metadata: MemoryMetadataStore | None = None) -> None:
        self.metadata = metadata or MemoryMetadataStore(LoopClock())
        self.answers: list[Answer] = []
        self.tier = TopicTier(
            TOPIC,
            1,
            MemoryObjectStore(),
            LoopClock(),
            MemoryWork(Random(1)),
            self.write,
            self.metadata,
            TierConfig(),
        )

    async def write(self, compares: Sequence[Compare], operations: Sequence[Put | Delete], /) -> Revision | None:
        async def really() -> Revision | None:
            return await self.metadata.transact(compares, operations)

        return await (self.answers.pop(0)(really) if self.answers else really())

    async def stored(self) -> list[Descriptor]:
        items = await self.metadata.list(keys.storage_objects(TOPIC))
        return [Descriptor.from_bytes(item.value) for item in items]

    async def agree(self) -> None:
        """What is known is what another owner would read."""
        other = Owner(self.metadata).tier
        await other.load()
        assert list(other.objects) == list(self.tier.objects)
        assert other.history == self.tier.history
        assert other.sessions == self.tier.sessions


async def lost_before(really: Callable[[], Awaitable[Revision | None]]) -> Revision | None:
    raise Unreachable("metadata store", "it never got there")


async def lost_after(really: Callable[[], Awaitable[Revision | None]]) -> Revision | None:
    await really()
    raise Unreachable("metadata store", "the answer was lost")


async def not_ours(really: Callable[[], Awaitable[Revision | None]]) -> Revision | None:
    raise OwnershipLost(TOPIC)


async def never(really: Callable[[], Awaitable[Revision | None]]) -> Revision | None:
    await asyncio.get_running_loop().create_future()
    raise AssertionError


# --- values -----------------------------------------------------------------------------------------------


def test_a_change_writes_descriptors_then_deletes_then_voids_and_what_else_goes_with_it() -> None:
    change = HistoryChange(
        added=[described(0, 20)],
        replaced=[described(0, 10), described(10, 20)],
        voids=[Void(20, 30, "why")],
        others=[Delete("/other")],
    )
    assert change.operations(TOPIC) == [
        Put(keys.storage_object(TOPIC, 0), described(0, 20).to_bytes()),
        Delete(keys.storage_object(TOPIC, 10)),
        Put(keys.void(TOPIC, 20), void_to_bytes(30, "why")),
        Delete("/other"),
    ]


def test_objects_that_are_replaced_are_undescribed_and_so_is_the_manifest_before() -> None:
    known = KnownHistory(TopicHistory(manifest="old", manifest_end=10), Objects([described(0, 10), described(10, 20)]))
    merge = HistoryChange(added=[described(0, 20, "both")], replaced=list(known.objects))
    assert known.undescribed(merge) == [each.object_id for each in known.objects]
    assert [each.object_id for each in known.after(merge).objects] == ["both"]
    listing = HistoryChange(listed=known.objects[:1], manifest=StoredManifest("new", 10, 7))
    after = known.after(listing)
    assert known.undescribed(listing) == ["old"]
    assert (after.history.manifest, after.history.manifest_crc) == ("new", 7)
    assert (list(after.objects.listed), list(after.objects.keyed)) == ([described(0, 10)], [described(10, 20)])


def test_history_that_begins_later_has_expired_keys_and_no_manifest_that_lists_nothing() -> None:
    objects = Objects([described(0, 10), described(10, 20), described(20, 30)], {described(0, 10).object_id})
    known = KnownHistory(TopicHistory(manifest="list", manifest_end=10, manifest_crc=7), objects)
    change = HistoryChange(first_offset=20)
    after = known.after(change)
    assert list(after.objects) == [described(20, 30)]
    assert list(after.expired) == [described(10, 20)]  # the other one has no key
    assert after.history == TopicHistory(first_offset=20)
    assert known.undescribed(change) == [described(0, 10).object_id, described(10, 20).object_id, "list"]
    assert after.after(HistoryChange(expired=after.expired)).expired == []


def test_a_change_that_makes_objects_overlap_is_refused_before_it_is_written() -> None:
    with pytest.raises(ValueError, match="overlaps"):
        KnownHistory(objects=Objects([described(0, 10)])).after(HistoryChange(added=[described(9, 12)]))


# --- the table of `TopicTier.apply` ---------------------------------------------------------------------------


@simulated
async def test_a_write_that_is_done_changes_the_store_and_what_is_known() -> None:
    owner = Owner()
    sessions = Sessions()
    sessions.recall(7, 1, Stored(0, 1, 0, 0, 1))
    owner.tier.garbage.add(described(0, 10).object_id)
    assert await owner.tier.apply(HistoryChange(added=[described(0, 10)], sessions=sessions, appears=True)) == []
    assert described(0, 10).object_id not in owner.tier.garbage
    assert await owner.tier.apply(HistoryChange(added=[described(10, 20)])) == []
    merged = described(0, 20, "both")
    assert await owner.tier.apply(HistoryChange(added=[merged], replaced=[described(0, 10), described(10, 20)])) == [
        described(0, 10).object_id,
        described(10, 20).object_id,
    ]
    assert described(0, 10).object_id in owner.tier.garbage
    assert (await owner.stored(), owner.tier.history.history_version) == ([merged], 1)
    await owner.agree()


@pytest.mark.parametrize("lost", [[lost_before], [lost_after], [lost_after, lost_before], [lost_before, lost_after]])
@simulated
async def test_a_write_that_is_not_answered_is_made_again_and_counts_once(lost: list[Answer]) -> None:
    owner = Owner()
    owner.answers = list(lost)
    await owner.tier.apply(HistoryChange(added=[described(0, 10)]))
    assert await owner.stored() == [described(0, 10)]
    assert owner.tier.history.change == 1
    await owner.agree()


@simulated
async def test_a_write_that_finds_another_history_key_is_a_conflict_and_the_next_step_reads_anew() -> None:
    owner = Owner()
    await owner.tier.apply(HistoryChange(added=[described(0, 10)]))
    other = Owner(owner.metadata).tier
    await other.load()
    await other.apply(HistoryChange(added=[described(10, 20)]))
    with pytest.raises(Conflict):
        await owner.tier.apply(HistoryChange(added=[described(10, 30)]))
    assert list(owner.tier.objects) == [described(0, 10)]
    await owner.tier.refresh_if_stale()
    assert list(owner.tier.objects) == [described(0, 10), described(10, 20)]
    await owner.agree()


@simulated
async def test_a_write_of_a_topic_that_is_not_ours_changes_nothing_that_is_known() -> None:
    owner = Owner()
    owner.answers = [not_ours]
    with pytest.raises(OwnershipLost):
        await owner.tier.apply(HistoryChange(added=[described(0, 10)]))
    assert (list(owner.tier.objects), await owner.stored()) == ([], [])


@pytest.mark.parametrize("arrives", [False, True])
@simulated
async def test_a_write_that_is_given_up_is_found_or_can_never_happen(arrives: bool) -> None:
    owner = Owner()
    late: list[Callable[[], Awaitable[Any]]] = []

    async def given_up(really: Callable[[], Awaitable[Revision | None]]) -> Revision | None:
        late.append(really)
        return await never(really)

    owner.answers = [given_up]
    task = asyncio.ensure_future(owner.tier.apply(HistoryChange(added=[described(0, 10)])))
    await asyncio.sleep(1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert list(owner.tier.objects) == []
    if arrives:
        assert await late[0]() is not None
    await owner.tier.fence()
    assert list(owner.tier.objects) == ([described(0, 10)] if arrives else [])
    await owner.agree()
    if not arrives:
        assert await late[0]() is None  # too late
        await owner.agree()


@simulated
async def test_a_change_that_overlaps_is_never_tried_and_leaves_nothing_stale() -> None:
    owner = Owner()
    await owner.tier.apply(HistoryChange(added=[described(0, 10)]))
    with pytest.raises(ValueError, match="overlaps"):
        await owner.tier.apply(HistoryChange(added=[described(5, 12)]))
    await owner.tier.apply(HistoryChange(added=[described(10, 12)]))
    await owner.agree()


@pytest.mark.parametrize("name", ["objects", "sessions", "history", "expired"])
def test_nobody_but_the_tier_itself_assigns_what_is_known(name: str) -> None:
    with pytest.raises(AttributeError):
        setattr(Owner().tier, name, None)
