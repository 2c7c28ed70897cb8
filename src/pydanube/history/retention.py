"""How long history is kept: set by an operator, per topic or for all topics of a namespace that do not say otherwise.

    topic's policy, its retention fields ─► namespace's policy ─► 0: for ever

What is set is in force immediately on the topics that this broker serves, and at their next look on every other broker
(`Uploader` reads the rule before it forgets anything).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from pydanube.core import keys
from pydanube.core.history.tiers import first_kept
from pydanube.core.names import NamespaceName
from pydanube.core.policies import RETENTION, RETENTION_SET, TopicPolicy, effective
from pydanube.errors import NamespaceUnknown
from pydanube.history.served import ServedTopic, ServedTopics, keeps_history
from pydanube.ports import Compare, Delete, Put

log = logging.getLogger(__name__)

MINUTES, MB = RETENTION


class Rule(NamedTuple):
    """0 is no limit. `set_by` is topic, namespace or configuration."""

    minutes: int
    mb: int
    set_by: str


class Due(NamedTuple):
    """What the rule forgets as things stand: how many objects, and where history begins then."""

    objects: int
    first_offset: int | None


class RetentionChange(NamedTuple):
    """None leaves a number as it is. `reset` forgets what was set."""

    minutes: int | None = None
    mb: int | None = None
    reset: bool = False


class RetentionDesk:
    """`configured` is the policy that the configuration gives the namespaces it names."""

    def __init__(self, topics: ServedTopics, configured: Callable[[NamespaceName], TopicPolicy | None]) -> None:
        self._topics = topics
        self._metadata = topics.context.metadata
        self._configured = configured

    # --- asking -------------------------------------------------------------------------------------------

    async def of_topic(self, topic: ServedTopic) -> Rule:
        own = await self._stored(keys.topic_policy(topic.name))
        shared = await self._stored(keys.namespace_policy(topic.name.namespace))
        policy = effective(own, shared)
        if own is not None and any(name in own for name in RETENTION):
            set_by = "topic"
        else:
            set_by = _set_by(shared)
        return Rule(policy.retention_minutes, policy.retention_mb, set_by)

    async def of_namespace(self, name: NamespaceName) -> Rule:
        stored = await self._stored(keys.namespace_policy(name))
        if stored is None:
            raise NamespaceUnknown(name)
        policy = TopicPolicy.from_json(stored)
        return Rule(policy.retention_minutes, policy.retention_mb, _set_by(stored))

    async def due(self, topic: ServedTopic) -> Due:
        """Raises ObjectDamaged or Unreachable if the manifest cannot be read."""
        if topic.storage is None:
            return Due(0, None)
        retention = await self._topics.retention(topic.name)
        objects = (await topic.storage.tier.load_manifest())[:]
        first = first_kept(objects, retention, self._topics.context.services.clock.time_us())
        return Due(sum(each.end <= (first or 0) for each in objects), first)

    async def _stored(self, key: str) -> Mapping[str, Any] | None:
        item = await self._metadata.get(key)
        return None if item is None else json.loads(item.value)

    # --- changing -----------------------------------------------------------------------------------------

    async def set_topic(self, topic: ServedTopic, change: RetentionChange) -> Rule:
        """Raises ConfigError for a number that is not allowed, OwnershipLost if the topic is another broker's now."""
        key = keys.topic_policy(topic.name)
        own = dict(await self._stored(key) or {})
        if change.reset:
            own = {name: value for name, value in own.items() if name not in RETENTION}
        else:
            now = await self.of_topic(topic)
            own |= _numbers(change, now)
        TopicPolicy.from_json(own)  # raises if it is not allowed
        await topic.ownership.write([Put(key, json.dumps(own).encode()) if own else Delete(key)])
        await self._take_effect(topic)
        rule = await self.of_topic(topic)
        log.info("retention set", extra={"topic": topic.name, "minutes": rule.minutes, "mb": rule.mb})
        return rule

    async def set_namespace(self, name: NamespaceName, change: RetentionChange) -> Rule:
        key = keys.namespace_policy(name)
        while True:
            item = await self._metadata.get(key)
            if item is None:
                raise NamespaceUnknown(name)
            stored: dict[str, Any] = json.loads(item.value)
            if change.reset:
                policy = self._configured(name) or TopicPolicy()
                stored |= {MINUTES: policy.retention_minutes, MB: policy.retention_mb}
                stored.pop(RETENTION_SET, None)
            else:
                now = Rule(int(stored.get(MINUTES, 0)), int(stored.get(MB, 0)), "")
                stored |= {**_numbers(change, now), RETENTION_SET: True}
            TopicPolicy.from_json(stored)  # raises if it is not allowed
            put = Put(key, json.dumps(stored).encode())
            if await self._metadata.transact([Compare(key, item.revision)], [put]) is not None:
                break
        for topic in self._topics.loaded:
            if keeps_history(topic) and topic.name.namespace == name:
                await self._take_effect(topic)
        rule = await self.of_namespace(name)
        log.info("retention set", extra={"namespace": name, "minutes": rule.minutes, "mb": rule.mb})
        return rule

    async def _take_effect(self, topic: ServedTopic) -> None:
        upload_state = topic.storage.uploader.get(topic.name) if topic.storage is not None else None
        if upload_state is not None:
            upload_state.retention = await self._topics.retention(topic.name)

    async def apply(self, topic: ServedTopic) -> tuple[int, int]:
        """Forgets now. Where history begins, and how many objects went."""
        assert topic.storage is not None
        upload_state = topic.storage.uploader.get(topic.name)
        if upload_state is None:  # the topic is closing
            return topic.first_offset, 0
        before = len((await topic.storage.tier.load_manifest())[:])
        await topic.storage.uploader.retain_now(upload_state)
        return topic.first_offset, before - len(topic.storage.tier.objects)


def _set_by(namespace: Mapping[str, Any] | None) -> str:
    return "namespace" if namespace is not None and namespace.get(RETENTION_SET) else "configuration"


def _numbers(change: RetentionChange, now: Rule) -> dict[str, int]:
    return {
        MINUTES: now.minutes if change.minutes is None else change.minutes,
        MB: now.mb if change.mb is None else change.mb,
    }
