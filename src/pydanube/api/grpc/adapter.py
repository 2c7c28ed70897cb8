"""From a service's descriptor and an object with one method per call to what a gRPC server registers.

    class Discovery:                                   answers in values, refuses by raising our errors
        async def TopicLookup(self, request): ...      one request, one answer
        async def Slow(self, request, context): ...    the same, of a method that looks at its caller's deadline
    class Consumers:
        async def ReceiveMessages(self, request, context): ...     a stream: writes to the context itself

Between gRPC and such a method there is one layer, `_unary` or `_stream`: it passes on what is another broker's to
answer (`forward.py`), counts the call and turns whatever was raised into a status. No traceback reaches a client; an
error that is none of ours is logged once. A call without a method is UNIMPLEMENTED, with the object's own sentence.
"""

from __future__ import annotations

import inspect
import logging
import re
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeAlias

import grpc
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from pydanube.api.admission import Admitting, Intake
from pydanube.errors import DanubeError
from pydanube.log.pressure import Pressure
from pydanube.telemetry import RpcMetrics, Telemetry
from pydanube.wire.status import STATUS, Code, Status, Table, cut, status

if TYPE_CHECKING:
    from pydanube.api.connections import Admission
    from pydanube.api.grpc.forward import Forward, Forwarder, ForwardStream
    from pydanube.api.orders import Orders, Told

log = logging.getLogger(__name__)

Behaviour: TypeAlias = Callable[[Any, Any], Awaitable[Any]]
GRPC_CODE: Final = {code: grpc.StatusCode[code.name] for code in Code}


class RpcRefusal(Exception):
    """What is wrong with a call as such and has no error of ours: a missing field, an unknown enum value."""

    def __init__(self, code: Code, sentence: str) -> None:
        super().__init__(code, sentence)
        self.status = Status(code, cut(sentence))


class ServiceHandler(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The methods of one service, by path. Their behaviours take a refusal in place of a request, and raise it."""

    def __init__(
        self, methods: Mapping[str, Any], size_max_bytes: Mapping[str, int], requests: Mapping[str, str]
    ) -> None:
        self._methods = methods
        self._requests = requests
        self.size_max_bytes = size_max_bytes

    def service(self, handler_call_details: Any) -> Any:
        return self._methods.get(handler_call_details.method)

    def too_large(self, path: str) -> Callable[[int, int], str]:
        """The sentence for a request of a size that is over a limit."""
        kind = self._requests[path]
        return lambda size, limit: over_limit(kind, size, limit, is_message=path in self.size_max_bytes)


def over_limit(kind: str, size: int, limit: int, *, is_message: bool) -> str:
    why = ": no consumer could receive it" if is_message else ""
    return f"a {kind} of {size} bytes is over the limit of {limit}{why}"


def handler_of(
    service: ServiceDescriptor,
    implementation: object,
    telemetry: Telemetry,
    *,
    table: Table = STATUS,
    tables: Mapping[str, Table] = {},
    size_max_bytes: Mapping[str, int] = {},
    pressure: Mapping[str, Pressure] = {},
    forwarder: Forwarder | None = None,
    admission: Admission | None = None,
    orders: Orders | None = None,
) -> grpc.GenericRpcHandler:
    """`tables` and `size_max_bytes` are by method, for those that differ. So is `pressure`, which says when a request
    is not even to be decoded; such methods are bounded in what they receive at the same time (`admission.py`).
    `admission`: of connections, by the server it is for. `orders` hears of those that succeeded.
    """
    methods = {}
    admitted: list[tuple[str, Intake, Any]] = []
    for method in service.methods:
        name = f"{service.name}/{method.name}"
        metrics = telemetry.rpc(snake(service.name.removesuffix("Service")), snake(method.name))
        codes = tables.get(method.name, table)
        call = getattr(implementation, method.name, None)
        told = orders.told(method) if orders is not None else None
        if call is not None and method.server_streaming:
            elsewhere = forwarder.stream(method) if forwarder is not None else None
            make, behaviour = (
                grpc.unary_stream_rpc_method_handler,
                _stream(name, call, metrics, codes, elsewhere, admission, told),
            )
        else:
            call = call or _missing(method, implementation)
            forward = forwarder.unary(method) if forwarder is not None else None
            make, behaviour = (
                grpc.unary_unary_rpc_method_handler,
                _unary(name, call, metrics, codes, forward, admission, told),
            )
        read = _reader(method, size_max_bytes.get(method.name))
        write = GetMessageClass(method.output_type).SerializeToString
        if (bound := pressure.get(method.name)) is not None:
            intake = Intake(bound)
            careful = intake.carefully(behaviour, _refuser(name, metrics, codes))
            path = _path(service, method.name)
            admitted.append(
                (
                    path,
                    intake,
                    grpc.stream_unary_rpc_method_handler(careful, request_deserializer=read, response_serializer=write),
                )
            )
            read = _reader(method, size_max_bytes.get(method.name), bound.why_busy, codes, intake.received)
        methods[method.name] = make(behaviour, request_deserializer=read, response_serializer=write)
    bounds = {_path(service, name): size for name, size in size_max_bytes.items()}
    requests = {_path(service, method.name): method.input_type.name for method in service.methods}
    handler = ServiceHandler({_path(service, name): each for name, each in methods.items()}, bounds, requests)
    for path, intake, careful_handler in admitted:
        handler = Admitting(handler, path, intake, careful_handler)
    return handler


# --- the layer ----------------------------------------------------------------------------------------


def _unary(
    name: str,
    call: Callable[..., Awaitable[Message]],
    metrics: RpcMetrics,
    table: Table,
    forward: Forward | None,
    admission: Admission | None,
    told: Told | None,
) -> Behaviour:
    wants_context = len(inspect.signature(call).parameters) == 2

    async def answer(request: Any, context: Any) -> Message:
        try:
            if admission is not None:
                admission.check(context.peer())
            if type(request) is RpcRefusal:
                raise request
            response = await forward(request, context) if forward is not None else None
            if response is None:
                response = await (call(request, context) if wants_context else call(request))
        except Exception as error:
            metrics.errors.inc()
            await _abort(context, name, error, table)
        metrics.ok.inc()
        if told is not None:
            told(request, context)
        return response

    return answer


def _stream(
    name: str,
    call: Behaviour,
    metrics: RpcMetrics,
    table: Table,
    forward: ForwardStream | None,
    admission: Admission | None,
    told: Told | None,
) -> Behaviour:
    async def answer(request: Any, context: Any) -> None:
        try:
            if admission is not None:
                admission.check(context.peer())
            if type(request) is RpcRefusal:
                raise request
            if forward is None or not await forward(request, context):
                await call(request, context)
        except Exception as error:
            metrics.errors.inc()
            await _abort(context, name, error, table)
        metrics.ok.inc()
        if told is not None:
            told(request, context)

    return answer


def _refuser(name: str, metrics: RpcMetrics, table: Table) -> Callable[[Exception, Any], Awaitable[NoReturn]]:
    async def refuse(error: Exception, context: Any) -> NoReturn:
        metrics.errors.inc()
        await _abort(context, name, error, table)

    return refuse


async def _abort(context: Any, name: str, error: Exception, table: Table) -> NoReturn:
    # A write to a client that has left, most of the time; if it has not, it is not left waiting for an end.
    code, sentence = status_of(error, table)
    if not isinstance(error, DanubeError | RpcRefusal | grpc.aio.InternalError):
        log.error("call failed", extra={"call": name, "error": type(error).__name__}, exc_info=error)
    try:
        await context.abort(GRPC_CODE[code], sentence)
    except grpc.aio.InternalError as left:
        # The client has left. gRPC would log a traceback for it, and for a second status as well.
        raise CancelledError() from left
    raise AssertionError("abort raises")


def status_of(error: Exception, table: Table) -> Status:
    return error.status if isinstance(error, RpcRefusal) else status(error, table)


def _missing(method: MethodDescriptor, implementation: object) -> Callable[[Any], Awaitable[Message]]:
    sentence = getattr(implementation, "unimplemented", "this broker does not have it")

    async def refuse(request: Message) -> Message:
        raise RpcRefusal(Code.UNIMPLEMENTED, f"{method.name} is not implemented: {sentence}")

    return refuse


def _reader(
    method: MethodDescriptor,
    size_max_bytes: int | None,
    busy: Callable[[], DanubeError | None] = lambda: None,
    table: Table = STATUS,
    received: Callable[[], None] = lambda: None,
) -> Callable[[bytes], Message | RpcRefusal]:
    """Returns a refusal instead of raising it: gRPC has only a traceback and UNKNOWN for a reader that raises."""
    kind = GetMessageClass(method.input_type)
    parse = kind.FromString

    def read(data: bytes) -> Message | RpcRefusal:
        received()
        if size_max_bytes is not None and len(data) > size_max_bytes:
            return RpcRefusal(
                Code.INVALID_ARGUMENT,
                over_limit(kind.DESCRIPTOR.name, len(data), size_max_bytes, is_message=True),
            )
        if (why := busy()) is not None:
            return RpcRefusal(*status(why, table))
        try:
            return parse(data)
        except DecodeError:
            return RpcRefusal(Code.INVALID_ARGUMENT, f"the request is no {kind.DESCRIPTOR.full_name}")

    return read


def _path(service: ServiceDescriptor, method: str) -> str:
    return f"/{service.full_name}/{method}"


def snake(name: str) -> str:
    """create_producer for CreateProducer."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
