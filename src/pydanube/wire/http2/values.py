"""What a connection is bounded by, what it tells the layer above, and what ends it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from pydanube.core.units import MIB
from pydanube.wire.http2.frames import WINDOW_DEFAULT, ErrorCode
from pydanube.wire.http2.headers import HeaderBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class Http2Limits:
    """What one connection may cost. docs/grpc.md says what each is for."""

    streams: int = 4096  # open at the same time
    stream_window_bytes: int = WINDOW_DEFAULT  # of a request, before the layer above grants more
    connection_window_bytes: int = MIB  # of all requests that are not answered, without what was granted
    block_bytes: int = 16 * 1024  # of a header block as it comes, and of the list that it becomes
    continuations: int = 8  # frames of one header block besides its first
    remembered_blocks: int = 256  # decoded, by their bytes
    idle_frames: int = 2_000  # that ask for work and carry none: pings, settings, windows, empty data
    idle_frames_per_second: int = 50  # that are forgiven
    resets: int = 500  # of young streams, beyond the calls that were completed
    resets_halved_seconds: float = 40.0
    young_seconds: float = 1.0  # a stream that is reset later has cost the peer enough
    settings: int = 60  # in one frame
    unsent_stream_bytes: int = 256 * 1024  # queued for one stream
    unsent_bytes: int = MIB  # queued for all; beyond it a stream with nothing queued may add one message
    unsent_bytes_max: int = 64 * MIB  # up to here
    preface_seconds: float = 10.0  # also of a header block that has begun
    frame_seconds: float = 60.0  # a frame that has begun is complete by then
    ping_seconds: float = 30.0  # of silence, before the peer is asked
    pong_seconds: float = 10.0  # for it to say anything
    goaway_seconds: float = 1.0  # for it to answer the first GOAWAY


LIMITS = Http2Limits()


class Http2Error(Exception):
    """The connection ends, with this code in its GOAWAY."""

    def __init__(self, code: ErrorCode, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason


class Http2Stream:
    """One request and its answer. Open while either side may still send.

    Invariant: it is in the connection's queue of ready streams at most once, and only if `is_ready`.
    """

    __slots__ = (
        "call",
        "cursor",
        "id",
        "is_ready",
        "length_left",
        "local_ended",
        "opened_at",
        "queue",
        "queued_bytes",
        "receive_window",
        "remote_ended",
        "send_window",
        "trailers",
        "waits_for_room",
    )

    def __init__(self, identity: int, receive_window: int, send_window: int, now: float) -> None:
        self.id = identity
        self.receive_window = receive_window
        self.send_window = send_window  # below 0 after the peer made its initial window smaller
        self.opened_at = now
        self.remote_ended = False
        self.local_ended = False
        self.length_left: int | None = None  # of what `content-length` promised
        self.queue: deque[bytes] | None = None  # what is to be sent, made when needed
        self.cursor = 0  # of the queue's first piece: what has been sent
        self.queued_bytes = 0
        self.trailers: bytes | None = None  # that follow the queue
        self.is_ready = False
        self.waits_for_room = False
        self.call: Any = None  # of the layer above


class StreamOpened(NamedTuple):
    stream: Http2Stream
    headers: HeaderBlock
    ended: bool  # nothing follows


class DataReceived(NamedTuple):
    stream: Http2Stream
    data: bytes
    ended: bool


class StreamReset(NamedTuple):
    """By the peer, by us because it broke a rule, or with its connection. Nothing can be sent on it any more."""

    stream: Http2Stream
    code: int


Event: TypeAlias = StreamOpened | DataReceived | StreamReset
