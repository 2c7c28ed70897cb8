"""What only a store in a file does: outlive the process, share commits, refuse files that are not its own.

The contract suite (`tests/contracts/test_metadata.py`) has what every metadata store does.
"""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from random import Random

import pytest

from pydanube.errors import DirectoryInUse, DiskFailed, DiskFull, FormatTooNew, LeaseLost, Unreachable
from pydanube.ports import Compare, Delete, Event, Item, MetadataStore, Put
from pydanube.stores.metadata.memory import MemoryMetadataStore
from pydanube.stores.metadata.sqlite import SqliteMetadataStore
from pydanube.stores.metadata.sqlite_file import Call
from pydanube.stores.work.memory_clock import MemoryClock
from tests.support import run, settle


@contextmanager
def opened(path: Path, clock: MemoryClock | None = None) -> Iterator[SqliteMetadataStore]:
    with closing(SqliteMetadataStore(path, clock or MemoryClock())) as store:
        yield store


def use(path: Path, act: Callable[[SqliteMetadataStore], Awaitable[None]], clock: MemoryClock | None = None) -> None:
    """Opens the store, acts, closes it: one life of a broker."""

    async def main() -> None:
        with opened(path, clock) as store:
            await act(store)

    run(main())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metadata.db"


# --- restarts -----------------------------------------------------------------------------------------


def test_items_and_revisions_go_on_after_a_restart(path: Path) -> None:
    async def first(store: SqliteMetadataStore) -> None:
        assert await store.transact([], [Put("/a", b"1")]) == 1
        assert await store.transact([], [Put("/b", b"2")]) == 2

    async def second(store: SqliteMetadataStore) -> None:
        assert await store.list("/") == [Item("/a", b"1", 1), Item("/b", b"2", 2)]
        assert await store.transact([Compare("/a", 1)], [Put("/a", b"3")]) == 3

    use(path, first)
    use(path, second)


def test_a_restart_gives_every_lease_its_full_time_again(path: Path) -> None:
    async def first(store: SqliteMetadataStore) -> None:
        assert await store.grant(10.0) == 1
        await store.transact([], [Put("/broker", b"", lease=1)])
        clock.advance(9.0)

    async def second(store: SqliteMetadataStore) -> None:
        clock.advance(9.0)
        assert await store.get("/broker") is not None
        clock.advance(1.0)
        assert await store.get("/broker") is None
        with pytest.raises(LeaseLost):
            await store.renew(1)

    clock = MemoryClock()
    use(path, first, clock)
    use(path, second, clock)


def test_the_id_of_a_lease_is_never_given_twice(path: Path) -> None:
    async def grant_and_revoke(store: SqliteMetadataStore) -> None:
        granted.append(await store.grant(10.0))
        await store.revoke(granted[-1])

    granted: list[int] = []
    for _ in range(3):
        use(path, grant_and_revoke)
    assert granted == [1, 2, 3]


def test_a_watch_goes_on_from_the_revision_of_the_restart_but_not_from_before(path: Path) -> None:
    async def first(store: SqliteMetadataStore) -> None:
        for _ in range(3):
            await store.transact([], [Put("/a", b"old")])

    async def second(store: SqliteMetadataStore) -> None:
        watch = store.watch("/", after=3)
        await store.transact([], [Put("/a", b"new")])
        assert await anext(watch) == [Event("/a", b"new", 4)]
        with pytest.raises(Unreachable, match="before revision 4"):
            await anext(store.watch("/", after=2))

    use(path, first)
    use(path, second)


WRITER = """
import asyncio, sys
from pathlib import Path
from pydanube.ports import Put
from pydanube.stores.metadata.sqlite import SqliteMetadataStore
from pydanube.stores.work.system import SystemClock

async def write(store, name):
    for i in range(1_000_000):
        print(name, i, await store.transact([], [Put(f"/{name}", b"%d" % i)]), flush=True)

async def main():
    store = SqliteMetadataStore(Path(sys.argv[1]), SystemClock())
    await asyncio.gather(*(write(store, name) for name in range(8)))

asyncio.run(main())
"""


def test_what_was_acknowledged_survives_kill_9(path: Path) -> None:
    acknowledged: dict[str, tuple[int, int]] = {}
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(300):
            name, value, revision = writer.stdout.readline().split()
            acknowledged[name] = int(value), int(revision)
        writer.kill()

    async def check(store: SqliteMetadataStore) -> None:
        assert len(acknowledged) == 8
        for name, (value, revision) in acknowledged.items():
            item = await store.get(f"/{name}")
            assert item is not None and int(item.value) >= value and item.revision >= revision

    use(path, check)


@pytest.mark.parametrize("seed", range(20))
def test_random_calls_and_restarts_have_the_outcomes_of_the_reference_in_memory(path: Path, seed: int) -> None:
    """The memory store is what the port means; a restart changes nothing but the leases' deadlines."""
    random = Random(seed)
    clock = MemoryClock()
    reference = MemoryMetadataStore(clock)
    keys = [f"/{name}" for name in "abcdef"]
    leases = [0]

    async def outcome(store: MetadataStore, call: str, *arguments: object) -> object:
        try:
            return await getattr(store, call)(*arguments)
        except LeaseLost as error:
            return error.lease

    async def both(store: SqliteMetadataStore, call: str, *arguments: object) -> object:
        expected = await outcome(reference, call, *arguments)
        assert await outcome(store, call, *arguments) == expected, (seed, call, arguments)
        return expected

    async def life(store: SqliteMetadataStore) -> None:
        watches = [metadata.watch("/", await reference.transact([], []) or 0) for metadata in (reference, store)]
        for _ in range(30):
            match random.randrange(6):
                case 0 | 1 | 2:
                    some = random.sample(keys, random.randint(0, 3))
                    items = await reference.list("/")
                    compares = [Compare(item.key, item.revision) for item in items if random.random() < 0.2]
                    compares += [Compare(random.choice(keys), 0)] if random.random() < 0.2 else []
                    operations = [
                        Put(key, b"%d" % random.randrange(9), random.choice(leases))
                        if random.random() < 0.7
                        else Delete(key)
                        for key in some
                    ]
                    await both(store, "transact", compares, operations)
                case 3:
                    leases.append(int(str(await both(store, "grant", random.uniform(1, 20)))))
                case 4:
                    await both(store, random.choice(["renew", "revoke"]), random.choice(leases))
                case 5:
                    clock.advance(random.uniform(0, 10))
            await both(store, "list", "/")
        await both(store, "transact", [], [Put("/last", b"")])
        seen = []
        for watch in watches:
            events: list[Event] = []
            while not events or events[-1].key != "/last":
                events += await anext(watch)
            seen.append(
                [
                    sorted((e for e in events if e.revision == r), key=lambda e: e.key)
                    for r in sorted({e.revision for e in events})
                ]
            )
        assert seen[0] == seen[1]
        for lease in leases[1:]:  # what the restart does to the one, renewal does to the other
            await outcome(reference, "renew", lease)

    for _ in range(3):
        use(path, life, clock)


# --- commits ------------------------------------------------------------------------------------------


def test_calls_that_arrive_during_a_commit_share_the_next_one(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def act(store: SqliteMetadataStore) -> None:
        sizes: list[int] = []
        begun, disk_is_back = threading.Event(), threading.Event()
        commit = store._database.commit

        def slow(calls: Sequence[Call]) -> object:
            sizes.append(len(calls))
            begun.set()
            assert disk_is_back.wait(timeout=60)
            return commit(calls)

        monkeypatch.setattr(store._database, "commit", slow)
        puts = []
        for i in range(500):
            puts.append(asyncio.ensure_future(store.transact([], [Put(f"/{i}", b"")])))
            await asyncio.to_thread(begun.wait)  # the first is alone in its commit
        await settle()
        disk_is_back.set()
        assert await asyncio.gather(*puts) == list(range(1, 501))  # in the order they were asked for
        assert sizes == [1, 499]

    use(path, act)


def test_one_bad_call_leaves_the_others_of_its_commit_alone(path: Path) -> None:
    async def act(store: SqliteMetadataStore) -> None:
        outcomes = await asyncio.gather(
            store.transact([], [Put("/a", b"1")]),
            store.transact([], [Put("/b", b"lost"), Put("/\ud800", b"a key that is no text")]),
            store.transact([Compare("/a", 9)], [Put("/a", b"lost")]),
            store.transact([], [Put("/c", b"", lease=77)]),
            store.transact([], [Put("/d", b"2")]),
            return_exceptions=True,
        )
        assert outcomes[0] == 1 and outcomes[2] is None and outcomes[4] == 2
        assert isinstance(outcomes[1], UnicodeEncodeError) and isinstance(outcomes[3], LeaseLost)
        assert await store.list("/") == [Item("/a", b"1", 1), Item("/d", b"2", 2)]

    use(path, act)


def test_a_full_disk_refuses_the_change_and_the_store_goes_on(path: Path) -> None:
    async def act(store: SqliteMetadataStore) -> None:
        await store.transact([], [Put("/a", b"1")])
        watch = store.watch("/", after=1)
        [pages] = store._database._sql.execute("PRAGMA page_count").fetchone()
        store._database._sql.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(DiskFull):
            await store.transact([], [Put("/a", b"2"), Put("/big", b"x" * 100_000)])
        assert await store.list("/") == [Item("/a", b"1", 1)]
        assert await store.transact([], [Put("/a", b"3")]) == 2
        assert await anext(watch) == [Event("/a", b"3", 2)]

    use(path, act)


def test_after_a_failed_sync_nothing_is_answered_until_it_is_opened_again(path: Path) -> None:
    async def act(store: SqliteMetadataStore) -> None:
        await store.transact([], [Put("/a", b"1")])
        sql = store._database._sql
        sql.set_authorizer(lambda action, *_: sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_INSERT else 0)
        with pytest.raises(DiskFailed):
            await store.transact([], [Put("/b", b"")])
        sql.set_authorizer(None)
        with pytest.raises(DiskFailed):
            await store.get("/a")

    async def again(store: SqliteMetadataStore) -> None:
        assert await store.list("/") == [Item("/a", b"1", 1)]

    use(path, act)
    use(path, again)


def test_every_commit_is_synced(path: Path) -> None:
    with opened(path) as store:
        sql = store._database._sql
        assert sql.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL
        assert sql.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_a_cancelled_wait_for_a_change_does_not_end_the_watch(path: Path) -> None:
    async def act(store: SqliteMetadataStore) -> None:
        watch = store.watch("/", after=0)
        waiting = asyncio.ensure_future(anext(watch))
        await settle()
        waiting.cancel()
        await settle()
        await store.transact([], [Put("/a", b"")])
        assert await anext(watch) == [Event("/a", b"", 1)]

    use(path, act)


def test_closing_ends_watches_and_refuses_calls(path: Path) -> None:
    async def act(store: SqliteMetadataStore) -> None:
        waiting = asyncio.ensure_future(anext(store.watch("/", after=0)))
        await settle()
        store.close()
        for call in (waiting, store.get("/a"), store.grant(1.0), store.renew(1), store.revoke(1)):
            with pytest.raises(Unreachable, match="closed"):
                await call

    use(path, act)


# --- files that are not ours --------------------------------------------------------------------------


def test_a_database_of_a_newer_version_is_refused_with_a_sentence(path: Path) -> None:
    with opened(path):
        pass
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(FormatTooNew, match=r"has format 9 and this version reads formats up to 1: upgrade"):
        SqliteMetadataStore(path, MemoryClock())


def test_another_programs_database_is_left_alone(path: Path) -> None:
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE photos (id)")
    with pytest.raises(DiskFailed, match="another program's"):
        SqliteMetadataStore(path, MemoryClock())


def test_a_file_that_is_no_database_is_refused(path: Path) -> None:
    path.write_text("this is not a database, " * 100)
    with pytest.raises(DiskFailed, match="not a database"):
        SqliteMetadataStore(path, MemoryClock())


def test_a_directory_that_is_not_there_is_refused(path: Path) -> None:
    with pytest.raises(DiskFailed, match="unable to open"):
        SqliteMetadataStore(path / "below" / "nothing", MemoryClock())


def test_a_second_holder_is_refused(path: Path) -> None:
    with opened(path), pytest.raises(DirectoryInUse):
        SqliteMetadataStore(path, MemoryClock())
    with opened(path):
        pass
