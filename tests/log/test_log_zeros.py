"""Zeros ahead of small groups: written when nobody waits, needed by nobody, and in nobody's way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pydanube.core.names import TopicName
from pydanube.errors import DiskFull
from pydanube.history.leftovers import remove_files
from pydanube.log.wal import TopicLog, Wal
from pydanube.ports import Write, WriteResult
from tests.harness.logs import (
    FILL_BYTES,
    OTHER_TOPIC,
    TOPIC,
    LogFixture,
    batch,
    contents,
    fill,
    numbered,
    settle,
    simulated,
    sized,
)

BEYOND = [f"{n}" for n in range(12)]  # more than the log goes on without zeros


def zeros_written(machine: LogFixture) -> list[Write]:
    return [write for write in machine.disk.written if write.path.endswith(".wal") and not any(map(any, write.buffers))]


async def started(machine: LogFixture, **config: int) -> tuple[Wal, TopicLog]:
    wal = await machine.boot(**config)
    return wal, await wal.topic(TOPIC, epoch=1)


@simulated
async def test_nobody_waits_for_zeros_they_are_written_in_the_first_pause() -> None:
    machine = LogFixture()
    _, log = await started(machine)
    await fill(log, "a", "b", "c")
    assert zeros_written(machine) == []
    await machine.clock.sleep(0.1)
    (segment,) = log.segments
    assert [write.position for write in zeros_written(machine)] == [segment.end]
    assert len(machine.hardware.content(segment.path)) == segment.filled == segment.end + FILL_BYTES
    first = segment.filled
    while segment.filled - segment.end >= FILL_BYTES // 2:
        await fill(log, "more")
    await machine.clock.sleep(0.1)
    second = zeros_written(machine)[1]
    assert second.position == first, "only half of them were used"
    assert segment.filled == segment.end + FILL_BYTES


@simulated
async def test_a_producer_that_never_pauses_gets_zeros_between_two_groups() -> None:
    machine = LogFixture()
    _, log = await started(machine)
    await fill(log, *BEYOND)
    await settle()
    assert len(zeros_written(machine)) == 1
    (segment,) = log.segments
    assert segment.filled > segment.end
    machine.cut_power()
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered(*BEYOND)


@simulated
async def test_a_topic_that_writes_all_the_time_is_not_taken_for_one_that_pauses() -> None:
    machine = LogFixture()
    _, log = await started(machine)
    for payload in BEYOND[:6]:
        await fill(log, payload)
        await machine.clock.sleep(0.0015)
    assert zeros_written(machine) == []
    await machine.clock.sleep(0.005)
    assert len(zeros_written(machine)) == 1


@simulated
async def test_topics_get_their_zeros_one_after_the_other_and_not_for_a_message_or_two() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(5)]
    for log in logs:
        await fill(log, "a", "b")
    await machine.clock.sleep(0.1)
    assert zeros_written(machine) == []
    for log in logs:
        await fill(log, "c")
    machine.disk.hold_syncs("wal/")
    await asyncio.sleep(0.1)
    assert len(zeros_written(machine)) == 1
    machine.disk.release_syncs()
    await asyncio.sleep(0.1)
    assert len(zeros_written(machine)) == 5


@simulated
async def test_while_one_topic_gets_zeros_the_others_do_not_wait() -> None:
    machine = LogFixture()
    wal, log = await started(machine)
    other = await wal.topic(OTHER_TOPIC, epoch=1)
    await fill(other, "x")
    await fill(log, "0", "1", "2")
    (segment,) = log.segments
    await machine.clock.sleep(0)
    machine.disk.hold_syncs(segment.path)
    await asyncio.sleep(0.02)  # the pause
    assert machine.disk.syncs_waiting == 1 and len(zeros_written(machine)) >= 1
    waiting = log.submit(batch("3"))
    assert [receipt.offset for receipt in await fill(other, "y", "z")] == [1, 2]
    assert not waiting.done(), "syncs of one file do not overlap"
    machine.disk.release_syncs()
    assert (await waiting).offset == 3


@simulated
async def test_a_log_may_be_closed_and_the_directory_given_up_while_zeros_are_written() -> None:
    machine = LogFixture()
    wal, log = await started(machine)
    await fill(log, "a", "b", "c")
    machine.disk.hold_syncs(log.segments[0].path)
    await asyncio.sleep(0.02)
    assert machine.disk.syncs_waiting == 1
    waiting = log.submit(batch("d"))
    closing = asyncio.create_task(wal.close())
    await settle()
    assert not closing.done()
    machine.disk.release_syncs()
    await closing
    assert (await waiting).offset == 3
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered(*"abcd")


@simulated
async def test_the_files_of_a_topic_may_be_removed_while_zeros_are_written_to_them() -> None:
    machine = LogFixture()
    wal, log = await started(machine)
    await fill(log, "a", "b", "c")
    machine.disk.hold_syncs(log.segments[0].path)
    await asyncio.sleep(0.02)
    assert machine.disk.syncs_waiting == 1
    await log.close()
    await remove_files(machine.disk, TopicName(TOPIC))
    machine.disk.release_syncs()
    await settle()
    other = await wal.topic(OTHER_TOPIC, epoch=1)
    await fill(other, "b")
    assert wal.committer.stopped is None


@simulated
async def test_zeros_that_cannot_be_synced_end_the_segment_and_cost_nothing_else() -> None:
    machine = LogFixture()
    wal, log = await started(machine)
    await fill(log, "a", "b", "c")
    (old,) = log.segments
    machine.disk.sync_failures = [old.path]
    await machine.clock.sleep(0.1)
    assert machine.disk.sync_failures == []
    await fill(log, "d")
    first, second = log.segments
    assert (first, second.header.previous_id, second.header.previous_end) == (old, old.segment_id, old.end)
    assert wal.committer.stopped is None
    machine.cut_power()
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered(*"abcd")
    assert log.recovered.damage == []


@simulated
async def test_no_room_for_zeros_is_no_reason_to_refuse_anything_and_takes_no_room() -> None:
    machine = LogFixture()
    _, log = await started(machine, ballast_bytes=0)
    await fill(log, "a", "b", "c")
    machine.hardware.capacity_bytes = machine.hardware.used_bytes + FILL_BYTES // 2
    await machine.clock.sleep(0.1)
    assert len(zeros_written(machine)) == 1
    assert machine.hardware.free_bytes == FILL_BYTES // 2
    await fill(log, "d", "e")
    await machine.clock.sleep(0.1)
    assert len(zeros_written(machine)) == 1, "and is not tried for every group"
    machine.cut_power()
    machine.hardware.capacity_bytes = None
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered(*"abcde")


@simulated
async def test_a_power_cut_while_zeros_are_written_leaves_the_log_as_it_was() -> None:
    for seed in range(20):
        machine = LogFixture(seed)
        _, log = await started(machine)
        await fill(log, "a", "b", "c")
        machine.disk.hold_syncs(log.segments[0].path)
        await asyncio.sleep(0.02)
        assert machine.disk.syncs_waiting == 1
        machine.cut_power(seed)
        log = await machine.reopened(epoch=2)
        assert await contents(log) == numbered("a", "b", "c")
        assert log.recovered.damage == []


# --- no room for what comes before a group ----------------------------------------------------------


@simulated
async def test_a_refused_batch_is_not_there_after_a_crash_if_only_what_comes_before_it_found_no_room() -> None:
    machine = LogFixture()
    wal = await machine.boot(group_bytes=1 << 20)
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(3)]
    await asyncio.gather(*(log.submit(batch("journaled", topic=log.topic)) for log in logs))
    log = logs[0]
    (segment,) = log.segments
    assert segment.copied < segment.end, "only the journal has it"
    write = machine.disk.write

    async def no_room_for_the_first(writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        # A real disk has room for one block and not for another: files have holes, and others free some in between.
        before, rest = writes[0], writes[1:]
        assert before.position == segment.copied
        return [DiskFull(before.path), *(await write(rest, sync=sync) if rest else [])]

    machine.disk.write = no_room_for_the_first  # type: ignore[method-assign]
    with pytest.raises(DiskFull):
        await log.append(sized(5000, "refused", log.topic))
    machine.kill()
    log = await machine.reopened(log.topic, epoch=2)
    assert await contents(log) == numbered("journaled")


@simulated
async def test_a_batch_that_found_no_room_can_be_sent_again_behind_what_only_the_journal_has() -> None:
    machine = LogFixture()
    wal = await machine.boot(ballast_bytes=0)
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(3)]
    await asyncio.gather(*(log.submit(batch("journaled", topic=log.topic)) for log in logs))
    machine.hardware.capacity_bytes = machine.hardware.used_bytes + 2000
    with pytest.raises(DiskFull):
        await logs[0].append(sized(5000, "refused", logs[0].topic))
    await settle()
    assert machine.hardware.free_bytes == 2000, "what was begun is cut off"
    machine.hardware.capacity_bytes = None
    await machine.clock.sleep(1)
    await fill(logs[0], "again")
    assert await contents(logs[0]) == numbered("journaled", "again")
    machine.cut_power()
    log = await machine.reopened(logs[0].topic, epoch=2)
    assert await contents(log) == numbered("journaled", "again")
