"""What the application has said of its messages, until the broker has applied it. No I/O and no clock.

    ack ──► run ─┐
    acks ────────┼─ collect ─► unsent ─ send ─► unconfirmed ─ confirmed ─► Settle
    nacks ───────┘               ▲                   │
                                 └─── lost, or to be tried again

Acks are kept until the broker says that it has applied them. Those without an answer go out first on the next
connection. What was delivered before a seek is void: no ack of it is sent again.

Invariant: every command is settled once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final

from pydanube.core.consuming.values import (
    NO_END,
    EndTurn,
    Nacked,
    NoteRefused,
    OffsetRun,
    Ranges,
    Send,
    Settle,
    Verdict,
    in_parts,
)
from pydanube.core.dispatch.ranges import OffsetRanges
from pydanube.errors import AckOutdated, DanubeError

UNSENT_MAX: Final = 10_000  # commands kept while there is no connection; what is nacked beyond comes again anyway


class Answers:
    """Acks and nacks of one lane. A command has `ranges_max` ranges at most."""

    __slots__ = ("_acks", "_is_turn_due", "_nacks", "_ranges_max", "run", "unconfirmed", "unsent")

    def __init__(self, ranges_max: int) -> None:
        self._ranges_max = ranges_max
        self._is_turn_due = False
        self.run = OffsetRun()
        self._acks = OffsetRanges()
        self._nacks: dict[tuple[int, str], OffsetRanges] = {}  # by delay and reason
        self.unsent: deque[Verdict] = deque()
        self.unconfirmed: dict[Verdict, None] = {}

    # --- the application ----------------------------------------------------------------------------

    def begin_run(self, offset: int, era: int) -> Sequence[EndTurn]:
        """An ack of one message, which does not continue the run."""
        self.end_run()
        run = self.run
        run.first, run.end, run.era = offset, offset + 1, era
        return self._end_turn()

    def end_run(self) -> None:
        if self.run.end != NO_END:
            self._acks.add(self.run.first, self.run.end)
            self.run.end = NO_END

    def ack(self, ranges: Ranges) -> Sequence[EndTurn]:
        for first, end in ranges:
            self._acks.add(first, end)
        return self._end_turn()

    def nack(self, event: Nacked, *, is_open: bool) -> Sequence[EndTurn]:
        if not is_open and len(self.unsent) + len(self._nacks) >= UNSENT_MAX:
            return ()
        nacks = self._nacks.setdefault((event.delay_ms, event.reason), OffsetRanges())
        for first, end in event.ranges:
            nacks.add(first, end)
        return self._end_turn()

    def _end_turn(self) -> Sequence[EndTurn]:
        if self._is_turn_due:
            return ()
        self._is_turn_due = True
        return (EndTurn(),)

    def turn_ended(self) -> None:
        self._is_turn_due = False

    def collect(self, seeks: int) -> list[OffsetRanges]:
        """Makes commands of the nacks and acks so far; returns what they are about."""
        self.end_run()
        answered: list[OffsetRanges] = []
        if self._nacks:
            for (delay_ms, reason), offsets in self._nacks.items():
                answered.append(offsets)
                for ranges in in_parts(offsets, self._ranges_max):
                    self.unsent.append(Verdict(ranges, seeks, is_ack=False, delay_ms=delay_ms, reason=reason))
            self._nacks = {}
        if self._acks:
            answered.append(self._acks)
            for ranges in in_parts(self._acks, self._ranges_max):
                self.unsent.append(Verdict(ranges, seeks, is_ack=True))
            self._acks = OffsetRanges()
        return answered

    def without_acked(self, ranges: Ranges) -> Ranges:
        """What the application has not acknowledged a moment ago: the broker had not heard of it when it sent this."""
        acked = OffsetRanges(self._acks)
        if self.run.end != NO_END:
            acked.add(self.run.first, self.run.end)
        for verdict in self.verdicts:
            if verdict.is_ack and not verdict.is_void:
                for first, end in verdict.ranges:
                    acked.add(first, end)
        return [gap for first, end in ranges for gap in acked.gaps(first, end)]

    # --- the broker ---------------------------------------------------------------------------------

    @property
    def verdicts(self) -> list[Verdict]:
        """Whose answers have not come."""
        return [*self.unconfirmed, *self.unsent]

    def send(self, generation: int, now: float) -> list[Send]:
        sends: list[Send] = []
        while self.unsent:
            verdict = self.unsent.popleft()
            verdict.asked_at = now
            self.unconfirmed[verdict] = None
            sends.append(Send(verdict, generation))
        return sends

    def confirmed(self, verdict: Verdict, error: DanubeError | None) -> Sequence[Settle | EndTurn | NoteRefused]:
        """The broker has applied it, or says why not."""
        del self.unconfirmed[verdict]
        if error is None or isinstance(error, AckOutdated) or verdict.is_void:
            return (Settle(verdict),)
        if not error.retryable:
            return NoteRefused(verdict, error), Settle(verdict, error)
        self.unsent.append(verdict)
        if self._is_turn_due:
            return ()
        self._is_turn_due = True
        return (EndTurn(is_retry=True),)

    def lost(self) -> list[Settle]:
        """What has no answer comes first on the next connection."""
        void: list[Settle] = []
        for verdict in reversed(self.unconfirmed):
            if verdict.is_void:
                void.append(Settle(verdict))
            else:
                self.unsent.appendleft(verdict)
        self.unconfirmed.clear()
        return void

    def void(self) -> list[Settle]:
        """None of them is sent, or sent again."""
        for verdict in self.unconfirmed:
            verdict.is_void = True
        return self.forget_unsent()

    def forget_unsent(self) -> list[Settle]:
        """What these are about is not there any more: the topic was made anew, and its offsets are other messages."""
        settled = [Settle(verdict) for verdict in self.unsent]
        self.unsent.clear()
        return settled
