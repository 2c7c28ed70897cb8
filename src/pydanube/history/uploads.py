"""How committed batches of one topic become objects with descriptors: what waits, what is read of it, what cannot be.

log ─► waiting range ─► read ─► make and store (object_maker.py) ─► Change: descriptor, sessions ─► TopicTier.apply
                         └─ damaged ─► Change: void, before anything behind it is described
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, NamedTuple

from pydanube.core.history.tiers import RAW, Descriptor, Objects
from pydanube.errors import LogDamaged, OffsetOutOfRange
from pydanube.formats.batch import Batch, cut
from pydanube.history.change import HistoryChange, Void
from pydanube.history.object_maker import ObjectMaker
from pydanube.history.tier import Prepared, TopicTier
from pydanube.log.topic_log import TopicLog

log = logging.getLogger(__name__)

# What is read at a time, and checked on the event loop: 4 MiB of small batches took it 20 ms.
UPLOAD_READ_BYTES: Final = 256 * 1024
BATCHES_MAX: Final = 10_000  # per object: each has an entry in the footer, and all are freed together, in 3 ms
FEW_BATCHES: Final = 256


class Last(NamedTuple):
    """An object that is stored, and the change that describes it: the caller makes it, with what else it writes."""

    descriptor: Descriptor
    change: Prepared


class TopicUploads:
    """The uploads of one topic. One task at a time."""

    def __init__(self, tier: TopicTier) -> None:
        self.tier = tier
        self.maker = ObjectMaker(tier)
        self.unreadable: dict[tuple[int, int], str] = {}  # ranges of the log that cannot be uploaded, and why
        self._recorded: set[tuple[int, int]] = set()  # ranges of the log that are lost, and recorded as such

    def waiting(self, topic_log: TopicLog, objects: Objects | None = None) -> tuple[int, int] | None:
        """The lowest range that the log holds and no object does; with other objects than there are, if given."""
        objects = self.tier.objects if objects is None else objects
        known_from = self.tier.known_from
        for first, end in topic_log.held():
            for gap in objects.missing(max(first, known_from), end):
                readable = self._without_unreadable(gap)
                if readable is not None:
                    return readable
        return None

    def _without_unreadable(self, gap: tuple[int, int]) -> tuple[int, int] | None:
        first, end = gap
        for bad_first, bad_end in sorted([*self.unreadable, *self.tier.withheld]):
            if bad_first <= first < bad_end:
                first = bad_end
            elif first < bad_first < end:
                end = bad_first
        return (first, end) if first < end else None

    async def upload(self, topic_log: TopicLog, *, urgent: bool = False) -> Descriptor | None:
        """One object from what waits; None if nothing does. A failure leaves nothing that readers would use.

        `urgent` if clients wait for it.
        """
        found = await self._upload(topic_log, urgent=urgent, is_last=False)
        assert not isinstance(found, Last)
        return found

    async def upload_last(self, topic_log: TopicLog) -> Descriptor | Last | None:
        """The same. The object behind which nothing waits is left to the caller to describe, with what else it writes;
        until `described` is called, or it is given up, what is known of the topic is stale.
        """
        return await self._upload(topic_log, urgent=True, is_last=True)

    def described(self, last: Last) -> None:
        """The caller of `upload_last` has described it; nothing changes here after this."""
        self.tier.applied(last.change)
        self._tell_raw(last.descriptor)

    async def _upload(self, topic_log: TopicLog, *, urgent: bool, is_last: bool) -> Descriptor | Last | None:
        tier = self.tier
        await tier.refresh_if_stale()
        batches: list[Batch] = []
        while not batches:
            found = self.waiting(topic_log)
            if found is None:
                return None
            unreadable = len(self.unreadable)
            batches = await self._read(topic_log, *found)
            if not batches and len(self.unreadable) == unreadable:
                return None
        await self.record_lost_ranges(topic_log)
        try:
            described = await self.maker.store_batches(batches, urgent)
            stored = [each for each in batches if each.header.base_offset < described.end]
            if len(stored) > FEW_BATCHES:
                sessions = await tier.work.run(lambda: tier.sessions_with(stored))
            else:  # clients of a topic that moves wait for this: no way to a thread and back
                sessions = tier.sessions_with(stored)
            change = HistoryChange(added=[described], sessions=sessions)
            if is_last and self.waiting(topic_log, tier.objects.with_added(described)) is None:
                prepared = tier.prepare(change)
                self.maker.give_up_name()  # the caller may give it up
                return Last(described, prepared)
            await tier.apply(change)
        except BaseException:
            self.maker.give_up_name()  # the store may have it all the same, or get it later
            raise
        self._tell_raw(described)
        return described

    def _tell_raw(self, described: Descriptor) -> None:
        if described.format == RAW:
            log.error("range stored raw", extra={"topic": self.tier.topic, "object": described.object_id})

    async def record_lost_ranges(self, topic_log: TopicLog) -> None:
        """What went bad on this disk before it was uploaded is recorded as void: it is lost, no reader waits for it.

        Before anything behind it is described: gaps must not be left between objects, where the next
        owner would not look for them.
        """
        damaged = {(each.first, each.end) for each in topic_log.recovered.damage if each.end is not None}
        damaged = {*damaged, *self.unreadable} - self._recorded
        if not damaged:
            return
        tier = self.tier
        await tier.refresh_if_stale()
        objects = await tier.load_manifest()
        orphans, voids = await tier.gaps()
        lost = [
            part
            for place in sorted(damaged)
            for first, end in objects.missing(max(place[0], tier.history.first_offset), place[1])
            for part in _without(first, end, sorted([*orphans, *voids]))
        ]
        if lost:
            why = f"damaged on the disk of its owner in epoch {tier.epoch} before it was uploaded"
            await tier.apply(HistoryChange(voids=[Void(first, end, why) for first, end in lost], appears=True))
            log.error("acknowledged messages are lost", extra={"topic": tier.topic, "offsets": lost})
        self._recorded |= damaged

    async def _read(self, topic_log: TopicLog, first: int, end: int) -> list[Batch]:
        """Whole batches of [first, end), up to the size of an object."""
        tier = self.tier
        reader = topic_log.reader(first)
        batches: list[Batch] = []
        size = 0
        while reader.offset < end and size < tier.config.object_bytes and len(batches) < BATCHES_MAX:
            try:
                for batch in await reader.read(UPLOAD_READ_BYTES):
                    if batch.header.base_offset >= end:
                        break
                    size += batch.header.uncompressed_length
                    batches.append(batch)
                await tier.clock.sleep(0)  # what is in memory is read without waiting, and others have work to do
            except OffsetOutOfRange:
                break  # retention was faster
            except LogDamaged as damage:
                if not batches:
                    bad = (max(damage.first, first), min(damage.end or end, end))
                    self.unreadable[bad] = str(damage)
                    log.error("range not uploaded", extra={"topic": tier.topic, "why": str(damage)})
                break
        if batches and batches[0].header.base_offset < first:
            batches[0] = cut(batches[0], first, batches[0].header.end_offset)
        if batches and batches[-1].header.end_offset > end:
            batches[-1] = cut(batches[-1], batches[-1].header.base_offset, end)
        return batches


def _without(first: int, end: int, known: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of [first, end) outside of `known`, which is sorted."""
    parts = []
    for start, stop in known:
        if first < start < end:
            parts.append((first, start))
        if start < end:
            first = max(first, stop)
    if first < end:
        parts.append((first, end))
    return parts
