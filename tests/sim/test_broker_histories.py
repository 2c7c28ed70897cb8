"""Random lives of one broker: producers, consumers of every kind, kills, power cuts, and the promises that must hold.

A history is several boots of one broker on one FaultyDisk and one metadata store. Clients live outside: they remember
what was acknowledged to them and what they acknowledged. The checks:

    no acknowledged publish is lost          it is in the log, at the offset that was promised
    no offset is given out twice             two acknowledged publishes never share one
    cursors never skip                       whatever is written as done was acknowledged by a consumer before
    at least once, and in the end            when faults stop, every committed message reaches every subscription
    the order of a key                       Key-Shared: of one key, nothing is acknowledged before what came earlier

Three planted defects show that the checks would notice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator, Sequence
from random import Random
from typing import Any, Final

import pytest

from pydanube.broker import topic_reader
from pydanube.broker.cursors import Cursors
from pydanube.broker.outbox import DeliveredMessage, Outbox
from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.config import Config, DispatchConfig
from pydanube.core import keys
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.events import AckReceived
from pydanube.core.dispatch.ranges import OffsetRange, OffsetRanges
from pydanube.core.dispatch.window import SavedPosition
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import Delivery
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.errors import DanubeError
from pydanube.formats.batch import Envelope
from pydanube.log import reader
from pydanube.ports import Compare, Delete, Put, Revision
from pydanube.testing.disk_faults import Faults
from pydanube.testing.faulty_disk import FaultyDisk
from pydanube.testing.loop import Process, ProcessDied, SimClock, SimLoop, SimWork
from tests.harness.brokers import Metadata, Mortal, small_wal

HISTORIES: Final = 60
HISTORIES_LONG: Final = 3_000
CHUNKS: Final = 3
BOOTS_MAX: Final = 4
CALM_SECONDS: Final = 120.0
PATIENT: Final = FailurePolicy(max_redelivery_count=10_000, base_redelivery_delay_ms=200, max_redelivery_delay_ms=2_000)

pytestmark = pytest.mark.slow


class Broken(AssertionError):
    """A promise was not kept."""


class Ledger:
    """What the clients of one topic know."""

    def __init__(self, name: TopicName) -> None:
        self.name = name
        self.promised: dict[int, bytes] = {}  # offset -> payload, acknowledged to a producer
        self.acked: dict[SubscriptionName, list[int]] = {}  # in the order of the acks, by consumers
        self.keys: dict[int, str] = {}

    def promise(self, offset: int, payload: bytes) -> None:
        if self.promised.setdefault(offset, payload) != payload:
            raise Broken(f"{self.name}: offset {offset} was given out twice")

    def check_cursor(self, subscription: SubscriptionName, done: OffsetRanges) -> None:
        known = set(self.acked.get(subscription, ()))
        for first, end in done:
            skipped = [offset for offset in range(first, end) if offset not in known]
            if skipped:
                raise Broken(f"{self.name} {subscription}: the cursor skips {skipped[:5]}, never acknowledged")

    def check_key_order(self, subscription: SubscriptionName) -> None:
        latest: dict[str, int] = {}
        seen: set[int] = set()
        for offset in self.acked[subscription]:
            if offset in seen:
                continue
            seen.add(offset)
            key = self.keys[offset]
            if offset < latest.get(key, -1):
                raise Broken(f"{self.name} {subscription}: key {key}: {offset} came after {latest[key]}")
            latest[key] = offset


class WatchedMetadata(Metadata):
    """Checks every cursor that is written."""

    def __init__(self, clock: SimClock, ledgers: Sequence[Ledger]) -> None:
        super().__init__(clock)
        self._ledgers = {ledger.name: ledger for ledger in ledgers}
        self.broken: Broken | None = None

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        values = {each.key: each.value for each in operations if isinstance(each, Put)}
        for key, value in values.items():
            parsed = keys.subscription_of_cursor(key)
            if parsed is None:
                continue
            topic, subscription = parsed
            cursor = int(value)
            done = OffsetRanges([(0, cursor + 1)] if cursor >= 0 else [])
            holes = values.get(keys.ack_holes(topic, subscription))
            for first, end in OffsetRanges.decode(holes, cursor + 1) or () if holes else ():
                done.add(first, end)
            try:
                self._ledgers[topic].check_cursor(subscription, done)
            except Broken as broken:
                self.broken = self.broken or broken
        return await super().transact(compares, operations)


class History:
    def __init__(self, seed: int) -> None:
        self.rng = Random(seed)
        self.clock = SimClock()
        self.disk = FaultyDisk(Random(self.rng.randrange(2**62)), faults=Faults(delays=0.02, delay_seconds_max=0.3))
        self.ledgers = [
            Ledger(TopicName(f"/default/t{number}"))
            for number in range(self.rng.choice((1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2, 9)))
        ]
        self.metadata = WatchedMetadata(self.clock, self.ledgers)
        self.work = SimWork(Random(self.rng.randrange(2**62)))
        dispatch = DispatchConfig(max_unacked_messages=self.rng.choice((1, 3, 10, 50)))
        self.config = Config(dispatch=dispatch)
        self.sent = 0
        self.delivered = 0
        self.boots = 0
        self.calm = False
        self.clients: list[asyncio.Task[None]] = []

    async def live(self) -> None:
        for _ in range(self.rng.randint(1, BOOTS_MAX)):
            try:
                await asyncio.wait_for(self._boot(), self.rng.choice((0.05, 1000, 1000, 1000)))
            except (TimeoutError, ProcessDied):
                self._die()  # in the middle of starting
                continue
            self._start_clients()
            await self.clock.sleep(self.rng.choice((0.3, 2.0, 8.0)) * self.rng.random())
            if self.rng.random() < 0.25:
                await self._leave(self.process.call(self.broker.stop()))
            self._die()
        await self._end_well()

    # --- the broker ---

    async def _boot(self) -> None:
        self.boots += 1
        self.access = self.disk.process(self.boots)
        self.store = Mortal(self.metadata)
        self.process = Process(f"broker {self.boots}")
        self.broker: Broker = await self.process.call(
            Broker.start_on(self.config, disk=self.access, metadata=self.store, clock=self.clock, work=self.work)
        )
        if self.broker.topics.unopened:
            raise Broken(f"not opened: {self.broker.topics.unopened}")
        for ledger in self.ledgers:
            if not await self.broker.topics.exists(ledger.name):
                await self.process.call(self.broker.topics.create(ledger.name, delivery=Delivery.RELIABLE))
            for kind in Kind:
                await self.process.call(
                    self.broker.topics.set_failure_policy(ledger.name, SubscriptionName(kind.value), PATIENT)
                )

    def _die(self) -> None:
        for client in self.clients:
            client.cancel()
        self.clients.clear()
        self.store.dead = True
        self.process.kill()
        if self.rng.random() < 0.5:
            self.disk.kill(self.access)
        else:
            self.disk.crash()

    async def _leave(self, request: Coroutine[Any, Any, Any]) -> None:
        with contextlib.suppress(TimeoutError, ProcessDied):
            await asyncio.wait_for(request, self.rng.choice((0.01, 60.0)))

    # --- the clients ---

    def _start_clients(self) -> None:
        start = asyncio.create_task
        for ledger in self.ledgers:
            topic = self.broker.topics.get(ledger.name)
            assert isinstance(topic, Topic)
            self.clients += [start(self._produce(ledger, topic, number)) for number in range(self.rng.randint(1, 3))]
            for kind in Kind:
                count = 1 if kind is Kind.EXCLUSIVE else self.rng.randint(1, 3)
                self.clients += [start(self._consume(ledger, topic, kind, f"c{number}")) for number in range(count)]
            if self.rng.random() < 0.3:
                self.clients.append(start(self._chaos(topic)))

    async def _produce(self, ledger: Ledger, topic: Topic, number: int) -> None:
        name = f"p{number}"
        identity = await topic.add_producer(name)
        if self.calm:
            await self.clock.sleep(1)
        for _ in range(3 if self.calm else self.rng.choice((3, 10, 30)) // len(self.ledgers) + 1):
            self.sent += 1
            key = f"k{self.rng.randrange(5)}"
            payload = f"{key} {self.sent}".encode()
            try:
                send = topic.publish(identity, Envelope(payload, self.clock.time_us(), key, name))
                ledger.promise(await self.process.call(send), payload)
            except (ProcessDied, DanubeError):
                return
            await self.clock.sleep(self.rng.choice((0.0, 0.0, 0.01, 0.3)))

    async def _consume(self, ledger: Ledger, topic: Topic, kind: Kind, name: str) -> None:
        """Joins, reads, answers somehow, leaves and comes back, as long as the broker lives."""
        sub = SubscriptionName(kind.value)
        while True:
            try:
                identity = await self.process.call(topic.subscribe(sub, kind, name, (), 0))
                subscription = topic.require(sub)
                if not self.calm and self.rng.random() < 0.1:
                    await self.clock.sleep(12)  # subscribed, and no stream
                    continue
                outbox: Outbox[DeliveredMessage] = self.process.run(subscription.attach, identity)
            except (ProcessDied, DanubeError):
                if not self.process.alive:
                    return
                await self.clock.sleep(0.5)
                continue
            until = None if self.calm else self.clock.elapsed() + self.rng.choice((0.5, 5.0, 60.0)) * self.rng.random()
            await self._read(ledger, subscription, outbox, until)
            self.process.run(subscription.detach, identity, outbox)
            await self.clock.sleep(self.rng.choice((0.0, 0.3)))

    async def _read(
        self, ledger: Ledger, subscription: Subscription, outbox: Outbox[DeliveredMessage], until: float | None
    ) -> None:
        while True:
            try:
                async with asyncio.timeout(None if until is None else until - self.clock.elapsed()):
                    messages = await outbox.get()
            except TimeoutError:
                return
            if not messages:
                return
            if not self.calm:
                await self.clock.sleep(self.rng.choice((0.0, 0.0, 0.05)))
            for offset, message, _ in messages:
                self.delivered += 1
                self._check(ledger, offset, message)
                self._answer(ledger, subscription, offset)

    def _check(self, ledger: Ledger, offset: int, message: Envelope) -> None:
        if ledger.promised.get(offset, message.payload) != message.payload:
            raise Broken(f"{ledger.name}: offset {offset} is not what was promised")
        ledger.keys[offset] = message.routing_key or ""

    def _answer(self, ledger: Ledger, subscription: Subscription, offset: int) -> None:
        drawn = 1.0 if self.calm else self.rng.random()
        if drawn < 0.05:
            self.process.run(subscription.nack, offset, self.rng.choice((0.0, 0.7)))
        elif drawn >= 0.15:  # what lies between is never answered
            ledger.acked.setdefault(subscription.name, []).append(offset)
            self.process.run(subscription.ack, offset)

    async def _chaos(self, topic: Topic) -> None:
        await self.clock.sleep(self.rng.random())
        for subscription in topic.subscriptions.values():
            if self.rng.random() < 0.5 and subscription._notifier is not None:
                subscription._notifier.cancel()

    # --- the end ---

    async def _end_well(self) -> None:
        self.disk.faults = Faults(latency_seconds_max=0.0)
        self.calm = True
        await self._boot()
        for ledger in self.ledgers:
            topic = self.broker.topics.get(ledger.name)
            assert isinstance(topic, Topic)
            for kind in Kind:
                self.clients.append(asyncio.create_task(self._consume(ledger, topic, kind, "last")))
            self.clients.append(asyncio.create_task(self._produce(ledger, topic, 0)))
        await self.clock.sleep(15)  # the last messages come when everybody is there
        try:
            async with asyncio.timeout(CALM_SECONDS):
                while not all(self._is_served(ledger) for ledger in self.ledgers):
                    await self.clock.sleep(0.5)
        except TimeoutError:
            raise Broken("\n".join(self._standings())) from None
        for ledger in self.ledgers:
            await self._check_all(ledger)
        for client in self.clients:
            if client.done() and not client.cancelled() and (error := client.exception()):
                raise error
        await self.process.call(self.broker.stop())
        if self.metadata.broken:
            raise self.metadata.broken

    def _is_served(self, ledger: Ledger) -> bool:
        topic = self.broker.topics.get(ledger.name)
        assert isinstance(topic, Topic)
        return len(topic.subscriptions) == len(Kind) and not any(
            each.has_lag() for each in topic.subscriptions.values()
        )

    def _standings(self) -> Iterator[str]:
        for topic in self.broker.topics.loaded:
            for subscription in topic.subscriptions.values():
                assert isinstance(subscription, Subscription)
                yield f"{topic.name} {subscription.name}: {subscription.explain()}"

    async def _check_all(self, ledger: Ledger) -> None:
        topic = self.broker.topics.get(ledger.name)
        assert isinstance(topic, Topic)
        rows = dict(await topic.rows(0, topic.head))
        if list(rows) != list(range(topic.head)):
            raise Broken(f"{ledger.name}: the log has holes")
        for offset, payload in ledger.promised.items():
            if offset not in rows or rows[offset].payload != payload:
                raise Broken(f"{ledger.name}: acknowledged offset {offset} is lost")
        for kind in Kind:
            sub = SubscriptionName(kind.value)
            missing = set(rows) - set(ledger.acked.get(sub, ()))
            if missing:
                raise Broken(f"{ledger.name} {sub}: never delivered: {sorted(missing)[:5]}")
        if topic.head:
            ledger.check_key_order(SubscriptionName(Kind.KEY_SHARED.value))


@contextlib.contextmanager
def small_pieces() -> Iterator[None]:
    """Files are read in pieces that are small beside a history, so that there is more than one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topic_reader, "_READ_BYTES", 2048)
        patch.setattr(reader, "_PIECE_BYTES_MIN", 2048)
        yield


def live(seed: int) -> History:
    loop = SimLoop(Random(seed * 7 + 1), shuffled=seed % 4 != 0)  # type: ignore[abstract]
    history: list[History] = []

    async def main() -> None:
        history.append(History(seed))
        await history[0].live()

    try:
        with small_wal(), small_pieces():
            loop.run_until_complete(main())
        for problem in loop.problems:
            raise Broken(f"an error that nobody took: {problem['message']}: {problem.get('exception')!r}")
    except BaseException as error:
        raise Broken(f"seed {seed}: {type(error).__name__}: {error}") from error
    finally:
        loop.close()
    return history[0]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The broker reports every crash that it finds; thousands of lines would hide the one that matters."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_broker_keeps_its_promises_in_every_history(chunk: int) -> None:
    lived = [live(seed) for seed in range(chunk, HISTORIES, CHUNKS)]
    assert sum(len(ledger.promised) for each in lived for ledger in each.ledgers) > 200
    assert sum(each.delivered for each in lived) > 1_000
    assert sum(each.boots for each in lived) > len(lived) * 2


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_broker_keeps_its_promises_in_thousands_of_histories() -> None:
    for seed in range(HISTORIES, HISTORIES_LONG):
        live(seed)


def test_the_same_seed_gives_the_same_history() -> None:
    def told(seed: int) -> Any:
        history = live(seed)
        return history.sent, history.delivered, [ledger.acked for ledger in history.ledgers]

    assert [told(seed) for seed in range(4)] == [told(seed) for seed in range(4)]


# --- planted defects ------------------------------------------------------------------------------------------


def found(seeds: range) -> bool:
    for seed in seeds:
        try:
            live(seed)
        except Broken:
            return True
    return False


def test_a_cursor_that_runs_ahead_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Subscription.saved

    def ahead(self: Subscription) -> SavedPosition:
        position = saved(self)
        return position._replace(cursor=self._machine.progress.next_fresh - 1, holes=b"")

    monkeypatch.setattr(Subscription, "saved", ahead)
    assert found(range(20))


def test_messages_that_are_lost_when_a_consumer_leaves_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    disconnect = Subscription._disconnect

    def careless(self: Subscription, registration: Any, error: Any) -> None:
        held = [piece for piece in self._machine.in_flight if piece.value.consumer == registration.consumer_id]
        for piece in held:
            self._machine.step(AckReceived((OffsetRange(piece.first, piece.end),)), self._services.clock.elapsed())
        disconnect(self, registration, error)

    monkeypatch.setattr(Subscription, "_disconnect", careless)
    assert found(range(20))


def test_a_broker_that_never_beats_nor_notifies_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def deaf(self: Subscription) -> None:
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(Subscription, "_notify", deaf)
    monkeypatch.setattr(Subscription, "_beat", lambda self, now: None)
    assert found(range(20))


def test_cursors_that_are_never_written_are_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other way round: this is not a defect, only repetition, and no check may complain."""

    async def forgetful(self: Cursors, due: Any) -> None:
        pass

    monkeypatch.setattr(Cursors, "_save", forgetful)
    assert not found(range(8))
