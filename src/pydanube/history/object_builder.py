"""Objects of the cloud tier are built here, of a topic's batches or of smaller objects, and stored.

    Recipe ─► what it is made of ─► build_object ─► put ─► read back, compare ─► Built
              (objects are fetched)  (checksums)

`store_object` is that line, wherever it runs: the broker, with its threads, or another process, which opens the store
itself and keeps the object. Everything is a plain function of plain values, so that it can. What is large is a
memoryview, which goes there without a copy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import pyarrow as pa

from pydanube.errors import InvalidObject
from pydanube.formats.batch import Batch, with_attribute
from pydanube.formats.parquet import Encoded, encode_raw, read_raw, summary
from pydanube.formats.parquet_read import check_bytes, verify_object
from pydanube.formats.parquet_write import encode_object, merge_objects
from pydanube.ports import Buffer, ObjectInfo, ObjectStore, StoreOpener

T = TypeVar("T")

UNCOPIED_FROM_BYTES: Final = 16 * 1024  # not copied: to look at it costs less
READ_BACK_BYTES: Final = 4 * 1024 * 1024
BATCHES_AT_ONCE: Final = 32  # at most half a megabyte is copied, with the interpreter lock held


class RunInWorker(Protocol):
    """Calls the function off the event loop."""

    def __call__(self, function: Callable[[], T], /) -> Awaitable[T]: ...


class Packed(NamedTuple):
    """Batches as bytes: see `pack`."""

    pieces: Sequence[Buffer]


class Parts(NamedTuple):
    """Stored objects that follow each other, each with its key and the checksum of its footer."""

    objects: Sequence[tuple[str, int]]


class Recipe(NamedTuple):
    """One object of the topic, of batches that follow each other without a gap or of smaller objects.

    `raw`: batches as the log has them, for what Arrow refuses to read. `mark`: an attribute that every row gets.
    """

    topic: str
    epoch: int
    source: Sequence[Batch] | Packed | Parts
    raw: bool = False
    mark: tuple[str, str] | None = None


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


class Built(NamedTuple):
    """An object that is stored and was compared; `made` is without its bytes."""

    made: Made
    info: ObjectInfo


class NotBuilt(NamedTuple):
    """Nothing was stored: Arrow cannot make it, or, with its number, one of the parts cannot be read."""

    why: str
    part: int | None = None


def build_object(recipe: Recipe, parts: Sequence[Buffer] = ()) -> Made:
    """The object; of the `parts`, if it is made of stored ones. Raises InvalidObject if Arrow cannot make it."""
    source = recipe.source
    if isinstance(source, Parts):
        crcs = [footer_crc for _, footer_crc in source.objects]
        return _checked(merge_objects(recipe.topic, recipe.epoch, list(zip(parts, crcs, strict=True))))
    batches = read_raw(b"".join(source.pieces)) if isinstance(source, Packed) else source
    if recipe.raw:
        encoded = encode_raw(batches)
        if [summary(batch) for batch in read_raw(encoded.data)] != list(encoded.batches):
            raise InvalidObject("the raw object", "it is not what the log has")
        return _made(encoded, raw=True)
    if recipe.mark is not None:
        batches = [with_attribute(batch, *recipe.mark) for batch in batches]
    return _checked(encode_object(recipe.topic, recipe.epoch, batches))


async def store_object(
    key: str, recipe: Recipe, store: ObjectStore, build: RunInWorker, run: RunInWorker
) -> Built | NotBuilt:
    """Builds the object, puts it, reads it back and has it compared; `build` is for what takes long.

    Raises what the store does, or InvalidObject if it has something else than it was given.
    """
    parts: list[Buffer] = []
    for number, (part, footer_crc) in enumerate(recipe.source.objects if isinstance(recipe.source, Parts) else ()):
        try:
            data = await store.get(part)
            await run(partial(check_bytes, data, footer_crc))
        except (FileNotFoundError, InvalidObject) as error:
            return NotBuilt("it is missing" if isinstance(error, FileNotFoundError) else str(error), number)
        parts.append(memoryview(data))
    try:
        made = await build(partial(build_object, recipe, parts))
    except InvalidObject as error:
        return NotBuilt(str(error))
    info = await _put_checked(store, key, made.data, run)
    return Built(made._replace(data=b""), info)


async def build_in_worker(key: str, recipe: Recipe, opener: StoreOpener) -> Built | NotBuilt:
    """The same in another process; the object never leaves it, and only what is known of it comes back."""
    async with opener() as store:
        return await store_object(key, recipe, store, _run_here, _run_here)


async def _put_checked(store: ObjectStore, key: str, data: Buffer, run: RunInWorker) -> ObjectInfo:
    """Piece by piece: freeing 64 MiB stops all threads for some milliseconds."""
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


def pack(batches: Sequence[Batch]) -> Iterator[list[memoryview]]:
    """The batches as bytes that another process can be given: large ones as they are, small ones put together.

    Some at a time: it may be done on the event loop, if others have their turn in between.
    """
    for first in range(0, len(batches), BATCHES_AT_ONCE):
        pieces: list[memoryview] = []
        small: list[Buffer] = []
        for batch in batches[first : first + BATCHES_AT_ONCE]:
            for buffer in batch.buffers:
                if len(buffer) < UNCOPIED_FROM_BYTES:
                    small.append(buffer)
                else:
                    pieces += [memoryview(b"".join(small)), memoryview(buffer)]
                    small = []
        yield [*pieces, memoryview(b"".join(small))]


async def _run_here(function: Callable[[], Any]) -> Any:
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
