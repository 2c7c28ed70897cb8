"""Defects of the kind that real systems had, each small, each to be found by the simulator under its general faults.

`PLANTED` has a function per defect: it changes the program with a monkeypatch and may return what changes a cluster
before it starts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pydanube.broker import ownership as broker_ownership
from pydanube.broker import rescue
from pydanube.broker.subscription import Subscription
from pydanube.core import keys
from pydanube.core import ownership as core_ownership
from pydanube.core.names import TopicName
from pydanube.core.ownership import Orphan, Start
from pydanube.core.rescue import Brought
from pydanube.core.tiers import Descriptor, object_name
from pydanube.core.window import SavedPosition
from pydanube.errors import DanubeError
from pydanube.log.parquet import Encoded, encode_object, read_raw
from pydanube.log.tier import TopicTier, topic_prefix
from pydanube.ports import Delete, Disk, Item, Put, Write, WriteResult
from pydanube.testing.cluster import Cluster

Tweak = Callable[[Cluster], None] | None


class AcknowledgesBeforeTheSync:
    """A disk that does not wait for what the log writes."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._disk, name)

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        return await self._disk.write(writes, sync=sync and not writes[0].path.endswith((".wal", ".journal")))


def ack_before_fsync(patch: pytest.MonkeyPatch) -> Tweak:
    def tweak(town: Cluster) -> None:
        town.wrap_disk = AcknowledgesBeforeTheSync  # type: ignore[assignment]

    return tweak


def next_owner_starts_at_0(patch: pytest.MonkeyPatch) -> Tweak:
    start_of_epoch = core_ownership.start_of_epoch

    def careless(owner: Any, seal: Any, reserved_end: Any, *, broker_id: int, described_end: int = 0) -> Start:
        if owner is not None and owner.broker_id != broker_id:
            return Start(0, 0)
        return start_of_epoch(owner, seal, reserved_end, broker_id=broker_id, described_end=described_end)

    patch.setattr(broker_ownership, "start_of_epoch", careless)
    return None


def stale_seal_trusted(patch: pytest.MonkeyPatch) -> Tweak:
    for module in (core_ownership, broker_ownership):
        patch.setattr(module, "is_sealed", lambda owner, seal: seal is not None)
    return None


def reservation_ignored(patch: pytest.MonkeyPatch) -> Tweak:
    patch.setattr(broker_ownership, "reserve_from_bytes", lambda value: 0)
    return None


def notification_without_heartbeat(patch: pytest.MonkeyPatch) -> Tweak:
    patch.setattr(Subscription, "_beat", lambda self, now: None)
    return None


def cursor_saved_before_ack(patch: pytest.MonkeyPatch) -> Tweak:
    queue = Subscription._queue

    def careless(self: Subscription) -> SavedPosition:
        progress = self._machine.progress
        sent = max(progress.next_fresh, progress.next_unacked)
        return SavedPosition(sent - 1, b"", progress.changes + sent)

    def hasty(self: Subscription, effect: Any, outbox: Any) -> None:
        queue(self, effect, outbox)
        self._services.cursors.changed(self)

    patch.setattr(Subscription, "saved", careless)
    patch.setattr(Subscription, "_queue", hasty)
    return None


def descriptor_before_the_object(patch: pytest.MonkeyPatch) -> Tweak:
    tasks: list[asyncio.Task[None]] = []

    async def careless(self: TopicTier, name: str, encoded: Encoded, *, raw: bool = False) -> Descriptor:
        async def put() -> None:
            await self.clock.sleep(0.2)
            with contextlib.suppress(DanubeError):
                await self.store.put(self.key(name), [encoded.data], create=True)

        tasks.append(asyncio.create_task(put()))
        return Descriptor(
            start_offset=encoded.start_offset,
            end_offset=encoded.end - 1,
            object_id=name,
            size=len(encoded.data),
            etag="",
            min_publish_time=encoded.min_publish_time,
            max_publish_time=encoded.max_publish_time,
            epoch=self.epoch,
            created_at=self.clock.time_us() // 1_000_000,
            max_append_time=encoded.max_append_time,
            format="raw" if raw else "parquet",
            footer_crc=0 if raw else encoded.footer_crc,
        )

    patch.setattr(TopicTier, "store_object", careless)
    return None


def rescue_does_not_ask_the_owner(patch: pytest.MonkeyPatch) -> Tweak:
    bring = rescue.Rescuer._bring

    async def careless(self: rescue.Rescuer, topic: TopicName, orphan: Orphan, wanted: Item) -> bool:
        """The returned broker writes history by itself."""
        if not await bring(self, topic, orphan, wanted):
            return False
        item = await self._metadata.get(keys.rescue(topic, orphan.epoch))
        assert item is not None
        operations: list[Put | Delete] = [
            Delete(keys.orphan(topic, orphan.start)),
            Delete(keys.rescue(topic, orphan.epoch)),
        ]
        for name in Brought.from_bytes(item.value).objects:
            for batch in read_raw(await self._store.get(topic_prefix(topic) + name)):
                encoded = encode_object(topic, orphan.epoch, [batch])
                stored = object_name(encoded.start_offset, encoded.end - 1, orphan.epoch)
                info = await self._store.put(topic_prefix(topic) + stored, [encoded.data])
                descriptor = Descriptor(
                    start_offset=encoded.start_offset,
                    end_offset=encoded.end - 1,
                    object_id=stored,
                    size=info.size_bytes,
                    etag=info.etag,
                    min_publish_time=encoded.min_publish_time,
                    max_publish_time=encoded.max_publish_time,
                    epoch=orphan.epoch,
                    created_at=0,
                    footer_crc=encoded.footer_crc,
                )
                operations.append(Put(keys.storage_object(topic, encoded.start_offset), descriptor.to_bytes()))
        await self._metadata.transact([], operations)
        return True

    patch.setattr(rescue.Rescuer, "_bring", careless)
    return None


PLANTED: dict[str, Callable[[pytest.MonkeyPatch], Tweak]] = {
    "ack before fsync": ack_before_fsync,
    "next owner starting at 0": next_owner_starts_at_0,
    "a stale seal trusted": stale_seal_trusted,
    "a reservation ignored": reservation_ignored,
    "notification without heartbeat": notification_without_heartbeat,
    "cursor saved before ack": cursor_saved_before_ack,
    "descriptor written before the object": descriptor_before_the_object,
    "rescue that does not ask the owner": rescue_does_not_ask_the_owner,
}

# A seed that finds it. When the code changes it may be another one: the long test looks for the first.
FOUND_BY: dict[str, int] = {
    "ack before fsync": 0,
    "next owner starting at 0": 0,
    "a stale seal trusted": 6,
    "a reservation ignored": 2,
    "notification without heartbeat": 5,
    "cursor saved before ack": 1,
    "descriptor written before the object": 0,
    "rescue that does not ask the owner": 3,
}
