"""How fast objects are written: the disk may also be the log's, and the cores are also the publishers'.

The disk serves in turns, and a sync of the log has its turn behind what an object was writing: with a writer that
writes as fast as it can, one sync in a hundred took 7 to 10 ms here instead of 0.4, with one that takes 20 to 40 MB/s
0.4 to 1. Objects can wait, publishers cannot.
"""

from __future__ import annotations

import math
from typing import Final

from pydanube.core.units import MIB
from pydanube.ports import Clock

RATE_MIN: Final = 32 * MIB  # bytes a second; more if so much waits that this would not do
BURST_BYTES: Final = 4 * MIB  # small objects are not worth waiting for


class UploadRate:
    """A rate limit that all writers of objects share."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rate = float(RATE_MIN)
        self._paid_until = -math.inf  # when what was written so far is written at this rate

    def set_target_rate(self, rate: float) -> None:
        """Bytes a second that are enough; infinity for no limit."""
        self._rate = max(rate, RATE_MIN)

    async def wait(self, written_bytes: int) -> None:
        """Called behind every write. Returns when the next may begin."""
        now = self._clock.elapsed()
        self._paid_until = max(self._paid_until, now - BURST_BYTES / self._rate) + written_bytes / self._rate
        if self._paid_until > now:
            await self._clock.sleep(self._paid_until - now)
