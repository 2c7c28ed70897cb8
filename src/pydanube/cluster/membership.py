"""This broker's place in the cluster: its registration, under a lease that is kept renewed.

    register ─► keep the lease ─► (lost) ─► what does the store say? ─┬─► nothing happened: as before, same session
                     ▲                                               ├─► declared dead: `on_lost`, new session, drained
                     └───────────────────────────────────────────────┤
                                                                     └─► another process has the id: NodeIdInUse

What to be is decided in `core/cluster/lifecycle.py`. The transaction that registers compares the registration, the
state and the lost record with what was read, so a leader that declares this broker dead and this broker that comes back
never both succeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, NoReturn

from pydanube.cluster.lease import BrokerLease
from pydanube.core import keys
from pydanube.core.cluster.lifecycle import (
    FULL_CLUSTER_RESTART,
    REGISTRATION_EXPIRED,
    STALE_RESTART,
    TTL_SECONDS,
    BrokerLoss,
    BrokerMode,
    BrokerRegistration,
    BrokerState,
    Known,
    RegistrationDecision,
    RegistrationVerdict,
    enter_running,
    enter_starting,
    renewal_interval,
    retry_delay,
)
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import DanubeError, LeaseLost, NodeIdInUse, Unavailable
from pydanube.ports import Clock, Compare, Item, MetadataStore, Put, Revision, Work

log = logging.getLogger(__name__)

# How long another process's registration must stand, in TTLs, to be a living broker's: longer than its lease.
PROOF_OF_LIFE: Final = 1.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this broker is and where it is found.

    `home` names the data directory among all directories of all machines: two processes with one home cannot both hold
    its lock, so a registration from the same home is that of a process that is gone.
    """

    broker: BrokerId
    home: str
    broker_url: str
    connect_url: str
    admin_addr: str
    prom_exporter: str
    stream_url: str


class _Read(NamedTuple):
    """What the store holds about this broker, with revisions."""

    registration: Item | None
    state: Item | None
    lost: Item | None

    def found(self) -> Known:
        state = BrokerState.from_bytes(self.state.value) if self.state else None
        lost = BrokerLoss.from_bytes(self.lost.value) if self.lost else None
        if self.registration is None:
            return Known(state, lost)
        registration = BrokerRegistration.from_bytes(self.registration.value)
        if registration is None:  # a registration, but not in a format of ours
            return Known(state, lost, registered=0)
        return Known(state, lost, registration.session, registration.home)

    def unchanged(self, broker: BrokerId) -> list[Compare]:
        return [
            Compare(keys.registration(broker), _revision(self.registration)),
            Compare(keys.broker_state(broker), _revision(self.state)),
            Compare(keys.lost(broker), _revision(self.lost)),
        ]


class Membership:
    """`on_return` is called whenever it is about to register."""

    def __init__(
        self,
        identity: Identity,
        store: MetadataStore,
        clock: Clock,
        work: Work,
        *,
        on_return: Callable[[], None] = lambda: None,
        ttl_seconds: float = TTL_SECONDS,
        join: bool = False,
        healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        self.identity = identity
        self._on_return = on_return
        self.session = work.random_u64()
        self.lease = BrokerLease(identity.broker, store, clock, ttl_seconds, healthy)
        self.entry: RegistrationDecision | None = None  # how it registered last
        self.is_retired = False  # it is about to leave
        self._store = store
        self._clock = clock
        self._work = work
        self._join = join
        self._revision: Revision = 0
        self._lost_revision: Revision = 0

    @property
    def broker(self) -> BrokerId:
        return self.identity.broker

    @property
    def registered(self) -> Compare:
        """Holds as long as this process is registered. Part of everything that only a living broker may write.

        Before the first registration, and after one was lost, it holds never.
        """
        return Compare(keys.registration(self.broker), self._revision or -1)

    def may_serve(self) -> bool:
        """Self-fencing: False a quarter of the TTL before others may take this broker's topics."""
        return self._revision != 0 and self.lease.may_serve()

    async def register(self) -> RegistrationDecision:
        """At the start. Waits for the store as long as it takes. Raises NodeIdInUse in a copy of a living broker."""
        other: tuple[int | None, float] | None = None  # a session that is not ours, and since when we see it
        failures = 0
        while True:
            try:
                read = await self._read()
                entry = enter_starting(read.found(), home=self.identity.home, join=self._join)
                if entry.verdict is RegistrationVerdict.WAIT:
                    now, session = self._clock.elapsed(), read.found().registered
                    if other is None or other[0] != session:
                        other = (session, now)
                    elif now - other[1] > PROOF_OF_LIFE * self.lease.ttl_seconds:
                        raise NodeIdInUse(str(self.broker), _where(read.registration))
                    await self._clock.sleep(self.lease.ttl_seconds / 16)
                    continue
                if await self._enter(read, entry, self.session):
                    self._log_entry(entry)
                    return entry
            except Unavailable as error:
                failures += 1
                log.warning("cannot register yet", extra={"broker_id": self.broker, "why": str(error)})
                await self._clock.sleep(retry_delay(failures, self.lease.ttl_seconds))

    async def run(self, on_lost: Callable[[str], Awaitable[None]]) -> NoReturn:
        """Keeps the registration, and takes it back whenever it was lost. Raises NodeIdInUse if another has it.

        `on_lost` is called when the leader declared this broker dead, before it registers again.
        """
        while True:
            await self._until_lost()
            self._revision = 0
            self.lease.drop()
            await self._come_back(on_lost)

    async def _until_lost(self) -> None:
        """Returns when the lease has run out, or the registration was deleted without it."""
        keeping = asyncio.create_task(self.lease.keep(), name="keep the lease")
        try:
            while not keeping.done():
                await asyncio.wait([keeping], timeout=renewal_interval(self.lease.ttl_seconds))
                with contextlib.suppress(Unavailable):
                    item = await self._store.get(keys.registration(self.broker))
                    if _revision(item) != self._revision:
                        return
        finally:
            keeping.cancel()
            with contextlib.suppress(LeaseLost, asyncio.CancelledError):
                await keeping

    async def retire(self) -> None:
        """The beginning of an orderly end: this broker is assigned no more topics. It stays registered."""
        self.is_retired = True
        while True:
            item = await self._store.get(keys.broker_state(self.broker))
            state = BrokerState.from_bytes(item.value) if item else None
            if item is None or state is None or state.session != self.session:
                return
            put = Put(item.key, replace(state, has_left=True).to_bytes())
            if await self._store.transact([Compare(item.key, item.revision)], [put]) is not None:
                return

    async def leave(self) -> None:
        """An orderly end: others need not wait for the lease, and may take what was not sealed one TTL later."""
        lease = self.lease.id
        self._revision = 0
        self.lease.drop()
        await self.retire()
        # With the lease goes everything that is under it: the registration, the load report, perhaps the leader's key.
        await self._store.revoke(lease)

    async def own_topics(self) -> list[TopicName]:
        """Topics that are assigned to this broker and were not given away: to be claimed before the servers open."""
        items = await self._store.list(keys.assignments(self.broker))
        found = [(item.revision, assignment[1]) for item in items if (assignment := keys.assignment_of(item.key))]
        # What was assigned before the leader declared a session of ours dead is about to get other owners.
        return sorted(topic for revision, topic in found if revision > self._lost_revision)

    # --- registering ---

    async def _come_back(self, on_lost: Callable[[str], Awaitable[None]]) -> None:
        fresh = self._work.random_u64()  # the next session, if this one was declared dead
        failures = 0
        closed = False
        while True:
            try:
                read = await self._read()
                found = read.found()
                if found.registered == fresh:  # an earlier try succeeded, and its answer was lost
                    found = found._replace(registered=None)
                entry = enter_running(found, session=self.session)
                if entry.verdict is RegistrationVerdict.REPLACED:
                    await self._lose(on_lost, "replaced")
                    raise NodeIdInUse(str(self.broker), _where(read.registration))
                if entry.declared_dead and not closed:
                    log.warning(
                        "Registration recovered after expiry. Setting broker to drained.",
                        extra={"broker_id": self.broker},
                    )
                    await self._lose(on_lost, entry.reason)
                    closed = True
                if await self._enter(read, entry, fresh if entry.declared_dead else self.session):
                    self._log_entry(entry)
                    return
            except Unavailable as error:
                failures += 1
                log.error(
                    "Failed to renew broker registration",
                    extra={"broker_id": self.broker, "failures": failures, "error": str(error)},
                )
                await self._clock.sleep(retry_delay(failures, self.lease.ttl_seconds))

    async def _enter(self, read: _Read, entry: RegistrationDecision, session: int) -> bool:
        """Registers if the store still holds what was read."""
        identity, before = self.identity, read.found()
        self._on_return()
        lease = await self.lease.grant()
        registration = BrokerRegistration(
            broker_url=identity.broker_url,
            connect_url=identity.connect_url,
            admin_addr=identity.admin_addr,
            prom_exporter=identity.prom_exporter,
            stream_url=identity.stream_url,
            session=session,
            home=identity.home,
            lease=lease,
        ).to_bytes()
        drain = before.state.drain if before.state and entry.mode is BrokerMode.DRAINING else None
        is_crash = self.entry is None and before.state is not None and not before.state.has_left
        state = replace(
            before.state or BrokerState(mode=entry.mode),
            mode=entry.mode,
            reason=entry.reason,
            session=session,
            has_left=False,
            drain=drain,
            crashes=(before.state.crashes if before.state else 0) + is_crash,
        )
        revision = await self._write(read, registration, state)
        if revision is None:
            # Also if an answer is still under way: under a revoked lease nothing is put any more.
            await self._store.revoke(lease)
            return False
        self.session, self.entry = session, entry
        self._revision, self._lost_revision = revision, _revision(read.lost)
        if read.registration is not None and (old := BrokerRegistration.from_bytes(read.registration.value)):
            await self._end(old.lease)
        return True

    async def _write(self, read: _Read, registration: bytes, state: BrokerState) -> Revision | None:
        """The revision of our registration, also if the store did it and the answer was lost; None if it did not."""
        key = keys.registration(self.broker)
        try:
            return await self._store.transact(
                read.unchanged(self.broker),
                [Put(key, registration, self.lease.id), Put(keys.broker_state(self.broker), state.to_bytes())],
            )
        except LeaseLost:
            return None
        except Unavailable:
            item = await self._store.get(key)
            return item.revision if item is not None and item.value == registration else None

    async def _end(self, lease: int) -> None:
        """The lease of the process before this one: with it goes what else that process held, as the leader's key."""
        with contextlib.suppress(Unavailable):  # it runs out by itself
            await self._store.revoke(lease)

    async def _read(self) -> _Read:
        return _Read(
            await self._store.get(keys.registration(self.broker)),
            await self._store.get(keys.broker_state(self.broker)),
            await self._store.get(keys.lost(self.broker)),
        )

    async def _lose(self, on_lost: Callable[[str], Awaitable[None]], reason: str) -> None:
        try:
            await on_lost(reason)
        except DanubeError as error:
            log.error("closing lost topics failed", extra={"broker_id": self.broker, "error": str(error)})

    def _log_entry(self, entry: RegistrationDecision) -> None:
        extra = {"broker_id": self.broker, "mode": entry.mode.value, "reason": entry.reason, "session": self.session}
        if entry.declared_dead and entry.reason == REGISTRATION_EXPIRED:
            sentence = (
                "Broker registration expired. Registered as drained. Use `danube-admin brokers activate` to resume."
            )
            log.warning(sentence, extra=extra)
        elif entry.declared_dead and entry.reason == STALE_RESTART:
            sentence = (
                "Broker registration was expired (unavailable > TTL). Registered as drained. "
                "Use `danube-admin brokers activate` to resume."
            )
            log.warning(sentence, extra=extra)
        elif entry.reason == FULL_CLUSTER_RESTART:
            log.info("Full cluster restart detected. Registering as active.", extra=extra)
        else:
            log.info("broker registered", extra=extra)


def _revision(item: Item | None) -> Revision:
    return item.revision if item else 0


def _where(item: Item | None) -> str:
    registration = BrokerRegistration.from_bytes(item.value) if item else None
    return f"{registration.broker_url} ({registration.home})" if registration else "an unknown place"
