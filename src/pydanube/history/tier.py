"""One topic's part of the cloud tier: what is known of its history, and the one way in which that changes.

    log ─► make, check ─► put ─► read back, compare ─► descriptor ─► (HEAD) ─► local retention may free segments
                                                      │
                                     the commit: only what has a descriptor exists

One task at a time works on a topic (`history/uploader.py` sees to that). Every change of descriptors is one transaction
that compares the owner key, so two owners never describe the same offset, and the `history` key with what it was after
the change before, so a write of our own that was given up and comes late changes nothing either. A crash between any
two steps leaves an object without a descriptor, which no reader uses and a sweep removes. Progress is what descriptors
say; there is no other record of it to be wrong. How the log becomes objects is in `uploads.py`, what is done to objects
afterwards in `maintenance.py`; the failure table is in docs/adr/0002-the-cloud-tier.md.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from pydanube.core import keys
from pydanube.core.commit.sessions import Sessions, Stored
from pydanube.core.history.ownership import Orphan
from pydanube.core.history.tiers import Descriptor, Objects, TierConfig, TopicHistory, epoch_of_name
from pydanube.core.iceberg.manifests import FOLDER, created_of
from pydanube.core.names import TopicName
from pydanube.errors import Conflict, InvalidObject, ObjectDamaged, Unreachable
from pydanube.formats.batch import Batch
from pydanube.history.change import HistoryChange, KnownHistory
from pydanube.history.garbage import Garbage
from pydanube.history.snapshots import HistorySnapshot, Snapshots, epoch_of_snapshot
from pydanube.history.tier_state import fetch_manifest, manifest_damaged, read_gaps, topic_prefix
from pydanube.ports import Clock, Compare, Delete, Item, MetadataStore, ObjectStore, Put, Revision, Work
from pydanube.telemetry import WalMetrics

log = logging.getLogger(__name__)

DESCRIBE_RETRY_SECONDS: Final = 0.5
SESSIONS_BYTES_MAX: Final = 64 * 1024  # in every descriptor's write: 230 busy producers, 1,100 of one batch


class OwnersWrite(Protocol):
    """All operations, if the topic is ours and the compares hold; the revision, or None if a compare does not.

    Raises OwnershipLost, or Unreachable: then it is not known whether it was written.
    """

    async def __call__(self, compares: Sequence[Compare], operations: Sequence[Put | Delete], /) -> Revision | None: ...


class Prepared(NamedTuple):
    """A change, and what it writes if the compare holds: all of it."""

    change: HistoryChange
    history: TopicHistory
    compare: Compare
    operations: Sequence[Put | Delete]


class TopicTier:
    """What is known of one topic's history. Only `load`, `load_manifest` and `apply` change it."""

    def __init__(
        self,
        topic: TopicName,
        epoch: int,
        store: ObjectStore,
        clock: Clock,
        work: Work,
        write: OwnersWrite,
        metadata: MetadataStore,
        config: TierConfig,
        metrics: WalMetrics | None = None,
    ) -> None:
        self.topic = topic
        self.epoch = epoch
        self.prefix = topic_prefix(topic)
        self.store = store
        self.clock = clock
        self.work = work
        self.config = config
        self.garbage = Garbage(clock)
        self.withheld: Sequence[tuple[int, int]] = ()  # ranges of lost owners: not ours to upload
        self.orphaned_epochs: frozenset[int] = frozenset()
        self._metrics = metrics or WalMetrics()
        self._write = write
        self._metadata = metadata
        self._known = KnownHistory()
        self._revision = 0  # of the history key
        self._changes = 0
        self._manifests = 0
        self._is_stale = False  # a change was given up before it was answered
        self._unread: str | None = None  # the manifest, until its content is needed
        self._said_cut = False
        self._snapshots = Snapshots(store, self.prefix, epoch)
        self._snapshot_is_old = False

    # --- knowing --------------------------------------------------------------------------------------

    @property
    def history(self) -> TopicHistory:
        return self._known.history

    @property
    def objects(self) -> Objects:
        """Without those that only the manifest lists, until it was read."""
        return self._known.objects

    @property
    def sessions(self) -> Sessions:
        """Where producers stand in what objects hold: the next owner has only this."""
        return self._known.sessions

    @property
    def expired(self) -> Sequence[Descriptor]:
        """Below first_offset, and their keys are still there."""
        return self._known.expired

    async def load(self, known: Sequence[Item] | None = None) -> None:
        """What the metadata store says. The manifest is fetched on demand: the store may be unreachable.

        `known` is everything below the topic's storage, if it was read when it could not change any more.
        """
        # One read, so of one moment: a descriptor that is in its key or in the manifest is never in neither.
        items = await self._metadata.list(keys.below_storage(self.topic)) if known is None else known
        history = next((item for item in items if item.key == keys.history(self.topic)), None)
        sessions = next((item for item in items if item.key == keys.sessions(self.topic)), None)
        objects = keys.storage_objects(self.topic)
        try:
            stored = TopicHistory.from_bytes(history.value) if history else TopicHistory()
            keyed = [Descriptor.from_bytes(item.value) for item in items if item.key.startswith(objects)]
            expired = [each for each in keyed if each.end <= stored.first_offset]
            kept = Objects(each for each in keyed if each.end > stored.first_offset)
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidObject(f"descriptors of {self.topic} in the metadata store", str(error)) from error
        self._known = KnownHistory(stored, kept, self._read_sessions(sessions), expired)
        self._revision = history.revision if history else 0
        self._unread = stored.manifest
        self._is_stale = False
        self._snapshot_is_old = history is not None  # its writer may have died before it told readers

    def _read_sessions(self, item: Item | None) -> Sessions:
        try:
            return Sessions.from_bytes(item.value) if item else Sessions()
        except ValueError as error:  # repetitions at worst: no reason not to serve
            log.error("sessions of producers cannot be read", extra={"topic": self.topic, "why": str(error)})
            return Sessions()

    async def refresh_if_stale(self) -> None:
        """Every step begins with this: what is known is what is stored, or the next change finds that it is not."""
        if self._is_stale:
            await self.load()

    async def load_manifest(self) -> Objects:
        """All descriptors, those in the manifest too."""
        while (name := self._unread) is not None:
            history = self.history
            older = await fetch_manifest(self.store, self.topic, history)
            if self._unread != name:
                continue  # another task was faster, and the owner may have moved more descriptors since
            older = [each for each in older if each.end > self.history.first_offset]
            try:
                objects = Objects([*older, *self.objects.keyed], {each.object_id for each in older})
            except ValueError as error:
                raise manifest_damaged(self.topic, history, str(error)) from error
            self._known = replace(self._known, objects=objects)
            self._unread = None
        return self.objects

    async def find(self, offset: int) -> Descriptor | None:
        """The object that holds `offset`, if one does."""
        if offset < self.history.first_offset:
            return None
        if self._unread is not None and offset < self.history.manifest_end:
            return (await self.load_manifest()).find(offset)
        return self.objects.find(offset)

    async def next_after(self, offset: int) -> int | None:
        """The first offset behind `offset` that an object holds."""
        found = (await self.load_manifest()).after(offset)
        return found.start_offset if found else None

    @property
    def first_offset(self) -> int | None:
        """Where the objects begin; None if there is none."""
        if self._unread is not None:
            return self.history.first_offset
        first = next(iter(self.objects), None)
        return max(first.start_offset, self.history.first_offset) if first else None

    @property
    def known_from(self) -> int:
        """From here on `objects` has every object that there is."""
        return self.history.first_offset if self._unread is None else self.history.manifest_end

    def orphaned(self, orphans: Sequence[Orphan]) -> None:
        """Ranges of lost owners: not ours to upload, even if this disk has them, until they are adopted."""
        self.withheld = [(each.start, each.end) for each in orphans]
        self.orphaned_epochs = frozenset(each.epoch for each in orphans)

    async def gaps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Orphans and voids, as [first, end)."""
        return await read_gaps(self._metadata, self.topic)

    def key(self, name: str) -> str:
        return self.prefix + name

    def next_manifest(self) -> int:
        """A number that no manifest of this epoch has: a name is never used twice."""
        self._manifests += 1
        return self._manifests

    def damaged(self, described: Descriptor, why: str) -> ObjectDamaged:
        return ObjectDamaged(self.topic, self.key(described.object_id), described.start_offset, described.end, why)

    # --- changing ---------------------------------------------------------------------------------------

    async def apply(self, change: HistoryChange) -> list[str]:
        """Makes the change: one transaction in the metadata store and then, without waiting, all that is known here.

            the write is                          stored            known here        what follows
            ────────────────────────────────────  ────────────────  ────────────────  ─────────────────────────────────
            done                                  the change        the change        returns; a snapshot is due
            refused, history key has our value    the change: an earlier try did it   the same
            refused, history key has another      something else    as before, stale  Conflict: the step begins anew
            refused, owner key has another        nothing           as before, stale  OwnershipLost: the topic closes
            not answered                          perhaps, or soon  as before, stale  written again until it is answered
            given up by the caller                perhaps, or soon  as before, stale  the next step reads anew: a write
                                                                                      that comes late is refused
            never tried: objects would overlap    nothing           as before         ValueError

        Returns the names of the objects that it left without a descriptor: they are garbage from now on.
        """
        prepared = self.prepare(change)
        while True:
            try:
                put = prepared.operations[-1]
                assert isinstance(put, Put), "the history key"
                revision = await self._write([prepared.compare], prepared.operations) or await self._answer_of(put)
                break
            except Unreachable as error:
                log.warning("descriptor delayed", extra={"topic": self.topic, "why": str(error)})
                await self.clock.sleep(DESCRIBE_RETRY_SECONDS)
        return self.applied(prepared, revision)

    def prepare(self, change: HistoryChange) -> Prepared:
        """What `apply` writes, for a caller that writes more with it. Until `applied` is called, all is stale."""
        assert not self._is_stale, "a step begins with refresh_if_stale"
        assert self._unread is None or (change.first_offset is None and change.manifest is None), "load_manifest first"
        history = self._known.after(change).history
        self._is_stale = True
        self._changes += 1
        history = history.changed(self.epoch, self._changes, self.clock.time_us())
        put = Put(keys.history(self.topic), history.to_bytes())
        operations = [*change.operations(self.topic), *self._sessions_put(change), put]
        return Prepared(change, history, Compare(put.key, self._revision), operations)

    def applied(self, prepared: Prepared, revision: Revision | None = None) -> list[str]:
        """The change is stored. Without the `revision` of the history key nothing else can be changed before a look."""
        # From what is known now: a reader may have fetched the manifest in the meantime.
        undescribed = self._known.undescribed(prepared.change)
        self._known = replace(self._known.after(prepared.change), history=prepared.history)
        self.garbage.add(*undescribed)
        self.garbage.discard(*(each.object_id for each in prepared.change.added))
        if prepared.change.manifest is not None:
            self.garbage.discard(prepared.change.manifest.name)
        self._snapshot_is_old = True
        if revision is not None:
            self._revision = revision
            self._is_stale = False
        return undescribed

    async def fence(self) -> None:
        """Returns when the topic is ours, what is known is what is stored, and no earlier write of ours can happen."""
        await self.refresh_if_stale()
        await self.apply(HistoryChange())

    async def _answer_of(self, put: Put) -> Revision:
        """Resolves a failed compare: if the stored value is ours, an earlier try succeeded."""
        item = await self._metadata.get(put.key)
        if item is None or item.value != put.value:
            # A write that we gave up came late. What we knew is out of date, and the step begins anew.
            raise Conflict(put.key)
        return item.revision

    def _sessions_put(self, change: HistoryChange) -> list[Put]:
        sessions = change.sessions
        if sessions is None or sessions == self.sessions:
            return []
        if sessions.cut:
            if not self._said_cut:
                self._said_cut = True
                log.warning("sessions of producers cut: a lost owner's are not all known", extra={"topic": self.topic})
            self._metrics.sessions_cut["objects"] += sessions.cut
        return [Put(keys.sessions(self.topic), sessions.to_bytes(timed=False))]

    def sessions_with(self, batches: Iterable[Batch]) -> Sessions:
        """Where producers stand when these are in an object, too."""
        sessions = self.sessions.copy()
        for batch in batches:
            recall(sessions, batch)
        return sessions.newest(SESSIONS_BYTES_MAX)

    # --- readers without a broker -------------------------------------------------------------------------

    async def publish_snapshot(self) -> None:
        """A copy of the descriptors for readers without a broker, if something changed since the last one."""
        if not self._snapshot_is_old:
            return
        self._snapshot_is_old = False
        is_written = False
        try:
            orphans, voids = await self.gaps()
            is_written = await self._snapshots.publish(
                HistorySnapshot.of(self.topic, self.history, self.objects, orphans, voids)
            )
        finally:
            self._snapshot_is_old |= not is_written


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
