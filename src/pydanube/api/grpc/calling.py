"""One call on our gRPC server: the handler's coroutine, in a task, and the context that it is given.

Handlers are those of `grpc.aio`: functions of a request (or an async iterator of requests) and a context. `CallContext`
has what they use of `grpc.aio.ServicerContext`. A client that leaves cancels the task; an abort, or an exception,
becomes the status.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from inspect import isasyncgen
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import grpc

from pydanube.api.grpc.adapter import RpcRefusal
from pydanube.wire.grpc.calls import ServerCall
from pydanube.wire.grpc.headers import Metadata
from pydanube.wire.status import Code, cut

if TYPE_CHECKING:
    from pydanube.api.grpc.connection import GrpcProtocol

log = logging.getLogger(__name__)

TrailingMetadata = Iterable[tuple[str, str | bytes]]


class Handler(NamedTuple):
    """Of one method, whatever it was registered with. `takes_refusals`: a refusal may be given to it as the request."""

    behaviour: Callable[[Any, Any], Any]
    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]
    streams_answers: bool
    takes_refusals: bool


class Aborted(Exception):
    """What `CallContext.abort` raises: the call ends with this status."""

    def __init__(self, code: Code, sentence: str, metadata: TrailingMetadata) -> None:
        super().__init__(code, sentence)
        self.code = code
        self.sentence = sentence
        self.metadata = metadata


class CallContext:
    """A handler's view of its call."""

    __slots__ = (
        "_call",
        "_code",
        "_deadline",
        "_done_callbacks",
        "_has_begun",
        "_protocol",
        "_requests",
        "_sentence",
        "_timer",
        "_trailing",
        "_waiter",
        "is_over",
        "task",
    )

    def __init__(self, protocol: GrpcProtocol, call: ServerCall) -> None:
        self._protocol = protocol
        self._call = call
        self._waiter: asyncio.Future[None] | None = None  # for room to write, or for a request
        # Of a stream of requests; None in it: there are no more.
        self._requests: deque[bytes | None] | None = deque() if call.method.streams_requests else None
        self._code, self._sentence = Code.OK, ""
        self._trailing: TrailingMetadata = ()
        self._done_callbacks: list[Callable[[Any], None]] = []
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[None] | None = None
        self._has_begun = False
        self.is_over = False  # nothing can be said to the client any more
        timeout = call.headers.timeout
        if timeout is not None:
            self._deadline = protocol.loop.time() + timeout
            self._timer = protocol.loop.call_at(self._deadline, self._expire)

    # --- of grpc.aio.ServicerContext ------------------------------------------------------------------------

    def peer(self) -> str:
        return self._protocol.peer

    def invocation_metadata(self) -> Metadata:
        return self._call.headers.metadata

    def time_remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - self._protocol.loop.time())

    async def send_initial_metadata(self, metadata: TrailingMetadata) -> None:
        self._protocol.grpc.start(self._call, tuple(metadata))
        self._protocol.flush_soon()

    async def write(self, message: Any) -> None:
        """Waits for the client only if it has not taken what was written before."""
        call = self._call
        await self._room()
        self._protocol.grpc.write(call, call.method.handler.write(message))
        self._protocol.flush_soon()

    async def _room(self) -> None:
        while not self._protocol.grpc.has_room(self._call):
            self._protocol.flush_soon()
            await self._wait()

    async def read(self) -> Any:
        """The next request of a stream of them, or grpc.aio.EOF."""
        requests = self._requests
        assert requests is not None
        while not requests:
            await self._wait()
        message = requests[0]
        if message is None:
            return grpc.aio.EOF
        requests.popleft()
        if not requests:
            self._protocol.grpc.done_with(self._call)
            self._protocol.flush_soon()
        return self._call.method.handler.read(message)

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: TrailingMetadata = ()
    ) -> NoReturn:
        raise Aborted(Code(code.value[0]), details, trailing_metadata)

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = Code(code.value[0])

    def set_details(self, details: str) -> None:
        self._sentence = details

    def set_trailing_metadata(self, metadata: TrailingMetadata) -> None:
        self._trailing = tuple(metadata)

    def code(self) -> int:
        return int(self._code)

    def details(self) -> str:
        return self._sentence

    def cancelled(self) -> bool:
        return self.is_over and self.task is not None and not self.task.done()

    def done(self) -> bool:
        return self.is_over

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._done_callbacks.append(callback)

    # --- of the connection --------------------------------------------------------------------------------

    async def _iterate(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def received(self, message: bytes | None) -> None:
        if self._requests is not None:
            self._requests.append(message)
            self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def cancel(self) -> None:
        """The client has left."""
        self.is_over = True
        if self.task is not None:
            self.task.cancel()
            if not self._has_begun:
                self._clean()  # a task that is cancelled before its first step runs nothing, not even a finally

    def finish(self, code: Code, sentence: str, metadata: TrailingMetadata = ()) -> None:
        self._protocol.grpc.finish(self._call, code, cut(sentence), metadata)
        self._protocol.flush_soon()

    def _expire(self) -> None:
        self.finish(Code.DEADLINE_EXCEEDED, "the call's deadline has passed")
        self.cancel()

    async def _wait(self) -> None:
        self._waiter = self._protocol.loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def begin(self, request: bytes | RpcRefusal | None) -> None:
        """Calls the handler, in a task, with a request or with the stream of them (None)."""
        task = self.task = self._protocol.loop.create_task(self._run(request))
        self._protocol.tasks.add(task)

    async def _run(self, raw: bytes | RpcRefusal | None) -> None:
        self._has_begun = True
        handler: Handler = self._call.method.handler
        protocol = self._protocol
        try:
            request: Any = raw
            if raw is None:
                request = self._iterate()
            elif isinstance(raw, bytes):
                request = handler.read(raw)
            if handler.streams_answers:
                protocol.grpc.begin_answers(self._call)
                await self._stream(handler, request)
                protocol.grpc.start(self._call)
                self.finish(self._code, self._sentence, self._trailing)
            else:
                await self._room()  # else what a client does not take would grow with each of its calls
                answer = await handler.behaviour(request, self)
                if self._code is Code.OK and not self._trailing:
                    protocol.grpc.answer(self._call, handler.write(answer))
                    protocol.flush_soon()
                else:
                    if self._code is Code.OK:
                        protocol.grpc.write(self._call, handler.write(answer))
                    self.finish(self._code, self._sentence, self._trailing)
        except Aborted as aborted:
            self.finish(aborted.code, aborted.sentence, aborted.metadata)
        except asyncio.CancelledError:
            if not self.is_over:
                self.finish(Code.UNAVAILABLE, "the broker is shutting down")
        except Exception as error:
            log.exception("call failed", extra={"call": self._call.method.path, "error": type(error).__name__})
            self.finish(Code.UNKNOWN, "the broker failed; its log says how")
        finally:
            self._clean()

    def _clean(self) -> None:
        """Cuts every reference to the call and from it."""
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._call.attach(None)
        self._protocol.tasks.discard(self.task)
        self.task = None
        for callback in self._done_callbacks:
            callback(self)

    async def _stream(self, handler: Handler, request: Any) -> None:
        answers = handler.behaviour(request, self)
        if isasyncgen(answers):
            async for message in answers:
                await self.write(message)
        else:
            await answers
