"""Batches to a Parquet object and back. No message is decoded: Arrow buffers go in, Arrow buffers come out.

    columns     offset · the envelope (publish_time … request_id) · producer_id · sequence · epoch · append_time
                with field ids 1 to 13 in this order, 15 and 16 for key and value of attributes; older objects: none
                event_time · deliver_at with field ids 18 and 19; objects of earlier versions do not have these columns
    row groups  about 6 MiB, in order of offset; one never needs more memory than that
    footer      danube.topic, danube.first_offset, danube.end_offset (behind the last), danube.epoch, danube.rows
                danube.batches      base64(zstd(records)): how the log stored it, with each batch's logical checksum
                danube.row_groups   base64(zstd(records)): first offset, rows, logical checksum, checksum of the bytes

The logical checksum covers payload lengths and bytes and does not depend on how they are laid out, so what was
read back can be compared with what was in the log. Nothing that a reader uses is without a checksum: the descriptor
has the footer's, the footer has every row group's, and both are compared before Arrow sees a byte.

A merged object is the same, but what its footer calls batches are the rows of one row group and one epoch: where
producers' batches began is not kept in merged objects. Who sent is: danube.producers has the first batch of every
session in every epoch, by which rescued messages are compared with what was sent again.

`parquet_write.py` and `parquet_read.py` do it; here is what both know. Everything is CPU work on bytes; callers run it
away from the event loop.
"""

from __future__ import annotations

import base64
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from pydanube.core.units import MIB
from pydanube.errors import InvalidBatch, InvalidObject
from pydanube.formats.batch import PUBLISH_TIME_MIN, Batch, load
from pydanube.formats.envelope import ENVELOPE_1, TIMES
from pydanube.ports import Buffer

ROW_BYTES: Final = 64  # what a row takes in memory and hardly in a file: offsets, times, numbers

MAP_KEY_ID: Final = 15
MAP_VALUE_ID: Final = 16


def _with_ids(fields: Iterable[pa.Field]) -> pa.Schema:
    """Numbered from 1. Iceberg knows columns by these numbers, so none is ever given to another column; objects of
    versions before have none, and tables map them by name.
    """
    numbered = []
    for number, field in enumerate(fields, start=1):
        if pa.types.is_map(field.type):
            key, value = field.type.key_field, field.type.item_field
            field = field.with_type(pa.map_(_with_id(key, MAP_KEY_ID), _with_id(value, MAP_VALUE_ID)))
        numbered.append(_with_id(field, number))
    return pa.schema(numbered)


def _with_id(field: pa.Field, number: int) -> pa.Field:
    return field.with_metadata({b"PARQUET:field_id": str(number).encode()})


FIRST_COLUMNS: Final = _with_ids(
    [
        pa.field("offset", pa.int64(), nullable=False),
        *ENVELOPE_1,
        pa.field("producer_id", pa.int64(), nullable=False),  # 0: sent without deduplication
        pa.field("sequence", pa.int64()),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("append_time", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)

# Columns that came later. Tables give 17 to the partition.
LATER_COLUMNS: Final = tuple(_with_id(field, number) for number, field in enumerate(TIMES, start=18))

COLUMNS: Final = pa.schema([*FIRST_COLUMNS, *LATER_COLUMNS])


def completed(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """These columns, in this order; null in what the version did not have that wrote them."""
    for field in LATER_COLUMNS:
        if field.name in names and field.name not in table.column_names:
            table = table.append_column(field, pa.nulls(table.num_rows, field.type))
    return table.select(list(names))


BATCH_RECORD: Final = struct.Struct(
    "<QIIQQQQq"
)  # base, rows, logical crc, producer, session, first sequence, epoch, time

GROUP_RECORD: Final = struct.Struct("<QIII")  # first offset, rows, logical crc, crc of the bytes

MAGIC: Final = b"PAR1"

I64_MAX: Final = 2**63


class StoredBatch(NamedTuple):
    """What the footer keeps of a batch."""

    base_offset: int
    rows: int
    logical_crc: int
    producer_id: int
    session: int
    first_sequence: int
    epoch: int
    append_time: int

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.rows


class RowGroup(NamedTuple):
    first_offset: int
    rows: int
    logical_crc: int
    crc: int  # of the bytes
    position: int
    length: int
    max_publish_time: int

    @property
    def end_offset(self) -> int:
        return self.first_offset + self.rows


class Encoded(NamedTuple):
    """An object that is ready to be stored."""

    data: Buffer
    batches: Sequence[StoredBatch]
    min_publish_time: int
    max_publish_time: int

    @property
    def start_offset(self) -> int:
        return self.batches[0].base_offset

    @property
    def end(self) -> int:
        return self.batches[-1].end_offset

    @property
    def max_append_time(self) -> int:
        return max(each.append_time for each in self.batches)

    @property
    def footer_crc(self) -> int:
        return crc32c(memoryview(self.data)[-footer_length(self.data) :])


class Footer(NamedTuple):
    """What must be known of an object to read any part of it. Small, however many batches there were."""

    metadata: pq.FileMetaData
    topic: str
    start_offset: int
    end: int
    runs: Sequence[StoredBatch]  # the last batch of each epoch's stretch
    row_groups: Sequence[RowGroup]
    size_bytes: int  # of this footer itself, as a cache counts it

    @property
    def batches(self) -> Sequence[StoredBatch]:
        """Unpacked anew each time."""
        return list(unpack_batches(self.metadata))

    @property
    def producers(self) -> Sequence[StoredBatch]:
        """Of every producer's session, in every epoch, the batch with the lowest sequence."""
        merged = self.metadata.metadata.get(b"danube.producers")
        found = (
            unpack_batches(self.metadata) if merged is None else map(StoredBatch._make, from_text(merged, BATCH_RECORD))
        )
        lowest: dict[tuple[int, int, int], StoredBatch] = {}
        add_producers(lowest, found)
        return list(lowest.values())

    def bytes_in_memory(self, number: int) -> int:
        """About what the messages of a row group take, once it is read."""
        size: int = self.metadata.row_group(number).total_byte_size
        return size + self.row_groups[number].rows * ROW_BYTES

    def row_group_of(self, offset: int) -> int:
        """Its number; `offset` lies inside the object."""
        return bisect_right(self.row_groups, offset, key=lambda each: each.first_offset) - 1


def encode_raw(batches: Sequence[Batch]) -> Encoded:
    """The batches as the log has them: for what Arrow refuses to read."""
    stored = [summary(batch) for batch in batches]
    times = [batch.header.max_publish_time for batch in batches]
    data = b"".join(buffer for batch in batches for buffer in batch.buffers)
    return Encoded(data, stored, PUBLISH_TIME_MIN, max(times))  # the earliest is not known without opening a body


def summary(batch: Batch) -> StoredBatch:
    header = batch.header
    return StoredBatch(
        header.base_offset,
        header.rows,
        header.logical_crc,
        header.producer_id,
        header.session,
        header.first_sequence,
        header.epoch,
        header.append_time,
    )


def rows_by_size(rows: pa.RecordBatch, bytes_max: int, rows_max: int) -> Iterator[tuple[int, int]]:
    """(first row, count) of parts that are about `bytes_max`; one row may be more by itself."""
    count = rows.num_rows
    if rows.nbytes <= bytes_max and count <= rows_max:
        yield 0, count
        return
    sizes = pc.binary_length(rows.column("payload")).to_pylist()
    other = max(1, (rows.nbytes - sum(sizes)) // count)
    first = size = 0
    for row, length in enumerate(sizes):
        if row > first and (size + length + other > bytes_max or row - first == rows_max):
            yield first, row - first
            first, size = row, 0
        size += length + other
    yield first, count - first


def add_producers(known: dict[tuple[int, int, int], StoredBatch], batches: Iterable[StoredBatch]) -> None:
    for batch in batches:
        key = (batch.producer_id, batch.session, batch.epoch)
        if batch.producer_id and (key not in known or batch.first_sequence < known[key].first_sequence):
            known[key] = batch


def to_text(records: Sequence[bytes]) -> str:
    plain = b"".join(records)
    packed = pa.Codec("zstd").compress(plain, asbytes=True)
    return base64.b64encode(struct.pack("<Q", len(plain)) + packed).decode()


def from_text(text: bytes, record: struct.Struct) -> Iterator[tuple[int, ...]]:
    packed = base64.b64decode(text, validate=True)
    (length,) = struct.unpack_from("<Q", packed)
    if length > 256 * MIB:
        raise ValueError(f"{length} bytes of records")
    plain = pa.Codec("zstd").decompress(packed[8:], length, asbytes=True) if length else b""
    return record.iter_unpack(plain)


def footer_length(tail: Buffer) -> int:
    """How many bytes at an object's end its footer takes, from the last 8 of them. Raises InvalidObject."""
    end = bytes(tail[-8:])
    if len(end) < 8 or end[4:] != MAGIC:
        raise InvalidObject("its end", f"it ends with {end[-4:]!r}, not {MAGIC!r}")
    return int(struct.unpack("<I", end[:4])[0]) + 8


def unpack_batches(metadata: pq.FileMetaData) -> Iterator[StoredBatch]:
    return map(StoredBatch._make, from_text(metadata.metadata[b"danube.batches"], BATCH_RECORD))


def read_raw(data: Buffer) -> list[Batch]:
    """The batches of a raw object."""
    found: list[Batch] = []
    view = memoryview(data)
    position = 0
    try:
        while position < len(view):
            batch = load(view[position:])
            found.append(batch)
            position += batch.header.size_bytes
    except InvalidBatch as error:
        raise InvalidObject(f"position {position}", error.what) from error
    return found
