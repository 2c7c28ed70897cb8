"""`storage verify`: problems are planted one at a time, found by name, and nothing goes that could still be wanted."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from pydanube.broker.service import Broker
from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.history.coverage import CoverageRange, Where
from pydanube.core.history.ownership import Orphan, Owner, void_to_bytes
from pydanube.core.history.tiers import RAW, Descriptor, Retention, TierConfig, TopicHistory
from pydanube.core.names import TopicName
from pydanube.errors import OwnershipLost, TopicUnknown, Unreachable
from pydanube.formats.batch import load
from pydanube.formats.parquet import encode_raw
from pydanube.history.maintenance import Maintenance
from pydanube.history.storage import StorageDesk, Verified
from pydanube.history.verify import TierReport, VerifyProgress
from pydanube.ports import Delete, Put
from pydanube.stores.objects.memory import MemoryObjectStore
from tests.harness.brokers import ORDERS, BrokerFixture, find_topic, make_topic, one_topic, publish_many, simulated

# Nothing is swept or forgotten while a test looks.
STILL = TierConfig(upload_seconds=30.0, retention_check_seconds=1e9, sweep_seconds=1e9)
FREEING = replace(STILL, local=Retention(seconds=0.0), retention_check_seconds=5.0)
GRACE = 600.0
FIRST, SECOND, THIRD = (f"default/orders/data-{start}-{start + 49}-1.parquet" for start in (0, 50, 100))


class VerifySetup:
    """A topic with three objects of 50 messages each, and ten messages that are only in the log."""

    def __init__(self, host: BrokerFixture, broker: Broker, orders: Topic) -> None:
        assert host.objects is not None
        self.host = host
        self.broker = broker
        self.orders = orders
        self.objects = host.objects
        self.desk = StorageDesk(broker.topics, "memory:")

    @classmethod
    async def make(cls, config: TierConfig = STILL, **settings: Any) -> VerifySetup:
        host = BrokerFixture(tier=config, **settings)
        broker, orders = await one_topic(host)
        for _ in range(3):
            await publish_many(orders, 50)
            await asyncio.sleep(40)
        await publish_many(orders, 10)
        return cls(host, broker, orders)

    async def verified(self, *, repair: bool = False, topic: str = ORDERS) -> Verified:
        async def tell(progress: VerifyProgress) -> None:
            pass

        return await self.desk.verify(TopicName(topic), repair=repair, on_progress=tell)

    async def verify(self, *, repair: bool = False) -> TierReport:
        return (await self.verified(repair=repair)).report

    async def descriptor(self, start: int) -> Descriptor:
        value = await self.host.metadata.value(keys.storage_object(ORDERS, start))
        assert value is not None
        return Descriptor.from_bytes(value)

    async def describe(self, described: Descriptor) -> None:
        await self.write(Put(keys.storage_object(ORDERS, described.start_offset), described.to_bytes()))

    async def write(self, *operations: Put | Delete) -> None:
        """Behind the owner's back."""
        await self.host.metadata.transact([], operations)

    async def names(self) -> set[str]:
        return {info.key async for info in self.objects.list("default/orders/")}


def only(report: TierReport) -> tuple[str, str, int | None, int | None]:
    """The one problem: its kind, object and offsets."""
    [problem] = report.problems
    return problem.kind, problem.key, problem.first, problem.end


# --- what is whole ------------------------------------------------------------------------------------


@simulated
async def test_a_whole_history_has_no_problems_and_every_offset_has_its_place() -> None:
    setup = await VerifySetup.make()
    report = await setup.verify()
    assert report.ok and report.findings == []
    assert (report.objects, report.messages, report.first_offset, report.head) == (3, 150, 0, 160)
    assert report.places == [CoverageRange(0, 150, Where.OBJECTS), CoverageRange(150, 160, Where.LOG)]


@simulated
async def test_progress_goes_from_nothing_to_every_byte() -> None:
    setup = await VerifySetup.make()
    told: list[VerifyProgress] = []

    async def tell(progress: VerifyProgress) -> None:
        told.append(progress)

    report = (await setup.desk.verify(ORDERS, repair=False, on_progress=tell)).report
    assert told[0] == VerifyProgress(0, 3, 0, report.size_bytes)
    assert told[-1] == VerifyProgress(3, 3, report.size_bytes, report.size_bytes)
    assert [each.bytes_done for each in told] == sorted(each.bytes_done for each in told)


@simulated
async def test_the_places_of_offsets_are_explained_by_retention_orphans_and_voids() -> None:
    setup = await VerifySetup.make()
    assert setup.orders.storage is not None
    await Maintenance(setup.orders.storage.tier).move_first_offset(50)
    orphan = Orphan(start=160, end=170, broker_id=7, epoch=9)
    await setup.write(
        Put(keys.orphan(ORDERS, 160), orphan.to_bytes()), Put(keys.void(ORDERS, 170), void_to_bytes(180, "never used"))
    )
    setup.orders.log.head = 180
    report = await setup.verify()
    assert report.ok
    assert [(place.first, place.end, place.where) for place in report.places] == [
        (0, 50, Where.FORGOTTEN),
        (50, 150, Where.OBJECTS),
        (150, 160, Where.LOG),
        (160, 170, Where.ORPHAN),
        (170, 180, Where.VOID),
    ]
    assert "broker 7" in report.places[3].why


@simulated
async def test_a_raw_object_verifies_and_is_noted() -> None:
    setup = await VerifySetup.make()
    [batch] = [each for each in await setup.orders.log.read(0, bytes_max=1) if each.header.base_offset == 0]
    encoded = encode_raw([batch])
    name = f"data-0-{encoded.end - 1}-1.raw"
    info = await setup.objects.put(f"default/orders/{name}", [encoded.data])
    first = await setup.descriptor(0)
    raw = replace(first, object_id=name, end_offset=encoded.end - 1, size=info.size_bytes, etag=info.etag, format=RAW)
    await setup.describe(raw)
    report = await setup.verify()
    assert report.ok
    assert [note.kind for note in report.notes if note.key.endswith(".raw")] == ["raw"]
    damaged = bytearray(encoded.data)
    damaged[-1] ^= 1
    await setup.objects.put(f"default/orders/{name}", [damaged])
    assert only(await setup.verify())[:2] == ("damaged", f"default/orders/{name}")
    assert load(encoded.data).header.base_offset == 0


# --- objects that are not what was written --------------------------------------------------------------


@simulated
async def test_a_missing_object_is_named_with_its_offsets() -> None:
    setup = await VerifySetup.make()
    await setup.objects.delete(SECOND)
    report = await setup.verify()
    assert only(report) == ("missing", SECOND, 50, 100)
    assert report.messages == 100


@simulated
async def test_a_truncated_object_is_named_with_both_sizes() -> None:
    setup = await VerifySetup.make()
    data = await setup.objects.get(SECOND)
    await setup.objects.put(SECOND, [data[:-10]])
    report = await setup.verify()
    assert only(report) == ("size", SECOND, 50, 100)
    assert f"{len(data) - 10} bytes" in report.problems[0].text and str(len(data)) in report.problems[0].text


@simulated
async def test_a_flipped_byte_is_found_wherever_it_is() -> None:
    setup = await VerifySetup.make()
    data = await setup.objects.get(SECOND)
    kinds = set()
    for position in [0, *range(4, len(data), max(1, len(data) // 60)), len(data) - 1]:
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        await setup.objects.put(SECOND, [damaged])
        kind, key, first, end = only(await setup.verify())
        assert (key, first, end) == (SECOND, 50, 100)
        kinds.add(kind)
    assert kinds == {"damaged", "etag"}  # filters and indexes have no checksum; only the store's tag differs
    await setup.objects.put(SECOND, [data])
    assert (await setup.verify()).ok


class AnyTag(MemoryObjectStore):
    """A store whose tags say nothing about bytes, as some clouds' do not."""

    async def put(self, key: str, data: Any, *, create: bool = False) -> Any:
        info = await super().put(key, data, create=create)
        tagged = info._replace(etag="0x8D")
        self._objects[key] = (tagged, self._objects[key][1])
        return tagged


@simulated
async def test_every_page_and_the_footer_are_checked_without_help_from_the_tag() -> None:
    setup = await VerifySetup.make(objects=AnyTag())
    data = await setup.objects.get(SECOND)
    footer_from = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    found = 0
    positions = [*range(4, footer_from, 97), *range(footer_from, len(data), 211)]
    for position in positions:
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        await setup.objects.put(SECOND, [damaged])
        found += not (await setup.verify()).ok
    assert found > len(positions) * 0.6  # the rest is a bloom filter that is mostly empty, and texts nobody reads


@simulated
async def test_an_object_that_was_put_again_is_noted_if_its_tag_says_nothing_of_its_bytes() -> None:
    setup = await VerifySetup.make(objects=AnyTag())
    await setup.describe(replace(await setup.descriptor(0), etag="0x8C"))
    report = await setup.verify()
    assert report.ok and [note.kind for note in report.notes] == ["etag"]


@simulated
async def test_another_topics_object_under_the_right_name_is_damage() -> None:
    setup = await VerifySetup.make()
    other = await make_topic(setup.broker, "/default/other")
    await publish_many(other, 50)
    await asyncio.sleep(40)
    theirs = await setup.objects.get("default/other/data-0-49-1.parquet")
    info = await setup.objects.put(FIRST, [theirs])
    told = replace(await setup.descriptor(0), size=info.size_bytes, etag=info.etag, footer_crc=0)  # 0: nobody knows
    await setup.describe(told)
    report = await setup.verify()
    assert only(report) == ("damaged", FIRST, 0, 50)
    assert "/default/other" in report.problems[0].text


@simulated
async def test_an_object_that_was_forgotten_while_we_read_is_no_problem() -> None:
    setup = await VerifySetup.make()
    storage = setup.orders.storage
    assert storage is not None

    async def tell(progress: VerifyProgress) -> None:
        if progress.objects_done == 1 and storage.tier.history.first_offset == 0:
            await Maintenance(storage.tier).move_first_offset(100)
            for name in (FIRST, SECOND):  # as a sweep does after a while
                await setup.objects.delete(name)

    report = (await setup.desk.verify(ORDERS, repair=False, on_progress=tell)).report
    assert await setup.names() & {FIRST, SECOND, THIRD} == {THIRD}
    assert report.ok


@simulated
async def test_a_store_that_does_not_answer_proves_nothing() -> None:
    class Away(MemoryObjectStore):
        away = False

        async def get_range(self, key: str, position: int, length: int) -> bytes:
            if self.away:
                raise Unreachable("the store", "it is away")
            return await super().get_range(key, position, length)

    store = Away()
    setup = await VerifySetup.make(objects=store)
    store.away = True
    with pytest.raises(Unreachable):
        await setup.verify()


# --- descriptors that are not as they must be ------------------------------------------------------------


@simulated
async def test_overlapping_descriptors_are_named_with_the_offsets_that_both_claim() -> None:
    setup = await VerifySetup.make()
    second = await setup.descriptor(50)
    await setup.describe(replace(second, start_offset=40, object_id="data-40-99-1.parquet"))
    await setup.objects.put("default/orders/data-40-99-1.parquet", [await setup.objects.get(SECOND)])
    report = await setup.verify()
    found = {(problem.kind, problem.first, problem.end) for problem in report.problems}
    assert ("overlap", 40, 50) in found and ("overlap", 50, 100) in found
    assert ("damaged", 40, 100) in found  # its footer says where it really begins


@simulated
async def test_offsets_that_nobody_has_are_a_gap() -> None:
    setup = await VerifySetup.make(FREEING, segment_bytes=2048)
    assert setup.orders.log.first_offset > 50
    await setup.write(Delete(keys.storage_object(ORDERS, 0)))
    report = await setup.verify()
    assert only(report) == ("gap", "", 0, 50)
    assert report.places[0] == CoverageRange(0, 50, Where.NOWHERE)


@simulated
async def test_offsets_without_a_descriptor_that_the_log_still_has_are_no_gap() -> None:
    setup = await VerifySetup.make()
    await setup.write(Delete(keys.storage_object(ORDERS, 50)))
    report = await setup.verify()
    assert report.ok
    assert report.places == [
        CoverageRange(0, 50, Where.OBJECTS),
        CoverageRange(50, 100, Where.LOG),
        CoverageRange(100, 150, Where.OBJECTS),
        CoverageRange(150, 160, Where.LOG),
    ]


@simulated
async def test_offsets_that_are_both_in_an_object_and_an_orphan_are_a_problem() -> None:
    setup = await VerifySetup.make()
    orphan = Orphan(start=140, end=150, broker_id=7, epoch=9)
    await setup.write(Put(keys.orphan(ORDERS, 140), orphan.to_bytes()))
    assert only(await setup.verify()) == ("overlap", "", 140, 150)


@simulated
async def test_a_descriptor_that_cannot_be_understood_is_a_problem_and_keeps_its_object_safe() -> None:
    setup = await VerifySetup.make()
    await setup.write(Put(keys.storage_object(ORDERS, 50), b'{"start_offset": 50}'))
    await setup.verify()
    await asyncio.sleep(GRACE)
    report = await setup.verify(repair=True)
    assert [problem.kind for problem in report.problems] == ["descriptor"]
    assert report.removed == [] and SECOND in await setup.names()


@simulated
async def test_without_its_manifest_nothing_is_known_and_nothing_goes() -> None:
    setup = await VerifySetup.make(FREEING, segment_bytes=2048)
    name = "manifest-1-1.json"
    listed = [(await setup.descriptor(start)).to_json() for start in (0, 50)]
    await setup.objects.put(f"default/orders/{name}", [json.dumps({"format": 1, "objects": listed}).encode()])
    await setup.write(
        Put(keys.history(ORDERS), TopicHistory(manifest=name, manifest_end=100).to_bytes()),
        *(Delete(keys.storage_object(ORDERS, start)) for start in (0, 50)),
    )
    assert (await setup.verify()).ok
    await setup.objects.delete(f"default/orders/{name}")
    await asyncio.sleep(GRACE)
    report = await setup.verify(repair=True)
    assert only(report) == ("manifest", f"default/orders/{name}", 0, 100)
    assert report.places[0][:3] == (0, 100, Where.UNKNOWN)
    assert report.removed == [] and {FIRST, SECOND, THIRD} <= await setup.names()


# --- objects that nobody describes ----------------------------------------------------------------------

LEFT_OVER = "default/orders/data-100-149-1-1.parquet"


@simulated
async def test_an_undescribed_object_is_noted_and_stays_without_repair() -> None:
    setup = await VerifySetup.make()
    await setup.objects.put(LEFT_OVER, [b"half"])
    for _ in range(3):
        report = await setup.verify()
        assert report.ok and [note.key for note in report.notes] == [LEFT_OVER]
        await asyncio.sleep(GRACE)
    [found] = report.undescribed
    assert (found.key, found.epoch, found.verdict.fate.value) == (LEFT_OVER, 1, "garbage")
    assert LEFT_OVER in await setup.names()


@simulated
async def test_repair_removes_what_the_owner_has_known_to_be_garbage_for_long_enough() -> None:
    setup = await VerifySetup.make()
    await setup.objects.put(LEFT_OVER, [b"half"])
    assert (await setup.verify(repair=True)).removed == []
    await asyncio.sleep(GRACE - 1)
    assert (await setup.verify(repair=True)).removed == []
    await asyncio.sleep(1)
    assert (await setup.verify(repair=True)).removed == [LEFT_OVER]
    assert LEFT_OVER not in await setup.names()
    report = await setup.verify()
    assert report.ok and report.notes == [] and report.messages == 160


@pytest.mark.parametrize(
    "key",
    [
        "default/orders/report.parquet",
        "default/orders/_SUCCESS",
        "default/orders/backup/data-0-49-1.parquet",
        "default/orders/data-0-49-1.parquet.old",
    ],
)
def test_a_foreign_file_is_noted_and_never_removed(key: str) -> None:
    @simulated
    async def setup_with_it() -> None:
        setup = await VerifySetup.make()
        await setup.objects.put(key, [b"somebody's"])
        await setup.verify()
        await asyncio.sleep(3 * GRACE)
        report = await setup.verify(repair=True)
        assert report.ok and report.removed == []
        assert [(each.key, each.verdict.fate.value) for each in report.undescribed] == [(key, "foreign")]
        assert key in await setup.names()

    setup_with_it()


@simulated
async def test_an_object_of_a_newer_epoch_is_a_problem_and_stays() -> None:
    setup = await VerifySetup.make()
    newer = "default/orders/data-150-199-2.parquet"
    await setup.objects.put(newer, [b"theirs"])
    await setup.verify()
    await asyncio.sleep(GRACE)
    report = await setup.verify(repair=True)
    assert only(report)[:2] == ("newer", newer)
    assert newer in await setup.names()


@simulated
async def test_an_object_of_an_epoch_that_may_be_rescued_stays_until_the_orphan_is_gone() -> None:
    setup = await VerifySetup.make()
    await setup.host.restart()
    setup = VerifySetup(setup.host, setup.host.broker, setup.orders)
    rescued = "default/orders/data-150-159-1-7.parquet"
    await setup.objects.put(rescued, [b"rescued"])
    orphan = Orphan(start=160, end=165, broker_id=7, epoch=1)
    await setup.write(Put(keys.orphan(ORDERS, 160), orphan.to_bytes()))
    await setup.verify()
    await asyncio.sleep(GRACE)
    report = await setup.verify(repair=True)
    assert [each.verdict.fate.value for each in report.undescribed if each.key == rescued] == ["orphaned"]
    assert rescued in await setup.names()
    await setup.write(Delete(keys.orphan(ORDERS, 160)))
    assert rescued in (await setup.verify(repair=True)).removed


@simulated
async def test_what_is_described_behind_the_owners_back_is_not_garbage() -> None:
    setup = await VerifySetup.make()
    info = await setup.objects.put(LEFT_OVER, [await setup.objects.get(THIRD)])
    await setup.verify()
    await asyncio.sleep(GRACE)
    third = await setup.descriptor(100)
    name = LEFT_OVER.removeprefix("default/orders/")
    await setup.describe(replace(third, object_id=name, etag=info.etag))
    report = await setup.verify(repair=True)
    assert LEFT_OVER not in report.removed
    assert THIRD not in report.removed  # the owner still reads it: what it knows counts as well


@simulated
async def test_a_broker_that_lost_the_topic_removes_nothing() -> None:
    setup = await VerifySetup.make()
    await setup.objects.put(LEFT_OVER, [b"half"])
    await setup.verify()
    await asyncio.sleep(GRACE)
    taken = Owner(epoch=2, session=1, broker_id=99, start_offset=160)
    await setup.write(Put(keys.owner(ORDERS), taken.to_bytes()))
    with pytest.raises(OwnershipLost):
        await setup.verify(repair=True)
    assert LEFT_OVER in await setup.names()


@simulated
async def test_what_a_deleted_topic_left_in_the_bucket_is_found_and_removed() -> None:
    setup = await VerifySetup.make()
    await setup.broker.topics.delete(ORDERS)
    await setup.objects.put(FIRST, [b"came late"])
    await setup.objects.put("default/orders/notes.txt", [b"mine"])
    verified = await setup.verified()
    assert verified.report.ok and "deleted" in verified.not_served
    assert (await setup.verified(repair=True)).report.removed == [FIRST]
    assert "default/orders/notes.txt" in await setup.names()


@simulated
async def test_a_topic_that_never_was_is_unknown() -> None:
    setup = await VerifySetup.make()
    with pytest.raises(TopicUnknown):
        await setup.verified(topic="/default/never")


@simulated
async def test_a_broker_that_lost_its_log_takes_nothing_for_void_that_is_in_an_object() -> None:
    setup = await VerifySetup.make()
    setup.host.kill()
    directory = "wal/default/orders/00000000000000000001"
    for entry in await setup.host.disk.list(directory):
        await setup.host.disk.remove(f"{directory}/{entry.name}")
    broker = await setup.host.boot()
    setup = VerifySetup(setup.host, broker, await find_topic(broker))
    report = await setup.verify()
    assert report.ok and report.messages == 150
    assert [(place.first, place.where) for place in report.places] == [(0, Where.OBJECTS), (150, Where.VOID)]


@simulated
async def test_a_topic_that_cannot_be_opened_is_checked_without_its_log_and_nothing_is_removed() -> None:
    setup = await VerifySetup.make()
    await setup.objects.put(LEFT_OVER, [b"half"])
    second = await setup.descriptor(50)
    await setup.describe(replace(second, start_offset=40, object_id="data-40-99-1.parquet"))
    broker = await setup.host.restart()
    setup = VerifySetup(setup.host, broker, setup.orders)
    verified = await setup.verified(repair=True)
    assert ORDERS in broker.topics.unopened and "descriptors" in verified.not_served
    assert ("overlap", 40, 50) in {(each.kind, each.first, each.end) for each in verified.report.problems}
    assert verified.report.removed == [] and LEFT_OVER in await setup.names()
