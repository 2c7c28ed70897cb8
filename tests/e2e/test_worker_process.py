"""A worker in a process of its own, with default settings, and a queue that lasts longer than the ack timeout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pydanube import blocking
from tests.e2e.processes import Process, broker_in, until

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]

TOPIC, SUBSCRIPTION = "/default/orders", "workers"
COUNT, HANDLER_SECONDS, ACK_TIMEOUT_MS = 500, 0.02, 3_000
WORKER = f"""
import asyncio
import sys

import pydanube


async def handle(message: pydanube.Message) -> None:
    await asyncio.sleep({HANDLER_SECONDS})
    print(message.payload.decode(), flush=True)


async def main() -> None:
    async with pydanube.connect(sys.argv[1]) as client:
        async with client.consumer("{TOPIC}", subscription="{SUBSCRIPTION}") as consumer:
            await consumer.run(handle, concurrency=1)


asyncio.run(main())
"""


def test_a_worker_with_a_queue_longer_than_the_ack_timeout_handles_each_message_once(tmp_path: Path) -> None:
    with broker_in(tmp_path) as broker, blocking.connect(f"danube://127.0.0.1:{broker.stream_port}") as client:
        with client.producer(TOPIC, reliable=True) as producer:
            with client.consumer(TOPIC, subscription=SUBSCRIPTION):
                pass  # the subscription begins here, before the first message
            for number in range(COUNT):
                producer.send_nowait(str(number).encode())
            producer.flush()
        policy = ("--ack-timeout-ms", ACK_TIMEOUT_MS)
        broker.admin("subscriptions", "set-failure-policy", TOPIC, SUBSCRIPTION, *policy)
        command = [sys.executable, "-c", WORKER, f"danube://127.0.0.1:{broker.stream_port}"]
        with Process(command, tmp_path / "worker.out") as worker:
            until(lambda: client.lag(TOPIC, SUBSCRIPTION).messages == 0, "all handled", seconds=90, say=worker.text)
            assert worker.stop() == 0, worker.text()
            assert worker.text().split() == [str(number) for number in range(COUNT)]
