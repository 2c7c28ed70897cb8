"""What one subscription, producer or consumer has with the partitions of a topic, as one row. Commands and pages agree.

    clicks-part-0  audit  lag 10 ┐
    clicks-part-1  audit  lag 20 ├─►  clicks  audit  lag 30, 3 partitions
    clicks-part-2  audit  lag  0 ┘

A sum of which a part is not known is absent: a partition is unanswered if its broker is silent, or if it has
none. What is known of the lag is `lag_at_least`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias, TypeVar

from pydanube.admin import values
from pydanube.core.names import TopicName

# From bad to good: a whole is as bad as its worst part.
COURSES: Final = ("falling_behind", "standing", "unknown", "catching_up", "keeping_up", "caught_up")
Partitioned: TypeAlias = values.SubscriptionState | values.ConnectionState

P = TypeVar("P", values.SubscriptionState, values.ConnectionState)


class SubscriptionGroup(NamedTuple):
    state: values.SubscriptionState
    lag_at_least: int
    parts: Sequence[values.SubscriptionState] = ()  # by number; none: its topic is not partitioned
    unanswered: int = 0  # partitions without an answer


class ConnectionGroup(NamedTuple):
    state: values.ConnectionState
    parts: Sequence[values.ConnectionState] = ()
    unanswered: int = 0


def partition_count(group: SubscriptionGroup | ConnectionGroup) -> str:
    """`3`, or `2 of 3` if the third is unanswered; empty if the topic is not partitioned."""
    known = len(group.parts)
    if not group.unanswered:
        return str(known) if known else ""
    return f"{known} of {known + group.unanswered}"


def subscription_groups(found: values.SubscriptionList) -> list[SubscriptionGroup]:
    """Furthest behind first; before them those of which a part is not known, which may be further behind."""
    silent = _partitions(found.unanswered)
    groups: dict[tuple[str, str], list[values.SubscriptionState]] = {}
    for each in found.subscriptions:
        groups.setdefault((base_of(each.topic), each.name), []).append(each)
    every = [
        _subscription(base, own, silent[base]) if own[0].topic != base else SubscriptionGroup(own[0], _lag(own))
        for (base, _), own in groups.items()
    ]
    return sorted(every, key=lambda group: (not group.unanswered, -group.lag_at_least, group.state.topic))


def connection_groups(found: values.ConnectionList) -> list[ConnectionGroup]:
    """In the order they came. Who has a single partition of several is listed with that partition."""
    silent = _partitions(found.unanswered)
    groups: dict[tuple[str, ...], list[values.ConnectionState]] = {}
    for each in found.connections:
        groups.setdefault((base_of(each.topic), each.kind, each.name, each.subscription, each.client), []).append(each)
    return [
        _connection(base, own, silent[base]) if len(own) > 1 else ConnectionGroup(own[0])
        for (base, *_), own in groups.items()
    ]


def base_of(topic: str) -> str:
    """The topic that it is a partition of; of another topic that topic itself."""
    name = TopicName(topic)
    return name.base if name.partition_number is not None else name


def one_of(words: Collection[str], several: str) -> str:
    """The one that all have, or `3 brokers`."""
    return next(iter(words)) if len(words) == 1 else f"{len(words)} {several}"


def _subscription(base: str, parts: Sequence[values.SubscriptionState], unanswered: int) -> SubscriptionGroup:
    """Lag added up, as late as the latest, as bad as the worst."""
    parts = _by_number(parts)
    first = parts[0]
    hopes = [part.catch_up_seconds for part in parts if part.HasField("catch_up_seconds")]
    is_hopeless = any(part.lag_messages and not part.HasField("catch_up_seconds") for part in parts)
    has_lag = all(part.HasField("lag_messages") for part in parts)
    ages = [part.lag_seconds for part in parts if part.HasField("lag_seconds")]
    state = values.SubscriptionState(
        topic=base,
        name=first.name,
        type=first.type,
        broker_id=_common_broker(parts),
        lag_messages=_lag(parts) if has_lag and not unanswered else None,
        lag_seconds=None if unanswered else max(ages, default=None),
        catch_up_seconds=None if is_hopeless or unanswered else max(hopes, default=None),
        course=min([part.course for part in parts] + ["unknown"] * bool(unanswered), key=_rank),
        consumers=max(part.consumers for part in parts),  # a consumer is connected to every partition
        unacked=sum(part.unacked for part in parts),
        waiting=sum(part.waiting for part in parts),
        is_blocked=any(part.is_blocked for part in parts),
        missing=sum(part.missing for part in parts),
    )
    return SubscriptionGroup(state, _lag(parts), parts, unanswered)


def _connection(base: str, parts: Sequence[values.ConnectionState], unanswered: int) -> ConnectionGroup:
    """From when it came first, what it does added up."""
    parts = _by_number(parts)
    first = parts[0]
    is_counted = not unanswered and all(part.HasField("unacked") for part in parts)
    is_measured = not unanswered and all(part.HasField("rate") for part in parts)
    state = values.ConnectionState(
        kind=first.kind,
        name=first.name,
        topic=base,
        subscription=first.subscription,
        # A connection to each broker: their ports differ.
        address=one_of({part.address.rpartition(":")[0] for part in parts}, "addresses"),
        client=first.client,
        protocol=first.protocol,
        since_us=min((part.since_us for part in parts if part.HasField("since_us")), default=None),
        unacked=sum(part.unacked for part in parts) if is_counted else None,
        rate=sum(part.rate for part in parts) if is_measured else None,
        broker_id=_common_broker(parts),
    )
    return ConnectionGroup(state, parts, unanswered)


def _partitions(topics: Iterable[str]) -> Counter[str]:
    """How many partitions of each topic are among them."""
    return Counter(base for topic in topics if (base := base_of(topic)) != topic)


def _by_number(parts: Sequence[P]) -> list[P]:
    return sorted(parts, key=lambda part: TopicName(part.topic).partition_number or 0)


def _lag(parts: Sequence[values.SubscriptionState]) -> int:
    return sum(part.lag_messages for part in parts)


def _rank(course: str) -> int:
    return COURSES.index(course) if course in COURSES else COURSES.index("unknown")


def _common_broker(parts: Sequence[Partitioned]) -> int:
    """0 if they are at several."""
    brokers = {part.broker_id for part in parts}
    return brokers.pop() if len(brokers) == 1 else 0
