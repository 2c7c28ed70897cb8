"""Objects in the order of their keys, found directory by directory.

A directory of files has no order of its own, and some servers that speak S3 walk theirs name by name: all of `a/`
before `a-b/`, though the minus sign sorts before the slash. So each directory is sorted here, where it is complete:

    names of one directory    a.b    a/    a-b/        sorted as text    a-b/    a.b    a/

Every key below a directory begins with the directory's name and a slash, so the parts of this order never mix.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Generic, NamedTuple, TypeVar

from pydanube.core.history.object_keys import is_key
from pydanube.ports import ObjectInfo

T = TypeVar("T")


class ListedObject(NamedTuple, Generic[T]):
    """A name in a directory. `key` is whole, and a directory's ends with a slash; `what` is the store's business."""

    key: str
    what: T


class Listing(Generic[T]):
    """Not an async generator: one that is dropped half-way makes the loop start a task to close it, at a moment that
    the garbage collector chooses.

    `look` returns what is in the directory "" or "a/b/", `info_of` what is known of an object, or None if it is
    gone since.
    """

    def __init__(
        self,
        prefix: str,
        after: str,
        look: Callable[[str], Awaitable[Iterable[ListedObject[T]]]],
        info_of: Callable[[ListedObject[T]], Awaitable[ObjectInfo | None]],
    ) -> None:
        self._prefix = prefix
        self._after = after
        self._look = look
        self._info_of = info_of
        self._ahead: list[ListedObject[T]] = []  # the next one last
        self._first: str | None = prefix[: prefix.rfind("/") + 1]

    def __aiter__(self) -> Listing[T]:
        return self

    async def __anext__(self) -> ObjectInfo:
        if self._first is not None:
            # A directory that no key can have is not there, whatever it would mean to the store.
            directory, self._first = self._first, None
            if not directory or is_key(directory[:-1]):
                await self._enter(directory)
        while self._ahead:
            found = self._ahead.pop()
            if found.key.endswith("/"):
                await self._enter(found.key)
            elif (info := await self._info_of(found)) is not None:
                return info
        raise StopAsyncIteration

    async def _enter(self, directory: str) -> None:
        wanted = [found for found in await self._look(directory) if self._is_wanted(found.key)]
        self._ahead += sorted(wanted, key=lambda found: found.key, reverse=True)

    def _is_wanted(self, key: str) -> bool:
        if not key.endswith("/"):
            return is_key(key) and key.startswith(self._prefix) and key > self._after
        below = key > self._after or self._after.startswith(key)
        return is_key(key[:-1]) and below and (key.startswith(self._prefix) or self._prefix.startswith(key))
