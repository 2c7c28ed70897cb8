"""The commit journal as bytes: many topics' small groups in one write and one sync.

    journal   | 64-byte header: id, number, link to the journal before, capacity | record | record | … | 64 zeros
    record    | 64-byte header | table of entries | groups, byte for byte as they stand in their segments |
    entry     | segment_id, position, length, path length | path |

A journal is written and synced to its full capacity before its first record, so writing a record allocates nothing and
cannot fail because the disk is full. An emptied one is used again under a new id, which its old records do not have.

Record n is written only after n-1 is synced. Redo copies every entry to its position; the bytes for a position below a
segment's end are always the same, so doing it twice changes nothing.

The link {previous_id, previous_end} bounds the journal before, as in segments: below it a bad record is damage,
beyond it nothing exists.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from crc32c import crc32c

from pydanube.ports import Buffer

JOURNAL_MAGIC: Final = b"DNBJNL1\n"
RECORD_MAGIC: Final = b"DNJ1"

_JOURNAL: Final = struct.Struct("<8sQQQQQI12x")
_RECORD: Final = struct.Struct("<4sIQQQIIIIQ8x")
_ENTRY: Final = struct.Struct("<QQIH")
JOURNAL_HEADER_SIZE: Final = _JOURNAL.size
RECORD_HEADER_SIZE: Final = _RECORD.size
assert JOURNAL_HEADER_SIZE == 64 and RECORD_HEADER_SIZE == 64


# Stands behind the newest record, so that what an older use of the file left there is not taken for a torn record.
END_OF_RECORDS: Final = bytes(RECORD_HEADER_SIZE)


class JournalHeader(NamedTuple):
    journal_id: int
    number: int
    previous_id: int  # 0: none
    previous_end: int  # position
    capacity_bytes: int


class RecordHeader(NamedTuple):
    journal_id: int
    number: int
    position: int
    entries: int
    table_length: int
    table_crc: int
    data_crc: int
    data_length: int

    @property
    def end(self) -> int:
        return self.position + RECORD_HEADER_SIZE + self.table_length + self.data_length


class JournalEntry(NamedTuple):
    """`data` is to stand at `position` of the segment at `path`, if that has this id."""

    path: str
    segment_id: int
    position: int
    data: Sequence[Buffer]
    length: int


class Redo(NamedTuple):
    """What a journal holds, and what is wrong with it."""

    header: JournalHeader
    entries: list[JournalEntry]
    end: int  # position behind the last good record
    torn_at: int | None
    damaged_at: list[int]


def encode_journal_header(header: JournalHeader) -> bytes:
    packed = _JOURNAL.pack(JOURNAL_MAGIC, *header, 0)
    return _JOURNAL.pack(JOURNAL_MAGIC, *header, crc32c(packed))


def decode_journal_header(buffer: Buffer) -> JournalHeader | None:
    if len(buffer) < JOURNAL_HEADER_SIZE:
        return None
    magic, *fields, crc = _JOURNAL.unpack_from(buffer)
    if magic != JOURNAL_MAGIC or crc32c(_JOURNAL.pack(magic, *fields, 0)) != crc:
        return None
    return JournalHeader._make(fields)


def entry_size(path: str) -> int:
    """What an entry takes in a record's table, at most."""
    return _ENTRY.size + len(path.encode()) + 8


def encode_record(
    entries: Sequence[JournalEntry], *, journal_id: int, number: int, position: int
) -> tuple[list[Buffer], int]:
    """The record's buffers and its length."""
    parts: list[bytes] = []
    buffers: list[Buffer] = [b"", b""]
    data_crc = data_length = 0
    for entry in entries:
        path = entry.path.encode()
        parts.append(_ENTRY.pack(entry.segment_id, entry.position, entry.length, len(path)))
        parts.append(path)
        for buffer in entry.data:
            data_crc = crc32c(buffer, data_crc)
        buffers += entry.data
        data_length += entry.length
    table = b"".join(parts)
    table += bytes(-len(table) % 8)
    fields = (
        journal_id, number, position, len(entries), len(table), crc32c(table), data_crc, data_length,
    )  # fmt: skip
    packed = _RECORD.pack(RECORD_MAGIC, 0, *fields)
    buffers[0] = RECORD_MAGIC + crc32c(packed[8:]).to_bytes(4, "little") + packed[8:]
    buffers[1] = table
    return buffers, RECORD_HEADER_SIZE + len(table) + data_length


def read_journal(buffer: bytes, *, end: int | None) -> Redo | None:
    """What the journal file `buffer` holds; None if its header does not check.

    `end` is where the next journal's link says it ends, None for the newest. In the newest, a bad record with a good
    one behind it is damage and a bad last one is torn; in an older one everything up to `end` must be good.
    """
    header = decode_journal_header(buffer)
    if header is None:
        return None
    limit = header.capacity_bytes if end is None else end
    entries: list[JournalEntry] = []
    damaged: list[int] = []
    position = JOURNAL_HEADER_SIZE
    if len(buffer) < limit:
        damaged.append(len(buffer))  # a journal has its full length before its first record
    while position < min(limit, len(buffer)):
        record = _decode_record(buffer, position, header.journal_id)
        if record is not None and _read_entries(buffer, record, entries):
            position = record.end
            continue
        behind = _find_record(buffer, position + 1, header.journal_id)
        if behind is None or behind >= limit:
            if end is not None:
                damaged.append(position)
                return Redo(header, entries, position, None, damaged)
            torn = position if any(buffer[position : position + RECORD_HEADER_SIZE]) else None
            return Redo(header, entries, position, torn, damaged)
        damaged.append(position)
        position = behind
    return Redo(header, entries, position, None, damaged)


def _decode_record(buffer: bytes, position: int, journal_id: int) -> RecordHeader | None:
    if position + RECORD_HEADER_SIZE > len(buffer):
        return None
    magic, crc, *fields = _RECORD.unpack_from(buffer, position)
    record = RecordHeader._make(fields)
    if magic != RECORD_MAGIC or record.journal_id != journal_id or record.position != position:
        return None
    if crc32c(memoryview(buffer)[position + 8 : position + RECORD_HEADER_SIZE]) != crc:
        return None
    return record


def _find_record(buffer: bytes, position: int, journal_id: int) -> int | None:
    needle = journal_id.to_bytes(8, "little")
    while (found := buffer.find(needle, position + 8)) >= 0:
        if _decode_record(buffer, found - 8, journal_id) is not None:
            return found - 8
        position = found - 7
    return None


def _read_entries(buffer: bytes, record: RecordHeader, entries: list[JournalEntry]) -> bool:
    """Appends the record's entries, all of them or, if a checksum does not hold, none."""
    if record.end > len(buffer):
        return False
    view = memoryview(buffer)
    start = record.position + RECORD_HEADER_SIZE
    table = view[start : start + record.table_length]
    data = view[start + record.table_length : record.end]
    if crc32c(table) != record.table_crc or crc32c(data) != record.data_crc:
        return False
    place = taken = 0
    for _ in range(record.entries):
        segment_id, position, length, path_length = _ENTRY.unpack_from(table, place)
        place += _ENTRY.size
        path = bytes(table[place : place + path_length]).decode()
        place += path_length
        entries.append(JournalEntry(path, segment_id, position, [data[taken : taken + length]], length))
        taken += length
    return True
