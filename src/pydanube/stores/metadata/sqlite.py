"""A metadata store in one SQLite file, for a broker that stands alone.

    event loop                                     the store's own thread
    get, list, transact, grant, revoke ──queue──►  takes all that waits: BEGIN, each call, COMMIT (one sync)
    history, watches, waiting callers  ◄──loop───  the outcomes and the changes, once they are on disk

Calls that arrive during a commit share the next one, so a busy broker spreads a sync over many transactions
and an idle one pays for exactly one. No change is visible before it is on disk.

Revisions go on where they were when the file was last open; watches begin anew, as after a lost connection.
Time is the loop's: a lease's deadline is kept in memory, and every call first ends the leases that have run
out. The file has only their length, so opening it gives every lease its full time again, as etcd does.

The file belongs to one process at a time. After a failed sync it is not known what is on disk, so the store
refuses everything until it is opened again; a full disk refuses one commit and changes nothing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Final, NamedTuple, TypeVar, cast

from pydanube.errors import LeaseLost, Unreachable
from pydanube.ports import (
    COMPARES_MAX,
    OPERATIONS_MAX,
    Clock,
    Compare,
    Delete,
    Event,
    Item,
    LeaseId,
    Put,
    Revision,
    Usage,
)
from pydanube.stores.metadata.sqlite_file import Call, Database
from pydanube.stores.metadata.watch_log import Change, WatchHistory

T = TypeVar("T")

CALLS_PER_COMMIT_MAX: Final = 1000
LEASE_RETRY_SECONDS: Final = 1.0  # until a lease that could not be ended is tried again


class _Lease(NamedTuple):
    ttl_seconds: float
    deadline: float


class SqliteMetadataStore:
    """`history_max` is how many changes a watch may be behind before it ends.

    Opening and closing block; a broker does each once. Opening raises DirectoryInUse, FormatTooNew, DiskFull
    or DiskFailed.
    """

    def __init__(self, path: Path, clock: Clock, *, history_max: int = 10_000) -> None:
        self._path = str(path)
        self._clock = clock
        self._database = Database(self._path)
        self._history = WatchHistory(self._database.revision, history_max)
        now = clock.elapsed()
        self._leases = {id_: _Lease(ttl, now + ttl) for id_, ttl in self._database.leases()}
        self._queue: SimpleQueue[tuple[Call, asyncio.AbstractEventLoop] | None] = SimpleQueue()
        self._closed = False
        # A daemon: a process that stops does not wait for a disk that hangs.
        self._thread = threading.Thread(target=self._run, name="metadata", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Finishes what was asked for, ends every watch and releases the file."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
            self._history.close()

    # --- the port ---

    async def get(self, key: str) -> Item | None:
        return await self._call(lambda database: database.get(key))

    async def list(self, prefix: str) -> list[Item]:
        return await self._call(lambda database: database.list(prefix))

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        assert len(compares) <= COMPARES_MAX and len(operations) <= OPERATIONS_MAX
        keys = {operation.key for operation in operations}
        assert len(keys) == len(operations), "two operations on one key"
        return await self._call(lambda database: database.transact(compares, operations))

    def watch(self, prefix: str, after: Revision) -> AsyncIterator[Sequence[Event]]:
        return _Watch(self, prefix, after)

    async def compact(self, revision: Revision) -> None:
        """Nothing to do: the file has no history, and memory only the last changes."""
        self._check_open()

    async def usage(self) -> Usage:
        """The file grows with what is stored, and has no bound but the disk."""
        return Usage(await self._call(lambda database: database.revision))

    async def grant(self, ttl_seconds: float) -> LeaseId:
        assert ttl_seconds > 0
        lease = await self._call(lambda database: database.grant(ttl_seconds))
        self._leases[lease] = _Lease(ttl_seconds, self._clock.elapsed() + ttl_seconds)
        self._history.wake()  # naps may be too long for this one
        return lease

    async def renew(self, lease: LeaseId) -> None:
        # Nothing to write: the file does not know deadlines.
        self._check_open()
        self._end_leases()
        if lease not in self._leases:
            raise LeaseLost(lease)
        ttl_seconds = self._leases[lease].ttl_seconds
        self._leases[lease] = _Lease(ttl_seconds, self._clock.elapsed() + ttl_seconds)

    async def revoke(self, lease: LeaseId) -> None:
        self._check_open()
        self._end_leases()
        if lease in self._leases:
            self._end_lease(lease)
        await self._call(lambda database: None)  # returns once the end, also by another call, is on disk

    # --- calls ---

    async def _call(self, function: Callable[[Database], T]) -> T:
        """Returns what `function` returns, once everything it saw or changed is on disk.

        A cancelled caller does not take its call back: whether it was done is then unknown.
        """
        self._check_open()
        self._end_leases()
        outcome: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._put(Call(function, outcome))
        return cast(T, await outcome)

    def _put(self, call: Call) -> None:
        self._queue.put((call, asyncio.get_running_loop()))

    def _check_open(self) -> None:
        if self._closed:
            raise Unreachable("metadata", "the store was closed")

    def _finish(self, calls: Sequence[Call], changes: Sequence[Change]) -> None:
        """Runs on the loop, in the order of commits."""
        self._history.append(changes)
        for call in calls:
            if call.error is not None and call.undo is not None:
                call.undo()
            if call.outcome is None or call.outcome.done():
                continue
            if call.error is not None:
                call.outcome.set_exception(call.error)
            else:
                call.outcome.set_result(call.value)

    def _run(self) -> None:
        """The thread."""
        open_ = True
        while open_ and (first := self._queue.get()) is not None:
            batch = [first]
            with suppress(Empty):
                while len(batch) < CALLS_PER_COMMIT_MAX:
                    following = self._queue.get_nowait()
                    if following is None:
                        open_ = False
                        break
                    batch.append(following)
            calls = [call for call, _ in batch]
            changes = self._database.commit(calls)
            with suppress(RuntimeError):  # the loop is closed, and with it every caller
                first[1].call_soon_threadsafe(self._finish, calls, changes)
            del first, batch, calls  # an idle thread keeps nothing alive
        self._database.close()

    # --- leases ---

    def _end_leases(self) -> None:
        if self._leases:
            now = self._clock.elapsed()
            ended = [(lease.deadline, id_) for id_, lease in self._leases.items() if lease.deadline <= now]
            for _, id_ in sorted(ended):
                self._end_lease(id_)

    def _end_lease(self, id_: LeaseId) -> None:
        """Everything asked for later sees it ended. If the disk is full it ends later instead."""
        lease = self._leases.pop(id_)

        def undo() -> None:
            self._leases[id_] = lease._replace(deadline=self._clock.elapsed() + LEASE_RETRY_SECONDS)

        self._put(Call(lambda database: database.end_lease(id_), None, undo))

    # --- watches ---

    async def _next(self, prefix: str, after: Revision) -> tuple[Sequence[Event], Revision]:
        """At least one event under `prefix` after that revision, and the revision from which to go on."""
        while True:
            if not self._closed:
                self._end_leases()
            events, after = self._history.since(prefix, after)
            if events:
                return events, after
            await self._history.next_change(self._until_a_lease_ends if self._leases else None)

    async def _until_a_lease_ends(self) -> None:
        deadline = min((lease.deadline for lease in self._leases.values()), default=0.0)
        # At least a microsecond: a nap that rounds to nothing would not move a virtual clock, and never end.
        await self._clock.sleep(max(deadline - self._clock.elapsed(), 1e-6))


class _Watch:
    """A place in the history. No generator: those end for good when a wait for the next change is cancelled."""

    def __init__(self, store: SqliteMetadataStore, prefix: str, after: Revision) -> None:
        self._store = store
        self._prefix = prefix
        self._after = after

    def __aiter__(self) -> _Watch:
        return self

    async def __anext__(self) -> Sequence[Event]:
        events, self._after = await self._store._next(self._prefix, self._after)
        return events
