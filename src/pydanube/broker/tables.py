"""What an Iceberg client may ask of a broker: which namespaces and tables there are, and one table as it is now.

Every broker answers for every topic: state and objects are in the stores that all share. A load has the owner upload
what waits in the log (`table_flushes.py`) and does not wait for it, the next one sees it: DuckDB reads the newest
snapshot that is not younger than its transaction, so one that the load itself made would be of no use to it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from pydanube.broker.catalog import Catalog
from pydanube.broker.table_flushes import Flushes
from pydanube.core import keys
from pydanube.core.names import NamespaceName, TopicName
from pydanube.core.policies import Delivery
from pydanube.errors import DataDamaged, NamespaceUnknown, NotATable, NotServed, TopicUnknown
from pydanube.history.storage import StorageDesk
from pydanube.history.tables import KEEPS_NOTHING, Loaded, Tables

READS_AT_ONCE: Final = 32
NO_STORE: Final = "this broker has no object store"


class Page(NamedTuple):
    """`next`: what to ask behind for more; None: that is all."""

    tables: Sequence[TopicName]
    next: str | None


def may_read(name: NamespaceName | TopicName | None) -> bool:
    """Whether the caller may read a table, see a namespace, or (None) the catalog at all. The one place that decides:
    as for consuming, once there are permissions. Today everybody may.
    """
    return True


class TableDesk:
    """`vended` is what clients that ask for keys of the store are told (`stores/objects/readers.py`); it may be empty.

    What the caller may not read does not exist for it.
    """

    def __init__(self, topics: Catalog, url: str, vended: Mapping[str, str] | None = None) -> None:
        self._topics = topics
        self._url = url
        self.vended: Mapping[str, str] = vended or {}
        context = topics.context
        self._metadata = context.metadata
        self.flushes = Flushes(topics, context.services.clock)
        self._tables: Tables | None = None
        if context.cloud is not None:
            self._tables = Tables(
                context.metadata,
                context.cloud.store,
                context.services.clock,
                context.work,
                StorageDesk(topics, url).address,
                context.cloud.config.garbage_seconds,
                context.cloud.config.upload_seconds,
                self._keeps,
            )

    @property
    def root(self) -> str:
        """Everything that tables name begins with it."""
        return self._url.rstrip("/") + "/"

    async def namespaces(self) -> list[NamespaceName]:
        return sorted(each for each in await self._topics.namespaces() if may_read(each))

    async def require(self, namespace: NamespaceName) -> None:
        """Raises NamespaceUnknown."""
        if namespace not in await self.namespaces():
            raise NamespaceUnknown(namespace)

    async def tables(self, namespace: NamespaceName, after: str = "", size: int | None = None) -> Page:
        """By name, those behind `after`, `size` at most. A partitioned topic is one. Raises NamespaceUnknown."""
        await self.require(namespace)
        parts: dict[TopicName, TopicName] = {}  # of each table one topic, which tells for all
        for each in await self._topics.names(namespace) if self._tables is not None else []:
            if each.base.name > after and may_read(each.base):
                parts.setdefault(each.base, each)
        found: list[TopicName] = []
        names = sorted(parts)
        while names and (size is None or len(found) <= size):
            looked, names = names[:READS_AT_ONCE], names[READS_AT_ONCE:]
            reliable = await asyncio.gather(*(self._keeps(parts[each]) for each in looked))
            found += [each for each, is_kept in zip(looked, reliable, strict=True) if is_kept]
        if size is None or len(found) <= size:
            return Page(found, None)
        return Page(found[:size], found[size - 1].name)

    async def load(self, name: TopicName) -> Loaded:
        """Raises TopicUnknown, NotATable, ObjectDamaged, Unreachable, and NotServed if no broker has opened it yet."""
        if not may_read(name):
            raise TopicUnknown(name)
        if self._tables is None:
            raise NotATable(name, NO_STORE)
        try:
            loaded = await self._tables.load(name)
        except TopicUnknown:
            parts = await self._topics.partitions(name)
            if not parts:
                raise
            if not await self._keeps(parts[0]):
                raise NotATable(name, KEEPS_NOTHING) from None
            raise NotServed(name, "no broker has opened it yet") from None
        self.flushes.begin(loaded.topics)
        return loaded

    async def close(self) -> None:
        await self.flushes.close()

    async def _keeps(self, name: TopicName) -> bool:
        topic = self._topics.get(name)
        if topic is not None:
            return topic.reliable
        item = await self._metadata.get(keys.delivery(name))
        try:
            return item is not None and json.loads(item.value) == Delivery.RELIABLE.value
        except ValueError as error:
            raise DataDamaged(f"what is stored about {name} is none of ours: {error}") from error
