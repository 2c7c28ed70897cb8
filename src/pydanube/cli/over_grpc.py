"""`danube produce` and `danube consume` through gRPC: `client/grpc` does the work, this reports it.

Messages go one after the other, each acknowledged before the next, so they arrive in order. `in_flight` above 1 gives
that up for speed. A broker that is away for a moment is waited for; a message that it refuses is counted and the rest
goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping

from pydanube.admin import calls
from pydanube.cli.catching_up import PartitionProgress
from pydanube.cli.consuming import ConsumeOptions, Received, consume_from, no_topic, nothing_kept
from pydanube.cli.exits import UsageError
from pydanube.cli.producing import KeyedPayload, ProduceOptions, SendResult
from pydanube.client.grpc.connection import BrokerRefused, GrpcConnection, is_passing
from pydanube.client.grpc.consumer import GrpcConsumer, GrpcMessage
from pydanube.client.grpc.owners import Owners
from pydanube.client.grpc.producer import GrpcProducer
from pydanube.errors import TopicUnknown

# --- produce ------------------------------------------------------------------------------------------


async def produce(
    connection: GrpcConnection,
    options: ProduceOptions,
    messages: AsyncIterator[KeyedPayload],
    report: Callable[[SendResult], None],
) -> None:
    """Sends everything; `report` hears of each message. Raises if the broker stays away, or accepts no producer."""
    async with Owners(connection) as owners:
        producer = GrpcProducer(
            owners,
            options.topic,
            options.producer,
            partitions=options.partitions,
            reliable=options.reliable,
            attributes=options.attributes,
            schema=options.schema,
        )
        if options.schema is not None and options.schema.definition is not None:
            print("Auto-registering schema...")
            print(f"Schema registered with ID: {await producer.find_schema()}")
        await producer.open()
        await _send_all(producer, options, messages, report)


async def _send_all(
    producer: GrpcProducer,
    options: ProduceOptions,
    messages: AsyncIterator[KeyedPayload],
    report: Callable[[SendResult], None],
) -> None:
    turn = asyncio.Lock()  # of taking the next message
    is_first = True

    async def next_message() -> KeyedPayload | None:
        nonlocal is_first
        async with turn:
            message = await anext(messages, None)
            if options.interval_seconds and not is_first and message is not None:
                await asyncio.sleep(options.interval_seconds)
            is_first = False
            return message

    async def work() -> None:
        while (message := await next_message()) is not None:
            report(await _send(producer, message))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(options.in_flight):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _send(producer: GrpcProducer, message: KeyedPayload) -> SendResult:
    """Raises only if the broker stays away."""
    topic, size_bytes = producer.topic_for(message.key), len(message.payload)
    try:
        receipt = await producer.send(topic, message.payload, message.key)
    except BrokerRefused as error:
        if is_passing(error):
            raise
        return SendResult(topic, 0, size_bytes, error)
    return SendResult(receipt.topic, receipt.request_id, size_bytes)


# --- consume ------------------------------------------------------------------------------------------


async def consume(
    connection: GrpcConnection,
    options: ConsumeOptions,
    show: Callable[[Received], None],
    note: Callable[[str], None],
) -> bool:
    """As `consume_from`."""
    async with Owners(connection) as owners:
        consumer = GrpcConsumer(
            owners,
            options.topic,
            options.subscription,
            name=options.consumer,
            type=options.sub_type,
            start=options.start,
            key_filters=options.key_filters,
            on_retry=note,
        )
        try:
            await consumer.__aenter__()
        except TopicUnknown as error:
            raise no_topic(options.topic) from error
        try:
            note(f"subscribed to {', '.join(consumer.topics)} as {options.subscription}")
            return await consume_from(GrpcSource(owners, consumer, options), options, show, note)
        finally:
            await consumer.__aexit__()


class GrpcSource:
    """A consumer over gRPC, as `consume_from` takes it."""

    def __init__(self, owners: Owners, consumer: GrpcConsumer, options: ConsumeOptions) -> None:
        self._owners = owners
        self._consumer = consumer
        self._options = options
        self.receive = consumer.receive
        self.ack = consumer.ack

    def shown(self, message: GrpcMessage) -> Received:
        # Offsets are a reliable topic's; its very first message cannot be told from a non-reliable one.
        return Received(
            message.topic,
            message.offset,
            message.payload,
            message.producer_name,
            message.publish_time_ms,
            message.routing_key,
            message.attributes,
            bool(message.offset),
        )

    async def progress(self) -> Mapping[str, PartitionProgress]:
        """The reference's services do not tell how far a subscription is; a broker of ours does, on this port too.

        Raises UsageError for a topic that keeps nothing, and for a broker that does not tell.
        """
        found = {}
        for topic in self._consumer.topics:
            try:
                answer = await self._owners.ask(topic, calls.explain(topic, self._options.subscription))
            except BrokerRefused as error:
                if error.code == "UNIMPLEMENTED":
                    raise UsageError(
                        "--once asks how far the subscription is, which this broker tells through the native protocol "
                        "only: danube://host:6651"
                    ) from error
                if error.code == "FAILED_PRECONDITION":
                    raise nothing_kept(self._options.topic) from error
                raise
            lag = answer.lag
            cursor = lag.cursor if lag.HasField("cursor") else None
            found[topic] = PartitionProgress(cursor, lag.head, lag.lag_messages, answer.sentence)
        return found
