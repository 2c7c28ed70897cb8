"""When the history of a metadata store may go, and to which revision.

A store keeps every change for watches that begin in the past, until it is compacted. Watches of brokers are seconds
behind, and one that is further behind lists again.

    every broker notes the revision now and then     so that any leader knows where the store was a while ago
    the leader compacts, every `keep_seconds`        to the newest revision that is at least so old
"""

from __future__ import annotations

from collections import deque
from typing import Final

KEEP_SECONDS: Final = 300.0
NEARLY_FULL: Final = 0.5  # of the quota: then there is time to do something before nothing can be written any more


class Compacting:
    """What one broker knows of the store's past."""

    def __init__(self, keep_seconds: float = KEEP_SECONDS) -> None:
        self._keep_seconds = keep_seconds
        self._noted: deque[tuple[float, int]] = deque()  # when the store had which revision, oldest first
        self._done_at: float | None = None
        self._done = 0

    def step(self, now: float, revision: int, *, leads: bool) -> int | None:
        """The store has this revision now. Returns the one to compact to, if it is time. `now` never goes back."""
        self._noted.append((now, revision))
        while len(self._noted) > 1 and self._noted[1][0] <= now - self._keep_seconds:
            self._noted.popleft()
        at, old = self._noted[0]
        if not leads or at > now - self._keep_seconds or old <= self._done:
            return None
        if self._done_at is not None and now - self._done_at < self._keep_seconds:
            return None
        self._done_at, self._done = now, old
        return old
