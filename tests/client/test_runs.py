"""What `Consumer.run` does where a program has more than one worker, or ends it in an unusual way."""

from __future__ import annotations

import asyncio
import logging
import signal

import pytest

import pydanube
import pydanube.testing
from pydanube.client.messages import Message
from pydanube.client.working import Handled
from pydanube.errors import ClientClosed, NeverOpened
from tests.client.test_workers import SUB, TOPIC, fill
from tests.harness.wired import Wires, wired


def test_sigterm_ends_every_run_of_the_program() -> None:
    async def main() -> None:
        async with pydanube.testing.broker(memory=True) as broker, pydanube.connect(broker.url) as client:
            await fill(client, 20)
            begun: list[int] = []

            async def handle(message: Message) -> None:
                begun.append(message.offset)
                if len(begun) == 4:
                    signal.raise_signal(signal.SIGTERM)
                await asyncio.sleep(0.05)

            async def work(subscription: str) -> Handled:
                async with client.consumer(TOPIC, subscription=subscription, start="earliest") as consumer:
                    return await consumer.run(handle, concurrency=2)

            async with asyncio.timeout(20):
                runs = await asyncio.gather(work("one"), work("two"))
            assert sum(run.acked for run in runs) == len(begun) < 40 and all(run.acked for run in runs)
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    asyncio.run(main())


@wired
async def test_a_plain_function_is_a_handler_too(wires: Wires) -> None:
    """Its work is done once it has returned: a nack would have it done again."""
    async with wires.connect() as client:
        await fill(client, 5)
        seen: list[tuple[int, int]] = []

        async with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:

            def handle(message: Message) -> None:
                seen.append((message.offset, message.attempt))
                if message.offset == 3 and message.attempt == 1:
                    raise ValueError("not now")
                if len(seen) == 6:
                    stopping.append(asyncio.create_task(consumer.stop()))

            stopping: list[asyncio.Task[None]] = []
            assert await consumer.run(handle) == Handled(acked=5, nacked=1)
        assert sorted(seen) == [(0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (4, 1)]


@wired
async def test_a_run_of_a_consumer_that_was_never_opened_says_only_that(
    wires: Wires, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(message: Message) -> None: ...

    async with wires.connect() as client:
        await fill(client, 1)
        with caplog.at_level(logging.WARNING), pytest.raises(NeverOpened):
            await client.consumer(TOPIC, subscription=SUB).run(handle)
        assert caplog.records == []


@wired
async def test_a_stopped_consumer_says_that_it_was_stopped_and_so_does_its_subscription(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 5)
        async with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:
            await (await consumer.receive()).ack()
            await consumer.stop()
            with pytest.raises(ClientClosed, match="was stopped"):
                await consumer.receive()
            await asyncio.sleep(1)
            sentence = (await client.lag(TOPIC, SUB)).sentence
            assert sentence.startswith("no consumer asks for messages; 4 messages behind"), sentence


@wired
async def test_leaving_the_block_of_a_stopped_consumer_waits_as_long_as_closing_it_does(wires: Wires) -> None:
    async with wires.connect() as client:
        await fill(client, 1)
        before = asyncio.get_running_loop().time()
        async with client.consumer(TOPIC, subscription=SUB, start="earliest") as consumer:
            await consumer.receive()  # and no answer
            await consumer.stop()
        assert 9.9 <= asyncio.get_running_loop().time() - before < 12
