"""Clients of a simulated cluster: they send, receive, acknowledge, refuse, lose their connections, and write it down.

A client asks a node that seems to have the topic, also one that has lost it and does not know, and now and then any. It
waits a few seconds for an answer and sends again: an idempotent producer the same batch in the same session, a plain
one the same text, which may then be there twice. Consumers come and go. What was recorded happened; what is not known
is not recorded.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any, Final, NamedTuple, TypeVar

from pydanube.broker.any_topic import AnySubscription, AnyTopic
from pydanube.broker.outbox import AnyOutbox, DeliveredBatch, DeliveredMessage, RecalledRanges
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.core.dispatch.consumer_window import Permits
from pydanube.core.dispatch.delivery import PoisonPolicy
from pydanube.core.dispatch.events import offsets
from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.core.names import ConsumerId, ProducerId, SubscriptionName, TopicName, producer_id
from pydanube.core.policies import SubscriptionKind
from pydanube.errors import DanubeError, OffsetOutOfRange, OutOfSequence, ProducerFenced, SessionUnknown
from pydanube.formats.batch import Envelope, encode_columns
from pydanube.formats.batch import messages as messages_of
from pydanube.testing.cluster import Cluster, Node
from pydanube.testing.history import Acked, Done, Fetched, Got, History, Nacked, Sent, Subscribed, life
from pydanube.testing.loop import ProcessDied

T = TypeVar("T")

CALL_SECONDS: Final = 3.0  # a client's patience
STREAM_SECONDS: Final = (6.0, 60.0, 300.0)  # how long connections last, at most
PAUSE_SECONDS: Final = (3.0, 25.0)  # between two messages of one producer
HURRY_SECONDS: Final = (0.02, 1.2)  # if it has more to say
FETCH_SECONDS: Final = (4.0, 30.0)
FETCHED_MAX: Final = 20
VISIT_SECONDS: Final = (15.0, 90.0)
PERMITS: Final = 8  # messages and bytes that a native consumer has room for
PERMITTED_BYTES: Final = 4096
VISITOR: Final = SubscriptionName("visitor")  # a subscription that no checker judges: it is sought, and removed
GUESSES: Final = 0.15  # so many requests go to any node, whether it has the topic or not
THINKS_SECONDS: Final = (0.5, 8.0)  # a consumer that holds messages before it answers, at most
POISON: Final = "!"  # a text that ends so is refused by subscriptions that have a dead-letter policy
KEYS: Final = ("a", "b", "c")
PRODUCER: Final = ProducerId(7)


class Answer(NamedTuple):
    offset: int
    epoch: int
    broker: int
    topic: str  # with its life


class Clients:
    """All clients of one run. `publishing` and `working` end them; `quiet` keeps consumers connected."""

    def __init__(
        self,
        cluster: Cluster,
        history: History,
        rng: Random,
        *,
        given: Callable[[Topic, int, int], None] = lambda topic, offset, epoch: None,
        hurry: float = 0.0,
        subscribed: set[tuple[str, str]] | None = None,
    ) -> None:
        self._given = given  # called in the moment in which a broker has an answer
        self._hurry = hurry
        self.cluster = cluster
        self.history = history
        self.rng = rng
        self.working = True
        self.publishing = True
        self.quiet = False
        self._subscribed = set() if subscribed is None else subscribed  # topics and subscriptions, as recorded
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, client: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(client, name=f"client {getattr(client, '__name__', '')}"))

    async def stop(self) -> None:
        self.working = self.publishing = False
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    # --- asking ---------------------------------------------------------------------------------------------

    def _find(self, topic: TopicName) -> tuple[Node, AnyTopic] | None:
        """A node that seems to have the topic: it may have lost it without knowing."""
        found = [(node, each) for node in self.cluster.living if (each := node.topic(topic)) is not None]
        return self.rng.choice(found) if found else None

    def _guess(self) -> tuple[Node, None] | None:
        """Any node: a client that was sent there, before the topic is there, or that knows no better."""
        found = [node for node in self.cluster.living if node.broker is not None]
        return (self.rng.choice(found), None) if found else None

    async def _ask(self, topic: TopicName, request: Callable[[Node, AnyTopic], Coroutine[Any, Any, T]]) -> T:
        """One request. Raises DanubeError, TimeoutError or ProcessDied, as a client sees it."""
        chosen = self._guess() if self.rng.random() < GUESSES else self._find(topic)
        if chosen is None:
            raise TimeoutError
        node, found = chosen
        wire = node.wire
        async with asyncio.timeout(CALL_SECONDS):
            if wire.delay_max_seconds:
                await asyncio.sleep(self.rng.random() * wire.delay_max_seconds)
            if wire.requests_lost:
                await asyncio.sleep(CALL_SECONDS)
            if wire.duplicates and found is not None and found.reliable and self.rng.random() < wire.duplicates:
                self._tasks.append(asyncio.create_task(self._again(node, request(node, found)), name="duplicate"))
            answer = await node.call(
                request(node, found) if found is not None else _at_the_server(node, topic, request)
            )
            if wire.answers_lost:
                await asyncio.sleep(CALL_SECONDS)
            return answer

    async def _again(self, node: Node, request: Coroutine[Any, Any, Any]) -> None:
        """The same request once more; its outcome is dropped."""
        with contextlib.suppress(DanubeError, ProcessDied):
            await node.call(request)

    async def pause(self, low: float, high: float) -> None:
        await asyncio.sleep(self.rng.uniform(low, high))

    async def between(self) -> None:
        """Until the next message."""
        await self.pause(*(HURRY_SECONDS if self._hurry and self.rng.random() < self._hurry else PAUSE_SECONDS))

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    # --- sending --------------------------------------------------------------------------------------------

    async def produce(self, topic: TopicName, *, until: float) -> None:
        """An idempotent producer: one batch in flight, sent again unchanged until it is answered."""
        name = f"native-{number_of(topic)}"
        session = sequence = number = 0
        seen_epochs = [0]  # of owners that have opened the producer
        await self.pause(0.0, PAUSE_SECONDS[1])
        while self.publishing and self.now() < until:
            texts = [self.text(name, number + row) for row in range(self.rng.choice((1, 1, 2, 3)))]
            number += len(texts)
            self.sent(topic, texts, once=True)
            time_us = self.cluster.clock.time_us()  # once: what is sent again is the same, byte for byte
            answered = False
            while not answered and self.working:
                try:
                    if not session:
                        session = await self._ask(topic, _open_session)
                        sequence = 0
                    submission = _submission(session, seen_epochs, sequence, texts, name, time_us, self._given)
                    answer = await self._ask(topic, submission)
                except (SessionUnknown, OutOfSequence, ProducerFenced):
                    session = 0
                    self.sent(topic, texts, once=True)
                except (DanubeError, TimeoutError, ProcessDied):
                    await self.pause(0.2, 2.0)
                else:
                    self._acked(texts, answer)
                    sequence += len(texts)
                    answered = True
            await self.between()

    async def produce_plainly(self, topic: TopicName, *, until: float) -> None:
        """As the official clients do: no session, so what is sent again may be a second message."""
        name = f"plain-{number_of(topic)}"
        number = 0
        await self.pause(0.0, PAUSE_SECONDS[1])
        while self.publishing and self.now() < until:
            text = self.text(name, number)
            number += 1
            await self.send(topic, name, text)
            await self.between()

    async def send(self, topic: TopicName, name: str, text: str) -> None:
        """Until it is answered. Many clients without backoff would keep a slow disk busy with their copies."""
        self.sent(topic, [text])
        patience = 0.125
        while self.working:
            try:
                answer = await self._ask(topic, _publication(text, name, self._given))
            except (DanubeError, TimeoutError, ProcessDied):
                await self.pause(0.2, 2.0)
                patience = min(2 * patience, 30.0)
                if patience > 4.0:
                    await asyncio.sleep(patience)
            else:
                self._acked([text], answer)
                return

    async def shout(self, topic: TopicName, *, until: float) -> None:
        """To a topic that keeps nothing: once, whatever comes of it."""
        name = f"fanout-{number_of(topic)}"
        number = 0
        while self.publishing and self.now() < until:
            await self.pause(*PAUSE_SECONDS)
            texts = [f"{name}:{number + row}" for row in range(self.rng.choice((1, 1, 2)))]
            number += len(texts)
            self.sent(topic, texts)
            with contextlib.suppress(DanubeError, TimeoutError, ProcessDied):
                await self._ask(topic, _publication(texts[0], name) if len(texts) == 1 else _shouting(texts, name))

    def text(self, name: str, number: int) -> str:
        return f"{name}:{number}{POISON if self.rng.random() < 0.04 else ''}"

    def sent(self, topic: TopicName, texts: list[str], *, once: bool = False) -> None:
        now = self.now()
        for text in texts:
            self.history.add(Sent(topic, text, key_of(text), once, now))

    def _acked(self, texts: list[str], answer: Answer) -> None:
        now = self.now()
        for row, text in enumerate(texts):
            self.history.add(Acked(answer.topic, text, answer.offset + row, answer.epoch, answer.broker, now))

    # --- reading --------------------------------------------------------------------------------------------

    async def fetch(self, topic: TopicName) -> None:
        """Reads the log by offsets, from its beginning on, and waits a moment at its head for more."""
        at = {"": 0}
        while self.working:
            await self.pause(*FETCH_SECONDS)
            with contextlib.suppress(DanubeError, TimeoutError, ProcessDied):
                await self._ask(topic, lambda node, found: self._fetch(found, at))

    async def _fetch(self, topic: AnyTopic, at: dict[str, int]) -> None:
        assert topic.reliable
        label = life(topic.name, topic.ownership.created)
        offset = max(at.setdefault(label, 0), topic.first_offset)
        await topic.wait_beyond(offset, 0.3)
        try:
            rows = await topic.rows(offset, min(topic.head, offset + FETCHED_MAX))
        except OffsetOutOfRange as gap:
            at[label] = max(gap.first, offset)
            return
        for found, each in rows:
            self.history.add(Fetched(label, each.payload.decode(), found, self.now()))
            at[label] = found + 1

    async def visit(self, topic: TopicName) -> None:
        """Now and then a consumer with a subscription of its own, which seeks anywhere, reads a little, and leaves."""
        while self.working:
            await self.pause(*VISIT_SECONDS)
            if self.quiet:
                continue
            with contextlib.suppress(DanubeError, TimeoutError, ProcessDied):
                stays = self.rng.random() < 0.3
                await self._ask(topic, lambda node, found, stays=stays: self._visit(node, found, stays=stays))  # type: ignore[misc]

    async def pass_by(self, node: Node, topic: AnyTopic) -> None:
        """Waits for what does not come, gives up, and leaves nothing behind."""
        if topic.reliable:
            for _ in range(4):
                await topic.wait_beyond(topic.head, 0.02)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2.0):
                    await self._visit(node, topic)
        finally:
            producer = producer_id(topic.name, "visitor")
            topic.producers.remove(producer, topic.producers.get(producer))

    async def _visit(self, node: Node, topic: AnyTopic, *, stays: bool = False) -> None:
        producer = await topic.add_producer("visitor")
        topic.touch_producer(producer)
        assert node.broker is not None
        node.broker.topics.find_producer(producer)
        identity = await topic.subscribe(VISITOR, SubscriptionKind.SHARED, "visitor", (), 0)
        subscription: AnySubscription = topic.require(VISITOR)
        outbox: AnyOutbox = subscription.attach(identity)
        node.broker.topics.find_consumer(identity)
        try:
            subscription.is_healthy(identity)
            subscription.registration(identity)
            if topic.reliable and subscription.reliable:
                await topic.gaps()
                await subscription.move_to(await topic.offset_at(node.clock.time_us() - 40_000_000))
                await topic.peek(topic.first_offset, 2)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.3):
                        for each in await outbox.get():
                            self._look_at(subscription, identity, each.offset)
                            subscription.ack(each.offset)
                subscription.explain()
                subscription.standing()
        finally:
            subscription.detach(identity, outbox)
        if not stays:
            await topic.unsubscribe(VISITOR)

    def _look_at(self, subscription: Subscription, identity: ConsumerId, offset: int) -> None:
        """A message that was received: the visitor asks for more time, if it still holds it."""
        held = subscription.still_held(identity, [(offset, offset + 1)])
        assert len(held) <= subscription.held_by(identity)
        with contextlib.suppress(DanubeError):
            subscription.extend(identity, offsets(offset), subscription.seeks, 5.0)

    # --- receiving ------------------------------------------------------------------------------------------

    async def consume(self, topic: TopicName, name: SubscriptionName, kind: SubscriptionKind, consumer: str) -> None:
        """One connection after the other: some consumers are native, which get stored batches and grant permits."""
        native = self.rng.random() < 0.5
        while self.working:
            chosen = self._find(topic)
            if chosen is not None and not chosen[0].wire.requests_lost:
                node, found = chosen
                lasts = self.rng.uniform(1.0, self.rng.choice(STREAM_SECONDS))
                with contextlib.suppress(DanubeError, ProcessDied):
                    stream = self._stream(node, found, name, kind, consumer, self.now() + lasts, native=native)
                    await node.call(stream)
            await self.pause(0.2, 2.0)

    async def _stream(
        self,
        node: Node,
        topic: AnyTopic,
        name: SubscriptionName,
        kind: SubscriptionKind,
        consumer: str,
        until: float,
        *,
        native: bool,
    ) -> None:
        """One connection: runs inside the broker's process and ends with it, or after a while, or with the network."""
        label = life(topic.name, topic.ownership.created)
        native = native and topic.reliable
        hands_over = native and consumer == "c0"  # others are of before that was possible
        unseen: deque[DeliveredMessage] = deque()  # in the consumer's own queue
        if topic.reliable:
            identity = await topic.subscribe(name, kind, consumer, (), 0, native=native, hands_over=hands_over)
        else:
            identity = await topic.subscribe(name, kind, consumer, (), 0)
        subscription: AnySubscription = topic.require(name)
        if (label, name) not in self._subscribed:
            self._subscribed.add((label, name))
            self.history.add(Subscribed(label, name, kind.value, 0, self.now()))
        outbox: AnyOutbox
        if native and subscription.reliable:
            outbox = subscription.attach_native(identity)
            subscription.grant(identity, Permits(PERMITS, PERMITTED_BYTES))
        else:
            outbox = subscription.attach(identity)
        hanging_up = asyncio.get_running_loop().call_at(until, self._hang_up, outbox)
        try:
            while True:
                items: list[Any] = await outbox.get() if len(outbox) or outbox.is_over or not unseen else []
                if not items and (outbox.is_over or not unseen):
                    return
                messages: list[DeliveredMessage] = items
                if native and subscription.reliable:
                    messages = _rows([each for each in items if isinstance(each, DeliveredBatch)])
                if subscription.reliable:
                    wanted = [each for each in messages if subscription.is_wanted(identity, each)]
                    if native and len(wanted) < len(messages):
                        subscription.grant(identity, Permits(len(messages) - len(wanted), 0))
                    messages = wanted
                if hands_over and subscription.reliable:
                    messages = _taken(subscription, identity, unseen, messages, items)
                if node.wire.answers_lost:
                    await asyncio.sleep(1.0)  # they are lost on the way, and the connection with them
                    return
                for each in messages:
                    text = each.message.payload.decode()
                    # As late as a rescued one comes what an owner delivers that cannot know that it is none any more.
                    rescued = "x-danube-rescued" in each.message.attributes or node.cannot_know
                    key, now = each.message.routing_key or "", self.now()
                    epoch = topic.ownership.epoch
                    self.history.add(
                        Got(label, name, consumer, text, each.offset, key, each.attempt, epoch, rescued, now)
                    )
                if self.rng.random() < 0.2:
                    await asyncio.sleep(self.rng.random() * THINKS_SECONDS[0 if self.quiet else self.rng.randrange(2)])
                if node.wire.requests_lost:
                    await asyncio.sleep(1.0)  # nothing of what we say gets through
                    return
                if not subscription.reliable:
                    for each in messages:  # which says nothing to it
                        (subscription.nack if self.rng.random() < 0.2 else subscription.ack)(each.offset)
                    continue
                for each in messages:
                    if topic.subscriptions.get(name) is not subscription:
                        return  # the topic left while we worked
                    if (each.message.payload.endswith(b"!") and gives_up(subscription)) or (
                        not self.quiet and self.rng.random() < 0.03
                    ):
                        counts = in_flight(subscription, each.offset, each.offset + 1)
                        subscription.nack(each.offset, 0.1)  # raises while the topic is frozen: then it is no try
                        if counts:
                            self.history.add(Nacked(label, name, each.offset, topic.ownership.epoch, self.now()))
                    else:
                        if native:
                            subscription.ack_ranges((OffsetRange(each.offset, each.offset + 1),))
                        else:
                            subscription.ack(each.offset)
                        epoch = topic.ownership.epoch
                        self.history.add(Done(label, name, each.offset, epoch, self.now(), consumer))
                if native and not subscription.is_healthy(identity):
                    return
                if native:
                    size_bytes: int = sum(
                        item.batch.header.size_bytes for item in items if isinstance(item, DeliveredBatch)
                    )
                    subscription.grant(identity, Permits(len(messages), size_bytes))
        finally:
            hanging_up.cancel()
            subscription.detach(identity, outbox)

    def _hang_up(self, outbox: AnyOutbox) -> None:
        if not self.quiet:
            outbox.end()


def _taken(
    subscription: Subscription,
    identity: ConsumerId,
    unseen: deque[DeliveredMessage],
    came: list[DeliveredMessage],
    items: list[Any],
) -> list[DeliveredMessage]:
    """A consumer with a queue of its own: takes half of it at a time, says so, and gives back what it is asked for."""
    unseen.extend(came)
    for recalled in (each for each in items if isinstance(each, RecalledRanges)):
        back = [each for each in unseen if any(first <= each.offset < end for first, end in recalled.ranges)]
        for each in back:
            unseen.remove(each)
        returned = offsets(*sorted(each.offset for each in back))
        subscription.give_back(identity, returned, recalled.seeks, taken=recalled.taken)
    taken = [unseen.popleft() for _ in range(-(-len(unseen) // 2))]
    if taken:
        subscription.handed(identity, offsets(*sorted(each.offset for each in taken)), subscription.seeks)
    return taken


def _rows(items: Sequence[DeliveredBatch]) -> list[DeliveredMessage]:
    """What is meant of batches, message by message."""
    found: list[DeliveredMessage] = []
    for batch, ranges, attempt, _ in items:
        base, rows = batch.header.base_offset, messages_of(batch)
        found += [DeliveredMessage(at, rows[at - base], attempt) for first, end in ranges for at in range(first, end)]
    return found


async def _at_the_server(
    node: Node, topic: TopicName, request: Callable[[Node, AnyTopic], Coroutine[Any, Any, T]]
) -> T:
    """The node may wait for the topic, if it is about to get it, or refuse."""
    if node.broker is None:  # it was closed between the request and its turn: nothing listens there any more
        raise ProcessDied
    return await request(node, await node.broker.topics.require(topic))


def in_flight(
    subscription: Subscription, first: int, end: int, consumer: ConsumerId | None = None
) -> list[tuple[int, int]]:
    """Of which of these a refusal says something: others are on their way again, another consumer's, or done."""
    return [
        (piece.first, piece.end)
        for piece in subscription._machine.in_flight.overlap(first, end)
        if consumer is None or piece.value.consumer == consumer
    ]


def gives_up(subscription: AnySubscription) -> bool:
    """Whether messages that fail too often become dead letters: then those that are meant to fail do."""
    return subscription.reliable and subscription.policy.poison_policy is PoisonPolicy.DEAD_LETTER


def number_of(topic: TopicName) -> str:
    return topic.rpartition("-")[2]


def key_of(text: str) -> str:
    return KEYS[sum(text.encode()) % len(KEYS)]


def _answer(node: Node, topic: AnyTopic, offset: int, epoch: int) -> Answer:
    # What was stored before, and is answered again, may have been taken by another.
    broker = node.number if epoch == topic.ownership.epoch else 0
    return Answer(offset, epoch, broker, life(topic.name, topic.ownership.created))


async def _open_session(node: Node, topic: AnyTopic) -> int:
    assert topic.reliable
    return await topic.open_session(PRODUCER)


def _submission(
    session: int,
    seen_epochs: list[int],
    sequence: int,
    texts: list[str],
    name: str,
    time_us: int,
    given: Callable[[Topic, int, int], None],
) -> Callable[[Node, AnyTopic], Coroutine[Any, Any, Answer]]:
    async def submit(node: Node, topic: AnyTopic) -> Answer:
        assert topic.reliable
        await topic.ownership.check_not_older(max(seen_epochs), session=session)  # as where a client opens its producer
        seen_epochs.append(topic.ownership.epoch)
        batch = encode_columns(
            [text.encode() for text in texts],
            struct.pack("<q", time_us) * len(texts),
            keys=[key_of(text) for text in texts],
            producer_name=name,
            topic=topic.name,
            producer_id=PRODUCER,
            session=session,
            first_sequence=sequence,
        )
        receipt = await topic.submit_batch(batch)
        given(topic, receipt.offset + len(texts) - 1, receipt.epoch)
        return _answer(node, topic, receipt.offset, receipt.epoch)

    return submit


def _shouting(texts: Sequence[str], name: str) -> Callable[[Node, AnyTopic], Coroutine[Any, Any, None]]:
    async def publish(node: Node, topic: AnyTopic) -> None:
        assert not topic.reliable
        topic.publish_batch([Envelope(text.encode(), node.clock.time_us(), key_of(text), name) for text in texts])

    return publish


def _publication(
    text: str, name: str, given: Callable[[Topic, int, int], None] = lambda topic, offset, epoch: None
) -> Callable[[Node, AnyTopic], Coroutine[Any, Any, Answer]]:
    async def publish(node: Node, topic: AnyTopic) -> Answer:
        producer = await topic.add_producer(name)
        epoch = topic.ownership.epoch
        offset = await topic.publish(producer, Envelope(text.encode(), node.clock.time_us(), key_of(text), name))
        if topic.reliable:
            given(topic, offset, epoch)
        return _answer(node, topic, offset, epoch)

    return publish
