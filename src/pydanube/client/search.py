"""Messages of a topic by what is in them: a bounded look through a range of offsets, to be continued.

    found = await search(client, "/default/orders", Query(key="c-17", text="refund"), first=0)
    while found.next_offset is not None:
        found = await search(client, "/default/orders", query, first=found.next_offset)

One call looks at no more than `messages_max` messages, begins no further batch once `bytes_max` were read, and returns
at most `found_max` matches. `next_offset` is where the next call goes on, None when the end was reached; nothing is
skipped between two calls. Nothing is subscribed to and nothing acknowledged. Decoding and comparing is done in a
thread, so that the event loop, which may be a broker's, is free.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from pydanube.client.client import Client
from pydanube.errors import ConfigError
from pydanube.formats.batch import Batch, decode

MESSAGES_MAX: Final = 20_000
BYTES_MAX: Final = 16 * 1024 * 1024
FOUND_MAX: Final = 100
SECONDS_MAX: Final = 4.0  # after which it begins no further read


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a message must have: everything that is given. An empty query takes every message."""

    key: str | None = None  # the whole key
    text: str | None = None  # a part of the payload, as UTF-8; large and small ASCII letters are the same
    attribute: str | None = None  # it has this one
    value: str | None = None  # and it is this
    since: datetime | None = None  # stored in [since, until), by the broker's clock
    until: datetime | None = None

    def __post_init__(self) -> None:
        if self.value is not None and self.attribute is None:
            raise ConfigError("value", self.value[:50], "given together with the attribute whose value it is")
        for name in ("since", "until"):
            time = getattr(self, name)
            if time is not None and time.tzinfo is None:
                raise ConfigError(name, time, "a time with its zone")

    @property
    def is_empty(self) -> bool:
        return all(getattr(self, name) is None for name in self.__slots__)


class FoundMessage(NamedTuple):
    offset: int
    payload: bytes
    publish_time_us: int
    append_time_us: int
    producer_name: str
    routing_key: str | None
    attributes: dict[str, str]


@dataclass(slots=True)
class SearchResult:
    """`first` to `end` was looked at; `looked_at` of its offsets hold a message."""

    first: int
    end: int
    head: int
    first_kept: int  # the oldest offset of the topic
    looked_at: int = 0
    size_bytes: int = 0
    messages: list[FoundMessage] = field(default_factory=list)
    next_offset: int | None = None


async def search(
    client: Client,
    topic: str,
    query: Query,
    *,
    first: int = 0,
    end: int | None = None,
    found_max: int = FOUND_MAX,
    messages_max: int = MESSAGES_MAX,
    bytes_max: int = BYTES_MAX,
) -> SearchResult:
    """Of a topic, or of a partition. Raises TopicUnknown and Refused, as `Client.fetch`."""
    info = await client.describe_topic(topic)
    start = max(first, info.first_offset)
    if query.since is not None:
        start = max(start, await client.find_offset(topic, query.since))
    start = min(start, info.head)
    stop = info.head if end is None else min(end, info.head)
    if query.until is not None:
        stop = min(stop, await client.find_offset(topic, query.until))
    found = SearchResult(start, start, info.head, info.first_offset)
    if start >= stop:
        return found
    loop = asyncio.get_running_loop()
    deadline = loop.time() + SECONDS_MAX
    async for at, until, batches in client.fetch(topic, start, stop).stored():
        await asyncio.to_thread(_look, found, query, at, until, batches, found_max, messages_max, bytes_max)
        is_full = len(found.messages) >= found_max or found.looked_at >= messages_max or found.size_bytes >= bytes_max
        if is_full or (loop.time() > deadline and found.end > at):
            break
    else:
        found.end = stop  # what is left holds no message
    found.next_offset = found.end if found.end < stop else None
    return found


def _look(
    found: SearchResult,
    query: Query,
    at: int,
    until: int,
    batches: Sequence[Batch],
    found_max: int,
    messages_max: int,
    bytes_max: int,
) -> None:
    """Looks through one answer of the broker, as far as the bounds allow."""
    for batch in batches:
        header = batch.header
        base = header.base_offset
        first, end = max(at, base, found.end), min(until, header.end_offset)
        if first >= end:
            continue
        if found.looked_at and (found.looked_at >= messages_max or found.size_bytes >= bytes_max):
            return
        rows = decode(batch).slice(first - base, min(end - first, messages_max - found.looked_at))
        matches = _matching(rows, query)
        room = found_max - len(found.messages)
        for place in matches[:room]:
            found.messages.append(_message(rows, place, first + place, header.append_time))
        if len(matches) >= room:
            looked_at = matches[room - 1] + 1
        else:
            looked_at = rows.num_rows
        found.looked_at += looked_at
        found.size_bytes += header.size_bytes * looked_at // max(header.end_offset - base, 1)
        found.end = first + looked_at
        if found.end < end or len(found.messages) >= found_max:
            return


def _matching(rows: pa.RecordBatch, query: Query) -> list[int]:
    """Places of the rows that match, in order."""
    masks = []
    if query.key is not None:
        masks.append(pc.equal(rows.column("routing_key"), pa.scalar(query.key, pa.string())))
    if query.attribute is not None:
        values = pc.map_lookup(rows.column("attributes"), pa.scalar(query.attribute, pa.string()), "first")
        masks.append(
            pc.is_valid(values) if query.value is None else pc.equal(values, pa.scalar(query.value, pa.string()))
        )
    if query.text is not None:
        masks.append(pc.match_substring(rows.column("payload"), query.text, ignore_case=True))
    if not masks:
        return list(range(rows.num_rows))
    wanted = masks[0]
    for mask in masks[1:]:
        wanted = pc.and_kleene(wanted, mask)
    places: list[int] = pc.indices_nonzero(pc.fill_null(wanted, False)).to_pylist()
    return places


def _message(rows: pa.RecordBatch, place: int, offset: int, append_time: int) -> FoundMessage:
    row = rows.slice(place, 1).to_pylist()[0]
    published: datetime = row["publish_time"]
    return FoundMessage(
        offset,
        row["payload"],
        int((published - datetime.fromtimestamp(0, UTC)).total_seconds() * 1_000_000),
        append_time,
        row["producer_name"] or "",
        row["routing_key"],
        dict(row["attributes"]),
    )
