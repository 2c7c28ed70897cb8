"""Opening and closing clients' objects: at the same time, in vain, in any order. Nothing stays open at the broker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import pydanube
from pydanube.errors import DeliveryMismatch
from tests.harness.scripted import TOPIC, ScriptedBroker
from tests.support import run

pytestmark = pytest.mark.timeout(30)


def opened(client: pydanube.Client, kind: str) -> Any:
    return client.producer(TOPIC) if kind == "producer" else client.consumer(TOPIC, subscription="s")


OPENING = {"producer": "open_producer", "consumer": "subscribe"}


@pytest.mark.parametrize("kind", OPENING)
def test_calls_of_open_at_the_same_time_open_one_handle(kind: str) -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url, timeout=5) as client:
            it = opened(client, kind)
            assert await asyncio.gather(it.open(), it.open(), it.open()) == [it, it, it]
            await it.open()
            await it.close()
            assert broker.kinds().count(OPENING[kind]) == broker.kinds().count(f"close_{kind}") == 1

    run(inside())


@pytest.mark.parametrize("kind", OPENING)
def test_a_close_beside_an_open_leaves_nothing_open(kind: str) -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url, timeout=5) as client:
            it = opened(client, kind)
            opening = asyncio.create_task(it.open())
            await broker.until("lookup")  # it is on its way
            await it.close()
            assert opening.done()
            assert broker.kinds().count(OPENING[kind]) == broker.kinds().count(f"close_{kind}") == 1
            await it.open()  # and it can be opened again
            await asyncio.gather(it.close(), it.close())
            assert broker.kinds().count(OPENING[kind]) == broker.kinds().count(f"close_{kind}") == 2

    run(inside())


@pytest.mark.parametrize("kind", OPENING)
def test_an_open_that_is_given_up_does_not_keep_the_next_one_waiting(kind: str) -> None:
    async def inside() -> None:
        async with ScriptedBroker() as broker, pydanube.connect(broker.url, timeout=5) as client:
            answer = broker.answers.pop(OPENING[kind])
            it = opened(client, kind)
            first, second = asyncio.create_task(it.open()), asyncio.create_task(it.open())
            await broker.until(OPENING[kind])
            first.cancel()
            broker.answers[OPENING[kind]] = answer
            await second
            await it.close()
            assert broker.kinds().count(f"close_{kind}") == 1

    run(inside())


def test_a_publisher_that_meets_a_non_reliable_topic_keeps_no_handle() -> None:
    async def inside() -> None:
        async with ScriptedBroker(reliable=False) as broker, pydanube.connect(broker.url, timeout=5) as client:
            with pytest.raises(DeliveryMismatch):
                async with client.publisher(TOPIC, "p"):
                    pass
            [close] = await broker.until("close_producer")
            assert close.command.close_producer.producer == 1

    run(inside())
