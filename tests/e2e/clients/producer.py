"""The official client as a producer: creates, waits to be told, sends, and prints what was acknowledged."""

import argparse
import asyncio
import json
import sys

import grpc
from danube import DanubeClientBuilder, DispatchStrategy
from danube.producer import ProducerOptions


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("topic")
    parser.add_argument("--name", default="producer")
    parser.add_argument("--reliable", action="store_true")
    parser.add_argument("--partitions", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--keys", type=int, default=0, help="messages take turns among so many routing keys")
    parser.add_argument("--interval-ms", type=float, default=0)
    parser.add_argument("--retries", type=int, default=0)
    parser.add_argument("--attribute", default=None)
    options = parser.parse_args()

    client = await DanubeClientBuilder().service_url(options.url).build()
    strategy = DispatchStrategy.RELIABLE if options.reliable else DispatchStrategy.NON_RELIABLE
    builder = client.new_producer().with_topic(options.topic).with_name(options.name).with_dispatch_strategy(strategy)
    builder = builder.with_options(ProducerOptions(max_retries=options.retries))
    if options.partitions:
        builder = builder.with_partitions(options.partitions)
    producer = builder.build()
    try:
        await producer.create()
    except grpc.aio.AioRpcError as error:
        say("refused", code=error.code().name, why=error.details())
        return
    say("created")
    loop = asyncio.get_running_loop()
    number = 0
    while (await loop.run_in_executor(None, sys.stdin.readline)).strip() == "go":
        for _ in range(options.count):
            payload = f"message {number}".encode()
            attributes = {"number": options.attribute} if options.attribute else None
            key = f"key-{number % options.keys}" if options.keys else None
            if key is None:
                await producer.send(payload, attributes)
            else:
                await producer.send_with_key(payload, attributes, key)
            say("sent", payload=payload.decode(), key=key)
            number += 1
            await asyncio.sleep(options.interval_ms / 1000)
        say("done")
    await producer.close()


asyncio.run(main())
