"""The supervisor with real processes: what children say and do becomes what the broker is told, and none is left."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest

from pydanube.core.pipelines.declaration import Declaration
from pydanube.core.pipelines.machine import DeclaredPipeline
from pydanube.core.pipelines.status import PipelineState, PipelineStatus, RunOutcome
from pydanube.errors import Unreachable
from pydanube.pipeline import supervisor
from pydanube.pipeline.supervisor import Supervisor
from pydanube.stores.work.system import SystemClock

FAKE = (sys.executable, "-I", "-S", str(Path(__file__).with_name("fake_child.py")))
FASTER = 40.0  # than the world's clock: five seconds of back-off pass in an eighth of one


class FastClock:
    def elapsed(self) -> float:
        return time.monotonic() * FASTER

    def time_us(self) -> int:
        return time.time_ns() // 1000

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / FASTER)


class Broker:
    """What supervisors ask, in memory."""

    def __init__(self) -> None:
        self.declared: dict[str, DeclaredPipeline] = {}
        self.status: dict[str, PipelineStatus] = {}
        self.claims: dict[str, int] = {}
        self.leases: set[int] = set()
        self.reports: list[PipelineStatus] = []
        self.away = False
        self.joined = 0
        self.ttl = 1e6

    def declare(self, do: str, name: str = "orders", **change: Any) -> None:
        when = {} if {"every", "cron"} & change.keys() else {"follow": "30s"}
        settings = {"do": do, **change.pop("settings", {})}
        made = Declaration.parse({"name": name, "job": "lake", "settings": settings, **when, **change})
        self.declared[name] = DeclaredPipeline(made, len(self.reports) + 1)

    def _ask(self) -> None:
        if self.away:
            raise Unreachable("the broker", "it is away")

    async def list(self) -> dict[str, DeclaredPipeline]:
        self._ask()
        return dict(self.declared)

    async def join(self) -> tuple[int, float]:
        self._ask()
        self.joined += 1
        self.leases.add(self.joined)
        return self.joined, self.ttl

    async def renew(self, lease: int) -> bool:
        self._ask()
        return lease in self.leases

    async def leave(self, lease: int) -> None:
        self.leases.discard(lease)
        self.claims = {name: whose for name, whose in self.claims.items() if whose != lease}

    async def claim(self, lease: int, name: str) -> tuple[bool, PipelineStatus | None]:
        self._ask()
        granted = lease in self.leases and self.claims.setdefault(name, lease) == lease
        return granted, self.status.get(name) if granted else None

    async def release(self, lease: int, name: str) -> None:
        self._ask()
        if self.claims.get(name) == lease:
            del self.claims[name]

    async def report(self, lease: int, name: str, status: PipelineStatus) -> bool:
        self._ask()
        if self.claims.get(name) != lease:
            return False
        self.status[name] = status
        self.reports.append(status)
        return True


@asynccontextmanager
async def supervised(broker: Broker, **change: Any) -> AsyncIterator[asyncio.Event]:
    stopping = asyncio.Event()
    settings = {"name": "here", "runs_max": 4, "command": FAKE, "list_seconds": 0.05, "tick_seconds": 0.02, **change}
    running = Supervisor(broker, settings.pop("clock", FastClock()), **settings)
    task = asyncio.create_task(running.run(stopping))
    try:
        yield stopping
    finally:
        stopping.set()
        async with asyncio.timeout(20):
            await task


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(15):
        while not what():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def ended(broker: Broker, name: str = "orders") -> bool:
    return name in broker.status and broker.status[name].ended_us is not None


def outcome_of(do: str) -> PipelineStatus:
    """Of a run every hour that does this."""
    broker = Broker()
    broker.declare(do, every="1h")

    async def body() -> None:
        async with supervised(broker):
            await until(lambda: ended(broker))
            assert broker.status["orders"].state is not PipelineState.RUNNING

    run(body)
    return next(each for each in broker.reports if each.ended_us is not None)


def test_a_run_that_says_that_it_is_good_and_ends_so_is_good() -> None:
    status = outcome_of("good")
    assert (status.outcome, status.error, status.failures) == (RunOutcome.GOOD, "", 0)
    assert (status.messages, status.quarantined_total, status.fresh_us is not None) == (5, 2, True)


@pytest.mark.parametrize(
    ("do", "outcome", "error"),
    [
        ("wrong", RunOutcome.NOT_GOOD, "offset 7 is missing, and 1 more"),
        ("lies", RunOutcome.FAILED, "exit code 1, and without a report"),
        ("crashes", RunOutcome.FAILED, "signal 9, and without a report"),
        ("silent", RunOutcome.FAILED, "exit code 0, and without a report"),
        ("refused", RunOutcome.REFUSED, "set and not empty"),
    ],
)
def test_no_other_end_of_a_run_is_good(do: str, outcome: RunOutcome, error: str) -> None:
    status = outcome_of(do)
    assert status.outcome is outcome and error in status.error and status.failures == 1 and status.good_us is None


def test_a_program_that_cannot_be_started_is_a_failed_run_with_the_reason() -> None:
    broker = Broker()
    broker.declare("good")

    async def body() -> None:
        async with supervised(broker, command=("/no/such/program",)):
            await until(lambda: ended(broker))

    run(body)
    assert "it cannot be started: no such file or directory" in broker.reports[-1].error


def test_a_crashed_follower_is_started_again_and_its_progress_is_reported() -> None:
    broker = Broker()
    broker.declare("crashes")

    async def body() -> None:
        async with supervised(broker):
            await until(lambda: "orders" in broker.status and broker.status["orders"].restarts >= 2)
            broker.declare("hangs")
            await until(lambda: broker.status["orders"].behind_messages == 1)
            assert broker.status["orders"].failures >= 2, "it runs, and has not recovered yet"

    run(body)
    assert broker.status["orders"].state is PipelineState.RELEASED and not broker.claims and not broker.leases


def test_what_a_run_has_started_ends_with_it(tmp_path: Path) -> None:
    began = time.monotonic()
    assert outcome_of("leaves a child").outcome is RunOutcome.GOOD
    assert time.monotonic() - began < 10, "nobody waits for a process that was left behind"


def test_a_run_that_does_not_heed_the_signal_is_killed() -> None:
    broker = Broker()
    broker.declare("ignores")

    async def body() -> None:
        async with supervised(broker):
            await until(lambda: "orders" in broker.status and broker.status["orders"].messages == 3)

    run(body)
    assert broker.reports[-1].outcome is RunOutcome.STOPPED and not broker.claims


def test_two_supervisors_never_run_one_pipeline_at_once(tmp_path: Path) -> None:
    broker = Broker()
    broker.declare("good", settings={"alone": str(tmp_path / "alone")}, every="10s")

    async def body() -> None:
        async with supervised(broker, name="a"), supervised(broker, name="b"):
            await until(lambda: ended(broker))
            await broker.leave(broker.claims["orders"])  # its lease ends under its feet
            await until(lambda: len({each.supervisor for each in broker.reports}) == 2)

    run(body)
    assert all(each.outcome in (None, RunOutcome.GOOD, RunOutcome.STOPPED) for each in broker.reports)


def test_when_no_broker_renews_the_lease_runs_are_ended_before_it_ends() -> None:
    broker = Broker()
    broker.ttl = 0.6
    broker.declare("hangs")

    async def body() -> None:
        async with supervised(broker, clock=SystemClock()):
            await until(lambda: "orders" in broker.status and broker.status["orders"].messages == 3)
            broker.away = True
            began = time.monotonic()
            await until(lambda: not children())
            assert time.monotonic() - began < broker.ttl + 0.3
            broker.away = False
            broker.leases.clear()
            broker.claims.clear()
            await until(lambda: broker.status["orders"].outcome is RunOutcome.LOST)

    run(body)
    assert "ended before it did" in next(each.error for each in broker.reports if each.outcome is RunOutcome.LOST)


def children() -> list[str]:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()


# --- without its supervisor -----------------------------------------------------------------------------------

GUARDED = """
import os, sys, threading, time
from pydanube.pipeline.child import LeaseGuard, _first_line
import json
print(os.getpid(), flush=True)
first, rest = _first_line()
threading.Thread(target=LeaseGuard(json.loads(first)["until"], rest).run, daemon=True).start()
time.sleep(60)
"""


@contextmanager
def guarded(seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", GUARDED]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, start_new_session=True) as child:
        yield begun(child, seconds)


def begun(child: subprocess.Popen[bytes], seconds: float) -> subprocess.Popen[bytes]:
    assert child.stdin is not None and child.stdout is not None
    assert child.stdout.readline().strip() == str(child.pid).encode()
    child.stdin.write(json.dumps({"until": SystemClock().elapsed() + seconds}).encode() + b"\n")
    child.stdin.flush()
    return child


def test_a_run_whose_supervisor_is_killed_ends_at_once() -> None:
    with guarded(60.0) as child:
        assert child.stdin is not None
        child.stdin.close()  # as the system does when the supervisor's process ends
        assert child.wait(10) == -signal.SIGKILL


def test_a_run_whose_supervisor_does_not_renew_ends_when_the_lease_may() -> None:
    with guarded(1.0) as child:
        assert child.wait(10) == -signal.SIGKILL


def test_settings_and_their_secrets_go_to_a_child_by_its_standard_input_alone() -> None:
    assert list(supervisor.CHILD) == [sys.executable, "-m", "pydanube.pipeline.child"]


def test_a_run_gets_of_the_environment_what_it_needs_and_the_secrets_of_its_own_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TEST_OURS", "secret")
    monkeypatch.setenv("TEST_OTHERS", "secret")
    broker = Broker()
    broker.declare("environment", every="1h", settings={"token": {"from_env": "TEST_OURS"}})

    async def body() -> None:
        async with supervised(broker):
            await until(lambda: ended(broker))

    run(body)
    assert next(each for each in broker.reports if each.ended_us is not None).error == "TEST_OURS"


def test_a_release_that_found_no_broker_does_not_give_back_what_was_claimed_again_since() -> None:
    class Unreleased(Broker):
        released = lists = 0

        async def list(self) -> dict[str, DeclaredPipeline]:
            self.lists += 1
            return await super().list()

        async def release(self, lease: int, name: str) -> None:
            self.released += 1
            if self.released == 1:
                self.declare("hangs")  # the pipeline is declared anew, while no broker takes the release
                seen = self.lists
                await until(lambda: self.lists >= seen + 3)  # and claimed again
                raise Unreachable("the broker", "it is away")
            await super().release(lease, name)

    broker = Unreleased()
    broker.declare("hangs")

    async def body() -> None:
        async with supervised(broker):
            await until(lambda: broker.status and broker.status["orders"].messages == 3)
            runs = broker.status["orders"].runs
            del broker.declared["orders"]
            await until(lambda: broker.released and broker.status["orders"].runs > runs)
            assert broker.claims == {"orders": 1}
            assert broker.released == 1, "a second supervisor would run it at the same time"

    run(body)


def test_a_run_whose_guard_cannot_read_what_it_is_told_ends() -> None:
    with guarded(60.0) as child:
        assert child.stdin is not None
        child.stdin.write(b"{\n")
        child.stdin.flush()
        assert child.wait(10) == -signal.SIGKILL
