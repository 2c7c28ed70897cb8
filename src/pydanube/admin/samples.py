"""Metrics of brokers in, rates and series out: a quarter of an hour of samples, six hours of minutes.

    samples = Samples()
    samples.add("17", parse(text), at=clock())          every few seconds, for every broker
    samples.end_round(["17"], at=clock())               when all brokers were asked
    samples.topic("/default/orders").messages_in        per second, just now
    samples.series(samples.topic("/default/orders"), "lag")     [(time, value or None), …], one per slot

Nothing here reads a clock or a socket: `sampler.py` does. Time is seconds since 1970, as the caller says.

A counter that shrank began again at 0, as it does when its topic is opened anew. A topic that appears at a broker which
was looked at before began there at 0 too, so a move neither loses nor invents messages. Memory is bounded: a series
takes a slot of four bytes per five seconds, and one per minute for hours if it is among the first `LONG_MAX`; what was
always 0 takes none, and beyond `SERIES_MAX` things have only numbers of the moment.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias, TypeVar

SLOT_SECONDS: Final = 5
SLOTS: Final = 192  # sixteen minutes
RECENT: Final = 3  # samples that the rate of the moment is taken from
MINUTE: Final = 12  # slots
MINUTES: Final = 360  # six hours, a mean per minute
LONG_MAX: Final = 1_000  # topics and subscriptions with a past of hours: a few megabytes
SERIES_MAX: Final = 6_000  # topics and subscriptions with a past
STALE_SECONDS: Final = 12  # without a sample its numbers are not known any more
GONE_SECONDS: Final = 300  # and after so long it is forgotten
STEP: Final = 250  # things per step, about a millisecond
LINES_PER_STEP: Final = 2_000

K = TypeVar("K", str, tuple[str, str])
Series: TypeAlias = list[tuple[float, float | None]]

# --- what a broker says -------------------------------------------------------------------------------

TOPIC_COUNTS: Final = {
    "danube_topic_messages_in_total": 0,
    "danube_topic_bytes_in_total": 1,
    "danube_topic_active_producers": 2,
    "danube_topic_orphan_ranges": 3,
}
SUBSCRIPTION_COUNTS: Final = {
    "danube_consumer_messages_out_total": 0,
    "danube_consumer_bytes_out_total": 1,
    "danube_subscription_redelivery_total": 2,
    "danube_subscription_lag_messages": 3,
    "danube_subscription_active_consumers": 4,
    "danube_subscription_pending_redelivery": 5,
    "danube_subscription_terminal_blocked": 6,
    "danube_subscription_nack_total": 7,
}
SENDS: Final = "danube_producer_send_total"
ERRORS: Final = "errors "  # before a status code: the rate of sends that were refused with it
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")


class TopicNumbers(NamedTuple):
    messages_in: float = 0.0
    bytes_in: float = 0.0
    producers: float = 0.0
    orphans: float = 0.0  # ranges that wait on the disk of a broker that is away


class SubscriptionNumbers(NamedTuple):
    messages_out: float = 0.0
    bytes_out: float = 0.0
    redeliveries: float = 0.0
    lag: float = math.nan  # NaN: a non-reliable topic's has none
    consumers: float = 0.0
    waiting: float = 0.0  # failed, to be sent again
    blocked: float = 0.0
    nacks: float = 0.0


class Numbers(NamedTuple):
    """All that one broker said at one moment. `broker` has its own metrics by their names, summed over labels."""

    topics: Mapping[str, TopicNumbers]
    subscriptions: Mapping[tuple[str, str], SubscriptionNumbers]
    broker: Mapping[str, float]
    refused: Mapping[tuple[str, str], float] = {}  # sends, by topic and status code


def parse(text: str) -> Numbers:
    """Prometheus' text format. A line that is none of ours is passed over."""
    return run(parse_in_steps(text))


def parse_in_steps(text: str) -> Generator[None, None, Numbers]:
    """The same, in steps of about a millisecond, for a loop that has other things to do."""
    topics: dict[str, list[float]] = {}
    subscriptions: dict[tuple[str, str], list[float]] = {}
    broker: dict[str, float] = {}
    refused: dict[tuple[str, str], float] = {}
    known: dict[str, dict[str, str]] = {}  # a subscription's labels stand in a dozen families
    for number, line in enumerate(text.split("\n")):
        if number % LINES_PER_STEP == LINES_PER_STEP - 1:
            yield
        if not line or line[0] == "#":
            continue
        name, brace, rest = line.partition("{")
        if not brace:
            name, _, value = line.partition(" ")
            _add(broker, name, value)
            continue
        if name.endswith("_bucket"):
            continue
        labels, _, value = rest.rpartition("} ")
        if name in SUBSCRIPTION_COUNTS:
            names = known.get(labels) or known.setdefault(labels, labels_of(labels))
            place = (names.get("topic", ""), names.get("subscription", ""))
            row = subscriptions.get(place)
            if row is None:
                row = subscriptions[place] = [*SubscriptionNumbers()]
            row[SUBSCRIPTION_COUNTS[name]] = number_of(value)
        elif name in TOPIC_COUNTS:
            names = known.get(labels) or known.setdefault(labels, labels_of(labels))
            topic = names.get("topic", "")
            row = topics.get(topic)
            if row is None:
                row = topics[topic] = [*TopicNumbers()]
            row[TOPIC_COUNTS[name]] = number_of(value)
        elif name == SENDS and 'result="error"' in labels:
            names = labels_of(labels)
            refused[names.get("topic", ""), names.get("error_code", "")] = number_of(value)
        elif name.startswith("danube_broker_") and "result=" in labels:
            result = labels_of(labels).get("result", "")
            _add(broker, f"{name}:{result}", value)
            _add(broker, name, value)
        elif "state=" in labels:
            if number_of(value):
                broker[f"{name}:{labels_of(labels).get('state', '')}"] = 1.0
        elif 'topic="' not in labels:
            _add(broker, name, value)
    return Numbers(
        {topic: TopicNumbers(*row) for topic, row in topics.items()},
        {place: SubscriptionNumbers(*row) for place, row in subscriptions.items()},
        broker,
        refused,
    )


def labels_of(text: str) -> dict[str, str]:
    return {
        name: _ESCAPED.sub(lambda found: "\n" if found[1] == "n" else found[1], value) if "\\" in value else value
        for name, value in _LABEL.findall(text)
    }


def _add(numbers: dict[str, float], name: str, value: str) -> None:
    number = number_of(value)
    if not math.isnan(number):
        numbers[name] = numbers.get(name, 0.0) + number


def number_of(text: str) -> float:
    try:
        return float(text.partition(" ")[0])  # a timestamp may follow
    except ValueError:
        return math.nan


def run(steps: Generator[None, None, Numbers]) -> Numbers:
    while True:
        try:
            next(steps)
        except StopIteration as done:
            numbers: Numbers = done.value
            return numbers


# --- one number over time -------------------------------------------------------------------------------


class Ring:
    """One number per slot of time, the last `size` of them. Nothing is kept of what was always 0."""

    __slots__ = ("_first", "_size", "_values", "last")

    def __init__(self, size: int = SLOTS) -> None:
        self._size = size
        self._values: array[float] | None = None
        self._first = -1  # the slot of the first sample
        self.last = -1

    def put(self, slot: int, value: float) -> None:
        """Of several samples in a slot the last one stays; a slot of the past is not changed."""
        if self._first < 0:
            self._first = self.last = slot
        elif slot < self.last:
            return
        if self._values is None:
            if value == 0.0:
                self.last = slot
                return
            self._values = array("f", bytes(4 * self._size))
        for missed in range(max(self.last + 1, slot - self._size + 1), slot):
            self._values[missed % self._size] = math.nan
        self.last = slot
        self._values[slot % self._size] = value

    def series(self, slot: int, count: int = SLOTS) -> Iterator[float | None]:
        """The `count` values up to and with `slot`; None where nobody looked."""
        for each in range(slot - count + 1, slot + 1):
            if each < self._first or each > self.last or each <= self.last - self._size or self._first < 0:
                yield None
            elif self._values is None:
                yield 0.0
            else:
                value = self._values[each % self._size]
                yield None if math.isnan(value) else value


def slot_of(at: float) -> int:
    return int(at // SLOT_SECONDS)


class Rate:
    """Of a counter that may be told by several brokers, one after the other."""

    __slots__ = ("_added", "_recent", "_seconds", "_slot")

    def __init__(self) -> None:
        self._recent: list[tuple[float, float]] = []  # what was added, in how many seconds
        self._slot = -1
        self._added = self._seconds = 0.0  # in that slot

    def add(self, increment: float, seconds: float, slot: int) -> None:
        if len(self._recent) >= RECENT:
            del self._recent[0]
        self._recent.append((increment, seconds))
        if slot != self._slot:
            self._slot, self._added, self._seconds = slot, 0.0, 0.0
        self._added += increment
        self._seconds += seconds

    def of_slot(self, slot: int) -> float:
        """Per second, in that slot alone; 0 if nothing was added."""
        return self._added / self._seconds if slot == self._slot and self._seconds else 0.0

    @property
    def now(self) -> float:
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(increment for increment, _ in self._recent) / seconds if seconds else 0.0


@dataclass(slots=True, eq=False)
class Thing:
    """A topic, a subscription, a broker or all of them: rates, levels and their past."""

    rates: dict[str, Rate] = field(default_factory=dict)
    levels: dict[str, float] = field(default_factory=dict)
    rings: dict[str, Ring] = field(default_factory=dict)
    seen_at: float = 0.0
    has_past: bool = True
    still: int = 0  # samples in a row that said the same
    standing: tuple[float, ...] = ()
    parts: tuple[Thing, ...] = ()  # of a sum of several: they have the past
    minutes: dict[str, Ring] = field(default_factory=dict)  # the mean of each minute, for hours
    has_long_past: bool = False

    def is_still(self, is_same: bool) -> bool:
        """Whether a sample that says the same changes nothing any more: its rates are 0 since long enough."""
        self.still = self.still + 1 if is_same else 0
        return self.still > RECENT

    @property
    def is_sampled(self) -> bool:
        """Whether a broker was heard of it lately: without that its rates are not 0, they are not known."""
        return bool(self.levels or self.rates)

    def rate(self, name: str) -> float:
        """Per second, over the last few samples. The cluster's are sums, kept as levels."""
        found = self.rates.get(name)
        return found.now if found is not None else self.level(name)

    def level(self, name: str, default: float = 0.0) -> float:
        value = self.levels.get(name, default)
        return default if math.isnan(value) else value

    def count(self, name: str, increment: float, seconds: float) -> None:
        """To be called when it was just seen."""
        rate = self.rates.get(name)
        if rate is None:
            rate = self.rates[name] = Rate()
        rate.add(increment, seconds, slot_of(self.seen_at))

    def put(self, slot: int, name: str, value: float) -> None:
        if not self.has_past or math.isnan(value):
            return
        ring = self.rings.get(name)
        if ring is None:
            ring = self.rings[name] = Ring()
        if self.has_long_past and ring.last >= 0 and ring.last // MINUTE != slot // MINUTE:
            self._keep_minute(name, ring)
        ring.put(slot, value)

    def _keep_minute(self, name: str, ring: Ring) -> None:
        """The minute that the ring has come to the end of."""
        minute = ring.last // MINUTE
        mean = _mean(list(ring.series(ring.last, ring.last - minute * MINUTE + 1)))
        if mean is not None:
            self.minutes.setdefault(name, Ring(MINUTES)).put(minute, mean)

    @property
    def messages_in(self) -> float:
        return self.rate("messages_in")

    @property
    def messages_out(self) -> float:
        return self.rate("messages_out")

    @property
    def bytes_in(self) -> float:
        return self.rate("bytes_in")

    @property
    def bytes_out(self) -> float:
        return self.rate("bytes_out")

    @property
    def redeliveries(self) -> float:
        return self.rate("redeliveries")

    @property
    def lag(self) -> int | None:
        """Of a topic: of the subscription that is furthest behind. None: nothing that could lag."""
        value = self.levels.get("lag", math.nan)
        return None if math.isnan(value) else int(value)


NOTHING: Final = Thing(has_past=False)

RATES_OF_TOPICS: Final = ("messages_in", "bytes_in")
RATES_OF_SUBSCRIPTIONS: Final = ("messages_out", "bytes_out", "redeliveries")
LEVELS_OF_TOPICS: Final = ("producers", "orphans", "lag", "consumers", "subscriptions", "blocked")
FLOWS: Final = ("messages_in", "bytes_in", "messages_out", "bytes_out")


# --- all of them ----------------------------------------------------------------------------------------


class Heard(NamedTuple):
    """What a broker said last."""

    at: float
    numbers: Numbers


class Samples:
    """Everything that was heard lately. `add` what a broker says, `end_round` when all were asked."""

    def __init__(self) -> None:
        self.brokers: dict[str, Thing] = {}
        self.topics: dict[str, Thing] = {}
        self.subscriptions: dict[tuple[str, str], Thing] = {}
        self.cluster = Thing(has_long_past=True)
        self.failures: dict[str, str] = {}  # brokers that could not be asked the last time, and why
        self.at = 0.0  # of the newest sample
        self._heard: dict[str, Heard] = {}

    # --- reading ----------------------------------------------------------------------------------------

    def topic(self, name: str) -> Thing:
        return self.topics.get(name, NOTHING)

    def subscription(self, topic: str, name: str) -> Thing:
        return self.subscriptions.get((topic, name), NOTHING)

    def broker(self, broker_id: str) -> Thing:
        return self.brokers.get(broker_id, NOTHING)

    def numbers(self, broker_id: str) -> Numbers | None:
        """All that the broker said last."""
        heard = self._heard.get(broker_id)
        return heard.numbers if heard is not None else None

    def series(self, thing: Thing, name: str, count: int = SLOTS) -> Series:
        """One value per slot, the last `count` of them up to the newest sample; None where there is none."""
        slot = slot_of(self.at)
        first = (slot - count + 1) * SLOT_SECONDS
        if thing.parts:
            return _summed([self.series(part, name, count) for part in thing.parts])
        ring = thing.rings.get(name)
        values = ring.series(slot, count) if ring is not None else iter([None] * count)
        return [(float(first + place * SLOT_SECONDS), value) for place, value in enumerate(values)]

    def past(self, thing: Thing, name: str, seconds: int) -> Series:
        """The last `seconds`, up to MINUTES: one value per slot as far as slots reach, else the mean of each minute."""
        if seconds <= SLOTS * SLOT_SECONDS:
            return self.series(thing, name, max(seconds // SLOT_SECONDS, 2))
        if thing.parts:
            return _summed([self.past(part, name, seconds) for part in thing.parts])
        now = slot_of(self.at)
        last, count = now // MINUTE, min(seconds // 60, MINUTES)
        first = last - count + 1
        kept = thing.minutes.get(name)
        values: list[float | None] = list(kept.series(last, count)) if kept is not None else [None] * count
        recent = self.series(thing, name)
        for at, value in recent:  # the minute that has not ended yet, and those of what has no longer past
            place = slot_of(at) // MINUTE - first
            if value is not None and 0 <= place < count and values[place] is None:
                same = [each for time, each in recent if slot_of(time) // MINUTE - first == place]
                values[place] = _mean(same)
        return [(float((first + place) * 60), value) for place, value in enumerate(values)]

    def minute_series(self, thing: Thing, name: str) -> Series:
        """The same of a rate: each value is of the minute up to then, or of as much of it as was looked at."""
        found = self.series(thing, name)
        return [
            (at, None if value is None else _mean([each for _, each in found[max(place - MINUTE + 1, 0) : place + 1]]))
            for place, (at, value) in enumerate(found)
        ]

    def minute_rate(self, thing: Thing, name: str) -> float:
        """Per second, over the last minute, or as much of it as was looked at. Without a past: over a few samples."""
        known = [value for _, value in self.series(thing, name, MINUTE)]
        mean = _mean(known)
        return thing.rate(name) if mean is None else mean

    # --- hearing ----------------------------------------------------------------------------------------

    def add(self, broker_id: str, numbers: Numbers, at: float) -> None:
        for _ in self.add_in_steps(broker_id, numbers, at):
            pass

    def add_in_steps(self, broker_id: str, numbers: Numbers, at: float) -> Iterator[None]:
        """The same, in steps of about a millisecond."""
        self.failures.pop(broker_id, None)
        before = self._heard.get(broker_id)
        self._heard[broker_id] = Heard(at, numbers)
        if before is not None and at <= before.at:
            before = None  # the clock was set back: no rate can be made of this one
        self.at = max(self.at, at)
        seconds = at - before.at if before is not None else 0.0
        then = before.numbers if before is not None else None
        sums: dict[str, _Sums] = {}
        for number, (place, said) in enumerate(numbers.subscriptions.items()):
            if number % STEP == STEP - 1:
                yield
            total = sums.get(place[0])
            if total is None:
                total = sums[place[0]] = _Sums()
            total.add(said)
            subscription = self._thing(self.subscriptions, place, at)
            earlier = then.subscriptions.get(place, _NO_SUBSCRIPTION) if then is not None else None
            if subscription.is_still(said == earlier):
                continue
            subscription.levels.update(
                lag=said.lag, consumers=said.consumers, waiting=said.waiting, blocked=said.blocked
            )
            if earlier is not None:
                for column, name in enumerate(RATES_OF_SUBSCRIPTIONS):
                    increment = _increment(earlier[column], said[column])
                    subscription.count(name, increment, seconds)
                    total.increments[column] += increment
        flows = dict.fromkeys(FLOWS, 0.0)
        for number, (topic, published) in enumerate(numbers.topics.items()):
            if number % STEP == STEP - 1:
                yield
            thing = self._thing(self.topics, topic, at)
            total = sums.get(topic, _NO_SUMS)
            earlier_in = then.topics.get(topic, _NO_TOPIC) if then is not None else None
            standing = (*published, *total.levels())
            if thing.is_still(standing == thing.standing and published == earlier_in and not any(total.increments)):
                continue
            thing.standing = standing
            thing.levels.update(zip(LEVELS_OF_TOPICS, standing[2:], strict=True))
            if earlier_in is None:
                continue
            for column, name in enumerate(RATES_OF_TOPICS):
                increment = _increment(earlier_in[column], published[column])
                thing.count(name, increment, seconds)
                flows[name] += increment
            for column, name in enumerate(RATES_OF_SUBSCRIPTIONS):
                thing.count(name, total.increments[column], seconds)
                if name in flows:
                    flows[name] += total.increments[column]
        for (topic, code), refused in numbers.refused.items():
            thing = self._thing(self.topics, topic, at)
            if then is not None:
                increment = _increment(then.refused.get((topic, code), 0.0), refused)
                thing.count(f"{ERRORS}{code}", increment, seconds)
        thing = self._thing(self.brokers, broker_id, at)
        if then is not None:
            for name, increment in flows.items():
                thing.count(name, increment, seconds)

    def failed(self, broker_id: str, why: str) -> None:
        """It could not be asked. What it said last stays until it is too old."""
        self.failures[broker_id] = why

    def end_round(self, brokers: Iterable[str], at: float) -> None:
        for _ in self.end_round_in_steps(brokers, at):
            pass

    def end_round_in_steps(self, brokers: Iterable[str], at: float) -> Iterator[None]:
        """All of `brokers` were asked: sums are made, slots are filled, what is long gone is forgotten."""
        self.at = at
        present = set(brokers)
        for gone in self._heard.keys() - present:
            del self._heard[gone]
        for gone in self.failures.keys() - present:
            del self.failures[gone]
        slot = slot_of(at)
        for number, (thing, names) in enumerate(self._everything()):
            if number % STEP == STEP - 1:
                yield
            if thing.seen_at < at - STALE_SECONDS:
                thing.rates.clear()  # a gap, not a 0: nobody knows
                thing.levels.clear()
                thing.still = 0
                continue
            is_seen = slot_of(thing.seen_at) == slot
            for name in names:
                rate = thing.rates.get(name)
                if rate is None:
                    thing.put(slot, name, thing.levels.get(name, math.nan))
                elif is_seen:
                    thing.put(slot, name, rate.of_slot(slot))
        self._sum_up(slot)
        self._forget()

    def _everything(self) -> Iterator[tuple[Thing, tuple[str, ...]]]:
        for thing in list(self.brokers.values()):
            yield thing, FLOWS
        for thing in list(self.topics.values()):
            yield thing, (*FLOWS, "lag", *[name for name in thing.rates if name.startswith(ERRORS)])
        for thing in list(self.subscriptions.values()):
            yield thing, ("messages_out", "lag", "redeliveries")

    def _sum_up(self, slot: int) -> None:
        cluster = self.cluster
        cluster.seen_at = self.at
        for name in FLOWS:
            cluster.levels[name] = sum(each.rate(name) for each in self.brokers.values())
            if any(each.rates for each in self.brokers.values()):
                cluster.put(slot, name, cluster.levels[name])
        lags = [each.lag for each in self.topics.values() if each.lag is not None]
        cluster.levels["lag"] = float(sum(lags)) if lags else math.nan
        cluster.put(slot, "lag", cluster.levels["lag"])

    def _thing(self, things: dict[K, Thing], key: K, at: float) -> Thing:
        thing = things.get(key)
        if thing is None:
            others = len(self.topics) + len(self.subscriptions)
            thing = things[key] = Thing(has_past=others < SERIES_MAX, has_long_past=others < LONG_MAX)
        thing.seen_at = at
        return thing

    def _forget(self) -> None:
        """A topic that nobody has for a moment is on its way; its past is kept until it must be gone for good."""
        oldest = self.at - GONE_SECONDS
        _drop(self.topics, oldest)
        _drop(self.subscriptions, oldest)
        _drop(self.brokers, oldest)


def sum_of(things: Sequence[Thing], lag: float) -> Thing:
    """Several as one, as a partitioned topic is. Who is connected is connected to every part: the largest counts."""
    levels = {name: sum(each.rate(name) for each in things) for name in (*FLOWS, "redeliveries")}
    levels |= {name: max((each.level(name) for each in things), default=0.0) for name in ("producers", "consumers")}
    levels |= {"blocked": max((each.level("blocked") for each in things), default=0.0)}
    levels |= {"orphans": sum(each.level("orphans") for each in things), "lag": lag}
    return Thing(levels=levels, has_past=False, parts=tuple(things))


def _summed(series: Sequence[Series]) -> Series:
    """Slot by slot; unknown where none is known."""
    found: Series = []
    for column in zip(*series, strict=True):
        known = [value for _, value in column if value is not None]
        found.append((column[0][0], sum(known) if known else None))
    return found


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _drop(things: dict[K, Thing], oldest: float) -> None:
    for key in [key for key, thing in things.items() if thing.seen_at < oldest]:
        del things[key]


class _Sums:
    """Of a topic's subscriptions."""

    __slots__ = ("blocked", "consumers", "count", "increments", "lag")

    def __init__(self) -> None:
        self.increments = [0.0] * len(RATES_OF_SUBSCRIPTIONS)
        self.lag = math.nan
        self.consumers = self.blocked = self.count = 0.0

    def add(self, said: SubscriptionNumbers) -> None:
        self.count += 1
        self.consumers += said.consumers
        self.blocked = max(self.blocked, said.blocked)
        if not math.isnan(said.lag):
            self.lag = said.lag if math.isnan(self.lag) else max(self.lag, said.lag)

    def levels(self) -> tuple[float, float, float, float]:
        return self.lag, self.consumers, self.count, self.blocked


_NO_SUMS: Final = _Sums()
_NO_TOPIC: Final = TopicNumbers()
_NO_SUBSCRIPTION: Final = SubscriptionNumbers()


def _increment(before: float, now: float) -> float:
    return now - before if now >= before else now
