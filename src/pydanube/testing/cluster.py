"""Whole brokers, a metadata store and an object store in one process, on a virtual clock, from a seed.

    cluster = Cluster(seed=7)
    await cluster.start(3)
    orders = await cluster.create("/default/orders")
    await cluster.produce(orders, 100)
    await cluster.unload(orders)
    cluster.node(1).kill()
    async with cluster.client() as client, client.producer(orders) as producer:      # a real one
        await producer.send(b"2 coffees")
    ...

Brokers are the real ones, on memory ports; each node's way to the shared stores can be cut, slowed or made to lose
answers. A node that is killed leaves its disk; booting it again is a restart on the same directory.

Every node serves the native protocol on simulated wires (wires.py), at the address that it tells its clients: real
clients find topics there, follow them, and lose their connections. `wires.faults` is what happens to all of these,
`Node.wire` to those of one node.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final, TypeVar

from pydanube.api.native.server import NativeServer
from pydanube.broker.any_topic import AnyTopic
from pydanube.broker.catalog import Live
from pydanube.broker.dead_letters import append_to
from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.client.client import Client
from pydanube.config import BrokerConfig, ClusterConfig, Config, DispatchConfig, LoadManagerConfig, StorageConfig
from pydanube.core import keys
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import BrokerId, TopicName
from pydanube.core.policies import Delivery
from pydanube.errors import DanubeError, NotServed, ProcessEnded, Unreachable
from pydanube.formats.batch import Envelope
from pydanube.log.wal import WalConfig
from pydanube.ports import Disk
from pydanube.schema.answering import Answering
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.stores.schemas.memory import MemorySchemaParsers
from pydanube.testing.cluster_aims import Aims, Shot
from pydanube.testing.cluster_disk import WatchedDisk
from pydanube.testing.cluster_of import ClusterOf
from pydanube.testing.disk_faults import Faults
from pydanube.testing.faulty_disk import FaultyDisk
from pydanube.testing.faulty_metadata import FaultyMetadata
from pydanube.testing.faulty_objects import FaultyObjects
from pydanube.testing.loop import Process, ProcessDied, SimClock, SimWork
from pydanube.testing.process_disk import ProcessDisk
from pydanube.testing.wires import Path, WireConnector, Wires

T = TypeVar("T")

TTL: Final = 8.0
CALL_SECONDS: Final = 3.0  # how long one broker waits for another
STREAM_PORT: Final = 6651
GOODBYE_SECONDS: Final = 1.0  # for the connections of a broker that stops
TIER: Final = TierConfig(upload_seconds=5.0, object_bytes=256 * 1024, retention_check_seconds=30.0)


class Wire(Path):
    """The network between clients, or other brokers, and one node."""

    def __init__(self) -> None:
        super().__init__()
        self.duplicates = 0.0  # of the requests that are no bytes, this part arrives twice, as after a reconnect

    def heal(self) -> None:
        super().heal()
        self.duplicates = 0.0


class Node:
    """One broker's machine: its disk stays, processes come and go."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        self.cluster = cluster
        self.number = number
        self.host = f"node{number}"  # its name in the network
        self.disk: MemoryDisk | FaultyDisk
        self.disk = FaultyDisk(Random(cluster.rng.getrandbits(62))) if cluster.faulty_disks else MemoryDisk()
        if isinstance(self.disk, FaultyDisk):
            self.disk.faults.latency_seconds_max = cluster.disk_seconds
        self.boots = 0
        self.broker: Broker | None = None
        self.process: Process | None = None
        self.stopping: Process | None = None  # is being stopped
        self.metadata: FaultyMetadata
        self.objects: FaultyObjects
        self.wire = Wire()
        self.clock = SimClock()
        self._server: NativeServer
        self.known_id = 0  # its broker's, from the first boot on
        self.paused_at = -1.0  # when it was paused last
        self.failed_at = -1.0  # when a call of its disk failed last, in this process
        self.ended_at = -1.0  # when its process, which may still be there, gave itself up
        self.work: SimWorkerWork
        self.forgotten = (0, 0.0)  # a lease that the store forgot before its time, and until when it may believe in it

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    @property
    def broker_id(self) -> BrokerId:
        assert self.broker is not None
        return self.broker.broker_id

    @property
    def open_files(self) -> list[str]:
        """Paths of the files that its process keeps open."""
        return self._access.open_files if isinstance(self._access, ProcessDisk) else []

    @property
    def cannot_know(self) -> bool:
        """Whether the store forgot the lease that it has, so early that no clock can have told it."""
        lease, until = self.forgotten
        cluster = self.broker.cluster if self.broker is not None else None
        return cluster is not None and cluster.membership.lease.id == lease and self.clock.elapsed() < until

    async def boot(self) -> Broker:
        assert not self.alive
        self.boots += 1
        cluster = self.cluster
        self._access = self._open_disk()
        self.metadata = FaultyMetadata(cluster.metadata, self.clock, cluster.rng)
        self.objects = FaultyObjects(cluster.objects, self.clock, cluster.rng)
        self.objects.worker_processes = cluster.worker_processes
        self.metadata.usual_seconds = cluster.store_seconds
        self.metadata.aim = self.objects.aim = self._aim
        self.work = SimWorkerWork(cluster.rng)
        self.failed_at = self.ended_at = -1.0
        self.process = Process(f"broker {self.number}.{self.boots}")
        config = replace(
            cluster.config,
            broker=BrokerConfig(
                client_addr=f"{self.host}:6650",
                stream_addr=f"{self.host}:{STREAM_PORT}",
                admin_addr=f"{self.host}:50051",
                metrics_addr=f"{self.host}:9040",
            ),
        )
        self.broker = None
        broker = await self.process.call(self._start(config))
        if broker.cluster is not None and broker.cluster.ended is not None:
            broker.cluster.ended.add_done_callback(lambda _: self._note_end(broker))
        self.broker = broker
        self.known_id = broker.broker_id
        return broker

    async def _start(self, config: Config) -> Broker:
        cluster = self.cluster
        broker = await Broker.start_on(
            config,
            disk=cluster.wrap_disk(WatchedDisk(self._access, cluster.rng, self._aim, self._disk_failed)),
            metadata=self.metadata,
            clock=self.clock,
            work=self.work,
            objects=self.objects,
            home=self.host,
            wal=cluster.wal,
            reach=lambda broker: _Neighbours(self, broker),
            parsers=MemorySchemaParsers(Answering().answer),
        )
        self._server = cluster.make_server(broker)
        self._server.start()
        cluster.wires.listen(self.host, STREAM_PORT, self._server.accept, self.wire)
        return broker

    async def _stop(self, broker: Broker) -> None:
        """In the order of a real process (api/process.py): clients follow the topics, and then lose the rest."""
        await broker.hand_over()
        self.cluster.wires.close(self.host, STREAM_PORT)
        await self._server.close(GOODBYE_SECONDS)
        await broker.stop()

    def _aim(self, call: str, about: Sequence[str]) -> Shot | None:
        aims = self.cluster.aims
        return aims.meet(self, call, about) if aims is not None else None

    def _note_end(self, broker: Broker) -> None:
        if self.broker is broker and self.ended_at < 0:
            self.ended_at = self.clock.elapsed()

    def _disk_failed(self, call: str) -> None:
        if self.ended_at < 0:  # else it is over already
            self.failed_at = self.clock.elapsed()

    def _open_disk(self) -> MemoryDisk | ProcessDisk:
        if isinstance(self.disk, FaultyDisk):
            return self.disk.process(self.boots)
        return self.disk.another_process(self.boots)

    def kill(self) -> None:
        """kill -9: what was not synced is still in the page cache."""
        self._end()
        if isinstance(self.disk, FaultyDisk):
            assert isinstance(self._access, ProcessDisk)
            self.disk.kill(self._access)

    def kill_if_alive(self) -> None:
        if self.alive:
            self.kill()

    def power_cut(self) -> None:
        """What was not synced is there in any part, and its clients get no reset."""
        self._end(silent=True)
        if isinstance(self.disk, FaultyDisk):
            self.disk.crash()

    def _end(self, *, silent: bool = False) -> None:
        assert self.process is not None
        self.process.kill()
        self.cluster.wires.close(self.host, STREAM_PORT)
        self.cluster.wires.break_all(self.host, STREAM_PORT, silent=silent)
        if isinstance(self._access, MemoryDisk):
            self._access.end_process()

    async def stop(self) -> None:
        """SIGTERM."""
        assert self.process is not None and self.broker is not None
        process = self.stopping = self.process
        await process.call(self._stop(self.broker))
        if process.alive:
            self.kill()

    def pause(self) -> None:
        assert self.process is not None
        self.process.pause()
        self.paused_at = self.clock.elapsed()

    def resume(self) -> None:
        assert self.process is not None
        self.process.resume()

    def partition(self, cut: bool = True) -> None:
        """From both stores. Clients still reach it."""
        self.metadata.cut = cut
        self.objects.away = cut

    def heal(self) -> None:
        """Whatever was wrong around the process is right again."""
        if self.alive:
            self.resume()
        self.metadata.heal()
        self.metadata.usual_seconds = self.cluster.store_seconds
        self.objects.heal()
        self.work.dies = 0.0
        self.wire.heal()
        if isinstance(self.disk, FaultyDisk):
            self.disk.faults = Faults(latency_seconds_max=self.cluster.disk_seconds)
            self.disk.capacity_bytes = None

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """As a request that arrives: runs in the broker's process."""
        assert self.process is not None
        return await self.process.call(coroutine)

    def topic(self, name: TopicName) -> AnyTopic | None:
        return self.broker.topics.get(name) if self.broker is not None and self.alive else None

    def serves(self, name: TopicName) -> bool:
        """Whether it has the topic, is not about to let it go, and may serve at all."""
        broker = self.broker
        if self.topic(name) is None or broker is None or name in broker.topics.leaving:
            return False
        return broker.cluster is None or broker.cluster.may_serve()


class SimWorkerWork(SimWork):
    """The worker process that makes and stores objects ends half-way, in the part `dies` of all cases."""

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self.dies = 0.0

    async def await_in_worker(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        if self.dies and self._rng.random() < self.dies:
            if self._rng.random() < 0.5:
                await function()  # it was done, without an answer
            raise ProcessEnded("it was killed")
        return await super().await_in_worker(function)


class _Neighbours:
    """The other brokers, as one node reaches them: `catalog.Remote` without gRPC."""

    def __init__(self, node: Node, broker: Broker) -> None:
        self._node = node
        self._broker = broker

    async def delete(self, topic: TopicName) -> None:
        await self._ask(topic, lambda broker: self._delete(broker, topic))

    async def append(self, topic: TopicName, message: Envelope) -> None:
        await self._ask(topic, lambda broker: self._append(broker, topic, message))

    async def live(self, topic: TopicName) -> Live:
        raise NotServed(topic, "nobody asks for that here")

    async def flush(self, topics: Sequence[TopicName]) -> None:
        """No table is loaded here."""

    async def close(self) -> None:
        pass

    async def _delete(self, broker: Broker, topic: TopicName) -> None:
        await broker.topics.delete_here(await broker.topics.require(topic))

    async def _append(self, broker: Broker, topic: TopicName, message: Envelope) -> None:
        await append_to(await broker.topics.require(topic), message)

    async def _ask(self, topic: TopicName, request: Callable[[Broker], Coroutine[Any, Any, None]]) -> None:
        """Whom this broker takes for the owner; it may be wrong."""
        assert self._broker.cluster is not None
        owner = self._broker.cluster.host_of(topic)
        found = next(
            (node for node in self._node.cluster.living if node.broker and node.broker.broker_id == owner), None
        )
        if found is None or found is self._node or found.broker is None:
            raise NotServed(topic, "nobody has it")
        if found.wire.requests_lost:
            await self._node.clock.sleep(CALL_SECONDS)
            raise Unreachable(f"broker {owner}", "it did not answer")
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await found.call(request(found.broker))
        except (TimeoutError, ProcessDied) as error:
            raise Unreachable(f"broker {owner}", "it did not answer") from error
        if found.wire.answers_lost:
            await self._node.clock.sleep(CALL_SECONDS)
            raise Unreachable(f"broker {owner}", "its answer was lost")


class Cluster(ClusterOf[Node]):
    """To be made inside a running SimLoop."""

    clock: SimClock

    def __init__(
        self,
        seed: int = 0,
        *,
        ttl_seconds: float = TTL,
        tier: TierConfig = TIER,
        load_manager: LoadManagerConfig | None = None,
        segment_bytes: int = 64 * 1024,
        unacked_max: int = 1000,
        heartbeat: Heartbeat = Heartbeat(),  # noqa: B008
        wal: WalConfig | None = None,
        faulty_disks: bool = False,
        step_seconds: float = 0.01,
        worker_processes: bool = False,
        disk_seconds: float = 0.0,
        store_seconds: float = 0.0,
    ) -> None:
        self.disk_seconds, self.store_seconds = disk_seconds, store_seconds  # what a call takes at most
        self.worker_processes = worker_processes  # objects may be made and stored by another process
        self.aims: Aims | None = None
        clock = SimClock()
        super().__init__(clock, MemoryMetadataStore(clock), step_seconds=step_seconds)
        self.rng = Random(seed)
        self.objects = MemoryObjectStore()
        self.wal = wal
        self.faulty_disks = faulty_disks
        self.wrap_disk: Callable[[Disk], Disk] = lambda disk: disk  # stands between the log and its disk
        self.make_server: Callable[[Broker], NativeServer] = NativeServer  # of the native protocol
        self.wires = Wires(Random(seed ^ 0x3153))
        self.config = Config(
            mode="cluster",
            cluster=ClusterConfig(cluster_name="simulated", ttl_seconds=ttl_seconds, etcd=("memory:0",)),
            storage=StorageConfig(url="file:///shared", tier=tier, segment_bytes=segment_bytes),
            dispatch=DispatchConfig(max_unacked_messages=unacked_max, heartbeat=heartbeat),
            load_manager=load_manager or LoadManagerConfig(assignment_strategy="fair"),
        )

    async def start(self, count: int) -> Cluster:
        for number in range(1, count + 1):
            self.nodes.append(Node(self, number))
        await asyncio.gather(*(node.boot() for node in self.nodes))
        await self.until(lambda: any(node.broker.cluster.leader for node in self.nodes))  # type: ignore[union-attr]
        return self

    # --- topics ---------------------------------------------------------------------------------------------

    async def create(self, name: str, *, reliable: bool = True, on: int | None = None) -> TopicName:
        """Makes the topic and waits until a broker serves it; moves it to node `on`, if that is given."""
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

    async def served(self, topic: TopicName, seconds: float = 60.0) -> Topic:
        await self.until(lambda: self.host(topic) is not None, seconds)
        found = self.sole_host(topic).topic(topic)
        assert found is not None and found.reliable
        return found

    async def unload(self, topic: TopicName, *, to: int | None = None, asked: Node | None = None) -> None:
        """As an operator does; returns when the old owner has released the topic."""
        node = asked or self.living[0]
        assert node.broker is not None and node.broker.cluster is not None
        target = self.node(to).broker_id if to is not None else None
        await node.call(node.broker.cluster.requests.unload(topic, target))

    async def descriptors(self, topic: TopicName) -> list[tuple[int, int]]:
        items = await self.metadata.list(keys.storage_objects(topic))
        found = [json.loads(item.value) for item in items]
        return [(each["start_offset"], each["end_offset"]) for each in found]

    # --- clients ----------------------------------------------------------------------------------------------

    def client(self, *, timeout: float = 60.0, connector: WireConnector | None = None) -> Client:
        """A real client of this cluster, on its wires. It knows the addresses of all nodes there are now.

        `connector`: from `wires.connector()`, for tests that break this client's connections.
        """
        urls = [f"danube://{node.host}:{STREAM_PORT}" for node in self.nodes]
        return Client(urls, timeout=timeout, connector=connector or self.wires.connector())

    # --- simple clients ---------------------------------------------------------------------------------------

    async def publish(
        self, topic: TopicName, call: Callable[[Topic], Coroutine[Any, Any, T]], seconds: float = 60.0
    ) -> T:
        """Tries until a broker takes it, as a client does."""
        began = self.clock.elapsed()
        while True:
            node = self.host(topic)
            try:
                if node is not None:
                    found = node.topic(topic)
                    assert found is not None and found.reliable
                    answer: T = await node.call(call(found))
                    return answer
                raise NotServed(topic, "nobody has it")
            except DanubeError as error:
                assert error.retryable and self.clock.elapsed() - began < seconds, str(error)
                await asyncio.sleep(0.02)
