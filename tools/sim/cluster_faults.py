"""Everything that goes wrong in a simulated cluster, one function per kind.

    schedule = plan(seed)                  what happens when to which node, all drawn before anything runs
    await Breaking(...).run(schedule)

Each fault has rng of its own, so leaving one out of the schedule changes nothing in what the others draw: a failing
run is made smaller by leaving out faults (cluster_sim.py). A fault lasts as long as its function; several may last at
once. Whatever is still wrong at the end is put right by `Node.heal`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

from pydanube.broker import hand_over
from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.cluster import leader as leading
from pydanube.core.dispatch.delivery import BackoffStrategy, FailurePolicy, PoisonPolicy
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.history.ownership import Owner
from pydanube.core.names import BrokerId, NamespaceName, SubscriptionName, TopicName
from pydanube.core.policies import Delivery
from pydanube.errors import DanubeError, TopicExists, TopicUnknown
from pydanube.formats.segment import SegmentHeader, decode_segment_header, segment_header_length
from pydanube.history.retention import RetentionChange, RetentionDesk
from pydanube.ports import Item
from pydanube.testing.cluster import Cluster, Node
from pydanube.testing.cluster_aims import Aim, Aims, draw, outside
from pydanube.testing.disk_faults import Faults
from pydanube.testing.faulty_disk import FaultyDisk
from pydanube.testing.history import Damaged, Fault, History, life
from pydanube.testing.loop import Process, ProcessDied
from tools.sim.cluster_clients import Clients, number_of

FAULT_SECONDS: Final = 8.5  # on average between two faults
LATE_SHARE: Final = 0.4  # of the seeds have one of _LATE, too
RETURN_SHARE: Final = 0.25  # of the seeds have one of RETURNS, too
RETURN_SECONDS: Final = 110.0  # what the longest of them takes
LATE_AFTER_SECONDS: Final = 25.0  # there is something to move by then, and it is seen what came of it
BOOT_SECONDS_MAX: Final = 60.0
DEAD_LETTERS: Final = TopicName("/default/dead")
REDELIVERIES: Final = 2
RUSH: Final = 24  # messages that clients send together, where a fault has them


class Planned(NamedTuple):
    """One fault of a schedule."""

    number: int
    at: float
    kind: str
    node: int
    seed: int

    def __str__(self) -> str:
        return f"{self.number:3} {self.at:9.3f} s  {self.kind} on node {self.node}"


def plan(seed: int, *, nodes: int, first: float, end: float) -> list[Planned]:
    """What happens between `first` and `end`."""
    rng = Random(seed ^ 0xFA17)
    schedule: list[Planned] = []
    at = first
    while True:
        at += rng.uniform(0.5, 2 * FAULT_SECONDS)
        if at >= end:
            break
        kind = rng.choice(_DRAWN)
        schedule.append(Planned(len(schedule), at, kind, rng.randint(1, nodes), rng.getrandbits(62)))
    # With rng of their own: seeds without them are the runs that they were.
    rng = Random(seed ^ 0xA1B5)
    if rng.random() < LATE_SHARE:
        kind, at = rng.choice(_LATE), rng.uniform(first + LATE_AFTER_SECONDS, end - LATE_AFTER_SECONDS)
        schedule.append(Planned(0, at, kind, rng.randint(1, nodes), rng.getrandbits(62)))
        schedule.sort(key=lambda each: each.at)
    rng = _return_dice(seed)
    if rng.random() < RETURN_SHARE:
        kind, at = rng.choice(RETURNS), rng.uniform(first, max(first, end - RETURN_SECONDS))
        schedule.append(Planned(0, at, kind, rng.randint(1, nodes), rng.getrandbits(62)))
        schedule.sort(key=lambda each: each.at)
    return [each._replace(number=number) for number, each in enumerate(schedule)]


def has_return(seed: int) -> bool:
    """Whether a broker of this seed goes away for longer than its lease and comes back."""
    return _return_dice(seed).random() < RETURN_SHARE


def _return_dice(seed: int) -> Random:
    return Random(seed ^ 0xBAC4)


class Breaking:
    """Breaks one cluster. `topics` are those that operators move and change; the first may be deleted."""

    def __init__(
        self,
        cluster: Cluster,
        history: History,
        topics: Sequence[TopicName],
        say: Callable[[str], None],
    ) -> None:
        self.cluster = cluster
        self.history = history
        self.topics = topics
        self.say = say
        self.over = False
        self.boot_seconds_max = BOOT_SECONDS_MAX
        self.damaged: set[TopicName] = set()  # topics of which bytes were changed
        self._tasks: list[asyncio.Task[None]] = []
        self._deleted = False
        self.clients: Clients | None = None  # whom a fault may have send
        self.aims = cluster.aims = Aims(self._strike, say)

    async def run(self, schedule: Sequence[Planned]) -> None:
        loop = asyncio.get_running_loop()
        for planned in schedule:
            await asyncio.sleep(max(0.0, planned.at - loop.time()))
            node = self._up(planned.node)
            self.say(f"{planned.kind} node {node.number}")
            self.history.add(Fault(planned.kind, node.number, loop.time()))
            fault = FAULT_KINDS[planned.kind](self, node, Random(planned.seed))
            self._tasks.append(asyncio.create_task(self.guarded(fault), name=f"fault {planned.kind}"))

    def _up(self, number: int) -> Node:
        """The node, or the next one that is up: what is down already cannot be broken any more."""
        nodes = self.cluster.nodes[number - 1 :] + self.cluster.nodes[: number - 1]
        return next((node for node in nodes if node.alive and node.broker is not None), nodes[0])

    async def end(self) -> None:
        """No fault goes on."""
        self.over = True
        self.aims.clear()
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    async def guarded(self, fault: Coroutine[Any, Any, None]) -> None:
        # What an operator asked for may be refused, or go down with its broker.
        with contextlib.suppress(DanubeError, ProcessDied, TimeoutError):
            await fault

    # --- one call -------------------------------------------------------------------------------------------

    async def aimed(self, node: Node, rng: Random) -> None:
        """Of all calls that brokers make to a disk or a store, one is hit, or a few in a row."""
        self._arm(draw(rng, node=node.number, ttl_seconds=self._ttl))

    def _arm(self, aim: Aim) -> None:
        self.say(f"aimed at {aim}")
        self.aims.arm(aim)

    @property
    def _ttl(self) -> float:
        return self.cluster.config.cluster.ttl_seconds

    def _strike(self, node: Node, what: str, seconds: float) -> None:
        """In the middle of a call of its own."""
        if not node.alive or node.process is None or self.over:
            return
        back = self._come_back(node) if what == "kill" else self._go_on(node, node.process)
        node.kill() if what == "kill" else node.pause()
        if what == "pause" and seconds > self._ttl:  # and what it was in the middle of takes its time when it goes on
            for target in ("list topic", "list storage"):
                self._arm(Aim(target, 1, "delay", 4.0, shots=2, node=node.number))
        self._tasks.append(outside(self.guarded(self._after(seconds, back)), f"struck {what}"))

    async def _after(self, seconds: float, then: Coroutine[Any, Any, None]) -> None:
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            then.close()
            raise
        await then

    async def _come_back(self, node: Node) -> None:
        await self.boot(node)

    async def _go_on(self, node: Node, process: Process) -> None:
        if node.process is process:
            node.resume()
            await self.activate(node)

    async def slow_start(self, node: Node, rng: Random) -> None:
        """It is killed and started immediately, and stands still in the middle of its start, until others have its
        topics.

        Or each of its calls takes so long that the start does.
        """
        if not node.alive:
            return
        node.kill()
        await _pause(rng, 0.2, 3.0)
        target = rng.choice(("list assignment", "list storage", "list topic", "transact owner", "transact state"))
        seconds = self._ttl * rng.choice((0.2, 1.2, 1.5, 2.0))
        what = rng.choice(("pause", "pause_behind", "pause_behind", "delay_behind"))
        self._arm(Aim(target, rng.randint(1, 3), what, seconds, node=node.number))
        await self.boot(node)

    async def slow_takeover(self, node: Node, rng: Random) -> None:
        """It is killed, or its lease forgotten, and the next owner is slow, or stands still, in a claim."""
        target = rng.choice(("transact owner", "transact owner", "list storage", "list topic"))
        what = rng.choice(("delay", "delay", "delay_behind", "pause", "pause_behind", "pause_behind"))
        is_long = what.startswith("pause")
        seconds = self._ttl * rng.uniform(1.0, 2.0) if is_long else rng.uniform(0.3, 6.0)
        self._arm(Aim(target, rng.randint(1, 3), what, seconds, shots=1 if is_long else 4))
        if rng.random() < 0.5:
            await self.kill(node, rng)
        else:
            await self.lease_expiry(node, rng)

    async def late_move(self, node: Node, rng: Random) -> None:
        """A topic moves, and what it writes of its history comes late, when another owner may be about to write."""
        if node.broker is None or not node.alive:
            return
        shots, seconds = rng.randint(1, 3), rng.uniform(1.5, 7.0)
        self._arm(Aim("transact history", rng.randint(1, 2), "late", seconds, shots=shots))
        self._arm(Aim("object put", rng.randint(1, 4), "delay", rng.uniform(1.0, 5.0), shots=3))
        await self.cluster.unload(rng.choice(self.topics[:4]), asked=node)

    async def late_claim(self, node: Node, rng: Random) -> None:
        """The lease of an owner is forgotten and it does not hear of that: it takes messages, and reserves offsets for
        them, while the next owner has looked at its topics and not yet claimed.
        """
        topic = rng.choice(self.topics[:4])
        host = self.cluster.any_host(topic)
        if host is None or host.broker is None:
            return
        for target, shots in (("renew", 6), ("get registration", 2)):
            self._arm(Aim(target, 1, "fail", shots=shots, node=host.number))
        # Not so long that the leader gives the topic to another broker, which refuses the claim anyway.
        leading.CLAIM_SECONDS = 3.0  # type: ignore[misc]
        late = Aim("transact owner", 1, "delay", rng.uniform(1.5, 2.7), shots=6)
        self._arm(late)
        port, port.drop_every = host.metadata, 1
        sending = asyncio.create_task(self._send_on(host, topic, rng), name="send on")
        try:
            await self.lease_expiry(host, rng)
        finally:
            sending.cancel()
        self.aims.disarm(late)
        port.drop_every = 0

    async def _send_on(self, host: Node, topic: TopicName, rng: Random) -> None:
        """Clients have much to say as long as this broker believes that it has the topic."""
        for number in range(RUSH):
            if self.clients is None or not host.serves(topic):
                return
            self.clients.start(self.clients.send(topic, "rush", f"rush-{number_of(topic)}:{number}"))
            await _pause(rng, 0.1, 0.4)

    async def late_seal(self, node: Node, rng: Random) -> None:
        """A topic moves, and its seal arrives when the move is undone and its owner has taken more messages."""
        topic = rng.choice(self.topics[:4])
        host = self.cluster.any_host(topic)
        if host is None:
            return
        hand_over.SEAL_SECONDS = seconds = rng.choice((0.5, 2.0))  # type: ignore[misc]
        late = Aim("transact seal", 1, "late", seconds + rng.uniform(3.0, 9.0), shots=4, node=host.number)
        self._arm(late)
        with contextlib.suppress(DanubeError, ProcessDied):
            await self.cluster.unload(topic, asked=host)
        self.aims.disarm(late)

    async def late_change(self, node: Node, rng: Random) -> None:
        """A topic moves, and the move is given up because what it writes of its history is not answered. That arrives
        when the topic moves again, between what the owner reads then and what it writes.
        """
        topic = rng.choice(self.topics[:4])
        host = self.cluster.any_host(topic)
        if host is None:
            return
        patience, pause = rng.uniform(1.0, 2.0), rng.uniform(1.0, 6.0)
        usual_seconds, hand_over.UPLOAD_SECONDS = hand_over.UPLOAD_SECONDS, patience  # type: ignore[misc]
        hand_over.REST_BYTES = 0  # type: ignore[misc]
        late = Aim("transact history", 1, "late", patience + pause + rng.uniform(2.0, 4.0), shots=3, node=host.number)
        self._arm(late)
        with contextlib.suppress(DanubeError, ProcessDied):
            await self.cluster.unload(topic, asked=host)
        self.aims.disarm(late)
        hand_over.UPLOAD_SECONDS = usual_seconds  # type: ignore[misc]
        await asyncio.sleep(pause)
        self._arm(Aim("object put", 1, "delay", 6.0, node=host.number))
        if host.broker is not None and host.broker.cluster is not None:  # else it was killed in the meantime
            await self.cluster.unload(topic, asked=host)

    async def all_slow(self, node: Node, rng: Random) -> None:
        """Every disk and the way to the metadata store, for all brokers: what is quick elsewhere overlaps now."""
        nodes = list(self.cluster.living)
        for each in nodes:
            _faults(each).delays, _faults(each).delay_seconds_max = 1.0, 0.5
            each.metadata.delay_max_seconds = 0.8
        await _pause(rng, 15.0, 40.0)
        for each in nodes:
            _faults(each).delays = each.metadata.delay_max_seconds = 0.0

    # --- processes ------------------------------------------------------------------------------------------

    async def kill(self, node: Node, rng: Random) -> None:
        if node.alive:
            node.kill()
            await _pause(rng, 0.5, rng.choice((4.0, 40.0)))
            await self.boot(node)

    async def power_cut(self, node: Node, rng: Random) -> None:
        if node.alive:
            node.power_cut()
            await _pause(rng, 0.5, rng.choice((4.0, 40.0)))
            await self.boot(node)

    async def restart(self, node: Node, rng: Random) -> None:
        if node.broker is not None and node.alive and node.stopping is not node.process:  # one SIGTERM is enough
            await self.stop(node)
            await _pause(rng, 0.1, 6.0)
            await self.boot(node)

    async def replace(self, node: Node) -> None:
        """It ended by itself, and its supervisor starts another."""
        if node.stopping is node.process:
            return  # the task that stops it starts it
        await self.stop(node)
        await self.boot(node)

    async def stop(self, node: Node) -> None:
        """SIGTERM, and then SIGKILL for one that takes too long."""
        process = node.process
        try:
            async with asyncio.timeout(40):
                await node.stop()
        except (TimeoutError, DanubeError, ProcessDied):
            if node.alive and node.process is process:
                node.kill()

    async def pause(self, node: Node, rng: Random) -> None:
        if node.alive:
            process = node.process
            node.pause()
            await _pause(rng, 0.5, rng.choice((3.0, 30.0)))
            if node.process is process:
                node.resume()
                await self.activate(node)

    async def clock_jump(self, node: Node, rng: Random) -> None:
        node.clock.jump(rng.choice((-1, 1)) * rng.choice((1.0, 100.0, 100_000.0)))

    async def boot(self, node: Node, *, activates: bool = True) -> None:
        """As a supervisor does: a broker that does not come up, or ends by itself, is started again."""
        while not node.alive and not self.over:
            ours = node.boots + 1
            try:
                async with asyncio.timeout(self.boot_seconds_max):
                    await node.boot()
            except (TimeoutError, ProcessDied, DanubeError) as error:
                self.say(f"node {node.number} did not come up: {error}")
                if node.boots == ours:  # else another task has started it again since
                    node.kill_if_alive()
                await asyncio.sleep(2.0)
            else:
                if activates:
                    await self.activate(node)
                return

    async def activate(self, node: Node) -> None:
        """An operator looks at it and lets it work again."""
        await asyncio.sleep(3.0)
        if node.alive and node.broker is not None and node.broker.cluster is not None:
            await node.call(node.broker.cluster.requests.activate(node.broker.broker_id))

    # --- away for longer than a lease, without an operator ----------------------------------------------------

    async def rolling_reboot(self, node: Node, rng: Random) -> None:
        """One after the other, as on a patch day. A broker that is back is drained while others serve."""
        for each in self.cluster.nodes:
            if each.broker is not None and each.alive and each.stopping is not each.process:
                await self.stop(each)
                await _pause(rng, self._ttl + 1.0, self._ttl + 8.0)
                await self.boot(each, activates=False)
                await _pause(rng, 1.0, 4.0)

    async def last_active(self, node: Node, rng: Random) -> None:
        """All but one were away, and then that one dies."""
        others = [each for each in self.cluster.nodes if each is not node]
        for each in others:
            each.kill_if_alive()
        await _pause(rng, self._ttl + 4.0, self._ttl + 12.0)
        for each in others:
            await self.boot(each, activates=False)
        await _pause(rng, 2.0, 8.0)
        node.kill_if_alive()
        await _pause(rng, self._ttl + 4.0, 2 * self._ttl)
        await self.boot(node, activates=False)

    async def cut_off(self, node: Node, rng: Random) -> None:
        """Without any network for longer than a lease: neither stores nor clients reach it, nor it them."""
        process = node.process
        node.partition()
        node.wire.requests_lost = node.wire.answers_lost = True
        await _pause(rng, self._ttl + 1.0, 3 * self._ttl)
        node.wire.requests_lost = node.wire.answers_lost = False
        if node.process is process:  # another one has other ways to the stores
            node.partition(cut=False)

    # --- network --------------------------------------------------------------------------------------------

    async def metadata_cut(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.metadata, "cut", seconds=(5.0, 40.0, 60.0))

    async def metadata_mute(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.metadata, "mute")

    async def metadata_deaf(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.metadata, "deaf")

    async def clients_cut(self, node: Node, rng: Random) -> None:
        node.wire.requests_lost = node.wire.answers_lost = True
        await _pause(rng, 0.5, 20.0)
        node.wire.requests_lost = node.wire.answers_lost = False

    async def requests_lost(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.wire, "requests_lost")

    async def answers_lost(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.wire, "answers_lost")

    async def slow_network(self, node: Node, rng: Random) -> None:
        node.wire.delay_max_seconds, node.wire.duplicates = 1.0, 0.3
        await _pause(rng, 5.0, 40.0)
        node.wire.delay_max_seconds, node.wire.duplicates = 0.0, 0.0

    # --- metadata store -------------------------------------------------------------------------------------

    async def metadata_answers_lost(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.metadata, "answers_lost", 0.3)

    async def metadata_late(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.metadata, "late", 0.3)

    async def metadata_slow(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.metadata, "delay_max_seconds", rng.choice((0.2, 1.0)))

    async def watch_gaps(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.metadata, "drop_every", rng.choice((1, 2, 5)))

    async def metadata_election(self, node: Node, rng: Random) -> None:
        """The store has no leader for a while: no call gets through."""
        ports = [each.metadata for each in self.cluster.living]
        for port in ports:
            port.cut = True
        await _pause(rng, 0.5, 6.0)
        for port in ports:
            port.cut = False

    async def lease_expiry(self, node: Node, rng: Random) -> None:
        """The store forgets the lease long before its time, while the broker believes in it: no clock protects us."""
        if node.alive and node.broker is not None and node.broker.cluster is not None:
            lease = node.broker.cluster.membership.lease
            node.forgotten = (lease.id, node.clock.elapsed() + lease.ttl_seconds)
            await self.cluster.metadata.revoke(lease.id)
            await _pause(rng, 5.0, 10.0)
            await self.activate(node)

    # --- object store ---------------------------------------------------------------------------------------

    async def objects_away(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.objects, "away")

    async def objects_gone(self, node: Node, rng: Random) -> None:
        """For all brokers."""
        ports = [each.objects for each in self.cluster.living]
        for port in ports:
            port.away = True
        await _pause(rng, 1.0, 40.0)
        for port in ports:
            port.away = False

    async def objects_failing(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.objects, "errors", 0.3)

    async def objects_answers_lost(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.objects, "answers_lost", 0.5)

    async def objects_late(self, node: Node, rng: Random) -> None:
        await self._for_a_while(node, rng, node.objects, "late", 0.5)

    async def objects_slow(self, node: Node, rng: Random) -> None:
        node.objects.delay_max_seconds, node.objects.listing_seconds = rng.choice((0.5, 4.0)), 2.0
        await _pause(rng, 5.0, 40.0)
        node.objects.delay_max_seconds = node.objects.listing_seconds = 0.0

    async def worker_dies(self, node: Node, rng: Random) -> None:
        """The worker process that makes and stores objects ends half-way, again and again."""
        if node.alive:
            work = node.work
            work.dies = 0.6
            await _pause(rng, 5.0, 60.0)
            work.dies = 0.0

    async def _for_a_while(
        self,
        node: Node,
        rng: Random,
        what: Any,
        field: str,
        value: Any = True,
        *,
        seconds: Sequence[float] = (5.0, 40.0),
    ) -> None:
        if node.alive:
            setattr(what, field, value)
            await _pause(rng, 0.5, rng.choice(seconds))
            setattr(what, field, type(value)())
            if what is node.metadata:
                await self.activate(node)

    # --- disks ----------------------------------------------------------------------------------------------

    async def disk_slow(self, node: Node, rng: Random) -> None:
        faults = _faults(node)
        faults.delays, faults.delay_seconds_max = 0.3, rng.choice((0.2, 3.0))
        await _pause(rng, 5.0, 40.0)
        faults.delays = 0.0

    async def sync_fails(self, node: Node, rng: Random) -> None:
        faults = _faults(node)
        faults.sync_fails = faults.directory_sync_fails = rng.choice((0.1, 0.6))
        faults.write_fails = rng.choice((0.0, 0.1))
        await _pause(rng, 1.0, 30.0)
        faults.sync_fails = faults.directory_sync_fails = faults.write_fails = 0.0

    async def disk_full(self, node: Node, rng: Random) -> None:
        assert isinstance(node.disk, FaultyDisk)
        node.disk.capacity_bytes = node.disk.used_bytes + rng.choice((0, 300, 3000))
        await _pause(rng, 1.0, 40.0)
        node.disk.capacity_bytes = None

    async def bit_flip(self, node: Node, rng: Random) -> None:
        """While the broker is down, a bit of its log goes bad.

        Not in the newest segment of an epoch: the end of a log that was cut off and one that went bad look alike.
        """
        assert isinstance(node.disk, FaultyDisk)
        if not node.alive:
            return
        node.kill()
        segments = [
            path for path in node.disk.paths() if path.startswith("wal/default/topic-") and path.endswith(".wal")
        ]
        headers = {path: _segment_header(node.disk.durable(path)) for path in segments}
        followed = {header.previous_id for header in headers.values() if header is not None}
        segments = [path for path, header in headers.items() if header is not None and header.segment_id in followed]
        for path in rng.sample(segments, min(len(segments), 1)):
            durable = node.disk.durable(path)
            if durable:
                node.disk.flip(path, rng.randrange(len(durable)), rng.randrange(8))
                self.say(f"flipped a bit of {path} of node {node.number}")
                topic = TopicName("/" + "/".join(path.split("/")[1:3]))
                self.damaged.add(topic)
                created = Owner.from_bytes(item.value).created if (item := await self._owner(topic)) else 1
                self.history.add(Damaged(life(topic, created), asyncio.get_running_loop().time()))
        await _pause(rng, 0.5, 5.0)
        await self.boot(node)

    async def _owner(self, topic: TopicName) -> Item | None:
        return await self.cluster.metadata.get(keys.owner(topic))

    # --- inside a broker ----------------------------------------------------------------------------------------

    async def notifier_dies(self, node: Node, rng: Random) -> None:
        """The task that tells a subscription of commits is gone: only its heartbeat finds them now."""
        found = [node.topic(topic) for topic in self.topics]
        subscriptions = [
            subscription
            for topic in found
            if topic is not None and topic.reliable
            for subscription in topic.subscriptions.values()
            if subscription._notifier is not None
        ]
        for subscription in rng.sample(subscriptions, min(2, len(subscriptions))):
            assert subscription._notifier is not None
            subscription._notifier.cancel()

    # --- operators ------------------------------------------------------------------------------------------

    async def unload(self, node: Node, rng: Random) -> None:
        if node.broker is not None and node.alive:
            await self.cluster.unload(rng.choice(self.topics), asked=node)

    async def drain(self, node: Node, rng: Random) -> None:
        requests = _requests(node)
        if requests is not None and node.broker is not None:
            await node.call(requests.drain(node.broker.broker_id))
            await _pause(rng, 5.0, 40.0)
            await self.activate(node)

    async def rebalance(self, node: Node, rng: Random) -> None:
        requests = _requests(node)
        if requests is not None and node.broker is not None and node.broker.cluster is not None:
            cluster = node.broker.cluster
            order = await node.call(requests.rebalance(moves_max=rng.choice((1, 2, None))))
            if order.rest and node.alive and node.process is not None:
                node.process.run(cluster.rebalance_in_background, order)

    async def questions(self, node: Node, rng: Random) -> None:
        """Calls every question there is, and every order that changes nothing for others."""
        if node.alive and node.broker is not None:
            await node.call(self._questions(node, node.broker, rng))

    async def _questions(self, node: Node, broker: Broker, rng: Random) -> None:
        topics, topic = broker.topics, rng.choice(self.topics)
        for ask in (
            topics.names,
            topics.namespaces,
            lambda: topics.namespace_policy(NamespaceName("default")),
            lambda: topics.get_failure_policy(topic, SubscriptionName("sub-0")),
            lambda: topics.get_dispatch_config(topic, SubscriptionName("sub-0")),
            lambda: topics.set_on_crash(self.topics[3], wait=rng.random() < 0.5),
            lambda: self._namespace(broker, rng),
            lambda: self._limits(broker, topic, rng),
        ):
            with contextlib.suppress(DanubeError):
                await ask()
        if broker.cloud is not None:
            broker.cloud.uploader.standing()
            broker.cloud.uploader.why_not_freed()
        found = topics.get(topic)
        if found is not None and found.reliable and found.storage is not None:
            desk = RetentionDesk(topics, lambda name: None)
            with contextlib.suppress(DanubeError):
                await desk.due(found)
                await desk.apply(found)
            with contextlib.suppress(DanubeError):
                await found.flush_log()
            found.storage.tier.garbage.ages(["nothing"])
        if broker.cluster is not None:
            broker.topics.moves.past_moves(topic)
            broker.cluster.state_of(broker.broker_id)
            requests = broker.cluster.requests
            requests.balance()
            requests.history()
            requests.propose()
            for each in (1, 2, 3):
                broker.cluster.view.gone_for(BrokerId(each))
            requests.mode_of(broker.broker_id)
            await requests.drained(broker.broker_id, self.topics, 1.0)

    async def _limits(self, broker: Broker, topic: TopicName, rng: Random) -> None:
        """Limits that hold no client up for long, of the topics that the clients use."""
        found = broker.topics.get(topic)
        rate = rng.choice((0, 50, 1000))
        await broker.namespace_limits.set(NamespaceName("default"), {"max_subscription_dispatch_rate": rate})
        await broker.reload(broker.config)
        if found is not None and found.reliable:
            await found.set_heartbeat(rng.choice((None, Heartbeat(700))))
        given = {"max_redelivery_delay_ms": rng.choice((1000, 1500))}
        await broker.topics.change_failure_policy(topic, SubscriptionName("sub-0"), given)

    async def _namespace(self, broker: Broker, rng: Random) -> None:
        """One of its own, with a topic of two parts, that comes and goes."""
        topics, name = broker.topics, NamespaceName(f"room{rng.randrange(100)}")
        await topics.create_namespace(name)
        desk = RetentionDesk(topics, lambda name: None)
        await desk.set_namespace(name, RetentionChange(minutes=5))
        await desk.of_namespace(name)
        base = TopicName(f"/{name}/parted")
        await topics.create_partitioned(base, 2, delivery=Delivery.NON_RELIABLE)
        await topics.delete(base)
        await topics.delete_namespace(name)

    async def delete(self, node: Node, rng: Random) -> None:
        """Deletes a topic and makes another of its name. Once: the others' histories are to be long."""
        if node.broker is None or not node.alive or self._deleted:
            return
        self._deleted = True
        while True:
            try:
                if (broker := node.broker) is not None:
                    await node.call(broker.topics.delete(self.topics[0]))
                    break
            except TopicUnknown:  # the answer was lost, or another broker finished what was cut off
                break
            except (DanubeError, ProcessDied):
                pass
            await asyncio.sleep(1.0)
            node = rng.choice(self.cluster.living or [node])
        await _pause(rng, 0.1, 10.0)
        await self.make(self.topics[0])

    async def make(self, topic: TopicName, *, reliable: bool = True) -> None:
        """As often as it takes."""
        delivery = Delivery.RELIABLE if reliable else Delivery.NON_RELIABLE
        while True:
            for node in self.cluster.living:
                if node.broker is not None:
                    try:
                        await node.call(node.broker.topics.make(topic, delivery=delivery))
                        return
                    except TopicExists:
                        return
                    except (DanubeError, ProcessDied):
                        pass
            await asyncio.sleep(1.0)

    async def policy_change(self, node: Node, rng: Random) -> None:
        """Of a subscription: how many messages may be in flight, how often it is looked at, when it gives up."""
        topic, name = rng.choice(self.topics), SubscriptionName(f"sub-{rng.randrange(2)}")
        host = next((each for each in self.cluster.living if each.topic(topic) is not None), None)
        if host is None or host.broker is None:
            return
        if name == "sub-0" and rng.random() < 0.5:
            await self.set_policy(host, topic, rng.choice((REDELIVERIES, REDELIVERIES + 1)))
        else:
            beat = Heartbeat(rng.choice((500, 1000)))
            unacked_max = rng.choice((1, 3, 1000))
            topics = host.broker.topics
            await host.call(topics.set_dispatch_config(topic, name, unacked_max=unacked_max, heartbeat=beat))

    async def retention_change(self, node: Node, rng: Random) -> None:
        """An operator wants no more than a minute of the second topic, or a few objects of the third, or everything."""
        topic, change = rng.choice(
            [(self.topics[1], RetentionChange(minutes=minutes)) for minutes in (0, 1, 1)]
            + [(self.topics[2], RetentionChange(mb=mb)) for mb in (0, 1, 2, 3)]
        )
        host = next((each for each in self.cluster.living if each.topic(topic) is not None), None)
        found = host.topic(topic) if host is not None else None
        if host is not None and host.broker is not None and found is not None and found.reliable:
            await self.retain(host, found, change)

    async def retain(self, host: Node, topic: Topic, change: RetentionChange) -> None:
        assert host.broker is not None
        desk = RetentionDesk(host.broker.topics, lambda name: None)
        await host.call(desk.set_topic(topic, change))

    async def set_policy(self, host: Node, topic: TopicName, redeliveries: int) -> None:
        """The first subscription of a topic gives messages up that fail too often."""
        assert host.broker is not None
        policy = FailurePolicy(
            max_redelivery_count=redeliveries,
            ack_timeout_ms=0,
            base_redelivery_delay_ms=500,
            max_redelivery_delay_ms=1000,
            backoff_strategy=BackoffStrategy.FIXED,
            poison_policy=PoisonPolicy.DEAD_LETTER,
            dead_letter_topic=DEAD_LETTERS,
        )
        await host.call(host.broker.topics.set_failure_policy(topic, SubscriptionName("sub-0"), policy))


FaultKind: TypeAlias = Callable[[Breaking, Node, Random], Coroutine[Any, Any, None]]

FAULT_KINDS: Final[dict[str, FaultKind]] = {
    kind.__name__: kind
    for kind in (
        Breaking.aimed,
        Breaking.slow_start,
        Breaking.slow_takeover,
        Breaking.worker_dies,
        Breaking.late_move,
        Breaking.late_claim,
        Breaking.late_seal,
        Breaking.late_change,
        Breaking.all_slow,
        Breaking.kill,
        Breaking.power_cut,
        Breaking.restart,
        Breaking.pause,
        Breaking.clock_jump,
        Breaking.rolling_reboot,
        Breaking.last_active,
        Breaking.cut_off,
        Breaking.metadata_cut,
        Breaking.metadata_mute,
        Breaking.metadata_deaf,
        Breaking.clients_cut,
        Breaking.requests_lost,
        Breaking.answers_lost,
        Breaking.slow_network,
        Breaking.metadata_answers_lost,
        Breaking.metadata_late,
        Breaking.metadata_slow,
        Breaking.watch_gaps,
        Breaking.metadata_election,
        Breaking.lease_expiry,
        Breaking.objects_away,
        Breaking.objects_gone,
        Breaking.objects_failing,
        Breaking.objects_answers_lost,
        Breaking.objects_late,
        Breaking.objects_slow,
        Breaking.disk_slow,
        Breaking.sync_fails,
        Breaking.disk_full,
        Breaking.bit_flip,
        Breaking.notifier_dies,
        Breaking.unload,
        Breaking.drain,
        Breaking.rebalance,
        Breaking.questions,
        Breaking.delete,
        Breaking.policy_change,
        Breaking.retention_change,
    )
}

# What is most worth interrupting, and being interrupted, comes more often.
_OFTEN: Final = {
    "kill": 3,
    "power_cut": 3,
    "unload": 4,
    "restart": 2,
    "pause": 2,
    "aimed": 14,
    "all_slow": 2,
    "slow_takeover": 2,
    "late_move": 2,
}
_LATE: Final = ("late_claim", "late_seal", "late_change")  # at most one in a run
RETURNS: Final = ("rolling_reboot", "last_active", "cut_off")  # likewise
_DRAWN: Final = [
    kind for kind in sorted(FAULT_KINDS) if kind not in _LATE + RETURNS for _ in range(_OFTEN.get(kind, 1))
]


async def _pause(rng: Random, low: float, high: float) -> None:
    await asyncio.sleep(rng.uniform(low, max(low, high)))


def _requests(node: Node) -> Any:
    alive = node.alive and node.broker is not None and node.broker.cluster is not None
    return node.broker.cluster.requests if alive else None  # type: ignore[union-attr]


def _faults(node: Node) -> Faults:
    assert isinstance(node.disk, FaultyDisk)
    return node.disk.faults


def _segment_header(data: bytes | None) -> SegmentHeader | None:
    length = segment_header_length(data or b"")
    return None if data is None or length is None else decode_segment_header(data[:length])
