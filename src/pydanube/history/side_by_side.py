"""Runs things concurrently, up to a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any


async def gather_bounded(work: Sequence[Any], limit: int = 32) -> list[Any]:
    """Awaits coroutine functions, a few at a time; returns results or the exceptions they raised."""
    gate = asyncio.Semaphore(limit)

    async def one(function: Any) -> Any:
        async with gate:
            return await function()

    return await asyncio.gather(*(one(function) for function in work), return_exceptions=True)
