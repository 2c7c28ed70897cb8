"""The envelope: the columns of a batch's body, one message as values, and what must be true of both.

Version 1 has eight columns, version 2 two more, which may be null: `event_time` and `deliver_at`. A batch in which both
are null throughout is written as version 1, byte for byte as before. In memory rows always have all ten.

Untrusted bytes are checked here before Arrow acts on them (`validated`).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from pydanube.errors import InvalidBatch
from pydanube.formats.small_batch import ROWS_MAX
from pydanube.ports import Buffer

# What a datetime can hold: years 1 to 9999. Rows beyond could be stored, but not looked at.
PUBLISH_TIME_MIN: Final = -62_135_596_800_000_000

PUBLISH_TIME_MAX: Final = 253_402_300_799_999_999

ENVELOPE_1: Final = pa.schema(
    [
        pa.field("publish_time", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("routing_key", pa.string()),
        pa.field("producer_name", pa.string()),  # null: the session's
        pa.field("attributes", pa.map_(pa.string(), pa.string()), nullable=False),
        pa.field("schema_id", pa.int64()),
        pa.field("schema_version", pa.int32()),
        pa.field("request_id", pa.int64(), nullable=False),
    ]
)

# What version 2 appends: when it happened, as the application says, and before when it is not to be delivered.
TIMES: Final = (
    pa.field("event_time", pa.timestamp("us", tz="UTC")),
    pa.field("deliver_at", pa.timestamp("us", tz="UTC")),
)

ENVELOPE: Final = pa.schema([*ENVELOPE_1, *TIMES])

COLUMNS_OF: Final = {1: ENVELOPE_1, 2: ENVELOPE}  # by the version in the header

PAYLOAD: Final = ENVELOPE.get_field_index("payload")

ATTRIBUTES: Final = ENVELOPE.get_field_index("attributes")

SCHEMA_ID: Final = ENVELOPE.get_field_index("schema_id")  # schema_version is the next one

_NO_TEXTS: Final = pa.nulls(0, pa.string())  # not pa.array, which loads pandas

_REQUIRED: Final = [i for i, field in enumerate(ENVELOPE) if not field.nullable]

# An Arrow message names its arrays and buffers without their columns; these are the envelope's.
_ARRAYS: Final = {1: 11, 2: 13}  # the columns, and in the map its pairs, keys and values

_BUFFERS: Final = {1: 26, 2: 30}

_METADATA_V5: Final = 4

_U16: Final = struct.Struct("<H")

_U32: Final = struct.Struct("<I")

_I32: Final = struct.Struct("<i")


class Envelope(NamedTuple):
    """One message as values; the row form of a batch."""

    payload: bytes
    publish_time: int = 0
    routing_key: str | None = None
    producer_name: str | None = None
    attributes: Mapping[str, str] = {}
    schema_id: int | None = None
    schema_version: int | None = None
    request_id: int = 0
    event_time: int | None = None  # microseconds, as publish_time
    deliver_at: int | None = None


def rows_of(messages: Sequence[Envelope]) -> pa.RecordBatch:
    """Messages as an Arrow record batch with the envelope's columns: those of version 1 if they are enough."""
    if not messages:
        raise InvalidBatch("it has no rows")
    try:
        columns = list(zip(*messages, strict=True))
        payload, publish_time, key, producer, attributes, schema_id, schema_version, request_id, *times = columns
        if any(attributes):
            pairs = pa.array([list(a.items()) for a in attributes], ENVELOPE.field(ATTRIBUTES).type)
        else:
            pairs = pa.array([()] * len(messages), ENVELOPE.field(ATTRIBUTES).type)
        rows = pa.RecordBatch.from_arrays(
            [
                pa.array(publish_time, ENVELOPE.field(0).type),
                pa.array(payload, pa.binary()),
                pa.array(key, pa.string()),
                pa.array(producer, pa.string()),
                pairs,
                pa.array(schema_id, pa.int64()),
                pa.array(schema_version, pa.int32()),
                pa.array(request_id, pa.int64()),
            ],
            schema=ENVELOPE_1,
        )
        return rows if all(each is None for column in times for each in column) else with_times(rows, *times)
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidBatch(f"a message does not fit the envelope: {error}") from error


def columns_of(
    payloads: Sequence[bytes] | pa.Array,
    publish_times: Buffer,
    *,
    keys: Sequence[str | None] | None = None,
    producer_name: str | None = None,
    attributes: Sequence[Mapping[str, str] | None] | None = None,
    schema: tuple[int, int] | None = None,
) -> pa.RecordBatch:
    """As `rows_of`, from columns, for callers with many messages: nothing is done per message where all are alike.

    `publish_times` are the bytes of one i64 per message. None: no message has a key, or attributes.
    """
    count = len(payloads)
    if not count:
        raise InvalidBatch("it has no rows")
    times = pa.py_buffer(publish_times)
    if times.size != 8 * count:
        raise InvalidBatch(f"it has {count} payloads and {times.size // 8} publish times")
    pair_type = ENVELOPE.field(ATTRIBUTES).type
    try:
        if attributes is None:
            bounds = pa.Array.from_buffers(pa.int32(), count + 1, [None, pa.py_buffer(bytes(4 * (count + 1)))])
            pairs = pa.MapArray.from_arrays(bounds, _NO_TEXTS, _NO_TEXTS, pair_type)
        else:
            pairs = pa.array([() if each is None else list(each.items()) for each in attributes], pair_type)
        return pa.RecordBatch.from_arrays(
            [
                pa.Array.from_buffers(ENVELOPE.field(0).type, count, [None, times]),
                payloads if isinstance(payloads, pa.Array) else pa.array(payloads, pa.binary()),
                pa.nulls(count, pa.string()) if keys is None else pa.array(keys, pa.string()),
                pa.nulls(count, pa.string()) if producer_name is None else pa.repeat(_text(producer_name), count),
                pairs,
                *_schemas(schema, count),
                pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(bytes(8 * count))]),
            ],
            schema=ENVELOPE_1,
        )
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidBatch(f"a message does not fit the envelope: {error}") from error


def _schemas(schema: tuple[int, int] | None, count: int) -> tuple[pa.Array, pa.Array]:
    """One schema for all messages. From bytes: `pa.array` would load pandas."""
    if schema is None:
        return pa.nulls(count, pa.int64()), pa.nulls(count, pa.int32())
    kinds = (pa.int64(), 8), (pa.int32(), 4)
    first, second = (
        pa.Array.from_buffers(kind, count, [None, pa.py_buffer(number.to_bytes(size, "little", signed=True) * count)])
        for (kind, size), number in zip(kinds, schema, strict=True)
    )
    return first, second


def with_times(
    rows: pa.RecordBatch, event_times: Sequence[int | None] | None, deliver_at: Sequence[int | None] | None
) -> pa.RecordBatch:
    """Rows of version 1 with the columns of version 2. Raises InvalidBatch."""
    try:
        times = [
            pa.nulls(rows.num_rows, field.type) if column is None else pa.array(column, pa.int64()).view(field.type)
            for field, column in zip(TIMES, (event_times, deliver_at), strict=True)
        ]
        return pa.RecordBatch.from_arrays([*rows.columns, *times], schema=ENVELOPE)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise InvalidBatch(f"a message does not fit the envelope: {error}") from error


def widened(rows: pa.RecordBatch) -> pa.RecordBatch:
    """With the columns of all versions."""
    if rows.num_columns == len(ENVELOPE):
        return rows
    nulls = [pa.nulls(rows.num_rows, field.type) for field in TIMES]
    return pa.RecordBatch.from_arrays([*rows.columns, *nulls], schema=ENVELOPE)


def serialized(rows: pa.RecordBatch) -> tuple[memoryview, int]:
    """The body, and its version: the lowest that has all there is to say."""
    columns = rows.columns
    if len(columns) > len(ENVELOPE_1) and all(each.null_count == len(each) for each in columns[len(ENVELOPE_1) :]):
        rows = pa.RecordBatch.from_arrays(columns[: len(ENVELOPE_1)], schema=ENVELOPE_1)
    return memoryview(rows.serialize()), 1 if rows.num_columns == len(ENVELOPE_1) else 2


@lru_cache(maxsize=1024)
def _text(value: str) -> pa.Scalar:
    # Kept: pyarrow looks for pandas each time it makes a scalar, which takes ten times as long if there is none.
    return pa.scalar(value, pa.string())


def crc_of(payloads: Sequence[bytes]) -> int:
    """The logical checksum of these payloads."""
    crc = crc32c(b"".join([_U32.pack(len(payload)) for payload in payloads]))
    for payload in payloads:
        crc = crc32c(payload, crc)
    return crc


def logical_crc(*payloads: pa.Array) -> int:
    """crc32c of the payloads' lengths and then of their bytes; several arrays count as one.

    It depends on the values only, not on how Arrow or Parquet lays them out, so tiers can be compared by it.
    """
    crc = 0
    for payload in payloads:
        if len(payload) <= ROWS_MAX and not payload.null_count:  # calling Arrow takes longer than that
            bounds = _bounds(payload)
            crc = crc32c(b"".join([_U32.pack(end - first) for first, end in pairwise(bounds)]), crc)
            continue
        lengths = pc.binary_length(payload)
        crc = crc32c(memoryview(lengths.buffers()[1])[lengths.offset * 4 : (lengths.offset + len(lengths)) * 4], crc)
    for payload in payloads:
        data = payload.buffers()[2]
        if data is None or len(payload) == 0:
            continue
        bounds = _bounds(payload)
        crc = crc32c(memoryview(data)[bounds[0] : bounds[-1]], crc)
    return crc


def _bounds(payload: pa.Array) -> memoryview:
    """Where each begins in the bytes of all, and where the last ends. Empty if there are none."""
    offsets = payload.buffers()[1]
    if offsets is None or len(payload) == 0:
        return memoryview(b"")
    # Its writer may have made the buffer longer than needed, and by an odd number of bytes.
    return memoryview(offsets)[payload.offset * 4 : (payload.offset + len(payload) + 1) * 4].cast("i")


def validated(plain: pa.Buffer, version: int = 1) -> pa.RecordBatch:
    """The record batch in `plain`, safe to read. `version`: of the envelope, as the header says."""
    try:
        reader = pa.BufferReader(plain)
        message = pa.ipc.read_message(reader)
        if reader.tell() != plain.size:
            raise InvalidBatch(f"{plain.size - reader.tell()} bytes follow the Arrow message in its body")
        if message.type != "record batch":
            raise InvalidBatch(f"its body is an Arrow {message.type}, not a record batch")
        _check_message(memoryview(message.metadata), version)
        rows = pa.ipc.read_record_batch(message, COLUMNS_OF[version])
        rows.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, struct.error) as error:
        raise InvalidBatch(f"its body is not a record batch of the envelope: {error}") from error
    check_nulls(rows)
    return rows


def check_nulls(rows: pa.RecordBatch) -> None:
    """Raises InvalidBatch for a null that may not be, and for a time, if there is one, that is no date."""
    for field, column in zip(TIMES, rows.columns[len(ENVELOPE_1) :], strict=False):
        if column.null_count < len(column):
            bounds = pc.min_max(column.view(pa.int64()))
            check_times(bounds["min"].as_py(), bounds["max"].as_py(), field.name)
    for i in _REQUIRED:
        if rows.column(i).null_count:
            raise InvalidBatch(f"column {ENVELOPE.names[i]} has a null")
    attributes = rows.column(ATTRIBUTES)
    if attributes.keys.null_count or attributes.items.null_count:
        raise InvalidBatch("column attributes has a null inside")


def _check_message(metadata: memoryview, version_wanted: int) -> None:
    """Looks at what the flatbuffer `Message` says and Arrow does not show before it has acted on it.

    Arrow has verified that the flatbuffer is one.
    """
    message = _U32.unpack_from(metadata, 0)[0]
    version = _table_field(metadata, message, 0)
    if version is None or _U16.unpack_from(metadata, version)[0] != _METADATA_V5:
        # Before V5 buffers could be compressed without the field that is looked at below.
        raise InvalidBatch("its Arrow message is not of metadata version 5")
    header = _table_field(metadata, message, 2)
    if header is None:
        raise InvalidBatch("its Arrow message is empty")
    record_batch = header + _U32.unpack_from(metadata, header)[0]
    if _table_field(metadata, record_batch, 3) is not None:
        # Arrow would allocate whatever length each buffer claims.
        raise InvalidBatch("its Arrow buffers are compressed one by one; compress the whole body instead")
    arrays = _vector_length(metadata, record_batch, 1)
    buffers = _vector_length(metadata, record_batch, 2)
    wanted = _ARRAYS[version_wanted], _BUFFERS[version_wanted]
    if (arrays, buffers) != wanted:
        raise InvalidBatch(
            f"its columns are not the envelope's: it has {arrays} arrays and {buffers} buffers, "
            f"not {wanted[0]} and {wanted[1]}"
        )


def _table_field(metadata: memoryview, table: int, number: int) -> int | None:
    """Where field `number` of the flatbuffer table at `table` stands, or None if it is absent."""
    vtable = table - _I32.unpack_from(metadata, table)[0]
    if vtable < 0:
        raise InvalidBatch("its Arrow message points outside itself")
    slot = 4 + 2 * number
    if slot + 2 > _U16.unpack_from(metadata, vtable)[0]:
        return None
    inside = _U16.unpack_from(metadata, vtable + slot)[0]
    return table + inside if inside else None


def _vector_length(metadata: memoryview, table: int, number: int) -> int:
    """How many elements the vector in field `number` of the flatbuffer table at `table` has."""
    field = _table_field(metadata, table, number)
    if field is None:
        return 0
    length: int = _U32.unpack_from(metadata, field + _U32.unpack_from(metadata, field)[0])[0]
    return length


def latest_publish_time(rows: pa.RecordBatch) -> int:
    """The latest publish time. Raises if one is no date."""
    times = rows.column(0)
    if len(times) <= ROWS_MAX:  # calling Arrow takes longer than that
        some = memoryview(times.buffers()[1])[times.offset * 8 : (times.offset + len(times)) * 8].cast("q")
        return check_times(min(some), max(some))
    bounds = pc.min_max(times.view(pa.int64()))
    return check_times(bounds["min"].as_py(), bounds["max"].as_py())


def check_times(earliest: int, latest: int, what: str = "publish time") -> int:
    if earliest < PUBLISH_TIME_MIN or latest > PUBLISH_TIME_MAX:
        wrong = earliest if earliest < PUBLISH_TIME_MIN else latest
        raise InvalidBatch(f"{what} {wrong} is not in the years 1 to 9999")
    return latest
