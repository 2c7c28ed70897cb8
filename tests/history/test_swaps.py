"""Objects that a job made for the owner: it reads both a row group at a time, and believes what it has compared."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pydanube.broker.topic import Topic
from pydanube.core.history.tiers import Descriptor, object_name
from pydanube.errors import InvalidObject, Refused
from pydanube.formats import parquet_write
from pydanube.formats.erasure import erase_object
from pydanube.formats.parquet_read import FOOTER_GUESS_BYTES, open_object
from tests.harness.brokers import BrokerFixture, one_topic, publish, simulated
from tests.harness.tiers import STILL, ObjectStoreFixture, TierFixture, carried

KIB = 1024
WHEN = "2026-11-18T08:00:00+00:00"


class Counting:
    """How much the store gave out in every answer."""

    def __init__(self, objects: ObjectStoreFixture) -> None:
        self.answers: list[int] = []
        self._get, self._range = objects.get, objects.get_range
        objects.get, objects.get_range = self.get, self.get_range  # type: ignore[method-assign]

    async def get(self, key: str) -> bytes:
        data = await self._get(key)
        self.answers.append(len(data))
        return data

    async def get_range(self, key: str, position: int, length: int) -> bytes:
        data = await self._range(key, position, length)
        self.answers.append(len(data))
        return data


async def large_object(host: TierFixture, topic: Topic) -> Descriptor:
    dice = Random(7)
    for number in range(24):
        await publish(topic, dice.randbytes(32 * KIB).hex(), key=["ann", "bob"][number % 2])
    await topic.flush_log()
    found = carried(topic).tier.objects.keyed
    assert len(found) == 1
    return found[0]


async def put_erased(host: TierFixture, old: Descriptor, change: Any = lambda data: data, **more: Any) -> Descriptor:
    prefix = "default/orders/"
    before = await host.object_store.get(prefix + old.object_id)
    made = erase_object(before, old.footer_crc, ["ann"], WHEN).encoded
    name = object_name(old.start_offset, old.end - 1, old.epoch, attempt=10**9)
    info = await host.object_store.put(prefix + name, [change(bytes(made.data))], create=True)
    new = replace(old, object_id=name, size=info.size_bytes, etag=info.etag, footer_crc=made.footer_crc)
    return replace(new, **more)


@simulated
async def test_the_owner_compares_objects_a_row_group_at_a_time() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet_write, "ROW_GROUP_BYTES", 128 * KIB)
        host = TierFixture(replace(STILL, object_bytes=8 * KIB * KIB))
        _, orders = await one_topic(host)
        old = await large_object(host, orders)
        footer = open_object(await host.object_store.get("default/orders/" + old.object_id), old.footer_crc)
        assert len(footer.row_groups) > 5
        new = await put_erased(host, old)
        counting = Counting(host.object_store)
        await orders.swap_objects([old.object_id], new)
    assert carried(orders).tier.objects.keyed[0].object_id == new.object_id
    largest = max(group.length for group in footer.row_groups)
    assert max(counting.answers) <= max(largest, FOOTER_GUESS_BYTES) < old.size / 4
    texts = [message.payload for _, message in await orders.rows(0, 24)]
    assert [bool(text) for text in texts] == [False, True] * 12


@simulated
async def test_an_erased_object_that_is_damaged_cut_short_or_missing_is_refused_and_the_old_one_stays() -> None:
    host = TierFixture(replace(STILL, object_bytes=8 * KIB * KIB))
    _, orders = await one_topic(host)
    old = await large_object(host, orders)

    def flipped(data: bytes) -> bytes:
        return data[:100] + bytes([data[100] ^ 1]) + data[101:]

    wrong: list[tuple[Any, dict[str, Any]]] = [
        (flipped, {}),
        (lambda data: data, {"size": old.size * 2}),
        (lambda data: data, {"footer_crc": 17}),
        (lambda data: data, {"footer_crc": 0}),
        (lambda data: data, {"max_publish_time": old.max_publish_time + 1}),
    ]
    for change, more in wrong:
        new = await put_erased(host, old, change, **more)
        with pytest.raises(InvalidObject):
            await orders.swap_objects([old.object_id], new)
        await host.object_store.delete("default/orders/" + new.object_id)
    with pytest.raises(InvalidObject, match="not in the store"):
        await orders.swap_objects([old.object_id], replace(new, max_publish_time=old.max_publish_time))
    assert carried(orders).tier.objects.keyed == [old]


@simulated
async def test_a_broker_without_an_object_store_refuses_and_is_not_asked_again() -> None:
    _, orders = await one_topic(BrokerFixture())
    with pytest.raises(Refused, match="no object store") as caught:
        await orders.flush_log()
    assert not caught.value.retryable
