"""Who wants to know when a topic is not served here any more."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from pydanube.errors import NotServed

Watcher: TypeAlias = Callable[[NotServed], None]


class Watchers:
    """Each is called once, when the topic has closed: everything it stored is answered, and nothing more will be.

    The error says why, and where the topic is now, if that is known (`moved_to`).
    """

    __slots__ = ("_watchers",)

    def __init__(self) -> None:
        self._watchers: dict[Watcher, None] = {}  # in the order in which they came

    def watch(self, watcher: Watcher) -> None:
        self._watchers[watcher] = None

    def forget(self, watcher: Watcher) -> None:
        self._watchers.pop(watcher, None)

    def notify(self, why: NotServed) -> None:
        watchers, self._watchers = self._watchers, {}
        for watcher in watchers:
            watcher(why)
