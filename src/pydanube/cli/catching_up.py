"""`danube consume --once`: whether everything is done that a topic had when the consumer began.

    course = Course(wish, note, progress)      `progress` asks the brokers, by either protocol
    await course.begin()
    while (message := await course.next(receive)) is not None:
        course.shown(message.topic, message.offset)
    course.is_over                             False: silence ended it before

What comes later is not waited for: somebody may send for ever.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from pydanube.cli.consuming import Wish

T = TypeVar("T")

QUIET_SECONDS: Final = 0.2  # nothing came for so long: perhaps there is nothing more
FOR_EVER_SECONDS: Final = 3600.0  # and then again


class Progress(NamedTuple):
    """Of a subscription in one partition."""

    cursor: int | None  # the last acknowledged offset
    head: int
    lag: int
    sentence: str


class Course:
    """Of one consumer, with `--once` or without."""

    def __init__(
        self,
        wish: Wish,
        note: Callable[[str], None],
        progress: Callable[[], Awaitable[Mapping[str, Progress]]],
    ) -> None:
        self._wish = wish
        self._note = note
        self._progress = progress
        self._heads: dict[str, int] = {}  # of each partition, when it began
        self._kept: dict[str, int] = {}  # of those: shown and not acknowledged
        self._asked_at = time.monotonic()
        self._has_said_why = False
        self.is_over = False

    async def begin(self) -> None:
        if self._wish.once:
            self._heads = {part: found.head for part, found in (await self._progress()).items()}
            self._kept = dict.fromkeys(self._heads, 0)

    def shown(self, topic: str, offset: int) -> None:
        if not self._wish.ack and offset < self._heads.get(topic, 0):
            self._kept[topic] += 1

    async def next(self, receive: Callable[[float], Awaitable[T | None]]) -> T | None:
        """What `receive` has within so many seconds. None: silence has lasted long enough, or it is over."""
        wish = self._wish
        waited = 0.0
        while True:
            # Also while messages come.
            if wish.once and time.monotonic() - self._asked_at > QUIET_SECONDS and await self._ask():
                return None
            left = FOR_EVER_SECONDS if wish.timeout_seconds is None else max(0.0, wish.timeout_seconds - waited)
            seconds = min(left, QUIET_SECONDS) if wish.once else left
            found = await receive(seconds)
            if found is not None:
                return found
            waited += seconds
            if wish.timeout_seconds is not None and waited >= wish.timeout_seconds:
                if wish.once:
                    await self._ask()
                return None

    async def _ask(self) -> bool:
        """Whether everything that was there when it began is done, or kept by this consumer as it was told."""
        found = await self._progress()
        self._asked_at = time.monotonic()
        for part, head in self._heads.items():
            now = found[part]
            is_behind = head > 0 and (now.cursor is None or now.cursor + 1 < head)
            # What is kept never moves the cursor; what came since then is not waited for.
            left = now.lag if self._wish.ack else now.lag - (now.head - head) - self._kept[part]
            if is_behind and left > 0:
                if not self._has_said_why:
                    self._has_said_why = True
                    self._note(f"not caught up yet: {now.sentence}")
                return False
        self.is_over = True
        return True
