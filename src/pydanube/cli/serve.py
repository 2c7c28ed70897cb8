"""`danube admin serve`: the web admin as a process of its own, for a cluster or a broker elsewhere.

danube admin serve                                             pages for the broker at --endpoint, on 127.0.0.1:8080
danube admin serve --read-only --listen-addr 0.0.0.0:8080      for everybody to look at, and to change nothing
"""

from __future__ import annotations

import asyncio
import signal
from typing import Annotated

import typer

from pydanube.cli.admin import ENDPOINT, app
from pydanube.cli.contexts import native_address
from pydanube.client.grpc.connection import target
from pydanube.errors import ConfigError


@app.command("server", hidden=True)
@app.command("serve")
def serve(
    listen_addr: Annotated[
        str, typer.Option(metavar="IP:PORT", help="Where a browser finds it. Port 0 is one of the system's choice.")
    ] = "127.0.0.1:8080",
    broker_endpoint: Annotated[
        str | None, typer.Option(help="A broker's admin address; it tells of the others.", show_default="--endpoint")
    ] = None,
    service_addr: Annotated[
        str | None,
        typer.Option(
            help="A broker's native port, for redriving and for finding messages by time.",
            show_default="danube://, the endpoint's host, 6651",
        ),
    ] = None,
    read_only: Annotated[bool, typer.Option("--read-only", help="Shows everything, changes nothing.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A host name that browsers use for it, beside its address; may be repeated."),
    ] = None,
    request_timeout_ms: Annotated[int, typer.Option(min=100, help="How long a broker may take to answer.")] = 5_000,
    cache_ttl_ms: Annotated[int, typer.Option(min=0, help="How old lists on a page may be.")] = 3_000,
) -> None:
    """Pages to look at a cluster and to run it, until Ctrl-C. Whoever reaches the port may do it: see --read-only."""
    # Here, so that other commands need not wait for the web server and the templates.
    from pydanube.config.checks import address
    from pydanube.telemetry import configure_logging
    from pydanube.web.app import WebSettings
    from pydanube.web.server import bind, serving

    configure_logging()
    listen = address("--listen-addr", listen_addr)
    endpoint, flag = (broker_endpoint, "--broker-endpoint") if broker_endpoint else (ENDPOINT.get(), "--endpoint")
    target(endpoint, flag)
    settings = WebSettings(
        endpoint=endpoint,
        stream_url=service_addr or native_address(endpoint),
        read_only=read_only,
        allowed_hosts=tuple(allow_host or ()),
        call_seconds=request_timeout_ms / 1000,
        cache_seconds=cache_ttl_ms / 1000,
    )

    async def run() -> None:
        stopping = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopping.set)
        try:
            listener = bind(listen)
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise ConfigError("--listen-addr", listen, f"an address that is free ({why})") from None
        async with serving(listener, listen, settings, flag=flag) as at:
            mode = ", read-only" if read_only else ""
            print(f"Web admin for {endpoint}{mode}: http://{at}\n\nCtrl-C stops it.", flush=True)
            await stopping.wait()

    asyncio.run(run())
