"""The work behind `danube consume` through gRPC: one consumer, on every partition of a topic, until it has had enough.

A broker that goes away is waited for, and the consumer subscribes again under its name: the broker knows it by then and
goes on behind the last acknowledged message. A stream that ends cleanly was taken over by another consumer of the same
name; taking it back would take it from them, so that is the end.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from pydanube.cli.catching_up import Course, Progress
from pydanube.cli.exits import NotThere, Usage
from pydanube.client.grpc.connection import BrokerRefused, GrpcConnection, is_passing, with_retries
from pydanube.client.grpc.owners import Owners
from pydanube.core.names import TopicName
from pydanube.errors import DanubeError
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours

if TYPE_CHECKING:
    from pydanube.client.messages import Place, SubscriptionType

QUEUE_MAX: Final = 1_000
EXPLAIN: Final = "pydanube.admin.v1.Admin/ExplainSubscription"
SUBSCRIPTION_TYPES: Final = {
    "exclusive": pb.ConsumerRequest.Exclusive,
    "shared": pb.ConsumerRequest.Shared,
    "failover": pb.ConsumerRequest.Failover,
    "key_shared": pb.ConsumerRequest.KeyShared,
}


class Received(NamedTuple):
    """A message as it is shown, whichever way it came."""

    topic: str
    offset: int
    payload: bytes
    producer_name: str
    publish_time_ms: int
    routing_key: str | None
    attributes: Mapping[str, str]
    is_reliable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    topic: TopicName
    consumer: str
    subscription: str
    sub_type: SubscriptionType = "shared"
    key_filters: tuple[str, ...] = ()
    start: Place = "latest"  # of a new subscription
    count: int = 0  # 0: without end
    timeout_seconds: float | None = None  # of silence
    once: bool = False  # until there is nothing more
    ack: bool = True


async def consume(
    connection: GrpcConnection, wish: Wish, show: Callable[[Received], None], note: Callable[[str], None]
) -> bool:
    """Returns whether everything wished for came: False if silence ended it before `count`.

    A message is shown before it is acknowledged: what was printed may come again, what was not is never lost.
    """
    async with Owners(connection) as owners:
        return await _consume(owners, wish, show, note)


async def _consume(owners: Owners, wish: Wish, show: Callable[[Received], None], note: Callable[[str], None]) -> bool:
    topics = await _topics(owners.first, wish.topic)
    queue: asyncio.Queue[pb.StreamMessage | DanubeError] = asyncio.Queue(QUEUE_MAX)
    receivers = [Receiver(owners, wish, topic, queue, note) for topic in topics]
    # Everywhere before anything is shown, so that a topic that refuses us is a message and no surprise later.
    for receiver in receivers:
        await receiver.subscribe()
    note(f"subscribed to {', '.join(topics)} as {wish.subscription}")
    course = Course(wish, note, partial(_progress, owners, wish, topics))
    await course.begin()
    tasks = [asyncio.create_task(receiver.run()) for receiver in receivers]

    async def receive(seconds: float) -> pb.StreamMessage | DanubeError | None:
        try:
            async with asyncio.timeout(seconds):
                return await queue.get()
        except TimeoutError:
            return None

    try:
        received = 0
        while not wish.count or received < wish.count:
            message: pb.StreamMessage | DanubeError | None = await course.next(receive)
            if message is None:
                return course.is_over if wish.once else not wish.count
            if isinstance(message, DanubeError):
                raise message
            show(_received(message))
            received += 1
            course.shown(message.msg_id.topic_name, message.msg_id.topic_offset)
            if wish.ack:
                await _ack(owners, wish, message, note)
        return True
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _progress(owners: Owners, wish: Wish, topics: Sequence[str]) -> Mapping[str, Progress]:
    """The reference's services do not tell how far a subscription is; a broker of ours says so on the client port too.

    Raises Usage for a topic that keeps nothing, and for a broker that does not tell.
    """
    found = {}
    for topic in topics:
        request = ours.ExplainSubscriptionRequest(topic=topic, subscription=wish.subscription)

        async def ask(topic: str = topic, request: ours.ExplainSubscriptionRequest = request) -> Progress:
            broker = await owners.of(topic)
            try:
                answer = await broker.call(EXPLAIN, request, ours.ExplainSubscriptionResponse)
            except DanubeError:
                owners.forget(topic)
                raise
            cursor = answer.lag.cursor if answer.lag.HasField("cursor") else None
            return Progress(cursor, answer.lag.head, answer.lag.lag_messages, answer.sentence)

        try:
            found[topic] = await with_retries(ask)
        except BrokerRefused as error:
            if error.code == "UNIMPLEMENTED":
                raise Usage(
                    "--once asks how far the subscription is, which this broker tells through the native protocol "
                    "only: danube://host:6651"
                ) from error
            if error.code == "FAILED_PRECONDITION":
                raise nothing_kept(wish.topic) from error
            raise
    return found


def nothing_kept(topic: TopicName) -> Usage:
    return Usage(f"--once is for reliable topics: {topic} keeps no messages to catch up with")


async def _topics(connection: GrpcConnection, topic: TopicName) -> list[str]:
    request = pb.TopicLookupRequest(request_id=1, topic=topic)
    answer = await with_retries(
        lambda: connection.call("danube.Discovery/TopicPartitions", request, pb.TopicPartitionsResponse),
        retries_max=2,
    )
    if not answer.partitions:
        raise no_topic(topic)
    return list(answer.partitions)


def no_topic(topic: TopicName) -> NotThere:
    return NotThere(
        f"there is no topic {topic}: consumers create none; `danube produce` does, or `danube admin topics create`"
    )


def _received(message: pb.StreamMessage) -> Received:
    return Received(
        message.msg_id.topic_name,
        message.msg_id.topic_offset,
        message.payload,
        message.producer_name,
        message.publish_time,
        message.routing_key if message.HasField("routing_key") else None,
        dict(message.attributes),
        # Offsets are a reliable topic's; its very first message cannot be told from a non-reliable one.
        bool(message.msg_id.topic_offset),
    )


async def _ack(owners: Owners, wish: Wish, message: pb.StreamMessage, note: Callable[[str], None]) -> None:
    request = pb.AckRequest(request_id=message.request_id, msg_id=message.msg_id, subscription_name=wish.subscription)
    try:
        broker = await owners.of(message.msg_id.topic_name)
        await broker.call("danube.ConsumerService/Ack", request, pb.AckResponse)
    except DanubeError as error:
        if not is_passing(error):
            raise
        note(f"not acknowledged, so it will come again: {error}")


class Receiver:
    """The stream of one topic or partition."""

    def __init__(
        self,
        owners: Owners,
        wish: Wish,
        topic: str,
        queue: asyncio.Queue[pb.StreamMessage | DanubeError],
        note: Callable[[str], None],
    ) -> None:
        self._owners = owners
        self._broker = owners.first
        self._wish = wish
        self._topic = topic
        self._queue = queue
        self._note = note
        self._consumer_id = 0
        self._request_ids = itertools.count(1)

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self._receive()
                except DanubeError as error:
                    if not is_passing(error):
                        raise
                    self._note(f"{self._topic}: {error}; trying again")
                    self._owners.forget(self._topic)
                await asyncio.sleep(0.2)
                await self.subscribe()
        except DanubeError as error:
            await self._queue.put(error)

    async def subscribe(self) -> None:
        self._consumer_id = await with_retries(self._subscribe)

    async def _subscribe(self) -> int:
        wish = self._wish
        request = pb.ConsumerRequest(
            request_id=next(self._request_ids),
            topic_name=self._topic,
            consumer_name=wish.consumer,
            subscription=wish.subscription,
            subscription_type=SUBSCRIPTION_TYPES[wish.sub_type],
            key_filters=wish.key_filters,
        )
        self._broker = await self._owners.of(self._topic)
        try:
            answer = await self._broker.call(
                "danube.ConsumerService/Subscribe", request, pb.ConsumerResponse, headers=_headers(wish.start)
            )
        except DanubeError:
            self._owners.forget(self._topic)
            raise
        return answer.consumer_id

    async def _receive(self) -> None:
        request = pb.ReceiveRequest(request_id=next(self._request_ids), consumer_id=self._consumer_id)
        async for message in self._broker.stream("danube.ConsumerService/ReceiveMessages", request, pb.StreamMessage):
            await self._queue.put(message)
        raise DanubeError(
            f"another consumer named {self._wish.consumer} took over the subscription {self._wish.subscription} "
            f"of {self._topic}: give each its own --consumer name"
        )


def _headers(start: Place) -> Sequence[tuple[str, bytes]]:
    """Of a subscription. The default need not be said, which spares those who want it the loading of Arrow."""
    if start == "latest":
        return ()
    from pydanube.client.messages import start_header

    return (start_header(start),)
