"""The faulty disk: what a power cut, a kill, a failed sync and a full disk may leave, and what they may not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from pydanube.errors import DanubeError, DirectoryInUse, DiskFailed, DiskFull, ResourcesShort
from pydanube.ports import Entry, Write
from pydanube.testing.disk_faults import MEETS, DiskAim, Faults, Told
from pydanube.testing.disk_image import SECTOR_BYTES
from pydanube.testing.faulty_disk import FaultyDisk
from pydanube.testing.loop import run
from pydanube.testing.process_disk import ProcessDisk

OLD, NEW = b"o" * SECTOR_BYTES, b"n" * SECTOR_BYTES


def after(
    scenario: Callable[[FaultyDisk, ProcessDisk], Awaitable[None]], *, seeds: int = 200
) -> list[dict[str, bytes]]:
    """What the disk may hold after `scenario` and a power cut: one tree of files per seed."""

    async def main(seed: int) -> dict[str, bytes]:
        disk = FaultyDisk(Random(seed), faults=Faults(stale_sectors=0.0))
        await scenario(disk, disk.process())
        disk.crash()
        return {path: disk.content(path) for path in disk.paths()}

    return [run(main(seed), seed) for seed in range(seeds)]


async def put(disk: ProcessDisk, path: str, *parts: bytes, sync: bool = True) -> None:
    await disk.create(path)
    await disk.write([Write(path, 0, parts)], sync=sync)


# --- power cuts: bytes ---


def test_synced_bytes_under_a_synced_name_always_survive() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD, NEW)
        await process.sync_directory("")

    assert {tree["a"] for tree in after(scenario)} == {OLD + NEW}


def test_unsynced_sectors_survive_in_any_combination_not_only_a_prefix() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD, OLD)
        await process.sync_directory("")
        await process.write([Write("a", 0, [NEW, NEW])], sync=False)

    assert {tree["a"] for tree in after(scenario)} == {OLD + OLD, NEW + OLD, OLD + NEW, NEW + NEW}


def test_a_sector_written_twice_survives_in_any_of_its_versions() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD)
        await process.sync_directory("")
        await process.write([Write("a", 0, [b"1" * 100])], sync=False)
        await process.write([Write("a", 50, [b"2" * 100])], sync=False)

    first = b"1" * 100 + OLD[100:]
    second = b"1" * 50 + b"2" * 100 + OLD[150:]
    assert {tree["a"] for tree in after(scenario)} == {OLD, first, second}


def test_an_unsynced_length_is_anything_between_old_and_new() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD)
        await process.sync_directory("")
        await process.write([Write("a", SECTOR_BYTES, [NEW])], sync=False)

    lengths = {len(tree["a"]) for tree in after(scenario)}
    assert min(lengths) == SECTOR_BYTES and max(lengths) == 2 * SECTOR_BYTES and len(lengths) > 10
    assert all(tree["a"][SECTOR_BYTES:].strip(b"\0n") == b"" for tree in after(scenario))


def test_a_write_during_a_sync_is_not_made_safe_by_it() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD)
        await process.sync_directory("")
        disk.faults.latency_seconds_max = 1.0
        sync = asyncio.create_task(process.sync(["a"]))
        await asyncio.sleep(0)
        disk._write("a", 0, NEW)
        await sync

    assert {tree["a"] for tree in after(scenario)} == {OLD, NEW}


def test_a_write_that_was_going_on_at_the_power_cut_may_be_there_in_part() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD, OLD)
        await process.sync_directory("")
        disk.faults.latency_seconds_max = 1.0
        going_on = asyncio.create_task(process.write([Write("a", 0, [NEW, NEW])], sync=True))
        await asyncio.sleep(0)
        assert not going_on.done()

    assert {tree["a"] for tree in after(scenario)} >= {OLD + OLD, NEW + OLD, OLD + NEW, NEW + NEW}


def test_a_truncation_that_was_not_synced_may_come_back() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD, OLD)
        await process.sync_directory("")
        await process.truncate("a", SECTOR_BYTES)

    assert {len(tree["a"]) for tree in after(scenario)} >= {SECTOR_BYTES, 2 * SECTOR_BYTES}


def test_bytes_that_never_were_in_the_file_may_stand_in_its_unwritten_sectors() -> None:
    async def main(seed: int) -> bool:
        disk = FaultyDisk(Random(seed), faults=Faults(stale_sectors=1.0))
        process = disk.process()
        await put(process, "other", OLD)
        await process.remove("other")
        await put(process, "a", b"", sync=True)
        await process.sync_directory("")
        await process.write([Write("a", 0, [NEW, NEW])], sync=False)
        disk.crash()
        return OLD in disk.content("a")

    assert any(run(main(seed), seed) for seed in range(100))


# --- power cuts: names ---


def test_a_new_file_may_vanish_until_its_directory_is_synced() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD)

    assert {"a" in tree for tree in after(scenario)} == {True, False}
    assert all(tree.get("a", OLD) == OLD for tree in after(scenario))


def test_a_removed_file_may_come_back_until_its_directory_is_synced() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD)
        await process.sync_directory("")
        await process.remove("a")

    assert {"a" in tree for tree in after(scenario)} == {True, False}


@pytest.mark.parametrize("target", ["b", "d/b"])
def test_a_renamed_file_has_its_old_name_or_its_new_one_but_never_neither(target: str) -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await process.make_directory("d")
        await put(process, "a", OLD)
        await process.sync_directory("")
        await process.rename("a", target)

    trees = [frozenset(tree) for tree in after(scenario)]
    assert {frozenset({"a"}), frozenset({target})} <= set(trees)
    assert frozenset() not in trees


@pytest.mark.parametrize("target", ["b", "d/b"])
def test_a_rename_is_safe_once_the_directory_of_the_new_name_is_synced(target: str) -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await process.make_directory("d")
        await put(process, "a", OLD)
        await process.sync_directory("")
        await process.rename("a", target)
        await process.sync_directory("d" if target == "d/b" else "")

    assert all(tree.get(target) == OLD for tree in after(scenario))


def test_a_file_replaced_by_rename_is_the_old_one_or_the_new_one() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await put(process, "a", OLD)
        await put(process, "new", NEW)
        await process.sync_directory("")
        await process.rename("new", "a")

    assert {tree["a"] for tree in after(scenario)} == {OLD, NEW}


def test_a_made_directory_survives_and_one_that_was_being_made_may_not() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        await process.make_directory("d/e")
        await put(process, "d/e/a", OLD)
        await process.sync_directory("d/e")

    assert {tree.get("d/e/a") for tree in after(scenario)} == {OLD}


# --- kills, and the dead ---


def test_a_kill_keeps_what_was_written_and_a_prefix_of_the_write_going_on() -> None:
    async def main(seed: int) -> bytes:
        disk = FaultyDisk(Random(seed))
        process = disk.process()
        await put(process, "a", OLD, sync=False)
        disk.faults.latency_seconds_max = 1.0
        going_on = asyncio.create_task(process.write([Write("a", SECTOR_BYTES, [NEW])], sync=True))
        await asyncio.sleep(0)
        disk.kill(process)
        await asyncio.sleep(10)
        assert not going_on.done()
        return disk.content("a")

    kept = {run(main(seed), seed) for seed in range(100)}
    assert all((OLD + NEW).startswith(one) and one.startswith(OLD) for one in kept)
    assert {OLD, OLD + NEW} <= kept and len(kept) > 10


@pytest.mark.parametrize("end", ["kill", "crash"])
def test_calls_of_a_dead_process_never_return_and_change_nothing(end: str) -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1))
        process = disk.process()
        await put(process, "a", OLD)
        await process.sync_directory("")
        disk.faults.latency_seconds_max = 1.0
        during = [asyncio.create_task(process.remove("a")), asyncio.create_task(process.rename("a", "b"))]
        await asyncio.sleep(0)
        if end == "kill":
            disk.kill(process)
        else:
            disk.crash()
        later = [
            asyncio.create_task(process.remove("a")),
            asyncio.create_task(process.write([Write("a", 0, [NEW])], sync=True)),
            asyncio.create_task(process.lock("LOCK")),
        ]
        _, pending = await asyncio.wait([*during, *later], timeout=100)
        assert len(pending) == 5
        assert disk.paths() == ["a"] and disk.content("a") == OLD

    run(main(), 1)


def test_a_lock_ends_with_its_process_and_not_before() -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1))
        one, two = disk.process(pid=1), disk.process(pid=2)
        await one.lock("LOCK")
        with pytest.raises(DirectoryInUse, match="process 1"):
            await two.lock("LOCK")
        disk.kill(one)
        await two.lock("LOCK")
        disk.crash()
        await disk.process(pid=3).lock("LOCK")

    run(main(), 1)


# --- failed syncs ---


@pytest.mark.parametrize("stays", [0.0, 1.0])
def test_after_a_failed_sync_no_later_one_makes_the_bytes_durable(stays: float) -> None:
    async def main(seed: int) -> tuple[bool, bytes, bytes]:
        disk = FaultyDisk(Random(seed))
        process = disk.process()
        await put(process, "a", OLD)
        await process.sync_directory("")
        disk.faults.sync_fails, disk.faults.sync_failure_stays = 1.0, stays
        [failure] = await process.write([Write("a", 0, [NEW])], sync=True)
        assert isinstance(failure, DiskFailed)
        disk.faults.sync_fails = 0.0
        [again] = await process.sync(["a"])
        seen = await process.read("a", 0, SECTOR_BYTES)
        disk.kill(process)
        [fresh] = await disk.process().sync(["a"])
        assert fresh is None
        disk.crash()
        return again is None, seen, disk.content("a")

    results = {run(main(seed), seed) for seed in range(100)}
    assert {succeeded for succeeded, _, _ in results} == {stays == 0.0}
    # Reads may show what a power cut takes away again.
    assert (stays == 0.0, NEW, OLD) in results and (stays == 0.0, NEW, NEW) in results


def test_a_failed_sync_does_not_stop_the_other_files_of_the_call() -> None:
    async def main(seed: int) -> tuple[bool, bool]:
        disk = FaultyDisk(Random(seed))
        process = disk.process()
        await put(process, "a")
        await put(process, "b")
        await process.sync_directory("")
        disk.faults.sync_fails = 0.5
        results = await process.write([Write("a", 0, [NEW]), Write("b", 0, [NEW])], sync=True)
        for path, result in zip("ab", results, strict=True):
            assert result is not None or disk.durable(path) == NEW
        return results[0] is None, results[1] is None

    assert len({run(main(seed), seed) for seed in range(50)}) == 4


def test_a_failed_write_leaves_a_prefix_and_a_failed_read_says_so() -> None:
    async def main(seed: int) -> int:
        disk = FaultyDisk(Random(seed))
        process = disk.process()
        await put(process, "a")
        disk.faults.write_fails = disk.faults.read_fails = 1.0
        [failure] = await process.write([Write("a", 0, [NEW])], sync=True)
        assert isinstance(failure, DiskFailed)
        with pytest.raises(DiskFailed):
            await process.read("a", 0, 1)
        assert NEW.startswith(disk.content("a"))
        return len(disk.content("a"))

    assert len({run(main(seed), seed) for seed in range(50)}) > 10


def test_a_directory_that_a_killed_process_was_making_may_be_found_and_lost_again() -> None:
    async def main(seed: int) -> tuple[bool, bool]:
        disk = FaultyDisk(Random(seed))
        process = disk.process()
        disk.faults.latency_seconds_max = 1.0
        making = asyncio.create_task(process.make_directory("d"))
        await asyncio.sleep(1.0)
        found = "d" in disk._current
        assert not making.done() or found
        disk.kill(process)
        second = disk.process()
        await second.make_directory("d")  # there already: nothing is made, so nothing is synced
        await put(second, "d/a", OLD)
        await second.sync_directory("d")
        disk.crash()
        return found, "d/a" in disk.paths()

    outcomes = {run(main(seed), seed) for seed in range(100)}
    assert (True, False) in outcomes and (False, False) not in outcomes


def test_a_failed_sync_of_a_directory_is_said() -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1))
        process = disk.process()
        await put(process, "a")
        disk.faults.directory_sync_fails = 1.0
        with pytest.raises(DiskFailed):
            await process.sync_directory("")
        assert disk.durable("a") is None

    run(main(), 1)


# --- no room, delays, flips ---


def test_a_full_disk_takes_a_prefix_says_so_and_goes_on_when_there_is_room() -> None:
    async def main(seed: int) -> int:
        disk = FaultyDisk(Random(seed), capacity_bytes=1000)
        process = disk.process()
        await put(process, "a", b"a" * 900)
        [failure] = await process.write([Write("a", 900, [b"b" * 200])], sync=True)
        assert isinstance(failure, DiskFull)
        content = disk.content("a")
        assert content.startswith(b"a" * 900) and set(content[900:]) <= {ord("b")} and len(content) <= 1000
        assert await process.write([Write("a", 0, [b"c" * 900])], sync=True) == [None], "no room is needed"
        with pytest.raises(DiskFull):
            await process.truncate("a", 2000)
        disk.capacity_bytes = 2000
        assert await process.write([Write("a", 900, [b"b" * 200])], sync=True) == [None]
        assert await process.free_bytes() == 900
        return len(content)

    assert len({run(main(seed), seed) for seed in range(50)}) > 10


def test_delays_take_virtual_time() -> None:
    async def main() -> float:
        faults = Faults(delays=1.0, delay_seconds_max=100.0)
        process = FaultyDisk(Random(1), faults=faults).process()
        await put(process, "a", OLD)
        return asyncio.get_running_loop().time()

    assert run(main(), 1) > 1.0


def test_a_flipped_bit_is_read_and_survives() -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1))
        process = disk.process()
        await put(process, "a", b"\x00\x00")
        await process.sync_directory("")
        disk.flip("a", 1, 3)
        assert await process.read("a", 0, 2) == b"\x00\x08"
        disk.crash()
        assert disk.content("a") == b"\x00\x08"
        assert disk.counts["flips"] == 1

    run(main(), 1)


def test_the_same_seed_breaks_the_same_things() -> None:
    async def scenario(disk: FaultyDisk, process: ProcessDisk) -> None:
        for name in "abc":
            await put(process, name, OLD, NEW, OLD, sync=name == "b")

    assert after(scenario, seeds=20) == after(scenario, seeds=20)


# --- aimed faults ---

_CALLS: dict[str, Callable[[ProcessDisk], Awaitable[Any]]] = {
    "create": lambda process: process.create("new"),
    "write": lambda process: process.write([Write("a", 0, [NEW])], sync=False),
    "sync": lambda process: process.sync(["a"]),
    "truncate": lambda process: process.truncate("a", 1),
    "read": lambda process: process.read("a", 0, 10),
    "size": lambda process: process.size("a"),
    "sync_directory": lambda process: process.sync_directory(""),
    "make_directory": lambda process: process.make_directory("d"),
    "list": lambda process: process.list(""),
    "rename": lambda process: process.rename("a", "b"),
    "remove": lambda process: process.remove("a"),
    "free_bytes": lambda process: process.free_bytes(),
}


async def outcome_of(call: Awaitable[Any]) -> Any:
    """The error that it was told of, or None: raised, or in the list of results."""
    try:
        result = await call
    except DanubeError as error:
        return error
    return result[0] if isinstance(result, list) and result and not isinstance(result[0], Entry) else None


@pytest.mark.parametrize(("operation", "what"), [(operation, what) for operation in MEETS for what in MEETS[operation]])
def test_every_call_can_be_hit_by_all_that_it_may_meet_and_only_the_one_that_is_aimed_at(
    operation: str, what: str
) -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1))
        process = disk.process()
        await put(process, "a", OLD)
        await process.sync_directory("")
        if operation in ("write", "sync", "truncate", "read", "size") and what == "EMFILE":
            assert process.open_files == []  # else it would be open
        disk.aims.append(DiskAim(operation, 1, what, seconds=50.0))
        call = asyncio.create_task(outcome_of(_CALLS[operation](process)))
        _, pending = await asyncio.wait([call], timeout=10)
        assert not disk.aims and disk.counts["aimed faults"] == 1
        if what in ("hang", "kill", "power", "delay"):
            assert pending
            assert process.dead == (what in ("kill", "power"))
            if what == "delay":
                assert await call is None
            return
        error = await call
        wants = DiskFull if what == "ENOSPC" and operation != "sync" else DanubeError
        assert isinstance(error, wants)
        assert [told.why for told in process.told] == [what]
        if what != "lost":
            assert disk.paths() == ["a"]
        # The next one is met by nothing.
        if what == "EMFILE":
            assert await outcome_of(_CALLS[operation](process)) is None

    run(main(), 1)


@pytest.mark.parametrize("operation", ["create", "rename", "remove"])
def test_of_a_change_whose_answer_is_lost_the_effect_is_there(operation: str) -> None:
    async def main() -> list[str]:
        disk = FaultyDisk(Random(1))
        process = disk.process()
        await put(process, "a", OLD)
        disk.aims.append(DiskAim(operation, 1, "lost"))
        with pytest.raises(DiskFailed):
            await _CALLS[operation](process)
        return disk.paths()

    assert run(main(), 1) == {"create": ["a", "new"], "rename": ["b"], "remove": []}[operation]


def test_the_nth_call_on_a_path_is_hit_and_no_other() -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1))
        process = disk.process()
        aim = DiskAim("create", 2, "ENOSPC", where=".wal")
        disk.aims.append(aim)
        for name in ("x", "1.wal", "y"):
            await process.create(name)
        with pytest.raises(DiskFull):
            await process.create("2.wal")
        await process.create("3.wal")
        assert aim.hit == "2.wal" and disk.paths() == ["1.wal", "3.wal", "x", "y"]

    run(main(), 1)


def test_a_directory_whose_name_could_not_be_synced_is_not_there() -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1))
        process = disk.process()
        disk.aims.append(DiskAim("make_directory", 1, "EIO"))
        with pytest.raises(DiskFailed):
            await process.make_directory("d/e")
        assert await process.list("") == []
        await process.make_directory("d/e")
        disk.crash()
        assert [entry.name for entry in await disk.process().list("")] == ["d"]

    run(main(), 1)


# --- kinds of disks ---


def test_files_with_unsynced_writes_keep_their_descriptors_and_the_oldest_is_synced_for_others() -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1), faults=Faults(latency_seconds_max=0.0, open_files_max=2))
        process = disk.process()
        for name in "abc":
            await process.create(name)
        await process.sync_directory("")
        for name in "ab":
            assert await process.write([Write(name, 0, [OLD])], sync=False) == [None]
        assert process.open_files == ["a", "b"] and disk.durable("a") == b""
        assert await process.write([Write("c", 0, [OLD])], sync=False) == [None]
        assert process.open_files == ["b", "c"] and disk.durable("a") == OLD
        disk.faults.no_descriptor = 1.0
        [short] = await process.write([Write("a", 0, [NEW])], sync=True)
        assert isinstance(short, ResourcesShort) and disk.content("a") == OLD
        assert process.told == [Told("write", "a", "EMFILE")]
        assert await process.write([Write("b", 0, [NEW])], sync=True) == [None]
        with pytest.raises(ResourcesShort):
            await process.rename("c", "d")
        disk.faults.no_descriptor = 0.0
        await process.rename("c", "d")
        disk.faults.no_descriptor = 1.0
        await process.sync_directory("")  # it was opened before the name was changed
        with pytest.raises(ResourcesShort):
            await process.sync_directory("")

    run(main(), 1)


def test_holes_take_no_room_on_a_sparse_disk() -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1), capacity_bytes=2 * SECTOR_BYTES, sparse=True)
        process = disk.process()
        await process.create("a")
        assert await process.write([Write("a", 100 * SECTOR_BYTES, [OLD[:SECTOR_BYTES]])], sync=False) == [None]
        assert (disk.used_bytes, disk.free_bytes) == (SECTOR_BYTES, SECTOR_BYTES)
        [full] = await process.write([Write("a", 0, [bytes(2 * SECTOR_BYTES)])], sync=False)
        assert isinstance(full, DiskFull)
        await process.truncate("a", 0)
        assert disk.free_bytes == 2 * SECTOR_BYTES

    run(main(), 1)


def test_overwriting_finds_no_room_where_a_file_system_copies_on_write() -> None:
    async def main(copies: bool) -> list[object]:
        disk = FaultyDisk(Random(1))
        process = disk.process()
        await put(process, "a", OLD)
        disk.faults.overwrites_need_space = copies
        disk.capacity_bytes = disk.used_bytes + 10
        return list(await process.write([Write("a", 0, [NEW])], sync=True))

    assert run(main(False), 1) == [None]
    [full] = run(main(True), 1)
    assert isinstance(full, DiskFull)


def test_a_cut_finds_no_room_on_a_full_disk_only_where_a_file_system_copies_on_write() -> None:
    async def main(copies: bool) -> None:
        disk = FaultyDisk(Random(1))
        process = disk.process()
        await put(process, "a", OLD)
        disk.faults.overwrites_need_space = copies
        disk.capacity_bytes = disk.used_bytes - 10  # somebody else has taken more than there was
        await process.truncate("a", 1)

    run(main(False), 1)
    with pytest.raises(DiskFull):
        run(main(True), 1)


def test_names_find_no_room_on_a_full_disk_if_names_need_any() -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1), capacity_bytes=0, faults=Faults(latency_seconds_max=0.0, names_need_space=True))
        process = disk.process()
        for call in (process.create("a"), process.make_directory("d")):
            with pytest.raises(DiskFull):
                await call
        assert disk.paths() == [] and await process.list("") == []

    run(main(), 1)


def test_one_file_may_be_slow_while_others_are_quick() -> None:
    async def main() -> None:
        disk = FaultyDisk(Random(1), faults=Faults(latency_seconds_max=0.0, slow="slow", slow_seconds_max=100.0))
        process = disk.process()
        loop = asyncio.get_running_loop()
        await process.create("quick")
        assert loop.time() == 0
        await process.create("slow")
        assert loop.time() > 1

    run(main(), 1)
