"""The brokers, as the pages see them: questions and orders to whichever broker answers.

    gateway ──► the broker that answered last ── nobody there? ──► the next one of those that are known

Any broker answers for the whole cluster. Channels stay open. What a broker refuses is `BrokerRefused` with its own
sentence, a cluster that nobody answers for is `Unreachable`: both are shown as they are.

What every page shows is asked for once per `cache_seconds`, however many look, and a page does not wait for it: it
shows what is known, and the next one what was learned meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Final, Generic, NamedTuple, TypeVar

from google.protobuf.message import Message

from pydanube.client.client import Client
from pydanube.client.grpc.connection import BrokerRefused, GrpcConnection
from pydanube.client.messages import asked_by_header
from pydanube.client.redrive import Survey, survey
from pydanube.config import reachable
from pydanube.core.names import TopicName
from pydanube.errors import DanubeError, Unreachable
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours
from pydanube.wire._pb.pydanube import status_pb2

ASKED_BY: ContextVar[str] = ContextVar("asked_by", default="")  # the address that the request at hand came from

M = TypeVar("M", bound=Message)
T = TypeVar("T")

BROKERS: Final = "danube_admin.BrokerAdmin"
CLUSTER: Final = "danube_admin.ClusterAdmin"
NAMESPACES: Final = "danube_admin.NamespaceAdmin"
TOPICS: Final = "danube_admin.TopicAdmin"
OURS: Final = "pydanube.admin.v1.Admin"
STATUS: Final = "pydanube.admin.v1.Status"
LEADER: Final = "Cluster_Leader"
RELIABLE: Final = "Reliable"
CALL_SECONDS: Final = 5.0
CACHE_SECONDS: Final = 3.0
STALE_FACTOR: Final = 5  # older than so many cache times is not shown any more
MEMBERS_MAX: Final = 1_000  # addresses that are remembered
AT_ONCE: Final = 16  # questions on their way
SEARCHES_AT_ONCE: Final = 2  # each may have tens of megabytes in memory and a thread
SURVEY_SECONDS: Final = 6.0  # a survey of dead letters reads thousands of them
SURVEYS_MAX: Final = 20


class Broker(NamedTuple):
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
    broker_id: str  # empty: nobody has it
    delivery: str

    @property
    def is_reliable(self) -> bool:
        return self.delivery == RELIABLE

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
            # Nobody may be waiting for it: then its failure is the next one's to tell.
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
    """For an `async with` block."""

    def __init__(
        self,
        endpoint: str,
        *,
        flag: str = "--broker-endpoint",
        stream_url: str = "",
        call_seconds: float = CALL_SECONDS,
        cache_seconds: float = CACHE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connections = {(first := GrpcConnection(endpoint, flag)).address: first}
        self._current = first.address
        self._open: set[str] = set()
        self._stream_url = stream_url
        self._client: Client | None = None
        self._client_lock = asyncio.Lock()
        self._room = asyncio.Semaphore(AT_ONCE)
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

    async def call(
        self,
        method: str,
        request: Message,
        answer: type[M],
        *,
        seconds: float | None = None,
        headers: Sequence[tuple[str, bytes]] = (),
    ) -> M:
        """Raises BrokerRefused, or Unreachable if none of the known brokers is there."""
        failure: DanubeError | None = None
        for address in self._in_turn():
            connection = await self._connection(address)
            try:
                async with self._room:
                    found = await connection.call(
                        method, request, answer, seconds=seconds or self.call_seconds, headers=headers
                    )
            except Unreachable as error:
                failure = failure or error
                continue
            self._current = address
            return found
        assert failure is not None
        raise failure

    async def stream(self, method: str, request: Message, answer: type[M]) -> AsyncIterator[M]:
        """What the broker that answered last says, as it says it."""
        connection = await self._connection(self._current)
        async with contextlib.aclosing(connection.stream(method, request, answer)) as answers:  # type: ignore[type-var]
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

    async def brokers(self) -> list[Broker]:
        return await self._brokers.get()

    async def _ask_brokers(self) -> list[Broker]:
        found = await self.call(f"{BROKERS}/ListBrokers", pb.Empty(), pb.BrokerListResponse)
        brokers = [
            Broker(
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

    def _remember(self, broker: Broker) -> None:
        """For the day when the one that was given is away."""
        with contextlib.suppress(DanubeError):
            connection = GrpcConnection(reachable(broker.admin_addr.rpartition("://")[2], broker.address))
            if len(self._connections) < MEMBERS_MAX:
                self._connections.setdefault(connection.address, connection)

    async def balance(self) -> pb.ClusterBalanceResponse | None:
        """None: a broker that is alone has nothing to balance."""
        return await self._balance.get()

    async def _ask_balance(self) -> pb.ClusterBalanceResponse | None:
        if self._is_alone and len(await self.brokers()) < 2:
            return None  # a call that is refused counts as an error in the broker's metrics: once is enough
        try:
            return await self.call(
                f"{BROKERS}/GetClusterBalance", pb.ClusterBalanceRequest(), pb.ClusterBalanceResponse
            )
        except BrokerRefused as refused:
            if refused.code == "UNIMPLEMENTED":
                self._is_alone = True
                return None
            raise

    async def status(self) -> status_pb2.ClusterStatusResponse:
        """What is wrong, and how every broker is doing. Raises BrokerRefused from one of an earlier version."""
        return await self._status.get()

    async def _ask_status(self) -> status_pb2.ClusterStatusResponse:
        request = status_pb2.ClusterStatusRequest()
        return await self.call(f"{STATUS}/ClusterStatus", request, status_pb2.ClusterStatusResponse)

    async def events(self, count_max: int) -> Sequence[status_pb2.Happening]:
        request = status_pb2.ListEventsRequest(count_max=count_max)
        return (await self.call(f"{STATUS}/ListEvents", request, status_pb2.ListEventsResponse)).events

    async def subscriptions(self, namespace: str, count_max: int) -> status_pb2.ListSubscriptionsResponse:
        """Of one namespace, or of all; furthest behind first."""
        request = status_pb2.ListSubscriptionsRequest(namespace=namespace, count_max=count_max)
        return await self.call(f"{STATUS}/ListSubscriptions", request, status_pb2.ListSubscriptionsResponse)

    async def connections(self, topic: str, count_max: int) -> status_pb2.ListConnectionsResponse:
        """Of one topic, or of all."""
        request = status_pb2.ListConnectionsRequest(topic=topic, count_max=count_max)
        return await self.call(f"{STATUS}/ListConnections", request, status_pb2.ListConnectionsResponse)

    async def rebalancing(self, count_max: int) -> Sequence[ours.RebalancingMove]:
        request = ours.RebalancingHistoryRequest(count_max=count_max)
        return (await self.call(f"{OURS}/RebalancingHistory", request, ours.RebalancingHistoryResponse)).moves

    # --- topics -----------------------------------------------------------------------------------------------

    async def topics(self) -> list[TopicRow]:
        """All of them, by name."""
        return await self._topics.get()

    async def _ask_topics(self) -> list[TopicRow]:
        found: list[TopicRow] = []
        for namespace in await self.namespaces():
            request = pb.NamespaceRequest(name=namespace)
            try:
                listed = await self.call(f"{TOPICS}/ListNamespaceTopics", request, pb.TopicInfoListResponse, seconds=30)
            except BrokerRefused as refused:
                if refused.code == "NOT_FOUND":
                    continue  # it was deleted meanwhile
                raise
            found += [TopicRow(each.name, each.broker_id, each.delivery) for each in listed.topics]
        return sorted(found)

    async def parts(self, topic: TopicName) -> list[TopicName]:
        """The partitions of a base by their number; of any other name that name alone."""
        rows = [row.name for row in await self.topics() if row.name.startswith(f"{topic}-part-")]
        own = [name for name in map(TopicName, rows) if name.is_partition_of(topic)]
        return [*sorted(own, key=lambda name: name.partition_number or 0)] or [topic]

    async def retention(self, **of: str) -> ours.RetentionResponse:
        """Of topic=… or namespace=…"""
        return await self.call(f"{OURS}/GetRetention", ours.GetRetentionRequest(**of), ours.RetentionResponse)

    async def namespaces(self) -> list[str]:
        return list((await self.call(f"{BROKERS}/ListNamespaces", pb.Empty(), pb.NamespaceListResponse)).namespaces)

    async def policies(self, namespace: str) -> str:
        request = pb.NamespaceRequest(name=namespace)
        return (await self.call(f"{NAMESPACES}/GetNamespacePolicies", request, pb.PolicyResponse)).policies

    async def describe(self, topic: str) -> pb.DescribeTopicResponse:
        request = pb.DescribeTopicRequest(name=topic)
        return await self.call(f"{TOPICS}/DescribeTopic", request, pb.DescribeTopicResponse)

    async def state(self, topic: str) -> ours.TopicStateResponse:
        return await self.call(f"{OURS}/TopicState", ours.TopicStateRequest(topic=topic), ours.TopicStateResponse)

    async def storage(self, topic: str) -> ours.StorageListResponse:
        request = ours.StorageListRequest(topic=topic, summary=True)
        return await self.call(f"{OURS}/StorageList", request, ours.StorageListResponse)

    async def moves(self, topic: str) -> Sequence[ours.Move]:
        request = ours.MovePhasesRequest(topic=topic)
        return (await self.call(f"{OURS}/MovePhases", request, ours.MovePhasesResponse)).moves

    async def peek(self, topic: str, offset: int | None, count: int, payload_max_bytes: int) -> ours.PeekTopicResponse:
        request = ours.PeekTopicRequest(
            topic=topic, offset=offset, count=count, payload_max_bytes=payload_max_bytes
        )  # offset None: the newest
        return await self.call(f"{OURS}/PeekTopic", request, ours.PeekTopicResponse)

    # --- subscriptions ------------------------------------------------------------------------------------------

    async def explain(self, topic: str, subscription: str) -> ours.ExplainSubscriptionResponse:
        request = ours.ExplainSubscriptionRequest(topic=topic, subscription=subscription)
        return await self.call(f"{OURS}/ExplainSubscription", request, ours.ExplainSubscriptionResponse)

    async def failure_policy(self, topic: str, subscription: str) -> pb.GetSubscriptionFailurePolicyResponse:
        request = pb.GetSubscriptionFailurePolicyRequest(topic=topic, subscription=subscription)
        return await self.call(
            f"{TOPICS}/GetSubscriptionFailurePolicy", request, pb.GetSubscriptionFailurePolicyResponse
        )

    async def dispatch_config(self, topic: str, subscription: str) -> pb.GetSubscriptionDispatchConfigResponse:
        request = pb.GetSubscriptionDispatchConfigRequest(topic=topic, subscription=subscription)
        return await self.call(
            f"{TOPICS}/GetSubscriptionDispatchConfig", request, pb.GetSubscriptionDispatchConfigResponse
        )

    # --- dead letters -------------------------------------------------------------------------------------------

    async def survey(self, topic: str) -> Survey:
        """What of a dead-letter topic is open. Asked for anew after SURVEY_SECONDS, or when something was changed."""
        known = self._surveys.get(topic)
        if known is None or self._clock() - known[0] > SURVEY_SECONDS:
            found = await survey(await self.client(), topic)
            self._surveys = {**dict([*self._surveys.items()][-SURVEYS_MAX + 1 :]), topic: (self._clock(), found)}
            return found
        return known[1]

    # --- orders -------------------------------------------------------------------------------------------------

    async def order(self, method: str, request: Message, answer: type[M], *, seconds: float | None = None) -> M:
        """A call that changes something: what is known is asked for again."""
        by = f"web admin, for {ASKED_BY.get()}" if ASKED_BY.get() else "web admin"
        try:
            return await self.call(method, request, answer, seconds=seconds, headers=[asked_by_header(by)])
        finally:
            self.forget()

    async def note(
        self, order: str, topic: str, *, to: str = "", offset: int | None = None, sent: int | None = None
    ) -> None:
        """For the log of what happened: what was done by the native client. Nothing depends on it."""
        request = status_pb2.NoteOrderRequest(order=order, topic=topic, to_topic=to, offset=offset, count=sent)
        with contextlib.suppress(DanubeError):
            await self.order(f"{STATUS}/NoteOrder", request, status_pb2.NoteOrderResponse)

    def forget(self) -> None:
        for cached in (self._brokers, self._topics, self._balance, self._status):
            cached.forget()
        self._surveys = {}
