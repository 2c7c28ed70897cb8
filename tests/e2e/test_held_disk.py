"""Clients of a broker whose disk does not answer for a while, and how much memory that takes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest

import pydanube
from pydanube.client.producer import Producer
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
from tests.e2e.processes import BrokerProcess
from tests.stubs.danube import DanubeApi_pb2_grpc as rpc

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

MIB = 1 << 20
PRODUCERS = 100
SENDS = 1000
HELD_SECONDS = 15.0
GROWN_MAX_MIB = 2 * 64 + 64  # twice `storage.wal.pending_mb`, and 64


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


@asynccontextmanager
async def unary_producer(port: int, topic: str) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
    """A call that sends a message: True if it was stored, False if it was refused and may be tried again."""
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

        async def send() -> bool:
            try:
                await stub.SendMessage(message)
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
                return False
            return True

        yield send


@asynccontextmanager
async def native_producers(port: int, topic: str, count: int) -> AsyncIterator[list[Producer]]:
    """Each over a connection of its own. They are open before the disk is held: opening one writes to the log."""
    async with AsyncExitStack() as stack:
        url = f"danube://127.0.0.1:{port}"
        clients = [await stack.enter_async_context(pydanube.connect(url, timeout=200)) for _ in range(count)]
        yield [await stack.enter_async_context(client.producer(topic)) for client in clients]


@pytest.mark.parametrize("producers", [PRODUCERS, 0])
def test_all_that_is_sent_while_the_disk_does_not_answer_is_stored_or_may_be_sent_again_and_takes_bounded_memory(
    tmp_path: Path, producers: int
) -> None:
    async def main(broker: HeldBroker) -> float:
        held = tmp_path / "held"
        async with AsyncExitStack() as stack:
            client = await stack.enter_async_context(pydanube.connect(f"danube://127.0.0.1:{broker.stream_port}"))
            for topic in ("/default/native", "/default/unary"):
                async with client.producer(topic) as producer:
                    await producer.send(b"first")
            opened = await stack.enter_async_context(native_producers(broker.stream_port, "/default/native", producers))
            send = await stack.enter_async_context(unary_producer(broker.client_port, "/default/unary"))
            before = most = broker.memory_mib()
            held.touch()
            native = [producer.send_soon(bytes(MIB)) for producer in opened for _ in range(2)]
            unary = [asyncio.ensure_future(send()) for _ in range(SENDS)]
            until = time.monotonic() + HELD_SECONDS
            while time.monotonic() < until:
                await asyncio.sleep(0.1)
                most = max(most, broker.memory_mib())
            held.unlink()
            assert len(await asyncio.gather(*native)) == 2 * producers
            stored = sum(await asyncio.gather(*unary))
            assert stored < SENDS
            assert (await client.describe_topic("/default/native")).head == 2 * producers + 1
            assert (await client.describe_topic("/default/unary")).head == stored + 1
            return most - before

    with HeldBroker(tmp_path) as broker:
        grown = asyncio.run(main(broker))
    print(f"{grown:.0f} MiB more")
    assert grown < GROWN_MAX_MIB
