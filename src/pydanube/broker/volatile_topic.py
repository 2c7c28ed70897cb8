"""A non-reliable topic: at most once, in memory, to the consumers that are connected.

Nothing is kept. Each consumer has a bounded queue; a slow one loses its own messages and delays no other. Registrations
of consumers are stored all the same, so that a client may come back with its old id after a restart. A move to another
broker removes them: connected consumers subscribe anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Final, Literal

from pydanube.broker.base_subscription import BaseSubscription, Services
from pydanube.broker.base_topic import BaseTopic
from pydanube.broker.outbox import AnyOutbox, ConsumerRegistration, DeliveredMessage, MessageOutbox
from pydanube.broker.ownership import Ownership
from pydanube.broker.registrations import StoredSubscription, subscription_put, subscriptions_in
from pydanube.core import keys
from pydanube.core.dispatch.hash_ring import HashRing
from pydanube.core.names import ProducerId, SubscriptionName, TopicName
from pydanube.core.policies import Delivery, SubscriptionKind, TopicPolicy
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.errors import DanubeError, NotServed, OwnershipLost, Refused, SubscriptionBusy
from pydanube.formats.batch import Envelope
from pydanube.ports import Delete, Item, MetadataStore
from pydanube.telemetry import SubscriptionMetrics, Telemetry

log = logging.getLogger(__name__)

QUEUE_MAX: Final = 1_000  # messages that wait for one consumer
UNUSED_SECONDS: Final = 60.0  # a subscription without consumers is removed after this
IDLE_CHECK_SECONDS: Final = 30.0
LEAVING_MAX: Final = 100  # keys that go with a move, in the transaction that releases the topic


class VolatileSubscription(BaseSubscription):
    """Who gets a message, by kind; nothing is sent twice and nothing is remembered."""

    reliable: Literal[False] = False

    def __init__(
        self,
        topic: TopicName,
        name: SubscriptionName,
        kind: SubscriptionKind,
        services: Services,
        metrics: SubscriptionMetrics,
        consumers: list[ConsumerRegistration],
    ) -> None:
        super().__init__(topic, name, kind, services, metrics, consumers)
        self.idle_since = services.clock.elapsed()
        self._turn = 0
        self._ring = HashRing()

    # --- delivering ---------------------------------------------------------------------------------

    def deliver(self, message: Envelope) -> None:
        connected = [each for each in self._consumers.values() if each.outbox is not None]
        for each in self._choose(connected, message):
            assert isinstance(each.outbox, MessageOutbox)
            if len(each.outbox) < QUEUE_MAX and each.outbox.free_bytes > 0:
                each.outbox.put([DeliveredMessage(0, message, 1)])
                each.sent += 1
                self.metrics.delivered.inc()
                return
        self.metrics.dropped.inc()

    def _choose(self, connected: list[ConsumerRegistration], message: Envelope) -> list[ConsumerRegistration]:
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

    def ack(self, offset: int) -> None:
        """At most once: delivering has settled it. There are no offsets either, so none can be wrong."""

    def nack(self, offset: int, delay_seconds: float = 0.0, reason: str = "") -> None:
        """At most once: nothing is sent again."""

    def _joined(self, registration: ConsumerRegistration) -> None:
        if self.kind is SubscriptionKind.EXCLUSIVE:
            for other in self._consumers.values():
                if other.connected and other is not registration:
                    raise SubscriptionBusy(self._topic, self.name, other.name)
        self._ring.put(registration.consumer_id, registration.key_filters)
        self.metrics.consumers.set(self.connected)

    def _left(self, registration: ConsumerRegistration, outbox: AnyOutbox) -> None:
        self._ring.remove(registration.consumer_id)
        self.metrics.consumers.set(self.connected)
        self.idle_since = self._services.clock.elapsed()


class VolatileTopic(BaseTopic[VolatileSubscription]):
    """A non-reliable topic; the same surface as `Topic`, where it has a meaning."""

    delivery: Delivery = Delivery.NON_RELIABLE
    reliable: Literal[False] = False

    def __init__(
        self,
        name: TopicName,
        ownership: Ownership,
        metadata: MetadataStore,
        services: Services,
        telemetry: Telemetry,
        policy: TopicPolicy,
        schema: TopicSchema,
        own_policy: Mapping[str, object] | None = None,
    ) -> None:
        super().__init__(name, ownership, metadata, services, telemetry, policy, schema, own_policy)
        self._removing: asyncio.Task[None] | None = None

    async def open(self, known: Sequence[Item] | None = None) -> None:
        """`known`: everything below the topic, read before."""
        items = await self._metadata.list(keys.subscriptions(self.name)) if known is None else known
        for stored in subscriptions_in(items, self.name):
            self._restore(stored)
        self._schedule_idle_check(self._services.clock.elapsed())

    async def close(self, why: str, *, moved_to: str = "", owned: bool = True) -> None:
        closing = NotServed(self.name, why, moved_to)
        await self._close_subscriptions(closing, save=owned)
        if self._removing is not None:
            self._removing.cancel()
            await asyncio.gather(self._removing, return_exceptions=True)
        self._telemetry.forget_topic(self.name)
        self.closed.notify(closing)

    @contextlib.asynccontextmanager
    async def leaving(self) -> AsyncIterator[list[Delete]]:
        """What is to be removed as the topic is released to another broker; until it is, no consumer can subscribe.

        Subscriptions go with their consumers, whole ones, as many as one transaction takes. What is left is forgotten
        by the next owner, as any unused subscription.
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

    async def publish(self, producer: ProducerId, message: Envelope) -> int:
        """Always 0: the messages of a non-reliable topic have no offsets."""
        self._check_open()
        self.producers.admit(producer, message)
        if not self.enforcer.is_open and not self.enforcer.lets_one(message):
            await self.enforcer.admit_one(message)
            self._check_open()
        self._hand_on(message)
        return 0

    def publish_batch(self, messages: Sequence[Envelope]) -> None:
        """All of them or none: who is refused sends the whole batch again."""
        self._check_open()
        if any(message.deliver_at is not None for message in messages):
            raise Refused(f"topic {self.name} keeps nothing, so it delivers at once: send without a time of delivery")
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

    # --- subscriptions ------------------------------------------------------------------------------

    async def _create(self, name: SubscriptionName, kind: SubscriptionKind, start: int | None) -> VolatileSubscription:
        await self.ownership.write([subscription_put(self.name, name, kind)])
        return self._restore(StoredSubscription(name, kind, None, None, []))

    def _restore(self, stored: StoredSubscription) -> VolatileSubscription:
        metrics = self._telemetry.subscription(self.name, stored.name)
        subscription = VolatileSubscription(
            self.name, stored.name, stored.kind, self._services, metrics, stored.consumers
        )
        self.subscriptions[stored.name] = subscription
        return subscription

    # --- idle subscriptions ---------------------------------------------------------------------------

    def _schedule_idle_check(self, now: float) -> None:
        if self._closing is None:
            self._services.timer.call_at(now + IDLE_CHECK_SECONDS, self._check_idle)

    def _check_idle(self, now: float) -> None:
        idle = [
            each.name
            for each in self.subscriptions.values()
            if not each.connected and now - each.idle_since >= UNUSED_SECONDS
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
