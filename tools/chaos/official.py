"""The official client as an application that is broken with its cluster: a script, in a process of its own.

    official.py produce URL TOPIC NAME FIRST PAUSE_SECONDS
    official.py consume URL TOPIC SUBSCRIPTION TYPE NAME

Prints a JSON object per line. What the client cannot recover from ends the process, and the harness starts it anew,
as applications are run. A producer sends while its last line of input was "go", and numbers its messages from FIRST; to
"stop N" it says "stopped" with that number when nothing is on its way any more.
Imports nothing of ours: both packages bring protobuf descriptors of the same name.
"""

import asyncio
import json
import logging
import os
import sys

from danube import DanubeClientBuilder, DispatchStrategy, SubType

TYPES = {"exclusive": SubType.EXCLUSIVE, "shared": SubType.SHARED}
KEYS = 5


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, "at": asyncio.get_running_loop().time(), **fields}), flush=True)


async def produce(url: str, topic: str, name: str, first: str, pause_seconds: str) -> None:
    loop = asyncio.get_running_loop()
    going = asyncio.Event()
    order = ""

    def told() -> None:
        nonlocal order
        line = os.read(sys.stdin.fileno(), 4096).decode()
        if not line:
            sys.exit()
        order = line.split("\n")[-2]
        going.set() if order == "go" else going.clear()
        if idle:
            say_stopped()

    def say_stopped() -> None:
        if order.startswith("stop "):
            say("stopped", number=int(order.removeprefix("stop ")))

    idle = True
    loop.add_reader(sys.stdin, told)
    client = await DanubeClientBuilder().service_url(url).build()
    builder = client.new_producer().with_topic(topic).with_name(name)
    producer = builder.with_dispatch_strategy(DispatchStrategy.RELIABLE).build()
    await producer.create()
    say("created")
    number = int(first)
    while True:
        idle = True
        while not going.is_set():
            say_stopped()
            await going.wait()
        idle = False
        text, key = f"{name}:{number}", f"k{number % KEYS}"
        say("sent", message=text, key=key)
        await producer.send_with_key(text.encode(), {}, key)
        say("acked", message=text)
        number += 1
        await asyncio.sleep(float(pause_seconds))


async def consume(url: str, topic: str, subscription: str, kind: str, name: str) -> None:
    client = await DanubeClientBuilder().service_url(url).build()
    builder = client.new_consumer().with_topic(topic).with_consumer_name(name)
    consumer = builder.with_subscription(subscription).with_subscription_type(TYPES[kind]).build()
    await consumer.subscribe()
    queue = await consumer.receive()
    say("subscribed")
    while True:
        message = await queue.get()
        offset = message.msg_id.topic_offset
        rescued = "x-danube-rescued" in message.attributes
        say("got", message=message.payload.decode(), offset=offset, key=message.routing_key, rescued=rescued)
        await consumer.ack(message)
        say("done", offset=offset)


if __name__ == "__main__":
    # While a broker is away the client opens its stream again a thousand times per second, and logs each time.
    logging.getLogger("danube").setLevel(logging.CRITICAL)
    asyncio.run({"produce": produce, "consume": consume}[sys.argv[1]](*sys.argv[2:]))
