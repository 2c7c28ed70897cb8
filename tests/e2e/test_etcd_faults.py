"""The metadata store while members of a real etcd are killed, stopped and started again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from pydanube.errors import LeaseLost, Unreachable
from pydanube.ports import Compare, Event, Put, Revision
from pydanube.stores.metadata.etcd import EtcdMetadataStore
from tests.e2e.etcd import EtcdServer, EtcdServers
from tests.support import run

pytestmark = pytest.mark.slow

TIMEOUT_SECONDS = 3.0
SLACK_SECONDS = 5.0  # of a busy machine, not of the store
RECOVERY_SECONDS = 30.0


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path, 3) as servers:
        yield servers


def on(servers: EtcdServers, story: Callable[[EtcdMetadataStore], Awaitable[None]], first: str | None = None) -> None:
    """Runs a story on a store that asks the member `first` first."""

    async def told() -> None:
        chosen = {"leader": [await servers.leader()], "follower": await servers.followers(), None: servers.members}
        endpoints = [member.client for member in chosen[first]]
        endpoints += [each for each in servers.endpoints if each not in endpoints]
        store = EtcdMetadataStore(endpoints, timeout_seconds=TIMEOUT_SECONDS, attempt_seconds=0.5)
        try:
            await story(store)
        finally:
            await store.close()

    run(told())


async def put(store: EtcdMetadataStore, key: str, value: bytes = b"", lease: int = 0) -> Revision:
    revision = await store.transact([], [Put(key, value, lease)])
    assert revision is not None
    return revision


async def within(seconds: float, what: Awaitable[object]) -> None:
    async with asyncio.timeout(seconds):
        await what


async def waiting_for_changes(store: EtcdMetadataStore, revision: Revision) -> asyncio.Future[Sequence[Event]]:
    """A watch that has told of this change, and waits for the next: one that is not open yet may go to any member."""
    watch = store.watch("/", revision - 1)
    await within(RECOVERY_SECONDS, anext(watch))
    return asyncio.ensure_future(anext(watch))


async def until_it_works(call: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(RECOVERY_SECONDS):
        while True:
            with suppress(Unreachable):
                await call()
                return


class Counter:
    """Counts up in one key, and knows at any time which values the key may have."""

    def __init__(self, store: EtcdMetadataStore) -> None:
        self._store = store
        self.acknowledged = 0
        self.unknown = 0
        self.stopping = False

    async def run(self) -> None:
        while not self.stopping:
            try:
                item = await self._store.get("/counter")
            except Unreachable:
                continue
            value, revision = (0, 0) if item is None else (int(item.value), item.revision)
            # What was acknowledged is never lost, and what was not is there at most once.
            assert self.acknowledged <= value <= self.acknowledged + self.unknown
            try:
                done = await self._store.transact(
                    [Compare("/counter", revision)], [Put("/counter", b"%d" % (value + 1))]
                )
            except Unreachable:
                self.unknown += 1
                continue
            if done is None:
                # Only a change of ours whose answer was lost can have come between.
                assert self.unknown
            else:
                self.acknowledged += 1

    async def beyond(self, count: int) -> None:
        async with asyncio.timeout(RECOVERY_SECONDS):
            while self.acknowledged < count:  # noqa: ASYNC110
                await asyncio.sleep(0.02)


async def counting(store: EtcdMetadataStore, trouble: Callable[[Counter], Awaitable[None]]) -> Counter:
    counter = Counter(store)
    async with asyncio.TaskGroup() as group:
        group.create_task(counter.run())
        await counter.beyond(20)
        await trouble(counter)
        counter.stopping = True
    return counter


@pytest.mark.parametrize("asked", ["leader", "follower"])
def test_calls_go_on_after_the_leader_was_killed(servers: EtcdServers, asked: str) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        async def trouble(counter: Counter) -> None:
            (await servers.leader()).kill()
            await counter.beyond(counter.acknowledged + 50)

        counter = await counting(store, trouble)
        assert counter.unknown <= 3

    on(servers, story, asked)


def test_a_lost_minority_is_hardly_noticed(servers: EtcdServers) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        async def trouble(counter: Counter) -> None:
            follower = (await servers.followers())[0]  # the one we talk to
            follower.kill()
            await counter.beyond(counter.acknowledged + 50)
            follower.start()
            await counter.beyond(counter.acknowledged + 50)

        counter = await counting(store, trouble)
        assert counter.unknown <= 1

    on(servers, story, "follower")


def test_members_restarted_one_after_the_other_lose_nothing(servers: EtcdServers) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        async def trouble(counter: Counter) -> None:
            for member in servers.members:
                member.kill()
                await counter.beyond(counter.acknowledged + 20)
                member.start()
                await asyncio.to_thread(member.until_healthy)

        await counting(store, trouble)

    on(servers, story)


def test_without_a_majority_everything_is_unreachable_in_time_and_comes_back_by_itself(servers: EtcdServers) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        loop = asyncio.get_running_loop()
        lease = await store.grant(60)
        revision = await put(store, "/a", b"1", lease)
        watch = store.watch("/", revision)
        watching = asyncio.ensure_future(anext(watch))
        for member in servers.members[1:]:
            member.kill()
        calls: list[Callable[[], Awaitable[object]]] = [
            lambda: store.get("/a"),
            lambda: store.list("/"),
            lambda: store.transact([], []),
            lambda: store.transact([], [Put("/b", b"")]),
            lambda: store.grant(60),
            lambda: store.renew(lease),
            lambda: store.revoke(lease + 1),
        ]
        began = loop.time()
        outcomes = await asyncio.gather(*(call() for call in calls), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unreachable] * len(calls)
        assert loop.time() - began < TIMEOUT_SECONDS + SLACK_SECONDS
        # The member that is left ends its watches when it has had no leader for a while.
        with pytest.raises(Unreachable):
            await within(RECOVERY_SECONDS, watching)

        for member in servers.members[1:]:
            member.start()
        await until_it_works(lambda: store.get("/a"))
        await store.renew(lease)
        event = await put(store, "/a", b"2", lease)
        assert list(await anext(store.watch("/a", revision))) == [Event("/a", b"2", event)]

    on(servers, story)


def test_a_member_that_hangs_is_left_for_another(servers: EtcdServers) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        lease = await store.grant(60)
        revision = await put(store, "/a", b"", lease)
        follower = (await servers.followers())[0]  # the one we talk to
        watching = await waiting_for_changes(store, revision)
        await asyncio.sleep(1.5)  # after a silence a member has to prove that it lives before it gets a change
        follower.pause()
        try:
            await put(store, "/b")
            await store.renew(lease)
            assert [item.key for item in await store.list("/")] == ["/a", "/b"]
            with pytest.raises(Unreachable):  # keepalive notices that nobody answers
                await within(RECOVERY_SECONDS, watching)
        finally:
            follower.resume()

    on(servers, story, "follower")


@pytest.mark.parametrize("asked", ["leader", "follower"])
def test_calls_go_on_while_the_leader_hangs(servers: EtcdServers, asked: str) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        async def trouble(counter: Counter) -> None:
            leader = await servers.leader()
            leader.pause()
            try:
                await counter.beyond(counter.acknowledged + 50)
            finally:
                leader.resume()
            await counter.beyond(counter.acknowledged + 50)

        counter = await counting(store, trouble)
        assert counter.unknown <= 3

    on(servers, story, asked)


@pytest.mark.parametrize("asked", ["leader", "follower"])
def test_a_change_that_will_never_be_answered_is_given_up_long_before_its_deadline(
    servers: EtcdServers, asked: str
) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        patient = EtcdMetadataStore(store_endpoints(store), timeout_seconds=100.0, attempt_seconds=0.5)
        await put(patient, "/a")
        leader = await servers.leader()
        leader.pause()
        try:
            with pytest.raises(Unreachable) as caught:
                await within(RECOVERY_SECONDS, put(patient, "/b"))  # a follower passes it on to the leader
            # Neither etcd nor the connection had to tell us, which takes them seven seconds and more.
            assert "did not answer in time" in caught.value.why
        finally:
            leader.resume()
            await patient.close()

    on(servers, story, asked)


def test_a_slow_etcd_is_waited_for(servers: EtcdServers) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        patient = EtcdMetadataStore(store_endpoints(store), timeout_seconds=20.0, attempt_seconds=0.2)
        lease = await patient.grant(60)
        await put(patient, "/a", b"1", lease)
        for member in servers.members:
            member.pause()
        asked = asyncio.gather(patient.get("/a"), patient.list("/"), patient.renew(lease))
        await asyncio.sleep(2)
        assert not asked.done()
        for member in servers.members:
            member.resume()
        item, items, _ = await asked
        assert item is not None and items == [item]
        await patient.close()

    on(servers, story)


def store_endpoints(store: EtcdMetadataStore) -> list[str]:
    return [endpoint.address for endpoint in store._calls._endpoints]


def test_an_old_leader_that_wakes_up_does_not_answer_with_the_past(servers: EtcdServers) -> None:
    """Reads, empty transactions too, are confirmed by a majority, so a replaced leader cannot answer them."""

    async def story(store: EtcdMetadataStore) -> None:
        leader = await servers.leader()
        await put(store, "/a", b"old")
        old = EtcdMetadataStore([leader.client], timeout_seconds=RECOVERY_SECONDS)
        await old.get("/a")
        leader.pause()
        others = EtcdMetadataStore([each.client for each in servers.members if each is not leader])
        await until_it_works(lambda: others.transact([], [Put("/a", b"new")]))
        newest = await others.transact([], [])
        asked = asyncio.gather(old.transact([], []), old.get("/a"))
        await asyncio.sleep(0.1)  # both wait in its socket when it wakes up
        leader.resume()
        revision, item = await asked
        assert newest is not None and revision is not None and revision >= newest
        assert item is not None and item.value == b"new"
        await old.close()
        await others.close()

    on(servers, story)


def test_a_lease_outlives_the_leader_and_ends_when_nobody_renews_it(servers: EtcdServers) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        kept, lost = await store.grant(5), await store.grant(5)
        await put(store, "/kept", b"", kept)
        await put(store, "/lost", b"", lost)
        (await servers.leader()).kill()

        async def renewing() -> None:
            while True:
                await until_it_works(lambda: store.renew(kept))
                await asyncio.sleep(0.5)

        renewal = asyncio.ensure_future(renewing())

        async def is_lost() -> bool:
            with suppress(Unreachable):  # an election may take longer than a call waits
                return await store.get("/lost") is None
            return False

        async with asyncio.timeout(RECOVERY_SECONDS):
            while not await is_lost():  # noqa: ASYNC110
                await asyncio.sleep(0.2)
        with pytest.raises(LeaseLost) as caught:
            await store.renew(lost)
        assert caught.value.lease == lost
        assert await store.get("/kept") is not None
        assert not renewal.done()
        renewal.cancel()

    on(servers, story, "follower")


def test_a_member_that_left_the_list_is_not_asked_any_more(servers: EtcdServers) -> None:
    async def story(store: EtcdMetadataStore) -> None:
        first: EtcdServer = next(each for each in servers.members if each.client == store_endpoints(store)[0])
        watching = await waiting_for_changes(store, await put(store, "/a"))
        await store.use_endpoints([each.client for each in servers.members if each is not first])
        with pytest.raises(Unreachable):
            await within(RECOVERY_SECONDS, watching)
        first.pause()
        try:
            await within(TIMEOUT_SECONDS, put(store, "/b"))
        finally:
            first.resume()

    on(servers, story, "follower")  # without their leader the others would first need a new one
