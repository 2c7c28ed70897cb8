"""What the rooms count: plain numbers, changed by the event loop alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple

from pydanube.core.lag import Standing

LATENCY_BOUNDS_MS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)


class Count:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


class Level:
    """Goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def set(self, value: int) -> None:
        self.value = value


class Histogram:
    """Counts of milliseconds between bounds. `observe` costs a search among twelve numbers."""

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        self.sum_ms = 0.0

    def observe(self, seconds: float) -> None:
        milliseconds = seconds * 1000
        self.counts[bisect_left(LATENCY_BOUNDS_MS, milliseconds)] += 1
        self.sum_ms += milliseconds

    def copy(self) -> Buckets:
        return Buckets(tuple(self.counts), self.sum_ms)


class Buckets(NamedTuple):
    counts: tuple[int, ...] = (0,) * (len(LATENCY_BOUNDS_MS) + 1)
    sum_ms: float = 0.0

    def cumulative(self) -> list[tuple[str, int]]:
        """Upper bounds and how many lie below them, as Prometheus wants it."""
        bounds = (*map(str, LATENCY_BOUNDS_MS), "+Inf")
        return list(zip(bounds, accumulate(self.counts), strict=True))


@dataclass(slots=True, eq=False)
class TopicMetrics:
    messages_in: Count = field(default_factory=Count)
    bytes_in: Count = field(default_factory=Count)  # payloads
    producers: Level = field(default_factory=Level)  # registered
    send_latency: Histogram = field(default_factory=Histogram)  # from the request to the answer
    send_errors: Counter[str] = field(default_factory=Counter)  # by status code


@dataclass(slots=True, eq=False)
class SubscriptionMetrics:
    """`standing` is asked at each scrape; a subscription of a non-reliable topic has none, and no lag."""

    standing: Callable[[], Standing] | None = None
    lag_detected: Count = field(default_factory=Count)  # heartbeats that found lag
    heartbeat_polls: Count = field(default_factory=Count)
    notifier_polls: Count = field(default_factory=Count)
    delivered: Count = field(default_factory=Count)  # messages, repeated ones too
    delivered_bytes: Count = field(default_factory=Count)  # payloads
    nacks: Count = field(default_factory=Count)
    redeliveries: Count = field(default_factory=Count)
    dropped: Count = field(default_factory=Count)  # non-reliable: the consumer's queue was full
    consumers: Level = field(default_factory=Level)  # non-reliable; of a reliable one its standing says it
    exhausted: Counter[str] = field(default_factory=Counter)  # failed too often, by poison policy


@dataclass(slots=True, eq=False)
class RpcMetrics:
    ok: Count = field(default_factory=Count)
    errors: Count = field(default_factory=Count)


@dataclass(slots=True, eq=False)
class WalMetrics:
    """The log of all topics: commit groups and what was in them."""

    appends: Count = field(default_factory=Count)
    append_bytes: Count = field(default_factory=Count)
    groups: Count = field(default_factory=Count)
    group_latency: Histogram = field(default_factory=Histogram)
