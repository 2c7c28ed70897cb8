"""A broker as a process: from the configuration to the last flushed cursor.

    start ─► servers open ─► announced ─► SIGTERM or SIGINT ─► they refuse new work ─► commits end, cursors saved ─► 0
                               │                │
                               │                ├── in a cluster, before: topics are sealed, others serve them
                               │                └── a second signal: 130 immediately, as after a crash
                               ├── SIGHUP: the configuration is read again; what can change now does, the rest is named
                               └── another process has this broker's id: one line, 1

Nothing acknowledged depends on the way out: a process that is killed instead loses only the cursors of the last
seconds, so that some messages are delivered twice; in a cluster its topics wait until its lease has run out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from pydanube.api.grpc.peers import Peers
from pydanube.api.http.metrics import MetricsServer
from pydanube.api.memory import give_back_large_blocks, keep_collections_short
from pydanube.api.server import BrokerServers, open_metrics
from pydanube.broker.service import Broker
from pydanube.config import Config, open_files
from pydanube.config.reload import reloaded
from pydanube.errors import ConfigError, DanubeError, DirectoryInUse
from pydanube.telemetry import Telemetry, configure_logging

log = logging.getLogger(__name__)

EXIT_INTERRUPTED: Final = 130
# One request to stop may arrive twice: to the process group, and passed on by a parent (make, timeout).
REPEAT_SECONDS: Final = 0.3
OPEN_FILES_FEW: Final = 4096  # below, connections and topics cost more than they must
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Listening(NamedTuple):
    """Where a broker that is ready can be found: addresses as bound, and those that clients get."""

    broker_id: int
    topics: int
    client_addr: str
    stream_addr: str
    admin_addr: str
    metrics_addr: str
    connect_url: str
    data_dir: Path
    unopened: int  # topics that could not be opened; the log says why
    mode: str
    storage: str  # where history is kept: the URL of the object store
    web_addr: str = ""  # of the web admin; empty: there is none


# From the admin address and the native URL of a broker to pages over them; yields where they are, or nothing.
Pages: TypeAlias = Callable[[str, str], contextlib.AbstractAsyncContextManager[str]]


async def serve(
    config: Config,
    announce: Callable[[Listening], None],
    read_again: Callable[[], Config] | None = None,
    pages: Pages | None = None,
) -> None:
    """Returns after a clean stop. `announce` is called once, when clients can connect.

    `read_again` is the configuration with the file as it is now, for SIGHUP; it may raise ConfigError. `pages` is
    the web admin, which runs in the broker's process as long as that serves.

    Raises ConfigError for a port that is taken, DirectoryInUse, FormatTooNew, DiskFull and NodeIdInUse.
    """
    if config.mode == "cluster":
        check_ports(config)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()
    told_at = 0.0

    def stop(number: signal.Signals) -> None:
        nonlocal told_at
        if not stopping.is_set():
            told_at = loop.time()
            log.info("broker stopping", extra={"signal": number.name})
            stopping.set()
        elif loop.time() - told_at > REPEAT_SECONDS:
            log.warning("broker abandoned", extra={"signal": number.name})
            os._exit(EXIT_INTERRUPTED)

    hangup = asyncio.Event()  # one that comes before the broker is ready is heard when it is
    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    loop.add_signal_handler(signal.SIGHUP, hangup.set)
    try:
        reloading = Reloading(hangup, read_again or (lambda: config))
        await _serve(config, announce, stopping, reloading, pages or _no_pages)
    finally:
        for number in (*SIGNALS, signal.SIGHUP):
            loop.remove_signal_handler(number)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # there is nothing left to reload, and the exit code is known


def check_ports(config: Config) -> None:
    """Other brokers learn this one's addresses before it listens, so none may be left to the system."""
    addresses = config.broker
    for flag, address in (
        ("--broker-addr", addresses.client_addr),
        ("--stream-addr", addresses.stream_addr),
        ("--admin-addr", addresses.admin_addr),
    ):
        if address.endswith(":0"):
            raise ConfigError(flag, address, "a broker of a cluster needs a port that does not change")


async def _serve(
    config: Config,
    announce: Callable[[Listening], None],
    stopping: asyncio.Event,
    reloading: Reloading,
    pages: Pages,
) -> None:
    _take_open_files()
    give_back_large_blocks()
    telemetry = Telemetry()
    metrics = MetricsServer(telemetry)
    await _check_directory(config)
    await open_metrics(metrics, config.broker)
    try:
        broker = await _started(config, telemetry, stopping)
        if broker is not None:
            await _serve_on(broker, metrics, announce, stopping, reloading, pages)
    finally:
        await metrics.close()


def _take_open_files() -> None:
    """As many as the system allows; says so if that is few."""
    share = open_files.raise_limit()
    if share.limit < OPEN_FILES_FEW:
        log.warning(
            "few open files",
            extra={"limit": share.limit, "native": share.native, "grpc": share.grpc, "advice": "raise ulimit -n"},
        )


async def _serve_on(
    broker: Broker,
    metrics: MetricsServer,
    announce: Callable[[Listening], None],
    stopping: asyncio.Event,
    reloading: Reloading,
    pages: Pages,
) -> None:
    config = broker.config
    try:
        servers = await BrokerServers.open(broker, metrics)
        try:
            async with pages(servers.admin_addr, broker.stream_url) as web_addr:
                keep_collections_short()
                announce(
                    Listening(
                        broker.broker_id,
                        len(broker.topics.loaded),
                        servers.client_addr,
                        servers.stream_addr,
                        servers.admin_addr,
                        servers.metrics_addr,
                        broker.connect_url,
                        config.data_dir,
                        len(broker.topics.unopened),
                        config.mode,
                        config.objects_url,
                        web_addr,
                    )
                )
                reloads = asyncio.create_task(reloading.run(broker, servers), name="reload")
                try:
                    await _until_over(broker, servers, stopping)
                finally:
                    reloads.cancel()
                    await asyncio.gather(reloads, return_exceptions=True)
        finally:
            await servers.close()
    finally:
        await broker.stop()


class Reloading:
    """Reads the configuration again on SIGHUP. An invalid one changes nothing."""

    def __init__(self, hangup: asyncio.Event, read_again: Callable[[], Config]) -> None:
        self._hangup = hangup
        self._read_again = read_again

    async def run(self, broker: Broker, servers: BrokerServers) -> None:
        while True:
            await self._hangup.wait()
            self._hangup.clear()
            try:
                await self._reload(broker, servers)
            except (DanubeError, OSError) as error:
                log.error("configuration not reloaded: nothing was changed", extra={"why": str(error)})
            except Exception:  # whatever it is, it must not cost the next reload
                log.exception("configuration not reloaded")

    async def _reload(self, broker: Broker, servers: BrokerServers) -> None:
        running, found = broker.config, reloaded(broker.config, self._read_again())
        await broker.reload(found.config)
        servers.change_stream_limits(found.config.stream.limits)
        lines = found.config.lines
        if lines != running.lines:  # the line below is written if the level of before or the one from now on allows it
            configure_logging(
                level=min(lines.level, running.lines.level, key=_severity), as_json=lines.format == "json"
            )
        log.info(
            "configuration reloaded",
            extra={
                "changed": "; ".join(map(str, found.changed)) or "nothing",
                **({"needs_restart": ", ".join(found.restart)} if found.restart else {}),
                **({"no_effect": "; ".join(found.overruled)} if found.overruled else {}),
            },
        )
        if lines != running.lines:
            configure_logging(level=lines.level, as_json=lines.format == "json")


def _severity(level: str) -> int:
    return logging.getLevelNamesMapping()[level.upper()]


@contextlib.asynccontextmanager
async def _no_pages(admin_addr: str, stream_url: str) -> AsyncIterator[str]:
    yield ""


async def _check_directory(config: Config) -> None:
    try:
        await Broker.check_directory(config)
    except DirectoryInUse as error:
        raise DirectoryInUse(str(config.data_dir), error.pid) from error  # the name that the operator knows


async def _started(config: Config, telemetry: Telemetry, stopping: asyncio.Event) -> Broker | None:
    """None: it was asked to stop before it was ready. A cluster's metadata store may be away for long."""
    starting = asyncio.create_task(Broker.start(config, telemetry, Peers), name="start the broker")
    stopped = asyncio.create_task(stopping.wait(), name="told to stop")
    try:
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return None
        return starting.result()
    except DirectoryInUse as error:
        raise DirectoryInUse(str(config.data_dir), error.pid) from error  # the name that the operator knows
    finally:
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)


async def _until_over(broker: Broker, servers: BrokerServers, stopping: asyncio.Event) -> None:
    """Returns when it is time to stop, with the topics handed over. Raises what ended this broker's membership."""
    stopped = asyncio.create_task(stopping.wait(), name="told to stop")
    ended = broker.cluster.ended if broker.cluster is not None else None
    awaited: set[asyncio.Future[Any]] = {stopped, *([ended] if ended is not None else [])}
    try:
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
    if ended is not None and ended.done():
        ended.result()
    # The servers are still open: a topic is refused only from when it leaves, and clients go where it went.
    servers.stop_being_ready()
    await broker.hand_over()
