"""Batches, or smaller objects, to one Parquet object. The format is in `parquet.py`."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from pydanube.core.units import MIB
from pydanube.errors import InvalidBatch, InvalidObject
from pydanube.formats.batch import ENVELOPE, Batch, decode, logical_crc
from pydanube.formats.envelope import ENVELOPE_1
from pydanube.formats.parquet import (
    BATCH_RECORD,
    COLUMNS,
    FIRST_COLUMNS,
    GROUP_RECORD,
    I64_MAX,
    Encoded,
    StoredBatch,
    add_producers,
    rows_by_size,
    summary,
    to_text,
)
from pydanube.formats.parquet_read import _stretches, open_object, read_table
from pydanube.ports import Buffer

CODEC: Final = "zstd"

ROW_GROUP_BYTES: Final = 6 * MIB

ROW_GROUP_ROWS: Final = 128 * 1024

PIECES_AT_ONCE: Final = 64  # batches that become one before all become a row group

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
            for first, count in rows_by_size(decode(batch), ROW_GROUP_BYTES, ROW_GROUP_ROWS):
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


def _table(pieces: Sequence[_Piece]) -> pa.Table:
    """One row group with all columns; per batch, not per message."""
    # Some at a time: Arrow puts thousands of small batches together, and frees them, without releasing the
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
        *envelope.columns[: len(ENVELOPE_1)],
        _spread(ends, pa.array([_signed(header.producer_id) for header in headers], pa.int64())),
        pc.add(offset, _spread(ends, pa.array(shifts, pa.int64()))),
        _spread(ends, pa.array([header.epoch for header in headers], pa.int64())),
        _spread(ends, pa.array([header.append_time for header in headers], COLUMNS.field("append_time").type)),
        *envelope.columns[len(ENVELOPE_1) :],
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
    return number if number < I64_MAX else number - 2 * I64_MAX


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
        add_producers(producers, footer.producers)
        for number, group in enumerate(footer.row_groups):
            part = memoryview(data)[group.position : group.position + group.length]
            table = read_table(footer, number, part, COLUMNS.names)
            nbytes = table.select(FIRST_COLUMNS.names).nbytes  # others are mostly null
            if waiting and (size + nbytes > ROW_GROUP_BYTES or rows + table.num_rows > ROW_GROUP_ROWS):
                yield _joined(waiting, runs, stored)
                waiting, size, rows = [], 0, 0
            waiting.append(table)
            size += nbytes
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
            records.append(GROUP_RECORD.pack(first, table.num_rows, logical_crc(payload), sink.crc_from(begin)))
            bounds = pc.min_max(table.column("publish_time").cast(pa.int64()))
            times += (bounds["min"].as_py(), bounds["max"].as_py())
        writer.add_key_value_metadata(
            {
                "danube.topic": topic,
                "danube.first_offset": str(stored[0].base_offset),
                "danube.end_offset": str(stored[-1].end_offset),
                "danube.rows": str(stored[-1].end_offset - stored[0].base_offset),
                "danube.epoch": str(epoch),
                "danube.batches": to_text([BATCH_RECORD.pack(*each) for each in stored]),
                "danube.row_groups": to_text(records),
            }
        )
        if producers is not None:
            writer.add_key_value_metadata(
                {"danube.producers": to_text([BATCH_RECORD.pack(*each) for each in producers.values()])}
            )
    return sink.data, min(times), max(times)


def _check_contiguous(stored: Sequence[StoredBatch]) -> None:
    for earlier, later in pairwise(stored):
        if earlier.end_offset != later.base_offset:
            raise InvalidObject(f"offset {later.base_offset}", f"it follows offset {earlier.end_offset - 1}")


def table_of_batches(batches: Sequence[Batch]) -> pa.Table:
    """Batches of the log that follow each other, as the rows of an object, with all its columns."""
    return _table([_Piece(batch, 0, batch.header.rows) for batch in batches])


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
