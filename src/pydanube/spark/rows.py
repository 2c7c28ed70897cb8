"""Messages as Arrow record batches with the columns that a query asked for, from objects or from a broker.

`read_share` is what an executor does. Whatever happens to a range while it is read (it is uploaded, merged with its
neighbours, compacted, moved to another broker), the rows come once and in order: what cannot be found where the plan
said is looked for again, from the offset that was reached.

A topic that is deleted and made again under its name is another one, and its messages have other epochs: `Wanted` says
up to which one they are meant, and what is newer is refused.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from pydanube.core.history.object_keys import path_of
from pydanube.core.history.tiers import RAW, Descriptor
from pydanube.errors import InvalidObject, NotServed, ObjectDamaged, OffsetOutOfRange
from pydanube.formats.batch import ENVELOPE, Batch, decode
from pydanube.formats.parquet import COLUMNS, Footer, footer_length, read_raw
from pydanube.formats.parquet_read import FOOTER_GUESS_BYTES, open_object, parse_footer, read_table
from pydanube.formats.parquet_write import table_of_batches
from pydanube.ports import Buffer
from pydanube.spark.errors import MADE_ANEW, NotUploaded
from pydanube.spark.plan import (
    Bounds,
    Mark,
    Offsets,
    RangeSource,
    TaskShare,
    TopicState,
    between,
    last_pieces,
    layout,
    loses,
    readable,
)
from pydanube.spark.reach import Reach
from pydanube.stores.objects.settings import parse_url

log = logging.getLogger(__name__)

ATTEMPTS: Final = 4  # at one offset, until what is missing is believed to be missing
# Spark takes batches one at a time; larger ones cost memory on both sides and gain nothing.
BATCH_ROWS: Final = 65_536
# Stored batches of about so many rows go to Spark as they are; smaller ones are put together, which copies them.
FEW_ROWS: Final = 4096
TEXT: Final = pa.string()
_ALL: Final = Bounds()


class Wanted(NamedTuple):
    """What an executor must know besides its share. Picklable, and small."""

    columns: Sequence[str]
    bounds: Bounds = Bounds()
    fail_on_data_loss: bool = True
    urls: dict[str, str] = {}  # topic -> storage  # noqa: RUF012
    epochs: dict[str, int] = {}  # topic -> the last epoch of what is meant  # noqa: RUF012


def arrow_schema(columns: Sequence[str]) -> pa.Schema:
    """What `read_share` yields."""
    fields = {"topic": pa.field("topic", TEXT, nullable=False), **{field.name: field for field in COLUMNS}}
    return pa.schema([fields[name] for name in columns])


def read_share(reach: Reach, share: TaskShare, wanted: Wanted) -> Iterator[pa.RecordBatch]:
    """Every row of the share that passes the bounds, as far as pruning can tell."""
    todo = deque(share.pieces)
    failed_at, attempts = -1, 0
    while todo:
        piece = todo.popleft()
        at = piece.first
        try:
            for first, epoch, table in _tables(reach, piece, wanted):
                if epoch > wanted.epochs.get(piece.topic, epoch):
                    notes: list[str] = []
                    loses(piece.topic, at, piece.end, MADE_ANEW, wanted.fail_on_data_loss, notes)
                    log.warning(notes[0])
                    at = piece.end
                    break
                yield from _batches(piece.topic, first, table, at, piece.end, wanted.columns)
                at = min(piece.end, first + table.num_rows)
            if at < piece.end and piece.described is None:
                raise OffsetOutOfRange(piece.topic, at, at, piece.end)
        except (FileNotFoundError, OffsetOutOfRange, NotServed) as error:
            attempts = attempts + 1 if failed_at == at else 1
            failed_at = at
            if attempts == ATTEMPTS:
                raise _gone(piece, at, error) from error
            [state] = reach.states([piece.topic])
            todo.extendleft(reversed(readable(state, at, piece.end, fail_on_data_loss=wanted.fail_on_data_loss)))


def _gone(piece: RangeSource, at: int, error: Exception) -> Exception:
    if piece.described is None:
        return error if isinstance(error, NotServed) else NotUploaded(piece.topic, at, piece.end)
    return ObjectDamaged(piece.topic, _key(piece.topic, piece.described), at, piece.end, "it is missing")


def _key(topic: str, described: Descriptor) -> str:
    return f"{topic[1:]}/{described.object_id}"


def _batches(
    topic: str, first: int, table: pa.Table, at: int, end: int, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The rows [at, end) of a table that begins at offset `first`."""
    skipped = max(0, at - first)
    count = min(table.num_rows, end - first) - skipped
    if count <= 0:
        return
    chosen = table.slice(skipped, count)
    if "topic" in columns:
        chosen = chosen.append_column("topic", _repeated(topic, count))
    schema = arrow_schema(columns)
    yield from chosen.select(list(columns)).cast(schema).to_batches(max_chunksize=BATCH_ROWS)


def _tables(reach: Reach, piece: RangeSource, wanted: Wanted) -> Iterator[tuple[int, int, pa.Table]]:
    """First offset, an epoch, and rows of what holds the piece, in order; what pruning leaves out is left out."""
    names = [name for name in COLUMNS.names if name in wanted.columns] or ["offset"]
    if piece.described is None:
        yield from _from_broker(reach, piece, names)
    elif piece.described.format == RAW:
        data = reach.call(_get(reach, wanted.urls[piece.topic], _key(piece.topic, piece.described)))
        batches = read_raw(data)
        yield batches[0].header.base_offset, batches[0].header.epoch, _table_of(batches, names)
    else:
        try:
            yield from _from_object(reach, piece, piece.described, wanted, names)
        except InvalidObject as error:
            key = _key(piece.topic, piece.described)
            raise ObjectDamaged(piece.topic, key, piece.first, piece.end, str(error)) from error


def _table_of(batches: Sequence[Batch], names: Sequence[str]) -> pa.Table:
    """The rows of batches that follow each other. What a batch holds is not copied if it is large."""
    first = batches[0].header.base_offset
    kept = [name for name in names if name in ENVELOPE.names]
    if not kept or any(name != "offset" and name not in kept for name in names):
        return table_of_batches(batches).select(list(names))
    table = pa.Table.from_batches([decode(batch).select(kept) for batch in batches])
    if table.num_rows < FEW_ROWS * len(batches):
        table = table.combine_chunks()
    if "offset" in names:
        offsets = pa.py_buffer(np.arange(first, first + table.num_rows, dtype=np.int64))
        table = table.append_column("offset", pa.Array.from_buffers(pa.int64(), table.num_rows, [None, offsets]))
    return table


def _repeated(text: str, count: int) -> pa.Array:
    """Not `pa.repeat` nor `pa.array`: they load pandas, in every new worker."""
    data = text.encode()
    ends = pa.py_buffer(np.arange(count + 1, dtype=np.int32) * np.int32(len(data)))
    return pa.StringArray.from_buffers(count, ends, pa.py_buffer(data * count))


def _from_broker(reach: Reach, piece: RangeSource, names: Sequence[str]) -> Iterator[tuple[int, int, pa.Table]]:
    at = piece.first
    for _, _, batches in reach.fetched(piece.topic, piece.first, piece.end):
        if not batches:
            continue
        if batches[0].header.base_offset > at:
            raise OffsetOutOfRange(piece.topic, at, batches[0].header.base_offset, piece.end)
        yield batches[0].header.base_offset, batches[-1].header.epoch, _table_of(batches, names)
        at = batches[-1].header.end_offset


# --- objects ------------------------------------------------------------------------------------------------


def _from_object(
    reach: Reach, piece: RangeSource, described: Descriptor, wanted: Wanted, names: Sequence[str]
) -> Iterator[tuple[int, int, pa.Table]]:
    url = wanted.urls[piece.topic]
    place = parse_url("storage.url", url)
    if place.scheme == "file":
        yield from _from_file(f"{place.root}/{path_of(_key(piece.topic, described))}", piece, described, wanted, names)
    else:
        yield from _from_store(reach, url, piece, described, wanted, names)


def _from_file(
    path: str, piece: RangeSource, described: Descriptor, wanted: Wanted, names: Sequence[str]
) -> Iterator[tuple[int, int, pa.Table]]:
    """A file of this machine is mapped: what is not needed is not even read."""
    with pa.memory_map(path) as mapped:
        data = mapped.read_buffer()
        view = memoryview(data)
        footer = open_object(view, described.footer_crc)
        _check(footer, piece, described, data.size)
        for number in _groups(footer, piece, wanted.bounds):
            group = footer.row_groups[number]
            part = view[group.position : group.position + group.length]
            yield group.first_offset, footer.runs[0].epoch, read_table(footer, number, part, names)


def _from_store(
    reach: Reach, url: str, piece: RangeSource, described: Descriptor, wanted: Wanted, names: Sequence[str]
) -> Iterator[tuple[int, int, pa.Table]]:
    key = _key(piece.topic, described)
    footer: Footer = reach.call(_footer(reach, url, key, described))
    _check(footer, piece, described, described.size)
    numbers = _groups(footer, piece, wanted.bounds)

    async def parts() -> AsyncIterator[tuple[int, Buffer]]:
        store = await reach.store(url)
        for number in numbers:
            group = footer.row_groups[number]
            yield number, await store.get_range(key, group.position, group.length)

    for number, data in reach.iterate(parts):
        group = footer.row_groups[number]
        if len(data) != group.length:
            raise InvalidObject(f"position {group.position}", f"{len(data)} bytes are there, {group.length} must be")
        yield group.first_offset, footer.runs[0].epoch, read_table(footer, number, data, names)


def _check(footer: Footer, piece: RangeSource, described: Descriptor, size: int) -> None:
    if (footer.topic, footer.start_offset, footer.end, size) != (
        piece.topic,
        described.start_offset,
        described.end,
        described.size,
    ):
        raise InvalidObject("its footer", "it holds something else than its descriptor says")


def _groups(footer: Footer, piece: RangeSource, bounds: Bounds) -> list[int]:
    """Row groups that may hold a wanted row."""
    first, last = footer.row_group_of(piece.first), footer.row_group_of(piece.end - 1)
    return [
        number
        for number in range(first, last + 1)
        if footer.row_groups[number].max_publish_time >= bounds.time_first
        and _may_pass(footer.metadata.row_group(number), bounds)
    ]


def _may_pass(group: pq.RowGroupMetaData, bounds: Bounds) -> bool:
    """Whether its smallest and largest values leave room for a row that passes. Values that are not told do."""
    if bounds.key is None and bounds.time_end == _ALL.time_end:
        return True
    for place in range(group.num_columns):
        chunk = group.column(place)
        if not chunk.is_stats_set or not chunk.statistics.has_min_max:
            continue
        found = chunk.statistics
        if chunk.path_in_schema == "publish_time" and found.min_raw >= bounds.time_end:
            return False
        has_key = chunk.path_in_schema == "routing_key" and bounds.key is not None
        if has_key and not found.min <= bounds.key <= found.max:
            return False
    return True


async def _footer(reach: Reach, url: str, key: str, described: Descriptor) -> Footer:
    store = await reach.store(url)
    length = min(FOOTER_GUESS_BYTES, described.size)
    tail = await store.get_range(key, described.size - length, length)
    needed = footer_length(tail)
    if needed > len(tail):
        if needed > described.size:
            raise InvalidObject("its end", "the footer is longer than the object")
        tail = await store.get_range(key, described.size - needed, needed)
    return parse_footer(tail, described.size, described.footer_crc)


async def _get(reach: Reach, url: str, key: str) -> bytes:
    return await (await reach.store(url)).get(key)


def first_since(reach: Reach, state: TopicState, time_us: int) -> int:
    """The first uploaded message that was published at this time or later; the head if there is none."""
    for described in state.objects:
        if described.max_publish_time < time_us:
            continue
        piece = RangeSource(state.topic, max(described.start_offset, state.first_offset), described.end, described)
        wanted = Wanted(
            ("offset", "publish_time"),
            Bounds().narrowed(time_first=time_us),
            urls={state.topic: state.storage_url or ""},
        )
        for batch in read_share(reach, TaskShare((piece,)), wanted):
            times = batch.column("publish_time").cast(pa.int64()).to_pylist()
            for offset, time in zip(batch.column("offset").to_pylist(), times, strict=True):
                if time >= time_us:
                    return int(offset)
    return state.head


# --- which topic it is ----------------------------------------------------------------------------------------


def marks_of(reach: Reach, pieces: Iterable[RangeSource], urls: Mapping[str, str]) -> dict[str, Mark]:
    """The last message of each topic. One that is gone already is left out.

    The broker has told the epochs of what is in its log; others are looked up, some topics at once.
    """
    last = last_pieces(pieces)
    unknown = [piece for piece in last.values() if not piece.epoch]
    looked = reach.call(reach.all_of(unknown, lambda piece: _epoch_of(reach, piece, urls))) if unknown else []
    epochs = {piece.topic: epoch for piece, epoch in zip(unknown, looked, strict=True)}
    found = {}
    for topic, piece in last.items():
        epoch = piece.epoch or epochs[topic]
        if epoch is not None:
            found[topic] = Mark(piece.end - 1, epoch)
    return found


async def _epoch_of(reach: Reach, piece: RangeSource, urls: Mapping[str, str]) -> int | None:
    """Of the last message of the piece; None if it is not kept any more."""
    at = piece.end - 1
    for _ in range(ATTEMPTS):
        try:
            return await _look_up(reach, piece, at, urls)
        except (FileNotFoundError, OffsetOutOfRange, NotServed):
            [state] = await reach.states_now([piece.topic])
            found = layout(state, at, at + 1).pieces
            if at < state.first_offset or not found:
                return None
            [piece] = found
            if piece.epoch:
                return piece.epoch
    return None


async def _look_up(reach: Reach, piece: RangeSource, at: int, urls: Mapping[str, str]) -> int:
    described = piece.described
    if described is None:
        async for _, _, batches in (await reach.client()).fetch(piece.topic, at, at + 1).stored():
            if batches:
                return batches[-1].header.epoch
        raise OffsetOutOfRange(piece.topic, at, at, at + 1)
    url, key = urls[piece.topic], _key(piece.topic, described)
    if described.format == RAW:
        batches = read_raw(await _get(reach, url, key))
        return next(batch.header.epoch for batch in batches if batch.header.end_offset > at)
    try:
        footer = await _footer(reach, url, key, described)
    except InvalidObject as error:
        raise ObjectDamaged(piece.topic, key, described.start_offset, described.end, str(error)) from error
    return next(run.epoch for run in footer.runs if run.end_offset > at)


def with_marks(
    reach: Reach, states: Sequence[TopicState], start: Offsets, end: Offsets, *, fail_on_data_loss: bool
) -> tuple[Offsets, list[str]]:
    """`end` with marks of what is read up to it, and what a person should know.

    Raises MessagesLost, if that is wanted, for a topic that is not the one any more that `start` is about.
    """
    notes: list[str] = []
    urls = urls_of(states)
    pieces = last_pieces(between(states, start, end, fail_on_data_loss=fail_on_data_loss))
    newer = {
        topic: piece
        for topic, piece in pieces.items()
        if topic not in start.marks or piece.end > start.marks[topic].offset + 1
    }
    found = marks_of(reach, newer.values(), urls)
    for topic, mark in found.items():
        before = start.marks.get(topic)
        if before is None or mark.epoch <= before.epoch:
            continue
        # A new owner, or a new topic: what stands now where we were tells.
        [state] = reach.states([topic])
        if before.offset < state.first_offset:
            continue
        there = marks_of(reach, layout(state, before.offset, before.offset + 1).pieces, urls)
        if topic in there and there[topic].epoch > before.epoch:
            loses(topic, state.first_offset, start.next[topic], MADE_ANEW, fail_on_data_loss, notes)
    kept = {topic: mark for topic, mark in start.marks.items() if topic not in newer}
    return replace(end, marks={**kept, **found}), notes


def urls_of(states: Sequence[TopicState]) -> dict[str, str]:
    """Where the objects of topics are."""
    return {state.topic: state.storage_url for state in states if state.storage_url is not None}
