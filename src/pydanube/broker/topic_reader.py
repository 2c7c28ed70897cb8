"""How a reliable topic is read: from the log if it has an offset, else from the object store, never from an orphan.

    offset ─► retained? ─► in an orphan? ─► log ─► object store ─► OffsetOutOfRange: where to read on

Messages that were decoded, and the last piece that was read, are kept for a while for the next reader.
"""

from __future__ import annotations

import asyncio
import sys
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Final

from pydanube.broker.base_subscription import Services
from pydanube.broker.base_topic import BaseTopic
from pydanube.broker.outbox import cost_bytes
from pydanube.broker.ownership import Ownership
from pydanube.broker.subscription import Subscription
from pydanube.core.history.ownership import Orphan
from pydanube.core.names import TopicName
from pydanube.core.policies import TopicPolicy
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.errors import DanubeError, LogDamaged, OffsetOutOfRange
from pydanube.formats.batch import Batch, Envelope, cut, delivery_times, messages, routing
from pydanube.history.served import Storage
from pydanube.history.tier_state import read_gaps
from pydanube.log.wal import TopicLog
from pydanube.ports import MetadataStore
from pydanube.telemetry import Telemetry

CLOUD_READERS_MAX: Final = 1_000
_READ_BYTES: Final = 256 * 1024


class TopicReader(BaseTopic[Subscription]):
    """A topic's log and history, as one sequence of offsets."""

    def __init__(
        self,
        name: TopicName,
        topic_log: TopicLog,
        ownership: Ownership,
        metadata: MetadataStore,
        services: Services,
        telemetry: Telemetry,
        policy: TopicPolicy,
        schema: TopicSchema,
        storage: Storage | None,
        orphans: Sequence[Orphan],
        own_policy: Mapping[str, object] | None,
    ) -> None:
        super().__init__(name, ownership, metadata, services, telemetry, policy, schema, own_policy)
        self.log = topic_log
        self.storage = storage
        self.orphans = list(orphans)
        if storage is not None:
            storage.tier.orphaned(self.orphans)
        self._count_orphans()
        self._kept = services.kept
        self._me = object()  # of this topic in what all keep
        self._cloud_ends: set[int] = set()  # where those stand who read history; only counted

    @property
    def head(self) -> int:
        return self.log.head

    @property
    def first_offset(self) -> int:
        """The first offset that can still be read, from whichever tier."""
        kept = self.log.first_offset
        if self.storage is None:
            return kept
        tier = self.storage.tier
        described = tier.first_offset
        first = min(kept, *(each.start for each in self.orphans), kept if described is None else described)
        return max(first, tier.history.first_offset)

    @property
    def retained_from(self) -> int:
        """Retention has removed everything below."""
        return self.storage.tier.history.first_offset if self.storage is not None else 0

    @property
    def backlog_messages(self) -> int:
        return max((each.get_lag_info().lag_messages for each in self.subscriptions.values()), default=0)

    async def wait_beyond(self, offset: int, seconds: float) -> None:
        """Returns when something at `offset` is committed, the topic closes, or the time is over."""
        waiting = asyncio.ensure_future(self.log.wait_beyond(offset))
        sleeping = asyncio.ensure_future(self._services.clock.sleep(seconds))
        try:
            await asyncio.wait({waiting, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            sleeping.cancel()

    def orphan_at(self, offset: int) -> Orphan | None:
        return next((each for each in self.orphans if each.start <= offset < each.end), None)

    def _count_orphans(self) -> None:
        self.metrics.orphan_ranges.set(len(self.orphans))
        self.metrics.orphan_messages.set(sum(each.end - each.start for each in self.orphans))

    # --- reading ------------------------------------------------------------------------------------

    async def rows(self, first: int, end: int, bytes_max: int | None = None) -> list[tuple[int, Envelope]]:
        """Offsets and messages of [first, end), as far as they are committed, until they have `bytes_max`."""
        found: list[tuple[int, Envelope]] = []
        offset, free_bytes = first, sys.maxsize if bytes_max is None else bytes_max
        while offset < end:
            batches = await self._read(offset, bool(found))
            if not batches:
                break
            for batch in batches:
                base, upto = batch.header.base_offset, min(end, batch.header.end_offset)
                decoded = self._decode(batch)
                for at in range(max(offset, base), upto):
                    found.append((at, decoded[at - base]))
                    free_bytes -= cost_bytes(decoded[at - base])
                    if free_bytes <= 0:
                        return found
                offset = upto
                if offset >= end:
                    break
        return found

    async def batches(self, first: int, end: int, bytes_max: int) -> list[Batch]:
        """Stored batches from the one that holds `first` on, none beginning at or after `end`."""
        found = await self._stored(first, bytes_max, end)
        return [batch for batch in found if batch.header.base_offset < end]

    async def row_keys(self, first: int, end: int) -> list[tuple[int, str, int | None]]:
        """Offsets, routing keys, and before when not to deliver; without a key the producer's name counts."""
        found: list[tuple[int, str, int | None]] = []
        offset = first
        while offset < end:
            batches = await self._read(offset, bool(found))
            if not batches:
                break
            for batch in batches:
                base, upto = batch.header.base_offset, min(end, batch.header.end_offset)
                routing_keys, producers = routing(batch)
                times = delivery_times(batch)
                for at in range(max(offset, base), upto):
                    key = routing_keys[at - base]
                    time = None if times is None else times[at - base]
                    found.append((at, key if key is not None else producers[at - base] or "", time))
                offset = upto
        return found

    async def _read(self, offset: int, something: bool) -> list[Batch]:
        """As the log reads. On a gap or an error, [] if the caller has `something` already: its next call raises."""
        me = self._me  # `_forget_read` may come in between
        piece: list[Batch] = self._kept.get(me) or []
        place = bisect_right(piece, offset, key=lambda batch: batch.header.end_offset)
        if place < len(piece) and piece[place].header.base_offset <= offset:
            return piece[place:]  # a small window asks for the same piece of a file again and again
        try:
            piece = await self._stored(offset, _READ_BYTES)
            self._kept.put(me, piece, sum(batch.header.size_bytes for batch in piece))
            return piece
        except DanubeError:
            if something:
                return []
            raise

    async def _stored(self, offset: int, bytes_max: int, end: int | None = None) -> list[Batch]:
        """Batches from the one that holds `offset` on, from the log if it has it and from the cloud tier else.

        Not all that begin at or behind `end` need be found: a reader of a few batches does not look at all in memory.
        """
        if offset < self.retained_from:  # what lies below may still be on the disk
            raise OffsetOutOfRange(self.name, offset, self.first_offset, self.head)
        if (orphan := self.orphan_at(offset)) is not None:
            # This disk may have it. Which of it producers sent again, and must stay hidden, is not known yet.
            raise OffsetOutOfRange(self.name, offset, orphan.end, self.head)
        if (elsewhere := await self._in_the_store(offset, bytes_max)) is not None:
            return elsewhere
        try:
            found = self._without_others(await self.log.read(offset, bytes_max=bytes_max, end=end))
            if offset in self._cloud_ends:  # where a reader had come to the end of what the cloud tier has
                self._cloud_ends.discard(offset)
                self._telemetry.wal.handoffs.inc()
            return found
        except (OffsetOutOfRange, LogDamaged) as error:
            if self.storage is None:
                raise
            stored = await self.storage.reader.read(self.storage.tier, offset, bytes_max)
            if stored is not None:
                self._count_cloud_read(offset, stored)
                return stored
            if isinstance(error, LogDamaged):
                given_up = next((end for first, end in (await self.gaps())[1] if first <= offset < end), None)
                if given_up is None:
                    raise
                raise OffsetOutOfRange(self.name, offset, given_up, self.head) from None
            described = await self.storage.tier.next_after(offset)
            following = error.first if described is None else min(error.first, described)
            # What a lost owner may have is no gap: a reader that skips this gap must not skip that too.
            following = min([following, *(each.start for each in self.orphans if each.start > offset)])
            raise OffsetOutOfRange(self.name, offset, following, self.head) from None

    async def _in_the_store(self, offset: int, bytes_max: int) -> list[Batch] | None:
        """What files of lost epochs have is read as it is in the store: marked, without what was sent again, and
        erased if it was. They stay until all of it is rescued, and until what the store has is known. None: the store
        has nothing of it.
        """
        if self.storage is None or not any(first <= offset < end for first, end in self._lost_here()):
            return None
        stored = await self.storage.reader.read(self.storage.tier, offset, bytes_max)
        if stored is not None:
            self._count_cloud_read(offset, stored)
            return stored
        void_end = next((end for first, end in (await self.gaps())[1] if first <= offset < end), None)
        if void_end is not None:
            raise OffsetOutOfRange(self.name, offset, void_end, self.head)
        return None

    def _lost_here(self) -> list[tuple[int, int]]:
        """What this disk has of lost epochs: below the rest of their orphan, and from before others had the topic."""
        segments = self.log.segments
        if not self.orphans and not (segments and segments[0].header.epoch < self.ownership.since):
            return []
        partly_rescued = [
            (segment.first_offset, orphan.start)
            for orphan in self.orphans
            for segment in self.log.lost_segments(orphan.epoch, orphan.start)
            if segment.first_offset < orphan.start
        ]
        older = takewhile(lambda segment: segment.header.epoch < self.ownership.since, segments)
        return [*partly_rescued, *((segment.first_offset, segment.end_offset) for segment in older)]

    def _without_others(self, batches: list[Batch]) -> list[Batch]:
        """Those before the first orphan that this disk has, too, and before what the store may have of lost epochs."""
        lost = self._lost_here()
        if not self.orphans and not lost:
            return batches
        for place, batch in enumerate(batches):
            first, end = batch.header.base_offset, batch.header.end_offset
            if any(each.start < end and first < each.end for each in self.orphans):
                start = min(each.start for each in self.orphans if each.end > first)
                return [*batches[:place], *([cut(batch, first, start)] if first < start else [])]
            if place and any(start <= first < lost_end for start, lost_end in lost):
                return batches[:place]
        return batches

    def _count_cloud_read(self, offset: int, batches: Sequence[Batch]) -> None:
        self._telemetry.wal.reads["cloud"] += 1
        self._cloud_ends.discard(offset)
        if batches and len(self._cloud_ends) < CLOUD_READERS_MAX:
            self._cloud_ends.add(batches[-1].header.end_offset)

    async def gaps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Orphans and voids, as [first, end): offsets that no object and no log here holds."""
        return await read_gaps(self._metadata, self.name)

    async def peek(self, offset: int, count: int) -> list[tuple[int, Envelope]]:
        return await self.rows(offset, min(offset + count, self.head))

    async def offset_at(self, time_us: int) -> int:
        """The smallest kept offset that was published at or after `time_us`; the head if there is none."""
        if self.storage is None:
            return await self.log.offset_at(time_us)
        tier, reader = self.storage.tier, self.storage.reader
        while True:
            held, kept_from = self.log.held(), self.log.first_offset
            try:
                in_log = await self.log.offset_at(time_us, tier.history.first_offset)
                in_cloud = await reader.offset_at(tier, time_us, held)
            except (OffsetOutOfRange, LogDamaged):  # freed in the meantime, or damaged: the cloud tier may have it all
                in_cloud = await reader.offset_at(tier, time_us)
                if in_cloud is not None:
                    return in_cloud
                in_log = await self.log.offset_at(time_us, tier.objects.end)
            if self.log.first_offset == kept_from:  # else what was passed over in the cloud may have left the log
                return in_log if in_cloud is None else min(in_log, in_cloud)

    def _forget_read(self) -> None:
        """What is stored has changed: nothing that was read before is to be given out again."""
        self._kept.forget(self._me)
        self._me = object()

    def _decode(self, batch: Batch) -> list[Envelope]:
        # A batch of the log and one that the cloud tier made may begin at the same offset and be of different length.
        # An erased one has another body.
        key = (self._me, batch.header.base_offset, batch.header.rows, batch.header.body_crc)
        decoded: list[Envelope] | None = self._kept.get(key)
        if decoded is None:
            decoded = messages(batch)
            self._kept.put(key, decoded, sum(map(cost_bytes, decoded)))
        return decoded
