from __future__ import annotations

import pytest

from pydanube.core.policies import UNLIMITED, TopicPolicy, configured, effective, limits_set, with_limits
from pydanube.core.units import MIB
from pydanube.errors import ConfigError


def test_zero_means_no_limit() -> None:
    assert UNLIMITED.allows_producer(10**6)
    assert UNLIMITED.allows_message(10**9)
    assert TopicPolicy().max_message_size == 10 * MIB


def test_a_limit_is_reached_when_so_many_are_present() -> None:
    policy = TopicPolicy(
        max_producers_per_topic=2,
        max_subscriptions_per_topic=1,
        max_consumers_per_topic=3,
        max_consumers_per_subscription=1,
        max_message_size=100,
    )
    assert policy.allows_producer(1) and not policy.allows_producer(2)
    assert policy.allows_subscription(0) and not policy.allows_subscription(1)
    assert policy.allows_consumer_on_topic(2) and not policy.allows_consumer_on_topic(3)
    assert policy.allows_consumer_on_subscription(0) and not policy.allows_consumer_on_subscription(1)
    assert policy.allows_message(100) and not policy.allows_message(101)


def test_the_topics_policy_wins_over_the_namespaces() -> None:
    mine, theirs = TopicPolicy(max_producers_per_topic=1), TopicPolicy(max_producers_per_topic=9)
    assert effective(mine.to_json(), theirs.to_json()) == mine
    assert effective(None, theirs.to_json()) == theirs
    assert effective(None, None) is UNLIMITED


def test_a_topic_that_only_sets_its_retention_has_the_limits_of_its_namespace() -> None:
    theirs = TopicPolicy(max_producers_per_topic=9, retention_minutes=60, retention_mb=5)
    mine = {"retention_minutes": 0, "retention_mb": 7}
    assert effective(mine, theirs.to_json()) == TopicPolicy(max_producers_per_topic=9, retention_mb=7)


def test_the_configuration_sets_limits_but_not_a_retention_that_an_operator_has_chosen() -> None:
    written = TopicPolicy(max_producers_per_topic=3, retention_minutes=60)
    assert configured(written, None) == written.to_json()
    untouched = TopicPolicy(max_producers_per_topic=1, retention_minutes=5).to_json()
    assert configured(written, untouched) == written.to_json()
    by_hand = {**TopicPolicy(max_producers_per_topic=1).to_json(), "retention_mb": 9, "retention_set": True}
    after = configured(written, by_hand)
    assert TopicPolicy.from_json(after) == TopicPolicy(max_producers_per_topic=3, retention_mb=9)
    assert configured(written, after) == after


def test_policies_survive_storage_and_ignore_newer_fields() -> None:
    policy = TopicPolicy(max_publish_rate=5)
    assert TopicPolicy.from_json(policy.to_json() | {"newer": 1}) == policy
    assert len(policy.to_json()) == 9


@pytest.mark.parametrize("value", [-1, 2**32, "many", 1.5, True, None])
def test_absurd_limits_are_refused_by_name(value: object) -> None:
    with pytest.raises(ConfigError, match=r"policies\.max_publish_rate"):
        TopicPolicy.from_json({"max_publish_rate": value})


def test_a_limit_that_an_operator_set_outlives_the_configuration_and_the_others_follow_it() -> None:
    stored = with_limits(UNLIMITED.to_json(), {"max_publish_rate": 50}, (), UNLIMITED)
    assert limits_set(stored) == ("max_publish_rate",)
    written = TopicPolicy(max_publish_rate=7, max_producers_per_topic=3)
    after = configured(written, stored)
    assert TopicPolicy.from_json(after) == TopicPolicy(max_publish_rate=50, max_producers_per_topic=3)
    assert configured(written, after) == after


def test_a_limit_that_is_reset_is_the_configurations_again() -> None:
    written = TopicPolicy(max_publish_rate=7)
    stored = with_limits(written.to_json(), {"max_publish_rate": 50, "max_message_size": 9}, (), written)
    after = with_limits(stored, {}, ["max_publish_rate"], written)
    assert TopicPolicy.from_json(after) == TopicPolicy(max_publish_rate=7, max_message_size=9)
    assert limits_set(after) == ("max_message_size",)


def test_limits_that_mean_nothing_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="retention_mb"):
        with_limits({}, {}, ["retention_mb"], UNLIMITED)
    with pytest.raises(ConfigError, match="not both"):
        with_limits({}, {"max_publish_rate": 1}, ["max_publish_rate"], UNLIMITED)
    with pytest.raises(ConfigError, match=r"policies\.max_publish_rate"):
        with_limits({}, {"max_publish_rate": 2**32}, (), UNLIMITED)
