"""What topics and namespaces there are, and what is set for them: all of it in the metadata store.

Made, found and deleted here, also topics that other brokers serve. What this broker serves is `topic_table.py`'s.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple, Protocol

from pydanube.broker.any_topic import AnyTopic
from pydanube.broker.deletion import erase
from pydanube.broker.existence import partitions_asked_for, remove_namespace, stays
from pydanube.broker.registrations import (
    StoredConfig,
    config_put,
    policy_put,
    read_config,
    read_policy,
)
from pydanube.broker.take_over import BrokerContext
from pydanube.broker.topic_table import TopicTable
from pydanube.cluster.cluster import ClusterNode
from pydanube.core import keys
from pydanube.core.cluster.load import ResourceUsage
from pydanube.core.cluster.placement import WAIT, Marker
from pydanube.core.dispatch.consumer_window import DispatchLimits
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.history.tiers import Retention
from pydanube.core.names import NamespaceName, SubscriptionName, TopicName
from pydanube.core.policies import UNLIMITED, Delivery, TopicPolicy, configured
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.core.schemas.kinds import subject_name
from pydanube.core.schemas.refusals import SubjectMissing
from pydanube.errors import (
    DiskFull,
    InvalidName,
    NamespaceExists,
    NamespaceUnknown,
    NotServed,
    Refused,
    TopicExists,
    TopicUnknown,
)
from pydanube.formats.batch import Envelope
from pydanube.ports import Compare, Delete, Put

log = logging.getLogger("pydanube.broker.topics")

SYSTEM: Final = NamespaceName("system")
PARTITIONS_MAX: Final = 10_000
HOSTED_SECONDS: Final = 5.0  # how long `create` waits until a broker serves the topic


class SubscriptionDispatch(NamedTuple):
    """What is stored for one subscription; None where nothing is."""

    unacked_max: int | None
    heartbeat: Heartbeat | None


class Live(NamedTuple):
    """What a topic's owner alone knows."""

    first_offset: int
    head: int
    producers: int
    consumers: int  # connected


class Remote(Protocol):
    """The owners of other topics, as far as this broker needs them. Made by what starts the broker: see `Broker`."""

    async def delete(self, topic: TopicName) -> None:
        """Removes exactly this topic. Raises NotServed while no broker serves it, Unreachable."""
        ...

    async def append(self, topic: TopicName, message: Envelope) -> None:
        """Returns when the message is safe there. Raises as `delete`, TopicUnknown, and Refused if it keeps nothing."""
        ...

    async def live(self, topic: TopicName) -> Live:
        """Raises as `delete`."""
        ...

    async def flush(self, topics: Sequence[TopicName]) -> None:
        """Has their owners begin to upload what waits; those without an owner are left out. Raises Unreachable if one
        of the owners did not answer in a second.
        """
        ...

    async def close(self) -> None: ...


class Catalog(TopicTable):
    """The topics of this broker and of its cluster. `remote` is the way to the brokers that serve others."""

    def __init__(
        self,
        context: BrokerContext,
        cluster: ClusterNode | None = None,
        usage: Callable[[float], ResourceUsage] = lambda now: ResourceUsage(),
        remote: Remote | None = None,
    ) -> None:
        super().__init__(context, cluster, usage)
        self.remote = remote

    # --- what exists ---------------------------------------------------------------------------------

    async def exists(self, name: TopicName) -> bool:
        return name in self._open or await self._metadata.get(keys.topic(name)) is not None

    async def names(self, namespace: NamespaceName | None = None) -> list[TopicName]:
        namespaces = [namespace] if namespace is not None else await self.namespaces()
        found = []
        for each in namespaces:
            items = await self._metadata.list(keys.namespace_topics(each))
            found += [name for item in items if (name := keys.topic_of_namespace(item.key)) is not None]
        return found

    async def partitions(self, name: TopicName) -> list[TopicName]:
        """[name] if there is such a topic, else its partitions in order, else nothing."""
        if await self.exists(name):
            return [name]
        found = await self._named_as_partitions(name)
        if not found:
            return []
        counted = await partitions_asked_for(self._metadata, name)
        return (
            found if counted is None else [each for each in found if (each.partition_number or 0) < counted.partitions]
        )

    async def _named_as_partitions(self, base: TopicName) -> list[TopicName]:
        items = await self._metadata.list(f"{keys.topic(base)}-part-")
        found = {name for item in items if (name := keys.topic_of(item.key)) and name.is_partition_of(base)}
        return sorted(found, key=lambda name: name.partition_number or 0)

    # --- making and removing -------------------------------------------------------------------------

    async def create(self, name: TopicName, *, delivery: Delivery, schema_subject: str | None = None) -> AnyTopic:
        """Makes the topic; returns it when it is served here. Raises TopicExists, NamespaceUnknown.

        In a cluster it may be given to another broker: NotServed then says to whom.
        """
        await self.make(name, delivery=delivery, schema_subject=schema_subject)
        if self.directory is None:
            return await self._load(name)
        if await self.directory.hosted(name, HOSTED_SECONDS) == self.context.broker_id:
            topic = self._open.get(name) or await self._arrival(name)  # claimed, and perhaps just being opened
            if topic is not None:
                return topic
        raise NotServed(name, *self.directory.where(name))

    async def make(self, name: TopicName, *, delivery: Delivery, schema_subject: str | None = None) -> None:
        """Writes down that the topic exists. In a cluster the leader then finds it a broker."""
        if self._closing:
            raise NotServed(name, self._closing)
        if schema_subject is not None:
            found = await self.context.services.schemas.find(subject_name(schema_subject))
            if found is None:
                raise SubjectMissing(name, schema_subject)
        while True:
            compares = await self._check_free(name)
            policy = await self._metadata.get(keys.namespace_policy(name.namespace))
            if policy is None:
                raise NamespaceUnknown(name.namespace)
            operations: list[Put | Delete] = [
                Put(keys.topic(name), b"null"),
                Put(keys.delivery(name), json.dumps(delivery.value).encode()),
                Put(keys.namespace_topic(name), b"null"),
                *stays(policy),
            ]
            if schema_subject is not None:
                operations.append(Put(keys.schema_config(name), TopicSchema(schema_subject).to_bytes()))
            if self.directory is not None:
                operations.append(Put(keys.unassigned(name), b"null"))
            compares += [Compare(keys.topic(name), 0), Compare(policy.key, policy.revision)]
            if await self._metadata.transact(compares, operations) is not None:
                break
            # It was made just now, or a neighbour of its name, or the namespace has changed: look again.
        log.info("topic created", extra={"topic": name, "delivery": delivery.value})

    async def create_partitioned(
        self, base: TopicName, partitions: int, *, delivery: Delivery, schema_subject: str | None = None
    ) -> None:
        """All of them; one that an order of the same number has left unfinished is finished."""
        if not 1 <= partitions <= PARTITIONS_MAX:
            raise InvalidName("number of partitions", str(partitions), f"use 1 to {PARTITIONS_MAX}")
        there = await self._begin_partitioned(base, partitions)
        for name in base.partition_names(partitions):
            if name in there:
                continue
            if self.directory is None:
                await self.create(name, delivery=delivery, schema_subject=schema_subject)
            else:
                await self.make(name, delivery=delivery, schema_subject=schema_subject)

    async def _begin_partitioned(self, base: TopicName, partitions: int) -> list[TopicName]:
        """Writes down how many there are to be; returns those that there are."""
        await self.namespace_policy(base.namespace)  # raises if there is none
        while True:
            if await self.exists(base):
                raise TopicExists(base, "it already exists")
            there = await self._named_as_partitions(base)
            counted = await partitions_asked_for(self._metadata, base)
            if there and (counted is None or len(there) >= counted.partitions):
                raise TopicExists(base, "it has partitions already")
            if there and counted is not None and counted.partitions != partitions:
                why = f"it was begun with {counted.partitions} partitions and is not finished: make it with as many"
                raise TopicExists(base, why)
            key = keys.partitioned(base)
            compares = [Compare(key, counted.revision if counted else 0), Compare(keys.topic(base), 0)]
            put = Put(key, json.dumps({"partitions": partitions}).encode())
            if await self._metadata.transact(compares, [put]) is not None:
                return there

    async def _check_free(self, name: TopicName) -> list[Compare]:
        """What must still be so when it is made. Raises TopicExists."""
        if await self.exists(name):
            raise TopicExists(name, "it already exists")
        if name.partition_number is None:
            if await self._named_as_partitions(name):
                raise TopicExists(name, "it is the base of a partitioned topic")
            return [Compare(keys.topic(name.partition_name(0)), 0)]
        base = name.base
        if await self.exists(base):
            raise TopicExists(name, f"{base} is a topic without partitions")
        counted = await partitions_asked_for(self._metadata, base)
        if counted is not None and name.partition_number >= counted.partitions:
            raise TopicExists(
                name, f"{base} has {counted.partitions} partitions, and this is none of them: take another name"
            )
        return [Compare(keys.topic(base), 0), Compare(keys.partitioned(base), counted.revision if counted else 0)]

    async def delete(self, name: TopicName) -> None:
        """Removes the topic with everything it had; of a base, all partitions."""
        if name.partition_number is not None and await self.exists(name):
            raise InvalidName("topic to delete", name, f"Cannot delete individual partition: delete {name.base}")
        counted, doomed = None, [name]
        if not await self.exists(name):
            doomed = await self._named_as_partitions(name)
            counted = await partitions_asked_for(self._metadata, name)
        for each in doomed:
            await self._delete_one(each)
        if counted is not None:  # last: what is left of them until then is not taken for a topic of fewer
            key = keys.partitioned(name)
            await self._metadata.transact([Compare(key, counted.revision)], [Delete(key)])
        if not doomed:
            raise TopicUnknown(name)

    async def _delete_one(self, name: TopicName) -> None:
        try:
            topic = await self.require(name)
        except NotServed:
            if self.remote is None:
                raise
            await self.remote.delete(name)
            return
        await self.delete_here(topic)

    async def delete_here(self, topic: AnyTopic) -> None:
        """Exactly this topic, which may be a partition."""
        name = topic.name
        async with self.lock(name):
            self._open.pop(name, None)
            try:
                await topic.close("the topic is being deleted")
            except DiskFull as error:  # its log needs no ending, and deleting frees space
                log.warning("log of a deleted topic left unfinished", extra={"topic": name, "why": str(error)})
            await topic.ownership.reassert()  # a descriptor that was given up and comes late must not outlive its topic
            await erase(self.context, topic.ownership, self.session)

    async def retention(self, name: TopicName) -> Retention:
        """What is stored now, whichever broker wrote it."""
        return (await read_policy(self._metadata, name)).retention

    # --- namespaces ---------------------------------------------------------------------------------

    async def namespaces(self) -> list[NamespaceName]:
        items = await self._metadata.list(keys.NAMESPACES)
        return [name for item in items if (name := keys.namespace_of_policy(item.key)) is not None]

    async def create_namespace(self, name: NamespaceName, policy: TopicPolicy = UNLIMITED) -> None:
        key = keys.namespace_policy(name)
        put = Put(key, json.dumps(policy.to_json()).encode())
        if await self._metadata.transact([Compare(key, 0)], [put]) is None:
            raise NamespaceExists(name)

    async def bootstrap_namespaces(self, names: Sequence[NamespaceName], policy: TopicPolicy) -> None:
        """Those that must be there; existing ones get the configured policy."""
        for name in {*names, SYSTEM}:
            key = keys.namespace_policy(name)
            while True:
                known = await self._metadata.get(key)
                value = json.dumps(configured(policy, json.loads(known.value) if known else None)).encode()
                if known is not None and known.value == value:
                    break
                compare = Compare(key, known.revision if known else 0)
                if await self._metadata.transact([compare], [Put(key, value)]) is not None:
                    break

    async def delete_namespace(self, name: NamespaceName) -> None:
        await remove_namespace(self._metadata, name, self.names)

    async def namespace_policy(self, name: NamespaceName) -> TopicPolicy:
        item = await self._metadata.get(keys.namespace_policy(name))
        if item is None:
            raise NamespaceUnknown(name)
        return TopicPolicy.from_json(json.loads(item.value))

    # --- crashes --------------------------------------------------------------------------------------

    async def set_on_crash(self, name: TopicName, *, wait: bool) -> list[TopicName]:
        """Whether it, or each of its partitions, waits for its own broker when that is lost, or is taken over.

        One that waits already, and is not to wait any more, is taken over now.
        """
        names = await self.partitions(name)
        if not names:
            raise TopicUnknown(name)
        for each in names:
            await self._set_on_crash(each, wait)
        return names

    async def _set_on_crash(self, name: TopicName, wait: bool) -> None:
        while True:
            topic = await self._metadata.get(keys.topic(name))
            if topic is None:
                raise TopicUnknown(name)
            delivery = await self._metadata.get(keys.delivery(name))
            if wait and (delivery is None or json.loads(delivery.value) != Delivery.RELIABLE.value):
                raise Refused(f"topic {name} keeps nothing: there is nothing for it to wait for")
            marked = await self._metadata.get(keys.unassigned(name))
            key = keys.on_crash(name)
            compares = [
                Compare(topic.key, topic.revision),
                Compare(keys.unassigned(name), marked.revision if marked else 0),
            ]
            operations: list[Put | Delete] = [Put(key, WAIT) if wait else Delete(key)]
            marker = Marker.from_bytes(marked.value) if marked else None
            if marked is not None and marker is not None and marker.wait and not wait:
                operations.append(Put(marked.key, replace(marker, wait=False).to_bytes()))
            if await self._metadata.transact(compares, operations) is not None:
                log.info("what a crash means was set", extra={"topic": name, "wait": wait})
                return

    # --- subscriptions' settings ----------------------------------------------------------------------

    async def set_failure_policy(self, name: TopicName, subscription: SubscriptionName, policy: FailurePolicy) -> None:
        """Stored, also before the subscription exists, and in effect immediately."""
        topic = await self.require(name)
        await topic.ownership.write([policy_put(name, subscription, policy)])
        await self._apply_config(topic, subscription)

    async def change_failure_policy(
        self, name: TopicName, subscription: SubscriptionName, given: Mapping[str, object]
    ) -> tuple[FailurePolicy, FailurePolicy]:
        """The policy before, and with the given fields, which is in effect immediately. Raises ConfigError."""
        topic = await self.require(name)
        async with self.lock(name):  # of two changes of different fields both count
            before = await self.get_failure_policy(name, subscription) or FailurePolicy()
            after = FailurePolicy.from_json({**before.to_json(), **given})
            await topic.ownership.write([policy_put(name, subscription, after)])
        await self._apply_config(topic, subscription)
        return before, after

    async def get_failure_policy(self, name: TopicName, subscription: SubscriptionName) -> FailurePolicy | None:
        return (await read_config(self._metadata, name, subscription)).policy

    async def set_dispatch_config(
        self,
        name: TopicName,
        subscription: SubscriptionName,
        *,
        unacked_max: int | None = None,
        heartbeat: Heartbeat | None = None,
        forget_heartbeat: bool = False,
    ) -> None:
        """Only what is given changes; with `forget_heartbeat` the topic's, or else the broker's, is in force again."""
        topic = await self.require(name)
        if unacked_max is not None:
            DispatchLimits(unacked_max=unacked_max)  # raises if it is not allowed
        stored = await read_config(self._metadata, name, subscription)
        changed = StoredConfig(
            stored.policy,
            stored.unacked_max if unacked_max is None else unacked_max,
            None if forget_heartbeat else stored.heartbeat if heartbeat is None else heartbeat,
        )
        await topic.ownership.write([config_put(name, subscription, changed)])
        await self._apply_config(topic, subscription)

    async def get_dispatch_config(self, name: TopicName, subscription: SubscriptionName) -> SubscriptionDispatch:
        stored = await read_config(self._metadata, name, subscription)
        return SubscriptionDispatch(stored.unacked_max, stored.heartbeat)

    async def _apply_config(self, topic: AnyTopic, subscription: SubscriptionName) -> None:
        if topic.reliable:
            topic.configure(subscription, await read_config(self._metadata, topic.name, subscription))
