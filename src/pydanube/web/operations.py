"""What was begun from a page and goes on after it: moves, drains, redrives. Pages look on.

    operation = operations.begin("move", topic, run)      run(operation) tells it how far it is
    operations.of(topic)                                  newest first, for the page of the topic

An operation lives in this process; what it began goes on in the brokers if the process ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydanube.errors import DanubeError

log = logging.getLogger(__name__)

KEPT_MAX: Final = 100
RUNNING_MAX: Final = 20
SHOWN_SECONDS: Final = 600.0  # after its end

# Phases of a move in order, and what they are to people; `claim` is the new owner's.
PHASES: Final[Mapping[str, str]] = {
    "upload": "Upload history",
    "quiet": "Pause publishing",
    "cursors": "Save cursors",
    "rest": "Upload the rest",
    "seal": "Seal and release",
    "close": "Close",
    "claim": "Open on the new broker",
}
PAUSING: Final = frozenset({"quiet", "cursors", "rest", "seal"})


@dataclass(slots=True, eq=False)
class Operation:
    """One thing on its way. `failure` is a sentence; empty: none."""

    number: int
    kind: str  # move, drain, redrive
    subject: str  # a topic or a broker's id
    title: str
    started_at: float
    finished_at: float | None = None
    sentence: str = "asking the broker"
    phase: str = ""
    phases_ms: dict[str, float] = field(default_factory=dict)
    facts: list[tuple[str, str]] = field(default_factory=list)
    failure: str = ""
    clock: Callable[[], float] = time.time

    @property
    def is_over(self) -> bool:
        return self.finished_at is not None

    @property
    def state(self) -> str:
        return "failed" if self.failure else "done" if self.is_over else "running"

    def age_seconds(self) -> float:
        """Since its end; 0 before it."""
        return 0.0 if self.finished_at is None else self.clock() - self.finished_at

    def steps(self) -> list[tuple[str, str, str, float | None]]:
        """Phase, label, done/now/open, and milliseconds if they are known."""
        order = list(PHASES)
        at = order.index(self.phase) if self.phase in order else -1
        found = []
        for place, (name, label) in enumerate(PHASES.items()):
            if name in self.phases_ms:
                state = "done"
            elif self.is_over:
                state = "open" if self.failure else "done"
            else:
                state = "done" if place < at else "now" if place == at else "open"
            found.append((name, label, state, self.phases_ms.get(name)))
        return found

    @property
    def pause_ms(self) -> float:
        """How long publishers waited on the old broker's side."""
        return sum(ms for name, ms in self.phases_ms.items() if name in PAUSING)


class TooMany(DanubeError):
    def __str__(self) -> str:
        return f"{RUNNING_MAX} operations are on their way already; wait until one of them is over"


class Operations:
    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._kept: list[Operation] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._number = 0

    def begin(
        self, kind: str, subject: str, title: str, run: Callable[[Operation], Awaitable[None]], *, sentence: str = ""
    ) -> Operation:
        """Raises TooMany."""
        if len(self._tasks) >= RUNNING_MAX:
            raise TooMany()
        self._number += 1
        operation = Operation(self._number, kind, subject, title, self._clock(), clock=self._clock)
        operation.sentence = sentence or operation.sentence
        self._kept = [*self._kept[-KEPT_MAX + 1 :], operation]
        task = asyncio.create_task(self._run(operation, run), name=f"{kind} {subject}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return operation

    async def _run(self, operation: Operation, run: Callable[[Operation], Awaitable[None]]) -> None:
        try:
            await run(operation)
        except DanubeError as error:
            operation.failure = str(error)
        except asyncio.CancelledError:
            operation.failure = "the web admin was stopped; the brokers go on with what was begun"
            raise
        except Exception as error:  # the end of the task: a page must not wait without end
            log.error("operation failed", exc_info=error, extra={"kind": operation.kind, "subject": operation.subject})
            operation.failure = "something went wrong in the web admin; its log says what"
        finally:
            operation.finished_at = self._clock()

    def of(self, *kinds: str, subject: str | None = None) -> Sequence[Operation]:
        """Newest first; those that are over for long are left out."""
        oldest = self._clock() - SHOWN_SECONDS
        return [
            each
            for each in reversed(self._kept)
            if each.kind in kinds
            and (subject is None or each.subject == subject)
            and (each.finished_at is None or each.finished_at > oldest)
        ]

    def running(self, kind: str, subject: str) -> Operation | None:
        return next((each for each in self.of(kind, subject=subject) if not each.is_over), None)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
