"""Parquet objects to batches and tables. The footer first, then any row group; each is compared with its checksum."""

from __future__ import annotations

import io
import struct
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from crc32c import crc32c

from pydanube.core.units import MIB
from pydanube.errors import InvalidBatch, InvalidObject
from pydanube.formats.batch import ENVELOPE, Batch, decode, encode, logical_crc, stamp
from pydanube.formats.parquet import (
    GROUP_RECORD,
    I64_MAX,
    Footer,
    RowGroup,
    StoredBatch,
    completed,
    footer_length,
    from_text,
    rows_by_size,
    unpack_batches,
)
from pydanube.ports import Buffer

BATCH_BYTES: Final = MIB  # what a reader makes of a row group

BATCH_ROWS: Final = 10_000

FOOTER_GUESS_BYTES: Final = 64 * 1024

_1970: Final = datetime(1970, 1, 1, tzinfo=UTC)


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
    for number, group in enumerate(footer.row_groups):
        check_group_bytes(footer, number, memoryview(data)[group.position : group.position + group.length])


def check_group_bytes(footer: Footer, number: int, data: Buffer) -> None:
    """Raises InvalidObject unless these bytes of a row group have the checksum that they must have."""
    group = footer.row_groups[number]
    found = crc32c(data)
    if found != group.crc:
        raise InvalidObject(
            f"offsets {group.first_offset} to {group.end_offset - 1}",
            f"checksum is {found:#010x}, the footer says {group.crc:#010x}",
        )


def _footer(metadata: pq.FileMetaData) -> Footer:
    known = metadata.metadata or {}
    groups: list[RowGroup] = []
    times = metadata.schema.to_arrow_schema().get_field_index("publish_time")
    for number, (first, rows, logical, crc) in enumerate(from_text(known[b"danube.row_groups"], GROUP_RECORD)):
        group = metadata.row_group(number)
        columns = [group.column(i) for i in range(group.num_columns)]
        starts = [min(each.data_page_offset, each.dictionary_page_offset or each.data_page_offset) for each in columns]
        ends = [start + each.total_compressed_size for start, each in zip(starts, columns, strict=True)]
        statistics = group.column(times).statistics
        latest = (statistics.max - _1970) // timedelta(microseconds=1) if statistics is not None else I64_MAX - 1
        groups.append(RowGroup(first, rows, logical, crc, min(starts), max(ends) - min(starts), latest))
    if len(groups) != metadata.num_row_groups:
        raise ValueError(f"{len(groups)} row groups are named and {metadata.num_row_groups} are there")
    return Footer(
        metadata,
        known[b"danube.topic"].decode(),
        int(known[b"danube.first_offset"]),
        int(known[b"danube.end_offset"]),
        _runs_of(unpack_batches(metadata)),
        groups,
        metadata.serialized_size * 4 + 4096,
    )


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
    decoded a batch at a time, so that in addition to `data` and the result there is never much in memory.
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
            table = completed(pa.Table.from_batches([part]), ENVELOPE.names).cast(ENVELOPE)
            batches += _rebuilt(footer, first, table.combine_chunks().to_batches()[0])
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
    table = completed(file.read_row_group(number, columns=list(names), use_threads=False), names).combine_chunks()
    if table.num_rows != footer.row_groups[number].rows:
        raise ValueError(f"it has {table.num_rows} rows, the footer says {footer.row_groups[number].rows}")
    return table


def _read_row_group(file: pq.ParquetFile, footer: Footer, number: int, names: Sequence[str]) -> pa.Table:
    """One row group as one chunk, its payloads compared with their checksum."""
    group = footer.row_groups[number]
    table = completed(file.read_row_group(number, columns=list(names), use_threads=False), names).combine_chunks()
    if table.num_rows != group.rows:
        raise ValueError(f"it has {table.num_rows} rows, the footer says {group.rows}")
    found = logical_crc(table.column("payload").chunk(0))
    if found != group.logical_crc:
        raise ValueError(f"logical checksum is {found:#010x}, the footer says {group.logical_crc:#010x}")
    return table


def _rebuilt(footer: Footer, first_offset: int, rows: pa.RecordBatch) -> Iterator[Batch]:
    for first, end, like in _stretches(footer.runs, first_offset, first_offset + rows.num_rows):
        run = rows.slice(first - first_offset, end - first)
        for row, count in rows_by_size(run, BATCH_BYTES, BATCH_ROWS):
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
