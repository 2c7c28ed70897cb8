"""Segments are made beside the commits: nobody waits for another topic's, and what goes wrong is that topic's alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence

import pytest

from pydanube.core.commit.machine import ROLL_EARLY
from pydanube.core.commit.values import CommitReceipt
from pydanube.errors import DiskFailed, DiskFull, LogClosed, LogStopped, ResourcesShort
from pydanube.log.committer import Committer
from pydanube.log.layout import JOURNALS
from pydanube.log.segment_maker import MAKING_MAX
from pydanube.log.wal import TopicLog, Wal
from pydanube.ports import Write, WriteResult
from tests.harness.logs import (
    OTHER_TOPIC,
    TOPIC,
    LogFixture,
    WatchedDisk,
    batch,
    contents,
    fill,
    numbered,
    settle,
    simulated,
)

COLD = 300


async def cold_topics(wal: Wal, count: int = COLD) -> list[TopicLog]:
    return [await wal.topic(f"/default/cold{number}", epoch=1) for number in range(count)]


def slow_names(machine: LogFixture, seconds: float, part: str = "cold") -> list[int]:
    """Every call about the names and headers of such topics takes this long. How many were on their way at once."""
    at_once = [0, 0]

    async def slow(number: int) -> None:
        step = machine.disk.steps[number - 1]
        if part in step and ("tmp" in step or "directory" in step):
            at_once[0] += 1
            at_once[1] = max(at_once)
            await machine.clock.sleep(seconds)
            at_once[0] -= 1

    machine.disk.before_step = slow
    return at_once


async def longest_commit(
    machine: LogFixture, busy: TopicLog, while_: Sequence[asyncio.Future[CommitReceipt]], pause: float = 0.001
) -> float:
    """Of appends to `busy`, one after the other, as long as those are undecided."""
    longest = 0.0
    while not all(future.done() for future in while_):
        began = machine.clock.elapsed()
        await busy.append(batch("busy"))
        longest = max(longest, machine.clock.elapsed() - began)
        await machine.clock.sleep(pause)
    return longest


async def a_busy_topic_beside_cold_ones(machine: LogFixture) -> tuple[float, float, int]:
    """The busy one's longest commit, how long all took, and how many segments were made at once."""
    wal = await machine.boot()
    busy = await wal.topic(TOPIC, epoch=1)
    await fill(busy, "first")
    logs = await cold_topics(wal)
    at_once = slow_names(machine, 0.01)
    began = machine.clock.elapsed()
    cold = [log.submit(batch("a", topic=log.topic)) for log in logs]
    longest = await longest_commit(machine, busy, cold)
    took = machine.clock.elapsed() - began
    assert [future.result().offset for future in cold] == [0] * COLD
    machine.cut_power()
    after = await machine.boot()
    assert await contents(await after.topic("/default/cold17", epoch=2)) == numbered("a")
    return longest, took, at_once[1]


# --- others go on -----------------------------------------------------------------------------------


@simulated
async def test_a_busy_topic_does_not_wait_for_the_segments_of_three_hundred_cold_ones() -> None:
    longest, took, at_once = await a_busy_topic_beside_cold_ones(LogFixture())
    assert longest < 0.001, "its own file is as quick as ever"
    assert at_once == MAKING_MAX
    assert took < 1.2 * COLD / MAKING_MAX * 6 * 0.01, "a segment takes six calls, and so many are made side by side"


def test_a_log_that_waits_for_segments_between_two_groups_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    commit_group = Committer._commit_group

    async def with_segments_inside(self: Committer) -> None:
        self._segments.begin_where_needed(list(self._machine.ready))
        await asyncio.gather(*self._segments.tasks.values())
        await commit_group(self)

    monkeypatch.setattr(Committer, "_commit_group", with_segments_inside)
    found: list[float] = []

    @simulated
    async def run() -> None:
        found.append((await a_busy_topic_beside_cold_ones(LogFixture()))[0])

    run()
    assert found[0] > 1.0


@simulated
async def test_a_roll_by_size_keeps_its_own_topic_waiting_and_no_other() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=60_000)
    busy, rolls = await wal.topic(TOPIC, epoch=1), await wal.topic("/default/cold", epoch=1)
    await fill(busy, "b")
    await rolls.append(batch("x" * 60_000, topic=rolls.topic))
    slow_names(machine, 1.0)
    began = machine.clock.elapsed()
    waiting = [rolls.submit(batch(text, topic=rolls.topic)) for text in "yz"]
    assert await longest_commit(machine, busy, waiting, pause=0.05) < 0.001
    assert machine.clock.elapsed() - began >= 3.0
    assert [future.result().offset for future in waiting] == [1, 2]
    assert [segment.first_offset for segment in rolls.segments] == [0, 1]


@simulated
async def test_the_file_of_the_commit_journal_is_made_beside_the_commits() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=1 << 20)
    busy = await wal.topic(TOPIC, epoch=1)
    await fill(busy, "first")
    machine.disk.hold_syncs("spare")
    opening = asyncio.create_task(cold_topics(wal, 8))
    await settle()
    assert machine.disk.syncs_waiting == 1 and not opening.done()
    await busy.append(batch("meanwhile"))
    machine.disk.release_syncs()
    logs = await opening
    await asyncio.gather(*(log.prepare() for log in logs))
    await asyncio.gather(*(log.append(batch("a", topic=log.topic)) for log in logs))
    assert wal.committer.journaled_groups > 0


@simulated
async def test_nobody_waits_while_the_journal_before_is_emptied() -> None:
    machine = LogFixture()
    wal = await machine.boot(journal_bytes=8192)
    logs = await cold_topics(wal, 6)
    await asyncio.gather(*(log.prepare() for log in logs))
    expected = []
    machine.disk.hold_syncs(".wal")  # of the files that the first journal vouches for
    for number in range(12):
        futures = [log.submit(batch(f"{number}".ljust(200, "x"), topic=log.topic)) for log in logs[:2]]
        await settle()
        if not all(future.done() for future in futures):
            break
        expected.append(f"{number}".ljust(200, "x"))
    retiring = wal.committer._journal.retiring
    assert retiring is not None and not retiring.done(), "a journal was full, and its files cannot be synced"
    machine.disk.release_syncs()
    machine.disk.hold_syncs("cold5")
    await asyncio.gather(*futures)
    assert len(expected) > 3
    machine.disk.release_syncs()
    for log in logs[:2]:
        assert list((await contents(log)).values())[: len(expected)] == expected


@simulated
async def test_topics_that_were_opened_together_roll_at_different_times() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_seconds=1000.0)
    logs = await cold_topics(wal, 40)
    await asyncio.gather(*(log.append(batch("a", topic=log.topic)) for log in logs))
    rolled = []
    for _ in range(1100 // 50):
        await machine.clock.sleep(50)
        await asyncio.gather(*(log.append(batch("a", topic=log.topic)) for log in logs))
        rolled.append(sum(len(log.segments) > 1 for log in logs))
    first = 1000 * (1 - ROLL_EARLY)
    assert rolled[int(first / 50) - 2] == 0 and rolled[1000 // 50] == 40
    steps = [after - before for before, after in itertools.pairwise(rolled)]
    assert max(steps) <= 25, "a fifth of the time is theirs to spread over"


# --- what may happen meanwhile ----------------------------------------------------------------------


@simulated
async def test_nothing_of_a_log_is_formed_while_its_segment_is_made() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic("/default/cold", epoch=1)
    slow_names(machine, 1.0)
    first = log.submit(batch("a", topic=log.topic))
    await machine.clock.sleep(0.5)
    later = [log.submit(batch(text, topic=log.topic)) for text in "bc"]
    await settle()
    assert log.active is None and log.head == 0 and len(log.pending) == 3
    assert [(await future).offset for future in (first, *later)] == [0, 1, 2]
    assert len(machine.segments("/default/cold")) == 1


@simulated
async def test_closing_waits_for_the_segment_and_commits_what_waited_for_it() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic("/default/cold", epoch=1)
    slow_names(machine, 1.0)
    done = log.submit(batch("a", topic=log.topic))
    await settle()
    await log.close()
    assert done.result().offset == 0
    with pytest.raises(LogClosed):
        await log.append(batch("b", topic=log.topic))
    assert wal.size_bytes() == 0
    again = await wal.topic("/default/cold", epoch=2)
    assert await contents(again) == numbered("a") and not again.recovered.damage


@simulated
async def test_a_segment_that_is_prepared_while_its_log_closes_is_not_forgotten() -> None:
    """It would count as the log's for ever, and stand behind the end that wal.ckpt names."""
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic("/default/cold", epoch=1)
    slow_names(machine, 1.0)
    preparing = asyncio.create_task(log.prepare())
    await settle()
    await log.close()
    await preparing
    assert wal.size_bytes() == 0 and log.active is not None
    again = await wal.topic("/default/cold", epoch=2)
    assert (again.head, again.recovered.damage) == (0, [])


@simulated
async def test_who_gives_up_waiting_for_a_segment_does_not_take_it_along() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic("/default/cold", epoch=1)
    slow_names(machine, 1.0)
    for wait in (log.prepare, log.roll):
        waiting = asyncio.create_task(wait())
        await machine.clock.sleep(2.5)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert (await log.append(batch("a", topic=log.topic))).offset == log.head - 1
    assert len(log.segments) == 2 == len(machine.segments("/default/cold"))
    assert await contents(log) == numbered("a", "a")


@simulated
async def test_a_roll_for_room_meets_one_that_is_under_way_and_makes_no_second() -> None:
    machine = LogFixture()
    wal = await machine.boot(segment_bytes=1024)
    log = await wal.topic("/default/cold", epoch=1)
    await log.append(batch("x" * 2000, topic=log.topic))
    slow_names(machine, 1.0)
    done = log.submit(batch("y", topic=log.topic))
    await settle()
    rolling = asyncio.create_task(log.roll())
    assert (await done).offset == 1
    await rolling
    assert [segment.first_offset for segment in log.segments] in ([0, 1], [0, 1, 2])


@simulated
async def test_a_reservation_that_grows_while_the_segment_is_made_lets_the_batch_go() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    log = await wal.topic("/default/cold", epoch=1)
    log.reserve(0)
    slow_names(machine, 1.0)
    done = log.submit(batch("a", topic=log.topic))
    await machine.clock.sleep(0.5)
    log.reserve(10)
    assert (await done).offset == 0


@pytest.mark.parametrize("power", [True, False], ids=["power cut", "kill"])
@simulated
async def test_a_crash_between_any_two_disk_calls_of_a_roll_loses_nothing_of_it_or_of_the_others(power: bool) -> None:
    for step in range(1, 200):
        machine = LogFixture(step)
        wal = await machine.boot(segment_bytes=1024, journal_bytes=8192)
        logs = [await wal.topic(topic, epoch=1) for topic in (TOPIC, OTHER_TOPIC)]
        told: dict[str, list[str]] = {log.topic: [] for log in logs}

        async def publish(log: TopicLog, told: list[str]) -> None:
            for number in range(4):
                text = f"{number}".ljust(600, "x")
                assert (await log.append(batch(text, topic=log.topic))).offset == number
                told.append(text)

        async def action(logs: list[TopicLog] = logs, told: dict[str, list[str]] = told) -> None:
            await asyncio.gather(*(publish(log, told[log.topic]) for log in logs))

        crashed = await machine.crash_during(action, step, power=power)
        if not crashed:
            break
        after = await machine.boot()
        for log in logs:
            again = await after.topic(log.topic, epoch=2)
            found = list((await contents(again)).values())
            assert found[: len(told[log.topic])] == told[log.topic] and not again.recovered.damage, step
    assert step > 20


# --- what may go wrong ------------------------------------------------------------------------------


class ShortDisk(WatchedDisk):
    """The system has no descriptor for calls of which `short` says so; nothing is done then."""

    short: Callable[[str], bool] = staticmethod(lambda step: False)
    was_short = 0

    async def _step(self, what: str) -> None:
        await super()._step(what)
        if self.short(what):
            self.was_short += 1
            raise ResourcesShort(what.partition(" ")[2], "Too many open files")

    async def write(self, writes: Sequence[Write], *, sync: bool) -> list[WriteResult]:
        try:
            return await super().write(writes, sync=sync)
        except ResourcesShort as error:
            return [error] * len(writes)

    async def sync(self, paths: Sequence[str]) -> list[WriteResult]:
        try:
            return await super().sync(paths)
        except ResourcesShort as error:
            return [error] * len(paths)


async def boot_short(machine: LogFixture, **config: int) -> tuple[Wal, ShortDisk]:
    machine.new_process()
    machine.disk = disk = ShortDisk(machine.disk.under)
    return await machine.open(**config), disk


@simulated
async def test_a_topic_that_gets_no_descriptor_for_its_segment_is_refused_alone_and_can_try_again() -> None:
    machine = LogFixture()
    wal, disk = await boot_short(machine)
    logs = await cold_topics(wal, 20)
    disk.short = lambda step: "create" in step and "cold7/" in step
    futures = [log.submit(batch("a", topic=log.topic)) for log in logs]
    await asyncio.wait(futures)
    refused = [log.topic for log, future in zip(logs, futures, strict=True) if future.exception() is not None]
    assert refused == ["/default/cold7"] and wal.committer.stopped is None
    error = futures[7].exception()
    assert isinstance(error, ResourcesShort) and error.retryable
    disk.short = lambda step: False
    assert (await logs[7].append(batch("a", topic=logs[7].topic))).offset == 0, "at once: the disk is not full"


@pytest.mark.parametrize("call", ["create", "write", "sync_directory", "make_directory", "rename", "sync ["])
@simulated
async def test_no_call_that_finds_no_descriptor_ever_stops_the_log(call: str) -> None:
    machine = LogFixture()
    wal, disk = await boot_short(machine, segment_bytes=2048, journal_bytes=8192, copy_bytes=1024)
    logs = await cold_topics(wal, 12)
    expected: dict[str, list[str]] = {log.topic: [] for log in logs}
    turn = [0]

    def now_and_then(step: str) -> bool:
        turn[0] += step.startswith(call)
        return step.startswith(call) and turn[0] % 3 == 0

    disk.short = now_and_then
    for number in range(30):
        texts = [f"{number}".ljust(10 + 37 * (number + place) % 500, "x") for place in range(len(logs))]
        futures = [log.submit(batch(text, topic=log.topic)) for log, text in zip(logs, texts, strict=True)]
        await asyncio.wait(futures)
        for log, text, future in zip(logs, texts, futures, strict=True):
            if future.exception() is None:
                expected[log.topic].append(text)
            else:
                assert isinstance(future.exception(), ResourcesShort)
        await machine.clock.sleep(0.06)
    assert wal.committer.stopped is None and disk.was_short > 0
    assert sum(map(len, expected.values())) > 12 * 30 / 4
    disk.short = lambda step: False
    for log in logs:
        await log.append(batch("last", topic=log.topic))
        assert list((await contents(log)).values()) == [*expected[log.topic], "last"]
    machine.cut_power()
    after = await machine.boot()
    for topic, texts in expected.items():
        again = await after.topic(topic, epoch=2)
        assert list((await contents(again)).values()) == [*texts, "last"]


@simulated
async def test_a_name_that_cannot_be_synced_for_want_of_a_descriptor_is_synced_later_and_the_log_waits() -> None:
    """The segment is there already: refusing would leave one behind that nobody knows of."""
    machine = LogFixture()
    wal, disk = await boot_short(machine)
    log, other = await wal.topic("/default/cold", epoch=1), await wal.topic(TOPIC, epoch=1)
    disk.short = lambda step: step.startswith("sync_directory") and "cold" in step and machine.clock.elapsed() < 5
    done = log.submit(batch("a", topic=log.topic))
    await other.append(batch("b"))
    assert not done.done()
    assert (await done).offset == 0
    assert machine.clock.elapsed() >= 5 and len(machine.segments("/default/cold")) == 1


@simulated
async def test_a_failed_sync_of_the_name_stops_the_log_whoever_asked_for_the_segment() -> None:
    for ask in (lambda log: log.prepare(), lambda log: log.append(batch("a", topic=log.topic))):
        machine = LogFixture()
        wal = await machine.boot()
        log = await wal.topic("/default/cold", epoch=1)

        async def fail(number: int, machine: LogFixture = machine) -> None:
            if machine.disk.steps[number - 1].startswith("sync_directory"):
                raise DiskFailed("d", "sync", "input/output error")

        machine.disk.before_step = fail
        await asyncio.gather(ask(log), return_exceptions=True)
        assert wal.committer.stopped is not None
        with pytest.raises(LogStopped):
            await log.append(batch("a", topic=log.topic))


@simulated
async def test_a_log_that_stops_refuses_whatever_waits_for_a_segment() -> None:
    machine = LogFixture()
    wal = await machine.boot()
    busy, cold = await wal.topic(TOPIC, epoch=1), await wal.topic("/default/cold", epoch=1)
    await fill(busy, "a")
    slow_names(machine, 1.0)
    waiting = cold.submit(batch("a", topic=cold.topic))
    await settle()
    machine.disk.all_syncs_fail = True
    with pytest.raises(LogStopped):
        await busy.append(batch("b"))
    with pytest.raises(LogStopped):
        await waiting
    await wal.close()


@simulated
async def test_a_full_disk_refuses_the_logs_that_have_no_segment_and_lets_them_go_on_when_there_is_room() -> None:
    machine = LogFixture(capacity_bytes=40_000)
    wal = await machine.boot(ballast_bytes=4096, group_bytes=4096)
    await machine.create("big", bytes(machine.hardware.free_bytes))
    logs = await cold_topics(wal, 7)
    futures = [log.submit(batch("a", topic=log.topic)) for log in logs]
    await asyncio.wait(futures)
    assert {type(future.exception()) for future in futures} == {DiskFull} and wal.committer.stopped is None
    await machine.remove("big")
    await machine.clock.sleep(1)
    assert [(await log.append(batch("a", topic=log.topic))).offset for log in logs] == [0] * 7
    assert JOURNALS not in machine.files("tmp")
