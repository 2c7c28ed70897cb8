"""Has the objects of one topic built, stored and compared: here, or in the worker process.

small, or clients wait for it      built in a thread, put by the broker
large, the store is a directory    built in the other process, put by the broker: there is one pace for its disk
large, any other store             built, put and compared in the other process; by the broker, if that fails
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from pydanube.core.history.tiers import PARQUET, RAW, Descriptor, object_name
from pydanube.errors import Conflict, InvalidObject, ProcessEnded, Unreachable
from pydanube.formats.batch import Batch
from pydanube.history.object_builder import Built, NotBuilt, Packed, Parts, Recipe, build_in_worker, pack, store_object
from pydanube.history.tier import TopicTier
from pydanube.ports import StoreOpener

log = logging.getLogger(__name__)

WORKER_BYTES_MIN: Final = 1024 * 1024  # of log, or of objects: what is larger is made in a process that may wait
HERE_SECONDS: Final = 300.0


class ObjectMaker:
    """Names of uploads carry a number, which grows with every try that failed: a name is used once."""

    def __init__(self, tier: TopicTier) -> None:
        self._tier = tier
        self._failed = 0
        self._merges = 0
        self._here_until = -math.inf  # the process that stores large objects has failed

    def give_up_name(self) -> None:
        """Names with this number are used up."""
        self._failed += 1

    async def store_batches(self, batches: Sequence[Batch], urgent: bool) -> Descriptor:
        """One object of the batches, or of the first of them: what Arrow refuses is stored raw, alone."""
        topic, epoch = self._tier.topic, self._tier.epoch
        raw = False
        while True:
            is_large = (
                not (urgent or raw) and sum(each.header.uncompressed_length for each in batches) >= WORKER_BYTES_MIN
            )
            first, end = batches[0].header.base_offset, batches[-1].header.end_offset
            recipe = Recipe(topic, epoch, batches, raw)
            stored = await self.store(partial(self._name, first, end, raw), recipe, (first, end), is_large=is_large)
            if isinstance(stored, Descriptor):
                return stored
            if raw:
                raise InvalidObject("the raw object", stored.why)
            if len(batches) == 1:
                log.error("batch cannot be converted", extra={"topic": topic, "why": stored.why})
                raw = True
            else:
                batches = batches[: len(batches) // 2]

    def _name(self, first: int, end: int, raw: bool) -> str:
        return object_name(first, end - 1, self._tier.epoch, attempt=self._failed, raw=raw)

    async def store_merged(self, run: Sequence[Descriptor]) -> Descriptor | NotBuilt:
        """One object of neighbours."""
        tier = self._tier
        first, end = run[0].start_offset, run[-1].end

        def name() -> str:
            self._merges += 1
            return object_name(first, end - 1, tier.epoch, merged=self._merges)

        parts = Parts([(tier.key(each.object_id), each.footer_crc) for each in run])
        is_large = sum(each.size for each in run) >= WORKER_BYTES_MIN
        return await self.store(name, Recipe(tier.topic, tier.epoch, parts), (first, end), is_large=is_large)

    async def store(
        self, name: Callable[[], str], recipe: Recipe, expected: tuple[int, int], *, is_large: bool
    ) -> Descriptor | NotBuilt:
        """The object that the recipe makes, under a name that was never used. Raises InvalidObject if the store has
        something else than it was given, or if it does not hold the `expected` offsets.
        """
        tier = self._tier
        opener = await self.opener() if is_large else None
        chosen = name()
        tier.garbage.add(chosen)  # until it is described
        if is_large and not isinstance(recipe.source, Packed | Parts):
            recipe = recipe._replace(source=await self._pack(recipe.source))
        found = await self.call_worker(chosen, recipe, opener) if opener is not None else None
        if found is None:
            if opener is not None:  # it may have been stored all the same, or will be
                chosen = name()
                tier.garbage.add(chosen)
            build = tier.work.run_in_worker if is_large else tier.work.run
            found = await store_object(tier.key(chosen), recipe, tier.store, build, tier.work.run)
        if isinstance(found, NotBuilt):
            tier.garbage.discard(chosen)
            return found
        if (found.made.start_offset, found.made.end) != expected:
            raise InvalidObject(tier.key(chosen), f"it holds {found.made.start_offset} up to {found.made.end}")
        return self._describe(chosen, found)

    async def opener(self) -> StoreOpener | None:
        """How another process opens the store; None if objects are to be stored here."""
        return None if self._tier.clock.elapsed() < self._here_until else await self._tier.store.opener()

    async def call_worker(self, name: str, recipe: Recipe, opener: StoreOpener) -> Built | NotBuilt | None:
        """What another process stores, and says of it. None if it could not, and it is to be done here."""
        tier = self._tier
        try:
            return await tier.work.await_in_worker(partial(build_in_worker, tier.key(name), recipe, opener))
        except Exception as error:
            if isinstance(error, Unreachable | Conflict | InvalidObject) and not isinstance(error, ProcessEnded):
                raise  # so says the store, which is the same from here
            extra = {"topic": tier.topic, "why": repr(error)}
            log.warning("objects are stored by the broker itself", extra=extra)
            self._failed += 1
            self._here_until = tier.clock.elapsed() + HERE_SECONDS
            return None

    async def _pack(self, batches: Sequence[Batch]) -> Packed:
        packed: list[memoryview] = []
        for some in pack(batches):  # not in a thread, which would keep the interpreter from messages
            packed += some
            await self._tier.clock.sleep(0)
        return Packed(packed)

    def _describe(self, name: str, built: Built) -> Descriptor:
        made, info = built
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
