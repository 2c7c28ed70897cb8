"""The work behind `danube produce`: where messages come from, and how they get to the broker through gRPC.

Messages go one after the other, each acknowledged before the next, so they arrive in order. `in_flight` above 1 gives
that up for speed. A broker that is away for a moment is waited for; a message that it refuses is counted and the rest
goes on.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from pydanube.client.grpc.connection import BrokerRefused, GrpcConnection, is_passing, with_retries
from pydanube.client.grpc.owners import Owners
from pydanube.core.names import TopicName, partition_of_key
from pydanube.errors import ConfigError, DanubeError
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire._pb.danube import SchemaRegistry_pb2 as schema_pb

CHUNK_BYTES: Final = 64 * 1024
CHUNKS_MAX: Final = 4
OTHER_KIND: Final = "does not match topic strategy"  # a broker's words


class Outgoing(NamedTuple):
    payload: bytes
    key: str | None = None


class Sent(NamedTuple):
    """One message and its fate. `error` is None for an acknowledged one."""

    topic: str
    request_id: int
    size_bytes: int
    error: DanubeError | None = None
    offset: int | None = None  # gRPC does not tell


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """What `--schema-…` asks for. A `definition` is registered first."""

    subject: str
    version: int | None = None
    min_version: int | None = None
    definition: bytes | None = None
    kind: str = "json_schema"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How to send; what to send comes separately."""

    topic: TopicName
    producer: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    partitions: int = 0
    reliable: bool | None = None  # None: as the topic is; a new one is reliable
    interval_seconds: float = 0.0
    in_flight: int = 1
    schema: Schema | None = None


# --- where messages come from -------------------------------------------------------------------------


async def repeated(message: Outgoing, count: int) -> AsyncIterator[Outgoing]:
    for _ in range(count):
        yield message


async def by_line(file: int, key: str | None, separator: str | None) -> AsyncIterator[Outgoing]:
    """One message per line, without its line end. With a separator, what stands before it is the key."""
    rest = b""
    async for chunk in _chunks(file):
        *complete, rest = (rest + chunk).split(b"\n")
        for line in complete:
            yield _message(line, key, separator)
    if rest:
        yield _message(rest, key, separator)


def _message(line: bytes, key: str | None, separator: str | None) -> Outgoing:
    payload = line.removesuffix(b"\r")
    if separator is None:
        return Outgoing(payload, key)
    before, found, after = payload.partition(separator.encode())
    if not found:
        raise ConfigError("--key-separator", separator, f"every line has it, but {payload[:60]!r} does not")
    return Outgoing(after, before.decode("utf-8", "replace"))


async def _chunks(file: int) -> AsyncIterator[bytes]:
    """What is read from an open file descriptor, which may be somebody's keyboard.

    A daemon thread reads, without a buffer whose lock it could hold: Ctrl-C waits for nobody.
    """
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | OSError] = asyncio.Queue(CHUNKS_MAX)

    def read() -> None:
        chunk: bytes | OSError = b"more"
        while chunk and isinstance(chunk, bytes):
            try:
                chunk = os.read(file, CHUNK_BYTES)
            except OSError as error:
                chunk = error
            try:
                asyncio.run_coroutine_threadsafe(queue.put(chunk), loop).result()
            except (RuntimeError, CancelledError):
                return  # the command is over

    threading.Thread(target=read, daemon=True, name="input").start()
    while chunk := await queue.get():
        if isinstance(chunk, OSError):
            raise chunk
        yield chunk


# --- how they get there -------------------------------------------------------------------------------


async def produce(
    connection: GrpcConnection, order: Order, messages: AsyncIterator[Outgoing], report: Callable[[Sent], None]
) -> None:
    """Sends everything; `report` hears of each message. Raises if the broker stays away, or accepts no producer."""
    async with Owners(connection) as owners:
        producers = Producers(owners, order)
        await producers.open()
        await _send_all(producers, order, messages, report)


async def _send_all(
    producers: Producers, order: Order, messages: AsyncIterator[Outgoing], report: Callable[[Sent], None]
) -> None:
    turn = asyncio.Lock()  # of taking the next message
    is_first = True

    async def next_message() -> Outgoing | None:
        nonlocal is_first
        async with turn:
            message = await anext(messages, None)
            if order.interval_seconds and not is_first and message is not None:
                await asyncio.sleep(order.interval_seconds)
            is_first = False
            return message

    async def work() -> None:
        while (message := await next_message()) is not None:
            report(await producers.send(message))

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(order.in_flight):
                group.create_task(work())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


class Producers:
    """One producer, or one per partition: round robin, or by key as every client of the reference does."""

    def __init__(self, owners: Owners, order: Order) -> None:
        self._owners = owners
        self._order = order
        self._names = order.topic.partition_names(order.partitions) if order.partitions else [order.topic]
        self._ids: dict[str, int] = {}
        self._opened_at: dict[str, GrpcConnection] = {}
        self._turns = itertools.count()
        self._request_ids = itertools.count(1)
        self._schema_id: int | None = None
        self._schema_version: int | None = None
        self._reliable = order.reliable is not False

    async def open(self) -> None:
        if self._order.schema is not None:
            await self._find_schema(self._order.schema)
        for topic in self._names:
            await with_retries(partial(self._at_owner, topic))

    async def send(self, message: Outgoing) -> Sent:
        """Raises only if the broker stays away."""
        topic = self._names[self._choose(message.key)]
        size_bytes = len(message.payload)
        try:
            number = await with_retries(lambda: self._send(topic, message))
        except BrokerRefused as error:
            if is_passing(error):
                raise
            return Sent(topic, 0, size_bytes, error)
        return Sent(topic, number, size_bytes)

    def _choose(self, key: str | None) -> int:
        if len(self._names) == 1:
            return 0
        return partition_of_key(key, len(self._names)) if key is not None else next(self._turns) % len(self._names)

    def _producer_name(self, number: int) -> str:
        return f"{self._order.producer}-{number}" if self._order.partitions else self._order.producer

    async def _at_owner(self, topic: str) -> GrpcConnection:
        """The broker that serves the topic, with a producer there."""
        broker = await self._owners.of(topic)
        if self._opened_at.get(topic) is not broker:
            try:
                self._ids[topic] = await self._create_as_it_is(broker, self._names.index(TopicName(topic)), topic)
            except DanubeError:
                self._owners.forget(topic)
                raise
            self._opened_at[topic] = broker
        return broker

    async def _create_as_it_is(self, broker: GrpcConnection, number: int, topic: str) -> int:
        """A topic that is there and of the other kind is taken as it is, unless it was said what it should be."""
        try:
            return await self._create(broker, number, topic)
        except BrokerRefused as error:
            if self._order.reliable is not None or OTHER_KIND not in error.sentence:
                raise
        self._reliable = not self._reliable
        return await self._create(broker, number, topic)

    async def _create(self, broker: GrpcConnection, number: int, topic: str) -> int:
        schema = self._order.schema
        reference = None
        if schema is not None and schema.version is not None:
            reference = pb.SchemaReference(subject=schema.subject, pinned_version=schema.version)
        elif schema is not None and schema.min_version is not None:
            reference = pb.SchemaReference(subject=schema.subject, min_version=schema.min_version)
        elif schema is not None:
            reference = pb.SchemaReference(subject=schema.subject, use_latest=True)
        answer = await broker.call(
            "danube.ProducerService/CreateProducer",
            pb.ProducerRequest(
                request_id=next(self._request_ids),
                producer_name=self._producer_name(number),
                topic_name=topic,
                schema_ref=reference,
                dispatch_strategy=pb.Reliable if self._reliable else pb.NonReliable,
            ),
            pb.ProducerResponse,
        )
        return answer.producer_id

    async def _send(self, topic: str, message: Outgoing) -> int:
        broker = await self._at_owner(topic)
        request = pb.StreamMessage(
            request_id=next(self._request_ids),
            msg_id=pb.MsgID(producer_id=self._ids[topic], topic_name=topic),
            payload=message.payload,
            publish_time=time.time_ns() // 1_000_000,
            producer_name=self._producer_name(self._names.index(TopicName(topic))),
            attributes=self._order.attributes,
            schema_id=self._schema_id,
            schema_version=self._schema_version,
            routing_key=message.key,
        )
        try:
            answer = await broker.call("danube.ProducerService/SendMessage", request, pb.MessageResponse)
        except DanubeError as error:
            self._owners.forget(topic)
            if isinstance(error, BrokerRefused) and is_passing(error):
                self._opened_at.pop(topic, None)  # it moved, and came back perhaps: the broker forgot the producer
            raise
        return answer.request_id

    async def _find_schema(self, schema: Schema) -> None:
        found: schema_pb.RegisterSchemaResponse | schema_pb.GetSchemaResponse
        if schema.definition is not None:
            print("Auto-registering schema...")
            found = await self._owners.first.call(
                "danube_schema.SchemaRegistry/RegisterSchema",
                schema_pb.RegisterSchemaRequest(
                    subject=schema.subject, schema_type=schema.kind, schema_definition=schema.definition
                ),
                schema_pb.RegisterSchemaResponse,
            )
            print(f"Schema registered with ID: {found.schema_id}")
        else:
            found = await self._owners.first.call(
                "danube_schema.SchemaRegistry/GetLatestSchema",
                schema_pb.GetLatestSchemaRequest(subject=schema.subject),
                schema_pb.GetSchemaResponse,
            )
        self._schema_id, self._schema_version = found.schema_id, found.version
