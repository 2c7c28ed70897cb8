"""One connection of our gRPC server: between asyncio's transport and the sans-I/O protocol, nothing decided here.

data_received ─► GrpcConnection.receive ─► a task per call (calling.py)
answers ─► flush_soon: what a turn of the loop answers goes out in one write
pause_writing ─► nothing more is taken from the queues, and nothing is read: a peer that does not read is not served
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import TYPE_CHECKING, Final, cast
from urllib.parse import quote

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.api.grpc.calling import CallContext, Handler
from pydanube.wire.grpc.calls import Called, CallEvent, CallRefused, MessageReceived, ServerCall
from pydanube.wire.grpc.server import GrpcServerConnection

if TYPE_CHECKING:
    from pydanube.api.grpc.server import GrpcServer

log = logging.getLogger(__name__)

CLOSING_SECONDS: Final = 5.0  # for the peer to take our last words
WRITE_BUFFER_BYTES: Final = 256 * 1024


class GrpcProtocol(asyncio.Protocol):
    def __init__(self, server: GrpcServer) -> None:
        self.loop = asyncio.get_running_loop()
        self.tasks = server.tasks
        self.peer = ""
        self.port = 0
        self.grpc = GrpcServerConnection(
            server.find, server.held, server.unsent, server.limits, self.loop.time(), self.flush_soon
        )
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._may_write = True
        self._is_flushing = False
        self._closing_at: float | None = None

    # --- of asyncio.Protocol ------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        place = transport.get_extra_info("peername")
        if isinstance(place, tuple) and len(place) > 1:
            self.port = int(place[1])
            host = str(place[0])
            self.peer = f"ipv6:{quote(f'[{host}]')}:{place[1]}" if ":" in host else f"ipv4:{host}:{place[1]}"
        secured: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if not self._server.admit(self) or (secured is not None and secured.selected_alpn_protocol() != "h2"):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.flush()

    def data_received(self, data: bytes) -> None:
        if self.grpc.end is None:
            self._handle(self.grpc.receive(data, self.loop.time()))
            self.flush()

    def eof_received(self) -> bool:
        return False  # the transport closes itself

    def connection_lost(self, error: Exception | None) -> None:
        self._handle(self.grpc.lose())
        self._transport = None
        self._server.forget(self)

    def pause_writing(self) -> None:
        self._may_write = False
        if self._transport is not None and self._closing_at is None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._may_write = True
        if self._transport is not None and self._closing_at is None:
            self._transport.resume_reading()
        self.flush()

    # --- calls --------------------------------------------------------------------------------------------

    def _handle(self, events: list[CallEvent]) -> None:
        for event in events:
            call = event.call
            if type(event) is Called:
                self._run(call, event.message)
            elif type(event) is CallRefused:
                self._refuse(call, event)
            elif call.shell is None:
                pass  # it ended meanwhile
            elif type(event) is MessageReceived:
                call.shell.received(event.message)
            else:
                call.shell.cancel()

    def _refuse(self, call: ServerCall, refused: CallRefused) -> None:
        handler: Handler | None = call.method.handler
        if call.shell is None and handler is not None and handler.takes_refusals:
            self._run(call, RpcRefusal(refused.code, refused.sentence))
            return
        self.grpc.finish(call, refused.code, refused.sentence)
        if call.shell is not None:
            call.shell.cancel()

    def _run(self, call: ServerCall, request: bytes | RpcRefusal | None) -> None:
        context = CallContext(self, call)
        call.attach(context)
        context.begin(request)

    # --- sending ------------------------------------------------------------------------------------------

    def flush_soon(self) -> None:
        if not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        self._is_flushing = False
        transport = self._transport
        if transport is None or not self._may_write or self._closing_at is not None:
            return
        data = self.grpc.data_to_send()
        if data:
            transport.write(data)
        for stream in self.grpc.take_roomy():
            if stream.call is not None and stream.call.shell is not None:
                stream.call.shell.wake()
        if (end := self.grpc.end) is not None:
            if end.code:
                log.info("connection ended", extra={"peer": self.peer, "code": end.code.name, "why": end.reason})
            self._closing_at = self.loop.time()
            transport.close()

    def tick(self, now: float) -> None:
        """About once a second."""
        if self._transport is None:
            return
        if self._closing_at is not None:
            if now - self._closing_at > CLOSING_SECONDS:
                self._transport.abort()
            return
        self._handle(self.grpc.tick(now))
        if self.grpc.end is not None and not self._may_write:
            self._transport.abort()  # it takes nothing, not even our last words
        else:
            self.flush()

    def leave(self) -> None:
        self.grpc.leave(self.loop.time())
        self.flush()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
