"""What the layers count: plain numbers, changed by the event loop alone."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from typing import Final, NamedTuple

LATENCY_BOUNDS_MS: Final = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)
SIZE_BOUNDS_BYTES: Final = (64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0, 1048576.0, 4194304.0)
CYCLE_BOUNDS_SECONDS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0)
PHASES: Final = ("upload", "quiet", "cursors", "rest", "seal", "close")  # of a move, in order


class Count:
    """Only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self, amount: int = 1) -> None:
        self.value += amount


class GaugeValue:
    """Goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def set(self, value: int) -> None:
        self.value = value


class Histogram:
    """Counts of values between bounds. Adding one costs a search among a dozen numbers."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_MS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        """For those whose bounds are milliseconds."""
        self.add(seconds * 1000)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Buckets:
        return Buckets(tuple(self.counts), self.total, self.bounds)


class Buckets(NamedTuple):
    counts: tuple[int, ...]
    total: float
    bounds: tuple[float, ...]

    def cumulative(self) -> Iterator[tuple[str, int]]:
        """Upper bounds and how many lie below them, as Prometheus wants it."""
        return zip(_printed(self.bounds), accumulate(self.counts), strict=True)


@cache
def _printed(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(str, bounds), "+Inf")


@dataclass(slots=True, eq=False)
class TopicMetrics:
    messages_in: Count = field(default_factory=Count)
    bytes_in: Count = field(default_factory=Count)  # payloads; of a native batch all its columns
    sizes: Histogram = field(default_factory=lambda: Histogram(SIZE_BOUNDS_BYTES))  # of single messages, in bytes
    orphan_ranges: GaugeValue = field(default_factory=GaugeValue)  # offsets that only a lost broker's disk has
    orphan_messages: GaugeValue = field(default_factory=GaugeValue)  # at most so many are in them
    send_latency: Histogram = field(default_factory=Histogram)  # from the request to the answer
    send_errors: Counter[str] = field(default_factory=Counter)  # by status code
    schema_checks: Counter[str] = field(default_factory=Counter)  # messages that were looked at, by policy
    schema_failures: Counter[str] = field(default_factory=Counter)  # messages that did not fit, by reason


@dataclass(slots=True, eq=False)
class SubscriptionMetrics:
    lag_detected: Count = field(default_factory=Count)  # heartbeats that found lag
    heartbeat_polls: Count = field(default_factory=Count)
    notifier_polls: Count = field(default_factory=Count)
    delivered: Count = field(default_factory=Count)  # messages, repeated ones too
    delivered_bytes: Count = field(default_factory=Count)  # payloads
    nacks: Count = field(default_factory=Count)
    redeliveries: Count = field(default_factory=Count)
    dropped: Count = field(default_factory=Count)  # non-reliable: the consumer's queue was full
    skipped: Count = field(default_factory=Count)  # removed by retention before they were acknowledged
    consumers: GaugeValue = field(default_factory=GaugeValue)  # non-reliable; of a reliable one its standing says it
    exhausted: Counter[str] = field(default_factory=Counter)  # failed too often, by poison policy
    dead_lettered: Count = field(default_factory=Count)  # copied to the dead-letter topic
    lag_seconds: float | None = None  # age of the oldest message not acknowledged, as of the last look; None: not known
    catch_up_seconds: float | None = None  # at the rate of the last minute, infinite if never; None: not known


@dataclass(slots=True, eq=False)
class RpcMetrics:
    ok: Count = field(default_factory=Count)
    errors: Count = field(default_factory=Count)


class DispatchNow(NamedTuple):
    """What is in memory for consumers, of all topics, at one moment."""

    decoded_bytes: int
    decoded_limit_bytes: int
    outbox_bytes: int
    outbox_limit_bytes: int


class PressureNow(NamedTuple):
    """What has come and is not on disk, at one moment."""

    queued_bytes: int
    partial_bytes: int  # of frames that have come in part
    limit_bytes: int
    held: int  # connections that are not read from
    refused: int  # calls and batches, since the start


@dataclass(slots=True, eq=False)
class WalMetrics:
    """The log of all topics: commit groups and what was in them. `size_bytes` is asked at each scrape."""

    appends: Count = field(default_factory=Count)
    append_bytes: Count = field(default_factory=Count)
    groups: Count = field(default_factory=Count)
    group_latency: Histogram = field(default_factory=Histogram)
    rotations: Counter[str] = field(default_factory=Counter)  # segments ended, by reason: size, time, room, failure
    deletions: Counter[str] = field(default_factory=Counter)  # segments dropped, by reason: retention, adopted
    reads: Counter[str] = field(default_factory=Counter)  # pieces read, by place: memory, file, cloud
    handoffs: Count = field(default_factory=Count)  # readers that came from the cloud tier to the log
    size_bytes: Callable[[], int] | None = None
    bytes_max: int = 0  # 0: the disk is the bound
    pressure: Callable[[], PressureNow] | None = None
    sessions: Callable[[], int] | None = None  # of producers, in all topics
    sessions_ended: Count = field(default_factory=Count)  # not used for long
    sessions_cut: Counter[str] = field(default_factory=Counter)  # did not fit, by place: objects, seal, segment


@dataclass(slots=True, eq=False)
class CloudMetrics:
    """The cloud tier of all topics."""

    objects: Count = field(default_factory=Count)  # uploaded
    bytes: Count = field(default_factory=Count)  # of them
    upload_latency: Histogram = field(default_factory=Histogram)  # read, encode, put, read back, describe
    upload_errors: Count = field(default_factory=Count)
    merges: Count = field(default_factory=Count)
    objects_read: Count = field(default_factory=Count)  # whose footer was fetched
    bytes_read: Count = field(default_factory=Count)
    errors: Count = field(default_factory=Count)  # objects that could not be read: missing or damaged


class ClusterNow(NamedTuple):
    """This broker as a member of its cluster, at one moment."""

    state: str  # active, draining or drained
    is_leader: bool
    brokers: int  # alive, this one among them
    lease_age_seconds: float  # since the last renewal that was answered
    lease_ttl_seconds: float = 0.0
    may_serve: bool = True  # False: fenced
    unassigned: int = 0  # topics that no broker has
    moving: int = 0  # topics that are leaving this broker now
    imbalance: float | None = None  # the leader alone says it
    drained_for: str = ""  # the reason, if it is drained
    crashes: int = 0  # starts of this broker that followed no orderly stop, in all its lives


@dataclass(slots=True, eq=False)
class ClusterMetrics:
    """What this broker does as a member of its cluster."""

    assigned: Count = field(default_factory=Count)  # topics that it took
    unassigned: Count = field(default_factory=Count)  # topics that it released, or lost
    rebalances: Counter[str] = field(default_factory=Counter)  # moves that it began, by reason: automatic, manual
    rebalance_failures: Count = field(default_factory=Count)  # such moves of its own topics that failed
    # Brokers that were away and that it activated, by reason: rejoined (itself), no_active_broker (as the leader).
    returns: Counter[str] = field(default_factory=Counter)
    cycle: Histogram = field(default_factory=lambda: Histogram(CYCLE_BOUNDS_SECONDS))  # a leader's rounds, in seconds
    metadata_size_bytes: int = 0  # of the metadata store; 0: not known
    metadata_quota_bytes: int = 0


@dataclass(slots=True, eq=False)
class MoveMetrics:
    """Topics that this broker handed over."""

    results: Counter[str] = field(default_factory=Counter)  # ok, error
    pause: Histogram = field(default_factory=Histogram)  # from the first refused publish to the release
    phases: dict[str, Histogram] = field(default_factory=lambda: {name: Histogram() for name in PHASES})
    fenced: Count = field(default_factory=Count)  # how often this broker was declared lost
    acks_cut: Count = field(default_factory=Count)  # acknowledged messages that did not fit into a last cursor
    last_ms: dict[str, float] = field(default_factory=dict)  # of each phase, in the last move

    def count(self, result: str) -> None:
        self.results[result] += 1

    def finished(self, milliseconds: Mapping[str, float]) -> None:
        self.results["ok"] += 1
        self.last_ms = dict(milliseconds)
        for name, ms in milliseconds.items():
            self.phases.setdefault(name, Histogram()).add(ms)
        self.pause.add(sum(ms for name, ms in milliseconds.items() if name not in ("upload", "close")))
