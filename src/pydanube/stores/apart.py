"""A process beside ours that calls functions for us, when the machine has nothing better to do.

    broker ── function, pickled ──► stdin  │ python -m pydanube.stores.apart │  stdout ── outcome, pickled ──► broker

    sizes ─ pickle ─ bytes ─ bytes …        a memoryview in a function or outcome goes behind the pickle, uncopied

Making a large object takes a core for a second. In a thread it competes with the event loop twice: for the core, where
nobody knows that it may wait, and for the interpreter lock. A process has a lock of its own, and a priority. What it
does not help against is the disk, which objects and the log share (bench/README.md has the figures).

It runs when nobody else wants to (SCHED_IDLE): whoever is woken on its core has it at once, while one that is merely
nice keeps it until the next tick, 4 ms. On a machine that is never idle it would wait for ever; so one that waits for
long is ended, and for some minutes its successors are merely nice.

It ends when its stdin does, so also with a broker that is killed. If it dies, its function is called in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import mmap
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, Generic, TypeVar

from pydanube.errors import Unreachable
from pydanube.ports import Buffer
from pydanube.stores.threads import Threads

log = logging.getLogger(__name__)

T = TypeVar("T")

NICE: Final = 10
LOOK_SECONDS: Final = 1.0
STARVED_SECONDS: Final = 10.0  # it waited for a core so much longer than it had one, ten times
NICE_SECONDS: Final = 600.0  # for so long after that nobody is so modest
PIPE_BYTES: Final = 1024 * 1024
SECONDS_MAX: Final = 300.0  # an object takes one or two, and many more if everybody else is busy
END_SECONDS: Final = 5.0
LARGE_BYTES: Final = 256 * 1024
VIEWS_MAX: Final = 1024  # IOV_MAX
_MAGIC: Final = 0x7472617061  # "apart"
_SIZE: Final = "Q"
_SIZE_BYTES: Final = array(_SIZE).itemsize
_SET_PIPE_SIZE: Final = 1031  # F_SETPIPE_SZ of Linux: 64 KiB at a time would be 16 times as many turns


def _can_see_waiting() -> bool:
    """Linux tells, unless it was built not to count. Where it does not, nobody would notice that a process starves."""
    with contextlib.suppress(OSError, ValueError):
        return any(map(int, Path("/proc/self/schedstat").read_text().split()))
    return False


class Apart:
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

        Raises Unreachable if the process ended: nobody knows what it did, so nobody does it again.
        """
        return await self._call(_CallOnce(partial(_run, function), self._pool))

    async def _call(self, call: _Call[T]) -> T:
        task = asyncio.ensure_future(self._threads.call(call.run))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            call.give_up()
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
        is_modest = time.monotonic() > self._nice_until and _can_see_waiting()
        while True:
            try:
                process = self._free.pop()
            except IndexError:
                return _Process(is_modest=is_modest)
            if process.is_modest == is_modest:
                return process
            process.end()

    def give(self, process: _Process) -> None:
        self._free.append(process)

    def starved(self) -> None:
        self._nice_until = time.monotonic() + NICE_SECONDS

    def close(self) -> None:
        for process in self._free:
            process.end()
        self._free.clear()


class _Call(Generic[T]):
    """`run` in a thread, `give_up` on the loop, at any time."""

    def __init__(self, function: Callable[[], T], pool: _Pool) -> None:
        self._function = function
        self._pool = pool
        self._process: _Process | None = None
        self._given_up = False

    def run(self) -> T:
        watch: _Watch | None = None
        try:
            self._process = process = self._pool.take()
            if self._given_up:
                process.kill()
            with _Watch(process) as watch:
                is_well, outcome = process.call(self._function)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            if self._given_up:
                raise
            why = str(error) or type(error).__name__
            if watch is not None and watch.has_starved:
                self._pool.starved()
                why = "others kept it from running"
            log.warning("the process for large objects ended", extra={"why": why})
            return self._without_process(why)
        self._process = None
        self._pool.give(process)
        if not is_well:
            raise outcome
        return outcome  # type: ignore[no-any-return]

    def give_up(self) -> None:
        self._given_up = True
        if (process := self._process) is not None:
            process.kill()

    def _without_process(self, why: str) -> T:
        return self._function()


class _CallOnce(_Call[T]):
    def _without_process(self, why: str) -> T:
        raise Unreachable("the process for large objects", why)


def _run(function: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(function())


class _Watch:
    """Kills a process that takes too long, or does not come to its turn. A thread of its own, for as long as a call."""

    def __init__(self, process: _Process) -> None:
        self.has_starved = False
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
        ran_before, waited_before = self._process.ran_and_waited()
        while not self._ended.wait(LOOK_SECONDS):
            ran, waited = self._process.ran_and_waited()
            is_starving = waited - waited_before > STARVED_SECONDS + 10 * (ran - ran_before)
            if self._process.is_modest and is_starving:
                self.has_starved = True
            if self.has_starved or time.monotonic() - began > SECONDS_MAX:
                self._process.kill()
                return


class _Process:
    """A modest one has a core only when nobody else wants it."""

    def __init__(self, *, is_modest: bool) -> None:
        self.is_modest = is_modest
        ours = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            # Nothing is taken from the working directory.
            [sys.executable, "-P", "-m", "pydanube.stores.apart", *(["modest"] if is_modest else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        _widen(self._to.fileno())
        _widen(self._from.fileno())

    def call(self, function: Callable[[], object]) -> tuple[bool, Any]:
        try:
            _send(self._to.fileno(), function)
            is_well, outcome = _receive(self._from)
        except BaseException:
            self.kill()  # what is left in the pipes is nobody's answer
            self.end()
            raise
        return is_well, outcome

    def kill(self) -> None:
        self._process.kill()

    def ran_and_waited(self) -> tuple[float, float]:
        """Seconds of its life so far, of the thread that waited longest; 0 where nobody can tell."""
        longest = 0.0, 0.0
        for path in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, ValueError):  # it has just ended
                ran, waited, _ = map(int, path.read_text().split())
                longest = max(longest, (waited / 1e9, ran / 1e9))
        return longest[1], longest[0]

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self._to.close()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._from.close()


def _widen(pipe: int) -> None:
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.fcntl(pipe, _SET_PIPE_SIZE, PIPE_BYTES)


class _Pickler(pickle.Pickler):
    """Keeps views of the memory itself. A view of a PickleBuffer, or of a BytesIO, that becomes part of a cycle (an
    error and its frames) kills the interpreter when it is collected, before Python 3.13.
    """

    def __init__(self, file: BytesIO, views: list[memoryview]) -> None:
        super().__init__(file, protocol=5, buffer_callback=lambda _: None)
        self._views = views

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, memoryview):
            return NotImplemented
        self._views.append(value.cast("B"))
        return memoryview, (pickle.PickleBuffer(value),)


def dumped(value: object) -> list[memoryview]:
    """What is sent: the pickle, and every memoryview that is in the value, which is not copied."""
    pickled, views = BytesIO(), list[memoryview]()
    _Pickler(pickled, views).dump(value)
    return [memoryview(pickled.getvalue()), *views]


def loaded(views: Sequence[Buffer]) -> Any:
    return pickle.loads(views[0], buffers=views[1:])


def _send(pipe: int, value: object) -> None:
    left = deque(dumped(value))
    try:
        sizes = array(_SIZE, [_MAGIC, len(left), *(view.nbytes for view in left)])
        left.appendleft(memoryview(sizes).cast("B"))
        while left:
            # The lock is not held while it is written, whatever time that takes.
            written = os.writev(pipe, list(islice(left, VIEWS_MAX)))
            while left and written >= left[0].nbytes:
                written -= left.popleft().nbytes
            if written:
                left[0] = left[0][written:]
    finally:
        left.clear()  # an error may be kept, with this frame


def _receive(pipe: IO[bytes]) -> Any:
    magic, count = _read(pipe, 2 * _SIZE_BYTES).cast(_SIZE)
    if magic != _MAGIC:
        raise pickle.UnpicklingError("something else was written into the pipe")
    return loaded([_read(pipe, size) for size in _read(pipe, count * _SIZE_BYTES).cast(_SIZE)])


def _read(pipe: IO[bytes], size: int) -> memoryview:
    """Raises EOFError if it ends before that."""
    left = data = memoryview(bytearray(size) if size < LARGE_BYTES else _untouched(size))
    while left.nbytes:
        count = pipe.readinto(left)  # type: ignore[attr-defined]
        if not count:
            raise EOFError("it has ended")
        left = left[count:]
    return data


def _untouched(size: int) -> mmap.mmap:
    """A bytearray is filled with zeros first, with the lock held: 64 MiB of it stop everybody for 20 ms."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(AttributeError, OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)  # to let go of it takes 5 ms without
    return memory


def main(*, is_modest: bool) -> None:
    """The other side: functions on stdin, outcomes on stdout, until there are no more."""
    for each in (signal.SIGINT, signal.SIGTERM):  # meant for the broker, which still has work for us
        signal.signal(each, signal.SIG_IGN)
    with contextlib.suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE if is_modest else os.SCHED_BATCH, os.sched_param(0))
    os.nice(NICE)
    functions = os.fdopen(os.dup(sys.stdin.fileno()), "rb", buffering=0)
    outcomes = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever prints something must not print into an outcome
    while True:
        try:
            function = _receive(functions)
        except EOFError:
            return
        outcome = _outcome(function)
        del function
        _send(outcomes, outcome)
        del outcome


def _outcome(function: Callable[[], object]) -> tuple[bool, object]:
    try:
        return True, function()
    except Exception as error:
        error.__traceback__ = error.__cause__ = error.__context__ = None
        return False, error


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main(is_modest="modest" in sys.argv)
