"""Dead letters, as they are read from a dead-letter topic, and which of them are meant.

A dead letter is a message whose attributes say where it came from and why it was given up; the broker writes them
(`core/dispatch/delivery.py`). Reading changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, NamedTuple

from pydanube.client.client import Client
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError, DanubeError
from pydanube.formats.batch import Envelope, messages

ORIGINAL_TOPIC: Final = "x-original-topic"
ORIGINAL_SUBSCRIPTION: Final = "x-original-subscription"
ORIGINAL_OFFSET: Final = "x-original-topic-offset"
REASON: Final = "x-failure-reason"
ATTEMPTS: Final = "x-delivery-attempt"


class Letter(NamedTuple):
    """One dead letter. `original_topic` is None if its attributes do not say where it came from."""

    offset: int
    dead_at: datetime  # when the broker gave it up, by the broker's clock
    original_topic: str | None
    subscription: str | None
    original_offset: int | None
    reason: str | None
    message: Envelope


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which dead letters are meant: those that pass everything that is given."""

    topic: str | None = None  # where they came from; of a partitioned topic, the base means all partitions
    subscription: str | None = None  # which gave them up
    reason: str | None = None  # a part of it, in any case
    first: int = 0  # offsets of the dead-letter topic, [first, end)
    end: int | None = None
    since: datetime | None = None  # given up in [since, until)
    until: datetime | None = None
    key: str | None = None
    attributes: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.first < 0 or (self.end is not None and self.end < self.first):
            raise ConfigError("first", self.first, "0 <= first <= end")
        for name in ("since", "until"):
            time = getattr(self, name)
            if time is not None and time.tzinfo is None:
                raise ConfigError(name, time, "a time with its zone")

    def takes(self, letter: Letter) -> bool:
        own = letter.message
        return (
            (self.topic is None or self._is_from(letter.original_topic, self.topic))
            and (self.subscription is None or letter.subscription == self.subscription)
            and (self.reason is None or self.reason.casefold() in (letter.reason or "").casefold())
            and self.first <= letter.offset
            and (self.end is None or letter.offset < self.end)
            and (self.since is None or letter.dead_at >= self.since)
            and (self.until is None or letter.dead_at < self.until)
            and (self.key is None or own.routing_key == self.key)
            and all(own.attributes.get(name) == value for name, value in self.attributes.items())
        )

    @staticmethod
    def _is_from(origin: str | None, wanted: str) -> bool:
        if origin is None:
            return False
        return origin == wanted or TopicName(origin).is_partition_of(wanted)


async def letters_of(client: Client, topic: str, first: int, end: int) -> AsyncIterator[list[Letter]]:
    """A few megabytes at a time."""
    if first >= end:
        return
    async for at, until, batches in client.fetch(topic, first, end).stored():
        found = []
        for batch in batches:
            dead_at = datetime.fromtimestamp(batch.header.append_time / 1_000_000, UTC)
            for offset, message in enumerate(messages(batch), batch.header.base_offset):
                if at <= offset < until:
                    found.append(_letter(offset, dead_at, message))
        if found:
            yield found


def _letter(offset: int, dead_at: datetime, message: Envelope) -> Letter:
    attributes = message.attributes
    origin = attributes.get(ORIGINAL_TOPIC)
    number = attributes.get(ORIGINAL_OFFSET, "")
    try:
        topic = None if origin is None else TopicName(origin)
    except DanubeError:
        topic = None  # an application may write such attributes, and anything into them
    return Letter(
        offset,
        dead_at,
        topic,
        attributes.get(ORIGINAL_SUBSCRIPTION),
        int(number) if number.isascii() and number.isdecimal() else None,
        attributes.get(REASON),
        message,
    )


def offsets_of(letters: Sequence[Letter]) -> list[int]:
    return [letter.offset for letter in letters]
