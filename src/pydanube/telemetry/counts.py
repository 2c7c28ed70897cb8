"""What the rooms count: plain numbers, changed by the event loop alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping
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
    skipped: Count = field(default_factory=Count)  # removed by retention before they were acknowledged
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


@dataclass(slots=True, eq=False)
class CloudMetrics:
    """The cloud tier of all topics.

    `waiting` is asked at each scrape: topics with something to upload, how many offsets, and since how many seconds.
    """

    objects: Count = field(default_factory=Count)  # uploaded
    bytes: Count = field(default_factory=Count)  # of them
    upload_latency: Histogram = field(default_factory=Histogram)  # read, encode, put, read back, describe
    upload_errors: Count = field(default_factory=Count)
    merges: Count = field(default_factory=Count)
    objects_read: Count = field(default_factory=Count)  # whose footer was fetched
    bytes_read: Count = field(default_factory=Count)
    errors: Count = field(default_factory=Count)  # objects that could not be read: missing or damaged
    waiting: Callable[[], tuple[int, int, float]] | None = None


class ClusterNow(NamedTuple):
    """This broker as a member of its cluster, at one moment."""

    state: str  # active, draining or drained
    is_leader: bool
    brokers: int  # alive, this one among them
    lease_age_seconds: float  # since the last renewal that was answered


@dataclass(slots=True, eq=False)
class MoveMetrics:
    """Topics that this broker let go."""

    results: Counter[str] = field(default_factory=Counter)  # ok, error
    pause: Histogram = field(default_factory=Histogram)  # from the first refused publish to the release
    fenced: Count = field(default_factory=Count)  # how often this broker was declared lost
    last_ms: dict[str, float] = field(default_factory=dict)  # of each phase, in the last move

    def count(self, result: str) -> None:
        self.results[result] += 1

    def finished(self, milliseconds: Mapping[str, float]) -> None:
        self.results["ok"] += 1
        self.last_ms = dict(milliseconds)
        self.pause.observe(sum(ms for name, ms in milliseconds.items() if name not in ("upload", "close")) / 1000)
