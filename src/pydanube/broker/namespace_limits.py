"""Limits of namespaces: set by an operator while brokers run, and in force on topics that are open.

    set ─► /namespaces/{ns}/policy ─► this broker's open topics, immediately
                  │
                  └── watch ─► every other broker's open topics

Connected clients stay, whatever the limits are now: they apply to the next client, and to rates and sizes from the next
message on. A topic's own policy still wins over its namespace's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from pydanube.broker.catalog import Catalog
from pydanube.core import keys
from pydanube.core.names import NamespaceName
from pydanube.core.policies import UNLIMITED, TopicPolicy, effective, limits_set, with_limits
from pydanube.errors import DanubeError, NamespaceUnknown
from pydanube.ports import Clock, Compare, Put

log = logging.getLogger(__name__)

POLICY_WATCH_RETRY_SECONDS: Final = 1.0  # doubled with every failure
POLICY_WATCH_RETRY_SECONDS_MAX: Final = 30.0
# A topic that was being opened while its namespace's limits changed may have missed it.
LOOK_AGAIN_SECONDS: Final = 60.0


class LimitsSet(NamedTuple):
    """`set_here` are the limits that an operator chose; `topics` of this broker are under them now."""

    before: TopicPolicy
    after: TopicPolicy
    set_here: tuple[str, ...]
    topics: int


class NamespaceLimits:
    """`configured` is the policy that the configuration gives the namespaces it names."""

    def __init__(
        self, topics: Catalog, clock: Clock, configured: Callable[[NamespaceName], TopicPolicy | None]
    ) -> None:
        self._topics = topics
        self._metadata = topics.context.metadata
        self._clock = clock
        self._configured = configured

    async def set(self, name: NamespaceName, given: Mapping[str, int], reset: Collection[str] = ()) -> LimitsSet:
        """Stores them and applies them here. Raises ConfigError for what is not allowed, NamespaceUnknown."""
        key = keys.namespace_policy(name)
        while True:
            item = await self._metadata.get(key)
            if item is None:
                raise NamespaceUnknown(name)
            stored: dict[str, Any] = json.loads(item.value)
            changed = with_limits(stored, given, reset, self._configured(name) or UNLIMITED)
            put = Put(key, json.dumps(changed).encode())
            if await self._metadata.transact([Compare(key, item.revision)], [put]) is not None:
                break
        before, after = TopicPolicy.from_json(stored), TopicPolicy.from_json(changed)
        log.info(
            "namespace limits set", extra={"namespace": name, **{each: changed[each] for each in (*given, *reset)}}
        )
        return LimitsSet(before, after, limits_set(changed), self._apply(name, changed))

    async def follow(self) -> None:
        """Applies what any broker of the cluster has stored, until cancelled."""
        failures = 0
        while True:
            begun = self._clock.elapsed()
            try:
                after = await self._metadata.transact([], [])
                assert after is not None, "nothing was compared"
                await self.look()
                await self._watch(after)
                failures = 0
            except (DanubeError, ValueError, TypeError) as error:  # what the store holds may be no policy
                failures += 1
                log.warning("limits of namespaces may be old", extra={"why": str(error), "failures": failures})
                pause = min(POLICY_WATCH_RETRY_SECONDS * 2.0 ** min(failures, 10), POLICY_WATCH_RETRY_SECONDS_MAX)
                await self._clock.sleep(pause)
            if self._clock.elapsed() - begun < POLICY_WATCH_RETRY_SECONDS:
                await self._clock.sleep(POLICY_WATCH_RETRY_SECONDS)  # no busy loop over a watch that ends immediately

    async def _watch(self, after: int) -> None:
        try:
            async with asyncio.timeout(LOOK_AGAIN_SECONDS):
                async for events in self._metadata.watch(keys.NAMESPACES, after):
                    for event in events:
                        name = keys.namespace_of_policy(event.key)
                        if name is not None and event.value is not None:
                            self._apply(name, json.loads(event.value))
        except TimeoutError:
            pass  # time to look again

    async def look(self) -> None:
        """Applies what is stored now to every topic of this broker."""
        for name in {topic.name.namespace for topic in self._topics.loaded}:
            item = await self._metadata.get(keys.namespace_policy(name))
            if item is not None:
                self._apply(name, json.loads(item.value))

    def _apply(self, name: NamespaceName, stored: Mapping[str, object]) -> int:
        """How many topics of this broker are under them."""
        own = [topic for topic in self._topics.loaded if topic.name.namespace == name]
        changed = 0
        for topic in own:
            policy = effective(topic.own_policy, stored)
            if policy != topic.policy:
                topic.apply(policy)
                changed += 1
        if changed:
            log.info("limits applied", extra={"namespace": name, "topics": changed})
        return len(own)
