"""One leader at a time: the broker that holds `/cluster/leader` under its lease.

A leader that was replaced and does not know it yet is fenced: everything it writes compares the revision of that key
(`guard`). Any living broker may lead, drained ones too: leading costs little, and in a cluster whose brokers are all
drained one must still lead, to assign topics as soon as a broker is activated.
"""

from __future__ import annotations

import logging
from typing import NoReturn

from pydanube.cluster.membership import Membership
from pydanube.cluster.view import View, leader_from_bytes, leader_to_bytes
from pydanube.core import keys
from pydanube.errors import Unavailable
from pydanube.ports import Clock, Compare, LeaseId, MetadataStore, Put, Revision

log = logging.getLogger(__name__)


class Leadership:
    """Campaigns until cancelled. `view.leader` says who leads; `leads` whether it is this process."""

    def __init__(self, store: MetadataStore, clock: Clock, view: View, membership: Membership) -> None:
        self._store = store
        self._clock = clock
        self._view = view
        self._membership = membership
        self._revision: Revision = 0
        self._lease: LeaseId = 0

    @property
    def leads(self) -> bool:
        """As far as this process can know: the store may know better, and refuses what it writes then."""
        return self._revision != 0 and self._lease == self._membership.lease.id and self._membership.may_serve()

    @property
    def guard(self) -> Compare:
        """Part of everything a leader writes."""
        return Compare(keys.LEADER, self._revision or -1)

    async def run(self) -> NoReturn:
        # A view whose watch missed a leader's end must not wait for the next list to learn of it.
        interval = self._membership.lease.ttl_seconds / 16
        looked = -interval
        while True:
            version, now = self._view.version, self._clock.elapsed()
            seen = self._view.leader
            doubt = seen is None or (self._revision != 0 and seen.revision != self._revision)
            if doubt or now - looked >= interval:
                looked = now
                try:
                    await self._look()
                except Unavailable as error:
                    log.warning("cannot see who leads", extra={"why": str(error)})
                    await self._clock.sleep(interval / 4)
            await self._view.changed(version, interval)

    async def check(self) -> None:
        """After a write of the leader's was refused: is it still the leader?"""
        item = await self._store.get(keys.LEADER)
        if item is None or item.revision != self._revision:
            self._step_down()

    async def _look(self) -> None:
        """Becomes leader if there is none, and steps down if another broker leads."""
        item = await self._store.get(keys.LEADER)
        if item is not None and item.revision == self._revision:
            return
        self._step_down()
        broker = self._membership.broker
        # Our own name without our knowing: an answer was lost, or the process before this one had it.
        if item is not None and leader_from_bytes(item.value) != broker:
            return
        if not self._membership.may_serve():
            return
        lease = self._membership.lease.id
        revision = await self._view.transact(
            [Compare(keys.LEADER, item.revision if item else 0), self._membership.registered],
            [Put(keys.LEADER, leader_to_bytes(broker), lease)],
        )
        if revision is not None:
            self._revision, self._lease = revision, lease
            log.info("broker leads the cluster", extra={"broker_id": broker, "revision": revision})

    def _step_down(self) -> None:
        if self._revision:
            log.info("broker leads no longer", extra={"broker_id": self._membership.broker})
        self._revision = 0
