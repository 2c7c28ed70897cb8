"""A low-priority worker process for CPU-heavy jobs.

    broker ── function, pickled ──► stdin  │ this module as a process │  stdout ── outcome, pickled ──► broker

Making a large object takes a core for a second. In a thread it competes with the event loop twice: for the core, where
its priority is that of the loop, and for the interpreter lock. A process has a lock of its own, and a priority. What it
does not help against is the disk, which objects and the log share (bench/README.md has the figures).

It runs when no other process wants to (SCHED_IDLE): a process that is woken on its core preempts it, while one that is
merely nice keeps the core until the next tick, 4 ms. On a machine that is never idle it would starve; so one that waits
for long is ended, and for some minutes its successors are merely nice.

It ends when its stdin does, whatever it is doing, so also with a broker that is killed. If it dies, its function is
called in a thread; one that changes something is not called again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any, Final, Generic, TypeAlias, TypeVar

from pydanube.errors import ProcessEnded
from pydanube.stores.environment import CLOUDS, PYTHON, child_environment
from pydanube.stores.work.pickle_pipe import dumped, loaded, receive, send, widen
from pydanube.stores.work.threads import Threads

log = logging.getLogger(__name__)

T = TypeVar("T")

NICE: Final = 10
STARVATION_CHECK_SECONDS: Final = 1.0
LACK_SECONDS: Final = 10.0  # it waited for a core so much longer than it had one, ten times
NICE_SECONDS: Final = 600.0  # for so long after that processes run nice, not idle
SECONDS_MAX: Final = 300.0  # an object takes one or two, and many more on a busy machine
STORING_SECONDS_MAX: Final = 3600.0  # the store has its own deadlines; 256 MB at its slowest take ten minutes
END_SECONDS: Final = 5.0


def _can_see_waiting() -> bool:
    """Linux reports it, unless it was built without. Where it does not, a starved process would not be noticed."""
    with contextlib.suppress(OSError, ValueError):
        return any(map(int, Path("/proc/self/schedstat").read_text().split()))
    return False


class WorkerProcesses:
    """At most `processes_max` of them, started when they are needed."""

    def __init__(self, processes_max: int) -> None:
        self._threads = Threads("apart", processes_max)
        self._pool = _Pool()

    async def call(self, function: Callable[[], T]) -> T:
        """Returns what `function` returns, or raises what it raises; both, and the function, can be pickled.

        No function outlives its call: the process of one that is cancelled is killed.
        """
        return await self._call(_Call(function, self._pool))

    async def call_once(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """The same for what may change something, on an event loop of that process.

        Raises ProcessEnded if the process ended first: it is not known what it did, so the call is not repeated.
        """
        return await self._call(_CallOnce(partial(_run, function), self._pool))

    async def _call(self, call: _Call[T]) -> T:
        task = asyncio.ensure_future(self._threads.call(call.run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            call.cancel()
            task.cancel()  # if no thread has begun it, those before it need not be awaited
            await asyncio.gather(task, return_exceptions=True)
            raise

    def close(self) -> None:
        """Ends the processes after what they are doing."""
        self._threads.close()
        self._pool.close()


class _Pool:
    """Processes that have nothing to do. Used by several threads, which lists allow."""

    def __init__(self) -> None:
        self._free: list[_Process] = []
        self._nice_until = -math.inf

    def take(self) -> _Process:
        idle_priority = time.monotonic() > self._nice_until and _can_see_waiting()
        while True:
            try:
                process = self._free.pop()
            except IndexError:
                return _Process(idle_priority=idle_priority)
            if process.idle_priority == idle_priority and process.is_alive:
                return process
            process.end()

    def give(self, process: _Process) -> None:
        self._free.append(process)

    def yield_to_nice(self) -> None:
        self._nice_until = time.monotonic() + NICE_SECONDS

    def close(self) -> None:
        for process in self._free:
            process.kill()
        for process in self._free:
            process.end()
        self._free.clear()


class _Call(Generic[T]):
    """`run` in a thread, `give_up` on the loop, at any time."""

    def __init__(self, function: Callable[[], T], pool: _Pool) -> None:
        self._function = function
        self._pool = pool
        self._process: _Process | None = None  # while it is ours to kill
        self._owning = threading.Lock()
        self._given_up = False

    def run(self) -> T:
        watch: _Watch | None = None
        try:
            process = self._pool.take()
            with self._owning:
                self._process = process
                if self._given_up:
                    process.kill()
            with _Watch(process, self._seconds_max) as watch:
                is_well, outcome = process.call(self._function)
        except (OSError, EOFError, pickle.UnpicklingError, RuntimeError) as error:  # the last: no thread for the watch
            if self._given_up:
                raise
            why = (watch.why if watch is not None else "") or str(error) or type(error).__name__
            if watch is not None and watch.why and process.idle_priority:
                self._pool.yield_to_nice()
            log.warning("the process for large objects ended", extra={"why": why})
            return self._without_process(why)
        with self._owning:
            self._process = None
        if process.is_alive:
            self._pool.give(process)
        else:  # it was killed just then
            process.end()
        if not is_well:
            raise outcome
        return outcome  # type: ignore[no-any-return]

    def cancel(self) -> None:
        with self._owning:
            self._given_up = True
            if self._process is not None:
                self._process.kill()

    @property
    def _seconds_max(self) -> float:
        return SECONDS_MAX

    def _without_process(self, why: str) -> T:
        return self._function()


class _CallOnce(_Call[T]):
    @property
    def _seconds_max(self) -> float:
        return STORING_SECONDS_MAX

    def _without_process(self, why: str) -> T:
        raise ProcessEnded(why)


def _run(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(function())


class _Watch:
    """Kills a process that takes too long, or does not come to its turn. A thread of its own, for as long as a call."""

    def __init__(self, process: _Process, seconds_max: float) -> None:
        self.why = ""  # it was killed
        self._seconds_max = seconds_max
        self._process = process
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look, name="apart-watch", daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()

    def _look(self) -> None:
        began = time.monotonic()
        before = self._process.ran_and_waited()
        while not self._ended.wait(STARVATION_CHECK_SECONDS):
            if time.monotonic() - began > self._seconds_max:
                self.why = f"it took longer than {self._seconds_max:.0f} s"
            elif self._process.idle_priority and _lacked_cores(before, self._process.ran_and_waited()):
                self.why = "others kept it from running"
            if self.why:
                self._process.kill()
                return


Times: TypeAlias = dict[str, tuple[float, float]]  # thread -> seconds that it ran, and waited for a core


def _lacked_cores(before: Times, now: Times) -> bool:
    for thread, (ran, waited) in now.items():
        ran_before, waited_before = before.get(thread, (0.0, 0.0))
        if waited - waited_before > LACK_SECONDS + 10 * (ran - ran_before):
            return True
    return False


class _Process:
    """One with `idle_priority` has a core only when no other process wants it."""

    def __init__(self, *, idle_priority: bool) -> None:
        self.idle_priority = idle_priority
        self._is_killed = False
        ours = str(Path(__file__).parents[3])  # where the package is
        path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            # Nothing is taken from the working directory.
            [sys.executable, "-P", "-m", "pydanube.stores.work.worker_process", *(["idle"] if idle_priority else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**child_environment(PYTHON, CLOUDS), "PYTHONPATH": path},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        widen(self._to.fileno())
        widen(self._from.fileno())

    def call(self, function: Callable[[], object]) -> tuple[bool, Any]:
        try:
            send(self._to.fileno(), function)
            is_well, outcome = receive(self._from)
        except BaseException:
            self.kill()  # what is left in the pipes answers no later call
            self.end()
            raise
        return is_well, outcome

    @property
    def is_alive(self) -> bool:
        return not self._is_killed and self._process.poll() is None

    def kill(self) -> None:
        self._is_killed = True
        self._process.kill()

    def ran_and_waited(self) -> Times:
        """Of its life so far; empty where the system does not say."""
        found: Times = {}
        with contextlib.suppress(OSError, ValueError):  # it has just ended
            for path in Path(f"/proc/{self._process.pid}/task").iterdir():
                ran, waited, _ = map(int, (path / "schedstat").read_text().split())
                found[path.name] = ran / 1e9, waited / 1e9
        return found

    def end(self) -> None:
        """It has nothing to do, or nothing that a caller waits for."""
        self.kill()
        with contextlib.suppress(OSError):
            self._to.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has no core to end on; that will come
            self._process.wait(END_SECONDS)
        self._from.close()


def main(*, idle_priority: bool) -> None:
    """The other side: functions on stdin, outcomes on stdout, until there are no more."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for the broker, which still has work for us
        signal.signal(each, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE if idle_priority else os.SCHED_BATCH, os.sched_param(0))
    os.nice(NICE)
    functions = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    outcomes = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints something must not print into an outcome
    threading.Thread(target=_end_with, args=(functions.fileno(),), daemon=True).start()
    while True:
        try:
            function = receive(functions)
        except EOFError:
            return
        outcome = _outcome(function)
        del function
        send(outcomes, outcome)
        del outcome


def _end_with(pipe: int) -> None:
    """The broker has gone: no caller waits for this process, and nothing supervises it."""
    hung_up = select.poll()
    hung_up.register(pipe, 0)
    while not any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in hung_up.poll()):
        pass
    os._exit(1)


def _outcome(function: Callable[[], object]) -> tuple[bool, object]:
    try:
        return True, function()
    except Exception as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        try:
            loaded(dumped(error))
        except Exception:  # it would not arrive
            return False, RuntimeError(f"{type(error).__name__}: {error}")
        return False, error


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(idle_priority="idle" in sys.argv)
