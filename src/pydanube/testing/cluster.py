"""Whole brokers, a metadata store and an object store in one process, on a virtual clock, from a seed.

    town = Cluster(seed=7)
    await town.start(3)
    orders = await town.create("/default/orders")
    await town.produce(orders, 100)
    await town.unload(orders)
    town.node(1).kill()
    ...

Brokers are the real ones, on memory ports; each node's way to the shared stores can be cut, slowed or made to lose
answers. A node that is killed leaves its disk; booting it again is a restart on the same directory.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final, TypeVar

from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.broker.topics import AnyTopic, Live, Topics, append_to
from pydanube.config import BrokerConfig, ClusterConfig, Config, DispatchConfig, LoadManagerConfig, StorageConfig
from pydanube.core import keys
from pydanube.core.names import TopicName
from pydanube.core.ownership import Owner
from pydanube.core.policies import Delivery
from pydanube.core.tiers import TierConfig
from pydanube.errors import DanubeError, NotServed, Unreachable
from pydanube.log.batch import Envelope
from pydanube.ports import Buffer, ObjectInfo, ObjectStore
from pydanube.stores.memory import MemoryDisk, MemoryMetadataStore, MemoryObjectStore
from pydanube.testing.faulty_metadata import FaultyMetadata
from pydanube.testing.loop import Process, SimClock, SimWork

T = TypeVar("T")

TTL: Final = 8.0
TIER: Final = TierConfig(upload_seconds=5.0, object_bytes=256 * 1024, retention_check_seconds=30.0)


class FaultyObjects:
    """One node's way to the object store. `away`: nothing gets through. Answers may be lost after the store did it."""

    def __init__(self, under: ObjectStore, clock: SimClock, dice: Random) -> None:
        self._under = under
        self._clock = clock
        self._dice = dice
        self.away = False
        self.errors = 0.0
        self.answers_lost = 0.0
        self.delay_max_seconds = 0.0
        self.dead = False

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        return await self._call(lambda: self._under.put(key, data, create=create), changes=True)

    async def get(self, key: str) -> bytes:
        return await self._call(lambda: self._under.get(key))

    async def get_range(self, key: str, position: int, length: int) -> bytes:
        return await self._call(lambda: self._under.get_range(key, position, length))

    async def head(self, key: str) -> ObjectInfo:
        return await self._call(lambda: self._under.head(key))

    async def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        await self._call(_nothing)
        async for info in self._under.list(prefix, after=after):
            yield info

    async def delete(self, key: str) -> None:
        await self._call(lambda: self._under.delete(key), changes=True)

    async def _call(self, call: Callable[[], Awaitable[T]], *, changes: bool = False) -> T:
        if self.dead:
            await asyncio.get_running_loop().create_future()
        if self.delay_max_seconds:
            await self._clock.sleep(self._dice.random() * self.delay_max_seconds)
        if self.away or self._dice.random() < self.errors:
            raise Unreachable("object store", "it is away")
        answer = await call()
        if self.dead:
            await asyncio.get_running_loop().create_future()
        if changes and self._dice.random() < self.answers_lost:
            raise Unreachable("object store", "the answer was lost")
        return answer


async def _nothing() -> None:
    return None


class MortalMetadata(FaultyMetadata):
    """Of a dead process no call returns, and none changes anything."""

    dead = False

    async def _call(self, call: Callable[[], Awaitable[T]], *, changes: bool = False) -> T:
        if self.dead:
            await asyncio.get_running_loop().create_future()

        async def living() -> T:
            if self.dead:
                await asyncio.get_running_loop().create_future()
            return await call()

        return await super()._call(living, changes=changes)


class Neighbours:
    """What one broker asks of another, called directly. Implements `topics.Remote`."""

    def __init__(self, town: Cluster) -> None:
        self._town = town

    async def delete(self, topic: TopicName) -> None:
        node, found = self._owner(topic)
        await node.call(node.topics.delete_here(found))

    async def append(self, topic: TopicName, message: Envelope) -> None:
        node, found = self._owner(topic)
        await node.call(append_to(found, message))

    async def live(self, topic: TopicName) -> Live:
        _, found = self._owner(topic)
        consumers = sum(each.connected for each in found.subscriptions.values())
        first, head = (found.first_offset, found.head) if isinstance(found, Topic) else (0, 0)
        return Live(first, head, len(found.producers), consumers)

    def _owner(self, topic: TopicName) -> tuple[Node, AnyTopic]:
        node = self._town.host(topic)
        found = node.topic(topic) if node is not None else None
        if node is None or found is None:
            raise NotServed(topic, "nobody has it")
        return node, found


class Node:
    """One broker's machine: its disk stays, processes come and go."""

    def __init__(self, town: Cluster, number: int) -> None:
        self.town = town
        self.number = number
        self.disk = MemoryDisk()
        self.boots = 0
        self.broker: Broker | None = None
        self.process: Process | None = None
        self.metadata: MortalMetadata
        self.objects: FaultyObjects
        self.clock = SimClock()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def broker_id(self) -> int:
        assert self.broker is not None
        return self.broker.broker_id

    async def boot(self) -> Broker:
        assert not self.alive
        self.boots += 1
        town = self.town
        self._access = self.disk.another_process(self.boots)
        self.metadata = MortalMetadata(town.metadata, self.clock, town.dice)
        self.objects = FaultyObjects(town.objects, self.clock, town.dice)
        self.process = Process(f"broker {self.number}.{self.boots}")
        config = replace(
            town.config,
            broker=BrokerConfig(
                client_addr=f"node{self.number}:6650",
                stream_addr=f"node{self.number}:6651",
                admin_addr=f"node{self.number}:50051",
                metrics_addr=f"node{self.number}:9040",
            ),
        )
        self.broker = await self.process.call(
            Broker.start_on(
                config,
                disk=self._access,
                metadata=self.metadata,
                clock=self.clock,
                work=SimWork(town.dice),
                objects=self.objects,
                home=f"node{self.number}",
            )
        )
        self.broker.topics.remote = Neighbours(town)
        return self.broker

    @property
    def topics(self) -> Topics:
        assert self.broker is not None
        return self.broker.topics

    def kill(self) -> None:
        """kill -9: what was not synced is still in the page cache; see FaultyDisk for power cuts."""
        assert self.process is not None
        self.metadata.dead = self.objects.dead = True
        self.process.kill()
        self._access.end_process()

    async def stop(self) -> None:
        """SIGTERM."""
        assert self.process is not None and self.broker is not None
        await self.process.call(self.broker.stop())
        self.process.kill()
        self._access.end_process()

    def pause(self) -> None:
        assert self.process is not None
        self.process.pause()

    def resume(self) -> None:
        assert self.process is not None
        self.process.resume()

    def partition(self, cut: bool = True) -> None:
        """From both stores. Clients still reach it."""
        self.metadata.cut = cut
        self.objects.away = cut

    async def call(self, coroutine: Any) -> Any:
        """As a client's request: runs in the broker's process."""
        assert self.process is not None
        return await self.process.call(coroutine)

    def topic(self, name: TopicName) -> AnyTopic | None:
        return self.broker.topics.get(name) if self.broker is not None and self.alive else None


class Cluster:
    """To be made inside a running SimLoop."""

    def __init__(
        self,
        seed: int = 0,
        *,
        ttl_seconds: float = TTL,
        tier: TierConfig = TIER,
        load_manager: LoadManagerConfig | None = None,
        segment_bytes: int = 64 * 1024,
        unacked_max: int = 1000,
    ) -> None:
        self.dice = Random(seed)
        self.clock = SimClock()
        self.metadata = MemoryMetadataStore(self.clock)
        self.objects = MemoryObjectStore()
        self.nodes: list[Node] = []
        self.config = Config(
            mode="cluster",
            cluster=ClusterConfig(cluster_name="simulated", ttl_seconds=ttl_seconds, etcd=("memory:0",)),
            storage=StorageConfig(url="file:///shared", tier=tier, segment_bytes=segment_bytes),
            dispatch=DispatchConfig(max_unacked_messages=unacked_max),
            load_manager=load_manager or LoadManagerConfig(assignment_strategy="fair"),
        )

    async def start(self, count: int) -> Cluster:
        for number in range(1, count + 1):
            self.nodes.append(Node(self, number))
        await asyncio.gather(*(node.boot() for node in self.nodes))
        await self.until(lambda: any(node.broker.cluster.leader for node in self.nodes))  # type: ignore[union-attr]
        return self

    def node(self, number: int) -> Node:
        return self.nodes[number - 1]

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes if node.alive]

    async def until(self, true: Callable[[], bool], seconds: float = 60.0) -> float:
        """Waits until it is true; returns how long that took. Fails after `seconds`."""
        began = self.clock.elapsed()
        while not true():
            assert self.clock.elapsed() - began < seconds, "it did not become true in time"
            await asyncio.sleep(0.01)
        return self.clock.elapsed() - began

    # --- topics ---------------------------------------------------------------------------------------------

    async def create(self, name: str, *, reliable: bool = True, on: int | None = None) -> TopicName:
        """Makes the topic and waits until somebody serves it; moves it to node `on`, if that is given."""
        topic = TopicName(name)
        broker = self.living[0].broker
        assert broker is not None
        delivery = Delivery.RELIABLE if reliable else Delivery.NON_RELIABLE
        await self.living[0].call(broker.topics.make(topic, delivery=delivery))
        await self.until(lambda: self.host(topic) is not None)
        if on is not None and self.host(topic) is not self.node(on):
            await self.unload(topic, to=on)
            await self.until(lambda: self.host(topic) is self.node(on))
        return topic

    def host(self, topic: TopicName) -> Node | None:
        """Who serves it; there must not be two that may."""
        serving = [
            node
            for node in self.living
            if node.topic(topic) is not None
            and topic not in node.broker.topics.leaving  # type: ignore[union-attr]
            and node.broker._may_serve()  # type: ignore[union-attr]
        ]
        assert len(serving) <= 1, f"{topic} is served by {[node.number for node in serving]}"
        return serving[0] if serving else None

    async def served(self, topic: TopicName, seconds: float = 60.0) -> Topic:
        await self.until(lambda: self.host(topic) is not None, seconds)
        node = self.host(topic)
        assert node is not None
        found = node.topic(topic)
        assert isinstance(found, Topic)
        return found

    async def unload(self, topic: TopicName, *, to: int | None = None, asked: Node | None = None) -> None:
        """As an operator does; returns when the old owner has let go."""
        node = asked or self.living[0]
        assert node.broker is not None and node.broker.cluster is not None
        target = self.node(to).broker_id if to is not None else None
        await node.call(node.broker.cluster.requests.unload(topic, target))  # type: ignore[arg-type]

    async def owner(self, topic: TopicName) -> Owner:
        item = await self.metadata.get(keys.owner(topic))
        assert item is not None
        return Owner.from_bytes(item.value)

    async def value(self, key: str) -> Any:
        item = await self.metadata.get(key)
        return json.loads(item.value) if item else None

    async def descriptors(self, topic: TopicName) -> list[tuple[int, int]]:
        items = await self.metadata.list(keys.storage_objects(topic))
        found = [json.loads(item.value) for item in items]
        return [(each["start_offset"], each["end_offset"]) for each in found]

    # --- simple clients ---------------------------------------------------------------------------------------

    async def publish(self, topic: TopicName, call: Callable[[Topic], Awaitable[T]], seconds: float = 60.0) -> T:
        """Tries until a broker takes it, as a client does."""
        began = self.clock.elapsed()
        while True:
            node = self.host(topic)
            try:
                if node is not None:
                    found = node.topic(topic)
                    assert isinstance(found, Topic)
                    answer: T = await node.call(call(found))
                    return answer
                raise NotServed(topic, "nobody has it")
            except DanubeError as error:
                assert error.retryable and self.clock.elapsed() - began < seconds, str(error)
                await asyncio.sleep(0.02)
