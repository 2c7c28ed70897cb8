"""Several brokers in one process that only agree: they register, lead, claim topics and let them go, and store nothing.

    cluster = MemberCluster()
    a, b, c = await cluster.boot(1, 2, 3)
    await cluster.create("/default/orders")
    await asyncio.sleep(5)                  five seconds that cost nothing
    a.kill()                                kill -9: nothing of it ever runs again
    a.pause(); a.resume()                   SIGSTOP, SIGCONT
    a.metadata.cut = True                      a partition between this broker and the metadata store

On every claim of a topic the cluster checks that its last owner could not have been serving it any more; whenever
a broker is drained for having been away, that a leader had declared its last session dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final, cast

from pydanube.cluster import ClusterNode, Identity
from pydanube.config import LoadManagerConfig
from pydanube.core import keys
from pydanube.core.cluster.lifecycle import BrokerLoss, BrokerState, RegistrationDecision
from pydanube.core.cluster.load import LoadReport, TopicLoad
from pydanube.core.cluster.placement import BROKER_LOST, Marker
from pydanube.core.history.ownership import Owner
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import Conflict, DanubeError, OwnershipLost, TopicUnknown, Unavailable, Unreachable
from pydanube.ports import Compare, Delete, Put
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.testing.cluster_of import ClusterOf
from pydanube.testing.faulty_metadata import FaultyMetadata
from pydanube.testing.loop import Process, SimClock, SimLoop, SimWork

TTL: Final = 32.0
ORDERS: Final = TopicName("/default/orders")
FAIR: Final = LoadManagerConfig(assignment_strategy="fair")


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on the simulator's loop. An error that nobody took fails it."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        simulate(test(*arguments, **named), None)

    return run


def simulate(history: Coroutine[Any, Any, None], seed: int | None) -> None:
    """Runs it in an order of events that comes from the seed, or in the order in which they came about."""
    loop = SimLoop(Random(seed or 0), shuffled=seed is not None)  # type: ignore[abstract]
    try:
        loop.run_until_complete(history)
        assert not loop.problems, loop.problems
    finally:
        loop.close()


def now() -> float:
    return asyncio.get_running_loop().time()


class MemberNode:
    """A broker without topics' contents; also the `Host` that its cluster calls."""

    def __init__(self, cluster: MemberCluster, broker: int, *, home: str, join: bool) -> None:
        self.shared = cluster
        self.broker = BrokerId(broker)
        self.owned: dict[TopicName, int] = {}  # and the revision of the owner key
        self.lost_for: list[str] = []
        self.claims_fail: DanubeError | None = None
        self.moves_fail: DanubeError | None = None
        self.topic_age = 1e6  # seconds, as it reports
        self.claim_seconds = 0.0
        self.not_home = ""
        self.move_seconds = 0.1
        self.home = home
        self.join = join
        self.metadata = cluster.access(broker)
        self.process = Process(f"broker {broker}")
        self.cluster: ClusterNode
        self.entry: RegistrationDecision

    # --- life ---

    async def start(self) -> None:
        identity = Identity(
            broker=self.broker,
            home=self.home,
            broker_url=f"http://b{self.broker}:6650",
            connect_url=f"http://b{self.broker}:6650",
            admin_addr=f"b{self.broker}:50051",
            prom_exporter=f"b{self.broker}:9040",
            stream_url=f"danube://b{self.broker}:6651",
        )
        self.cluster = ClusterNode(
            identity,
            store=self.metadata,
            clock=self.shared.clock,
            work=self.shared.work,
            config=self.shared.config,
            ttl_seconds=self.shared.ttl_seconds,
            join=self.join,
            rejoins=self.shared.rejoins,
        )
        self.entry = await self.cluster.register(self)
        for topic in await self._own_topics():
            with contextlib.suppress(DanubeError):  # it is offered again
                item = await self.metadata.get(keys.owner(topic))
                await self._take(topic, item.revision if item else 0)
        self.cluster.start(self)

    async def _own_topics(self) -> list[TopicName]:
        while True:
            with contextlib.suppress(Unavailable):
                return await self.cluster.own_topics()

    def kill(self) -> None:
        self.shared.nodes.remove(self)
        self.process.kill()

    def pause(self) -> None:
        self.process.pause()

    def resume(self) -> None:
        self.process.resume()

    async def stop(self) -> None:
        """SIGTERM: seals everything, then leaves."""
        await self.process.call(self._stop())
        self.kill()

    async def _stop(self) -> None:
        await self.cluster.retire()
        for topic in list(self.owned):
            await self.shared.clock.sleep(self.move_seconds)
            await self._release(topic, Marker(reason="shutdown", from_broker=self.broker).as_ready())
        await self.cluster.stop()

    @property
    def alive(self) -> bool:
        return self.process.alive

    def serves(self, name: TopicName) -> bool:
        return name in self.serving

    @property
    def serving(self) -> set[TopicName]:
        """What it would acknowledge publishes to."""
        return set(self.owned) if self.process.alive and self.cluster.may_serve() else set()

    # --- the host ---

    async def take_over(
        self,
        topic: TopicName,
        marker: Marker,
        *,
        marker_revision: int | None = None,
        owner_revision: int | None = None,
    ) -> None:
        await self.shared.clock.sleep(self.claim_seconds)
        if self.claims_fail is not None:
            raise self.claims_fail
        if await self.metadata.get(keys.topic(topic)) is None:
            raise TopicUnknown(topic)
        item = await self.metadata.get(keys.owner(topic))
        owner = Owner.from_bytes(item.value) if item else None
        is_nobodys = owner is None or owner.released or owner.deleted
        if marker_revision is not None and not is_nobodys and marker.reason != BROKER_LOST:
            raise Conflict(keys.owner(topic))
        revision = (item.revision if item else 0) if owner_revision is None else owner_revision
        await self._take(topic, revision, marker_revision)

    async def hand_over(self, topic: TopicName, marker: Marker) -> None:
        await self.shared.clock.sleep(self.move_seconds)
        if self.moves_fail is not None:
            raise self.moves_fail
        await self._release(topic, marker.as_ready())

    async def lost(self, reason: str) -> None:
        self.lost_for.append(reason)
        self.owned.clear()

    async def why_not_home(self) -> str:
        return self.not_home

    def load_report(self) -> LoadReport:
        topics = [TopicLoad(topic_name=topic, age_seconds=self.topic_age) for topic in self.owned]
        return LoadReport(broker_id=self.broker, timestamp=self.shared.clock.time_us() // 1000, topics=topics)

    def owned_topics(self) -> Collection[TopicName]:
        return self.owned

    # --- ownership, as the real broker does it ---

    async def _take(self, topic: TopicName, owner_revision: int, marker_revision: int | None = None) -> None:
        item = await self.metadata.get(keys.owner(topic))
        before = Owner.from_bytes(item.value) if item else None
        owner = Owner(
            epoch=before.epoch + 1 if before else 1, session=self.cluster.session, broker_id=self.broker, start_offset=0
        )
        marker = [] if marker_revision is None else [Compare(keys.unassigned(topic), marker_revision)]
        revision = await self.metadata.transact(
            [Compare(keys.owner(topic), owner_revision), self.cluster.registered, *marker],
            [
                Put(keys.owner(topic), owner.to_bytes()),
                Put(keys.assignment(self.broker, topic), b"null"),
                Delete(keys.unassigned(topic)),
            ],
        )
        if revision is None:
            raise Conflict(keys.owner(topic))
        self.owned[topic] = revision

    async def _release(self, topic: TopicName, marker: Marker) -> None:
        held = self.owned.pop(topic, -1)  # first it stops serving, then it lets go
        while True:
            with contextlib.suppress(Unreachable):
                item = await self.metadata.get(keys.owner(topic))
                if item is None or item.revision != held:
                    break
                owner = replace(Owner.from_bytes(item.value), released=True)
                revision = await self.metadata.transact(
                    [Compare(keys.owner(topic), held)],
                    [
                        Put(keys.owner(topic), owner.to_bytes()),
                        Delete(keys.assignment(self.broker, topic)),
                        Put(keys.unassigned(topic), marker.to_bytes()),
                    ],
                )
                if revision is not None:
                    return
        if item is None or Owner.from_bytes(item.value).broker_id != self.broker:
            raise OwnershipLost(topic)


class Watched(MemoryMetadataStore):
    """Tells the cluster of every change, in the moment in which it is made."""

    def __init__(self, clock: SimClock, cluster: MemberCluster) -> None:
        super().__init__(clock)
        self._cluster = cluster

    @property
    def keys(self) -> Collection[str]:
        return self._items.keys()

    def at(self, key: str) -> bytes | None:
        item = self._items.get(key)
        return item.value if item else None

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> int | None:
        revision = await super().transact(compares, operations)
        if revision is not None:
            self._cluster.notice(compares, operations)
        return revision


class MemberCluster(ClusterOf[MemberNode]):
    """One metadata store and the brokers on it."""

    clock: SimClock
    metadata: Watched

    def __init__(self, *, seed: int = 0, ttl_seconds: float = TTL, config: LoadManagerConfig = FAIR) -> None:
        clock = SimClock()
        super().__init__(clock, Watched(clock, self))
        self.rng = Random(seed)
        self.work = SimWork(self.rng)
        self.config = config
        self.ttl_seconds = ttl_seconds
        self.rejoins = False  # rejoin: active
        self.all_nodes: list[MemberNode] = []
        self.claims: list[tuple[TopicName, BrokerId]] = []
        self.markers: list[tuple[TopicName, Marker | None]] = []  # every one that was ever put
        self._states: dict[BrokerId, BrokerState] = {}
        self.leader_writes: list[tuple[float, int]] = []  # when, and under which revision of the leader key
        self.stores: Callable[[FaultyMetadata], None] = lambda store: None  # what every new access is like

    def access(self, broker: int) -> FaultyMetadata:
        store = FaultyMetadata(self.metadata, self.clock, Random(self.rng.random()))
        self.stores(store)
        return store

    # --- brokers ---

    async def boot(self, *brokers: int, join: bool = False) -> list[MemberNode]:
        return [await self.boot_one(broker, join=join) for broker in brokers]

    async def boot_one(self, broker: int, *, join: bool = False, home: str | None = None) -> MemberNode:
        """A process for this broker; the same directory as before, unless it is said otherwise."""
        node = MemberNode(self, broker, home=home or f"disk of {broker}", join=join)
        self.nodes.append(node)
        self.all_nodes.append(node)
        try:
            await node.process.call(node.start())
        except DanubeError:
            self.nodes.remove(node)
            node.process.kill()
            raise
        return node

    @property
    def leaders(self) -> list[MemberNode]:
        return [node for node in self.nodes if node.cluster.leadership.leads]

    # --- topics ---

    async def create(self, *names: str) -> list[TopicName]:
        topics = [TopicName(name) for name in names]
        for topic in topics:
            await self.metadata.transact([], [Put(keys.topic(topic), b"null"), Put(keys.unassigned(topic), b"null")])
        return topics

    async def create_on(self, node: MemberNode, *names: str) -> list[TopicName]:
        """Topics that this broker has from the start."""
        topics = [TopicName(name) for name in names]
        for topic in topics:
            await self.metadata.transact([], [Put(keys.topic(topic), b"null")])
            await node.process.call(node._take(topic, 0))
        return topics

    def hosts(self, topic: TopicName) -> list[BrokerId]:
        """Who serves it."""
        return [node.broker for node in self.nodes if topic in node.serving]

    async def state(self, broker: int) -> tuple[str, str] | None:
        item = await self.metadata.get(keys.broker_state(BrokerId(broker)))
        state = BrokerState.from_bytes(item.value) if item else None
        return (state.mode.value, state.reason) if state else None

    # --- what must always be so ---

    def notice(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> None:
        for compare in compares:
            if compare.key == keys.LEADER and compare.revision > 0:
                self.leader_writes.append((now(), compare.revision))
        for operation in operations:
            if not isinstance(operation, Put):
                continue
            if (marked := keys.topic_of_unassigned(operation.key)) is not None:
                self.markers.append((marked, Marker.from_bytes(operation.value)))
            if (broker := keys.broker_of_state(operation.key)) is not None:
                self._judge(broker, BrokerState.from_bytes(operation.value))
            topic = keys.topic_of_owner(operation.key)
            if topic is None:
                continue
            owner = Owner.from_bytes(operation.value)
            if owner.released:
                continue
            self.claims.append((topic, BrokerId(owner.broker_id)))
            for node in self.all_nodes:
                if node.broker != owner.broker_id and topic in node.serving:
                    self.complain(f"{now()}: {owner.broker_id} claims {topic}, which {node.broker} serves")

    def _judge(self, broker: BrokerId, state: BrokerState | None) -> None:
        """Nobody is drained for having been away whose last session was not declared dead."""
        assert state is not None
        before = self._states.get(broker)
        self._states[broker] = state
        if state.reason not in ("stale_restart", "registration_expired"):
            return
        if before is None or before.session == state.session or before.reason == state.reason:
            return  # it was so before
        item = self.metadata.at(keys.lost(broker))
        lost = BrokerLoss.from_bytes(item) if item else None
        if lost is None or lost.session != before.session:
            self.complain(f"{now()}: broker {broker} is drained, and nobody declared it dead")

    def complain(self, what: str) -> None:
        """Fails the test, whoever is in whose hands at this moment."""
        cast(SimLoop, asyncio.get_running_loop()).problems.append({"message": what})
