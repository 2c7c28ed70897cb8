"""Reads history from the object store, for all subscriptions of a broker together.

    offset ─► descriptor ─► footer (cached) ─► row group (cached, the next one fetched ahead) ─► batches

What is fetched is shared: subscriptions at the same place cost one download. Memory is bounded in bytes over all
readers. An object that is gone is looked up again, because the owner may have merged it; one that is really missing or
damaged is an error for readers of that range, and is fetched again after a while.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

from pydanube.core.history.tiers import RAW, Descriptor
from pydanube.core.units import MIB
from pydanube.errors import InvalidObject, ObjectDamaged
from pydanube.formats.batch import Batch, topic_hash
from pydanube.formats.parquet import Footer, StoredBatch, footer_length, read_raw, summary
from pydanube.formats.parquet_read import FOOTER_GUESS_BYTES, parse_footer, read_row_group
from pydanube.history.tier import TopicTier
from pydanube.log.reader import first_row_since
from pydanube.ports import Buffer, Clock, ObjectStore, Work
from pydanube.telemetry import CloudMetrics

log = logging.getLogger(__name__)

CACHE_BYTES: Final = 16 * MIB  # of row groups, as batches
FOOTER_BYTES: Final = 8 * MIB
LOADS_AT_ONCE: Final = 2  # row groups that are being fetched and decoded
FOOTER: Final = -1  # stands where the number of a row group does
ASK_AGAIN_SECONDS: Final = 5.0  # for an object that could not be read
_DAMAGED_MAX: Final = 1024

T = TypeVar("T")


class _Shared(Generic[T]):
    """A cache bounded in bytes: loaded once, the least recently used leaving first."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._kept: OrderedDict[tuple[str, int], tuple[T, int]] = OrderedDict()
        self._loading: dict[tuple[str, int], asyncio.Task[T]] = {}
        self.size_bytes = 0

    def get(self, key: tuple[str, int]) -> T | None:
        found = self._kept.get(key)
        if found is None:
            return None
        self._kept.move_to_end(key)
        return found[0]

    def has(self, key: tuple[str, int]) -> bool:
        return key in self._kept or key in self._loading

    def keep(self, key: tuple[str, int], thing: T, size_bytes: int) -> None:
        if key in self._kept:
            return
        self._kept[key] = (thing, size_bytes)
        self.size_bytes += size_bytes
        self.evict(0)

    def evict(self, size_bytes: int) -> None:
        """For a new entry. What was used last stays: a reader is still at it."""
        while self.size_bytes + size_bytes > self._bytes_max and len(self._kept) > 1:
            _, (_, size) = self._kept.popitem(last=False)
            self.size_bytes -= size

    @property
    def loads(self) -> int:
        """How many are being loaded, or wait for it."""
        return len(self._loading)

    def loading(self, key: tuple[str, int]) -> asyncio.Task[T] | None:
        return self._loading.get(key)

    def start(self, key: tuple[str, int], task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._loading[key] = task
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: tuple[str, int], task: asyncio.Task[T]) -> None:
        self._loading.pop(key, None)
        if not task.cancelled():
            task.exception()  # retrieved: a failed prefetch that no reader waits for is not logged

    def cancel(self) -> list[asyncio.Task[T]]:
        tasks = list(self._loading.values())
        for task in tasks:
            task.cancel()
        return tasks


class CloudReader:
    """Shared by all topics of a broker."""

    def __init__(
        self, store: ObjectStore, clock: Clock, work: Work, metrics: CloudMetrics, *, cache_bytes: int = CACHE_BYTES
    ) -> None:
        self._store = store
        self._clock = clock
        self._work = work
        self._metrics = metrics
        self._footers: _Shared[Footer] = _Shared(FOOTER_BYTES)
        self._groups: _Shared[list[Batch]] = _Shared(cache_bytes)
        self._loads = asyncio.Semaphore(LOADS_AT_ONCE)
        self._decoding = asyncio.Lock()  # one at a time is faster than any store, and takes half the memory
        self._damaged: OrderedDict[tuple[str, int], tuple[float, ObjectDamaged]] = OrderedDict()

    async def close(self) -> None:
        """Ends what is being fetched."""
        tasks: list[asyncio.Task[object]] = [*self._footers.cancel(), *self._groups.cancel()]
        await asyncio.gather(*tasks, return_exceptions=True)

    async def read(self, tier: TopicTier, offset: int, bytes_max: int) -> list[Batch] | None:
        """Batches from the one that holds `offset` on, about `bytes_max`; None if no object holds it.

        Raises ObjectDamaged, or Unreachable while the store does not answer.
        """
        for again in (False, True):
            described = await tier.find(offset)
            if described is None:
                return None
            try:
                return _from(await self._batches(tier, described, offset), offset, bytes_max)
            except FileNotFoundError:
                if again or await tier.find(offset) == described:
                    raise self._fails(tier, described, FOOTER, "it is missing") from None
        raise AssertionError("unreachable")

    async def stored_batches(self, tier: TopicTier, described: Descriptor) -> Sequence[StoredBatch]:
        """Of every producer's session, in every epoch, the first batch in the object, as the log had it; or more."""
        if described.format == RAW:
            return [summary(batch) for batch in await self._group(tier, described, None, 0)]
        return (await self._footer(tier, described)).producers

    async def offset_at(self, tier: TopicTier, time_us: int, elsewhere: Sequence[tuple[int, int]] = ()) -> int | None:
        """The smallest kept offset in an object that was published at or after `time_us`; None if there is none.

        Objects that lie wholly in `elsewhere` (the log has these ranges too) are passed over.
        """
        offset = tier.history.first_offset
        while True:
            objects = await tier.load_manifest()
            described = objects.find(offset) or objects.after(offset)
            if described is None:
                return None
            known = any(first <= described.start_offset and described.end <= end for first, end in elsewhere)
            if not known and described.max_publish_time >= time_us:
                try:
                    found = await self._offset_in(tier, described, time_us, offset)
                except FileNotFoundError:
                    if await tier.find(described.start_offset) == described:
                        raise self._fails(tier, described, FOOTER, "it is missing") from None
                    offset = max(offset, tier.history.first_offset)
                    continue  # merged or forgotten since: look again
                if found is not None:
                    return found
            offset = described.end

    async def _offset_in(self, tier: TopicTier, described: Descriptor, time_us: int, first: int) -> int | None:
        if described.format == RAW:
            return _first_since(await self._group(tier, described, None, 0), time_us, first)
        footer = await self._footer(tier, described)
        for number, group in enumerate(footer.row_groups):
            if group.max_publish_time >= time_us and group.end_offset > first:
                found = _first_since(await self._group(tier, described, footer, number), time_us, first)
                if found is not None:
                    return found
        return None

    async def _batches(self, tier: TopicTier, described: Descriptor, offset: int) -> list[Batch]:
        if described.format == RAW:
            return await self._group(tier, described, None, 0)
        footer = await self._footer(tier, described)
        number = footer.row_group_of(offset)
        found = self._find_or_load(tier, described, footer, number)
        # Also if this one is still to come: then the reader is faster than we are, and two are better than one.
        self._fetch_ahead(tier, described, footer, number + 1)
        return await found if isinstance(found, asyncio.Future) else found

    # --- fetching -----------------------------------------------------------------------------------------

    async def _footer(self, tier: TopicTier, described: Descriptor) -> Footer:
        key = (tier.key(described.object_id), FOOTER)
        self._check_damaged(key)
        footer = self._footers.get(key)
        if footer is not None:
            return footer
        task = self._footers.loading(key) or self._footers.start(
            key, asyncio.create_task(self._load_footer(tier, described, key), name=f"footer {key[0]}")
        )
        return await asyncio.shield(task)

    async def _load_footer(self, tier: TopicTier, described: Descriptor, key: tuple[str, int]) -> Footer:
        length = min(FOOTER_GUESS_BYTES, described.size)
        try:
            tail = await self._fetch(key[0], described.size - length, length)
            needed = footer_length(tail)
            if needed > len(tail):
                if needed > described.size:
                    raise InvalidObject("its end", "the footer is longer than the object")
                tail = await self._fetch(key[0], described.size - needed, needed)
            footer = await self._work.run(lambda: parse_footer(tail, described.size, described.footer_crc))
            if (footer.topic, footer.start_offset, footer.end) != (tier.topic, described.start_offset, described.end):
                raise InvalidObject("its footer", "it holds something else than its descriptor says")
        except InvalidObject as error:
            raise self._fails(tier, described, FOOTER, str(error)) from error
        self._footers.keep(key, footer, footer.size_bytes)
        self._metrics.objects_read.inc()
        return footer

    async def _group(self, tier: TopicTier, described: Descriptor, footer: Footer | None, number: int) -> list[Batch]:
        found = self._find_or_load(tier, described, footer, number)
        return await found if isinstance(found, asyncio.Future) else found

    def _find_or_load(
        self, tier: TopicTier, described: Descriptor, footer: Footer | None, number: int
    ) -> list[Batch] | asyncio.Future[list[Batch]]:
        key = (tier.key(described.object_id), number)
        if footer is None:
            self._check_damaged((key[0], FOOTER))
        self._check_damaged(key)
        batches = self._groups.get(key)
        if batches is not None:
            return batches
        task = self._groups.loading(key) or self._load(tier, described, footer, number)
        return asyncio.shield(task)

    def _load(
        self, tier: TopicTier, described: Descriptor, footer: Footer | None, number: int
    ) -> asyncio.Task[list[Batch]]:
        key = (tier.key(described.object_id), number)
        loading = self._load_group(tier, described, footer, key)
        return self._groups.start(key, asyncio.create_task(loading, name=f"row group {key[0]} {number}"))

    async def _load_group(
        self, tier: TopicTier, described: Descriptor, footer: Footer | None, key: tuple[str, int]
    ) -> list[Batch]:
        number = key[1]
        async with self._loads:
            try:
                data: Buffer
                if footer is None:
                    data = await self._store.get(key[0])
                    batches = await self._work.run(lambda: _raw_batches(tier.topic, described, data))
                else:
                    group = footer.row_groups[number]
                    data = await self._fetch(key[0], group.position, group.length)
                    async with self._decoding:
                        self._groups.evict(footer.bytes_in_memory(number))
                        batches = await self._work.run(lambda: read_row_group(footer, number, data))
            except InvalidObject as error:
                raise self._fails(tier, described, number, str(error)) from error
        self._metrics.bytes_read.inc(len(data))
        self._groups.keep(key, batches, sum(batch.header.size_bytes + 1024 for batch in batches))
        return batches

    async def _fetch(self, key: str, position: int, length: int) -> Buffer:
        data = await self._store.get_range(key, position, length)
        if len(data) != length:
            raise InvalidObject(f"position {position}", f"{len(data)} bytes are there, {length} must be")
        return data

    def _fetch_ahead(self, tier: TopicTier, described: Descriptor, footer: Footer, number: int) -> None:
        """Starts with the next row group, or the next object, while this one is consumed. A prefetch: not awaited."""
        if self._groups.loads >= LOADS_AT_ONCE:
            return  # loads that readers wait for come first
        if number < len(footer.row_groups):
            key = (tier.key(described.object_id), number)
            if not self._groups.has(key) and key not in self._damaged:
                self._load(tier, described, footer, number)
            return
        following = tier.objects.find(described.end)
        if following is None or following.format == RAW:
            return
        key = (tier.key(following.object_id), FOOTER)
        if key in self._damaged or self._footers.loading(key) is not None:
            return
        known = self._footers.get(key)
        if known is not None:
            first = (key[0], 0)
            if not self._groups.has(first) and first not in self._damaged:
                self._load(tier, following, known, 0)
            return
        loading = self._load_footer(tier, following, key)
        task = self._footers.start(key, asyncio.create_task(loading, name=f"footer {key[0]}"))
        task.add_done_callback(lambda done: self._go_on(tier, following, done))

    def _go_on(self, tier: TopicTier, following: Descriptor, footer: asyncio.Task[Footer]) -> None:
        """The next object's footer is here: its first row group comes next."""
        key = (tier.key(following.object_id), 0)
        if not footer.cancelled() and footer.exception() is None and not self._groups.has(key):
            self._load(tier, following, footer.result(), 0)

    # --- what cannot be read ------------------------------------------------------------------------------

    def _fails(self, tier: TopicTier, described: Descriptor, number: int, why: str) -> ObjectDamaged:
        key = tier.key(described.object_id)
        error = ObjectDamaged(tier.topic, key, described.start_offset, described.end, why)
        self._damaged[key, number] = (self._clock.elapsed() + ASK_AGAIN_SECONDS, error)
        while len(self._damaged) > _DAMAGED_MAX:
            self._damaged.popitem(last=False)
        self._metrics.errors.inc()
        return error

    def _check_damaged(self, key: tuple[str, int]) -> None:
        found = self._damaged.get(key)
        if found is None:
            return
        until, error = found
        if self._clock.elapsed() < until:
            raise error
        del self._damaged[key]


def _from(batches: list[Batch], offset: int, bytes_max: int) -> list[Batch]:
    found: list[Batch] = []
    size = 0
    for batch in batches:
        if batch.header.end_offset <= offset:
            continue
        size += batch.header.size_bytes
        if found and size > bytes_max:
            break
        found.append(batch)
    return found


def _first_since(batches: list[Batch], time_us: int, first: int) -> int | None:
    """The first offset from `first` on that was published at or after `time_us`."""
    for batch in batches:
        if batch.header.end_offset > first and batch.header.max_publish_time >= time_us:
            found = first_row_since(batch, time_us, first)
            if found is not None:
                return found
    return None


def _raw_batches(topic: str, described: Descriptor, data: Buffer) -> list[Batch]:
    batches = read_raw(data)
    expected = described.start_offset
    for batch in batches:
        if batch.header.base_offset != expected or batch.header.topic_hash != topic_hash(topic):
            raise InvalidObject(f"offset {expected}", "something else stands there")
        expected = batch.header.end_offset
    if expected != described.end:
        raise InvalidObject(f"offset {expected}", "it ends there")
    return batches
