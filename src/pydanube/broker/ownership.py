"""One topic's claim in the metadata store, and every write that rests on it.

`Ownership.write` is the only way anything about an owned topic is written: it compares the owner key, so a broker
that lost the topic changes nothing and learns it (`OwnershipLost`). With the first refusal `on_lost` is called: a topic
that another broker has is closed here, also if no task awaits what was refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pydanube.core import keys
from pydanube.core.commit.sessions import epoch_of_session
from pydanube.core.history.ownership import (
    LogStart,
    Orphan,
    Owner,
    Seal,
    is_sealed,
    next_epoch,
    reserve_from_bytes,
    reserve_to_bytes,
    void_end,
    void_to_bytes,
)
from pydanube.core.history.tiers import Descriptor, TopicHistory
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import Conflict, OwnershipLost, SessionUnknown
from pydanube.ports import Compare, Delete, Item, MetadataStore, Put

log = logging.getLogger(__name__)


class Claimable(NamedTuple):
    """What the store says about a topic before it is claimed, all of one moment."""

    owner: Owner | None
    revision: int
    seal: Seal | None
    reserved_end: int | None
    reserve_revision: int
    start: LogStart
    offset_if_unproven: int | None
    orphans: Sequence[Orphan]
    voids: Sequence[tuple[int, int]]
    leaves: Orphan | None  # what a claim leaves behind on the disk of a lost owner
    history_revision: int = 0
    covered_end: int = 0  # where objects, orphans and voids end
    items: Sequence[Item] = ()  # everything that is stored below the topic's storage

    @property
    def epoch(self) -> int:
        return self.owner.epoch + 1 if self.owner else 1

    @property
    def created(self) -> int:
        """The epoch in which the topic was made: this one, if there was none of the name."""
        return self.owner.created if self.owner and not self.owner.deleted else self.epoch

    def since(self, broker_id: int, start: int) -> tuple[int, int]:
        """The epoch and offset from which on this broker alone has owned the topic, once it has claimed it."""
        owner = self.owner
        if owner is not None and not owner.deleted and owner.broker_id == broker_id:
            return owner.since, owner.since_offset
        return self.epoch, start

    @property
    def enclosed(self) -> list[int]:
        """Where the voids begin that lie inside of what a claim leaves behind."""
        left = self.leaves
        return [first for first, _ in self.voids if left is not None and left.start <= first < left.end]

    @property
    def sealed(self) -> Seal | None:
        """The seal, if it is of the last epoch."""
        return self.seal if self.owner is not None and is_sealed(self.owner, self.seal) else None


async def look(metadata: MetadataStore, topic: TopicName, broker_id: BrokerId) -> Claimable:
    """Owner, seal, reservation, and which offsets have their place: objects, orphans, voids."""
    listed = await metadata.list(keys.below_storage(topic))
    items = {item.key: item for item in listed}
    item, sealed, reserve = (items.get(key(topic)) for key in (keys.owner, keys.seal, keys.reserve))
    owner = Owner.from_bytes(item.value) if item else None
    seal = Seal.from_bytes(sealed.value) if sealed else None
    reserved_end = reserve_from_bytes(reserve.value) if reserve else None
    history = items.get(keys.history(topic))
    described_end = 0
    orphans: list[Orphan] = []
    voids: list[tuple[int, int]] = []
    for key, each in items.items():
        start = keys.start_of(key)
        if start is None:
            continue
        if key.startswith(keys.storage_objects(topic)):
            described_end = max(described_end, Descriptor.from_bytes(each.value).end)
        elif key.startswith(keys.orphans(topic)):
            orphans.append(Orphan.from_bytes(start, each.value))
        else:
            voids.append((start, void_end(each.value)))
    past = TopicHistory.from_bytes(history.value) if history else TopicHistory()
    following = next_epoch(
        owner,
        seal,
        reserved_end,
        broker_id=broker_id,
        placed_end=max(described_end, past.first_offset, past.manifest_end),
        orphans=orphans,
        voids=voids,
    )
    return Claimable(
        owner,
        item.revision if item else 0,
        seal,
        reserved_end,
        reserve.revision if reserve else 0,
        following.start,
        following.offset_if_unproven,
        orphans,
        voids,
        following.leaves,
        history.revision if history else 0,
        following.covered_end,
        listed,
    )


class Ownership:
    """This broker's claim to one topic."""

    __slots__ = (
        "_metadata",
        "_on_lost",
        "_value",
        "broker_id",
        "created",
        "epoch",
        "revision",
        "session",
        "since",
        "since_offset",
        "start",
        "topic",
    )

    def __init__(
        self,
        metadata: MetadataStore,
        topic: TopicName,
        owner: Owner,
        revision: int,
        on_lost: Callable[[Ownership], None] = lambda ownership: None,
    ) -> None:
        """`on_lost` never waits, and may be called more than once."""
        self._metadata = metadata
        self._value = owner.to_bytes()
        self.topic = topic
        self.epoch = owner.epoch
        self.session = owner.session
        self.broker_id = BrokerId(owner.broker_id)
        self.start = owner.start_offset
        self.created = owner.created
        self.since, self.since_offset = owner.since, owner.since_offset
        self.revision = revision
        self._on_lost = on_lost

    async def check_not_older(self, seen_epoch: int, *, session: int = 0) -> None:
        """Raises OwnershipLost if a newer owner has answered this client: it has opened the producer, issued its
        session, or written what the consumer was delivered.

        This broker may serve the topic until its lease ends without knowing that it is lost. A producer that came back
        to it from the newer owner would be acknowledged for batches that the rescue of this epoch takes for copies:
        of one session, everything behind what a newer epoch accepted counts as resent. A consumer's acks of what lies
        beyond this head would be refused for good. The store decides: one that was restored from a backup has older
        epochs than its clients have seen. A session that is newer than the store raises SessionUnknown then.
        """
        if max(epoch_of_session(session), seen_epoch) <= self.epoch:
            return
        item = await self._metadata.get(keys.owner(self.topic))
        if item is None or item.value != self._value:
            raise self._lost()
        if epoch_of_session(session) > self.epoch:
            raise SessionUnknown(0, session)

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
        compares: Sequence[Compare] = (),
        unproven_from: int | None = None,
        reserve_end: int | None = None,
        on_lost: Callable[[Ownership], None] = lambda ownership: None,
    ) -> Ownership:
        """Takes the topic if its owner key is still as `seen`, and `compares` hold; raises Conflict otherwise.

        `unproven_from`: this broker's own log ends at an unknown offset from there on; the rest is void.
        `reserve_end`: reserves the first offsets in the same transaction, because a producer waits to publish.
        """
        since, since_offset = seen.since(broker_id, start)
        owner = Owner(
            epoch=seen.epoch,
            session=session,
            broker_id=broker_id,
            start_offset=start,
            created=seen.created,
            since=since,
            since_offset=since_offset,
        )
        operations: list[Put | Delete] = [
            Put(keys.owner(topic), owner.to_bytes()),
            Put(keys.assignment(broker_id, topic), b"null"),
            Delete(keys.unassigned(topic)),
        ]
        if seen.owner is not None and seen.owner.broker_id != broker_id:
            operations.append(Delete(keys.assignment(BrokerId(seen.owner.broker_id), topic)))
        if seen.leaves is not None:
            operations.append(Put(keys.orphan(topic, seen.leaves.start), seen.leaves.to_bytes()))
            # An offset has one place. Adopting the orphan finds out again which of its offsets are void.
            operations += [Delete(keys.void(topic, first)) for first in seen.enclosed]
        if reserve_end is not None:
            operations.append(Put(keys.reserve(topic), reserve_to_bytes(reserve_end)))
        # What has its place already is not void, however much of the log was lost.
        unproven_from = None if unproven_from is None else max(unproven_from, seen.covered_end)
        if unproven_from is not None and unproven_from < start:
            why = "the end of the log was lost"
            operations.append(Put(keys.void(topic, unproven_from), void_to_bytes(start, why)))
        # A lost owner that still believes, or a write of its that comes late, may reserve and describe more until its
        # key is gone: then where we begin, and what we leave to it, is not what `seen` says.
        unchanged = [
            Compare(keys.owner(topic), seen.revision),
            Compare(keys.reserve(topic), seen.reserve_revision),
            Compare(keys.history(topic), seen.history_revision),
        ]
        revision = await metadata.transact([*unchanged, *compares], operations)
        if revision is None:
            raise Conflict(keys.owner(topic))
        log.info("topic claimed", extra={"topic": topic, "epoch": owner.epoch, "start_offset": start})
        if seen.leaves is not None:
            left = seen.leaves
            log.warning(
                "offsets wait on the disk of a lost broker",
                extra={"topic": topic, "first": left.start, "end": left.end, "broker_id": left.broker_id},
            )
        return cls(metadata, topic, owner, revision, on_lost)

    async def release(
        self,
        seal: Seal,
        marker: bytes | None,
        compares: Sequence[Compare] = (),
        also: Sequence[Put | Delete] = (),
    ) -> None:
        """Seals and releases in one transaction: then the topic has no owner, and the seal tells the next one all.

        What is to be written `also` is part of it. An answer that was lost is looked up, so that this either returns,
        or raises and the topic is still ours (OwnershipLost: another broker's). Conflict if `compares` do not hold.
        """
        released = Owner(
            epoch=self.epoch,
            session=self.session,
            broker_id=self.broker_id,
            start_offset=self.start,
            released=True,
            created=self.created,
            since=self.since,
            since_offset=self.since_offset,
        )
        operations: list[Put | Delete] = [
            Put(keys.seal(self.topic), seal.to_bytes()),
            Put(keys.owner(self.topic), released.to_bytes()),
            Delete(keys.reserve(self.topic)),
            Delete(keys.assignment(self.broker_id, self.topic)),
        ]
        if marker is not None:
            operations.append(Put(keys.unassigned(self.topic), marker))
        if await self._transact(compares, [*operations, *also]) is None and not await self._was_released():
            await self.write([])
            raise Conflict(compares[0].key if compares else keys.owner(self.topic))

    async def _was_released(self) -> bool:
        """Whether an earlier try whose answer was lost released the topic. Another broker may have claimed it since."""
        item = await self._metadata.get(keys.owner(self.topic))
        sealed = await self._metadata.get(keys.seal(self.topic))
        if item is None or sealed is None:
            return False
        owner, seal = Owner.from_bytes(item.value), Seal.from_bytes(sealed.value)
        return seal.epoch == self.epoch and (owner.epoch > self.epoch or owner.released)

    async def reassert(self) -> bool:
        """Writes the owner key anew, as it is, so that no write of ours whose answer was lost can happen any more.

        False if the topic was released in the meantime. Raises OwnershipLost if another broker has it.
        """
        revision = await self._transact([], [Put(keys.owner(self.topic), self._value)])
        if revision is not None:
            self.revision = revision
            return True
        if await self._was_released():
            return False
        raise self._lost()

    async def _transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> int | None:
        """If the topic is ours and `compares` hold. The revision may be that of a `reassert` whose answer was lost."""
        revision = await self._metadata.transact([self.compare, *compares], operations)
        if revision is None:
            item = await self._metadata.get(keys.owner(self.topic))
            if item is not None and item.value == self._value and item.revision != self.revision:
                self.revision = item.revision
                return await self._metadata.transact([self.compare, *compares], operations)
        return revision

    @property
    def compare(self) -> Compare:
        """Holds as long as the topic is ours."""
        return Compare(keys.owner(self.topic), self.revision)

    async def write(self, operations: Sequence[Put | Delete]) -> None:
        """All of them, or none and OwnershipLost."""
        if await self._transact([], operations) is None:
            raise self._lost()

    async def write_if(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> int | None:
        """All of them if `compares` hold too; the revision, or None. OwnershipLost if the topic is not ours."""
        revision = await self._transact(compares, operations)
        if revision is None:
            await self.write([])
        return revision

    async def get(self, key: str) -> Item | None:
        return await self._metadata.get(key)

    async def is_ours(self) -> bool:
        """What the owner key says now."""
        item = await self._metadata.get(keys.owner(self.topic))
        return item is not None and item.value == self._value

    def _lost(self) -> OwnershipLost:
        self._on_lost(self)
        return OwnershipLost(self.topic)
