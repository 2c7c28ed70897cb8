"""The metadata store as a broker's topics use it: what they write below `/cluster/` is in its own view immediately.

A claim deletes the topic's marker, a seal puts one. A view that learns of it only by the watch would have the topic
claimed a second time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

from pydanube.ports import Compare, Delete, Event, Item, LeaseId, MetadataStore, Put, Revision, Usage


class ObservedStore:
    """A MetadataStore over another one. `notice` is called with every change that was made, if its answer came."""

    def __init__(self, under: MetadataStore, notice: Callable[[Sequence[Put | Delete], Revision], None]) -> None:
        self._under = under
        self._notice = notice

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        revision = await self._under.transact(compares, operations)
        if revision is not None and operations:
            self._notice(operations, revision)
        return revision

    async def get(self, key: str) -> Item | None:
        return await self._under.get(key)

    async def list(self, prefix: str) -> list[Item]:
        return await self._under.list(prefix)

    def watch(self, prefix: str, after: Revision) -> AsyncIterator[Sequence[Event]]:
        return self._under.watch(prefix, after)

    async def compact(self, revision: Revision) -> None:
        await self._under.compact(revision)

    async def usage(self) -> Usage:
        return await self._under.usage()

    async def grant(self, ttl_seconds: float) -> LeaseId:
        return await self._under.grant(ttl_seconds)

    async def renew(self, lease: LeaseId) -> None:
        await self._under.renew(lease)

    async def revoke(self, lease: LeaseId) -> None:
        await self._under.revoke(lease)
