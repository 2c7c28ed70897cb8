"""The cloud tier and the moment of death: a process is killed, or overtaken, at every call that changes a store.

What is stored between two changes is the same wherever in between a process dies, so killing it before each change
(and once at the end) tries every state that a crash can leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from pydanube.broker.topic import Topic
from pydanube.core import keys
from pydanube.core.policies import UNLIMITED, TopicPolicy
from pydanube.errors import Conflict
from pydanube.ports import Compare, Delete, Item, Put
from tests.harness.brokers import ORDERS, find_topic, make_topic, one_topic, simulated
from tests.harness.tiers import (
    SMALL,
    Teller,
    TierFixture,
    all_uploaded,
    carried,
    check_stored,
    covered,
    read_everything,
    recovered,
    state_of,
    until_sprung,
)

CHANGES = ("put", "transact", "delete")
FORGETFUL = TopicPolicy(retention_minutes=1)
UNMERGED = replace(SMALL, merged_bytes=1024, descriptors_max=2)

Scene: TypeAlias = Callable[[TierFixture, Topic, Teller], Awaitable[None]]

pytestmark = pytest.mark.usefixtures("where")


async def everything(host: TierFixture, orders: Topic, teller: Teller) -> None:
    """Uploads, merges, a manifest and one that replaces it, sweeps; the log is freed behind them."""
    for _ in range(7):
        await teller.tell(orders)
        await asyncio.sleep(2.0)  # each is uploaded before the next one comes
    await asyncio.sleep(7)


async def forgetting(host: TierFixture, orders: Topic, teller: Teller) -> None:
    """History in a manifest and in keys: first what the manifest names is forgotten, then some that have keys."""
    for _ in range(4):
        await teller.tell(orders)
        await asyncio.sleep(2.0)
    await asyncio.sleep(48)
    await teller.tell(orders)
    await asyncio.sleep(18)


def host_for(policies: TopicPolicy, **named: Any) -> TierFixture:
    return TierFixture(UNMERGED if policies is FORGETFUL else SMALL, policies=policies, **named)


@simulated
async def number_of_calls(setup: Scene, policies: TopicPolicy, calls: list[str]) -> None:
    host = host_for(policies)
    _, orders = await one_topic(host)
    host.trap.set(0, after=False)
    await setup(host, orders, Teller())
    calls += host.trap.calls


def points(setup: Scene, policies: TopicPolicy = UNLIMITED, *, all_calls: bool = False) -> list[int]:
    """The numbers of the calls at which to stop, and one behind the last."""
    calls: list[str] = []
    number_of_calls(setup, policies, calls)
    chosen = [number for number, name in enumerate(calls, 1) if all_calls or name in CHANGES]
    return [*chosen, len(calls) + 1]


@simulated
async def test_the_scenes_show_everything_that_can_happen() -> None:
    """Else the tests below would prove little."""
    host = TierFixture()
    _, orders = await one_topic(host)
    await everything(host, orders, Teller())
    state, described = await state_of(host)
    assert state.history.manifest == "manifest-1-2.json"
    assert {"data-0-2-1-m2.parquet", "data-3-5-1-m4.parquet"} <= {each.object_id for each in described}
    assert orders.log.first_offset > 4
    assert {"default/orders/data-2-2-1.parquet", "default/orders/manifest-1-1.json"} <= set(host.object_store.deleted)

    host = host_for(FORGETFUL)
    _, orders = await one_topic(host)
    await forgetting(host, orders, Teller())
    state, described = await state_of(host)
    assert (orders.first_offset, orders.log.first_offset, orders.head) == (4, 4, 5)
    assert state.history.manifest is None and host.object_store.contents["default/orders/manifest-1-2.json"]
    assert [each.object_id for each in described] == ["data-4-4-1.parquet"]


def test_a_broker_killed_at_any_point_of_uploading_and_tidying_comes_back_with_everything() -> None:
    @simulated
    async def killed(at: int) -> None:
        host = TierFixture()
        _, orders = await one_topic(host)
        teller = Teller()
        host.trap.set(at, after=False, then=host.kill)
        if not await until_sprung(host, everything(host, orders, teller)):
            host.kill()
        await recovered(host, teller.told)

    for at in points(everything):
        killed(at)


def test_a_broker_killed_at_any_point_of_retention_has_the_old_or_the_new_beginning_and_all_behind_it() -> None:
    @simulated
    async def killed(at: int) -> None:
        host = host_for(FORGETFUL)
        _, orders = await one_topic(host)
        teller = Teller()
        host.trap.set(at, after=False, then=host.kill)
        if not await until_sprung(host, forgetting(host, orders, teller)):
            host.kill()
        before, _ = await state_of(host)
        orders = await find_topic(await host.boot())
        assert orders.first_offset >= before.history.first_offset
        await all_uploaded(orders)
        await asyncio.sleep(20)  # what was begun is finished
        state, described = await state_of(host)
        assert all(each.end > state.history.first_offset for each in state.keyed), "descriptors of forgotten objects"
        await check_stored(host)
        named = {each.object_id for each in described} | {state.history.manifest}
        assert set(await host.object_store.names()) <= named, "objects of forgotten messages"
        told = {offset: text for offset, text in teller.told.items() if offset >= orders.first_offset}
        assert {n: text for n, text in (await read_everything(orders)).items() if n in told} == told

    for at in points(forgetting, FORGETFUL):
        killed(at)


def test_a_topic_deleted_and_made_again_shows_nothing_of_the_old_one_wherever_the_broker_dies() -> None:
    async def replaced(host: TierFixture, orders: Topic, teller: Teller) -> None:
        topics = host.broker.topics
        await topics.delete(ORDERS)
        again = await make_topic(host.broker)
        for _ in range(2):
            await teller.tell(again, label="new")
            await asyncio.sleep(2.0)

    async def old_history(host: TierFixture) -> Topic:
        _, orders = await one_topic(host)
        old = Teller(seed=3)
        for _ in range(3):
            await old.tell(orders, label="old")
            await asyncio.sleep(1.5)
        return orders

    @simulated
    async def calls_of(calls: list[str]) -> None:
        host = TierFixture()
        orders = await old_history(host)
        host.trap.set(0, after=False)
        await replaced(host, orders, Teller())
        calls += host.trap.calls

    @simulated
    async def killed(at: int) -> None:
        host = TierFixture()
        orders = await old_history(host)
        teller = Teller()
        host.trap.set(at, after=False, then=host.kill)
        if not await until_sprung(host, replaced(host, orders, teller)):
            host.kill()
        broker = await host.boot()
        if await broker.topics.exists(ORDERS):
            found = await read_everything(await find_topic(broker))
            labels = {text[:3] for text in found.values()}
            assert labels <= {"old"} or labels <= {"new"}, "two topics in one"
            if teller.told:
                assert teller.told.items() <= found.items()
            else:
                await broker.topics.delete(ORDERS)
        if not await broker.topics.exists(ORDERS):
            await teller.tell(await make_topic(broker), label="new")
        await all_uploaded(await find_topic(broker))
        await asyncio.sleep(20)
        described = await check_stored(host)
        state, _ = await state_of(host)
        assert set(await host.object_store.names()) == {each.object_id for each in described} | (
            {state.history.manifest} if state.history.manifest else set()
        )
        host.kill()
        await host.lose_log()
        found = await read_everything(await find_topic(await host.boot()), name="late")
        assert teller.told.items() <= found.items()
        assert {text[:3] for text in found.values()} == {"new"}

    calls: list[str] = []
    calls_of(calls)
    for at in [number for number, name in enumerate(calls, 1) if name in CHANGES] + [len(calls) + 1]:
        killed(at)


# --- a process that lost the topic --------------------------------------------------------------------------


@simulated
async def overtaken(setup: Scene, policies: TopicPolicy, at: int) -> None:
    """Another broker claims the topic while the first is stopped at a call; then the first goes on."""
    stale = host_for(policies)
    _, orders = await one_topic(stale)
    teller = Teller()
    stale.trap.set(at, after=False)
    await until_sprung(stale, setup(stale, orders, teller))
    _, before = await state_of(stale)
    owner = host_for(policies, shares=stale, seed=2)
    theirs = await find_topic(await owner.boot())
    fresh = Teller(seed=11)
    for _ in range(2):
        await fresh.tell(theirs)
        await asyncio.sleep(2.5)
    await all_uploaded(theirs)
    changes = len(stale.metadata.written)
    stale.trap.gate.set()
    await asyncio.sleep(15)
    for operations in stale.metadata.written[changes:]:
        assert not any(f'"epoch": {orders.ownership.epoch},' in str(each) for each in operations)
    await check_stored(owner)
    _, described = await state_of(owner)
    assert described == list(await carried(theirs).tier.load_manifest()), "what the owner knows is what is stored"
    found = await read_everything(theirs)
    kept = {n for each in before for n in range(each.start_offset, each.end) if n >= theirs.first_offset}
    assert {n: found.get(n) for n in kept} == {n: teller.told.get(n, found.get(n)) for n in kept}
    assert fresh.told.items() <= found.items()


@pytest.mark.parametrize("all_calls", [False, pytest.param(True, marks=pytest.mark.long)], ids=["some", "all"])
@pytest.mark.parametrize(
    ("setup", "policies"), [(everything, UNLIMITED), (forgetting, FORGETFUL)], ids=["tidying", "retention"]
)
def test_an_owner_that_was_overtaken_in_the_middle_of_anything_changes_nothing_and_deletes_nothing_described(
    setup: Scene, policies: TopicPolicy, all_calls: bool
) -> None:
    chosen = points(setup, policies, all_calls=all_calls)
    for at in chosen if all_calls else chosen[::2]:
        overtaken(setup, policies, at)


# --- writes of our own that were given up ---------------------------------------------------------------------


class LateWrites:
    """Takes a topic's changes of descriptors on their way to the metadata store, and lets them arrive when told to."""

    def __init__(self, host: TierFixture) -> None:
        self._transact = host.metadata.transact
        self.flying: list[tuple[Sequence[Compare], Sequence[Put | Delete]]] = []
        self.hold = True
        host.metadata.transact = self.transact  # type: ignore[method-assign]

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> int | None:
        if self.hold and any(each.key == keys.history(ORDERS) for each in operations):
            self.flying.append((compares, operations))
            await asyncio.get_running_loop().create_future()
        return await self._transact(compares, operations)

    async def land(self) -> list[bool]:
        """Whether each took effect."""
        flying, self.flying = self.flying, []
        return [await self._transact(*each) is not None for each in flying]


async def given_up(host: TierFixture, orders: Topic) -> LateWrites:
    """An upload that is cancelled while its descriptor is on its way: a move that is called off does that."""
    late = LateWrites(host)
    uploading = asyncio.ensure_future(carried(orders).uploads.upload(orders.log))
    await asyncio.sleep(1)
    uploading.cancel()
    await asyncio.gather(uploading, return_exceptions=True)
    assert late.flying
    late.hold = False
    return late


@simulated
async def test_a_descriptor_that_was_given_up_and_comes_late_does_not_undo_what_was_done_since() -> None:
    host = TierFixture(replace(SMALL, upload_seconds=1e9, sweep_seconds=1e9))
    _, orders = await one_topic(host)
    teller = Teller()
    found = carried(orders)
    await teller.tell(orders)
    late = await given_up(host, orders)
    for _ in range(2):
        await teller.tell(orders)
        assert await found.uploads.upload(orders.log) is not None
    assert await found.maintenance.merge() is not None
    assert covered(await check_stored(host)) == [(0, 3)]
    assert await late.land() == [False]
    assert covered(await check_stored(host)) == [(0, 3)]
    host.kill()
    await recovered(host, teller.told)


@simulated
async def test_a_descriptor_that_was_given_up_and_arrives_all_the_same_is_believed() -> None:
    host = TierFixture(replace(SMALL, upload_seconds=1e9, sweep_seconds=1e9, garbage_seconds=0.0))
    _, orders = await one_topic(host)
    found = carried(orders)
    await Teller().tell(orders)
    late = await given_up(host, orders)
    assert await late.land() == [True]
    assert (
        await found.maintenance.sweep() == []
    )  # it is described: that its writer does not know is no reason to remove it
    assert await found.uploads.upload(orders.log) is None
    assert [each.object_id for each in await check_stored(host)] == ["data-0-0-1.parquet"]


@simulated
async def test_a_descriptor_that_was_given_up_does_not_come_back_to_an_object_that_was_swept() -> None:
    host = TierFixture(replace(SMALL, upload_seconds=1e9, sweep_seconds=1e9, garbage_seconds=0.0))
    _, orders = await one_topic(host)
    await Teller().tell(orders)
    late = await given_up(host, orders)
    assert await carried(orders).maintenance.sweep() == ["data-0-0-1.parquet"]
    assert await late.land() == [False]
    assert await check_stored(host) == []


@simulated
async def test_a_late_write_that_arrives_between_reading_anew_and_the_next_change_is_found() -> None:
    host = TierFixture(replace(SMALL, upload_seconds=1e9, sweep_seconds=1e9))
    _, orders = await one_topic(host)
    teller = Teller()
    found = carried(orders)
    await teller.tell(orders)
    late = await given_up(host, orders)
    await found.tier.refresh_if_stale()
    assert await late.land() == [True]
    await teller.tell(orders)
    with pytest.raises(Conflict, match="history"):
        await found.uploads.upload(orders.log)
    await found.uploads.upload(orders.log)
    assert covered(await check_stored(host)) == [(0, 2)]
    assert list(await found.tier.load_manifest()) == await check_stored(host)


@simulated
async def test_a_descriptor_in_flight_while_its_topic_is_deleted_does_not_outlive_it() -> None:
    """It arrives behind the back of the deletion, which has listed what there is to delete."""
    host = TierFixture(replace(SMALL, upload_seconds=1e9, sweep_seconds=1e9))
    broker, orders = await one_topic(host)
    await Teller().tell(orders, label="old")
    late = await given_up(host, orders)
    listed = host.metadata.list

    async def listing(prefix: str) -> list[Item]:
        found = await listed(prefix)
        if prefix == keys.below_storage(ORDERS):
            assert await late.land() in ([False], [])
        return found

    host.metadata.list = listing  # type: ignore[method-assign]
    await broker.topics.delete(ORDERS)
    again = await make_topic(broker)
    assert again.head == 0
    _, described = await state_of(host)
    assert described == []
