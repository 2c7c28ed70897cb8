"""One topic, as the uploader sees it: what waits, what failed, and what is due."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final

from pydanube.core.history.tiers import Retention, TierConfig
from pydanube.history.maintenance import Maintenance
from pydanube.history.tier import TopicTier
from pydanube.history.uploads import TopicUploads
from pydanube.log.topic_log import TopicLog

PAUSE_SECONDS_MIN: Final = 1.0
PAUSE_SECONDS_MAX: Final = 30.0


@dataclass(eq=False)
class UploadState:
    """`working` is held by whatever works on the topic: one task at a time."""

    uploads: TopicUploads
    log: TopicLog
    retention: Retention
    read_retention: Callable[[], Awaitable[Retention]] | None = None  # another broker may have changed what is stored
    pending_since: float | None = None
    blocked_until: float = 0.0
    failing: str = ""  # why the last try failed
    failing_since: float = 0.0
    retained_at: float = 0.0
    swept_at: float = 0.0
    flushed_since: float | None = None  # when the first flush was of which readers without a broker do not know yet
    is_slow: bool = False  # its last step took long
    working: asyncio.Lock = field(default_factory=asyncio.Lock)
    tier: TopicTier = field(init=False)
    maintenance: Maintenance = field(init=False)
    _pause_seconds: float = field(default=PAUSE_SECONDS_MIN, init=False)
    _seen: tuple[int, int] | None = field(default=None, init=False)  # head and descriptors when nothing was due

    def __post_init__(self) -> None:
        self.tier = self.uploads.tier
        self.maintenance = Maintenance(self.tier, self.uploads.maker)

    def begin(self, now: float) -> None:
        """The topic is uploaded from now on."""
        self.retained_at = self.swept_at = now
        self._seen = None

    @property
    def topic(self) -> str:
        return self.tier.topic

    @property
    def is_leaving(self) -> bool:
        """What begins now would only make the pause of a move longer."""
        return self.blocked_until == math.inf

    # --- what waits ---------------------------------------------------------------------------------------

    @property
    def uploaded_end(self) -> int:
        """Everything below that the log has is in the store."""
        waiting = self.uploads.waiting(self.log)
        return waiting[0] if waiting else self.log.head

    @property
    def lag_offsets(self) -> int:
        return self.log.head - self.uploaded_end

    @property
    def lag_bytes(self) -> int:
        """About how much of the log that is."""
        return self.log_bytes(self.uploaded_end)

    def log_bytes(self, first: int) -> int:
        """About how much of the log is at or behind `first`."""
        size = 0
        for segment in self.log.segments:
            end_offset = segment.end_offset
            if end_offset > first:
                first_offset = segment.first_offset
                if rows := end_offset - first_offset:
                    size += (segment.end - segment.start) * (end_offset - max(first, first_offset)) // rows
        return size

    # --- what is due --------------------------------------------------------------------------------------

    def note_waiting(self, now: float) -> tuple[int, int] | None:
        """What waits, and since when is noted. One comparison if nothing has changed since nothing did."""
        state = (self.log.head, len(self.tier.objects))
        if self._seen == state:
            return None
        waiting = self.uploads.waiting(self.log)
        if waiting is None:
            self._seen = state
        elif self.pending_since is None:
            self.pending_since = now
        return waiting

    def is_old(self, now: float, config: TierConfig) -> bool:
        """Something has waited for so long that all of it is to be uploaded, and not only what makes whole objects."""
        since = now if self.pending_since is None else self.pending_since
        return now - since >= config.upload_seconds

    def snapshot_is_due(self, now: float, config: TierConfig) -> bool:
        """What is flushed never waits for its interval: then those who are told of history wait for nothing, too."""
        return self.flushed_since is not None and now - self.flushed_since >= config.upload_seconds

    def retain_is_due(self, now: float, config: TierConfig) -> bool:
        return now - self.retained_at >= config.retention_check_seconds

    def sweep_is_due(self, now: float, config: TierConfig) -> bool:
        return now - self.swept_at >= (config.garbage_sweep_seconds if self.tier.garbage else config.sweep_seconds)

    # --- what failed --------------------------------------------------------------------------------------

    def failed(self, why: str, now: float) -> None:
        """The next try is made after a pause, twice as long as the last one."""
        if not self.failing:
            self.failing_since = now
        self.failing = why
        self.blocked_until = now + self._pause_seconds
        self._pause_seconds = min(self._pause_seconds * 2, PAUSE_SECONDS_MAX)

    def succeeded(self) -> None:
        self.failing = ""
        self._pause_seconds = PAUSE_SECONDS_MIN
