"""A stored object without the messages of some keys. Their offsets stay: a row is erased, never removed.

    row             offset, times, producer, sequence, epoch     payload    routing_key    attributes
    as it was       …                                            bytes      K              {…}
    erased          the same                                     empty      none           {danube.erased: when}

`erase_object` and `erase_raw` make the new object; it has the row groups (or the batches) of the old one, in the same
places. `check_erasure` and `check_raw_erasure` compare the two and raise InvalidObject unless every row is equal in all
columns or is an erased one: that is what the owner of a topic believes. docs/adr/0011-erasure.md has the whole way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from pydanube.errors import InvalidBatch, InvalidObject
from pydanube.formats.batch import ENVELOPE, Batch, decode, logical_crc
from pydanube.formats.batch_header import finish
from pydanube.formats.parquet import COLUMNS, Encoded, Footer, StoredBatch, encode_raw, read_raw
from pydanube.formats.parquet_read import open_object, read_table
from pydanube.formats.parquet_write import _joined, _write
from pydanube.ports import Buffer

ERASED: Final = "danube.erased"

_CHANGED: Final = ("payload", "routing_key", "attributes")
_KEPT: Final = [name for name in COLUMNS.names if name not in _CHANGED]
_KEPT_OF_BATCH: Final = [name for name in ENVELOPE.names if name not in _CHANGED]


class Erased(NamedTuple):
    encoded: Encoded
    rows: int  # erased ones


class UnreadableBatch(NamedTuple):
    """Offsets [first, end) of a raw object whose batch cannot be decoded, so its keys are not known."""

    first: int
    end: int
    why: str


def rows_with_keys(data: Buffer, footer_crc: int, keys: Collection[str]) -> int:
    """How many messages of a Parquet object have one of the keys."""
    footer = open_object(data, footer_crc)
    return sum(
        pc.sum(_mask(table.column("routing_key"), keys)).as_py() or 0
        for table in _groups(data, footer, ["routing_key"])
    )


def erase_object(data: Buffer, footer_crc: int, keys: Collection[str], when: str) -> Erased:
    """The Parquet object with the messages of these keys erased. Raises InvalidObject if it is damaged."""
    footer = open_object(data, footer_crc)
    epoch = int(footer.metadata.metadata[b"danube.epoch"])
    stored: list[StoredBatch] = []  # grows while the rows are written
    counts: list[int] = []
    producers = {(each.producer_id, each.session, each.epoch): each for each in footer.producers}

    def groups() -> Iterator[pa.Table]:
        for table in _groups(data, footer, COLUMNS.names):
            mask = _mask(table.column("routing_key"), keys)
            counts.append(pc.sum(mask).as_py() or 0)
            columns = {name: table.column(name).combine_chunks() for name in COLUMNS.names}
            erased = pa.table([*_erased(columns, mask, when).values()], schema=COLUMNS)
            yield _joined([erased], footer.runs, stored)

    try:
        written, earliest, latest = _write(footer.topic, epoch, stored, groups(), producers)
    except (pa.ArrowException, OSError, LookupError) as error:
        raise InvalidObject("the erased object", str(error)) from error
    return Erased(Encoded(written, stored, earliest, latest), sum(counts))


def erase_raw(data: Buffer, keys: Collection[str], when: str) -> tuple[Erased, Sequence[UnreadableBatch]]:
    """The raw object with the messages of these keys erased; a batch that cannot be decoded stays as it is."""
    batches: list[Batch] = []
    unreadable: list[UnreadableBatch] = []
    count = 0
    for batch in read_raw(data):
        header = batch.header
        try:
            rows = decode(batch)
        except (InvalidBatch, pa.ArrowException, ValueError) as error:
            unreadable.append(UnreadableBatch(header.base_offset, header.end_offset, str(error)))
            batches.append(batch)
            continue
        mask = _mask(rows.column("routing_key"), keys)
        erased = pc.sum(mask).as_py() or 0
        count += erased
        batches.append(_rebuilt(batch, rows, mask, when) if erased else batch)
    return Erased(encode_raw(batches), count), unreadable


def check_erasure(old: Buffer, old_crc: int, new: Buffer, new_crc: int) -> int:
    """How many rows of the new object are erased ones. Raises InvalidObject if a row differs in any other way."""
    before, after = open_object(old, old_crc), open_object(new, new_crc)
    check_footers(before, after)
    return sum(
        check_group(before, after, number, _bytes_of(old, before, number), _bytes_of(new, after, number))
        for number in range(len(before.row_groups))
    )


def check_footers(before: Footer, after: Footer) -> None:
    """Raises InvalidObject unless both describe the same rows of the same topic; what is in them is not looked at."""
    cuts = [[(group.first_offset, group.rows) for group in footer.row_groups] for footer in (before, after)]
    if cuts[0] != cuts[1] or before.topic != after.topic:
        raise InvalidObject("the erased object", "its row groups are not those of the object that it replaces")
    runs = [[(run.end_offset, run.epoch, run.append_time) for run in footer.runs] for footer in (before, after)]
    if runs[0] != runs[1]:
        raise InvalidObject("the erased object", "it names other epochs or times than the object that it replaces")
    if sorted(before.producers) != sorted(after.producers):
        raise InvalidObject("the erased object", "it names other producers than the object that it replaces")


def check_group(before: Footer, after: Footer, number: int, old: Buffer, new: Buffer) -> int:
    """As `check_erasure`, of one row group: `old` and `new` are its bytes."""
    group = before.row_groups[number]
    was, now = (read_table(footer, number, data, COLUMNS.names) for footer, data in ((before, old), (after, new)))
    return _compared(was, now, _KEPT, f"offsets {group.first_offset} to {group.end_offset - 1}")


def check_raw_erasure(old: Buffer, new: Buffer) -> int:
    """The same of two raw objects."""
    before, after = read_raw(old), read_raw(new)
    if len(before) != len(after):
        raise InvalidObject("the erased object", f"it has {len(after)} batches instead of {len(before)}")
    count = 0
    for was, now in zip(before, after, strict=True):
        if _bytes(was) == _bytes(now):
            continue
        where = f"offsets {was.header.base_offset} to {was.header.end_offset - 1}"
        if _identity(was) != _identity(now):
            raise InvalidObject(where, "the batch is not the one that it replaces")
        try:
            old_rows, new_rows = (pa.Table.from_batches([decode(each)]) for each in (was, now))
        except (InvalidBatch, pa.ArrowException, ValueError) as error:
            raise InvalidObject(where, f"the batch cannot be compared: {error}") from error
        count += _compared(old_rows, new_rows, _KEPT_OF_BATCH, where)
        if logical_crc(new_rows.column("payload").combine_chunks()) != now.header.logical_crc:
            raise InvalidObject(where, "the logical checksum is not that of its payloads")
    return count


def _groups(data: Buffer, footer: Footer, names: Sequence[str]) -> Iterator[pa.Table]:
    for number in range(len(footer.row_groups)):
        yield read_table(footer, number, _bytes_of(data, footer, number), names)


def _bytes_of(data: Buffer, footer: Footer, number: int) -> Buffer:
    group = footer.row_groups[number]
    return memoryview(data)[group.position : group.position + group.length]


def _mask(routing_key: pa.Array | pa.ChunkedArray, keys: Collection[str]) -> pa.Array:
    mask = pc.is_in(routing_key, value_set=pa.array(sorted(keys), routing_key.type), skip_nulls=True)
    return mask.combine_chunks() if isinstance(mask, pa.ChunkedArray) else mask


def _erased(columns: Mapping[str, pa.Array], mask: pa.Array, when: str) -> dict[str, pa.Array]:
    """The columns, where the mask is set with what an erased row has."""
    instead = {"payload": b"", "routing_key": None, "attributes": [(ERASED, when)]}
    rows = len(mask)
    # A row of the mask takes the value that stands behind the last one: no type is too nested for that.
    places = pc.if_else(mask, rows, pa.array(range(rows), pa.int64()))
    return {
        name: pa.concat_arrays([column, pa.array([instead[name]], column.type)]).take(places)
        if name in instead
        else column
        for name, column in columns.items()
    }


def _rebuilt(batch: Batch, rows: pa.RecordBatch, mask: pa.Array, when: str) -> Batch:
    columns = _erased({name: rows.column(name) for name in rows.schema.names}, mask, when)
    erased = pa.record_batch(list(columns.values()), schema=rows.schema)
    plain = memoryview(erased.serialize())
    return finish(
        batch.header._replace(
            codec=0,
            body_length=len(plain),
            uncompressed_length=len(plain),
            logical_crc=logical_crc(erased.column("payload")),
            body_crc=crc32c(plain),
        ),
        plain,
    )


def _compared(was: pa.Table, now: pa.Table, kept: Sequence[str], where: str) -> int:
    """How many rows of `now` are erased ones; all others are equal, or InvalidObject is raised."""
    if was.num_rows != now.num_rows or not was.select(kept).equals(now.select(kept)):
        raise InvalidObject(where, "more than payload, key and attributes differs")
    had_key = pc.is_valid(was.column("routing_key"))
    is_empty = pc.and_(pc.is_null(now.column("routing_key")), pc.equal(pc.binary_length(now.column("payload")), 0))
    mask = pc.and_(had_key, is_empty)
    others = pc.invert(mask)
    if not was.select(_CHANGED).filter(others).equals(now.select(_CHANGED).filter(others)):
        raise InvalidObject(where, "a row that is not erased differs")
    for attributes in now.column("attributes").filter(mask).to_pylist():
        if [name for name, _ in attributes or ()] != [ERASED]:
            raise InvalidObject(where, f"an erased row must have the attribute {ERASED} and no other")
    return int(pc.sum(mask).as_py() or 0)


def _bytes(batch: Batch) -> bytes:
    return b"".join(batch.buffers)


def _identity(batch: Batch) -> tuple[int, ...]:
    header = batch.header
    return (
        header.base_offset, header.rows, header.epoch, header.topic_hash, header.producer_id, header.session,
        header.first_sequence, header.append_time, header.max_publish_time,
    )  # fmt: skip
