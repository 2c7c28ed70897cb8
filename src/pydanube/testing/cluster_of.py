"""What every cluster in one process has, whatever its nodes are.

`Cluster` (cluster.py) has whole brokers on simulated wires. Our own tests have two more kinds: brokers behind real
servers, and members that agree and store nothing (tests/harness). Nodes are numbered from 1.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from pydanube.core import keys
from pydanube.core.cluster.placement import Marker
from pydanube.core.history.ownership import Owner
from pydanube.core.names import TopicName
from pydanube.ports import Clock
from pydanube.stores.metadata.memory import MemoryMetadataStore


class AnyNode(Protocol):
    @property
    def alive(self) -> bool: ...

    def serves(self, name: TopicName) -> bool:
        """Whether it has the topic, is not about to release it, and may serve at all."""


N = TypeVar("N", bound=AnyNode)


class ClusterOf(Generic[N]):
    def __init__(self, clock: Clock, metadata: MemoryMetadataStore, *, step_seconds: float = 0.01) -> None:
        self.clock = clock
        self.metadata = metadata
        self.nodes: list[N] = []
        self._step_seconds = step_seconds  # how often `until` looks

    def node(self, number: int) -> N:
        return self.nodes[number - 1]

    @property
    def living(self) -> list[N]:
        return [node for node in self.nodes if node.alive]

    async def until(self, true: Callable[[], bool], seconds: float = 60.0) -> float:
        """Waits until it is true; returns how long that took. Fails after `seconds`."""
        began = self.clock.elapsed()
        while not true():
            assert self.clock.elapsed() - began < seconds, f"it did not become true within {seconds} s"
            await asyncio.sleep(self._step_seconds)
        return self.clock.elapsed() - began

    def host(self, topic: TopicName) -> N | None:
        """Which node serves it; there must not be two that may."""
        serving = [node for node in self.living if node.serves(topic)]
        assert len(serving) <= 1, f"{topic} is served by nodes {[self.nodes.index(node) + 1 for node in serving]}"
        return serving[0] if serving else None

    def any_host(self, topic: TopicName) -> N | None:
        """One that serves it, if there are two, too."""
        return next((node for node in self.living if node.serves(topic)), None)

    def sole_host(self, topic: TopicName) -> N:
        """The node that serves it; there must be one."""
        node = self.host(topic)
        assert node is not None, f"no node serves {topic}"
        return node

    # --- what is stored -------------------------------------------------------------------------------------

    async def value(self, key: str) -> Any:
        item = await self.metadata.get(key)
        return json.loads(item.value) if item else None

    async def owner(self, topic: TopicName) -> Owner:
        item = await self.metadata.get(keys.owner(topic))
        assert item is not None
        return Owner.from_bytes(item.value)

    async def marker(self, topic: TopicName) -> Marker | None:
        item = await self.metadata.get(keys.unassigned(topic))
        return Marker.from_bytes(item.value) if item else None
