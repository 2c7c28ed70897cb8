"""How many connections a gRPC server may have.

gRPC counts connections only to cut off what is beyond a bound, without a word. So there are two: up to `limit` a
connection is served, for some beyond it every call is answered with a sentence (UNAVAILABLE, which clients try again
elsewhere or later), and what is beyond those is cut off.

gRPC does not say who is connected. The sockets of this process do, and are looked at only when an unknown peer calls
and the last look may not hold any more: after one that found n, `limit` - n new peers are let in unseen.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable
from time import perf_counter
from typing import Final

from pydanube.errors import TooManyConnections

PLACES: Final = ("/proc/self/fd", "/dev/fd")
TOLD_MIN, TOLD_MAX = 8, 64  # connections beyond the limit that hear why
LOOK_SHARE: Final = 20  # a look is repeated after so many times as long as it took
LOOK_SECONDS_MIN: Final = 0.05


class Admission:
    """At most `limit` connections at one port, because the process may have `open_files` open files."""

    def __init__(self, limit: int, open_files: int, peers: Callable[[int], set[int] | None] | None = None) -> None:
        self.limit = limit
        self._port = 0
        self._open_files = open_files
        self._peers = peers or peers_at
        self._known: set[str] = set()
        self._unseen = limit  # peers that may be let in before the next look
        self._look_after = 0.0

    @property
    def cut_off(self) -> int:
        """So many connections hear anything at all."""
        return self.limit + min(max(TOLD_MIN, self.limit // 4), TOLD_MAX)

    @property
    def option(self) -> tuple[str, int]:
        """For gRPC's server: where it cuts off."""
        return "grpc.max_allowed_incoming_connections", self.cut_off

    def listens(self, port: int) -> None:
        """The server is bound, and connections may come."""
        self._port = port

    def check(self, peer: str) -> None:
        """Raises TooManyConnections for a peer that came when there were enough."""
        if peer in self._known:
            return
        if self._unseen <= 0:
            self._look()
        if self._unseen <= 0:
            raise TooManyConnections(self.limit, self._open_files)
        self._unseen -= 1
        self._known.add(peer)

    def _look(self) -> None:
        began = perf_counter()
        if began < self._look_after:
            return
        ports = self._peers(self._port)
        took = perf_counter() - began
        self._look_after = began + took + max(LOOK_SECONDS_MIN, took * LOOK_SHARE)
        if ports is None:
            self._unseen, self._known = self.limit, set()  # not known on this system: gRPC's own bound has to do
            return
        self._known = {peer for peer in self._known if _port(peer) in ports}
        # Unknown peers are connected and have not been admitted: the caller is one of them.
        self._unseen = self.limit - len(self._known)


def peers_at(port: int) -> set[int] | None:
    """The ports of those who are connected to ours; None if the system does not say."""
    place = next((place for place in PLACES if os.path.isdir(place)), None)
    if place is None:
        return None
    found = set()
    for name in os.listdir(place):
        try:
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            one = socket.socket(fileno=fd)
        except (OSError, ValueError):
            continue  # closed since
        try:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                found.add(int(one.getpeername()[1]))
        except OSError:
            pass  # it listens, or has ended
        finally:
            one.detach()  # it is gRPC's
    return found


def _port(peer: str) -> int:
    """Of ipv4:127.0.0.1:4711."""
    port = peer.rpartition(":")[2]
    return int(port) if port.isdigit() else 0
