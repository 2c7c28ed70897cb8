"""`pydanube.admin.v1`: what the reference has no call for. Explain, lag, seek, peek, heartbeat.

What concerns history (storage, retention) is in `storage.py`, what concerns moves in `moves.py`; limits and failure
policies are in `policies.py`.
"""

from __future__ import annotations

from typing import Final

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.api.grpc.admin import reliable_topic
from pydanube.api.grpc.moves import MoveCalls
from pydanube.api.grpc.peers import Peers
from pydanube.api.grpc.policies import PolicyCalls
from pydanube.api.grpc.storage import StorageCalls, tiers_message
from pydanube.api.http import iceberg
from pydanube.api.operations import EARLIEST, LATEST, LogPosition, offset_of
from pydanube.broker.observing import Late, Observer
from pydanube.broker.service import Broker
from pydanube.broker.subscription import Subscription
from pydanube.broker.tables import TableDesk
from pydanube.broker.topic import Topic
from pydanube.core.cluster.conditions import words
from pydanube.core.dispatch.lag import Heartbeat
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.errors import OffsetOutOfRange
from pydanube.formats.batch import Envelope, messages
from pydanube.wire._pb.pydanube import admin_pb2 as pb
from pydanube.wire.convert import explanation, lag_message, unsigned_32, unsigned_64
from pydanube.wire.status import Code

PEEK_MAX: Final = 1_000
PEEK_BYTES_MAX: Final = 3 * 1024 * 1024  # of payloads; a client receives 4 MiB per message
PEEK_READ_BYTES: Final = 256 * 1024


class ForClients:
    """What the client port has of `pydanube.admin.v1`: where a subscription is, for a consumer that wants to catch up.

    A consumer asks the broker that serves its topic; nothing is passed on from here.
    """

    unimplemented = "only the admin port has it"

    def __init__(self, admin: AdminExtensions) -> None:
        self.ExplainSubscription = admin.ExplainSubscription


class AdminExtensions(StorageCalls, MoveCalls, PolicyCalls):
    def __init__(self, broker: Broker, peers: Peers, observer: Observer, tables: TableDesk) -> None:
        StorageCalls.__init__(self, broker)
        MoveCalls.__init__(self, broker, peers)
        PolicyCalls.__init__(self, broker)
        self._observer = observer
        self._tables = tables

    async def ReadCatalog(self, request: pb.ReadCatalogRequest) -> pb.ReadCatalogResponse:
        """A refusal is an answer, as over HTTP."""
        asked = iceberg.CatalogRequest(request.method, request.target, dict(request.headers))
        found = await iceberg.answer(self._tables, asked)
        return pb.ReadCatalogResponse(code=found.code, headers=found.headers, body=found.encoded())

    async def ExplainSubscription(self, request: pb.ExplainSubscriptionRequest) -> pb.ExplainSubscriptionResponse:
        topic, subscription = await self._find(request.topic, request.subscription)
        response = explanation(
            subscription.standing(),
            subscription.get_lag_info(),
            subscription.heartbeat,
            self._broker.clock.elapsed(),
        )
        late = await self._observer.late_now(topic, subscription)
        put_late(response.lag, late)
        response.sentence = (
            f"{subscription.explain()}{_tier_of(topic, subscription.standing().next_unacked)}{late_words(late)}"
        )
        response.tiers.CopyFrom(tiers_message(self._storage.tiers(topic)))
        return response

    async def GetSubscriptionLag(self, request: pb.GetSubscriptionLagRequest) -> pb.GetSubscriptionLagResponse:
        topic, subscription = await self._find(request.topic, request.subscription)
        lag = lag_message(subscription.get_lag_info())
        put_late(lag, await self._observer.late_now(topic, subscription))
        return pb.GetSubscriptionLagResponse(lag=lag)

    async def SeekSubscription(self, request: pb.SeekSubscriptionRequest) -> pb.SeekSubscriptionResponse:
        topic, subscription = await self._find(request.topic, request.subscription)
        match request.WhichOneof("to"):
            case "earliest":
                position = EARLIEST
            case "latest":
                position = LATEST
            case "offset":
                position = LogPosition(offset=request.offset)
            case "time_us":
                position = LogPosition(time_us=request.time_us)
            case _:
                raise RpcRefusal(Code.INVALID_ARGUMENT, "say where to: earliest, latest, an offset or a time")
        offset = await offset_of(topic, position)
        if not topic.first_offset <= offset <= topic.head:
            raise OffsetOutOfRange(topic.name, offset, topic.first_offset, topic.head)
        await subscription.move_to(offset)
        return pb.SeekSubscriptionResponse(offset=offset)

    async def SetHeartbeat(self, request: pb.SetHeartbeatRequest) -> pb.SetHeartbeatResponse:
        heartbeat = Heartbeat.parse(request.heartbeat, "heartbeat") if request.heartbeat else None
        if not request.subscription:
            of_all = reliable_topic(await self._topics.require(TopicName(request.topic)), "a heartbeat")
            await of_all.set_heartbeat(heartbeat)
            return pb.SetHeartbeatResponse(heartbeat=str(heartbeat or self._broker.config.dispatch.heartbeat))
        topic, subscription = await self._find(request.topic, request.subscription)
        await self._topics.set_dispatch_config(
            topic.name, subscription.name, heartbeat=heartbeat, forget_heartbeat=heartbeat is None
        )
        return pb.SetHeartbeatResponse(heartbeat=str(subscription.heartbeat))

    async def PeekTopic(self, request: pb.PeekTopicRequest) -> pb.PeekTopicResponse:
        topic = reliable_topic(await self._topics.require(TopicName(request.topic)), "looking at messages")
        count = min(max(1, request.count), PEEK_MAX)
        if request.HasField("offset"):
            offset = request.offset
            if not topic.first_offset <= offset <= topic.head:
                raise OffsetOutOfRange(topic.name, offset, topic.first_offset, topic.head)
            found = await peek(topic, offset, count, request.payload_max_bytes or PEEK_BYTES_MAX)
        else:
            found = await peek_newest(topic, count, request.payload_max_bytes or PEEK_BYTES_MAX)
        return pb.PeekTopicResponse(messages=found, first_offset=topic.first_offset, head=topic.head)

    async def _find(self, topic_name: str, subscription_name: str) -> tuple[Topic, Subscription]:
        topic = reliable_topic(await self._topics.require(TopicName(topic_name)), "the place of a subscription")
        return topic, topic.require(SubscriptionName(subscription_name))


def put_late(lag: pb.Lag, late: Late) -> None:
    lag.course = late.catch_up.course
    if late.seconds is not None:
        lag.lag_seconds = late.seconds
    if late.catch_up.seconds is not None:
        lag.catch_up_seconds = late.catch_up.seconds


def late_words(late: Late) -> str:
    """How late, and when it will have caught up; nothing for one that has."""
    if late.seconds == 0:
        return ""
    age = "" if late.seconds is None else f" The oldest message that was not acknowledged is {words(late.seconds)} old"
    hope = str(late.catch_up)
    if not age:
        return f" {hope[:1].upper()}{hope[1:]}." if hope else ""
    return f"{age}; {hope}." if hope else f"{age}."


def _tier_of(topic: Topic, offset: int) -> str:
    """Empty if the log has it, as it does for a subscription that keeps up."""
    if offset >= topic.log.first_offset or topic.storage is None or topic.storage.tier.objects.find(offset) is None:
        return ""
    return f" Offset {offset} is read from the object store: the log begins at {topic.log.first_offset}."


async def peek(topic: Topic, first: int, count: int, payload_max_bytes: int) -> list[pb.PeekedMessage]:
    """At most `count` messages from `first` on, fewer if they would not fit one answer. Gaps are skipped, as
    every reader of the topic does.
    """
    found: list[pb.PeekedMessage] = []
    offset, head, size_bytes = first, topic.head, 0
    while offset < head and len(found) < count:
        try:
            batches = await topic.batches(offset, min(offset + count - len(found), head), PEEK_READ_BYTES)
        except OffsetOutOfRange as error:
            if error.first <= offset:
                raise
            offset = error.first
            continue
        if not batches:
            break
        for batch in batches:
            base = batch.header.base_offset
            rows = messages(batch)
            for at in range(max(offset, base), min(head, batch.header.end_offset)):
                message = _peeked(at, rows[at - base], batch.header.append_time, payload_max_bytes)
                size_bytes += message.ByteSize()
                if found and (len(found) == count or size_bytes > PEEK_BYTES_MAX):
                    return found
                found.append(message)
            offset = batch.header.end_offset
    return found


async def peek_newest(topic: Topic, count: int, payload_max_bytes: int) -> list[pb.PeekedMessage]:
    """The newest `count`: usually the last offsets. Behind a crash these may be a gap, and it looks further back."""
    back, head = count, topic.head
    found: list[pb.PeekedMessage] = []
    while not found:
        first = max(topic.first_offset, head - back)
        found = await peek(topic, first, count, payload_max_bytes)
        if first <= topic.first_offset:
            break
        back *= 2
    while found and (following := found[-1].offset + 1) < head:
        more = await peek(topic, following, count, payload_max_bytes)
        if not more:
            break
        found = [*found, *more][-count:]
        size_bytes = sum(each.ByteSize() for each in found)
        while len(found) > len(more) and size_bytes > PEEK_BYTES_MAX:
            size_bytes -= found.pop(0).ByteSize()
    return found


def _peeked(offset: int, message: Envelope, append_time: int, payload_max_bytes: int) -> pb.PeekedMessage:
    return pb.PeekedMessage(
        offset=offset,
        payload=message.payload[:payload_max_bytes],
        payload_size_bytes=len(message.payload),
        publish_time_us=message.publish_time,
        append_time_us=append_time,
        producer_name=message.producer_name or "",
        attributes=message.attributes,
        schema_id=None if message.schema_id is None else unsigned_64(message.schema_id),
        schema_version=None if message.schema_version is None else unsigned_32(message.schema_version),
        routing_key=message.routing_key,
    )
