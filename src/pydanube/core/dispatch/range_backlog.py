"""Ranges that are to be sent, or not: what Exclusive, Failover and Shared keep.

An offset that is neither settled nor in flight is in one of three places:

    ready     to be sent as soon as a window has space    taken back, rescued, due again
    waiting   to be sent, or dead-lettered, again later   failed, with the time it is due
    held      not to be sent                              poison: blocked, or being dead-lettered
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from pydanube.core.dispatch.backlog import BacklogCounts
from pydanube.core.dispatch.deliveries import StepContext
from pydanube.core.dispatch.delivery import UNTRIED, PoisonPolicy, RetryAt, Tries, copy_delay_seconds, judge
from pydanube.core.dispatch.events import Blocked, DeadLetter, PoisonDropped
from pydanube.core.dispatch.ranges import OffsetRange, RangeMap, RangePiece
from pydanube.core.dispatch.window import SubscriptionProgress


class Wait(NamedTuple):
    """Until `due`. A dead letter that could not be copied is not sent again, only copied again."""

    due: float
    tries: Tries
    dead_letter: bool = False


class PoisonHold(NamedTuple):
    """Poison. `blocks` False: the shipper is copying it to the dead-letter topic."""

    blocks: bool
    tries: Tries


class RangeBacklog:
    """Ready, waiting and held ranges. `blocking` offsets let nothing be sent."""

    __slots__ = ("_context", "_due", "_held", "_progress", "_ready", "_waiting", "blocking")

    def __init__(self, context: StepContext, progress: SubscriptionProgress) -> None:
        self._context = context
        self._progress = progress
        self._ready: RangeMap[Tries] = RangeMap()
        self._waiting: RangeMap[Wait] = RangeMap()
        self._held: RangeMap[PoisonHold] = RangeMap()
        self._due: list[tuple[float, int, int]] = []  # heap of (due, first, end); acked ones are found stale
        self.blocking = 0

    def counts(self, committed_head: int) -> BacklogCounts:
        blocks = next((piece.first for piece in self._held if piece.value.blocks), None) if self.blocking else None
        return BacklogCounts(
            undispatched=self._ready.count + self._progress.fresh_count(committed_head),
            waiting=self._waiting.count,
            dead_lettering=self._held.count - self.blocking,
            blocked_offset=blocks,
        )

    # --- sending ----------------------------------------------------------------------------------------

    def can_send(self) -> bool:
        return bool(self._ready) or self._progress.has_fresh()

    def sendable(self) -> int:
        """Messages that could be sent now."""
        return self._ready.count + self._progress.fresh_count()

    def take(self, count_max: int) -> RangePiece[Tries] | None:
        """The lowest unbroken range to send, at most `count_max` long. Ready ones are below fresh ones."""
        lowest = self._ready.lowest()
        if lowest is not None:
            (piece,) = self._ready.cut(lowest.first, min(lowest.end, lowest.first + count_max))
            return piece
        fresh = self._progress.take_fresh(count_max)
        return None if fresh is None else RangePiece(fresh.first, fresh.end, UNTRIED)

    # --- keeping ----------------------------------------------------------------------------------------

    def take_back(self, first: int, end: int, tries: Tries) -> None:
        self._ready.put(first, end, tries)

    def reveal(self, first: int, end: int) -> None:
        for kept in (self._ready, self._waiting, self._held):
            assert not kept.overlap(first, end), "what is missing is not kept"
        self._ready.put(first, end, UNTRIED)

    def failed(self, first: int, end: int, tries: Tries, asked_seconds: float) -> None:
        policy, effects = self._context.policy, self._context.effects
        match judge(policy, tries, self._context.now, asked_seconds):
            case RetryAt(due):
                self._wait(first, end, Wait(due, tries))
            case PoisonPolicy.DROP:
                self._progress.settle(first, end)
                effects.append(PoisonDropped(OffsetRange(first, end), tries))
            case PoisonPolicy.DEAD_LETTER:
                assert policy.dead_letter_topic is not None, "the policy was checked when it was made"
                self._hold(first, end, PoisonHold(False, tries))
                effects.append(DeadLetter(OffsetRange(first, end), tries, policy.dead_letter_topic))
            case PoisonPolicy.BLOCK:
                self._hold(first, end, PoisonHold(True, tries))
                effects.append(Blocked(first, tries))

    def _wait(self, first: int, end: int, wait: Wait) -> None:
        self._waiting.put(first, end, wait)
        heappush(self._due, (wait.due, first, end))

    def _hold(self, first: int, end: int, hold: PoisonHold) -> None:
        self._held.put(first, end, hold)
        self.blocking += (end - first) * hold.blocks

    def _unhold(self, first: int, end: int) -> None:
        pieces = self._held.cut(first, end)
        self.blocking -= sum(piece.end - piece.first for piece in pieces if piece.value.blocks)

    def forget(self, ranges: Sequence[OffsetRange]) -> None:
        for first, end in ranges:
            if self._ready:
                self._ready.cut(first, end)
            if self._waiting:
                self._waiting.cut(first, end)
            if self._held:
                self._unhold(first, end)

    def forget_all(self) -> None:
        for kept in (self._ready, self._waiting, self._held):
            kept.clear()
        self._due.clear()
        self.blocking = 0

    # --- time and policy ----------------------------------------------------------------------------------

    def retry_due(self) -> None:
        retried, now = 0, self._context.now
        while retried < self._context.pieces_max and self._due and self._due[0][0] <= now:
            due, first, end = heappop(self._due)
            for piece in self._waiting.overlap(first, end):
                retried += 1
                if piece.value.due != due:
                    continue
                self._waiting.cut(piece.first, piece.end)
                if piece.value.dead_letter:
                    self.failed(piece.first, piece.end, piece.value.tries, 0.0)  # by the policy of today
                else:
                    self._ready.put(piece.first, piece.end, piece.value.tries)

    def next_due(self) -> float | None:
        while self._due:
            due, first, end = self._due[0]
            if any(piece.value.due == due for piece in self._waiting.overlap(first, end)):
                return due
            heappop(self._due)
        return None

    def judge_again(self) -> None:
        for piece in self._held:
            if not piece.value.blocks:
                continue  # on its way to the dead-letter topic; the answer decides
            match judge(self._context.policy, piece.value.tries, self._context.now):
                case PoisonPolicy.BLOCK:
                    pass
                case RetryAt():
                    self._unhold(piece.first, piece.end)
                    self._ready.put(piece.first, piece.end, piece.value.tries)
                case _:
                    self._unhold(piece.first, piece.end)
                    self.failed(piece.first, piece.end, piece.value.tries, 0.0)

    def dead_lettered(self, first: int, end: int) -> None:
        for piece in self._held.overlap(first, end):
            if not piece.value.blocks:
                self._unhold(piece.first, piece.end)
                self._progress.settle(piece.first, piece.end)

    def dead_letter_failed(self, first: int, end: int) -> None:
        for piece in self._held.overlap(first, end):
            if not piece.value.blocks:
                self._unhold(piece.first, piece.end)
                due = self._context.now + copy_delay_seconds(self._context.policy, piece.value.tries.failures)
                self._wait(piece.first, piece.end, Wait(due, piece.value.tries, dead_letter=True))
