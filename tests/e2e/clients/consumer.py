"""The official client as a consumer: prints what it gets and what it did with it, until it is ended."""

import argparse
import asyncio
import json
import logging
import os

import grpc
from danube import DanubeClientBuilder, SubType

SUB_TYPES = {
    "exclusive": SubType.EXCLUSIVE,
    "shared": SubType.SHARED,
    "failover": SubType.FAILOVER,
    "key-shared": SubType.KEY_SHARED,
}


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("topic")
    parser.add_argument("--name", default="consumer")
    parser.add_argument("--subscription", default="subscription")
    parser.add_argument("--type", default="exclusive", choices=SUB_TYPES)
    parser.add_argument("--filter", action="append", default=[])
    parser.add_argument("--nack", choices=("never", "once", "always"), default="never")
    parser.add_argument("--nack-every", type=int, default=1, help="of the messages, by their number")
    parser.add_argument("--nack-delay-ms", type=int, default=None)
    parser.add_argument("--no-ack", action="store_true")
    options = parser.parse_args()

    # While the broker is away the client opens its stream again a thousand times per second, and logs each time: 50 MB
    # within seconds, and every sync of the disk waits for them.
    logging.getLogger("danube").setLevel(logging.CRITICAL)
    client = await DanubeClientBuilder().service_url(options.url).build()
    builder = client.new_consumer().with_topic(options.topic).with_consumer_name(options.name)
    builder = builder.with_subscription(options.subscription).with_subscription_type(SUB_TYPES[options.type])
    consumer = builder.with_key_filters(options.filter).build()
    try:
        await consumer.subscribe()
    except grpc.aio.AioRpcError as error:
        say("refused", code=error.code().name, why=error.details())
        return
    queue = await consumer.receive()
    say("subscribed")
    nacked = set()
    while True:
        message = await queue.get()
        payload = message.payload.decode()
        number = int(payload.rpartition(" ")[2])
        wanted = options.nack == "always" or (options.nack == "once" and payload not in nacked)
        is_nacked = wanted and number % options.nack_every == 0
        # Printed first: what a test sees as received may still be unacknowledged, never the other way round.
        say(
            "received",
            payload=payload,
            number=number,
            topic=message.msg_id.topic_name,
            offset=message.msg_id.topic_offset,
            key=message.routing_key,
            attributes=dict(message.attributes),
            producer=message.producer_name,
            publish_time=message.publish_time,
            nacked=is_nacked,
        )
        if options.no_ack:
            continue
        try:
            if is_nacked:
                nacked.add(payload)
                await consumer.nack(message, delay_ms=options.nack_delay_ms, reason="the test wants it again")
            else:
                await consumer.ack(message)
                say("acked", payload=payload)
        except grpc.aio.AioRpcError as error:
            say("not acked", payload=payload, code=error.code().name)  # the broker is away: it will come again


try:
    asyncio.run(main())
except KeyboardInterrupt:
    os._exit(130)
