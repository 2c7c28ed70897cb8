"""One lease and the time it gives.

Small on purpose, and free of everything else: a broker may run `keep` on a loop in a thread of its own, so that a busy
broker is not taken for a dead one. `healthy` then tells whether the broker's own loop still turns; while it does not,
nothing is renewed, because a broker that is stuck must not keep its topics.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from typing import NoReturn

from pydanube.core.cluster.lifecycle import answer_timeout, renewal_interval, retry_delay, serve_until
from pydanube.core.names import BrokerId
from pydanube.errors import LeaseLost, Unavailable
from pydanube.ports import Clock, LeaseId, MetadataStore

log = logging.getLogger(__name__)


class BrokerLease:
    """`id` is 0 while there is none."""

    def __init__(
        self,
        broker: BrokerId,
        store: MetadataStore,
        clock: Clock,
        ttl_seconds: float,
        healthy: Callable[[], bool] = lambda: True,
    ) -> None:
        self._broker = broker
        self._store = store
        self._clock = clock
        self._healthy = healthy
        self.ttl_seconds = ttl_seconds
        self.id: LeaseId = 0
        self._sent = -math.inf  # when the last renewal was sent that was answered
        self._warned = False

    @property
    def serve_until(self) -> float:
        return serve_until(self._sent, self.ttl_seconds)

    def may_serve(self) -> bool:
        """Whether the lease certainly lasts a while longer, by this machine's clock alone."""
        return self._clock.elapsed() < serve_until(self._sent, self.ttl_seconds)

    async def grant(self) -> LeaseId:
        """A new lease in place of the old one."""
        sent = self._clock.elapsed()
        self.id = await self._store.grant(self.ttl_seconds)
        self._sent, self._warned = sent, False
        return self.id

    async def keep(self) -> NoReturn:
        """Renews as long as there is something to renew; then raises LeaseLost. Nothing else ends it."""
        failures = 0
        wait = renewal_interval(self.ttl_seconds)
        while True:
            await self._clock.sleep(wait)
            sent = self._clock.elapsed()
            try:
                if not self._healthy():
                    raise Unavailable("the broker's event loop is stuck")
                async with asyncio.timeout(answer_timeout(self.ttl_seconds)):
                    await self._store.renew(self.id)
            except LeaseLost:
                self.drop()
                raise
            except (Unavailable, TimeoutError) as error:
                failures += 1
                self._log_failure(failures, error)
                wait = retry_delay(failures, self.ttl_seconds)
            else:
                failures = 0
                self._sent, self._warned = sent, False
                wait = renewal_interval(self.ttl_seconds)

    def drop(self) -> None:
        """There is no lease any more."""
        self.id = 0
        self._sent = -math.inf

    def _log_failure(self, failures: int, error: Exception) -> None:
        # By the clock, not by adding up what was slept: a machine that was suspended has failed all the time.
        failing = self._clock.elapsed() - self._sent
        log.error(
            "Failed to renew broker registration",
            extra={
                "broker_id": self._broker,
                "failures": failures,
                "consecutive_failure_ms": round(failing * 1000),
                "error": str(error) or type(error).__name__,
            },
        )
        if failing > self.ttl_seconds and not self._warned:
            self._warned = True
            log.warning(
                "Registration likely expired (failures > TTL). Will register as drained on recovery, "
                "if the leader declared this broker dead.",
                extra={"broker_id": self._broker},
            )
