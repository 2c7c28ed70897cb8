"""Frames: what a connection reads, however it is cut, and what may not be in it."""

import tracemalloc
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.dispatch.ranges import OffsetRange
from pydanube.errors import ProtocolViolation
from pydanube.ports import Buffer
from pydanube.wire import frames
from pydanube.wire._pb.pydanube import stream_pb2 as pb
from pydanube.wire.frames import (
    FRAME_SIZE_LIMIT,
    HANDSHAKE_SIZE_MAX,
    MAGIC,
    PERMITS_MAX,
    RANGES_MAX,
    FrameDecoder,
    check_welcome,
    encode,
    flat,
    frame_size_of,
    granted,
    negotiate,
    ranges_of,
)

MIB = 1 << 20
PING = pb.Command(request_id=3, ping=pb.Ping())
PRODUCE = pb.Command(request_id=7, produce=pb.Produce(producer=1))


def framed(command: pb.Command, *body: Buffer) -> bytes:
    return b"".join(encode(command, *body))


def raw(command: bytes, body: bytes = b"", *, length: int | None = None, command_length: int | None = None) -> bytes:
    """A frame that says of its lengths what it likes."""
    said = 2 + len(command) + len(body) if length is None else length
    said_command = len(command) if command_length is None else command_length
    return said.to_bytes(4, "little") + said_command.to_bytes(2, "little") + command + body


def pieces(data: bytes, size: int) -> Iterator[bytes]:
    for position in range(0, len(data), size):
        yield data[position : position + size]


# --- good frames --------------------------------------------------------------------------------------


def test_a_frame_is_length_command_length_command_body() -> None:
    packed = PRODUCE.SerializeToString()
    assert framed(PRODUCE, b"body") == raw(packed, b"body")


def test_bodies_are_handed_on_as_the_very_buffers_that_were_given() -> None:
    header, body = b"header", memoryview(bytearray(b"body"))
    first, *rest = encode(PRODUCE, header, body)
    assert [*map(id, rest)] == [id(header), id(body)]
    [frame] = FrameDecoder().feed(b"".join([first, *rest]))
    assert frame.body == b"headerbody"


def test_a_buffer_of_numbers_counts_by_its_bytes() -> None:
    numbers = memoryview(bytes(16)).cast("q")
    [frame] = FrameDecoder().feed(framed(PRODUCE, numbers))
    assert len(frame.body) == 16


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 64, 1000])
def test_frames_are_the_same_however_they_are_cut(size: int) -> None:
    data = framed(PING) + framed(PRODUCE, b"x" * 300) + framed(PING) + framed(PRODUCE, b"y")
    decoder = FrameDecoder()
    heard = [frame for piece in pieces(data, size) for frame in decoder.feed(piece)]
    assert [frame.kind for frame in heard] == ["ping", "produce", "ping", "produce"]
    assert [frame.command.request_id for frame in heard] == [3, 7, 3, 7]
    assert [bytes(frame.body) for frame in heard] == [b"", b"x" * 300, b"", b"y"]
    assert decoder.buffered_bytes == 0


def test_half_a_frame_waits_for_the_other_half() -> None:
    data = framed(PRODUCE, b"0123456789")
    decoder = FrameDecoder()
    assert decoder.feed(data[:-1]) == []
    [frame] = decoder.feed(data[-1:])
    assert frame.body == b"0123456789"


def test_feeding_nothing_changes_nothing() -> None:
    decoder = FrameDecoder()
    assert decoder.feed(b"") == []
    assert decoder.feed(framed(PING)[:5]) == decoder.feed(b"") == []
    assert [frame.kind for frame in decoder.feed(framed(PING)[5:])] == ["ping"]


def test_fields_of_a_newer_version_are_ignored_and_kept() -> None:
    newer = PING.SerializeToString() + bytes.fromhex("fa3e0161")  # field 1007, "a"
    [frame] = FrameDecoder().feed(raw(newer))
    assert frame.kind == "ping"


def test_a_fetched_frame_has_no_body_or_several_batches() -> None:
    fetched = pb.Command(request_id=1, fetched=pb.Fetched(next_offset=3))
    both = FrameDecoder().feed(framed(fetched) + framed(fetched, b"one", b"two"))
    assert [bytes(frame.body) for frame in both] == [b"", b"onetwo"]


# --- memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_id", [0, 1, 300, 1 << 20, 1 << 30])  # commands of several lengths
@pytest.mark.parametrize("size", [1, 100, 5000])
@pytest.mark.parametrize("cut", [3, 40, 10_000])
def test_every_body_is_aligned_and_read_only(request_id: int, size: int, cut: int) -> None:
    command = pb.Command(request_id=request_id, produce=pb.Produce(producer=1))
    decoder = FrameDecoder()
    heard = [frame for piece in pieces(framed(command, bytes(size)) * 3, cut) for frame in decoder.feed(piece)]
    assert len(heard) == 3
    for frame in heard:
        assert pa.py_buffer(frame.body).address % frames.BODY_ALIGNMENT == 0
        assert frame.body.readonly


def test_a_large_body_that_is_most_of_an_aligned_read_is_not_copied() -> None:
    goodbye = next(
        data for size in range(8) if len(data := framed(pb.Command(goodbye=pb.Goodbye(reason="x" * size)))) % 8 == 3
    )
    data = goodbye + framed(PRODUCE, bytes(1000))  # 3 + 6 + 7 is a multiple of 8
    assert FrameDecoder().feed(data)[1].body.obj is data


def test_a_small_body_does_not_keep_the_whole_read_alive() -> None:
    for frame in FrameDecoder().feed(framed(PRODUCE, bytes(100)) * 50):
        assert len(pa.py_buffer(frame.body.obj)) == 100


def test_a_read_buffer_that_is_used_again_does_not_change_bodies() -> None:
    data = bytearray(framed(PRODUCE, b"a" * 1000))
    [frame] = FrameDecoder().feed(data)
    data[:] = bytes(len(data))
    assert frame.body == b"a" * 1000


def test_an_announced_length_takes_no_memory_before_its_bytes_come() -> None:
    decoder = FrameDecoder(FRAME_SIZE_LIMIT)
    tracemalloc.start()
    try:
        decoder.feed(raw(PRODUCE.SerializeToString(), length=FRAME_SIZE_LIMIT))
        assert tracemalloc.get_traced_memory()[1] < 1_000_000  # with what other threads of this process take
    finally:
        tracemalloc.stop()


def test_a_long_frame_takes_its_own_size_and_an_eighth() -> None:
    data = framed(PRODUCE, bytes(4 * MIB))
    reads = [*pieces(data, 64 * 1024)]
    decoder = FrameDecoder(5 * MIB)
    tracemalloc.start()
    try:
        heard = [frame for piece in reads for frame in decoder.feed(piece)]
        assert tracemalloc.get_traced_memory()[1] < 4 * MIB * 9 / 8 + 100_000
    finally:
        tracemalloc.stop()
    assert len(heard[0].body) == 4 * MIB


# --- violations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (raw(b"", length=HANDSHAKE_SIZE_MAX + 1), "a frame of length 65537 is over the limit of 65536"),
        (raw(b"", length=2**32 - 1), "over the limit"),
        (raw(b"", length=2**32 - 1)[:4], "over the limit"),
        (raw(b"", length=1), "a frame of length 1 has no room for a command of 0 bytes"),
        (raw(b"", length=0), "no room"),
        (raw(b"\x08\x01", length=3), "a frame of length 3 has no room for a command of 2 bytes"),
        (raw(b"\x08\x01", command_length=3), "no room"),
        (raw(b"\xff\xff\xff"), "the 3 bytes of a command are no protobuf message of ours"),
        (raw(b"\x52\x03\x0a\x01\xff"), "no protobuf message"),  # a topic that is not UTF-8
        (raw(b""), "a command of 0 bytes is of no kind that version 1 knows"),
        (raw(b"\x08\x01"), "of no kind"),
        (raw(b"\xfa\x3e\x00"), "of no kind"),
        (raw(PING.SerializeToString(), b"body"), "ping has a body of 4 bytes and may not have one"),
        (raw(PRODUCE.SerializeToString()), "produce has no body"),
        (raw(pb.Command(deliver=pb.Deliver()).SerializeToString()), "deliver has no body"),
        (b"GET / HTTP/1.1\r\n\r\n", "it begins like HTTP"),
        (b"PRI * HTTP/2.0\r\n\r\n", "it begins like HTTP"),
        (bytes.fromhex("160301020001"), "it begins like TLS, and this port is plain"),
        (bytes.fromhex("15030300020250"), "the peer's port speaks TLS"),
    ],
)
def test_a_violation_says_what_was_wrong_and_nothing_follows_it(data: bytes, sentence: str) -> None:
    decoder = FrameDecoder()
    with pytest.raises(ProtocolViolation, match=sentence):
        decoder.feed(data)
    assert decoder.buffered_bytes == 0
    with pytest.raises(ProtocolViolation, match=sentence):
        decoder.feed(framed(PING))


def test_frames_in_front_of_a_violation_are_not_lost() -> None:
    decoder = FrameDecoder()
    heard = decoder.feed(framed(PING) + framed(PING) + raw(b""))
    assert [frame.kind for frame in heard] == ["ping", "ping"]
    assert decoder.violation is not None
    with pytest.raises(ProtocolViolation) as raised:
        decoder.feed(b"")
    assert raised.value is decoder.violation


def test_the_limit_is_raised_when_the_handshake_is_over() -> None:
    data = framed(PRODUCE, bytes(2 * HANDSHAKE_SIZE_MAX))
    with pytest.raises(ProtocolViolation):
        FrameDecoder().feed(data)
    decoder = FrameDecoder()
    decoder.frame_size_max = MIB
    assert len(decoder.feed(data)) == 1


def test_a_frame_of_exactly_the_limit_passes() -> None:
    data = framed(PRODUCE, bytes(1000))
    assert len(FrameDecoder(len(data) - 4).feed(data)) == 1
    with pytest.raises(ProtocolViolation):
        FrameDecoder(len(data) - 5).feed(data)


def test_what_no_peer_would_take_is_not_encoded() -> None:
    with pytest.raises(ProtocolViolation, match="a command of 65544 bytes"):
        encode(pb.Command(goodbye=pb.Goodbye(reason="x" * 65536)))
    with pytest.raises(ProtocolViolation, match="a frame of length"):
        encode(PRODUCE, bytes(FRAME_SIZE_LIMIT))


# --- greeting -------------------------------------------------------------------------------------------


def hello(first: int, last: int, **fields: int) -> pb.Hello:
    return pb.Hello(**{"magic": MAGIC, "version_min": first, "version_max": last, **fields})


@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 9), (0, 1), (0, 7)])
def test_the_highest_version_that_both_speak_is_taken(first: int, last: int) -> None:
    assert negotiate(hello(first, last)) == 1


@pytest.mark.parametrize(
    ("greeting", "sentence"),
    [
        (hello(2, 3), "the client speaks versions 2 to 3, the broker 1 to 1"),
        (hello(0, 0), "the client speaks versions 0 to 0"),
        (hello(3, 1), "versions 3 to 1 are none at all"),
        (pb.Hello(version_min=1, version_max=1), "magic 0x00000000"),
    ],
)
def test_a_greeting_without_a_common_version_is_refused(greeting: pb.Hello, sentence: str) -> None:
    with pytest.raises(ProtocolViolation, match=sentence):
        negotiate(greeting)


def test_a_client_may_take_smaller_frames_but_not_absurd_ones() -> None:
    assert frame_size_of(hello(1, 1)) == FRAME_SIZE_LIMIT
    assert frame_size_of(hello(1, 1, frame_size_max=MIB)) == MIB
    for size in (1, HANDSHAKE_SIZE_MAX - 1, FRAME_SIZE_LIMIT + 1):
        with pytest.raises(ProtocolViolation):
            frame_size_of(hello(1, 1, frame_size_max=size))


@pytest.mark.parametrize(
    ("field", "value"), [("version", 0), ("version", 2), ("frame_size_max", 5), ("in_flight_max", 0)]
)
def test_a_client_checks_what_it_is_told(field: str, value: int) -> None:
    welcome = pb.Welcome(version=1, frame_size_max=MIB, in_flight_max=8)
    check_welcome(welcome)
    setattr(welcome, field, value)
    with pytest.raises(ProtocolViolation):
        check_welcome(welcome)


# --- numbers ----------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 1 << 40)), min_size=1, max_size=40))
def test_ranges_survive_the_way(gaps: list[tuple[int, int]]) -> None:
    ranges, reached = [], 0
    for gap, size in gaps:
        ranges.append(OffsetRange(reached + gap, reached + gap + size))
        reached = ranges[-1].end
    command = pb.Command(ack=pb.Ack(consumer=1, ranges=flat(ranges)))
    [frame] = FrameDecoder().feed(framed(command))
    assert ranges_of(frame.command.ack.ranges) == tuple(ranges)


@pytest.mark.parametrize(
    "numbers", [[], [1], [1, 2, 3], [5, 5], [6, 5], [0, 5, 4, 9], [7, 9, 1, 2], [0, 1] * (RANGES_MAX + 1)]
)
def test_ranges_that_are_none_are_a_violation(numbers: list[int]) -> None:
    with pytest.raises(ProtocolViolation):
        ranges_of(numbers)


def test_the_most_and_largest_ranges_fit_into_a_command() -> None:
    numbers = [2**64 - 1 - number for number in range(2 * RANGES_MAX)][::-1]
    command = pb.Command(request_id=2**64 - 1, nack=pb.Nack(consumer=2**32 - 1, ranges=numbers, reason="x" * 1024))
    [frame] = FrameDecoder().feed(framed(command))
    assert flat(ranges_of(frame.command.nack.ranges)) == numbers


def test_permits_add_up_to_a_limit() -> None:
    assert granted(-5, 10) == 5
    assert granted(0, PERMITS_MAX) == PERMITS_MAX
    with pytest.raises(ProtocolViolation, match="over the limit"):
        granted(1, PERMITS_MAX)
