"""`danube admin brokers` and `danube admin cluster`: drain and activate brokers, even out the load, manage members.

danube admin brokers unload 4711 --dry-run     how many topics would move
danube admin brokers unload 4711               moves them; the broker is drained afterwards
danube admin brokers activate 4711             it may be given topics again
danube admin brokers rebalance                 and some of them move back
danube admin cluster status                    the members of the metadata store

Names and lines are the reference's.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from pydanube.admin import calls, values
from pydanube.cli.admin import ask, brokers, connected
from pydanube.cli.completion import broker_ids
from pydanube.cli.exits import Exit
from pydanube.cli.output import Output, OutputOption, id_text, print_done, print_fields, print_rows
from pydanube.client.grpc.connection import CALL_SECONDS, GrpcConnection
from pydanube.errors import ConfigError, DanubeError, Unreachable

HELP: Final = "The members of the metadata store: status, add-node, promote-node, remove-node."
WATCH_SECONDS: Final = 0.5

app = typer.Typer(no_args_is_help=True)

BrokerArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="BROKER", help="Its id: `brokers list` shows it.", show_default=False, autocompletion=broker_ids
    ),
]
BrokerOption = Annotated[
    str | None, typer.Option("--broker-id", help="The same, as an option.", autocompletion=broker_ids)
]
NodeOption = Annotated[int, typer.Option("--node-id", min=0, help="By its id: `cluster status` shows it.")]


# --- brokers ------------------------------------------------------------------------------------------


@brokers.command("unload")
def unload_broker(
    broker: BrokerArgument = None,
    broker_id: BrokerOption = None,
    max_parallel: Annotated[int, typer.Option(min=1, help="So many topics move at once.")] = 1,
    namespaces_include: Annotated[list[str] | None, typer.Option(help="Only topics of these namespaces.")] = None,
    namespaces_exclude: Annotated[list[str] | None, typer.Option(help="No topic of these namespaces.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say how many topics would move.")] = False,
    timeout_seconds: Annotated[
        int, typer.Option(min=1, help="How long to wait. What is pending then goes on moving.")
    ] = 60,
    output: OutputOption = Output.table,
) -> None:
    """Move a broker's topics to others. It is drained afterwards: it gets no topics until `brokers activate`."""
    request = values.UnloadBrokerRequest(
        broker_id=_one_of(broker, broker_id),
        max_parallel=max_parallel,
        namespaces_include=namespaces_include or (),
        namespaces_exclude=namespaces_exclude or (),
        dry_run=dry_run,
        timeout_seconds=timeout_seconds,
    )
    found = asyncio.run(_unload(request))
    numbers = ("started", "total", "succeeded", "failed", "pending")
    if output is Output.json:
        fields = {name: getattr(found, name) for name in numbers}
        print_fields({**fields, "failed_topics": list(found.failed_topics)}, output)
    else:
        texts = (f"{name}={str(getattr(found, name)).lower()}" for name in numbers)
        print(f"UnloadBroker {' '.join(texts)}")
        for line in found.failed_topics:
            print(f"Failed: {line}")
    if found.failed:
        raise typer.Exit(Exit.NOT_GOOD if found.succeeded else Exit.REFUSED)


async def _unload(request: values.UnloadBrokerRequest) -> values.DrainResult:
    """The answer comes at the end; until then, on a terminal, how many topics the broker still has."""
    seconds = request.timeout_seconds + CALL_SECONDS
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        async with connected() as broker:
            watching = asyncio.create_task(_watch(broker, request.broker_id, bar)) if console.is_terminal else None
            try:
                return await broker.ask(calls.drain_broker(request), seconds=seconds)
            finally:
                if watching is not None:
                    watching.cancel()
                    await asyncio.gather(watching, return_exceptions=True)


async def _watch(broker: GrpcConnection, broker_id: str, bar: Progress) -> None:
    """Until it is cancelled. What cannot be asked is not shown."""
    task = bar.add_task("moving topics", total=None)
    total = 0
    while True:
        with suppress(DanubeError):
            left = len((await broker.ask(calls.topics_of_broker(broker_id))).topics)
            total = max(total, left)
            bar.update(task, total=total, completed=total - left)
        await asyncio.sleep(WATCH_SECONDS)


@brokers.command("activate")
def activate_broker(
    broker: BrokerArgument = None,
    broker_id: BrokerOption = None,
    reason: Annotated[str, typer.Option(help="Why; it is kept with the broker's state.")] = "",
    output: OutputOption = Output.table,
) -> None:
    """Let a drained broker be given topics again."""
    chosen = _one_of(broker, broker_id)
    ask(calls.activate_broker(chosen, reason))
    print_done("ActivateBroker success=true", output, broker_id=chosen)


def _one_of(argument: str | None, option: str | None) -> str:
    if (argument is None) == (option is None):
        raise ConfigError("BROKER", argument, "the id of one broker, once: `brokers list` shows those that are")
    return argument or option or ""


@brokers.command("balance")
def balance(output: OutputOption = Output.table) -> None:
    """How evenly the load lies on the active brokers."""
    found = ask(calls.balance())
    fields = {
        "assignment_strategy": found.assignment_strategy,
        "coefficient_of_variation": round(found.coefficient_of_variation, 4),
        "mean_load": round(found.mean_load, 4),
        "max_load": round(found.max_load, 4),
        "min_load": round(found.min_load, 4),
        "std_deviation": round(found.std_deviation, 4),
        "broker_count": found.broker_count,
    }
    columns = ("broker_id", "load", "topic_count", "is_overloaded", "is_underloaded")
    rows = [
        {**{name: getattr(each, name) for name in columns}, "broker_id": id_text(each.broker_id)}
        for each in found.brokers
    ]
    if output is Output.json:
        print_fields({**fields, "brokers": rows}, output)
        return
    print_fields(fields, output)
    print_rows([{**row, "load": round(row["load"], 2)} for row in rows], columns, output)


@brokers.command("rebalance")
def rebalance(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say which topics would move.")] = False,
    max_moves: Annotated[
        int | None, typer.Option(min=1, help="No more than so many.", show_default="until the load is even")
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """Even the load out now, a few topics at a time; the broker that is asked goes on in the background.

    The limits of automatic rebalancing (topic age, cooldown, moves in an hour) do not hold an order back. Exit code 0
    also if the load is even already; 5 if a rule stopped it: the blacklist, too few active brokers, or topics that are
    moving already.
    """
    found = ask(calls.rebalance(values.RebalanceRequest(dry_run=dry_run, max_moves=max_moves)))
    columns = ("topic_name", "from_broker", "to_broker", "estimated_load", "reason")
    ids = ("from_broker", "to_broker")
    rows = [
        {name: id_text(getattr(each, name)) if name in ids else getattr(each, name) for name in columns}
        for each in found.proposed_moves
    ]
    if output is Output.json:
        fields = {"success": found.success, "moves_executed": found.moves_executed}
        print_fields({**fields, "proposed_moves": rows, "message": found.error_message}, output)
        if not found.success:
            raise typer.Exit(Exit.REFUSED)
        return
    print(f"Rebalance success={str(found.success).lower()} moves_executed={found.moves_executed}")
    for row in rows:
        print(f"Move: {row['topic_name']} from {row['from_broker']} to {row['to_broker']} ({row['reason']})")
    if found.error_message:
        print(found.error_message)
    if not found.success:
        raise typer.Exit(Exit.REFUSED)


@brokers.command("history")
def history(
    count: Annotated[int, typer.Option("--count", "-c", min=1, help="The newest so many.")] = 20,
    output: OutputOption = Output.table,
) -> None:
    """What rebalancing has moved, newest first."""
    found = ask(calls.rebalancing_history(count)).moves
    columns = ("time", "topic", "from_broker", "to_broker", "estimated_load", "reason")
    rows = [
        {
            "time": datetime.fromtimestamp(each.time_ms / 1000, UTC).isoformat(timespec="milliseconds"),
            "topic": each.topic,
            "from_broker": id_text(each.from_broker),
            "to_broker": id_text(each.to_broker),
            "estimated_load": round(each.estimated_load, 4),
            "reason": each.reason,
        }
        for each in found
    ]
    print_rows(rows, columns, output)


# --- members of the metadata store ----------------------------------------------------------------------


@app.command("status")
def status(output: OutputOption = Output.table) -> None:
    """Who keeps the metadata, and who leads there."""
    found = ask(calls.metadata_status())
    fields = {
        "self_node_id": id_text(found.self_node_id),
        "raft_addr": found.raft_addr,
        "leader_id": id_text(found.leader_id),
        "current_term": found.current_term,
        "last_applied": found.last_applied,
        "voters": [str(each) for each in found.voters],
        "learners": [str(each) for each in found.learners],
    }
    if output is Output.json:
        print_fields(fields, output)
        return
    print(f"Self Node ID: {found.self_node_id}")
    print(f"Raft Address: {found.raft_addr}")
    print(f"Leader: {found.leader_id or 'none'}")
    print(f"Term: {found.current_term}")
    print(f"Last Applied: {found.last_applied}")
    print(f"Voters: {list(found.voters)}")
    print(f"Learners: {list(found.learners)}")


@app.command("add-node")
def add_node(
    node_addr: Annotated[str, typer.Option(metavar="URL", help="The admin address of the new node.")],
    output: OutputOption = Output.table,
) -> None:
    """Make a member of a node that is running. A broker that is started with --join does this by itself."""
    new = _status_of(node_addr)
    found = ask(calls.add_member(new.raft_addr, new.self_node_id))
    print_done(
        f"Success: node {found.node_id}: {found.message}", output, node_id=id_text(found.node_id), message=found.message
    )


def _status_of(url: str) -> values.MetadataStatus:
    async def run() -> values.MetadataStatus:
        async with GrpcConnection(url, "--node-addr") as node:
            return await node.ask(calls.metadata_status())

    try:
        return asyncio.run(run())
    except Unreachable as error:
        raise ConfigError("--node-addr", url, f"{error.why}; start it with --join, and it adds itself") from error


@app.command("promote-node")
def promote_node(node_id: NodeOption, output: OutputOption = Output.table) -> None:
    """Let a learner that has caught up vote."""
    found = ask(calls.promote_member(node_id))
    print_done(f"Success: {found.message}", output, node_id=id_text(node_id), message=found.message)


@app.command("remove-node")
def remove_node(node_id: NodeOption, output: OutputOption = Output.table) -> None:
    """Remove a member. To come back it joins with an empty directory."""
    found = ask(calls.remove_member(node_id))
    print_done(f"Success: {found.message}", output, node_id=id_text(node_id), message=found.message)
