"""How long a subscription is behind, and when it will have caught up.

    trend.look(now, lag)          every few seconds
    trend.catch_up(now)           CatchUp: in so many seconds, or never at this rate, or not known

Messages say how much work waits; seconds say how late it is. The oldest message that was not acknowledged is as old as
the batch that holds it: the shell, which can read the log, looks that up.
"""

from __future__ import annotations

import enum
from typing import Final, NamedTuple

from pydanube.core.cluster.conditions import words

SPAN_SECONDS: Final = 60.0  # the rate is of so long
LOOKS_MAX: Final = 8
KEEPS_UP_SECONDS: Final = 5.0  # a consumer that has the oldest message for less is not behind: it is at work


class LagCourse(enum.StrEnum):
    CAUGHT_UP = "caught_up"
    KEEPING_UP = "keeping_up"  # what waits came in the last few seconds
    CATCHING_UP = "catching_up"
    FALLING_BEHIND = "falling_behind"
    STANDING = "standing"  # neither
    UNKNOWN = "unknown"


class CatchUp(NamedTuple):
    """`seconds` only while it is catching up."""

    course: LagCourse
    seconds: float | None = None

    def __str__(self) -> str:
        if self.course is LagCourse.CATCHING_UP and self.seconds is not None:
            return f"at this rate it has caught up in about {words(self.seconds)}"
        return {
            LagCourse.KEEPING_UP: "it keeps up",
            LagCourse.FALLING_BEHIND: "it falls further behind: more comes in than is acknowledged",
            LagCourse.STANDING: "it is not catching up",
        }.get(self.course, "")


class Trend:
    """The lag of the last minute, at a few moments."""

    __slots__ = ("_looks",)

    def __init__(self) -> None:
        self._looks: tuple[tuple[float, int], ...] = ()

    def look(self, now: float, lag: int) -> None:
        kept = [each for each in self._looks if now - each[0] <= SPAN_SECONDS]
        self._looks = (*kept[-LOOKS_MAX + 1 :], (now, lag))

    def catch_up(self, now: float, lag: int, oldest_seconds: float | None = None) -> CatchUp:
        """`lag` is that of now. It takes at least two looks to know a direction.

        `oldest_seconds` is the age of the oldest message, of a subscription that has consumers: a few messages that
        came a moment ago are no trend, whatever was there a minute before.
        """
        if lag == 0:
            return CatchUp(LagCourse.CAUGHT_UP)
        if oldest_seconds is not None and oldest_seconds < KEEPS_UP_SECONDS:
            return CatchUp(LagCourse.KEEPING_UP)
        if not self._looks or now <= self._looks[0][0]:
            return CatchUp(LagCourse.UNKNOWN)
        at, before = self._looks[0]
        per_second = (before - lag) / (now - at)
        if per_second > 0:
            return CatchUp(LagCourse.CATCHING_UP, lag / per_second)
        return CatchUp(LagCourse.FALLING_BEHIND if per_second < 0 else LagCourse.STANDING)
