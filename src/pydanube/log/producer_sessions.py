"""Sessions of producers of one open log: begun and ended by records in it. docs/adr/0001 has the rules.

`core/commit/sessions.py` judges batches by them. Here is when a session may begin, and when one that is idle ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from pydanube.core.commit.machine import SESSIONS
from pydanube.core.commit.values import CommitReceipt
from pydanube.errors import LimitReached
from pydanube.formats.batch import Batch, session_end, session_record
from pydanube.log.commit_context import Answer, SegmentedLog
from pydanube.log.wal_config import WalConfig
from pydanube.ports import Clock
from pydanube.telemetry import WalMetrics

log = logging.getLogger(__name__)

ENDS_AT_ONCE: Final = 1_000  # records that a look at the sessions makes


class ProducerSessions:
    """Of one log, from its opening on."""

    def __init__(
        self,
        of: SegmentedLog,
        submit: Callable[[Batch], Answer],
        clock: Clock,
        config: WalConfig,
        metrics: WalMetrics,
    ) -> None:
        self._log = of
        self._submit = submit
        self._clock = clock
        self._config = config
        self._metrics = metrics
        self.opening: dict[int, int] = {}  # producer -> newest session that is being opened and not stored yet
        self._opened_at, self._opened_us = clock.elapsed(), clock.time_us()

    async def open(self, producer_id: int) -> int:
        """A new session for this producer, durably; older ones are refused from now on. Raises LimitReached."""
        of = self._log
        if of.sessions.get(producer_id) is None and self._is_full():
            await asyncio.gather(*self.end_idle(is_sure=False), return_exceptions=True)
            if self._is_full():
                raise LimitReached(SESSIONS, self._config.sessions_max)
        session = max(of.sessions.next_session(producer_id, of.epoch), self.opening.get(producer_id, 0) + 1)
        self.opening[producer_id] = session
        try:
            await self._submit(session_record(topic=of.topic, producer_id=producer_id, session=session))
        finally:
            if self.opening.get(producer_id) == session:
                del self.opening[producer_id]
        return session

    def _is_full(self) -> bool:
        sessions = self._log.sessions
        opening = sum(sessions.get(producer_id) is None for producer_id in self.opening)
        return len(sessions) + opening >= self._config.sessions_max

    def end_idle(self, *, is_sure: bool) -> list[Answer]:
        """Ends sessions that were not used for `session_seconds`, some at a time. Each end is a record.

        Not `is_sure`: a lost owner may have messages that are not known here yet. As long as unknown sessions are
        adopted, none may be forgotten: its resend would be stored again.
        """
        sessions, config = self._log.sessions, self._config
        watched = self._clock.elapsed() - self._opened_at
        if sessions.adopts_unknown:
            # A producer that sent nothing for so long in this epoch has a session that would have ended.
            if not is_sure or watched < max(config.session_seconds, config.watched_seconds):
                return []
            sessions.adopts_unknown = False
        if watched < config.watched_seconds:
            return []
        # The clock as it was when the log was opened, and then the time that passed, or the clock if that says less: a
        # jump in either direction makes sessions last longer, never shorter.
        now = min(self._opened_us + int(watched * 1_000_000), self._clock.time_us())
        ending = []
        for producer_id, known in sessions.idle(now - int(config.session_seconds * 1_000_000), now, ENDS_AT_ONCE):
            record = session_end(
                topic=self._log.topic, producer_id=producer_id, session=known.session, next_sequence=known.next_sequence
            )
            ending.append(self._submit(record))
            ending[-1].add_done_callback(self._ended)
        if ending:
            log.info("idle sessions of producers end", extra={"topic": self._log.topic, "sessions": len(ending)})
        return ending

    def _ended(self, ended: asyncio.Future[CommitReceipt]) -> None:
        if not ended.cancelled() and ended.exception() is None:  # else it goes on: it was used since, or no room
            self._metrics.sessions_ended.inc()
