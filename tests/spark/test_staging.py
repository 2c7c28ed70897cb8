"""A batch of a query is in the topic exactly once, wherever its driver dies and however often. No Spark is started."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
import pytest

import pydanube
from pydanube.client.client import Client
from pydanube.errors import DanubeError
from pydanube.formats.batch import columns_of
from pydanube.ports import ObjectStore
from pydanube.spark.errors import BatchRefused
from pydanube.spark.staging import Publishing, StagedFile, Staging
from pydanube.stores.objects.urls import open_object_store
from tests.spark.places import Place

QUERY = "8a1c3e52"
STEPS = ("manifest", "fence", "scan", "send", "done", "clean")


class Died(Exception):
    """The driver was killed here."""


def dies_at(step: str, occurrence: int = 1) -> Callable[[str], None]:
    seen = Counter[str]()

    def told(name: str) -> None:
        seen[name] += 1
        if name == step and seen[name] == occurrence:
            raise Died(step)

    return told


def rows_of(payloads: list[bytes]) -> pa.RecordBatch:
    return columns_of(payloads, b"\0" * 8 * len(payloads))


async def stage(
    store: ObjectStore, topic: str, batch: int, payloads: list[bytes], *, tasks: int, attempt: str
) -> list[StagedFile]:
    """The batch as so many tasks wrote it."""
    files: list[StagedFile] = []
    for partition in range(tasks):
        staging = Staging(
            store,
            query=QUERY,
            batch=batch,
            partition=partition,
            attempt=attempt,
            file_bytes=1500,
            batch_rows=7,
            compression="none",
        )
        mine = payloads[partition::tasks]
        if mine:
            await staging.add(topic, rows_of(mine))
        files += await staging.finish()
    return files


def in_place(place: Place, tmp_path: Path, test: Callable[[Client, ObjectStore], object]) -> None:
    async def run() -> None:
        store = await open_object_store(f"file://{tmp_path}/staging")
        try:
            async with pydanube.connect(place.url) as client:
                await test(client, store)  # type: ignore[misc]
        finally:
            await store.close()

    place.run(run())


async def commit(
    client: Client,
    store: ObjectStore,
    topic: str,
    batch: int,
    payloads: list[bytes],
    *,
    tasks: int = 2,
    attempt: str = "a",
    step: Callable[[str], None] = lambda name: None,
) -> int:
    files = await stage(store, topic, batch, payloads, tasks=tasks, attempt=attempt)
    return await Publishing(QUERY, store, client, step).commit(batch, files)


async def stored(client: Client, topic: str) -> Counter[bytes]:
    table = await client.fetch(topic).table()
    return Counter(table.column("payload").to_pylist())


BATCH = [b"row %d" % number for number in range(100)]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("occurrence", [1, 5])
def test_a_batch_whose_driver_dies_is_there_once_after_it_comes_again_in_another_shape(
    place: Place, tmp_path: Path, step: str, occurrence: int
) -> None:
    if occurrence > 1 and step != "send":
        occurrence = 1
    topic = place.new_topic("staged")

    async def test(client: Client, store: ObjectStore) -> None:
        with pytest.raises(Died):
            await commit(client, store, topic, 0, BATCH, step=dies_at(step, occurrence))
        shuffled = Random(1).sample(BATCH, len(BATCH))
        await commit(client, store, topic, 0, shuffled, tasks=5, attempt="b")
        assert await stored(client, topic) == Counter(BATCH)
        await commit(client, store, topic, 1, [b"more"], attempt="c")
        assert await stored(client, topic) == Counter([*BATCH, b"more"])

    in_place(place, tmp_path, test)


def test_rows_that_keep_their_producer_are_there_once_and_carry_what_they_carried(place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("kept")
    others = [{"a": str(number), "x-spark-write": "of another query"} if number % 3 else {} for number in range(100)]
    rows = columns_of(BATCH, np.arange(100).tobytes(), producer_name="till-7", attributes=others)

    async def attempt(client: Client, store: ObjectStore, step: Callable[[str], None], attempt: str) -> None:
        staging = Staging(
            store, query=QUERY, batch=0, partition=0, attempt=attempt, file_bytes=1500, batch_rows=7, compression="lz4"
        )
        await staging.add(topic, rows.slice(0, 60))
        await staging.add(topic, rows.slice(60))
        await Publishing(QUERY, store, client, step).commit(0, await staging.finish())

    async def test(client: Client, store: ObjectStore) -> None:
        for number in range(3):
            with pytest.raises(Died):
                await attempt(client, store, dies_at("send", 3), f"a{number}")
        await attempt(client, store, lambda name: None, "b")

    in_place(place, tmp_path, test)
    found = place.table(topic)
    assert Counter(found.column("payload").to_pylist()) == Counter(BATCH)
    assert set(found.column("producer_name").to_pylist()) == {"till-7"}
    assert sorted(found.column("publish_time").cast("int64").to_pylist()) == list(range(100))
    attributes = {row["payload"]: dict(row["attributes"]) for row in found.to_pylist()}
    mark = f"spark.{QUERY}.0"
    for payload, other in zip(BATCH, others, strict=True):
        assert attributes[payload] == {**other, "x-spark-write": mark}


def test_a_query_leaves_one_file_and_no_directory_per_batch(place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("tidy")

    async def test(client: Client, store: ObjectStore) -> None:
        for batch in range(5):
            await commit(client, store, topic, batch, [b"%d" % batch])

    in_place(place, tmp_path, test)
    left = [path.relative_to(tmp_path / "staging" / QUERY) for path in (tmp_path / "staging" / QUERY).rglob("*")]
    assert [str(path) for path in left] == ["done-00000000000000000004.json"]


@pytest.mark.parametrize("seed", range(6))
def test_drivers_that_die_again_and_again_store_everything_once_among_other_producers(
    place: Place, tmp_path: Path, seed: int
) -> None:
    topic = place.new_topic("staged")
    random = Random(seed)

    async def test(client: Client, store: ObjectStore) -> None:
        others = 0
        async with client.producer(topic) as other:
            for batch in range(4):
                payloads = [b"%d.%d" % (batch, number) for number in range(random.randrange(1, 80))]
                while True:
                    others += 1
                    await other.send(b"other")
                    try:
                        await commit(
                            client,
                            store,
                            topic,
                            batch,
                            random.sample(payloads, len(payloads)),
                            tasks=random.randrange(1, 6),
                            attempt=f"{others}",
                            step=dies_at(random.choice(STEPS), random.randrange(1, 9)),
                        )
                        break
                    except Died:
                        continue
        found = await stored(client, topic)
        assert found.pop(b"other") == others
        assert set(found.values()) == {1}
        assert {int(payload.partition(b".")[0]) for payload in found} == set(range(4))

    in_place(place, tmp_path, test)


class Hoarding:
    """A store that removes manifests and never rows: nothing may rest on staged files being gone."""

    def __init__(self, store: ObjectStore) -> None:
        self.put, self.get, self.list, self._delete = store.put, store.get, store.list, store.delete

    async def delete(self, key: str) -> None:
        if not key.endswith(".rows"):
            await self._delete(key)


@pytest.mark.parametrize("paused_at", ["manifest", "fence", "scan", "send", "done"])
@pytest.mark.parametrize("hoards", [False, True])
def test_a_driver_that_wakes_up_beside_its_successor_stores_nothing_twice(
    place: Place, tmp_path: Path, paused_at: str, hoards: bool
) -> None:
    topic = place.new_topic("zombie")

    async def test(client: Client, store: ObjectStore) -> None:
        if hoards:
            store = Hoarding(store)  # type: ignore[assignment]
        paused, resumed = asyncio.Event(), asyncio.Event()

        class Paused(Publishing):
            """Sleeps at one step while its successor does all the work."""

            async def _wait(self) -> None:
                if not paused.is_set():
                    paused.set()
                    await resumed.wait()

            async def _manifest(self, batch: int, files: object) -> object:  # type: ignore[override]
                if paused_at == "manifest":
                    await self._wait()
                return await super()._manifest(batch, files)  # type: ignore[arg-type]

            async def _publish(self, manifest: object, topic: str) -> int:  # type: ignore[override]
                if paused_at == "fence":
                    await self._wait()
                stored = await super()._publish(manifest, topic)  # type: ignore[arg-type]
                if paused_at == "done":
                    await self._wait()
                return stored

            async def _arrived(self, manifest: object, topic: str) -> object:  # type: ignore[override]
                found = await super()._arrived(manifest, topic)  # type: ignore[arg-type]
                if paused_at == "scan":
                    await self._wait()
                return found

            async def _missing(self, manifest, topic, arrived):  # type: ignore[no-untyped-def]
                async for batch in super()._missing(manifest, topic, arrived):
                    yield batch
                    if paused_at == "send":
                        await self._wait()

        files = await stage(store, topic, 0, BATCH, tasks=2, attempt="old")
        async with pydanube.connect(place.url) as other:
            old = asyncio.ensure_future(Paused(QUERY, store, other).commit(0, files))
            await paused.wait()
            await commit(client, store, topic, 0, BATCH[::-1], tasks=3, attempt="new")
            await commit(client, store, topic, 1, [b"next"], attempt="new")
            resumed.set()
            await asyncio.gather(old, return_exceptions=True)
            assert old.exception() is None or isinstance(old.exception(), DanubeError)
        assert await stored(client, topic) == Counter([*BATCH, b"next"])

    in_place(place, tmp_path, test)


def test_an_old_copy_of_a_checkpoint_is_refused(place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("old")

    async def test(client: Client, store: ObjectStore) -> None:
        for batch in range(3):
            await commit(client, store, topic, batch, BATCH, attempt=f"a{batch}")
        with pytest.raises(BatchRefused, match="the checkpoint is an old copy"):
            await commit(client, store, topic, 1, BATCH, attempt="b")
        assert await commit(client, store, topic, 2, BATCH, attempt="c") == 0
        left = [info.key async for info in store.list("")]
        assert left == [f"{QUERY}/done-{2:020}.json"]

    in_place(place, tmp_path, test)


def test_rows_that_the_driver_cannot_see_are_refused(place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("unseen")

    async def test(client: Client, store: ObjectStore) -> None:
        files = await stage(store, topic, 0, BATCH, tasks=2, attempt="a")
        await store.delete(files[-1].key)
        with pytest.raises(BatchRefused, match="set the option staging"):
            await Publishing(QUERY, store, client).commit(0, files)

    in_place(place, tmp_path, test)


def test_a_topic_that_was_made_anew_before_the_batch_was_finished_is_refused(place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("staged-anew")
    place.send(topic, [b"before"] * 200)

    async def test(client: Client, store: ObjectStore) -> None:
        with pytest.raises(Died):
            await commit(client, store, topic, 0, BATCH, step=dies_at("fence"))
        await client.delete_topic(topic)
        await client.create_topic(topic)
        with pytest.raises(BatchRefused, match=r"ends at offset 0, and ended at 200 .* deleted and made again"):
            await commit(client, store, topic, 0, BATCH, attempt="b")
        assert not await stored(client, topic)

    in_place(place, tmp_path, test)


def test_a_batch_waits_for_orphans_that_may_hold_its_rows(place: Place, tmp_path: Path) -> None:
    topic = place.new_topic("behind-orphan")
    place.send(topic, [b"before"])
    place.upload(topic)

    async def first(client: Client, store: ObjectStore) -> None:
        with pytest.raises(Died):
            await commit(client, store, topic, 0, BATCH, step=dies_at("done"))

    in_place(place, tmp_path, first)
    place.upload(topic)
    place.orphan(topic, 1)

    async def second(client: Client, store: ObjectStore) -> None:
        with pytest.raises(BatchRefused, match="start it, then start the query again"):
            await commit(client, store, topic, 0, BATCH, attempt="b")

    in_place(place, tmp_path, second)
    place.rescue(topic, 1)

    async def third(client: Client, store: ObjectStore) -> None:
        assert await commit(client, store, topic, 0, BATCH, attempt="c") == 0
        assert await stored(client, topic) == Counter([b"before", *BATCH])

    in_place(place, tmp_path, third)
