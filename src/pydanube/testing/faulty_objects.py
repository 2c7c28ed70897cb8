"""One process's way to an object store: away, failing, slow, with answers that are lost and puts that come late.

store = FaultyObjects(under, clock, Random(seed))
store.away = True                      every call fails
store.errors = 0.2                     this part of all calls fails, and does nothing
store.answers_lost = 0.2               this part of all changes is made and reported as a failure
store.late = 0.2                       this part of all puts fails, and is made seconds later all the same
store.delay_max_seconds = 1.0          every call takes up to so long
store.listing_seconds = 5.0            each object in a listing takes up to so long
store.worker_processes = True                     it says how another process opens it, which is this one
store.aim = aims.meet                  asked before every call what becomes of it (cluster_aims.py)
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

from pydanube.errors import Conflict, Unreachable
from pydanube.ports import Buffer, Clock, ObjectInfo, ObjectStore, StoreOpener
from pydanube.testing.cluster_aims import Shot
from pydanube.testing.faulty_metadata import LATE_SECONDS_MAX, _at_nothing, sail

T = TypeVar("T")


class FaultyObjects:
    """An ObjectStore over another one."""

    def __init__(self, under: ObjectStore, clock: Clock, rng: Random) -> None:
        self._under = under
        self._clock = clock
        self._rng = rng
        self.away = False
        self.errors = 0.0
        self.answers_lost = 0.0
        self.late = 0.0
        self.delay_max_seconds = 0.0
        self.listing_seconds = 0.0
        self.worker_processes = False
        self.aim: Callable[[str, Sequence[str]], Shot | None] = _at_nothing

    def heal(self) -> None:
        """Everything gets through again."""
        self.away = False
        self.errors = self.answers_lost = self.late = self.delay_max_seconds = self.listing_seconds = 0.0

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        if self.late and self._rng.random() < self.late:
            body = [bytes(each) for each in data]
            travel_seconds = self._rng.random() * LATE_SECONDS_MAX
            sail(self._clock, travel_seconds, lambda: self._late(key, body, create))
            await self._clock.sleep(1.0)
            raise Unreachable("object store", "nobody answered in time")
        shot = self.aim("object put", ())
        if shot is not None:
            data = [bytes(each) for each in data]  # it may be sent later

        def send(seconds: float) -> None:
            sail(self._clock, seconds, lambda: self._late(key, data, create))

        return await self._call(lambda: self._under.put(key, data, create=create), shot, send, changes=True)

    async def _late(self, key: str, data: Sequence[Buffer], create: bool) -> None:
        with contextlib.suppress(Conflict):
            await self._under.put(key, data, create=create)

    async def get(self, key: str) -> bytes:
        return await self._call(lambda: self._under.get(key), self.aim("object get", ()))

    async def get_range(self, key: str, position: int, length: int) -> Buffer:
        return await self._call(lambda: self._under.get_range(key, position, length), self.aim("object get", ()))

    async def head(self, key: str) -> ObjectInfo:
        return await self._call(lambda: self._under.head(key), self.aim("object head", ()))

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        return _Listing(self, prefix, after)

    async def delete(self, key: str) -> None:
        return await self._call(lambda: self._under.delete(key), self.aim("object delete", ()), changes=True)

    async def opener(self) -> StoreOpener | None:
        return (lambda: _Opened(self)) if self.worker_processes else None

    async def _fail(self) -> None:
        await self._clock.sleep(1.0)
        raise Unreachable("object store", "nobody answered in time")

    async def _call(
        self,
        call: Callable[[], Awaitable[T]],
        shot: Shot | None = None,
        send: Callable[[float], None] | None = None,
        *,
        changes: bool = False,
    ) -> T:
        if shot is not None:
            return await shot.around(lambda: self._call(call, changes=changes), self._fail, send)
        if self.delay_max_seconds:
            await self._clock.sleep(self._rng.random() * self.delay_max_seconds)
        if self.away or (self.errors and self._rng.random() < self.errors):
            raise Unreachable("object store", "it is away")
        answer = await call()
        if changes and self.answers_lost and self._rng.random() < self.answers_lost:
            raise Unreachable("object store", "the answer was lost")
        return answer


class _Opened:
    """The store as another process opens it. Not an async generator, for the same reason as `_Listing`."""

    def __init__(self, store: FaultyObjects) -> None:
        self._store = store

    async def __aenter__(self) -> ObjectStore:
        return self._store

    async def __aexit__(self, *_: object) -> None:
        return None


class _Listing:
    """Not an async generator: when one that was dropped is closed is up to the garbage collector.

    A listing of many pages may fail at any of them.
    """

    def __init__(self, store: FaultyObjects, prefix: str, after: str) -> None:
        self._store = store
        self._prefix = prefix
        self._after = after
        self._infos: AsyncIterator[ObjectInfo] | None = None

    def __aiter__(self) -> _Listing:
        return self

    async def __anext__(self) -> ObjectInfo:
        store = self._store
        if store.listing_seconds:
            await store._clock.sleep(store._rng.random() * store.listing_seconds)
        await store._call(_nothing, store.aim("object list", ()))
        if self._infos is None:
            self._infos = store._under.list(self._prefix, after=self._after)
        return await anext(self._infos)


async def _nothing() -> None:
    return None
