"""What every ObjectStore does."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from pydanube.errors import Conflict, InvalidName
from pydanube.ports import ObjectInfo, ObjectStore
from pydanube.stores.objects.cloud import RemoteObjectStore


async def keys(objects: ObjectStore, prefix: str, after: str = "") -> list[str]:
    return [info.key async for info in objects.list(prefix, after=after)]


async def test_an_object_is_its_buffers_joined(objects: ObjectStore) -> None:
    await objects.put("a/b.parquet", [b"one ", bytearray(b"two "), memoryview(b"xthreex")[1:6]])
    assert await objects.get("a/b.parquet") == b"one two three"


async def test_an_object_does_not_change_with_the_buffer_it_was_made_from(objects: ObjectStore) -> None:
    buffer = bytearray(b"before")
    await objects.put("a", [buffer])
    buffer[:] = b"after!"
    assert await objects.get("a") == b"before"


@pytest.mark.parametrize("data", [[], [b""]])
async def test_an_object_may_be_empty(objects: ObjectStore, data: list[bytes]) -> None:
    info = await objects.put("empty", data)
    assert info.size_bytes == 0
    assert await objects.get("empty") == b""
    assert await objects.get_range("empty", 0, 10) == b""


async def test_put_replaces_the_whole_object(objects: ObjectStore) -> None:
    await objects.put("a", [b"a long first version"])
    await objects.put("a", [b"short"])
    assert await objects.get("a") == b"short"
    assert (await objects.head("a")).size_bytes == 5


async def test_put_and_head_and_list_say_the_same_of_an_object(objects: ObjectStore) -> None:
    info = await objects.put("a", [b"12345"])
    assert info == ObjectInfo("a", 5, info.etag)
    assert info.etag
    assert await objects.head("a") == info
    assert [found async for found in objects.list("")] == [info]


async def test_another_content_has_another_etag(objects: ObjectStore) -> None:
    before = await objects.put("a", [b"before"])
    after = await objects.put("a", [b"after."])
    assert before.etag != after.etag


async def test_create_refuses_a_key_that_exists_and_keeps_the_object(objects: ObjectStore) -> None:
    await objects.put("a", [b"first"], create=True)
    with pytest.raises(Conflict) as caught:
        await objects.put("a", [b"second"], create=True)
    assert caught.value.key == "a"
    assert await objects.get("a") == b"first"


async def test_create_succeeds_after_a_delete(objects: ObjectStore) -> None:
    await objects.put("a", [b"first"], create=True)
    await objects.delete("a")
    await objects.put("a", [b"second"], create=True)
    assert await objects.get("a") == b"second"


async def test_of_many_who_create_one_key_exactly_one_succeeds(objects: ObjectStore) -> None:
    puts = [objects.put("a", [b"%d" % i], create=True) for i in range(10)]
    results = await asyncio.gather(*puts, return_exceptions=True)
    winners = [i for i, result in enumerate(results) if isinstance(result, ObjectInfo)]
    assert len(winners) == 1
    assert sum(isinstance(result, Conflict) for result in results) == 9
    assert await objects.get("a") == b"%d" % winners[0]


@pytest.mark.parametrize(
    ("position", "length", "expected"),
    [
        (0, 10, b"0123456789"),
        (3, 4, b"3456"),
        (9, 1, b"9"),
        (8, 10, b"89"),
        (0, 0, b""),
        (5, 0, b""),
        (10, 1, b""),
        (999, 5, b""),
        (0, 1 << 40, b"0123456789"),
    ],
)
async def test_a_range_is_shorter_only_where_the_object_ends(
    objects: ObjectStore, position: int, length: int, expected: bytes
) -> None:
    await objects.put("a", [b"0123456789"])
    assert await objects.get_range("a", position, length) == expected


async def test_a_key_that_is_not_there_is_not_found(objects: ObjectStore) -> None:
    await objects.put("there/too", [b"x"])
    for key in ("missing", "there"):
        with pytest.raises(FileNotFoundError):
            await objects.get(key)
        with pytest.raises(FileNotFoundError):
            await objects.get_range(key, 0, 1)
        with pytest.raises(FileNotFoundError):
            await objects.head(key)


async def test_a_deleted_object_is_gone(objects: ObjectStore) -> None:
    await objects.put("a", [b"x"])
    await objects.delete("a")
    with pytest.raises(FileNotFoundError):
        await objects.get("a")
    assert await keys(objects, "") == []


async def test_deleting_what_is_not_there_is_no_error(objects: ObjectStore) -> None:
    await objects.delete("missing")


async def test_list_is_ordered_by_key_whatever_the_order_of_puts(objects: ObjectStore) -> None:
    for key in ("b", "a/2", "a.", "a/10", "a"):
        await objects.put(key, [b""])
    assert await keys(objects, "") == ["a", "a.", "a/10", "a/2", "b"]


async def test_list_keeps_the_order_of_keys_where_one_directory_begins_like_another(objects: ObjectStore) -> None:
    """The minus sign and the dot sort before the slash, and the letters behind it."""
    names = ["eu/orders-x/1.raw", "eu/orders.raw", "eu/orders/1.raw", "eu/orders/2.raw", "eu/orders2/1.raw", "eu/z.raw"]
    for key in reversed(names):
        await objects.put(key, [b""])
    assert await keys(objects, "") == await keys(objects, "eu/") == names
    assert await keys(objects, "eu/o", after="eu/a") == names[:-1]
    for number, name in enumerate(names):
        assert await keys(objects, "", after=name) == names[number + 1 :]
    assert await keys(objects, "eu/", after="eu/orders") == names
    assert await keys(objects, "eu/", after="eu/orders/") == names[2:]


async def test_a_prefix_is_text_and_not_a_directory(objects: ObjectStore) -> None:
    for key in ("a/bc", "a/b/c", "a/b", "a/c", "x"):
        await objects.put(key, [b""])
    assert await keys(objects, "a/b") == ["a/b", "a/b/c", "a/bc"]
    assert await keys(objects, "a/b/") == ["a/b/c"]
    assert await keys(objects, "nothing") == []


async def test_list_goes_on_after_a_key_whether_or_not_it_exists(objects: ObjectStore) -> None:
    for key in ("t/1", "t/3", "t/5", "u/7"):
        await objects.put(key, [b""])
    assert await keys(objects, "t/", after="t/3") == ["t/5"]
    assert await keys(objects, "t/", after="t/2") == ["t/3", "t/5"]
    assert await keys(objects, "t/", after="t/5") == []
    assert await keys(objects, "t/", after="a") == ["t/1", "t/3", "t/5"]


async def test_a_list_longer_than_any_page_is_complete(objects: ObjectStore) -> None:
    names = [f"many/{i:05}" for i in range(1100)]
    for start in range(1000, -1, -100):
        await asyncio.gather(*(objects.put(name, [b""]) for name in names[start : start + 100]))
    assert await keys(objects, "many/") == names
    assert await keys(objects, "many/", after="many/00049") == names[50:]


@pytest.mark.parametrize(
    "key", ["plain", "v1.2/x.y", "year=2026/a-b_c.parquet", "straße/日本語/ÿ", "a/.b", ".a/..b", "p" * 240]
)
async def test_a_key_is_listed_as_it_was_put(objects: ObjectStore, key: str) -> None:
    await objects.put(key, [b"x"])
    assert await objects.get(key) == b"x"
    assert await keys(objects, "") == [key]
    assert await keys(objects, key[:1], after=key[:-1]) == [key]
    await objects.delete(key)
    assert await keys(objects, "") == []


@pytest.mark.parametrize(
    "key",
    [
        *("", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/../b", "a/..", "a/./b"),
        *("a\\b", "a\0b", "a b", "a\n", "a%2fb", "a?b", "a#b", "C:a", "~a", "a" * 241, "a/" * 400 + "a"),
    ],
)
async def test_a_key_that_could_leave_its_place_or_that_a_store_might_misread_is_refused(
    objects: ObjectStore, key: str
) -> None:
    with pytest.raises(InvalidName):
        await objects.put(key, [b"x"])
    with pytest.raises(InvalidName):
        await objects.put(key, [b"x"], create=True)
    with pytest.raises(InvalidName):
        await objects.get(key)
    with pytest.raises(InvalidName):
        await objects.get_range(key, 0, 1)
    with pytest.raises(InvalidName):
        await objects.head(key)
    with pytest.raises(InvalidName):
        await objects.delete(key)


@pytest.mark.parametrize("prefix", ["/", "..", "../", "a/../", "a//", "\0", "a b", "%", "é" * 900])
async def test_a_prefix_that_no_key_has_lists_nothing(objects: ObjectStore, prefix: str) -> None:
    await objects.put("a/b", [b"x"])
    assert await keys(objects, prefix) == []


async def test_a_large_object_comes_back_whole_and_in_ranges(objects: ObjectStore) -> None:
    """Larger than any limit at which an adapter may begin to do it in parts."""
    block = bytes(range(256)) * 4096
    data = [block, memoryview(block)[1:], bytearray(block), b"", b"end"] * 7
    whole = b"".join(data)
    assert len(whole) > 20 * 1024 * 1024
    info = await objects.put("large", data)
    assert info.size_bytes == len(whole)
    assert await objects.head("large") == info
    assert [found async for found in objects.list("")] == [info]
    assert await objects.get("large") == whole
    for length in (8_000_001, 9_900_001):  # those that come at once, and those that come by and by
        assert await objects.get_range("large", 8_000_001, length) == whole[8_000_001 : 8_000_001 + length]
    assert await objects.get_range("large", len(whole) - 3, 100) == b"end"
    with pytest.raises(Conflict):
        await objects.put("large", [b"another"], create=True)


async def test_a_large_object_is_created_once(objects: ObjectStore) -> None:
    data = [bytes([number]) * 6 * 1024 * 1024 for number in range(4)]
    await objects.put("large", data, create=True)
    for again in (data[::-1], [b"small"]):
        with pytest.raises(Conflict):
            await objects.put("large", again, create=True)
    assert await objects.get("large") == b"".join(data)


async def test_of_many_who_create_a_large_object_at_once_one_is_there_whole(objects: ObjectStore) -> None:
    """A store may look first and then put in parts: then more than one is told that it succeeded."""
    data = [bytes([number]) * 6 * 1024 * 1024 for number in range(4)]
    results = await asyncio.gather(
        *(objects.put("large", data[n:] + data[:n], create=True) for n in range(4)), return_exceptions=True
    )
    winners = [n for n, result in enumerate(results) if isinstance(result, ObjectInfo)]
    assert len(winners) >= 1 and sum(isinstance(result, Conflict) for result in results) == 4 - len(winners)
    assert isinstance(objects, RemoteObjectStore) or len(winners) == 1
    assert await objects.get("large") in [b"".join(data[n:] + data[:n]) for n in winners]


async def test_objects_may_be_deleted_while_they_are_listed(objects: ObjectStore) -> None:
    for i in range(5):
        await objects.put(f"a/{i}", [b""])
    async for info in objects.list("a/"):
        await objects.delete(info.key)
    assert await keys(objects, "a/") == []


async def test_what_opens_it_elsewhere_opens_the_same_store(objects: ObjectStore) -> None:
    opening = await objects.opener()
    assert (opening is not None) == isinstance(objects, RemoteObjectStore)
    if opening is None:
        return
    async with pickle.loads(pickle.dumps(opening))() as same:
        await same.put("theirs", [b"1"])
        assert await objects.get("theirs") == b"1"
        await objects.put("ours", [b"2"])
        assert await same.get("ours") == b"2"
