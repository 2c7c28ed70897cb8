"""Writes of many files in one call, and their syncs: in a thread, or on the spot if the disk is quick (`files.py`)."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pydanube.errors import DiskFailed
from pydanube.ports import Buffer, Write, WriteResult
from pydanube.stores.disk.descriptors import Descriptors, OpenFile, sync_data
from pydanube.stores.disk.file_errors import failure_of, not_opened

T = TypeVar("T")

SYNCS_MAX = 8  # side by side; more gained nothing
LATER_SYNCS_MAX = 4  # of files that were written before: no commit waits for them
# A larger write makes the kernel look for larger pieces of free memory, which at times takes longer than the disk:
# 8 MiB in one call took 2 ms or 20 ms, in calls of 1 MiB always 2 ms.
WRITE_BYTES_MAX = 1024 * 1024
IOV_MAX = os.sysconf("SC_IOV_MAX")  # how many buffers one pwritev takes
SPOT_SECONDS = 0.0004
SPOT_WEIGHT = 1 / 16  # of the latest write in the average


class FileWriter:
    """Runs in any thread."""

    def __init__(self, descriptors: Descriptors, descriptors_max: int) -> None:
        self._descriptors = descriptors
        self._files_at_once = max(1, descriptors_max // 4)
        self._syncs = ThreadPoolExecutor(SYNCS_MAX, thread_name_prefix="disk-sync")
        self._later_syncs = ThreadPoolExecutor(LATER_SYNCS_MAX, thread_name_prefix="disk-sync-later")
        self._may_spot = descriptors_max > 0
        self._small_seconds = 1.0  # a small write with sync, on average; trust is earned

    def close(self) -> None:
        self._syncs.shutdown()
        self._later_syncs.shutdown()

    @property
    def is_quick(self) -> bool:
        """Whether small writes with sync have lately been so quick that the event loop may wait for one."""
        return self._may_spot and self._small_seconds < SPOT_SECONDS

    def write_small(self, writes: Sequence[Write]) -> list[WriteResult]:
        began = time.perf_counter()
        results = [self._write_one(writes[0])] if len(writes) == 1 else self.write(writes, True)
        self._small_seconds += (time.perf_counter() - began - self._small_seconds) * SPOT_WEIGHT
        return results

    def _write_one(self, write: Write) -> WriteResult:
        """As `_write` with sync, for the single write of a commit: with a tenth of the steps."""
        path, position, buffers = write
        descriptors = self._descriptors
        try:
            descriptor = descriptors.acquire(path)
        except OSError as error:
            return not_opened(error, path, "write")
        result: WriteResult = None
        synced = 0
        try:
            try:
                _write_all(descriptor.fd, buffers, position)
            except OSError as error:
                result = failure_of(error, path, "write")
            written = descriptors.wrote(descriptor)
            failure = _sync_failure(descriptor, path)
            synced = 0 if failure else written
            return failure or result  # a caller that could free space and go on must hear of lost bytes
        finally:
            descriptors.release(descriptor, synced=synced)

    def write(self, writes: Sequence[Write], sync: bool) -> list[WriteResult]:
        results: list[WriteResult] = []
        for slice_ in _slices(writes, self._files_at_once):
            self._evict(len({write.path for write in slice_}))
            results += self._write_slice(slice_, sync)
        return results

    def _write_slice(self, writes: Sequence[Write], sync: bool) -> list[WriteResult]:
        descriptors = self._descriptors
        results: list[WriteResult] = [None] * len(writes)
        used: dict[str, OpenFile] = {}
        failed: dict[str, WriteResult] = {}
        try:
            for i, (path, position, buffers) in enumerate(writes):
                if path in failed:
                    results[i] = failed[path]  # nothing behind what is missing
                    continue
                try:
                    descriptor = used.get(path)
                    if descriptor is None:
                        descriptor = used[path] = descriptors.acquire(path)
                    _write_all(descriptor.fd, buffers, position)
                except OSError as error:
                    results[i] = failed[path] = failure_of(error, path, "write")
        finally:
            # Also when a bug is on its way up: a descriptor that is never released is never closed.
            failures = self._sync_each(used, sync)
        if any(failures.values()):
            for i, write in enumerate(writes):
                results[i] = failures.get(write.path) or results[i]
        return results

    def _evict(self, opening: int) -> None:
        """Files with unsynced writes are synced and closed, if too many are open."""
        while oldest := self._descriptors.evict(opening):
            written = [descriptor.writes for descriptor in oldest]
            failures = list(self._syncs.map(sync_data, oldest))
            for descriptor, writes, failed in zip(oldest, written, failures, strict=True):
                self._descriptors.release(descriptor, synced=0 if failed else writes)

    def _sync_each(self, used: dict[str, OpenFile], sync: bool) -> dict[str, DiskFailed | None]:
        """Ends the use of descriptors that were written to; first syncs each, if asked to."""

        written = {path: self._descriptors.wrote(descriptor) for path, descriptor in used.items()}
        failures: dict[str, DiskFailed | None] = {}
        if sync:
            results = self._each(self._syncs, lambda path: _sync_failure(used[path], path), used)
            failures = dict(zip(used, results, strict=True))
        for path, descriptor in used.items():
            self._descriptors.release(descriptor, synced=written[path] if sync and not failures[path] else 0)
        return failures

    def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        def one(path: str) -> WriteResult:
            try:
                descriptor = self._descriptors.acquire(path)
            except OSError as error:
                return not_opened(error, path, "sync")
            written = descriptor.writes
            failure = _sync_failure(descriptor, path)
            self._descriptors.release(descriptor, synced=0 if failure else written)
            return failure

        return list(self._each(self._later_syncs, one, paths))

    @staticmethod
    def _each(threads: ThreadPoolExecutor, function: Callable[[str], T], paths: Collection[str]) -> Iterator[T]:
        """Calls `function` with every path. Several syncs at a time share one commit of the file system's own
        journal: eight files of 1 MiB took 32 ms one after the other and 6 ms side by side.
        """
        if len(paths) > 1:
            return threads.map(function, paths)
        return map(function, paths)


def _write_all(fd: int, buffers: Sequence[Buffer], position: int) -> None:
    """All of it, in calls of at most WRITE_BYTES_MAX and IOV_MAX buffers. Raises OSError."""
    sizes = [buffer.nbytes if isinstance(buffer, memoryview) else len(buffer) for buffer in buffers]
    if sum(sizes) <= WRITE_BYTES_MAX and len(buffers) <= IOV_MAX:
        written = os.pwritev(fd, buffers, position) if buffers else 0
        if written == sum(sizes):
            return
    else:
        written = 0
    # Large, or more buffers than one call takes, or a disk about to be full.
    left = deque(memoryview(buffer).cast("B") for buffer in buffers)
    total = written
    while True:
        while left and written >= left[0].nbytes:
            written -= left.popleft().nbytes
        if not left:
            return
        left[0] = left[0][written:]
        written = os.pwritev(fd, _piece(left), position + total)
        if written == 0:
            raise OSError(errno.EIO, "nothing was written")
        total += written


def _piece(left: deque[memoryview]) -> list[memoryview]:
    """What one call writes."""
    piece: list[memoryview] = []
    free_bytes = WRITE_BYTES_MAX
    for view in left:
        piece.append(view[:free_bytes])
        free_bytes -= piece[-1].nbytes
        if free_bytes == 0 or len(piece) == IOV_MAX:
            break
    return piece


def _slices(writes: Sequence[Write], files_max: int) -> Iterator[Sequence[Write]]:
    """Writes of at most so many files, in order. Those of one file that follow each other stay together."""
    if len(writes) <= files_max:
        yield writes
        return
    start = files = 0
    for i, write in enumerate(writes):
        if i > start and write.path == writes[i - 1].path:
            continue
        if files == files_max:
            yield writes[start:i]
            start, files = i, 0
        files += 1
    yield writes[start:]


def _sync_failure(descriptor: OpenFile, path: str) -> DiskFailed | None:
    failed = sync_data(descriptor)
    return DiskFailed(path, "sync", failed) if failed else None
