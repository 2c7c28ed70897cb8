"""An event loop in a thread of its own: for the blocking client, and for brokers of tests without async."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
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
        self._is_stopped = False
        self._stopping = threading.RLock()  # held to hand a coroutine to the loop, so that it is not stopped in between
        self._process = os.getpid()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs it on the loop; returns or raises what it does. Interrupting the wait cancels it."""
        try:
            self._check()  # first: in a forked process the lock might never be released
            with self._stopping:
                self._check()
                if self._calls:  # a thread that is about to schedule them may come too late
                    self._loop.call_soon_threadsafe(self._run_calls)
                future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except ClientClosed:
            coroutine.close()
            raise
        try:
            return future.result()
        except CancelledError:
            raise ClientClosed("the client") from None
        except BaseException:
            future.cancel()
            raise

    def soon(self, function: Callable[..., None], *arguments: Any) -> None:
        """Calls it on the loop, in order, before anything that is given to `call` later. Many cost one wake-up."""
        self._check()
        self._calls.append((function, arguments))
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._loop.call_soon_threadsafe(self._run_calls)
            except RuntimeError:
                raise ClientClosed("the client") from None

    def stop(self) -> None:
        if os.getpid() == self._process:
            with self._stopping:
                if not self._is_stopped:
                    self._is_stopped = True
                    self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(SETTLE_SECONDS)

    def _run_calls(self) -> None:
        self._is_scheduled = False  # first: a call that is added from now on wakes the loop again
        while self._calls:
            function, arguments = self._calls.popleft()
            try:
                function(*arguments)
            except Exception as error:  # those behind it have done nothing wrong
                self._loop.call_exception_handler({"message": f"{function} failed", "exception": error})

    def _check(self) -> None:
        if os.getpid() != self._process:
            raise ClientClosed("in a forked process, the client of its parent")  # whose thread did not come along
        if self._is_stopped:
            raise ClientClosed("the client")

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            try:
                self._loop.run_forever()
            finally:
                with self._stopping:
                    self._is_stopped = True
                self._loop.run_until_complete(_cancel_all())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


async def _cancel_all() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where there is one."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
