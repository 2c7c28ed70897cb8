"""`danube admin status`, `connections`, `events`: how the cluster is doing, who is connected, what happened.

danube admin status                            what is wrong, in words, and every broker; exit code 9 if it is critical
danube admin subscriptions list                all of the cluster, furthest behind first
danube admin connections --topic /default/a    producers and consumers: who, from where, since when
danube admin events                            what happened: brokers that came and went, drains, moves, orders
danube admin brokers forget 4711               a broker that will not come back is not listed any more

What is not known is printed as `unknown` or `-`, and is null in JSON; it is never 0.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, TypeAlias

import typer
from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text

from pydanube.admin import calls, values
from pydanube.admin.partitioned import (
    ConnectionGroup,
    SubscriptionGroup,
    connection_groups,
    partition_count,
    subscription_groups,
)
from pydanube.cli.admin import app, ask, brokers
from pydanube.cli.cluster import BrokerArgument
from pydanube.cli.completion import namespace_names, topic_names
from pydanube.cli.exits import Exit
from pydanube.cli.output import PIPE_WIDTH, Output, OutputOption, id_text, print_done, print_rows
from pydanube.cli.subscriptions import app as subscriptions
from pydanube.core.cluster.conditions import Severity, words
from pydanube.core.cluster.conditions import count as counted
from pydanube.errors import ConfigError

UNKNOWN: Final = "unknown"

TopicOption = Annotated[str, typer.Option(help="Only this topic.", autocompletion=topic_names)]
COUNT_MAX: Final = 10_000
CountOption = Annotated[int, typer.Option("--count", "-c", min=1, max=COUNT_MAX, help="At most so many.")]
PartitionsOption = Annotated[
    bool, typer.Option("--partitions", help="Every partition of a partitioned topic in a line of its own.")
]
Found: TypeAlias = values.SubscriptionList | values.ConnectionList


@app.command("status")
def status(output: OutputOption = Output.table) -> None:
    """What is wrong, in words, and how every broker is doing. Exit code 9 if something is critical."""
    found = ask(calls.cluster_status())
    if output is Output.json:
        print(json.dumps(status_fields(found), indent=2, ensure_ascii=False))
    else:
        _print_status(found)
    if any(each.severity == Severity.CRITICAL for each in found.conditions):
        raise typer.Exit(Exit.CRITICAL)


def status_fields(found: values.ClusterStatus) -> dict[str, object]:
    return {
        "conditions": [
            {
                "name": each.name,
                "severity": each.severity,
                "sentence": each.sentence,
                "todo": each.todo,
                "subject": each.subject or None,
                "since": _time(each, "since_us"),
                "runbook": each.runbook,
            }
            for each in found.conditions
        ],
        "brokers_alive": found.brokers_alive,
        "brokers_known": found.brokers_known,
        "topics": found.topics,
        "topics_unserved": found.topics_unserved,
        "lag_messages": int(found.lag_messages.known) if found.lag_messages.is_complete else None,
        "lag_messages_at_least": int(found.lag_messages.known),
        "orphan_messages_max": found.orphan_messages_max,
        "brokers": [_broker_fields(each) for each in found.brokers],
    }


def _broker_fields(each: values.BrokerState) -> dict[str, object]:
    own = each.status if each.HasField("status") else None
    numbers = (
        "cpu_share", "memory_bytes", "disk_used_bytes", "disk_free_bytes", "log_size_bytes", "log_limit_bytes",
        "upload_lag_seconds", "lease_age_seconds",
    )  # fmt: skip
    return {
        "broker_id": id_text(each.broker_id),
        "broker_addr": each.address,
        "stream_url": (own.stream_url if own is not None else each.stream_url) or None,
        "life": each.life,
        "since": _time(each, "since_us"),
        "why": each.why or None,
        "status": each.mode or None,
        "reason": each.reason or None,
        "is_leader": each.is_leader,
        "topics": each.topics,
        "version": own.version or None if own is not None else None,
        "started": _time(own, "started_us") if own is not None else None,
        **{name: _optional(own, name) for name in numbers},
        "publish_ms": _latency(own.publish if own is not None else None),
        "commit_ms": _latency(own.commit if own is not None else None),
        "connections": own.connections if own is not None else None,
    }


def _latency(latency: values.Latency | None) -> dict[str, float | None]:
    return {name: _optional(latency, f"{name}_ms") for name in ("p50", "p95", "p99")}


def _print_status(found: values.ClusterStatus) -> None:
    console = Console() if sys.stdout.isatty() else Console(width=PIPE_WIDTH, no_color=True)
    if not found.conditions:
        console.print(Text("All is well.", style="green"))
    for each in found.conditions:
        style = "bold red" if each.severity == Severity.CRITICAL else "yellow"
        console.print(Text(each.severity.upper(), style=style), Text(f"{each.sentence[:1].upper()}{each.sentence[1:]}"))
        console.print(Text(f"    {each.todo} ({each.runbook})", style="dim"))
    lag = found.lag_messages
    lag_text = (
        counted(lag.known, "message") if lag.is_complete else f"{UNKNOWN} (at least {counted(lag.known, 'message')})"
    )
    verb = "answers" if found.brokers_known == 1 else "answer"
    unserved = f", {found.topics_unserved:,} without a server" if found.topics_unserved else ""
    alive = f"{found.brokers_alive} of {counted(found.brokers_known, 'broker')} {verb}"
    console.print(Text(f"{alive}; {counted(found.topics, 'topic')}{unserved}; lag {lag_text}"))
    columns = ("broker", "address", "state", "topics", "version", "up", "cpu", "disk", "publish p99", "commit p99")
    print_rows([_broker_row(each) for each in found.brokers], columns, Output.table)


def _broker_row(each: values.BrokerState) -> dict[str, object]:
    own = each.status if each.HasField("status") else None
    since = f" for {_ago(each, 'since_us')}" if each.HasField("since_us") else ""
    state = f"{each.mode}{', leads' if each.is_leader else ''}" if each.life == "answers" else f"{each.life}{since}"
    used, free = _optional(own, "disk_used_bytes"), _optional(own, "disk_free_bytes")
    disk = f"{used / (used + free):.0%} used" if used is not None and free is not None and used + free else None
    cpu = _optional(own, "cpu_share")
    return {
        "broker": id_text(each.broker_id),
        "address": each.address.rpartition("://")[2],
        "state": state,
        "topics": each.topics,
        "version": own.version or None if own is not None else None,
        "up": _ago(own, "started_us") if own is not None else None,
        "cpu": f"{cpu:.0%}" if cpu is not None else None,
        "disk": disk,
        "publish p99": _ms(own.publish if own is not None else None),
        "commit p99": _ms(own.commit if own is not None else None),
    }


def _ms(latency: values.Latency | None) -> str | None:
    value = _optional(latency, "p99_ms")
    return None if value is None else f"{value:,.1f} ms"


@brokers.command("forget")
def forget_broker(broker: BrokerArgument = None, output: OutputOption = Output.table) -> None:
    """A broker that is gone and will not come back is not listed any more."""
    if broker is None or not broker.isdecimal():
        raise ConfigError("BROKER", broker, "the id of a broker that is gone: `danube admin status` shows it")
    ask(calls.forget_broker(int(broker)))
    print_done(f"Broker {broker} is forgotten", output, broker_id=broker)


# --- subscriptions --------------------------------------------------------------------------------------


@subscriptions.command("list")
def list_subscriptions(
    namespace: Annotated[str, typer.Option(help="Only this namespace.", autocompletion=namespace_names)] = "",
    topic: TopicOption = "",
    count: CountOption = 1_000,
    partitions: PartitionsOption = False,
    output: OutputOption = Output.table,
) -> None:
    """All subscriptions of the cluster, furthest behind first, in messages and in time.

    Those of a partitioned topic are one line. JSON has every partition.
    """
    found = ask(calls.list_subscriptions(COUNT_MAX, namespace=namespace, topic=topic))
    if output is Output.json:
        _print_all("subscriptions", [_subscription_fields(each) for each in found.subscriptions[:count]], found, count)
        return
    if partitions:
        groups = [SubscriptionGroup(each, each.lag_messages) for each in found.subscriptions]
    else:
        groups = subscription_groups(found)
    columns = ("topic", "subscription", "type", "lag", "behind", "caught up in", "consumers", "unacked", "partitions")
    print_rows([_subscription_row(each) for each in groups[:count]], columns, Output.table)
    _print_rest("subscriptions", len(groups) - count, found)


def _subscription_fields(each: values.SubscriptionState) -> dict[str, object]:
    return {
        "topic": each.topic,
        "subscription": each.name,
        "type": each.type,
        "broker_id": id_text(each.broker_id),
        "lag_messages": _optional(each, "lag_messages"),
        "lag_seconds": _optional(each, "lag_seconds"),
        "catch_up_seconds": _optional(each, "catch_up_seconds"),
        "course": each.course or None,
        **{name: getattr(each, name) for name in ("consumers", "unacked", "waiting", "is_blocked", "missing")},
    }


def _subscription_row(group: SubscriptionGroup) -> dict[str, object]:
    each = group.state
    lag, seconds, hope = (_optional(each, name) for name in ("lag_messages", "lag_seconds", "catch_up_seconds"))
    behind = words(seconds) if seconds is not None else UNKNOWN if lag or group.unanswered else None
    known = f"{lag:,.0f}" if lag is not None else None
    return {
        "topic": each.topic,
        "subscription": each.name,
        "type": each.type,
        "lag": f"{UNKNOWN}, at least {group.lag_at_least:,}" if group.unanswered else known,
        "behind": behind,
        "caught up in": f"about {words(hope)}" if hope is not None else each.course.replace("_", " ") or None,
        "consumers": each.consumers,
        "unacked": each.unacked,
        "partitions": partition_count(group) or None,
    }


# --- connections ----------------------------------------------------------------------------------------


@app.command("connections")
def connections(
    topic: TopicOption = "",
    count: CountOption = 1_000,
    partitions: PartitionsOption = False,
    output: OutputOption = Output.table,
) -> None:
    """Who is connected: producers and consumers, from where, since when, with what client.

    One that is connected to several partitions of a topic is one line. JSON has every partition.
    """
    found = ask(calls.list_connections(topic, COUNT_MAX))
    if output is Output.json:
        _print_all("connections", [_connection_fields(each) for each in found.connections[:count]], found, count)
        return
    groups = [ConnectionGroup(each) for each in found.connections] if partitions else connection_groups(found)
    columns = ("topic", "kind", "name", "subscription", "address", "since", "client", "unacked", "rate", "partitions")
    print_rows([_connection_row(each) for each in groups[:count]], columns, Output.table)
    _print_rest("connections", len(groups) - count, found)


def _connection_fields(each: values.ConnectionState) -> dict[str, object]:
    return {
        "topic": each.topic,
        "kind": each.kind,
        "name": each.name,
        **{name: getattr(each, name) or None for name in ("subscription", "address", "client", "protocol")},
        "since": _time(each, "since_us"),
        "unacked": _optional(each, "unacked"),
        "messages_per_second": _optional(each, "rate"),
        "broker_id": id_text(each.broker_id),
    }


def _connection_row(group: ConnectionGroup) -> dict[str, object]:
    each = group.state
    rate, unacked = _optional(each, "rate"), _optional(each, "unacked")
    return {
        "topic": each.topic,
        "kind": each.kind,
        "name": each.name,
        "subscription": each.subscription or None,
        "address": each.address or UNKNOWN,
        "since": f"{_ago(each, 'since_us')} ago" if each.HasField("since_us") else UNKNOWN,
        "client": " ".join(part for part in (each.client, each.protocol) if part) or UNKNOWN,
        "unacked": f"{unacked:,.0f}" if unacked is not None else None,
        "rate": f"{rate:,.1f}/s" if rate is not None else UNKNOWN,
        "partitions": partition_count(group) or None,
    }


# --- events ---------------------------------------------------------------------------------------------


@app.command("events")
def events(count: CountOption = 100, output: OutputOption = Output.table) -> None:
    """What happened, newest first: brokers that came and went, drains, moves, orders and who gave them."""
    found = ask(calls.list_events(count)).events
    rows = [
        {"time": _iso(each.time_us), "kind": each.kind, "sentence": each.sentence, "by": each.by or None}
        for each in found
    ]
    print_rows(rows, ("time", "kind", "sentence", "by"), output)


# --- helpers --------------------------------------------------------------------------------------------


def _print_all(name: str, rows: Sequence[Mapping[str, object]], found: Found, count: int) -> None:
    silent = [
        {"broker_id": id_text(each.broker_id), "broker_addr": each.address, "why": each.why, "topics": each.topics}
        for each in found.unknown
    ]
    left_out = found.left_out + max(_size(found) - count, 0)
    told = {name: rows, "left_out": left_out, "unknown": silent, "unserved": found.unserved}
    print(json.dumps(told, indent=2, ensure_ascii=False))


def _size(found: Found) -> int:
    return len(found.subscriptions if isinstance(found, values.SubscriptionList) else found.connections)


def _print_rest(what: str, more: int, found: Found) -> None:
    """On standard error, so that scripts that count lines do not count these."""
    left_out = found.left_out + max(more, 0)
    if left_out:
        print(f"… and {left_out:,} more; --count shows more of them", file=sys.stderr)
    for each in found.unknown:
        who = each.address.rpartition("://")[2] or str(each.broker_id)
        print(f"unknown: the {what} of {counted(each.topics, 'topic')} at broker {who}: {each.why}", file=sys.stderr)
    if found.unserved:
        print(f"unknown: the {what} of {counted(found.unserved, 'topic')} that no broker serves", file=sys.stderr)


def _optional(message: Message | None, name: str) -> Any:
    return getattr(message, name) if message is not None and message.HasField(name) else None


def _time(message: Message, name: str) -> str | None:
    value = _optional(message, name)
    return None if value is None else _iso(value)


def _iso(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ago(message: Message, name: str) -> str | None:
    value = _optional(message, name)
    return None if value is None else words(datetime.now(UTC).timestamp() - value / 1e6)
