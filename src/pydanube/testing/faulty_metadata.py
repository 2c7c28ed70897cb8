"""One process's way to a metadata store: slow, cut off, forgetful of watch events, all from a seed.

    store = FaultyMetadata(under, clock, Random(seed))
    store.delay_max_seconds = 0.05         every call takes up to so long, half of it before, half after
    store.cut = True                       nothing gets through; calls raise Unreachable after `patience_seconds`
    store.mute = True                      what we say does not get through; what the store tells its watchers does
    store.deaf = True                      what we say gets through and is done; no answer and no event comes back
    store.answers_lost = 0.1               this part of all changes is made, and the caller never learns it
    store.late = 0.1                       this part of all transactions fails, and is made seconds later all the same
    store.drop_every = 10                  of the watch's events every tenth is never delivered; 1: none is at all
    store.aim = aims.meet                  asked before every call what becomes of it (cluster_aims.py)

A call is judged when it is made and again when it is answered: a cut in between loses the answer alone. A late
transaction is on its way in the network, so it is made whatever becomes of the process that asked for it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from random import Random
from typing import Any, Final, TypeVar

from pydanube.errors import LeaseLost, Unreachable
from pydanube.ports import Clock, Compare, Delete, Event, Item, LeaseId, MetadataStore, Put, Revision, Usage
from pydanube.testing.cluster_aims import Shot

T = TypeVar("T")

LATE_SECONDS_MAX: Final = 8.0


class FaultyMetadata:
    """A MetadataStore over another one. `calls` counts what got through, `failed_at` is when a call failed last."""

    def __init__(self, under: MetadataStore, clock: Clock, rng: Random, *, patience_seconds: float = 1.0) -> None:
        self._under = under
        self._clock = clock
        self._rng = rng
        self._patience_seconds = patience_seconds
        self.delay_max_seconds = 0.0
        self.usual_seconds = 0.0  # what a call takes at most if nothing is wrong
        self.answers_lost = 0.0
        self.late = 0.0
        self.drop_every = 0
        self.cut = False
        self.mute = False
        self.deaf = False
        self.calls = 0
        self.failed_at = -1.0
        self.aim: Callable[[str, Sequence[str]], Shot | None] = _at_nothing
        self._events = 0

    def heal(self) -> None:
        """Everything gets through again."""
        self.cut = self.mute = self.deaf = False
        self.answers_lost = self.late = self.delay_max_seconds = 0.0
        self.drop_every = 0

    async def get(self, key: str) -> Item | None:
        return await self._call(lambda: self._under.get(key), self.aim("get", [key]))

    async def list(self, prefix: str) -> list[Item]:
        return await self._call(lambda: self._under.list(prefix), self.aim("list", [prefix]))

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        if self.late and operations and self._rng.random() < self.late:
            travel_seconds = self._rng.random() * LATE_SECONDS_MAX
            sail(self._clock, travel_seconds, lambda: self._late(compares, operations))
            await self._fail("calling")
        shot = self.aim("transact", [each.key for each in operations]) if operations else None

        def send(seconds: float) -> None:
            sail(self._clock, seconds, lambda: self._late(compares, operations))

        call = lambda: self._under.transact(compares, operations)  # noqa: E731
        return await self._call(call, shot, send, changes=bool(operations))

    async def _late(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> None:
        with contextlib.suppress(LeaseLost):  # it may come too late for that
            await self._under.transact(compares, operations)

    async def grant(self, ttl_seconds: float) -> LeaseId:
        return await self._call(lambda: self._under.grant(ttl_seconds), self.aim("grant", ()), changes=True)

    async def renew(self, lease: LeaseId) -> None:
        await self._call(lambda: self._under.renew(lease), self.aim("renew", ()), changes=True)

    async def revoke(self, lease: LeaseId) -> None:
        await self._call(lambda: self._under.revoke(lease), self.aim("revoke", ()), changes=True)

    async def compact(self, revision: Revision) -> None:
        await self._call(lambda: self._under.compact(revision))

    async def usage(self) -> Usage:
        return await self._call(self._under.usage)

    def watch(self, prefix: str, after: Revision) -> AsyncIterator[Sequence[Event]]:
        return _Watching(self, prefix, after)

    async def _call(
        self,
        call: Callable[[], Awaitable[T]],
        shot: Shot | None = None,
        send: Callable[[float], None] | None = None,
        *,
        changes: bool = False,
    ) -> T:
        if shot is not None:
            self.failed_at = self._clock.elapsed()
            try:
                return await shot.around(lambda: self._call(call, changes=changes), lambda: self._fail("calling"), send)
            finally:
                self.failed_at = self._clock.elapsed()
        is_slow_to_come = not self.delay_max_seconds and self.usual_seconds and self._rng.random() < 0.5
        if self.delay_max_seconds or is_slow_to_come:
            await self._delay()
        if self.cut or self.mute:
            await self._fail("calling")
        answer = await call()
        self.calls += 1
        if self.delay_max_seconds or (self.usual_seconds and not is_slow_to_come):
            await self._delay()
        if self.cut or self.deaf or (changes and self.answers_lost and self._rng.random() < self.answers_lost):
            await self._fail("waiting for the answer")
        return answer

    async def _delay(self) -> None:
        await self._clock.sleep(self._rng.random() * max(self.delay_max_seconds, self.usual_seconds) / 2)

    async def _fail(self, when: str) -> None:
        self.failed_at = self._clock.elapsed()
        await self._clock.sleep(self._patience_seconds)
        self.failed_at = self._clock.elapsed()
        raise Unreachable("metadata", f"cut off while {when}")

    def _dropped(self) -> bool:
        self._events += 1
        return self.drop_every > 0 and self._events % self.drop_every == 0


def _at_nothing(call: str, about: Sequence[str]) -> Shot | None:
    return None


class _Watching:
    """Not an async generator: when one that was dropped is closed is up to the garbage collector."""

    def __init__(self, store: FaultyMetadata, prefix: str, after: Revision) -> None:
        self._store = store
        self._events = store._under.watch(prefix, after)
        self._begun = False

    def __aiter__(self) -> _Watching:
        return self

    async def __anext__(self) -> Sequence[Event]:
        store = self._store
        if not self._begun and (store.cut or store.mute or store.deaf):
            await store._fail("watching")
        self._begun = True
        while True:
            events = await anext(self._events)
            if store.delay_max_seconds:
                await store._delay()
            if store.cut or store.deaf:
                await store._fail("watching")
            if told := [event for event in events if not store._dropped()]:
                return told


def sail(clock: Clock, seconds: float, arrive: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Does it after a while, outside of whatever process asks for it."""

    async def travel() -> None:
        await clock.sleep(seconds)
        await arrive()

    asyncio.get_running_loop().create_task(travel(), name="late", context=Context())
