"""What tests cost, in seconds of a core and not of the clock: `pytest -p tests.harness.cpu`, with or without xdist.

Prints the dearest tests, then every folder. A test's cost is the time of its own process and of all that this has
started, while the test ran and its fixtures were set up and torn down. A server that outlives a test also costs those
that come behind it.
"""

from __future__ import annotations

import contextlib
import os
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path, PurePosixPath
from typing import Final

import pytest

_PROPERTY: Final = "cpu_seconds"
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_costs: defaultdict[str, float] = defaultdict(float)  # seconds of each test


def _used_seconds() -> float:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    ended = own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime
    return ended + sum(map(_living_seconds, _children(os.getpid())))


def _living_seconds(pid: int) -> float:
    """Of a process that runs, with those that it started: the ones that it has waited for are in its own figures."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # it has ended
        return 0.0
    return sum(map(int, fields[11:15])) / _TICKS + sum(map(_living_seconds, _children(pid)))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for of_thread in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, of_thread.read_text().split())
    return found


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--dearest", type=int, default=40, help="how many tests to show by their cost")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    return (yield from _counted(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    return (yield from _counted(item))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    return (yield from _counted(item))


def _counted(item: pytest.Item) -> Generator[None]:
    before = _used_seconds()
    try:
        return (yield)
    finally:
        item.user_properties.append((_PROPERTY, _used_seconds() - before))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the process that reports. The properties of a test grow from report to report; the last has them all."""
    if report.when == "teardown":
        _costs[report.nodeid] += sum(float(str(value)) for name, value in report.user_properties if name == _PROPERTY)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    folders: defaultdict[str, list[float]] = defaultdict(list)
    for nodeid, seconds in _costs.items():
        path = PurePosixPath(nodeid.partition("::")[0])
        folders[path.parts[1] if len(path.parts) > 2 else path.name].append(seconds)
    terminalreporter.section("seconds of a core")
    dearest = sorted(_costs.items(), key=lambda item: -item[1])[: config.getoption("dearest")]
    for nodeid, seconds in dearest:
        terminalreporter.write_line(f"{seconds:8.2f} {nodeid}")
    terminalreporter.write_line("")
    for folder, costs in sorted(folders.items(), key=lambda item: -sum(item[1])):
        terminalreporter.write_line(f"{sum(costs):8.1f} {folder} ({len(costs)} tests)")
    terminalreporter.write_line(f"{sum(_costs.values()):8.1f} in all, without starting and collecting")
