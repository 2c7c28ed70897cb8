"""What a topic, a subscription or a broker looks like to people: words for states, rows for tables, charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from pydanube.core.conditions import count as counted
from pydanube.core.names import TopicName
from pydanube.web.charts import Chart, Line, Part, Tier, chart
from pydanube.web.gateway import Broker, TopicRow
from pydanube.web.operations import Operations
from pydanube.web.samples import Samples, Thing, sum_of
from pydanube.wire._pb.pydanube import admin_pb2 as ours

SEVERITY: Final = ("bad", "warn", "moving", "ok", "idle")  # kinds of chips
PAST_SECONDS: Final = 15 * 60  # that a chart shows if nobody says otherwise
LAGGING_MESSAGES: Final = 1_000
LAGGING_SECONDS: Final = 10  # of what comes in


class Chip(NamedTuple):
    """A state in a word. `kind` is a class of the style sheet: ok, idle, moving, warn, bad."""

    kind: str
    word: str
    why: str = ""


ORPHAN: Final = Chip("warn", "orphan", "some of its messages are on the disk of a broker that is away")


def topic_chip(row: TopicRow, thing: Thing, operations: Operations) -> Chip:
    if operations.running("move", row.name) is not None:
        return Chip("moving", "moving", "on its way to another broker")
    if not row.broker_id:
        return Chip("bad", "no owner", "nobody serves it just now; its page says why")
    return flow_chip(thing)


def flow_chip(thing: Thing, messages_in: float | None = None) -> Chip:
    """How what comes in and what goes out get along. What comes in, of a subscription, is what its topic gets."""
    if thing.level("blocked"):
        return Chip("bad", "blocked", "a message failed too often and blocks what is behind it")
    if thing.level("orphans"):
        return ORPHAN
    if is_lagging(thing, messages_in):
        return Chip("warn", "lagging", f"{counted(thing.lag or 0, 'message')} behind")
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


def broker_chip(broker: Broker, samples: Samples) -> Chip:
    if broker.broker_id in samples.failures:
        return Chip("bad", "silent", samples.failures[broker.broker_id])
    numbers = samples.numbers(broker.broker_id)
    if numbers is not None and numbers.broker.get("danube_broker_may_serve") == 0:
        return Chip("bad", "fenced", "its lease was not renewed in time: it serves nothing until it is")
    kind = {"active": "ok", "draining": "moving"}.get(broker.status, "warn")
    return Chip(kind, broker.status)


# --- tables -----------------------------------------------------------------------------------------------


class TopicLine(NamedTuple):
    row: TopicRow
    thing: Thing
    chip: Chip
    owner: str  # where it is, for people
    parts: Sequence[TopicLine] = ()  # of a partitioned topic, by number


SORTS: Final[Mapping[str, Callable[[TopicLine], tuple[float, str]]]] = {
    "name": lambda line: (0.0, line.row.name),
    "in": lambda line: (-line.thing.messages_in, line.row.name),
    "out": lambda line: (-line.thing.messages_out, line.row.name),
    "lag": lambda line: (-(line.thing.lag if line.thing.lag is not None else -1), line.row.name),
    "owner": lambda line: (0.0, f"{line.owner} {line.row.name}"),
}


def topic_lines(
    rows: Sequence[TopicRow], samples: Samples, operations: Operations, brokers: Sequence[Broker]
) -> list[TopicLine]:
    addresses = {each.broker_id: each.address.rpartition("://")[2] for each in brokers}
    return [
        TopicLine(
            row, samples.topic(row.name), topic_chip(row, samples.topic(row.name), operations),
            addresses.get(row.broker_id, row.broker_id),
        )
        for row in rows
    ]  # fmt: skip


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
        chip = chip._replace(why=f"{worst.row.name}: {chip.why}")
    elif is_lagging(thing):  # none of them by itself
        chip = flow_chip(thing)
    return TopicLine(row, thing, chip, parts[0].owner if is_one else f"{len(owners)} brokers", parts)


def subscription_lags(topics: Sequence[str], samples: Samples) -> dict[str, float]:
    """By subscription, over all partitions; without those whose lag is not known in any of them."""
    wanted, found = set(topics), dict[str, float]()
    for (topic, name), thing in samples.subscriptions.items():
        if topic in wanted and thing.lag is not None:
            found[name] = found.get(name, 0.0) + thing.lag
    return found


# --- pictures -----------------------------------------------------------------------------------------------


def throughput(samples: Samples, thing: Thing, title: str = "Throughput", *, seconds: int = PAST_SECONDS) -> Chart:
    return chart(
        title,
        "messages/s",
        [
            _flow("in", 1, samples, thing, "messages_in", seconds),
            _flow("out", 2, samples, thing, "messages_out", seconds),
        ],
    )


def delivered(samples: Samples, thing: Thing, *, seconds: int = PAST_SECONDS) -> Chart:
    return chart(
        "Delivered",
        "messages/s",
        [
            _flow("out", 2, samples, thing, "messages_out", seconds),
            _flow("again", 4, samples, thing, "redeliveries", seconds),
        ],
    )


def lag_chart(samples: Samples, thing: Thing, *, seconds: int = PAST_SECONDS) -> Chart:
    series = samples.past(thing, "lag", seconds)
    if thing.lag is not None:
        series[-1] = (series[-1][0], float(thing.lag))
    return chart("Lag", "messages", [Line("behind", 3, series, thing.lag)])


def _flow(label: str, colour: int, samples: Samples, thing: Thing, name: str, seconds: int) -> Line:
    """A rate over time. The legend says what the tile beside it says: the rate over the last few samples."""
    return Line(
        label,
        colour,
        samples.past(thing, name, seconds),
        thing.rate(name) if name in (*thing.rates, *thing.levels) else None,
    )


def tiers_of(tiers: ours.Tiers, orphans: Sequence[ours.OrphanState]) -> list[Tier]:
    """Cloud, disk, memory; and what waits on a lost broker's disk."""
    found = [
        Tier(
            "cloud",
            "Cloud",
            [Part(each.first, each.end) for each in tiers.cloud],
            "" if tiers.has_cloud else "this broker has no object store",
        ),
        Tier("disk", "Disk", [Part(each.first, each.end) for each in tiers.log]),
        Tier(
            "memory",
            "Memory",
            [Part(tiers.memory_first, tiers.head)] if tiers.HasField("memory_first") else [],
        ),
    ]
    if orphans:
        found.append(Tier("orphan", "Orphan", [Part(each.first, each.end) for each in orphans]))
    return found
