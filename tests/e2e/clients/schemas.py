"""The official client's schema calls, one after the other; prints what each answered or was refused with."""

import argparse
import asyncio
import json
from typing import Any

import grpc
from danube import DanubeClientBuilder, DispatchStrategy
from danube.schema import CompatibilityMode, SchemaType

V1 = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
V2 = {"type": "object", "properties": {"name": {"type": "string"}, "mail": {"type": "string"}}, "required": ["name"]}
OTHER = {"type": "object", "properties": {"mail": {"type": "string"}}}


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("topic")
    options = parser.parse_args()
    topic, subject = options.topic, "official"
    client = await DanubeClientBuilder().service_url(options.url).build()
    registry = client.schema()

    def registering(schema: object) -> Any:
        data = json.dumps(schema).encode()
        return registry.register_schema(subject).with_type(SchemaType.JSON_SCHEMA).with_schema_data(data).execute()

    schema_id = await registering(V1)
    say("same id", same=await registering(V2) == schema_id)
    latest = await registry.get_latest_schema(subject)
    first = await registry.get_schema_version(schema_id, 1)
    say("read", latest=latest.version, first=json.loads(first.schema_definition) == V1, type=first.schema_type)
    say("versions", versions=await registry.list_versions(subject))
    data = json.dumps(OTHER).encode()
    compatible, errors = await registry.check_compatibility(subject, data, SchemaType.JSON_SCHEMA)
    say("check", compatible=compatible, errors=errors)
    compatible, _ = await registry.check_compatibility(subject, data, SchemaType.JSON_SCHEMA, CompatibilityMode.NONE)
    say("check none", compatible=compatible)
    say("mode", done=await registry.set_compatibility_mode(subject, CompatibilityMode.FULL))
    say("deleted", done=await registry.delete_schema_version(subject, 1))

    def producer(name: str) -> Any:
        return client.new_producer().with_topic(topic).with_name(name).with_dispatch_strategy(DispatchStrategy.RELIABLE)

    typed = producer("typed").with_schema_subject(subject).build()
    await typed.create()
    bare = producer("bare").build()
    await bare.create()
    say("configured", done=await registry.configure_topic_schema(topic, subject, "enforce", True))
    config = await registry.get_topic_schema_config(topic)
    say("config", subject=config.schema_subject, policy=config.validation_policy, same=config.schema_id == schema_id)
    await typed.send(b'{"name": "a"}')
    for name, sender, payload in (("payload", typed, b'{"name": 7}'), ("missing", bare, b'{"name": "a"}')):
        try:
            await sender.send(payload)
        except grpc.aio.AioRpcError as error:
            say(f"refused {name}", code=error.code().name, why=error.details())
    try:
        await producer("other").with_schema_subject("nosuch").build().create()
    except grpc.aio.AioRpcError as error:
        say("refused subject", code=error.code().name, why=error.details())
    say("warned", done=await registry.update_topic_validation_policy(topic, "warn", True))
    await bare.send(b"anything")
    say("done")


asyncio.run(main())
