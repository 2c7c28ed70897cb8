"""Whose object store is it? It belongs to the cluster whose id stands in its object `danube-cluster.json`.

Two clusters in one place would read, and one day delete, each other's objects. So the first broker writes its cluster's
id there, and every later one compares. The same few requests tell wrong credentials, a missing bucket, and a server
that ignores conditions, on which two brokers could create one object.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Final

from pydanube.errors import ConfigError, Conflict, StoreRefused, Unreachable
from pydanube.ports import Buffer, ObjectInfo, ObjectStore, StoreOpener
from pydanube.stores.objects.settings import WHAT_TO_SET

ID_KEY: Final = "danube-cluster.json"


async def check_store(
    store: ObjectStore, cluster_id: str, *, url: str = "", key: str = "storage.url", seconds: float = 10.0
) -> Unreachable | None:
    """Returns None for a store that is there and this cluster's, and why not for one that does not answer.

    Raises ConfigError for one that refuses us, or that belongs to another cluster. `url` and `key` are what the error
    calls the store and its setting. A store that did not answer is to be asked again before it is used, which
    OwnedObjectStore does; so no start waits for longer than `seconds`.
    """
    try:
        async with asyncio.timeout(seconds):
            why_not = await _mark_store(store, cluster_id)
    except TimeoutError:
        return Unreachable(url, f"no answer within {seconds:g} s")
    except StoreRefused as error:
        hint = WHAT_TO_SET.get(error.peer.partition("://")[0])
        raise ConfigError(key, error.peer, f"{error.why}; give {hint}" if hint else error.why) from error
    except Unreachable as error:
        return error
    if why_not:
        raise ConfigError(key, url, why_not)
    return None


async def _mark_store(store: ObjectStore, cluster_id: str) -> str:
    """Why the store is not for us; empty if it is ours, perhaps since now."""
    content = json.dumps({"cluster_id": cluster_id}).encode()
    while True:
        try:
            content = await store.get(ID_KEY)
        except FileNotFoundError:
            try:
                await store.put(ID_KEY, [content], create=True)
            except Conflict:
                continue  # another broker was quicker; perhaps it is one of ours
        break
    owner = _owner(content)
    if owner is None:
        return f"its object {ID_KEY} is damaged; bring it back, or delete it if the store is this cluster's for certain"
    if owner != cluster_id:
        return (
            f"it belongs to cluster {owner!r}, and this is cluster {cluster_id!r}; "
            f"use another bucket or prefix, or delete {ID_KEY} there if that cluster is gone for good"
        )
    # Now it must be refused. That we may write at all is found out by the way.
    try:
        await store.put(ID_KEY, [content], create=True)
    except Conflict:
        return ""
    return "it replaces an object where it was told to create one; use a server that knows If-None-Match"


def _owner(content: bytes) -> str | None:
    try:
        found = json.loads(content)
    except ValueError:
        return None
    owner = found.get("cluster_id") if isinstance(found, dict) else None
    return owner if isinstance(owner, str) else None


class OwnedObjectStore:
    """A store that is not used before it is known to be this cluster's: until then every call checks first.

    So a broker may start while its store does not answer. A store that turns out to be another cluster's refuses every
    call with StoreRefused. `url` is what that error calls it. `objection` is asked too: why the store is not for us
    though it is this cluster's, or nothing.
    """

    def __init__(
        self,
        store: ObjectStore,
        cluster_id: str,
        url: str,
        objection: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._objection = objection
        self._store = store
        self._cluster_id = cluster_id
        self._url = url
        self._is_ours = False

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        await self.ask()
        return await self._store.put(key, data, create=create)

    async def get(self, key: str) -> bytes:
        await self.ask()
        return await self._store.get(key)

    async def get_range(self, key: str, position: int, length: int) -> Buffer:
        await self.ask()
        return await self._store.get_range(key, position, length)

    async def head(self, key: str) -> ObjectInfo:
        await self.ask()
        return await self._store.head(key)

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        return _Listing(self, self._store.list(prefix, after=after))

    async def delete(self, key: str) -> None:
        await self.ask()
        await self._store.delete(key)

    async def opener(self) -> StoreOpener | None:
        await self.ask()
        return await self._store.opener()

    async def ask(self) -> None:
        """Raises Unreachable or StoreRefused while it is not known to be ours."""
        if self._is_ours:
            return
        why_not = await _mark_store(self._store, self._cluster_id)
        if not why_not and self._objection is not None:
            why_not = await self._objection()
        if why_not:
            raise StoreRefused(self._url, why_not)
        self._is_ours = True


class _Listing:
    def __init__(self, store: OwnedObjectStore, listing: AsyncIterator[ObjectInfo]) -> None:
        self._store = store
        self._listing = listing

    def __aiter__(self) -> _Listing:
        return self

    async def __anext__(self) -> ObjectInfo:
        await self._store.ask()
        return await anext(self._listing)
