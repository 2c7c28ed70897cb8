"""What a disk has of a topic that is not open here: to be read, never to be added to."""

from __future__ import annotations

from pydanube.errors import OffsetOutOfRange
from pydanube.formats.batch import topic_hash
from pydanube.log.cache import TailCache
from pydanube.log.catalog import SegmentFile, segment_holding
from pydanube.log.reader import LogReader
from pydanube.log.recovered import Recovered
from pydanube.ports import Disk


class ClosedLog:
    """A topic's epochs that were finished or cut off long ago, for reading."""

    def __init__(self, recovered: Recovered, disk: Disk) -> None:
        self.topic = recovered.topic
        self.topic_hash = topic_hash(recovered.topic)
        self.head = recovered.head
        self.disk = disk
        self.recovered = recovered
        self.segments = recovered.segments
        self.tail = TailCache(0).new_tail()
        self.closed = False

    def reader(self, offset: int) -> LogReader:
        return LogReader(self, offset)

    def segment_for(self, offset: int) -> SegmentFile:
        segment = segment_holding(self.segments, offset)
        if segment is None:
            following = min(
                (each.first_offset for each in self.segments if each.first_offset > offset < each.end_offset),
                default=self.head,
            )
            raise OffsetOutOfRange(self.topic, offset, following, self.head)
        return segment
