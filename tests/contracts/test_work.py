"""What every Work does."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from pydanube.ports import Work


async def test_run_returns_what_the_function_returns(work: Work) -> None:
    assert await work.run(lambda: 6 * 7) == 42


async def test_run_raises_what_the_function_raises(work: Work) -> None:
    def fail() -> None:
        raise ValueError("what the function says")

    with pytest.raises(ValueError, match="what the function says"):
        await work.run(fail)


async def test_many_runs_go_on_at_once_and_each_gets_its_own_answer(work: Work) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work.run(lambda i=i: i * i)) for i in range(50)]  # type: ignore[misc]
    assert [task.result() for task in tasks] == [i * i for i in range(50)]


async def test_a_failed_run_does_not_spoil_the_next(work: Work) -> None:
    with pytest.raises(ZeroDivisionError):
        await work.run(lambda: 1 // 0)
    assert await work.run(lambda: "fine") == "fine"


async def test_what_is_run_apart_returns_and_raises_what_the_function_does(work: Work) -> None:
    assert await work.run_in_worker(partial(divmod, 47, 5)) == (9, 2)
    with pytest.raises(ZeroDivisionError):
        await work.run_in_worker(partial(divmod, 47, 0))
    assert await work.run_in_worker(partial(len, b"x" * 3_000_000)) == 3_000_000
    assert await work.run_in_worker(partial(bytearray, 3_000_000)) == bytearray(3_000_000)


async def test_what_waits_apart_returns_and_raises_what_it_does(work: Work) -> None:
    assert await work.await_in_worker(partial(asyncio.sleep, 0, 25)) == 25
    with pytest.raises(TypeError):
        await work.await_in_worker(partial(asyncio.sleep, "long"))  # type: ignore[arg-type]


async def test_random_numbers_are_positive_and_fit_a_signed_64_bit_number(work: Work) -> None:
    assert all(1 <= work.random_u64() < 2**63 for _ in range(1000))


async def test_random_numbers_do_not_repeat_and_use_the_whole_range(work: Work) -> None:
    numbers = {work.random_u64() for _ in range(1000)}
    assert len(numbers) == 1000
    assert any(number >= 2**62 for number in numbers)
    assert any(number < 2**62 for number in numbers)
