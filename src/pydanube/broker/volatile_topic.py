"""A non-reliable topic: at most once, in memory, to whoever is there.

Nothing is kept. Each consumer has a bounded queue; a slow one loses its own messages and delays nobody. Registrations
of consumers are stored all the same, so that a client may come back with its old id after a restart. A move to another
broker removes them: whoever is there subscribes anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final

from pydanube.broker.members import (
    LEASE_OVER,
    Producers,
    StoredSubscription,
    consumer_put,
    forget_silent,
    remove_below,
    subscription_put,
    subscriptions_in,
)
from pydanube.broker.outbox import AnyOutbox, Delivered, MessageOutbox, Registration
from pydanube.broker.ownership import Ownership
from pydanube.broker.subscription import ATTACH_SECONDS, Services
from pydanube.broker.watchers import Watchers
from pydanube.core import keys
from pydanube.core.keyring import Ring
from pydanube.core.names import ConsumerId, ProducerId, SubscriptionName, TopicName, consumer_id
from pydanube.core.policies import Delivery, SubscriptionKind, TopicPolicy
from pydanube.errors import (
    ConsumerUnknown,
    DanubeError,
    LimitReached,
    NotServed,
    OwnershipLost,
    SubscriptionBusy,
    SubscriptionUnknown,
)
from pydanube.log.batch import Envelope
from pydanube.ports import Delete, Item, MetadataStore
from pydanube.telemetry import SubscriptionMetrics, Telemetry

log = logging.getLogger(__name__)

QUEUE_MAX: Final = 1_000  # messages that wait for one consumer
IDLE_SECONDS: Final = 60.0  # a subscription without consumers is removed after this
IDLE_CHECK_SECONDS: Final = 30.0
LEAVING_MAX: Final = 100  # keys that go with a move, in the transaction that releases the topic


class VolatileSubscription:
    """Who gets a message, by kind; nothing is sent twice and nothing is remembered."""

    def __init__(
        self,
        topic: TopicName,
        name: SubscriptionName,
        kind: SubscriptionKind,
        services: Services,
        metrics: SubscriptionMetrics,
        consumers: list[Registration],
    ) -> None:
        self.name = name
        self.kind = kind
        self.metrics = metrics
        self.idle_since = services.clock.elapsed()
        self._topic = topic
        self._services = services
        self._consumers = {each.consumer_id: each for each in consumers}
        for each in consumers:
            each.silent_since = self.idle_since
        self._turn = 0
        self._ring = Ring()

    # --- delivering ---------------------------------------------------------------------------------

    def deliver(self, message: Envelope) -> None:
        connected = [each for each in self._consumers.values() if each.outbox is not None]
        for each in self._choose(connected, message):
            assert isinstance(each.outbox, MessageOutbox)
            if len(each.outbox) < QUEUE_MAX and each.outbox.room_bytes > 0:
                each.outbox.put([Delivered(0, message, 1)])
                each.sent += 1
                self.metrics.delivered.inc()
                return
        self.metrics.dropped.inc()

    def _choose(self, connected: list[Registration], message: Envelope) -> list[Registration]:
        """Whom to try, in order."""
        if not connected:
            return []
        if self.kind is SubscriptionKind.SHARED:
            self._turn += 1
            first = (self._turn - 1) % len(connected)
            return connected[first:] + connected[:first]
        if self.kind is SubscriptionKind.KEY_SHARED:
            key = message.routing_key if message.routing_key is not None else message.producer_name or ""
            owner = self._ring.owner(key)
            return [each for each in connected if each.consumer_id == owner]
        return connected[:1]

    # --- consumers ----------------------------------------------------------------------------------

    @property
    def consumers(self) -> list[Registration]:
        return list(self._consumers.values())

    @property
    def connected(self) -> int:
        return sum(each.connected for each in self._consumers.values())

    def knows(self, consumer: ConsumerId) -> bool:
        return consumer in self._consumers

    def registration(self, consumer: ConsumerId) -> Registration | None:
        return self._consumers.get(consumer)

    def is_connected(self, consumer: ConsumerId) -> bool:
        registration = self._consumers.get(consumer)
        return registration is not None and registration.connected

    def is_healthy(self, consumer: ConsumerId) -> bool:
        registration = self._consumers.get(consumer)
        return registration is not None and registration.connected

    def join(self, name: str, key_filters: tuple[str, ...]) -> ConsumerId:
        identity = consumer_id(self._topic, self.name, name)
        registration = self._consumers.get(identity) or Registration(identity, name, key_filters)
        registration.key_filters = key_filters or registration.key_filters
        if self.kind is SubscriptionKind.EXCLUSIVE:
            for other in self._consumers.values():
                if other.connected and other is not registration:
                    raise SubscriptionBusy(self._topic, self.name, other.name)
        self._consumers[identity] = registration
        self._connect(registration)
        return identity

    def attach(self, consumer: ConsumerId) -> MessageOutbox:
        registration = self._consumers.get(consumer)
        if registration is None:
            raise ConsumerUnknown(consumer)
        if registration.outbox is None or registration.attached:
            self._connect(registration)
        registration.attached = True
        assert isinstance(registration.outbox, MessageOutbox)
        return registration.outbox

    def detach(self, consumer: ConsumerId, outbox: AnyOutbox) -> None:
        registration = self._consumers.get(consumer)
        if registration is not None and registration.outbox is outbox:
            self._disconnect(registration, None)

    def ack(self, offset: int) -> None:
        """At most once: delivering has settled it. There are no offsets either, so none can be wrong."""

    def nack(self, offset: int, delay_seconds: float = 0.0, reason: str = "") -> None:
        """At most once: nothing is sent again."""

    def forget(self, consumer: ConsumerId) -> None:
        """Its registration goes."""
        registration = self._consumers.pop(consumer, None)
        if registration is not None:
            self._disconnect(registration, None)

    def end(self, error: DanubeError) -> None:
        for each in self._consumers.values():
            self._disconnect(each, error)

    def _connect(self, registration: Registration) -> None:
        if registration.outbox is not None:
            registration.outbox.end()
        fresh: AnyOutbox = MessageOutbox(self._services.outboxes)
        registration.outbox = fresh
        registration.attached = False
        self._ring.put(registration.consumer_id, registration.key_filters)
        self.metrics.consumers.set(self.connected)
        at = self._services.clock.elapsed() + ATTACH_SECONDS
        self._services.timer.call_at(at, lambda _: self._give_up_on(registration, fresh))

    def _give_up_on(self, registration: Registration, outbox: AnyOutbox) -> None:
        if registration.outbox is outbox and not registration.attached:
            self._disconnect(registration, None)

    def _disconnect(self, registration: Registration, error: DanubeError | None) -> None:
        if registration.outbox is None:
            return
        registration.outbox.end(error)
        registration.outbox = None
        registration.attached = False
        registration.silent_since = self._services.clock.elapsed()
        self._ring.remove(registration.consumer_id)
        self.metrics.consumers.set(self.connected)
        self.idle_since = self._services.clock.elapsed()


class VolatileTopic:
    """A non-reliable topic; the same surface as `Topic`, where it has a meaning."""

    delivery: Final = Delivery.NON_RELIABLE

    def __init__(
        self,
        name: TopicName,
        ownership: Ownership,
        metadata: MetadataStore,
        services: Services,
        telemetry: Telemetry,
        policy: TopicPolicy,
        schema_subject: str | None,
    ) -> None:
        self.name = name
        self.ownership = ownership
        self.policy = policy
        self.own_policy: Mapping[str, object] | None = None  # what the topic has of its own, beside its namespace's
        self.schema_subject = schema_subject
        self.subscriptions: dict[SubscriptionName, VolatileSubscription] = {}
        self.producers = Producers(name, policy, services.clock)
        self.metrics = telemetry.topic(name)
        self.metrics.producers = self.producers.__len__
        self.closed = Watchers()
        self._telemetry = telemetry
        self._metadata = metadata
        self._services = services
        self._changing = asyncio.Lock()
        self._closing: NotServed | None = None
        self._removing: asyncio.Task[None] | None = None

    def apply(self, policy: TopicPolicy) -> None:
        """Changed limits hold from now on. Nobody who is connected is sent away."""
        self.policy = policy
        self.producers.apply(policy)

    async def open(self, known: Sequence[Item] | None = None) -> None:
        """`known`: everything below the topic, read before."""
        items = await self._metadata.list(keys.subscriptions(self.name)) if known is None else known
        for stored in subscriptions_in(items, self.name):
            self._restore(stored)
        self._schedule_idle_check(self._services.clock.elapsed())

    async def close(self, why: str, *, moved_to: str = "", owned: bool = True) -> None:
        self._closing = NotServed(self.name, why, moved_to)
        async with self._changing:  # one that is being made is finished, and ended with the others
            for subscription in self.subscriptions.values():
                subscription.end(self._closing)
            self.subscriptions.clear()
        if self._removing is not None:
            self._removing.cancel()
            await asyncio.gather(self._removing, return_exceptions=True)
        self._telemetry.forget_topic(self.name)
        self.closed.tell(self._closing)

    @contextlib.asynccontextmanager
    async def leaving(self) -> AsyncIterator[list[Delete]]:
        """What is to be removed as the topic is released to another broker; until it is, nobody subscribes.

        Subscriptions go with their consumers, whole ones, as many as one transaction takes. What is left is forgotten
        by the next owner, as any subscription that nobody uses.
        """
        async with self._changing:
            items = await self._metadata.list(keys.subscriptions(self.name))
            doomed: list[Delete] = []
            for stored in subscriptions_in(items, self.name):
                own, below = keys.subscription(self.name, stored.name), keys.below_subscription(self.name, stored.name)
                whole = [Delete(item.key) for item in items if item.key == own or item.key.startswith(below)]
                if len(doomed) + len(whole) > LEAVING_MAX:
                    break
                doomed += whole
            yield doomed

    # --- publishing ---------------------------------------------------------------------------------

    async def add_producer(self, name: str, *, exclusive: bool = False) -> ProducerId:
        self._check_open()
        return self.producers.add(name, exclusive=exclusive)

    def touch_producer(self, identity: ProducerId) -> bool:
        return self.producers.touch(identity)

    async def publish(self, producer: ProducerId, message: Envelope) -> int:
        """Always 0: the messages of a non-reliable topic have no offsets."""
        self._check_open()
        self.producers.admit(producer, message)
        self._hand_on(message)
        return 0

    def publish_batch(self, messages: Sequence[Envelope]) -> None:
        """All of them or none: who is refused sends the whole batch again."""
        self._check_open()
        self.producers.admit_batch(len(messages))
        for message in messages:
            self._hand_on(message)

    def _hand_on(self, message: Envelope) -> None:
        for subscription in self.subscriptions.values():
            subscription.deliver(message)
        self.metrics.messages_in.inc()
        size_bytes = len(message.payload)
        self.metrics.bytes_in.inc(size_bytes)
        self.metrics.sizes.add(size_bytes)

    def _check_open(self) -> None:
        if self._closing is not None:
            raise self._closing
        if not self._services.may_serve():
            raise NotServed(self.name, LEASE_OVER)

    # --- subscriptions ------------------------------------------------------------------------------

    async def subscribe(
        self,
        name: SubscriptionName,
        kind: SubscriptionKind,
        consumer: str,
        key_filters: tuple[str, ...] = (),
        start: int | None = None,
    ) -> ConsumerId:
        async with self._changing:
            self._check_open()
            subscription = self.subscriptions.get(name)
            if subscription is None:
                if not self.policy.allows_subscription(len(self.subscriptions)):
                    raise LimitReached("subscriptions", self.policy.max_subscriptions_per_topic)
                await self.ownership.write([subscription_put(self.name, name, kind)])
                subscription = self._restore(StoredSubscription(name, kind, None, None, []))
            identity = consumer_id(self.name, name, consumer)
            known = subscription.knows(identity)
            if not subscription.is_connected(identity):
                self._check_consumer_limits(subscription)
            subscription.join(consumer, key_filters)
            if not known:
                try:
                    await self.ownership.write([consumer_put(self.name, name, identity, consumer, key_filters)])
                except BaseException:
                    subscription.forget(identity)
                    raise
            self._check_open()
            return identity

    async def reap(self, now: float) -> None:
        """Forgets consumers that have not been heard of for so long that they will not come back under their old id."""
        async with self._changing:
            await forget_silent(self.name, self.ownership, self.subscriptions, now)

    async def unsubscribe(self, name: SubscriptionName) -> None:
        async with self._changing:
            self._check_open()
            subscription = self.require(name)
            holder = next((each.name for each in subscription.consumers if each.connected), None)
            if holder is not None:
                raise SubscriptionBusy(self.name, name, holder)
            await self._remove(name)

    def require(self, name: SubscriptionName) -> VolatileSubscription:
        subscription = self.subscriptions.get(name)
        if subscription is None:
            raise SubscriptionUnknown(self.name, name)
        return subscription

    async def _remove(self, name: SubscriptionName) -> None:
        del self.subscriptions[name]
        own = Delete(keys.subscription(self.name, name))
        await remove_below(self._metadata, self.ownership, [keys.below_subscription(self.name, name)], [own])
        self._telemetry.forget_subscription(self.name, name)

    def _restore(self, stored: StoredSubscription) -> VolatileSubscription:
        metrics = self._telemetry.subscription(self.name, stored.name)
        subscription = VolatileSubscription(
            self.name, stored.name, stored.kind, self._services, metrics, stored.consumers
        )
        self.subscriptions[stored.name] = subscription
        return subscription

    def _check_consumer_limits(self, subscription: VolatileSubscription) -> None:
        connected = sum(each.connected for each in self.subscriptions.values())
        if not self.policy.allows_consumer_on_topic(connected):
            raise LimitReached("consumers of the topic", self.policy.max_consumers_per_topic)
        if not self.policy.allows_consumer_on_subscription(subscription.connected):
            raise LimitReached("consumers of the subscription", self.policy.max_consumers_per_subscription)

    # --- idle subscriptions ---------------------------------------------------------------------------

    def _schedule_idle_check(self, now: float) -> None:
        if self._closing is None:
            self._services.timer.call_at(now + IDLE_CHECK_SECONDS, self._check_idle)

    def _check_idle(self, now: float) -> None:
        idle = [
            each.name
            for each in self.subscriptions.values()
            if not each.connected and now - each.idle_since >= IDLE_SECONDS
        ]
        if idle and self._closing is None and self._removing is None:
            self._removing = asyncio.create_task(self._remove_idle(idle), name=f"idle {self.name}")
        self._schedule_idle_check(now)

    async def _remove_idle(self, names: list[SubscriptionName]) -> None:
        try:
            for name in names:
                async with self._changing:
                    subscription = self.subscriptions.get(name)
                    if subscription is not None and not subscription.connected:
                        await self._remove(name)
        except OwnershipLost:
            pass  # its new owner decides
        except DanubeError as error:
            log.warning("idle subscription not removed", extra={"topic": self.name, "why": str(error)})
        finally:
            self._removing = None
