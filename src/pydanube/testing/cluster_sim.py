"""One history of a whole cluster from a seed: clients work, everything fails, and at the end nothing may be missing.

    outcome = run_seed(42)        the same seed, the same run
    outcome.problems              what was not as promised; empty is good

Safety first: for some minutes of simulated time brokers are killed, paused, cut off and restarted, the stores fail and
lose answers, operators move topics. Then everything heals, and within a bound of time every topic must be served, every
orphan resolved, and every subscription caught up.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.names import ProducerId, SubscriptionName, TopicName
from pydanube.core.ownership import void_end
from pydanube.core.policies import SubscriptionKind
from pydanube.errors import DanubeError, OffsetOutOfRange, OutOfSequence, ProducerFenced, SessionUnknown
from pydanube.log.batch import Envelope, encode, rows_of
from pydanube.ports import Event
from pydanube.testing.cluster import Cluster, Node
from pydanube.testing.cluster_history import Acked, Got, History, check
from pydanube.testing.cluster_history import Final as FinalLog
from pydanube.testing.log_history import small_constants
from pydanube.testing.loop import Deadlock, Livelock, ProcessDied, SimLoop

SAFETY_SECONDS: Final = 300.0
LIVENESS_SECONDS: Final = 300.0
CALL_SECONDS: Final = 3.0  # a client's patience
FAULT_SECONDS: Final = 20.0  # on average between two faults
BROKERS: Final = 3
TOPICS: Final = 5


@dataclass(slots=True)
class Outcome:
    seed: int
    problems: list[str]
    faults: Counter[str]
    acked: int
    delivered: int
    simulated_seconds: float
    schedule: list[str] = field(default_factory=list)


def run_seed(seed: int, *, tweak: Callable[[Cluster], None] | None = None) -> Outcome:
    """Runs the history of this seed. Never raises: what goes wrong is a problem of the outcome."""
    loop = SimLoop(Random(seed), steps_max=20_000_000)  # type: ignore[abstract]
    run = _Run(seed, tweak)
    try:
        with small_constants():
            loop.run_until_complete(run.main())
        run.problems += [f"error that nobody took: {each}" for each in loop.problems[:3]]
    except (Deadlock, Livelock, AssertionError) as error:
        run.problems.append(f"{type(error).__name__}: {error}")
    finally:
        loop.close()
    return run.outcome(loop.time())


class _Run:
    def __init__(self, seed: int, tweak: Callable[[Cluster], None] | None) -> None:
        self.seed = seed
        self.dice = Random(seed ^ 0x5EED)
        self.history = History()
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []
        self.schedule: list[str] = []
        self.working = True
        self.publishing = True
        self._tweak = tweak
        self.town: Cluster

    def outcome(self, seconds: float) -> Outcome:
        return Outcome(
            self.seed,
            self.problems,
            self.faults,
            len(self.history.acked),
            len(self.history.got),
            seconds,
            self.schedule,
        )

    def say(self, what: str) -> None:
        self.schedule.append(f"{asyncio.get_running_loop().time():9.3f} {what}")

    async def main(self) -> None:
        self.town = Cluster(self.seed)
        if self._tweak is not None:
            self._tweak(self.town)
        await self.town.start(BROKERS)
        watching = asyncio.create_task(self._watch_cursors(), name="watch cursors")
        topics = [await self.town.create(f"/default/topic-{number}") for number in range(TOPICS)]
        clients: list[asyncio.Task[None]] = []
        for topic in topics:
            for number in range(2):
                kind = self.dice.choice(list(SubscriptionKind))
                name = SubscriptionName(f"sub-{number}")
                await self._subscribe(topic, name, kind)
                for consumer in range(self.dice.choice([1, 1, 2])):
                    clients.append(self._spawn(self._consume(topic, name, kind, f"c{consumer}")))
            clients.append(self._spawn(self._produce_native(topic)))
            clients.append(self._spawn(self._produce_plain(topic)))
        await self._break()
        await self._heal()
        self.publishing = False
        await self._settle(topics)
        self.working = False
        for task in [*clients, watching]:
            task.cancel()
        await asyncio.gather(*clients, watching, return_exceptions=True)
        finals = [await self._final(topic) for topic in topics]
        self.problems += check(self.history, finals)
        if len(self.history.acked) < 50 or len(self.history.got) < 50:
            self.problems.append(f"checked nothing: {len(self.history.acked)} acks, {len(self.history.got)} deliveries")

    def _spawn(self, client: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.create_task(client, name=f"client {client.__name__}")

    # --- clients --------------------------------------------------------------------------------------------

    async def _call(self, topic: TopicName, request: Callable[[Topic], Coroutine[Any, Any, Any]]) -> Any:
        """One request to whoever serves the topic. Raises DanubeError, TimeoutError or ProcessDied, as clients see it."""
        # A client asks brokers; it may reach one that has lost the topic and does not know it yet.
        nodes = [node for node in self.town.living if node.topic(topic) is not None]
        if not nodes:
            raise TimeoutError
        node = self.dice.choice(nodes)
        found = node.topic(topic)
        assert isinstance(found, Topic)
        async with asyncio.timeout(CALL_SECONDS):
            return await node.call(request(found))

    async def _pause(self, low: float, high: float) -> None:
        await asyncio.sleep(self.dice.uniform(low, high))

    async def _produce_native(self, topic: TopicName) -> None:
        """An idempotent producer: one batch in flight, resent unchanged until it is answered."""
        name = f"native-{topic[-1]}"
        session = sequence = number = 0
        while True:
            if not self.publishing:
                return
            count = self.dice.randint(1, 3)
            texts = [f"{name}:{number + row}" for row in range(count)]
            number += count
            self.history.sent[topic].update(texts)
            answered = False
            while not answered and self.working:
                try:
                    if not session:
                        session = await self._call(topic, lambda found: found.open_session(ProducerId(7)))
                        sequence = 0
                    receipt = await self._call(topic, lambda found: _submit(found, session, sequence, texts, name))  # noqa: B023
                except (SessionUnknown, OutOfSequence, ProducerFenced):
                    session = 0
                except (DanubeError, TimeoutError, ProcessDied):
                    await self._pause(0.1, 1.0)
                else:
                    self._acked(topic, texts, receipt.offset, receipt.epoch)
                    sequence += count
                    answered = True
            await self._pause(0.5, 6.0)

    async def _produce_plain(self, topic: TopicName) -> None:
        """As the official clients do: no session, so a resend may be a second message."""
        name = f"plain-{topic[-1]}"
        number = 0
        while self.publishing:
            text = f"{name}:{number}"
            number += 1
            self.history.sent[topic].add(text)
            while self.working:
                try:
                    offset = await self._call(
                        topic, lambda found: found.append(Envelope(text.encode(), 1, "key", name))
                    )  # noqa: B023
                except (DanubeError, TimeoutError, ProcessDied):
                    await self._pause(0.2, 1.0)
                else:
                    self._acked(topic, [text], offset, 0)
                    break
            await self._pause(0.5, 8.0)

    def _acked(self, topic: TopicName, texts: list[str], offset: int, epoch: int) -> None:
        now = asyncio.get_running_loop().time()
        for row, text in enumerate(texts):
            self.history.acked.append(Acked(topic, text, offset + row, epoch, now))

    async def _subscribe(self, topic: TopicName, name: SubscriptionName, kind: SubscriptionKind) -> None:
        found = await self.town.served(topic)
        await found.subscribe(name, kind, "c0", (), 0)
        self.history.subscribed[topic, name] = 0

    async def _consume(self, topic: TopicName, name: SubscriptionName, kind: SubscriptionKind, consumer: str) -> None:
        while self.working:
            try:
                await self._call(topic, lambda found: self._stream(found, name, kind, consumer))
            except (DanubeError, TimeoutError, ProcessDied):
                pass
            await self._pause(0.2, 2.0)

    async def _stream(self, topic: Topic, name: SubscriptionName, kind: SubscriptionKind, consumer: str) -> None:
        """One connection: runs inside the broker's process, and ends with it, or after a while."""
        identity = await topic.subscribe(name, kind, consumer)
        subscription = topic.require(name)
        outbox = subscription.attach(identity)
        loop = asyncio.get_running_loop()
        until = loop.time() + self.dice.choice([2.0, 2.5, 2.9])
        try:
            while loop.time() < until:
                try:
                    async with asyncio.timeout(max(0.01, until - loop.time())):
                        messages = await outbox.get()
                except TimeoutError:
                    return
                if not messages:
                    return
                for each in messages:
                    text = each.message.payload.decode()
                    self.history.got.append(Got(topic.name, name, text, each.offset, each.attempt, loop.time()))
                if self.dice.random() < 0.1:
                    await asyncio.sleep(self.dice.uniform(0.0, 0.5))
                for each in messages:
                    if self.dice.random() < 0.05:
                        subscription.nack(each.offset, 0.1)
                    else:
                        subscription.ack(each.offset)
        finally:
            subscription.detach(identity, outbox)

    async def _watch_cursors(self) -> None:
        """What is stored, in the order in which the store took it."""
        async for events in self.town.metadata.watch(keys.TOPICS, 0):
            for event in events:
                self._cursor(event)

    def _cursor(self, event: Event) -> None:
        place = keys.subscription_of_cursor(event.key)
        if place is not None and event.value is not None:
            self.history.cursors[place].append(int(event.value))

    # --- faults -------------------------------------------------------------------------------------------------

    async def _break(self) -> None:
        kinds = [
            self._kill,
            self._kill,
            self._restart,
            self._pause_node,
            self._cut_metadata,
            self._cut_store,
            self._lose_answers,
            self._slow,
            self._unload,
            self._unload,
            self._unload,
            self._drop_events,
        ]
        until = asyncio.get_running_loop().time() + SAFETY_SECONDS
        while asyncio.get_running_loop().time() < until:
            await self._pause(1.0, 2 * FAULT_SECONDS)
            fault = self.dice.choice(kinds)
            name = fault.__name__.lstrip("_")
            node = self.dice.choice(self.town.nodes)
            self.faults[name] += 1
            self.say(f"{name} node {node.number}")
            task = asyncio.create_task(self._guarded(fault(node)), name=f"fault {name}")
            if self.dice.random() < 0.5:  # else the next one comes while this one lasts
                await task
        self.say("end of faults")

    async def _guarded(self, fault: Coroutine[Any, Any, None]) -> None:
        try:
            await fault
        except (DanubeError, ProcessDied):
            pass

    async def _kill(self, node: Node) -> None:
        if not node.alive:
            return
        node.kill()
        await self._pause(0.5, self.dice.choice([4.0, 40.0]))
        await self._boot(node)

    async def _boot(self, node: Node) -> None:
        if not node.alive and self.working:
            try:
                async with asyncio.timeout(120):
                    await node.boot()
            except (TimeoutError, ProcessDied):
                if node.alive:
                    node.kill()
            else:
                await self._activate(node)

    async def _activate(self, node: Node) -> None:
        """The operator looks at it and lets it work again."""
        await self._pause(1.0, 5.0)
        if node.alive and node.broker is not None and node.broker.cluster is not None:
            await node.call(node.broker.cluster.requests.activate(node.broker.broker_id))

    async def _restart(self, node: Node) -> None:
        if not node.alive:
            return
        try:
            async with asyncio.timeout(60):
                await node.stop()
        except TimeoutError:
            node.kill()
        await self._pause(0.1, 5.0)
        await self._boot(node)

    async def _pause_node(self, node: Node) -> None:
        if not node.alive:
            return
        node.pause()
        await self._pause(0.5, self.dice.choice([3.0, 30.0]))
        if node.alive:
            node.resume()
            await self._activate(node)

    async def _cut_metadata(self, node: Node) -> None:
        if not node.alive:
            return
        metadata = node.metadata
        metadata.cut = True
        await self._pause(0.5, self.dice.choice([5.0, 30.0]))
        metadata.cut = False
        await self._activate(node)

    async def _cut_store(self, node: Node) -> None:
        if node.alive:
            objects = node.objects
            objects.away = True
            await self._pause(1.0, 40.0)
            objects.away = False

    async def _lose_answers(self, node: Node) -> None:
        if node.alive:
            metadata, objects = node.metadata, node.objects
            metadata.answers_lost, objects.answers_lost = 0.3, 0.3
            await self._pause(1.0, 30.0)
            metadata.answers_lost = objects.answers_lost = 0.0

    async def _slow(self, node: Node) -> None:
        if node.alive:
            metadata, objects = node.metadata, node.objects
            metadata.delay_max_seconds, objects.delay_max_seconds = 0.5, 1.0
            await self._pause(1.0, 30.0)
            metadata.delay_max_seconds = objects.delay_max_seconds = 0.0

    async def _drop_events(self, node: Node) -> None:
        if node.alive:
            node.metadata.drop_every = self.dice.choice([2, 10])

    async def _unload(self, node: Node) -> None:
        if node.alive:
            topic = TopicName(f"/default/topic-{self.dice.randrange(TOPICS)}")
            await self.town.unload(topic, asked=node)

    # --- the end ------------------------------------------------------------------------------------------------

    async def _heal(self) -> None:
        self.say("healing")
        await asyncio.sleep(60)  # faults that are under way end by themselves
        for node in self.town.nodes:
            if node.alive:
                node.resume()
                node.metadata.cut = node.objects.away = False
                node.metadata.answers_lost = node.objects.answers_lost = 0.0
                node.metadata.delay_max_seconds = node.objects.delay_max_seconds = 0.0
                node.metadata.drop_every = 0
            else:
                await node.boot()
        await asyncio.sleep(30)
        for node in self.town.nodes:
            await self._activate(node)

    async def _settle(self, topics: list[TopicName]) -> None:
        """Liveness: with all brokers there and nothing failing, everything is served, resolved and delivered."""
        began = asyncio.get_running_loop().time()
        waiting = "nothing was looked at"
        while asyncio.get_running_loop().time() - began < LIVENESS_SECONDS:
            waiting = await self._unsettled(topics)
            if not waiting:
                return
            await asyncio.sleep(1.0)
        self.problems.append(f"not settled after {LIVENESS_SECONDS:g} s: {waiting}")

    async def _unsettled(self, topics: list[TopicName]) -> str:
        for topic in topics:
            node = self.town.host(topic)
            found = node.topic(topic) if node is not None else None
            if not isinstance(found, Topic):
                return f"nobody serves {topic}"
            if found.orphans:
                return f"{topic} has orphans {found.orphans}"
            for subscription in found.subscriptions.values():
                if subscription.has_lag():
                    return f"{topic} {subscription.name}: {subscription.explain()}"
        return ""

    async def _final(self, topic: TopicName) -> FinalLog:
        found = await self.town.served(topic)
        messages: dict[int, str] = {}
        offset = found.first_offset
        while offset < found.head:
            try:
                rows = await found.rows(offset, found.head)
            except OffsetOutOfRange as gap:
                offset = gap.first
                continue
            if not rows:
                break
            messages.update({at: each.payload.decode() for at, each in rows})
            offset = rows[-1][0] + 1
        items = await self.town.metadata.list(keys.voids(topic))
        voids = [(start, void_end(item.value)) for item in items if (start := keys.start_of(item.key)) is not None]
        return FinalLog(topic, found.first_offset, found.head, messages, voids)


async def _submit(topic: Topic, session: int, sequence: int, texts: list[str], name: str) -> Any:
    rows = rows_of([Envelope(text.encode(), 1, f"k{row}", name) for row, text in enumerate(texts)])
    batch = encode(rows, topic=topic.name, producer_id=7, session=session, first_sequence=sequence)
    return await topic.submit_batch(batch)
