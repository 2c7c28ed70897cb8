"""What both kinds of topics share: producers, subscriptions that are made, found, removed and reaped, and the end.

Registrations of subscriptions and consumers are written through `ownership`, so that an owner that lost the topic
changes nothing. A kind of topic says how it publishes, and how a subscription is made (`_create`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Generic, TypeVar

from pydanube.broker.base_subscription import BaseSubscription, Services
from pydanube.broker.ownership import Ownership
from pydanube.broker.registrations import LEASE_OVER, TopicProducers, consumer_put, forget_silent, remove_below
from pydanube.broker.schema_enforcer import SchemaEnforcer
from pydanube.broker.watchers import Watchers
from pydanube.core import keys
from pydanube.core.names import ConsumerId, ProducerId, SubscriptionName, TopicName, consumer_id
from pydanube.core.policies import Delivery, SubscriptionKind, TopicPolicy
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.core.schemas.kinds import SchemaPolicy, subject_name
from pydanube.core.schemas.refusals import SubjectMissing
from pydanube.errors import LimitReached, NotServed, SchemaMismatch, SubscriptionBusy, SubscriptionUnknown
from pydanube.ports import Delete, MetadataStore, Put
from pydanube.telemetry import Telemetry

Subscribed = TypeVar("Subscribed", bound=BaseSubscription)


class BaseTopic(Generic[Subscribed]):
    """A topic that this broker owns. A kind adds `open`, which brings its subscriptions back, `close` and `publish`."""

    delivery: Delivery
    reliable: bool  # whether messages are kept, and have offsets

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
        """`own_policy` is the topic's own, without its namespace's; `policy` is both together."""
        self.name = name
        self.ownership = ownership
        self.policy = policy
        self.own_policy = own_policy
        self.subscriptions: dict[SubscriptionName, Subscribed] = {}
        self.producers = TopicProducers(name, policy, services.clock, services.clients)
        self.metrics = telemetry.topic(name, self.producers.__len__)
        self.enforcer = SchemaEnforcer(name, schema, services.schemas, services.clock, self.metrics)
        self.closed = Watchers()
        self.is_closed = False  # for good; or closing
        self._telemetry = telemetry
        self._metadata = metadata
        self._services = services
        self._changing = asyncio.Lock()  # subscriptions are made and removed one at a time
        self._closing: NotServed | None = None

    async def _create(self, name: SubscriptionName, kind: SubscriptionKind, start: int | None) -> Subscribed:
        raise NotImplementedError

    @property
    def backlog_messages(self) -> int:
        """What the subscription that is furthest behind has before it."""
        return 0

    def apply(self, policy: TopicPolicy) -> None:
        """Changed limits hold from now on. Connected clients stay."""
        self.policy = policy
        self.producers.apply(policy)

    async def _close_subscriptions(self, closing: NotServed, *, save: bool) -> None:
        self._closing = closing
        self.is_closed = True
        async with self._changing:  # one that is being made is finished, and closed with the others
            for subscription in self.subscriptions.values():
                await subscription.close(closing, save=save)
            self.subscriptions.clear()

    def _check_open(self) -> None:
        if self._closing is not None:
            raise self._closing
        if not self._services.may_serve():
            raise NotServed(self.name, LEASE_OVER)

    # --- schema -------------------------------------------------------------------------------------

    @property
    def schema_subject(self) -> str | None:
        return self.enforcer.config.subject

    async def bind(self, subject: str) -> None:
        """The first producer that has a schema says which one the topic has. Raises SchemaMismatch, SubjectMissing."""
        async with self._changing:
            self._check_open()
            before = self.enforcer.config
            if before.subject == subject:
                return
            if before.subject is not None:
                raise SchemaMismatch(self.name, before.subject, subject)
            if await self._services.schemas.find(subject_name(subject)) is None:
                raise SubjectMissing(self.name, subject)
            await self._store_schema(TopicSchema(subject, before.policy, before.checks_payloads))

    async def set_schema(self, config: TopicSchema) -> None:
        """Stored, and in force for the next message of every producer."""
        async with self._changing:
            self._check_open()
            await self._store_schema(config)

    async def set_schema_policy(self, policy: SchemaPolicy, *, checks_payloads: bool) -> bool:
        """As `set_schema`, for the subject that the topic has then. False: it has none, and nothing was changed."""
        async with self._changing:
            self._check_open()
            subject = self.enforcer.config.subject
            if subject is None:
                return False
            await self._store_schema(TopicSchema(subject, policy, checks_payloads))
            return True

    async def _store_schema(self, config: TopicSchema) -> None:
        await self.ownership.write([Put(keys.schema_config(self.name), config.to_bytes())])
        self.enforcer.change(config)

    # --- producers ----------------------------------------------------------------------------------

    async def add_producer(self, name: str, *, exclusive: bool = False) -> ProducerId:
        self._check_open()
        return self.producers.add(name, exclusive=exclusive)

    def touch_producer(self, identity: ProducerId) -> bool:
        return self.producers.touch(identity)

    # --- subscriptions ------------------------------------------------------------------------------

    async def subscribe(
        self,
        name: SubscriptionName,
        kind: SubscriptionKind,
        consumer: str,
        key_filters: tuple[str, ...] = (),
        start: int | None = None,
        *,
        native: bool = False,
        hands_over: bool = False,
    ) -> ConsumerId:
        """A consumer joins; the subscription is made if it is new, at `start` (an offset), or at the head.

        Its place is fixed and stored before this returns: what is published from then on is delivered. A topic that is
        not reliable has no offsets and no stored batches: `start`, `native` and `hands_over` mean nothing to it.
        """
        async with self._changing:
            self._check_open()
            subscription = self.subscriptions.get(name)
            if subscription is None:
                if not self.policy.allows_subscription(len(self.subscriptions)):
                    raise LimitReached("subscriptions", self.policy.max_subscriptions_per_topic)
                subscription = await self._create(name, kind, start)
            identity = consumer_id(self.name, name, consumer)
            known = subscription.knows(identity)
            if not subscription.is_connected(identity):
                self._check_consumer_limits(subscription)
            subscription.join(consumer, key_filters, native=native and self.reliable, hands_over=hands_over)
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
            await self._remove(name)

    async def reap(self, now: float) -> None:
        """Forgets consumers that have not been heard of for so long that they will not come back under their old id."""
        async with self._changing:
            await forget_silent(self.name, self.ownership, self.subscriptions, now)

    def require(self, name: SubscriptionName) -> Subscribed:
        subscription = self.subscriptions.get(name)
        if subscription is None:
            raise SubscriptionUnknown(self.name, name)
        return subscription

    async def _remove(self, name: SubscriptionName) -> None:
        subscription = self.subscriptions.pop(name)
        await subscription.close(NotServed(self.name, "the subscription was removed"))
        own = Delete(keys.subscription(self.name, name))
        await remove_below(self._metadata, self.ownership, [keys.below_subscription(self.name, name)], [own])
        self._telemetry.forget_subscription(self.name, name)

    def _check_consumer_limits(self, subscription: Subscribed) -> None:
        connected = sum(each.connected for each in self.subscriptions.values())
        if not self.policy.allows_consumer_on_topic(connected):
            raise LimitReached("consumers of the topic", self.policy.max_consumers_per_topic)
        if not self.policy.allows_consumer_on_subscription(subscription.connected):
            raise LimitReached("consumers of the subscription", self.policy.max_consumers_per_subscription)
