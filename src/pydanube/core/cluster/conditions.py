"""What is wrong, in words: the conditions of the alerts, decided by the product itself.

    numbers of one broker ─► Watch.look ─► conditions of that broker          every few seconds, at each broker
    all brokers' answers  ─► of_cluster ─► conditions of the cluster          when somebody asks

A condition has the name of an alert in deploy/alerts.yml and leads to the same runbook. What Prometheus looks at over
minutes is looked at over minutes here too. What needs a person at once (a broker that is gone, topics without one) is
said at once. What nobody can know is no number: `None` stays `None`, and a sum of which a part is missing says so.

Times called `now` are seconds that never go back; times called `…_ms` are dates.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
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
RESTARTS_MAX: Final = 2  # in an hour
RESTART_MS: Final = 3_600_000
STALE_MS: Final = 24 * 3_600_000  # a broker that is gone is remembered so long
NAMED_MAX: Final = 3  # topics in a sentence
DRAINED: Final = "DanubeBrokerDrained"


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


class Buckets(NamedTuple):
    """A histogram: how many lie between two bounds; one more count than bounds."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]

    def since(self, earlier: Buckets) -> Buckets:
        """What came since `earlier`. One that began anew counts from 0."""
        grown = tuple(now - then for now, then in zip(self.counts, earlier.counts, strict=True))
        return self if min(grown, default=0) < 0 else Buckets(self.bounds, grown)

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


class Orphaned(NamedTuple):
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
    orphans: Sequence[Orphaned] = ()
    log_size_bytes: int | None = None
    log_limit_bytes: int = 0  # 0: the disk is the bound
    disk_free_bytes: int | None = None
    disk_used_bytes: int | None = None
    upload_lag_seconds: float | None = None
    object_errors: int = 0
    metadata_size_bytes: int = 0
    metadata_quota_bytes: int = 0
    loop_lag: Buckets | None = None
    commits: Buckets | None = None
    publishes: Buckets | None = None


class Percentiles(NamedTuple):
    """Milliseconds, over the last minutes. None: nothing happened then."""

    p50: float | None
    p95: float | None
    p99: float | None

    @classmethod
    def of(cls, buckets: Buckets | None) -> Percentiles:
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


class Watch:
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


# --- how the cluster is doing ---------------------------------------------------------------------------


class Life(enum.StrEnum):
    """What is known of a broker."""

    ANSWERS = "answers"
    SILENT = "silent"  # registered, and it does not answer
    GONE = "gone"  # its lease has run out
    STOPPED = "stopped"  # in order


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFacts:
    """One broker, as whoever is asked knows it. `own` is what it said of itself: empty if it does not answer."""

    broker: int
    address: str
    life: Life
    since_ms: int | None = None  # that it is so; None: not known
    why: str = ""  # it does not answer
    mode: str = ""
    reason: str = ""
    topics: int = 0  # assigned to it
    own: Sequence[Condition] = ()
    orphans: Sequence[Orphaned] = ()
    starts_ms: Sequence[int] = ()  # lately, without an orderly stop before
    lease_seconds: float = 0.0
    not_uploaded_seconds: float | None = (
        None  # how old the oldest message was that it had not uploaded; None: not known
    )

    @property
    def name(self) -> str:
        return f"broker {self.address or self.broker}"


class ClusterFacts(NamedTuple):
    now_ms: int
    brokers: Sequence[BrokerFacts]
    has_leader: bool
    unassigned: Sequence[str] = ()  # topics that no broker has
    waiting: Sequence[str] = ()  # of them, those that wait for their own broker


def of_cluster(facts: ClusterFacts) -> list[Condition]:
    """Everything that is wrong now, the worst first."""
    found = [*_absent(facts), *_unserved(facts), *_rescues(facts), *_drained(facts), *_restarts(facts)]
    if not facts.has_leader:
        found.append(
            Condition(
                "DanubeNoLeader",
                Severity.CRITICAL,
                "the cluster has no leader: topics are served, and none moves, is placed, or is taken from a broker "
                "that dies",
                "a new one is elected within seconds; if not, look at the metadata store",
            )
        )
    several = len(facts.brokers) > 1
    for broker in facts.brokers:
        for each in broker.own:
            about = each.subject or str(broker.broker)
            sentence = each.sentence if each.subject or not several else f"{broker.name}: {each.sentence}"
            found.append(each._replace(subject=about, sentence=sentence[:1].lower() + sentence[1:]))
    return order(_once(found))


def _once(found: Iterable[Condition]) -> list[Condition]:
    """The metadata store is one, whoever complains of it."""
    kept: dict[tuple[str, str], Condition] = {}
    for each in found:
        kept.setdefault((each.name, "" if each.name == "DanubeMetadataFilling" else each.subject), each)
    return list(kept.values())


def _absent(facts: ClusterFacts) -> Iterator[Condition]:
    for broker in facts.brokers:
        if broker.life is Life.SILENT:
            lease = f" when its lease has run out, {broker.lease_seconds:.0f} s after its last sign of life"
            had = f"; it has {count(broker.topics, 'topic')}, which others take{lease}" if broker.topics else ""
            yield Condition(
                "DanubeBrokerDown",
                Severity.CRITICAL,
                f"{broker.name} does not answer{_since(broker.since_ms, facts.now_ms)}{had}",
                "start it again on its data directory; if it runs, look at the network to it",
                str(broker.broker),
                broker.since_ms,
            )
        elif broker.life is Life.GONE:
            yield Condition(
                "DanubeBrokerDown",
                Severity.CRITICAL,
                f"{broker.name} is gone{_since(broker.since_ms, facts.now_ms)}: it did not stop in order",
                "start it again on its data directory; `danube admin brokers forget` if it is not to come back",
                str(broker.broker),
                broker.since_ms,
            )
        elif broker.life is Life.STOPPED:
            yield Condition(
                "DanubeBrokerDown",
                Severity.WARNING,
                f"{broker.name} is stopped{_since(broker.since_ms, facts.now_ms)}, in order",
                "start it again; `danube admin brokers forget` if it is not to come back",
                str(broker.broker),
                broker.since_ms,
            )


def _unserved(facts: ClusterFacts) -> Iterator[Condition]:
    silent = [broker for broker in facts.brokers if broker.life is not Life.ANSWERS and broker.topics]
    lost = sum(broker.topics for broker in silent)
    total = lost + len(facts.unassigned)
    if not total:
        return
    parts = []
    if silent:
        away = {Life.SILENT: "which does not answer", Life.GONE: "which is gone", Life.STOPPED: "which is stopped"}
        parts.append(f"{lost:,} of {' and '.join(f'{each.name}, {away[each.life]}' for each in silent)}")
    if facts.waiting:
        parts.append(f"{len(facts.waiting):,} wait for their own broker")
    if rest := len(facts.unassigned) - len(facts.waiting):
        parts.append(f"{rest:,} wait for a broker that takes them ({_named(facts.unassigned)})")
    yield Condition(
        "DanubeTopicsUnassigned",
        Severity.CRITICAL,
        f"{count(total, 'topic')} {'has' if total == 1 else 'have'} no server: {', '.join(parts)}",
        "nobody can publish to them or read from them; `danube admin topics describe` says what one waits for",
        since_ms=min((each.since_ms for each in silent if each.since_ms is not None), default=None),
    )


def _rescues(facts: ClusterFacts) -> Iterator[Condition]:
    orphans = [each for broker in facts.brokers for each in broker.orphans]
    for broker in facts.brokers:
        # Until others have taken its topics nobody can count the messages, only say whose they are.
        if broker.life in (Life.SILENT, Life.GONE) and broker.topics:
            age = broker.not_uploaded_seconds
            which = "how many is not known" if age is None else f"those of about its last {words(max(age, 1.0))}"
            yield Condition(
                "DanubeOrphanRange",
                Severity.WARNING,
                f"messages that {broker.name} had not uploaded wait to be rescued from its disk: {which}",
                "start that broker again on its data directory: it brings them",
                str(broker.broker),
                broker.since_ms,
            )
    if not orphans:
        return
    names = {broker.broker: broker.name for broker in facts.brokers}
    whose = sorted({owner for each in orphans for owner in each.brokers})
    on = " and ".join(names.get(owner, f"broker {owner}") for owner in whose) or "a lost broker"
    topics = sorted({each.topic for each in orphans})
    yield Condition(
        "DanubeOrphanRange",
        Severity.WARNING,
        f"up to {count(sum(each.offsets for each in orphans), 'message')} of {count(len(topics), 'topic')} "
        f"({_named(topics)}) wait to be rescued from the disk of {on}",
        "start that broker again on its data directory: it brings them",
    )


def _drained(facts: ClusterFacts) -> Iterator[Condition]:
    here = [broker for broker in facts.brokers if broker.life is Life.ANSWERS]
    active = [broker for broker in here if broker.mode == "active"]
    for broker in here:
        if broker.mode == "drained":
            yield Condition(
                DRAINED,
                Severity.WARNING if active else Severity.CRITICAL,
                f"{broker.name} is drained ({broker.reason or 'no reason given'}): it runs and serves no topic",
                f"danube admin brokers activate {broker.broker}",
                str(broker.broker),
                broker.since_ms,
            )


def _restarts(facts: ClusterFacts) -> Iterator[Condition]:
    for broker in facts.brokers:
        recent = [each for each in broker.starts_ms if facts.now_ms - each < RESTART_MS]
        if len(recent) > RESTARTS_MAX:
            yield Condition(
                "DanubeBrokerRestarts",
                Severity.WARNING,
                f"{broker.name} ended without an orderly stop and began anew {len(recent)} times in the last hour",
                "its log, and the system's (out of memory, a failing disk), say why",
                str(broker.broker),
                min(recent),
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


def _since(since_ms: int | None, now_ms: int) -> str:
    if since_ms is None:
        return ""
    time = datetime.fromtimestamp(since_ms / 1000, UTC)
    return f" since {time:%H:%M:%SZ} ({words((now_ms - since_ms) / 1000)})"


def _named(topics: Sequence[str]) -> str:
    more = f" and {len(topics) - NAMED_MAX:,} more" if len(topics) > NAMED_MAX else ""
    return ", ".join(topics[:NAMED_MAX]) + more
