"""The doors of brokers that are a cluster: whoever is asked answers, or says who does."""

from __future__ import annotations

import asyncio
import contextlib
import urllib.request
from collections.abc import AsyncIterator, Sequence
from typing import Any, NamedTuple

import pytest
from grpc import StatusCode

from pydanube.api.forward import OWNERS
from pydanube.api.peers import FORWARDED
from pydanube.client.connection import Brokers, addresses_of
from pydanube.client.link import Link
from pydanube.core import keys
from pydanube.core.names import TopicName
from pydanube.core.ownership import Orphan
from pydanube.errors import NotServed, Refused, TopicUnknown, Unreachable
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours
from pydanube.wire._pb.pydanube import stream_pb2 as stream
from tests.rooms.clustered import Node, Town, clustered
from tests.rooms.doors import TOPIC, Calls, refused

EMPTY = admin_pb.Empty()
NAME = TopicName(TOPIC)


@contextlib.asynccontextmanager
async def native(node: Node) -> AsyncIterator[Link]:
    brokers = Brokers(addresses_of(node.broker.stream_url))
    try:
        yield await brokers.any()
    finally:
        await brokers.close()


async def lookup(calls: Calls, topic: str) -> pb.TopicLookupResponse:
    return await calls.discovery.TopicLookup(pb.TopicLookupRequest(topic=topic))


async def state(calls: Calls, topic: str = TOPIC) -> ours.TopicStateResponse:
    return await calls.ours.TopicState(ours.TopicStateRequest(topic=topic))


async def unload(calls: Calls, topic: str = TOPIC, **more: Any) -> list[ours.UnloadResult]:
    call = calls.ours.UnloadTopic(ours.UnloadTopicRequest(topic=topic, **more))
    return [each.result async for each in call if each.HasField("result")]


# --- finding topics -----------------------------------------------------------------------------------


@clustered(2)
async def test_a_lookup_names_the_broker_that_has_the_topic_whoever_is_asked(town: Town) -> None:
    await town.create(TOPIC, on=1)
    await town.create(f"{TOPIC}s", on=2)  # exact names: neither is the other
    one, two = town.node(1), town.node(2)
    kinds = pb.TopicLookupResponse
    for topic, owner in ((TOPIC, one), (f"{TOPIC}s", two)):
        for asked in (one, two):
            found = await lookup(asked.calls, topic)
            assert found.response_type == (kinds.Connect if asked is owner else kinds.Redirect)
            assert (found.connect_url, found.broker_url) == (owner.broker.connect_url, owner.broker.broker_url)
            assert not found.proxy
            async with native(asked) as link:
                frame = await link.request(stream.Command(lookup=stream.Lookup(topic=topic)), "located")
            located = frame.command.located
            assert (located.stream_url, located.is_local) == (owner.broker.stream_url, asked is owner)
    for unknown in ("/default/order", "/default/nothing"):
        assert (await refused(lookup(two.calls, unknown))).code is StatusCode.NOT_FOUND
        partitions = await two.calls.discovery.TopicPartitions(pb.TopicLookupRequest(topic=unknown))
        assert not partitions.partitions


@clustered(2)
async def test_a_topic_that_nobody_has_is_not_found_and_can_be_described_all_the_same(town: Town) -> None:
    for node in town.nodes:
        await town.metadata.transact([], [])  # nothing: the brokers go on
        await node.cluster.requests.drain(node.broker.broker_id) if node is town.node(1) else None
    # A topic that its creator's cluster could not place: written down, with a marker of its own.
    state_key = keys.broker_state(town.node(2).broker.broker_id)
    item = await town.metadata.get(state_key)
    assert item is not None
    drained = item.value.replace(b'"active"', b'"drained"')
    await town.metadata.transact([], [_put(state_key, drained)])
    await town.until(lambda: not town.node(1).cluster.view.active())
    await town.calls(1).create_topic(TOPIC)
    code, sentence = await refused(lookup(town.calls(2), TOPIC))
    assert code is StatusCode.NOT_FOUND and "waiting for a broker" in sentence
    found = await town.calls(1).discovery.TopicPartitions(pb.TopicLookupRequest(topic=TOPIC))
    assert list(found.partitions) == [TOPIC]
    described = await town.calls(2).topics.DescribeTopic(admin_pb.DescribeTopicRequest(name=TOPIC))
    assert (described.broker_id, described.delivery) == ("", "Reliable")
    assert (await state(town.calls(1))).state == "unassigned"
    async with native(town.node(2)) as link:
        for command in (
            stream.Command(lookup=stream.Lookup(topic=TOPIC)),
            stream.Command(describe_topic=stream.DescribeTopic(topic=TOPIC)),
        ):
            with pytest.raises(NotServed):
                await link.request(command, "located")
    # Nobody can be asked to let it go, and nobody could have it.
    code, sentence = await refused(town.calls(1).topics.UnloadTopic(admin_pb.TopicRequest(name=TOPIC)))
    assert code is StatusCode.FAILED_PRECONDITION and "nobody hosts it just now" in sentence
    await town.calls(2).brokers.ActivateBroker(admin_pb.ActivateBrokerRequest(broker_id=str(town.node(2).id)))
    await town.until(lambda: town.host(NAME) is town.node(2))


def _put(key: str, value: bytes) -> Any:
    from pydanube.ports import Put

    return Put(key, value)
