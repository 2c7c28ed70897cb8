"""The message path over gRPC: what every official client of the reference calls on the client port.

Each class answers one service of package `danube`; `adapter.py` turns what they raise into a status. A message may have
at most MESSAGE_SIZE_MAX_BYTES, all its fields counted: an official consumer receives no more than 4 MiB per message, so
a larger one could be published and never be delivered. The namespace's `max_message_size` may be lower.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from time import perf_counter
from typing import Any, Final, cast
from urllib.parse import unquote

from google.protobuf.message import DecodeError

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.api.operations import offset_of
from pydanube.api.topic_addresses import locate, position_of
from pydanube.broker.any_topic import AnySubscription, AnyTopic
from pydanube.broker.outbox import Caller
from pydanube.broker.service import Broker
from pydanube.core.names import ConsumerId, ProducerId, SubscriptionName, TopicName, producer_id
from pydanube.core.policies import SUBSCRIPTION_TYPES, Delivery
from pydanube.errors import (
    ConsumerUnknown,
    DanubeError,
    DeliveryMismatch,
    NotServed,
    SubscriptionUnknown,
    TopicExists,
    TopicUnknown,
)
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire._pb.pydanube import stream_pb2
from pydanube.wire.convert import START_HEADER, envelope_of, message_of
from pydanube.wire.status import SEND, Code, camel, status

RECEIVE_MAX_BYTES: Final = 4 * 1024 * 1024  # what gRPC lets a client receive by default
MESSAGE_SIZE_MAX_BYTES: Final = RECEIVE_MAX_BYTES - 1024  # less what the broker adds: ids, offset, its address
UNKNOWN_CONSUMER_SECONDS: Final = 0.2  # the Python client would otherwise open a thousand streams per second
CLOSES_MAX: Final = 2  # a dead id is answered CLOSE this often; then an error ends the client's poll
DEAD_IDS_MAX: Final = 10_000
NAME_SIZE_MAX_BYTES: Final = 1024  # of producers, consumers and key filters
KEY_FILTERS_MAX: Final = 256
SENDERS_MAX: Final = 1_000  # producers whose id a stream remembers
AGENT_MAX: Final = 200  # characters of a client's name that are shown
DELAY_MAX_MS: Final = 365 * 24 * 3600 * 1000

DELIVERY: Final = {pb.NonReliable: Delivery.NON_RELIABLE, pb.Reliable: Delivery.RELIABLE}


class ProducerService:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics

    async def CreateProducer(self, request: pb.ProducerRequest, context: Any) -> pb.ProducerResponse:
        name = TopicName(request.topic_name)
        delivery = DELIVERY.get(request.dispatch_strategy)
        if delivery is None:
            raise RpcRefusal(
                Code.INVALID_ARGUMENT,
                f"dispatch_strategy {request.dispatch_strategy} is not known: 0 is NonReliable, 1 is Reliable",
            )
        if request.producer_access_mode not in (pb.Shared, pb.Exclusive):
            raise RpcRefusal(
                Code.INVALID_ARGUMENT,
                f"producer_access_mode {request.producer_access_mode} is not known: 0 is Shared, 1 is Exclusive",
            )
        check_name("producer_name", request.producer_name)
        subject = request.schema_ref.subject if request.HasField("schema_ref") else None
        topic = await self._find_or_create(name, delivery, subject)
        if topic.delivery is not delivery:
            raise DeliveryMismatch(name, delivery.value, topic.delivery.value)
        if subject is not None:
            await topic.bind(subject)
        identity = await topic.add_producer(
            request.producer_name, exclusive=request.producer_access_mode == pb.Exclusive
        )
        if (producer := topic.producers.get(identity)) is not None:
            producer.caller = caller_of(context, self._broker)
        return pb.ProducerResponse(
            request_id=request.request_id, producer_id=identity, producer_name=request.producer_name
        )

    async def SendMessage(self, request: pb.StreamMessage) -> pb.MessageResponse:
        """The hot path: nothing here that is not needed once per message."""
        started = perf_counter()
        place = request.msg_id
        # A known name is a good one, so it is looked up before it is checked.
        topic = self._topics.get(cast(TopicName, place.topic_name))
        if topic is None:
            if not request.HasField("msg_id"):
                raise RpcRefusal(Code.INVALID_ARGUMENT, "msg_id is missing: it names the topic and the producer")
            topic = await self._topics.require(TopicName(place.topic_name))
        try:
            await topic.publish(ProducerId(place.producer_id), envelope_of(request))
        except DanubeError as error:
            topic.metrics.send_errors[camel(status(error, SEND).code)] += 1
            raise
        topic.metrics.send_latency.observe(perf_counter() - started)
        return pb.MessageResponse(request_id=request.request_id)

    async def _find_or_create(self, name: TopicName, delivery: Delivery, subject: str | None) -> AnyTopic:
        try:
            return await self._topics.require(name)
        except TopicUnknown:
            if not self._broker.config.broker.auto_create_topics:
                raise
        try:
            return await self._topics.create(name, delivery=delivery, schema_subject=subject or None)
        except NotServed:
            self._broker.telemetry.redirects["post_create", name.namespace] += 1
            raise
        except TopicExists as taken:
            try:
                return await self._topics.require(name)  # another caller created it in the meantime
            except TopicUnknown:
                raise taken from None


class ConsumerService:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics

    async def Subscribe(self, request: pb.ConsumerRequest, context: Any) -> pb.ConsumerResponse:
        name = TopicName(request.topic_name)
        subscription = SubscriptionName(request.subscription)
        check_name("consumer_name", request.consumer_name)
        if len(request.key_filters) > KEY_FILTERS_MAX:
            raise RpcRefusal(
                Code.INVALID_ARGUMENT, f"{len(request.key_filters)} key_filters are too many: {KEY_FILTERS_MAX} may be"
            )
        for key_filter in request.key_filters:
            check_name("key_filters", key_filter)
        if not 0 <= request.subscription_type < len(SUBSCRIPTION_TYPES):
            known = ", ".join(f"{number} is {kind.value}" for number, kind in enumerate(SUBSCRIPTION_TYPES))
            raise RpcRefusal(  # the reference's code
                Code.PERMISSION_DENIED,
                f"Not able to subscribe to the topic {name} due to subscription_type {request.subscription_type}, "
                f"which is not known: {known}",
            )
        place = _start(context)
        topic = await self._topics.require(name)
        start = await offset_of(topic, position_of(place)) if place is not None and topic.reliable else None
        identity = await topic.subscribe(
            subscription,
            SUBSCRIPTION_TYPES[request.subscription_type],
            request.consumer_name,
            tuple(request.key_filters),
            start,
        )
        return pb.ConsumerResponse(
            request_id=request.request_id, consumer_id=identity, consumer_name=request.consumer_name
        )

    async def ReceiveMessages(self, request: pb.ReceiveRequest, context: Any) -> None:
        """Until the client leaves, another stream takes over (a clean end) or the topic does (its error)."""
        consumer = ConsumerId(request.consumer_id)
        try:
            topic, subscription = self._find(consumer)
            outbox = subscription.attach(consumer)
        except DanubeError:
            await asyncio.sleep(UNKNOWN_CONSUMER_SECONDS)
            raise
        if (registration := subscription.registration(consumer)) is not None:
            registration.caller = caller_of(context, self._broker)
        try:
            # The Rust client waits for the headers with a lock held; gRPC would keep them until the first message.
            await context.send_initial_metadata(())
            senders: dict[str | None, ProducerId] = {}
            while delivered := await outbox.get():
                for each in delivered:
                    if not subscription.is_wanted(consumer, each):
                        continue
                    offset, message, _ = each
                    sender = senders.get(message.producer_name)
                    if sender is None:
                        if len(senders) >= SENDERS_MAX:
                            senders.clear()
                        sender = senders[message.producer_name] = producer_id(topic.name, message.producer_name or "")
                    await context.write(
                        message_of(
                            message,
                            topic=topic.name,
                            offset=offset,
                            producer_id=sender,
                            broker_addr=self._broker.broker_url,
                        )
                    )
        finally:
            subscription.detach(consumer, outbox)
        if outbox.ended is not None:
            raise outbox.ended

    async def Ack(self, request: pb.AckRequest) -> pb.AckResponse:
        subscription = await self._subscription_of(request)
        subscription.ack(request.msg_id.topic_offset)
        return pb.AckResponse(request_id=request.request_id)

    async def Nack(self, request: pb.NackRequest) -> pb.NackResponse:
        subscription = await self._subscription_of(request)
        delay_ms = min(request.delay_ms, DELAY_MAX_MS)
        subscription.nack(request.msg_id.topic_offset, delay_ms / 1000, request.reason)
        return pb.NackResponse(request_id=request.request_id)

    def _find(self, consumer: ConsumerId) -> tuple[AnyTopic, AnySubscription]:
        found = self._topics.find_consumer(consumer)
        if found is None:
            raise ConsumerUnknown(consumer)
        return found

    async def _subscription_of(self, request: pb.AckRequest | pb.NackRequest) -> AnySubscription:
        name = request.msg_id.topic_name
        topic = self._topics.get(cast(TopicName, name))
        if topic is None:
            if not request.HasField("msg_id"):
                raise RpcRefusal(Code.INVALID_ARGUMENT, "msg_id is missing: it says which message is meant")
            topic = await self._topics.require(TopicName(name))
        subscription = topic.subscriptions.get(cast(SubscriptionName, request.subscription_name))
        if subscription is None:
            raise SubscriptionUnknown(topic.name, SubscriptionName(request.subscription_name))
        return subscription


class Discovery:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._topics = broker.topics

    async def TopicLookup(self, request: pb.TopicLookupRequest) -> pb.TopicLookupResponse:
        """The base of a partitioned topic is no topic: NOT_FOUND, after which clients stay where they are."""
        place = await locate(self._broker, TopicName(request.topic))
        if isinstance(place, NotServed):
            raise RpcRefusal(Code.NOT_FOUND, str(place))
        kind = pb.TopicLookupResponse.Connect if place.is_local else pb.TopicLookupResponse.Redirect
        return pb.TopicLookupResponse(
            request_id=request.request_id,
            response_type=kind,
            connect_url=place.connect_url,
            broker_url=place.broker_url,
            proxy=place.connect_url != place.broker_url,
        )

    async def TopicPartitions(self, request: pb.TopicLookupRequest) -> pb.TopicPartitionsResponse:
        """A topic that does not exist has no partitions. A name that cannot be is an error, as in a lookup."""
        partitions = await self._topics.partitions(TopicName(request.topic))
        return pb.TopicPartitionsResponse(request_id=request.request_id, partitions=partitions)


class HealthCheck:
    """Clients poll every 5 s. CLOSE makes a consumer subscribe again; an error ends the poll of a dead id."""

    def __init__(self, broker: Broker) -> None:
        self._topics = broker.topics
        self._closes: OrderedDict[tuple[int, int], int] = OrderedDict()  # dead ids, and how often each got CLOSE

    async def HealthCheck(self, request: pb.HealthCheckRequest) -> pb.HealthCheckResponse:
        key = (request.client, request.id)
        if self._is_healthy(*key):
            self._closes.pop(key, None)
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.OK)
        closes = self._closes.pop(key, 0) + 1
        self._closes[key] = closes
        if len(self._closes) > DEAD_IDS_MAX:
            self._closes.popitem(last=False)
        if closes > CLOSES_MAX:
            raise RpcRefusal(Code.NOT_FOUND, f"{request.id} is not known here any more, and was told so")
        return pb.HealthCheckResponse(status=pb.HealthCheckResponse.CLOSE)

    def _is_healthy(self, client: int, identity: int) -> bool:
        if client == pb.HealthCheckRequest.Consumer:
            found = self._topics.find_consumer(ConsumerId(identity))
            return found is not None and found[1].is_healthy(ConsumerId(identity))
        if client == pb.HealthCheckRequest.Producer:
            topic = self._topics.find_producer(ProducerId(identity))
            return topic is not None and topic.touch_producer(ProducerId(identity))
        raise RpcRefusal(Code.INVALID_ARGUMENT, f"client {client} is not known: 0 is Producer, 1 is Consumer")


def caller_of(context: Any, broker: Broker) -> Caller:
    """Who calls: gRPC's word for the address, and the library that it uses, which is all that it says of itself."""
    agent = next((value for key, value in context.invocation_metadata() or () if key == "user-agent"), "")
    address = unquote(context.peer()).removeprefix("ipv4:").removeprefix("ipv6:")
    return Caller(address, str(agent)[:AGENT_MAX], "grpc", broker.clock.time_us())


def _start(context: Any) -> stream_pb2.Place | None:
    """Where a new subscription is to begin, if its caller says so: the reference's clients never do."""
    for key, value in context.invocation_metadata() or ():
        if key == START_HEADER:
            try:
                return stream_pb2.Place.FromString(value)
            except DecodeError:
                raise RpcRefusal(Code.INVALID_ARGUMENT, f"{START_HEADER} is no Place") from None
    return None


def check_name(field: str, name: str) -> None:
    """Clients name producers, consumers and filters freely; what is kept for each has a bound all the same."""
    size_bytes = len(name.encode("utf-8", "surrogatepass"))
    if size_bytes > NAME_SIZE_MAX_BYTES:
        raise RpcRefusal(
            Code.INVALID_ARGUMENT, f"{field} has {size_bytes} bytes: at most {NAME_SIZE_MAX_BYTES} are allowed"
        )
