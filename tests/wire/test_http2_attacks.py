"""What a hostile client may cost: every attack ends by our hand, or stays within its bound, at a bounded price.

CPU is measured in this process, with room for a busy machine; bytes are what the client could send before the end.
"""

from __future__ import annotations

import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import process_time

import pytest
from hpack.hpack import Encoder

from pydanube.wire.grpc.calls import CallLimits, CallRefused, Held
from pydanube.wire.grpc.messages import PREFIX, framed
from pydanube.wire.http2 import frames
from pydanube.wire.http2.frames import ErrorCode
from pydanube.wire.http2.headers import HeaderDecoder, literal
from pydanube.wire.status import Code
from tests.harness.grpc_wires import ANSWERS, CLIENT_STREAM, LIMITS, MIB, SMALL, UNARY, Client, Raw, Server, headers

ROUNDS = 40_000


@contextmanager
def bounded(cpu_seconds: float = 0.6, memory_bytes: int = 8 * MIB) -> Iterator[None]:
    tracemalloc.start(1)
    try:
        began = process_time()
        yield
        used = process_time() - began
        assert tracemalloc.get_traced_memory()[1] < memory_bytes
        assert used < 4 * cpu_seconds, f"{used:.2f} s of CPU"  # tracing memory costs three times the work
    finally:
        tracemalloc.stop()


def flood(raw: Raw, make: Callable[[int], bytes], rounds: int = ROUNDS) -> None:
    """Sends until the server has ended the connection."""
    for number in range(rounds):
        if raw.ended:
            return
        raw.send(make(number))


# --- frames that ask for work and carry none -----------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda number: frames.frame(frames.PING, 0, 0, b"12345678"), id="PING"),
        pytest.param(lambda number: frames.settings([(frames.INITIAL_WINDOW_SIZE, 1000 + number % 2)]), id="SETTINGS"),
        pytest.param(lambda number: frames.frame(frames.PRIORITY, 0, 1, b"\0\0\0\0\1"), id="PRIORITY"),
        pytest.param(lambda number: frames.window_update(0, 1), id="WINDOW_UPDATE"),
        pytest.param(lambda number: frames.frame(0xBB, 0, 0, b""), id="unknown frames"),
        pytest.param(lambda number: frames.frame(frames.PING, frames.ACK, 0, b"12345678"), id="PONG"),
        pytest.param(lambda number: frames.frame(frames.SETTINGS, frames.ACK, 0, b""), id="SETTINGS acks"),
    ],
)
def test_a_flood_of_frames_without_work_ends_the_connection(make: Callable[[int], bytes]) -> None:
    raw = Raw()
    with bounded():
        flood(raw, make)
    assert raw.ended == "ENHANCE_YOUR_CALM"
    assert raw.sent_bytes < 100_000


def test_a_flood_of_empty_data_ends_the_connection() -> None:
    raw = Raw()
    raw.send(raw.request())
    with bounded():
        flood(raw, lambda number: raw.data(b""))
    assert raw.ended == "ENHANCE_YOUR_CALM"
    raw.server.check_idle()


def test_settings_that_touch_many_streams_are_dear() -> None:
    raw = Raw()
    raw.send(b"".join(raw.request(ANSWERS) for _ in range(4_000)))
    with bounded():
        flood(raw, lambda number: frames.settings([(frames.INITIAL_WINDOW_SIZE, 1000 + number % 2)]))
    assert raw.ended == "ENHANCE_YOUR_CALM"
    raw.server.check_idle()


def test_one_frame_with_very_many_settings_ends_the_connection() -> None:
    raw = Raw()
    raw.send(frames.settings([(frames.INITIAL_WINDOW_SIZE, 1000 + number % 2) for number in range(2_000)]))
    assert raw.ended == "ENHANCE_YOUR_CALM"


def test_a_window_that_opens_byte_by_byte_ends_the_connection() -> None:
    server = Server(answers=lambda request: bytes(100_000))
    raw = Raw(server)
    raw.send(frames.settings([(frames.INITIAL_WINDOW_SIZE, 0)]))
    raw.send(raw.call())
    server.answer_all()
    raw.said += server.output()
    with bounded():
        flood(raw, lambda number: frames.window_update(1, 1))
    assert raw.ended == "ENHANCE_YOUR_CALM"
    server.check_idle()


def test_a_quiet_connection_may_ping_for_weeks() -> None:
    raw = Raw()
    for _ in range(20_000):
        raw.server.now += 10
        raw.send(frames.frame(frames.PING, 0, 0, b"12345678"))
        raw.server.tick()
    assert not raw.ended


def test_a_busy_connection_may_ping_and_open_windows_with_every_call() -> None:
    raw = Raw()
    pings = frames.frame(frames.PING, 0, 0, b"12345678") + frames.window_update(0, 21) * 3
    for _ in range(1_500):
        raw.send(raw.call() + pings)
        raw.server.answer_all()
    assert not raw.ended


# --- streams -------------------------------------------------------------------------------------------


def test_a_rapid_reset_ends_the_connection() -> None:
    raw = Raw()
    with bounded():
        flood(raw, lambda number: raw.call() + frames.rst_stream(raw.stream, ErrorCode.CANCEL))
    assert raw.ended == "ENHANCE_YOUR_CALM"
    assert raw.stream < 2 * 2 * LIMITS.resets
    raw.server.check_idle()


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param(lambda raw: frames.window_update(raw.stream, 0), id="window of nothing"),
        pytest.param(lambda raw: frames.window_update(raw.stream, 2**31 - 1), id="window too large"),
        pytest.param(lambda raw: frames.headers(raw.stream, raw.block(), end=True), id="second headers"),
    ],
)
def test_resets_that_the_client_makes_us_send_end_the_connection(mistake: Callable[[Raw], bytes]) -> None:
    raw = Raw()
    with bounded():
        flood(raw, lambda number: raw.request(ANSWERS) + mistake(raw))
    assert raw.ended == "ENHANCE_YOUR_CALM"
    raw.server.check_idle()


def test_more_streams_than_allowed_are_refused_and_then_the_connection_ends() -> None:
    raw = Raw()
    with bounded(2.0, 32 * MIB):
        flood(raw, lambda number: raw.request(ANSWERS), 6_000)
    assert raw.ended == "ENHANCE_YOUR_CALM"
    raw.server.check_idle()


def test_half_of_many_calls_may_be_cancelled() -> None:
    raw = Raw()
    for number in range(2_400):
        raw.send(raw.call())
        if number % 2:
            raw.send(frames.rst_stream(raw.stream, ErrorCode.CANCEL))
        raw.server.answer_all()
    assert not raw.ended


# --- headers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [b"", bytes(1_000), bytes(16_000)], ids=["empty", "1 kB", "16 kB"])
def test_a_flood_of_continuations_ends_the_connection(piece: bytes) -> None:
    raw = Raw()
    with bounded():
        raw.send(frames.frame(frames.HEADERS, 0, 1, b"\x82"))
        flood(raw, lambda number: frames.frame(frames.CONTINUATION, 0, 1, piece))
    assert raw.ended == "ENHANCE_YOUR_CALM"
    assert raw.sent_bytes < 40_000


def test_a_header_bomb_ends_the_connection() -> None:
    raw = Raw()
    big = raw.encoder.encode([*headers(), ("x", "y" * 3_900)])
    raw.send(frames.headers(1, big, end=True))
    assert not raw.ended
    with bounded():
        raw.send(frames.headers(3, b"\xbe" * 10_000, end=True))
    assert raw.ended == "COMPRESSION_ERROR"


def test_header_blocks_are_remembered_up_to_a_bound() -> None:
    raw = Raw()
    for number in range(3 * LIMITS.remembered_blocks):
        raw.stream += 2
        block = (
            raw.encoder.encode(headers())
            if not number
            else bytes(raw.encoder.encode([*headers(), (f"x{number}", "y", True)]))
        )
        raw.send(frames.headers(raw.stream, block, end=False) + raw.data(framed(b"x"), end=True))
        raw.server.answer_all()
    assert not raw.ended
    assert 0 < raw.server.grpc._http._decoder.remembered <= LIMITS.remembered_blocks


def test_large_header_blocks_are_not_remembered() -> None:
    """256 blocks of 16 KiB would be 12 MiB of each connection."""
    raw = Raw()
    plain = bytes(Encoder().encode([(name, value, True) for name, value in headers()]))
    for size in (8_000, 1_500):
        for number in range(300):
            raw.stream += 2
            block = plain + literal(b"x%d" % number, b"y" * size)
            raw.send(frames.headers(raw.stream, block, end=False) + raw.data(framed(b"x"), end=True))
            raw.server.answer_all()
    assert not raw.ended
    assert 0 < raw.server.grpc._http._decoder.remembered_bytes <= 512 * LIMITS.remembered_blocks


def test_a_block_is_not_remembered_over_a_change_of_the_tables_size() -> None:
    """With a table of nothing its field is not kept, and the table stays as it was; after the change it is kept."""
    decoder = HeaderDecoder(16_384, 256)
    field = b"\x40\x01a\x01b"  # to be indexed
    decoder.decode(b"\x20" + b"\x82")  # the table has no room
    decoder.decode(field)
    decoder.decode(b"\x3f\xe1\x1f" + b"\x82")  # it has 4,096 bytes
    decoder.decode(field)
    assert decoder.decode(b"\xbe").fields == [(b"a", b"b")]


# --- requests ------------------------------------------------------------------------------------------


def test_data_beyond_a_window_ends_the_connection() -> None:
    raw = Raw()
    raw.send(raw.request() + raw.data(PREFIX.pack(0, MIB)) + b"".join(raw.data(bytes(16_000)) for _ in range(5)))
    assert raw.ended == "FLOW_CONTROL_ERROR"
    raw.server.check_idle()


def test_requests_that_do_not_end_are_bounded_and_end_by_time() -> None:
    """Within all windows: what a connection may hold, then nothing more until time is up."""
    raw = Raw()
    with bounded(memory_bytes=4 * MIB):
        sent = 0
        while sent + 64_000 <= LIMITS.connection_window_bytes:
            raw.send(
                raw.request()
                + b"".join(raw.data(piece) for piece in _pieces(PREFIX.pack(0, 2 * MIB) + bytes(64_000 - 5)))
            )
            sent += 64_000
    calls = (raw.stream + 1) // 2
    assert not raw.ended
    assert raw.server.held.size_bytes < 96 * MIB + 2 * MIB
    refused = raw.server.tick(61)
    assert [event.code for event in refused if isinstance(event, CallRefused)] == [Code.DEADLINE_EXCEEDED] * calls
    raw.said += raw.server.output()
    assert not raw.ended
    raw.server.check_idle()


def _pieces(data: bytes) -> list[bytes]:
    return [data[start : start + 16_000] for start in range(0, len(data), 16_000)]


def test_all_connections_together_hold_no_more_than_their_bound() -> None:
    held = Held(CallLimits(held_bytes=4 * MIB, granted_bytes=3 * MIB))
    raws = [Raw(Server(held=held)) for _ in range(20)]
    refused = 0
    for raw in raws:
        for _ in range(10):
            raw.send(
                raw.request() + b"".join(raw.data(piece) for piece in _pieces(PREFIX.pack(0, 64_000) + bytes(60_000)))
            )
    for raw in raws:
        assert not raw.ended
        refused += sum(
            isinstance(event, CallRefused) and event.code is Code.RESOURCE_EXHAUSTED for event in raw.server.log
        )
    assert refused > 100
    assert held.size_bytes <= 4 * MIB + 64 * 1024
    for raw in raws:
        raw.server._note(raw.server.grpc.lose())
    for raw in raws:
        raw.server.check_idle()


def test_a_message_that_is_too_large_is_refused_from_its_prefix_with_a_final_code() -> None:
    """RESOURCE_EXHAUSTED would be tried again for ever."""
    client = Client()
    stream = client.open(SMALL)
    client.send(stream, PREFIX.pack(0, 2_000_000_000))
    client.exchange()
    answer = client.answers[stream]
    assert answer.status == Code.INVALID_ARGUMENT
    assert answer.headers["grpc-message"] == "2000000000 bytes are over the limit of 1024"
    client.server.check_idle()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_decompression_bomb_is_too_large(encoding: str) -> None:
    compressor = zlib.compressobj(9, wbits=16 + 15 if encoding == "gzip" else 15)
    bomb = compressor.compress(bytes(20 * MIB)) + compressor.flush()
    client = Client()
    with bounded(memory_bytes=10 * MIB):
        stream = client.open(UNARY, ("grpc-encoding", encoding))
        client.send(stream, PREFIX.pack(1, len(bomb)) + bomb, end=True)
        client.exchange()
    assert client.answers[stream].status == Code.INVALID_ARGUMENT
    client.server.check_idle()


@pytest.mark.parametrize("is_whole", [True, False])
def test_what_decompressed_messages_hold_is_counted_by_what_they_became(is_whole: bool) -> None:
    """4 KiB become 4 MiB each: by what came, a thousand of them would be nothing."""
    held = Held(CallLimits(held_bytes=8 * MIB, granted_bytes=3 * MIB))
    server = Server(held=held)
    raw = Raw(server)
    packed = zlib.compress(bytes(4 * MIB - 1), 9)
    with bounded(cpu_seconds=2, memory_bytes=20 * MIB):
        for _ in range(30):
            request = raw.request(UNARY, ("grpc-encoding", "deflate"))
            raw.send(request + raw.data(PREFIX.pack(1, len(packed)) + packed, end=is_whole))
    refused = [event for event in server.log if isinstance(event, CallRefused)]
    assert len(refused) > 20 and {event.code for event in refused} == {Code.RESOURCE_EXHAUSTED}
    assert held.size_bytes <= 9 * MIB
    server._note(server.grpc.lose())
    server.check_idle()


def test_requests_of_one_connection_that_never_come_do_not_stop_those_of_others() -> None:
    held = Held(CallLimits(held_bytes=40 * MIB, granted_bytes=20 * MIB))
    raw = Raw(Server(held=held))
    for _ in range(100):
        raw.send(raw.request() + raw.data(PREFIX.pack(0, 4 * MIB - 9) + bytes(100)))
    client = Client(Server(held=held))
    for _ in range(3):
        stream = client.call(bytes(4 * MIB - 9))
        client.exchange()
        client.server.answer_all()
        client.exchange()
        assert client.answers[stream].status == 0
    client.server.grpc.lose()
    raw.server._note(raw.server.grpc.lose())
    raw.server.check_idle()


def test_a_message_in_pieces_of_a_byte_costs_its_bytes_and_no_more() -> None:
    raw = Raw()
    raw.send(raw.request(CLIENT_STREAM))
    with bounded(memory_bytes=2 * MIB):
        flood(raw, lambda number: raw.data(PREFIX.pack(0, 1_000_000)[number : number + 1] or b"x"))
    assert raw.ended == "ENHANCE_YOUR_CALM"
    raw.server.check_idle()


# --- answers -------------------------------------------------------------------------------------------


def test_windows_that_never_open_hold_a_bounded_queue() -> None:
    """The layer above asks for room before it writes; one message per stream, and not beyond the greatest bound."""
    server = Server()
    raw = Raw(server)
    raw.send(frames.settings([(frames.INITIAL_WINDOW_SIZE, 0)]))
    raw.send(b"".join(raw.call(path=ANSWERS) for _ in range(1_000)))
    written = 0
    for call in list(server.calls):
        server.grpc.start(call)
        while server.grpc.has_room(call):
            server.grpc.write(call, bytes(4_000))
            written += 1
    server.output()
    assert server.unsent.size_bytes <= LIMITS.unsent_bytes + LIMITS.unsent_stream_bytes + 4_009
    raw.send(frames.settings([(frames.INITIAL_WINDOW_SIZE, 1)]))
    for call in list(server.calls):
        while server.grpc.has_room(call):
            server.grpc.write(call, bytes(MIB))
    assert server.unsent.size_bytes <= LIMITS.unsent_bytes_max + 2 * MIB
    assert len(server.output()) < 2 * 10_000 + 1_000 * 40
    server._note(server.grpc.lose())
    server.check_idle()


# --- time ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "seconds", "code"),
    [
        pytest.param(b"", 10.1, "SETTINGS_TIMEOUT", id="nothing"),
        pytest.param(frames.PREFACE[:10], 10.1, "SETTINGS_TIMEOUT", id="half a preface"),
        pytest.param(frames.PREFACE, 10.1, "SETTINGS_TIMEOUT", id="no settings"),
        pytest.param(
            frames.PREFACE + frames.settings(()) + frames.frame(1, 0, 1, b"\x82"),
            10.1,
            "ENHANCE_YOUR_CALM",
            id="headers",
        ),
        pytest.param(frames.PREFACE + frames.settings(()) + b"\0\0\x10", 60.1, "ENHANCE_YOUR_CALM", id="half a frame"),
    ],
)
def test_what_does_not_come_to_its_end_ends_the_connection(said: bytes, seconds: float, code: str) -> None:
    server = Server()
    server.receive(said)
    server.tick(seconds)
    assert server.grpc.end is not None and server.grpc.end.code.name == code
    server.check_idle()


def test_a_peer_that_is_gone_is_noticed_and_one_that_answers_is_kept() -> None:
    raw = Raw()
    raw.send(raw.call(path=ANSWERS))
    raw.server.tick(29)
    raw.said.clear()
    raw.said += raw.server.output()
    assert not raw.said
    raw.server.tick(2)
    ping = raw.server.output()
    assert ping == frames.frame(frames.PING, 0, 0, b"pydanube")
    raw.server.now += 5
    raw.send(frames.frame(frames.PING, frames.ACK, 0, b"pydanube"))
    raw.server.tick(29)
    assert not raw.ended
    raw.server.tick(2)
    raw.server.output()
    raw.server.tick(11)
    assert raw.ended == "NO_ERROR"
    assert not raw.server.calls, "the call was cancelled"
    raw.server.check_idle()


def test_something_that_is_not_http2_gets_an_error_and_the_end() -> None:
    server = Server()
    server.receive(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert server.grpc.end is not None and server.grpc.end.code is ErrorCode.PROTOCOL_ERROR
