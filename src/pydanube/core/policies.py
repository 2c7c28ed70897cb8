"""What is fixed or limited for a topic: its kind, and some numbers, 0 for "no limit".

A topic's own policy wins over its namespace's in every field that it has. One that the reference has written has all
limits, so it wins as a whole; one that only sets retention leaves the limits to the namespace. `0 = unlimited` is the
stored form; code asks `allows_*` and never compares with zero itself.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Final, Self

from pydanube.core.history.tiers import Retention
from pydanube.core.units import MIB
from pydanube.errors import ConfigError


class Delivery(enum.Enum):
    """How a topic keeps messages; fixed when it is created. Values are the stored names."""

    RELIABLE = "Reliable"
    NON_RELIABLE = "NonReliable"


class SubscriptionKind(enum.Enum):
    """Who gets what; fixed when the subscription is created. Values are the stored names, in the wire's order."""

    EXCLUSIVE = "Exclusive"
    SHARED = "Shared"
    FAILOVER = "Failover"
    KEY_SHARED = "KeyShared"


SUBSCRIPTION_TYPES: Final = tuple(SubscriptionKind)  # by the number that both protocols give them
# As people write them, in commands, in the client and on the pages.
TYPE_NAMES: Final = ("exclusive", "shared", "failover", "key_shared")


def type_name(text: str) -> str | None:
    """One of `TYPE_NAMES`, however it is spelled: `key-shared`, `KeyShared` and `fail-over` too. None: no type."""
    letters = text.lower().replace("-", "").replace("_", "")
    return next((name for name in TYPE_NAMES if name.replace("_", "") == letters), None)


U32_MAX: Final = (1 << 32) - 1
RETENTION_UNIT_BYTES: Final = MIB  # what `retention_mb` counts in


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicPolicy:
    """The fields' names are those of the configuration and of the stored JSON."""

    max_producers_per_topic: int = 0
    max_subscriptions_per_topic: int = 0
    max_consumers_per_topic: int = 0
    max_consumers_per_subscription: int = 0
    max_publish_rate: int = 0  # messages per second
    max_subscription_dispatch_rate: int = 0  # messages per second
    max_message_size: int = 10 * MIB  # bytes
    retention_minutes: int = 0  # history that is older goes; 0: never
    retention_mb: int = 0  # history beyond this size goes, oldest first; 0: never

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= U32_MAX:
                raise ConfigError(f"policies.{field.name}", value, f"a whole number from 0 (no limit) to {U32_MAX}")

    @classmethod
    def from_json(cls, stored: Mapping[str, object]) -> Self:
        """Fields of newer versions are ignored, missing ones have their defaults."""
        known = {field.name for field in fields(cls)}
        return cls(**{name: value for name, value in stored.items() if name in known})  # type: ignore[arg-type]

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def limits(self) -> dict[str, int]:
        """The reference's seven, without what is ours."""
        return {name: value for name, value in asdict(self).items() if name.startswith("max_")}

    @property
    def retention(self) -> Retention:
        """When history may be forgotten, in the terms of the cloud tier."""
        return Retention(
            seconds=self.retention_minutes * 60.0 or None, size_bytes=self.retention_mb * RETENTION_UNIT_BYTES or None
        )

    def allows_producer(self, present: int) -> bool:
        return _below(present, self.max_producers_per_topic)

    def allows_subscription(self, present: int) -> bool:
        """Asked when a subscription is created; joining one that exists is always allowed."""
        return _below(present, self.max_subscriptions_per_topic)

    def allows_consumer_on_topic(self, present: int) -> bool:
        return _below(present, self.max_consumers_per_topic)

    def allows_consumer_on_subscription(self, present: int) -> bool:
        return _below(present, self.max_consumers_per_subscription)

    def allows_message(self, size_bytes: int) -> bool:
        return self.max_message_size == 0 or size_bytes <= self.max_message_size


UNLIMITED: Final = TopicPolicy(max_message_size=0)  # standalone, and namespaces made by an administrator


def effective(topic: Mapping[str, object] | None, namespace: Mapping[str, object] | None) -> TopicPolicy:
    """The policy that applies, from what is stored: the topic's fields, else the namespace's, else no limits."""
    if topic is None and namespace is None:
        return UNLIMITED
    return TopicPolicy.from_json({**(namespace or {}), **(topic or {})})


RETENTION: Final = ("retention_minutes", "retention_mb")
RETENTION_SET: Final = "retention_set"  # next to a namespace's policy: an operator chose its retention
LIMITS: Final = tuple(UNLIMITED.limits())
LIMITS_SET: Final = "limits_set"  # next to a namespace's policy: the names of the limits that an operator chose


REMOVING: Final = "removing"  # next to a namespace's policy: it goes unless a topic is made in it first


def configured(policy: TopicPolicy, stored: Mapping[str, object] | None) -> dict[str, object]:
    """What to store for a namespace that the configuration names.

    The configuration's limits; but what an operator has set stays. A restart that brought back an older retention would
    remove history that was to be kept.
    """
    chosen = set(limits_set(stored))
    if stored is not None and stored.get(RETENTION_SET):
        chosen |= {*RETENTION, RETENTION_SET}
    if chosen & set(LIMITS):
        chosen.add(LIMITS_SET)
    return {**policy.to_json(), **{name: value for name, value in (stored or {}).items() if name in chosen}}


def limits_set(stored: Mapping[str, object] | None) -> tuple[str, ...]:
    """Which limits of a namespace an operator has set, in the order of the fields."""
    named = (stored or {}).get(LIMITS_SET)
    return tuple(name for name in LIMITS if name in named) if isinstance(named, list) else ()


def with_limits(
    stored: Mapping[str, object], given: Mapping[str, int], reset: Collection[str], policy: TopicPolicy
) -> dict[str, object]:
    """A namespace's policy after an operator set some limits and gave others back to `policy`, the configuration's.

    Raises ConfigError.
    """
    for name in reset:
        if name not in LIMITS:
            raise ConfigError("reset", name, f"one of {', '.join(LIMITS)}")
        if name in given:
            raise ConfigError(name, given[name], "either a value or reset, not both")
    values = {**stored, **{name: getattr(policy, name) for name in reset}, **given}
    TopicPolicy.from_json(values)  # raises for a value that is not allowed
    chosen = ({*limits_set(stored)} - set(reset)) | set(given)
    return {**values, LIMITS_SET: [name for name in LIMITS if name in chosen]}


def _below(present: int, limit: int) -> bool:
    return limit == 0 or present < limit
