"""An event loop whose time and order come from a seed.

    result = run(main(), seed=42)

`SimLoop` never waits for anything outside the program. Its time stands still while a callback runs and jumps
to the next timer when nothing is ready, so an hour of timeouts costs nothing. Which of the ready callbacks
runs next is drawn from the seed: the same seed gives the same run, another seed another schedule that a real
machine might have produced. Nothing ready and no timer left is a deadlock, and says who waits where; a run
that does not end is stopped after `steps_max` callbacks. Tasks and futures hash by the order in which
they were made, because a TaskGroup cancels its tasks in the order of a set.

`Process` is a part of the program that can be killed or paused as a whole. Its tasks, and all that they
start, carry it in their context. Of a killed process no callback ever runs again, and what it still held is
dropped at the end, when nothing that a `finally` does can matter any more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack, cast

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

# 2024-01-01T00:00:00Z: a round moment that looks like a date in logs and files.
EPOCH_US: Final = 1_704_067_200_000_000
STEPS_MAX: Final = 5_000_000


class Deadlock(Exception):
    """Every task waits, and nothing is left that could wake one. `waiting` says which tasks wait, and where."""

    def __init__(self, waiting: list[str]) -> None:
        super().__init__(waiting)
        self.waiting = waiting

    def __str__(self) -> str:
        lines = "\n".join(f"  {line}" for line in self.waiting)
        return f"nothing can ever happen again; waiting are:\n{lines}"


class Livelock(Exception):
    """The run went on for more callbacks than any sensible run needs."""

    def __init__(self, steps: int, time: float, waiting: list[str]) -> None:
        super().__init__(steps, time, waiting)
        self.steps = steps
        self.time = time
        self.waiting = waiting

    def __str__(self) -> str:
        lines = "\n".join(f"  {line}" for line in self.waiting)
        return f"no end after {self.steps} callbacks, at {self.time:.6f} s; tasks are:\n{lines}"


class ProcessDied(Exception):
    """The process that was to answer is gone; whether it did what it was asked to is unknown."""


def run(main: Coroutine[Any, Any, T], seed: int, *, shuffled: bool = True, steps_max: int = STEPS_MAX) -> T:
    """Runs `main` on a loop of its own and returns what it returns."""
    loop = SimLoop(Random(seed), shuffled=shuffled, steps_max=steps_max)  # type: ignore[abstract]
    try:
        return loop.run_until_complete(main)
    finally:
        loop.close()


# --- the loop ---------------------------------------------------------------------------------------


class _Call:
    """A callback to run; what asyncio calls a Handle. A cancelled one has none. Only a timer has a time.

    The loop fills it in: there is one for every step of every task, and an `__init__` would cost more than the rest.
    """

    __slots__ = ("args", "callback", "context", "time")

    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    context: Context
    time: float

    def cancel(self) -> None:
        self.callback = None

    def cancelled(self) -> bool:
        return self.callback is None

    def when(self) -> float:
        return self.time


_new_call: Final = partial(object.__new__, _Call)


class SimFuture(asyncio.Future[T]):
    """Hashes by its number, so that sets of futures have the same order in every run."""

    __slots__ = ("number",)  # given by the loop: an __init__ of its own would cost more than the rest of it

    number: int

    def __hash__(self) -> int:
        return self.number


class SimTask(asyncio.Task[T]):
    """Hashes by its number, so that sets of tasks have the same order in every run."""

    def __init__(self, coroutine: Coroutine[Any, Any, T], *, loop: SimLoop, context: Context | None, name: str) -> None:
        # Before the base class: it puts the task in a set.
        self.number = loop.next_number()
        self.process = _PROCESS.get() if context is None else context.get(_PROCESS)
        super().__init__(coroutine, loop=loop, name=name, context=context)

    def __hash__(self) -> int:
        return self.number


class SimLoop(asyncio.AbstractEventLoop):
    """See the module's text. `problems` collects what asyncio would have logged: errors that were never retrieved."""

    def __init__(self, rng: Random, *, shuffled: bool = True, steps_max: int = STEPS_MAX) -> None:
        self.problems: list[dict[str, Any]] = []
        self.steps = 0
        self._steps_max = steps_max
        self._draw = rng.random
        self._shuffled = shuffled
        self._now = 0.0
        self._numbers = 0
        self._ready: list[_Call] = []
        self._timers: list[tuple[float, int, _Call]] = []  # a heap
        self._tasks: list[SimTask[Any]] = []  # strong, so that the garbage collector decides nothing
        self._tasks_pruned_at = 64
        self._running = False
        self._closed = False
        self.after_step: Callable[[], None] | None = None  # called behind every step; set it before the loop runs

    # --- what asyncio asks for ---

    def time(self) -> float:
        return self._now

    get_debug = staticmethod(bool)  # False; asked for every future, and a function in Python costs more than that

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self._closed

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        call = _new_call()
        call.callback = callback
        call.args = args
        call.context = copy_context() if context is None else context
        if not self._closed:  # what the dropped rest of a run still wants to do is not done
            self._ready.append(call)
        return call  # type: ignore[return-value]

    def call_soon_threadsafe(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self,
        delay: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._at(self._now + delay, callback, args, context)

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self._at(when, callback, args, context)

    def _at(
        self, when: float, callback: Callable[..., object], args: tuple[Any, ...], context: Context | None
    ) -> asyncio.TimerHandle:
        call = _new_call()
        call.callback = callback
        call.args = args
        call.context = copy_context() if context is None else context
        call.time = when
        if not self._closed:
            self._numbers += 1
            heappush(self._timers, (when, self._numbers, call))
        return call  # type: ignore[return-value]

    def create_future(self) -> asyncio.Future[Any]:
        future: SimFuture[Any] = SimFuture(loop=self)
        self._numbers = future.number = self._numbers + 1
        return future

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
        **_: Any,
    ) -> asyncio.Task[T]:
        coroutine = cast(Coroutine[Any, Any, T], coro)
        label = str(name) if name is not None else getattr(coroutine, "__qualname__", "task")
        task = SimTask(coroutine, loop=self, context=context, name=label)
        self._tasks.append(task)
        if len(self._tasks) > self._tasks_pruned_at:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks_pruned_at = 2 * len(self._tasks) + 64
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._closed:
            self.problems.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    async def shutdown_asyncgens(self) -> None:
        """Unfinished generators are dropped with the tasks that used them."""

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """There are no threads."""

    # --- running ---

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Runs until the coroutine has its result. Raises Deadlock or Livelock if it never will."""
        assert not self._running and not self._closed
        main = self.create_task(cast(Coroutine[Any, Any, T], future), name="main")
        self._running = True
        hooks = sys.get_asyncgen_hooks()
        # A generator dropped half-way is closed by a task of its own, as asyncio does.
        sys.set_asyncgen_hooks(firstiter=None, finalizer=self._finish_generator)
        outside = asyncio._get_running_loop()  # a simulation inside of a real loop blocks that one
        asyncio._set_running_loop(self)
        try:
            self._run(main)
        finally:
            asyncio._set_running_loop(outside)
            sys.set_asyncgen_hooks(*hooks)
            self._running = False
        return main.result()

    def _run(self, main: asyncio.Task[T]) -> None:
        ready, timers, draw, shuffled = self._ready, self._timers, self._draw, self._shuffled
        process_of, now, pop, done = _PROCESS, self._now, self._ready.pop, main.done
        after_step = self.after_step
        steps_left = self._steps_max - self.steps
        while not done():
            if not ready:
                if not timers:
                    raise Deadlock(self.waiting())
                if timers[0][0] > now:
                    self._now = now = timers[0][0]
            # A cancelled one counts for nothing, but time goes on to where it was.
            while timers and timers[0][0] <= now:
                call = heappop(timers)[2]
                if call.callback is not None:
                    ready.append(call)
            if not ready:
                continue
            if shuffled:
                chosen = int(draw() * len(ready))
                call = pop()
                if chosen != len(ready):
                    ready[chosen], call = call, ready[chosen]
            else:
                call = pop(0)
            callback = call.callback
            if callback is None:
                continue
            steps_left -= 1
            if steps_left < 0:
                self.steps = self._steps_max
                raise Livelock(self._steps_max, self._now, self.waiting())
            context = call.context
            process = context.get(process_of)
            if process is not None and process.held is not None:
                process.held.append(call)
                continue
            try:
                context.run(callback, *call.args)
            except Exception as error:
                message = f"callback {callback!r} failed"
                self.call_exception_handler({"message": message, "exception": error})
            if after_step is not None:
                after_step()
        self.steps = self._steps_max - steps_left

    def close(self) -> None:
        """Drops every task that is not done, in the order in which they were made.

        Also those that a `finally` makes while its task is dropped: this loop is the current one until all are gone.
        """
        if self._closed:
            return
        assert not self._running
        self._closed = True
        self._ready.clear()
        self._timers.clear()
        current = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            while self._tasks:
                tasks, self._tasks = self._tasks, []
                for task in tasks:
                    if not task.done():
                        _drop(task)
        finally:
            asyncio._set_running_loop(current)

    def waiting(self) -> list[str]:
        """One line for each live task that is not done: its name and the lines it waits at, outside in."""
        lines = []
        for task in self._tasks:
            if task.done():
                continue
            if task.process is not None and not task.process.alive:
                continue
            lines.append(f"{task.get_name()}: {' > '.join(_places(task.get_coro()))}")
        return lines

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _finish_generator(self, generator: Any) -> None:
        if not self._closed:
            self.create_task(generator.aclose(), name="close a generator")


def _drop(task: asyncio.Task[Any]) -> None:
    """Ends the task's coroutine without running the loop: a `finally` that waits is left immediately."""
    task._log_destroy_pending = False  # type: ignore[attr-defined]
    _end(cast(Coroutine[Any, Any, Any], task.get_coro()))


def _end(coroutine: Coroutine[Any, Any, Any]) -> None:
    """The innermost first: one that waits again in a `finally` must not be left behind by those around it."""
    for _ in range(100):
        if asyncio.iscoroutine(inner := getattr(coroutine, "cr_await", None)):
            _end(inner)
        try:
            coroutine.close()
            return
        except RuntimeError:  # it waited again; nothing will ever wake it
            continue
        except BaseException:
            return


def _places(awaited: Any) -> list[str]:
    """Where a suspended coroutine waits, from the outside in."""
    places: list[str] = []
    while awaited is not None and len(places) < 30:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "ag_frame", None)
        if frame is not None:
            places.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "ag_await", None)
    return places


# --- processes --------------------------------------------------------------------------------------


class Process:
    """Tasks that live and die together: one broker, in a simulation of several."""

    def __init__(self, name: str, loop: SimLoop | None = None) -> None:
        self.name = name
        self.alive = True
        self.held: list[_Call] | None = None  # while paused or dead: callbacks that do not run
        self._loop = loop if loop is not None else cast(SimLoop, asyncio.get_running_loop())
        self._context = copy_context()
        self._context.run(_PROCESS.set, self)
        self._callers: dict[asyncio.Future[Any], None] = {}

    def spawn(self, coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Starts a task inside the process."""
        return self._loop.create_task(coroutine, name=name, context=self._context.copy())

    async def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs `coroutine` inside the process for a caller outside, and returns or raises what it does.

        Raises ProcessDied when the process is killed first. A cancelled caller leaves the request running.
        """
        if not self.alive:
            coroutine.close()
            raise ProcessDied
        return await self.wait(self.spawn(coroutine))

    def run(self, function: Callable[[Unpack[Ts]], T], *args: *Ts) -> T:
        """Calls a function that never waits, inside the process."""
        return self._context.copy().run(function, *args)

    async def wait(self, future: asyncio.Future[T]) -> T:
        """What a future of the process gets. Raises ProcessDied when the process is killed first."""
        if future.done():
            return future.result()
        if not self.alive:
            raise ProcessDied
        answer: asyncio.Future[T] = self._loop.create_future()
        self._callers[answer] = None
        # In no process, as a network is in none: in a caller's that is paused and then killed it would never run, and
        # an error that comes after the caller gave up would never be retrieved.
        future.add_done_callback(partial(_pass_on, answer), context=Context())
        try:
            return await answer
        finally:
            self._callers.pop(answer, None)

    def kill(self) -> None:
        """Nothing of the process ever runs again. Its callers learn it; its dead ports never answer it."""
        if not self.alive:
            return
        self.alive = False
        self.held = []
        for answer in list(self._callers):
            if not answer.done():
                answer.set_exception(ProcessDied())

    def pause(self) -> None:
        """Holds every callback back until `resume`, as a stopped or starved process does. Time goes on."""
        if self.held is None:
            self.held = []

    def resume(self) -> None:
        if self.alive and self.held is not None:
            self._loop._ready.extend(self.held)
            self.held = None


_PROCESS: Final[ContextVar[Process | None]] = ContextVar("pydanube.process", default=None)


def _pass_on(answer: asyncio.Future[T], task: asyncio.Future[T]) -> None:
    if answer.done():
        if not task.cancelled():
            task.exception()  # the caller left: nothing else retrieves it
    elif task.cancelled():
        answer.cancel()
    elif (error := task.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(task.result())


# --- the ports that go with it ----------------------------------------------------------------------


class SimClock:
    """The loop's time. `jump` changes the date alone, as an operator or NTP does, in either direction."""

    def __init__(self, loop: SimLoop | None = None, *, start_us: int = EPOCH_US) -> None:
        self._loop = loop if loop is not None else cast(SimLoop, asyncio.get_running_loop())
        self._start_us = start_us

    def time_us(self) -> int:
        return self._start_us + round(self._loop._now * 1_000_000)

    def elapsed(self) -> float:
        return self._loop._now

    def sleep(self, seconds: float) -> Coroutine[Any, Any, None]:
        return asyncio.sleep(seconds)

    def jump(self, seconds: float) -> None:
        self._start_us += round(seconds * 1_000_000)


class SimWork:
    """Calls functions inline, after letting others run, as a thread would; ids come from the seed."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng

    async def run(self, function: Callable[[], T]) -> T:
        await asyncio.sleep(0)
        return function()

    run_in_worker = run

    async def await_in_worker(self, function: Callable[[], Coroutine[Any, Any, T]]) -> T:
        await asyncio.sleep(0)
        return await function()

    def random_u64(self) -> int:
        return self._rng.randrange(1, 2**63)
