"""What every Disk does while the power is on. What survives a power cut is tested on the faulty disk."""

from __future__ import annotations

import asyncio
from pathlib import PurePosixPath

import pytest

from pydanube.errors import DirectoryInUse, DiskFailed
from pydanube.ports import Buffer, Disk, Entry, Write
from tests.contracts.adapters import DiskCase


async def make(disk: Disk, path: str, data: bytes = b"") -> None:
    """A file with these bytes, in a directory that is there."""
    folder = str(PurePosixPath(path).parent)
    if folder != ".":
        await disk.make_directory(folder)
    await disk.create(path)
    assert await disk.write([Write(path, 0, [data])], sync=True) == [None]


async def content(disk: Disk, path: str) -> bytes:
    return await disk.read(path, 0, await disk.size(path))


# --- create -----------------------------------------------------------------------------------------


async def test_create_makes_an_empty_file(disk: Disk) -> None:
    await disk.create("a")
    assert await disk.size("a") == 0
    assert await content(disk, "a") == b""


async def test_create_refuses_a_name_that_is_taken_and_leaves_the_file(disk: Disk) -> None:
    await make(disk, "a", b"kept")
    await disk.make_directory("b")
    for name in ("a", "b"):
        with pytest.raises(FileExistsError):
            await disk.create(name)
    assert await content(disk, "a") == b"kept"


async def test_create_needs_its_directory(disk: Disk) -> None:
    with pytest.raises(FileNotFoundError):
        await disk.create("missing/a")


async def test_a_name_can_be_made_again_after_its_removal_and_starts_empty(disk: Disk) -> None:
    await make(disk, "a", b"old")
    await disk.remove("a")
    await disk.create("a")
    assert await content(disk, "a") == b""


# --- write ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [False, True])
async def test_buffers_are_written_one_after_the_other_at_the_position(disk: Disk, sync: bool) -> None:
    await make(disk, "a", b"0123456789")
    buffers: list[Buffer] = [b"A", bytearray(b"BC"), b"", memoryview(b"xDEx")[1:3]]
    assert await disk.write([Write("a", 2, buffers)], sync=sync) == [None]
    assert await content(disk, "a") == b"01ABCDE789"


async def test_a_buffer_of_wide_items_is_written_as_its_bytes(disk: Disk) -> None:
    await make(disk, "a")
    buffers: list[Buffer] = [memoryview(b"12345678").cast("I"), b"9"]
    assert await disk.write([Write("a", 0, buffers)], sync=True) == [None]
    assert await content(disk, "a") == b"123456789"


async def test_writing_past_the_end_extends_the_file_with_zeros_between(disk: Disk) -> None:
    await make(disk, "a", b"ab")
    assert await disk.write([Write("a", 1, [b"BCD"]), Write("a", 6, [b"G"])], sync=True) == [None, None]
    assert await content(disk, "a") == b"aBCD\0\0G"


@pytest.mark.parametrize("buffers", [[], [b""]])
async def test_writing_nothing_changes_nothing(disk: Disk, buffers: list[bytes]) -> None:
    await make(disk, "a", b"ab")
    assert await disk.write([Write("a", 9, buffers)], sync=True) == [None]
    assert await content(disk, "a") == b"ab"
    assert await disk.write([], sync=True) == []


async def test_one_call_writes_many_files_and_returns_one_result_for_each_write(disk: Disk) -> None:
    paths = [f"topics/{i}" for i in range(200)]
    for path in paths:
        await make(disk, path)
    writes = [Write(path, 0, [path.encode()]) for path in paths]
    writes += [Write(path, len(path), [b"!"]) for path in paths]
    assert await disk.write(writes, sync=True) == [None] * 400
    for path in paths:
        assert await content(disk, path) == path.encode() + b"!"


async def test_writes_of_one_call_to_one_file_take_effect_in_order(disk: Disk) -> None:
    await make(disk, "a")
    writes = [Write("a", 0, [b"first"]), Write("a", 0, [b"SEC"]), Write("a", 2, [b"3"])]
    assert await disk.write(writes, sync=True) == [None] * 3
    assert await content(disk, "a") == b"SE3st"


async def test_a_write_of_thousands_of_buffers_is_whole(disk: Disk) -> None:
    await make(disk, "a")
    buffers = [bytes([i % 251]) * (i % 7) for i in range(5000)]
    assert await disk.write([Write("a", 3, buffers)], sync=False) == [None]
    assert await content(disk, "a") == b"\0\0\0" + b"".join(buffers)


@pytest.mark.parametrize("sync", [False, True])
async def test_a_file_that_is_not_there_fails_alone(disk: Disk, sync: bool) -> None:
    await make(disk, "a")
    await make(disk, "b")
    writes = [Write("a", 0, [b"1"]), Write("missing", 0, [b"2"]), Write("b", 0, [b"3"])]
    first, failed, last = await disk.write(writes, sync=sync)
    assert (first, last) == (None, None)
    assert isinstance(failed, DiskFailed)
    assert (failed.path, failed.operation) == ("missing", "write")
    assert await content(disk, "a") + await content(disk, "b") == b"13"
    assert [entry.name for entry in await disk.list("")] == ["a", "b"]  # writing makes no file


# --- sync -------------------------------------------------------------------------------------------


async def test_sync_returns_one_result_for_each_path(disk: Disk) -> None:
    await make(disk, "a")
    await make(disk, "b")
    await disk.write([Write("a", 0, [b"1"]), Write("b", 0, [b"2"])], sync=False)
    assert await disk.sync(["a", "b", "a"]) == [None] * 3
    assert await disk.sync([]) == []


async def test_sync_of_a_file_that_is_not_there_fails_alone(disk: Disk) -> None:
    await make(disk, "a")
    failed, fine = await disk.sync(["missing", "a"])
    assert isinstance(failed, DiskFailed)
    assert (failed.path, failed.operation) == ("missing", "sync")
    assert fine is None


async def test_sync_directory_takes_the_root_and_any_directory(disk: Disk) -> None:
    await make(disk, "x/y/a")
    for path in ("", "x", "x/y"):
        await disk.sync_directory(path)
    with pytest.raises(FileNotFoundError):
        await disk.sync_directory("missing")


# --- read, size, truncate ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("position", "length", "expected"),
    [
        (0, 10, b"0123456789"),
        (3, 4, b"3456"),
        (8, 10, b"89"),
        (10, 5, b""),
        (99, 5, b""),
        (4, 0, b""),
        (0, 1 << 50, b"0123456789"),
    ],
)
async def test_a_read_is_shorter_only_where_the_file_ends(
    disk: Disk, position: int, length: int, expected: bytes
) -> None:
    await make(disk, "a", b"0123456789")
    assert await disk.read("a", position, length) == expected


async def test_what_was_written_is_read_before_any_sync(disk: Disk) -> None:
    await make(disk, "a", b"old")
    await disk.write([Write("a", 0, [b"new and longer"])], sync=False)
    assert await content(disk, "a") == b"new and longer"


async def test_truncate_cuts_the_end_and_later_writes_extend_again(disk: Disk) -> None:
    await make(disk, "a", b"0123456789")
    await disk.truncate("a", 4)
    assert await content(disk, "a") == b"0123"
    await disk.truncate("a", 4)
    await disk.write([Write("a", 6, [b"x"])], sync=True)
    assert await content(disk, "a") == b"0123\0\0x"
    await disk.truncate("a", 0)
    assert await content(disk, "a") == b""


async def test_a_file_that_is_not_there_is_not_found(disk: Disk) -> None:
    await disk.make_directory("directory")
    for path in ("missing", "directory/missing", "missing/missing"):
        with pytest.raises(FileNotFoundError) as caught:
            await disk.read(path, 0, 1)
        assert caught.value.filename == path
        with pytest.raises(FileNotFoundError):
            await disk.size(path)
        with pytest.raises(FileNotFoundError):
            await disk.truncate(path, 0)


async def test_a_directory_is_not_a_file(disk: Disk) -> None:
    await disk.make_directory("directory")
    with pytest.raises(DiskFailed):
        await disk.read("directory", 0, 1)
    assert isinstance((await disk.write([Write("directory", 0, [b"x"])], sync=True))[0], DiskFailed)


# --- list, make_directory ---------------------------------------------------------------------------


async def test_list_is_sorted_and_tells_files_from_directories(disk: Disk) -> None:
    await make(disk, "t/b", b"12345")
    await make(disk, "t/a")
    await make(disk, "t/c/inside", b"x")
    await make(disk, "tt", b"x")
    assert await disk.list("t") == [Entry("a", False, 0), Entry("b", False, 5), Entry("c", True, 0)]
    assert await disk.list("") == [Entry("t", True, 0), Entry("tt", False, 1)]


async def test_a_directory_that_is_not_there_is_empty(disk: Disk) -> None:
    assert await disk.list("missing") == []
    assert await disk.list("missing/too") == []


async def test_make_directory_makes_missing_parents_and_minds_no_existing_one(disk: Disk) -> None:
    await disk.make_directory("a/b/c")
    await disk.make_directory("a/b")
    await disk.make_directory("a/b/c/d")
    await disk.make_directory("")
    assert await disk.list("a/b/c") == [Entry("d", True, 0)]


async def test_make_directory_refuses_the_name_of_a_file(disk: Disk) -> None:
    await make(disk, "a", b"kept")
    with pytest.raises(FileExistsError):
        await disk.make_directory("a")
    assert await content(disk, "a") == b"kept"


async def test_many_tasks_may_make_one_directory(disk: Disk) -> None:
    await asyncio.gather(*(disk.make_directory(f"a/b/{i % 2}") for i in range(10)))
    assert [entry.name for entry in await disk.list("a/b")] == ["0", "1"]


# --- rename, remove ---------------------------------------------------------------------------------


async def test_rename_moves_a_file_and_its_bytes(disk: Disk) -> None:
    await make(disk, "x/a", b"bytes")
    await disk.make_directory("y")
    await disk.rename("x/a", "y/b")
    assert await disk.list("x") == []
    assert await content(disk, "y/b") == b"bytes"
    with pytest.raises(FileNotFoundError):
        await disk.size("x/a")


async def test_rename_replaces_what_had_the_name(disk: Disk) -> None:
    await make(disk, "new", b"new")
    await make(disk, "old", b"an older one")
    assert await content(disk, "old") == b"an older one"
    await disk.rename("new", "old")
    assert await content(disk, "old") == b"new"
    await disk.write([Write("old", 3, [b"er"])], sync=True)
    assert await content(disk, "old") == b"newer"
    assert [entry.name for entry in await disk.list("")] == ["old"]


async def test_unsynced_writes_can_be_synced_under_the_new_name(disk: Disk) -> None:
    await make(disk, "a")
    await disk.write([Write("a", 0, [b"bytes"])], sync=False)
    await disk.rename("a", "b")
    assert await disk.sync(["b"]) == [None]
    assert await content(disk, "b") == b"bytes"


async def test_a_file_can_be_renamed_to_its_own_name(disk: Disk) -> None:
    await make(disk, "a", b"bytes")
    await disk.rename("a", "a")
    assert await content(disk, "a") == b"bytes"


async def test_rename_needs_its_file_and_the_directory(disk: Disk) -> None:
    await make(disk, "a", b"kept")
    with pytest.raises(FileNotFoundError):
        await disk.rename("missing", "b")
    with pytest.raises(FileNotFoundError):
        await disk.rename("a", "missing/b")
    assert await content(disk, "a") == b"kept"


async def test_rename_new_moves_a_file_and_its_bytes(disk: Disk) -> None:
    await make(disk, "here/a", b"bytes")
    await disk.make_directory("there")
    await disk.rename_new("here/a", "there/b")
    assert await content(disk, "there/b") == b"bytes"
    assert await disk.list("here") == []


async def test_rename_new_refuses_a_name_that_is_taken_and_changes_nothing(disk: Disk) -> None:
    await make(disk, "a", b"first")
    await make(disk, "b", b"second")
    await disk.make_directory("c")
    for taken in ("b", "c"):
        with pytest.raises(FileExistsError):
            await disk.rename_new("a", taken)
    assert await content(disk, "a") == b"first"
    assert await content(disk, "b") == b"second"


async def test_rename_new_needs_its_file_and_the_directory(disk: Disk) -> None:
    await make(disk, "a", b"kept")
    with pytest.raises(FileNotFoundError):
        await disk.rename_new("missing", "b")
    with pytest.raises(FileNotFoundError):
        await disk.rename_new("a", "nowhere/b")
    assert await content(disk, "a") == b"kept"


async def test_of_many_who_want_one_new_name_exactly_one_gets_it(disk_case: DiskCase) -> None:
    disks = [disk_case.disk, disk_case.another] * 5
    for number in range(10):
        await make(disk_case.disk, f"{number}", b"%d" % number)
    wishes = [disk.rename_new(f"{number}", "name") for number, disk in enumerate(disks)]
    results = await asyncio.gather(*wishes, return_exceptions=True)
    (winner,) = (number for number, result in enumerate(results) if result is None)
    assert sum(isinstance(result, FileExistsError) for result in results) == 9
    assert await content(disk_case.disk, "name") == b"%d" % winner
    assert len(await disk_case.disk.list("")) == 10


async def test_remove_takes_files_and_empty_directories(disk: Disk) -> None:
    await make(disk, "x/a", b"bytes")
    await disk.remove("x/a")
    await disk.remove("x")
    assert await disk.list("") == []
    with pytest.raises(FileNotFoundError):
        await disk.size("x/a")


async def test_removing_what_is_not_there_is_no_error(disk: Disk) -> None:
    await disk.remove("missing")
    await disk.remove("missing/too")


async def test_a_directory_with_something_in_it_stays(disk: Disk) -> None:
    await make(disk, "x/a", b"kept")
    with pytest.raises(DiskFailed) as caught:
        await disk.remove("x")
    assert (caught.value.path, caught.value.operation) == ("x", "remove")
    assert await content(disk, "x/a") == b"kept"


# --- paths, room, order -----------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/absolute", "..", "../up", "a/../../up", "a/..", "./a", "a//b", "a/", "a\0b"])
async def test_a_path_that_could_leave_the_root_is_a_bug(disk: Disk, path: str) -> None:
    await make(disk, "a")
    for call in (
        disk.create(path),
        disk.write([Write(path, 0, [b"x"])], sync=True),
        disk.read(path, 0, 1),
        disk.size(path),
        disk.list(path),
        disk.make_directory(path),
        disk.remove(path),
        disk.rename("a", path),
    ):
        with pytest.raises(AssertionError):
            await call


async def test_free_bytes_is_a_number_of_bytes(disk: Disk) -> None:
    assert await disk.free_bytes() > 1_000_000


async def test_many_tasks_may_work_on_their_own_files_at_once(disk: Disk) -> None:
    async def one(i: int) -> bytes:
        path = f"{i}/file"
        await make(disk, path, b"start ")
        for round_ in range(5):
            await disk.write([Write(path, 6 + round_, [b"%d" % round_])], sync=round_ % 2 == 0)
        await disk.rename(path, path + ".done")
        return await content(disk, path + ".done")

    assert await asyncio.gather(*(one(i) for i in range(20))) == [b"start 01234"] * 20


async def test_what_follows_a_cancelled_write_comes_after_it(disk: Disk) -> None:
    await make(disk, "a")
    for _ in range(20):
        write = asyncio.create_task(disk.write([Write("a", 0, [b"x" * 100_000])], sync=False))
        await asyncio.sleep(0)
        write.cancel()
        await asyncio.wait([write])
        await disk.truncate("a", 0)
        assert await disk.size("a") == 0


# --- lock -------------------------------------------------------------------------------------------


async def test_a_held_lock_refuses_another_process_and_names_its_holder(disk_case: DiskCase) -> None:
    await disk_case.disk.lock("LOCK")
    with pytest.raises(DirectoryInUse) as caught:
        await disk_case.another.lock("LOCK")
    assert (caught.value.path, caught.value.pid) == ("LOCK", disk_case.pid)


async def test_a_lock_is_not_taken_twice_by_its_holder(disk_case: DiskCase) -> None:
    await disk_case.disk.lock("LOCK")
    with pytest.raises(DirectoryInUse):
        await disk_case.disk.lock("LOCK")


async def test_a_lock_that_was_given_back_is_free(disk_case: DiskCase) -> None:
    await disk_case.disk.lock("LOCK")
    await disk_case.disk.unlock("LOCK")
    await disk_case.another.lock("LOCK")
    with pytest.raises(DirectoryInUse):
        await disk_case.disk.lock("LOCK")


async def test_a_lock_ends_with_its_process(disk_case: DiskCase) -> None:
    await disk_case.disk.lock("LOCK")
    disk_case.end_process()
    await disk_case.another.lock("LOCK")


async def test_locks_on_two_paths_have_nothing_to_do_with_each_other(disk_case: DiskCase) -> None:
    await disk_case.disk.lock("LOCK")
    await disk_case.another.lock("OTHER")


async def test_a_lock_needs_its_directory(disk_case: DiskCase) -> None:
    with pytest.raises(FileNotFoundError):
        await disk_case.disk.lock("missing/LOCK")
