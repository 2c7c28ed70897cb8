from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.dispatch.delivery import (
    TIMED_OUT,
    BackoffStrategy,
    FailurePolicy,
    PoisonPolicy,
    RetryAt,
    Tries,
    dead_letter_attributes,
    judge,
    retry_delay_seconds,
)
from pydanube.errors import ConfigError


def test_the_defaults_are_those_of_the_reference() -> None:
    policy = FailurePolicy()
    assert (policy.max_redelivery_count, policy.ack_timeout_ms) == (5, 30_000)
    assert (policy.base_redelivery_delay_ms, policy.max_redelivery_delay_ms) == (1_000, 60_000)
    assert (policy.backoff_strategy, policy.poison_policy) == (BackoffStrategy.EXPONENTIAL, PoisonPolicy.BLOCK)


def test_delays_double_up_to_the_maximum() -> None:
    policy = FailurePolicy()
    assert [retry_delay_seconds(policy, n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, 60, 60]
    fixed = FailurePolicy(backoff_strategy=BackoffStrategy.FIXED)
    assert [retry_delay_seconds(fixed, n) for n in range(1, 4)] == [1, 1, 1]


def test_a_nack_may_ask_for_more_but_not_for_more_than_the_maximum() -> None:
    policy = FailurePolicy()
    assert retry_delay_seconds(policy, 1, 5.0) == 5.0
    assert retry_delay_seconds(policy, 4, 5.0) == 8.0
    assert retry_delay_seconds(policy, 1, 999.0) == 60.0


def test_the_first_delivery_and_five_redeliveries_fail_before_a_message_is_poison() -> None:
    policy = FailurePolicy()
    verdicts = [judge(policy, Tries(n, n), now=100.0) for n in range(1, 7)]
    assert verdicts == [*(RetryAt(100.0 + delay) for delay in (1, 2, 4, 8, 16)), PoisonPolicy.BLOCK]


@given(st.integers(1, 10_000), st.floats(0, 1e6))
def test_a_delay_is_always_within_its_bounds(failures: int, asked: float) -> None:
    assert 1.0 <= retry_delay_seconds(FailurePolicy(), failures, asked) <= 60.0


def test_a_reason_is_kept_when_a_later_delivery_only_times_out() -> None:
    assert Tries(1, 0).failed("bad json").failed(TIMED_OUT).reason == "bad json"
    assert Tries(1, 0).failed(TIMED_OUT).reason == TIMED_OUT
    assert len(Tries(1, 0).failed("x" * 5000).reason) == 1024


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"max_redelivery_count": -1}, "max_redelivery_count"),
        ({"max_redelivery_count": True}, "max_redelivery_count"),
        ({"ack_timeout_ms": 10**12}, "ack_timeout_ms"),
        ({"base_redelivery_delay_ms": "1s"}, "base_redelivery_delay_ms"),
        ({"base_redelivery_delay_ms": 5000, "max_redelivery_delay_ms": 100}, "base_redelivery_delay_ms"),
        ({"backoff_strategy": "Linear"}, "backoff_strategy"),
        ({"poison_policy": "Explode"}, "poison_policy"),
        ({"poison_policy": "DeadLetter"}, "dead_letter_topic"),
        ({"poison_policy": "DeadLetter", "dead_letter_topic": "  "}, "dead_letter_topic"),
        ({"dead_letter_topic": "no slash"}, "dead_letter_topic"),
    ],
)
def test_absurd_policies_are_refused_by_name(values: dict[str, object], key: str) -> None:
    with pytest.raises(ConfigError, match=f"failure_policy.{key}"):
        FailurePolicy.from_json(values)


def test_policies_survive_storage_and_ignore_newer_fields() -> None:
    policy = FailurePolicy(poison_policy=PoisonPolicy.DEAD_LETTER, dead_letter_topic="/default/dead", ack_timeout_ms=0)
    assert FailurePolicy.from_json(policy.to_json() | {"newer": 1}) == policy
    assert policy.to_json()["poison_policy"] == "DeadLetter"
    assert policy.ack_timeout_seconds is None
    assert FailurePolicy.from_json({}) == FailurePolicy()


def test_a_dead_letter_says_where_it_came_from_and_keeps_its_attributes() -> None:
    origin = dead_letter_attributes(
        {"trace": "7"},
        topic="/default/orders",
        subscription="s",
        offset=42,
        producer_id=9,
        broker_addr="http://127.0.0.1:6650",
        tries=Tries(6, 6, "bad json"),
    )
    assert origin == {
        "trace": "7",
        "x-original-topic": "/default/orders",
        "x-original-subscription": "s",
        "x-original-topic-offset": "42",
        "x-original-producer-id": "9",
        "x-original-broker-addr": "http://127.0.0.1:6650",
        "x-poison-policy": "dead_letter",
        "x-delivery-attempt": "6",
        "x-failure-reason": "bad json",
    }
