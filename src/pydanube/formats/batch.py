"""A batch: the unit that producers send, the log stores and readers receive.

    position  size  field                 written by
           0     4  magic "DNB1"          producer
           4     1  header version  = 1   producer
           5     1  envelope version = 1  producer   of the body's columns; newer ones append nullable ones
           6     1  codec                 producer   0 none, 1 lz4, 2 zstd: of the whole body
           7     1  flags                 log        1 = session record (no rows): a session begins, or ends
           8     8  base_offset           log        offset of row 0; row r has base_offset + r
          16     4  rows                  producer
          20     4  body_length           producer   bytes of the body as stored
          24     4  uncompressed_length   producer
          28     8  epoch                 log        of the owner that appended it
          36     8  topic_hash            producer
          44     8  producer_id           producer   0: not deduplicated
          52     8  session               producer
          60     8  first_sequence        producer   of row 0
          68     8  append_time           log        microseconds, never decreasing in a log
          76     8  max_publish_time      producer   microseconds
          84     4  logical crc32c        producer   payload lengths (i32), then bytes: so too in Parquet
          88     4  body crc32c           producer   of the body as stored
          92     4  header crc32c         both       of bytes 0 to 92
          96        body                  producer   one Arrow IPC record batch message, no schema message

All integers are little endian. The log changes only what is marked as its own, and the header's checksum.

`parse` takes bytes from anybody and believes nothing; a Batch that came through it can be stored and mapped
by every later reader. `load` takes bytes that this log wrote and checks that they are still the same. What
to do about bytes that are not (cut a torn end, report damage) is for the caller to decide: here they are
only told apart from good ones.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from crc32c import crc32c

from pydanube.errors import InvalidBatch
from pydanube.formats.small_batch import BODY_SIZE_MAX, ROWS_MAX, Layout, Sizes
from pydanube.ports import Buffer

MAGIC: Final = b"DNB1"
HEADER_VERSION: Final = 1
ENVELOPE_VERSION: Final = 1
UNCOMPRESSED_LENGTH_MAX: Final = 64 * 1024 * 1024
# What a datetime can hold: years 1 to 9999. Rows beyond could be stored, but not looked at.
PUBLISH_TIME_MIN: Final = -62_135_596_800_000_000
PUBLISH_TIME_MAX: Final = 253_402_300_799_999_999
# Below this a codec costs more than it saves.
COMPRESS_BYTES_MIN: Final = 4096

SESSION_RECORD: Final = 1  # flag: carries no rows; a producer session begins here, or ends
# In the logical crc, where a record has none: the session ends. A version that does not know it takes the record for a
# repeated beginning, which changes nothing, and remembers the session for longer.
SESSION_ENDS: Final = 1

_HEADER: Final = struct.Struct("<4sBBBBQIIIQQQQQqqIII")
_CRC: Final = struct.Struct("<I")
HEADER_SIZE: Final = _HEADER.size
assert HEADER_SIZE == 96

CODECS: Final[Mapping[str, int]] = {"none": 0, "lz4": 1, "zstd": 2}
_ARROW_CODEC: Final[Mapping[int, str]] = {1: "lz4_raw", 2: "zstd"}

ENVELOPE: Final = pa.schema(
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
_PAYLOAD: Final = ENVELOPE.get_field_index("payload")
_ATTRIBUTES: Final = ENVELOPE.get_field_index("attributes")
_NO_TEXTS: Final = pa.array([], pa.string())
_REQUIRED: Final = [i for i, field in enumerate(ENVELOPE) if not field.nullable]
# An Arrow message names its arrays and buffers without their columns; these are the envelope's.
_ARRAYS: Final = 11  # 8 columns, and in the map its pairs, keys and values
_BUFFERS: Final = 26
_METADATA_V5: Final = 4


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


class Header(NamedTuple):
    """The fixed header, field by field; the drawing at the top says who writes what."""

    magic: bytes
    version: int
    envelope: int
    codec: int
    flags: int
    base_offset: int
    rows: int
    body_length: int
    uncompressed_length: int
    epoch: int
    topic_hash: int
    producer_id: int
    session: int
    first_sequence: int
    append_time: int
    max_publish_time: int
    logical_crc: int
    body_crc: int
    header_crc: int

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.rows

    @property
    def ends_session(self) -> bool:
        """Whether it is a record that says that a session is over."""
        return bool(self.flags & SESSION_RECORD) and self.logical_crc == SESSION_ENDS

    @property
    def size_bytes(self) -> int:
        """Header and body as stored."""
        return HEADER_SIZE + self.body_length


class Batch(NamedTuple):
    """A header, the same header as bytes, and the body as stored. Both checksums are known to be right."""

    header: Header
    header_bytes: bytes
    body: Buffer

    @property
    def buffers(self) -> tuple[Buffer, Buffer]:
        return self.header_bytes, self.body

    def to_bytes(self) -> bytes:
        return b"".join(self.buffers)


@lru_cache(maxsize=1024)
def topic_hash(topic: str) -> int:
    """What a batch calls its topic, so that a batch in the wrong file or frame is noticed."""
    return int.from_bytes(hashlib.blake2b(topic.encode(), digest_size=8).digest(), "little")


# --- making batches ---------------------------------------------------------------------------------


def rows_of(messages: Sequence[Envelope]) -> pa.RecordBatch:
    """Messages as an Arrow record batch with the envelope's columns."""
    if not messages:
        raise InvalidBatch("it has no rows")
    try:
        columns = list(zip(*messages, strict=True))
        payload, publish_time, key, producer, attributes, schema_id, schema_version, request_id = columns
        if any(attributes):
            pairs = pa.array([list(a.items()) for a in attributes], ENVELOPE.field(_ATTRIBUTES).type)
        else:
            pairs = pa.array([()] * len(messages), ENVELOPE.field(_ATTRIBUTES).type)
        return pa.RecordBatch.from_arrays(
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
            schema=ENVELOPE,
        )
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidBatch(f"a message does not fit the envelope: {error}") from error


def columns_of(
    payloads: Sequence[bytes],
    publish_times: Buffer,
    *,
    keys: Sequence[str | None] | None = None,
    producer_name: str | None = None,
    attributes: Sequence[Mapping[str, str] | None] | None = None,
) -> pa.RecordBatch:
    """As `rows_of`, from columns, for whoever makes many: nothing is done per message where all are alike.

    `publish_times` are the bytes of one i64 per message. None: no message has a key, or attributes.
    """
    count = len(payloads)
    if not count:
        raise InvalidBatch("it has no rows")
    times = pa.py_buffer(publish_times)
    if times.size != 8 * count:
        raise InvalidBatch(f"it has {count} payloads and {times.size // 8} publish times")
    pair_type = ENVELOPE.field(_ATTRIBUTES).type
    try:
        if attributes is None:
            bounds = pa.Array.from_buffers(pa.int32(), count + 1, [None, pa.py_buffer(bytes(4 * (count + 1)))])
            pairs = pa.MapArray.from_arrays(bounds, _NO_TEXTS, _NO_TEXTS, pair_type)
        else:
            pairs = pa.array([() if each is None else list(each.items()) for each in attributes], pair_type)
        return pa.RecordBatch.from_arrays(
            [
                pa.Array.from_buffers(ENVELOPE.field(0).type, count, [None, times]),
                pa.array(payloads, pa.binary()),
                pa.nulls(count, pa.string()) if keys is None else pa.array(keys, pa.string()),
                pa.nulls(count, pa.string()) if producer_name is None else pa.repeat(_text(producer_name), count),
                pairs,
                pa.nulls(count, pa.int64()),
                pa.nulls(count, pa.int32()),
                pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(bytes(8 * count))]),
            ],
            schema=ENVELOPE,
        )
    except (pa.ArrowException, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise InvalidBatch(f"a message does not fit the envelope: {error}") from error


@lru_cache(maxsize=1024)
def _text(value: str) -> pa.Scalar:
    # Kept: pyarrow looks for pandas each time it makes a scalar, which takes ten times as long if there is none.
    return pa.scalar(value, pa.string())


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
    if rows.schema != ENVELOPE:
        raise InvalidBatch(f"its columns are {rows.schema.names}, not the envelope's {ENVELOPE.names}")
    if rows.num_rows == 0:
        raise InvalidBatch("it has no rows")
    _check_nulls(rows)
    plain = memoryview(rows.serialize())
    crc, latest = logical_crc(rows.column(_PAYLOAD)), _max_publish_time(rows)
    return _produced(plain, rows.num_rows, crc, latest, topic, producer_id, session, first_sequence, codec)


def encode_messages(messages: Sequence[Envelope], *, topic: str) -> Batch:
    """As `encode` of `rows_of`, byte for byte; quickly, if there are few."""
    if _FEW is not None and 0 < len(messages) <= ROWS_MAX:
        payloads, times, keys, producers, attributes, schemas, versions, requests = zip(*messages, strict=True)
        if schemas.count(None) == versions.count(None) == len(messages):
            try:
                plain = _FEW.write(
                    payloads,
                    struct.pack(f"<{len(times)}q", *times),
                    keys=keys,
                    producer_names=producers,
                    attributes=attributes,
                    request_ids=requests,
                )
                crc = _crc_of(payloads)
            except (ValueError, TypeError, AttributeError, struct.error):
                pass  # Arrow says what does not fit
            else:
                latest = _check_times(min(times), max(times))
                return _produced(plain, len(payloads), crc, latest, topic, 0, 0, 0, "none")
    return encode(rows_of(messages), topic=topic)


def encode_columns(
    payloads: Sequence[bytes],
    publish_times: Buffer,
    *,
    keys: Sequence[str | None] | None = None,
    producer_name: str | None = None,
    attributes: Sequence[Mapping[str, str] | None] | None = None,
    topic: str,
    producer_id: int = 0,
    session: int = 0,
    first_sequence: int = 0,
    codec: str = "none",
) -> Batch:
    """As `encode` of `columns_of`, byte for byte; quickly, if there are few rows."""
    count = len(payloads)
    if _FEW is None or not 0 < count <= ROWS_MAX or len(publish_times) != 8 * count:
        rows = columns_of(payloads, publish_times, keys=keys, producer_name=producer_name, attributes=attributes)
        return encode(
            rows, topic=topic, producer_id=producer_id, session=session, first_sequence=first_sequence, codec=codec
        )
    try:
        plain = _FEW.write(
            payloads, publish_times, keys=keys, producer_name=producer_name, attributes=attributes
        )  # fmt: skip
    except (ValueError, TypeError, AttributeError, struct.error) as error:
        raise InvalidBatch(f"a message does not fit the envelope: {error}") from error
    times = struct.unpack(f"<{count}q", publish_times)
    latest = _check_times(min(times), max(times))
    return _produced(plain, count, _crc_of(payloads), latest, topic, producer_id, session, first_sequence, codec)


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
) -> Batch:
    """A producer's batch with this body."""
    size = len(plain)
    if size > UNCOMPRESSED_LENGTH_MAX:
        raise InvalidBatch(f"uncompressed length {size} is over {UNCOMPRESSED_LENGTH_MAX}")
    body = plain
    code = CODECS[codec]
    if code and size >= COMPRESS_BYTES_MIN:
        body = pa.Codec(_ARROW_CODEC[code]).compress(plain, asbytes=True)
    else:
        code = 0
    return _finish(
        Header(
            MAGIC,
            HEADER_VERSION,
            ENVELOPE_VERSION,
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


def session_record(*, topic: str, producer_id: int, session: int) -> Batch:
    """A batch without rows that says: from here on this is the producer's session. It takes no offset."""
    header = Header(
        MAGIC, HEADER_VERSION, ENVELOPE_VERSION, 0, SESSION_RECORD, 0, 0, 0, 0, 0,
        topic_hash(topic), producer_id, session, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    return _finish(header, b"")


def session_end(*, topic: str, producer_id: int, session: int, next_sequence: int) -> Batch:
    """A batch without rows that says: this session is over, if its next sequence is still this one."""
    begins = session_record(topic=topic, producer_id=producer_id, session=session).header
    return _finish(begins._replace(first_sequence=next_sequence, logical_crc=SESSION_ENDS), b"")


def stamp(batch: Batch, *, base_offset: int, epoch: int, append_time: int) -> Batch:
    """The batch with what the log writes; the body is shared, not copied."""
    fields = list(batch.header)
    fields[5] = base_offset
    fields[9] = epoch
    fields[14] = append_time
    packed = _HEADER.pack(*fields)
    crc = crc32c(packed[:-4])
    fields[18] = crc
    return Batch(Header._make(fields), packed[:-4] + _CRC.pack(crc), batch.body)


def renumber(batch: Batch, *, producer_id: int, session: int, first_sequence: int) -> Batch:
    """The batch as another session, or another place in it, sends it; the body is shared, not copied."""
    header = batch.header._replace(producer_id=producer_id, session=session, first_sequence=first_sequence)
    return _finish(header, batch.body)


def cut(batch: Batch, first: int, end: int) -> Batch:
    """The rows with offsets in [first, end) as a batch of their own; the batch itself if that is all."""
    header = batch.header
    if not header.base_offset <= first < end <= header.end_offset:
        raise ValueError(f"[{first}, {end}) is not inside [{header.base_offset}, {header.end_offset})")
    if first == header.base_offset and end == header.end_offset:
        return batch
    skipped = first - header.base_offset
    rows = decode(batch).slice(skipped, end - first)
    plain = memoryview(rows.serialize())
    return _finish(
        header._replace(
            codec=0,
            base_offset=first,
            rows=end - first,
            body_length=len(plain),
            uncompressed_length=len(plain),
            first_sequence=header.first_sequence + skipped,
            max_publish_time=_max_publish_time(rows),
            logical_crc=logical_crc(rows.column(_PAYLOAD)),
            body_crc=crc32c(plain),
        ),
        plain,
    )


def with_attribute(batch: Batch, name: str, value: str) -> Batch:
    """The batch with one more attribute on every message. Decodes attributes, so it is not for the message path."""
    rows = decode(batch)
    attributes = [[*(pair for pair in pairs if pair[0] != name), (name, value)] for pairs in rows.column(4).to_pylist()]
    rows = rows.set_column(_ATTRIBUTES, ENVELOPE.field(_ATTRIBUTES), pa.array(attributes, rows.column(4).type))
    plain = memoryview(rows.serialize())
    header = batch.header._replace(
        codec=0, body_length=len(plain), uncompressed_length=len(plain), body_crc=crc32c(plain)
    )
    return _finish(header, plain)


def _crc_of(payloads: Sequence[bytes]) -> int:
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
    # Whoever wrote the buffer may have made it longer than needed, and by an odd number of bytes.
    return memoryview(offsets)[payload.offset * 4 : (payload.offset + len(payload) + 1) * 4].cast("i")


# --- reading batches --------------------------------------------------------------------------------


def parse_header(buffer: Buffer) -> Header:
    """The header at the start of `buffer`, checksum and bounds checked. Allocates nothing by its claims."""
    if len(buffer) < HEADER_SIZE:
        raise InvalidBatch(f"{len(buffer)} bytes are less than a header's {HEADER_SIZE}")
    header = Header._make(_HEADER.unpack_from(buffer))
    if header.magic != MAGIC:
        raise InvalidBatch(f"it begins with {header.magic!r}, not {MAGIC!r}")
    found = crc32c(memoryview(buffer)[: HEADER_SIZE - 4])
    if found != header.header_crc:
        raise InvalidBatch(f"header checksum is {found:#010x}, the header says {header.header_crc:#010x}")
    if header.version != HEADER_VERSION:
        raise InvalidBatch(f"header version {header.version} is not known here ({HEADER_VERSION} is)")
    if header.envelope > ENVELOPE_VERSION or header.envelope == 0:
        raise InvalidBatch(f"envelope version {header.envelope} is not known here ({ENVELOPE_VERSION} is)")
    if header.codec not in _ARROW_CODEC and header.codec != 0:
        raise InvalidBatch(f"codec {header.codec} is not known here ({dict(CODECS)} are)")
    if header.flags & ~SESSION_RECORD:
        raise InvalidBatch(f"flags {header.flags:#04x} are not known here")
    if header.uncompressed_length > UNCOMPRESSED_LENGTH_MAX:
        raise InvalidBatch(f"uncompressed length {header.uncompressed_length} is over {UNCOMPRESSED_LENGTH_MAX}")
    if header.body_length > UNCOMPRESSED_LENGTH_MAX:
        raise InvalidBatch(f"body length {header.body_length} is over {UNCOMPRESSED_LENGTH_MAX}")
    if header.codec == 0 and header.body_length != header.uncompressed_length:
        raise InvalidBatch(
            f"body length {header.body_length} differs from uncompressed length {header.uncompressed_length}"
        )
    if bool(header.flags & SESSION_RECORD) != (header.rows == 0):
        raise InvalidBatch(f"it says it has {header.rows} rows")
    if header.rows == 0 and header.body_length:
        raise InvalidBatch("it has a body but no rows")
    if header.session >= 2**63:
        # An adopted session must leave room for the numbers after it.
        raise InvalidBatch(f"session {header.session} is none that an owner issues")
    if header.first_sequence + header.rows >= 2**64:
        raise InvalidBatch(f"{header.rows} rows from sequence {header.first_sequence} on are more than can be numbered")
    return header


def load(buffer: Buffer) -> Batch:
    """The batch at the start of `buffer`, which this log wrote: checks both checksums, opens no body."""
    header = parse_header(buffer)
    view = memoryview(buffer)
    if len(view) < header.size_bytes:
        raise InvalidBatch(f"body of {header.body_length} bytes ends after {len(view) - HEADER_SIZE}")
    body = view[HEADER_SIZE : header.size_bytes]
    found = crc32c(body)
    if found != header.body_crc:
        raise InvalidBatch(f"body checksum is {found:#010x}, the header says {header.body_crc:#010x}")
    return Batch(header, bytes(view[:HEADER_SIZE]), body)


def parse(buffer: Buffer) -> Batch:
    """The one batch that `buffer` is, from anybody: checksums, lengths, codec, Arrow structure, schema and
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
        latest = _check_times(facts.publish_time_min, facts.publish_time_max)
    else:
        if header.codec == CODECS["lz4"]:
            _check_lz4_length(batch)
        rows = _validated(_plain_body(batch))
        if rows.num_rows != header.rows:
            raise InvalidBatch(f"it says {header.rows} rows and has {rows.num_rows}")
        found = logical_crc(rows.column(_PAYLOAD))
        latest = _max_publish_time(rows)
    if found != header.logical_crc:
        raise InvalidBatch(f"logical checksum is {found:#010x}, the header says {header.logical_crc:#010x}")
    if latest != header.max_publish_time:
        raise InvalidBatch(f"latest publish time is {latest}, the header says {header.max_publish_time}")
    return batch


def payload_size_max(batch: Batch) -> int:
    """The largest payload in the batch."""
    largest: int = pc.max(pc.binary_length(decode(batch).column(_PAYLOAD))).as_py()
    return largest


def decode(batch: Batch) -> pa.RecordBatch:
    """The rows of a batch that was parsed or loaded, without copying an uncompressed body."""
    if batch.header.rows == 0:
        return pa.RecordBatch.from_pylist([], schema=ENVELOPE)
    return pa.ipc.read_record_batch(_plain_body(batch), ENVELOPE)


def messages(batch: Batch) -> list[Envelope]:
    """The rows as values: for clients that get one message at a time, tools and tests."""
    few = _few(batch)
    if few is not None and (values := few.read(batch.body, batch.header.rows)) is not None:
        payloads, publish_times, (keys, names, pairs, requests) = values
        return [
            Envelope(payload, time, key, name, dict(pair), None, None, request)
            for payload, time, key, name, pair, request in zip(
                payloads, publish_times, keys, names, pairs, requests, strict=True
            )
        ]
    times, payload, key, producer, attributes, *numbers = decode(batch).columns
    columns = [each.to_pylist() for each in (payload, times.view(pa.int64()), key, producer, attributes, *numbers)]
    columns[4] = [dict(pairs or ()) for pairs in columns[4]]
    return [Envelope._make(row) for row in zip(*columns, strict=True)]


def routing(batch: Batch) -> tuple[Sequence[str | None], Sequence[str | None]]:
    """The routing keys and the producers' names."""
    few = _few(batch)
    if few is not None and (texts := few.read_texts(batch.body, batch.header.rows)) is not None:
        return texts.keys, texts.producer_names
    rows = decode(batch)
    return rows.column(2).to_pylist(), rows.column(3).to_pylist()


def _few(batch: Batch) -> Layout | None:
    """Who may be able to read it more quickly than Arrow."""
    header = batch.header
    return _FEW if header.rows <= ROWS_MAX and header.body_length <= BODY_SIZE_MAX and header.codec == 0 else None


def _plain_body(batch: Batch) -> pa.Buffer:
    header = batch.header
    stored = pa.py_buffer(batch.body)
    if header.codec == 0:
        return stored
    try:
        plain = pa.Codec(_ARROW_CODEC[header.codec]).decompress(stored, header.uncompressed_length)
    except (pa.ArrowException, OSError) as error:
        raise InvalidBatch(f"its body does not decompress: {error}") from error
    if plain.size != header.uncompressed_length:
        raise InvalidBatch(f"its body has {plain.size} bytes, the header says {header.uncompressed_length}")
    return plain


def _validated(plain: pa.Buffer) -> pa.RecordBatch:
    """The record batch in `plain`, safe to read."""
    try:
        reader = pa.BufferReader(plain)
        message = pa.ipc.read_message(reader)
        if reader.tell() != plain.size:
            raise InvalidBatch(f"{plain.size - reader.tell()} bytes follow the Arrow message in its body")
        if message.type != "record batch":
            raise InvalidBatch(f"its body is an Arrow {message.type}, not a record batch")
        _check_message(memoryview(message.metadata))
        rows = pa.ipc.read_record_batch(message, ENVELOPE)
        rows.validate(full=True)
    except (pa.ArrowException, OSError, EOFError, struct.error) as error:
        raise InvalidBatch(f"its body is not a record batch of the envelope: {error}") from error
    _check_nulls(rows)
    return rows


def _check_nulls(rows: pa.RecordBatch) -> None:
    for i in _REQUIRED:
        if rows.column(i).null_count:
            raise InvalidBatch(f"column {ENVELOPE.names[i]} has a null")
    attributes = rows.column(_ATTRIBUTES)
    if attributes.keys.null_count or attributes.items.null_count:
        raise InvalidBatch("column attributes has a null inside")


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


def _check_message(metadata: memoryview) -> None:
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
    if (arrays, buffers) != (_ARRAYS, _BUFFERS):
        raise InvalidBatch(
            f"its columns are not the envelope's: it has {arrays} arrays and {buffers} buffers, "
            f"not {_ARRAYS} and {_BUFFERS}"
        )


_U16: Final = struct.Struct("<H")
_U32: Final = struct.Struct("<I")
_I32: Final = struct.Struct("<i")


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


def _max_publish_time(rows: pa.RecordBatch) -> int:
    """The latest publish time. Raises if one is no date."""
    times = rows.column(0)
    if len(times) <= ROWS_MAX:  # calling Arrow takes longer than that
        some = memoryview(times.buffers()[1])[times.offset * 8 : (times.offset + len(times)) * 8].cast("q")
        return _check_times(min(some), max(some))
    bounds = pc.min_max(times.view(pa.int64()))
    return _check_times(bounds["min"].as_py(), bounds["max"].as_py())


def _check_times(earliest: int, latest: int) -> int:
    if earliest < PUBLISH_TIME_MIN or latest > PUBLISH_TIME_MAX:
        wrong = earliest if earliest < PUBLISH_TIME_MIN else latest
        raise InvalidBatch(f"publish time {wrong} is not in the years 1 to 9999")
    return latest


def _finish(header: Header, body: Buffer) -> Batch:
    fields = header[:-1]
    packed = _HEADER.pack(*fields, 0)
    crc = crc32c(packed[:-4])
    return Batch(Header._make((*fields, crc)), packed[:-4] + _CRC.pack(crc), body)


def _few_rows() -> Layout | None:
    """How this Arrow lays out a batch; None: in a way that only it knows, so it has to do all the work."""
    size = 70_001  # so large that no other number in the metadata is the same
    rows = columns_of([bytes(size)], bytes(8))
    try:
        return Layout(rows.serialize().to_pybytes(), size, Sizes(1, 1, 0, 1, 0))
    except ValueError:
        return None


_FEW: Final = _few_rows()
