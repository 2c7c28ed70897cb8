"""How far ahead of a topic's log offsets are reserved in the metadata store."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from pydanube.broker.ownership import Ownership
from pydanube.core import keys
from pydanube.core.history.ownership import next_ahead, next_reservation, reserve_to_bytes
from pydanube.errors import OwnershipLost, Unavailable
from pydanube.log.wal import TopicLog
from pydanube.ports import Clock, Compare, Put

log = logging.getLogger(__name__)

EXTEND_RETRY_SECONDS: Final = 0.2


class Reservation:
    """Keeps the log's reservation ahead of its head. No offset at or beyond it is ever given out.

    `need` is called with every publish and never waits; the log holds back what lies beyond until the store has
    confirmed more. A store that does not answer is asked again: publishes wait, nothing is lost.

        extend:  lock ─► store the larger end ─► confirmed ─► the log may give out more ─► unlock
        release: lock ─► the log gives out nothing beyond its head ─► group in flight decided ─► store it ─► unlock

    Invariant, at every await: the log's reserved end is not above `confirmed_end`, nor is that above what the store has
    (or the log's head is its reserved end, and it gives out nothing). So the log's end grows after the store's and
    shrinks before it; `_storing` is held from the first of the two to the second, so neither changes in between.
    """

    def __init__(
        self, ownership: Ownership, topic_log: TopicLog, clock: Clock, reserved_end: int | None, revision: int = 0
    ) -> None:
        self._ownership = ownership
        self._revision: int | None = revision  # of the stored value; None: not known, an answer was lost
        self._storing = asyncio.Lock()
        self._log = topic_log
        self._clock = clock
        self._extending: asyncio.Task[None] | None = None
        self._needed_end = 0
        self._since = (clock.elapsed(), topic_log.head)  # when it was extended last, and what was asked for by then
        self._ahead = next_ahead(0, 0, 0.0)
        # The store has at least this, whatever becomes of writes that were not answered.
        self.confirmed_end = reserved_end or 0
        # What an earlier epoch had reserved is still in the store and still holds, but our log begins at its head.
        self._allow(max(self.confirmed_end, topic_log.head))

    def need(self, rows: int) -> None:
        """A publish is about to use so many more offsets."""
        topic_log = self._log
        self._needed_end = max(self._needed_end, topic_log.head) + rows
        end = topic_log.reserved_end or 0
        if self._extending is None and next_reservation(topic_log.head, end, self._needed_end, self._ahead) is not None:
            self._extending = asyncio.create_task(self._extend(), name=f"reserve {self._ownership.topic}")

    async def _extend(self) -> None:
        try:
            while True:
                try:
                    async with self._storing:
                        end = self._wanted()
                        if end is None:
                            return
                        await self._store(end)
                        self._allow(end)
                except OwnershipLost:
                    return  # `Ownership` has reported it, and the topic is closed
                except Unavailable as error:
                    log.warning("reservation delayed", extra={"topic": self._ownership.topic, "why": str(error)})
                    await self._clock.sleep(EXTEND_RETRY_SECONDS)
        finally:
            self._extending = None

    def _allow(self, end: int) -> None:
        assert end <= max(self.confirmed_end, self._log.head), "offsets beyond what the store has confirmed"
        self._log.reserve(end)

    async def _store(self, end: int) -> None:
        """Replaces the stored value, and only if it is the one known here: a write of ours whose answer was lost may
        come late, and must not replace a newer end by an older one. Only with `_storing`.
        """
        key = keys.reserve(self._ownership.topic)
        self.confirmed_end = min(self.confirmed_end, end)  # it may be done and not answered
        while True:
            if self._revision is None:
                item = await self._ownership.get(key)
                self._revision = item.revision if item else 0
            revision, self._revision = self._revision, None
            put = Put(key, reserve_to_bytes(end))
            self._revision = await self._ownership.write_if([Compare(key, revision)], [put])
            if self._revision is not None:
                self.confirmed_end = end
                return

    def _wanted(self) -> int | None:
        """The end to store next, by what was asked for since the last time: while the log waits, its head stands."""
        head, end = self._log.head, self._log.reserved_end or 0
        self._needed_end = max(self._needed_end, head)
        if next_reservation(head, end, self._needed_end, self._ahead) is None:
            return None
        (at, before), now = self._since, self._clock.elapsed()
        self._ahead = next_ahead(self._ahead, self._needed_end - before, now - at)
        self._since = (now, self._needed_end)
        return next_reservation(head, end, self._needed_end, self._ahead)

    @property
    def has_doubt(self) -> bool:
        """Whether the store has, or may have, more than the log has given out."""
        return self.confirmed_end > self._log.head or self._revision is None

    def _is_wanted(self) -> bool:
        return self._extending is not None or bool(self._log.pending)

    async def stop(self) -> None:
        """No more is reserved."""
        if self._extending is not None:
            self._extending.cancel()
            await asyncio.gather(self._extending, return_exceptions=True)

    async def release_reservation(self) -> None:
        """The topic is idle: the reservation ends at the head. A publish during this waits for it; if one waits
        already, the topic is not idle and nothing happens.
        """
        if self._is_wanted():
            return
        async with self._storing:
            if self._is_wanted():
                return
            try:
                self._allow(self._log.head)  # from now on nothing is given out beyond it
                await self._log.settled()  # but a group that was formed before may still become the head
                self._allow(self._log.head)
                await self._store(self._log.head)
            finally:
                if self._log.pending:
                    self.need(0)

    async def shrink(self) -> None:
        """The topic's log is closed: the reservation ends at the head, so nothing is left in doubt."""
        await self.stop()
        async with self._storing:
            if self.has_doubt:
                self._allow(self._log.head)
                await self._store(self._log.head)
