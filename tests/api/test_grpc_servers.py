"""Both gRPC servers, over real sockets, with grpcio's client: the same handlers, the same answers."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pydanube.api.connections import Admission
from pydanube.api.grpc.server import GrpcServer
from pydanube.config.grpc import GrpcConfig
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire.grpc.messages import framed
from pydanube.wire.http2 import frames
from pydanube.wire.http2.headers import literal
from pydanube.wire.http2.values import Http2Limits
from tests.harness.certificates import Authority
from tests.harness.grpc_wires import MIB, Raw, headers
from tests.harness.servers import Calls, refused, serving
from tests.support import run

BOTH = pytest.mark.parametrize("kind", ["own", "grpcio"])


class Handlers:
    """A service of every kind of call."""

    def __init__(self) -> None:
        self.contexts: list[Any] = []
        self.cancelled = asyncio.Event()
        self.large_answers = 0

    async def echo(self, request: bytes, context: Any) -> bytes:
        return request

    async def large(self, request: bytes, context: Any) -> bytes:
        self.large_answers += 1
        return bytes(256 * 1024)

    async def told(self, request: bytes, context: Any) -> bytes:
        found = dict(context.invocation_metadata())
        assert context.peer().startswith("ipv4:127.0.0.1:")
        left = context.time_remaining()
        return f"{found.get('key')} {found.get('key-bin')!r} {left is not None and 0 < left <= 20}".encode()

    async def fails(self, request: bytes, context: Any) -> bytes:
        raise RuntimeError("a defect")

    async def refuses(self, request: bytes, context: Any) -> bytes:
        await context.abort(grpc.StatusCode.ABORTED, "größer als 100 %", (("why", "so"),))
        raise AssertionError("abort raises")

    async def hangs(self, request: bytes, context: Any) -> bytes:
        self.contexts.append(context)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return b""

    async def counts(self, request: bytes, context: Any) -> None:
        await context.send_initial_metadata((("first", "yes"),))
        for number in range(int(request)):
            await context.write(str(number).encode())

    async def sums(self, requests: AsyncIterator[bytes], context: Any) -> bytes:
        return str(sum([int(each) async for each in requests])).encode()

    async def doubles(self, requests: AsyncIterator[bytes], context: Any) -> None:
        async for each in requests:
            await context.write(each * 2)

    def generic(self) -> Any:
        unary = grpc.unary_unary_rpc_method_handler
        methods = {name: unary(getattr(self, name)) for name in ("echo", "large", "told", "fails", "refuses", "hangs")}
        methods["counts"] = grpc.unary_stream_rpc_method_handler(self.counts)
        methods["sums"] = grpc.stream_unary_rpc_method_handler(self.sums)
        methods["doubles"] = grpc.stream_stream_rpc_method_handler(self.doubles)
        return grpc.method_handlers_generic_handler("t.T", methods)


class Served:
    """A server of one kind with these handlers, and a channel to it."""

    def __init__(self, server: Any, handlers: Handlers, channel: Any, port: int) -> None:
        self.server, self.handlers, self.channel, self.port = server, handlers, channel, port

    def unary(self, method: str) -> Any:
        return self.channel.unary_unary(f"/t.T/{method}")


@contextlib.asynccontextmanager
async def servers(kind: str, **settings: Any) -> AsyncIterator[Served]:
    handlers = Handlers()
    server: Any
    if kind == "own":
        server = GrpcServer(**settings)
        server.add_generic_rpc_handlers((handlers.generic(),))
        port = await server.listen("127.0.0.1", 0)
    else:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((handlers.generic(),))
        port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Served(server, handlers, channel, port)
    await server.stop(0.5)


def with_server(kind: str, test: Callable[[Served], Awaitable[None]], **settings: Any) -> None:
    async def body() -> None:
        async with servers(kind, **settings) as served:
            await test(served)

    run(body())


async def came(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # it is not ours to be told
            await asyncio.sleep(0.01)


@BOTH
def test_every_kind_of_call_is_answered(kind: str) -> None:
    async def body(served: Served) -> None:
        big = bytes(range(256)) * 12_000
        assert await served.unary("echo")(big[: 3 << 20]) == big[: 3 << 20]
        answers = await asyncio.gather(*(served.unary("echo")(str(n).encode()) for n in range(200)))
        assert answers == [str(n).encode() for n in range(200)]
        counted = served.channel.unary_stream("/t.T/counts")(b"500")
        assert dict(await counted.initial_metadata())["first"] == "yes"
        assert [int(each) async for each in counted] == list(range(500))
        assert await served.channel.stream_unary("/t.T/sums")(iter([b"1", b"20", b"300"])) == b"321"
        doubled = served.channel.stream_stream("/t.T/doubles")(iter([b"ab", b"", b"c" * 200_000]))
        assert [each async for each in doubled] == [b"abab", b"", b"c" * 400_000]

    with_server(kind, body)


@BOTH
def test_metadata_deadline_status_and_sentence_arrive(kind: str) -> None:
    async def body(served: Served) -> None:
        said = await served.unary("told")(b"", metadata=(("key", "v"), ("key-bin", b"\0\xff")), timeout=20)
        assert said == rb"v b'\x00\xff' True"
        try:
            await served.unary("refuses")(b"")
        except grpc.aio.AioRpcError as error:
            assert (error.code(), error.details()) == (grpc.StatusCode.ABORTED, "größer als 100 %")
            assert dict(error.trailing_metadata() or ())["why"] == "so"
        compressed = await served.unary("echo")(bytes(100_000), compression=grpc.Compression.Gzip)
        assert compressed == bytes(100_000)
        nothing = await refused(served.unary("nothing")(b""))
        assert nothing.code is grpc.StatusCode.UNIMPLEMENTED

    with_server(kind, body)


def test_a_handler_that_fails_costs_its_call_only(caplog: pytest.LogCaptureFixture) -> None:
    async def body(served: Served) -> None:
        failed = await refused(served.unary("fails")(b""))
        assert failed.code is grpc.StatusCode.UNKNOWN and "a defect" not in failed.sentence
        assert await served.unary("echo")(b"x") == b"x"

    with_server("own", body)
    assert [record.message for record in caplog.records] == ["call failed"]


@BOTH
def test_a_call_whose_deadline_has_passed_or_whose_client_left_is_cancelled(kind: str) -> None:
    async def body(served: Served) -> None:
        hanging = served.unary("hangs")
        late = await refused(hanging(b"", timeout=0.2))
        assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(served.handlers.cancelled.wait(), 10)
        served.handlers.cancelled.clear()
        call = hanging(b"")
        await came(lambda: len(served.handlers.contexts) == 2)
        call.cancel()
        await asyncio.wait_for(served.handlers.cancelled.wait(), 10)

    with_server(kind, body)


def test_nothing_is_left_of_a_connection_that_is_gone() -> None:
    async def body(served: Served) -> None:
        server = served.server
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(frames.PREFACE + frames.settings(()) + Raw().call(b"", "/t.T/hangs"))
        await came(lambda: bool(served.handlers.contexts))
        assert len(server.connections) == len(server.tasks) == 1
        writer.transport.abort()
        await asyncio.wait_for(served.handlers.cancelled.wait(), 10)
        await came(lambda: not server.connections and not server.tasks)
        assert server.held.size_bytes == server.unsent.size_bytes == 0

    with_server("own", body)
    gc.collect()


def test_a_call_that_comes_and_goes_in_one_packet_leaves_nothing() -> None:
    """Its task is cancelled before its first step."""

    async def body(served: Served) -> None:
        raw = Raw()
        _, writer = await asyncio.open_connection("127.0.0.1", served.port)
        writer.write(frames.PREFACE + frames.settings(()) + raw.call(b"", "/t.T/hangs", ("grpc-timeout", "5S")))
        writer.write(frames.rst_stream(1, 8) + frames.frame(frames.PING, 0, 0, bytes(8)))
        await came(lambda: bool(served.server.connections))
        await asyncio.sleep(0.05)
        assert not served.server.tasks and served.server.held.size_bytes == 0
        writer.close()

    with_server("own", body)


def test_a_stopping_server_lets_calls_end_and_then_cancels_them() -> None:
    async def body(served: Served) -> None:
        call = served.unary("hangs")(b"")
        await came(lambda: bool(served.handlers.contexts))
        ended = asyncio.ensure_future(refused(call))
        await served.server.stop(0.2)
        assert (await ended).code is grpc.StatusCode.UNAVAILABLE

    with_server("own", body)


def test_connections_beyond_the_bound_are_cut_off() -> None:
    async def body(served: Served) -> None:
        pairs = [await asyncio.open_connection("127.0.0.1", served.port) for _ in range(12)]
        ends = await asyncio.gather(*(reader.read(9) for reader, _ in pairs), return_exceptions=True)
        cut = sum(not end or isinstance(end, OSError) for end in ends)
        assert cut == 12 - 10, "two and the eight that are told why"
        for _, writer in pairs:
            writer.close()

    with_server("own", body, admission=Admission(2, 256, lambda port: set()))


def test_answers_that_a_client_does_not_take_stop_its_calls_and_no_others() -> None:
    """Small requests, large answers, and a window of nothing: 4,096 of them would be a gigabyte."""

    async def body(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        block = b"".join(literal(name.encode(), value.encode()) for name, value in headers("/t.T/large"))
        writer.write(frames.PREFACE + frames.settings([(frames.INITIAL_WINDOW_SIZE, 0)]))
        for number in range(200):
            stream = 2 * number + 1
            writer.write(frames.headers(stream, block, end=False))
            writer.write(frames.frame(frames.DATA, frames.END_STREAM, stream, framed(b"x")))
        await came(lambda: len(served.server.tasks) > 150)
        assert served.handlers.large_answers < 10
        assert served.server.unsent.size_bytes < 3 * MIB
        assert await served.unary("echo")(b"other") == b"other"
        writer.write(b"".join(frames.window_update(2 * number + 1, 2 * MIB) for number in range(200)))
        writer.write(frames.window_update(0, 2**30))
        reading = asyncio.ensure_future(reader.read(-1))
        await came(lambda: served.handlers.large_answers == 200 and not served.server.tasks)
        writer.close()
        await asyncio.gather(reading, return_exceptions=True)

    with_server("own", body)


def test_a_connection_whose_tick_fails_does_not_stop_the_clock_of_others() -> None:
    async def body(served: Served) -> None:
        class Broken:
            def tick(self, now: float) -> None:
                raise RuntimeError("a defect")

            def abort(self) -> None:
                served.server.forget(self)  # type: ignore[arg-type]

        served.server.connections[Broken()] = None
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        async with asyncio.timeout(10):
            assert b"no preface" in await reader.read()
        writer.close()
        assert not any(isinstance(each, Broken) for each in served.server.connections)

    with_server("own", body, limits=Http2Limits(preface_seconds=0.5))


def test_a_peer_that_says_nothing_is_dropped_by_the_clock() -> None:
    async def body(served: Served) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.port)
        async with asyncio.timeout(10):
            said = await reader.read()
        assert b"no preface" in said
        writer.close()

    with_server("own", body, limits=Http2Limits(preface_seconds=0.5))


# --- in a broker ----------------------------------------------------------------------------------------


@BOTH
def test_a_message_that_is_too_large_is_invalid_on_both(kind: str) -> None:
    async def body() -> None:
        async with serving(grpc_config=GrpcConfig(server=kind)) as calls:
            producer = await calls.create_producer()
            message_id = pb.MsgID(producer_id=producer, topic_name="/default/orders")
            code, sentence = await refused(
                calls.producers.SendMessage(pb.StreamMessage(msg_id=message_id, payload=bytes(5 << 20)))
            )
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "is over the limit of 4193280: no consumer could receive it" in sentence
            errors = calls.broker.telemetry
            assert errors is not None
            assert await calls.send(producer) == 7

    run(body())


@BOTH
@pytest.mark.parametrize("clients", ["required", "optional"])
def test_tls_with_certificates_of_clients(kind: str, clients: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, client = authority.sign("broker"), authority.sign("client")
    config = GrpcConfig(
        server=kind, cert_file=server.cert_file, key_file=server.key_file, ca_file=authority.file, clients=clients
    )
    roots = authority.file.read_bytes()
    known = grpc.ssl_channel_credentials(roots, client.key_file.read_bytes(), client.cert_file.read_bytes())

    async def lookup(calls: Calls, credentials: Any) -> Any:
        async with grpc.aio.secure_channel(calls.servers.client_addr, credentials) as channel:
            method = channel.unary_unary(
                "/danube.Discovery/TopicPartitions",
                request_serializer=pb.TopicLookupRequest.SerializeToString,
                response_deserializer=pb.TopicPartitionsResponse.FromString,
            )
            return await method(pb.TopicLookupRequest(request_id=3, topic="/default/a"), timeout=20)

    async def body() -> None:
        async with serving(grpc_config=config) as calls:
            assert calls.broker.broker_url.startswith("https://")
            assert (await lookup(calls, known)).request_id == 3
            anonymous = grpc.ssl_channel_credentials(roots)
            if clients == "optional":
                assert (await lookup(calls, anonymous)).request_id == 3
            else:
                assert (await refused(lookup(calls, anonymous))).code is grpc.StatusCode.UNAVAILABLE

    run(body())
