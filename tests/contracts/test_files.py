"""What FileDisk does beyond the port: failing system calls, descriptors, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from pydanube.errors import DirectoryInUse, DiskFailed, DiskFull
from pydanube.ports import Write
from pydanube.stores.disk import file_writer, files
from pydanube.stores.disk.files import FileDisk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FileDisk]:
    disk = FileDisk(tmp_path / "new" / "root", descriptors_max=3)
    yield disk
    disk.close()


def open_files(disk: FileDisk) -> list[str]:
    """The names below the root that this process has open, as the system sees it."""
    targets = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # another thread has closed it
            targets.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sorted(os.path.basename(target) for target in targets if target.startswith(disk._root + "/"))


async def made(disk: FileDisk, *names: str) -> None:
    await disk.make_directory("")
    for name in names:
        await disk.create(name)


# --- failing system calls ---------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
async def test_a_write_without_room_is_disk_full_and_stops_no_other_file(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    await made(disk, "a", "b")
    real = os.pwritev

    def pwritev(fd: int, buffers: list[bytes], position: int) -> int:
        if buffers[0] == b"too much":
            raise OSError(code, os.strerror(code))
        return real(fd, buffers, position)

    monkeypatch.setattr(os, "pwritev", pwritev)
    full, fine = await disk.write([Write("a", 0, [b"too much"]), Write("b", 0, [b"x"])], sync=True)
    assert isinstance(full, DiskFull) and full.path == "a"
    assert fine is None
    assert await disk.read("b", 0, 10) == b"x"


async def test_any_other_failed_write_is_disk_failed(disk: FileDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    await made(disk, "a")

    def pwritev(fd: int, buffers: list[bytes], position: int) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", pwritev)
    (failed,) = await disk.write([Write("a", 0, [b"x"])], sync=False)
    assert isinstance(failed, DiskFailed)
    assert (failed.path, failed.operation, failed.why) == ("a", "write", os.strerror(errno.EIO))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
async def test_a_failed_sync_fails_every_write_of_its_file_and_no_other(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """Also without room: the bytes were accepted, and are lost now."""
    await made(disk, "a", "b")
    bad = os.stat(f"{disk._root}/a").st_ino
    real = os.fdatasync
    synced = []

    def fdatasync(fd: int) -> None:
        synced.append(os.fstat(fd).st_ino)
        if synced[-1] == bad:
            raise OSError(code, os.strerror(code))
        real(fd)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    writes = [Write("a", 0, [b"1"]), Write("b", 0, [b"2"]), Write("a", 1, [b"3"])]
    results = await disk.write(writes, sync=True)
    assert [isinstance(result, DiskFailed) for result in results] == [True, False, True]
    assert isinstance(results[0], DiskFailed) and results[0].operation == "sync"
    assert len(synced) == 2  # once for each file
    assert [isinstance(result, DiskFailed) for result in await disk.sync(["b", "a"])] == [False, True]


@pytest.mark.parametrize("writes", [1, 2])
async def test_a_failed_sync_is_told_also_if_the_write_found_no_room(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    await made(disk, "a")

    def pwritev(fd: int, buffers: object, position: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fdatasync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", pwritev)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    results = await disk.write([Write("a", 0, [b"x"])] * writes, sync=True)
    assert [isinstance(result, DiskFailed) for result in results] == [True] * writes


async def test_short_writes_are_continued(disk: FileDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    await made(disk, "a")
    real = os.pwritev

    def pwritev(fd: int, buffers: list[bytes], position: int) -> int:
        return real(fd, [b"".join(buffers)[:7]], position)

    monkeypatch.setattr(os, "pwritev", pwritev)
    buffers = [b"a" * 10, b"", b"b" * 3, b"c" * 20, b""]
    assert await disk.write([Write("a", 2, buffers)], sync=True) == [None]
    assert await disk.read("a", 0, 100) == b"\0\0" + b"".join(buffers)


async def test_make_directory_syncs_every_parent_in_which_a_name_was_made(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.fsync
    synced: list[str] = []

    def fsync(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    above = os.path.basename(os.path.dirname(os.path.dirname(disk._root)))
    await disk.make_directory("a/b")
    assert synced == [above, "new", "root", "a"]
    await disk.make_directory("a/b/c")
    assert synced[4:] == ["b"]
    await disk.make_directory("a/b/c")
    assert len(synced) == 5


async def test_a_directory_whose_name_could_not_be_synced_is_made_again_by_the_next_call(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.make_directory("")

    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(DiskFailed) as caught:
            await disk.make_directory("a")
    assert caught.value.operation == "sync"
    assert await disk.list("") == []


async def test_a_directory_that_can_neither_be_synced_nor_removed_is_synced_by_the_next_call(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.make_directory("")

    def fail(*call: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        patch.setattr(os, "rmdir", fail)
        for path in ("a", "a", "a/b"):
            with pytest.raises(DiskFailed):
                await disk.make_directory(path)
    real_fsync, synced = os.fsync, []

    def fsync(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    await disk.make_directory("a/b")
    assert synced == ["root", "a"]
    await disk.make_directory("a/b")
    assert synced == ["root", "a"]


async def test_a_directory_that_another_process_makes_at_the_same_moment_is_no_error_and_is_synced(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await disk.make_directory("")
    real_mkdir, real_fsync, synced = os.mkdir, os.fsync, []

    def mkdir(path: str, mode: int = 0o777) -> None:
        real_mkdir(path, mode)
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def fsync(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        real_fsync(fd)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(os, "fsync", fsync)
    await disk.make_directory("a/b")
    assert synced == ["root", "a"]


# --- descriptors ------------------------------------------------------------------------------------


async def test_no_more_files_stay_open_than_allowed(disk: FileDisk) -> None:
    await made(disk, *"abcdef")
    await disk.write([Write(name, 0, [b"x"]) for name in "abcdef"], sync=True)
    assert open_files(disk) == ["d", "e", "f"]
    await disk.read("a", 0, 1)
    assert open_files(disk) == ["a", "e", "f"]


async def test_a_file_with_unsynced_writes_stays_open_until_its_sync(disk: FileDisk) -> None:
    await made(disk, *"abcdef")
    await disk.write([Write(name, 0, [b"x"]) for name in "abc"], sync=False)
    for name in "def":
        await disk.read(name, 0, 1)
    assert open_files(disk) == ["a", "b", "c"]
    await disk.sync(["a", "b"])
    await disk.read("f", 0, 1)
    assert len(open_files(disk)) == 3 and {"c", "f"} < set(open_files(disk))


async def test_after_a_failed_sync_every_later_sync_of_that_file_fails(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of a lost page once; whoever asks next must not hear that all is well."""
    await made(disk, *"abcdef")

    def fdatasync(fd: int) -> None:
        raise OSError(errno.EIO, "lost")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        (failure,) = await disk.write([Write("a", 0, [b"x"])], sync=True)
        assert isinstance(failure, DiskFailed)
    for name in "bcdef":
        await disk.read(name, 0, 1)  # other files come and go; this one's descriptor stays
    (failure,) = await disk.sync(["a"])
    assert isinstance(failure, DiskFailed) and failure.why == "lost"
    assert await disk.write([Write("b", 0, [b"x"])], sync=True) == [None]


async def test_a_write_that_comes_during_a_sync_keeps_the_file_open(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(disk, *"abcd")
    await disk.write([Write("a", 0, [b"x"])], sync=False)
    syncing, go_on = threading.Event(), threading.Event()

    def fdatasync(fd: int) -> None:
        syncing.set()
        go_on.wait(10)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    sync = asyncio.create_task(disk.sync(["a"]))
    await asyncio.to_thread(syncing.wait, 10)
    await disk.write([Write("a", 1, [b"y"])], sync=False)
    go_on.set()
    assert await sync == [None]
    for name in "bcd":
        await disk.read(name, 0, 1)
    assert "a" in open_files(disk)


async def test_a_disk_that_keeps_no_descriptors_sees_what_others_do_to_its_names(tmp_path: Path) -> None:
    ours, theirs = FileDisk(tmp_path, descriptors_max=0), FileDisk(tmp_path)
    await made(ours, "a")
    await ours.write([Write("a", 0, [b"ours"])], sync=True)
    assert open_files(ours) == []
    await made(theirs, "b")
    await theirs.write([Write("b", 0, [b"theirs"])], sync=True)
    await theirs.rename("b", "a")
    assert await ours.read("a", 0, 10) == b"theirs"
    await theirs.remove("a")
    with pytest.raises(FileNotFoundError):
        await ours.read("a", 0, 10)
    ours.close()
    theirs.close()


async def test_removed_and_replaced_files_are_closed(disk: FileDisk) -> None:
    await made(disk, "a", "b", "c")
    await disk.write([Write(name, 0, [name.encode()]) for name in "abc"], sync=False)
    await disk.remove("a")
    await disk.rename("b", "c")
    assert open_files(disk) == ["c"]
    assert await disk.read("c", 0, 1) == b"b"


async def test_close_leaves_nothing_open(disk: FileDisk) -> None:
    await made(disk, "a", "b")
    await disk.write([Write("a", 0, [b"x"])], sync=False)
    await disk.lock("LOCK")
    disk.close()
    assert open_files(disk) == []


async def test_a_write_of_many_files_is_one_hop(disk: FileDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    await made(disk, *"abcdef")
    loop = asyncio.get_running_loop()
    real, hops = loop.call_soon_threadsafe, []

    def call_soon_threadsafe(*arguments: object, **options: object) -> object:
        hops.append(arguments)
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "call_soon_threadsafe", call_soon_threadsafe)
    await disk.write([Write(name, 0, [b"x"]) for name in "abcdef"], sync=True)
    assert len(hops) == 1


# --- on the spot ------------------------------------------------------------------------------------


class Syncs:
    """A disk whose syncs take the time that a test says, and who waited for each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0001
        self.on_the_spot: list[bool] = []
        self._now = 0.0
        self._loop_thread = threading.get_ident()
        monkeypatch.setattr(file_writer, "time", SimpleNamespace(perf_counter=lambda: self._now))
        monkeypatch.setattr(os, "fdatasync", self._fdatasync)

    def _fdatasync(self, fd: int) -> None:
        self._now += self.seconds
        self.on_the_spot.append(threading.get_ident() == self._loop_thread)


async def test_small_writes_are_done_on_the_spot_once_the_disk_has_proved_quick(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(disk, "a")
    syncs = Syncs(monkeypatch)
    for number in range(200):
        assert await disk.write([Write("a", number, [b"x"])], sync=True) == [None]
    assert not any(syncs.on_the_spot[:100]) and all(syncs.on_the_spot[-20:])
    assert await disk.read("a", 0, 1000) == b"x" * 200


async def test_a_disk_that_stalls_once_is_left_to_threads_for_a_while(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(disk, "a")
    syncs = Syncs(monkeypatch)
    disk._writer._small_seconds = syncs.seconds

    async def write() -> bool:
        await disk.write([Write("a", 0, [b"x"])], sync=True)
        return syncs.on_the_spot[-1]

    syncs.seconds = 1.0
    assert await write(), "it was quick until now"
    syncs.seconds = 0.0001
    assert not any([await write() for _ in range(80)])
    assert any([await write() for _ in range(60)])


@pytest.mark.parametrize(
    "writes",
    [
        [Write("a", 0, [bytes(files.SPOT_BYTES + 1)])],
        [Write("a", 0, [b"x"]), Write("b", 0, [b"x"]), Write("a", 1, [b"x"])],
    ],
)
async def test_large_writes_and_many_never_hold_up_the_loop(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch, writes: list[Write]
) -> None:
    await made(disk, "a", "b")
    syncs = Syncs(monkeypatch)
    disk._writer._small_seconds = 0.0
    await disk.write(writes, sync=True)
    assert syncs.on_the_spot and not any(syncs.on_the_spot)


async def test_nothing_is_done_on_the_spot_while_a_thread_is_busy(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await made(disk, "a", "b")
    syncs = Syncs(monkeypatch)
    disk._writer._small_seconds = 0.0
    await asyncio.gather(disk.read("b", 0, 1), disk.write([Write("a", 0, [b"x"])], sync=True))
    assert syncs.on_the_spot == [False]


async def test_nothing_is_done_on_the_spot_in_a_directory_of_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FileDisk(tmp_path, descriptors_max=0)
    await made(disk, "a")
    syncs = Syncs(monkeypatch)
    disk._writer._small_seconds = 0.0
    await disk.write([Write("a", 0, [b"x"])], sync=True)
    assert syncs.on_the_spot == [False]
    disk.close()


@pytest.mark.parametrize("call", ["pwritev", "fdatasync"])
async def test_a_write_on_the_spot_says_what_failed_and_trusts_the_file_no_more(
    disk: FileDisk, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, "the cable is loose")

    await made(disk, "a")
    disk._writer._small_seconds = 0.0
    with monkeypatch.context() as failing:
        failing.setattr(os, call, fail)
        (failure,) = await disk.write([Write("a", 0, [b"x"])], sync=True)
    assert isinstance(failure, DiskFailed) and "the cable is loose" in str(failure)
    assert failure.operation == ("write" if call == "pwritev" else "sync")
    disk._writer._small_seconds = 0.0
    (again,) = await disk.write([Write("a", 0, [b"x"])], sync=True)
    assert (again is None) == (call == "pwritev"), "a sync that failed once may have lost what it says is safe"
    disk._writer._small_seconds = 0.0
    (missing,) = await disk.write([Write("b", 0, [b"x"])], sync=True)
    assert isinstance(missing, DiskFailed) and missing.path == "b"


# --- processes --------------------------------------------------------------------------------------


HOLDER = """
import asyncio, sys
from pydanube.stores.disk.files import FileDisk
disk = FileDisk(sys.argv[1])
asyncio.run(disk.lock("LOCK"))
print("locked", flush=True)
sys.stdin.read()
"""


def start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


async def test_the_lock_of_a_killed_process_is_free_at_once(disk: FileDisk) -> None:
    await disk.make_directory("")
    command = [sys.executable, "-c", HOLDER, disk._root]
    with start(command) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        with pytest.raises(DirectoryInUse) as caught:
            await disk.lock("LOCK")
        assert caught.value.pid == holder.pid
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    await disk.lock("LOCK")
    assert await disk.read("LOCK", 0, 100) == b"%d\n" % os.getpid()


# --- cancellation -----------------------------------------------------------------------------------


async def test_a_cancelled_call_ends_with_its_thread_and_a_waiting_one_is_never_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FileDisk(tmp_path, threads_max=1)
    await disk.create("a")
    syncing, go_on = threading.Event(), threading.Event()

    def fdatasync(fd: int) -> None:
        syncing.set()
        go_on.wait(10)

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    running = asyncio.create_task(disk.write([Write("a", 0, [b"x"])], sync=True))
    await asyncio.to_thread(syncing.wait, 10)
    queued = asyncio.create_task(disk.write([Write("a", 1, [b"y"])], sync=False))
    await asyncio.sleep(0)
    running.cancel()
    queued.cancel()
    await asyncio.wait([queued])
    for _ in range(3):
        running.cancel()  # however often
        await asyncio.sleep(0)
    assert not running.done()
    go_on.set()
    await asyncio.wait([running])
    assert running.cancelled() and queued.cancelled()
    assert await disk.read("a", 0, 10) == b"x"
    disk.close()
