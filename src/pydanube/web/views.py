"""What a topic, a subscription or a broker looks like to people: words for states, rows for tables, charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from pydanube.admin import values
from pydanube.admin.gateway import KnownBroker, TopicRow
from pydanube.admin.samples import Samples, sum_of
from pydanube.admin.series import Thing
from pydanube.core.cluster.conditions import count as counted
from pydanube.core.names import TopicName
from pydanube.web.charts import Chart, ChartPart, Line, Tier, chart
from pydanube.web.operations import Operations

SEVERITY: Final = ("bad", "warn", "moving", "ok", "idle")  # kinds of chips
PAST_SECONDS: Final = 15 * 60  # that a chart shows unless the query says otherwise
LAGGING_MESSAGES: Final = 1_000
LAGGING_SECONDS: Final = 10  # of what comes in


class Chip(NamedTuple):
    """A state in a word. `kind` is a class of the style sheet: ok, idle, moving, warn, bad."""

    kind: str
    word: str
    why: str = ""


ORPHAN: Final = Chip("warn", "orphan", "some of its messages are on the disk of a broker that is away")


PARTLY_UNKNOWN: Final = Chip("bad", "unknown", "the broker of a partition does not answer")
UNSAMPLED: Final = Chip("idle", "unknown", "its broker was not asked for its numbers yet")


def silence(broker_id: str, samples: Samples, present: Collection[str]) -> Chip | None:
    """The state of everything on a broker that does not answer, or that is not in `present` any more; None if it does.

    Numbers of such a broker are the last ones or none: they say nothing about now.
    """
    if broker_id in samples.failures:
        return Chip("bad", "unknown", f"its broker does not answer: {samples.failures[broker_id]}")
    if broker_id and broker_id not in present:
        return Chip("bad", "unknown", "its broker is gone, and no other one serves it yet")
    return None


def topic_chip(row: TopicRow, thing: Thing, operations: Operations, silent: Chip | None = None) -> Chip:
    if operations.running("move", row.name) is not None:
        return Chip("moving", "moving", "on its way to another broker")
    if not row.broker_id:
        return Chip("bad", "no owner", "no broker serves it just now; its page says why")
    if silent is not None:
        return silent
    return flow_chip(thing)


def flow_chip(thing: Thing, messages_in: float | None = None) -> Chip:
    """How what comes in and what goes out get along. What comes in, of a subscription, is what its topic gets."""
    if thing.level("blocked"):
        return Chip("bad", "blocked", "a message failed too often and blocks what is behind it")
    if thing.level("orphans"):
        return ORPHAN
    if is_lagging(thing, messages_in):
        return Chip("warn", "lagging", f"{counted(thing.lag or 0, 'message')} behind")
    if not thing.is_sampled:
        return UNSAMPLED
    if not thing.messages_in and not thing.messages_out:
        return Chip("idle", "idle", "nothing comes in and nothing goes out")
    return Chip("ok", "ok", "keeps up")


def is_lagging(thing: Thing, messages_in: float | None = None) -> bool:
    """Far behind, and by more than a few seconds of what comes in."""
    lag, arriving = thing.lag or 0, thing.messages_in if messages_in is None else messages_in
    return lag >= LAGGING_MESSAGES and lag > LAGGING_SECONDS * arriving


def with_lag(thing: Thing, lag: int | None) -> Thing:
    """The thing as its broker has just described it: tile, legend and state then show one number."""
    return thing if lag is None else replace(thing, levels={**thing.levels, "lag": float(lag)})


def broker_chip(broker: KnownBroker, samples: Samples) -> Chip:
    if broker.broker_id in samples.failures:
        return Chip("bad", "silent", samples.failures[broker.broker_id])
    numbers = samples.numbers(broker.broker_id)
    if numbers is not None and numbers.broker.get("danube_broker_may_serve") == 0:
        return Chip("bad", "fenced", "its lease was not renewed in time: it serves nothing until it is")
    kind = {"active": "ok", "draining": "moving"}.get(broker.status, "warn")
    return Chip(kind, broker.status)


# --- tables -----------------------------------------------------------------------------------------------


class TopicLine(NamedTuple):
    """Its numbers are None while its broker, or that of one of its parts, does not answer."""

    row: TopicRow
    thing: Thing
    chip: Chip
    owner: str  # where it is, for people
    parts: Sequence[TopicLine] = ()  # of a partitioned topic, by number
    is_known: bool = True

    @property
    def messages_in(self) -> float | None:
        return self.thing.messages_in if self.is_known else None

    @property
    def messages_out(self) -> float | None:
        return self.thing.messages_out if self.is_known else None

    @property
    def lag(self) -> int | None:
        return self.thing.lag if self.is_known else None


SORTS: Final[Mapping[str, Callable[[TopicLine], tuple[float, str]]]] = {
    "name": lambda line: (0.0, line.row.name),
    "in": lambda line: (-(line.messages_in or 0.0), line.row.name),
    "out": lambda line: (-(line.messages_out or 0.0), line.row.name),
    "lag": lambda line: (-(line.lag if line.lag is not None else -1), line.row.name),
    "owner": lambda line: (0.0, f"{line.owner} {line.row.name}"),
}


def topic_lines(
    rows: Sequence[TopicRow], samples: Samples, operations: Operations, brokers: Sequence[KnownBroker]
) -> list[TopicLine]:
    addresses = {each.broker_id: each.address.rpartition("://")[2] for each in brokers}
    found = []
    for row in rows:
        thing, silent = samples.topic(row.name), silence(row.broker_id, samples, addresses)
        owner = addresses.get(row.broker_id, row.broker_id)
        chip = topic_chip(row, thing, operations, silent)
        found.append(TopicLine(row, thing, chip, owner, is_known=silent is None and thing.is_sampled))
    return found


def grouped(lines: Sequence[TopicLine], samples: Samples) -> list[TopicLine]:
    """Partitions as the one topic they are; everything else as it is."""
    found: dict[str, list[TopicLine]] = {}
    for line in lines:
        name = TopicName(line.row.name)
        found.setdefault(name.base if name.partition_number is not None else name, []).append(line)
    return [
        own[0] if len(own) == 1 and own[0].row.name == base else partitioned_line(base, own, samples)
        for base, own in found.items()
    ]


def partitioned_line(base: str, lines: Sequence[TopicLine], samples: Samples) -> TopicLine:
    parts = sorted(lines, key=lambda line: TopicName(line.row.name).partition_number or 0)
    owners = {line.row.broker_id for line in parts}
    is_one = len(owners) == 1
    lags = subscription_lags([line.row.name for line in parts], samples).values()
    thing = sum_of([line.thing for line in parts], max(lags, default=math.nan))
    row = TopicRow(base, next(iter(owners)) if is_one else "", parts[0].row.delivery)
    worst = min((line for line in parts), key=lambda line: SEVERITY.index(line.chip.kind))
    chip = worst.chip
    if chip.kind in ("bad", "warn", "moving"):
        chip = chip._replace(why=f"partition {TopicName(worst.row.name).partition_number}: {chip.why}")
    elif is_lagging(thing):  # none of them by itself
        chip = flow_chip(thing)
    owner = parts[0].owner if is_one else f"{len(owners)} brokers"
    return TopicLine(row, thing, chip, owner, parts, all(part.is_known for part in parts))


def subscription_lags(topics: Sequence[str], samples: Samples) -> dict[str, float]:
    """By subscription, over all partitions; without those whose lag is not known in any of them."""
    wanted, found = set(topics), dict[str, float]()
    for (topic, name), thing in samples.subscriptions.items():
        if topic in wanted and thing.lag is not None:
            found[name] = found.get(name, 0.0) + thing.lag
    return found


# --- pictures -----------------------------------------------------------------------------------------------


def throughput(
    samples: Samples,
    thing: Thing,
    title: str = "Throughput",
    *,
    seconds: int = PAST_SECONDS,
    is_known: bool = True,
) -> Chart:
    return chart(
        title,
        "messages/s",
        [
            _flow("in", 1, samples, thing, "messages_in", seconds, is_known),
            _flow("out", 2, samples, thing, "messages_out", seconds, is_known),
        ],
    )


def delivered(samples: Samples, thing: Thing, *, seconds: int = PAST_SECONDS, is_known: bool = True) -> Chart:
    return chart(
        "Delivered",
        "messages/s",
        [
            _flow("out", 2, samples, thing, "messages_out", seconds, is_known),
            _flow("again", 4, samples, thing, "redeliveries", seconds, is_known),
        ],
    )


def lag_chart(samples: Samples, thing: Thing, *, seconds: int = PAST_SECONDS, is_known: bool = True) -> Chart:
    series = samples.past(thing, "lag", seconds)
    if thing.lag is not None and is_known:
        series[-1] = (series[-1][0], float(thing.lag))
    known_part = samples.known_part(thing, "lag", seconds)
    return chart("Lag", "messages", [Line("behind", 3, series, thing.lag, is_known, known_part)])


def _flow(
    label: str, colour: int, samples: Samples, thing: Thing, name: str, seconds: int, is_known: bool = True
) -> Line:
    """A rate over time. The legend says what the tile beside it says: the rate over the last few samples."""
    current = thing.rate(name) if name in (*thing.rates, *thing.levels) else None
    known_part = samples.known_part(thing, name, seconds)
    return Line(label, colour, samples.past(thing, name, seconds), current, is_known, known_part)


def tiers_of(tiers: values.Tiers, orphans: Sequence[values.OrphanState]) -> list[Tier]:
    """Cloud, disk, memory; and what waits on a lost broker's disk."""
    found = [
        Tier(
            "cloud",
            "Cloud",
            [ChartPart(each.first, each.end) for each in tiers.cloud],
            "" if tiers.has_cloud else "this broker has no object store",
        ),
        Tier("disk", "Disk", [ChartPart(each.first, each.end) for each in tiers.log]),
        Tier(
            "memory",
            "Memory",
            [ChartPart(tiers.memory_first, tiers.head)] if tiers.HasField("memory_first") else [],
        ),
    ]
    if orphans:
        found.append(Tier("orphan", "Orphan", [ChartPart(each.first, each.end) for each in orphans]))
    return found
