"""How large the window of a worker should be: seconds of work, not messages. No I/O and no clock.

    window = rate of answers while there was something to do * (WORK_SECONDS + two round trips)

A worker of a shared subscription begins with a few messages, so that its colleagues get some, too, and has at most four
times as many at a time. One that needs a minute per message soon has one in its queue. One that answers more than
`FAST_MESSAGES` in that time has the most that is allowed: a second of work, perhaps, and no stored batch is cut in
pieces for it.
"""

from __future__ import annotations

from typing import Final

FIRST_MESSAGES: Final = 8
GROWTH: Final = 4
WORK_SECONDS: Final = 0.1
FAST_MESSAGES: Final = 1_000
ROUND_TRIP_SECONDS_MAX: Final = 1.0
RATE_WINDOW_SECONDS: Final = 0.5  # of work, after which the rate is looked at although few were answered


class Pacing:
    """The window of one lane. `tick` is called when something is answered, and when work begins."""

    __slots__ = ("_answered", "_at", "_busy_seconds", "_is_busy", "_most", "_round_trip", "window")

    def __init__(self, most: int) -> None:
        self.window = min(FIRST_MESSAGES, most)
        self._most = most
        self._answered = 0.0
        self._busy_seconds = 0.0
        self._at = 0.0
        self._is_busy = False
        self._round_trip: float | None = None

    def round_trip(self, seconds: float) -> None:
        """So long did an answer of the broker take. Shorter ones are believed, longer ones may be our own doing."""
        seconds = min(seconds, ROUND_TRIP_SECONDS_MAX)
        if self._round_trip is None or seconds < self._round_trip:
            self._round_trip = seconds
        else:
            self._round_trip += (seconds - self._round_trip) * 0.05

    def tick(self, now: float, *, is_busy: bool, answered: int = 0) -> int:
        """By how much the window has changed. `is_busy`: there is something to do from now on."""
        if self._is_busy:
            self._busy_seconds += max(0.0, now - self._at)
        self._at, self._is_busy = now, is_busy
        self._answered += answered
        if not answered or (self._answered < self.window and self._busy_seconds < RATE_WINDOW_SECONDS):
            return 0
        rate = self._answered / max(self._busy_seconds, 1e-6)
        wanted = round(rate * (WORK_SECONDS + 2 * (self._round_trip or 0.0)))
        if rate * WORK_SECONDS > FAST_MESSAGES:
            wanted = self._most
        before, self.window = self.window, max(1, min(wanted, GROWTH * self.window, self._most))
        self._answered /= 4  # what was long ago counts less
        self._busy_seconds /= 4
        return self.window - before
