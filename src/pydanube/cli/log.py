"""`danube log`: look at a data directory while no broker uses it, and see the log keep its promise.

These commands read files, not a broker, which is why they may know `broker/offline.py`.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from pydanube.broker.offline import (
    Envelope,
    LogReport,
    append_forever,
    batches_of,
    is_data_directory,
    messages_of,
    verify_directory,
)
from pydanube.cli.exits import Exit
from pydanube.cli.streams import ends_with_reader
from pydanube.core.cluster.conditions import count as counted
from pydanube.errors import ConfigError, DanubeError, InvalidName

app = typer.Typer(no_args_is_help=True)
T = TypeVar("T")

Directory = Annotated[Path, typer.Argument(help="The broker's data directory (the one with the file FORMAT).")]
Output = Annotated[str, typer.Option("--output", "-o", help="table for people, json for scripts.")]


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(coroutine)


def _existing(directory: Path) -> Path:
    if not is_data_directory(directory):
        raise ConfigError("DIR", str(directory), "the data directory of a broker: it has a file FORMAT in it")
    return directory


def _checked_output(output: str) -> str:
    if output not in ("table", "json"):
        raise ConfigError("--output", output, "table or json")
    return output


# --- verify -----------------------------------------------------------------------------------------


@app.command("verify")
def verify_command(directory: Directory, output: Output = "table") -> None:
    """Check every checksum and every offset, and print what was found. Changes nothing.

    Exit code 0: everything is as it was written. 1: something is damaged or missing; each finding names file, position
    and offsets.
    """
    _existing(directory)
    _checked_output(output)
    report = _run(_verify(directory))
    if output == "json":
        print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2))
    else:
        _print_report(report, Console())
    if not report.ok:
        raise typer.Exit(Exit.NOT_GOOD)


async def _verify(directory: Path) -> LogReport:
    console = Console(stderr=True)
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        console=console,
        transient=True,
        disable=not console.is_terminal,  # it would leave an empty line in a log
    ) as bar:
        task = bar.add_task("reading")
        total = 0

        def progress(topic: str, size: int) -> None:
            nonlocal total
            total += size
            bar.update(task, description=f"{total / 1e6:,.0f} MB read, now {topic}")

        return await verify_directory(directory, progress)


def _print_report(report: LogReport, console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("topic", "offsets", "messages", "batches", "MB", "segments", "epochs", "state"):
        table.add_column(name, justify="left" if name in ("topic", "offsets", "state") else "right")
    for topic in report.topics:
        state = f"[red]{counted(len(topic.problems), 'problem')}[/red]" if topic.problems else "[green]ok[/green]"
        table.add_row(
            topic.topic,
            f"{topic.first_offset}…{topic.head - 1}" if topic.messages else "none",
            f"{topic.messages:,}",
            f"{topic.batches:,}",
            f"{topic.size_bytes / 1e6:,.1f}",
            str(topic.segments),
            str(topic.epochs),
            state,
        )
    console.print(table)
    for topic in report.topics:
        for first, end in topic.holes:
            console.print(f"{topic.topic}: offsets {first} up to {end} are not on this disk (another owner had them)")
        for note in topic.notes:
            console.print(f"note: {topic.topic}: {note}", style="yellow", highlight=False, soft_wrap=True)
        for problem in topic.problems:
            console.print(f"damage: {topic.topic}: {problem}", style="red", highlight=False, soft_wrap=True)
    for note in report.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, soft_wrap=True)
    for problem in report.problems:
        console.print(f"damage: {problem}", style="red", highlight=False, soft_wrap=True)
    messages = sum(topic.messages for topic in report.topics)
    verdict = "everything verifies" if report.ok else "damage found"
    console.print(f"{counted(len(report.topics), 'topic')}, {counted(messages, 'message')}: {verdict}")


# --- dump -------------------------------------------------------------------------------------------


@app.command()
def dump(
    directory: Directory,
    topic: Annotated[str, typer.Argument(help="Topic, as /namespace/topic.")],
    start: Annotated[int, typer.Option("--from", help="First offset to print.", min=0)] = 0,
    batches_max: Annotated[int, typer.Option("--count", "-n", help="How many batches to print.", min=1)] = 100,
    messages: Annotated[bool, typer.Option("--messages", "-m", help="Print the messages too.")] = False,
    output: Output = "table",
) -> None:
    """Print the batches of a topic: offsets, epoch, producer, sequence, time, size. Changes nothing.

    What is damaged is named on stderr, and the exit code is 1.
    """
    ends_with_reader()
    _existing(directory)
    _checked_output(output)
    root, *names = topic.split("/")
    well_formed = root == "" and len(names) == 2 and not {"", ".", ".."}.intersection(names)
    if not well_formed or not (directory / "wal" / topic[1:]).is_dir():
        raise InvalidName(
            "topic in this data directory", topic, "give /namespace/topic; `danube log verify` lists them"
        )
    damage = _run(_dump(directory, topic, start, batches_max, messages, output))
    if damage:
        raise typer.Exit(Exit.NOT_GOOD)


async def _dump(directory: Path, topic: str, start: int, batches_max: int, messages: bool, output: str) -> int:
    """Returns how many places could not be read; each is named on stderr."""
    printed = damage = 0

    def problem(text: str) -> None:
        nonlocal damage
        damage += 1
        print(f"damage: {text}", file=sys.stderr)

    async for batch in batches_of(directory, topic, start, problem):
        if printed == batches_max:
            break
        printed += 1
        header = batch.header
        if output == "json":
            ids = {name: str(getattr(header, name)) for name in ("topic_hash", "producer_id", "session")}
            fields = {**header._asdict(), "magic": header.magic.decode(), **ids}  # JSON readers round large numbers
            if messages:
                fields["messages"] = [_message(row) for row in messages_of(batch)]
            print(json.dumps(fields))
            continue
        what = f"{header.base_offset}…{header.end_offset - 1}" if header.rows else "session opened"
        producer = f"producer {header.producer_id:x} seq {header.first_sequence}" if header.producer_id else "-"
        print(f"{what:<24} epoch {header.epoch}  {_time(header.append_time)}  {header.size_bytes:>9,} B  {producer}")
        for row, message in enumerate(messages_of(batch) if messages else ()):
            key = "" if message.routing_key is None else f" key={message.routing_key}"
            print(f"    {header.base_offset + row:<12}{key} {dict(message.attributes) or ''} {message.payload[:120]!r}")
    return damage


def _message(message: Envelope) -> dict[str, object]:
    fields = message._asdict()
    payload = fields.pop("payload")
    try:
        return {**fields, "attributes": dict(message.attributes), "payload": payload.decode()}
    except UnicodeDecodeError:
        return {**fields, "attributes": dict(message.attributes), "payload_hex": payload.hex()}


def _time(microseconds: int) -> str:
    seconds, rest = divmod(microseconds, 1_000_000)
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds)) + f".{rest:06}"


# --- demo -------------------------------------------------------------------------------------------


@app.command(hidden=True)
def writer(directory: Path, epoch: int, topics: int = 1, rows: int = 10, width: int = 100) -> None:
    """Append for ever; print `topic offset rows crc` for every acknowledged batch: what `demo` and the tests kill."""
    ends_with_reader()  # of the demonstration that started it
    _run(append_forever(directory, epoch, topics, rows, width, lambda line: print(line, flush=True)))


@app.command()
def demo(
    rounds: Annotated[int, typer.Option("--rounds", help="How often the writer is killed.", min=1)] = 3,
    seconds: Annotated[float, typer.Option("--seconds", help="How long it writes before that.", min=0.1)] = 1.0,
    keep: Annotated[
        Path | None, typer.Option("--keep", help="Use this directory and leave it, to look at afterwards.")
    ] = None,
) -> None:
    """Append to a log, kill the writer with `kill -9`, recover, verify. Nothing acknowledged may be missing."""
    console = Console()
    with tempfile.TemporaryDirectory(prefix="danube-demo-") as scratch:
        directory = keep or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        acknowledged: dict[int, tuple[int, int]] = {}
        first_epoch = 1 + max((int(p.name) for p in (directory / "wal/demo/log").glob("[0-9]*")), default=0)
        console.print("[bold]An acknowledged message is on disk.[/bold] Watch:\n")
        for epoch in range(first_epoch, first_epoch + rounds):
            before = len(acknowledged)
            head = _write_and_kill(directory, epoch, seconds, acknowledged)
            messages = sum(rows for rows, _ in list(acknowledged.values())[before:])
            console.print(
                f"  [cyan]epoch {epoch}[/cyan]  opened at offset {head:,}, {counted(messages, 'message')} "
                "acknowledged, then [red]kill -9[/red]"
            )
        missing = _run(_missing(directory, acknowledged))
        console.print(
            f"\n  recovered and read back: [bold]{len(acknowledged):,} acknowledged batches, {missing} missing[/bold]\n"
        )
        report = _run(verify_directory(directory))
        _print_report(report, console)
        if keep:
            console.print(f"\nLook at it: danube log dump {directory} /demo/log -n 5 --messages")
        if missing or not report.ok:
            raise DanubeError("the log lost something it had acknowledged: this is a bug, please report it")


def _write_and_kill(directory: Path, epoch: int, seconds: float, acknowledged: dict[int, tuple[int, int]]) -> int:
    """Runs the writer for a while and kills it. Returns the head it began at; fills in what it acknowledged."""
    command = [sys.executable, "-m", "pydanube", "log", "writer", str(directory), str(epoch)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        opened = process.stdout.readline().split()
        if not opened:
            process.wait()
            raise DanubeError("the writer did not start: its message is above")
        deadline = time.monotonic() + seconds
        for line in process.stdout:  # goes on behind the kill: with what the writer had said before
            if not line.endswith("\n"):
                break
            _, offset, rows, crc = line.split()
            acknowledged[int(offset)] = (int(rows), int(crc))
            if time.monotonic() > deadline:
                process.send_signal(signal.SIGKILL)
    return int(opened[1])


async def _missing(directory: Path, acknowledged: dict[int, tuple[int, int]]) -> int:
    """How many acknowledged batches are not in the log at their offset with their content."""
    left = dict(acknowledged)
    async for batch in batches_of(directory, "/demo/log", 0):
        header = batch.header
        if left.get(header.base_offset) == (header.rows, header.body_crc):
            del left[header.base_offset]
    return len(left)
