"""`danube top`: brokers and topics, busiest first, every two seconds, until Ctrl-C.

danube top --sort lag                          who is behind
danube top --partitions                        every partition of a partitioned topic in a line of its own
danube top --once --output json                for scripts: one look, rates over one interval
danube top --output json --interval 10         for scripts: a line per look

It asks one broker for the others and all of them for their metrics. A partitioned topic is one line, `clicks (3)`; `*`
says that several brokers have its partitions. What is wrong stands first, in red; a broker that
goes away is shown as such, and sums without what it has are at least so much (≥).
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pydanube.cli.contexts import DEFAULT_ENDPOINT, resolve
from pydanube.cli.output import PIPE_WIDTH, Output, OutputOption, print_json
from pydanube.cli.streams import ends_with_reader
from pydanube.errors import DanubeError

if TYPE_CHECKING:
    from pydanube.admin.gateway import Gateway, KnownBroker, TopicRow
    from pydanube.admin.samples import Samples
    from pydanube.admin.series import Thing
    from pydanube.admin.values import BrokerState, ClusterStatus, ReportedCondition

LINES_AROUND: Final = 7  # that are neither brokers nor topics
TOPICS_MIN: Final = 3
UNKNOWN_LAG: Final = -1
CRITICAL: Final = "critical"
CONDITIONS_MAX: Final = 5  # lines


class Sort(StrEnum):
    in_ = "in"
    out = "out"
    lag = "lag"
    name = "name"
    broker = "broker"


def top(
    endpoint: Annotated[
        str,
        typer.Option(
            envvar="DANUBE_ADMIN_ENDPOINT", help="A broker's admin address; it tells of the others.", callback=resolve
        ),
    ] = DEFAULT_ENDPOINT,
    sort: Annotated[
        Sort, typer.Option("--sort", "-s", help="Topics by messages in or out, lag, name or broker.")
    ] = Sort.in_,
    interval: Annotated[float, typer.Option(min=0.5, max=3600, help="Seconds between looks.")] = 2.0,
    namespace: Annotated[str | None, typer.Option(help="Only topics of this namespace.")] = None,
    count: Annotated[
        int | None, typer.Option("--count", "-c", min=1, help="Topics to show.", show_default="what fits; all in JSON")
    ] = None,
    partitions: Annotated[
        bool,
        typer.Option("--partitions", help="Every partition of a partitioned topic in a line of its own, as in JSON."),
    ] = False,
    once: Annotated[bool, typer.Option("--once", help="One look, then exit. Takes one interval.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Brokers and topics as they are now: messages a second, bytes, lag. Until Ctrl-C.

    danube top --sort lag

    danube top --once --output json
    """
    ends_with_reader()
    look = Look(sort, namespace, count, partitions=partitions)
    try:
        asyncio.run(_run(endpoint, look, interval, once, output))
    except KeyboardInterrupt:
        if once:
            raise  # it has shown nothing yet


async def _run(endpoint: str, look: Look, interval: float, once: bool, output: Output) -> None:
    # Here, so that other commands need not wait for it.
    from pydanube.admin.gateway import Gateway
    from pydanube.admin.sampler import Sampler

    async with AsyncExitStack() as stack:
        gateway = Gateway(endpoint, flag="--endpoint", cache_seconds=min(interval, 3.0))
        stack.push_async_callback(gateway.close)
        await gateway.brokers()  # a broker that is not there is an error here, and a red line later
        sampler = Sampler(gateway.brokers)

        async def see() -> None:
            await sampler.round()
            try:
                look.update(await gateway.brokers(), await gateway.topics(), sampler.samples, await _status(gateway))
            except DanubeError as error:
                look.failure = str(error)

        await see()
        if once:
            await asyncio.sleep(interval)
            await see()
            _print_once(look, output)
        elif output is Output.json:
            await _repeat(see, lambda: print_json(look.fields()), interval)
        else:
            console = Console()

            def draw() -> RenderableType:
                return look.draw(console.width, console.height)

            with Live(draw(), console=console, screen=console.is_terminal, auto_refresh=False) as live:
                await _repeat(see, lambda: live.update(draw(), refresh=True), interval)


async def _status(gateway: Gateway) -> ClusterStatus | None:
    """None: the broker does not tell, as one of an earlier version."""
    try:
        return await gateway.status()
    except DanubeError:
        return None


def _print_once(look: Look, output: Output) -> None:
    if output is Output.json:
        print(json.dumps(look.fields(), indent=2, ensure_ascii=False))
        return
    if sys.stdout.isatty():
        console = Console()
        console.print(look.draw(console.width))
    else:
        Console(width=PIPE_WIDTH, no_color=True).print(look.draw())


async def _repeat(see: Callable[[], Awaitable[None]], show: Callable[[], None], interval: float) -> None:
    while True:
        await asyncio.sleep(interval)
        await see()
        show()


class Look:
    """What was seen last, as JSON and as a picture."""

    def __init__(
        self, sort: Sort, namespace: str | None = None, count: int | None = None, *, partitions: bool = False
    ) -> None:
        self._sort = sort
        self._namespace = namespace
        self._count = count
        self._partitions = partitions  # in lines of their own
        self._brokers: list[KnownBroker] = []
        self._topics: list[TopicRow] = []
        self._samples: Samples | None = None
        self._status: ClusterStatus | None = None
        self.failure = ""  # why no broker could be asked

    def update(
        self,
        brokers: list[KnownBroker],
        topics: list[TopicRow],
        samples: Samples,
        status: ClusterStatus | None = None,
    ) -> None:
        self._status = status
        self._brokers = sorted(brokers, key=lambda each: each.broker_id)
        self._topics = [each for each in topics if self._namespace is None or each.namespace == self._namespace]
        self._samples = samples
        self.failure = ""

    # --- for scripts ------------------------------------------------------------------------------------

    def fields(self) -> dict[str, object]:
        topics = self._sorted()
        return {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "failure": self.failure or None,
            "conditions": None if self._status is None else [_condition(each) for each in self._status.conditions],
            "is_complete": self._is_complete,
            "missing_brokers": [
                {"broker_id": str(each.broker_id), "broker_addr": each.address, "life": each.life}
                for each in self._missing()
            ],
            "brokers": [self._broker(each) for each in self._brokers],
            "topics": topics if self._count is None else topics[: self._count],
            "topics_total": len(topics),
        }

    @property
    def _is_complete(self) -> bool:
        """Whether sums have everything in them."""
        silent = self._samples is not None and self._samples.failures
        return not silent and (self._status is None or self._status.lag_messages.is_complete)

    def _missing(self) -> list[BrokerState]:
        """Brokers of the last day that are not registered any more."""
        known = {each.broker_id for each in self._brokers}
        return [each for each in self._status.brokers if str(each.broker_id) not in known] if self._status else []

    def _broker(self, broker: KnownBroker) -> dict[str, Any]:
        assert self._samples is not None
        thing = self._samples.broker(broker.broker_id)
        return {
            "broker_id": broker.broker_id,
            "broker_addr": broker.address,
            "status": broker.status,
            "is_leader": broker.is_leader,
            "topics": sum(each.broker_id == broker.broker_id for each in self._topics),
            **_rates(thing),
            "failure": self._samples.failures.get(broker.broker_id),
        }

    def _topic(self, topic: TopicRow) -> dict[str, Any]:
        assert self._samples is not None
        thing = self._samples.topic(topic.name)
        numbers: dict[str, float | None] = {
            **_rates(thing),
            "lag": thing.lag,
            "producers": int(thing.level("producers")),
            "consumers": int(thing.level("consumers")),
            "subscriptions": int(thing.level("subscriptions")),
        }
        is_known = topic.broker_id not in self._samples.failures
        return {
            "topic": topic.name,
            "broker_id": topic.broker_id or None,
            "delivery": topic.delivery or None,
            **(numbers if is_known else dict.fromkeys(numbers)),
            "is_known": is_known,  # false: its broker does not answer, and the numbers are null
        }

    def _sorted(self, *, partitions: bool = True) -> list[dict[str, Any]]:
        rows = [self._topic(each) for each in self._topics]
        if not partitions:
            rows = _whole_topics(rows)
        keys: Mapping[Sort, Callable[[dict[str, Any]], Any]] = {
            Sort.in_: lambda row: -(row["messages_in_per_second"] or 0.0),
            Sort.out: lambda row: -(row["messages_out_per_second"] or 0.0),
            Sort.lag: lambda row: -(UNKNOWN_LAG if row["lag"] is None else row["lag"]),
            Sort.broker: lambda row: row["broker_id"] or "",
            Sort.name: lambda row: "",
        }
        return sorted(rows, key=lambda row: (keys[self._sort](row), row["topic"]))

    # --- for people -------------------------------------------------------------------------------------

    def draw(self, width: int | None = None, height: int | None = None) -> RenderableType:
        """Not more than fits into `width` columns and `height` lines; None: all of it."""
        if self._samples is None:
            return Text(self.failure or "looking…")
        rows = self._sorted(partitions=self._partitions)
        conditions = self._conditions()
        around = LINES_AROUND + len(self._brokers) + len(self._missing()) + len(conditions)
        rows_max = len(rows) if height is None else max(TOPICS_MIN, height - around)
        shown = rows[: rows_max if self._count is None else min(rows_max, self._count)]
        numbers = {broker.broker_id: str(number) for number, broker in enumerate(self._brokers, 1)}
        left = len(rows) - len(shown)
        more = Text(f"… and {left:,} more topics", style="dim") if left else Text()
        failure = Text(self.failure, style="red", no_wrap=True, overflow="ellipsis")
        topics = _topic_table(shown, numbers, self._sort, width)
        return Group(self._title(), failure, *conditions, self._broker_table(width), Text(), topics, more)

    def _conditions(self) -> list[Text]:
        found = list(self._status.conditions) if self._status is not None else []
        lines = [
            Text(
                f"{each.severity}: {each.sentence}",
                style="bold red" if each.severity == CRITICAL else "yellow",
                no_wrap=True,
                overflow="ellipsis",
            )
            for each in found[:CONDITIONS_MAX]
        ]
        more = len(found) - CONDITIONS_MAX
        return [*lines, Text(f"… and {more} more: danube admin status", style="dim")] if more > 0 else lines

    def _title(self) -> Text:
        assert self._samples is not None
        cluster = self._samples.cluster
        title = Text("danube top", style="bold", no_wrap=True, overflow="ellipsis")
        in_, out = _number(cluster.messages_in), _number(cluster.messages_out)
        if self._is_complete:
            numbers = f"in {in_}/s, {_size(cluster.bytes_in)}/s  out {out}/s  lag {_lag(cluster.lag)}"
        else:  # what a silent broker has is not in it
            numbers = f"in ≥ {in_}/s  out ≥ {out}/s  lag unknown, ≥ {cluster.lag or 0:,}"
        title.append(f"  {datetime.now(UTC):%H:%M:%S} UTC  {numbers}", style="not bold")
        return title

    def _broker_table(self, width: int | None) -> Table:
        rows = []
        for number, broker in enumerate(self._brokers, 1):
            row = self._broker(broker)
            state = Text(f"{broker.status}{', leads' if broker.is_leader else ''}")
            if row["failure"]:
                state = Text("does not answer", style="red")
            texts = (str(number), broker.broker_id, broker.address.rpartition("://")[2])
            rates = (row["messages_in_per_second"], row["messages_out_per_second"])
            cells = [Text("?") if row["failure"] else Text(_number(each)) for each in rates]
            rows.append([*map(Text, texts), state, Text(str(row["topics"])), *cells])
        for each in self._missing():
            texts = ("", str(each.broker_id), each.address.rpartition("://")[2])
            state = Text(each.life, style="yellow" if each.life == "stopped" else "red")
            rows.append([*map(Text, texts), state, Text(str(each.topics)), Text("?"), Text("?")])
        return _table(("", "broker", "address", "state"), ("topics", "in/s", "out/s"), rows, width, cut=2)


def _whole_topics(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Partitions added up. As everywhere (admin/partitioned.py), a sum of which a part is not known is not known."""
    from pydanube.admin.partitioned import base_of

    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(base_of(row["topic"]), []).append(row)
    return [own[0] if own[0]["topic"] == base else _whole(base, own) for base, own in groups.items()]


def _whole(base: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    brokers = {part["broker_id"] for part in parts}
    lags = [part["lag"] for part in parts if part["lag"] is not None]
    is_known = all(part["is_known"] for part in parts)
    rates = [name for name in parts[0] if name.endswith("_per_second")]
    sums = {name: sum(part[name] for part in parts) if is_known else None for name in rates}
    return {
        "topic": base,
        "partitions": len(parts),
        "brokers": len(brokers),
        "broker_id": brokers.pop() if len(brokers) == 1 else None,
        **sums,
        "lag": sum(lags) if lags and is_known else None,
        "subscriptions": max(part["subscriptions"] for part in parts) if is_known else None,  # each has all partitions
        "is_known": is_known,
    }


def _condition(condition: ReportedCondition) -> dict[str, object]:
    return {
        "name": condition.name,
        "severity": condition.severity,
        "sentence": condition.sentence,
        "todo": condition.todo,
        "subject": condition.subject or None,
        "runbook": condition.runbook,
    }


def _rates(thing: Thing) -> dict[str, float]:
    return {
        "messages_in_per_second": round(thing.messages_in, 1),
        "messages_out_per_second": round(thing.messages_out, 1),
        "bytes_in_per_second": round(thing.bytes_in, 1),
        "bytes_out_per_second": round(thing.bytes_out, 1),
    }


def _table(
    texts: tuple[str, ...], numbers: tuple[str, ...], rows: list[list[Text]], width: int | None, *, cut: int
) -> Table:
    """If it is too wide for `width`, the column `cut` is made narrower: numbers are always whole."""
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1))
    widths = [max([len(name), *(len(row[place]) for row in rows)]) for place, name in enumerate((*texts, *numbers))]
    if width is not None:
        others = sum(widths) - widths[cut] + 2 * (len(widths) - 1)
        widths[cut] = max(1, min(widths[cut], width - others))
    for name, own, justify in zip((*texts, *numbers), widths, ("left",) * len(texts) + ("right",) * 9, strict=False):
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", width=own)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*row)
    return table


def _topic_table(rows: list[dict[str, Any]], numbers: Mapping[str, str], sort: Sort, width: int | None) -> Table:
    def head(name: str, by: Sort) -> str:
        return f"{name}↓" if by is sort else name

    columns = ("at", head("in/s", Sort.in_), head("out/s", Sort.out), "bytes/s", head("lag", Sort.lag), "subs")
    cells = []
    for row in rows:
        name = f"{row['topic']} ({row['partitions']})" if "partitions" in row else row["topic"]
        owner = "*" if row.get("brokers", 1) > 1 else numbers.get(row["broker_id"] or "", "?")
        if not row["is_known"]:
            unknown = [Text("?", style="red") for _ in columns[1:]]
            cells.append([Text(name), Text(owner, style="red"), *unknown])
            continue
        is_behind = (row["lag"] or 0) > row["messages_in_per_second"]
        cells.append(
            [
                Text(name),
                Text(owner, style="red" if owner == "?" else ""),
                Text(_number(row["messages_in_per_second"])),
                Text(_number(row["messages_out_per_second"])),
                Text(_size(row["bytes_in_per_second"])),
                Text(_lag(row["lag"]), style="yellow" if is_behind else ""),
                Text(str(row["subscriptions"])),
            ]
        )
    return _table(("topic",), columns, cells, width, cut=0)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def _lag(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _size(value: float) -> str:
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if value >= 10 or value == 0 or unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} GB"
