"""The tests of an application: each gets a broker of its own, in the test's process. No container, no mock, no port.

pytest examples/own_app
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from billing import bill_next

import pydanube
import pydanube.testing


@pytest.fixture
def url() -> Iterator[str]:
    with pydanube.testing.broker(memory=True) as broker:  # without `memory` it keeps a directory, and syncs it
        yield broker.url


def run(url: str, test: Callable[[pydanube.Client], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with pydanube.connect(url, timeout=10) as client:
            await test(client)

    asyncio.run(inside())


def test_an_order_is_billed_and_done(url: str) -> None:
    async def test(client: pydanube.Client) -> None:
        async with client.producer("/default/orders") as orders:
            await orders.send(b"ann 250")
        assert await bill_next(client) == "ann owes 2.50"
        table = await client.fetch("/default/bills").table()
        assert table.column("payload").to_pylist() == [b"ann owes 2.50"]
        assert (await client.lag("/default/orders", "billing")).messages == 0

    run(url, test)


def test_an_order_that_makes_no_sense_waits_and_is_not_billed(url: str) -> None:
    async def test(client: pydanube.Client) -> None:
        async with client.producer("/default/orders") as orders:
            await orders.send(b"bob free")
        assert await bill_next(client) == "refused: bob free"
        assert (await client.describe_topic("/default/bills")).head == 0
        assert (await client.lag("/default/orders", "billing")).messages == 1

    run(url, test)
