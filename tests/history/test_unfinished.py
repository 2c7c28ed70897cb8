"""What must not be given up in the middle, and what must not be opened before it is whole."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.errors import DiskFull
from tests.harness.logs import TOPIC, LogFixture, batch, contents, simulated, sized

KIB = 1024


@simulated
async def test_a_roll_that_is_given_up_in_the_middle_is_finished_all_the_same() -> None:
    for step in range(1, 12):
        machine = LogFixture()
        wal = await machine.boot(ballast_bytes=0)
        log = await wal.topic(TOPIC, epoch=1)
        await log.append(batch("before"))
        reached = asyncio.Event()
        first = len(machine.disk.steps)

        async def stop_here(
            number: int, first: int = first, step: int = step, reached: asyncio.Event = reached
        ) -> None:
            if number - first == step:
                reached.set()
                await asyncio.sleep(1)

        machine.disk.before_step = stop_here
        rolling = asyncio.ensure_future(log.roll())
        await asyncio.wait({rolling, asyncio.ensure_future(reached.wait())}, return_when=asyncio.FIRST_COMPLETED)
        rolling.cancel()
        await asyncio.gather(rolling, return_exceptions=True)
        machine.disk.before_step = None
        await log.append(batch("after"))
        machine.kill()
        assert await contents(await machine.reopened(epoch=2), 0) == {0: "before", 1: "after"}
        if not reached.is_set():
            return
    raise AssertionError("so many steps are not needed")


@simulated
async def test_what_only_the_journal_has_is_there_when_a_topic_is_opened_again_by_the_same_process() -> None:
    machine = LogFixture(capacity_bytes=400 * KIB)
    wal = await machine.boot(ballast_bytes=0, journal_bytes=64 * KIB)
    logs = [await wal.topic(f"/default/t{number}", epoch=1) for number in range(4)]
    await asyncio.gather(*(log.append(sized(100, "a", log.topic)) for log in logs))
    await machine.create("other")
    await machine.overwrite("other", 0, bytes(await machine.disk.free_bytes() - 100))
    await asyncio.gather(*(log.append(sized(2000, "b", log.topic)) for log in logs))
    assert wal.committer.journaled_groups >= 1
    with pytest.raises(DiskFull):
        await logs[0].close()
    with pytest.raises(DiskFull):
        await wal.topic("/default/t0", epoch=2)
    await machine.remove("other")
    again = await wal.topic("/default/t0", epoch=2)
    assert await contents(again, 0) == {0: "a", 1: "b"}
    await asyncio.sleep(1)
    assert (await again.append(sized(100, "c", again.topic))).offset == 2
