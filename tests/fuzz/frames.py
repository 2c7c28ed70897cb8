"""A byte-level fuzzer for `wire.frames`.

    python -m tests.fuzz.frames --count 500000 --seed 7
    python -m tests.fuzz.frames --seed 7 --first 1234 --count 1     repeats one input

Goal: whatever bytes a connection brings, and however they are cut into reads, the decoder returns the same frames and
then waits for more or raises one ProtocolViolation, the same one. It never raises anything else, keeps more than has
arrived or than the limit, returns a body that is misaligned or can be written to, or a frame that does not survive
being encoded again. What looks into a command afterwards (errors, ranges, greetings) raises nothing else either.

Method: take a few valid frames of any kind, one after the other, and damage them. In half of the inputs one frame's
command or body is damaged and its lengths are made right again, so that the damage reaches protobuf. Each input is fed
in one piece and in pieces cut by chance; a second decoder, as simple as can be, says what must come out.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any, Final, NamedTuple

import pyarrow as pa
from google.protobuf.message import DecodeError

from pydanube.errors import DanubeError, ProtocolViolation
from pydanube.wire import frames as wire
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.errors_on_wire import from_wire
from pydanube.wire.frames import Frame, FrameDecoder
from tests.fuzz.damage import damage_with, edit_number, flip_bits, insert, remove, repeat, set_byte, truncate
from tests.fuzz.runner import Fuzzer

FRAME_SIZE_MAX: Final = 2_000  # small, so that too long is as common as too short
PREFIX: Final = struct.Struct("<IH")

MakeDecoder = Callable[[], FrameDecoder]


# --- valid frames -----------------------------------------------------------------------------------


class Seedling(NamedTuple):
    """A valid frame to damage."""

    command: bytes
    body: bytes

    @property
    def data(self) -> bytes:
        return framed(self.command, self.body)


def framed(command: bytes, body: bytes) -> bytes:
    """Right lengths, whatever they belong to."""
    command = command[: wire.COMMAND_SIZE_MAX]
    return PREFIX.pack(2 + len(command) + len(body), len(command)) + command + body


@cache
def seedlings() -> tuple[Seedling, ...]:
    """Every kind of command, empty and filled, and bodies of several lengths where there may be one."""
    random = Random("seedlings")
    made = []
    for field in pb.Command.DESCRIPTOR.oneofs_by_name["kind"].fields:
        for filled in (False, True):
            command = pb.Command(request_id=random.choice((0, 7, 2**64 - 1)))
            message = getattr(command, field.name)
            message.SetInParent()
            if filled:
                fill(random, message)
            sizes = (1, 96, 400, 1_500) if field.name in wire.WITH_BODY else (0,)
            made += [Seedling(command.SerializeToString(), random.randbytes(size)) for size in sizes]
    return tuple(made)


def fill(random: Random, message: Any) -> None:
    """Gives every field a value; of a oneof the last one wins."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            message.fields["topic"].text = "/default/a"
            message.fields["offset"].natural = 2**63
            message.fields["none"].SetInParent()
        elif field.message_type is not None:
            fill(random, getattr(message, field.name))
        elif field.is_repeated:
            several: dict[int, list[Any]] = {field.TYPE_STRING: ["a*", "ü"], field.TYPE_BYTES: [b"{}", b"\xff"]}
            getattr(message, field.name).extend(several.get(field.type, [3, 9, 10, 11]))
        elif field.type == field.TYPE_BYTES:
            setattr(message, field.name, random.choice((b"", b"\x00\xff")))
        elif field.cpp_type == field.CPPTYPE_STRING:
            setattr(message, field.name, random.choice(("/default/orders", "é", "x" * 200)))
        elif field.cpp_type == field.CPPTYPE_BOOL:
            setattr(message, field.name, True)
        elif field.name == "magic":
            message.magic = wire.MAGIC
        else:
            setattr(message, field.name, random.choice((1, 100, 105)))


# --- damage -----------------------------------------------------------------------------------------


def splice(random: Random, data: bytearray) -> None:
    """Goes on like another frame from some place on."""
    donor = random.choice(seedlings()).data
    place = random.randrange(len(data))
    data[place:] = donor[random.randrange(len(donor)) :]


def edit_lengths(random: Random, data: bytearray) -> None:
    """A little more or less, or far more, where the first frame's lengths stand."""
    if len(data) >= PREFIX.size:
        length, command_length = PREFIX.unpack_from(data)
        length += random.choice((0, 0, -2, -1, 1, 2, 100, FRAME_SIZE_MAX - length, FRAME_SIZE_MAX + 1 - length, 2**31))
        command_length += random.choice((0, 0, -1, 1, 50, 60_000))
        PREFIX.pack_into(data, 0, length % 2**32, command_length % 2**16)


DAMAGES: Final = (
    flip_bits, flip_bits, set_byte, edit_number, edit_lengths, edit_lengths, truncate, insert, remove, repeat, splice,
)  # fmt: skip


def generate(seed: int, index: int) -> bytes:
    """Input `index` of `seed`. Odd ones have right lengths, every seventh is not damaged at all."""
    random = Random(f"frames {seed} {index}")
    chosen = random.choices(seedlings(), k=random.choice((1, 1, 2, 3, 6)))
    if index % 7 == 0:
        return b"".join(each.data for each in chosen)
    if index % 2 == 0:
        data = bytearray(b"".join(each.data for each in chosen))
        damage_with(DAMAGES, random, data)
        return bytes(data)
    place = random.randrange(len(chosen))
    command, body = (bytearray(part) for part in chosen[place])
    damage_with(DAMAGES, random, body if body and random.random() < 0.1 else command)
    chosen[place] = Seedling(bytes(command), bytes(body))
    return b"".join(each.data for each in chosen)


# --- judgement --------------------------------------------------------------------------------------


class Wrong(Exception):
    """The decoder did what it must not do."""


class Heard(NamedTuple):
    """What came out: kinds, commands and bodies, and then the violation's sentence, or "" for none."""

    frames: list[tuple[str, bytes, bytes]]
    sentence: str


def expected(data: bytes) -> tuple[list[tuple[str, bytes, bytes]], bool]:
    """The frames at the start of `data`, and whether something wrong follows them: the rules, as short as can be."""
    found: list[tuple[str, bytes, bytes]] = []
    while len(data) >= 4:
        length = int.from_bytes(data[:4], "little")
        if length > FRAME_SIZE_MAX:
            return found, True
        if len(data) < 6:
            break
        command_length = int.from_bytes(data[4:6], "little")
        if 2 + command_length > length:
            return found, True
        if len(data) < 4 + length:
            break
        try:
            command = pb.Command.FromString(data[6 : 6 + command_length])
        except DecodeError:
            return found, True
        kind, body = command.WhichOneof("kind"), data[6 + command_length : 4 + length]
        if kind is None or (body and kind not in wire.WITH_BODY) or (not body and kind in ("produce", "deliver")):
            return found, True
        found.append((kind, command.SerializeToString(deterministic=True), body))
        data = data[4 + length :]
    return found, False


def hear(data: bytes, cuts: list[int], make: MakeDecoder) -> Heard:
    """Feeds `data` in pieces and looks at everything that comes out."""
    decoder = make()
    heard: list[tuple[str, bytes, bytes]] = []
    fed = 0
    for first, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        piece = data[first:end]
        fed += len(piece)
        try:
            frames = decoder.feed(bytearray(piece) if fed % 3 == 0 else piece)
        except ProtocolViolation as violation:
            return Heard(heard, violation.what)
        for frame in frames:
            look_at(frame)
            heard.append((frame.kind, frame.command.SerializeToString(deterministic=True), bytes(frame.body)))
        if decoder.violation is not None:
            return Heard(heard, decoder.violation.what)
        if decoder.buffered_bytes > min(fed, FRAME_SIZE_MAX) + wire.BODY_ALIGNMENT:
            raise Wrong(f"it keeps {decoder.buffered_bytes} bytes of {fed}")
    return Heard(heard, "")


def look_at(frame: Frame) -> None:
    """Does what a peer does with a frame."""
    if not frame.body.readonly or (frame.body and pa.py_buffer(frame.body).address % wire.BODY_ALIGNMENT):
        raise Wrong("its body can be written to, or is not aligned")
    message = getattr(frame.command, frame.kind)
    [again] = FrameDecoder(FRAME_SIZE_MAX + 100).feed(b"".join(wire.encode(frame.command, frame.body)))
    if again != frame and not has_nan(frame.command):
        raise Wrong("encoded again it is another frame")
    try:
        if frame.kind == "hello":
            wire.negotiate(message)
            wire.frame_size_of(message)
        elif frame.kind == "welcome":
            wire.check_welcome(message)
        elif frame.kind == "error":
            if not isinstance(from_wire(message), DanubeError):
                raise Wrong("an error became something else")
        elif frame.kind in ("deliver", "ack", "nack"):
            if wire.flat(wire.ranges_of(message.ranges)) != list(message.ranges):
                raise Wrong("its ranges are not what they were")
        elif frame.kind == "flow":
            wire.granted(0, message.messages)
    except ProtocolViolation as violation:
        if not violation.what:
            raise Wrong("a violation says nothing") from violation


def has_nan(command: pb.Command) -> bool:
    return any(value.real != value.real for value in command.error.fields.values())


def attempt(seed: int, index: int, make: MakeDecoder = lambda: FrameDecoder(FRAME_SIZE_MAX)) -> str:
    data = generate(seed, index)
    frames, broken = expected(data)
    random = Random(f"cuts {seed} {index}")
    whole = hear(data, [], make)
    if whole.frames != frames or bool(whole.sentence) != broken:
        raise Wrong(f"{len(frames)} frames and {broken=} expected, got {len(whole.frames)} and {whole.sentence!r}")
    bytewise = list(range(1, len(data))) if len(data) < 60 else []
    by_chance = sorted(random.randrange(len(data) + 1) for _ in range(random.choice((1, 2, 5, 20))))
    for cuts in (bytewise, by_chance):
        cut = hear(data, cuts, make)
        if cut != whole:
            raise Wrong(f"cut at {cuts} it is {cut}, in one piece {whole}")
    return whole.sentence or "frames"


FUZZER: Final = Fuzzer(
    module="tests.fuzz.frames",
    description="Damages frames, decodes them in pieces.",
    attempt=attempt,
    accepted="frames",
    accepted_plural="streams without a violation",
    count=500_000,
    chunk=20_000,
)

if __name__ == "__main__":
    sys.exit(FUZZER.main())
