"""What a topic's log must hold, kept in the plainest way, and the batches that tests fill logs with.

The model hears of every batch before it is sent, of every receipt, and of everything that was read. `Audit`
then walks through a log and raises `Broken` with a sentence if the log says anything else.

A batch is known by its number, which it carries as its latest publish time: the log never looks at that field's
meaning, so every batch of a history is unique though only a few bodies exist (building one costs a hundred times
what labelling it does).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from random import Random
from typing import Final, NamedTuple

from pydanube.formats.batch import Batch, Envelope, encode, rows_of, stamp

# Rows and bytes per payload of the bodies there are: from nothing to what fills a small segment.
SHAPES: Final = ((1, 1), (1, 1), (2, 30), (1, 200), (7, 20), (3, 300), (40, 10), (1, 1500), (5, 900), (2, 4000))
BODIES_PER_SHAPE: Final = 3


class Broken(Exception):
    """A promise of the log does not hold. The text says which, and for which batch."""


class Sent(NamedTuple):
    """A batch as a producer made it."""

    number: int
    batch: Batch

    @property
    def rows(self) -> int:
        return self.batch.header.rows


@cache
def bodies() -> tuple[tuple[Batch, ...], ...]:
    """For each shape a few batches that differ in their payloads."""
    rng = Random(20240101)
    return tuple(tuple(_body(rng, rows, length) for _ in range(BODIES_PER_SHAPE)) for rows, length in SHAPES)


def _body(rng: Random, rows: int, length: int) -> Batch:
    made = encode(rows_of([Envelope(rng.randbytes(length)) for _ in range(rows)]), topic="/default/any")
    return Batch(made.header, made.header_bytes, bytes(made.body))


class TopicModel:
    """One topic: what was sent, what was promised, what was seen."""

    def __init__(self, topic: str, topic_hash: int, durability: str) -> None:
        self.topic = topic
        self.topic_hash = topic_hash
        self.durability = durability
        self.sent: dict[int, Sent] = {}
        self.forbidden: set[int] = set()  # numbers of batches that were refused for good
        self.acknowledged: dict[int, int] = {}  # number -> offset
        self.epochs: dict[int, int] = {}  # number -> epoch, of those acknowledged
        self.stored: dict[int, int] = {}  # offset -> number: acknowledged or seen, so it must stay
        self.truncated_before = 0  # retention was asked to drop what lies below
        self.dropped: list[tuple[int, int]] = []  # offsets [first, end) that another store keeps
        self.starts: set[int] = set()  # offsets at which the log was opened to go on: holes end here
        self.end = 0  # of everything that was ever promised or seen
        self.reserves = False  # offsets are given out only below a reservation
        self.reservations: list[int] = []  # where each ended, in their order; the last one holds
        self.may_lose = False  # durability os, and the power went
        self.is_damaged = False  # and that left a hole, which is found again at every start
        self.checked = 0

    # --- what happens ---

    def make(self, rng: Random, number: int, producer_id: int, session: int, first_sequence: int) -> Sent:
        """A new batch, not sent yet."""
        body = rng.choice(rng.choice(bodies()))
        header = body.header._replace(
            topic_hash=self.topic_hash,
            producer_id=producer_id,
            session=session,
            first_sequence=first_sequence,
            max_publish_time=number,
        )
        batch = stamp(Batch(header, b"", body.body), base_offset=0, epoch=0, append_time=0)
        sent = self.sent[number] = Sent(number, batch)
        return sent

    def receipt(self, sent: Sent, offset: int, epoch: int) -> None:
        """The log says the batch is safe."""
        number = sent.number
        known = self.acknowledged.get(number)
        if known is not None and (known != offset or self.epochs[number] != epoch):
            raise Broken(
                f"{self._name(number)} has offset {known} of epoch {self.epochs[number]} "
                f"and got offset {offset} of epoch {epoch} when it was sent again"
            )
        self._put(offset, number)
        self.acknowledged[number] = offset
        self.epochs[number] = epoch

    def check_reserved(self, sent: Sent, offset: int, since: int) -> None:
        """A batch that was sent when `since` reservations had been made, and is new, lies below that or a later one."""
        end = max(self.reservations[max(0, since - 1) :], default=0)
        if self.reserves and offset + sent.rows > end:
            raise Broken(
                f"{self._name(sent.number)} is acknowledged at offset {offset}, and offsets were reserved up to {end}"
            )

    def read(self, batch: Batch) -> int:
        """A reader saw this batch. Returns its number."""
        header = batch.header
        sent = self.sent.get(header.max_publish_time)
        if sent is None:
            raise Broken(f"{self.topic} offset {header.base_offset}: nobody sent what is stored there")
        if sent.number in self.forbidden:
            raise Broken(f"{self._name(sent.number)} was refused for good and is stored")
        made = sent.batch
        same = (
            header[:5] == made.header[:5]
            and header[6:9] == made.header[6:9]
            and header[10:14] == made.header[10:14]
            and header[15:18] == made.header[15:18]
            and batch.body == made.body
        )
        if not same:
            raise Broken(f"{self._name(sent.number)} is not byte for byte what was sent: {header}")
        offset = header.base_offset
        if self.acknowledged.get(sent.number, offset) != offset:
            raise Broken(
                f"{self._name(sent.number)} stands at offset {offset}, its receipt says "
                f"{self.acknowledged[sent.number]}"
            )
        if self.epochs.get(sent.number, header.epoch) != header.epoch:
            raise Broken(f"{self._name(sent.number)} has epoch {header.epoch}, its receipt has another")
        self._put(offset, sent.number)
        return sent.number

    def _put(self, offset: int, number: int) -> None:
        known = self.stored.setdefault(offset, number)
        if known != number:
            raise Broken(f"offset {offset} of {self.topic} was {self._name(known)} and is {self._name(number)}")
        self.end = max(self.end, offset + self.sent[number].rows)

    def drop(self, first: int, end: int) -> None:
        """These may go, as a whole or in part: another store keeps them."""
        self.dropped.append((first, end))

    def is_dropped(self, offset: int) -> bool:
        return any(first <= offset < end for first, end in self.dropped)

    def lose(self, first: int, end: int) -> None:
        """Durability os and a power cut: what is gone is gone, and may come back under another offset."""
        for offset in [offset for offset in self.stored if first <= offset < end]:
            number = self.stored.pop(offset)
            self.acknowledged.pop(number, None)
            self.epochs.pop(number, None)

    def _name(self, number: int) -> str:
        header = self.sent[number].batch.header
        return f"batch {number} ({self.topic}, producer {header.producer_id}, sequence {header.first_sequence})"


class Audit:
    """One walk over one log, from its first offset to its head."""

    def __init__(self, model: TopicModel, first: int, head: int) -> None:
        self._model = model
        self._head = head
        self.next = first
        self._numbers: set[int] = set()
        self._excused: list[tuple[int, int]] = []
        self._append_time = 0
        self._epoch = 0
        self._places: dict[tuple[int, int], tuple[int, int]] = {}  # producer, session -> number, next sequence
        if first > model.truncated_before:
            self._missing(0, first)
        if head < model.end:
            self._missing(head, model.end)

    def take(self, batches: Sequence[Batch]) -> None:
        model = self._model
        for batch in batches:
            header = batch.header
            number = model.read(batch)
            if header.base_offset != self.next:
                raise Broken(f"{model.topic}: offset {header.base_offset} follows {self.next - 1}")
            if number in self._numbers:
                raise Broken(f"{model._name(number)} is stored twice")
            if header.append_time < self._append_time:
                raise Broken(f"{model._name(number)} was appended before the one in front of it")
            if header.epoch < self._epoch:
                raise Broken(f"{model._name(number)} has a smaller epoch than the one in front of it")
            producer = header.producer_id, header.session
            before, sequence = self._places.get(producer, (-1, -1))
            if number < before:
                raise Broken(f"{model._name(number)} stands behind {model._name(before)}, which was sent later")
            if header.producer_id and sequence not in (-1, header.first_sequence) and not model.may_lose:
                raise Broken(f"{model._name(number)} follows sequence {sequence - 1}")
            self._places[producer] = number, header.first_sequence + header.rows
            self._numbers.add(number)
            self._append_time = header.append_time
            self._epoch = header.epoch
            self.next = header.end_offset
            model.checked += 1

    def hole(self, end: int) -> None:
        """The log does not have [next, end)."""
        model = self._model
        given_up = model.is_dropped(self.next) or model.is_dropped(end - 1)
        # What a disk that failed did not drop is back after a restart, and retention has gone on behind it.
        given_up |= model.is_dropped(self.next - 1) and end <= model.truncated_before
        if end not in self._model.starts and end < self._head and not given_up:
            raise Broken(f"{self._model.topic} has nothing for offsets {self.next} up to {end}")
        self._missing(self.next, end)
        if given_up:
            self._places.clear()
        self.next = end

    def unreadable(self, end: int) -> None:
        """What lies in [next, end) was found damaged, and was said to be."""
        self._excused.append((self.next, end))
        self._places.clear()
        self.next = end

    def _missing(self, first: int, end: int) -> None:
        model = self._model
        if model.may_lose:
            model.lose(first, end)
            return
        for offset in sorted(model.stored):
            number = model.stored[offset]
            last = offset + model.sent[number].rows
            if offset < end and last > first and last > model.truncated_before and not model.is_dropped(offset):
                promised = "acknowledged" if number in model.acknowledged else "seen by a reader"
                raise Broken(
                    f"{model._name(number)} was {promised} at offset {offset} and is gone: "
                    f"the log does not have offsets {first} up to {end}"
                )

    def done(self) -> None:
        """Every offset was walked over, so whatever must be there was compared."""
        model = self._model
        for offset, number in model.stored.items():
            end = offset + model.sent[number].rows
            if end <= model.truncated_before or number in self._numbers or model.may_lose:
                continue
            if model.is_dropped(offset):
                continue
            if any(first < end and offset < behind for first, behind in self._excused):
                continue
            if offset < self.next:
                raise Broken(f"{model._name(number)} was at offset {offset} and is not there any more")
