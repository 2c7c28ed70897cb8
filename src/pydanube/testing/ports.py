"""Ports for servers of tests that run in parallel.

A port that is merely free when one looks may be taken before it is used: by another process that looked at the same
time, or by the kernel, for an outgoing connection. So every process of this user takes the next of one row, kept in a
file: a port comes up again only after all the others. None is of those that the kernel gives away.
"""

import fcntl
import os
import socket
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from pydanube.stores.metadata.etcd import CLIENT_PORT_OFFSET

SINGLES: Final = range(10_000, 20_000)
BLOCKS: Final = range(20_000, 32_000)


def free_ports(count: int, *, host: str = "127.0.0.1") -> list[int]:
    """So many, each for itself."""
    with _row("ports", SINGLES) as row:
        return [next(port for port in row if _free([port], host)) for _ in range(count)]


def free_block(count: int, *, members: int = 0, host: str = "127.0.0.1") -> int:
    """The first of so many neighbours. For etcd members on the first few, their clients' ports are free too."""
    if not 0 < count <= CLIENT_PORT_OFFSET:
        raise ValueError(f"a block has 1 to {CLIENT_PORT_OFFSET} ports, not {count}")
    with _row("blocks", BLOCKS) as row:
        for first in row:
            last = first + count - 1
            # Every second thousand is for the clients of those in the thousand below.
            if last not in BLOCKS or first // CLIENT_PORT_OFFSET % 2 or last // CLIENT_PORT_OFFSET % 2:
                continue
            if _free([*range(first, last + 1), *(first + CLIENT_PORT_OFFSET + each for each in range(members))], host):
                for _ in range(count - 1):  # they are given too
                    next(row)
                return first
    raise OSError("no free block of ports")  # pragma: no cover - the row has no end


def member_ports(count: int) -> list[int]:
    """Ports for the peers of etcd members, with those of their clients."""
    first = free_block(count, members=count)
    return [first + each for each in range(count)]


@contextmanager
def _row(name: str, ports: range) -> Iterator[Iterator[int]]:
    """What comes next; no other process takes any inside the block."""
    place = Path(tempfile.gettempdir()) / f"danube-{name}-{os.getuid()}"
    with place.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        taken = int(text) if text.isdecimal() else 0

        def numbers() -> Iterator[int]:
            nonlocal taken
            for _ in range(2 * len(ports)):
                taken += 1
                yield ports[(taken - 1) % len(ports)]
            raise OSError(f"nearly every port from {ports.start} to {ports.stop - 1} is taken")

        try:
            yield numbers()
        finally:
            file.truncate(0)
            file.write(str(taken % len(ports)))


def _free(ports: Iterable[int], host: str) -> bool:
    with ExitStack() as held:
        for port in ports:
            try:
                held.enter_context(socket.socket()).bind((host, port))
            except OSError:
                return False
    return True
