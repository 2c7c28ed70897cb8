"""What a broker still has on its disk of a topic that others had since: removed when the store has it, and only then.

The rows are those of docs/adr/0003-the-cluster.md, "What a broker has of a topic that others had since".
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.history import ownership
from pydanube.core.history.ownership import void_to_bytes
from pydanube.core.history.tiers import TierConfig, object_name
from pydanube.core.names import ProducerId, TopicName
from pydanube.errors import Unreachable
from pydanube.formats.batch import encode, rows_of
from pydanube.formats.erasure import erase_object
from pydanube.history import leftovers
from pydanube.history.maintenance import Maintenance
from pydanube.history.rescue import Rescuer
from pydanube.history.storage import StorageDesk
from pydanube.ports import Disk, Put, Write
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.testing.cluster import Cluster, Node
from tests.harness.brokers import message, now, simulated
from tools.sim.cluster_recorder import everything

SELDOM = TierConfig(upload_seconds=3600.0, garbage_seconds=60.0, sweep_seconds=60.0)
FILES = "wal/default/orders"
PRODUCER = ProducerId(7)


async def send(cluster: Cluster, topic: TopicName, session: int, sequences: Iterable[int]) -> list[int]:
    """As an idempotent producer does; the offsets."""

    async def submit(found: Topic, sequence: int) -> int:
        rows = rows_of([message(f"{sequence}", key="ann")])
        batch = encode(rows, topic=topic, producer_id=PRODUCER, session=session, first_sequence=sequence)
        return (await found.submit_batch(batch)).offset

    return [await cluster.publish(topic, lambda found, each=each: submit(found, each)) for each in sequences]  # type: ignore[misc]


async def begun() -> tuple[Cluster, TopicName, int]:
    """Three brokers, and a topic of the first with an idempotent producer's session."""
    cluster = await Cluster(tier=SELDOM).start(3)
    topic = await cluster.create("/default/orders", on=1)
    return cluster, topic, await cluster.publish(topic, lambda found: found.open_session(PRODUCER))


async def lose(cluster: Cluster, topic: TopicName) -> Node:
    """Its owner dies, and another takes over."""
    host = cluster.host(topic)
    assert host is not None
    host.kill()
    await cluster.until(lambda: cluster.host(topic) is not None)
    return host


async def boot_active(node: Node) -> None:
    broker = await node.boot()
    assert broker.cluster is not None
    await node.call(broker.cluster.requests.activate(broker.broker_id))


async def flush_to_segments(cluster: Cluster, topic: TopicName, number: int) -> None:
    await cluster.unload(topic, to=number)
    await cluster.until(lambda: cluster.host(topic) is cluster.node(number))


async def texts(cluster: Cluster, topic: TopicName) -> list[str]:
    return [text for _, text, _ in await everything(await cluster.served(topic))]


async def verified(cluster: Cluster, topic: TopicName) -> list[tuple[str, str]]:
    """What `storage verify` finds wrong."""
    node = cluster.host(topic)
    assert node is not None and node.broker is not None

    async def tell(*progress: Any) -> None:
        pass

    desk = StorageDesk(node.broker.topics, "memory:")
    report = (await node.call(desk.verify(topic, repair=False, on_progress=tell))).report
    return [(each.kind, each.text) for each in report.findings]


async def files(node: Node) -> list[str]:
    found = []
    for epoch in await node.disk.list(FILES):
        found += [f"{FILES}/{epoch.name}/{each.name}" for each in await node.disk.list(f"{FILES}/{epoch.name}")]
    return found


async def not_yet(*args: Any) -> None:
    raise Unreachable("the metadata store", "it is away")


async def adopted_and_killed(patch: pytest.MonkeyPatch, tier: TierConfig = SELDOM) -> tuple[Cluster, TopicName]:
    """Broker 1 had 0 to 4; another took 3 and 4 again, and 5, and adopted the rest. Then 1 dies with all its files."""
    cluster = await Cluster(tier=tier).start(3)
    topic = await cluster.create("/default/orders", on=1)
    session = await cluster.publish(topic, lambda found: found.open_session(PRODUCER))
    await send(cluster, topic, session, range(5))
    node = await lose(cluster, topic)
    await send(cluster, topic, session, range(3, 6))
    with patch.context() as inner:
        inner.setattr(Rescuer, "_forget", not_yet)
        await boot_active(node)
        await asyncio.sleep(20)
        assert await cluster.metadata.list(keys.orphans(topic)) == []
        node.kill()
    assert len(await node.disk.list(FILES)) == 1
    return cluster, topic


@simulated
async def test_a_broker_that_died_between_adoption_and_removal_reads_everything_once_when_it_has_its_topic_again() -> (
    None
):
    with pytest.MonkeyPatch.context() as patch:
        cluster, topic = await adopted_and_killed(patch)
    await boot_active(cluster.node(1))
    await flush_to_segments(cluster, topic, 1)
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"]
    await flush_to_segments(cluster, topic, 2)  # everything that it holds is in the store now
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"]
    assert [end - first + 1 for first, end in await cluster.descriptors(topic)] == [3, 3], "nothing that is void"
    assert await verified(cluster, topic) == []
    assert await files(cluster.node(1)) == []


async def lost_below_a_void(sent_again: Iterable[int] = (5, 6)) -> tuple[Cluster, TopicName, Node]:
    """Broker 1 had 0 to 4, and what it would have used next was void when it was lost; another took 5 and 6."""
    cluster, topic, session = await begun()
    await send(cluster, topic, session, range(5))
    reserved = (await cluster.value(keys.reserve(topic)))["end"]
    await cluster.metadata.transact(
        [], [Put(keys.void(topic, 5), void_to_bytes(reserved, "the end of the log was lost"))]
    )
    node = await lose(cluster, topic)
    await send(cluster, topic, session, sent_again)
    return cluster, topic, node


@simulated
async def test_what_a_lost_owner_had_below_a_void_is_an_orphan_and_comes_back() -> None:
    cluster, topic, node = await lost_below_a_void()
    assert len(await cluster.metadata.list(keys.orphans(topic))) == 1
    await boot_active(node)
    await asyncio.sleep(20)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    assert cluster.host(topic) is not node
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5", "6"]
    assert await verified(cluster, topic) == []
    assert await files(node) == []


@simulated
async def test_a_void_inside_an_orphan_is_the_orphans_as_long_as_that_stands() -> None:
    """An offset has one place."""
    cluster, topic, _ = await lost_below_a_void()
    assert await cluster.metadata.list(keys.voids(topic)) == []
    assert await verified(cluster, topic) == []


@simulated
async def test_what_was_void_inside_an_orphan_is_void_once_when_it_is_adopted_and_parts_were_sent_again() -> None:
    cluster, topic, node = await lost_below_a_void(sent_again=range(3, 7))
    await boot_active(node)
    await asyncio.sleep(20)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5", "6"]
    assert await verified(cluster, topic) == []


@simulated
async def test_an_orphan_has_nothing_of_what_others_had_before_its_broker() -> None:
    """The first of two lost owners has the only copy below a void, and an earlier version made no orphan of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "orphan_left", lambda *args, **named: None)
        cluster, topic, first = await lost_below_a_void()
    second = await lose(cluster, topic)
    await boot_active(second)
    await asyncio.sleep(30)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    await boot_active(first)
    await flush_to_segments(cluster, topic, 1)
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5", "6"]


@simulated
async def test_no_receipt_names_an_offset_that_was_given_up() -> None:
    cluster, topic, session = await begun()
    await send(cluster, topic, session, range(10))
    await cluster.metadata.transact(
        [], [Put(keys.void(topic, 3), void_to_bytes(5, "damaged on the disk of its owner"))]
    )
    node = await lose(cluster, topic)
    owner = cluster.host(topic)
    assert owner is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rescuer, "_store_run", not_yet)
        await node.boot()
        await asyncio.sleep(20)  # what was brought is recalled, and cannot be stored
        found = await cluster.served(topic)
        await owner.call(found.log.roll())
        other = await cluster.publish(topic, lambda found: found.add_producer("other"))
        await cluster.publish(topic, lambda found: found.publish(other, message("x")))
        await owner.call(found.discard_orphan(0))
    owner.kill()
    await owner.boot()
    await cluster.until(lambda: cluster.host(topic) is owner)
    await send(cluster, topic, session, [9])
    assert "9" in await texts(cluster, topic)


@simulated
async def test_files_set_aside_and_a_store_that_does_not_answer_delay_no_restart() -> None:
    with pytest.MonkeyPatch.context() as patch:
        cluster, topic = await adopted_and_killed(patch, replace(SELDOM, descriptors_max=0, descriptors_moved=1))
    node = cluster.node(1)
    for path in await files(node):
        await node.disk.rename(path, path + ".quarantined")
    await boot_active(node)
    await flush_to_segments(cluster, topic, 1)
    found = await cluster.served(topic)
    assert found.storage is not None
    assert await node.call(Maintenance(found.storage.tier).move_to_manifest())
    node.kill()

    async def hang(*_: Any) -> bytes:
        await asyncio.sleep(60)
        raise Unreachable("the object store", "it does not answer")

    begun = now()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(node.objects), "get", hang)
        await node.boot()
        await cluster.until(lambda: cluster.host(topic) is not None)
    assert now() - begun < 5


@simulated
async def test_offsets_below_a_void_that_no_object_has_stay_on_their_disk_and_are_uploaded_when_it_has_the_topic() -> (
    None
):
    """No orphan of its stands, as it was in earlier versions, and still it has the only copy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ownership, "orphan_left", lambda *args, **named: None)
        cluster, topic, node = await lost_below_a_void()
    await boot_active(node)
    await asyncio.sleep(20)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    await flush_to_segments(cluster, topic, 1)
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5", "6"]
    await flush_to_segments(cluster, topic, 2)
    assert [end - first + 1 for first, end in await cluster.descriptors(topic)] == [5, 2]
    assert await verified(cluster, topic) == []


@simulated
async def test_what_an_operator_gave_up_does_not_come_back_from_old_files() -> None:
    cluster, topic, session = await begun()
    await send(cluster, topic, session, range(3))
    node = await lose(cluster, topic)
    owner = cluster.host(topic)
    assert owner is not None
    found = await cluster.served(topic)
    await owner.call(found.discard_orphan(0))
    await send(cluster, topic, session, [3])
    await boot_active(node)
    await flush_to_segments(cluster, topic, 1)
    assert await texts(cluster, topic) == ["3"]
    await flush_to_segments(cluster, topic, 2)
    assert [end - first + 1 for first, end in await cluster.descriptors(topic)] == [1]
    assert await verified(cluster, topic) == []


@simulated
async def test_damaged_files_of_a_redundant_epoch_are_set_aside_and_nobody_reads_them() -> None:
    with pytest.MonkeyPatch.context() as patch:
        cluster, topic = await adopted_and_killed(patch)
    disk = cluster.node(1).disk
    assert isinstance(disk, MemoryDisk)
    sizes = {path: await disk.size(path) for path in await files(cluster.node(1)) if path.endswith(".wal")}
    path = max(sizes, key=lambda each: sizes[each])
    content = await disk.read(path, 0, sizes[path])
    copied = content.rindex(b"DNB1")  # recovery has the last batch in another file
    place = content.rindex(b"DNB1", 0, copied) + 120  # in the body of the one before, which was sent again
    await disk.write([Write(path, place, [bytes(each ^ 255 for each in content[place : place + 8])])], sync=True)
    await boot_active(cluster.node(1))
    await flush_to_segments(cluster, topic, 1)
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"]
    await flush_to_segments(cluster, topic, 2)
    assert await verified(cluster, topic) == []
    assert path + ".quarantined" in await files(cluster.node(1))
    await flush_to_segments(cluster, topic, 1)
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"]
    assert path + ".quarantined" in await files(cluster.node(1))


@simulated
async def test_what_a_crash_leaves_of_a_removal_is_not_taken_for_damaged() -> None:
    with pytest.MonkeyPatch.context() as patch:
        cluster, topic = await adopted_and_killed(patch)
    node = cluster.node(1)
    removed: list[str] = []

    async def one_file(disk: Disk, path: str) -> None:
        name = next(entry.name for entry in await disk.list(path) if entry.name.endswith(".wal"))
        await disk.remove(f"{path}/{name}")
        removed.append(name)
        node.kill()
        await asyncio.sleep(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leftovers, "_remove_tree", one_file)
        await boot_active(node)
        await cluster.unload(topic, to=1, asked=cluster.node(2))
        await cluster.until(lambda: bool(removed))
    await cluster.until(lambda: cluster.host(topic) is not None)
    await boot_active(node)
    await flush_to_segments(cluster, topic, 1)
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"]
    assert not any(path.endswith((".damage", ".quarantined")) for path in await files(node))


@simulated
async def test_files_stay_when_the_list_of_objects_cannot_be_read() -> None:
    with pytest.MonkeyPatch.context() as patch:
        cluster, topic = await adopted_and_killed(patch, replace(SELDOM, descriptors_max=0, descriptors_moved=1))
    owner = cluster.host(topic)
    found = await cluster.served(topic)
    assert owner is not None and found.storage is not None
    assert await owner.call(Maintenance(found.storage.tier).move_to_manifest())
    await boot_active(cluster.node(1))
    cluster.node(1).objects.away = True
    await flush_to_segments(cluster, topic, 1)
    assert any(path.endswith(".wal") for path in await files(cluster.node(1)))
    cluster.node(1).objects.away = False
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"], "nothing twice that was sent again"


async def erased_elsewhere() -> tuple[Cluster, TopicName]:
    """As `adopted_and_killed`; the objects are in a manifest then, and all that they hold is erased."""
    with pytest.MonkeyPatch.context() as patch:
        cluster, topic = await adopted_and_killed(patch, replace(SELDOM, descriptors_max=0, descriptors_moved=100))
    owner, found = cluster.host(topic), await cluster.served(topic)
    assert owner is not None and found.storage is not None
    tier = found.storage.tier

    async def erase() -> None:
        await found.flush_log()
        await Maintenance(tier).move_to_manifest()
        for number, old in enumerate(list(tier.objects.listed)):
            data = await tier.store.get(tier.key(old.object_id))
            made = erase_object(data, old.footer_crc, ["ann"], "2026-11-18T08:00:00+00:00").encoded
            name = object_name(old.start_offset, old.end - 1, old.epoch, attempt=10**9 + number)
            info = await tier.store.put(tier.key(name), [made.data], create=True)
            new = replace(old, object_id=name, size=info.size_bytes, etag=info.etag, footer_crc=made.footer_crc)
            await found.swap_objects([old.object_id], new)

    await owner.call(erase())
    return cluster, topic


@simulated
async def test_what_was_erased_at_another_owner_is_not_read_from_old_files_that_could_not_be_removed() -> None:
    cluster, topic = await erased_elsewhere()
    assert await texts(cluster, topic) == [""] * 6
    one = cluster.node(1)
    await boot_active(one)
    one.objects.away = True
    await flush_to_segments(cluster, topic, 1)
    one.objects.away = False
    assert any(path.endswith(".wal") for path in await files(one)), "as they were before"
    await cluster.publish(topic, lambda found: found.append(message("6")))
    assert await texts(cluster, topic) == ["", "", "", "", "", "", "6"]


@simulated
async def test_old_files_that_the_store_has_as_well_are_not_read_while_the_store_is_away() -> None:
    cluster, topic = await erased_elsewhere()
    one = cluster.node(1)
    await boot_active(one)
    one.objects.away = True
    await flush_to_segments(cluster, topic, 1)
    found = await cluster.served(topic)
    with pytest.raises(Unreachable):
        await one.call(found.rows(0, 5))


@simulated
async def test_files_of_a_brought_epoch_are_remembered_until_the_topic_is_not_open_any_more() -> None:
    cluster = await Cluster(tier=SELDOM).start(2)
    topic = await cluster.create("/default/orders", on=1)
    session = await cluster.publish(topic, lambda found: found.open_session(PRODUCER))
    await send(cluster, topic, session, range(3))
    epoch = (await cluster.owner(topic)).epoch
    node = await lose(cluster, topic)
    cluster.node(2).kill()
    await asyncio.sleep(10)
    rescuers: list[Rescuer] = []
    look = Rescuer._bring_all

    async def looked(self: Rescuer) -> None:
        rescuers.append(self)
        await look(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rescuer, "_bring_all", looked)
        await boot_active(node)  # it has its topic again, and adopts what it brings
        await asyncio.sleep(60)
        assert await cluster.metadata.list(keys.orphans(topic)) == []
        assert node.broker is not None and cluster.host(topic) is node
        assert not await node.call(node.broker.topics.forget_epochs(topic, epoch))
        assert rescuers[-1]._brought == {(topic, epoch)}
        await boot_active(cluster.node(2))
        await cluster.unload(topic, to=2, asked=node)
        await asyncio.sleep(20)
    assert [each._brought for each in rescuers if each._broker_id == node.broker_id][-1] == set()
    assert await files(node) == []


@simulated
async def test_what_was_brought_in_vain_is_swept_when_its_orphan_is_gone_and_not_before() -> None:
    cluster, topic, session = await begun()
    await send(cluster, topic, session, range(3))
    node = await lose(cluster, topic)
    owner = cluster.host(topic)
    assert owner is not None

    async def raw() -> list[str]:
        return [info.key async for info in cluster.objects.list("default/orders/rescue-")]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rescuer, "_store_run", not_yet)
        await node.boot()
        await asyncio.sleep(300)
        assert len(await raw()) == 1, "it is all that anybody has"
        found = await cluster.served(topic)
        await owner.call(found.discard_orphan(0))
    await asyncio.sleep(300)
    assert await raw() == []


async def lost_twice_and_home(patch: pytest.MonkeyPatch) -> tuple[Cluster, TopicName]:
    """Broker 1 had 0 to 2 in one epoch and 3, 4 in the next; another took 2 to 5. Then 1 has the topic, not adopted."""
    cluster, topic, session = await begun()
    await send(cluster, topic, session, range(3))
    cluster.node(1).kill()
    await cluster.node(1).boot()
    await cluster.until(lambda: cluster.host(topic) is cluster.node(1))
    await send(cluster, topic, session, range(3, 5))
    node = await lose(cluster, topic)
    await send(cluster, topic, session, range(2, 6))
    patch.setattr(Rescuer, "_bring", not_yet)
    await boot_active(node)
    await flush_to_segments(cluster, topic, 1)
    assert len(await cluster.metadata.list(keys.orphans(topic))) == 1
    return cluster, topic


@simulated
async def test_an_owner_that_adopts_from_its_own_disk_what_it_had_in_several_epochs_reads_nothing_twice() -> None:
    with pytest.MonkeyPatch.context() as patch:
        cluster, topic = await lost_twice_and_home(patch)
    await asyncio.sleep(20)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"]
    await flush_to_segments(cluster, topic, 2)
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"]
    assert await verified(cluster, topic) == []


@simulated
async def test_damaged_files_stay_when_their_owner_adopts_from_its_own_disk() -> None:
    with pytest.MonkeyPatch.context() as patch:
        cluster, topic = await lost_twice_and_home(patch)
    disk = cluster.node(1).disk
    path = min(each for each in await files(cluster.node(1)) if each.endswith(".wal"))
    content = await disk.read(path, 0, await disk.size(path))
    place = content.index(b"DNB1", content.index(b"DNB1") + 1) + 120  # in a body that nobody has read yet
    await disk.write([Write(path, place, [bytes(each ^ 255 for each in content[place : place + 8])])], sync=True)
    await asyncio.sleep(20)
    assert await cluster.metadata.list(keys.orphans(topic)) == []
    assert path + ".quarantined" in await files(cluster.node(1))


@simulated
async def test_an_owner_that_dies_between_its_own_adoption_and_the_removal_reads_everything_once_when_it_is_back() -> (
    None
):
    with pytest.MonkeyPatch.context() as patch:
        cluster, topic = await lost_twice_and_home(patch)
    node = cluster.node(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Topic, "forget_own", not_yet)
        await asyncio.sleep(20)
        assert await cluster.metadata.list(keys.orphans(topic)) == []
        node.kill()
    assert len(await node.disk.list(FILES)) >= 2
    await node.boot()
    await cluster.until(lambda: cluster.host(topic) is node)
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"]
    await flush_to_segments(cluster, topic, 2)
    assert await texts(cluster, topic) == ["0", "1", "2", "3", "4", "5"]
    assert await verified(cluster, topic) == []
