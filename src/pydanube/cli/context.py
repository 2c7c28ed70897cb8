"""`danube context`: the commands. What they keep, and what uses it, is in `contexts.py`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from pydanube.cli import contexts
from pydanube.cli.contexts import Context
from pydanube.cli.exits import UsageError
from pydanube.cli.output import Output, OutputOption, print_done, print_fields, print_rows
from pydanube.errors import ConfigError, DanubeError, Refused


class Exists(Refused):
    """The name is taken."""


HELP: Final = "Names for clusters: add, use, list, show, remove."

app = typer.Typer(no_args_is_help=True)


def _names(incomplete: str) -> list[str]:
    try:
        return sorted(name for name in contexts.load().contexts if name.startswith(incomplete))
    except (DanubeError, OSError):
        return []


Name = Annotated[str, typer.Argument(metavar="NAME", help="The context's name.", autocompletion=_names)]


@app.command("add")
def add(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name: letters, digits, '.', '_' and '-'.")],
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A broker's admin address.", show_default="port 50051 of the other's host"),
    ] = None,
    service_addr: Annotated[
        str | None,
        typer.Option(
            "--service-addr",
            "-s",
            metavar="URL",
            help="A broker's address for messages: danube://… is the native protocol, http://… is gRPC.",
            show_default="native, port 6651 of the other's host",
        ),
    ] = None,
    use: Annotated[bool, typer.Option("--use", help="And use it from now on.")] = False,
    replace: Annotated[bool, typer.Option("--replace", help="Also if there is one of this name.")] = False,
    output: OutputOption = Output.table,
) -> None:
    """Name a cluster by the addresses of one of its brokers. The first one is used at once.

    danube context add prod --endpoint http://broker-1.prod:50051 --use
    """
    if not contexts.NAME.fullmatch(name):
        raise ConfigError("NAME", name, "letters, digits, '.', '_' and '-', at most 64, not '.' or '-' first")
    if endpoint is None and service_addr is None:
        raise UsageError("say where it is: --endpoint, --service-addr, or both")
    book = contexts.load()
    if name in book.contexts and not replace:
        raise Exists(f"there is a context {name} already: --replace changes it")
    if endpoint is not None:
        _check_endpoint(endpoint)
    if service_addr is not None:
        _check_service(service_addr)
    found = Context(
        endpoint or contexts.endpoint_of(service_addr or ""), service_addr or contexts.native_of(endpoint or "")
    )
    book.contexts[name] = found
    if use or book.in_use is None:
        book.in_use = name
    contexts.save(book)
    used = book.in_use == name
    print_done(
        f"Context added: {name}{', in use' if used else ''}", output, context=name, **found._asdict(), in_use=used
    )


def _check_endpoint(url: str) -> None:
    from pydanube.client.grpc.connection import target

    target(url, "--endpoint")


def _check_service(url: str) -> None:
    from pydanube.client.brokers import addresses_of
    from pydanube.client.grpc.connection import target

    if url.startswith(("http:", "https:")):
        target(url, "--service-addr")
    else:
        addresses_of(url)


@app.command("use")
def use(name: Name, output: OutputOption = Output.table) -> None:
    """Use a context from now on, wherever no option says otherwise."""
    book = contexts.load()
    found = book.get(name)
    book.in_use = name
    contexts.save(book)
    print_done(f"Context in use: {name}", output, context=name, **found._asdict())


@app.command("list")
def list_contexts(output: OutputOption = Output.table) -> None:
    """All contexts, and which one is in use."""
    book = contexts.load()
    rows = [
        {"name": name, "in_use": name == book.in_use, **each._asdict()} for name, each in sorted(book.contexts.items())
    ]
    if output is Output.table:
        rows = [{**row, "in_use": "*" if row["in_use"] else ""} for row in rows]
    print_rows(rows, ("name", "in_use", "endpoint", "service_addr"), output)


@app.command("show")
def show(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Its name.", show_default="the one in use", autocompletion=_names),
    ] = None,
    output: OutputOption = Output.table,
) -> None:
    """The addresses of a context."""
    book = contexts.load()
    name = name or contexts.CHOSEN.get().name or book.in_use
    if name is None:
        here = Context(contexts.DEFAULT_ENDPOINT, contexts.DEFAULT_SERVICE)
        print_fields({"name": None, **here._asdict()}, output)
        return
    print_fields({"name": name, **book.get(name)._asdict()}, output)


@app.command("remove")
def remove(name: Name, output: OutputOption = Output.table) -> None:
    """Forget a context. If it was in use, none is: commands ask the broker on this machine again."""
    book = contexts.load()
    book.get(name)
    del book.contexts[name]
    if book.in_use == name:
        book.in_use = None
    contexts.save(book)
    print_done(f"Context removed: {name}", output, context=name)
