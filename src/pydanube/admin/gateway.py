"""A cluster behind one address: calls go to whichever broker answers, and concurrent equal questions are asked once.

    gateway ──► the broker that answered last ── cannot be reached? ──► the next one of those that are known

Any broker answers for the whole cluster. Channels stay open. A refusal is `BrokerRefused` with the broker's sentence; a
cluster of which no broker can be reached is `Unreachable`.

Brokers, topics, balance and status are asked for once per `cache_seconds`, however many read them, and a reader does
not wait for it: it gets what is known, and the next reader what was learned since.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Final, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from pydanube.admin import calls, values
from pydanube.admin.survey import Survey, survey
from pydanube.client.client import Client
from pydanube.client.grpc.connection import BrokerRefused, GrpcCall, GrpcConnection
from pydanube.client.messages import asked_by_header
from pydanube.config import reachable
from pydanube.core.names import TopicName
from pydanube.errors import DanubeError, Unreachable

ASKED_BY: ContextVar[str] = ContextVar("asked_by", default="")  # the address that the request at hand came from

M = TypeVar("M", bound=Message)
T = TypeVar("T")

LEADER: Final = "Cluster_Leader"
CALL_SECONDS: Final = 5.0
CACHE_SECONDS: Final = 3.0
STALE_FACTOR: Final = 5  # older than so many cache times is not shown any more
MEMBERS_MAX: Final = 1_000  # addresses that are remembered
CALLS_AT_ONCE: Final = 16  # questions on their way
SEARCHES_AT_ONCE: Final = 2  # each may have tens of megabytes in memory and a thread
SURVEY_SECONDS: Final = 6.0  # a survey of dead letters reads thousands of them
SURVEYS_MAX: Final = 20


class KnownBroker(NamedTuple):
    """A broker as the others list it."""

    broker_id: str
    address: str
    role: str
    admin_addr: str
    metrics_addr: str
    status: str

    @property
    def is_leader(self) -> bool:
        return self.role == LEADER


class TopicRow(NamedTuple):
    name: str
    broker_id: str  # empty: it has no owner
    delivery: str

    @property
    def is_reliable(self) -> bool:
        return self.delivery == calls.RELIABLE

    @property
    def namespace(self) -> str:
        return self.name.split("/")[1] if self.name.count("/") > 1 else ""


class Cached(Generic[T]):
    """One answer that many ask for. `get` waits only for the first, or if what is known is much too old."""

    def __init__(self, ask: Callable[[], Awaitable[T]], seconds: float, clock: Callable[[], float]) -> None:
        self._ask = ask
        self._seconds = seconds
        self._clock = clock
        self._value: T | None = None
        self._asked_at = float("-inf")
        self._asking: asyncio.Task[T] | None = None

    async def get(self) -> T:
        """Raises what the question raises, if there is nothing to show instead."""
        age = self._clock() - self._asked_at
        if self._value is not None and age < self._seconds:
            return self._value
        if self._asking is None:
            self._asking = asyncio.create_task(self._refresh(), name="ask the cluster")
            # A failure that no caller waits for is raised to the next one.
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        if self._value is not None and age < self._seconds * STALE_FACTOR:
            return self._value
        return await asyncio.shield(self._asking)

    async def _refresh(self) -> T:
        try:
            value = await self._ask()
        except DanubeError:
            self.forget()  # an error is not remembered, nor is what it contradicts
            raise
        finally:
            self._asking = None
        self._value, self._asked_at = value, self._clock()
        return value

    def forget(self) -> None:
        """Something was changed: the next one to ask waits for the answer."""
        self._value, self._asked_at = None, float("-inf")

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


class Gateway:
    """To be closed. `endpoint` is one broker's admin address; it tells of the others."""

    def __init__(
        self,
        endpoint: str,
        *,
        flag: str = "--broker-endpoint",
        name: str = "web admin",
        stream_url: str = "",
        call_seconds: float = CALL_SECONDS,
        cache_seconds: float = CACHE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = {(first := GrpcConnection(endpoint, flag)).address: first}
        self._current = first.address
        self._open: set[str] = set()
        self._name = name  # of who asks, for the broker's events
        self._stream_url = stream_url
        self._client: Client | None = None
        self._client_lock = asyncio.Lock()
        self._slots = asyncio.Semaphore(CALLS_AT_ONCE)
        self.searching = asyncio.Semaphore(SEARCHES_AT_ONCE)  # to be held while messages are looked through
        self._is_alone = False
        self.call_seconds = call_seconds
        self._brokers = Cached(self._ask_brokers, cache_seconds, clock)
        self._topics = Cached(self._ask_topics, cache_seconds, clock)
        self._balance = Cached(self._ask_balance, cache_seconds, clock)
        self._status = Cached(self._ask_status, cache_seconds, clock)
        self._clock = clock
        self._surveys: dict[str, tuple[float, Survey]] = {}

    async def close(self) -> None:
        for cached in (self._brokers, self._topics, self._balance, self._status):
            await cached.close()
        for address in self._open:
            await self._connections[address].__aexit__(None, None, None)
        if self._client is not None:
            await self._client.close()

    # --- calling ------------------------------------------------------------------------------------------

    async def ask(self, call: GrpcCall[M], *, seconds: float | None = None) -> M:
        """Raises BrokerRefused, or Unreachable if none of the known brokers can be reached.

        A call that changes something says in whose name, and what is cached is asked for again afterwards.
        """
        if not call.changes:
            return await self._ask(call, seconds or self.call_seconds)
        by = f"{self._name}, for {ASKED_BY.get()}" if ASKED_BY.get() else self._name
        try:
            return await self._ask(call, seconds or self.call_seconds, [asked_by_header(by)])
        finally:
            self.forget()

    async def _ask(self, call: GrpcCall[M], seconds: float, headers: Sequence[tuple[str, bytes]] = ()) -> M:
        failure: DanubeError | None = None
        for address in self._in_turn():
            connection = await self._connection(address)
            try:
                async with self._slots:
                    found = await connection.call(
                        call.method, call.request, call.answer, seconds=seconds, headers=headers
                    )
            except Unreachable as error:
                failure = failure or error
                continue
            self._current = address
            return found
        assert failure is not None
        raise failure

    async def follow(self, call: GrpcCall[M]) -> AsyncIterator[M]:
        """The answers of the broker that answered last, as they come."""
        connection = await self._connection(self._current)
        async with contextlib.aclosing(connection.follow(call)) as answers:  # type: ignore[type-var]
            async for each in answers:
                yield each

    def _in_turn(self) -> list[str]:
        return [self._current, *(each for each in self._connections if each != self._current)]

    async def _connection(self, address: str) -> GrpcConnection:
        connection = self._connections[address]
        if address not in self._open:
            await connection.__aenter__()
            self._open.add(address)
        return connection

    async def client(self) -> Client:
        """The native client, for what needs it: finding messages by time, and redriving. Raises Unreachable."""
        async with self._client_lock:
            if self._client is None:
                if not self._stream_url:
                    raise Unreachable("the native port", "its address is not known: start with --service-addr")
                client = Client(self._stream_url, timeout=self.call_seconds)
                try:
                    await client.open()
                except DanubeError:
                    await client.close()
                    raise
                self._client = client
            return self._client

    # --- the cluster ----------------------------------------------------------------------------------------

    async def brokers(self) -> list[KnownBroker]:
        return await self._brokers.get()

    async def _ask_brokers(self) -> list[KnownBroker]:
        found = await self.ask(calls.list_brokers())
        brokers = [
            KnownBroker(
                each.broker_id,
                each.broker_addr,
                each.broker_role,
                each.admin_addr,
                reachable(each.metrics_addr, each.broker_addr),
                each.broker_status,
            )
            for each in found.brokers
        ]
        for each in brokers:
            self._remember(each)
        return brokers

    def _remember(self, broker: KnownBroker) -> None:
        """For the day when the one that was given is away."""
        with contextlib.suppress(DanubeError):
            connection = GrpcConnection(reachable(broker.admin_addr.rpartition("://")[2], broker.address))
            if len(self._connections) < MEMBERS_MAX:
                self._connections.setdefault(connection.address, connection)

    async def balance(self) -> values.ClusterBalance | None:
        """None: a broker that is alone has nothing to balance."""
        return await self._balance.get()

    async def _ask_balance(self) -> values.ClusterBalance | None:
        if self._is_alone and len(await self.brokers()) < 2:
            return None  # a call that is refused counts as an error in the broker's metrics: once is enough
        try:
            return await self.ask(calls.balance())
        except BrokerRefused as refused:
            if refused.code == "UNIMPLEMENTED":
                self._is_alone = True
                return None
            raise

    async def status(self) -> values.ClusterStatus:
        """What is wrong, and how every broker is doing. Raises BrokerRefused if the broker is of an earlier version."""
        return await self._status.get()

    async def _ask_status(self) -> values.ClusterStatus:
        return await self.ask(calls.cluster_status())

    # --- topics -----------------------------------------------------------------------------------------------

    async def topics(self) -> list[TopicRow]:
        """All of them, by name."""
        return await self._topics.get()

    async def _ask_topics(self) -> list[TopicRow]:
        found: list[TopicRow] = []
        for namespace in await self.namespaces():
            try:
                listed = await self.ask(calls.list_topics(namespace), seconds=30)
            except BrokerRefused as refused:
                if refused.code == "NOT_FOUND":
                    continue  # it was deleted in the meantime
                raise
            found += [TopicRow(each.name, each.broker_id, each.delivery) for each in listed.topics]
        return sorted(found)

    async def parts(self, topic: TopicName) -> list[TopicName]:
        """The partitions of a base by their number; of any other name that name alone."""
        rows = [row.name for row in await self.topics() if row.name.startswith(f"{topic}-part-")]
        own = [name for name in map(TopicName, rows) if name.is_partition_of(topic)]
        return [*sorted(own, key=lambda name: name.partition_number or 0)] or [topic]

    async def namespaces(self) -> list[str]:
        return list((await self.ask(calls.list_namespaces())).namespaces)

    # --- dead letters -------------------------------------------------------------------------------------------

    async def survey(self, topic: str) -> Survey:
        """What of a dead-letter topic is open. Asked for anew after SURVEY_SECONDS, or when something was changed."""
        known = self._surveys.get(topic)
        if known is None or self._clock() - known[0] > SURVEY_SECONDS:
            found = await survey(await self.client(), topic)
            self._surveys = {**dict([*self._surveys.items()][-SURVEYS_MAX + 1 :]), topic: (self._clock(), found)}
            return found
        return known[1]

    async def note(
        self, order: str, topic: str, *, to: str = "", offset: int | None = None, sent: int | None = None
    ) -> None:
        """For the log of what happened: what was done by the native client. Nothing depends on it."""
        with contextlib.suppress(DanubeError):
            await self.ask(calls.note_order(order, topic, to=to, offset=offset, sent=sent))

    def forget(self) -> None:
        for cached in (self._brokers, self._topics, self._balance, self._status):
            cached.forget()
        self._surveys = {}
