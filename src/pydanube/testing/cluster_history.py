"""What happened in one run of a cluster, and whether it was right.

The record is made by clients, from the outside: what they sent, what was acknowledged, what they received. `check`
compares it with what the log holds at the end. Nothing here knows how brokers work, so it judges simulated clusters,
real ones, and anybody's own soak test alike.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Acked(NamedTuple):
    """A producer was told that its message is safe."""

    topic: str
    message: str
    offset: int
    epoch: int
    at: float


class Got(NamedTuple):
    """A consumer received a message."""

    topic: str
    subscription: str
    message: str
    offset: int
    attempt: int
    at: float


@dataclass(slots=True)
class History:
    acked: list[Acked] = field(default_factory=list)
    got: list[Got] = field(default_factory=list)
    sent: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))  # topic -> messages tried
    subscribed: dict[tuple[str, str], int] = field(default_factory=dict)  # (topic, subscription) -> first offset
    cursors: dict[tuple[str, str], list[int]] = field(default_factory=lambda: defaultdict(list))  # as stored, in order
    confirmed_acks: dict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))


class Final(NamedTuple):
    """A topic at the end: its messages by offset, where it begins and ends, and the offsets that no message has."""

    topic: str
    first: int
    head: int
    messages: Mapping[int, str]
    voids: Sequence[tuple[int, int]]


def check(history: History, finals: Sequence[Final]) -> list[str]:
    """Every rule that was broken, in words. Empty: all was well."""
    problems: list[str] = []
    for final in finals:
        for rule in (
            lost_writes,
            twice_given_offsets,
            unexplained_gaps,
            phantoms,
            undelivered,
            inventions,
            backward_cursors,
        ):
            problems += [f"{rule.__name__}: {final.topic}: {problem}" for problem in rule(history, final)]
    return problems


def lost_writes(history: History, final: Final) -> Iterator[str]:
    """Every acknowledged message is in the log, at the offset that its producer was told."""
    for acked in history.acked:
        if acked.topic != final.topic or acked.offset < final.first:
            continue
        found = final.messages.get(acked.offset)
        if found != acked.message:
            yield f"{acked.message!r}, acknowledged at {acked.offset} in epoch {acked.epoch}; there is {found!r}"


def twice_given_offsets(history: History, final: Final) -> Iterator[str]:
    """No offset was given to two messages."""
    given: dict[int, Acked] = {}
    for acked in history.acked:
        if acked.topic == final.topic:
            other = given.setdefault(acked.offset, acked)
            if other.message != acked.message:
                yield f"offset {acked.offset} for {other.message!r} and {acked.message!r}"


def unexplained_gaps(history: History, final: Final) -> Iterator[str]:
    """Every offset from the first to the head has a message, or is recorded as void."""
    at = final.first
    for offset in sorted(final.messages):
        if offset > at and not _covered(final.voids, at, offset):
            yield f"offsets {at} to {offset - 1} are nowhere"
        at = offset + 1
    if at < final.head and not _covered(final.voids, at, final.head):
        yield f"offsets {at} to {final.head - 1} are nowhere"


def phantoms(history: History, final: Final) -> Iterator[str]:
    """What a consumer received is in the log: at that offset, or, if its producer sent it again, at another."""
    everywhere = set(final.messages.values())
    for got in history.got:
        if got.topic == final.topic and got.offset >= final.first and got.message not in everywhere:
            yield f"{got.subscription} received {got.message!r} at {got.offset}, which is not in the log"


def inventions(history: History, final: Final) -> Iterator[str]:
    """The log holds nothing that nobody sent."""
    for offset, message in final.messages.items():
        if message not in history.sent[final.topic]:
            yield f"offset {offset} has {message!r}, which nobody sent"


def undelivered(history: History, final: Final) -> Iterator[str]:
    """Every message behind a subscription's start reached one of its consumers."""
    received: dict[str, set[str]] = defaultdict(set)
    for got in history.got:
        if got.topic == final.topic:
            received[got.subscription].add(got.message)
    for (topic, subscription), start in history.subscribed.items():
        if topic != final.topic:
            continue
        missing = [
            (offset, message)
            for offset, message in final.messages.items()
            if offset >= start and message not in received[subscription]
        ]
        if missing:
            yield f"{subscription} never received {len(missing)} messages, the first {sorted(missing)[0]}"


def backward_cursors(history: History, final: Final) -> Iterator[str]:
    for (topic, subscription), stored in history.cursors.items():
        if topic == final.topic:
            for before, after in zip(stored, stored[1:], strict=False):
                if after < before:
                    yield f"cursor of {subscription} went from {before} to {after}"


def _covered(ranges: Sequence[tuple[int, int]], first: int, end: int) -> bool:
    for start, stop in sorted(ranges):
        if start <= first < stop:
            first = stop
    return first >= end
