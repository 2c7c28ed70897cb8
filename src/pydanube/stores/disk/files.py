"""A Disk on a real directory.

Every call is one hop to a thread and back, also a write of two hundred files: `write` with `sync` is the
group commit, and everything acknowledged waits for it. Files stay open between calls (`descriptors.py`).

One exception: a small write with `sync`, on a disk that has lately been quick with them, is done on the spot. The hop
takes 0.09 ms, because two threads must wake up and agree on who runs; the disk of the same machine took 0.17 ms.
Whoever publishes one message at a time waits for both. The event loop stands still meanwhile, so it is done only as
long as the average stays below SPOT_SECONDS, and a disk that stalls loses that trust at once: a stall of a second is
paid for with a hundred quick writes in a thread. Never in a directory that is shared with other processes: nobody
waits for objects.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import TypeAlias, TypeVar

from pydanube.config import open_files
from pydanube.errors import DirectoryInUse, DiskFailed, DiskFull, ResourcesShort
from pydanube.ports import Buffer, Entry, Write, WriteResult
from pydanube.stores.disk.descriptors import FILE_MODE, SHORT, Descriptor, Descriptors, sync_data
from pydanube.stores.disk.directories import Directories
from pydanube.stores.disk.paths import assert_inside
from pydanube.stores.work.threads import Threads

T = TypeVar("T")
_Results: TypeAlias = list[WriteResult]  # inside FileDisk, `list` is the port's
_Entries: TypeAlias = list[Entry]

DIRECTORY_MODE = 0o750
SYNCS_MAX = 8  # side by side; more gained nothing
LATER_SYNCS_MAX = 4  # of files that were written before, for which nobody waits as for a commit
# So that a commit finds a thread that is free, beside segments that are made and readers of old ones.
THREADS_MAX = 16
# A larger write makes the kernel look for larger pieces of free memory, which at times takes longer than the disk:
# 8 MiB in one call took 2 ms or 20 ms, in calls of 1 MiB always 2 ms.
WRITE_BYTES_MAX = 1024 * 1024
IOV_MAX = os.sysconf("SC_IOV_MAX")  # how many buffers one pwritev takes
SPOT_BYTES = 8 * 1024
SPOT_SECONDS = 0.0004
SPOT_WEIGHT = 1 / 16  # of the latest write in the average


class FileDisk:
    """Files under `root`, which `make_directory("")` makes if it is missing.

    With `descriptors_max` 0 nothing stays open between calls: for directories in which other processes rename and
    remove. There, only a write with `sync` is sure to hear of its failure. Without it, the limit of open files decides.

    A cancelled call ends when its thread has ended with it, so no call overlaps the next call of its task.
    """

    def __init__(
        self, root: str | os.PathLike[str], *, threads_max: int = THREADS_MAX, descriptors_max: int | None = None
    ) -> None:
        if descriptors_max is None:
            descriptors_max = open_files.current().files
        self._root = os.path.abspath(root)
        self._threads = Threads("disk", threads_max)
        self._syncs = ThreadPoolExecutor(SYNCS_MAX, thread_name_prefix="disk-sync")
        self._later_syncs = ThreadPoolExecutor(LATER_SYNCS_MAX, thread_name_prefix="disk-sync-later")
        self._descriptors = Descriptors(self._root, descriptors_max)
        self._directories = Directories(self._descriptors.opening)
        self._files_at_once = max(1, descriptors_max // 4)
        self._locks: dict[str, int] = {}  # lock file -> descriptor that holds it
        self._making = threading.Lock()
        self._unsynced_names: set[str] = set()  # directories that were made and whose names are not synced yet
        self._keeps_open = descriptors_max > 0
        self._may_spot = descriptors_max > 0
        self._small_seconds = 1.0  # a small write with sync, on average; trust is earned

    def close(self) -> None:
        """Ends threads, descriptors and locks, as the end of the process would. Syncs nothing."""
        self._threads.close()
        self._syncs.shutdown()
        self._later_syncs.shutdown()
        self._descriptors.close()
        self._directories.close()
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()

    # --- bytes ---

    async def create(self, path: str) -> None:
        await self._call("create", path, self._descriptors.create)

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        if not sync or len(writes) > 2 or _size(writes) > SPOT_BYTES:
            return await self._threads.call(partial(self._write, writes, sync))
        if self._may_spot and self._small_seconds < SPOT_SECONDS and self._threads.are_idle:
            return self._write_small(writes)
        return await self._threads.call(partial(self._write_small, writes))

    async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        return await self._threads.call(partial(self._sync, paths))

    async def sync_directory(self, path: str) -> None:
        await self._call("sync", path, self._sync_directory)

    async def read(self, path: str, position: int, length: int) -> bytes:
        assert position >= 0 and length >= 0
        return await self._call("read", path, partial(self._read, position=position, length=length))

    async def size(self, path: str) -> int:
        return await self._call("size", path, self._size)

    async def truncate(self, path: str, length: int) -> None:
        assert length >= 0
        await self._call("truncate", path, partial(self._truncate, length=length))

    # --- names ---

    async def list(self, path: str) -> list[Entry]:
        return await self._call("list", path, self._list)

    async def make_directory(self, path: str) -> None:
        await self._call("make", path, self._make_directory)

    async def rename(self, source: str, target: str) -> None:
        await self._call("rename", source, partial(self._rename, target=target))

    async def rename_new(self, source: str, target: str) -> None:
        await self._call("rename", target, partial(self._rename_new, source))

    async def remove(self, path: str) -> None:
        assert path, "the root stays"
        await self._call("remove", path, self._remove)

    async def free_bytes(self) -> int:
        return await self._call("measure", "", self._free_bytes)

    # --- locks ---

    async def lock(self, path: str) -> None:
        await self._call("lock", path, self._lock)

    async def unlock(self, path: str) -> None:
        assert path in self._locks, "only the holder unlocks"
        fd = self._locks.pop(path)
        await self._call("unlock", path, lambda path: os.close(fd))

    # --- on a thread ---

    async def _call(self, operation: str, path: str, function: Callable[[str], T]) -> T:
        assert_inside(path)

        def call() -> T:
            with _our_errors(path, operation):
                return function(path)

        return await self._threads.call(call)

    def _full(self, path: str) -> str:
        return f"{self._root}/{assert_inside(path)}" if path else self._root

    def _write_small(self, writes: Sequence[Write]) -> _Results:
        began = time.perf_counter()
        results = [self._write_one(writes[0])] if len(writes) == 1 else self._write(writes, True)
        self._small_seconds += (time.perf_counter() - began - self._small_seconds) * SPOT_WEIGHT
        return results

    def _write_one(self, write: Write) -> WriteResult:
        """As `_write` with sync, for the write that somebody waits for: with a tenth of the steps."""
        path, position, buffers = write
        descriptors = self._descriptors
        try:
            descriptor = descriptors.acquire(path)
        except OSError as error:
            return _not_opened(error, path, "write")
        result: WriteResult = None
        synced = 0
        try:
            try:
                _write_all(descriptor.fd, buffers, position)
            except OSError as error:
                result = _failure(error, path, "write")
            written = descriptors.wrote(descriptor)
            failure = _sync_data(descriptor, path)
            synced = 0 if failure else written
            return failure or result  # whoever could free some space and go on must hear of lost bytes
        finally:
            descriptors.release(descriptor, synced=synced)

    def _write(self, writes: Sequence[Write], sync: bool) -> _Results:
        results: _Results = []
        for slice_ in _slices(writes, self._files_at_once):
            self._make_room(len({write.path for write in slice_}))
            results += self._write_slice(slice_, sync)
        return results

    def _write_slice(self, writes: Sequence[Write], sync: bool) -> _Results:
        descriptors = self._descriptors
        results: _Results = [None] * len(writes)
        used: dict[str, Descriptor] = {}
        failed: dict[str, WriteResult] = {}
        try:
            for i, (path, position, buffers) in enumerate(writes):
                if path in failed:
                    results[i] = failed[path]  # nothing behind what is missing
                    continue
                try:
                    descriptor = used.get(path)
                    if descriptor is None:
                        descriptor = used[path] = descriptors.acquire(path)
                    _write_all(descriptor.fd, buffers, position)
                except OSError as error:
                    results[i] = failed[path] = _failure(error, path, "write")
        finally:
            # Also when a bug is on its way up: a descriptor that is never released is never closed.
            failures = self._sync_each(used, sync)
        if any(failures.values()):
            for i, write in enumerate(writes):
                results[i] = failures.get(write.path) or results[i]
        return results

    def _make_room(self, opening: int) -> None:
        """Files that were written to and that nobody has synced are synced and closed, if too many are open."""
        while oldest := self._descriptors.make_room(opening):
            written = [descriptor.writes for descriptor in oldest]
            failures = list(self._syncs.map(sync_data, oldest))
            for descriptor, writes, failed in zip(oldest, written, failures, strict=True):
                self._descriptors.release(descriptor, synced=0 if failed else writes)

    def _sync_each(self, used: dict[str, Descriptor], sync: bool) -> dict[str, DiskFailed | None]:
        """Ends the use of descriptors that were written to; first syncs each, if asked to."""

        written = {path: self._descriptors.wrote(descriptor) for path, descriptor in used.items()}
        failures: dict[str, DiskFailed | None] = {}
        if sync:
            results = self._each(self._syncs, lambda path: _sync_data(used[path], path), used)
            failures = dict(zip(used, results, strict=True))
        for path, descriptor in used.items():
            self._descriptors.release(descriptor, synced=written[path] if sync and not failures[path] else 0)
        return failures

    def _sync(self, paths: Sequence[str]) -> _Results:
        def one(path: str) -> WriteResult:
            try:
                descriptor = self._descriptors.acquire(path)
            except OSError as error:
                return _not_opened(error, path, "sync")
            written = descriptor.writes
            failure = _sync_data(descriptor, path)
            self._descriptors.release(descriptor, synced=0 if failure else written)
            return failure

        return list(self._each(self._later_syncs, one, paths))

    @staticmethod
    def _each(threads: ThreadPoolExecutor, function: Callable[[str], T], paths: Collection[str]) -> Iterator[T]:
        """Calls `function` with every path. Several syncs at a time share one commit of the file system's own
        journal: eight files of 1 MiB took 32 ms one after the other and 6 ms side by side.
        """
        if len(paths) > 1:
            return threads.map(function, paths)
        return map(function, paths)

    @contextmanager
    def _open(self, path: str) -> Iterator[Descriptor]:
        descriptor = self._descriptors.acquire(path)
        try:
            yield descriptor
        finally:
            self._descriptors.release(descriptor)

    def _read(self, path: str, position: int, length: int) -> bytes:
        with self._open(path) as descriptor:
            # pread makes a buffer of the length asked for, so do not ask for more than there is.
            length = min(length, os.fstat(descriptor.fd).st_size - position)
            if length <= 0:
                return b""
            data = os.pread(descriptor.fd, length, position)
            while len(data) < length:  # a signal, or 2 GiB, which is all that one call reads
                more = os.pread(descriptor.fd, length - len(data), position + len(data))
                if not more:
                    break
                data += more
            return data

    def _size(self, path: str) -> int:
        with self._open(path) as descriptor:
            return os.fstat(descriptor.fd).st_size

    def _truncate(self, path: str, length: int) -> None:
        with self._open(path) as descriptor:
            self._descriptors.wrote(descriptor)
            os.ftruncate(descriptor.fd, length)

    def _list(self, path: str) -> _Entries:
        return self._descriptors.opening(lambda: _list_directory(self._full(path)))

    def _sync_directory(self, path: str) -> None:
        self._sync_names_in(self._full(path), path)

    def _sync_names_in(self, full: str, path: str) -> None:
        """`path` is for the error: what could not be opened is not broken."""
        try:
            fd = self._directories.open(full)
        except OSError as error:
            if error.errno not in SHORT:
                raise
            raise _not_opened(error, path, "sync") from error
        self._directories.sync(full, fd)

    def _make_directory(self, path: str) -> None:
        full = self._full(path)
        with self._making:
            unsynced: list[str] = []  # innermost first: made here, or by a call beside this one
            made: list[str] = []
            place = full
            while not os.path.isdir(place):
                made.append(place)
                place = os.path.dirname(place)
            for each in reversed(made):
                try:
                    os.mkdir(each, DIRECTORY_MODE)
                except FileExistsError:
                    if not os.path.isdir(each):  # else another process made it just now, and may not have synced it
                        raise
                self._unsynced_names.add(each)
            if self._unsynced_names:
                place = full
                while len(place) >= len(self._root) or place in made:
                    if place in self._unsynced_names:
                        unsynced.append(place)
                    place = os.path.dirname(place)
        # Nobody is told that a directory exists before its name is synced, whoever made it.
        for each in reversed(unsynced):
            try:
                self._sync_names_in(os.path.dirname(each), path)
            except (OSError, DiskFull, DiskFailed) as error:
                self._unmake(unsynced)
                if isinstance(error, OSError):
                    raise _failure(error, path, "sync") from error
                raise
            with self._making:
                self._unsynced_names.discard(each)

    def _unmake(self, directories: Sequence[str]) -> None:
        """Else the next call finds a name that a failed sync may have lost, and a second sync says that all is well."""
        with self._making:
            for each in directories:
                try:
                    os.rmdir(each)
                except OSError:
                    continue  # somebody is in it, and syncs its name too
                self._directories.forget(each)
                self._unsynced_names.discard(each)

    def _rename(self, source: str, target: str) -> None:
        assert not os.path.isdir(self._full(source)), "only files are renamed"
        if self._keeps_open:
            self._expect_sync(target)
        os.replace(self._full(source), self._full(target))
        self._descriptors.move(source, target)

    def _expect_sync(self, path: str) -> None:
        """The name will be synced next, which must not fail for want of a descriptor."""
        with suppress(FileNotFoundError):  # the rename says so itself
            self._directories.expect(os.path.dirname(self._full(path)))

    def _rename_new(self, source: str, target: str) -> None:
        assert not os.path.isdir(self._full(source)), "only files are renamed"
        # A second name, because link refuses one that is taken: the kernel decides who was first.
        os.link(self._full(source), self._full(target), follow_symlinks=False)
        os.unlink(self._full(source))
        self._descriptors.move(source, target)

    def _remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            try:
                os.unlink(self._full(path))
            except (IsADirectoryError, PermissionError):  # Linux says the one, POSIX the other
                os.rmdir(self._full(path))
                self._directories.forget(self._full(path))
        self._descriptors.drop(path)

    def _free_bytes(self, path: str) -> int:
        found = os.statvfs(self._full(path))
        return found.f_bavail * found.f_frsize

    def _lock(self, path: str) -> None:
        full = self._full(path)
        fd = self._descriptors.opening(lambda: os.open(full, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE))
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(fd, 20, 0).strip()
                raise DirectoryInUse(path, int(holder) if holder.isdigit() else None) from None
            # For people and for the error above; the lock itself is the kernel's and ends with the process.
            os.ftruncate(fd, 0)
            os.pwrite(fd, b"%d\n" % os.getpid(), 0)
        except BaseException:
            os.close(fd)
            raise
        self._locks[path] = fd


def _size(writes: Sequence[Write]) -> int:
    return sum(memoryview(buffer).nbytes for write in writes for buffer in write.buffers)


def _write_all(fd: int, buffers: Sequence[Buffer], position: int) -> None:
    """All of it, in calls of at most WRITE_BYTES_MAX and IOV_MAX buffers. Raises OSError."""
    sizes = [buffer.nbytes if isinstance(buffer, memoryview) else len(buffer) for buffer in buffers]
    if sum(sizes) <= WRITE_BYTES_MAX and len(buffers) <= IOV_MAX:
        written = os.pwritev(fd, buffers, position) if buffers else 0
        if written == sum(sizes):
            return
    else:
        written = 0
    # Large, or more buffers than one call takes, or a disk about to be full.
    left = deque(memoryview(buffer).cast("B") for buffer in buffers)
    total = written
    while True:
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if not left:
            return
        left[0] = left[0][written:]
        written = os.pwritev(fd, _piece(left), position + total)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        total += written


def _piece(left: deque[memoryview]) -> list[memoryview]:
    """What one call writes."""
    piece: list[memoryview] = []
    room = WRITE_BYTES_MAX
    for view in left:
        piece.append(view[:room])
        room -= piece[-1].nbytes
        if room == 0 or len(piece) == IOV_MAX:
            break
    return piece


def _slices(writes: Sequence[Write], files_max: int) -> Iterator[Sequence[Write]]:
    """Writes of at most so many files, in order. Those of one file that follow each other stay together."""
    if len(writes) <= files_max:
        yield writes
        return
    start = files = 0
    for i, write in enumerate(writes):
        if i > start and write.path == writes[i - 1].path:
            continue
        if files == files_max:
            yield writes[start:i]
            start, files = i, 0
        files += 1
    yield writes[start:]


def _sync_data(descriptor: Descriptor, path: str) -> DiskFailed | None:
    failed = sync_data(descriptor)
    return DiskFailed(path, "sync", failed) if failed else None


def _list_directory(full: str) -> list[Entry]:
    entries = []
    with suppress(FileNotFoundError), os.scandir(full) as found:
        for entry in found:
            with suppress(FileNotFoundError):  # removed while we looked
                is_directory = entry.is_dir(follow_symlinks=False)
                size_bytes = 0 if is_directory else entry.stat(follow_symlinks=False).st_size
                entries.append(Entry(entry.name, is_directory, size_bytes))
    return sorted(entries)


def _not_opened(error: OSError, path: str, operation: str) -> DiskFull | DiskFailed:
    """What kept `operation` from being begun; a sync that was not begun has lost nothing."""
    return _failure(error, path, "open" if error.errno in SHORT else operation)


def _failure(error: OSError, path: str, operation: str) -> DiskFull | DiskFailed:
    # A sync that finds no room has lost bytes that were accepted before: that is not "try again later".
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and operation != "sync":
        return DiskFull(path)
    if error.errno in SHORT and operation != "sync":
        return ResourcesShort(path, error.strerror or str(error))
    return DiskFailed(path, operation, error.strerror or str(error))


@contextmanager
def _our_errors(path: str, operation: str) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, FileExistsError) as error:
        raise type(error)(error.errno, error.strerror, path) from None
    except OSError as error:
        raise _failure(error, path, operation) from error
