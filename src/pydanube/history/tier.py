"""One topic's part of the cloud tier: what is known of its history, and how committed batches become part of it.

    log ─► make, check ─► put ─► read back, compare ─► descriptor ─► (HEAD) ─► local retention may free segments
                                                      │
                                     the commit: only what has a descriptor exists

One task at a time works on a topic (`history/uploader.py` sees to that). Every change of descriptors is one transaction
that compares the owner key, so two owners never describe the same offset, and the `history` key with what it was after
the change before, so a write of our own that was given up and comes late changes nothing either. A crash between any
two steps leaves an object without a descriptor, which nobody reads and a sweep removes. Progress is what descriptors
say; there is no other record of it to be wrong. What is done to objects afterwards is in `tier_tidy.py`; the failure
table is in docs/adr/0002-the-cloud-tier.md.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, TypeVar

from crc32c import crc32c

from pydanube.core import keys
from pydanube.core.commit.sessions import Sessions, Stored
from pydanube.core.history.ownership import Orphan, void_to_bytes
from pydanube.core.history.tiers import (
    PARQUET,
    RAW,
    Descriptor,
    History,
    Objects,
    TierConfig,
    epoch_of_name,
    manifest_from_bytes,
    object_name,
)
from pydanube.core.iceberg.manifests import FOLDER, created_of
from pydanube.core.names import TopicName
from pydanube.errors import (
    Conflict,
    InvalidObject,
    LogDamaged,
    ObjectDamaged,
    OffsetOutOfRange,
    ProcessEnded,
    Unreachable,
)
from pydanube.formats.batch import Batch, cut
from pydanube.history.object_builder import Made, make_and_store, make_object, make_packed, make_raw, pack, put_checked
from pydanube.history.snapshots import Snapshot, Snapshots, epoch_of_snapshot
from pydanube.log.topic_log import TopicLog
from pydanube.ports import (
    Clock,
    Compare,
    Delete,
    Elsewhere,
    Item,
    MetadataStore,
    ObjectInfo,
    ObjectStore,
    Put,
    Revision,
    Work,
)
from pydanube.telemetry import WalMetrics

log = logging.getLogger(__name__)

T = TypeVar("T")

# What is read at a time, and checked on the event loop: 4 MiB of small batches took it 20 ms.
READ_BYTES: Final = 256 * 1024
BATCHES_MAX: Final = 10_000  # per object: each has an entry in the footer, and all are freed at once, in 3 ms
FEW_BATCHES: Final = 256
APART_BYTES: Final = 1024 * 1024  # of log: larger objects are made in a process that may wait
HERE_SECONDS: Final = 300.0
RETRY_SECONDS: Final = 0.5
SESSIONS_BYTES_MAX: Final = 64 * 1024  # in every descriptor's write: 230 busy producers, 1,100 of one batch


class Write(Protocol):
    """All operations, if the topic is ours and the compares hold; the revision, or None if a compare does not.

    Raises OwnershipLost, or Unreachable: then nobody knows.
    """

    async def __call__(self, compares: Sequence[Compare], operations: Sequence[Put | Delete], /) -> Revision | None: ...


class Last(NamedTuple):
    """An object that is stored, and what describes it when it is written: all of it, if the compare holds."""

    descriptor: Descriptor
    sessions: Sessions
    history: History
    compare: Compare
    operations: Sequence[Put]


def topic_prefix(topic: str) -> str:
    """Where a topic's objects are: "default/orders/" for /default/orders."""
    return topic[1:] + "/"


class TopicTier:
    """What is known of one topic's history, and the steps that extend it."""

    def __init__(
        self,
        topic: TopicName,
        epoch: int,
        store: ObjectStore,
        clock: Clock,
        work: Work,
        write: Write,
        metadata: MetadataStore,
        config: TierConfig,
    ) -> None:
        self.topic = topic
        self.epoch = epoch
        self.history = History()
        self.objects = Objects()
        self.metrics = WalMetrics()  # the broker's, if there is one
        self._said_cut = False
        self.sessions = Sessions()  # where producers stand in what objects hold: whoever takes over has only this
        self.expired: list[Descriptor] = []  # below first_offset, and their keys are still there
        self.prefix = topic_prefix(topic)
        self.unreadable: dict[tuple[int, int], str] = {}  # ranges of the log that cannot be uploaded, and why
        self.raw_ranges = 0
        self.orphaned_epochs: frozenset[int] = frozenset()
        self.garbage: dict[str, float] = {}  # undescribed object -> when it was first seen
        self.store = store
        self.clock = clock
        self.work = work
        self.config = config
        self._withheld: list[tuple[int, int]] = []
        self._write = write
        self._metadata = metadata
        self._revision = 0  # of the history key
        self._changes = 0
        self._in_doubt = False  # a change was given up before it was answered
        self._unread: str | None = None  # the manifest, until somebody needs what is in it
        self._failed = 0
        self._here_until = -math.inf  # the process that stores large objects has failed
        self._given_up: set[tuple[int, int]] = set()  # of the log: lost, and recorded as such
        self._snapshots = Snapshots(store, self.prefix, epoch)
        self._snapshot_is_old = False

    # --- knowing --------------------------------------------------------------------------------------

    async def load(self, known: Sequence[Item] | None = None) -> None:
        """What the metadata store says. The manifest is fetched when somebody needs it: the store may be away.

        `known` is everything below the topic's storage, if it was read when nobody could change it any more.
        """
        # One read, so of one moment: a descriptor that is in its key or in the manifest is never in neither.
        items = await self._metadata.list(keys.below_storage(self.topic)) if known is None else known
        history = next((item for item in items if item.key == keys.history(self.topic)), None)
        sessions = next((item for item in items if item.key == keys.sessions(self.topic)), None)
        objects = keys.storage_objects(self.topic)
        try:
            self.history = History.from_bytes(history.value) if history else History()
            keyed = [Descriptor.from_bytes(item.value) for item in items if item.key.startswith(objects)]
            self.expired = [each for each in keyed if each.end <= self.history.first_offset]
            self.objects = Objects(each for each in keyed if each.end > self.history.first_offset)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidObject(f"descriptors of {self.topic} in the metadata store", str(error)) from error
        self.sessions = self._read_sessions(sessions)
        self._revision = history.revision if history else 0
        self._unread = self.history.manifest
        self._in_doubt = False
        self._snapshot_is_old = history is not None  # who wrote this may have died before he told readers

    def _read_sessions(self, item: Item | None) -> Sessions:
        try:
            return Sessions.from_bytes(item.value) if item else Sessions()
        except ValueError as error:  # repetitions at worst: no reason not to serve
            log.error("sessions of producers cannot be read", extra={"topic": self.topic, "why": str(error)})
            return Sessions()

    async def make_sure(self) -> None:
        """Every step begins with this: what is known is what is stored, or the next change finds that it is not."""
        if self._in_doubt:
            await self.load()

    async def know_all(self) -> Objects:
        """All descriptors, those in the manifest too."""
        while (name := self._unread) is not None:
            history = self.history
            older = await self._read_manifest(history)
            if self._unread != name:
                continue  # somebody else was faster, and the owner may have moved more descriptors since
            older = [each for each in older if each.end > self.history.first_offset]
            try:
                self.objects = Objects([*older, *self.objects.keyed], {each.object_id for each in older})
            except ValueError as error:
                raise self._manifest_damaged(history, str(error)) from error
            self._unread = None
        return self.objects

    async def find(self, offset: int) -> Descriptor | None:
        """The object that holds `offset`, if one does."""
        if offset < self.history.first_offset:
            return None
        if self._unread is not None and offset < self.history.manifest_end:
            return (await self.know_all()).find(offset)
        return self.objects.find(offset)

    async def next_after(self, offset: int) -> int | None:
        """The first offset behind `offset` that an object holds."""
        found = (await self.know_all()).after(offset)
        return found.start_offset if found else None

    @property
    def first_offset(self) -> int | None:
        """Where the objects begin; None if there is none."""
        if self._unread is not None:
            return self.history.first_offset
        first = next(iter(self.objects), None)
        return max(first.start_offset, self.history.first_offset) if first else None

    def key(self, name: str) -> str:
        return self.prefix + name

    def damaged(self, described: Descriptor, why: str) -> ObjectDamaged:
        return ObjectDamaged(self.topic, self.key(described.object_id), described.start_offset, described.end, why)

    async def _read_manifest(self, history: History) -> list[Descriptor]:
        assert history.manifest is not None
        try:
            data = await self.store.get(self.key(history.manifest))
            if history.manifest_crc and crc32c(data) != history.manifest_crc:
                raise ValueError("its checksum differs")
            return manifest_from_bytes(data)
        except (FileNotFoundError, ValueError) as error:
            why = "it is missing" if isinstance(error, FileNotFoundError) else str(error)
            raise self._manifest_damaged(history, why) from error

    def _manifest_damaged(self, history: History, why: str) -> ObjectDamaged:
        key = self.key(history.manifest or "")
        return ObjectDamaged(self.topic, key, history.first_offset, history.manifest_end, why)

    # --- changing ---------------------------------------------------------------------------------------

    async def change(self, operations: Sequence[Put | Delete] = (), history: History | None = None) -> None:
        """Writes descriptors and the history key as one. Afterwards the caller changes what is known, without waiting.

        One that is not answered is made again until it is. One that was given up leaves the tier in doubt: the next
        step reads anew, and compares with what it read. Raises OwnershipLost, or Conflict: then a step begins anew.
        """
        history, compare, put = self._begin_change(history)
        while True:
            try:
                revision = await self._write([compare], [*operations, put]) or await self._answer_of(put)
                break
            except Unreachable as error:
                log.warning("descriptor delayed", extra={"topic": self.topic, "why": str(error)})
                await self.clock.sleep(RETRY_SECONDS)
        self.history = history
        self._revision = revision
        self._in_doubt = False
        self._snapshot_is_old = True

    def _begin_change(self, history: History | None = None) -> tuple[History, Compare, Put]:
        assert not self._in_doubt, "a step begins with make_sure"
        self._in_doubt = True
        self._changes += 1
        history = (history or self.history).changed(self.epoch, self._changes, self.clock.time_us())
        put = Put(keys.history(self.topic), history.to_bytes())
        return history, Compare(put.key, self._revision), put

    async def fence(self) -> None:
        """Returns when the topic is ours, what is known is what is stored, and no earlier write of ours can happen."""
        await self.make_sure()
        await self.change()

    async def _answer_of(self, put: Put) -> Revision:
        """What became of a write that found the history key changed: an earlier try of the same may have done that."""
        item = await self._metadata.get(put.key)
        if item is None or item.value != put.value:
            # A write that we gave up came late. What we knew is out of date, and the step begins anew.
            raise Conflict(put.key)
        return item.revision

    # --- uploading ------------------------------------------------------------------------------------

    def waiting(self, topic_log: TopicLog, objects: Objects | None = None) -> tuple[int, int] | None:
        """The lowest range that the log holds and no object does; with other objects than there are, if given."""
        objects = self.objects if objects is None else objects
        known_from = self.history.first_offset if self._unread is None else self.history.manifest_end
        for first, end in topic_log.held():
            for gap in objects.missing(max(first, known_from), end):
                readable = self._without_unreadable(gap)
                if readable is not None:
                    return readable
        return None

    def _without_unreadable(self, gap: tuple[int, int]) -> tuple[int, int] | None:
        first, end = gap
        for bad_first, bad_end in sorted([*self.unreadable, *self._withheld]):
            if bad_first <= first < bad_end:
                first = bad_end
            elif first < bad_first < end:
                end = bad_first
        return (first, end) if first < end else None

    def orphaned(self, orphans: Sequence[Orphan]) -> None:
        """Ranges of lost owners: not ours to upload, even if this disk has them, until they are adopted."""
        self._withheld = [(each.start, each.end) for each in orphans]
        self.orphaned_epochs = frozenset(each.epoch for each in orphans)

    async def upload(self, topic_log: TopicLog, *, urgent: bool = False) -> Descriptor | None:
        """One object from what waits; None if nothing does. What fails leaves no trace that anybody believes.

        `urgent` if clients wait for it.
        """
        found = await self._upload(topic_log, urgent=urgent, is_last=False)
        assert not isinstance(found, Last)
        return found

    async def upload_last(self, topic_log: TopicLog) -> Descriptor | Last | None:
        """The same. The object behind which nothing waits is left to the caller to describe, with what else it writes;
        until that is done, or given up, the tier is in doubt.
        """
        return await self._upload(topic_log, urgent=True, is_last=True)

    async def _upload(self, topic_log: TopicLog, *, urgent: bool, is_last: bool) -> Descriptor | Last | None:
        await self.make_sure()
        batches: list[Batch] = []
        while not batches:
            found = self.waiting(topic_log)
            if found is None:
                return None
            unreadable = len(self.unreadable)
            batches = await self._read(topic_log, *found)
            if not batches and len(self.unreadable) == unreadable:
                return None
        await self.give_up(topic_log)
        try:
            described = await self._store(batches, urgent)
            objects = self.objects.with_added(described)  # raises if it overlaps: that must not be written
            key = keys.storage_object(self.topic, described.start_offset)
            stored = [each for each in batches if each.header.base_offset < described.end]
            if len(stored) > FEW_BATCHES:
                sessions = await self.work.run(lambda: self.sessions_with(stored))
            else:  # clients of a topic that moves wait for this: no way to a thread and back
                sessions = self.sessions_with(stored)
            operations = [Put(key, described.to_bytes()), *self.sessions_put(sessions)]
            if is_last and self.waiting(topic_log, objects) is None:
                history, compare, put = self._begin_change()
                self._failed += 1  # the caller may give it up
                return Last(described, sessions, history, compare, [*operations, put])
            await self.change(operations)
        except BaseException:
            self._failed += 1  # the store may have it all the same, or get it later: this name is used up
            raise
        self._add(described, sessions)
        return described

    def described(self, last: Last) -> None:
        """The caller of `upload_last` has described it, and nobody changes anything here any more."""
        self.history = last.history
        self._snapshot_is_old = True
        self._add(last.descriptor, last.sessions)

    def _add(self, described: Descriptor, sessions: Sessions) -> None:
        self.objects = self.objects.with_added(described)
        self.sessions = sessions
        self.garbage.pop(described.object_id, None)
        if described.format == RAW:
            self.raw_ranges += 1
            log.error("range stored raw", extra={"topic": self.topic, "object": described.object_id})

    def sessions_with(self, batches: Iterable[Batch]) -> Sessions:
        """Where producers stand when these are in an object, too."""
        sessions = self.sessions.copy()
        for batch in batches:
            recall(sessions, batch)
        return sessions.newest(SESSIONS_BYTES_MAX)

    def sessions_put(self, sessions: Sessions) -> list[Put]:
        """What to write beside descriptors, so that objects and what is known of them change as one."""
        if sessions == self.sessions:
            return []
        if sessions.cut:
            if not self._said_cut:
                self._said_cut = True
                log.warning("sessions of producers cut: a lost owner's are not all known", extra={"topic": self.topic})
            self.metrics.sessions_cut["objects"] += sessions.cut
        return [Put(keys.sessions(self.topic), sessions.to_bytes(timed=False))]

    async def give_up(self, topic_log: TopicLog) -> None:
        """What went bad on this disk before it was uploaded is recorded as void: it is lost, no reader waits for it.

        Before anything behind it is described: offsets that nobody has must not be left between objects, where the next
        owner would not look for them.
        """
        damaged = {(each.first, each.end) for each in topic_log.recovered.damage if each.end is not None}
        damaged = {*damaged, *self.unreadable} - self._given_up
        if not damaged:
            return
        await self.make_sure()
        objects = await self.know_all()
        orphans, voids = await self._gaps()
        lost = [
            part
            for place in sorted(damaged)
            for first, end in objects.missing(max(place[0], self.history.first_offset), place[1])
            for part in _without(first, end, sorted([*orphans, *voids]))
        ]
        if lost:
            why = f"damaged on the disk of its owner in epoch {self.epoch} before it was uploaded"
            puts = [Put(keys.void(self.topic, first), void_to_bytes(end, why)) for first, end in lost]
            await self.change(puts, replace(self.history, history_version=self.history.history_version + 1))
            log.error("acknowledged messages are lost", extra={"topic": self.topic, "offsets": lost})
        self._given_up |= damaged

    async def _gaps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Orphans and voids, as [first, end)."""
        found = []
        for prefix in (keys.orphans(self.topic), keys.voids(self.topic)):
            items = [(keys.start_of(item.key), item.value) for item in await self._metadata.list(prefix)]
            found.append([(start, int(json.loads(value)["end"])) for start, value in items if start is not None])
        return found[0], found[1]

    async def _read(self, topic_log: TopicLog, first: int, end: int) -> list[Batch]:
        """Whole batches of [first, end), up to the size of an object."""
        reader = topic_log.reader(first)
        batches: list[Batch] = []
        size = 0
        while reader.offset < end and size < self.config.object_bytes and len(batches) < BATCHES_MAX:
            try:
                for batch in await reader.read(READ_BYTES):
                    if batch.header.base_offset >= end:
                        break
                    size += batch.header.uncompressed_length
                    batches.append(batch)
                await self.clock.sleep(0)  # what is in memory is read without waiting, and others have work to do
            except OffsetOutOfRange:
                break  # retention was faster
            except LogDamaged as damage:
                if not batches:
                    bad = (max(damage.first, first), min(damage.end or end, end))
                    self.unreadable[bad] = str(damage)
                    log.error("range not uploaded", extra={"topic": self.topic, "why": str(damage)})
                break
        if batches and batches[0].header.base_offset < first:
            batches[0] = cut(batches[0], first, batches[0].header.end_offset)
        if batches and batches[-1].header.end_offset > end:
            batches[-1] = cut(batches[-1], batches[-1].header.base_offset, end)
        return batches

    async def _store(self, batches: Sequence[Batch], urgent: bool) -> Descriptor:
        """One object of the batches, or of the first of them."""
        is_large = not urgent and sum(each.header.uncompressed_length for each in batches) >= APART_BYTES
        if is_large and (elsewhere := await self.elsewhere()) is not None:
            described = await self._store_apart(elsewhere, batches)
            if described is not None:
                return described
        made = await self._make(batches, is_large)
        name = object_name(made.start_offset, made.end - 1, self.epoch, attempt=self._failed, raw=made.raw)
        return await self.store_object(name, made)

    async def _store_apart(self, elsewhere: Elsewhere, batches: Sequence[Batch]) -> Descriptor | None:
        """By a process that may wait, and keeps the object to itself. None if it is to be done here."""
        first, end = batches[0].header.base_offset, batches[-1].header.end_offset
        name = object_name(first, end - 1, self.epoch, attempt=self._failed)
        key = self.key(name)
        self.garbage[name] = self.clock.elapsed()  # until it is described
        packed = await self._pack(batches)
        found = await self.apart(partial(make_and_store, key, self.topic, self.epoch, packed, elsewhere))
        if found is None:
            return None
        made, info = found
        if (made.start_offset, made.end) != (first, end):
            raise InvalidObject(key, f"it holds {made.start_offset} up to {made.end}")
        return self.describe(name, made, info)

    async def elsewhere(self) -> Elsewhere | None:
        """How another process opens the store; None if objects are to be stored here."""
        return None if self.clock.elapsed() < self._here_until else await self.store.elsewhere()

    async def apart(self, storing: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """What another process stores, and says of it. None if it could not, and it is to be done here.

        It may have been done all the same, or will be: the names in it are used up.
        """
        try:
            return await self.work.await_apart(storing)
        except Exception as error:
            if isinstance(error, Unreachable | Conflict | InvalidObject) and not isinstance(error, ProcessEnded):
                raise  # so says the store, which is the same from here
            log.warning("objects are stored by the broker itself", extra={"topic": self.topic, "why": repr(error)})
            self._failed += 1
            self._here_until = self.clock.elapsed() + HERE_SECONDS
            return None

    async def _make(self, batches: Sequence[Batch], is_large: bool) -> Made:
        """As Parquet; the one batch that Arrow refuses, raw. What comes behind it has its turn later."""
        while True:
            try:
                if not is_large:
                    return await self.work.run(partial(make_object, self.topic, self.epoch, batches))
                packed = await self._pack(batches)
                return await self.work.run_apart(partial(make_packed, self.topic, self.epoch, packed))
            except InvalidObject as error:
                if len(batches) == 1:
                    log.error("batch cannot be converted", extra={"topic": self.topic, "why": str(error)})
                    return await self.work.run(partial(make_raw, batches))
                batches = batches[: len(batches) // 2]

    async def _pack(self, batches: Sequence[Batch]) -> list[memoryview]:
        packed: list[memoryview] = []
        for some in pack(batches):  # not in a thread, which would keep the interpreter from messages
            packed += some
            await self.clock.sleep(0)
        return packed

    async def store_object(self, name: str, made: Made) -> Descriptor:
        """Puts the object and reads it back. Raises InvalidObject if the store has something else."""
        key = self.key(name)
        self.garbage[name] = self.clock.elapsed()  # until it is described
        return self.describe(name, made, await put_checked(self.store, key, made.data, self.work.run))

    def describe(self, name: str, made: Made, info: ObjectInfo) -> Descriptor:
        return Descriptor(
            start_offset=made.start_offset,
            end_offset=made.end - 1,
            object_id=name,
            size=info.size_bytes,
            etag=info.etag,
            min_publish_time=made.min_publish_time,
            max_publish_time=made.max_publish_time,
            epoch=self.epoch,
            created_at=self.clock.time_us() // 1_000_000,
            max_append_time=made.max_append_time,
            format=RAW if made.raw else PARQUET,
            footer_crc=made.footer_crc,
        )

    async def publish_snapshot(self) -> None:
        """A copy of the descriptors for readers without a broker, if something changed since the last one."""
        if not self._snapshot_is_old:
            return
        self._snapshot_is_old = False
        is_written = False
        try:
            gaps = await self._gaps()
            history, objects = self.history, self.objects
            is_written = await self._snapshots.publish(
                Snapshot(
                    self.topic,
                    history.first_offset,
                    objects.end,
                    history.manifest,
                    history.manifest_crc,
                    objects.keyed,
                    gaps[0],
                    gaps[1],
                    history.history_version,
                )
            )
        finally:
            self._snapshot_is_old |= not is_written

    @property
    def has_garbage(self) -> bool:
        return bool(self.garbage)

    def undescribed_for(self, names: Iterable[str]) -> dict[str, float]:
        """Since how many seconds each is known to be undescribed: from now on, if this is the first we hear of it."""
        now = self.clock.elapsed()
        return {name: now - self.garbage.setdefault(name, now) for name in names}


def recall(sessions: Sessions, batch: Batch) -> None:
    """The batch is stored, wherever its owner put it."""
    header = batch.header
    if header.producer_id and header.rows:
        stored = Stored(header.first_sequence, header.rows, header.body_crc, header.base_offset, header.epoch)
        sessions.recall(header.producer_id, header.session, stored)


async def delete_objects(store: ObjectStore, topic: str, epoch: int, *, spare: Collection[str] = ()) -> int:
    """Removes what a deleted topic left, up to the epoch in which it was deleted. How many objects there were."""
    name = TopicName(topic)
    places = [topic_prefix(name)]
    if name.partition_number == 0:  # by which the table of all partitions is known
        places.append(topic_prefix(name.base) + FOLDER)
    doomed = []
    for place in places:
        async for info in store.list(place):
            last = info.key.removeprefix(place)
            written = epoch_of_name(last) or epoch_of_snapshot(last) or created_of(last.removeprefix(FOLDER))
            if written is not None and written <= epoch and last not in spare:
                doomed.append(info.key)
    for key in doomed:
        await store.delete(key)
    return len(doomed)


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
