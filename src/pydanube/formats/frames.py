"""Frames of the native stream protocol as bytes: where each begins and ends, whatever its command says.

    ┌────────────┬────────────────────┬──────────────────┬──────────────────────────────┐
    │ u32 length │ u16 command length │ command          │ body: batches, byte for byte │      little endian
    └────────────┴────────────────────┴──────────────────┴──────────────────────────────┘
                 └──────────────────────────── length ──────────────────────────────────┘

Memory: a frame that is announced longer than `frame_size_max` is refused before a byte of it is kept, and a begun one
takes as much as has arrived of it, and an eighth more to grow into. Beside that a cutter holds the read it is given.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from pydanube.errors import ProtocolViolation
from pydanube.ports import Buffer

F = TypeVar("F")

COMMAND_SIZE_MAX: Final = (1 << 16) - 1
HANDSHAKE_SIZE_MAX: Final = 64 * 1024  # of frames before the handshake is over: the peer is not known yet
FRAME_SIZE_LIMIT: Final = 64 * 1024 * 1024 + 128 * 1024  # the largest batch and command; no peer may announce more
BODY_ALIGNMENT: Final = 8  # of every body in memory, as Arrow likes its buffers

_PREFIX: Final = struct.Struct("<IH")
_LENGTH: Final = struct.Struct("<I")
_NO_BODY: Final = memoryview(b"")
_HTTP: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"PRI ", b"OPTI", b"CONN", b"DELE", b"PATC")


class FrameCutter(Generic[F]):
    """Takes what a connection reads, however it is cut, and returns the frames in it, as `make` makes them.

        for frame in decoder.feed(data):
            ...
        if decoder.violation is not None:
            ...  # send it, close

    After a violation there is no next frame: where one would begin is not known.
    """

    __slots__ = ("_command_length", "_head", "_make", "_missing", "_partial", "frame_size_max", "violation")

    def __init__(self, make: Callable[[bytes, memoryview], F], frame_size_max: int = HANDSHAKE_SIZE_MAX) -> None:
        """`make` is given command and body, and may raise ProtocolViolation."""
        self._make = make
        self.frame_size_max = frame_size_max  # of `length`; raised when the handshake is over
        self.violation: ProtocolViolation | None = None
        self._head = b""  # the first bytes of a frame, too few to know its lengths
        self._partial: bytearray | None = None  # padding, command and body of a begun frame, as far as they came
        self._command_length = 0  # of that frame
        self._missing = 0  # bytes that it still lacks

    @property
    def buffered_bytes(self) -> int:
        """What is kept of a frame that has begun."""
        return len(self._head) + (0 if self._partial is None else len(self._partial))

    def feed(self, data: Buffer) -> list[F]:
        """The frames that `data` completes, in order.

        Raises ProtocolViolation. Frames in front of the violation are returned first: then `violation` is set, and
        every later call raises it. So the answer to a peer does not depend on how its bytes were cut.
        """
        if self.violation is not None:
            raise self.violation
        frames: list[F] = []
        try:
            self._feed(data, frames)
        except ProtocolViolation as violation:
            self.violation = violation
            self._head, self._partial = b"", None
            if not frames:
                raise
        return frames

    def _feed(self, data: Buffer, frames: list[F]) -> None:
        position = 0
        if self._partial is not None:
            position = min(self._missing, len(data))
            self._partial += memoryview(data)[:position]
            self._missing -= position
            if self._missing:
                return
            frames.append(self._completed(self._partial))
        elif self._head:
            data = self._head + data
            self._head = b""
        end = len(data)
        while end - position >= _PREFIX.size:
            length, command_length = _PREFIX.unpack_from(data, position)
            self._check_length(length, data, position)
            if length < 2 + command_length:
                raise ProtocolViolation(
                    f"a frame of length {length} has no room for a command of {command_length} bytes"
                )
            command_at = position + _PREFIX.size
            frame_end = position + _LENGTH.size + length
            if frame_end > end:
                self._command_length = command_length
                self._missing = frame_end - end
                # The padding makes the body begin at a multiple of BODY_ALIGNMENT. What is missing is not allocated:
                # a peer must send the bytes to take the memory.
                self._partial = bytearray(-command_length % BODY_ALIGNMENT)
                self._partial += memoryview(data)[command_at:]
                return
            body_at = command_at + command_length
            command = bytes(data[command_at:body_at])
            frames.append(self._make(command, _body(data, body_at, frame_end) if body_at < frame_end else _NO_BODY))
            position = frame_end
        if position < end:
            if end - position >= _LENGTH.size:
                self._check_length(_LENGTH.unpack_from(data, position)[0], data, position)
            self._head = bytes(data[position:])

    def _completed(self, partial: bytearray) -> F:
        self._partial = None  # the holder of the body owns the memory now
        view = memoryview(partial).toreadonly()
        command_at = -self._command_length % BODY_ALIGNMENT
        body_at = command_at + self._command_length
        return self._make(bytes(view[command_at:body_at]), view[body_at:])

    def _check_length(self, length: int, data: Buffer, position: int) -> None:
        if length > self.frame_size_max:
            guess = _foreign(bytes(data[position : position + _LENGTH.size]))
            raise ProtocolViolation(f"a frame of length {length} is over the limit of {self.frame_size_max}{guess}")


def encode_frame(command: bytes, *body: Buffer) -> list[Buffer]:
    """The frame as buffers to be written one after the other; those of the body are the very objects given."""
    command_length = len(command)
    if command_length > COMMAND_SIZE_MAX:
        raise ProtocolViolation(f"a command of {command_length} bytes is over the limit of {COMMAND_SIZE_MAX}")
    length = 2 + command_length
    for part in body:
        length += part.nbytes if isinstance(part, memoryview) else len(part)
    if length > FRAME_SIZE_LIMIT:
        raise ProtocolViolation(f"a frame of length {length} is over the limit of {FRAME_SIZE_LIMIT}")
    return [_PREFIX.pack(length, command_length) + command, *body]


def _body(data: Buffer, first: int, end: int) -> memoryview:
    """The body at [first, end) of one read: a view of it if that is aligned, safe and keeps little else alive."""
    # A bytes object never changes, and begins aligned. A small body is copied, because its holder (a cache of
    # batches) would keep the whole read for it.
    if type(data) is bytes and first % BODY_ALIGNMENT == 0 and 2 * (end - first) >= len(data):
        return memoryview(data)[first:end]
    return memoryview(bytes(memoryview(data)[first:end]))


def _foreign(begin: bytes) -> str:
    """Says what else the first bytes of a frame look like."""
    if begin in _HTTP:
        return ": it begins like HTTP"
    if begin[:2] == b"\x16\x03":
        return ": it begins like TLS, and this port is plain"
    if begin[:2] == b"\x15\x03":
        return ": it begins like a TLS alert; the peer's port speaks TLS"
    return ""
