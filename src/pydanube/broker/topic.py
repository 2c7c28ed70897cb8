"""One reliable topic that this broker owns: publish, subscribe, read.

Publishing checks limits and appends; a message is acknowledged when the log says so. Subscriptions read what is
committed, each at its own place. Everything about the topic that outlives the process is written through `ownership`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from pydanube.broker.cursors import in_turns
from pydanube.broker.gather import Gatherer
from pydanube.broker.leftovers import is_uncovered
from pydanube.broker.members import (
    LEASE_OVER,
    Producers,
    StoredConfig,
    StoredSubscription,
    consumer_put,
    forget_silent,
    read_config,
    read_subscriptions,
    remove_below,
    subscription_put,
    subscriptions_in,
    topic_heartbeat,
)
from pydanube.broker.outbox import Registration, cost_bytes
from pydanube.broker.ownership import Ownership, Reservation
from pydanube.broker.subscription import Services, Subscription
from pydanube.broker.tiering import Tiering
from pydanube.broker.watchers import Watchers
from pydanube.core import keys
from pydanube.core.delivery import FailurePolicy
from pydanube.core.dispatch import ExclusiveDispatch, FailoverDispatch, SharedDispatch
from pydanube.core.events import Ranges
from pydanube.core.keyshared import KeySharedDispatch
from pydanube.core.lag import Heartbeat
from pydanube.core.limits import TokenBucket
from pydanube.core.machine import Machine
from pydanube.core.names import ConsumerId, ProducerId, SubscriptionName, TopicName, consumer_id
from pydanube.core.ownership import Orphan, void_to_bytes
from pydanube.core.policies import Delivery, SubscriptionKind, TopicPolicy
from pydanube.core.ranges import OffsetRange
from pydanube.core.roster import DispatchLimits
from pydanube.core.tiers import Descriptor
from pydanube.core.window import Progress
from pydanube.errors import (
    Conflict,
    DanubeError,
    LimitReached,
    LogDamaged,
    NotServed,
    OffsetOutOfRange,
    SubscriptionBusy,
    SubscriptionUnknown,
)
from pydanube.log.batch import Batch, Envelope, cut, messages, routing
from pydanube.log.cloud import CloudReader
from pydanube.log.tier import TopicTier
from pydanube.log.tier_swap import swap
from pydanube.log.wal import Receipt, TopicLog
from pydanube.ports import Compare, Delete, Item, MetadataStore, Put
from pydanube.telemetry import Telemetry

log = logging.getLogger(__name__)

LATEST: Final = None
CLOUD_READERS_MAX: Final = 1_000
_READ_BYTES: Final = 256 * 1024

MACHINES: Final = {
    SubscriptionKind.EXCLUSIVE: ExclusiveDispatch,
    SubscriptionKind.FAILOVER: FailoverDispatch,
    SubscriptionKind.SHARED: SharedDispatch,
}


class Defaults:
    """What a subscription gets unless its own configuration says otherwise."""

    __slots__ = ("heartbeat", "unacked_max")

    def __init__(self, heartbeat: Heartbeat, unacked_max: int) -> None:
        self.heartbeat = heartbeat
        self.unacked_max = unacked_max


class Storage(NamedTuple):
    """The cloud tier, as one topic has it."""

    tier: TopicTier
    reader: CloudReader
    tiering: Tiering


class Topic:
    """A reliable topic. `open` brings its subscriptions back; `close` lets go of everything."""

    delivery: Final = Delivery.RELIABLE

    def __init__(
        self,
        name: TopicName,
        topic_log: TopicLog,
        ownership: Ownership,
        reservation: Reservation,
        metadata: MetadataStore,
        services: Services,
        telemetry: Telemetry,
        policy: TopicPolicy,
        defaults: Defaults,
        schema_subject: str | None,
        storage: Storage | None = None,
        orphans: Sequence[Orphan] = (),
    ) -> None:
        self.name = name
        self.log = topic_log
        self.storage = storage
        self.orphans = list(orphans)
        if storage is not None:
            storage.tier.orphaned(self.orphans)
        self.ownership = ownership
        self.policy = policy
        self.own_policy: Mapping[str, object] | None = None  # what the topic has of its own, beside its namespace's
        self.schema_subject = schema_subject
        self.subscriptions: dict[SubscriptionName, Subscription] = {}
        self.producers = Producers(name, policy, services.clock)
        self.metrics = telemetry.topic(name)
        self.metrics.producers = self.producers.__len__
        self._count_orphans()
        self.closed = Watchers()
        self._telemetry = telemetry
        self._metadata = metadata
        self._services = services
        self._defaults = defaults
        self._reservation = reservation
        self._gatherer = Gatherer(topic_log, reservation)
        self._kept = services.kept
        self._me = object()  # of this topic in what all keep
        self._cloud_ends: set[int] = set()  # where those stand who read history; only counted
        self._changing = asyncio.Lock()  # subscriptions are made and removed one at a time
        self.heartbeat: Heartbeat | None = None  # of subscriptions that have none of their own; None: the broker's
        self._closing: NotServed | None = None
        self.is_closed = False  # for good; or closing

    async def open(self, known: Sequence[Item] | None = None) -> None:
        """Subscriptions and their cursors as they are stored. `known`: everything below the topic, read before."""
        items = await self._metadata.list(keys.below_topic(self.name)) if known is None else known
        own = keys.topic_dispatch_config(self.name)
        self.heartbeat = topic_heartbeat(next((item for item in items if item.key == own), None))
        for stored in subscriptions_in(items, self.name):
            await self._restore(stored)

    async def close(self, why: str, *, moved_to: str = "", owned: bool = True) -> None:
        """Refuses new work, finishes commits, saves cursors, ends streams so that clients look the topic up again.

        Not `owned`: it was sealed, or somebody else has it. Then nothing is written to the metadata store.
        """
        self._closing = NotServed(self.name, why, moved_to)
        self.is_closed = True
        async with self._changing:  # one that is being made is finished, and closed with the others
            for subscription in self.subscriptions.values():
                await subscription.close(self._closing, save=owned)
            self.subscriptions.clear()
        if self.storage is not None:
            await self.storage.tiering.remove(self.name)
        failure: DanubeError | None = None
        try:
            await self.log.close()
        except DanubeError as error:
            failure = error  # no room, say: whoever opens the log next recovers it. Clients must be told all the same.
        if owned and failure is None:
            try:
                await self._reservation.shrink()
            except DanubeError as error:
                log.warning("reservation not shrunk", extra={"topic": self.name, "why": str(error)})
        else:
            await self._reservation.stop()
        self._telemetry.forget_topic(self.name)
        self.closed.tell(self._closing)
        if failure is not None:
            raise failure

    # --- leaving ------------------------------------------------------------------------------------

    def freeze(self, why: str, moved_to: str = "") -> None:
        """Refuses publishes and acks and sends nothing more; what is being committed is finished.

        `moved_to` is who is about to have the topic: whoever is refused may wait there.
        """
        self._closing = NotServed(self.name, why, moved_to)
        for subscription in self.subscriptions.values():
            subscription.freeze(self._closing)

    def thaw(self) -> None:
        """Undoes `freeze`. Nothing, if it was closed meanwhile."""
        if self.is_closed:
            return
        self._closing = None
        for subscription in self.subscriptions.values():
            subscription.thaw()

    async def save_cursors(self) -> None:
        """All that changed, together, for good. What fails is logged, and still to be saved."""
        await self._services.cursors.flush(list(self.subscriptions.values()), last=True)

    @property
    def has_doubt(self) -> bool:
        """Whether a crash now would leave offsets of which nobody else can tell what they hold."""
        return self._reservation.has_doubt

    @property
    def confirmed_end(self) -> int:
        """The store's reservation ends here or beyond, whatever was not answered: every offset that is given out lies
        below it. For whoever checks that.
        """
        return self._reservation.confirmed_end

    async def rest(self) -> None:
        """Nothing was published for a while: if everything is in the object store, nothing stays reserved."""
        if self._closing is None and (self.storage is None or self.storage.tier.waiting(self.log) is None):
            await self._reservation.rest()

    def adopted(self, orphans: Sequence[Orphan], *, rescued: Ranges, voided: Ranges) -> None:
        """Offsets of a lost owner have their place now: these can be read, those were never used."""
        assert self.storage is not None
        self.orphans = list(orphans)
        self._count_orphans()
        self.storage.tier.orphaned(self.orphans)
        for subscription in self.subscriptions.values():
            subscription.reveal(rescued, voided)

    async def forget_own(self, orphan: Orphan, damaged: Sequence[tuple[int, int]] = ()) -> None:
        """What this disk has of the orphan goes: it is elsewhere now, or void.

        An orphan may reach over several epochs of its broker. They go as a whole, so all below it must be stored.
        """
        assert self.storage is not None
        tier = self.storage.tier
        for segment in self.log.lost_segments(orphan.epoch, orphan.start):
            below = max(segment.first_offset, tier.history.first_offset), min(segment.end_offset, orphan.start)
            gaps = (await tier.know_all()).missing(*below)
            if gaps and is_uncovered(gaps, (await self.gaps())[1]):
                log.warning("files of a lost epoch stay: the store does not have it all", extra={"topic": self.name})
                return
        await self.log.forget_lost(orphan.epoch, orphan.start, damaged)

    def orphan_at(self, offset: int) -> Orphan | None:
        return next((each for each in self.orphans if each.start <= offset < each.end), None)

    def _count_orphans(self) -> None:
        self.metrics.orphan_ranges.set(len(self.orphans))
        self.metrics.orphan_messages.set(sum(each.end - each.start for each in self.orphans))

    async def discard_orphan(self, start: int) -> Orphan | None:
        """Gives up what a lost owner may have written from `start` on: it will never hold a message.

        Only on an operator's word: what the lost broker acknowledged there is gone. None: there is no such orphan.
        """
        carried = self.storage.tiering.get(self.name) if self.storage is not None else None
        if carried is None:
            self._check_open()
            return None
        async with carried.working:  # nobody adopts it meanwhile
            orphan = next((each for each in self.orphans if each.start == start), None)
            if orphan is None:
                return None
            await carried.tier.make_sure()
            why = f"discarded by an operator; broker {orphan.broker_id} may have had messages there"
            operations: list[Put | Delete] = [
                Put(keys.void(self.name, start), void_to_bytes(orphan.end, why)),
                Delete(keys.orphan(self.name, start)),
                Delete(keys.rescue(self.name, orphan.epoch)),
            ]
            async with self.log.between_groups():  # before: nobody may get a receipt for what will be void
                self.log.sessions.forget([(start, orphan.end)])
            history = carried.tier.history
            await carried.tier.change(operations, replace(history, history_version=history.history_version + 1))
            others = [each for each in self.orphans if each is not orphan]
            try:
                await self.forget_own(orphan)  # if it was this disk that had it
            except DanubeError as error:
                log.warning("files of a discarded epoch are left", extra={"topic": self.name, "why": str(error)})
            self.adopted(others, rescued=(), voided=(OffsetRange(start, orphan.end),))
        log.warning("orphan discarded", extra={"topic": self.name, "first": start, "end": orphan.end})
        return orphan

    @property
    def has_damage(self) -> bool:
        """Whether this disk had offsets that cannot be read any more."""
        unreadable = self.storage is not None and self.storage.tier.unreadable
        return bool(self.log.recovered.damage or unreadable)

    async def quiet(self) -> None:
        """Returns when nothing is being committed any more. Only after `freeze`: otherwise more may come."""
        async with self._changing:  # a subscription that is being made is made
            pass
        await self.log.quiet()
        while self._gatherer.busy:  # its next batch is submitted when the last one is decided
            await self._services.clock.sleep(0.0)
            await self.log.quiet()
        await self._reservation.stop()

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

    # --- publishing ---------------------------------------------------------------------------------

    async def add_producer(self, name: str, *, exclusive: bool = False) -> ProducerId:
        self._check_open()
        return self.producers.add(name, exclusive=exclusive)

    def touch_producer(self, identity: ProducerId) -> bool:
        return self.producers.touch(identity)

    async def publish(self, producer: ProducerId, message: Envelope) -> int:
        """The message's offset, once it is on disk. Raises LogBusy if too much waits for the disk."""
        self._check_open()
        self.log.pressure.check()
        self.producers.admit(producer, message)
        offset = await self._gatherer.send(message)
        self.metrics.messages_in.inc()
        size_bytes = len(message.payload)
        self.metrics.bytes_in.inc(size_bytes)
        self.metrics.sizes.add(size_bytes)
        return offset

    def submit_batch(self, batch: Batch, tell: Callable[[], None] | None = None) -> asyncio.Future[Receipt]:
        """A native producer's batch, which was parsed; the future gets its receipt once it is on disk. Never waits.

        `tell` may be called before the future calls back: see `Committer.submit`.
        """
        self._check_open()
        rows = batch.header.rows
        self.producers.admit_batch(rows)
        self._reservation.need(rows)
        future = self.log.submit(batch, tell)
        self.metrics.messages_in.inc(rows)
        size_bytes = batch.header.uncompressed_length
        self.metrics.bytes_in.inc(size_bytes)
        self.metrics.sizes.add(size_bytes / max(rows, 1), rows)
        return future

    async def wait_beyond(self, offset: int, seconds: float) -> None:
        """Returns when something at `offset` is committed, the topic closes, or the time is over."""
        waiting = asyncio.ensure_future(self.log.wait_beyond(offset))
        sleeping = asyncio.ensure_future(self._services.clock.sleep(seconds))
        try:
            await asyncio.wait({waiting, sleeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            sleeping.cancel()

    async def open_session(self, producer: ProducerId) -> int:
        """A new idempotent session of this producer; older ones are fenced."""
        self._check_open()
        return await self.log.open_session(producer)

    async def append(self, message: Envelope) -> int:
        """As `publish`, for the broker's own messages: dead letters."""
        self._check_open()
        return await self._gatherer.send(message)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise self._closing
        if not self._services.may_serve():
            raise NotServed(self.name, LEASE_OVER)

    # --- reading ------------------------------------------------------------------------------------

    async def rows(self, first: int, end: int, bytes_max: int | None = None) -> list[tuple[int, Envelope]]:
        """Offsets and messages of [first, end), as far as they are committed, until they have `bytes_max`."""
        found: list[tuple[int, Envelope]] = []
        offset, room_bytes = first, sys.maxsize if bytes_max is None else bytes_max
        while offset < end:
            batches = await self._read(offset, bool(found))
            if not batches:
                break
            for batch in batches:
                base, upto = batch.header.base_offset, min(end, batch.header.end_offset)
                decoded = self._decode(batch)
                for at in range(max(offset, base), upto):
                    found.append((at, decoded[at - base]))
                    room_bytes -= cost_bytes(decoded[at - base])
                    if room_bytes <= 0:
                        return found
                offset = upto
                if offset >= end:
                    break
        return found

    async def batches(self, first: int, end: int, bytes_max: int) -> list[Batch]:
        """Stored batches from the one that holds `first` on, none beginning at or after `end`."""
        found = await self._stored(first, bytes_max)
        return [batch for batch in found if batch.header.base_offset < end]

    async def row_keys(self, first: int, end: int) -> list[tuple[int, str]]:
        """Offsets and routing keys; a message without one goes by its producer's name."""
        found: list[tuple[int, str]] = []
        offset = first
        while offset < end:
            batches = await self._read(offset, bool(found))
            if not batches:
                break
            for batch in batches:
                base, upto = batch.header.base_offset, min(end, batch.header.end_offset)
                routing_keys, producers = routing(batch)
                for at in range(max(offset, base), upto):
                    key = routing_keys[at - base]
                    found.append((at, key if key is not None else producers[at - base] or ""))
                offset = upto
        return found

    async def _read(self, offset: int, something: bool) -> list[Batch]:
        """As the log reads. Whoever has `something` already is told of a gap or an error only when he asks for it."""
        piece: list[Batch] = self._kept.get(self._me) or []
        place = bisect_right(piece, offset, key=lambda batch: batch.header.end_offset)
        if place < len(piece) and piece[place].header.base_offset <= offset:
            return piece[place:]  # a small window asks for the same piece of a file again and again
        try:
            piece = await self._stored(offset, _READ_BYTES)
            self._kept.put(self._me, piece, sum(batch.header.size_bytes for batch in piece))
            return piece
        except DanubeError:
            if something:
                return []
            raise

    async def _stored(self, offset: int, bytes_max: int) -> list[Batch]:
        """Batches from the one that holds `offset` on, from the log if it has it and from the cloud tier else."""
        if offset < self.retained_from:  # what lies below may still be on the disk
            raise OffsetOutOfRange(self.name, offset, self.first_offset, self.head)
        if (orphan := self.orphan_at(offset)) is not None:
            # This disk may have it. Nobody knows yet what of it was sent again, and is not to be seen.
            raise OffsetOutOfRange(self.name, offset, orphan.end, self.head)
        if self.orphans and (elsewhere := await self._in_the_store(offset, bytes_max)) is not None:
            return elsewhere
        try:
            found = self._without_orphans(await self.log.read(offset, bytes_max=bytes_max))
            if offset in self._cloud_ends:  # where somebody had read to the end of what the cloud tier has
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
            # What a lost owner may have is no gap: whoever steps over this one must not step over that too.
            following = min([following, *(each.start for each in self.orphans if each.start > offset)])
            raise OffsetOutOfRange(self.name, offset, following, self.head) from None

    async def _in_the_store(self, offset: int, bytes_max: int) -> list[Batch] | None:
        """What was rescued of files that are still here is read as it is in the store: marked, without what was sent
        again. They stay until all of it is rescued. None: it is none of that.
        """
        if self.storage is None or not any(first <= offset < end for first, end in self._rescued_in_part()):
            return None
        stored = await self.storage.reader.read(self.storage.tier, offset, bytes_max)
        if stored is not None:
            self._count_cloud_read(offset, stored)
            return stored
        void_end = next((end for first, end in (await self.gaps())[1] if first <= offset < end), None)
        if void_end is not None:
            raise OffsetOutOfRange(self.name, offset, void_end, self.head)
        return None

    def _rescued_in_part(self) -> list[tuple[int, int]]:
        """What this disk has of lost epochs below the rest of their orphan."""
        return [
            (segment.first_offset, orphan.start)
            for orphan in self.orphans
            for segment in self.log.lost_segments(orphan.epoch, orphan.start)
            if segment.first_offset < orphan.start
        ]

    def _without_orphans(self, batches: list[Batch]) -> list[Batch]:
        """Those before the first orphan that this disk has, too, and before what was rescued of it."""
        if not self.orphans:
            return batches
        rescued = self._rescued_in_part()
        for place, batch in enumerate(batches):
            first, end = batch.header.base_offset, batch.header.end_offset
            if any(each.start < end and first < each.end for each in self.orphans):
                start = min(each.start for each in self.orphans if each.end > first)
                return [*batches[:place], *([cut(batch, first, start)] if first < start else [])]
            if place and any(start <= first < rescued_end for start, rescued_end in rescued):
                return batches[:place]
        return batches

    def _count_cloud_read(self, offset: int, batches: Sequence[Batch]) -> None:
        self._telemetry.wal.reads["cloud"] += 1
        self._cloud_ends.discard(offset)
        if batches and len(self._cloud_ends) < CLOUD_READERS_MAX:
            self._cloud_ends.add(batches[-1].header.end_offset)

    async def swap_objects(self, old: Sequence[str], new: Descriptor) -> None:
        """Describes an object that a job made of several, instead of them. Raises Conflict, InvalidObject."""
        carried = self.storage.tiering.get(self.name) if self.storage is not None else None
        if carried is None:
            raise NotServed(self.name, "its broker has no object store")
        async with carried.working:
            await swap(carried.tier, old, new)
            await carried.tier.publish_snapshot()

    async def gaps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Orphans and voids, as [first, end): offsets that no object and no log here holds."""
        found = []
        for prefix in (keys.orphans(self.name), keys.voids(self.name)):
            items = [(keys.start_of(item.key), item.value) for item in await self._metadata.list(prefix)]
            found.append([(start, int(json.loads(value)["end"])) for start, value in items if start is not None])
        return found[0], found[1]

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
            except (OffsetOutOfRange, LogDamaged):  # freed meanwhile, or damaged: the cloud tier may have it all
                in_cloud = await reader.offset_at(tier, time_us)
                if in_cloud is not None:
                    return in_cloud
                in_log = await self.log.offset_at(time_us, tier.objects.end)
            if self.log.first_offset == kept_from:  # else what was passed over in the cloud may have left the log
                return in_log if in_cloud is None else min(in_log, in_cloud)

    def _decode(self, batch: Batch) -> list[Envelope]:
        # A batch of the log and one that the cloud tier made may begin at the same offset and be of different length.
        key = (self._me, batch.header.base_offset, batch.header.rows)
        decoded: list[Envelope] | None = self._kept.get(key)
        if decoded is None:
            decoded = messages(batch)
            self._kept.put(key, decoded, sum(map(cost_bytes, decoded)))
        return decoded

    # --- subscriptions ------------------------------------------------------------------------------

    async def subscribe(
        self,
        name: SubscriptionName,
        kind: SubscriptionKind,
        consumer: str,
        key_filters: tuple[str, ...] = (),
        start: int | None = LATEST,
        *,
        native: bool = False,
        hands_over: bool = False,
    ) -> ConsumerId:
        """A consumer joins; the subscription is made if it is new, at `start` (an offset), or at the head.

        Its place is fixed and stored before this returns: what is published from then on is delivered.
        """
        async with self._changing:
            self._check_open()
            subscription = self.subscriptions.get(name)
            if subscription is None:
                subscription = await self._create(name, kind, start)
            identity = consumer_id(self.name, name, consumer)
            known = subscription.knows(identity)
            if not subscription.is_connected(identity):
                self._check_consumer_limits(subscription)
            subscription.join(consumer, key_filters, native=native, hands_over=hands_over)
            if not known:
                try:
                    await self.ownership.write([consumer_put(self.name, name, identity, consumer, key_filters)])
                except BaseException:
                    subscription.forget(identity)
                    raise
            self._check_open()
            return identity

    async def unsubscribe(self, name: SubscriptionName) -> None:
        """Removes the subscription and its cursor. Refused while a consumer is connected."""
        async with self._changing:
            self._check_open()
            subscription = self.require(name)
            holder = next((each.name for each in subscription.consumers if each.connected), None)
            if holder is not None:
                raise SubscriptionBusy(self.name, name, holder)
            del self.subscriptions[name]
            await subscription.close(NotServed(self.name, "the subscription was removed"))
            own = Delete(keys.subscription(self.name, name))
            await remove_below(self._metadata, self.ownership, [keys.below_subscription(self.name, name)], [own])
            self._telemetry.forget_subscription(self.name, name)

    async def reap(self, now: float) -> None:
        """Forgets consumers that have not been heard of for so long that they will not come back under their old id,
        and sessions of producers that sent nothing for long.
        """
        async with self._changing:
            await forget_silent(self.name, self.ownership, self.subscriptions, now)
        self.log.end_idle_sessions(is_sure=not self.orphans)

    def require(self, name: SubscriptionName) -> Subscription:
        subscription = self.subscriptions.get(name)
        if subscription is None:
            raise SubscriptionUnknown(self.name, name)
        return subscription

    def configure(self, name: SubscriptionName, config: StoredConfig) -> None:
        """Changed settings take effect on the live subscription."""
        subscription = self.subscriptions.get(name)
        if subscription is None:
            return
        subscription.change(policy=config.policy or FailurePolicy(), limits=self._limits(config))
        subscription.own_heartbeat = config.heartbeat
        subscription.change_heartbeat(self._heartbeat_of(config.heartbeat))

    async def set_heartbeat(self, heartbeat: Heartbeat | None) -> None:
        """Of all its subscriptions, also later ones, that have none of their own. None: the broker's."""
        key = keys.topic_dispatch_config(self.name)
        value = json.dumps({"heartbeat": str(heartbeat)}).encode()
        await self.ownership.write([Delete(key) if heartbeat is None else Put(key, value)])
        self.heartbeat = heartbeat
        for subscription in self.subscriptions.values():
            if subscription.own_heartbeat is None:
                subscription.change_heartbeat(self._heartbeat_of(None))

    def _heartbeat_of(self, own: Heartbeat | None) -> Heartbeat:
        return own or self.heartbeat or self._defaults.heartbeat

    def apply(self, policy: TopicPolicy) -> None:
        """Changed limits hold from now on. Nobody who is connected is sent away."""
        before, self.policy = self.policy, policy
        self.producers.apply(policy)
        if before.max_subscription_dispatch_rate != policy.max_subscription_dispatch_rate:
            for subscription in self.subscriptions.values():
                subscription.change_rate(self._rate())

    async def _create(self, name: SubscriptionName, kind: SubscriptionKind, start: int | None) -> Subscription:
        if not self.policy.allows_subscription(len(self.subscriptions)):
            raise LimitReached("subscriptions", self.policy.max_subscriptions_per_topic)
        position = self.head if start is None else min(max(start, self.first_offset), self.head)
        put = subscription_put(self.name, name, kind)
        cursor = Put(keys.cursor(self.name, name), str(position - 1).encode())
        # Only if there is none: one of an earlier try whose answer was lost stands where it stood then, and a try that
        # comes late must not put a cursor back.
        revision = await self.ownership.write_if([Compare(put.key, 0)], [put, cursor])
        if revision is None:
            found = await read_subscriptions(self._metadata, self.name)
            stored = next((each for each in found if each.name == name), None)
            if stored is None:
                raise Conflict(put.key)
            return await self._restore(stored)
        config = await read_config(self._metadata, self.name, name)  # which may be there before the subscription is
        stored = StoredSubscription(name, kind, position - 1, None, [], revision, config)
        log.info("subscription created", extra={"topic": self.name, "subscription": name, "start": position})
        return await self._restore(stored)

    async def _restore(self, stored: StoredSubscription) -> Subscription:
        config = stored.config
        cursor = -1 if stored.cursor is None else stored.cursor
        settled = await in_turns(Progress.decoding(cursor, stored.holes))
        missing = [(each.start, each.end) for each in self.orphans]  # as they are now: nothing waits from here on
        progress = Progress.restored(cursor, settled, head=self.head, missing=missing)
        if settled is None:
            log.warning("ack holes unreadable", extra={"topic": self.name, "subscription": stored.name})
        subscription = Subscription(
            self,
            stored.name,
            stored.kind,
            self._machine(stored.kind, progress, config, stored.consumers),
            self._services,
            self._telemetry.subscription(self.name, stored.name),
            heartbeat=self._heartbeat_of(config.heartbeat),
            consumers=stored.consumers,
            cursor_revision=stored.cursor_revision,
            seeks=stored.seeks,
        )
        subscription.own_heartbeat = config.heartbeat
        subscription.metrics.standing = subscription.standing
        self.subscriptions[stored.name] = subscription
        subscription.start()
        if self._closing is not None:
            subscription.freeze(self._closing)  # the topic is about to leave, and froze the others meanwhile
        return subscription

    def _machine(
        self, kind: SubscriptionKind, progress: Progress, config: StoredConfig, consumers: list[Registration]
    ) -> Machine:
        bucket, limits = self._rate(), self._limits(config)
        if kind is SubscriptionKind.KEY_SHARED:
            away = {each.consumer_id: each.key_filters for each in consumers}
            return KeySharedDispatch(progress, policy=config.policy, limits=limits, rate=bucket, away=away)
        return MACHINES[kind](progress, policy=config.policy, limits=limits, rate=bucket)

    def _rate(self) -> TokenBucket | None:
        rate = self.policy.max_subscription_dispatch_rate
        return TokenBucket(rate, now=self._services.clock.elapsed()) if rate else None

    def _limits(self, config: StoredConfig) -> DispatchLimits:
        return DispatchLimits(unacked_max=config.unacked_max or self._defaults.unacked_max)

    def _check_consumer_limits(self, subscription: Subscription) -> None:
        connected = sum(each.connected for each in self.subscriptions.values())
        if not self.policy.allows_consumer_on_topic(connected):
            raise LimitReached("consumers of the topic", self.policy.max_consumers_per_topic)
        if not self.policy.allows_consumer_on_subscription(subscription.connected):
            raise LimitReached("consumers of the subscription", self.policy.max_consumers_per_subscription)
