"""What every MetadataStore does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from pydanube.errors import LeaseLost
from pydanube.ports import Compare, Delete, Event, Item, MetadataStore, Put, Revision
from tests.contracts.adapters import MetadataCase


async def put(metadata: MetadataStore, key: str, value: bytes = b"", lease: int = 0) -> Revision:
    revision = await metadata.transact([], [Put(key, value, lease)])
    assert revision is not None
    return revision


async def now(metadata: MetadataStore) -> Revision:
    """The store's revision, as the port says to ask for it."""
    revision = await metadata.transact([], [])
    assert revision is not None
    return revision


async def take(watch: AsyncIterator[Sequence[Event]], count: int) -> list[Event]:
    """The next `count` events, however the store cuts them into sequences."""
    events: list[Event] = []
    while len(events) < count:
        events += await anext(watch)
    assert len(events) == count
    return events


# --- get and list -----------------------------------------------------------------------------------


async def test_a_key_that_was_never_put_is_none(metadata: MetadataStore) -> None:
    assert await metadata.get("/a") is None


async def test_get_returns_value_and_the_revision_of_the_last_change(metadata: MetadataStore) -> None:
    await put(metadata, "/a", b"1")
    second = await put(metadata, "/a", b"2")
    await put(metadata, "/b", b"3")
    assert await metadata.get("/a") == Item("/a", b"2", second)


@pytest.mark.parametrize("value", [b"", b"\0\xff\n", b"x" * 100_000])
async def test_a_value_is_any_bytes(metadata: MetadataStore, value: bytes) -> None:
    await put(metadata, "/a", value)
    item = await metadata.get("/a")
    assert item is not None and item.value == value


async def test_a_deleted_key_is_none(metadata: MetadataStore) -> None:
    await put(metadata, "/a")
    await metadata.transact([], [Delete("/a")])
    assert await metadata.get("/a") is None
    assert await metadata.list("/") == []


async def test_list_returns_items_by_key_and_takes_the_prefix_as_text(metadata: MetadataStore) -> None:
    revisions = {key: await put(metadata, key, key.encode()) for key in ("/b", "/a/10", "/a/2", "/ab", "/a")}
    expected = [Item(key, key.encode(), revisions[key]) for key in ("/a", "/a/10", "/a/2", "/ab")]
    assert await metadata.list("/a") == expected
    assert [item.key for item in await metadata.list("/a/")] == ["/a/10", "/a/2"]
    assert [item.key for item in await metadata.list("")] == ["/a", "/a/10", "/a/2", "/ab", "/b"]
    assert await metadata.list("/c") == []


async def test_keys_with_signs_that_patterns_and_queries_use_are_plain_text(metadata: MetadataStore) -> None:
    for key in ("/a%b", "/a_b", "/a*b", "/axb", "/A_b", "/é"):
        await put(metadata, key)
    assert [item.key for item in await metadata.list("/a_")] == ["/a_b"]
    assert [item.key for item in await metadata.list("/a%")] == ["/a%b"]
    assert [item.key for item in await metadata.list("/a*")] == ["/a*b"]
    assert [item.key for item in await metadata.list("/é")] == ["/é"]


async def test_a_long_list_is_complete(metadata: MetadataStore) -> None:
    keys = [f"/many/{i:05}" for i in range(1500)]
    for start in range(0, len(keys), 100):
        await metadata.transact([], [Put(key, b"x") for key in keys[start : start + 100]])
    assert [item.key for item in await metadata.list("/many/")] == keys


async def test_a_list_is_all_of_one_revision(metadata: MetadataStore) -> None:
    """Two keys always change together, so a list never shows one without the other."""

    async def change() -> None:
        for i in range(50):
            await metadata.transact([], [Put("/a", b"%d" % i), Put("/b", b"%d" % i)])

    async with asyncio.TaskGroup() as group:
        task = group.create_task(change())
        while not task.done():
            assert len({(item.value, item.revision) for item in await metadata.list("/")}) <= 1
            await asyncio.sleep(0)


# --- revisions --------------------------------------------------------------------------------------


async def test_every_change_gets_the_next_revision(metadata: MetadataStore) -> None:
    first = await put(metadata, "/a")
    assert first > 0
    assert await put(metadata, "/b") == first + 1
    assert await put(metadata, "/a") == first + 2  # the same value again is a change
    assert await metadata.transact([], [Delete("/a")]) == first + 3


async def test_all_keys_of_one_transaction_have_its_revision(metadata: MetadataStore) -> None:
    revision = await metadata.transact([], [Put("/a", b"1"), Put("/b", b"2")])
    assert {item.revision for item in await metadata.list("/")} == {revision}
    assert await now(metadata) == revision


async def test_a_transaction_that_changes_nothing_returns_the_revision_there_is(
    metadata: MetadataStore,
) -> None:
    revision = await put(metadata, "/a")
    assert await metadata.transact([], []) == revision
    assert await metadata.transact([Compare("/a", revision)], []) == revision
    assert await metadata.transact([], [Delete("/missing")]) == revision
    assert await put(metadata, "/b") == revision + 1


async def test_a_failed_transaction_uses_no_revision(metadata: MetadataStore) -> None:
    revision = await put(metadata, "/a")
    assert await metadata.transact([Compare("/a", 0)], [Put("/a", b"")]) is None
    assert await now(metadata) == revision


# --- compares ---------------------------------------------------------------------------------------


async def test_a_compare_holds_for_exactly_the_last_revision(metadata: MetadataStore) -> None:
    first = await put(metadata, "/a", b"1")
    second = await put(metadata, "/a", b"2")
    assert await metadata.transact([Compare("/a", first)], [Put("/a", b"lost")]) is None
    assert await metadata.transact([Compare("/a", second + 1)], [Put("/a", b"lost")]) is None
    assert await metadata.get("/a") == Item("/a", b"2", second)
    assert await metadata.transact([Compare("/a", second)], [Put("/a", b"3")]) == second + 1


async def test_revision_zero_means_that_the_key_does_not_exist(metadata: MetadataStore) -> None:
    assert await metadata.transact([Compare("/a", 0)], [Put("/a", b"1")]) is not None
    assert await metadata.transact([Compare("/a", 0)], [Put("/a", b"2")]) is None
    await metadata.transact([], [Delete("/a")])
    assert await metadata.transact([Compare("/a", 0)], [Put("/a", b"3")]) is not None


async def test_a_key_that_was_deleted_and_made_again_is_another(metadata: MetadataStore) -> None:
    first = await put(metadata, "/a")
    await metadata.transact([], [Delete("/a")])
    assert await metadata.transact([Compare("/a", first)], [Put("/b", b"")]) is None
    await put(metadata, "/a")
    assert await metadata.transact([Compare("/a", first)], [Put("/b", b"")]) is None
    assert await metadata.get("/b") is None


async def test_one_failed_compare_stops_every_operation(metadata: MetadataStore) -> None:
    a = await put(metadata, "/a", b"1")
    await put(metadata, "/b", b"1")
    compares = [Compare("/a", a), Compare("/b", a)]
    assert await metadata.transact(compares, [Put("/a", b"2"), Put("/c", b"2"), Delete("/b")]) is None
    assert [(item.key, item.value) for item in await metadata.list("/")] == [("/a", b"1"), ("/b", b"1")]


async def test_compares_may_be_about_other_keys_than_the_operations(metadata: MetadataStore) -> None:
    owner = await put(metadata, "/owner")
    for i in range(3):
        assert await metadata.transact([Compare("/owner", owner)], [Put("/cursor", b"%d" % i)]) is not None
    await put(metadata, "/owner")
    assert await metadata.transact([Compare("/owner", owner)], [Put("/cursor", b"stale")]) is None


async def test_of_many_who_compare_one_revision_exactly_one_succeeds(metadata: MetadataStore) -> None:
    revision = await put(metadata, "/a")
    attempts = [metadata.transact([Compare("/a", revision)], [Put("/a", b"%d" % i)]) for i in range(20)]
    results = await asyncio.gather(*attempts)
    winners = [i for i, result in enumerate(results) if result is not None]
    assert len(winners) == 1
    assert await metadata.get("/a") == Item("/a", b"%d" % winners[0], revision + 1)


async def test_a_transaction_takes_128_compares_and_128_operations(metadata: MetadataStore) -> None:
    compares = [Compare(f"/{i}", 0) for i in range(128)]
    assert await metadata.transact(compares, [Put(f"/{i}", b"") for i in range(128)]) is not None
    assert len(await metadata.list("/")) == 128


async def test_a_transaction_that_is_too_large_is_a_bug(metadata: MetadataStore) -> None:
    with pytest.raises(AssertionError):
        await metadata.transact([], [Put(f"/{i}", b"") for i in range(129)])
    with pytest.raises(AssertionError):
        await metadata.transact([Compare(f"/{i}", 0) for i in range(129)], [])
    assert await metadata.list("/") == []


async def test_two_operations_on_one_key_are_a_bug(metadata: MetadataStore) -> None:
    with pytest.raises(AssertionError):
        await metadata.transact([], [Put("/a", b"1"), Put("/a", b"2")])
    with pytest.raises(AssertionError):
        await metadata.transact([], [Put("/a", b"1"), Delete("/a")])
    assert await metadata.get("/a") is None


# --- leases -----------------------------------------------------------------------------------------


async def test_a_key_lives_as_long_as_its_lease_is_renewed(metadata_case: MetadataCase) -> None:
    metadata, ttl = metadata_case.store, metadata_case.ttl_seconds
    lease = await metadata.grant(ttl)
    await put(metadata, "/broker", b"here", lease)
    for _ in range(4):
        await metadata_case.pass_time(ttl * 0.4)
        await metadata.renew(lease)
    item = await metadata.get("/broker")
    assert item is not None and item.value == b"here"


async def test_keys_of_a_lease_that_ran_out_vanish_as_one_change(metadata_case: MetadataCase) -> None:
    metadata, ttl = metadata_case.store, metadata_case.ttl_seconds
    lease = await metadata.grant(ttl)
    await put(metadata, "/a", b"1", lease)
    await put(metadata, "/b", b"2", lease)
    before = await put(metadata, "/c", b"3")
    await metadata_case.pass_time(ttl * 1.5)
    assert [item.key for item in await metadata.list("/")] == ["/c"]
    assert await now(metadata) == before + 1


async def test_keys_of_a_revoked_lease_vanish_at_once_as_one_change(metadata_case: MetadataCase) -> None:
    metadata = metadata_case.store
    lease = await metadata.grant(metadata_case.ttl_seconds)
    other = await metadata.grant(metadata_case.ttl_seconds)
    assert lease != other
    await put(metadata, "/a", b"1", lease)
    await put(metadata, "/b", b"2", lease)
    before = await put(metadata, "/c", b"3", other)
    await metadata.revoke(lease)
    assert [item.key for item in await metadata.list("/")] == ["/c"]
    assert await now(metadata) == before + 1


async def test_a_lease_without_keys_ends_without_a_change(metadata_case: MetadataCase) -> None:
    metadata = metadata_case.store
    before = await put(metadata, "/a")
    await metadata.revoke(await metadata.grant(metadata_case.ttl_seconds))
    await metadata.grant(metadata_case.ttl_seconds)
    await metadata_case.pass_time(metadata_case.ttl_seconds * 1.5)
    assert await now(metadata) == before


async def test_a_lease_that_ran_out_is_lost(metadata_case: MetadataCase) -> None:
    metadata, ttl = metadata_case.store, metadata_case.ttl_seconds
    lease = await metadata.grant(ttl)
    await metadata_case.pass_time(ttl * 1.5)
    with pytest.raises(LeaseLost) as caught:
        await metadata.renew(lease)
    assert caught.value.lease == lease


async def test_a_put_under_a_lost_lease_changes_nothing_at_all(metadata_case: MetadataCase) -> None:
    metadata = metadata_case.store
    lease = await metadata.grant(metadata_case.ttl_seconds)
    before = await put(metadata, "/kept")
    await metadata.revoke(lease)
    operations: list[Put | Delete] = [Put("/a", b"1"), Delete("/kept"), Put("/b", b"2", lease)]
    with pytest.raises(LeaseLost) as caught:
        await metadata.transact([], operations)
    assert caught.value.lease == lease
    assert [item.key for item in await metadata.list("/")] == ["/kept"]
    assert await now(metadata) == before


async def test_a_revoked_lease_is_lost_and_revoking_it_again_is_no_error(metadata_case: MetadataCase) -> None:
    metadata = metadata_case.store
    lease = await metadata.grant(metadata_case.ttl_seconds)
    await metadata.revoke(lease)
    with pytest.raises(LeaseLost):
        await metadata.renew(lease)
    await metadata.revoke(lease)


async def test_a_key_belongs_to_the_lease_of_its_last_put(metadata_case: MetadataCase) -> None:
    metadata = metadata_case.store
    first = await metadata.grant(metadata_case.ttl_seconds)
    second = await metadata.grant(metadata_case.ttl_seconds)
    for key in ("/freed", "/moved", "/made again"):
        await put(metadata, key, b"", first)
    await put(metadata, "/freed", b"")
    await put(metadata, "/moved", b"", second)
    await metadata.transact([], [Delete("/made again")])
    await put(metadata, "/made again", b"")
    await metadata.revoke(first)
    assert [item.key for item in await metadata.list("/")] == ["/freed", "/made again", "/moved"]
    await metadata.revoke(second)
    assert [item.key for item in await metadata.list("/")] == ["/freed", "/made again"]


async def test_a_compare_sees_that_a_lease_ran_out(metadata_case: MetadataCase) -> None:
    metadata, ttl = metadata_case.store, metadata_case.ttl_seconds
    leader = await put(metadata, "/leader", b"me", await metadata.grant(ttl))
    assert await metadata.transact([Compare("/leader", leader)], [Put("/a", b"")]) is not None
    await metadata_case.pass_time(ttl * 1.5)
    assert await metadata.transact([Compare("/leader", leader)], [Put("/b", b"")]) is None
    assert await metadata.transact([Compare("/leader", 0)], [Put("/leader", b"other")]) is not None


# --- watches ----------------------------------------------------------------------------------------


async def test_a_watch_first_returns_what_happened_before_it_began(metadata: MetadataStore) -> None:
    first = await put(metadata, "/a", b"1")
    second = await put(metadata, "/a", b"2")
    third = await metadata.transact([], [Delete("/a")])
    assert third is not None
    assert await take(metadata.watch("/", first), 2) == [Event("/a", b"2", second), Event("/a", None, third)]
    assert (await take(metadata.watch("/", first - 1), 3))[0] == Event("/a", b"1", first)


async def test_a_watch_then_returns_what_happens(metadata: MetadataStore) -> None:
    watch = metadata.watch("/", await now(metadata))
    waiting = asyncio.ensure_future(take(watch, 1))
    await asyncio.sleep(0)
    assert not waiting.done()
    first = await put(metadata, "/a", b"1")
    assert await waiting == [Event("/a", b"1", first)]
    second = await put(metadata, "/b", b"2")
    assert await take(watch, 1) == [Event("/b", b"2", second)]


async def test_a_watch_returns_only_its_prefix(metadata: MetadataStore) -> None:
    watch = metadata.watch("/a", await now(metadata))
    for key in ("/b", "/a", "/", "/ab", "/a/c"):
        await put(metadata, key)
    await metadata.transact([], [Delete("/b"), Delete("/ab")])
    assert [event.key for event in await take(watch, 4)] == ["/a", "/ab", "/a/c", "/ab"]


async def test_a_watch_misses_and_repeats_nothing_and_keeps_the_order(metadata: MetadataStore) -> None:
    watch = metadata.watch("/", await now(metadata))
    reading = asyncio.ensure_future(take(watch, 200))
    revisions = []
    for i in range(200):
        revisions.append(await put(metadata, f"/{i % 7}", b"%d" % i))
        if i % 3 == 0:
            await asyncio.sleep(0)
    events = await reading
    assert [event.revision for event in events] == revisions
    assert [event.value for event in events] == [b"%d" % i for i in range(200)]


async def test_the_events_of_one_transaction_come_together(metadata: MetadataStore) -> None:
    await put(metadata, "/gone")
    watch = metadata.watch("/", await now(metadata))
    revision = await metadata.transact([], [Put("/a", b"1"), Delete("/gone"), Delete("/never"), Put("/b", b"2")])
    assert revision is not None
    events = sorted(await anext(watch), key=lambda event: event.key)
    assert events == [
        Event("/a", b"1", revision),
        Event("/b", b"2", revision),
        Event("/gone", None, revision),
    ]


async def test_a_watch_after_a_revision_still_to_come_waits_for_it(metadata: MetadataStore) -> None:
    revision = await put(metadata, "/a")
    watch = metadata.watch("/", revision + 1)
    await put(metadata, "/skipped")
    third = await put(metadata, "/seen")
    assert await take(watch, 1) == [Event("/seen", b"", third)]


async def test_a_waiting_watch_sees_a_lease_run_out(metadata_case: MetadataCase) -> None:
    metadata, ttl = metadata_case.store, metadata_case.ttl_seconds
    watch = metadata.watch("/brokers/", await now(metadata))
    waiting = asyncio.ensure_future(take(watch, 4))
    await asyncio.sleep(0)
    lease = await metadata.grant(ttl)
    await put(metadata, "/brokers/1", b"", lease)
    revision = await put(metadata, "/brokers/2", b"", lease)
    for _ in range(3):
        await metadata_case.pass_time(ttl * 0.4)
        await metadata.renew(lease)
    assert not waiting.done()
    await metadata_case.pass_time(ttl)
    gone = sorted((await waiting)[2:], key=lambda event: event.key)
    assert gone == [Event("/brokers/1", None, revision + 1), Event("/brokers/2", None, revision + 1)]


async def test_a_watch_sees_a_lease_revoked(metadata_case: MetadataCase) -> None:
    metadata = metadata_case.store
    lease = await metadata.grant(metadata_case.ttl_seconds)
    revision = await put(metadata, "/a", b"", lease)
    watch = metadata.watch("/", revision)
    await metadata.revoke(lease)
    assert await take(watch, 1) == [Event("/a", None, revision + 1)]


async def test_watches_do_not_disturb_each_other(metadata: MetadataStore) -> None:
    after = await now(metadata)
    watches = [metadata.watch("/", after) for _ in range(5)]
    waiting = [asyncio.ensure_future(take(watch, 1)) for watch in watches]
    await asyncio.sleep(0)
    waiting[0].cancel()
    revision = await put(metadata, "/a")
    assert await asyncio.gather(*waiting[1:]) == [[Event("/a", b"", revision)]] * 4
    assert (await asyncio.wait([waiting[0]]))[0] == {waiting[0]} and waiting[0].cancelled()


async def test_revision_then_list_then_watch_misses_nothing(metadata: MetadataStore) -> None:
    await put(metadata, "/a", b"old")
    revision = await now(metadata)
    between = await put(metadata, "/a", b"new")  # by somebody else, between the two calls
    assert [item.value for item in await metadata.list("/")] == [b"new"]
    watch = metadata.watch("/", revision)
    after = await put(metadata, "/b", b"")
    assert await take(watch, 2) == [Event("/a", b"new", between), Event("/b", b"", after)]


# --- space --------------------------------------------------------------------------------------------


async def test_compacting_changes_nothing_that_is_stored_and_watches_of_later_changes_go_on(
    metadata: MetadataStore,
) -> None:
    first = await put(metadata, "/a", b"1")
    second = await put(metadata, "/a", b"2")
    kept = await put(metadata, "/b", b"3")
    for revision in (second, first, second):
        await metadata.compact(revision)
    assert await metadata.list("/") == [Item("/a", b"2", second), Item("/b", b"3", kept)]
    assert await take(metadata.watch("/", second), 1) == [Event("/b", b"3", kept)]
    later = await put(metadata, "/a", b"4")
    assert await take(metadata.watch("/", kept), 1) == [Event("/a", b"4", later)]
    assert await metadata.transact([Compare("/a", later)], [Delete("/a")]) is not None


async def test_usage_tells_the_revision_and_how_large_the_store_is_if_there_is_a_bound(
    metadata: MetadataStore,
) -> None:
    revision = await put(metadata, "/a")
    usage = await metadata.usage()
    assert usage.revision >= revision
    assert usage.quota_bytes == 0 or 0 < usage.size_bytes < usage.quota_bytes
