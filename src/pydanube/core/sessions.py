"""Idempotent producers: which batch is new, which is a repetition, which must be refused.

A producer has at most one session at a time; the owner issues its number and a newer one fences the older.
Inside a session rows are numbered from 0, and a batch is accepted only if it begins exactly where the last
one ended. A resend counts as a repetition only if it equals one of the last RECENT_MAX batches (sequence,
rows, checksum), and is answered with that batch's offset. Everything else is refused and changes nothing.

State is a value per producer, so undoing a group that did not reach the disk is putting old values back: a
batch behind a refused one is then judged against a sequence that has a hole, and is refused too.

Session numbers are `owner epoch << 32 | counter`: epochs never repeat, so numbers grow over all owners.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from pydanube.core.ranges import OffsetRanges
from pydanube.errors import OutOfSequence, ProducerFenced, SessionUnknown

# A client keeps at most this many batches in flight, so an older resend cannot happen.
RECENT_MAX: Final = 8

_PRODUCER: Final = struct.Struct("<QQQB")
_LOOSE: Final = 0x80
_STORED: Final = struct.Struct("<QIIQQ")


class Stored(NamedTuple):
    """A batch as dedup remembers it."""

    first_sequence: int
    rows: int
    crc: int
    base_offset: int
    epoch: int


class Producer(NamedTuple):
    """Where a producer's current session stands."""

    session: int
    next_sequence: int
    recent: tuple[Stored, ...]  # oldest first
    loose: bool = False  # its next batch may begin anywhere: see `loosen`


class Sessions:
    """All producers of one topic."""

    __slots__ = ("_producers", "adopts_unknown")

    def __init__(self, producers: Mapping[int, Producer] | None = None, *, adopts_unknown: bool = False) -> None:
        self._producers: dict[int, Producer] = dict(producers or {})
        # After a takeover from an owner that could not hand over its state, the first batch of a session
        # that nobody here has seen sets its baseline: refusing it would stop a healthy producer for good.
        self.adopts_unknown = adopts_unknown

    def loosen(self) -> None:
        """Some batches of the log cannot be read, so every known session may be further than it seems: its
        next batch that is no repetition sets its baseline.
        """
        for producer_id, producer in self._producers.items():
            self._producers[producer_id] = producer._replace(loose=True)
        self.adopts_unknown = True

    def get(self, producer_id: int) -> Producer | None:
        return self._producers.get(producer_id)

    def put(self, producer_id: int, producer: Producer | None) -> None:
        """Puts a value back, as `get` returned it: the undo of `opened` and `accepted`."""
        if producer is None:
            self._producers.pop(producer_id, None)
        else:
            self._producers[producer_id] = producer

    def next_session(self, producer_id: int, epoch: int) -> int:
        """The number for a new session, greater than any that this producer ever had."""
        known = self._producers.get(producer_id)
        return max(epoch << 32, known.session if known else 0) + 1

    def opened(self, producer_id: int, session: int) -> None:
        """A session begins; older ones of this producer are fenced. Repeating it changes nothing."""
        known = self._producers.get(producer_id)
        if known is None or session > known.session:
            self._producers[producer_id] = Producer(session, 0, ())

    def check(self, producer_id: int, session: int, first_sequence: int, rows: int, crc: int) -> Stored | None:
        """None if the batch is new and next, what is stored if it is a repetition; raises if neither."""
        known = self._producers.get(producer_id)
        if known is None or session > known.session:
            if self.adopts_unknown:
                return None
            raise SessionUnknown(producer_id, session)
        if session < known.session:
            raise ProducerFenced(producer_id, session, known.session)
        if first_sequence == known.next_sequence:
            return None
        for stored in known.recent:
            if stored.first_sequence == first_sequence and stored.rows == rows and stored.crc == crc:
                return stored
        if known.loose:
            return None
        raise OutOfSequence(producer_id, first_sequence, known.next_sequence)

    def accepted(
        self,
        producer_id: int,
        session: int,
        first_sequence: int,
        rows: int,
        crc: int,
        base_offset: int,
        epoch: int,
    ) -> None:
        """The batch is stored, or about to be, at `base_offset`."""
        known = self._producers.get(producer_id)
        recent = known.recent if known and known.session == session else ()
        stored = Stored(first_sequence, rows, crc, base_offset, epoch)
        self._producers[producer_id] = Producer(session, first_sequence + rows, (*recent[-(RECENT_MAX - 1) :], stored))

    def recall(self, producer_id: int, session: int, batch: Stored) -> None:
        """Somebody else stored this batch, or it is back from a lost owner's disk. What is further stays as it is."""
        known = self._producers.get(producer_id)
        if known is None or session > known.session:
            self._producers[producer_id] = Producer(session, batch.first_sequence + batch.rows, (batch,), loose=True)
        elif session == known.session and batch.first_sequence >= known.next_sequence:
            recent = (*known.recent[-(RECENT_MAX - 1) :], batch)
            self._producers[producer_id] = Producer(session, batch.first_sequence + batch.rows, recent, loose=True)

    def learn(self, others: Sessions) -> None:
        """What somebody else knows of producers, where that is further. They may be further still: see `loosen`."""
        for producer_id, other in others:
            known = self._producers.get(producer_id)
            if known is None or (known.session, known.next_sequence) < (other.session, other.next_sequence):
                self._producers[producer_id] = other._replace(loose=True)

    def forget(self, void: Iterable[tuple[int, int]]) -> None:
        """Nothing is stored in these ranges [first, end), whatever was said before."""
        ranges = list(OffsetRanges(void))
        ends = [each.end for each in ranges]

        def is_void(offset: int) -> bool:
            place = bisect_right(ends, offset)
            return place < len(ranges) and ranges[place].first <= offset

        for producer_id, producer in self._producers.items() if ranges else ():
            recent = tuple(each for each in producer.recent if not is_void(each.base_offset))
            if len(recent) < len(producer.recent):
                self._producers[producer_id] = producer._replace(recent=recent, loose=True)

    def copy(self) -> Sessions:
        return Sessions(self._producers, adopts_unknown=self.adopts_unknown)

    def newest(self, size_max_bytes: int) -> Sessions:
        """Those whose last batches are the newest, as many as fit into so many bytes."""
        size = sum(_PRODUCER.size + len(producer.recent) * _STORED.size for producer in self._producers.values())
        if size <= size_max_bytes:
            return self
        newest: dict[int, Producer] = {}
        for producer_id, producer in sorted(self._producers.items(), key=lambda item: -_last_offset(item[1])):
            size_max_bytes -= _PRODUCER.size + len(producer.recent) * _STORED.size
            if size_max_bytes < 0:
                break
            newest[producer_id] = producer
        return Sessions(newest, adopts_unknown=self.adopts_unknown)

    def __len__(self) -> int:
        return len(self._producers)

    def __iter__(self) -> Iterator[tuple[int, Producer]]:
        return iter(self._producers.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sessions) and self._producers == other._producers

    __hash__ = None  # type: ignore[assignment]

    # --- snapshots, kept in segment headers ----------------------------------------------------------

    def to_bytes(self) -> bytes:
        parts = []
        for producer_id, producer in sorted(self._producers.items()):
            parts.append(
                _PRODUCER.pack(
                    producer_id,
                    producer.session,
                    producer.next_sequence,
                    len(producer.recent) | (_LOOSE if producer.loose else 0),
                )
            )
            parts.extend(_STORED.pack(*stored) for stored in producer.recent)
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, snapshot: bytes) -> Sessions:
        """The inverse of `to_bytes`. Raises ValueError if `snapshot` is not one."""
        producers: dict[int, Producer] = {}
        position = 0
        try:
            while position < len(snapshot):
                producer_id, session, next_sequence, packed = _PRODUCER.unpack_from(snapshot, position)
                recent_count = packed & ~_LOOSE
                position += _PRODUCER.size
                end = position + recent_count * _STORED.size
                recent = tuple(Stored._make(fields) for fields in _STORED.iter_unpack(snapshot[position:end]))
                if len(recent) != recent_count:
                    raise ValueError("a producer snapshot ends in the middle of a batch")
                position = end
                producers[producer_id] = Producer(session, next_sequence, recent, bool(packed & _LOOSE))
        except struct.error as error:
            raise ValueError(f"a producer snapshot ends in the middle of a producer: {error}") from error
        return cls(producers)


def _last_offset(producer: Producer) -> int:
    return producer.recent[-1].base_offset if producer.recent else -1
