"""Bringing back what a lost owner acknowledged: the returned broker stores it, the owner adopts it.

    returned broker (drained or not)                     owner of the topic
                                                         has an orphan: asks its broker for it, in the rescue key
    rescue key names us
      └─► read batches ─► raw objects ─► rescue key ──►  reads them, drops what was resent since, marks the rest,
                                                         writes objects, descriptors and voids, removes orphan and key,
    orphan is gone: our files go  ◄───────────────────── tells its subscriptions: late, not lost

Only the owner writes what a topic's history is. Both sides may die between any two steps: the orphan stays until
the one transaction that replaces it, and doing a step again makes another object without a descriptor.

An orphan may be as large as a disk: it is brought and adopted object by object, and no more than one is in memory. Each
is adopted in transactions of its own, which leave a smaller orphan, and the topic's uploads go on in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from pydanube.core import keys
from pydanube.core.commit.sessions import Sessions
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.history.ownership import Orphan
from pydanube.core.history.rescue import Brought, Numbered, first_resent, runs, wanted_of, wanted_to_bytes, was_resent
from pydanube.core.history.tiers import Descriptor, object_name, rescue_name
from pydanube.core.names import BrokerId, TopicName
from pydanube.core.units import MIB
from pydanube.errors import DanubeError, InvalidObject, LogDamaged, OffsetOutOfRange, OwnershipLost
from pydanube.formats.batch import Batch, cut
from pydanube.formats.parquet import encode_raw, read_raw
from pydanube.history.change import HistoryChange, Void
from pydanube.history.object_builder import Recipe
from pydanube.history.served import ServedTopic, ServedTopics, keeps_history
from pydanube.history.side_by_side import gather_bounded
from pydanube.history.tier import TopicTier, recall
from pydanube.history.tier_state import topic_prefix
from pydanube.history.upload_state import UploadState
from pydanube.log.wal import ClosedLog, TopicLog
from pydanube.ports import Clock, Compare, Delete, Item, MetadataStore, ObjectStore, Put, Work

log = logging.getLogger(__name__)

RESCUE_POLL_SECONDS: Final = 5.0
OBJECT_BYTES: Final = 16 * MIB
RESCUES_AT_ONCE: Final = 4  # topics whose orphans are adopted side by side, and lost epochs that are brought
ADOPTED_ALONE_BYTES: Final = 4 * MIB  # larger objects are adopted one at a time: in memory they are several times this
RESCUE_READ_BYTES: Final = 4 * MIB
READ_BETWEEN_GROUPS: Final = 1000  # offsets, while no messages are committed
RUNS_MAX: Final = 30  # adopted in one transaction: an object and a void each
RESCUED: Final = "x-danube-rescued"


class Rescuer:
    """Looks every few seconds for what it can bring, and for what others brought to topics of ours."""

    def __init__(
        self,
        broker_id: BrokerId,
        topics: ServedTopics,
        metadata: MetadataStore,
        store: ObjectStore,
        clock: Clock,
        work: Work,
    ) -> None:
        self._broker_id = broker_id
        self._topics = topics
        self._metadata = metadata
        self._store = store
        self._clock = clock
        self._work = work
        self._attempts = 0
        self._said: dict[str, str] = {}
        self._brought: set[tuple[TopicName, int]] = set()  # lost epochs on this disk that the store has, too
        self._adopted: dict[tuple[TopicName, int], tuple[Brought, int]] = {}  # how many objects of an orphan are done
        self._waiting: set[tuple[TopicName, int]] = set()  # orphans with sessions, that wait for newer ones
        self._at_once = asyncio.Semaphore(RESCUES_AT_ONCE)
        self._one_large = asyncio.Semaphore(1)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Looks every few seconds until cancelled. Long work runs in a task per topic: the others do not wait."""
        try:
            while True:
                await self._clock.sleep(RESCUE_POLL_SECONDS)
                for topic in self._topics.loaded:
                    if keeps_history(topic) and topic.orphans:
                        self._start(topic.name, self._adopt_in_turn(topic))
                self._start("disk", self._bring_all())
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:  # gathering none asks for a loop, and a simulated process that was killed has none left
                await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, what: str, step: Coroutine[Any, Any, None]) -> None:
        if what in self._tasks:
            step.close()
            return
        task = asyncio.create_task(self._try(what, step), name=f"rescue {what}")
        self._tasks[what] = task
        task.add_done_callback(lambda ended: self._ended(what, ended))

    def _ended(self, what: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(what, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug that one topic brings out. The others are rescued, and this one is tried again.
            log.error("rescue failed", extra={"what": what}, exc_info=error)

    async def _adopt_in_turn(self, topic: ServedTopic) -> None:
        async with self._at_once:
            await self._adopt_all(topic)

    async def _try(self, what: str, step: Awaitable[None]) -> None:
        try:
            await step
            self._said.pop(what, None)
        except OwnershipLost:
            pass  # its new owner adopts
        except (DanubeError, FileNotFoundError, ValueError) as error:  # also files that were just being removed
            if self._said.get(what) != str(error):
                log.warning("rescue delayed", extra={"what": what, "why": str(error)})
            self._said[what] = str(error)

    # --- bringing -------------------------------------------------------------------------------------------

    async def _bring_all(self) -> None:
        items = await self._metadata.list(keys.RESCUES)
        asked = {place: item for item in items if (place := keys.rescue_of(item.key)) is not None}
        wanted: list[tuple[tuple[TopicName, int], Item]] = []
        for place, item in asked.items():
            brought = Brought.from_bytes(item.value)
            if brought is not None and brought.broker == self._broker_id:
                self._brought.add(place)
            elif wanted_of(item.value) == self._broker_id:
                wanted.append((place, item))

        async def answer(place: tuple[TopicName, int], item: Item) -> None:
            await self._try(f"{place[0]}, epoch {place[1]}", self._answer(*place, item))

        for result in await gather_bounded([partial(answer, *each) for each in wanted], RESCUES_AT_ONCE):
            if isinstance(result, BaseException):
                raise result
        for place in sorted(self._brought - asked.keys()):
            await self._try(f"{place[0]}, epoch {place[1]}", self._forget(*place))

    async def _answer(self, topic: TopicName, epoch: int, wanted: Item) -> None:
        orphan = next((each for each in await self._orphans(topic) if each.epoch == epoch), None)
        if orphan is None:  # it was asked for by an owner that was none any more
            await self._metadata.transact([Compare(wanted.key, wanted.revision)], [Delete(wanted.key)])
        elif await self._bring(topic, orphan, wanted):
            self._brought.add((topic, epoch))

    async def _forget(self, topic: TopicName, epoch: int) -> None:
        """The files of what was brought, now that it is in the store. What we have of later epochs stays.

        After a restart they are not known any more: they go when the topic comes back.
        """
        if self._topics.get(topic) is not None:
            return  # when it is closed; it goes with its files, or is looked at then
        mine = [each for each in await self._orphans(topic) if each.broker_id == self._broker_id]
        if any(each.epoch <= epoch for each in mine):
            return  # some of it lies in an older one
        if await self._topics.forget_epochs(topic, epoch):
            self._brought.discard((topic, epoch))

    async def _orphans(self, topic: TopicName) -> list[Orphan]:
        items = await self._metadata.list(keys.orphans(topic))
        return [
            Orphan.from_bytes(start, item.value) for item in items if (start := keys.start_of(item.key)) is not None
        ]

    async def _bring(self, topic: TopicName, orphan: Orphan, wanted: Item) -> bool:
        """Once: what was brought is never replaced, for by then our files may be gone. And also if we have none.

        False: the topic was taken from us and we have not noticed yet. What we may still acknowledge in that epoch
        would be missing in what is brought now, and lost.
        """
        source = await self._topics.lost_log(topic)
        if isinstance(source, TopicLog) and source.epoch <= orphan.epoch:
            return False
        end = min(source.head, orphan.end) if isinstance(source, ClosedLog) else orphan.end
        names: list[str] = []
        damaged: list[tuple[int, int]] = []
        found = 0
        offset = orphan.start
        while offset < end:
            batches, offset = await self._read(source, offset, end, damaged)
            if batches:
                found += sum(batch.header.rows for batch in batches)
                self._attempts += 1
                name = rescue_name(orphan.start, orphan.epoch, self._work.random_u64())
                encoded = await self._work.run(partial(encode_raw, batches))
                await self._store.put(topic_prefix(topic) + name, [encoded.data], create=True)
                names.append(name)
        brought = Brought(broker=self._broker_id, objects=tuple(names), end=offset, damaged=tuple(damaged))
        put = Put(wanted.key, brought.to_bytes())
        if await self._metadata.transact([Compare(wanted.key, wanted.revision)], [put]) is None:
            return False
        log.info("lost epoch brought back", extra={"topic": topic, "epoch": orphan.epoch, "messages": found})
        return True

    async def _read(
        self, source: TopicLog | ClosedLog, offset: int, end: int, damaged: list[tuple[int, int]]
    ) -> tuple[list[Batch], int]:
        """Batches of [offset, end) up to the size of an object, and where to go on."""
        batches: list[Batch] = []
        size = 0
        reader = source.reader(offset)
        while reader.offset < end and size < OBJECT_BYTES:
            try:
                read = await reader.read(RESCUE_READ_BYTES)
                if not read:
                    return batches, end  # the head
                for batch in read:
                    first, upto = max(batch.header.base_offset, offset), min(batch.header.end_offset, end)
                    if first < upto:
                        batches.append(cut(batch, first, upto))
                        size += batch.header.size_bytes
            except OffsetOutOfRange as gap:
                return batches, (max(gap.first, reader.offset + 1) if not batches else reader.offset)
            except LogDamaged as damage:
                if batches:
                    return batches, reader.offset
                upto = min(damage.end or end, end)
                damaged.append((offset, upto))
                log.error("acknowledged messages may be lost", extra={"topic": source.topic, "why": str(damage)})
                return [], upto
        return batches, min(reader.offset, end)

    # --- adopting -------------------------------------------------------------------------------------------

    async def _adopt_all(self, topic: ServedTopic) -> None:
        assert topic.storage is not None
        upload_state = topic.storage.uploader.get(topic.name)
        if upload_state is None:
            return
        # The newest first: what an older owner left may have been resent to a newer one, whose receipts count.
        is_newest = True
        for orphan in sorted(topic.orphans, key=lambda each: -each.epoch):
            key = keys.rescue(topic.name, orphan.epoch)
            item = await self._metadata.get(key)
            if item is None:
                await self._metadata.transact([Compare(key, 0)], [Put(key, wanted_to_bytes(orphan.broker_id))])
            brought = Brought.from_bytes(item.value) if item else None
            if brought is not None and brought.broker == orphan.broker_id:
                await self._adopt(topic, upload_state, orphan, brought, is_newest=is_newest)
            is_newest = is_newest and not any(each.epoch == orphan.epoch for each in topic.orphans)

    async def _adopt(
        self, topic: ServedTopic, upload_state: UploadState, orphan: Orphan, brought: Brought, *, is_newest: bool
    ) -> None:
        """Object by object, as they were brought: in order. A part of it that is not to be adopted yet is left."""
        place = (topic.name, orphan.epoch)
        if place in self._waiting and not is_newest:
            return  # nothing has changed, and to look may be long
        self._waiting.discard(place)
        known, begin = self._adopted.get(place, (brought, 0))
        resent = Resent(topic, upload_state.tier, orphan)
        for number in range(begin if known == brought else 0, max(1, len(brought.objects))):
            is_last = number + 1 >= len(brought.objects)
            reading = self._object(topic, upload_state.tier, brought.objects[number : number + 1])
            async with reading as batches, upload_state.working:  # which others have between two objects
                left = _left_of(topic, upload_state, orphan)
                if left is None:  # given up by an operator, or the topic is leaving
                    self._adopted.pop(place, None)
                    return
                inside = _inside(batches, left.start, left.end)
                if not is_newest and any(batch.header.producer_id for batch in inside):
                    self._waiting.add(place)  # until it is known what of it the newer ones have
                    return
                if inside or is_last:
                    await self._adopt_part(topic, upload_state.tier, left, brought, inside, resent, is_last=is_last)
            self._adopted[place] = (brought, number + 1)
        del self._adopted[place]
        for name in brought.objects:
            await self._store.delete(upload_state.tier.key(name))
        log.info("lost epoch is back", extra={"topic": topic.name, "epoch": orphan.epoch, "end": brought.end})

    @contextlib.asynccontextmanager
    async def _object(self, topic: ServedTopic, tier: TopicTier, names: Sequence[str]) -> AsyncIterator[list[Batch]]:
        """What one of the brought objects holds of the topic; nothing, if none was brought."""
        async with contextlib.AsyncExitStack() as held:
            batches: list[Batch] = []
            for key in map(tier.key, names):
                if (await self._store.head(key)).size_bytes > ADOPTED_ALONE_BYTES:
                    await held.enter_async_context(self._one_large)
                batches += await self._work.run(partial(read_raw, await self._store.get(key)))
            yield [each for each in batches if each.header.topic_hash == topic.log.topic_hash]

    async def _adopt_part(
        self,
        topic: ServedTopic,
        tier: TopicTier,
        orphan: Orphan,
        brought: Brought,
        batches: Sequence[Batch],
        resent: Resent,
        *,
        is_last: bool,
    ) -> None:
        """What of these batches was not sent again becomes objects. The orphan ends behind them, or is gone."""
        await resent.look()
        async with topic.log.between_groups():
            # From here on no resend of what is kept is taken for new, and none was before. A receipt that is given
            # for it now holds: the orphan stands, and what was brought is in the store, until it is adopted.
            await resent.look_behind()
            kept = [batch for batch in batches if not was_resent(_numbered(batch), resent.first)]
            for batch in kept:
                recall(topic.log.sessions, batch)
        places = runs([_numbered(batch) for batch in kept])
        done = orphan.start
        for at in range(0, max(is_last, len(places)), RUNS_MAX):
            chunk = places[at : at + RUNS_MAX]
            is_end = is_last and at + RUNS_MAX >= len(places)
            end = orphan.end if is_end else kept[chunk[-1][1] - 1].header.end_offset
            await tier.refresh_if_stale()
            stored = [await self._store_run(topic, tier, kept[first:last]) for first, last in chunk]
            sessions = tier.sessions_with(kept[chunk[0][0] : chunk[-1][1]] if chunk else ())
            part = OffsetRange(done, end)
            await self._describe(topic, tier, orphan, part, stored, sessions, brought, is_last=is_end)
            done = end
        messages = sum(batch.header.rows for batch in kept)
        log.info(
            "lost messages are back",
            extra={
                "topic": topic.name,
                "epoch": orphan.epoch,
                "messages": messages,
                "batches_resent": len(batches) - len(kept),
            },
        )

    async def _store_run(self, topic: ServedTopic, tier: TopicTier, batches: Sequence[Batch]) -> Descriptor:
        assert topic.storage is not None
        await tier.refresh_if_stale()
        self._attempts += 1
        first, end = batches[0].header.base_offset, batches[-1].header.end_offset
        number = self._clock.time_us() * 1000 + self._attempts % 1000  # never used before under this epoch
        why = ""
        for raw in (False, True):
            recipe = Recipe(topic.name, tier.epoch, batches, raw, None if raw else (RESCUED, "true"))
            name = partial(object_name, first, end - 1, tier.epoch, attempt=number, raw=raw)
            stored = await topic.storage.uploads.maker.store(name, recipe, (first, end), is_large=False)
            if isinstance(stored, Descriptor):
                return stored
            why = stored.why
            log.error("rescued batches cannot be converted", extra={"topic": topic.name, "why": why})
        raise InvalidObject("the raw object", why)

    async def _describe(
        self,
        topic: ServedTopic,
        tier: TopicTier,
        orphan: Orphan,
        part: OffsetRange,
        stored: Sequence[Descriptor],
        sessions: Sessions,
        brought: Brought,
        *,
        is_last: bool,
    ) -> None:
        """One transaction: this part of the orphan is objects and voids now."""
        voids = (await tier.load_manifest()).with_added(*stored).missing(part.first, part.end)
        unused = f"never used, or sent again, before broker {orphan.broker_id} came back"
        damaged = f"damaged, in part or as a whole, on the disk of broker {orphan.broker_id}"
        changed: list[Void] = []
        for first, end in voids:
            is_damaged = any(bad_first < end and first < bad_end for bad_first, bad_end in brought.damaged)
            changed.append(Void(first, end, damaged if is_damaged else unused))
        left = None if is_last else replace(orphan, start=part.end)
        others: list[Put | Delete] = [Delete(keys.orphan(topic.name, part.first))]
        if left is None:
            others.append(Delete(keys.rescue(topic.name, orphan.epoch)))
        else:
            others.append(Put(keys.orphan(topic.name, left.start), left.to_bytes()))
        await tier.apply(HistoryChange(added=stored, voids=changed, others=others, sessions=sessions, appears=True))
        try:
            # If it was our own disk that had them: they are read as they are in the store now, marked.
            await topic.forget_own(orphan, brought.damaged)
        except (DanubeError, OSError) as error:  # history is stored: what is known here must say so all the same
            log.warning("files of a rescued epoch are left", extra={"topic": topic.name, "why": str(error)})
        topic.adopted(
            [each for each in topic.orphans if each.epoch != orphan.epoch] + ([left] if left else []),
            rescued=tuple(OffsetRange(each.start_offset, each.end) for each in stored),
            voided=tuple(OffsetRange(first, end) for first, end in voids),
        )


class Resent:
    """What epochs after the orphan's accepted of every producer session: only where that began, however long it is."""

    def __init__(self, topic: ServedTopic, tier: TopicTier, orphan: Orphan) -> None:
        self.first: dict[tuple[int, int], int] = {}  # session -> the lowest sequence
        self._topic = topic
        self._tier = tier
        self._orphan = orphan
        self._read_to = orphan.end

    async def look(self) -> None:
        """Up to nearly the head. What was looked at before is not looked at again."""
        found, self._read_to = await later_batches(self._topic, self._tier, self._orphan, self._read_to)
        _merge(self.first, found)
        while self._topic.log.head - self._read_to > READ_BETWEEN_GROUPS:
            await self.look_behind()

    async def look_behind(self) -> None:
        """What the log has behind that, up to the head."""
        head = self._topic.log.head
        _merge(self.first, await _read_numbered(self._topic, self._read_to))
        self._read_to = max(head, self._read_to)


def _left_of(topic: ServedTopic, upload_state: UploadState, orphan: Orphan) -> Orphan | None:
    """What is still to be adopted of it; None if the topic is not uploaded here any more."""
    if topic.storage is None or topic.storage.uploader.get(topic.name) is not upload_state:
        return None
    return next((each for each in topic.orphans if each.epoch == orphan.epoch), None)


async def later_batches(
    topic: ServedTopic, tier: TopicTier, orphan: Orphan, first: int
) -> tuple[dict[tuple[int, int], int], int]:
    """(producer, session) to the lowest sequence that was accepted after the orphan's epoch, of what lies at `first` or
    behind, in objects and in the log; and up to where that was looked.
    """
    assert topic.storage is not None
    found: dict[tuple[int, int], int] = {}
    offset = first
    for described in (await tier.load_manifest())[:]:
        if described.end > first:
            stored = await topic.storage.reader.stored_batches(tier, described)
            numbered = (
                Numbered(
                    each.base_offset,
                    each.end_offset,
                    each.producer_id,
                    each.session,
                    each.first_sequence,
                    each.epoch,
                )
                for each in stored
                if each.epoch > orphan.epoch
            )
            _merge(found, first_resent(numbered))
            offset = max(offset, described.end)
    head = topic.log.head
    _merge(found, await _read_numbered(topic, offset))
    return found, max(offset, head)


def _merge(into: dict[tuple[int, int], int], found: Mapping[tuple[int, int], int]) -> None:
    for session, sequence in found.items():
        into[session] = min(into.get(session, sequence), sequence)


async def _read_numbered(topic: ServedTopic, offset: int) -> dict[tuple[int, int], int]:
    """What the log has of producer sessions from `offset` on, as `later_batches`."""
    found: dict[tuple[int, int], int] = {}
    head = topic.log.head
    while offset < head:
        try:
            batches = await topic.log.read(offset, bytes_max=RESCUE_READ_BYTES)
        except OffsetOutOfRange as gap:
            offset = max(gap.first, offset + 1)
            continue
        if not batches:
            break
        _merge(found, first_resent(_numbered(batch) for batch in batches))
        offset = batches[-1].header.end_offset
    return found


def _numbered(batch: Batch) -> Numbered:
    header = batch.header
    return Numbered(
        header.base_offset,
        header.end_offset,
        header.producer_id,
        header.session,
        header.first_sequence,
        header.epoch,
    )


def _inside(batches: Sequence[Batch], first: int, end: int) -> list[Batch]:
    """In order, each offset once, nothing outside [first, end)."""
    found: list[Batch] = []
    at = first
    for batch in sorted(batches, key=lambda each: each.header.base_offset):
        start, upto = max(batch.header.base_offset, at), min(batch.header.end_offset, end)
        if start < upto:
            found.append(cut(batch, start, upto))
            at = upto
    return found
