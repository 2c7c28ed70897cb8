"""Random lives of a cluster: brokers die, stop, pause, are cut off; the store is slow and loses answers and events.

What must hold all the time:

    nobody claims a topic that another broker still serves         } checked by the cluster,
    nobody is drained for having been away who was not declared dead} at every change
    leaders write in terms that do not overlap                       by the revision of the leader key they compared

And when the faults end and everybody is back: every topic is served, by one broker, and no marker is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from random import Random
from typing import Final

import pytest

from pydanube.cluster import lease
from pydanube.cluster.load_manager import LoadManager
from pydanube.core import keys
from pydanube.core.cluster.placement import Marker
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import DanubeError, NotServed
from pydanube.ports import Compare, Delete, Put
from pydanube.testing.loop import ProcessDied
from tests.harness.member_cluster import MemberCluster, MemberNode, now, simulate

HISTORIES: Final = 60
HISTORIES_LONG: Final = 2_000
DECLARED_UNSEEN: Final = 1437  # a session comes and goes while the leader's view of the store is late
TTL: Final = 8.0
BROKERS: Final = (1, 2, 3, 4)
TOPICS: Final = 12
CALM_SECONDS: Final = 300.0
DISTURBANCES: Final = (
    *("kill", "stop", "boot", "boot", "boot", "pause", "cut", "slow", "lossy", "sick", "heal", "heal", "move", "drain"),
)

pytestmark = pytest.mark.slow


class History:
    """One life, from a seed."""

    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.seed = seed
        self.cluster: MemberCluster
        self.events: list[str] = []
        self.booting: set[int] = set()

    def tell(self, event: str) -> None:
        self.events.append(f"{now():.3f} {event}")

    async def run(self) -> None:
        rng = self.rng
        cluster = self.cluster = MemberCluster(seed=self.seed, ttl_seconds=TTL)
        if rng.random() < 0.5:
            every = rng.choice([1, 2, 10])
            cluster.stores = lambda store: setattr(store, "drop_every", every)
        await cluster.boot(*BROKERS)
        topics = await cluster.create(*(f"/default/t{number}" for number in range(TOPICS)))
        for _ in range(rng.randrange(10, 40)):
            await asyncio.sleep(rng.random() * rng.choice([0.3, 3.0, TTL]))
            self.disturb()
        await self.calm()
        deadline = now() + CALM_SECONDS
        while not all(len(cluster.hosts(topic)) == 1 for topic in topics) or await cluster.metadata.list(
            keys.UNASSIGNED
        ):
            assert now() < deadline, self.report(topics)
            await asyncio.sleep(1.0)
        revisions = [revision for _, revision in cluster.leader_writes]
        assert revisions == sorted(revisions)
        assert len(cluster.leaders) == 1

    def disturb(self) -> None:
        rng, cluster = self.rng, self.cluster
        ready = [node for node in cluster.nodes if hasattr(node, "entry") and node.process.alive]
        absent = [broker for broker in BROKERS if broker not in self.booting | {node.broker for node in cluster.nodes}]
        what = rng.choice(
            ["kill", "boot", "boot", "pause", "cut", "slow", "lossy", "sick", "heal", "heal", "move", "drain"]
        )
        self.tell(what)
        if what == "boot" and absent:
            self.boot(rng.choice(absent))
            return
        if not ready:
            return
        node = rng.choice(ready)
        self.tell(f"{what} {node.broker}")
        if what == "kill":
            node.kill()
        elif what == "stop":
            self.stop(node)
        elif what == "pause":
            node.pause() if node.process.held is None else node.resume()
        elif what == "cut":
            node.metadata.cut = True
        elif what == "slow":
            node.metadata.delay_max_seconds = rng.choice([0.1, 1.0, 3.0])
        elif what == "lossy":
            node.metadata.answers_lost = 0.2
        elif what == "sick":
            node.moves_fail = NotServed("", "the object store is away")
            node.claims_fail = rng.choice([None, NotServed("", "the disk is full")])
            node.claim_seconds = rng.choice([0.0, 2.0, 5.0])
        elif what == "heal":
            heal(node)
        elif what == "move":
            topic = rng.choice([*node.cluster.view.hosts] or [None])
            if topic is not None:
                self.ask(node, node.cluster.requests.request_move, topic)
        elif what == "drain":
            other = BrokerId(rng.choice(BROKERS))
            request = rng.choice([node.cluster.requests.drain, node.cluster.requests.activate])
            self.ask(node, request, other)

    def boot(self, broker: int) -> None:
        self.booting.add(broker)

        async def boot() -> None:
            try:
                await self.cluster.boot_one(broker)
            except ProcessDied:
                pass
            finally:
                self.booting.discard(broker)

        asyncio.get_running_loop().create_task(boot())

    def stop(self, node: MemberNode) -> None:
        async def stop() -> None:
            with contextlib.suppress(DanubeError, ProcessDied):
                await node.stop()

        asyncio.get_running_loop().create_task(stop())

    def ask(self, node: MemberNode, request: object, *arguments: object) -> None:
        async def ask() -> None:
            with contextlib.suppress(DanubeError, ProcessDied):
                await node.process.call(request(*arguments))  # type: ignore[operator]

        asyncio.get_running_loop().create_task(ask())

    async def calm(self) -> None:
        """Everything heals, and everybody is back and active."""
        cluster = self.cluster
        self.tell("calm")
        for node in list(cluster.nodes):
            heal(node)
        await asyncio.sleep(3 * TTL)
        for broker in BROKERS:
            if broker not in {node.broker for node in cluster.nodes}:
                await cluster.boot_one(broker)
        for node in list(cluster.nodes):
            heal(node)
        asked = cluster.nodes[0]
        for broker in BROKERS:
            await asked.process.call(asked.cluster.requests.activate(BrokerId(broker)))

    def report(self, topics: list[object]) -> str:
        lines = [*self.events[-40:]]
        for topic in topics:
            lines.append(f"{topic}: {self.cluster.hosts(topic)}")  # type: ignore[arg-type]
        return "\n".join(lines)


def heal(node: MemberNode) -> None:
    node.resume()
    node.metadata.cut = False
    node.metadata.delay_max_seconds = 0.0
    node.metadata.answers_lost = 0.0
    node.moves_fail = node.claims_fail = None
    node.claim_seconds = 0.0


@pytest.fixture(autouse=True)
def drain() -> Iterator[None]:
    """A history logs thousands of lines that nobody reads."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("seed", [*range(HISTORIES), DECLARED_UNSEEN])
def test_a_cluster_keeps_one_owner_for_every_topic_whatever_happens(seed: int) -> None:
    simulate(History(seed).run(), seed)


@pytest.mark.long
@pytest.mark.parametrize("hundred", range(HISTORIES_LONG // 100))
def test_many_more_lives_of_a_cluster(hundred: int) -> None:
    for seed in range(1000 + hundred * 100, 1000 + hundred * 100 + 100):
        try:
            simulate(History(seed).run(), seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}") from error


def test_the_same_seed_gives_the_same_life() -> None:
    lives = []
    for _ in range(2):
        history = History(7)
        simulate(history.run(), 7)
        lives.append((history.events, history.cluster.claims, history.cluster.leader_writes))
    assert lives[0] == lives[1]


# --- the checks would notice ------------------------------------------------------------------------------------


def complaint_of(seeds: range) -> str:
    """What the first broken history of these seeds complains of; nothing if none is broken."""
    for seed in seeds:
        try:
            simulate(History(seed).run(), seed)
        except AssertionError as error:
            return str(error)
    return ""


def test_a_broker_that_serves_as_long_as_its_lease_may_last_and_longer_is_found_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lease, "serve_until", lambda sent, ttl_seconds: sent + 1.5 * ttl_seconds)
    assert "which" in complaint_of(range(60))


def test_a_claim_of_whatever_owner_there_is_now_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the revision that was judged, two targets of one topic both get it."""

    async def take_over(self: MemberNode, topic: TopicName, marker: Marker, **revisions: int | None) -> None:
        await asyncio.sleep(self.shared.rng.random() * 4)
        item = await self.metadata.get(keys.owner(topic))
        await self._take(topic, item.revision if item else 0)

    monkeypatch.setattr(MemberNode, "take_over", take_over)
    assert complaint_of(range(60)) != ""


def test_a_leader_that_does_not_compare_what_it_decided_on_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def write(self: LoadManager, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> bool:
        await asyncio.sleep(self._clock.elapsed() % 1.0)
        return await self._view.transact([self._leadership.guard], operations) is not None

    monkeypatch.setattr(LoadManager, "_write", write)
    assert complaint_of(range(60)) != ""
