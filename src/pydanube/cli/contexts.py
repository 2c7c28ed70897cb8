"""Contexts: names for clusters, instead of addresses.

danube context add prod --endpoint http://broker-1.prod:50051     and how to reach it for messages, which it guesses
danube context use prod                                           from now on
danube --context staging admin topics list                        this once

They are kept in contexts.json in `directory()`, which only its owner may read. What wins, first to last: an option of
the command, `--context`, the variables DANUBE_ADMIN_ENDPOINT and DANUBE_SERVICE_ADDR, DANUBE_CONTEXT, the context in
use, this machine.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import typer

from pydanube.cli.exits import NotThere
from pydanube.errors import ConfigError

DEFAULT_ENDPOINT: Final = "http://127.0.0.1:50051"
DEFAULT_SERVICE: Final = "danube://127.0.0.1:6651"
ADMIN_PORT: Final = 50051
STREAM_PORT: Final = 6651
FILE: Final = "contexts.json"
NAME: Final = re.compile(r"\w[\w.-]{0,63}")
SERVICE_SCHEMES: Final = ("danube", "danube+tls", "http")


class Context(NamedTuple):
    """Addresses of one cluster: of the admin port, and of the port for messages."""

    endpoint: str
    service_addr: str


@dataclass(slots=True)
class Book:
    """All contexts, and which of them is in use."""

    contexts: dict[str, Context] = field(default_factory=dict)
    in_use: str | None = None

    def get(self, name: str) -> Context:
        if name not in self.contexts:
            known = f"known: {', '.join(sorted(self.contexts))}" if self.contexts else "`danube context add` makes one"
            raise NotThere(f"there is no context {name}; {known}")
        return self.contexts[name]


class Chosen(NamedTuple):
    """The options of `danube` itself, before the command."""

    name: str | None = None
    is_typed: bool = False  # and not a variable


CHOSEN: ContextVar[Chosen] = ContextVar("context", default=Chosen())  # noqa: B039  (nothing changes it)


# --- the file -----------------------------------------------------------------------------------------


def directory() -> Path:
    if given := os.environ.get("DANUBE_CONFIG_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "danube"


def load() -> Book:
    """Raises ConfigError for a file that is none."""
    path = directory() / FILE
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return Book()
    try:
        found = json.loads(text)
        contexts = {
            str(name): Context(str(each["endpoint"]), str(each["service_addr"]))
            for name, each in found["contexts"].items()
        }
        in_use = found.get("in_use")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            str(path), "its content", "JSON as `danube context add` writes it; repair or remove it"
        ) from None
    return Book(contexts, in_use if in_use in contexts else None)


def save(book: Book) -> None:
    """Atomically: a command that reads at the same time sees the old file or the new one."""
    home = directory()
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    content = {
        "in_use": book.in_use,
        "contexts": {name: each._asdict() for name, each in sorted(book.contexts.items())},
    }
    descriptor, temporary = tempfile.mkstemp(dir=home, prefix=f".{FILE}.")  # mode 0600
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
        os.replace(temporary, home / FILE)
    except BaseException:
        os.unlink(temporary)
        raise


# --- what a command uses --------------------------------------------------------------------------------


def chosen() -> Context | None:
    """The context that was asked for, or is in use. Raises NotThere."""
    name = CHOSEN.get().name
    if name:
        return load().get(name)
    book = load()
    return book.contexts[book.in_use] if book.in_use is not None else None


def resolve(context: typer.Context, param: typer.CallbackParam, value: Any) -> Any:
    """Of the options --endpoint and --service-addr: what was typed, or what the context says."""
    source = context.get_parameter_source(param.name or "")
    how = source.name if source is not None else "DEFAULT"
    if context.resilient_parsing or how == "COMMANDLINE" or (how == "ENVIRONMENT" and not CHOSEN.get().is_typed):
        return value
    found = chosen()
    return getattr(found, param.name or "") if found is not None else value


def native_address(endpoint: str) -> str:
    """The native address of the broker whose admin address this is: that of the variables, if it is theirs, else the
    context's, or the usual port of its host.
    """
    given = os.environ.get("DANUBE_SERVICE_ADDR", "")
    is_theirs = endpoint == os.environ.get("DANUBE_ADMIN_ENDPOINT", DEFAULT_ENDPOINT) and not CHOSEN.get().is_typed
    if given.startswith("danube") and is_theirs:
        return given
    found = chosen()
    if found is not None and found.endpoint == endpoint and found.service_addr.startswith("danube"):
        return found.service_addr
    return native_of(endpoint)


def native_of(endpoint: str) -> str:
    return f"danube://{_host(endpoint)}:{STREAM_PORT}"


def endpoint_of(service_addr: str) -> str:
    return f"http://{_host(service_addr)}:{ADMIN_PORT}"


def _host(url: str) -> str:
    first = url.split(",")[0].strip()
    host = urlsplit(first if "://" in first else f"//{first}").hostname or ""
    return f"[{host}]" if ":" in host else host


def completed_endpoint(params: Mapping[str, Any]) -> str:
    """While a line is completed: nothing is checked, and nothing said."""
    try:
        book = load()
    except (ConfigError, OSError):
        return DEFAULT_ENDPOINT
    name = params.get("context") or os.environ.get("DANUBE_CONTEXT") or book.in_use
    return book.contexts[name].endpoint if name in book.contexts else DEFAULT_ENDPOINT
