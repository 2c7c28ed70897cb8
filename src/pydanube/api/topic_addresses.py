"""Where a topic is, or will be, as both servers say it: here, at another broker, or at none just now.

And where in its log a consumer begins: `position_of`.
"""

from __future__ import annotations

from typing import NamedTuple

from pydanube.api.operations import EARLIEST, LATEST, LogPosition
from pydanube.broker.service import Broker
from pydanube.core.names import TopicName
from pydanube.errors import NotServed, TopicUnknown
from pydanube.wire._pb.pydanube import stream_pb2 as pb


class TopicAddress(NamedTuple):
    """The broker that has a topic, by the addresses that it has registered."""

    is_local: bool
    broker_url: str
    connect_url: str
    stream_url: str


def here(broker: Broker) -> TopicAddress:
    return TopicAddress(True, broker.broker_url, broker.connect_url, broker.stream_url)


async def locate(broker: Broker, name: TopicName) -> TopicAddress | NotServed:
    """The broker that has the topic, by exactly this name; or why none has. Raises TopicUnknown."""
    topics, cluster = broker.topics, broker.cluster
    if topics.get(name) is not None:
        return here(broker)
    if cluster is None:
        await topics.require(name)
        return here(broker)
    host = cluster.host_of(name)
    if host == broker.broker_id:
        return here(broker)  # it is being opened: clients get an answer that makes them try again
    peer = cluster.peers.get(host) if host is not None else None
    if peer is not None:
        broker.telemetry.redirects["not_local", name.namespace] += 1
        return TopicAddress(False, peer.broker_url, peer.connect_url, peer.stream_url)
    if not await topics.exists(name):
        raise TopicUnknown(name)
    assert topics.directory is not None
    return NotServed(name, *topics.directory.where(name))


def position_of(place: pb.Place) -> LogPosition:
    match place.WhichOneof("at"):
        case "offset":
            return LogPosition(offset=place.offset)
        case "time_us":
            return LogPosition(time_us=place.time_us)
        case _:
            return EARLIEST if place.edge == pb.EARLIEST else LATEST
