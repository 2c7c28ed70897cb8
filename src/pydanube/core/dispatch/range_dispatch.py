"""Exclusive, Failover, Shared: which consumer gets which range. Works on ranges, lowest first, never on single messages
where it can hand out many.

- Exclusive: one consumer; a second is refused while the first is connected.
- Failover: the first to join receives, the others stand by and are promoted in the order of their joining: when it
  leaves, when it wants nothing more, and when it is silent and has messages that it has not seen. Then it is the last
  in the line, and the next one begins when nothing is in flight at another: order is kept.
- Shared: round robin. Consumers that go by the window get one message each in turn, consumers with permits
  equal shares of what there is, so that a turn costs one range and not one message.
"""

from __future__ import annotations

from collections import deque

from pydanube.core.dispatch.consumer_window import ConsumerWindow, DispatchLimits
from pydanube.core.dispatch.delivery import FailurePolicy
from pydanube.core.dispatch.events import Activated, Joined, JoinRefused
from pydanube.core.dispatch.limits import TokenBucket
from pydanube.core.dispatch.machine import DispatchMachine
from pydanube.core.dispatch.range_backlog import RangeBacklog
from pydanube.core.dispatch.window import SubscriptionProgress
from pydanube.core.names import ConsumerId


class RangeDispatch(DispatchMachine):
    """What Exclusive, Failover and Shared have in common: a backlog of ranges."""

    backlog: RangeBacklog

    def __init__(
        self,
        progress: SubscriptionProgress,
        *,
        policy: FailurePolicy | None = None,
        limits: DispatchLimits | None = None,
        rate: TokenBucket | None = None,
    ) -> None:
        super().__init__(progress, policy=policy, limits=limits, rate=rate)
        self.backlog = RangeBacklog(self.context, progress)


class FailoverDispatch(RangeDispatch):
    """One consumer receives; the next in line follows it."""

    @property
    def active(self) -> ConsumerId | None:
        first = self.windows.first
        return None if first is None else first.consumer

    def _join(self, event: Joined) -> None:
        before = self.active
        self.windows.join(event.consumer, event.permits, hands_over=event.hands_over)
        self._promote(before)

    def _leave(self, consumer: ConsumerId) -> None:
        before = self.active
        super()._leave(consumer)
        self._promote(before)

    def _set_turn(self, window: ConsumerWindow, *, stopped: bool, stalled: bool) -> None:
        """The next in line follows one that takes nothing. If that one resumes, it stands by."""
        super()._set_turn(window, stopped=stopped, stalled=stalled)
        self._promote(self.active)

    def _promote(self, before: ConsumerId | None) -> None:
        """The first in line is one that takes messages, if there is any. `before`: the one that was the first."""
        for window in self.windows.all:
            if not (window.stopped or window.stalled):
                break
            self.windows.move_back(window.consumer)
        if self.active is not None and self.active != before:
            self.context.effects.append(Activated(self.active))

    def _may_take_from(self, window: ConsumerWindow) -> bool:
        """What its application has it may still finish, as long as it has time: what comes behind waits for that."""
        return window.held == window.unseen

    def _is_held_elsewhere(self) -> bool:
        return any(window.held for window in self.windows.all[1:])

    def _has_capacity(self, committed_head: int) -> bool:
        first = self.windows.first
        return first is not None and self.windows.has_capacity_for(first) and not self._is_held_elsewhere()

    def _assign(self) -> None:
        window = self.windows.first
        if self.backlog.blocking or window is None or self._is_held_elsewhere():
            return
        pieces = 0
        while (capacity := self.windows.capacity(window)) > 0 and self.backlog.can_send():
            if pieces == self.context.pieces_max:
                self._unfinished = True
                return
            pieces += 1
            allowed = self.deliveries.allowance()
            if allowed == 0:
                return
            piece = self.backlog.take(capacity if allowed is None else min(capacity, allowed))
            if piece is None:
                return
            self.deliveries.send(window, piece.first, piece.end, piece.value)


class ExclusiveDispatch(FailoverDispatch):
    """One consumer. The same one may take over from itself."""

    def _join(self, event: Joined) -> None:
        if self.active is not None:
            self.context.effects.append(JoinRefused(event.consumer, self.active))
        else:
            super()._join(event)


class SharedDispatch(RangeDispatch):
    """All consumers in turn; one whose window is full is skipped."""

    shares = True

    def __init__(
        self,
        progress: SubscriptionProgress,
        *,
        policy: FailurePolicy | None = None,
        limits: DispatchLimits | None = None,
        rate: TokenBucket | None = None,
    ) -> None:
        super().__init__(progress, policy=policy, limits=limits, rate=rate)
        self._turns: list[ConsumerWindow] = []
        self._turn = 0  # whose turn is next

    def _join(self, event: Joined) -> None:
        self._turns.append(self.windows.join(event.consumer, event.permits, hands_over=event.hands_over))

    def _leave(self, consumer: ConsumerId) -> None:
        at = next(at for at, window in enumerate(self._turns) if window.consumer == consumer)
        del self._turns[at]
        self._turn -= at < self._turn
        super()._leave(consumer)

    def _has_capacity(self, committed_head: int) -> bool:
        return self.windows.has_capacity()

    def _assign(self) -> None:
        if self.backlog.blocking or not self._turns or not self.backlog.can_send():
            return
        # Windows only fill up in a step: one that is full when its turn comes stays full in this step.
        turns = [(self._turn + step) % len(self._turns) for step in range(len(self._turns))]
        line = deque(at for at in turns if self.windows.capacity(self._turns[at]) > 0)
        share = pieces = 0
        while line and self.backlog.can_send():
            at = line.popleft()
            window = self._turns[at]
            if self.windows.capacity(window) <= 0:
                continue
            if pieces == self.context.pieces_max:
                self._unfinished = True
                return
            pieces += 1
            allowed = self.deliveries.allowance()
            if allowed == 0:
                return
            if window.messages is None:
                count_max = 1
            else:
                share = share or self._share()
                count_max = min(share, self.windows.capacity(window), allowed or share)
            piece = self.backlog.take(count_max)
            if piece is None:
                return
            self.deliveries.send(window, piece.first, piece.end, piece.value)
            self._turn = at + 1
            line.append(at)

    def _idle_and_busy(self) -> tuple[list[ConsumerWindow], list[ConsumerWindow]]:
        if self.backlog.blocking or self.backlog.can_send():
            return [], []
        return super()._idle_and_busy()

    def _share(self) -> int:
        """Equal parts of what can be sent now, for those with a free window."""
        takers = sum(self.windows.capacity(window) > 0 for window in self._turns)
        return max(1, -(-(self.backlog.sendable()) // takers))
