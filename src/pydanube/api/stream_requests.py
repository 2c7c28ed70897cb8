"""What a native peer may ask for, request by request; and the producers and consumers it has opened.

A request runs in a task of its own, so a slow one does not hold up the others, and answers with its request id. Errors
become Error commands with the fields of the class they have inside the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from pydanube.api.places import here, locate, make_topic
from pydanube.broker.fanout import FanoutSubscription, FanoutTopic
from pydanube.broker.outbox import AnyOutbox, Delivered, DeliveredBatch
from pydanube.broker.overview import Overview
from pydanube.broker.subscription import Subscription
from pydanube.broker.topic import Topic
from pydanube.broker.topics import AnyTopic
from pydanube.core.events import Ranges
from pydanube.core.names import ConsumerId, NamespaceName, ProducerId, SubscriptionName, TopicName
from pydanube.core.policies import Delivery, SubscriptionKind
from pydanube.core.roster import Permits
from pydanube.errors import (
    DanubeError,
    DeliveryMismatch,
    InvalidBatch,
    MessageTooLarge,
    NotServed,
    OffsetOutOfRange,
    OutOfSequence,
    ProtocolViolation,
    TopicUnknown,
)
from pydanube.log.batch import Batch, encode, payload_size_max, rows_of, topic_hash
from pydanube.log.wal import Receipt
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb

if TYPE_CHECKING:
    from pydanube.api.stream import Connection

log = logging.getLogger(__name__)

KINDS: Final = dict(enumerate(SubscriptionKind))
DURABILITIES: Final = {"fsync": pb.FSYNC, "os": pb.OS}
FETCH_BYTES_DEFAULT: Final = 1024 * 1024
FETCH_BYTES_MAX: Final = 32 * 1024 * 1024
FETCH_WAIT_MAX_SECONDS: Final = 60.0
HANDLES_MAX: Final = 10_000


class Producing:
    """A producer that the peer has opened."""

    __slots__ = ("handle", "hole", "name", "producer_id", "session", "topic")

    def __init__(self, handle: int, topic: AnyTopic, name: str, producer_id: ProducerId, session: int) -> None:
        self.handle = handle
        self.topic = topic
        self.name = name
        self.producer_id = producer_id
        self.session = session
        self.hole: int | None = None  # sequence of the first batch that was refused: nothing behind it may pass

    def refused(self, first_sequence: int) -> None:
        if self.session and (self.hole is None or first_sequence < self.hole):
            self.hole = first_sequence

    def check(self, batch: Batch) -> None:
        """The batch is this producer's, of this session, and no message in it is too large."""
        header = batch.header
        mine = (self.producer_id, self.session) if self.session else (0, 0)
        if (header.producer_id, header.session) != mine:
            raise InvalidBatch(f"it is of producer {header.producer_id}, session {header.session}; opened were {mine}")
        if self.hole is not None:
            if header.first_sequence > self.hole:
                raise OutOfSequence(self.producer_id, header.first_sequence, self.hole)
            self.hole = None
        policy = self.topic.policy
        if not policy.allows_message(header.uncompressed_length):  # then look closer
            largest = payload_size_max(batch)
            if not policy.allows_message(largest):
                raise MessageTooLarge(largest, policy.max_message_size)
        self.topic.touch_producer(self.producer_id)

    def receipt(self, receipt: Receipt | None, rows: int) -> pb.Receipt:
        if receipt is None:
            return pb.Receipt(rows=rows, durability=pb.MEMORY)
        return pb.Receipt(
            offset=receipt.offset,
            rows=rows,
            epoch=receipt.epoch,
            durability=DURABILITIES[receipt.durability],
            duplicate=receipt.duplicate,
        )


class Consuming:
    """A consumer that the peer has opened."""

    __slots__ = ("_bytes", "_messages", "consumer_id", "handle", "outbox", "subscription", "topic")

    def __init__(
        self,
        handle: int,
        topic: AnyTopic,
        subscription: Subscription | FanoutSubscription,
        consumer_id: ConsumerId,
        outbox: AnyOutbox,
    ) -> None:
        self.handle = handle
        self.topic = topic
        self.subscription = subscription
        self.consumer_id = consumer_id
        self.outbox = outbox
        self._messages = self._bytes = 0  # granted and not used yet, as the peer sees it

    @property
    def is_reliable(self) -> bool:
        return isinstance(self.subscription, Subscription)

    def grant(self, messages: int, size_bytes: int) -> None:
        self._messages = frames.granted(self._messages, messages)
        self._bytes = frames.granted(self._bytes, size_bytes)
        if isinstance(self.subscription, Subscription):
            self.subscription.grant(self.consumer_id, Permits(messages, size_bytes))

    def sent(self, item: DeliveredBatch) -> None:
        self._messages -= min(self._messages, sum(end - first for first, end in item.ranges))
        self._bytes -= min(self._bytes, item.batch.header.size_bytes)

    def ack(self, ranges: Ranges) -> None:
        if isinstance(self.subscription, Subscription):
            self.subscription.ack_ranges(ranges)

    def nack(self, ranges: Ranges, delay_seconds: float, reason: str) -> None:
        if isinstance(self.subscription, Subscription):
            self.subscription.nack_ranges(ranges, delay_seconds, reason)

    async def packed(self, items: list[Delivered]) -> list[DeliveredBatch]:
        """Messages of a non-reliable topic as one batch."""
        batch = encode(rows_of([item.message for item in items]), topic=self.topic.name)
        return [DeliveredBatch(batch, ((0, len(items)),), 1)]


class Requests:
    """One connection's requests, producers and consumers."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._broker = connection.broker
        self.producers: dict[int, Producing] = {}
        self._consumers: dict[int, Consuming] = {}
        self._handles = 0
        self.pumps = 0
        self._kinds: dict[str, Callable[[pb.Command], Awaitable[dict[str, Any]]]] = {
            "lookup": self._lookup,
            "open_producer": self._open_producer,
            "close_producer": self._close_producer,
            "subscribe": self._subscribe,
            "close_consumer": self._close_consumer,
            "unsubscribe": self._unsubscribe,
            "seek": self._seek,
            "find_offset": self._find_offset,
            "create_topic": self._create_topic,
            "delete_topic": self._delete_topic,
            "describe_topic": self._describe_topic,
            "describe_storage": self._describe_storage,
            "list_topics": self._list_topics,
            "get_lag": self._get_lag,
        }

    def take(self, kind: str, command: pb.Command) -> None:
        """Runs the request in a task of its own."""
        if kind == "fetch":
            self._connection.spawn(self._fetch(command))
        elif kind in self._kinds:
            self._connection.spawn(self._answer(self._kinds[kind], command))
        else:
            raise ProtocolViolation(f"{kind} is the broker's to say")

    def consumer(self, handle: int) -> Consuming | None:
        """None for one that has ended: what the peer says of it came too late, and changes nothing."""
        if not 0 < handle <= self._handles:
            raise ProtocolViolation(f"consumer {handle} was never opened on this connection")
        return self._consumers.get(handle)

    def forget(self, consuming: Consuming) -> None:
        self._consumers.pop(consuming.handle, None)

    def end(self) -> None:
        """The connection is gone: what its consumers held goes to others."""
        for consuming in self._consumers.values():
            consuming.subscription.detach(consuming.consumer_id, consuming.outbox)
        self._consumers.clear()
        self.producers.clear()

    async def _answer(self, handler: Callable[[pb.Command], Awaitable[dict[str, Any]]], command: pb.Command) -> None:
        try:
            answer = await handler(command)
        except DanubeError as error:
            self._connection.answer_error(command.request_id, error)
        except Exception as error:
            log.exception("request failed", extra={"kind": command.WhichOneof("kind")})
            self._connection.answer_error(command.request_id, error)
        else:
            self._connection.send(pb.Command(request_id=command.request_id, **answer))

    def _new_handle(self) -> int:
        if len(self.producers) + len(self._consumers) >= HANDLES_MAX:
            raise ProtocolViolation(f"a connection has at most {HANDLES_MAX} producers and consumers")
        self._handles += 1
        return self._handles

    # --- topics -------------------------------------------------------------------------------------

    async def _lookup(self, command: pb.Command) -> dict[str, Any]:
        name = TopicName(command.lookup.topic)
        found = await self._broker.topics.partitions(name)
        if not found:
            raise TopicUnknown(name)
        if found != [name]:
            place, partitions = here(self._broker), len(found)
        else:
            located, partitions = await locate(self._broker, name), 0
            if isinstance(located, NotServed):
                raise located
            place = located
        return {
            "located": pb.Located(
                topic=name,
                connect_url=place.connect_url,
                stream_url=place.stream_url,
                is_local=place.is_local,
                partitions=partitions,
            )
        }

    async def _create_topic(self, command: pb.Command) -> dict[str, Any]:
        request = command.create_topic
        delivery = Delivery.RELIABLE if request.reliable else Delivery.NON_RELIABLE
        name, subject = TopicName(request.topic), request.schema_subject or None
        if request.partitions:
            await self._broker.topics.create_partitioned(
                name, request.partitions, delivery=delivery, schema_subject=subject
            )
        else:
            await make_topic(self._broker, name, delivery=delivery, schema_subject=subject)
        return {"done": pb.Done()}

    async def _delete_topic(self, command: pb.Command) -> dict[str, Any]:
        await self._broker.topics.delete(TopicName(command.delete_topic.topic))
        return {"done": pb.Done()}

    async def _describe_topic(self, command: pb.Command) -> dict[str, Any]:
        name = TopicName(command.describe_topic.topic)
        found = await self._broker.topics.partitions(name)
        if not found:
            raise TopicUnknown(name)
        overview = Overview(self._broker)
        if found != [name]:
            reliable = await overview.delivery(found[0]) is Delivery.RELIABLE
            return {"topic_info": pb.TopicInfo(topic=name, reliable=reliable, partitions=len(found))}
        live = await overview.live(name)
        described, policy = await overview.describe(name), await overview.policy(name)
        topic, reliable = self._broker.topics.get(name), described.delivery is Delivery.RELIABLE
        info = pb.TopicInfo(
            topic=name,
            reliable=reliable,
            durability=_durability(topic) if topic is not None else pb.FSYNC if reliable else pb.MEMORY,
            schema_subject=described.schema_subject or "",
            message_size_max=policy.max_message_size,
            subscriptions=len(described.subscriptions),
            **live._asdict(),
        )
        return {"topic_info": info}

    async def _describe_storage(self, command: pb.Command) -> dict[str, Any]:
        topic = await self._reliable(command.describe_storage.topic)
        # Gaps first: an orphan that is rescued meanwhile is told twice, and whoever reads believes the object.
        orphans, voids = await topic.gaps()
        info = pb.StorageInfo(
            topic=topic.name,
            first_offset=topic.first_offset,
            head=topic.head,
            orphans=[offset for gap in orphans for offset in gap],
            voids=[offset for gap in voids for offset in gap],
        )
        if topic.storage is not None:
            tier = topic.storage.tier
            info.storage_url = self._broker.config.storage.url or ""
            info.history_version = tier.history.history_version
            info.manifest = tier.history.manifest or ""
            info.manifest_crc = tier.history.manifest_crc
            info.descriptors.extend(each.to_bytes() for each in tier.objects.keyed)
        return {"storage_info": info}

    async def _list_topics(self, command: pb.Command) -> dict[str, Any]:
        request = command.list_topics
        namespace = NamespaceName(request.namespace) if request.namespace else None
        names = sorted(name for name in await self._broker.topics.names(namespace) if name > request.after)
        count = min(request.count_max or 100, 100)
        return {"topic_list": pb.TopicList(topics=names[:count], more=len(names) > count)}

    # --- producing ----------------------------------------------------------------------------------

    async def _open_producer(self, command: pb.Command) -> dict[str, Any]:
        request = command.open_producer
        name = TopicName(request.topic)
        wanted = Delivery.RELIABLE if request.reliable else Delivery.NON_RELIABLE
        topics = self._broker.topics
        try:
            topic = await topics.require(name)
        except TopicUnknown:
            if not request.create or not self._broker.config.broker.auto_create_topics:
                raise
            topic = await topics.create(name, delivery=wanted, schema_subject=request.schema_subject or None)
        if topic.delivery is not wanted:
            raise DeliveryMismatch(name, wanted.value, topic.delivery.value)
        producer_id = await topic.add_producer(request.producer_name, exclusive=request.exclusive)
        session = 0
        if isinstance(topic, Topic) and not request.without_session:
            session = request.session or await topic.open_session(producer_id)
        handle = self._new_handle()
        self.producers[handle] = Producing(handle, topic, request.producer_name, producer_id, session)
        opened = pb.ProducerOpened(
            producer=handle,
            producer_id=producer_id if session else 0,
            session=session,
            topic_hash=topic_hash(name),
            durability=_durability(topic),
            message_size_max=topic.policy.max_message_size,
        )
        return {"producer_opened": opened}

    async def _close_producer(self, command: pb.Command) -> dict[str, Any]:
        self.producers.pop(command.close_producer.producer, None)
        return {"done": pb.Done()}

    # --- consuming ----------------------------------------------------------------------------------

    async def _subscribe(self, command: pb.Command) -> dict[str, Any]:
        request = command.subscribe
        topic = await self._broker.topics.require(TopicName(request.topic))
        name = SubscriptionName(request.subscription)
        kind = KINDS.get(request.type)
        if kind is None:
            raise ProtocolViolation(f"subscription type {request.type} is none of {sorted(KINDS)}")
        filters = tuple(request.key_filters)
        handle = self._new_handle()
        if isinstance(topic, Topic):
            start = await _place(topic, request.start) if request.HasField("start") else None
            identity = await topic.subscribe(name, kind, request.consumer_name, filters, start, native=True)
            reliable = topic.require(name)
            consuming = Consuming(handle, topic, reliable, identity, reliable.attach_native(identity))
            cursor = reliable.get_lag_info().cursor
            next_unacked = 0 if cursor is None else cursor + 1
        else:
            identity = await topic.subscribe(name, kind, request.consumer_name, filters)
            fanned = topic.require(name)
            consuming = Consuming(handle, topic, fanned, identity, fanned.attach(identity))
            next_unacked = 0
        self._consumers[handle] = consuming
        consuming.grant(request.messages, request.bytes)
        self._start_pump(consuming)
        subscribed = pb.Subscribed(
            consumer=handle,
            consumer_id=identity,
            type=pb.SubscriptionType.Name(list(SubscriptionKind).index(consuming.subscription.kind)),
            next_unacked=next_unacked,
        )
        return {"subscribed": subscribed}

    def _start_pump(self, consuming: Consuming) -> None:
        self.pumps += 1
        task = self._connection.spawn(self._connection.pump(consuming))

        def ended(_: object) -> None:
            self.pumps -= 1

        task.add_done_callback(ended)

    async def _close_consumer(self, command: pb.Command) -> dict[str, Any]:
        consuming = self._consumers.pop(command.close_consumer.consumer, None)
        if consuming is not None:
            consuming.subscription.detach(consuming.consumer_id, consuming.outbox)
        return {"done": pb.Done()}

    async def _unsubscribe(self, command: pb.Command) -> dict[str, Any]:
        request = command.unsubscribe
        topic = await self._broker.topics.require(TopicName(request.topic))
        await topic.unsubscribe(SubscriptionName(request.subscription))
        return {"done": pb.Done()}

    async def _seek(self, command: pb.Command) -> dict[str, Any]:
        request = command.seek
        topic = await self._reliable(request.topic)
        subscription = topic.require(SubscriptionName(request.subscription))
        offset = await _place(topic, request.to)
        subscription.seek(offset)
        return {"offset_found": pb.OffsetFound(offset=offset)}

    async def _get_lag(self, command: pb.Command) -> dict[str, Any]:
        topic = await self._reliable(command.get_lag.topic)
        subscription = topic.require(SubscriptionName(command.get_lag.subscription))
        info = subscription.get_lag_info()
        lag = pb.Lag(
            cursor=info.cursor,
            head=info.head,
            lag_messages=info.lag_messages,
            has_lag=info.has_lag,
            sentence=subscription.explain()[:1024],
        )
        return {"lag": lag}

    # --- reading ------------------------------------------------------------------------------------

    async def _find_offset(self, command: pb.Command) -> dict[str, Any]:
        topic = await self._reliable(command.find_offset.topic)
        return {"offset_found": pb.OffsetFound(offset=await _place(topic, command.find_offset.at))}

    async def _fetch(self, command: pb.Command) -> None:
        request = command.fetch
        try:
            topic = await self._reliable(request.topic)
            end = request.end if request.HasField("end") else None
            found = await self._read(topic, request.start, end, request.bytes_max, request.wait_ms / 1000)
        except DanubeError as error:
            self._connection.answer_error(command.request_id, error)
            return
        next_offset = found[-1].header.end_offset if found else request.start
        fetched = pb.Fetched(next_offset=next_offset, head=topic.head, first_offset=topic.first_offset)
        body = [buffer for batch in found for buffer in batch.buffers]
        self._connection.send(pb.Command(request_id=command.request_id, fetched=fetched), *body)

    async def _read(
        self, topic: Topic, start: int, end: int | None, bytes_max: int, wait_seconds: float
    ) -> list[Batch]:
        if start > topic.head:
            raise OffsetOutOfRange(topic.name, start, topic.first_offset, topic.head)
        if start >= topic.head and wait_seconds:
            await topic.wait_beyond(start, min(wait_seconds, FETCH_WAIT_MAX_SECONDS))
        bytes_max = min(bytes_max or FETCH_BYTES_DEFAULT, FETCH_BYTES_MAX)
        return await topic.batches(start, topic.head if end is None else end, bytes_max)

    async def _reliable(self, name: str) -> Topic:
        topic = await self._broker.topics.require(TopicName(name))
        if isinstance(topic, FanoutTopic):
            raise NotServed(topic.name, "a non-reliable topic keeps no messages and has no offsets")
        return topic


def _durability(topic: AnyTopic) -> pb.Durability:
    return DURABILITIES[topic.log.durability] if isinstance(topic, Topic) else pb.MEMORY


async def _place(topic: Topic, place: pb.Place) -> int:
    match place.WhichOneof("at"):
        case "offset":
            return place.offset
        case "time_us":
            return await topic.offset_at(place.time_us)
        case _:
            return topic.first_offset if place.edge == pb.EARLIEST else topic.head
