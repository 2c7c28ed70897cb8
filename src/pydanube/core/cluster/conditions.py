"""What is wrong, in words: the conditions of the alerts, decided by the product itself.

    numbers of one broker ─► BrokerWatch.look ─► conditions of that broker    every few seconds, at each broker

Those of the cluster as a whole are in `cluster_conditions.py`.

A condition has the name of an alert in deploy/alerts.yml and leads to the same runbook. What Prometheus looks at over
minutes is looked at over minutes here too. What needs a person immediately (a broker that is gone, topics without one)
is reported immediately. What cannot be known is no number: `None` stays `None`, and a sum of which a part is missing
says so.

Times called `now` are seconds that never go back; times called `…_ms` are dates.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Final, NamedTuple, Protocol

WINDOW_SECONDS: Final = 300.0  # growth is judged over so long, and up to twice as long
LAG_MESSAGES: Final = 1_000
LAG_SECONDS: Final = 300.0  # that it lasts
STUCK_SECONDS: Final = 900.0
NOTIFIER_SHARE: Final = 0.1
TIMEOUT_SHARE: Final = 0.01  # of what was delivered
LOOP_LAG_MS: Final = 200.0
COMMIT_MS: Final = 500.0
LEASE_SHARE: Final = 0.5
METADATA_SHARE: Final = 0.5
DISK_FREE_SHARE: Final = 0.1
LOG_SHARE: Final = 0.9
UPLOAD_SECONDS: Final = 300.0
UNOPENED_SECONDS: Final = 10.0  # a broker that has just started opens its topics one after the other


class Severity(enum.StrEnum):
    CRITICAL = "critical"
    WARNING = "warning"


class Condition(NamedTuple):
    """`name` is that of the alert, `subject` a broker, a topic, or `topic subscription`; empty: the cluster."""

    name: str
    severity: Severity
    sentence: str
    todo: str
    subject: str = ""
    since_ms: int | None = None  # None: not known

    @property
    def runbook(self) -> str:
        return f"docs/runbooks/{self.name}.md"


def order(conditions: Iterable[Condition]) -> list[Condition]:
    """Critical ones first, then the oldest."""
    return sorted(
        conditions,
        key=lambda each: (each.severity is not Severity.CRITICAL, each.since_ms or 1 << 62, each.name, each.subject),
    )


# --- how one broker is doing ----------------------------------------------------------------------------


class LatencyBuckets(NamedTuple):
    """A histogram: how many lie between two bounds; one more count than bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]

    def since(self, earlier: LatencyBuckets) -> LatencyBuckets:
        """What came since `earlier`. One that began anew counts from 0."""
        grown = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return self if min(grown, default=0) < 0 else LatencyBuckets(self.bounds, grown)

    def quantile(self, share: float) -> float | None:
        """As Prometheus guesses it: evenly spread between two bounds. None: nothing was counted."""
        total = sum(self.counts)
        if not total:
            return None
        below = list(accumulate(self.counts))
        rank = share * total
        place = bisect_left(below, rank)
        if place >= len(self.bounds):
            return self.bounds[-1]
        low = self.bounds[place - 1] if place else 0.0
        before = below[place - 1] if place else 0
        return low + (self.bounds[place] - low) * (rank - before) / max(self.counts[place], 1)


class SubscriptionNumbers(NamedTuple):
    topic: str
    name: str
    lag: int | None  # None: it has none
    consumers: int
    delivered: int
    heartbeat_polls: int
    notifier_polls: int
    timed_out: int
    dead_lettered: int

    @property
    def subject(self) -> str:
        return f"{self.topic} {self.name}"


class OrphanedRanges(NamedTuple):
    """What of a topic only the disk of a lost broker has."""

    topic: str
    ranges: int
    offsets: int  # at most so many messages
    brokers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerNumbers:
    """One broker at one moment. None: not known, or there is none."""

    may_serve: bool = True
    fenced: int = 0  # how often
    lease_age_seconds: float | None = None
    lease_ttl_seconds: float = 0.0
    unopened: Mapping[str, str] = field(default_factory=dict)  # topics, and why
    orphans: Sequence[OrphanedRanges] = ()
    log_size_bytes: int | None = None
    log_limit_bytes: int = 0  # 0: the disk is the bound
    disk_free_bytes: int | None = None
    disk_used_bytes: int | None = None
    upload_lag_seconds: float | None = None
    object_errors: int = 0
    metadata_size_bytes: int = 0
    metadata_quota_bytes: int = 0
    loop_lag: LatencyBuckets | None = None
    commits: LatencyBuckets | None = None
    publishes: LatencyBuckets | None = None


class Percentiles(NamedTuple):
    """Milliseconds, over the last minutes. None: nothing happened then."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, buckets: LatencyBuckets | None) -> Percentiles:
        if buckets is None:
            return cls(None, None, None)
        return cls(buckets.quantile(0.5), buckets.quantile(0.95), buckets.quantile(0.99))


@dataclass(slots=True)
class _Counters:
    """Of a subscription, as they were one and two windows ago."""

    before: tuple[int, ...]
    earlier: tuple[int, ...]
    delivered: int
    quiet_since: float


class BrokerWatch:
    """The memory that rules over time need, of one broker. `look` now and then; `conditions` are of the last look."""

    def __init__(self) -> None:
        self.conditions: list[Condition] = []
        self.commits = self.publishes = Percentiles(None, None, None)
        self._since: dict[tuple[str, str], tuple[float, int]] = {}
        self._counters: dict[tuple[str, str], _Counters] = {}
        self._turned_at: float | None = None
        self._before: BrokerNumbers | None = None
        self._earlier: BrokerNumbers | None = None

    def look(
        self, now: float, now_ms: int, broker: BrokerNumbers, subscriptions: Iterable[SubscriptionNumbers]
    ) -> None:
        for _ in self.look_in_steps(now, now_ms, broker, subscriptions):
            pass

    def look_in_steps(
        self,
        now: float,
        now_ms: int,
        broker: BrokerNumbers,
        subscriptions: Iterable[SubscriptionNumbers],
        step: int = 250,
    ) -> Iterator[None]:
        """The same, for a loop that has other things to do."""
        turns = self._turned_at is None or now - self._turned_at >= WINDOW_SECONDS
        if turns:
            self._turned_at = now
        if self._before is None or self._earlier is None:
            self._before = self._earlier = broker
        holding: dict[tuple[str, str], tuple[float, int]] = {}
        found: list[Condition] = []

        def judge(condition: Condition, seconds: float = 0.0) -> None:
            key = (condition.name, condition.subject)
            since = holding[key] = self._since.get(key, (now, now_ms))
            if now - since[0] >= seconds:
                found.append(condition._replace(since_ms=since[1]))

        self._broker(broker, self._earlier, judge)
        seen: dict[tuple[str, str], _Counters] = {}
        for number, each in enumerate(subscriptions):
            if number % step == step - 1:
                yield
            place = (each.topic, each.name)
            seen[place] = self._subscription(now, each, self._counters.get(place), turns, judge)
        if turns:
            self._earlier, self._before = self._before, broker
        self._since, self._counters = holding, seen
        self.conditions = order(found)

    def _broker(self, broker: BrokerNumbers, earlier: BrokerNumbers, judge: _Judge) -> None:
        for condition in _of_broker(broker, earlier):
            judge(condition)
        if broker.unopened:
            judge(_unopened(broker.unopened), UNOPENED_SECONDS)
        if broker.upload_lag_seconds is not None and broker.upload_lag_seconds > UPLOAD_SECONDS:
            judge(
                Condition(
                    "DanubeUploadStalled",
                    Severity.CRITICAL,
                    f"nothing was uploaded for {words(broker.upload_lag_seconds)}: the log grows until it is",
                    "look at the object store; nothing is lost meanwhile",
                )
            )
        recent = {
            name: (now.since(then) if now is not None and then is not None else now)
            for name, now, then in (
                ("loop", broker.loop_lag, earlier.loop_lag),
                ("commits", broker.commits, earlier.commits),
                ("publishes", broker.publishes, earlier.publishes),
            )
        }
        self.commits, self.publishes = Percentiles.of(recent["commits"]), Percentiles.of(recent["publishes"])
        late = Percentiles.of(recent["loop"]).p99
        if late is not None and late > LOOP_LAG_MS:
            judge(
                Condition(
                    "DanubeEventLoopLag",
                    Severity.WARNING,
                    f"one time in a hundred its event loop is {late:,.0f} ms late, and so is every message",
                    "give it more CPU, or move topics away",
                ),
                WINDOW_SECONDS,
            )
        slow = self.commits.p99
        if slow is not None and slow > COMMIT_MS:
            judge(
                Condition(
                    "DanubeCommitSlow",
                    Severity.WARNING,
                    f"one commit in a hundred takes {slow:,.0f} ms, and its producers wait so long",
                    "look who else uses its disk",
                ),
                WINDOW_SECONDS,
            )

    def _subscription(
        self, now: float, each: SubscriptionNumbers, counters: _Counters | None, turns: bool, judge: _Judge
    ) -> _Counters:
        counts = (
            each.heartbeat_polls,
            each.notifier_polls,
            each.timed_out,
            each.dead_lettered,
            each.delivered,
        )
        if counters is None or any(a < b for a, b in zip(counts, counters.earlier, strict=True)):
            counters = _Counters(counts, counts, each.delivered, now)
        if each.delivered != counters.delivered or not each.lag or not each.consumers:
            counters.delivered, counters.quiet_since = each.delivered, now
        heartbeats, notified, timed_out, letters, delivered = (
            a - b for a, b in zip(counts, counters.earlier, strict=True)
        )
        if turns:
            counters.earlier, counters.before = counters.before, counts
        name = f"subscription {each.name} of {each.topic}"
        if each.lag is not None and each.lag > LAG_MESSAGES:
            judge(
                Condition(
                    "DanubeSubscriptionLagging",
                    Severity.WARNING,
                    f"{name} is {count(each.lag, 'message')} behind",
                    f"danube admin subscriptions explain {each.topic} {each.name}",
                    each.subject,
                ),
                LAG_SECONDS,
            )
        if each.lag and each.consumers and now - counters.quiet_since >= STUCK_SECONDS:
            judge(
                Condition(
                    "DanubeSubscriptionStuck",
                    Severity.CRITICAL,
                    f"{name} is stuck: {count(each.lag, 'message')} behind, consumers are connected, and nothing was "
                    f"delivered for {words(now - counters.quiet_since)}",
                    f"danube admin subscriptions explain {each.topic} {each.name}",
                    each.subject,
                )
            )
        if heartbeats > NOTIFIER_SHARE * notified and heartbeats > 1:
            judge(
                Condition(
                    "DanubeNotifierNotWorking",
                    Severity.WARNING,
                    f"{name}: heartbeats find messages without a notification, {count(heartbeats, 'time')} lately",
                    "its messages come later than they could; the broker's log says more",
                    each.subject,
                ),
                WINDOW_SECONDS,
            )
        if timed_out > TIMEOUT_SHARE * delivered:
            judge(
                Condition(
                    "DanubeAckTimeouts",
                    Severity.WARNING,
                    f"{name}: {count(timed_out, 'message')} not acknowledged in time lately, and sent again",
                    "handlers are slower than the ack timeout, or forget to acknowledge",
                    each.subject,
                ),
                WINDOW_SECONDS,
            )
        if letters > 0:
            judge(
                Condition(
                    "DanubeDeadLettersGrowing",
                    Severity.WARNING,
                    f"{name}: {count(letters, 'message')} became dead letters lately",
                    f"danube admin subscriptions get-failure-policy {each.topic} {each.name} says where they are",
                    each.subject,
                )
            )
        return counters


class _Judge(Protocol):
    """Says a condition that has held for `seconds`."""

    def __call__(self, condition: Condition, seconds: float = 0.0) -> None: ...


def _of_broker(broker: BrokerNumbers, earlier: BrokerNumbers) -> Iterator[Condition]:
    if not broker.may_serve:
        yield Condition(
            "DanubeBrokerFenced",
            Severity.CRITICAL,
            "it is fenced: its lease was not renewed in time, so it serves nothing until it is",
            "look at the metadata store, and at the network to it",
        )
    elif broker.fenced > earlier.fenced:
        yield Condition(
            "DanubeBrokerFenced",
            Severity.CRITICAL,
            "it was fenced a few minutes ago: its lease had not been renewed in time",
            "look at the metadata store, and at the network to it",
        )
    elif broker.lease_age_seconds is not None and 0 < broker.lease_ttl_seconds * LEASE_SHARE < broker.lease_age_seconds:
        yield Condition(
            "DanubeLeaseOld",
            Severity.WARNING,
            f"it cannot renew its lease: the metadata store last answered {words(broker.lease_age_seconds)} ago",
            "look at the metadata store, and at the network to it",
        )
    if broker.metadata_size_bytes > METADATA_SHARE * broker.metadata_quota_bytes > 0:
        share = broker.metadata_size_bytes / broker.metadata_quota_bytes
        yield Condition(
            "DanubeMetadataFilling",
            Severity.WARNING,
            f"the metadata store has used {share:.0%} of its quota; a full one takes no change, and topics stop",
            "defragment it (etcdctl defrag), or give it a larger quota",
        )
    free, used = broker.disk_free_bytes, broker.disk_used_bytes
    if free is not None and used is not None and free + used and free / (free + used) < DISK_FREE_SHARE:
        yield Condition(
            "DanubeDiskNearlyFull",
            Severity.CRITICAL,
            f"its disk has {free / (free + used):.1%} free; when it is full, publishes are refused",
            "make room, or a shorter local retention",
        )
    size, limit = broker.log_size_bytes, broker.log_limit_bytes
    if size is not None and limit > 0 and size / limit > LOG_SHARE:
        yield Condition(
            "DanubeLogNearlyFull",
            Severity.CRITICAL,
            f"its log has used {size / limit:.0%} of storage.wal.max_mb; at 100% publishes are refused",
            "look why nothing is uploaded, or give the log more room",
        )
    if broker.object_errors > earlier.object_errors:
        yield Condition(
            "DanubeObjectDamaged",
            Severity.CRITICAL,
            "an object of history is missing, or is not what was written",
            "danube admin storage verify finds it",
        )


def _unopened(unopened: Mapping[str, str]) -> Condition:
    topic, why = min(unopened.items())
    more = f" and {len(unopened) - 1:,} more" if len(unopened) > 1 else ""
    return Condition(
        "DanubeTopicNotOpen", Severity.CRITICAL, f"it cannot open {topic}{more}: {why}", "its log says why"
    )


# --- words ----------------------------------------------------------------------------------------------


def noun(number: float, what: str) -> str:
    """message for 1, messages for any other number."""
    return what if number == 1 else f"{what}s"


def count(number: float, what: str) -> str:
    """1 message, 12,345 messages."""
    return f"{number:,.0f} {noun(number, what)}"


def words(seconds: float) -> str:
    """About how long: 12 s, 3 min, 5 h, 2 days."""
    if seconds < 100:
        return f"{max(seconds, 0):.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 48 * 3600:
        return f"{seconds / 3600:.0f} h"
    return f"{seconds / 86400:.0f} days"
