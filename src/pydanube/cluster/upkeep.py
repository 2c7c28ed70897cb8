"""Keeps the metadata store from filling up: the leader has it forget its history, and every broker looks at its size.

etcd compacts nothing by itself unless configured to. When its quota is used up it refuses every write: no reservation,
no claim, no lease.
"""

from __future__ import annotations

import logging
from typing import Final, NoReturn

from pydanube.cluster.leadership import Leadership
from pydanube.core.cluster.upkeep import KEEP_SECONDS, NEARLY_FULL, Compacting
from pydanube.errors import Unavailable
from pydanube.ports import Clock, MetadataStore, Usage
from pydanube.telemetry import ClusterMetrics

log = logging.getLogger(__name__)

USAGE_CHECK_SECONDS: Final = 60.0


class Upkeep:
    """`compacts` is False where others use the same store: its history is not ours to forget."""

    def __init__(
        self,
        store: MetadataStore,
        clock: Clock,
        leadership: Leadership,
        metrics: ClusterMetrics,
        *,
        compacts: bool,
    ) -> None:
        self._store = store
        self._clock = clock
        self._leadership = leadership
        self._metrics = metrics
        self._compacts = compacts
        self._compacting = Compacting(KEEP_SECONDS)
        self._is_filling = False

    async def run(self) -> NoReturn:
        while True:
            try:
                await self._look()
            except Unavailable as error:
                log.warning("size of the metadata store not known", extra={"why": str(error)})
            await self._clock.sleep(USAGE_CHECK_SECONDS)

    async def _look(self) -> None:
        usage = await self._store.usage()
        self._metrics.metadata_size_bytes = usage.size_bytes
        self._metrics.metadata_quota_bytes = usage.quota_bytes
        self._warn(usage)
        leads = self._compacts and self._leadership.leads
        revision = self._compacting.step(self._clock.elapsed(), usage.revision, leads=leads)
        if revision is not None:
            await self._store.compact(revision)
            log.info("history of the metadata store compacted", extra={"revision": revision, "now": usage.revision})

    def _warn(self, usage: Usage) -> None:
        """Once, at the start or when it becomes so; the metrics say it all the time."""
        is_filling = 0 < usage.quota_bytes * NEARLY_FULL < usage.size_bytes
        if is_filling and not self._is_filling:
            log.warning(
                "the metadata store has used more than half of its quota: when it is full, nothing can be written any "
                "more and topics stop. Defragment it (etcdctl defrag), or give it a larger --quota-backend-bytes",
                extra={"size_bytes": usage.size_bytes, "quota_bytes": usage.quota_bytes},
            )
        self._is_filling = is_filling
