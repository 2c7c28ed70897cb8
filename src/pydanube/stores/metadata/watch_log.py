"""The last changes of a metadata store, and the watches that follow them. Belongs to one event loop."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import TypeAlias

from pydanube.errors import Unreachable
from pydanube.ports import Event, Revision

Change: TypeAlias = tuple[Event, ...]  # the events of one revision


class WatchHistory:
    """Changes after `revision`, one per revision; the oldest are forgotten beyond `changes_max`."""

    def __init__(self, revision: Revision, changes_max: int) -> None:
        assert changes_max > 0
        self._revision = revision
        self._changes: deque[Change] = deque(maxlen=changes_max)
        self._waiting: dict[asyncio.Future[None], None] = {}  # an ordered set, so that watches wake in order
        self._closed = False

    def append(self, changes: Sequence[Change]) -> None:
        self._changes.extend(changes)
        self._revision += len(changes)
        if changes:
            self.wake()

    def since(self, prefix: str, after: Revision) -> tuple[list[Event], Revision]:
        """What happened under `prefix` after that revision, and the revision from which to ask again."""
        if self._closed:
            raise Unreachable("metadata", "the store was closed")
        oldest = self._revision - len(self._changes) + 1
        if after + 1 < oldest:
            raise Unreachable("metadata", f"changes before revision {oldest} are no longer kept")
        start = max(0, after + 1 - oldest)
        events = [
            event for change in islice(self._changes, start, None) for event in change if event.key.startswith(prefix)
        ]
        return events, max(after, self._revision)

    def wake(self) -> None:
        """Makes every waiting watch look again."""
        for waiting in self._waiting:
            if not waiting.done():
                waiting.set_result(None)
        self._waiting.clear()

    def close(self) -> None:
        """Ends every watch."""
        self._closed = True
        self.wake()

    async def next_change(self, nap: Callable[[], Awaitable[None]] | None) -> None:
        """Returns after the next `wake`, or when `nap` ends."""
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[None] = loop.create_future()
        self._waiting[changed] = None
        napping = None if nap is None else loop.create_task(_nap(nap, changed))
        try:
            await changed
        finally:
            self._waiting.pop(changed, None)
            if napping is not None:
                napping.cancel()


async def _nap(nap: Callable[[], Awaitable[None]], changed: asyncio.Future[None]) -> None:
    await nap()
    if not changed.done():
        changed.set_result(None)
