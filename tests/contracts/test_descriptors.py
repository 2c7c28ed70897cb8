"""More files than may be open: FileDisk syncs and closes the oldest, and forgets no failure."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydanube.config import open_files
from pydanube.errors import DiskFailed, DiskFull, ResourcesShort
from pydanube.ports import Write
from pydanube.stores.disk.descriptors import Descriptors
from pydanube.stores.disk.directories import EXPECTED_MAX, Directories
from pydanube.stores.disk.files import FileDisk
from tests.contracts.test_files import made
from tests.contracts.test_files import open_files as open_below

NAMES = [f"f{number:03}" for number in range(40)]
SHORT_OF = [errno.EMFILE, errno.ENFILE, errno.ENOMEM]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FileDisk]:
    disk = FileDisk(tmp_path, descriptors_max=4)
    yield disk
    disk.close()


# --- too many unsynced ------------------------------------------------------------------------------


@pytest.mark.parametrize("sync", [False, True])
async def test_one_write_of_many_files_never_has_more_open_than_allowed(
    disk: FileDisk, sync: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(disk, *NAMES)
    most = 0
    write = os.pwritev

    def pwritev(fd: int, buffers: object, position: int) -> int:
        nonlocal most
        most = max(most, len(open_below(disk)))
        return write(fd, buffers, position)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwritev", pwritev)
    assert await disk.write([Write(name, 0, [name.encode()]) for name in NAMES], sync=sync) == [None] * 40
    assert most <= 4 and len(open_below(disk)) <= 4
    for name in NAMES:
        assert await disk.read(name, 0, 10) == name.encode()


async def test_whatever_is_closed_with_unsynced_writes_was_synced_before(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(disk, *NAMES)
    inodes = {os.stat(f"{disk._root}/{name}").st_ino: name for name in NAMES}
    synced: set[str] = set()
    fdatasync = os.fdatasync

    def watched(fd: int) -> None:
        synced.add(inodes[os.fstat(fd).st_ino])
        fdatasync(fd)

    monkeypatch.setattr(os, "fdatasync", watched)
    await disk.write([Write(name, 0, [b"x"]) for name in NAMES], sync=False)
    assert set(NAMES) - set(open_below(disk)) == synced, "those that are still open were left to their user's sync"


async def test_a_sync_that_fails_while_room_is_made_is_told_at_every_later_sync_of_that_file(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(disk, *NAMES)
    lost = os.stat(f"{disk._root}/f001").st_ino
    fdatasync = os.fdatasync

    def fails_for_one(fd: int) -> None:
        if os.fstat(fd).st_ino == lost:
            raise OSError(errno.EIO, "lost")
        fdatasync(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fails_for_one)
        assert await disk.write([Write(name, 0, [b"x"]) for name in NAMES], sync=False) == [None] * 40
    assert "f001" not in open_below(disk), "its descriptor is not kept, its failure is"
    for _ in range(2):
        failures = await disk.sync(["f000", "f001", "f002"])
        assert [type(failure) for failure in failures] == [type(None), DiskFailed, type(None)]
    (failure,) = await disk.write([Write("f001", 1, [b"y"])], sync=True)
    assert isinstance(failure, DiskFailed) and failure.why == "lost"
    await disk.rename("f001", "moved")
    assert [type(failure) for failure in await disk.sync(["moved"])] == [DiskFailed]
    await disk.remove("moved")
    await disk.create("moved")
    assert await disk.write([Write("moved", 0, [b"new"])], sync=True) == [None], "another file of that name is well"


async def test_a_file_whose_first_write_found_no_descriptor_gets_no_other_of_the_same_call(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what comes behind a gap could be whole, and synced, although it was refused."""
    await made(disk, "a", "b", *NAMES)
    await disk.write([Write(name, 0, [b"x"]) for name in NAMES], sync=True)  # a and b are not open any more
    opened = os.open
    short = [True]

    def open_later(path: str, flags: int, mode: int = 0o777) -> int:
        if path.endswith("/a") and short:
            short.clear()
            raise OSError(errno.ENFILE, "Too many open files in system")
        return opened(path, flags, mode)

    monkeypatch.setattr(Descriptors, "_give_back", lambda self: False)
    monkeypatch.setattr(os, "open", open_later)
    results = await disk.write([Write("a", 0, [b"1"]), Write("a", 1, [b"2"]), Write("b", 0, [b"3"])], sync=True)
    assert [type(result) for result in results] == [ResourcesShort, ResourcesShort, type(None)]
    assert await disk.size("a") == 0


# --- none left at all -------------------------------------------------------------------------------


@pytest.mark.parametrize("code", SHORT_OF)
async def test_a_file_that_cannot_be_opened_now_is_short_of_resources_and_not_a_failed_disk(
    disk: FileDisk, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(disk, "a", "b")
    await disk.make_directory("d")

    def none_left(*arguments: object, **named: object) -> int:
        raise OSError(code, os.strerror(code))

    disk._descriptors.drop("a")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", none_left)
        patch.setattr(os, "scandir", none_left)
        patch.setattr(os, "mkdir", none_left)
        failures = [*await disk.write([Write("a", 0, [b"x"])], sync=True), *await disk.sync(["a"])]
        for call in (
            disk.create("c"), disk.read("a", 0, 1), disk.size("a"), disk.truncate("a", 0), disk.list(""),
            disk.sync_directory("d"), disk.make_directory("e"), disk.rename("a", "d/a"), disk.lock("LOCK"),
        ):  # fmt: skip
            with pytest.raises(ResourcesShort) as caught:
                await call
            failures.append(caught.value)
    for failure in failures:
        assert isinstance(failure, ResourcesShort) and isinstance(failure, DiskFull) and failure.retryable
        assert os.strerror(code).lower() in str(failure) and "nothing was written" in str(failure)
    assert await disk.write([Write("a", 0, [b"x"])], sync=True) == [None]


@pytest.mark.parametrize("code", SHORT_OF)
async def test_a_sync_that_fails_for_want_of_memory_is_a_failed_sync_all_the_same(
    disk: FileDisk, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it was to keep may be lost, whatever the reason."""
    await made(disk, "a")

    def fdatasync(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    (failure,) = await disk.write([Write("a", 0, [b"x"])], sync=True)
    assert isinstance(failure, DiskFailed)


async def test_a_name_that_was_renamed_can_be_synced_when_nothing_can_be_opened_any_more(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be taken back: a segment bounds the one before it from the rename on."""
    await made(disk)
    await disk.make_directory("d")
    await disk.create("d/a.tmp")
    await disk.rename("d/a.tmp", "d/a")
    synced = []
    fsync = os.fsync

    def watched(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def none_left(*arguments: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(os, "open", none_left)
    await disk.sync_directory("d")
    assert synced == [f"{disk._root}/d"]
    with pytest.raises(ResourcesShort):  # the one that was kept for it is used up
        await disk.sync_directory("d")


async def test_a_directory_made_again_is_not_taken_for_the_one_before(disk: FileDisk) -> None:
    await disk.make_directory("d")
    await disk.create("d/a.tmp")
    await disk.rename("d/a.tmp", "d/a")  # and nobody syncs it
    await disk.remove("d/a")
    await disk.remove("d")
    await disk.make_directory("d")
    fd = disk._names._directories.open(f"{disk._root}/d")
    assert os.fstat(fd).st_ino == os.stat(f"{disk._root}/d").st_ino
    os.close(fd)


async def test_directories_that_wait_for_a_sync_which_never_comes_are_closed_in_the_end(disk: FileDisk) -> None:
    await made(disk)
    for number in range(EXPECTED_MAX + 8):
        await disk.make_directory(f"d{number}")
        await disk.create(f"d{number}/a")
        await disk.rename(f"d{number}/a", f"d{number}/b")
    assert len(disk._names._directories._expected) == EXPECTED_MAX


# --- directories ------------------------------------------------------------------------------------


def test_who_waits_for_the_sync_of_a_directory_shares_the_next_one_and_never_the_one_that_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = Directories(lambda opens: opens())
    running, go_on = threading.Event(), threading.Event()
    syncs = []

    def fsync(fd: int) -> None:
        syncs.append(fd)
        running.set()
        go_on.wait(10)

    monkeypatch.setattr(os, "fsync", fsync)

    def sync() -> None:
        directories.sync(str(tmp_path), directories.open(str(tmp_path)))

    threads = [threading.Thread(target=sync) for _ in range(6)]
    threads[0].start()
    assert running.wait(10)
    for thread in threads[1:]:
        thread.start()
    while len(directories._next) < 1:
        pass
    assert len(syncs) == 1
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert 2 <= len(syncs) <= 3, "one ran, and five shared the next (one may have come too late for it)"


def test_a_failed_sync_of_a_directory_fails_for_all_who_share_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = Directories(lambda opens: opens())
    go_on = threading.Event()
    failed: list[object] = []

    def fsync(fd: int) -> None:
        go_on.wait(10)
        raise OSError(errno.EIO, "lost")

    monkeypatch.setattr(os, "fsync", fsync)

    def sync() -> None:
        try:
            directories.sync(str(tmp_path), directories.open(str(tmp_path)))
        except OSError as error:
            failed.append(error.errno)

    threads = [threading.Thread(target=sync) for _ in range(5)]
    for thread in threads:
        thread.start()
    go_on.set()
    for thread in threads:
        thread.join(10)
    assert failed == [errno.EIO] * 5


async def test_directories_made_side_by_side_are_all_synced_before_anybody_is_told(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(disk)
    fsync, synced = os.fsync, set()

    def watched(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        names = {f"{path}/{name}" for name in os.listdir(path)}
        fsync(fd)
        synced.update(names)

    monkeypatch.setattr(os, "fsync", watched)

    async def make(number: int) -> None:
        await disk.make_directory(f"wal/ns/topic{number}/1")
        for each in ("wal", "wal/ns", f"wal/ns/topic{number}", f"wal/ns/topic{number}/1"):
            assert f"{disk._root}/{each}" in synced, each

    await asyncio.gather(*map(make, range(20)))
    assert not disk._names._unsynced_names


# --- shares -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [256, 1024, 20_000, 65_536, 1 << 20])
def test_the_shares_of_a_limit_fit_into_it_with_a_reserve_for_the_rest(limit: int) -> None:
    share = open_files.shares(limit)
    taken = share.files + share.native + share.grpc + share.admin + 2 * share.http
    assert limit - taken >= max(open_files.REST_MIN, limit // 8)
    assert min(share) >= 3


def test_a_limit_that_is_far_too_low_leaves_one_of_each() -> None:
    assert min(open_files.shares(32)) >= 1


@pytest.mark.parametrize(("soft", "hard", "found"), [(64, 300, 300), (300, 300, 300)])
def test_the_limit_is_raised_as_far_as_the_system_allows(soft: int, hard: int, found: int) -> None:
    script = (
        "import resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        "from pydanube.config import open_files\n"
        "print(open_files.raise_limit().limit, resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60).stdout
    assert told.strip() == f"{found} ({found}, {hard})"
