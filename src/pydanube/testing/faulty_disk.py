"""A disk in memory that does what real disks do at the worst moment.

`FaultyDisk` is the hardware with its page cache; `FaultyDisk.process` gives one process access to it, as the
Disk port. Every file is two byte strings and what lies between them:

    content     what a read returns now: the page cache
    durable     what a power cut leaves for certain
    unsynced    the changes, in order, that lead from the second to the first

Names are the same: a durable tree, the current tree, and per directory the operations between them. A power
cut keeps any part of what is unsynced, in 512-byte sectors, and not only a prefix of it. A kill keeps all of
it but for the write that was going on, of which it keeps a prefix. After either, the process's access is
dead: a call that was going on, or comes later, never returns and changes nothing.

    fault               what it does
    sync fails          DiskFailed, and the kernel forgets the pages: reads may go on showing them, no later
                        sync writes them, and a later sync may even say that all is well
    write, read fails   DiskFailed, with any prefix of the write in place
    write, sync delays  as long as `delay_seconds_max`
    no room             DiskFull with any prefix of the write in place, until there is room again
    bit flips           `flip`, on demand, in what is durable

Everything is drawn from the generator given, so the same seed on the same loop breaks the same things.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from pydanube.errors import DirectoryInUse, DiskFailed, DiskFull
from pydanube.ports import Entry, Write, WriteResult
from pydanube.stores.paths import assert_inside, parent

SECTOR_BYTES: Final = 512
# What an unbounded disk says it has left.
FREE_BYTES_UNBOUNDED: Final = 1 << 40


@dataclass(slots=True)
class Faults:
    """How often, of one call or one file in it. May be changed while the disk runs."""

    sync_fails: float = 0.0
    write_fails: float = 0.0
    read_fails: float = 0.0
    directory_sync_fails: float = 0.0
    # Of the failed syncs: later ones of that file by that process fail too (else they seem to succeed).
    sync_failure_stays: float = 0.5
    delays: float = 0.0
    delay_seconds_max: float = 1.0
    # What an ordinary call takes at most; 0 for a disk that only lets others run.
    latency_seconds_max: float = 0.0002
    # Of the power cuts: sectors that were never written show bytes that used to stand elsewhere.
    stale_sectors: float = 0.1


class _Change(NamedTuple):
    """`data` at `position`; with data None, a cut or extension. `length` is the file's length afterwards."""

    number: int
    position: int
    data: bytes | None
    length: int


@dataclass(slots=True, eq=False)
class _File:
    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    unsynced: list[_Change] = field(default_factory=list)
    dropped: list[_Change] = field(default_factory=list)  # by a failed sync: in content, never to be durable


# A directory's names. None is a directory.
_Names = dict[str, _File | None]


@dataclass(slots=True, eq=False)
class _NameChange:
    """`name` in `directory` becomes `file`, a directory (None), or nothing (`gone`).

    A rename is two of these; `old` is the place it takes away, in the same step. When that is in another
    directory it is a change of its own, which cannot be kept without the one it `needs`.
    """

    number: int
    directory: str
    name: str
    file: _File | None = None
    gone: bool = False
    old: str | None = None
    needs: _NameChange | None = None
    kept: bool = False


@dataclass(slots=True, eq=False)
class _Flight:
    """A write that a process has asked for and that has not been done yet."""

    process: ProcessDisk
    path: str
    position: int
    data: bytes


class FaultyDisk:
    """The hardware. See the module's text. `counts` says how often each fault happened."""

    def __init__(self, dice: Random, *, capacity_bytes: int | None = None, faults: Faults | None = None) -> None:
        self.dice = dice
        self.capacity_bytes = capacity_bytes
        self.faults = faults if faults is not None else Faults(latency_seconds_max=0.0)
        self.counts: Counter[str] = Counter()
        self._current: dict[str, _Names] = {"": {}}
        self._durable: dict[str, _Names] = {"": {}}
        self._name_changes: list[_NameChange] = []
        self._flights: list[_Flight] = []
        self._processes: list[ProcessDisk] = []
        self._locks: dict[str, ProcessDisk] = {}
        self._number = 0
        self._graveyard: list[bytes] = []  # sectors that once stood somewhere, for `stale_sectors`

    def process(self, pid: int = 1) -> ProcessDisk:
        """Access for one more process."""
        process = ProcessDisk(self, pid)
        self._processes.append(process)
        return process

    # --- what happens to it ---

    def kill(self, process: ProcessDisk) -> None:
        """The process ends. What it wrote stays in the page cache; of a write going on, any prefix."""
        self.counts["kills"] += 1
        for flight in self._land(process):
            keep = self.dice.choice((0, len(flight.data), self.dice.randint(0, len(flight.data))))
            self._write(flight.path, flight.position, flight.data[:keep])
        self._end(process)

    def crash(self, dice: Random | None = None) -> None:
        """The power goes and comes back: processes are dead; what was not synced is there in any part."""
        dice = dice or self.dice
        self.counts["power cuts"] += 1
        for process in list(self._processes):
            for flight in self._land(process):
                if dice.random() < 0.5:
                    self._write(flight.path, flight.position, flight.data)
            self._end(process)
        self._crash_names(dice)
        stale = self._graveyard if dice.random() < self.faults.stale_sectors else []
        for file in self._files():
            if file.unsynced:
                file.durable = _survivor(file, dice, stale)
                file.unsynced.clear()
            if file.content != file.durable:
                file.content[:] = file.durable
            file.dropped.clear()

    def flip(self, path: str, position: int, bit: int = 0) -> None:
        """Changes one bit of what is durable, as ageing media do. Reads show it from now on."""
        self.counts["flips"] += 1
        file = self._find(path)
        assert position < len(file.durable), f"{path} has {len(file.durable)} durable bytes"
        for image in (file.durable, file.content):
            if position < len(image):
                image[position] ^= 1 << bit

    # --- what one can look at from outside, at no cost in time ---

    def paths(self) -> list[str]:
        """Every file there is, sorted."""
        return sorted(
            f"{directory}/{name}" if directory else name
            for directory, names in self._current.items()
            for name, file in names.items()
            if file is not None
        )

    def content(self, path: str) -> bytes:
        """What a read returns now."""
        return bytes(self._find(path).content)

    def durable(self, path: str) -> bytes | None:
        """What a power cut leaves for certain; None if not even the name."""
        file = self._durable.get(parent(path), {}).get(_last(path))
        return None if file is None else bytes(file.durable)

    @property
    def used_bytes(self) -> int:
        return sum(len(file.content) for file in self._files())

    @property
    def free_bytes(self) -> int:
        return FREE_BYTES_UNBOUNDED if self.capacity_bytes is None else self.capacity_bytes - self.used_bytes

    # --- bytes ---

    def _write(self, path: str, position: int, data: bytes) -> WriteResult:
        file = self._current.get(parent(path), {}).get(_last(path))
        if file is None:
            return DiskFailed(path, "write", os.strerror(errno.ENOENT))
        failure: WriteResult = None
        content = file.content
        growth = position + len(data) - len(content)
        if data and growth > 0 and self.capacity_bytes is not None and growth > self.free_bytes:
            self.counts["no room"] += 1
            failure = DiskFull(path)
            room = max(0, self.free_bytes + len(content) - position)
            data = data[: self.dice.randint(0, min(room, len(data)))]
        if not data:
            return failure
        end = position + len(data)
        if end > len(content):
            content.extend(bytes(end - len(content)))  # zeros, also between the old end and `position`
        content[position:end] = data
        self._number += 1
        file.unsynced.append(_Change(self._number, position, data, len(content)))
        return failure

    def _truncate(self, file: _File, length: int) -> None:
        content = file.content
        content.extend(bytes(max(0, length - len(content))))
        del content[length:]
        self._number += 1
        file.unsynced.append(_Change(self._number, length, None, length))

    def _sync(self, file: _File, until: int) -> None:
        """Changes up to number `until` become durable."""
        count = 0
        for change in file.unsynced:
            if change.number > until:
                break
            _apply(file.durable, change)
            count += 1
        del file.unsynced[:count]

    def _fail_sync(self, file: _File, until: int) -> None:
        """The kernel tried to write the changes up to `until`, failed for some, and forgets all of them."""
        count = sum(change.number <= until for change in file.unsynced)
        tried = file.unsynced[:count]
        del file.unsynced[:count]
        file.durable = _survivor(_File(file.content, file.durable, tried), self.dice, [])
        file.dropped += tried
        if not file.unsynced and self.dice.random() < 0.3:
            # Clean pages may be thrown out of memory at any time; then reads show what is really there.
            length = len(file.content)
            file.content[:] = file.durable[:length].ljust(length, b"\0")
            file.dropped.clear()

    # --- names ---

    def _change_name(self, change: _NameChange) -> None:
        _apply_name(self._current, change)
        self._name_changes.append(change)

    def _sync_directory(self, directory: str, until: int) -> None:
        rest = []
        for change in self._name_changes:
            if change.directory != directory or change.number > until:
                rest.append(change)
                continue
            if change.needs is not None and not change.needs.kept:
                # The new name stands in another directory, which no sync has reached: the old one cannot go
                # first. The file system writes both.
                _apply_name(self._durable, change.needs)
                change.needs.kept = True
            if not change.kept:
                _apply_name(self._durable, change)
                change.kept = True
        self._name_changes = [change for change in rest if not change.kept]

    def _crash_names(self, dice: Random) -> None:
        mode = dice.choice(("all", "none", "prefix", "any", "any"))
        directories = sorted({change.directory for change in self._name_changes})
        limits = {
            directory: dice.randint(0, sum(change.directory == directory for change in self._name_changes))
            for directory in directories
        }
        seen: Counter[str] = Counter()
        for change in self._name_changes:
            if mode == "prefix":
                kept = seen[change.directory] < limits[change.directory]
            else:
                kept = mode == "all" or (mode == "any" and dice.random() < 0.5)
            seen[change.directory] += 1
            if kept and (change.needs is None or change.needs.kept):
                change.kept = True
                _apply_name(self._durable, change)
        self._name_changes.clear()
        reachable: dict[str, _Names] = {}
        waiting = [""]
        while waiting:
            directory = waiting.pop()
            names = self._durable.get(directory, {})
            reachable[directory] = names
            start = directory + "/" if directory else ""
            waiting += [start + name for name, file in names.items() if file is None]
        self._durable = reachable
        self._current = {directory: dict(names) for directory, names in reachable.items()}

    # --- helpers ---

    def _land(self, process: ProcessDisk) -> list[_Flight]:
        """Takes the process's writes that are going on."""
        flights = [flight for flight in self._flights if flight.process is process]
        self._flights = [flight for flight in self._flights if flight.process is not process]
        return flights

    def _end(self, process: ProcessDisk) -> None:
        process.dead = True
        self._locks = {path: holder for path, holder in self._locks.items() if holder is not process}
        self._processes.remove(process)

    def _files(self) -> Iterator[_File]:
        for names in self._current.values():
            for file in names.values():
                if file is not None:
                    yield file

    def _find(self, path: str) -> _File:
        assert_inside(path)
        names = self._current.get(parent(path), {})
        file = names.get(_last(path))
        if file is None:
            if _last(path) in names or path == "":
                raise DiskFailed(path, "open", os.strerror(errno.EISDIR))
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return file

    def _directory(self, path: str) -> _Names:
        try:
            return self._current[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def _bury(self, file: _File) -> None:
        """Remembers a few sectors of a file that goes: its place on the disk is given to others uncleaned."""
        if file.content and len(self._graveyard) < 64:
            sector = self.dice.randrange(0, len(file.content), SECTOR_BYTES)
            self._graveyard.append(bytes(file.content[sector : sector + SECTOR_BYTES]))


class ProcessDisk:
    """One process's access to a FaultyDisk: the Disk port."""

    def __init__(self, disk: FaultyDisk, pid: int) -> None:
        self.pid = pid
        self.dead = False
        self._disk = disk
        self._draw = disk.dice.random
        self._failed: set[_File] = set()  # files whose syncs fail from now on, in this process

    # --- bytes ---

    async def create(self, path: str) -> None:
        assert assert_inside(path), "the root is a directory"
        await self._pause()
        disk = self._disk
        names = disk._directory(parent(path))
        if _last(path) in names:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
        disk._number += 1
        disk._change_name(_NameChange(disk._number, parent(path), _last(path), _File()))

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        await self._live()
        disk = self._disk
        # Taken now: what the caller does to its buffers while the call runs must not matter.
        flights = [
            _Flight(self, assert_inside(path), position, b"".join(buffers)) for path, position, buffers in writes
        ]
        disk._flights += flights
        results: list[WriteResult] = []
        try:
            for number, flight in enumerate(flights):
                if number == 0 or self._draw() < 0.3:
                    await self._pause(delays=True)
                disk._flights.remove(flight)
                results.append(self._write_one(flight))
        except asyncio.CancelledError:
            # A real write goes on in its thread whatever became of the task that waited for it.
            for flight in flights[len(results) :]:
                if flight in disk._flights:
                    disk._flights.remove(flight)
                    disk._write(flight.path, flight.position, flight.data)
            raise
        if sync:
            failures = await self._sync_all([flight.path for flight in flights])
            results = [
                result if isinstance(result, DiskFailed) else failures[flight.path] or result
                for result, flight in zip(results, flights, strict=True)
            ]
        return results

    def _write_one(self, flight: _Flight) -> WriteResult:
        disk = self._disk
        if disk.faults.write_fails and self._draw() < disk.faults.write_fails:
            disk.counts["failed writes"] += 1
            kept = disk.dice.randint(0, len(flight.data))
            disk._write(flight.path, flight.position, flight.data[:kept])
            return DiskFailed(flight.path, "write", os.strerror(errno.EIO))
        return disk._write(flight.path, flight.position, flight.data)

    async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        failures = await self._sync_all([assert_inside(path) for path in paths])
        return [failures[path] for path in paths]

    async def _sync_all(self, paths: Sequence[str]) -> dict[str, WriteResult]:
        """Syncs each file once; the result per path."""
        results: dict[str, WriteResult] = {}
        for path in paths:
            if path not in results:
                results[path] = await self._sync_one(path)
        return results

    async def _sync_one(self, path: str) -> WriteResult:
        disk, faults = self._disk, self._disk.faults
        until = disk._number
        file = disk._current.get(parent(path), {}).get(_last(path))
        await self._pause(delays=True)
        if file is None:
            return DiskFailed(path, "sync", os.strerror(errno.ENOENT))
        if file in self._failed:
            return DiskFailed(path, "sync", os.strerror(errno.EIO))
        if faults.sync_fails and self._draw() < faults.sync_fails:
            disk.counts["failed syncs"] += 1
            disk._fail_sync(file, until)
            if self._draw() < faults.sync_failure_stays:
                self._failed.add(file)
            return DiskFailed(path, "sync", os.strerror(errno.EIO))
        disk._sync(file, until)
        return None

    async def sync_directory(self, path: str) -> None:
        assert_inside(path)
        disk = self._disk
        until = disk._number
        await self._pause(delays=True)
        disk._directory(path)
        if disk.faults.directory_sync_fails and self._draw() < disk.faults.directory_sync_fails:
            disk.counts["failed syncs of a directory"] += 1
            raise DiskFailed(path, "sync", os.strerror(errno.EIO))
        disk._sync_directory(path, until)

    async def read(self, path: str, position: int, length: int) -> bytes:
        assert position >= 0 and length >= 0
        await self._pause()
        file = self._disk._find(path)
        if self._disk.faults.read_fails and self._draw() < self._disk.faults.read_fails:
            self._disk.counts["failed reads"] += 1
            raise DiskFailed(path, "read", os.strerror(errno.EIO))
        return bytes(memoryview(file.content)[position : position + length])

    async def size(self, path: str) -> int:
        await self._pause()
        return len(self._disk._find(path).content)

    async def truncate(self, path: str, length: int) -> None:
        assert length >= 0
        await self._pause()
        file = self._disk._find(path)
        if length - len(file.content) > self._disk.free_bytes:
            self._disk.counts["no room"] += 1
            raise DiskFull(path)
        self._disk._truncate(file, length)

    # --- names ---

    async def list(self, path: str) -> list[Entry]:
        assert_inside(path)
        await self._pause()
        if self._disk._current.get(parent(path), {}).get(_last(path)) is not None:
            raise DiskFailed(path, "list", "it is a file")
        return [
            Entry(name, file is None, 0 if file is None else len(file.content))
            for name, file in sorted(self._disk._current.get(path, {}).items())
        ]

    async def make_directory(self, path: str) -> None:
        disk = self._disk
        parts = assert_inside(path).split("/") if path else []
        ancestors = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        await self._pause()
        for ancestor in ancestors:
            if disk._current.get(parent(ancestor), {}).get(_last(ancestor)) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), ancestor)
        for ancestor in ancestors:
            if ancestor in disk._current:
                continue
            disk._number += 1
            disk._change_name(_NameChange(disk._number, parent(ancestor), _last(ancestor)))
            until = disk._number
            await self._pause()
            disk._sync_directory(parent(ancestor), until)

    async def rename_new(self, source: str, target: str) -> None:
        await self._pause()
        self._disk._find(source)
        if _last(assert_inside(target)) in self._disk._directory(parent(target)):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
        self._rename(source, target)

    async def rename(self, source: str, target: str) -> None:
        await self._pause()
        self._rename(source, target)

    def _rename(self, source: str, target: str) -> None:
        disk = self._disk
        file = disk._find(source)
        assert assert_inside(target) not in disk._current, "only files are renamed"
        replaced = disk._directory(parent(target)).get(_last(target))
        if source == target:
            return
        disk._number += 1
        change = _NameChange(disk._number, parent(target), _last(target), file)
        if parent(source) == parent(target):
            change.old = _last(source)
            disk._change_name(change)
        else:
            disk._change_name(change)
            gone = _NameChange(disk._number, parent(source), _last(source), gone=True, needs=change)
            disk._change_name(gone)
        if replaced is not None:
            disk._bury(replaced)

    async def remove(self, path: str) -> None:
        assert assert_inside(path), "the root stays"
        await self._pause()
        disk = self._disk
        names = disk._current.get(parent(path), {})
        if _last(path) not in names:
            return
        if disk._current.get(path):
            raise DiskFailed(path, "remove", os.strerror(errno.ENOTEMPTY))
        file = names[_last(path)]
        if file is not None:
            disk._bury(file)
        disk._number += 1
        disk._change_name(_NameChange(disk._number, parent(path), _last(path), gone=True))

    async def free_bytes(self) -> int:
        await self._pause()
        return self._disk.free_bytes

    # --- locks ---

    async def lock(self, path: str) -> None:
        assert_inside(path)
        await self._pause()
        holder = self._disk._locks.get(path)
        if holder is not None:
            raise DirectoryInUse(path, holder.pid)
        self._disk._locks[path] = self
        if _last(path) not in self._disk._directory(parent(path)):
            await self.create(path)

    async def unlock(self, path: str) -> None:
        await self._pause()
        assert self._disk._locks.get(path) is self, "only the holder unlocks"
        del self._disk._locks[path]

    # --- helpers ---

    async def _pause(self, *, delays: bool = False) -> None:
        """What the call takes. The dead wait for ever."""
        if self.dead:
            await self._live()
        faults = self._disk.faults
        seconds = self._draw() * faults.latency_seconds_max
        if delays and faults.delays and self._draw() < faults.delays:
            self._disk.counts["delays"] += 1
            seconds = self._draw() * faults.delay_seconds_max
        await asyncio.sleep(seconds)
        if self.dead:
            await self._live()

    async def _live(self) -> None:
        while self.dead:
            await asyncio.get_running_loop().create_future()


def _last(path: str) -> str:
    return path.rpartition("/")[2]


def _apply(image: bytearray, change: _Change) -> None:
    if change.data is None:
        image.extend(bytes(max(0, change.length - len(image))))
        del image[change.length :]
        return
    end = change.position + len(change.data)
    if end > len(image):
        image.extend(bytes(end - len(image)))
    image[change.position : end] = change.data


def _apply_name(tree: dict[str, _Names], change: _NameChange) -> None:
    names = tree.setdefault(change.directory, {})
    if change.gone:
        names.pop(change.name, None)
        path = f"{change.directory}/{change.name}" if change.directory else change.name
        tree.pop(path, None)
        return
    if change.old is not None:
        names.pop(change.old, None)
    names[change.name] = change.file
    if change.file is None:
        path = f"{change.directory}/{change.name}" if change.directory else change.name
        tree.setdefault(path, {})


def _survivor(file: _File, dice: Random, stale: Sequence[bytes]) -> bytearray:
    """A durable image that a power cut may leave: any part of the unsynced changes, sector by sector."""
    changes = file.unsynced
    mode = dice.choice(("all", "none", "prefix", "any", "any", "any"))
    image = bytearray(file.durable)
    if mode == "all" or mode == "prefix":
        for change in changes[: None if mode == "all" else dice.randint(0, len(changes))]:
            _apply(image, change)
        return image
    if mode == "none":
        return image
    lengths = [len(image), *(change.length for change in changes)]
    # The length is metadata: it may run ahead of the bytes or stay behind them.
    length = dice.choice((*lengths, dice.randint(min(lengths), max(lengths))))
    keeps = dice.choice((0.1, 0.5, 0.9))
    image.extend(bytes(max(0, max(lengths) - len(image))))
    versions = _versions(changes, len(image))
    for sector, pieces in versions.items():
        kept = len(pieces) if dice.random() < keeps else dice.randrange(len(pieces))
        if kept == 0 and stale and sector >= len(file.durable) and dice.random() < 0.5:
            pieces = [(sector, dice.choice(stale))]
            kept = 1
        for position, piece in pieces[:kept]:
            image[position : position + len(piece)] = piece
    del image[length:]
    return image


def _versions(changes: Sequence[_Change], length: int) -> dict[int, list[tuple[int, bytes]]]:
    """By sector, the pieces written to it one after the other. A cut file reads as zeros behind the cut."""
    versions: dict[int, list[tuple[int, bytes]]] = {}
    for change in changes:
        data = bytes(length - change.length) if change.data is None else change.data
        position, end = change.position, change.position + len(data)
        start = position
        while start < end:
            sector = start - start % SECTOR_BYTES
            stop = min(end, sector + SECTOR_BYTES)
            versions.setdefault(sector, []).append((start, data[start - position : stop - position]))
            start = stop
    return versions
