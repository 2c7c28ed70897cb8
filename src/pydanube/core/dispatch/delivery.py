"""What a failed delivery becomes: retry later, dead letter, block, or drop.

    deliveries fail by    nack (with an optional delay and reason) or ack timeout
    failure 1 … N         retry; the n-th failure waits base * 2**(n-1) (Exponential) or base (Fixed),
                          at least the nack's delay, at most max_redelivery_delay_ms
    failure N + 1         poison: N = max_redelivery_count, so N + 1 deliveries in all

A delivery that ends because the consumer went away is no failure: the message is delivered again immediately
and nothing is counted against it. Otherwise six restarts of a consumer would drop messages that no handler ever saw.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Self, TypeAlias

from pydanube.core.names import TopicName
from pydanube.errors import ConfigError, InvalidName

DELAY_MAX_MS: Final = 7 * 24 * 3600 * 1000
REDELIVERY_COUNT_MAX: Final = 10_000
REASON_SIZE_MAX: Final = 1024  # characters of a nack's reason that are kept
COPY_RETRY_SECONDS_MIN: Final = 1.0
TIMED_OUT: Final = "ack timeout"


class BackoffStrategy(enum.Enum):
    """Values are the stored names."""

    FIXED = "Fixed"
    EXPONENTIAL = "Exponential"


class PoisonPolicy(enum.Enum):
    """What happens to a message that failed too often. Values are the stored names."""

    DEAD_LETTER = "DeadLetter"  # publish it elsewhere, then count it as acknowledged
    BLOCK = "Block"  # deliver nothing more until an operator decides; Key-Shared: nothing more of that key
    DROP = "Drop"  # count it as acknowledged


@dataclass(frozen=True, slots=True, kw_only=True)
class FailurePolicy:
    """Per subscription. `ack_timeout_ms` 0 means that deliveries never time out."""

    max_redelivery_count: int = 5
    ack_timeout_ms: int = 30_000
    base_redelivery_delay_ms: int = 1_000
    max_redelivery_delay_ms: int = 60_000
    backoff_strategy: BackoffStrategy = BackoffStrategy.EXPONENTIAL
    poison_policy: PoisonPolicy = PoisonPolicy.BLOCK
    dead_letter_topic: str | None = None

    def __post_init__(self) -> None:
        _check("max_redelivery_count", self.max_redelivery_count, REDELIVERY_COUNT_MAX)
        for name in ("ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms"):
            _check(name, getattr(self, name), DELAY_MAX_MS)
        if self.base_redelivery_delay_ms > self.max_redelivery_delay_ms:
            raise ConfigError(
                "failure_policy.base_redelivery_delay_ms",
                self.base_redelivery_delay_ms,
                f"at most max_redelivery_delay_ms, which is {self.max_redelivery_delay_ms}",
            )
        if self.poison_policy is PoisonPolicy.DEAD_LETTER or self.dead_letter_topic:
            try:
                TopicName(self.dead_letter_topic or "")
            except InvalidName as error:
                raise ConfigError(
                    "failure_policy.dead_letter_topic",
                    self.dead_letter_topic,
                    "the poison policy DeadLetter needs a topic, /namespace_name/topic_name",
                ) from error

    @property
    def ack_timeout_seconds(self) -> float | None:
        return self.ack_timeout_ms / 1000 or None

    @classmethod
    def from_json(cls, stored: Mapping[str, object]) -> Self:
        """The stored form; missing fields have their defaults, fields of newer versions are ignored."""
        values = {name: stored[name] for name in cls.__slots__ if stored.get(name) is not None}
        for name, kind in (("backoff_strategy", BackoffStrategy), ("poison_policy", PoisonPolicy)):
            if name in values:
                values[name] = _member(kind, name, values[name])
        return cls(**values)  # type: ignore[arg-type]

    def to_json(self) -> dict[str, object]:
        return {
            "max_redelivery_count": self.max_redelivery_count,
            "ack_timeout_ms": self.ack_timeout_ms,
            "base_redelivery_delay_ms": self.base_redelivery_delay_ms,
            "max_redelivery_delay_ms": self.max_redelivery_delay_ms,
            "backoff_strategy": self.backoff_strategy.value,
            "dead_letter_topic": self.dead_letter_topic,
            "poison_policy": self.poison_policy.value,
        }


def _check(name: str, value: object, value_max: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= value_max:
        raise ConfigError(f"failure_policy.{name}", value, f"a whole number from 0 to {value_max}")


def _member(kind: type[enum.Enum], name: str, value: object) -> enum.Enum:
    for member in kind:
        if value in (member, member.value):
            return member
    allowed = ", ".join(str(member.value) for member in kind)
    raise ConfigError(f"failure_policy.{name}", value, f"one of {allowed}")


# --- deciding -------------------------------------------------------------------------------------------


class Tries(NamedTuple):
    """How often a message was delivered, how often that failed, and the last reason that was given."""

    deliveries: int = 0
    failures: int = 0
    reason: str = ""

    def delivered(self) -> Tries:
        return Tries(self.deliveries + 1, self.failures, self.reason)

    def undelivered(self) -> Tries:
        """The last delivery never left the broker."""
        return Tries(self.deliveries - 1, self.failures, self.reason)

    def failed(self, reason: str) -> Tries:
        kept = self.reason if self.reason and reason in ("", TIMED_OUT) else reason
        return Tries(self.deliveries, self.failures + 1, kept[:REASON_SIZE_MAX])


UNTRIED: Final = Tries()


@dataclass(frozen=True, slots=True)
class RetryAt:
    """Deliver again, at `time` or later."""

    time: float


Verdict: TypeAlias = RetryAt | PoisonPolicy


def retry_delay_seconds(policy: FailurePolicy, failures: int, asked_seconds: float = 0.0) -> float:
    """How long the message waits after its n-th failure; `asked_seconds` is the nack's own delay."""
    delay_ms = policy.base_redelivery_delay_ms
    if policy.backoff_strategy is BackoffStrategy.EXPONENTIAL:
        delay_ms <<= min(max(failures - 1, 0), 64)  # 64 doublings exceed every allowed maximum
    return min(max(delay_ms / 1000, asked_seconds), policy.max_redelivery_delay_ms / 1000)


def copy_delay_seconds(policy: FailurePolicy, failures: int) -> float:
    """How long a dead letter waits after its topic refused it: never so short that the broker does nothing else."""
    return max(retry_delay_seconds(policy, failures), COPY_RETRY_SECONDS_MIN)


def judge(policy: FailurePolicy, tries: Tries, now: float, asked_seconds: float = 0.0) -> Verdict:
    """What becomes of a message whose last delivery failed (already counted in `tries`)."""
    if tries.failures > policy.max_redelivery_count:
        return policy.poison_policy
    return RetryAt(now + retry_delay_seconds(policy, tries.failures, asked_seconds))


def dead_letter_attributes(
    attributes: Mapping[str, str],
    *,
    topic: str,
    subscription: str,
    offset: int,
    producer_id: int,
    broker_addr: str,
    tries: Tries,
) -> dict[str, str]:
    """The attributes of the copy in the dead-letter topic: the message's own, and where it came from."""
    origin = {
        "x-original-topic": topic,
        "x-original-subscription": subscription,
        "x-original-topic-offset": str(offset),
        "x-original-producer-id": str(producer_id),
        "x-original-broker-addr": broker_addr,
        "x-poison-policy": "dead_letter",
        "x-delivery-attempt": str(tries.deliveries),
    }
    reason = {"x-failure-reason": tries.reason} if tries.reason else {}
    return {**attributes, **origin, **reason}
