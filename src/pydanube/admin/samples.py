"""Metrics of brokers in, rates and series out: a quarter of an hour of samples, six hours of minutes.

    samples = Samples()
    samples.add("17", parse(text), at=clock())          every few seconds, for every broker
    samples.end_round(["17"], at=clock())               when all brokers were asked
    samples.topic("/default/orders").messages_in        per second, at the moment
    samples.series(samples.topic("/default/orders"), "lag")     [(time, value or None), …], one per slot
    samples.known_part(samples.cluster, "messages_in", 900)     of a sum, where a part of it is not known

Nothing here reads a clock or a socket: `sampler.py` does. Time is seconds since 1970, as the caller says.

A counter that shrank began again at 0, as it does when its topic is opened anew. A topic that appears at a broker which
was sampled before began there at 0 too, so a move neither loses nor invents messages. Memory is bounded (`series.py`):
the first `LONG_MAX` topics and subscriptions have a past of hours, and beyond `SERIES_MAX` they have only numbers of
the moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from pydanube.admin.metrics_text import Numbers, SubscriptionCounts, TopicCounts
from pydanube.admin.series import MINUTE, MINUTES, SLOT_SECONDS, SLOTS, Series, Thing, mean_of, slot_of

LONG_MAX: Final = 1_000  # topics and subscriptions with a past of hours: a few megabytes
SERIES_MAX: Final = 6_000  # topics and subscriptions with a past
STALE_SECONDS: Final = 12  # without a sample its numbers are not known any more
GONE_SECONDS: Final = 300  # and after so long it is forgotten
STEP: Final = 250  # things per step, about a millisecond
AT_LEAST: Final = "at least "  # before a flow of the cluster: what is known of it while not all brokers are heard
ERRORS: Final = "errors "  # before a status code: the rate of sends that were refused with it

K = TypeVar("K", str, tuple[str, str])

NOTHING: Final = Thing(has_past=False)

RATES_OF_TOPICS: Final = ("messages_in", "bytes_in")
RATES_OF_SUBSCRIPTIONS: Final = ("messages_out", "bytes_out", "redeliveries")
LEVELS_OF_TOPICS: Final = ("producers", "orphans", "lag", "consumers", "subscriptions", "blocked")
FLOWS: Final = ("messages_in", "bytes_in", "messages_out", "bytes_out")


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
            return _whole([self.series(part, name, count) for part in thing.parts])
        ring = thing.rings.get(name)
        values = ring.series(slot, count) if ring is not None else iter([None] * count)
        return [(float(first + place * SLOT_SECONDS), value) for place, value in enumerate(values)]

    def past(self, thing: Thing, name: str, seconds: int) -> Series:
        """The last `seconds`, up to MINUTES: one value per slot as far as slots reach, else the mean of each minute."""
        if seconds <= SLOTS * SLOT_SECONDS:
            return self.series(thing, name, max(seconds // SLOT_SECONDS, 2))
        if thing.parts:
            return _whole([self.past(part, name, seconds) for part in thing.parts])
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
                values[place] = mean_of(same)
        return [(float((first + place) * 60), value) for place, value in enumerate(values)]

    def known_part(self, thing: Thing, name: str, seconds: int) -> Series:
        """Of a sum, where `past` has nothing because a part is not known: the rest. None everywhere else."""
        if thing.parts:
            parts = [self.past(part, name, seconds) for part in thing.parts]
            whole, rest = _whole(parts), _rest(parts)
        else:
            whole, rest = self.past(thing, name, seconds), self.past(thing, f"{AT_LEAST}{name}", seconds)
        return [
            (at, value if known is None else None)
            for (at, known), (_, value) in zip(_without_late_looks(whole), rest, strict=True)
        ]

    def minute_series(self, thing: Thing, name: str) -> Series:
        """The same of a rate: each value is of the minute up to then, or of as much of it as was looked at."""
        found = self.series(thing, name)
        return [
            (
                at,
                None if value is None else mean_of([each for _, each in found[max(place - MINUTE + 1, 0) : place + 1]]),
            )
            for place, (at, value) in enumerate(found)
        ]

    def minute_rate(self, thing: Thing, name: str) -> float:
        """Per second, over the last minute, or as much of it as was looked at. Without a past: over a few samples."""
        known = [value for _, value in self.series(thing, name, MINUTE)]
        mean = mean_of(known)
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

    def end_round(self, brokers: Iterable[str], at: float, *, is_complete: bool = True) -> None:
        for _ in self.end_round_in_steps(brokers, at, is_complete=is_complete):
            pass

    def end_round_in_steps(self, brokers: Iterable[str], at: float, *, is_complete: bool = True) -> Iterator[None]:
        """All of `brokers` were asked: sums are made, slots are filled, what is long gone is forgotten.

        Without `is_complete` there are topics that none of them serves.
        """
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
                thing.rates.clear()  # a gap, not a 0: they are not known
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
        self._sum_up(slot, present - self.failures.keys(), is_complete and not self.failures)
        self._forget()

    def _everything(self) -> Iterator[tuple[Thing, tuple[str, ...]]]:
        for thing in list(self.brokers.values()):
            yield thing, FLOWS
        for thing in list(self.topics.values()):
            yield thing, (*FLOWS, "lag", *[name for name in thing.rates if name.startswith(ERRORS)])
        for thing in list(self.subscriptions.values()):
            yield thing, ("messages_out", "lag", "redeliveries")

    def _sum_up(self, slot: int, heard: Iterable[str], is_complete: bool) -> None:
        """What a broker said before it fell silent, or left, is no part of what flows now."""
        cluster = self.cluster
        cluster.seen_at = self.at
        brokers = [self.brokers[each] for each in heard if each in self.brokers]
        for name in FLOWS:
            cluster.levels[name] = sum(each.rate(name) for each in brokers)
            if any(each.rates for each in brokers):
                cluster.put(slot, name if is_complete else f"{AT_LEAST}{name}", cluster.levels[name])
        lags = [each.lag for each in self.topics.values() if each.lag is not None]
        cluster.levels["lag"] = float(sum(lags)) if lags else math.nan
        cluster.put(slot, "lag" if is_complete else f"{AT_LEAST}lag", cluster.levels["lag"])

    def _thing(self, things: dict[K, Thing], key: K, at: float) -> Thing:
        thing = things.get(key)
        if thing is None:
            others = len(self.topics) + len(self.subscriptions)
            thing = things[key] = Thing(has_past=others < SERIES_MAX, has_long_past=others < LONG_MAX)
        thing.seen_at = at
        return thing

    def _forget(self) -> None:
        """A topic without an owner is being moved; its past is kept until it must be gone for good."""
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


def _whole(parts: Sequence[Series]) -> Series:
    """Slot by slot; unknown where one of them is."""
    return _summed([_without_late_looks(part) for part in parts], len(parts))


def _rest(parts: Sequence[Series]) -> Series:
    """Slot by slot, what is known; unknown where none is."""
    return _summed(parts, 1)


def _summed(parts: Sequence[Series], known_min: int) -> Series:
    found: Series = []
    for column in zip(*parts, strict=True):
        known = [value for _, value in column if value is not None]
        found.append((column[0][0], sum(known) if len(known) >= known_min else None))
    return found


def _without_late_looks(series: Series) -> Series:
    """One look that came late is no gap: its slot has what the slot before has."""
    found = list(series)
    for place, (at, value) in enumerate(series):
        is_last = place + 1 == len(series)
        if value is None and place and (is_last or series[place + 1][1] is not None):
            found[place] = (at, series[place - 1][1])
    return found


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

    def add(self, said: SubscriptionCounts) -> None:
        self.count += 1
        self.consumers += said.consumers
        self.blocked = max(self.blocked, said.blocked)
        if not math.isnan(said.lag):
            self.lag = said.lag if math.isnan(self.lag) else max(self.lag, said.lag)

    def levels(self) -> tuple[float, float, float, float]:
        return self.lag, self.consumers, self.count, self.blocked


_NO_SUMS: Final = _Sums()
_NO_TOPIC: Final = TopicCounts()
_NO_SUBSCRIPTION: Final = SubscriptionCounts()


def _increment(before: float, now: float) -> float:
    return now - before if now >= before else now
