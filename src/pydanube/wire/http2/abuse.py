"""What a peer may ask for that costs us more than it: frames that carry no work, and streams that are reset.

Both are counted against the work that the connection does, so a busy connection never comes near a bound, and against
time, so a quiet one of weeks does not either.
"""

from __future__ import annotations

from pydanube.wire.http2.frames import ErrorCode
from pydanube.wire.http2.values import Http2Error, Http2Limits

CREDIT_OF_CALL = 8  # idle frames that a completed call pays for
CREDIT_OF_DATA = 4  # and one frame of data that we could send whole


class Abuse:
    __slots__ = ("_halved_at", "_idle_left", "_limits", "_refilled_at", "_resets")

    def __init__(self, limits: Http2Limits, now: float) -> None:
        self._limits = limits
        self._idle_left: float = limits.idle_frames
        self._refilled_at = now
        self._resets: float = 0
        self._halved_at = now

    def idle(self, now: float, cost: int = 1) -> None:
        """A frame that carries no work."""
        self._idle_left -= cost
        if self._idle_left >= 0:
            return
        limits = self._limits
        refilled = (now - self._refilled_at) * limits.idle_frames_per_second
        self._refilled_at = now
        self._idle_left = min(self._idle_left + refilled, limits.idle_frames)
        if self._idle_left < 0:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many frames that carry nothing")

    def reset(self, now: float, opened_at: float) -> None:
        """A stream that the peer reset, or made us reset."""
        limits = self._limits
        if now - opened_at >= limits.young_seconds:
            return
        if now - self._halved_at >= limits.resets_halved_seconds:
            self._resets /= 2
            self._halved_at = now
        self._resets += 1
        if self._resets > limits.resets:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many streams that were reset")

    def completed(self) -> None:
        """A call was answered as a whole."""
        if self._resets > 0:
            self._resets -= 1
        self.worked(CREDIT_OF_CALL)

    def worked(self, frames: int = CREDIT_OF_DATA) -> None:
        if self._idle_left < self._limits.idle_frames:
            self._idle_left += frames
