"""Our gRPC server judged by others: h2spec, and grpc-go's interoperability client. In `make test-long`.

Needs Go, which builds both programs from their sources (docs/grpc.md); where there is none these tests fail.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from pydanube.api.grpc.server import GrpcServer
from tests.support import run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

H2SPEC = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
INTEROP = "google.golang.org/grpc/interop/client@v1.72.0"
CASES = (
    "empty_unary",
    "large_unary",
    "client_streaming",
    "server_streaming",
    "ping_pong",
    "empty_stream",
    "timeout_on_sleeping_server",
    "cancel_after_begin",
    "cancel_after_first_response",
    "status_code_and_message",
    "special_status_message",
    "custom_metadata",
    "unimplemented_method",
    "unimplemented_service",
)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `go install` puts what it builds. Its caches go with the test."""
    if shutil.which("go") is None:
        pytest.fail("no `go` on the PATH: install Go, which builds h2spec and grpc-go's client", pytrace=False)
    place = tmp_path_factory.mktemp("go")
    environment = {**os.environ, "GOPATH": str(place), "GOFLAGS": "-modcacherw", "GOBIN": str(place / "bin")}
    for each in (H2SPEC, INTEROP):
        built = subprocess.run(
            ["go", "install", each], env=environment, check=False, capture_output=True, text=True, timeout=800
        )
        if built.returncode:
            pytest.fail(f"`go install {each}` failed, so nothing was judged:\n{built.stderr[-2_000:]}", pytrace=False)
    return place / "bin"


# --- the service of the interoperability tests ------------------------------------------------------------


def _messages() -> dict[str, Any]:
    """The fields of package `grpc.testing` that the cases use."""
    number, text, data, message = 5, 9, 12, 11
    described = {
        "Payload": [("body", 2, data, "")],
        "EchoStatus": [("code", 1, number, ""), ("message", 2, text, "")],
        "ResponseParameters": [("size", 1, number, ""), ("interval_us", 2, number, "")],
        "SimpleRequest": [
            ("response_size", 2, number, ""),
            ("payload", 3, message, "Payload"),
            ("response_status", 7, message, "EchoStatus"),
        ],
        "SimpleResponse": [("payload", 1, message, "Payload")],
        "StreamingInputCallRequest": [("payload", 1, message, "Payload")],
        "StreamingInputCallResponse": [("aggregated_payload_size", 1, number, "")],
        "StreamingOutputCallRequest": [
            ("response_parameters", 2, message, "ResponseParameters"),
            ("payload", 3, message, "Payload"),
            ("response_status", 7, message, "EchoStatus"),
        ],
        "StreamingOutputCallResponse": [("payload", 1, message, "Payload")],
        "Empty": [],
    }
    file = descriptor_pb2.FileDescriptorProto(name="testing.proto", package="grpc.testing", syntax="proto3")
    for name, fields in described.items():
        kind = file.message_type.add(name=name)
        for field, place, of, other in fields:
            label = 3 if field == "response_parameters" else 1
            kind.field.add(
                name=field, number=place, type=of, label=label, type_name=f".grpc.testing.{other}" if other else None
            )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"grpc.testing.{name}")) for name in described
    }


PB = _messages()


class TestService:
    __test__ = False

    async def EmptyCall(self, request: Any, context: Any) -> Any:
        return PB["Empty"]()

    async def UnaryCall(self, request: Any, context: Any) -> Any:
        await self._echo(context)
        await self._status(request, context)
        return PB["SimpleResponse"](payload={"body": bytes(request.response_size)})

    async def StreamingInputCall(self, requests: AsyncIterator[Any], context: Any) -> Any:
        size = sum([len(each.payload.body) async for each in requests])
        return PB["StreamingInputCallResponse"](aggregated_payload_size=size)

    async def StreamingOutputCall(self, request: Any, context: Any) -> None:
        await self._send(request, context)

    async def FullDuplexCall(self, requests: AsyncIterator[Any], context: Any) -> None:
        await self._echo(context)
        async for each in requests:
            await self._status(each, context)
            await self._send(each, context)

    async def _send(self, request: Any, context: Any) -> None:
        for parameters in request.response_parameters:
            await asyncio.sleep(parameters.interval_us / 1e6)
            await context.write(PB["StreamingOutputCallResponse"](payload={"body": bytes(parameters.size)}))

    async def _echo(self, context: Any) -> None:
        found = dict(context.invocation_metadata())
        if (initial := found.get("x-grpc-test-echo-initial")) is not None:
            await context.send_initial_metadata((("x-grpc-test-echo-initial", initial),))
        if (trailing := found.get("x-grpc-test-echo-trailing-bin")) is not None:
            context.set_trailing_metadata((("x-grpc-test-echo-trailing-bin", trailing),))

    async def _status(self, request: Any, context: Any) -> None:
        if request.HasField("response_status"):
            codes = {code.value[0]: code for code in grpc.StatusCode}
            await context.abort(codes[request.response_status.code], request.response_status.message)

    def handler(self) -> Any:
        def of(make: Any, name: str, request: str, response: str) -> Any:
            return make(
                getattr(self, name),
                request_deserializer=PB[request].FromString,
                response_serializer=lambda each: each.SerializeToString(),
            )

        unary, stream_in = grpc.unary_unary_rpc_method_handler, grpc.stream_unary_rpc_method_handler
        stream_out, both = grpc.unary_stream_rpc_method_handler, grpc.stream_stream_rpc_method_handler
        asks, answers = "StreamingOutputCallRequest", "StreamingOutputCallResponse"
        methods = {
            "EmptyCall": of(unary, "EmptyCall", "Empty", "Empty"),
            "UnaryCall": of(unary, "UnaryCall", "SimpleRequest", "SimpleResponse"),
            "StreamingInputCall": of(
                stream_in, "StreamingInputCall", "StreamingInputCallRequest", "StreamingInputCallResponse"
            ),
            "StreamingOutputCall": of(stream_out, "StreamingOutputCall", asks, answers),
            "FullDuplexCall": of(both, "FullDuplexCall", asks, answers),
        }
        return grpc.method_handlers_generic_handler("grpc.testing.TestService", methods)


async def judged(*command: str) -> str:
    """What a program says of our server; `{port}` in its arguments is where that listens."""
    server = GrpcServer()
    server.add_generic_rpc_handlers((TestService().handler(),))
    port = await server.listen("127.0.0.1", 0)
    await server.start()
    try:
        process = await asyncio.create_subprocess_exec(
            *(word.format(port=port) for word in command), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        output, _ = await asyncio.wait_for(process.communicate(), 300)
        assert process.returncode == 0, output.decode()
        return output.decode()
    finally:
        await server.stop(0)


def test_h2spec_strict_passes_as_a_whole(programs: Path) -> None:
    path = "/grpc.testing.TestService/EmptyCall"
    said = run(judged(str(programs / "h2spec"), "--strict", "-h", "127.0.0.1", "-p", "{port}", "-P", path))
    assert "146 tests, 146 passed, 0 skipped, 0 failed" in said


@pytest.mark.parametrize("case", CASES)
def test_the_interoperability_client_of_grpc_go_passes(programs: Path, case: str) -> None:
    run(judged(str(programs / "client"), "-server_host=127.0.0.1", "-server_port={port}", f"-test_case={case}"))
