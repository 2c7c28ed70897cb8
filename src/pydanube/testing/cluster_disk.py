"""A simulated broker's way to its disk: any one call may be hit (cluster_aims.py), and it is known when one failed.

What fails here fails as FaultyDisk's own calls do: of a write any part is there, of a failed sync it is not known what
is durable, and the call that failed was made or not.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

from pydanube.errors import DiskFailed, DiskFull
from pydanube.ports import Entry, Write, WriteResult
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.disk.paths import parent
from pydanube.testing.cluster_aims import Shot
from pydanube.testing.process_disk import ProcessDisk

T = TypeVar("T")

# These may find the disk full, as well as an error: each may need a block for a name.
_NEED_SPACE = frozenset({"create", "rename", "make_directory"})


class _Hit(Exception):
    """The call is not made, or its result is not told."""


async def _hit() -> None:
    raise _Hit


class WatchedDisk:
    """The Disk port over a process's disk. `failed` is called for every call that fails anew."""

    def __init__(
        self,
        under: ProcessDisk | MemoryDisk,
        rng: Random,
        aim: Callable[[str, Sequence[str]], Shot | None],
        failed: Callable[[str], None],
    ) -> None:
        self._under = under
        self._rng = rng
        self._aim = aim
        self._failed = failed
        self._known = self._count()

    # --- bytes ----------------------------------------------------------------------------------------------

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        shot = self._aim("disk write", ())
        if shot is None:
            return self._seen("write", await self._under.write(writes, sync=sync))
        try:
            return await shot.around(lambda: self._under.write(writes, sync=sync), _hit)
        except _Hit:
            if shot.what == "fail":
                await self._under.write(writes, sync=False)
            return self._break("write", [path for path, _, _ in writes], dropped=shot.what == "fail")

    async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        shot = self._aim("disk sync", ())
        if shot is None:
            return self._seen("sync", await self._under.sync(paths))
        try:
            return await shot.around(lambda: self._under.sync(paths), _hit)
        except _Hit:
            return self._break("sync", paths, dropped=shot.what == "fail")

    def _break(self, call: str, paths: Sequence[str], *, dropped: bool) -> list[WriteResult]:
        """The kernel could not store what was written, forgets it, and says so once, or ever after."""
        under = self._under
        if isinstance(under, ProcessDisk):
            for path in dict.fromkeys(paths):
                file = under._disk._current.get(parent(path), {}).get(path.rpartition("/")[2])
                if file is not None and dropped:
                    under._disk._fail_sync(file, under._disk._number)
                    if self._rng.random() < 0.5:
                        under._failed.add(file)
        self._failed(call)
        return [DiskFailed(path, call, os.strerror(errno.EIO)) for path in paths]

    def _seen(self, call: str, results: list[WriteResult]) -> list[WriteResult]:
        if any(isinstance(each, DiskFailed) for each in results) and self._count() != self._known:
            self._known = self._count()  # else it is what failed before, and still does
            self._failed(call)
        return results

    def _count(self) -> int:
        if not isinstance(self._under, ProcessDisk):
            return 0
        return sum(count for kind, count in self._under._disk.counts.items() if kind.startswith("failed"))

    async def read(self, path: str, position: int, length: int) -> bytes:
        return await self._call("read", path, lambda: self._under.read(path, position, length))

    async def size(self, path: str) -> int:
        return await self._call("size", path, lambda: self._under.size(path))

    async def truncate(self, path: str, length: int) -> None:
        await self._call("truncate", path, lambda: self._under.truncate(path, length))

    # --- names ----------------------------------------------------------------------------------------------

    async def create(self, path: str) -> None:
        await self._call("create", path, lambda: self._under.create(path))

    async def sync_directory(self, path: str) -> None:
        await self._call("sync_directory", path, lambda: self._under.sync_directory(path))

    async def list(self, path: str) -> list[Entry]:
        return await self._call("list", path, lambda: self._under.list(path))

    async def make_directory(self, path: str) -> None:
        await self._call("make_directory", path, lambda: self._under.make_directory(path))

    async def rename_new(self, source: str, target: str) -> None:
        await self._call("rename", target, lambda: self._under.rename_new(source, target))

    async def rename(self, source: str, target: str) -> None:
        await self._call("rename", target, lambda: self._under.rename(source, target))

    async def remove(self, path: str) -> None:
        await self._call("remove", path, lambda: self._under.remove(path))

    async def _call(self, call: str, path: str, made: Callable[[], Awaitable[T]]) -> T:
        shot = self._aim(f"disk {call}", ())
        try:
            return await (made() if shot is None else shot.around(made, _hit))
        except _Hit:
            if call in _NEED_SPACE and shot is not None and shot.what == "fail" and self._rng.random() < 0.5:
                raise DiskFull(path) from None
            self._failed(call)
            raise DiskFailed(path, call, os.strerror(errno.EIO)) from None
        except DiskFailed:
            if self._count() != self._known:
                self._known = self._count()
                self._failed(call)
            raise

    # --- what is never hit ------------------------------------------------------------------------------------

    async def free_bytes(self) -> int:
        return await self._under.free_bytes()

    async def lock(self, path: str) -> None:
        await self._under.lock(path)

    async def unlock(self, path: str) -> None:
        await self._under.unlock(path)
