"""What FileObjectStore does beyond the port: power cuts, failing disks, leftovers, several processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydanube.core.history.object_keys import is_part, path_of
from pydanube.errors import Conflict, DiskFailed, Unreachable
from pydanube.ports import Write, WriteResult
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.objects import directory as file_objects
from pydanube.stores.objects.directory import UPLOADING, FileObjectStore
from pydanube.testing.disk_faults import Faults
from pydanube.testing.faulty_disk import FaultyDisk
from tests.support import run

SEEDS = 8
KILOBYTE = bytes(range(256)) * 4


async def opened(hardware: FaultyDisk) -> FileObjectStore:
    return await FileObjectStore.open(hardware.process(), "the disk")


async def contents(store: FileObjectStore) -> dict[str, bytes]:
    found = {info.key: await store.get(info.key) async for info in store.list("")}
    assert list(found) == sorted(found)
    return found


async def until_dead(task: asyncio.Task[None]) -> None:
    """Ends a task whose disk answers no more, whatever it does on its way out."""
    while not task.done():
        task.cancel()
        await asyncio.sleep(0)
    assert task.cancelled() or task.exception() is None


# --- power cuts -------------------------------------------------------------------------------------


class Told:
    """What a program was told of its objects, and what it has asked for and not heard of yet."""

    def __init__(self) -> None:
        self.certain: dict[str, bytes | None] = {}  # None: deleted
        self.possible: dict[str, set[bytes | None]] = defaultdict(set)

    async def put(self, store: FileObjectStore, key: str, data: bytes, *, create: bool = False) -> None:
        self.possible[key].add(data)
        await store.put(key, [data[:700], data[700:]], create=create)
        self._know(key, data)

    async def delete(self, store: FileObjectStore, key: str) -> None:
        self.possible[key].add(None)
        await store.delete(key)
        self._know(key, None)

    def _know(self, key: str, data: bytes | None) -> None:
        self.certain[key] = data
        self.possible[key].clear()

    def check(self, found: dict[str, bytes]) -> None:
        for key in {*self.certain, *self.possible, *found}:
            assert found.get(key) in {self.certain.get(key), *self.possible[key]}, key


async def program(store: FileObjectStore, told: Told) -> None:
    await told.put(store, "default/orders/data-0-9-1.parquet", KILOBYTE * 3)
    await told.put(store, "default/orders/data-10-19-1.parquet", KILOBYTE * 2, create=True)
    await told.put(store, "manifest.json", b"first" * 300)
    await told.put(store, "manifest.json", b"other" * 300)  # of the same length, so that a mixture would fit
    await told.delete(store, "default/orders/data-0-9-1.parquet")
    await told.put(store, "default/returns/data-0-9-1.parquet", KILOBYTE, create=True)
    await told.put(store, "default", b"a file and a directory")


def cut_after(steps: int, seed: int, cut: Callable[[FaultyDisk, FileObjectStore], None]) -> bool:
    """Runs the program for so many turns of the loop, each of which is one step of the disk, cuts it, and looks at what
    is there. False: the program was done before.
    """

    async def main() -> bool:
        hardware = FaultyDisk(Random(seed))
        told = Told()
        store = await opened(hardware)
        running = asyncio.create_task(program(store, told))
        for _ in range(steps):
            await asyncio.sleep(0)
        done = running.done()
        cut(hardware, store)
        await until_dead(running)
        again = await opened(hardware)
        told.check(await contents(again))
        leftovers = [path for path in hardware.paths() if path.startswith(UPLOADING) and not path.endswith("/LOCK")]
        assert leftovers == []
        # What was half done can be done again.
        await again.put("default/orders/data-0-9-1.parquet", [b"again"])
        assert await again.get("default/orders/data-0-9-1.parquet") == b"again"
        return not done

    return asyncio.run(main())  # hundreds of them: without the checks of debug mode


def power(hardware: FaultyDisk, store: FileObjectStore) -> None:
    hardware.crash()


def kill(hardware: FaultyDisk, store: FileObjectStore) -> None:
    hardware.kill(store._disk)  # type: ignore[arg-type]


@pytest.mark.parametrize("cut", [power, kill])
def test_what_was_put_survives_a_cut_at_any_step_and_nothing_else_is_ever_seen(
    cut: Callable[[FaultyDisk, FileObjectStore], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_objects, "PIECE_BYTES", len(KILOBYTE) * 2)  # the first object has two pieces
    points = next(steps for steps in count() if not all([cut_after(steps, seed, cut) for seed in range(SEEDS)]))
    assert points > 40  # seven calls, each of several writes, renames and syncs


def test_an_object_that_a_killed_process_put_survives_once_somebody_was_told_of_it() -> None:
    """The kill may come between the rename and the sync of the directory, and the power cut only later."""

    async def main(steps: int, seed: int, look: Callable[[FileObjectStore], Coroutine[Any, Any, bool]]) -> bool:
        hardware = FaultyDisk(Random(seed))
        store = await opened(hardware)
        running = asyncio.create_task(store.put("a/b/c.raw", [KILOBYTE]))
        for _ in range(steps):
            await asyncio.sleep(0)
        done = running.done()
        kill(hardware, store)
        while not running.done():
            running.cancel()
            await asyncio.sleep(0)
        seen = await look(await opened(hardware))
        hardware.crash()
        if seen:
            assert await (await opened(hardware)).get("a/b/c.raw") == KILOBYTE
        return done

    async def head(store: FileObjectStore) -> bool:
        try:
            return (await store.head("a/b/c.raw")).size_bytes == len(KILOBYTE)
        except FileNotFoundError:
            return False

    async def create(store: FileObjectStore) -> bool:
        with suppress(Conflict):
            await store.put("a/b/c.raw", [KILOBYTE], create=True)
        return True

    for look in (head, create):
        for seed in range(SEEDS):
            steps = next(steps for steps in count() if run(main(steps, seed, look)))
            assert steps > 10


@pytest.mark.parametrize("seed", range(20))
def test_on_a_failing_disk_a_put_is_kept_or_says_so(seed: int) -> None:
    async def main() -> None:
        rng = Random(seed)
        hardware = FaultyDisk(Random(seed))
        told = Told()
        refused = 0
        for _ in range(10):
            hardware.faults = Faults(latency_seconds_max=0.0)
            store = await opened(hardware)
            hardware.faults = Faults(
                sync_fails=0.1, write_fails=0.1, directory_sync_fails=0.1, read_fails=0.05, latency_seconds_max=0.0
            )
            for number in range(20):
                key = f"default/topic-{rng.randrange(3)}/data-{rng.randrange(4)}.parquet"
                try:
                    if rng.random() < 0.2:
                        await told.delete(store, key)
                    else:
                        data = KILOBYTE * rng.randrange(4) + b"%d" % number
                        await told.put(store, key, data, create=rng.random() < 0.5)
                except Unreachable as error:
                    assert error.peer == "the disk"
                    refused += 1
                except Conflict:
                    told.possible[key].discard(data)
            hardware.crash()
            hardware.faults = Faults(latency_seconds_max=0.0)
            store = await opened(hardware)
            found = await contents(store)
            told.check(found)
            # From here on, what is there is there.
            told.certain = dict(found)
            told.possible.clear()
            await store.close()
        assert refused > 10

    run(main())


# --- several processes ------------------------------------------------------------------------------


async def test_what_a_live_process_is_writing_stays_and_what_a_dead_one_left_goes() -> None:
    disk = MemoryDisk(pid=1)
    store = await FileObjectStore.open(disk, "the disk")
    written = await store._write([b"half an object"])
    other = await FileObjectStore.open(disk.another_process(pid=2), "the disk")
    assert await disk.size(written) == 14
    assert store._place != other._place
    disk.end_process()
    await FileObjectStore.open(disk.another_process(pid=3), "the disk")
    assert await disk.list(store._place) == [("LOCK", False, 0)]


async def test_places_are_used_again() -> None:
    disk = MemoryDisk()
    for _ in range(5):
        first, second = [await FileObjectStore.open(disk, "the disk") for _ in range(2)]
        await first.put("a", [b"x"])
        await second.put("a", [b"x"])
        await first.close()
        await second.close()
    assert [entry.name for entry in await disk.list(UPLOADING)] == ["1", "2"]


async def test_an_object_that_another_process_replaced_or_deleted_is_seen_as_it_is_now(tmp_path: Path) -> None:
    ours, theirs = (FileDisk(tmp_path, descriptors_max=0) for _ in range(2))
    here, there = [await FileObjectStore.open(disk, "the disk") for disk in (ours, theirs)]
    await here.put("a/b.raw", [b"before"])
    assert await here.get("a/b.raw") == await there.get("a/b.raw") == b"before"
    await there.put("a/b.raw", [b"after"])
    assert await here.get("a/b.raw") == b"after"
    assert (await here.head("a/b.raw")).size_bytes == 5
    await there.delete("a/b.raw")
    with pytest.raises(FileNotFoundError):
        await here.get("a/b.raw")
    ours.close()
    theirs.close()


CREATOR = """
import asyncio, sys
from pydanube.errors import Conflict
from pydanube.stores.objects.directory import FileObjectStore
from pydanube.stores.disk.files import FileDisk

async def main(root, name):
    store = await FileObjectStore.open(FileDisk(root, descriptors_max=0), root)
    print("ready", flush=True)
    sys.stdin.readline()
    for number in range(100):
        try:
            await store.put(f"race/{number}", [name.encode() * 1000], create=True)
            print(number, flush=True)
        except Conflict:
            pass

asyncio.run(main(*sys.argv[1:]))
"""


def test_of_real_processes_that_create_one_key_exactly_one_succeeds(tmp_path: Path) -> None:
    names = "ABC"
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CREATOR, str(tmp_path), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    won = {name: child.communicate(timeout=60)[0].split() for name, child in zip(names, children, strict=True)}
    assert sorted(int(number) for numbers in won.values() for number in numbers) == list(range(100))
    for name, numbers in won.items():
        for number in numbers:
            assert (tmp_path / path_of(f"race/{number}")).read_bytes() == name.encode() * 1000


# --- the directory ----------------------------------------------------------------------------------


async def test_our_own_keys_are_paths() -> None:
    assert path_of("default/orders/data-0-4999-3.parquet") == "default/orders/data-0-4999-3.parquet"
    assert path_of("danube-cluster.json") == "danube-cluster.json"


parts = st.text("ab.-%=", min_size=1, max_size=3).filter(is_part)
keys = st.lists(parts, min_size=1, max_size=3).map("/".join)


@given(keys, keys)
def test_no_two_keys_share_a_path_and_none_is_the_directory_of_another(one: str, other: str) -> None:
    path, other_path = path_of(one), path_of(other)
    assert (path == other_path) == (one == other)
    assert not path.startswith(f"{other_path}/")
    assert not path.startswith(UPLOADING)


@given(st.sets(keys, max_size=6))
def test_any_keys_are_listed_as_they_were_put(chosen: set[str]) -> None:
    async def main() -> None:
        store = await FileObjectStore.open(MemoryDisk(), "the disk")
        for key in chosen:
            await store.put(key, [key.encode()])
        assert [info.key async for info in store.list("")] == sorted(chosen)

    asyncio.run(main())


async def test_names_that_are_no_objects_are_left_alone() -> None:
    disk = MemoryDisk()
    store = await FileObjectStore.open(disk, "the disk")
    await store.put("a/b.raw", [b"x"])
    for directory in ("lost+found", "a/v1.2", "x"):
        await disk.make_directory(directory)
    for path in ("README", "a/note~", "lost+found/c.raw", "a/v1.2/c.raw", "x/y.z.%", "x/.%"):
        await disk.create(path)
    assert [info.key async for info in store.list("")] == ["a/b.raw"]
    assert {"README", "lost+found"} < {entry.name for entry in await disk.list("")}


async def test_a_file_in_the_place_of_a_directory_is_named() -> None:
    disk = MemoryDisk()
    store = await FileObjectStore.open(disk, "file:///data")
    await disk.create("a")
    with pytest.raises(Unreachable, match=r"file:///data cannot be reached: a is a file where a directory should be"):
        await store.put("a/b.raw", [b"x"])


async def test_a_full_disk_leaves_nothing_behind_and_heals() -> None:
    disk = MemoryDisk(capacity_bytes=10_000)
    store = await FileObjectStore.open(disk, "file:///data")
    await store.put("a.raw", [bytes(8_000)])
    with pytest.raises(Unreachable, match="no room left"):
        await store.put("b.raw", [bytes(8_000)])
    assert [entry.name for entry in await disk.list(store._place)] == ["LOCK"]
    await store.delete("a.raw")
    await store.put("b.raw", [bytes(8_000)])


class PiecesDisk(MemoryDisk):
    """Remembers how long each write was, and whether it was synced."""

    def __init__(self, capacity_bytes: int | None = None) -> None:
        super().__init__(capacity_bytes=capacity_bytes)
        self.pieces: list[tuple[int, bool]] = []

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        self.pieces += [(sum(memoryview(buffer).nbytes for buffer in each.buffers), sync) for each in writes]
        return await super().write(writes, sync=sync)


@pytest.mark.parametrize("cuts", [[], [0], [5], [64, 64], [100, 1], [1, 300, 64, 0, 63]])
async def test_no_sync_has_more_than_a_piece_of_an_object_to_write(
    cuts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_objects, "PIECE_BYTES", 64)
    disk = PiecesDisk()
    store = await FileObjectStore.open(disk, "the disk")
    disk.pieces.clear()
    buffers = [bytes([number]) * size for number, size in enumerate(cuts)]
    await store.put("a.raw", buffers)
    size = sum(cuts)
    assert disk.pieces == [(64, True)] * ((size - 1) // 64) + [(size - max(0, (size - 1) // 64) * 64, True)]
    assert await store.get("a.raw") == b"".join(buffers)


async def test_an_object_whose_last_piece_finds_no_room_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_objects, "PIECE_BYTES", 1024)
    disk = PiecesDisk(capacity_bytes=10_000)
    store = await FileObjectStore.open(disk, "the disk")
    with pytest.raises(Unreachable, match="no room left"):
        await store.put("a.raw", [bytes(12_000)])
    assert len(disk.pieces) > 8
    assert [entry.name for entry in await disk.list(store._place)] == ["LOCK"]
    assert await contents(store) == {}


async def test_a_cancelled_put_leaves_nothing_behind(tmp_path: Path) -> None:
    disk = FileDisk(tmp_path, descriptors_max=0)
    store = await FileObjectStore.open(disk, "the disk")
    for turns in range(12):
        putting = asyncio.create_task(store.put("a/b.raw", [KILOBYTE * 1000]))
        for _ in range(turns):
            await asyncio.sleep(0.0005)
        putting.cancel()
        await asyncio.wait([putting])
        assert os.listdir(tmp_path / store._place) == ["LOCK"]
    disk.close()


async def test_a_directory_that_does_not_let_us_rename_is_found_out_at_the_start(tmp_path: Path) -> None:
    """A file system without hard links, for example: nobody could create an object there safely."""

    class Linkless(MemoryDisk):
        async def rename_new(self, source: str, target: str) -> None:
            raise DiskFailed(source, "rename", "Operation not permitted")

    with pytest.raises(DiskFailed, match="Operation not permitted"):
        await FileObjectStore.open(Linkless(), "the disk")


# --- etags ------------------------------------------------------------------------------------------


def layouts(data: bytes) -> Iterator[list[bytes]]:
    yield [data]
    yield [data[:5], data[5:70_000], b"", data[70_000:]]
    yield [data[start : start + 1000] for start in range(0, len(data), 1000)]


@pytest.mark.parametrize("size_bytes", [0, 1, 65_535, 65_536, 65_537, 70_000, 200_001])
async def test_the_etag_depends_on_the_bytes_and_not_on_how_they_came(size_bytes: int) -> None:
    disk = MemoryDisk()
    store = await FileObjectStore.open(disk, "the disk")
    data = Random(1).randbytes(size_bytes)
    infos = {await store.put("a.raw", layout) for layout in layouts(data)}
    assert infos == {await store.head("a.raw")}
    (info,) = infos
    for position in (0, size_bytes - 1) if size_bytes else ():
        changed = bytearray(data)
        changed[position] ^= 1
        assert (await store.put("a.raw", [changed])).etag != info.etag


async def test_a_file_that_was_cut_has_another_etag() -> None:
    disk = MemoryDisk()
    store = await FileObjectStore.open(disk, "the disk")
    info = await store.put("a.raw", [bytes(100_000)])
    await disk.truncate("a.raw", 99_999)
    found = await store.head("a.raw")
    assert found.size_bytes == 99_999 and found.etag != info.etag
    await disk.write([Write("a.raw", 99_999, [b"\0"])], sync=True)
    assert await store.head("a.raw") == info
