"""Reading an open log: which offsets are kept here, batches from an offset on, and offsets by time.

Only what is committed is seen. What cannot be read is named: OffsetOutOfRange where this disk does not hold the offset,
LogDamaged where recovery or a checksum says that it was here.
"""

from __future__ import annotations

from typing import Final

from pydanube.core.history.tiers import LogRun
from pydanube.errors import LogDamaged, OffsetOutOfRange
from pydanube.formats.batch import Batch
from pydanube.log.cache import LogTail
from pydanube.log.catalog import SegmentFile, runs_of, segment_holding
from pydanube.log.reader import LogReader, first_row_since
from pydanube.log.recovered import Recovered
from pydanube.log.trimmer import Trimmer
from pydanube.ports import Disk
from pydanube.telemetry import WalMetrics

READ_BYTES: Final = 1024 * 1024


class LogReading:
    """The half of TopicLog that reads; its fields are the log's."""

    topic: str
    topic_hash: int
    head: int
    closed: bool
    max_publish_time: int
    segments: list[SegmentFile]
    tail: LogTail
    disk: Disk
    recovered: Recovered
    metrics: WalMetrics
    _trimmer: Trimmer

    @property
    def first_offset(self) -> int:
        """The first offset that is kept here; the head if nothing is."""
        return next((s.first_offset for s in self.segments if s.end_offset > s.first_offset), self.head)

    def held(self) -> list[tuple[int, int]]:
        """The ranges of offsets [first, end) that are kept here, in order."""
        ranges: list[tuple[int, int]] = []
        for segment in self.segments:
            if segment.end_offset == segment.first_offset:
                continue
            if ranges and ranges[-1][1] == segment.first_offset:
                ranges[-1] = (ranges[-1][0], segment.end_offset)
            else:
                ranges.append((segment.first_offset, segment.end_offset))
        return ranges

    def runs(self, detailed_from: int) -> list[LogRun]:
        """Sizes and epochs of what is kept here; finer from `detailed_from` on."""
        return runs_of(self.segments, detailed_from)

    @property
    def size_bytes(self) -> int:
        """Of its segments."""
        return sum(segment.end for segment in self.segments)

    @property
    def memory_first(self) -> int | None:
        """From here up to the head it is in memory too; None: nothing of it."""
        return self.tail.first_offset

    def reader(self, offset: int) -> LogReader:
        """A place in the log that moves forward as it is read."""
        return LogReader(self, offset)

    async def read(self, offset: int, *, bytes_max: int = READ_BYTES) -> list[Batch]:
        """Committed batches from the one that holds `offset` on: at least one if there is one, about `bytes_max`.

        Batches come whole, so the first may begin before `offset`. Empty at the head.
        """
        if offset < self.head and (cached := self.tail.read(offset, bytes_max)):
            self.metrics.reads["memory"] += 1
            return cached
        found = await LogReader(self, offset).read(bytes_max)
        if found:
            self.metrics.reads["file"] += 1
        return found

    async def offset_at(self, time_us: int, first: int = 0) -> int:
        """The smallest offset from `first` on that was published at or after `time_us`; the head if there is none."""
        head = self.head
        if self.max_publish_time < time_us or not self.segments:
            return head
        segments = list(self.segments)  # the log goes on while we read
        for segment, following in zip(segments, [*segments[1:], None], strict=True):
            # The running maximum at a segment's end stands in the header of the next.
            latest = following.header.max_publish_time if following else self.max_publish_time
            if latest >= time_us and segment.end_offset > max(segment.first_offset, first):
                reader = LogReader(self, max(segment.first_offset, first))
                while reader.offset < segment.end_offset:
                    for batch in await reader.read(READ_BYTES):
                        if batch.header.max_publish_time >= time_us:
                            found = first_row_since(batch, time_us, first)
                            if found is not None:
                                return found
        return head

    def segment_for(self, offset: int) -> SegmentFile:
        segment = segment_holding(self.segments, offset)
        if segment is None:
            self._check_lost(offset)
            following = next((first for first, end in self.held() if first > offset), self.head)
            raise OffsetOutOfRange(self.topic, offset, following, self.head)
        return segment

    def _check_lost(self, offset: int) -> None:
        """Raises LogDamaged if recovery found that the offset was here and is not any more."""
        for damage in sorted(self.recovered.damage, key=lambda damage: damage.end is None):
            if max(damage.first, self._trimmer.kept_from) <= offset and (damage.end is None or offset < damage.end):
                raise LogDamaged(self.topic, damage.path, damage.position, damage.first, damage.end, damage.why)
