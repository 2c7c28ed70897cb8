"""Frames of the native stream protocol: bytes in, commands out, and back. No socket, no clock, no event loop.

The drawing, and where a frame ends, is in `formats/frames.py`; here its command is a protobuf message.

`proto/pydanube/stream.proto` has the commands, `docs/protocol.md` the rules between two peers. Here are only those
that a frame, or two numbers, can break: a peer that breaks one gets a ProtocolViolation that says which.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from google.protobuf.message import DecodeError

from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.errors import ProtocolViolation
from pydanube.formats.batch_header import ENVELOPE_VERSION as ENVELOPE_VERSION
from pydanube.formats.frames import BODY_ALIGNMENT as BODY_ALIGNMENT
from pydanube.formats.frames import COMMAND_SIZE_MAX as COMMAND_SIZE_MAX
from pydanube.formats.frames import FRAME_SIZE_LIMIT as FRAME_SIZE_LIMIT
from pydanube.formats.frames import HANDSHAKE_SIZE_MAX as HANDSHAKE_SIZE_MAX
from pydanube.formats.frames import FrameCutter, encode_frame
from pydanube.ports import Buffer
from pydanube.wire._pb.pydanube.stream_pb2 import Command, Hello, Welcome

VERSION_MIN: Final = 1
VERSION_MAX: Final = 1
MAGIC: Final = 0x54534E44  # "DNST", as its bytes stand in a Hello

IN_FLIGHT_MAX: Final = 8  # batches per producer; as many as the broker remembers
RANGES_MAX: Final = 1024  # per command: twenty bytes each, if offsets are large
PERMITS_MAX: Final = 1 << 40  # messages, or bytes, that a consumer may have granted and not got

WITH_BODY: Final = frozenset({"produce", "deliver", "fetched", "describe_storages", "storage_infos"})
BODY_NEEDED: Final = frozenset({"produce", "deliver"})
# Commands that came after the first brokers of version 1. A broker names them in its Welcome.
ADDED: Final = ("describe_storages", "change_failure_policy")


class Frame(NamedTuple):
    """`kind` is the name of the command that `command` holds: `frame.command.produce` if it is "produce".

    The body is read-only, stays valid as long as it is referenced, and keeps at most its own size again alive.
    """

    kind: str
    command: Command
    body: memoryview


# --- decoding ---------------------------------------------------------------------------------------


class FrameDecoder(FrameCutter[Frame]):
    """Takes what a connection reads and returns the frames in it, each with its command: see `FrameCutter`."""

    __slots__ = ()

    def __init__(self, frame_size_max: int = HANDSHAKE_SIZE_MAX) -> None:
        super().__init__(_frame, frame_size_max)


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


# --- encoding ---------------------------------------------------------------------------------------


def encode(command: Command, *body: Buffer) -> list[Buffer]:
    """The frame as buffers to be written one after the other; those of the body are the very objects given."""
    return encode_frame(command.SerializeToString(), *body)


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
    """The inverse of `flat`, for untrusted numbers: whole pairs, not empty, ascending, not too many."""
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
