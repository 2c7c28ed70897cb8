"""`danube admin topics redrive`: dead letters back to the topics they came from, each once.

danube admin topics redrive /default/orders-dlq --dry-run                     what would be sent, and where
danube admin topics redrive /default/orders-dlq --reason timeout --since 2h   some of them
danube admin topics redrive /default/orders-dlq                               the rest
"""

from __future__ import annotations

import asyncio
import re
import sys
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pydanube.cli.admin import ENDPOINT, topics
from pydanube.cli.completion import topic_names
from pydanube.cli.contexts import native_address
from pydanube.cli.exits import Exit
from pydanube.cli.output import Output, OutputOption, payload_fields, payload_text, print_fields, print_rows
from pydanube.cli.places import parse_time
from pydanube.client.grpc.connection import target
from pydanube.core.cluster.conditions import count as counted
from pydanube.errors import ConfigError, DanubeError

if TYPE_CHECKING:
    from pydanube.admin.letters import Letter, Selection
    from pydanube.admin.redrive import Outcome
    from pydanube.client.client import Client

WHICH: Final = "Which of them (all that are given must fit)"
NOTE_SECONDS: Final = 5.0
TIME: Final = "a time as 2026-11-15T09:00:00Z, or 30s, 15m, 2h or 7d ago"

HELP: Final = """Send dead letters back to the topics they came from, each of them once.

    danube admin topics redrive /default/orders-dlq --dry-run

    danube admin topics redrive /default/orders-dlq --reason timeout --since 2h

What was sent is remembered in the topic DEAD_LETTERS-redriven: a message is sent once, however often this is run \
and wherever it was interrupted. What the options leave out stays for another time. Ctrl-C stops; run it again to go on.

Exit code 1: a topic did not take its messages; its name and reason are printed, the others were sent.
"""


@topics.command("redrive", help=HELP, no_args_is_help=True)
def redrive(
    dead_letters: Annotated[
        str,
        typer.Argument(
            metavar="DEAD_LETTERS", help="The dead-letter topic, as /namespace/topic.", autocompletion=topic_names
        ),
    ],
    service_addr: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="A broker's native address: `danube broker` prints it.",
            show_default="DANUBE_SERVICE_ADDR, or danube://, the endpoint's host, 6651",
        ),
    ] = None,
    to: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", help="Send all of them here.", show_default="where each of them came from"),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be sent.")] = False,
    limit: Annotated[int | None, typer.Option(min=1, help="Send at most so many.")] = None,
    topic: Annotated[
        str | None,
        typer.Option("--from-topic", metavar="TOPIC", help="Those that came from this topic.", rich_help_panel=WHICH),
    ] = None,
    subscription: Annotated[
        str | None,
        typer.Option("--subscription", "-s", help="Those that this subscription gave up.", rich_help_panel=WHICH),
    ] = None,
    reason: Annotated[
        str | None, typer.Option(help="Those whose failure reason contains this.", rich_help_panel=WHICH)
    ] = None,
    offsets: Annotated[
        str | None,
        typer.Option(metavar="A-B", help="Their offsets here: 100-199, 100-, -199 or 100.", rich_help_panel=WHICH),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="TIME", help=f"Given up then or later: {TIME}.", rich_help_panel=WHICH)
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="TIME", help="Given up before; as --since.", rich_help_panel=WHICH)
    ] = None,
    key: Annotated[
        str | None, typer.Option("--key", "-k", help="Those with this routing key.", rich_help_panel=WHICH)
    ] = None,
    attributes: Annotated[
        list[str] | None,
        typer.Option(
            "--attribute",
            "-a",
            metavar="NAME=VALUE",
            help="Those with this attribute; may be repeated.",
            rich_help_panel=WHICH,
        ),
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    # Here, because it brings Arrow along.
    from pydanube.admin.letters import Selection

    first, end = _offsets(offsets)
    now = datetime.now(UTC)
    selection = Selection(
        topic=topic,
        subscription=subscription,
        reason=reason,
        first=first,
        end=end,
        since=_time("--since", since, now),
        until=_time("--until", until, now),
        key=key,
        attributes=_attributes(attributes),
    )
    target(ENDPOINT.get(), "--endpoint")
    url = service_addr or native_address(ENDPOINT.get())
    outcome = asyncio.run(_redrive(url, dead_letters, selection, to, dry_run, limit))
    if output is Output.json:
        print_fields(_fields(outcome), output)
    else:
        _print_outcome(outcome)
    if outcome.failures:
        raise typer.Exit(Exit.NOT_GOOD if outcome.sent else Exit.REFUSED)


async def _redrive(
    url: str, topic: str, selection: Selection, to: str | None, dry_run: bool, limit: int | None
) -> Outcome:
    """Whatever ends it, Ctrl-C too: what was sent is recorded in the log of events."""
    from pydanube.admin.redrive import redrive
    from pydanube.cli.native import connected

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=None)
        sent = 0

        def show(outcome: Outcome) -> None:
            nonlocal sent
            sent = outcome.sent
            doing = f"{outcome.selected:,} found" if dry_run else f"{outcome.sent:,} sent"
            bar.update(task, description=doing, total=outcome.end - outcome.first, completed=outcome.at - outcome.first)

        async with connected(url) as client:
            try:
                outcome = await redrive(client, topic, selection, to=to, dry_run=dry_run, limit=limit, progress=show)
                sent = outcome.sent
                return outcome
            finally:
                if sent:
                    await _note(client, topic, to, sent)


async def _note(client: Client, topic: str, to: str | None, sent: int) -> None:
    """The messages are sent: that this cannot be written down is said, and no failure."""
    why = "its broker is of an older version"
    try:
        if await client.note_order("RedriveLetters", topic, to=to or "", count=sent, timeout=NOTE_SECONDS):
            return
    except DanubeError as error:
        why = str(error)
    print(f"danube: {counted(sent, 'message')} sent, which `danube admin events` does not show: {why}", file=sys.stderr)


def _offsets(text: str | None) -> tuple[int, int | None]:
    """As people count: both are meant."""
    if text is None:
        return 0, None
    found = re.fullmatch(r"(\d*)-(\d*)|(\d+)", text, re.ASCII)
    if found is None or text == "-":
        raise ConfigError("--offsets", text, "100-199, 100-, -199 or 100")
    if found[3] is not None:
        return int(found[3]), int(found[3]) + 1
    first, end = int(found[1] or 0), int(found[2]) + 1 if found[2] else None
    if end is not None and end <= first:
        raise ConfigError("--offsets", text, "the lower one first")
    return first, end


def _time(flag: str, text: str | None, now: datetime) -> datetime | None:
    if text is None:
        return None
    ago = re.fullmatch(r"(\d{1,6})([smhd])", text, re.ASCII)
    if ago is not None:
        unit = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}[ago[2]]
        return now - timedelta(**{unit: int(ago[1])})
    return parse_time(flag, text, TIME)


def _attributes(pairs: list[str] | None) -> dict[str, str]:
    found = {}
    for pair in pairs or ():
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise ConfigError("--attribute", pair, "NAME=VALUE")
        found[name] = value
    return found


# --- what is printed ------------------------------------------------------------------------------------


def _print_outcome(outcome: Outcome) -> None:
    if outcome.samples and outcome.dry_run:
        columns = ("offset", "given_up", "from", "subscription", "reason", "key", "payload")
        print_rows([_row(letter) for letter in outcome.samples], columns, Output.table)
        if outcome.selected > len(outcome.samples):
            print(f"… and {outcome.selected - len(outcome.samples):,} more")
        print()
    for topic, count in sorted(outcome.by_target.items()):
        failure = outcome.failures.get(topic)
        print(f"To: {topic}: {counted(count, 'message')}" + (f", REFUSED: {failure}" if failure else ""))
    for reason, count in sorted(outcome.by_reason.items(), key=lambda pair: -pair[1]):
        print(f"Reason: {reason}: {counted(count, 'message')}")
    if outcome.homeless:
        print(f"Not sent: {outcome.homeless:,} do not say where they came from: --to sends them somewhere")
    looked = f"{outcome.looked_at:,} dead letters looked at, {outcome.left_out:,} left out"
    print(f"{looked}, {outcome.sent_before:,} sent by earlier runs")
    if outcome.dry_run:
        print(f"Would Redrive: {outcome.selected}")
    else:
        print(f"Redriven: {outcome.sent}")


def _row(letter: Letter) -> dict[str, Any]:
    return {
        "offset": letter.offset,
        "given_up": letter.dead_at.isoformat(timespec="seconds"),
        "from": letter.original_topic,
        "subscription": letter.subscription,
        "reason": letter.reason,
        "key": letter.message.routing_key,
        "payload": payload_text(letter.message.payload[:200]).replace("\n", "\\n"),
    }


def _fields(outcome: Outcome) -> dict[str, object]:
    names = ("topic", "dry_run", "looked_at", "left_out", "sent_before", "homeless", "selected", "sent")
    return {
        "success": not outcome.failures,
        **{name: getattr(outcome, name) for name in names},
        "first": outcome.first,
        "end": outcome.end,
        "by_target": outcome.by_target,
        "by_reason": outcome.by_reason,
        "failures": outcome.failures,
        "samples": [
            {
                "offset": each.offset,
                "given_up": each.dead_at.isoformat(),
                "original_topic": each.original_topic,
                "original_offset": each.original_offset,
                "subscription": each.subscription,
                "reason": each.reason,
                "key": each.message.routing_key,
                "attributes": dict(each.message.attributes),
                **payload_fields(each.message.payload),
            }
            for each in outcome.samples
        ],
    }
