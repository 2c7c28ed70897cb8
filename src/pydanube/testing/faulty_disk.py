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
    no space             DiskFull with any prefix of the write in place, until there is room again
    bit flips           `flip`, on demand, in what is durable
    slow file           calls on paths that contain `slow` take up to `slow_seconds_max` longer; others are quick
    open files          as stores/disk/descriptors.py does it: a file with unsynced writes keeps its descriptor; above
                        `open_files_max` the oldest is synced for that. `no_descriptor`: others of the process have
                        taken them all, so a call that must open something gets EMFILE

A rate meets a call site in proportion to how often it is called, so those that matter once in a life are met next to
never. Therefore one call may also be aimed at: `DiskAim("rename", 3, "lost")` makes the third rename, and tells its
caller that it failed. Whatever the program calls, every such call can be hit by everything that `MEETS` names for it.

Disks differ: files may be `sparse` (holes take no space), overwriting and cutting may need space
(`overwrites_need_space`, as in file systems that copy on write), and so may names (`names_need_space`).

Everything is drawn from the generator given, so the same seed on the same loop breaks the same things.
"""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Callable, Iterator
from random import Random

from pydanube.errors import DiskFailed, DiskFull
from pydanube.ports import WriteResult
from pydanube.stores.disk.paths import assert_inside, parent
from pydanube.testing.disk_faults import FREE_BYTES_UNBOUNDED, DiskAim, Faults
from pydanube.testing.disk_image import (
    SECTOR_BYTES,
    DiskFile,
    DiskNames,
    NameChange,
    WriteChange,
    apply_name,
    apply_write,
    last_part,
    survivor,
)
from pydanube.testing.process_disk import DiskFlight, ProcessDisk


class FaultyDisk:
    """The hardware. See the module's text. `counts` says how often each fault happened."""

    def __init__(
        self,
        rng: Random,
        *,
        capacity_bytes: int | None = None,
        faults: Faults | None = None,
        sparse: bool = False,
    ) -> None:
        self.rng = rng
        self.capacity_bytes = capacity_bytes
        self.faults = faults if faults is not None else Faults(latency_seconds_max=0.0)
        self.sparse = sparse
        self.counts: Counter[str] = Counter()
        self.aims: list[DiskAim] = []  # still to be met
        # What an aimed kill or power cut does; a harness that runs processes ends the process too.
        self.strike: Callable[[ProcessDisk, bool], None] = lambda process, power: (
            self.crash() if power else self.kill(process)
        )
        self._current: dict[str, DiskNames] = {"": {}}
        self._durable: dict[str, DiskNames] = {"": {}}
        self._name_changes: list[NameChange] = []
        self._flights: list[DiskFlight] = []
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
            keep = self.rng.choice((0, len(flight.data), self.rng.randint(0, len(flight.data))))
            self._write(flight.path, flight.position, flight.data[:keep])
        self._end(process)

    def crash(self, rng: Random | None = None) -> None:
        """The power goes and comes back: processes are dead; what was not synced is there in any part."""
        rng = rng or self.rng
        self.counts["power cuts"] += 1
        for process in list(self._processes):
            for flight in self._land(process):
                if rng.random() < 0.5:
                    self._write(flight.path, flight.position, flight.data)
            self._end(process)
        self._crash_names(rng)
        stale = self._graveyard if rng.random() < self.faults.stale_sectors else []
        for file in self._files():
            if file.unsynced:
                file.durable = survivor(file, rng, stale)
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
        file = self._durable.get(parent(path), {}).get(last_part(path))
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
        file = self._current.get(parent(path), {}).get(last_part(path))
        if file is None:
            return DiskFailed(path, "write", os.strerror(errno.ENOENT))
        failure: WriteResult = None
        content = file.content
        if data and self.capacity_bytes is not None:
            space = self._free_space(file, position, len(data))
            if space < len(data):
                self.counts["no room"] += 1
                failure = DiskFull(path)
                data = data[: self.rng.randint(0, space)]
        if not data:
            return failure
        end = position + len(data)
        if end > len(content):
            content.extend(bytes(end - len(content)))  # zeros, also between the old end and `position`
        content[position:end] = data
        if self.sparse:
            file.blocks.update(range(position // SECTOR_BYTES, (end - 1) // SECTOR_BYTES + 1))
        self._number += 1
        file.unsynced.append(WriteChange(self._number, position, data, len(content)))
        return failure

    def _free_space(self, file: DiskFile, position: int, length: int) -> int:
        """How many of so many bytes at this position find space."""
        free = max(0, self.free_bytes)
        space = length
        if self.sparse:
            left = free // SECTOR_BYTES
            for block in range(position // SECTOR_BYTES, (position + length - 1) // SECTOR_BYTES + 1):
                if block not in file.blocks:
                    left -= 1
                    if left < 0:
                        space = max(0, block * SECTOR_BYTES - position)
                        break
        elif position + length - len(file.content) > free:
            space = max(0, free + len(file.content) - position)
        if self.faults.overwrites_need_space and space > free:
            self.counts["no room to overwrite"] += 1
            space = free
        return space

    def _lacks_space_to_cut(self, file: DiskFile, length: int) -> bool:
        """A file that grows needs space; one that is cut, only where its blocks are copied for that."""
        more = length - len(file.content)
        if more > 0:
            return not self.sparse and more > self.free_bytes
        return self.faults.overwrites_need_space and self.free_bytes <= 0

    def _truncate(self, file: DiskFile, length: int) -> None:
        content = file.content
        content.extend(bytes(max(0, length - len(content))))
        del content[length:]
        if self.sparse:
            file.blocks = {block for block in file.blocks if block * SECTOR_BYTES < length}
        self._number += 1
        file.unsynced.append(WriteChange(self._number, length, None, length))

    def _sync(self, file: DiskFile, until: int) -> None:
        """Changes up to number `until` become durable."""
        count = 0
        for change in file.unsynced:
            if change.number > until:
                break
            apply_write(file.durable, change)
            count += 1
        del file.unsynced[:count]

    def _fail_sync(self, file: DiskFile, until: int) -> None:
        """The kernel tried to write the changes up to `until`, failed for some, and forgets all of them."""
        count = sum(change.number <= until for change in file.unsynced)
        tried = file.unsynced[:count]
        del file.unsynced[:count]
        file.durable = survivor(DiskFile(file.content, file.durable, tried), self.rng, [])
        file.dropped += tried
        if not file.unsynced and self.rng.random() < 0.3:
            # Clean pages may be thrown out of memory at any time; then reads show what is really there.
            length = len(file.content)
            file.content[:] = file.durable[:length].ljust(length, b"\0")
            file.dropped.clear()

    # --- names ---

    def _change_name(self, change: NameChange) -> None:
        apply_name(self._current, change)
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
                apply_name(self._durable, change.needs)
                change.needs.kept = True
            if not change.kept:
                apply_name(self._durable, change)
                change.kept = True
        self._name_changes = [change for change in rest if not change.kept]

    def _crash_names(self, rng: Random) -> None:
        mode = rng.choice(("all", "none", "prefix", "any", "any"))
        directories = sorted({change.directory for change in self._name_changes})
        limits = {
            directory: rng.randint(0, sum(change.directory == directory for change in self._name_changes))
            for directory in directories
        }
        seen: Counter[str] = Counter()
        for change in self._name_changes:
            if mode == "prefix":
                kept = seen[change.directory] < limits[change.directory]
            else:
                kept = mode == "all" or (mode == "any" and rng.random() < 0.5)
            seen[change.directory] += 1
            if kept and (change.needs is None or change.needs.kept):
                change.kept = True
                apply_name(self._durable, change)
        self._name_changes.clear()
        reachable: dict[str, DiskNames] = {}
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

    def _land(self, process: ProcessDisk) -> list[DiskFlight]:
        """Takes the process's writes that are going on."""
        flights = [flight for flight in self._flights if flight.process is process]
        self._flights = [flight for flight in self._flights if flight.process is not process]
        return flights

    def _end(self, process: ProcessDisk) -> None:
        process.dead = True
        self._locks = {path: holder for path, holder in self._locks.items() if holder is not process}
        self._processes.remove(process)

    def _files(self) -> Iterator[DiskFile]:
        for names in self._current.values():
            for file in names.values():
                if file is not None:
                    yield file

    def _find(self, path: str) -> DiskFile:
        assert_inside(path)
        names = self._current.get(parent(path), {})
        file = names.get(last_part(path))
        if file is None:
            if last_part(path) in names or path == "":
                raise DiskFailed(path, "open", os.strerror(errno.EISDIR))
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return file

    def _directory(self, path: str) -> DiskNames:
        try:
            return self._current[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path) from None

    def _bury(self, file: DiskFile) -> None:
        """Remembers a few sectors of a file that goes: its place on the disk is given to others uncleaned."""
        if file.content and len(self._graveyard) < 64:
            sector = self.rng.randrange(0, len(file.content), SECTOR_BYTES)
            self._graveyard.append(bytes(file.content[sector : sector + SECTOR_BYTES]))
