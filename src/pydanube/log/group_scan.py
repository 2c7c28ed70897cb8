"""Walks the groups of the last segment of an epoch that was not finished, and tells torn bytes from damaged ones."""

from __future__ import annotations

from typing import Final

from pydanube.core.commit.sessions import ProducerState, Sessions
from pydanube.errors import InvalidBatch
from pydanube.formats.batch import SESSION_RECORD
from pydanube.formats.segment import (
    GROUP_HEADER_SIZE,
    GroupHeader,
    batch_headers_of,
    body_is_whole,
    decode_group_header,
)
from pydanube.log.catalog import SegmentFile
from pydanube.log.recovered import Damage, RecoveredEpoch
from pydanube.log.searching import GroupSearch, content_end
from pydanube.ports import Disk

SCAN_READ_BYTES: Final = 1024 * 1024


class GroupScan:
    """Walks the groups of an unfinished epoch's last segment; fills in what they say."""

    def __init__(self, disk: Disk, segment: SegmentFile, result: RecoveredEpoch) -> None:
        self._disk = disk
        self._segment = segment
        self._result = result
        self._buffer = b""
        self._buffer_start = 0
        self._size = segment.filled
        self._undo: dict[int, ProducerState | None] = {}
        self.last_group: GroupHeader | None = None
        self.sessions_before: bytes | None = None
        self.append_time_before = 0
        self.max_publish_time_before = 0
        self.rest_end = 0  # of what stands behind the last group, without the zeros at its end

    @property
    def rest_length(self) -> int:
        return self.rest_end - self._segment.end

    async def run(self) -> None:
        segment = self._segment
        while True:
            group = await self._whole_group(segment.end)
            if group is None:
                group = await self._behind_damage()
                if group is None:
                    break
            await self._take(group)
        segment.synced = segment.copied = segment.end

    async def _bytes(self, position: int, length: int) -> memoryview:
        """`length` bytes at `position`, fewer only at the end of the file; read ahead in large pieces."""
        start = position - self._buffer_start
        if start < 0 or start + length > len(self._buffer):
            self._buffer = await self._disk.read(self._segment.path, position, max(length, SCAN_READ_BYTES))
            self._buffer_start = position
            start = 0
        return memoryview(self._buffer)[start : start + length]

    async def _whole_group(self, position: int) -> GroupHeader | None:
        """The group that must stand here, if it does, with every byte right."""
        segment = self._segment
        group = decode_group_header(await self._bytes(position, GROUP_HEADER_SIZE), 0, position, segment.segment_id)
        if group is None or group.number != segment.next_number or group.first_offset != segment.end_offset:
            return None
        return group if await self._is_whole(group) else None

    async def _is_whole(self, group: GroupHeader) -> bool:
        if group.position + GROUP_HEADER_SIZE + group.length > self._size:
            return False
        return body_is_whole(group, await self._bytes(group.position + GROUP_HEADER_SIZE, group.length))

    async def _take(self, group: GroupHeader) -> None:
        result = self._result
        sessions = result.sessions
        self.last_group = group
        self.append_time_before = result.append_time
        self.max_publish_time_before = result.max_publish_time
        body = await self._bytes(group.position + GROUP_HEADER_SIZE, group.length)
        undo: dict[int, ProducerState | None] = {}
        try:
            for header in batch_headers_of(body):
                if header.producer_id:
                    undo.setdefault(header.producer_id, sessions.get(header.producer_id))
                    if header.ends_session:
                        sessions.ended(header.producer_id, header.session)
                    elif header.flags & SESSION_RECORD:
                        sessions.opened(header.producer_id, header.session, header.append_time)
                    else:
                        sessions.accepted(
                            header.producer_id, header.session, header.first_sequence, header.rows,
                            header.body_crc, header.base_offset, header.epoch, header.append_time,
                        )  # fmt: skip
                result.append_time = max(result.append_time, header.append_time)
                if header.rows:
                    result.max_publish_time = max(result.max_publish_time, header.max_publish_time)
        except InvalidBatch as error:  # the group's checksum holds, so it was written like this
            raise AssertionError(f"{self._segment.path} at {group.position}: {error}") from error
        self._segment.grow(group, GROUP_HEADER_SIZE + group.length)
        self._undo = undo

    async def _behind_damage(self) -> GroupHeader | None:
        """Decides what the bad bytes at the segment's end are; the group to go on with if they are damage."""
        segment = self._segment
        position = segment.end
        self._close_last()
        going_on: GroupHeader | None = None
        search = GroupSearch(self._disk, segment.path, position + 1, self._size, segment.segment_id)
        while (group := await search.next()) is not None:
            if group.number <= segment.next_number or group.first_offset < segment.end_offset:
                continue
            if not await self._is_whole(group):
                continue
            going_on = going_on or group
            if group.durable_before > position:
                # Written when these bytes were already safe: they were good once.
                why = "its checksum does not hold"
                self._result.damage.append(
                    Damage(segment.path, position, segment.end_offset, going_on.first_offset, why)
                )
                segment.damaged = True
                segment.end = going_on.position
                segment.end_offset = going_on.first_offset
                segment.next_number = going_on.number
                return going_on
        self.rest_end = await content_end(self._disk, segment.path, position, self._size)
        return None

    def _close_last(self) -> None:
        """The state before the last group, for a copy of it."""
        if self.last_group is None:
            return
        sessions = Sessions(dict(self._result.sessions))
        for producer_id, producer in self._undo.items():
            sessions.put(producer_id, producer)
        self.sessions_before = sessions.to_bytes()
