"""Where a topic is, or will be, as both doors tell it: here, with another broker, or with nobody just now.

And where in its log a consumer begins: `offset_of`.
"""

from __future__ import annotations

import logging
from typing import NamedTuple

from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.core.names import TopicName
from pydanube.core.policies import Delivery
from pydanube.errors import DeadlineExceeded, NotServed, TopicUnknown
from pydanube.wire._pb.pydanube import stream_pb2 as pb

log = logging.getLogger(__name__)


class TopicAddress(NamedTuple):
    """The broker that has a topic, by the addresses that it has registered."""

    is_local: bool
    broker_url: str
    connect_url: str
    stream_url: str


def here(broker: Broker) -> TopicAddress:
    return TopicAddress(True, broker.broker_url, broker.connect_url, broker.stream_url)


async def locate(broker: Broker, name: TopicName) -> TopicAddress | NotServed:
    """Who has the topic, by exactly this name; or why nobody has. Raises TopicUnknown."""
    topics, cluster = broker.topics, broker.cluster
    if topics.get(name) is not None:
        return here(broker)
    if cluster is None:
        await topics.require(name)
        return here(broker)
    host = cluster.host_of(name)
    if host == broker.broker_id:
        return here(broker)  # it is being opened: whoever comes is told to try again
    peer = cluster.peers.get(host) if host is not None else None
    if peer is not None:
        broker.telemetry.redirects["not_local", name.namespace] += 1
        return TopicAddress(False, peer.broker_url, peer.connect_url, peer.stream_url)
    if not await topics.exists(name):
        raise TopicUnknown(name)
    assert topics.directory is not None
    return NotServed(name, *topics.directory.where(name))


async def make_topic(broker: Broker, name: TopicName, *, delivery: Delivery, schema_subject: str | None = None) -> None:
    """Makes the topic and waits a moment until somebody serves it, here or elsewhere. It exists in any case."""
    try:
        await broker.topics.create(name, delivery=delivery, schema_subject=schema_subject)
    except NotServed:
        if broker.cluster is None or not await broker.topics.exists(name):
            raise
    except DeadlineExceeded as error:
        log.warning("topic made, and nobody has it yet", extra={"topic": name, "why": str(error)})


async def offset_of(topic: Topic, place: pb.Place) -> int:
    """The offset that a place means now."""
    match place.WhichOneof("at"):
        case "offset":
            return place.offset
        case "time_us":
            return await topic.offset_at(place.time_us)
        case _:
            return topic.first_offset if place.edge == pb.EARLIEST else topic.head
