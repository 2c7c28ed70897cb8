"""A simulated disk, as one process has it: the Disk port, with the faults that its calls meet."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from pydanube.errors import DirectoryInUse, DiskFailed, DiskFull
from pydanube.ports import Entry, Write, WriteResult
from pydanube.stores.disk import file_errors
from pydanube.stores.disk.paths import assert_inside, parent
from pydanube.testing.disk_faults import ERRORS, DiskAim, Told
from pydanube.testing.disk_image import DiskFile, NameChange, last_part

if TYPE_CHECKING:
    from pydanube.testing.faulty_disk import FaultyDisk

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class DiskFlight:
    """A write that a process has asked for and that has not been done yet."""

    process: ProcessDisk
    path: str
    position: int
    data: bytes


class ProcessDisk:
    """One process's access to a FaultyDisk: the Disk port. `told` are the failures that it got."""

    def __init__(self, disk: FaultyDisk, pid: int) -> None:
        self.pid = pid
        self.dead = False
        self.told: list[Told] = []
        self.hangs = False  # a call that will never answer
        self._disk = disk
        self._draw = disk.rng.random
        self._failed: set[DiskFile] = set()  # files whose syncs fail from now on, in this process
        self._unnamed: set[str] = set()  # directories that were made and whose names are not synced yet
        self._unsynced: dict[DiskFile, None] = {}  # files that keep a descriptor: written, and not synced since
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
            if last_part(path) in names:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)
            self._need_space_for_a_name("create", path)
            disk._number += 1
            disk._change_name(NameChange(disk._number, parent(path), last_part(path), DiskFile()))

        await self._do("create", path, create, opens=True)

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        await _live(self)
        disk = self._disk
        # Taken now: what the caller does to its buffers while the call runs must not matter.
        flights = [
            DiskFlight(self, assert_inside(path), position, b"".join(buffers)) for path, position, buffers in writes
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
                    await _live(self)
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

    def _write_one(self, flight: DiskFlight, aim: DiskAim | None) -> WriteResult:
        disk, path = self._disk, flight.path
        file = disk._current.get(parent(path), {}).get(last_part(path))
        if self._lacks_descriptor(aim, file):
            return self._failure("write", path, "EMFILE")
        if file is not None:
            self._wrote(file)
        why = aim.what if aim is not None and aim.what in ERRORS and aim.what != "EMFILE" else None
        if why is None and disk.faults.write_fails and self._draw() < disk.faults.write_fails:
            disk.counts["failed writes"] += 1
            why = "EIO"
        if why is None:
            return self._note("write", path, disk._write(path, flight.position, flight.data))
        kept = len(flight.data) if why == "lost" else disk.rng.randint(0, len(flight.data))
        if why == "ENOSPC":
            kept = min(kept, max(0, len(flight.data) - 1))
        short = self._note("write", path, disk._write(path, flight.position, flight.data[:kept]))
        return short or self._failure("write", path, why)

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
        file = disk._current.get(parent(path), {}).get(last_part(path))
        aim = self._aimed("sync", path) if disk.aims else None
        await self._pause(path, aim, delays=True)
        await self._strike(aim, early=True)
        if file is None:
            return self._failure("sync", path, "ENOENT")
        if file in self._failed:
            return self._failure("sync", path, "EIO", again=True)
        if self._lacks_descriptor(aim, file):
            return self._failure("sync", path, "EMFILE")
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
            return self._failure("sync", path, why)
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
                raise self._failure("sync", path, "EIO")
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
                raise self._failure("read", path, "EIO")
            return bytes(memoryview(file.content)[position : position + length])

        return await self._do("read", path, read, opens=True)

    async def size(self, path: str) -> int:
        return await self._do("size", path, lambda: len(self._disk._find(path).content), opens=True)

    async def truncate(self, path: str, length: int) -> None:
        assert length >= 0

        def truncate() -> None:
            disk = self._disk
            file = disk._find(path)
            if disk._lacks_space_to_cut(file, length):
                disk.counts["no room"] += 1
                raise self._failure("truncate", path, "ENOSPC")
            self._wrote(file)
            disk._truncate(file, length)

        await self._do("truncate", path, truncate, opens=True)

    # --- names ---

    async def list(self, path: str) -> list[Entry]:
        assert_inside(path)

        def entries() -> list[Entry]:
            if self._disk._current.get(parent(path), {}).get(last_part(path)) is not None:
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
            if disk._current.get(parent(ancestor), {}).get(last_part(ancestor)) is not None:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), ancestor)
        missing = [ancestor for ancestor in ancestors if ancestor not in disk._current or ancestor in self._unnamed]
        if missing:
            self._need_space_for_a_name("make", path)
        if missing and aim is not None and aim.what == "ENOSPC":
            raise self._failure("make", path, "ENOSPC")
        # All are made before any is synced: a concurrent call that makes one finds ours in what it would remove.
        for ancestor in missing:
            if ancestor not in disk._current:
                disk._number += 1
                disk._change_name(NameChange(disk._number, parent(ancestor), last_part(ancestor)))
                self._unnamed.add(ancestor)
        for ancestor in missing:
            if ancestor not in self._unnamed:
                continue  # another call has synced its name in the meantime
            until = disk._number
            await self._pause(path)
            failed = "EIO" if aim is not None and aim.what == "EIO" else ""
            if failed or self._lacks_descriptor(aim, None):
                # The sync of the name fails; the directories go again, if they are empty.
                for made in reversed(missing):
                    if made in self._unnamed and made in disk._current and not disk._current[made]:
                        disk._number += 1
                        disk._change_name(NameChange(disk._number, parent(made), last_part(made), gone=True))
                        self._unnamed.discard(made)
                raise self._failure("make", path, failed or "EMFILE")
            disk._sync_directory(parent(ancestor), until)
            self._unnamed.discard(ancestor)
        await self._strike(aim, early=False)
        if missing and aim is not None and aim.what == "lost":
            raise self._failure("make", path, "lost")

    async def rename_new(self, source: str, target: str) -> None:
        def rename() -> None:
            self._disk._find(source)
            if last_part(assert_inside(target)) in self._disk._directory(parent(target)):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target)
            self._rename(source, target)

        await self._do("rename", target, rename, opens=True)

    async def rename(self, source: str, target: str) -> None:
        await self._do("rename", target, lambda: self._rename(source, target), opens=True)

    def _rename(self, source: str, target: str) -> None:
        disk = self._disk
        file = disk._find(source)
        assert assert_inside(target) not in disk._current, "only files are renamed"
        replaced = disk._directory(parent(target)).get(last_part(target))
        if source == target:
            return
        disk._number += 1
        change = NameChange(disk._number, parent(target), last_part(target), file)
        if parent(source) == parent(target):
            change.old = last_part(source)
            disk._change_name(change)
        else:
            disk._change_name(change)
            gone = NameChange(disk._number, parent(source), last_part(source), gone=True, needs=change)
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
            if last_part(path) not in names:
                return
            if disk._current.get(path):
                raise DiskFailed(path, "remove", os.strerror(errno.ENOTEMPTY))
            file = names[last_part(path)]
            if file is not None:
                self._unsynced.pop(file, None)
                disk._bury(file)
            disk._number += 1
            disk._change_name(NameChange(disk._number, parent(path), last_part(path), gone=True))

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
        if last_part(path) not in self._disk._directory(parent(path)):
            disk = self._disk
            disk._number += 1
            disk._change_name(NameChange(disk._number, parent(path), last_part(path), DiskFile()))

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
            file = self._disk._current.get(parent(path), {}).get(last_part(path))
            if self._lacks_descriptor(aim, file):
                raise self._failure(operation, path, "EMFILE")
        if aim is None:
            return effect()
        await self._strike(aim, early=True)
        if aim.what in ("EIO", "ENOSPC"):
            raise self._failure(operation, path, aim.what)
        result = effect()
        await self._strike(aim, early=False)
        if aim.what == "lost":
            raise self._failure(operation, path, "lost")
        return result

    def _aimed(self, operation: str, path: str) -> DiskAim | None:
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

    async def _strike(self, aim: DiskAim | None, *, early: bool) -> None:
        if aim is not None and aim.what in ("kill", "power") and aim.early == early:
            self._disk.strike(self, aim.what == "power")
            await _live(self)

    def _failure(self, operation: str, path: str, why: str, *, again: bool = False) -> DiskFull | DiskFailed:
        """The error that FileDisk makes of it."""
        self.told.append(Told(operation, path, why, again))
        if why == "EMFILE":
            self._disk.counts["no descriptor"] += 1
        number = ERRORS.get(why, errno.ENOENT)
        # What could not be opened was not begun.
        name = "open" if why == "EMFILE" else "sync" if operation == "sync_directory" else operation
        return file_errors.failure_of(OSError(number, os.strerror(number)), path, name)

    def _note(self, operation: str, path: str, result: WriteResult) -> WriteResult:
        if result is not None:
            self.told.append(Told(operation, path, "ENOSPC" if isinstance(result, DiskFull) else "ENOENT"))
        return result

    def _lacks_descriptor(self, aim: DiskAim | None, file: DiskFile | None) -> bool:
        """Whether there is none for this file, or for a directory (None)."""
        if file is not None and file in self._unsynced:
            return False
        rate = self._disk.faults.no_descriptor
        return (aim is not None and aim.what == "EMFILE") or (rate > 0 and self._draw() < rate)

    def _wrote(self, file: DiskFile) -> None:
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
                self._failed.add(oldest)  # a later sync of it gets the error
            else:
                disk._sync(oldest, disk._number)

    def _need_space_for_a_name(self, operation: str, path: str) -> None:
        if self._disk.faults.names_need_space and self._disk.free_bytes <= 0:
            self._disk.counts["no room for a name"] += 1
            raise self._failure(operation, path, "ENOSPC")

    async def _pause(self, path: str, aim: DiskAim | None = None, *, delays: bool = False) -> None:
        """The time that the call takes. Calls of a dead process, and calls that hang, never return."""
        if self.dead:
            await _live(self)
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
            await _live(self)


def _for_ever() -> asyncio.Future[Any]:
    return asyncio.get_running_loop().create_future()


async def _live(process: ProcessDisk) -> None:
    """Never returns if the process is dead."""
    while process.dead:
        await _for_ever()
