"""What becomes of a topic's objects after they were uploaded: merged, listed in a manifest, forgotten, swept; and what
may leave the disk because they are there.

    merge       put the large object ─► swap descriptors ─► the small ones are garbage
    manifest    put the list ─► name it and delete the keys ─► the list before it is garbage
    retention   first_offset moves ─► descriptors go ─► their objects are garbage
    sweep       garbage that no reader can be using any more goes
    free        what is in the store, and old or too much, leaves the disk

Everything in between two arrows may be the last thing a process does. Each function has the tier to itself, and leaves
what is known of it true whenever it raises. A process deletes objects only after a change that it could make only as
the owner, and only such as can get no descriptor any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from itertools import pairwise
from typing import Final

from pydanube.core.history.tiers import (
    Descriptor,
    Retention,
    descriptors_to_move,
    epoch_of_name,
    first_kept,
    merge_next,
)
from pydanube.errors import InvalidObject
from pydanube.history.change import HistoryChange
from pydanube.history.manifest import store_manifest
from pydanube.history.object_builder import NotBuilt
from pydanube.history.object_maker import ObjectMaker
from pydanube.history.tier import TopicTier
from pydanube.log.catalog import SegmentFile
from pydanube.log.topic_log import TopicLog

log = logging.getLogger(__name__)

DELETED_AT_ONCE: Final = 100  # keys per transaction
SPARED_SECONDS: Final = 3600.0  # for so long an object that cannot be read is not tried again


class Maintenance:
    """The steps on one topic's objects."""

    def __init__(self, tier: TopicTier, maker: ObjectMaker | None = None) -> None:
        self._tier = tier
        self._maker = maker or ObjectMaker(tier)
        self._confirmed: set[str] = set()  # objects that were seen in the store after they were described
        self._spared: dict[str, float] = {}  # objects that cannot be merged because they cannot be read, since when

    # --- merge ------------------------------------------------------------------------------------------

    async def merge(self) -> Descriptor | None:
        """Makes one object of small neighbours; None if there are none worth it.

        Raises ObjectDamaged if one of them cannot be read; the others are merged without it next time.
        """
        tier = self._tier
        await tier.refresh_if_stale()
        now = tier.clock.elapsed()
        self._spared = {name: since for name, since in self._spared.items() if now - since < SPARED_SECONDS}
        run = merge_next(tier.objects.keyed, tier.config, spared=self._spared)
        if not run:
            return None
        merged = await self._maker.store_merged(run)
        if isinstance(merged, NotBuilt):
            if merged.part is None:
                raise InvalidObject("the merged object", merged.why)
            self._spared[run[merged.part].object_id] = tier.clock.elapsed()
            raise tier.damaged(run[merged.part], merged.why)
        await tier.apply(HistoryChange(added=[merged], replaced=run))
        return merged

    # --- manifest ---------------------------------------------------------------------------------------

    async def move_to_manifest(self) -> bool:
        """Old descriptors leave the metadata store for an object, so that keys do not grow with history."""
        tier = self._tier
        await tier.refresh_if_stale()
        count = descriptors_to_move(len(tier.objects.keyed), tier.config)
        if not count:
            return False
        objects = await tier.load_manifest()
        moved = objects.keyed[:count]
        manifest = await store_manifest(tier, [*objects.listed, *moved])
        await tier.apply(HistoryChange(listed=moved, manifest=manifest))
        return True

    # --- retention --------------------------------------------------------------------------------------

    async def retain(self, retention: Retention, now_us: int) -> int | None:
        """Forgets what is too old or too much. Returns where history begins now; None if nothing went."""
        tier = self._tier
        await tier.refresh_if_stale()
        await self._forget_expired()
        if retention.seconds is None and retention.size_bytes is None:
            return None
        objects = await tier.load_manifest()
        first = first_kept(objects[:], retention, now_us)
        if first is None or first <= tier.history.first_offset:
            return None
        await self.move_first_offset(first)
        return first

    async def move_first_offset(self, first: int) -> None:
        """History begins at `first`: that is stored, then the descriptors of whole objects below go. Their objects are
        garbage, as merged ones are: a reader of a table or a snapshot that names them has `garbage_seconds` to finish.

            the process ends                 stored               objects     what follows
            ───────────────────────────────  ───────────────────  ──────────  ────────────────────────────────────────
            before first_offset is stored    nothing              described   the next look decides anew
            stored, not answered             perhaps              –           as in `change`: written again or read anew
            before all keys are deleted      first_offset, keys   unwanted    load takes keys below first_offset for
                                                                              expired; the next look or sweep deletes
            before the snapshot is put       first_offset         garbage     the next step of the topic puts it
            before the objects are deleted   first_offset         garbage     the next owner's sweep finds them without
                                                                              a descriptor, and waits as long anew
            topic claimed by another         as it was            described   OwnershipLost; nothing was deleted
        """
        tier = self._tier
        await tier.refresh_if_stale()
        objects = len(await tier.load_manifest())
        await tier.apply(HistoryChange(first_offset=first))
        forgotten = objects - len(tier.objects)
        await self._forget_expired()
        await tier.publish_snapshot()  # soon: readers without a broker are not sent to what will be gone
        log.info("history forgotten", extra={"topic": tier.topic, "first_offset": first, "objects": forgotten})

    async def _forget_expired(self) -> None:
        """Deletes the keys of descriptors below first_offset, those too that an earlier process left."""
        tier = self._tier
        while tier.expired:
            await tier.apply(HistoryChange(expired=tier.expired[:DELETED_AT_ONCE]))

    # --- sweep ------------------------------------------------------------------------------------------

    async def sweep(self) -> list[str]:
        """Removes objects without a descriptor: of this epoch, or of an older one that is no orphan's.

        Returns their names. Only such that were seen so for some time: a reader may still be at it.
        """
        tier = self._tier
        await tier.refresh_if_stale()
        await self._forget_expired()
        described = {each.object_id for each in (await tier.load_manifest())[:]}
        described.add(tier.history.manifest or "")
        now = tier.clock.elapsed()
        seen: list[str] = []
        async for info in tier.store.list(tier.prefix):
            name = info.key.removeprefix(tier.prefix)
            epoch = epoch_of_name(name)
            if name in described or epoch is None or epoch > tier.epoch or epoch in tier.orphaned_epochs:
                continue
            seen.append(name)
        tier.garbage.only(seen, now)
        doomed = tier.garbage.older_than(tier.config.garbage_seconds, now)
        if doomed:
            await tier.fence()  # nothing else is described, and nothing that we gave up comes late
        for name in doomed:
            await tier.store.delete(tier.key(name))
            tier.garbage.discard(name)
        if doomed:
            log.info("undescribed objects removed", extra={"topic": tier.topic, "objects": len(doomed)})
        return doomed

    # --- the disk ---------------------------------------------------------------------------------------

    async def free(self, topic_log: TopicLog, now_us: int, excess_bytes: int = 0) -> int | None:
        """Lets the log drop segments that history does not want any more, or that are in the store and old or too much.

        Returns the log's new first offset; None if nothing went. A segment with a range that could not be uploaded
        stays, and what comes behind it: it may be the only copy. Of what is in the store `excess_bytes` go immediately,
        however young and few: the newest segment too, if the others are not enough.
        """
        tier = self._tier
        await tier.refresh_if_stale()
        before = 0
        if excess_bytes > 0:
            await self._end_newest(topic_log, excess_bytes)
        size = topic_log.size_bytes
        lost_from = await self._lost_from(topic_log)
        for segment, following in pairwise(list(topic_log.segments)):
            expired = segment.end_offset <= tier.history.first_offset
            due = segment.end_offset <= lost_from and (
                excess_bytes > 0 or self._is_due(segment, following, size, now_us)
            )
            if not expired and not (due and await self._is_stored(segment)):
                break
            before = segment.end_offset
            size -= segment.end
            excess_bytes -= segment.end
        if not before:
            return None
        # Once begun it is finished, also if the caller is cancelled: closing the log waits for it.
        freeing = asyncio.ensure_future(topic_log.truncate(before))
        freeing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(freeing)

    async def _lost_from(self, topic_log: TopicLog) -> float:
        """Where the first range begins that recovery found damaged and the store has not; infinity for none.

        A segment that could not even be opened is not among the log's: without this, one behind it would go, and with
        it all that is known of the damage.
        """
        objects = await self._tier.load_manifest()
        first_offset = self._tier.history.first_offset
        damaged = [(max(each.first, first_offset), each.end) for each in topic_log.recovered.damage if each.end]
        return min((first for place in damaged for first, _ in objects.missing(*place)), default=math.inf)

    async def _end_newest(self, topic_log: TopicLog, excess_bytes: int) -> None:
        """The newest segment stays on the disk even if the store has its messages; so it is closed if it has to go."""
        newest = topic_log.segments[-1] if topic_log.segments else None
        if newest is None or newest.end_offset == newest.first_offset:
            return
        if topic_log.size_bytes - newest.end < excess_bytes and await self._is_stored(newest):
            await topic_log.roll()

    def _is_due(self, segment: SegmentFile, following: SegmentFile, size: int, now_us: int) -> bool:
        local = self._tier.config.local
        too_old = local.seconds is not None and following.header.append_time + local.seconds * 1e6 <= now_us
        return too_old or (local.size_bytes is not None and size > local.size_bytes)

    async def _is_stored(self, segment: SegmentFile) -> bool:
        """Whether the store has every object that holds a part of the segment. It is asked once per object."""
        tier = self._tier
        objects = await tier.load_manifest()
        place = max(segment.first_offset, tier.history.first_offset)
        while place < segment.end_offset:
            described = objects.find(place)
            if described is None:
                return False
            if described.object_id not in self._confirmed and not await self._confirm(described):
                return False
            place = described.end
        return True

    async def _confirm(self, described: Descriptor) -> bool:
        tier = self._tier
        try:
            info = await tier.store.head(tier.key(described.object_id))
            found = f"{info.size_bytes} bytes long"
            confirmed = info.size_bytes == described.size
        except FileNotFoundError:
            found, confirmed = "missing", False
        if confirmed:
            self._confirmed &= {each.object_id for each in tier.objects}
            self._confirmed.add(described.object_id)
        else:
            log.error(
                "described object is not in the store",
                extra={"topic": tier.topic, "object": described.object_id, "found": found},
            )
        return confirmed
