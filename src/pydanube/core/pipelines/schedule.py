"""When a pipeline is to run: all the time, every so often, or at times as cron writes them, in UTC.

    Every(3600).due_us(last_start, since)        an hour after the last start; the first one at once
    Cron.parse("15 3 * * mon-fri")               minute, hour, day of the month, month, day of the week

A slot that passed while a run was still going, or while no supervisor was there, is made up for by one run, however
many there were. Times are microseconds since 1970.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple, Self

from pydanube.errors import ConfigError

SECOND_US: Final = 1_000_000
SHORTEST_SECONDS: Final = 10  # a run of Spark takes seconds to start
LONGEST_SECONDS: Final = 366 * 86_400
UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
NAMES: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
}
MONTHS: Final = ("jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec")
WEEKDAYS: Final = ("sun", "mon", "tue", "wed", "thu", "fri", "sat")
SEARCH_DAYS: Final = 8 * 366 + 1  # from one 29 February to the next it is eight years at most

_DURATION: Final = re.compile(r"(\d{1,9})\s*([smhd]?)")


def seconds_of(key: str, value: object, *, shortest: int = SHORTEST_SECONDS) -> int:
    """`30s`, `5m`, `2h`, `1d` or a number of seconds. Raises ConfigError."""
    found = _DURATION.fullmatch(str(value).strip()) if isinstance(value, int | str) else None
    seconds = int(found[1]) * UNITS[found[2] or "s"] if found and not isinstance(value, bool) else -1
    if not shortest <= seconds <= LONGEST_SECONDS:
        raise ConfigError(key, value, f"a time such as 30s, 5m, 2h or 1d, {shortest} s at least and 366d at most")
    return seconds


class Every(NamedTuple):
    """So many seconds from one start to the next; a run that takes longer is followed by the next at once."""

    seconds: int

    def due_us(self, last_us: int | None, since_us: int) -> int:
        return since_us if last_us is None else last_us + self.seconds * SECOND_US

    def __str__(self) -> str:
        unit = next(unit for unit, size in reversed(UNITS.items()) if self.seconds % size == 0)
        return f"every {self.seconds // UNITS[unit]}{unit}"


@dataclass(frozen=True, slots=True)
class Cron:
    """Five fields. As in cron, a day matches by either of its two fields if neither of them is `*`."""

    text: str
    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    any_day: bool
    any_weekday: bool

    @classmethod
    def parse(cls, text: str, key: str = "cron") -> Self:
        """Raises ConfigError, also for times that never come."""
        fields = NAMES.get(text.strip().lower(), text).lower().split()
        if len(fields) != 5:
            what = "five fields, minute hour day month weekday, as 15 3 * * mon-fri; or @hourly, @daily, @weekly"
            raise ConfigError(key, text, what)

        def numbers(place: int, low: int, high: int, names: tuple[str, ...] = ()) -> frozenset[int]:
            found = _numbers(fields[place], low, high, names)
            if found is None:
                what = ("minute", "hour", "day of the month", "month", "day of the week")[place]
                raise ConfigError(
                    key, text, f"its {what}, {fields[place]!r}, from {low} to {high}: 5, 1-5, */15 or 1,3"
                )
            return found

        weekdays = frozenset(each % 7 for each in numbers(4, 0, 7, WEEKDAYS))
        made = cls(
            " ".join(text.split()),
            numbers(0, 0, 59),
            numbers(1, 0, 23),
            numbers(2, 1, 31),
            numbers(3, 1, 12, ("", *MONTHS)),
            weekdays,
            fields[2].startswith("*"),
            fields[4].startswith("*"),
        )
        if made.next_us(0) is None:
            raise ConfigError(key, text, "a day that comes: no month that it names has that one")
        return made

    def due_us(self, last_us: int | None, since_us: int) -> int:
        found = self.next_us(since_us if last_us is None else last_us)
        assert found is not None, "parse looked for one"
        return found

    def next_us(self, after_us: int) -> int | None:
        """The first minute that begins after `after_us`; None: there is none."""
        first = datetime.fromtimestamp(after_us // SECOND_US // 60 * 60, UTC) + timedelta(minutes=1)
        day = first.replace(hour=0, minute=0)
        for _ in range(SEARCH_DAYS):
            if day.month in self.months and self._has_day(day):
                for hour in sorted(self.hours):
                    for minute in sorted(self.minutes):
                        found = day.replace(hour=hour, minute=minute)
                        if found >= first:
                            return int(found.timestamp()) * SECOND_US
            day += timedelta(days=1)
        return None

    def _has_day(self, day: datetime) -> bool:
        by_day, by_weekday = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return by_day and by_weekday if self.any_day or self.any_weekday else by_day or by_weekday

    def __str__(self) -> str:
        return f"cron {self.text}"


def _numbers(field: str, low: int, high: int, names: tuple[str, ...]) -> frozenset[int] | None:
    """None: it cannot be read."""
    found: set[int] = set()
    for part in field.split(","):
        span, slash, step_text = part.partition("/")
        if slash and not (step_text.isdecimal() and 0 < int(step_text) <= high):
            return None
        if span == "*":
            first, last = low, high
        else:
            begin, dash, end = span.partition("-")
            numbers = [_number(each, names) for each in ([begin, end] if dash else [begin])]
            if None in numbers:
                return None
            first = numbers[0] or 0
            last = (numbers[1] or 0) if dash else (high if slash else first)
        if not low <= first <= last <= high:
            return None
        found.update(range(first, last + 1, int(step_text) if slash else 1))
    return frozenset(found)


def _number(text: str, names: tuple[str, ...]) -> int | None:
    if text in names and text:
        return names.index(text)
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 2 else None
