"""Bytes to frames: cut anywhere, checked as far as a frame alone can be.

A header block comes out whole, as one HEADERS frame without padding, priority and CONTINUATION, whatever it came in.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydanube.wire.http2 import frames
from pydanube.wire.http2.frames import (
    CONTINUATION,
    END_HEADERS,
    FRAME_MAX,
    HEADERS,
    PADDED,
    PREFACE,
    PRIORITIZED,
    STREAM_MAX,
    ErrorCode,
)
from pydanube.wire.http2.values import Http2Error, Http2Limits


class Http2Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


class FrameReceiver:
    """Of one connection. `partial_bytes` is what has come of a frame or a header block that is not complete."""

    __slots__ = ("_block", "_block_bytes", "_block_flags", "_block_stream", "_limits", "_rest", "_since", "_state")

    def __init__(self, limits: Http2Limits, now: float) -> None:
        self._limits = limits
        self._rest = b""
        self._state = "preface"  # then "settings", then "open"
        self._block: list[bytes] | None = None
        self._block_bytes = self._block_flags = self._block_stream = 0
        self._since = now  # when the rest, or the block, or the connection began

    @property
    def partial_bytes(self) -> int:
        return len(self._rest) + (self._block_bytes if self._block is not None else 0)

    def frames(self, data: bytes, now: float) -> Iterator[Http2Frame]:
        """Every complete frame. Raises Http2Error for what no frame may be; then no more may be asked."""
        if self._rest:
            data = self._rest + data
        elif self._block is None and self._state == "open":
            self._since = now
        position, size = 0, len(data)
        if self._state == "preface":
            if data[: len(PREFACE)] != PREFACE[:size]:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "not a client of HTTP/2")
            if size < len(PREFACE):
                self._rest = data
                return
            position, self._state = len(PREFACE), "settings"
        unpack = frames.HEAD.unpack_from
        while size - position >= 9:
            high, low, kind, flags, stream = unpack(data, position)
            length = high << 16 | low
            if length > FRAME_MAX:
                raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a frame that is too large")
            start = position + 9
            end = start + length
            if end > size:
                break
            position = end
            stream &= STREAM_MAX
            if self._state != "open":
                if kind != frames.SETTINGS or flags & frames.ACK:
                    raise Http2Error(ErrorCode.PROTOCOL_ERROR, "the first frame is no SETTINGS")
                self._state, self._since = "open", now
            if kind in (HEADERS, CONTINUATION) or self._block is not None:
                whole = self._headers(Http2Frame(kind, flags, stream, data[start:end]), now)
                if whole is None:
                    continue
                yield whole
            else:
                yield Http2Frame(kind, flags, stream, data[start:end])
        if position and self._block is None and self._state == "open":
            self._since = now
        self._rest = data[position:]

    def check_time(self, now: float) -> None:
        """Raises Http2Error if something that has begun is not complete in time."""
        waited = now - self._since
        if self._state != "open" and waited > self._limits.preface_seconds:
            raise Http2Error(ErrorCode.SETTINGS_TIMEOUT, "no preface and settings in time")
        if self._block is not None and waited > self._limits.preface_seconds:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "a header block that does not end")
        if self._rest and waited > self._limits.frame_seconds:
            raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "a frame that does not end")

    def close(self) -> None:
        self._rest = b""
        self._block = None

    def _headers(self, frame: Http2Frame, now: float) -> Http2Frame | None:
        """The frame with the whole block, when there is all of it."""
        kind, flags, stream, payload = frame
        block = self._block
        if block is not None:
            if kind != CONTINUATION or stream != self._block_stream:
                raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a frame inside a header block")
            block.append(payload)
            self._block_bytes += len(payload)
            if len(block) > self._limits.continuations + 1 or self._block_bytes > self._limits.block_bytes:
                raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "a header block that is too long")
            if not flags & END_HEADERS:
                return None
            self._block, self._since = None, now
            return Http2Frame(HEADERS, self._block_flags, stream, b"".join(block))
        if kind == CONTINUATION or not stream & 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "headers of nothing that a client may open")
        if flags & PADDED:
            payload = unpadded(payload)
        if flags & PRIORITIZED:
            check_priority(payload[:5], stream)
            payload = payload[5:]
        if flags & END_HEADERS:
            return Http2Frame(HEADERS, flags, stream, payload)
        self._block, self._since = [payload], now
        self._block_bytes, self._block_flags, self._block_stream = len(payload), flags, stream
        return None


def check_size(payload: bytes, size: int) -> None:
    if len(payload) != size:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "a frame of a size that cannot be")


def check_priority(payload: bytes, stream: int) -> None:
    check_size(payload, 5)
    if not stream or frames.U32.unpack(payload[:4])[0] & STREAM_MAX == stream:
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")


def unpadded(payload: bytes) -> bytes:
    padding = payload[0] if payload else 0
    if padding >= len(payload):
        raise Http2Error(ErrorCode.PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - padding]


def settings_of(payload: bytes, limits: Http2Limits) -> Iterator[tuple[int, int]]:
    """The settings, in order, each checked by itself."""
    if len(payload) % 6:
        raise Http2Error(ErrorCode.FRAME_SIZE_ERROR, "settings of a size that cannot be")
    if len(payload) > limits.settings * 6:
        raise Http2Error(ErrorCode.ENHANCE_YOUR_CALM, "too many settings")
    for key, value in frames.SETTING.iter_unpack(payload):
        if key == frames.ENABLE_PUSH and value > 1:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH that is neither 0 nor 1")
        if key == frames.MAX_FRAME_SIZE and not FRAME_MAX <= value < 2**24:
            raise Http2Error(ErrorCode.PROTOCOL_ERROR, "MAX_FRAME_SIZE out of its range")
        if key == frames.INITIAL_WINDOW_SIZE and value > frames.WINDOW_MAX:
            raise Http2Error(ErrorCode.FLOW_CONTROL_ERROR, "INITIAL_WINDOW_SIZE out of its range")
        yield key, value
