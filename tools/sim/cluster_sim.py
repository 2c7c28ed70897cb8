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
import contextlib
import gc
import hashlib
import re
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final

from pydanube.client import brokers
from pydanube.cluster import assignment_reconciler
from pydanube.core import keys
from pydanube.core.dispatch import ranges
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import SubscriptionKind
from pydanube.errors import DanubeError
from pydanube.formats import parquet_write
from pydanube.history import rescue, uploader
from pydanube.history.retention import RetentionChange
from pydanube.ports import Put
from pydanube.testing.checkers import Violation, check
from pydanube.testing.cluster import Cluster, Node
from pydanube.testing.history import Acked, Claimed, Got, Grew, History, Kept, Lease, Quiet, Stopped, Worked
from pydanube.testing.loop import Deadlock, Livelock, ProcessDied, SimLoop
from pydanube.testing.wires import QUIET
from tools.sim import cluster_clients, real_clients
from tools.sim.cluster_clients import VISITOR, Clients
from tools.sim.cluster_faults import (
    DEAD_LETTERS,
    REDELIVERIES,
    RETURN_SECONDS,
    RETURNS,
    Breaking,
    Planned,
    has_return,
    plan,
)
from tools.sim.cluster_operations import OPERATIONS
from tools.sim.cluster_pressure import Pressure, under
from tools.sim.cluster_recorder import Recorder
from tools.sim.coverage import counting
from tools.sim.log_history import small_constants
from tools.sim.native_watch import NativeWatch
from tools.sim.real_clients import RealClients, wire_faults

BROKERS: Final = 3
RELIABLE: Final = 4
NON_RELIABLE: Final = 1
FAULTS_FROM: Final = 12.0
FAULTS_UNTIL: Final = (62.0, 62.0, 92.0, 182.0)  # one of them, see `faults_until`
FAULTS_UNTIL_ONCE: Final = 202.0  # of seeds below ANY_LENGTH_FROM: they are the runs that they were
ANY_LENGTH_FROM: Final = 1_000_000_000
TTL_SECONDS: Final = 16.0
LIVENESS_SECONDS: Final = 200.0  # until everything is served again and no client misses anything
DRAIN_SECONDS: Final = 60.0  # until everything that is served has been delivered
PATIENCE_SECONDS: Final = 6.0  # a heartbeat, the longest wait for a redelivery, and a consumer that thinks
SETTLED_POLL_SECONDS: Final = 2.0
LOOKS_SECONDS: Final = (3.0, 3.0, 8.0, 0.4, 5.0)  # see `seldom_looks`
STEPS_MAX: Final = 3_000_000
CROWD_USED: Final = 8  # of a hundred topics and more
MANY_BOOT_SECONDS: Final = 240.0
COUNTED_EVERY: Final = 16  # counting every call of a public operation costs a tenth of a run
CHECKED_MIN: Final = 30  # messages that are there at the end of the longest runs, or that retention took
LOOKS: Final = 8  # at what is left when clients have come and gone
# What a broker does now and then by itself, for seconds where its disk is slow; and how the simulated store waits for a
# lease to run out: who began to watch while there was no lease has none of these, until something changes.
OWN_ROUNDS: Final = ("rescue disk", "MemoryMetadataStore._nap")


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
    digest: str  # of everything that was recorded, where that is kept
    schedule: list[Planned] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    history: History | None = None
    hits: Counter[str] = field(default_factory=Counter)  # calls that were aimed at and met
    topics: int = 0  # in addition to the few that clients use
    met: Counter[str] = field(default_factory=Counter)  # public operations that were called, in every COUNTED_EVERY-th

    @property
    def rules(self) -> set[str]:
        """Which promises were broken."""
        return {violation.rule for violation in self.violations} or {each.partition(":")[0] for each in self.problems}


def planned(seed: int) -> list[Planned]:
    """What goes wrong in the run of this seed, and when."""
    return plan(seed, nodes=BROKERS, first=FAULTS_FROM, end=faults_until(seed))


def faults_until(seed: int) -> float:
    """When everything heals. Many short runs meet more different clusters than few long ones for the same time of a
    core; some stay long, for what takes minutes to come about, and no return of a broker is cut short.
    """
    if seed < ANY_LENGTH_FROM:
        return FAULTS_UNTIL_ONCE
    drawn = Random(seed ^ 0x1E46).choice(FAULTS_UNTIL)
    return max(drawn, FAULTS_FROM + RETURN_SECONDS) if has_return(seed) else drawn


def settings() -> str:
    """What all runs have in common, apart from the program: other settings, other runs. What a seed has of its own is
    in `Pressure.of`.
    """
    constants = {**vars(cluster_clients), **vars(real_clients), **globals()}
    limits = ("STEPS_MAX", "CHECKED_MIN", "COUNTED_EVERY", "LOOKS", "OPERATIONS", "OWN_ROUNDS")
    lengths = ("FAULTS_UNTIL_ONCE", "ANY_LENGTH_FROM", "RETURN_SECONDS")  # they show in the schedule of a seed
    constants["FAULTS_UNTIL"] = FAULTS_UNTIL_ONCE
    return repr(sorted(pair for pair in constants.items() if pair[0].isupper() and pair[0] not in limits + lengths))


def run_seed(
    seed: int,
    *,
    tweak: Callable[[Cluster], None] | None = None,
    leave_out: Sequence[int] = (),
    keep_history: bool = False,
    count_operations: bool = False,
) -> Outcome:
    """Runs the history of this seed. What goes wrong is a problem of the outcome.

    `tweak` may change the cluster before it starts. `leave_out`: these faults of the schedule do not happen.
    """
    met: Counter[str] = Counter()
    counted = count_operations or seed % COUNTED_EVERY == 0
    with little_garbage(), counting(met, *OPERATIONS) if counted else contextlib.nullcontext():
        outcome = _outcome_of(seed, tweak, leave_out, keep_history=keep_history)
    outcome.met = met
    return outcome


def _outcome_of(
    seed: int, tweak: Callable[[Cluster], None] | None, leave_out: Sequence[int], *, keep_history: bool
) -> Outcome:
    loop = SimLoop(Random(seed), steps_max=STEPS_MAX)  # type: ignore[abstract]
    run = _Run(seed, tweak, leave_out)
    loop.after_step = run.measure
    try:
        with small_constants(), seldom_looks(), under(run.pressure):
            loop.run_until_complete(run.main())
        run.problems += [_told(each) for each in loop.problems[:3]]
    except (Deadlock, Livelock) as error:
        run.problems.append(f"{type(error).__name__}: {str(error)[:4000]}")
    except Exception as error:  # whatever it is, it belongs to this seed
        run.problems.append("".join(traceback.format_exception(error)[-4:]).strip())
        run.judge()  # as far as it went
    finally:
        loop.close()
    return run.outcome(loop, keep_history=keep_history)


def left_in(node: Node) -> Counter[str]:
    """What a broker has: tasks that are not done, files that it keeps open, and what waits in its topics."""
    found: Counter[str] = Counter()
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop) and node.broker is not None
    for task in loop._tasks:
        if task.process is node.process and not task.done() and task.get_name() not in OWN_ROUNDS:
            found["task " + re.sub(r"[0-9]+", "#", task.get_name())] += 1
    found["open files"] = len(node.open_files)
    for topic in node.broker.topics.loaded:
        found["producers"] += len(topic.producers._producers)
        for subscription in topic.subscriptions.values():
            found["subscriptions"] += 1
            found["consumers"] += len(subscription.consumers)
            found["connected consumers"] += subscription.connected
        if topic.reliable:
            found["waiters"] += len(topic.log._news)
            found["sessions"] += len(topic.log.sessions)
    return found


@contextlib.contextmanager
def seldom_looks() -> Iterator[None]:
    """Where a broker looks every second whether it missed something, it looks every few seconds here, and so does a
    client whose topic no broker serves.

    Most of those looks find nothing: without them a run is cheaper, and what does go wrong has more time to. And
    what is stored is compressed by what takes the least time for a few bytes.
    """
    places: list[tuple[Any, str, Any]] = [
        (assignment_reconciler, "RECONCILE_SECONDS", LOOKS_SECONDS[0]),
        (uploader, "UPLOAD_POLL_SECONDS", LOOKS_SECONDS[1]),
        (rescue, "RESCUE_POLL_SECONDS", LOOKS_SECONDS[2]),
        (brokers, "BACKOFF_FIRST_SECONDS", LOOKS_SECONDS[3]),
        (brokers, "BACKOFF_MAX_SECONDS", LOOKS_SECONDS[4]),
        (parquet_write, "CODEC", "lz4"),
    ]
    saved = [getattr(module, name) for module, name, _ in places]
    for module, name, value in places:
        setattr(module, name, value)
    try:
        yield
    finally:
        for (module, name, _), value in zip(places, saved, strict=True):
            setattr(module, name, value)


@contextlib.contextmanager
def little_garbage() -> Iterator[None]:
    """Nearly everything that a run makes lives to its end: looking for garbage every 700 objects finds none.

    It is to end after the run is dropped: who looks then has a tenth of the objects to look at.
    """
    saved = gc.get_threshold()
    gc.set_threshold(max(300_000, saved[0]), *saved[1:])
    try:
        yield
    finally:
        gc.set_threshold(*saved)


def _told(problem: dict[str, object]) -> str:
    return f"error that nobody took: {problem.get('message')}: {problem.get('exception')!r}"


class _Run:
    def __init__(self, seed: int, tweak: Callable[[Cluster], None] | None, leave_out: Sequence[int]) -> None:
        self.seed = seed
        self.rng = Random(seed ^ 0x5EED)
        self.history = History()
        self.pressure = Pressure.of(seed)
        self.until = faults_until(seed)
        self.hits: Counter[str] = Counter()
        self._work, self._work_max = ranges.work.ranges, 0
        self._stops: set[tuple[int, int]] = set()  # of which node, and of which of its processes
        self.problems: list[str] = []
        self.violations: list[Violation] = []
        self.said: list[str] = []
        self.schedule = [each for each in planned(seed) if each.number not in leave_out]
        self.checked = 0
        self._tweak = tweak
        self.cluster: Cluster

    def outcome(self, loop: SimLoop, *, keep_history: bool) -> Outcome:
        return Outcome(
            self.seed,
            self.problems,
            self.violations,
            Counter(each.kind for each in self.schedule),
            len(self.history.all(Acked)),
            len(self.history.all(Got)),
            self.checked,
            loop.time(),
            loop.steps,
            self._digest() if keep_history or self.problems else "",
            self.schedule,
            self.said,
            self.history if keep_history or self.problems else None,
            self.hits,
            self.pressure.topics,
        )

    def _digest(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for line in [*self.history.lines(), *self.said, *self.problems]:
            digest.update(line.encode() + b"\n")
        return digest.hexdigest()

    def say(self, what: str) -> None:
        self.said.append(f"{self.now():9.3f} {what}")

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def measure(self) -> None:
        """How much one step did."""
        before, self._work = self._work, ranges.work.ranges
        if self._work - before > self._work_max:
            self._work_max = self._work - before

    def judge(self) -> None:
        self.history.add(Worked(self._work_max))
        self.violations = check(self.history)
        self.problems += [str(violation) for violation in self.violations]

    # --- the story --------------------------------------------------------------------------------------------

    async def main(self) -> None:
        pressure = self.pressure
        cluster = self.cluster = Cluster(
            self.seed,
            ttl_seconds=TTL_SECONDS,
            tier=pressure.tier,
            wal=pressure.wal,
            unacked_max=pressure.unacked_max,
            worker_processes=pressure.worker_processes,
            disk_seconds=pressure.disk_seconds,
            store_seconds=pressure.store_seconds,
            heartbeat=Heartbeat(1000),
            faulty_disks=True,
            step_seconds=0.1,
        )
        if any(each.kind in RETURNS for each in self.schedule):
            rejoin = Random(self.seed ^ 0x4E01).choice(("drained", "active"))
            cluster.config = replace(cluster.config, cluster=replace(cluster.config.cluster, rejoin=rejoin))
        recorder = Recorder(cluster, self.history, reliable_below=RELIABLE)
        watch = NativeWatch(cluster, self.history, recorder)
        cluster.wires.faults = wire_faults(self.seed)
        if self._tweak is not None:
            self._tweak(cluster)
        await cluster.start(BROKERS)
        reliable = [TopicName(f"/default/topic-{number}") for number in range(RELIABLE)]
        others = [TopicName(f"/default/topic-{RELIABLE + number}") for number in range(NON_RELIABLE)]
        breaking = Breaking(cluster, self.history, [*reliable, *others], self.say)
        if pressure.topics:
            breaking.boot_seconds_max = MANY_BOOT_SECONDS
        self.hits = breaking.aims.hits
        self.history.add(Lease(TTL_SECONDS, self.now()))
        clients = Clients(
            cluster, self.history, self.rng, given=recorder.given, hurry=pressure.hurry, subscribed=watch.subscribed
        )
        breaking.clients = clients
        real = RealClients(clients, watch, self.rng)
        await self._prepare(breaking, clients, real, reliable, others)
        crowd = await self._crowd(clients)
        watching = [
            asyncio.create_task(recorder.look_on([*reliable, *others]), name="look on"),
            asyncio.create_task(self._supervise(breaking), name="supervise"),
        ]
        await breaking.run(self.schedule)
        await asyncio.sleep(max(0.0, self.until - self.now()))
        clients.quiet = True  # who has begun to think for long is done when everything has healed
        await self._heal(breaking, [*reliable, *others])
        clients.publishing = False
        await self._settle([*reliable, *others], [*reliable, DEAD_LETTERS], crowd)
        recorder.departed(reliable)
        await clients.stop()
        await self._look_for_growth([*reliable, *others], real)
        for task in watching:
            task.cancel()
        for result in await asyncio.gather(*watching, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        await self._end(recorder, [*reliable, *crowd[:CROWD_USED]])

    async def _crowd(self, clients: Clients) -> list[TopicName]:
        """So many more topics that to claim them all takes longer than a lease. A few of them are used."""
        topics = [TopicName(f"/default/crowd-{number:03}x") for number in range(self.pressure.topics)]
        for topic in topics:
            puts = [Put(key(topic), b"null") for key in (keys.topic, keys.namespace_topic, keys.unassigned)]
            await self.cluster.metadata.transact([], [*puts, Put(keys.delivery(topic), b'"Reliable"')])
        if topics:
            await self._until(lambda: self._homeless(topics), LIVENESS_SECONDS)
        for topic in topics[:CROWD_USED]:
            clients.start(clients.produce(topic, until=self.until))
        return topics

    def _homeless(self, topics: Sequence[TopicName]) -> str:
        for topic in topics:
            node = self.cluster.any_host(topic)
            found = node.topic(topic) if node is not None else None
            if found is None:
                return f"nobody serves {topic}"
            if found.reliable and found.orphans:
                return f"{topic} has orphans {found.orphans}"
        return ""

    async def _prepare(
        self,
        breaking: Breaking,
        clients: Clients,
        real: RealClients,
        reliable: Sequence[TopicName],
        others: Sequence[TopicName],
    ) -> None:
        for topic in reliable:
            await breaking.make(topic)
        for topic in others:
            await breaking.make(topic, reliable=False)
        for topic in [*reliable, *others]:
            await self.cluster.until(lambda topic=topic: self.cluster.any_host(topic) is not None)  # type: ignore[misc]
        for topic in reliable:
            host = self.cluster.any_host(topic)
            assert host is not None
            await breaking.set_policy(host, topic, REDELIVERIES)
            found = host.topic(topic)
            if topic == reliable[2] and self.pressure.keeps_mb and found is not None and found.reliable:
                await breaking.retain(host, found, RetentionChange(mb=self.pressure.keeps_mb))
        if self.rng.random() < 0.25:
            # No other broker may take this one while its owner is away.
            await self.cluster.metadata.transact([], [Put(keys.on_crash(reliable[-1]), b'"wait"')])
        for topic in [*reliable, *others]:
            for number in range(2):
                kind = self.rng.choice(list(SubscriptionKind))
                name = SubscriptionName(f"sub-{number}")
                for consumer in range(1 if kind is SubscriptionKind.EXCLUSIVE else self.rng.choice((1, 2))):
                    if real.wants():
                        real.consume(topic, name, kind, f"c{consumer}")
                    else:
                        clients.start(clients.consume(topic, name, kind, f"c{consumer}"))
        for topic in reliable:
            # Some fall silent while things still go wrong: then nothing but a heartbeat finds what was missed.
            for once in (True, False):
                until = self.rng.choice((0.5, 0.8, 1.0, 1.0)) * self.until
                if real.wants():
                    real.produce(topic, until=until, once=once)
                else:
                    clients.start((clients.produce if once else clients.produce_plainly)(topic, until=until))
            if real.wants():
                real.fetch(topic)
            else:
                clients.start(clients.fetch(topic))
        for topic in (reliable[0], others[0]):
            if real.wants():
                real.visit(topic)
            else:
                clients.start(clients.visit(topic))
        for topic in others:
            if real.wants():
                real.shout(topic, until=self.until)
            else:
                clients.start(clients.shout(topic, until=self.until))
        real.start()

    async def _supervise(self, breaking: Breaking) -> None:
        """Starts brokers again that ended by themselves."""
        while True:
            await asyncio.sleep(SETTLED_POLL_SECONDS)
            for node in self.cluster.nodes:
                ended = node.broker.cluster.ended if node.broker is not None and node.broker.cluster else None
                if node.alive and ended is not None and ended.done():
                    error = ended.exception()
                    self.say(f"node {node.number} ended: {error!r}")
                    self._note_stop(node, error)
                    await breaking.guarded(breaking.replace(node))

    def _note_stop(self, node: Node, error: BaseException | None) -> None:
        if (node.number, node.boots) not in self._stops:
            self._stops.add((node.number, node.boots))
            ended_at = node.ended_at if node.ended_at >= 0 else self.now()
            ago = ended_at - node.failed_at if node.failed_at >= 0 else -1.0
            self.history.add(Stopped(node.number, f"{type(error).__name__}: {error}", ago, self.now()))

    async def _heal(self, breaking: Breaking, topics: Sequence[TopicName]) -> None:
        """Nothing fails from now on, and every broker is there."""
        self.say("healing")
        await breaking.end()
        self.cluster.wires.faults = QUIET
        if self.pressure.topics:
            self.cluster.store_seconds = 0.0
        for node in self.cluster.nodes:
            node.heal()
        for node in self.cluster.nodes:
            while not node.alive or node.broker is None or node.stopping is node.process:
                if node.alive:
                    node.kill()  # it was just starting, or stopping, by a task that is gone
                try:
                    await node.boot()
                except (DanubeError, ProcessDied) as error:
                    self.problems.append(f"boot: node {node.number} does not start on a machine that is well: {error}")
                    return
        await asyncio.sleep(10)
        for node in self.cluster.nodes:
            await breaking.activate(node)
        for topic in topics:
            await breaking.make(topic, reliable=topic in topics[:RELIABLE])
        for topic in sorted(breaking.damaged):
            await self._give_up(breaking, topic)

    async def _give_up(self, breaking: Breaking, topic: TopicName) -> None:
        """An operator has seen that bytes are lost, and moves the topic: what is lost is recorded then."""
        for _ in range(10):
            if not await self._until(
                lambda: "" if self.cluster.any_host(topic) else f"nobody serves {topic}", DRAIN_SECONDS
            ):
                return
            try:
                await self.cluster.unload(topic)
                return
            except DanubeError as error:
                self.say(f"{topic} is not moved: {error}")
                await asyncio.sleep(3.0)

    async def _settle(
        self, topics: Sequence[TopicName], reliable: Sequence[TopicName], crowd: Sequence[TopicName]
    ) -> None:
        """Liveness: with all brokers there and nothing failing, everything is served, resolved and delivered."""

        def waiting() -> str:
            return self._unserved(topics) or self._without_dead_letters() or self._homeless(crowd)

        if await self._until(waiting, LIVENESS_SECONDS):
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
            node = self.cluster.any_host(topic)
            found = node.topic(topic) if node is not None else None
            if found is None:
                return f"nobody serves {topic}"
            if found.reliable and found.orphans:
                return f"{topic} has orphans {found.orphans}"
            for number in range(2):
                subscription = found.subscriptions.get(SubscriptionName(f"sub-{number}"))
                if subscription is None or not subscription.connected:
                    return f"nobody is connected to sub-{number} of {topic}"
        return ""

    def _without_dead_letters(self) -> str:
        """Why what was given up cannot be read to its end yet; its topic is made with the first of them."""
        node = self.cluster.any_host(DEAD_LETTERS)
        found = node.topic(DEAD_LETTERS) if node is not None else None
        if found is not None and found.reliable:
            return f"{DEAD_LETTERS} has orphans {found.orphans}" if found.orphans else ""
        is_made = any(claimed.topic == DEAD_LETTERS for claimed in self.history.all(Claimed))
        return f"nobody serves {DEAD_LETTERS}" if is_made else ""

    def _undelivered(self, topics: Sequence[TopicName]) -> str:
        for topic in topics:
            node = self.cluster.any_host(topic)
            found = node.topic(topic) if node is not None else None
            if found is not None and found.reliable:
                for subscription in found.subscriptions.values():
                    if subscription.name.startswith("sub-") and subscription.has_lag():
                        return f"{topic} {subscription.name}: {subscription.explain()}"
        return ""

    async def _look_for_growth(self, topics: Sequence[TopicName], real: RealClients) -> None:
        """Clients come, wait, give up and leave: afterwards brokers have what they had before."""
        nodes = [node for node in self.cluster.living if node.broker is not None]
        before = [[left_in(node) for node in nodes]]
        for _ in range(3):
            await asyncio.sleep(0.7)
            before.append([left_in(node) for node in nodes])
        visitors = Clients(self.cluster, History(), self.rng)
        for _ in range(3):
            for topic in topics:
                node = self.cluster.any_host(topic)
                found = node.topic(topic) if node is not None else None
                if node is not None and found is not None:
                    with contextlib.suppress(DanubeError, ProcessDied):
                        await node.call(visitors.pass_by(node, found))
                    if VISITOR in found.subscriptions:  # it gave up in the middle
                        with contextlib.suppress(DanubeError, ProcessDied):
                            await node.call(found.unsubscribe(VISITOR))
        with contextlib.suppress(DanubeError):
            async with self.cluster.client() as client:
                for topic in (topics[0], topics[-1]):
                    await real.visit_once(client, topic)
        afterwards: list[list[Counter[str]]] = []
        grown: list[Grew] = []
        for look in range(40):
            await asyncio.sleep(0.7 if look < LOOKS else 3.0)
            afterwards.append([left_in(node) for node in nodes])
            grown = [
                Grew(node.number, what, most, least, self.now())
                for place, node in enumerate(nodes)
                for what in sorted({what for each in afterwards for what in each[place]})
                if (least := min(each[place][what] for each in afterwards))
                > (most := max(each[place][what] for each in before))
            ]
            if look + 1 >= LOOKS and not grown:
                break  # else it may be a step that takes long: dozens of files removed, 0.1 s each
        for each in grown:
            self.history.add(each)

    async def _end(self, recorder: Recorder, topics: Sequence[TopicName]) -> None:
        await recorder.read(topics, DEAD_LETTERS)
        self.judge()
        self.checked = sum(len(kept.messages) for kept in self.history.all(Kept))
        if (
            self.checked + sum(kept.first for kept in self.history.all(Kept))
            < CHECKED_MIN * self.until / FAULTS_UNTIL_ONCE
        ):
            self.problems.append(f"nothing checked: {self.checked} messages are too few")
