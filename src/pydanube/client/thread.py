"""An event loop in a thread of its own: for the blocking client, and for brokers of tests without async."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from pydanube.errors import ClientClosed

T = TypeVar("T")

SETTLE_SECONDS: Final = 5.0


class LoopThread:
    """An event loop in a thread of its own."""

    def __init__(self, name: str) -> None:
        self._loop = _new_loop()
        self._calls: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._is_scheduled = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it on the loop; returns or raises what it does. Interrupting the wait cancels it."""
        if not self._thread.is_alive() or self._loop.is_closed():
            coroutine.close()
            raise ClientClosed("the client")
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls it on the loop, in order, before anything that is given to `call` later. Many cost one wake-up."""
        self._calls.append((function, arguments))
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._run_calls)
            except RuntimeError:
                raise ClientClosed("the client") from None

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(SETTLE_SECONDS)

    def _run_calls(self) -> None:
        self._is_scheduled = False  # first: whoever adds from now on wakes us again
        while self._calls:
            function, arguments = self._calls.popleft()
            function(*arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
