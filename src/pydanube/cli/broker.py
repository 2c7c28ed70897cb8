"""`danube broker`: starts one and stays until it is told to stop.

Flags win over the file, the file wins over the defaults; `pydanube.config` checks them all. The banner goes to stdout,
log lines to stderr; with --log-format json both are lines of JSON.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from pydanube import __version__
from pydanube.cli.exits import Exit, code_of
from pydanube.cli.hangups import HANGUPS
from pydanube.config.flags import Flags

if TYPE_CHECKING:
    from pydanube.api.process import Listening, Pages

log = logging.getLogger(__name__)

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


def _options() -> Iterator[inspect.Parameter]:
    """The flags of the configuration, as options for Typer."""
    kinds = get_type_hints(Flags, include_extras=True)
    for each in fields(Flags):
        kind, flag = get_args(kinds[each.name])
        if flag.choices:
            kind = StrEnum(each.name, [(word, word) for word in flag.choices]) | None  # type: ignore[operator]
        option = typer.Option(
            f"--{each.name.replace('_', '-')}",
            help=flag.help,
            metavar=flag.metavar,
            show_default=flag.shown or True,
            rich_help_panel=flag.panel,
            case_sensitive=not flag.any_case,
        )
        yield inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=Annotated[kind, option]
        )


def broker(**given: Any) -> None:
    sys.meta_path.insert(0, _WithoutPandas())
    # Here, so that other commands need not wait for YAML, gRPC's server, Arrow and the log.
    from pydanube.api.process import serve
    from pydanube.config import load
    from pydanube.errors import DanubeError
    from pydanube.telemetry import configure_logging

    flags = Flags(**given)
    if flags.check:
        _check(flags)
        return
    HANGUPS.remember()  # until there is a broker that can read its configuration again
    HANGUPS.forget()  # what came before is answered by reading it now
    config = load(flags)
    as_json = config.lines.format == "json"
    configure_logging(level=config.lines.level, as_json=config.lines.format == "json")
    for warning in config.warnings:
        log.warning("configuration", extra={"warning": warning})
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            announce = functools.partial(_announce, as_json)
            runner.run(serve(config, announce, lambda: load(flags), _pages(config.web_addr)))
    except DanubeError as error:
        if not as_json:
            raise
        log.critical("broker ended", extra={"why": str(error)})
        raise typer.Exit(code_of(error)) from error


broker.__signature__ = inspect.Signature([*_options()])  # type: ignore[attr-defined]


def _pages(web_addr: str) -> Pages | None:
    """The web admin beside the broker; None if it has no address."""
    if not web_addr:
        return None
    from pydanube.web.server import beside_broker  # here: a broker without pages need not wait for them

    return functools.partial(beside_broker, web_addr)


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


def _announce(as_json: bool, at: Listening) -> None:
    (_print_banner_in_json if as_json else _print_banner)(at)
    if HANGUPS.came:  # between reading the configuration and serving, whose handler is there by now
        signal.raise_signal(signal.SIGHUP)


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
