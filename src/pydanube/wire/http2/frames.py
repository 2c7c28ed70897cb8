"""HTTP/2 frames as bytes (RFC 9113, sections 4 and 6).

    | length u24 | type u8 | flags u8 | 0 + stream u31 | payload ... |

What is built here fits the smallest frame that every peer takes, FRAME_MAX; a longer header block is cut into
CONTINUATION frames. Numbers are those of the RFC.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from struct import Struct
from typing import Final

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD: Final = Struct(">BHBBI")  # the length's first byte, its other two, type, flags, stream
HEAD_BYTES: Final = HEAD.size
U32: Final = Struct(">I")
SETTING: Final = Struct(">HI")
FRAME_MAX: Final = 16_384
WINDOW_DEFAULT: Final = 65_535
WINDOW_MAX: Final = 2**31 - 1
STREAM_MAX: Final = 2**31 - 1

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)

END_STREAM: Final = 0x1  # of DATA and HEADERS
ACK: Final = 0x1  # of SETTINGS and PING
END_HEADERS: Final = 0x4
PADDED: Final = 0x8
PRIORITIZED: Final = 0x20

ENABLE_PUSH: Final = 2
MAX_CONCURRENT_STREAMS: Final = 3
INITIAL_WINDOW_SIZE: Final = 4
MAX_FRAME_SIZE: Final = 5
MAX_HEADER_LIST_SIZE: Final = 6


class ErrorCode(IntEnum):
    NO_ERROR = 0
    PROTOCOL_ERROR = 1
    INTERNAL_ERROR = 2
    FLOW_CONTROL_ERROR = 3
    SETTINGS_TIMEOUT = 4
    STREAM_CLOSED = 5
    FRAME_SIZE_ERROR = 6
    REFUSED_STREAM = 7
    CANCEL = 8
    COMPRESSION_ERROR = 9
    CONNECT_ERROR = 10
    ENHANCE_YOUR_CALM = 11
    INADEQUATE_SECURITY = 12
    HTTP_1_1_REQUIRED = 13


def head(length: int, kind: int, flags: int, stream: int) -> bytes:
    return HEAD.pack(length >> 16, length & 0xFFFF, kind, flags, stream)


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return head(len(payload), kind, flags, stream) + payload


def headers(stream: int, block: bytes, *, end: bool) -> bytes:
    flags = END_STREAM if end else 0
    if len(block) <= FRAME_MAX:
        return head(len(block), HEADERS, flags | END_HEADERS, stream) + block
    pieces = [frame(HEADERS, flags, stream, block[:FRAME_MAX])]
    for start in range(FRAME_MAX, len(block), FRAME_MAX):
        is_last = start + FRAME_MAX >= len(block)
        pieces.append(
            frame(CONTINUATION, END_HEADERS if is_last else 0, stream, block[start : start + FRAME_MAX]),
        )
    return b"".join(pieces)


def last(stream: int, block: bytes) -> bytes:
    """The end of an answer: trailers, or nothing."""
    return headers(stream, block, end=True) if block else head(0, DATA, END_STREAM, stream)


def settings(values: Iterable[tuple[int, int]]) -> bytes:
    return frame(SETTINGS, 0, 0, b"".join(SETTING.pack(key, value) for key, value in values))


def window_update(stream: int, increment: int) -> bytes:
    return frame(WINDOW_UPDATE, 0, stream, U32.pack(increment))


def rst_stream(stream: int, code: int) -> bytes:
    return frame(RST_STREAM, 0, stream, U32.pack(code))


def goaway(last_stream: int, code: int, reason: str = "") -> bytes:
    said = reason.encode("ascii", "replace")[:200]
    return frame(GOAWAY, 0, 0, U32.pack(last_stream) + U32.pack(code) + said)


SETTINGS_ACK: Final = frame(SETTINGS, ACK, 0, b"")
