"""One history of a whole cluster from a seed: clients work, everything fails, and at the end nothing may be missing.

    outcome = run_seed(42)        the same seed, the same run
    outcome.problems              what was not as promised; empty is good

Safety first: for some minutes of simulated time brokers are killed, paused, cut off and restarted, disks and stores
fail, operators move topics (cluster_faults.py), while clients go on (cluster_clients.py). Then everything heals: within
a bound of time every topic must be served, every orphan resolved, and every subscription caught up. What happened is
recorded (history.py) and judged by rules that know nothing of brokers (checkers.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final

from pydanube.broker.fanout import FanoutTopic
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.delivery import FailurePolicy, Poison
from pydanube.core.lag import Heartbeat
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.ownership import Orphan, Owner, Seal, void_end
from pydanube.core.policies import SubscriptionKind
from pydanube.core.tiers import Retention, TierConfig
from pydanube.errors import DanubeError, OffsetOutOfRange
from pydanube.log.wal import WalConfig
from pydanube.ports import Delete, Put
from pydanube.stores.memory import MemoryMetadataStore
from pydanube.testing.checkers import Violation, check
from pydanube.testing.cluster import Cluster
from pydanube.testing.cluster_clients import Clients
from pydanube.testing.cluster_faults import DEAD_LETTERS, REDELIVERIES, Breaking, Planned, plan
from pydanube.testing.history import (
    Claimed,
    Created,
    Cursor,
    Dead,
    Head,
    History,
    Kept,
    Orphaned,
    Policy,
    Quiet,
    Released,
    Serving,
    life,
)
from pydanube.testing.log_history import small_constants
from pydanube.testing.loop import Deadlock, Livelock, ProcessDied, SimLoop

BROKERS: Final = 3
RELIABLE: Final = 4
NON_RELIABLE: Final = 1
FAULTS_FROM: Final = 12.0
FAULTS_UNTIL: Final = 250.0
LIVENESS_SECONDS: Final = 200.0  # until everything is served again and nobody misses anything
DRAIN_SECONDS: Final = 60.0  # until everything that is served has been delivered
PATIENCE_SECONDS: Final = 6.0  # a heartbeat, the longest wait for a redelivery, and a consumer that thinks
LOOK_SECONDS: Final = 5.0
STEPS_MAX: Final = 3_000_000
CHECKED_MIN: Final = 50

TIER: Final = TierConfig(
    upload_seconds=20.0,
    object_bytes=64 * 1024,
    merge_count_min=4,
    descriptors_max=6,
    descriptors_moved=3,
    garbage_seconds=40.0,
    local=Retention(seconds=60.0),
    retention_check_seconds=30.0,
    sweep_seconds=90.0,
)
WAL: Final = WalConfig(
    segment_bytes=2048, segment_seconds=60.0, journal_bytes=8192, copy_bytes=4096, ballast_bytes=512, cache_bytes=4096
)


@dataclass(slots=True)
class Outcome:
    seed: int
    problems: list[str]
    violations: list[Violation]
    faults: Counter[str]
    acknowledged: int
    delivered: int
    checked: int
    seconds: float  # of simulated time
    steps: int
    digest: str  # of everything that was recorded
    schedule: list[Planned] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    history: History | None = None

    @property
    def rules(self) -> set[str]:
        """Which promises were broken."""
        return {violation.rule for violation in self.violations} or {each.partition(":")[0] for each in self.problems}


def run_seed(
    seed: int,
    *,
    tweak: Callable[[Cluster], None] | None = None,
    leave_out: Sequence[int] = (),
    keep_history: bool = False,
) -> Outcome:
    """Runs the history of this seed. What goes wrong is a problem of the outcome.

    `tweak` may change the cluster before it starts. `leave_out`: these faults of the schedule do not happen.
    """
    loop = SimLoop(Random(seed), steps_max=STEPS_MAX)  # type: ignore[abstract]
    run = _Run(seed, tweak, leave_out)
    try:
        with small_constants():
            loop.run_until_complete(run.main())
        run.problems += [_told(each) for each in loop.problems[:3]]
    except (Deadlock, Livelock, AssertionError) as error:
        run.problems.append(f"{type(error).__name__}: {str(error)[:4000]}")
    finally:
        loop.close()
    return run.outcome(loop, keep_history=keep_history)


def _told(problem: dict[str, object]) -> str:
    return f"error that nobody took: {problem.get('message')}: {problem.get('exception')!r}"


class RecordingStore(MemoryMetadataStore):
    """Tells what it takes, in the order in which it takes it."""

    tell: Callable[[Put | Delete], None] = staticmethod(lambda operation: None)

    def _change(self, operations: Sequence[Put | Delete]) -> None:
        super()._change(operations)
        for operation in operations:
            self.tell(operation)


class _Run:
    def __init__(self, seed: int, tweak: Callable[[Cluster], None] | None, leave_out: Sequence[int]) -> None:
        self.seed = seed
        self.dice = Random(seed ^ 0x5EED)
        self.history = History()
        self.problems: list[str] = []
        self.violations: list[Violation] = []
        self.said: list[str] = []
        everything = plan(seed, nodes=BROKERS, first=FAULTS_FROM, end=FAULTS_UNTIL)
        self.schedule = [planned for planned in everything if planned.number not in leave_out]
        self.checked = 0
        self._tweak = tweak
        self._lives: dict[TopicName, str] = {}
        self.town: Cluster

    def outcome(self, loop: SimLoop, *, keep_history: bool) -> Outcome:
        digest = hashlib.blake2b(digest_size=16)
        for line in [*self.history.lines(), *self.said, *self.problems]:
            digest.update(line.encode() + b"\n")
        acked = sum(type(event).__name__ == "Acked" for event in self.history.events)
        got = sum(type(event).__name__ == "Got" for event in self.history.events)
        return Outcome(
            self.seed,
            self.problems,
            self.violations,
            Counter(planned.kind for planned in self.schedule),
            acked,
            got,
            self.checked,
            loop.time(),
            loop.steps,
            digest.hexdigest(),
            self.schedule,
            self.said,
            self.history if keep_history or self.problems else None,
        )

    def say(self, what: str) -> None:
        self.said.append(f"{self.now():9.3f} {what}")

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- the story --------------------------------------------------------------------------------------------

    async def main(self) -> None:
        town = self.town = Cluster(
            self.seed, tier=TIER, wal=WAL, heartbeat=Heartbeat(1000), faulty_disks=True, step_seconds=0.1
        )
        store = RecordingStore(town.clock)
        store.tell = self._stored  # type: ignore[method-assign]
        town.metadata = store
        if self._tweak is not None:
            self._tweak(town)
        await town.start(BROKERS)
        reliable = [TopicName(f"/default/topic-{number}") for number in range(RELIABLE)]
        others = [TopicName(f"/default/topic-{RELIABLE + number}") for number in range(NON_RELIABLE)]
        breaking = Breaking(town, self.history, [*reliable, *others], self.say)
        clients = Clients(town, self.history, self.dice)
        await self._prepare(breaking, clients, reliable, others)
        watching = [
            asyncio.create_task(self._look_on([*reliable, *others]), name="look on"),
            asyncio.create_task(self._supervise(breaking), name="supervise"),
        ]
        await breaking.run(self.schedule)
        await asyncio.sleep(max(0.0, FAULTS_UNTIL - self.now()))
        await self._heal(breaking, [*reliable, *others])
        clients.publishing = False
        clients.quiet = True
        await self._settle([*reliable, *others], [*reliable, DEAD_LETTERS])
        await clients.stop()
        for task in watching:
            task.cancel()
        for result in await asyncio.gather(*watching, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        await self._end(reliable)

    async def _prepare(
        self, breaking: Breaking, clients: Clients, reliable: Sequence[TopicName], others: Sequence[TopicName]
    ) -> None:
        for topic in reliable:
            await breaking.make(topic)
        for topic in others:
            await breaking.make(topic, reliable=False)
        for topic in [*reliable, *others]:
            await self.town.until(lambda topic=topic: self.town.host(topic) is not None)  # type: ignore[misc]
        for topic in reliable:
            host = self.town.host(topic)
            assert host is not None
            await breaking.set_policy(host, topic, REDELIVERIES)
        for topic in [*reliable, *others]:
            for number in range(2):
                kind = self.dice.choice(list(SubscriptionKind))
                name = SubscriptionName(f"sub-{number}")
                for consumer in range(1 if kind is SubscriptionKind.EXCLUSIVE else self.dice.choice((1, 2))):
                    clients.start(clients.consume(topic, name, kind, f"c{consumer}"))
        for topic in reliable:
            # Some fall silent while things still go wrong: then nothing but a heartbeat finds what was missed.
            for produce in (clients.produce, clients.produce_plainly):
                clients.start(produce(topic, until=self.dice.choice((0.5, 0.8, 1.0, 1.0)) * FAULTS_UNTIL))
        for topic in others:
            clients.start(clients.shout(topic, until=FAULTS_UNTIL))

    async def _supervise(self, breaking: Breaking) -> None:
        """Starts brokers again that ended by themselves."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            for node in self.town.nodes:
                ended = node.broker.cluster.ended if node.broker is not None and node.broker.cluster else None
                if node.alive and ended is not None and ended.done():
                    self.say(f"node {node.number} ended: {ended.exception()}")
                    node.kill()
                    await breaking.boot(node)

    async def _heal(self, breaking: Breaking, topics: Sequence[TopicName]) -> None:
        """Nothing fails from now on, and every broker is there."""
        self.say("healing")
        await breaking.end()
        for node in self.town.nodes:
            node.heal()
        for node in self.town.nodes:
            while not node.alive or node.broker is None:
                if node.alive:
                    node.kill()  # it was just starting, by somebody who is gone
                try:
                    await node.boot()
                except (DanubeError, ProcessDied) as error:
                    self.problems.append(f"boot: node {node.number} does not start on a machine that is well: {error}")
                    return
        await asyncio.sleep(10)
        for node in self.town.nodes:
            await breaking.activate(node)
        for topic in topics:
            await breaking.make(topic, reliable=topic in topics[:RELIABLE])

    async def _settle(self, topics: Sequence[TopicName], reliable: Sequence[TopicName]) -> None:
        """Liveness: with all brokers there and nothing failing, everything is served, resolved and delivered."""
        if await self._until(lambda: self._unserved(topics), LIVENESS_SECONDS):
            self.say("quiet")
            self.history.add(Quiet(PATIENCE_SECONDS, self.now()))
            await self._until(lambda: self._undelivered(reliable), DRAIN_SECONDS)

    async def _until(self, waiting: Callable[[], str], seconds: float) -> bool:
        began = self.now()
        while why := waiting():
            if self.now() - began > seconds:
                self.problems.append(f"not settled after {seconds:g} s: {why}")
                return False
            await asyncio.sleep(1.0)
        return True

    def _unserved(self, topics: Sequence[TopicName]) -> str:
        for topic in topics:
            node = self.town.host(topic)
            found = node.topic(topic) if node is not None else None
            if found is None:
                return f"nobody serves {topic}"
            if isinstance(found, Topic) and found.orphans:
                return f"{topic} has orphans {found.orphans}"
            for number in range(2):
                subscription = found.subscriptions.get(SubscriptionName(f"sub-{number}"))
                if subscription is None or not subscription.connected:
                    return f"nobody is connected to sub-{number} of {topic}"
        return ""

    def _undelivered(self, topics: Sequence[TopicName]) -> str:
        for topic in topics:
            node = self.town.host(topic)
            found = node.topic(topic) if node is not None else None
            if isinstance(found, Topic):
                for subscription in found.subscriptions.values():
                    if subscription.has_lag():
                        return f"{topic} {subscription.name}: {subscription.explain()}"
        return ""

    async def _end(self, topics: Sequence[TopicName]) -> None:
        for topic in topics:
            self.history.add(await self._kept(topic))
        if self.town.host(DEAD_LETTERS) is not None:
            await self._read_dead_letters()
        self.violations = check(self.history)
        self.problems += [str(violation) for violation in self.violations]
        self.checked = sum(len(kept.messages) for kept in self.history.all(Kept))
        if self.checked < CHECKED_MIN:
            self.problems.append(f"nothing checked: {self.checked} messages are too few")

    # --- looking on ---------------------------------------------------------------------------------------------

    def _stored(self, operation: Put | Delete) -> None:
        """The store took this."""
        key, now = operation.key, self.now()
        value = operation.value if isinstance(operation, Put) else None
        if value is None:
            return
        if (topic := keys.topic_of_owner(key)) is not None:
            self._owner(topic, Owner.from_bytes(value))
        elif (place := keys.subscription_of_cursor(key)) is not None:
            self.history.add(Cursor(self._life(place[0]), place[1], int(value), now))
        elif (place := keys.subscription_of_failure_policy(key)) is not None:
            policy = FailurePolicy.from_json(json.loads(value))
            letter = policy.poison_policy is Poison.DEAD_LETTER
            self.history.add(Policy(self._life(place[0]), place[1], policy.max_redelivery_count, letter, now))
        elif (topic := keys.topic_of_orphan(key)) is not None and (start := keys.start_of(key)) is not None:
            orphan = Orphan.from_bytes(start, value)
            self.history.add(Orphaned(self._life(topic), orphan.start, orphan.end, now))

    def _life(self, topic: TopicName) -> str:
        return self._lives.get(topic, topic)

    def _owner(self, topic: TopicName, owner: Owner) -> None:
        now = self.now()
        if owner.deleted:
            return
        label = life(topic, owner.created)
        if self._lives.get(topic) != label:
            self._lives[topic] = label
            reliable = not topic[-1].isdecimal() or int(topic[-1]) < RELIABLE
            self.history.add(Created(label, reliable, now))
        number = next((node.number for node in self.town.nodes if node.known_id == owner.broker_id), 0)
        if owner.released:
            self.history.add(Released(label, owner.epoch, 0, self._is_clean(topic, number), now))
        elif not self._claims.get(label) == owner.epoch:
            self._claims[label] = owner.epoch
            self.history.add(Claimed(label, owner.epoch, number, owner.start_offset, now))

    def _is_clean(self, topic: TopicName, number: int) -> bool:
        """Whether nothing can have kept the owner from storing its cursors, since it took no more acknowledgements."""
        node = self.town.node(number)
        broker = node.broker
        phases = broker.hosting.moving.get(topic) if broker is not None and broker.hosting is not None else None
        if phases is None:
            return False
        frozen_at = phases.frozen_at
        return frozen_at is not None and max(node.metadata.failed_at, node.paused_at) < frozen_at

    async def _look_on(self, topics: Sequence[TopicName]) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            now = self.now()
            for topic in topics:
                serving = []
                for node in self.town.living:
                    found = node.topic(topic)
                    if found is None or node.broker is None:
                        continue
                    label, epoch = life(topic, found.ownership.created), found.ownership.epoch
                    if isinstance(found, Topic):
                        self.history.add(Head(label, epoch, node.number, found.head, now))
                    if node.serves(topic) and not node.fenced_late:
                        serving.append(node.number)
                if len(serving) > 1:
                    self.history.add(Serving(self._life(topic), serving, now))

    # --- the end ------------------------------------------------------------------------------------------------

    async def _kept(self, topic: TopicName) -> Kept:
        found = await self.town.served(topic)
        messages = {offset: text for offset, text, _ in await _everything(found)}
        items = await self.town.metadata.list(keys.voids(topic))
        voids = [(start, void_end(item.value)) for item in items if (start := keys.start_of(item.key)) is not None]
        orphans = [(each.start, each.end) for each in found.orphans]
        label = life(topic, found.ownership.created)
        return Kept(label, found.first_offset, found.head, messages, voids, orphans, self.now())

    async def _read_dead_letters(self) -> None:
        found = await self.town.served(DEAD_LETTERS)
        for _, text, attributes in await _everything(found):
            topic, name = attributes["x-original-topic"], attributes["x-original-subscription"]
            offset = int(attributes["x-original-topic-offset"])
            self.history.add(Dead(self._life(TopicName(topic)), name, text, offset, self.now()))


async def _everything(topic: Topic) -> list[tuple[int, str, dict[str, str]]]:
    """Every message that can be read."""
    found: list[tuple[int, str, dict[str, str]]] = []
    offset = topic.first_offset
    while offset < topic.head:
        try:
            rows = await topic.rows(offset, topic.head)
        except OffsetOutOfRange as gap:
            offset = max(gap.first, offset + 1)
            continue
        if not rows:
            break
        found += [(at, each.payload.decode(), dict(each.attributes)) for at, each in rows]
        offset = rows[-1][0] + 1
    return found


__all__ = ["FanoutTopic", "Outcome", "Seal", "run_seed"]
