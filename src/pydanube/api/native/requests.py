"""What a native peer may ask for, request by request.

A request runs in a task of its own, so a slow one does not hold up the others, and answers with its request id. Errors
become Error commands with the fields of the class they have inside the broker.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from math import ceil
from typing import TYPE_CHECKING, Any, Final

from pydanube.api.native.handle_table import HandleTable
from pydanube.api.native.handles import DELIVER_OVERHEAD_BYTES, DURABILITIES, ConsumerHandle, ProducerHandle, fetched
from pydanube.api.native.storages import StorageAnswers, describe, question_of
from pydanube.api.operations import TopicOperations, offset_of
from pydanube.api.orders import check_noted, tell_native
from pydanube.api.topic_addresses import here, locate, position_of
from pydanube.broker.any_topic import AnyTopic
from pydanube.broker.overview import Overview
from pydanube.broker.registrations import read_policy, read_subscriptions
from pydanube.broker.topic import Topic
from pydanube.core.history.tiers import Descriptor
from pydanube.core.names import NamespaceName, SubscriptionName, TopicName
from pydanube.core.policies import SUBSCRIPTION_TYPES, Delivery, SubscriptionKind
from pydanube.errors import (
    DanubeError,
    DeliveryMismatch,
    NotServed,
    OffsetOutOfRange,
    ProtocolViolation,
    Refused,
    TopicUnknown,
)
from pydanube.formats.batch import Batch, in_version_1, topic_hash
from pydanube.wire._pb.pydanube import stream_pb2 as pb

if TYPE_CHECKING:
    from pydanube.api.native.connection import NativeConnection

log = logging.getLogger(__name__)

FETCH_BYTES_DEFAULT: Final = 1024 * 1024
FETCH_BYTES_MAX: Final = 32 * 1024 * 1024
FETCH_WAIT_MAX_SECONDS: Final = 60.0


class NativeRequests:
    """One connection's requests."""

    def __init__(self, connection: NativeConnection, handles: HandleTable, operations: TopicOperations) -> None:
        self._connection = connection
        self._handles = handles
        self._broker = connection.broker
        self._operations = operations
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
            "swap_objects": self._swap_objects,
            "flush_log": self._flush_log,
            "list_topics": self._list_topics,
            "get_lag": self._get_lag,
            "note_order": self._note_order,
            "change_failure_policy": self._change_failure_policy,
        }

    def take(self, kind: str, command: pb.Command, body: memoryview) -> None:
        """Runs the request in a task of its own."""
        if kind == "fetch":
            self._connection.spawn(self._fetch(command))
        elif kind == "describe_storages":
            self._connection.spawn(self._describe_storages(command, body))
        else:
            self._connection.spawn(self._answer(self._kinds[kind], command))

    # --- answers ------------------------------------------------------------------------------------

    async def _answer(self, handler: Callable[[pb.Command], Awaitable[dict[str, Any]]], command: pb.Command) -> None:
        try:
            answer = await handler(command)
        except ProtocolViolation as violation:
            self._connection.fail(violation)
        except DanubeError as error:
            self._connection.answer_error(command.request_id, error)
        except Exception as error:
            log.exception("request failed", extra={"kind": command.WhichOneof("kind")})
            self._connection.answer_error(command.request_id, error)
        else:
            self._connection.answer(pb.Command(request_id=command.request_id, **answer))
            tell_native(self._broker, command, answer, self._connection.caller())

    # --- topics -------------------------------------------------------------------------------------

    async def _lookup(self, command: pb.Command) -> dict[str, Any]:
        name = TopicName(command.lookup.topic)
        found = await self._operations.partitions(name)
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
            await self._operations.create_partitioned(name, request.partitions, delivery, subject)
        else:
            await self._operations.create(name, delivery, subject)
        return {"done": pb.Done()}

    async def _delete_topic(self, command: pb.Command) -> dict[str, Any]:
        await self._operations.delete(TopicName(command.delete_topic.topic))
        return {"done": pb.Done()}

    async def _note_order(self, command: pb.Command) -> dict[str, Any]:
        check_noted(command.note_order)
        return {"done": pb.Done()}  # and then it is recorded, as every order

    async def _describe_topic(self, command: pb.Command) -> dict[str, Any]:
        name = TopicName(command.describe_topic.topic)
        found = await self._operations.partitions(name)
        overview = Overview(self._broker)
        if found != [name]:
            reliable = await overview.delivery(found[0]) is Delivery.RELIABLE
            return {"topic_info": pb.TopicInfo(topic=name, reliable=reliable, partitions=len(found))}
        live = await overview.live(name)
        described, policy = await overview.describe(name), await read_policy(self._broker.topics.context.metadata, name)
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
        topic = await self._operations.reliable(TopicName(command.describe_storage.topic))
        return {"storage_info": await describe(self._broker, topic)}

    async def _describe_storages(self, command: pb.Command, body: memoryview) -> None:
        bytes_max = self._connection.session.frame_size_max - DELIVER_OVERHEAD_BYTES
        try:
            question = question_of(body)
            answer = await StorageAnswers(self._broker, self._operations).answer(question, bytes_max)
        except ProtocolViolation as violation:
            self._connection.fail(violation)
        except DanubeError as error:
            self._connection.answer_error(command.request_id, error)
        else:
            head = pb.Command(request_id=command.request_id, storage_infos=pb.StorageInfos())
            self._connection.answer(head, answer.SerializeToString())

    async def _swap_objects(self, command: pb.Command) -> dict[str, Any]:
        request = command.swap_objects
        topic = await self._operations.reliable(TopicName(request.topic))
        try:
            described = Descriptor.from_bytes(request.descriptor)
        except (ValueError, TypeError) as error:
            raise ProtocolViolation(f"the descriptor of an object cannot be understood: {error}") from error
        await topic.swap_objects(request.old, described)
        return {"done": pb.Done()}

    async def _flush_log(self, command: pb.Command) -> dict[str, Any]:
        topic = await self._operations.reliable(TopicName(command.flush_log.topic))
        head = topic.head
        first_on_disk = await topic.flush_log()
        stored = await read_subscriptions(self._broker.topics.context.metadata, topic.name)
        letters = {each.config.policy.dead_letter_topic for each in stored if each.config.policy is not None}
        gone_seconds = topic.storage.tier.config.garbage_gone_seconds if topic.storage is not None else 0.0
        flushed = pb.LogFlushed(
            head=head,
            first_on_disk=first_on_disk,
            dead_letter_topics=sorted(name for name in letters if name),
            garbage_seconds=min(ceil(gone_seconds), 2**32 - 1),
            set_aside=await topic.set_aside(),
        )
        return {"log_flushed": flushed}

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
        if topic.reliable:
            await topic.ownership.check_not_older(request.seen_epoch, session=request.session)
        schema = await self._schema_of(topic, request)
        producer_id = await topic.add_producer(request.producer_name, exclusive=request.exclusive)
        registered = topic.producers.get(producer_id)
        session = 0
        try:
            if topic.reliable and not request.without_session:
                session = request.session or await topic.open_session(producer_id)
        except BaseException:  # also if the peer has left: it must not keep an exclusive place
            topic.producers.remove(producer_id, registered)
            raise
        handle = self._handles.new_handle()
        self._handles.producers[handle] = ProducerHandle(
            handle, topic, request.producer_name, producer_id, session, self._connection.intake.answer_decided
        )
        self._handles.producers[handle].introduce(self._connection.caller())
        self._handles.watch(topic)
        opened = pb.ProducerOpened(
            producer=handle,
            producer_id=producer_id if session else 0,
            session=session,
            topic_hash=topic_hash(name),
            durability=_durability(topic),
            message_size_max=topic.policy.max_message_size,
            epoch=topic.ownership.epoch if topic.reliable else 0,
            schema_id=schema[0],
            schema_version=schema[1],
        )
        return {"producer_opened": opened}

    async def _schema_of(self, topic: AnyTopic, request: pb.OpenProducer) -> tuple[int, int]:
        """What its messages carry: id and version; (0, 0) without a schema. The first one binds the topic."""
        subject = request.schema_subject
        if not subject:
            return 0, 0
        await topic.bind(subject)
        record = await self._broker.schemas.find(subject)
        if record is None:  # a label of a version without a registry
            return 0, 0
        return record.schema_id, record.chosen(request.schema_version, request.schema_min_version)

    async def _close_producer(self, command: pb.Command) -> dict[str, Any]:
        producing = self._handles.producer(command.close_producer.producer)
        if producing is not None:
            await producing.idle()
            producing.leave()
            self._handles.producers.pop(producing.handle, None)
            self._handles.unwatch(producing.topic)
        return {"done": pb.Done()}

    # --- consuming ----------------------------------------------------------------------------------

    async def _subscribe(self, command: pb.Command) -> dict[str, Any]:
        request = command.subscribe
        topic = await self._broker.topics.require(TopicName(request.topic))
        name = SubscriptionName(request.subscription)
        if not 0 <= request.type < len(SUBSCRIPTION_TYPES):
            known = list(range(len(SUBSCRIPTION_TYPES)))
            raise ProtocolViolation(f"subscription type {request.type} is none of {known}")
        kind = SUBSCRIPTION_TYPES[request.type]
        filters = tuple(request.key_filters)
        unsent_bytes = self._connection.limits.unsent_bytes
        handle = self._handles.new_handle()
        if topic.reliable:
            await topic.ownership.check_not_older(request.seen_epoch)
            start = await offset_of(topic, position_of(request.start)) if request.HasField("start") else None
            identity = await topic.subscribe(
                name, kind, request.consumer_name, filters, start, native=True, hands_over=request.hands_over
            )
            reliable = topic.require(name)
            consuming = ConsumerHandle(
                handle, topic, reliable, identity, reliable.attach_native(identity), unsent_bytes
            )
            cursor = reliable.get_lag_info().cursor
            next_unacked = 0 if cursor is None else cursor + 1
        else:
            identity = await topic.subscribe(name, kind, request.consumer_name, filters)
            fanned = topic.require(name)
            consuming = ConsumerHandle(handle, topic, fanned, identity, fanned.attach(identity), unsent_bytes)
            next_unacked = 0
        self._handles.consumers[handle] = consuming
        if (registration := consuming.subscription.registration(identity)) is not None:
            registration.caller = self._connection.caller()
        self._handles.watch(topic)
        hands_over = request.hands_over and consuming.is_reliable
        shares = consuming.subscription.kind in (SubscriptionKind.SHARED, SubscriptionKind.KEY_SHARED)
        granted = (request.first_messages if hands_over and shares else 0) or request.messages
        consuming.grant(granted, request.bytes)
        self._start_pump(consuming)
        subscribed = pb.Subscribed(
            consumer=handle,
            consumer_id=identity,
            type=pb.SubscriptionType.Name(SUBSCRIPTION_TYPES.index(consuming.subscription.kind)),
            next_unacked=next_unacked,
            created=topic.ownership.created,
            hands_over=hands_over,
            messages=granted if hands_over else 0,
        )
        return {"subscribed": subscribed}

    def _start_pump(self, consuming: ConsumerHandle) -> None:
        self.pumps += 1
        task = self._connection.spawn(self._connection.pump(consuming).run())

        def ended(_: object) -> None:
            self.pumps -= 1

        task.add_done_callback(ended)

    async def _close_consumer(self, command: pb.Command) -> dict[str, Any]:
        consuming = self._handles.consumer(command.close_consumer.consumer)
        if consuming is not None:
            self._handles.forget(consuming)
            consuming.subscription.detach(consuming.consumer_id, consuming.outbox)
        return {"done": pb.Done()}

    async def _unsubscribe(self, command: pb.Command) -> dict[str, Any]:
        request = command.unsubscribe
        await self._operations.unsubscribe(TopicName(request.topic), SubscriptionName(request.subscription))
        return {"done": pb.Done()}

    async def _seek(self, command: pb.Command) -> dict[str, Any]:
        request = command.seek
        names = TopicName(request.topic), SubscriptionName(request.subscription)
        topic, subscription = await self._operations.subscription(*names)
        offset = await offset_of(topic, position_of(request.to))
        seeks = await subscription.move_to(offset)
        return {"offset_found": pb.OffsetFound(offset=offset, seeks=seeks)}

    async def _get_lag(self, command: pb.Command) -> dict[str, Any]:
        names = TopicName(command.get_lag.topic), SubscriptionName(command.get_lag.subscription)
        _, subscription = await self._operations.subscription(*names)
        info = subscription.get_lag_info()
        lag = pb.Lag(
            cursor=info.cursor,
            head=info.head,
            lag_messages=info.lag_messages,
            has_lag=info.has_lag,
            sentence=subscription.explain()[:1024],
            scheduled=subscription.scheduled,
        )
        return {"lag": lag}

    async def _change_failure_policy(self, command: pb.Command) -> dict[str, Any]:
        request = command.change_failure_policy
        given = {field.name: value for field, value in request.ListFields() if field.has_presence}
        names = TopicName(request.topic), SubscriptionName(request.subscription)
        await self._operations.change_failure_policy(*names, given)
        return {"done": pb.Done()}

    # --- reading ------------------------------------------------------------------------------------

    async def _find_offset(self, command: pb.Command) -> dict[str, Any]:
        topic = await self._operations.reliable(TopicName(command.find_offset.topic))
        return {"offset_found": pb.OffsetFound(offset=await offset_of(topic, position_of(command.find_offset.at)))}

    async def _fetch(self, command: pb.Command) -> None:
        request = command.fetch
        try:
            topic = await self._operations.reliable(TopicName(request.topic))
            end = request.end if request.HasField("end") else None
            found, next_offset = await self._read(topic, request.start, end, request.bytes_max, request.wait_ms / 1000)
        except DanubeError as error:
            self._connection.answer_error(command.request_id, error)
            return
        answer = pb.Fetched(next_offset=next_offset, head=topic.head, first_offset=topic.first_offset)
        body = [buffer for batch in found for buffer in batch.buffers]
        self._connection.answer(pb.Command(request_id=command.request_id, fetched=answer), *body)

    async def _read(
        self, topic: Topic, start: int, end: int | None, bytes_max: int, wait_seconds: float
    ) -> tuple[list[Batch], int]:
        """Batches, and where to go on."""
        if start > topic.head:
            raise OffsetOutOfRange(topic.name, start, topic.first_offset, topic.head)
        if start >= topic.head and wait_seconds:
            await topic.wait_beyond(start, min(wait_seconds, FETCH_WAIT_MAX_SECONDS))
        bytes_max = min(bytes_max or FETCH_BYTES_DEFAULT, FETCH_BYTES_MAX)
        try:
            found = await topic.batches(start, topic.head if end is None else end, bytes_max)
        except OffsetOutOfRange as error:
            if (orphan := topic.orphan_at(start)) is not None:
                raise Refused(
                    f"offsets {start} to {orphan.end - 1} of topic {topic.name} may be on the disk of broker "
                    f"{orphan.broker_id}, which was lost: they come when it is back, or never if an operator discards "
                    f"them (`danube admin topics orphan list {topic.name}`); read from {orphan.end} on to go without"
                ) from None
            if topic.first_offset <= start < error.first <= topic.head:
                return [], error.first  # offsets that were never used
            raise
        if any(batch.header.envelope > self._connection.session.envelope_version for batch in found):
            found = await self._broker.run(lambda: [in_version_1(batch) for batch in found])
        frame_size_max = self._connection.session.frame_size_max
        if sum(batch.header.size_bytes for batch in found) + DELIVER_OVERHEAD_BYTES > frame_size_max:
            found = await self._broker.run(lambda: fetched(found, start, frame_size_max))
        return found, found[-1].header.end_offset if found else start


def _durability(topic: AnyTopic) -> pb.Durability:
    return DURABILITIES[topic.log.durability] if topic.reliable else pb.MEMORY
