"""How busy the machine is: read from what Linux writes, here in a directory that stands for it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pydanube.core.cluster.load import ResourceUsage
from pydanube.stores.disk.usage import MachineUsage

STAT = "cpu  {user} 0 0 {idle} 0 0 0 0 0 0\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
MEMORY = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    700 kB\n"


def write(root: Path, **texts: str) -> None:
    """Names have two underscores for a slash."""
    for name, text in texts.items():
        path = root / name.replace("__", "/").replace("_max", ".max").replace("_stat", ".stat")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_without_a_limit_it_is_the_machines_cpu_memory_and_disk(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    line = f"{os.major(device)} {os.minor(device)} vda 1 0 8 3 1 0 8 3 0 {{busy}} 9 0 0 0 0 0 0\n"
    other = "   7       0 loop0 1 0 8 3 1 0 8 3 0 999999 9\n"
    machine = MachineUsage(tmp_path, tmp_path)
    write(tmp_path, proc__stat=STAT.format(user=100, idle=900), proc__meminfo=MEMORY)
    write(tmp_path, proc__diskstats=other + line.format(busy=1000), proc__self__cgroup="0::/\n")
    assert machine.read(10.0) == ResourceUsage(cpu=None, memory=pytest.approx(30.0), disk=None), (
        "a mean needs two readings"
    )
    write(tmp_path, proc__stat=STAT.format(user=125, idle=975), proc__diskstats=other + line.format(busy=6000))
    assert machine.read(20.0) == pytest.approx(ResourceUsage(cpu=25.0, memory=30.0, disk=50.0))


def test_in_a_container_it_is_what_the_container_may_have(tmp_path: Path) -> None:
    """Half a CPU, in the group above; 400 bytes of memory, of which 100 are only files."""
    write(tmp_path, proc__stat=STAT.format(user=0, idle=900), proc__meminfo=MEMORY, proc__self__cgroup="0::/pod/one\n")
    write(tmp_path, sys__fs__cgroup__pod__cpu_max="50000 100000\n", sys__fs__cgroup__pod__one__cpu_max="max 100000\n")
    write(tmp_path, sys__fs__cgroup__pod__cpu_stat="usage_usec 1000000\nuser_usec 5\n")
    group = tmp_path / "sys/fs/cgroup/pod/one"
    for name, text in (("memory.max", "400"), ("memory.current", "300"), ("memory.stat", "anon 1\ninactive_file 100")):
        (group / name).write_text(text)
    machine = MachineUsage(tmp_path, tmp_path)
    assert machine.read(10.0).memory == pytest.approx(50.0)
    write(tmp_path, sys__fs__cgroup__pod__cpu_stat="usage_usec 3000000\nuser_usec 5\n")
    assert machine.read(20.0).cpu == pytest.approx(40.0), "2 of 5 seconds"


@pytest.mark.parametrize("text", ["", "cpu", "cpu a b c d e", "nonsense\n\n", "cpu  1 2 3 4"])
def test_what_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    machine = MachineUsage(tmp_path / "gone", tmp_path)
    assert machine.read(1.0) == ResourceUsage()
    write(tmp_path, proc__stat=text, proc__meminfo=text, proc__diskstats=text, proc__self__cgroup=text)
    assert machine.read(2.0) == ResourceUsage() and machine.read(3.0) == ResourceUsage()


def test_this_machine_answers_without_an_error(tmp_path: Path) -> None:
    machine = MachineUsage(tmp_path)
    for now in (1.0, 2.0):
        assert all(value is None or 0.0 <= value <= 100.0 for value in machine.read(now))
