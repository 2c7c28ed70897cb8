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
from secrets import token_hex
from typing import Annotated

import typer

from pydanube.cli import over_grpc
from pydanube.cli.completion import topic_names
from pydanube.cli.consuming import ConsumeOptions, Received
from pydanube.cli.contexts import DEFAULT_SERVICE, resolve
from pydanube.cli.exits import Exit, UsageError
from pydanube.cli.output import Output, OutputOption, ProgressLine, payload_fields, payload_text, print_json
from pydanube.cli.places import PLACES, parse_place
from pydanube.cli.producing import KeyedPayload, ProduceOptions, SendResult, by_line, repeated
from pydanube.cli.streams import ends_with_reader
from pydanube.client.grpc.connection import GrpcConnection
from pydanube.client.grpc.producer import SchemaReference
from pydanube.core.cluster.conditions import noun
from pydanube.core.names import TopicName
from pydanube.core.policies import type_name
from pydanube.errors import ConfigError, DanubeError

GRPC_URL = "http://127.0.0.1:6650"
DEFAULT_TOPIC = "/default/test_topic"
IN_FLIGHT = 1_000  # of the native protocol, which keeps their order
SCHEMAS = "Schemas"  # a broker without a registry refuses what they ask for; until there is one, --help has none

ServiceAddr = Annotated[
    str,
    typer.Option(
        "--service-addr",
        "-s",
        envvar="DANUBE_SERVICE_ADDR",
        help="A broker's address: danube://host:port is its native port, http://host:port is gRPC.",
        callback=resolve,
    ),
]
Topic = Annotated[
    str, typer.Option("--topic", "-t", help="The topic, as /namespace/topic.", autocompletion=topic_names)
]


class SubType(StrEnum):
    shared = "shared"
    key_shared = "key_shared"
    failover = "failover"
    exclusive = "exclusive"


class Protocol(StrEnum):
    native = "native"
    grpc = "grpc"


ProtocolOption = Annotated[
    Protocol | None, typer.Option(help="native, or grpc.", show_default="what --service-addr says, native")
]


def parse_sub_type(text: str) -> SubType:
    """As the client: key-shared and fail-over, the reference's spellings, are the same."""
    name = type_name(text)
    if name is None:
        raise typer.BadParameter(f"{text!r} is not one of {', '.join(SubType)}.")
    return SubType(name)


def address_of(service_addr: str, protocol: Protocol | None) -> tuple[Protocol, str]:
    """Which way messages go, and where."""
    scheme = service_addr.partition("://")[0] if "://" in service_addr else ""
    said = Protocol.grpc if scheme in ("http", "https") else Protocol.native if scheme else None
    if protocol is Protocol.grpc and service_addr == DEFAULT_SERVICE:
        return Protocol.grpc, GRPC_URL
    if protocol is not None and said is not None and protocol is not said:
        raise UsageError(f"--protocol {protocol} does not fit {service_addr}: danube:// is native, http:// is gRPC")
    return protocol or said or Protocol.native, service_addr


# --- produce ------------------------------------------------------------------------------------------


def produce(
    service_addr: ServiceAddr = DEFAULT_SERVICE,
    topic: Topic = DEFAULT_TOPIC,
    producer_name: Annotated[
        str | None,
        typer.Option("--producer-name", "-n", help="The producer's name.", show_default="one of its own"),
    ] = None,
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
        bool | None,
        typer.Option(
            "--reliable/--non-reliable",
            help="Of a new topic: whether it keeps messages until they are acknowledged.",
            show_default="as the topic is; a new one is reliable",
        ),
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="Messages on their way at once. With gRPC, above 1 their order may change.",
            show_default="1000, gRPC 1",
        ),
    ] = None,
    protocol: ProtocolOption = None,
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

    danube produce -t /default/orders -m hello

    seq 100 | danube produce -t /default/orders

    A topic that is new is created, reliable unless --non-reliable is given. One that is there is taken as it is.
    """
    source = _source(message, file, as_lines, key, key_separator, count)
    reading_lines = message is None and (file is None or as_lines)
    name = TopicName(topic)
    way, address = address_of(service_addr, protocol)
    options = ProduceOptions(
        topic=name,
        producer=producer_name or f"{name.name[:100]}-{token_hex(4)}",
        attributes=_attributes(attributes),
        partitions=partitions,
        reliable=reliable,
        interval_seconds=(0 if reading_lines else 500) / 1000 if interval is None else interval / 1000,
        in_flight=in_flight or (1 if way is Protocol.grpc else IN_FLIGHT),
        schema=_schema(name, schema_subject, schema_version, schema_min_version, schema_file, schema_type),
    )
    report = SendReport(output, each=not reading_lines)
    failure: BaseException | None = None
    try:
        asyncio.run(_produce(way, address, options, source, report))
    except BaseException as error:
        failure = error
        raise
    finally:
        report.print_summary(failure)  # also after Ctrl-C, and when the broker went away
    if report.errors:
        raise typer.Exit(Exit.NOT_GOOD)


async def _produce(
    way: Protocol, address: str, options: ProduceOptions, source: AsyncIterator[KeyedPayload], report: SendReport
) -> None:
    if way is Protocol.grpc:
        async with GrpcConnection(address) as connection:
            await over_grpc.produce(connection, options, source, report)
    else:
        from pydanube.cli import native  # brings Arrow along

        await native.produce(address, options, source, report)


class SendReport:
    """What became of each message, and of all."""

    def __init__(self, output: Output, *, each: bool) -> None:
        self._output = output
        self._each = each
        self._progress = ProgressLine("sent")
        if not each and output is Output.table:
            self._progress.also_on_a_terminal()
        self.success = 0
        self.errors = 0

    def __call__(self, sent: SendResult) -> None:
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
                {
                    "topic": sent.topic,
                    "request_id": sent.request_id,
                    "offset": sent.offset,
                    "size_bytes": sent.size_bytes,
                    "error": error,
                }
            )
        elif self._each and sent.error is None:
            offset = "" if sent.offset is None else f"offset {sent.offset}, "
            size = f"{sent.size_bytes} {noun(sent.size_bytes, 'byte')}"
            print(f"Message sent: topic {sent.topic}, id {sent.request_id}, {offset}{size}", flush=True)

    def print_summary(self, failure: BaseException | None = None) -> None:
        """`failure` ended it early. A refusal before the first message has no summary for people: nothing was tried."""
        self._progress.clear()
        if self._output is Output.json:
            totals = {"success": self.success, "errors": self.errors, "seconds": round(self._progress.seconds, 3)}
            error = str(failure) or type(failure).__name__ if failure is not None else None
            print_json({**totals, "error": error})
        elif not isinstance(failure, DanubeError) or self.success or self.errors:
            print(f"Success: {self.success}\nErrors: {self.errors}", flush=True)


def _source(
    message: str | None, file: Path | None, as_lines: bool, key: str | None, separator: str | None, count: int
) -> AsyncIterator[KeyedPayload]:
    if message is not None and file is not None:
        raise ConfigError("--message", message, "either --message or --file, not both")
    if message is not None:
        return repeated(KeyedPayload(message.encode("utf-8", "surrogateescape"), key), count)
    if file is None and sys.stdin.isatty():
        raise UsageError("say what to send: --message, --file, or lines on standard input")
    from_stdin = file is None or str(file) == "-"
    if file is not None and not as_lines:
        return repeated(KeyedPayload(sys.stdin.buffer.read() if from_stdin else file.read_bytes(), key), count)
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
) -> SchemaReference | None:
    if version is not None and lowest is not None:
        raise ConfigError("--schema-version", version, "either it or --schema-min-version, not both")
    if subject is None and file is None:
        if version is not None or lowest is not None:
            raise ConfigError("--schema-subject", None, "a schema version needs its subject")
        return None
    if kind not in ("json_schema", "avro", "protobuf"):
        raise ConfigError("--schema-type", kind, "json_schema, avro or protobuf")
    return SchemaReference(
        subject=subject or topic.strip("/").replace("/", "-"),
        version=version,
        min_version=lowest,
        definition=None if file is None else file.read_bytes(),
        kind=kind,
    )


# --- consume ------------------------------------------------------------------------------------------


def consume(
    subscription: Annotated[str, typer.Option("--subscription", "-m", help="The subscription; made if it is new.")],
    service_addr: ServiceAddr = DEFAULT_SERVICE,
    topic: Topic = DEFAULT_TOPIC,
    consumer: Annotated[
        str | None,
        typer.Option(
            "--consumer",
            "-n",
            help="The consumer's name. The same name twice: the later takes over.",
            show_default="one of its own",
        ),
    ] = None,
    sub_type: Annotated[
        SubType,
        typer.Option(
            "--sub-type",
            metavar="TYPE",
            parser=parse_sub_type,
            help="How consumers share messages: each message goes to one of them (shared), or each key to the same one "
            "(key_shared), or one gets all (exclusive; failover: the next takes over). Of a new subscription.",
            autocompletion=lambda: list(SubType),
        ),
    ] = SubType.shared,
    key_filter: Annotated[
        list[str] | None, typer.Option("--key-filter", help="With key_shared: only keys like this, as eu-*.")
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
    once: Annotated[
        bool,
        typer.Option("--once", help="Stop when caught up: when all that a reliable topic had when it began is done."),
    ] = False,
    ack: Annotated[bool, typer.Option("--ack/--no-ack", help="Acknowledge each message once it is shown.")] = True,
    protocol: ProtocolOption = None,
    output: OutputOption = Output.table,
) -> None:
    """Print messages as they come, and acknowledge them, until Ctrl-C.

    danube consume -t /default/orders -m my-subscription

    danube consume -t /default/orders -m from-the-first --start earliest

    danube consume -t /default/orders -m my-subscription --once

    A new subscription gets what is published from now on, or from --start on; one that exists goes on where it was
    (`danube admin subscriptions seek` moves it). With --count and --timeout the exit code is 1 if fewer came.
    """
    ends_with_reader()
    way, address = address_of(service_addr, protocol)
    options = ConsumeOptions(
        topic=TopicName(topic),
        consumer=consumer or f"{subscription[:100]}-{token_hex(4)}",
        subscription=subscription,
        sub_type=sub_type.value,
        key_filters=tuple(key_filter or ()),
        start=parse_place("--start", start),
        count=count,
        timeout_seconds=timeout,
        once=once,
        ack=ack,
    )
    screen = Screen(output)
    failure: BaseException | None = None
    try:
        complete = asyncio.run(_consume(way, address, options, screen))
    except BaseException as error:
        failure = error
        raise
    finally:
        screen.print_summary(failure)
    if not complete:
        raise typer.Exit(Exit.NOT_GOOD)


async def _consume(way: Protocol, address: str, options: ConsumeOptions, screen: Screen) -> bool:
    if way is Protocol.grpc:
        async with GrpcConnection(address) as connection:
            return await over_grpc.consume(connection, options, screen.show, screen.note)
    from pydanube.cli import native  # brings Arrow along

    return await native.consume(address, options, screen.show, screen.note)


class Screen:
    """Shows messages, and says at the end how many they were."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._progress = ProgressLine("received")

    def show(self, message: Received) -> None:
        self._progress.add(len(message.payload))
        if self._output is Output.json:
            print_json(_fields(message))
            return
        kind = "reliable message" if message.is_reliable else "message"
        print(f"Received {kind}: {payload_text(message.payload)}")
        facts = [
            f"topic {message.topic}",
            f"offset {message.offset}",
            f"{len(message.payload)} {noun(len(message.payload), 'byte')}",
        ]
        if message.routing_key is not None:
            facts.append(f"key {message.routing_key}")
        print(f"  {', '.join(facts)}")
        if message.attributes:
            print("  Attributes: " + ", ".join(f"{key}: {value}" for key, value in sorted(message.attributes.items())))
        sys.stdout.flush()

    def note(self, sentence: str) -> None:
        self._progress.clear()
        print(f"danube: {sentence}", file=sys.stderr, flush=True)

    def print_summary(self, failure: BaseException | None = None) -> None:
        """`failure` ended it early. A refusal before the first message has no summary: nothing was tried."""
        self._progress.clear()
        if isinstance(failure, DanubeError) and not self._progress.count:
            return
        messages, size_bytes = self._progress.count, self._progress.size_bytes
        total = f"Total received: {messages} {noun(messages, 'message')}, {size_bytes} {noun(size_bytes, 'byte')}"
        print(total, file=sys.stderr if self._output is Output.json else sys.stdout, flush=True)


def _fields(message: Received) -> dict[str, object]:
    return {
        "topic": message.topic,
        "offset": message.offset,
        "producer_name": message.producer_name,
        "publish_time_ms": message.publish_time_ms,
        "routing_key": message.routing_key,
        "attributes": dict(message.attributes),
        **payload_fields(message.payload),
    }
