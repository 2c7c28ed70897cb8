"""This broker's side of the cluster, as one object: see the package's text for how it is used."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from pydanube.cluster.assignment_reconciler import AssignmentReconciler
from pydanube.cluster.attendance import AttendanceWatch
from pydanube.cluster.host import TopicHost
from pydanube.cluster.leadership import Leadership
from pydanube.cluster.load_manager import LoadManager
from pydanube.cluster.membership import Identity, Membership
from pydanube.cluster.observed import ObservedStore
from pydanube.cluster.operations import ClusterOperations, Rebalanced
from pydanube.cluster.reports import Reports
from pydanube.cluster.returning import Returning
from pydanube.cluster.upkeep import Upkeep
from pydanube.cluster.view import RELIST_SECONDS, View
from pydanube.config import LoadManagerConfig
from pydanube.core.cluster.lifecycle import (
    TTL_SECONDS,
    BrokerMode,
    BrokerRegistration,
    BrokerState,
    RegistrationDecision,
)
from pydanube.core.cluster.placement import THRESHOLDS, Marker, Rules
from pydanube.core.names import BrokerId, TopicName
from pydanube.errors import Unavailable
from pydanube.ports import Clock, Compare, Delete, MetadataStore, Put, Revision, Work
from pydanube.telemetry import ClusterMetrics

log = logging.getLogger(__name__)


class ClusterNode:
    """`requests` takes what operators want; the rest answers without waiting, from what is known here."""

    def __init__(
        self,
        identity: Identity,
        *,
        store: MetadataStore,
        clock: Clock,
        work: Work,
        config: LoadManagerConfig | None = None,
        ttl_seconds: float = TTL_SECONDS,
        relist_seconds: float = RELIST_SECONDS,
        join: bool = False,
        rejoins: bool = False,
        healthy: Callable[[], bool] = lambda: True,
        compacts: bool = True,
        metrics: ClusterMetrics | None = None,
        on_change: Callable[[str, str], None] = lambda kind, sentence: None,
    ) -> None:
        """The leader calls `on_change` with what happens to brokers: its kind, and a sentence."""
        metrics = metrics or ClusterMetrics()
        config = config or LoadManagerConfig()
        rules = rules_of(config)
        strategy = config.assignment_strategy
        # For everything below: what is written to the store is in the view immediately.
        self.store = store = ObservedStore(store, self._notice)
        self.view = View(store, clock, ttl_seconds=ttl_seconds, relist_seconds=relist_seconds)
        self.membership = Membership(
            identity,
            store,
            clock,
            work,
            on_return=self.view.doubt,
            ttl_seconds=ttl_seconds,
            join=join,
            healthy=healthy,
        )
        self.leadership = Leadership(store, clock, self.view, self.membership)
        self.requests = ClusterOperations(
            store, clock, self.view, self.membership, strategy=strategy, rules=rules, metrics=metrics
        )
        self._load_manager = LoadManager(
            store,
            clock,
            self.view,
            self.leadership,
            strategy=strategy,
            rules=rules,
            ttl_seconds=ttl_seconds,
            metrics=metrics,
        )
        self.attendance = AttendanceWatch(
            clock, self.view, self.leadership, ttl_seconds=ttl_seconds, on_change=on_change
        )
        self._upkeep = Upkeep(store, clock, self.leadership, metrics, compacts=compacts)
        self._clock = clock
        self._metrics = metrics
        self._ttl_seconds = ttl_seconds
        self._report_seconds = float(config.load_report_interval_seconds)
        self._rejoins = rejoins
        self._tasks: list[asyncio.Task[Any]] = []
        self._background: set[asyncio.Task[Any]] = set()
        self._rebalancing: asyncio.Task[Any] | None = None
        self.ended: asyncio.Future[None] | None = None

    # --- the course of things -----------------------------------------------------------------------

    async def register(self, host: TopicHost) -> RegistrationDecision:
        """Becomes a member; waits for the metadata store as long as it takes. Raises NodeIdInUse.

        `host.lost` is called if the leader declares this broker dead.
        """
        entry = await self.membership.register()
        self.ended = asyncio.get_running_loop().create_future()
        # From here on the lease must be renewed, however long the claims take that come next.
        self._spawn(self.membership.run(host.lost), "membership")
        self._spawn(self.view.run(), "cluster view")
        return entry

    async def own_topics(self) -> list[TopicName]:
        """What this broker had when it went away, and still has: to be claimed before the servers open."""
        return await self.membership.own_topics()

    def start(self, host: TopicHost) -> None:
        """Begins to lead, if it is elected, and to have `host` do what markers ask for."""
        store, clock, view, membership = self.store, self._clock, self.view, self.membership
        duties = AssignmentReconciler(store, clock, view, membership, host)
        reports = Reports(clock, view, membership, host.load_report, self._report_seconds)
        self._spawn(self.leadership.run(), "leadership")
        self._spawn(self._load_manager.run(), "load manager")
        self._spawn(duties.run(), "duties")
        self._spawn(reports.run(), "load reports")
        self._spawn(self._upkeep.run(), "upkeep of the metadata store")
        self._spawn(self.attendance.run(), "attendance")
        if self._rejoins:
            returning = Returning(clock, view, membership, host, self._metrics, self._ttl_seconds)
            self._spawn(returning.run(), "returning")

    async def retire(self) -> None:
        """Call it before the last topics are sealed: from here on the leader assigns it none and moves none away."""
        with contextlib.suppress(Unavailable):
            await self.membership.retire()

    async def stop(self) -> None:
        """Ends everything and leaves the cluster. Topics should be sealed before."""
        tasks = [*self._tasks, *self._background]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(Unavailable):  # then the lease runs out by itself
            await self.membership.leave()

    def _spawn(self, work: Coroutine[Any, Any, Any], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._finish)
        self._tasks.append(task)

    def fail(self, error: Exception) -> None:
        """Something without which this broker cannot serve is gone: it must stop, and others take its topics."""
        if self.ended is not None and not self.ended.done():
            self.ended.set_exception(error)

    def _finish(self, task: asyncio.Task[Any]) -> None:
        """No part of this ends by itself: one that does ends the broker. Await `ended` to hear of it."""
        assert self.ended is not None
        if not task.cancelled() and not self.ended.done() and (error := task.exception()) is not None:
            log.error("part of the cluster ended", extra={"part": task.get_name()}, exc_info=error)
            self.ended.set_exception(error)

    def _notice(self, operations: Sequence[Put | Delete], revision: Revision) -> None:
        self.view.notice(operations, revision)

    # --- questions ----------------------------------------------------------------------------------

    @property
    def broker(self) -> BrokerId:
        return self.membership.broker

    @property
    def session(self) -> int:
        """For owner keys. Another one after this broker was declared dead."""
        return self.membership.session

    @property
    def registered(self) -> Compare:
        """Part of every claim."""
        return self.membership.registered

    def may_serve(self) -> bool:
        """Whether this broker may acknowledge and dispatch now."""
        return self.membership.may_serve()

    @property
    def leader(self) -> BrokerId | None:
        return self.view.leader.value if self.view.leader else None

    @property
    def peers(self) -> Mapping[BrokerId, BrokerRegistration]:
        """All living brokers, this one among them."""
        return {broker: seen.value for broker, seen in self.view.registrations.items()}

    def state_of(self, broker: BrokerId) -> BrokerState | None:
        seen = self.view.states.get(broker)
        return seen.value if seen else None

    @property
    def mode(self) -> BrokerMode:
        state = self.state_of(self.broker)
        return state.mode if state else BrokerMode.DRAINED

    def host_of(self, topic: TopicName) -> BrokerId | None:
        """Who serves the topic, by exactly this name."""
        return self.view.hosts.get(topic)

    def marker_of(self, topic: TopicName) -> Marker | None:
        seen = self.view.markers.get(topic)
        return seen.value if seen else None

    # --- work that outlasts its request -------------------------------------------------------------

    def rebalance_in_background(self, order: Rebalanced) -> None:
        """After `requests.rebalance` began some of its moves: the others. A later order takes the place of this one."""
        if self._rebalancing is not None:
            self._rebalancing.cancel()
        task = asyncio.create_task(self._rebalance_on(order), name="rebalancing")
        self._rebalancing = task
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _rebalance_on(self, order: Rebalanced) -> None:
        try:
            await self.requests.rebalance_on(order.moves, order.rest)
        except Unavailable as error:
            log.warning("rebalancing ends", extra={"why": str(error)})


def rules_of(config: LoadManagerConfig) -> Rules:
    return Rules(
        enabled=config.rebalancing_enabled,
        threshold=THRESHOLDS[config.aggressiveness],
        check_interval_seconds=config.check_interval_seconds,
        moves_per_hour_max=config.max_moves_per_hour,
        cooldown_seconds=config.cooldown_seconds,
        brokers_min=config.min_brokers_for_rebalance,
        topic_age_min_seconds=config.min_topic_age_seconds,
        blacklist=config.blacklist_topics,
    )
