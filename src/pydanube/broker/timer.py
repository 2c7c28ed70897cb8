"""One timer for all subscriptions: heartbeats and wake-ups.

Callers register a time at which to be called; the timer sleeps until the earliest. Heartbeats are aligned to multiples
of their interval, so a thousand idle subscriptions cost one wake-up per interval, not a thousand.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Final

from pydanube.ports import Clock

log = logging.getLogger(__name__)

TURN_CALLS: Final = 64  # calls before others have a turn


class Timer:
    """Calls functions at times of `clock.elapsed()`, or soon after. Functions never wait."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._earlier: asyncio.Future[None] | None = None  # while it sleeps
        self._sleeping_until = math.inf

    def call_at(self, time: float, function: Callable[[float], None]) -> None:
        """`function(now)` is called once. What is no longer wanted then must know by itself."""
        heappush(self._heap, (time, next(self._numbers), function))
        if time < self._sleeping_until and self._earlier is not None and not self._earlier.done():
            self._earlier.set_result(None)

    def next_beat(self, interval_seconds: float) -> float:
        """The next multiple of the interval: all with the same interval beat together."""
        now = self._clock.elapsed()
        beats = math.floor(now / interval_seconds) + 1
        at = beats * interval_seconds
        # A multiple divided by its interval may come out just below a whole number: 43 * 0.05 / 0.05 < 43.
        return at if at > now else (beats + 1) * interval_seconds

    async def run(self) -> None:
        """Calls what is due until cancelled. A function that fails is logged and does not stop the others."""
        while True:
            now = self._clock.elapsed()
            due: list[Callable[[float], None]] = []
            while self._heap and self._heap[0][0] <= now:
                due.append(heappop(self._heap)[2])
            for number, function in enumerate(due, 1):
                try:
                    function(now)  # may ask to be called again immediately: that is for the next round
                except Exception:
                    log.exception("timer call failed")
                if number % TURN_CALLS == 0:
                    await asyncio.sleep(0)  # a thousand heartbeats fall on the same moment
            self._sleeping_until = self._heap[0][0] if self._heap else math.inf
            await self._sleep(self._sleeping_until - now)

    async def _sleep(self, seconds: float) -> None:
        """Until the time has come or something earlier was registered."""
        loop = asyncio.get_running_loop()
        self._earlier = earlier = loop.create_future()
        alarm = loop.call_later(seconds, _wake, earlier) if seconds != math.inf else None
        try:
            await earlier
        finally:
            self._earlier = None
            if alarm is not None:
                alarm.cancel()


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
