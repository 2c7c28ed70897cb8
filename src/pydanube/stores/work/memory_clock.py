"""Two clocks that never look at the machine's.

`MemoryClock` stands still until a test advances it. `LoopClock` follows the running event loop, which in the
simulator has virtual time; with an ordinary loop it is real time.
"""

from __future__ import annotations

import asyncio
from heapq import heappop, heappush

# 2024-01-01T00:00:00Z: a round moment that looks like a date in logs and files.
EPOCH_US = 1_704_067_200_000_000


class MemoryClock:
    """Moves only by `advance`.

    A task that `advance` wakes runs after it and sees the time that `advance` went to, as a task on a busy
    machine wakes late.
    """

    def __init__(self, start_us: int = EPOCH_US) -> None:
        self._start_us = start_us
        self._elapsed = 0.0
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []  # a heap
        self._sleepers_made = 0

    def time_us(self) -> int:
        return self._start_us + round(self._elapsed * 1_000_000)

    def elapsed(self) -> float:
        return self._elapsed

    async def sleep(self, seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers_made += 1
        heappush(self._sleepers, (self._elapsed + seconds, self._sleepers_made, woken))
        await woken

    def advance(self, seconds: float) -> None:
        """Moves the time on and wakes those whose time has come, by deadline, then by who slept first."""
        assert seconds >= 0, "time never goes back; see jump"
        self._elapsed += seconds
        while self._sleepers and self._sleepers[0][0] <= self._elapsed:
            _, _, woken = heappop(self._sleepers)
            if not woken.done():  # a cancelled sleeper stays in the heap until its time
                woken.set_result(None)

    def jump(self, seconds: float) -> None:
        """Changes the date alone, as an operator or NTP does, in either direction."""
        self._start_us += round(seconds * 1_000_000)

    @property
    def sleeping(self) -> int:
        """How many tasks sleep on this clock."""
        return sum(not woken.done() for _, _, woken in self._sleepers)


class LoopClock:
    """The running loop's time. All calls must come from inside a running loop."""

    def __init__(self, start_us: int = EPOCH_US) -> None:
        self._start_us = start_us

    def time_us(self) -> int:
        return self._start_us + round(self.elapsed() * 1_000_000)

    def elapsed(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
