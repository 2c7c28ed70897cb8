"""Schemas in a cluster on a virtual clock: registrations at once under faults, and topics that keep what they ask."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest

from pydanube.broker import schema_enforcer, take_over
from pydanube.broker.schemas import SchemaRegistry
from pydanube.core import keys
from pydanube.core.names import TopicName
from pydanube.core.schemas.enforcing import TopicSchema
from pydanube.core.schemas.kinds import SchemaPolicy
from pydanube.core.schemas.refusals import SchemaRefused
from pydanube.core.schemas.subjects import SchemaVersion, SubjectRecord
from pydanube.errors import DataDamaged, InvalidObject, NotServed, Unavailable
from pydanube.formats.batch import Envelope
from pydanube.ports import Item, Put
from pydanube.testing.cluster import Cluster
from tests.harness.brokers import message, simulated

ENFORCED = TopicSchema("orders", SchemaPolicy.ENFORCE, True)


def definition(number: int) -> bytes:
    return json.dumps({"properties": {f"p{number}": {"type": "string"}}}).encode()


async def insist(registry: SchemaRegistry, subject: str, text: bytes) -> tuple[int, int]:
    """As a client that tries again for as long as it is told that it may. Id and version."""
    while True:
        try:
            done = await registry.register(subject, "json", text)
        except Unavailable:
            await asyncio.sleep(0.05)
        else:
            return done.record.schema_id, done.version


def registries(town: Cluster) -> list[SchemaRegistry]:
    return [node.broker.schemas for node in town.living if node.broker is not None]


async def stored(town: Cluster) -> dict[str, SubjectRecord]:
    """Every subject, after a look that what is stored of them fits together."""
    found = {}
    for item in await town.metadata.list(keys.SCHEMAS):
        subject = keys.subject_of_metadata(item.key)
        if subject is not None:
            record = found[subject] = SubjectRecord.from_bytes(item.value)
            versions = await town.metadata.list(keys.schema_versions(subject))
            assert [keys.version_of_schema(each.key) for each in versions] == list(range(1, len(record.versions) + 1))
            for mark, each in zip(record.versions, versions, strict=True):
                assert SchemaVersion.from_bytes(mark.number, each.value).fingerprint == mark.fingerprint
            index = await town.metadata.get(keys.schema_by_id(record.schema_id))
            assert index is not None and index.value.decode() == subject
    assert sorted(record.schema_id for record in found.values()) == list(range(1, len(found) + 1))
    counter = await town.metadata.get(keys.NEXT_SCHEMA_ID)
    assert counter is not None and int(counter.value) == len(found) + 1
    return found


@pytest.mark.parametrize("seed", range(3))
def test_fifty_registrations_at_once_on_three_brokers_under_faults_leave_no_gap_and_no_number_twice(seed: int) -> None:
    @simulated
    async def story() -> None:
        town = await Cluster(seed=seed).start(3)
        for number in (1, 2, 3):
            faults = town.node(number).metadata
            faults.answers_lost, faults.delay_max_seconds, faults.late = 0.1, 0.05, 0.05
        for node in town.living:
            await node.call(asyncio.sleep(0))
        tasks = [
            asyncio.ensure_future(insist(registries(town)[number % 3], f"s{number % 10}", definition(number)))
            for number in range(50)
        ]
        done = await asyncio.gather(*tasks)
        for number in (1, 2, 3):
            town.node(number).heal()
        await asyncio.sleep(10)  # late ones arrive
        assert len(set(done)) == 50, "no version was given twice"
        found = await stored(town)
        assert {(each.schema_id, mark.number) for each in found.values() for mark in each.versions} == set(done)
        again = await asyncio.gather(*(insist(registries(town)[0], f"s{n % 10}", definition(n)) for n in range(50)))
        assert again == done, "the same text is the same version, whoever is asked"

    story()


@simulated
async def test_a_broker_that_dies_between_transaction_and_answer_leaves_a_whole_version() -> None:
    town = await Cluster().start(3)
    first, second = town.node(1), town.node(2)
    first.metadata.answers_lost = 1.0
    assert first.broker is not None and second.broker is not None
    asking = asyncio.ensure_future(first.call(first.broker.schemas.register("orders", "json", definition(1))))
    await asyncio.sleep(0.5)
    first.kill()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    done = await second.broker.schemas.register("orders", "json", definition(1))
    assert (done.record.schema_id, done.version, done.is_new) == (1, 1, False)
    assert len(await stored(town)) == 1


# --- topics keep what they ask ----------------------------------------------------------------------------


async def publish(town: Cluster, topic: TopicName, *schema: int, payload: str = "{}") -> None:
    sent: Envelope = message(payload)
    if schema:
        sent = sent._replace(schema_id=schema[0], schema_version=schema[1])

    while True:
        host = town.host(topic)
        found = host.topic(topic) if host is not None else None
        try:
            if host is not None and found is not None:
                producer = await host.call(found.add_producer("producer"))
                await host.call(found.publish(producer, sent))
                return
        except Unavailable:
            pass
        await asyncio.sleep(0.1)


async def is_held_to_its_schema(town: Cluster, topic: TopicName) -> None:
    await town.until(lambda: town.host(topic) is not None)
    host = town.host(topic)
    assert host is not None
    found = host.topic(topic)
    assert found is not None and found.enforcer.config == ENFORCED, "subject, policy and payload validation"
    await publish(town, topic, 1, 1)
    for wrong in ((), (1, 9)):
        with pytest.raises(SchemaRefused):
            await publish(town, topic, *wrong)
    with pytest.raises(SchemaRefused, match="/p1"):
        await publish(town, topic, 1, 1, payload='{"p1": 7}')


async def keeps_its_schema(reliable: bool) -> None:
    town = await Cluster().start(3)
    node = town.node(1)
    assert node.broker is not None
    await node.broker.schemas.register("orders", "json", definition(1))
    topic = await town.create("/default/orders", on=1, reliable=reliable)
    found = node.topic(topic)
    assert found is not None
    await found.bind("orders")
    await found.set_schema(ENFORCED)
    await is_held_to_its_schema(town, topic)
    await town.unload(topic)
    await is_held_to_its_schema(town, topic)
    host = town.host(topic)
    assert host is not None and host is not node
    host.kill()
    await is_held_to_its_schema(town, topic)
    for each in town.living:
        await each.stop()
    for number in (1, 2, 3):
        await town.node(number).boot()
    await is_held_to_its_schema(town, topic)
    living = town.host(topic)
    assert living is not None and living.broker is not None
    await living.call(living.broker.topics.delete(topic))
    assert await town.metadata.get(keys.schema_config(topic)) is None, "seed 003: deleting removes the schema"


@pytest.mark.parametrize("reliable", [True, False], ids=["reliable", "non_reliable"])
def test_unload_crash_and_restart_keep_subject_and_policy_and_deleting_removes_them(reliable: bool) -> None:
    simulated(lambda: keeps_its_schema(reliable))()


def test_a_planted_defect_that_keeps_the_label_only_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right: Callable[[TopicName, Item | None, Item | None], TopicSchema] = schema_enforcer.topic_schema

    def label_only(name: TopicName, chosen: Item | None, label: Item | None) -> TopicSchema:
        return TopicSchema(right(name, chosen, label).subject)

    monkeypatch.setattr(take_over, "topic_schema", label_only)
    with pytest.raises(AssertionError, match="subject, policy and payload validation"):
        simulated(lambda: keeps_its_schema(True))()


@simulated
async def test_other_brokers_hear_of_a_deleted_version_and_of_a_new_one() -> None:
    town = await Cluster().start(2)
    first, second = (town.node(number).broker for number in (1, 2))
    assert first is not None and second is not None
    await first.schemas.register("orders", "json", definition(1))
    await second.schemas.record("orders")
    await first.schemas.register("orders", "json", definition(2))
    await first.schemas.delete_version("orders", 1)
    await asyncio.sleep(2)
    known = second.schemas.known("orders")
    assert known is not None and [each.number for each in known.active()] == [2]


@simulated
async def test_a_store_that_is_away_holds_up_no_message_of_a_version_that_is_known() -> None:
    town = await Cluster().start(1)
    node = town.node(1)
    assert node.broker is not None
    await node.broker.schemas.register("orders", "json", definition(1))
    topic = await town.create("/default/orders", on=1)
    found = await town.served(topic)
    await found.bind("orders")
    await found.set_schema(TopicSchema("orders", SchemaPolicy.ENFORCE))
    await publish(town, topic, 1, 1)
    node.metadata.cut = True
    producer = await found.add_producer("producer")
    await found.publish(producer, message("{}")._replace(schema_id=1, schema_version=1))
    with pytest.raises(Unavailable):
        await found.publish(producer, message("{}")._replace(schema_id=1, schema_version=2))
    with pytest.raises(Unavailable):
        await node.broker.schemas.register("orders", "json", definition(2))
    node.metadata.cut = False
    assert (await insist(node.broker.schemas, "orders", definition(2))) == (1, 2)


@simulated
async def test_a_message_that_waits_for_its_schema_while_the_topic_leaves_is_not_stored() -> None:
    town = await Cluster().start(2)
    node = town.node(1)
    assert node.broker is not None
    await node.broker.schemas.register("orders", "json", definition(1))
    topic = await town.create("/default/orders", on=1)
    found = await town.served(topic)
    await found.bind("orders")
    await found.set_schema(TopicSchema("orders", SchemaPolicy.ENFORCE))
    node.broker.schemas._known.clear()
    node.metadata.delay_max_seconds = 0.5
    producer = await found.add_producer("producer")
    asking = asyncio.ensure_future(found.publish(producer, message("{}")._replace(schema_id=1, schema_version=1)))
    await asyncio.sleep(0)
    found.pause("it moves")
    with pytest.raises(NotServed, match="it moves"):
        await asking
    assert found.head == 0
    found.resume()


@simulated
async def test_what_is_stored_and_none_of_ours_is_an_error_and_never_no_schema() -> None:
    town = await Cluster().start(1)
    node = town.node(1)
    assert node.broker is not None
    topic = await town.create("/default/orders", on=1)
    await node.broker.schemas.register("orders", "json", definition(1))
    await town.metadata.transact([], [Put(keys.schema_metadata("orders"), b"[]")])
    with pytest.raises(DataDamaged, match="none of ours"):
        await node.broker.schemas.record("orders")
    await town.metadata.transact([], [Put(keys.schema_config(topic), b'{"validation_policy": 7}')])
    with pytest.raises(InvalidObject, match="schema of /default/orders"):
        schema_enforcer.topic_schema(topic, await town.metadata.get(keys.schema_config(topic)), None)
