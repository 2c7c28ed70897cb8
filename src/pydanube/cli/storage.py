"""`danube admin storage`: where a topic's history is, whether it is whole, and how long it is kept.

danube admin storage list /default/orders                    objects, and what is only in the log
danube admin storage list /default/orders --output paths     one path or URL a line, for DuckDB, pyarrow and Spark
danube admin storage verify /default/orders                  every byte; exit code 0 whole, 1 not, 2 to 5 not checked
danube admin topics retention /default/orders --minutes 10080
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from pydanube.admin import calls, values
from pydanube.cli.admin import (
    NamespaceArgument,
    TopicArgument,
    ask,
    connected,
    namespaces,
    offsets_text,
    ranges,
    tier_fields,
    topics,
)
from pydanube.cli.exits import Exit
from pydanube.cli.output import Output, OutputOption, id_text, print_done, print_fields, print_rows
from pydanube.client.grpc.connection import BrokerRefused
from pydanube.core.cluster.conditions import count as counted
from pydanube.errors import ConfigError

HELP: Final = "History in the object store: list objects, verify them, apply retention."

app = typer.Typer(no_args_is_help=True)


class ListOutput(StrEnum):
    table = "table"
    json = "json"
    paths = "paths"


# --- list ---------------------------------------------------------------------------------------------


@app.command("list")
def list_objects(
    topic: TopicArgument,
    output: Annotated[
        ListOutput,
        typer.Option("--output", "-o", help="table for people, json for scripts, paths for DuckDB and pyarrow."),
    ] = ListOutput.table,
) -> None:
    """The objects that hold a topic's history, in order, and what is only in the log.

    `paths` prints exactly the objects that are described, one a line: whatever else lies in the bucket is not history.
    """
    found = ask(calls.list_storage(topic))
    if output is ListOutput.json:
        print(json.dumps(_listing(found), indent=2, ensure_ascii=False))
    elif output is ListOutput.paths:
        _print_paths(found)
    else:
        _print_listing(found)


def _print_paths(found: values.StorageListing) -> None:
    for each in found.objects:
        if each.format == "parquet":
            print(each.url)
        else:
            print(
                f"danube: {each.url} is left out: offsets {each.first} up to {each.end} could not be made Parquet",
                file=sys.stderr,
            )


def _print_listing(found: values.StorageListing) -> None:
    rows = [
        {
            "offsets": offsets_text(each.first, each.end),
            "messages": f"{each.end - each.first:,}",
            "bytes": f"{each.size_bytes:,}",
            "published": f"{_time(each.min_publish_time_us)} … {_time(each.max_publish_time_us)}",
            "epoch": each.epoch,
            "format": each.format,
            "object": each.url,
        }
        for each in found.objects
    ]
    if rows:
        print_rows(rows, tuple(rows[0]), Output.table)
    messages = sum(each.end - each.first for each in found.objects)
    print(f"{counted(len(rows), 'object')}, {counted(messages, 'message')}, {counted(found.size_bytes, 'byte')}")
    for each in found.only_in_log:
        print(f"only in the log: offsets {offsets_text(each.first, each.end)}")
    for orphan in found.orphans:
        where = f"on the disk of broker {orphan.broker_id}, epoch {orphan.epoch}"
        print(f"not rescued yet: offsets {offsets_text(orphan.first, orphan.end)}, {where}")
    for each in found.voids:
        print(f"never used: offsets {offsets_text(each.first, each.end)}")
    print(f"{found.topic} has offsets {found.tiers.first_offset} up to {found.tiers.head}")
    if not found.tiers.has_cloud:
        print("this broker has no object store: --storage-url gives it one")
    if found.upload_failing:
        print(f"nothing is uploaded at the moment: {found.upload_failing}")


def _listing(found: values.StorageListing) -> dict[str, object]:
    return {
        "topic": found.topic,
        **tier_fields(found.tiers),
        "epoch": found.epoch,
        "size_bytes": found.size_bytes,
        "manifest": found.manifest_key or None,
        "upload_failing": found.upload_failing or None,
        "only_in_log": ranges(found.only_in_log),
        "orphans": [
            {"first": each.first, "end": each.end, "broker_id": id_text(each.broker_id), "epoch": each.epoch}
            for each in found.orphans
        ],
        "voids": ranges(found.voids),
        "objects": [
            {
                "first": each.first,
                "end": each.end,
                "key": each.key,
                "url": each.url,
                "size_bytes": each.size_bytes,
                "etag": each.etag,
                "format": each.format,
                "min_publish_time_us": each.min_publish_time_us,
                "max_publish_time_us": each.max_publish_time_us,
                "max_append_time_us": each.max_append_time_us,
                "epoch": each.epoch,
                "created_at": each.created_at,
                "in_manifest": each.in_manifest,
            }
            for each in found.objects
        ],
    }


def _time(microseconds: int) -> str:
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=microseconds)
    except OverflowError:
        return str(microseconds)
    return moment.strftime("%Y-%m-%d %H:%M:%S")


# --- verify -------------------------------------------------------------------------------------------


@app.command("verify")
def verify(
    topic: TopicArgument,
    repair: Annotated[
        bool, typer.Option("--repair", help="Also remove objects that are provably garbage. Nothing else is changed.")
    ] = False,
    output: OutputOption = Output.table,
) -> None:
    """Compare a topic's descriptors with its objects, every byte of them.

    Exit code 0: everything is as it was written. 1: problems were found; each names object and offsets. 2 to 5: it
    could not be checked. Notes are worth knowing and change no exit code.
    """
    report = asyncio.run(_verify(topic, repair))
    problems = [each for each in report.findings if each.is_problem]
    if output is Output.json:
        print(json.dumps(_report(report), indent=2, ensure_ascii=False))
    else:
        _print_report(report, problems)
    if problems:
        raise typer.Exit(Exit.NOT_GOOD)


async def _verify(topic: str, repair: bool) -> values.VerifyReport:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("looking", total=None)
        async with connected() as broker:
            async for answer in broker.follow(calls.verify_storage(topic, repair=repair)):
                if answer.WhichOneof("what") == "report":
                    return answer.report
                done = answer.progress
                text = f"{done.objects_done:,} of {done.objects:,} objects"
                bar.update(task, description=text, completed=done.bytes_done, total=done.bytes)
    raise BrokerRefused("UNKNOWN", "the broker ended without a report: ask again")


def _print_report(report: values.VerifyReport, problems: Sequence[values.StorageFinding]) -> None:
    rows = [
        {"offsets": offsets_text(each.first, each.end), "where": each.where, "why": each.why or None}
        for each in report.places
    ]
    if rows:
        print_rows(rows, ("offsets", "where", "why"), Output.table)
    removed = set(report.removed)
    for each in report.findings:
        if each.key in removed:
            print(f"removed: {each.key}")
            continue
        what = "problem" if each.is_problem else "note"
        print(f"{what} ({each.kind}): {_about(each)}{each.text}")
    if report.not_served:
        print(f"note: the topic is not open here, so nobody knows what its log holds: {report.not_served}")
    size = counted(report.size_bytes, "byte")
    read = f"{counted(report.objects, 'object')}, {size}, {counted(report.messages, 'message')} read"
    verdict = "everything verifies" if not problems else f"{counted(len(problems), 'problem')} found"
    print(f"{report.topic}: {read}: {verdict}")


def _about(finding: values.StorageFinding) -> str:
    if not finding.key:
        return ""
    offsets = f" with offsets {offsets_text(finding.first, finding.end)}" if finding.HasField("end") else ""
    return f"{finding.key}{offsets}: "


def _report(report: values.VerifyReport) -> dict[str, object]:
    numbers = ("topic", "epoch", "first_offset", "head", "objects", "size_bytes", "messages")
    return {
        "ok": not any(each.is_problem for each in report.findings),
        **{name: getattr(report, name) for name in numbers},
        "not_served": report.not_served or None,
        "places": [
            {"first": each.first, "end": each.end, "where": each.where, "why": each.why or None}
            for each in report.places
        ],
        "problems": [_finding(each) for each in report.findings if each.is_problem],
        "notes": [_finding(each) for each in report.findings if not each.is_problem],
        "undescribed": [
            {
                "key": each.key,
                "size_bytes": each.size_bytes,
                "epoch": each.epoch if each.HasField("epoch") else None,
                "fate": each.fate,
                "why": each.why,
            }
            for each in report.undescribed
        ],
        "removed": list(report.removed),
    }


def _finding(finding: values.StorageFinding) -> dict[str, object]:
    return {
        "kind": finding.kind,
        "key": finding.key or None,
        "first": finding.first if finding.HasField("first") else None,
        "end": finding.end if finding.HasField("end") else None,
        "text": finding.text,
    }


# --- retention ----------------------------------------------------------------------------------------

Minutes = Annotated[
    int | None, typer.Option("--minutes", min=0, max=2**32 - 1, help="History that is older goes; 0: never.")
]
Mb = Annotated[
    int | None,
    typer.Option("--mb", min=0, max=2**32 - 1, help="History beyond this size goes, oldest first; 0: never."),
]
Reset = Annotated[bool, typer.Option("--reset", help="Forget what was set here.")]


@topics.command("retention")
def topic_retention(
    topic: TopicArgument,
    minutes: Minutes = None,
    mb: Mb = None,
    reset: Reset = False,
    output: OutputOption = Output.table,
) -> None:
    """How long a topic's history is kept; with --minutes or --mb, from now on. --reset: as its namespace says."""
    if _changes(minutes, mb, reset):
        request = values.SetRetentionRequest(topic=topic, minutes=minutes, mb=mb, reset=reset)
        found = ask(calls.set_retention(request))
    else:
        found = ask(calls.retention(topic=topic))
    due = found.due_first_offset if found.HasField("due_first_offset") else None
    fields = {"topic": topic, **_rule(found), "due_objects": found.due_objects, "due_first_offset": due}
    print_fields(fields, output)
    if output is Output.table and due is not None:
        print(f"{counted(found.due_objects, 'object')} to go at the next look: history then begins at offset {due}")


@namespaces.command("retention")
def namespace_retention(
    namespace: NamespaceArgument,
    minutes: Minutes = None,
    mb: Mb = None,
    reset: Reset = False,
    output: OutputOption = Output.table,
) -> None:
    """How long history is kept in topics that have no rule of their own. --reset: as the configuration says."""
    if _changes(minutes, mb, reset):
        request = values.SetRetentionRequest(namespace=namespace, minutes=minutes, mb=mb, reset=reset)
        found = ask(calls.set_retention(request))
    else:
        found = ask(calls.retention(namespace=namespace))
    print_fields({"namespace": namespace, **_rule(found)}, output)


@app.command("retain")
def retain(topic: TopicArgument, output: OutputOption = Output.table) -> None:
    """Forget now what retention would forget at its next look. `topics retention` says what that is."""
    found = ask(calls.apply_retention(topic))
    sentence = f"{counted(found.removed_objects, 'object')} forgotten: history begins at offset {found.first_offset}"
    print_done(sentence, output, first_offset=found.first_offset, removed_objects=found.removed_objects)


def _changes(minutes: int | None, mb: int | None, reset: bool) -> bool:
    given = minutes is not None or mb is not None
    if given and reset:
        raise ConfigError("--reset", True, "either --reset, or --minutes and --mb, not both")
    return given or reset


def _rule(found: values.RetentionRule) -> dict[str, object]:
    return {"retention_minutes": found.minutes, "retention_mb": found.mb, "set_by": found.set_by}
