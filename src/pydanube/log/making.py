"""Objects of the cloud tier are made and checked here, of a topic's batches or of smaller objects.

Everything below is a plain function of plain values, so that large objects can be made in another process. What is
large is a memoryview, which goes there without a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pydanube.errors import InvalidObject
from pydanube.log.batch import Batch
from pydanube.log.parquet import Encoded, encode_object, encode_raw, merge_objects, read_raw, summary, verify_object
from pydanube.ports import Buffer

LARGE_BYTES: Final = 16 * 1024  # not copied: to look at it costs less
BATCHES_AT_ONCE: Final = 32  # at most half a megabyte is copied, with the interpreter lock held


class Made(NamedTuple):
    """An object that holds what it is made of: every logical checksum was compared. It is ready to be stored."""

    data: Buffer
    start_offset: int
    end: int
    min_publish_time: int
    max_publish_time: int
    max_append_time: int
    footer_crc: int  # 0 if it is raw
    raw: bool = False


def make_object(topic: str, epoch: int, batches: Sequence[Batch]) -> Made:
    """The batches, which follow each other without a gap. Raises InvalidObject if Arrow cannot make one of them."""
    return _checked(encode_object(topic, epoch, batches))


def make_packed(topic: str, epoch: int, packed: Sequence[Buffer]) -> Made:
    """The same of packed batches."""
    return make_object(topic, epoch, read_raw(b"".join(packed)))


def make_raw(batches: Sequence[Batch]) -> Made:
    """The batches as the log has them: for what Arrow refuses to read."""
    encoded = encode_raw(batches)
    if [summary(batch) for batch in read_raw(encoded.data)] != list(encoded.batches):
        raise InvalidObject("the raw object", "it is not what the log has")
    return _made(encoded, raw=True)


def merge(topic: str, epoch: int, objects: Sequence[tuple[Buffer, int]]) -> Made:
    """One object of several that follow each other; each with the checksum of its footer. Raises InvalidObject."""
    return _checked(merge_objects(topic, epoch, objects))


def pack(batches: Sequence[Batch]) -> Iterator[list[memoryview]]:
    """The batches as bytes that another process can be given: large ones as they are, small ones put together.

    Some at a time: it may be done on the event loop, if others have their turn in between.
    """
    for first in range(0, len(batches), BATCHES_AT_ONCE):
        pieces: list[memoryview] = []
        small: list[Buffer] = []
        for batch in batches[first : first + BATCHES_AT_ONCE]:
            for buffer in batch.buffers:
                if len(buffer) < LARGE_BYTES:
                    small.append(buffer)
                else:
                    pieces += [memoryview(b"".join(small)), memoryview(buffer)]
                    small = []
        yield [*pieces, memoryview(b"".join(small))]


def _checked(encoded: Encoded) -> Made:
    verify_object(encoded.data, encoded.batches)
    return _made(encoded, raw=False)


def _made(encoded: Encoded, *, raw: bool) -> Made:
    return Made(
        memoryview(encoded.data),
        encoded.start_offset,
        encoded.end,
        encoded.min_publish_time,
        encoded.max_publish_time,
        encoded.max_append_time,
        0 if raw else encoded.footer_crc,
        raw,
    )
