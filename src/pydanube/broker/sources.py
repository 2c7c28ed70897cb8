"""What telemetry asks of a broker at each scrape."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Final

from pydanube.cluster.cluster import ClusterNode
from pydanube.core.cluster.lifecycle import BrokerMode, serve_until
from pydanube.ports import Clock
from pydanube.telemetry import ClusterNow

LEASE_AGE_MAX_SECONDS: Final = 1e9


def program_version() -> str:
    try:
        return version("pydanube")
    except PackageNotFoundError:  # run from its sources
        return "unknown"


def cluster_now(cluster: ClusterNode, clock: Clock, moving: int) -> ClusterNow:
    lease = cluster.membership.lease
    sent = lease.serve_until - serve_until(0.0, lease.ttl_seconds)
    state = cluster.state_of(cluster.broker)
    return ClusterNow(
        state=cluster.mode.value,
        is_leader=cluster.leader == cluster.broker,
        brokers=len(cluster.peers),
        # Without a lease it is as old as can be.
        lease_age_seconds=min(clock.elapsed() - sent, LEASE_AGE_MAX_SECONDS),
        lease_ttl_seconds=lease.ttl_seconds,
        may_serve=cluster.may_serve(),
        unassigned=sum(seen.value.is_free for seen in cluster.view.markers.values()),
        moving=moving,
        imbalance=cluster.requests.balance().variation if cluster.leader == cluster.broker else None,
        drained_for=state.reason if state is not None and state.mode is BrokerMode.DRAINED else "",
        crashes=state.crashes if state is not None else 0,
    )
