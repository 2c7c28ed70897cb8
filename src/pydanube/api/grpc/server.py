"""Our gRPC server: the official clients' port. Takes the handlers that `grpc.aio` takes, and costs a tenth of it.

HTTP/2 and gRPC are sans-I/O (wire/http2, wire/grpc); what is here listens, counts connections and keeps time. Its
limits, and how to go back to grpc.aio, are in docs/grpc.md; why there is one, in docs/adr/0018.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import grpc

from pydanube.api.admission import Admitting
from pydanube.api.connections import Admission
from pydanube.api.grpc.adapter import ServiceHandler
from pydanube.api.grpc.calling import Handler
from pydanube.api.grpc.connection import GrpcProtocol
from pydanube.core.units import MIB
from pydanube.wire.grpc.calls import CallLimits, Held, ServerMethod
from pydanube.wire.http2.sending import Unsent
from pydanube.wire.http2.values import Http2Limits

log = logging.getLogger(__name__)

REQUEST_SIZE_MAX_BYTES: Final = 16 * MIB
UNSENT_BYTES: Final = 256 * MIB  # queued for the clients of all connections, beyond the share of each
TICK_SECONDS: Final = 1.0
HANDSHAKE_SECONDS: Final = 10.0  # of TLS, and for its goodbye
METHODS_UNKNOWN_MAX: Final = 256  # paths that were asked for in vain, remembered
LIMITS: Final = Http2Limits()
CALL_LIMITS: Final = CallLimits()


class _Details(NamedTuple):
    """What `grpc.GenericRpcHandler.service` is asked with."""

    method: str
    invocation_metadata: tuple[()] = ()


class GrpcServer:
    """One port. `admission` bounds the connections; None: there is no bound."""

    def __init__(
        self,
        admission: Admission | None = None,
        *,
        limits: Http2Limits = LIMITS,
        call_limits: CallLimits = CALL_LIMITS,
    ) -> None:
        self.limits = limits
        self.held = Held(call_limits)
        self.unsent = Unsent(UNSENT_BYTES)
        self.tasks: set[asyncio.Task[None] | None] = set()
        self.connections: dict[GrpcProtocol, None] = {}
        self._admission = admission
        self._handlers: list[Any] = []
        self._methods: dict[str, ServerMethod | None] = {}
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.Task[None] | None = None
        self._is_stopping = False
        self._all_gone = asyncio.Event()  # after stopping began

    def add_generic_rpc_handlers(self, handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        """As of `grpc.aio.Server`. A handler is asked once per method, so what it answers may not change."""
        self._handlers.extend(handlers)
        self._methods.clear()

    async def listen(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Binds, and takes no connections yet. Returns the port. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: GrpcProtocol(self),
            host,
            port,
            backlog=1024,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_SECONDS,
            ssl_shutdown_timeout=None if tls is None else HANDSHAKE_SECONDS,
            start_serving=False,
        )
        bound: int = self._server.sockets[0].getsockname()[1]
        return bound

    async def start(self) -> None:
        assert self._server is not None
        await self._server.start_serving()
        self._ticking = asyncio.create_task(self._tick(), name="sweep gRPC connections")

    async def stop(self, grace_seconds: float | None = None) -> None:
        """Takes no more connections, asks the clients there are to go, and lets calls end; then cancels them."""
        self._is_stopping = True
        self._all_gone.clear()
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.leave()
        if self.connections and grace_seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(grace_seconds):
                    await self._all_gone.wait()
        tasks = [task for task in self.tasks if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in list(self.connections):
            connection.flush()
            connection.abort()
        if self._ticking is not None:
            self._ticking.cancel()
            await asyncio.gather(self._ticking, return_exceptions=True)
            self._ticking = None

    def peer_ports(self) -> set[int]:
        """Of those who are connected."""
        return {connection.port for connection in self.connections}

    # --- of connections ---------------------------------------------------------------------------------

    def admit(self, connection: GrpcProtocol) -> bool:
        if self._is_stopping or (self._admission and len(self.connections) >= self._admission.cut_off):
            return False
        self.connections[connection] = None
        return True

    def forget(self, connection: GrpcProtocol) -> None:
        self.connections.pop(connection, None)
        if not self.connections:
            self._all_gone.set()

    def find(self, path: str) -> ServerMethod | None:
        method = self._methods.get(path)
        if method is None and path not in self._methods:
            method = self._look(path)
            if method is not None or len(self._methods) < METHODS_UNKNOWN_MAX:
                self._methods[path] = method
        return method

    def _look(self, path: str) -> ServerMethod | None:
        for each in self._handlers:
            # The careful way of admission is for a server that receives a request before it asks. This one bounds what
            # it receives by itself.
            handler = each.handler if isinstance(each, Admitting) else each
            found = handler.service(_Details(path))
            if found is None:
                continue
            ours = handler if isinstance(handler, ServiceHandler) else None
            bound = ours.size_max_bytes.get(path) if ours is not None else None
            return ServerMethod(
                path,
                Handler(
                    _behaviour(found),
                    found.request_deserializer or _as_it_is,
                    found.response_serializer or _as_it_is,
                    bool(found.response_streaming),
                    ours is not None and not found.request_streaming,
                ),
                bool(found.request_streaming),
                bound or REQUEST_SIZE_MAX_BYTES,
                ours.too_large(path) if ours is not None else _too_large,
            )
        return None

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = loop.time()
            for connection in list(self.connections):
                try:
                    connection.tick(now)
                except Exception:
                    log.exception("a connection's limits of time failed")
                    connection.abort()


def _behaviour(found: Any) -> Any:
    if found.request_streaming:
        return found.stream_stream if found.response_streaming else found.stream_unary
    return found.unary_stream if found.response_streaming else found.unary_unary


def _too_large(size: int, limit: int) -> str:
    return f"a request of {size} bytes is over the limit of {limit}"


def _as_it_is(message: bytes) -> bytes:
    return message
