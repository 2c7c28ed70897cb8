"""What becomes of a topic's objects after they were uploaded: merged, listed in a manifest, forgotten, swept; and what
may leave the disk because they are there.

    merge       put the large object ─► swap descriptors ─► the small ones are garbage
    manifest    put the list ─► name it and delete the keys ─► the list before it is garbage
    retention   first_offset moves ─► descriptors go ─► their objects are garbage
    sweep       garbage that nobody can be reading any more goes
    free        what is in the store, and old or too much, leaves the disk

Everything in between two arrows may be the last thing a process does. Each function takes a tier that nobody else works
on, and leaves what is known of it true whenever it raises. A process deletes objects only after a change that it could
make only as the owner, and only such as nobody can describe any more.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Final

from crc32c import crc32c

from pydanube.core import keys
from pydanube.core.history.tiers import (
    Descriptor,
    Retention,
    descriptors_to_move,
    epoch_of_name,
    first_kept,
    manifest_name,
    manifest_to_bytes,
    merge_next,
    object_name,
)
from pydanube.errors import InvalidObject, ObjectDamaged
from pydanube.formats.parquet import check_bytes
from pydanube.history.object_builder import Unreadable, merge, merge_and_store, why_unreadable
from pydanube.history.tier import APART_BYTES, TopicTier
from pydanube.log.catalog import SegmentFile
from pydanube.log.topic_log import TopicLog
from pydanube.ports import Buffer, Delete, Elsewhere, Put

log = logging.getLogger(__name__)

DELETED_AT_ONCE: Final = 100  # keys per transaction
SPARED_SECONDS: Final = 3600.0  # for so long an object that cannot be read is not tried again


class Tidy:
    """The steps on one topic's objects."""

    def __init__(self, tier: TopicTier) -> None:
        self._tier = tier
        self._merges = 0
        self._manifests = 0
        self._confirmed: set[str] = set()  # objects that were seen in the store after they were described
        self._spared: dict[str, float] = {}  # objects that cannot be merged because they cannot be read, since when

    # --- merge ------------------------------------------------------------------------------------------

    async def merge(self) -> Descriptor | None:
        """Makes one object of small neighbours; None if there are none worth it.

        Raises ObjectDamaged if one of them cannot be read; the others are merged without it next time.
        """
        tier = self._tier
        await tier.make_sure()
        now = tier.clock.elapsed()
        self._spared = {name: since for name, since in self._spared.items() if now - since < SPARED_SECONDS}
        run = merge_next(tier.objects.keyed, tier.config, spared=self._spared)
        if not run:
            return None
        is_large = sum(each.size for each in run) >= APART_BYTES
        elsewhere = await tier.elsewhere() if is_large else None
        merged = await self._merge_apart(elsewhere, run) if elsewhere is not None else None
        if merged is None:
            merged = await self._merge_here(run, is_large)
        if (merged.start_offset, merged.end) != (run[0].start_offset, run[-1].end):
            raise InvalidObject("the merged object", f"it holds {merged.start_offset} up to {merged.end}")
        gone = [Delete(keys.storage_object(tier.topic, each.start_offset)) for each in run[1:]]
        await tier.change([Put(keys.storage_object(tier.topic, merged.start_offset), merged.to_bytes()), *gone])
        tier.objects = tier.objects.with_replaced(run, merged)
        tier.garbage.pop(merged.object_id, None)
        tier.garbage.update({each.object_id: tier.clock.elapsed() for each in run})
        return merged

    async def _merge_here(self, run: Sequence[Descriptor], is_large: bool) -> Descriptor:
        tier = self._tier
        parts = [(memoryview(await self._whole(each)), each.footer_crc) for each in run]
        merging = partial(merge, tier.topic, tier.epoch, parts)
        made = await (tier.work.run_apart(merging) if is_large else tier.work.run(merging))
        return await tier.store_object(self._merged_name(run), made)

    async def _merge_apart(self, elsewhere: Elsewhere, run: Sequence[Descriptor]) -> Descriptor | None:
        """By a process that may wait, and reads and stores them itself. None if it is to be done here."""
        tier = self._tier
        name = self._merged_name(run)
        tier.garbage[name] = tier.clock.elapsed()  # until it is described
        parts = [(tier.key(each.object_id), each.footer_crc) for each in run]
        found = await tier.apart(partial(merge_and_store, tier.key(name), tier.topic, tier.epoch, parts, elsewhere))
        if found is None:
            return None
        if isinstance(found, Unreadable):
            raise self._spare(run[found.number], found.why)
        return tier.describe(name, *found)

    def _merged_name(self, run: Sequence[Descriptor]) -> str:
        self._merges += 1
        return object_name(run[0].start_offset, run[-1].end - 1, self._tier.epoch, merged=self._merges)

    async def _whole(self, described: Descriptor) -> Buffer:
        """An object that is to be merged, every byte compared with its checksum."""
        tier = self._tier
        try:
            data = await tier.store.get(tier.key(described.object_id))
            await tier.work.run(lambda: check_bytes(data, described.footer_crc))
            return data
        except (FileNotFoundError, InvalidObject) as error:
            raise self._spare(described, why_unreadable(error)) from error

    def _spare(self, described: Descriptor, why: str) -> ObjectDamaged:
        self._spared[described.object_id] = self._tier.clock.elapsed()
        return self._tier.damaged(described, why)

    # --- manifest ---------------------------------------------------------------------------------------

    async def move_to_manifest(self) -> bool:
        """Old descriptors leave the metadata store for an object, so that keys do not grow with history."""
        tier = self._tier
        await tier.make_sure()
        count = descriptors_to_move(len(tier.objects.keyed), tier.config)
        if not count:
            return False
        objects = await tier.know_all()
        moved = objects.keyed[:count]
        listed = sorted([*objects.listed, *moved], key=lambda each: each.start_offset)
        self._manifests += 1
        name = manifest_name(tier.epoch, self._manifests)
        key, data = tier.key(name), manifest_to_bytes(listed)
        tier.garbage[name] = tier.clock.elapsed()
        await tier.store.put(key, [data], create=True)
        try:
            stored = await tier.store.get(key)
        except FileNotFoundError:
            raise InvalidObject(key, "the store took it and does not have it") from None
        if stored != data:
            raise InvalidObject(key, "what the store has is not what it was given")
        before = tier.history.manifest
        history = replace(tier.history, manifest=name, manifest_end=listed[-1].end, manifest_crc=crc32c(data))
        await tier.change([Delete(keys.storage_object(tier.topic, each.start_offset)) for each in moved], history)
        tier.objects = tier.objects.with_listed(moved)
        tier.garbage.pop(name, None)
        if before is not None:
            tier.garbage[before] = tier.clock.elapsed()
        return True

    # --- retention --------------------------------------------------------------------------------------

    async def retain(self, retention: Retention, now_us: int) -> int | None:
        """Forgets what is too old or too much. Returns where history begins now; None if nothing went."""
        tier = self._tier
        await tier.make_sure()
        await self._forget_expired()
        if retention.seconds is None and retention.size_bytes is None:
            return None
        objects = await tier.know_all()
        first = first_kept(objects[:], retention, now_us)
        if first is None or first <= tier.history.first_offset:
            return None
        await self.move_first_offset(first)
        return first

    async def move_first_offset(self, first: int) -> None:
        """History begins at `first`: that is stored, then the descriptors of whole objects below go. Their objects are
        garbage, as merged ones are: whoever reads a table or a snapshot that names them has `garbage_seconds` to end.

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
        await tier.make_sure()
        objects = await tier.know_all()
        kept = objects.from_offset(first)
        doomed = objects[: len(objects) - len(kept)]
        names = [each.object_id for each in doomed]
        history = replace(tier.history, first_offset=first)
        if not kept.listed and history.manifest is not None:
            names.append(history.manifest)
            history = replace(history, manifest=None, manifest_end=0, manifest_crc=0)
        await tier.change([], history)
        tier.objects = kept
        listed = {each.object_id for each in objects.listed}
        tier.expired += [each for each in doomed if each.object_id not in listed]
        tier.garbage.update(dict.fromkeys(names, tier.clock.elapsed()))
        await self._forget_expired()
        await tier.publish_snapshot()  # soon: readers without a broker are not sent to what will be gone
        log.info("history forgotten", extra={"topic": tier.topic, "first_offset": first, "objects": len(doomed)})

    async def _forget_expired(self) -> None:
        """Deletes the keys of descriptors below first_offset, those too that an earlier process left."""
        tier = self._tier
        while tier.expired:
            chosen = tier.expired[:DELETED_AT_ONCE]
            await tier.change([Delete(keys.storage_object(tier.topic, each.start_offset)) for each in chosen])
            del tier.expired[: len(chosen)]

    # --- sweep ------------------------------------------------------------------------------------------

    async def sweep(self) -> list[str]:
        """Removes objects that nobody describes: of this epoch, or of an older one that is no orphan's.

        Returns their names. Only such that were seen so for some time: a reader may still be at it.
        """
        tier = self._tier
        await tier.make_sure()
        await self._forget_expired()
        described = {each.object_id for each in (await tier.know_all())[:]}
        described.add(tier.history.manifest or "")
        now = tier.clock.elapsed()
        seen: dict[str, float] = {}
        async for info in tier.store.list(tier.prefix):
            name = info.key.removeprefix(tier.prefix)
            epoch = epoch_of_name(name)
            if name in described or epoch is None or epoch > tier.epoch or epoch in tier.orphaned_epochs:
                continue
            seen[name] = tier.garbage.get(name, now)
        tier.garbage = seen
        doomed = [name for name, since in seen.items() if now - since >= tier.config.garbage_seconds]
        if doomed:
            await tier.fence()  # nothing else is described, and nothing that we gave up comes late
        for name in doomed:
            await tier.store.delete(tier.key(name))
            del tier.garbage[name]
        if doomed:
            log.info("undescribed objects removed", extra={"topic": tier.topic, "objects": len(doomed)})
        return doomed

    # --- the disk ---------------------------------------------------------------------------------------

    async def free(self, topic_log: TopicLog, now_us: int, excess_bytes: int = 0) -> int | None:
        """Lets the log drop segments that history does not want any more, or that are in the store and old or too much.

        Returns the log's new first offset; None if nothing went. A segment with a range that could not be uploaded
        stays, and what comes behind it: it may be the only copy. Of what is in the store `excess_bytes` go at once, be
        they young and few: the newest segment too, if the others are not enough.
        """
        tier = self._tier
        await tier.make_sure()
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
        # Once begun it is finished, whoever gives up here: closing the log waits for it.
        freeing = asyncio.ensure_future(topic_log.truncate(before))
        freeing.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(freeing)

    async def _lost_from(self, topic_log: TopicLog) -> float:
        """Where the first range begins that recovery found damaged and the store has not; infinity for none.

        A segment that could not even be opened is not among the log's: without this, one behind it would go, and with
        it all that is known of the damage.
        """
        objects = await self._tier.know_all()
        first_offset = self._tier.history.first_offset
        damaged = [(max(each.first, first_offset), each.end) for each in topic_log.recovered.damage if each.end]
        return min((first for place in damaged for first, _ in objects.missing(*place)), default=math.inf)

    async def _end_newest(self, topic_log: TopicLog, excess_bytes: int) -> None:
        """The newest segment stays on the disk, whoever has its messages; so it is ended if it has to go."""
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
        objects = await tier.know_all()
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
