"""`danube pipeline apply`, `list`, `status`, `pause`, `resume`, `delete`, `supervise`: declared pipelines.

danube pipeline apply orders.yaml       declare them, or change those that are there; checked before anything is stored
danube pipeline status orders           how it is doing; exit code 1 unless it is known to be well
danube pipeline supervise               run them, until SIGTERM; what one supervisor runs, no other does
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

from pydanube.admin import calls, values
from pydanube.admin.gateway import Gateway
from pydanube.cli.admin import ENDPOINT, ask
from pydanube.cli.contexts import DEFAULT_ENDPOINT, resolve
from pydanube.cli.exits import Exit
from pydanube.cli.output import Output, OutputOption, print_done, print_fields, print_rows
from pydanube.cli.pipeline import app
from pydanube.core.cluster.conditions import words
from pydanube.core.pipelines.declaration import Declaration
from pydanube.core.pipelines.machine import DeclaredPipeline
from pydanube.core.pipelines.status import Health, PipelineStatus
from pydanube.errors import ConfigError

COLUMNS: Final = ("pipeline", "job", "when", "health", "freshness", "behind", "quarantined", "last_run", "error")

EndpointOption = Annotated[
    str, typer.Option(envvar="DANUBE_ADMIN_ENDPOINT", help="The broker's admin address.", callback=resolve)
]
NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The pipeline's name.")]


@app.command("apply")
def apply(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML: one pipeline, or several between lines of ---.")],
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    output: OutputOption = Output.table,
) -> None:
    """Declare pipelines, or change those that are there. All of a file are checked before the first is stored."""
    ENDPOINT.set(endpoint)
    from pydanube.pipeline.registry import check

    found = list(read(file))
    for each in found:
        check(Declaration.parse(each))
    for each in found:
        done = ask(calls.apply_pipeline(each["name"], json.dumps(each)))
        paused = ", and paused" if done.paused else ""
        print_done(f"Pipeline {done.outcome}: {each['name']}{paused}", output, pipeline=each["name"], **_applied(done))


def _applied(done: Any) -> dict[str, object]:
    return {"outcome": done.outcome, "paused": done.paused}


def read(file: Path) -> Iterator[dict[str, Any]]:
    """The declarations of a file. Raises ConfigError."""
    try:
        documents = [each for each in yaml.safe_load_all(file.read_text()) if each is not None]
    except OSError as error:
        raise ConfigError("FILE", str(file), f"a file that can be read: {(error.strerror or '').lower()}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("FILE", str(file), f"YAML: {' '.join(str(error).split())}") from error
    if not documents:
        raise ConfigError("FILE", str(file), "a pipeline: name, job, settings, and follow, every or cron")
    names = [each.get("name") for each in documents if isinstance(each, dict)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("name", name, "declared once in a file")
    for each in documents:
        if not isinstance(each, dict):
            raise ConfigError("FILE", str(file), "names and values: name, job, settings, …")
        yield each


@app.command("list")
def list_pipelines(endpoint: EndpointOption = DEFAULT_ENDPOINT, output: OutputOption = Output.table) -> None:
    """The pipelines there are, and how each is doing."""
    ENDPOINT.set(endpoint)
    _print_all(_all(), output)


@app.command("status")
def status(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One of them.", show_default="all")] = None,
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    output: OutputOption = Output.table,
) -> None:
    """How pipelines are doing. Exit code 1 unless each is known to be well, or is paused."""
    ENDPOINT.set(endpoint)
    if name is None:
        found = _all()
        _print_all(found, output)
        states = list(found.pipelines)
    else:
        states = list(ask(calls.list_pipelines(name)).pipelines)
        for each in states:
            print_fields(fields_of(each) if output is Output.json else _texts_of(each), output)
    if any(each.health not in (Health.OK, Health.PAUSED) for each in states) or (name and not states):
        raise typer.Exit(Exit.NOT_GOOD)


def _all() -> values.PipelineList:
    return ask(calls.list_pipelines())


def _print_all(found: values.PipelineList, output: Output) -> None:
    if output is Output.json:
        print(json.dumps([fields_of(each) for each in found.pipelines], indent=2, ensure_ascii=False))
    else:
        print_rows([_row_of(each) for each in found.pipelines], COLUMNS, output)
    if found.unreadable:
        typer.echo(f"and {found.unreadable} that a newer version declared, which this broker cannot read", err=True)


def fields_of(state: values.PipelineState) -> dict[str, Any]:
    """For scripts. What is not known is null."""

    def number(name: str) -> Any:
        return getattr(state, name) if state.HasField(name) else None

    declaration = json.loads(state.declaration)
    return {
        "pipeline": state.name,
        "job": state.job,
        "when": state.when,
        "health": state.health,
        "sentence": state.sentence,
        "state": state.state or None,
        "supervisor": state.supervisor or None,
        "fresh_seconds": number("fresh_seconds"),
        "freshness_goal_seconds": number("freshness_goal_seconds"),
        "behind_messages": number("behind_messages"),
        "messages": number("messages"),
        "quarantined": number("quarantined"),
        "quarantined_total": state.quarantined_total,
        "outcome": state.outcome or None,
        "error": state.error or None,
        "failures": state.failures,
        "restarts": state.restarts,
        "runs": state.runs,
        "started": _time(number("started_us")),
        "ended": _time(number("ended_us")),
        "last_good": _time(number("good_us")),
        "next": _time(number("next_us")),
        "settings": declaration["settings"],
    }


def _texts_of(state: values.PipelineState) -> dict[str, Any]:
    fields = fields_of(state)
    fields["freshness"] = _freshness(state)
    for name in ("fresh_seconds", "freshness_goal_seconds"):
        del fields[name]
    return {**fields, "settings": json.dumps(fields["settings"], ensure_ascii=False)}


def _freshness(state: values.PipelineState) -> str:
    found = words(state.fresh_seconds) if state.HasField("fresh_seconds") else "unknown"
    goal = f" of {words(state.freshness_goal_seconds)}" if state.HasField("freshness_goal_seconds") else ""
    return f"{found}{goal}"


def _row_of(state: values.PipelineState) -> dict[str, Any]:
    return {
        "pipeline": state.name,
        "job": state.job,
        "when": state.when,
        "health": state.health,
        "freshness": _freshness(state),
        "behind": f"{state.behind_messages:,}" if state.HasField("behind_messages") else "unknown",
        "quarantined": f"{state.quarantined_total:,}",
        "last_run": f"{state.outcome or '-'} {_time(state.ended_us if state.HasField('ended_us') else None) or ''}",
        "error": state.error or state.sentence if state.health not in (Health.OK, Health.PAUSED) else "",
    }


def _time(time_us: int | None) -> str | None:
    return None if time_us is None else datetime.fromtimestamp(time_us / 1e6, UTC).isoformat(timespec="seconds")


@app.command("pause")
def pause(name: NameArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, output: OutputOption = Output.table) -> None:
    """Stop the run of a pipeline, and begin none until it is resumed."""
    _pause(name, endpoint, output, paused=True)


@app.command("resume")
def resume(
    name: NameArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, output: OutputOption = Output.table
) -> None:
    """Let a pipeline go on from where it was paused."""
    _pause(name, endpoint, output, paused=False)


def _pause(name: str, endpoint: str, output: Output, *, paused: bool) -> None:
    ENDPOINT.set(endpoint)
    changed = ask(calls.pause_pipeline(name, paused)).changed
    word = "paused" if paused else "resumed"
    said = f"Pipeline {word}: {name}" if changed else f"Pipeline was {word} already: {name}"
    print_done(said, output, pipeline=name, paused=paused, changed=changed)


@app.command("delete")
def delete(
    name: NameArgument, endpoint: EndpointOption = DEFAULT_ENDPOINT, output: OutputOption = Output.table
) -> None:
    """Forget a pipeline. Its run is stopped; its checkpoint, and what it made, stay."""
    ENDPOINT.set(endpoint)
    ask(calls.delete_pipeline(name))
    print_done(f"Pipeline deleted: {name}", output, pipeline=name)


# --- the supervisor -------------------------------------------------------------------------------------------


class BrokerDesk:
    """What a supervisor asks, of whichever broker of the cluster answers."""

    def __init__(self, gateway: Gateway, supervisor: str) -> None:
        self._gateway = gateway
        self._supervisor = supervisor

    async def list(self) -> Mapping[str, DeclaredPipeline]:
        await self._gateway.brokers()  # so that another one is known when this one is away
        found = await self._gateway.ask(calls.list_pipelines())
        parsed = ((each, Declaration.from_bytes(each.declaration.encode())) for each in found.pipelines)
        return {each.name: DeclaredPipeline(made, each.revision) for each, made in parsed if made is not None}

    async def join(self) -> tuple[int, float]:
        found = await self._gateway.ask(calls.join_supervisor(self._supervisor))
        return found.lease, found.ttl_seconds

    async def renew(self, lease: int) -> bool:
        return (await self._gateway.ask(calls.renew_supervisor(lease))).lasts

    async def leave(self, lease: int) -> None:
        await self._gateway.ask(calls.leave_supervisor(lease))

    async def claim(self, lease: int, name: str) -> tuple[bool, PipelineStatus | None]:
        found = await self._gateway.ask(calls.claim_pipeline(lease, name, self._supervisor))
        return found.granted, PipelineStatus.from_bytes(found.status.encode()) if found.status else None

    async def release(self, lease: int, name: str) -> None:
        await self._gateway.ask(calls.release_pipeline(lease, name))

    async def report(self, lease: int, name: str, status: PipelineStatus) -> bool:
        call = calls.report_pipeline(lease, name, status.to_bytes().decode())
        return (await self._gateway.ask(call)).is_held


@app.command("supervise")
def supervise(
    endpoint: EndpointOption = DEFAULT_ENDPOINT,
    name: Annotated[
        str | None, typer.Option(help="Its name, for people.", show_default="the host's name and the process id")
    ] = None,
    runs_max: Annotated[int, typer.Option(min=1, help="Runs at the same time; a follower is one all the time.")] = 8,
) -> None:
    """Run the declared pipelines, until SIGTERM or Ctrl-C. Several may run at once: each pipeline is one's.

    A run that fails is started again from its checkpoint, later each time. Logs go to standard error.
    """
    from pydanube.pipeline.supervisor import Supervisor
    from pydanube.telemetry import configure_logging

    configure_logging()
    called = name or f"{socket.gethostname()}:{os.getpid()}"

    async def run() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            if stopping.is_set():
                os._exit(Exit.INTERRUPTED)  # children notice that their supervisor has ended
            stopping.set()

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)
        gateway = Gateway(endpoint, flag="--endpoint", name=f"supervisor {called}")
        try:
            desk = BrokerDesk(gateway, called)
            await Supervisor(desk, name=called, runs_max=runs_max).run(stopping)
        finally:
            await gateway.close()

    asyncio.run(run())
