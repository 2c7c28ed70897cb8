"""Objects in a dict."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from hashlib import blake2b

from pydanube.core.history.object_keys import check_key
from pydanube.errors import Conflict
from pydanube.ports import Buffer, ObjectInfo, StoreOpener


class MemoryObjectStore:
    def __init__(self) -> None:
        self._objects: dict[str, tuple[ObjectInfo, bytes]] = {}

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        check_key(key)
        if create and key in self._objects:
            raise Conflict(key)
        stored = b"".join(data)
        # Like S3's, the tag is made from the content: equal bytes have equal tags, in every run.
        info = ObjectInfo(key, len(stored), blake2b(stored, digest_size=16).hexdigest())
        self._objects[key] = (info, stored)
        return info

    async def get(self, key: str) -> bytes:
        return self._find(key)[1]

    async def get_range(self, key: str, position: int, length: int) -> bytes:
        assert position >= 0 and length >= 0
        return self._find(key)[1][position : position + length]

    async def head(self, key: str) -> ObjectInfo:
        return self._find(key)[0]

    async def opener(self) -> StoreOpener | None:
        return None

    def list(self, prefix: str, *, after: str = "") -> AsyncIterator[ObjectInfo]:
        keys = sorted(key for key in self._objects if key.startswith(prefix) and key > after)
        return _Listing(iter([self._objects[key][0] for key in keys]))

    async def delete(self, key: str) -> None:
        self._objects.pop(check_key(key), None)

    def _find(self, key: str) -> tuple[ObjectInfo, bytes]:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key) from None


class _Listing:
    """Not an async generator: one that is dropped half-way makes the loop start a task to close it, at a
    moment that the garbage collector chooses.
    """

    def __init__(self, infos: Iterator[ObjectInfo]) -> None:
        self._infos = infos

    def __aiter__(self) -> _Listing:
        return self

    async def __anext__(self) -> ObjectInfo:
        for info in self._infos:
            return info
        raise StopAsyncIteration
