"""What a connection has to send: control frames at once, data as far as the peer's windows go, in turns.

    write ─► stream's queue ─► ready (once per stream) ─► pump: a frame each, in turn ─► out
                 ▲                   ▲                        │ no window left in the stream: out of the queue
                 │                   └── WINDOW_UPDATE ◄──────┘
                 └── room: the stream has sent everything, or it and the connection are below their bounds

A stream whose window is shut costs the others nothing: it is not in the queue. Data of several writes goes into one
frame.
"""

from __future__ import annotations

from collections import deque

from pydanube.wire.http2 import frames
from pydanube.wire.http2.frames import DATA, END_HEADERS, END_STREAM, FRAME_MAX, HEADERS, WINDOW_DEFAULT
from pydanube.wire.http2.values import Http2Limits, Http2Stream


class Unsent:
    """Bytes queued in all connections together. At the bound, connections that hold more than their share wait."""

    __slots__ = ("max_bytes", "size_bytes")

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.size_bytes = 0


class FrameSender:
    """Invariant: `queued_bytes` is the sum over the streams', and so is its part of `unsent`.

    Streams that are not read may fill the connection's share (`unsent_bytes`). The others go on with one message at a
    time, up to `unsent_bytes_max`: without that, four that stand still would stop a connection of sixteen.
    """

    __slots__ = (
        "_limits",
        "_ready",
        "_roomy",
        "_waiting",
        "out",
        "queued_bytes",
        "unsent",
        "whole_frames",
        "window",
    )

    def __init__(self, limits: Http2Limits, unsent: Unsent) -> None:
        self._limits = limits
        self._ready: deque[Http2Stream] = deque()
        self._waiting: dict[
            Http2Stream, None
        ] = {}  # for the connection's share, with an open window and nothing queued
        self._roomy: list[Http2Stream] = []  # that waited for room, and have it
        self.out: list[bytes] = []
        self.window = WINDOW_DEFAULT
        self.queued_bytes = 0
        self.unsent = unsent
        self.whole_frames = 0  # sent without being cut short by a window; taken by the connection

    def has_room(self, stream: Http2Stream) -> bool:
        """Whether a message may be queued now. If not, `take_roomy` names the stream when it may."""
        if stream.queued_bytes >= self._limits.unsent_stream_bytes:
            is_free = False
        elif stream.queued_bytes:
            is_free = self.queued_bytes < self._limits.unsent_bytes and self.unsent.size_bytes < self.unsent.max_bytes
        else:
            is_free = self.queued_bytes < self._limits.unsent_bytes or (stream.send_window > 0 and self._may_exceed())
            if not is_free and stream.send_window > 0:
                self._waiting[stream] = None
        stream.waits_for_room = not is_free
        return is_free

    def take_roomy(self) -> list[Http2Stream]:
        if self._waiting and (self.queued_bytes < self._limits.unsent_bytes or self._may_exceed()):
            for stream in self._waiting:
                stream.waits_for_room = False
                self._roomy.append(stream)
            self._waiting.clear()
        roomy = self._roomy
        if roomy:
            self._roomy = []
        return roomy

    def _may_exceed(self) -> bool:
        return self.queued_bytes < self._limits.unsent_bytes_max and self.unsent.size_bytes < self.unsent.max_bytes

    def add(self, stream: Http2Stream, data: bytes) -> None:
        size = len(data)
        if not size:
            return
        if stream.queue is None:
            stream.queue = deque()
        stream.queue.append(data)
        stream.queued_bytes += size
        self.queued_bytes += size
        self.unsent.size_bytes += size
        self.wake(stream)

    def wake(self, stream: Http2Stream) -> None:
        """Its window is open, or it has something to send."""
        if stream.is_ready or stream.send_window <= 0:
            return
        if stream.queued_bytes:
            stream.is_ready = True
            self._ready.append(stream)
        elif stream.waits_for_room:
            self._waiting[stream] = None

    def drop(self, stream: Http2Stream) -> None:
        """The stream is over. It may still be in the queue of ready ones, with nothing to send."""
        self.queued_bytes -= stream.queued_bytes
        self.unsent.size_bytes -= stream.queued_bytes
        stream.queued_bytes = 0
        stream.queue = None
        stream.trailers = None
        self._waiting.pop(stream, None)

    def whole(self, stream: Http2Stream, first: bytes, data: bytes, last: bytes) -> bool:
        """Sends headers, one frame of data and trailers, if all windows allow it now and none waits before it."""
        size = len(data)
        if size > FRAME_MAX or size > stream.send_window or size > self.window or self._ready or stream.queued_bytes:
            return False
        self.window -= size
        identity, pack = stream.id, frames.HEAD.pack
        self.out.append(
            b"".join(
                (
                    pack(0, len(first), HEADERS, END_HEADERS, identity),
                    first,
                    pack(0, size, DATA, 0, identity),
                    data,
                    pack(0, len(last), HEADERS, END_HEADERS | END_STREAM, identity),
                    last,
                )
            )
        )
        return True

    def pump(self) -> list[Http2Stream]:
        """Moves data to `out` as far as the windows go. Returns the streams that have sent everything, trailers too."""
        finished: list[Http2Stream] = []
        ready, limits = self._ready, self._limits
        while ready and self.window > 0:
            stream = ready.popleft()
            stream.is_ready = False
            if not stream.queued_bytes:
                continue
            size = min(stream.queued_bytes, stream.send_window, self.window, FRAME_MAX)
            if size > 0:
                self._frame(stream, size)
            if stream.queued_bytes:
                self.wake(stream)
            elif stream.trailers is not None:
                self.out.append(frames.last(stream.id, stream.trailers))
                stream.trailers = None
                finished.append(stream)
            if (
                stream.waits_for_room
                and stream.queued_bytes < limits.unsent_stream_bytes // 2
                and self.has_room(stream)
            ):
                stream.waits_for_room = False
                self._roomy.append(stream)
        return finished

    def _frame(self, stream: Http2Stream, size: int) -> None:
        queue = stream.queue
        assert queue is not None
        self.out.append(frames.head(size, DATA, 0, stream.id))
        left = size
        while left:
            piece = queue[0]
            start = stream.cursor
            length = len(piece) - start
            if length <= left:
                queue.popleft()
                stream.cursor = 0
                self.out.append(piece[start:] if start else piece)
                left -= length
            else:
                self.out.append(piece[start : start + left])
                stream.cursor = start + left
                left = 0
        if size == FRAME_MAX or size == stream.queued_bytes:
            self.whole_frames += 1
        stream.queued_bytes -= size
        stream.send_window -= size
        self.queued_bytes -= size
        self.unsent.size_bytes -= size
        self.window -= size
