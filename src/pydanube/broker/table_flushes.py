"""What waits in the log is uploaded when a table is loaded: begun by a load, which does not wait for it.

    load ─► served here: in the queue ─► a turn of the uploader, beside those that are due
         └► another broker has it: asked there, all of one round in one call for each owner

At most once a second for one topic, however many load it; a few topics at a time, first come, first served; the queue
is bounded, and what finds no place in it is uploaded at its interval. Failing costs freshness, nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Final

from pydanube.broker.catalog import Catalog
from pydanube.core.names import TopicName
from pydanube.errors import DanubeError
from pydanube.ports import Clock

log = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 1.0  # between two of one topic
AT_ONCE: Final = 2  # so that those that are due by their interval have turns, too
QUEUE_MAX: Final = 10_000  # topics, here and elsewhere


class Flushes:
    """To be closed. None of its calls but `close` waits."""

    def __init__(self, topics: Catalog, clock: Clock) -> None:
        self._topics = topics
        self._clock = clock
        self._begun_at: dict[TopicName, float] = {}
        self._here: dict[TopicName, None] = {}  # in order
        self._elsewhere: dict[TopicName, None] = {}
        self._running: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[None] | None = None
        self._failing = ""  # why the last round did; told once

    def begin(self, topics: Iterable[TopicName], *, only_here: bool = False) -> None:
        """`only_here`: another broker asks, and takes this one for the owner."""
        cloud = self._topics.context.cloud
        now = self._clock.elapsed()
        self._begun_at = {each: at for each, at in self._begun_at.items() if now - at < FLUSH_SECONDS}
        for topic in topics:
            if topic in self._begun_at or len(self._here) + len(self._elsewhere) >= QUEUE_MAX:
                continue
            self._begun_at[topic] = now
            if cloud is not None and cloud.uploader.get(topic) is not None:
                self._here[topic] = None
            elif not only_here and self._topics.remote is not None:
                self._elsewhere[topic] = None
        self._go_on()
        if self._elsewhere and self._asking is None:
            self._asking = asyncio.create_task(self._ask(), name="ask owners to flush")

    def _go_on(self) -> None:
        cloud = self._topics.context.cloud
        assert cloud is not None or not self._here
        while self._here and cloud is not None and len(self._running) < AT_ONCE:
            topic = next(iter(self._here))
            del self._here[topic]
            if (flush := cloud.uploader.flush(topic)) is not None:
                self._running.add(flush)
                flush.add_done_callback(self._ended)

    def _ended(self, flush: asyncio.Task[None]) -> None:
        self._running.discard(flush)
        self._go_on()

    async def _ask(self) -> None:
        """One round at a time, of all that were asked for meanwhile."""
        try:
            while self._elsewhere and self._topics.remote is not None:
                asked, self._elsewhere = list(self._elsewhere), {}
                failing = ""
                try:
                    await self._topics.remote.flush(asked)
                except DanubeError as error:
                    failing = str(error)
                if failing and failing != self._failing:
                    log.info("tables may be older than their topics", extra={"topics": len(asked), "why": failing})
                self._failing = failing
        finally:
            self._asking = None

    async def close(self) -> None:
        """What has begun to be uploaded ends with its topic."""
        self._here, self._elsewhere = {}, {}
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
