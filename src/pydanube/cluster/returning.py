"""This broker was away and is drained for it: with `rejoin: active` it takes topics again by itself, once it is home.

When that may be is decided in `core/cluster/returning.py`. Its host says whether it is home: what its disk
had of topics that others own now is in the store.
"""

from __future__ import annotations

import logging
from typing import Final, NoReturn

from pydanube.cluster.host import TopicHost
from pydanube.cluster.membership import Membership
from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.cluster.lifecycle import REJOINED
from pydanube.core.cluster.returning import Waiting, returned
from pydanube.errors import Unavailable
from pydanube.ports import Clock, Compare, Put
from pydanube.telemetry import ClusterMetrics

log = logging.getLogger(__name__)

RETURN_CHECK_SECONDS: Final = 1.0
RETURN_CHECK_SECONDS_MAX: Final = 10.0


class Returning:
    """Idle unless this broker is drained for having been away."""

    def __init__(
        self,
        clock: Clock,
        view: View,
        membership: Membership,
        host: TopicHost,
        metrics: ClusterMetrics,
        ttl_seconds: float,
    ) -> None:
        self._clock = clock
        self._view = view
        self._membership = membership
        self._host = host
        self._metrics = metrics
        self._ttl_seconds = ttl_seconds
        self._waiting = Waiting()
        self._said = ""

    async def run(self) -> NoReturn:
        looks = 0
        while True:
            version = self._view.version
            wait = RETURN_CHECK_SECONDS_MAX
            try:
                due = self._due()
                if due is not None:
                    looks += 1
                    wait = min(max(due - self._clock.elapsed(), RETURN_CHECK_SECONDS * looks), RETURN_CHECK_SECONDS_MAX)
                    if due <= self._clock.elapsed():
                        await self._try()
                else:
                    looks, self._said = 0, ""
                    await self._view.changed(version, wait)
                    continue
            except Unavailable as error:
                self._log_reason(f"the metadata store is away: {error}")
            await self._clock.sleep(wait)

    def _due(self) -> float | None:
        """When this broker may come back as far as time goes; None if that is no question."""
        me, now = self._membership.broker, self._clock.elapsed()
        seen = self._view.states.get(me)
        if seen is None or not seen.value.is_away or self._membership.is_retired:
            self._waiting.see(now, ())
            return None
        self._waiting.see(now, (me,))
        return self._waiting.due(now, me, seen.value, self._clock.time_us() // 1000, self._ttl_seconds)

    async def _try(self) -> None:
        """Becomes active, or says why not yet."""
        membership = self._membership
        session = membership.session
        if not membership.may_serve():
            return
        if why := await self._host.why_not_home():
            self._log_reason(why)
            return
        await self._view.refresh()
        seen = self._view.states.get(membership.broker)
        if seen is None or not seen.value.is_away or seen.value.session != session or membership.is_retired:
            return
        now_ms = self._clock.time_us() // 1000
        value = returned(seen.value, REJOINED, now_ms, self._ttl_seconds)
        key = keys.broker_state(membership.broker)
        compares = [Compare(key, seen.revision), membership.registered]
        if await self._view.transact(compares, [Put(key, value.to_bytes())]) is not None:
            self._metrics.returns[REJOINED] += 1
            log.warning(
                "broker was away and is home again: it takes topics by itself (rejoin: active)",
                extra={"broker_id": membership.broker, "was": seen.value.reason, "times": value.rejoins},
            )

    def _log_reason(self, why: str) -> None:
        if why != self._said:
            self._said = why
            log.info("broker stays drained for now", extra={"broker_id": self._membership.broker, "why": why})
