"""Bodies of batches of few rows, written and checked without Arrow's library.

    Layout.write(payloads, times, ...)  the very bytes that Arrow writes for these messages
    Layout.check(body, rows)            what `batch.parse` wants to know of a body, or None: ask Arrow
    Layout.read(body, rows)             its columns as values, or None: ask Arrow

Arrow has a fixed price per batch, and it is highest where it hurts most: one message at a time finds its code cold
(measured: 260 µs to write and 125 µs to check one message, a fifth of that in a loop). One batch of few rows is little
more than a table of numbers, which is written here directly. The metadata of all batches of the envelope is the same
but for that table, so an example that Arrow has written is all there is to know about it.

`check` knows one layout, the one that `write` makes. It never says that a body is bad: what is laid out in another
way, or has a schema on some messages only, or is wrong, is Arrow's to judge. What it accepts is safe to map: the table
equals the one that belongs to the lengths found, every offset ascends from 0 to such a length, and every text is UTF-8.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final, NamedTuple, TypeAlias

from crc32c import crc32c

from pydanube.ports import Buffer

ROWS_MAX: Final = 32  # from here on Arrow checks faster
BODY_SIZE_MAX: Final = 256 * 1024  # copying a large body costs more than Arrow does
KEPT_MAX: Final = 1024
KEPT_SIZE_MAX: Final = 512

_ARRAYS: Final = 11
_BUFFERS: Final = 26
_TABLES: Final = struct.Struct(f"<I{2 * _BUFFERS}q"), struct.Struct(f"<I{2 * _ARRAYS}q")
_I64: Final = struct.Struct("<q")
# Nulls of routing_key and producer_name, number of pairs, nulls of schema_id.
_CLAIMS: Final = struct.Struct("<40xq8xq16xq48xq")
_PAD: Final = tuple(bytes(-size % 8) for size in range(8))
# How many offsets, or times, there are: one more than rows.
_OFFSETS: Final = tuple(struct.Struct(f"<{count}i") for count in range(ROWS_MAX + 2))
_TIMES: Final = tuple(struct.Struct(f"<{count}q") for count in range(ROWS_MAX + 1))


Schema: TypeAlias = tuple[int, int]  # schema_id, schema_version


class Sizes(NamedTuple):
    """What a layout depends on, in addition to the bytes of all payloads: rows, nulls, and bytes of text."""

    rows: int
    key_nulls: int
    key: int
    name_nulls: int
    name: int
    pairs: int = 0
    pair_keys: int = 0
    pair_values: int = 0
    schemas: bool = False  # every message has one; else none has


class Facts(NamedTuple):
    """What the header of a batch must agree with."""

    logical_crc: int
    publish_time_min: int
    publish_time_max: int
    schema: tuple[int | None, int | None] | None  # of every message, (None, None) for none; None: they differ


class Texts(NamedTuple):
    """What is behind the payloads of a body, column by column."""

    keys: Sequence[str | None]
    producer_names: Sequence[str | None]
    attributes: Sequence[Sequence[tuple[str, str]]]
    request_ids: Sequence[int]
    schemas: Sequence[Schema] | None  # None: none has one


class Columns(NamedTuple):
    """A body as values."""

    payloads: Sequence[bytes]
    publish_times: Sequence[int]
    texts: Texts


class _Parts(NamedTuple):
    """A body of the layout known here."""

    data: bytes
    times: tuple[int, ...]
    bounds: tuple[int, ...]  # of the payloads
    payload_at: int
    rest: bytes  # everything behind the payloads
    claims: tuple[int, int, int, int]  # nulls of keys, nulls of producer names, pairs, nulls of schema ids


class SmallBatchLayout:
    """Made from a body that Arrow has written, and what is in it. Raises ValueError if that is laid out differently."""

    def __init__(self, example: bytes, payload_bytes: int, sizes: Sizes) -> None:
        length, buffers, arrays = _tables(payload_bytes, sizes)
        metadata = example[: len(example) - length]
        form, constants, position = "<", [], 0
        wanted = sorted(
            (
                *((_position(metadata, table.pack(len(numbers) // 2, *numbers)) + 4, numbers)
                  for table, numbers in zip(_TABLES, (buffers, arrays), strict=True)),
                (_position(metadata, _I64.pack(length)), (length,)),
                (_rows_position(metadata, sizes.rows), (sizes.rows,)),
            )
        )  # fmt: skip
        for place, numbers in wanted:
            form += f"{place - position}s{len(numbers)}q"
            constants.append(metadata[position:place])
            position = place + 8 * len(numbers)
        if [len(numbers) for _, numbers in wanted] != [1, 1, 2 * _BUFFERS, 2 * _ARRAYS] or len(metadata) % 8:
            raise ValueError("the parts of the metadata stand in another order")
        constants.append(metadata[position:])
        self._metadata = struct.Struct(f"{form}{len(constants[-1])}s")
        self._constants = constants
        self._size = len(metadata)
        self._claims_at = wanted[3][0]
        # Messages of one producer are much alike: what was made or found good once is good again.
        self._pack = lru_cache(maxsize=KEPT_MAX)(self._packed)
        self._known_rest = lru_cache(maxsize=KEPT_MAX)(_checked_rest)
        self._known_texts = lru_cache(maxsize=KEPT_MAX)(_texts_of)
        if self._pack(payload_bytes, sizes) != metadata:
            raise ValueError("the metadata is not what these sizes make")

    def _packed(self, payload_bytes: int, sizes: Sizes) -> bytes:
        length, buffers, arrays = _tables(payload_bytes, sizes)
        a, b, c, d, e = self._constants
        return self._metadata.pack(a, length, b, sizes.rows, c, *buffers, d, *arrays, e)

    # --- writing ------------------------------------------------------------------------------------

    def write(
        self,
        payloads: Sequence[bytes],
        publish_times: Buffer,
        *,
        keys: Sequence[str | None] | None = None,
        producer_name: str | None = None,
        producer_names: Sequence[str | None] | None = None,
        attributes: Sequence[Mapping[str, str] | None] | None = None,
        request_ids: Sequence[int] | None = None,
        schema: Schema | None = None,
        schemas: Sequence[Schema] | None = None,
    ) -> bytes:
        """As `batch.columns_of` and Arrow would. At most ROWS_MAX messages. Raises UnicodeEncodeError.

        All have one `producer_name`, or each its own; and so with `schema`.
        """
        rows = len(payloads)
        offsets, payload = _joined(payloads)
        if keys is None and attributes is None and producer_names is None and schemas is None:
            sizes, rest = _rest(rows, producer_name, schema)
        else:
            each = schemas if schemas is not None or schema is None else [schema] * rows
            sizes, rest = _rest_of(rows, keys, producer_names or [producer_name] * rows, attributes, each)
        if request_ids is not None:
            rest = rest[: -8 * rows] + _TIMES[rows].pack(*request_ids)
        size = len(payload)
        return b"".join((self._pack(size, sizes), publish_times, offsets, payload, _PAD[size % 8], rest))

    # --- checking -----------------------------------------------------------------------------------

    def check(self, body: Buffer, rows: int) -> Facts | None:
        """None: it is not of the layout known here, or not valid."""
        parts = self._parts(body, rows)
        if parts is None:
            return None
        data, times, bounds, payload_at, rest, claims = parts
        if rows == 1:
            lengths, earliest, latest = _OFFSETS[1].pack(bounds[1]), times[0], times[0]
        else:
            lengths = _OFFSETS[rows].pack(*[end - first for first, end in pairwise(bounds)])
            earliest, latest = min(times), max(times)
        schema = _NO_SCHEMA if claims[3] else _one_schema(rest, rows)
        return Facts(crc32c(data[payload_at : payload_at + bounds[-1]], crc32c(lengths)), earliest, latest, schema)

    def _parts(self, body: Buffer, rows: int) -> _Parts | None:
        size = self._size
        if not 0 < rows <= ROWS_MAX or not size < len(body) <= BODY_SIZE_MAX:
            return None
        data = body if type(body) is bytes else bytes(body)
        offsets_at = size + 8 * rows
        payload_at = offsets_at + ((4 * rows + 11) & ~7)
        if payload_at > len(data):
            return None
        times = _TIMES[rows].unpack_from(data, size)
        bounds = _OFFSETS[rows + 1].unpack_from(data, offsets_at)
        if not _ascends(bounds):
            return None
        payload_end = payload_at + bounds[-1]
        rest = data[(payload_end + 7) & ~7 :]
        checked = self._known_rest if len(rest) <= KEPT_SIZE_MAX else _checked_rest
        claims = _CLAIMS.unpack_from(data, self._claims_at)
        sizes = checked(rest, rows, *claims)
        if sizes is None or not data.startswith(self._pack(bounds[-1], sizes)):
            return None
        return _Parts(data, times, bounds, payload_at, rest, claims)

    # --- reading ------------------------------------------------------------------------------------

    def read(self, body: Buffer, rows: int) -> Columns | None:
        """None: it is not of the layout known here."""
        parts = self._parts(body, rows)
        if parts is None:
            return None
        data, times, bounds, at, rest, claims = parts
        payloads = [data[at + first : at + end] for first, end in pairwise(bounds)]
        texts = self._known_texts if len(rest) <= KEPT_SIZE_MAX else _texts_of
        return Columns(payloads, times, texts(rest, rows, *claims))

    def read_texts(self, body: Buffer, rows: int) -> Texts | None:
        """As `read`, for who does not want the payloads."""
        parts = self._parts(body, rows)
        if parts is None:
            return None
        texts = self._known_texts if len(parts.rest) <= KEPT_SIZE_MAX else _texts_of
        return texts(parts.rest, rows, *parts.claims)


_NO_SCHEMA: Final = (None, None)


def _one_schema(rest: bytes, rows: int) -> Schema | None:
    """What all rows have, of a column that `_checked_rest` has found full. It stands in front of the request ids."""
    at = len(rest) - 8 * rows - ((4 * rows + 7) & ~7)
    ids, versions = rest[at - 8 * rows : at], rest[at : at + 4 * rows]
    if ids != ids[:8] * rows or versions != versions[:4] * rows:
        return None
    return _I64.unpack_from(ids)[0], int.from_bytes(versions[:4], "little", signed=True)


def _checked_rest(
    rest: bytes, rows: int, key_nulls: int, name_nulls: int, pairs: int, schema_nulls: int
) -> Sizes | None:
    """The sizes of what is behind the payloads, if the metadata tells the truth of nulls and pairs."""
    reader = _Reader(rest)
    try:
        key = reader.texts(rows, key_nulls)
        name = reader.texts(rows, name_nulls)
        if not 0 <= pairs <= len(rest) or reader.offsets(rows)[-1] != pairs:
            return None
        pair_keys = reader.texts(pairs, 0)
        pair_values = reader.texts(pairs, 0)
    except (_Otherwise, struct.error):
        return None
    if schema_nulls == 0:
        versions_end = reader.at + 12 * rows
        gap = _PAD[4 * rows % 8]
        if len(rest) != versions_end + len(gap) + 8 * rows or not rest.startswith(gap, versions_end):
            return None
    else:
        numbers = _numbers(rows)
        if len(rest) != reader.at + len(numbers) or not rest.startswith(numbers[: -8 * rows], reader.at):
            return None
    return Sizes(rows, key_nulls, key, name_nulls, name, pairs, pair_keys, pair_values, schema_nulls == 0)


def _texts_of(rest: bytes, rows: int, key_nulls: int, name_nulls: int, pairs: int, schema_nulls: int) -> Texts:
    """What `_checked_rest` has found good."""
    reader = _Reader(rest)
    keys, names = reader.values(rows, key_nulls), reader.values(rows, name_nulls)
    pair_bounds = reader.offsets(rows)
    both = list(zip(reader.values(pairs, 0), reader.values(pairs, 0), strict=True))
    attributes = tuple(tuple(both[first:end]) for first, end in pairwise(pair_bounds))
    schemas = None
    if schema_nulls == 0:
        versions = _OFFSETS[rows].unpack_from(rest, reader.at + 8 * rows)
        schemas = tuple(zip(_TIMES[rows].unpack_from(rest, reader.at), versions, strict=True))
    return Texts(keys, names, attributes, _TIMES[rows].unpack(rest[-8 * rows :]), schemas)  # type: ignore[arg-type]


class _Otherwise(Exception):
    """It is laid out in another way."""


class _Reader:
    """Goes through columns, one after the other."""

    __slots__ = ("at", "data")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def offsets(self, count: int) -> tuple[int, ...]:
        """Ascending from 0."""
        form = _OFFSETS[count + 1] if count <= ROWS_MAX else struct.Struct(f"<{count + 1}i")
        found = form.unpack_from(self.data, self.at)
        if not _ascends(found):
            raise _Otherwise
        self.at += (form.size + 7) & ~7
        return found

    def take(self, size: int) -> bytes:
        end = self.at + size
        found = self.data[self.at : end]
        if len(found) != size:
            raise _Otherwise
        self.at = (end + 7) & ~7
        return found

    def texts(self, count: int, nulls: int) -> int:
        """How many bytes the texts of a column have; each is UTF-8, and as many are null as it was said."""
        if nulls:
            bits = int.from_bytes(self.take((count + 7) // 8), "little")
            if bits >> count or count - bits.bit_count() != nulls:
                raise _Otherwise
        bounds = self.offsets(count)
        text = self.take(bounds[-1])
        if not text.isascii():
            try:
                for first, end in pairwise(bounds):
                    text[first:end].decode()
            except UnicodeDecodeError:
                raise _Otherwise from None
        return len(text)

    def values(self, count: int, nulls: int) -> tuple[str | None, ...]:
        """A column of texts that `texts` has found good."""
        bits = int.from_bytes(self.take((count + 7) // 8), "little") if nulls else -1
        bounds = self.offsets(count)
        text = self.take(bounds[-1])
        return tuple(
            text[first:end].decode() if bits >> row & 1 else None for row, (first, end) in enumerate(pairwise(bounds))
        )


def _ascends(bounds: tuple[int, ...]) -> bool:
    """From 0 on."""
    if bounds[0]:
        return False
    return bounds[-1] >= 0 if len(bounds) < 3 else all(first <= end for first, end in pairwise(bounds))


# --- the layout -------------------------------------------------------------------------------------


def _tables(payload: int, sizes: Sizes) -> tuple[int, list[int], tuple[int, ...]]:
    """The length of all columns, place and length of every buffer, length and nulls of every array."""
    rows, key_nulls, key, name_nulls, name, pairs, pair_keys, pair_values, schemas = sizes
    bits, offsets, pair_offsets = (rows + 7) // 8, 4 * (rows + 1), 4 * (pairs + 1)
    lengths = (
        0, 8 * rows,  # publish_time: valid, values
        0, offsets, payload,  # payload: valid, offsets, bytes
        bits if key_nulls else 0, offsets, key,  # routing_key
        bits if name_nulls else 0, offsets, name,  # producer_name
        0, offsets, 0,  # attributes: valid, offsets; its pairs: valid
        0, pair_offsets, pair_keys,
        0, pair_offsets, pair_values,
        0 if schemas else bits, 8 * rows,  # schema_id
        0 if schemas else bits, 4 * rows,  # schema_version
        0, 8 * rows,  # request_id
    )  # fmt: skip
    buffers: list[int] = []
    at = 0
    for length in lengths:
        buffers += (at, length)
        at += (length + 7) & ~7
    absent = 0 if schemas else rows
    arrays = (
        rows, 0, rows, 0, rows, key_nulls, rows, name_nulls,
        rows, 0, pairs, 0, pairs, 0, pairs, 0, rows, absent, rows, absent, rows, 0,
    )  # fmt: skip
    return at, buffers, arrays


def _joined(values: Sequence[bytes]) -> tuple[bytes, bytes]:
    """Their offsets, padded, and their bytes, which are not."""
    if len(values) == 1:
        (value,) = values
        return _OFFSETS[2].pack(0, len(value)), value
    bounds = [0]
    reached = 0
    for value in values:
        reached += len(value)
        bounds.append(reached)
    form = _OFFSETS[len(bounds)] if len(bounds) < len(_OFFSETS) else struct.Struct(f"<{len(bounds)}i")
    return form.pack(*bounds) + _PAD[form.size % 8], b"".join(values)


def _texts(values: Sequence[str | None]) -> tuple[int, int, bytes]:
    """A column of texts: nulls, bytes of text, and the column as it is written."""
    offsets, text = _joined([b"" if value is None else value.encode() for value in values])
    nulls = sum(value is None for value in values)
    column = offsets + text + _PAD[len(text) % 8]
    if nulls:
        bits = sum(1 << row for row, value in enumerate(values) if value is not None)
        valid = bits.to_bytes((len(values) + 7) // 8, "little")
        column = valid + _PAD[len(valid) % 8] + column
    return nulls, len(text), column


@lru_cache(maxsize=1024)
def _rest(rows: int, producer_name: str | None, schema: Schema | None) -> tuple[Sizes, bytes]:
    """Everything behind the payloads, of messages without keys and attributes."""
    return _rest_of(rows, None, [producer_name] * rows, None, None if schema is None else [schema] * rows)


def _rest_of(
    rows: int,
    keys: Sequence[str | None] | None,
    producer_names: Sequence[str | None],
    attributes: Sequence[Mapping[str, str] | None] | None,
    schemas: Sequence[Schema] | None,
) -> tuple[Sizes, bytes]:
    key_nulls, key, key_column = _texts([None] * rows if keys is None else keys)
    name_nulls, name, name_column = _texts(producer_names)
    each = [()] * rows if attributes is None else [tuple(one.items()) if one else () for one in attributes]
    pair_bounds, _ = _joined([bytes(len(one)) for one in each])
    pairs = [pair for one in each for pair in one]
    _, pair_keys, pair_key_column = _texts([pair[0] for pair in pairs])
    _, pair_values, pair_value_column = _texts([pair[1] for pair in pairs])
    is_full = schemas is not None
    sizes = Sizes(rows, key_nulls, key, name_nulls, name, len(pairs), pair_keys, pair_values, is_full)
    numbers = _numbers(rows) if schemas is None else _schema_numbers(schemas)
    columns = (key_column, name_column, pair_bounds, pair_key_column, pair_value_column, numbers)
    return sizes, b"".join(columns)


@lru_cache(maxsize=ROWS_MAX)
def _numbers(rows: int) -> bytes:
    """The columns of schemas, all null, and of request ids, all 0."""
    bits = bytes((rows + 7) // 8)
    nothing = bits + _PAD[len(bits) % 8]
    versions = bytes(4 * rows)
    return nothing + bytes(8 * rows) + nothing + versions + _PAD[len(versions) % 8] + bytes(8 * rows)


def _schema_numbers(schemas: Sequence[Schema]) -> bytes:
    """The columns of schemas, and of request ids, all 0."""
    rows = len(schemas)
    ids, versions = zip(*schemas, strict=True)
    return _TIMES[rows].pack(*ids) + _OFFSETS[rows].pack(*versions) + _PAD[4 * rows % 8] + bytes(8 * rows)


def _position(metadata: bytes, wanted: bytes) -> int:
    """Where `wanted` stands, which must be one place."""
    if metadata.count(wanted) != 1:
        raise ValueError("the metadata does not have the expected tables")
    return metadata.index(wanted)


def _rows_position(metadata: bytes, rows: int) -> int:
    """The number of rows of all columns stands in front of the tables, which begin with the number of buffers."""
    tables = min(metadata.index(_I32.pack(_BUFFERS)), metadata.index(_I32.pack(_ARRAYS)))
    found = metadata.rindex(_I64.pack(rows), 0, tables)
    return found


_I32: Final = struct.Struct("<I")
