"""Messages on their way to a broker: columns that still grow, then one batch."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Final, TypeAlias

from pydanube.client.messages import Receipt
from pydanube.core.producing.values import Parcel, ProducerLimits
from pydanube.errors import DanubeError
from pydanube.formats.batch import Batch, encode_columns

MESSAGE_OVERHEAD_BYTES: Final = 64  # what a message without a payload takes, about

# Row, the future of its receipt, and whether the caller has a deadline of its own, which it watches itself.
Waiter: TypeAlias = tuple[int, asyncio.Future[Receipt], bool]


# When it happened, and before when it is not to be delivered: microseconds since 1970, or None.
Times: TypeAlias = tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerSettings(ProducerLimits):
    """As `Client.producer` describes them."""

    name: str
    reliable: bool
    create: bool
    idempotent: bool
    exclusive: bool
    schema_subject: str
    compression: str


class OpenBatch(Parcel):
    """Messages by column, until they are encoded; who waits for them, until they are answered."""

    __slots__ = ("attributes", "batch", "done", "keys", "more", "payloads", "times", "waiters")

    batch: Batch  # once it is encoded

    def __init__(self, size_max: int, rows_max: int) -> None:
        super().__init__(size_max, rows_max)
        self.payloads: list[bytes] = []
        self.times = array("q")
        self.keys: list[str | None] | None = None
        self.attributes: list[Mapping[str, str] | None] | None = None
        self.more: list[Times | None] | None = None
        self.waiters: list[Waiter] = []
        self.done: asyncio.Future[None] | None = None  # for `flush`: every message of it has its answer

    def encode(
        self,
        topic: str,
        settings: ProducerSettings,
        producer_id: int,
        session: int,
        sequence: int,
        schema: tuple[int, int] | None = None,
    ) -> Batch:
        """Raises InvalidBatch."""
        return encode_columns(
            self.payloads,
            memoryview(self.times).cast("B"),
            keys=self.keys,
            producer_name=settings.name,
            attributes=self.attributes,
            schema=schema,
            topic=topic,
            producer_id=producer_id,
            session=session,
            first_sequence=sequence,
            codec=settings.compression,
            event_times=None if self.more is None else [each[0] if each else None for each in self.more],
            deliver_at=None if self.more is None else [each[1] if each else None for each in self.more],
        )

    def forget_columns(self) -> None:
        """Frees the columns: the encoded batch has them."""
        self.payloads = []
        self.keys = self.attributes = self.more = None

    def halves(self) -> tuple[OpenBatch, OpenBatch]:
        middle = self.rows // 2
        first, second = self._part(range(middle)), self._part(range(middle, self.rows))
        first.size = self.size // 2
        second.size = self.size - first.size
        second.done = self.done  # answers come in order: waiting for both is waiting for the second
        return first, second

    def expire(self, error: DanubeError) -> int:
        """Fails the callers that leave the deadline to the lane, and takes their rows out. Returns how many bytes
        are free.
        """
        gone = {row for row, waiter, own_deadline in self.waiters if waiter.done() or not own_deadline}
        if not gone:
            return 0
        rest = self._part([row for row in range(self.rows) if row not in gone])
        self.tell(error)
        freed = self.size - rest.size
        self.payloads, self.times, self.keys, self.attributes = rest.payloads, rest.times, rest.keys, rest.attributes
        self.more = rest.more
        self.rows, self.size, self.waiters = rest.rows, rest.size, rest.waiters
        return freed

    def tell(self, error: DanubeError, *, all_of_them: bool = False) -> None:
        """Fails the callers that leave the deadline to the lane, or all of them. Each gets an error object of its own,
        to which its traceback is added.
        """
        for _, waiter, own_deadline in self.waiters:
            if not waiter.done() and (all_of_them or not own_deadline):
                waiter.set_exception(copy(error))

    def finish(self) -> None:
        if self.done is not None and not self.done.done():
            self.done.set_result(None)

    def _part(self, rows: range | list[int]) -> OpenBatch:
        part = OpenBatch(self.size_max, self.rows_max)
        places = {row: place for place, row in enumerate(rows)}
        part.begun_at = self.begun_at
        part.rows = len(rows)
        part.payloads = [self.payloads[row] for row in rows]
        part.times.extend(self.times[row] for row in rows)
        part.keys = self.keys and [self.keys[row] for row in rows]
        part.attributes = self.attributes and [self.attributes[row] for row in rows]
        part.more = self.more and [self.more[row] for row in rows]
        part.waiters = [(places[row], waiter, own) for row, waiter, own in self.waiters if row in places]
        part.size = sum(MESSAGE_OVERHEAD_BYTES + len(payload) for payload in part.payloads)
        return part
