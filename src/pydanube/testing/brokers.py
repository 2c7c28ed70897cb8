"""A broker for tests, in their process: the broker of `danube broker`, with free ports and a directory of its own.

    async with pydanube.testing.broker() as broker:
        async with pydanube.connect(broker.url) as client: ...

    with pydanube.testing.broker() as broker:
        with pydanube.blocking.connect(broker.url) as client: ...

It keeps what it is given on disk, and forgets it with the directory, unless `data_dir` says where to keep it. With
`memory` it is all in memory: no file is made, and a test that publishes much waits for no disk.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from pydanube.api.server import BrokerServers
from pydanube.broker.service import Broker
from pydanube.client.thread import LoopThread
from pydanube.config import BrokerConfig, Config, StorageConfig
from pydanube.config.stream import StreamConfig
from pydanube.errors import ConfigError
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.schemas.process import SchemaProcesses
from pydanube.stores.work.system import SystemClock, SystemWork

ANY_PORT = "127.0.0.1:0"


class TestBroker:
    """Made by `broker`. The URLs are there inside the `with` or `async with` block."""

    __test__ = False  # its name is not that of a test

    def __init__(
        self,
        data_dir: Path | str | None = None,
        *,
        memory: bool = False,
        storage: StorageConfig | None = None,
        stream: StreamConfig | None = None,
    ) -> None:
        if memory and data_dir is not None:
            raise ConfigError("data_dir", str(data_dir), "None, with memory=True")
        self.url = ""  # for pydanube.connect
        self.grpc_url = ""  # for the official clients
        self.admin_url = ""  # for danube admin --endpoint
        self.data_dir = None if data_dir is None else Path(data_dir)
        self._is_in_memory = memory
        self._storage = storage or StorageConfig()
        self._stream = stream or StreamConfig()
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._broker: Broker | None = None
        self._servers: BrokerServers | None = None
        self._thread: LoopThread | None = None

    async def start(self) -> Self:
        """As entering the `async with` block."""
        addresses = BrokerConfig(client_addr=ANY_PORT, admin_addr=ANY_PORT, metrics_addr=ANY_PORT, stream_addr=ANY_PORT)
        config = Config(broker=addresses, storage=self._storage, stream=self._stream)
        if self._is_in_memory:
            clock = SystemClock()
            self._broker = await Broker.start_on(
                config,
                disk=MemoryDisk(),
                metadata=MemoryMetadataStore(clock),
                clock=clock,
                work=SystemWork(),
                parsers=SchemaProcesses(),
            )
        else:
            if self.data_dir is None:
                self._directory = tempfile.TemporaryDirectory(prefix="danube-")
                self.data_dir = Path(self._directory.name)
            self._broker = await Broker.start(replace(config, data_dir=self.data_dir))
        try:
            self._servers = await BrokerServers.open(self._broker)
        except BaseException:
            await self._broker.stop()
            raise
        self.url = f"{self._stream.scheme}://{self._servers.stream_addr}"
        self.grpc_url = f"http://{self._servers.client_addr}"
        self.admin_url = f"http://{self._servers.admin_addr}"
        return self

    async def stop(self) -> None:
        """As leaving the `async with` block. The data directory stays, if it was given."""
        if self._servers is not None:
            await self._servers.close(grace_seconds=0.5)
        if self._broker is not None:
            await self._broker.stop()
        self._servers = self._broker = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = self.data_dir = None

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    def __enter__(self) -> Self:
        """On an event loop in a thread of its own, for tests without one."""
        self._thread = LoopThread("danube test broker")
        try:
            return self._thread.call(self.start())
        except BaseException:
            self._thread.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        try:
            self._thread.call(self.stop())
        finally:
            self._thread.stop()


def broker(data_dir: Path | str | None = None, *, memory: bool = False) -> TestBroker:
    """A broker for the length of a `with` or `async with` block.

    It keeps messages in `data_dir`, or in a directory that goes with it, or with `memory` in no file at all.

    >>> async with pydanube.testing.broker() as broker:
    ...     async with pydanube.connect(broker.url) as client:
    ...         await client.create_topic("/default/orders")
    ...         print(await client.list_topics())
    ['/default/orders']
    """
    return TestBroker(data_dir, memory=memory)
