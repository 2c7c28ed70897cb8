"""`danube produce` and `danube consume` through the native protocol: the client does the work, this reports it.

Messages keep their order however many are on their way. Whoever is away for a moment is waited for.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from pydanube.cli.catching_up import Course, Progress
from pydanube.cli.consuming import Received, Wish, no_topic, nothing_kept
from pydanube.cli.exits import Usage
from pydanube.cli.producing import Order, Outgoing, Sent
from pydanube.client.brokers import addresses_of
from pydanube.client.client import connect
from pydanube.client.grpc import listening
from pydanube.errors import (
    DanubeError,
    DeadlineExceeded,
    DeliveryMismatch,
    MessageTooLarge,
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
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


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


async def produce(url: str, order: Order, messages: AsyncIterator[Outgoing], report: Callable[[Sent], None]) -> None:
    """As `producing.produce`."""
    if order.schema is not None:
        raise Usage("schemas are found and registered through gRPC: --protocol grpc")
    async with connected(url) as client:
        reliable = await _kind(client, order)
        async with client.producer(
            order.topic, name=order.producer, reliable=reliable, partitions=order.partitions
        ) as producer:
            await _send_all(producer, order, messages, report, has_offsets=reliable)


async def _kind(client: Client, order: Order) -> bool:
    """Whether the topic is reliable. A new one is, unless it is told otherwise."""
    try:
        info = await client.describe_topic(order.topic)
    except TopicUnknown:
        return order.reliable is not False
    if order.reliable is not None and order.reliable != info.reliable:
        kinds = {True: "Reliable", False: "NonReliable"}
        raise DeliveryMismatch(order.topic, kinds[order.reliable], kinds[info.reliable])
    if order.partitions and order.partitions != info.partitions:
        raise Usage(f"{order.topic} has {info.partitions or 'no'} partitions: leave --partitions away")
    return info.reliable


async def _send_all(
    producer: Producer,
    order: Order,
    messages: AsyncIterator[Outgoing],
    report: Callable[[Sent], None],
    *,
    has_offsets: bool,
) -> None:
    """Everybody is reported in the order of the messages, also while the next one is waited for."""
    sending: asyncio.Queue[asyncio.Task[Sent] | None] = asyncio.Queue(order.in_flight)

    async def send_each(group: asyncio.TaskGroup) -> None:
        number = 0
        async for message in messages:
            if order.interval_seconds and number:
                await asyncio.sleep(order.interval_seconds)
            number += 1
            await sending.put(group.create_task(_send(producer, order, message, number, has_offsets=has_offsets)))
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


async def _send(producer: Producer, order: Order, message: Outgoing, number: int, *, has_offsets: bool) -> Sent:
    """Raises only if the broker stays away, or lets this producer send no more."""
    size_bytes = len(message.payload)
    try:
        receipt = await producer.send(message.payload, key=message.key, attributes=order.attributes or None)
    except MessageTooLarge as error:
        return Sent(order.topic, 0, size_bytes, error)
    return Sent(receipt.topic, number, size_bytes, offset=receipt.offset if has_offsets else None)


# --- consume ------------------------------------------------------------------------------------------


async def consume(url: str, wish: Wish, show: Callable[[Received], None], note: Callable[[str], None]) -> bool:
    """As `consuming.consume`."""
    async with connected(url) as client:
        try:
            info = await client.describe_topic(wish.topic)
        except TopicUnknown as error:
            raise no_topic(wish.topic) from error
        if wish.once and not info.reliable:
            raise nothing_kept(wish.topic)
        window = {"window_messages": min(wish.count, WINDOW_MESSAGES)} if wish.count else {}  # takes none from others
        async with client.consumer(
            wish.topic,
            subscription=wish.subscription,
            name=wish.consumer,
            type=wish.sub_type,
            start=wish.start,
            key_filters=wish.key_filters,
            **window,
        ) as consumer:
            parts = wish.topic.partition_names(info.partitions) if info.partitions else [wish.topic]
            note(f"subscribed to {', '.join(parts)} as {wish.subscription}")

            async def progress() -> Mapping[str, Progress]:
                await consumer.flush()
                lags = {str(part): await client.lag(part, wish.subscription) for part in parts}
                return {part: Progress(lag.cursor, lag.head, lag.messages, lag.sentence) for part, lag in lags.items()}

            course = Course(wish, note, progress)
            await course.begin()
            try:
                return await _receive(consumer, wish, course, show, is_reliable=info.reliable)
            finally:
                if wish.ack and info.reliable:
                    await _flush(consumer, note)


async def _receive(
    consumer: Consumer, wish: Wish, course: Course, show: Callable[[Received], None], *, is_reliable: bool
) -> bool:
    """Whether everything wished for came."""

    async def receive(seconds: float) -> Message | None:
        try:
            return await consumer.receive(timeout=seconds)
        except DeadlineExceeded:
            return None

    received = 0
    while not wish.count or received < wish.count:
        message = await course.next(receive)
        if message is None:
            return course.is_over if wish.once else not wish.count
        show(_received(message, is_reliable))
        received += 1
        course.shown(message.topic, message.offset)
        if wish.ack:
            await message.ack()
    return True


async def _flush(consumer: Consumer, note: Callable[[str], None]) -> None:
    try:
        await consumer.flush(timeout=DIAL_SECONDS)
    except DanubeError as error:
        note(f"perhaps not all is acknowledged, and some of it comes again: {error}")


def _received(message: Message, is_reliable: bool) -> Received:
    return Received(
        message.topic,
        message.offset,
        message.payload,
        message.producer_name or "",
        (message.publish_time - EPOCH) // timedelta(milliseconds=1),
        message.key,
        message.attributes,
        is_reliable,
    )
