"""Checks every byte of a data directory without changing it, and walks its batches.

What is looked at is the log as the next start would recover it. Every segment is read from its first group to its end:
group headers, numbers and checksums, batch checksums, contiguous offsets, epochs that only grow, times that never
decrease. Damage does not end the walk: it is named, and the walk goes on behind it where it can.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Final

from pydanube.errors import InvalidBatch
from pydanube.formats.batch import Batch, topic_hash
from pydanube.formats.segment import (
    GROUP_HEADER_SIZE,
    batches_of,
    body_is_whole,
    decode_group_header,
)
from pydanube.log.catalog import SegmentFile
from pydanube.log.copy_on_write_disk import CopyOnWriteDisk
from pydanube.log.journal_redo import redo_journals
from pydanube.log.layout import JOURNALS, LOCK, TORN_SUFFIX
from pydanube.log.recovered import Recovered, TailState
from pydanube.log.recovery import recover_topic
from pydanube.log.searching import GroupSearch
from pydanube.log.wal import check_format, topics_on
from pydanube.ports import Clock, Disk, Work

_GROUP_BYTES_MAX: Final = 256 * 1024 * 1024


@dataclass(slots=True)
class TopicReport:
    """What one topic's log holds and what is wrong with it."""

    topic: str
    epochs: int = 0
    segments: int = 0
    batches: int = 0
    messages: int = 0
    size_bytes: int = 0
    first_offset: int = 0
    head: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)  # offsets that another broker's log has
    notes: list[str] = field(default_factory=list)  # worth knowing, nothing is lost
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class LogReport:
    topics: list[TopicReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, nothing is lost unless the disk has rotted
    problems: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems and not any(topic.problems for topic in self.topics)


async def verify(
    disk: Disk, clock: Clock, work: Work, *, progress: Callable[[str, int], None] = lambda topic, size: None
) -> LogReport:
    """Checks everything. `progress` is called with the topic and the bytes read since the last call.

    Raises DirectoryInUse while a broker holds the directory: its files change under the reader.
    """
    report = LogReport()
    await disk.lock(LOCK)
    try:
        view = CopyOnWriteDisk(disk)
        await check_format(view)
        report.problems += (await redo_journals(view)).values()
        report.notes += [
            f"{JOURNALS}/{entry.name}: {entry.size_bytes} bytes of an unfinished journal record; not acknowledged"
            for entry in await view.list(JOURNALS)
            if entry.name.endswith(TORN_SUFFIX)
        ]
        for topic in await topics_on(view):
            recovered = await recover_topic(view, clock, work, topic, journal_damaged=bool(report.problems))
            report.topics.append(await _verify_topic(view, recovered, progress))
    finally:
        await disk.unlock(LOCK)
    return report


async def walk(
    disk: Disk, clock: Clock, work: Work, topic: str, offset: int, *, problem: Callable[[str], None] = lambda text: None
) -> AsyncIterator[Batch]:
    """The topic's batches from `offset` on, session records too, as the next start would find them.

    `problem` is called with what cannot be read, at the place where it is missing.
    """
    await disk.lock(LOCK)
    try:
        view = CopyOnWriteDisk(disk)
        await check_format(view)
        await redo_journals(view)
        recovered = await recover_topic(view, clock, work, topic)
        for damage in recovered.damage:
            if damage.position == 0:  # a whole file; damage inside one is met on the way
                problem(str(damage))
        for segment in recovered.segments:
            if segment.end_offset > offset:
                report = TopicReport(topic)
                async for batch in _Walker(view, segment, report).batches(lambda topic, size: None):
                    while report.problems:
                        problem(report.problems.pop(0))
                    if batch.header.end_offset > offset or not batch.header.rows:
                        yield batch
                for text in report.problems:
                    problem(text)
    finally:
        await disk.unlock(LOCK)


async def _verify_topic(view: Disk, recovered: Recovered, progress: Callable[[str, int], None]) -> TopicReport:
    report = TopicReport(recovered.topic, epochs=len(recovered.epochs), head=recovered.head)
    for torn in recovered.torn:
        report.notes.append(
            f"{torn.path}: {torn.length} bytes of an unfinished write at position {torn.position}; not acknowledged"
        )
    report.problems += [str(damage) for damage in recovered.damage]
    if recovered.tail is TailState.UNPROVEN:
        report.problems.append(f"the log cannot prove its end: {recovered.epochs[-1].why}")
    segments = recovered.segments
    report.segments = len(segments)
    report.first_offset = segments[0].first_offset if segments else 0
    expected = report.first_offset
    for segment in segments:
        if segment.first_offset > expected and not _is_lost(recovered, expected):
            report.holes.append((expected, segment.first_offset))
        elif segment.first_offset < expected:
            report.problems.append(f"{segment.path} begins at {segment.first_offset} where {expected} must be")
        expected = segment.end_offset
        walker = _Walker(view, segment, report)
        async for batch in walker.batches(progress):
            if batch.header.rows:
                report.batches += 1
                report.messages += batch.header.rows
            report.size_bytes += batch.header.size_bytes
    return report


def _is_lost(recovered: Recovered, offset: int) -> bool:
    return any(each.first <= offset and (each.end is None or offset < each.end) for each in recovered.damage)


class _Walker:
    """Reads one segment from start to end."""

    def __init__(self, disk: Disk, segment: SegmentFile, report: TopicReport) -> None:
        self._disk = disk
        self._segment = segment
        self._report = report
        self._topic_hash = topic_hash(report.topic)

    async def batches(self, progress: Callable[[str, int], None]) -> AsyncIterator[Batch]:
        segment = self._segment
        position, number, offset, time = segment.start, 0, segment.first_offset, segment.header.append_time
        while position < segment.end:
            start = await self._disk.read(segment.path, position, GROUP_HEADER_SIZE)
            group = decode_group_header(start, 0, position, segment.segment_id)
            body = b""
            if group is not None and group.length < _GROUP_BYTES_MAX:
                body = await self._disk.read(segment.path, position + GROUP_HEADER_SIZE, group.length)
            if group is None or group.number != number or not body_is_whole(group, body):
                following = await self._next_group(position)
                end = following[1] if following else segment.end_offset
                self._problem(position, f"offsets {offset} up to {end} cannot be read: a checksum does not hold")
                if following is None:
                    return
                position, offset, number = following
                continue
            if group.first_offset != offset:
                self._problem(position, f"offset {group.first_offset} stands where {offset} must be")
                offset = group.first_offset
            try:
                for batch in batches_of(body):
                    header = batch.header
                    if header.base_offset != offset or header.epoch != segment.header.epoch:
                        self._problem(
                            position,
                            f"a batch of epoch {header.epoch} with offset {header.base_offset} stands where"
                            f" epoch {segment.header.epoch}, offset {offset} must be",
                        )
                    if header.topic_hash != self._topic_hash:
                        self._problem(position, f"the batch at offset {offset} belongs to another topic")
                    if header.append_time < time:
                        self._problem(position, f"append time goes back at offset {offset}")
                    offset, time = header.end_offset, max(time, header.append_time)
                    yield batch
            except InvalidBatch as error:
                self._problem(position, f"the batch at offset {offset} is {error}")
            offset = group.end_offset
            number += 1
            position += GROUP_HEADER_SIZE + group.length
            progress(self._report.topic, GROUP_HEADER_SIZE + group.length)
        if offset != segment.end_offset:
            self._problem(position, f"it ends at offset {offset}, not at {segment.end_offset}")

    async def _next_group(self, position: int) -> tuple[int, int, int] | None:
        """Position, first offset and number of the next group header behind `position`."""
        segment = self._segment
        search = GroupSearch(self._disk, segment.path, position + 1, segment.end, segment.segment_id)
        group = await search.next()
        return None if group is None else (group.position, group.first_offset, group.number)

    def _problem(self, position: int, what: str) -> None:
        self._report.problems.append(f"{self._segment.path} at position {position}: {what}")
