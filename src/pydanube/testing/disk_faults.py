"""What may happen to a simulated disk, at random or at a call that is aimed at, and the errors that a process got."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

# What an unbounded disk says it has left.
FREE_BYTES_UNBOUNDED: Final = 1 << 40

ERRORS: Final = {"EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EMFILE": errno.EMFILE, "lost": errno.EIO}

_ENDS: Final = ("delay", "hang", "kill", "power")

# What an aimed call may meet. `lost`: it is done, and its caller gets EIO. EMFILE: if it has to open something. A
# rename opens the directory for the sync that follows, which therefore never lacks a descriptor.
MEETS: Final[Mapping[str, tuple[str, ...]]] = {
    "create": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "write": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "sync": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "truncate": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "read": ("EIO", "EMFILE", *_ENDS),
    "size": ("EIO", "EMFILE", *_ENDS),
    "sync_directory": ("EIO", "EMFILE", "lost", *_ENDS),
    "make_directory": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "list": ("EIO", "EMFILE", *_ENDS),
    "rename": ("EIO", "ENOSPC", "EMFILE", "lost", *_ENDS),
    "remove": ("EIO", "lost", *_ENDS),
    "free_bytes": ("EIO", *_ENDS),
}


@dataclass(slots=True)
class DiskAim:
    """The `number`-th call of `operation`, from 1, on a path that contains `where`: there, `what` happens, once."""

    operation: str
    number: int
    what: str
    where: str = ""
    seconds: float = 1.0  # of a delay
    early: bool = True  # a kill or a power cut comes before the call's effect, or behind it
    hit: str | None = None  # the path, once it has happened

    def __post_init__(self) -> None:
        assert self.what in MEETS[self.operation], f"{self.operation} never meets {self.what}"
        assert self.number > 0


class Told(NamedTuple):
    """A call failed, and its process got the error. `again`: because an earlier one of the same file had."""

    operation: str
    path: str
    why: str  # of ERRORS
    again: bool = False


@dataclass(slots=True)
class Faults:
    """How often, of one call or one file in it. May be changed while the disk runs."""

    sync_fails: float = 0.0
    write_fails: float = 0.0
    read_fails: float = 0.0
    directory_sync_fails: float = 0.0
    # Of the failed syncs: later ones of that file by that process fail too (else they seem to succeed).
    sync_failure_stays: float = 0.5
    delays: float = 0.0
    delay_seconds_max: float = 1.0
    # What an ordinary call takes at most; 0 for a disk that only lets others run.
    latency_seconds_max: float = 0.0002
    # Of the power cuts: sectors that were never written show bytes that used to stand elsewhere.
    stale_sectors: float = 0.1
    # Paths that contain this are slow ("": none is).
    slow: str = ""
    slow_seconds_max: float = 0.05
    # Files with unsynced writes that one process keeps open; None: as many as it likes.
    open_files_max: int | None = None
    # Of the calls that open something.
    no_descriptor: float = 0.0
    overwrites_need_space: bool = False
    names_need_space: bool = False
