"""What the application has taken and not answered, as far as the broker wants to know. No I/O and no clock.

took ─► taken ─ tell ─► out ─ answered ─►
          └──── answered before: never told
"""

from __future__ import annotations

from pydanube.core.dispatch.ranges import OffsetRanges


class Unanswered:
    """Of one lane. Stays empty if the broker does not want to know."""

    __slots__ = ("_answers", "out", "taken")

    def __init__(self) -> None:
        self.taken = OffsetRanges()  # since we told
        self._answers = OffsetRanges()  # since we told
        self.out = OffsetRanges()  # told, and not answered

    def __bool__(self) -> bool:
        untold = any(gap for first, end in self.taken for gap in self._answers.gaps(first, end))
        return untold or bool(self.out)

    def answer(self, offsets: OffsetRanges) -> None:
        for first, end in offsets:
            if self.out:
                self.out.remove(first, end)
            self._answers.add(first, end)

    def take_untold(self) -> OffsetRanges:
        """What was taken and not answered since the last call."""
        fresh = self.taken
        for first, end in self._answers:
            fresh.remove(first, end)
        self.taken, self._answers = OffsetRanges(), OffsetRanges()
        return fresh

    def forget(self) -> None:
        """Answers to what the application has do not count any more."""
        self.taken, self._answers, self.out = OffsetRanges(), OffsetRanges(), OffsetRanges()
