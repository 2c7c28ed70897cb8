"""`danube admin`: what an operator asks and orders, over a broker's admin port.

Names and lines are the reference's danube-admin's. Every command takes `--output json`; a refusal is the broker's own
sentence and the exit code for its kind. What concerns one subscription is in `subscriptions.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterable
from contextvars import ContextVar
from enum import StrEnum
from typing import Annotated, TypeVar

import typer
from google.protobuf.message import Message

from pydanube.admin import calls, values
from pydanube.cli.completion import broker_ids, namespace_names, subscription_names, topic_names
from pydanube.cli.contexts import DEFAULT_ENDPOINT, resolve
from pydanube.cli.exits import NotThere, UsageError
from pydanube.cli.output import (
    Output,
    OutputOption,
    id_text,
    payload_fields,
    payload_text,
    print_done,
    print_fields,
    print_rows,
)
from pydanube.client.grpc.connection import CALL_SECONDS, GrpcCall, GrpcConnection, is_passing
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError, DanubeError

M = TypeVar("M", bound=Message)

ENDPOINT: ContextVar[str] = ContextVar("endpoint", default=DEFAULT_ENDPOINT)

app = typer.Typer(no_args_is_help=True)
brokers = typer.Typer(no_args_is_help=True)
namespaces = typer.Typer(no_args_is_help=True)
topics = typer.Typer(no_args_is_help=True)
app.add_typer(brokers, name="brokers", help="The brokers: list, drain, activate, even out their load.")
app.add_typer(namespaces, name="namespaces", help="Namespaces: list topics, show limits, create, delete.")
app.add_typer(topics, name="topics", help="Topics: list, create, describe, look into, move, delete.")

TopicArgument = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The topic, as /namespace/topic.", autocompletion=topic_names)
]
NamespaceArgument = Annotated[str, typer.Argument(metavar="NAMESPACE", autocompletion=namespace_names)]


class Dispatch(StrEnum):
    reliable = "reliable"
    non_reliable = "non_reliable"


class OnCrash(StrEnum):
    take_over = "take-over"
    wait = "wait"


@app.callback()
def options(
    endpoint: Annotated[
        str, typer.Option(envvar="DANUBE_ADMIN_ENDPOINT", help="The broker's admin address.", callback=resolve)
    ] = DEFAULT_ENDPOINT,
) -> None:
    """Ask a broker, or tell it what to do."""
    if os.environ.get("DANUBE_ADMIN_TLS", "").lower() in ("1", "true", "yes", "on"):
        raise ConfigError("DANUBE_ADMIN_TLS", os.environ["DANUBE_ADMIN_TLS"], "TLS does not exist yet; unset it")
    ENDPOINT.set(endpoint)


def ask(call: GrpcCall[M], *, seconds: float = CALL_SECONDS) -> M:
    """The answer of the broker at --endpoint. Raises BrokerRefused, Unreachable or WrongPort."""

    async def run() -> M:
        async with connected() as broker:
            return await broker.ask(call, seconds=seconds)

    return asyncio.run(run())


def connected() -> GrpcConnection:
    """To the broker at --endpoint."""
    return GrpcConnection(ENDPOINT.get(), "--endpoint")


# --- brokers ------------------------------------------------------------------------------------------


@brokers.command("list")
def list_brokers(output: OutputOption = Output.table) -> None:
    """The brokers that are there, and where."""
    found = ask(calls.list_brokers()).brokers
    columns = ("broker_id", "broker_status", "broker_addr", "broker_role", "admin_addr", "metrics_addr")
    print_rows([{name: getattr(each, name) for name in columns} for each in found], columns, output)


@brokers.command("leader-broker")
def leader_broker(output: OutputOption = Output.table) -> None:
    """The broker that leads."""
    leader = ask(calls.leader()).leader
    if output is Output.json:
        print_fields({"leader": leader}, output)
    else:
        print(f"Leader Broker: {json.dumps(leader)}")


@brokers.command("namespaces")
def list_namespaces(output: OutputOption = Output.table) -> None:
    """All namespaces; as `namespaces list`."""
    _print_names(_namespaces(), "Namespace", output)


def _namespaces() -> list[str]:
    return list(ask(calls.list_namespaces()).namespaces)


# --- namespaces ---------------------------------------------------------------------------------------


@namespaces.command("list")
def list_all_namespaces(output: OutputOption = Output.table) -> None:
    """All namespaces."""
    list_namespaces(output)


@namespaces.command("topics")
def namespace_topics(namespace: NamespaceArgument, output: OutputOption = Output.table) -> None:
    """The topics of a namespace."""
    found = ask(calls.topic_names(namespace)).topics
    if not found:
        _require_namespace(namespace)
    _print_names([f"/{name.lstrip('/')}" for name in found], "Topic", output)


@namespaces.command("policies")
def namespace_policies(namespace: NamespaceArgument, output: OutputOption = Output.table) -> None:
    """The limits of a namespace; 0 is none."""
    print_fields(json.loads(ask(calls.namespace_policies(namespace)).policies), output)


@namespaces.command("create")
def create_namespace(namespace: NamespaceArgument, output: OutputOption = Output.table) -> None:
    """Create a namespace, without limits."""
    ask(calls.create_namespace(namespace))
    print_done("Namespace Created: true", output, namespace=namespace)


@namespaces.command("delete")
def delete_namespace(namespace: NamespaceArgument, output: OutputOption = Output.table) -> None:
    """Delete a namespace that has no topics."""
    ask(calls.delete_namespace(namespace))
    print_done("Namespace Deleted: true", output, namespace=namespace)


# --- topics -------------------------------------------------------------------------------------------


@topics.command("list")
def list_topics(
    only: Annotated[
        str | None,
        typer.Argument(
            metavar="NAMESPACE",
            help="Only topics of this namespace.",
            show_default=False,
            autocompletion=namespace_names,
        ),
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(help="The same, as an option.", autocompletion=namespace_names)
    ] = None,
    broker: Annotated[
        str | None, typer.Option(help="The topics that this broker serves, by its id.", autocompletion=broker_ids)
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """All topics, or those of a namespace, or those that a broker serves."""
    if sum(each is not None for each in (only, namespace, broker)) > 1:
        raise UsageError("give one of NAMESPACE, --namespace and --broker, or none for all topics")
    namespace = only if namespace is None else namespace
    if broker is not None:
        found = list(ask(calls.topics_of_broker(broker)).topics)
        if not found:
            known = ask(calls.list_brokers()).brokers
            if broker not in {each.broker_id for each in known}:
                raise NotThere(f"there is no broker {broker}: `danube admin brokers list` shows those that are")
    elif namespace is not None:
        found = _topics_of([namespace.strip("/")])
        if not found:
            _require_namespace(namespace)
    else:
        found = _topics_of(_namespaces())
    columns = ("name", "broker_id", "delivery")
    rows = [{name: getattr(each, name) for name in columns} for each in found]
    print_rows(rows, columns, output, line=lambda row: f"Topic: {row['name']} ({row['delivery'] or 'not open'})")


def _require_namespace(name: str) -> None:
    """Raises NotThere."""
    if name.strip("/") not in _namespaces():
        raise NotThere(f"there is no namespace {name}: `danube admin namespaces list` shows those that are")


def require_topic(topic: str) -> list[str]:
    """[topic], or its partitions. Raises NotThere. For calls that answer for a topic that does not exist as well."""
    name = TopicName(topic)
    listed = [each.name for each in _topics_of([name.namespace])]
    found = [topic] if topic in listed else sorted(each for each in listed if TopicName(each).is_partition_of(topic))
    if not found:
        raise NotThere(f"there is no topic {topic}: `danube admin topics list` shows those that are")
    return found


def _topics_of(names: Iterable[str]) -> list[values.TopicEntry]:
    async def run() -> list[values.TopicEntry]:
        found: list[values.TopicEntry] = []
        async with connected() as broker:
            for name in sorted(names):
                found += (await broker.ask(calls.list_topics(name))).topics
        return found

    return asyncio.run(run())


@topics.command("create")
def create_topic(
    topic: TopicArgument,
    namespace: Annotated[str | None, typer.Option(help="For a TOPIC without one.")] = None,
    partitions: Annotated[int | None, typer.Option(min=1, help="How many; without it the topic has none.")] = None,
    schema_subject: Annotated[str | None, typer.Option(help="Of its messages.")] = None,
    dispatch_strategy: Annotated[
        Dispatch, typer.Option(help="reliable: kept until acknowledged. non_reliable: whoever is there gets it.")
    ] = Dispatch.reliable,
    on_crash: Annotated[OnCrash, typer.Option(help="As `topics on-crash` sets it.")] = OnCrash.take_over,
    output: OutputOption = Output.table,
) -> None:
    """Create a topic, or all partitions of one."""
    name = TopicName(f"/{namespace}/{topic.lstrip('/')}" if namespace is not None and topic.count("/") < 2 else topic)
    reliable = dispatch_strategy is Dispatch.reliable
    ask(calls.create_topic(name, reliable=reliable, partitions=partitions or 0, schema_subject=schema_subject))
    _set_on_crash(name, on_crash)
    if partitions is None:
        print_done(f"Topic created: {name}", output, topic=name)
    else:
        print_done(f"Partitioned topic created: {name}", output, topic=name, partitions=partitions)


def _set_on_crash(topic: str, on_crash: OnCrash) -> None:
    if on_crash is OnCrash.wait:
        ask(calls.set_on_crash(topic, wait=True))


@topics.command("set-heartbeat")
def set_topic_heartbeat(
    topic: TopicArgument,
    heartbeat: Annotated[
        str,
        typer.Argument(
            metavar="HEARTBEAT",
            help="As `subscriptions set-heartbeat` takes it. default: the broker's.",
        ),
    ],
    output: OutputOption = Output.table,
) -> None:
    """Set the heartbeat of all subscriptions of a topic, also later ones, that have none of their own."""
    wanted = "" if heartbeat == "default" else heartbeat
    targets, now = require_topic(topic), ""
    for each in targets:
        now = ask(calls.set_heartbeat(each, wanted)).heartbeat
    print_done(f"Heartbeat: {now}", output, heartbeat=now, topics=targets)


@topics.command("on-crash")
def set_on_crash(
    topic: TopicArgument,
    what: Annotated[OnCrash, typer.Argument(metavar="take-over|wait", help="What happens to the topic then.")],
    output: OutputOption = Output.table,
) -> None:
    """When its broker is lost: another takes the topic over, or it waits for that broker and keeps strict order.

    A topic that waits already is taken over as soon as it is told `take-over`; what only the lost broker's disk has
    comes late, or never if that disk is gone.
    """
    done = ask(calls.set_on_crash(topic, wait=what is OnCrash.wait))
    print_done(f"On crash: {what.value}", output, topics=list(done.topics), on_crash=what.value)


@topics.command("delete")
def delete_topic(topic: TopicArgument, output: OutputOption = Output.table) -> None:
    """Delete a topic with everything it has; of a partitioned topic, all partitions."""
    ask(calls.delete_topic(topic))
    print_done("Topic Deleted: true", output, topic=topic)


@topics.command("describe")
def describe_topic(topic: TopicArgument, output: OutputOption = Output.table) -> None:
    """Who serves it, or why nobody does; how it delivers, its schema, its subscriptions and where its messages are."""
    found = ask(calls.describe_topic(topic))
    state = ask(calls.topic_state(topic))
    schema = ("schema_subject", "schema_id", "schema_version", "schema_type", "compatibility_mode")
    fields = {
        "topic": found.name,
        "broker_id": found.broker_id,
        **_state_fields(state, output),
        "delivery": found.delivery,
        **{name: getattr(found, name) if found.HasField(name) else None for name in schema},
        "subscriptions": list(found.subscriptions),
    }
    if found.delivery == calls.RELIABLE:
        try:
            tiers = ask(calls.list_storage(topic, summary=True)).tiers
        except DanubeError as error:
            if not is_passing(error):
                raise
            print(f"where its messages are is not known just now: {error}", file=sys.stderr)
        else:
            fields |= tier_fields(tiers) if output is Output.json else tier_texts(tiers)
    print_fields(fields, output)


def _state_fields(state: values.TopicState, output: Output) -> dict[str, object]:
    """Where it is: active, moving or unassigned; and what of it waits on the disk of a lost broker."""
    if output is Output.json:
        return {
            "state": state.state,
            "sentence": state.sentence,
            "phase": state.phase or None,
            "to_broker": id_text(state.to_broker),
            "epoch": state.epoch,
            "on_crash": "wait" if state.waits else "take-over",
            "heartbeat": state.heartbeat or None,
            "orphans": [orphan_fields(each) for each in state.orphans],
        }
    phase = f", phase {state.phase}" if state.phase else ""
    orphans = [f"offsets {each.first} up to {each.end}: {each.sentence}" for each in state.orphans]
    special = {
        "on_crash": "wait: for its own broker" if state.waits else "",
        "heartbeat": state.heartbeat,
        "orphans": orphans,
    }
    return {
        "state": f"{state.state}: {state.sentence}{phase}",
        **{name: value for name, value in special.items() if value},
    }


def orphan_fields(orphan: values.OrphanState) -> dict[str, object]:
    """Offsets that only a lost broker's disk may have, for JSON and tables."""
    names = ("first", "end", "epoch", "sentence")
    return {**{name: getattr(orphan, name) for name in names}, "broker_id": id_text(orphan.broker_id)}


def tier_fields(tiers: values.Tiers) -> dict[str, object]:
    """Where a topic's offsets are, for JSON; one may be in both."""
    return {
        "first_offset": tiers.first_offset,
        "head": tiers.head,
        "cloud": ranges(tiers.cloud) if tiers.has_cloud else None,
        "log": ranges(tiers.log),
    }


def tier_texts(tiers: values.Tiers) -> dict[str, object]:
    """The same for people."""
    cloud = [offsets_text(each.first, each.end) for each in tiers.cloud]
    return {
        "offsets": offsets_text(tiers.first_offset, tiers.head),
        "in_objects": cloud if tiers.has_cloud else "this broker has no object store",
        "in_log": [offsets_text(each.first, each.end) for each in tiers.log],
    }


def ranges(found: Iterable[values.OffsetSpan]) -> list[dict[str, int]]:
    return [{"first": each.first, "end": each.end} for each in found]


def offsets_text(first: int, end: int) -> str:
    """As people count: both are there."""
    return f"{first}…{end - 1}" if end > first else "none"


@topics.command("subscriptions")
def topic_subscriptions(topic: TopicArgument, output: OutputOption = Output.table) -> None:
    """The subscriptions of a topic; of a partitioned topic, of all partitions."""

    def of(name: str) -> set[str]:
        return set(ask(calls.subscriptions_of(name)).subscriptions)

    found = of(topic) or set().union(*(of(each) for each in require_topic(topic)))
    _print_names(sorted(found), "Subscription", output)


@topics.command("unsubscribe")
def unsubscribe(
    topic: TopicArgument,
    subscription: Annotated[
        str,
        typer.Option("--subscription", "-s", help="The subscription to remove.", autocompletion=subscription_names),
    ],
    output: OutputOption = Output.table,
) -> None:
    """Remove a subscription and its place. Refused while a consumer is connected."""
    ask(calls.unsubscribe(topic, subscription))
    print_done("Unsubscribed: true", output, topic=topic, subscription=subscription)


@topics.command("peek")
def peek(
    topic: TopicArgument,
    offset: Annotated[int | None, typer.Option(min=0, help="The first to show.", show_default="the newest")] = None,
    count: Annotated[int, typer.Option("--count", "-c", min=1, max=1_000, help="How many.")] = 10,
    output: OutputOption = Output.table,
) -> None:
    """Look at messages of a reliable topic, without a subscription and without a trace."""
    found = ask(calls.peek(topic, offset, count))
    if output is Output.json:
        print_fields(
            {
                "first_offset": found.first_offset,
                "head": found.head,
                "messages": [_peeked(message) for message in found.messages],
            },
            output,
        )
        return
    columns = ("offset", "producer", "key", "bytes", "payload")
    rows = [
        {
            "offset": each.offset,
            "producer": each.producer_name,
            "key": each.routing_key if each.HasField("routing_key") else None,
            "bytes": each.payload_size_bytes,
            "payload": payload_text(each.payload).replace("\n", "\\n"),
        }
        for each in found.messages
    ]
    print_rows(rows, columns, output)
    print(f"{topic} has offsets {found.first_offset} up to {found.head}")


def _peeked(message: values.PeekedMessage) -> dict[str, object]:
    return {
        "offset": message.offset,
        "producer_name": message.producer_name,
        "publish_time_us": message.publish_time_us,
        "append_time_us": message.append_time_us,
        "routing_key": message.routing_key if message.HasField("routing_key") else None,
        "attributes": dict(message.attributes),
        "size_bytes": message.payload_size_bytes,
        **payload_fields(message.payload),
    }


def _print_names(names: list[str], what: str, output: Output) -> None:
    if output is Output.json:
        print(json.dumps(names, indent=2, ensure_ascii=False))
    else:
        for name in names:
            print(f"{what}: {name}")
