"""A network of our own for processes that are broken on purpose, so that cables can be pulled and disks can be small.

    front   10.77.1.0/24    clients ─ brokers, brokers among themselves
    back    10.77.2.0/24    brokers ─ etcd and the object store

Where the kernel permits it (root, or CAP_SYS_ADMIN and CAP_NET_ADMIN), the harness leaves the machine's network and
mounts for its own, and every broker gets a namespace with one cable to each of the two switches. A cable is pulled at
the switch: the sender sees no error, as with a real one. Nothing outside is touched, and when the harness is gone,
however it went, all of it is gone: the kernel keeps namespaces only as long as a process has them open.

Elsewhere everything is on 127.0.0.1, and what needs more is skipped: `why_not` says so.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

from pydanube.testing.ports import free_ports

Side: TypeAlias = Literal["front", "back"]

SIDES: Final[tuple[Side, Side]] = ("front", "back")
SUBNETS: Final = {"front": "10.77.1", "back": "10.77.2"}
LOOPBACK: Final = "127.0.0.1"
CLONE_NEWNS: Final = 0x0002_0000
CLONE_NEWNET: Final = 0x4000_0000
MS_REC: Final = 0x4000
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2
GUARD: Final = Path(__file__).with_name("guard.py")


class Network:
    """Addresses, and cables where there are any. Make it before anything else: threads stay where they were made."""

    def __init__(self, brokers: int, *, private: bool = True) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._namespaces: list[int] = []
        self.why_not = self._leave() if private else "it was not asked for"
        if not self.why_not:
            self._build(brokers)

    @property
    def private(self) -> bool:
        return not self.why_not

    def address(self, side: Side, broker: int | None = None) -> str:
        """Of a broker, or of the machine of all other processes."""
        if not self.private:
            return LOOPBACK
        return f"{SUBNETS[side]}.{1 if broker is None else 10 + broker}"

    def ports(self, count: int) -> list[int]:
        """Free here, and given once; in a broker's own namespace they are free anyway."""
        return free_ports(count, host="")

    def cut(self, side: Side, broker: int) -> None:
        self._ip("link", "set", f"{side}{broker}", "nomaster")

    def mend(self, side: Side, broker: int) -> None:
        self._ip("link", "set", f"{side}{broker}", "master", side)

    def small_disk(self, path: Path, megabytes: int) -> None:
        """A file system of its own for a directory. Raises OSError."""
        self._check(self._libc.mount(b"none", bytes(path), b"tmpfs", 0, f"size={megabytes}m".encode()))

    def remove_disk(self, path: Path) -> None:
        self._libc.umount2(bytes(path), MNT_DETACH)

    def guarded(self, command: Sequence[str], broker: int | None = None) -> list[str]:
        """The command in its place, as a program that does not outlive us (guard.py)."""
        return [sys.executable, "-I", "-S", str(GUARD), str(os.getpid()), self._place(broker), *command]

    # --- inside -------------------------------------------------------------------------------------------------

    def _leave(self) -> str:
        """Takes this process to a network and mounts of its own; says why it cannot."""
        if sys.platform != "linux":
            return "network namespaces exist on Linux only"
        if shutil.which("ip") is None:
            return "the command ip is missing (Debian, Ubuntu: apt-get install iproute2)"
        try:
            self._check(self._libc.unshare(CLONE_NEWNET | CLONE_NEWNS))
            self._check(self._libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None))
        except OSError as error:
            return f"no network namespaces here ({error.strerror}): try as root"
        return ""

    def _build(self, brokers: int) -> None:
        self._ip("link", "set", "lo", "up")
        for side in SIDES:
            self._ip("link", "add", side, "type", "bridge")
            self._ip("address", "add", f"{self.address(side)}/24", "dev", side)
            self._ip("link", "set", side, "up")
        for broker in range(brokers):
            self._namespaces.append(self._namespace())
            self._ip("link", "set", "lo", "up", broker=broker)
            for side in SIDES:
                cable = f"{side}{broker}"
                peer = ("peer", "name", side, "netns", self._place(broker))
                self._ip("link", "add", cable, "type", "veth", *peer)
                self._ip("link", "set", cable, "master", side, "up")
                self._ip("address", "add", f"{self.address(side, broker)}/24", "dev", side, broker=broker)
                self._ip("link", "set", side, "up", broker=broker)

    def _namespace(self) -> int:
        """Another network, as a file that keeps it."""
        ours = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._check(self._libc.unshare(CLONE_NEWNET))
            made = os.open("/proc/self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            self._check(self._libc.setns(ours, CLONE_NEWNET))
        finally:
            os.close(ours)
        return made

    def _place(self, broker: int | None) -> str:
        """The file that is a broker's network, as others can open it."""
        return "-" if broker is None or not self._namespaces else f"/proc/{os.getpid()}/fd/{self._namespaces[broker]}"

    def _ip(self, *words: str, broker: int | None = None) -> None:
        command = self.guarded(["ip", *words], broker)
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
        if done.returncode:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.strip() or done.returncode}")

    def _check(self, result: int) -> None:
        if result:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
