"""Where topics' messages are, for those who read history without the broker: of one topic, or of many at once.

StorageQuestion ─► served here    a StorageInfo; only offsets, sizes and epochs if the peer's tag is the present one
                   elsewhere      the address, as Located
                   partitioned    how many partitions, and each of them in one of these lists
                   not now        the error that asking for this topic alone would get
"""

from __future__ import annotations

import asyncio
from typing import Final

from google.protobuf.message import DecodeError

from pydanube.api.operations import TopicOperations
from pydanube.api.topic_addresses import locate
from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.core.names import TopicName
from pydanube.core.policies import Delivery
from pydanube.errors import DanubeError, DeliveryMismatch, LimitReached, NotServed, ProtocolViolation
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import to_wire

TOPICS_MAX: Final = 10_000
AT_ONCE: Final = 32  # topics whose orphans and voids are read from the metadata store side by side
ATTEMPTS: Final = 3  # at a history that does not keep still


def question_of(body: memoryview) -> pb.StorageQuestion:
    """Raises ProtocolViolation, LimitReached."""
    try:
        question = pb.StorageQuestion.FromString(bytes(body))
    except DecodeError as error:
        raise ProtocolViolation("the body of describe_storages is no StorageQuestion") from error
    if len(question.topics) > TOPICS_MAX or len(question.known) > TOPICS_MAX:
        raise LimitReached("topics in one describe_storages", TOPICS_MAX)
    return question


def tag_of(topic: Topic) -> str:
    """Another one whenever descriptors, orphans or voids are: they change with a claim, or with the history key."""
    if topic.storage is None:
        return f"{topic.log.epoch}"
    history = topic.storage.tier.history
    return f"{topic.log.epoch}-{history.epoch}-{history.change}"


async def describe(broker: Broker, topic: Topic, known: str = "") -> pb.StorageInfo:
    """`known`: the tag of what the peer has, which is not sent again if it is the present one."""
    if known and known == tag_of(topic):
        return _edges(topic, pb.StorageInfo(tag=known, unchanged=True))
    for _ in range(ATTEMPTS):
        before = tag_of(topic)
        # Gaps first: an orphan that is rescued in between is listed as gap and object, and readers prefer the object.
        orphans, voids = await topic.gaps()
        tag = tag_of(topic)
        if tag == before:
            break
    else:
        tag = ""  # what was read belongs to no version
    info = pb.StorageInfo(
        tag=tag,
        orphans=[offset for gap in orphans for offset in gap],
        voids=[offset for gap in voids for offset in gap],
    )
    if topic.storage is not None:
        tier = topic.storage.tier
        info.storage_url = broker.config.objects_url
        info.history_version = tier.history.history_version
        info.manifest = tier.history.manifest or ""
        info.manifest_crc = tier.history.manifest_crc
        info.descriptors.extend(each.to_bytes() for each in tier.objects.keyed)
    return _edges(topic, info)


def _edges(topic: Topic, info: pb.StorageInfo) -> pb.StorageInfo:
    """With what changes all the time, of one moment."""
    info.topic = topic.name
    info.first_offset, info.head = topic.first_offset, topic.head
    uploaded = topic.storage.tier.objects.end if topic.storage is not None else 0
    info.log.extend(number for run in topic.log.runs(uploaded) for number in run)
    return info


class StorageAnswers:
    """Answers questions about many topics."""

    def __init__(self, broker: Broker, operations: TopicOperations) -> None:
        self._broker = broker
        self._operations = operations

    async def answer(self, question: pb.StorageQuestion, bytes_max: int) -> pb.StorageAnswer:
        """At most about `bytes_max` bytes; what does not fit is named in `left`. Something always fits."""
        known = {each.topic: each.tag for each in question.known}
        answer = pb.StorageAnswer()
        names: list[TopicName] = []
        for asked in question.topics:
            try:
                parts = await self._parts(TopicName(asked))
            except DanubeError as error:
                answer.errors.add(topic=asked, error=to_wire(error))
                continue
            if parts != [asked]:
                answer.located.add(topic=asked, is_local=True, partitions=len(parts))
            names += parts
        size = answer.ByteSize()
        for at in range(0, len(names), AT_ONCE):
            if size > bytes_max and answer.infos:
                answer.left.extend(names[at:])
                break
            found = await asyncio.gather(*(self._one(name, known.get(name, "")) for name in names[at : at + AT_ONCE]))
            for name, each in zip(names[at:], found, strict=False):
                length = each.ByteSize()
                if size + length > bytes_max and answer.infos:
                    answer.left.append(name)
                    continue
                size += length
                if isinstance(each, pb.StorageInfo):
                    answer.infos.append(each)
                elif isinstance(each, pb.Located):
                    answer.located.append(each)
                else:
                    answer.errors.append(each)
        return answer

    async def _parts(self, name: TopicName) -> list[TopicName]:
        """Without a look at the metadata store if the topic is served here."""
        return [name] if self._broker.topics.get(name) is not None else await self._operations.partitions(name)

    async def _one(self, name: TopicName, known: str) -> pb.StorageInfo | pb.Located | pb.TopicError:
        try:
            if self._broker.topics.get(name) is None:
                address = await locate(self._broker, name)
                if isinstance(address, NotServed):
                    raise address
                if not address.is_local:
                    return pb.Located(topic=name, connect_url=address.connect_url, stream_url=address.stream_url)
            topic = await self._broker.topics.require(name)
            if not topic.reliable:
                raise DeliveryMismatch(name, Delivery.RELIABLE.value, topic.delivery.value)
            return await describe(self._broker, topic, known)
        except DanubeError as error:
            return pb.TopicError(topic=name, error=to_wire(error))
