"""This broker's load report, written every interval. It goes when the broker does: it is under its lease.

Topics in which nothing happens are in a value of their own, which is seldom written (`core/cluster/load.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NoReturn

from pydanube.cluster.membership import Membership
from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.cluster.load import LoadReport, Reporting
from pydanube.errors import Unavailable
from pydanube.ports import Clock, LeaseId, Put

log = logging.getLogger(__name__)

REPORT_RETRY_SECONDS: Final = 1.0


class Reports:
    def __init__(
        self,
        clock: Clock,
        view: View,
        membership: Membership,
        report: Callable[[], LoadReport],
        interval_seconds: float,
    ) -> None:
        self._clock = clock
        self._view = view
        self._membership = membership
        self._report = report
        self._interval_seconds = interval_seconds

    async def run(self) -> NoReturn:
        reporting, under = Reporting(), self._membership.lease.id
        while True:
            wait = min(self._interval_seconds, REPORT_RETRY_SECONDS)
            if self._membership.may_serve():
                broker, lease = self._membership.broker, self._membership.lease.id
                if lease != under:  # with the last one went what was written
                    reporting, under = Reporting(), lease
                written = reporting.step(self._clock.elapsed(), self._report())
                try:
                    # One after the other: together they may be more than a transaction holds.
                    is_written = written.quiet is None or await self._put(keys.quiet_load(broker), written.quiet, lease)
                    if is_written and await self._put(keys.load(broker), written.report, lease):
                        wait = self._interval_seconds
                    else:
                        reporting = Reporting()
                except Unavailable as error:
                    log.warning("load report delayed", extra={"why": str(error)})
                    reporting = Reporting()
            await self._clock.sleep(wait)

    async def _put(self, key: str, value: bytes, lease: LeaseId) -> bool:
        return await self._view.transact([self._membership.registered], [Put(key, value, lease)]) is not None
