"""What a broker prints at /metrics, as numbers per topic, per subscription and of the broker itself.

    parse(text).topics["/default/orders"].messages_in       a counter, as the broker said it

Parsing can be done in steps, for a loop that has other things to do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Generator, Mapping
from typing import Final, NamedTuple

LINES_PER_STEP: Final = 2_000
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
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")


class TopicCounts(NamedTuple):
    messages_in: float = 0.0
    bytes_in: float = 0.0
    producers: float = 0.0
    orphans: float = 0.0  # ranges that wait on the disk of a broker that is away


class SubscriptionCounts(NamedTuple):
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

    topics: Mapping[str, TopicCounts]
    subscriptions: Mapping[tuple[str, str], SubscriptionCounts]
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
                row = subscriptions[place] = [*SubscriptionCounts()]
            row[SUBSCRIPTION_COUNTS[name]] = number_of(value)
        elif name in TOPIC_COUNTS:
            names = known.get(labels) or known.setdefault(labels, labels_of(labels))
            topic = names.get("topic", "")
            row = topics.get(topic)
            if row is None:
                row = topics[topic] = [*TopicCounts()]
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
        {topic: TopicCounts(*row) for topic, row in topics.items()},
        {place: SubscriptionCounts(*row) for place, row in subscriptions.items()},
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
