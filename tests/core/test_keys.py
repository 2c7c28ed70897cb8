from __future__ import annotations

import inspect

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.core import keys
from pydanube.core.names import BrokerId, ConsumerId, NamespaceName, SubscriptionName, TopicName

T = TopicName("/default/reliable_topic")
S = SubscriptionName("subs_reliable")
BROKER = BrokerId(10285063371164059634)


def test_keys_are_those_of_the_seeds() -> None:
    assert keys.delivery(T) == "/topics/default/reliable_topic/delivery"
    assert keys.cursor(T, S) == "/topics/default/reliable_topic/subscriptions/subs_reliable/cursor"
    assert keys.storage_object(T, 22) == "/storage/topics/default/reliable_topic/objects/00000000000000000022"
    assert keys.seal(T) == "/storage/topics/default/reliable_topic/state"
    assert keys.unassigned(T) == "/cluster/unassigned/default/reliable_topic"
    assert keys.assignment(BROKER, T) == "/cluster/brokers/10285063371164059634/default/reliable_topic"
    assert keys.broker_state(BROKER) == "/cluster/brokers/10285063371164059634/state"
    assert keys.registration(BROKER) == "/cluster/register/10285063371164059634"
    assert keys.namespace_topic(T) == "/namespaces/default/topics/default/reliable_topic"
    assert keys.LEADER == "/cluster/leader"


names = st.from_regex(r"\A[a-z0-9_-]{1,4}(\.[a-z0-9_-]{1,3}){0,2}\Z")
topics = st.builds(TopicName.of, names, names)
subscriptions = st.sampled_from(["s", "cursor", "a b", "subscriptions", "owner", "a.b", "..."]).map(SubscriptionName)
brokers = st.integers(1, 2**63 - 1).map(BrokerId)


@given(topics, subscriptions, brokers, st.integers(0, 2**63))
def test_every_inverse_undoes_its_builder(
    topic: TopicName, subscription: SubscriptionName, broker: BrokerId, start: int
) -> None:
    assert keys.broker_of_registration(keys.registration(broker)) == broker
    assert keys.broker_of_state(keys.broker_state(broker)) == broker
    assert keys.broker_of_load(keys.load(broker)) == broker
    assert keys.broker_of_quiet_load(keys.quiet_load(broker)) == broker
    assert keys.broker_of_load(keys.quiet_load(broker)) is None is keys.broker_of_quiet_load(keys.load(broker))
    assert keys.broker_of_lost(keys.lost(broker)) == broker
    assert keys.broker_of_seen(keys.seen(broker)) == broker
    assert keys.time_of_event(keys.event(start, broker)) == start
    assert keys.time_of_rebalancing(keys.rebalancing(start)) == start
    assert keys.assignment_of(keys.assignment(broker, topic)) == (broker, topic)
    assert keys.topic_of_unassigned(keys.unassigned(topic)) == topic
    assert keys.topic_of_namespace(keys.namespace_topic(topic)) == topic
    assert keys.base_of_partitioned(keys.partitioned(topic)) == topic
    assert (
        keys.topic_of_namespace(keys.partitioned(topic))
        is None
        is keys.base_of_partitioned(keys.namespace_topic(topic))
    )
    assert keys.namespace_of_policy(keys.namespace_policy(topic.namespace)) == topic.namespace
    assert keys.topic_of(keys.topic(topic)) == topic
    assert keys.subscription_of(keys.subscription(topic, subscription)) == (topic, subscription)
    assert keys.subscription_of_cursor(keys.cursor(topic, subscription)) == (topic, subscription)
    consumer = ConsumerId(start)
    assert keys.consumer_of(keys.consumer(topic, subscription, consumer)) == (topic, subscription, consumer)
    assert keys.topic_of_owner(keys.owner(topic)) == topic
    for build in (keys.storage_object, keys.orphan, keys.void):
        assert keys.start_of(build(topic, start)) == start


@given(topics, subscriptions, brokers)
def test_an_inverse_knows_its_own_kind_only(topic: TopicName, subscription: SubscriptionName, broker: BrokerId) -> None:
    assert keys.assignment_of(keys.broker_state(broker)) is None
    assert keys.broker_of_state(keys.assignment(broker, topic)) is None
    assert keys.topic_of(keys.delivery(topic)) is None
    assert keys.subscription_of(keys.cursor(topic, subscription)) is None
    assert keys.start_of(keys.owner(topic)) is None
    assert keys.topic_of_namespace(keys.namespace_policy(topic.namespace)) is None


@pytest.mark.parametrize(
    "key",
    ["", "/", "/cluster/register/x", "/cluster/brokers/0/a/b", "/cluster/unassigned/a/b..c", "/topics/a b/c",
     "/topics//", "/namespaces/a b/policy", "/storage/topics/a/b/objects/12", "/topics/a/b/subscriptions/"],
)  # fmt: skip
def test_keys_that_no_builder_makes_are_nobodys(key: str) -> None:
    inverses = [f for name, f in vars(keys).items() if inspect.isfunction(f) and "_of" in name]
    assert len(inverses) > 10
    assert all(inverse(key) is None for inverse in inverses)


def test_a_prefix_never_finds_a_longer_name() -> None:
    foo, foobar = TopicName("/default/foo"), TopicName("/default/foobar")
    assert not keys.delivery(foobar).startswith(keys.below_topic(foo))
    assert not keys.owner(foobar).startswith(keys.below_storage(foo))
    assert not keys.cursor(foo, SubscriptionName("ab")).startswith(keys.below_subscription(foo, SubscriptionName("a")))
    other = TopicName("/default2/foo")
    assert not keys.namespace_topic(other).startswith(keys.namespace_topics(NamespaceName("default")))
    assert not keys.assignment(BrokerId(12), foo).startswith(keys.assignments(BrokerId(1)))


def test_objects_sort_by_offset() -> None:
    found = [keys.storage_object(T, start) for start in (0, 9, 10, 99, 10**12, 2**63)]
    assert found == sorted(found)
