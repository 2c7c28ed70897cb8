"""Clock and Work of the machine we run on."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pydanube.stores.work.threads import Threads
from pydanube.stores.work.worker_process import WorkerProcesses

T = TypeVar("T")

# Counts the time the machine was suspended. Where there is no such clock, the monotonic one has to do.
_ELAPSED_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

PROCESSES_MAX = 2  # most of their time they wait for the store


class SystemClock:
    def time_us(self) -> int:
        return time.time_ns() // 1000

    def elapsed(self) -> float:
        return time.clock_gettime(_ELAPSED_CLOCK)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class SystemWork:
    """Threads: the heavy functions (checksums, compression, Arrow) release the interpreter lock.

    A cancelled `run` ends when its function has ended.
    """

    def __init__(self, threads_max: int = min(32, (os.cpu_count() or 1) + 4)) -> None:
        self._threads = Threads("work", threads_max)
        self._workers = WorkerProcesses(PROCESSES_MAX)

    async def run(self, function: Callable[[], T]) -> T:
        return await self._threads.call(function)

    async def run_in_worker(self, function: Callable[[], T]) -> T:
        return await self._workers.call(function)

    async def await_in_worker(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await self._workers.call_once(function)

    def random_u64(self) -> int:
        return 1 + secrets.randbelow(2**63 - 1)

    def close(self) -> None:
        """Ends the threads and processes after what they are doing."""
        self._threads.close()
        self._workers.close()
