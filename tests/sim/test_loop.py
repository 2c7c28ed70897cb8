"""The simulator's loop: virtual time, seeded order, processes that die."""

from __future__ import annotations

import asyncio
import contextlib
from random import Random

import pytest

from pydanube.testing.loop import (
    EPOCH_US,
    Deadlock,
    Livelock,
    Process,
    ProcessDied,
    SimClock,
    SimLoop,
    SimWork,
    run,
)


def order(seed: int, *, shuffled: bool = True) -> list[int]:
    """The order in which ten tasks run that are all ready."""
    seen: list[int] = []

    async def say(number: int) -> None:
        seen.append(number)

    async def main() -> None:
        await asyncio.gather(*(say(number) for number in range(10)))

    run(main(), seed, shuffled=shuffled)
    return seen


def test_the_same_seed_gives_the_same_order() -> None:
    assert order(1) == order(1)


def test_different_seeds_give_different_orders_of_the_same_tasks() -> None:
    orders = {tuple(order(seed)) for seed in range(20)}
    assert len(orders) > 10
    assert all(sorted(one) == list(range(10)) for one in orders)


def test_an_unshuffled_loop_runs_callbacks_in_the_order_they_were_made() -> None:
    assert order(1, shuffled=False) == list(range(10))


def test_time_stands_still_while_something_is_ready_and_jumps_to_the_next_timer() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        times = [loop.time()]
        await asyncio.sleep(0)
        times.append(loop.time())
        await asyncio.sleep(3600)
        times.append(loop.time())
        return times

    assert run(main(), 1) == [0.0, 0.0, 3600.0]


def test_timeouts_come_in_virtual_time() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.sleep(100)
        return asyncio.get_running_loop().time()

    assert run(main(), 1) == 60.0


def test_a_cancelled_timer_does_not_move_the_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        loop.call_later(5, print).cancel()
        await asyncio.sleep(10)
        return loop.time()

    assert run(main(), 1) == 10.0


def test_a_deadlock_says_who_waits_where() -> None:
    async def main() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock, match="main: main"):
        run(main(), 1)


def test_a_run_without_an_end_is_stopped() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(1)

    with pytest.raises(Livelock, match="no end after 1000 callbacks"):
        run(main(), 1, steps_max=1000)


def test_tasks_hash_by_the_order_in_which_they_were_made() -> None:
    async def main() -> list[int]:
        tasks = [asyncio.create_task(asyncio.sleep(0)) for _ in range(3)]
        hashes = [hash(task) for task in tasks]
        await asyncio.gather(*tasks)
        return hashes

    first = run(main(), 1)
    assert first == sorted(first) and first == run(main(), 1)


def test_what_asyncio_would_log_is_collected() -> None:
    loop = SimLoop(Random(1))  # type: ignore[abstract]

    async def main() -> None:
        asyncio.get_running_loop().call_soon(lambda: 1 / 0)
        await asyncio.sleep(1)

    loop.run_until_complete(main())
    loop.close()
    [problem] = loop.problems
    assert isinstance(problem["exception"], ZeroDivisionError)


def test_a_task_group_that_fails_cancels_the_others() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def main() -> float:
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(asyncio.sleep(100))
                group.create_task(fail())
        return asyncio.get_running_loop().time()

    assert run(main(), 1) == 0.0


# --- processes ---


def test_nothing_of_a_killed_process_runs_again_not_even_a_finally() -> None:
    seen: list[str] = []

    async def child() -> None:
        try:
            await asyncio.sleep(1)
            seen.append("child")
        finally:
            if asyncio.get_running_loop().is_running():
                seen.append("finally")

    async def serve() -> None:
        task = asyncio.create_task(child())
        await task

    async def main() -> None:
        process = Process("broker")
        process.spawn(serve())
        await asyncio.sleep(0.5)
        process.kill()
        await asyncio.sleep(10)

    run(main(), 1)
    assert seen == []


def test_callers_of_a_killed_process_are_told_at_once() -> None:
    async def main() -> float:
        process = Process("broker")
        asyncio.get_running_loop().call_later(2, process.kill)
        with pytest.raises(ProcessDied):
            await process.call(asyncio.sleep(100))
        with pytest.raises(ProcessDied):
            await process.call(asyncio.sleep(0))
        return asyncio.get_running_loop().time()

    assert run(main(), 1) == 2.0


def test_a_call_returns_or_raises_what_the_process_does() -> None:
    async def answer() -> int:
        return 42

    async def fail() -> None:
        raise ValueError("no")

    async def main() -> None:
        process = Process("broker")
        assert await process.call(answer()) == 42
        with pytest.raises(ValueError, match="no"):
            await process.call(fail())

    run(main(), 1)


def test_what_fails_after_its_caller_gave_up_and_was_killed_is_no_error_that_nobody_took() -> None:
    """Nobody is there to look at it: neither was there on a real network."""
    loop = SimLoop(Random(1))  # type: ignore[abstract]

    async def fail() -> None:
        await asyncio.sleep(2)
        raise ValueError("no")

    async def ask(process: Process) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await process.call(fail())

    async def main() -> None:
        caller, called = Process("caller"), Process("called")
        caller.spawn(ask(called))
        await asyncio.sleep(1)
        caller.pause()
        await asyncio.sleep(2)
        caller.kill()
        await asyncio.gather(*[asyncio.sleep(0) for _ in range(200)])  # the loop forgets the tasks that are done

    loop.run_until_complete(main())
    loop.close()
    assert loop.problems == []


def test_a_paused_caller_gets_its_answer_when_it_goes_on() -> None:
    async def answer() -> int:
        await asyncio.sleep(1)
        return 42

    async def main() -> tuple[int, float]:
        loop = asyncio.get_running_loop()
        caller, called = Process("caller"), Process("called")
        asked = caller.spawn(called.call(answer()))
        await asyncio.sleep(0.5)
        caller.pause()
        loop.call_later(5, caller.resume)
        return await asked, loop.time()

    assert run(main(), 1) == (42, 5.5)


def test_a_paused_process_goes_on_where_it_stopped() -> None:
    async def main() -> tuple[float, float]:
        loop = asyncio.get_running_loop()
        process = Process("broker")

        async def serve() -> float:
            await asyncio.sleep(1)
            return loop.time()

        task = process.spawn(serve())
        await asyncio.sleep(0.5)
        process.pause()
        await asyncio.sleep(4.5)
        assert not task.done()
        process.resume()
        return await task, loop.time()

    assert run(main(), 1) == (5.0, 5.0)


# --- clock and work ---


def test_the_clock_follows_the_loop_and_its_date_can_jump() -> None:
    async def main() -> list[float]:
        clock = SimClock()
        seen: list[float] = [clock.time_us() - EPOCH_US]
        await clock.sleep(2)
        seen += [clock.time_us() - EPOCH_US, clock.elapsed()]
        clock.jump(-5)
        return [*seen, clock.time_us() - EPOCH_US, clock.elapsed()]

    assert run(main(), 1) == [0, 2_000_000, 2.0, -3_000_000, 2.0]


def test_work_is_done_inline_with_ids_from_the_seed() -> None:
    async def main() -> tuple[int, int]:
        work = SimWork(Random(7))
        return await work.run(lambda: 42), work.random_u64()

    result = run(main(), 1)
    assert result == run(main(), 2) and result[0] == 42 and 1 <= result[1] < 2**63
