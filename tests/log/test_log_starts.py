"""How an epoch begins: a first segment whose name could not be made safe, and two that both say to be the first."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pydanube.errors import DiskFailed, DiskFull, LogStopped, TailUnproven
from pydanube.formats.segment import encode_group, encode_segment_header, file_name
from pydanube.log.layout import CHECKPOINT, Checkpoint, epoch_directory
from pydanube.log.recovered import TailState
from pydanube.log.segment_files import read_segment_header
from pydanube.log.wal import Wal, WalConfig
from pydanube.stores.disk.files import FileDisk
from pydanube.stores.work.system import SystemClock, SystemWork
from tests.harness.logs import SMALL, TOPIC, LogFixture, batch, contents, fill, numbered, settle, simulated

FIRST, LAST = 1, 2**64 - 1  # ids that sort before and behind every random one


def failing(
    machine: LogFixture, what: str, times: int = 1, error: type[DiskFailed | DiskFull] = DiskFailed
) -> list[str]:
    """The next `times` calls of the disk that begin like this fail; returns those that did."""
    failed: list[str] = []

    async def fail(number: int) -> None:
        step = machine.disk.steps[-1]
        if step.startswith(what) and len(failed) < times:
            failed.append(step)
            raise error(what) if error is DiskFull else DiskFailed(what, "call", "input/output error")

    machine.disk.before_step = fail
    return failed


# --- preparing a log --------------------------------------------------------------------------------


@simulated
async def test_a_first_segment_whose_name_could_not_be_synced_stops_the_log_and_nothing_is_lost() -> None:
    for seed in range(6):
        machine = LogFixture(seed)
        wal = await machine.boot()
        log = await wal.topic(TOPIC, epoch=1)
        failed = failing(machine, f"sync_directory {log.directory}")
        await log.prepare()
        assert failed and wal.committer.stopped is not None
        with pytest.raises(LogStopped):
            await fill(log, "a")
        machine.kill()
        log = await machine.reopened(epoch=2)
        assert (log.head, log.recovered.damage) == (0, [])
        await fill(log, "a")
        machine.cut_power(seed)
        log = await machine.reopened(epoch=3)
        assert await contents(log) == numbered("a")


@simulated
async def test_a_first_segment_that_was_perhaps_renamed_stops_the_log() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    assert not failing(machine, "rename wal")
    await log.prepare()
    assert wal.committer.stopped is not None


@simulated
@pytest.mark.parametrize("what", ["create wal", "write [('wal", "sync ['wal"])
async def test_a_segment_that_fails_before_its_rename_is_made_again_and_nobody_notices(what: str) -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    failed = failing(machine, what)
    await log.prepare()
    assert failed and len(log.segments) == 1
    await fill(log, "a")
    machine.cut_power()
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a")
    assert not machine.files(".tmp")


@simulated
async def test_a_segment_that_fails_before_its_rename_twice_stops_the_log() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    failing(machine, "write [('wal", times=2)
    with pytest.raises(LogStopped):
        await fill(log, "a")
    assert machine.segments() == []


@simulated
async def test_no_room_for_the_first_segment_is_left_for_the_first_batch_to_find() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    assert failing(machine, "create wal", error=DiskFull) == []
    await log.prepare()
    assert wal.committer.stopped is None and log.segments == [] and machine.segments() == []
    assert [receipt.offset for receipt in await fill(log, "a")] == [0]


@simulated
async def test_no_room_for_the_sync_of_a_new_name_is_not_taken_for_a_segment_that_was_never_made() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    failing(machine, f"sync_directory {log.directory}", error=DiskFull)
    await log.prepare()
    assert wal.committer.stopped is not None


@simulated
async def test_preparing_is_finished_also_if_nobody_waits_for_it_any_more() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    machine.disk.hold_syncs("wal/")
    preparing = asyncio.create_task(log.prepare())
    await settle()
    preparing.cancel()
    await settle()
    machine.disk.release_syncs()
    await settle()
    assert preparing.cancelled()
    assert len(log.segments) == len(machine.segments()) == 1
    await fill(log, "a")
    assert len(machine.segments()) == 1


@simulated
async def test_a_log_that_is_closed_while_it_is_prepared_ends_with_the_segment_and_counts_nothing() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    machine.disk.hold_syncs("wal/")
    preparing = asyncio.create_task(log.prepare())
    await settle()
    closing = asyncio.create_task(log.close())
    await settle()
    machine.disk.release_syncs()
    await asyncio.gather(preparing, closing)
    assert wal.size_bytes() == 0
    checkpoint = Checkpoint.from_bytes(machine.hardware.content(f"{log.directory}/{CHECKPOINT}"))
    assert checkpoint is not None and checkpoint.finished
    log = await wal.topic(TOPIC, epoch=2)
    await fill(log, "a")
    await log.close()
    assert wal.size_bytes() == 0


@simulated
async def test_a_log_whose_close_was_given_up_while_it_is_prepared_counts_nothing_either() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    machine.disk.hold_syncs("wal/")
    preparing = asyncio.create_task(log.prepare())
    await settle()
    closing = asyncio.create_task(log.close())
    await settle()
    closing.cancel()
    await settle()
    machine.disk.release_syncs()
    await preparing
    assert wal.size_bytes() == 0


@simulated
@pytest.mark.parametrize("what", ["create journal", "sync ['journal", "make_directory journal"])
async def test_a_journal_file_that_cannot_be_made_ahead_is_made_by_who_needs_it(what: str) -> None:
    machine = LogFixture()
    wal = await machine.boot()
    failed = failing(machine, what)
    logs = [await wal.topic(f"/default/t{n}", epoch=1) for n in range(9)]
    assert failed
    receipts = await asyncio.gather(*(log.submit(batch("a", topic=log.topic)) for log in logs))
    assert [receipt.offset for receipt in receipts] == [0] * 9
    assert wal.committer.journaled_groups == 1


# --- two that begin one epoch -----------------------------------------------------------------------


async def second_start(machine: LogFixture, segment_id: int, *payloads: str, first_offset: int = 0) -> str:
    """Puts another first segment into epoch 1, as an earlier version did if it could not sync a name."""
    (path,) = machine.segments()
    disk = machine.hardware.process(97)
    read = await read_segment_header(disk, path)
    assert read is not None
    header = read[0]._replace(segment_id=segment_id, first_offset=first_offset)
    content = encode_segment_header(header)
    if payloads:
        group = encode_group(
            [batch(*payloads)],
            segment_id=segment_id,
            number=0,
            position=len(content),
            durable_before=len(content),
            first_offset=first_offset,
        )
        content += b"".join(map(bytes, group.buffers))
    other = f"{epoch_directory(TOPIC, 1)}/{file_name(first_offset, segment_id)}"
    await machine.create(other, content)
    return other


async def killed(*payloads: str) -> LogFixture:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, *payloads)
    machine.kill()
    return machine


@simulated
@pytest.mark.parametrize("segment_id", [FIRST, LAST])
async def test_an_empty_second_start_is_removed_whatever_its_id_and_the_epoch_keeps_its_messages(
    segment_id: int, caplog: pytest.LogCaptureFixture
) -> None:
    machine = await killed("a", "b", "c")
    empty = await second_start(machine, segment_id)
    assert (await machine.verify()).ok
    log = await machine.reopened(epoch=2)
    assert (log.head, log.recovered.tail, log.recovered.damage) == (3, TailState.CLEAN, [])
    assert await contents(log) == numbered("a", "b", "c")
    assert empty not in machine.files()
    assert [record.path for record in caplog.records if "second start" in record.message] == [empty] * 2  # type: ignore[attr-defined]
    await fill(log, "d")
    machine.cut_power()
    log = await machine.reopened(epoch=3)
    assert await contents(log) == numbered(*"abcd")


@simulated
@pytest.mark.parametrize("segment_id", [FIRST, LAST])
async def test_an_empty_second_start_beside_a_torn_first_group_leaves_the_torn_bytes_for_a_person(
    segment_id: int,
) -> None:
    machine = await killed("a")
    (path,) = machine.segments()
    machine.hardware.flip(path, len(machine.hardware.content(path).rstrip(b"\0")) - 1)
    await second_start(machine, segment_id)
    log = await machine.reopened(epoch=2)
    assert log.head == 0
    assert [torn.path for torn in log.recovered.torn] == [path]


@simulated
async def test_of_several_empty_starts_one_stays_and_the_log_is_empty() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await log.prepare()
    machine.kill()
    await second_start(machine, FIRST)
    log = await machine.reopened(epoch=2)
    assert (log.head, log.recovered.tail, log.recovered.damage) == (0, TailState.CLEAN, [])
    assert len(machine.segments()) == 1


@simulated
@pytest.mark.parametrize("segment_id", [FIRST, LAST])
async def test_two_starts_that_both_hold_messages_are_damage_and_the_end_is_unproven(segment_id: int) -> None:
    machine = await killed("a", "b", "c")
    (mine,) = machine.segments()
    other = await second_start(machine, segment_id, "x")
    problems = "".join(problem for topic in (await machine.verify()).topics for problem in topic.problems)
    assert mine in problems and other in problems
    for _ in range(2):  # the second time the epoch is finished, and is judged the same
        wal = await machine.boot()
        with pytest.raises(TailUnproven):
            await wal.topic(TOPIC, epoch=2)
        machine.kill()
    log = await machine.reopened(epoch=2, start_offset=100)
    assert sorted(damage.path for damage in log.recovered.damage) == sorted([mine, other])
    assert "nothing says which of them is the log" in str(log.recovered.damage[0])
    assert log.held() == []
    await fill(log, "d")
    assert await contents(log, 100) == {100: "d"}
    assert {mine, other} <= set(machine.files())


@simulated
async def test_an_epoch_that_ended_with_an_empty_start_says_what_was_beside_it() -> None:
    """An earlier version took the empty one for the log when its id sorted last, and finished the epoch there."""
    machine = await killed("a", "b", "c")
    (mine,) = machine.segments()
    await second_start(machine, LAST)
    finished = Checkpoint(first_offset=0, finished=True, end_offset=0, segment_id=LAST, end_position=0)
    await machine.create(f"{epoch_directory(TOPIC, 1)}/{CHECKPOINT}", finished.to_bytes())
    for epoch in (2, 3):
        log = await machine.reopened(epoch=epoch)
        (damage,) = log.recovered.damage
        assert (damage.path, damage.first, damage.end) == (mine, 0, 3)
        assert log.head == 0, "how the epoch ended is not judged again"
        machine.kill()
    assert mine in machine.files()


@simulated
async def test_a_finished_epoch_with_an_empty_second_start_is_what_it_was() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b")
    await wal.close()
    empty = await second_start(machine, LAST)
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered("a", "b")
    assert log.recovered.damage == [] and empty not in machine.files()


@simulated
@pytest.mark.parametrize("segment_id", [FIRST, LAST])
async def test_behind_missing_segments_an_empty_one_stands_before_what_begins_at_its_offset(segment_id: int) -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    await log.roll()
    await fill(log, "b", "c")
    machine.kill()
    first, second = machine.segments()
    disk = machine.hardware.process(97)
    read = await read_segment_header(disk, second)
    assert read is not None
    empty = encode_segment_header(read[0]._replace(segment_id=segment_id, previous_id=77, previous_end=300))
    await machine.create(f"{log.directory}/{file_name(1, segment_id)}", empty)
    await machine.remove(first)
    log = await machine.reopened(epoch=2)
    assert log.head == 3, "its messages are behind the empty one, not before it"
    assert await contents(log, 1) == numbered("b", "c", first=1)


# --- the same on a real directory -------------------------------------------------------------------


@asynccontextmanager
async def process(directory: Path) -> AsyncIterator[Wal]:
    """One life of a process on real files. It ends as with kill -9: nothing is closed or finished."""
    disk = FileDisk(directory)
    await disk.make_directory("")
    wal = await Wal.open(disk, SystemClock(), SystemWork(), WalConfig(**SMALL))  # type: ignore[arg-type]
    try:
        yield wal
    finally:
        assert wal._task is not None
        wal._task.cancel()
        await asyncio.gather(wal._task, return_exceptions=True)
        disk.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


def test_on_real_files_a_failed_sync_of_the_first_name_loses_no_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, failed = os.fsync, []

    def fail(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path.endswith(epoch_directory(TOPIC, 1)):
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    async def live() -> None:
        acknowledged = 0
        async with process(tmp_path) as wal:
            log = await wal.topic(TOPIC, epoch=1)
            monkeypatch.setattr(os, "fsync", fail)
            await log.prepare()
            monkeypatch.setattr(os, "fsync", fsync)
            assert len(failed) == 1
            for text in "abc":
                try:
                    acknowledged = (await log.append(batch(text))).offset + 1
                except LogStopped:
                    break
        async with process(tmp_path) as wal:
            log = await wal.topic(TOPIC, epoch=2)
            assert log.head == acknowledged
            assert log.recovered.damage == []
            assert [receipt.offset for receipt in await fill(log, "d")] == [acknowledged]

    run(live)


@pytest.mark.parametrize("segment_id", [FIRST, LAST])
def test_on_real_files_an_empty_second_start_is_removed_whatever_its_id(tmp_path: Path, segment_id: int) -> None:
    async def live() -> None:
        async with process(tmp_path) as wal:
            log = await wal.topic(TOPIC, epoch=1)
            await fill(log, "a", "b", "c")
            header = log.segments[0].header._replace(segment_id=segment_id)
        empty = tmp_path / log.directory / file_name(0, segment_id)
        empty.write_bytes(encode_segment_header(header))
        async with process(tmp_path) as wal:
            log = await wal.topic(TOPIC, epoch=2)
            assert await contents(log) == numbered("a", "b", "c")
            assert log.recovered.damage == [] and not empty.exists()

    run(live)
