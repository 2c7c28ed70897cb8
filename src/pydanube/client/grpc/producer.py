"""A producer over gRPC: one message per call, acknowledged before the call returns.

    async with Owners(connection) as owners:
        producer = GrpcProducer(owners, TopicName("/default/orders"), "shop")
        await producer.open()
        receipt = await producer.send(producer.topic_for("eu"), b"...", "eu")

A topic or each of its partitions has a producer at its owner. A broker that is away for a moment is retried for about
ten seconds; a topic that moved is found again. Order is kept as long as the caller awaits one send before the next.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from pydanube.client.grpc.connection import BrokerRefused, GrpcConnection, is_passing, with_retries
from pydanube.client.grpc.owners import Owners
from pydanube.core.names import TopicName, partition_of_key
from pydanube.errors import DanubeError
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire._pb.danube import SchemaRegistry_pb2 as schema_pb

OTHER_KIND: Final = "does not match topic strategy"  # a broker's words


class GrpcReceipt(NamedTuple):
    """Of an acknowledged message. gRPC does not tell its offset."""

    topic: str
    request_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaReference:
    """The schema of all messages, by its subject. A `definition` is registered first."""

    subject: str
    version: int | None = None
    min_version: int | None = None
    definition: bytes | None = None
    kind: str = "json_schema"

    def to_proto(self) -> pb.SchemaReference:
        if self.version is not None:
            return pb.SchemaReference(subject=self.subject, pinned_version=self.version)
        if self.min_version is not None:
            return pb.SchemaReference(subject=self.subject, min_version=self.min_version)
        return pb.SchemaReference(subject=self.subject, use_latest=True)


class GrpcProducer:
    """One producer, or one per partition: round robin, or by key as every client of the reference does.

    `reliable` None takes a topic as it is; a new one is reliable.
    """

    def __init__(
        self,
        owners: Owners,
        topic: TopicName,
        name: str,
        *,
        partitions: int = 0,
        reliable: bool | None = None,
        attributes: Mapping[str, str] | None = None,
        schema: SchemaReference | None = None,
    ) -> None:
        self._owners = owners
        self._name = name
        self._is_partitioned = partitions > 0
        self._topics = topic.partition_names(partitions) if partitions else [topic]
        self._takes_any_kind = reliable is None
        self._reliable = reliable is not False
        self._attributes = dict(attributes or {})
        self._schema = schema
        self._schema_id: int | None = None
        self._schema_version: int | None = None
        self._ids: dict[str, int] = {}
        self._opened_at: dict[str, GrpcConnection] = {}
        self._turns = itertools.count()
        self._request_ids = itertools.count(1)

    async def open(self) -> None:
        """At every owner, so that a topic that refuses the producer is known before the first message."""
        if self._schema_id is None:
            await self.find_schema()
        for topic in self._topics:
            await with_retries(partial(self._at_owner, topic))

    def topic_for(self, key: str | None) -> TopicName:
        """The topic, or the partition that the next message with this key goes to."""
        if len(self._topics) == 1:
            return self._topics[0]
        turn = next(self._turns) if key is None else partition_of_key(key, len(self._topics))
        return self._topics[turn % len(self._topics)]

    async def send(self, topic: TopicName, payload: bytes, key: str | None = None) -> GrpcReceipt:
        """`topic` is one that `topic_for` named. Raises BrokerRefused, or Unreachable if its owner stays away."""
        return GrpcReceipt(topic, await with_retries(lambda: self._send(topic, payload, key)))

    async def _send(self, topic: TopicName, payload: bytes, key: str | None) -> int:
        broker = await self._at_owner(topic)
        request = pb.StreamMessage(
            request_id=next(self._request_ids),
            msg_id=pb.MsgID(producer_id=self._ids[topic], topic_name=topic),
            payload=payload,
            publish_time=time.time_ns() // 1_000_000,
            producer_name=self._producer_name(topic),
            attributes=self._attributes,
            schema_id=self._schema_id,
            schema_version=self._schema_version,
            routing_key=key,
        )
        try:
            answer = await broker.call("danube.ProducerService/SendMessage", request, pb.MessageResponse)
        except DanubeError as error:
            self._owners.forget(topic)
            if isinstance(error, BrokerRefused) and is_passing(error):
                self._opened_at.pop(topic, None)  # it moved, and came back perhaps: the broker forgot the producer
            raise
        return answer.request_id

    def _producer_name(self, topic: TopicName) -> str:
        return f"{self._name}-{self._topics.index(topic)}" if self._is_partitioned else self._name

    async def _at_owner(self, topic: TopicName) -> GrpcConnection:
        """The broker that serves the topic, with a producer there."""
        broker = await self._owners.of(topic)
        if self._opened_at.get(topic) is not broker:
            try:
                self._ids[topic] = await self._create_as_it_is(broker, topic)
            except DanubeError:
                self._owners.forget(topic)
                raise
            self._opened_at[topic] = broker
        return broker

    async def _create_as_it_is(self, broker: GrpcConnection, topic: TopicName) -> int:
        """A topic that exists and is of the other kind is taken as it is, unless the caller said what it should be."""
        try:
            return await self._create(broker, topic)
        except BrokerRefused as error:
            if not self._takes_any_kind or OTHER_KIND not in error.sentence:
                raise
        self._reliable = not self._reliable
        return await self._create(broker, topic)

    async def _create(self, broker: GrpcConnection, topic: TopicName) -> int:
        request = pb.ProducerRequest(
            request_id=next(self._request_ids),
            producer_name=self._producer_name(topic),
            topic_name=topic,
            schema_ref=None if self._schema is None else self._schema.to_proto(),
            dispatch_strategy=pb.Reliable if self._reliable else pb.NonReliable,
        )
        answer = await broker.call("danube.ProducerService/CreateProducer", request, pb.ProducerResponse)
        return answer.producer_id

    async def find_schema(self) -> int | None:
        """Registers the schema, or looks it up. Returns its id; None if messages have none."""
        schema = self._schema
        if schema is None:
            return None
        found: schema_pb.RegisterSchemaResponse | schema_pb.GetSchemaResponse
        if schema.definition is not None:
            found = await self._owners.first.call(
                "danube_schema.SchemaRegistry/RegisterSchema",
                schema_pb.RegisterSchemaRequest(
                    subject=schema.subject, schema_type=schema.kind, schema_definition=schema.definition
                ),
                schema_pb.RegisterSchemaResponse,
            )
        else:
            found = await self._owners.first.call(
                "danube_schema.SchemaRegistry/GetLatestSchema",
                schema_pb.GetLatestSchemaRequest(subject=schema.subject),
                schema_pb.GetSchemaResponse,
            )
        self._schema_id, self._schema_version = found.schema_id, found.version
        return self._schema_id
