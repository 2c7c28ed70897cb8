"""Limits of a namespace change while its topics are open, are kept, and reach every broker."""

from __future__ import annotations

import pytest
from grpc import StatusCode

from pydanube.core.names import NamespaceName, TopicName
from pydanube.core.policies import TopicPolicy
from pydanube.errors import LimitReached, MessageTooLarge, RateLimited
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.pydanube import admin_pb2 as pb
from tests.harness.brokers import (
    BrokerFixture,
    consume,
    make_volatile,
    message,
    numbers,
    one_topic,
    publish,
    settle,
    simulated,
)
from tests.harness.server_cluster import ServerCluster, clustered
from tests.harness.servers import TOPIC, Calls, refused, served

DEFAULT = NamespaceName("default")


@simulated
async def test_a_topic_that_is_open_has_its_new_limits_at_once() -> None:
    broker, topic = await one_topic(BrokerFixture())
    fanout = await make_volatile(broker, "/default/news")
    producer = await topic.add_producer("producer")
    done = await broker.namespace_limits.set(
        DEFAULT, {"max_publish_rate": 2, "max_message_size": 9, "max_producers_per_topic": 1}
    )
    assert done.topics == 2 and done.set_here == ("max_producers_per_topic", "max_publish_rate", "max_message_size")
    with pytest.raises(MessageTooLarge):
        await topic.publish(producer, message("x" * 10))
    for _ in range(2):
        await topic.publish(producer, message("x"))
    with pytest.raises(RateLimited):
        await topic.publish(producer, message("x"))
    with pytest.raises(LimitReached):
        await topic.add_producer("second")
    await fanout.add_producer("first")
    with pytest.raises(LimitReached):
        await fanout.add_producer("second")
    await broker.namespace_limits.set(DEFAULT, {}, ["max_publish_rate", "max_producers_per_topic"])
    await topic.publish(producer, message("x"))
    await topic.add_producer("second")


@simulated
async def test_a_dispatch_rate_slows_a_subscription_that_is_there_and_lets_it_go_again() -> None:
    broker, topic = await one_topic(BrokerFixture(unacked_max=1000))
    stream = await consume(topic, acks=True)
    await broker.namespace_limits.set(DEFAULT, {"max_subscription_dispatch_rate": 10})
    await publish(topic, *numbers(100))
    await settle()
    assert 10 <= len(stream.texts) <= 11 and "rate limited" in stream.subscription.explain()
    await broker.namespace_limits.set(DEFAULT, {"max_subscription_dispatch_rate": 0})
    await settle()
    assert stream.texts == numbers(100)


@simulated
async def test_limits_that_were_set_are_kept_over_a_restart_and_beside_the_configuration() -> None:
    host = BrokerFixture(policies=TopicPolicy(max_producers_per_topic=5))
    broker, topic = await one_topic(host)
    await broker.namespace_limits.set(DEFAULT, {"max_publish_rate": 2})
    host.kill()
    broker = await host.boot()
    policy = (await broker.topics.require(topic.name)).policy
    assert policy == TopicPolicy(max_producers_per_topic=5, max_publish_rate=2)


@simulated
async def test_a_topics_own_limits_win_over_those_of_its_namespace() -> None:
    broker, topic = await one_topic(BrokerFixture())
    topic.own_policy = {"max_producers_per_topic": 3}
    await broker.namespace_limits.set(DEFAULT, {"max_producers_per_topic": 1, "max_publish_rate": 7})
    assert (topic.policy.max_producers_per_topic, topic.policy.max_publish_rate) == (3, 7)


@served()
async def test_a_namespace_that_was_made_later_gets_limits_and_the_answer_says_what_changed(calls: Calls) -> None:
    await calls.namespaces.CreateNamespace(admin_pb.NamespaceRequest(name="mine"))
    request = pb.SetNamespaceLimitsRequest(namespace="mine", limits=pb.NamespaceLimits(max_publish_rate=9))
    answer = await calls.ours.SetNamespaceLimits(request)
    assert [(each.name, each.before, each.after) for each in answer.changes] == [("max_publish_rate", "0", "9")]
    assert list(answer.set_here) == ["max_publish_rate"] and answer.limits.max_publish_rate == 9
    assert list((await calls.ours.SetNamespaceLimits(request)).changes) == []


@served()
async def test_limits_without_a_limit_or_a_namespace_are_refused(calls: Calls) -> None:
    nothing = pb.SetNamespaceLimitsRequest(namespace="default")
    assert (await refused(calls.ours.SetNamespaceLimits(nothing))).code is StatusCode.INVALID_ARGUMENT
    limits = pb.NamespaceLimits(max_publish_rate=9)
    unknown = pb.SetNamespaceLimitsRequest(namespace="nobody", limits=limits)
    assert (await refused(calls.ours.SetNamespaceLimits(unknown))).code is StatusCode.NOT_FOUND
    strange = pb.SetNamespaceLimitsRequest(namespace="default", reset=["max_patience"])
    code, sentence = await refused(calls.ours.SetNamespaceLimits(strange))
    assert code is StatusCode.INVALID_ARGUMENT and "max_publish_rate" in sentence


@clustered(2)
async def test_limits_that_one_broker_takes_hold_on_the_topics_of_another(cluster: ServerCluster) -> None:
    await cluster.create(TOPIC, on=1)
    limits = pb.NamespaceLimits(max_publish_rate=3)
    answer = await cluster.calls(2).ours.SetNamespaceLimits(
        pb.SetNamespaceLimitsRequest(namespace="default", limits=limits)
    )
    assert answer.topics == 0
    topic = cluster.node(1).broker.topics.get(TopicName(TOPIC))
    assert topic is not None
    await cluster.until(lambda: topic.policy.max_publish_rate == 3)
