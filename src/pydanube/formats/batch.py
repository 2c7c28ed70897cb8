"""A batch: the unit that producers send, the log stores and readers receive. Its body is one Arrow record batch.

The header is drawn in `batch_header.py`, the columns are in `envelope.py`; names of both can be imported from here.
`parse` takes untrusted bytes and checks everything; a Batch that came through it can be stored and mapped by every
later reader. Few rows are written and read without Arrow, byte for byte as it would (`small_batch.py`).
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from pydanube.errors import InvalidBatch
from pydanube.formats.batch_header import (
    ARROW_CODEC,
    CODECS,
    ENVELOPE_VERSION,
    HEADER_SIZE,
    HEADER_VERSION,
    MAGIC,
    SESSION_ENDS,
    SESSION_RECORD,
    UNCOMPRESSED_LENGTH_MAX,
    Batch,
    Header,
    finish,
    load,
    parse_header,
    renumber,
    session_end,
    session_record,
    stamp,
    topic_hash,
)
from pydanube.formats.envelope import (
    ATTRIBUTES,
    COLUMNS_OF,
    ENVELOPE,
    ENVELOPE_1,
    PAYLOAD,
    PUBLISH_TIME_MAX,
    PUBLISH_TIME_MIN,
    SCHEMA_ID,
    Envelope,
    check_nulls,
    check_times,
    columns_of,
    crc_of,
    latest_publish_time,
    logical_crc,
    rows_of,
    serialized,
    validated,
    widened,
    with_times,
)
from pydanube.formats.small_batch import BODY_SIZE_MAX, ROWS_MAX, Sizes, SmallBatchLayout
from pydanube.ports import Buffer

__all__ = [
    "CODECS",
    "COMPRESS_BYTES_MIN",
    "ENVELOPE",
    "ENVELOPE_VERSION",
    "HEADER_SIZE",
    "HEADER_VERSION",
    "MAGIC",
    "PUBLISH_TIME_MAX",
    "PUBLISH_TIME_MIN",
    "SESSION_ENDS",
    "SESSION_RECORD",
    "UNCOMPRESSED_LENGTH_MAX",
    "Batch",
    "Envelope",
    "Header",
    "columns_of",
    "cut",
    "decode",
    "delivery_times",
    "encode",
    "encode_columns",
    "encode_messages",
    "in_version_1",
    "load",
    "logical_crc",
    "messages",
    "parse",
    "parse_header",
    "payload_size_max",
    "payloads_of",
    "renumber",
    "routing",
    "rows_of",
    "schema_pairs",
    "session_end",
    "session_record",
    "stamp",
    "topic_hash",
    "with_attribute",
]

# Below this a codec costs more than it saves.
COMPRESS_BYTES_MIN: Final = 4096


def encode(
    rows: pa.RecordBatch,
    *,
    topic: str,
    producer_id: int = 0,
    session: int = 0,
    first_sequence: int = 0,
    codec: str = "none",
) -> Batch:
    """A batch as a producer sends it: everything but what the log writes is filled in."""
    if rows.schema not in (ENVELOPE_1, ENVELOPE):
        raise InvalidBatch(f"its columns are {rows.schema.names}, not the envelope's {ENVELOPE.names}")
    if rows.num_rows == 0:
        raise InvalidBatch("it has no rows")
    check_nulls(rows)
    plain, version = serialized(rows)
    crc, latest = logical_crc(rows.column(PAYLOAD)), latest_publish_time(rows)
    return _produced(plain, rows.num_rows, crc, latest, topic, producer_id, session, first_sequence, codec, version)


def encode_messages(messages: Sequence[Envelope], *, topic: str) -> Batch:
    """As `encode` of `rows_of`, byte for byte; quickly, if there are few."""
    if _FEW is not None and 0 < len(messages) <= ROWS_MAX:
        payloads, times, keys, producers, attributes, schemas, versions, requests, *more = zip(*messages, strict=True)
        if any(column.count(None) < len(messages) for column in more):
            return encode(rows_of(messages), topic=topic)
        absent = schemas.count(None) + versions.count(None)
        if absent in (0, 2 * len(messages)):
            try:
                plain = _FEW.write(
                    payloads,
                    struct.pack(f"<{len(times)}q", *times),
                    keys=keys,
                    producer_names=producers,
                    attributes=attributes,
                    request_ids=requests,
                    schemas=None if absent else tuple(zip(schemas, versions, strict=True)),
                )
                crc = crc_of(payloads)
            except (ValueError, TypeError, AttributeError, struct.error):
                pass  # Arrow says what does not fit
            else:
                latest = check_times(min(times), max(times))
                return _produced(plain, len(payloads), crc, latest, topic, 0, 0, 0, "none")
    return encode(rows_of(messages), topic=topic)


def encode_columns(
    payloads: Sequence[bytes],
    publish_times: Buffer,
    *,
    keys: Sequence[str | None] | None = None,
    producer_name: str | None = None,
    attributes: Sequence[Mapping[str, str] | None] | None = None,
    schema: tuple[int, int] | None = None,
    topic: str,
    producer_id: int = 0,
    session: int = 0,
    first_sequence: int = 0,
    codec: str = "none",
    event_times: Sequence[int | None] | None = None,
    deliver_at: Sequence[int | None] | None = None,
) -> Batch:
    """As `encode` of `columns_of`, byte for byte; quickly, if there are few rows. Times are in microseconds."""
    count = len(payloads)
    later = event_times is not None or deliver_at is not None
    if _FEW is None or later or not 0 < count <= ROWS_MAX or len(publish_times) != 8 * count:
        rows = columns_of(
            payloads, publish_times, keys=keys, producer_name=producer_name, attributes=attributes, schema=schema
        )
        if later:
            rows = with_times(rows, event_times, deliver_at)
        return encode(
            rows, topic=topic, producer_id=producer_id, session=session, first_sequence=first_sequence, codec=codec
        )
    try:
        plain = _FEW.write(
            payloads, publish_times, keys=keys, producer_name=producer_name, attributes=attributes, schema=schema
        )  # fmt: skip
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        raise InvalidBatch(f"a message does not fit the envelope: {error}") from error
    times = struct.unpack(f"<{count}q", publish_times)
    latest = check_times(min(times), max(times))
    return _produced(plain, count, crc_of(payloads), latest, topic, producer_id, session, first_sequence, codec)


def _produced(
    plain: Buffer,
    rows: int,
    crc: int,
    latest: int,
    topic: str,
    producer_id: int,
    session: int,
    first_sequence: int,
    codec: str,
    version: int = 1,
) -> Batch:
    """A producer's batch with this body, which is of this version of the envelope."""
    size = len(plain)
    if size > UNCOMPRESSED_LENGTH_MAX:
        raise InvalidBatch(f"uncompressed length {size} is over {UNCOMPRESSED_LENGTH_MAX}")
    body = plain
    code = CODECS[codec]
    if code and size >= COMPRESS_BYTES_MIN:
        body = pa.Codec(ARROW_CODEC[code]).compress(plain, asbytes=True)
    else:
        code = 0
    return finish(
        Header(
            MAGIC,
            HEADER_VERSION,
            version,
            code,
            flags=0,
            base_offset=0,
            rows=rows,
            body_length=len(body),
            uncompressed_length=size,
            epoch=0,
            topic_hash=topic_hash(topic),
            producer_id=producer_id,
            session=session,
            first_sequence=first_sequence,
            append_time=0,
            max_publish_time=latest,
            logical_crc=crc,
            body_crc=crc32c(body),
            header_crc=0,
        ),
        body,
    )


def cut(batch: Batch, first: int, end: int) -> Batch:
    """The rows with offsets in [first, end) as a batch of their own; the batch itself if that is all."""
    header = batch.header
    if not header.base_offset <= first < end <= header.end_offset:
        raise ValueError(f"[{first}, {end}) is not inside [{header.base_offset}, {header.end_offset})")
    if first == header.base_offset and end == header.end_offset:
        return batch
    skipped = first - header.base_offset
    return _rebuilt(batch, decode(batch).slice(skipped, end - first), skipped)


def in_version_1(batch: Batch) -> Batch:
    """For a peer that knows no other: without event times and times of delivery."""
    if batch.header.envelope == 1 or batch.header.rows == 0:
        return batch
    return _rebuilt(batch, decode(batch).select(ENVELOPE_1.names), 0)


def _rebuilt(batch: Batch, rows: pa.RecordBatch, skipped: int) -> Batch:
    """Some rows of a batch, the first `skipped` of which are left out."""
    header = batch.header
    plain, version = serialized(rows)
    return finish(
        header._replace(
            envelope=version,
            codec=0,
            base_offset=header.base_offset + skipped,
            rows=rows.num_rows,
            body_length=len(plain),
            uncompressed_length=len(plain),
            first_sequence=header.first_sequence + skipped,
            max_publish_time=latest_publish_time(rows),
            logical_crc=logical_crc(rows.column(PAYLOAD)),
            body_crc=crc32c(plain),
        ),
        plain,
    )


def with_attribute(batch: Batch, name: str, value: str) -> Batch:
    """The batch with one more attribute on every message. Decodes attributes, so it is not for the message path."""
    rows = decode(batch)
    attributes = [[*(pair for pair in pairs if pair[0] != name), (name, value)] for pairs in rows.column(4).to_pylist()]
    rows = rows.set_column(ATTRIBUTES, ENVELOPE.field(ATTRIBUTES), pa.array(attributes, rows.column(4).type))
    plain, version = serialized(rows)
    header = batch.header._replace(
        envelope=version, codec=0, body_length=len(plain), uncompressed_length=len(plain), body_crc=crc32c(plain)
    )
    return finish(header, plain)


def parse(buffer: Buffer) -> Batch:
    """The one batch that `buffer` is, untrusted: checksums, lengths, codec, Arrow structure, schema and
    values are all verified, because every later reader maps these bytes without looking again.
    """
    batch = load(buffer)
    header = batch.header
    if len(buffer) != header.size_bytes:
        raise InvalidBatch(f"{len(buffer) - header.size_bytes} bytes follow its end")
    if header.flags:
        raise InvalidBatch(f"flags {header.flags:#04x} are the log's to set")
    few = _few(batch)
    if few is not None and (facts := few.check(batch.body, header.rows)) is not None:
        found = facts.logical_crc
        schema = facts.schema
        latest = check_times(facts.publish_time_min, facts.publish_time_max)
    else:
        if header.codec == CODECS["lz4"]:
            _check_lz4_length(batch)
        rows = validated(_plain_body(batch), header.envelope)
        if rows.num_rows != header.rows:
            raise InvalidBatch(f"it says {header.rows} rows and has {rows.num_rows}")
        found = logical_crc(rows.column(PAYLOAD))
        latest = latest_publish_time(rows)
        schema = _schema_of(rows)
    if found != header.logical_crc:
        raise InvalidBatch(f"logical checksum is {found:#010x}, the header says {header.logical_crc:#010x}")
    if latest != header.max_publish_time:
        raise InvalidBatch(f"latest publish time is {latest}, the header says {header.max_publish_time}")
    _LAST_PARSED[0] = batch.body, schema
    return batch


def payload_size_max(batch: Batch) -> int:
    """The largest payload in the batch."""
    largest: int = pc.max(pc.binary_length(decode(batch).column(PAYLOAD))).as_py()
    return largest


def decode(batch: Batch) -> pa.RecordBatch:
    """The rows of a batch that was parsed or loaded, without copying an uncompressed body."""
    if batch.header.rows == 0:
        return pa.RecordBatch.from_pylist([], schema=ENVELOPE)
    return widened(pa.ipc.read_record_batch(_plain_body(batch), COLUMNS_OF[batch.header.envelope]))


def messages(batch: Batch) -> list[Envelope]:
    """The rows as values: for clients that get one message at a time, tools and tests."""
    few = _few(batch)
    if few is not None and (values := few.read(batch.body, batch.header.rows)) is not None:
        payloads, publish_times, (keys, names, pairs, requests, schemas) = values
        known: Sequence[tuple[int | None, int | None]] = schemas or [(None, None)] * len(payloads)
        return [
            Envelope(payload, time, key, name, dict(pair), schema_id, version, request)
            for payload, time, key, name, pair, (schema_id, version), request in zip(
                payloads, publish_times, keys, names, pairs, known, requests, strict=True
            )
        ]
    times, payload, key, producer, attributes, *more = decode(batch).columns
    numbers = [each.view(pa.int64()) if pa.types.is_timestamp(each.type) else each for each in (times, *more)]
    columns = [each.to_pylist() for each in (payload, numbers[0], key, producer, attributes, *numbers[1:])]
    columns[4] = [dict(pairs or ()) for pairs in columns[4]]
    return [Envelope._make(row) for row in zip(*columns, strict=True)]


def routing(batch: Batch) -> tuple[Sequence[str | None], Sequence[str | None]]:
    """The routing keys and the producers' names."""
    few = _few(batch)
    if few is not None and (texts := few.read_texts(batch.body, batch.header.rows)) is not None:
        return texts.keys, texts.producer_names
    rows = decode(batch)
    return rows.column(2).to_pylist(), rows.column(3).to_pylist()


def schema_pairs(batch: Batch) -> dict[tuple[int | None, int | None], int]:
    """The distinct (schema_id, schema_version) of its messages, and how many have each. Costs next to nothing for the
    batch that was parsed last.
    """
    body, schema = _LAST_PARSED[0]
    if body is batch.body and schema is not None:
        return {schema: batch.header.rows}
    rows = decode(batch)
    if (one := _schema_of(rows)) is not None:
        return {one: batch.header.rows}
    return dict(Counter(zip(rows.column(SCHEMA_ID).to_pylist(), rows.column(SCHEMA_ID + 1).to_pylist(), strict=True)))


def _schema_of(rows: pa.RecordBatch) -> tuple[int | None, int | None] | None:
    """Of every row, (None, None) for none; None: they differ."""
    ids, versions = rows.column(SCHEMA_ID), rows.column(SCHEMA_ID + 1)
    if ids.null_count == versions.null_count == len(ids):
        return None, None
    if ids.null_count or versions.null_count:
        return None
    first = ids[0].as_py(), versions[0].as_py()
    edges = [pc.min_max(each).as_py() for each in (ids, versions)]
    return first if all(each["min"] == each["max"] for each in edges) else None


# What `parse` saw of the last body: who parses a batch looks at its schema next.
_LAST_PARSED: Final[list[tuple[Buffer | None, tuple[int | None, int | None] | None]]] = [(None, None)]


def payloads_of(batch: Batch, pair: tuple[int | None, int | None]) -> list[tuple[int, bytes]]:
    """Number and payload of each message with this schema id and version."""
    rows = decode(batch)
    pairs = zip(rows.column(SCHEMA_ID).to_pylist(), rows.column(SCHEMA_ID + 1).to_pylist(), strict=True)
    payloads = rows.column(PAYLOAD)
    return [(row, payloads[row].as_py()) for row, each in enumerate(pairs) if each == pair]


def delivery_times(batch: Batch) -> list[int | None] | None:
    """Before when each message is not to be delivered, in microseconds; None: that is said of none of them."""
    if batch.header.envelope == 1 or batch.header.rows == 0:
        return None
    column = decode(batch).column("deliver_at")
    times: list[int | None] = column.view(pa.int64()).to_pylist()
    return times if column.null_count < len(column) else None


def _few(batch: Batch) -> SmallBatchLayout | None:
    """Who may be able to read it more quickly than Arrow."""
    header = batch.header
    if header.envelope != 1:
        return None
    return _FEW if header.rows <= ROWS_MAX and header.body_length <= BODY_SIZE_MAX and header.codec == 0 else None


def _plain_body(batch: Batch) -> pa.Buffer:
    header = batch.header
    stored = pa.py_buffer(batch.body)
    if header.codec == 0:
        return stored
    try:
        plain = pa.Codec(ARROW_CODEC[header.codec]).decompress(stored, header.uncompressed_length)
    except (pa.ArrowException, OSError) as error:
        raise InvalidBatch(f"its body does not decompress: {error}") from error
    if plain.size != header.uncompressed_length:
        raise InvalidBatch(f"its body has {plain.size} bytes, the header says {header.uncompressed_length}")
    return plain


def _check_lz4_length(batch: Batch) -> None:
    """Raises if the body is shorter than the header says. Unlike zstd, raw lz4 does not notice, and the rest
    would be whatever the memory held before: valid Arrow today, other values or a crash at the next reader.
    """
    header = batch.header
    try:
        pa.Codec("lz4_raw").decompress(pa.py_buffer(batch.body), header.uncompressed_length - 1)
    except (pa.ArrowException, OSError):
        return  # it does not fit into less
    raise InvalidBatch(f"its body has less than the {header.uncompressed_length} bytes that the header says")


def _few_rows() -> SmallBatchLayout | None:
    """How this Arrow lays out a batch; None: in a way that only it knows, so it has to do all the work."""
    size = 70_001  # so large that no other number in the metadata is the same
    ends = pa.py_buffer(bytes(4) + size.to_bytes(4, "little"))
    # From buffers: `pa.array` would load pandas, and every importer pays for it, each worker of Spark too.
    payload = pa.Array.from_buffers(pa.binary(), 1, [None, ends, pa.py_buffer(bytes(size))])
    rows = columns_of(payload, bytes(8))
    try:
        return SmallBatchLayout(rows.serialize().to_pybytes(), size, Sizes(1, 1, 0, 1, 0))
    except ValueError:
        return None


_FEW: Final = _few_rows()
