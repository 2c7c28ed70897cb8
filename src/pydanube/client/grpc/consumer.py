"""A consumer over gRPC, on every partition of a topic.

    async with GrpcConsumer(owners, topic, "billing", name="c", on_retry=print) as consumer:
        message = await consumer.receive(10.0)
        await consumer.ack(message)

A broker that goes away is retried, and the consumer subscribes again under its name: the broker knows it by then and
goes on behind the last acknowledged message. A stream that ends cleanly was taken over by another consumer of the same
name; taking it back would take it from them, so that is the end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Self

from pydanube.client.grpc.connection import GrpcConnection, is_passing, with_retries
from pydanube.client.grpc.owners import Owners
from pydanube.core.names import TopicName
from pydanube.errors import DanubeError, TopicUnknown
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb

if TYPE_CHECKING:
    from pydanube.client.messages import Place, SubscriptionType

QUEUE_MAX: Final = 1_000
RESUBSCRIBE_SECONDS: Final = 0.2
SUBSCRIPTION_TYPES: Final = {
    "exclusive": pb.ConsumerRequest.Exclusive,
    "shared": pb.ConsumerRequest.Shared,
    "failover": pb.ConsumerRequest.Failover,
    "key_shared": pb.ConsumerRequest.KeyShared,
}


class GrpcMessage(NamedTuple):
    """A delivered message."""

    topic: str
    offset: int
    payload: bytes
    producer_name: str
    publish_time_ms: int
    routing_key: str | None
    attributes: Mapping[str, str]
    delivery: pb.StreamMessage  # which an ack repeats

    @classmethod
    def of(cls, message: pb.StreamMessage) -> GrpcMessage:
        return cls(
            message.msg_id.topic_name,
            message.msg_id.topic_offset,
            message.payload,
            message.producer_name,
            message.publish_time,
            message.routing_key if message.HasField("routing_key") else None,
            dict(message.attributes),
            message,
        )


class GrpcConsumer:
    """`on_retry` is called with a sentence: why a stream is opened anew, or an acknowledgement was lost."""

    def __init__(
        self,
        owners: Owners,
        topic: TopicName,
        subscription: str,
        *,
        name: str,
        type: SubscriptionType = "shared",
        start: Place = "latest",  # of a new subscription
        key_filters: Sequence[str] = (),
        on_retry: Callable[[str], None],
    ) -> None:
        self._owners = owners
        self._topic = topic
        self._request = pb.ConsumerRequest(
            consumer_name=name,
            subscription=subscription,
            subscription_type=SUBSCRIPTION_TYPES[type],
            key_filters=key_filters,
        )
        self._start = start
        self._on_retry = on_retry
        self._queue: asyncio.Queue[pb.StreamMessage | DanubeError] = asyncio.Queue(QUEUE_MAX)
        self._request_ids = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []
        self.topics: list[str] = []  # the topic, or its partitions

    async def __aenter__(self) -> Self:
        """Subscribes everywhere before anything is received. Raises TopicUnknown, and what a broker refuses."""
        self.topics = await self._find_topics()
        opened = [(topic, *(await self._subscribe(topic))) for topic in self.topics]
        self._tasks = [asyncio.create_task(self._run(*each)) for each in opened]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def receive(self, seconds: float) -> GrpcMessage | None:
        """The next message; None if there is none within so many seconds. Raises what ended a stream."""
        try:
            async with asyncio.timeout(seconds):
                found = await self._queue.get()
        except TimeoutError:
            return None
        if isinstance(found, DanubeError):
            raise found
        return GrpcMessage.of(found)

    async def ack(self, message: GrpcMessage) -> None:
        """One that cannot be delivered to the owner at the moment is given up: the message comes again."""
        delivery = message.delivery
        request = pb.AckRequest(
            request_id=delivery.request_id, msg_id=delivery.msg_id, subscription_name=self._request.subscription
        )
        try:
            broker = await self._owners.of(message.topic)
            await broker.call("danube.ConsumerService/Ack", request, pb.AckResponse)
        except DanubeError as error:
            if not is_passing(error):
                raise
            self._on_retry(f"not acknowledged, so it will come again: {error}")

    async def _find_topics(self) -> list[str]:
        request = pb.TopicLookupRequest(request_id=1, topic=self._topic)
        answer = await with_retries(
            lambda: self._owners.first.call("danube.Discovery/TopicPartitions", request, pb.TopicPartitionsResponse),
            retries_max=2,
        )
        if not answer.partitions:
            raise TopicUnknown(self._topic)
        return list(answer.partitions)

    async def _run(self, topic: str, broker: GrpcConnection, consumer_id: int) -> None:
        """The stream of one topic or partition, until it is taken over or refused."""
        try:
            while True:
                try:
                    await self._receive(topic, broker, consumer_id)
                except DanubeError as error:
                    if not is_passing(error):
                        raise
                    self._on_retry(f"{topic}: {error}; trying again")
                    self._owners.forget(topic)
                await asyncio.sleep(RESUBSCRIBE_SECONDS)
                broker, consumer_id = await self._subscribe(topic)
        except DanubeError as error:
            await self._queue.put(error)

    async def _subscribe(self, topic: str) -> tuple[GrpcConnection, int]:
        return await with_retries(lambda: self._subscribe_at_owner(topic))

    async def _subscribe_at_owner(self, topic: str) -> tuple[GrpcConnection, int]:
        request = pb.ConsumerRequest(request_id=next(self._request_ids), topic_name=topic)
        request.MergeFrom(self._request)
        broker = await self._owners.of(topic)
        try:
            answer = await broker.call(
                "danube.ConsumerService/Subscribe", request, pb.ConsumerResponse, headers=_headers(self._start)
            )
        except DanubeError:
            self._owners.forget(topic)
            raise
        return broker, answer.consumer_id

    async def _receive(self, topic: str, broker: GrpcConnection, consumer_id: int) -> None:
        request = pb.ReceiveRequest(request_id=next(self._request_ids), consumer_id=consumer_id)
        async for message in broker.stream("danube.ConsumerService/ReceiveMessages", request, pb.StreamMessage):
            await self._queue.put(message)
        raise DanubeError(
            f"another consumer named {self._request.consumer_name} took over the subscription "
            f"{self._request.subscription} of {topic}: give each its own --consumer name"
        )


def _headers(start: Place) -> Sequence[tuple[str, bytes]]:
    """Of a subscription. The default is not sent, which spares its callers the loading of Arrow."""
    if start == "latest":
        return ()
    from pydanube.client.messages import start_header

    return (start_header(start),)
