"""Protobuf messages become our values and return unchanged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.dispatch.delivery import BackoffStrategy, FailurePolicy, PoisonPolicy
from pydanube.core.dispatch.lag import Heartbeat, Standing, lag_info
from pydanube.errors import ConfigError, InvalidBatch
from pydanube.formats.batch import PUBLISH_TIME_MAX, Envelope, rows_of
from pydanube.wire import convert
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.danube import DanubeApi_pb2 as api_pb

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]))
MESSAGES = st.builds(
    api_pb.StreamMessage,
    request_id=U64,
    payload=st.binary(),
    publish_time=st.integers(0, convert.PUBLISH_TIME_MS_MAX),
    producer_name=TEXT,
    attributes=st.dictionaries(TEXT, TEXT, max_size=3),
    schema_id=st.none() | U64,
    schema_version=st.none() | U32,
    routing_key=st.none() | TEXT,
)


@given(MESSAGES)
def test_a_message_comes_out_of_the_log_as_it_went_in(sent: api_pb.StreamMessage) -> None:
    rows = rows_of([convert.envelope_of(sent)])  # every value fits its column
    assert rows.num_rows == 1
    received = convert.message_of(
        convert.envelope_of(sent), topic="/default/a", offset=7, producer_id=9, broker_addr="http://b:6650"
    )
    id_ = api_pb.MsgID(producer_id=9, topic_name="/default/a", broker_addr="http://b:6650", topic_offset=7)
    sent.msg_id.CopyFrom(id_)
    assert received == sent


def test_an_absent_field_is_not_an_empty_one() -> None:
    absent = convert.envelope_of(api_pb.StreamMessage())
    assert (absent.routing_key, absent.schema_id, absent.schema_version) == (None, None, None)
    empty = convert.envelope_of(api_pb.StreamMessage(routing_key="", schema_id=0, schema_version=0))
    assert (empty.routing_key, empty.schema_id, empty.schema_version) == ("", 0, 0)


def test_a_publish_time_that_no_calendar_has_is_refused_with_its_unit() -> None:
    assert convert.PUBLISH_TIME_MS_MAX == PUBLISH_TIME_MAX // 1000
    with pytest.raises(InvalidBatch, match="counts milliseconds"):
        convert.envelope_of(api_pb.StreamMessage(publish_time=convert.PUBLISH_TIME_MS_MAX + 1))


def test_a_native_publish_time_is_rounded_down_and_never_negative() -> None:
    def shown(publish_time: int) -> int:
        row = Envelope(b"", publish_time)
        return convert.message_of(row, topic="", offset=0, producer_id=1, broker_addr="").publish_time

    assert [shown(us) for us in (1999, 2000, -1, -5_000_000)] == [1, 2, 0, 0]


@given(U64, U32)
def test_bits_survive_the_sign(wide: int, narrow: int) -> None:
    assert -(2**63) <= convert.signed_64(wide) < 2**63
    assert -(2**31) <= convert.signed_32(narrow) < 2**31
    assert convert.unsigned_64(convert.signed_64(wide)) == wide
    assert convert.unsigned_32(convert.signed_32(narrow)) == narrow


@pytest.mark.parametrize("backoff", BackoffStrategy)
@pytest.mark.parametrize("poison", PoisonPolicy)
def test_a_failure_policy_comes_back_as_it_went(backoff: BackoffStrategy, poison: PoisonPolicy) -> None:
    topic = "/default/dead" if poison is PoisonPolicy.DEAD_LETTER else None
    policy = FailurePolicy(backoff_strategy=backoff, poison_policy=poison, dead_letter_topic=topic)
    assert convert.failure_policy_of(convert.failure_policy_message(policy)) == policy


@pytest.mark.parametrize(
    ("message", "key"),
    [
        (admin_pb.SubscriptionFailurePolicy(), "dead_letter_topic"),
        (admin_pb.SubscriptionFailurePolicy(dead_letter_topic="  "), "dead_letter_topic"),
        (admin_pb.SubscriptionFailurePolicy(poison_policy=7), "poison_policy"),
        (admin_pb.SubscriptionFailurePolicy(poison_policy=1, backoff_strategy=-1), "backoff_strategy"),
        (admin_pb.SubscriptionFailurePolicy(poison_policy=1, ack_timeout_ms=2**64 - 1), "ack_timeout_ms"),
    ],
)
def test_an_absurd_failure_policy_is_refused_by_name(message: admin_pb.SubscriptionFailurePolicy, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        convert.failure_policy_of(message)
    assert caught.value.key == f"failure_policy.{key}"


def test_a_blank_dead_letter_topic_is_none() -> None:
    message = admin_pb.SubscriptionFailurePolicy(poison_policy=admin_pb.Drop, dead_letter_topic=" ")
    assert convert.failure_policy_of(message).dead_letter_topic is None


def test_an_explanation_has_the_sentence_and_the_numbers() -> None:
    standing = Standing(
        head=10, next_unacked=4, lag=6, undispatched=0, consumers=1, waiting=6, retry_at=12.5, has_capacity=True
    )
    shown = convert.explanation(standing, lag_info(4, 10, 6), Heartbeat(250), now=10.0)
    assert shown.sentence.startswith("waiting for retry: 6 messages")
    assert (shown.retry_in_ms, shown.waiting, shown.lag.cursor, shown.heartbeat) == (2500, 6, 3, "250ms")
    assert not shown.HasField("unacked_max") and not shown.HasField("blocked_offset")


def test_a_subscription_that_never_acknowledged_has_no_cursor() -> None:
    assert not convert.lag_message(lag_info(0, 3, 3)).HasField("cursor")
