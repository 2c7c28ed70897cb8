"""How a connection comes to its end in order, and how a peer that is gone is noticed.

    serving ─ leave ─► GOAWAY(any stream), PING ─ an answer, or a second ─► GOAWAY(last stream) ─ no stream open ─► end
    silent for ping_seconds ─► PING ─ anything comes ─► serving
                                   └ nothing in pong_seconds ─► end

The first GOAWAY names no stream, because a call may be on its way: its client would have to believe it lost.
"""

from __future__ import annotations

from pydanube.wire.http2 import frames
from pydanube.wire.http2.frames import STREAM_MAX, ErrorCode
from pydanube.wire.http2.values import Http2Error, Http2Limits

PING = b"pydanube"
LAST_PING = b"goodbye."


class GracefulShutdown:
    """Of one connection. `accepts_up_to` is the last stream that is still looked at."""

    __slots__ = ("_leaving_at", "_limits", "_pinged_at", "accepts_up_to", "heard_at", "peer_leaves")

    def __init__(self, limits: Http2Limits, now: float) -> None:
        self._limits = limits
        self._leaving_at: float | None = None
        self._pinged_at: float | None = None
        self.accepts_up_to = STREAM_MAX
        self.heard_at = now
        self.peer_leaves = False

    @property
    def ends_with_its_streams(self) -> bool:
        return self.peer_leaves or self.accepts_up_to != STREAM_MAX

    def heard(self, now: float) -> None:
        self.heard_at = now
        self._pinged_at = None

    def leave(self, now: float) -> bytes:
        if self._leaving_at is not None:
            return b""
        self._leaving_at = now
        return frames.goaway(STREAM_MAX, ErrorCode.NO_ERROR) + frames.frame(frames.PING, 0, 0, LAST_PING)

    def tick(self, now: float, last_stream: int) -> bytes:
        """Raises Http2Error if the peer is gone."""
        if self._pinged_at is not None:
            if now - self._pinged_at > self._limits.pong_seconds:
                raise Http2Error(ErrorCode.NO_ERROR, "the peer is silent")
        elif now - self.heard_at > self._limits.ping_seconds:
            self._pinged_at = now
            return frames.frame(frames.PING, 0, 0, PING)
        if self._leaving_at is not None and now - self._leaving_at > self._limits.goaway_seconds:
            return self._for_good(last_stream)
        return b""

    def pong(self, payload: bytes, last_stream: int) -> bytes | None:
        """None: it answers nothing that was asked."""
        if payload == LAST_PING and self._leaving_at is not None:
            return self._for_good(last_stream)
        return b"" if payload == PING else None

    def _for_good(self, last_stream: int) -> bytes:
        if self.accepts_up_to != STREAM_MAX:
            return b""
        self.accepts_up_to = last_stream
        return frames.goaway(last_stream, ErrorCode.NO_ERROR)
