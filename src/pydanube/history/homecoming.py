"""What a broker that was away still has alone: lost epochs on its disk that are not in the store yet.

Every topic that lies on this disk, and is not open here, is one of these:

    deleted, or never created                                 nothing of it is wanted
    ours by its owner key, from a session that is over        another broker is about to take it: an orphan to come
    another's, with an orphan of ours that was not brought    the owner asks, and `rescue.py` brings it
    another's, without one                                    at home

What is at home once stays so until this broker loses topics again, so each is asked about until then and no longer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Final

from pydanube.core import keys
from pydanube.core.history.ownership import Orphan, Owner
from pydanube.core.history.rescue import Brought
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import DanubeError
from pydanube.history.side_by_side import gather_bounded
from pydanube.log.layout import WAL
from pydanube.ports import Disk, MetadataStore

TOPICS_AT_ONCE: Final = 8


class Homecoming:
    """`topics` are those that are open here, at any time."""

    def __init__(
        self, broker_id: BrokerId, topics: Mapping[TopicName, object], metadata: MetadataStore, disk: Disk
    ) -> None:
        self._broker_id = broker_id
        self._topics = topics
        self._metadata = metadata
        self._disk = disk
        self._session: int | None = None  # the stretch of life for which `_doubtful` holds
        self._doubtful: list[TopicName] = []

    async def why_not(self, session: int) -> str:
        """One thing that is not at home yet, and how many there are; empty if there is none. Raises Unavailable."""
        if self._session != session:
            self._doubtful = await self._on_disk()
            self._session = session
        results = await gather_bounded([partial(self._why_not, name) for name in self._doubtful], TOPICS_AT_ONCE)
        left: list[tuple[TopicName, str]] = []
        for name, result in zip(self._doubtful, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            if result:
                left.append((name, result))
        self._doubtful = [name for name, _ in left]
        if not left:
            return ""
        more = f" (and {len(left) - 1} more topics)" if len(left) > 1 else ""
        return f"{left[0][0]}: {left[0][1]}{more}"

    async def _on_disk(self) -> list[TopicName]:
        found: list[TopicName] = []
        for namespace in await self._directories(WAL):
            for topic in await self._directories(f"{WAL}/{namespace}"):
                try:
                    found.append(TopicName(f"/{namespace}/{topic}"))
                except DanubeError:
                    continue  # none of ours
        return found

    async def _directories(self, path: str) -> list[str]:
        return sorted(entry.name for entry in await self._disk.list(path) if entry.is_directory)

    async def _why_not(self, topic: TopicName) -> str:
        if self._topics.get(topic) is not None:
            return ""
        item = await self._metadata.get(keys.owner(topic))
        owner = Owner.from_bytes(item.value) if item else None
        if owner is None or owner.deleted:
            return ""
        if owner.broker_id == self._broker_id and not owner.released:
            return "no other broker has taken it yet, which it had when it was lost"
        for orphan in await self._metadata.list(keys.orphans(topic)):
            start = keys.start_of(orphan.key)
            if start is None:
                continue
            lost = Orphan.from_bytes(start, orphan.value)
            if lost.broker_id != self._broker_id:
                continue
            asked = await self._metadata.get(keys.rescue(topic, lost.epoch))
            brought = Brought.from_bytes(asked.value) if asked else None
            if brought is None or brought.broker != self._broker_id:
                return f"what it acknowledged in epoch {lost.epoch} is not in the store yet"
        return ""
