"""`danube consume --once`: whether everything is done that a topic had when the consumer began.

    catch_up = CatchingUp(options, note, progress)      `progress` asks the brokers, by either protocol
    await catch_up.begin()
    while (message := await catch_up.next(receive)) is not None:
        catch_up.shown(message.topic, message.offset)
    catch_up.is_over                             False: silence ended it before

What comes later is not waited for: producers may go on without end.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

if TYPE_CHECKING:
    from pydanube.cli.consuming import ConsumeOptions

T = TypeVar("T")

QUIET_SECONDS: Final = 0.2  # nothing came for so long: perhaps there is nothing more
FOR_EVER_SECONDS: Final = 3600.0  # and then again


class PartitionProgress(NamedTuple):
    """Of a subscription in one partition."""

    cursor: int | None  # the last acknowledged offset
    head: int
    lag: int
    sentence: str


class CatchingUp:
    """Of one consumer, with `--once` or without."""

    def __init__(
        self,
        options: ConsumeOptions,
        note: Callable[[str], None],
        progress: Callable[[], Awaitable[Mapping[str, PartitionProgress]]],
    ) -> None:
        self._options = options
        self._note = note
        self._progress = progress
        self._heads: dict[str, int] = {}  # of each partition, when it began
        self._kept: dict[str, int] = {}  # of those: shown and not acknowledged
        self._asked_at = time.monotonic()
        self._has_said_why = False
        self.is_over = False

    async def begin(self) -> None:
        if self._options.once:
            self._heads = {part: found.head for part, found in (await self._progress()).items()}
            self._kept = dict.fromkeys(self._heads, 0)

    def shown(self, topic: str, offset: int) -> None:
        if not self._options.ack and offset < self._heads.get(topic, 0):
            self._kept[topic] += 1

    async def next(self, receive: Callable[[float], Awaitable[T | None]]) -> T | None:
        """What `receive` has within so many seconds. None: silence has lasted long enough, or it is over."""
        options = self._options
        waited = 0.0
        while True:
            # Also while messages come.
            if (
                options.once
                and time.monotonic() - self._asked_at > QUIET_SECONDS
                and await self._ask(is_silent=waited > 0)
            ):
                return None
            left = FOR_EVER_SECONDS if options.timeout_seconds is None else max(0.0, options.timeout_seconds - waited)
            seconds = min(left, QUIET_SECONDS) if options.once else left
            found = await receive(seconds)
            if found is not None:
                return found
            waited += seconds
            if options.timeout_seconds is not None and waited >= options.timeout_seconds:
                if options.once:
                    await self._ask(is_silent=True)
                return None

    async def _ask(self, *, is_silent: bool) -> bool:
        """Whether everything that was there when it began is done, or kept by this consumer as its options say.

        Why it is not is said once, and only when nothing comes: as long as something does, all is well.
        """
        found = await self._progress()
        self._asked_at = time.monotonic()
        for part, head in self._heads.items():
            now = found[part]
            is_behind = head > 0 and (now.cursor is None or now.cursor + 1 < head)
            # What is kept never moves the cursor; what came since then is not waited for.
            left = now.lag if self._options.ack else now.lag - (now.head - head) - self._kept[part]
            if is_behind and left > 0:
                if is_silent and not self._has_said_why:
                    self._has_said_why = True
                    self._note(f"not caught up yet: {now.sentence}")
                return False
        self.is_over = True
        return True
