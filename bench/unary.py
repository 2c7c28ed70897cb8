"""The gRPC server, one unary call per message: `make bench-grpc`.

Broker and clients are processes of their own. The official client sends one message at a time; the raw client is
grpc.aio on the same contract, so that what the official client itself costs can be seen. An empty grpc.aio server
beside it is the limit of the library on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pydanube.testing.ports import free_ports

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from processes import broker, fdatasync_ms, wait_for_port

ROUNDS = 3


def quantiles(milliseconds: list[float]) -> dict[str, float]:
    milliseconds.sort()
    return {"p50": milliseconds[len(milliseconds) // 2], "p99": milliseconds[int(len(milliseconds) * 0.99)]}


# --- clients, each in its own process ---------------------------------------------------------------------


async def raw_publish(port: int, topic: str, window: int, count: int) -> None:
    import grpc

    from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
    from tests.stubs.danube import DanubeApi_pb2_grpc as rpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = rpc.ProducerServiceStub(channel)  # type: ignore[no-untyped-call]
        created = await stub.CreateProducer(
            pb.ProducerRequest(request_id=1, producer_name="bench", topic_name=topic, dispatch_strategy=pb.Reliable)
        )
        message = pb.StreamMessage(
            request_id=2,
            msg_id=pb.MsgID(producer_id=created.producer_id, topic_name=topic),
            payload=os.urandom(1024),
            publish_time=int(time.time() * 1000),
            producer_name="bench",
        )
        turns = iter(range(count))
        times: list[float] = []

        async def lane() -> None:
            for _ in turns:
                began = time.perf_counter()
                await stub.SendMessage(message)
                times.append((time.perf_counter() - began) * 1000)

        began = time.perf_counter()
        await asyncio.gather(*(lane() for _ in range(window)))
        rate = count / (time.perf_counter() - began)
    print(json.dumps({"rate": rate, **quantiles(times)}))


async def official_publish(port: int, topic: str, count: int) -> None:
    from danube import DanubeClientBuilder, DispatchStrategy

    client = await DanubeClientBuilder().service_url(f"http://127.0.0.1:{port}").build()
    builder = client.new_producer().with_topic(topic).with_name("official")
    producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
    await producer.create()
    payload = os.urandom(1024)
    times = []
    began = time.perf_counter()
    for _ in range(count):
        start = time.perf_counter()
        await producer.send(payload)
        times.append((time.perf_counter() - start) * 1000)
    print(json.dumps({"rate": count / (time.perf_counter() - began), **quantiles(times)}), flush=True)
    os._exit(0)  # its health loops never end


async def official_round_trip(port: int, topic: str, count: int) -> None:
    """Publish to deliver, at 100 messages a second, through the official client both ways."""
    from danube import DanubeClientBuilder, DispatchStrategy, SubType

    client = await DanubeClientBuilder().service_url(f"http://127.0.0.1:{port}").build()
    builder = client.new_producer().with_topic(topic).with_name("official")
    producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
    await producer.create()
    consuming = client.new_consumer().with_topic(topic).with_consumer_name("c").with_subscription("bench")
    consumer = consuming.with_subscription_type(SubType.EXCLUSIVE).build()
    await consumer.subscribe()
    queue = await consumer.receive()
    times: list[float] = []

    async def receive() -> None:
        while len(times) < count:
            message = await queue.get()
            times.append((time.perf_counter() - float(message.payload)) * 1000)
            await consumer.ack(message)

    receiving = asyncio.create_task(receive())
    for _ in range(count):
        await producer.send(repr(time.perf_counter()).encode())
        await asyncio.sleep(0.01)
    await asyncio.wait_for(receiving, 60)
    print(json.dumps(quantiles(times)), flush=True)
    os._exit(0)


async def echo(port: int) -> None:
    """An empty server: what grpc.aio itself costs."""
    import grpc

    from pydanube.wire._pb.danube import DanubeApi_pb2 as pb
    from tests.stubs.danube import DanubeApi_pb2_grpc as rpc

    class Echo(rpc.ProducerServiceServicer):
        async def CreateProducer(self, request: pb.ProducerRequest, context: object) -> pb.ProducerResponse:
            return pb.ProducerResponse(request_id=request.request_id, producer_id=1)

        async def SendMessage(self, request: pb.StreamMessage, context: object) -> pb.MessageResponse:
            return pb.MessageResponse(request_id=request.request_id)

    server = grpc.aio.server()
    rpc.add_ProducerServiceServicer_to_server(Echo(), server)  # type: ignore[no-untyped-call]
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await server.wait_for_termination()


def child(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


# --- the table -------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--raw", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--official", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--round-trip", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--echo", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.raw:
        port, topic, window, count = options.raw
        asyncio.run(raw_publish(int(port), topic, int(window), int(count)))
    elif options.official:
        asyncio.run(official_publish(int(options.official[0]), options.official[1], int(options.official[2])))
    elif options.round_trip:
        port, topic, count = options.round_trip
        asyncio.run(official_round_trip(int(port), topic, int(count)))
    elif options.echo:
        asyncio.run(echo(options.echo))
    else:
        measure()


def measure() -> None:
    scratch = Path(__file__).parent.parent / "build" / "bench"
    scratch.mkdir(parents=True, exist_ok=True)
    table = Table(title="Unary gRPC, 1 KiB messages, reliable topic", box=None, header_style="bold")
    for name in ("what", "messages/s", "p50 ms", "p99 ms", "broker CPU µs/message", "of an empty server"):
        table.add_column(name, justify="left" if name == "what" else "right", no_wrap=True)
    (echo_port,) = free_ports(1)
    with broker(scratch) as server, subprocess.Popen([sys.executable, __file__, "--echo", str(echo_port)]) as empty:
        try:
            wait_for_port(echo_port)
            for window, count in ((1, 600), (64, 6000)):
                limits, results, cpu = [], [], []
                for turn in range(ROUNDS):
                    limits.append(child("--raw", echo_port, "/default/echo", window, count))
                    before = server.cpu_seconds
                    results.append(child("--raw", server.client, f"/default/w{window}-{turn}", window, count))
                    cpu.append((server.cpu_seconds - before) / count * 1e6)
                rate = statistics.median(each["rate"] for each in results)
                limit = statistics.median(each["rate"] for each in limits)
                table.add_row(
                    f"publish, {window} in flight",
                    f"{rate:,.0f}",
                    f"{statistics.median(each['p50'] for each in results):.2f}",
                    f"{statistics.median(each['p99'] for each in results):.2f}",
                    f"{statistics.median(cpu):.0f}",
                    f"{100 * rate / limit:.0f} % of {limit:,.0f}",
                )
            official = [child("--official", server.client, f"/default/o{turn}", 600) for turn in range(ROUNDS)]
            table.add_row(
                "publish, official client",
                f"{statistics.median(each['rate'] for each in official):,.0f}",
                f"{statistics.median(each['p50'] for each in official):.2f}",
                f"{statistics.median(each['p99'] for each in official):.2f}",
                "",
                "",
            )
            trips = [child("--round-trip", server.client, f"/default/r{turn}", 300) for turn in range(ROUNDS)]
            table.add_row(
                "publish to deliver, official client, 100/s",
                "",
                f"{statistics.median(each['p50'] for each in trips):.2f}",
                f"{statistics.median(each['p99'] for each in trips):.2f}",
                "",
                "",
            )
            p50, p99 = fdatasync_ms(scratch)
            table.add_row("the disk: 4 KiB write + fdatasync", "", f"{p50:.2f}", f"{p99:.2f}", "", "")
            table.add_row(f"broker memory afterwards: {server.rss_mb:.0f} MB", "", "", "", "", "")
        finally:
            empty.kill()
    Console(width=140).print(table)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}"
    )


if __name__ == "__main__":
    main()
