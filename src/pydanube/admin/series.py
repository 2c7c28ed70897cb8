"""One number over time: what it is now, per second, and its past in slots.

Nothing here reads a clock. Memory is bounded: a series takes four bytes per slot of five seconds, and per minute for
hours if it has a long past; what was always 0 takes none.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, TypeAlias

SLOT_SECONDS: Final = 5
SLOTS: Final = 192  # sixteen minutes
RECENT: Final = 3  # samples that the rate of the moment is taken from
MINUTE: Final = 12  # slots
MINUTES: Final = 360  # six hours, a mean per minute

Series: TypeAlias = list[tuple[float, float | None]]


class SlotRing:
    """One number per slot of time, the last `size` of them. Nothing is kept of what was always 0."""

    __slots__ = ("_first", "_size", "_values", "last")

    def __init__(self, size: int = SLOTS) -> None:
        self._size = size
        self._values: array[float] | None = None
        self._first = -1  # the slot of the first sample
        self.last = -1

    def put(self, slot: int, value: float) -> None:
        """Of several samples in a slot the last one stays; a slot of the past is not changed."""
        if self._first < 0:
            self._first = self.last = slot
        elif slot < self.last:
            return
        if self._values is None:
            if value == 0.0:
                self.last = slot
                return
            self._values = array("f", bytes(4 * self._size))
        for missed in range(max(self.last + 1, slot - self._size + 1), slot):
            self._values[missed % self._size] = math.nan
        self.last = slot
        self._values[slot % self._size] = value

    def series(self, slot: int, count: int = SLOTS) -> Iterator[float | None]:
        """The `count` values up to and with `slot`; None where there was no sample."""
        for each in range(slot - count + 1, slot + 1):
            if each < self._first or each > self.last or each <= self.last - self._size or self._first < 0:
                yield None
            elif self._values is None:
                yield 0.0
            else:
                value = self._values[each % self._size]
                yield None if math.isnan(value) else value


def slot_of(at: float) -> int:
    return int(at // SLOT_SECONDS)


class Rate:
    """Of a counter that several brokers may report, one after the other."""

    __slots__ = ("_added", "_recent", "_seconds", "_slot")

    def __init__(self) -> None:
        self._recent: list[tuple[float, float]] = []  # what was added, in how many seconds
        self._slot = -1
        self._added = self._seconds = 0.0  # in that slot

    def add(self, increment: float, seconds: float, slot: int) -> None:
        if len(self._recent) >= RECENT:
            del self._recent[0]
        self._recent.append((increment, seconds))
        if slot != self._slot:
            self._slot, self._added, self._seconds = slot, 0.0, 0.0
        self._added += increment
        self._seconds += seconds

    def of_slot(self, slot: int) -> float:
        """Per second, in that slot alone; 0 if nothing was added."""
        return self._added / self._seconds if slot == self._slot and self._seconds else 0.0

    @property
    def now(self) -> float:
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(increment for increment, _ in self._recent) / seconds if seconds else 0.0


@dataclass(slots=True, eq=False)
class Thing:
    """A topic, a subscription, a broker or all of them: rates, levels and their past."""

    rates: dict[str, Rate] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)
    rings: dict[str, SlotRing] = field(default_factory=dict)
    seen_at: float = 0.0
    has_past: bool = True
    still: int = 0  # samples in a row that said the same
    standing: tuple[float, ...] = ()
    parts: tuple[Thing, ...] = ()  # of a sum of several: they have the past
    minutes: dict[str, SlotRing] = field(default_factory=dict)  # the mean of each minute, for hours
    has_long_past: bool = False

    def is_still(self, is_same: bool) -> bool:
        """Whether a sample that says the same changes nothing any more: its rates are 0 since long enough."""
        self.still = self.still + 1 if is_same else 0
        return self.still > RECENT

    @property
    def is_sampled(self) -> bool:
        """Whether a broker was heard of it lately: without that its rates are not 0, they are not known."""
        return bool(self.levels or self.rates)

    def rate(self, name: str) -> float:
        """Per second, over the last few samples. The cluster's are sums, kept as levels."""
        found = self.rates.get(name)
        return found.now if found is not None else self.level(name)

    def level(self, name: str, default: float = 0.0) -> float:
        value = self.levels.get(name, default)
        return default if math.isnan(value) else value

    def count(self, name: str, increment: float, seconds: float) -> None:
        """To be called when it was just seen."""
        rate = self.rates.get(name)
        if rate is None:
            rate = self.rates[name] = Rate()
        rate.add(increment, seconds, slot_of(self.seen_at))

    def put(self, slot: int, name: str, value: float) -> None:
        if not self.has_past or math.isnan(value):
            return
        ring = self.rings.get(name)
        if ring is None:
            ring = self.rings[name] = SlotRing()
        if self.has_long_past and ring.last >= 0 and ring.last // MINUTE != slot // MINUTE:
            self._keep_minute(name, ring)
        ring.put(slot, value)

    def _keep_minute(self, name: str, ring: SlotRing) -> None:
        """The minute that the ring has come to the end of."""
        minute = ring.last // MINUTE
        mean = mean_of(list(ring.series(ring.last, ring.last - minute * MINUTE + 1)))
        if mean is not None:
            self.minutes.setdefault(name, SlotRing(MINUTES)).put(minute, mean)

    @property
    def messages_in(self) -> float:
        return self.rate("messages_in")

    @property
    def messages_out(self) -> float:
        return self.rate("messages_out")

    @property
    def bytes_in(self) -> float:
        return self.rate("bytes_in")

    @property
    def bytes_out(self) -> float:
        return self.rate("bytes_out")

    @property
    def redeliveries(self) -> float:
        return self.rate("redeliveries")

    @property
    def lag(self) -> int | None:
        """Of a topic: of the subscription that is furthest behind. None: nothing that could lag."""
        value = self.levels.get("lag", math.nan)
        return None if math.isnan(value) else int(value)


def mean_of(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
