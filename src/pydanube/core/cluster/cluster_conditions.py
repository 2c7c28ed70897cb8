"""What is wrong with the cluster as a whole: a broker that is gone, topics without a server, rescues that wait.

    all brokers' answers ─► of_cluster ─► conditions of the cluster          when an operator, or a page, asks

Times called `…_ms` are dates.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pydanube.core.cluster.conditions import Condition, OrphanedRanges, Severity, count, order, words

RESTARTS_MAX: Final = 2  # in an hour
RESTART_MS: Final = 3_600_000
STALE_MS: Final = 24 * 3_600_000  # a broker that is gone is remembered so long
NAMED_MAX: Final = 3  # topics in a sentence
DRAINED: Final = "DanubeBrokerDrained"


class Life(enum.StrEnum):
    """What is known of a broker."""

    ANSWERS = "answers"
    SILENT = "silent"  # registered, and it does not answer
    GONE = "gone"  # its lease has run out
    STOPPED = "stopped"  # in order


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerFacts:
    """One broker, as the answering broker knows it. `own` is its own report: empty if it does not answer."""

    broker: int
    address: str
    life: Life
    since_ms: int | None = None  # that it is so; None: not known
    why: str = ""  # it does not answer
    mode: str = ""
    reason: str = ""
    topics: int = 0  # assigned to it
    own: Sequence[Condition] = ()
    orphans: Sequence[OrphanedRanges] = ()
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
    """There is one metadata store, however many brokers report it."""
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
        # Until others have taken its topics the messages cannot be counted, only attributed.
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
    here = {broker.broker for broker in facts.brokers if broker.life is Life.ANSWERS}
    is_back = bool(whose) and here.issuperset(whose)
    yield Condition(
        "DanubeOrphanRange",
        Severity.WARNING,
        f"up to {count(sum(each.offsets for each in orphans), 'message')} of {count(len(topics), 'topic')} "
        f"({_named(topics)}) wait to be rescued from the disk of {on}",
        "it is back and brings them: if that lasts minutes, its log says why"
        if is_back
        else "start that broker again on its data directory: it brings them",
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


def _since(since_ms: int | None, now_ms: int) -> str:
    if since_ms is None:
        return ""
    time = datetime.fromtimestamp(since_ms / 1000, UTC)
    return f" since {time:%H:%M:%SZ} ({words((now_ms - since_ms) / 1000)})"


def _named(topics: Sequence[str]) -> str:
    more = f" and {len(topics) - NAMED_MAX:,} more" if len(topics) > NAMED_MAX else ""
    return ", ".join(topics[:NAMED_MAX]) + more
