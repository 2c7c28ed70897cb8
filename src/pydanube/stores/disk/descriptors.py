"""Open files by path, for many threads.

    opened ─► in use ◄─► idle ─► evicted, the longest idle first
                 │ ▲      ▲
          wrote  ▼ │      │ synced here, when too many are open, the longest unsynced first
               unsynced ──┘

The kernel reports a failed write-back to descriptors that were open when it happened. Were a descriptor
closed between a write and its sync, the sync on the next one might succeed. So one with unsynced
writes stays, and follows its file to another name, until a sync has covered them: the one that its user asks for, or
one that is made here because too many are open. If that sync fails no caller hears of it, and the kernel reports it
once; so the failure is kept with the name, and every later sync of that file raises it again.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeVar

from pydanube.stores.disk.paths import assert_inside

T = TypeVar("T")

FILE_MODE = 0o640
# What the system says when this process, or all together, have too much open, or it has no memory: nothing was done.
SHORT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
GIVEN_BACK: Final = 8  # descriptors, when the system has none for us


@dataclass(slots=True, eq=False)
class OpenFile:
    """`fd` stays open while `users` is above 0. All other fields belong to `Descriptors`."""

    fd: int
    path: str
    users: int = 0
    writes: int = 0  # how many were made
    synced: int = 0  # how many of them a sync has covered
    dropped: bool = False  # no longer in the table; closed by its last user
    failed: str = ""  # why a sync failed; every later sync of the file fails too, also by another descriptor
    syncing: threading.Lock = field(default_factory=threading.Lock)  # held by FileDisk during a sync


def sync_data(descriptor: OpenFile) -> str:
    """Syncs what was written to the file; why that failed, now or ever, or nothing."""
    # One at a time: the kernel tells of a lost page once, and a second caller must not take its silence for success.
    with descriptor.syncing:
        if not descriptor.failed:
            try:
                os.fdatasync(descriptor.fd)
            except OSError as error:
                descriptor.failed = error.strerror or str(error)
        return descriptor.failed


class Descriptors:
    """A table of at most `descriptors_max` descriptors, and more only while more are in use, or between a write and
    the next `evict`.

    A table of none looks every name up anew, because other processes may give it to another file at any time.
    """

    def __init__(self, root: str, descriptors_max: int) -> None:
        assert descriptors_max >= 0
        self._root = root
        self._descriptors_max = descriptors_max
        self._lock = threading.Lock()
        self._by_path: dict[str, OpenFile] = {}
        self._idle: OrderedDict[OpenFile, None] = OrderedDict()  # unused and synced, longest idle first
        self._unsynced: OrderedDict[OpenFile, None] = OrderedDict()  # unused, longest unsynced first
        self._failed: dict[str, str] = {}  # files whose sync failed, and why; they need not be open
        self._names_changed = 0

    def __len__(self) -> int:
        return len(self._by_path)

    def acquire(self, path: str) -> OpenFile:
        """Returns the descriptor of an existing file, for use until `release`. Raises OSError."""
        if not self._descriptors_max:
            return OpenFile(self._open(path), path, users=1, dropped=True)
        while True:
            with self._lock:
                descriptor = self._by_path.get(path)
                if descriptor is not None:
                    self._take(descriptor)
                    return descriptor
                names_changed = self._names_changed
            fd = self._open(path)
            with self._lock:
                # If a name was moved or removed in the meantime, this may be the file that had the name before.
                if names_changed == self._names_changed and path not in self._by_path:
                    descriptor = OpenFile(fd, path, users=1, failed=self._failed.get(path, ""))
                    self._by_path[path] = descriptor
                    return descriptor
            os.close(fd)

    def create(self, path: str) -> None:
        """Makes a file; its descriptor is ready for use. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        full = f"{self._root}/{assert_inside(path)}"
        fd = self.opening(lambda: os.open(full, flags, FILE_MODE))
        with self._lock:
            self._names_changed += 1
            self._drop(path)
            descriptor = self._by_path[path] = OpenFile(fd, path)
            self._idle[descriptor] = None
            self._evict()

    def evict(self, opening: int) -> list[OpenFile]:
        """So many files are about to be opened: others are closed for them. What cannot be closed before it is synced
        is returned, in use, to be synced, released and followed by another call.
        """
        with self._lock:
            self._evict(opening)
            surplus = len(self._by_path) + opening - self._descriptors_max
            oldest: list[OpenFile] = []
            while surplus > len(oldest) and self._unsynced:
                descriptor, _ = self._unsynced.popitem(last=False)
                descriptor.users += 1
                oldest.append(descriptor)
            return oldest

    def opening(self, function: Callable[[], T]) -> T:
        """Returns what `function` opens. If the system has no descriptor left, some of ours are given back first."""
        while True:
            try:
                return function()
            except OSError as error:
                if error.errno not in SHORT or not self._give_back():
                    raise

    def _give_back(self) -> bool:
        with self._lock:
            idle = [self._idle.popitem(last=False)[0] for _ in range(min(GIVEN_BACK, len(self._idle)))]
            for descriptor in idle:
                del self._by_path[descriptor.path]
                _close(descriptor)
            if idle or not self._unsynced:
                return bool(idle)
            descriptor, _ = self._unsynced.popitem(last=False)
            descriptor.users += 1
        written = descriptor.writes
        failed = sync_data(descriptor)
        self.release(descriptor, synced=0 if failed else written)
        return True

    def wrote(self, descriptor: OpenFile) -> int:
        """Tells that a write was made, whole or in part. Returns what to give to `release` after a sync."""
        with self._lock:
            descriptor.writes += 1
            return descriptor.writes

    def release(self, descriptor: OpenFile, *, synced: int = 0) -> None:
        """Ends a use. `synced` is the `writes` seen before a sync that has ended well since."""
        with self._lock:
            descriptor.synced = max(descriptor.synced, synced)
            descriptor.users -= 1
            self._settle(descriptor)

    def drop(self, path: str) -> None:
        """Forgets a name that was removed."""
        with self._lock:
            self._names_changed += 1
            self._drop(path)

    def move(self, source: str, target: str) -> None:
        """Follows a file that was renamed, and forgets the file it replaced."""
        with self._lock:
            self._names_changed += 1
            if source == target:
                return
            self._drop(target)
            if source in self._failed:
                self._failed[target] = self._failed.pop(source)
            descriptor = self._by_path.pop(source, None)
            if descriptor is not None:
                descriptor.path = target
                self._by_path[target] = descriptor

    def close(self) -> None:
        """Closes every descriptor that is not in use, synced or not, and the others after their use."""
        with self._lock:
            for path in list(self._by_path):
                self._drop(path)

    def _open(self, path: str) -> int:
        full = f"{self._root}/{assert_inside(path)}"
        return self.opening(lambda: os.open(full, os.O_RDWR | os.O_CLOEXEC))

    # --- with the lock held ---

    def _take(self, descriptor: OpenFile) -> None:
        descriptor.users += 1
        self._idle.pop(descriptor, None)
        self._unsynced.pop(descriptor, None)

    def _settle(self, descriptor: OpenFile) -> None:
        if descriptor.users:
            return
        if descriptor.dropped:
            _close(descriptor)
        elif descriptor.failed or descriptor.writes == descriptor.synced:
            if descriptor.failed:
                self._failed[descriptor.path] = descriptor.failed
            self._idle[descriptor] = None
            self._evict()
        else:
            self._unsynced[descriptor] = None

    def _drop(self, path: str) -> None:
        self._failed.pop(path, None)
        descriptor = self._by_path.pop(path, None)
        if descriptor is not None:
            self._idle.pop(descriptor, None)
            self._unsynced.pop(descriptor, None)
            descriptor.dropped = True
            self._settle(descriptor)

    def _evict(self, opening: int = 0) -> None:
        while len(self._by_path) + opening > self._descriptors_max and self._idle:
            descriptor, _ = self._idle.popitem(last=False)
            del self._by_path[descriptor.path]
            _close(descriptor)


def _close(descriptor: OpenFile) -> None:
    # An error here is about bytes that were synced, and reported then, or that belong to a removed file.
    with suppress(OSError):
        os.close(descriptor.fd)
