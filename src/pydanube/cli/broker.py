"""`danube broker`: starts one and stays until it is told to stop.

Flags win over the file, the file wins over the defaults; `pydanube.config` checks them all. The banner goes to stdout,
log lines to stderr; with --log-format json both are lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import sys
from datetime import UTC, datetime
from enum import StrEnum
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pydanube import __version__
from pydanube.cli.exits import Exit, code_of

if TYPE_CHECKING:
    from pydanube.api.process import Listening
    from pydanube.config import Flags

log = logging.getLogger(__name__)

LISTEN = "Where it listens"
CLIENTS = "What clients are told"
CLUSTER = "Cluster (not used by a standalone broker)"
STORAGE = "History"
EDGE = "Edge (does not exist yet: refused)"
LOGS = "Log lines (stderr)"

HELP = """Start a broker and serve until SIGTERM or Ctrl-C.

The shortest way, with no configuration file and no other service:

    danube broker --mode standalone --data-dir ./danube-data

Everything is kept in the data directory: messages, subscriptions, cursors, metadata. \
Start it again with the same directory and it goes on where it was. \
A message is on disk before its producer is told so: kill -9 loses none.

Three such commands, one on each machine, are a cluster; beside them only an object store is needed:

    danube broker --mode cluster --data-dir ./danube-data --seed-nodes a:7650,b:7650,c:7650 --raft-addr a:7650 \
--broker-addr a:6650 --admin-addr a:50051 --stream-addr a:6651 --storage-url s3://bucket/prefix

SIGTERM or Ctrl-C finishes commits, saves cursors, in a cluster hands topics over, and exits 0; \
a second one exits at once (130). \
SIGHUP reads the configuration file again: log level and format, policies and stream.limits hold from then on, \
what needs a restart is named in the log, and a file with a mistake changes nothing. \
A mistake in flags or configuration and a taken port are one line and exit code 2, a directory in use 5.

Authentication does not exist yet, and TLS only on the native port (stream.tls in the configuration file). \
A configuration that asks for more is refused; \
keep the ports on a network that you trust.
"""


class Level(StrEnum):
    debug = "debug"
    info = "info"
    warning = "warning"
    error = "error"


class Lines(StrEnum):
    text = "text"
    json = "json"


def broker(
    mode: Annotated[
        str | None,
        typer.Option(help="standalone: one broker, nothing else needed. cluster: several, see below."),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where everything is kept; made if it is missing.", show_default="./danube-data")
    ] = None,
    config_file: Annotated[
        Path | None, typer.Option(help="Settings in YAML: docs/configuration.md has the keys. Flags win over it.")
    ] = None,
    broker_addr: Annotated[
        str | None,
        typer.Option(metavar="IP:PORT", help="Clients: gRPC.", show_default="127.0.0.1:6650", rich_help_panel=LISTEN),
    ] = None,
    admin_addr: Annotated[
        str | None,
        typer.Option(
            metavar="IP:PORT", help="danube admin: gRPC.", show_default="127.0.0.1:50051", rich_help_panel=LISTEN
        ),
    ] = None,
    prom_exporter: Annotated[
        str | None,
        typer.Option(
            metavar="IP:PORT",
            help="HTTP: /metrics, /health/live, /health/ready.",
            show_default="127.0.0.1:9040",
            rich_help_panel=LISTEN,
        ),
    ] = None,
    stream_addr: Annotated[
        str | None,
        typer.Option(
            metavar="IP:PORT",
            help="Clients: the native protocol.",
            show_default="127.0.0.1:6651",
            rich_help_panel=LISTEN,
        ),
    ] = None,
    web_addr: Annotated[
        str | None,
        typer.Option(
            metavar="IP:PORT|off",
            help="The web admin, in a browser.",
            show_default="127.0.0.1:8080 if standalone",
            rich_help_panel=LISTEN,
        ),
    ] = None,
    advertised_addr: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The address that clients are told to use, if it is not the one listened on.",
            rich_help_panel=CLIENTS,
        ),
    ] = None,
    connect_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="The proxy in front of this broker, if there is one.", rich_help_panel=CLIENTS
        ),
    ] = None,
    raft_addr: Annotated[
        str | None,
        typer.Option(metavar="IP:PORT", help="Where the metadata store's members talk.", rich_help_panel=CLUSTER),
    ] = None,
    seed_nodes: Annotated[
        str | None, typer.Option(metavar="A,B,C", help="The first members.", rich_help_panel=CLUSTER)
    ] = None,
    join: Annotated[bool, typer.Option("--join", help="Join a cluster that runs.", rich_help_panel=CLUSTER)] = False,
    etcd: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,…",
            help="An etcd that is there already, instead of --seed-nodes.",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    registration_ttl: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="A broker that is silent for so long loses its topics. The same on every broker.",
            show_default="32",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    shutdown_timeout: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How long SIGTERM may take to hand topics over.",
            show_default="30, or 0.05 per topic",
            rich_help_panel=CLUSTER,
        ),
    ] = None,
    storage_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Where history is kept: file:///dir, s3://bucket/prefix, gs://… or az://….",
            show_default="a directory beside the log",
            rich_help_panel=STORAGE,
        ),
    ] = None,
    upload_interval: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="How often new messages go to the object store.",
            show_default="30",
            rich_help_panel=STORAGE,
        ),
    ] = None,
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="Check flags, file, directories, ports and URLs, say what would run, and start nothing.",
        ),
    ] = False,
    edge_config: Annotated[Path | None, typer.Option(help="Edge mode's settings.", rich_help_panel=EDGE)] = None,
    edge_token: Annotated[str | None, typer.Option(help="Edge mode's token.", rich_help_panel=EDGE)] = None,
    log_level: Annotated[
        Level | None,
        typer.Option(
            case_sensitive=False,
            help="The least that is written: debug, info, warning or error.",
            show_default="info",
            rich_help_panel=LOGS,
        ),
    ] = None,
    log_format: Annotated[
        Lines | None,
        typer.Option(help="text for people, json for machines.", show_default="text", rich_help_panel=LOGS),
    ] = None,
) -> None:
    sys.meta_path.insert(0, _WithoutPandas())
    # Here, so that other commands need not wait for YAML, gRPC's server, Arrow and the log.
    from pydanube.api.process import serve
    from pydanube.config import Flags, load
    from pydanube.errors import DanubeError
    from pydanube.telemetry import configure_logging

    flags = Flags(
        config_file=config_file,
        mode=mode,
        data_dir=data_dir,
        broker_addr=broker_addr,
        admin_addr=admin_addr,
        stream_addr=stream_addr,
        prom_exporter=prom_exporter,
        advertised_addr=advertised_addr,
        connect_url=connect_url,
        raft_addr=raft_addr,
        seed_nodes=seed_nodes,
        join=join,
        etcd=etcd,
        registration_ttl=registration_ttl,
        shutdown_timeout=shutdown_timeout,
        storage_url=storage_url,
        upload_interval=upload_interval,
        edge_config=edge_config,
        edge_token=edge_token,
        log_level=log_level,
        log_format=log_format,
        web_addr=web_addr,
    )
    if check:
        _check(flags)
        return
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is a broker that can read its configuration again
    config = load(flags)
    as_json = config.lines.format == "json"
    configure_logging(level=config.lines.level, as_json=config.lines.format == "json")
    for warning in config.warnings:
        log.warning("configuration", extra={"warning": warning})
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(serve(config, _print_banner_in_json if as_json else _print_banner, lambda: load(flags)))
    except DanubeError as error:
        if not as_json:
            raise
        log.critical("broker ended", extra={"why": str(error)})
        raise typer.Exit(code_of(error)) from error


class _WithoutPandas(MetaPathFinder):
    """Where pandas is installed, pyarrow loads it (0.3 s, 35 MB); a broker has no use for it."""

    def find_spec(self, fullname: str, *_: object) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError("a broker does without pandas", name=fullname)


def _check(flags: Flags) -> None:
    from pydanube.api.check import check
    from pydanube.config import load

    config = load(flags)
    found = check(config)
    if config.lines.format == "json":
        told = {"ok": not found.problems, **found._asdict(), "warnings": config.warnings}
        print(json.dumps(told, default=str, ensure_ascii=False))
    else:
        for name, value in found.settings.items():
            print(f"  {name:<11}{value}")
        for key, value in found.file.items():
            print(f"  {key} = {value}")
        for warning in config.warnings:
            print(f"warning: {warning}")
        for problem in found.problems:
            print(f"danube: {problem}", file=sys.stderr)
        if not found.problems:
            print("The configuration is good. Nothing was started.")
    if found.problems:
        raise typer.Exit(Exit.USAGE)


def _print_banner_in_json(at: Listening) -> None:
    """The form of the log lines, for who reads both as one stream."""
    line = {
        **_banner(at),
        "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": "INFO",
        "logger": "pydanube.cli.broker",
        "message": _greeting(at),
    }
    print(json.dumps(line, ensure_ascii=False), flush=True)


def _print_banner(at: Listening) -> None:
    print(f"{_greeting(at)}\n")
    for name, text in _banner(at).items():
        print(f"  {name:<9}{text}")
    print("\nCtrl-C stops it.", flush=True)


def _greeting(at: Listening) -> str:
    return f"PyDanube {__version__}, {at.mode} broker {at.broker_id}, is ready."


def _banner(at: Listening) -> dict[str, str]:
    return {
        "clients": f"{at.connect_url}   (listening on {at.client_addr})",
        "native": f"danube://{at.stream_addr}",
        "admin": f"http://{at.admin_addr}",
        "metrics": f"http://{at.metrics_addr}/metrics",
        **({"web": f"http://{at.web_addr}"} if at.web_addr else {}),
        "data": str(at.data_dir.absolute()),
        "history": at.storage,
        "topics": f"{at.topics} open" + (f", {at.unopened} NOT open: see the log" if at.unopened else ""),
    }


def _loop_factory() -> type[asyncio.AbstractEventLoop] | None:
    """uvloop where there is one."""
    if sys.platform == "win32":
        return None
    import uvloop

    return uvloop.Loop
