"""One reliable topic that this broker owns: publish, subscribe, read.

Publishing checks limits and appends; a message is acknowledged when the log says so. Subscriptions read what is
committed, each at its own place. Everything about the topic that outlives the process is written through `ownership`.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal

from pydanube.broker.base_subscription import Services
from pydanube.broker.cursors import in_turns
from pydanube.broker.gather import Gatherer
from pydanube.broker.ownership import Ownership
from pydanube.broker.registrations import (
    StoredConfig,
    StoredSubscription,
    read_config,
    read_subscriptions,
    subscription_put,
    subscriptions_in,
    topic_heartbeat,
)
from pydanube.broker.reservation import Reservation
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic_reader import TopicReader
from pydanube.core import keys
from pydanube.core.dispatch.consumer_window import DispatchLimits
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.events import Ranges
from pydanube.core.dispatch.key_shared import KeySharedDispatch
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.machine import DispatchMachine
from pydanube.core.dispatch.range_dispatch import ExclusiveDispatch, FailoverDispatch, SharedDispatch
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.dispatch.schedule import ScheduleTally
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.history.ownership import Orphan
from pydanube.core.history.tiers import Descriptor
from pydanube.core.names import ProducerId, SubscriptionName, TopicName
from pydanube.core.policies import Delivery, SubscriptionKind, TopicPolicy
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.errors import (
    Conflict,
    DanubeError,
    LimitReached,
    NotServed,
    Refused,
)
from pydanube.formats.batch import Batch, Envelope, delivery_times
from pydanube.history.change import HistoryChange, Void
from pydanube.history.compaction import swap
from pydanube.history.leftovers import files_set_aside, is_uncovered
from pydanube.history.served import Storage
from pydanube.history.upload_state import UploadState
from pydanube.history.uploader import Uploader
from pydanube.log.wal import CommitReceipt, TopicLog
from pydanube.ports import Compare, Delete, Item, MetadataStore, Put
from pydanube.telemetry import Telemetry

log = logging.getLogger(__name__)

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

    def limits(self, config: StoredConfig) -> DispatchLimits:
        return DispatchLimits(unacked_max=config.unacked_max or self.unacked_max)


class Topic(TopicReader):
    """A reliable topic. `open` brings its subscriptions back; `close` ends everything."""

    delivery: Delivery = Delivery.RELIABLE
    reliable: Literal[True] = True

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
        schema: TopicSchema,
        storage: Storage | None = None,
        orphans: Sequence[Orphan] = (),
        own_policy: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(
            name,
            topic_log,
            ownership,
            metadata,
            services,
            telemetry,
            policy,
            schema,
            storage,
            orphans,
            own_policy,
        )
        self._defaults = defaults
        self._reservation = reservation
        self._gatherer = Gatherer(topic_log, reservation)
        self._tally = ScheduleTally()
        self.heartbeat: Heartbeat | None = None  # of subscriptions that have none of their own; None: the broker's

    async def open(self, known: Sequence[Item] | None = None) -> None:
        """Subscriptions and their cursors as they are stored. `known`: everything below the topic, read before."""
        items = await self._metadata.list(keys.below_topic(self.name)) if known is None else known
        own = keys.topic_dispatch_config(self.name)
        self.heartbeat = topic_heartbeat(next((item for item in items if item.key == own), None))
        for stored in subscriptions_in(items, self.name):
            await self._restore(stored)

    async def close(self, why: str, *, moved_to: str = "", owned: bool = True) -> None:
        """Refuses new work, finishes commits, saves cursors, ends streams so that clients look the topic up again.

        Not `owned`: it was sealed, or another broker has it. Then nothing is written to the metadata store.
        """
        closing = NotServed(self.name, why, moved_to)
        await self._close_subscriptions(closing, save=owned)
        if self.storage is not None:
            await self.storage.uploader.remove(self.name)
        failure: DanubeError | None = None
        try:
            await self.log.close()
        except DanubeError as error:
            failure = error  # a full disk, say: the next open recovers the log. Streams must be ended all the same.
        if owned and failure is None:
            try:
                await self._reservation.shrink()
            except DanubeError as error:
                log.warning("reservation not shrunk", extra={"topic": self.name, "why": str(error)})
        else:
            await self._reservation.stop()
        self._telemetry.forget_topic(self.name)
        self.closed.notify(closing)
        if failure is not None:
            raise failure

    # --- leaving ------------------------------------------------------------------------------------

    def pause(self, why: str, moved_to: str = "") -> None:
        """Refuses publishes and acks and sends nothing more; what is being committed is finished.

        `moved_to` is the next owner: clients that are refused may wait there.
        """
        self._closing = NotServed(self.name, why, moved_to)
        for subscription in self.subscriptions.values():
            subscription.pause(self._closing)

    def resume(self) -> None:
        """Undoes `pause`. Does nothing if the topic was closed in the meantime."""
        if self.is_closed:
            return
        self._closing = None
        for subscription in self.subscriptions.values():
            subscription.resume()

    async def save_cursors(self) -> None:
        """All that changed, together, for good. What fails is logged, and still to be saved."""
        await self._services.cursors.flush(list(self.subscriptions.values()), last=True)

    @property
    def has_doubt(self) -> bool:
        """Whether a crash now would leave offsets whose content no other broker can know."""
        return self._reservation.has_doubt

    @property
    def confirmed_end(self) -> int:
        """The store's reservation ends here or beyond, whatever was not answered: every offset that is given out lies
        below it. For checkers.
        """
        return self._reservation.confirmed_end

    async def release_reservation(self) -> None:
        """Nothing was published for a while: if everything is in the object store, nothing stays reserved."""
        if self._closing is None and (self.storage is None or self.storage.uploads.waiting(self.log) is None):
            await self._reservation.release_reservation()

    def adopted(self, orphans: Sequence[Orphan], *, rescued: Ranges, voided: Ranges) -> None:
        """The orphans are resolved: the `rescued` offsets can be read, the `voided` ones never held a message."""
        assert self.storage is not None
        self.orphans = list(orphans)
        self._count_orphans()
        self.storage.tier.orphaned(self.orphans)
        for subscription in self.subscriptions.values():
            subscription.reveal(rescued, voided)

    async def forget_own(self, orphan: Orphan, damaged: Sequence[tuple[int, int]] = ()) -> None:
        """Removes what this disk has of the orphan: it is in the store now, or void.

        An orphan may reach over several epochs of its broker. They go as a whole, so all below it must be stored.
        """
        assert self.storage is not None
        tier = self.storage.tier
        for segment in self.log.lost_segments(orphan.epoch, orphan.start):
            below = max(segment.first_offset, tier.history.first_offset), min(segment.end_offset, orphan.start)
            gaps = (await tier.load_manifest()).missing(*below)
            if gaps and is_uncovered(gaps, (await self.gaps())[1]):
                log.warning("files of a lost epoch stay: the store does not have it all", extra={"topic": self.name})
                return
        await self.log.forget_lost(orphan.epoch, orphan.start, damaged)

    async def discard_orphan(self, start: int) -> Orphan | None:
        """Gives up what a lost owner may have written from `start` on: these offsets become void.

        Only on an operator's word: what the lost broker acknowledged there is gone. None: there is no such orphan.
        """
        upload_state = self.storage.uploader.get(self.name) if self.storage is not None else None
        if upload_state is None:
            self._check_open()
            return None
        async with upload_state.working:  # so that it is not adopted in the meantime
            orphan = next((each for each in self.orphans if each.start == start), None)
            if orphan is None:
                return None
            await upload_state.tier.refresh_if_stale()
            why = f"discarded by an operator; broker {orphan.broker_id} may have had messages there"
            others = [Delete(keys.orphan(self.name, start)), Delete(keys.rescue(self.name, orphan.epoch))]
            async with self.log.between_groups():  # before: no producer may get a receipt for what will be void
                self.log.sessions.forget([(start, orphan.end)])
            await upload_state.tier.apply(
                HistoryChange(voids=[Void(start, orphan.end, why)], others=others, appears=True)
            )
            left = [each for each in self.orphans if each is not orphan]
            try:
                await self.forget_own(orphan)  # if it was this disk that had it
            except DanubeError as error:
                log.warning("files of a discarded epoch are left", extra={"topic": self.name, "why": str(error)})
            self.adopted(left, rescued=(), voided=(OffsetRange(start, orphan.end),))
        log.warning("orphan discarded", extra={"topic": self.name, "first": start, "end": orphan.end})
        return orphan

    @property
    def has_damage(self) -> bool:
        """Whether this disk had offsets that cannot be read any more."""
        unreadable = self.storage is not None and self.storage.uploads.unreadable
        return bool(self.log.recovered.damage or unreadable)

    async def drain(self) -> None:
        """Returns when nothing is being committed any more. Only after `pause`: otherwise more may come."""
        async with self._changing:  # a subscription that is being created is complete
            pass
        await self.log.drain()
        while self._gatherer.busy:  # its next batch is submitted when the last one is decided
            await self._services.clock.sleep(0.0)
            await self.log.drain()
        await self._reservation.stop()

    # --- publishing ---------------------------------------------------------------------------------

    async def publish(self, producer: ProducerId, message: Envelope) -> int:
        """The message's offset, once it is on disk. Raises LogBusy if too much waits for the disk."""
        self._check_open()
        self.log.pressure.check()
        self.producers.admit(producer, message)
        if not self.enforcer.is_open and not self.enforcer.lets_one(message):
            await self.enforcer.admit_one(message)
            self._check_open()  # it may have been frozen in the meantime
        offset = await self._gatherer.send(message)
        self.metrics.messages_in.inc()
        size_bytes = len(message.payload)
        self.metrics.bytes_in.inc(size_bytes)
        self.metrics.sizes.add(size_bytes)
        return offset

    def submit_batch(self, batch: Batch, on_decided: Callable[[], None] | None = None) -> asyncio.Future[CommitReceipt]:
        """A native producer's batch, which was parsed; the future gets its receipt once it is on disk. Never waits.

        `on_decided` may be called before the future calls back: see `Committer.submit`.
        """
        self._check_open()
        rows = batch.header.rows
        self.producers.admit_batch(rows)
        times = self._admit_times(batch) if batch.header.envelope > 1 else None
        self._reservation.need(rows)
        future = self.log.submit(batch, on_decided)
        if times is not None:
            future.add_done_callback(partial(_forget_refused, self._tally, times))
        self.metrics.messages_in.inc(rows)
        size_bytes = batch.header.uncompressed_length
        self.metrics.bytes_in.inc(size_bytes)
        self.metrics.sizes.add(size_bytes / max(rows, 1), rows)
        return future

    def _admit_times(self, batch: Batch) -> list[int | None] | None:
        """Counts what is to be delivered later. Raises if more would be scheduled than a subscription may have."""
        header, times = batch.header, delivery_times(batch)
        session = self.log.sessions.get(header.producer_id)
        if session and session.session == header.session and header.first_sequence < session.next_sequence:
            return None  # sent again: it was counted, and its producer is to learn that it is stored
        known = max((each.scheduled for each in self.subscriptions.values()), default=0)
        if times is not None and not self._tally.admits(times, self._services.clock.time_us(), known):
            raise LimitReached(f"messages scheduled for later in {self.name}", self._tally.count_max)
        return times

    async def open_session(self, producer: ProducerId) -> int:
        """A new idempotent session of this producer; older ones are fenced."""
        self._check_open()
        return await self.log.open_session(producer)

    async def append(self, message: Envelope) -> int:
        """As `publish`, for the broker's own messages: dead letters."""
        self._check_open()
        return await self._gatherer.send(message)

    # --- history ------------------------------------------------------------------------------------

    async def swap_objects(self, old: Sequence[str], new: Descriptor) -> None:
        """Describes an object that a job made of several, or of one by erasing rows, instead of them.

        Raises Conflict, InvalidObject.
        """
        _, upload_state = _upload_state(self)
        async with upload_state.working:
            await swap(upload_state.tier, old, new)
            self._forget_read()  # a single object has other payloads now
            await upload_state.tier.publish_snapshot()

    async def flush_log(self) -> int:
        """Moves everything that is committed from the disk to the object store; see `Uploader.flush_log`."""
        uploader, upload_state = _upload_state(self)
        first_on_disk = await uploader.flush_log(upload_state)
        self._forget_read()
        return first_on_disk

    async def set_aside(self) -> list[str]:
        """Files of the topic on this disk that were set aside as damaged: they hold what they held."""
        return await files_set_aside(self.log.disk, self.name)

    # --- subscriptions ------------------------------------------------------------------------------

    async def reap(self, now: float) -> None:
        """Forgets consumers that have not been heard of for so long that they will not come back under their old id,
        and sessions of producers that sent nothing for long.
        """
        await super().reap(now)
        self.log.end_idle_sessions(is_sure=not self.orphans)

    def configure(self, name: SubscriptionName, config: StoredConfig) -> None:
        """Changed settings take effect on the live subscription."""
        subscription = self.subscriptions.get(name)
        if subscription is None:
            return
        subscription.change(policy=config.policy or FailurePolicy(), limits=self._defaults.limits(config))
        subscription.change_heartbeat(self._heartbeat_of(config.heartbeat), own=config.heartbeat)

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
        before = self.policy
        super().apply(policy)
        if before.max_subscription_dispatch_rate != policy.max_subscription_dispatch_rate:
            for subscription in self.subscriptions.values():
                subscription.change_rate(self._rate())

    async def _create(self, name: SubscriptionName, kind: SubscriptionKind, start: int | None) -> Subscription:
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
        settled = await in_turns(SubscriptionProgress.decoding(cursor, stored.holes))
        missing = [(each.start, each.end) for each in self.orphans]  # as they are now: nothing waits from here on
        progress = SubscriptionProgress.restored(cursor, settled, head=self.head, missing=missing)
        if settled is None:
            log.warning("ack holes unreadable", extra={"topic": self.name, "subscription": stored.name})
        subscription = Subscription(
            self,
            stored.name,
            stored.kind,
            dispatch_machine(stored, progress, limits=self._defaults.limits(config), rate=self._rate()),
            self._services,
            self._telemetry.subscription(self.name, stored.name),
            heartbeat=self._heartbeat_of(config.heartbeat),
            own_heartbeat=config.heartbeat,
            consumers=stored.consumers,
            cursor_revision=stored.cursor_revision,
            seeks=stored.seeks,
        )
        self._telemetry.subscription(self.name, stored.name, subscription.standing)
        self.subscriptions[stored.name] = subscription
        subscription.start()
        if self._closing is not None:
            subscription.pause(self._closing)  # the topic is about to leave, and paused the others in the meantime
        return subscription

    def _rate(self) -> TokenBucket | None:
        rate = self.policy.max_subscription_dispatch_rate
        return TokenBucket(rate, now=self._services.clock.elapsed()) if rate else None


def dispatch_machine(
    stored: StoredSubscription, progress: SubscriptionProgress, *, limits: DispatchLimits, rate: TokenBucket | None
) -> DispatchMachine:
    policy = stored.config.policy
    if stored.kind is SubscriptionKind.KEY_SHARED:
        away = {each.consumer_id: each.key_filters for each in stored.consumers}
        return KeySharedDispatch(progress, policy=policy, limits=limits, rate=rate, away=away)
    return MACHINES[stored.kind](progress, policy=policy, limits=limits, rate=rate)


def _upload_state(topic: Topic) -> tuple[Uploader, UploadState]:
    if topic.storage is None:
        raise Refused(f"the broker of topic {topic.name} has no object store")
    upload_state = topic.storage.uploader.get(topic.name)
    if upload_state is None:
        raise NotServed(topic.name, "it is about to leave its broker")
    return topic.storage.uploader, upload_state


def _forget_refused(tally: ScheduleTally, times: list[int | None], decided: asyncio.Future[CommitReceipt]) -> None:
    """What was refused, or there already, is not scheduled."""
    if not decided.cancelled() and (decided.exception() is not None or decided.result().duplicate):
        tally.forget(times)
