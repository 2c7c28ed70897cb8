"""A worker's loop: fetch, handle, acknowledge; and how it ends without losing what it has done.

receive ──► handler ──returns──► ack                stop(), SIGTERM, cancellation:
   ▲           └─────raises────► nack, with why         receive no more ─► handlers finish, for a grace ─► flush
   └── while fewer than `concurrency` run
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from pydanube.client.messages import Message
from pydanube.errors import ClientClosed, ConfigError, DanubeError

if TYPE_CHECKING:
    from pydanube.client.consumer import Consumer

log = logging.getLogger(__name__)

Handler: TypeAlias = Callable[[Message], Awaitable[object] | None]
REASON_SIZE_MAX: Final = 1024

# Who stops when the process is asked to end: every run of a loop, for which the first of them catches the signal.
_caught: Final[dict[asyncio.AbstractEventLoop, set[HandlerWork]]] = {}


class Handled(NamedTuple):
    """`given_up`: their handlers did not finish within the grace, or only when the consumer was closed."""

    acked: int = 0
    nacked: int = 0
    given_up: int = 0


class HandlerWork:
    """One `run` of a consumer."""

    def __init__(self, consumer: Consumer, handler: Handler, *, concurrency: int, grace_seconds: float) -> None:
        if concurrency < 1:
            raise ConfigError("concurrency", concurrency, "at least 1")
        if grace_seconds < 0:
            raise ConfigError("grace", grace_seconds, "seconds, at least 0")
        self.handled = Handled()
        self._consumer = consumer
        self._handler = handler
        self._concurrency = concurrency
        self._grace_seconds = grace_seconds
        self._running: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(concurrency)
        self._stopping: asyncio.Task[None] | None = None  # by a signal

    async def run(self, *, on_sigterm: bool) -> Handled:
        loop = asyncio.get_running_loop()
        catches = on_sigterm and self._catch_sigterm(loop)
        try:
            await self._fetch()
        finally:
            try:
                await self._finish()
            finally:
                if catches:
                    self._release_sigterm(loop)
        return self.handled

    def _catch_sigterm(self, loop: asyncio.AbstractEventLoop) -> bool:
        if loop not in _caught:
            if not _may_catch_sigterm():
                return False
            try:
                loop.add_signal_handler(signal.SIGTERM, _stop_all, loop)
            except NotImplementedError:
                return False
        _caught.setdefault(loop, set()).add(self)
        return True

    def _release_sigterm(self, loop: asyncio.AbstractEventLoop) -> None:
        _caught[loop].discard(self)
        if not _caught[loop]:
            del _caught[loop]
            loop.remove_signal_handler(signal.SIGTERM)

    def stop_soon(self) -> None:
        self._stopping = asyncio.create_task(self._consumer.stop())

    async def _fetch(self) -> None:
        messages = aiter(self._consumer)
        while True:
            await self._free.acquire()  # first: a message that is taken and waits here could not go to another consumer
            try:
                message = await anext(messages)
            except StopAsyncIteration:
                return
            except BaseException:
                self._free.release()
                raise
            task = asyncio.create_task(self._handle(message), name=f"handle {message.topic} {message.offset}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _handle(self, message: Message) -> None:
        try:
            doing = self._handler(message)
            if inspect.isawaitable(doing):
                await doing
        except asyncio.CancelledError:
            self.handled = self.handled._replace(given_up=self.handled.given_up + 1)
            raise
        except Exception as error:
            log.warning("handler failed", exc_info=error, extra={"topic": message.topic, "offset": message.offset})
            reason = f"{type(error).__name__}: {error}"[:REASON_SIZE_MAX]
            await self._answer(message, reason)
        else:
            await self._answer(message, None)
        finally:
            self._free.release()

    async def _answer(self, message: Message, reason: str | None) -> None:
        try:
            if reason is None:
                await message.ack()
                self.handled = self.handled._replace(acked=self.handled.acked + 1)
            else:
                await message.nack(reason=reason)
                self.handled = self.handled._replace(nacked=self.handled.nacked + 1)
        except ClientClosed:
            self.handled = self.handled._replace(given_up=self.handled.given_up + 1)

    async def _finish(self) -> None:
        """Also when cancelled: then a second cancellation ends it immediately."""
        await self._consumer.stop()
        if self._running:
            _, late = await asyncio.wait(self._running, timeout=self._grace_seconds)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        try:
            await self._consumer.flush(timeout=self._grace_seconds or None)
        except DanubeError as error:
            log.warning("answers did not arrive", extra={"topic": self._consumer.topic, "why": str(error)})


def _stop_all(loop: asyncio.AbstractEventLoop) -> None:
    for work in tuple(_caught[loop]):
        work.stop_soon()


def _may_catch_sigterm() -> bool:
    """Only where no other handler is installed, and where Python can."""
    in_main = threading.current_thread() is threading.main_thread()
    return in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@contextmanager
def stopped_by_sigterm(stop: Callable[[], None]) -> Iterator[None]:
    """Calls `stop` when the process is asked to end, unless another handler is installed. Without an event loop."""
    if not _may_catch_sigterm():
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: stop())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
