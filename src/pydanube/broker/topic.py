"""One reliable topic that this broker owns: publish, subscribe, read.

Publishing checks limits and appends; a message is acknowledged when the log says so. Subscriptions read what is
committed, each at its own place. Everything about the topic that outlives the process is written through `ownership`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Final

from pydanube.broker.gather import Gatherer
from pydanube.broker.members import (
    Producers,
    StoredConfig,
    StoredSubscription,
    consumer_put,
    is_silent,
    read_config,
    read_subscriptions,
    remove_below,
    subscription_put,
)
from pydanube.broker.outbox import Registration
from pydanube.broker.ownership import Ownership, Reservation
from pydanube.broker.subscription import Services, Subscription
from pydanube.core import keys
from pydanube.core.delivery import FailurePolicy
from pydanube.core.dispatch import ExclusiveDispatch, FailoverDispatch, SharedDispatch
from pydanube.core.keyshared import KeySharedDispatch
from pydanube.core.lag import Heartbeat
from pydanube.core.limits import TokenBucket
from pydanube.core.machine import Machine
from pydanube.core.names import ConsumerId, ProducerId, SubscriptionName, TopicName, consumer_id
from pydanube.core.policies import Delivery, SubscriptionKind, TopicPolicy
from pydanube.core.roster import DispatchLimits
from pydanube.core.window import Progress
from pydanube.errors import (
    DanubeError,
    LimitReached,
    NotServed,
    OffsetOutOfRange,
    SubscriptionBusy,
    SubscriptionUnknown,
)
from pydanube.log.batch import Batch, Envelope, decode, messages
from pydanube.log.wal import Receipt, TopicLog
from pydanube.ports import Delete, MetadataStore, Put
from pydanube.telemetry import Telemetry

log = logging.getLogger(__name__)

LATEST: Final = None
DECODED_MAX: Final = 64  # batches kept as values, shared by subscriptions that read the same place
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
    ) -> None:
        self.name = name
        self.log = topic_log
        self.ownership = ownership
        self.policy = policy
        self.schema_subject = schema_subject
        self.subscriptions: dict[SubscriptionName, Subscription] = {}
        self.producers = Producers(name, policy, services.clock)
        self.metrics = telemetry.topic(name)
        self._telemetry = telemetry
        self._metadata = metadata
        self._services = services
        self._defaults = defaults
        self._reservation = reservation
        self._gatherer = Gatherer(topic_log, reservation)
        self._decoded: OrderedDict[int, list[Envelope]] = OrderedDict()
        self._piece: list[Batch] = []  # what was read last
        self._changing = asyncio.Lock()  # subscriptions are made and removed one at a time
        self._closing: NotServed | None = None

    async def open(self) -> None:
        """Subscriptions and their cursors as they were stored."""
        for stored in await read_subscriptions(self._metadata, self.name):
            await self._restore(stored)

    async def close(self, why: str) -> None:
        """Refuses new work, finishes commits, saves cursors, ends streams so that clients look the topic up again."""
        self._closing = NotServed(self.name, why)
        async with self._changing:  # one that is being made is finished, and closed with the others
            for subscription in self.subscriptions.values():
                await subscription.close(self._closing)
            self.subscriptions.clear()
        await self.log.close()
        try:
            await self._reservation.shrink()
        except DanubeError as error:
            log.warning("reservation not shrunk", extra={"topic": self.name, "why": str(error)})
        self._telemetry.forget_topic(self.name)

    @property
    def head(self) -> int:
        return self.log.head

    @property
    def first_offset(self) -> int:
        return self.log.first_offset

    # --- publishing ---------------------------------------------------------------------------------

    async def add_producer(self, name: str, *, exclusive: bool = False) -> ProducerId:
        self._check_open()
        identity = self.producers.add(name, exclusive=exclusive)
        self.metrics.producers.set(len(self.producers))
        return identity

    def touch_producer(self, identity: ProducerId) -> bool:
        return self.producers.touch(identity)

    async def publish(self, producer: ProducerId, message: Envelope) -> int:
        """The message's offset, once it is on disk."""
        self._check_open()
        self.producers.admit(producer, message)
        offset = await self._gatherer.send(message)
        self.metrics.messages_in.inc()
        self.metrics.bytes_in.inc(len(message.payload))
        return offset

    def submit_batch(self, batch: Batch) -> asyncio.Future[Receipt]:
        """A native producer's batch, which was parsed; the future gets its receipt once it is on disk. Never waits."""
        self._check_open()
        rows = batch.header.rows
        self.producers.admit_batch(rows)
        self._reservation.need(rows)
        future = self.log.submit(batch)
        self.metrics.messages_in.inc(rows)
        self.metrics.bytes_in.inc(batch.header.uncompressed_length)
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

    # --- reading ------------------------------------------------------------------------------------

    async def rows(self, first: int, end: int) -> list[tuple[int, Envelope]]:
        """Offsets and messages of [first, end), as far as they are committed."""
        found: list[tuple[int, Envelope]] = []
        offset = first
        while offset < end:
            batches = await self._read(offset, bool(found))
            if not batches:
                break
            for batch in batches:
                base, upto = batch.header.base_offset, min(end, batch.header.end_offset)
                decoded = self._decode(batch)
                found += [(at, decoded[at - base]) for at in range(max(offset, base), upto)]
                offset = upto
                if offset >= end:
                    break
        return found

    async def batches(self, first: int, end: int, bytes_max: int) -> list[Batch]:
        """Stored batches from the one that holds `first` on, none beginning at or after `end`."""
        found = await self.log.read(first, bytes_max=bytes_max)
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
                rows = decode(batch)
                routing, producers = rows.column(2).to_pylist(), rows.column(3).to_pylist()
                for at in range(max(offset, base), upto):
                    key = routing[at - base]
                    found.append((at, key if key is not None else producers[at - base] or ""))
                offset = upto
        return found

    async def _read(self, offset: int, something: bool) -> list[Batch]:
        """As the log reads. Whoever has `something` already is told of a gap here only when he asks for it."""
        for place, batch in enumerate(self._piece):
            if batch.header.base_offset <= offset < batch.header.end_offset:
                return self._piece[place:]  # a small window asks for the same piece of a file again and again
        try:
            self._piece = await self.log.read(offset, bytes_max=_READ_BYTES)
            return self._piece
        except OffsetOutOfRange:
            if something:
                return []
            raise

    async def peek(self, offset: int, count: int) -> list[tuple[int, Envelope]]:
        return await self.rows(offset, min(offset + count, self.head))

    async def offset_at(self, time_us: int) -> int:
        return await self.log.offset_at(time_us)

    def _decode(self, batch: Batch) -> list[Envelope]:
        base = batch.header.base_offset
        decoded = self._decoded.get(base)
        if decoded is None:
            decoded = self._decoded[base] = messages(batch)
            while len(self._decoded) > DECODED_MAX:
                self._decoded.popitem(last=False)
        else:
            self._decoded.move_to_end(base)
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
            subscription.join(consumer, key_filters, native=native)
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
        """Forgets consumers that have not been heard of for so long that they will not come back under their old id."""
        for name, subscription in list(self.subscriptions.items()):
            silent = [each.consumer_id for each in subscription.consumers if is_silent(each, now)]
            if silent:
                await self.ownership.write([Delete(keys.consumer(self.name, name, each)) for each in silent[:100]])
                for each in silent[:100]:
                    subscription.forget(each)

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
        subscription.change_heartbeat(config.heartbeat or self._defaults.heartbeat)

    async def _create(self, name: SubscriptionName, kind: SubscriptionKind, start: int | None) -> Subscription:
        if not self.policy.allows_subscription(len(self.subscriptions)):
            raise LimitReached("subscriptions", self.policy.max_subscriptions_per_topic)
        position = self.head if start is None else min(max(start, self.first_offset), self.head)
        stored = StoredSubscription(name, kind, position - 1, None, [])
        cursor = Put(keys.cursor(self.name, name), str(position - 1).encode())
        await self.ownership.write([subscription_put(self.name, name, kind), cursor])
        log.info("subscription created", extra={"topic": self.name, "subscription": name, "start": position})
        return await self._restore(stored)

    async def _restore(self, stored: StoredSubscription) -> Subscription:
        config = await read_config(self._metadata, self.name, stored.name)
        cursor = -1 if stored.cursor is None else stored.cursor
        progress, whole = Progress.restore(cursor, stored.holes, head=self.head)
        if not whole:
            log.warning("ack holes unreadable", extra={"topic": self.name, "subscription": stored.name})
        subscription = Subscription(
            self,
            stored.name,
            stored.kind,
            self._machine(stored.kind, progress, config, stored.consumers),
            self._services,
            self._telemetry.subscription(self.name, stored.name),
            heartbeat=config.heartbeat or self._defaults.heartbeat,
            consumers=stored.consumers,
        )
        subscription.metrics.standing = subscription.standing
        self.subscriptions[stored.name] = subscription
        subscription.start()
        return subscription

    def _machine(
        self, kind: SubscriptionKind, progress: Progress, config: StoredConfig, consumers: list[Registration]
    ) -> Machine:
        rate = self.policy.max_subscription_dispatch_rate
        bucket = TokenBucket(rate, now=self._services.clock.elapsed()) if rate else None
        limits = self._limits(config)
        if kind is SubscriptionKind.KEY_SHARED:
            away = {each.consumer_id: each.key_filters for each in consumers}
            return KeySharedDispatch(progress, policy=config.policy, limits=limits, rate=bucket, away=away)
        return MACHINES[kind](progress, policy=config.policy, limits=limits, rate=bucket)

    def _limits(self, config: StoredConfig) -> DispatchLimits:
        return DispatchLimits(unacked_max=config.unacked_max or self._defaults.unacked_max)

    def _check_consumer_limits(self, subscription: Subscription) -> None:
        connected = sum(each.connected for each in self.subscriptions.values())
        if not self.policy.allows_consumer_on_topic(connected):
            raise LimitReached("consumers of the topic", self.policy.max_consumers_per_topic)
        if not self.policy.allows_consumer_on_subscription(subscription.connected):
            raise LimitReached("consumers of the subscription", self.policy.max_consumers_per_subscription)
