"""What an Iceberg client may ask of a broker: which namespaces and tables there are, and one table as it is now.

Every broker answers for every topic: state and objects are in the stores that all share. A load has what waits in the
log uploaded, if the topic is served here: at most once a second for one topic, a few topics at a time. It does not
wait for it, the next one sees it: DuckDB refuses a snapshot that is younger than its transaction.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from pydanube.broker.catalog import Catalog
from pydanube.core.names import NamespaceName, TopicName
from pydanube.errors import DanubeError, NamespaceUnknown, TopicUnknown
from pydanube.history.storage import StorageDesk
from pydanube.history.tables import Loaded, Tables
from pydanube.history.upload_state import UploadState
from pydanube.history.uploader import Uploader

log = logging.getLogger(__name__)

FLUSH_SECONDS: Final = 1.0  # between two of one topic
FLUSHES_AT_ONCE: Final = 4


class TableDesk:
    """Without an object store there are no tables."""

    def __init__(self, topics: Catalog, url: str) -> None:
        self._topics = topics
        rooms = topics.rooms
        self._clock = rooms.services.clock
        self._tables: Tables | None = None
        self._flushes: dict[TopicName, asyncio.Task[None]] = {}
        self._flushed_at: dict[TopicName, float] = {}
        if rooms.cloud is not None:
            address = StorageDesk(topics, url).address
            window = rooms.cloud.config.garbage_seconds
            self._tables = Tables(rooms.metadata, rooms.cloud.store, self._clock, rooms.work, address, window)

    def may_read(self, name: TopicName | NamespaceName) -> bool:
        """Whether the caller may: as for consuming, once there are permissions. Today everybody may."""
        return True

    async def namespaces(self) -> list[NamespaceName]:
        return [each for each in await self._topics.namespaces() if self.may_read(each)]

    async def tables(self, namespace: NamespaceName) -> list[TopicName]:
        """A partitioned topic is one. Raises NamespaceUnknown."""
        if namespace not in await self._topics.namespaces():
            raise NamespaceUnknown(namespace)
        names = await self._topics.names(namespace) if self._tables is not None else []
        return sorted({each.base for each in names if self.may_read(each.base)})

    async def load(self, name: TopicName) -> Loaded:
        """Raises TopicUnknown, ObjectDamaged, Unreachable."""
        if self._tables is None or not self.may_read(name):
            raise TopicUnknown(name)
        loaded = await self._tables.load(name)
        self._flush(name)
        return loaded

    async def close(self) -> None:
        for flush in self._flushes.values():
            flush.cancel()
        await asyncio.gather(*self._flushes.values(), return_exceptions=True)

    def _flush(self, name: TopicName) -> None:
        """What waits in the log is uploaded soon. Failing costs freshness."""
        cloud = self._topics.rooms.cloud
        assert cloud is not None
        for carried in cloud.uploader.topics:
            topic = TopicName(carried.tier.topic)
            if (topic == name or topic.is_partition_of(name)) and topic not in self._flushes:
                self._begin(cloud.uploader, topic, carried)

    def _begin(self, uploader: Uploader, topic: TopicName, carried: UploadState) -> None:
        now = self._clock.elapsed()
        is_young = now - self._flushed_at.get(topic, -FLUSH_SECONDS) < FLUSH_SECONDS
        if is_young or carried.blocked_until > now or carried.uploads.waiting(carried.log) is None:
            return
        if len(self._flushes) >= FLUSHES_AT_ONCE:
            return
        self._flushed_at = {each: at for each, at in self._flushed_at.items() if now - at < FLUSH_SECONDS}
        self._flushed_at[topic] = now
        flush = asyncio.create_task(_upload(uploader, carried), name=f"flush {topic}")
        self._flushes[topic] = flush
        flush.add_done_callback(lambda _: self._flushes.pop(topic, None))


async def _upload(uploader: Uploader, carried: UploadState) -> None:
    try:
        async with carried.working:
            await uploader.upload_all(carried)
    except (DanubeError, OSError) as error:  # the next interval tries again, and says so
        log.warning("table is older than its topic", extra={"topic": carried.tier.topic, "why": str(error)})
