"""A store belongs to one cluster, and is asked before it is used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import nullcontext

import pytest

from pydanube.errors import ConfigError, StoreRefused, Unreachable
from pydanube.ports import Buffer, ObjectInfo, StoreOpener
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.stores.objects.owned import ID_KEY, OwnedObjectStore, check_store
from pydanube.testing.loop import run as simulate
from tests.support import run

URL = "s3://history/danube"


class Moody(MemoryObjectStore):
    """Fails every call with `error` while there is one."""

    def __init__(self, error: Unreachable | None = None) -> None:
        super().__init__()
        self.error = error

    async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
        if self.error is not None:
            raise self.error
        return await super().put(key, data, create=create)

    async def get(self, key: str) -> bytes:
        if self.error is not None:
            raise self.error
        return await super().get(key)


def test_a_new_store_becomes_the_clusters_and_stays_it() -> None:
    async def main() -> None:
        store = MemoryObjectStore()
        assert await check_store(store, "north", url=URL) is None
        assert json.loads(await store.get("danube-cluster.json")) == {"cluster_id": "north"}
        before = await store.head(ID_KEY)
        assert await check_store(store, "north", url=URL) is None
        assert await store.head(ID_KEY) == before

    run(main())


def test_a_store_of_another_cluster_refuses_with_both_names() -> None:
    async def main() -> None:
        store = MemoryObjectStore()
        await check_store(store, "north", url=URL)
        with pytest.raises(ConfigError) as caught:
            await check_store(store, "south", url=URL, key="--storage-url")
        assert (caught.value.key, caught.value.value) == ("--storage-url", URL)
        assert "'north'" in caught.value.allowed and "'south'" in caught.value.allowed
        assert ID_KEY in caught.value.allowed
        assert await check_store(store, "north", url=URL) is None

    run(main())


def test_of_two_clusters_that_begin_at_once_one_is_refused() -> None:
    async def main() -> None:
        class Slow(MemoryObjectStore):
            """Another broker creates the object between our look and our put."""

            async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
                if key not in self._objects:
                    await super().put(key, [json.dumps({"cluster_id": "quicker"}).encode()])
                return await super().put(key, data, create=create)

        with pytest.raises(ConfigError, match="'quicker'"):
            await check_store(Slow(), "slower", url=URL)
        assert await check_store(Slow(), "quicker", url=URL) is None

    run(main())


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b'{"cluster_id": 5}', b"\xff"])
def test_a_damaged_id_refuses_rather_than_guesses(content: bytes) -> None:
    async def main() -> None:
        store = MemoryObjectStore()
        await store.put(ID_KEY, [content])
        with pytest.raises(ConfigError, match="damaged"):
            await check_store(store, "north", url=URL)
        assert await store.get(ID_KEY) == content

    run(main())


def test_a_store_that_replaces_instead_of_creating_is_refused() -> None:
    async def main() -> None:
        class Careless(MemoryObjectStore):
            async def put(self, key: str, data: Sequence[Buffer], *, create: bool = False) -> ObjectInfo:
                return await super().put(key, data)

        store = Careless()
        with pytest.raises(ConfigError, match="If-None-Match"):
            await check_store(store, "north", url=URL)
        assert json.loads(await store.get(ID_KEY)) == {"cluster_id": "north"}
        with pytest.raises(ConfigError, match="'north'"):  # found before anything is written over it
            await check_store(store, "south", url=URL)

    run(main())


def test_a_store_that_does_not_answer_is_told_from_one_that_refuses() -> None:
    async def main() -> None:
        answer = await check_store(Moody(Unreachable(URL, "connection refused")), "north", url=URL)
        assert isinstance(answer, Unreachable) and answer.why == "connection refused"
        with pytest.raises(ConfigError) as caught:
            await check_store(Moody(StoreRefused(URL, "it refuses us (403)")), "north", url=URL)
        assert caught.value.value == URL
        assert "403" in caught.value.allowed and "AWS_SECRET_ACCESS_KEY" in caught.value.allowed

    run(main())


def test_a_start_does_not_wait_long_for_a_store_that_hangs() -> None:
    async def main() -> None:
        class Hanging(MemoryObjectStore):
            async def get(self, key: str) -> bytes:
                await asyncio.get_running_loop().create_future()
                raise AssertionError

        answer = await check_store(Hanging(), "north", url=URL, seconds=7.5)
        assert isinstance(answer, Unreachable)
        assert str(answer) == f"{URL} cannot be reached: no answer within 7.5 s"
        assert asyncio.get_running_loop().time() == 7.5

    simulate(main(), seed=1)


def test_an_owned_store_asks_before_its_first_use_and_never_again() -> None:
    async def main() -> None:
        below = Moody(Unreachable(URL, "connection refused"))
        store = OwnedObjectStore(below, "north", URL)
        for call in (store.put("a", [b"x"]), store.get("a"), store.head("a"), store.delete("a"), anext(store.list(""))):
            with pytest.raises(Unreachable):
                await call
        below.error = None
        await store.put("a", [b"x"])
        assert json.loads(await below.get(ID_KEY)) == {"cluster_id": "north"}
        await below.put(ID_KEY, [b'{"cluster_id": "south"}'])  # asked no more: that was settled
        assert await store.get("a") == await store.get_range("a", 0, 5) == b"x"
        assert [info.key async for info in store.list("a")] == ["a"]
        await store.delete("a")
        with pytest.raises(FileNotFoundError):
            await store.head("a")

    run(main())


def test_nobody_opens_an_owned_store_elsewhere_before_it_is_known_to_be_ours() -> None:
    async def main() -> None:
        class Open(Moody):
            async def opener(self) -> StoreOpener | None:
                return lambda: nullcontext(self)

        below = Open(Unreachable(URL, "connection refused"))
        store = OwnedObjectStore(below, "north", URL)
        with pytest.raises(Unreachable):
            await store.opener()
        below.error = None
        assert await OwnedObjectStore(below, "south", URL).opener() is not None
        with pytest.raises(StoreRefused, match=r"'south'.*'north'"):
            await store.opener()

    run(main())


def test_nothing_is_written_to_a_store_that_turns_out_to_be_anothers() -> None:
    async def main() -> None:
        below = Moody(Unreachable(URL, "connection refused"))
        store = OwnedObjectStore(below, "north", URL)
        assert await check_store(below, "north", url=URL) is not None
        below.error = None
        await check_store(below, "south", url=URL)
        for _ in range(2):
            with pytest.raises(StoreRefused, match=r"'south'.*'north'"):
                await store.put("a", [b"x"])
        assert [info.key async for info in below.list("")] == [ID_KEY]

    run(main())
