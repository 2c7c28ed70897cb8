"""Protobuf messages to our values and back.

    on the wire                        inside
    publish_time u64, milliseconds     publish_time i64, microseconds
    request_id, schema_id u64          i64 with the same bits, as the log's columns have it
    schema_version u32                 i32 with the same bits
    optional string, absent            None

What comes from the wire is checked and raises a Refused; what goes out was checked when it came in.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, TypeVar

from pydanube.core.dispatch.delivery import BackoffStrategy, FailurePolicy, PoisonPolicy
from pydanube.core.dispatch.lag import Heartbeat, LagInfo, Standing, explain
from pydanube.errors import ConfigError, InvalidBatch
from pydanube.formats.envelope import Envelope
from pydanube.wire._pb.danube import DanubeAdmin_pb2 as admin_pb
from pydanube.wire._pb.danube import DanubeApi_pb2 as api_pb
from pydanube.wire._pb.pydanube import admin_pb2 as ours_pb

PUBLISH_TIME_MS_MAX: Final = 253_402_300_799_999  # the year 9999 ends
# Metadata of a ConsumerRequest, whose fields are the reference's: a Place of stream.proto, where it begins.
START_HEADER: Final = "x-danube-start-bin"
# Metadata of an order, in UTF-8: for whom a program such as the web admin gives it.
ASKED_BY_HEADER: Final = "x-danube-asked-by-bin"

Member = TypeVar("Member", bound=enum.Enum)
Number = TypeVar("Number", bound=int)


# --- messages ---------------------------------------------------------------------------------------


def envelope_of(message: api_pb.StreamMessage) -> Envelope:
    """What is kept of a published message. Its `msg_id` is the broker's business."""
    if message.publish_time > PUBLISH_TIME_MS_MAX:
        raise InvalidBatch(
            f"publish_time {message.publish_time} lies beyond the year 9999: it counts milliseconds since 1970"
        )
    return Envelope(
        payload=message.payload,
        publish_time=message.publish_time * 1000,
        routing_key=message.routing_key if message.HasField("routing_key") else None,
        producer_name=message.producer_name,
        attributes=dict(message.attributes),
        schema_id=signed_64(message.schema_id) if message.HasField("schema_id") else None,
        schema_version=signed_32(message.schema_version) if message.HasField("schema_version") else None,
        request_id=signed_64(message.request_id),
    )


def message_of(row: Envelope, *, topic: str, offset: int, producer_id: int, broker_addr: str) -> api_pb.StreamMessage:
    """The message as a consumer gets it. `topic` is the name it subscribed to: it routes acks by it."""
    return api_pb.StreamMessage(
        request_id=unsigned_64(row.request_id),
        msg_id=api_pb.MsgID(producer_id=producer_id, topic_name=topic, broker_addr=broker_addr, topic_offset=offset),
        payload=row.payload,
        publish_time=max(0, row.publish_time // 1000),  # a native producer's clock may stand before 1970
        producer_name=row.producer_name or "",
        attributes=row.attributes,
        schema_id=None if row.schema_id is None else unsigned_64(row.schema_id),
        schema_version=None if row.schema_version is None else unsigned_32(row.schema_version),
        routing_key=row.routing_key,
    )


def signed_64(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def unsigned_64(number: int) -> int:
    return number & 0xFFFF_FFFF_FFFF_FFFF


def signed_32(number: int) -> int:
    return number - (1 << 32) if number >> 31 else number


def unsigned_32(number: int) -> int:
    return number & 0xFFFF_FFFF


# --- failure policies -------------------------------------------------------------------------------

_BACKOFF: Final = {
    admin_pb.Fixed: BackoffStrategy.FIXED,
    admin_pb.Exponential: BackoffStrategy.EXPONENTIAL,
}
_POISON: Final = {
    admin_pb.DeadLetter: PoisonPolicy.DEAD_LETTER,
    admin_pb.Block: PoisonPolicy.BLOCK,
    admin_pb.Drop: PoisonPolicy.DROP,
}


def failure_policy_of(message: admin_pb.SubscriptionFailurePolicy) -> FailurePolicy:
    """Raises ConfigError. A message without any field is a policy too: no redelivery, dead letter."""
    return FailurePolicy(
        max_redelivery_count=message.max_redelivery_count,
        ack_timeout_ms=message.ack_timeout_ms,
        base_redelivery_delay_ms=message.base_redelivery_delay_ms,
        max_redelivery_delay_ms=message.max_redelivery_delay_ms,
        backoff_strategy=_member("backoff_strategy", _BACKOFF, message.backoff_strategy),
        poison_policy=_member("poison_policy", _POISON, message.poison_policy),
        dead_letter_topic=message.dead_letter_topic.strip() or None,
    )


def failure_policy_message(policy: FailurePolicy) -> admin_pb.SubscriptionFailurePolicy:
    return admin_pb.SubscriptionFailurePolicy(
        max_redelivery_count=policy.max_redelivery_count,
        ack_timeout_ms=policy.ack_timeout_ms,
        base_redelivery_delay_ms=policy.base_redelivery_delay_ms,
        max_redelivery_delay_ms=policy.max_redelivery_delay_ms,
        backoff_strategy=_number(_BACKOFF, policy.backoff_strategy),
        poison_policy=_number(_POISON, policy.poison_policy),
        dead_letter_topic=policy.dead_letter_topic,
    )


# proto3 enums are open: any number arrives.
def _member(field: str, members: Mapping[Number, Member], number: Number) -> Member:
    if number not in members:
        allowed = ", ".join(f"{known} ({member.value})" for known, member in members.items())
        raise ConfigError(f"failure_policy.{field}", number, f"one of {allowed}")
    return members[number]


def _number(members: Mapping[Number, Member], wanted: Member) -> Number:
    return next(number for number, member in members.items() if member is wanted)


# --- lag --------------------------------------------------------------------------------------------


def lag_message(lag: LagInfo) -> ours_pb.Lag:
    return ours_pb.Lag(cursor=lag.cursor, head=lag.head, lag_messages=lag.lag_messages, has_lag=lag.has_lag)


def explanation(
    standing: Standing, lag: LagInfo, heartbeat: Heartbeat, now: float
) -> ours_pb.ExplainSubscriptionResponse:
    """The sentence and the numbers behind it; `now` is `Clock.elapsed()`."""
    return ours_pb.ExplainSubscriptionResponse(
        sentence=explain(standing, now),
        lag=lag_message(lag),
        consumers=standing.consumers,
        unacked=standing.unacked,
        unacked_max=standing.unacked_max,
        undispatched=standing.undispatched,
        waiting=standing.waiting,
        retry_in_ms=_milliseconds_until(standing.retry_at, now),
        blocked_offset=standing.blocked_offset,
        blocked_key=standing.blocked_key,
        blocked_keys=standing.blocked_keys,
        dead_lettering=standing.dead_lettering,
        rate_limited_for_ms=_milliseconds_until(standing.rate_ready_at, now),
        first_offset=standing.first_offset,
        missing=standing.missing,
        heartbeat=str(heartbeat),
    )


def _milliseconds_until(time: float | None, now: float) -> int | None:
    return None if time is None else max(0, round((time - now) * 1000))
