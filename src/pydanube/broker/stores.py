"""Chooses the stores of a real broker: metadata in SQLite or etcd, history in a directory or a cloud.

With `service.py` the only place that knows adapters.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from pydanube.config import Config
from pydanube.core import keys
from pydanube.errors import ConfigError, Conflict, Unreachable
from pydanube.ports import Clock, Compare, Disk, MetadataStore, ObjectStore, Put, Work
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.metadata.etcd import EtcdCluster, EtcdMember, EtcdMetadataStore, MemberConfig, follow
from pydanube.stores.metadata.sqlite import SqliteMetadataStore
from pydanube.stores.objects.owned import OwnedObjectStore, check_store
from pydanube.stores.objects.readers import check_readers, readers_options, vended_keys
from pydanube.stores.objects.settings import StoreSettings, parse_url
from pydanube.stores.objects.upload_rate import UploadRate
from pydanube.stores.objects.urls import open_object_store
from pydanube.stores.work.system import SystemClock, SystemWork

log = logging.getLogger(__name__)

STAMP: Final = "danube-store.json"
METADATA: Final = "metadata.sqlite"
ETCD: Final = "etcd"
CLUSTER_ID_RETRY_SECONDS: Final = 1.0


def check_places(config: Config) -> Iterator[str]:
    """What would keep a broker from opening its directories and stores, in sentences. No store is called."""
    yield from _check_directory("--data-dir", Path(config.data_dir))
    try:
        place = parse_url("storage.url", config.objects_url)
        StoreSettings(place, config.storage.options, os.environ)
        readers_keys(config)
    except ConfigError as error:
        yield str(error)
        return
    if place.scheme == "file" and config.storage.url is not None:
        yield from _check_directory("storage.url", Path(place.root))


def readers_keys(config: Config) -> Mapping[str, str]:
    """What clients of the Iceberg catalog are told of the store; see `vended_keys`. Raises ConfigError."""
    return vended_keys(config.objects_url, config.storage.options, config.storage.readers, os.environ)


def _check_directory(key: str, directory: Path) -> Iterator[str]:
    """It, or the nearest that is there above it, is a directory in which this process may write."""
    there = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    if not there.is_dir():
        yield str(ConfigError(key, str(directory), f"a directory ({there} is none)"))
    elif not os.access(there, os.W_OK | os.X_OK):
        yield str(ConfigError(key, str(directory), f"a directory in which this process may write ({there} is not)"))


def directory_ports(directory: Path) -> tuple[Disk, Clock, Work]:
    """For reading a data directory that no broker uses."""
    return FileDisk(directory), SystemClock(), SystemWork()


class Stores:
    """Opens them in order, closes them in reverse."""

    def __init__(self, config: Config, disk: Disk, clock: Clock, work: Work) -> None:
        self._config = config
        self._disk = disk
        self._clock = clock
        self._work = work
        self.upload_rate = UploadRate(clock)
        self.members: EtcdCluster | None = None  # set if this broker runs a member
        self._closing: list[Callable[[], Awaitable[None]]] = []

    def home(self) -> str:
        """The data directory among all directories of all machines: a copy of it has another."""
        place = Path(self._config.data_dir)
        place.mkdir(parents=True, exist_ok=True)
        return f"{socket.gethostname()}:{place.resolve()}:{place.stat().st_ino}"

    async def open_metadata(self) -> MetadataStore:
        """SQLite for a broker that is alone. In a cluster etcd: a given one, or a member that this broker runs."""
        return await (self._open_etcd() if self._config.mode == "cluster" else self._open_sqlite())

    async def _open_etcd(self) -> MetadataStore:
        cluster = self._config.cluster
        endpoints: Sequence[str] = cluster.etcd
        known = endpoints
        if not endpoints:
            member = EtcdMember(
                MemberConfig(
                    directory=Path(self._config.data_dir) / ETCD,
                    raft_addr=cluster.raft_addr,
                    seed_nodes=cluster.seed_nodes,
                    cluster_name=cluster.cluster_name,
                    join=cluster.join,
                )
            )
            self._closing.append(member.stop)
            await member.start()
            endpoints = member.endpoints
            known = endpoints[:1]  # our own; etcd knows where the others are
            self.members = EtcdCluster(endpoints)
        # A renewal must have its answer, from another member if need be, well before the lease runs out.
        ttl = cluster.ttl_seconds
        store = EtcdMetadataStore(endpoints, timeout_seconds=min(5.0, ttl), attempt_seconds=min(1.0, ttl / 6))
        self._closing.append(store.close)
        members = self.members or EtcdCluster(endpoints)
        self._closing.append(members.close)
        following = asyncio.create_task(follow(members, known, [store]), name="follow the members of etcd")

        async def stop_following() -> None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

        self._closing.append(stop_following)
        return store

    async def _open_sqlite(self) -> MetadataStore:
        store = SqliteMetadataStore(Path(self._config.data_dir) / METADATA, self._clock)

        async def close() -> None:
            store.close()

        self._closing.append(close)
        return store

    async def open_objects(self, metadata: MetadataStore) -> ObjectStore:
        """Raises ConfigError for a store that refuses us or is another cluster's. One that is away is asked later."""
        url = self._config.objects_url
        store = await open_object_store(url, self._config.storage.options, upload_rate=self.upload_rate)
        self._closing.append(store.close)
        cluster_id = await self._cluster_id(metadata)
        away = await check_store(store, cluster_id, url=url)
        if away is not None:
            log.warning("object store is away; messages stay in the log until it is back", extra={"why": str(away)})
        if self._config.storage.readers:
            await self._check_readers(away)
        if self._config.mode != "cluster":
            return OwnedObjectStore(store, cluster_id, url)
        if away is None and (objection := await self._objection(metadata, store)):
            raise ConfigError("--storage-url", url, objection)
        return OwnedObjectStore(store, cluster_id, url, lambda: self._objection(metadata, store))

    async def _check_readers(self, away: Unreachable | None) -> None:
        """Raises ConfigError."""
        readers_keys(self._config)
        storage = self._config.storage
        if away is None:
            store = await open_object_store(
                self._config.objects_url, readers_options(storage.options, storage.readers), environment={}
            )
            try:
                away = await check_readers(store)
            finally:
                await store.close()
        if away is not None:
            log.warning("keys for readers not checked: they may be allowed to write", extra={"why": str(away)})

    async def _objection(self, metadata: MetadataStore, store: ObjectStore) -> str:
        """A sentence if the other brokers of this cluster use another store: a directory of one's own, say."""
        fresh = json.dumps(f"{self._work.random_u64():016x}").encode()
        with contextlib.suppress(Conflict):
            await store.put(STAMP, [fresh], create=True)
        stamp = await store.get(STAMP)
        await metadata.transact([Compare(keys.STORE_STAMP, 0)], [Put(keys.STORE_STAMP, stamp)])
        item = await metadata.get(keys.STORE_STAMP)
        if item is not None and item.value == stamp:
            return ""
        return (
            "it is not the store that the other brokers of this cluster use: "
            "give every broker the same one, which all of them reach"
        )

    async def _cluster_id(self, metadata: MetadataStore) -> str:
        """One for all brokers of this metadata store, made by the first. Waits for a store that does not answer."""
        said = ""
        while True:
            try:
                item = await metadata.get(keys.CLUSTER_ID)
                if item is not None:
                    return str(json.loads(item.value))
                made = json.dumps(f"{self._config.cluster.cluster_name}-{self._work.random_u64():016x}").encode()
                await metadata.transact([Compare(keys.CLUSTER_ID, 0)], [Put(keys.CLUSTER_ID, made)])
            except Unreachable as error:
                if str(error) != said:
                    log.warning("waiting for the metadata store", extra={"why": str(error)})
                said = str(error)
                await self._clock.sleep(CLUSTER_ID_RETRY_SECONDS)

    async def close(self) -> None:
        for close in reversed(self._closing):
            await close()
        close_disk = getattr(self._disk, "close", None)
        if close_disk is not None:
            close_disk()
