"""Open files by path, for many threads.

    opened ─► in use ◄─► idle ─► evicted, the longest idle first
                 │ ▲
          wrote  ▼ │ synced
               unsynced          never evicted, however many there are

The kernel reports a failed write-back to descriptors that were open when it happened. Were a descriptor
closed between a write and its sync, the next one might be told that all is well. So one with unsynced
writes stays, and follows its file to another name. One whose sync failed stays too, to say so again.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field

from pydanube.stores.paths import assert_inside

FILE_MODE = 0o640


@dataclass(slots=True, eq=False)
class Descriptor:
    """`fd` stays open while `users` is above 0. All other fields belong to `Descriptors`."""

    fd: int
    path: str
    users: int = 0
    writes: int = 0  # how many were made
    synced: int = 0  # how many of them a sync has covered
    dropped: bool = False  # no longer in the table; closed by its last user
    failed: str = ""  # why a sync failed; such a descriptor stays, and every later sync fails
    syncing: threading.Lock = field(default_factory=threading.Lock)  # held by FileDisk during a sync


class Descriptors:
    """A table of at most `descriptors_max` descriptors, and more only while more are in use or unsynced.

    A table of none looks every name up anew, because other processes may give it to another file at any time.
    """

    def __init__(self, root: str, descriptors_max: int) -> None:
        assert descriptors_max >= 0
        self._root = root
        self._descriptors_max = descriptors_max
        self._lock = threading.Lock()
        self._by_path: dict[str, Descriptor] = {}
        self._idle: OrderedDict[Descriptor, None] = OrderedDict()  # unused and synced, longest idle first
        self._names_changed = 0

    def __len__(self) -> int:
        return len(self._by_path)

    def acquire(self, path: str) -> Descriptor:
        """Returns the descriptor of an existing file, for use until `release`. Raises OSError."""
        if not self._descriptors_max:
            return Descriptor(self._open(path), path, users=1, dropped=True)
        while True:
            with self._lock:
                descriptor = self._by_path.get(path)
                if descriptor is not None:
                    descriptor.users += 1
                    self._idle.pop(descriptor, None)
                    return descriptor
                names_changed = self._names_changed
            fd = self._open(path)
            with self._lock:
                # If a name was moved or removed meanwhile, this may be the file that had the name before.
                if names_changed == self._names_changed and path not in self._by_path:
                    descriptor = self._by_path[path] = Descriptor(fd, path, users=1)
                    return descriptor
            os.close(fd)

    def create(self, path: str) -> None:
        """Makes a file; its descriptor is ready for use. Raises OSError."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        fd = os.open(f"{self._root}/{assert_inside(path)}", flags, FILE_MODE)
        with self._lock:
            self._names_changed += 1
            self._drop(path)
            descriptor = self._by_path[path] = Descriptor(fd, path)
            self._idle[descriptor] = None
            self._evict()

    def wrote(self, descriptor: Descriptor) -> int:
        """Tells that a write was made, whole or in part. Returns what to give to `release` after a sync."""
        with self._lock:
            descriptor.writes += 1
            return descriptor.writes

    def release(self, descriptor: Descriptor, *, synced: int = 0) -> None:
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
            descriptor = self._by_path.pop(source, None)
            if descriptor is not None:
                descriptor.path = target
                self._by_path[target] = descriptor

    def close(self) -> None:
        """Closes every descriptor that nobody uses, synced or not, and the others after their use."""
        with self._lock:
            for path in list(self._by_path):
                self._drop(path)

    def _open(self, path: str) -> int:
        return os.open(f"{self._root}/{assert_inside(path)}", os.O_RDWR | os.O_CLOEXEC)

    # --- with the lock held ---

    def _settle(self, descriptor: Descriptor) -> None:
        if descriptor.users:
            return
        if descriptor.dropped:
            _close(descriptor)
        elif descriptor.writes == descriptor.synced:
            self._idle[descriptor] = None
            self._evict()

    def _drop(self, path: str) -> None:
        descriptor = self._by_path.pop(path, None)
        if descriptor is not None:
            self._idle.pop(descriptor, None)
            descriptor.dropped = True
            self._settle(descriptor)

    def _evict(self) -> None:
        while len(self._by_path) > self._descriptors_max and self._idle:
            descriptor, _ = self._idle.popitem(last=False)
            del self._by_path[descriptor.path]
            _close(descriptor)


def _close(descriptor: Descriptor) -> None:
    # An error here is about bytes that were synced, and reported then, or that belong to a removed file.
    with suppress(OSError):
        os.close(descriptor.fd)
