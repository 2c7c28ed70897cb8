"""Objects of the cloud tier are made and checked here, of a topic's batches or of smaller objects.

Everything below is a plain function of plain values, so that large objects can be made in another process. What is
large is a memoryview, which goes there without a copy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple, TypeAlias

import pyarrow as pa

from pydanube.errors import InvalidObject
from pydanube.formats.batch import Batch
from pydanube.formats.parquet import (
    Encoded,
    check_bytes,
    encode_object,
    encode_raw,
    merge_objects,
    read_raw,
    summary,
    verify_object,
)
from pydanube.ports import Buffer, Elsewhere, ObjectInfo, ObjectStore

LARGE_BYTES: Final = 16 * 1024  # not copied: to look at it costs less
READ_BACK_BYTES: Final = 4 * 1024 * 1024
BATCHES_AT_ONCE: Final = 32  # at most half a megabyte is copied, with the interpreter lock held


Run: TypeAlias = Callable[[Callable[[], bool]], Awaitable[bool]]


class Unreadable(NamedTuple):
    """Which of the objects that were to be merged, and why."""

    number: int
    why: str


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


async def make_and_store(
    key: str, topic: str, epoch: int, packed: Sequence[Buffer], elsewhere: Elsewhere
) -> tuple[Made, ObjectInfo] | None:
    """The same, and the object is stored where it was made; only what is known of it comes back.

    None if Arrow cannot make one of them. Raises what the store does, or InvalidObject if it has something else.
    """
    try:
        made = make_packed(topic, epoch, packed)
    except InvalidObject:
        return None
    async with elsewhere() as store:
        info = await put_checked(store, key, made.data, _run_here)
    return made._replace(data=b""), info


async def put_checked(store: ObjectStore, key: str, data: Buffer, run: Run) -> ObjectInfo:
    """Puts the object, reads it back and has it compared. Raises InvalidObject if the store has something else.

    Piece by piece: to free 64 MiB stops everybody for some milliseconds.
    """
    info = await store.put(key, [data], create=True)
    given = memoryview(data)
    for position in range(0, given.nbytes, READ_BACK_BYTES):
        piece = given[position : position + READ_BACK_BYTES]
        is_last = position + piece.nbytes == given.nbytes
        try:
            stored = await store.get_range(key, position, piece.nbytes + is_last)  # nothing may come behind it
        except FileNotFoundError:
            raise InvalidObject(key, "the store took it and does not have it") from None
        if not await run(partial(_are_equal, stored, piece)):
            raise InvalidObject(key, "what the store has is not what it was given")
    return info


def make_raw(batches: Sequence[Batch]) -> Made:
    """The batches as the log has them: for what Arrow refuses to read."""
    encoded = encode_raw(batches)
    if [summary(batch) for batch in read_raw(encoded.data)] != list(encoded.batches):
        raise InvalidObject("the raw object", "it is not what the log has")
    return _made(encoded, raw=True)


def merge(topic: str, epoch: int, objects: Sequence[tuple[Buffer, int]]) -> Made:
    """One object of several that follow each other; each with the checksum of its footer. Raises InvalidObject."""
    return _checked(merge_objects(topic, epoch, objects))


async def merge_and_store(
    key: str, topic: str, epoch: int, objects: Sequence[tuple[str, int]], elsewhere: Elsewhere
) -> tuple[Made, ObjectInfo] | Unreadable:
    """The same of stored objects, each with its key, and stored where it was made. Raises what the store does."""
    parts = []
    async with elsewhere() as store:
        for number, (part, footer_crc) in enumerate(objects):
            try:
                data = await store.get(part)
                check_bytes(data, footer_crc)
            except (FileNotFoundError, InvalidObject) as error:
                return Unreadable(number, why_unreadable(error))
            parts.append((data, footer_crc))
        made = merge(topic, epoch, parts)
        info = await put_checked(store, key, made.data, _run_here)
    return made._replace(data=b""), info


def why_unreadable(error: FileNotFoundError | InvalidObject) -> str:
    return "it is missing" if isinstance(error, FileNotFoundError) else str(error)


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


async def _run_here(function: Callable[[], bool]) -> bool:
    return function()


def _are_equal(one: Buffer, other: Buffer) -> bool:
    return bool(pa.py_buffer(one).equals(pa.py_buffer(other)))


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
