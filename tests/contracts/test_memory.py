"""What the memory adapters do beyond their ports."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from pydanube.errors import DiskFull, Unreachable
from pydanube.ports import Event, Put, Write
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.work.memory import MemoryWork
from pydanube.stores.work.memory_clock import MemoryClock
from tests.support import settle

# --- Clock ------------------------------------------------------------------------------------------


async def test_the_clock_stands_still_until_it_is_advanced() -> None:
    clock = MemoryClock(start_us=5)
    assert (clock.time_us(), clock.elapsed()) == (5, 0.0)
    clock.advance(1.5)
    assert (clock.time_us(), clock.elapsed()) == (1_500_005, 1.5)


async def test_advancing_wakes_by_deadline_and_then_by_who_slept_first() -> None:
    clock = MemoryClock()
    woken: list[str] = []

    async def sleep(name: str, seconds: float) -> None:
        await clock.sleep(seconds)
        woken.append(name)

    async with asyncio.TaskGroup() as group:
        for name, seconds in (("late", 3), ("first", 1), ("second", 1), ("last", 4)):
            group.create_task(sleep(name, seconds))
        await settle()
        assert clock.sleeping == 4
        clock.advance(3.5)
        await settle()
        assert woken == ["first", "second", "late"]
        assert clock.sleeping == 1
        clock.advance(1)
    assert woken == ["first", "second", "late", "last"]


async def test_the_date_may_jump_and_wakes_nobody() -> None:
    clock = MemoryClock()
    sleeper = asyncio.create_task(clock.sleep(1))
    await settle()
    before = clock.time_us()
    clock.jump(-3600)
    await settle()
    assert clock.time_us() == before - 3_600_000_000
    assert clock.elapsed() == 0.0
    assert not sleeper.done()
    sleeper.cancel()


# --- Disk -------------------------------------------------------------------------------------------


async def test_a_full_disk_refuses_what_does_not_fit_and_takes_the_rest() -> None:
    disk = MemoryDisk(capacity_bytes=10)
    await disk.create("a")
    await disk.create("b")
    fine, full, small = await disk.write(
        [Write("a", 0, [b"123456"]), Write("b", 0, [b"12345"]), Write("b", 0, [b"1234"])], sync=True
    )
    assert fine is None and small is None
    assert isinstance(full, DiskFull) and full.path == "b"
    assert await disk.free_bytes() == 0
    assert await disk.write([Write("a", 2, [b"over"])], sync=True) == [None]  # what is there can be changed
    await disk.truncate("a", 1)
    assert await disk.free_bytes() == 5
    await disk.remove("b")
    assert await disk.free_bytes() == 9
    await disk.create("c")
    await disk.write([Write("c", 0, [b"123"])], sync=True)
    await disk.rename("c", "a")
    assert await disk.free_bytes() == 7


# --- MetadataStore ----------------------------------------------------------------------------------


async def test_a_watch_that_is_further_behind_than_the_history_ends() -> None:
    store = MemoryMetadataStore(MemoryClock(), history_max=3)
    watch, other = store.watch("/a", 0), store.watch("/a", 1)
    for i in range(4):
        await store.transact([], [Put("/a", b"%d" % i)])
    with pytest.raises(Unreachable):
        await anext(watch)
    assert [event.value for event in await anext(other)] == [b"1", b"2", b"3"]
    # The list's newest revision may be older than the history too, so one watches after the store's own.
    for _ in range(10):
        await store.transact([], [Put("/b", b"")])
    revision = await store.transact([], [])
    assert revision == 14
    again = store.watch("/a", revision)
    await store.transact([], [Put("/a", b"new")])
    assert await anext(again) == [Event("/a", b"new", 15)]


async def test_a_quiet_watch_keeps_up_with_the_changes_of_others() -> None:
    store = MemoryMetadataStore(MemoryClock(), history_max=3)
    waiting = asyncio.ensure_future(anext(store.watch("/quiet", 0)))
    for _ in range(20):
        await store.transact([], [Put("/busy", b"")])
        await settle()
    await store.transact([], [Put("/quiet", b"at last")])
    assert [event.value for event in await waiting] == [b"at last"]


async def test_a_dropped_watch_leaves_nothing_behind() -> None:
    clock = MemoryClock()
    store = MemoryMetadataStore(clock)
    await store.grant(5)
    waiting = asyncio.ensure_future(anext(store.watch("/", 0)))
    await settle()
    assert clock.sleeping == 1
    waiting.cancel()
    await settle()
    assert clock.sleeping == 0
    assert store._waiting == {}


# --- Work -------------------------------------------------------------------------------------------


async def test_one_seed_gives_one_sequence_of_numbers() -> None:
    first, second = MemoryWork(Random(1)), MemoryWork(Random(1))
    assert [first.random_u64() for _ in range(9)] == [second.random_u64() for _ in range(9)]
