"""The log of what happened: brokers that came and went, drains, orders. Kept in the metadata store, and bounded.

    events.record("died", "broker 10.0.0.3:6650 is gone", by="broker 17")      never waits
    await events.newest(100)

Nothing depends on it. What cannot be written for a while waits; if too much waits, or too much happens, what is left
out is counted and told in one line, so that no script that creates ten thousand topics fills the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Final

from pydanube.core import keys
from pydanube.core.cluster.presence import Happening
from pydanube.core.names import BrokerId
from pydanube.errors import DanubeError, Unavailable
from pydanube.ports import Clock, Delete, MetadataStore, Put

log = logging.getLogger(__name__)

WAITING_MAX: Final = 50
MINUTE_MAX: Final = 60  # of one broker
KEPT_MAX: Final = 1_000
KEPT_MS: Final = 30 * 24 * 3_600_000
TRIM_EVERY: Final = 50  # of its own
TRIM_BATCH: Final = 50
WRITE_PAUSE_SECONDS: Final = 5.0  # after the store did not answer, or when more comes than is listed
SENTENCE_MAX: Final = 500


class Events:
    """Of one broker: `run` writes what was reported to it."""

    def __init__(self, metadata: MetadataStore, clock: Clock, broker: BrokerId) -> None:
        self._metadata = metadata
        self._clock = clock
        self._broker = broker
        self._waiting: deque[tuple[int, Happening]] = deque()
        self._wake = asyncio.Event()
        self._minute = 0
        self._in_minute = 0
        self._left_out = 0
        self._last_us = 0

    def record(self, kind: str, sentence: str, by: str = "") -> None:
        now_us = self._clock.time_us()
        if now_us // 60_000_000 != self._minute:
            self._minute, self._in_minute = now_us // 60_000_000, 0
        if self._in_minute >= MINUTE_MAX or len(self._waiting) >= WAITING_MAX:
            self._left_out += 1
            return
        self._in_minute += 1
        self._put(now_us, Happening(time_ms=now_us // 1000, kind=kind, sentence=sentence[:SENTENCE_MAX], by=by))

    def _put(self, now_us: int, happening: Happening) -> None:
        self._last_us = max(now_us, self._last_us + 1)  # each has a key of its own
        self._waiting.append((self._last_us, happening))
        self._wake.set()

    async def run(self) -> None:
        """Until cancelled."""
        written = 0
        while True:
            await self._wake.wait()
            try:
                while self._waiting:
                    time_us, happening = self._waiting[0]
                    put = Put(keys.event(time_us, self._broker), happening.to_bytes())
                    await self._metadata.transact([], [put])
                    self._waiting.popleft()
                    if written % TRIM_EVERY == 0:
                        await self._trim()
                    written += 1
                self._wake.clear()
                if self._left_out:
                    left_out, self._left_out = self._left_out, 0
                    now_us = self._clock.time_us()
                    sentence = f"{left_out:,} more orders and changes, which are not listed one by one"
                    self._put(now_us, Happening(time_ms=now_us // 1000, kind="more", sentence=sentence))
                    await self._clock.sleep(WRITE_PAUSE_SECONDS)
            except Unavailable as error:
                log.warning("events wait for the metadata store", extra={"why": str(error)})
                await self._clock.sleep(WRITE_PAUSE_SECONDS)
            except DanubeError as error:
                log.warning("event not written", extra={"why": str(error)})
                self._waiting.popleft()

    async def _trim(self) -> None:
        stored = [each.key for each in await self._metadata.list(keys.EVENTS)]
        oldest_us = self._clock.time_us() - KEPT_MS * 1000
        old = [key for key in stored if (keys.time_of_event(key) or 0) < oldest_us]
        surplus = [*old, *stored[len(old) : max(len(old), len(stored) - KEPT_MAX)]]
        for first in range(0, len(surplus), TRIM_BATCH):
            await self._metadata.transact([], [Delete(key) for key in surplus[first : first + TRIM_BATCH]])

    async def newest(self, count: int) -> list[Happening]:
        """Newest first. Raises Unavailable."""
        items = await self._metadata.list(keys.EVENTS)
        found = [Happening.from_bytes(each.value) for each in reversed(items)]
        return [each for each in found if each is not None][:count]
