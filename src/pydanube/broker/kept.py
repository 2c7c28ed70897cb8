"""What topics keep of what they read last, so that the next who reads the same place need not read or decode it again.

One bound in bytes for all topics; the least recently used goes first, and what was not used for KEPT_SECONDS goes in
any case. The newest always stays, however large: a consumer with a window of one message would otherwise have a
large batch decoded for each message of it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Final

from pydanube.broker.timer import Timer
from pydanube.ports import Clock

KEPT_SECONDS: Final = 10.0


class KeptBytes:
    """One per broker."""

    def __init__(self, limit_bytes: int, clock: Clock, timer: Timer) -> None:
        self.limit_bytes = limit_bytes
        self.size_bytes = 0
        self._clock = clock
        self._timer = timer
        self._items: OrderedDict[Hashable, tuple[Any, int, float]] = OrderedDict()  # value, bytes, last use
        self._is_watched = False

    def __len__(self) -> int:
        return len(self._items)

    def get(self, key: Hashable) -> Any:
        """None: it is not here."""
        item = self._items.get(key)
        if item is None:
            return None
        value, size_bytes, _ = item
        self._items[key] = (value, size_bytes, self._clock.elapsed())
        self._items.move_to_end(key)
        return value

    def put(self, key: Hashable, value: Any, size_bytes: int) -> None:
        self._drop(key)
        now = self._clock.elapsed()
        self._items[key] = (value, size_bytes, now)
        self.size_bytes += size_bytes
        while self.size_bytes > self.limit_bytes and len(self._items) > 1:
            self._drop(next(iter(self._items)))
        if not self._is_watched:
            self._is_watched = True
            self._timer.call_at(now + KEPT_SECONDS, self._sweep)

    def forget(self, owner: Hashable) -> None:
        """Everything that this topic keeps: under its own name, and in pairs that begin with it."""
        for key in [each for each in self._items if each == owner or (isinstance(each, tuple) and each[0] == owner)]:
            self._drop(key)

    def _drop(self, key: Hashable) -> None:
        item = self._items.pop(key, None)
        if item is not None:
            self.size_bytes -= item[1]

    def _sweep(self, now: float) -> None:
        while self._items:
            key, (_, _, used) = next(iter(self._items.items()))  # those used longest ago come first
            if used + KEPT_SECONDS > now:
                self._timer.call_at(used + KEPT_SECONDS, self._sweep)
                return
            self._drop(key)
        self._is_watched = False
