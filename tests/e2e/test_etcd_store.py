"""The metadata store on a real etcd: what only etcd can do to it. The port's contract is tested in contracts/."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from pydanube.cluster import upkeep
from pydanube.cluster.leadership import Leadership
from pydanube.cluster.lease import BrokerLease
from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import ConfigError, LeaseLost, MessageTooLarge, Unreachable
from pydanube.ports import Compare, Delete, Event, Item, Put, Revision
from pydanube.stores.metadata.etcd import EtcdMetadataStore, Tls
from pydanube.stores.metadata.etcd.endpoint import LEASE_TIME_TO_LIVE
from pydanube.stores.metadata.etcd.store import REQUEST_BYTES_MAX
from pydanube.stores.work.system import SystemClock
from pydanube.telemetry import ClusterMetrics
from pydanube.wire._pb.pydanube import etcd_pb2 as pb
from tests.e2e.etcd import EtcdServer, certificates, clear, compact, etcd_in, with_calls
from tests.support import run

pytestmark = pytest.mark.slow

WATCHERS = "etcd_debugging_mvcc_watcher_total"


def on(
    server: EtcdServer, story: Callable[[EtcdMetadataStore], Awaitable[None]], *, root: str = "", tls: Tls | None = None
) -> None:
    """Runs a story on a store that keeps nothing afterwards."""

    async def told() -> None:
        store = EtcdMetadataStore([server.client], root=root, tls=tls, timeout_seconds=20.0)
        try:
            await story(store)
        finally:
            await store.close()
            if tls is None:
                await clear([server.client])

    run(told())


async def put(store: EtcdMetadataStore, key: str, value: bytes = b"", lease: int = 0) -> Revision:
    revision = await store.transact([], [Put(key, value, lease)])
    assert revision is not None
    return revision


async def until(condition: Callable[[], bool]) -> None:
    """Asked often, as the condition is in another process."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


# --- watches ----------------------------------------------------------------------------------------


def test_a_watch_of_compacted_history_ends_and_stays_ended(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        first = await put(store, "/a", b"1")
        last = await put(store, "/a", b"2")
        await compact([etcd_server.client], last)
        watch = store.watch("/", first - 1)
        for _ in range(2):
            with pytest.raises(Unreachable, match="no longer kept"):
                await anext(watch)
        assert await store.list("/") == [Item("/a", b"2", last)]
        event = await anext(store.watch("/", last - 1))
        assert list(event) == [Event("/a", b"2", last)]

    on(etcd_server, story)


def test_what_the_store_compacts_is_gone_and_to_do_it_again_is_no_error(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        first = await put(store, "/a", b"1")
        last = await put(store, "/a", b"2")
        for revision in (last, last, first):
            await store.compact(revision)
        with pytest.raises(Unreachable, match="no longer kept"):
            await anext(store.watch("/", first - 1))
        assert await store.list("/") == [Item("/a", b"2", last)]
        usage = await store.usage()
        assert usage.revision >= last and usage.size_bytes > 0

    on(etcd_server, story)


def test_a_view_behind_a_compaction_lists_again(etcd_server: EtcdServer) -> None:
    """Its watch was cancelled with its stream, and the place where it would go on is not kept any more."""

    async def story(store: EtcdMetadataStore) -> None:
        view = View(store, SystemClock(), ttl_seconds=30.0, relist_seconds=3600.0)
        after = await view.refresh()
        watch = store.watch(keys.CLUSTER, after)
        last = after
        for number in range(20):
            last = await put(store, keys.unassigned(TopicName(f"/default/t{number % 4}")), b"null")
        await store.compact(last)
        with pytest.raises(Unreachable, match="no longer kept"):
            await anext(watch)
        with pytest.raises(Unreachable, match="no longer kept"):
            await view._follow(after)
        real, begun = view._follow, []

        async def follow(since: Revision) -> None:
            begun.append(since)
            await real(after if len(begun) == 1 else since)  # first from where nothing is kept

        view._follow = follow  # type: ignore[method-assign, assignment]
        running = asyncio.create_task(view.run())
        try:
            await until(lambda: len(begun) > 1)
            await put(store, keys.unassigned(TopicName("/default/new")), b"null")
            await until(lambda: len(view.markers) == 5)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    on(etcd_server, story)


def test_the_leader_keeps_an_etcd_that_compacts_nothing_by_itself_from_growing(
    etcd_server: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "USAGE_CHECK_SECONDS", 0.1)
    monkeypatch.setattr(upkeep, "KEEP_SECONDS", 0.5)

    async def story(store: EtcdMetadataStore) -> None:
        leading = cast(Leadership, SimpleNamespace(leads=True))
        metrics = ClusterMetrics()
        first = await put(store, "/a")
        running = asyncio.create_task(upkeep.Upkeep(store, SystemClock(), leading, metrics, compacts=True).run())
        try:
            async with asyncio.timeout(30):
                while True:
                    await put(store, "/a", b"x" * 1000)
                    try:
                        await anext(store.watch("/a", first))
                    except Unreachable as error:
                        assert "no longer kept" in str(error)
                        break
            assert 0 < metrics.metadata_size_bytes < metrics.metadata_quota_bytes
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    on(etcd_server, story)


def test_the_quota_of_an_etcd_is_known(tmp_path: Path) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        usage = await store.usage()
        assert (usage.quota_bytes, 0 < usage.size_bytes < usage.quota_bytes) == (64 * 1024**2, True)

    with etcd_in(tmp_path, ["--quota-backend-bytes", str(64 * 1024**2)]) as server:
        on(server, story)


def test_a_quota_that_nobody_tells_is_etcds_default(tmp_path: Path) -> None:
    """Its metrics are behind TLS, too."""

    async def story(store: EtcdMetadataStore) -> None:
        assert (await store.usage()).quota_bytes == 2 * 1024**3

    of_server, of_client = certificates(tmp_path)
    flags = [
        *("--cert-file", str(of_server.cert), "--key-file", str(of_server.key)),
        *("--trusted-ca-file", str(of_server.ca), "--client-cert-auth"),
    ]
    with etcd_in(tmp_path, flags, of_client) as server:
        on(server, story, tls=of_client)


def test_a_wait_for_changes_that_was_cancelled_loses_none(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        start = await put(store, "/start")
        watch = store.watch("/", start)
        seen: list[Revision] = []
        made: list[Revision] = []

        async def make() -> None:
            for i in range(200):
                made.append(await put(store, f"/{i % 3}"))

        async with asyncio.TaskGroup() as group:
            group.create_task(make())
            patience = 0.001
            while len(seen) < 200:
                try:
                    async with asyncio.timeout(patience):
                        seen += [event.revision for event in await anext(watch)]
                except TimeoutError:
                    patience *= 1.2  # so that in the end it is enough
        assert seen == made

    on(etcd_server, story)


def test_watches_that_were_dropped_leave_nothing_behind_in_etcd(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        await until(lambda: etcd_server.metric(WATCHERS) == 0)  # those of the tests before may be there a moment longer
        start = await put(store, "/a")
        watches: list[AsyncIterator[Sequence[Event]]] = [store.watch("/", start - 1) for _ in range(5)]
        for watch in watches:
            await anext(watch)
        assert etcd_server.metric(WATCHERS) == 5
        del watch
        watches.clear()
        gc.collect()
        await until(lambda: etcd_server.metric(WATCHERS) == 0)

    on(etcd_server, story)


def test_closing_ends_watches_and_calls_with_a_reason(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        start = await put(store, "/a")
        watch = store.watch("/", start)
        waiting = asyncio.ensure_future(anext(watch))
        await until(lambda: etcd_server.metric(WATCHERS) > 0)
        await store.close()
        with pytest.raises(Unreachable, match="closed"):
            await waiting
        with pytest.raises(Unreachable, match="closed"):
            await store.get("/a")
        with pytest.raises(Unreachable, match="closed"):
            await anext(store.watch("/", start))

    on(etcd_server, story)


# --- lists and limits -------------------------------------------------------------------------------


def test_a_long_list_is_of_one_revision_even_while_history_is_compacted(etcd_server: EtcdServer) -> None:
    """Every transaction writes one number to ten keys that lie far apart, so every list shows one number only."""
    keys = [f"/{i:05}" for i in range(5000)]
    marked = keys[::500]

    async def story(store: EtcdMetadataStore) -> None:
        for start in range(0, len(keys), 100):
            await store.transact([], [Put(key, b"0") for key in keys[start : start + 100]])

        async def change() -> None:
            for i in range(40):
                revision = await store.transact([], [Put(key, b"%d" % i) for key in marked])
                assert revision is not None
                if i % 4 == 0:
                    await compact([etcd_server.client], revision)

        complete = 0
        async with asyncio.TaskGroup() as group:
            changing = group.create_task(change())
            while not changing.done() or not complete:
                try:
                    found = {item.key: item for item in await store.list("/")}
                except Unreachable as error:
                    assert "compacted" in error.why
                    continue
                complete += 1
                assert list(found) == keys
                assert len({found[key].value for key in marked}) == 1

    on(etcd_server, story)


def test_a_list_of_large_values_is_complete(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        for i in range(12):
            await put(store, f"/{i:02}", b"%02d" % i * 500_000)
        assert [(item.key, len(item.value)) for item in await store.list("/")] == [
            (f"/{i:02}", 1_000_000) for i in range(12)
        ]

    on(etcd_server, story)


def test_what_is_larger_than_etcd_takes_is_refused_and_changes_nothing(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        overhead = 64
        fits = await put(store, "/fits", b"x" * (REQUEST_BYTES_MAX - overhead))
        with pytest.raises(MessageTooLarge) as caught:
            await put(store, "/large", b"x" * REQUEST_BYTES_MAX)
        assert caught.value.limit_bytes == REQUEST_BYTES_MAX
        assert [item.key for item in await store.list("/")] == ["/fits"]
        assert await store.transact([], []) == fits

    on(etcd_server, story)


def test_a_full_database_is_told_with_what_to_do(tmp_path: Path) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        with pytest.raises(Unreachable, match="its database is full: compact and defragment"):
            for i in range(100):
                await put(store, f"/{i}", b"x" * 100_000)
        assert await store.get("/0") is not None

    with etcd_in(tmp_path, ["--quota-backend-bytes", "1000000"]) as server:
        on(server, story)


# --- roots ------------------------------------------------------------------------------------------


def test_stores_with_different_roots_do_not_see_each_other(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        other = EtcdMetadataStore([etcd_server.client], root="/one-and-more")
        try:
            start = await store.transact([], [])
            assert start is not None
            mine = await put(store, "/a", b"mine")
            theirs = await put(other, "/a", b"theirs")
            await put(other, "/b", b"theirs")
            last = await put(store, "/c", b"mine")
            assert await store.list("") == [Item("/a", b"mine", mine), Item("/c", b"mine", last)]
            assert await other.get("/a") == Item("/a", b"theirs", theirs)
            assert await other.transact([Compare("/c", 0)], [Delete("/a")]) is not None
            assert await store.get("/a") == Item("/a", b"mine", mine)
            watch = store.watch("", start)
            events = list(await anext(watch))
            while len(events) < 2:
                events += await anext(watch)
            assert events == [Event("/a", b"mine", mine), Event("/c", b"mine", last)]
        finally:
            await other.close()

    on(etcd_server, story, root="/one")


# --- leases -----------------------------------------------------------------------------------------


def test_of_several_leases_in_a_transaction_the_lost_one_is_named(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        leases = [await store.grant(60) for _ in range(3)]
        for lost in leases:
            await store.revoke(lost)
            others = [lease for lease in leases if lease != lost]
            with pytest.raises(LeaseLost) as caught:
                await store.transact([], [Put(f"/{lease}", b"", lease) for lease in (others[0], lost, others[1])])
            assert caught.value.lease == lost
            leases[leases.index(lost)] = await store.grant(60)
        assert await store.list("/") == []

    on(etcd_server, story)


def test_neither_a_loop_that_stands_still_nor_one_that_is_always_busy_costs_a_lease(etcd_server: EtcdServer) -> None:
    """Still for six tenths of the time to live; then turns that take a twentieth of it each, for longer than it."""
    ttl = 4.0

    async def story(store: EtcdMetadataStore) -> None:
        lease = BrokerLease(BrokerId(1), store, SystemClock(), ttl)
        await lease.grant()
        keeping = asyncio.create_task(lease.keep())
        await asyncio.sleep(0.1)
        time.sleep(0.6 * ttl)  # noqa: ASYNC251
        await asyncio.sleep(0.1)
        fenced = 0
        for _ in range(25):
            time.sleep(ttl / 20)  # noqa: ASYNC251
            await asyncio.sleep(0)
            fenced += not lease.may_serve()
        assert not keeping.done() and fenced == 0, "it could serve all the time, once it was awake"
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await store.revoke(lease.id)

    on(etcd_server, story)


def test_a_fraction_of_a_second_is_rounded_up(etcd_server: EtcdServer) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        request = pb.LeaseTimeToLiveRequest(id=await store.grant(2.2))
        answer = await with_calls([etcd_server.client], lambda calls: calls.repeatable(LEASE_TIME_TO_LIVE, request))
        assert answer.granted_ttl == 3

    on(etcd_server, story)


# --- who is asked -----------------------------------------------------------------------------------


@pytest.mark.parametrize("endpoints", [[], [""], ["localhost"], ["localhost:"], ["localhost:x"], ["a:1", "b:70000"]])
def test_endpoints_that_are_none_are_refused(endpoints: list[str]) -> None:
    with pytest.raises(ConfigError):
        EtcdMetadataStore(endpoints)


def test_an_etcd_that_is_not_there_is_unreachable_in_time() -> None:
    async def story() -> None:
        store = EtcdMetadataStore(["127.0.0.1:1", "[::1]:1"], timeout_seconds=0.5, attempt_seconds=0.5)
        began = asyncio.get_running_loop().time()
        with pytest.raises(Unreachable, match=r"127\.0\.0\.1:1"):
            await store.get("/a")
        with pytest.raises(Unreachable):
            await store.transact([], [Put("/a", b"")])
        with pytest.raises(Unreachable):
            await anext(store.watch("/", 0))
        assert asyncio.get_running_loop().time() - began < 10
        await store.close()

    run(story())


def test_nothing_is_written_to_a_second_etcd_that_is_not_of_the_same_cluster(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    async def story() -> None:
        store = EtcdMetadataStore([server.client], timeout_seconds=3.0)
        try:
            await put(store, "/a", b"first")  # that one is its cluster now, however slowly it answered
            await store.use_endpoints([server.client, etcd_server.client])
            server.kill()
            with pytest.raises(Unreachable):
                await store.transact([], [Put("/b", b"lost")])
            with pytest.raises(Unreachable, match=r"another etcd cluster|Connection refused|no connection"):
                await store.transact([], [Put("/b", b"lost")])
            with pytest.raises(Unreachable):
                await store.get("/a")
        finally:
            await store.close()
        other = EtcdMetadataStore([etcd_server.client])
        assert await other.list("/") == []
        await other.close()

    with etcd_in(tmp_path) as server:
        run(story())


# --- TLS --------------------------------------------------------------------------------------------


def test_tls_both_ways(tmp_path: Path) -> None:
    server, client = certificates(tmp_path)
    assert server.ca and server.cert and server.key and client.ca and client.cert
    flags = [
        *("--cert-file", str(server.cert), "--key-file", str(server.key)),
        *("--trusted-ca-file", str(server.ca), "--client-cert-auth"),
    ]

    async def works(store: EtcdMetadataStore) -> None:
        revision = await put(store, "/a", b"secret")
        assert await store.get("/a") == Item("/a", b"secret", revision)

    async def fails(store: EtcdMetadataStore) -> None:
        with pytest.raises(Unreachable):
            await store.get("/a")

    with etcd_in(tmp_path / "etcd", flags, tls=client) as etcd:
        on(etcd, works, tls=client)

        async def story() -> None:
            for tls in (None, Tls(), Tls(ca=client.ca)):  # no TLS, unknown authority, no certificate of our own
                store = EtcdMetadataStore([etcd.client], tls=tls, timeout_seconds=1.0)
                await fails(store)
                await store.close()

        run(story())


def test_a_certificate_that_cannot_be_read_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        EtcdMetadataStore(["127.0.0.1:1"], tls=Tls(ca=tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match="together"):
        EtcdMetadataStore(["127.0.0.1:1"], tls=Tls(cert=tmp_path / "missing.pem"))
