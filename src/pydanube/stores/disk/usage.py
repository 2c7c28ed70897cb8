"""How busy the machine is, as Linux tells it: CPU, memory, disk.

    in a container with a limit     its control group (version 2): of the CPU and memory that it may have
    otherwise                       /proc: of what the machine has

Not what the broker alone uses: a broker next to a busy neighbour has no capacity left either. What cannot be read is
unknown. On other systems everything is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final, TypeAlias

from pydanube.core.cluster.load import ResourceUsage

ROOT: Final = Path("/")
READINGS_MAX: Final = 5  # the mean is over four reports: two minutes, unless it is set otherwise
WHOLE: Final = 100.0
SECTORS_FIELDS_MIN: Final = 13  # of a line in /proc/diskstats; the last one is the time it was busy, in milliseconds


# What was used, and how much there was; None: it could not be read.
Readings: TypeAlias = deque[tuple[float, float] | None]


class MachineUsage:
    """CPU and disk are means over the last few readings, so the first one does not know them.

    What happens to a machine within one report is over before a topic has moved because of it.
    """

    def __init__(self, data_dir: Path, root: Path = ROOT) -> None:
        self._root = root
        self._data_dir = data_dir
        self._cpu: Readings = deque(maxlen=READINGS_MAX)
        self._disk: Readings = deque(maxlen=READINGS_MAX)

    def read(self, now: float) -> ResourceUsage:
        """`now` never goes back."""
        self._cpu.append(self._cpu_seconds(now))
        self._disk.append(self._disk_seconds(now))
        return ResourceUsage(
            cpu=_part(self._cpu[0], self._cpu[-1]), memory=self._memory(), disk=_part(self._disk[0], self._disk[-1])
        )

    # --- CPU ---

    def _cpu_seconds(self, now: float) -> tuple[float, float] | None:
        for group in self._groups():
            quota, _, period = self._text(group / "cpu.max").partition(" ")
            if quota.isdigit() and int(quota):
                used = _fields(self._text(group / "cpu.stat")).get("usage_usec")
                return None if used is None else (used / 1e6, now * int(quota) / int(period or 100_000))
        first = self._text(self._root / "proc/stat").split("\n", 1)[0].split()
        if len(first) < 5 or first[0] != "cpu" or not all(each.isdigit() for each in first[1:9]):
            return None
        ticks = [float(each) for each in first[1:9]]  # the rest is in the first two already
        idle = sum(ticks[3:5])  # also what waits for a disk
        return sum(ticks) - idle, sum(ticks)

    # --- memory ---

    def _memory(self) -> float | None:
        for group in self._groups():
            limit = self._text(group / "memory.max")
            if limit.isdigit() and int(limit):
                used = self._text(group / "memory.current")
                if not used.isdigit():
                    return None
                # What files leave in memory can go at any time.
                cached = _fields(self._text(group / "memory.stat")).get("inactive_file", 0.0)
                return _percent(int(used) - cached, int(limit))
        found = _fields(self._text(self._root / "proc/meminfo").replace(":", " "))
        total, free = found.get("MemTotal"), found.get("MemAvailable")
        return None if not total or free is None else _percent(total - free, total)

    # --- disk ---

    def _disk_seconds(self, now: float) -> tuple[float, float] | None:
        """Of the device that the data directory is on."""
        try:
            device = os.stat(self._data_dir).st_dev
        except OSError:
            return None
        wanted = [str(os.major(device)), str(os.minor(device))]
        for line in self._text(self._root / "proc/diskstats").splitlines():
            words = line.split()
            if words[:2] == wanted and len(words) >= SECTORS_FIELDS_MIN and words[12].isdigit():
                return int(words[12]) / 1000, now
        return None

    # --- files ---

    def _groups(self) -> Iterator[Path]:
        """This process's control group and those above it: any of them may have the limit."""
        for line in self._text(self._root / "proc/self/cgroup").splitlines():
            if line.startswith("0::/") and ".." not in line:
                parts = [part for part in line[len("0::/") :].split("/") if part]
                for count in range(len(parts), -1, -1):
                    yield self._root.joinpath("sys/fs/cgroup", *parts[:count])

    def _text(self, path: Path) -> str:
        try:
            return path.read_text(errors="replace").strip()
        except OSError:
            return ""


def _fields(text: str) -> dict[str, float]:
    """Of lines that are a name and a number, and maybe a unit."""
    found = {}
    for line in text.splitlines():
        words = line.split()
        if len(words) >= 2 and words[1].isdigit():
            found[words[0]] = float(words[1])
    return found


def _part(before: tuple[float, float] | None, after: tuple[float, float] | None) -> float | None:
    """What was used of what there was, between two readings."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return _percent(after[0] - before[0], after[1] - before[1])


def _percent(part: float, whole: float) -> float:
    return min(max(WHOLE * part / whole, 0.0), WHOLE)
