"""Segments made ahead for busy topics: who gets one, what it costs, and that a crash anywhere loses nothing."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.log.blanks import AGAIN_SECONDS, BUSY_SECONDS, LONG_MAX
from pydanube.log.layout import BLANK
from pydanube.log.wal import TopicLog, Wal
from tests.rooms.logs import TOPIC, Machine, batch, contents, numbered, settle, simulated, sized

KIB = 1024
AHEAD = {"segment_bytes": 16 * KIB, "busy_bytes": 2 * KIB, "ballast_bytes": 0}


async def busy(log: TopicLog, count: int = 8, *, seconds: float = 0.02, first: int = 0) -> None:
    """One KiB each, faster than it takes to be busy."""
    for number in range(first, first + count):
        await log.append(sized(KIB, f"{number} ", log.topic))
        await asyncio.sleep(seconds)


def numbers(count: int) -> dict[int, str]:
    return numbered(*(f"{number} " for number in range(count)))


def blanks(wal: Wal) -> int:
    return wal.metrics.rotations["busy"]


@simulated
async def test_a_busy_topic_goes_on_in_a_segment_whose_blocks_are_there_already() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    await busy(log)
    assert blanks(wal) == 1
    newest = machine.segments()[-1]
    size = await machine.disk.size(newest)
    assert size == 16 * KIB
    machine.disk.written.clear()
    await busy(log, 2, first=8)
    assert await machine.disk.size(newest) == size, "it is overwritten, and does not grow"
    assert [write.path for write in machine.disk.written if write.path == newest] == [newest] * 2, "and no zeros"
    assert await contents(log) == numbers(10)


@simulated
async def test_segment_follows_segment_made_ahead_while_the_topic_is_busy() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    await busy(log, 64)
    sizes = [await machine.disk.size(path) for path in machine.segments()]
    assert len(sizes) >= 4 and all(size >= 16 * KIB for size in sizes[1:])
    assert blanks(wal) == 1, "the others came when the one before was full"
    await wal.close()
    assert (await machine.verify()).problems == []


@simulated
async def test_a_topic_that_takes_its_time_gets_none() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    await busy(log, 12, seconds=BUSY_SECONDS)
    assert blanks(wal) == 0 and BLANK not in machine.files()


@simulated
async def test_a_topic_that_was_busy_a_while_ago_gets_none() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    machine.disk.hold_syncs(BLANK)
    await busy(log)
    machine.disk.release_syncs()
    await asyncio.sleep(2 * BUSY_SECONDS)
    assert BLANK in machine.files()
    await log.append(batch("late"))
    assert blanks(wal) == 0


@simulated
async def test_nothing_is_made_if_it_is_switched_off() -> None:
    machine = Machine()
    wal = await machine.boot(**{**AHEAD, "busy_bytes": 0})
    log = await wal.topic(TOPIC, epoch=1)
    await busy(log, 64)
    assert blanks(wal) == 0 and not any(BLANK in step for step in machine.disk.steps)


@simulated
async def test_making_one_keeps_nobody_waiting() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    machine.disk.hold_syncs(BLANK)
    async with asyncio.timeout(10):
        await busy(log, 24)
    assert machine.disk.syncs_waiting == 1 and blanks(wal) == 0
    machine.disk.release_syncs()


@simulated
async def test_the_zeros_go_when_the_topic_is_closed_and_the_file_made_ahead_with_the_log() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    await busy(log, 10)
    newest = machine.segments()[-1]
    assert BLANK in machine.files(), "the next one"
    end = log.active.end if log.active is not None else 0
    await log.close()
    assert await machine.disk.size(newest) == end < 16 * KIB
    await wal.close()
    assert BLANK not in machine.files()


@simulated
async def test_closing_the_log_waits_for_the_one_that_is_being_made() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    machine.disk.hold_syncs(BLANK)
    await busy(log)
    closing = asyncio.ensure_future(wal.close())
    await settle()
    assert machine.disk.syncs_waiting == 1 and not closing.done()
    machine.disk.release_syncs()
    await closing
    await settle()
    assert BLANK not in machine.files()


@simulated
async def test_of_many_busy_topics_the_one_that_is_quiet_longest_gives_its_zeros_back_and_goes_on() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    logs = [await wal.topic(f"/default/t{number}", epoch=1) for number in range(LONG_MAX + 2)]
    for log in logs:
        await busy(log)
    sizes = [await machine.disk.size(machine.segments(log.topic)[-1]) for log in logs]
    assert [size == 16 * KIB for size in sizes] == [False, False, *[True] * LONG_MAX]
    await busy(logs[0], 4, first=8)
    assert await contents(logs[0]) == numbers(12)
    await wal.close()
    assert (await machine.verify()).problems == []


@simulated
async def test_one_that_could_not_be_made_is_done_without_and_tried_again_later() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    machine.disk.sync_failures.append(BLANK)
    await busy(log, 16)
    assert blanks(wal) == 0 and BLANK not in machine.files()
    await asyncio.sleep(AGAIN_SECONDS)
    await busy(log, 16)
    assert blanks(wal) == 1


@simulated
async def test_no_room_is_taken_for_one_where_there_is_little_and_a_full_disk_gets_it_back() -> None:
    machine = Machine(capacity_bytes=48 * KIB)
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    await busy(log, 16)
    assert not any(step.startswith("create") and BLANK in step for step in machine.disk.steps)

    machine = Machine(capacity_bytes=100 * KIB)
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    await busy(log)
    await asyncio.sleep(1)
    assert BLANK in machine.files()
    stored = 8
    with pytest.raises(Exception, match="no room"):
        while True:
            await log.append(sized(4 * KIB, f"{stored} "))
            stored += 1
    assert BLANK not in machine.files()
    assert len(await contents(log)) == stored


@pytest.mark.parametrize("power", [True, False])
@simulated
async def test_a_crash_before_any_disk_call_loses_nothing_that_was_acknowledged(power: bool) -> None:
    step = 0
    finished = False
    while not finished:
        step += 1
        machine = Machine(step)
        wal = await machine.boot(**AHEAD)
        log = await wal.topic(TOPIC, epoch=1)
        await busy(log, 3)
        acknowledged = 3

        async def go_on(log: TopicLog = log) -> None:
            nonlocal acknowledged
            while acknowledged < 24:
                await log.append(sized(KIB, f"{acknowledged} "))
                acknowledged += 1
                await asyncio.sleep(0.02)

        finished = not await machine.crash_during(go_on, step, power=power)
        if not finished:
            wal = await machine.boot(**AHEAD)
            assert BLANK not in machine.files(), "whatever it was, it is nobody's"
            log = await wal.topic(TOPIC, epoch=2)
        kept = await contents(log, 0)
        assert kept in (numbers(acknowledged), numbers(acknowledged + 1))
        await busy(log, 6, first=100)
        assert len(await contents(log, 0)) == len(kept) + 6
        await settle()
        await wal.close()
        assert (await machine.verify()).problems == []
    assert step > 60, "it was taken in the middle of it"
