"""A metadata store in one dict, with the semantics of etcd where the port leaves none open.

Time passes only on a call: leases that have run out are ended at the start of every call, and a
waiting watch sleeps no longer than the next lease lasts. So the store has no task of its own, and a broker
that is paused in a simulation does not pause the leases of the others.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class _Lease:
    ttl_seconds: float
    deadline: float
    keys: dict[str, None] = field(default_factory=dict)  # an ordered set


class MemoryMetadataStore:
    """`history_max` is how many changes a watch may be behind before it ends."""

    def __init__(self, clock: Clock, *, history_max: int = 10_000) -> None:
        assert history_max > 0
        self._clock = clock
        self._revision: Revision = 0
        self._items: dict[str, Item] = {}
        self._keys: list[str] = []  # of the items, sorted
        self._leases: dict[LeaseId, _Lease] = {}
        self._lease_of: dict[str, LeaseId] = {}  # the inverse of `_Lease.keys`
        self._leases_made = 0
        # The last changes, one per revision, so the oldest has revision `_revision - len(_history) + 1`.
        self._history: deque[tuple[Event, ...]] = deque(maxlen=history_max)
        self._waiting: dict[asyncio.Future[None], str] = {}  # and what they watch, in the order in which they wake
        self._wake_every = max(1, history_max // 2)
        self._first_deadline = -math.inf  # no lease ends before; -inf: not known

    async def get(self, key: str) -> Item | None:
        self._end_leases()
        return self._items.get(key)

    async def list(self, prefix: str) -> list[Item]:
        self._end_leases()
        found = []
        for place in range(bisect_left(self._keys, prefix), len(self._keys)):
            key = self._keys[place]
            if not key.startswith(prefix):
                break
            found.append(self._items[key])
        return found

    async def transact(self, compares: Sequence[Compare], operations: Sequence[Put | Delete]) -> Revision | None:
        assert len(compares) <= COMPARES_MAX and len(operations) <= OPERATIONS_MAX
        keys = {operation.key for operation in operations}
        assert len(keys) == len(operations), "two operations on one key"
        self._end_leases()
        if not all(map(self._holds, compares)):
            return None
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self._leases:
                raise LeaseLost(operation.lease)
        self._change(operations)
        return self._revision

    def watch(self, prefix: str, after: Revision) -> AsyncIterator[Sequence[Event]]:
        return _Watch(self, prefix, after)

    async def compact(self, revision: Revision) -> None:
        while self._history and self._revision - len(self._history) + 1 < min(revision, self._revision):
            self._history.popleft()

    async def usage(self) -> Usage:
        return Usage(self._revision)

    async def grant(self, ttl_seconds: float) -> LeaseId:
        assert ttl_seconds > 0
        self._end_leases()
        self._leases_made += 1
        deadline = self._clock.elapsed() + ttl_seconds
        self._leases[self._leases_made] = _Lease(ttl_seconds, deadline)
        if deadline < self._first_deadline:
            self._first_deadline = deadline
            self._wake_watches([""])  # their naps may be too long for this one
        return self._leases_made

    async def renew(self, lease: LeaseId) -> None:
        self._end_leases()
        if lease not in self._leases:
            raise LeaseLost(lease)
        self._leases[lease].deadline = self._clock.elapsed() + self._leases[lease].ttl_seconds
        self._first_deadline = -math.inf

    async def revoke(self, lease: LeaseId) -> None:
        self._end_leases()
        if lease in self._leases:
            self._end_lease(lease)

    # --- changes ---

    def _holds(self, compare: Compare) -> bool:
        item = self._items.get(compare.key)
        return (item.revision if item else 0) == compare.revision

    def _change(self, operations: Sequence[Put | Delete]) -> None:
        """Makes one revision of all operations that change something; none if none does."""
        revision = self._revision + 1
        events = []
        for operation in operations:
            key = operation.key
            if isinstance(operation, Put):
                if key not in self._items:
                    insort(self._keys, key)
                self._items[key] = Item(key, operation.value, revision)
                self._attach(key, operation.lease)
                events.append(Event(key, operation.value, revision))
            elif key in self._items:
                del self._items[key], self._keys[bisect_left(self._keys, key)]
                self._attach(key, 0)
                events.append(Event(key, None, revision))
        if events:
            self._revision = revision
            self._history.append(tuple(events))
            # All of them now and then, so that no watch falls behind the history that is kept.
            everybody = revision % self._wake_every == 0
            self._wake_watches([""] if everybody else [event.key for event in events])

    def _attach(self, key: str, lease: LeaseId) -> None:
        """A key belongs to the lease of its last put, or to none."""
        before = self._lease_of.pop(key, 0)
        if before:
            del self._leases[before].keys[key]
        if lease:
            self._lease_of[key] = lease
            self._leases[lease].keys[key] = None

    # --- leases ---

    def _end_leases(self) -> None:
        now = self._clock.elapsed()
        if now < self._first_deadline:
            return
        ended = [(lease.deadline, id_) for id_, lease in self._leases.items() if lease.deadline <= now]
        for _, id_ in sorted(ended):
            self._end_lease(id_)
        self._first_deadline = min((lease.deadline for lease in self._leases.values()), default=math.inf)

    def _end_lease(self, lease: LeaseId) -> None:
        self._change([Delete(key) for key in self._leases[lease].keys])
        del self._leases[lease]

    # --- watches ---

    def _wake_watches(self, changed: Sequence[str]) -> None:
        """Those that watch one of the keys; an empty one stands for all."""
        for future, prefix in list(self._waiting.items()):
            for key in changed:
                if not key or key.startswith(prefix):
                    del self._waiting[future]
                    if not future.done():
                        future.set_result(None)
                    break

    async def _next_change(self, prefix: str) -> None:
        """Returns when something below `prefix` may have changed: by a call, or because a lease may have run out."""
        loop = asyncio.get_running_loop()
        changed: asyncio.Future[None] = loop.create_future()
        self._waiting[changed] = prefix
        deadline = min((lease.deadline for lease in self._leases.values()), default=None)
        nap = None if deadline is None else loop.create_task(self._nap(deadline, changed))
        try:
            await changed
        finally:
            self._waiting.pop(changed, None)
            if nap is not None:
                nap.cancel()

    async def _nap(self, deadline: float, changed: asyncio.Future[None]) -> None:
        # At least a microsecond: a nap that rounds to nothing would not move a virtual clock, and never end.
        await self._clock.sleep(max(deadline - self._clock.elapsed(), 1e-6))
        if not changed.done():
            changed.set_result(None)


class _Watch:
    """A place in the store's history; it holds no changes itself. Dropping it needs no cleaning up."""

    def __init__(self, store: MemoryMetadataStore, prefix: str, after: Revision) -> None:
        self._store = store
        self._prefix = prefix
        self._after = after

    def __aiter__(self) -> _Watch:
        return self

    async def __anext__(self) -> Sequence[Event]:
        while True:
            self._store._end_leases()
            events = self._take()
            if events:
                return events
            await self._store._next_change(self._prefix)

    def _take(self) -> list[Event]:
        """Returns what happened under the prefix since the last time, and moves on."""
        store = self._store
        oldest = store._revision - len(store._history) + 1
        if self._after + 1 < oldest:
            raise Unreachable("metadata", f"changes before revision {oldest} are no longer kept")
        unseen, prefix = store._revision - self._after, self._prefix
        if unseen <= 0:
            return []
        self._after = store._revision
        # From the end: a watch is behind by a few changes, and there are thousands.
        recent = (store._history[place] for place in range(-unseen, 0))
        return [event for change in recent for event in change if event.key.startswith(prefix)]
