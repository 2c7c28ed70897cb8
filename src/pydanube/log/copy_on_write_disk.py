"""A disk that is looked at and not touched: what is written stays in memory.

`danube log verify` and `dump` run the real recovery on it, so they see exactly what the next start would see, and
leave no trace. Only what recovery writes is held in memory, which is little.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from pydanube.ports import Disk, Entry, Write, WriteResult


class CopyOnWriteDisk:
    """A Disk over another. Nothing survives; syncs always succeed."""

    def __init__(self, under: Disk) -> None:
        self._under = under
        self._files: dict[str, _Overlaid | None] = {}  # None: removed here
        self._directories: set[str] = set()

    async def create(self, path: str) -> None:
        if await self._exists(path):
            raise FileExistsError(errno.EEXIST, "file exists", path)
        self._files[path] = _Overlaid(None, 0)

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        for path, position, buffers in writes:
            (await self._overlaid(path)).write(position, b"".join(buffers))
        return [None] * len(writes)

    async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        return [None] * len(paths)

    async def sync_directory(self, path: str) -> None:
        return None

    async def read(self, path: str, position: int, length: int) -> bytes:
        if path not in self._files:
            return await self._under.read(path, position, length)
        file = await self._overlaid(path)
        length = max(0, min(length, file.size - position))
        data = b""
        if file.under is not None:
            data = await self._under.read(file.under, position, length)
        found = bytearray(data.ljust(length, b"\0"))
        for start, patch in file.patches:
            first, end = max(start, position), min(start + len(patch), position + length)
            if first < end:
                found[first - position : end - position] = patch[first - start : end - start]
        return bytes(found)

    async def size(self, path: str) -> int:
        if path not in self._files:
            return await self._under.size(path)
        return (await self._overlaid(path)).size

    async def truncate(self, path: str, length: int) -> None:
        file = await self._overlaid(path)
        file.write(length, bytes(max(0, file.size - length)))
        file.size = length

    async def list(self, path: str) -> list[Entry]:
        entries = {entry.name: entry for entry in await self._under.list(path)}
        prefix = f"{path}/" if path else ""
        for directory in self._directories:
            if directory.startswith(prefix) and "/" not in directory[len(prefix) :]:
                name = directory[len(prefix) :]
                entries.setdefault(name, Entry(name, True, 0))
        for file_path, file in self._files.items():
            name = file_path[len(prefix) :]
            if not file_path.startswith(prefix) or "/" in name:
                continue
            if file is None:
                entries.pop(name, None)
            else:
                entries[name] = Entry(name, False, file.size)
        return sorted(entries.values())

    async def make_directory(self, path: str) -> None:
        parts = path.split("/")
        self._directories |= {"/".join(parts[: n + 1]) for n in range(len(parts))}

    async def rename(self, source: str, target: str) -> None:
        self._files[target] = await self._overlaid(source)
        self._files[source] = None

    async def rename_new(self, source: str, target: str) -> None:
        if await self._exists(target):
            raise FileExistsError(errno.EEXIST, "the name is taken", target)
        await self.rename(source, target)

    async def remove(self, path: str) -> None:
        self._directories.discard(path)
        self._files[path] = None

    async def free_bytes(self) -> int:
        return await self._under.free_bytes()

    async def lock(self, path: str) -> None:
        await self._under.lock(path)

    async def unlock(self, path: str) -> None:
        await self._under.unlock(path)

    async def _exists(self, path: str) -> bool:
        if path in self._files:
            return self._files[path] is not None
        try:
            await self._under.size(path)
        except FileNotFoundError:
            return False
        return True

    async def _overlaid(self, path: str) -> _Overlaid:
        if path not in self._files:
            self._files[path] = _Overlaid(path, await self._under.size(path))
        file = self._files[path]
        if file is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return file


class _Overlaid:
    """A file with patches over the one below, if there is one."""

    __slots__ = ("patches", "size", "under")

    def __init__(self, under: str | None, size: int) -> None:
        self.under = under
        self.size = size
        self.patches: list[tuple[int, bytes]] = []

    def write(self, position: int, data: bytes) -> None:
        self.patches.append((position, data))
        self.size = max(self.size, position + len(data))
