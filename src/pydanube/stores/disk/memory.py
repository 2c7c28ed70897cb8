"""A disk in memory on which everything survives: no bytes are lost, no name needs a sync.

What a power cut may do is the business of the wrapper that injects faults.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from pydanube.errors import DirectoryInUse, DiskFailed, DiskFull
from pydanube.ports import Buffer, Entry, Write, WriteResult
from pydanube.stores.disk.paths import assert_inside, parent

# What an unbounded disk says it has left: one tebibyte, more than any test needs.
FREE_BYTES_UNBOUNDED = 1 << 40


@dataclass(slots=True)
class _Contents:
    """What several processes on one machine share. `files` and `directories` never have a name in common."""

    capacity_bytes: int | None
    files: dict[str, bytearray] = field(default_factory=dict)
    directories: set[str] = field(default_factory=lambda: {""})
    holders: dict[str, MemoryDisk] = field(default_factory=dict)  # lock file -> who holds it
    used_bytes: int = 0  # the lengths of all files


class MemoryDisk:
    """One process's access to a disk. `another_process` gives a second process access to the same files."""

    def __init__(self, *, capacity_bytes: int | None = None, pid: int = 1) -> None:
        self.pid = pid
        self._contents = _Contents(capacity_bytes)

    def another_process(self, pid: int) -> MemoryDisk:
        """The same files, seen from another process, with locks of its own."""
        other = MemoryDisk(pid=pid)
        other._contents = self._contents
        return other

    def end_process(self) -> None:
        """What the system does when a process ends, however it ends: its locks are free."""
        holders = self._contents.holders
        for path in [path for path, holder in holders.items() if holder is self]:
            del holders[path]

    # --- bytes ---

    async def create(self, path: str) -> None:
        assert assert_inside(path), "the root is a directory"
        contents = self._contents
        if path in contents.files or path in contents.directories:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        self._directory(parent(path))
        contents.files[path] = bytearray()

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        return [self._write(path, position, buffers) for path, position, buffers in writes]

    async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        files = self._contents.files
        return [None if path in files else _missing(path, "sync") for path in paths]

    async def sync_directory(self, path: str) -> None:
        self._directory(assert_inside(path))

    async def read(self, path: str, position: int, length: int) -> bytes:
        assert position >= 0 and length >= 0
        return bytes(memoryview(self._file(path))[position : position + length])

    async def size(self, path: str) -> int:
        return len(self._file(path))

    async def truncate(self, path: str, length: int) -> None:
        assert length >= 0
        file = self._file(path)
        if length > len(file) and not self._has_space(length - len(file)):
            raise DiskFull(path)
        self._contents.used_bytes += length - len(file)
        file.extend(bytes(max(0, length - len(file))))
        del file[length:]

    # --- names ---

    async def list(self, path: str) -> list[Entry]:
        assert_inside(path)
        contents = self._contents
        if path in contents.files:
            raise DiskFailed(path, "list", "it is a file")
        start = path + "/" if path else ""
        files = [
            Entry(name[len(start) :], False, len(file)) for name, file in contents.files.items() if parent(name) == path
        ]
        directories = [
            Entry(name[len(start) :], True, 0) for name in contents.directories if name and parent(name) == path
        ]
        return sorted(files + directories)

    async def make_directory(self, path: str) -> None:
        assert_inside(path)
        parts = path.split("/")
        ancestors = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        for ancestor in ancestors:
            if ancestor in self._contents.files:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), ancestor)
        self._contents.directories.update(ancestors)

    async def rename(self, source: str, target: str) -> None:
        file = self._file(source)
        assert assert_inside(target) not in self._contents.directories, "only files are renamed"
        self._directory(parent(target))
        if source == target:
            return
        self._drop(target)
        del self._contents.files[source]
        self._contents.files[target] = file

    async def rename_new(self, source: str, target: str) -> None:
        self._file(source)
        if assert_inside(target) in self._contents.files or target in self._contents.directories:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        await self.rename(source, target)

    async def remove(self, path: str) -> None:
        assert assert_inside(path), "the root stays"
        if path in self._contents.directories:
            if await self.list(path):
                raise DiskFailed(path, "remove", os.strerror(errno.ENOTEMPTY))
            self._contents.directories.remove(path)
        self._drop(path)

    async def free_bytes(self) -> int:
        capacity_bytes = self._contents.capacity_bytes
        if capacity_bytes is None:
            return FREE_BYTES_UNBOUNDED
        return capacity_bytes - self._contents.used_bytes

    # --- locks ---

    async def lock(self, path: str) -> None:
        assert_inside(path)
        holder = self._contents.holders.get(path)
        if holder is not None:
            raise DirectoryInUse(path, holder.pid)
        if path not in self._contents.files:
            await self.create(path)
        self._contents.holders[path] = self

    async def unlock(self, path: str) -> None:
        assert self._contents.holders.get(path) is self, "only the holder unlocks"
        del self._contents.holders[path]

    # --- helpers ---

    def _file(self, path: str) -> bytearray:
        try:
            return self._contents.files[assert_inside(path)]
        except KeyError:
            if path in self._contents.directories:
                raise DiskFailed(path, "open", os.strerror(errno.EISDIR)) from None
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def _directory(self, path: str) -> None:
        if path not in self._contents.directories:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def _drop(self, path: str) -> None:
        file = self._contents.files.pop(path, None)
        if file is not None:
            self._contents.used_bytes -= len(file)

    def _has_space(self, more_bytes: int) -> bool:
        capacity_bytes = self._contents.capacity_bytes
        return capacity_bytes is None or self._contents.used_bytes + more_bytes <= capacity_bytes

    def _write(self, path: str, position: int, buffers: Sequence[Buffer]) -> WriteResult:
        assert position >= 0
        file = self._contents.files.get(assert_inside(path))
        if file is None:
            return _missing(path, "write")
        data = b"".join(buffers)
        end = position + len(data)
        more_bytes = end - len(file)
        if data and more_bytes > 0:
            if not self._has_space(more_bytes):
                return DiskFull(path)
            file.extend(bytes(more_bytes))  # zeros, also between the old end and `position`
            self._contents.used_bytes += more_bytes
        file[position:end] = data
        return None


def _missing(path: str, operation: str) -> DiskFailed:
    return DiskFailed(path, operation, os.strerror(errno.ENOENT))
