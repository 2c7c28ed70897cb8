"""History on its way to the object store: uploaded, merged, listed; whatever stores do meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.history.tiers import RAW, Retention, TierConfig
from pydanube.core.policies import SubscriptionKind as Kind
from pydanube.core.policies import TopicPolicy
from pydanube.errors import DiskFull, InvalidObject, OwnershipLost, Unreachable
from pydanube.formats.batch import Batch, messages
from pydanube.formats.parquet import Encoded
from pydanube.formats.parquet_write import encode_object
from pydanube.history import object_builder, reader
from pydanube.history import uploads as uploads_module
from pydanube.history.snapshots import read_snapshot
from pydanube.ports import Compare, Delete, Item, Put, Write
from tests.harness.brokers import (
    ORDERS,
    BrokerFixture,
    consume,
    find_topic,
    numbers,
    one_topic,
    publish,
    publish_many,
    settle,
    simulated,
)
from tests.harness.tiers import (
    KIB,
    SMALL,
    STILL,
    Teller,
    TierFixture,
    all_uploaded,
    carried,
    check_stored,
    covered,
    flipped,
    read_everything,
    recovered,
    state_of,
    tell_and_upload,
)

QUICK = TierConfig(
    upload_seconds=30.0, object_bytes=64 * KIB, local=Retention(seconds=0.0), retention_check_seconds=5.0
)
HOUR = 3600


pytestmark = pytest.mark.usefixtures("where")


# --- uploading ------------------------------------------------------------------------------------------


@simulated
async def test_committed_messages_are_in_the_object_store_after_the_interval() -> None:
    host = BrokerFixture(tier=QUICK)
    _, orders = await one_topic(host)
    await publish_many(orders, 50)
    await asyncio.sleep(29)
    assert await host.metadata.list(keys.storage_objects(ORDERS)) == []
    await asyncio.sleep(3)
    (descriptor,) = await host.metadata.list(keys.storage_objects(ORDERS))
    assert b'"start_offset": 0, "end_offset": 49, "object_id": "data-0-49-1.parquet"' in descriptor.value


@simulated
async def test_as_much_as_an_object_is_uploaded_without_waiting_for_the_interval(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads_module, "UPLOAD_READ_BYTES", 1)
    host = TierFixture(replace(STILL, upload_seconds=1e6, object_bytes=128 * KIB))
    _, orders = await one_topic(host)
    teller = Teller(size=8 * KIB)
    await teller.tell(orders, 7)
    await asyncio.sleep(5)
    assert await check_stored(host) == []
    await teller.tell(orders, 2)
    await asyncio.sleep(5)
    assert [(each.start_offset, each.end) for each in await check_stored(host)] == [(0, 8)]
    await teller.tell(orders, 20)  # of what is more than an object, whole ones: the rest has its interval
    await asyncio.sleep(5)
    assert [(each.start_offset, each.end) for each in await check_stored(host)] == [(0, 8), (8, 16), (16, 24)]


@simulated
async def test_what_is_less_than_an_object_waits_for_its_interval_and_not_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads_module, "UPLOAD_READ_BYTES", 1)
    host = TierFixture(replace(STILL, upload_seconds=30.0, object_bytes=128 * KIB))
    _, orders = await one_topic(host)
    teller = Teller(size=8 * KIB)
    await asyncio.sleep(20)
    await teller.tell(orders, 9)
    await asyncio.sleep(25)
    assert covered(await check_stored(host)) == [(0, 8)]
    await asyncio.sleep(8)
    assert covered(await check_stored(host)) == [(0, 9)]


@simulated
async def test_others_have_their_turn_while_what_is_in_memory_is_read_for_an_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploads_module, "UPLOAD_READ_BYTES", 1)
    host = TierFixture(replace(STILL, upload_seconds=1e6))
    _, orders = await one_topic(host)
    for _ in range(20):
        await publish_many(orders, 1)
    reading = asyncio.ensure_future(carried(orders).uploads._read(orders.log, 0, orders.log.head))
    turns = 0
    while not reading.done():
        turns += 1
        await asyncio.sleep(0)
    assert len(reading.result()) == 20 <= turns


@simulated
async def test_objects_are_made_checked_merged_and_opened_away_from_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = TierFixture(SMALL)
    away = False
    seen: dict[str, bool] = {}
    run_away = host.work.run

    async def run(function: Callable[[], Any]) -> Any:
        def inside() -> Any:
            nonlocal away
            away = True
            try:
                return function()
            finally:
                away = False

        return await run_away(inside)

    async def await_in_worker(function: Callable[[], Any]) -> Any:
        nonlocal away
        away = True  # nothing of it waits longer than for a store that answers at once
        try:
            return await function()
        finally:
            away = False

    def watched(module: Any, name: str) -> None:
        under = getattr(module, name)

        def called(*arguments: Any) -> Any:
            seen[name] = away and seen.get(name, True)
            return under(*arguments)

        monkeypatch.setattr(module, name, called)

    monkeypatch.setattr(host.work, "run", run)
    monkeypatch.setattr(host.work, "await_in_worker", await_in_worker)
    for module, name in (
        (object_builder, "encode_object"),
        (object_builder, "verify_object"),
        (object_builder, "merge_objects"),
        (reader, "parse_footer"),
        (reader, "read_row_group"),
    ):
        watched(module, name)
    _, orders = await one_topic(host)
    teller = Teller(size=KIB)
    await tell_and_upload(orders, teller, 4)
    await asyncio.sleep(60)
    host.kill()
    await recovered(host, teller.told)
    assert len(seen) == 5 and all(seen.values()), seen


@simulated
async def test_a_late_subscriber_reads_everything_after_the_log_is_gone() -> None:
    host = BrokerFixture(tier=QUICK, segment_bytes=2048, unacked_max=10_000)
    _, orders = await one_topic(host)
    for _ in range(5):
        await publish_many(orders, 200)
        await asyncio.sleep(40)
    assert orders.log.first_offset > 500
    assert orders.first_offset == 0
    stream = await consume(orders, "late", Kind.EXCLUSIVE, start=0, acks=True)
    await asyncio.sleep(10)
    assert stream.texts == numbers(200) * 5
    assert stream.offsets == list(range(1000))


@simulated
async def test_a_broker_without_its_log_goes_on_behind_its_history() -> None:
    host = TierFixture(QUICK)
    broker, orders = await one_topic(host)
    await publish_many(orders, 100)
    await asyncio.sleep(40)
    await broker.stop()
    host.kill()
    await host.lose_log()
    orders = await find_topic(await host.boot())
    assert orders.head == 100
    stream = await consume(orders, "late", Kind.EXCLUSIVE, start=0, acks=True)
    await publish_many(orders, 10)
    await settle()
    assert stream.offsets == list(range(110))


@simulated
async def test_a_broker_without_its_log_does_not_begin_anew_when_all_its_history_was_forgotten() -> None:
    """Offsets of forgotten messages are not given again, though no descriptor tells of them any more."""
    host = TierFixture(policies=TopicPolicy(retention_minutes=1))
    broker, orders = await one_topic(host)
    await Teller().tell(orders, 3)
    await asyncio.sleep(90)
    assert (orders.first_offset, await check_stored(host)) == (3, [])
    await broker.stop()
    host.kill()
    await host.lose_log()
    orders = await find_topic(await host.boot())
    assert orders.head == 3


@simulated
async def test_a_restart_with_a_manifest_and_a_whole_log_uploads_nothing_again() -> None:
    """What the manifest names is uploaded, though nobody has read the manifest yet."""
    host = TierFixture(replace(SMALL, local=Retention(), merged_bytes=KIB))
    _, orders = await one_topic(host)
    teller = Teller()
    await tell_and_upload(orders, teller, 4)
    before = await check_stored(host)
    state, _ = await state_of(host)
    assert len(before) == 4 and len(state.keyed) == 1
    host.kill()
    orders = await find_topic(await host.boot())
    assert orders.log.first_offset == 0
    assert carried(orders).uploads.waiting(orders.log) is None
    await asyncio.sleep(10)
    assert await check_stored(host) == before
    assert await read_everything(orders) == teller.told


@simulated
async def test_uploads_go_on_while_the_manifest_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    host = TierFixture(replace(SMALL, local=Retention(), merged_bytes=KIB, descriptors_max=2))
    _, orders = await one_topic(host)
    teller = Teller()
    await tell_and_upload(orders, teller, 5)
    state, _ = await state_of(host)
    assert state.history.manifest is not None
    manifest = f"default/orders/{state.history.manifest}"
    data = await host.object_store.get(manifest)
    host.kill()
    await host.object_store.delete(manifest)
    orders = await find_topic(await host.boot())
    for _ in range(3):
        await teller.tell(orders)
        await asyncio.sleep(40)
    assert carried(orders).uploads.waiting(orders.log) is None
    assert any(manifest in str(record.__dict__.get("why")) for record in caplog.records)
    assert await read_everything(orders, name="by the log") == teller.told
    await host.object_store.put(manifest, [data])
    await tell_and_upload(orders, teller)
    state, _ = await state_of(host)
    assert len(state.keyed) == 2
    assert covered(await check_stored(host)) == [(0, 9)]


@simulated
async def test_a_closing_topic_leaves_nothing_of_an_upload_behind_that_anybody_believes() -> None:
    host = TierFixture(SMALL)
    broker, orders = await one_topic(host)
    teller = Teller()
    await teller.tell(orders, 2)
    host.trap.set(3, after=True)  # the put is done, its answer is not here
    await host.trap.sprung.wait()
    host.trap.gate.set()
    await broker.stop()
    host.kill()
    await recovered(host, teller.told)


# --- stores that misbehave --------------------------------------------------------------------------------


@simulated
async def test_a_put_that_is_reported_as_failed_and_was_stored_is_made_again_under_another_name() -> None:
    host = TierFixture(SMALL)
    _, orders = await one_topic(host)
    host.object_store.put_fails = 1
    await Teller().tell(orders)
    await asyncio.sleep(3.5)
    assert [each.object_id for each in await check_stored(host)] == ["data-0-0-1-1.parquet"]
    assert "data-0-0-1.parquet" in await host.object_store.names()
    await asyncio.sleep(20)
    assert await host.object_store.names() == ["data-0-0-1-1.parquet"]


@simulated
async def test_a_put_that_lands_after_its_repetition_is_never_described_and_is_swept() -> None:
    host = TierFixture(SMALL)
    _, orders = await one_topic(host)
    host.object_store.put_late = 1
    teller = Teller()
    await teller.tell(orders)
    await asyncio.sleep(3.5)
    described = await check_stored(host)
    await asyncio.sleep(20)  # sweeps have looked and found nothing
    await host.object_store.land()
    assert "data-0-0-1.parquet" in await host.object_store.names()
    await asyncio.sleep(20)
    assert await host.object_store.names() == ["data-0-0-1-1.parquet"]
    assert await check_stored(host) == described
    assert await read_everything(orders) == teller.told


@pytest.mark.parametrize("fault", ["put_lost", "put_flipped"])
@simulated
async def test_an_object_that_the_store_lost_or_changed_is_noticed_before_it_is_described(fault: str) -> None:
    host = TierFixture(SMALL)
    _, orders = await one_topic(host)
    setattr(host.object_store, fault, 2)
    teller = Teller()
    await teller.tell(orders)
    await asyncio.sleep(2.5)
    assert carried(orders).failing
    assert await check_stored(host) == []
    await asyncio.sleep(10)
    assert [each.object_id for each in await check_stored(host)] == ["data-0-0-1-2.parquet"]
    assert host.broker.telemetry.cloud.upload_errors.value == 2
    host.kill()
    await recovered(host, teller.told)


@pytest.mark.parametrize("fault", ["put_lost", "put_flipped"])
@simulated
async def test_a_merged_object_or_a_manifest_that_the_store_lost_or_changed_replaces_nothing(fault: str) -> None:
    host = TierFixture(STILL)
    _, orders = await one_topic(host)
    await tell_and_upload(orders, Teller(), 3)
    before = await check_stored(host)
    found = carried(orders)
    found.tier.config = SMALL
    for step in (found.maintenance.merge, found.maintenance.move_to_manifest):
        setattr(host.object_store, fault, 1)
        with pytest.raises(InvalidObject):
            await step()
        assert await check_stored(host) == before
        assert list(await found.tier.load_manifest()) == before
    assert await found.maintenance.merge() is not None
    assert covered(await check_stored(host)) == [(0, 3)]


@simulated
async def test_a_store_that_is_away_for_hours_stops_nobody_and_is_caught_up_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = TierFixture(replace(SMALL, sweep_seconds=1e9))
    _, orders = await one_topic(host)
    teller = Teller(size=KIB)
    await teller.tell(orders)
    await asyncio.sleep(5)
    host.object_store.away = True
    calls = host.object_store.calls
    for _ in range(3):
        await teller.tell(orders, 4)
        await asyncio.sleep(HOUR)
    assert host.object_store.calls - calls < 3 * 130, "it is asked twice a minute at most"
    assert covered(await check_described(host)) == [(0, 1)]
    topics, offsets, seconds = host.broker.cloud.uploader.standing() if host.broker.cloud else (0, 0, 0.0)
    assert (topics, offsets) == (1, 12) and seconds > 2.9 * HOUR
    assert [record.message for record in caplog.records].count("upload delayed") == 1
    assert host.broker.telemetry.cloud.upload_errors.value > 300
    host.object_store.away = False
    await asyncio.sleep(60)
    assert covered(await check_stored(host)) == [(0, 13)]
    assert carried(orders).failing == ""
    host.kill()
    await recovered(host, teller.told)


@simulated
async def test_while_the_store_is_away_the_log_fills_the_disk_and_empties_by_itself_afterwards() -> None:
    host = TierFixture(SMALL)
    _, orders = await one_topic(host)
    teller = Teller(size=4 * KIB)
    await teller.tell(orders, 2)
    await asyncio.sleep(5)
    host.object_store.away = True
    contents = host.disk._contents
    contents.capacity_bytes = contents.used_bytes + KIB * KIB  # twice what the log wants to see before it goes on
    with pytest.raises(DiskFull) as refusal:
        for _ in range(200):
            await teller.tell(orders)
    assert refusal.value.retryable
    stored = orders.head
    assert stored > 20 and orders.log.first_offset <= 2, "what was not stored anywhere else is still here"
    await asyncio.sleep(60)
    with pytest.raises(DiskFull):
        await publish(orders, "still full")
    assert orders.head == stored
    host.object_store.away = False
    await asyncio.sleep(120)
    assert orders.log.first_offset > stored - 5
    assert covered(await check_stored(host)) == [(0, stored)]
    await publish(orders, "again")
    found = await read_everything(orders)
    assert found == {**{n: text for n, text in teller.told.items() if n < stored}, stored: "again"}


async def check_described(host: TierFixture) -> Any:
    """As `check_stored`, while the object_store does not answer."""
    host.object_store.away, away = False, host.object_store.away
    try:
        return await check_stored(host)
    finally:
        host.object_store.away = away


class Doubt:
    """A metadata store that does not answer some writes of descriptors; half of them it made all the same."""

    def __init__(self, host: TierFixture, outcomes: Sequence[bool]) -> None:
        self._under = host.metadata.transact
        self._outcomes = list(outcomes)
        host.metadata.transact = self.transact  # type: ignore[method-assign]

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> int | None:
        if self._outcomes and any(each.key == keys.history(ORDERS) for each in operations):
            made = self._outcomes.pop(0)
            if made:
                await self._under(compares, operations)
            raise Unreachable("metadata", "no answer")
        return await self._under(compares, operations)


@pytest.mark.parametrize("outcomes", [[True], [False], [False, True], [True, True], [False, False, True]])
@simulated
async def test_a_descriptor_write_without_an_answer_is_made_once(outcomes: list[bool]) -> None:
    host = TierFixture(SMALL)
    _, orders = await one_topic(host)
    teller = Teller()
    await teller.tell(orders)
    Doubt(host, outcomes)
    await asyncio.sleep(4)
    assert [each.object_id for each in await check_stored(host)] == ["data-0-0-1.parquet"]
    await teller.tell(orders, 3)
    await asyncio.sleep(10)
    assert covered(await check_stored(host)) == [(0, 4)]
    assert list(await carried(orders).tier.load_manifest()) == await check_stored(host)
    host.kill()
    await recovered(host, teller.told)


@simulated
async def test_an_unanswered_descriptor_write_of_an_owner_that_was_overtaken_is_not_repeated() -> None:
    stale = TierFixture(SMALL)
    _, orders = await one_topic(stale)
    await Teller().tell(orders)
    Doubt(stale, [False])
    uploading = asyncio.ensure_future(carried(orders).uploads.upload(orders.log))
    await asyncio.sleep(0.1)
    owner = TierFixture(SMALL, shares=stale, seed=2)
    await owner.boot()
    with pytest.raises(OwnershipLost):
        await uploading
    assert await check_stored(owner) == []


# --- what cannot be uploaded ----------------------------------------------------------------------------------


@simulated
async def test_a_batch_that_cannot_be_converted_is_stored_raw_and_read_like_any_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def particular(topic: str, epoch: int, batches: Sequence[Batch]) -> Encoded:
        if any(b"odd" in each.payload for batch in batches for each in messages(batch)):
            raise InvalidObject("offset", "odd")
        return encode_object(topic, epoch, batches)

    monkeypatch.setattr(object_builder, "encode_object", particular)
    host = TierFixture(STILL)
    _, orders = await one_topic(host)
    teller = Teller(size=100)
    await teller.tell(orders, 5)
    await teller.tell(orders, 1, label="odd")
    await teller.tell(orders, 5)
    await asyncio.sleep(3)
    described = await check_stored(host)
    assert covered(described) == [(0, 11)]
    assert [(each.start_offset, each.end, each.object_id) for each in described if each.format == RAW] == [
        (5, 6, "data-5-5-1.raw")
    ]
    assert "range stored raw" in [record.message for record in caplog.records]
    assert await orders.offset_at(0) == 0
    host.kill()
    await recovered(host, teller.told)


@simulated
async def test_a_damaged_part_of_the_log_is_named_and_everything_around_it_is_uploaded() -> None:
    host = TierFixture(replace(SMALL, upload_seconds=1e9))
    _, orders = await one_topic(host)
    teller = Teller()
    for _ in range(6):
        await teller.tell(orders)
    segment = orders.log.segment_for(2)
    await host.broker.stop()
    host.kill()
    place = segment.start + 300
    data = await host.disk.read(segment.path, place, 1)
    await host.disk.write([Write(segment.path, place, [flipped(data, 0)])], sync=True)
    orders = await find_topic(await host.boot())
    found = carried(orders)
    assert orders.storage is not None
    await orders.storage.uploader.upload_all(found)
    assert covered(await check_stored(host)) == [(0, 2), (3, 6)]
    assert list(found.uploads.unreadable) == [(2, 3)]
    assert await found.maintenance.free(orders.log, 10**18) == 2, (
        "the only copy of something stays, and what lies behind it"
    )


@simulated
async def test_what_lies_behind_a_segment_that_cannot_even_be_opened_stays_until_the_loss_is_recorded() -> None:
    """Recovery leaves an empty segment there, which has nothing that is not stored."""
    host = TierFixture(replace(SMALL, upload_seconds=1e9))
    _, orders = await one_topic(host)
    teller = Teller()
    for _ in range(2):
        await teller.tell(orders)
    assert orders.storage is not None
    await orders.storage.uploader.upload_all(carried(orders))
    await teller.tell(orders)
    segment = orders.log.segment_for(2)
    await teller.tell(orders)
    assert orders.log.segment_for(3) is not segment
    host.kill()
    data = await host.disk.read(segment.path, 20, 1)
    await host.disk.write([Write(segment.path, 20, [flipped(data, 0)])], sync=True)
    orders = await find_topic(await host.boot())
    await carried(orders).maintenance.free(orders.log, 10**18)
    assert [(each.first_offset, each.end_offset) for each in orders.log.segments][:2] == [(3, 3), (3, 4)]
    host.kill()
    orders = await find_topic(await host.boot())
    assert orders.storage is not None
    await orders.storage.uploader.upload_all(carried(orders))
    voids = await host.metadata.list(keys.voids(orders.name))
    assert [keys.start_of(item.key) for item in voids] == [2], "a gap that is known"
    assert covered(await check_stored(host)) == [(0, 2), (3, 4)]


SLOW = replace(STILL, upload_seconds=30.0, retention_check_seconds=300.0)


@simulated
async def test_a_copy_for_readers_that_could_not_be_written_is_written_later() -> None:
    host = TierFixture(SLOW)
    _, orders = await one_topic(host)
    teller = Teller()
    await tell_and_upload(orders, teller)
    await asyncio.sleep(60)
    really_put = host.object_store.put
    failed: list[str] = []

    async def put(key: str, data: Sequence[Any], *, create: bool = False) -> Any:
        if "_snapshot" in key and not failed:
            failed.append(key)
            raise Unreachable("object store", "it is busy")
        return await really_put(key, data, create=create)

    host.object_store.put = put  # type: ignore[method-assign]
    await tell_and_upload(orders, teller)
    await asyncio.sleep(600)
    snapshot = await read_snapshot(host.object_store, "default/orders/")
    assert failed and snapshot is not None and snapshot.head_uploaded == orders.head == 2


@simulated
async def test_an_owner_that_dies_before_it_wrote_the_copy_for_readers_writes_it_when_it_is_back() -> None:
    host = TierFixture(SLOW)
    _, orders = await one_topic(host)
    teller = Teller()
    await tell_and_upload(orders, teller)
    await asyncio.sleep(60)
    really_put, died = host.object_store.put, asyncio.Event()

    async def put(key: str, data: Sequence[Any], *, create: bool = False) -> Any:
        if "_snapshot" in key and not died.is_set():
            died.set()
            host.kill()
            await asyncio.get_running_loop().create_future()
        return await really_put(key, data, create=create)

    host.object_store.put = put  # type: ignore[method-assign]
    await teller.tell(orders)
    await died.wait()
    orders = await find_topic(await host.boot())
    await asyncio.sleep(600)
    snapshot = await read_snapshot(host.object_store, "default/orders/")
    assert snapshot is not None and snapshot.head_uploaded == orders.head == 2


@simulated
async def test_the_copy_for_readers_never_names_what_retention_has_deleted() -> None:
    host = TierFixture(SLOW)
    _, orders = await one_topic(host)
    teller = Teller()
    for _ in range(4):
        await tell_and_upload(orders, teller)
    really_delete = host.object_store.delete
    named: list[str] = []

    async def delete(key: str) -> None:
        snapshot = await read_snapshot(host.object_store, "default/orders/")
        assert snapshot is not None
        named.extend(each.object_id for each in snapshot.objects if key.endswith(each.object_id))
        await really_delete(key)

    host.object_store.delete = delete  # type: ignore[method-assign]
    await carried(orders).maintenance.move_first_offset(3)
    await swept(orders)
    assert len(host.object_store.deleted) >= 3 and named == []


async def swept(orders: Topic) -> list[str]:
    """What a sweep deletes that comes when garbage is old enough."""
    await asyncio.sleep(carried(orders).tier.config.garbage_seconds)
    return await carried(orders).maintenance.sweep()


@simulated
async def test_what_retention_forgets_is_there_for_readers_until_garbage_goes() -> None:
    host = TierFixture(STILL)
    _, orders = await one_topic(host)
    await tell_and_upload(orders, Teller(), 4)
    before = {each.object_id for each in carried(orders).tier.objects}
    await carried(orders).maintenance.move_first_offset(3)
    assert orders.first_offset == 3
    _, described = await state_of(host)
    assert [each.start_offset for each in described] == [3]
    assert await carried(orders).maintenance.sweep() == []
    assert before <= {
        info.key.removeprefix("default/orders/") async for info in host.object_store.list("default/orders/")
    }
    assert set(await swept(orders)) == before - {described[0].object_id}


@simulated
async def test_what_retention_forgets_is_there_for_ten_minutes_of_the_next_process_too() -> None:
    host = TierFixture(STILL)
    _, orders = await one_topic(host)
    await tell_and_upload(orders, Teller(), 4)
    await carried(orders).maintenance.move_first_offset(3)
    orders = await find_topic(await host.restart())
    assert await carried(orders).maintenance.sweep() == []
    assert len(await swept(orders)) == 3
    assert (await read_everything(orders)).keys() == {3}


@simulated
async def test_a_process_that_ends_at_any_call_of_retention_leaves_history_before_or_after_it() -> None:
    for step in range(20):
        host = TierFixture(STILL)
        _, orders = await one_topic(host)
        teller = Teller()
        await tell_and_upload(orders, teller, 4)
        host.trap.set(step, after=bool(step % 2))
        died = asyncio.ensure_future(carried(orders).maintenance.move_first_offset(3))
        await asyncio.wait([died], timeout=60)
        host.kill()
        died.cancel()
        orders = await find_topic(await host.boot())
        await all_uploaded(orders)
        await check_stored(host)
        assert orders.first_offset in (0, 3)
        await carried(orders).maintenance.sweep()
        await swept(orders)
        assert len(await check_stored(host)) == (1 if orders.first_offset else 4)
        assert (await read_everything(orders)).keys() == set(range(orders.first_offset, 4))


@simulated
async def test_every_change_of_history_says_when_it_was_and_none_is_earlier_than_the_one_before() -> None:
    host = TierFixture(STILL)
    _, orders = await one_topic(host)
    teller = Teller()
    seen = []
    for _ in range(3):
        await asyncio.sleep(5)
        await tell_and_upload(orders, teller)
        state, _ = await state_of(host)
        seen.append((state.history.epoch, state.history.change, state.history.changed_at))
    assert seen == sorted(seen) and len({at for _, _, at in seen}) == 3
    orders = await find_topic(await host.restart())
    await tell_and_upload(orders, teller)
    state, _ = await state_of(host)
    assert state.history.epoch > seen[-1][0] and state.history.changed_at > seen[-1][2]


@pytest.mark.parametrize("harm", ["missing", "checksum"])
@simulated
async def test_an_object_that_cannot_be_read_is_left_out_of_merges_and_the_others_are_merged(
    harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    host = TierFixture(STILL)
    _, orders = await one_topic(host)
    teller = Teller(size=KIB)
    await tell_and_upload(orders, teller, 7)
    (lost,) = carried(orders).tier.objects[3:4]
    key = f"default/orders/{lost.object_id}"
    data = await host.object_store.get(key)
    await host.object_store.delete(key)
    if harm == "checksum":
        await host.object_store.put(key, [flipped(data, 100)])
    carried(orders).tier.config = replace(STILL, merged_bytes=64 * KIB)
    await tell_and_upload(orders, teller)
    _, described = await state_of(host)
    assert [each.object_id for each in described if "-m" not in each.object_id] == [lost.object_id]
    assert covered(described) == [(0, 8)]
    (said,) = [record for record in caplog.records if record.message == "object not merged"]
    assert lost.object_id in str(said.__dict__["why"]) and harm in str(said.__dict__["why"])
    assert host.broker.telemetry.cloud.errors.value == 1


# --- a long time -------------------------------------------------------------------------------------------


@simulated
async def test_metadata_does_not_grow_with_history() -> None:
    """Three hundred uploads of a quiet topic, as the broker does them; tests/core counts a week of them."""
    host = TierFixture(
        TierConfig(upload_seconds=1.0, descriptors_max=40, descriptors_moved=20, retention_check_seconds=1e9),
        segment_bytes=64 * KIB * KIB,
    )
    _, orders = await one_topic(host)
    most = 0
    for number in range(300):
        await publish(orders, str(number))
        await asyncio.sleep(2)
        most = max(most, len(await host.metadata.list(keys.below_storage(ORDERS))))
    uploads, merges = (each.value for each in (host.broker.telemetry.cloud.objects, host.broker.telemetry.cloud.merges))
    assert uploads == 300 and merges > 30
    assert most <= 3 + 20, "owner, reservation, history, and the descriptors"
    written = sum(len(data) for key, stored in host.object_store.contents.items() if "/data-" in key for data in stored)
    assert written < 3 * 300 * 4700
    described = await check_stored(host)
    assert covered(described) == [(0, 300)]
    found = await read_everything(orders)
    assert found == {n: str(n) for n in range(300)}


# --- opening ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", [keys.below_storage(ORDERS), keys.below_topic(ORDERS)])
@simulated
async def test_a_topic_whose_opening_failed_half_way_can_be_opened_later(prefix: str) -> None:
    host = TierFixture(SMALL)
    _, orders = await one_topic(host)
    teller = Teller()
    await tell_and_upload(orders, teller)
    host.kill()
    listed, failures = host.metadata.list, [False, True]

    async def failing(asked: str) -> list[Item]:
        if asked == prefix and failures and failures.pop(0):  # the first look is before the claim
            raise Unreachable("metadata", "it is away")
        return await listed(asked)

    host.metadata.list = failing  # type: ignore[method-assign, assignment]
    broker = await host.boot()
    assert failures == [] and ORDERS in broker.topics.unopened
    orders = await find_topic(broker)
    await teller.tell(orders)
    await all_uploaded(orders)
    assert await read_everything(orders) == teller.told
