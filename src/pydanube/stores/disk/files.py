"""A Disk on a real directory.

Every call is one hop to a thread and back, also a write of two hundred files: `write` with `sync` is the
group commit, and everything acknowledged waits for it. Files stay open between calls (`descriptors.py`).

One exception: a small write with `sync`, on a disk that has lately been quick with them, is done on the spot. The hop
takes 0.09 ms, because two threads must wake up and agree on who runs; the disk of the same machine took 0.17 ms.
A producer that publishes one message at a time waits for both. The event loop is blocked by it, so it is done only as
long as the average stays below SPOT_SECONDS, and a disk that stalls loses that trust immediately: a stall of a second
is paid for with a hundred quick writes in a thread. Never in a directory that is shared with other processes: no client
waits for objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from pydanube.config import open_files
from pydanube.ports import Entry, Write, WriteResult
from pydanube.stores.disk.descriptors import Descriptors, OpenFile
from pydanube.stores.disk.file_errors import our_errors
from pydanube.stores.disk.file_names import FileNames
from pydanube.stores.disk.file_writer import FileWriter
from pydanube.stores.disk.paths import assert_inside
from pydanube.stores.work.threads import Threads

T = TypeVar("T")

# So that a commit finds a free thread while segments are made and old ones are read.
THREADS_MAX = 16
SPOT_BYTES = 8 * 1024


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
        self._descriptors = Descriptors(self._root, descriptors_max)
        self._writer = FileWriter(self._descriptors, descriptors_max)
        self._names = FileNames(self._root, self._descriptors, keeps_open=descriptors_max > 0)
        self._locks: dict[str, int] = {}  # lock file -> descriptor that holds it

    def close(self) -> None:
        """Ends threads, descriptors and locks, as the end of the process would. Syncs nothing."""
        self._threads.close()
        self._writer.close()
        self._descriptors.close()
        self._names.close()
        for fd in self._locks.values():
            os.close(fd)
        self._locks.clear()

    # --- bytes ---

    async def create(self, path: str) -> None:
        await self._call("create", path, self._descriptors.create)

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        if not sync or len(writes) > 2 or _size(writes) > SPOT_BYTES:
            return await self._threads.call(partial(self._writer.write, writes, sync))
        if self._writer.is_quick and self._threads.are_idle:
            return self._writer.write_small(writes)
        return await self._threads.call(partial(self._writer.write_small, writes))

    async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        return await self._threads.call(partial(self._writer.sync, paths))

    async def sync_directory(self, path: str) -> None:
        await self._call("sync", path, self._names.sync_directory)

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
        return await self._call("list", path, self._names.list_entries)

    async def make_directory(self, path: str) -> None:
        await self._call("make", path, self._names.make_directory)

    async def rename(self, source: str, target: str) -> None:
        await self._call("rename", source, partial(self._names.rename, target=target))

    async def rename_new(self, source: str, target: str) -> None:
        await self._call("rename", target, partial(self._names.rename_new, source))

    async def remove(self, path: str) -> None:
        assert path, "the root stays"
        await self._call("remove", path, self._names.remove)

    async def free_bytes(self) -> int:
        return await self._call("measure", "", self._names.free_bytes)

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
            with our_errors(path, operation):
                return function(path)

        return await self._threads.call(call)

    @contextmanager
    def _open(self, path: str) -> Iterator[OpenFile]:
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

    def _lock(self, path: str) -> None:
        self._locks[path] = self._names.lock(path)

    def _size(self, path: str) -> int:
        with self._open(path) as descriptor:
            return os.fstat(descriptor.fd).st_size

    def _truncate(self, path: str, length: int) -> None:
        with self._open(path) as descriptor:
            self._descriptors.wrote(descriptor)
            os.ftruncate(descriptor.fd, length)


def _size(writes: Sequence[Write]) -> int:
    return sum(memoryview(buffer).nbytes for write in writes for buffer in write.buffers)
