"""Our gRPC server beside grpcio's, in alternating rounds: `make bench-grpc`.

An empty server of each kind, and a broker with each (`broker.grpc_server`), are processes of their own; so are the
clients. The rate says what this machine does with client and server on the same cores; CPU of the server per call says
what the server costs, and depends on nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from processes import broker, wait_for_port
from unary import quantiles, raw_publish

from pydanube.testing.ports import free_ports

KINDS = ("grpcio", "own")
TICKS = os.sysconf("SC_CLK_TCK")


# --- processes --------------------------------------------------------------------------------------------


async def empty(kind: str, port: int) -> None:
    import grpc

    from pydanube.api.grpc.server import GrpcServer
    from pydanube.wire._pb.danube import DanubeApi_pb2 as pb

    async def create(request: Any, context: object) -> Any:
        return pb.ProducerResponse(request_id=request.request_id, producer_id=1)

    async def send(request: Any, context: object) -> Any:
        return pb.MessageResponse(request_id=request.request_id)

    def method(behaviour: Any, kind: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(
            behaviour, request_deserializer=kind.FromString, response_serializer=lambda each: each.SerializeToString()
        )

    methods = {"CreateProducer": method(create, pb.ProducerRequest), "SendMessage": method(send, pb.StreamMessage)}
    handler = grpc.method_handlers_generic_handler("danube.ProducerService", methods)
    server: Any = GrpcServer() if kind == "own" else grpc.aio.server()
    server.add_generic_rpc_handlers((handler,))
    if kind == "own":
        await server.listen("127.0.0.1", port)
    else:
        server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    await asyncio.Event().wait()


async def official(port: int, topic: str, window: int, count: int) -> None:
    """The official Python client, `window` sends at a time."""
    from danube import DanubeClientBuilder, DispatchStrategy

    client = await DanubeClientBuilder().service_url(f"http://127.0.0.1:{port}").build()
    builder = client.new_producer().with_topic(topic).with_name("official")
    producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
    await producer.create()
    payload = os.urandom(1024)
    times: list[float] = []
    turns = iter(range(count))

    async def lane() -> None:
        for _ in turns:
            start = time.perf_counter()
            await producer.send(payload)
            times.append((time.perf_counter() - start) * 1000)

    began = time.perf_counter()
    await asyncio.gather(*(lane() for _ in range(window)))
    print(json.dumps({"rate": count / (time.perf_counter() - began), **quantiles(times)}), flush=True)
    os._exit(0)  # its health loops never end


async def consume(port: int, topic: str, count: int) -> None:
    """Consumes and acknowledges one by one what is there already."""
    from danube import DanubeClientBuilder, DispatchStrategy, SubType

    client = await DanubeClientBuilder().service_url(f"http://127.0.0.1:{port}").build()
    builder = client.new_producer().with_topic(topic).with_name("official")
    producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
    await producer.create()
    consuming = client.new_consumer().with_topic(topic).with_consumer_name("c").with_subscription("bench")
    consumer = consuming.with_subscription_type(SubType.EXCLUSIVE).build()
    await consumer.subscribe()
    turns = iter(range(count))

    async def lane() -> None:
        for _ in turns:
            await producer.send(bytes(1024))

    await asyncio.gather(*(lane() for _ in range(64)))
    print("ready", flush=True)
    sys.stdin.readline()
    queue = await consumer.receive()
    began = time.perf_counter()
    for _ in range(count):
        await consumer.ack(await queue.get())
    print(json.dumps({"rate": count / (time.perf_counter() - began), "p50": 0, "p99": 0}), flush=True)
    os._exit(0)


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def child(*arguments: object) -> dict[str, float]:
    command = [sys.executable, __file__, *map(str, arguments)]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True, timeout=300
    )
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def consumed(pid: int, *arguments: object) -> dict[str, float]:
    """As `child`, with the broker's CPU from when everything is published."""
    command = [sys.executable, __file__, *map(str, arguments)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()
        before = cpu_seconds(pid)
        process.stdin.write("\n")
        process.stdin.flush()
        result: dict[str, float] = json.loads(process.stdout.readline())
        return {**result, "cpu": cpu_seconds(pid) - before}


# --- the table -------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--empty", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--raw", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--official", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--consume", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--calls", type=int, default=4000, help="calls of one round with 64 in flight")
    options = parser.parse_args()
    if options.empty:
        import uvloop

        uvloop.run(empty(options.empty[0], int(options.empty[1])))
    elif options.raw:
        port, topic, window, count = options.raw
        asyncio.run(raw_publish(int(port), topic, int(window), int(count)))
    elif options.official:
        port, topic, window, count = options.official
        asyncio.run(official(int(port), topic, int(window), int(count)))
    elif options.consume:
        port, topic, count = options.consume
        asyncio.run(consume(int(port), topic, int(count)))
    else:
        measure(options.rounds, options.calls)


def measure(rounds: int, calls: int) -> None:
    scratch = Path(__file__).parent.parent / "build" / "bench"
    found: dict[tuple[str, str], list[dict[str, float]]] = defaultdict(list)
    ports = dict(zip(KINDS, free_ports(2), strict=True))
    empties = {kind: subprocess.Popen([sys.executable, __file__, "--empty", kind, str(ports[kind])]) for kind in KINDS}
    try:
        for kind in KINDS:
            wait_for_port(ports[kind])
        for _ in range(rounds):
            for window, count in ((1, calls // 8), (64, calls)):
                for kind in KINDS:
                    before = cpu_seconds(empties[kind].pid)
                    result = child("--raw", ports[kind], "/default/x", window, count)
                    used = (cpu_seconds(empties[kind].pid) - before) / count
                    found[f"empty server, unary, {window} in flight", kind].append({**result, "cpu": used})
            for kind in KINDS:
                result = child("--official", ports[kind], "/default/x", 64, calls)
                found["empty server, official Python client, 64 in flight", kind].append({**result, "cpu": 0})
    finally:
        for process in empties.values():
            process.kill()
    for turn in range(rounds):
        for kind in KINDS:
            place = scratch / f"grpc-{kind}-{turn}"
            place.mkdir(parents=True, exist_ok=True)
            file = place / "broker.yml"
            file.write_text(f"broker: {{grpc_server: {kind}}}")
            with broker(place, "--config-file", str(file)) as server:
                for window, count in ((1, calls // 8), (64, calls)):
                    before = server.cpu_seconds
                    result = child("--raw", server.client, f"/default/w{window}", window, count)
                    used = (server.cpu_seconds - before) / count
                    found[f"broker, publish 1 KiB, {window} in flight", kind].append({**result, "cpu": used})
                before = server.cpu_seconds
                result = child("--official", server.client, "/default/o", 64, calls)
                used = (server.cpu_seconds - before) / calls
                found["broker, official Python client, 64 in flight", kind].append({**result, "cpu": used})
                count = calls // 2
                result = consumed(server.pid, "--consume", server.client, "/default/c", count)
                name = "broker, official Python client, consume and acknowledge"
                found[name, kind].append({**result, "cpu": result["cpu"] / count})
    table = Table(box=None, header_style="bold")
    for name in ("what", "server", "calls/s", "p50 ms", "p99 ms", "CPU µs/call", "all rounds"):
        table.add_column(name, justify="left" if name in ("what", "server") else "right")
    for what in dict.fromkeys(what for what, _ in found):
        for kind in KINDS:
            each = found[what, kind]
            median = {key: statistics.median(one[key] for one in each) for key in ("rate", "p50", "p99", "cpu")}
            table.add_row(
                what if kind == KINDS[0] else "",
                kind,
                f"{median['rate']:,.0f}",
                f"{median['p50']:.2f}",
                f"{median['p99']:.2f}",
                f"{median['cpu'] * 1e6:.1f}",
                " ".join(f"{one['cpu'] * 1e6:.0f}" for one in each),
            )
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
