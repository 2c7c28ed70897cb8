"""What every Clock does."""

from __future__ import annotations

import asyncio

from tests.contracts.adapters import ClockCase

MOMENT = 0.002  # seconds; the only real waiting in these tests


async def test_time_is_in_microseconds_since_1970(clock_case: ClockCase) -> None:
    now_us = clock_case.clock.time_us()
    assert isinstance(now_us, int)
    assert 1_700_000_000_000_000 < now_us < 5_000_000_000_000_000  # from 2023 to 2128


async def test_elapsed_never_goes_back(clock_case: ClockCase) -> None:
    seen = [clock_case.clock.elapsed() for _ in range(1000)]
    assert seen == sorted(seen)


async def test_elapsed_and_time_move_together(clock_case: ClockCase) -> None:
    elapsed, time_us = clock_case.clock.elapsed(), clock_case.clock.time_us()
    await clock_case.pass_time(MOMENT)
    assert clock_case.clock.elapsed() - elapsed >= MOMENT * 0.99
    assert clock_case.clock.time_us() - time_us >= MOMENT * 990_000


async def test_a_sleeper_wakes_after_at_least_its_time(clock_case: ClockCase) -> None:
    start = clock_case.clock.elapsed()
    sleeper = asyncio.create_task(clock_case.clock.sleep(MOMENT))
    await clock_case.pass_time(MOMENT / 2)
    await clock_case.pass_time(MOMENT)
    await sleeper
    assert clock_case.clock.elapsed() - start >= MOMENT * 0.99


async def test_sleepers_wake_in_the_order_of_their_times(clock_case: ClockCase) -> None:
    woken: list[int] = []

    async def sleep(moments: int) -> None:
        await clock_case.clock.sleep(moments * MOMENT)
        woken.append(moments)

    async with asyncio.TaskGroup() as group:
        for moments in (60, 20, 40):  # far apart: a busy machine may be slow to start them
            group.create_task(sleep(moments))
        await clock_case.pass_time(80 * MOMENT)
    assert woken == [20, 40, 60]


async def test_sleeping_for_no_time_lets_others_run(clock_case: ClockCase) -> None:
    ran: list[str] = []
    asyncio.get_running_loop().call_soon(ran.append, "other")
    await clock_case.clock.sleep(0)
    assert ran == ["other"]


async def test_a_cancelled_sleeper_does_not_hold_up_the_others(clock_case: ClockCase) -> None:
    cancelled = asyncio.create_task(clock_case.clock.sleep(MOMENT))
    patient = asyncio.create_task(clock_case.clock.sleep(MOMENT))
    await asyncio.sleep(0)
    cancelled.cancel()
    await clock_case.pass_time(2 * MOMENT)
    await patient
    assert cancelled.cancelled()
