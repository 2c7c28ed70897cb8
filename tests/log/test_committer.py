"""Committing: what is acknowledged when, how many syncs that takes, and what happens when the disk says no."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from pydanube.core.commit.values import CommitReceipt
from pydanube.errors import ConfigError, DiskFull, LogClosed, LogStopped, OutOfSequence
from pydanube.formats.batch import Batch
from pydanube.log.commit_context import EncodedPart
from pydanube.log.layout import BALLAST
from pydanube.log.wal import TopicLog, Wal
from pydanube.testing.disk_faults import DiskAim
from tests.harness.logs import (
    OTHER_TOPIC,
    TOPIC,
    LogFixture,
    Producer,
    batch,
    contents,
    fill,
    numbered,
    settle,
    simulated,
    sized,
    texts,
)


async def topics(wal: Wal, count: int, epoch: int = 1) -> list[TopicLog]:
    return [await wal.topic(f"/default/t{n}", epoch=epoch) for n in range(count)]


async def append_together(logs: Sequence[TopicLog], *payloads: str) -> list[CommitReceipt]:
    """One batch per topic and payload, all queued before anything is written."""
    futures = [log.submit(batch(payload, topic=log.topic)) for payload in payloads for log in logs]
    return [await future for future in futures]


def outcomes(futures: Sequence[asyncio.Future[CommitReceipt]]) -> list[object]:
    """Offsets of the stored ones, error types of the refused."""
    found: list[object] = []
    for future in futures:
        error = future.exception()
        found.append(future.result().offset if error is None else type(error))
    return found


# --- told at once -----------------------------------------------------------------------------------


@simulated
async def test_who_cannot_wait_is_told_after_the_sync_and_before_the_loop_turns_again() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "before")
    heard: list[str] = []
    machine.disk.hold_syncs()
    done = log.submit(batch("a"), lambda: heard.append(f"told, {done.result().offset} of {log.current_offset()}"))
    done.add_done_callback(lambda _: heard.append("called back"))
    await settle()
    assert heard == []
    machine.disk.release_syncs()
    await settle()
    assert heard == ["told, 1 of 2", "called back"]


@simulated
async def test_the_disk_is_given_its_next_work_before_anybody_is_told_at_once() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "before")
    heard: list[int] = []
    machine.disk.hold_syncs()
    first = log.submit(batch("a"), lambda: heard.append(1))
    await settle()
    second = [log.submit(batch(text), tell) for tell in [lambda: heard.append(2)] for text in ("b", "c")]
    machine.disk.release_syncs()
    await asyncio.gather(first, *second)
    assert heard == [2], "the first was left to its future, and two batches of one group are told of once"


@simulated
async def test_nobody_is_told_of_a_batch_that_was_refused_and_who_fails_at_hearing_does_not_stop_the_log() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    heard: list[object] = []

    def fail() -> None:
        heard.append("fail")
        raise ValueError("cannot listen")

    producer = await Producer.open(log)
    producer.next_sequence = 5
    refused = log.submit(producer.make("a"), lambda: heard.append("refused"))
    with pytest.raises(OutOfSequence):
        await refused
    assert (await log.submit(batch("b"), fail)).offset == 0
    assert (await log.submit(batch("c"), fail)).offset == 1
    assert heard == ["fail", "fail"]


# --- acknowledged means synced ----------------------------------------------------------------------


@simulated
async def test_nothing_is_acknowledged_or_visible_before_the_sync_has_returned() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "before")
    following = asyncio.ensure_future(anext(aiter(log.follow(1))))
    machine.disk.hold_syncs()
    done = log.submit(batch("a", "b"))
    await settle()
    assert machine.disk.syncs_waiting == 1
    assert not done.done() and not following.done()
    assert log.current_offset() == 1
    assert await log.read(1) == []
    assert log.held() == [(0, 1)]
    machine.disk.release_syncs()
    assert await done == CommitReceipt(1, 1, "fsync")
    assert log.current_offset() == 3
    assert texts([await following]) == ["a", "b"]
    assert await contents(log) == numbered("before", "a", "b")


@simulated
async def test_nothing_that_goes_through_the_journal_is_acknowledged_before_its_sync_either() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    logs = await topics(wal, 5)
    machine.disk.hold_syncs(".journal")
    done = [log.submit(batch("a", topic=log.topic)) for log in logs]
    await settle()
    assert machine.disk.syncs_waiting == 1
    assert not any(each.done() for each in done)
    assert [log.current_offset() for log in logs] == [0] * 5
    machine.disk.release_syncs()
    assert [(await each).offset for each in done] == [0] * 5
    assert [log.current_offset() for log in logs] == [1] * 5


@simulated
async def test_what_was_acknowledged_survives_a_power_cut_at_once() -> None:
    for seed in range(20):
        machine = LogFixture(seed)
        wal = await machine.boot()
        log = await wal.topic(TOPIC, epoch=1)
        await fill(log, "a", "b")
        machine.cut_power(seed)
        log = await machine.reopened(epoch=2)
        assert await contents(log) == numbered("a", "b")


@simulated
async def test_a_caller_that_leaves_before_its_batch_is_formed_leaves_nothing_behind() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    left = log.submit(batch("left"))
    left.cancel()
    await fill(log, "stayed")
    assert await contents(log) == numbered("stayed")


@simulated
async def test_a_caller_that_leaves_during_the_sync_does_not_take_its_batch_along() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    machine.disk.hold_syncs()
    left = log.submit(batch("b"))
    await settle()
    left.cancel()
    machine.disk.release_syncs()
    await fill(log, "c")
    assert await contents(log) == numbered("a", "b", "c")


# --- groups -----------------------------------------------------------------------------------------


@simulated
async def test_appends_during_a_sync_share_the_next_one() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "first")
    syncs, groups = len(machine.disk.syncs), wal.committer.groups
    machine.disk.hold_syncs()
    alone = log.submit(batch("alone"))
    await settle()
    together = [log.submit(batch(f"{n}")) for n in range(20)]
    await settle()
    machine.disk.release_syncs()
    assert [(await each).offset for each in [alone, *together]] == list(range(1, 22))
    assert len(machine.disk.syncs) - syncs == 2
    assert wal.committer.groups - groups == 2


@simulated
async def test_an_idle_log_pays_for_exactly_one_sync_per_append() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "first")
    before = len(machine.disk.syncs)
    await fill(log, "a", "b", "c")
    assert len(machine.disk.syncs) - before == 3


@simulated
async def test_a_group_takes_no_more_than_group_bytes() -> None:
    machine = LogFixture()
    wal = await machine.boot(group_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "first")
    size = batch("00").header.size_bytes
    before = wal.committer.groups
    done = [log.submit(batch(f"{n:02}")) for n in range(20)]
    await asyncio.gather(*done)
    assert wal.committer.groups - before == -(-20 // (4096 // size))
    groups = [sum(map(len, write.buffers)) for write in machine.disk.written if any(write.buffers[0])]
    assert max(groups[-5:]) <= 4096 + 64 + 8 * 4


@simulated
async def test_a_batch_larger_than_a_group_still_goes() -> None:
    machine = LogFixture()
    wal = await machine.boot(group_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    done = [log.submit(each) for each in (batch("a"), sized(50_000, "large"), batch("b"))]
    assert [(await each).offset for each in done] == [0, 1, 2]
    assert await contents(log) == numbered("a", "large", "b")


@simulated
async def test_a_busy_topic_does_not_keep_the_others_waiting() -> None:
    machine = LogFixture()
    wal = await machine.boot(group_bytes=8192)
    busy, quiet = await topics(wal, 2)
    flood = [busy.submit(batch(f"{n}", topic=busy.topic)) for n in range(100)]
    one = quiet.submit(batch("one", topic=quiet.topic))
    await one
    assert not flood[-1].done()
    await asyncio.gather(*flood)


# --- many topics ------------------------------------------------------------------------------------


@simulated
async def test_small_groups_of_many_topics_take_one_sync_through_the_journal() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=1 << 20)
    logs = await topics(wal, 50)
    await append_together(logs, "first")
    before, journaled = len(machine.disk.syncs), wal.committer.journaled_groups
    await append_together(logs, "second")
    assert [path.rpartition(".")[2] for path in machine.disk.syncs[before:]] == ["journal"]
    assert wal.committer.journaled_groups == journaled + 1
    assert [await contents(log) for log in logs] == [numbered("first", "second")] * 50


@simulated
async def test_large_groups_of_few_topics_go_straight_to_their_files() -> None:
    machine = LogFixture()
    wal = await machine.boot(group_bytes=1 << 20, journal_bytes=4 << 20)
    logs = await topics(wal, 2)
    await asyncio.gather(*(log.submit(sized(200_000, topic=log.topic)) for log in logs))
    before = len(machine.disk.syncs)
    await asyncio.gather(*(log.submit(sized(200_000, topic=log.topic)) for log in logs))
    assert sorted(machine.disk.syncs[before:]) == sorted(log.segments[-1].path for log in logs)
    assert wal.committer.journaled_groups == 0
    assert not machine.files(".journal")


@simulated
async def test_a_record_that_does_not_fit_a_journal_goes_straight_to_the_files() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=4096)
    logs = await topics(wal, 10)
    for log in logs:
        await log.prepare()
    await append_together(logs, "a")
    assert wal.committer.journaled_groups == 0
    assert [await contents(log) for log in logs] == [numbered("a")] * 10


@simulated
async def test_journals_are_emptied_into_the_segments_and_used_again() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192, copy_bytes=4096)
    logs = await topics(wal, 4)
    for log in logs:
        await log.prepare()
    for n in range(20):
        await append_together(logs, f"{n}")
        assert len(machine.files("journal/")) <= 3
        await settle()
    assert wal.committer.journaled_groups == 20
    await wal.close()
    assert machine.files("journal/") == []
    assert (await machine.verify()).ok
    wal = await machine.boot()
    for log in await topics(wal, 4, epoch=2):
        assert await contents(log) == numbered(*map(str, range(20)))


@simulated
async def test_a_topic_that_was_journaled_and_then_goes_directly_keeps_its_order() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    logs = await topics(wal, 3)
    machine.disk.hold_syncs(".journal")
    together = [log.submit(batch("journaled", topic=log.topic)) for log in logs]
    await settle()
    direct = logs[0].submit(batch("direct", topic=logs[0].topic))
    machine.disk.release_syncs()
    await asyncio.gather(*together, direct)
    assert await contents(logs[0]) == numbered("journaled", "direct")
    machine.cut_power()
    wal = await machine.boot()
    first, *rest = await topics(wal, 3, epoch=2)
    assert await contents(first) == numbered("journaled", "direct")
    assert [await contents(log) for log in rest] == [numbered("journaled")] * 2


@simulated
async def test_a_segment_that_retention_removes_while_its_journal_is_emptied_stops_nobody() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192, segment_bytes=3000, cache_bytes=0)
    logs = await topics(wal, 3)
    machine.disk.hold_syncs("never")
    held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    sync = machine.disk.sync

    async def slow_sync(paths: Sequence[str]) -> list[object]:
        if len(paths) > 1:  # the journal's segments, in the background
            await held
        return list(await sync(paths))

    machine.disk.sync = slow_sync  # type: ignore[method-assign,assignment]
    for n in range(3):
        await append_together(logs, f"{n}")
    for n in range(3, 6):  # the first topic goes on alone, rolls, and is cut by retention
        await fill(logs[0], f"{n}")
    await logs[0].truncate(5)
    held.set_result(None)
    await settle()
    assert wal.committer.stopped is None
    await append_together(logs, "after")


# --- durability -------------------------------------------------------------------------------------


@simulated
async def test_durability_os_acknowledges_without_a_sync_and_says_so_in_the_receipt() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1, durability="os")
    await fill(log, "first")
    machine.disk.hold_syncs()
    assert await log.append(batch("a")) == CommitReceipt(1, 1, "os")
    assert await contents(log) == numbered("first", "a")
    machine.disk.release_syncs()


@simulated
async def test_topics_of_both_durabilities_share_a_group() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    safe = await wal.topic(TOPIC, epoch=1)
    fast = await wal.topic(OTHER_TOPIC, epoch=1, durability="os")
    receipts = await append_together([safe, fast], "a")
    assert [receipt.durability for receipt in receipts] == ["fsync", "os"]
    assert wal.committer.groups == 1


@simulated
async def test_a_log_of_durability_os_that_was_closed_is_whole_after_a_power_cut() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=2000)
    log = await wal.topic(TOPIC, epoch=1, durability="os")
    await fill(log, *"abcde")
    await wal.close()
    machine.cut_power()
    log = await machine.reopened(epoch=2, durability="os")
    assert await contents(log) == numbered(*"abcde")


@simulated
async def test_a_durability_that_does_not_exist_is_refused_by_name() -> None:
    wal = await LogFixture().boot()
    with pytest.raises(ConfigError, match="'paper' is not allowed: one of fsync, os"):
        await wal.topic(TOPIC, epoch=1, durability="paper")


# --- a failed sync ----------------------------------------------------------------------------------


@simulated
async def test_a_failed_sync_ends_the_segment_at_its_last_good_sync_and_the_group_goes_to_a_new_file() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a", "b")
    (old,) = log.segments
    end = old.end
    machine.disk.sync_failures = [old.path]
    assert await log.append(batch("c", "d")) == CommitReceipt(2, 1, "fsync")
    first, second = log.segments
    assert (first.end, second.header.previous_id, second.header.previous_end) == (end, first.segment_id, end)
    await fill(log, "e")
    assert await contents(log) == numbered(*"abcde")
    # The old file holds the group too, or half of it: nobody looks behind its end any more.
    await machine.overwrite(old.path, end, b"?" * 1000)
    machine.cut_power()
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered(*"abcde")
    assert log.recovered.damage == []


@simulated
async def test_a_session_survives_a_failed_sync_and_a_duplicate_gets_the_receipt_of_the_new_file() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    producer = await Producer.open(log)
    await log.append(producer.make("a"))
    machine.disk.sync_failures = [log.segments[0].path]
    made = producer.make("b")
    receipt = await log.append(made)
    assert await log.append(made) == receipt._replace(duplicate=True)
    machine.cut_power()
    log = await machine.reopened(epoch=2)
    assert await log.append(made) == receipt._replace(duplicate=True)
    await log.append(producer.make("c"))
    assert await contents(log) == numbered("a", "b", "c")


@simulated
async def test_only_the_topic_whose_file_failed_gets_a_new_one() -> None:
    machine = LogFixture()
    wal = await machine.boot(group_bytes=1 << 20)
    logs = await topics(wal, 2)
    await asyncio.gather(*(log.submit(sized(200_000, "a", log.topic)) for log in logs))
    machine.disk.sync_failures = [logs[0].segments[0].path]
    await asyncio.gather(*(log.submit(sized(200_000, "b", log.topic)) for log in logs))
    assert [len(log.segments) for log in logs] == [2, 1]
    assert [await contents(log) for log in logs] == [numbered("a", "b")] * 2


@simulated
async def test_a_second_failure_stops_the_log_for_all_while_reads_go_on() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    other = await wal.topic(OTHER_TOPIC, epoch=1)
    await fill(log, "a", "b")
    machine.disk.all_syncs_fail = True
    waiting = [log.submit(batch("c")), log.submit(batch("d"))]
    for refused in waiting:
        with pytest.raises(LogStopped, match=r"the disk is gone.*replace the disk and restart"):
            await refused
    for each in (log, other):
        with pytest.raises(LogStopped):
            await fill(each, "e")
    assert log.current_offset() == 2
    assert await contents(log) == numbered("a", "b")
    machine.cut_power()
    log = await machine.reopened(epoch=2)
    found = await contents(log)
    assert list(found.values())[:2] == ["a", "b"]
    assert list(found) == list(range(len(found)))
    await fill(log, "f")
    assert (await contents(log))[len(found)] == "f"


@simulated
async def test_a_failed_journal_sync_goes_to_a_new_journal() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    logs = await topics(wal, 5)
    await append_together(logs, "a")
    (old,) = machine.files(".journal")
    machine.disk.sync_failures = [old]
    receipts = await append_together(logs, "b")
    assert [receipt.offset for receipt in receipts] == [1] * 5
    await settle()
    assert old not in machine.files(".journal")
    machine.cut_power()
    wal = await machine.boot()
    assert wal.problems == []
    for log in await topics(wal, 5, epoch=2):
        assert await contents(log) == numbered("a", "b")


@simulated
async def test_a_second_failure_of_the_journal_stops_the_log_and_a_restart_has_all_that_was_acknowledged() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    logs = await topics(wal, 5)
    await append_together(logs, "a")
    machine.disk.sync_failures = [".journal", "spare"]
    done = [log.submit(batch("b", topic=log.topic)) for log in logs]
    for each in done:
        with pytest.raises(LogStopped):
            await each
    assert [await contents(log) for log in logs] == [numbered("a")] * 5
    machine.cut_power()
    wal = await machine.boot()
    for log in await topics(wal, 5, epoch=2):
        assert (await contents(log))[0] == "a"


@simulated
async def test_a_stopped_log_can_be_closed_and_lets_the_directory_go() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "a")
    machine.disk.all_syncs_fail = True
    with pytest.raises(LogStopped):
        await fill(log, "b")
    await wal.close()
    log = await machine.reopened(epoch=2)
    assert (await contents(log))[0] == "a"


# --- no room ----------------------------------------------------------------------------------------

ROOMY = 40_000


async def filled_up(machine: LogFixture, log: TopicLog) -> list[str]:
    """Appends until the disk is full; what was stored."""
    stored: list[str] = []
    with pytest.raises(DiskFull) as refusal:
        for n in range(100):
            await log.append(sized(3000, f"{n}", log.topic))
            stored.append(f"{n}")
    assert refusal.value.retryable and "publishing then resumes by itself" in str(refusal.value)
    return stored


def make_room(machine: LogFixture) -> None:
    assert machine.hardware.capacity_bytes is not None
    machine.hardware.capacity_bytes += 100_000


@simulated
async def test_a_full_disk_refuses_with_an_error_to_try_again_while_reads_go_on() -> None:
    machine = LogFixture(capacity_bytes=ROOMY)
    wal = await machine.boot(group_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    stored = await filled_up(machine, log)
    assert len(stored) > 3
    assert log.current_offset() == len(stored)
    assert await contents(log) == numbered(*stored)
    with pytest.raises(DiskFull):
        await fill(log, "still full")
    assert wal.committer.stopped is None


@simulated
async def test_publishing_resumes_by_itself_when_there_is_room_and_nothing_is_missing() -> None:
    machine = LogFixture(capacity_bytes=ROOMY)
    wal = await machine.boot(group_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    stored = await filled_up(machine, log)
    make_room(machine)
    await machine.clock.sleep(1)
    await fill(log, "after", "wards")
    expected = numbered(*stored, "after", "wards")
    assert await contents(log) == expected
    machine.cut_power()
    log = await machine.reopened(epoch=2)
    assert await contents(log) == expected
    assert log.recovered.damage == []


@simulated
async def test_a_refused_group_that_cannot_even_be_cut_off_for_lack_of_room_stops_nobody() -> None:
    machine = LogFixture(capacity_bytes=ROOMY)
    wal = await machine.boot(group_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    # As where a file system copies on write: first of zeros ahead, then of the group.
    machine.hardware.aims += [DiskAim("truncate", 1, "ENOSPC", ".wal") for _ in range(2)]
    stored = await filled_up(machine, log)
    make_room(machine)
    await machine.clock.sleep(1)
    assert machine.hardware.aims == []
    await fill(log, "after")
    assert wal.committer.stopped is None
    machine.cut_power()
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered(*stored, "after")
    assert log.recovered.damage == []


@simulated
async def test_the_ballast_is_given_up_when_the_disk_is_full_and_made_again_when_there_is_room() -> None:
    machine = LogFixture(capacity_bytes=ROOMY)
    wal = await machine.boot(group_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    assert len(machine.hardware.content(BALLAST)) == 4096
    await filled_up(machine, log)
    await settle()
    assert BALLAST not in machine.files()
    make_room(machine)
    await machine.clock.sleep(1)
    await fill(log, "after")
    assert len(machine.hardware.content(BALLAST)) == 4096


@simulated
async def test_room_is_looked_for_only_now_and_then_while_the_disk_is_full() -> None:
    machine = LogFixture(capacity_bytes=ROOMY)
    wal = await machine.boot(group_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    await filled_up(machine, log)
    await settle()
    before = len(machine.disk.steps)
    for _ in range(10):
        with pytest.raises(DiskFull):
            await fill(log, "no")
    assert len(machine.disk.steps) == before


@simulated
async def test_a_topic_that_finds_no_room_to_recover_is_to_be_tried_again_and_loses_nothing() -> None:
    machine = LogFixture(capacity_bytes=ROOMY)
    wal = await machine.boot(group_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    stored = await filled_up(machine, log)
    machine.kill()
    wal = await machine.boot()
    with pytest.raises(DiskFull):
        await wal.topic(TOPIC, epoch=2)
    make_room(machine)
    log = await wal.topic(TOPIC, epoch=2)
    assert await contents(log) == numbered(*stored)


@simulated
async def test_batch_5_refused_6_in_flight_5_resent_6_resent_stores_each_once() -> None:
    """The case that loses data elsewhere: a later batch must never be accepted over the hole of a refused one."""
    machine = LogFixture(capacity_bytes=ROOMY)
    wal = await machine.boot(group_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    producer = await Producer.open(log)
    large = "x" * 3000
    for n in range(1, 5):
        await log.append(producer.make(f"{n}"))
    machine.hardware.capacity_bytes = machine.hardware.used_bytes + 1000
    five, six = producer.make(f"5{large}"), producer.make("6")
    in_flight = [log.submit(five), log.submit(six)]
    await asyncio.wait(in_flight)
    assert outcomes(in_flight) in ([DiskFull, DiskFull], [DiskFull, OutOfSequence])
    machine.hardware.capacity_bytes = None
    await machine.clock.sleep(1)
    with pytest.raises(OutOfSequence, match="sent sequence 5 where 4 is next"):
        await log.append(six)  # there is room now, and still it may not go before 5
    assert (await log.append(five)).offset == 4
    assert (await log.append(six)).offset == 5
    assert (await log.append(five)).offset == 4  # a resend that crossed its receipt
    assert (await log.append(six)).offset == 5
    stored = await contents(log)
    assert [text[0] for text in stored.values()] == list("123456")
    machine.kill()
    log = await machine.reopened(epoch=2)
    assert await contents(log) == stored
    assert (await log.append(six)).offset == 5


@simulated
async def test_a_batch_in_the_group_behind_a_refused_one_is_refused_as_out_of_sequence() -> None:
    machine = LogFixture(capacity_bytes=ROOMY)
    wal = await machine.boot(group_bytes=4096, ballast_bytes=0)
    log = await wal.topic(TOPIC, epoch=1)
    producer = await Producer.open(log)
    await log.append(producer.make("1"))
    machine.hardware.capacity_bytes = machine.hardware.used_bytes
    large = producer.make("2" * 4000)
    machine.disk.hold_syncs(".wal")
    refused = log.submit(large)
    await settle()
    behind = log.submit(producer.make("3"))
    machine.hardware.capacity_bytes = None
    await machine.clock.sleep(1)
    machine.disk.release_syncs()
    await asyncio.wait([refused, behind])
    assert outcomes([refused, behind])[0] is DiskFull
    assert outcomes([behind])[0] in (OutOfSequence, DiskFull)
    assert list(await contents(log)) == [0]


# --- closing ----------------------------------------------------------------------------------------


@simulated
async def test_closing_commits_what_is_queued_and_refuses_what_comes_later() -> None:
    machine = LogFixture()
    wal = await machine.boot(group_bytes=2048)
    log = await wal.topic(TOPIC, epoch=1)
    queued = [log.submit(batch(f"{n}")) for n in range(10)]
    await log.close()
    assert outcomes(queued) == list(range(10))
    with pytest.raises(LogClosed):
        await fill(log, "late")
    await wal.close()
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered(*map(str, range(10)))


@simulated
async def test_closing_on_a_full_disk_lets_the_directory_go_and_loses_nothing() -> None:
    machine = LogFixture(capacity_bytes=ROOMY)
    wal = await machine.boot(group_bytes=4096, ballast_bytes=0)
    log = await wal.topic(TOPIC, epoch=1)
    stored = await filled_up(machine, log)
    await settle()
    machine.hardware.capacity_bytes = machine.hardware.used_bytes
    with pytest.raises(DiskFull):
        await wal.close()
    make_room(machine)
    log = await machine.reopened(epoch=2)
    assert await contents(log) == numbered(*stored)


@simulated
async def test_too_much_in_the_queue_makes_appends_wait_their_turn() -> None:
    machine = LogFixture()
    wal = await machine.boot(pending_bytes=4096)
    log = await wal.topic(TOPIC, epoch=1)
    await fill(log, "first")
    machine.disk.hold_syncs()
    made: list[Batch] = [batch(f"{n}") for n in range(30)]
    appends = [asyncio.ensure_future(log.append(each)) for each in made]
    await settle()
    waiting: list[asyncio.Future[CommitReceipt]] = [asyncio.ensure_future(log.append(batch("more")))]
    await settle()
    assert wal.committer.pending_bytes <= 31 * made[0].header.size_bytes
    machine.disk.release_syncs()
    receipts = await asyncio.gather(*appends, *waiting)
    assert sorted(receipt.offset for receipt in receipts) == list(range(1, 32))
    assert wal.committer.pending_bytes == 0


@simulated
async def test_a_group_that_cannot_even_be_encoded_stops_the_log_and_leaves_no_producer_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wal = await LogFixture().boot()
    log = await wal.topic(TOPIC, epoch=1)
    await log.append(batch("a"))

    def broken(part: object) -> EncodedPart:
        raise ValueError("a bug")

    monkeypatch.setattr(EncodedPart, "of", broken)
    with pytest.raises(LogStopped, match="a bug"):
        await log.append(batch("b"))
    assert wal.committer.stopped is not None and log.current_offset() == 1
