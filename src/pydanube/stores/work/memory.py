"""Work done synchronously, and ids from a seed."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from random import Random

T = TypeVar("T")


class MemoryWork:
    """Calls functions inline: there is no other thread to race with, so every run is the same run."""

    def __init__(self, random: Random) -> None:
        self._random = random

    async def run(self, function: Callable[[], T]) -> T:
        return function()

    async def run_in_worker(self, function: Callable[[], T]) -> T:
        return function()

    async def await_in_worker(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        return await function()

    def random_u64(self) -> int:
        return self._random.randrange(1, 2**63)
