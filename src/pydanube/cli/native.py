"""`danube produce` and `danube consume` through the native protocol: the client does the work, this reports it.

Messages keep their order however many are on their way. A broker that is away for a moment is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Final

from pydanube.cli.catching_up import PartitionProgress
from pydanube.cli.consuming import ConsumeOptions, Received, consume_from, no_topic, nothing_kept
from pydanube.cli.exits import UsageError
from pydanube.cli.producing import KeyedPayload, ProduceOptions, SendResult
from pydanube.client.brokers import addresses_of
from pydanube.client.client import connect
from pydanube.client.grpc import listening
from pydanube.core.cluster.conditions import noun
from pydanube.core.units import UNIX_EPOCH
from pydanube.errors import (
    DanubeError,
    DeadlineExceeded,
    DeliveryMismatch,
    MessageTooLarge,
    SubscriptionUnknown,
    TopicUnknown,
    Unreachable,
)

if TYPE_CHECKING:
    from pydanube.client.client import Client
    from pydanube.client.consumer import Consumer
    from pydanube.client.messages import Message
    from pydanube.client.producer import Producer

DIAL_SECONDS: Final = 5.0
CALL_SECONDS: Final = 30.0
WINDOW_MESSAGES: Final = 1_000


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """A client. Raises what is wrong with the address in one sentence."""
    client = connect(url, timeout=DIAL_SECONDS)
    try:
        await client.open()
    except DeadlineExceeded as error:
        await client.close()
        raise await _unreachable(url, error) from error
    client.timeout = CALL_SECONDS
    try:
        yield client
    finally:
        await client.close()


async def _unreachable(url: str, error: DeadlineExceeded) -> Unreachable:
    hosts = [address.host for address in addresses_of(url)]
    unknown = [host for host in hosts if not await asyncio.to_thread(listening.is_known, host)]
    if len(unknown) == len(hosts):
        why = f"no host of the name {' or '.join(unknown)} is known; check --service-addr"
    elif "Connect call failed" in error.why or "refused" in error.why or not error.why:
        why = "nobody answers there; `danube broker` starts one, --service-addr names another"
    else:
        why = error.why.rpartition("cannot be reached: ")[2]
    return Unreachable(f"the broker at {url}", why)


# --- produce ------------------------------------------------------------------------------------------


async def produce(
    url: str, options: ProduceOptions, messages: AsyncIterator[KeyedPayload], report: Callable[[SendResult], None]
) -> None:
    """As `over_grpc.produce`."""
    if options.schema is not None:
        raise UsageError("schemas are found and registered through gRPC: --protocol grpc")
    async with connected(url) as client:
        reliable = await _kind(client, options)
        async with client.producer(
            options.topic, name=options.producer, reliable=reliable, partitions=options.partitions
        ) as producer:
            await _send_all(producer, options, messages, report, has_offsets=reliable)


async def _kind(client: Client, options: ProduceOptions) -> bool:
    """Whether the topic is reliable. A new one is, unless it is told otherwise."""
    try:
        info = await client.describe_topic(options.topic)
    except TopicUnknown:
        return options.reliable is not False
    if options.reliable is not None and options.reliable != info.reliable:
        kinds = {True: "Reliable", False: "NonReliable"}
        raise DeliveryMismatch(options.topic, kinds[options.reliable], kinds[info.reliable])
    if options.partitions and options.partitions != info.partitions:
        raise UsageError(f"{options.topic} has {info.partitions or 'no'} partitions: leave --partitions away")
    return info.reliable


async def _send_all(
    producer: Producer,
    options: ProduceOptions,
    messages: AsyncIterator[KeyedPayload],
    report: Callable[[SendResult], None],
    *,
    has_offsets: bool,
) -> None:
    """Results are reported in the order of the messages, also while the next one is waited for."""
    sending: asyncio.Queue[asyncio.Task[SendResult] | None] = asyncio.Queue(options.in_flight)

    async def send_each(group: asyncio.TaskGroup) -> None:
        number = 0
        async for message in messages:
            if options.interval_seconds and number:
                await asyncio.sleep(options.interval_seconds)
            number += 1
            await sending.put(group.create_task(_send(producer, options, message, number, has_offsets=has_offsets)))
        await sending.put(None)

    async def report_each() -> None:
        while (task := await sending.get()) is not None:
            report(await task)

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(send_each(group))
            group.create_task(report_each())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _send(
    producer: Producer, options: ProduceOptions, message: KeyedPayload, number: int, *, has_offsets: bool
) -> SendResult:
    """Raises only if the broker stays away, or lets this producer send no more."""
    size_bytes = len(message.payload)
    try:
        receipt = await producer.send(message.payload, key=message.key, attributes=options.attributes or None)
    except MessageTooLarge as error:
        return SendResult(options.topic, 0, size_bytes, error)
    return SendResult(receipt.topic, number, size_bytes, offset=receipt.offset if has_offsets else None)


# --- consume ------------------------------------------------------------------------------------------


async def consume(
    url: str, options: ConsumeOptions, show: Callable[[Received], None], note: Callable[[str], None]
) -> bool:
    """As `consume_from`."""
    async with connected(url) as client:
        try:
            info = await client.describe_topic(options.topic)
        except TopicUnknown as error:
            raise no_topic(options.topic) from error
        if options.once and not info.reliable:
            raise nothing_kept(options.topic)
        parts = options.topic.partition_names(info.partitions) if info.partitions else [options.topic]
        if options.once and options.start == "latest":
            await _note_if_new(client, options, parts, note)
        # A window of `count` takes no messages from other consumers.
        window = min(options.count, WINDOW_MESSAGES) if options.count else None
        async with client.consumer(
            options.topic,
            subscription=options.subscription,
            name=options.consumer,
            type=options.sub_type,
            start=options.start,
            key_filters=options.key_filters,
            window_messages=window,
        ) as consumer:
            note(f"subscribed to {', '.join(parts)} as {options.subscription}")
            source = NativeSource(client, consumer, options.subscription, parts, is_reliable=info.reliable)
            try:
                return await consume_from(source, options, show, note)
            finally:
                if options.ack and info.reliable:
                    await _flush(consumer, note)


async def _note_if_new(
    client: Client, options: ConsumeOptions, parts: Sequence[str], note: Callable[[str], None]
) -> None:
    """Says that a new subscription gets nothing of what the topic has, which `--once` asks for."""
    try:
        await client.lag(options.topic, options.subscription)
    except SubscriptionUnknown:
        topics = [await client.describe_topic(part) for part in parts]
        if skipped := sum(each.head - each.first_offset for each in topics):
            note(
                f"{options.subscription} is new and begins behind the {skipped} {noun(skipped, 'message')} that are "
                "there; with --start earliest a new subscription begins with them"
            )


class NativeSource:
    """A consumer of the native protocol, as `consume_from` takes it."""

    def __init__(
        self, client: Client, consumer: Consumer, subscription: str, topics: Sequence[str], *, is_reliable: bool
    ) -> None:
        self._client = client
        self._consumer = consumer
        self._subscription = subscription
        self._topics = topics
        self._is_reliable = is_reliable

    async def receive(self, seconds: float) -> Message | None:
        try:
            return await self._consumer.receive(timeout=seconds)
        except DeadlineExceeded:
            return None

    async def ack(self, message: Message) -> None:
        await message.ack()

    async def progress(self) -> Mapping[str, PartitionProgress]:
        await self._consumer.flush()
        lags = {str(topic): await self._client.lag(topic, self._subscription) for topic in self._topics}
        return {
            topic: PartitionProgress(lag.cursor, lag.head, lag.messages, lag.sentence) for topic, lag in lags.items()
        }

    def shown(self, message: Message) -> Received:
        return Received(
            message.topic,
            message.offset,
            message.payload,
            message.producer_name or "",
            (message.publish_time - UNIX_EPOCH) // timedelta(milliseconds=1),
            message.key,
            message.attributes,
            self._is_reliable,
        )


async def _flush(consumer: Consumer, note: Callable[[str], None]) -> None:
    try:
        await consumer.flush(timeout=DIAL_SECONDS)
    except DanubeError as error:
        note(f"perhaps not all is acknowledged, and some of it comes again: {error}")
