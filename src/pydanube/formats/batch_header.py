"""The fixed header of a batch, and the batch as header and body: what the log needs, which opens no body.

    position  size  field                 written by
           0     4  magic "DNB1"          producer
           4     1  header version  = 1   producer
           5     1  envelope version      producer   1 or 2, of the body's columns; newer ones append nullable ones
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

`load` takes bytes that this log wrote and checks that they are still the same. What to do about bytes that are not (cut
a torn end, report damage) is for the caller to decide: here they are only told apart from good ones.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from functools import lru_cache
from typing import Final, NamedTuple

from crc32c import crc32c

from pydanube.errors import InvalidBatch
from pydanube.ports import Buffer

MAGIC: Final = b"DNB1"

HEADER_VERSION: Final = 1

ENVELOPE_VERSION: Final = 2  # the newest known; a batch has the lowest that will do

UNCOMPRESSED_LENGTH_MAX: Final = 64 * 1024 * 1024

SESSION_RECORD: Final = 1  # flag: carries no rows; a producer session begins here, or ends

# In the logical crc, where a record has none: the session ends. A version that does not know it takes the record for a
# repeated beginning, which changes nothing, and remembers the session for longer.
SESSION_ENDS: Final = 1

_HEADER: Final = struct.Struct("<4sBBBBQIIIQQQQQqqIII")

_CRC: Final = struct.Struct("<I")

HEADER_SIZE: Final = _HEADER.size

assert HEADER_SIZE == 96

CODECS: Final[Mapping[str, int]] = {"none": 0, "lz4": 1, "zstd": 2}

ARROW_CODEC: Final[Mapping[int, str]] = {1: "lz4_raw", 2: "zstd"}


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


def session_record(*, topic: str, producer_id: int, session: int) -> Batch:
    """A batch without rows that says: from here on this is the producer's session. It takes no offset."""
    header = Header(
        MAGIC, HEADER_VERSION, 1, 0, SESSION_RECORD, 0, 0, 0, 0, 0,
        topic_hash(topic), producer_id, session, 0, 0, 0, 0, 0, 0,
    )  # fmt: skip
    return finish(header, b"")


def session_end(*, topic: str, producer_id: int, session: int, next_sequence: int) -> Batch:
    """A batch without rows that says: this session is over, if its next sequence is still this one."""
    begins = session_record(topic=topic, producer_id=producer_id, session=session).header
    return finish(begins._replace(first_sequence=next_sequence, logical_crc=SESSION_ENDS), b"")


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
    return finish(header, batch.body)


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
        raise InvalidBatch(f"envelope version {header.envelope} is not known here (1 to {ENVELOPE_VERSION} are)")
    if header.codec not in ARROW_CODEC and header.codec != 0:
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


def finish(header: Header, body: Buffer) -> Batch:
    fields = header[:-1]
    packed = _HEADER.pack(*fields, 0)
    crc = crc32c(packed[:-4])
    return Batch(Header._make((*fields, crc)), packed[:-4] + _CRC.pack(crc), body)
