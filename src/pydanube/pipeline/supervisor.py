"""Runs declared pipelines: asks the broker, starts children, and does what `core/pipelines/machine.py` decides.

    list ──► Listed ┐                       ┌► claim, release, report    in order, by one task
    lease ──────────┼► Supervision.step ────┤
    children ───────┘                       └► start, stop, kill         processes, each a group of its own

One lease for all: renewed every third of its time. When three quarters have passed since the last renewal was sent, it
counts as ended here, before it does at the broker; children learn each renewal and end by themselves at the same
moment, so that not even a supervisor that is stopped or killed leaves a run behind that another one repeats.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from pydanube.core.pipelines.declaration import Declaration, variables_of
from pydanube.core.pipelines.machine import (
    Claim,
    ClaimAnswered,
    ClaimLost,
    DeclaredPipeline,
    Effect,
    Event,
    Kill,
    LeaseEnded,
    LeaseGranted,
    Listed,
    Moment,
    Release,
    Report,
    RunEnded,
    RunProgressed,
    ShutDown,
    Start,
    StopRun,
    Supervision,
    SupervisorTicked,
)
from pydanube.core.pipelines.status import PipelineStatus, RunOutcome, facts_of
from pydanube.errors import ConfigError, DanubeError
from pydanube.ports import Clock
from pydanube.stores.environment import CLOUDS, PYTHON, SPARK, child_environment
from pydanube.stores.work.system import SystemClock

log = logging.getLogger(__name__)

CHILD: Final = (sys.executable, "-m", "pydanube.pipeline.child")
LIST_SECONDS: Final = 5.0
TICK_SECONDS: Final = 1.0
RETRY_SECONDS: Final = 2.0
POLL_SECONDS: Final = 0.2
LINE_MAX_BYTES: Final = 1024 * 1024
LEAVE_SECONDS: Final = 5.0
LEASE_SHARE: Final = 0.75


class Desk(Protocol):
    """What a supervisor asks of brokers. Every call raises DanubeError if none answers."""

    async def list(self) -> Mapping[str, DeclaredPipeline]: ...

    async def join(self) -> tuple[int, float]:
        """A lease, and how long it lasts without a renewal."""
        ...

    async def renew(self, lease: int) -> bool: ...

    async def leave(self, lease: int) -> None: ...

    async def claim(self, lease: int, name: str) -> tuple[bool, PipelineStatus | None]: ...

    async def release(self, lease: int, name: str) -> None: ...

    async def report(self, lease: int, name: str, status: PipelineStatus) -> bool:
        """False: the claim is another's, or gone."""
        ...


class Supervisor:
    """`name` is for people. `command` starts a child; the settings go to its standard input, never there."""

    def __init__(
        self,
        desk: Desk,
        clock: Clock | None = None,
        *,
        name: str,
        runs_max: int,
        command: Sequence[str] = CHILD,
        list_seconds: float = LIST_SECONDS,
        tick_seconds: float = TICK_SECONDS,
    ) -> None:
        self._desk = desk
        self._clock = clock or SystemClock()
        self._command = command
        self._list_seconds = list_seconds
        self._tick_seconds = tick_seconds
        self._retry_seconds = min(RETRY_SECONDS, list_seconds)
        self._name = name
        self._supervision = Supervision(name, runs_max=runs_max)
        self._orders: asyncio.Queue[Claim | Release | Report] = asyncio.Queue()
        self._newest: dict[str, Report] = {}
        self._claiming: dict[str, Claim | Release] = {}  # what was decided last
        self._children: dict[str, Child] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._until = 0.0
        self._lease = 0

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set and every child has ended."""
        told: asyncio.Task[Any] = asyncio.create_task(stopping.wait(), name="stopping")
        beside: list[asyncio.Task[Any]] = [
            asyncio.create_task(self._keep_lease(), name="lease"),
            asyncio.create_task(self._keep_listing(), name="list"),
            asyncio.create_task(self._obey(), name="orders"),
        ]
        try:
            while not (stopping.is_set() and self._supervision.is_idle and not self._children):
                if stopping.is_set():
                    self._step(ShutDown())
                    await asyncio.sleep(min(self._tick_seconds, 0.1))
                else:
                    await asyncio.wait([told, *beside], timeout=self._tick_seconds, return_when=asyncio.FIRST_COMPLETED)
                for each in beside:
                    if each.done():
                        each.result()  # none of them ends: it is a bug, or a mistake in how we were called
                self._step(SupervisorTicked())
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._orders.join(), LEAVE_SECONDS)
        finally:
            for each in (*beside, told):
                each.cancel()
            for child in self._children.values():
                child.kill()
            await asyncio.gather(*beside, told, *self._tasks, return_exceptions=True)
            if self._lease:
                with contextlib.suppress(DanubeError, TimeoutError):
                    await asyncio.wait_for(self._desk.leave(self._lease), LEAVE_SECONDS)

    def _step(self, event: Event) -> None:
        moment = Moment(self._clock.elapsed(), self._clock.time_us())
        for effect in self._supervision.step(event, moment):
            self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Claim(name) | Release(name):
                self._claiming[name] = effect
                self._orders.put_nowait(effect)
            case Report(name):
                self._newest[name] = effect
                self._orders.put_nowait(effect)
            case Start(name, run, declaration):
                log.info("pipeline starting", extra={"pipeline": name, "job": declaration.job, "run": run})
                child = self._children[name] = Child(name, run, declaration, self)
                task = asyncio.create_task(child.live(self._command), name=f"run {name}")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case StopRun(name, run):
                log.info("pipeline stopping", extra={"pipeline": name, "run": run})
                self._children[name].stop()
            case Kill(name, run):
                log.warning("pipeline killed", extra={"pipeline": name, "run": run})
                self._children[name].kill()

    # --- children -------------------------------------------------------------------------------------------

    @property
    def until(self) -> float:
        """Up to when the lease is known to last."""
        return self._until

    def progressed(self, child: Child, facts: Mapping[str, int]) -> None:
        self._step(RunProgressed(child.name, child.run, facts))

    def ended(self, child: Child, outcome: RunOutcome, error: str, facts: Mapping[str, int]) -> None:
        del self._children[child.name]
        level = logging.INFO if outcome is RunOutcome.GOOD else logging.WARNING
        about = {"pipeline": child.name, "run": child.run, "outcome": outcome.value}
        log.log(level, "pipeline ended", extra={**about, "why": error} if error else about)
        self._step(RunEnded(child.name, child.run, outcome, error, facts))

    # --- the broker -----------------------------------------------------------------------------------------

    async def _keep_lease(self) -> None:
        said = ""
        while True:
            sent_at = self._clock.elapsed()
            try:
                lease, ttl = await self._desk.join()
            except DanubeError as error:
                _check(error)
                if str(error) != said:
                    said = str(error)
                    log.warning("supervisor waits for a broker", extra={"why": said})
                await asyncio.sleep(self._retry_seconds)
                continue
            said = ""
            log.info("supervisor joined", extra={"supervisor": self._name})
            self._renewed(sent_at, ttl)
            self._lease = lease
            self._step(LeaseGranted(lease))
            await self._renew(lease, ttl)
            self._lease, self._until = 0, 0.0
            self._step(LeaseEnded())

    async def _renew(self, lease: int, ttl: float) -> None:
        """Returns when the lease has ended, or may have."""
        pause = ttl / 3
        while True:
            await asyncio.sleep(min(pause, max(self._until - self._clock.elapsed(), 0.0)))
            sent_at = self._clock.elapsed()
            try:
                async with asyncio.timeout(max(self._until - sent_at, 0.0)):
                    if not await self._desk.renew(lease):
                        log.error("supervisor's lease has ended", extra={"supervisor": self._name})
                        return
            except (DanubeError, TimeoutError) as error:
                if self._clock.elapsed() >= self._until:
                    why = str(error) or "no answer"
                    log.error("supervisor's lease was not renewed", extra={"supervisor": self._name, "why": why})
                    return
                pause = ttl / 20
                continue
            pause = ttl / 3
            self._renewed(sent_at, ttl)

    def _renewed(self, sent_at: float, ttl: float) -> None:
        self._until = sent_at + LEASE_SHARE * ttl
        for child in self._children.values():
            child.tell(self._until)

    async def _keep_listing(self) -> None:
        said = ""
        while True:
            try:
                self._step(Listed(await self._desk.list()))
                said = ""
            except DanubeError as error:
                _check(error)
                if str(error) != said:
                    said = str(error)
                    log.warning("pipelines not listed", extra={"why": said})
            await asyncio.sleep(self._list_seconds)

    async def _obey(self) -> None:
        """Claims, releases and reports, one after the other. A broker that does not answer is asked again."""
        while True:
            order = await self._orders.get()
            try:
                await self._ask(order)
            except DanubeError as error:
                log.warning("broker did not answer", extra={"pipeline": order.name, "why": str(error)})
                if isinstance(order, Claim):
                    self._step(ClaimAnswered(order.name, order.lease, granted=False))
                elif order.lease == self._lease:
                    await asyncio.sleep(self._retry_seconds)
                    self._orders.put_nowait(order)
            finally:
                self._orders.task_done()

    async def _ask(self, order: Claim | Release | Report) -> None:
        match order:
            case Claim(name, lease):
                granted, status = await self._desk.claim(lease, name)
                self._step(ClaimAnswered(name, lease, granted, status))
            case Release(name, lease):
                if self._claiming.get(name) is not order:
                    return  # it was declared anew and claimed again, while no broker answered: it stays ours
                await self._desk.release(lease, name)
            case Report(name, lease, status):
                if self._newest.get(name) is not order or lease != self._lease:
                    return  # a newer one follows, or the claim has ended
                if not await self._desk.report(lease, name, status):
                    log.warning("pipeline is another's", extra={"pipeline": name})
                    self._step(ClaimLost(name, lease))


class Child:
    """One run, as a process. `live` says once how it ended."""

    def __init__(self, name: str, run: int, declaration: Declaration, supervisor: Supervisor) -> None:
        self.name = name
        self.run = run
        self._declaration = declaration
        self._supervisor = supervisor
        self._process: Process | None = None
        self._facts: dict[str, int] = {}
        self._report: dict[str, Any] | None = None
        self._error = ""
        self._is_refused = False
        self._is_told = self._is_killed = False

    async def live(self, command: Sequence[str]) -> None:
        code = 1
        try:
            code = await self._until_it_ends(command)
        except OSError as failure:
            self._error = f"it cannot be started: {(failure.strerror or str(failure)).lower()}"
        except Exception as bug:  # a run without an end would hold its pipeline for ever
            log.exception("pipeline not followed", extra={"pipeline": self.name})
            self._error = f"it cannot be followed: {type(bug).__name__}"
        finally:
            self._end_group()
        outcome, error = self._outcome(code)
        self._supervisor.ended(self, outcome, error, self._facts)

    async def _until_it_ends(self, command: Sequence[str]) -> int:
        declaration = self._declaration
        process = self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
            limit=LINE_MAX_BYTES,
            env=child_environment(PYTHON, CLOUDS, SPARK, tuple(variables_of(declaration.settings))),
        )
        self._write(
            {
                "job": declaration.job,
                "settings": declaration.job_settings,
                "master": declaration.master,
                "remote": declaration.remote,
                "until": self._supervisor.until,
            }
        )
        if self._is_killed:
            self.kill()
        elif self._is_told:
            self.stop()
        assert process.stdout is not None
        hearing = asyncio.create_task(self._listen(process.stdout))
        # What it has started has the same output: that may stay open when it has ended, until its group has, too.
        while process.returncode is None and not hearing.done():
            await asyncio.wait([hearing], timeout=POLL_SECONDS)
        if process.returncode is not None:
            self._end_group()
        await hearing
        return await process.wait()

    async def _listen(self, output: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await output.readline()
            except ValueError:
                continue  # too long to be ours: what of it was read is dropped
            if not line:
                return
            self._hear(line)

    def _hear(self, line: bytes) -> None:
        try:
            said = json.loads(line)
        except ValueError:
            return
        if not isinstance(said, dict):
            return
        if isinstance(said.get("error"), str):
            self._error, self._is_refused = said["error"], said.get("refused") is True
        elif isinstance(said.get("report"), dict):
            self._report = said["report"]
            self._facts |= facts_of(self._report)
        elif found := facts_of(said):
            self._facts |= found
            self._supervisor.progressed(self, found)

    def _outcome(self, code: int) -> tuple[RunOutcome, str]:
        """Good is only what said so itself, and ended so."""
        if self._report is not None and not self._error:
            if code == 0 and self._report.get("result") == "ok":
                return RunOutcome.GOOD, ""
            problems = self._report.get("problems")
            if self._report.get("result") != "ok" and isinstance(problems, list) and problems:
                more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
                return RunOutcome.NOT_GOOD, f"{problems[0]}{more}"
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        error = self._error or f"it ended with {how}, and without a report"
        return (RunOutcome.REFUSED if self._is_refused else RunOutcome.FAILED), error

    def tell(self, until: float) -> None:
        """The lease lasts so long."""
        self._write({"until": until})

    def stop(self) -> None:
        self._is_told = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._is_killed = True
        self._end_group()

    def _end_group(self) -> None:
        """With what it has started: a JVM, and its workers."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _write(self, what: Mapping[str, Any]) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            with contextlib.suppress(OSError, RuntimeError):  # it has ended, as its reader learns
                process.stdin.write(json.dumps(what).encode() + b"\n")


def _check(error: DanubeError) -> None:
    """What does not become right by waiting is raised: another server listens there, the broker is too old."""
    if isinstance(error, ConfigError) or getattr(error, "code", "") == "UNIMPLEMENTED":
        raise error
