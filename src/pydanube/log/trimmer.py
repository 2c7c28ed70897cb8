"""Removes segments of an open log from its front, and writes the end of its epoch: everything that changes `wal.ckpt`.

The first offset that is kept is durable before any file is removed: after a crash in between the rest is removed, too.
A damaged segment is set aside, never removed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from pydanube.core.commit.sessions import Sessions
from pydanube.log.catalog import SegmentFile
from pydanube.log.layout import (
    CHECKPOINT,
    DAMAGE_SUFFIX,
    QUARANTINE_SUFFIX,
    Checkpoint,
    read_file,
    replace_file,
)
from pydanube.ports import Disk
from pydanube.telemetry import WalMetrics


class TrimResult(Protocol):
    """The log whose segments are removed."""

    epoch: int
    directory: str
    head: int
    append_time: int
    max_publish_time: int
    sessions: Sessions
    segments: list[SegmentFile]
    active: SegmentFile | None


class Trimmer:
    """Of one log. `lock` is held around every call: one change of `wal.ckpt` at a time."""

    def __init__(
        self, log: TrimResult, disk: Disk, metrics: WalMetrics, on_dropped: Callable[[Sequence[SegmentFile]], None]
    ) -> None:
        self._log = log
        self._disk = disk
        self._metrics = metrics
        self._on_dropped = on_dropped  # these are not the log's any more; their files go next
        self.lock = asyncio.Lock()
        self.kept_from = 0  # retention has removed what lies below

    async def truncate(self, before: int) -> None:
        """Drops segments that lie wholly below `before`, but never the newest."""
        log = self._log
        doomed: list[SegmentFile] = []
        for segment in log.segments[:-1]:
            if segment.end_offset > before or segment is log.active or segment.synced < segment.end:
                break
            doomed.append(segment)
        by_directory: dict[str, list[SegmentFile]] = {}
        for segment in doomed:
            by_directory.setdefault(segment.path.rpartition("/")[0], []).append(segment)
        for directory, segments in by_directory.items():
            await self._move_first_offset(directory, segments[-1].end_offset)
            del log.segments[: len(segments)]
            self._on_dropped(segments)
            self.kept_from = segments[-1].end_offset
            for segment in segments:
                await self._drop(segment)
            self._metrics.deletions["retention"] += len(segments)
            await self._disk.sync_directory(directory)

    async def drop(self, doomed: Sequence[SegmentFile], damaged: Sequence[tuple[int, int]]) -> None:
        """Drops these, wherever they are; those with `damaged` offsets are set aside."""
        # First: also if the disk is full, they are not read here any more, until the next start.
        log = self._log
        log.segments[:] = [segment for segment in log.segments if segment not in doomed]
        self._on_dropped(doomed)
        for directory in dict.fromkeys(segment.path.rpartition("/")[0] for segment in doomed):
            inside = [segment for segment in doomed if segment.path.startswith(f"{directory}/")]
            await self._move_first_offset(directory, inside[-1].end_offset)
            for segment in inside:
                rotten = any(first < segment.end_offset and segment.first_offset < end for first, end in damaged)
                await self._drop(segment, set_aside=rotten)
            self._metrics.deletions["adopted"] += len(inside)
            await self._disk.sync_directory(directory)

    async def finish(self, active: SegmentFile) -> None:
        """The epoch ends where the log ends: nothing is ever added to it."""
        log = self._log
        path = f"{log.directory}/{CHECKPOINT}"
        known = Checkpoint.from_bytes(await read_file(self._disk, path) or b"")
        begins = next(s.first_offset for s in log.segments if s.header.epoch == log.epoch)
        finished = Checkpoint(
            first_offset=known.first_offset if known else begins,
            finished=True,
            end_offset=log.head,
            segment_id=active.segment_id,
            end_position=active.end,
            append_time=log.append_time,
            max_publish_time=log.max_publish_time,
            sessions=log.sessions.to_bytes(),
        )
        await replace_file(self._disk, path, finished.to_bytes())

    async def _move_first_offset(self, directory: str, first_offset: int) -> None:
        """Durably, before anything is removed: after a crash in between the rest is removed too."""
        path = f"{directory}/{CHECKPOINT}"
        known = Checkpoint.from_bytes(await read_file(self._disk, path) or b"")
        fields = {name: getattr(known, name) for name in Checkpoint.__slots__} if known else {}
        moved = Checkpoint(**{**fields, "first_offset": first_offset})
        await replace_file(self._disk, path, moved.to_bytes())

    async def _drop(self, segment: SegmentFile, *, set_aside: bool = False) -> None:
        try:
            await self._disk.size(segment.path + DAMAGE_SUFFIX)
        except FileNotFoundError:
            if not (segment.damaged or set_aside):
                await self._disk.remove(segment.path)
                return
        await self._disk.rename(segment.path, segment.path + QUARANTINE_SUFFIX)
