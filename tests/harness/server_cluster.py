"""Several brokers in one process, each with its servers open on real sockets, on one metadata store and object store.

@clustered(2)
async def test_something(cluster: ServerCluster) -> None:
    await cluster.create("/default/a", on=1)
    assert await refused(cluster.calls(2).producers.SendMessage(...)) == ...
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import grpc

from pydanube.api.grpc.peers import Peers
from pydanube.api.server import BrokerServers
from pydanube.broker.quorum import Members
from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.cluster.cluster import ClusterNode
from pydanube.config import BrokerConfig, ClusterConfig, Config, LoadManagerConfig, StorageConfig
from pydanube.core import keys
from pydanube.core.cluster.lifecycle import BrokerState
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import TopicName
from pydanube.errors import Refused, Unreachable
from pydanube.ports import Buffer, ObjectInfo, Put
from pydanube.schema.answering import Answering
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.stores.schemas.memory import MemorySchemaParsers
from pydanube.stores.work.memory import MemoryWork
from pydanube.stores.work.memory_clock import LoopClock
from pydanube.testing.cluster_of import ClusterOf
from pydanube.testing.ports import free_ports
from tests.harness.servers import Calls
from tests.support import run

TTL_SECONDS = 6.0  # real seconds, and the machine may be busy
WAIT_SECONDS = 20.0


def run_members(broker: Broker, members: Members | None) -> None:
    """As if the broker ran members of the metadata store."""
    broker._ports = broker._ports._replace(members=lambda: members)


class Bucket(MemoryObjectStore):
    """An object store that may be away."""

    away = False

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        if self.away:
            raise Unreachable("object store", "it is away")
        return await super().put(key, data, create=create)


class ServerNode:
    """A broker with its servers, and a client of them."""

    alive = True

    def __init__(self, broker: Broker, servers: BrokerServers, calls: Calls) -> None:
        self.broker = broker
        self.servers = servers
        self.calls = calls

    def serves(self, name: TopicName) -> bool:
        return self.broker.topics.get(name) is not None

    @property
    def id(self) -> int:
        return self.broker.broker_id

    @property
    def cluster(self) -> ClusterNode:
        assert self.broker.cluster is not None
        return self.broker.cluster


class ServerCluster(ClusterOf[ServerNode]):
    """The nodes are numbered from 1."""

    def __init__(
        self,
        stack: contextlib.AsyncExitStack,
        proxies: Mapping[int, str],
        upload_seconds: float = 0.2,
        **load_manager: Any,
    ) -> None:
        clock = LoopClock()
        super().__init__(clock, MemoryMetadataStore(clock))
        self._stack = stack
        self._upload_seconds = upload_seconds
        self._proxies = proxies
        self._load_manager = load_manager
        self.objects = Bucket()

    def calls(self, number: int) -> Calls:
        return self.node(number).calls

    async def start(self, count: int) -> None:
        ports = free_ports(4 * count)
        for number in range(count):
            await self._start(number + 1, ports[4 * number : 4 * number + 4])
        await self.until(
            lambda: all(len(node.cluster.peers) == count and node.cluster.leader is not None for node in self.nodes)
        )

    async def _start(self, number: int, ports: Sequence[int]) -> None:
        client, stream, admin, metrics = (f"127.0.0.1:{port}" for port in ports)
        config = Config(
            mode="cluster",
            broker=BrokerConfig(
                client_addr=client,
                stream_addr=stream,
                admin_addr=admin,
                metrics_addr=metrics,
                connect_url=self._proxies.get(number),
            ),
            cluster=ClusterConfig(
                cluster_name="cluster", ttl_seconds=TTL_SECONDS, etcd=("memory:0",), shutdown_seconds=5.0
            ),
            storage=StorageConfig(url="file:///shared", tier=TierConfig(upload_seconds=self._upload_seconds)),
            load_manager=LoadManagerConfig(
                **{"assignment_strategy": "fair", "load_report_interval_seconds": 1, **self._load_manager}
            ),
        )
        broker = await Broker.start_on(
            config,
            disk=MemoryDisk(),
            metadata=self.metadata,
            clock=self.clock,
            work=MemoryWork(Random(number)),
            objects=self.objects,
            home=f"node{number}",
            reach=Peers,
            parsers=MemorySchemaParsers(Answering().answer),
        )
        self._stack.push_async_callback(broker.stop)
        servers = await BrokerServers.open(broker)
        self._stack.push_async_callback(servers.close, grace_seconds=0.2)
        channels = [grpc.aio.insecure_channel(address) for address in (servers.client_addr, servers.admin_addr)]
        for channel in channels:
            self._stack.push_async_callback(channel.close)
        self.nodes.append(ServerNode(broker, servers, Calls(broker, servers, *channels)))

    async def until(self, true: Callable[[], bool], seconds: float = WAIT_SECONDS) -> float:
        return await super().until(true, seconds)

    async def create(self, name: str, *, on: int, reliable: bool = True) -> TopicName:
        """Makes the topic and has node `on` serve it, as every node knows."""
        topic = TopicName(name)
        await self.calls(on).create_topic(topic, reliable=reliable)
        if self.host(topic) is not self.node(on):
            await self.node(on).cluster.requests.unload(topic, self.node(on).broker.broker_id)
        await self.settled(topic, on)
        return topic

    async def settled(self, topic: TopicName, on: int) -> None:
        target = self.node(on)
        await self.until(
            lambda: (
                target.broker.topics.get(topic) is not None
                and all(
                    node.cluster.host_of(topic) == target.id and node.cluster.marker_of(topic) is None
                    for node in self.nodes
                )
            )
        )

    async def drained(self, *numbers: int, reason: str = "drain_complete") -> None:
        """These brokers are given no topics any more, as if an operator wanted it so."""
        for number in numbers:
            key = keys.broker_state(self.node(number).broker.broker_id)
            item = await self.metadata.get(key)
            stored = BrokerState.from_bytes(item.value) if item else None
            assert stored is not None
            await self.metadata.transact([], [Put(key, stored.drained(reason).to_bytes())])
        gone = {self.node(number).id for number in numbers}
        await self.until(lambda: not any(gone & {*node.cluster.view.active()} for node in self.nodes))


@contextlib.asynccontextmanager
async def server_cluster(
    count: int, *, proxies: Mapping[int, str] = {}, **load_manager: Any
) -> AsyncIterator[ServerCluster]:
    async with contextlib.AsyncExitStack() as stack:
        cluster = ServerCluster(stack, proxies, **load_manager)
        await cluster.start(count)
        yield cluster


def clustered(
    count: int, **settings: Any
) -> Callable[[Callable[[ServerCluster], Awaitable[None]]], Callable[[], None]]:
    """Runs an async test with a cluster of its own; `settings` are those of `server_cluster`."""

    def decorate(test: Callable[[ServerCluster], Awaitable[None]]) -> Callable[[], None]:
        async def body() -> None:
            async with server_cluster(count, **settings) as cluster:
                await test(cluster)

        @functools.wraps(test)
        def run_it() -> None:
            run(body())

        del run_it.__wrapped__  # pytest would look for a fixture called cluster
        return run_it

    return decorate


def reliable(node: ServerNode, name: TopicName) -> Topic:
    topic = node.broker.topics.get(name)
    assert isinstance(topic, Topic)
    return topic


# --- members of a metadata store -------------------------------------------------------------------------


@dataclass
class OneMember:
    id: int
    peer_urls: Sequence[str]
    is_learner: bool = False


@dataclass
class OneStatus:
    member: OneMember
    is_leader: bool = False
    raft_term: int = 4
    raft_applied: int = 100


class SmallQuorum:
    """Members in a list."""

    def __init__(self, *members: OneMember) -> None:
        self.members = list(members)

    async def status(self) -> list[OneStatus]:
        return [OneStatus(each, is_leader=number == 0) for number, each in enumerate(self.members)]

    async def add_learner(self, peer_url: str) -> list[OneMember]:
        if not any(peer_url in each.peer_urls for each in self.members):
            self.members.append(OneMember(33, (peer_url,), is_learner=True))
        return self.members

    async def promote(self, member_id: int) -> list[OneMember]:
        for each in self.members:
            each.is_learner = each.is_learner and each.id != member_id
        return self.members

    async def remove(self, member_id: int) -> list[OneMember]:
        if sum(not each.is_learner for each in self.members) == 2:
            raise Refused(f"member {member_id} cannot be removed: too few members would be left")
        self.members = [each for each in self.members if each.id != member_id]
        return self.members
