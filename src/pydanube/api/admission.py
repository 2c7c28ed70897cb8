"""Bounds how many large requests gRPC receives at the same time, before a byte of them is decoded.

gRPC reads a unary request as a whole before it calls the method, and as many side by side as come: a thousand of a
megabyte are a gigabyte that no limit counts. What it calls before is the handler's `service`, which says how a call is
to be answered. The first RECEIVING_MAX that are being received are answered as usual. Any beyond, and all while the log
is over its bound, get the same answer the careful way: as a stream of requests, whose only one is read when a place is
free, so that all but its beginning (`server.UNREAD_MAX_BYTES`) stays with the client until then. A request is not even
read if the broker would refuse it.

    service ─► the log takes more, and fewer than RECEIVING_MAX are being received ─► unary: received, decoded, answered
            └► otherwise ─► stream: waits for a place ─► busy? refused, unread
                                                      └► read, decoded, answered

Small requests have come with their headers, so hardly any of them goes the careful way, which costs a quarter more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Final

import grpc

from pydanube.errors import DeadlineExceeded
from pydanube.log.pressure import Pressure

RECEIVING_MAX: Final = 16
FORGOTTEN_SECONDS: Final = 10.0  # a call that was cancelled before its request had come
READING_SECONDS: Final = 60.0  # a request that does not come gives its place to another


class Intake:
    """Of one method, whose requests end up in the log that is under `pressure`."""

    def __init__(self, pressure: Pressure) -> None:
        self._pressure = pressure
        self._begun: deque[float] = deque()  # of calls that are being received the usual way
        self._places = asyncio.Semaphore(RECEIVING_MAX)

    def begins(self) -> bool:
        """Whether a call may be received the usual way. Then `received` follows, or it is forgotten after a while."""
        now = asyncio.get_running_loop().time()
        while self._begun and now - self._begun[0] > FORGOTTEN_SECONDS:
            self._begun.popleft()
        if self._pressure.refuses or len(self._begun) >= RECEIVING_MAX:
            return False
        self._begun.append(now)
        return True

    def received(self) -> None:
        if self._begun:
            self._begun.popleft()

    def carefully(
        self, answer: Callable[[Any, Any], Awaitable[Any]], refuse: Callable[[Exception, Any], Awaitable[Any]]
    ) -> Callable[[AsyncIterator[Any], Any], Awaitable[Any]]:
        """`answer`, for a request that is not read yet."""

        async def answer_when_read(requests: AsyncIterator[Any], context: Any) -> Any:
            async with self._places:
                if (busy := self._pressure.why_busy()) is not None:
                    return await refuse(busy, context)
                try:
                    async with asyncio.timeout(READING_SECONDS):
                        request = await anext(requests, None)
                except TimeoutError:
                    return await refuse(DeadlineExceeded("receiving the request", READING_SECONDS), context)
            if request is None:
                return await refuse(ValueError("the request is missing"), context)
            return await answer(request, context)

        return answer_when_read


class Admitting(grpc.GenericRpcHandler):  # type: ignore[misc]
    """Chooses the way for one method; all others are the handler's."""

    def __init__(self, handler: grpc.GenericRpcHandler, method: str, intake: Intake, careful: Any) -> None:
        self.handler = handler
        self._method = method
        self._admission = intake
        self._careful = careful

    def service(self, handler_call_details: Any) -> Any:
        if handler_call_details.method == self._method and not self._admission.begins():
            return self._careful
        return self.handler.service(handler_call_details)
