"""Every adapter of every port, as a table per port. A new adapter is one line, and its maker above the table.

A maker is a context manager that takes a directory of its own and gives a case: the adapter, and what only
the adapter's world can do (pass time, end a process, cut a cable).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias, TypeVar

from pydanube.ports import Clock, Disk, MetadataStore, ObjectStore, Work
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.metadata.etcd import EtcdMetadataStore
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.metadata.sqlite import SqliteMetadataStore
from pydanube.stores.objects.directory import FileObjectStore
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.stores.objects.urls import open_object_store
from pydanube.stores.work.memory import MemoryWork
from pydanube.stores.work.memory_clock import LoopClock, MemoryClock
from pydanube.stores.work.system import SystemClock, SystemWork
from pydanube.testing.faulty_disk import FaultyDisk
from tests.e2e.etcd import EtcdServer, clear
from tests.e2e.objectstores import S3Server
from tests.support import run, settle

T = TypeVar("T")
Maker: TypeAlias = Callable[[Path], AbstractContextManager[T]]

# --- Clock ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ClockCase:
    clock: Clock
    pass_time: Callable[[float], Awaitable[None]]


@contextmanager
def memory_clock(directory: Path) -> Iterator[ClockCase]:
    clock = MemoryClock()

    async def pass_time(seconds: float) -> None:
        await settle()
        clock.advance(seconds)
        await settle()

    yield ClockCase(clock, pass_time)


@contextmanager
def loop_clock(directory: Path) -> Iterator[ClockCase]:
    yield ClockCase(LoopClock(), asyncio.sleep)


@contextmanager
def system_clock(directory: Path) -> Iterator[ClockCase]:
    yield ClockCase(SystemClock(), asyncio.sleep)


CLOCKS: Mapping[str, Maker[ClockCase]] = {
    "memory": memory_clock,
    "loop": loop_clock,
    "system": system_clock,
}

# --- Disk -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DiskCase:
    """`disk` belongs to a process with number `pid`; `another` is a second holder of the same files."""

    disk: Disk
    pid: int
    another: Disk
    end_process: Callable[[], None]  # of `disk`


@contextmanager
def memory_disk(directory: Path) -> Iterator[DiskCase]:
    disk = MemoryDisk(pid=7)
    yield DiskCase(disk, 7, disk.another_process(pid=8), disk.end_process)


@contextmanager
def file_disk(directory: Path) -> Iterator[DiskCase]:
    # Two descriptors: every test with three files also tests eviction.
    disk = FileDisk(directory, descriptors_max=2)
    another = FileDisk(directory)
    yield DiskCase(disk, os.getpid(), another, disk.close)
    disk.close()
    another.close()


@contextmanager
def faulty_disk(directory: Path) -> Iterator[DiskCase]:
    hardware = FaultyDisk(Random(42))  # without faults it is a disk like any other
    disk = hardware.process(pid=7)
    yield DiskCase(disk, 7, hardware.process(pid=8), lambda: hardware.kill(disk))


DISKS: Mapping[str, Maker[DiskCase]] = {
    "memory": memory_disk,
    "faulty": faulty_disk,
    "files": file_disk,
}

# --- ObjectStore ------------------------------------------------------------------------------------


@contextmanager
def memory_objects(directory: Path) -> Iterator[ObjectStore]:
    yield MemoryObjectStore()


@contextmanager
def objects_on_memory_disk(directory: Path) -> Iterator[ObjectStore]:
    yield run(FileObjectStore.open(MemoryDisk(), "the disk in memory"))


@contextmanager
def objects_on_faulty_disk(directory: Path) -> Iterator[ObjectStore]:
    yield run(FileObjectStore.open(FaultyDisk(Random(42)).process(), "the faulty disk"))


@contextmanager
def objects_on_files(directory: Path) -> Iterator[ObjectStore]:
    disk = FileDisk(directory, descriptors_max=0)
    yield run(FileObjectStore.open(disk, f"file://{directory}"))
    disk.close()


OBJECT_STORES: Mapping[str, Maker[ObjectStore]] = {
    "memory": memory_objects,
    "memory disk": objects_on_memory_disk,
    "faulty disk": objects_on_faulty_disk,
    "files": objects_on_files,
}


@contextmanager
def objects_in_s3(server: S3Server) -> Iterator[ObjectStore]:
    yield run(open_object_store(server.url(), server.options))


# Those that need the server of the fixture `s3_server`.
SERVED_OBJECT_STORES: Mapping[str, Callable[[S3Server], AbstractContextManager[ObjectStore]]] = {
    "s3": objects_in_s3,
}

# --- MetadataStore ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MetadataCase:
    """`ttl_seconds` is a lease that the tests can afford to wait for with `pass_time`. The test's loop runs `close`."""

    store: MetadataStore
    ttl_seconds: float
    pass_time: Callable[[float], Awaitable[None]]
    close: Callable[[], Awaitable[None]] = settle


@contextmanager
def memory_metadata(directory: Path) -> Iterator[MetadataCase]:
    clock = MemoryClock()

    async def pass_time(seconds: float) -> None:
        await settle()
        clock.advance(seconds)
        await settle()

    yield MetadataCase(MemoryMetadataStore(clock), 10.0, pass_time)


@contextmanager
def sqlite_metadata(directory: Path) -> Iterator[MetadataCase]:
    clock = MemoryClock()

    async def pass_time(seconds: float) -> None:
        await settle()
        clock.advance(seconds)
        await settle()

    store = SqliteMetadataStore(directory / "metadata.db", clock)
    yield MetadataCase(store, 10.0, pass_time)
    store.close()


@contextmanager
def etcd_metadata(server: EtcdServer, root: str) -> Iterator[MetadataCase]:
    """No line of the table: it needs a server, which all tests share."""
    ttl_seconds = 2.0  # the shortest that etcd gives

    async def pass_time(seconds: float) -> None:
        # etcd looks twice a second for leases that have run out, and then they have to be ended.
        await asyncio.sleep(seconds + 1.0 if seconds > ttl_seconds else seconds)

    async def close() -> None:
        await store.close()
        await clear([server.client])

    store = EtcdMetadataStore([server.client], root=root)
    yield MetadataCase(store, ttl_seconds, pass_time, close)


METADATA_STORES: Mapping[str, Maker[MetadataCase]] = {
    "memory": memory_metadata,
    "sqlite": sqlite_metadata,
}

# --- Work -------------------------------------------------------------------------------------------


@contextmanager
def memory_work(directory: Path) -> Iterator[Work]:
    yield MemoryWork(Random(42))


@contextmanager
def system_work(directory: Path) -> Iterator[Work]:
    work = SystemWork(threads_max=2)
    yield work
    work.close()


WORKS: Mapping[str, Maker[Work]] = {
    "memory": memory_work,
    "system": system_work,
}
