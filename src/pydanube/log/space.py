"""What the log does without space: a full disk, a log that has the size it may have, a lack of descriptors.

A full disk refuses every group until there is room for one again and for the ballast, a file that is given up so that
the metadata store can go on. The bound of bytes refuses groups, too; retention and uploads make room below it. A lack
of descriptors says nothing of the disk: where giving up would stop the log, the call is repeated for a while.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from pydanube.errors import DiskFailed, DiskFull, LogFull, ResourcesShort
from pydanube.log.commit_context import CommitConfig
from pydanube.log.layout import BALLAST
from pydanube.ports import Clock, Disk, Write

log = logging.getLogger(__name__)
T = TypeVar("T")

_ROOM_CHECK_SECONDS: Final = 0.25
_SHORT_SECONDS: Final = 0.1
_SHORT_SECONDS_MAX: Final = 30.0
_SHORT_LINE_SECONDS: Final = 10.0
NEAR_PERCENT: Final = 80  # of the bound: beyond that, what is uploaded leaves the disk whatever local retention says


class WalSpace:
    """The space of one data directory. `size_bytes` counts the segments of all open logs."""

    def __init__(self, disk: Disk, clock: Clock, config: CommitConfig, why_not_freed: Callable[[], str]) -> None:
        self._disk = disk
        self._clock = clock
        self._config = config
        self._why_not_freed = why_not_freed  # asked when the bound is met
        self.size_bytes = 0
        self._bytes_max = config.bytes_max or sys.maxsize
        self.too_large: LogFull | None = None  # why publishes are refused, if the bound is met
        self._asked_why = 0.0
        self.full: DiskFull | None = None  # why publishes are refused, if the disk is full
        self._full_until = 0.0
        self._said_short = -_SHORT_LINE_SECONDS

    # --- the bound of bytes ---

    def why_too_large(self) -> LogFull | None:
        """Why nothing may be written now, so that no producer waits for an upload; None: it may."""
        if self.size_bytes < self._bytes_max:
            return None
        full, now = self.too_large, self._clock.elapsed()
        if full is None or now - self._asked_why >= _ROOM_CHECK_SECONDS:  # the answer is a look at every topic
            begins = full is None
            full = self.too_large = LogFull(self.size_bytes, self._bytes_max, self._why_not_freed())
            self._asked_why = now
            if begins:
                log.error("log full", extra={"size_bytes": self.size_bytes, "why": str(full)})
        return full

    def freed(self, size_bytes: int) -> None:
        """Segments of so many bytes are not the log's any more."""
        self.size_bytes -= size_bytes
        if self.too_large is not None and self.size_bytes < self._bytes_max:
            self.too_large = None
            log.warning("log has room again", extra={"size_bytes": self.size_bytes})

    def excess_bytes(self) -> int:
        """How much should be freed now, so that the bound is not met; negative if nothing must."""
        return self.size_bytes - self._bytes_max * NEAR_PERCENT // 100

    # --- the disk ---

    async def disk_is_full(self, error: DiskFull) -> None:
        if isinstance(error, ResourcesShort):
            self.log_short(error)  # the disk has room, and other files may well be open
            return
        if self.full is None:
            log.error("disk full", extra={"path": error.path})
            self.full = error
            await self._disk.remove(BALLAST)  # leaves the metadata store room to write
        self._full_until = self._clock.elapsed() + _ROOM_CHECK_SECONDS

    async def is_free_again(self) -> bool:
        """Whether there is room for the ballast and a group; looks at most every _ROOM_CHECK_SECONDS."""
        if self._clock.elapsed() < self._full_until:
            return False
        needed = self._config.ballast_bytes + 2 * self._config.group_bytes
        if await self._disk.free_bytes() < needed:
            self._full_until = self._clock.elapsed() + _ROOM_CHECK_SECONDS
            return False
        await make_ballast(self._disk, self._config.ballast_bytes)
        log.warning("disk has room again")
        self.full = None
        return True

    # --- descriptors ---

    def log_short(self, error: ResourcesShort) -> None:
        if self._clock.elapsed() - self._said_short >= _SHORT_LINE_SECONDS:
            self._said_short = self._clock.elapsed()
            log.error("resources short", extra={"path": error.path, "why": error.why})

    async def retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Calls again, for a while, if the system has no descriptor: where giving up would stop the log."""
        since = self._clock.elapsed()
        while True:
            try:
                return await call()
            except ResourcesShort as error:
                self.log_short(error)
                if self._clock.elapsed() - since >= _SHORT_SECONDS_MAX:
                    raise
                await self._clock.sleep(_SHORT_SECONDS)

    async def sync_name(self, directory: str) -> None:
        """Behind a rename, which cannot be taken back: whatever fails here is DiskFailed."""
        try:
            await self.retry(lambda: self._disk.sync_directory(directory))
        except DiskFull as error:
            raise DiskFailed(directory, "sync", str(error)) from error


async def make_ballast(disk: Disk, size_bytes: int) -> None:
    """Space that can be freed immediately when the disk is full. A failure to make it is not an error."""
    if size_bytes == 0:
        return
    with contextlib.suppress(DiskFull):  # not even for a name, or no descriptor
        try:
            if await disk.size(BALLAST) == size_bytes:
                return
            await disk.remove(BALLAST)
        except FileNotFoundError:
            pass
        await disk.create(BALLAST)
        for failure in await disk.write([Write(BALLAST, 0, [bytes(size_bytes)])], sync=True):
            if failure is not None:
                await disk.remove(BALLAST)
