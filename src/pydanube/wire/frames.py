"""Frames of the native stream protocol: bytes in, commands out, and back. No socket, no clock, no event loop.

    ┌────────────┬────────────────────┬──────────────────┬──────────────────────────────┐
    │ u32 length │ u16 command length │ protobuf Command │ body: batches, byte for byte │      little endian
    └────────────┴────────────────────┴──────────────────┴──────────────────────────────┘
                 └──────────────────────────── length ──────────────────────────────────┘

`proto/pydanube/stream.proto` has the commands, `docs/protocol.md` the rules between two peers. Here are only those
that a frame, or two numbers, can break: whoever breaks one gets a ProtocolViolation that says which.

Memory: a frame that is announced longer than `frame_size_max` is refused before a byte of it is kept, and a begun one
takes as much as has arrived of it, and an eighth more to grow into. Beside that a decoder holds the read it is given.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.errors import ProtocolViolation
from pydanube.ports import Buffer
from pydanube.wire._pb.pydanube.stream_pb2 import Command, Hello, Welcome

VERSION_MIN: Final = 1
VERSION_MAX: Final = 1
MAGIC: Final = 0x54534E44  # "DNST", as its bytes stand in a Hello

COMMAND_SIZE_MAX: Final = (1 << 16) - 1
HANDSHAKE_SIZE_MAX: Final = 64 * 1024  # of frames before the handshake is over: nobody is known yet
FRAME_SIZE_LIMIT: Final = 64 * 1024 * 1024 + 128 * 1024  # the largest batch and command; nobody may announce more
IN_FLIGHT_MAX: Final = 8  # batches per producer; as many as the broker remembers
RANGES_MAX: Final = 1024  # per command: twenty bytes each, if offsets are large
PERMITS_MAX: Final = 1 << 40  # messages, or bytes, that a consumer may have granted and not got

BODY_ALIGNMENT: Final = 8  # of every body in memory, as Arrow likes its buffers
WITH_BODY: Final = frozenset({"produce", "deliver", "fetched"})
BODY_NEEDED: Final = frozenset({"produce", "deliver"})

_PREFIX: Final = struct.Struct("<IH")
_LENGTH: Final = struct.Struct("<I")
_NO_BODY: Final = memoryview(b"")
_HTTP: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"PRI ", b"OPTI", b"CONN", b"DELE", b"PATC")


class Frame(NamedTuple):
    """`kind` is the name of the command that `command` holds: `frame.command.produce` if it is "produce".

    The body is read-only, stays valid as long as somebody holds it, and keeps at most its own size again alive.
    """

    kind: str
    command: Command
    body: memoryview


# --- decoding ---------------------------------------------------------------------------------------


class FrameDecoder:
    """Takes what a connection reads, however it is cut, and returns the frames in it.

        for frame in decoder.feed(data):
            ...
        if decoder.violation is not None:
            ...  # send it, close

    After a violation there is no next frame: nobody can say where one would begin.
    """

    __slots__ = ("_command_length", "_head", "_missing", "_partial", "frame_size_max", "violation")

    def __init__(self, frame_size_max: int = HANDSHAKE_SIZE_MAX) -> None:
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

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that `data` completes, in order.

        Raises ProtocolViolation. Frames in front of the violation are returned first: then `violation` is set, and
        every later call raises it. So what a peer is told does not depend on how its bytes were cut.
        """
        if self.violation is not None:
            raise self.violation
        frames: list[Frame] = []
        try:
            self._feed(data, frames)
        except ProtocolViolation as violation:
            self.violation = violation
            self._head, self._partial = b"", None
            if not frames:
                raise
        return frames

    def _feed(self, data: Buffer, frames: list[Frame]) -> None:
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
            frames.append(_frame(command, _body(data, body_at, frame_end) if body_at < frame_end else _NO_BODY))
            position = frame_end
        if position < end:
            if end - position >= _LENGTH.size:
                self._check_length(_LENGTH.unpack_from(data, position)[0], data, position)
            self._head = bytes(data[position:])

    def _completed(self, partial: bytearray) -> Frame:
        self._partial = None  # whoever holds the body owns the memory now
        view = memoryview(partial).toreadonly()
        command_at = -self._command_length % BODY_ALIGNMENT
        body_at = command_at + self._command_length
        return _frame(bytes(view[command_at:body_at]), view[body_at:])

    def _check_length(self, length: int, data: Buffer, position: int) -> None:
        if length > self.frame_size_max:
            guess = _foreign(bytes(data[position : position + _LENGTH.size]))
            raise ProtocolViolation(f"a frame of length {length} is over the limit of {self.frame_size_max}{guess}")


def _frame(packed: bytes, body: memoryview) -> Frame:
    try:
        command = Command.FromString(packed)
    except DecodeError as error:
        raise ProtocolViolation(f"the {len(packed)} bytes of a command are no protobuf message of ours") from error
    kind = command.WhichOneof("kind")
    if kind is None:
        raise ProtocolViolation(f"a command of {len(packed)} bytes is of no kind that version {VERSION_MAX} knows")
    if body:
        if kind not in WITH_BODY:
            raise ProtocolViolation(f"{kind} has a body of {len(body)} bytes and may not have one")
    elif kind in BODY_NEEDED:
        raise ProtocolViolation(f"{kind} has no body")
    return Frame(kind, command, body)


def _body(data: Buffer, first: int, end: int) -> memoryview:
    """The body at [first, end) of one read: a view of it if that is aligned, safe and keeps little else alive."""
    # A bytes object never changes, and begins aligned. A small body is copied, because whoever keeps it (a cache of
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


# --- encoding ---------------------------------------------------------------------------------------


def encode(command: Command, *body: Buffer) -> list[Buffer]:
    """The frame as buffers to be written one after the other; those of the body are the very objects given."""
    packed = command.SerializeToString()
    command_length = len(packed)
    if command_length > COMMAND_SIZE_MAX:
        raise ProtocolViolation(f"a command of {command_length} bytes is over the limit of {COMMAND_SIZE_MAX}")
    length = 2 + command_length
    for part in body:
        length += part.nbytes if isinstance(part, memoryview) else len(part)
    if length > FRAME_SIZE_LIMIT:
        raise ProtocolViolation(f"a frame of length {length} is over the limit of {FRAME_SIZE_LIMIT}")
    return [_PREFIX.pack(length, command_length) + packed, *body]


# --- handshake --------------------------------------------------------------------------------------


def negotiate(hello: Hello) -> int:
    """The version that both sides speak: the highest of those the client offers that we know."""
    if hello.magic != MAGIC:
        raise ProtocolViolation(f"the greeting has magic {hello.magic:#010x}, not {MAGIC:#010x}")
    if hello.version_min > hello.version_max:
        raise ProtocolViolation(f"versions {hello.version_min} to {hello.version_max} are none at all")
    version = min(hello.version_max, VERSION_MAX)
    if version < max(hello.version_min, VERSION_MIN):
        raise ProtocolViolation(
            f"the client speaks versions {hello.version_min} to {hello.version_max}, "
            f"the broker {VERSION_MIN} to {VERSION_MAX}"
        )
    return version


def check_welcome(welcome: Welcome) -> None:
    """The twin of `negotiate`, on the client's side."""
    if not VERSION_MIN <= welcome.version <= VERSION_MAX:
        raise ProtocolViolation(
            f"the broker chose version {welcome.version}, offered were {VERSION_MIN} to {VERSION_MAX}"
        )
    if not HANDSHAKE_SIZE_MAX <= welcome.frame_size_max <= FRAME_SIZE_LIMIT:
        raise ProtocolViolation(f"the broker announced frames up to a length of {welcome.frame_size_max}")
    if not 1 <= welcome.in_flight_max <= IN_FLIGHT_MAX:
        raise ProtocolViolation(f"the broker announced {welcome.in_flight_max} batches in flight")


def frame_size_of(hello: Hello) -> int:
    """The largest `length` that may be sent to this client."""
    if hello.frame_size_max == 0:
        return FRAME_SIZE_LIMIT
    if not HANDSHAKE_SIZE_MAX <= hello.frame_size_max <= FRAME_SIZE_LIMIT:
        raise ProtocolViolation(
            f"the client takes frames up to a length of {hello.frame_size_max}: "
            f"it should be {HANDSHAKE_SIZE_MAX} to {FRAME_SIZE_LIMIT}"
        )
    return hello.frame_size_max


# --- numbers in commands ----------------------------------------------------------------------------


def flat(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """Ranges as a command has them. More than RANGES_MAX need several commands."""
    return [number for pair in ranges for number in pair]


def ranges_of(numbers: Sequence[int]) -> tuple[OffsetRange, ...]:
    """The inverse of `flat`, for numbers from anybody: whole pairs, not empty, ascending, not too many."""
    count = len(numbers)
    if count % 2 or not 0 < count <= 2 * RANGES_MAX:
        raise ProtocolViolation(f"{count} numbers are not 1 to {RANGES_MAX} pairs of offsets")
    reached = 0
    found = tuple(map(OffsetRange, numbers[::2], numbers[1::2]))
    for first, end in found:
        if not reached <= first < end:
            raise ProtocolViolation(
                f"range {first} to {end} is empty, or not behind {reached}, where the last one ended"
            )
        reached = end
    return found


def granted(balance: int, more: int) -> int:
    """The permits after `more` were granted."""
    if balance + more > PERMITS_MAX:
        raise ProtocolViolation(f"{more} permits more than {balance} are over the limit of {PERMITS_MAX}")
    return balance + more
