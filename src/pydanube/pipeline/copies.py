"""Where a message may be in the log twice: only where a topic changed its owner while the message was on its way.

An owner knows what it stored of every session, and stores nothing twice. The next owner after a crash may not have
seen that a message was stored whose receipt was lost, and takes it when its producer sends it again: the same
message in two epochs. So copies are looked for among messages of two epochs of a topic, and of these among those whose
times of publishing meet: a copy keeps its time.

    epoch 3   |-------------------|
    epoch 4                    |------------------|
                               |--|   the span in which there may be copies
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import date
from typing import NamedTuple


class TimeSpan(NamedTuple):
    """Times of publishing in microseconds since 1970, both inclusive."""

    first: int
    last: int


class EpochGroup(NamedTuple):
    """Rows of a topic, an epoch and a date. `span` is of those that have a number; None: none has."""

    topic: str
    epoch: int | None
    date: date | None
    rows: int
    span: TimeSpan | None


class KnownEpochs:
    """When the messages of each topic and epoch were published, that a table has."""

    def __init__(self) -> None:
        self._spans: dict[str, dict[int | None, TimeSpan]] = {}

    def add(self, groups: Iterable[EpochGroup]) -> None:
        for each in groups:
            if each.span is not None:
                epochs = self._spans.setdefault(each.topic, {})
                epochs[each.epoch] = _both(epochs.get(each.epoch), each.span)

    def with_copies(self, groups: Iterable[EpochGroup]) -> dict[str, TimeSpan]:
        """By topic: when messages were published of which these rows, or one of them and the table, may have two."""
        coming = KnownEpochs()
        coming.add(groups)
        found: dict[str, TimeSpan] = {}
        for topic, epochs in coming._spans.items():
            there = [*self._spans.get(topic, {}).items(), *epochs.items()]
            for epoch, span in epochs.items():
                for other, known in there:
                    met = TimeSpan(max(span.first, known.first), min(span.last, known.last))
                    if (epoch != other or epoch is None) and met.first <= met.last:
                        found[topic] = _both(found.get(topic), met)
        return found


def _both(one: TimeSpan | None, other: TimeSpan) -> TimeSpan:
    return other if one is None else TimeSpan(min(one.first, other.first), max(one.last, other.last))
