"""The brokers of a cluster keep history in one store: a broker with another one is not let in."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pydanube.broker.stores import Stores
from pydanube.config import ClusterConfig, Config, StorageConfig
from pydanube.errors import ConfigError, StoreRefused
from pydanube.ports import ObjectStore
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.stores.objects.owned import OwnedObjectStore
from pydanube.stores.work.system import SystemClock, SystemWork
from tests.support import run


def stores_of(place: Path, url: str) -> Stores:
    place.mkdir(exist_ok=True)
    config = Config(
        mode="cluster", data_dir=str(place), cluster=ClusterConfig(etcd=("x:1",)), storage=StorageConfig(url=url)
    )
    return Stores(config, FileDisk(place), SystemClock(), SystemWork())


async def opened(place: Path, url: str, metadata: MemoryMetadataStore) -> ObjectStore:
    stores = stores_of(place, url)
    try:
        return await stores.open_objects(metadata)
    finally:
        await stores.close()


def test_brokers_whose_stores_differ_refuse_to_start_and_say_what_to_do(tmp_path: Path) -> None:
    async def main() -> None:
        metadata = MemoryMetadataStore(SystemClock())
        shared, own = (tmp_path / "shared").as_uri(), (tmp_path / "own").as_uri()
        await opened(tmp_path / "a", shared, metadata)
        await opened(tmp_path / "b", shared, metadata)
        with pytest.raises(ConfigError) as refused:
            await opened(tmp_path / "c", own, metadata)
        assert "--storage-url" in str(refused.value) and own in str(refused.value)
        assert "not the store that the other brokers of this cluster use" in str(refused.value)
        assert "give every broker the same one" in str(refused.value)
        await opened(tmp_path / "a", shared, metadata)  # the others are not harmed

    run(main())


def test_two_ways_to_write_one_place_are_one_store(tmp_path: Path) -> None:
    async def main() -> None:
        metadata = MemoryMetadataStore(SystemClock())
        await opened(tmp_path / "a", (tmp_path / "shared").as_uri(), metadata)
        os.symlink(tmp_path / "shared", tmp_path / "mounted")
        await opened(tmp_path / "b", (tmp_path / "mounted").as_uri(), metadata)

    run(main())


def test_a_store_that_was_away_at_the_start_is_compared_before_it_is_used() -> None:
    async def main() -> None:
        answers = ["it is not the store of the others", ""]

        async def objection() -> str:
            return answers.pop(0)

        store = OwnedObjectStore(MemoryObjectStore(), "north", "s3://own", objection)
        with pytest.raises(StoreRefused, match="it is not the store of the others"):
            await store.put("a", [b"a"])
        await store.put("a", [b"a"])
        assert await store.get("a") == b"a" and answers == [], "and not asked again"

    run(main())
