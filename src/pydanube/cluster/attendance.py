"""Runs while this broker leads: keeps the record of who is there and who was (core/cluster/presence.py)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, NoReturn

from pydanube.cluster.leadership import Leadership
from pydanube.cluster.view import View
from pydanube.core import keys
from pydanube.core.cluster.presence import Attendance, PresenceChange
from pydanube.errors import Unavailable
from pydanube.ports import Clock, Delete, Put

log = logging.getLogger(__name__)

RECORD_SECONDS: Final = 1.0  # at most so often: while topics come in the view changes all the time
RECORD_RETRY_SECONDS: Final = 2.0


class AttendanceWatch:
    """`on_change` is called with what happened: its kind, and a sentence."""

    def __init__(
        self,
        clock: Clock,
        view: View,
        leadership: Leadership,
        *,
        ttl_seconds: float,
        on_change: Callable[[str, str], None] = lambda kind, sentence: None,
    ) -> None:
        self._clock = clock
        self._view = view
        self._leadership = leadership
        self._ttl_seconds = ttl_seconds
        self._on_change = on_change

    async def run(self) -> NoReturn:
        pause = max(RECORD_SECONDS, self._ttl_seconds / 16)
        while True:
            if self._leadership.leads:
                try:
                    await self._lead()
                except Unavailable as error:
                    log.warning("record of brokers not kept", extra={"why": str(error)})
                    await self._clock.sleep(RECORD_RETRY_SECONDS)
            await self._clock.sleep(pause)

    async def _lead(self) -> None:
        await self._view.refresh()  # a view that is not complete would miss brokers that are there
        attendance = Attendance(self._ttl_seconds)
        pause = min(RECORD_SECONDS, self._ttl_seconds / 16)
        while self._leadership.leads:
            version = self._view.version
            for change in self._changes(attendance):
                if not await self._write(change):
                    await self._leadership.check()
                    break
            await self._clock.sleep(pause)
            await self._view.changed(version, self._ttl_seconds / 4)

    def _changes(self, attendance: Attendance) -> list[PresenceChange]:
        view = self._view
        return list(
            attendance.step(
                self._clock.elapsed(),
                self._clock.time_us() // 1000,
                alive={broker: seen.value for broker, seen in view.registrations.items()},
                states={broker: seen.value for broker, seen in view.states.items()},
                records={broker: seen.value for broker, seen in view.seen.items()},
                topics=view.assigned,
            )
        )

    async def _write(self, change: PresenceChange) -> bool:
        key = keys.seen(change.broker)
        operation = Delete(key) if change.record is None else Put(key, change.record.to_bytes())
        if await self._view.transact([self._leadership.guard, self._view.compare(key)], [operation]) is None:
            return False
        if change.sentence:
            self._on_change(change.kind, change.sentence)
        return True
