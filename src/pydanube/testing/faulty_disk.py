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
    slow file           calls on paths that contain `slow` take up to `slow_seconds_max` longer; others are quick
    open files          as stores/disk/descriptors.py does it: a file with unsynced writes keeps its descriptor; above
                        `open_files_max` the oldest is synced for that. `no_descriptor`: others of the process have
                        taken them all, so whoever must open something is told EMFILE

A rate meets a call site in proportion to how often it is called, so those that matter once in a life are met next to
never. Therefore one call may also be aimed at: `Aim("rename", 3, "lost")` makes the third rename, and tells its caller
that it failed. Whatever the program calls, every such call can be hit by everything that `MEETS` names for it.

Disks differ: files may be `sparse` (holes take no room), overwriting and cutting may need room
(`overwrites_need_room`, as in file systems that copy on write), and so may names (`names_need_room`).

Everything is drawn from the generator given, so the same seed on the same loop breaks the same things.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

from pydanube.errors import DirectoryInUse, DiskFailed, DiskFull
from pydanube.ports import Entry, Write, WriteResult
from pydanube.stores.disk import files
from pydanube.stores.disk.paths import assert_inside, parent

T = TypeVar("T")

SECTOR_BYTES: Final = 512
# What an unbounded disk says it has left.
FREE_BYTES_UNBOUNDED: Final = 1 << 40

ERRORS: Final = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EMFILE": errno.EMFILE, "lost": errno.EIO}
_ENDS: Final = ("delay", "hang", "kill", "power")
# What an aimed call may meet. `lost`: it is done, and its caller is told EIO. EMFILE: if it has to open something. A
# rename opens the directory for the sync that follows, which therefore never lacks a descriptor.
MEETS: Final[Mapping[str, tuple[str, ...]]] = {
    "create": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "write": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "sync": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "truncate": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "read": ("EIO", "EMFILE", *_ENDS),
    "size": ("EIO", "EMFILE", *_ENDS),
    "sync_directory": ("EIO", "EMFILE", "lost", *_ENDS),
    "make_directory": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "list": ("EIO", "EMFILE", *_ENDS),
    "rename": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "remove": ("EIO", "lost", *_ENDS),
    "free_bytes": ("EIO", *_ENDS),
}


@dataclass(slots=True)
class Aim:
    """The `number`-th call of `operation`, from 1, on a path that contains `where`: there, `what` happens, once."""

    operation: str
    number: int
    what: str
    where: str = ""
    seconds: float = 1.0  # of a delay
    early: bool = True  # a kill or a power cut comes before the call's effect, or behind it
    hit: str | None = None  # the path, once it has happened

    def __post_init__(self) -> None:
        assert self.what in MEETS[self.operation], f"{self.operation} never meets {self.what}"
        assert self.number > 0


class Told(NamedTuple):
    """A process was told that a call failed. `again`: because an earlier one of the same file had."""

    operation: str
    path: str
    why: str  # of ERRORS
    again: bool = False


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
    # Paths that contain this are slow ("": none is).
    slow: str = ""
    slow_seconds_max: float = 0.05
    # Files with unsynced writes that one process keeps open; None: as many as it likes.
    open_files_max: int | None = None
    # Of the calls that open something.
    no_descriptor: float = 0.0
    overwrites_need_room: bool = False
    names_need_room: bool = False


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
    blocks: set[int] = field(default_factory=set)  # that take room, on a sparse disk


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

    def __init__(
        self,
        dice: Random,
        *,
        capacity_bytes: int | None = None,
        faults: Faults | None = None,
        sparse: bool = False,
    ) -> None:
        self.dice = dice
        self.capacity_bytes = capacity_bytes
        self.faults = faults if faults is not None else Faults(latency_seconds_max=0.0)
        self.sparse = sparse
        self.counts: Counter[str] = Counter()
        self.aims: list[Aim] = []  # still to be met
        # What an aimed kill or power cut does; whoever runs processes ends the process too.
        self.strike: Callable[[ProcessDisk, bool], None] = lambda process, power: (
            self.crash() if power else self.kill(process)
        )
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
            if self.sparse:
                file.blocks = {block for block in file.blocks if block * SECTOR_BYTES < len(file.content)}
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
        if self.sparse:
            return sum(len(file.blocks) for file in self._files()) * SECTOR_BYTES
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
        if data and self.capacity_bytes is not None:
            room = self._room(file, position, len(data))
            if room < len(data):
                self.counts["no room"] += 1
                failure = DiskFull(path)
                data = data[: self.dice.randint(0, room)]
        if not data:
            return failure
        end = position + len(data)
        if end > len(content):
            content.extend(bytes(end - len(content)))  # zeros, also between the old end and `position`
        content[position:end] = data
        if self.sparse:
            file.blocks.update(range(position // SECTOR_BYTES, (end - 1) // SECTOR_BYTES + 1))
        self._number += 1
        file.unsynced.append(_Change(self._number, position, data, len(content)))
        return failure

    def _room(self, file: _File, position: int, length: int) -> int:
        """How many of so many bytes at this position find room."""
        free = max(0, self.free_bytes)
        room = length
        if self.sparse:
            left = free // SECTOR_BYTES
            for block in range(position // SECTOR_BYTES, (position + length - 1) // SECTOR_BYTES + 1):
                if block not in file.blocks:
                    left -= 1
                    if left < 0:
                        room = max(0, block * SECTOR_BYTES - position)
                        break
        elif position + length - len(file.content) > free:
            room = max(0, free + len(file.content) - position)
        if self.faults.overwrites_need_room and room > free:
            self.counts["no room to overwrite"] += 1
            room = free
        return room

    def _lacks_room_to_cut(self, file: _File, length: int) -> bool:
        """A file that grows needs room; one that is cut, only where its blocks are copied for that."""
        more = length - len(file.content)
        if more > 0:
            return not self.sparse and more > self.free_bytes
        return self.faults.overwrites_need_room and self.free_bytes <= 0

    def _truncate(self, file: _File, length: int) -> None:
        content = file.content
        content.extend(bytes(max(0, length - len(content))))
        del content[length:]
        if self.sparse:
            file.blocks = {block for block in file.blocks if block * SECTOR_BYTES < length}
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
    """One process's access to a FaultyDisk: the Disk port. `told` are the failures that it was told of."""

    def __init__(self, disk: FaultyDisk, pid: int) -> None:
        self.pid = pid
        self.dead = False
        self.told: list[Told] = []
        self.hangs = False  # a call that will never answer
        self._disk = disk
        self._draw = disk.dice.random
        self._failed: set[_File] = set()  # files whose syncs fail from now on, in this process
        self._unnamed: set[str] = set()  # directories that were made and whose names are not synced yet
        self._unsynced: dict[_File, None] = {}  # files that keep a descriptor: written, and not synced since
        self._renamed_in: set[str] = set()  # directories that are open for the sync that follows a rename

    @property
    def open_files(self) -> list[str]:
        """Paths of the files that keep their descriptor: written, and not synced since."""
        return [path for path in self._disk.paths() if self._disk._find(path) in self._unsynced]

    # --- bytes ---

    async def create(self, path: str) -> None:
        assert assert_inside(path), "the root is a directory"

        def create() -> None:
            disk = self._disk
            names = disk._directory(parent(path))
            if _last(path) in names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._need_room_for_a_name("create", path)
            disk._number += 1
            disk._change_name(_NameChange(disk._number, parent(path), _last(path), _File()))

        await self._do("create", path, create, opens=True)

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        await self._live()
        disk = self._disk
        # Taken now: what the caller does to its buffers while the call runs must not matter.
        flights = [
            _Flight(self, assert_inside(path), position, b"".join(buffers)) for path, position, buffers in writes
        ]
        disk._flights += flights
        results: list[WriteResult] = []
        told_before = len(self.told)
        aims = [self._aimed("write", flight.path) for flight in flights] if disk.aims else [None] * len(flights)
        try:
            for number, (flight, aim) in enumerate(zip(flights, aims, strict=True)):
                if number == 0 or aim is not None or self._draw() < 0.3:
                    await self._pause(flight.path, aim, delays=True)
                if aim is not None and aim.what in ("kill", "power"):
                    disk.strike(self, aim.what == "power")  # in the middle of it
                    await self._live()
                disk._flights.remove(flight)
                results.append(self._write_one(flight, aim))
        except asyncio.CancelledError:
            # A real write goes on in its thread whatever became of the task that waited for it.
            for flight in flights[len(results) :]:
                if flight in disk._flights:
                    disk._flights.remove(flight)
                    disk._write(flight.path, flight.position, flight.data)
            raise
        if sync:
            # What could not be opened is not synced either; of a write that failed, what was written is.
            closed = {
                told.path for told in self.told[told_before:] if told.operation == "write" and told.why == "EMFILE"
            }
            failures = await self._sync_all([flight.path for flight in flights if flight.path not in closed])
            results = [
                result if isinstance(result, DiskFailed) else failures.get(flight.path) or result
                for result, flight in zip(results, flights, strict=True)
            ]
        return results

    def _write_one(self, flight: _Flight, aim: Aim | None) -> WriteResult:
        disk, path = self._disk, flight.path
        file = disk._current.get(parent(path), {}).get(_last(path))
        if self._lacks_descriptor(aim, file):
            return self._tell("write", path, "EMFILE")
        if file is not None:
            self._wrote(file)
        why = aim.what if aim is not None and aim.what in ERRORS and aim.what != "EMFILE" else None
        if why is None and disk.faults.write_fails and self._draw() < disk.faults.write_fails:
            disk.counts["failed writes"] += 1
            why = "EIO"
        if why is None:
            return self._note("write", path, disk._write(path, flight.position, flight.data))
        kept = len(flight.data) if why == "lost" else disk.dice.randint(0, len(flight.data))
        if why == "ENOSPC":
            kept = min(kept, max(0, len(flight.data) - 1))
        short = self._note("write", path, disk._write(path, flight.position, flight.data[:kept]))
        return short or self._tell("write", path, why)

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
        aim = self._aimed("sync", path) if disk.aims else None
        await self._pause(path, aim, delays=True)
        await self._strike(aim, early=True)
        if file is None:
            return self._tell("sync", path, "ENOENT")
        if file in self._failed:
            return self._tell("sync", path, "EIO", again=True)
        if self._lacks_descriptor(aim, file):
            return self._tell("sync", path, "EMFILE")
        why = aim.what if aim is not None and aim.what in ERRORS and aim.what != "EMFILE" else None
        if why is None and faults.sync_fails and self._draw() < faults.sync_fails:
            why = "EIO"
        if why is not None:
            disk.counts["failed syncs"] += 1
            if why == "lost":
                disk._sync(file, until)
            else:
                disk._fail_sync(file, until)
            if self._draw() < faults.sync_failure_stays:
                self._failed.add(file)
            return self._tell("sync", path, why)
        disk._sync(file, until)
        if not file.unsynced:
            self._unsynced.pop(file, None)
        await self._strike(aim, early=False)
        return None

    async def sync_directory(self, path: str) -> None:
        assert_inside(path)
        disk = self._disk
        until = disk._number

        def sync() -> None:
            disk._directory(path)
            if disk.faults.directory_sync_fails and self._draw() < disk.faults.directory_sync_fails:
                disk.counts["failed syncs of a directory"] += 1
                raise self._tell("sync", path, "EIO")
            disk._sync_directory(path, until)

        opens = path not in self._renamed_in
        self._renamed_in.discard(path)
        await self._do("sync_directory", path, sync, opens=opens, delays=True)

    async def read(self, path: str, position: int, length: int) -> bytes:
        assert position >= 0 and length >= 0

        def read() -> bytes:
            file = self._disk._find(path)
            if self._disk.faults.read_fails and self._draw() < self._disk.faults.read_fails:
                self._disk.counts["failed reads"] += 1
                raise self._tell("read", path, "EIO")
            return bytes(memoryview(file.content)[position : position + length])

        return await self._do("read", path, read, opens=True)

    async def size(self, path: str) -> int:
        return await self._do("size", path, lambda: len(self._disk._find(path).content), opens=True)

    async def truncate(self, path: str, length: int) -> None:
        assert length >= 0

        def truncate() -> None:
            disk = self._disk
            file = disk._find(path)
            if disk._lacks_room_to_cut(file, length):
                disk.counts["no room"] += 1
                raise self._tell("truncate", path, "ENOSPC")
            self._wrote(file)
            disk._truncate(file, length)

        await self._do("truncate", path, truncate, opens=True)

    # --- names ---

    async def list(self, path: str) -> list[Entry]:
        assert_inside(path)

        def entries() -> list[Entry]:
            if self._disk._current.get(parent(path), {}).get(_last(path)) is not None:
                raise DiskFailed(path, "list", "it is a file")
            return [
                Entry(name, file is None, 0 if file is None else len(file.content))
                for name, file in sorted(self._disk._current.get(path, {}).items())
            ]

        return await self._do("list", path, entries, opens=True)

    async def make_directory(self, path: str) -> None:
        disk = self._disk
        parts = assert_inside(path).split("/") if path else []
        ancestors = ["/".join(parts[: i + 1]) for i in range(len(parts))]
        aim = self._aimed("make_directory", path) if disk.aims else None
        await self._pause(path, aim)
        await self._strike(aim, early=True)
        for ancestor in ancestors:
            if disk._current.get(parent(ancestor), {}).get(_last(ancestor)) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), ancestor)
        missing = [ancestor for ancestor in ancestors if ancestor not in disk._current or ancestor in self._unnamed]
        if missing:
            self._need_room_for_a_name("make", path)
        if missing and aim is not None and aim.what == "ENOSPC":
            raise self._tell("make", path, "ENOSPC")
        # All are made before any is synced: whoever makes one beside this call finds ours in what it would take away.
        for ancestor in missing:
            if ancestor not in disk._current:
                disk._number += 1
                disk._change_name(_NameChange(disk._number, parent(ancestor), _last(ancestor)))
                self._unnamed.add(ancestor)
        for ancestor in missing:
            if ancestor not in self._unnamed:
                continue  # another call has synced its name meanwhile
            until = disk._number
            await self._pause(path)
            failed = "EIO" if aim is not None and aim.what == "EIO" else ""
            if failed or self._lacks_descriptor(aim, None):
                # The sync of the name fails; the directories go again, if nobody is in them.
                for made in reversed(missing):
                    if made in self._unnamed and made in disk._current and not disk._current[made]:
                        disk._number += 1
                        disk._change_name(_NameChange(disk._number, parent(made), _last(made), gone=True))
                        self._unnamed.discard(made)
                raise self._tell("make", path, failed or "EMFILE")
            disk._sync_directory(parent(ancestor), until)
            self._unnamed.discard(ancestor)
        await self._strike(aim, early=False)
        if missing and aim is not None and aim.what == "lost":
            raise self._tell("make", path, "lost")

    async def rename_new(self, source: str, target: str) -> None:
        def rename() -> None:
            self._disk._find(source)
            if _last(assert_inside(target)) in self._disk._directory(parent(target)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            self._rename(source, target)

        await self._do("rename", target, rename, opens=True)

    async def rename(self, source: str, target: str) -> None:
        await self._do("rename", target, lambda: self._rename(source, target), opens=True)

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
            self._unsynced.pop(replaced, None)
            disk._bury(replaced)
        self._renamed_in.add(parent(target))

    async def remove(self, path: str) -> None:
        assert assert_inside(path), "the root stays"

        def remove() -> None:
            disk = self._disk
            names = disk._current.get(parent(path), {})
            if _last(path) not in names:
                return
            if disk._current.get(path):
                raise DiskFailed(path, "remove", os.strerror(errno.ENOTEMPTY))
            file = names[_last(path)]
            if file is not None:
                self._unsynced.pop(file, None)
                disk._bury(file)
            disk._number += 1
            disk._change_name(_NameChange(disk._number, parent(path), _last(path), gone=True))

        await self._do("remove", path, remove)

    async def free_bytes(self) -> int:
        return await self._do("free_bytes", "", lambda: self._disk.free_bytes)

    # --- locks ---

    async def lock(self, path: str) -> None:
        assert_inside(path)
        await self._pause(path)
        holder = self._disk._locks.get(path)
        if holder is not None:
            raise DirectoryInUse(path, holder.pid)
        self._disk._locks[path] = self
        if _last(path) not in self._disk._directory(parent(path)):
            disk = self._disk
            disk._number += 1
            disk._change_name(_NameChange(disk._number, parent(path), _last(path), _File()))

    async def unlock(self, path: str) -> None:
        await self._pause(path)
        assert self._disk._locks.get(path) is self, "only the holder unlocks"
        del self._disk._locks[path]

    # --- faults ---

    async def _do(
        self, operation: str, path: str, effect: Callable[[], T], *, opens: bool = False, delays: bool = False
    ) -> T:
        """One call that is done at one moment, and what it meets. It `opens` a file or directory for that."""
        aim = self._aimed(operation, path) if self._disk.aims else None
        await self._pause(path, aim, delays=delays)
        if opens and (aim is not None or self._disk.faults.no_descriptor):
            file = self._disk._current.get(parent(path), {}).get(_last(path))
            if self._lacks_descriptor(aim, file):
                raise self._tell(operation, path, "EMFILE")
        if aim is None:
            return effect()
        await self._strike(aim, early=True)
        if aim.what in ("EIO", "ENOSPC"):
            raise self._tell(operation, path, aim.what)
        result = effect()
        await self._strike(aim, early=False)
        if aim.what == "lost":
            raise self._tell(operation, path, "lost")
        return result

    def _aimed(self, operation: str, path: str) -> Aim | None:
        """The aim that this call meets, if any."""
        for aim in self._disk.aims:
            if aim.operation == operation and aim.where in path:
                aim.number -= 1
                if aim.number == 0:
                    self._disk.aims.remove(aim)
                    aim.hit = path
                    self._disk.counts["aimed faults"] += 1
                    return aim
        return None

    async def _strike(self, aim: Aim | None, *, early: bool) -> None:
        if aim is not None and aim.what in ("kill", "power") and aim.early == early:
            self._disk.strike(self, aim.what == "power")
            await self._live()

    def _tell(self, operation: str, path: str, why: str, *, again: bool = False) -> DiskFull | DiskFailed:
        """The error that FileDisk makes of it."""
        self.told.append(Told(operation, path, why, again))
        if why == "EMFILE":
            self._disk.counts["no descriptor"] += 1
        number = ERRORS.get(why, errno.ENOENT)
        # What could not be opened was not begun.
        name = "open" if why == "EMFILE" else "sync" if operation == "sync_directory" else operation
        return files._failure(OSError(number, os.strerror(number)), path, name)

    def _note(self, operation: str, path: str, result: WriteResult) -> WriteResult:
        if result is not None:
            self.told.append(Told(operation, path, "ENOSPC" if isinstance(result, DiskFull) else "ENOENT"))
        return result

    def _lacks_descriptor(self, aim: Aim | None, file: _File | None) -> bool:
        """Whether there is none for this file, or for a directory (None)."""
        if file is not None and file in self._unsynced:
            return False
        rate = self._disk.faults.no_descriptor
        return (aim is not None and aim.what == "EMFILE") or (rate > 0 and self._draw() < rate)

    def _wrote(self, file: _File) -> None:
        """It keeps its descriptor. Above the limit the oldest is synced, so that it can be closed."""
        disk = self._disk
        self._unsynced[file] = None
        limit = disk.faults.open_files_max
        while limit is not None and len(self._unsynced) > limit:
            oldest = next(each for each in self._unsynced)
            del self._unsynced[oldest]
            disk.counts["files closed for others"] += 1
            if oldest in self._failed:
                continue
            if disk.faults.sync_fails and self._draw() < disk.faults.sync_fails:
                disk.counts["failed syncs"] += 1
                disk._fail_sync(oldest, disk._number)
                self._failed.add(oldest)  # whoever syncs it later is told
            else:
                disk._sync(oldest, disk._number)

    def _need_room_for_a_name(self, operation: str, path: str) -> None:
        if self._disk.faults.names_need_room and self._disk.free_bytes <= 0:
            self._disk.counts["no room for a name"] += 1
            raise self._tell(operation, path, "ENOSPC")

    async def _pause(self, path: str, aim: Aim | None = None, *, delays: bool = False) -> None:
        """What the call takes. The dead wait for ever, and so does who hangs."""
        if self.dead:
            await self._live()
        faults = self._disk.faults
        seconds = self._draw() * faults.latency_seconds_max
        if delays and faults.delays and self._draw() < faults.delays:
            self._disk.counts["delays"] += 1
            seconds = self._draw() * faults.delay_seconds_max
        if faults.slow and faults.slow in path:
            seconds += self._draw() * faults.slow_seconds_max
        if aim is not None and aim.what == "delay":
            seconds += aim.seconds
        await asyncio.sleep(seconds)
        if aim is not None and aim.what == "hang":
            self.hangs = True
            await _for_ever()
        if self.dead:
            await self._live()

    async def _live(self) -> None:
        while self.dead:
            await _for_ever()


def _for_ever() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


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
