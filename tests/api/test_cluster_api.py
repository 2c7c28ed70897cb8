"""The servers of brokers that are a cluster: whoever is asked answers, or says who does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import urllib.request
from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode

from pydanube.api.grpc.forward import OWNERS
from pydanube.api.grpc.peers import FORWARDED
from pydanube.api.process import check_ports
from pydanube.broker.volatile_topic import VolatileTopic
from pydanube.client.brokers import Brokers, addresses_of
from pydanube.client.connection import BrokerConnection
from pydanube.config import BrokerConfig, Config, reachable
from pydanube.core import keys
from pydanube.core.cluster.load import ResourceUsage
from pydanube.core.history.ownership import Orphan
from pydanube.core.names import SubscriptionName, TopicName
from pydanube.core.policies import SubscriptionKind
from pydanube.core.schemas.kinds import SchemaPolicy
from pydanube.errors import ConfigError, NotServed
from pydanube.formats.batch import Envelope
from pydanube.ports import Delete, Put
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire._pb.danube import SchemaRegistry_pb2 as schema_pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours
from pydanube.wire._pb.pydanube import stream_pb2 as stream
from tests.harness.server_cluster import (
    OneMember,
    ServerCluster,
    ServerNode,
    SmallQuorum,
    clustered,
    reliable,
    run_members,
)
from tests.harness.servers import TOPIC, Calls, refused, served

EMPTY = admin_pb.Empty()
NAME = TopicName(TOPIC)
PARTS = NAME.partition_names(3)


@contextlib.asynccontextmanager
async def native(node: ServerNode) -> AsyncIterator[BrokerConnection]:
    brokers = Brokers(addresses_of(node.broker.stream_url))
    try:
        yield await brokers.any()
    finally:
        await brokers.close()


async def lookup(calls: Calls, topic: str = TOPIC) -> pb.TopicLookupResponse:
    return await calls.discovery.TopicLookup(pb.TopicLookupRequest(topic=topic))


async def state(calls: Calls, topic: str = TOPIC) -> ours.TopicStateResponse:
    return await calls.ours.TopicState(ours.TopicStateRequest(topic=topic))


async def unload(calls: Calls, topic: str = TOPIC, **more: Any) -> list[ours.UnloadResult]:
    call = calls.ours.UnloadTopic(ours.UnloadTopicRequest(topic=topic, **more))
    return [each.result async for each in call if each.HasField("result")]


def plain_unload(calls: Calls, topic: str = TOPIC) -> Any:
    return calls.topics.UnloadTopic(admin_pb.TopicRequest(name=topic))


# --- finding topics -----------------------------------------------------------------------------------


@clustered(2)
async def test_a_lookup_names_the_broker_that_has_the_topic_whoever_is_asked(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    await cluster.create(f"{TOPIC}s", on=2)  # exact names: neither is the other
    one, two = cluster.node(1), cluster.node(2)
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


@clustered(2, proxies={1: "http://proxy.example:6650"})
async def test_a_redirect_to_a_broker_behind_a_proxy_names_both_addresses(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    for asked in (cluster.calls(1), cluster.calls(2)):
        found = await lookup(asked)
        assert (found.connect_url, found.proxy) == ("http://proxy.example:6650", True)
        assert found.broker_url == cluster.node(1).broker.broker_url


@pytest.mark.slow
@clustered(2)
async def test_a_topic_that_nobody_has_is_not_found_and_is_described_all_the_same(cluster: ServerCluster) -> None:
    await cluster.drained(1, 2)
    await cluster.calls(1).create_topic()
    code, sentence = await refused(lookup(cluster.calls(2)))
    assert code is StatusCode.NOT_FOUND and "waiting for a broker" in sentence
    found = await cluster.calls(1).discovery.TopicPartitions(pb.TopicLookupRequest(topic=TOPIC))
    assert list(found.partitions) == [TOPIC]
    described = await cluster.calls(2).topics.DescribeTopic(admin_pb.DescribeTopicRequest(name=TOPIC))
    assert (described.broker_id, described.delivery) == ("", "Reliable")
    assert (await state(cluster.calls(1))).state == "unassigned"
    async with native(cluster.node(2)) as link:
        for command in (
            stream.Command(lookup=stream.Lookup(topic=TOPIC)),
            stream.Command(describe_topic=stream.DescribeTopic(topic=TOPIC)),
        ):
            with pytest.raises(NotServed, match="waiting for a broker"):
                await link.request(command, "done")
    code, sentence = await refused(plain_unload(cluster.calls(1)))
    assert code is StatusCode.FAILED_PRECONDITION and "no broker hosts it just now" in sentence
    # Whoever is activated gets it.
    await cluster.calls(1).brokers.ActivateBroker(admin_pb.ActivateBrokerRequest(broker_id=str(cluster.node(2).id)))
    await cluster.until(lambda: cluster.host(NAME) is cluster.node(2))


@clustered(2)
async def test_any_broker_describes_topics_and_partitions_that_another_has(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    producer = await cluster.calls(1).create_producer()
    await cluster.calls(1).subscribe("b")
    await cluster.calls(1).subscribe("a", kind=3)
    for _ in range(3):
        await cluster.calls(1).send(producer)
    asked = cluster.calls(2)
    me = str(cluster.node(1).id)
    assert await asked.topics.DescribeTopic(
        admin_pb.DescribeTopicRequest(name=TOPIC)
    ) == admin_pb.DescribeTopicResponse(name=TOPIC, subscriptions=["a", "b"], broker_id=me, delivery="Reliable")
    info = admin_pb.TopicInfo(name=TOPIC, broker_id=me, delivery="Reliable")
    assert list((await asked.topics.ListNamespaceTopics(admin_pb.NamespaceRequest(name="default"))).topics) == [info]
    assert list((await asked.topics.ListBrokerTopics(admin_pb.BrokerRequest(broker_id=me))).topics) == [info]
    listed = await asked.topics.ListSubscriptions(admin_pb.TopicRequest(name=TOPIC))
    assert list(listed.subscriptions) == ["a", "b"]
    question = admin_pb.GetSubscriptionFailurePolicyRequest(topic=TOPIC, subscription="a")
    assert (await asked.topics.GetSubscriptionFailurePolicy(question)).subscription_type == 3
    async with native(cluster.node(2)) as link:
        describe = stream.Command(describe_topic=stream.DescribeTopic(topic=TOPIC))
        told = (await link.request(describe, "topic_info")).command.topic_info
    assert (told.head, told.subscriptions, told.producers, told.consumers) == (3, 2, 1, 2)


# --- clients at the wrong broker ------------------------------------------------------------------------


@clustered(2)
async def test_whatever_a_client_wants_of_a_topic_elsewhere_it_is_told_to_look_it_up_again(
    cluster: ServerCluster,
) -> None:
    await cluster.create(TOPIC, on=1)
    await cluster.create(f"{TOPIC}-quick", on=1, reliable=False)
    producer = await cluster.calls(1).create_producer()
    consumer = await cluster.calls(1).subscribe()
    wrong, place = cluster.calls(2), pb.MsgID(producer_id=producer, topic_name=TOPIC)
    for call in (
        wrong.create_producer(),
        wrong.create_producer(f"{TOPIC}-quick", reliable=False),
        wrong.send(producer),
        wrong.subscribe(),
        wrong.receive(consumer).read(),
        wrong.consumers.Ack(pb.AckRequest(msg_id=place, subscription_name="s")),
        wrong.consumers.Nack(pb.NackRequest(msg_id=place, subscription_name="s")),
    ):
        code, sentence = await refused(call)
        assert code is StatusCode.UNAVAILABLE and ("look it up again" in sentence or "look up the topic" in sentence)
    async with native(cluster.node(2)) as link:
        for command in (
            stream.Command(open_producer=stream.OpenProducer(topic=TOPIC, producer_name="p", reliable=True)),
            stream.Command(subscribe=stream.Subscribe(topic=TOPIC, subscription="s", consumer_name="c")),
            stream.Command(fetch=stream.Fetch(topic=TOPIC)),
        ):
            with pytest.raises(NotServed) as told:
                await link.request(command, "done")
            assert told.value.moved_to == cluster.node(1).broker.stream_url


@clustered(2)
async def test_a_producer_that_creates_its_topic_finds_it_at_the_second_try_at_the_latest(
    cluster: ServerCluster,
) -> None:
    seen = set()
    for number in range(4):
        topic = f"/default/made-{number}"
        try:
            await cluster.calls(1).create_producer(topic)
        except Exception as error:
            assert "look it up again" in str(error) and "UNAVAILABLE" in str(error)
        found = await lookup(cluster.calls(1), topic)
        owner = next(node for node in cluster.nodes if node.broker.connect_url == found.connect_url)
        producer = await owner.calls.create_producer(topic)
        await owner.calls.send(producer, topic=topic)
        seen.add(owner.id)
    assert len(seen) == 2  # both brokers have some


@clustered(2)
async def test_topics_are_created_by_both_servers_wherever_they_land(cluster: ServerCluster) -> None:
    for number in range(2):
        await cluster.calls(1).create_topic(f"/default/grpc-{number}")
        async with native(cluster.node(1)) as link:
            create = stream.CreateTopic(topic=f"/default/native-{number}", reliable=True)
            await link.request(stream.Command(create_topic=create), "done")
    names = [f"/default/{server}-{number}" for server in ("grpc", "native") for number in range(2)]
    assert {cluster.host(TopicName(name)) for name in names} == {*cluster.nodes}
    assert (await refused(cluster.calls(2).create_topic("/default/grpc-0"))).code is StatusCode.ALREADY_EXISTS


# --- passing on -----------------------------------------------------------------------------------------


POLICY = admin_pb.SubscriptionFailurePolicy(poison_policy=admin_pb.Drop, max_redelivery_delay_ms=10)
WINDOW = admin_pb.SubscriptionDispatchConfig(max_unacked_messages=7)
BOTH = {"topic": TOPIC, "subscription": "s"}


def requests_for_owners(calls: Calls) -> dict[str, tuple[Any, Any]]:
    """One of each, in an order in which a change comes before the question."""
    admin, own, schemas = calls.topics, calls.ours, calls.schemas
    return {
        "ConfigureTopicSchema": (
            schemas.ConfigureTopicSchema,
            schema_pb.ConfigureTopicSchemaRequest(topic_name=TOPIC, schema_subject="orders", validation_policy="warn"),
        ),
        "UpdateTopicValidationPolicy": (
            schemas.UpdateTopicValidationPolicy,
            schema_pb.UpdateTopicValidationPolicyRequest(topic_name=TOPIC, validation_policy="enforce"),
        ),
        "SetSubscriptionFailurePolicy": (
            admin.SetSubscriptionFailurePolicy,
            admin_pb.SetSubscriptionFailurePolicyRequest(failure_policy=POLICY, **BOTH),
        ),
        "ChangeFailurePolicy": (
            own.ChangeFailurePolicy,
            ours.ChangeFailurePolicyRequest(ack_timeout_ms=90_000, **BOTH),
        ),
        "SetSubscriptionDispatchConfig": (
            admin.SetSubscriptionDispatchConfig,
            admin_pb.SetSubscriptionDispatchConfigRequest(dispatch_config=WINDOW, **BOTH),
        ),
        "ExplainSubscription": (own.ExplainSubscription, ours.ExplainSubscriptionRequest(**BOTH)),
        "GetSubscriptionLag": (own.GetSubscriptionLag, ours.GetSubscriptionLagRequest(**BOTH)),
        "SeekSubscription": (own.SeekSubscription, ours.SeekSubscriptionRequest(offset=1, **BOTH)),
        "SetHeartbeat": (own.SetHeartbeat, ours.SetHeartbeatRequest(heartbeat="debug", **BOTH)),
        "PeekTopic": (own.PeekTopic, ours.PeekTopicRequest(topic=TOPIC, count=3)),
        "StorageList": (own.StorageList, ours.StorageListRequest(topic=TOPIC)),
        "SetRetention": (own.SetRetention, ours.SetRetentionRequest(topic=TOPIC, minutes=9)),
        "GetRetention": (own.GetRetention, ours.GetRetentionRequest(topic=TOPIC)),
        "ApplyRetention": (own.ApplyRetention, ours.ApplyRetentionRequest(topic=TOPIC)),
        "Unsubscribe": (admin.Unsubscribe, admin_pb.SubscriptionRequest(topic=TOPIC, subscription="other")),
        "DiscardOrphan": (own.DiscardOrphan, ours.DiscardOrphanRequest(topic=TOPIC, first=7)),
    }


@clustered(2)
async def test_any_broker_takes_every_call_about_a_topic_and_its_owner_answers(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    producer = await cluster.calls(1).create_producer()
    for subscription in ("s", "other"):
        await cluster.calls(1).subscribe(subscription)
    for _ in range(3):
        await cluster.calls(1).send(producer)
    await cluster.until(lambda: len(reliable(cluster.node(1), NAME).storage.tier.objects) > 0)  # type: ignore[union-attr]
    await cluster.calls(2).register("orders")
    answers = {}
    requests = requests_for_owners(cluster.calls(2))
    assert {*requests, "StorageVerify"} == {name.rpartition(".")[2] for name in OWNERS}
    for name, (method, request) in requests.items():
        call = method(request)
        if name == "Unsubscribe":  # somebody uses it: the owner's own words
            code, sentence = await refused(call)
            assert code is StatusCode.FAILED_PRECONDITION and "c is connected" in sentence
        elif name == "DiscardOrphan":
            assert (await refused(call)).code is StatusCode.NOT_FOUND
        else:
            answers[name] = await call
    in_force = reliable(cluster.node(1), NAME).enforcer.config
    assert in_force.subject == "orders" and in_force.policy is SchemaPolicy.ENFORCE
    assert [each.offset for each in answers["PeekTopic"].messages] == [0, 1, 2]
    assert answers["GetSubscriptionLag"].lag.lag_messages == 3
    assert answers["SeekSubscription"].offset == 1 and answers["SetHeartbeat"].heartbeat == "debug"
    assert answers["GetRetention"].minutes == 9 and answers["GetRetention"].set_by == "topic"
    assert answers["StorageList"].tiers.head == 3 and answers["StorageList"].objects_count >= 1
    asked = cluster.calls(2)
    question = admin_pb.GetSubscriptionDispatchConfigRequest(**BOTH)
    assert (await asked.topics.GetSubscriptionDispatchConfig(question)).dispatch_config == WINDOW
    verify = [each async for each in asked.ours.StorageVerify(ours.StorageVerifyRequest(topic=TOPIC))]
    assert verify[-1].report.head == 3 and not verify[-1].report.not_served
    unknown = asked.ours.PeekTopic(ours.PeekTopicRequest(topic="/default/nothing"))
    assert (await refused(unknown)).code is StatusCode.NOT_FOUND
    malformed = asked.ours.PeekTopic(ours.PeekTopicRequest(topic="nothing"))
    assert (await refused(malformed)).code is StatusCode.INVALID_ARGUMENT


@clustered(2)
async def test_a_call_that_was_passed_on_goes_no_further_and_one_whose_owner_is_gone_says_so(
    cluster: ServerCluster,
) -> None:
    await cluster.create(TOPIC, on=1)
    peek = ours.PeekTopicRequest(topic=TOPIC)
    passed_on = cluster.calls(2).ours.PeekTopic(peek, metadata=((FORWARDED, "1"),))
    code, sentence = await refused(passed_on)
    assert code is StatusCode.UNAVAILABLE and str(cluster.node(1).id) in sentence
    await cluster.node(1).servers._admin.stop(0)  # it lives, and nobody hears it
    code, sentence = await refused(cluster.calls(2).ours.PeekTopic(peek, timeout=5))
    # Without gRPC's words of a connection: whoever asked would take them for his own.
    at = cluster.node(1).broker.cluster.peers[cluster.node(1).broker.broker_id].broker_url.rpartition("://")[2]
    assert code is StatusCode.UNAVAILABLE
    assert sentence == f"broker {cluster.node(1).id} has the topic: nobody answers at {at}"
    assert (await state(cluster.calls(2))).state == "active"  # as it is written down


@clustered(2)
async def test_a_call_finds_the_owner_of_a_topic_that_moved_meanwhile(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    view = cluster.node(2).cluster.view
    await unload(cluster.calls(1), wait=True)
    await cluster.settled(NAME, 2)
    view.hosts[NAME] = cluster.node(1).broker.broker_id  # node 2 has it; what node 1 knows is made old
    cluster.node(1).cluster.view.hosts[NAME] = cluster.node(1).broker.broker_id
    assert (await cluster.calls(2).ours.PeekTopic(ours.PeekTopicRequest(topic=TOPIC))).head == 0
    cluster.node(1).cluster.view.hosts[NAME] = cluster.node(2).broker.broker_id
    assert (await cluster.calls(1).ours.PeekTopic(ours.PeekTopicRequest(topic=TOPIC))).head == 0


@clustered(2)
async def test_a_partitioned_topic_whose_partitions_are_on_several_brokers_is_deleted_as_a_whole(
    cluster: ServerCluster,
) -> None:
    request = admin_pb.PartitionedTopicRequest(base_name=TOPIC, partitions=3, dispatch_strategy=1)  # type: ignore[arg-type]
    await cluster.calls(1).topics.CreatePartitionedTopic(request)
    await cluster.until(lambda: all(cluster.host(part) is not None for part in PARTS))
    assert {cluster.host(part) for part in PARTS} == {*cluster.nodes}
    found = await cluster.calls(2).discovery.TopicPartitions(pb.TopicLookupRequest(topic=TOPIC))
    assert list(found.partitions) == PARTS
    one = cluster.calls(1).topics.DeleteTopic(admin_pb.TopicRequest(name=PARTS[1]))
    code, sentence = await refused(one)
    assert code is StatusCode.INVALID_ARGUMENT and "Cannot delete individual partition" in sentence
    assert (await cluster.calls(1).topics.DeleteTopic(admin_pb.TopicRequest(name=TOPIC))).success
    assert all(cluster.host(part) is None for part in PARTS)
    assert not (await cluster.calls(2).topics.ListNamespaceTopics(admin_pb.NamespaceRequest(name="default"))).topics
    again = cluster.calls(2).topics.DeleteTopic(admin_pb.TopicRequest(name=TOPIC))
    assert (await refused(again)).code is StatusCode.NOT_FOUND


@clustered(2)
async def test_a_native_client_deletes_a_topic_that_another_broker_has(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    async with native(cluster.node(2)) as link:
        await link.request(stream.Command(delete_topic=stream.DeleteTopic(topic=TOPIC)), "done")
    assert cluster.host(NAME) is None and not await cluster.node(2).broker.topics.exists(NAME)


@clustered(2, upload_seconds=3600.0)
async def test_a_table_is_loaded_at_any_broker_and_its_owners_upload_what_waits(cluster: ServerCluster) -> None:
    for part in PARTS[:2]:
        await cluster.create(part, on=1 + (part.partition_number or 0))
        topic = reliable(cluster.host(part) or cluster.node(1), part)
        producer = await topic.add_producer("shop")
        await topic.publish(producer, Envelope(b"order", 1, None, "shop"))

    async def heads(asked: ServerNode) -> Any:
        target = f"/iceberg/v1/danube/namespaces/{NAME.namespace}/tables/{NAME.name}"
        answer = await asked.calls.ours.ReadCatalog(ours.ReadCatalogRequest(method="GET", target=target))
        assert answer.code == 200
        return json.loads(json.loads(answer.body)["metadata"]["properties"]["danube.head"])

    assert await heads(cluster.node(2)) == {"0": 0, "1": 0}
    async with asyncio.timeout(10):  # the interval is an hour
        while await heads(cluster.node(2)) != {"0": 1, "1": 1}:  # noqa: ASYNC110  # brokers tell nobody
            await asyncio.sleep(0.05)
    assert await heads(cluster.node(1)) == {"0": 1, "1": 1}


@clustered(2)
async def test_poison_reaches_a_dead_letter_topic_on_another_broker(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    letters = await cluster.create("/default/letters", on=2)
    policy = admin_pb.SubscriptionFailurePolicy(dead_letter_topic=letters, poison_policy=admin_pb.DeadLetter)
    request = admin_pb.SetSubscriptionFailurePolicyRequest(topic=TOPIC, subscription="s", failure_policy=policy)
    await cluster.calls(2).topics.SetSubscriptionFailurePolicy(request)
    producer = await cluster.calls(1).create_producer()
    messages = cluster.calls(1).receive(await cluster.calls(1).subscribe())
    await cluster.calls(1).send(
        producer, b"poison", routing_key="k", attributes={"a": "b"}, publish_time=1_700_000_000_123
    )
    message = await messages.read()
    await cluster.calls(1).consumers.Nack(pb.NackRequest(msg_id=message.msg_id, subscription_name="s", reason="bad"))
    peek = ours.PeekTopicRequest(topic=letters, count=10)
    await cluster.until(lambda: reliable(cluster.node(2), letters).head == 1)
    [letter] = (await cluster.calls(1).ours.PeekTopic(peek)).messages
    assert (letter.payload, letter.routing_key) == (b"poison", "k")
    assert letter.publish_time_us == 1_700_000_000_123_000
    assert letter.producer_name == f"broker-replicator-{cluster.node(1).id}"
    assert letter.attributes["a"] == "b" and TOPIC in letter.attributes.values()


# --- moving ---------------------------------------------------------------------------------------------


@clustered(2)
async def test_a_topic_is_unloaded_through_a_broker_that_does_not_have_it(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    producer = await cluster.calls(1).create_producer()
    messages = cluster.calls(1).receive(await cluster.calls(1).subscribe())
    await cluster.calls(1).send(producer)
    await messages.read()
    assert (await plain_unload(cluster.calls(2))).success
    assert cluster.node(1).broker.topics.get(NAME) is None  # it has let go when the answer comes
    assert (await refused(messages.read())).code is StatusCode.UNAVAILABLE
    await cluster.settled(NAME, 2)
    described = await cluster.calls(1).topics.DescribeTopic(admin_pb.DescribeTopicRequest(name=TOPIC))
    assert (described.broker_id, list(described.subscriptions)) == (str(cluster.node(2).id), ["s"])
    for asked in (cluster.calls(1), cluster.calls(2)):
        [move, *_] = (await asked.ours.MovePhases(ours.MovePhasesRequest(topic=TOPIC))).moves
        assert (move.from_broker, move.to_broker, move.failure) == (cluster.node(1).id, cluster.node(2).id, "")
        names = [phase.name for phase in move.phases]
        assert names == ["upload", "quiet", "cursors", "rest", "seal", "close"]
        assert all(phase.duration_ms >= 0 for phase in move.phases)
    [result] = await unload(cluster.calls(2), wait=True, to_broker=cluster.node(1).id)
    assert (result.from_broker, result.to_broker, result.failure) == (cluster.node(2).id, cluster.node(1).id, "")
    assert [phase.name for phase in result.phases][-1] == "claim"
    assert cluster.node(1).broker.topics.get(NAME) is not None


@clustered(2)
async def test_unloading_a_partitioned_topic_moves_each_partition_and_has_a_result_for_each(
    cluster: ServerCluster,
) -> None:
    request = admin_pb.PartitionedTopicRequest(base_name=TOPIC, partitions=3, dispatch_strategy=1)  # type: ignore[arg-type]
    await cluster.calls(1).topics.CreatePartitionedTopic(request)
    await cluster.until(lambda: all(cluster.host(part) is not None for part in PARTS))
    before = {part: cluster.host(part) for part in PARTS}
    results = await unload(cluster.calls(1), wait=True)
    assert [(result.topic, result.failure) for result in results] == [(part, "") for part in PARTS]
    assert all(cluster.host(part) not in (None, before[part]) for part in PARTS)
    assert (await plain_unload(cluster.calls(2))).success


@clustered(2)
async def test_an_unload_that_cannot_be_is_refused_with_the_code_and_a_sentence_and_changes_nothing(
    cluster: ServerCluster,
) -> None:
    await cluster.create(TOPIC, on=1)
    code, _ = await refused(plain_unload(cluster.calls(1), "/default/nothing"))
    assert code is StatusCode.NOT_FOUND
    code, _ = await refused(plain_unload(cluster.calls(1), "nothing"))
    assert code is StatusCode.INVALID_ARGUMENT
    for target, expected in ((cluster.node(1).id, StatusCode.FAILED_PRECONDITION), (7, StatusCode.NOT_FOUND)):
        code, _ = await refused(unload(cluster.calls(2), to_broker=target))
        assert code is expected
    await cluster.drained(2)
    code, sentence = await refused(plain_unload(cluster.calls(2)))
    assert code is StatusCode.FAILED_PRECONDITION and "no other broker is active" in sentence
    code, _ = await refused(unload(cluster.calls(1), to_broker=cluster.node(2).id))
    assert code is StatusCode.FAILED_PRECONDITION
    assert cluster.host(NAME) is cluster.node(1)
    assert await cluster.metadata.get(keys.unassigned(NAME)) is None


@clustered(1)
async def test_a_cluster_of_one_broker_has_nobody_to_unload_to(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    code, sentence = await refused(plain_unload(cluster.calls(1)))
    assert code is StatusCode.FAILED_PRECONDITION
    assert sentence == (
        "Cannot unload topic: single broker cluster detected. Unload requires at least 2 brokers. "
        "Use delete if you want to remove the topic."
    )
    request = admin_pb.UnloadBrokerRequest(broker_id=str(cluster.node(1).id))
    assert (await refused(cluster.calls(1).brokers.UnloadBroker(request))).code is StatusCode.FAILED_PRECONDITION


@clustered(2)
async def test_values_that_are_none_of_ours_are_named_and_left_as_they_are(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    for value in (b"not json", b'"text"', b'{"reason": "because", "from_broker": 1}'):
        await cluster.metadata.transact([], [Put(keys.unassigned(NAME), value)])
        await cluster.until(lambda: all(node.cluster.view.revision(keys.unassigned(NAME)) for node in cluster.nodes))
        code, sentence = await refused(plain_unload(cluster.calls(2)))
        assert code is StatusCode.FAILED_PRECONDITION and keys.unassigned(NAME) in sentence
        item = await cluster.metadata.get(keys.unassigned(NAME))
        assert item is not None and item.value == value
        await cluster.metadata.transact([], [Delete(keys.unassigned(NAME))])
        await cluster.until(
            lambda: not any(node.cluster.view.revision(keys.unassigned(NAME)) for node in cluster.nodes)
        )
    await cluster.metadata.transact([], [Put(keys.orphan(NAME, 7), b"[]")])
    code, sentence = await refused(cluster.calls(1).ours.TopicState(ours.TopicStateRequest(topic=TOPIC)))
    assert code is StatusCode.INTERNAL and keys.orphan(NAME, 7) in sentence
    assert cluster.host(NAME) is cluster.node(1)


@clustered(2)
async def test_a_second_unload_is_told_how_far_the_first_one_is(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    await cluster.calls(1).send(await cluster.calls(1).create_producer())
    storage = reliable(cluster.node(1), NAME).storage
    carried = storage.uploader.get(NAME) if storage is not None else None
    assert carried is not None
    async with carried.working:  # the upload waits
        first = asyncio.ensure_future(unload(cluster.calls(2)))
        await cluster.until(lambda: NAME in cluster.node(1).broker.topics.moves.moving)
        await cluster.until(lambda: cluster.node(2).cluster.marker_of(NAME) is not None)
        for asked in (cluster.calls(1), cluster.calls(2)):
            code, sentence = await refused(plain_unload(asked))
            assert code is StatusCode.FAILED_PRECONDITION
            assert "being moved already" in sentence and "phase: upload" in sentence
            told = await state(asked)
            assert (told.state, told.phase) == ("moving", "upload")
            assert (told.broker_id, told.to_broker) == (cluster.node(1).id, cluster.node(2).id)
    assert not (await first)[0].failure


@clustered(2)
async def test_a_move_that_fails_is_internal_and_the_topic_is_served_where_it_was(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    producer = await cluster.calls(1).create_producer()
    await cluster.calls(1).send(producer)
    cluster.objects.away = True
    await cluster.calls(1).send(producer)
    code, sentence = await refused(plain_unload(cluster.calls(2)))
    cluster.objects.away = False
    assert code is StatusCode.INTERNAL and "is served where it was" in sentence
    await cluster.calls(1).send(producer)
    [move, *_] = (await cluster.calls(2).ours.MovePhases(ours.MovePhasesRequest(topic=TOPIC))).moves
    assert "it is away" in move.failure and move.from_broker == cluster.node(1).id


# --- orphans ----------------------------------------------------------------------------------------------


@clustered(2)
async def test_an_orphan_is_shown_with_what_brings_it_back_and_given_up_only_on_an_operators_word(
    cluster: ServerCluster,
) -> None:
    await cluster.create(TOPIC, on=1)
    producer = await cluster.calls(1).create_producer()
    await cluster.calls(1).subscribe()
    await cluster.calls(1).send(producer)
    await unload(cluster.calls(1), wait=True)
    await cluster.settled(NAME, 2)
    topic = reliable(cluster.node(2), NAME)
    # As a takeover leaves it: offsets of a broker that is gone, below what the topic goes on with.
    lost = Orphan(start=1, end=4, broker_id=77, epoch=topic.ownership.epoch - 1)
    await topic.ownership.write([Put(keys.orphan(NAME, 1), lost.to_bytes())])
    topic.adopted([lost], rescued=(), voided=())
    for asked in (cluster.calls(1), cluster.calls(2)):
        [orphan] = (await state(asked)).orphans
        assert (orphan.first, orphan.end, orphan.broker_id) == (1, 4, 77)
        assert "start broker 77 again" in orphan.sentence and "orphan discard" in orphan.sentence
    wrong = cluster.calls(1).ours.DiscardOrphan(ours.DiscardOrphanRequest(topic=TOPIC, first=2))
    assert (await refused(wrong)).code is StatusCode.NOT_FOUND
    done = await cluster.calls(1).ours.DiscardOrphan(ours.DiscardOrphanRequest(topic=TOPIC, first=1))
    assert (done.first, done.end) == (1, 4)
    assert not (await state(cluster.calls(1))).orphans and not topic.orphans
    assert await cluster.metadata.get(keys.orphan(NAME, 1)) is None
    assert await cluster.metadata.get(keys.void(NAME, 1)) is not None
    listing = await cluster.calls(1).ours.StorageList(ours.StorageListRequest(topic=TOPIC))
    assert [(each.first, each.end) for each in listing.voids] == [(1, 4)]
    again = cluster.calls(1).ours.DiscardOrphan(ours.DiscardOrphanRequest(topic=TOPIC, first=1))
    assert (await refused(again)).code is StatusCode.NOT_FOUND


# --- brokers ----------------------------------------------------------------------------------------------


@clustered(2)
async def test_any_broker_lists_all_with_role_state_and_addresses(cluster: ServerCluster) -> None:
    await cluster.drained(2)
    leader = cluster.node(1).cluster.leader
    for asked in (cluster.calls(1), cluster.calls(2)):
        listed = (await asked.brokers.ListBrokers(EMPTY)).brokers
        assert [each.broker_id for each in listed] == [str(number) for number in sorted(n.id for n in cluster.nodes)]
        assert (await asked.brokers.GetLeaderBroker(EMPTY)).leader == str(leader)
        for each in listed:
            node = next(node for node in cluster.nodes if str(node.id) == each.broker_id)
            assert each.broker_role == ("Cluster_Leader" if node.id == leader else "Cluster_Follower")
            assert each.broker_status == ("drained" if node is cluster.node(2) else "active")
            assert each.broker_addr == f"http://{node.servers.client_addr}"
            assert each.admin_addr == f"http://{node.servers.admin_addr}"
            assert each.metrics_addr == node.servers.metrics_addr


@clustered(2)
async def test_a_broker_is_drained_by_namespace_and_activated_again(cluster: ServerCluster) -> None:
    await cluster.calls(1).namespaces.CreateNamespace(admin_pb.NamespaceRequest(name="mine"))
    kept = await cluster.create("/mine/kept", on=1)
    moved = [await cluster.create(f"/default/moved-{number}", on=1) for number in range(3)]
    request = admin_pb.UnloadBrokerRequest(broker_id=str(cluster.node(1).id), namespaces_exclude=["mine"], dry_run=True)
    drain = cluster.calls(2).brokers.UnloadBroker
    dry = await drain(request)
    assert (dry.started, dry.total, dry.pending) == (False, 3, 3)
    assert all(cluster.host(topic) is cluster.node(1) for topic in moved)
    only = admin_pb.UnloadBrokerRequest(broker_id=str(cluster.node(1).id), namespaces_include=["mine"], dry_run=True)
    assert (await drain(only)).total == 1
    request.dry_run, request.max_parallel, request.timeout_seconds = False, 2, 20
    done = await drain(request)
    assert (done.started, done.total, done.succeeded, done.failed, done.pending) == (True, 3, 3, 0, 0)
    assert not done.failed_topics
    await cluster.until(lambda: all(cluster.host(topic) is cluster.node(2) for topic in moved))
    assert cluster.host(kept) is cluster.node(1)
    await cluster.until(lambda: cluster.node(1).cluster.mode.value == "drained")
    # What is left goes too, and a broker without topics is drained at once.
    rest = await drain(admin_pb.UnloadBrokerRequest(broker_id=str(cluster.node(1).id), timeout_seconds=20))
    assert (rest.total, rest.succeeded) == (1, 1)
    none = await drain(admin_pb.UnloadBrokerRequest(broker_id=str(cluster.node(1).id)))
    assert (none.started, none.total, none.succeeded) == (True, 0, 0)
    activate = cluster.calls(2).brokers.ActivateBroker
    assert (await activate(admin_pb.ActivateBrokerRequest(broker_id=str(cluster.node(1).id)))).success
    await cluster.until(lambda: cluster.node(1).cluster.mode.value == "active")


@clustered(2)
async def test_a_broker_that_is_not_known_or_the_only_active_one_is_not_drained(cluster: ServerCluster) -> None:
    brokers = cluster.calls(1).brokers
    for text, code in (
        ("", StatusCode.INVALID_ARGUMENT),
        ("x", StatusCode.INVALID_ARGUMENT),
        ("7", StatusCode.NOT_FOUND),
    ):
        assert (await refused(brokers.UnloadBroker(admin_pb.UnloadBrokerRequest(broker_id=text)))).code is code
        assert (await refused(brokers.ActivateBroker(admin_pb.ActivateBrokerRequest(broker_id=text)))).code is code
    await cluster.drained(2)
    request = admin_pb.UnloadBrokerRequest(broker_id=str(cluster.node(1).id))
    code, sentence = await refused(brokers.UnloadBroker(request))
    assert code is StatusCode.FAILED_PRECONDITION and "no other broker is active" in sentence


@clustered(2)
async def test_an_uneven_cluster_is_balanced_on_demand_and_remembers_the_moves(cluster: ServerCluster) -> None:
    for number in range(6):
        await cluster.create(f"/default/t{number}", on=1)
    topics_of = {node.id: len(node.broker.topics.loaded) for node in cluster.nodes}
    assert topics_of == {cluster.node(1).id: 6, cluster.node(2).id: 0}
    asked = cluster.calls(2).brokers
    balance = await asked.GetClusterBalance(admin_pb.ClusterBalanceRequest())
    assert (balance.assignment_strategy, balance.broker_count, balance.mean_load) == ("Fair", 2, 3.0)
    assert (balance.max_load, balance.min_load, balance.coefficient_of_variation) == (6.0, 0.0, 1.0)
    loads = {each.broker_id: (each.topic_count, each.is_overloaded) for each in balance.brokers}
    assert loads == {cluster.node(1).id: (6, True), cluster.node(2).id: (0, False)}
    await cluster.until(lambda: len(cluster.node(2).cluster.view.reports[cluster.node(1).broker.broker_id].topics) == 6)
    dry = await asked.TriggerRebalance(admin_pb.RebalanceRequest(dry_run=True))
    proposed, *others = dry.proposed_moves
    assert len(others) == 2
    assert dry.success and dry.error_message.startswith("Dry run") and dry.moves_executed == 0
    assert (proposed.from_broker, proposed.to_broker) == (cluster.node(1).id, cluster.node(2).id)
    done = await asked.TriggerRebalance(admin_pb.RebalanceRequest(max_moves=1))
    assert done.success and done.moves_executed == 1 and done.error_message.startswith("1 begun;")
    await cluster.until(lambda: len(cluster.node(2).broker.topics.loaded) == 1)
    [move] = (await cluster.calls(1).ours.RebalancingHistory(ours.RebalancingHistoryRequest())).moves
    assert move.topic == done.proposed_moves[0].topic_name and move.to_broker == cluster.node(2).id
    code, _ = await refused(asked.TriggerRebalance(admin_pb.RebalanceRequest(max_moves=0)))
    assert code is StatusCode.INVALID_ARGUMENT


@clustered(3, assignment_strategy="balanced")
async def test_new_topics_avoid_a_busy_machine_and_one_that_says_nothing_is_not_taken_for_idle(
    cluster: ServerCluster,
) -> None:
    """The third one is of an older version: it reports neither CPU nor memory."""
    for number, cpu in ((1, 90.0), (2, 5.0)):
        cluster.node(number).broker.topics._meter._usage = lambda _, cpu=cpu: ResourceUsage(
            cpu=cpu, memory=40.0, disk=1.0
        )  # type: ignore[misc]
    ids = [node.broker.broker_id for node in cluster.nodes]
    reports = [node.cluster.view.reports for node in cluster.nodes]
    await cluster.until(lambda: all(each[ids[0]].cpu == 90.0 and each[ids[1]].cpu == 5.0 for each in reports))
    stored = await cluster.metadata.get(keys.load(ids[0]))
    assert stored is not None and len(stored.value) < 500
    for number in range(6):
        await cluster.calls(1).create_topic(f"/default/t{number}")
    await cluster.until(lambda: len(cluster.node(2).broker.topics.loaded) == 6)
    balance = await cluster.calls(3).brokers.GetClusterBalance(admin_pb.ClusterBalanceRequest())
    loads = {each.broker_id: each.load for each in balance.brokers}
    assert loads[ids[1]] < loads[ids[2]] < loads[ids[0]]


async def keys_of(cluster: ServerCluster, topic: TopicName) -> set[str]:
    """What is stored below a topic, without the topic's own part."""
    below = keys.below_topic(topic)
    return {item.key.removeprefix(below) for item in await cluster.metadata.list(below)}


@clustered(2)
async def test_a_move_of_a_non_reliable_topic_removes_subscriptions_and_consumers_and_keeps_what_the_next_owner_needs(
    cluster: ServerCluster,
) -> None:
    topic = await cluster.create("/default/quick", on=1, reliable=False)
    other = await cluster.create("/default/quicker", on=1, reliable=False)
    await cluster.metadata.transact(
        [], [Put(keys.schema(topic), b'"user-events"'), Put(keys.topic_policy(topic), b"{}")]
    )
    await cluster.metadata.transact([], [Put(keys.delivery(topic), b'"NonReliable"')])
    for name in (topic, other):
        served = cluster.node(1).broker.topics.get(name)
        assert isinstance(served, VolatileTopic)
        await served.add_producer("p")
        for number in range(3):
            await served.subscribe(SubscriptionName(f"s{number}"), SubscriptionKind.SHARED, "c")
    before = await keys_of(cluster, other)
    assert sum("/consumers/" in key for key in await keys_of(cluster, topic)) == 3
    kept = {key for key in await keys_of(cluster, topic) if not key.startswith("subscriptions/")}
    await cluster.node(2).cluster.requests.unload(topic)
    await cluster.settled(topic, 2)
    assert await keys_of(cluster, topic) == kept >= {"delivery", "schema", "policy"}
    assert await cluster.metadata.get(keys.namespace_topic(topic)) is not None
    assert await keys_of(cluster, other) == before
    moved = cluster.node(2).broker.topics.get(topic)
    assert isinstance(moved, VolatileTopic) and not moved.subscriptions and not len(moved.producers)
    await moved.subscribe(SubscriptionName("s0"), SubscriptionKind.SHARED, "c")


@clustered(2)
async def test_more_subscriptions_than_one_transaction_removes_do_not_hold_a_move_up(cluster: ServerCluster) -> None:
    topic = await cluster.create("/default/quick", on=1, reliable=False)
    served = cluster.node(1).broker.topics.get(topic)
    assert isinstance(served, VolatileTopic)
    for number in range(70):
        await served.subscribe(SubscriptionName(f"s{number}"), SubscriptionKind.SHARED, "c")
    await cluster.node(2).cluster.requests.unload(topic)
    await cluster.settled(topic, 2)
    left = await keys_of(cluster, topic)
    assert sum("/consumers/" in key for key in left) == 20, "the next owner forgets them when nobody comes"


@clustered(2)
async def test_a_broker_that_stops_leaves_the_registrations_of_a_non_reliable_topic(cluster: ServerCluster) -> None:
    """Clients may come back with their old ids: nobody has asked for a move."""
    topic = await cluster.create("/default/quick", on=1, reliable=False)
    served = cluster.node(1).broker.topics.get(topic)
    assert isinstance(served, VolatileTopic)
    await served.subscribe(SubscriptionName("s"), SubscriptionKind.SHARED, "c")
    before = await keys_of(cluster, topic)
    assert await cluster.node(1).broker.topics.hand_over_all(5.0) == 0
    assert await keys_of(cluster, topic) == before


# --- members of the metadata store ------------------------------------------------------------------------


@clustered(1)
async def test_members_are_shown_added_promoted_and_removed(cluster: ServerCluster) -> None:
    calls, admin = cluster.calls(1), cluster.calls(1).cluster
    code, sentence = await refused(admin.ClusterStatus(EMPTY))
    assert code is StatusCode.FAILED_PRECONDITION and "run by somebody else" in sentence
    mine = f"http://{calls.broker.config.cluster.raft_addr}"
    run_members(calls.broker, SmallQuorum(OneMember(11, ("http://other:7650",)), OneMember(22, (mine,))))
    status = await admin.ClusterStatus(EMPTY)
    assert (status.leader_id, status.current_term, status.last_applied) == (11, 4, 100)
    assert (list(status.voters), list(status.learners), status.self_node_id) == ([11, 22], [], 22)
    assert status.raft_addr == calls.broker.config.cluster.raft_addr
    for missing in (admin_pb.AddNodeRequest(addr="a:1"), admin_pb.AddNodeRequest(node_id=1)):
        assert (await refused(admin.AddNode(missing))).code is StatusCode.INVALID_ARGUMENT
    added = await admin.AddNode(admin_pb.AddNodeRequest(addr="new:7650", node_id=5))
    assert (added.success, added.node_id) == (True, 33) and "learner" in added.message
    again = await admin.AddNode(admin_pb.AddNodeRequest(addr="new:7650", node_id=5))
    assert again.success and "already" in again.message
    assert list((await admin.ClusterStatus(EMPTY)).learners) == [33]
    assert (await admin.PromoteNode(admin_pb.PromoteNodeRequest(node_id=33))).success
    assert "already a voter" in (await admin.PromoteNode(admin_pb.PromoteNodeRequest(node_id=33))).message
    assert (await admin.RemoveNode(admin_pb.RemoveNodeRequest(node_id=33))).success
    remove = admin.RemoveNode(admin_pb.RemoveNodeRequest(node_id=11))
    assert (await refused(remove)).code is StatusCode.FAILED_PRECONDITION
    for number, expected in ((0, StatusCode.INVALID_ARGUMENT), (99, StatusCode.NOT_FOUND)):
        for call in (
            admin.PromoteNode(admin_pb.PromoteNodeRequest(node_id=number)),
            admin.RemoveNode(admin_pb.RemoveNodeRequest(node_id=number)),
        ):
            assert (await refused(call)).code is expected
    run_members(calls.broker, SmallQuorum(OneMember(22, (mine,))))
    code, sentence = await refused(admin.RemoveNode(admin_pb.RemoveNodeRequest(node_id=22)))
    assert code is StatusCode.FAILED_PRECONDITION and "last voter" in sentence


# --- what is measured -------------------------------------------------------------------------------------


@clustered(2)
async def test_metrics_tell_state_leader_peers_and_lease(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    await unload(cluster.calls(1))
    texts = [await asyncio.to_thread(_scrape, node) for node in cluster.nodes]
    leading = [node.id == node.cluster.leader for node in cluster.nodes]
    for text, leads, node in zip(texts, leading, cluster.nodes, strict=True):
        own = f'broker="{node.id}"'
        for state, value in (("active", 1.0), ("drained", 0.0)):
            assert f'danube_broker_state{{state="{state}",{own}}} {value}' in text
        assert f"danube_leader_election_state{{{own}}} {float(leads)}" in text
        assert f"danube_cluster_brokers{{{own}}} 2.0" in text
        [age] = [line.split()[1] for line in text.splitlines() if line.startswith("danube_broker_lease_age_seconds{")]
        assert 0 <= float(age) < 20
    assert f'danube_topic_unload_total{{result="ok",broker="{cluster.node(1).id}"}} 1' in texts[0]


def _scrape(node: ServerNode) -> str:
    with urllib.request.urlopen(f"http://{node.servers.metrics_addr}/metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


@served()
async def test_a_broker_that_is_alone_has_states_and_no_moves(calls: Calls) -> None:
    await calls.create_topic()
    told = await state(calls)
    assert (told.state, told.broker_id, told.live.head) == ("active", calls.broker.broker_id, 0)
    assert not (await calls.ours.MovePhases(ours.MovePhasesRequest(topic=TOPIC))).moves
    assert not (await calls.ours.RebalancingHistory(ours.RebalancingHistoryRequest())).moves
    code, sentence = await refused(unload(calls))
    assert code is StatusCode.FAILED_PRECONDITION and sentence.startswith("Cannot unload topic: single broker")
    assert (await refused(state(calls, "/default/nothing"))).code is StatusCode.NOT_FOUND


# --- what others are told -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "url", "expected"),
    [
        ("10.0.0.1:50051", "http://example:6650", "10.0.0.1:50051"),
        ("0.0.0.0:50051", "http://example:6650", "example:50051"),
        ("[::]:50051", "https://[2001:db8::1]:6650/", "[2001:db8::1]:50051"),
        ("0.0.0.0:50051", "http://0.0.0.0:6650", "0.0.0.0:50051"),
    ],
)
def test_a_broker_that_listens_everywhere_is_found_where_its_clients_find_it(
    address: str, url: str, expected: str
) -> None:
    assert reachable(address, url) == expected


@pytest.mark.parametrize("flag", ["client_addr", "stream_addr", "admin_addr"])
def test_a_broker_of_a_cluster_needs_ports_that_can_be_told_before_it_listens(flag: str) -> None:
    check_ports(Config(mode="cluster"))
    with pytest.raises(ConfigError, match="does not change"):
        check_ports(Config(mode="cluster", broker=BrokerConfig(**{flag: "127.0.0.1:0"})))
