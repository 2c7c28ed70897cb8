"""What every test folder may use."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(coroutine: Coroutine[object, object, T]) -> T:
    """Runs a test's coroutine on a fresh loop, in debug mode, and cancels what it leaves behind."""
    with asyncio.Runner(debug=True) as runner:
        return runner.run(coroutine)


async def settle(rounds: int = 20) -> None:
    """Lets every task that can go on do so, without time passing."""
    for _ in range(rounds):
        await asyncio.sleep(0)
