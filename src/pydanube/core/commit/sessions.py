"""Idempotent producers: which batch is new, which is a repetition, which must be refused.

A producer has at most one session at a time; the owner issues its number and a newer one fences the older.
Inside a session rows are numbered from 0, and a batch is accepted only if it begins exactly where the last
one ended. A resend counts as a repetition only if it equals one of the last RECENT_MAX batches (sequence,
rows, checksum), and is answered with that batch's offset. Everything else is refused and changes nothing.

State is a value per producer, so undoing a group that did not reach the disk is putting old values back: a
batch behind a refused one is then judged against a sequence that has a hole, and is refused too.

Session numbers are `owner epoch << 32 | counter`: epochs never repeat, so numbers grow over all owners. A
session that an owner does not know is an older owner's, or its number proves that there is a newer owner: such a one is
never adopted.

A session ends when nothing was appended under it for long (`idle`, `ended`); the log keeps a record of that. Its number
is never given again, so a resend that comes later is refused as unknown and cannot pass for a new batch. docs/adr/0001
has the rules.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.errors import OutOfSequence, ProducerFenced, SessionUnknown

# A client keeps at most this many batches in flight, so an older resend cannot happen.
RECENT_MAX: Final = 8

_PRODUCER: Final = struct.Struct("<QQQB")
_LOOSE: Final = 0x80
_STORED: Final = struct.Struct("<QIIQQ")
# In a snapshot the time of the last use stands as a first batch without rows: versions that know nothing of it read it
# as a batch that no producer can send.
_TIME: Final = 2**64 - 1
_OTHERS_SIZE: Final = (RECENT_MAX - 1) * _STORED.size
SESSION_SIZE_MAX_BYTES: Final = _PRODUCER.size + (1 + RECENT_MAX) * _STORED.size
SESSIONS_DEFAULT: Final = 20_000  # of one topic; their snapshot takes 20 ms and 6 MB
SESSIONS_LIMIT: Final = 400_000  # twice as many fit into a segment's header: a lost owner's come back on top of ours
IDLE_HOURS_DEFAULT: Final = 7 * 24
IDLE_HOURS_MIN: Final = 48  # longer than clients send again, and than a process looks on before it ends a session


def epoch_of_session(session: int) -> int:
    """The epoch of the owner that issued the number."""
    return session >> 32


class Stored(NamedTuple):
    """A batch as dedup remembers it."""

    first_sequence: int
    rows: int
    crc: int
    base_offset: int
    epoch: int


class ProducerState(NamedTuple):
    """Where a producer's current session stands."""

    session: int
    next_sequence: int
    packed: bytes = b""  # its last batches, oldest first, as a snapshot has them: a tenth of what values take
    loose: bool = False  # its next batch may begin anywhere: see `loosen`
    used: int = 0  # append time, in microseconds, of its last batch or of its opening; 0: not known

    @property
    def recent(self) -> tuple[Stored, ...]:
        """Its last batches, oldest first."""
        return tuple(map(Stored._make, _STORED.iter_unpack(self.packed)))


class Sessions:
    """All producers of one topic."""

    __slots__ = ("_floor", "_producers", "adopts_unknown", "cut", "epoch")

    def __init__(self, producers: Mapping[int, ProducerState] | None = None, *, adopts_unknown: bool = False) -> None:
        self._producers: dict[int, ProducerState] = dict(producers or {})  # those used last come last
        self.cut = 0  # producers that `newest` has left out
        self._floor = 0  # the highest number of a session that has ended here
        # After a takeover from an owner that could not hand over its state, the first batch of a session
        # that this log has not seen sets its baseline: refusing it would stop a healthy producer for good.
        self.adopts_unknown = adopts_unknown
        self.epoch: int | None = None  # of the log that takes batches; None: they are only read

    def loosen(self) -> None:
        """Some batches of the log cannot be read, so every known session may be further than it seems: its
        next batch that is no repetition sets its baseline.
        """
        for producer_id, producer in self._producers.items():
            self._producers[producer_id] = producer._replace(loose=True)
        self.adopts_unknown = True

    def get(self, producer_id: int) -> ProducerState | None:
        return self._producers.get(producer_id)

    def put(self, producer_id: int, producer: ProducerState | None) -> None:
        """Puts a value back, as `get` returned it: the undo of `opened` and `accepted`."""
        if producer is None:
            self._producers.pop(producer_id, None)
        else:
            self._producers[producer_id] = producer

    def next_session(self, producer_id: int, epoch: int) -> int:
        """The number for a new session, greater than any that this producer ever had."""
        known = self._producers.get(producer_id)
        return max(epoch << 32, known.session if known else 0, self._floor) + 1

    def opened(self, producer_id: int, session: int, used: int = 0) -> None:
        """A session begins; older ones of this producer are fenced. Repeating it changes nothing."""
        known = self._producers.get(producer_id)
        if known is None or session > known.session:
            self._use(producer_id, ProducerState(session, 0, used=used))

    def idle(self, before: int, now: int, count_max: int) -> list[tuple[int, ProducerState]]:
        """Sessions not used since `before`, the oldest first. One whose last use is not known counts as used `now`."""
        found: list[tuple[int, ProducerState]] = []
        undated: list[int] = []
        for producer_id, producer in self._producers.items():
            if len(found) + len(undated) >= count_max or producer.used >= before:
                break
            if producer.used:
                found.append((producer_id, producer))
            else:
                undated.append(producer_id)
        for producer_id in undated:
            self._use(producer_id, self._producers[producer_id]._replace(used=now))
        return found

    def ends(self, producer_id: int, session: int, next_sequence: int) -> bool:
        """Whether the session is still as it was when its end was decided."""
        known = self._producers.get(producer_id)
        return known is not None and (known.session, known.next_sequence) == (session, next_sequence)

    def ended(self, producer_id: int, session: int) -> None:
        """The session is over, and older ones of this producer: they are unknown from now on."""
        known = self._producers.get(producer_id)
        if known is not None and known.session <= session:
            del self._producers[producer_id]
        self._floor = max(self._floor, session)

    def _use(self, producer_id: int, producer: ProducerState) -> None:
        self._producers.pop(producer_id, None)
        self._producers[producer_id] = producer

    def check(self, producer_id: int, session: int, first_sequence: int, rows: int, crc: int) -> Stored | None:
        """None if the batch is new and next, what is stored if it is a repetition; raises if neither."""
        known = self._producers.get(producer_id)
        if known is None or session > known.session:
            if self.adopts_unknown and (self.epoch is None or epoch_of_session(session) < self.epoch):
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
        used: int = 0,
    ) -> None:
        """The batch is stored, or about to be, at `base_offset`. `used` is its append time."""
        known = self._producers.pop(producer_id, None)
        packed = _STORED.pack(first_sequence, rows, crc, base_offset, epoch)
        if known is not None and known.session == session:
            packed = known.packed[-_OTHERS_SIZE:] + packed
        self._producers[producer_id] = ProducerState(session, first_sequence + rows, packed, used=used)

    def recall(self, producer_id: int, session: int, batch: Stored) -> None:
        """Another owner stored this batch, or it is back from a lost owner's disk. A later state stays as it is."""
        known = self._producers.get(producer_id)
        packed = _STORED.pack(*batch)
        if known is None or session > known.session:
            self._use(producer_id, ProducerState(session, batch.first_sequence + batch.rows, packed, loose=True))
        elif session == known.session and batch.first_sequence >= known.next_sequence:
            packed = known.packed[-_OTHERS_SIZE:] + packed
            self._use(
                producer_id,
                ProducerState(session, batch.first_sequence + batch.rows, packed, loose=True, used=known.used),
            )

    def learn(self, others: Sessions) -> None:
        """Takes another owner's state of producers, where that is later. They may be further still: see `loosen`."""
        for producer_id, other in others:
            known = self._producers.get(producer_id)
            if known is None or (known.session, known.next_sequence) < (other.session, other.next_sequence):
                self._use(producer_id, other._replace(loose=True))

    def forget(self, void: Iterable[tuple[int, int]]) -> None:
        """Nothing is stored in these ranges [first, end), whatever was said before."""
        ranges = list(OffsetRanges(void))
        ends = [each.end for each in ranges]

        def is_void(offset: int) -> bool:
            place = bisect_right(ends, offset)
            return place < len(ranges) and ranges[place].first <= offset

        for producer_id, producer in self._producers.items() if ranges else ():
            packed = b"".join(_STORED.pack(*each) for each in producer.recent if not is_void(each.base_offset))
            if len(packed) < len(producer.packed):
                self._producers[producer_id] = producer._replace(packed=packed, loose=True)

    def copy(self) -> Sessions:
        return Sessions(self._producers, adopts_unknown=self.adopts_unknown)

    def newest(self, size_max_bytes: int) -> Sessions:
        """Those whose last batches are the newest, as many as fit into so many bytes without their times."""
        size = sum(_PRODUCER.size + len(producer.packed) for producer in self._producers.values())
        if size <= size_max_bytes:
            return self
        newest: dict[int, ProducerState] = {}
        for producer_id, producer in sorted(self._producers.items(), key=lambda item: -_last_offset(item[1])):
            size_max_bytes -= _PRODUCER.size + len(producer.packed)
            if size_max_bytes < 0:
                break
            newest[producer_id] = producer
        kept = Sessions(newest, adopts_unknown=self.adopts_unknown)
        kept.cut = len(self) - len(kept)
        return kept

    def __len__(self) -> int:
        return len(self._producers)

    def __iter__(self) -> Iterator[tuple[int, ProducerState]]:
        return iter(self._producers.items())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sessions) and self._producers == other._producers

    __hash__ = None  # type: ignore[assignment]

    # --- snapshots, kept in segment headers ----------------------------------------------------------

    def to_bytes(self, *, timed: bool = True) -> bytes:
        """Without `timed`: not when each was used last."""
        parts = []
        for producer_id, producer in sorted(self._producers.items()):
            packed = producer.packed
            if timed and producer.used:
                packed = _STORED.pack(_TIME, 0, 0, producer.used, 0) + packed
            count = len(packed) // _STORED.size
            loose = _LOOSE if producer.loose else 0
            parts.append(_PRODUCER.pack(producer_id, producer.session, producer.next_sequence, count | loose))
            parts.append(packed)
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, snapshot: bytes) -> Sessions:
        """The inverse of `to_bytes`. Raises ValueError if `snapshot` is not one."""
        producers: dict[int, ProducerState] = {}
        position = 0
        try:
            while position < len(snapshot):
                producer_id, session, next_sequence, count = _PRODUCER.unpack_from(snapshot, position)
                position += _PRODUCER.size
                end = position + (count & ~_LOOSE) * _STORED.size
                if end > len(snapshot):
                    raise ValueError("a producer snapshot ends in the middle of a batch")
                used = 0
                if end > position:
                    first_sequence, rows, _, time, _ = _STORED.unpack_from(snapshot, position)
                    if (first_sequence, rows) == (_TIME, 0):
                        used = time
                        position += _STORED.size
                packed = bytes(snapshot[position:end])
                position = end
                producers[producer_id] = ProducerState(session, next_sequence, packed, bool(count & _LOOSE), used)
        except struct.error as error:
            raise ValueError(f"a producer snapshot ends in the middle of a producer: {error}") from error
        return cls(dict(sorted(producers.items(), key=lambda item: item[1].used)))


def _last_offset(producer: ProducerState) -> int:
    return int(_STORED.unpack_from(producer.packed, len(producer.packed) - _STORED.size)[3]) if producer.packed else -1
