"""Records what the official Python client sends to a broker: `python -m tests.harness.grpc_recorder`.

One file per connection, in tests/fixtures/transcripts: the bytes as they came, without the times. The client is a
process of its own, because it brings the same messages as the broker.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

PLACE = Path(__file__).parents[1] / "fixtures" / "transcripts"


async def client(address: str) -> None:
    from danube import DanubeClientBuilder, DispatchStrategy, SubType

    client = await DanubeClientBuilder().service_url(f"http://{address}").build()
    builder = client.new_producer().with_topic("/default/orders").with_name("p")
    producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
    await producer.create()
    consuming = client.new_consumer().with_topic("/default/orders").with_consumer_name("c")
    consumer = consuming.with_subscription("s").with_subscription_type(SubType.SHARED).build()
    await consumer.subscribe()
    queue = await consumer.receive()
    for number in range(5):
        await producer.send(f"message {number}".encode(), {"number": str(number)})
    await producer.send(bytes(100_000))
    for _ in range(6):
        await consumer.ack(await queue.get())
    os._exit(0)


async def record() -> None:
    from pydanube.api.grpc.connection import GrpcProtocol
    from tests.harness.servers import serving

    heard: dict[Any, bytearray] = {}
    received = GrpcProtocol.data_received

    def noted(self: GrpcProtocol, data: bytes) -> None:
        heard.setdefault(self, bytearray()).extend(data)
        received(self, data)

    GrpcProtocol.data_received = noted  # type: ignore[method-assign]
    async with serving() as calls:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tests.harness.grpc_recorder", calls.servers.client_addr
        )
        assert await asyncio.wait_for(process.wait(), 60) == 0
    for number, data in enumerate(heard.values()):
        (PLACE / f"grpc-python-{number}.bin").write_bytes(data)


if __name__ == "__main__":
    asyncio.run(client(sys.argv[1]) if len(sys.argv) > 1 else record())
