"""Makes the objects of one topic, stores them and has them compared: here, or in the process beside the broker."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from pydanube.core.history.tiers import PARQUET, RAW, Descriptor, object_name
from pydanube.errors import Conflict, InvalidObject, ProcessEnded, Unreachable
from pydanube.formats.batch import Batch
from pydanube.history.object_builder import Made, make_and_store, make_object, make_packed, make_raw, pack, put_checked
from pydanube.history.tier import TopicTier
from pydanube.ports import Elsewhere, ObjectInfo

log = logging.getLogger(__name__)

T = TypeVar("T")

APART_BYTES: Final = 1024 * 1024  # of log: larger objects are made in a process that may wait
HERE_SECONDS: Final = 300.0


class ObjectMaker:
    def __init__(self, tier: TopicTier) -> None:
        self._tier = tier
        self._failed = 0
        self._here_until = -math.inf  # the process that stores large objects has failed

    def give_up_name(self) -> None:
        """Names with this number are used up."""
        self._failed += 1

    async def store_batches(self, batches: Sequence[Batch], urgent: bool) -> Descriptor:
        """One object of the batches, or of the first of them."""
        is_large = not urgent and sum(each.header.uncompressed_length for each in batches) >= APART_BYTES
        if is_large and (elsewhere := await self.elsewhere()) is not None:
            described = await self._store_apart(elsewhere, batches)
            if described is not None:
                return described
        made = await self._make(batches, is_large)
        name = object_name(made.start_offset, made.end - 1, self._tier.epoch, attempt=self._failed, raw=made.raw)
        return await self.store_object(name, made)

    async def _store_apart(self, elsewhere: Elsewhere, batches: Sequence[Batch]) -> Descriptor | None:
        """By a process that may wait, and keeps the object to itself. None if it is to be done here."""
        tier = self._tier
        first, end = batches[0].header.base_offset, batches[-1].header.end_offset
        name = object_name(first, end - 1, tier.epoch, attempt=self._failed)
        key = tier.key(name)
        tier.garbage.add(name)  # until it is described
        packed = await self._pack(batches)
        found = await self.apart(partial(make_and_store, key, tier.topic, tier.epoch, packed, elsewhere))
        if found is None:
            return None
        made, info = found
        if (made.start_offset, made.end) != (first, end):
            raise InvalidObject(key, f"it holds {made.start_offset} up to {made.end}")
        return self.describe(name, made, info)

    async def elsewhere(self) -> Elsewhere | None:
        """How another process opens the store; None if objects are to be stored here."""
        return None if self._tier.clock.elapsed() < self._here_until else await self._tier.store.elsewhere()

    async def apart(self, storing: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """What another process stores, and says of it. None if it could not, and it is to be done here.

        It may have been done all the same, or will be: the names in it are used up.
        """
        try:
            return await self._tier.work.await_apart(storing)
        except Exception as error:
            if isinstance(error, Unreachable | Conflict | InvalidObject) and not isinstance(error, ProcessEnded):
                raise  # so says the store, which is the same from here
            extra = {"topic": self._tier.topic, "why": repr(error)}
            log.warning("objects are stored by the broker itself", extra=extra)
            self._failed += 1
            self._here_until = self._tier.clock.elapsed() + HERE_SECONDS
            return None

    async def _make(self, batches: Sequence[Batch], is_large: bool) -> Made:
        """As Parquet; the one batch that Arrow refuses, raw. What comes behind it has its turn later."""
        tier = self._tier
        while True:
            try:
                if not is_large:
                    return await tier.work.run(partial(make_object, tier.topic, tier.epoch, batches))
                packed = await self._pack(batches)
                return await tier.work.run_apart(partial(make_packed, tier.topic, tier.epoch, packed))
            except InvalidObject as error:
                if len(batches) == 1:
                    log.error("batch cannot be converted", extra={"topic": tier.topic, "why": str(error)})
                    return await tier.work.run(partial(make_raw, batches))
                batches = batches[: len(batches) // 2]

    async def _pack(self, batches: Sequence[Batch]) -> list[memoryview]:
        packed: list[memoryview] = []
        for some in pack(batches):  # not in a thread, which would keep the interpreter from messages
            packed += some
            await self._tier.clock.sleep(0)
        return packed

    async def store_object(self, name: str, made: Made) -> Descriptor:
        """Puts the object and reads it back. Raises InvalidObject if the store has something else."""
        tier = self._tier
        tier.garbage.add(name)  # until it is described
        return self.describe(name, made, await put_checked(tier.store, tier.key(name), made.data, tier.work.run))

    def describe(self, name: str, made: Made, info: ObjectInfo) -> Descriptor:
        return Descriptor(
            start_offset=made.start_offset,
            end_offset=made.end - 1,
            object_id=name,
            size=info.size_bytes,
            etag=info.etag,
            min_publish_time=made.min_publish_time,
            max_publish_time=made.max_publish_time,
            epoch=self._tier.epoch,
            created_at=self._tier.clock.time_us() // 1_000_000,
            max_append_time=made.max_append_time,
            format=RAW if made.raw else PARQUET,
            footer_crc=made.footer_crc,
        )
