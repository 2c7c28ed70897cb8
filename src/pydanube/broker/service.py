"""One broker: builds everything, starts it in order, stops it in reverse.

    lock and log ─► metadata ─► namespaces ─► topics claimed ─► timer, cursors ─► (doors, opened by api/)

Here alone adapters are chosen. A broker without doors is complete: tests and the front doors use the same object.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

from pydanube.broker.cursors import Cursors
from pydanube.broker.subscription import Services
from pydanube.broker.timer import Timer
from pydanube.broker.topic import Defaults
from pydanube.broker.topics import Rooms, Topics
from pydanube.config import Config
from pydanube.core.names import BrokerId, TopicName, parse_broker_id
from pydanube.log.batch import Envelope
from pydanube.log.layout import read_file, replace_file
from pydanube.log.wal import Wal, WalConfig
from pydanube.ports import Clock, Disk, MetadataStore, Work
from pydanube.stores.files import FileDisk
from pydanube.stores.sqlite import SqliteMetadataStore
from pydanube.stores.system import SystemClock, SystemWork
from pydanube.telemetry import Telemetry

log = logging.getLogger(__name__)

T = TypeVar("T")

NODE_ID: Final = "node_id"
METADATA: Final = "metadata.sqlite"


class Broker:
    """Serves topics until it is stopped."""

    def __init__(
        self, config: Config, disk: Disk, clock: Clock, work: Work, close_stores: Callable[[], None] = lambda: None
    ) -> None:
        self.config = config
        self.telemetry = Telemetry()
        self.clock = clock
        self._disk = disk
        self._work = work
        self._close_stores = close_stores
        self._tasks: list[asyncio.Task[None]] = []
        self.broker_url = config.broker.broker_url or f"http://{config.broker.client_addr}"
        self.connect_url = config.broker.connect_url or self.broker_url
        self.stream_url = f"danube://{config.broker.stream_addr}"
        # Set by `_start`, before anybody else has the broker.
        self.broker_id: BrokerId
        self.topics: Topics
        self.wal: Wal
        self.cursors: Cursors

    @property
    def proxy(self) -> bool:
        return self.broker_url != self.connect_url

    @classmethod
    async def start(cls, config: Config) -> Broker:
        """A broker on a real directory. Raises DirectoryInUse, FormatTooNew, DiskFull, ConfigError."""
        data_dir = Path(config.data_dir)
        disk, clock, work = FileDisk(data_dir), SystemClock(), SystemWork()
        stores: list[SqliteMetadataStore] = []

        def close_stores() -> None:
            for store in stores:
                store.close()
            disk.close()

        def open_metadata() -> MetadataStore:
            stores.append(SqliteMetadataStore(data_dir / METADATA, clock))
            return stores[0]

        broker = cls(config, disk, clock, work, close_stores)
        await broker._start(open_metadata)
        return broker

    @classmethod
    async def start_on(cls, config: Config, *, disk: Disk, metadata: MetadataStore, clock: Clock, work: Work) -> Broker:
        """The same broker on ports that the caller owns: for simulation and for tests."""
        broker = cls(config, disk, clock, work)
        await broker._start(lambda: metadata)
        return broker

    async def _start(self, open_metadata: Callable[[], MetadataStore]) -> None:
        config = self.config
        storage = config.storage
        await self._disk.make_directory("")
        # The log takes the directory's lock, so it comes before anything else that is in there.
        self.wal = await Wal.open(
            self._disk,
            self.clock,
            self._work,
            WalConfig(segment_bytes=storage.segment_bytes, segment_seconds=storage.segment_seconds),
            observe=self._observe_group,
        )
        metadata = open_metadata()
        self.broker_id = await self._node_id()
        timer = Timer(self.clock)
        self.cursors = Cursors(metadata, self.clock)
        services = Services(self.clock, timer, self.cursors, self._dead_letter, lambda: self.broker_url)
        defaults = Defaults(config.dispatch.heartbeat, config.dispatch.max_unacked_messages)
        self.topics = Topics(
            Rooms(
                self.broker_id,
                self._work.random_u64(),
                metadata,
                self._disk,
                self.wal,
                self._work,
                services,
                self.telemetry,
                defaults,
            )
        )
        self._tasks = [
            asyncio.create_task(timer.run(), name="timer"),
            asyncio.create_task(self.cursors.run(), name="cursors"),
            asyncio.create_task(self.topics.reap(), name="reap"),
        ]
        await self.topics.bootstrap_namespaces(config.broker.bootstrap_namespaces, config.policies)
        await self.topics.load_all()
        log.info("broker started", extra={"broker_id": self.broker_id, "topics": len(self.topics.loaded)})

    async def stop(self) -> None:
        """Refuses new work, finishes commits, saves cursors, lets go of everything."""
        await self.topics.close_all("the broker is shutting down")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.wal.close()
        self._close_stores()
        log.info("broker stopped", extra={"broker_id": self.broker_id})

    def _observe_group(self, batches: int, size_bytes: int, seconds: float) -> None:
        wal = self.telemetry.wal
        wal.groups.inc()
        wal.appends.inc(batches)
        wal.append_bytes.inc(size_bytes)
        wal.group_latency.observe(seconds)

    async def run(self, function: Callable[[], T]) -> T:
        """Calls a CPU-bound function away from the event loop."""
        return await self._work.run(function)

    async def _dead_letter(self, topic: TopicName, message: Envelope) -> None:
        await self.topics.dead_letter(topic, message)

    async def _node_id(self) -> BrokerId:
        """This broker's id: chosen once, kept in the data directory."""
        stored = await read_file(self._disk, NODE_ID)
        if stored is not None:
            return parse_broker_id(stored.decode(errors="replace").strip())
        chosen = self._work.random_u64()
        await replace_file(self._disk, NODE_ID, f"{chosen}\n".encode())
        return BrokerId(chosen)
