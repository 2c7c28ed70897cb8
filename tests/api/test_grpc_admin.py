"""Administration over gRPC, row by row of the contract, and our own service."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from typing import Any

import pytest
from grpc import StatusCode

from pydanube.api.http.metrics import MetricsServer
from pydanube.api.server import BrokerServers, open_metrics
from pydanube.config import BrokerConfig
from pydanube.core.names import TopicName
from pydanube.core.policies import TopicPolicy
from pydanube.errors import ConfigError
from pydanube.telemetry import Telemetry
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours_pb
from tests.harness.servers import ANYWHERE, TOPIC, Calls, refused, served, serving
from tests.support import run

EMPTY = pb.Empty()


# --- brokers ------------------------------------------------------------------------------------------


@served()
async def test_one_broker_is_listed_and_leads(calls: Calls) -> None:
    [info] = (await calls.brokers.ListBrokers(EMPTY)).brokers
    assert info.broker_id == str(calls.broker.broker_id)
    assert (info.broker_role, info.broker_status) == ("Cluster_Leader", "active")
    assert info.broker_addr == f"http://{calls.servers.client_addr}"
    assert info.admin_addr == f"http://{calls.servers.admin_addr}"
    assert info.metrics_addr == calls.servers.metrics_addr
    assert (await calls.brokers.GetLeaderBroker(EMPTY)).leader == info.broker_id


@served()
async def test_every_namespace_is_listed_once(calls: Calls) -> None:
    await calls.namespaces.CreateNamespace(pb.NamespaceRequest(name="mine"))
    await calls.create_topic("/mine/a")
    namespaces = list((await calls.brokers.ListNamespaces(EMPTY)).namespaces)
    assert {"default", "mine"} <= {*namespaces} and len(namespaces) == len({*namespaces})


@served()
async def test_a_single_broker_cannot_be_unloaded(calls: Calls) -> None:
    request = pb.UnloadBrokerRequest(broker_id=str(calls.broker.broker_id))
    assert (await refused(calls.brokers.UnloadBroker(request))).code is StatusCode.FAILED_PRECONDITION
    assert (await refused(calls.brokers.UnloadBroker(pb.UnloadBrokerRequest()))).code is StatusCode.INVALID_ARGUMENT


@served()
async def test_a_single_broker_is_active_and_others_are_not_known(calls: Calls) -> None:
    request = pb.ActivateBrokerRequest(broker_id=str(calls.broker.broker_id))
    assert (await calls.brokers.ActivateBroker(request)).success
    for other, code in (("", StatusCode.INVALID_ARGUMENT), ("7", StatusCode.NOT_FOUND)):
        assert (await refused(calls.brokers.ActivateBroker(pb.ActivateBrokerRequest(broker_id=other)))).code is code


@served()
async def test_what_needs_a_cluster_is_not_implemented_and_says_so(calls: Calls) -> None:
    for call, word in (
        (calls.brokers.GetClusterBalance(pb.ClusterBalanceRequest()), "standalone"),
        (calls.brokers.TriggerRebalance(pb.RebalanceRequest()), "standalone"),
        (calls.cluster.ClusterStatus(EMPTY), "standalone"),
        (calls.cluster.AddNode(pb.AddNodeRequest()), "standalone"),
        (calls.cluster.PromoteNode(pb.PromoteNodeRequest()), "standalone"),
        (calls.cluster.RemoveNode(pb.RemoveNodeRequest()), "standalone"),
        (calls.security.ListRoles(EMPTY), "authentication"),
    ):
        code, sentence = await refused(call)
        assert code is StatusCode.UNIMPLEMENTED and word in sentence


# --- namespaces ---------------------------------------------------------------------------------------


@served()
async def test_a_namespace_is_created_used_and_deleted(calls: Calls) -> None:
    mine = pb.NamespaceRequest(name="mine")
    assert not (await calls.namespaces.GetNamespaceTopics(mine)).topics
    assert (await calls.namespaces.CreateNamespace(mine)).success
    code, sentence = await refused(calls.namespaces.CreateNamespace(mine))
    assert code is StatusCode.ALREADY_EXISTS and "mine" in sentence
    await calls.create_topic("/mine/a")
    assert list((await calls.namespaces.GetNamespaceTopics(mine)).topics) == ["mine/a"]
    assert (await refused(calls.namespaces.DeleteNamespace(mine))).code is StatusCode.FAILED_PRECONDITION
    await calls.topics.DeleteTopic(pb.TopicRequest(name="/mine/a"))
    assert (await calls.namespaces.DeleteNamespace(mine)).success
    assert (await refused(calls.namespaces.DeleteNamespace(mine))).code is StatusCode.NOT_FOUND


@served(policies=TopicPolicy(max_producers_per_topic=3))
async def test_the_policies_of_a_namespace_are_its_seven_limits_and_its_retention(calls: Calls) -> None:
    response = await calls.namespaces.GetNamespacePolicies(pb.NamespaceRequest(name="default"))
    policies = json.loads(response.policies)
    assert sum(name.startswith("max_") for name in policies) == 7 and policies["max_producers_per_topic"] == 3
    assert (policies["retention_minutes"], policies["retention_mb"]) == (0, 0)
    missing = calls.namespaces.GetNamespacePolicies(pb.NamespaceRequest(name="none"))
    assert (await refused(missing)).code is StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", ["", "a/b", "a..b", " "])
@served()
async def test_a_malformed_namespace_is_refused(calls: Calls, name: str) -> None:
    request = pb.NamespaceRequest(name=name)
    for call in (calls.namespaces.CreateNamespace, calls.namespaces.DeleteNamespace):
        assert (await refused(call(request))).code is StatusCode.INVALID_ARGUMENT


# --- topics -------------------------------------------------------------------------------------------


@served()
async def test_topics_are_listed_by_namespace_and_by_broker(calls: Calls) -> None:
    await calls.create_topic("/default/b", reliable=False)
    await calls.create_topic("/default/a")
    me = str(calls.broker.broker_id)
    expected = [
        pb.TopicInfo(name="/default/a", broker_id=me, delivery="Reliable"),
        pb.TopicInfo(name="/default/b", broker_id=me, delivery="NonReliable"),
    ]
    assert list((await calls.topics.ListNamespaceTopics(pb.NamespaceRequest(name="default"))).topics) == expected
    assert list((await calls.topics.ListBrokerTopics(pb.BrokerRequest(broker_id=me))).topics) == expected
    assert not (await calls.topics.ListBrokerTopics(pb.BrokerRequest(broker_id="7"))).topics
    assert not (await calls.topics.ListNamespaceTopics(pb.NamespaceRequest(name="none"))).topics
    assert (await refused(calls.topics.ListBrokerTopics(pb.BrokerRequest()))).code is StatusCode.INVALID_ARGUMENT


@served()
async def test_a_topic_that_cannot_be_created_is_refused_with_the_reason(calls: Calls) -> None:
    await calls.create_topic()
    assert (await refused(calls.create_topic())).code is StatusCode.ALREADY_EXISTS
    assert (await refused(calls.create_topic("/none/a"))).code is StatusCode.NOT_FOUND
    assert (await refused(calls.create_topic("bad"))).code is StatusCode.INVALID_ARGUMENT
    odd = pb.NewTopicRequest(name="/default/b", dispatch_strategy=9)  # type: ignore[arg-type]
    assert (await refused(calls.topics.CreateTopic(odd))).code is StatusCode.INVALID_ARGUMENT


@served()
async def test_a_partitioned_topic_is_created_and_deleted_as_a_whole(calls: Calls) -> None:
    request = pb.PartitionedTopicRequest(base_name=TOPIC, partitions=3, dispatch_strategy=1)  # type: ignore[arg-type]
    assert (await calls.topics.CreatePartitionedTopic(request)).success
    assert (await refused(calls.topics.CreatePartitionedTopic(request))).code is StatusCode.ALREADY_EXISTS
    one = calls.topics.DeleteTopic(pb.TopicRequest(name=f"{TOPIC}-part-1"))
    code, sentence = await refused(one)
    assert code is StatusCode.INVALID_ARGUMENT and "Cannot delete individual partition" in sentence
    assert (await calls.topics.DeleteTopic(pb.TopicRequest(name=TOPIC))).success
    assert not (await calls.topics.ListNamespaceTopics(pb.NamespaceRequest(name="default"))).topics


@pytest.mark.parametrize("partitions", [0, 1 << 31])
@served()
async def test_an_absurd_number_of_partitions_is_refused(calls: Calls, partitions: int) -> None:
    request = pb.PartitionedTopicRequest(base_name=TOPIC, partitions=partitions)
    assert (await refused(calls.topics.CreatePartitionedTopic(request))).code is StatusCode.INVALID_ARGUMENT


@served()
async def test_an_unknown_topic_can_neither_be_deleted_nor_unloaded_nor_described(calls: Calls) -> None:
    request = pb.TopicRequest(name=TOPIC)
    describe = calls.topics.DescribeTopic(pb.DescribeTopicRequest(name=TOPIC))
    for call in (calls.topics.DeleteTopic(request), calls.topics.UnloadTopic(request), describe):
        assert (await refused(call)).code is StatusCode.NOT_FOUND


@served()
async def test_a_single_broker_cannot_unload_a_topic(calls: Calls) -> None:
    await calls.create_topic()
    code, sentence = await refused(calls.topics.UnloadTopic(pb.TopicRequest(name=TOPIC)))
    assert code is StatusCode.FAILED_PRECONDITION
    assert sentence.startswith("Cannot unload topic: single broker cluster detected.")


@served()
async def test_a_topic_is_described(calls: Calls) -> None:
    code, sentence = await refused(calls.create_topic(schema_subject="orders-value"))
    assert code is StatusCode.FAILED_PRECONDITION and "orders-value" in sentence and "not found" in sentence
    await calls.register("orders-value")
    await calls.create_topic(schema_subject="orders-value")
    for name in ("b", "a", "a"):
        await calls.subscribe(name)
    assert await calls.topics.DescribeTopic(pb.DescribeTopicRequest(name=TOPIC)) == pb.DescribeTopicResponse(
        name=TOPIC,
        subscriptions=["a", "b"],
        broker_id=str(calls.broker.broker_id),
        delivery="Reliable",
        schema_subject="orders-value",
        schema_id=1,
        schema_version=1,
        schema_type="string",
        compatibility_mode="BACKWARD",
    )


# --- subscriptions ------------------------------------------------------------------------------------


@served()
async def test_subscriptions_are_listed_and_removed(calls: Calls) -> None:
    listing = pb.TopicRequest(name=TOPIC)
    assert not (await calls.topics.ListSubscriptions(listing)).subscriptions
    await calls.create_topic()
    stream = calls.receive(await calls.subscribe())
    await stream.initial_metadata()
    assert list((await calls.topics.ListSubscriptions(listing)).subscriptions) == ["s"]
    request = pb.SubscriptionRequest(topic=TOPIC, subscription="s")
    code, sentence = await refused(calls.topics.Unsubscribe(request))
    assert code is StatusCode.FAILED_PRECONDITION and "c" in sentence
    stream.cancel()
    for _ in range(200):
        try:
            await calls.topics.Unsubscribe(request)
            break
        except Exception:
            await asyncio.sleep(0.005)
    assert not (await calls.topics.ListSubscriptions(listing)).subscriptions
    assert (await refused(calls.topics.Unsubscribe(request))).code is StatusCode.NOT_FOUND


def policy_request(topic: str = TOPIC, **fields: Any) -> pb.SetSubscriptionFailurePolicyRequest:
    policy = pb.SubscriptionFailurePolicy(**{"poison_policy": 2, "max_redelivery_delay_ms": 10, **fields})
    return pb.SetSubscriptionFailurePolicyRequest(topic=topic, subscription="s", failure_policy=policy)


@served()
async def test_a_failure_policy_may_precede_its_subscription(calls: Calls) -> None:
    await calls.create_topic()
    question = pb.GetSubscriptionFailurePolicyRequest(topic=TOPIC, subscription="s")
    empty = await calls.topics.GetSubscriptionFailurePolicy(question)
    assert not empty.HasField("failure_policy") and empty.subscription_type == 0
    request = policy_request(max_redelivery_count=3, backoff_strategy=1)
    await calls.topics.SetSubscriptionFailurePolicy(request)
    await calls.subscribe(kind=3)
    answer = await calls.topics.GetSubscriptionFailurePolicy(question)
    assert answer.failure_policy == request.failure_policy and answer.subscription_type == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"poison_policy": 9},
        {"backoff_strategy": 9},
        {"poison_policy": 0},
        {"poison_policy": 0, "dead_letter_topic": "  "},
        {"poison_policy": 0, "dead_letter_topic": "no name"},
        {"base_redelivery_delay_ms": 11},
        {"ack_timeout_ms": (1 << 64) - 1},
        {"max_redelivery_count": (1 << 32) - 1},
    ],
)
@served()
async def test_an_absurd_failure_policy_is_refused(calls: Calls, fields: dict[str, Any]) -> None:
    await calls.create_topic()
    call = calls.topics.SetSubscriptionFailurePolicy(policy_request(**fields))
    assert (await refused(call)).code is StatusCode.INVALID_ARGUMENT


@served()
async def test_a_failure_policy_needs_a_policy_and_a_reliable_topic(calls: Calls) -> None:
    without = pb.SetSubscriptionFailurePolicyRequest(topic=TOPIC, subscription="s")
    set_policy = calls.topics.SetSubscriptionFailurePolicy
    assert (await refused(set_policy(without))).code is StatusCode.INVALID_ARGUMENT
    assert (await refused(set_policy(policy_request()))).code is StatusCode.FAILED_PRECONDITION
    await calls.create_topic(reliable=False)
    assert (await refused(set_policy(policy_request()))).code is StatusCode.FAILED_PRECONDITION


def window_request(number: int, topic: str = TOPIC) -> pb.SetSubscriptionDispatchConfigRequest:
    return pb.SetSubscriptionDispatchConfigRequest(
        topic=topic, subscription="s", dispatch_config=pb.SubscriptionDispatchConfig(max_unacked_messages=number)
    )


@served()
async def test_the_window_of_a_subscription_is_set_and_in_force_at_once(calls: Calls) -> None:
    await calls.create_topic()
    await calls.subscribe()
    question = pb.GetSubscriptionDispatchConfigRequest(topic=TOPIC, subscription="s")
    assert not (await calls.topics.GetSubscriptionDispatchConfig(question)).HasField("dispatch_config")
    await calls.topics.SetSubscriptionDispatchConfig(window_request(77))
    answer = await calls.topics.GetSubscriptionDispatchConfig(question)
    assert answer.dispatch_config.max_unacked_messages == 77
    explained = await calls.ours.ExplainSubscription(ours_pb.ExplainSubscriptionRequest(topic=TOPIC, subscription="s"))
    assert explained.unacked_max == 77


@pytest.mark.parametrize("number", [0, 10_001, (1 << 32) - 1])
@served()
async def test_a_window_outside_its_range_is_refused(calls: Calls, number: int) -> None:
    await calls.create_topic()
    code, sentence = await refused(calls.topics.SetSubscriptionDispatchConfig(window_request(number)))
    assert code is StatusCode.INVALID_ARGUMENT and "10000" in sentence
    without = pb.SetSubscriptionDispatchConfigRequest(topic=TOPIC, subscription="s")
    assert (await refused(calls.topics.SetSubscriptionDispatchConfig(without))).code is StatusCode.INVALID_ARGUMENT


# --- ours ---------------------------------------------------------------------------------------------


async def publish(calls: Calls, *payloads: bytes) -> None:
    identity = await calls.create_producer()
    for payload in payloads:
        await calls.send(identity, payload)


@served()
async def test_explain_says_why_in_one_sentence_with_the_numbers(calls: Calls) -> None:
    await calls.create_topic()
    await calls.subscribe()
    question = ours_pb.ExplainSubscriptionRequest(topic=TOPIC, subscription="s")
    assert (await calls.ours.ExplainSubscription(question)).sentence.startswith("caught up")
    await publish(calls, b"a", b"b")
    answer = await calls.ours.ExplainSubscription(question)
    assert (answer.lag.head, answer.lag.lag_messages, answer.lag.has_lag) == (2, 2, True)
    assert 0 < answer.lag.lag_seconds < 60 and "The oldest message that was not acknowledged is" in answer.sentence
    assert "2 messages behind" in answer.sentence and answer.heartbeat == "normal"


@served()
async def test_lag_counts_what_is_not_acknowledged(calls: Calls) -> None:
    await calls.create_topic()
    consumer = await calls.subscribe()
    await publish(calls, b"a", b"b", b"c")
    question = ours_pb.GetSubscriptionLagRequest(topic=TOPIC, subscription="s")
    assert (await calls.ours.GetSubscriptionLag(question)).lag.lag_messages == 3
    stream = calls.receive(consumer)
    await calls.ack(await stream.read())
    lag = (await calls.ours.GetSubscriptionLag(question)).lag
    assert (lag.cursor, lag.head, lag.lag_messages, lag.has_lag) == (0, 3, 2, True)
    stream.cancel()


@served()
async def test_seek_delivers_from_another_place_on(calls: Calls) -> None:
    await calls.create_topic()
    consumer = await calls.subscribe()
    await publish(calls, b"a", b"b", b"c")
    stream = calls.receive(consumer)
    for _ in range(3):
        await calls.ack(await stream.read())
    place = {"topic": TOPIC, "subscription": "s"}
    seek = calls.ours.SeekSubscription
    assert (await seek(ours_pb.SeekSubscriptionRequest(**place, offset=1))).offset == 1
    assert (await stream.read()).payload == b"b"
    earliest = ours_pb.SeekSubscriptionRequest.Earliest()
    assert (await seek(ours_pb.SeekSubscriptionRequest(**place, earliest=earliest))).offset == 0
    latest = ours_pb.SeekSubscriptionRequest.Latest()
    assert (await seek(ours_pb.SeekSubscriptionRequest(**place, latest=latest))).offset == 3
    assert (await seek(ours_pb.SeekSubscriptionRequest(**place, time_us=1))).offset == 3  # all were sent at 0
    code, sentence = await refused(seek(ours_pb.SeekSubscriptionRequest(**place, offset=4)))
    assert code is StatusCode.OUT_OF_RANGE and "up to 3" in sentence
    assert (await refused(seek(ours_pb.SeekSubscriptionRequest(**place)))).code is StatusCode.INVALID_ARGUMENT
    stream.cancel()


@served()
async def test_peek_shows_messages_and_leaves_no_trace(calls: Calls) -> None:
    await publish(calls, b"first", b"second", b"third")
    newest = await calls.ours.PeekTopic(ours_pb.PeekTopicRequest(topic=TOPIC))
    assert [(message.offset, message.payload) for message in newest.messages] == [(2, b"third")]
    cut = await calls.ours.PeekTopic(ours_pb.PeekTopicRequest(topic=TOPIC, offset=0, count=2, payload_max_bytes=3))
    assert [message.payload for message in cut.messages] == [b"fir", b"sec"]
    assert cut.messages[0].payload_size_bytes == 5 and cut.messages[0].append_time_us > 0
    assert (cut.first_offset, cut.head) == (0, 3)
    beyond = calls.ours.PeekTopic(ours_pb.PeekTopicRequest(topic=TOPIC, offset=9))
    assert (await refused(beyond)).code is StatusCode.OUT_OF_RANGE


@served()
async def test_a_peek_at_large_messages_fits_one_answer(calls: Calls) -> None:
    await publish(calls, *[bytes(2 << 20)] * 3)
    answer = await calls.ours.PeekTopic(ours_pb.PeekTopicRequest(topic=TOPIC, offset=0, count=3))
    assert [message.offset for message in answer.messages] == [0]


@served()
async def test_a_heartbeat_is_set_by_name_or_number_and_anything_else_is_refused_with_the_range(calls: Calls) -> None:
    await calls.create_topic()
    await calls.subscribe()

    async def set_to(text: str) -> str:
        request = ours_pb.SetHeartbeatRequest(topic=TOPIC, subscription="s", heartbeat=text)
        return str((await calls.ours.SetHeartbeat(request)).heartbeat)

    for text in ("high_priority", "off", "observe", "250ms", "debug"):
        assert await set_to(text) == text
    assert await set_to("") == "normal"
    of_all = ours_pb.SetHeartbeatRequest(topic=TOPIC, heartbeat="high_priority")
    assert (await calls.ours.SetHeartbeat(of_all)).heartbeat == "high_priority"
    assert await set_to("") == "high_priority", "the topic's"
    assert (await calls.ours.SetHeartbeat(ours_pb.SetHeartbeatRequest(topic=TOPIC))).heartbeat == "normal"
    for text in ("49ms", "1001", "often"):
        code, sentence = await refused(set_to(text))
        assert code is StatusCode.INVALID_ARGUMENT and "50ms" in sentence and "1000ms" in sentence


@served()
async def test_the_place_of_what_does_not_exist_is_not_found_and_of_what_keeps_nothing_refused(calls: Calls) -> None:
    question = ours_pb.ExplainSubscriptionRequest(topic=TOPIC, subscription="s")
    assert (await refused(calls.ours.ExplainSubscription(question))).code is StatusCode.NOT_FOUND
    await calls.create_topic(reliable=False)
    assert (await refused(calls.ours.ExplainSubscription(question))).code is StatusCode.FAILED_PRECONDITION
    await calls.topics.DeleteTopic(pb.TopicRequest(name=TOPIC))
    await calls.create_topic()
    assert (await refused(calls.ours.ExplainSubscription(question))).code is StatusCode.NOT_FOUND
    assert not (await calls.ours.MovePhases(ours_pb.MovePhasesRequest(topic=TOPIC))).moves


# --- servers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("server", ["client_addr", "admin_addr", "metrics_addr"])
def test_a_port_that_is_taken_is_a_clear_error(server: str) -> None:
    async def second_broker() -> None:
        async with serving() as first, serving() as second:
            taken = getattr(first.servers, server)
            free = BrokerConfig(client_addr=ANYWHERE, admin_addr=ANYWHERE, metrics_addr=ANYWHERE)
            second.broker.config = replace(second.broker.config, broker=replace(free, **{server: taken}))
            with pytest.raises(ConfigError, match="the port is taken") as caught:
                await BrokerServers.open(second.broker)
            assert caught.value.value == taken

    run(second_broker())


@served()
async def test_a_deleted_topic_may_come_again_and_is_empty(calls: Calls) -> None:
    await publish(calls, b"old")
    await calls.topics.DeleteTopic(pb.TopicRequest(name=TOPIC))
    await calls.create_topic()
    topic = calls.broker.topics.get(TopicName(TOPIC))
    assert topic is not None and not topic.subscriptions


def test_of_ports_that_are_taken_the_clients_one_is_named_first() -> None:
    async def inside() -> None:
        with socket.socket() as metrics, socket.socket() as client:
            for each in (metrics, client):
                each.bind(("127.0.0.1", 0))
                each.listen()
            taken = [f"127.0.0.1:{each.getsockname()[1]}" for each in (metrics, client)]
            both = BrokerConfig(metrics_addr=taken[0], client_addr=taken[1])
            with pytest.raises(ConfigError, match=f"--broker-addr = '{taken[1]}'"):
                await open_metrics(MetricsServer(Telemetry()), both)
            with pytest.raises(ConfigError, match=f"--prom-exporter = '{taken[0]}'"):
                await open_metrics(MetricsServer(Telemetry()), replace(both, client_addr="127.0.0.1:0"))

    run(inside())
