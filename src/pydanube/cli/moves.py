"""`danube admin topics unload`, `moves` and `orphan`: topics on their way between brokers, and what a lost one left.

danube admin topics unload /default/orders --wait          moves it; says how long each phase took
danube admin topics unload orders --namespace default      the same
danube admin topics moves /default/orders                  its last moves
danube admin topics orphan list /default/orders            offsets that only a lost broker's disk has
danube admin topics orphan discard /default/orders 4200    gives them up, for ever
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Annotated, Final

import typer

from pydanube.admin import calls, values
from pydanube.cli.admin import TopicArgument, ask, connected, orphan_fields, topics
from pydanube.cli.completion import broker_ids, namespace_names
from pydanube.cli.exits import Exit
from pydanube.cli.output import Output, OutputOption, id_text, print_done, print_json, print_rows
from pydanube.client.grpc.connection import GrpcCall
from pydanube.core.names import parse_broker_id
from pydanube.errors import ConfigError

HELP: Final = "What a lost broker may have written, and nobody else has."

orphans = typer.Typer(no_args_is_help=True)


# --- moving -------------------------------------------------------------------------------------------


@topics.command("unload")
def unload_topic(
    topic: TopicArgument,
    namespace: Annotated[
        str | None, typer.Option(help="For a TOPIC without one.", autocompletion=namespace_names)
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(
            metavar="BROKER",
            help="The broker that gets it, by its id.",
            show_default="whichever is least loaded",
            autocompletion=broker_ids,
        ),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Until the new broker serves it; shows what happens and how long it took.")
    ] = False,
    timeout: Annotated[int, typer.Option("--timeout", min=1, metavar="SECONDS", help="How long to wait.")] = 60,
    output: OutputOption = Output.table,
) -> None:
    """Let another broker serve the topic, or each partition of it. Returns when the old one has let go."""
    topic = _in_namespace(topic, namespace)
    to_broker = parse_broker_id(to) if to is not None else 0
    call = calls.move_topic(topic, to_broker=to_broker, wait=wait, timeout_seconds=timeout)
    results = asyncio.run(_unload(call, tells_progress=wait and output is Output.table))
    moved = all(not result.failure for result in results)
    if output is Output.json:
        print_json({"success": moved, "topic": topic, "results": [_result(each) for each in results]})
    else:
        print(f"Topic Unloaded: {str(moved).lower()}")
        for each in results if wait or len(results) > 1 or not moved else ():
            print(_line(each))
        for each in results:
            for note in each.notes:
                print(f"  {each.topic}: {note}")
    if not moved:
        raise typer.Exit(Exit.REFUSED if all(result.failure for result in results) else Exit.NOT_GOOD)


def _in_namespace(topic: str, namespace: str | None) -> str:
    """Raises ConfigError if the topic names another namespace itself."""
    if namespace is None:
        return topic
    if topic.count("/") < 2:
        return f"/{namespace}/{topic.lstrip('/')}"
    if not topic.startswith(f"/{namespace}/"):
        raise ConfigError("--namespace", namespace, f"{topic} names its namespace already; leave --namespace out")
    return topic


async def _unload(call: GrpcCall[values.MoveAnswer], *, tells_progress: bool) -> list[values.MoveResult]:
    results = []
    async with connected() as broker:
        async for answer in broker.follow(call):
            if answer.HasField("result"):
                results.append(answer.result)
            elif tells_progress:
                print(f"{answer.progress.topic}: {answer.progress.sentence}", file=sys.stderr, flush=True)
    return results


def _result(result: values.MoveResult) -> dict[str, object]:
    return {
        "topic": result.topic,
        "from_broker": id_text(result.from_broker),
        "to_broker": id_text(result.to_broker),
        "phases_ms": _milliseconds(result.phases),
        "failure": result.failure or None,
        "notes": list(result.notes),
    }


def _line(result: values.MoveResult) -> str:
    if result.failure:
        return f"  {result.topic}: {result.failure}"
    target = f"broker {result.to_broker}" if result.to_broker else "another broker"
    return f"  {result.topic}: broker {result.from_broker} -> {target}; {_phases_text(result.phases)}"


def _milliseconds(phases: Iterable[values.MovePhase]) -> dict[str, float]:
    return {phase.name: round(phase.duration_ms, 1) for phase in phases}


def _phases_text(phases: Iterable[values.MovePhase]) -> str:
    return ", ".join(f"{name} {ms:g} ms" for name, ms in _milliseconds(phases).items()) or "its phases are not known"


@topics.command("moves")
def moves(topic: TopicArgument, output: OutputOption = Output.table) -> None:
    """The last moves of a topic, newest first, and how long each phase took; as long as the old owners remember."""
    found = ask(calls.topic_moves(topic)).moves
    rows = [
        {
            "time": datetime.fromtimestamp(each.started_at_us / 1e6, UTC).isoformat(timespec="milliseconds"),
            "from_broker": id_text(each.from_broker),
            "to_broker": id_text(each.to_broker),
            "phases_ms": _milliseconds(each.phases) if output is Output.json else _phases_text(each.phases),
            "failure": each.failure or None,
            "notes": list(each.notes) if output is Output.json else "; ".join(each.notes),
        }
        for each in found
    ]
    print_rows(rows, ("time", "from_broker", "to_broker", "phases_ms", "failure", "notes"), output)


# --- orphans --------------------------------------------------------------------------------------------


@orphans.command("list")
def list_orphans(topic: TopicArgument, output: OutputOption = Output.table) -> None:
    """Offsets that only the disk of a lost broker may have, and what brings them back."""
    found = ask(calls.topic_state(topic)).orphans
    columns = ("first", "end", "broker_id", "epoch", "sentence")
    print_rows([orphan_fields(each) for each in found], columns, output)


@orphans.command("discard")
def discard_orphan(
    topic: TopicArgument,
    start: Annotated[int, typer.Argument(metavar="START", min=0, help="The first offset of it.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Give up what the lost broker may have there: it will never be delivered, even if the broker comes back."""
    if not yes:
        typer.confirm(f"Give up what may be in {topic} from offset {start} on, for ever?", abort=True, err=True)
    done = ask(calls.discard_orphan(topic, start))
    print_done(f"Orphan Discarded: {done.first} up to {done.end}", output, first=done.first, end=done.end)
