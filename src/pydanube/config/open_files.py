"""Open files: how many this process may have, and who in it may have how many.

    limit │ rest              │ files of the log │ native │ gRPC  │ admin │ HTTP │
          │ an eighth, 80 and │ a fourth         │ of what is left: a half, a    │
          │ more              │                  │ third, a ninth, the rest      │

A socket is an open file too, so without bounds a flood of connections takes away what the log needs to open a segment.
`rest` is for what is not counted: listening ports, the event loop, the metadata store, objects on their way, a
directory that is being synced. A part that has used its share up waits, closes something first, or refuses with a
sentence; none takes another's.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final, NamedTuple

REST_MIN: Final = 80
FILES_MIN, FILES_MAX = 16, 16_384
# A limit "without limit" is not taken by its word: some programs close every number up to it when they start others.
LIMIT_MAX: Final = 1 << 20


class OpenFiles(NamedTuple):
    """A limit and its shares."""

    limit: int
    files: int  # of the log
    native: int  # connections, as are the following
    grpc: int
    admin: int
    http: int  # of metrics and of the web admin, each


def shares(limit: int) -> OpenFiles:
    """Who may have how many of `limit`. With fewer than about 128 even one of each is not for sure."""
    rest = max(REST_MIN, limit // 8)
    files = min(max(FILES_MIN, limit // 4), FILES_MAX)
    left = max(0, limit - rest - files)
    native, grpc, admin = left // 2, left // 3, left // 9
    http = (left - native - grpc - admin) // 2
    return OpenFiles(limit, files, max(1, native), max(1, grpc), max(1, admin), max(1, http))


def current() -> OpenFiles:
    """The shares of the limit that holds now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return shares(LIMIT_MAX if soft == resource.RLIM_INFINITY else min(soft, LIMIT_MAX))


def raise_limit() -> OpenFiles:
    """Takes all that the system allows this process, which needs no rights; returns the shares of that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LIMIT_MAX if hard == resource.RLIM_INFINITY else min(hard, LIMIT_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a system with a bound of its own: what there is has to do
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return current()
