"""What users of this package write down: `python -m tests.docs.public_names > tests/fixtures/public-names.txt`.

A name that is here is in somebody's program, file, dashboard or script. The fixture is edited when one comes, and read
twice when one goes.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

import typer.main
from starlette.routing import Route

import pydanube
from pydanube.cli.main import build_app
from pydanube.config.file import ALIASES, REPLACED
from pydanube.config.settings import SETTINGS
from pydanube.core.declared import Declared, _take_fields, fields_of
from pydanube.web import app, json_routes
from pydanube.wire._pb.danube import DanubeAdmin_pb2, DanubeApi_pb2
from pydanube.wire._pb.pydanube import admin_pb2, pipelines_pb2, status_pb2, stream_pb2

DOCS: Final = Path(__file__).parents[2] / "docs"
INTERNAL: Final = frozenset({"lane", "parts"})  # what a message needs to be acknowledged
PUBLIC: Final = ("pydanube.blocking", "pydanube.testing", "pydanube.spark", "pydanube.pipeline")


def names() -> Iterator[str]:
    yield from _python()
    yield from _errors()
    yield from _settings()
    yield from _commands()
    yield from _pages()
    yield from _metrics()
    yield from _log_lines()
    yield from _protocol()


def _python() -> Iterator[str]:
    """What `pydanube` and its public modules export, and the methods of those classes."""
    for name in sorted(pydanube.__all__):
        yield f"import pydanube.{name}"
        yield from _members(f"pydanube.{name}", getattr(pydanube, name))
    for module in PUBLIC:
        home = importlib.import_module(module)
        for name in sorted(getattr(home, "__all__", ())):
            yield f"import {module}.{name}"
            yield from _members(f"{module}.{name}", getattr(home, name))


def _members(path: str, found: Any) -> Iterator[str]:
    if not inspect.isclass(found) or issubclass(found, enum.Enum):
        return
    for name in sorted(name for name in dir(found) if not name.startswith("_") and name not in INTERNAL):
        member = inspect.getattr_static(found, name)
        if inspect.isroutine(member) and not isinstance(member, staticmethod | classmethod):
            if getattr(member, "__module__", "").startswith("pydanube"):
                yield f"method {path}.{name}({', '.join(_parameters(member))})"
        elif issubclass(found, BaseException) and hasattr(BaseException, name):
            continue
        else:
            yield f"attribute {path}.{name}"


def _parameters(function: Any) -> Iterator[str]:
    for each in inspect.signature(function).parameters.values():
        if each.name == "self":
            continue
        star = "*" if each.kind is each.VAR_POSITIONAL else "**" if each.kind is each.VAR_KEYWORD else ""
        yield f"{star}{each.name}{'' if each.default is each.empty else '='}"


def _errors() -> Iterator[str]:
    """Every error, what it is a kind of, and the fields it is made of."""
    from pydanube import errors

    for name, found in sorted(vars(errors).items()):
        if inspect.isclass(found) and issubclass(found, errors.DanubeError):
            kinds = " < ".join(each.__name__ for each in found.__mro__[1:] if each.__module__ == errors.__name__)
            families = (errors.DanubeError, *errors.DanubeError.__subclasses__())  # take any words
            fields = "..." if found in families else ", ".join(_fields(found))
            yield f"error {name}({fields}){' < ' if kinds else ''}{kinds}"


def _fields(error: type[Declared]) -> Iterator[str]:
    """`says` makes the constructor of most; others have one of their own."""
    if error.__init__ is not _take_fields:
        yield from _parameters(error)
        return
    for name in fields_of(error):
        yield f"{name}{'=' if hasattr(error, name) else ''}"


def _settings() -> Iterator[str]:
    for key in sorted({*SETTINGS, *ALIASES, *REPLACED}):
        yield f"setting {key}"


def _commands() -> Iterator[str]:
    yield from _walk("danube", typer.main.get_command(build_app(whole=True)))


def _walk(words: str, command: Any) -> Iterator[str]:
    yield f"command {words}"
    for each in command.params:
        spellings = ", ".join([*each.opts, *each.secondary_opts])
        variable = f" variable {each.envvar}" if isinstance(each.envvar, str) else ""
        yield f"{each.param_type_name} {words} {spellings}{variable}"
    for name, below in sorted(getattr(command, "commands", {}).items()):
        yield from _walk(f"{words} {name}", below)


def _pages() -> Iterator[str]:
    """Addresses of the web admin: bookmarks, and scripts that ask for JSON."""
    for path, _ in app.PAGES:
        yield f"page GET {path}"
    for path, _ in app.ACTIONS:
        yield f"page POST {path}"
    for route in json_routes.routes(cast(Any, None)):
        assert isinstance(route, Route)
        yield f"page {' '.join(sorted(route.methods or ()))} {route.path}"


def _metrics() -> Iterator[str]:
    """As docs/metrics.md lists them, which tests/e2e compares with a broker that runs."""
    row = re.compile(r"\| `(danube_\w+)` \| (\w+) \| (.*?) \|")
    for line in sorted((DOCS / "metrics.md").read_text().splitlines()):
        if found := row.match(line):
            yield f"metric {found[1]} {found[2]} {found[3].replace('`', '')}".rstrip()


def _log_lines() -> Iterator[str]:
    """Phrases of log lines that pages tell people to look for: they are in the source, word for word."""
    source = {
        phrase
        for each in Path(pydanube.__file__).parent.rglob("*.py")
        for phrase in re.findall(r'\blog(?:ger)?\.\w+\(\s*"([a-z][^"]*)"', each.read_text())
    }
    pages = "\n".join(each.read_text() for each in sorted(DOCS.rglob("*.md")))
    for phrase in sorted({each for each in re.findall(r"`([a-z][a-z ]+ [a-z ]+)`", pages) if each in source}):
        yield f"log line {phrase}"


def _protocol() -> Iterator[str]:
    """Services of the admin and data ports, and every field of the native protocol, with its number."""
    for file in (DanubeApi_pb2, DanubeAdmin_pb2, admin_pb2, status_pb2, pipelines_pb2):
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                yield f"call {service.full_name}/{method.name}"
    for message in stream_pb2.DESCRIPTOR.message_types_by_name.values():
        for each in message.fields:
            yield f"stream {message.name}.{each.name} = {each.number}"


if __name__ == "__main__":
    print("\n".join(names()))
