"""How busy brokers are: what they report, and three ways to make one number of it.

    fair            how many topics
    balanced        0.3 · W + 0.35 · CPU % + 0.35 · scarcity of memory
                    W = 0.2 · topics + 0.3 · Mbit/s + 0.3 · (producers + consumers) + 0.2 · backlog / 10,000
    weighted_load   every figure as a part of the cluster's largest; whichever is largest here counts most

What is used of a machine's memory is caches and neighbours, and no topic takes it along: it counts where it is scarce,
0 up to 70 % in use, 100 when all is. In `weighted_load` what machines are busy with is a part of 70 % at least, for the
same reason: of machines that do next to nothing none is the busy one.

What a broker does not say of itself (an older one, one that has just come) is unknown and not nothing: it counts as the
mean of those that say it, so that no broker looks idle because it is silent.

A report is up to one interval old, and topics move in between. So `measure` takes who has which topics from the
assignments, and only the figures of a topic from the reports: a topic counts where it is, immediately.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self

from pydanube.core.names import BrokerId, TopicName
from pydanube.core.plain import fields_of
from pydanube.errors import InvalidName

BACKLOG_UNIT: Final = 10_000
BUSY: Final = 0.7  # beyond this part of the cluster's largest figure, a figure is what the broker lacks most
SCARCE: Final = 70.0  # percent in use from which a machine's memory is scarce; and its other figures count in full
TOPICS_REPORTED_MAX: Final = 1_000  # some 250 bytes each; a value in the store has 1.5 MiB
QUIET_BYTES_MAX: Final = 1024 * 1024  # some 5,000 topics
QUIET_SECONDS: Final = 300.0  # until topics that became quiet are written as such

STRATEGIES: Final = ("fair", "balanced", "weighted_load")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicLoad:
    """One topic in a report. `age_seconds` is how long its owner has served it."""

    topic_name: str
    message_rate: float = 0.0
    byte_rate: float = 0.0
    producer_count: int = 0
    consumer_count: int = 0
    subscription_count: int = 0
    backlog_messages: int = 0
    age_seconds: float = 0.0

    @property
    def byte_rate_mbps(self) -> float:
        return self.byte_rate * 8 / 1e6

    @property
    def connections(self) -> int:
        return self.producer_count + self.consumer_count

    @property
    def score(self) -> float:
        """What moving it would take from a broker, roughly."""
        return 0.5 * self.byte_rate_mbps + 0.3 * self.connections + 0.2 * self.backlog_messages / BACKLOG_UNIT


class ResourceUsage(NamedTuple):
    """What a machine is busy with, in percent; None where nothing measures it."""

    cpu: float | None = None
    memory: float | None = None
    disk: float | None = None  # of the time it was busy


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a broker says about itself every interval; None where nothing measures it.

    Usages are percentages of what the machine has. `network` is what topics took in and gave out, in Mbit/s.
    """

    broker_id: int
    timestamp: int  # milliseconds since 1970
    cpu: float | None = None
    memory: float | None = None
    disk: float | None = None
    network: float | None = None
    topics: Sequence[TopicLoad] = ()

    def to_bytes(self, quiet: Sequence[TopicLoad] = (), *, topics_max: int = TOPICS_REPORTED_MAX) -> bytes:
        """As the reference writes it, with at most the busiest thousand topics. The `quiet` ones are only counted."""
        used = {"CPU": self.cpu, "Memory": self.memory, "DiskIO": self.disk, "NetworkIO": self.network}
        busiest = sorted(self.topics, key=lambda topic: (-topic.byte_rate, topic.topic_name))[:topics_max]
        return json.dumps(
            {
                "broker_id": self.broker_id,
                "timestamp": self.timestamp,
                "resources_usage": [{"resource": k, "usage": round(v, 1)} for k, v in used.items() if v is not None],
                "topics": [{**fields_of(topic), "byte_rate_mbps": topic.byte_rate_mbps} for topic in busiest],
                "topics_len": len(self.topics) + len(quiet),
                "total_throughput_mbps": sum(topic.byte_rate_mbps for topic in self.topics),
                "total_message_rate": sum(topic.message_rate for topic in self.topics),
                "total_lag_messages": sum(topic.backlog_messages for topic in (*self.topics, *quiet)),
            }
        ).encode()

    def with_quiet(self, quiet: Self | None) -> Self:
        """The whole report of a broker that wrote `quiet` before, and since then only topics that were not so."""
        if quiet is None:
            return self
        told = {topic.topic_name for topic in self.topics}
        passed = max(0.0, (self.timestamp - quiet.timestamp) / 1000)
        unchanged = [
            replace(topic, age_seconds=topic.age_seconds + passed)
            for topic in quiet.topics
            if topic.topic_name not in told
        ]
        return replace(self, topics=(*self.topics, *unchanged))

    @classmethod
    def from_bytes(cls, value: bytes) -> Self | None:
        """None for what is no report."""
        try:
            found = json.loads(value)
            usages = {each["resource"]: float(each["usage"]) for each in found.get("resources_usage", ())}
            return cls(
                broker_id=int(found["broker_id"]),
                timestamp=int(found.get("timestamp", 0)),
                cpu=usages.get("CPU"),
                memory=usages.get("Memory"),
                disk=usages.get("DiskIO"),
                network=usages.get("NetworkIO"),
                topics=tuple(_topic(each) for each in found.get("topics", ())),
            )
        except (ValueError, TypeError, KeyError, AttributeError):
            return None


def _topic(stored: Mapping[str, Any]) -> TopicLoad:
    return TopicLoad(
        topic_name=str(stored["topic_name"]),
        message_rate=float(stored.get("message_rate", 0)),
        byte_rate=float(stored.get("byte_rate", 0)),
        producer_count=int(stored.get("producer_count", 0)),
        consumer_count=int(stored.get("consumer_count", 0)),
        subscription_count=int(stored.get("subscription_count", 0)),
        backlog_messages=int(stored.get("backlog_messages", 0)),
        age_seconds=float(stored.get("age_seconds", 0)),
    )


# --- what is written of it -------------------------------------------------------------------------------


class Written(NamedTuple):
    """`quiet` is None if what was written last is still right."""

    report: bytes
    quiet: bytes | None


class Reporting:
    """What a broker writes of its load each time: a thousand topics are 200 KB, and in most of them nothing happens.

    Topics that are as they were stand in a value of their own. It is written anew when one of them has left the broker,
    and every few minutes if more have become quiet. The report has all others. Together they are always the whole.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, ...]] = {}  # the figures of the last report
        self._quiet: dict[str, tuple[int, ...]] = {}  # those that were written as quiet
        self._quiet_at: float | None = None

    def step(self, now: float, report: LoadReport) -> Written:
        """`now` never goes back. Who cannot write what is returned begins anew, with another `Reporting`."""
        figures = {topic.topic_name: _still(topic) for topic in report.topics}
        idle = [
            topic
            for topic in report.topics
            if topic.message_rate == topic.byte_rate == 0 and self._last.get(topic.topic_name) == _still(topic)
        ]
        self._last = figures
        quiet = [topic for topic in idle if self._quiet.get(topic.topic_name) == figures[topic.topic_name]]
        is_wrong = any(name not in figures for name in self._quiet)
        may_write = self._quiet_at is None or now - self._quiet_at >= QUIET_SECONDS
        written: bytes | None = None
        if is_wrong or (may_write and len(quiet) < len(idle)):
            quiet = idle
            self._quiet = {topic.topic_name: figures[topic.topic_name] for topic in idle}
            self._quiet_at = now
            written = _bounded(replace(report, topics=idle))
        told = {topic.topic_name for topic in quiet}
        others = replace(report, topics=[topic for topic in report.topics if topic.topic_name not in told])
        return Written(others.to_bytes(quiet), written)


def _bounded(report: LoadReport) -> bytes:
    """With as many topics as fit: names may be long."""
    topics_max = len(report.topics)
    while len(written := report.to_bytes(topics_max=topics_max)) > QUIET_BYTES_MAX:
        topics_max //= 2
    return written


def _still(topic: TopicLoad) -> tuple[int, ...]:
    """What is the same as long as nothing happens."""
    return topic.producer_count, topic.consumer_count, topic.subscription_count, topic.backlog_messages


# --- one broker's figures -------------------------------------------------------------------------------


class Figures(NamedTuple):
    """A broker's load before a strategy makes one number of it."""

    topics: int = 0
    mbps: float = 0.0
    connections: int = 0
    backlog: int = 0
    cpu: float | None = None
    memory: float | None = None
    disk: float | None = None
    network: float | None = None

    def plus(self, topic: TopicLoad | None, sign: int = 1) -> Figures:
        """With one topic more, or less; None: a topic without a report. The figures of the machine stay."""
        if topic is None:
            return self._replace(topics=self.topics + sign)
        return self._replace(
            topics=self.topics + sign,
            mbps=self.mbps + sign * topic.byte_rate_mbps,
            connections=self.connections + sign * topic.connections,
            backlog=self.backlog + sign * topic.backlog_messages,
        )


def move_topic(topic: TopicLoad | None, source: Figures, target: Figures) -> tuple[Figures, Figures]:
    """Both brokers as they will be: the topic takes its part of the CPU and of the network with it.

    Its part is that of the traffic. Where there is hardly any, something else uses the CPU, which stays.
    """
    part = min(topic.byte_rate_mbps / max(source.mbps, 1.0), 1.0) if topic is not None else 0.0
    less, more = source.plus(topic, -1), target.plus(topic)
    for name in ("cpu", "network"):
        there, here = getattr(source, name), getattr(target, name)
        if there is not None and here is not None:
            less = less._replace(**{name: there * (1 - part)})
            more = more._replace(**{name: here + there * part})
    return less, more


def loads_of_topics(reports: Iterable[LoadReport]) -> dict[TopicName, TopicLoad]:
    """The newest word on each topic."""
    found: dict[TopicName, TopicLoad] = {}
    for report in sorted(reports, key=lambda report: (report.timestamp, report.broker_id)):
        for topic in report.topics:
            try:
                found[TopicName(topic.topic_name)] = topic
            except InvalidName:
                continue
    return found


def measure(
    topics_of: Mapping[BrokerId, Collection[TopicName]], reports: Mapping[BrokerId, LoadReport]
) -> dict[BrokerId, Figures]:
    """The figures of every broker in `topics_of`."""
    return _measure(topics_of, reports, loads_of_topics(reports.values()))


def _measure(
    topics_of: Mapping[BrokerId, Collection[TopicName]],
    reports: Mapping[BrokerId, LoadReport],
    known: Mapping[TopicName, TopicLoad],
) -> dict[BrokerId, Figures]:
    measured = {}
    for broker, topics in topics_of.items():
        report = reports.get(broker)
        figures = Figures()
        if report is not None:
            figures = Figures(cpu=report.cpu, memory=report.memory, disk=report.disk, network=report.network)
        for topic in topics:
            figures = figures.plus(known.get(topic))
        measured[broker] = figures
    return measured


class LoadTally:
    """The figures of every broker, kept up to date topic by topic. The same as `measure` of all of them.

    A report changes what is known of many topics: then everything is counted anew, on the next read.
    """

    def __init__(self) -> None:
        self._assigned: dict[BrokerId, dict[TopicName, None]] = {}
        self._reports: dict[BrokerId, LoadReport] = {}
        self._known: dict[TopicName, TopicLoad] | None = {}
        self._figures: dict[BrokerId, Figures] = {}

    @property
    def known(self) -> Mapping[TopicName, TopicLoad]:
        """The newest word on each topic."""
        if self._known is None:
            self._known = loads_of_topics(self._reports.values())
        return self._known

    @property
    def figures(self) -> Mapping[BrokerId, Figures]:
        """Of those that have topics or have reported."""
        if not self._figures:
            brokers = self._assigned.keys() | self._reports.keys()
            topics_of = {broker: self._assigned.get(broker, {}) for broker in sorted(brokers)}
            self._figures = _measure(topics_of, self._reports, self.known)
        return self._figures

    def assign(self, broker: BrokerId, topic: TopicName) -> None:
        topics = self._assigned.setdefault(broker, {})
        if topic not in topics:
            topics[topic] = None
            self._count(broker, topic, 1)

    def unassign(self, broker: BrokerId, topic: TopicName) -> None:
        topics = self._assigned.get(broker, {})
        if topic in topics:
            del topics[topic]
            self._count(broker, topic, -1)
            if not topics:
                del self._assigned[broker]

    def report(self, broker: BrokerId, report: LoadReport | None) -> None:
        """None: it is gone."""
        if report is not None:
            self._reports[broker] = report
        else:
            self._reports.pop(broker, None)
        self._known = None
        self._figures = {}

    def _count(self, broker: BrokerId, topic: TopicName, sign: int) -> None:
        if self._figures:
            self._figures[broker] = self._figures.get(broker, Figures()).plus(self.known.get(topic), sign)


# --- one number -----------------------------------------------------------------------------------------


def weighs(strategy: str, measured: Mapping[BrokerId, Figures]) -> bool:
    """Whether the number means work. Otherwise it is the number of topics, which moves by ones."""
    if strategy == "balanced":
        return any(each.cpu is not None or each.memory is not None for each in measured.values())
    assert strategy in STRATEGIES, strategy
    return strategy == "weighted_load"


def rank(strategy: str, measured: Mapping[BrokerId, Figures]) -> dict[BrokerId, float]:
    """The load of each broker; what it means depends on the strategy, and only differences matter."""
    if not weighs(strategy, measured):
        return {broker: float(figures.topics) for broker, figures in measured.items()}
    whole = _with_means(measured)
    if strategy == "weighted_load":
        return _weighted(whole)
    return {broker: _balanced(figures) for broker, figures in whole.items()}


def _with_means(measured: Mapping[BrokerId, Figures]) -> dict[BrokerId, Figures]:
    """An unknown figure of a broker is the mean of the others'."""

    def mean(values: Iterable[float | None]) -> float:
        said = [value for value in values if value is not None]
        return sum(said) / len(said) if said else 0.0

    every = list(measured.values())
    cpu, memory = mean(each.cpu for each in every), mean(each.memory for each in every)
    disk, network = mean(each.disk for each in every), mean(each.network for each in every)
    return {
        broker: figures._replace(
            cpu=cpu if figures.cpu is None else figures.cpu,
            memory=memory if figures.memory is None else figures.memory,
            disk=disk if figures.disk is None else figures.disk,
            network=network if figures.network is None else figures.network,
        )
        for broker, figures in measured.items()
    }


def _balanced(figures: Figures) -> float:
    work = (
        0.2 * figures.topics
        + 0.3 * figures.mbps
        + 0.3 * figures.connections
        + 0.2 * figures.backlog / BACKLOG_UNIT
    )  # fmt: skip
    return 0.3 * work + 0.35 * (figures.cpu or 0.0) + 0.35 * _scarcity(figures.memory)


def _scarcity(used: float | None) -> float:
    """Of memory that is in use by so many percent."""
    return max(0.0, (used or 0.0) - SCARCE) * 100 / (100 - SCARCE)


def _weighted(measured: Mapping[BrokerId, Figures]) -> dict[BrokerId, float]:
    # A figure that is small everywhere must not decide: the largest counts as so much at least.
    def parts(pick: Callable[[Figures], float | None], least: float) -> dict[BrokerId, float]:
        values = {broker: float(pick(figures) or 0.0) for broker, figures in measured.items()}
        largest = max([least, *values.values()])
        return {broker: value / largest for broker, value in values.items()}

    cpu, disk = parts(lambda each: each.cpu, SCARCE), parts(lambda each: each.disk, SCARCE)
    memory = parts(lambda each: _scarcity(each.memory), SCARCE)
    network, throughput = parts(lambda each: each.network, 1.0), parts(lambda each: each.mbps, 1.0)
    topics = parts(lambda each: each.topics, 1.0)
    loads = {}
    for broker in measured:
        c, m, t, n, k = cpu[broker], memory[broker], throughput[broker], network[broker], topics[broker]
        d = disk[broker]
        most = max(c, m, t, n, k, d)
        if most <= BUSY:
            load = 0.25 * k + 0.25 * c + 0.25 * m + 0.15 * t + 0.1 * n
        elif most == c:
            load = 0.5 * c + 0.2 * m + 0.15 * t + 0.15 * k
        elif most == m:
            load = 0.5 * m + 0.2 * c + 0.15 * t + 0.15 * k
        elif most == t:
            load = 0.5 * t + 0.2 * n + 0.15 * c + 0.15 * m
        elif most == n:
            load = 0.5 * n + 0.2 * t + 0.15 * c + 0.15 * m
        elif most == d:
            load = 0.5 * d + 0.2 * t + 0.15 * c + 0.15 * k
        else:
            load = 0.5 * k + 0.2 * c + 0.2 * m + 0.1 * t
        loads[broker] = 100 * load
    return loads


# --- how even the cluster is ----------------------------------------------------------------------------


class Balance(NamedTuple):
    """How evenly the load lies. `variation` is the standard deviation as a part of the mean."""

    loads: Mapping[BrokerId, float]
    mean: float
    deviation: float
    variation: float

    @property
    def overloaded(self) -> list[BrokerId]:
        """Busiest first."""
        above = self.mean + self._margin()
        found = [broker for broker, load in self.loads.items() if load > above]
        return sorted(found, key=lambda broker: (-self.loads[broker], broker))

    @property
    def underloaded(self) -> list[BrokerId]:
        """Idlest first."""
        below = self.mean - self._margin()
        found = [broker for broker, load in self.loads.items() if load < below]
        return sorted(found, key=lambda broker: (self.loads[broker], broker))

    def _margin(self) -> float:
        # A deviation of almost nothing would call every difference an overload.
        deviation = max(self.deviation, 2.0, 0.2 * self.mean)
        return (0.5 if self.variation > 0.3 else 1.0) * deviation


def balance(loads: Mapping[BrokerId, float]) -> Balance:
    if not loads:
        return Balance({}, 0.0, 0.0, 0.0)
    mean = sum(loads.values()) / len(loads)
    deviation = math.sqrt(sum((load - mean) ** 2 for load in loads.values()) / len(loads))
    return Balance(loads, mean, deviation, deviation / mean if mean > 0 else 0.0)
