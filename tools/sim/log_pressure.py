"""What one history of the log puts under pressure: small limits, and faults aimed at single calls.

A limit that no history meets is not tested by any. So sizes, times and counts that are for large machines are drawn
small, some so small that they are met by nearly every group; what was met is counted (`limits_met`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from random import Random
from types import ModuleType
from typing import Any, Final

from pydanube.core.commit import machine
from pydanube.log import (
    committer,
    group_scan,
    journal_redo,
    journal_writer,
    reader,
    segment_maker,
    space,
    wal,
    zero_fill,
)
from pydanube.log.wal import Wal, WalConfig
from pydanube.testing.disk_faults import ERRORS, MEETS, DiskAim

# Constants of the log's modules, and what they may be in a history.
_CONSTANTS: Final[tuple[tuple[ModuleType, str, tuple[Any, ...]], ...]] = (
    (machine, "SYNC_COST_BYTES", (192 * 1024, 192 * 1024, 192 * 1024, 2048)),
    (zero_fill, "FILL_BELOW_BYTES", (64 * 1024, 1024)),
    (committer, "COPY_AFTER_SECONDS", (0.1, 0.1, 0.01, 0.001)),
    (zero_fill, "FILL_AFTER_SECONDS", (0.002, 0.0001)),
    (zero_fill, "FILL_FROM_GROUP", (3, 1)),
    (journal_writer, "COPY_FILES", (64, 2, 1)),
    (segment_maker, "MAKING_MAX", (8, 1)),
    (space, "_SHORT_SECONDS", (0.1, 0.001)),
    (space, "_SHORT_LINE_SECONDS", (10.0, 0.01)),
    (space, "_ROOM_CHECK_SECONDS", (0.25, 0.01)),
    (wal, "MANY_TOPICS", (1, 2, 3, 8)),
    (group_scan, "SCAN_READ_BYTES", (1024 * 1024, 700)),
    (journal_redo, "_REDO_BYTES", (8 * 1024 * 1024, 600)),
    (reader, "_PIECE_BYTES_MIN", (64 * 1024, 300)),
)
SESSIONS_END: Final = 0.3  # of the histories: sessions that are idle for a moment end, and there may be few
_FILL_BYTES: Final = (2048, 2048, 512)
# Where aimed faults go: everything, segments, journals, checkpoints, the ballast.
_PLACES: Final = ("", "", "", ".wal", "journal/", "wal.ckpt", "BALLAST")
_OPERATIONS: Final = (*MEETS, "sync_directory", "rename", "sync", "write")  # what changes names and bytes, more often
_NAMED: Final = {"BALLAST": ("create", "write", "sync", "size", "remove")}


@dataclass(frozen=True, slots=True)
class Pressure:
    """The limits of one history."""

    config: WalConfig
    constants: tuple[Any, ...]
    fill_bytes: int

    @classmethod
    def draw(cls, rng: Random) -> Pressure:
        config = WalConfig(
            segment_bytes=rng.choice((1024, 8192, 65536, 65536)),
            segment_seconds=rng.choice((0.02, 3600.0, 3600.0, 3600.0)),
            group_bytes=rng.choice((1024, 16384, 65536)),
            journal_bytes=rng.choice((4096, 8192, 16384, 32768)),
            copy_bytes=rng.choice((1024, 8192)),
            cache_bytes=rng.choice((0, 8192, 1 << 20)),
            pending_bytes=rng.choice((1024, 4096, 1 << 20)),
            ballast_bytes=rng.choice((0, 4096)),
            bytes_max=rng.choice((0, 0, 0, 20_000, 60_000)),
        )
        own = Random(repr(config))
        if own.random() < SESSIONS_END:
            few = own.choice((1, 2, 20_000))
            config = replace(config, session_seconds=0.05, watched_seconds=0.02, sessions_max=few)
        return cls(config, tuple(rng.choice(values) for _, _, values in _CONSTANTS), rng.choice(_FILL_BYTES))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The log's modules have these constants until it ends."""
        saved = [getattr(module, name) for module, name, _ in _CONSTANTS]
        saved_fill = zero_fill.FILL_BYTES, zero_fill._ZEROS
        for (module, name, _), value in zip(_CONSTANTS, self.constants, strict=True):
            setattr(module, name, value)
        zero_fill.FILL_BYTES, zero_fill._ZEROS = self.fill_bytes, bytes(self.fill_bytes)  # type: ignore[misc]
        try:
            yield
        finally:
            zero_fill.FILL_BYTES, zero_fill._ZEROS = saved_fill  # type: ignore[misc]
            for (module, name, _), value in zip(_CONSTANTS, saved, strict=True):
                setattr(module, name, value)


def draw_aim(rng: Random, seconds: float) -> DiskAim:
    """One call of one boot that lasts about so many seconds, and what it meets."""
    if rng.random() < 0.1:  # a record of a journal, which not many calls are
        operation = rng.choice(("sync", "sync", "write"))
        return DiskAim(operation, rng.randint(1, 4), rng.choice(("EIO", "EIO", "lost", "power")), ".journal")
    where = rng.choice(_PLACES)
    operation = rng.choice(_NAMED.get(where) or _OPERATIONS)
    if operation in ("make_directory", "sync_directory") and where != "journal/":
        where = rng.choice(("", "/0000"))  # those of epochs
    elif operation in ("list", "free_bytes") and where != "journal/":
        where = ""
    return DiskAim(
        operation,
        rng.randint(1, rng.choice((1, 1, 4, 12, 40))),
        rng.choice([what for what in MEETS[operation] if what in ERRORS or rng.random() < 0.5]),
        where,
        seconds=rng.random() * rng.choice((0.05, seconds, 3 * seconds)),
        early=rng.random() < 0.5,
    )


def limits_met(opened: Wal, counts: Counter[str]) -> None:
    """Adds which limits a log met while it was open."""
    for why, count in opened.metrics.rotations.items():
        counts[f"limit: segments full ({why})"] += count
    inside = opened.committer
    counts["limit: journals full"] += max(0, inside._journal.journals_made - 1)
    counts["groups"] += inside.groups
    counts["groups in a journal"] += inside.journaled_groups
