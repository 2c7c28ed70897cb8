"""Segment files as bytes: a header, then groups, then zeros.

    segment   | magic, lengths, id, topic, epoch, first_offset, created, link, times, crc | producer snapshot | groups …
    group     | 64-byte header | batch | pad to 8 | batch | pad to 8 | …

One group is what one commit added to one file. Its header names the segment (a random id that no client has
seen, so no other bytes can pass for a group), its number, and `durable_before`: everything below that position was
safe when this group was written. From that recovery knows what bad bytes mean: below a later group's
`durable_before` they are damage, at the end they are a torn write that was never acknowledged.

The link {previous_id, previous_end} in a segment's header bounds the segment before it: whatever stands there at or
beyond previous_end does not exist.

Functions here take and return values. They say what they see and leave it to recovery to judge.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from pydanube.errors import InvalidBatch
from pydanube.formats.batch import HEADER_SIZE as BATCH_HEADER_SIZE
from pydanube.formats.batch import Batch, Header, load, parse_header
from pydanube.ports import Buffer

SEGMENT_MAGIC: Final = b"DNBSEG1\n"
GROUP_MAGIC: Final = b"DNG1"

_SEGMENT: Final = struct.Struct("<8sIIQQQQqQQqqII")
_GROUP: Final = struct.Struct("<4sIQIIQQIIqII")
SEGMENT_HEADER_SIZE: Final = _SEGMENT.size
GROUP_HEADER_SIZE: Final = _GROUP.size
assert SEGMENT_HEADER_SIZE == 96 and GROUP_HEADER_SIZE == 64

UNSYNCED: Final = 1  # segment flag: its groups are written, not synced (durability "os")

SNAPSHOT_LENGTH_MAX: Final = 256 * 1024 * 1024
_PADDING: Final = tuple(bytes(n) for n in range(8))


class SegmentHeader(NamedTuple):
    segment_id: int
    topic_hash: int
    epoch: int
    first_offset: int
    created_us: int
    previous_id: int  # 0: the first segment of its epoch
    previous_end: int  # position
    append_time: int  # of the last batch before this segment
    max_publish_time: int  # of all batches before this segment
    flags: int
    snapshot: bytes  # producer sessions as of first_offset


class GroupHeader(NamedTuple):
    segment_id: int
    number: int
    length: int  # of the batches with their padding
    durable_before: int  # position
    first_offset: int
    rows: int
    batches: int
    max_publish_time: int
    body_crc: int
    position: int  # of this header in the file: a copy of it elsewhere is not a group

    @property
    def end_offset(self) -> int:
        return self.first_offset + self.rows


class SegmentGroup(NamedTuple):
    """A group ready to be written: the header's bytes and the batches', with their total length."""

    header: GroupHeader
    buffers: list[Buffer]
    length: int


def pad(length: int) -> int:
    """How many bytes follow `length` to make it a multiple of 8, so that Arrow buffers stay aligned."""
    return -length % 8


# --- segments ---------------------------------------------------------------------------------------


def file_name(first_offset: int, segment_id: int) -> str:
    return f"{first_offset:020}-{segment_id:016x}.wal"


def encode_segment_header(header: SegmentHeader) -> bytes:
    snapshot = header.snapshot
    assert len(snapshot) <= SNAPSHOT_LENGTH_MAX, "recovery could not read it"
    total = SEGMENT_HEADER_SIZE + len(snapshot) + pad(len(snapshot))
    fields = (SEGMENT_MAGIC, total, len(snapshot), *header[:-1])
    crc = crc32c(snapshot, crc32c(_SEGMENT.pack(*fields, 0)[:-4]))
    return _SEGMENT.pack(*fields, crc) + snapshot + _PADDING[pad(len(snapshot))]


def segment_header_length(start: Buffer) -> int | None:
    """How long the header that begins with `start` says it is; None if it cannot be one."""
    if len(start) < SEGMENT_HEADER_SIZE:
        return None
    magic, total, snapshot_length, *_ = _SEGMENT.unpack_from(start)
    if magic != SEGMENT_MAGIC or snapshot_length > SNAPSHOT_LENGTH_MAX:
        return None
    if total != SEGMENT_HEADER_SIZE + snapshot_length + pad(snapshot_length):
        return None
    return int(total)


def decode_segment_header(buffer: Buffer) -> SegmentHeader | None:
    """The header that `buffer` is, or None if its checksum does not hold."""
    if segment_header_length(buffer) != len(buffer):
        return None
    values = _SEGMENT.unpack_from(buffer)
    snapshot_length, crc = values[2], values[-1]
    snapshot = bytes(buffer[SEGMENT_HEADER_SIZE : SEGMENT_HEADER_SIZE + snapshot_length])
    if crc32c(snapshot, crc32c(bytes(buffer[: SEGMENT_HEADER_SIZE - 4]))) != crc:
        return None
    return SegmentHeader._make((*values[3:-1], snapshot))


# --- groups -----------------------------------------------------------------------------------------


def encode_group(
    batches: Sequence[Batch],
    *,
    segment_id: int,
    number: int,
    position: int,
    durable_before: int,
    first_offset: int,
) -> SegmentGroup:
    buffers: list[Buffer] = [b""]
    length = crc = rows = 0
    latest = -(2**63)
    for batch in batches:
        header = batch.header
        size = header.size_bytes
        buffers += batch.buffers
        crc = crc32c(batch.body, crc32c(batch.header_bytes, crc))
        if padding := pad(size):
            buffers.append(_PADDING[padding])
            crc = crc32c(_PADDING[padding], crc)
        length += size + padding
        rows += header.rows
        if header.rows and header.max_publish_time > latest:
            latest = header.max_publish_time
    group = GroupHeader(
        segment_id, number, length, durable_before, first_offset, rows, len(batches), latest, crc, position
    )
    buffers[0] = encode_group_header(group)
    return SegmentGroup(group, buffers, GROUP_HEADER_SIZE + length)


def encode_group_header(group: GroupHeader) -> bytes:
    packed = _GROUP.pack(GROUP_MAGIC, 0, *group)
    return GROUP_MAGIC + crc32c(packed[8:]).to_bytes(4, "little") + packed[8:]


def decode_group_header(buffer: Buffer, start: int, position: int, segment_id: int) -> GroupHeader | None:
    """The group header at `start` of `buffer`, or None if there is none of this segment for this file position."""
    if start + GROUP_HEADER_SIZE > len(buffer):
        return None
    magic, crc, *fields = _GROUP.unpack_from(buffer, start)
    if magic != GROUP_MAGIC or fields[0] != segment_id or fields[-1] != position:
        return None
    if crc32c(memoryview(buffer)[start + 8 : start + GROUP_HEADER_SIZE]) != crc:
        return None
    return GroupHeader._make(fields)


def find_group_header(buffer: bytes, start: int, position: int, segment_id: int) -> tuple[int, GroupHeader] | None:
    """The first group header of this segment at or after `start` of `buffer`, and where in `buffer` it stands.

    `position` is the place of `start` in the file.
    """
    needle = segment_id.to_bytes(8, "little")
    searched = start
    while (found := buffer.find(needle, searched + 8)) >= 0:
        place = found - 8
        header = decode_group_header(buffer, place, position + place - start, segment_id)
        if header is not None:
            return place, header
        searched = place + 1
    return None


def body_is_whole(group: GroupHeader, body: Buffer) -> bool:
    """Whether these are the very bytes the group was written with."""
    return len(body) == group.length and crc32c(body) == group.body_crc


def batches_of(body: Buffer) -> Iterator[Batch]:
    """The batches of a group's body, each verified. Raises InvalidBatch at the first that is not right."""
    view = memoryview(body)
    position = 0
    while position < len(view):
        batch = load(view[position:])
        yield batch
        size = batch.header.size_bytes
        position += size + pad(size)


def batch_headers_of(body: Buffer) -> Iterator[Header]:
    """The headers of a body whose group checksum holds; the batches' bodies are not looked at again."""
    view = memoryview(body)
    position = 0
    while position < len(view):
        header = parse_header(view[position : position + BATCH_HEADER_SIZE])
        yield header
        position += header.size_bytes + pad(header.size_bytes)
    if position != len(view):
        raise InvalidBatch("the last batch of a group ends outside it")
