"""A broker as a process: from the configuration to the last flushed cursor.

    start ─► doors open ─► announced ─► SIGTERM or SIGINT ─► doors refuse new work ─► commits end, cursors saved ─► 0
                                                └── a second signal: 130 at once, as after a crash

Nothing acknowledged depends on the way out: a process that is killed instead loses only the cursors of the last
seconds, so that some messages are delivered twice.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from pydanube.api.server import Doors
from pydanube.broker.service import Broker
from pydanube.config import Config
from pydanube.errors import ConfigError, DirectoryInUse

log = logging.getLogger(__name__)

EXIT_INTERRUPTED: Final = 130
# One wish to stop may come twice at once: to the process group, and passed on by a parent (make, timeout).
REPEAT_SECONDS: Final = 0.3
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


class Listening(NamedTuple):
    """Where a broker that is ready can be found: addresses as bound, and what clients are told."""

    broker_id: int
    topics: int
    client_addr: str
    stream_addr: str
    admin_addr: str
    metrics_addr: str
    connect_url: str
    data_dir: Path
    unopened: int  # topics that could not be opened; the log says why


async def serve(config: Config, announce: Callable[[Listening], None]) -> None:
    """Returns after a clean stop. `announce` is called once, when clients can connect.

    Raises ConfigError for a port that is taken, DirectoryInUse, FormatTooNew and DiskFull.
    """
    if config.mode == "cluster":
        raise ConfigError("--mode", config.mode, "clusters do not exist yet; use --mode standalone")
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

    for number in SIGNALS:
        loop.add_signal_handler(number, stop, number)
    try:
        await _serve(config, announce, stopping)
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


async def _serve(config: Config, announce: Callable[[Listening], None], stopping: asyncio.Event) -> None:
    try:
        broker = await Broker.start(config)
    except DirectoryInUse as error:
        raise DirectoryInUse(str(config.data_dir), error.pid) from error  # the name that the operator knows
    try:
        doors = await Doors.open(broker)
        try:
            announce(
                Listening(
                    broker.broker_id,
                    len(broker.topics.loaded),
                    doors.client_addr,
                    doors.stream_addr,
                    doors.admin_addr,
                    doors.metrics_addr,
                    broker.connect_url,
                    config.data_dir,
                    len(broker.topics.unopened),
                )
            )
            await stopping.wait()
        finally:
            await doors.close()
    finally:
        await broker.stop()
