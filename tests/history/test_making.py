"""What is given to the process that makes objects, and what it makes of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pydanube.errors import Conflict
from pydanube.formats.batch import Batch, Envelope, encode_messages, stamp
from pydanube.formats.parquet_read import check_bytes, open_object
from pydanube.history.object_builder import (
    BATCHES_AT_ONCE,
    UNCOPIED_FROM_BYTES,
    NotBuilt,
    Packed,
    Parts,
    Recipe,
    build_in_worker,
    build_object,
    pack,
)
from pydanube.ports import ObjectStore
from pydanube.stores.objects.urls import open_object_store
from pydanube.stores.work.pickle_pipe import dumped
from pydanube.stores.work.worker_process import WorkerProcesses

CHANCE = Random(7)


def batch_of(size: int, offset: int) -> Batch:
    batch = encode_messages([Envelope(CHANCE.randbytes(size))], topic="/default/t")
    return stamp(batch, base_offset=offset, epoch=1, append_time=1)


def packed_of(batches: Sequence[Batch]) -> Packed:
    return Packed([piece for some in pack(batches) for piece in some])


def recipe(source: Sequence[Batch] | Packed | Parts) -> Recipe:
    return Recipe("/default/t", 1, source)


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    """Small and large ones, in any order, and more than are packed at once."""
    sizes = [CHANCE.choice([10, 2_000, UNCOPIED_FROM_BYTES + 1, 100_000]) for _ in range(3 * BATCHES_AT_ONCE + 1)]
    return [batch_of(size, offset) for offset, size in enumerate(sizes)]


def test_packed_batches_make_the_same_object(batches: list[Batch]) -> None:
    packed = packed_of(batches)
    assert b"".join(packed.pieces) == b"".join(each.to_bytes() for each in batches)
    one, other = build_object(recipe(batches)), build_object(recipe(packed))
    assert (one.start_offset, one.end, one.footer_crc) == (other.start_offset, other.end, other.footer_crc)
    assert one.data == other.data


def test_no_message_is_in_what_is_pickled_and_no_large_one_is_copied(batches: list[Batch]) -> None:
    packed = packed_of(batches)
    pickled, *views = dumped(partial(build_object, recipe(packed)))
    assert pickled.nbytes < 50 * len(packed.pieces) + 500
    large = [each.body for each in batches if len(each.body) >= UNCOPIED_FROM_BYTES]
    assert len([view for view in views if any(view.obj is memoryview(body).obj for body in large)]) == len(large) > 10


def test_others_have_their_turn_after_few_batches(batches: list[Batch]) -> None:
    for some in pack([batch_of(UNCOPIED_FROM_BYTES - 2_000, offset) for offset in range(100)]):
        assert sum(piece.nbytes for piece in some) <= 1 << 20
    assert len(list(pack(batches))) == 4


CANCELLING = """
import asyncio
from functools import partial
from pydanube.formats.batch import Envelope, encode_messages, stamp
from pydanube.history.object_builder import Packed, Recipe, build_object, pack
from pydanube.stores.work.worker_process import WorkerProcesses

def batch_of(offset):
    batch = encode_messages([Envelope(bytes(50_000)) for _ in range(10)], topic="/default/t")
    return stamp(batch, base_offset=10 * offset, epoch=1, append_time=1)

async def main():
    batches = [batch_of(offset) for offset in range(60)]
    beside = WorkerProcesses(1)
    await beside.call(int)
    for _ in range(5):
        packed = Packed([piece for some in pack(batches) for piece in some])
        packed = partial(build_object, Recipe("/default/t", 1, packed))
        task = asyncio.create_task(beside.call(packed))
        del packed
        await asyncio.sleep(0.01)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            pass
        del task
        [[] for _ in range(200_000)]  # the collector comes by itself
    beside.close()

asyncio.run(main())
"""


def test_a_broker_survives_that_its_uploads_are_cancelled() -> None:
    """Before Python 3.13 the interpreter dies if it collects views of certain buffers."""
    done = subprocess.run([sys.executable, "-c", CANCELLING], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@contextlib.asynccontextmanager
async def directory(path: str) -> AsyncIterator[ObjectStore]:
    store = await open_object_store(f"file://{path}")
    try:
        yield store
    finally:
        await store.close()


def apart_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any], *arguments: object) -> Any:
    """What `function` says in another process, where a directory is the store."""
    repository = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(repository), str(repository / "src")]))

    async def main() -> Any:
        beside = WorkerProcesses(1)
        beside._pool.yield_to_nice()  # tests keep every core busy: an idle priority would not do
        try:
            return await beside.call_once(partial(function, *arguments, partial(directory, str(tmp_path))))
        finally:
            beside.close()

    return asyncio.run(main())


def test_another_process_makes_stores_and_merges_objects_and_tells_what_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[Batch]
) -> None:
    parts = []
    for name, some in (("a.parquet", batches[:40]), ("b.parquet", batches[40:])):
        made, info = apart_on(tmp_path, monkeypatch, build_in_worker, name, recipe(packed_of(some)))
        stored = (tmp_path / name).read_bytes()
        assert made == build_object(recipe(some))._replace(data=b"")
        assert (info.key, info.size_bytes) == (name, len(stored))
        check_bytes(stored, made.footer_crc)
        parts.append((name, made.footer_crc))
    made, info = apart_on(tmp_path, monkeypatch, build_in_worker, "ab.parquet", recipe(Parts(parts)))
    stored = (tmp_path / "ab.parquet").read_bytes()
    assert (made.start_offset, made.end, info.size_bytes) == (0, len(batches), len(stored))
    assert open_object(stored).end == len(batches)
    wrong = [(parts[0][0], parts[0][1]), (parts[1][0], parts[1][1] ^ 1)]
    found = apart_on(tmp_path, monkeypatch, build_in_worker, "no.parquet", recipe(Parts(wrong)))
    assert isinstance(found, NotBuilt) and found.part == 1
    missing = [("nowhere.parquet", 1), parts[1]]
    found = apart_on(tmp_path, monkeypatch, build_in_worker, "no.parquet", recipe(Parts(missing)))
    assert found == NotBuilt("it is missing", 0)
    assert not (tmp_path / "no.parquet").exists()


def test_another_process_tells_that_a_name_is_taken_and_that_arrow_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: list[Batch]
) -> None:
    (tmp_path / "a.parquet").write_bytes(b"somebody else's")
    with pytest.raises(Conflict):
        apart_on(tmp_path, monkeypatch, build_in_worker, "a.parquet", recipe(packed_of(batches[:3])))
    assert (tmp_path / "a.parquet").read_bytes() == b"somebody else's"
    hole = recipe(packed_of([batches[0], batches[2]]))
    found = apart_on(tmp_path, monkeypatch, build_in_worker, "b.parquet", hole)
    assert isinstance(found, NotBuilt) and found.part is None
    assert not (tmp_path / "b.parquet").exists()
