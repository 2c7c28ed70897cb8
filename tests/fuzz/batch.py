"""A byte-level fuzzer for `batch.parse`.

    python -m tests.fuzz.batch --count 200000 --seed 7
    python -m tests.fuzz.batch --seed 7 --first 1234 --count 1     repeats one input

Goal: whatever bytes come in, `parse` either returns a batch that every later reader can look at in full, or raises
InvalidBatch. It never raises anything else, crashes, hangs, or allocates by a length that it has not checked.

Method: take a valid batch and damage it: flip bits, edit numbers, splice, truncate, insert, repeat. In half of the
inputs lengths and checksums are then made right again, so that the damage reaches the Arrow layer; and where `parse`
answers that the header says something else about the rows than the body (rows, logical checksum, latest publish
time), the header is changed to what it wants and the input is tried again.

Inputs run in child processes (`runner.py`). Input i of a seed is always the same.
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Final, NamedTuple

import pyarrow as pa
from crc32c import crc32c

from pydanube.errors import InvalidBatch
from pydanube.formats import batch
from pydanube.formats.batch import Envelope, Header
from tests.fuzz.damage import damage_with, edit_number, flip_bits, insert, remove, repeat, set_byte, truncate
from tests.fuzz.runner import Fuzzer

HEADER: Final = struct.Struct("<4sBBBBQIIIQQQQQqqIII")
CODEC_NAMES: Final = {1: "lz4_raw", 2: "zstd"}
# Twice the largest body, and what decoding one needs beside it.
ALLOCATED_BYTES_MAX: Final = 4 * batch.UNCOMPRESSED_LENGTH_MAX

Parse = Callable[[bytes], batch.Batch]


# --- valid batches ----------------------------------------------------------------------------------


def sealed(header: Header, plain: bytes, *, stored: bytes | None = None) -> bytes:
    """A batch with `plain` as its body, compressed as the header says, with right lengths and checksums.

    `stored` takes the place of the compressed body.
    """
    if stored is None:
        stored = plain
        if header.codec in CODEC_NAMES:
            stored = pa.Codec(CODEC_NAMES[header.codec]).compress(plain, asbytes=True)
    header = header._replace(
        body_length=len(stored), uncompressed_length=len(plain), body_crc=crc32c(stored), header_crc=0
    )
    return with_header_crc(HEADER.pack(*header) + stored)


def with_header_crc(data: bytes) -> bytes:
    if len(data) < HEADER.size:
        return data
    return data[: HEADER.size - 4] + struct.pack("<I", crc32c(data[: HEADER.size - 4])) + data[HEADER.size :]


class Seedling(NamedTuple):
    """A valid batch to damage: its header, its body before compression, and all of it."""

    header: Header
    plain: bytes
    data: bytes


@cache
def seedlings() -> tuple[Seedling, ...]:
    """Small batches of every shape: few rows and many, all columns and only the needed ones, every codec."""
    plenty = Envelope(b"payload", 1_700_000_000_000_000, "key", "producer", {"a": "b", "c": "ü"}, 7, 2, request_id=9)
    shapes: list[list[Envelope]] = [
        [Envelope(b"")],
        [Envelope(b"x" * 33, 5)],
        [plenty],
        [plenty, Envelope(b""), Envelope(bytes(range(200)), -1, "", "", {"": ""}, -1, -1, -1)],
        [Envelope(b"%d" % i, i, f"k{i}" if i % 3 else None, attributes={"n": "1"} if i % 2 else {}) for i in range(20)],
        [Envelope(bytes([i]) * 300, i, "é" * 9) for i in range(16)],
    ]
    made = []
    for shape in shapes:
        rows = batch.rows_of(shape)
        plain = rows.serialize().to_pybytes()
        header = batch.encode(rows, topic="fuzz", producer_id=3, session=1, first_sequence=40).header
        for codec in (0, 1, 2):
            sown = header._replace(codec=codec)
            made.append(Seedling(sown, plain, sealed(sown, plain)))
    return tuple(made)


# --- damage -----------------------------------------------------------------------------------------


def splice(random: Random, data: bytearray) -> None:
    """Goes on like another batch from some place, often the same place, on."""
    other = random.choice(seedlings())
    donor = random.choice((other.data, other.plain))
    place = random.randrange(len(data))
    data[place:] = donor[random.choice((place, random.randrange(len(donor)))) :]


DAMAGES: Final = (
    flip_bits, flip_bits, set_byte, edit_number, edit_number, edit_number, truncate, insert, remove, repeat, splice,
)  # fmt: skip


def damage(random: Random, data: bytearray) -> None:
    damage_with(DAMAGES, random, data)


def generate(seed: int, index: int) -> bytes:
    """Input `index` of `seed`. Odd ones have right checksums."""
    random = Random(f"batch {seed} {index}")
    seedling = random.choice(seedlings())
    if index % 2 == 0:
        data = bytearray(seedling.data)
        damage(random, data)
        return bytes(data)
    kind = random.random()
    if kind < 0.15:  # the header
        head = bytearray(seedling.data[: HEADER.size])
        damage(random, head)
        return with_header_crc(bytes(head) + seedling.data[HEADER.size :])
    if kind < 0.25:  # the body as stored: of a compressed one, what the codec sees
        stored = bytearray(seedling.data[HEADER.size :])
        damage(random, stored)
        claimed = bytes(random.choice((len(seedling.plain), len(seedling.plain) + random.randrange(-64, 65))))
        return sealed(seedling.header, claimed, stored=bytes(stored))
    plain = bytearray(seedling.plain)
    if kind < 0.65:  # the flatbuffer that describes the columns
        metadata_end = 8 + struct.unpack_from("<i", plain, 4)[0]
        metadata = plain[:metadata_end]
        damage(random, metadata)
        if len(metadata) == metadata_end or random.random() < 0.5:
            plain[:metadata_end] = metadata
    else:
        damage(random, plain)
    return sealed(seedling.header, bytes(plain))


# --- judgement --------------------------------------------------------------------------------------

CLAIMS: Final = (
    (re.compile(r"it says \d+ rows and has (\d+)$"), "rows"),
    (re.compile(r"logical checksum is (0x[0-9a-f]+), "), "logical_crc"),
    (re.compile(r"latest publish time is (-?\d+), "), "max_publish_time"),
)


class Wrong(Exception):
    """`parse` did what it must not do."""


def judge(data: bytes, parse: Parse = batch.parse) -> str:
    """Tries one input. Returns "batch" or the sentence of the refusal; raises whatever is neither."""
    try:
        found = parse(data)
    except InvalidBatch as refusal:
        if not refusal.what or "malloc" in refusal.what or "realloc" in refusal.what:
            raise Wrong(f"it tried to allocate by a length it had not checked: {refusal.what}") from refusal
        sentence = refusal.what
    else:
        look_at(found)
        sentence = "batch"
    allocated = pa.default_memory_pool().max_memory()
    if allocated > ALLOCATED_BYTES_MAX:
        raise Wrong(f"{allocated} bytes were allocated at once")
    return sentence


def look_at(found: batch.Batch) -> None:
    """Does what later readers do with a batch."""
    rows = batch.decode(found)
    rows.validate(full=True)
    if rows.num_rows != found.header.rows or len(rows.to_pylist()) != found.header.rows:
        raise Wrong(f"the header says {found.header.rows} rows, the body has {rows.num_rows}")
    again = batch.load(found.to_bytes())
    if batch.messages(again) != batch.messages(found) or not batch.decode(again).equals(rows):
        raise Wrong("reading it twice gives different rows")
    stamped = batch.stamp(found, base_offset=100, epoch=1, append_time=1)
    for first, end in {(100, 100 + rows.num_rows), (100, 101), (99 + rows.num_rows, 100 + rows.num_rows)}:
        batch.parse(batch.cut(stamped, first, end).to_bytes())


def settled(data: bytes, sentence: str) -> bytes | None:
    """The same body with a header that says about it what `parse` found; None if it complains of something else."""
    for pattern, field in CLAIMS:
        if match := pattern.match(sentence):
            header = Header._make(HEADER.unpack_from(data))
            changed = header._replace(**{field: int(match[1], 0)})
            if field == "rows" and changed.rows == 0:
                return None
            return with_header_crc(HEADER.pack(*changed) + data[HEADER.size :])
    return None


def attempt(seed: int, index: int, parse: Parse = batch.parse) -> str:
    data = generate(seed, index)
    sentence = judge(data, parse)
    if index % 2 == 0:
        return sentence
    for _ in CLAIMS:
        better = settled(data, sentence)
        if better is None:
            break
        data = better
        sentence = judge(data, parse)
    return sentence


FUZZER: Final = Fuzzer(
    module="tests.fuzz.batch",
    description="Damages batches, parses them.",
    attempt=attempt,
    accepted="batch",
    accepted_plural="batches",
    count=200_000,
)

if __name__ == "__main__":
    sys.exit(FUZZER.main())
