"""Where a subscription is: the safe cursor, what is acknowledged above it, and what is in flight.

       next_unacked          next_fresh            head
            │                    │                  │
    ════════╪══▓▓▓──■■■──▓▓──────┼──────────────────┤        ═ acknowledged   ▓ acknowledged above the cursor
     done   │  sent, some acked  │  not handed out  │        ■ missing: cannot be read yet (orphans)

`SubscriptionProgress` keeps the marks, `InFlight` who holds what since when. Neither knows why a message is sent again.

Stored are two values in one transaction: the cursor (`next_unacked - 1`, -1 for none: the seeds' integer) and
the acknowledged ranges above it ("ack holes"): in at most 4 KiB while the topic is served, in at most 256 KiB when
it is handed over or closed. What does not fit is delivered again to the next owner's consumers; nothing that was not
acknowledged is ever taken for acknowledged.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, NamedTuple

from pydanube.core.dispatch.delivery import Tries
from pydanube.core.dispatch.ranges import OFFSET_END_MAX, OffsetRange, OffsetRanges, RangeMap, RangePiece, finished
from pydanube.core.names import ConsumerId

HOLES_SIZE_MAX_BYTES: Final = 4096
HOLES_LAST_SIZE_MAX_BYTES: Final = 256 * 1024  # of what is not saved again here: a hand-over, a close


class SavedPosition(NamedTuple):
    """What is written to the metadata store. `changes` tells the shell whether anything is new since."""

    cursor: int  # last acknowledged offset, -1 for none
    holes: bytes
    changes: int
    cut: int = 0  # acknowledged above the cursor, but not in `holes`: it did not fit


class SubscriptionProgress:
    """The marks of one subscription.

    Invariant: every offset below `next_unacked` is settled: acknowledged, or by policy dropped or
    dead-lettered, or never to be had (void, expired). `settled` holds only offsets above it. The cursor goes
    back only by `seek`.
    """

    __slots__ = ("changes", "head", "holds_fresh", "missing", "next_fresh", "next_unacked", "settled")

    def __init__(
        self,
        next_unacked: int = 0,
        *,
        head: int = 0,
        settled: OffsetRanges | None = None,
        missing: Iterable[tuple[int, int]] = (),
    ) -> None:
        self.next_unacked = next_unacked
        self.next_fresh = next_unacked  # offsets below were handed out, are settled or are missing
        self.head = max(head, next_unacked)
        self.settled = OffsetRanges() if settled is None else settled
        self.missing = OffsetRanges(missing)  # kept also below the cursor: one may seek back
        self.holds_fresh = False  # nothing more is handed out for the first time: too much is scheduled already
        self.changes = 0  # grows with every offset settled, and with every seek
        self._advance()

    @classmethod
    def restore(
        cls, cursor: int, holes: bytes | None, *, head: int | None = None, missing: Iterable[tuple[int, int]] = ()
    ) -> tuple[SubscriptionProgress, bool]:
        """From what `saved` returned. The flag is False if the holes were damaged: messages are repeated."""
        settled = finished(cls.decoding(cursor, holes))
        return cls.restored(cursor, settled, head=head, missing=missing), settled is not None

    @staticmethod
    def decoding(cursor: int, holes: bytes | None) -> Generator[None, None, OffsetRanges | None]:
        """What `holes` say is acknowledged above the cursor, or None if they are not what we wrote. With pauses: there
        may be a hundred thousand ranges.
        """
        if not holes:
            return OffsetRanges()
        if len(holes) > HOLES_LAST_SIZE_MAX_BYTES:
            return None
        return (yield from OffsetRanges.decoding(holes, cursor + 1))

    @classmethod
    def restored(
        cls,
        cursor: int,
        settled: OffsetRanges | None,
        *,
        head: int | None = None,
        missing: Iterable[tuple[int, int]] = (),
    ) -> SubscriptionProgress:
        if settled and head is not None:
            settled.remove(max(head, cursor + 1), OFFSET_END_MAX)  # what is not there yet cannot be acknowledged
        return cls(cursor + 1, head=head or 0, settled=settled, missing=missing)

    def saved(self, size_max_bytes: int | None = None) -> SavedPosition:
        return finished(self._saving(self.settled, size_max_bytes or HOLES_SIZE_MAX_BYTES))

    def saving(self, size_max_bytes: int) -> Generator[None, None, SavedPosition]:
        """As `saved` now, with pauses in which everything may change."""
        return self._saving(self.settled.copy(), size_max_bytes)

    def _saving(self, settled: OffsetRanges, size_max_bytes: int) -> Generator[None, None, SavedPosition]:
        cursor, changes, count = self.next_unacked - 1, self.changes, settled.count
        if not settled:
            return SavedPosition(cursor, b"", changes)
        holes, held = yield from settled.encoding(cursor + 1, size_max_bytes)
        return SavedPosition(cursor, holes, changes, count - held)

    def lag(self, committed_head: int = 0) -> int:
        """Committed, deliverable offsets that are not settled, also those `head` has not heard of yet."""
        return self._open_count(self.next_unacked, max(self.head, committed_head))

    def fresh_count(self, committed_head: int = 0) -> int:
        """Committed, readable offsets that were never handed out."""
        return 0 if self.holds_fresh else self._open_count(self.next_fresh, max(self.head, committed_head))

    def oldest_open(self) -> int:
        """The lowest deliverable offset that is not settled; the head if there is none. What is missing holds the
        cursor, while all behind it may be acknowledged.
        """
        offset = self.next_unacked
        while self.missing:  # few ranges: every round leaves one behind
            behind = self.settled.first_gap(self.missing.first_gap(offset))
            if behind == offset:
                break
            offset = behind
        return offset

    def missing_count(self) -> int:
        """Offsets above the cursor that are not settled and cannot be read yet."""
        return self._unreadable_count(self.next_unacked, self.head)

    def _open_count(self, first: int, end: int) -> int:
        """How many of [first, end) are neither settled nor missing."""
        return max(0, end - first) - self.settled.count_in(first, end) - self._unreadable_count(first, end)

    def _unreadable_count(self, first: int, end: int) -> int:
        """How many of [first, end) are missing and not settled. There are few missing ranges, however many settled."""
        if not self.missing:
            return 0
        return sum(part.size - self.settled.count_in(*part) for part in self.missing.overlap(first, end))

    def settle(self, first: int, end: int) -> None:
        """Counts offsets as done. Those below the cursor are already."""
        self.head = max(self.head, end)  # a void or trimmed range may be the first we hear of a new head
        if first <= self.next_unacked and not self.settled:  # in order: no range is made
            if end > self.next_unacked:
                self.changes += end - self.next_unacked
                self.next_unacked = end
                self.next_fresh = max(self.next_fresh, end)
            return
        self.changes += self.settled.add(max(first, self.next_unacked), end)
        self._advance()

    def take_fresh(self, count_max: int) -> OffsetRange | None:
        """Hands out what `peek_fresh` shows."""
        fresh = self.peek_fresh(count_max)
        if fresh is not None:
            self.next_fresh = fresh.end
        return fresh

    def has_fresh(self) -> bool:
        """Whether `take_fresh` has something to hand out. Costs a binary search, however much is settled."""
        return self._first_fresh() < self.head

    def _first_fresh(self) -> int:
        if self.holds_fresh:
            return self.head
        first = self.next_fresh
        while True:  # settled and missing ranges may follow one another
            onward = self.settled.first_gap(first)
            if self.missing:
                onward = self.missing.first_gap(onward)
            if onward == first:
                return first
            first = onward

    def peek_fresh(self, count_max: int) -> OffsetRange | None:
        """The lowest unbroken range that was never handed out, at most `count_max` long."""
        first = self._first_fresh()
        if first >= self.head:
            return None
        end = min(self.head, first + count_max)
        for others in (self.settled, self.missing):
            next_first = others.next_first(first) if others else None
            if next_first is not None:
                end = min(end, next_first)
        return OffsetRange(first, end)

    def withhold(self, first: int, end: int) -> None:
        """Offsets that cannot be read now: they are neither lag nor handed out until revealed or void."""
        self.missing.add(first, end)

    def reveal(self, first: int, end: int) -> list[OffsetRange]:
        """Missing offsets can be read now. Returns those that `take_fresh` has passed already."""
        found = self.missing.overlap(first, end)
        self.missing.remove(first, end)
        late: list[OffsetRange] = []
        for part in found:
            late += self.settled.gaps(max(part.first, self.next_unacked), min(part.end, self.next_fresh))
        return late

    def unsettled(self, end: int) -> list[OffsetRange]:
        """Everything below `end` that is not settled, missing offsets too."""
        return self.settled.gaps(self.next_unacked, end)

    def seek(self, offset: int) -> None:
        """Everything from `offset` on is to be delivered (again); everything below counts as settled."""
        self.next_unacked = self.next_fresh = offset
        self.head = max(self.head, offset)
        self.settled.clear()
        self.changes += 1

    def _advance(self) -> None:
        if not self.settled:
            return
        self.settled.remove(0, self.next_unacked)
        end = self.settled.first_gap(self.next_unacked)
        if end > self.next_unacked:
            self.settled.remove(self.next_unacked, end)
            self.next_unacked = end
        self.next_fresh = max(self.next_fresh, self.next_unacked)


@dataclass(slots=True, eq=False)
class Flight:
    """One unbroken range sent to one consumer at one time. `left` of its offsets are still out.

    `unseen`: it waits in the consumer's own queue, without a deadline. When the application takes a part of it, that
    is a flight of its own, sent then. `due_at`: its deadline, if the application has asked for more time.
    """

    consumer: ConsumerId
    tries: Tries  # this delivery included
    sent_at: float
    first: int
    end: int
    left: int
    unseen: bool = False
    due_at: float | None = None


class InFlight:
    """What consumers hold. An offset is held by one consumer at a time.

    Invariant: the pieces of a flight lie inside [flight.first, flight.end) and `left` is their size, so a
    flight whose pieces are all acknowledged costs one comparison when its time comes.
    """

    __slots__ = ("_by_age", "_extended", "_held", "_numbers")

    def __init__(self) -> None:
        self._held: RangeMap[Flight] = RangeMap()
        self._by_age: deque[Flight] = deque()  # those with a deadline that depends on the policy of today
        self._extended: list[tuple[float, int, Flight]] = []  # a heap by `due_at`
        self._numbers = 0

    @property
    def count(self) -> int:
        return self._held.count

    def __bool__(self) -> bool:
        return bool(self._held)

    def __iter__(self) -> Iterator[RangePiece[Flight]]:
        return iter(self._held)

    def holder(self, offset: int) -> ConsumerId | None:
        flight = self._held.get(offset)
        return flight.consumer if flight else None

    def put(
        self,
        first: int,
        end: int,
        consumer: ConsumerId,
        tries: Tries,
        now: float,
        *,
        unseen: bool = False,
        due_at: float | None = None,
    ) -> None:
        flight = Flight(consumer, tries, now, first, end, end - first, unseen, due_at)
        self._held.put(first, end, flight)
        if unseen:
            return
        if due_at is not None:
            self._numbers += 1
            heappush(self._extended, (due_at, self._numbers, flight))
            if len(self._extended) > 64 + 2 * len(self._held):
                self._extended = sorted(entry for entry in self._extended if entry[2].left)
            return
        self._by_age.append(flight)
        if len(self._by_age) > 64 + 2 * len(self._held):
            # One message that is never acknowledged must not keep every later flight in memory.
            self._by_age = deque(old for old in self._by_age if old.left)

    def overlap(self, first: int, end: int) -> list[RangePiece[Flight]]:
        return self._held.overlap(first, end)

    def held_by(self, consumer: ConsumerId | None, first: int, end: int) -> list[tuple[int, int]]:
        """The parts of [first, end) that this consumer holds; all of it if it is not known which one it is."""
        if consumer is None:
            return [(first, end)]
        return [(piece.first, piece.end) for piece in self.overlap(first, end) if piece.value.consumer == consumer]

    def cut(self, first: int, end: int) -> list[RangePiece[Flight]]:
        """Takes offsets back, whichever consumers hold them."""
        pieces = self._held.cut(first, end)
        for piece in pieces:
            piece.value.left -= piece.end - piece.first
        self._forget_settled()
        return pieces

    def cut_consumer(self, consumer: ConsumerId) -> list[RangePiece[Flight]]:
        """Takes back everything a consumer holds, lowest first."""
        pieces = self._held.extract(lambda flight: flight.consumer == consumer)
        for piece in pieces:
            piece.value.left -= piece.end - piece.first
        self._forget_settled()
        return pieces

    def unseen(self, consumer: ConsumerId) -> list[RangePiece[Flight]]:
        """What waits in a consumer's own queue, lowest first."""
        return [piece for piece in self._held if piece.value.unseen and piece.value.consumer == consumer]

    def cut_unseen(self, consumer: ConsumerId) -> list[RangePiece[Flight]]:
        """Takes all of that back."""
        pieces = self._held.extract(lambda flight: flight.unseen and flight.consumer == consumer)
        for piece in pieces:
            piece.value.left -= piece.end - piece.first
        return pieces

    def cut_due(self, now: float, pieces_max: int) -> list[RangePiece[Flight]]:
        """Takes back what was held for as long as its consumer had asked."""
        late: list[RangePiece[Flight]] = []
        while len(late) < pieces_max and (due_at := self.next_due_at()) is not None and due_at <= now:
            flight = heappop(self._extended)[2]
            for piece in self._held.overlap(flight.first, flight.end):
                if piece.value is flight:
                    late += self.cut(piece.first, piece.end)
        return sorted(late, key=lambda piece: piece.first)

    def next_due_at(self) -> float | None:
        while self._extended and self._extended[0][2].left == 0:
            heappop(self._extended)
        return self._extended[0][0] if self._extended else None

    def cut_sent(self, too_long_ago: Callable[[float], bool], pieces_max: int) -> list[RangePiece[Flight]]:
        """Takes back what was sent too long ago, oldest first; no more flights when there are `pieces_max` pieces."""
        late: list[RangePiece[Flight]] = []
        self._forget_settled()
        while len(late) < pieces_max and self._by_age and too_long_ago(self._by_age[0].sent_at):
            flight = self._by_age.popleft()
            for piece in self._held.overlap(flight.first, flight.end):
                if piece.value is flight:
                    late += self.cut(piece.first, piece.end)
            self._forget_settled()
        return sorted(late, key=lambda piece: piece.first)

    def oldest_sent_at(self) -> float | None:
        self._forget_settled()
        return self._by_age[0].sent_at if self._by_age else None

    def clear(self) -> None:
        self._held.clear()
        self._by_age.clear()
        self._extended.clear()

    def _forget_settled(self) -> None:
        while self._by_age and self._by_age[0].left == 0:
            self._by_age.popleft()
