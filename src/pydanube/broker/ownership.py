"""One topic's claim in the metadata store, and every write that rests on it.

`Ownership.write` is the only way anything about an owned topic is written: it compares the owner key, so a broker
that lost the topic changes nothing and learns it (`OwnershipLost`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from pydanube.core import keys
from pydanube.core.names import BrokerId, TopicName
from pydanube.core.ownership import (
    Owner,
    Seal,
    Start,
    next_reservation,
    offset_if_unproven,
    reserve_from_bytes,
    reserve_to_bytes,
    start_of_epoch,
)
from pydanube.errors import Conflict, OwnershipLost, Unavailable
from pydanube.log.wal import TopicLog
from pydanube.ports import Clock, Compare, Delete, MetadataStore, Put

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.2


class Claimable(NamedTuple):
    """What the store says about a topic before it is claimed."""

    owner: Owner | None
    revision: int
    reserved_end: int | None
    start: Start
    offset_if_unproven: int | None

    @property
    def epoch(self) -> int:
        return self.owner.epoch + 1 if self.owner else 1


async def look(metadata: MetadataStore, topic: TopicName, broker_id: BrokerId) -> Claimable:
    """Reads owner, seal and reservation."""
    item = await metadata.get(keys.owner(topic))
    owner = Owner.from_bytes(item.value) if item else None
    sealed = await metadata.get(keys.seal(topic))
    reserve = await metadata.get(keys.reserve(topic))
    reserved_end = reserve_from_bytes(reserve.value) if reserve else None
    start = start_of_epoch(owner, Seal.from_bytes(sealed.value) if sealed else None, reserved_end, broker_id=broker_id)
    return Claimable(owner, item.revision if item else 0, reserved_end, start, offset_if_unproven(owner, reserved_end))


class Ownership:
    """This broker's claim to one topic."""

    __slots__ = ("_metadata", "epoch", "revision", "topic")

    def __init__(self, metadata: MetadataStore, topic: TopicName, epoch: int, revision: int) -> None:
        self._metadata = metadata
        self.topic = topic
        self.epoch = epoch
        self.revision = revision

    @classmethod
    async def claim(
        cls,
        metadata: MetadataStore,
        topic: TopicName,
        seen: Claimable,
        *,
        broker_id: BrokerId,
        session: int,
        start: int,
    ) -> Ownership:
        """Takes the topic if nobody else did since `seen`; raises Conflict otherwise."""
        owner = Owner(epoch=seen.epoch, session=session, broker_id=broker_id, start_offset=start)
        revision = await metadata.transact(
            [Compare(keys.owner(topic), seen.revision)],
            [
                Put(keys.owner(topic), owner.to_bytes()),
                Put(keys.assignment(broker_id, topic), b"null"),
                Delete(keys.unassigned(topic)),
            ],
        )
        if revision is None:
            raise Conflict(keys.owner(topic))
        log.info("topic claimed", extra={"topic": topic, "epoch": owner.epoch, "start_offset": start})
        return cls(metadata, topic, owner.epoch, revision)

    @property
    def compare(self) -> Compare:
        """Holds as long as the topic is ours."""
        return Compare(keys.owner(self.topic), self.revision)

    async def write(self, operations: Sequence[Put | Delete]) -> None:
        """All of them, or none and OwnershipLost."""
        if await self._metadata.transact([self.compare], operations) is None:
            raise OwnershipLost(self.topic)


class Reservation:
    """Keeps the log's reservation ahead of its head. No offset at or beyond it is ever given out.

    `need` is called with every publish and never waits; the log holds back what lies beyond until the store has
    confirmed more. A store that does not answer is asked again: publishes wait, nothing is lost.
    """

    def __init__(self, ownership: Ownership, topic_log: TopicLog, clock: Clock, reserved_end: int | None) -> None:
        self._ownership = ownership
        self._log = topic_log
        self._clock = clock
        self._extending: asyncio.Task[None] | None = None
        self._needed_end = 0
        self._since = (clock.elapsed(), topic_log.head)
        # What an earlier epoch had reserved is still in the store and still holds, but our log begins at its head.
        topic_log.reserve(max(reserved_end or 0, topic_log.head))

    def need(self, rows: int) -> None:
        """So many more offsets are about to be asked for."""
        topic_log = self._log
        self._needed_end = max(self._needed_end, topic_log.head) + rows
        end = topic_log.reserved_end or 0
        if self._extending is None and next_reservation(topic_log.head, end, self._needed_end, 0.0) is not None:
            self._extending = asyncio.create_task(self._extend(), name=f"reserve {self._ownership.topic}")

    async def _extend(self) -> None:
        try:
            while (end := self._wanted()) is not None:
                try:
                    put = Put(keys.reserve(self._ownership.topic), reserve_to_bytes(end))
                    await self._ownership.write([put])
                except OwnershipLost:
                    return  # whoever owns the topic now closes it here
                except Unavailable as error:
                    log.warning("reservation delayed", extra={"topic": self._ownership.topic, "why": str(error)})
                    await self._clock.sleep(RETRY_SECONDS)
                    continue
                self._log.reserve(end)
        finally:
            self._extending = None

    def _wanted(self) -> int | None:
        at, head = self._since
        now = self._clock.elapsed()
        rate = (self._log.head - head) / (now - at) if now - at > 1.0 else 0.0
        self._since = (now, self._log.head)
        self._needed_end = max(self._needed_end, self._log.head)
        return next_reservation(self._log.head, self._log.reserved_end or 0, self._needed_end, rate)

    async def shrink(self) -> None:
        """The topic is closing: the reservation ends at the head, so nothing is left in doubt."""
        if self._extending is not None:
            self._extending.cancel()
            await asyncio.gather(self._extending, return_exceptions=True)
        if (self._log.reserved_end or 0) > self._log.head:
            self._log.reserve(self._log.head)
            await self._ownership.write([Put(keys.reserve(self._ownership.topic), reserve_to_bytes(self._log.head))])
