"""One process's way to a metadata store: slow, cut off, forgetful of watch events, all from a seed.

    store = FaultyMetadata(under, clock, Random(seed))
    store.delay_max_seconds = 0.05         every call takes up to so long, half of it before, half after
    store.cut = True                       nothing gets through; calls raise Unreachable after `patience_seconds`
    store.answers_lost = 0.1               this part of all changes is made, and the caller never learns it
    store.drop_every = 10                  of the watch's events every tenth is never told; 1: none is told at all

A call is judged when it is made and again when it is answered: a cut in between loses the answer alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from random import Random
from typing import TypeVar

from pydanube.errors import Unreachable
from pydanube.ports import Clock, Compare, Delete, Event, Item, LeaseId, MetadataStore, Put, Revision

T = TypeVar("T")


class FaultyMetadata:
    """A MetadataStore over another one. `calls` counts what got through."""

    def __init__(self, under: MetadataStore, clock: Clock, dice: Random, *, patience_seconds: float = 1.0) -> None:
        self._under = under
        self._clock = clock
        self._dice = dice
        self._patience_seconds = patience_seconds
        self.delay_max_seconds = 0.0
        self.answers_lost = 0.0
        self.drop_every = 0
        self.cut = False
        self.calls = 0
        self._events = 0

    async def get(self, key: str) -> Item | None:
        return await self._call(lambda: self._under.get(key))

    async def list(self, prefix: str) -> list[Item]:
        return await self._call(lambda: self._under.list(prefix))

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        return await self._call(lambda: self._under.transact(compares, operations), changes=bool(operations))

    async def grant(self, ttl_seconds: float) -> LeaseId:
        return await self._call(lambda: self._under.grant(ttl_seconds), changes=True)

    async def renew(self, lease: LeaseId) -> None:
        await self._call(lambda: self._under.renew(lease), changes=True)

    async def revoke(self, lease: LeaseId) -> None:
        await self._call(lambda: self._under.revoke(lease), changes=True)

    async def watch(self, prefix: str, after: Revision) -> AsyncIterator[Sequence[Event]]:
        if self.cut:
            await self._fail("watching")
        async for events in self._under.watch(prefix, after):
            await self._delay()
            if self.cut:
                await self._fail("watching")
            told = [event for event in events if not self._dropped()]
            if told:
                yield told

    async def _call(self, call: Callable[[], Awaitable[T]], *, changes: bool = False) -> T:
        await self._delay()
        if self.cut:
            await self._fail("calling")
        answer = await call()
        self.calls += 1
        await self._delay()
        if self.cut or (changes and self._dice.random() < self.answers_lost):
            await self._fail("waiting for the answer")
        return answer

    async def _delay(self) -> None:
        if self.delay_max_seconds:
            await self._clock.sleep(self._dice.random() * self.delay_max_seconds / 2)

    async def _fail(self, when: str) -> None:
        await self._clock.sleep(self._patience_seconds)
        raise Unreachable("metadata", f"cut off while {when}")

    def _dropped(self) -> bool:
        self._events += 1
        return self.drop_every > 0 and self._events % self.drop_every == 0
