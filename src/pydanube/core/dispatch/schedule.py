"""Messages that are not to be delivered before a time, until it has come.

    put ─► waits by the date ─► take_due ─► can be read like any other
             └─ forget: acknowledged, void, removed by retention

The date is the broker's, which may jump; a machine only has seconds that never go back. `set_date` says what date it
is, again and again: so a jump makes messages due earlier or later, and none is forgotten. Whoever reads a message to
send it compares with the date once more, and puts it back if it is too early.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heappush
from typing import Final

from pydanube.core.dispatch.ranges import OffsetRange, RangeMap

# So many acknowledged ranges between them fit into what is saved of a subscription while it is served (4 KiB).
SCHEDULED_MAX: Final = 1_000
LATER_SECONDS: Final = 0.001  # than due: rounding must not make it early


class ScheduleTally:
    """How many messages a topic has taken that are not due, so that none of its subscriptions has more than it may."""

    __slots__ = ("_times", "count_max")

    def __init__(self, count_max: int = SCHEDULED_MAX) -> None:
        self.count_max = count_max
        self._times: list[int] = []  # a heap

    def admits(self, times_us: Sequence[int | None], date_us: int, known: int = 0) -> bool:
        """Counts these, or refuses all of them. `known`: so many a subscription has, of an earlier owner perhaps."""
        while self._times and self._times[0] <= date_us:
            heappop(self._times)
        later = [time for time in times_us if time is not None and time > date_us]
        if later and max(len(self._times), known) + len(later) > self.count_max:
            return False
        for time in later:
            heappush(self._times, time)
        return True

    def forget(self, times_us: Sequence[int | None]) -> None:
        """What was counted is not there, or was counted before."""
        for time in times_us:
            if time is not None and time in self._times:
                self._times.remove(time)
        heapify(self._times)


class Schedule:
    """Of one subscription. Nothing in it is settled, or in flight, or to be sent."""

    __slots__ = ("_ahead_seconds", "_at", "_due", "count_max")

    def __init__(self, count_max: int = SCHEDULED_MAX) -> None:
        self.count_max = count_max
        self._ahead_seconds = 0.0  # the date, in seconds since 1970, less the machine's time
        self._at: RangeMap[int] = RangeMap()  # microseconds since 1970
        self._due: list[tuple[int, int, int]] = []  # a heap of (time, first, end); what is forgotten is found stale

    @property
    def count(self) -> int:
        return self._at.count

    @property
    def is_full(self) -> bool:
        """There are more than a topic takes."""
        return self._at.count > self.count_max

    def set_date(self, time_us: int, now: float) -> None:
        self._ahead_seconds = time_us / 1_000_000 - now

    def put(self, first: int, end: int, time_us: int) -> None:
        self.forget(first, end)
        self._at.put(first, end, time_us)
        heappush(self._due, (time_us, first, end))

    def forget(self, first: int, end: int) -> list[OffsetRange]:
        """Returns what of these was scheduled."""
        if not self._at:
            return []
        found = [OffsetRange(piece.first, piece.end) for piece in self._at.cut(first, end)]
        if len(self._due) > 64 + 2 * len(self._at):
            self._due = [(piece.value, piece.first, piece.end) for piece in self._at]
            heapify(self._due)
        return found

    def take_due(self, now: float, pieces_max: int) -> list[OffsetRange]:
        found: list[OffsetRange] = []
        while len(found) < pieces_max and (due := self.next_due()) is not None and due <= now:
            time_us, first, end = heappop(self._due)
            for piece in self._at.overlap(first, end):
                if piece.value == time_us:
                    self._at.cut(piece.first, piece.end)
                    found.append(OffsetRange(piece.first, piece.end))
        return found

    def next_due(self) -> float | None:
        """In the machine's time."""
        while self._due:
            time_us, first, end = self._due[0]
            if any(piece.value == time_us for piece in self._at.overlap(first, end)):
                return time_us / 1_000_000 - self._ahead_seconds + LATER_SECONDS
            heappop(self._due)
        return None
