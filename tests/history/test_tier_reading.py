"""Reading over both tiers: one unbroken stream, whatever is uploaded, merged, forgotten, lost or damaged meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pydanube.broker.topic import Topic
from pydanube.core.history.tiers import Retention
from pydanube.core.names import SubscriptionName
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.core.policies import TopicPolicy
from pydanube.errors import LogDamaged, ObjectDamaged, Unreachable
from pydanube.formats import parquet_read, parquet_write
from pydanube.formats.batch import Batch, messages
from pydanube.formats.parquet import Footer
from pydanube.history import reader as cloud
from pydanube.history.reader import CACHE_BYTES, LOADS_AT_ONCE, CloudReader
from pydanube.ports import Buffer, Write
from pydanube.stores.objects.memory import MemoryObjectStore
from pydanube.testing.loop import run
from tests.harness.brokers import (
    ORDERS,
    SUB,
    Stream,
    consume,
    find_topic,
    make_topic,
    message,
    one_topic,
    publish,
    simulated,
    small_wal,
)
from tests.harness.tiers import (
    KIB,
    SMALL,
    STILL,
    Teller,
    TierFixture,
    all_uploaded,
    carried,
    caught_up,
    check_stored,
    flipped,
    read_everything,
    state_of,
    tell_and_upload,
)

KINDS = [Kind.EXCLUSIVE, Kind.SHARED, Kind.FAILOVER, Kind.KEY_SHARED]


async def history(host: TierFixture, objects: int = 4, count: int = 2, size: int = 4 * KIB) -> tuple[Topic, Teller]:
    """A topic of which only the newest message is on the disk, and none in memory."""
    _, orders = await one_topic(host)
    teller = Teller(size=size)
    await tell_and_upload(orders, teller, objects, count)
    await carried(orders).maintenance.free(orders.log, 10**18)
    orders = await find_topic(await host.restart())
    assert orders.log.first_offset == orders.head - 1
    return orders, teller


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_write, "ROW_GROUP_BYTES", 16 * KIB)


# --- from the cloud -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@simulated
async def test_every_kind_of_subscription_reads_from_the_cloud_and_goes_on_with_the_log(kind: Kind) -> None:
    host = TierFixture(STILL)
    orders, teller = await history(host)
    stream = await consume(orders, SUB, kind, start=0, acks=True)
    await caught_up(stream)
    await teller.tell(orders, 2)
    await caught_up(stream)
    assert dict(zip(stream.offsets, stream.texts, strict=True)) == teller.told
    assert sorted(stream.offsets) == list(range(10))
    if kind is not Kind.SHARED:
        assert stream.offsets == list(range(10))


@simulated
async def test_keys_attributes_times_and_names_come_back_from_the_cloud() -> None:
    host = TierFixture(STILL)
    _, orders = await one_topic(host)
    producer = await orders.add_producer("producer")
    sent = [
        message(f"m{n}", key=f"k{n}" if n % 2 else None, attributes={"n": str(n)}, schema_id=n, schema_version=3)
        for n in range(5)
    ]
    for each in sent:
        await orders.publish(producer, each)
    await all_uploaded(orders)
    host.kill()
    await host.lose_log()
    orders = await find_topic(await host.boot())
    stream = await consume(orders, SUB, Kind.EXCLUSIVE, start=0, acks=True)
    await caught_up(stream)
    assert [each.delivered.message for each in stream.arrivals] == sent


@simulated
async def test_a_native_reader_gets_batches_from_the_cloud() -> None:
    host = TierFixture(STILL)
    orders, teller = await history(host)
    found = await orders.batches(3, 7, 1 << 20)
    rows = [
        (batch.header.base_offset + row, each.payload.decode())
        for batch in found
        for row, each in enumerate(messages(batch))
    ]
    assert set(rows) >= {(3, teller.told[3])}
    assert all(teller.told[offset] == text for offset, text in rows)


@simulated
async def test_a_message_read_from_the_log_first_and_from_the_cloud_later_is_the_same() -> None:
    """What was decoded of a batch of the log is not taken for the cloud tier's longer batch at the same offset."""
    host = TierFixture(STILL)
    with small_wal(cache_bytes=KIB):
        _, orders = await one_topic(host)
    teller = Teller(size=300)
    await teller.tell(orders, 30)
    assert len(await orders.rows(0, 30)) == 30
    await all_uploaded(orders)
    await teller.tell(orders, 2)
    await orders.rows(31, 32)  # the piece that was read last is another one
    assert await carried(orders).maintenance.free(orders.log, 10**18)
    assert orders.log.first_offset > 20
    assert [text.payload.decode() for _, text in await orders.rows(0, 20)] == [teller.told[n] for n in range(20)]


def test_the_stream_is_unbroken_whatever_happens_in_between() -> None:
    """Slow readers of every kind, while messages come, are uploaded, merged, freed and forgotten: from seeds."""

    async def setup(seed: int) -> None:
        rng = Random(seed)
        host = TierFixture(replace(SMALL, upload_seconds=1.0), unacked_max=3)
        _, orders = await one_topic(host)
        teller = Teller(seed, size=3 * KIB)
        await teller.tell(orders, 3)
        streams = [await consume(orders, f"sub {kind.value}", kind, start=0) for kind in KINDS]
        acking = [asyncio.ensure_future(slowly(stream, Random(seed + number))) for number, stream in enumerate(streams)]
        for _ in range(12):
            await teller.tell(orders, rng.randrange(1, 4))
            await asyncio.sleep(rng.random() * 2.5)
            if rng.random() < 0.2:
                host.object_store.away = True
            elif rng.random() < 0.6:
                host.object_store.away = False
        host.object_store.away = False
        for stream in streams:
            await caught_up(stream, 300)
            assert dict(zip(stream.offsets, stream.texts, strict=True)) == teller.told
            if stream.subscription.kind is not Kind.SHARED:
                assert sorted(stream.offsets) == list(range(orders.head)), "a gap or a repetition"
        for task in acking:
            task.cancel()
        await all_uploaded(orders)
        await check_stored(host)
        assert orders.log.first_offset > 5

    for seed in range(6):
        with small_wal(cache_bytes=4 * KIB):
            run(setup(seed), seed)


async def slowly(stream: Stream, rng: Random) -> None:
    """Acknowledges what came, after a while."""
    done = 0
    while True:
        await asyncio.sleep(rng.random() * 0.8)
        for arrival in stream.arrivals[done:]:
            stream.subscription.ack(arrival.delivered.offset)
            done += 1


def test_readers_behind_retention_lose_what_is_forgotten_and_nothing_else() -> None:
    async def setup(seed: int) -> None:
        rng = Random(seed)
        host = TierFixture(SMALL, unacked_max=2, policies=TopicPolicy(retention_minutes=1))
        _, orders = await one_topic(host)
        teller = Teller(seed, size=KIB)
        await teller.tell(orders, 5)
        stream = await consume(orders, SUB, Kind.EXCLUSIVE, start=0)
        acking = asyncio.ensure_future(slowly(stream, Random(seed)))
        for _ in range(8):
            await teller.tell(orders, 8)
            await asyncio.sleep(rng.random() * 25)
        await caught_up(stream, 300)
        acking.cancel()
        assert stream.offsets == sorted(set(stream.offsets)), "out of order, or twice"
        assert all(teller.told[offset] == text for offset, text in zip(stream.offsets, stream.texts, strict=True))
        missing = set(teller.told) - set(stream.offsets)
        assert all(offset < orders.first_offset for offset in missing)
        assert stream.subscription.metrics.skipped.value >= len(missing)

    for seed in range(4):
        with small_wal(cache_bytes=4 * KIB):
            run(setup(seed), seed)


# --- objects that cannot be read ----------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["missing", "a flipped byte", "a flipped byte in its footer", "cut short"])
@simulated
async def test_an_object_that_cannot_be_read_stops_who_reads_it_until_it_is_back(
    harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = TierFixture(STILL)
    orders, teller = await history(host, objects=4)
    other = await make_topic(host.broker, "/default/other")
    key = "default/orders/data-4-5-1.parquet"
    data = await host.object_store.get(key)
    if harm == "missing":
        await host.object_store.delete(key)
    else:
        broken = {
            "a flipped byte": flipped(data, 100),
            "a flipped byte in its footer": flipped(data, len(data) - 50),
            "cut short": data[:-1],
        }[harm]
        await host.object_store.put(key, [broken])
    stopped = await consume(orders, "stopped", Kind.EXCLUSIVE, start=0, acks=True)
    beyond = await consume(orders, "beyond", Kind.SHARED, start=6, acks=True)
    elsewhere = await consume(other, "elsewhere", Kind.SHARED, start=0, acks=True)
    await publish(other, "a")
    await asyncio.sleep(30)
    assert stopped.offsets == [0, 1, 2, 3]
    assert beyond.offsets == [6, 7] and elsewhere.texts == ["a"]
    sentence = stopped.subscription.explain()
    assert key in sentence and "offsets 4 up to 6" in sentence
    said = [record for record in caplog.records if record.message == "log cannot be read"]
    assert said and all(key in str(record.__dict__["why"]) for record in said)
    errors = host.broker.telemetry.cloud.errors.value
    assert 2 <= errors <= 10, "it is asked for every few seconds"
    await host.object_store.put(key, [data])
    await asyncio.sleep(10)
    assert stopped.offsets == list(range(8))
    assert key not in stopped.subscription.explain()
    assert dict(zip(stopped.offsets, stopped.texts, strict=True)) == teller.told


@simulated
async def test_what_lies_behind_an_object_that_cannot_be_read_does_not_come_before_it() -> None:
    """Also when something in between was acknowledged, so that one order to send names several ranges."""
    host = TierFixture(STILL)
    orders, teller = await history(host)
    first = await consume(orders, SUB, Kind.EXCLUSIVE, start=0)
    await asyncio.sleep(1)
    first.ack(2, 3)
    orders = await find_topic(await host.restart())
    key = "default/orders/data-0-1-1.parquet"
    data = await host.object_store.get(key)
    await host.object_store.delete(key)
    stream = await consume(orders, SUB, Kind.EXCLUSIVE, acks=True)
    await teller.tell(orders)
    await asyncio.sleep(20)
    assert stream.offsets == []
    await host.object_store.put(key, [data])
    await caught_up(stream)
    assert stream.offsets == [0, 1, 4, 5, 6, 7, 8]


@simulated
async def test_another_object_under_the_right_name_is_not_read() -> None:
    host = TierFixture(STILL)
    orders, _ = await history(host)
    assert orders.storage is not None
    other = await host.object_store.get("default/orders/data-2-3-1.parquet")
    await host.object_store.put("default/orders/data-4-5-1.parquet", [other])
    with pytest.raises(ObjectDamaged, match="data-4-5-1"):
        await orders.rows(4, 6)


@simulated
async def test_while_the_store_is_away_readers_of_history_wait_and_nothing_is_skipped() -> None:
    host = TierFixture(STILL)
    orders, teller = await history(host)
    host.object_store.away = True
    stream = await consume(orders, SUB, Kind.EXCLUSIVE, start=0, acks=True)
    late = await consume(orders, "latest", Kind.EXCLUSIVE, acks=True)
    await teller.tell(orders)
    await asyncio.sleep(60)
    assert stream.offsets == [] and late.offsets == [8]
    assert "away" in stream.subscription.explain()
    host.object_store.away = False
    await asyncio.sleep(10)
    assert stream.offsets == list(range(9))


@simulated
async def test_while_the_manifest_cannot_be_read_nothing_in_it_is_taken_for_a_gap() -> None:
    host = TierFixture(replace(SMALL, merged_bytes=KIB))
    orders, teller = await history(host, objects=5)
    state, _ = await state_of(host)
    assert len(state.keyed) == 1 and state.history.manifest
    host.kill()
    manifest = f"default/orders/{state.history.manifest}"
    data = await host.object_store.get(manifest)
    orders = await find_topic(await host.boot())
    for broken in (None, data.replace(b'"start_offset": 2', b'"start_offset": 3'), b"{}"):
        await host.object_store.delete(manifest)
        if broken is not None:
            await host.object_store.put(manifest, [broken])
        with pytest.raises(ObjectDamaged, match="manifest"):
            await orders.rows(2, 4)
    await host.object_store.put(manifest, [data])
    assert await read_everything(orders) == teller.told


@simulated
async def test_an_object_that_is_merged_away_under_a_reader_is_found_in_the_merged_one() -> None:
    host = TierFixture(replace(STILL, garbage_seconds=0.0))
    orders, teller = await history(host)
    found = carried(orders)
    assert orders.storage is not None
    await orders.rows(0, 1)  # its footer is known
    get_range = host.object_store.get_range

    async def merging(key: str, position: int, length: int) -> bytes:
        host.object_store.get_range = get_range  # type: ignore[method-assign]
        found.tier.config = replace(SMALL, garbage_seconds=0.0)
        assert await found.maintenance.merge() is not None
        await found.maintenance.sweep()
        return await get_range(key, position, length)

    host.object_store.get_range = merging  # type: ignore[method-assign]
    rows = await orders.rows(2, 4)
    assert [(offset, each.payload.decode()) for offset, each in rows] == [(n, teller.told[n]) for n in (2, 3)]
    assert host.broker.telemetry.cloud.errors.value == 0


@simulated
async def test_descriptors_that_move_to_the_manifest_while_somebody_reads_it_are_not_lost() -> None:
    host = TierFixture(replace(STILL, merged_bytes=KIB, descriptors_max=2, descriptors_moved=1))
    _, orders = await one_topic(host)
    teller = Teller()
    await tell_and_upload(orders, teller, 4)
    host.kill()
    orders = await find_topic(await host.boot())
    found = carried(orders)
    get = host.object_store.get
    slow = asyncio.Event()

    async def slowly_reading(key: str) -> bytes:
        data = await get(key)
        if "manifest" in key and not slow.is_set():
            slow.set()
            await asyncio.sleep(5)
        return data

    host.object_store.get = slowly_reading  # type: ignore[method-assign]
    reading = asyncio.ensure_future(found.tier.load_manifest())
    await slow.wait()
    await tell_and_upload(orders, teller)  # another descriptor moves, by another reading of the manifest
    await reading
    assert list(await found.tier.load_manifest()) == await check_stored(host)
    host.object_store.get = get  # type: ignore[method-assign]
    await carried(orders).maintenance.free(orders.log, 10**18)
    assert await read_everything(orders) == teller.told


# --- the log and the cloud help each other ------------------------------------------------------------------


async def damage_log(host: TierFixture, orders: Topic, offset: int) -> None:
    segment = orders.log.segment_for(offset)
    place = segment.start + 300
    data = await host.disk.read(segment.path, place, 1)
    await host.disk.write([Write(segment.path, place, [flipped(data, 0)])], sync=True)


@simulated
async def test_what_is_damaged_in_the_log_is_read_from_the_cloud() -> None:
    host = TierFixture(replace(STILL, local=Retention()))
    _, orders = await one_topic(host)
    teller = Teller()
    await tell_and_upload(orders, teller, 4)
    await host.broker.stop()
    host.kill()
    await damage_log(host, orders, 1)
    orders = await find_topic(await host.boot())
    assert await read_everything(orders) == teller.told
    assert await orders.offset_at(0) == 0


@pytest.mark.parametrize("harm", ["flipped", "removed"])
@simulated
async def test_what_is_damaged_in_the_log_and_nowhere_else_is_not_skipped(harm: str) -> None:
    host = TierFixture(replace(STILL, upload_seconds=1e9))
    _, orders = await one_topic(host)
    await Teller().tell(orders, 4)
    (await consume(orders, SUB, Kind.EXCLUSIVE, start=0)).leave()
    await host.broker.stop()
    host.kill()
    if harm == "flipped":
        await damage_log(host, orders, 0)
    else:
        await host.disk.remove(orders.log.segment_for(0).path)
    orders = await find_topic(await host.boot())
    with pytest.raises(LogDamaged):
        await orders.rows(0, 1)
    stream = await consume(orders, SUB, Kind.EXCLUSIVE, acks=True)
    await asyncio.sleep(10)
    assert stream.offsets == [] and "damaged" in stream.subscription.explain()


# --- where a time is ----------------------------------------------------------------------------------------


def test_a_start_at_a_time_is_the_smallest_kept_offset_published_then_or_later() -> None:
    """Publish times go up and down. Objects, merged objects, the log alone and both are asked for every time."""

    async def setup(seed: int) -> None:
        rng = Random(seed)
        host = TierFixture(replace(STILL, merged_bytes=64 * KIB if seed % 2 else KIB, descriptors_max=3))
        _, orders = await one_topic(host)
        producer = await orders.add_producer("producer")
        times: list[int] = []
        zero = 1_704_067_200_000_000
        for _ in range(6):
            for _ in range(rng.randrange(1, 6)):
                times.append(zero + rng.randrange(12))
                await orders.publish(producer, message("x" * 3000)._replace(publish_time=times[-1]))
            if rng.random() < 0.8:
                await all_uploaded(orders)
            if rng.random() < 0.5:
                await carried(orders).maintenance.free(orders.log, 10**18)
            if rng.random() < 0.3 and len(carried(orders).tier.objects) > 1:
                await carried(orders).maintenance.move_first_offset(rng.randrange(len(times)))
            first = orders.first_offset
            for wanted in range(zero - 1, zero + 14):
                expected = next((n for n, t in enumerate(times) if n >= first and t >= wanted), orders.head)
                assert await orders.offset_at(wanted) == expected, (seed, wanted - zero, first)

    for seed in range(12):
        with small_wal():
            run(setup(seed), seed, shuffled=False)


@simulated
async def test_a_time_that_the_log_knows_is_found_while_the_store_is_away() -> None:
    host = TierFixture(replace(STILL, local=Retention()))
    _, orders = await one_topic(host)
    await tell_and_upload(orders, Teller(), 3)
    host.object_store.away = True
    assert await orders.offset_at(0) == 0


@simulated
async def test_a_missing_object_is_named_when_a_time_is_looked_up() -> None:
    host = TierFixture(STILL)
    orders, _ = await history(host)
    await host.object_store.delete("default/orders/data-0-1-1.parquet")
    with pytest.raises(ObjectDamaged, match="data-0-1-1"):
        await orders.offset_at(0)


# --- behind retention ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("connected", [True, False])
@simulated
async def test_a_subscription_behind_the_first_offset_goes_on_there_counted_and_explained(connected: bool) -> None:
    host = TierFixture(STILL)
    orders, _ = await history(host, objects=5)
    stream = await consume(orders, SUB, Kind.EXCLUSIVE, start=0)
    await asyncio.sleep(1)
    stream.ack(0, 1)
    if not connected:
        stream.leave()
    subscription = orders.require(SubscriptionName(SUB))
    assert subscription.get_lag_info().lag_messages == 8
    await carried(orders).maintenance.move_first_offset(6)
    await asyncio.sleep(2)
    assert subscription.metrics.skipped.value == 4
    assert subscription.get_lag_info().lag_messages == 4
    assert "retention removed 4 messages before they were acknowledged" in subscription.explain()
    stream.leave()
    again = await consume(orders, SUB, Kind.EXCLUSIVE, acks=True)
    await caught_up(again)
    assert again.offsets == [6, 7, 8, 9]
    assert "retention removed 4 messages" in subscription.explain()
    scraped = host.broker.telemetry.snapshot().text().decode()
    labels = f'{{topic="{ORDERS}",subscription="{SUB}",broker="{host.broker.broker_id}"}}'
    assert f"danube_subscription_skipped_by_retention_total{labels} 4" in scraped


# --- memory and what is fetched -----------------------------------------------------------------------------


class Counting(MemoryObjectStore):
    """How many calls are under way at once, and what they asked for."""

    def __init__(self, under: Any, clock: Any) -> None:
        super().__init__()
        self._objects = under._objects
        self._clock = clock
        self.running = self.most = 0
        self.asked: list[tuple[str, int]] = []
        self.fails: Callable[[str, int], bool] = lambda key, position: False

    async def get_range(self, key: str, position: int, length: int) -> bytes:
        self.asked.append((key, position))
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self._clock.sleep(0.1)
            if self.fails(key, position):
                raise Unreachable("object store", "not now")
            return await super().get_range(key, position, length)
        finally:
            self.running -= 1


async def reader_of(host: TierFixture, orders: Topic, cache_bytes: int = CACHE_BYTES) -> tuple[CloudReader, Counting]:
    store = Counting(host.object_store, host.clock)
    reader = CloudReader(store, host.clock, host.work, host.broker.telemetry.cloud, cache_bytes=cache_bytes)
    return reader, store


@simulated
async def test_what_is_cached_is_bounded_and_what_is_fetched_is_shared(small_groups: None) -> None:
    host = TierFixture(STILL)
    orders, _ = await history(host, objects=2, count=12, size=4 * KIB)
    tier = carried(orders).tier
    reader, store = await reader_of(host, orders, cache_bytes=40 * KIB)
    await asyncio.gather(*(reader.read(tier, 0, 1) for _ in range(10)))
    groups = [each for each in store.asked if each[0].endswith("data-0-11-1.parquet")]
    assert len(groups) == len(set(groups)), "ten readers of one place cost one download"
    for offset in range(24):
        assert await reader.read(tier, offset, 1) is not None
        assert reader._groups.size_bytes <= 40 * KIB + 20 * KIB
    store.most = 0
    reader._groups._kept.clear()
    await asyncio.gather(*(reader.read(tier, offset, 1) for offset in range(24)))
    assert store.most <= LOADS_AT_ONCE == 2
    await reader.close()


@simulated
async def test_the_next_row_group_and_the_next_object_are_fetched_ahead(small_groups: None) -> None:
    host = TierFixture(STILL)
    orders, _ = await history(host, objects=2, count=6, size=4 * KIB)
    tier = carried(orders).tier
    reader, store = await reader_of(host, orders)
    await reader.read(tier, 0, 1)
    await asyncio.sleep(1)
    asked = len(store.asked)
    assert asked == 3, "footer, row group, the next one"
    first = await reader.read(tier, 0, 1 << 20)
    assert first is not None
    await reader.read(tier, first[-1].header.end_offset, 1)
    await asyncio.sleep(1)
    keys = [key.rpartition("/")[2] for key, _ in store.asked]
    while "data-6-11-1.parquet" not in keys:
        last = await reader.read(tier, 5, 1)
        assert last is not None
        await asyncio.sleep(1)
        keys = [key.rpartition("/")[2] for key, _ in store.asked]
    assert keys.count("data-6-11-1.parquet") == 2, "its footer and its first row group"
    asked = len(store.asked)
    await reader.read(tier, 6, 1)
    assert [key for key, _ in store.asked[asked:] if "data-0-5" in key] == []
    await reader.close()


@simulated
async def test_a_reader_that_waits_for_a_row_group_has_the_next_one_fetched_meanwhile(small_groups: None) -> None:
    host = TierFixture(STILL)
    orders, _ = await history(host, objects=1, count=12, size=4 * KIB)
    tier = carried(orders).tier
    reader, store = await reader_of(host, orders)
    await reader.stored_batches(tier, tier.objects.find(0) or pytest.fail("nothing was uploaded"))  # its footer
    began = host.clock.elapsed()
    for offset in range(12):
        await reader.read(tier, offset, 1)
    groups = len(store.asked) - 1
    assert groups >= 4 and store.most == 2
    assert host.clock.elapsed() - began < 0.1 * groups * 0.75, "two downloads at a time"
    await reader.close()


@simulated
async def test_a_slow_reader_fetches_nothing_twice_though_two_row_groups_fill_the_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parquet_write, "ROW_GROUP_BYTES", 64 * KIB)
    host = TierFixture(STILL)
    orders, _ = await history(host, objects=2, count=24)
    tier = carried(orders).tier
    reader, store = await reader_of(host, orders, cache_bytes=140 * KIB)
    kept: list[int] = []

    def watched(footer: Footer, number: int, data: Buffer) -> list[Batch]:
        kept.append(len(reader._groups._kept))
        return parquet_read.read_row_group(footer, number, data)

    monkeypatch.setattr(cloud, "read_row_group", watched)
    for offset in range(48):
        assert await reader.read(tier, offset, 1)
        await asyncio.sleep(1)
    assert len(store.asked) == len(set(store.asked))
    assert len(kept) >= 4 and max(kept) == 1, "what is read now, and nothing beside it and what is being decoded"
    await reader.close()


@simulated
async def test_a_fetch_ahead_that_fails_harms_nobody(small_groups: None) -> None:
    host = TierFixture(STILL)
    orders, teller = await history(host, objects=3, count=6, size=4 * KIB)
    tier = carried(orders).tier
    reader, store = await reader_of(host, orders)
    failed: set[tuple[str, int]] = set()

    def first_time(key: str, position: int) -> bool:
        ahead = len(store.asked) > 2 and (key, position) not in failed
        failed.add((key, position))
        return ahead

    store.fails = first_time
    offset = 0
    found: dict[int, str] = {}
    while offset < 18:
        try:
            batches = await reader.read(tier, offset, 1 << 20)
        except Unreachable:
            continue  # the reader itself was the first to ask
        assert batches is not None
        for batch in batches:
            for row, each in enumerate(messages(batch)):
                found[batch.header.base_offset + row] = each.payload.decode()
        offset = batches[-1].header.end_offset
        await asyncio.sleep(0.5)
    assert found == teller.told
    assert host.broker.telemetry.cloud.errors.value == 0
    await reader.close()


@simulated
async def test_closing_ends_what_is_being_fetched() -> None:
    host = TierFixture(STILL)
    orders, _ = await history(host)
    reader, _ = await reader_of(host, orders)
    reading = asyncio.ensure_future(reader.read(carried(orders).tier, 0, 1))
    await asyncio.sleep(0.05)
    await reader.close()
    with pytest.raises(asyncio.CancelledError):
        await reading
