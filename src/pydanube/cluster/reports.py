"""This broker's load report, written every interval. It goes when the broker does: it is under its lease."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NoReturn

from pydanube.cluster.membership import Membership
from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.load import LoadReport
from pydanube.errors import Unavailable
from pydanube.ports import Clock, Put

log = logging.getLogger(__name__)

RETRY_SECONDS: Final = 1.0


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
        while True:
            wait = self._interval_seconds
            if self._membership.may_serve():
                key = keys.load(self._membership.broker)
                put = Put(key, self._report().to_bytes(), self._membership.lease.id)
                try:
                    await self._view.transact([self._membership.registered], [put])
                except Unavailable as error:
                    log.warning("load report delayed", extra={"why": str(error)})
                    wait = min(wait, RETRY_SECONDS)
            else:
                wait = min(wait, RETRY_SECONDS)
            await self._clock.sleep(wait)
