"""Clients of a broker whose disk does not answer for a while; how much memory that takes is printed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

import pydanube
from pydanube.client.producer import Producer
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from pydanube.wire._pb.danube import DanubeApi_pb2_grpc as rpc
from tests.e2e.processes import BrokerProcess

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

MIB = 1 << 20
PRODUCERS = 100
SENDS = 1000
HELD_SECONDS = 15.0


class HeldBroker(BrokerProcess):
    @property
    def command(self) -> list[str]:
        command = super().command
        place = command.index("-m")
        return [*command[:place], str(Path(__file__).parent / "clients" / "held_broker.py"), *command[place + 2 :]]

    def memory_mib(self) -> float:
        assert self.process is not None
        fields = Path(f"/proc/{self.process.pid}/status").read_text().split("\n")
        return int(next(line for line in fields if line.startswith("VmRSS")).split()[1]) / 1024


async def unary_sends(port: int, topic: str) -> tuple[int, int]:
    """Of all that are made at once: how many were stored, and refused so that they may be tried again."""
    stored, refused = 0, 0
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = rpc.ProducerServiceStub(channel)  # type: ignore[no-untyped-call]
        request = pb.ProducerRequest(request_id=1, producer_name="u", topic_name=topic, dispatch_strategy=pb.Reliable)
        created = await stub.CreateProducer(request)
        message = pb.StreamMessage(
            request_id=2,
            msg_id=pb.MsgID(producer_id=created.producer_id, topic_name=topic),
            payload=bytes(MIB),
            publish_time=int(time.time() * 1000),
            producer_name="u",
        )

        async def send() -> None:
            nonlocal stored, refused
            try:
                await stub.SendMessage(message)
                stored += 1
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
                refused += 1

        await asyncio.gather(*(send() for _ in range(SENDS)))
    return stored, refused


@asynccontextmanager
async def native_producers(port: int, topic: str) -> AsyncIterator[list[Producer]]:
    """Each over a connection of its own. They are open before the disk is held: opening one writes to the log."""
    async with AsyncExitStack() as stack:
        url = f"danube://127.0.0.1:{port}"
        clients = [await stack.enter_async_context(pydanube.connect(url, timeout=200)) for _ in range(PRODUCERS)]
        yield [await stack.enter_async_context(client.producer(topic)) for client in clients]


def test_all_that_is_sent_while_the_disk_does_not_answer_is_stored_or_may_be_sent_again(tmp_path: Path) -> None:
    async def main(broker: HeldBroker) -> float:
        held = tmp_path / "held"
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(pydanube.connect(f"danube://127.0.0.1:{broker.stream_port}"))
            for topic in ("/default/native", "/default/unary"):
                async with client.producer(topic) as producer:
                    await producer.send(b"first")
            producers = await stack.enter_async_context(native_producers(broker.stream_port, "/default/native"))
            before = most = broker.memory_mib()
            held.touch()
            native = [producer.send_soon(bytes(MIB)) for producer in producers for _ in range(2)]
            unary = asyncio.create_task(unary_sends(broker.client_port, "/default/unary"))
            until = time.monotonic() + HELD_SECONDS
            while time.monotonic() < until:
                await asyncio.sleep(0.1)
                most = max(most, broker.memory_mib())
            held.unlink()
            assert len(await asyncio.gather(*native)) == 2 * PRODUCERS
            stored, refused = await unary
            assert stored + refused == SENDS and refused > 0
            assert (await client.describe_topic("/default/native")).head == 2 * PRODUCERS + 1
            assert (await client.describe_topic("/default/unary")).head == stored + 1
            return most - before

    with HeldBroker(tmp_path) as broker:
        grown = asyncio.run(main(broker))
    print(f"{grown:.0f} MiB more")
