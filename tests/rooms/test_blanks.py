"""Segments made ahead for busy topics: who gets one, what it costs, and that a crash anywhere loses nothing."""

from __future__ import annotations

import asyncio

import pytest

from pydanube.errors import DanubeError, DiskFailed, DiskFull
from pydanube.log import recovery
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
        await asyncio.sleep(2 * BUSY_SECONDS)
    sizes = [await machine.disk.size(machine.segments(log.topic)[-1]) for log in logs]
    assert [size == 16 * KIB for size in sizes] == [False, False, *[True] * LONG_MAX]
    await busy(logs[0], 4, first=8)
    assert await contents(logs[0]) == numbers(12)
    await wal.close()
    assert (await machine.verify()).problems == []


@simulated
async def test_topics_that_are_all_busy_do_not_take_them_from_each_other() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    logs = [await wal.topic(f"/default/t{number}", epoch=1) for number in range(LONG_MAX + 1)]
    for turn in range(30):
        for log in logs:
            await log.append(sized(KIB, f"{turn} ", log.topic))
            await asyncio.sleep(0.02)
    assert blanks(wal) <= 2 * LONG_MAX, "one that is full when there is no other makes room for the fifth"
    for log in logs:
        assert await contents(log) == numbers(30)


@simulated
async def test_a_segment_is_taken_although_another_cannot_give_its_zeros_back() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    logs = [await wal.topic(f"/default/t{number}", epoch=1) for number in range(LONG_MAX + 1)]

    async def no_room(path: str, length: int) -> None:
        raise DiskFull(path)

    machine.disk.truncate = no_room  # type: ignore[method-assign]
    for log in logs:
        await busy(log)
        await asyncio.sleep(2 * BUSY_SECONDS)
    assert blanks(wal) == LONG_MAX + 1
    machine.kill()
    wal = await machine.boot(**AHEAD)
    for log in logs:
        assert await contents(await wal.topic(log.topic, epoch=2), 0) == numbers(8)


@pytest.mark.parametrize("error", [DiskFull("x"), DiskFailed("x", "rename", "it is on another file system")])
@simulated
async def test_one_that_cannot_be_given_its_name_is_done_without(error: DanubeError) -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    really_rename = machine.disk.rename

    async def rename(source: str, target: str) -> None:
        if source == BLANK:
            raise error
        await really_rename(source, target)

    machine.disk.rename = rename  # type: ignore[method-assign]
    await busy(log, 24)
    assert BLANK not in machine.files()
    assert await contents(log) == numbers(24)
    await wal.close()
    assert (await machine.verify()).ok


@simulated
async def test_recovery_gives_the_zeros_back() -> None:
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    await busy(log)
    newest = machine.segments()[-1]
    machine.kill()
    log = await machine.reopened(epoch=2)
    assert await machine.disk.size(newest) < 16 * KIB
    assert await contents(log, 0) == numbers(8)
    machine.kill()
    assert await contents(await machine.reopened(epoch=3), 0) == numbers(8)


@simulated
async def test_a_group_that_ends_in_more_zeros_than_are_read_at_a_time_is_found_behind_damage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "READ_BYTES", 512)
    machine = Machine()
    wal = await machine.boot(**AHEAD)
    log = await wal.topic(TOPIC, epoch=1)
    first = await log.append(batch("first"))
    assert log.active is not None
    place = log.active.end
    await log.append(batch("second"))
    await log.append(batch("\0" * 4 * KIB))
    path = log.active.path
    machine.kill()
    await machine.overwrite(path, place + 40, b"\xff" * 8)
    log = await machine.reopened(epoch=2)
    assert await contents(log, first.offset + 2) == {first.offset + 2: "\0" * 4 * KIB}
    assert [(each.first, each.end) for each in log.recovered.damage] == [(1, 2)]


@simulated
async def test_a_roll_that_is_given_up_in_the_middle_is_finished_all_the_same() -> None:
    for step in range(1, 12):
        machine = Machine()
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
    machine = Machine(capacity_bytes=400 * KIB)
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
    with pytest.raises(DiskFull):
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
