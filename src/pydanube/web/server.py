"""The web admin on a port: beside a broker in its event loop, or alone (`danube admin serve`)."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Final

import uvicorn

from pydanube.config import open_files
from pydanube.web.app import WebSettings, web_admin

log = logging.getLogger(__name__)

BACKLOG: Final = 128
CONNECTIONS_MAX: Final = 200
CLOSE_SECONDS: Final = 1


class _Server(uvicorn.Server):
    """Signals are the process' business, not this server's."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def serving(
    listener: socket.socket, listen: str, settings: WebSettings, *, flag: str = "--broker-endpoint"
) -> AsyncIterator[str]:
    """Serves on what `bind` returned for `listen`, for the length of the block; yields host:port as bound."""
    try:
        async with web_admin(settings, flag=flag) as app:
            config = uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                log_level="warning",
                server_header=False,
                proxy_headers=False,
                limit_concurrency=min(CONNECTIONS_MAX, open_files.current().http + 1),  # it counts the one that asks
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
            server = _Server(config)
            running = asyncio.create_task(server.serve(sockets=[listener]), name="web admin")
            try:
                host, _, _ = listen.rpartition(":")
                yield f"{host}:{listener.getsockname()[1]}"
            finally:
                server.should_exit = True
                await asyncio.gather(running, return_exceptions=True)
    finally:
        listener.close()


@contextlib.asynccontextmanager
async def beside_broker(listen: str, admin_addr: str, stream_url: str) -> AsyncIterator[str]:
    """The pages of a broker in the same process; yields host:port. A taken port costs the pages, not the broker."""
    try:
        listener = bind(listen)
    except OSError as error:
        why = "the port is taken" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
        advice = "--web-addr names another, or off"
        log.warning("web admin not started", extra={"address": listen, "why": why, "advice": advice})
        yield ""
        return
    async with serving(listener, listen, WebSettings(endpoint=admin_addr, stream_url=stream_url)) as web_addr:
        log.info("web admin opened", extra={"address": web_addr})
        yield web_addr


def bind(listen: str) -> socket.socket:
    """Raises OSError."""
    host, _, port = listen.rpartition(":")
    bare = host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in bare else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((bare, int(port)))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise
    return listener
