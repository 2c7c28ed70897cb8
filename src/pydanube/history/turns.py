"""Whose turn it is: steps of different topics, two at a time, first come, first served.

One that takes longer than 30 s is slow: it runs in addition to the two, and so do its topic's next steps, until one is
quick again. At most four do; if there are more, the step is given up, and made again when there is a place among the
four. So steps that hang, however many, leave the others their turns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

from pydanube.errors import DeadlineExceeded
from pydanube.history.upload_state import UploadState
from pydanube.ports import Clock

STEPS_AT_ONCE: Final = 2  # steps of different topics, side by side
SLOW_AT_ONCE: Final = 4  # in addition, of topics that are slow: each may have an object in memory
SLOW_SECONDS: Final = 30.0


@dataclass(slots=True, eq=False)
class _Turn:
    """A step that is being made."""

    upload_state: UploadState
    lane: asyncio.Semaphore | None
    limit: asyncio.Timeout
    since: float


class Turns:
    """Of all topics of a broker."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._quick = asyncio.Semaphore(STEPS_AT_ONCE)
        self._slow = asyncio.Semaphore(SLOW_AT_ONCE)
        self._turns: dict[_Turn, None] = {}  # the oldest first

    @contextlib.asynccontextmanager
    async def of(self, upload_state: UploadState) -> AsyncIterator[None]:
        """One step of the topic: waits until it is its turn and the topic is free.

        In this order: a step that waits for its turn must not block others from the topic, least of all a move. Raises
        DeadlineExceeded if the step is given up.
        """
        lane = self._slow if upload_state.is_slow else self._quick
        await lane.acquire()
        turn = _Turn(upload_state, lane, asyncio.timeout(None), self._clock.elapsed())
        try:
            async with turn.limit:
                self._turns[turn] = None
                async with upload_state.working:
                    yield
            upload_state.is_slow = self._clock.elapsed() - turn.since >= SLOW_SECONDS
        except TimeoutError:
            if not turn.limit.expired():
                raise
            raise DeadlineExceeded("a step of uploading", SLOW_SECONDS) from None
        finally:
            self._turns.pop(turn, None)
            if turn.lane is not None:
                turn.lane.release()

    async def let_others_by(self, now: float) -> None:
        """Steps that take long make place for others."""
        for turn in [each for each in self._turns if each.lane is self._quick and now - each.since >= SLOW_SECONDS]:
            turn.upload_state.is_slow = True
            if self._slow.locked():
                turn.limit.reschedule(asyncio.get_running_loop().time())
                turn.lane = None  # told once; and to end may take as long as the store hangs
                self._quick.release()
            else:
                await self._slow.acquire()  # does not wait: there is a place
                turn.lane = self._slow
                self._quick.release()
