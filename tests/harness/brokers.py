"""A whole broker on memory ports, and short words for what tests do to it.

    host = BrokerFixture()
    broker = await host.boot()
    orders = await make_topic(broker)
    stream = await consume(orders, "sub", Kind.SHARED)
    await publish(orders, "a", "b")
    await settle()
    assert stream.texts == ["a", "b"]
    host.kill()                       # kill -9: nothing of it ever runs again
    broker = await host.boot()        # the same disk and the same metadata

Everything runs on the simulator's loop. Time passes only when nobody has anything left to do, so `settle` waits for
all that can happen now and `asyncio.sleep(5)` is five seconds that cost nothing.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from random import Random
from typing import Any, Final, NamedTuple

from pydanube.broker import service
from pydanube.broker.outbox import DeliveredMessage, Outbox
from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.broker.volatile_topic import VolatileTopic
from pydanube.config import Config, DispatchConfig, StorageConfig
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.history.tiers import TierConfig
from pydanube.core.names import ConsumerId, ProducerId, SubscriptionName, TopicName
from pydanube.core.policies import UNLIMITED, Delivery, TopicPolicy
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import Unreachable
from pydanube.formats.batch import Envelope
from pydanube.log.wal import WalConfig
from pydanube.ports import Compare, Delete, Item, Put, Revision
from pydanube.schema.answering import Answering
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.stores.schemas.memory import MemorySchemaParsers
from pydanube.testing.loop import Process, SimClock, SimLoop, SimWork
from tools.sim.log_history import small_constants

ORDERS: Final = TopicName("/default/orders")
SUB: Final = SubscriptionName("sub")
OFF: Final = Heartbeat.parse("off")
MOMENT: Final = 1e-6  # the shortest time that lets everything happen that can happen without time passing
KIB: Final = 1024

# What a broker on a real disk sets aside; the same code with less of it.
SMALL: Final = {
    "group_bytes": 256 * KIB,
    "journal_bytes": 64 * KIB,
    "copy_bytes": 64 * KIB,
    "cache_bytes": 1024 * KIB,
    "ballast_bytes": 4 * KIB,
}


def simulated(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test on the simulator's loop. An error that nobody took fails it."""

    @functools.wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        loop = SimLoop(Random(0), shuffled=False)  # type: ignore[abstract]
        try:
            with small_wal():
                loop.run_until_complete(test(*arguments, **named))
            assert not loop.problems, loop.problems
        finally:
            loop.close()

    return run


@contextmanager
def small_wal(**changes: int) -> Iterator[None]:
    """Brokers started meanwhile have a log that is small beside a test."""
    saved = service.WalConfig  # type: ignore[attr-defined]
    service.WalConfig = functools.partial(WalConfig, **{**SMALL, **changes})  # type: ignore[misc, assignment, attr-defined]
    try:
        with small_constants():
            yield
    finally:
        service.WalConfig = saved  # type: ignore[misc, attr-defined]


async def settle() -> None:
    """Returns when everything has happened that can happen now."""
    await asyncio.sleep(MOMENT)


def now() -> float:
    return asyncio.get_running_loop().time()


# --- hosts --------------------------------------------------------------------------------------------


class Metadata(MemoryMetadataStore):
    """Counts transactions that say something; does not answer while it is `away`, or whoever is dead."""

    def __init__(self, clock: SimClock) -> None:
        super().__init__(clock)
        self.away = False
        self.written: list[Sequence[Put | Delete]] = []

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        if self.away:
            raise Unreachable("metadata", "it is away")
        revision = await super().transact(compares, operations)
        if revision is not None and operations:
            self.written.append(operations)
        return revision

    def writes_of(self, suffix: str) -> int:
        """In how many transactions a key with this ending was put."""
        return sum(
            any(isinstance(each, Put) and each.key.endswith(suffix) for each in operations)
            for operations in self.written
        )

    async def value(self, key: str) -> bytes | None:
        item: Item | None = await self.get(key)
        return item.value if item else None


class Mortal:
    """One process's access to a store: after its death no call returns, and none changes anything."""

    def __init__(self, under: Any) -> None:
        self._under = under
        self.dead = False

    def list(self, prefix: str, **named: Any) -> Any:
        listing = self._under.list(prefix, **named)
        return self._dies(listing) if hasattr(listing, "__await__") else listing

    async def _dies(self, answer: Any) -> Any:
        if self.dead:
            await asyncio.get_running_loop().create_future()
        return await answer

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._under, name)

        async def call(*arguments: Any, **named: Any) -> Any:
            if self.dead:
                await asyncio.get_running_loop().create_future()
            return await method(*arguments, **named)

        return call


class BrokerFixture:
    """A disk and a metadata store that outlive the brokers that run on them, one at a time."""

    def __init__(
        self,
        *,
        heartbeat: Heartbeat | None = None,
        unacked_max: int = 10,
        policies: TopicPolicy = UNLIMITED,
        tier: TierConfig | None = None,
        objects: MemoryObjectStore | None = None,
        segment_bytes: int = 64 * KIB * KIB,
    ) -> None:
        self.clock = SimClock()
        self.objects = objects or (MemoryObjectStore() if tier else None)
        self.metadata = Metadata(self.clock)
        self.disk = MemoryDisk()
        self.config = Config(
            dispatch=DispatchConfig(max_unacked_messages=unacked_max, heartbeat=heartbeat or Heartbeat()),
            policies=policies,
            storage=StorageConfig(tier=tier or TierConfig(), segment_bytes=segment_bytes),
        )
        self.boots = 0
        self.work = SimWork(Random(1))

    async def boot(self) -> Broker:
        self.boots += 1
        self._access = self.disk.another_process(self.boots)
        self._store = self.port(self.metadata)
        self._objects = self.port(self.objects) if self.objects else None
        self._process = Process(f"broker {self.boots}")
        starting = Broker.start_on(
            self.config,
            disk=self._access,
            metadata=self._store,
            clock=self.clock,
            work=self.work,
            objects=self._objects,
            parsers=MemorySchemaParsers(Answering().answer),
        )
        self.broker: Broker = await self._process.call(starting)
        return self.broker

    def port(self, under: Any) -> Mortal:
        """The way of the next process to a store."""
        return Mortal(under)

    def kill(self) -> None:
        """kill -9."""
        self._store.dead = True
        if self._objects is not None:
            self._objects.dead = True
        self._process.kill()
        self._access.end_process()

    async def restart(self) -> Broker:
        """An orderly stop and a new start."""
        await self.broker.stop()
        self._process.kill()
        return await self.boot()


async def make_topic(broker: Broker, name: str = ORDERS) -> Topic:
    topic = await broker.topics.create(TopicName(name), delivery=Delivery.RELIABLE)
    assert isinstance(topic, Topic)
    return topic


async def find_topic(broker: Broker, name: str = ORDERS) -> Topic:
    topic = await broker.topics.require(TopicName(name))
    assert isinstance(topic, Topic)
    return topic


async def make_volatile(broker: Broker, name: str = ORDERS) -> VolatileTopic:
    topic = await broker.topics.create(TopicName(name), delivery=Delivery.NON_RELIABLE)
    assert isinstance(topic, VolatileTopic)
    return topic


async def one_topic(host: BrokerFixture) -> tuple[Broker, Topic]:
    broker = await host.boot()
    return broker, await make_topic(broker)


# --- clients ------------------------------------------------------------------------------------------


def message(text: str, *, key: str | None = None, producer: str = "producer", **more: Any) -> Envelope:
    return Envelope(text.encode(), 1_704_067_200_000_000, key, producer, **more)


async def publish(topic: Topic | VolatileTopic, *texts: str, key: str | None = None) -> list[int]:
    """All at once, as concurrent clients do; their offsets."""
    producer = await topic.add_producer("producer")
    return list(await asyncio.gather(*(topic.publish(producer, message(text, key=key)) for text in texts)))


async def publish_many(topic: Topic, count: int, *, at_once: int = 100) -> None:
    producer: ProducerId = await topic.add_producer("producer")
    for start in range(0, count, at_once):
        numbers = range(start, min(count, start + at_once))
        await asyncio.gather(*(topic.publish(producer, message(str(number))) for number in numbers))


class Arrival(NamedTuple):
    at: float
    delivered: DeliveredMessage


class Stream:
    """A consumer whose stream is open: takes everything as soon as it comes, and acknowledges it if `acks`."""

    def __init__(self, topic: Topic | VolatileTopic, subscription: Any, consumer: ConsumerId, *, acks: bool) -> None:
        self.topic = topic
        self.subscription: Subscription = subscription
        self.consumer = consumer
        self.acks = acks
        self.arrivals: list[Arrival] = []
        self.outbox: Outbox = subscription.attach(consumer)  # type: ignore[type-arg]
        self.over = False
        self._reading = asyncio.create_task(self._read(), name=f"stream {consumer}")

    async def _read(self) -> None:
        while True:
            messages = await self.outbox.get()
            if not messages:
                self.over = True
                return
            self.arrivals += [Arrival(now(), each) for each in messages]
            if self.acks:
                for each in messages:
                    self.subscription.ack(each.offset)

    @property
    def texts(self) -> list[str]:
        return [each.delivered.message.payload.decode() for each in self.arrivals]

    @property
    def offsets(self) -> list[int]:
        return [each.delivered.offset for each in self.arrivals]

    @property
    def attempts(self) -> list[int]:
        return [each.delivered.attempt for each in self.arrivals]

    def ack(self, *offsets: int) -> None:
        for offset in offsets:
            self.subscription.ack(offset)

    def ack_all(self) -> None:
        self.ack(*self.offsets)

    def nack(self, offset: int, delay_seconds: float = 0.0, reason: str = "") -> None:
        self.subscription.nack(offset, delay_seconds, reason)

    def leave(self) -> None:
        """The connection ends."""
        self._reading.cancel()
        self.subscription.detach(self.consumer, self.outbox)

    async def come_back(self) -> Stream:
        """The same consumer opens its stream again."""
        return Stream(self.topic, self.subscription, self.consumer, acks=self.acks)


async def consume(
    topic: Topic | VolatileTopic,
    subscription: str = SUB,
    kind: Kind = Kind.SHARED,
    consumer: str = "consumer",
    *,
    acks: bool = False,
    start: int | None = None,
    key_filters: tuple[str, ...] = (),
) -> Stream:
    name = SubscriptionName(subscription)
    identity = await topic.subscribe(name, kind, consumer, key_filters, start)
    return Stream(topic, topic.require(name), identity, acks=acks)


def numbers(count: int, first: int = 0) -> list[str]:
    """What `publish_many` sends."""
    return [str(number) for number in range(first, first + count)]


def stop_notifier(subscription: Subscription) -> None:
    """Chaos: the task that hears of commits dies."""
    assert subscription._notifier is not None
    subscription._notifier.cancel()
