"""Batches to a Parquet object and back. No message is decoded: Arrow buffers go in, Arrow buffers come out.

    columns     offset · the envelope (publish_time … request_id) · producer_id · sequence · epoch · append_time
                with field ids 1 to 13 in this order, 15 and 16 for key and value of attributes; older objects: none
    row groups  about 6 MiB, in order of offset; one never needs more memory than that
    footer      danube.topic, danube.first_offset, danube.end_offset (behind the last), danube.epoch, danube.rows
                danube.batches      base64(zstd(records)): how the log stored it, with each batch's logical checksum
                danube.row_groups   base64(zstd(records)): first offset, rows, logical checksum, checksum of the bytes

The logical checksum covers payload lengths and bytes and does not depend on how they are laid out, so what was
read back can be compared with what was in the log. Nothing that a reader uses is without a checksum: the descriptor
has the footer's, the footer has every row group's, and both are compared before Arrow sees a byte.

A merged object is the same, but what its footer calls batches are the rows of one row group and one epoch: where
producers' batches began is not kept for ever. Who sent is: danube.producers has the first batch of every session in
every epoch, by which rescued messages are compared with what was sent again.

Everything here is CPU work on bytes; callers run it away from the event loop.
"""

from __future__ import annotations

import base64
import io
import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from pydanube.errors import InvalidBatch, InvalidObject
from pydanube.formats.batch import ENVELOPE, PUBLISH_TIME_MIN, Batch, decode, encode, load, logical_crc, stamp
from pydanube.ports import Buffer

MIB: Final = 1 << 20
CODEC: Final = "zstd"
ROW_GROUP_BYTES: Final = 6 * MIB
ROW_GROUP_ROWS: Final = 128 * 1024
PIECES_AT_ONCE: Final = 64  # batches that become one before all become a row group
BATCH_BYTES: Final = MIB  # what a reader makes of a row group
BATCH_ROWS: Final = 10_000
_ROW_BYTES: Final = 64  # what a row takes in memory and hardly in a file: offsets, times, numbers
FOOTER_GUESS_BYTES: Final = 64 * 1024

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


COLUMNS: Final = _with_ids(
    [
        pa.field("offset", pa.int64(), nullable=False),
        *ENVELOPE,
        pa.field("producer_id", pa.int64(), nullable=False),  # 0: sent without deduplication
        pa.field("sequence", pa.int64()),
        pa.field("epoch", pa.int64(), nullable=False),
        pa.field("append_time", pa.timestamp("us", tz="UTC"), nullable=False),
    ]
)
_STATISTICS: Final = [name for name in COLUMNS.names if name not in ("payload", "attributes")]
_DICTIONARY: Final = [
    "routing_key", "producer_name", "attributes.key_value.key", "attributes.key_value.value", "schema_id",
    "schema_version", "producer_id", "epoch",
]  # fmt: skip
_DELTA: Final = {name: "DELTA_BINARY_PACKED" for name in ("offset", "sequence", "append_time", "publish_time")}
# Only a shortcut for readers, and older versions cannot write them.
_BLOOM_FILTERS: Final[dict[str, Any]] = (
    {"bloom_filter_options": {"routing_key": {"ndv": 10_000, "fpp": 0.01}}}
    if int(pa.__version__.partition(".")[0]) >= 24
    else {}
)
_BATCH: Final = struct.Struct("<QIIQQQQq")  # base, rows, logical crc, producer, session, first sequence, epoch, time
_GROUP: Final = struct.Struct("<QIII")  # first offset, rows, logical crc, crc of the bytes
_MAGIC: Final = b"PAR1"
_I64_MAX: Final = 2**63
_1970: Final = datetime(1970, 1, 1, tzinfo=UTC)


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
        return list(_unpack_batches(self.metadata))

    @property
    def producers(self) -> Sequence[StoredBatch]:
        """Of every producer's session, in every epoch, the batch with the lowest sequence."""
        merged = self.metadata.metadata.get(b"danube.producers")
        found = _unpack_batches(self.metadata) if merged is None else map(StoredBatch._make, _from_text(merged, _BATCH))
        lowest: dict[tuple[int, int, int], StoredBatch] = {}
        _add_producers(lowest, found)
        return list(lowest.values())

    def bytes_in_memory(self, number: int) -> int:
        """About what the messages of a row group take, once it is read."""
        size: int = self.metadata.row_group(number).total_byte_size
        return size + self.row_groups[number].rows * _ROW_BYTES

    def row_group_of(self, offset: int) -> int:
        """Its number; `offset` lies inside the object."""
        return bisect_right(self.row_groups, offset, key=lambda each: each.first_offset) - 1


# --- writing ----------------------------------------------------------------------------------------------


def encode_object(topic: str, epoch: int, batches: Sequence[Batch]) -> Encoded:
    """The batches, which follow each other without a gap, as one Parquet object.

    Raises InvalidObject if Arrow cannot make one of them.
    """
    stored = [summary(batch) for batch in batches]
    _check_contiguous(stored)
    try:
        data, earliest, latest = _write(topic, epoch, stored, map(_table, _pieces(batches)))
    except (pa.ArrowException, InvalidBatch, OSError, OverflowError) as error:
        raise InvalidObject(f"offsets {stored[0].base_offset} to {stored[-1].end_offset - 1}", str(error)) from error
    return Encoded(data, stored, earliest, latest)


def merge_objects(topic: str, epoch: int, objects: Sequence[tuple[Buffer, int]]) -> Encoded:
    """One object with the rows of several that follow each other; each with the checksum of its footer, 0 if unknown.

    Raises InvalidObject if one is not what it should be.
    """
    stored: list[StoredBatch] = []  # both grow while the rows are written
    producers: dict[tuple[int, int, int], StoredBatch] = {}
    try:
        data, earliest, latest = _write(topic, epoch, stored, _regrouped(objects, stored, producers), producers)
    except (pa.ArrowException, OSError, LookupError) as error:
        raise InvalidObject("the merged object", str(error)) from error
    _check_contiguous(stored)
    return Encoded(data, stored, earliest, latest)


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


class _Piece(NamedTuple):
    """Rows of one batch that go to one row group."""

    batch: Batch
    first: int  # row
    rows: int


def _pieces(batches: Sequence[Batch]) -> Iterator[list[_Piece]]:
    """What goes to each row group. Only a batch that is larger than a row group is taken apart."""
    group: list[_Piece] = []
    size = rows = 0
    for batch in batches:
        header = batch.header
        if header.uncompressed_length > ROW_GROUP_BYTES or header.rows > ROW_GROUP_ROWS:
            if group:
                yield group
            group, size, rows = [], 0, 0
            for first, count in _rows_by_size(decode(batch), ROW_GROUP_BYTES, ROW_GROUP_ROWS):
                yield [_Piece(batch, first, count)]
            continue
        if group and (size + header.uncompressed_length > ROW_GROUP_BYTES or rows + header.rows > ROW_GROUP_ROWS):
            yield group
            group, size, rows = [], 0, 0
        group.append(_Piece(batch, 0, header.rows))
        size += header.uncompressed_length
        rows += header.rows
    if group:
        yield group


def _rows_by_size(rows: pa.RecordBatch, bytes_max: int, rows_max: int) -> Iterator[tuple[int, int]]:
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


def _table(pieces: Sequence[_Piece]) -> pa.Table:
    """One row group with all columns; per batch, not per message."""
    # Some at a time: Arrow puts thousands of small batches together, and lets go of them, without letting go of the
    # interpreter: 60 ms for a row group of ten messages per batch, in which the event loop stands still.
    envelope = pa.concat_tables(
        _envelope(pieces[first : first + PIECES_AT_ONCE]) for first in range(0, len(pieces), PIECES_AT_ONCE)
    ).combine_chunks()
    headers = [piece.batch.header for piece in pieces]
    first_offset = headers[0].base_offset + pieces[0].first
    offset = pc.add(pc.cumulative_sum(pa.repeat(pa.scalar(1, pa.int64()), envelope.num_rows)), first_offset - 1)
    ends: list[int] = []
    for piece in pieces:
        ends.append((ends[-1] if ends else 0) + piece.rows)
    shifts = [
        _signed((header.first_sequence - header.base_offset) % 2**64) if header.producer_id else None
        for header in headers
    ]
    columns = [
        offset,
        *envelope.columns,
        _spread(ends, pa.array([_signed(header.producer_id) for header in headers], pa.int64())),
        pc.add(offset, _spread(ends, pa.array(shifts, pa.int64()))),
        _spread(ends, pa.array([header.epoch for header in headers], pa.int64())),
        _spread(ends, pa.array([header.append_time for header in headers], COLUMNS.field("append_time").type)),
    ]
    return pa.table(columns, schema=COLUMNS)


def _envelope(pieces: Sequence[_Piece]) -> pa.Table:
    rows = [decode(piece.batch).slice(piece.first, piece.rows) for piece in pieces]
    return pa.Table.from_batches(rows, schema=ENVELOPE).combine_chunks()


def _spread(ends: Sequence[int], values: pa.Array) -> pa.Array:
    """values[i] for every row before ends[i]."""
    if len(ends) == 1:
        return pa.repeat(values[0], ends[0])
    return pc.run_end_decode(pa.RunEndEncodedArray.from_arrays(pa.array(ends, pa.int32()), values))


def _signed(number: int) -> int:
    """Ids are unsigned in the log; tables have signed columns everywhere."""
    return number if number < _I64_MAX else number - 2 * _I64_MAX


def _add_producers(known: dict[tuple[int, int, int], StoredBatch], batches: Iterable[StoredBatch]) -> None:
    for batch in batches:
        key = (batch.producer_id, batch.session, batch.epoch)
        if batch.producer_id and (key not in known or batch.first_sequence < known[key].first_sequence):
            known[key] = batch


def _regrouped(
    objects: Sequence[tuple[Buffer, int]],
    stored: list[StoredBatch],
    producers: dict[tuple[int, int, int], StoredBatch],
) -> Iterator[pa.Table]:
    """Row groups of several objects, small ones put together. What they hold is added to `stored` and `producers`."""
    waiting: list[pa.Table] = []
    runs: list[StoredBatch] = []
    size = rows = 0
    for data, crc in objects:
        footer = open_object(data, crc)
        if runs and footer.start_offset != runs[-1].end_offset:
            raise InvalidObject(f"offset {footer.start_offset}", f"it follows offset {runs[-1].end_offset - 1}")
        runs += footer.runs
        _add_producers(producers, footer.producers)
        for number, group in enumerate(footer.row_groups):
            part = memoryview(data)[group.position : group.position + group.length]
            table = read_table(footer, number, part, COLUMNS.names)
            if waiting and (size + table.nbytes > ROW_GROUP_BYTES or rows + table.num_rows > ROW_GROUP_ROWS):
                yield _joined(waiting, runs, stored)
                waiting, size, rows = [], 0, 0
            waiting.append(table)
            size += table.nbytes
            rows += table.num_rows
    if waiting:
        yield _joined(waiting, runs, stored)


def _joined(tables: Sequence[pa.Table], runs: Sequence[StoredBatch], stored: list[StoredBatch]) -> pa.Table:
    table = pa.concat_tables(tables).combine_chunks()
    payload = table.column("payload").chunk(0)
    start = table.column("offset")[0].as_py()
    for first, end, like in _stretches(runs, start, start + table.num_rows):
        crc = logical_crc(payload.slice(first - start, end - first))
        stored.append(StoredBatch(first, end - first, crc, 0, 0, 0, like.epoch, like.append_time))
    return table


def _write(
    topic: str,
    epoch: int,
    stored: Sequence[StoredBatch],
    groups: Iterator[pa.Table],
    producers: Mapping[tuple[int, int, int], StoredBatch] | None = None,
) -> tuple[Buffer, int, int]:
    """The object's bytes, and its earliest and latest publish time. `stored` may grow while groups are drawn.

    `producers` of a merged object, which `stored` does not name.
    """
    sink = _Sink()
    records: list[bytes] = []
    times: list[int] = []
    writer = pq.ParquetWriter(
        pa.PythonFile(sink, mode="w"),
        COLUMNS,
        version="2.6",
        compression=CODEC,
        compression_level=1,
        use_dictionary=_DICTIONARY,
        column_encoding=_DELTA,
        write_statistics=_STATISTICS,
        write_page_checksum=True,
        write_page_index=True,
        sorting_columns=[pq.SortingColumn(0)],
        **_BLOOM_FILTERS,
    )
    with writer:
        for table in groups:
            begin = sink.tell()
            writer.write_table(table, row_group_size=table.num_rows)
            payload = table.column("payload").chunk(0)
            first = table.column("offset")[0].as_py()
            records.append(_GROUP.pack(first, table.num_rows, logical_crc(payload), sink.crc_from(begin)))
            bounds = pc.min_max(table.column("publish_time").cast(pa.int64()))
            times += (bounds["min"].as_py(), bounds["max"].as_py())
        writer.add_key_value_metadata(
            {
                "danube.topic": topic,
                "danube.first_offset": str(stored[0].base_offset),
                "danube.end_offset": str(stored[-1].end_offset),
                "danube.rows": str(stored[-1].end_offset - stored[0].base_offset),
                "danube.epoch": str(epoch),
                "danube.batches": _to_text([_BATCH.pack(*each) for each in stored]),
                "danube.row_groups": _to_text(records),
            }
        )
        if producers is not None:
            writer.add_key_value_metadata(
                {"danube.producers": _to_text([_BATCH.pack(*each) for each in producers.values()])}
            )
    return sink.data, min(times), max(times)


def _check_contiguous(stored: Sequence[StoredBatch]) -> None:
    for earlier, later in pairwise(stored):
        if earlier.end_offset != later.base_offset:
            raise InvalidObject(f"offset {later.base_offset}", f"it follows offset {earlier.end_offset - 1}")


def _to_text(records: Sequence[bytes]) -> str:
    plain = b"".join(records)
    packed = pa.Codec("zstd").compress(plain, asbytes=True)
    return base64.b64encode(struct.pack("<Q", len(plain)) + packed).decode()


def _from_text(text: bytes, record: struct.Struct) -> Iterator[tuple[int, ...]]:
    packed = base64.b64decode(text, validate=True)
    (length,) = struct.unpack_from("<Q", packed)
    if length > 256 * MIB:
        raise ValueError(f"{length} bytes of records")
    plain = pa.Codec("zstd").decompress(packed[8:], length, asbytes=True) if length else b""
    return record.iter_unpack(plain)


# --- reading ----------------------------------------------------------------------------------------------


def footer_length(tail: Buffer) -> int:
    """How many bytes at an object's end its footer takes, from the last 8 of them. Raises InvalidObject."""
    end = bytes(tail[-8:])
    if len(end) < 8 or end[4:] != _MAGIC:
        raise InvalidObject("its end", f"it ends with {end[-4:]!r}, not {_MAGIC!r}")
    return int(struct.unpack("<I", end[:4])[0]) + 8


def parse_footer(tail: Buffer, size: int, crc: int = 0) -> Footer:
    """The footer of an object of `size` bytes, from its last bytes. `crc`: the checksum it must have, 0 if unknown.

    They must hold all of it, and be FOOTER_GUESS_BYTES at least, or the whole object: Arrow asks for so many.
    """
    length = footer_length(tail)
    if length > len(tail):
        raise InvalidObject("its footer", f"it has {length} bytes and {len(tail)} are here")
    found = crc32c(memoryview(tail)[-length:])
    if crc and found != crc:
        raise InvalidObject("its footer", f"checksum is {found:#010x}, the descriptor says {crc:#010x}")
    try:
        file = pq.ParquetFile(pa.PythonFile(_Pieces(size, [(size - len(tail), tail)]), mode="r"))
        return _footer(file.metadata)
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, struct.error) as error:
        raise InvalidObject("its footer", str(error)) from error


def open_object(data: Buffer, crc: int = 0) -> Footer:
    """The footer of a whole object that is in memory."""
    return parse_footer(data, len(memoryview(data)), crc)


def check_bytes(data: Buffer, crc: int) -> None:
    """Raises InvalidObject unless the footer and every row group have the checksums that they must have."""
    footer = open_object(data, crc)
    for group in footer.row_groups:
        found = crc32c(memoryview(data)[group.position : group.position + group.length])
        if found != group.crc:
            raise InvalidObject(
                f"offsets {group.first_offset} to {group.end_offset - 1}",
                f"checksum is {found:#010x}, the footer says {group.crc:#010x}",
            )


def _footer(metadata: pq.FileMetaData) -> Footer:
    known = metadata.metadata or {}
    groups: list[RowGroup] = []
    times = metadata.schema.to_arrow_schema().get_field_index("publish_time")
    for number, (first, rows, logical, crc) in enumerate(_from_text(known[b"danube.row_groups"], _GROUP)):
        group = metadata.row_group(number)
        columns = [group.column(i) for i in range(group.num_columns)]
        starts = [min(each.data_page_offset, each.dictionary_page_offset or each.data_page_offset) for each in columns]
        ends = [start + each.total_compressed_size for start, each in zip(starts, columns, strict=True)]
        statistics = group.column(times).statistics
        latest = (statistics.max - _1970) // timedelta(microseconds=1) if statistics is not None else _I64_MAX - 1
        groups.append(RowGroup(first, rows, logical, crc, min(starts), max(ends) - min(starts), latest))
    if len(groups) != metadata.num_row_groups:
        raise ValueError(f"{len(groups)} row groups are named and {metadata.num_row_groups} are there")
    return Footer(
        metadata,
        known[b"danube.topic"].decode(),
        int(known[b"danube.first_offset"]),
        int(known[b"danube.end_offset"]),
        _runs_of(_unpack_batches(metadata)),
        groups,
        metadata.serialized_size * 4 + 4096,
    )


def _unpack_batches(metadata: pq.FileMetaData) -> Iterator[StoredBatch]:
    return map(StoredBatch._make, _from_text(metadata.metadata[b"danube.batches"], _BATCH))


def _runs_of(batches: Iterator[StoredBatch]) -> list[StoredBatch]:
    """The last batch of each stretch of one epoch."""
    runs: list[StoredBatch] = []
    for batch in batches:
        if runs and runs[-1].epoch == batch.epoch:
            runs[-1] = batch
        else:
            runs.append(batch)
    return runs


def read_row_group(footer: Footer, number: int, data: Buffer) -> list[Batch]:
    """The messages of a row group as batches, its checksums verified. `data` is that part of the object.

    A batch here is not one that a producer sent: rows that follow each other in one epoch are put together. They are
    decoded a batch at a time, so that beside `data` and what is returned there is never much in memory.
    """
    group = footer.row_groups[number]
    where = f"offsets {group.first_offset} to {group.end_offset - 1}"
    batches: list[Batch] = []
    try:
        parts = _open_group(footer, number, data).iter_batches(
            _rows_at_once(footer, number), row_groups=[number], columns=ENVELOPE.names, use_threads=False
        )
        first = group.first_offset
        for part in parts:
            batches += _rebuilt(footer, first, part.select(ENVELOPE.names))
            first += part.num_rows
    except (pa.ArrowException, OSError, ValueError, LookupError, InvalidBatch) as error:
        raise InvalidObject(where, str(error)) from error
    if first != group.end_offset:
        raise InvalidObject(where, f"it has {first - group.first_offset} rows, the footer says {group.rows}")
    found = logical_crc(*(decode(batch).column("payload") for batch in batches))
    if found != group.logical_crc:
        raise InvalidObject(where, f"logical checksum is {found:#010x}, the footer says {group.logical_crc:#010x}")
    return batches


def _rows_at_once(footer: Footer, number: int) -> int:
    """So many rows make a batch, if all are alike."""
    wanted = footer.row_groups[number].rows * BATCH_BYTES // footer.bytes_in_memory(number)
    return max(1, min(BATCH_ROWS, wanted))


def read_table(footer: Footer, number: int, data: Buffer, names: Sequence[str]) -> pa.Table:
    """Some columns of a row group, in one chunk. Its bytes, and `payload` if it is among them, are verified."""
    group = footer.row_groups[number]
    try:
        return table_of_group(_open_group(footer, number, data), footer, number, names)
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        raise InvalidObject(f"offsets {group.first_offset} to {group.end_offset - 1}", str(error)) from error


def _open_group(footer: Footer, number: int, data: Buffer) -> pq.ParquetFile:
    """A file that has one row group. Its bytes have the checksum that they must have, or ValueError is raised.

    It covers every page with its header, so Arrow need not compute those of the pages too, by a slower method.
    """
    group = footer.row_groups[number]
    found = crc32c(data)
    if found != group.crc:
        raise ValueError(f"checksum is {found:#010x}, the footer says {group.crc:#010x}")
    pieces = _Pieces(group.position + group.length, [(group.position, data)])
    return pq.ParquetFile(pa.PythonFile(pieces, mode="r"), metadata=footer.metadata)


def table_of_group(file: pq.ParquetFile, footer: Footer, number: int, names: Sequence[str]) -> pa.Table:
    """As `read_table`, of an open file. Raises ValueError or what Arrow raises."""
    if "payload" in names:
        return _read_row_group(file, footer, number, names)
    table = file.read_row_group(number, columns=list(names), use_threads=False).select(list(names)).combine_chunks()
    if table.num_rows != footer.row_groups[number].rows:
        raise ValueError(f"it has {table.num_rows} rows, the footer says {footer.row_groups[number].rows}")
    return table


def table_of_batches(batches: Sequence[Batch]) -> pa.Table:
    """Batches of the log that follow each other, as the rows of an object, with all its columns."""
    return _table([_Piece(batch, 0, batch.header.rows) for batch in batches])


def _read_row_group(file: pq.ParquetFile, footer: Footer, number: int, names: Sequence[str]) -> pa.Table:
    """One row group as one chunk, its payloads compared with their checksum."""
    group = footer.row_groups[number]
    table = file.read_row_group(number, columns=list(names), use_threads=False).select(list(names)).combine_chunks()
    if table.num_rows != group.rows:
        raise ValueError(f"it has {table.num_rows} rows, the footer says {group.rows}")
    found = logical_crc(table.column("payload").chunk(0))
    if found != group.logical_crc:
        raise ValueError(f"logical checksum is {found:#010x}, the footer says {group.logical_crc:#010x}")
    return table


def _rebuilt(footer: Footer, first_offset: int, rows: pa.RecordBatch) -> Iterator[Batch]:
    for first, end, like in _stretches(footer.runs, first_offset, first_offset + rows.num_rows):
        run = rows.slice(first - first_offset, end - first)
        for row, count in _rows_by_size(run, BATCH_BYTES, BATCH_ROWS):
            batch = encode(run.slice(row, count), topic=footer.topic, codec="none")
            yield stamp(batch, base_offset=first + row, epoch=like.epoch, append_time=like.append_time)


def _stretches(runs: Sequence[StoredBatch], first: int, end: int) -> Iterator[tuple[int, int, StoredBatch]]:
    """Parts of [first, end) whose rows are of one epoch, with the last batch of that epoch's stretch."""
    place = bisect_right(runs, first, key=lambda each: each.end_offset)
    while first < end:
        upto = min(end, runs[place].end_offset)
        yield first, upto, runs[place]
        first = upto
        place += 1


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


def verify_object(data: Buffer, batches: Sequence[StoredBatch]) -> None:
    """Raises InvalidObject unless the object holds exactly these batches: every offset, length and payload byte."""
    footer = open_object(data)
    if list(footer.batches) != list(batches):
        raise InvalidObject("its footer", "it names other batches than were written")
    waiting: list[pa.Array] = []  # payloads of a batch that goes over several row groups
    held = 0
    todo = iter(batches)
    batch = next(todo, None)
    for number, group in enumerate(footer.row_groups):
        part = memoryview(data)[group.position : group.position + group.length]
        table = read_table(footer, number, part, ["offset", "payload"])
        _check_offsets(table.column("offset").chunk(0), group)
        payload = table.column("payload").chunk(0)
        row = 0
        while row < len(payload):
            if batch is None:
                raise InvalidObject(f"offset {group.first_offset + row}", "no batch holds it")
            taken = min(batch.rows - held, len(payload) - row)
            waiting.append(payload.slice(row, taken))
            held += taken
            row += taken
            if held == batch.rows:
                whole = waiting[0] if len(waiting) == 1 else pa.concat_arrays(waiting)
                if logical_crc(whole) != batch.logical_crc:
                    raise InvalidObject(
                        f"offsets {batch.base_offset} to {batch.end_offset - 1}", "the logical checksum differs"
                    )
                waiting, held = [], 0
                batch = next(todo, None)
    if batch is not None or waiting:
        raise InvalidObject("its end", "rows are missing")


def _check_offsets(offsets: pa.Array, group: RowGroup) -> None:
    steps = pc.all(pc.equal(pc.pairwise_diff(offsets), 1), skip_nulls=True, min_count=0).as_py()
    if offsets[0].as_py() != group.first_offset or not steps:
        raise InvalidObject(f"offsets {group.first_offset} to {group.end_offset - 1}", "the offset column differs")


class _Sink(io.RawIOBase):
    """Takes what the writer writes, and tells the checksum of a part of it."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return len(self.data)

    def write(self, data: Buffer) -> int:  # type: ignore[override]
        self.data += data
        return len(data)

    def crc_from(self, position: int) -> int:
        with memoryview(self.data) as view:
            return crc32c(view[position:])


class _Pieces(io.RawIOBase):
    """A file of which only some parts are here. Reading elsewhere is an error."""

    def __init__(self, size: int, pieces: Sequence[tuple[int, Buffer]]) -> None:
        self._size = size
        self._pieces = pieces
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> Buffer:
        length = self._size - self._position if size is None or size < 0 else size
        for position, data in self._pieces:
            start = self._position - position
            if start >= 0 and start + length <= len(data):
                self._position += length
                return memoryview(data)[start : start + length]  # Arrow keeps it, and what is below it
        raise OSError(f"bytes {self._position} to {self._position + length} are not here")
