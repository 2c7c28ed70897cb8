"""The settings of the log, checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydanube.core.commit.sessions import IDLE_HOURS_DEFAULT, SESSIONS_DEFAULT, SESSIONS_LIMIT
from pydanube.core.units import MIB
from pydanube.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """Defaults run well on a laptop; the small values that tests use are allowed."""

    segment_bytes: int = 64 * MIB
    segment_seconds: float = 24 * 3600.0
    group_bytes: int = 8 * MIB
    journal_bytes: int = 32 * MIB
    copy_bytes: int = 4 * MIB
    cache_bytes: int = 256 * MIB
    pending_bytes: int = 64 * MIB
    ballast_bytes: int = 16 * MIB
    sessions_max: int = field(default=SESSIONS_DEFAULT, repr=False)  # of one topic: then no producer opens another
    session_seconds: float = field(default=IDLE_HOURS_DEFAULT * 3600.0, repr=False)  # unused for so long it ends
    # And only when this process has itself had the log open for so long: a clock that is wrong at the start must not
    # end a session of which something may be resent. Clients resend for a day (core/producing/machine.py).
    watched_seconds: float = field(default=36 * 3600.0, repr=False)
    # Of the segments of all topics: then publishes are refused. 0: the disk is the bound. No part of a seed's meaning.
    bytes_max: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        for name in ("segment_bytes", "group_bytes", "journal_bytes", "copy_bytes", "pending_bytes"):
            if getattr(self, name) < 1024:
                raise ConfigError(f"wal.{name}", getattr(self, name), "at least 1024 bytes")
        if self.segment_bytes + self.group_bytes > 2**31:
            raise ConfigError("wal.segment_bytes", self.segment_bytes, "with wal.group_bytes, at most 2 GiB")
        if self.segment_seconds <= 0:
            raise ConfigError("wal.segment_seconds", self.segment_seconds, "more than 0")
        if self.session_seconds <= 0:
            raise ConfigError("wal.session_seconds", self.session_seconds, "more than 0")
        if not 1 <= self.sessions_max <= SESSIONS_LIMIT:
            raise ConfigError("wal.sessions_max", self.sessions_max, f"1 to {SESSIONS_LIMIT}")
        for name in ("cache_bytes", "ballast_bytes", "bytes_max"):
            if getattr(self, name) < 0:
                raise ConfigError(f"wal.{name}", getattr(self, name), "0 or more")
