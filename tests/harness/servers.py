"""A broker on memory ports with its servers open, and a client that calls them over real sockets.

@served()
async def test_something(calls: Calls) -> None:
    await calls.create_producer("/default/a")
    assert await refused(calls.producers.SendMessage(...)) == (StatusCode.INVALID_ARGUMENT, "…")
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any, NamedTuple

import grpc

from pydanube.api.server import BrokerServers
from pydanube.broker.service import Broker
from pydanube.config import BrokerConfig, Config, StorageConfig
from pydanube.config.grpc import GrpcConfig
from pydanube.core.policies import UNLIMITED, TopicPolicy
from pydanube.ports import ObjectStore, SchemaParsers
from pydanube.schema.answering import Answering
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.schemas.memory import MemorySchemaParsers
from pydanube.stores.work.memory import MemoryWork
from pydanube.stores.work.memory_clock import LoopClock
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire._pb.danube import SchemaRegistry_pb2 as schema_pb
from tests.stubs.danube import DanubeAdmin_pb2_grpc as admin_grpc
from tests.stubs.danube import DanubeApi_pb2_grpc as api_grpc
from tests.stubs.danube import SchemaRegistry_pb2_grpc as schema_grpc
from tests.stubs.pydanube import admin_pb2_grpc as ours_grpc
from tests.stubs.pydanube import pipelines_pb2_grpc as pipelines_grpc
from tests.stubs.pydanube import status_pb2_grpc as status_grpc
from tests.support import run

TOPIC = "/default/orders"
ANYWHERE = "127.0.0.1:0"


class Refused(NamedTuple):
    code: grpc.StatusCode
    sentence: str


async def refused(call: Awaitable[object]) -> Refused:
    """What the call was refused with. No traceback, and a sentence, in every case."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        sentence = error.details() or ""
        assert sentence and "Traceback" not in sentence and ".py" not in sentence
        return Refused(error.code(), sentence)
    raise AssertionError(f"it was answered: {answer}")


class Calls:
    """Stubs of every service, and the calls that nearly every test makes."""

    def __init__(self, broker: Broker, servers: BrokerServers, client: Any, admin: Any) -> None:
        self.broker = broker
        self.servers = servers
        self.channel = client
        self.producers = api_grpc.ProducerServiceStub(client)
        self.consumers = api_grpc.ConsumerServiceStub(client)
        self.discovery = api_grpc.DiscoveryStub(client)
        self.health = api_grpc.HealthCheckStub(client)
        self.storage = api_grpc.StorageServiceStub(client)
        self.schemas = schema_grpc.SchemaRegistryStub(client)
        self.brokers = admin_grpc.BrokerAdminStub(admin)
        self.cluster = admin_grpc.ClusterAdminStub(admin)
        self.namespaces = admin_grpc.NamespaceAdminStub(admin)
        self.topics = admin_grpc.TopicAdminStub(admin)
        self.security = admin_grpc.SecurityAdminStub(admin)
        self.admin_schemas = schema_grpc.SchemaRegistryStub(admin)
        self.ours = ours_grpc.AdminStub(admin)
        self.status = status_grpc.StatusStub(admin)
        self.pipelines = pipelines_grpc.PipelinesStub(admin)

    async def create_producer(self, topic: str = TOPIC, name: str = "p", *, reliable: bool = True, **more: Any) -> int:
        request = pb.ProducerRequest(topic_name=topic, producer_name=name, dispatch_strategy=int(reliable), **more)
        response = await self.producers.CreateProducer(request)
        return int(response.producer_id)

    async def send(self, producer_id: int, payload: bytes = b"x", topic: str = TOPIC, **more: Any) -> int:
        message_id = pb.MsgID(producer_id=producer_id, topic_name=topic)
        fields = {"producer_name": "p", "request_id": 7, **more}
        response = await self.producers.SendMessage(pb.StreamMessage(msg_id=message_id, payload=payload, **fields))
        return int(response.request_id)

    async def register(
        self, subject: str, kind: str = "string", definition: bytes = b"", **more: Any
    ) -> schema_pb.RegisterSchemaResponse:
        request = schema_pb.RegisterSchemaRequest(
            subject=subject, schema_type=kind, schema_definition=definition, **more
        )
        answer: schema_pb.RegisterSchemaResponse = await self.schemas.RegisterSchema(request)
        return answer

    async def configure(
        self, subject: str, policy: str = "enforce", payloads: bool = False, topic: str = TOPIC
    ) -> None:
        request = schema_pb.ConfigureTopicSchemaRequest(
            topic_name=topic, schema_subject=subject, validation_policy=policy, enable_payload_validation=payloads
        )
        await self.schemas.ConfigureTopicSchema(request)

    async def subscribe(
        self, subscription: str = "s", consumer: str = "c", *, kind: int = 1, topic: str = TOPIC, **more: Any
    ) -> int:
        request = pb.ConsumerRequest(
            topic_name=topic, consumer_name=consumer, subscription=subscription, subscription_type=kind, **more
        )
        response = await self.consumers.Subscribe(request)
        return int(response.consumer_id)

    def receive(self, consumer_id: int) -> Any:
        return self.consumers.ReceiveMessages(pb.ReceiveRequest(consumer_id=consumer_id))

    async def ack(self, message: pb.StreamMessage, subscription: str = "s") -> None:
        await self.consumers.Ack(pb.AckRequest(msg_id=message.msg_id, subscription_name=subscription))

    async def create_topic(self, name: str = TOPIC, *, reliable: bool = True, **more: Any) -> None:
        await self.topics.CreateTopic(admin_pb.NewTopicRequest(name=name, dispatch_strategy=int(reliable), **more))


@asynccontextmanager
async def serving(
    *,
    policies: TopicPolicy = UNLIMITED,
    auto_create_topics: bool = True,
    storage: StorageConfig = StorageConfig(),  # noqa: B008  # frozen
    make_objects: Callable[[], ObjectStore] | None = None,
    grpc_config: GrpcConfig = GrpcConfig(),  # noqa: B008  # frozen
    parsers: SchemaParsers | None = None,
) -> AsyncIterator[Calls]:
    addresses = BrokerConfig(
        client_addr=ANYWHERE,
        stream_addr=ANYWHERE,
        admin_addr=ANYWHERE,
        metrics_addr=ANYWHERE,
        auto_create_topics=auto_create_topics,
    )
    clock = LoopClock()
    broker = await Broker.start_on(
        Config(broker=addresses, policies=policies, storage=storage, grpc=grpc_config),
        disk=MemoryDisk(),
        metadata=MemoryMetadataStore(clock),
        clock=clock,
        work=MemoryWork(Random(1)),
        objects=make_objects() if make_objects else None,
        parsers=parsers or MemorySchemaParsers(Answering().answer),
    )
    servers = await BrokerServers.open(broker)
    try:
        async with (
            grpc.aio.insecure_channel(servers.client_addr) as client,
            grpc.aio.insecure_channel(servers.admin_addr) as admin,
        ):
            yield Calls(broker, servers, client, admin)
    finally:
        await servers.close(grace_seconds=0.2)
        await broker.stop()


def served(**settings: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Runs an async test with a broker of its own; `settings` are those of `serving`."""

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        async def body(*arguments: Any, **named: Any) -> None:
            async with serving(**settings) as calls:
                await test(calls, *arguments, **named)

        @functools.wraps(test)
        def run_it(*arguments: Any, **named: Any) -> None:
            run(body(*arguments, **named))

        # pytest fills in the other parameters, as for any test.
        signature = inspect.signature(test)
        _, *others = signature.parameters.values()
        run_it.__signature__ = signature.replace(parameters=others, return_annotation=None)  # type: ignore[attr-defined]
        return run_it

    return decorate
