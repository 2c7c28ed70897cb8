"""Applications with real clients (`pydanube.Client`) in a simulated cluster: their bytes go over wires that break.

    Application ─► Client ─► producers, consumers, readers, visitors of several topics, on one connection per broker

An application is a process: it is killed, or closes its client, and starts again, until everything is to come to rest.
Its answers are written into the same history as those of model clients (cluster_clients.py). Whatever only the
broker knows, such as whose delivery a message was, and that an acknowledgement was taken, comes from native_watch.py.

A send that fails, or has no answer in time, may be stored or not. Half of those messages are sent again, which is
another message to the broker; so they may be there twice. All else that an idempotent producer sends is there once.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from random import Random
from typing import Any, Final, TypeAlias

from pydanube.client.client import Client
from pydanube.client.consumer import Consumer
from pydanube.client.messages import Message, MessageBatch, Receipt
from pydanube.client.producer import Producer
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import SubscriptionKind, type_name
from pydanube.errors import DanubeError, DeadlineExceeded, OffsetOutOfRange
from pydanube.formats.batch import messages as messages_of
from pydanube.testing.history import Acked, Fetched, Flushed, Got
from pydanube.testing.loop import EPOCH_US, Process
from pydanube.testing.wires import WireFaults
from tools.sim.cluster_clients import (
    FETCH_SECONDS,
    FETCHED_MAX,
    PAUSE_SECONDS,
    POISON,
    THINKS_SECONDS,
    VISIT_SECONDS,
    VISITOR,
    Clients,
    key_of,
    number_of,
)
from tools.sim.native_watch import NativeWatch, Sight

Role: TypeAlias = Callable[[Client], Coroutine[Any, Any, None]]

REAL: Final = 0.45  # of the producers, consumers and readers are real ones
APPLICATIONS: Final = (1, 2, 2, 3)
LIFE_SECONDS: Final = (40.0, 150.0, 1000.0)  # how long an application runs, at most
OPEN_SECONDS: Final = (40.0, 150.0, 300.0)  # likewise a producer or consumer; connections end more often than that
TIMEOUT_SECONDS: Final = (3.0, 15.0, 60.0)  # of a client's calls
HELD_MAX: Final = 4  # messages that an application answers together
WINDOWS: Final = (None, None, 1, 8)
FOREVER_SECONDS: Final = 10_000.0


def wire_faults(seed: int) -> WireFaults:
    """What the wires of a seed do. In one of four they do nothing but take their time."""
    rng = Random(seed ^ 0x31BE)
    if rng.random() < 0.25:
        return WireFaults(delay_max_seconds=rng.choice((0.0005, 0.05)))
    return WireFaults(
        delay_max_seconds=rng.choice((0.0005, 0.02, 0.2)),
        cut=rng.choice((0.0, 0.1)),
        drop=rng.choice((0.002, 0.01, 0.03)),
        linger_max_seconds=rng.choice((0.0, 1.0, 8.0)),
        refuse=rng.choice((0.0, 0.1)),
        lose=rng.choice((0.0, 0.05)),
    )


@dataclass(slots=True)
class Sending:
    """A producer, over the lives of its application."""

    topic: TopicName
    name: str
    once: bool  # idempotent
    until: float
    reliable: bool = True
    number: int = 0


@dataclass(slots=True)
class Receiving:
    """A consumer, likewise."""

    topic: TopicName
    subscription: SubscriptionName
    kind: SubscriptionKind
    name: str


@dataclass(slots=True)
class Unflushed:
    """What an application has acknowledged since it last asked whether that was taken."""

    acks: list[tuple[str, int]] = field(default_factory=list)


class RealClients:
    """All applications of one run. They work as long as `clients`, the model clients of the run, do."""

    def __init__(self, clients: Clients, watch: NativeWatch, rng: Random) -> None:
        self._clients = clients
        self._watch = watch
        self._rng = rng
        self._cluster = clients.cluster
        self._history = clients.history
        self._applications: list[list[Role]] = [[] for _ in range(rng.choice(APPLICATIONS))]

    def wants(self) -> bool:
        """Whether the next client is a real one."""
        return self._rng.random() < REAL

    def produce(self, topic: TopicName, *, until: float, once: bool) -> None:
        name = f"{'native' if once else 'plain'}-{number_of(topic)}"
        self._add(partial(self._produce, Sending(topic, name, once, until)))

    def shout(self, topic: TopicName, *, until: float) -> None:
        self._add(partial(self._produce, Sending(topic, f"fanout-{number_of(topic)}", False, until, reliable=False)))

    def consume(self, topic: TopicName, name: SubscriptionName, kind: SubscriptionKind, consumer: str) -> None:
        self._add(partial(self._consume, Receiving(topic, name, kind, consumer)))

    def fetch(self, topic: TopicName) -> None:
        self._add(partial(self._fetch, topic, [0]))

    def visit(self, topic: TopicName) -> None:
        self._add(partial(self._visits, topic))

    def start(self) -> None:
        for number, roles in enumerate(self._applications):
            if roles:
                self._clients.start(self._live(number, roles))

    def _add(self, role: Role) -> None:
        self._rng.choice(self._applications).append(role)

    # --- applications ---------------------------------------------------------------------------------------

    async def _live(self, number: int, roles: Sequence[Role]) -> None:
        """One process after the other, until cancelled."""
        tasks: list[asyncio.Task[None]] = []
        client: Client | None = None
        lives = 0
        try:
            while True:
                lives += 1
                process = Process(f"application {number}.{lives}")
                connector = self._cluster.wires.connector()
                client = self._cluster.client(timeout=self._rng.choice(TIMEOUT_SECONDS), connector=connector)
                tasks = [process.spawn(role(client), name=f"application {number}") for role in roles]
                await self._clients.pause(10.0, self._rng.choice(LIFE_SECONDS))
                if self._clients.quiet:
                    await asyncio.Event().wait()
                if self._rng.random() < 0.5:
                    _raise_failed(tasks)
                    process.kill()
                    connector.break_all()
                else:
                    await _end(tasks, client)
                tasks, client = [], None
                await self._clients.pause(0.1, 5.0)
        finally:
            if client is not None:
                await _end(tasks, client)

    # --- sending --------------------------------------------------------------------------------------------

    async def _produce(self, it: Sending, client: Client) -> None:
        clients, rng = self._clients, self._rng
        if not it.number:
            await clients.pause(0.0, PAUSE_SECONDS[1])
        while self._publishes(it.until):
            producer = client.producer(
                it.topic,
                name=it.name,
                idempotent=it.once,
                reliable=it.reliable,
                create=False,
                linger=rng.choice((0.0, 0.0, 0.05)),
                batch_messages=rng.choice((1, 2, 1000)),
            )
            until = min(it.until, clients.now() + rng.uniform(5.0, rng.choice(OPEN_SECONDS)))
            with contextlib.suppress(DanubeError):
                async with producer:
                    while self._publishes(until) and await self._send(it, producer):
                        await clients.between()
            await clients.pause(0.2, 2.0)

    def _publishes(self, until: float) -> bool:
        return self._clients.publishing and self._clients.now() < until

    async def _send(self, it: Sending, producer: Producer) -> bool:
        """A few messages together. False: this producer can send no more."""
        texts = [self._clients.text(it.name, it.number + row) for row in range(self._rng.choice((1, 1, 2, 4)))]
        if not it.reliable:
            texts = [text.removesuffix(POISON) for text in texts]
        it.number += len(texts)
        failed = await self._publish(it, producer, texts, once=it.once)
        if failed and it.reliable and self._rng.random() < 0.5:
            failed = await self._publish(it, producer, failed, once=False)
        return len(failed) < len(texts)

    async def _publish(self, it: Sending, producer: Producer, texts: list[str], *, once: bool) -> list[str]:
        """Returns what has no receipt."""
        self._clients.sent(it.topic, texts, once=once)
        waiting: list[Awaitable[Receipt]] = []
        with contextlib.suppress(DanubeError):
            for text in texts:
                waiting.append(producer.send_soon(text.encode(), key=key_of(text)))
        answers = await asyncio.gather(*waiting, return_exceptions=True)
        failed = texts[len(answers) :]
        for text, answer in zip(texts, answers, strict=False):
            if isinstance(answer, Receipt):
                if it.reliable:
                    self._acked(it.topic, text, answer)
            elif isinstance(answer, DanubeError):
                failed.append(text)
            else:
                raise answer
        return failed

    def _acked(self, topic: TopicName, text: str, receipt: Receipt) -> None:
        label = self._watch.life_of(topic, receipt.epoch)
        broker = 0 if receipt.duplicate else self._watch.answered_by(label, receipt.offset)
        self._history.add(Acked(label, text, receipt.offset, receipt.epoch, broker, self._clients.now()))

    # --- receiving ------------------------------------------------------------------------------------------

    async def _consume(self, it: Receiving, client: Client) -> None:
        clients, rng = self._clients, self._rng
        kind: Any = type_name(it.kind.value.lower())
        while clients.working:
            until = clients.now() + rng.uniform(5.0, rng.choice(OPEN_SECONDS))
            window = rng.choice(WINDOWS)
            consumer = client.consumer(
                it.topic,
                subscription=it.subscription,
                name=it.name,
                type=kind,
                start="earliest",
                window_messages=window,
            )
            receive = self._receive_batches if rng.random() < 0.3 else self._receive
            with contextlib.suppress(DanubeError):
                async with consumer:
                    await receive(it, consumer, until)
                    if rng.random() < 0.5:
                        await consumer.close()
            await clients.pause(0.2, 2.0)

    def _goes_on(self, until: float) -> bool:
        return self._clients.working and (self._clients.quiet or self._clients.now() < until)

    def _seconds(self, until: float) -> float:
        return FOREVER_SECONDS if self._clients.quiet else max(0.05, until - self._clients.now())

    async def _receive(self, it: Receiving, consumer: Consumer, until: float) -> None:
        """Message by message. Some are held for a while, and answered with others."""
        held: list[tuple[Message, Sight]] = []
        asked = Unflushed()
        while self._goes_on(until):
            try:
                message = await consumer.receive(timeout=0.3 if held else self._seconds(until))
            except DeadlineExceeded:
                pass
            else:
                sight = self._watch.sight(message.lane, message.offset)
                held.append((message, sight))
                self._got(it, sight, message.payload, message.offset, message.key, message.attempt, message.attributes)
                if not self._clients.quiet and len(held) < HELD_MAX and self._rng.random() < 0.3:
                    continue
            await self._think()
            if held and not self._clients.quiet and self._rng.random() < 0.05:
                with contextlib.suppress(DanubeError):
                    await held[0][0].extend(5.0)
            for message, sight in held:
                if self._refuses(message.payload, sight):
                    await message.nack(0.1, reason="it is to fail")
                else:
                    await message.ack()
                    asked.acks.append((sight.topic, message.offset))
            held.clear()
            await self._perhaps_flush(it, consumer, asked)
            if not self._clients.quiet and self._rng.random() < 0.02:
                await consumer.stop()
                return

    async def _receive_batches(self, it: Receiving, consumer: Consumer, until: float) -> None:
        """As Arrow, batch by batch."""
        asked = Unflushed()
        batches = consumer.batches()
        while self._goes_on(until):
            try:
                async with asyncio.timeout(self._seconds(until)):
                    batch = await anext(batches)
            except (TimeoutError, StopAsyncIteration):
                return
            sights = self._got_batch(it, batch)
            await self._think()
            if any(self._refuses(payload, sight) for payload, _, sight in sights):
                await batch.nack(0.1, reason="one of it is to fail")
            else:
                await batch.ack()
                asked.acks += [(sight.topic, offset) for _, offset, sight in sights]
            await self._perhaps_flush(it, consumer, asked)

    def _got_batch(self, it: Receiving, batch: MessageBatch) -> list[tuple[bytes, int, Sight]]:
        delivery = batch._delivery
        payloads, keys, attributes = (delivery.column(name) for name in ("payload", "routing_key", "attributes"))
        found: list[tuple[bytes, int, Sight]] = []
        for offset in (offset for each in batch.offsets for offset in each):
            sight, row = self._watch.sight(delivery.lane, offset), offset - delivery.batch.header.base_offset
            self._got(it, sight, payloads[row], offset, keys[row], batch.attempt, dict(attributes[row] or ()))
            found.append((payloads[row], offset, sight))
        return found

    def _got(
        self,
        it: Receiving,
        sight: Sight,
        payload: bytes,
        offset: int,
        key: str | None,
        attempt: int,
        attributes: dict[str, str],
    ) -> None:
        # What a lost owner had sent may arrive when the next one, which does not have it, has delivered more.
        is_late = sight.late or self._watch.is_replaced(it.topic, sight.epoch)
        rescued = is_late or "x-danube-rescued" in attributes
        text, now = payload.decode(), self._clients.now()
        got = Got(sight.topic, it.subscription, it.name, text, offset, key or "", attempt, sight.epoch, rescued, now)
        self._history.add(got)

    async def _think(self) -> None:
        if self._rng.random() < 0.2:
            longest = THINKS_SECONDS[0 if self._clients.quiet else self._rng.randrange(2)]
            await asyncio.sleep(self._rng.random() * longest)

    def _refuses(self, payload: bytes, sight: Sight) -> bool:
        is_poison = payload.endswith(POISON.encode()) and sight.gives_up
        return is_poison or (not self._clients.quiet and self._rng.random() < 0.03)

    async def _perhaps_flush(self, it: Receiving, consumer: Consumer, asked: Unflushed) -> None:
        """Now and then the application wants to know whether its acknowledgements were taken."""
        if not asked.acks or self._rng.random() < 0.6:
            return
        acks, asked.acks = asked.acks, []
        with contextlib.suppress(DanubeError):
            await consumer.flush(timeout=self._rng.choice((2.0, 30.0)))
            for topic, offset in acks:
                self._history.add(Flushed(topic, it.subscription, offset, it.name, self._clients.now()))

    # --- reading --------------------------------------------------------------------------------------------

    async def _fetch(self, topic: TopicName, at: list[int], client: Client) -> None:
        """Reads the log by offsets, from its beginning on; `at` is where it goes on."""
        while self._clients.working:
            await self._clients.pause(*FETCH_SECONDS)
            try:
                async for first, end, batches in client.fetch(topic, at[0], at[0] + FETCHED_MAX).stored():
                    for batch in batches:
                        header = batch.header
                        label = self._watch.life_of(topic, header.epoch)
                        for offset, each in enumerate(messages_of(batch), header.base_offset):
                            if first <= offset < end:
                                fetched = Fetched(label, each.payload.decode(), offset, self._clients.now())
                                self._history.add(fetched)
                                at[0] = offset + 1
            except OffsetOutOfRange as gap:
                at[0] = gap.first
            except DanubeError:
                pass

    async def _visits(self, topic: TopicName, client: Client) -> None:
        """Now and then a consumer with a subscription of its own, which seeks anywhere, reads a little, and leaves."""
        while self._clients.working:
            await self._clients.pause(*VISIT_SECONDS)
            if not self._clients.quiet:
                with contextlib.suppress(DanubeError):
                    await self.visit_once(client, topic, stays=self._rng.random() < 0.3)

    async def visit_once(self, client: Client, topic: TopicName, *, stays: bool = False) -> None:
        """Raises DanubeError."""
        async with client.consumer(topic, subscription=VISITOR, name="visitor", start="earliest") as consumer:
            info = await client.describe_topic(topic)
            if info.reliable:
                now_us = EPOCH_US + round(self._clients.now() * 1_000_000)
                await consumer.seek(datetime.fromtimestamp(0, UTC) + timedelta(microseconds=now_us - 40_000_000))
            with contextlib.suppress(DeadlineExceeded):
                while True:
                    message = await consumer.receive(timeout=0.3)
                    with contextlib.suppress(DanubeError):
                        await message.extend(5.0)
                    await message.ack()
            if info.reliable:
                await client.lag(topic, VISITOR)
        if not stays:
            await client.unsubscribe(topic, VISITOR)


async def _end(tasks: Sequence[asyncio.Task[None]], client: Client) -> None:
    """The application leaves in order."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    _raise_failed(tasks)
    await client.close()


def _raise_failed(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()
