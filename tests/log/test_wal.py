"""A data directory and its topics: opening, epochs and offsets, rolling, sessions, retention, reservation, refusals."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from random import Random

import pyarrow as pa
import pytest
from crc32c import crc32c

from pydanube.core.commit import machine as commit_machine
from pydanube.core.commit.values import CommitReceipt
from pydanube.errors import (
    ConfigError,
    DirectoryInUse,
    FormatTooNew,
    InvalidBatch,
    LogClosed,
    LogDamaged,
    OffsetOutOfRange,
    OffsetTaken,
    OutOfSequence,
    ProducerFenced,
    SessionUnknown,
)
from pydanube.formats.batch import parse
from pydanube.log.layout import FORMAT, epoch_directory
from pydanube.log.wal import Wal, WalConfig
from pydanube.stores.disk.memory import MemoryDisk
from pydanube.stores.work.memory import MemoryWork
from pydanube.stores.work.memory_clock import LoopClock
from tests.harness.logs import (
    OTHER_TOPIC,
    TOPIC,
    LogFixture,
    Producer,
    batch,
    contents,
    fill,
    groups_of,
    numbered,
    settle,
    simulated,
    sized,
)

every_end = pytest.mark.parametrize("end", ["close", "kill", "power cut"])


async def end_process(end: str, machine: LogFixture, wal: Wal) -> None:
    if end == "close":
        await wal.close()
    elif end == "kill":
        machine.kill()
    else:
        machine.cut_power(5)


# --- the directory ----------------------------------------------------------------------------------


@simulated
async def test_a_log_on_the_memory_disk_keeps_what_it_is_given() -> None:
    disk = MemoryDisk()
    for epoch in (1, 2, 3):
        wal = await Wal.open(disk, LoopClock(), MemoryWork(Random(epoch)), WalConfig(ballast_bytes=0))
        log = await wal.topic(TOPIC, epoch=epoch)
        await fill(log, f"{epoch}")
        await wal.close()
    wal = await Wal.open(disk, LoopClock(), MemoryWork(Random(9)), WalConfig(ballast_bytes=0))
    assert await contents(await wal.topic(TOPIC, epoch=4)) == numbered("1", "2", "3")


@simulated
async def test_a_directory_in_use_is_refused_and_its_holder_named_by_pid() -> None:
    disk = MemoryDisk(pid=4711)
    wal = await Wal.open(disk, LoopClock(), MemoryWork(Random(1)), WalConfig(ballast_bytes=0))
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    other = disk.another_process(pid=4712)
    with pytest.raises(DirectoryInUse, match="in use by process 4711: stop it first, or choose another") as refusal:
        await Wal.open(other, LoopClock(), MemoryWork(Random(2)), WalConfig(ballast_bytes=0))
    assert refusal.value.pid == 4711
    await fill(log, "b")  # the holder did not notice
    disk.end_process()  # killed: the directory is usable at once
    wal = await Wal.open(other, LoopClock(), MemoryWork(Random(2)), WalConfig(ballast_bytes=0))
    assert await contents(await wal.topic(TOPIC, epoch=2)) == numbered("a", "b")


@simulated
async def test_a_directory_from_a_newer_version_is_refused_with_what_to_do_and_not_touched() -> None:
    machine = LogFixture()
    await (await machine.boot()).close()
    await machine.replace(FORMAT, b'{"product": "pydanube", "format": 2}')
    before = {path: machine.hardware.content(path) for path in machine.files()}
    with pytest.raises(FormatTooNew, match="has format 2 and this version reads formats up to 1: upgrade PyDanube"):
        await machine.boot()
    assert {path: machine.hardware.content(path) for path in machine.files()} == before
    await machine.replace(FORMAT, b'{"product": "pydanube", "format": 1}')
    await machine.boot()  # the lock was given back


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xff\xfe\x00",
        b"hello",
        b"[]",
        b"17",
        b"{}",
        b'{"format": null}',
        b'{"format": "x"}',
        b'{"format": 1e999}',
    ],
)
@simulated
async def test_a_format_file_that_is_garbage_is_refused(garbage: bytes) -> None:
    machine = LogFixture()
    await (await machine.boot()).close()
    await machine.replace(FORMAT, garbage)
    with pytest.raises(ConfigError, match=r"FORMAT = .* is not allowed: a data directory of PyDanube"):
        await machine.boot()
    assert machine.hardware.content(FORMAT) == garbage


@simulated
async def test_a_new_directory_says_its_format_and_keeps_saying_it() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    machine.cut_power()
    assert json.loads(machine.hardware.content(FORMAT)) == {"product": "pydanube", "format": 1}
    assert wal.problems == []
    await machine.boot()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("segment_bytes", 1023),
        ("group_bytes", 0),
        ("segment_bytes", 2**31),
        ("segment_seconds", 0),
        ("cache_bytes", -1),
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(setting: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"wal.{setting} = {value} is not allowed"):
        WalConfig(**{setting: value})


# --- epochs and offsets -----------------------------------------------------------------------------


@every_end
@simulated
async def test_offsets_go_on_exactly_after_every_restart_with_rolled_segments(end: str) -> None:
    machine = LogFixture()
    expected: list[str] = []
    for epoch in range(1, 6):
        wal = await machine.boot(segment_bytes=2000)
        log = await wal.topic(TOPIC, epoch=epoch)
        assert log.current_offset() == len(expected)
        receipts = await fill(log, *(f"{epoch}{n}" for n in range(5)))
        assert [receipt.offset for receipt in receipts] == list(range(len(expected), len(expected) + 5))
        assert {receipt.epoch for receipt in receipts} == {epoch}
        expected += [f"{epoch}{n}" for n in range(5)]
        assert await contents(log) == numbered(*expected)
        await end_process(end, machine, wal)
    log = await machine.reopened(epoch=9)
    assert await contents(log) == numbered(*expected)
    assert log.held() == [(0, len(expected))]


@simulated
async def test_every_epoch_has_a_directory_of_its_own_and_adds_to_no_other() -> None:
    machine = LogFixture()
    for epoch in (1, 5):
        wal = await machine.boot()
        await fill(await wal.topic(TOPIC, epoch=epoch), f"{epoch}")
        await wal.close()
    directories = {path.rpartition("/")[0] for path in machine.segments()}
    assert directories == {epoch_directory(TOPIC, 1), epoch_directory(TOPIC, 5)}
    assert epoch_directory(TOPIC, 5) == "wal/default/orders/00000000000000000005"
    first = {path: machine.hardware.content(path) for path in machine.segments() if "0001/" in path}
    await fill(await machine.reopened(epoch=6), "6")
    assert all(machine.hardware.content(path) == content for path, content in first.items())


@every_end
@simulated
async def test_an_epoch_that_was_used_is_refused_and_the_next_free_one_named(end: str) -> None:
    machine = LogFixture()
    wal = await machine.boot()
    await fill(await wal.topic(TOPIC, epoch=3), "a")
    with pytest.raises(OffsetTaken):  # it is open
        await wal.topic(TOPIC, epoch=4)
    await end_process(end, machine, wal)
    wal = await machine.boot()
    for epoch in (1, 3):
        with pytest.raises(OffsetTaken, match=f"epoch {epoch} of {TOPIC} was given before: the next free one is 4"):
            await wal.topic(TOPIC, epoch=epoch)
    log = await wal.topic(TOPIC, epoch=4)
    assert log.current_offset() == 1


@simulated
async def test_a_start_offset_that_was_given_is_refused_and_the_next_free_one_named() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    await fill(await wal.topic(TOPIC, epoch=1), "a", "b", "c")
    await wal.close()
    wal = await machine.boot()
    with pytest.raises(OffsetTaken, match=f"offset 2 of {TOPIC} was given before: the next free one is 3"):
        await wal.topic(TOPIC, epoch=2, start_offset=2)
    log = await wal.topic(TOPIC, epoch=2, start_offset=3)
    assert (await fill(log, "d"))[0].offset == 3


@simulated
async def test_a_topic_that_moved_in_starts_where_the_seal_says_and_the_hole_names_what_is_held() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=0)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "0", "1", "2")
    await log.close()
    # Another broker had it from 3 to 21; its seal says so.
    log = await wal.topic(TOPIC, epoch=3, start_offset=22)
    assert log.current_offset() == 22
    assert (await fill(log, "22"))[0] == CommitReceipt(22, 3, "fsync")
    assert log.held() == [(0, 3), (22, 23)]
    assert log.first_offset == 0
    for offset in (3, 21):
        with pytest.raises(OffsetOutOfRange, match=f"offset {offset} of {TOPIC} is not kept: offsets 22 up to 23 are"):
            await log.read(offset)
    reader = log.reader(0)
    assert [each.header.base_offset for each in await reader.read(1 << 20)] == [0, 1, 2]
    with pytest.raises(OffsetOutOfRange) as refusal:
        await reader.read(1 << 20)
    assert (refusal.value.first, refusal.value.end) == (22, 23)
    assert await contents(log, 22) == {22: "22"}
    await wal.close()
    log = await machine.reopened(epoch=4)
    assert (log.held(), log.current_offset()) == ([(0, 3), (22, 23)], 23)


@simulated
async def test_a_fresh_log_may_start_anywhere_and_says_so_after_a_restart() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=7, start_offset=1000)
    assert (log.first_offset, log.head, log.held()) == (1000, 1000, [])
    await fill(log, "a")
    machine.kill()
    log = await machine.reopened(epoch=8)
    assert (log.first_offset, log.head, log.held()) == (1000, 1001, [(1000, 1001)])


@simulated
async def test_a_topic_can_be_closed_and_opened_again_while_the_others_go_on() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log, other = await wal.topic(TOPIC, epoch=1), await wal.topic(OTHER_TOPIC, epoch=1)
    await fill(log, "a")
    await log.close()
    await fill(other, "x")
    log = await wal.topic(TOPIC, epoch=2)
    await fill(log, "b")
    assert await contents(log) == numbered("a", "b")
    assert await contents(other) == numbered("x")


# --- rolling ----------------------------------------------------------------------------------------


@simulated
async def test_a_segment_that_is_full_is_followed_by_a_new_one() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=3000)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, *"abcdefgh")
    assert [segment.first_offset for segment in log.segments] == [0, 3, 6]
    for before, after in zip(log.segments, log.segments[1:], strict=False):
        assert after.header.previous_id == before.segment_id
        assert after.header.previous_end == before.end
        assert before.synced == before.end >= 3000
    assert await contents(log) == numbered(*"abcdefgh")


@simulated
async def test_a_segment_that_is_old_is_followed_by_a_new_one() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_seconds=60.0)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    await machine.clock.sleep(60 * (1 - commit_machine.ROLL_EARLY) - 1)
    await fill(log, "b")
    assert len(log.segments) == 1
    await machine.clock.sleep(60 * commit_machine.ROLL_EARLY + 2)
    await fill(log, "c")
    assert [segment.first_offset for segment in log.segments] == [0, 2]
    await machine.clock.sleep(600)  # an idle log makes no empty segments
    assert len(log.segments) == 2


@simulated
async def test_a_session_that_is_opened_takes_no_offset_and_survives_a_roll() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=1024)
    log = await wal.topic(TOPIC, epoch=1)
    producer = await Producer.open(log)
    assert log.current_offset() == 0
    for payload in "abc":
        await log.append(producer.make(payload))
    assert len(log.segments) == 3
    assert await contents(log) == numbered(*"abc")


# --- producer sessions ------------------------------------------------------------------------------


@every_end
@simulated
async def test_a_resent_batch_gets_its_old_receipt_and_is_not_stored_twice_also_after_a_restart(end: str) -> None:
    for segment_bytes in (1024, 1 << 20):
        machine = LogFixture()
        wal = await machine.boot(segment_bytes=segment_bytes)
        log = await wal.topic(TOPIC, epoch=1)
        producer = await Producer.open(log)
        made = [producer.make(f"{n}", f"{n}'") for n in range(8)]
        receipts = [await log.append(each) for each in made]
        assert [await log.append(each) for each in made] == [each._replace(duplicate=True) for each in receipts]
        await end_process(end, machine, wal)
        log = await machine.reopened(epoch=2)
        assert [await log.append(each) for each in made] == [each._replace(duplicate=True) for each in receipts]
        assert log.current_offset() == 16
        receipt = await log.append(producer.make("next"))
        assert receipt == CommitReceipt(16, 2, "fsync")


@simulated
async def test_a_resend_older_than_the_window_or_changed_is_refused() -> None:
    wal = await LogFixture().boot()
    log = await wal.topic(TOPIC, epoch=1)
    producer = await Producer.open(log)
    made = [producer.make(f"{n}") for n in range(9)]
    for each in made:
        await log.append(each)
    with pytest.raises(OutOfSequence):
        await log.append(made[0])
    producer.next_sequence = 8
    with pytest.raises(OutOfSequence):
        await log.append(producer.make("something else"))
    producer.next_sequence = 10
    with pytest.raises(OutOfSequence, match="sent sequence 10 where 9 is next"):
        await log.append(producer.make("a hole"))
    assert log.current_offset() == 9


@simulated
async def test_a_duplicate_inside_one_group_shares_the_fate_of_the_first() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    producer = await Producer.open(log)
    made = producer.make("a")
    machine.disk.hold_syncs()
    twice = [log.submit(made), log.submit(made)]
    await settle()
    assert machine.disk.syncs_waiting == 1
    assert not any(each.done() for each in twice)
    machine.disk.release_syncs()
    assert [await each for each in twice] == [
        CommitReceipt(0, 1, "fsync"),
        CommitReceipt(0, 1, "fsync", duplicate=True),
    ]
    assert await contents(log) == numbered("a")


@simulated
async def test_a_duplicate_inside_a_group_that_fails_fails_too_and_can_be_sent_again() -> None:
    machine = LogFixture(capacity_bytes=40_000)
    wal = await machine.boot(ballast_bytes=0)
    log = await wal.topic(TOPIC, epoch=1)
    producer = await Producer.open(log)
    await log.append(producer.make("a"))
    await settle()
    machine.hardware.capacity_bytes = machine.hardware.used_bytes
    made = producer.make("x" * 10_000)
    twice = [log.submit(made), log.submit(made)]
    await asyncio.wait(twice)
    assert [type(each.exception()).__name__ for each in twice] == ["DiskFull", "DiskFull"]
    machine.hardware.capacity_bytes = None
    await machine.clock.sleep(1)
    assert await log.append(made) == CommitReceipt(1, 1, "fsync")
    assert await log.append(made) == CommitReceipt(1, 1, "fsync", duplicate=True)
    assert log.current_offset() == 2


@every_end
@simulated
async def test_a_newer_session_fences_the_older_one_also_after_a_restart(end: str) -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    old = await Producer.open(log)
    await log.append(old.make("old"))
    new = await Producer.open(log)
    assert new.session > old.session
    with pytest.raises(ProducerFenced, match=f"was replaced by session {new.session}"):
        await log.append(old.make("late"))
    await end_process(end, machine, wal)
    log = await machine.reopened(epoch=2)
    with pytest.raises(ProducerFenced):
        await log.append(old.make("later"))
    await log.append(new.make("new"))
    newest = await Producer.open(log)
    assert newest.session > new.session
    with pytest.raises(ProducerFenced):
        await log.append(new.make("late"))
    assert await contents(log) == numbered("old", "new")


@simulated
async def test_two_producers_of_one_name_that_open_at_once_get_two_sessions_and_one_is_fenced() -> None:
    wal = await LogFixture().boot()
    log = await wal.topic(TOPIC, epoch=1)
    first, second = await asyncio.gather(Producer.open(log, 7), Producer.open(log, 7))
    assert first.session != second.session
    older, newer = sorted((first, second), key=lambda producer: producer.session)
    with pytest.raises(ProducerFenced):
        await log.append(older.make("a"))
    await log.append(newer.make("a"))


@simulated
async def test_a_session_that_nobody_opened_is_refused_unless_the_owner_was_told_to_adopt() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=5)
    stranger = Producer(9, (4 << 32) + 1)
    stranger.next_sequence = 30
    made = stranger.make("a")
    with pytest.raises(SessionUnknown):
        await log.append(made)
    await log.close()
    log = await wal.topic(TOPIC, epoch=6, adopts_unknown=True)
    with pytest.raises(SessionUnknown):  # no owner up to now can have issued it
        await log.append(Producer(9, (7 << 32) + 1).make("a"))
    receipt = await log.append(made)
    assert await log.append(made) == receipt._replace(duplicate=True)
    with pytest.raises(OutOfSequence):
        stranger.next_sequence = 40
        await log.append(stranger.make("b"))


@simulated
async def test_producers_of_one_topic_do_not_disturb_each_other() -> None:
    wal = await LogFixture().boot()
    log = await wal.topic(TOPIC, epoch=1)
    producers = [await Producer.open(log, n) for n in (1, 2, 3)]
    done = [log.submit(each.make(f"{n}{each.producer_id}")) for n in range(3) for each in producers]
    assert [(await each).offset for each in done] == list(range(9))
    with pytest.raises(OutOfSequence):
        producers[0].next_sequence = 7
        await log.append(producers[0].make("hole"))
    await log.append(producers[1].make("on"))


# --- time -------------------------------------------------------------------------------------------


@every_end
@simulated
async def test_append_time_never_decreases_when_the_clock_jumps_back(end: str) -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    machine.clock.jump(-3600)
    await fill(log, "b")
    machine.clock.jump(7200)
    await fill(log, "c")
    await end_process(end, machine, wal)
    machine.clock.jump(-100_000)
    log = await machine.reopened(epoch=2)
    await fill(log, "d")
    times = [each.header.append_time for each in await log.read(0)] + [
        each.header.append_time for each in await log.read(3)
    ]
    assert times == sorted(times)
    assert times[0] == times[1] < times[2] == times[-1]


# --- retention --------------------------------------------------------------------------------------


@simulated
async def test_retention_removes_whole_segments_only_and_the_first_offset_moves() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=2000, cache_bytes=0)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, *"abcdefgh")  # two per segment
    assert len(machine.segments()) == 4
    assert await log.truncate(0) == 0
    assert await log.truncate(3) == 2
    assert len(machine.segments()) == 3
    with pytest.raises(OffsetOutOfRange, match=r"offset 1 of .* is not kept: offsets 2 up to 8 are"):
        await log.read(1)
    assert await log.truncate(6) == 6
    assert await contents(log) == numbered("g", "h", first=6)
    machine.kill()
    log = await machine.reopened(epoch=2)
    assert (log.first_offset, log.head) == (6, 8)
    assert await contents(log) == numbered("g", "h", first=6)
    assert log.recovered.damage == []


@simulated
async def test_retention_always_leaves_the_newest_segment() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=2000)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, *"abcd")
    assert await log.truncate(1000) == 2
    assert await contents(log) == numbered("c", "d", first=2)
    await fill(log, "e")
    assert (await log.truncate(1000), log.head) == (4, 5)


@simulated
async def test_retention_goes_through_epochs_and_their_directories_vanish() -> None:
    machine = LogFixture()
    for epoch in (1, 2, 3):
        wal = await machine.boot()
        log = await wal.topic(TOPIC, epoch=epoch)
        await fill(log, f"{epoch}")
        if epoch < 3:
            machine.kill()
    assert await log.truncate(2) == 2
    await wal.close()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=4)
    assert (log.first_offset, log.head, log.held()) == (2, 3, [(2, 3)])
    assert {path.split("/")[3] for path in machine.files("wal/")} == {f"{3:020}"}


@simulated
async def test_sessions_survive_the_removal_of_the_segments_that_opened_them() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=1024)
    log = await wal.topic(TOPIC, epoch=1)
    producer = await Producer.open(log)
    made = [producer.make(payload) for payload in "abcd"]
    receipts = [await log.append(each) for each in made]
    await log.truncate(3)
    machine.kill()
    log = await machine.reopened(epoch=2)
    assert log.first_offset == 3
    assert [await log.append(each) for each in made] == [each._replace(duplicate=True) for each in receipts]
    assert (await log.append(producer.make("e"))).offset == 4


@simulated
async def test_damaged_segments_are_set_aside_by_retention_and_not_removed() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b", "c")
    machine.kill()
    (path,) = machine.segments()
    machine.hardware.flip(path, groups_of(machine.hardware.content(path))[1].position + 200)
    wal = await machine.boot(segment_bytes=1024)
    log = await wal.topic(TOPIC, epoch=2)
    await fill(log, "d", "e")
    assert await log.truncate(4) == 4
    assert f"{path}.quarantined" in machine.files() and path not in machine.files()
    with pytest.raises(OffsetOutOfRange):  # retention says so, and no longer the damage
        await log.read(1)


@pytest.mark.parametrize("power", [True, False], ids=["power cut", "kill"])
@simulated
async def test_a_crash_between_any_two_disk_calls_of_retention_leaves_the_old_or_the_new_first_offset(
    power: bool,
) -> None:
    seen, step, crashed = set(), 0, True
    while crashed:
        step += 1
        machine = LogFixture(step)
        for epoch in (1, 2):
            wal = await machine.boot(segment_bytes=2000)
            log = await wal.topic(TOPIC, epoch=epoch)
            await fill(log, *(f"{epoch}{n}" for n in range(5)))
            if epoch == 1:
                machine.kill()
        everything = await contents(log)
        crashed = await machine.crash_during(lambda log=log: log.truncate(7), step, power=power)  # type: ignore[misc]
        if not crashed:
            machine.kill()
        log = await machine.reopened(epoch=3)
        assert log.recovered.damage == [] and log.recovered.torn == []
        assert log.first_offset in (0, 5, 7), f"step {step}"  # one epoch after the other
        seen.add(log.first_offset)
        assert await contents(log) == {at: text for at, text in everything.items() if at >= log.first_offset}
        assert log.head == 10
    assert seen >= {0, 7} and step > 10


@simulated
async def test_truncation_of_a_closed_log_is_refused() -> None:
    wal = await LogFixture().boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    await log.close()
    with pytest.raises(LogClosed):
        await log.truncate(1)


# --- reservation ------------------------------------------------------------------------------------


@simulated
async def test_batches_beyond_the_reservation_wait_and_go_on_when_it_grows() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log, other = await wal.topic(TOPIC, epoch=1), await wal.topic(OTHER_TOPIC, epoch=1)
    log.reserve(3)
    done = [log.submit(batch(*payloads)) for payloads in ("ab", "c", "de", "f")]
    assert [(await each).offset for each in done[:2]] == [0, 2]
    await fill(other, "x")  # nobody else waits
    await settle()
    assert [each.done() for each in done] == [True, True, False, False]
    log.reserve(4)
    await settle()
    assert not done[2].done()  # two rows do not fit into one offset
    log.reserve(100)
    assert [(await each).offset for each in done[2:]] == [3, 5]
    assert await contents(log) == numbered(*"abcdef")


@simulated
async def test_batches_that_wait_for_a_reservation_are_refused_when_the_log_closes() -> None:
    wal = await LogFixture().boot()
    log = await wal.topic(TOPIC, epoch=1)
    log.reserve(1)
    done = [log.submit(batch("a")), log.submit(batch("b"))]
    await settle()
    await log.close()
    assert (await done[0]).offset == 0
    with pytest.raises(LogClosed):
        await done[1]


# --- refused batches --------------------------------------------------------------------------------


def _with_wrong_checksum(data: bytearray) -> None:
    data[200] ^= 1


def _with_wrong_header_checksum(data: bytearray) -> None:
    data[16] ^= 1


def _cut_short(data: bytearray) -> None:
    del data[-8:]


def _with_an_impossible_length(data: bytearray) -> None:
    data[20:24] = (2**31).to_bytes(4, "little")
    _seal(data)


def _with_an_impossible_count(data: bytearray) -> None:
    data[16:20] = (10**9).to_bytes(4, "little")
    _seal(data)


def _with_another_schema(data: bytearray) -> None:
    rows = pa.record_batch({"a": [1]}).serialize().to_pybytes()
    data[96:] = rows
    data[20:24] = data[24:28] = len(rows).to_bytes(4, "little")
    data[88:92] = crc32c(rows).to_bytes(4, "little")
    _seal(data)


def _seal(data: bytearray) -> None:
    data[92:96] = crc32c(bytes(data[:92])).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (_with_wrong_checksum, "body checksum is"),
        (_with_wrong_header_checksum, "header checksum is"),
        (_cut_short, "body of .* bytes ends after"),
        (_with_an_impossible_length, "body length 2147483648 is over"),
        (_with_an_impossible_count, "it says 1000000000 rows and has 1"),
        (_with_another_schema, "its columns are not the envelope's"),
    ],
)
@simulated
async def test_a_bad_batch_is_refused_by_name_and_the_log_is_untouched(
    spoil: Callable[[bytearray], None], what: str
) -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    steps = len(machine.disk.steps)
    data = bytearray(batch("b").to_bytes())
    spoil(data)
    with pytest.raises(InvalidBatch, match=what):
        await log.append(parse(bytes(data)))
    assert len(machine.disk.steps) == steps and log.current_offset() == 1
    await log.append(parse(batch("c").to_bytes()))
    assert await contents(log) == numbered("a", "c")


@simulated
async def test_a_batch_for_another_topic_is_refused_and_the_log_is_untouched() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    with pytest.raises(InvalidBatch, match=f"made for another topic than {TOPIC}"):
        await log.append(batch("b", topic=OTHER_TOPIC))
    assert log.current_offset() == 0 and machine.segments() == []


# --- reading by time --------------------------------------------------------------------------------


@simulated
async def test_reading_by_time_finds_the_smallest_offset_published_at_or_after_it() -> None:
    for restart in (False, True):
        machine = LogFixture()
        wal = await machine.boot(segment_bytes=1024)
        log = await wal.topic(TOPIC, epoch=1)
        times = [[100, 300], [200], [250, 50, 400], [10], [400, 399]]
        for each in times:
            await log.append(batch(*("x" for _ in each), times=each))
        flat = [time for each in times for time in each]
        if restart:
            machine.kill()
            log = await machine.reopened(epoch=2)
            await log.append(batch("x", "y", times=[500, 20]))
            flat += [500, 20]
        for asked in (-5, 0, 10, 50, 99, 100, 101, 200, 299, 300, 301, 399, 400, 401, 499, 500, 501, 10**9):
            expected = next((at for at, time in enumerate(flat) if time >= asked), len(flat))
            assert await log.offset_at(asked) == expected, f"asked for {asked}"


@simulated
async def test_reading_by_time_in_an_empty_log_gives_its_head() -> None:
    wal = await LogFixture().boot()
    assert await (await wal.topic(TOPIC, epoch=1, start_offset=17)).offset_at(0) == 17


@simulated
async def test_reading_by_time_goes_on_while_the_log_rolls_behind_it() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=1024, cache_bytes=0)
    log = await wal.topic(TOPIC, epoch=1)
    for time in (1000, 1, 2, 3):
        await log.append(batch("x", times=[time]))
    await log.truncate(1)  # the only late one is gone, and the running maximum still knows it

    async def roll_behind(path: str) -> None:
        machine.disk.before_read = None
        for _ in range(3):
            await log.append(batch("x", times=[4]))

    machine.disk.before_read = roll_behind
    assert await log.offset_at(500) == 4


@simulated
async def test_reading_by_time_into_damage_says_so() -> None:
    machine = LogFixture()
    wal = await machine.boot(cache_bytes=0)
    log = await wal.topic(TOPIC, epoch=1)
    await log.append(sized(500, "a"))
    (path,) = machine.segments()
    machine.hardware.flip(path, 300)
    with pytest.raises(LogDamaged):
        await log.offset_at(0)
