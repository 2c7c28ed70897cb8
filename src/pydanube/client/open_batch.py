"""Messages before they are sent: drafts that still grow, and batches that never change again."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydanube.client.messages import Receipt
from pydanube.formats.batch import Batch, encode_columns

MESSAGE_OVERHEAD_BYTES: Final = 64  # what a message without a payload takes, about

# Row, who wants its receipt, and whether he has a deadline of his own, and so watches the time himself.
Waiter: TypeAlias = tuple[int, asyncio.Future[Receipt], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings:
    """As `Client.producer` describes them."""

    name: str
    reliable: bool
    create: bool
    idempotent: bool
    exclusive: bool
    schema_subject: str
    compression: str
    linger_seconds: float
    batch_bytes: int
    batch_messages: int
    timeout: float


class Draft:
    """Messages that are not encoded yet, by column."""

    __slots__ = ("attributes", "begun_at", "done", "keys", "payloads", "size", "times", "waiters")

    def __init__(self, begun_at: float) -> None:
        self.payloads: list[bytes] = []
        self.times = array("q")
        self.keys: list[str | None] | None = None
        self.attributes: list[Mapping[str, str] | None] | None = None
        self.waiters: list[Waiter] = []
        self.size = 0
        self.begun_at = begun_at
        self.done: asyncio.Future[None] | None = None  # for `flush`: every message of it has its answer

    def encode(self, topic: str, settings: ProducerSettings, producer_id: int, session: int, sequence: int) -> Batch:
        """Raises InvalidBatch."""
        return encode_columns(
            self.payloads,
            memoryview(self.times).cast("B"),
            keys=self.keys,
            producer_name=settings.name,
            attributes=self.attributes,
            topic=topic,
            producer_id=producer_id,
            session=session,
            first_sequence=sequence,
            codec=settings.compression,
        )

    def halves(self) -> tuple[Draft, Draft]:
        """The same messages in two drafts; together they have the same size."""
        middle = len(self.payloads) // 2
        first, second = Draft(self.begun_at), Draft(self.begun_at)
        for half, rows in ((first, slice(0, middle)), (second, slice(middle, None))):
            half.payloads = self.payloads[rows]
            half.times = self.times[rows]
            half.keys = self.keys and self.keys[rows]
            half.attributes = self.attributes and self.attributes[rows]
        first.waiters = [each for each in self.waiters if each[0] < middle]
        second.waiters = [(row - middle, waiter, own) for row, waiter, own in self.waiters if row >= middle]
        first.size = self.size // 2
        second.size = self.size - first.size
        second.done = self.done  # answers come in order: whoever waits for both waits for the second
        return first, second

    def without(self, gone: set[int]) -> Draft:
        """Only the other rows, and who waits for them."""
        rest = Draft(self.begun_at)
        kept = [row for row in range(len(self.payloads)) if row not in gone]
        places = {row: place for place, row in enumerate(kept)}
        rest.done = self.done if kept else None
        rest.waiters = [(places[row], waiter, own) for row, waiter, own in self.waiters if row in places]
        rest.payloads = [self.payloads[row] for row in kept]
        rest.times.extend(self.times[row] for row in kept)
        rest.keys = self.keys and [self.keys[row] for row in kept]
        rest.attributes = self.attributes and [self.attributes[row] for row in kept]
        rest.size = sum(MESSAGE_OVERHEAD_BYTES + len(payload) for payload in rest.payloads)
        return rest


class Outgoing:
    """A batch that was encoded; never changed while its fate is unknown."""

    __slots__ = ("batch", "begun_at", "done", "is_doubtful", "rows", "size", "waiters")

    def __init__(self, batch: Batch, draft: Draft) -> None:
        self.batch = batch
        self.is_doubtful = False  # it was sent, and nobody said that it was not stored
        self.rows = batch.header.rows
        self.size = draft.size
        self.waiters = draft.waiters
        self.begun_at = draft.begun_at
        self.done = draft.done
