"""What both servers offer of topics and subscriptions, in values. The servers only translate.

native request ──┐                                  ┌─► catalog, topic, subscription
                 ├─► names, policies, positions ────┤
gRPC call ───────┘                                  └─► values, or an error of `pydanube.errors`
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final, NamedTuple

from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import Delivery
from pydanube.errors import ConfigError, DeadlineExceeded, DeliveryMismatch, NotServed, TopicUnknown

log = logging.getLogger("pydanube.api.topic_addresses")


class LogPosition(NamedTuple):
    """Where in a log: an offset, the first message of a time, or with neither one of its edges."""

    offset: int | None = None
    time_us: int | None = None
    earliest: bool = False


EARLIEST: Final = LogPosition(earliest=True)
LATEST: Final = LogPosition()


async def offset_of(topic: Topic, position: LogPosition) -> int:
    """The offset that a position means now."""
    if position.offset is not None:
        return position.offset
    if position.time_us is not None:
        return max(topic.first_offset, await topic.offset_at(position.time_us))
    return topic.first_offset if position.earliest else topic.head


class TopicOperations:
    """Topics and subscriptions of this broker's cluster, by name."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics

    async def create(self, name: TopicName, delivery: Delivery, schema_subject: str | None) -> None:
        """Creates the topic and waits a moment until a broker serves it, here or elsewhere. It exists in any case."""
        try:
            await self._topics.create(name, delivery=delivery, schema_subject=schema_subject)
        except NotServed:
            if self._broker.cluster is None or not await self._topics.exists(name):
                raise
        except DeadlineExceeded as error:
            log.warning("topic made, no broker has it yet", extra={"topic": name, "why": str(error)})

    async def create_partitioned(
        self, name: TopicName, partitions: int, delivery: Delivery, schema_subject: str | None
    ) -> None:
        await self._topics.create_partitioned(name, partitions, delivery=delivery, schema_subject=schema_subject)

    async def delete(self, name: TopicName) -> None:
        await self._topics.delete(name)

    async def partitions(self, name: TopicName) -> list[TopicName]:
        """The topic itself, or the partitions of a base. Raises TopicUnknown."""
        found = await self._topics.partitions(name)
        if not found:
            raise TopicUnknown(name)
        return found

    async def reliable(self, name: TopicName) -> Topic:
        """Raises DeliveryMismatch for a topic that keeps nothing."""
        topic = await self._topics.require(name)
        if not topic.reliable:
            raise DeliveryMismatch(topic.name, Delivery.RELIABLE.value, topic.delivery.value)
        return topic

    async def subscription(self, name: TopicName, subscription: SubscriptionName) -> tuple[Topic, Subscription]:
        topic = await self.reliable(name)
        return topic, topic.require(subscription)

    async def change_failure_policy(
        self, name: TopicName, subscription: SubscriptionName, given: Mapping[str, object]
    ) -> tuple[FailurePolicy, FailurePolicy]:
        """The policy before, and with the given fields, which is in effect immediately.

        Kept for a subscription that does not exist yet, too. Raises ConfigError, and DeliveryMismatch.
        """
        changed = dict(given)
        if not changed:
            raise ConfigError("failure_policy", "nothing", f"some of {', '.join(FailurePolicy().to_json())}")
        if "dead_letter_topic" in changed:
            changed["dead_letter_topic"] = str(changed["dead_letter_topic"]).strip() or None
        if changed.get("dead_letter_topic") == name:
            raise ConfigError("failure_policy.dead_letter_topic", name, "another topic: its poison would come back")
        await self.reliable(name)
        return await self._topics.change_failure_policy(name, subscription, changed)

    async def unsubscribe(self, name: TopicName, subscription: SubscriptionName) -> None:
        topic = await self._topics.require(name)
        await topic.unsubscribe(subscription)
