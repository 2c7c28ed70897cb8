"""What of a dead-letter topic is still open, grouped by where it came from and why. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pydanube.admin.ledger import Ledger
from pydanube.admin.letters import letters_of
from pydanube.client.client import Client
from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.core.names import TopicName

SURVEY_MAX: Final = 5_000
SURVEY_BYTES: Final = 16 * 1024 * 1024


@dataclass(slots=True)
class LetterGroup:
    """Open dead letters of one subscription with one reason."""

    topic: str | None
    subscription: str | None
    reason: str | None
    count: int = 0
    newest: int = 0  # offset
    newest_at: datetime | None = None


@dataclass(slots=True)
class Survey:
    """Which dead letters are still open. `first` to `end` was looked through for the groups; `done` is of all."""

    first: int
    end: int
    done: OffsetRanges
    discarded: OffsetRanges
    groups: list[LetterGroup]


async def survey(client: Client, topic: str, *, letters_max: int = SURVEY_MAX, bytes_max: int = SURVEY_BYTES) -> Survey:
    """Groups the newest open dead letters by where they came from and why, the largest group first. Writes nothing."""
    name = TopicName(topic)
    info = await client.describe_topic(name)
    ledger = Ledger(client, name)
    await ledger.read()
    await ledger.check_identity()
    first = end = max(info.first_offset, info.head - letters_max)
    groups: dict[tuple[str | None, str | None, str | None], LetterGroup] = {}
    size = 0
    async for letters in letters_of(client, name, first, info.head):
        for letter in letters:
            size += len(letter.message.payload)
            if letter.offset not in ledger.done:
                key = (letter.original_topic, letter.subscription, letter.reason)
                group = groups.setdefault(key, LetterGroup(*key))
                group.count += 1
                group.newest, group.newest_at = letter.offset, letter.dead_at
        end = letters[-1].offset + 1
        if size > bytes_max:
            break
    else:
        end = info.head
    found = sorted(groups.values(), key=lambda group: (-group.count, -group.newest))
    return Survey(first, end, ledger.done, ledger.discarded, found)
