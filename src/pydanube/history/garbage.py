"""Objects of one topic without a descriptor, and since when that is known."""

from __future__ import annotations

from collections.abc import Iterable

from pydanube.ports import Clock


class Garbage:
    """Times are those of `Clock.elapsed`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since: dict[str, float] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def __contains__(self, name: str) -> bool:
        return name in self._since

    def add(self, *names: str) -> None:
        """They have no descriptor any more, or none yet."""
        self._since.update(dict.fromkeys(names, self._clock.elapsed()))

    def discard(self, *names: str) -> None:
        """They are described, or gone."""
        for name in names:
            self._since.pop(name, None)

    def only(self, names: Iterable[str], now: float) -> None:
        """These were found, and nothing else: what was not known before is garbage since `now`."""
        self._since = {name: self._since.get(name, now) for name in names}

    def older_than(self, seconds: float, now: float) -> list[str]:
        return [name for name, since in self._since.items() if now - since >= seconds]

    def ages(self, names: Iterable[str]) -> dict[str, float]:
        """For how many seconds each is known to be garbage: from now on, if this is the first that is heard of it."""
        now = self._clock.elapsed()
        return {name: now - self._since.setdefault(name, now) for name in names}
