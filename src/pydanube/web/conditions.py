"""What the cluster page says first: what is wrong, how many brokers are there, and what is not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from pydanube.admin import values
from pydanube.admin.gateway import KnownBroker
from pydanube.admin.samples import Samples
from pydanube.admin.series import Thing
from pydanube.core.cluster.cluster_conditions import Life
from pydanube.core.cluster.conditions import Severity
from pydanube.web import formats
from pydanube.web.views import Chip, broker_chip

SHOWN_MAX: Final = 20


class Banner(NamedTuple):
    """`unknown` says why nothing is known of how the cluster is doing; empty: it is."""

    conditions: Sequence[values.ReportedCondition] = ()
    more: int = 0
    unknown: str = ""

    @property
    def kind(self) -> str:
        is_critical = any(each.severity == Severity.CRITICAL for each in self.conditions)
        return "bad" if is_critical or self.unknown else "warn"


def banner(status: values.ClusterStatus | None, why: str) -> Banner:
    if status is None:
        return Banner(unknown=why or "no broker says it")
    return Banner(status.conditions[:SHOWN_MAX], max(len(status.conditions) - SHOWN_MAX, 0))


def is_complete(status: values.ClusterStatus | None, samples: Samples) -> bool:
    """Whether a sum over all topics has all of them in it."""
    return not samples.failures and status is not None and status.lag_messages.is_complete


class BrokerLine(NamedTuple):
    """A row of the table of brokers. Without `thing` its rates are not known; without `broker` it is not registered."""

    broker_id: str
    address: str
    chip: Chip
    topics: int
    broker: KnownBroker | None
    thing: Thing | None
    is_leader: bool
    load: Any
    own: values.BrokerFigures | None  # what it says of itself
    lease_age: float | None

    @property
    def status(self) -> str:
        return self.broker.status if self.broker is not None else ""

    @property
    def disk_share(self) -> float | None:
        own = self.own
        if own is None or not own.HasField("disk_used_bytes") or not own.HasField("disk_free_bytes"):
            return None
        total = own.disk_used_bytes + own.disk_free_bytes
        return own.disk_used_bytes / total if total else None

    def number(self, name: str) -> float | None:
        return getattr(self.own, name) if self.own is not None and self.own.HasField(name) else None

    def p99(self, name: str) -> float | None:
        """Seconds, of `publish` or `commit`."""
        return self._quantile(name, "p99_ms")

    def p50(self, name: str) -> float | None:
        return self._quantile(name, "p50_ms")

    def _quantile(self, name: str, which: str) -> float | None:
        latency = getattr(self.own, name) if self.own is not None else None
        return getattr(latency, which) / 1000 if latency is not None and latency.HasField(which) else None


def broker_lines(
    brokers: Sequence[KnownBroker],
    status: values.ClusterStatus | None,
    samples: Samples,
    owned: Mapping[str, int],
    loads: Mapping[str, Any],
) -> list[BrokerLine]:
    """Those that are registered, and those that were there in the last day."""
    states = {str(each.broker_id): each for each in status.brokers} if status is not None else {}
    found = []
    for each in brokers:
        state = states.get(each.broker_id)
        numbers = samples.numbers(each.broker_id)
        silent = each.broker_id in samples.failures or (state is not None and state.life != Life.ANSWERS)
        found.append(
            BrokerLine(
                each.broker_id,
                each.address,
                _chip(state) if state is not None and state.life != Life.ANSWERS else broker_chip(each, samples),
                owned.get(each.broker_id, 0),
                each,
                None if silent else samples.broker(each.broker_id),
                each.is_leader,
                loads.get(each.broker_id),
                state.status if state is not None and state.HasField("status") else None,
                None if silent or numbers is None else numbers.broker.get("danube_broker_lease_age_seconds"),
            )
        )
    present = {each.broker_id for each in brokers}
    for broker_id, state in states.items():
        if broker_id not in present:
            topics = owned.get(broker_id, state.topics)
            found.append(
                BrokerLine(broker_id, state.address, _chip(state), topics, None, None, False, None, None, None)
            )
    return found


def _chip(state: values.BrokerState) -> Chip:
    since = f" since {formats.clock(state.since_us / 1e6)}" if state.HasField("since_us") else ""
    kind = "warn" if state.life == Life.STOPPED else "bad"
    return Chip(kind, f"{state.life}{since}", state.why)
