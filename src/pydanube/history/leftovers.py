"""What this disk has of topics that others have, or had since: when it may go, and how.

    epoch on this disk ─┬─ every offset is in an object, void, or below history ─┬─ whole ───► removed
                        │                                                        └─ damaged ─► set aside, for a person
                        └─ anything else ─► stays: it may be the only copy

Nothing here remembers what was sealed, adopted or given up: the files are compared with what the store says now. What
is covered once stays covered, so the topic needs no owner for that. The attacks on this rule, and why they
fail, are in docs/adr/0003-the-cluster.md.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.core.history.tiers import Objects
from pydanube.core.names import TopicName
from pydanube.errors import DiskFull, LogDamaged, OffsetOutOfRange
from pydanube.log.layout import (
    CHECKPOINT,
    DAMAGE_SUFFIX,
    JOURNALS,
    QUARANTINE_SUFFIX,
    SEGMENT_SUFFIX,
    TORN_SUFFIX,
    Checkpoint,
    epoch_directory,
    replace_file,
    topic_directory,
)
from pydanube.log.recovered import RecoveredEpoch
from pydanube.log.wal import ClosedLog
from pydanube.ports import Disk

log = logging.getLogger(__name__)

CHECK_READ_BYTES: Final = 1024 * 1024


async def epochs_on(disk: Disk, name: TopicName) -> list[int]:
    """The epochs of the topic that this disk has a directory of."""
    return [int(entry.name) for entry in await disk.list(topic_directory(name)) if entry.name.isdecimal()]


async def epochs_with_logs(disk: Disk, name: TopicName) -> list[int]:
    """The same without those of which everything was set aside."""
    return [epoch for epoch in await epochs_on(disk, name) if await _has_log(disk, epoch_directory(name, epoch))]


async def _has_log(disk: Disk, directory: str) -> bool:
    return any(_is_log(entry.name) for entry in await disk.list(directory))


def _is_log(name: str) -> bool:
    return name.endswith(SEGMENT_SUFFIX) or name == CHECKPOINT


async def remove_redundant(
    disk: Disk,
    name: TopicName,
    closed: ClosedLog,
    last: int,
    *,
    first_offset: int,
    objects: Objects,
    voids: Sequence[tuple[int, int]],
) -> None:
    """Of the epochs up to `last`, those that the store has: all its objects from `first_offset` on, and its voids."""
    changed = False
    for epoch in [each for each in closed.recovered.epochs if each.epoch <= last]:
        gaps = [
            gap
            for segment in epoch.segments
            for gap in objects.missing(max(segment.first_offset, first_offset), segment.end_offset)
        ]
        if is_uncovered(gaps, voids):
            log.info("files of a lost epoch stay: the store does not have it all", extra=_told(name, epoch.epoch))
            continue
        changed = True
        if epoch.damage or await is_damaged(disk, epoch.directory) or not await _is_readable(closed, gaps):
            await _set_aside(disk, epoch)
            log.warning("damaged files are left", extra={**_told(name, epoch.epoch), "path": epoch.directory})
        else:
            await _decide(disk, epoch)
            await _remove_tree(disk, epoch.directory)
            log.info("files of a redundant epoch removed", extra=_told(name, epoch.epoch))
    if changed:
        await disk.sync_directory(topic_directory(name))  # else a power cut brings them back


def is_uncovered(gaps: Sequence[tuple[int, int]], voids: Sequence[tuple[int, int]]) -> bool:
    """Whether what no object has is not void either."""
    void = OffsetRanges(voids)
    return any(first < end and void.gaps(first, end) for first, end in gaps)


def _told(name: TopicName, epoch: int) -> dict[str, object]:
    return {"topic": name, "epoch": epoch}


async def _decide(disk: Disk, epoch: RecoveredEpoch) -> None:
    """Durably: what a crash leaves of it is taken for removed, not for damaged."""
    gone = Checkpoint(first_offset=epoch.end_offset, finished=True, end_offset=epoch.end_offset)
    with contextlib.suppress(DiskFull):  # then it goes without: that frees space
        await replace_file(disk, f"{epoch.directory}/{CHECKPOINT}", gone.to_bytes())


async def _is_readable(closed: ClosedLog, gaps: Sequence[tuple[int, int]]) -> bool:
    """What no object has, and is void: if it is void because it cannot be read, a person may want to look at it."""
    try:
        for first, end in gaps:
            reader = closed.reader(first)
            while reader.offset < end and await reader.read(CHECK_READ_BYTES):
                pass
    except (LogDamaged, OffsetOutOfRange):
        return False
    return True


async def is_damaged(disk: Disk, directory: str) -> bool:
    """Whether something in it was found damaged, and is kept for a person."""
    return any(entry.name.endswith((DAMAGE_SUFFIX, QUARANTINE_SUFFIX)) for entry in await disk.list(directory))


async def files_set_aside(disk: Disk, name: TopicName) -> list[str]:
    """What is kept for a person, with messages of the topic: damaged segments, ends that were torn off, and journals
    that were damaged, of all topics. Journals and segments under such names are never read again.
    """
    found = []
    for epoch in await epochs_on(disk, name):
        directory = epoch_directory(name, epoch)
        kept = (f"{SEGMENT_SUFFIX}{TORN_SUFFIX}", f"{SEGMENT_SUFFIX}{QUARANTINE_SUFFIX}")
        found += [f"{directory}/{each.name}" for each in await disk.list(directory) if each.name.endswith(kept)]
    journals = [each.name for each in await disk.list(JOURNALS)]
    return found + [f"{JOURNALS}/{each}" for each in journals if each.endswith(DAMAGE_SUFFIX)]


async def _set_aside(disk: Disk, epoch: RecoveredEpoch) -> None:
    """Its files stay, under names that no recovery looks at."""
    for entry in await disk.list(epoch.directory):
        if _is_log(entry.name):
            path = f"{epoch.directory}/{entry.name}"
            await disk.rename(path, path + QUARANTINE_SUFFIX)
    await disk.sync_directory(epoch.directory)


async def remove_epochs(disk: Disk, name: TopicName, last: int) -> None:
    """What this disk has of the topic up to this epoch, for good. What came later stays."""
    epochs = await epochs_on(disk, name)
    for epoch in epochs:
        if epoch <= last:
            await _remove_tree(disk, epoch_directory(name, epoch))
    if min(epochs, default=last + 1) <= last:
        await disk.sync_directory(topic_directory(name))  # else a power cut brings them back


async def remove_files(disk: Disk, name: TopicName) -> None:
    """Everything that this disk has of the topic."""
    directory = topic_directory(name)
    await _remove_tree(disk, directory)
    with contextlib.suppress(FileNotFoundError):
        await disk.sync_directory(directory.rpartition("/")[0])


async def _remove_tree(disk: Disk, path: str) -> None:
    for entry in await disk.list(path):
        inner = f"{path}/{entry.name}"
        if entry.is_directory:
            await _remove_tree(disk, inner)
        else:
            await disk.remove(inner)
    await disk.remove(path)
