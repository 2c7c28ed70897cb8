"""gRPC on HTTP/2, sans-I/O: valid clients, cut anywhere, with every account checked, and what they lean on."""

from __future__ import annotations

import gc
import gzip
import weakref
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pydanube.wire.grpc.calls import Called, CallLimits, CallRefused, Cancelled, Held, MessageReceived
from pydanube.wire.grpc.headers import percent, seconds_of
from pydanube.wire.grpc.messages import PREFIX, framed
from pydanube.wire.http2 import frames
from pydanube.wire.http2.frames import ErrorCode
from pydanube.wire.status import Code
from tests.harness.grpc_wires import ANSWERS, CLIENT_STREAM, LIMITS, MIB, UNARY, Client, Raw, Server

SIZES = st.one_of(st.integers(0, 200), st.integers(0, 300_000))


# --- valid sequences ------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(
    messages=st.lists(st.tuples(SIZES, st.sampled_from(["call", "reset", "gzip", "stream"])), max_size=8),
    seed=st.integers(0, 2**32),
    cuts=st.sampled_from([1, 100, 5_000, 10**9]),
)
def test_valid_calls_cut_anywhere_are_answered_and_leave_nothing(
    messages: list[tuple[int, str]], seed: int, cuts: int
) -> None:
    random = Random(seed)
    client = Client(Server(answers=lambda request: request[::-1]))

    def cut(data: bytes) -> list[bytes]:
        pieces = []
        while data:
            size = random.randint(1, cuts) if len(data) < 2_000 else random.randint(1, max(cuts, 3_000))
            pieces.append(data[:size])
            data = data[size:]
        return pieces

    client.cut = cut
    expected = {}
    for size, kind in messages:
        message = random.randbytes(size)
        if kind == "stream":
            stream = client.open(CLIENT_STREAM)
            client.send(stream, framed(message)[:3])
            client.exchange()
            client.send(stream, framed(message)[3:] + framed(b"second"), end=True)
            client.exchange()
            [call] = [call for call in client.server.calls if call.method.path == CLIENT_STREAM]
            assert client.server.calls.pop(call) == [message, b"second"]
            client.server.grpc.answer(call, message[::-1])
            expected[stream] = message[::-1]
        elif kind == "gzip":
            stream = client.open(UNARY, ("grpc-encoding", "gzip"))
            packed = gzip.compress(message)
            client.send(stream, PREFIX.pack(1, len(packed)) + packed, end=True)
            expected[stream] = message[::-1]
        else:
            stream = client.call(message)
            if kind == "reset":
                client.h2.reset_stream(stream, ErrorCode.CANCEL)
            else:
                expected[stream] = message[::-1]
        if random.random() < 0.5:
            client.exchange()
            client.server.answer_all()
    client.exchange()
    client.server.answer_all()
    client.exchange()
    for stream, answer in expected.items():
        assert bytes(client.answers[stream].data) == framed(answer)
        assert client.answers[stream].status == 0 and client.answers[stream].ended
    assert client.server.grpc.end is None
    client.server.check_idle()


def test_a_large_message_is_granted_what_it_needs_and_the_windows_are_as_before() -> None:
    client = Client()
    for _ in range(5):
        stream = client.call(bytes(4 * MIB))
        client.exchange()
        client.server.answer_all()
        client.exchange()
        assert client.answers[stream].status == 0
        client.server.check_idle()


def test_a_granted_message_that_never_comes_leaves_the_windows_as_they_were() -> None:
    client = Client()
    for _ in range(10):
        stream = client.open()
        client.send(stream, PREFIX.pack(0, 3 * MIB) + bytes(1_000))
        client.exchange()
        client.h2.reset_stream(stream)
        client.exchange()
        client.server.check_idle()


def test_large_messages_of_all_connections_come_in_turn() -> None:
    held = Held(CallLimits(held_bytes=8 * MIB, granted_bytes=3 * MIB))
    clients = [Client(Server(held=held)) for _ in range(3)]
    for client in clients:
        client.stream = client.open()
        client.send(client.stream, PREFIX.pack(0, 2 * MIB) + bytes(60_000))
        client.exchange()
    assert held.waiting == 2
    for client in clients:
        client.exchange()
        client.send(client.stream, bytes(2 * MIB - 60_000), end=True)
        client.exchange()
        assert client.server.answer_all() == 1
        client.exchange()
        assert client.answers[client.stream].status == 0
    for client in clients:
        client.server.check_idle()


# --- four that stand still ------------------------------------------------------------------------------


def test_four_stopped_streams_of_sixteen_do_not_stop_the_other_twelve() -> None:
    server = Server()
    client = Client(server)
    client.reads = False
    streams = [client.call(b"", ANSWERS) for _ in range(16)]
    client.exchange()
    calls = {call.stream.id: call for call in server.calls}
    stopped, got = set(streams[:4]), dict.fromkeys(streams, 0)
    message = bytes(20_000)
    for _ in range(400):
        for stream in streams:
            while server.grpc.has_room(calls[stream]) and got[stream] < MIB:
                server.grpc.write(calls[stream], message)
                got[stream] += len(message)
        client.exchange()
        for stream in streams:
            answer = client.answers[stream]
            if stream not in stopped and answer.data:
                client.h2.acknowledge_received_data(len(answer.data), stream)
                answer.data.clear()
        # The connection's window is opened for what nobody takes as well, as real clients do.
        for stream in stopped:
            answer = client.answers[stream]
            if answer.data:
                client.h2.increment_flow_control_window(len(answer.data))
                answer.data.clear()
        client.exchange()
        server.grpc.take_roomy()
    assert all(got[stream] >= MIB for stream in streams[4:])
    assert all(got[stream] < MIB // 2 for stream in stopped)
    assert server.unsent.size_bytes <= LIMITS.unsent_bytes + LIMITS.unsent_stream_bytes
    server._note(server.grpc.lose())
    server.check_idle()


def test_a_stream_that_waits_for_room_is_named_when_it_has_it() -> None:
    server = Server()
    raw = Raw(server)
    raw.send(raw.call(path=ANSWERS) + raw.call(path=ANSWERS))
    first, second = server.calls
    server.grpc.write(first, bytes(LIMITS.unsent_bytes))
    server.output()
    assert not server.grpc.has_room(first)
    assert server.grpc.has_room(second), "its window is open and it has queued nothing"
    assert server.grpc.take_roomy() == []
    raw.send(frames.window_update(0, 2 * MIB) + frames.window_update(first.stream.id, 2 * MIB))
    assert server.grpc.take_roomy() == [first.stream]


# --- the end --------------------------------------------------------------------------------------------


def test_leaving_takes_calls_that_are_on_their_way_and_ends_with_the_last_stream() -> None:
    raw = Raw()
    server = raw.server
    raw.send(raw.call())
    server.grpc.leave(0)
    raw.send(raw.call(b"late"))
    assert frames.goaway(2**31 - 1, 0) in raw.said
    assert len(server.calls) == 2, "a call that was on its way when we said goodbye"
    server.tick(1.5)
    assert frames.goaway(3, 0) in server.output()
    assert server.grpc.end is None
    server.answer_all()
    said = server.output()
    assert framed(b"hello") in said and framed(b"late") in said
    assert raw.ended == "NO_ERROR"
    server.check_idle()


def test_a_stream_after_the_second_goaway_is_not_looked_at() -> None:
    raw = Raw()
    raw.send(raw.call(path=ANSWERS))
    raw.server.grpc.leave(0)
    raw.server.output()
    raw.send(frames.frame(frames.PING, frames.ACK, 0, b"goodbye."))
    raw.send(raw.call())
    assert len(raw.server.calls) == 1
    [call] = raw.server.calls
    raw.server.grpc.finish(call, Code.OK)
    raw.server.calls.clear()
    raw.server.output()
    assert raw.ended == "NO_ERROR"


def test_nothing_refers_to_a_call_or_a_connection_that_is_over() -> None:
    """Without the garbage collector: there are no cycles left."""
    gc.collect()
    gc.disable()
    try:
        raw = Raw()
        raw.send(raw.call() + raw.call(path=ANSWERS) + raw.request() + raw.data(PREFIX.pack(0, 100_000)))
        raw.server.answer_all()
        raw.said += raw.server.output()
        raw.server._note(raw.server.grpc.lose())
        alive = [weakref.ref(each) for each in (raw.server.grpc, raw.server.grpc._http)]
        raw.server.log.clear()
        del raw
        assert [ref() for ref in alive] == [None, None]
    finally:
        gc.enable()


# --- calls ----------------------------------------------------------------------------------------------


def test_a_call_has_its_metadata_and_its_deadline() -> None:
    raw = Raw()
    raw.send(raw.call(b"x", UNARY, ("grpc-timeout", "1500m"), ("key", "value"), ("some-bin", "AAEC"), ("grpc-x", "y")))
    [event] = raw.server.log
    assert isinstance(event, Called)
    said = event.call.headers
    assert said.timeout == 1.5
    assert said.metadata == (("user-agent", "test"), ("key", "value"), ("some-bin", b"\0\1\2"))


def test_what_is_wrong_with_a_call_is_its_status() -> None:
    cases = [
        (UNARY, (("grpc-timeout", "soon"),), framed(b""), Code.INVALID_ARGUMENT, "grpc-timeout"),
        (UNARY, (("grpc-encoding", "zip"),), framed(b""), Code.UNIMPLEMENTED, "grpc-encoding zip"),
        (UNARY, (("a-bin", "%%%"),), framed(b""), Code.INVALID_ARGUMENT, "a-bin"),
        ("/t.T/Nothing", (), framed(b""), Code.UNIMPLEMENTED, "Method not found!"),
        (UNARY, (), b"", Code.INTERNAL, "no message"),
        (UNARY, (), framed(b"a") + framed(b"b"), Code.INTERNAL, "one message"),
        (UNARY, (), framed(b"abc")[:-1], Code.INTERNAL, "inside a message"),
        (UNARY, (), b"\1" + framed(b"abc")[1:], Code.INTERNAL, "compressed"),
        (UNARY, (("grpc-encoding", "gzip"),), b"\1" + framed(b"abc")[1:], Code.INTERNAL, "cannot be decompressed"),
        (UNARY, (("grpc-encoding", "gzip"),), PREFIX.pack(1, 9) + gzip.compress(b"abc")[:9], Code.INTERNAL, "cut off"),
    ]
    for path, more, data, code, sentence in cases:
        raw = Raw()
        raw.send(raw.request(path, *more) + raw.data(data, end=True))
        [event] = raw.server.log
        assert isinstance(event, CallRefused), sentence
        assert event.code is code and sentence in event.sentence
        assert not raw.ended
        raw.server.check_idle()


def test_a_client_that_leaves_cancels_its_call() -> None:
    raw = Raw()
    raw.send(raw.call(path=ANSWERS))
    raw.send(frames.rst_stream(1, ErrorCode.CANCEL))
    assert [type(event) for event in raw.server.log] == [Called, Cancelled]
    raw.server.check_idle()


def test_a_stream_of_requests_is_given_one_by_one() -> None:
    raw = Raw()
    raw.send(raw.request(CLIENT_STREAM) + raw.data(framed(b"a") + framed(b"b")))
    raw.send(raw.data(framed(b"c"), end=True))
    assert [event.message for event in raw.server.log if isinstance(event, MessageReceived)] == [b"a", b"b", b"c", None]


def test_timeouts_and_sentences_are_read_and_written_as_grpc_does() -> None:
    expected = pytest.approx([3600, 120, 3, 0.004, 5e-6, 6e-9], rel=1e-9)
    assert [seconds_of(text) for text in ("1H", "2M", "3S", "4m", "5u", "6n")] == expected
    assert [seconds_of(text) for text in ("", "S", "123456789S", "1x", "-1S", "１S")] == [None] * 6
    assert percent("50 % größer\n") == b"50 %25 gr%C3%B6%C3%9Fer%0A"
