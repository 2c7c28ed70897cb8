"""What both kinds of topics share: producers, subscriptions and consumers as they are registered and counted.

Registrations of consumers are durable, so that a client may come back with its old id after a restart. Limits count who
is there now, not who ever was.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from pydanube.broker.client_index import ClientIndex
from pydanube.broker.outbox import Caller, ConsumerRegistration
from pydanube.broker.ownership import Ownership
from pydanube.core import keys
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.names import ConsumerId, ProducerId, SubscriptionName, TopicName, producer_id
from pydanube.core.policies import SubscriptionKind, TopicPolicy, effective
from pydanube.errors import LimitReached, MessageTooLarge, ProducerExists, ProducerUnknown, RateLimited
from pydanube.formats.batch import Envelope
from pydanube.ports import Clock, Delete, Item, MetadataStore, Put

PRODUCER_SILENT_SECONDS: Final = 30.0  # clients poll every 5 s; one that does not is gone
CONSUMER_SILENT_SECONDS: Final = 3600.0
OPERATIONS_PER_WRITE: Final = 100  # per transaction; the store allows 128
LEASE_OVER: Final = "this broker's lease was not renewed in time, so another may have it"


def is_silent(registration: ConsumerRegistration, now: float) -> bool:
    """Whether a consumer is gone for good. Clients come back with their old id after a restart, so this is long."""
    return not registration.connected and now - registration.silent_since > CONSUMER_SILENT_SECONDS


class RegisteredSubscription(Protocol):
    """A subscription of either kind of topic, as far as its consumers are registered."""

    @property
    def consumers(self) -> list[ConsumerRegistration]: ...
    def forget(self, consumer: ConsumerId) -> None: ...


async def forget_silent(
    topic: TopicName, ownership: Ownership, subscriptions: Mapping[SubscriptionName, RegisteredSubscription], now: float
) -> None:
    """Forgets consumers that have not been heard of for so long that they will not come back under their old id."""
    for name, subscription in list(subscriptions.items()):
        silent = [each for each in subscription.consumers if is_silent(each, now)][:OPERATIONS_PER_WRITE]
        if silent:
            await ownership.write([Delete(keys.consumer(topic, name, each.consumer_id)) for each in silent])
            for each in silent:
                if is_silent(each, now):
                    subscription.forget(each.consumer_id)
                else:  # its stream came back in the meantime
                    await ownership.write([consumer_put(topic, name, each.consumer_id, each.name, each.key_filters)])


@dataclass(slots=True)
class ProducerRegistration:
    name: str
    exclusive: bool
    seen_at: float
    caller: Caller | None = None
    sent: int = 0  # messages


class TopicProducers:
    """A topic's producers. An id is the hash of the names, so one that is not registered can be recognised."""

    def __init__(self, topic: TopicName, policy: TopicPolicy, clock: Clock, index: ClientIndex) -> None:
        self.topic = topic
        self._index = index
        self._policy = policy
        self._clock = clock
        self._producers: dict[ProducerId, ProducerRegistration] = {}
        self._rate = self._bucket()

    def apply(self, policy: TopicPolicy) -> None:
        """Those who are there stay, whatever the limit is now. A rate that did not change goes on as it was."""
        before, self._policy = self._policy, policy
        if before.max_publish_rate != policy.max_publish_rate:
            self._rate = self._bucket()

    def _bucket(self) -> TokenBucket | None:
        rate = self._policy.max_publish_rate
        return TokenBucket(rate, now=self._clock.elapsed()) if rate else None

    def __len__(self) -> int:
        return len(self._alive())

    def __contains__(self, identity: ProducerId) -> bool:
        return identity in self._producers

    def add(self, name: str, *, exclusive: bool) -> ProducerId:
        """The same name is the same producer: a client that reconnects gets its id again."""
        identity = producer_id(self.topic, name)
        alive = self._alive()
        others = [each for known, each in alive.items() if known != identity]
        for other in others:
            if other.exclusive or exclusive:
                raise ProducerExists(self.topic, other.name)
        if identity not in alive and not self._policy.allows_producer(len(others)):
            raise LimitReached("producers", self._policy.max_producers_per_topic)
        known = self._producers.get(identity)
        self._producers[identity] = ProducerRegistration(
            name, exclusive, self._clock.elapsed(), known.caller if known else None, known.sent if known else 0
        )
        self._index.producers.add(identity, self)
        return identity

    def alive(self) -> list[ProducerRegistration]:
        return list(self._alive().values())

    def get(self, identity: ProducerId) -> ProducerRegistration | None:
        return self._producers.get(identity)

    def remove(self, identity: ProducerId, registered: ProducerRegistration | None) -> None:
        """It has left; unless another producer took its name since."""
        if registered is not None and self._producers.get(identity) is registered:
            self._forget(identity)

    def touch(self, identity: ProducerId) -> bool:
        """A sign of life; False for an unknown one."""
        producer = self._producers.get(identity)
        if producer is None:
            return False
        producer.seen_at = self._clock.elapsed()
        return True

    def admit(self, identity: ProducerId, message: Envelope) -> None:
        """Raises if this producer may not publish this message now."""
        producer = self._producers.get(identity)
        if producer is None:
            name = message.producer_name or ""
            if producer_id(self.topic, name) != identity:
                raise ProducerUnknown(identity)
            self.add(name, exclusive=False)  # it was registered before this process began
        else:
            producer.seen_at = self._clock.elapsed()
            producer.sent += 1
        if not self._policy.allows_message(len(message.payload)):
            raise MessageTooLarge(len(message.payload), self._policy.max_message_size)
        if self._rate is not None and not self._rate.take(1, self._clock.elapsed()):
            raise RateLimited(self.topic, self._policy.max_publish_rate)

    def admit_batch(self, rows: int) -> None:
        """Raises if a native producer may not publish so many messages now."""
        if self._rate is not None and not self._rate.take(rows, self._clock.elapsed()):
            raise RateLimited(self.topic, self._policy.max_publish_rate)

    def _alive(self) -> dict[ProducerId, ProducerRegistration]:
        now = self._clock.elapsed()
        for identity, each in list(self._producers.items()):
            if now - each.seen_at > PRODUCER_SILENT_SECONDS:
                self._forget(identity)
        return self._producers

    def _forget(self, identity: ProducerId) -> None:
        del self._producers[identity]
        self._index.producers.remove(identity, self)


# --- what is stored about subscriptions ---------------------------------------------------------------


class StoredConfig(NamedTuple):
    """`dispatch_config` and `failure_policy`: they may be there before the subscription is."""

    policy: FailurePolicy | None = None
    unacked_max: int | None = None
    heartbeat: Heartbeat | None = None


class StoredSubscription(NamedTuple):
    """A subscription as the metadata store has it."""

    name: SubscriptionName
    kind: SubscriptionKind
    cursor: int | None
    holes: bytes | None
    consumers: list[ConsumerRegistration]
    cursor_revision: int = 0
    config: StoredConfig = StoredConfig()
    seeks: int = 0


async def read_subscriptions(metadata: MetadataStore, topic: TopicName) -> list[StoredSubscription]:
    return subscriptions_in(await metadata.list(keys.subscriptions(topic)), topic)


def subscriptions_in(listed: Iterable[Item], topic: TopicName) -> list[StoredSubscription]:
    """Of a list of everything below the topic, or below its subscriptions."""
    items = {item.key: item for item in listed}
    registrations: dict[SubscriptionName, list[ConsumerRegistration]] = {}
    for item in items.values():
        consumer = keys.consumer_of(item.key)
        if consumer is not None and consumer[0] == topic:
            registrations.setdefault(consumer[1], []).append(_registration(item))
    found = []
    for key, item in items.items():
        parsed = keys.subscription_of(key)
        if parsed is None:
            continue
        _, name = parsed
        cursor = items.get(keys.cursor(topic, name))
        holes = items.get(keys.ack_holes(topic, name))
        seeks = items.get(keys.seeks(topic, name))
        found.append(
            StoredSubscription(
                name,
                SubscriptionKind(json.loads(item.value)["subscription_type"]),
                int(cursor.value) if cursor else None,
                holes.value if holes else None,
                registrations.get(name, []),
                cursor.revision if cursor else 0,
                _config(items.get(keys.failure_policy(topic, name)), items.get(keys.dispatch_config(topic, name))),
                int(seeks.value) if seeks else 0,
            )
        )
    return found


def _registration(item: Item) -> ConsumerRegistration:
    parsed = keys.consumer_of(item.key)
    assert parsed is not None
    value: dict[str, Any] = json.loads(item.value)
    return ConsumerRegistration(parsed[2], value["consumer_name"], tuple(value.get("key_filters", ())))


def subscription_put(topic: TopicName, name: SubscriptionName, kind: SubscriptionKind) -> Put:
    value = {"subscription_name": name, "subscription_type": kind.value}
    return Put(keys.subscription(topic, name), json.dumps(value).encode())


def consumer_put(
    topic: TopicName, name: SubscriptionName, identity: ConsumerId, consumer: str, key_filters: Sequence[str]
) -> Put:
    value = {"consumer_name": consumer, "key_filters": list(key_filters)}
    return Put(keys.consumer(topic, name, identity), json.dumps(value).encode())


async def read_policy(metadata: MetadataStore, topic: TopicName) -> TopicPolicy:
    """What holds for the topic now, whichever broker wrote it: its own, else its namespace's."""
    own = await metadata.get(keys.topic_policy(topic))
    shared = await metadata.get(keys.namespace_policy(topic.namespace))
    return effective(json.loads(own.value) if own else None, json.loads(shared.value) if shared else None)


async def read_config(metadata: MetadataStore, topic: TopicName, name: SubscriptionName) -> StoredConfig:
    policy = await metadata.get(keys.failure_policy(topic, name))
    return _config(policy, await metadata.get(keys.dispatch_config(topic, name)))


def _config(policy: Item | None, dispatch: Item | None) -> StoredConfig:
    stored: dict[str, Any] = json.loads(dispatch.value) if dispatch else {}
    return StoredConfig(
        FailurePolicy.from_json(json.loads(policy.value)) if policy else None,
        stored.get("max_unacked_messages"),
        Heartbeat.parse(stored["heartbeat"]) if stored.get("heartbeat") else None,
    )


def topic_heartbeat(item: Item | None) -> Heartbeat | None:
    """What is stored for all subscriptions of a topic that have none of their own."""
    stored: dict[str, Any] = json.loads(item.value) if item else {}
    return Heartbeat.parse(stored["heartbeat"]) if stored.get("heartbeat") else None


def policy_put(topic: TopicName, name: SubscriptionName, policy: FailurePolicy) -> Put:
    return Put(keys.failure_policy(topic, name), json.dumps(policy.to_json()).encode())


def config_put(topic: TopicName, name: SubscriptionName, config: StoredConfig) -> Put:
    value = {
        "max_unacked_messages": config.unacked_max,
        "heartbeat": str(config.heartbeat) if config.heartbeat else None,
    }
    return Put(keys.dispatch_config(topic, name), json.dumps(value).encode())


async def remove_below(
    metadata: MetadataStore, ownership: Ownership, prefixes: Sequence[str], also: Sequence[Put | Delete] = ()
) -> None:
    """Deletes everything under the prefixes, in as many guarded transactions as it takes; the last also does `also`."""
    doomed = [Delete(item.key) for prefix in prefixes for item in await metadata.list(prefix)]
    spared = {operation.key for operation in also}
    operations: list[Put | Delete] = [each for each in doomed if each.key not in spared]
    while len(operations) > OPERATIONS_PER_WRITE:
        await ownership.write(operations[:OPERATIONS_PER_WRITE])
        operations = operations[OPERATIONS_PER_WRITE:]
    await ownership.write([*operations, *also])
