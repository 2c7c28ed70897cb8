"""Syncs of directories, for many threads.

A caller that asks while a directory is being synced cannot know whether that sync has seen its change, so it waits for
the next one, and shares it with all callers that wait for the same directory: three hundred topics that are created
together are three hundred names in one directory.

A name must not fail to be synced because no file can be opened any more: a segment that was renamed into place cannot
be taken back. So a caller that renames opens the directory first (`expect`), and the sync finds it open.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

EXPECTED_MAX: Final = 32  # directories that are open for a sync that has not come yet; beyond, the oldest is closed


@dataclass(slots=True, eq=False)
class _Turn:
    """One sync, for all who wait for it."""

    done: bool = False
    error: OSError | None = None


class Directories:
    """`opening` calls what opens a file, and frees a descriptor for it if it can (`Descriptors.opening`)."""

    def __init__(self, opening: Callable[[Callable[[], int]], int]) -> None:
        self._opening = opening
        self._changed = threading.Condition()
        self._next: dict[str, _Turn] = {}  # directory -> the sync that has not begun
        self._running: set[str] = set()
        self._expected: list[tuple[str, int]] = []  # directory, descriptor; oldest first

    def expect(self, full: str) -> None:
        """A name in this directory is about to be changed, and synced afterwards. Raises OSError."""
        fd = self._open(full)
        surplus = None
        with self._changed:
            self._expected.append((full, fd))
            if len(self._expected) > EXPECTED_MAX:
                _, surplus = self._expected.pop(0)
        if surplus is not None:
            os.close(surplus)

    def open(self, full: str) -> int:
        """A descriptor of the directory, which the caller closes; one that is there already if possible."""
        with self._changed:
            for i, (path, fd) in enumerate(self._expected):
                if path == full:
                    del self._expected[i]
                    return fd
        return self._open(full)

    def sync(self, full: str, fd: int) -> None:
        """Returns when a sync that began after this call has ended well, and closes `fd`. Raises OSError."""
        with self._changed:
            turn = self._next.get(full)
            leads = turn is None
            if turn is None:
                turn = self._next[full] = _Turn()
                while full in self._running:
                    self._changed.wait()
                del self._next[full]
                self._running.add(full)
            else:
                while not turn.done:
                    self._changed.wait()
        try:
            if leads:
                os.fsync(fd)
        except OSError as error:
            turn.error = error
        finally:
            with suppress(OSError):  # nothing was written through it
                os.close(fd)
            if leads:
                with self._changed:
                    turn.done = True
                    self._running.discard(full)
                    self._changed.notify_all()
        if turn.error is not None:
            raise OSError(turn.error.errno, turn.error.strerror)

    def forget(self, full: str) -> None:
        """The directory was removed: another of the same name must not be taken for it."""
        with self._changed:
            gone = [fd for path, fd in self._expected if path == full]
            self._expected = [each for each in self._expected if each[0] != full]
        for fd in gone:
            os.close(fd)

    def close(self) -> None:
        for _, fd in self._expected:
            os.close(fd)
        self._expected.clear()

    def _open(self, full: str) -> int:
        return self._opening(lambda: os.open(full, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
