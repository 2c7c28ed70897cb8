"""Names below a directory: made, changed, listed, synced, locked. In a thread."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Sequence
from contextlib import suppress

from pydanube.errors import DirectoryInUse, DiskFailed, DiskFull
from pydanube.ports import Entry
from pydanube.stores.disk.descriptors import FILE_MODE, SHORT, Descriptors
from pydanube.stores.disk.directories import Directories
from pydanube.stores.disk.file_errors import failure_of, not_opened
from pydanube.stores.disk.paths import assert_inside

DIRECTORY_MODE = 0o750


class FileNames:
    """Below `root`. With `keeps_open`, a name that was changed can be synced without another descriptor."""

    def __init__(self, root: str, descriptors: Descriptors, *, keeps_open: bool) -> None:
        self._root = root
        self._descriptors = descriptors
        self._directories = Directories(descriptors.opening)
        self._making = threading.Lock()
        self._unsynced_names: set[str] = set()  # directories that were made and whose names are not synced yet
        self._keeps_open = keeps_open

    def close(self) -> None:
        self._directories.close()

    def _full(self, path: str) -> str:
        return f"{self._root}/{assert_inside(path)}" if path else self._root

    def list_entries(self, path: str) -> list[Entry]:
        return self._descriptors.opening(lambda: _list_directory(self._full(path)))

    def sync_directory(self, path: str) -> None:
        self._sync_names_in(self._full(path), path)

    def _sync_names_in(self, full: str, path: str) -> None:
        """`path` is for the error: what could not be opened is not broken."""
        try:
            fd = self._directories.open(full)
        except OSError as error:
            if error.errno not in SHORT:
                raise
            raise not_opened(error, path, "sync") from error
        self._directories.sync(full, fd)

    def make_directory(self, path: str) -> None:
        full = self._full(path)
        with self._making:
            unsynced: list[str] = []  # innermost first: made here, or by a concurrent call
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
        # No call returns before the names of directories it relies on are synced, whichever call made them.
        for each in reversed(unsynced):
            try:
                self._sync_names_in(os.path.dirname(each), path)
            except (OSError, DiskFull, DiskFailed) as error:
                self._unmake(unsynced)
                if isinstance(error, OSError):
                    raise failure_of(error, path, "sync") from error
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
                    continue  # another call uses it, and syncs its name too
                self._directories.forget(each)
                self._unsynced_names.discard(each)

    def rename(self, source: str, target: str) -> None:
        assert not os.path.isdir(self._full(source)), "only files are renamed"
        if self._keeps_open:
            self._expect_sync(target)
        os.replace(self._full(source), self._full(target))
        self._descriptors.move(source, target)

    def _expect_sync(self, path: str) -> None:
        """The name will be synced next, which must not fail for want of a descriptor."""
        with suppress(FileNotFoundError):  # the rename says so itself
            self._directories.expect(os.path.dirname(self._full(path)))

    def rename_new(self, source: str, target: str) -> None:
        assert not os.path.isdir(self._full(source)), "only files are renamed"
        # A second name, because link refuses one that is taken: the kernel decides who was first.
        os.link(self._full(source), self._full(target), follow_symlinks=False)
        os.unlink(self._full(source))
        self._descriptors.move(source, target)

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            try:
                os.unlink(self._full(path))
            except (IsADirectoryError, PermissionError):  # Linux says the one, POSIX the other
                os.rmdir(self._full(path))
                self._directories.forget(self._full(path))
        self._descriptors.drop(path)

    def free_bytes(self, path: str) -> int:
        found = os.statvfs(self._full(path))
        return found.f_bavail * found.f_frsize

    def lock(self, path: str) -> int:
        """The descriptor that holds the lock."""
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
        return fd


def _list_directory(full: str) -> list[Entry]:
    entries = []
    with suppress(FileNotFoundError), os.scandir(full) as found:
        for entry in found:
            with suppress(FileNotFoundError):  # removed while we looked
                is_directory = entry.is_dir(follow_symlinks=False)
                size_bytes = 0 if is_directory else entry.stat(follow_symlinks=False).st_size
                entries.append(Entry(entry.name, is_directory, size_bytes))
    return sorted(entries)
