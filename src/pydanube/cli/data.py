"""`danube produce` and `danube consume`, with the flags of the reference's danube-cli.

Exit codes are those of `exits.py`. What was done until then is in the summary either way. Messages and results go to
stdout, everything else to stderr.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from pydanube.cli.completion import topic_names
from pydanube.cli.consuming import Wish
from pydanube.cli.consuming import consume as consume_all
from pydanube.cli.exits import Exit, Usage
from pydanube.cli.output import Output, OutputOption, Progress, payload_fields, payload_text, print_json
from pydanube.cli.places import PLACES, parse_place
from pydanube.cli.producing import Order, Outgoing, Schema, Sent, by_line, repeated
from pydanube.cli.producing import produce as produce_all
from pydanube.cli.rpc import Connection
from pydanube.core.names import TopicName
from pydanube.errors import ConfigError
from pydanube.wire._pb.danube import DanubeApi_pb2 as pb

DEFAULT_URL = "http://127.0.0.1:6650"
DEFAULT_TOPIC = "/default/test_topic"
SCHEMAS = "Schemas"  # a broker without a registry refuses what they ask for; until there is one, --help has none

ServiceAddr = Annotated[
    str, typer.Option("--service-addr", "-s", envvar="DANUBE_SERVICE_ADDR", help="The broker's client address.")
]
Topic = Annotated[
    str, typer.Option("--topic", "-t", help="The topic, as /namespace/topic.", autocompletion=topic_names)
]


class SubType(StrEnum):
    exclusive = "exclusive"
    shared = "shared"
    fail_over = "fail-over"
    key_shared = "key-shared"


# --- produce ------------------------------------------------------------------------------------------


def produce(
    service_addr: ServiceAddr = DEFAULT_URL,
    topic: Topic = DEFAULT_TOPIC,
    producer_name: Annotated[str, typer.Option("--producer-name", "-n", help="The producer's name.")] = "test_producer",
    message: Annotated[str | None, typer.Option("--message", "-m", help="The message, as text.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="The message is the whole file; - is standard input.")
    ] = None,
    as_lines: Annotated[bool, typer.Option("--lines", "-l", help="Every line of --file is a message.")] = False,
    key: Annotated[str | None, typer.Option("--key", "-k", help="The routing key of every message.")] = None,
    key_separator: Annotated[
        str | None, typer.Option(help="With lines: what stands before it is the line's routing key.")
    ] = None,
    attributes: Annotated[
        str | None, typer.Option("--attributes", "-a", metavar="K:V,K:V", help="Attributes of every message.")
    ] = None,
    partitions: Annotated[
        int, typer.Option("--partitions", "-p", min=0, max=10_000, help="Partitions of the topic; 0: it has none.")
    ] = 0,
    count: Annotated[int, typer.Option("--count", "-c", min=1, help="How often the message is sent.")] = 1,
    interval: Annotated[
        int | None,
        typer.Option("--interval", "-i", min=0, help="Milliseconds between messages.", show_default="500, lines 0"),
    ] = None,
    reliable: Annotated[
        bool, typer.Option("--reliable", help="The topic keeps messages until they are acknowledged.")
    ] = False,
    in_flight: Annotated[
        int, typer.Option(min=1, max=1024, help="Messages on their way at once. Above 1 their order may change.")
    ] = 1,
    schema_subject: Annotated[
        str | None, typer.Option(help="The messages' schema, by its subject.", hidden=True, rich_help_panel=SCHEMAS)
    ] = None,
    schema_version: Annotated[
        int | None, typer.Option(min=1, help="Exactly this version.", hidden=True, rich_help_panel=SCHEMAS)
    ] = None,
    schema_min_version: Annotated[
        int | None, typer.Option(min=1, help="This version or a later one.", hidden=True, rich_help_panel=SCHEMAS)
    ] = None,
    schema_file: Annotated[
        Path | None, typer.Option(help="Registered first.", hidden=True, rich_help_panel=SCHEMAS)
    ] = None,
    schema_type: Annotated[
        str, typer.Option(help="json_schema, avro or protobuf.", hidden=True, rich_help_panel=SCHEMAS)
    ] = "json_schema",
    output: OutputOption = Output.table,
) -> None:
    """Send messages: a text, a file, or every line of standard input.

    danube produce -t /default/orders --reliable -m hello

    seq 100 | danube produce -t /default/orders --reliable

    The topic is created if it is new; --reliable must agree with it if it is not.
    """
    source = _source(message, file, as_lines, key, key_separator, count)
    reading_lines = message is None and (file is None or as_lines)
    name = TopicName(topic)
    order = Order(
        topic=name,
        producer=producer_name,
        attributes=_attributes(attributes),
        partitions=partitions,
        reliable=reliable,
        interval_seconds=(0 if reading_lines else 500) / 1000 if interval is None else interval / 1000,
        in_flight=in_flight,
        schema=_schema(name, schema_subject, schema_version, schema_min_version, schema_file, schema_type),
    )
    report = Report(output, each=not reading_lines)
    try:
        asyncio.run(_produce(Connection(service_addr), order, source, report))
    finally:
        report.print_summary()  # also after Ctrl-C, and when the broker went away
    if report.errors:
        raise typer.Exit(Exit.INCOMPLETE)


async def _produce(connection: Connection, order: Order, source: AsyncIterator[Outgoing], report: Report) -> None:
    async with connection:
        await produce_all(connection, order, source, report)


class Report:
    """What became of each message, and of all."""

    def __init__(self, output: Output, *, each: bool) -> None:
        self._output = output
        self._each = each
        self._progress = Progress("sent")
        if not each and output is Output.table:
            self._progress.also_on_a_terminal()
        self.success = 0
        self.errors = 0

    def __call__(self, sent: Sent) -> None:
        self._progress.add(sent.size_bytes)
        if sent.error is None:
            self.success += 1
        else:
            self.errors += 1
            self._progress.clear()
            print(f"danube: {sent.topic}: {sent.error}", file=sys.stderr)
        if self._output is Output.json:
            error = None if sent.error is None else str(sent.error)
            print_json(
                {"topic": sent.topic, "request_id": sent.request_id, "size_bytes": sent.size_bytes, "error": error}
            )
        elif self._each and sent.error is None:
            print(f"Message sent: topic {sent.topic}, id {sent.request_id}, {sent.size_bytes} bytes", flush=True)

    def print_summary(self) -> None:
        self._progress.clear()
        if self._output is Output.json:
            print_json({"success": self.success, "errors": self.errors, "seconds": round(self._progress.seconds, 3)})
        else:
            print(f"Success: {self.success}\nErrors: {self.errors}", flush=True)


def _source(
    message: str | None, file: Path | None, as_lines: bool, key: str | None, separator: str | None, count: int
) -> AsyncIterator[Outgoing]:
    if message is not None and file is not None:
        raise ConfigError("--message", message, "either --message or --file, not both")
    if message is not None:
        return repeated(Outgoing(message.encode("utf-8", "surrogateescape"), key), count)
    if file is None and sys.stdin.isatty():
        raise Usage("say what to send: --message, --file, or lines on standard input")
    from_stdin = file is None or str(file) == "-"
    if file is not None and not as_lines:
        return repeated(Outgoing(sys.stdin.buffer.read() if from_stdin else file.read_bytes(), key), count)
    if count != 1:
        raise ConfigError("--count", count, "lines are sent once each")
    descriptor = sys.stdin.fileno() if file is None or from_stdin else os.open(file, os.O_RDONLY)
    return by_line(descriptor, key, separator)


def _attributes(text: str | None) -> dict[str, str]:
    attributes = {}
    for pair in filter(None, (text or "").split(",")):
        name, found, value = pair.partition(":")
        if not found or not name.strip():
            raise ConfigError("--attributes", text, "key:value,key:value")
        attributes[name.strip()] = value.strip()
    return attributes


def _schema(
    topic: TopicName, subject: str | None, version: int | None, lowest: int | None, file: Path | None, kind: str
) -> Schema | None:
    if version is not None and lowest is not None:
        raise ConfigError("--schema-version", version, "either it or --schema-min-version, not both")
    if subject is None and file is None:
        if version is not None or lowest is not None:
            raise ConfigError("--schema-subject", None, "a schema version needs its subject")
        return None
    if kind not in ("json_schema", "avro", "protobuf"):
        raise ConfigError("--schema-type", kind, "json_schema, avro or protobuf")
    return Schema(
        subject=subject or topic.strip("/").replace("/", "-"),
        version=version,
        min_version=lowest,
        definition=None if file is None else file.read_bytes(),
        kind=kind,
    )


# --- consume ------------------------------------------------------------------------------------------


def consume(
    subscription: Annotated[str, typer.Option("--subscription", "-m", help="The subscription; made if it is new.")],
    service_addr: ServiceAddr = DEFAULT_URL,
    topic: Topic = DEFAULT_TOPIC,
    consumer: Annotated[
        str, typer.Option("--consumer", "-n", help="The consumer's name. The same name twice: the later takes over.")
    ] = "consumer_pubsub",
    sub_type: Annotated[
        SubType,
        typer.Option(
            "--sub-type",
            help="How consumers share messages: one gets all (exclusive; fail-over: the next takes over), each message "
            "goes to one of them (shared), or each key to the same one (key-shared). Of a new subscription.",
        ),
    ] = SubType.shared,
    key_filter: Annotated[
        list[str] | None, typer.Option("--key-filter", help="With key-shared: only keys like this, as eu-*.")
    ] = None,
    start: Annotated[
        str,
        typer.Option(
            "--start",
            metavar="PLACE",
            help=f"Where a new subscription of a reliable topic begins: {PLACES}.",
        ),
    ] = "latest",
    count: Annotated[int, typer.Option("--count", "-c", min=0, help="Stop after so many; 0: never.")] = 0,
    timeout: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so many seconds without a message.")
    ] = None,
    ack: Annotated[bool, typer.Option("--ack/--no-ack", help="Acknowledge each message once it is shown.")] = True,
    output: OutputOption = Output.table,
) -> None:
    """Print messages as they come, and acknowledge them, until Ctrl-C.

    danube consume -t /default/orders -m my-subscription

    danube consume -t /default/orders -m from-the-first --start earliest

    A new subscription gets what is published from now on, or from --start on; one that exists goes on where it was
    (`danube admin subscriptions seek` moves it). With --count and --timeout the exit code is 5 if fewer came.
    """
    wish = Wish(
        topic=TopicName(topic),
        consumer=consumer,
        subscription=subscription,
        sub_type=sub_type.value,
        key_filters=tuple(key_filter or ()),
        start=parse_place("--start", start),
        count=count,
        timeout_seconds=timeout,
        ack=ack,
    )
    screen = Screen(output)
    try:
        complete = asyncio.run(_consume(Connection(service_addr), wish, screen))
    finally:
        screen.print_summary()
    if not complete:
        raise typer.Exit(Exit.INCOMPLETE)


async def _consume(connection: Connection, wish: Wish, screen: Screen) -> bool:
    async with connection:
        return await consume_all(connection, wish, screen.show, screen.note)


class Screen:
    """Shows messages, and says at the end how many they were."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._progress = Progress("received")

    def show(self, message: pb.StreamMessage) -> None:
        self._progress.add(len(message.payload))
        if self._output is Output.json:
            print_json(_fields(message))
            return
        # Offsets are a reliable topic's; its very first message cannot be told from a non-reliable one.
        kind = "reliable message" if message.msg_id.topic_offset else "message"
        print(f"Received {kind}: {payload_text(message.payload)}")
        facts = [f"topic {message.msg_id.topic_name}", f"offset {message.msg_id.topic_offset}"]
        facts += [f"{len(message.payload)} bytes"]
        if message.HasField("routing_key"):
            facts.append(f"key {message.routing_key}")
        print(f"  {', '.join(facts)}")
        if message.attributes:
            print("  Attributes: " + ", ".join(f"{key}: {value}" for key, value in sorted(message.attributes.items())))
        sys.stdout.flush()

    def note(self, sentence: str) -> None:
        self._progress.clear()
        print(f"danube: {sentence}", file=sys.stderr, flush=True)

    def print_summary(self) -> None:
        self._progress.clear()
        total = f"Total received: {self._progress.count} messages, {self._progress.size_bytes} bytes"
        print(total, file=sys.stderr if self._output is Output.json else sys.stdout, flush=True)


def _fields(message: pb.StreamMessage) -> dict[str, object]:
    return {
        "topic": message.msg_id.topic_name,
        "offset": message.msg_id.topic_offset,
        "producer_name": message.producer_name,
        "publish_time_ms": message.publish_time,
        "routing_key": message.routing_key if message.HasField("routing_key") else None,
        "attributes": dict(message.attributes),
        **payload_fields(message.payload),
    }
