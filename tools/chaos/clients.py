"""Applications that use a cluster while it is broken, and write down the answers they get.

Native producers and consumers share the event loop of the harness; official ones are processes (official.py),
which are started again when they die, or when they have been silent for long although there is something to receive.

    topic   producers                 subscriptions
    t0      native                    one: exclusive           two: key_shared, two consumers
    t1      native, native plain      one: shared, two         two: failover, two
    t2      official                  one: exclusive official  two: exclusive
    t3      native, official          one: shared, official and native   two: exclusive
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Coroutine, Sequence
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple, cast

import pydanube
from pydanube.client.messages import MessageBatch, ReceivedBatch, SubscriptionType
from pydanube.errors import DanubeError
from pydanube.testing.history import Acked, Done, Got, Sent, Subscribed
from tools.chaos.net import Network
from tools.chaos.recorder import Recorder

OFFICIAL: Final = Path(__file__).with_name("official.py")
KIND_IN_HISTORY: Final = {
    "exclusive": "Exclusive",
    "shared": "Shared",
    "failover": "Failover",
    "key_shared": "KeyShared",
}
KEYS: Final = 7
BATCH_MESSAGES: Final = (1, 1, 2, 5)
PATIENCE_SECONDS: Final = 900.0  # longer than a round: what was sent is sent until it is answered
FLUSH_SECONDS: Final = 0.2
IN_FLIGHT_MAX: Final = 50
SILENT_SECONDS: Final = 12.0
LINE_BYTES_MAX: Final = 1 << 20


class Wanted(NamedTuple):
    """A subscription, and how many consumers of either kind it has."""

    topic: str
    name: str
    kind: SubscriptionType
    native: int
    official: int


class Plan(NamedTuple):
    """Who sends and who receives."""

    native: Sequence[str]
    plain: Sequence[str]
    official: Sequence[str]
    subscriptions: Sequence[Wanted]

    @property
    def topics(self) -> list[str]:
        return sorted({each.topic for each in self.subscriptions})


def plan(chapter: int, *, official: bool, small: bool = False) -> Plan:
    """Topics get other names in every chapter of a run."""
    t0, t1, t2, t3 = (f"/default/c{chapter}-t{number}" for number in range(4))
    if small:
        return Plan([t0, t1], [], [], [Wanted(t0, "one", "exclusive", 1, 0), Wanted(t1, "one", "key_shared", 2, 0)])
    theirs = 1 if official else 0
    return Plan(
        native=[t0, t1, t3] if official else [t0, t1, t2, t3],
        plain=[t1],
        official=[t2, t3] if official else [],
        subscriptions=[
            Wanted(t0, "one", "exclusive", 1, 0),
            Wanted(t0, "two", "key_shared", 2, 0),
            Wanted(t1, "one", "shared", 2, 0),
            Wanted(t1, "two", "failover", 2, 0),
            Wanted(t2, "one", "exclusive", 1 - theirs, theirs),
            Wanted(t2, "two", "exclusive", 1, 0),
            Wanted(t3, "one", "shared", 1, theirs),
            Wanted(t3, "two", "exclusive", 1, 0),
        ],
    )


class Clients:
    """Every application of a chapter."""

    def __init__(
        self,
        client: pydanube.Client,
        recorder: Recorder,
        plan: Plan,
        network: Network,
        directory: Path,
        urls: Sequence[str],
        numbers: dict[str, int],
        *,
        rate: float,
        seed: int,
    ) -> None:
        self._client = client
        self._recorder = recorder
        self._plan = plan
        self._network = network
        self._directory = directory
        self._urls = urls
        self._numbers = numbers  # of brokers, by the URL of their native port
        self._pause_seconds = 1.0 / rate
        self._rng = Random(seed)
        self._tasks: list[asyncio.Task[None]] = []
        self._publishing = asyncio.Event()
        self._sending = 0  # without an answer yet
        self.applications: list[Application] = []
        self.late: set[tuple[str, str]] = set()  # subscriptions that have something to get, as brokers say
        self.reopened = 0  # consumers that the client gave up for good

    # --- life ---------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns when every subscription exists: what is sent from now on is meant for all of them."""
        plan = self._plan
        for topic in plan.topics:
            await self._client.create_topic(topic, exist_ok=True, timeout=PATIENCE_SECONDS)
        for each in plan.subscriptions:
            async with self._client.consumer(
                each.topic, subscription=each.name, type=each.kind, start="earliest", timeout=PATIENCE_SECONDS
            ):
                pass
            self._recorder.add(Subscribed(each.topic, each.name, KIND_IN_HISTORY[each.kind], 0, self._recorder.now()))
        for each in plan.subscriptions:
            for number in range(each.native):
                self._run(self._consume(each, f"native-{number}"))
            for number in range(each.official):
                self._application(each, f"official-{number}")
        for topic in plan.native:
            self._run(self._produce(topic, f"native-{_short(topic)}", idempotent=True))
        for topic in plan.plain:
            self._run(self._produce(topic, f"plain-{_short(topic)}", idempotent=False))
        for topic in plan.official:
            self.applications.append(OfficialProducer(self, topic, f"official-{_short(topic)}"))
        for application in self.applications:
            self._run(application.keep_running())

    def _application(self, each: Wanted, name: str) -> None:
        self.applications.append(OfficialConsumer(self, each, name))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    async def stop(self) -> None:
        for application in self.applications:
            application.kill()
        for task in self._tasks:
            task.cancel()
        for result in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result

    def publish(self, on: bool) -> None:
        self._publishing.set() if on else self._publishing.clear()
        for application in self.applications:
            application.publish(on)

    def check(self) -> None:
        """Raises what ended one of the tasks: none of them ends by itself."""
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error

    def waiting(self) -> str:
        """Empty when everything sent was answered and everything stored was received and acknowledged."""
        self.check()
        if self._sending:
            return f"{self._sending} messages without an answer"
        recorder = self._recorder
        for application in self.applications:
            if application.busy:
                return f"{application.name} has not stopped sending"
        for each in self._plan.subscriptions:
            missing = recorder.acked[each.topic] - recorder.settled_by(each.topic, each.name)
            if missing:
                return f"{each.name} of {each.topic} has {len(missing)} to get, the first at {min(missing)}"
        return ""

    async def behind(self) -> str:
        """The same, as the brokers say it; they also know what was stored and never answered. Raises DanubeError."""
        sentence = ""
        for each in self._plan.subscriptions:
            lag = await self._client.lag(each.topic, each.name)
            self.late.discard((each.topic, each.name))
            if lag.messages:
                self.late.add((each.topic, each.name))
                sentence = f"{each.name} of {each.topic}: {lag.sentence}"
        return sentence

    @property
    def lag(self) -> int:
        recorder = self._recorder
        return sum(
            len(recorder.acked[each.topic] - recorder.got.get((each.topic, each.name), set()))
            for each in self._plan.subscriptions
        )

    # --- native -------------------------------------------------------------------------------------------------

    async def _produce(self, topic: str, name: str, *, idempotent: bool) -> None:
        number = 0
        sending: set[asyncio.Task[None]] = set()
        async with self._client.producer(
            topic, name=name, idempotent=idempotent, create=False, timeout=PATIENCE_SECONDS
        ) as producer:
            try:
                while True:
                    await self._publishing.wait()
                    count = self._rng.choice(BATCH_MESSAGES)
                    texts = [f"{name}:{number + row}" for row in range(count)]
                    number += count
                    sending |= {asyncio.create_task(self._send(producer, topic, text, idempotent)) for text in texts}
                    await asyncio.sleep(self._rng.uniform(0.5, 1.5) * self._pause_seconds * count)
                    while True:  # many may be on their way, while the topic is away not without end
                        for task in [task for task in sending if task.done()]:
                            sending.remove(task)
                            task.result()
                        if len(sending) < IN_FLIGHT_MAX:
                            break
                        await asyncio.wait(sending, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in sending:
                    task.cancel()
                await asyncio.gather(*sending, return_exceptions=True)

    async def _send(self, producer: pydanube.Producer, topic: str, text: str, once: bool) -> None:
        recorder, key = self._recorder, _key_of(text)
        recorder.add(Sent(topic, text, key, once, recorder.now()))
        self._sending += 1
        receipt = await producer.send(text.encode(), key=key, timeout=PATIENCE_SECONDS)
        self._sending -= 1
        recorder.add(Acked(topic, text, receipt.offset, receipt.epoch, 0, recorder.now()))

    async def _consume(self, wanted: Wanted, name: str) -> None:
        """One consumer, opened again if the client says that it is over."""
        while True:
            try:
                async with self._client.consumer(
                    wanted.topic, subscription=wanted.name, name=name, type=wanted.kind, timeout=PATIENCE_SECONDS
                ) as consumer:
                    acked: list[tuple[ReceivedBatch, int]] = []
                    flushing = asyncio.create_task(self._flush(consumer, wanted, acked))
                    try:
                        await self._receive(consumer, wanted, name, acked)
                    finally:
                        flushing.cancel()
                        await asyncio.gather(flushing, return_exceptions=True)
            except DanubeError as error:
                self.reopened += 1
                logging.getLogger(__name__).warning("%s of %s: %s", name, wanted.topic, error)
                await asyncio.sleep(1.0)

    async def _receive(
        self, consumer: pydanube.Consumer, wanted: Wanted, name: str, acked: list[tuple[ReceivedBatch, int]]
    ) -> None:
        recorder = self._recorder
        while (delivery := await consumer.next_delivery()) is not None:
            epoch = self._epoch(delivery)
            rows = MessageBatch(delivery).arrow
            now = recorder.now()
            columns = (rows.column(each).to_pylist() for each in ("offset", "payload", "routing_key", "attributes"))
            for offset, payload, key, attributes in zip(*columns, strict=True):
                rescued = "x-danube-rescued" in dict(attributes)
                recorder.add(
                    Got(
                        *(wanted.topic, wanted.name, name, payload.decode(), offset, key or ""),
                        *(delivery.attempt, epoch, rescued, now),
                    )
                )
            await MessageBatch(delivery).ack()
            acked.append((delivery, epoch))

    async def _flush(self, consumer: pydanube.Consumer, wanted: Wanted, acked: list[tuple[ReceivedBatch, int]]) -> None:
        """Acknowledgements travel together; they count when the broker has applied them."""
        recorder = self._recorder
        done = recorder.done.setdefault((wanted.topic, wanted.name), set())
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if not acked:
                continue
            taken, acked[:] = acked[:], []
            for delivery, _ in taken:
                for first, end in delivery.ranges:
                    recorder.asked.setdefault((wanted.topic, wanted.name), set()).update(range(first, end))
            await consumer.flush(timeout=PATIENCE_SECONDS)
            for delivery, epoch in taken:
                # On another connection by now: another broker may have taken it.
                known = epoch if delivery.generation == delivery.lane.machine.generation else 0
                for first, end in delivery.ranges:
                    for offset in range(first, end):
                        done.add(offset)
                        recorder.add(Done(wanted.topic, wanted.name, offset, known, recorder.now()))

    def _epoch(self, delivery: ReceivedBatch) -> int:
        connection = delivery.lane.connection
        if connection is None or delivery.generation != delivery.lane.machine.generation:
            return 0
        return self._recorder.epoch_of(delivery.topic, self._numbers.get(connection.url, 0))


# --- official ---------------------------------------------------------------------------------------------------


class Application:
    """A process of the official client, started again whenever it ends, each time at another broker."""

    def __init__(self, clients: Clients, topic: str, name: str) -> None:
        self.clients = clients
        self.topic = topic
        self.name = name
        self.starts = 0
        self._urls = cycle(clients._urls)
        self._process: asyncio.subprocess.Process | None = None
        self._on = False
        self._orders = 0

    @property
    def busy(self) -> bool:
        """Whether it may have sent something of which we have not heard."""
        return False

    def arguments(self) -> list[str]:
        raise NotImplementedError

    def told(self, line: dict[str, Any], at: float) -> None:
        raise NotImplementedError

    def is_silent(self, seconds: float) -> bool:
        """Whether it should have said something by now."""
        raise NotImplementedError

    def publish(self, on: bool) -> None:
        self._on = on
        self._orders += 1
        self._say()

    def _say(self) -> None:
        if self._process is not None and self._process.stdin is not None and self._process.returncode is None:
            with contextlib.suppress(OSError):
                self._process.stdin.write(b"go\n" if self._on else b"stop %d\n" % self._orders)

    def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGKILL)

    async def keep_running(self) -> None:
        clients = self.clients
        log = clients._directory / f"{self.name}.log"
        while True:
            self.starts += 1
            with log.open("ab") as errors:
                self._process = await asyncio.create_subprocess_exec(
                    *clients._network.guarded([sys.executable, str(OFFICIAL), *self.arguments()]),
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=errors,
                    limit=LINE_BYTES_MAX,
                    start_new_session=True,
                )
            self._say()
            try:
                await self._listen(self._process)
            finally:
                self.kill()
            await self._process.wait()
            await asyncio.sleep(1.0)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Until it ends; what has nothing to say for too long is ended."""
        assert process.stdout is not None
        loop = asyncio.get_running_loop()
        heard_at = loop.time()
        reading: asyncio.Task[bytes] | None = None
        try:
            while True:
                reading = reading or asyncio.create_task(process.stdout.readline())
                await asyncio.wait([reading], timeout=1.0)
                if reading.done():
                    line, reading = reading.result(), None
                    if not line:
                        return
                    heard_at = loop.time()
                    told = cast("dict[str, Any]", json.loads(line))
                    self.told(told, self.clients._recorder.time(told["at"]))
                elif self.is_silent(loop.time() - heard_at):
                    self.kill()  # and hear what it has said until then
        finally:
            if reading is not None:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def next_url(self) -> str:
        return next(self._urls)


class OfficialProducer(Application):
    def __init__(self, clients: Clients, topic: str, name: str) -> None:
        super().__init__(clients, topic, name)
        self._next = 0
        self._stopped = 0  # the last order to stop that it has followed

    @property
    def busy(self) -> bool:
        return self._on or self._stopped < self._orders

    def arguments(self) -> list[str]:
        pause = str(self.clients._pause_seconds)
        return ["produce", self.next_url(), self.topic, self.name, str(self._next), pause]

    def told(self, line: dict[str, Any], at: float) -> None:
        recorder = self.clients._recorder
        if line["event"] == "sent":
            self._next += 1
            recorder.add(Sent(self.topic, line["message"], line["key"], False, at))
        elif line["event"] == "stopped":
            self._stopped = line["number"]
        elif line["event"] == "acked":
            recorder.acked_somewhere(self.topic, line["message"], at)

    def is_silent(self, seconds: float) -> bool:
        return seconds > SILENT_SECONDS and self.busy


class OfficialConsumer(Application):
    def __init__(self, clients: Clients, wanted: Wanted, name: str) -> None:
        super().__init__(clients, wanted.topic, f"{name}-{_short(wanted.topic)}-{wanted.name}")
        self._wanted = wanted

    def arguments(self) -> list[str]:
        return ["consume", self.next_url(), self.topic, self._wanted.name, self._wanted.kind, "official"]

    def told(self, line: dict[str, Any], at: float) -> None:
        recorder, subscription = self.clients._recorder, self._wanted.name
        if line["event"] == "got":
            key = line["key"] or ""
            recorder.add(
                Got(
                    *(self.topic, subscription, self.name, line["message"], line["offset"], key),
                    *(1, 0, line["rescued"], at),
                )
            )
            recorder.asked.setdefault((self.topic, subscription), set()).add(line["offset"])
        elif line["event"] == "done":
            recorder.done.setdefault((self.topic, subscription), set()).add(line["offset"])
            recorder.add(Done(self.topic, subscription, line["offset"], 0, at))

    def is_silent(self, seconds: float) -> bool:
        """What the official producer sent is not known by its offset, but others of the subscription count it."""
        recorder = self.clients._recorder
        everywhere = (offsets for (topic, _), offsets in recorder.done.items() if topic == self.topic)
        known = recorder.acked[self.topic].union(*everywhere)
        missing = known - recorder.settled_by(self.topic, self._wanted.name)
        is_late = (self.topic, self._wanted.name) in self.clients.late
        return seconds > SILENT_SECONDS and (bool(missing) or is_late)


def _short(topic: str) -> str:
    return topic.rpartition("/")[2]


def _key_of(text: str) -> str:
    return f"k{int(text.rpartition(':')[2]) % KEYS}"
